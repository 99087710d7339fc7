"""What does a broken RoPE do? Four mistakes that really happened: each is detected, explained and repaired.

    python examples/find_the_fault.py [--backend cupy]

check_rotation says how a function differs from what you mean; identify needs no expectation and says what it does.
"""

import textwrap
from typing import Any

import pyrope
from pyrope import Rope
from pyrope.oracle import adapters

MEANT = Rope(head_dim=64, base=10000.0, layout="half")


def angles(positions: Any) -> Any:
    return positions[:, None] * 10000.0 ** -(pyrope.namespace(positions).arange(0, 64, 2) / 64)


def halves(x: Any, angle: Any) -> Any:
    xp, a, b = pyrope.namespace(x), x[..., :32], x[..., 32:]
    cos, sin = xp.cos(angle), xp.sin(angle)
    return xp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def adjacent(x: Any, positions: Any) -> Any:
    """Pairs (0, 1), (2, 3), … as in GPT-J, for weights that were trained with halves."""
    xp, a, b = pyrope.namespace(x), x[..., ::2], x[..., 1::2]
    cos, sin = xp.cos(angles(positions)), xp.sin(angles(positions))
    return xp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(x.shape).astype(x.dtype)


def one_too_high(x: Any, positions: Any) -> Any:
    return halves(x, angles(positions + 1))


def backwards(x: Any, positions: Any) -> Any:
    return halves(x, -angles(positions))


def interpolated(x: Any, positions: Any) -> Any:
    """A factor of 4 from another model's config."""
    return halves(x, angles(positions) / 4)


def say(name: str, words: str) -> None:
    print(textwrap.fill(f"    {name:<10}{words}", 80, subsequent_indent=" " * 14))


def main(backend: str = "numpy") -> None:
    there: Any = adapters.from_cupy if backend == "cupy" else lambda fn: fn
    for broken in (adjacent, one_too_high, backwards, interpolated):
        report = pyrope.check_rotation(there(broken), MEANT, max_position=8191)
        finding = report.findings[0]
        print(f"{broken.__name__}: {report.verdict}: {', '.join(report.faults)}")
        say("fact", finding.fact)
        say("cause", finding.cause)
        say("fix", finding.fix)
        print()
    print("and what the last function does, read from its outputs alone:\n")
    print(pyrope.identify(there(interpolated), head_dim=64, max_position=8191))
    repaired = pyrope.check_rotation(there(lambda x, m: halves(x, angles(m))), MEANT, max_position=8191)
    print(f"\nrepaired: {repaired.verdict}, {repaired.precision}")


if __name__ == "__main__":
    from command import command, run

    run(main, command(__doc__))
