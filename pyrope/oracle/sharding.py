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
from .ask import message_of
from .explain import Fault
from .report import Failure, Report

Sharding: TypeAlias = Callable[[int, int, int], Any]
EVEN = ((64, 4), (48, 3), (48, 2), (32, 1))  # n and size, n a multiple of 8·size; four ranks show most, one shows least
UNEVEN = ((50, 3), (51, 4), (33, 2), (7, 3), (3, 4))


LOCAL = Fault(
    name="positions local to the rank", symptom="every rank has positions from 0 on",
    cause="every rank counts its own tokens, so that all ranks but the first rotate by wrong positions",
    fix="add the position of the rank's first token, or cut the shard out of positions made for the whole sequence",
)  # fmt: skip
REPEATED = Fault(
    name="first chunk repeated", symptom="the second half of a rank's positions is the first once more",
    cause="a rank with two chunks uses the positions of its first for both",
    fix="make the positions of each chunk from that chunk's own place in the sequence",
    happened="Megatron-LM#5243: 0, 3, 0, 3 in place of 0, 3, 4, 7",
)  # fmt: skip
HIGH = Fault(
    name="positions one too high", symptom="1 … n in place of 0 … n−1", cause="positions are counted from 1",
    fix="count positions from 0",
)  # fmt: skip
SEAMS = Fault(
    name="off by one at the seams", symptom="a position where two chunks meet is held twice, or by no rank",
    cause="the end of a chunk is taken as included where the next begins with it, or as excluded twice",
    fix="let one formula give the end of a chunk and the beginning of the next: n·i//chunks",
)  # fmt: skip
PADDING = Fault(
    name="padding counted", symptom="positions from n on, at lengths that do not divide evenly",
    cause="the length is rounded up to a multiple of the ranks, and padding gets positions of its own",
    fix="drop positions from n on, and mask the padding",
)  # fmt: skip
REMAINDER = Fault(
    name="remainder lost", symptom="the last positions are held by no rank, at lengths that do not divide evenly",
    cause="n//size tokens are given to each rank, and the n % size tokens at the end to none",
    fix="let shards differ by a token, as n·rank//size … n·(rank + 1)//size do, or refuse such lengths",
)  # fmt: skip
FROM_ONE = Fault(
    name="rank counted from 1", symptom="every rank holds what belongs to the next one, and the last what is beyond n",
    cause="ranks are counted from 1 where the formula counts from 0", fix="count ranks from 0, as MPI does",
)  # fmt: skip
NO_RANK = Fault(
    name="rank ignored", symptom="all ranks hold the same positions", cause="the rank has no effect",
    fix="let the rank say where its positions begin",
)  # fmt: skip
NOT_SPLIT = Fault(
    name="not split", symptom="every rank holds 0 … n−1", cause="rank and size have no effect", fix="use rank and size",
)  # fmt: skip
UNEXPLAINED = Fault(
    name="unexplained", symptom="some position is not held once", cause="no known mistake explains it",
    fix="give every position of 0 … n−1 to one rank",
)  # fmt: skip
FAULTS = (LOCAL, REPEATED, HIGH, SEAMS, PADDING, REMAINDER, FROM_ONE, NO_RANK, NOT_SPLIT)


def _fault(n: int, shards: list[list[int]]) -> Fault | None:
    """What is wrong with the shards of n positions."""
    held = Counter(m for shard in shards for m in shard)
    missing, twice = set(range(n)) - held.keys(), {m for m, count in held.items() if count > 1}
    beyond = {m for m in held if not 0 <= m < n}
    if not (missing or twice or beyond):
        return None
    if all(sorted(shard) == list(range(n)) for shard in shards):
        return NOT_SPLIT
    if twice and all(sorted(shard) == list(range(len(shard))) for shard in shards):
        return LOCAL
    if all(len(shard) > 1 and shard[: len(shard) // 2] == shard[len(shard) // 2 :] for shard in shards):
        return REPEATED
    if len(shards) > 1 and shards[0] and all(sorted(shard) == sorted(shards[0]) for shard in shards):
        return NO_RANK
    lowest, split_evenly = min(held, default=0), n % len(shards) == 0
    if lowest in (1, n // len(shards)) and not twice and sorted(held) == list(range(lowest, lowest + n)):
        return HIGH if lowest == 1 else FROM_ONE
    if not missing and not (split_evenly and beyond == {n}) and _padded(n, shards, beyond, twice):
        return PADDING
    lost = missing == set(range(n - len(missing), n)) and not (twice or beyond)
    if lost and len(missing) < 2 * len(shards) and not (split_evenly and len(missing) == 1):
        return REMAINDER
    ends = {m for shard in shards for m in shard if m - 1 not in shard or m + 1 not in shard}
    gaps = {m for m in missing if m - 1 not in missing and m + 1 not in missing}  # each beside the end of a chunk
    if twice <= ends and missing == gaps and beyond <= {-1, n} and max(held.values(), default=0) == 2 - (not twice):
        return SEAMS
    return UNEXPLAINED


def _padded(n: int, shards: list[list[int]], beyond: set[int], twice: set[int]) -> bool:
    """Whether every token is held, and the shards are as long as each other by positions that no token has: from n on,
    −1, or one that a token has already."""
    lengths = {len(shard) for shard in shards}
    if beyond and min(beyond) >= n and not twice:
        return True
    extra = sum(map(len, shards)) - n
    return len(lengths) == 1 and 0 < extra < len(shards) and beyond <= {-1} and len(twice | beyond) <= extra


def _evidence(n: int, shards: list[list[int]]) -> str:
    held = Counter(m for shard in shards for m in shard)
    parts = {
        "missing": sorted(set(range(n)) - held.keys()),
        "held more than once": sorted(m for m, count in held.items() if count > 1),
        "outside": sorted(m for m in held if not 0 <= m < n),
    }
    counts = "; ".join(f"{name}: {_few(positions)}" for name, positions in parts.items() if positions)
    rank = next((r for r, shard in enumerate(shards) if r and shard), 0)
    return f"{n} tokens on {len(shards)} ranks: {counts}; rank {rank} holds {_few(shards[rank])}"


def _few(positions: list[int]) -> str:
    return ", ".join(map(str, positions[:8])) + (f", … ({len(positions)} of them)" if len(positions) > 8 else "")


def _row(positions: Any) -> list[int]:
    """Positions (n,), or the rows (b, n) of a batch, which must be alike."""
    rows = positions.reshape(-1, positions.shape[-1]) if positions.ndim and positions.size else positions.reshape(1, -1)
    if (rows != rows[0]).any():
        raise TypeError(f"positions must be (n,), or the same in each row, had shape {positions.shape}")
    return list(map(int, rows[0]))


def check_sharding(fn: Sharding) -> Report:
    """The verdict about a function (n, rank, size) -> positions; see the top of this file.

    >>> check_sharding(lambda n, rank, size: range(rank, n, size)).verdict
    'right'
    >>> check_sharding(lambda n, rank, size: range(n // size)).faults
    ('positions local to the rank',)
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function of n, rank and size, was {type(fn).__name__}")
    expected = "each position of 0 … n−1 on one rank"
    refused, notes = list[str](), list[str]()
    for n, size in EVEN + UNEVEN:
        shards, calls = list[list[int]](), 0
        try:
            for rank in range(size):
                held = fn(n, rank, size)
                calls += 1
                shards.append(_row(checks.positions("positions", on_host(held))))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, too: it must not end the caller
            if (n, size) in UNEVEN and isinstance(error, ValueError | AssertionError):
                refused.append(f"{n} tokens on {size} ranks")
                continue
            reason, fix = (
                f"{type(error).__name__}: {message_of(error)}",
                "return the positions that a rank holds, as integers",
            )
            if calls == len(shards):  # it did not return
                fix = "mend what the function raises; a ValueError may refuse a length that cannot be split"
            failure = Failure(reason, f"n={n}, rank={len(shards)}, size={size}", fix, error)
            return Report("sharding", expected, "not judged", failure=failure)
        if (fault := _fault(n, shards)) is not None:  # the first: a remainder would only hide what is wrong without one
            finding = fault.finding(_evidence(n, shards))
            return Report("sharding", expected, "wrong", (finding,), notes=tuple(notes))
        if (n, size) == EVEN[0]:
            work = [sum(m + 1 for m in shard) for shard in shards]
            share = max(work) * size / sum(work)
            whose = f"under a causal mask, with {n} tokens, the busiest of {size} ranks"
            notes.append(f"{whose} has {share:.2f} times the mean work")
    if refused:
        notes.append(f"refused, which is no mistake: {', '.join(refused)}")
    return Report("sharding", expected, "right", notes=tuple(notes))


def assert_sharding(fn: Sharding) -> None:
    """Raises `Mismatch`, with the report as its message, unless `check_sharding` says that fn is right."""
    __tracebackhide__ = True
    check_sharding(fn).raise_unless_ok()
