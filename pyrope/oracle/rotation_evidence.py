"""Which recipes predict what a candidate made of a sample: the evidence that a wrong rotation is explained by.

A recipe explains the sample if it predicts every output, up to what a float32 pipeline may have as its error, and is
much nearer to the outputs than the truth is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..theta import Rope
from .explain import Change, Fault, Hypothesis, Suspect
from .floats import U32, UNIT, Float64, Int64
from .recipes import OnOneAxis, Recipe, recipe_of
from .rotation_faults import FAULTS, Measurements
from .sample import Sample
from .tolerance import theta_bound
from .truth import rotated

BY_ROW = {"rows differ", "one row differs", "some lengths wrong"}  # how the positions of other rows show in behaviour


@dataclass(frozen=True, eq=False)
class RotationEvidence:
    """A sample that a candidate got wrong, and where."""

    sample: Sample
    rope: Rope  # what is meant
    dtype: str  # its name
    ratio: Float64  # (h, n, d): the error over what the worst grade of precision allows
    behaviour: Set[str] = frozenset()  # what the candidate does wrong beside rotating
    faults: Mapping[str, Fault] = field(default_factory=lambda: FAULTS)  # the known mistakes

    @cached_property
    def truth(self) -> Float64:
        return rotated(self.sample.x, self.sample.positions, self.rope)

    @cached_property
    def _relative(self) -> float:
        """Error of an angle that is left to a float32 pipeline, relative to it: far less than two faults are apart."""
        return 64 * U32 + 2 * float(theta_bound(self.rope, tensor_length=True).max())

    def known(self, measured: Measurements) -> list[Suspect]:
        """The ways to make each known mistake, with the numbers that were measured."""
        faults = (fault for fault in self.faults.values() if self.dtype not in fault.right_in)
        return [(fault, change) for fault in faults for change in fault.changes(self.rope, measured)]

    def matters(self, change: Change) -> bool:
        # Of those on one axis there are too many to be one of two mistakes; a ratio takes the place of any other θ.
        if isinstance(change.fields.get("place"), OnOneAxis) or "ratio" in change.fields:
            return False
        place = {"place": change.fields["place"]} if "place" in change.fields else {}
        return bool(self.behaviour & BY_ROW) or not replace(recipe_of(self.rope), **place).by_row(self.sample.positions)

    def recipe(self, hypothesis: Hypothesis) -> Recipe:
        """The right recipe with the changes of a hypothesis."""
        return replace(recipe_of(self.rope), **hypothesis.fields)

    def fitting(self, hypotheses: Iterable[Hypothesis]) -> list[Hypothesis]:
        """Those that hold, those far from the nearest one last. Single mistakes with a number of their own are left
        out if one without such a number holds, and pairs with fewer of them come first."""
        fit = [h for h in hypotheses if self._possible(recipe := self.recipe(h)) and self._holds(recipe)]
        distances = [self.distance(self.recipe(h)) for h in fit]
        limit = 2 * min(distances, default=0.0) + UNIT[self.dtype] / 64
        fit = [h for far in (False, True) for h, off in zip(fit, distances, strict=True) if (off > limit) == far]
        fit.sort(key=lambda h: sum(fault.generic for fault in h.faults) if len(h.faults) > 1 else 0)
        return [h for h in fit if len(h.faults) > 1 or not h.faults[0].generic] or fit

    def _possible(self, recipe: Recipe) -> bool:
        """Whether rows that differ, where the candidate's do, would differ by this recipe too. There is no growth of
        each pair together with fewer pairs."""
        if recipe.growth is not None and len(recipe.growth) != len(recipe.theta):
            return False
        return "rows differ" not in self.behaviour or recipe.by_row(self.sample.positions)

    def _holds(self, recipe: Recipe) -> bool:
        if not (self._predicts(recipe) and self.explains(recipe)):
            return False
        predicted = recipe.predict(self.sample.x, self.sample.positions)
        return "not finite" not in self.behaviour or not np.isfinite(predicted).all()

    def expected(self, recipe: Recipe, x: Any, positions: Int64) -> tuple[Float64, Float64]:
        """What a recipe predicts for another call, and the error that is left to every output."""
        every = np.arange(x.shape[-2])
        return recipe.predict(x, positions), self._allowed(recipe, x, positions, every)

    def _allowed(self, recipe: Recipe, x: Float64, positions: Int64, rows: Int64) -> Float64:
        """Error left to a float32 pipeline with this recipe, (h, n, d); x holds the given rows of a call."""
        length = np.abs(x).max(-1, keepdims=True) * recipe.factor
        m = np.nan_to_num(recipe.spread(positions, rows).astype(float))
        turned, angle = np.abs(m * recipe.theta), np.zeros(x.shape[-2:])  # (n, p), (n, d)
        if recipe.in_place:  # any pair may reach any other
            angle[:] = turned.max(axis=1, keepdims=True)
        else:
            own = recipe.angles if recipe.angles is not None else np.arange(len(recipe.theta))[:, None].repeat(2, 1)
            angle[:, recipe.writes] = turned[:, own]
        rounding = 8 * (UNIT[self.dtype] + U32) * (4 if recipe.in_place else 1)
        if recipe.growth is not None:  # measured, so that it is known no better than what comes back is
            grown = np.minimum(m * recipe.growth, 80).max(axis=1, keepdims=True)
            length, rounding = length * np.exp(np.maximum(grown, 0)), rounding + 64 * U32 * np.abs(grown)
        return np.asarray(length * (rounding + self._relative * angle))

    def _predicts(self, recipe: Recipe) -> bool:
        """Whether a recipe predicts every output; with low precision nearly every one: ties may fall otherwise. Ever
        more of the sample is compared, so that most recipes fall early."""
        every = np.arange(self.sample.x.shape[1])
        for heads, rows in ((1, every[:: -(-len(every) // 6)]), (1, every), (None, every)):
            x, y = self.sample.x[:heads, rows], self.sample.y[:heads, rows]
            predicted = recipe.predict(x, self.sample.positions, rows)
            with np.errstate(invalid="ignore"):
                same = np.abs(predicted - y) <= self._allowed(recipe, x, self.sample.positions, rows)
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
        """Whether a recipe is much nearer than the truth where that misses, and no worse on the whole: low precision
        leaves room for many that are no better than it."""
        beyond, left = self.ratio > 1, self._left(recipe)
        much_nearer = np.median(left[beyond]) < np.median(self._missed[beyond]) / 2
        return bool(much_nearer and np.square(left).mean() <= np.square(self._missed).mean())

    @cached_property
    def _missed(self) -> Float64:
        """How far off the truth is, (h, n, d)."""
        return _apart(self.truth, self.sample.y)

    def by_chance(self, recipe: Recipe) -> bool:
        """Whether a recipe leaves so much open wherever the truth misses, as at position 2³¹, that anything would fit:
        then only one that is far nearer than the truth says something."""
        sample, beyond = self.sample, self.ratio > 1
        left_open = self._allowed(recipe, sample.x, sample.positions, np.arange(sample.x.shape[1]))[beyond]
        missed = self._missed[beyond]
        return bool((left_open >= missed / 2).all() and self.distance(recipe) > np.median(missed) / 64)

    def distance(self, recipe: Recipe) -> float:
        """How far off a recipe is where the truth misses, in the mean square."""
        return float(np.sqrt(np.square(self._left(recipe)[self.ratio > 1]).mean()))

    def _left(self, recipe: Recipe) -> Float64:
        """How far off a recipe is, (h, n, d)."""
        return _apart(recipe.predict(self.sample.x, self.sample.positions), self.sample.y)


def _apart(predicted: Float64, y: Float64) -> Float64:
    """How far apart two arrays are: not at all where neither is finite, infinitely where only one is."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(predicted - y)
    apart[~np.isfinite(predicted) & ~np.isfinite(y)] = 0
    return np.nan_to_num(apart, nan=np.inf, posinf=np.inf)
