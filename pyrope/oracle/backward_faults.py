"""The known mistakes of a rotation's backward pass: those of any rotation, in the words of one that turns gradients.

RoPE is linear, y = R·x, so that the gradient of x is Rᵀ·g, where g is that of y: the rotation of `Rope.transposed`.
A mistake is a change of its `Recipe`, as in `rotation_faults`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..theta import Rope
from .explain import Change, Fault
from .recipes import recipe_of
from .rotation_faults import FAULTS, Measurements


def _forward(rope: Rope, measured: Measurements | None = None) -> Iterable[Change]:
    right, forward = recipe_of(rope), recipe_of(rope.transposed)
    pairs = {"reads": forward.reads, "writes": forward.writes} if (right.reads != forward.reads).any() else {}
    yield Change("R·g for Rᵀ·g", {"block": forward.block, **pairs})


def _twice(rope: Rope, measured: Measurements | None = None) -> Iterable[Change]:
    yield Change("2·Rᵀ·g", {"factor": 2 * rope.attention_factor, "rest": 2.0})


def _without_sine(rope: Rope, measured: Measurements | None = None) -> Iterable[Change]:
    yield Change("the terms with sin are zero", {"block": (("cos", "0"), ("0", "cos"))})


def _negated(rope: Rope, measured: Measurements | None = None) -> Iterable[Change]:
    rows = [tuple(f"-{term}".removeprefix("--") for term in row) for row in recipe_of(rope).block]
    yield Change("−Rᵀ·g", {"block": tuple(rows), "rest": -1.0})


# In their place in the order of the search: what has no number of its own comes first.
_NAMED = {
    "direction": Fault(
        "backward equals forward", "gradients are turned by +mθ, as x was",
        "the forward rotation is used for gradients",
        "use the transpose: −sin for sin; where pairs are written in another layout, read them from there",
        "kernels", "rotation", _forward),
    "zeros returned": replace(
        FAULTS["zeros returned"], name="no gradient", symptom="the gradient is zero everywhere, or None",
        cause="the backward pass is missing, or x was detached from the graph",
        fix="implement the backward pass, Rᵀ·g, and keep x in the graph", happened="candle#3568, mlx-vlm#1475"),
    "not rotated": replace(
        FAULTS["not rotated"], symptom="the gradient of y is returned as that of x",
        cause="the backward pass hands its gradient on as it is", fix="multiply it with Rᵀ"),
    "attention factor inverted": replace(
        FAULTS["attention factor inverted"], cause="the inverse of the rotation, which divides by the "
        "attention factor, taken for its transpose, which multiplies by it",
        fix="multiply by the attention factor, forward and backward"),
    "rest zeroed": replace(
        FAULTS["rest zeroed"], symptom="features beyond the rotary width get no gradient",
        fix="hand on the gradient of what does not turn"),
    "wrong term in the pairs": replace(FAULTS["wrong term in the pairs"], fix="(x cos + y sin, y cos − x sin), of g"),
    "another order of features": replace(
        FAULTS["another order of features"], cause="gradients are written where the forward pass writes its "
        "result, not where it reads x", fix="write each gradient where its feature was read"),
    # An attention factor of 2 where none is meant, and half of such a number, are less likely than these.
    "attention factor unwanted": replace(FAULTS["attention factor unwanted"], generic=True),
}  # fmt: skip
_NEW = (
    Fault(
        "accumulated twice", "the gradient is twice as large as it should be",
        "it is added to a buffer that has it already, or comes in by two ways", "write the gradient, or add it once",
        "kernels", "rotation", _twice),
    Fault(
        "gradient negated", "the gradient has the other sign",
        "a minus too many: the gradient of −y, or a result that is subtracted where it should be added",
        "return Rᵀ·g, and let the optimizer subtract it", "—", "rotation", _negated),
    Fault(
        "sine of the other half", "the terms with sin have the sine that stands at the other feature of the pair",
        "the backward pass reads the sine at the feature that it writes, as the forward pass does, or leaves out these "
        "terms", "multiply g with sin first, then exchange the features; tables with equal halves hide it",
        "Paddle#74716", "rotation", _without_sine),
)  # fmt: skip
BACKWARD: dict[str, Fault] = {
    fault.name: fault for fault in (*_NEW, *(_NAMED.get(name, fault) for name, fault in FAULTS.items()))
}
