"""The sample that a rotation is judged by: dense vectors at many positions, the truth, and the error of each output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import definition
from ..phase import cos_sin
from ..theta import Rope
from .ask import Unreadable
from .floats import U32, UNIT, Float64, Int64
from .probe import Probe, along_axes, probe_positions
from .recipes import recipe_of
from .tolerance import ANGLE32, BY, bound, grades, pair_errors


class Sample(NamedTuple):
    """Dense vectors and combs (ones at the first, or at the second feature of each pair) with what became of them."""

    x: Float64  # (4, n, d): two dense heads, two combs, whose outputs show cos and sin by themselves
    y: Float64
    positions: Int64  # (n,), or (axes, n)

    @property
    def at(self) -> Int64:
        """One position for each row: the largest of its axes."""
        return self.positions if self.positions.ndim == 1 else self.positions.max(axis=0)


def take_sample(probe: Probe, rope: Rope) -> Sample:
    top, recipe = probe.max_position, recipe_of(rope)
    extra = np.random.default_rng(top + 1).integers(top // 2, top, 64, endpoint=True)
    positions = np.unique(np.append(probe_positions(top), extra))
    positions[:2] = 1, 0  # not from 0 on: a candidate that counts its rows must not be right by chance
    x, positions = probe.random(4, len(positions), seed=9), along_axes(positions, probe.axes)
    for j in (0, 1):
        x[2 + j] = 0
        x[2 + j][:, recipe.reads[:, j]] = 1
    try:
        return Sample(x.astype(np.float64), probe.read(x, positions), positions)
    except Unreadable:
        if probe.single is not None:
            raise
    probe.single = "seven rows"
    y = probe.read(x, positions)
    probe.notes.append(f"a call of {len(positions.T)} rows is not taken: the sample is read in calls of seven")
    return Sample(x.astype(np.float64), y, positions)


class Graded(NamedTuple):
    """How good a candidate is."""

    grade: str | None  # the best that holds
    ratios: dict[str, Float64]  # error over bound, by grade
    by: str  # how angles may be made: by a logarithm or a phase, if the bounds of those by a power do not hold


def graded(sample: Sample, rope: Rope, dtype: np.dtype[Any]) -> Graded:
    failed = []
    for by in BY:
        ratios = error_ratios(sample, rope, dtype, by)
        grade = next((grade for grade, ratio in ratios.items() if ratio.max() <= 1), None)
        failed.append(Graded(grade, ratios, by))
        if grade is not None:
            return failed[-1]
    return failed[1]  # by a logarithm, which allows the most


def error_ratios(sample: Sample, rope: Rope, dtype: np.dtype[Any], by: str = "power") -> dict[str, Float64]:
    """Error over bound for every output, by grade."""
    truth, allowed = expected_of(sample.x, sample.positions, rope, dtype, by)
    error = np.abs(sample.y - truth)
    error[np.isnan(error)] = np.inf
    with np.errstate(all="ignore"):
        return {grade: np.where(error == 0, 0.0, error / most) for grade, most in allowed.items()}


def expected_of(
    x: Float64, positions: Int64, rope: Rope, dtype: np.dtype[Any], by: str = "power",
    among: Sequence[str] | None = None,
) -> tuple[Float64, dict[str, Float64]]:  # fmt: skip
    """The truth of a call, and how far off each output may be, by grade. Features that do not turn may be rounded once,
    to float32 where that is the grade."""
    tables, turning = cos_sin(rope, positions), slice(rope.start, rope.start + rope.width)
    truth = definition.rotate(x, *tables, *definition.pairs(rope.layout, rope.width, rope.start))
    measures, allowed = pair_errors(x, positions, rope, by=by, tables=tables), {}
    for grade in grades(dtype) if among is None else among:
        allowed[grade] = np.abs(x) * (max(UNIT[dtype.name], U32) if grade == ANGLE32 else UNIT[dtype.name])
        allowed[grade][..., turning] = bound(grade, measures, truth[..., turning], dtype, rope.attention_factor)
    return truth, allowed
