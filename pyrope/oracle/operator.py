"""R(m) read with unit vectors, its description, and `identify`: what a black box does, without being told.

A rotation is linear in x. Unit vectors show which features each output is made from; then all first features of the
pairs, and all second ones, return what each output has of its own feature and of the other one. As a complex number
own + i·other is a·e^{imθ}: its angle, at positions that double at most, gives θ ever more exactly. All of these vectors
are multiplied by random numbers, which are divided out again: ones would hide what depends on values.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..backend import Array
from ..definition import pairs
from ..theta import LAYOUTS, PLACEMENTS, Axes, Rope, YaRN, check_rope, frequencies
from .candidate import BITS, UNIT, Candidate, Unreadable
from .frequencies import Measured, Named, guess_rope, listed, narrow_dtype, rounded, span
from .positions import wrapped
from .report import abbreviated, finite, printable
from .tolerance import APPLICABLE, STEP, Expected, Tables, float_dtype

MAX_POSITION = 131071
WIDEST = 2048  # features: R(m) is read column by column
_CALLS = 256  # in which unit vectors are handed over, at most
_SEEN = 1e-9  # what an output has of a feature, if it is made from it
_FEW = (0, 1, 2, 3, 7, 100, 1000)  # positions that show which features make a pair
NO_RULE = "none of these: no published rule has these frequencies"
ILLEGIBLE = "cannot be read: the pairs do not turn"
UNGRADED = "cannot tell: no rope has exactly these numbers"


class Probe(NamedTuple):
    """A candidate, and what it is called with."""

    candidate: Candidate
    d: int
    dtype: np.dtype[Any]
    top: int  # the largest position
    axes: int | None  # of the positions; None: they are (n,)

    def ask(self, x: Array, at: Array, axis: int | None = None) -> Array:
        """fn(x) for x (…, n, d) at positions (n,): those of one axis, with 0 on the others, or different on each."""
        positions = at
        if self.axes is not None:
            each = [at // (j + 1) if axis is None else at * (j == axis) for j in range(self.axes)]
            positions = np.stack(each)
        return self.candidate({"x": x, "positions": positions}, like=["x"])[0]

    def numbers(self, seed: int, *shape: int) -> Array:
        """Random numbers of ordinary size, none of them near 0."""
        rng = np.random.default_rng(seed)
        return np.asarray(rng.uniform(0.5, 2.0, shape) * rng.choice((-1.0, 1.0), shape)).astype(self.dtype)


def ladder(top: int) -> Array:
    """0 to 8, then odd positions, each at most twice the one before, and the largest one: even ones, powers of two
    above all, would hide that positions are rounded."""
    steps = {*range(9), top, *(2**k + half for k in range(3, 31) for half in (1, 2 ** (k - 1) - 1))}
    return np.array(sorted(m for m in steps if m <= top), np.int64)


def read(
    candidate: Candidate, head_dim: int, dtype: Any, top: int, axes: int | None = None, first: Shape | None = None
) -> tuple[Description | None, Array]:
    """The description of a candidate, if its outputs are made from the pairs of a layout; and which features each of
    them is made from, bool (d, d). Pairs as in ``first`` are preferred. Raises `Unreadable`."""
    probe = Probe(candidate, head_dim, float_dtype(dtype), top, axes)
    with np.errstate(all="ignore"):
        reached = _sources(probe)
        shape = find_shape(reached, first)
        return (None if shape is None else _describe(probe, shape)), reached


def _sources(probe: Probe) -> Array:
    """Which features each output is made from, at any of a few positions: bool (d, d), output and input."""
    at = np.unique([m for m in (*_FEW, probe.top // 2, probe.top) if m <= probe.top])
    size, step = probe.numbers(1, probe.d, len(at)), -(-probe.d // _CALLS)
    reached = np.zeros((probe.d, probe.d), bool)
    for j in range(0, probe.d, step):
        some = np.arange(j, min(j + step, probe.d))
        x = np.zeros((len(some), len(at), probe.d), probe.dtype)
        x[np.arange(len(some)), :, some] = size[some]
        y = probe.ask(x, at) / size[some, :, None].astype(np.float64)
        reached[:, some] = (np.fmax.reduce(np.abs(y), axis=1) > _SEEN).T  # NaN is not looked at
    return reached


# ── Which features make a pair ───────────────────────────────────────────────────────────────────────────────────────


class Shape(NamedTuple):
    """Which features make a pair, as a Rope says it."""

    layout: str
    width: int
    start: int

    def features(self, d: int) -> tuple[Array, Array]:
        """The features of each pair as they are read and as they are written, two (p, 2)."""
        sides = pairs(self.layout, self.width, self.start)
        reads, writes = (np.stack([np.arange(d)[part] for part in side], axis=-1) for side in sides)
        return reads, writes

    def sources(self, d: int) -> Array:
        """Which features each output may be made from, bool (d, d)."""
        allowed, (reads, writes) = np.eye(d, dtype=bool), self.features(d)
        allowed[writes.ravel()] = False
        for j in (0, 1):
            allowed[writes[:, j, None], reads] = True
        return allowed


def shape_of(rope: Rope) -> Shape:
    return Shape(rope.layout, rope.width, rope.start)


def find_shape(reached: Array, first: Shape | None = None) -> Shape | None:
    """The first shape in which all outputs are made from features of their own pair; None if there is none."""
    d = len(reached)
    moved = reached != np.eye(d, dtype=bool)
    turns = np.flatnonzero((moved.any(axis=0) | moved.any(axis=1)) & (reached.any(axis=0) | reached.any(axis=1)))
    low, high = (int(turns.min()), int(turns.max()) + 1) if len(turns) else (0, d)
    width, rest = high - low + (high - low) % 2, d - low + (d - low) % 2
    spans = [(width, low), (high + high % 2, 0), (rest, d - rest), (d, 0)]
    shapes = [Shape(layout, *span) for span in spans for layout in LAYOUTS if span[1] >= 0 and sum(span) <= d]
    known = shapes if first is None else [first, *shapes]
    return next((shape for shape in known if not (reached & ~shape.sources(d)).any()), None)


# ── Description ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Description:
    """What was measured: p pairs with two outputs each; as many axes as positions have, 1 if they have none."""

    head_dim: int
    dtype: str
    shape: Shape
    at: Array  # (n,): positions
    own: Array  # (axes, n, p, 2): what each output has of its own feature, cos if it is right; 0 where it is no number
    other: Array  # (axes, n, p, 2): and of the other one, sin if it is right
    known: Array  # bool (axes, n, p, 2): where both are finite
    still: Array  # (axes, n, d − r): what features outside of the pairs are multiplied with
    scatter: float  # by how much what is read changes with the size of x: 0 if the candidate is linear
    theta: Array  # (axes, p, 2): frequencies, with the sign in which each output turns
    unsure: Array  # (axes, p, 2): how far off they may be
    straight: int  # the last position up to which all angles grow in proportion
    growth: Array | None  # (p,): the logarithm of what lengths are multiplied with from position to position, if so
    owner: Array  # (p,): which axis turns each pair, the one that does so the fastest
    direction: int  # that of most pairs; those beyond half a turn for a position do not tell
    measured: Measured  # the frequencies of the first outputs on that axis, positive if they turn as most do

    @cached_property
    def size(self) -> Array:
        return np.hypot(self.own, self.other)

    @property
    def start(self) -> Array:
        """The angle at position 0, (p, 2)."""
        return np.asarray(np.arctan2(self.other, self.own)[0, 0])

    @cached_property
    def factor(self) -> float:
        """What lengths are multiplied with; at position 0, if they grow."""
        some = slice(1) if self.growth is not None else slice(None)
        size = self.size[:, some][self.known[:, some]]
        return float(np.median(size)) if size.size else math.nan

    @property
    def uneven(self) -> float:
        """How far the lengths of outputs are from the factor, relative to it."""
        off = np.abs(self.size - self.factor)[self.known]
        return float(off.max(initial=0) / max(self.factor, 1e-30)) if math.isfinite(self.factor) else math.inf

    @property
    def skew(self) -> float:
        """How far the two outputs of a pair are from a rotation times a number, relative to their lengths."""
        length = np.maximum(1.0, self.size.max(axis=-1))
        off = [np.abs(np.diff(side)[..., 0]) / length for side in (self.own, self.other)]
        return float(np.max(off, initial=0)) if math.isfinite(self.factor) else math.inf

    @property
    def outside(self) -> Array:
        """Features outside of the pairs, (d − r,)."""
        return np.setdiff1d(np.arange(self.head_dim), self.shape.features(self.head_dim)[1])

    @property
    def rest(self) -> Array:
        """What each of these is multiplied with, (d − r,)."""
        return np.asarray(np.median(self.still, axis=(0, 1))) if self.still.size else np.ones(0)

    @cached_property
    def offsets(self) -> tuple[float, ...]:
        """By how many positions the pairs of each axis are ahead, the same for all if it can be: whole numbers, unless
        none explain them."""
        start, axes, unit = self.direction * self.start[:, 0], len(self.theta), UNIT[self.dtype]
        offset = offset_of(start, self.measured, unit)
        if axes == 1 or np.abs(wrapped(start - offset * self.measured.theta)).max() < 2e-5 + 16 * unit:
            return (offset,) * axes
        owns = [self.owner == axis for axis in range(axes)]
        return tuple(offset_of(start[own], self.measured.part(own), unit) for own in owns)

    @property
    def unexplained_start(self) -> float:
        """How far pairs are turned at position 0 beside what the offsets explain."""
        angle = np.array(self.offsets)[self.owner] * self.measured.theta
        return float(np.abs(wrapped(self.direction * self.start[:, 0] - angle)).max(initial=0.0))

    def predict(self, x: Array, positions: Array) -> Array:
        """What the measured description returns: x (…, n, d), positions (n,) or (axes, n) -> float64 like x."""
        x, (reads, writes) = np.asarray(x, np.float64), self.shape.features(self.head_dim)
        m = np.asarray(positions, np.float64).reshape(len(self.theta), -1)
        angle, size = self.start + np.einsum("an,apj->npj", m, self.theta), self.factor * np.ones((m.shape[1], 1))
        if self.growth is not None:
            size = size * np.exp(np.clip(m[0][:, None] * self.growth, -80, 80))
        y = x.copy()
        y[..., self.outside] = x[..., self.outside] * self.rest
        for j, sign in ((0, -1), (1, 1)):
            own, other = x[..., reads[:, j]], x[..., reads[:, 1 - j]]
            y[..., writes[:, j]] = size * (np.cos(angle[..., j]) * own + sign * np.sin(angle[..., j]) * other)
        return y

    def rules(self, suspects: tuple[Rope, ...] = (), narrow: str = "") -> list[Named]:
        """The rules that have these frequencies, which may be rounded to a narrow dtype; none where no layout has these
        pairs."""
        (layout, width, start), (theta, unsure) = self.shape, self.measured
        even = self.unexplained_start < 0.1 and not (np.abs(np.diff(self.theta)) > 0.01).any()
        if start not in (0, self.head_dim - width) or not even:
            return []
        if narrow:  # half of its last place, or of its smallest number; a quarter, since four times as much is allowed
            unsure = unsure + (2.0 ** -BITS[narrow] * np.abs(theta) + 2 * STEP[narrow]) / 4
        shape = Rope(self.head_dim, 10000.0, layout, width, PLACEMENTS[start > 0], direction=self.direction)
        if len(self.theta) == 1:
            same = tuple(rope for rope in suspects if self.shape == shape_of(rope))
            return guess_rope(Measured(theta, unsure), shape, same)
        dealings = (replace(shape, axes=axes) for axes in _dealings(self.owner, len(self.theta)))
        rules = (guess_rope(Measured(theta, unsure), rope) for rope in dealings)
        return next((rule for rule in rules if any(one.rope for one in rule)), [])

    def rows(self, rope: Rope | None = None) -> tuple[tuple[str, str, str], ...]:
        """What was measured beside what a rope has: name, expected, measured."""
        theta = self.measured.theta[self.measured.turning]
        width = f"{2 * len(theta)} of {self.head_dim} features"
        rows = {
            "pairs": self.shape.layout,
            "turning": width + (f", from {self.shape.start} on" if self.shape.start else ""),
            "direction": f"{self.direction:+d}",
            "frequencies": span(theta),
            "rule": next((rule.fact.partition(" (")[0] for rule in self.rules()), "no published rule"),
            "offset": ", ".join(f"{one:.6g}" for one in self.offsets),
            "factor": f"{self.factor:.6g}",
        }
        if len(self.theta) > 1:
            rows["axes"] = dealt(self.owner)
        if self.straight < self.at[-1]:
            rows["proportional"] = f"angles, up to position {self.straight} only"
        if self.uneven > 0.02 + 8 * UNIT[self.dtype]:
            rows["lengths"] = f"{self.size.min(initial=math.inf):.4g} to {self.size.max(initial=0):.4g}"
        expected = dict.fromkeys(rows, "") if rope is None else _expected_rows(rope)
        return tuple((name, expected[name], abbreviated(words)) for name, words in rows.items())


def dealt(owner: Any) -> str:
    """Which axis turns the pairs, in order."""
    runs = [(axis, len(list(run))) for axis, run in itertools.groupby(owner)]
    return ", ".join(f"{axis} × {count}" if count > 1 else str(axis) for axis, count in runs)


def _expected_rows(rope: Rope) -> dict[str, str]:
    theta, scaling = frequencies(rope), "" if rope.scaling is None else f", {abbreviated(repr(rope.scaling))}"
    width = f"{2 * int(np.count_nonzero(theta))} of {rope.head_dim} features"
    return {
        "pairs": rope.layout,
        "turning": width + (f", from {rope.start} on" if rope.start else ""),
        "direction": f"{rope.direction:+d}",
        "frequencies": span(theta[theta > 0]),
        "rule": f"base {rope.base:g}{scaling}",
        "offset": "0" if rope.axes is None else ", ".join("0" * rope.axes.count),
        "factor": f"{rope.attention_factor:.6g}",
        "axes": "" if rope.axes is None else dealt(axis for axis, _ in rope.axes.assign(rope.pairs)),
        "proportional": "all angles",
        "lengths": "all alike",
    }


def _describe(probe: Probe, shape: Shape) -> Description:
    """Reads what each output has of the two features of its pair, at the positions of the ladder."""
    at, unit = ladder(probe.top), UNIT[probe.dtype.name]
    drawn = [[_combs(probe, at, axis, shape, draw) for draw in (0, 2)] for axis in range(probe.axes or 1)]
    own, other, still = (np.stack([np.stack([two[k] for two in both]) for both in drawn]) for k in (0, 1, 2))
    known = (np.isfinite(own) & np.isfinite(other)).all(axis=1)
    own, other = (np.where(known[:, None], side, 0) for side in (own, other))
    scatter = float(max(np.abs(np.diff(side, axis=1)).max(initial=0) for side in (own, other)))
    own, other, still = (side.mean(axis=1) for side in (own, other, still))
    angles = zip(np.arctan2(other, own), known, strict=True)
    turned = [unwrap(angle, at, unit, unit == UNIT["float16"], seen) for angle, seen in angles]
    theta, unsure = (np.stack([axis[k] for axis in turned]) for k in (0, 1))
    owner, total = np.argmax(np.abs(theta).max(axis=-1), axis=0), theta.sum(axis=0)
    tells = (np.abs(total) < 1.5) & (np.abs(total) > 8 * unsure.max(axis=0))
    direction = -1 if (np.sign(np.where(tells, total, 0)).sum() or np.sign(total).sum()) < 0 else 1
    pair = owner, np.arange(theta.shape[1]), 0
    return Description(
        probe.d, probe.dtype.name, shape, at, own, other, known, still, scatter, theta, unsure,
        min(last for *_, last in turned), _growth(np.hypot(own, other)[0].mean(axis=-1), at) if known.all() else None,
        owner, direction, Measured(direction * theta[pair], unsure[pair]),
    )  # fmt: skip


def _growth(size: Array, at: Array) -> Array | None:
    """The rate at which lengths (n, p) grow from position to position, (p,), if they do so."""
    logs = np.nan_to_num(np.log(size) - np.log(size[0]), nan=-99.0, posinf=99.0, neginf=-99.0)
    if np.abs(logs).max(initial=0) < 0.05 or not size[0].all():
        return None
    seen = np.abs(logs) < 8  # beyond it the smallest numbers of a narrow dtype would show
    last = len(seen) - 1 - np.argmax(seen[::-1], axis=0)
    rate = logs[last, np.arange(size.shape[1])] / np.maximum(at[last], 1)
    straight = np.abs(logs - at[:, None] * rate) <= 0.03 + 0.01 * np.abs(logs)
    return np.asarray(rate) if (straight | ~seen).all() else None


def _combs(probe: Probe, at: Array, axis: int, shape: Shape, draw: int) -> tuple[Array, Array, Array]:
    """own and other, each (n, p, 2), and what the features outside of the pairs are multiplied with, (n, d − r)."""
    reads, writes = shape.features(probe.d)
    rest = np.setdiff1d(np.arange(probe.d), writes.ravel())
    given, got = [], []
    for j in (0, 1):  # the first features of all pairs and those outside, then the second features
        x = np.zeros((1, len(at), probe.d), probe.dtype)
        some = np.concatenate((reads[:, 0], rest)) if j == 0 else reads[:, 1]
        x[..., some] = probe.numbers(draw + j, 1, len(at), len(some))
        given.append(x[0].astype(np.float64))
        got.append(probe.ask(x, at, axis)[0])
    parts = [[got[k][:, writes[:, j]] / given[k][:, reads[:, k]] for k in (0, 1)] for j in (0, 1)]
    own, other = np.stack((parts[0][0], parts[1][1]), axis=-1), np.stack((-parts[0][1], parts[1][0]), axis=-1)
    return own, other, got[0][:, rest] / given[0][:, rest]


def unwrap(angle: Array, at: Array, unit: float, subnormal: bool, known: Any = True) -> tuple[Array, Array, int]:
    """Frequencies, how unsure they are, and the last position up to which all angles grow in proportion: from angles
    (n, …), as far as they are known, at positions that begin with 0 and about double at most; of each column as far as
    its own angles do."""
    known = np.broadcast_to(known, angle.shape)
    theta, unsure = np.zeros(angle.shape[1:]), np.full(angle.shape[1:], np.inf)
    alive, last = np.ones(angle.shape[1:], bool), int(at[0])
    for j in range(1, len(at)):
        m = int(at[j])
        rest = wrapped(angle[j] - angle[0] - theta * m)
        alive &= (np.abs(rest) < 0.35 + 4 * unit) | (j == 1) | ~known[j]
        last = m if alive.all() else last
        # Components are rounded relative to themselves, so that an angle is known best near the axes: but no better
        # than a 16th of that once it has left the first one, where angles may have roundings of their own.
        near = np.maximum(np.abs(np.sin(2 * angle[j])), np.minimum(1 / 16, np.abs(theta * m)))
        noise = (unit * (near + np.abs(np.sin(2 * angle[0]))) + 1e-15 + 2.0**-24 * subnormal) / m
        better = alive & known[j] & (noise <= unsure)
        theta, unsure = np.where(better, theta + rest / m, theta), np.where(better, noise, unsure)
    return theta, unsure + 2.0**-52 * np.abs(theta), last  # each is a float64


def offset_of(start: Array, measured: Measured, unit: float) -> float:
    """By how many positions the angles at position 0 are ahead: slow pairs first, which are unambiguous."""
    offset, theta = 0.0, measured.theta
    if not (np.abs(start) > 16 * unit + 1e-5).any():
        return offset
    for i in np.argsort(np.abs(theta)):
        if abs(theta[i]) > 1e-9 and (abs(start[i]) > 8 * unit or offset):
            turns = round((offset * theta[i] - start[i]) / (2 * math.pi))
            offset = float((start[i] + 2 * math.pi * turns) / theta[i])
    return float(round(offset)) if abs(offset - round(offset)) < 0.05 else offset


# ── identify ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _dealings(owner: Array, count: int) -> Iterable[Axes]:
    """The ways to say that these of so many axes turn the pairs, the simplest first."""
    p, sizes, owners = len(owner), np.bincount(owner, minlength=count).tolist(), owner.tolist()
    styles = [Axes(style, sizes) for style in ("sections", "interleaved")] if count > 1 else []
    styles = [axes for axes in styles if [axis for axis, _ in axes.assign(p)] == owners]
    if p > 1 and count > 1 and {*owners} == {*range(count)}:
        styles.append(Axes("listed", owners))
    yield from styles[:1]
    if count == 2 and owners == sorted(owners) and sizes[0] == sizes[1]:
        yield from (Axes("axial"), Axes("pixtral"))
    yield from (replace(axes, series="own") for axes in styles[:1])


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
    readings: Description | None = field(default=None, repr=False, compare=False)  # what its page draws
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
            rows += [("axes", f"{len(set(self.axes))}, of the pairs in order: {dealt(self.axes)}")]
            rows += [("as", repr(self.rope.axes))] if self.rope is not None and self.rope.axes is not None else []
        rows += [("factor", f"{self.attention_factor:.6g}")] if theta or self.multiple else []
        rows += [("rule" if i == 0 else "or", words) for i, words in enumerate(self.explanations)]
        rows += [("precision", self.precision)]
        rows += [("also", words) for words in self.behaviour] + [("note", words) for words in self.notes]
        return [(name, abbreviated(words)) for name, words in rows]

    def __str__(self) -> str:
        lines, width = [f"rotation of {self.head_dim} features, {self.dtype}"], 12
        for name, words in self.rows():
            lines += textwrap.wrap(words, 79, initial_indent=f"  {name:<{width}}", subsequent_indent=" " * (width + 2))
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        """A page, as a part of a notebook."""
        from . import page

        return str(page.fragment(page.identification_section(self)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN and no infinity: these become None."""
        plain = finite(asdict(replace(self, rope=None, readings=None)))
        del plain["readings"]
        return {**plain, "rope": None if self.rope is None else repr(self.rope)}


@np.errstate(all="ignore")  # whatever the candidate returns
def identify(
    fn: Callable[..., Any], head_dim: int, *, dtype: Any = None, max_position: int | None = None,
    suspects: Iterable[Rope] = (), axes: int | None = None, framework: str | None = None,
) -> Identification:  # fmt: skip
    """What rotation a black box fn(x, positions) -> rotated x performs, without being told.

    >>> import pyrope
    >>> rope = Rope(64, 500000.0, "half", rotary_dim=32)
    >>> print(identify(lambda x, positions: pyrope.rotate(x, positions, rope), 64))
    rotation of 64 features, float32
      turns       32 of 64 features, prefix, half
      direction   +1
      offset      0 positions
      frequencies 1 … 4.54167042e-06, the last ±4.2e-13
      factor      1
      rule        base 500000, not rescaled (NTK scaling of a smaller base, at a
                  fixed length, is the same)
      precision   tables or products in x's dtype

    ``dtype`` is that of x, float32 if it is not given; ``max_position`` the largest that the candidate can take
    (131071). LongRoPE's lists would fit any frequencies: it is named only if it is one of the ``suspects``. With
    ``axes``, the candidate takes positions (axes, n), and which of them turns each pair is read too. ``framework``,
    such as "torch", says whose arrays it takes.
    """
    axes = None if axes is None else checks.integer("axes", axes, 1, 64)
    head_dim = checks.integer("head_dim", head_dim, 1, WIDEST)
    top = MAX_POSITION if max_position is None else checks.integer("max_position", max_position, 1, checks.MAX_POSITION)
    if not isinstance(suspects, Iterable):
        raise TypeError(f"suspects must be a list of ropes, was {type(suspects).__name__}")
    ropes = tuple(check_rope(rope) for rope in suspects)
    if framework is not None:
        from . import adapters

        fn = adapters.framework(fn, framework)
    probe = Probe(Candidate(fn), head_dim, float_dtype(np.float32 if dtype is None else dtype), top, axes)
    try:
        found, reached = read(probe.candidate, head_dim, probe.dtype, top, axes)
        probe.candidate.look_again()
        return _unpaired(probe, reached) if found is None else _identified(probe, found, ropes)
    except Unreadable as error:
        raise ValueError(f"the candidate cannot be read: {error}") from error


def _unpaired(probe: Probe, reached: Array) -> Identification:
    """Of a candidate whose outputs are made from more than pairs."""
    f = int(np.argmax(reached.sum(axis=1)))
    note = f"no layout has these pairs: output {f} is made from {listed(np.flatnonzero(reached[f]), 'feature')}"
    return Identification(
        probe.d, probe.dtype.name, "none", 0, "prefix", (), 1, (), (), 0.0, math.nan, (), None, UNGRADED,
        probe.candidate.watched(), (note,),
    )  # fmt: skip


def _identified(probe: Probe, found: Description, suspects: tuple[Rope, ...]) -> Identification:
    measured, unit, offsets = found.measured, UNIT[found.dtype], found.offsets
    turning = measured.turning & found.known[0].any(axis=(0, 2))
    exact = bool(found.skew <= 32 * unit and turning.any())
    rules = found.rules(suspects) if exact else []
    narrow = narrow_dtype(measured) if exact and not rules else ""
    rules = found.rules(suspects, narrow) if narrow else rules
    rope = next((_with_factor(rule.rope, found.factor, unit) for rule in rules if rule.rope is not None), None)
    precision = f"low-precision angle: all frequencies are {narrow} numbers" if narrow else _grade(probe, found, rope)
    legible = turning if found.skew <= 0.1 else turning & False
    reads, _ = found.shape.features(probe.d)
    return Identification(
        head_dim=probe.d,
        dtype=found.dtype,
        layout=found.shape.layout if turning.any() else "none",
        rotary_dim=2 * int(turning.sum()),
        placement=PLACEMENTS[found.shape.start > 0],
        pairs=tuple((int(a), int(b)) for a, b in reads[turning]),
        direction=found.direction,
        frequencies=tuple(measured.theta[legible].tolist()),
        uncertainty=tuple(measured.unsure[legible].tolist()),
        offset=offsets[0],
        attention_factor=found.factor * (1 if turning.any() or found.own.sum() >= 0 else -1),
        explanations=tuple(rule.fact for rule in rules) or (NO_RULE,) * bool(legible.any()),
        rope=rope,
        precision=precision,
        behaviour=probe.candidate.watched(),
        notes=_notes(found),
        multiple=not turning.any() and found.uneven < 4 * unit,
        axes=None if probe.axes is None else tuple(found.owner[turning].tolist()),
        readings=found,
        offsets=offsets if len(set(offsets)) > 1 else (),
    )


def _with_factor(rope: Rope, factor: float, unit: float) -> Rope:
    """The rope, with the attention factor that was measured if YaRN's own is another."""
    if abs(rope.attention_factor / factor - 1) <= unit + 1e-5 or not isinstance(rope.scaling, YaRN):
        return rope
    return replace(rope, scaling=replace(rope.scaling, attention_factor=rounded(factor, unit / 4)))


def _notes(found: Description) -> tuple[str, ...]:
    """What the other fields do not say."""
    notes, unit, turning = [], UNIT[found.dtype], found.measured.turning
    if found.skew > 32 * unit:
        notes.append(f"no rotation: within the pairs R is off by {found.skew:.2g} from a rotation times a number")
    if found.scatter > 0.01 + 8 * unit:
        notes.append(f"not linear: what is read of it changes by {found.scatter:.2g} with the size of x")
    if not found.known.all():
        notes.append(f"NaN or infinity comes out at position {found.at[np.argmin(found.known.all(axis=(0, 2, 3)))]}")
    if found.straight < found.at[-1] and turning.any():
        notes.append(f"phases are proportional to the position up to {found.straight} only")
    if (growth := found.growth) is not None:
        rates = f"at rates from {growth.min():.3g} to {growth.max():.3g} of themselves"
        notes.append(f"pairs grow or shrink with the position, {rates}: xPos, or the like; the factor is at position 0")
    if found.unexplained_start > 0.1 and turning.any():
        more = f"{found.unexplained_start:.4g} more than any offset explains"
        notes.append(f"at position 0 pairs are turned by up to {more}")
    still = np.setdiff1d(np.arange(found.head_dim), found.shape.features(found.head_dim)[0][turning])
    # If it is the last pairs that stay, the rotation is proportional.
    if 0 < len(still) < found.head_dim // 2 and not turning[: turning.sum()].all():
        notes.append(f"{listed(still, 'feature')} do not turn")
    return tuple(notes)


def _grade(probe: Probe, found: Description, rope: Rope | None) -> str:
    """The best grade that holds for dense vectors at positions of every size, if all numbers of the rope are known."""
    offset, factor = found.offsets[0], getattr(rope and rope.scaling, "factor", 1.0)
    known = len({*found.offsets}) == 1 and offset == round(offset) and factor == float(f"{factor:.10g}")
    if rope is None or not known or rope.base != float(f"{rope.base:.8g}"):
        return UNGRADED
    rng = np.random.default_rng(2)
    at = np.unique(np.concatenate((ladder(probe.top), rng.integers(0, probe.top, 64, endpoint=True))))
    x = rng.standard_normal((2, len(at), probe.d)).astype(probe.dtype)
    y = probe.ask(x, at)
    acts = round(offset) + (at if probe.axes is None else np.stack([at // (j + 1) for j in range(probe.axes)]))
    expected = Expected(Tables(rope, acts), x.astype(np.float64), acts, probe.dtype.name)
    grades = (grade for grade in APPLICABLE[probe.dtype.name] if (expected.ratio(grade, y) <= 1).all())
    return next(grades, "worse than a float32 angle, or the last digits of a number are others")
