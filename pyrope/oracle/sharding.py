"""Whether a function splits a sequence among ranks so that each position is held once, and what it does wrong instead.

A candidate is ``fn(n, rank, size) -> positions``: those of the tokens that a rank holds, in the whole sequence. Any
split is right that gives every position of 0 … n−1 to one rank, in any order. The positions alone show which mistake
was made; a lost remainder or padding shows only at lengths that do not divide evenly, which a candidate may refuse.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from .. import checks
from ..backend import on_host
from .candidate import message_of
from .report import Failure, Finding, Report

Sharding: TypeAlias = Callable[[int, int, int], Any]
EVEN = ((64, 4), (48, 3), (48, 2), (32, 1))  # n and size, n a multiple of 8·size; four ranks show most, one shows least
UNEVEN = ((50, 3), (51, 4), (33, 2), (7, 3), (3, 4))
_EXPECTED = "each position of 0 … n−1 on one rank"
_FIX = "return the positions that a rank holds, as integers; a ValueError may refuse a length that cannot be split"


class Split(NamedTuple):
    """The positions that each rank holds, and what is wrong with them."""

    n: int
    shards: list[list[int]]
    missing: set[int]
    twice: set[int]  # or more often
    outside: set[int]  # of 0 … n−1

    @property
    def is_even(self) -> bool:
        return self.n % len(self.shards) == 0

    @property
    def shared(self) -> set[int]:
        """The positions that end a chunk of one rank and begin one of another."""
        pairs = [*itertools.permutations(map(set, self.shards), 2)]
        return {m for m in self.twice if any({m - 1, m} <= x and {m, m + 1} <= y for x, y in pairs)}

    def is_counted_from_1(self) -> bool:
        """Whether the positions begin at 1, or at what one rank holds."""
        held = sorted(m for shard in self.shards for m in shard)
        return any(held == [*range(first, first + self.n)] for first in (1, self.n // len(self.shards)))

    def is_padded(self) -> bool:
        """Whether every token is held, and positions from n on besides, or any that make the shards equally long."""
        beyond = len(self.outside) > self.is_even and min(self.outside) >= self.n and not self.twice
        alike = not self.is_even and len({*map(len, self.shards)}) == 1 and not self.shared
        return not self.missing and (beyond or alike)

    def lacks_its_end(self) -> bool:
        """Whether a few of the last positions are lost, and nothing else is wrong."""
        few = self.is_even < len(self.missing) < 2 * len(self.shards) and not (self.twice or self.outside)
        return few and self.missing == set(range(self.n - len(self.missing), self.n))

    def is_off_at_seams(self) -> bool:
        """Whether positions are held twice, or missing one at a time, only where a chunk ends."""
        ends = {m for shard in self.shards for m in shard if m - 1 not in shard or m + 1 not in shard}
        alone = all(not self.missing & {m - 1, m + 1} for m in self.missing) and any(self.shards)
        return self.twice <= self.shared & ends and alone and self.outside <= {-1, self.n}


# A name of `mistakes.SHARDING`, and the positions that show it; the first that fits.
_SIGNS: tuple[tuple[str, Callable[[Split], bool]], ...] = (
    ("positions local to the rank",
     lambda s: bool(s.twice) and all(sorted(x) == [*range(len(x))] and len(x) < s.n for x in s.shards)),
    ("first chunk repeated", lambda s: all(len(x) > 1 and x[: len(x) // 2] == x[len(x) // 2 :] for x in s.shards)),
    ("rank ignored", lambda s: len(s.shards) > 1 and any(s.shards) and len({*map(frozenset, s.shards)}) == 1),
    ("counted from 1", Split.is_counted_from_1),
    ("padding counted", Split.is_padded),
    ("remainder lost", Split.lacks_its_end),
    ("off by one at the seams", Split.is_off_at_seams),
    ("unexplained", lambda s: True),
)  # fmt: skip


def finding(n: int, shards: list[list[int]]) -> Finding | None:
    """The first mistake that the positions of all ranks show."""
    held, every = Counter(m for shard in shards for m in shard), set(range(n))
    twice = {m for m, count in held.items() if count > 1}
    wrong = {"missing": every - held.keys(), "held more than once": twice, "outside": held.keys() - every}
    if not any(wrong.values()):
        return None
    fact = "; ".join(f"{words}: {_few(sorted(positions))}" for words, positions in wrong.items() if positions)
    name = next(name for name, shows in _SIGNS if shows(Split(n, shards, *wrong.values())))
    rank = next((r for r, shard in enumerate(shards) if r and shard), 0)
    return Finding(
        name, f"{n} tokens on {len(shards)} ranks: {fact}", f"rank {rank} holds {_few(shards[rank]) or 'nothing'}"
    )


def _few(positions: list[int]) -> str:
    return ", ".join(map(str, positions[:8])) + (f", … ({len(positions)} of them)" if len(positions) > 8 else "")


def _row(positions: Any) -> list[int]:
    """Positions (n,), or the rows (b, n) of a batch, which must be alike."""
    m = checks.positions("positions", on_host(positions))
    rows = m.reshape(-1, m.shape[-1]) if m.size and m.ndim else m.reshape(1, -1)
    if (rows != rows[0]).any():
        raise TypeError(f"positions must be (n,), or the same in each row, had shape {m.shape}")
    return list(map(int, rows[0]))


def check_sharding(fn: Sharding) -> Report:
    """The verdict about a function (n, rank, size) -> positions; see the top of this file.

    >>> check_sharding(lambda n, rank, size: range(rank, n, size)).verdict
    'right'
    >>> check_sharding(lambda n, rank, size: range(n // size)).faults
    ('positions local to the rank',)
    """
    taken, refused = dict[tuple[int, int], list[list[int]]](), list[str]()
    for n, size in EVEN + UNEVEN:
        shards = list[list[int]]()
        try:
            for rank in range(size):
                shards.append(_row(fn(n, rank, size)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, too: it must not end the caller
            if (n, size) in EVEN or not isinstance(error, ValueError | AssertionError):
                received = f"n={n}, rank={len(shards)}, size={size}"
                failure = Failure(f"{type(error).__name__}: {message_of(error)}", received, _FIX, error)
                return Report("sharding", _EXPECTED, "not judged", failure=failure)
            refused.append(f"{n} tokens on {size} ranks")
            continue
        if (wrong := finding(n, shards)) is not None:  # the first: a remainder would hide what is wrong without one
            return Report("sharding", _EXPECTED, "wrong", (wrong,))
        taken[n, size] = shards
    tried = f"{len(taken)} splits, tokens on ranks: {', '.join(f'{n} on {size}' for n, size in taken)}"
    notes = (_balance(taken[EVEN[0]]), *[f"refused, which is no mistake: {', '.join(refused)}"] * bool(refused))
    return Report("sharding", _EXPECTED, "right", tried=tried, notes=notes)


def _balance(shards: list[list[int]]) -> str:
    work, size = [sum(m + 1 for m in shard) for shard in shards], len(shards)
    busiest = f"the busiest of {size} ranks has {max(work) * size / sum(work):.2f} times the mean work"
    return f"under a causal mask, with {sum(map(len, shards))} tokens, {busiest}"


def assert_sharding(fn: Sharding) -> None:
    """Raises `Mismatch`, with the report as its message, unless `check_sharding` says that fn is right."""
    __tracebackhide__ = True
    check_sharding(fn).raise_unless_ok()
