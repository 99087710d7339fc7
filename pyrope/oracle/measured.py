"""The weights of one call, read with values that are unit vectors, beside what they should be.

o = W·v is linear in v: so the value e_c of key j alone returns the column W_j in feature c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np

from ..backend import Array
from . import rules
from .masks import tokens
from .steps import Call, Parts, Spec, seen, weigh

Ask: TypeAlias = Callable[[Call], Array]


class Reading(NamedTuple):
    weights: Array  # (b, h, n, m) of the judged queries
    offset: Array  # (b, h, n, d): what it returns where all values are 0


def read(ask: Ask, call: Call) -> Reading:
    """W by one call for every d keys, and what is returned for no values."""
    m, d = call.v.shape[2:]
    offset, columns = ask(replace(call, v=np.zeros_like(call.v)))[:, :, call.judged], []
    for start in range(0, m, d):
        v, count = np.zeros_like(call.v), min(d, m - start)
        v[:, :, range(start, start + count), range(count)] = 1
        columns.append((ask(replace(call, v=v))[:, :, call.judged] - offset)[..., :count])
    return Reading(np.concatenate(columns, axis=-1), offset)


class Fit(NamedTuple):
    """How well weights are row factors times numerators."""

    share: float  # of the weights that are; NaN if no row has three
    factors: Array  # (b, h, n, 1)
    near: Array  # which ones


def fit(weights: Array, numerators: Array, some: Array, close: float) -> Fit:
    """The factor of each row is the median over some of its weights."""
    ratio = np.where(some & (numerators != 0), weights / numerators, np.nan)
    factors = np.nan_to_num(np.nanmedian(ratio, axis=-1, keepdims=True))
    right = factors * numerators
    size = np.abs(np.where(some, right, 0)).max(axis=-1, keepdims=True)
    near = np.abs(weights - right) <= close * (np.abs(right) + 0.05 * size)
    counted = some & (some.sum(axis=-1, keepdims=True) > 2)
    return Fit(float(near[counted].mean()) if counted.any() else np.nan, factors, near)


def centred(x: Array, some: Array) -> Array:
    """Less the mean of each row, over some of it; 0 elsewhere."""
    mean = np.where(some, x, 0).sum(axis=-1, keepdims=True) / np.maximum(some.sum(axis=-1, keepdims=True), 1)
    return np.where(some, x - mean, 0)


@dataclass(eq=False)
class Measured:
    """What was read in one call, (b, h, n, m), and how it was asked for."""

    spec: Spec
    ask: Ask
    call: Call
    read: Array
    close: float  # the relative error of a weight

    def __post_init__(self) -> None:
        self.right: Parts = weigh(self.spec, self.call)
        self.linear = self.spec.feature_map is not None
        self.bad = ~np.isfinite(self.read).all(axis=-1, keepdims=True)
        self.weights = np.asarray(
            np.where(self.bad, self.right.weights, self.read)
        )  # what is not finite is told by itself
        self.sees = self.seen_in(self.weights)
        self.visible = np.broadcast_to(seen(self.spec, self.call), self.sees.shape)

    def seen_in(self, weights: Array) -> Array:
        """Which keys have a weight; of both signs, one that is not small by chance."""
        top = np.abs(weights).max(axis=-1, keepdims=True)
        return np.asarray(np.abs(weights) > (1e-6 * np.where(top == 0, 1, top) if self.linear else 1e-30))

    def sees_again(self, call: Call) -> Array:
        """The same in another call."""
        return self.seen_in(read(self.ask, call).weights)

    @cached_property
    def some(self) -> Array:
        """The weights by which numerators are compared: those that are seen and should be, unless these are few."""
        both = self.sees & self.visible & ~self.bad
        return np.asarray(both if both.sum() * 3 > self.sees.sum() else self.sees & ~self.bad)

    def top(self, scores: Array) -> Array:
        """The greatest visible score of each query, 0 if it sees nothing."""
        top = np.where(self.visible, scores, -np.inf).max(axis=-1, keepdims=True)
        return np.where(np.isfinite(top), top, 0)

    def sums(self) -> str:
        sums = self.weights.sum(axis=-1)
        return f"the weights of a query add up to {sums.min():.4g} … {sums.max():.4g}"

    def where(self, wrong: Array, some: Array | None = None) -> str:
        """The places of wrong weights, in words, if a simple rule has them all."""
        some = np.ones(self.sees.shape, bool) if some is None else some
        rule = rules.simplest(tokens(self.call, some), np.broadcast_to(wrong, some.shape)[some])
        return f", where {rule.words}" if rule is not None and rule.share > 0.95 else ""
