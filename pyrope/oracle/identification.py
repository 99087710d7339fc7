"""`identify`: what a black box does, without being told: pairs, direction, width, frequencies, offset, factor, rule."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ..theta import Rope, check_rope
from . import page
from .ask import Candidate, Unreadable
from .drawings import Readings
from .floats import Float64
from .measure import Measured, measure
from .probe import Probe, probe_positions
from .readings import frequency_readings, operator_readings
from .recipes import as_is
from .report import finite
from .rules import Explanation, layout_of, low_precision, rules
from .sample import graded, take_sample
from .tolerance import LOW_ANGLE


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
    frequencies: tuple[float, ...]
    uncertainty: tuple[float, ...]
    offset: float
    attention_factor: float
    explanations: tuple[str, ...]  # of the frequencies; several where they cannot be told apart
    rope: Rope | None  # if one explains them
    precision: str
    behaviour: tuple[str, ...]  # what it does beside rotating
    notes: tuple[str, ...] = ()
    multiple: bool = False  # whether every position returns attention_factor·x
    readings: Readings | None = field(default=None, repr=False, compare=False)  # what its page draws

    def rows(self) -> list[tuple[str, str]]:
        """What was read, by name, in words."""
        theta = self.frequencies
        turning = f"{self.rotary_dim} of {self.head_dim} features, {self.placement}, {self.layout}"
        still = "nothing: every position returns x times a number" if self.multiple else "no two features as a pair"
        rows = [("turns", turning if theta else still)]
        if theta:
            rows += [
                ("direction", f"{self.direction:+d}"),
                ("offset", f"{self.offset:g} position{'' if abs(self.offset) == 1 else 's'}"),
            ]
            rows += [("frequencies", f"{theta[0]:.9g} … {theta[-1]:.9g}, the last ±{self.uncertainty[-1]:.1e}")]
        rows += [("factor", f"{self.attention_factor:.6g}")] if theta or self.multiple else []
        rows += [("rule" if i == 0 else "or", words) for i, words in enumerate(self.explanations)]
        rows += [("precision", self.precision)]
        rows += [("also", words) for words in self.behaviour] + [("note", words) for words in self.notes]
        return [(name, page.abbreviated(words)) for name, words in rows]

    def __str__(self) -> str:
        lines, width = [f"rotation of {self.head_dim} features, {self.dtype}"], 12
        for name, words in self.rows():
            lines += textwrap.wrap(words, 79, initial_indent=f"  {name:<{width}}", subsequent_indent=" " * (width + 2))
        return "\n".join(lines)

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
    fn: Candidate, head_dim: int, *, dtype: Any = None, max_position: int | None = None, suspects: Iterable[Rope] = ()
) -> Identification:
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
    (131071). LongRoPE's lists would fit any frequencies: it is named only if it is one of the ``suspects``.
    """
    probe = Probe(fn, head_dim, np.float32 if dtype is None else dtype, max_position)
    if not isinstance(suspects, Iterable):
        raise TypeError(f"suspects must be a list of ropes, was {type(suspects).__name__}")
    suspects = tuple(check_rope(rope) for rope in suspects)
    try:
        probe.behave()
        positions = probe_positions(probe.max_position)
        operator = probe.operator(positions)
    except Unreadable as error:
        raise ValueError(f"the candidate cannot be read: {error}") from error
    measured = measure(operator, positions, probe.unit, probe.step)
    layout, width, placement, _ = layout_of(measured.pairs, head_dim)
    notes, matches, narrow = list(probe.notes), list[Explanation](), ""
    if measured.linear_up_to < positions[-1]:
        notes.append(f"phases are proportional to the position up to {measured.linear_up_to} only")
    if measured.start > 0.1:
        notes.append(f"at position 0 pairs are turned by up to {measured.start:.4g} more than any offset explains")
    if measured.pairs.odd or measured.pairs.skew > 32 * probe.unit * max(1.0, measured.factor):
        notes.append(f"no rotation: {measured.pairs.odd} features belong to no pair, and within the pairs R is off by "
                     f"{measured.pairs.skew:.2g} from a rotation times a number")  # fmt: skip
    else:
        matches = rules(measured, head_dim, suspects)
        # Only then, since frequencies that are powers of two are right in any dtype.
        narrow, rounding = ("", as_is) if matches or layout == "none" else low_precision(measured)
        matches = rules(measured, head_dim, suspects, rounding) if narrow else matches
    rope = next((match.rope for match in matches if match.rope is not None), None)
    unknown = ("none of these: no published rule has these frequencies",) if width else ()
    return Identification(
        head_dim=probe.head_dim,
        dtype=probe.dtype.name,
        layout=layout,
        rotary_dim=width,
        placement=placement,
        pairs=tuple(map(tuple, measured.pairs.reads.tolist())),
        direction=measured.direction,
        frequencies=tuple(measured.theta.tolist()),
        uncertainty=tuple(measured.uncertainty.tolist()),
        offset=measured.offset,
        attention_factor=measured.factor,
        explanations=tuple(match.words for match in matches) or unknown,
        rope=rope,
        precision=f"{LOW_ANGLE}: all frequencies are {narrow} numbers" if narrow else _grade(probe, rope, measured),
        behaviour=tuple(f"{name}: {evidence}" for name, evidence in probe.behaviour.items()),
        notes=tuple(notes),
        multiple=_multiple(operator, measured.factor, probe.unit),
        readings=_readings(probe, rope, measured),
    )


def _readings(probe: Probe, rope: Rope | None, measured: Measured) -> Readings | None:
    """R(m) and the frequencies beside those of the rope that explains them, if one does."""
    try:
        operators = operator_readings(probe, rope, min(3, probe.max_position), differing=False)
    except Unreadable:
        return None
    return Readings("identified", operators=operators, frequencies=frequency_readings(rope, measured))


def _multiple(operator: Float64, factor: float, unit: float) -> bool:
    """Whether R(m) is this number times the identity at every position."""
    return bool((np.abs(operator - factor * np.eye(operator.shape[-1])) <= 4 * unit * abs(factor)).all())


def _grade(probe: Probe, rope: Rope | None, measured: Measured) -> str:
    """The grade of a candidate whose rope is known."""
    if rope is None:
        return "cannot tell: no rope has exactly these numbers"
    if measured.offset != round(measured.offset):
        return "cannot tell: the position offset is not an integer"
    try:
        sample = take_sample(probe, rope)
        grade = graded(sample._replace(positions=sample.positions + round(measured.offset)), rope, probe.dtype).grade
    except Unreadable as error:
        return f"cannot tell: {error}"
    if rope.base != float(f"{rope.base:.8g}"):
        return "cannot tell: the base is not a round number, so its last digits are unknown"
    return grade or "cannot tell: worse than a float32 angle with these numbers"
