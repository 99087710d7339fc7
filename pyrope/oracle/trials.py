"""The calls that a kernel may treat in a way of its own: lengths, consecutive positions, memory, extreme values.

Each trial is one call whose result must be right like any other; it carries the name of the mistake that it shows if it
is not. `run_trials` compares the results with what is expected, which is the truth or, for a candidate whose mistake is
known, the prediction of that mistake.

Many lengths are cheap, since most trials are rows of one long `Pool`, whose results are computed once.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..theta import Rope
from .ask import Behaviour, Unreadable, compiles, counts
from .floats import Float64, Int64
from .probe import Probe

# x (float64), positions -> what the candidate must return, and how far off each output may be
Expected: TypeAlias = Callable[[Any, Int64], tuple[Float64, Float64]]
_POWERS = (16, 32, 64, 128, 256, 512)  # rows at which kernels change their way, each tried with its neighbours
_USUAL = {*range(1, 10), 12, 24, 48, 96, 192, 384, 640, 1024, 4097, *(n + k for n in _POWERS for k in (-1, 0, 1))}
_EVERY, _LONGEST = 131, 4097  # all lengths below the first are tried
_LARGER = (
    *range(136, 257, 8), *range(288, 513, 32), *range(576, 1025, 64), *range(200, 1001, 100), 1023, 1025, 1280, 1500,
    1536, 2000, 2047, 2048, 2049, 2560, 3000, 4000, 4096,
)  # fmt: skip
_LARGEST = 2**20  # elements of x in the calls of these lengths
_COMPILED = (1, 2, 8, 17, 64, 129, 1024)  # where each new shape is compiled first
_ELSEWHERE = 500  # where consecutive positions begin that do not begin at 0
_FEW = 8  # rows of a trial of memory or values
_CLEARLY = 4  # times what is allowed: another path is far off, what is nearly not right everywhere is not
PATIENCE = 5.0  # CPU seconds after which no more than what is needed is tried: a NumPy candidate takes one
_BLOCK = 256  # rows of a pool that are computed at a time
_LAST = 513  # rows of the longest calls that end at the largest position
LENGTHS, CONSECUTIVE, POSITIONS = "some lengths wrong", "consecutive positions wrong", "order of positions matters"
MEMORY, VALUES, STEPS = "strides ignored", "not linear", "one row differs"
HEADS, BATCHES = "heads read as positions", "heads differ"
MISREAD, NEGATIVE = "positions misread", "negative positions wrong"
SWITCH = "switch at another length"
BY_ROW, ONE, SOME = "positions of a batch misread", "one position wrong", "some positions wrong"
_ALONE = ", all of them at position "
_FAULTS = (LENGTHS, CONSECUTIVE, POSITIONS, STEPS, HEADS, BATCHES, MEMORY, MISREAD, VALUES, NEGATIVE)


class Pool(NamedTuple):
    """Many rows; trials are calls of some of them, in heads that are multiples of the first, by −2, 4, −1, 2, −4, …."""

    x: Any  # (N, d)
    positions: Int64  # (N,), or (axes, N)

    def trial(self, fault: str, name: str, start: int, stop: int, lead: tuple[int, ...] = ()) -> Trial:
        """The call of these rows, with these axes before them: without, two heads where the rows are few, else one."""
        multiples = _multiples(lead or ((2,) if stop - start <= 64 else (1,))).astype(self.x.dtype)
        return Trial(fault, name, multiples * self.x[start:stop], self.positions[..., start:stop].copy(), self, start)


def _multiples(lead: tuple[int, ...]) -> Float64:
    """Powers of two, of both signs, (…, 1, 1): what is computed of one head is known of all."""
    return np.resize([1.0, -2.0, 4.0, -1.0, 2.0, -4.0], (*lead, 1, 1))


class Trial(NamedTuple):
    """One call."""

    fault: str  # the name of the mistake that shows if this goes wrong
    name: str  # what is particular about the call
    x: Any  # (…, n, d)
    positions: Int64  # (n,), or (axes, n)
    pool: Pool | None = None  # which it is a part of, and where that part begins
    start: int = 0
    needed: bool = True  # even where calls are slow


def trials(
    probe: Probe, by_call: bool, least: int = 0, compiled: bool = False, few: bool = False, counted: bool = False
) -> Iterator[Trial]:
    """All trials for this candidate, with positions from ``least`` on; those that may be left out come last, and are
    left out where few are enough, or each new shape is compiled. If its table depends on the largest position of a
    call, only calls that hold the largest position of all can be judged. If it counts its positions, scattered ones are
    no call of so many rows, so that lengths and heads are tried with positions from 0 on."""
    usual = sorted({probe.head_dim // 2, probe.head_dim, probe.head_dim + 1} | _USUAL)
    pools = _pools(probe, by_call)
    pools = pools._replace(scattered=pools.counted) if counted else pools
    more: tuple[Iterator[Trial], ...] = ()
    if not (compiled or few):
        large = _large(probe, {*usual, *_LARGER}, pools)
        more = _more_heads(probe, pools), large, _more_lengths(probe, set(usual), pools)
    lengths = _lengths(probe, _COMPILED if compiled else usual, pools)
    for trial in chain(lengths, _orders(probe), _axes(probe, compiled), _memory(probe), _values(probe), *more):
        if counted and trial.fault == CONSECUTIVE and trial.pool is pools.counted and not trial.start:
            continue  # a length that is tried already
        if not by_call or trial.positions.max(initial=-1) == probe.max_position:
            yield trial
    if least < 0 and not by_call:
        some = np.array([-1, 0, least, -(-least // 2), -min(7, -least), 1])
        yield Trial(NEGATIVE, f"positions from {least} on", probe.random(2, len(some), seed=25), probe.everywhere(some))


class Pools(NamedTuple):
    """The rows that trials of lengths are made of."""

    scattered: Pool  # the first n have positions below 8n, in no order, none of them next to another
    counted: Pool  # 0, 1, 2, …
    ending: Pool  # …, the largest position


def _pools(probe: Probe, by_call: bool) -> Pools:
    """Where a table depends on the largest position of a call, that is the first of those in no order."""
    top, rng = probe.max_position, np.random.default_rng(2104)
    n, last = min(_LONGEST, top + 1), min(_LAST, top + 1)
    at = 4 * np.arange(n) + rng.integers(0, 3, n) if 4 * n <= top else rng.permutation(n)
    for power in range(1, n.bit_length()):
        rng.shuffle(at[2**power : 2 ** (power + 1)])
    if by_call:
        at = np.insert(at[at != top], 0, top)[:n]
    counted = np.arange(min(_LONGEST + _ELSEWHERE, top + 1))
    return Pools(
        Pool(probe.random(n, seed=1), probe.apart(at)),
        Pool(probe.random(len(counted), seed=2), probe.everywhere(counted)),
        Pool(probe.random(last, seed=3), probe.everywhere(top + 1 - last + np.arange(last))),
    )


def _rows(n: int) -> str:
    return f"{n} row{'s' if n != 1 else ''}"


def _lengths(probe: Probe, lengths: Iterable[int], pools: Pools) -> Iterator[Trial]:
    """Each length with scattered and with consecutive positions, from 0 and from elsewhere."""
    top, last, counted = probe.max_position, len(pools.ending.x), len(pools.counted.x)
    for n in lengths:
        if n > top + 1:
            break
        yield pools.scattered.trial(LENGTHS, _rows(n), 0, n)
        yield pools.counted.trial(CONSECUTIVE, f"positions 0 to {n - 1}", 0, n)
        if n % 2:
            start = min(_ELSEWHERE, counted - n)
            yield pools.counted.trial(CONSECUTIVE, f"positions {start} to {start + n - 1}", start, start + n)
        elif n <= last:
            yield pools.ending.trial(CONSECUTIVE, f"positions {top + 1 - n} to {top}", last - n, last)


def _more_heads(probe: Probe, pools: Pools) -> Iterator[Trial]:
    """Every number of heads up to 40, and of batches up to 9, and some beyond."""
    n = min(5, probe.max_position + 1)
    heads, batches = ((h,) for h in (*range(1, 41), 48, 64, 96, 128)), ((b, 2) for b in (*range(1, 10), 16, 32))
    for lead in (*heads, *batches):
        name = f"x of shape {(*lead, n, probe.head_dim)}"
        yield pools.scattered.trial(BATCHES, name, 0, n, lead)._replace(needed=False)


def _large(probe: Probe, lengths: set[int], pools: Pools) -> Iterator[Trial]:
    """As many numbers as a prompt has in a model, in one of these lengths: an index, or a grid, may end before them."""
    n = min((n for n in lengths if 32 * n * probe.head_dim > _LARGEST), default=_LONGEST + 1)
    if n <= len(pools.scattered.x):
        name = f"x of shape {(32, n, probe.head_dim)}"
        yield pools.scattered.trial(BATCHES, name, 0, n, (32,))._replace(needed=False)


def _more_lengths(probe: Probe, usual: set[int], pools: Pools) -> Iterator[Trial]:
    """Every length up to 130, and many beyond, with scattered and, up to there, with consecutive positions: a path of
    its own may begin or be taken at any of them."""
    for n in sorted({*range(_EVERY), *_LARGER} - usual):
        if n > probe.max_position + 1 or n * probe.head_dim > _LARGEST:
            break
        yield pools.scattered.trial(LENGTHS, _rows(n), 0, n)._replace(needed=False)
        if 0 < n < _EVERY:
            yield pools.counted.trial(CONSECUTIVE, f"positions 0 to {n - 1}", 0, n)._replace(needed=False)


def _orders(probe: Probe) -> Iterator[Trial]:
    top = probe.max_position
    n = min(_FEW, top + 1)
    x, counted = probe.random(2, n, seed=21), np.arange(n)
    named = {
        "descending positions": counted[::-1],
        **{f"positions {step} apart": step * counted for step in (2, 3, 4, 8, 16, 64)},
        "one position for all rows": np.full(n, 5), "position 0 for all rows": np.zeros(n, np.int64),
        "two positions exchanged": np.where(np.abs(2 * counted - n + 1) == 1, n - 1 - counted, counted),
        "each position twice": counted // 2, "positions that start again": counted % max(n // 2, 1),
        "positions 0, 0, 0, 1, 2, …": np.maximum(counted - 2, 0), "positions from 1 on": counted + 1,
    }  # fmt: skip
    for name, at in named.items():
        if at.max() <= top:
            fault = CONSECUTIVE if name == "positions from 1 on" else POSITIONS
            yield Trial(fault, name, x, probe.everywhere(at.copy()))
    for edge in (2048, 4096):
        if edge + n <= top:
            yield Trial(CONSECUTIVE, f"positions around {edge}", x, probe.everywhere(edge - n // 2 + counted))
    one = x[:, :1].copy()
    for m in (*range(12), 64, 128, 500, 1000, 2047, 2048, 4096):  # as in decoding
        if m <= top:
            yield Trial(STEPS, f"position {m} alone, after those before it", one, probe.everywhere(np.array([m])))
    heads = probe.random(n, n, seed=22)
    yield Trial(HEADS, f"{n} heads of {n} rows", heads, probe.apart(_scattered(n)))


def _axes(probe: Probe, compiled: bool) -> Iterator[Trial]:
    """Batches of heads, as a model has them, and a head alone; a long call of two heads, where other long calls have
    one, so that numbers of heads and of rows can be told apart."""
    n = min(_FEW, probe.max_position + 1)
    few, counted, scattered = _scattered(min(5, n)), np.arange(n), _scattered(n)
    last = np.array([min(7, probe.max_position)])
    long = _scattered(min(96, probe.max_position + 1))
    shapes: list[tuple[str, tuple[int, ...], Int64]]
    shapes = [(BATCHES, (1, 5, n), scattered), (BATCHES, (3, 2, 1), last), (CONSECUTIVE, (2, 16, n), counted)]
    if not compiled:
        shapes += (BATCHES, (2, len(long)), long), (BATCHES, (4, 3, n), scattered), (BATCHES, (2, 1, 32, len(few)), few)
    for fault, shape, at in shapes:
        yield Trial(fault, f"x of shape {(*shape, probe.head_dim)}", probe.random(*shape, seed=26), probe.apart(at))
    by_row = np.ascontiguousarray(probe.random(2, n, 4, seed=27)).swapaxes(1, 2)
    yield Trial(BATCHES, "x as (b, n, h, d) in memory", by_row, probe.apart(scattered))
    yield Trial(BATCHES, "one row of one head", probe.random(1, seed=28), probe.apart(np.array([min(3, n - 1)])))


def _scattered(n: int) -> Int64:
    """0 … n−1 in an order that neither rises nor falls."""
    return np.random.default_rng(n).permutation(n)


def _memory(probe: Probe) -> Iterator[Trial]:
    """The same numbers, held in memory in every way that an array can be."""
    n, d = min(_FEW, probe.max_position + 1), probe.head_dim
    x, at = probe.random(2, n, seed=23), probe.apart(_scattered(n))
    longer = np.full((2, n + 5, d), 9, probe.dtype)
    longer[:, 2 : n + 2] = x
    one = np.broadcast_to(x[:1], x.shape)
    read_only = x.copy()
    read_only.flags.writeable = False
    raw = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = np.ndarray(x.shape, x.dtype, raw.data, offset=1)
    unaligned[...] = x
    by_row = np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)
    views = {
        "x as (n, h, d) in memory": by_row, "x as a part of a longer array": longer[:, 2 : n + 2],
        "heads that share their memory": one, "read-only x": read_only, "x that is not aligned": unaligned,
        "x in Fortran order": np.asfortranarray(x), "x with rows backwards in memory": x[:, ::-1].copy()[:, ::-1],
    }  # fmt: skip
    for name, view in views.items():
        yield Trial(MEMORY, name, view, at)
    fused = np.zeros((2, n, 3 * d), probe.dtype)
    fused[..., d : 2 * d] = x
    yield Trial(MEMORY, "x as a part of a fused projection", fused[..., d : 2 * d], at)
    wide, fixed = np.repeat(at, 2, axis=-1), at.copy()
    fixed.flags.writeable = False
    yield Trial(MISREAD, "strided positions", x, wide[..., ::2])
    yield Trial(MISREAD, "positions backwards in memory", x, at[..., ::-1].copy()[..., ::-1])
    yield Trial(MISREAD, "read-only positions", x, fixed)
    yield Trial(MISREAD, "int32 positions", x, at.astype(np.int32))


def _values(probe: Probe) -> Iterator[Trial]:
    """Rows of zeros, rows and calls much larger or smaller than others, and whole numbers."""
    n = min(_FEW, probe.max_position + 1)
    at, powers = probe.apart(_scattered(n)), (5, 8) if probe.dtype.name == "float16" else (60, 100)
    for name, power in (("large", powers[0]), ("small", -powers[0])):
        x = probe.random(2, n, seed=24)
        x[0, 0] *= probe.dtype.type(2.0**power)
        yield Trial(VALUES, f"a {name} row", x, at)
    x = probe.random(2, n, seed=24)
    for name, power in (("large", powers[1]), ("small", -powers[0]), ("very small", -powers[1])):
        yield Trial(VALUES, f"{name} x, times 2^{power}", x * probe.dtype.type(2.0**power), at)
    yield Trial(VALUES, "x of ones and minus ones", np.copysign(np.ones_like(x), x), at)
    x[0, 0] = 0
    yield Trial(VALUES, "a row of zeros", x, at)


class Outcome(NamedTuple):
    """What came of a trial."""

    trial: Trial
    wrong: str  # the first wrong output, in words; empty where all are right


@dataclass(frozen=True, eq=False)
class Expectation:
    """What is expected of any call."""

    expected: Expected
    by_row: bool = False  # whether the result of a row depends on where in the call it stands
    _pools: dict[int, tuple[Float64, Float64, set[int]]] = field(default_factory=dict)  # and the blocks that are known

    def of(self, trial: Trial) -> tuple[Float64, Float64]:
        """What a trial must return, and how far off each output may be."""
        if trial.pool is None or self.by_row:
            return self.expected(trial.x.astype(np.float64), trial.positions)
        rows = slice(trial.start, trial.start + trial.x.shape[-2])
        out, allowed = self._pool(trial.pool, rows)
        if trial.x.shape[:-2] == (1,):
            return out[None, rows], allowed[None, rows]
        multiples = _multiples(trial.x.shape[:-2])
        return multiples * out[rows], np.abs(multiples) * allowed[rows]

    def _pool(self, pool: Pool, wanted: slice) -> tuple[Float64, Float64]:
        """The results of a pool, of which these rows are known."""
        if id(pool.x) not in self._pools:
            self._pools[id(pool.x)] = np.empty(pool.x.shape), np.empty(pool.x.shape), set()
        out, allowed, known = self._pools[id(pool.x)]
        for start in range(wanted.start // _BLOCK * _BLOCK, wanted.stop, _BLOCK):
            if start not in known:
                known.add(start)
                rows = slice(start, start + _BLOCK)
                result = self.expected(pool.x[None, rows].astype(np.float64), pool.positions[..., rows])
                out[rows], allowed[rows] = (part[0] for part in result)
        return out, allowed


def hollow(x: Any) -> Any:
    """An array of the shape of x that holds one number: of calls that were right nothing else is needed any more."""
    out: Any = np.ndarray(x.shape, x.dtype, bytearray(x.itemsize), strides=(0,) * x.ndim)
    out.flags.writeable = x.flags.writeable
    return out


def cpu_seconds() -> float:
    """What this process and its children, as far as they have ended, have used: it does not depend on other load."""
    return sum(os.times()[:4])


def run_trials(
    probe: Probe, expected: Expectation, by_call: bool, least: int = 0, batched: bool = False, *, few: bool = False
) -> tuple[Behaviour, list[str]]:
    """What the candidate does wrong in some calls, by the name of the mistake, and what was not tried, in words. Few
    are tried of a candidate that is wrong already: the others are for when that is mended. Raises `Unreadable` if it
    refuses more than half of them, and takes none wrongly."""
    begin, compiled, outcomes, refused = cpu_seconds(), compiles(), list[Outcome](), dict[str, list[str]]()
    notes, errors, first_right = [], list[Unreadable](), list[Trial]()
    if compiled:
        notes.append(f"each new shape is compiled: of the lengths only {', '.join(map(str, _COMPILED))} were tried")
    for trial in trials(probe, by_call, least, compiled, few, counts()):
        if not trial.needed and cpu_seconds() - begin > PATIENCE:
            notes.append(f"its calls are slow: other lengths, from {trial.name} on, were not tried")
            break
        try:
            wrong = _compared(probe, expected, trial)
            first_right += [trial] * (not (wrong or first_right) and trial.x.size > 0)
            outcomes.append(Outcome(trial if wrong else trial._replace(x=hollow(trial.x), pool=None), wrong))
        except Unreadable as error:
            if trial.x.size:  # nothing at all may be refused
                errors.append(error)
                refused.setdefault(trial.fault, [f"not tried, since {error}"]).append(trial.name)
    if len(errors) > len(outcomes) and not any(o.wrong for o in outcomes):
        first, total = errors[0], len(errors) + len(outcomes)
        names = listed_names([o.trial.name for o in outcomes])
        reason = f"refuses {len(errors)} of {total} calls of many shapes, and takes {names or 'none'}: {first.reason}"
        raise Unreadable(reason, first.received, first.kind) from first.__cause__
    if again := (
        _right_now(probe, expected, outcomes)
        or _wrong_now(probe, expected, outcomes, first_right)
        or _earlier_positions(probe, expected, outcomes)
    ):
        return {"state between calls": again}, notes
    notes += [f"{listed_names(names)}: {reason}" for reason, *names in refused.values()]
    named = ({} if by_call else _at_positions(probe, expected, outcomes)) or _named(outcomes)
    if BATCHES in named and (exchanged := _exchanged(probe, expected, outcomes)):
        named[BATCHES] = f"{exchanged}; {named[BATCHES]}"
    with contextlib.suppress(*[Unreadable] * bool(named)):  # what is wrong anyway needs no claim
        named |= _by_batch_row(probe, expected, by_call) if batched else {}
    return named, notes


def at_the_switch(
    probe: Probe, rope: Rope, original: int, expected: Callable[[Any, Int64, Rope], tuple[Float64, Float64]]
) -> Behaviour:
    """What is wrong in calls half as long as the original length, as long, and one longer, of a candidate that takes
    the length of each call from its largest position."""
    wrong = []
    causes = {
        original: "the length is compared by >= instead of >",
        original + 1: "the largest position is compared instead of the length, which is one more",
    }
    for length in (original // 2, original, original + 1):
        if length < 2 or length - 1 > probe.max_position:
            continue
        at = np.unique([0, 1, length // 3, length // 2, length - 2, length - 1])
        x = probe.random(2, len(at), seed=31)
        with contextlib.suppress(Unreadable):
            y = probe.call(x, at)
            if words := _wrong(*expected(x.astype(np.float64), at, rope.at(length)), y, at):
                other = original if length > original else original + 1
                if length in causes and not _wrong(*expected(x.astype(np.float64), at, rope.at(other)), y, at):
                    words = f"it has the Θ of length {other}, so {causes[length]}"
                wrong.append(f"a call up to position {length - 1}, of length {length}: {words}")
    return {SWITCH: "; ".join(wrong)} if wrong else {}


def _right_now(probe: Probe, expected: Expectation, outcomes: list[Outcome]) -> str:
    """Which call was wrong, and is right now, in words: then nothing is to blame that is special about it."""
    for trial, wrong in [o for o in outcomes if o.wrong][:3]:
        with contextlib.suppress(Unreadable):
            if not _compared(probe, expected, trial):
                return f"{trial.name}: {wrong}; in the same call once more, all outputs are right"
    return ""


def _wrong_now(probe: Probe, expected: Expectation, outcomes: list[Outcome], first_right: list[Trial]) -> str:
    """How the first call that was right is wrong now, in words, where others were wrong."""
    with contextlib.suppress(Unreadable):
        for trial in first_right if any(o.wrong for o in outcomes) else ():
            if wrong := _compared(probe, expected, trial):
                return f"{trial.name}, which was right before {len(outcomes)} other calls: {wrong}"
    return ""


def _earlier_positions(probe: Probe, expected: Expectation, outcomes: list[Outcome]) -> str:
    """Which call is turned by the positions of an earlier one of the same length, in words. The earlier positions are
    several scattered ones, which no rule makes of others."""
    for k, (trial, wrong) in [(k, o) for k, o in enumerate(outcomes) if o.wrong and not counts()][:3]:
        shape = trial.positions.shape
        for other in [o.trial for o in outcomes[:k] if o.trial.fault == LENGTHS and not o.wrong]:
            if other.positions.shape != shape or shape[-1] < _FEW:
                continue
            with contextlib.suppress(Unreadable):
                y = probe.hand_over(trial.x, trial.positions)
                if not _wrong(*expected.expected(trial.x.astype(np.float64), other.positions), y, other.positions):
                    again = "the positions of an earlier call of the same length are used again"
                    return f"{again}: {trial.name} as in the call of {other.name} before it; {wrong}"
    return ""


def _exchanged(probe: Probe, expected: Expectation, outcomes: list[Outcome]) -> str:
    """Which row of a batch, or which head, holds the right result of which other one, in the first wrong call that has
    several, in words; empty if it holds no other's."""
    for trial in [o.trial for o in outcomes if o.wrong and o.trial.x.ndim in (3, 4)][:1]:
        with contextlib.suppress(Unreadable):
            (out, allowed), y = expected.of(trial), probe.hand_over(trial.x, trial.positions)
            for axis, what in ((-4, "batch row"), (-3, "head"))[4 - y.ndim :]:
                rights, bounds, got = (np.moveaxis(one, axis, 0) for one in (out, allowed, y))
                for i, part in enumerate(got):
                    fits = [bool((np.abs(part - rights[j]) <= bounds[j]).all()) for j in range(len(got))]
                    if any(fits) and not fits[i]:
                        where = f"in x of shape {trial.x.shape}"
                        return f"{where}, {what} {i} holds the right result of {what} {fits.index(True)}"
    return ""


def _at_positions(probe: Probe, expected: Expectation, outcomes: list[Outcome]) -> Behaviour:
    """Which positions are wrong, if some are in any call: those that are wrong in a long call are so in a short one, in
    no order, and those that are right in it are right there."""
    for trial, words in [o for o in outcomes if o.wrong and o.trial.x.shape[-2] > 7 and probe.axes is None][:1]:
        with contextlib.suppress(Unreadable):
            rows = _wrong_rows(*expected.of(trial), probe.hand_over(trial.x, trial.positions))
            bad, good = (np.unique(trial.positions[some]) for some in (rows, ~rows))
            if len(bad) < 2 or len(good) < 7:
                return {}
            for positions, wrong in ((bad, True), (good, False)):
                at = np.resize(positions[np.linspace(0, len(positions) - 1, 7).astype(int)], 7)[[3, 5, 0, 6, 1, 4, 2]]
                x = probe.random(2, 7, seed=32)
                y = probe.hand_over(x, at)
                if (_wrong_rows(*expected.expected(x.astype(np.float64), at), y) != wrong).any():
                    return {}
            near = [*good[good < bad[0]][-1:], *good[good > bad[-1]][:1]]
            which = f"{len(bad)} positions from {bad[0]} to {bad[-1]} are wrong, in short calls too"
            return {SOME: f"{which}; right: {' and '.join(map(str, near))}; {trial.name}: {words}"}
    return {}


def _wrong_rows(out: Float64, allowed: Float64, y: Float64) -> Any:
    """Which rows hold a wrong output, (n,)."""
    with np.errstate(all="ignore"):
        bad = ~(np.abs(y - out) <= allowed)
    return bad.any(axis=(*range(bad.ndim - 2), bad.ndim - 1))


def _compared(probe: Probe, expected: Expectation, trial: Trial) -> str:
    """The first wrong output of a trial, in words; a result of another shape is wrong, where others are taken."""
    try:
        y = probe.hand_over(trial.x, trial.positions)
    except Unreadable as error:
        if error.kind == "shape" and trial.fault == LENGTHS:
            return str(error)
        raise
    return _wrong(*expected.of(trial), y, trial.positions)


def _wrong(out: Float64, allowed: Float64, y: Float64, positions: Int64) -> str:
    with np.errstate(all="ignore"):
        off = np.abs(y - out)
        bad = ~(off <= allowed)
        if not bad.any():
            return ""
        bad &= np.isfinite(y) | np.isfinite(out)
        clearly = bad & ~(off <= _CLEARLY * allowed)
    return first_wrong(out, y, bad, positions) if clearly.any() else ""


def in_words(index: tuple[int, ...]) -> str:
    """Where an output stands, such as "head 0, row 3, feature 5"."""
    if len(index) > 4:
        return f"index {index}"
    return ", ".join(
        f"{axis} {i}" for axis, i in zip(("batch", "head", "row", "feature")[-len(index) :], index, strict=True)
    )


def first_wrong(truth: Float64, y: Float64, bad: Any, positions: Int64) -> str:
    """The first wrong output by its row, with its index, the number expected and the number that came."""
    at = positions if positions.ndim == 1 else positions.max(axis=0)
    rows = np.flatnonzero(bad.any(axis=(*range(bad.ndim - 2), bad.ndim - 1)))
    row = int(rows[np.argmin(np.abs(at[rows]))])
    head = tuple(int(i) for i in np.argwhere(bad[..., row, :])[0])
    index = (*head[:-1], row, head[-1])
    alone = f"{_ALONE}{at[row]}" if len(set(at[rows].tolist())) == 1 < len(set(at.tolist())) else ""
    digits = next((k for k in range(6, 17) if f"{truth[index]:.{k}g}" != f"{y[index]:.{k}g}"), 17)  # which tell apart
    expected, got = (f"{number:.{digits}g}" for number in (truth[index], y[index]))
    where = f"first at position {at[row]}, {in_words(index)}: expected {expected}, got {got}"
    return f"{where}; {int(bad.sum())} of {bad.size} outputs are wrong{alone}"


def _by_batch_row(probe: Probe, expected: Expectation, by_call: bool) -> Behaviour:
    """Whether each row of a batch is turned by its own positions, (b, n) or (b, 1, n). Raises `Unreadable` if it takes
    neither: what was claimed cannot be judged. The sizes are different primes, so that nothing fits by chance."""
    b, h, n = [k for k in (3, 2, 5, 7, 11) if k not in (probe.head_dim, probe.head_dim // 2)][:3]
    if probe.max_position < 4 * b * n:
        return {}
    at = 3 * np.random.default_rng(n).permutation(b * n).reshape(b, n)
    at[:, 0] = probe.max_position if by_call else at[:, 0]
    x, positions, taken = probe.random(b, h, n, seed=29), probe.apart(at), False

    def first_wrong_row(y: Float64, own: bool) -> str:
        """The first row that is not turned by its own positions, or by those of row 0."""
        for i in range(b):
            turned_by = positions[..., i if own else 0, :]
            if words := _wrong(*expected.expected(x[i].astype(np.float64), turned_by), y[i], turned_by):
                return f"row {i}: {words}"
        return ""

    for shape, given in ((f"({b}, {n})", positions), (f"({b}, 1, {n})", positions[..., None, :])):
        try:
            y = probe.hand_over(x, given.copy())
        except Unreadable as error:
            refused = error
            continue
        taken = True
        if words := first_wrong_row(y, own=True):
            first = not first_wrong_row(y, own=False)
            how = "all rows are turned by the positions of row 0; " if first else ""
            return {BY_ROW: f"positions of shape {shape} for x of shape {x.shape}: {how}{words}"}
    if not taken:
        reason = f"refuses positions (b, n) and (b, 1, n), which batched= claims: {refused.reason}"
        raise Unreadable(reason, refused.received, refused.kind) from refused.__cause__
    return {}


def _named(outcomes: list[Outcome]) -> Behaviour:
    """The mistakes that show, and in which calls. Nothing else is to blame where all wrong calls have something in
    common that no right one has, where the same number of rows goes wrong with any positions, or where every number of
    rows does."""
    bad = [o for o in outcomes if o.wrong]
    places = {_place(o) for o in bad}
    if len(places) == 1 < len(bad) and "" not in places:
        return {ONE: _evidence(bad, [])}
    if common := _in_common(outcomes):
        evidence = (
            f"{_evidence([o for o in outcomes if o.wrong], [])}; so all calls with {common} are wrong, and no others"
        )
        return {_NAMED_BY.get(common, BATCHES): evidence}
    wrong = {fault: [o for o in outcomes if o.trial.fault == fault and o.wrong] for fault in _FAULTS}
    right = {
        fault: [o for o in outcomes if o.trial.fault == fault and not o.wrong and o.trial.x.size] for fault in _FAULTS
    }
    lengths = {o.trial.x.shape[-2] for o in wrong[LENGTHS]}
    for fault in wrong.keys() - {LENGTHS}:
        wrong[fault] = [o for o in wrong[fault] if o.trial.x.shape[-2] not in lengths]
    heads = {o.trial.x.shape[-3] for o in wrong[BATCHES] if o.trial.x.ndim > 2}
    wrong[CONSECUTIVE] = [o for o in wrong[CONSECUTIVE] if o.trial.x.ndim < 4 or o.trial.x.shape[-3] not in heads]
    if lengths and not right[LENGTHS]:
        wrong = {LENGTHS: wrong[LENGTHS]}
    return {fault: _evidence(failed, right[fault]) for fault, failed in wrong.items() if failed}


def _place(outcome: Outcome) -> str:
    """The only position that is wrong in a call, or the only one there is; empty if there are several."""
    positions = outcome.trial.positions
    return str(positions.max()) if positions.shape[-1] == 1 else outcome.wrong.partition(_ALONE)[2]


_READ_ONLY, _GAPS = "a read-only x", "positions that rise with gaps"
_NAMED_BY = {_READ_ONLY: MEMORY, _GAPS: POSITIONS}


def _properties(x: Any, positions: Int64) -> Iterator[str]:
    """What a path of its own may be taken for, beside the number of rows."""
    if (steps := np.diff(positions)).size and (steps > 0).all() and (steps > 1).any():
        yield _GAPS
    yield f"x of {x.ndim} axes"
    if x.ndim > 2:
        yield f"{x.shape[-3]} head{'s' if x.shape[-3] > 1 else ''}"
    if x.ndim > 3 and x.shape[-4] > 1:
        yield "a batch of more than one"
    if not x.flags.writeable:
        yield _READ_ONLY


def _in_common(outcomes: list[Outcome]) -> str:
    """What all wrong calls have in common and no right one has; empty if there is no such thing."""
    wrong, right = (
        [set(_properties(o.trial.x, o.trial.positions)) for o in outcomes if bool(o.wrong) is bad]
        for bad in (True, False)
    )
    return min(set.intersection(*wrong).difference(*right), default="") if wrong and right else ""


def listed_names(names: list[str]) -> str:
    """The first six, and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _evidence(wrong: list[Outcome], right: list[Outcome]) -> str:
    others = f"; right: {listed_names([o.trial.name for o in right])}" if right else ""
    if wrong[0].trial.fault == LENGTHS:
        others += lengths_in_words(*({o.trial.x.shape[-2] for o in some} for some in (wrong, right)))
    return f"wrong: {listed_names([o.trial.name for o in wrong])}{others}; {wrong[0].trial.name}: {wrong[0].wrong}"


def lengths_in_words(wrong: set[int], right: set[int]) -> str:
    """Which lengths are wrong, if a rule says it; the sets are those that were tried. Multiples of a number are a rule
    only if those of its divisors are none: of each, a multiple went the other way."""
    if not right or len(wrong) < 3:
        return ""
    if max(right) < min(wrong):
        return f"; so all are right up to {max(right)}, and wrong from {min(wrong)} on"
    if max(wrong) < min(right):
        return f"; so all are wrong up to {max(wrong)}, and right from {min(right)} on"
    above = [n for n in right if n > min(wrong)]
    for k in (math.gcd(*wrong), math.gcd(*above) if len(above) > 1 else 1):  # one length alone is no rule
        for others, rule in (
            (right, f"the multiples of {k} are wrong"),
            (wrong, f"above {min(wrong) - 1} only multiples of {k} are right"),
        ):
            apart = all(any(n % d == 0 for n in others) for d in range(1, k) if k % d == 0)
            if k > 1 and apart and not any(n % k == 0 for n in others):
                return f"; so {rule}"
    return ""
