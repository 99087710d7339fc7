"""Attention as other people write it, for the oracle's tests: right ones, none of which uses pyrope but to rotate."""

from __future__ import annotations

import math

import numpy as np

import pyrope


def rounder(dtype):
    """Rounds float32 arrays to a dtype and back."""
    return lambda x: np.asarray(x).astype(dtype).astype(np.float32 if np.dtype(dtype).itemsize < 8 else np.float64)


def exactly(x):
    return x


def hidden(n, m, causal, window):
    """Which keys a query must not see, (n, m)."""
    i, j = np.arange(m - n, m)[:, None], np.arange(m)[None]
    out = np.zeros((n, m), bool)
    if causal:
        out |= j > i
    if window is not None:
        out |= (i - j >= window) | (j - i >= window)
    return out


def forbid(n, m, causal, window, mask, segments):
    out = hidden(n, m, causal, window)[None, None]
    if mask is not None:
        out = out | ~mask
    if segments is not None:
        out = out | (segments[:, None, -n:, None] != segments[:, None, None, :])
    return out


def turned(x, at, rope, r):
    """The rotation with tables and products rounded by r, as eager code in a low dtype does it."""
    cos, sin = (r(t.astype(np.float32) if x.dtype != np.float64 else t)[:, None] for t in pyrope.cos_sin(rope, at))
    start = rope.start
    part = x[..., start : start + rope.width]
    first, second = (
        (part[..., ::2], part[..., 1::2]) if rope.layout.startswith("interleaved") else np.split(part, 2, axis=-1)
    )
    a, b = r(r(first * cos) - r(second * sin)), r(r(first * sin) + r(second * cos))
    out = x.copy()
    both = (
        np.stack((a, b), axis=-1).reshape(part.shape)
        if rope.layout.endswith("interleaved")
        else np.concatenate((a, b), -1)
    )
    out[..., start : start + rope.width] = both
    return out


def eager(dtype, *, causal=True, window=None, softcap=None, scale=None, rope=None, low=True):
    """All scores at once; if low, every step rounded to the dtype, but the softmax, as in eager torch code."""
    r = rounder(dtype) if low else exactly

    def fn(q, k, v, positions=None, mask=None, segments=None):
        wide = np.float64 if q.dtype == np.float64 else np.float32
        h, g, n, m = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        q, k, v = (x.astype(wide) for x in (q, k, v))
        if rope is not None:
            q, k = turned(q, positions, rope, r), turned(k, positions, rope, r)
        k, v = np.repeat(k, h // g, axis=1), np.repeat(v, h // g, axis=1)
        q = r(q * wide(1 / math.sqrt(q.shape[-1]) if scale is None else scale))  # first: q·k may be beyond float16
        s = r(np.einsum("bhnd,bhmd->bhnm", q, k))
        if softcap is not None:
            s = r(r(np.tanh(r(s / wide(softcap)))) * wide(softcap))
        s = np.where(forbid(n, m, causal, window, mask, segments), -np.inf, s)
        with np.errstate(invalid="ignore"):
            e = np.exp(s - s.max(axis=-1, keepdims=True))
            w = np.nan_to_num(e / e.sum(axis=-1, keepdims=True))
        return np.einsum("bhnm,bhmd->bhnd", r(w), v).astype(dtype)

    return fn


def online(dtype, *, causal=True, window=None, softcap=None, scale=None, rope=None, block=7, low=True):
    """Keys by blocks with a running maximum and sum in float32, weights rounded before they meet the values."""
    r = rounder(dtype) if low else exactly

    def fn(q, k, v, positions=None, mask=None, segments=None):
        wide = np.float64 if q.dtype == np.float64 else np.float32
        (b, h, n, d), (g, m) = q.shape, k.shape[1:3]
        q, k, v = (x.astype(wide) for x in (q, k, v))
        if rope is not None:
            q, k = turned(q, positions, rope, exactly), turned(k, positions, rope, exactly)
        k, v = np.repeat(k, h // g, axis=1), np.repeat(v, h // g, axis=1)
        no = np.broadcast_to(forbid(n, m, causal, window, mask, segments), (b, h, n, m))
        top, total, out = np.full((b, h, n, 1), -np.inf, wide), np.zeros((b, h, n, 1), wide), np.zeros(q.shape, wide)
        for start in range(0, m, block):
            some = slice(start, start + block)
            s = q @ k[:, :, some].swapaxes(-1, -2) * wide(1 / math.sqrt(d) if scale is None else scale)
            s = s if softcap is None else np.tanh(s / wide(softcap)) * wide(softcap)
            s = np.where(no[..., some], -np.inf, s)
            new = np.maximum(top, s.max(axis=-1, keepdims=True))
            with np.errstate(invalid="ignore"):
                p, old = np.nan_to_num(np.exp(s - new)), np.nan_to_num(np.exp(top - new))
            total, out, top = total * old + p.sum(axis=-1, keepdims=True), out * old + r(p) @ v[:, :, some], new
        return (out / np.where(total == 0, 1, total)).astype(dtype)

    return fn
