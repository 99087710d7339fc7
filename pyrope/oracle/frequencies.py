"""Which base and which rescaling have the frequencies that were measured, beside an expected rope or without one.

`name_frequencies` tries what common mistakes would make of the expected rope, then a geometric series, then another
rescaling, then another ramp. `guess_rope` asks the same of frequencies of which nothing is expected. A frequency is
known up to its uncertainty, to the roundings of a float32 pipeline, and to whole turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..theta import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, Scaling, YaRN, frequencies
from .candidate import BITS
from .positions import TURN, wrapped
from .responses import narrowed
from .tolerance import U32, angle_errors, exponents, theta_errors

WIDEST = 2**14  # features that an exponent may be divided by
TOP = 2**16  # the position that rates of angles are taken at
POWERS = 80  # roundings of a float32 power, which some make by a logarithm
RAMPS = 300  # and of a blend of two of them
SLOW = 0.05  # frequencies that are seen whole even where angles are multiplied by 60
RULES = {
    Linear: "linear", DynamicNTK: "NTK", YaRN: "YaRN", LongRoPE: "LongRoPE", Llama3: "llama3",
    Proportional: "proportional",
}  # fmt: skip
COMMON_BASES = (10000.0, 500000.0, 1e6, 150000.0, 1e5, 25000.0, 5e6, 1e7)
LENGTHS = tuple(2**k for k in range(8, 21))
# Of a rescaling: what is not in the frequencies, and what the ends of a ramp tell.
ELSEWHERE = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "low", "high")
USUAL: tuple[Callable[[float, int], Scaling], ...] = (  # with the limits that everybody uses
    YaRN,
    partial(YaRN, truncate=False),
    lambda s, length: Llama3(s, 1.0, 4.0, length),
)
SERIES = {"shared": "one series runs over all axes", "own": "each axis has a series of its own"}
UNITS = dict.fromkeys((TURN, math.pi, 1 / TURN, 1 / math.pi, math.pi / 180, 180 / math.pi), "wrong unit of the angle")


class Named(NamedTuple):
    """An explanation: the mistake, "" where nothing is expected, the same in words, and the rope, if there is one."""

    fault: str
    fact: str
    rope: Rope | None = None


class MeasuredTheta(NamedTuple):
    """Frequencies (p,), positive where a pair turns as most do, and how far off each may be."""

    theta: Array
    unsure: Array

    def near(self, theta: Any, errors: Any = POWERS) -> Array:
        """Which of them may be these, with so many roundings to float32; whole positions do not show whole turns."""
        allowed = 4 * self.unsure + (errors + 2) * U32 * np.abs(theta)
        return np.asarray(np.abs(wrapped(self.theta - theta)) <= allowed)

    def fits(self, theta: Any, errors: Any = POWERS) -> bool:
        return len(theta) == len(self.theta) and bool(self.near(theta, errors).all())

    @property
    def turning(self) -> Array:
        """Which pairs are seen to turn."""
        return np.asarray(np.abs(self.theta) > 4 * self.unsure)

    @property
    def relative(self) -> Array:
        """How far off they may be, relative to themselves."""
        return np.asarray(4 * self.unsure / np.maximum(np.abs(self.theta), 1e-300))

    def part(self, some: Any) -> MeasuredTheta:
        return MeasuredTheta(self.theta[some], self.unsure[some])


def span(theta: Array) -> str:
    """The first frequency and the last one."""
    return " … ".join(f"{theta[i]:.7g}" for i in (0, -1)[: len(theta)]) or "none"


def listed(indices: Any, what: str = "pair") -> str:
    """Pairs in a few words."""
    some = [int(i) for i in indices]
    if not some:
        return f"no {what}"
    if len(some) > 2 and some == [*range(some[0], some[-1] + 1)]:
        return f"{what}s {some[0]} to {some[-1]}"
    return f"{what}{'s' * (len(some) != 1)} {', '.join(map(str, some[:6]))}{', …' * (len(some) > 6)}"


def rounded(value: float, tolerance: float, most: int = 8) -> float:
    """The number of the fewest digits within a relative tolerance; the value itself, if it needs more than ``most``."""
    shorts = (float(f"{value:.{digits}e}") for digits in range(most))
    return next((short for short in shorts if abs(short - value) <= tolerance * abs(value)), value)


def narrow_dtype(measured: MeasuredTheta) -> str:
    """The narrow dtype that all frequencies are numbers of, if they are known well enough to tell; or ""."""
    theta = measured.theta
    for name in ("bfloat16", "float16"):
        bits = BITS[name]
        known = measured.unsure < np.abs(theta) * 2.0 ** (-bits - 6)  # so that it is no number of that dtype by chance
        near = np.abs(theta - narrowed(theta, bits)) <= 4 * measured.unsure + 16 * U32 * np.abs(theta)
        if known.sum() >= 4 and near[known].all():
            return name
    return ""


# ── What is wrong with frequencies, beside those that are expected ───────────────────────────────────────────────────


@np.errstate(all="ignore")
def name_frequencies(measured: MeasuredTheta, rope: Rope) -> Named | None:
    """What is wrong with the frequencies, the first explanation that fits; None if nothing is."""
    if right_frequencies(measured, rope).all():
        return None
    due = frequencies(rope)
    for named, theta in _predictions(measured, rope):
        other = not (np.abs(theta - due) <= RAMPS * U32 * due).all()  # else it is nearly what is expected
        if other and measured.fits(theta, RAMPS):
            return named
    readings = (read(measured, rope) for read in (_narrow, _geometric, _rescaled, _other_ramp))
    return next((named for named in readings if named is not None), _in_words(measured, rope))


def right_frequencies(measured: MeasuredTheta, rope: Rope) -> Array:
    """Which of them are as near as those of a float32 pipeline: exact where θ is 1, bool (p,)."""
    rate = angle_errors(rope, np.array([[TOP]]))[0] / TOP
    return np.asarray(np.abs(wrapped(measured.theta - frequencies(rope))) <= 4 * measured.unsure + 1.001 * rate)


def _predictions(measured: MeasuredTheta, rope: Rope) -> Iterator[tuple[Named, Array]]:
    """Frequencies that common mistakes make of an expected rope, the simplest mistake first."""
    theta, scaling = frequencies(rope), rope.scaling
    still = ~measured.turning & (theta > 8 * measured.unsure)
    yield Named("not rotated", "no pair turns"), 0 * theta
    fact = f"all but these turn as expected: {listed(np.flatnonzero(still))}"
    yield Named("some pairs not turned", fact), np.where(still, 0, theta)
    whose = np.argsort(theta)[np.argsort(np.argsort(measured.theta))]
    moved = np.flatnonzero(whose != np.arange(len(whose)))[:6]
    fact = f"pairs {', '.join(map(str, moved))}, … turn as pairs {', '.join(map(str, whose[moved]))}, … should"
    yield Named("frequencies in another order", fact), theta[whose]
    owners = () if rope.axes is None else tuple(axis for axis, _ in rope.axes.assign(rope.pairs))
    for series, words in SERIES.items() if owners else ():
        with suppress(ValueError):  # axes without pairs
            axes = Axes("listed", owners, series)
            yield Named("series of the axes", words), frequencies(replace(rope, axes=axes))
    yield from _of_rescaling(rope)
    if not isinstance(scaling, Linear):  # another factor, which `_rescaled` finds
        by = _multiple(measured, rope)
        one, half = rope.base ** (-2 / rope.width), rope.base ** (-1 / rope.width)  # i + 1 for i, 2i + 1 for 2i
        known = {2.0: "rotated twice", one: "index counted from 1", half: "index counted from 1", **UNITS}
        fault = next((name for number, name in known.items() if abs(by / number - 1) < 1e-6), "angles multiplied")
        linear = scaling is None and by < 1 and abs(float(f"{1 / by:.3g}") * by - 1) < 1e-6
        if fault in known.values() or not linear:
            yield Named(fault, f"all angles are {by:.9g} times what is expected"), theta * by


def _of_rescaling(rope: Rope) -> Iterator[tuple[Named, Array]]:
    """What a rescaling makes that is left out, applied twice, inverted, or has the other list."""
    theta, w, scaling = frequencies(rope), rope.base ** -exponents(rope), rope.scaling
    if scaling is None:
        return
    if isinstance(scaling, Proportional):
        fact = f"all {rope.head_dim} features turn, not {2 * np.count_nonzero(theta)}"
        yield Named("whole head rotated", fact), w / scaling.factor
    rule = f"{RULES[type(scaling)]} scaling"
    fact = f"the frequencies are those without {rule}, {span(w)}, not {span(theta)}"
    yield Named("scaling ignored", fact), w
    yield Named("scaling applied twice", f"the effect of {rule} on the frequencies is squared"), theta**2 / w
    yield Named("scaling inverted", f"frequencies are multiplied where {rule} divides them"), w**2 / theta
    if isinstance(scaling, LongRoPE):
        for name, factors in (("short", scaling.short), ("long", scaling.long)):
            yield Named("wrong list of factors", f"the {name} list is used"), w / np.array(factors)


def _multiple(measured: MeasuredTheta, rope: Rope) -> float:
    """What all angles may be multiplied by, as a slow pair tells it: of others, whole turns may not be seen."""
    due = frequencies(rope)
    i = int(np.argmin(np.where(due < max(SLOW, due.min() * 2), measured.relative, np.inf)))
    return rounded(float(measured.theta[i] / due[i]), float(measured.relative[i]) + 8 * U32)


def _narrow(measured: MeasuredTheta, rope: Rope) -> Named | None:
    """Numbers of a narrow dtype, near those that are expected."""
    name, due = narrow_dtype(measured), frequencies(rope)
    off = np.abs(measured.theta / due - 1)[due > 0].max(initial=0)
    fact = f"the frequencies are {name} numbers, off by up to {off:.2g} of themselves"
    return Named(f"{name} inverse frequencies", fact) if name and off <= 2.0**-4 else None


def _geometric(measured: MeasuredTheta, rope: Rope) -> Named | None:
    """A base of its own, where a series without a ramp is expected."""
    due, e, scaling = frequencies(rope), exponents(rope), rope.scaling
    series, found = geometric(MeasuredTheta(due, 1e-14 * due), e), geometric(measured, e)
    if found is None or series is None:
        return None
    (a, base), (first, ratio) = found, series
    power = math.log(base) / math.log(ratio)
    got, expected = (f"{'' if k == 1 else f'{k:.6g} times '}those of base {b:.8g}" for k, b in (found, series))
    fact, width = f"the frequencies are {got}, {expected} expected", rope.width / (power or 1e-9)  # base^(−2i/width)
    if abs(power - 1) < 1e-5 or (a < 1 and base == rope.base):  # multiplied, or rescaled linearly
        return None
    if abs(a / first - 1) < 1e-4 and _is_width(width, base, rope):
        words = "0" if abs(width) > WIDEST else f"2i/{round(width)}"
        return Named("wrong exponent", f"the exponents are {words}, not 2i/{rope.width}: {fact}")
    if isinstance(scaling, DynamicNTK) and a == 1:
        fact = f"the base is multiplied by {base / rope.base:.6g}, not {ratio / rope.base:.6g}"
        return Named("dynamic NTK formula", fact)
    return Named("wrong base", fact)


def _is_width(width: float, base: float, rope: Rope) -> bool:
    """Whether the exponents 2i/width are simpler than another base of a few digits."""
    r, whole = rope.width, round(width) if abs(width) <= WIDEST else 0
    few = base == float(f"{base:.1e}") and whole not in (0, -r, r // 2, 2 * r, rope.head_dim)
    return not few and whole != r and (not whole or abs(width - whole) < 1e-3)


def _rescaled(measured: MeasuredTheta, rope: Rope) -> Named | None:
    """The rescaling with another number, or base, or another rescaling."""
    due = frequencies(rope)
    for other in rescaled_ropes(measured, rope, rope.scaling):
        if (np.abs(frequencies(other) - due) <= theta_errors(other) * U32 * due).all():
            continue  # it is nearly that one, but not within its rounding
        got, scaling = other.scaling, rope.scaling
        if got is None or scaling is None or type(got) is not type(scaling):
            words = f"{_rule(other)}; as {got!r}"
            return Named(f"another rescaling: {RULES[type(got)]}", f"the frequencies are those of {words}")
        names = [field.name for field in fields(got) if getattr(got, field.name) != getattr(scaling, field.name)]
        parts = [f"{name} {getattr(got, name)}, {getattr(scaling, name)} expected" for name in names]
        parts += [f"base {other.base:.8g}, {rope.base:g} expected"] * (other.base != rope.base)
        fault = "wrong base" if other.base != rope.base else f"wrong scaling parameter: {', '.join(names)}"
        return Named(fault, f"the frequencies are as with {'; and '.join(parts)}")
    return None


def _other_ramp(measured: MeasuredTheta, rope: Rope) -> Named | None:
    """Other pairs between those that are kept and those that are divided by the factor, or blended in another way."""
    scaling, w, due = rope.scaling, rope.base ** -exponents(rope), frequencies(rope)
    if not isinstance(scaling, YaRN | Llama3) or scaling.factor == 1 or not measured.turning.all():
        return None
    ratio, want = measured.theta / due, _kept(due, w, scaling.factor)
    i = int(np.argmax(np.abs(ratio - 1)))  # the pair that is most wrong
    for s in (scaling.factor, slowed(measured, w)):
        got = _kept(measured.theta, w, s)
        between = (np.abs(got - 0.5) < 0.51).all() and abs(ratio[i] - 1) > 0.01
        in_order = (np.diff(got) * np.sign(got[-1] - got[0]) > -0.01).all()
        ends, due_ends = (f"{_ends(kept)} by {by:.6g}" for kept, by in ((got, s), (want, scaling.factor)))
        if between and (in_order or ends == due_ends):
            how = "another blend" if ends == due_ends else "other ends"
            how = "inverted" if (got[0] - got[-1]) * (want[0] - want[-1]) < 0 else how
            beside = "as expected" if ends == due_ends else f"where it should be {due_ends}"
            pair = f"pair {i} is divided by {w[i] / measured.theta[i]:.4g}, {w[i] / due[i]:.4g} expected"
            return Named("scaling inverted" if s < 1 else f"wrong ramp: {how}", f"{ends}, {beside}; {pair}")
    return None


def _kept(theta: Array, w: Array, s: float) -> Array:
    """t of θ = w·(t + (1 − t)/s): 1 where w is kept, 0 where it is divided by s."""
    return np.asarray((theta / w - 1 / s) / (1 - 1 / s))


def _ends(kept: Array) -> str:
    """Which pairs are at the ends of a ramp, in words."""
    whole, divided = (listed(np.flatnonzero(np.abs(kept - end) < 1e-3)) for end in (1, 0))
    return f"{whole} kept, {divided} divided"


def _in_words(measured: MeasuredTheta, rope: Rope) -> Named:
    """How far off the frequencies are, where no rule has them."""
    due, wrong = frequencies(rope), np.flatnonzero(~right_frequencies(measured, rope))
    ratio, more, i = (measured.theta / due)[wrong], np.abs(measured.theta - due)[wrong], int(wrong[0])
    spread = f"{np.nanmin(ratio) - 1:+.2g} to {np.nanmax(ratio) - 1:+.2g} of themselves"
    first = f"pair {i} turns by {measured.theta[i]:.10g}, {due[i]:.10g} expected"
    how = f"{len(wrong)} of {len(due)} frequencies are off, by {spread}, {listed(wrong)}: {first}"
    if np.abs(ratio - 1).max() >= 2.0**-7:
        return Named("wrong frequencies", how)
    how += f"; each position adds up to {more.max():.2g} to the error of an angle"
    return Named("inexact frequencies", how)


# ── What frequencies are, whatever was expected ──────────────────────────────────────────────────────────────────────


@np.errstate(all="ignore")
def guess_rope(measured: MeasuredTheta, shape: Rope, suspects: Sequence[Rope] = ()) -> list[Named]:
    """The rules that explain the frequencies of a rope whose layout, width, direction and axes are those of ``shape``.

    Several rules may have the same frequencies: then all of them are returned.
    """
    named = [Named("", f"as {rope!r}", rope) for rope in suspects if measured.fits(frequencies(rope), RAMPS)]
    turning, e = measured.turning, exponents(shape)
    count = int(turning.sum())
    if named or not turning[:count].all() or not e[turning].any():
        return named
    measured, e = measured.part(turning), e[turning]
    if (found := geometric(measured, e)) is not None:
        return [_series_in_words(measured, shape, e, *found)]
    if count < shape.pairs or shape.axes is not None:
        return []
    rules = dict[Any, Rope]()
    for rope in rescaled_ropes(measured, shape):
        if all(rope.base == other.base for other in rules.values()):
            rules.setdefault((type(rope.scaling), getattr(rope.scaling, "original_length", 0)), rope)
    return [Named("", f"{_rule(rope)}; as {rope.scaling!r}", rope) for rope in rules.values()]


def _rule(rope: Rope) -> str:
    return f"{RULES[type(rope.scaling)].lower()}, base {rope.base:g}, factor {getattr(rope.scaling, 'factor', 1):.6g}"


def _series_in_words(measured: MeasuredTheta, shape: Rope, e: Array, a: float, base: float) -> Named:
    """The rope of a·base^(−e), if there is one."""
    s, tolerance, count, d = rounded(1 / a, 1e-12), measured.relative + POWERS * U32, len(e), shape.head_dim
    known = float((tolerance[e > 0] / e[e > 0]).min(initial=1))  # how far a base may be off, as each pair tells it
    name, factor = f"base {_give_or_take(base, known)}", _give_or_take(s, float(tolerance[0]), 9)
    if not 1 < base <= 1e12 or s < 1:
        return Named("", f"{name}, all frequencies times {1 / s:g}, as if rotated {1 / s:g} times")
    if count < shape.pairs:
        fraction = next(f for f in (2 * count / d, (2 * count + 0.5) / d) if int(f * d // 2) == count)
        rope = replace(shape, base=base, scaling=Proportional(fraction, s)) if shape.width == d else None
        return Named("", f"proportional, {name}" + (f", factor {factor}" if s != 1 else ""), rope)
    if s == 1:
        words = f"{name}, not rescaled (NTK scaling of a smaller base, at a fixed length, is the same)"
        return Named("", words, replace(shape, base=base))
    words = f"{name}, linear scaling by {factor} (rotated twice with linear factor {2 * s:.9g} is the same)"
    return Named("", words, replace(shape, base=base, scaling=Linear(s)))


def _give_or_take(value: float, known: float, digits: int = 6) -> str:
    """A number, with what it may be off by where that shows; ``known`` is relative to it."""
    return f"{value:.{digits}g}" + (f" ± {float(f'{value * known:.2g}'):g}" if known > 5e-5 else "")


def rescaled_ropes(measured: MeasuredTheta, shape: Rope, own: Scaling | None = None) -> Iterator[Rope]:
    """Ropes of another base or rescaling that have these frequencies, the simplest first: one number of their ``own``
    rescaling changed, or the usual rescalings."""
    e = exponents(shape)
    for base in dict.fromkeys((shape.base, *_bases(measured, e), *COMMON_BASES)):
        s = slowed(measured, base**-e)
        scalings: list[Scaling] = [] if own is None else [own, *_changed(own, s)]
        scalings += [Linear(s), *(rule(s, n) for n in LENGTHS for rule in USUAL)] if 1.001 < s < 1e6 else []
        for scaling in scalings:
            with suppress(ValueError, ZeroDivisionError, OverflowError):
                rope = replace(shape, base=base, scaling=scaling)
                if measured.fits(frequencies(rope), theta_errors(rope) if own is not None else RAMPS):
                    yield rope


def _changed(scaling: Scaling, factor: float) -> Iterator[Scaling]:
    """With one other number: a multiple of what is expected, or the factor that was measured."""
    s = getattr(scaling, "factor", 2.0)
    for name, value in ((field.name, getattr(scaling, field.name)) for field in fields(scaling)):
        if name in ELSEWHERE or value is None or isinstance(value, tuple):
            continue
        others: list[Any] = [not value]
        if not isinstance(value, bool):
            times = [*(2.0**k for k in range(-6, 7)), s, 1 / s, TURN, 1 / TURN, 1 / value**2]
            others = [value * by for by in times] + [factor] * (name == "factor")
            others = [round(one) for one in (*others, value + 1, value - 1)] if isinstance(value, int) else others
        for other in dict.fromkeys(others):
            with suppress(ValueError):
                yield replace(scaling, **{name: other})


def _bases(measured: MeasuredTheta, e: Array) -> list[float]:
    """Bases that the fastest and the slowest pairs suggest, by themselves."""
    theta, bases = measured.theta, []
    for a, b in ((0, 1), (0, 2), (-2, -1), (-3, -1)) if len(theta) > 3 and (theta > 0).all() else ():
        if e[a] != e[b]:
            base = math.exp(math.log(theta[a] / theta[b]) / (e[b] - e[a]))
            bases += [rounded(base, 1e-3), rounded(base, 1e-5)]
    return [base for base in dict.fromkeys(bases) if 1 < base <= 1e12]


def geometric(measured: MeasuredTheta, e: Array) -> tuple[float, float] | None:
    """a and base of θ = a·base^(−e), with as few digits as the frequencies allow; None if no such numbers fit."""
    theta, index = measured.theta, np.arange(len(e))
    plain = measured.turning & (theta > 0) & (theta < 3)  # those beyond half a turn are known up to whole turns only
    last = np.flatnonzero(~plain).max(initial=-1)
    for some in (plain, plain & (index > last), plain & np.cumprod(plain).astype(bool)):
        if some.sum() < 2 or np.ptp(e[some]) == 0:
            continue
        logs, weight = np.log(theta[some]), 1 / (measured.relative[some] + 4 * U32)
        slope, first = np.polyfit(e[some], logs, 1, w=weight)
        from_one = float((logs * e[some] * weight**2).sum() / (e[some] ** 2 * weight**2).sum())  # if the first is 1
        for log_a, log_base in ((0.0, -from_one), (float(first), -float(slope))):
            known = float(np.abs(logs - log_a + log_base * e[some]).max())
            tells = some & (e > 0)
            sure = float((measured.relative[tells] / e[tells]).min(initial=1)), float(measured.relative[some].min())
            bases = _shortest(log_base, 16 * known + 4 * sure[0], (1e-3, min(1e-6, 4 * known), 0.0))
            multiples = _shortest(-log_a, 16 * known + 4 * sure[1], (1e-4, 1e-6, 0.0)) if log_a else [1.0]
            for multiple, base in product(multiples, bases):
                if measured.fits(base**-e / multiple):
                    return 1 / multiple, base
    return None


def _shortest(log: float, near: float, steps: Iterable[float]) -> list[float]:
    """Numbers of few digits first, as near as the frequencies tell: 2.00001 is not 2."""
    if abs(log) > 50:
        return []
    numbers = [rounded(math.exp(log), step) for step in steps]
    return [number for number in numbers if abs(math.log(number) - log) <= near + 1e-12]


def slowed(measured: MeasuredTheta, w: Array) -> float:
    """What the pairs are divided by that are divided the most, from the one of them that is known best."""
    ratio, off = measured.theta / w, measured.relative + 64 * U32
    most = int(np.argmax(np.abs(np.log(np.abs(ratio)))))
    alike = np.abs(ratio / ratio[most] - 1) <= off + off[most]
    best = int(np.argmin(np.where(alike, off, np.inf)))
    return rounded(float(1 / ratio[best]), max(1e-5, float(off[best])))
