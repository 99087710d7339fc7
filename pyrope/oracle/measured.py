"""The weights of one call, read with values that are unit vectors, beside what they should be.

o = W·v is linear in v: so the value e_c of key j alone returns the column W_j in feature c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..backend import Array
from . import rules
from .attention_calls import unit_values
from .candidate import UNIT
from .report import Finding
from .steps import Allowed, Call, Parts, Spec, seen, weigh

Ask: TypeAlias = Callable[[Call], Array]
BLOCKS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 100, 1000)  # usual numbers of tokens


def blocks(m: int) -> tuple[int, ...]:
    """Sizes of blocks that may show among m tokens, the usual ones first."""
    return tuple(dict.fromkeys([*(x for x in BLOCKS if x < m), *(range(2, m) if m <= 130 else ())]))


def tokens(call: Call, some: Array) -> dict[str, Array]:
    """What may matter about some weights, bool (b, h, n, m), as columns for `rules`."""
    (i, j), (b, h) = call.places, some.shape[:2]
    places = np.arange(b)[:, None, None, None], np.arange(h)[:, None, None], i[:, None], j
    row, head, i, j = (np.broadcast_to(x, some.shape)[some] for x in places)
    columns = {"the key": j, "the query": i, "the distance": i - j, "the head": head, "the row": row}
    if call.chunks:
        of = call.of
        columns |= {"the key is of an earlier call": of[j] < of[i], "the query is of a later call": of[i] > 0}
    return columns


def where(call: Call, wrong: Array, some: Array) -> str:
    """The places of wrong weights, in words, if a simple rule has them all."""
    rule = rules.simplest(tokens(call, some), np.broadcast_to(wrong, some.shape)[some])
    return f", where {rule.words}" if rule is not None and rule.share > 0.95 else ""


def rows_where(limit: Allowed, answer: Array, what: str, at: Array) -> str:
    """Which rows (b, h, n) of an answer are wrong, in words; ``at`` are the places of the n."""
    row, head, i = (x.ravel() for x in np.indices(answer.shape[:3]))
    bad = (limit.error(answer) > limit.worst).any(axis=-1).ravel()
    rule = rules.simplest({f"the {what}": at[i], "the head": head, "the row": row}, bad)
    return f"where {rule.words}" if rule is not None and rule.share > 0.95 else ""


def coarser(off: float, spec: Spec) -> str:
    """The dtype whose rounding makes relative errors of this size, if it is coarser than that of the spec."""
    due = UNIT[spec.dtype.name]
    return next((name for name, unit in UNIT.items() if 0.1 * unit < off < 6 * unit and unit > due), "")


class Reading(NamedTuple):
    weights: Array  # (b, h, n, m) of the judged queries
    offset: Array  # (b, h, n, d): what it returns where all values are 0


def read(ask: Ask, call: Call) -> Reading:
    """W by one call for every d keys, and what is returned for no values."""
    *columns, offset = (ask(x)[:, :, call.judged] for x in unit_values(call))
    return Reading(np.concatenate([x - offset for x in columns], axis=-1)[..., : call.k.shape[2]], offset)


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


class Numerators(NamedTuple):
    """Numerators as they were measured to be made, what is summed in their total, and how well they fit."""

    found: list[Finding]
    number: Any = None  # (b, h, n, m); None if they are not known
    plain: Any = None
    fit: Any = None
    scale: float = 1.0  # times the expected one


@dataclass(eq=False)
class Measured:
    """What was read in one call, (b, h, n, m), and how it was asked for."""

    spec: Spec
    ask: Ask
    call: Call
    read: Array
    close: float  # the relative error of a weight
    due: Call  # the same, with the queries and keys that each head reads

    def __post_init__(self) -> None:
        self.right: Parts = weigh(self.spec, self.due)
        self.linear = self.spec.feature_map is not None
        self.bad = ~np.isfinite(self.read).all(axis=-1, keepdims=True)  # which is told by itself
        self.weights: Array = np.where(self.bad, self.right.weights, self.read)
        top = np.abs(self.weights).max(axis=-1, keepdims=True)  # weights of both signs may be small by chance
        self.sees: Array = np.abs(self.weights) > (1e-6 * np.where(top == 0, 1, top) if self.linear else 1e-30)
        self.visible = np.broadcast_to(seen(self.spec, self.call), self.sees.shape)

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
