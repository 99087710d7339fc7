"""Whether a function computes softmax attention, and what it does wrong: `check_attention`, `assert_attention`.

A candidate is ``fn(q, k, v) -> o`` on NumPy arrays, q (b, h, n, d), k and v (b, g, m, d), o (b, h, n, d), or, with
RoPE inside, ``fn(q, k, v, positions) -> o`` with n = m and positions (b, n). Where n < m the queries are the last of
the tokens. If its signature has them, it is also called with ``mask=``, bool (b, 1, n, m), True is seen, in addition
to causality, and with ``segments=``, integers (b, n): tokens of different segments do not see each other. Positions
decide the rotation alone: who sees whom goes by the order of the tokens. A row that sees nothing must be zeros.
``incremental`` makes a function that is called like fn with the next tokens, and remembers those before:
``step = incremental(); o = step(q, k, v[, positions])``.

How far off an output may be is derived in `tolerance.softmax_bounds`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .. import checks
from ..backend import Array
from ..definition import pairs
from ..theta import Rope
from .ask import Behaviour, Candidate, Counted, Unreadable, ask
from .attention_evidence import AttentionEvidence, Exam, Kind
from .attention_faults import ATTENTION, Measurements, other_ropes
from .attention_steps import Steps
from .attention_trials import caches, decoding, lengths, memory, more_lengths, orders, values
from .backward_checks import SOFTMAX_GRADIENTS, GradientCheck, softmax_questions
from .examination import Begin, Trials, examine, make_spec
from .floats import float_dtype
from .questions import FAR, LARGE, LENGTH, PRODUCTS, Question, Questions
from .report import Report
from .responses import score_response
from .tolerance import SOFTMAX_GRADES as GRADES, softmax_bounds
from .truth import Spec, softmax_attention

_BASES = tuple(np.geomspace(10, 1e9, 33).tolist())
_CALLS = {"one each": (1,) * 13, "a prompt first": (8, 1, 1, 3)}  # tokens of each call of a candidate with a cache


def check_attention(
    fn: Candidate, *, heads: int = 4, key_heads: int | None = None, head_dim: int = 64, causal: bool = True,
    rope: Rope | None = None, window: int | None = None, softcap: float | None = None, scale: float | None = None,
    dtype: Any = np.float32, cache: bool | None = None, max_position: int = 4096, grade: str = "scores rounded",
    incremental: Begin = None, backward: bool = False,
) -> Report:  # fmt: skip
    """The verdict about a candidate; see the top of this file for how it is called.

    >>> from pyrope import attention
    >>> check_attention(lambda q, k, v: attention(q, k, v, causal=True)).verdict
    'right'
    >>> check_attention(lambda q, k, v: attention(q, k, v, causal=True, scale=1.0)).faults
    ('scale missing',)

    The options say what it is meant to do. Without ``key_heads`` there are as many as query heads, and fewer are tried
    where it takes them. Without ``cache`` fewer queries than keys are tried where it takes them, and may be masked from
    the top left, with a note; True demands them, False does not ask. ``max_position`` is for candidates with short
    tables. ``grade`` asks for better rounding than the least that is accepted, of `GRADES`. With ``backward`` the
    candidate is the backward pass, fn(q, k, v, g[, positions]) -> (dq, dk, dv): see `backward_checks`.
    """
    dtype = float_dtype(dtype)
    options = {"window": window, "softcap": softcap, "scale": scale, "dtype": dtype}
    spec = make_spec(heads, heads if key_heads is None else key_heads, head_dim, causal, rope, **options)
    if cache is not None and not isinstance(cache, bool):
        raise TypeError(f"cache must be True, False or None, was {cache!r}")
    if cache and rope is not None:
        raise ValueError(
            "cache=True demands calls with fewer queries than keys, but with RoPE inside every token has a query: "
            "give incremental= instead, or leave cache out"
        )
    spec = replace(spec, starts=fn.starts if isinstance(fn, Counted) else spec.starts)
    asked = GRADES.index(checks.choice("grade", grade, GRADES))
    if checks.flag("backward", backward):
        if cache or incremental is not None:
            raise ValueError("a backward pass has no cache: leave out cache= and incremental=, or backward=")
        if asked + 1 < len(GRADES):
            raise ValueError("a backward pass has no grades: leave out grade=, or backward=")
        return _check_backward(fn, spec, dtype, max_position, key_heads is None)
    draw, fewer = Questions(spec, dtype, max_position), rope is None and cache is not False
    questions, notes = _questions(draw, _accepted(fn), fewer, incremental, demanded=bool(cache))
    expected = f"softmax attention of {_described(spec)}, {dtype.name}"
    exam = Exam(SOFTMAX, expected, spec, dtype.name, questions, tuple(notes), prefill=causal and cache is None)
    others = (*[caches] * (incremental is not None), orders, memory, values, *[decoding] * fewer, more_lengths)
    grouped = grouped_exams(exam, dtype, max_position) if key_heads is None else ()
    return examine(exam, fn, incremental, asked, Trials(draw, lengths, others), grouped)


def _check_backward(fn: Candidate, spec: Spec, dtype: np.dtype[Any], max_position: int, try_groups: bool) -> Report:
    expected = f"the gradients of softmax attention of {_described(spec)}, {dtype.name}"
    draw, accepted = Questions(spec, dtype, max_position), _accepted(fn)
    check = GradientCheck(SOFTMAX_GRADIENTS, dtype.name, expected, notes=_untried(accepted))
    grouped = next(grouped_questions(draw), None) if try_groups else None
    return check.report(fn, spec, softmax_questions(draw, accepted), grouped)


def assert_attention(fn: Candidate, **options: Any) -> None:
    """Raises `Mismatch`, with the report of `check_attention`, unless the candidate is right; `NotJudged`, from its own
    exception, if it cannot be judged."""
    __tracebackhide__ = True
    check_attention(fn, **options).raise_unless_ok()


def grouped_questions(draw: Questions) -> Iterator[Questions]:
    """The same with fewer key heads: half as many, if that is a number, and all others that divide the heads."""
    heads = draw.spec.heads
    for key_heads in [g for g in range(heads // 2, 0, -1) if heads % g == 0]:
        yield Questions(replace(draw.spec, key_heads=key_heads), draw.dtype, draw.max_position)


def grouped_exams(exam: Exam, dtype: np.dtype[Any], max_position: int) -> Iterator[Exam]:
    """A few questions with each number of key heads that is less than that of query heads."""
    for i, draw in enumerate(grouped_questions(Questions(exam.spec, dtype, max_position))):
        questions = [draw.random("a few tokens, grouped heads", 7, batch=2)]
        questions = [draw.random("grouped heads", LENGTH, batch=2), *questions] if i == 0 else questions
        yield replace(exam, spec=draw.spec, questions=questions, notes=())


def _described(spec: Spec) -> str:
    words = [
        f"{spec.heads} heads over {spec.key_heads}, d = {spec.head_dim}",
        "causal" if spec.causal else "not causal",
    ]
    words += [f"scale {spec.scale:.6g}"] + [f"window {spec.window}"] * (spec.window is not None)
    words += [f"softcap {spec.softcap}"] * (spec.softcap is not None)
    return ", ".join(words + ([f"with {spec.rope!r} inside"] if spec.rope is not None else []))


def _accepted(fn: Candidate) -> set[str]:
    """Which of the options a candidate has in its signature."""
    try:
        return {"mask", "segments"} & set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # no signature to read
        return set()


def _questions(
    draw: Questions, accepted: set[str], cache: bool, incremental: Begin, demanded: bool = False
) -> tuple[list[Question], list[str]]:
    """What is asked, and notes about what is not."""
    spec, notes = draw.spec, []
    near = LENGTH if spec.window is None or spec.window > 2 * LENGTH else LENGTH + spec.window
    questions = [
        draw.random("random", near),
        draw.sharp(near),
        draw.random("one token", 1),
        draw.random("130 tokens", 130, batch=1),
        draw.random("a few tokens", 7, batch=2),
    ]
    if spec.rope is not None and spec.window is None:
        questions.append(draw.random(FAR, LENGTH, far=True))
    if spec.rope is not None:
        questions.append(draw.orders(near))
    if spec.rope is not None and draw.dtype == np.float64:
        questions.append(draw.at_zero())
    if cache:
        few = {"cache": 5, "cache, 1 query": 1, "cache, 2 queries": 2}
        asked = [draw.random(name, near, queries=n) for name, n in few.items()]
        questions += [replace(question, demand="cache" if demanded else "") for question in asked]
    questions.append(draw.many())
    # In float16 q·k itself stays below 65504 here, since it may be rounded before it is scaled.
    large = LARGE if draw.dtype != np.float16 else min(LARGE, 60000 * spec.scale)
    extra = {f"scores of ±{large:g}": draw.large(large)}
    if draw.dtype == np.float16 and spec.scale < 0.5:
        extra["products of ±81920"] = draw.large(81920 * spec.scale, PRODUCTS)
    extra |= {f"the softcap of {spec.softcap}": draw.saturated()} if spec.softcap is not None else {}
    extra |= {f"the edge of a window of {spec.window}": draw.edge(cache)} if near == LENGTH and spec.window else {}
    questions += [question for question in extra.values() if question is not None]
    notes += [f"{what} could not be tried here" for what, question in extra.items() if question is None]
    if "mask" in accepted:
        questions += [draw.masked("mask", near), draw.padded(near), draw.padded(80, "long padding")]
    if "segments" in accepted:
        questions.append(draw.packed(near))
    if incremental is not None:
        questions += [
            replace(draw.random(f"step by step, {name}", 13), calls=calls, demand="incremental")
            for name, calls in _CALLS.items()
        ]
    return questions, notes + _untried(accepted)


def _untried(accepted: set[str]) -> list[str]:
    missing = [name for name in ("mask", "segments") if name not in accepted]
    return [f"not tried, since the candidate has no such argument: {', '.join(missing)}"] if missing else []


# ── Mistakes with a number in them ───────────────────────────────────────────────────────────────────────────────────


def measured_ropes(
    evidence: AttentionEvidence, ropes: Iterable[Rope], starts: tuple[float, ...] = _BASES
) -> Iterator[Rope]:
    """These ropes, each with the base that fits best; none if another base would show among fewer tokens."""
    if any(evidence.exam.questions[i].short for i in evidence.failed):
        for rope in ropes:
            bases = evidence.tuned(partial(_with_base, rope), starts)
            yield from (replace(rope, base=base) for base in bases)


def _with_base(rope: Rope, base: float) -> dict[str, Rope]:
    return {"rope": replace(rope, base=base)}


def _measure(evidence: AttentionEvidence, fn: Candidate | None) -> Measurements:
    """The scale, and the base: read from a candidate, or searched for."""
    scales = evidence.tuned(lambda x: {"scale": x}, np.geomspace(1 / 64, 64, 25).tolist())
    added = evidence.tuned(lambda x: {"added": x}, np.geomspace(1e-6, 1, 7).tolist(), 30)
    caps = evidence.tuned(lambda x: {"cap": x}, np.geomspace(0.125, 256, 12).tolist())
    windows = evidence.windows()
    if fn is None or isinstance(fn, Counted):  # what counts its positions is not asked at those that tell the base best
        ropes = tuple(measured_ropes(evidence, other_ropes(evidence.exam.spec.rope)))
    else:
        read = _read_ropes(fn, evidence)
        ropes = tuple(x for rope in read for x in measured_ropes(evidence, [rope], (rope.base,)))
    return Measurements(scales, ropes, caps=caps, added=added, windows=windows)


def _read_ropes(fn: Candidate, evidence: AttentionEvidence) -> Iterator[Rope]:
    """Ropes of another base, by R(m − n), as the scores of unit vectors tell it, for each pairing and direction."""
    spec, rope = evidence.exam.spec, evidence.exam.spec.rope
    if rope is None or rope.width < 4 or spec.softcap is not None or (spec.window or 3) < 3:
        return
    for layout in ("half", "interleaved") if rope.layout.startswith("half") else ("interleaved", "half"):
        other = rope if layout == rope.layout[: len(layout)] else replace(rope, layout=layout)
        read = _unit_scores(fn, spec, other, evidence.exam.questions[0].q.dtype)
        if not np.isfinite(read).all():
            return
        bases = np.geomspace(2, 1e9, 4000)
        theta = bases[:, None] ** -(np.arange(rope.pairs) / rope.pairs)
        for direction in (rope.direction, -rope.direction):
            angles = (_DISTANCES - [[0], [1]])[:, :, None, None] * theta * direction
            expected = np.stack((np.cos(angles[0]), np.sin(angles[1])))
            wrong = ((read[:, :, None] - expected) ** 2).sum(axis=(0, 1, 3))
            best = int(wrong.argmin())
            if wrong[best] < 0.02 * read.size:
                yield replace(other, base=float(bases[best]), direction=direction, scaling=None)


_DISTANCES = np.array([2, 4, 16, 64, 256])


def _unit_scores(fn: Candidate, spec: Spec, rope: Rope, dtype: np.dtype[Any]) -> Array:
    """cos and sin of the angles of all pairs, (2, distances, p), sin at one less: from the weights of three tokens.

    The keys are c·x at position 0, c·y at 1, and 0; the query is c·x: scores c²·scale·a² times cos, sin and 0. The
    values are unit vectors, so that outputs are weights, and the logarithms of their ratios the scores.
    """
    p, features = rope.pairs, np.arange(rope.head_dim)
    x, y = (features[part] for part in pairs(rope.layout, rope.width, rope.start)[0])
    c, read = 1.7 * spec.scale**-0.5, []
    q, k = np.zeros((p, spec.heads, 3, spec.head_dim)), np.zeros((p, spec.key_heads, 3, spec.head_dim))
    q[np.arange(p), :, 2, x] = k[np.arange(p), :, 0, x] = k[np.arange(p), :, 1, y] = c
    v = np.zeros_like(k)
    v[..., range(3), range(3)] = 1
    for distance in _DISTANCES:
        at = np.broadcast_to(np.array([0, 1, distance]), (p, 3)).copy()
        given = {"q": q.astype(dtype), "k": k.astype(dtype), "v": v.astype(dtype), "positions": at}
        try:
            out = ask(fn, given, {}, "for unit vectors", Behaviour()).astype(np.float64)
        except Unreadable:  # it may take only what it was written for
            out = np.empty(0)
        if out.shape != q.shape:
            return np.full((2, 1, p), np.nan)
        w = out[:, :, 2]
        with np.errstate(all="ignore"):
            read.append(np.log(w[..., :2] / w[..., 2:3]).mean(axis=1).T)
    return np.stack(read, axis=1) / (c * c * spec.scale * rope.attention_factor**2)


SOFTMAX = Kind(
    subject="attention",
    steps=Steps(),
    truth=softmax_attention,
    bounds=softmax_bounds,
    narrow_grades=GRADES,
    faults=ATTENTION,
    low=ATTENTION["softmax in low precision"],
    measure=_measure,
    response=score_response,
)
