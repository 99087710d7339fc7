"""`identify`: from the operator R(m) of a black box to its pairs, direction, width, frequencies, offset, factor, rule.

Nothing is expected beforehand. Two unit vectors that reach the same two outputs make a pair; the pair's phase over
positions that double each time gives its frequency, ever more exactly; and the frequencies are compared with every
published rule. What cannot be told apart from outputs is said to be so.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..phase import cos_sin
from ..theta import Linear, Llama3, Proportional, Rope, YaRN, check_rope, frequencies
from .probe import Candidate, Float64, Int64, Probe, Unreadable, along_axes, probe_positions
from .recipes import Rounding, as_is, features, recipe_of, to_bfloat16, to_float16
from .report import finite
from .tensors import UNIT
from .tolerance import ANGLE32, LOW_ANGLE, U32, bound, grades, pair_errors

COMMON_BASES = (10000.0, 500000.0, 1e6, 150000.0, 1e5, 25000.0, 5e6, 1e7)
_TWO_PI = 2 * np.pi


class Pairs(NamedTuple):
    """Which features turn together, as seen in R(m)."""

    reads: Int64  # (k, 2)
    writes: Int64  # (k, 2)
    odd: int  # features that belong to no pair and do not stay either
    skew: float  # how far R is from a rotation times a number within the pairs


class Measured(NamedTuple):
    """What the operator shows without any expectation."""

    pairs: Pairs
    theta: Float64  # (k,), positive unless a pair turns against the others
    uncertainty: Float64  # (k,)
    direction: int
    offset: float
    start: float  # how far phases at position 0 are from what the offset explains
    factor: float
    linear_up_to: int  # the last position up to which phases grow in proportion
    unit: float  # unit roundoff of what was measured


def find_pairs(operator: Float64) -> Pairs:
    """The pairs of an operator (n, d, d): columns that reach the same two rows."""
    support = np.nan_to_num(np.abs(operator)).max(axis=0) > 1e-9
    rows = [tuple(np.flatnonzero(column).tolist()) for column in support.T]
    reads, writes, odd = [], [], 0
    for a, reached in enumerate(rows):
        if len(reached) == 2:
            partners = [b for b, other in enumerate(rows) if other == reached]
            if len(partners) == 2 and partners[0] == a:
                reads.append(partners)
                writes.append(list(reached))
            odd += len(partners) != 2
        elif reached != (a,):
            odd += 1
    found = np.array(reads, np.int64).reshape(-1, 2), np.array(writes, np.int64).reshape(-1, 2)
    (aa, ab), (ba, bb) = _blocks(operator, *found)
    skew = np.nanmax(np.abs(np.stack((aa - bb, ab + ba))), initial=0.0)
    return Pairs(*found, odd, float(skew))


def _blocks(operator: Float64, reads: Int64, writes: Int64) -> Any:
    """The 2×2 block of each pair: [to][from] -> (n, k)."""
    return [[operator[:, writes[:, to], reads[:, source]] for source in (0, 1)] for to in (0, 1)]


def _turns(operator: Float64, pairs: Pairs) -> Any:
    """What each pair is multiplied with, as a complex number: (n, k)."""
    (aa, ab), (ba, bb) = _blocks(operator, pairs.reads, pairs.writes)
    return (aa + bb) / 2 + 1j * (ba - ab) / 2


def phases(operator: Float64, pairs: Pairs) -> Float64:
    """How far each pair is turned, (n, k)."""
    return np.asarray(np.angle(np.nan_to_num(_turns(operator, pairs))))


def measure(operator: Float64, positions: Int64, unit: float, step: float = 0.0) -> Measured:
    """Pairs, frequencies, offset and factor from R(m) at positions that begin with 0 and at most double."""
    pairs = find_pairs(operator)
    z, phase = _turns(operator, pairs), phases(operator, pairs)
    theta, uncertainty, limit = _unwrap(phase, positions, unit, step)
    direction = -1 if np.sum(np.sign(theta)) < 0 else 1
    size, rows = np.abs(z), positions <= max(limit, 1)
    mixed = rows[:, None] & (
        np.abs(np.sin(2 * phase)) > 0.5
    )  # elsewhere one and the same rounding comes again and again
    chosen = size[mixed] if mixed.sum() > 16 else size[rows]
    if not chosen.size:  # nothing turns
        chosen = operator.diagonal(axis1=1, axis2=2)
    factor = float(np.nanmedian(chosen)) if np.isfinite(chosen).any() else math.nan
    offset = _offset(direction * phase[0], direction * theta, unit)
    start = float(np.abs(_wrapped(direction * phase[0] - offset * direction * theta)).max(initial=0.0))
    return Measured(pairs, direction * theta, uncertainty, direction, offset, start, factor, limit, unit)


def _unwrap(phase: Float64, positions: Int64, unit: float, step: float) -> tuple[Float64, Float64, int]:
    """Frequencies (k,) with their uncertainty, and the last position up to which phases are proportional to it."""
    theta, limit = np.zeros(phase.shape[1]), int(positions[0])
    uncertainty = np.full(phase.shape[1], np.inf)
    for j in range(1, len(positions)):
        m = int(positions[j])
        rest = _wrapped(phase[j] - phase[0] - theta * m)
        if j > 1 and (np.abs(rest) > 0.3 + 4 * unit).any():
            break
        # Components are rounded relative to themselves, so that a phase is known best near the axes: but no better than
        # a 16th of that once it has left the first one, where angles may have roundings of their own.
        known = np.maximum(np.abs(np.sin(2 * phase[j])), np.minimum(1 / 16, np.abs(theta * m)))
        noise = unit * (known + np.abs(np.sin(2 * phase[0]))) + 2 * step + 1e-15
        better = noise / m <= uncertainty
        theta = np.where(better, theta + rest / m, theta)
        uncertainty = np.where(better, noise / m, uncertainty)
        limit = m
    return theta, uncertainty, limit


def _wrapped(angle: Any) -> Any:
    return angle - _TWO_PI * np.rint(angle / _TWO_PI)


def _offset(phase: Float64, theta: Float64, unit: float) -> float:
    """By how many positions the phases at position 0 are ahead: slow pairs first, which are unambiguous."""
    if not (np.abs(phase) > 8 * unit).any():
        return 0.0
    offset = 0.0
    for i in np.argsort(np.abs(theta)):
        if theta[i] > 1e-9 and (abs(phase[i]) > 8 * unit or offset):
            offset = (phase[i] + _TWO_PI * round((offset * theta[i] - phase[i]) / _TWO_PI)) / theta[i]
    return float(round(offset) if abs(offset - round(offset)) < 0.05 else offset)


def possible_bases(theta: Float64, period: int, snap: float = 1e-3) -> tuple[float, ...]:
    """Bases of θ_i = base^(−i/period) that the outermost, the first two, … frequencies suggest, round numbers first.

    Estimates that differ from each other are known no better than that; within it the fewest digits are meant.
    """
    p = len(theta)
    if p < 2 or not (theta > 0).all():
        return ()
    spans = ((0, p - 1), (0, 1), (0, p // 2), (p - 2, p - 1))
    logs = [math.log(theta[a] / theta[b]) * period / (b - a) for a, b in spans if b > a]
    found = [math.exp(value) for value in logs if 1e-6 < value < 27.7]
    known = min(1e-6, max(logs) - min(logs))  # 10⁻⁶: a float32 power of a large base
    choices = (value for base in found for value in (rounded(base, snap), rounded(base, known), base))
    return tuple(dict.fromkeys(value for value in choices if 1 < value <= 1e12))


def rounded(value: float, tolerance: float) -> float:
    """The number of the fewest digits within a relative tolerance."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits - 1}e}")
        if abs(short / value - 1) <= tolerance:
            return short
    return value


class Explanation(NamedTuple):
    """A rule that explains the frequencies, in words, and the rope that has them, where one is implied."""

    words: str
    rope: Rope | None = None


def low_precision(measured: Measured) -> tuple[str, Rounding]:
    """The narrow dtype that all frequencies are numbers of, if they are known well enough, and its rounding."""
    theta, uncertainty = measured.theta, measured.uncertainty
    for name, rounding, bits in (("bfloat16", to_bfloat16, 8), ("float16", to_float16, 11)):
        known = uncertainty < np.abs(theta) * 2.0 ** (
            -bits - 6
        )  # so that it would be no number of that dtype by chance
        if known.sum() >= 4 and (np.abs(theta - rounding(theta)) <= 4 * uncertainty + 16 * U32 * theta)[known].all():
            return name, rounding
    return "", as_is


def explain(
    measured: Measured, rope: Rope, distance: int, suspects: Sequence[Rope] = (), rounding: Rounding = as_is
) -> list[Explanation]:
    """The rules that explain the frequencies of a rope whose layout, width and direction are known."""
    theta, p = measured.theta, len(measured.theta)
    # What four times the uncertainty leaves open, and the roundings of a float32 pipeline: 80 of powers, which MLX
    # makes by logarithms, 256 of llama3's ramp.
    known = 4 * measured.uncertainty / np.maximum(np.abs(theta), 1e-300)

    def fits(expected: Any, roundings: int = 256) -> bool:
        expected = np.asarray(rounding(expected), np.float64)
        if len(expected) != p:
            return False
        return bool((np.abs(theta - expected) <= (known + roundings * U32) * np.abs(expected)).all())

    named = [Explanation(f"as {s!r}", s) for s in suspects if fits(frequencies(s)[frequencies(s) > 0])]
    if named:
        return named
    if p == 1:
        slower = 1 / theta[0]
        if fits([1.0]):
            return [Explanation("one pair, which turns by 1: any base without rescaling; the base cannot be seen")]
        return [
            Explanation(f"one pair, which turns by {theta[0]:.6g}: linear factor {slower:.6g}; the base cannot be seen")
        ]
    snap = 1e-3 if rounding is as_is else 1e-2  # of bases
    tolerance, power = known + 80 * U32, partial(fits, roundings=80)
    return list(_geometric(rope, theta, tolerance, power, distance, snap)) or list(_blends(rope, measured, fits))


def _geometric(
    rope: Rope, theta: Float64, tolerance: Float64, fits: Any, distance: int, snap: float
) -> Iterator[Explanation]:
    p, d = len(theta), rope.head_dim
    apart = rope.layout == "half" and distance == d // 2 and p < d // 2
    period = d // 2 if apart else p
    s = rounded(1 / float(theta[0]), max(1e-4, float(tolerance[0]))) if abs(theta[0] - 1) > tolerance[0] else 1.0
    measured = possible_bases(theta, period, snap)
    # How far a base may be off: each pair i tells it to period/i times what is known of its own frequency.
    known = float(((tolerance + tolerance[0] * (s != 1))[1:] * period / np.arange(1, p)).min())
    common = sorted(COMMON_BASES, key=lambda base: abs(math.log(base / measured[0]))) if measured else []
    for base in (*common, *measured):
        w = base ** -(np.arange(p) / period)
        if not fits(w / s):
            continue
        told = f"base {base:g}" + (f" ± {float(f'{base * known:.2g}'):g}" if known > 5e-5 else "")
        if apart:
            fraction = next(f for f in (2 * p / d, (2 * p + 0.5) / d) if int(f * d // 2) == p)
            words = f"proportional, {told}" + (f", factor {s:g}" if s != 1 else "")
            yield Explanation(words, replace(rope, base=base, scaling=Proportional(fraction, s)) if s >= 1 else None)
        elif s == 1:
            words = f"{told}, not rescaled (NTK scaling of a smaller base, at a fixed length, is the same)"
            yield Explanation(words, replace(rope, base=base))
        elif s > 1:
            words = f"{told}, linear scaling by {s:g} (rotated twice with linear factor {2 * s:g} is the same)"
            yield Explanation(words, replace(rope, base=base, scaling=Linear(s)))
        else:
            yield Explanation(f"{told}, all frequencies times {1 / s:g}, as if rotated {1 / s:g} times")
        return


def _blends(rope: Rope, measured: Measured, fits: Any) -> Iterator[Explanation]:
    """YaRN and llama3: fast pairs kept, slow ones divided by a factor, a ramp between them."""
    theta = measured.theta
    p, i = len(theta), np.arange(len(theta))
    if not (theta > 0).all():  # a pair too slow to be seen turning, or turning against the others
        return
    for base in dict.fromkeys((*possible_bases(theta, p), *COMMON_BASES)):
        w = base ** -(i / p)
        ratio, s = theta / w, slowed(theta / w, measured)
        if s <= 1.001 or abs(ratio[0] - 1) > 1e-3:
            continue
        kept = (ratio - 1 / s) / (1 - 1 / s)  # 1: as it was, 0: divided by s
        inside = (kept > 1e-3) & (kept < 1 - 1e-3)
        weight = theta / (measured.uncertainty + 64 * U32 * theta)
        found = []
        for name, along in (("yarn", -i.astype(float)), ("llama3", w)):
            line = np.polyfit(along[inside], kept[inside], 1, w=weight[inside]) if inside.sum() > 1 else None
            ramp = np.clip(kept if line is None else np.polyval(line, along), 0, 1)
            usual = _usual(name, replace(rope, base=base), s, measured, fits)
            if usual or (fits(w * (ramp + (1 - ramp) / s)) and (line is None or line[0] > 0)):
                found.append(_blend(name, base, s, line, usual))
        if found:
            yield from found
            return


def slowed(ratio: Float64, measured: Measured, among: int | None = None) -> float:
    """1 over the ratio of the slowest pairs (among the first ones), from the one of them that is known best."""
    off = (4 * measured.uncertainty / np.maximum(np.abs(measured.theta), 1e-300) + 64 * U32)[:among]
    alike = np.abs(ratio / ratio[-1] - 1) <= off + off[-1]
    best = int(np.argmin(np.where(alike, off, np.inf)))
    return rounded(1 / float(ratio[best]), max(1e-5, float(off[best])))


def _blend(name: str, base: float, s: float, line: Any, usual: Sequence[Rope]) -> Explanation:
    words = f"{name}, base {base:g}, factor {s:g}"
    if line is not None:
        sign, where = (-1, "pair") if name == "yarn" else (1, "frequency")
        one, zero = sign * (1 - line[1]) / line[0], -sign * line[1] / line[0]
        words += f", ramp from {where} {one:.4g} to {zero:.4g} (only this is seen of its lengths and limits)"
    if usual:
        limits = "low 1, high 4" if name == "llama3" else "betas 32 and 1"
        lengths = " or ".join(str(rope.scaling.original_length) for rope in usual)  # type: ignore[union-attr]
        words += f"; as with {limits}, original length {lengths}"
    return Explanation(words, usual[0] if usual else None)


def _usual(name: str, rope: Rope, s: float, measured: Measured, fits: Any) -> list[Rope]:
    """Ropes with the limits that everybody uses and a power of two as their length that have these frequencies."""
    found = []
    for length in (2**k for k in range(8, 21)):
        choices: list[Any] = [Llama3(s, 1.0, 4.0, length)]
        if name == "yarn":
            choices = [YaRN(s, length, truncate=whole) for whole in (True, False)]
        ropes = (replace(rope, scaling=scaling) for scaling in choices)
        if whole := next((r for r in ropes if fits(frequencies(r))), None):
            found.append(_with_factor(whole, measured))
    return found


def _with_factor(rope: Rope, measured: Measured) -> Rope:
    """The rope, with the attention factor that was measured if YaRN's own is another."""
    same = abs(rope.attention_factor / measured.factor - 1) <= measured.unit + 1e-5
    if same or not isinstance(rope.scaling, YaRN):
        return rope
    factor = rounded(measured.factor, measured.unit / 4)
    return replace(rope, scaling=replace(rope.scaling, attention_factor=factor))


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

    def __str__(self) -> str:
        theta, width = self.frequencies, 12
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
        lines = [f"rotation of {self.head_dim} features, {self.dtype}"]
        for name, words in rows:
            lines += textwrap.wrap(words, 79, initial_indent=f"  {name:<{width}}", subsequent_indent=" " * (width + 2))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no NaN and no infinity: these become None."""
        plain = finite(asdict(replace(self, rope=None)))
        return {**plain, "rope": None if self.rope is None else repr(self.rope)}


def layout_of(pairs: Pairs, head_dim: int) -> tuple[str, int, str, int]:
    """Layout, rotary width, placement and distance of the halves; "none" where no layout has these pairs."""
    k = len(pairs.reads)
    if not k:
        return "none", 0, "prefix", 0
    distance = int(pairs.reads[0, 1] - pairs.reads[0, 0])
    for layout in ("interleaved", "half", "interleaved-to-half"):
        for start in (0, head_dim - 2 * k):
            reads, writes = features(layout, k, start)
            if np.array_equal(reads, pairs.reads) and np.array_equal(writes, pairs.writes):
                return layout, 2 * k, "prefix" if start == 0 else "suffix", k
    if np.array_equal(features("half", k, 0, head_dim // 2)[0], pairs.reads) and np.array_equal(
        pairs.reads, pairs.writes
    ):
        return "half", 2 * k, "prefix", head_dim // 2
    return "none", 2 * k, "prefix", distance


def rules(
    measured: Measured, head_dim: int, suspects: Sequence[Rope] = (), rounding: Rounding = as_is
) -> list[Explanation]:
    """The rules that explain what was measured; none where no layout has these pairs."""
    layout, width, placement, distance = layout_of(measured.pairs, head_dim)
    if layout == "none":
        return []
    whole = distance == head_dim // 2
    shape = Rope(head_dim, 10000.0, layout, head_dim if whole else width, placement, direction=measured.direction)
    return explain(measured, shape, distance, suspects, rounding)


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
    notes, found, rope, narrow = list(probe.notes), [], None, ""
    if measured.linear_up_to < positions[-1]:
        notes.append(f"phases are proportional to the position up to {measured.linear_up_to} only")
    if measured.start > 0.1:
        notes.append(f"at position 0 pairs are turned by up to {measured.start:.4g} more than any offset explains")
    if measured.pairs.odd or measured.pairs.skew > 32 * probe.unit * max(1.0, measured.factor):
        notes.append(f"no rotation: {measured.pairs.odd} features belong to no pair, and within the pairs R is off by "
                     f"{measured.pairs.skew:.2g} from a rotation times a number")  # fmt: skip
    else:
        found = rules(measured, head_dim, suspects)
        if (
            not found and layout != "none"
        ):  # frequencies that are powers of two are right in any dtype: so this is second
            narrow, rounding = low_precision(measured)
            found = rules(measured, head_dim, suspects, rounding) if narrow else []
        rope = next((e.rope for e in found if e.rope is not None), None)
    precision = _precision(probe, rope, measured)
    if narrow:
        precision = f"{LOW_ANGLE}: all frequencies are {narrow} numbers"
    words = tuple(e.words for e in found) or (
        ("none of these: no published rule has these frequencies",) if width else ()
    )
    return Identification(
        probe.head_dim, probe.dtype.name, layout, width, placement, tuple(map(tuple, measured.pairs.reads.tolist())),
        measured.direction, tuple(measured.theta.tolist()), tuple(measured.uncertainty.tolist()), measured.offset,
        measured.factor, words, rope, precision, tuple(f"{k}: {v}" for k, v in probe.seen.items()), tuple(notes),
        _multiple(operator, measured.factor, probe.unit),
    )  # fmt: skip


def _multiple(operator: Float64, factor: float, unit: float) -> bool:
    """Whether R(m) is this number times the identity at every position."""
    return bool((np.abs(operator - factor * np.eye(operator.shape[-1])) <= 4 * unit * abs(factor)).all())


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
    return Sample(x.astype(np.float64), probe.read(x, positions), positions)


def true_rotation(x: Float64, positions: Int64, rope: Rope) -> Float64:
    """R(m)·x in float64 from the exact tables."""
    recipe = replace(recipe_of(rope), signs=(-1, 1))  # the tables have the direction
    return np.asarray(recipe.apply(x, *cos_sin(rope, positions)))


class Graded(NamedTuple):
    """How good a candidate is."""

    grade: str | None  # the best that holds
    ratios: dict[str, Float64]  # error over bound, by grade
    logarithm: bool  # whether a bound needs frequencies by a logarithm, which are worse than those by a power


def graded(sample: Sample, rope: Rope, dtype: np.dtype[Any]) -> Graded:
    for logarithm in (False, True):
        ratios = error_ratios(sample, rope, dtype, logarithm)
        grade = next((grade for grade, ratio in ratios.items() if ratio.max() <= 1), None)
        if grade is not None:
            break
    return Graded(grade, ratios, logarithm)


def error_ratios(sample: Sample, rope: Rope, dtype: np.dtype[Any], logarithm: bool = False) -> dict[str, Float64]:
    """Error over bound for every output, by grade; features that do not turn may be rounded once, to float32 where
    that is the grade."""
    truth = true_rotation(sample.x, sample.positions, rope)
    measures = pair_errors(sample.x, sample.positions, rope, logarithm=logarithm)
    start = 0 if rope.placement == "prefix" else rope.head_dim - rope.width
    turning, error = slice(start, start + rope.width), np.abs(sample.y - truth)
    error[np.isnan(error)] = np.inf
    ratios = {}
    for grade in grades(dtype):
        allowed = np.abs(sample.x) * (max(UNIT[dtype.name], U32) if grade == ANGLE32 else UNIT[dtype.name])
        allowed[..., turning] = bound(grade, measures, truth[..., turning], dtype, rope.attention_factor)
        with np.errstate(all="ignore"):
            ratios[grade] = np.where(error == 0, 0.0, error / allowed)
    return ratios


def _precision(probe: Probe, rope: Rope | None, measured: Measured) -> str:
    """The grade of a candidate whose rope is known."""
    if rope is None:
        return "cannot tell: no rope has exactly these numbers"
    if measured.offset != round(measured.offset):
        return "cannot tell: positions are off by no whole number"
    try:
        sample = take_sample(probe, rope)
        grade = graded(sample._replace(positions=sample.positions + round(measured.offset)), rope, probe.dtype).grade
    except Unreadable as error:
        return f"cannot tell: {error}"
    if rope.base != float(f"{rope.base:.8g}"):
        return "cannot tell: the base is no round number, so its last digits are unknown"
    return grade or "cannot tell: worse than a float32 angle with these numbers"
