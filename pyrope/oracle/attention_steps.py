"""Attention written out plainly, with all scores in memory, each step rightly or in one of the known wrong ways.

`Steps` and `LinearSteps` say how each step is done; the defaults are right. A mistake is a change of some of them. That
gives a broken candidate to test the oracle with, and, in float64, the numbers that a candidate with this mistake must
return. What is right is never taken from here, but from `pyrope.softmax` and `pyrope.linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Array, compute_dtype
from ..rotation import Tables, rotate, rotation_tables
from ..theta import Rope


@dataclass(frozen=True)
class Case:
    """What an implementation is meant to compute."""

    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    scale: float = 1.0  # softmax attention alone, as the next two
    window: int | None = None
    softcap: float | None = None
    rope: Rope | None = None  # rotates inside
    feature_map: str = "elu+1"  # linear attention alone
    low: np.dtype[Any] = np.dtype(np.float16)  # what "low precision" is


@dataclass(frozen=True)
class Steps:
    """How softmax attention is done, step by step; the defaults are right."""

    scale: float = 1.0  # times the right one
    groups: str = "repeated"  # or "tiled", or "first": all read key head 0
    batch: str = "own"  # or "first": all rows read the keys of row 0
    rotated: str = "qk"
    rope: Rope | None = None  # instead of the right one
    times: int = 1  # how often q and k are rotated
    factor: int = 2  # how often the attention factor enters a score
    positions: str = "given"  # or "counted": 0 … n−1, whatever is given
    chunks: int = 1  # of a row, each with the positions of the first
    lag: int = 0  # added to the positions of queries
    causal: bool | None = None  # instead of the right one
    ahead: int = 0  # how many tokens of the future a query sees
    corner: str = "bottom right"  # or "top left"
    window: str = "kept"  # or "ignored"
    wider: tuple[int, int] = (0, 0)  # to the past, to the future
    softcap: str = "right"  # or "missing", "after mask", "no division", "before scale"
    hidden: str = "−inf"  # or "added", −1e4 added; "filled", the lowest finite number
    empty: str = "zeros"  # or "NaN": rows that see nothing
    mask: str = "kept"  # or "ignored", "inverted"
    segments: str = "kept"  # or "ignored"
    axis: int = -1
    stable: bool = True  # the maximum is subtracted
    low: bool = False  # exponentials and their sum in low precision
    output: str = "right"  # or "transposed", "reshaped"
    cache: str = "right"  # or "restarted" after the first call, "counted" from 0 in every call, "late", "forgotten"


@dataclass(frozen=True)
class Parts:
    """What `attend` went through, heads spread out: q, k, v as they were multiplied."""

    q: Array  # (b, h, n, d)
    k: Array  # (b, h, m, d)
    v: Array
    scores: Array  # (b, h, n, m), as they enter the softmax; of linear attention, |φ(q)||φ(k)| over the denominator
    weights: Array
    out: Array  # (b, h, n, e), or as `Steps.output` says


def attend(
    case: Case, steps: Steps, q: Array, k: Array, v: Array, at: Any = None, mask: Any = None, segments: Any = None
) -> Parts:
    """Softmax attention, Eq. (2): q (b, h, n, d), k and v (b, g, m, d), positions (b, m), mask (b, 1, n, m)."""
    work = compute_dtype("q", q)
    q, k, v = (x.astype(work) for x in (q, k, v))
    (_, h, n, _), m = q.shape, k.shape[-2]
    if steps.batch == "first":
        k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    if case.rope is not None:
        rope, places = steps.rope or case.rope, _places(steps, at, n)
        with_factor = {"q": steps.factor > 0, "k": steps.factor > 1, "v": False}
        q, k, v = (
            _turned(steps, name, x, places[name], rope if with_factor[name] else rope.pure)
            for name, x in (("q", q), ("k", k), ("v", v))
        )
    k, v = (_spread(x, h, steps.groups) for x in (k, v))
    with np.errstate(all="ignore"):
        seen = _seen(case, steps, n, m, mask, segments)
        scores = _masked(case, steps, _scores(case, steps, q @ k.swapaxes(-1, -2)), seen)
        weights = _softmax(case, steps, scores)
        out = weights @ v  # Eq. (2)
    return Parts(q, k, v, scores, weights, _laid_out(steps.output, out))


def _laid_out(output: str, out: Array) -> Array:
    if output == "right":
        return out
    return out.swapaxes(1, 2) if output == "transposed" else out.swapaxes(1, 2).reshape(out.shape)


def _places(steps: Steps | LinearSteps, at: Array, n: int) -> dict[str, Array]:
    """Where the n queries, the keys and the values are taken to be, when the m tokens are at (b, m)."""
    m = at.shape[-1]
    if steps.positions == "counted":
        at = np.broadcast_to(np.arange(m), at.shape)
    at = at[:, np.arange(m) % -(-m // steps.chunks)]
    return {"q": at[:, m - n :] + steps.lag, "k": at, "v": at}


def _turned(steps: Steps | LinearSteps, name: str, x: Array, at: Array, rope: Rope | None) -> Array:
    """q, k or v, rotated as often as the steps say, if they rotate it at all."""
    if rope is None or name not in steps.rotated:
        return x
    tables = _tables(rope, at.astype(np.int64).tobytes(), at.shape, x.dtype)
    for _ in range(steps.times):
        x = rotate(x, at, rope, tables=tables)
    return x


@functools.lru_cache(64)
def _tables(rope: Rope, at: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tables:
    """Made once for the many mistakes that are tried on the same probe."""
    return rotation_tables(rope, np.frombuffer(at, np.int64).reshape(shape), like=np.empty(0, dtype))


def _spread(x: Array, h: int, groups: str) -> Array:
    """Key heads (b, g, m, d) as (b, h, m, d), one for each query head."""
    g = x.shape[1]
    head = {"repeated": np.arange(h) // (h // g), "tiled": np.arange(h) % g, "first": np.zeros(h, int)}[groups]
    return x[:, head]


def _scores(case: Case, steps: Steps, products: Array) -> Array:
    scale, cap = case.scale * steps.scale, case.softcap
    if cap is None or steps.softcap in ("missing", "after mask"):
        return products * scale
    if steps.softcap == "before scale":
        return cap * np.tanh(products / cap) * scale
    return cap * np.tanh(products * scale / (1.0 if steps.softcap == "no division" else cap))


def _seen(case: Case, steps: Steps, n: int, m: int, mask: Any, segments: Any) -> Array:
    """Which key each query sees, (b or 1, 1, n, m)."""
    away = np.arange(n)[:, None] - np.arange(m) + (m - n if steps.corner == "bottom right" else 0)
    seen = np.ones((1, 1, n, m), bool)
    causal = case.causal if steps.causal is None else steps.causal
    if causal:
        seen = seen & (away >= -steps.ahead)
    if case.window is not None and steps.window == "kept":
        seen = seen & (away < case.window + steps.wider[0])
        seen = seen & (-away < case.window + steps.wider[1] if not causal else True)
    if mask is not None and steps.mask != "ignored":
        seen = seen & (mask == (steps.mask == "kept"))
    if segments is not None and steps.segments == "kept":
        seen = seen & (segments[:, None, m - n :, None] == segments[:, None, None, :])
    return seen


def _masked(case: Case, steps: Steps, scores: Array, seen: Array) -> Array:
    if steps.hidden == "added":
        scores = scores + np.where(seen, 0, scores.dtype.type(-1e4))
    else:
        scores = np.where(seen, scores, -np.inf if steps.hidden == "−inf" else np.finfo(scores.dtype).min)
    if case.softcap is not None and steps.softcap == "after mask":
        return case.softcap * np.tanh(scores / case.softcap)
    return scores


def _softmax(case: Case, steps: Steps, scores: Array) -> Array:
    work = scores.dtype
    if steps.low:
        scores = scores.astype(case.low)
    top = scores.max(axis=steps.axis, keepdims=True) if steps.stable else scores.dtype.type(0)
    powers = np.exp(scores - np.where(np.isfinite(top.astype(work)), top, scores.dtype.type(0)))
    if steps.low:  # one after the other, each sum rounded
        total = np.add.accumulate(powers, axis=steps.axis).take([-1], axis=steps.axis)
    else:
        total = powers.sum(axis=steps.axis, keepdims=True)
    if steps.empty == "zeros":
        total = np.where(total == 0, total.dtype.type(1), total)
    return (powers / total).astype(work)


@dataclass(frozen=True)
class LinearSteps:
    """How linear attention is done, step by step; the defaults are Eq. (19)."""

    feature_map: str | None = None  # instead of the right one
    order: str = "map first"  # or "rotation first", "no rotation"
    rotated: str = "qk"
    times: int = 1
    rope: Rope | None = None  # instead of the right one
    positions: str = "given"  # as in Steps, and the next two
    chunks: int = 1
    lag: int = 0
    denominator: str = "plain"  # or "rotated", "missing", "over heads", "of all keys"
    factor: bool = False  # whether the rope's attention factor enters
    causal: bool | None = None
    ahead: int = 0
    groups: str = "repeated"
    batch: str = "own"
    chunk: int | None = None  # after so many tokens …
    lost: str = ""  # … these sums are forgotten: "both", "numerator", "denominator"
    decay: float = 1.0  # of the state, for each token
    output: str = "right"
    cache: str = "right"  # as in Steps


MAPS: dict[str, Callable[[Array], Array]] = {
    "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "exp": np.exp,
    "identity": lambda x: x,
    "elu": lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1),
    "softplus": lambda x: np.logaddexp(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
}


def attend_linearly(case: Case, steps: LinearSteps, q: Array, k: Array, v: Array, at: Array) -> Parts:
    """Linear attention, Eq. (19), with all weights: q (b, h, n, d), k and v (b, g, n, d), positions (b, n)."""
    work, phi, h, n = compute_dtype("q", q), MAPS[steps.feature_map or case.feature_map], q.shape[1], q.shape[-2]
    q, k, v = (x.astype(work) for x in (q, k, v))
    if steps.batch == "first":
        k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    k, v = (_spread(x, h, steps.groups) for x in (k, v))
    rope = None if case.rope is None or steps.order == "no rotation" else steps.rope or case.rope
    rope = rope.pure if rope is not None and not steps.factor else rope
    places = _places(steps, at, n)

    def turned(name: str, x: Array) -> Array:
        return _turned(steps, name, x, places[name], rope)

    with np.errstate(all="ignore"):
        if steps.order == "rotation first":
            q, k = phi(turned("q", q)), phi(turned("k", k))
            turned_q, turned_k = q, k
        else:
            q, k = phi(q), phi(k)
            turned_q, turned_k = turned("q", q), turned("k", k)
        v = turned("v", v)
        seen, kept = _kept(case, steps, n, k.shape[-2])
        scores = turned_q @ turned_k.swapaxes(-1, -2)
        plain = scores if steps.denominator == "rotated" else q @ k.swapaxes(-1, -2)
        total = (plain if steps.denominator == "of all keys" else plain * kept[1]).sum(axis=-1, keepdims=True)
        if steps.denominator == "over heads":
            total = np.broadcast_to(total.sum(axis=1, keepdims=True), total.shape)
        total = np.where(seen.any(axis=-1, keepdims=True), total, 1) if steps.denominator != "missing" else 1.0
        weights = scores * kept[0] / total
        out = weights @ v  # Eq. (19)
        sizes = np.linalg.norm(q, axis=-1)[..., None] * np.linalg.norm(k, axis=-1)[..., None, :] * kept[0] / total
    return Parts(turned_q, turned_k, v, sizes, weights, _laid_out(steps.output, out))


def _kept(case: Case, steps: LinearSteps, n: int, m: int) -> tuple[Array, list[Array]]:
    """Which key each query sees, and how much of it is left in numerator and denominator: (n, m) each."""
    i, j = np.arange(m - n, m)[:, None], np.arange(m)
    causal = case.causal if steps.causal is None else steps.causal
    seen = (i - j >= -steps.ahead) if causal else np.ones((n, m), bool)
    here = np.ones((n, m), bool) if steps.chunk is None else i // steps.chunk == j // steps.chunk
    faded = np.float64(steps.decay) ** np.maximum(i - j, 0) * seen
    return seen, [faded * here if steps.lost in ("both", part) else faded for part in ("numerator", "denominator")]


def run(case: Case, steps: Steps | LinearSteps, *arrays: Array, **options: Any) -> Parts:
    """Attention of the kind that the steps are of."""
    if isinstance(steps, Steps):
        return attend(case, steps, *arrays, **options)
    return attend_linearly(case, steps, *arrays, **options)


def candidate(case: Case, steps: Steps | LinearSteps) -> Callable[..., Array]:
    """A candidate for `check_attention` or `check_linear_attention` that does it like this."""

    def fn(q: Array, k: Array, v: Array, positions: Any = None, mask: Any = None, segments: Any = None) -> Array:
        more = {"mask": mask, "segments": segments} if isinstance(steps, Steps) else {}
        return run(case, steps, q, k, v, positions, **more).out.astype(q.dtype)

    return fn


def incremental(case: Case, steps: Steps | LinearSteps) -> Callable[[], Callable[..., Array]]:
    """Makes functions that remember keys, values and positions from call to call."""

    def begin() -> Callable[..., Array]:
        past: list[Array] = []

        def step(q: Array, k: Array, v: Array, positions: Any = None) -> Array:
            b, n = q.shape[0], q.shape[-2]
            at = np.zeros((b, n), np.int64) if positions is None else positions
            if steps.cache == "counted" or (past and steps.cache == "restarted"):
                at = np.broadcast_to(np.arange(n), at.shape)
            at = at + 1 if past and steps.cache == "late" else at
            if past and steps.cache != "forgotten":
                axes = zip(past, (k, v, at), (-2, -2, -1), strict=True)
                k, v, at = (np.concatenate((old, new), axis=axis) for old, new, axis in axes)
            past[:] = k, v, at
            return run(case, steps, q, k, v, at).out.astype(q.dtype)

        return step

    return begin
