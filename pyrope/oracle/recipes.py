"""A rotation, right or wrong, as a value: everything that an implementation decides on its way from x to R(m)·x.

A right recipe comes from a Rope; a fault is a change of some of its fields. The same recipe makes a candidate (in the
arithmetic of a real pipeline) and predicts, in float64, what a black box with that fault returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from .. import definition
from ..theta import Rope, frequencies
from .ask import Candidate
from .floats import Float64, Int64

Rounding = Callable[[Any], Any]
_ALL = slice(None)
_cos, _sin = np.cos, np.sin  # as they are now: a candidate may put others in their place


def as_is(x: Any) -> Any:
    return x


def fast_cos_sin(angle: Any) -> tuple[Any, Any]:
    """As a GPU's fast sine does it: the angle in turns, in float32, its whole part taken off."""
    turns = np.asarray(angle, np.float32) * np.float32(0.5 / np.pi)
    rest = (turns - np.rint(turns)) * np.float32(2 * np.pi)
    return _cos(rest), _sin(rest)


def half_turn_cos_sin(angle: Any) -> tuple[Any, Any]:
    """As sincospi does it with a float32 number of half turns, which is rounded before its whole part is taken off."""
    turns = np.asarray(np.asarray(angle, np.float64) / np.pi, np.float32)
    rest = (turns - 2 * np.rint(turns / 2)) * np.float32(np.pi)
    return _cos(rest), _sin(rest)


def reduced_cos_sin(turn: float, whole: Callable[[Any], Any], angle: Any) -> tuple[Any, Any]:
    """Of an angle from which a whole number of turns of this size is taken, which is not quite 2π."""
    rest = angle - turn * whole(angle / turn)
    return _cos(rest), _sin(rest)


def plain_cos_sin(angle: Any) -> tuple[Any, Any]:
    return _cos(angle), _sin(angle)


Block: TypeAlias = tuple[tuple[str, str], tuple[str, str]]
FORWARDS: Block = (("cos", "-sin"), ("sin", "cos"))
BACKWARDS: Block = (("cos", "sin"), ("-sin", "cos"))


def block_terms(cos: Any, sin: Any) -> dict[str, Any]:
    """What a feature may be multiplied with in a block, by its name; 1 is a cosine that was lost."""
    one = np.ones_like(cos)
    return {"cos": cos, "-cos": -cos, "sin": sin, "-sin": -sin, "0": 0 * one, "1": one}


@dataclass(frozen=True, eq=False)
class Recipe:
    """How x becomes R(m)·x: for each pair out₁ = x₁·cos − x₂·sin and out₂ = x₁·sin + x₂·cos, if the block is right."""

    theta: Float64  # (p,)
    reads: Int64  # (p, 2): the two features of each pair
    writes: Int64  # (p, 2): where they go
    factor: float = 1.0
    block: Block = FORWARDS  # what x₁ and x₂ are multiplied with in out₁, and what in out₂
    angles: Int64 | None = None  # (p, 2): whose angle each of the two outputs has; its own pair's if None
    axis: Int64 | None = None  # (p,): which axis of the positions turns each pair, if they have several
    place: Callable[[Int64], Any] = as_is  # positions of a call, (n,) or (axes, n) -> the positions that are used
    round_position: Rounding = as_is
    round_theta: Rounding = as_is
    round_angle: Rounding = as_is
    cos_sin: Callable[[Any], tuple[Any, Any]] = plain_cos_sin
    round_table: Rounding = as_is
    round_result: Rounding = as_is
    round_input: Rounding = as_is
    growth: Float64 | None = None  # (p,): the logarithm of what a pair's length is multiplied with at every position
    ratio: float | None = None  # the angle of a pair is that of the pair before times this, in float32
    rest: float = 1.0  # what the features that do not turn are multiplied with
    in_place: bool = False  # pair after pair into the array that is still being read
    aliased: int | None = None  # 0 or 1: this output is written over its input before the other one is computed

    @property
    def rounds(self) -> bool:
        """Whether it has a low precision: then its last bits, and what follows from them, cannot be predicted."""
        roundings = self.round_position, self.round_theta, self.round_angle, self.round_table, self.round_result
        return {*roundings, self.round_input} != {as_is}

    def spread(self, positions: Int64, rows: Int64 | slice = _ALL) -> Any:
        """The positions that are used in the given rows of a call: (n, 1), or with axes (n, p), one for each pair."""
        m = np.asarray(self.place(positions))[..., rows]
        return m[:, None] if self.axis is None else m[self.axis].T

    def by_row(self, positions: Int64) -> bool:
        """Whether the position that is used in a row depends on where in the call it stands."""
        if self.place is as_is:
            return False
        used, rows = np.asarray(self.place(positions)), np.arange(positions.shape[-1])
        orders = rows[::-1], np.roll(rows, 1)
        return any((np.asarray(self.place(positions[..., order])) != used[..., order]).any() for order in orders)

    def by_others(self, positions: Int64) -> bool:
        """Whether the position that is used in a row depends on those of other rows, or on their number."""
        alone = [np.asarray(self.place(positions[..., j : j + 1])) for j in range(positions.shape[-1])]
        return bool((np.concatenate(alone, axis=-1) != np.asarray(self.place(positions))).any())

    def tables(self, positions: Int64, dtype: Any = np.float64, rows: Int64 | slice = _ALL) -> tuple[Any, Any]:
        """cos and sin times the factor, (n, p), for the given rows of a call, with an angle computed in this dtype."""
        with np.errstate(all="ignore"):
            m = self.round_position(self.spread(positions, rows).astype(dtype)).astype(dtype)
            theta = self.round_theta(self.theta.astype(dtype)).astype(dtype)
            angle = self._recurrence(m) if self.ratio is not None else self.round_angle(m * theta).astype(dtype)
            cos, sin = self.cos_sin(angle)
            if self.growth is not None:
                cos, sin = (table * np.exp(m * self.growth).astype(dtype) for table in (cos, sin))
            return tuple(self.round_table(table * dtype(self.factor)).astype(dtype) for table in (cos, sin))

    def _recurrence(self, m: Any) -> Any:
        """m·θ as ggml makes it: the angle of the first pair, then product after product, each rounded to float32."""
        factors = np.full((len(m), len(self.theta)), self.ratio, np.float32)
        factors[:, 0] = m[:, 0] * np.float32(self.theta[0])
        return np.multiply.accumulate(factors, axis=1, dtype=np.float32).astype(m.dtype)

    def apply(self, x: Any, cos: Any, sin: Any) -> Any:
        """The rotation of x (…, n, d) with these tables, in their dtype."""
        out = self.round_input(x).astype(cos.dtype)
        if self.in_place:
            for i, ((a, b), (c, d)) in enumerate(zip(self.reads, self.writes, strict=True)):
                first, second = out[..., a].copy(), out[..., b].copy()
                out[..., c], out[..., d] = self._pair(first, second, cos[:, i], sin[:, i], cos[:, i], sin[:, i])
            return out
        first, second = out[..., self.reads[:, 0]], out[..., self.reads[:, 1]]
        one = two = slice(None)
        if self.angles is not None:
            one, two = self.angles.T
        with np.errstate(all="ignore"):
            if self.rest != 1:
                out *= self.rest
            turned = self._pair(first, second, cos[:, one], sin[:, one], cos[:, two], sin[:, two])
            out[..., self.writes[:, 0]], out[..., self.writes[:, 1]] = turned
        return self.round_result(out).astype(out.dtype)

    def _pair(self, x1: Any, x2: Any, cos1: Any, sin1: Any, cos2: Any, sin2: Any) -> tuple[Any, Any]:
        """The two outputs of all pairs, each with the tables of its own."""

        def output(k: int, x1: Any, x2: Any) -> Any:
            cos, sin = ((cos1, sin1), (cos2, sin2))[k]
            terms = block_terms(cos, sin)
            return x1 * terms[self.block[k][0]] + x2 * terms[self.block[k][1]]

        if self.aliased == 0:
            x1 = output(0, x1, x2)
            return x1, output(1, x1, x2)
        if self.aliased == 1:
            x2 = output(1, x1, x2)
            return output(0, x1, x2), x2
        return output(0, x1, x2), output(1, x1, x2)

    def predict(self, x: Any, positions: Int64, rows: Int64 | slice = _ALL) -> Float64:
        """The result for x, in float64; x holds the given rows of a call with these positions."""
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


def features(layout: str, pairs: int, start: int = 0) -> tuple[Int64, Int64]:
    """Which features the pairs of a layout read and write, (p, 2) each."""
    feature = np.arange(start + 2 * pairs)
    reads, writes = (
        np.stack([feature[part] for part in side], axis=-1) for side in definition.pairs(layout, 2 * pairs, start)
    )
    return reads, writes


def features_apart(pairs: int, distance: int) -> Int64:
    """Pairs (i, i + distance) from the first feature on, (p, 2): so far apart they are in a proportional rotation."""
    return np.asarray(np.arange(pairs)[:, None] + np.array([0, distance]))


@dataclass(frozen=True)
class OnOneAxis:
    """A change of the positions (axes, n) of one axis alone."""

    place: Callable[[Int64], Any]
    axis: int

    def __call__(self, positions: Int64) -> Any:
        changed = np.array(positions)
        changed[self.axis] = np.asarray(self.place(positions))[self.axis]
        return changed


def frequency_order(rope: Rope) -> Int64:
    """Which frequency of Θ each pair has, (p,), or of the series of its axis."""
    return np.array(range(rope.pairs) if rope.axes is None else [i for _, i in rope.axes.assign(rope.pairs)])


def one_series(rope: Rope) -> Int64:
    """One pair for each frequency of a series: of Θ, or of the axis with the most pairs."""
    order = frequency_order(rope)
    if rope.axes is not None and rope.axes.series == "own":
        axis = np.array([axis for axis, _ in rope.axes.assign(rope.pairs)])
        return np.flatnonzero(axis == np.bincount(axis).argmax())
    return np.unique(order, return_index=True)[1]


@lru_cache(maxsize=64)
def recipe_of(rope: Rope) -> Recipe:
    """The right recipe."""
    reads, writes = features(rope.layout, rope.pairs, rope.start)
    block = FORWARDS if rope.direction == 1 else BACKWARDS
    axis = None if rope.axes is None else np.array([axis for axis, _ in rope.axes.assign(rope.pairs)])
    return Recipe(frequencies(rope), reads, writes, rope.attention_factor, block, axis=axis)
