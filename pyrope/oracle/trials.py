"""The calls that a kernel may treat in a way of its own: lengths, consecutive positions, memory, extreme values.

Each trial is one call whose result must be right like any other; it carries the name of the mistake that it shows if it
is not. `run_trials` compares the results with what is expected, which is the truth or, for a candidate whose mistake is
known, the prediction of that mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .ask import Behaviour, Unreadable
from .floats import Float64, Int64
from .probe import Probe

# x, y, positions -> what y should be, and the error of each output over what is allowed
Expectation: TypeAlias = Callable[[Any, Float64, Int64], tuple[Float64, Float64]]
_POWERS = (16, 32, 64, 128, 256, 512)  # rows at which kernels change their way, each tried with its neighbours
_LENGTHS = {*range(1, 10), 12, 24, 48, 96, 192, 384, 640, 1024, 4097}
_FEW = 8  # rows of a trial of memory or values
_CLEARLY = 4  # times what is allowed: another path is far off, what is nearly not right everywhere is not
LENGTHS, CONSECUTIVE, POSITIONS = "some lengths wrong", "consecutive positions wrong", "order of positions matters"
MEMORY, VALUES, STEPS = "strides ignored", "not linear", "one row differs"
HEADS, BATCHES = "heads read as positions", "heads differ"
MISREAD, NEGATIVE = "positions misread", "negative positions wrong"
_FAULTS = (LENGTHS, CONSECUTIVE, POSITIONS, STEPS, HEADS, BATCHES, MEMORY, MISREAD, VALUES, NEGATIVE)


class Trial(NamedTuple):
    """One call."""

    fault: str  # the name of the mistake that shows if this goes wrong
    name: str  # what is particular about the call
    x: Any  # (…, n, d)
    positions: Int64  # (n,), or (axes, n)


def trials(probe: Probe, by_call: bool, least: int = 0) -> Iterator[Trial]:
    """All trials for this candidate, with positions from ``least`` on. If its table depends on the largest position of
    a call, only calls that hold the largest position of all can be judged."""
    for trial in (*_lengths(probe), *_orders(probe), *_axes(probe), *_memory(probe), *_values(probe)):
        if not by_call or trial.positions.max() == probe.max_position:
            yield trial
    if least < 0 and not by_call:
        some = np.array([-1, 0, least, -(-least // 2), -min(7, -least), 1])
        yield Trial(NEGATIVE, f"positions from {least} on", probe.random(2, len(some), seed=25), probe.everywhere(some))


def _lengths(probe: Probe) -> Iterator[Trial]:
    """Every length with scattered and with consecutive positions, from 0 or from elsewhere."""
    d, top = probe.head_dim, probe.max_position
    lengths = {d // 2, d, d + 1} | _LENGTHS | {n + step for n in _POWERS for step in (-1, 0, 1)}
    for n in sorted(lengths):
        if n > top + 1:
            break
        x = probe.random(2 if n <= 64 else 1, n, seed=n)
        scattered = np.random.default_rng(n).permutation(min(top + 1, 4 * n + 8))[:n]
        yield Trial(LENGTHS, f"{n} rows", x, probe.apart(scattered))
        yield Trial(CONSECUTIVE, f"positions 0 to {n - 1}", x, probe.everywhere(np.arange(n)))
        start = min(1000 + n, top + 1 - n) if n % 2 else top + 1 - n
        yield Trial(CONSECUTIVE, f"positions {start} to {start + n - 1}", x, probe.everywhere(start + np.arange(n)))


def _orders(probe: Probe) -> Iterator[Trial]:
    top = probe.max_position
    n = min(_FEW, top + 1)
    x, counted = probe.random(2, n, seed=21), np.arange(n)
    named = {
        "descending positions": counted[::-1], "positions 2 apart": 2 * counted, "positions 3 apart": 3 * counted,
        "one position for all rows": np.full(n, 5), "position 0 for all rows": np.zeros(n, np.int64),
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


def _axes(probe: Probe) -> Iterator[Trial]:
    """Batches of heads, as a model has them, and a head alone."""
    n = min(_FEW, probe.max_position + 1)
    counted, scattered = np.arange(n), _scattered(n)
    last = np.array([min(7, probe.max_position)])
    for fault, shape, at in (
        (BATCHES, (1, 5, n), scattered),
        (BATCHES, (3, 2, 1), last),
        (CONSECUTIVE, (2, 16, n), counted),
    ):
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
    """Rows of zeros, and rows much larger or smaller than the others."""
    n = min(_FEW, probe.max_position + 1)
    at, power = probe.apart(_scattered(n)), 5 if probe.dtype.name == "float16" else 60
    for name, scale in (("a row of zeros", 0.0), ("a large row", 2.0**power), ("a small row", 2.0**-power)):
        x = probe.random(2, n, seed=24)
        x[0, 0] *= probe.dtype.type(scale)
        yield Trial(VALUES, name, x, at)


class Outcome(NamedTuple):
    """What came of a trial."""

    trial: Trial
    wrong: str  # the first wrong output, in words; empty where all are right


def run_trials(probe: Probe, expected: Expectation, by_call: bool, least: int = 0) -> tuple[Behaviour, list[str]]:
    """What the candidate does wrong in some calls, by the name of the mistake, and what it did not take, in words."""
    outcomes, refused = list[Outcome](), dict[str, str]()
    for trial in trials(probe, by_call, least):
        try:
            y = probe.hand_over(trial.x, trial.positions)
        except Unreadable as error:
            refused.setdefault(trial.fault, f"{trial.name}: not tried, since {error}")
            continue
        truth, ratio = expected(trial.x.astype(np.float64), y, trial.positions)
        outcomes.append(
            Outcome(trial, first_wrong(truth, y, ratio, trial.positions) if (ratio > _CLEARLY).any() else "")
        )
    return _named(outcomes), list(refused.values())


def first_wrong(truth: Float64, y: Float64, ratio: Float64, positions: Int64) -> str:
    """The first wrong output by its row, with its index, the number expected and the number that came."""
    at = positions if positions.ndim == 1 else positions.max(axis=0)
    bad = ratio > 1
    rows = np.flatnonzero(bad.any(axis=(*range(bad.ndim - 2), bad.ndim - 1)))
    row = int(rows[np.argmin(np.abs(at[rows]))])
    head = tuple(int(i) for i in np.argwhere(bad[..., row, :])[0])
    index = (*head[:-1], row, head[-1])
    return (
        f"first at position {at[row]}, index {index}: expected {truth[index]:.6g}, got {y[index]:.6g}; "
        f"{int(bad.sum())} of {bad.size} outputs are wrong"
    )


def _named(outcomes: list[Outcome]) -> Behaviour:
    """The mistakes that show, and in which calls. Nothing else is to blame where the same number of rows goes wrong
    with any positions, or where every number of rows does."""
    wrong = {fault: [o for o in outcomes if o.trial.fault == fault and o.wrong] for fault in _FAULTS}
    right = {fault: [o for o in outcomes if o.trial.fault == fault and not o.wrong] for fault in _FAULTS}
    lengths = {o.trial.x.shape[-2] for o in wrong[LENGTHS]}
    for fault in wrong.keys() - {LENGTHS}:
        wrong[fault] = [o for o in wrong[fault] if o.trial.x.shape[-2] not in lengths]
    if lengths and not right[LENGTHS]:
        wrong = {LENGTHS: wrong[LENGTHS]}
    return {fault: _evidence(failed, right[fault]) for fault, failed in wrong.items() if failed}


def _evidence(wrong: list[Outcome], right: list[Outcome]) -> str:
    names = [o.trial.name for o in wrong]
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    others = f"; right: {', '.join(o.trial.name for o in right[:6])}" if right else ""
    return f"wrong: {listed}{others}; {wrong[0].trial.name}: {wrong[0].wrong}"
