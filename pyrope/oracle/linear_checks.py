"""Whether a function computes linear attention with RoPE, Eq. (19), and what it does wrong instead.

A candidate is ``fn(q, k, v, positions) -> o`` on NumPy arrays, q (b, h, n, d), k and v (b, g, n, d), positions (b, n),
o (b, h, n, d). ``incremental`` makes a function that is called in the same way with the next tokens, and remembers
those before: ``step = incremental(); o = step(q, k, v, positions)``.

How far off an output may be. With u and U as in `attention_checks`, D the denominator, P = |φ(q)||φ(k)|/D and w the
weight of a key, all values ±1: a weight, a sum of d products divided by D, has a standard error of U·√(d + n + 8)·P,
sums over n keys included, and float32 angles add 4·m·2⁻²⁴·P, in float64 as `attention_checks` says. Accepted in float16
and bfloat16, since chunked kernels do so, and reported as `precision`: features, rotated or not, weights and states
rounded to the dtype ("features rounded"): ten roundings of the factors of d products that add up at random,
u·√(10/3)·P/√d, and three of the weight, u·|w|. Six of these are allowed for any output, summed over the keys as if all
conspired, three times the root of the sum of squares for the mean square; |o| times as much for the denominator, and
3u·|o| for the last roundings of all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import checks
from ..backend import Array
from ..linear import linear_attention
from ..theta import Rope
from .attention_checks import (
    Maker,
    angle_error,
    ask,
    behaviour,
    make_case,
    nothing_finite,
    own_or_angles,
    remembers,
    step_by_step,
    symptoms,
)
from .attention_faults import LINEAR, Changes
from .attention_steps import Case, LinearSteps, Parts, attend_linearly, incremental as stepping
from .judging import UNIT, Candidate, Judge, Named, Prediction, Probe, one_of, two_of
from .probe import Unreadable, float_dtype
from .report import Finding, Mismatch, Report

GRADES = ("rounded once", "features rounded")  # best first
MAPS = ("elu+1", "exp", "relu", "relu2")  # whose denominators are positive
LOST = {"state": "both", "numerator": "numerator", "normaliser": "denominator"}
MEASURED = (
    "state decays",
    "another base",
    *(f"{what} lost between chunks" for what in LOST),
)  # not tried as they stand
_PIECES = {"one each": (1,) * 20, "in chunks": (8, 1, 1, 10)}


def check_linear_attention(
    fn: Candidate, *, rope: Rope, heads: int = 4, key_heads: int = 2, head_dim: int | None = None,
    feature_map: str = "elu+1", causal: bool = True, dtype: Any = np.float32,
    incremental: Callable[[], Candidate] | None = None,
) -> Report:  # fmt: skip
    """The verdict about a candidate; see the top of this file for how it is called.

    >>> from pyrope import linear_attention
    >>> rope = Rope(16, 10000.0, "half")
    >>> check_linear_attention(lambda q, k, v, at: linear_attention(q, k, v, at, rope, causal=True), rope=rope).verdict
    'right'
    >>> check_linear_attention(lambda q, k, v, at: linear_attention(q, k, v, causal=True), rope=rope).faults
    ('not rotated: Eq. (18)',)
    """
    d, dtype = rope.head_dim if head_dim is None else head_dim, float_dtype(dtype)
    case = make_case(heads, key_heads, d, causal, rope, None, None, 1 / math.sqrt(d), dtype)
    case = replace(case, feature_map=checks.choice("feature_map", feature_map, MAPS))
    if feature_map.startswith("relu") and d < 16:
        raise ValueError(f"head_dim must be at least 16 for {feature_map}, was {d}: features would be all zeros")
    probes = _probes(case, dtype, incremental)
    told = f"linear attention, Eq. (19), of {heads} heads over {key_heads}, {feature_map}, "
    told += f"{'causal' if causal else 'not causal'}, {rope!r}, {dtype.name}"
    try:
        answers, wrong = ask(fn, incremental, probes)
        judges = _judges(case, dtype, probes, answers)
        wrong += remembers(fn, incremental, judges[-1])
    except Unreadable as error:
        return Report("linear attention", told, "wrong", (behaviour("fails", str(error)),))
    reached = next((level for level, judge in enumerate(judges) if not judge.failed), None)
    if reached is None:
        wrong += nothing_finite(judges[-1]) or _explained(case, judges[-1]) or symptoms(fn, case, judges[-1], LINEAR)
    found = None if reached is None else own_or_angles(reached) if dtype.itemsize > 2 else GRADES[reached]
    return Report("linear attention", told, "wrong" if wrong else "right", tuple(wrong), found, judges[-1].errors())


def assert_linear_attention(fn: Candidate, **options: Any) -> None:
    """Raises `Mismatch`, with the report of `check_linear_attention`, unless the candidate is right."""
    __tracebackhide__ = True
    report = check_linear_attention(fn, **options)
    if not report.ok:
        raise Mismatch(report)


def _probes(case: Case, dtype: np.dtype[Any], incremental: Callable[[], Candidate] | None) -> list[Probe]:
    make = Maker(case, dtype, 4096)
    random, ones = make.random("random", 24), make.random("sums of weights", 24)
    probes = [
        random,
        replace(random, name="shifted by 1000", at=np.arange(1000, 1024) + np.zeros((3, 1), np.int64)),
        replace(ones, v=np.ones_like(ones.v), random=False),
        make.random("one token", 1),
        make.random("264 tokens", 264, batch=1),
    ]
    probes += [make.random(f"{n} tokens", n, batch=1) for n in (63, 64, 65)]
    if incremental is not None:
        probes += [replace(make.random(f"step by step, {name}", 20), pieces=pieces) for name, pieces in _PIECES.items()]
    if case.feature_map.startswith("relu"):  # so that hardly any two have no feature in common, and a denominator of 0
        one = dtype.type(1)
        probes = [replace(probe, q=probe.q + one, k=probe.k + one) for probe in probes]
    return probes


def _truth(case: Case, probe: Probe) -> Array:
    """Eq. (19) in float64, by the definition."""
    q, k, v, at = probe.wide()
    options: dict[str, Any] = {"causal": case.causal, "feature_map": case.feature_map, "form": "quadratic"}
    return linear_attention(q, k, v, at, case.rope, **options)


def _bounds(dtype: np.dtype[Any], probe: Probe, parts: Parts, level: int) -> tuple[Array, float]:
    """How far off outputs may be, each and in the mean square, as the top of this file derives it."""
    u, fine = UNIT[dtype.name], UNIT["float64" if dtype.itemsize == 8 else "float32"]
    (n, d), low = parts.k.shape[-2:], dtype.itemsize == 2
    sizes, w = (np.nan_to_num(np.abs(x)) for x in (parts.scores, parts.weights))
    out, size = np.nan_to_num(np.abs(parts.weights @ parts.v)), np.abs(parts.v).max()
    angle = 0.0 if probe.at is None else angle_error(dtype.name, probe.at, level)
    noise = (fine**2 * (d + n + 8) + angle**2) * sizes**2
    noise += low * (level == 1) * u**2 * (10 / 3 / d * sizes**2 + w**2)
    tiny = 2.0**-24 * (n + 1) if dtype.name == "float16" else 0.0
    squares, total = noise.sum(axis=-1, keepdims=True), np.sqrt(noise).sum(axis=-1, keepdims=True)
    worst = 6 * (size + out) * total + 3 * u * out + 16 * fine + tiny
    square = squares * (size**2 + out**2) + 3 * u**2 * out**2
    return worst, 3 * math.sqrt(square.mean()) + 16 * fine + tiny if probe.random else math.inf


def _judges(case: Case, dtype: np.dtype[Any], probes: Sequence[Probe], answers: Sequence[Array]) -> list[Judge]:
    """One for each grade."""
    truths = [(_truth(case, probe), attend_linearly(case, LinearSteps(), *probe.wide())) for probe in probes]

    def judge(level: int) -> Judge:
        def predict(changes: Changes, i: int) -> Prediction:
            steps = replace(LinearSteps(), **changes)
            parts = attend_linearly(case, steps, *probes[i].wide())
            out = step_by_step(stepping(case, steps)(), probes[i], probes[i].wide()) if probes[i].pieces else parts.out
            worst, spread = _bounds(dtype, probes[i], parts, level)
            return Prediction(out, worst if steps.output == "right" else worst.max(), spread)

        known = zip(probes, truths, strict=True)
        right = [Prediction(out, *_bounds(dtype, probe, parts, level)) for probe, (out, parts) in known]
        return Judge(probes, answers, right, predict, 2 * UNIT[dtype.name])

    return [judge(level) for level in range(len(GRADES))]


def _explained(case: Case, judge: Judge) -> list[Finding]:
    known: list[Named] = [
        (fault, changes) for fault in LINEAR.values() if fault.name not in MEASURED for changes in fault.changes(case)
    ]
    if found := one_of(judge, known):
        return found
    measured = list(_measured(case, judge))
    return one_of(judge, measured) or two_of(judge, known + measured)


def _measured(case: Case, judge: Judge) -> Iterator[Named]:
    """Mistakes with a number in them: a base, the length of a chunk, by the first wrong token, and a decay."""
    rope = case.rope
    if rope is not None and rope.width > 2:
        base = judge.tuned(lambda x: {"rope": replace(rope, base=x)}, np.geomspace(10, 1e9, 33).tolist())
        if base is not None:
            yield LINEAR["another base"], base
    if not case.causal:
        return
    usual = {changes["chunk"] for changes in LINEAR["state lost between chunks"].changes(case)}  # noise hides its begin
    for chunk in sorted({judge.since(i) or 0 for i in judge.failed} - {0} | usual):
        for what, lost in LOST.items():
            yield LINEAR[f"{what} lost between chunks"], {"chunk": chunk, "lost": lost}
    if judge.failed[0] != 0 and judge.eps <= 2 * UNIT["float32"]:
        return  # it would show among 24 tokens
    decay = judge.tuned(lambda x: {"decay": x}, [0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999])
    if decay is not None:
        yield LINEAR["state decays"], decay
