"""Whether a function computes linear attention with RoPE, Eq. (19), and what it does wrong instead.

A candidate is ``fn(q, k, v, positions) -> o`` on NumPy arrays, q (b, h, n, d), k and v (b, g, n, d), positions (b, n),
o (b, h, n, d). Positions decide the rotation alone: who sees whom goes by the order of the tokens.
``incremental`` makes a function that is called in the same way with the next tokens, and remembers those before:
``step = incremental(); o = step(q, k, v, positions)``.

How far off an output may be is derived in `tolerance.linear_bounds`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import checks
from ..backend import Array
from ..theta import Rope
from .ask import Candidate, Counted
from .attention_checks import grouped_exams, grouped_questions, measured_ropes
from .attention_evidence import AttentionEvidence, Exam, Kind
from .attention_faults import LINEAR, USUAL_CHUNKS, Fields, Measurements, other_ropes
from .attention_steps import LinearSteps
from .attention_trials import caches, lengths, long, memory, more_lengths, orders, small, values
from .backward_checks import LINEAR_GRADIENTS, GradientCheck, linear_questions
from .examination import Begin, Trials, examine, make_spec
from .floats import U32, float_dtype
from .questions import FAR, Question, Questions
from .report import Report
from .responses import feature_response
from .tolerance import LINEAR_GRADES as GRADES, linear_bounds
from .truth import Spec, linear_attention

MAPS = ("elu+1", "exp", "relu", "relu2")  # whose denominators are positive
_CALLS = {"one each": (1,) * 20, "in chunks": (8, 1, 1, 10)}  # tokens of each call of a candidate with a cache


def check_linear_attention(
    fn: Candidate, *, rope: Rope, heads: int = 4, key_heads: int | None = None, head_dim: int | None = None,
    feature_map: str = "elu+1", causal: bool = True, dtype: Any = np.float32,
    max_position: int = 4096, grade: str = "features rounded", incremental: Begin = None, backward: bool = False,
) -> Report:  # fmt: skip
    """The verdict about a candidate; see the top of this file for how it is called.

    >>> from pyrope import linear_attention
    >>> rope = Rope(16, 10000.0, "half")
    >>> check_linear_attention(lambda q, k, v, at: linear_attention(q, k, v, at, rope, causal=True), rope=rope).verdict
    'right'
    >>> check_linear_attention(lambda q, k, v, at: linear_attention(q, k, v, causal=True), rope=rope).faults
    ('not rotated',)

    Without ``key_heads`` there are as many as query heads, and fewer are tried where it takes them. ``max_position`` is
    for candidates with short tables; ``grade``, of `GRADES`, asks for better rounding than the least that is accepted.
    With ``backward`` the candidate is the backward pass, fn(q, k, v, g, positions) -> (dq, dk, dv): see
    `backward_checks`.
    """
    asked = GRADES.index(checks.choice("grade", grade, GRADES))
    d, dtype = checks.instance("rope", rope, Rope).head_dim if head_dim is None else head_dim, float_dtype(dtype)
    spec = make_spec(heads, heads if key_heads is None else key_heads, d, causal, rope, dtype=dtype)
    starts = fn.starts if isinstance(fn, Counted) else spec.starts
    spec = replace(spec, feature_map=checks.choice("feature_map", feature_map, MAPS), starts=starts)
    if feature_map.startswith("relu") and d < 16:
        raise ValueError(f"head_dim must be at least 16 for {feature_map}, was {d}: features would be all zeros")
    expected = f"linear attention, Eq. (19), of {heads} heads over {spec.key_heads}, {feature_map}, "
    expected += f"{'causal' if causal else 'not causal'}, {rope!r}, {dtype.name}"
    draw = Questions(spec, dtype, max_position)
    if checks.flag("backward", backward):
        if incremental is not None:
            raise ValueError("a backward pass has no cache: leave out incremental=, or backward=")
        if asked + 1 < len(GRADES):
            raise ValueError("a backward pass has no grades: leave out grade=, or backward=")
        check = GradientCheck(LINEAR_GRADIENTS, dtype.name, f"the gradients of {expected}")
        grouped_draw = next(grouped_questions(draw), None) if key_heads is None else None
        return check.report(fn, spec, linear_questions(draw), grouped_draw)
    exam = Exam(LINEAR_KIND, expected, spec, dtype.name, _questions(draw, incremental))
    others = (*[caches] * (incremental is not None), orders, memory, values, small, long, more_lengths)
    grouped = grouped_exams(exam, dtype, max_position) if key_heads is None else ()
    return examine(exam, fn, incremental, asked, Trials(draw, lengths, others), grouped)


def assert_linear_attention(fn: Candidate, **options: Any) -> None:
    """Raises `Mismatch`, with the report of `check_linear_attention`, unless the candidate is right; `NotJudged`,
    from its own exception, if it cannot be judged."""
    __tracebackhide__ = True
    check_linear_attention(fn, **options).raise_unless_ok()


def _questions(draw: Questions, incremental: Begin) -> list[Question]:
    shifted = min(1000, draw.max_position - 24) + np.arange(24) + np.zeros((3, 1), np.int64)
    random, ones = draw.random("random", 24), draw.random("sums of weights", 24)
    questions = [
        random,
        replace(random, name="shifted", positions=shifted),
        draw.random(FAR, 24, far=True),
        replace(ones, v=np.ones_like(ones.v), random=False),
        draw.random("one token", 1),
        draw.random("a few tokens", 7, batch=2),
        draw.random("264 tokens", 264, batch=1),
        draw.orders(24),
        draw.small(),
    ]
    questions += [draw.random(f"{n} tokens", n, batch=1) for n in (63, 64, 65)]
    if incremental is not None:
        questions += [
            replace(draw.random(f"step by step, {name}", 20), calls=calls, demand="incremental")
            for name, calls in _CALLS.items()
        ]
    if draw.dtype == np.float64:
        zero = draw.at_zero()
        questions.append(replace(zero, q=_short_features(draw.spec, zero.q), k=_short_features(draw.spec, zero.k)))
    return questions


def _short_features(spec: Spec, x: Array) -> Array:
    """Numbers of which float32 holds the features: 12 bits, which have 24 as squares; of exp, zeros."""
    return np.zeros_like(x) if spec.feature_map == "exp" else np.rint(np.abs(x) * 512) / 512


def _measure(evidence: AttentionEvidence, fn: Candidate | None) -> Measurements:
    """Bases; lengths of chunks, by the first wrong token; and a decay."""
    ropes = tuple(measured_ropes(evidence, other_ropes(evidence.exam.spec.rope)))
    added = evidence.tuned(lambda x: {"added": x}, np.geomspace(1e-5, 100, 8).tolist(), 30)
    if not evidence.exam.spec.causal:
        return Measurements(ropes=ropes, added=added)
    begins = {evidence.since(i) or 0 for i in evidence.failed} - {0}
    chunks = tuple(sorted(begins | set(USUAL_CHUNKS)))  # noise may hide where a usual one begins
    decays: tuple[Fields, ...] = ()
    if evidence.failed[0] == 0 or evidence.eps > 2 * U32:  # else it would show among 24 tokens
        starts = [0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999]
        both = [{"decay": x} for x in evidence.tuned(lambda x: {"decay": x}, starts)]
        one = evidence.tuned(lambda x: {"decay": x, "decaying": "numerator"}, starts)
        decays = (*both, *({"decay": x, "decaying": "numerator"} for x in one))
    return Measurements((), ropes, chunks, decays, added=added)


LINEAR_KIND = Kind(
    subject="linear attention",
    steps=LinearSteps(),
    truth=linear_attention,
    bounds=linear_bounds,
    narrow_grades=GRADES,
    faults=LINEAR,
    low=LINEAR["sums in low precision"],
    measure=_measure,
    response=feature_response,
)
