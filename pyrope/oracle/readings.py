"""What the page of a report draws beside its words, from what a check has asked; read when a page is made, not before.

Of a rotation: R(m) at one position, the frequencies, the errors by position. Of attention: the errors by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .. import definition
from ..backend import Array
from ..phase import cos_sin
from ..theta import Rope, frequencies
from .candidate import Unreadable
from .diagnosis import described
from .operator import Description, Side as Side
from .tolerance import APPLICABLE, U32, theta_errors

if TYPE_CHECKING:
    from . import attention, comparison

CLEAR = 0.5  # of the largest error of R(m), and in itself: R(m) is shown where it is off by so much
PLACES = 12  # of an octave, at which errors are drawn


class Operators(NamedTuple):
    """R(m) of a candidate, and the expected one if there is one."""

    position: str  # in words, one number or one for each axis
    measured: Array  # (d, d): column j is what unit vector j becomes
    expected: Array | None  # (d, d)


class Frequencies(NamedTuple):
    """The frequencies of the pairs, in the order of the pairs."""

    measured: Array  # (k,)
    expected: Array | None  # (p,)
    allowed: Array | None  # (p,): by how much a right one may be off, and be measured off, relative to itself
    wrong: Array  # (k,): those that are not the expected ones


class Errors(NamedTuple):
    """The errors at each position, or in each row, and what each grade of precision allows there."""

    place: str  # what the numbers below count: "position", or a token of which call
    at: Array  # (n,), ascending
    worst: Array  # (n,): the largest error of an output there; infinity for NaN
    beyond: Array  # (n,): whether an output there is off by more than is accepted of it
    bounds: Mapping[str, Array]  # by grade (n,): the most that an output there may be off


class Readings(NamedTuple):
    """What was read of a candidate."""

    sides: tuple[Side, ...] = ()
    operators: Operators | None = None
    frequencies: Frequencies | None = None
    errors: Errors | None = None


def of_rotation(check: comparison.RotationCheck) -> Readings | None:
    """What a check of a rotation shows; R(m) is read now, which a candidate may refuse."""
    (call, y), rope = check.sample, check.rope
    try:
        found, _ = described(check)
    except Unreadable:
        return None
    due, at = check.expected(call), call.at.max(axis=0)[0]
    allowed = {grade: due.allowed(grade).max(axis=(0, 2)) for grade in APPLICABLE[check.dtype]}
    wrong = (due.ratio(APPLICABLE[check.dtype][-1], y) > 1).any(axis=(0, 2))
    errors = errors_by_place("position", at, np.abs(y - due.y).max(axis=(0, 2)), allowed, wrong)
    return Readings(errors=errors) if found is None else of_description(found, rope, errors)


def of_attention(check: attention.Check) -> Readings:
    """The errors of the first call that is answered wrongly, or of the first one, by token."""
    shown = [*check.wrong, *check.tried][0]
    call, answer, limit = shown.call, shown.answers[0], shown.limits[0]
    off, most = (x.max(axis=(0, 1, 3)) for x in np.broadcast_arrays(limit.error(answer), limit.worst))
    wrong = (limit.error(answer) > limit.worst).any(axis=(0, 1, 3))
    place = f'token of the call "{call.name}"'
    return Readings(errors=errors_by_place(place, call.places[0], off, {"allowed": most}, wrong))


def of_description(found: Description, rope: Rope | None = None, errors: Errors | None = None) -> Readings:
    """What was measured of a rotation, beside a rope, if there is one to hold it to."""
    theta = _frequencies(found, rope)
    return Readings(() if rope is None else tuple(_sides(found, rope, theta)), _operators(found, rope), theta, errors)


def errors_by_place(place: str, at: Array, worst: Array, allowed: Mapping[str, Array], wrong: Array) -> Errors:
    """Errors (N,) of rows at positions, or of tokens, (N,), with what each grade allows there and whether they are too
    large: the largest in each part of an octave. Rows with very large or small numbers are not to be among them."""
    parts = np.round(np.log2(np.abs(at) + 1.0) * PLACES).astype(np.int64)
    worst = np.where(np.isnan(worst), np.inf, worst)
    some = [np.flatnonzero(parts == part) for part in np.unique(parts)]
    top = [rows[np.argmax(worst[rows])] for rows in some]
    bounds = {grade: np.array([most[rows].max() for rows in some]) for grade, most in allowed.items()}
    return Errors(place, np.abs(at)[top], worst[top], np.array([bool(wrong[rows].any()) for rows in some]), bounds)


def _operators(found: Description, rope: Rope | None) -> Operators:
    """R(m) with m on the first axis: at the first position where it is clearly not as expected, or at 3."""
    j, expected = int(np.argmax(found.at >= 3)), None
    if rope is not None:
        due = [_expected(rope, m) for m in found.at]
        off = np.nan_to_num([np.abs(r - right).max() for r, right in zip(found.r[0], due, strict=True)], nan=2.0)
        j = int(np.argmax(off > CLEAR * off.max())) if off.max() > CLEAR else j
        expected = due[j]
    m, axes = int(found.at[j]), len(found.theta)
    return Operators(str(m) if axes == 1 else str((m, *[0] * (axes - 1))), found.r[0, j], expected)


def _expected(rope: Rope, m: int) -> Array:
    """R(m), (d, d), with 0 on the axes of the positions after the first one."""
    at = np.array(m) if rope.axes is None else m * (np.arange(rope.axes.count) == 0)
    pairs = definition.pairs(rope.layout, rope.width, rope.start)
    return definition.rotation_matrix(*cos_sin(at, rope), *pairs, rope.head_dim)


def _frequencies(found: Description, rope: Rope | None) -> Frequencies:
    """As far as the pairs turn."""
    measured = found.measured.part(found.measured.turning)
    if rope is None:
        return Frequencies(measured.theta, None, None, np.zeros(len(measured.theta), bool))
    turning = frequencies(rope) > 0
    expected = frequencies(rope)[turning]
    if len(expected) != len(measured.theta):
        return Frequencies(measured.theta, expected, None, np.ones(len(measured.theta), bool))
    allowed = U32 * (theta_errors(rope)[turning] + 2) + measured.relative
    wrong = ~(np.abs(np.abs(measured.theta) / expected - 1) <= allowed)
    return Frequencies(measured.theta, expected, allowed, wrong)


def _sides(found: Description, rope: Rope, theta: Frequencies) -> Iterator[Side]:
    """Each property, expected and measured; frequencies and the factor as far as they can be told apart."""
    off = theta.wrong
    same = {"factor": abs(found.factor / rope.attention_factor - 1) < 1e-3}
    same |= dict.fromkeys(("frequencies", "rule"), bool(len(off)) and not off.any())
    more = {"frequencies": f"; {off.sum()} of {len(off)} differ" if off.any() else ""}
    for name, due, got, alike in found.sides(rope):
        alike = same.get(name, alike)
        yield Side(name, due, due if alike else got + more.get(name, ""), alike)
