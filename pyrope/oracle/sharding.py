"""Whether a function splits a sequence among ranks so that each position is held once, and what it does wrong instead.

A candidate is ``fn(n, rank, size) -> positions``: those of the tokens that a rank holds, in the whole sequence. Any
split is right that gives every position of 0 … n−1 to one rank, in any order. The positions alone show which mistake
was made; a lost remainder or padding shows only at lengths that do not divide evenly, which a candidate may refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from .. import checks
from ..backend import on_host
from .candidate import message_of
from .report import Failure, Finding, Report

Sharding: TypeAlias = Callable[[int, int, int], Any]
EVEN = ((64, 4), (48, 3), (48, 2), (32, 1))  # n and size, n a multiple of 8·size; four ranks show most, one shows least
UNEVEN = ((50, 3), (51, 4), (33, 2), (7, 3), (3, 4))
_EXPECTED = "each position of 0 … n−1 on one rank"
_FIX = "return the positions that a rank holds, as integers; a ValueError may refuse a length that cannot be split"

# Names of `mistakes.SHARDING`, and how the positions that several ranks hold, of n, show them; the first that fits.
_PATTERNS: dict[str, Callable[[int, list[list[int]]], bool]] = {
    "positions local to the rank": lambda n, shards: all(
        len(held) < n and sorted(held) == [*range(len(held))] for held in shards
    ),
    "first chunk repeated": lambda n, shards: all(held and held == 2 * held[: len(held) // 2] for held in shards),
    "rank ignored": lambda n, shards: len({*map(frozenset, shards)}) == 1,
}


def finding(n: int, shards: list[list[int]]) -> Finding | None:
    """The mistake that the positions of all ranks show."""
    held, every = Counter(m for shard in shards for m in shard), set(range(n))
    wrong = {
        "positions beyond the sequence": held.keys() - every,
        "positions held twice": {m for m, count in held.items() if count > 1},
        "positions lost": every - held.keys(),
    }
    if not any(wrong.values()):
        return None
    fact = "; ".join(f"{name}: {_few(sorted(positions))}" for name, positions in wrong.items() if positions)
    several = any(shards[1:])
    names = [*(name for name, shows in _PATTERNS.items() if several and shows(n, shards)), *filter(wrong.get, wrong)]
    rank = next((r for r, shard in enumerate(shards) if r and shard), 0)
    where = f"rank {rank} holds {_few(shards[rank]) or 'nothing'}"
    return Finding(names[0], f"{n} tokens on {len(shards)} ranks: {fact}", where)


def _few(positions: list[int]) -> str:
    return ", ".join(map(str, positions[:8])) + (f", … ({len(positions)} of them)" if len(positions) > 8 else "")


def _row(positions: Any) -> list[int]:
    """Positions (n,), or the rows (b, n) of a batch, which must be alike."""
    m = checks.positions("positions", on_host(positions))
    rows = m.reshape(-1, m.shape[-1]) if m.size and m.ndim else m.reshape(1, -1)
    if (rows != rows[0]).any():
        raise TypeError(f"positions must be (n,), or the same in each row, had shape {m.shape}")
    return list(map(int, rows[0]))


def _shards(fn: Sharding, n: int, size: int) -> list[list[int]] | Failure:
    """The positions that each rank holds, or why the function does not say."""
    shards = list[list[int]]()
    try:
        for rank in range(size):
            shards.append(_row(fn(n, rank, size)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too: it must not end the caller
        received = f"n={n}, rank={len(shards)}, size={size}"
        return Failure(f"{type(error).__name__}: {message_of(error)}", received, _FIX, error)
    return shards


def check_sharding(fn: Sharding) -> Report:
    """The verdict about a function (n, rank, size) -> positions: those that a rank holds, in any order.

    >>> check_sharding(lambda n, rank, size: range(rank, n, size)).verdict
    'right'
    >>> check_sharding(lambda n, rank, size: range(n // size)).faults
    ('positions local to the rank',)
    """
    taken, refused = dict[tuple[int, int], list[list[int]]](), list[str]()
    for n, size in EVEN + UNEVEN:
        shards = _shards(fn, n, size)
        if not isinstance(shards, Failure):
            if (wrong := finding(n, shards)) is not None:  # the first: a remainder would hide what is wrong without one
                return Report("sharding", _EXPECTED, "wrong", (wrong,))
            taken[n, size] = shards
        elif (n, size) in UNEVEN and isinstance(shards.error, ValueError | AssertionError):
            refused.append(f"{n} on {size}")
        else:
            return Report("sharding", _EXPECTED, "not judged", failure=shards)
    tried = f"{len(taken)} splits, tokens on ranks: {', '.join(f'{n} on {size}' for n, size in taken)}"
    tried += f"; refused, which is no mistake: {', '.join(refused)}" * bool(refused)
    return Report("sharding", _EXPECTED, "right", tried=tried, notes=(_balance(taken[EVEN[0]]),))


def _balance(shards: list[list[int]]) -> str:
    work, size = [sum(m + 1 for m in shard) for shard in shards], len(shards)
    busiest = f"the busiest of {size} ranks has {max(work) * size / sum(work):.2f} times the mean work"
    return f"under a causal mask, with {sum(map(len, shards))} tokens, {busiest}"


def assert_sharding(fn: Sharding) -> None:
    """Raises `Mismatch`, with the report as its message, unless `check_sharding` says that fn is right."""
    __tracebackhide__ = True
    check_sharding(fn).raise_unless_ok()
