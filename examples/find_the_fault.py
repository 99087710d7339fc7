"""What does a broken RoPE do? Four mistakes that really happened: each is found, explained, and repaired.

    python examples/find_the_fault.py

check_rotation says what differs from what you mean; identify reads what a function does without being told.
"""

import argparse
from typing import Any

import numpy as np

import pyrope
from pyrope import Rope

MEANT = Rope(head_dim=64, base=10000.0, layout="half")
THETA = 10000.0 ** -(np.arange(0, 64, 2) / 64)


def halves(x: Any, angles: Any) -> Any:
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def adjacent(x: Any, positions: Any) -> Any:
    """Pairs (0, 1), (2, 3), … as GPT-J has them, for weights that want halves."""
    angles = positions[:, None] * THETA
    cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., ::2], x[..., 1::2]
    return np.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(x.shape).astype(x.dtype)


def one_too_high(x: Any, positions: Any) -> Any:
    return halves(x, (positions + 1)[:, None] * THETA)


def backwards(x: Any, positions: Any) -> Any:
    return halves(x, -positions[:, None] * THETA)


def interpolated(x: Any, positions: Any) -> Any:
    """A factor of 4 from another model's config."""
    return halves(x, positions[:, None] * (THETA / 4))


def main() -> None:
    for broken in (adjacent, one_too_high, backwards, interpolated):
        report = pyrope.check_rotation(broken, MEANT, max_position=8191)
        finding = report.findings[0]
        print(f"{broken.__name__}: {report.verdict}: {', '.join(report.faults)}")
        print(f"    evidence  {finding.evidence.partition(';')[0]}")
        print(f"    cause     {finding.cause}\n    fix       {finding.fix}\n")
    print("and what the last one is, read out of it without being told:\n")
    print(pyrope.identify(interpolated, head_dim=64, max_position=8191))
    repaired = pyrope.check_rotation(lambda x, m: halves(x, m[:, None] * THETA), MEANT, max_position=8191)
    print(f"\nrepaired: {repaired.verdict}, {repaired.precision}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()  # no options: all on the host
    main()
