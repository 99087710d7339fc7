"""What the engine must return: the definition in float64, and how far off a right result may be."""

from __future__ import annotations

import math

import numpy as np
from strategies import COMPUTE_UNIT, UNIT

import pyrope
from pyrope import Rope, definition


def wide(x):
    return np.asarray(x).astype(np.float64)


def tables(rope: Rope, m, x):
    """cos and sin (…, n, p) with an axis of length 1 for each axis of x (…, h, n, d) that positions do not have."""
    cos, sin = pyrope.cos_sin(m, rope)
    ones = (1,) * (x.ndim - cos.ndim)
    if cos.ndim == 1:
        return cos, sin
    return tuple(t.reshape(*t.shape[:-2], *ones, *t.shape[-2:]) for t in (cos, sin))


def rotate(x, m, rope: Rope):
    """The rotated x, and the bound: products and their sum in the arithmetic, rounded once to x's dtype."""
    pairs = definition.pairs(rope.layout, rope.width, rope.start)
    out = definition.rotate(wide(x), *tables(rope, m, x), *pairs)
    size = abs(wide(x)).max(axis=-1, keepdims=True, initial=0) * max(rope.attention_factor, 1.0)
    unit, inner = UNIT[x.dtype.name], COMPUTE_UNIT[x.dtype.name]
    return out, unit * abs(out) + 8 * inner * size + np.where(x.dtype == np.float16, 2.0**-25, 0)


def matrix(rope: Rope, m):
    """R(Θ, m), Eq. (15)."""
    pairs = definition.pairs(rope.layout, rope.width, rope.start)
    return definition.rotation_matrix(*pyrope.cos_sin(m, rope), *pairs, rope.head_dim)


def attention(q, k, v, *, causal=False, q_at=None, k_at=None, mask=None, window=None, softcap=None, scale=None):
    """Eq. (2) and its bound: scores are off by their products' rounding, weights by twice that."""
    (*_, h, n, d), t = q.shape, k.shape[-2]
    unit, inner = UNIT[q.dtype.name], COMPUTE_UNIT[q.dtype.name]
    scale = 1 / math.sqrt(d) if scale is None else scale
    k_at = np.arange(t) if k_at is None else np.asarray(k_at)
    q_at = np.arange(t - n, t) if q_at is None else np.asarray(q_at)
    seen = definition.visible(*(at[..., None, :] if at.ndim > 1 else at for at in (q_at, k_at)), causal, window)
    bias = 0 if mask is None or mask.dtype == bool else wide(mask)
    seen = seen & mask if mask is not None and mask.dtype == bool else seen
    q, k, v = wide(q), wide(k), wide(v)
    if not t:
        return np.zeros((*q.shape[:-1], v.shape[-1])), 0.0
    out = definition.attention(q, k, v, seen, scale, softcap, bias)
    heads = definition.repeat_heads(k, h)
    rough = inner * (d + 4) * (abs(q) @ abs(heads).swapaxes(-1, -2) * scale).max(axis=-1, keepdims=True, initial=0)
    rough = rough + inner * 8 * ((softcap or 0) + np.abs(np.where(np.isfinite(bias), bias, 0)).max(initial=0))
    most = abs(definition.repeat_heads(v, h)).max(axis=-2, keepdims=True, initial=0)
    return out, unit * abs(out) + (2 * rough + inner * (t + 8)) * most * 2 + np.where(unit == 2.0**-11, 2.0**-25, 0)


def linear_attention(q, k, v, m, rope, causal, phi=definition.elu_plus_one):
    """Eq. (19), or Eq. (18) without a rope, and its bound by the sum of the sizes of all products."""
    unit, inner = UNIT[q.dtype.name], COMPUTE_UNIT[q.dtype.name]
    q, k, v = (wide(x)[None] if x.ndim == 2 else wide(x) for x in (q, k, v))
    seen = definition.visible(np.arange(q.shape[-2]), np.arange(k.shape[-2]), causal)

    def turn(x):
        if rope is None:
            return x
        return definition.rotate(
            x, *tables(rope.rotation_only, m, x), *definition.pairs(rope.layout, rope.width, rope.start)
        )

    with np.errstate(all="ignore"):
        out = definition.linear_attention(q, k, v, turn, seen, phi)
        plain = np.where(seen, abs(phi(q)) @ definition.repeat_heads(abs(phi(k)), q.shape[-3]).swapaxes(-1, -2), 0)
        total = np.where(seen, phi(q) @ definition.repeat_heads(phi(k), q.shape[-3]).swapaxes(-1, -2), 0).sum(-1)
        sized = (
            2 * plain @ definition.repeat_heads(abs(v), q.shape[-3]) / abs(np.where(total == 0, 1, total))[..., None]
        )
        rough = sized * (1 + plain.sum(-1) / abs(np.where(total == 0, 1, total)))[..., None]
    allowed = unit * abs(out) + inner * 8 * (sum(q.shape[-2:]) + 8) * rough + np.where(unit == 2.0**-11, 2.0**-25, 0)
    return out, allowed


def close(got, expected, allowed, xp=np) -> None:
    """Holds a result to its bound, number by number."""
    assert pyrope.backend.namespace(got) is xp
    got = wide(pyrope.to_numpy(got)).reshape(expected.shape)
    worst = abs(got - expected) - allowed
    assert (worst <= 0).all(), f"off by {abs(got - expected).max()}, allowed {np.max(allowed)}"
