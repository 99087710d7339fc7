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
from ..theta import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, Scaling, YaRN, frequencies
from .candidate import BITS
from .positions import TURN, wrapped
from .responses import narrowed
from .tolerance import U32, angle_errors, exponents, theta_errors

TOP = 2**16  # the position that rates of angles are taken at
POWERS = 80  # roundings of a float32 power, which some make by a logarithm
RAMPS = 300  # and of a blend of two of them
RULES = {
    Linear: "linear", DynamicNTK: "NTK", YaRN: "YaRN", LongRoPE: "LongRoPE", Llama3: "llama3",
    Proportional: "proportional",
}  # fmt: skip
COMMON_BASES = (10000.0, 500000.0, 1e6, 150000.0, 1e5, 25000.0, 5e6, 1e7)
LENGTHS = tuple(2**k for k in range(8, 21))
# Of a rescaling: what is not in the frequencies, and what the ends of a ramp tell.
ELSEWHERE = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "low", "high")
KINDS = {"linear in the pair": "yarn", "linear in the frequency": "llama3"}  # of ramps
MULTIPLES = {  # of all angles
    "2π": TURN, "π": math.pi, "1/2π": 1 / TURN, "1/π": 1 / math.pi, "π/180": math.pi / 180, "180/π": 180 / math.pi,
}  # fmt: skip


class Named(NamedTuple):
    """A mistake in the frequencies: its name, the fact, and the rope that has them, if that is known."""

    fault: str
    fact: str
    rope: Rope | None = None


class Meant(NamedTuple):
    """The expected rope, in the width that was measured."""

    rope: Rope
    theta: Array  # (p,)
    w: Array  # (p,): without a rescaling
    e: Array  # (p,): w = base^(−e)


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


def meant(rope: Rope, width: int) -> Meant:
    """A rope in another width; without its rescaling and its axes, if these are for its own width alone."""
    if width != rope.width:
        plain = replace(rope, scaling=None, axes=None, rotary_dim=width)
        with suppress(ValueError):
            plain = replace(rope, rotary_dim=width)
        rope = plain
    e = exponents(rope)
    return Meant(rope, frequencies(rope), rope.base**-e, e)


def span(theta: Array) -> str:
    return f"{theta[0]:.7g} … {theta[-1]:.7g}" if len(theta) else "none"


def listed(indices: Any, what: str = "pair") -> str:
    """Pairs in a few words."""
    some = [int(i) for i in indices]
    if len(some) > 2 and some == [*range(some[0], some[-1] + 1)]:
        return f"{what}s {some[0]} to {some[-1]}"
    return f"{what}{'s' * (len(some) != 1)} {', '.join(map(str, some[:6]))}{', …' * (len(some) > 6)}"


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
        near = np.abs(theta - narrowed(theta, bits)) <= 4 * measured.unsure + 16 * U32 * np.abs(theta)
        if name == "float16":  # below its normal numbers it has a fixed step
            steps = np.abs(theta) * 2.0**24
            near |= (steps < 1024) & (np.abs(steps - np.rint(steps)) <= 4 * measured.unsure * 2.0**24 + 1e-3)
        if known.sum() >= 4 and near[known].all():
            return name
    return ""


# ── What is wrong with frequencies, beside those that are expected ───────────────────────────────────────────────────


def name_frequencies(measured: Measured, due: Meant) -> Named | None:
    """What is wrong with the frequencies; None if nothing is."""
    if right_frequencies(measured, due.rope).all():
        return None
    with np.errstate(all="ignore"):
        ways = (_narrow, _still, _of_others, _variant, _geometric, _listed, _parameter, _other_ramp, _published)
        return next((named for way in ways if (named := way(measured, due)) is not None), _in_words(measured, due))


def right_frequencies(measured: Measured, rope: Rope) -> Array:
    """Which of them are as near as those of a float32 pipeline: exact where θ is 1, bool (p,)."""
    rate = angle_errors(rope, np.array([[TOP]]))[0] / TOP
    return np.asarray(np.abs(wrapped(measured.theta - frequencies(rope))) <= 4 * measured.unsure + 1.001 * rate)


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
    p = len(due.theta)
    near = np.array([measured.part(i).near(due.theta) for i in range(p)])
    whose = np.where(near.diagonal(), np.arange(p), np.argmax(near, axis=1))
    moved = np.flatnonzero(whose != np.arange(p))
    if not near.any(axis=1).all() or not len(moved) or len(set(whose.tolist())) < max(2, p // 3) or p < 3:
        return None
    order = ", ".join(f"pair {i} that of pair {whose[i]}" for i in moved[:3])
    if (whose == np.arange(p)[::-1]).all():
        order = "they are in reverse order, the slowest first"
    return Named(
        "frequencies in another order", f"{len(moved)} of {p} pairs have the frequency of another one: {order}"
    )


def _variant(measured: Measured, due: Meant) -> Named | None:
    errors = np.maximum(theta_errors(due.rope), RAMPS)
    plain = {"scaling ignored": replace(due.rope, scaling=None)}
    fitting = ((fault, fact) for fault, fact, theta in _variants(due) if measured.fits(theta, errors))
    return next((Named(fault, fact, plain.get(fault)) for fault, fact in fitting), None)


def _variants(due: Meant) -> Iterator[tuple[str, str, Array]]:
    """Other frequencies that a rope's own numbers make: the mistake, the fact, θ."""
    rope, theta, w, _ = due
    if rope.axes is not None:
        yield from _series(rope)
    if rope.scaling is None:
        return
    rule, ratio = f"{RULES[type(rope.scaling)]} scaling", theta / w
    if isinstance(rope.scaling, Proportional):
        fact = f"all {rope.head_dim} features turn, not {2 * np.count_nonzero(theta)}"
        yield "whole head rotated", fact, w / rope.scaling.factor
    yield "scaling ignored", f"the frequencies are those without {rule}, {span(w)}, not {span(theta)}", w
    yield "scaling applied twice", f"the effect of {rule} on the frequencies is squared", w * ratio**2
    yield "scaling inverted", f"frequencies are multiplied where {rule} divides them", w / ratio


def _series(rope: Rope) -> Iterator[tuple[str, str, Array]]:
    """Of axes: one series for all of them, or one for each."""
    assert rope.axes is not None
    owners = tuple(axis for axis, _ in rope.axes.assign(rope.pairs))
    ways = {
        "one series runs over all axes": ("listed", owners, "shared"),
        "each axis has a series of its own": ("listed", owners, "own"),
        "the series is dealt as in Qwen2-VL's vision part": ("axial",),
        "the series is dealt as in Pixtral": ("pixtral",),
    }
    for words, way in ways.items():
        with suppress(ValueError):
            other = Axes(*way)  # type: ignore[arg-type]
            if tuple(axis for axis, _ in other.assign(rope.pairs)) == owners:
                yield "series of the axes", words, frequencies(replace(rope, axes=other))


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


def _geometric(measured: Measured, due: Meant) -> Named | None:
    """A base, an exponent, or a multiple of its own, where a series without a ramp is expected."""
    series, found = geometric(Measured(due.theta, 1e-14 * due.theta), due.e), geometric(measured, due.e)
    if found is None or series is None:
        return None
    (a, base), (first, ratio), rope = found, series, due.rope
    power, multiple = math.log(base) / math.log(ratio), a / first
    if abs(power - 1) < 1e-5:
        return _multiplied(measured, due, multiple, ratio)
    got, expected = (f"{'' if k == 1 else f'{k:.6g} times '}those of base {b:.8g}" for k, b in (found, series))
    fact = f"the frequencies are {got}, {expected} expected"
    if a < 1 and base == rope.base:
        return Named("another rescaling: linear", fact)
    if abs(multiple - 1) < 1e-4 and (words := _exponent(due, power)):
        return Named("wrong exponent", f"the exponents are {words}, not 2i/{rope.width}")
    if isinstance(rope.scaling, DynamicNTK) and a == 1:
        return Named("dynamic NTK formula", _stretch(due, base / rope.base, ratio / rope.base))
    return Named("wrong base", fact)


def _multiplied(measured: Measured, due: Meant, multiple: float, ratio: float) -> Named | None:
    """All frequencies times one number."""
    scaling, shift = due.rope.scaling, -math.log(multiple) / math.log(ratio) * due.rope.width / 2
    if abs(multiple - 1) < 1e-9:
        return None
    by = f"all angles are {rounded(multiple, 4 * U32 + float(measured.relative.min())):.9g} times what is expected"
    if due.rope.axes is None and min(abs(shift - 1), abs(shift - 0.5), abs(shift + 1)) < 1e-4:
        fact = f"pair i has the frequency of pair i {'+' if shift > 0 else '−'} {abs(shift):.2g}"
        return Named("index counted from 1", f"{fact}: {by}")
    if unit := next((words for words, value in MULTIPLES.items() if abs(multiple / value - 1) < 1e-4), ""):
        return Named("wrong unit of the angle", f"all angles are multiplied by {unit}")
    if isinstance(scaling, Linear):
        factor = f"factor is {rounded(scaling.factor / multiple, 1e-5):.8g}, {scaling.factor:g} expected"
        return Named("wrong scaling parameter: factor", f"{by}: {factor}")
    if abs(multiple - 2) < 1e-4:
        return Named("rotated twice", f"{by}, as if rotated twice")
    return Named("another rescaling: linear" if multiple < 0.99 else "angles multiplied", by)


def _exponent(due: Meant, power: float) -> str:
    """What stands in the place of 2i/r, in words, if it is a simple number."""
    r, d = due.rope.width, due.rope.head_dim
    known = {2: "4i/r", 0.5: "i/r", -1: "−2i/r, so that frequencies grow", r / d: f"2i/{d}, over the whole head",
             1 / math.log(10): "those of log₁₀ where ln is meant", 0: "0, so that all pairs turn alike"}  # fmt: skip
    known |= {r / k: f"2i/{k}" for k in (r - 2, r - 1, r + 1, r + 2, *range(256, 8193, 256)) if k > 0}
    return next((words for value, words in known.items() if abs(power - value) < 2e-5 and value != 1), "")


def _stretch(due: Meant, got: float, expected: float) -> str:
    """How the stretch of a base by NTK differs."""
    scaling, r = due.rope.scaling, due.rope.width
    assert isinstance(scaling, DynamicNTK)
    s, n = scaling.factor, max(scaling.length or 0, scaling.original_length) / scaling.original_length
    g, k = s * n - (s - 1), r / max(r - 2, 1)
    ways = {"without the exponent r/(r − 2)": g, "with the exponent (r − 2)/r": g ** (1 / k),
            "of factor·N/L, without − (factor − 1)": (s * n) ** k, "of the factor, whatever the length": s**k,
            "of N/L, without the factor": n**k}  # fmt: skip
    way = next((f": the stretch {words}" for words, value in ways.items() if abs(got / value - 1) < 1e-4), "")
    return f"the base is multiplied by {got:.6g}, not {expected:.6g}{way}"


# ── Rescalings: other numbers, other lists, other ramps ──────────────────────────────────────────────────────────────


def _parameter(measured: Measured, due: Meant) -> Named | None:
    """One number of the rescaling that is another, or the base, or both."""
    rope, scaling = due.rope, due.rope.scaling
    if scaling is None:
        return None
    for base in dict.fromkeys((rope.base, *_bases(measured, due.e))):
        changed: list[dict[str, Any]] = [{}] * (base != rope.base)
        for changes in changed + [*_changes(scaling, slowed(measured, base**-due.e))]:
            with suppress(ValueError, ZeroDivisionError, OverflowError):
                other = replace(rope, base=base, scaling=replace(scaling, **changes))
                if not measured.fits(frequencies(other), theta_errors(other)):
                    continue
                parts = [f"{name} {value}, {getattr(scaling, name)} expected" for name, value in changes.items()]
                parts += [f"base {base:.8g}, {rope.base:g} expected"] * (base != rope.base)
                fault = "wrong base" if base != rope.base else f"wrong scaling parameter: {', '.join(changes)}"
                return Named(fault, f"the frequencies are as with {'; and '.join(parts)}", other)
    return None


def _changes(scaling: Scaling, factor: float) -> Iterator[dict[str, Any]]:
    """Other numbers of a rescaling, one at a time: multiples of what is expected, and the factor that was measured."""
    s = getattr(scaling, "factor", 2.0)
    for name, value in ((field.name, getattr(scaling, field.name)) for field in fields(scaling)):
        if name in ELSEWHERE or value is None or isinstance(value, tuple):
            continue
        others: list[Any] = [not value]
        if not isinstance(value, bool):
            times = [*(2.0**k for k in range(-6, 7)), s, 1 / s, TURN, 1 / TURN, 1 / value**2]
            others = [value * by for by in times]
            others += [factor] if name == "factor" else []
            others = [round(one) for one in (*others, value + 1, value - 1)] if isinstance(value, int) else others
        yield from ({name: other} for other in dict.fromkeys(others) if other != value)


def _bases(measured: Measured, e: Array) -> list[float]:
    """Bases that the fastest and the slowest pairs suggest, by themselves."""
    theta, bases = measured.theta, []
    for a, b in ((0, 1), (0, 2), (-2, -1), (-3, -1)) if len(theta) > 3 and (theta > 0).all() else ():
        if e[a] != e[b]:
            base = math.exp(math.log(theta[a] / theta[b]) / (e[b] - e[a]))
            bases += [rounded(base, 1e-3), rounded(base, 1e-5)]
    return [base for base in dict.fromkeys(bases) if 1 < base <= 1e12]


def _listed(measured: Measured, due: Meant) -> Named | None:
    """LongRoPE's lists: what each pair is divided by."""
    scaling, fault = due.rope.scaling, "wrong list of factors"
    if not isinstance(scaling, LongRoPE) or (np.abs(measured.theta / due.theta - 1) < 2.0**-7).all():
        return None
    for name, factors in (("short", scaling.short), ("long", scaling.long)):
        f = np.array(factors)
        uses = {"": f, ", and multiplies": 1 / f, " in reverse": f[::-1], ", squared": f * f}
        uses |= {f", {k:+d} pair": np.roll(f, k) for k in (1, -1)}
        for how, other in uses.items():
            if measured.fits(due.w / other):
                return Named(fault, f"the {name} list is used{how}")
    got, expected = (", ".join(f"{f:.5g}" for f in (due.w / theta)[:4]) for theta in (measured.theta, due.theta))
    return Named(fault, f"the pairs are divided by {got}, …, where {expected}, … are expected")


class Ramp(NamedTuple):
    """Between pairs that are kept and pairs that are divided by a factor."""

    factor: float
    how: str  # what it is linear in; "a step" where it has no width
    kept: float  # the pair at its end where pairs are kept
    divided: float  # and where they are divided

    def words(self, turns: Array) -> str:
        """With how often the pairs at its ends turn within the original length, of those of all pairs (p,)."""
        often = np.interp((self.kept, self.divided), np.arange(len(turns)), turns)
        ends = f"from pair {self.kept:.4g} ({often[0]:.3g} turns) to pair {self.divided:.4g} ({often[1]:.3g} turns)"
        return f"{self.how}, {ends}, divided by {self.factor:.6g}"


def fit_ramp(measured: Measured, w: Array, s: float, first: str = "pair") -> Ramp | None:
    """The ramp, if there is one, of frequencies that are w (p,) without it, and divided by s at its end; ``first`` is
    what it is meant to be linear in."""
    theta, ratio, i = measured.theta, measured.theta / w, np.arange(len(w))
    if len(w) < 3 or not (theta > 0).all() or abs(math.log(s)) < 1e-3:
        return None
    close = measured.relative + RAMPS * U32
    inside = (np.abs(ratio - 1) > close) & (np.abs(ratio * s - 1) > close)
    steps = np.flatnonzero(np.diff(np.abs(ratio - 1) <= close))
    if not inside.any() and len(steps) == 1:
        kept = steps[0] + (abs(ratio[0] - 1) > close[0])
        return Ramp(s, "a step", float(kept), float(2 * steps[0] + 1 - kept))
    along = {"pair": i, "frequency": w, "wavelength": 1 / w}
    shares = {"": (ratio - 1 / s) / (1 - 1 / s), ", of wavelengths": (s - 1 / ratio) / (s - 1)}  # 1: kept, 0: divided
    ways = product(shares.items(), sorted(along, key=lambda name: name != first))
    for (blend, share), over in ways if inside.sum() > 1 else ():
        slope, start = np.polyfit(along[over][inside], share[inside], 1, w=1 / close[inside])
        line = slope * along[over] + start
        made = w / (line + (1 - line) * s) if blend else w * (line + (1 - line) / s)
        if (np.abs(made / theta - 1) <= close)[inside].all():
            order = np.argsort(along[over])
            ends = [(end - start) / slope for end in (1, 0)]
            ends = ends if over == "pair" else [np.interp(end, along[over][order], i[order]) for end in ends]
            return Ramp(s, f"linear in the {over}{blend}", *map(float, ends))
    return None


def slowed(measured: Measured, w: Array) -> float:
    """What the pairs are divided by that are divided the most, from the one of them that is known best."""
    ratio, off = measured.theta / w, measured.relative + 64 * U32
    most = int(np.argmax(np.abs(np.log(np.abs(ratio)))))
    alike = np.abs(ratio / ratio[most] - 1) <= off + off[most]
    best = int(np.argmin(np.where(alike, off, np.inf)))
    return rounded(float(1 / ratio[best]), max(1e-5, float(off[best])))


def _other_ramp(measured: Measured, due: Meant) -> Named | None:
    scaling, first = due.rope.scaling, "pair" if isinstance(due.rope.scaling, YaRN) else "frequency"
    if not isinstance(scaling, YaRN | Llama3):
        return None
    fits = (fit_ramp(measured, due.w, s, first) for s in (scaling.factor, slowed(measured, due.w)))
    got = next((ramp for ramp in fits if ramp is not None), None)
    expected = fit_ramp(Measured(due.theta, 1e-14 * due.theta), due.w, scaling.factor, first)
    if got is None or expected is None:
        return None
    turns = scaling.original_length * due.w / TURN
    fact = f"the ramp is {got.words(turns)}, where it should be {expected.words(turns)}"
    if got.factor < 1:
        return Named("scaling inverted", fact)
    how = "other ends" if got.how == expected.how else got.how
    how = "inverted" if (got.kept < got.divided) != (expected.kept < expected.divided) else how
    return Named(f"wrong ramp: {how}", fact)


def _published(measured: Measured, due: Meant) -> Named | None:
    """A published rule that is not expected."""
    for words, rope in guess_rope(measured, replace(due.rope, scaling=None)):
        if rope != due.rope:  # else it is nearly that one, but not within its rounding
            kind = "" if rope is None or rope.scaling is None else f": {RULES[type(rope.scaling)]}"
            return Named(f"another rescaling{kind}", f"the frequencies are those of {words}")
    return None


def _in_words(measured: Measured, due: Meant) -> Named:
    """How far off the frequencies are, where no rule has them."""
    wrong = np.flatnonzero(~right_frequencies(measured, due.rope))
    ratio, more, i = (measured.theta / due.theta)[wrong], np.abs(measured.theta - due.theta)[wrong], int(wrong[0])
    spread = f"{np.nanmin(ratio) - 1:+.2g} to {np.nanmax(ratio) - 1:+.2g} of themselves"
    first = f"pair {i} turns by {measured.theta[i]:.10g}, {due.theta[i]:.10g} expected"
    how = f"{len(wrong)} of {len(due.theta)} frequencies are off, by {spread}, {listed(wrong)}: {first}"
    if np.abs(ratio - 1).max() >= 2.0**-7:
        return Named("wrong frequencies", how)
    how += f"; each position adds up to {more.max():.2g} to the error of an angle"
    if len(more) > 2 and more.min() > more.max() / 64:
        how += f", in fast and slow pairs alike, as in a phase of {round(math.log2(math.pi / more.max()))} bits"
    return Named("inexact frequencies", how)


# ── What frequencies are, whatever was expected ──────────────────────────────────────────────────────────────────────


class Explanation(NamedTuple):
    """A rule that has the measured frequencies, in words, and the rope, if the rule implies one."""

    words: str
    rope: Rope | None = None


@np.errstate(all="ignore")
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
        s, found, named = slowed(measured, base**-e), dict[str, list[Rope]](), list[Explanation]()
        for words, rule in _usual(s) if 1.001 < s < 1e6 and (measured.theta > 0).all() else ():
            rope = replace(shape, base=base, scaling=rule)
            if measured.fits(frequencies(rope), RAMPS):
                found.setdefault(words, []).append(rope)
        for words, ropes in found.items():
            slow = np.abs(measured.theta / base**-e * s - 1) < 0.05
            factor = _give_or_take(s, float((measured.relative + 64 * U32)[slow].min(initial=1)))
            kind, _, limits = words.partition(", ")
            lengths = " or ".join(str(rope.scaling.original_length) for rope in ropes)  # type: ignore[union-attr]
            as_with = f"as with {limits}, original length {lengths}"
            named.append(Explanation(f"{kind}, base {base:g}, factor {factor}; {as_with}", ropes[0]))
        if named:
            return named
        if s > 1.001 and (ramp := fit_ramp(measured, base**-e, s)) is not None:
            words = f"{KINDS.get(ramp.how, ramp.how)}, base {base:g}, factor {s:.6g}"
            return [Explanation(f"{words}, ramp from pair {ramp.kept:.4g} to {ramp.divided:.4g}")]
    return []


def _usual(s: float) -> Iterator[tuple[str, Scaling]]:
    """Rescalings by this factor with the limits that everybody uses."""
    for length in LENGTHS:
        yield "yarn, betas 32 and 1", YaRN(s, length)
        yield "yarn, betas 32 and 1, not truncated", YaRN(s, length, truncate=False)
        yield "llama3, low 1, high 4", Llama3(s, 1.0, 4.0, length)
