"""What is right, by the definition alone: rotations, and the attention that a `Spec` asks for, in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import definition
from ..backend import Array
from ..phase import cos_sin
from ..theta import Rope


@dataclass(frozen=True)
class Spec:
    """What an implementation of attention is meant to compute."""

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
    starts: tuple[int, ...] = (
        3,
        0,
        7,
        1,
    )  # the first position of each row, unless a question has others


def rotated(x: Array, positions: Array, rope: Rope | None) -> np.ndarray[Any, Any]:
    """R(Θ, m)·x from the exact tables: x (…, n, d), positions (…, n), or (axes, …, n) -> (…, n, d). None: x itself."""
    if rope is None:
        return np.asarray(x)
    tables = exact_tables(rope, positions.astype(np.int64).tobytes(), positions.shape)
    return np.asarray(definition.rotate(x, *tables, *definition.pairs(rope.layout, rope.width, rope.start)))


@functools.lru_cache(64)
def exact_tables(rope: Rope, positions: bytes, shape: tuple[int, ...], dtype: Any = np.float64) -> tuple[Array, Array]:
    """cos and sin (…, n, p) for int64 positions (…, n), made once for all that is tried on the same question."""
    return cos_sin(rope, np.frombuffer(positions, np.int64).reshape(shape), dtype)


def softmax_attention(
    spec: Spec, q: Array, k: Array, v: Array, positions: Any = None, mask: Any = None, segments: Any = None
) -> Array:
    """Eq. (2): q (b, h, n, d), k and v (b, g, m, d), positions and segments (b, m), mask (b, 1, n, m) -> (b, h, n, d).
    The queries are the last n of the m tokens."""
    n, m = q.shape[-2], k.shape[-2]
    if spec.rope is not None:
        q, k = (rotated(x, positions[:, None, m - x.shape[-2] :], spec.rope) for x in (q, k))
    return definition.attention(q, k, v, seen(spec, n, m, mask, segments), spec.scale, spec.softcap)


def seen(spec: Spec, n: int, m: int, mask: Any = None, segments: Any = None) -> Array:
    """Which of the m tokens each of the last n sees: (n, m), or (b, 1, n, m) with a mask or segments."""
    visible = definition.visible(np.arange(m - n, m), np.arange(m), spec.causal, spec.window)
    if mask is not None:
        visible = visible & mask
    if segments is not None:
        visible = visible & (segments[:, None, m - n :, None] == segments[:, None, None, :])
    return visible


def linear_attention(spec: Spec, q: Array, k: Array, v: Array, positions: Array) -> Array:
    """Eq. (19), or Eq. (18) without a rope: q (b, h, n, d), k and v (b, g, m, d), positions (b, m) -> (b, h, n, d).
    The queries are the last n of the m tokens."""
    rope, n, m = None if spec.rope is None else spec.rope.pure, q.shape[-2], k.shape[-2]
    seen = definition.visible(np.arange(m - n, m), np.arange(m), spec.causal)
    phi = definition.FEATURE_MAPS[spec.feature_map]

    def turn(x: Array) -> Array:
        return rotated(x, positions[:, None, m - x.shape[-2] :], rope)

    return definition.linear_attention(q, k, v, turn, seen, phi)
