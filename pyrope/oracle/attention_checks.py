"""Whether a function computes softmax attention, and what it does wrong: `check_attention`, `assert_attention`.

A candidate is ``fn(q, k, v) -> o`` on NumPy arrays, q (b, h, n, d), k and v (b, g, m, d), o (b, h, n, d), or, with
RoPE inside, ``fn(q, k, v, positions) -> o`` with n = m and positions (b, n). Where n < m the queries are the last of
the tokens. If its signature has them, it is also called with ``mask=``, bool (b, 1, n, m), True is seen, in addition
to causality, and with ``segments=``, integers (b, n): tokens of different segments do not see each other. A row that
sees nothing must be zeros. ``incremental`` makes a function that is called like fn with the next tokens, and remembers
those before: ``step = incremental(); o = step(q, k, v[, positions])``.

How far off an output may be. Let u be half an ulp of 1 in the candidate's dtype, U that of its arithmetic (float32, or
float64 for float64), s a score, t² = Σ(q_i k_i)² times the scale squared, w a weight. All values are ±1 or less.
- A score is a sum of d products, each rounded: its standard error is at most U·√(d + 8)·(t + max|s|), the maximum that
  is subtracted included. RoPE inside adds the error of a float32 angle, 4·m·2⁻²⁴ at position m, times t. In
  float64 it is asked without that first; with it, and 6·2⁻²⁴ for the tables and products that a float32 angle comes
  with, the `precision` is "float32 angles". At position 0 neither changes a float32 number, so that a softmax in
  float32 shows there; with an attention factor, which may be a float32 number, it does not.
- Accepted, since good kernels do so, and reported as `precision`: weights rounded to the dtype before they meet the
  values ("weights rounded": FlashAttention); rotated vectors, scaled queries and scores rounded to it too ("scores
  rounded": eager attention in float16 or bfloat16). Ten roundings of the factors of a product, relative error uniform
  in ±u, give u·√(10/3)·t, three of the score (six with a softcap) u·|s|.
- An output o moves by Σ w_j (v_j − o) δ_j for errors δ of scores: by Σ w|v − o|δ if all conspire, and by the root of
  Σ w²(v − o)²δ² in the mean square, since signs are random. Six standard errors are allowed for any output, three for
  the mean square, times e^Σwδ and e^4Σwδ for what is not linear in them; never more than 2·tanh(δ/2), which is what
  errors of at most δ can do to a mean of ±1. Rounding of weights adds 2u and of outputs u·|o| (2u²Σw²/3 and u²o²/3 to
  the mean square). Probes of which every score is one product have four roundings of it at most, 4u·|s|.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import checks
from ..backend import Array
from ..rotation import rotate
from ..softmax import attention_by_definition
from ..theta import Rope, check_rope, frequencies
from .attention_faults import ATTENTION, other_ropes
from .attention_steps import Case, Parts, Steps
from .judging import (
    MANY,
    SMALL,
    Begin,
    Candidate,
    Judge,
    Named,
    Probe,
    Task,
    beyond,
    call,
    examine,
    lost_weights,
    one_of,
    other_bases,
)
from .probe import Unreadable, float_dtype
from .report import Finding, Mismatch, Report
from .tensors import UNIT

GRADES = ("rounded once", "weights rounded", "scores rounded")  # best first
LENGTH = 24  # tokens of most probes
LARGE = 6144.0  # a score whose difference to −6144 is above 10000, and times √64 within float16
MEASURED = ("another scale", "another base", "softmax in low precision")  # not tried as they stand


def check_attention(
    fn: Candidate, *, heads: int = 4, key_heads: int = 2, head_dim: int = 64, causal: bool = True,
    rope: Rope | None = None, window: int | None = None, softcap: float | None = None, scale: float | None = None,
    dtype: Any = np.float32, cache: bool = True, max_position: int = 4096, grade: str = "scores rounded",
    incremental: Begin = None,
) -> Report:  # fmt: skip
    """The verdict about a candidate; see the top of this file for how it is called.

    >>> from pyrope import attention
    >>> check_attention(lambda q, k, v: attention(q, k, v, causal=True)).verdict
    'right'
    >>> check_attention(lambda q, k, v: attention(q, k, v, causal=True, scale=1.0)).faults
    ('scale missing',)

    The options say what it is meant to do. ``cache=False`` is for candidates that need n = m, ``max_position`` for
    those with short tables. ``grade`` asks for better rounding than the least that is accepted, of `GRADES`.
    """
    dtype = float_dtype(dtype)
    case = make_case(heads, key_heads, head_dim, causal, rope, window, softcap, scale, dtype)
    asked = GRADES.index(checks.choice("grade", grade, GRADES))
    probes, notes = _probes(case, dtype, _accepted(fn), cache and rope is None, max_position, incremental)
    task = softmax_task(f"softmax attention of {_words(case)}, {dtype.name}", case, dtype.name, probes, tuple(notes))
    return examine(task, fn, incremental, lambda judge: explained(task, judge, fn), asked)


def softmax_task(expected: str, case: Case, dtype: str, probes: Sequence[Probe], notes: tuple[str, ...] = ()) -> Task:
    rest = (ATTENTION, MEASURED, ATTENTION["softmax in low precision"], _truth, _bounds, GRADES, notes)
    return Task("attention", expected, case, dtype, probes, Steps(), *rest)


def assert_attention(fn: Candidate, **options: Any) -> None:
    """Raises `Mismatch`, with the report of `check_attention`, unless the candidate is right."""
    __tracebackhide__ = True
    report = check_attention(fn, **options)
    if not report.ok:
        raise Mismatch(report)


def make_case(
    heads: int, key_heads: int, head_dim: int, causal: bool, rope: Rope | None, window: int | None,
    softcap: float | None, scale: float | None, dtype: np.dtype[Any],
) -> Case:  # fmt: skip
    heads, key_heads = checks.integer("heads", heads, 1), checks.integer("key_heads", key_heads, 1)
    if heads % key_heads:
        raise ValueError(f"key_heads must divide heads, {heads}, was {key_heads}")
    if dtype.name not in UNIT:
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, was {dtype}")
    if rope is not None and (check_rope(rope).axes is not None or rope.head_dim != head_dim):
        raise ValueError(f"rope must have one axis and a head_dim of {head_dim}, was {rope!r}")
    return Case(
        heads, key_heads, checks.integer("head_dim", head_dim, 1), checks.flag("causal", causal),
        head_dim**-0.5 if scale is None else checks.real("scale", scale, 0, open=True),
        None if window is None else checks.integer("window", window, 1),
        None if softcap is None else checks.real("softcap", softcap, 0, open=True),
        rope, low=dtype if dtype.itemsize == 2 else np.dtype(np.float16),
    )  # fmt: skip


def _words(case: Case) -> str:
    told = [f"{case.heads} heads over {case.key_heads}, d = {case.head_dim}", "causal" if case.causal else "not causal"]
    told += [f"scale {case.scale:.6g}"] + [f"window {case.window}"] * (case.window is not None)
    told += [f"softcap {case.softcap}"] * (case.softcap is not None)
    return ", ".join(told + ([f"with {case.rope!r} inside"] if case.rope is not None else []))


def _accepted(fn: Candidate) -> set[str]:
    """Which of the options a candidate has in its signature."""
    try:
        return {"mask", "segments"} & set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # no signature to read
        return set()


# The probes


def _probes(
    case: Case, dtype: np.dtype[Any], accepted: set[str], cache: bool, max_position: int,
    incremental: Begin,
) -> tuple[list[Probe], list[str]]:  # fmt: skip
    make, notes = Maker(case, dtype, max_position), []
    near = LENGTH if case.window is None or case.window > 2 * LENGTH else LENGTH + case.window
    probes = [
        make.random("random", near),
        replace(make.random("sharp", near), q=make.sharp(near)),
        make.random("one token", 1),
        make.random("130 tokens", 130, batch=1),
    ]
    if case.rope is not None and case.window is None:
        probes.append(make.random("far apart", LENGTH, far=True))
    if case.rope is not None and dtype == np.float64:
        probes.append(make.at_zero())
    if cache:
        probes += [make.random("cache", near, queries=5)]
        probes += [make.random(f"cache, {n} quer{'y' if n == 1 else 'ies'}", near, queries=n) for n in (1, 2)]
    probes.append(make.many())
    extra = {"scores of ±6144": make.large()}
    extra |= {f"the softcap of {case.softcap}": make.saturated()} if case.softcap is not None else {}
    extra |= {f"the edge of a window of {case.window}": make.edge(cache)} if near == LENGTH and case.window else {}
    probes += [probe for probe in extra.values() if probe is not None]
    notes += [f"{what} could not be tried here" for what, probe in extra.items() if probe is None]
    if "mask" in accepted:
        probes += [make.masked("mask", near), make.padded(near)]
    if "segments" in accepted:
        probes.append(make.packed(near))
    if incremental is not None:
        probes += [replace(make.random(f"step by step, {name}", 13), pieces=pieces) for name, pieces in _PIECES.items()]
    missing = [name for name in ("mask", "segments") if name not in accepted]
    if missing:
        notes.append(f"not tried, since the candidate has no such argument: {', '.join(missing)}")
    return probes, notes


_PIECES = {"one each": (1,) * 13, "a prompt first": (8, 1, 1, 3)}


class Maker:
    """Makes probes. Numbers are drawn anew from the same seed, so that a report can be had again."""

    def __init__(self, case: Case, dtype: np.dtype[Any], max_position: int) -> None:
        self.case, self.dtype, self.rng = case, dtype, np.random.default_rng(2104)
        self.max_position = checks.integer("max_position", max_position, 512)

    def _draw(self, b: int, heads: int, n: int, signs: bool = False) -> Array:
        x = self.rng.standard_normal((b, heads, n, self.case.head_dim))
        return (np.sign(x) if signs else x * self._unit()).astype(self.dtype)

    def _unit(self) -> float:
        """What makes scores of a size of about 1."""
        return float((self.case.scale * self.case.head_dim**0.5) ** -0.5)

    def _at(self, b: int, n: int, far: bool = False) -> Array | None:
        if self.case.rope is None:
            return None
        if far:
            some = [np.sort(self.rng.choice(self.max_position, n, replace=False)) for _ in range(b)]
            return np.array(some, np.int64)
        return np.arange(n) + np.array([3, 0, 7])[:b, None]

    def random(self, name: str, n: int, *, queries: int | None = None, batch: int = 3, far: bool = False) -> Probe:
        q = self._draw(batch, self.case.heads, min(n, queries or n))
        k, v = self._draw(batch, self.case.key_heads, n), self._draw(batch, self.case.key_heads, n, signs=True)
        return Probe(name, q, k, v, at=self._at(batch, n, far))

    def at_zero(self) -> Probe:
        """Float32 numbers at position 0, where angles have no error: what is off there comes from elsewhere."""
        probe = self.random("all at position 0", LENGTH)
        q, k = (x.astype(np.float32).astype(self.dtype) for x in (probe.q, probe.k))
        return replace(probe, q=q, k=k, at=np.zeros((3, LENGTH), np.int64))

    def sharp(self, n: int) -> Array:
        """Queries that make scores of a size of about 6, of which roundings show most."""
        return self._draw(3, self.case.heads, n) * self.dtype.type(6)

    def _along(self, b: int, heads: int, sizes: Array) -> Array:
        """Vectors (b, heads, n, d) along one direction that RoPE hardly turns, with q·k·scale = size of q × of k."""
        x = np.zeros((b, heads, sizes.shape[-1], self.case.head_dim))
        x[..., self._still()] = sizes[..., None, :] * self.case.scale**-0.5
        return x.astype(self.dtype)

    def _still(self) -> int:
        rope = self.case.rope
        if rope is None:
            return 0
        start = 0 if rope.placement == "prefix" else rope.head_dim - rope.width
        if rope.width < rope.head_dim:
            return rope.width if start == 0 else 0
        return rope.pairs - 1 if rope.layout == "half" else rope.width - 2

    def _turns(self, n: int) -> float:
        """By how much RoPE turns the still direction over so many tokens."""
        rope = self.case.rope
        return 0.0 if rope is None or rope.width < rope.head_dim else float(frequencies(rope)[-1]) * n

    def large(self) -> Probe | None:
        """Scores of ±6144, values of the same sign: a query that sees no positive key must return −1."""
        n = 2 * (min(LENGTH, self.case.window or LENGTH) // 2) or 2
        if self._turns(n) > 0.5:
            return None
        size = math.sqrt(LARGE)
        signs = np.array([np.ones(n), np.where(np.arange(n) < n // 2, -1.0, 1.0)])
        q, k = self._along(2, self.case.heads, np.full((2, n), size)), self._along(2, self.case.key_heads, signs * size)
        v = np.broadcast_to(signs[:, None, :, None], k.shape).astype(self.dtype)
        return Probe("large scores", q, k, v, at=self._at(2, n), random=False)

    def saturated(self) -> Probe | None:
        """Scores of 3 to 6 times the softcap, which all become nearly the same: values −1 for the lesser ones."""
        cap, n = self.case.softcap, 16
        if cap is None or self._turns(n) > 0.3 or (self.case.window or 4) < 4:
            return None
        sizes = np.broadcast_to(3.0 + np.arange(n) % 4, (1, n))
        q = self._along(1, self.case.heads, np.full((1, n), math.sqrt(cap)))
        k = self._along(1, self.case.key_heads, sizes * math.sqrt(cap))
        v = np.broadcast_to(np.where(sizes > 4, 1, -1)[:, None, :, None], k.shape).astype(self.dtype)
        return Probe("saturated scores", q, k, v, at=self._at(1, n), random=False)

    def many(self) -> Probe:
        """One weight near 1 and 127 that a low-precision sum loses, one by one: half an ulp of 1 and less."""
        n, sizes = 128, []
        for name in ("bfloat16", "float16"):
            score = -math.log(UNIT[name] / 2.5)
            cap = self.case.softcap
            score = score if cap is None else cap * math.atanh(min(score / cap, 0.9))
            sizes.append(math.sqrt(score))
        first = np.zeros((2, n))
        first[:, 0] = sizes
        q = self._along(2, self.case.heads, np.broadcast_to(np.array(sizes)[:, None], (2, n)))
        k = self._along(2, self.case.key_heads, first)
        v = np.ones(k.shape, self.dtype)
        v[..., 0, :] = -1
        return Probe(MANY, q, k, v, at=self._at(2, n), random=False)

    def edge(self, cache: bool) -> Probe | None:
        """A window too long for the random probes: large scores at its edge alone."""
        w = self.case.window
        if w is None or w > (16384 if cache else 512) or self._turns(w) > 0.5:
            return None
        n, queries = w + 12, 8 if cache else w + 12
        score = math.log(w) + 1
        near = np.zeros((1, n))
        near[:, :14] = 1.0  # the edges of the last 8 queries
        q = self._along(1, self.case.heads, np.full((1, queries), math.sqrt(score)))
        k = self._along(1, self.case.key_heads, near * math.sqrt(score))
        v = self._draw(1, self.case.key_heads, n, signs=True)
        return Probe("edge of the window", q, k, v, at=self._at(1, n), random=False)

    def masked(self, name: str, n: int) -> Probe:
        probe = self.random(name, n)
        mask = self.rng.random((3, 1, n, n)) < 0.6
        mask[:, :, 5] = False  # a row that sees nothing
        return replace(probe, options={"mask": mask})

    def padded(self, n: int) -> Probe:
        """Padding on the left, of another length in each row; positions begin after it."""
        probe, pad = self.random("padding", n), np.array([0, 3, 6])
        seen = np.arange(n) >= pad[:, None]
        at = None if probe.at is None else np.maximum(np.arange(n) - pad[:, None], 0)
        mask = np.broadcast_to(seen[:, None, None, :], (3, 1, n, n)).copy()
        return replace(probe, at=at, options={"mask": mask})

    def packed(self, n: int) -> Probe:
        probe = self.random("packed", n)
        cuts = np.array([[n // 3, n // 2], [1, n - 1], [n, n]])
        segments = (np.arange(n) >= cuts[:, :1]).astype(np.int64) + (np.arange(n) >= cuts[:, 1:])
        return replace(probe, options={"segments": segments})


# What is right, what a mistake would give, how far off both may be


def _truth(case: Case, probe: Probe) -> Array:
    """Eq. (2) in float64, by the definition."""
    q, k, v = probe.wide()[:3]
    if case.rope is not None and probe.at is not None:
        q, k = rotate(q, probe.at, case.rope), rotate(k, probe.at, case.rope)
    mask, segments = probe.options.get("mask"), probe.options.get("segments")
    if segments is not None:
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap, "scale": case.scale}
    return attention_by_definition(q, k, v, mask=mask, **options)


def _bounds(case: Case, dtype: str, probe: Probe, parts: Parts, level: int) -> tuple[Array, float]:
    """How far off outputs may be, each and in the mean square, as the top of this file derives it."""
    u, fine, low = UNIT[dtype], UNIT["float64" if dtype == "float64" else "float32"], dtype in SMALL
    m, d = parts.k.shape[-2:]
    factors, of_score = [(0, 0), (0, 0), (10, 3 if case.softcap is None else 6)][level]
    w, v, out = np.nan_to_num(np.abs(parts.weights)), parts.v, np.nan_to_num(parts.weights @ parts.v)
    with np.errstate(all="ignore"):
        terms = case.scale * np.sqrt(parts.q**2 @ (parts.k**2).swapaxes(-1, -2))
        scores = np.where((w > 0) & (np.abs(parts.scores) < 1e30), np.abs(parts.scores), 0)
    angle = angle_error(case, dtype, probe, level)
    noise = (fine * math.sqrt(d + 8) * (terms + scores.max(axis=-1, keepdims=True))) ** 2 + (angle * terms) ** 2
    if probe.random:
        noise += low * u**2 / 3 * (factors * terms**2 + of_score * scores**2)
    most = 6 * np.sqrt(noise) + (0 if probe.random else 4 * u * low * (level == 2) * scores)
    rounded = u * low * (level > 0)
    tiny = (m + 1) * 2.0**-24 if dtype == "float16" else 0.0  # below the normal numbers
    total, size = w.sum(axis=-1, keepdims=True), float(np.abs(v).max())
    worst = _moved(w * most, v, out) * np.exp(np.minimum((w * most).sum(axis=-1, keepdims=True), 6))
    if (total < 1 + 1e-9).all():  # a mean, which is not so where the softmax is over the wrong axis
        most = np.where(w > 0, most, 0).max(axis=-1, keepdims=True)
        worst = np.minimum(worst, size * 2 * np.tanh(most / 2))
    worst += 2 * rounded + 1.01 * u * np.abs(out) + 4 * (m + 8) * fine + tiny
    error = w**2 * noise
    square = error.sum(axis=-1, keepdims=True) * (size**2 + out**2) - 2 * out * (error @ v)
    square *= np.exp(np.minimum(4 * (w * np.sqrt(noise)).sum(axis=-1, keepdims=True), 6))
    square += u**2 / 3 * out**2 + (w**2).sum(axis=-1, keepdims=True) * (rounded**2 / 1.5 + (16 * fine) ** 2)
    return worst, math.inf if not probe.random else 3 * math.sqrt(square.mean()) + 8 * fine + tiny


def angle_error(case: Case, dtype: str, probe: Probe, level: int) -> float:
    """Of a float32 angle, or in float64 at the best level of a float64 one."""
    if case.rope is None or probe.at is None:
        return 0.0
    last, single = float(probe.at.max(initial=0)), UNIT["float32"]
    if dtype != "float64" or not level:
        return 4 * last * (UNIT["float64"] if dtype == "float64" else single)
    exact = not last and case.rope.attention_factor == 1  # cos 0 = 1 and sin 0 = 0 change no float32 number
    return (4 * last + (0 if exact else 6)) * single


def _moved(errors: Array, v: Array, out: Array) -> Array:
    """Σ errors·|v − out| over the keys, or more: |v − out| = 1 − v·out where v = ±1."""
    total = errors.sum(axis=-1, keepdims=True)
    if (np.abs(v) == 1).all() and (np.abs(out) <= 1 + 1e-9).all():
        return np.maximum(total - out * (errors @ v), 0)
    return total * (np.abs(v).max() + np.abs(out))


# Names for what is wrong


def explained(task: Task, judge: Judge, fn: Candidate | None = None) -> list[Finding]:
    """The mistakes that give the numbers. With the candidate, its base is read from it, without, it is searched for."""
    return one_of(judge, task.known) or lost_weights(task, judge) or beyond(task, judge, _measured(task, judge, fn))


def _measured(task: Task, judge: Judge, fn: Candidate | None) -> Iterator[Named]:
    """Mistakes with a number in them."""
    scale = judge.tuned(lambda x: {"scale": x}, np.geomspace(1 / 64, 64, 25).tolist())
    if scale is not None:
        yield ATTENTION["another scale"], scale
    if fn is None:
        yield from other_bases(task, judge, other_ropes(task.case.rope))
        return
    for rope in _read_ropes(fn, task.case, judge):
        yield from other_bases(task, judge, [rope], [rope.base])


def _read_ropes(fn: Candidate, case: Case, judge: Judge) -> Iterator[Rope]:
    """Ropes of another base, by R(m − n), as the scores of unit vectors tell it, for each pairing and direction."""
    rope = case.rope
    if rope is None or rope.width < 4 or case.softcap is not None or (case.window or 3) < 3:
        return
    for layout in ("half", "interleaved") if rope.layout == "half" else ("interleaved", "half"):
        other = rope if layout == rope.layout[: len(layout)] else replace(rope, layout=layout)
        read = _unit_scores(fn, case, other, judge.probes[0].q.dtype)
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


def _unit_scores(fn: Candidate, case: Case, rope: Rope, dtype: np.dtype[Any]) -> Array:
    """cos and sin of the angles of all pairs, (2, distances, p), sin at one less: from the weights of three tokens.

    The keys are c·x at position 0, c·y at 1, and 0; the query is c·x: scores c²·scale·a² times cos, sin and 0. The
    values are unit vectors, so that outputs are weights, and the logarithms of their ratios the scores.
    """
    p, start = rope.pairs, 0 if rope.placement == "prefix" else rope.head_dim - rope.width
    x = start + (np.arange(p) if rope.layout == "half" else 2 * np.arange(p))
    y = x + (p if rope.layout == "half" else 1)
    c, read = 1.7 * case.scale**-0.5, []
    q, k = np.zeros((p, case.heads, 3, case.head_dim)), np.zeros((p, case.key_heads, 3, case.head_dim))
    q[np.arange(p), :, 2, x] = k[np.arange(p), :, 0, x] = k[np.arange(p), :, 1, y] = c
    v = np.zeros_like(k)
    v[..., range(3), range(3)] = 1
    for distance in _DISTANCES:
        at = np.broadcast_to(np.array([0, 1, distance]), (p, 3)).copy()
        try:
            out = call(fn, *(z.astype(dtype) for z in (q, k, v)), at).astype(np.float64)
        except Unreadable:  # it may take only what it was written for
            out = np.empty(0)
        if out.shape != q.shape:
            return np.full((2, 1, p), np.nan)
        w = out[:, :, 2]
        with np.errstate(all="ignore"):
            read.append(np.log(w[..., :2] / w[..., 2:3]).mean(axis=1).T)
    return np.stack(read, axis=1) / (c * c * case.scale * rope.attention_factor**2)
