"""Rotations and attention as a person writes them in NumPy, without a line of pyrope: candidates that are right.

Frequencies come from mpmath (`truth`) or from float32 arithmetic as other libraries have it.
"""

from __future__ import annotations

import math

import numpy as np
import truth

from pyrope import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN

F32 = np.float32


def features(layout: str, r: int) -> tuple[np.ndarray, np.ndarray]:
    """The two features of each pair, as numbers."""
    i = np.arange(r // 2)
    return (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + r // 2)


def theta(rope: Rope) -> np.ndarray:
    return np.array([float(x) for x in truth.theta(rope)])


def turn(x, cos, sin, rope: Rope):
    """x (…, n, d) in the dtype of x and the tables."""
    reads, _, writes = rope.layout.partition("-to-")
    start = rope.head_dim - rope.width if rope.placement == "suffix" else 0
    (a, b), (c, e) = features(reads, rope.width), features(writes or reads, rope.width)
    x1, x2, y = x[..., start + a], x[..., start + b], x.copy()
    y[..., start + c], y[..., start + e] = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return y


def rotation(rope: Rope, *, w=None, angle=np.float64, tables=np.float64, product=np.float64):
    """fn(x, positions), with frequencies w and a dtype for each step; a dtype of None is that of x."""
    w, a = theta(rope) if w is None else w, float(truth.attention_factor(rope))
    owner = None if rope.axes is None else truth.axis(rope)

    def fn(x, positions):
        m = positions[..., None] if owner is None else np.moveaxis(positions[owner], 0, -1)
        angles = m.astype(angle) * w.astype(angle)
        cos, sin = ((f(angles).astype(angle) * angle(a)).astype(tables or x.dtype) for f in (np.cos, np.sin))
        y = turn(x.astype(product or x.dtype), cos, rope.direction * sin, rope)
        return y.astype(x.dtype)

    return fn


# ── Frequencies in float32 ───────────────────────────────────────────────────────────────────────────────────────────


def power(base, r):
    """As in transformers."""
    return F32(1) / F32(base) ** (np.arange(0, r, 2, dtype=F32) / F32(r))


def exponential(base, r):
    """As in MLX."""
    return np.exp(-np.arange(0, r, 2, dtype=F32) * (np.log(F32(base)) / F32(r)))


def running(base, r):
    """As in ggml: θ_i = θ_{i−1}·base^(−2/r)."""
    w, step = np.ones(r // 2, F32), F32(base) ** (F32(-2) / F32(r))
    for i in range(1, r // 2):
        w[i] = w[i - 1] * step
    return w


def rescaled32(rope: Rope, series=power):
    """Θ of a rope in float32 throughout, after the formulas of the papers."""
    s, r, base = rope.scaling, rope.width, rope.base
    if isinstance(s, DynamicNTK):
        ratio = F32(s.factor) * F32(max(s.length, s.original_length)) / F32(s.original_length)
        return series(F32(base) * (ratio - (F32(s.factor) - F32(1))) ** F32(r / (r - 2)), r)
    w = series(base, r)
    if isinstance(s, Linear):
        return w / F32(s.factor)
    if isinstance(s, LongRoPE):
        return w / np.array(s.long if s.length > s.original_length else s.short, F32)
    if isinstance(s, Proportional):
        return np.where(np.arange(r // 2) < int(s.fraction * r // 2), w / F32(s.factor), F32(0))
    if isinstance(s, Llama3):
        turns = F32(s.original_length) / (F32(2 * math.pi) / w)
        t = (turns - F32(s.low)) / (F32(s.high) - F32(s.low)) if s.high > s.low else (turns > F32(s.low)).astype(F32)
        t = np.clip(t, F32(0), F32(1))
        return (F32(1) - t) * (w / F32(s.factor)) + t * w
    if isinstance(s, YaRN):
        ends = [
            r * math.log(s.original_length / (2 * math.pi * x)) / (2 * math.log(base))
            for x in (s.beta_fast, s.beta_slow)
        ]
        low, high = (math.floor(ends[0]), math.ceil(ends[1])) if s.truncate else ends
        low, high = max(low, 0), min(high, r - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(r // 2, dtype=F32) - F32(low)) / F32(high - low), F32(0), F32(1))
        return (w / F32(s.factor)) * ramp + w * (F32(1) - ramp)
    return w


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rounded(x, bits: int):
    """x with so many significant bits."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(mantissa * 2.0**bits), exponent - bits)


def same(x):
    return x


def visible(n, t, causal=True, window=None, mask=None, segments=None):
    """Which key each query sees, bool, (n, t) or (b, 1, n, t); the queries are the last of the tokens."""
    distance = np.arange(t - n, t)[:, None] - np.arange(t)
    seen = distance >= 0 if causal else distance == distance
    seen = seen if window is None else seen & (abs(distance) < window)
    seen = seen if mask is None else seen & mask
    if segments is None:
        return seen
    return seen & (segments[:, None, segments.shape[1] - n :, None] == segments[:, None, None, :])


def softmax_attention(
    causal=True, window=None, softcap=None, scale=None, rope=None, compute=np.float64, scored=same, weighed=same, block=None
):  # fmt: skip
    """fn(q, k, v[, positions], mask=, segments=); scores and weights pass through `scored` and `weighed`; with a block
    the softmax is online, over so many keys at a time."""

    def fn(q, k, v, positions=None, mask=None, segments=None):
        (_, h, n, d), t, dtype = q.shape, k.shape[2], q.dtype
        q, k, v = (x.astype(compute) for x in (q, k, v))
        if rope is not None:
            q, k = (turned(x, positions, rope) for x in (q, k))
        k, v = (np.repeat(x, h // x.shape[1], axis=1) for x in (k, v))
        s = scored(q @ k.swapaxes(-1, -2) * compute(d**-0.5 if scale is None else scale))
        s = s if softcap is None else compute(softcap) * np.tanh(s / compute(softcap))
        s = np.where(visible(n, t, causal, window, mask, segments), s, compute(-np.inf))
        return (_whole(s, v, weighed) if block is None else _online(s, v, block)).astype(dtype)

    return fn


def turned(x, positions, rope):
    m = positions[:, None, -x.shape[2] :, None] * theta(rope)  # where queries are fewer, they are the last
    return turn(x, np.cos(m).astype(x.dtype), rope.direction * np.sin(m).astype(x.dtype), rope)


def _whole(s, v, weighed):
    top = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return weighed(e / np.where(total == 0, 1, total)) @ v


def _online(s, v, block):
    top, total, out = np.full((*s.shape[:3], 1), -np.inf, s.dtype), np.zeros((*s.shape[:3], 1), s.dtype), 0
    for start in range(0, s.shape[3], block):
        part = slice(start, start + block)
        new = np.maximum(top, s[..., part].max(axis=-1, keepdims=True))
        safe = np.where(np.isneginf(new), 0, new)
        p, old = np.exp(s[..., part] - safe), np.exp(top - safe)
        total, out, top = total * old + p.sum(axis=-1, keepdims=True), out * old + p @ v[:, :, part], new
    return out / np.where(total == 0, 1, total)


MAPS = {
    "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "exp": np.exp,
}


def linear_attention(rope, name="elu+1", causal=True, chunk=None, compute=np.float64, stored=same):
    """fn(q, k, v, positions), by the matrix of similarities or, with a chunk, by a running state."""

    def fn(q, k, v, positions):
        dtype, h = q.dtype, q.shape[1]
        q, k, v = (x.astype(compute) for x in (q, k, v))
        k, v = (np.repeat(x, h // x.shape[1], axis=1) for x in (k, v))
        q, k = stored(MAPS[name](q)), stored(MAPS[name](k))
        tq, tk = (turned(x, positions, rope) for x in (q, k))
        if chunk is None:
            seen = visible(q.shape[2], k.shape[2], causal)
            den = np.where(seen, q @ k.swapaxes(-1, -2), 0).sum(axis=-1, keepdims=True)
            return (np.where(seen, tq @ tk.swapaxes(-1, -2), 0) @ v / np.where(den == 0, 1, den)).astype(dtype)
        return _chunked(q, k, tq, tk, v, chunk).astype(dtype)

    return fn


def _chunked(q, k, tq, tk, v, chunk):
    out = np.zeros(q.shape, q.dtype)
    state, total = (
        np.zeros((*q.shape[:2], q.shape[3], v.shape[3]), q.dtype),
        np.zeros((*q.shape[:2], q.shape[3], 1), q.dtype),
    )
    for start in range(0, q.shape[2], chunk):
        at = np.s_[:, :, start : start + chunk]
        low = np.tri(q[at].shape[2], dtype=bool)
        num = np.where(low, tq[at] @ tk[at].swapaxes(-1, -2), 0) @ v[at] + tq[at] @ state
        den = np.where(low, q[at] @ k[at].swapaxes(-1, -2), 0).sum(axis=-1, keepdims=True) + q[at] @ total
        out[at] = num / np.where(den == 0, 1, den)
        state, total = state + tk[at].swapaxes(-1, -2) @ v[at], total + k[at].sum(axis=2)[..., None]
    return out
