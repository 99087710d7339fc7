"""Which base and which rescaling measured frequencies are those of: beside those of an expected rope, or alone.

A frequency is known up to its uncertainty, to the roundings of a float32 pipeline, and to whole turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..theta import DynamicNTK, Linear, Llama3, Proportional, Rope, Scaling, YaRN, frequencies
from .candidate import BITS
from .rescalings import RULES, TURN, Meant as Meant, exponents, listed as listed, meant as meant, variants
from .tolerance import U32, angle_errors, theta_errors

TOP = 2**16  # the position that rates of angles are taken at
POWERS = 80  # roundings of a float32 power, which some make by a logarithm
RAMPS = 300  # and of a blend of two of them
COMMON_BASES = (10000.0, 500000.0, 1e6, 150000.0, 1e5, 25000.0, 5e6, 1e7)
LENGTHS = tuple(2**k for k in range(8, 21))
LIMITS: dict[type, tuple[str, str]] = {YaRN: ("beta_fast", "beta_slow"), Llama3: ("high", "low")}
IN_LENGTHS = ("attention_factor", "mscale", "mscale_all_dim")  # of a rescaling: not in the frequencies
MULTIPLES = {  # of all angles
    "2π": TURN, "π": math.pi, "1/2π": 1 / TURN, "1/π": 1 / math.pi, "π/180": math.pi / 180, "180/π": 180 / math.pi,
}  # fmt: skip


class Named(NamedTuple):
    """A mistake in the frequencies: its name, the fact, and the rope that has them, if that is known."""

    fault: str
    fact: str
    rope: Rope | None = None


class Measured(NamedTuple):
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

    def part(self, some: Any) -> Measured:
        return Measured(self.theta[some], self.unsure[some])


def wrapped(angle: Any) -> Any:
    """An angle within half a turn."""
    return angle - TURN * np.rint(angle / TURN)


def to_narrow(x: Any, bits: int) -> Any:
    """Rounded to so many significant bits."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(mantissa * 2.0**bits) / 2.0**bits, exponent)


def rounded(value: float, tolerance: float, most: int = 8) -> float:
    """The number of the fewest digits within a relative tolerance; the value itself, if it needs more than ``most``."""
    shorts = (float(f"{value:.{digits}e}") for digits in range(most))
    return next((short for short in shorts if abs(short - value) <= tolerance * abs(value)), value)


def narrow_dtype(measured: Measured) -> str:
    """The narrow dtype that all frequencies are numbers of, if they are known well enough to tell; or ""."""
    theta = measured.theta
    for name in ("bfloat16", "float16"):
        bits = BITS[name]
        known = measured.unsure < np.abs(theta) * 2.0 ** (-bits - 6)  # so that it is no number of that dtype by chance
        near = np.abs(theta - to_narrow(theta, bits)) <= 4 * measured.unsure + 16 * U32 * np.abs(theta)
        if name == "float16":  # below its normal numbers it has a fixed step
            steps = np.abs(theta) * 2.0**24
            near |= (steps < 1024) & (np.abs(steps - np.rint(steps)) <= 4 * measured.unsure * 2.0**24 + 1e-3)
        if known.sum() >= 4 and near[known].all():
            return name
    return ""


# ── Geometric series: a base, a multiple ─────────────────────────────────────────────────────────────────────────────


def geometric(measured: Measured, e: Array) -> tuple[float, float] | None:
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
            bases = [rounded(math.exp(log_base), step) for step in (1e-3, min(1e-6, 4 * known), 0.0)]
            for a, base in product(_multiples(measured, e, log_a), bases if abs(log_base) < 50 else ()):
                if measured.fits(a * base**-e):
                    return a, base
    return None


def _multiples(measured: Measured, e: Array, log_a: float) -> Iterator[float]:
    """1 over what frequencies are divided by: few digits, unless the first frequency says otherwise; else all that were
    measured."""
    if abs(log_a) > 50 or log_a == 0:
        yield from (1.0,) * (log_a == 0)
        return
    first, s, known = int(np.argmin(e)), math.exp(-log_a), float(measured.relative.min())
    if e[first] == 0 and abs(measured.theta[first] * s - 1) < 1e-3:  # else it is known up to whole turns only
        s, known = float(1 / measured.theta[first]), float(measured.relative[first])
    short = rounded(s, known + 4 * U32)
    yield 1 / (short if short == float(f"{short:.5g}") else rounded(s, known, 12))
    yield from (1 / rounded(s, max(step, known + POWERS * U32)) for step in (1e-4, 1e-6))


# ── What is wrong with frequencies, beside those that are expected ───────────────────────────────────────────────────


def right_frequencies(measured: Measured, rope: Rope) -> Array:
    """Which of them are as near as those of a float32 pipeline: exact where θ is 1, bool (p,)."""
    rate = angle_errors(rope, np.array([[TOP]]))[0] / TOP
    return np.asarray(np.abs(wrapped(measured.theta - frequencies(rope))) <= 4 * measured.unsure + 1.001 * rate)


def name_frequencies(measured: Measured, due: Meant) -> Named | None:
    """What is wrong with the frequencies; None if nothing is."""
    if right_frequencies(measured, due.rope).all():
        return None
    with np.errstate(all="ignore"):
        ways = (_narrow, _still, _of_others, _variant, _geometric, _parameter, _published, _in_words)
        return next(named for way in ways if (named := way(measured, due)) is not None)


def _narrow(measured: Measured, due: Meant) -> Named | None:
    name, turning = narrow_dtype(measured), due.theta > 0
    off = np.abs(measured.theta[turning] / due.theta[turning] - 1)
    if not name or off.max(initial=0) > 2.0**-4:
        return None
    fact = f"the frequencies are {name} numbers, off by up to {off.max():.2g} of themselves"
    return Named(f"{name} inverse frequencies", fact)


def _still(measured: Measured, due: Meant) -> Named | None:
    still = ~measured.turning & (due.theta > 8 * measured.unsure)
    if still.all():
        return Named("not rotated", "no pair turns")
    if not still.any() or not measured.fits(np.where(still, 0, due.theta), theta_errors(due.rope)):
        return None
    return Named("some pairs not turned", f"all but these turn as expected: {listed(np.flatnonzero(still))}")


def _of_others(measured: Measured, due: Meant) -> Named | None:
    """Each pair has the frequency of some pair, but not of its own."""
    whose, p = [], len(due.theta)
    for i in range(p):
        near = measured.part(i).near(due.theta)
        whose.append(i if near[i] else int(np.argmax(near)) if near.any() else -1)
    moved = [i for i, j in enumerate(whose) if i != j]
    if -1 in whose or not moved or len(set(whose)) < max(2, p // 3) or p < 3:
        return None
    orders = {
        "in reverse order, the slowest first": [*range(p)][::-1],
        "in the order θ₀, θ₂, …, θ₁, θ₃, …": [*range(0, p, 2), *range(1, p, 2)],
    }
    first = ", ".join(f"pair {i} that of pair {whose[i]}" for i in moved[:3])
    how = next((f"they are {words}" for words, order in orders.items() if whose == order), f"{first}, …")
    return Named("frequencies in another order", f"{len(moved)} of {p} pairs have the frequency of another one: {how}")


def _variant(measured: Measured, due: Meant) -> Named | None:
    errors = np.maximum(theta_errors(due.rope), RAMPS)
    plain = {"scaling ignored": replace(due.rope, scaling=None)}
    fitting = ((fault, fact) for fault, fact, theta in variants(due) if measured.fits(theta, errors))
    return next((Named(fault, fact, plain.get(fault)) for fault, fact in fitting), None)


def _geometric(measured: Measured, due: Meant) -> Named | None:
    """A base, an exponent, or a multiple of its own, where a series without a ramp is expected."""
    series, found = geometric(Measured(due.theta, 1e-14 * due.theta), due.e), geometric(measured, due.e)
    if found is None or series is None:
        return None
    (a, base), (first, ratio), r = found, series, due.rope.width
    power, multiple = math.log(base) / math.log(ratio), a / first
    if abs(power - 1) < 1e-5:
        return _multiplied(measured, due, multiple, ratio)
    if abs(multiple - 1) > 1e-4:
        fact = f"the frequencies are {'' if a == 1 else f'{a:.6g} times '}those of base {base:.8g}"
        ntk = isinstance(due.rope.scaling, Linear) and a == 1 and abs(_stretch(base / ratio, r) / multiple - 1) < 1e-3
        due_too = f", {'' if first == 1 else f'{first:.6g} times '}those of base {ratio:.8g} expected"
        return Named("another rescaling: NTK" if ntk else "wrong base", fact + due_too)
    if words := _exponent(due, power):
        return Named("wrong exponent", f"the exponents are {words}, not 2i/{r}")
    if abs(math.log(base / ratio)) * 2 / r < 4 * U32:
        fact = (
            f"the error of the frequencies grows from pair to pair, as in a running product of {base ** (-2 / r):.9g}"
        )
        return Named("recursive frequencies", fact)
    return _base(due, base, ratio)


def _stretch(times: float, r: int) -> float:
    """The stretch of the length for which NTK multiplies the base by so much."""
    return float(times ** ((r - 2) / r)) if r > 2 else 0.0


def _base(due: Meant, base: float, ratio: float) -> Named:
    """Another base; or another stretch of it, if it is stretched."""
    r, scaling = due.rope.width, due.rope.scaling
    stretch = _stretch(base / due.rope.base, r)
    if isinstance(scaling, DynamicNTK):
        fact = f"the base is multiplied by {base / due.rope.base:.6g}, not {ratio / due.rope.base:.6g}"
        length = scaling.original_length * (1 + (stretch - 1) / scaling.factor)
        return Named("dynamic NTK formula", f"{fact}: that is the stretch of length {length:.6g}, not {scaling.length}")
    fact = f"the frequencies are those of base {base:.8g}, {ratio:.8g} expected"
    width = r * math.log(ratio) / math.log(base)
    if abs(width - round(width)) < 1e-3 and round(width) % 2 == 0:
        fact += f"; exponents over {round(width)} would be the same"
    if stretch > 1 and abs(float(f"{stretch:.3g}") / stretch - 1) < 1e-5:
        fact += f"; NTK scaling by {stretch:.3g} would be the same"
    return Named("wrong base", fact)


def _multiplied(measured: Measured, due: Meant, multiple: float, ratio: float) -> Named | None:
    """All frequencies times one number."""
    scaling, shift = due.rope.scaling, -math.log(multiple) / math.log(ratio) * due.rope.width / 2
    if abs(multiple - 1) < 1e-9:
        return None
    if due.rope.axes is None and min(abs(shift - 1), abs(shift - 0.5), abs(shift + 1)) < 1e-4:
        fact = f"pair i has the frequency of pair i {'+' if shift > 0 else '−'} {abs(shift):.2g}"
        return Named(
            "index counted from 1", f"{fact}: the first turns by {measured.theta[0]:.6g}, {due.theta[0]:.6g} expected"
        )
    if unit := next((words for words, value in MULTIPLES.items() if abs(multiple / value - 1) < 1e-4), ""):
        return Named("wrong unit of the angle", f"all angles are multiplied by {unit}")
    by = f"all angles are {rounded(multiple, 4 * U32 + float(measured.relative.min())):.9g} times what is expected"
    if isinstance(scaling, Linear):
        factor = f"factor is {rounded(scaling.factor / multiple, 1e-5):.8g}, {scaling.factor:g} expected"
        return Named("wrong scaling parameter: factor", f"{by}: {factor}")
    if abs(multiple - 2) < 1e-4:
        return Named("rotated twice", f"{by}, as if rotated twice")
    if multiple < 0.99:
        return Named("another rescaling: linear", f"{by}, as by linear scaling by {rounded(1 / multiple, 1e-5):.8g}")
    return Named("angles multiplied", by)


def _exponent(due: Meant, power: float) -> str:
    """What stands in the place of 2i/r, in words, if it is a simple number."""
    r, d = due.rope.width, due.rope.head_dim
    known = {2: "4i/r", 0.5: "i/r", -1: "−2i/r, so that frequencies grow", r / d: f"2i/{d}, over the whole head",
             1 / math.log(10): "those of log₁₀ where ln is meant", 0: "0, so that all pairs turn alike"}  # fmt: skip
    known |= {r / (r + k): f"2i/{r + k}" for k in (-2, -1, 1, 2) if r + k > 0}
    known |= {r / k: f"2i/{k}" for k in range(256, 8193, 256)}
    return next((words for value, words in known.items() if abs(power - value) < 2e-5 and value != 1), "")


# ── One number of a rescaling ────────────────────────────────────────────────────────────────────────────────────────


def _parameter(measured: Measured, due: Meant) -> Named | None:
    """One number of the rescaling that is another, or the base, or both."""
    rope, scaling = due.rope, due.rope.scaling
    bases = dict.fromkeys((rope.base, *_bases(measured, due.e))) if scaling is not None else ()
    for base, changes in [(one, changes) for one in bases for changes in _changes(due, measured, one)]:
        with suppress(ValueError, ZeroDivisionError, OverflowError):
            other = replace(rope, base=base, scaling=replace(scaling, **changes))  # type: ignore[type-var]
            if not measured.fits(frequencies(other), theta_errors(other)):
                continue
            parts = [f"{name} {value}, {getattr(scaling, name)} expected" for name, value in changes.items()]
            if base == rope.base:
                fact = f"the frequencies are as with {'; and '.join(parts)}"
                return Named(f"wrong scaling parameter: {' and '.join(changes)}", fact, other)
            first = f"the frequencies are those of base {base:.8g}, {rope.base:g} expected"
            return Named("wrong base", "; and ".join([first, *parts]), other)
    return None


def _changes(due: Meant, measured: Measured, base: float) -> Iterator[dict[str, Any]]:
    """Other numbers of the rescaling: one of them, or both limits of its ramp; for another base, first none."""
    scaling = due.rope.scaling
    assert scaling is not None
    ends = Ends.of(measured, base**-due.e, scaling)
    if base != due.rope.base:
        yield {}
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        if not isinstance(value, tuple) and value is not None and field.name not in IN_LENGTHS:
            yield from ({field.name: other} for other in _values(field.name, value, scaling, ends))
    for fast, slow in product(*(_limits(scaling, at) for at in (ends.kept, ends.divided))):
        yield dict(zip(LIMITS[type(scaling)], (fast, slow), strict=True))


def _limits(scaling: Scaling, at: tuple[float, ...]) -> list[float]:
    """Limits of a ramp that would end where the frequency without a rescaling is one of these."""
    exact = [getattr(scaling, "original_length", 0) * w / TURN for w in at]
    return [*dict.fromkeys(rounded(limit, step) for limit in exact for step in (0.05, 1e-2, 1e-3))]


class Ends(NamedTuple):
    """Where a measured ramp ends: w, the frequency without a rescaling, there; and what slow pairs are divided by."""

    factor: float
    kept: tuple[float, ...] = ()  # up to here pairs are kept: at least, about, at most
    divided: tuple[float, ...] = ()

    @classmethod
    def of(cls, measured: Measured, w: Array, scaling: Scaling) -> Ends:
        kind = "yarn" if isinstance(scaling, YaRN) else "llama3"
        ramp = fit_ramp(measured, w, kind) if isinstance(scaling, YaRN | Llama3) else None
        if ramp is None:
            return cls(float(w[-1] / measured.theta[-1]))
        if kind == "llama3":
            return cls(ramp.factor, (ramp.one,), (ramp.zero,))
        # YaRN's ends are whole pairs, if they are truncated: so what they come from may be half a pair off.
        i, logs = np.arange(len(w)), np.log(w)
        at = [tuple(np.exp(np.interp([end - 0.5, end, end + 0.5], i, logs)).tolist()) for end in (ramp.one, ramp.zero)]
        return cls(ramp.factor, *at)


def _values(name: str, value: Any, scaling: Scaling, ends: Ends) -> Iterable[Any]:
    """What a number of a rescaling may be instead: as the frequencies suggest, and multiples of what is expected."""
    if isinstance(value, bool):
        return [not value]
    s = getattr(scaling, "factor", 2.0)
    guesses = [value * 2.0**k for k in range(-6, 7)] + [value * s, value / s, 1 / value, value * TURN, value / TURN]
    guesses += [value + 1, value - 1] if name in ("length", "original_length") else []
    guesses += [rounded(ends.factor, step) for step in (1e-3, 1e-5)] if name == "factor" else []
    if isinstance(scaling, YaRN | Llama3):
        fast, slow = (getattr(scaling, field) for field in LIMITS[type(scaling)])
        lengths = [TURN * times / w for times, at in ((fast, ends.kept), (slow, ends.divided)) for w in at]
        guesses += [rounded(length, step) for length in lengths for step in (0.05, 1e-2, 1e-3) if "length" in name]
        guesses += _limits(scaling, (*ends.kept, *ends.divided)) if name in LIMITS[type(scaling)] else []
    whole = isinstance(value, int)
    return dict.fromkeys(round(g) if whole else g for g in guesses if math.isfinite(g) and g > 0 and g != value)


# ── Ramps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ramp(NamedTuple):
    """Between pairs that are kept and pairs that are divided by a factor."""

    factor: float
    one: float  # the pair (YaRN), or the frequency without the rescaling (llama3), up to which pairs are kept
    zero: float  # and from which on they are divided
    theta: Array  # (p,): what it makes of the frequencies


def fit_ramp(measured: Measured, w: Array, kind: str) -> Ramp | None:
    """The ramp of this kind that is nearest to the frequencies, whose powers without one are w (p,)."""
    theta, sign = measured.theta, -1 if kind == "yarn" else 1
    if not (theta > 0).all() or len(theta) < 3 or abs(theta[0] / w[0] - 1) > 1e-3 or slowed(measured, w) <= 1.001:
        return None
    factor = slowed(measured, w)
    kept = (theta / w - 1 / factor) / (1 - 1 / factor)
    inside = (kept > 1e-3) & (kept < 1 - 1e-3)
    if inside.sum() < 2:
        return None
    along, weight = -np.arange(len(w), dtype=float) if kind == "yarn" else w, 1 / (measured.relative + 256 * U32)
    slope, start = np.polyfit(along[inside], kept[inside], 1, w=weight[inside])
    ramp = np.clip(slope * along + start, 0, 1)
    made = w * (ramp + (1 - ramp) / factor)
    return Ramp(factor, float(sign * (1 - start) / slope), float(-sign * start / slope), made) if slope > 0 else None


def slowed(measured: Measured, w: Array) -> float:
    """By how much the slowest pairs are divided, from the one of them that is known best."""
    ratio, off = measured.theta / w, measured.relative + 64 * U32
    alike = np.abs(ratio / ratio[-1] - 1) <= off + off[-1]
    best = int(np.argmin(np.where(alike, off, np.inf)))
    return rounded(float(1 / ratio[best]), max(1e-5, float(off[best])))


def _bases(measured: Measured, e: Array) -> list[float]:
    """Bases that the fastest and the slowest pairs suggest, by themselves."""
    theta, bases = measured.theta, []
    for a, b in ((0, 1), (0, 2), (-2, -1), (-3, -1)) if len(theta) > 3 and (theta > 0).all() else ():
        if e[a] != e[b]:
            base = math.exp(math.log(theta[a] / theta[b]) / (e[b] - e[a]))
            bases += [rounded(base, 1e-3), rounded(base, 1e-5)]
    return [base for base in dict.fromkeys(bases) if 1 < base <= 1e12]


# ── What frequencies are, whatever was expected ──────────────────────────────────────────────────────────────────────


class Explanation(NamedTuple):
    """A rule that has the measured frequencies, in words, and the rope, if the rule implies one."""

    words: str
    rope: Rope | None = None


def guess_rope(measured: Measured, shape: Rope, suspects: Sequence[Rope] = ()) -> list[Explanation]:
    """The rules that explain the frequencies of a rope whose layout, width, direction and axes are those of ``shape``.

    Several rules may have the same frequencies: then all of them are returned.
    """
    named = [Explanation(f"as {rope!r}", rope) for rope in suspects if measured.fits(frequencies(rope), RAMPS)]
    turning, e = measured.turning, exponents(shape)
    count = int(turning.sum())
    if named or not turning[:count].all() or not count:
        return named
    measured, e = measured.part(turning), e[turning]
    if count == 1 and not e.any():
        theta = measured.theta[0]
        how = "any base without rescaling" if measured.fits([1.0]) else f"linear factor {1 / theta:.6g}"
        return [Explanation(f"one pair, which turns by {rounded(theta, 1e-6):.6g}: {how}; its base does not show")]
    if (found := geometric(measured, e)) is not None:
        return [_series_in_words(measured, shape, e, *found)]
    return [] if count < shape.pairs or shape.axes is not None else _blends(measured, shape, e)


def _series_in_words(measured: Measured, shape: Rope, e: Array, a: float, base: float) -> Explanation:
    """The rope of a·base^(−e), if there is one."""
    s, tolerance, count, d = rounded(1 / a, 1e-12), measured.relative + POWERS * U32, len(e), shape.head_dim
    known = float((tolerance[e > 0] / e[e > 0]).min(initial=1))  # how far a base may be off, as each pair tells it
    name, factor = f"base {_give_or_take(base, known)}", _give_or_take(s, float(tolerance[0]), 9)
    if not 1 < base <= 1e12 or s < 1:
        return Explanation(f"{name}, all frequencies times {1 / s:g}, as if rotated {1 / s:g} times")
    if count < shape.pairs:
        fraction = next(f for f in (2 * count / d, (2 * count + 0.5) / d) if int(f * d // 2) == count)
        rope = replace(shape, base=base, scaling=Proportional(fraction, s)) if shape.width == d else None
        return Explanation(f"proportional, {name}" + (f", factor {factor}" if s != 1 else ""), rope)
    if s == 1:
        words = f"{name}, not rescaled (NTK scaling of a smaller base, at a fixed length, is the same)"
        return Explanation(words, replace(shape, base=base))
    words = f"{name}, linear scaling by {factor} (rotated twice with linear factor {2 * s:.9g} is the same)"
    return Explanation(words, replace(shape, base=base, scaling=Linear(s)))


def _give_or_take(value: float, known: float, digits: int = 6) -> str:
    """A number, with what it may be off by where that shows; ``known`` is relative to it."""
    return f"{value:.{digits}g}" + (f" ± {float(f'{value * known:.2g}'):g}" if known > 5e-5 else "")


def _blends(measured: Measured, shape: Rope, e: Array) -> list[Explanation]:
    """YaRN and llama3: fast pairs kept, slow ones divided by a factor, a ramp between them."""
    for base in dict.fromkeys((*_bases(measured, e), *COMMON_BASES)):
        kinds = (_blend(kind, measured, replace(shape, base=base), base**-e) for kind in ("yarn", "llama3"))
        if found := [blend for blend in kinds if blend is not None]:
            return found
    return []


def _blend(kind: str, measured: Measured, rope: Rope, w: Array) -> Explanation | None:
    """The ramp of this kind, if there is one; with the limits that everybody uses and a power of two as its length, if
    these have it."""
    ramp, s, usual = fit_ramp(measured, w, kind), slowed(measured, w), list[Rope]()
    for length in LENGTHS if 1.001 < s < 1e6 and (measured.theta > 0).all() else ():
        rules: list[Scaling] = [YaRN(s, length), YaRN(s, length, truncate=False)]
        ropes = (replace(rope, scaling=rule) for rule in (rules if kind == "yarn" else [Llama3(s, 1.0, 4.0, length)]))
        usual += [*(one for one in ropes if measured.fits(frequencies(one), RAMPS))][:1]
    if not usual and (ramp is None or not measured.fits(ramp.theta, RAMPS)):
        return None
    slow = np.abs(measured.theta * s / w - 1) < 0.05
    known = float((measured.relative + 64 * U32)[slow].min(initial=1))
    words = f"{kind}, base {rope.base:g}, factor {_give_or_take(s, known)}"
    if ramp is not None:
        where = "pair" if kind == "yarn" else "frequency"
        words += f", ramp from {where} {ramp.one:.4g} to {ramp.zero:.4g} (its lengths and limits show in nothing else)"
    if usual:
        limits = "low 1, high 4" if kind == "llama3" else "betas 32 and 1"
        lengths = " or ".join(str(one.scaling.original_length) for one in usual)  # type: ignore[union-attr]
        words += f"; as with {limits}, original length {lengths}"
    return Explanation(words, usual[0] if usual else None)


def _published(measured: Measured, due: Meant) -> Named | None:
    """A published rule that is not expected."""
    for words, rope in guess_rope(measured, replace(due.rope, scaling=None)):
        if rope == due.rope:  # which it is nearly, but not within its rounding
            continue
        kind = "" if rope is None or rope.scaling is None else f": {RULES[type(rope.scaling)]}"
        return Named(f"another rescaling{kind}", f"the frequencies are those of {words}")
    return None


def _in_words(measured: Measured, due: Meant) -> Named:
    """How far off the frequencies are, where no rule has them."""
    wrong = np.flatnonzero(~right_frequencies(measured, due.rope))
    ratio, more, i = (measured.theta / due.theta)[wrong], (measured.theta - due.theta)[wrong], int(wrong[0])
    digits = next((k for k in range(6, 17) if f"{measured.theta[i]:.{k}g}" != f"{due.theta[i]:.{k}g}"), 17)
    first = f"pair {i} turns by {measured.theta[i]:.{digits}g}, {due.theta[i]:.{digits}g} expected"
    spread = f"{np.nanmin(ratio) - 1:+.2g} to {np.nanmax(ratio) - 1:+.2g} of themselves"
    how = f"{len(wrong)} of {len(due.theta)} frequencies are off, by {spread}: {first}"
    if np.abs(ratio - 1).max() < 2.0**-7:
        size, alike = float(np.abs(more).max()), bool(len(more) > 2 and np.abs(more).min() > np.abs(more).max() / 64)
        bits = (
            f", in fast and slow pairs alike, as in a phase of {round(math.log2(math.pi / size))} bits" if alike else ""
        )
        return Named(
            "inexact frequencies", f"{how}; each position adds up to {size:.2g} to the error of an angle{bits}"
        )
    if isinstance(due.rope.scaling, YaRN | Llama3):
        s = due.rope.scaling.factor
        kept = (measured.theta / due.w - 1 / s) / (1 - 1 / s)
        if (kept > -0.01).all() and (kept < 1.01).all():
            inside = listed(np.flatnonzero((kept > 1e-3) & (kept < 1 - 1e-3)))
            return Named("wrong ramp: another", f"{how}; the ramp is measured in {inside}")
    return Named("wrong frequencies", f"{how}; {listed(wrong)}")
