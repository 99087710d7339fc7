"""Which known mistakes predict what a black box made of x, where that is no right rotation.

Each known fault, and each two of them, is a hypothesis: a recipe that says what every output must be. It holds if it
predicts them all, and is much nearer to them than the truth is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..theta import Rope
from .faults import FAULTS, Change, Fault, Found
from .identification import Sample, true_rotation
from .probe import Float64, Int64
from .recipes import Recipe, recipe_of
from .tensors import UNIT
from .tolerance import U32, theta_bound

Named: TypeAlias = tuple[Fault, Change]


class Hypothesis(NamedTuple):
    """One fault, or two at once, what they change in words, and the recipe that they make."""

    faults: tuple[Fault, ...]
    told: tuple[str, ...]
    recipe: Recipe


@dataclass(frozen=True, eq=False)
class Riddle:
    """What a black box returned, and how far that is from right."""

    sample: Sample
    rope: Rope
    dtype: str  # its name
    ratio: Float64  # (h, n, d): the error over what the worst grade of precision allows

    @cached_property
    def truth(self) -> Float64:
        return true_rotation(self.sample.x, self.sample.positions, self.rope)

    @cached_property
    def _relative(self) -> float:
        """Error of an angle that is left to a float32 pipeline, relative to it: far less than two faults are apart."""
        return 64 * U32 + 2 * float(theta_bound(self.rope, tensor_length=True).max())

    def changes(self, found: Found) -> list[Named]:
        """The ways to make each known mistake, with the numbers that were found."""
        faults = (fault for fault in FAULTS.values() if self.dtype not in fault.right_in)
        return [(fault, change) for fault in faults for change in fault.recipes(self.rope, found)]

    def singles(self, changes: Iterable[Named]) -> Iterator[Hypothesis]:
        right = recipe_of(self.rope)
        for fault, (told, fields) in changes:
            yield Hypothesis((fault,), (told,), replace(right, **fields))

    def doubles(self, changes: Iterable[Named]) -> Iterator[Hypothesis]:
        """Two faults at once that change different fields."""
        right = recipe_of(self.rope)
        for (one, a), (two, b) in combinations(changes, 2):
            if one is not two and not a.fields.keys() & b.fields.keys():
                yield Hypothesis((one, two), (a.told, b.told), replace(right, **a.fields, **b.fields))

    def fitting(self, hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
        """Those that hold, what is far off beside the nearest last; of single faults only the ones without a number of
        their own, where there are such."""
        fit = [h for h in hypotheses if self._predicts(h.recipe) and self.explains(h.recipe)]
        far = [float(np.sqrt(np.square(self._left(h.recipe)).mean())) for h in fit]
        limit = 2 * min(far, default=0.0) + UNIT[self.dtype] / 64
        fit = [h for late in (False, True) for h, off in zip(fit, far, strict=True) if (off > limit) == late]
        return [h for h in fit if len(h.faults) > 1 or not h.faults[0].generic] or fit

    def _allowed(self, recipe: Recipe, x: Float64, rows: Int64) -> Float64:
        """Error left to a float32 pipeline with this recipe, (h, n, d)."""
        length = np.abs(x).max(-1, keepdims=True) * recipe.factor
        m = np.nan_to_num(recipe.spread(self.sample.positions, rows).astype(float))
        turned, angle = np.abs(m * recipe.theta), np.zeros(x.shape[1:])  # (n, p), (n, d)
        if recipe.in_place:  # any pair may reach any other
            angle[:] = turned.max(axis=1, keepdims=True)
        else:
            own = recipe.angles if recipe.angles is not None else np.arange(len(recipe.theta))[:, None].repeat(2, 1)
            angle[:, recipe.writes] = turned[:, own]
        rounding = 8 * (UNIT[self.dtype] + U32) * (4 if recipe.in_place else 1)
        return np.asarray(length * (rounding + self._relative * angle))

    def _predicts(self, recipe: Recipe) -> bool:
        """Whether a recipe predicts every output; with low precision nearly every one: ties may fall otherwise. Ever
        more of the sample is looked at, so that most recipes fall early."""
        every = np.arange(self.sample.x.shape[1])
        for heads, rows in ((1, every[:: -(-len(every) // 6)]), (1, every), (None, every)):
            x, y = self.sample.x[:heads, rows], self.sample.y[:heads, rows]
            predicted = recipe.predict(x, self.sample.positions, rows)
            with np.errstate(invalid="ignore"):
                same = np.abs(predicted - y) <= self._allowed(recipe, x, rows)
            same |= ~np.isfinite(predicted) & ~np.isfinite(y)
            if not same.all() and not (recipe.rounds and self._nearly(same, y)):
                return False
        return True

    def _nearly(self, same: Any, y: Float64) -> bool:
        """97 of 100 outputs, and most of each feature, where something turns and is finite: the rest says little."""
        rows = np.isfinite(y).all(axis=(0, 2))
        part = same[:, rows][..., recipe_of(self.rope).writes.ravel()]
        return bool(same.mean() > 0.97 and part.size and part.mean() > 0.97 and part.mean(axis=(0, 1)).min() > 0.5)

    def explains(self, recipe: Recipe) -> bool:
        """Whether a recipe is much nearer than the truth, where that misses: low precision leaves room for many that
        are no better than it."""
        beyond = self.ratio > 1
        with np.errstate(invalid="ignore"):
            missed = np.abs(self.truth - self.sample.y)[beyond]
        return bool(np.median(self._left(recipe)) < np.median(np.nan_to_num(missed, nan=np.inf)) / 2)

    def _left(self, recipe: Recipe) -> Float64:
        """How far off a recipe is where the truth misses."""
        beyond = self.ratio > 1
        y, predicted = self.sample.y[beyond], recipe.predict(self.sample.x, self.sample.positions)[beyond]
        with np.errstate(invalid="ignore"):
            left = np.abs(predicted - y)
        left[~np.isfinite(predicted) & ~np.isfinite(y)] = 0
        return np.nan_to_num(left, nan=np.inf)
