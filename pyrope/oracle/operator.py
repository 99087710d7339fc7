"""R(m) read with unit vectors, its description, and `identify`: what a black box does, without being told.

A rotation is linear in x, so that unit vectors return R(m), column by column. They are multiplied by random numbers,
which are divided out again, as ones would hide what depends on values. An output has something of its own feature of a
pair and something of the other one; as a complex number own + i·other is a·e^{imθ}: its angle, at positions that double
at most, gives θ ever more exactly.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..backend import Array
from ..definition import pairs
from ..theta import LAYOUTS, PLACEMENTS, Axes, Rope, YaRN, check_rope
from .calls import FARTHEST
from .candidate import UNIT, Candidate, Unreadable
from .frequencies import SERIES, MeasuredTheta, Named, guess_rope, listed, narrow_dtype, rounded, span
from .positions import acts_at, wrapped
from .report import abbreviated, finite, printable
from .tolerance import APPLICABLE, ExactTables, Expected, float_dtype

WIDEST = 1024  # features: R(m) is read column by column
_CALLS = 256  # in which unit vectors are handed over, at most
SIGNS = np.array([-1, 1])  # of the sine in the two outputs of a pair
_SEEN = 1e-9  # what an output has of a feature, if it is made from it
NO_RULE = "none of these: no published rule, with the limits that it usually has, makes these frequencies"
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


@np.errstate(all="ignore")
def read(probe: Probe, first: Shape | None = None) -> tuple[Description | None, Array]:
    """The description of a candidate, if its outputs are made from the pairs of a layout; and which features each of
    them is made from, bool (d, d). Pairs as in ``first`` are preferred. Raises `Unreadable`."""
    if probe.d > WIDEST:
        raise Unreadable(f"has {probe.d} features: at most {WIDEST} are read, one by one", "", "shape")
    at = ladder(probe.top)
    r = np.stack([_operators(probe, at, axis) for axis in range(probe.axes or 1)])
    reached = np.fmax.reduce(np.abs(r), axis=(0, 1)) > _SEEN  # NaN is not looked at
    shape = find_shape(reached, first)
    return (None if shape is None else _describe(probe, at, shape, r)), reached


def _operators(probe: Probe, at: Array, axis: int) -> Array:
    """R at these positions of one axis, (n, d, d): output and input."""
    d, step, columns = probe.d, -(-probe.d // _CALLS), np.empty((probe.d, len(at), probe.d))
    for j in range(0, d, step):
        some = np.arange(j, min(j + step, d))
        size, x = probe.numbers(j, len(some), len(at)), np.zeros((len(some), len(at), d), probe.dtype)
        x[np.arange(len(some)), :, some] = size
        columns[some] = probe.ask(x, at, axis) / size[..., None].astype(np.float64)
    return columns.transpose(1, 2, 0)


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
    spans = [(width, low), (high + high % 2, 0), (rest, d - rest), (d - d % 2, 0)]
    spans = [span for span in spans if span[0] and span[1] >= 0 and sum(span) <= d]
    shapes = [Shape(layout, *span) for span in spans for layout in LAYOUTS]
    known = shapes if first is None else [first, *shapes]
    return next((shape for shape in known if not (reached & ~shape.sources(d)).any()), None)


# ── Description ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Side(NamedTuple):
    """One property of a rotation, expected and measured, in words."""

    name: str
    expected: str
    measured: str
    same: bool


@dataclass(frozen=True, eq=False)
class Description:
    """What was measured: p pairs with two outputs each; as many axes as positions have, 1 if they have none."""

    head_dim: int
    dtype: str
    shape: Shape
    at: Array  # (n,): positions
    r: Array  # (axes, n, d, d): R(m), output and input
    z: Array  # complex (axes, n, p, 2): what each output has of its own feature, and i times of the other: e^{imθ}
    known: Array  # bool (axes, n, p, 2): where both are finite; they are 0 elsewhere
    theta: Array  # (axes, p, 2): frequencies, with the sign in which each output turns
    unsure: Array  # (axes, p, 2): how far off they may be
    straight: int  # the last position up to which all angles grow in proportion
    owner: Array  # (p,): which axis turns each pair, the one that does so the fastest
    direction: int  # that of most pairs; those beyond half a turn for a position do not tell
    measured: MeasuredTheta  # (p,): the frequencies of the first outputs on the axis that turns them
    start: Array  # (p, 2): the angle at position 0
    offsets: tuple[float, ...]  # (axes,): by how many positions pairs are ahead
    unexplained_start: float  # how far pairs are turned at position 0 beside what the offsets explain
    size: Array  # (axes, n, p, 2): |z|
    factor: float  # what most lengths are multiplied with
    uneven: float  # how far lengths are from the factor, relative to it
    skew: float  # how far the outputs of a pair are from a rotation times a number, relative to their lengths
    outside: Array  # (d − r,): features outside of the pairs
    still: Array  # (axes, n, d − r): what these are multiplied with
    rest: Array  # (d − r,): the same at most positions

    @property
    def unit(self) -> float:
        return UNIT[self.dtype]

    @property
    def dealing(self) -> list[str]:
        """Which axes turn each pair, in words."""
        turns = (np.abs(self.theta) > 8 * self.unsure).any(axis=-1)  # (axes, p)
        each = zip(turns.T, self.owner, strict=True)
        return ["+".join(map(str, np.flatnonzero(some) if some.any() else [own])) for some, own in each]

    def predict(self, x: Array, positions: Array) -> Array:
        """What the measured description returns: x (…, n, d), positions (axes, n) -> float64 like x."""
        x, (reads, writes), m = np.asarray(x, np.float64), self.shape.features(self.head_dim), positions.astype(float)
        z = np.median(self.size, axis=(0, 1)) * np.exp(1j * (self.start + np.einsum("an,apj->npj", m, self.theta)))
        y = x.copy()
        y[..., self.outside] = x[..., self.outside] * self.rest
        y[..., writes] = z.real * x[..., reads] + SIGNS * z.imag * x[..., reads[:, ::-1]]
        return y

    def rules(self, suspects: tuple[Rope, ...] = ()) -> list[Named]:
        """The rules that have these frequencies; none where no layout has these pairs."""
        (layout, width, start), axes = self.shape, len(self.theta)
        even = self.unexplained_start < 0.1 and not (np.abs(np.diff(self.theta)) > 0.01).any()
        several = any("+" in axes for axes in self.dealing)
        if start not in (0, self.head_dim - width) or self.head_dim % 2 or not even or several:
            return []
        shape = Rope(self.head_dim, 10000.0, layout, width, PLACEMENTS[start > 0], direction=self.direction)
        if axes == 1:
            return guess_rope(self.measured, shape, [rope for rope in suspects if self.shape == shape_of(rope)])
        rules = (guess_rope(self.measured, rope) for rope in _dealings(shape, self.owner, axes))
        return next((rule for rule in rules if any(one.rope for one in rule)), [])

    def sides(self, rope: Rope | None = None) -> tuple[Side, ...]:
        """Every property beside that of a rope, where there is something to say."""
        said = in_words(self) | noted(self)
        said["rule"] = next((one.fact.partition(" (")[0] for one in self.rules()), "no published rule")
        due = {} if rope is None else in_words(self._exactly(rope))
        if rope is not None:
            scaling = "" if rope.scaling is None else f", {abbreviated(repr(rope.scaling))}"
            due |= {"rule": f"base {rope.base:g}{scaling}", "proportional": "all angles", "lengths": "all alike"}
        rows = ((name, due.get(name, ""), words) for name, words in said.items() if words)
        return tuple(Side(name, want, abbreviated(words), want == words) for name, want, words in rows)

    def _exactly(self, rope: Rope) -> Description:
        """The same of the rotation that a rope means."""
        tables = ExactTables(rope, self.at)

        def fn(x: Array, positions: Array) -> Array:
            return Expected(tables, x, positions.reshape(-1, x.shape[-2]), self.dtype).y

        axes = None if rope.axes is None else rope.axes.count
        found, _ = read(Probe(Candidate(fn), self.head_dim, float_dtype(self.dtype), int(self.at[-1]), axes))
        assert found is not None
        return found


def dealt(owner: Any) -> str:
    """Which axis turns the pairs, in order."""
    runs = [(axis, len(list(run))) for axis, run in itertools.groupby(owner)]
    return ", ".join(f"{axis} × {count}" if count > 1 else str(axis) for axis, count in runs)


def in_words(found: Description) -> dict[str, str]:
    """The properties of every rotation but its rule."""
    f, (theta, unsure) = found, found.measured.part(found.measured.turning)
    return {
        "pairs": f.shape.layout,
        "turning": f"{2 * len(theta)} of {f.head_dim} features" + f", from {f.shape.start} on" * bool(f.shape.start),
        "direction": f"{f.direction:+d}",
        "frequencies": span(theta) + (f" ±{unsure[-1]:.1e}" if len(theta) else ""),
        "offset": ", ".join(f"{one:.6g}" for one in f.offsets),
        "factor": f"{f.factor:.6g}",
        "axes": dealt(f.dealing) if len(f.theta) > 1 else "",
    }


def noted(found: Description) -> dict[str, str]:
    """What those do not say, or "" where there is nothing to say."""
    f, unit, turned = found, found.unit, found.unexplained_start
    lost, at_0 = f.at[np.argmin(f.known.all(axis=(0, 2, 3)))], turned > 0.1 and bool(f.measured.turning.any())
    return {
        "proportional": f"angles, up to position {f.straight} only" * bool(f.straight < f.at[-1]),
        "lengths": f"{f.size.min():.4g} to {f.size.max():.4g}" * (f.uneven > 0.02 + 8 * unit),
        "no rotation": f"within the pairs R is off by {f.skew:.2g} from one times a number" * (f.skew > 32 * unit),
        "not finite": f"NaN or infinity comes out at position {lost}" * (not f.known.all()),
        "position 0": f"pairs are turned by up to {turned:.4g} more than any offset explains" * at_0,
    }


def _describe(probe: Probe, at: Array, shape: Shape, r: Array) -> Description:
    """What each output has of the two features of its pair, at the positions of the ladder."""
    d, unit, (reads, writes) = probe.d, UNIT[probe.dtype.name], shape.features(probe.d)
    known = np.isfinite(z := r[..., writes, reads] + SIGNS * 1j * r[..., writes, reads[:, ::-1]])
    z = np.where(known, z, 0)
    turned = [unwrap(np.angle(of), at, unit, unit == UNIT["float16"], seen) for of, seen in zip(z, known, strict=True)]
    theta, unsure = (np.stack([axis[k] for axis in turned]) for k in (0, 1))
    owner, total = np.argmax(np.abs(theta).max(axis=-1), axis=0), theta.sum(axis=0)
    tells = (np.abs(total) < 1.5) & (np.abs(total) > 8 * unsure.max(axis=0))
    direction = -1 if (np.sign(np.where(tells, total, 0)).sum() or np.sign(total).sum()) < 0 else 1
    first = owner, np.arange(len(owner)), 0
    measured, start, size = MeasuredTheta(direction * theta[first], unsure[first]), np.angle(z[0, 0]), np.abs(z)
    offsets = _offsets(direction * start[:, 0], measured, owner, len(theta), unit)
    beside = np.abs(wrapped(direction * start[:, 0] - np.array(offsets)[owner] * measured.theta))
    factor = float(np.median(size[known])) if known.any() else math.nan
    uneven = float(np.abs(size - factor)[known].max(initial=0) / max(factor, 1e-30)) if known.any() else math.inf
    skew = float((np.abs(z[..., 1] - z[..., 0]) / np.maximum(1.0, size.max(axis=-1))).max(initial=0))
    outside = np.setdiff1d(np.arange(d), writes)
    each = r.diagonal(0, -2, -1)
    return Description(
        d, probe.dtype.name, shape, at, r, z, known, theta, unsure, min(last for *_, last in turned), owner, direction,
        measured, start, offsets, float(beside.max(initial=0)), size, factor, uneven, skew if known.any() else math.inf,
        outside, each[..., outside], np.median(each, axis=(0, 1))[outside],
    )  # fmt: skip


def _offsets(start: Array, measured: MeasuredTheta, owner: Array, axes: int, unit: float) -> tuple[float, ...]:
    """By how many positions the pairs of each axis are ahead: whole numbers, unless none explain the angles (p,) at
    position 0."""

    def ahead(some: Array) -> float:
        m = float(acts_at(np.exp(1j * start[None, some]), measured.theta[some], 0.0)[0][0])
        return float(round(m)) if abs(m - round(m)) < 0.05 else m

    if np.abs(start).max(initial=0) <= 16 * unit + 1e-5:
        return (0.0,) * axes
    return tuple(ahead(measured.turning & (owner == axis)) for axis in range(axes))


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


# ── identify ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _dealings(shape: Rope, owner: Array, count: int) -> Iterator[Rope]:
    """The ropes in which these of so many axes turn the pairs, (p,), the simplest first."""
    owners = owner.tolist()
    whole = owners == sorted(owners)
    dealt = ("sections", np.bincount(owner, minlength=count).tolist()) if whole else ("listed", owners)
    for style, numbers, series in (*((*dealt, series) for series in SERIES), ("pixtral", (), "shared")):
        with suppress(ValueError):  # an axis that turns no pair, or an odd number of pairs
            axes = Axes(style, numbers, series)
            if axes.count == count and [axis for axis, _ in axes.assign(len(owners))] == owners:
                yield replace(shape, axes=axes)


@dataclass(frozen=True)
class Identification:
    """What a black box does, as far as its outputs tell."""

    head_dim: int
    dtype: str
    behaviour: tuple[str, ...]  # what it does beside rotating
    notes: tuple[str, ...]
    precision: str = UNGRADED
    layout: str = "none"  # a layout of Rope, if pairs turn
    rotary_dim: int = 0
    placement: str = "prefix"
    pairs: tuple[tuple[int, int], ...] = ()  # features read together, in order
    direction: int = 1
    frequencies: tuple[float, ...] = ()  # none where the pairs do not turn
    uncertainty: tuple[float, ...] = ()
    offset: float = 0.0  # of the first axis
    attention_factor: float = math.nan
    explanations: tuple[str, ...] = ()  # of the frequencies; several where they cannot be told apart
    rope: Rope | None = None  # if one explains them
    axes: tuple[int, ...] | None = None  # which axis of the positions turns each pair, if they have several
    readings: Description | None = field(default=None, repr=False, compare=False)  # what its page draws

    def rows(self) -> list[tuple[str, str]]:
        """What was read, by name, in words."""
        if self.readings is None:
            rows = []
        elif not self.rotary_dim:
            rows = [("turning", "no pair, in proportion to positions"), ("factor", f"{self.attention_factor:.6g}")]
        else:
            rows = [(name, words) for name, words in in_words(self.readings).items() if words]
        rows += [("as", repr(self.rope.axes))] if self.rope is not None and self.rope.axes is not None else []
        rows += [("rule" if i == 0 else "or", words) for i, words in enumerate(self.explanations)]
        rows += [("precision", self.precision)] if self.frequencies else []
        rows += [("also", words) for words in self.behaviour] + [("note", words) for words in self.notes]
        return [(name, abbreviated(words)) for name, words in rows]

    def __str__(self) -> str:
        lines = [f"rotation of {self.head_dim} features, {self.dtype}"]
        for name, words in self.rows():
            lines += textwrap.wrap(words, 79, initial_indent=f"  {name:<13}", subsequent_indent=" " * 15)
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
      pairs        half
      turning      32 of 64 features
      direction    +1
      frequencies  1 … 4.541671e-06 ±4.2e-13
      offset       0
      factor       1
      rule         base 500000, not rescaled (NTK scaling of a smaller base, at a
                   fixed length, is the same)
      precision    tables or products in x's dtype

    ``dtype`` is that of x, float32 if it is not given; ``max_position`` the largest that the candidate can take
    (131071). LongRoPE's lists would fit any frequencies: it is named only if it is one of the ``suspects``. With
    ``axes``, the candidate takes positions (axes, n), and which of them turns each pair is read too. ``framework``,
    such as "torch", says whose arrays it takes.
    """
    axes = None if axes is None else checks.integer("axes", axes, 1, 64)
    head_dim = checks.integer("head_dim", head_dim, 2, WIDEST)
    top = FARTHEST if max_position is None else checks.integer("max_position", max_position, 1, checks.MAX_POSITION)
    if not isinstance(suspects, Iterable):
        raise TypeError(f"suspects must be a list of ropes, was {type(suspects).__name__}")
    ropes = tuple(check_rope(rope) for rope in suspects)
    if framework is not None:
        from . import adapters

        fn = adapters.framework(fn, framework)
    probe = Probe(Candidate(fn), head_dim, float_dtype(np.float32 if dtype is None else dtype), top, axes)
    try:
        found, reached = read(probe)
        note = not_linear(probe)
        probe.candidate.look_again()
        if found is not None and not note:
            return _identified(probe, found, ropes)
        f = int(np.argmax(reached.sum(axis=1)))
        made = listed(np.flatnonzero(reached[f]), "feature")
        note = note or f"no layout has these pairs: output {f} is made from {made}"
        return Identification(probe.d, probe.dtype.name, probe.candidate.watched(), (note,))
    except Unreadable as error:
        raise ValueError(f"the candidate cannot be read: {error}") from error


def not_linear(probe: Probe) -> str:
    """In words, if R(m) does not tell what becomes of x, as it is another for other numbers, or for every call."""
    at, rng = ladder(probe.top), np.random.default_rng(4)
    a, b = ((rng.integers(-7, 8, (2, len(at), probe.d)) / 4).astype(probe.dtype) for _ in "ab")  # sums are exact
    whole, one, other, zero = (probe.ask(x, at) for x in (a + b, a, b, 0 * a))
    off, added = (np.nanmax(np.abs(some), initial=0) for some in (whole - one - other, zero))
    if off > (0.02 + 16 * UNIT[probe.dtype.name]) * np.nanmax(np.abs(whole), initial=0):
        return f"not linear in x, or not the same twice: f(a + b) and f(a) + f(b) differ by up to {off:.2g}"
    return f"f(0) is not 0 but up to {added:.4g}: something is added" if added > 0 else ""


def _identified(probe: Probe, found: Description, suspects: tuple[Rope, ...]) -> Identification:
    measured, unit = found.measured, found.unit
    turning = measured.turning & found.known[0].any(axis=(0, 2))
    exact = bool(found.skew <= 32 * unit and turning.any())
    rules = found.rules(suspects) if exact else []
    narrow = narrow_dtype(measured) if exact and not rules else ""
    rope = next((rule.rope for rule in rules if rule.rope is not None), None)
    scaling, known = getattr(rope, "scaling", None), rounded(found.factor, unit / 4)
    if rope is not None and isinstance(scaling, YaRN) and abs(rope.attention_factor / found.factor - 1) > unit + 1e-5:
        rope = replace(rope, scaling=replace(scaling, attention_factor=known))
    legible = turning if found.skew <= 0.1 else turning & False
    return Identification(
        probe.d, found.dtype, probe.candidate.watched(),
        tuple(f"{name}: {words}" for name, words in noted(found).items() if words),
        precision=f"all frequencies are {narrow} numbers" if narrow else _grade(probe, found, rope),
        layout=found.shape.layout if turning.any() else "none",
        rotary_dim=2 * int(turning.sum()),
        placement=PLACEMENTS[found.shape.start > 0],
        pairs=tuple((int(a), int(b)) for a, b in found.shape.features(probe.d)[0][turning]),
        direction=found.direction,
        frequencies=tuple(measured.theta[legible].tolist()),
        uncertainty=tuple(measured.unsure[legible].tolist()),
        offset=found.offsets[0],
        attention_factor=found.factor * (1 if turning.any() or found.z.real.sum() >= 0 else -1),
        explanations=tuple(rule.fact for rule in rules) or (NO_RULE,) * bool(legible.any()),
        rope=rope,
        axes=None if probe.axes is None else tuple(found.owner[turning].tolist()),
        readings=found,
    )  # fmt: skip


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
    acts = round(offset) + np.stack([at // (j + 1) for j in range(probe.axes or 1)])
    expected = Expected(ExactTables(rope, acts), x.astype(np.float64), acts, probe.dtype.name)
    grades = (grade for grade in APPLICABLE[probe.dtype.name] if (expected.ratio(grade, y) <= 1).all())
    return next(grades, "worse than a float32 angle, or the last digits of a number are others")
