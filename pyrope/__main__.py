"""The command `pyrope`, and `python -m pyrope`: quiet on Ctrl-C, also while the rest is still being imported."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line; 130 if it is interrupted before it has begun."""
    try:
        from .cli import main as run  # takes a moment: NumPy, and the oracle

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
