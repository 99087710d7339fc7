"""A rotation, right or wrong, as a value: everything that an implementation decides on its way from x to R(m)·x.

A right recipe comes from a Rope; a fault is a change of some of its fields. The same recipe makes a candidate (in the
arithmetic of a real pipeline) and predicts, in float64, what a black box with that fault returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..theta import Rope, frequencies
from .probe import Candidate, Float64, Int64

Rounding = Callable[[Any], Any]
_ALL = slice(None)


def to_bfloat16(x: Any) -> Any:
    """Values rounded to the 8 bits of bfloat16, kept as float32: NumPy alone has no such dtype."""
    bits = np.asarray(x, np.float32).copy().view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    bits &= np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def to_float16(x: Any) -> Any:
    """Values rounded to float16, kept as float32."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float32)


def as_is(x: Any) -> Any:
    return x


def fast_cos_sin(angle: Any) -> tuple[Any, Any]:
    """As a GPU's fast sine does it: the angle in turns, in float32, its whole part taken off."""
    turns = np.asarray(angle, np.float32) * np.float32(0.5 / np.pi)
    rest = (turns - np.rint(turns)) * np.float32(2 * np.pi)
    return np.cos(rest), np.sin(rest)


def plain_cos_sin(angle: Any) -> tuple[Any, Any]:
    return np.cos(angle), np.sin(angle)


@dataclass(frozen=True, eq=False)
class Recipe:
    """How x becomes R(m)·x: out₁ = x₁·cos + s₁·x₂·sin, out₂ = x₂·cos + s₂·x₁·sin for each pair."""

    theta: Float64  # (p,)
    reads: Int64  # (p, 2): the two features of each pair
    writes: Int64  # (p, 2): where they go
    factor: float = 1.0
    signs: tuple[int, int] = (-1, 1)  # s₁, s₂; (1, −1) turns backwards
    angles: Int64 | None = None  # (p, 2): whose angle each of the two outputs has; its own pair's if None
    axis: Int64 | None = None  # (p,): which axis of the positions turns each pair, if they have several
    place: Callable[[Int64], Any] = as_is  # positions of a call, (n,) or (axes, n) -> the positions that are used
    round_position: Rounding = as_is
    round_theta: Rounding = as_is
    round_angle: Rounding = as_is
    cos_sin: Callable[[Any], tuple[Any, Any]] = plain_cos_sin
    round_table: Rounding = as_is
    round_result: Rounding = as_is
    swapped: bool = False  # sine where the cosine should be
    in_place: bool = False  # pair after pair into the array that is still being read

    @property
    def rounds(self) -> bool:
        """Whether it has a low precision: then its last bits, and what follows from them, cannot be predicted."""
        roundings = self.round_position, self.round_theta, self.round_angle, self.round_table, self.round_result
        return set(roundings) != {as_is}

    def spread(self, positions: Int64, rows: Int64 | slice = _ALL) -> Any:
        """The positions that are used in some rows of a call, for each pair: (n, 1), or (n, p) if they have axes."""
        m = np.asarray(self.place(positions))[..., rows]
        return m[:, None] if self.axis is None else m[self.axis].T

    def by_row(self, positions: Int64) -> bool:
        """Whether the position that is used in a row depends on where in the call it stands."""
        backwards = np.asarray(self.place(positions[..., ::-1]))[..., ::-1]
        return bool((backwards != np.asarray(self.place(positions))).any())

    def tables(self, positions: Int64, dtype: Any = np.float64, rows: Int64 | slice = _ALL) -> tuple[Any, Any]:
        """cos and sin times the factor, (n, p), with an angle computed in this dtype, in some rows of a call."""
        with np.errstate(all="ignore"):
            m = self.round_position(self.spread(positions, rows).astype(dtype)).astype(dtype)
            theta = self.round_theta(self.theta.astype(dtype)).astype(dtype)
            angle = self.round_angle(m * theta).astype(dtype)
            cos, sin = self.cos_sin(angle)
            cos, sin = (sin, cos) if self.swapped else (cos, sin)
            return tuple(self.round_table(table * dtype(self.factor)).astype(dtype) for table in (cos, sin))

    def apply(self, x: Any, cos: Any, sin: Any) -> Any:
        """The rotation of x (…, n, d) with these tables, in their dtype."""
        out = x.astype(cos.dtype)
        if self.in_place:
            for i, ((a, b), (c, d)) in enumerate(zip(self.reads, self.writes, strict=True)):
                first, second = out[..., a].copy(), out[..., b].copy()
                out[..., c] = first * cos[:, i] + self.signs[0] * second * sin[:, i]
                out[..., d] = second * cos[:, i] + self.signs[1] * first * sin[:, i]
            return out
        first, second = out[..., self.reads[:, 0]], out[..., self.reads[:, 1]]
        one = two = slice(None)
        if self.angles is not None:
            one, two = self.angles.T
        with np.errstate(all="ignore"):
            out[..., self.writes[:, 0]] = first * cos[:, one] + self.signs[0] * (second * sin[:, one])
            out[..., self.writes[:, 1]] = second * cos[:, two] + self.signs[1] * (first * sin[:, two])
        return self.round_result(out).astype(out.dtype)

    def predict(self, x: Any, positions: Int64, rows: Int64 | slice = _ALL) -> Float64:
        """What it makes of x, which is some rows of a call with these positions, in float64."""
        return np.asarray(self.apply(x, *self.tables(positions, rows=rows)))

    def candidate(self, low_tables: bool = False) -> Candidate:
        """A function as people write it: angle and products in float32 (float64 for float64), or
        (``low_tables``) tables and products in the dtype of x."""

        def fn(x: Any, positions: Any) -> Any:
            dtype = np.float64 if x.dtype == np.float64 else np.float32
            cos, sin = self.tables(np.asarray(positions), dtype)
            if low_tables:
                cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
            return self.apply(x, cos, sin).astype(x.dtype)

        return fn


def features(layout: str, pairs: int, start: int = 0, distance: int | None = None) -> tuple[Int64, Int64]:
    """Which features the pairs of a layout read and write, (p, 2) each; halves are ``distance`` apart, or p."""
    i = np.arange(pairs)
    split = np.stack((i, i + (distance or pairs)), -1) + start
    woven = np.stack((2 * i, 2 * i + 1), -1) + start
    return (split if layout == "half" else woven), (woven if layout == "interleaved" else split)


def frequency_order(rope: Rope) -> Int64:
    """Which frequency of Θ each pair has, (p,)."""
    return np.array(range(rope.pairs) if rope.axes is None else [i for _, i in rope.axes.assign(rope.pairs)])


@lru_cache(maxsize=64)
def recipe_of(rope: Rope) -> Recipe:
    """The right recipe."""
    start = 0 if rope.placement == "prefix" else rope.head_dim - rope.width
    reads, writes = features(rope.layout, rope.pairs, start)
    signs = (-1, 1) if rope.direction == 1 else (1, -1)
    axis = None if rope.axes is None else np.array([axis for axis, _ in rope.axes.assign(rope.pairs)])
    return Recipe(frequencies(rope), reads, writes, rope.attention_factor, signs, axis=axis)
