"""`identify`: what a black box does, without being told: pairs, direction, width, frequencies, offset, factor, rule."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..theta import Linear, Rope, check_rope
from . import page
from .ask import Candidate, Unreadable
from .drawings import Readings
from .floats import Float64, Int64
from .measure import Measured, axis_of_pairs, growth_of, measure, offset_of, phases
from .probe import Probe, probe_positions
from .readings import ILLEGIBLE, frequency_readings, operator_readings
from .report import finite
from .rules import Explanation, is_round, layout_of, low_precision, rules, rules_of_axes
from .sample import graded, take_sample
from .tolerance import LOW_ANGLE

_WIDEST = 2048  # features: R(m) at some 60 positions takes 500·d² bytes


@dataclass(frozen=True)
class Identification:
    """What a black box does, as far as its outputs tell."""

    head_dim: int
    dtype: str
    layout: str  # a layout of Rope, or "none"
    rotary_dim: int
    placement: str
    pairs: tuple[tuple[int, int], ...]  # features read together, in order
    direction: int
    frequencies: tuple[float, ...]  # none where the pairs do not turn
    uncertainty: tuple[float, ...]
    offset: float
    attention_factor: float
    explanations: tuple[str, ...]  # of the frequencies; several where they cannot be told apart
    rope: Rope | None  # if one explains them
    precision: str
    behaviour: tuple[str, ...]  # what it does beside rotating
    notes: tuple[str, ...] = ()
    multiple: bool = False  # whether every position returns attention_factor·x
    axes: tuple[int, ...] | None = None  # which axis of the positions turns each pair, if they have several
    readings: Readings | None = field(default=None, repr=False, compare=False)  # what its page draws
    offsets: tuple[float, ...] = ()  # those of the axes, if they differ

    def rows(self) -> list[tuple[str, str]]:
        """What was read, by name, in words."""
        theta = self.frequencies
        turning = f"{self.rotary_dim} of {self.head_dim} features, {self.placement}, {self.layout}"
        still = "nothing: every position returns x times a number" if self.multiple else "no two features as a pair"
        rows = [("turns" if theta else "pairs", turning if self.pairs else still)]
        if theta:
            offset = f"{self.offset:g} position{'' if abs(self.offset) == 1 else 's'}"
            if self.offsets:
                offset = f"{', '.join(f'{one:g}' for one in self.offsets)} positions, axis by axis"
            rows += [("direction", f"{self.direction:+d}"), ("offset", offset)]
            rows += [("frequencies", f"{theta[0]:.9g} … {theta[-1]:.9g}, the last ±{self.uncertainty[-1]:.1e}")]
        elif self.pairs:
            rows += [("frequencies", ILLEGIBLE)]
        if self.axes is not None:
            runs = [(axis, len(list(run))) for axis, run in itertools.groupby(self.axes)]
            dealt = ", ".join(f"{axis} × {count}" if count > 1 else str(axis) for axis, count in runs)
            rows += [("axes", f"{len(set(self.axes))}, of the pairs in order: {dealt}")]
            rows += [("as", repr(self.rope.axes))] if self.rope is not None and self.rope.axes is not None else []
        rows += [("factor", f"{self.attention_factor:.6g}")] if theta or self.multiple else []
        rows += [("rule" if i == 0 else "or", words) for i, words in enumerate(self.explanations)]
        rows += [("precision", self.precision)]
        rows += [("also", words) for words in self.behaviour] + [("note", words) for words in self.notes]
        return [(name, page.abbreviated(words)) for name, words in rows]

    def __str__(self) -> str:
        lines, width = [f"rotation of {self.head_dim} features, {self.dtype}"], 12
        for name, words in self.rows():
            lines += textwrap.wrap(words, 79, initial_indent=f"  {name:<{width}}", subsequent_indent=" " * (width + 2))
        return page.printable("\n".join(lines))

    def _repr_html_(self) -> str:
        """The page of `page.identification_section`, for notebooks."""
        return page.fragment(page.identification_section(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN and no infinity: these become None."""
        plain = finite(asdict(replace(self, rope=None, readings=None)))
        del plain["readings"]
        return {**plain, "rope": None if self.rope is None else repr(self.rope)}


@np.errstate(invalid="ignore", over="ignore")  # whatever the candidate returns
def identify(
    fn: Candidate, head_dim: int, *, dtype: Any = None, max_position: int | None = None, suspects: Iterable[Rope] = (),
    axes: int | None = None,
) -> Identification:  # fmt: skip
    """What rotation a black box fn(x, positions) -> rotated x performs, without being told.

    >>> import pyrope
    >>> rope = Rope(64, 500000.0, "half", rotary_dim=32)
    >>> print(identify(lambda x, positions: pyrope.rotate(x, positions, rope), 64))
    rotation of 64 features, float32
      turns       32 of 64 features, prefix, half
      direction   +1
      offset      0 positions
      frequencies 1 … 4.54167048e-06, the last ±4.2e-13
      factor      1
      rule        base 500000, not rescaled (NTK scaling of a smaller base, at a
                  fixed length, is the same)
      precision   tables or products in x's dtype

    ``dtype`` is that of x, float32 if it is not given; ``max_position`` the largest that the candidate can take
    (131071). LongRoPE's lists would fit any frequencies: it is named only if it is one of the ``suspects``. With
    ``axes``, the candidate takes positions (axes, n), and which of them turns each pair is read too.
    """
    axes = None if axes is None else checks.integer("axes", axes, 1, 64)
    probe = Probe(fn, head_dim, np.float32 if dtype is None else dtype, max_position, axes)
    if probe.head_dim > _WIDEST:
        raise ValueError(f"head_dim must be at most {_WIDEST} where R(m) is read whole, was {head_dim}")
    if not isinstance(suspects, Iterable):
        raise TypeError(f"suspects must be a list of ropes, was {type(suspects).__name__}")
    suspects = tuple(check_rope(rope) for rope in suspects)
    try:
        operator, measured, axis, notes, offsets = _read(probe)
    except Unreadable as error:
        raise ValueError(f"the candidate cannot be read: {error}") from error
    layout, width, placement, _ = layout_of(measured.pairs, head_dim)
    if measured.pairs.odd or measured.pairs.skew > 32 * probe.unit * max(1.0, measured.factor):
        odd = f"{measured.pairs.odd} features belong to no pair, and " if measured.pairs.odd else ""
        skew = f"within the pairs R is off by {measured.pairs.skew:.2g} from a rotation times a number"
        notes.append(f"no rotation: {odd}{skew}")
        matches, narrow = list[Explanation](), ""
    else:
        matches, narrow = _explanations(measured, head_dim, axis, axes or 1, suspects)
        notes += _still(measured, head_dim, axis) if layout == "none" and not matches else []
    rope = next((match.rope for match in matches if match.rope is not None), None)
    legible = measured.legible
    unknown = ("none of these: no published rule has these frequencies",) if width and legible else ()
    return Identification(
        head_dim=probe.head_dim,
        dtype=probe.dtype.name,
        layout=layout,
        rotary_dim=width,
        placement=placement,
        pairs=tuple(map(tuple, measured.pairs.reads.tolist())),
        direction=measured.direction,
        frequencies=tuple(measured.theta.tolist()) if legible else (),
        uncertainty=tuple(measured.uncertainty.tolist()) if legible else (),
        offset=measured.offset,
        attention_factor=measured.factor,
        explanations=tuple(match.words for match in matches) or unknown,
        rope=rope,
        precision=f"{LOW_ANGLE}: all frequencies are {narrow} numbers"
        if narrow
        else _grade(probe, rope, measured, offsets),
        behaviour=tuple(f"{name}: {evidence}" for name, evidence in probe.behaviour.items()),
        notes=tuple(notes),
        multiple=_multiple(operator, measured.factor, probe.unit),
        axes=None if axis is None else tuple(axis.tolist()),
        readings=_readings(probe, rope, measured),
        offsets=offsets,
    )


class _Read(NamedTuple):
    operator: Float64
    measured: Measured
    axis: Int64 | None  # which turns each pair, if there are several
    notes: list[str]
    offsets: tuple[float, ...]  # by axis, if they differ


def _read(probe: Probe) -> _Read:
    """The operator of a candidate, and what is measured in it."""
    probe.behave()
    positions = probe_positions(probe.max_position)
    operator = probe.operator(positions)
    measured = measure(operator, positions, probe.unit, probe.step)
    axis = None if probe.axes is None else axis_of_pairs(probe, measured)
    notes = list(probe.notes)
    if measured.linear_up_to < positions[-1]:
        notes.append(f"phases are proportional to the position up to {measured.linear_up_to} only")
    if (growth := growth_of(operator, measured.pairs, positions)) is not None:
        at_zero = measure(operator[:1].repeat(2, axis=0), np.array([0, 1]), probe.unit, probe.step)
        measured = measured._replace(factor=at_zero.factor)
        rates = f"at rates from {growth.min():.3g} to {growth.max():.3g} of themselves"
        notes.append(f"pairs grow or shrink with the position, {rates}: xPos, or the like; the factor is at position 0")
    offsets = () if axis is None else _offsets(operator, measured, axis)
    if measured.start > 0.1 and not offsets:
        notes.append(f"at position 0 pairs are turned by up to {measured.start:.4g} more than any offset explains")
    return _Read(operator, measured, axis, notes, offsets)


def _offsets(operator: Float64, measured: Measured, axis: Int64) -> tuple[float, ...]:
    """By how many positions the pairs of each axis are ahead, if these are integers, explain them, and differ."""
    phase = measured.direction * phases(operator[:1], measured.pairs)[0]
    count = int(axis.max(initial=0)) + 1
    offsets = [offset_of(phase[axis == a], measured.theta[axis == a], measured.unit) for a in range(count)]
    off = np.abs(np.exp(1j * (phase - np.array(offsets)[axis] * measured.theta)) - 1)
    same = len(set(offsets)) == 1 or any(one != round(one) for one in offsets)
    return () if same or off.max(initial=0.0) > 0.1 else tuple(offsets)


def _explanations(
    measured: Measured, head_dim: int, axis: Int64 | None, count: int, suspects: tuple[Rope, ...]
) -> tuple[list[Explanation], str]:
    """The rules that have these frequencies, and the dtype that they were rounded to, if that is narrow."""
    if axis is not None:
        return rules_of_axes(measured, head_dim, axis, count) if len(axis) else [], ""
    matches = rules(measured, head_dim, suspects)
    if matches or layout_of(measured.pairs, head_dim)[0] == "none":
        return matches, ""
    # Only now, since frequencies that are powers of two are right in any dtype.
    narrow, rounding = low_precision(measured)
    return rules(measured, head_dim, suspects, rounding) if narrow else [], narrow


def _still(measured: Measured, head_dim: int, axis: Int64 | None) -> list[str]:
    """A note about single features that stay as they are, among others that turn."""
    still = sorted(set(range(head_dim)) - set(measured.pairs.reads.ravel().tolist()))
    if not 0 < len(still) < head_dim // 2:
        return []
    more = ", …" * (len(still) > 8)
    missing = "" if axis is None else ": they may follow an axis of the positions that was not given, or is always 0"
    return [f"features {', '.join(map(str, still[:8]))}{more} do not turn{missing}"]


def _readings(probe: Probe, rope: Rope | None, measured: Measured) -> Readings | None:
    """R(m) and the frequencies beside those of the rope that explains them, if one does."""
    try:
        operators = operator_readings(probe, rope, min(3, probe.max_position), differing=False)
    except Unreadable:
        return None
    shown = frequency_readings(rope, measured) if measured.legible else None
    return Readings("identified", operators=operators, frequencies=shown)


def _multiple(operator: Float64, factor: float, unit: float) -> bool:
    """Whether R(m) is this number times the identity at every position."""
    return bool((np.abs(operator - factor * np.eye(operator.shape[-1])) <= 4 * unit * abs(factor)).all())


def _grade(probe: Probe, rope: Rope | None, measured: Measured, offsets: tuple[float, ...] = ()) -> str:
    """The grade of a candidate whose rope is known."""
    if rope is None:
        return "cannot tell: no rope has exactly these numbers"
    if offsets:
        return "cannot tell: the position offset differs from axis to axis"
    if measured.offset != round(measured.offset):
        return "cannot tell: the position offset is not an integer"
    try:
        sample = take_sample(probe, rope)
        grade = graded(sample._replace(positions=sample.positions + round(measured.offset)), rope, probe.dtype).grade
    except Unreadable as error:
        return f"cannot tell: {error}"
    if rope.base != float(f"{rope.base:.8g}"):
        return "cannot tell: the base is not a round number, so its last digits are unknown"
    factor = rope.scaling.factor if isinstance(rope.scaling, Linear) else 1.0
    if factor != float(f"{factor:.10g}") or (grade is None and not is_round(factor)):
        return "cannot tell: the factor is not a round number, so its last digits are unknown"
    return grade or "cannot tell: worse than a float32 angle with these numbers"
