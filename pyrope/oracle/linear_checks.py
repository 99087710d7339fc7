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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import checks
from ..backend import Array
from ..linear import linear_attention
from ..theta import Rope
from .attention_checks import Maker, angle_error, make_case
from .attention_faults import BEHAVIOUR, LINEAR, other_ropes
from .attention_steps import Case, LinearSteps, Parts
from .judging import SMALL, Begin, Candidate, Judge, Named, Probe, Task, beyond, examine, one_of, other_bases
from .probe import float_dtype
from .report import Finding, Mismatch, Report
from .tensors import UNIT

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
    max_position: int = 4096, grade: str = "features rounded", incremental: Begin = None,
) -> Report:  # fmt: skip
    """The verdict about a candidate; see the top of this file for how it is called.

    >>> from pyrope import linear_attention
    >>> rope = Rope(16, 10000.0, "half")
    >>> check_linear_attention(lambda q, k, v, at: linear_attention(q, k, v, at, rope, causal=True), rope=rope).verdict
    'right'
    >>> check_linear_attention(lambda q, k, v, at: linear_attention(q, k, v, causal=True), rope=rope).faults
    ('not rotated: Eq. (18)',)

    ``max_position`` is for candidates with short tables; ``grade``, of `GRADES`, asks for better rounding than the
    least that is accepted.
    """
    asked = GRADES.index(checks.choice("grade", grade, GRADES))
    d, dtype = rope.head_dim if head_dim is None else head_dim, float_dtype(dtype)
    case = make_case(heads, key_heads, d, causal, rope, None, None, 1 / math.sqrt(d), dtype)
    case = replace(case, feature_map=checks.choice("feature_map", feature_map, MAPS))
    if feature_map.startswith("relu") and d < 16:
        raise ValueError(f"head_dim must be at least 16 for {feature_map}, was {d}: features would be all zeros")
    told = f"linear attention, Eq. (19), of {heads} heads over {key_heads}, {feature_map}, "
    told += f"{'causal' if causal else 'not causal'}, {rope!r}, {dtype.name}"
    task = linear_task(told, case, dtype.name, _probes(case, dtype, max_position, incremental))
    return examine(task, fn, incremental, lambda judge: explained(task, judge), asked)


def linear_task(expected: str, case: Case, dtype: str, probes: Sequence[Probe]) -> Task:
    rest = (LINEAR, MEASURED, BEHAVIOUR["sums in low precision"], _truth, _bounds, GRADES)
    return Task("linear attention", expected, case, dtype, probes, LinearSteps(), *rest)


def assert_linear_attention(fn: Candidate, **options: Any) -> None:
    """Raises `Mismatch`, with the report of `check_linear_attention`, unless the candidate is right."""
    __tracebackhide__ = True
    report = check_linear_attention(fn, **options)
    if not report.ok:
        raise Mismatch(report)


def _probes(case: Case, dtype: np.dtype[Any], max_position: int, incremental: Begin) -> list[Probe]:
    make = Maker(case, dtype, max_position)
    shifted = min(1000, max_position - 24) + np.arange(24) + np.zeros((3, 1), np.int64)
    random, ones = make.random("random", 24), make.random("sums of weights", 24)
    probes = [
        random,
        replace(random, name="shifted", at=shifted),
        make.random("far apart", 24, far=True),
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
    if dtype == np.float64:
        probe = make.at_zero()
        probes.append(replace(probe, q=_with_short_features(case, probe.q), k=_with_short_features(case, probe.k)))
    return probes


def _with_short_features(case: Case, x: Array) -> Array:
    """Numbers of which float32 holds the features: 12 bits, which have 24 as squares; of exp, zeros."""
    return np.zeros_like(x) if case.feature_map == "exp" else np.rint(np.abs(x) * 512) / 512


def _truth(case: Case, probe: Probe) -> Array:
    """Eq. (19) in float64, by the definition."""
    q, k, v, at = probe.wide()
    options: dict[str, Any] = {"causal": case.causal, "feature_map": case.feature_map, "form": "quadratic"}
    return linear_attention(q, k, v, at, case.rope, **options)


def _bounds(case: Case, dtype: str, probe: Probe, parts: Parts, level: int) -> tuple[Array, float]:
    """How far off outputs may be, each and in the mean square, as the top of this file derives it."""
    u, fine = UNIT[dtype], UNIT["float64" if dtype == "float64" else "float32"]
    (n, d), low = parts.k.shape[-2:], dtype in SMALL
    sizes, w = (np.nan_to_num(np.abs(x)) for x in (parts.scores, parts.weights))
    out, size = np.nan_to_num(np.abs(parts.weights @ parts.v)), np.abs(parts.v).max()
    angle = angle_error(case, dtype, probe, level)
    noise = (fine**2 * (d + n + 8) + angle**2) * sizes**2
    noise += low * (level == 1) * u**2 * (10 / 3 / d * sizes**2 + w**2)
    tiny = 2.0**-24 * (n + 1) if dtype == "float16" else 0.0
    squares, total = noise.sum(axis=-1, keepdims=True), np.sqrt(noise).sum(axis=-1, keepdims=True)
    worst = 6 * (size + out) * total + 3 * u * out + 16 * fine + tiny
    square = squares * (size**2 + out**2) + 3 * u**2 * out**2
    return worst, 3 * math.sqrt(square.mean()) + 16 * fine + tiny if probe.random else math.inf


def explained(task: Task, judge: Judge) -> list[Finding]:
    return one_of(judge, task.known) or beyond(task, judge, _measured(task, judge))


def _measured(task: Task, judge: Judge) -> Iterator[Named]:
    """Mistakes with a number in them: a base, the length of a chunk, by the first wrong token, and a decay."""
    case = task.case
    yield from other_bases(task, judge, other_ropes(case.rope))
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
