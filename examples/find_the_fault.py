"""What does a broken RoPE do? Four mistakes that really happened: each is detected, explained and repaired.

    python examples/find_the_fault.py

check_rotation says how a function differs from what you mean; identify needs no expectation and says what it does.
"""

import textwrap
from typing import Any

import numpy as np

import pyrope
from pyrope import Rope

MEANT = Rope(head_dim=64, base=10000.0, layout="half")


def angles(positions: Any) -> Any:
    return positions[:, None] * 10000.0 ** -(np.arange(0, 64, 2) / 64)


def halves(x: Any, angle: Any) -> Any:
    a, b, cos, sin = x[..., :32], x[..., 32:], np.cos(angle), np.sin(angle)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def adjacent(x: Any, positions: Any) -> Any:
    """Pairs (0, 1), (2, 3), … as in GPT-J, for weights that were trained with halves."""
    a, b, cos, sin = x[..., ::2], x[..., 1::2], np.cos(angles(positions)), np.sin(angles(positions))
    return np.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(x.shape).astype(x.dtype)


def one_too_high(x: Any, positions: Any) -> Any:
    return halves(x, angles(positions + 1))


def backwards(x: Any, positions: Any) -> Any:
    return halves(x, -angles(positions))


def interpolated(x: Any, positions: Any) -> Any:
    """A factor of 4 from another model's config."""
    return halves(x, angles(positions) / 4)


def main() -> None:
    for broken in (adjacent, one_too_high, backwards, interpolated):
        report = pyrope.check_rotation(broken, MEANT, max_position=8191)
        print(f"{broken.__name__}: {report.verdict}: {', '.join(report.faults)}")
        for words in report.findings[0].fact, f"cause: {report.findings[0].cause}", f"fix: {report.findings[0].fix}":
            print(textwrap.fill(words, 80, initial_indent="    ", subsequent_indent="        "))
        print()
    print("and what the last function does, read from its outputs alone:\n")
    print(pyrope.identify(interpolated, head_dim=64, max_position=8191))
    repaired = pyrope.check_rotation(lambda x, m: halves(x, angles(m)), MEANT, max_position=8191)
    print(f"\nrepaired: {repaired.verdict}, {repaired.precision}")


if __name__ == "__main__":
    main()
