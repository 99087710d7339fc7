"""What the page of a report draws beside its words, from what a check has asked; read when a page is made, not before.

Of a rotation: R(m) at one position, the frequencies, the errors by position. Of attention: the errors by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..backend import Array
from ..theta import Rope, frequencies
from .candidate import Unreadable
from .diagnosis import described
from .operator import Description, Side as Side
from .tolerance import APPLICABLE, U32, ExactTables, Expected, theta_errors

if TYPE_CHECKING:
    from . import attention, comparison

CLEAR = 0.5  # R(m) is shown where an error has this part of the largest one
PLACES = 12  # of an octave, at which errors are drawn
CALLS = 8  # of attention that are shown side by side, wrong ones first


class Operators(NamedTuple):
    """R(m) of a candidate, and the expected one if there is one."""

    position: str  # in words, one number or one for each axis
    measured: Array  # (d, d): column j is what unit vector j becomes
    expected: Array | None  # (d, d)
    differs: bool


class Frequencies(NamedTuple):
    """The frequencies of the pairs, in the order of the pairs."""

    measured: Array  # (k,)
    expected: Array | None  # (p,)
    allowed: Array | None  # (p,): by how much a right one may be off, and be measured off, relative to itself
    wrong: Array  # (k,): those that are not the expected ones


class Errors(NamedTuple):
    """The errors at each position, or in each row, and what each grade of precision allows there."""

    place: str  # what the numbers below count: "position", or a token of which question
    at: Array  # (n,), ascending
    worst: Array  # (n,): the largest error of an output there; infinity for NaN
    beyond: Array  # (n,): whether an output there is off by more than is accepted of it
    bounds: Mapping[str, Array]  # by grade (n,): the most that an output there may be off


@dataclass(frozen=True, eq=False)
class Readings:
    """What was read of a candidate, for the page of a report. Reports are compared and written as JSON without it."""

    reference: str = "expected"  # what it is held to: "expected", or "identified"
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
    return Readings(errors=errors) if found is None else rotation_readings(found, rope, errors=errors)


def of_attention(check: attention.Check) -> Readings:
    """The errors of the first call that is answered wrongly, or of the first one, by token; and of some calls the
    number that is furthest off."""
    shown = [*check.wrong, *(tried for tried in check.tried if not tried.wrong)]
    call, answer, limit = shown[0].call, shown[0].answers[0], shown[0].limits[0]
    off, most = (x.max(axis=(0, 1, 3)) for x in np.broadcast_arrays(limit.error(answer), limit.worst))
    wrong = (limit.error(answer) > limit.worst).any(axis=(0, 1, 3))
    errors = errors_by_place(f'token of the call "{call.name}"', call.places[0], off, {"allowed": most}, wrong)
    return Readings(sides=tuple(map(_furthest, shown[:CALLS])), errors=errors)


def _furthest(tried: attention.Tried) -> Side:
    """The number of an answer that is furthest off, beside what is expected."""
    answer, limit = tried.answers[0], tried.limits[0]
    at = np.unravel_index(int(np.argmax(limit.error(answer) / limit.worst)), answer.shape)
    place = "row {}, head {}, query {}, feature {}".format(*at)
    return Side(f"{tried.call.name}: {place}", f"{limit.truth[at]:.7g}", f"{answer[at]:.7g}", not tried.wrong)


def rotation_readings(
    found: Description, rope: Rope | None, reference: str = "expected", errors: Errors | None = None
) -> Readings:
    """What was measured of a rotation beside a rope, if there is one to hold it to."""
    theta = _frequencies(found, rope)
    sides = () if rope is None else tuple(_sides(found, rope, theta))
    return Readings(reference, sides, _operators(found, rope), theta, errors)


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
    """R(m) with m on the first axis: at 3 or, where that is as expected, at the first position that clearly is not."""
    places = [int(np.argmax(found.at >= 3))]
    if rope is not None and found.z.shape[2] == rope.pairs:
        tables = ExactTables(rope, found.at)
        worst = np.abs(found.z[0] - (tables.cos + 1j * tables.sin)[..., None]).max(axis=(1, 2))
        places.append(int(np.argmax(worst >= CLEAR * worst.max())))
    shown = [_operator(found, rope, j) for j in places]
    return next((one for one in shown if one.differs), shown[0])


def _operator(found: Description, rope: Rope | None, j: int) -> Operators:
    """R(m) at one position of the ladder."""
    m, measured = int(found.at[j]), found.r[0, j]
    where = str(m) if len(found.theta) == 1 else f"({', '.join([str(m), *['0'] * (len(found.theta) - 1)])})"
    if rope is None:
        return Operators(where, measured, None, False)
    at = np.array([[m], *[[0]] * ((1 if rope.axes is None else rope.axes.count) - 1)])
    due = Expected(ExactTables(rope, at), np.eye(rope.head_dim)[:, None], at, found.dtype)
    expected, bounds = due.y[:, 0].T, due.allowed(APPLICABLE[found.dtype][-1])[:, 0].T
    return Operators(where, measured, expected, not bool((np.abs(measured - expected) <= 2 * bounds).all()))


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
