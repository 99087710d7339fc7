"""Pictures of what was read of a candidate, as SVG inside HTML: R(m), errors by position, frequencies by pair.

They need NumPy alone. All text goes through `element`, which escapes it; colours come from the style sheet of `page`.
A chart is 360 units wide, about the width of a telephone, so that its letters can be read there, too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Float64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

_WIDTH, _HEIGHT = 360, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 352, 8, 194  # of the area of a chart
_MOST_CELLS = 192  # rows of a drawn matrix: of larger ones, cells are pooled
_SHADES = 12
_RED, _BLUE = (178, 24, 43), (33, 102, 172)
_LEAST = 0.1  # this part of the errors may lie below a chart, and is drawn at its lower end
_DASHES = ("none", "7 3", "2 2.5", "7 3 2 3")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# ── What is drawn ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Operators:
    """R(m) of a candidate, and the expected one if there is one."""

    position: str  # in words, one number or one for each axis
    measured: Float64  # (d, d): column j is what unit vector j becomes
    expected: Float64 | None  # (d, d)
    differing: Flags  # (d, d): the elements of pairs that differ


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The frequencies of the pairs, in the order of the pairs."""

    measured: Float64  # (k,)
    expected: Float64 | None  # (p,)
    allowed: Float64 | None  # (p,): by how much a right one may be off, and be measured off, relative to itself


@dataclass(frozen=True, eq=False)
class Errors:
    """The errors at each position, or in each row, and what each grade of precision allows there."""

    place: str  # what the numbers below count: "position", or a token of which question
    at: Int64  # (n,), ascending
    worst: Float64  # (n,): the largest error of an output there; infinity for NaN
    beyond: Flags  # (n,): whether an output there is off by more than is accepted of it
    bounds: Mapping[str, Float64]  # by grade (n,): the most that an output there may be off


class Side(NamedTuple):
    """One property, expected and measured, in words."""

    name: str
    expected: str
    measured: str
    same: bool


@dataclass(frozen=True, eq=False)
class Readings:
    """What was read of a candidate, for the page of a report. Reports are compared and written as JSON without it."""

    reference: str = "expected"  # what it is held to: "expected", or "identified"
    sides: tuple[Side, ...] = ()
    operators: Operators | None = None
    frequencies: Frequencies | None = None
    errors: Errors | None = None


# ── Markup ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Markup(str):
    """Text that is markup. Any other text is escaped before it becomes a part of one."""


def element(name: str, *children: str, **attributes: object) -> Markup:
    """An element of HTML or SVG. Underscores of attributes become hyphens, ``class_`` is class, None leaves one out.

    >>> element("p", "a < b", element("b", "!"), class_="x", data_y='"')
    '<p class="x" data-y="&quot;">a &lt; b<b>!</b></p>'
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{words}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Markup:
    """Markup one after the other; plain text among it is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def _svg(label: str, view: str, *children: str, class_: str = "chart") -> Markup:
    return element("svg", *children, class_=class_, viewBox=view, role="img", aria_label=label)


# ── R(m) ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def operator_drawing(label: str, matrix: Float64, most: float, framed: Flags | None = None) -> Markup:
    """A matrix: zero is white, positive elements are red, negative ones blue, grey ones not finite; some are framed."""
    step = -(-len(matrix) // _MOST_CELLS)
    matrix = _pooled(matrix, step)
    n = len(matrix)
    shades = np.rint(np.clip(np.nan_to_num(matrix / most, posinf=0, neginf=0), -1, 1) * _SHADES).astype(int)
    shades[~np.isfinite(matrix)] = _SHADES + 1
    cells = [
        element("path", d="".join(f"M{j} {i}h1v1h-1z" for i, j in np.argwhere(shades == shade)), fill=_colour(shade))
        for shade in np.unique(shades[shades != 0])
    ]
    paper = element("rect", width=n, height=n, fill="#ffffff")
    frame = Markup("")
    if framed is not None and framed.any():
        frame = element(
            "path", d=_outline(_grown(_pooled(framed, step))), class_="framed", fill="none", stroke="#222222",
            stroke_width="0.8", vector_effect="non-scaling-stroke", shape_rendering="geometricPrecision",
        )  # fmt: skip
    margin = n / 64
    view = f"{-margin:.4g} {-margin:.4g} {n + 2 * margin:.4g} {n + 2 * margin:.4g}"
    return _svg(label, view, paper, *cells, frame, class_="matrix")


def _colour(shade: int) -> str:
    if shade > _SHADES:
        return "#8a8a8a"
    strong, part = (_RED if shade > 0 else _BLUE), abs(shade) / _SHADES
    return "#" + "".join(f"{round(255 + (value - 255) * part):02x}" for value in strong)


def _pooled(matrix: Any, step: int) -> Any:
    """Blocks of step × step elements become one: the largest in size, and NaN if there is one."""
    if step == 1:
        return matrix
    size = -(-len(matrix) // step)
    padded = np.zeros((size * step, size * step), matrix.dtype)
    padded[: len(matrix), : len(matrix)] = matrix
    blocks = padded.reshape(size, step, size, step).swapaxes(1, 2).reshape(size, size, -1)
    return np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)[..., 0]


def _grown(cells: Flags) -> Flags:
    """The cells and, where cells are small, their neighbours, so that a diagonal of them makes one frame."""
    if len(cells) < 24:
        return cells
    n, padded = len(cells), np.pad(cells, 1)
    return np.asarray(np.logical_or.reduce([padded[i : i + n, j : j + n] for i in range(3) for j in range(3)]))


def _outline(cells: Flags) -> str:
    """The edges between these cells and all others, as an SVG path."""
    padded = np.pad(cells, 1)
    across = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    down = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    return "".join(f"M{j} {i}h1" for i, j in across) + "".join(f"M{j} {i}v1" for i, j in down)


# ── Charts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Scale(NamedTuple):
    """Numbers, or their logarithms, on an axis."""

    low: float
    high: float
    start: int
    stop: int

    def __call__(self, value: float) -> float:
        place = self.start + (min(max(value, self.low), self.high) - self.low) / (self.high - self.low) * (
            self.stop - self.start
        )
        return round(place, 1)


def power(exponent: int) -> str:
    """A power of ten, as the label of an axis.

    >>> power(-12), power(0), power(2)
    ('10⁻¹²', '1', '100')
    """
    return f"{10**exponent}" if 0 <= exponent <= 2 else f"10{str(exponent).translate(_SUPERSCRIPT)}"


def _decades(values: Sequence[Float64], least: float) -> tuple[int, int]:
    """The powers of ten around all values that have a logarithm, down to two below this quantile of each series."""
    series = [x[np.isfinite(x) & (x > 0)] for x in values]
    series = [x for x in series if x.size]
    if not series:
        return -8, 0
    low = math.floor(np.log10(min(max(x.min(), np.quantile(x, least, method="lower") / 100) for x in series)))
    return low, max(math.ceil(np.log10(max(x.max() for x in series))), low + 1)


def _vertical(values: Sequence[Float64], least: float = 0.0) -> tuple[_Scale, list[Markup]]:
    """A logarithmic scale for these values, and its grid; what is not finite stands above it."""
    low, high = _decades(values, least)
    finite = all(np.isfinite(x).all() for x in values)
    scale, step = _Scale(low, high if finite else high + 1, _BOTTOM, _TOP), max(1, -(-(high - low) // 6))
    grid = [] if finite else [element("text", "NaN, ∞", class_="tick", x=_LEFT - 4, y=_TOP + 3.5, text_anchor="end")]
    for exponent in range(low, high + 1, step):
        y = scale(exponent)
        grid.append(element("line", class_="grid", x1=_LEFT, x2=_RIGHT, y1=y, y2=y))
        grid.append(element("text", power(exponent), class_="tick", x=_LEFT - 4, y=y + 3.5, text_anchor="end"))
    return scale, grid


def _horizontal(scale: _Scale, ticks: Iterable[tuple[float, str]], label: str) -> list[Markup]:
    """The axis below a chart."""
    marks = [element("line", class_="axis", x1=_LEFT, x2=_RIGHT, y1=_BOTTOM, y2=_BOTTOM)]
    for value, words in ticks:
        x = scale(value)
        marks.append(element("line", class_="axis", x1=x, x2=x, y1=_BOTTOM, y2=_BOTTOM + 4))
        marks.append(element("text", words, class_="tick", x=x, y=_BOTTOM + 15, text_anchor="middle"))
    middle = (_LEFT + _RIGHT) / 2
    return [*marks, element("text", label, class_="label", x=middle, y=_HEIGHT - 5, text_anchor="middle")]


def _line(points: Sequence[tuple[float, float]], class_: str, dashes: str = "none") -> Markup:
    text = " ".join(f"{x:g},{y:g}" for x, y in points)
    return element("polyline", class_=f"line {class_}", points=text, fill="none", stroke_dasharray=dashes)


def _mark(x: float, y: float, wrong: bool) -> Markup:
    """A dot, or a cross for what is wrong."""
    if not wrong:
        return element("circle", class_="dot", cx=f"{x:g}", cy=f"{y:g}", r="2")
    return element("path", class_="cross", d=f"M{x - 2.6:g} {y - 2.6:g}l5.2 5.2m0 -5.2l-5.2 5.2", fill="none")


def _height(scale: _Scale, value: float) -> float:
    """Where a value is on a logarithmic axis: at its end if it is 0, or not finite."""
    if not math.isfinite(value):
        return scale(math.inf)
    return scale(math.log10(value) if value > 0 else -math.inf)


def errors_drawing(errors: Errors) -> Markup:
    """The largest error at each place, both axes logarithmic, and the bound of each grade."""
    y, grid = _vertical([errors.worst, *errors.bounds.values()], _LEAST)
    top = max(1, int(errors.at.max()))
    x = _Scale(0.0, math.log10(top + 1), _LEFT + 4, _RIGHT - 4)
    powers = [0, *(10**k for k in range(len(str(top))))]
    axis = _horizontal(x, ((math.log10(m + 1), power(len(str(m)) - 1) if m else "0") for m in powers), errors.place)
    across = [x(math.log10(abs(int(m)) + 1)) for m in errors.at]
    lines = [
        _line([(a, _height(y, b)) for a, b in zip(across, bound, strict=True)], f"grade{k}", _DASHES[k % 4])
        for k, bound in enumerate(errors.bounds.values())
    ]
    marks = [
        _mark(a, _height(y, error), bool(wrong))
        for a, error, wrong in zip(across, errors.worst, errors.beyond, strict=True)
    ]
    label = f"the largest error by {errors.place}, with the bound of each grade"
    return _svg(label, f"0 0 {_WIDTH} {_HEIGHT}", *grid, *axis, *lines, *marks)


def frequencies_drawing(frequencies: Frequencies) -> Markup:
    """Θ by pair, on a logarithmic axis: a line for the expected frequencies, a mark for each measured one."""
    measured, expected = np.abs(frequencies.measured), frequencies.expected
    series = [measured] if expected is None else [measured, np.abs(expected)]
    y, grid = _vertical(series)
    x, axis = _pairs(max(map(len, series)))
    wrong = differing(frequencies)
    line = (
        [] if expected is None else [_line([(x(i), _height(y, v)) for i, v in enumerate(np.abs(expected))], "expected")]
    )
    marks = [_mark(x(i), _height(y, value), bool(wrong[i])) for i, value in enumerate(measured)]
    return _svg("frequencies, expected and measured, by pair", f"0 0 {_WIDTH} {_HEIGHT}", *grid, *axis, *line, *marks)


def deviations_drawing(frequencies: Frequencies) -> Markup | None:
    """How far each measured frequency is off, relative to the expected one; None if these are not as many."""
    off = deviations(frequencies)
    if off is None or frequencies.allowed is None:
        return None
    y, grid = _vertical([off, frequencies.allowed], _LEAST)
    x, axis = _pairs(len(off))
    line = _line([(x(i), _height(y, value)) for i, value in enumerate(frequencies.allowed)], "grade0", _DASHES[1])
    wrong = differing(frequencies)
    marks = [_mark(x(i), _height(y, value), bool(wrong[i])) for i, value in enumerate(off)]
    label = "how far each measured frequency is off, by pair"
    return _svg(label, f"0 0 {_WIDTH} {_HEIGHT}", *grid, *axis, line, *marks)


def _pairs(count: int) -> tuple[_Scale, list[Markup]]:
    """The axis of the pairs."""
    scale = _Scale(0.0, max(1.0, count - 1.0), _LEFT + 4, _RIGHT - 6)
    step = max(1, 2 ** math.ceil(math.log2(max(count, 1) / 6)))
    return scale, _horizontal(scale, ((i, str(i)) for i in range(0, count, step)), "pair i (0 is the fastest)")


def deviations(frequencies: Frequencies) -> Float64 | None:
    """|measured/expected − 1| of each pair, if there are as many pairs as expected."""
    expected = frequencies.expected
    if expected is None or len(expected) != len(frequencies.measured) or not expected.all():
        return None
    return np.asarray(np.abs(np.abs(frequencies.measured) / expected - 1))


def differing(frequencies: Frequencies) -> Flags:
    """Which measured frequencies are not the expected ones."""
    off = deviations(frequencies)
    if off is None or frequencies.allowed is None:
        missing = frequencies.expected is not None and len(frequencies.expected) != len(frequencies.measured)
        return np.full(len(frequencies.measured), missing)
    return np.asarray(~(off <= frequencies.allowed))


def swatches(errors: Errors) -> Iterator[tuple[Markup, str]]:
    """A piece of each line of `errors_drawing`, with the name of its grade."""
    for k, grade in enumerate(errors.bounds):
        yield swatch(_line([(1, 5), (27, 5)], f"grade{k}", _DASHES[k % 4])), grade


def swatch(drawn: Markup) -> Markup:
    return _svg("", "0 0 28 10", drawn, class_="swatch")


def dot_swatch(wrong: bool) -> Markup:
    return swatch(_mark(14, 5, wrong))


def line_swatch() -> Markup:
    """Of the expected frequencies."""
    return swatch(_line([(1, 5), (27, 5)], "expected"))
