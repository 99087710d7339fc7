"""Which published rule, with which numbers, has the frequencies that were measured.

Several rules may have the same frequencies: then all of them are returned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..theta import LAYOUTS, Axes, Linear, Llama3, Proportional, Rope, YaRN, frequencies
from .floats import U32, Float64, Int64, to_bfloat16, to_float16
from .measure import Measured, Pairs
from .recipes import Rounding, as_is, features, features_apart

COMMON_BASES = (10000.0, 500000.0, 1e6, 150000.0, 1e5, 25000.0, 5e6, 1e7)


def possible_bases(theta: Float64, period: int, snap: float = 1e-3) -> tuple[float, ...]:
    """Bases of θ_i = base^(−i/period) that the outermost, the first two, … frequencies suggest, round numbers first.

    Estimates that differ from each other are known no better than that; within it the fewest digits are meant.
    """
    p = len(theta)
    if p < 2 or not (theta > 0).all():
        return ()
    spans = ((0, p - 1), (0, 1), (0, p // 2), (p - 2, p - 1))
    logs = [math.log(theta[a] / theta[b]) * period / (b - a) for a, b in spans if b > a]
    bases = [math.exp(value) for value in logs if 1e-6 < value < 27.7]
    known = min(1e-6, max(logs) - min(logs))  # 10⁻⁶: a float32 power of a large base
    choices = (value for base in bases for value in (rounded(base, snap), rounded(base, known), base))
    return tuple(dict.fromkeys(value for value in choices if 1 < value <= 1e12))


def rounded(value: float, tolerance: float, most: int = 8) -> float:
    """The number of the fewest digits within a relative tolerance; the value itself, if it needs more than ``most``."""
    for digits in range(1, most + 1):
        short = float(f"{value:.{digits - 1}e}")
        if abs(short - value) <= tolerance * abs(value):  # not a quotient: the value may be 0
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
        known = uncertainty < np.abs(theta) * 2.0 ** (-bits - 6)  # so that it is no number of that dtype by chance
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
            return [Explanation("one pair, which turns by 1: any base without rescaling; its base does not show")]
        return [
            Explanation(f"one pair, which turns by {theta[0]:.6g}: linear factor {slower:.6g}; its base does not show")
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
    first, slower = float(tolerance[0]), abs(theta[0] - 1) > tolerance[0]
    factors = dict.fromkeys(_factors(float(theta[0]), first) if slower else (1.0,))
    measured = possible_bases(theta, period, snap)
    # How far a base may be off: each pair i tells it to period/i times what is known of its own frequency.
    known = float(((tolerance + first * slower)[1:] * period / np.arange(1, p)).min())
    common = sorted(COMMON_BASES, key=lambda base: abs(math.log(base / measured[0]))) if measured else []
    for base, s in itertools.product((*common, *measured), factors):
        w = base ** -(np.arange(p) / period)
        if not fits(w / s):
            continue
        name = f"base {_give_or_take(base, known)}"
        factor = _give_or_take(s, first, 9)
        if apart:
            fraction = next(f for f in (2 * p / d, (2 * p + 0.5) / d) if int(f * d // 2) == p)
            words = f"proportional, {name}" + (f", factor {factor}" if s != 1 else "")
            yield Explanation(words, replace(rope, base=base, scaling=Proportional(fraction, s)) if s >= 1 else None)
        elif s == 1:
            words = f"{name}, not rescaled (NTK scaling of a smaller base, at a fixed length, is the same)"
            yield Explanation(words, replace(rope, base=base))
        elif s > 1:
            words = f"{name}, linear scaling by {factor} (rotated twice with linear factor {2 * s:.9g} is the same)"
            yield Explanation(words, replace(rope, base=base, scaling=Linear(s)))
        else:
            yield Explanation(f"{name}, all frequencies times {1 / s:g}, as if rotated {1 / s:g} times")
        return


def _factors(theta: float, tolerance: float) -> Iterator[float]:
    """By how much a pair may be slowed down that would turn by 1, from how fast it turns, known to 80 roundings more.

    Few digits are meant, where the frequency does not say otherwise; else they are all that were measured.
    """
    measured = 1 / theta
    known = max(tolerance - 80 * U32, 0.0)
    near = rounded(measured, known + 4 * U32)  # of 1/s, or m/s, in float32
    yield near if is_round(near) else rounded(measured, known, 12)
    yield from (rounded(measured, max(step, tolerance)) for step in (1e-4, 1e-6))


def is_round(factor: float) -> bool:
    """Whether a factor has so few digits that it is met by no chance."""
    return factor == float(f"{factor:.5g}")


def _give_or_take(value: float, known: float, digits: int = 6) -> str:
    """A number, with what it may be off by where that shows; ``known`` is relative to it."""
    return f"{value:.{digits}g}" + (f" ± {float(f'{value * known:.2g}'):g}" if known > 5e-5 else "")


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
        blends = []
        for name, along in (("yarn", -i.astype(float)), ("llama3", w)):
            line = np.polyfit(along[inside], kept[inside], 1, w=weight[inside]) if inside.sum() > 1 else None
            ramp = np.clip(kept if line is None else np.polyval(line, along), 0, 1)
            usual = _usual(name, replace(rope, base=base), s, measured, fits)
            if usual or (fits(w * (ramp + (1 - ramp) / s)) and (line is None or line[0] > 0)):
                factor = _give_or_take(s, float(_relative(measured)[np.abs(ratio * s - 1) < 0.05].min(initial=1)))
                blends.append(_blend(name, base, factor, line, usual, int((kept > 0.5).sum())))
        if blends:
            yield from blends
            return


def slowed(ratio: Float64, measured: Measured, among: int | None = None) -> float:
    """1 over the ratio of the slowest pairs (among the first ones), from the one of them that is known best."""
    off = _relative(measured)[:among]
    alike = np.abs(ratio / ratio[-1] - 1) <= off + off[-1]
    best = int(np.argmin(np.where(alike, off, np.inf)))
    return rounded(1 / float(ratio[best]), max(1e-5, float(off[best])))


def _relative(measured: Measured) -> Float64:
    """How far the measured frequencies may be off, relative to them."""
    return np.asarray(4 * measured.uncertainty / np.maximum(np.abs(measured.theta), 1e-300) + 64 * U32)


def _blend(name: str, base: float, factor: str, line: Any, usual: Sequence[Rope], kept: int) -> Explanation:
    words = f"{name}, base {base:g}, factor {factor}"
    if line is None:
        words += f", without a ramp: pairs up to {kept - 1} are kept, those after it slowed down"
    else:
        sign, where = (-1, "pair") if name == "yarn" else (1, "frequency")
        one, zero = sign * (1 - line[1]) / line[0], -sign * line[1] / line[0]
        words += f", ramp from {where} {one:.4g} to {zero:.4g} (its lengths and limits show in nothing else)"
    if usual:
        limits = "low 1, high 4" if name == "llama3" else "betas 32 and 1"
        lengths = " or ".join(str(rope.scaling.original_length) for rope in usual)  # type: ignore[union-attr]
        words += f"; as with {limits}, original length {lengths}"
    return Explanation(words, usual[0] if usual else None)


def _usual(name: str, rope: Rope, s: float, measured: Measured, fits: Any) -> list[Rope]:
    """Ropes with the limits that everybody uses and a power of two as their length that have these frequencies."""
    usual = []
    for length in (2**k for k in range(8, 21)):
        choices: list[Any] = [Llama3(s, 1.0, 4.0, length)]
        if name == "yarn":
            choices = [YaRN(s, length, truncate=truncate) for truncate in (True, False)]
        ropes = (replace(rope, scaling=scaling) for scaling in choices)
        if match := next((r for r in ropes if fits(frequencies(r))), None):
            usual.append(_with_factor(match, measured))
    return usual


def _with_factor(rope: Rope, measured: Measured) -> Rope:
    """The rope, with the attention factor that was measured if YaRN's own is another."""
    same = abs(rope.attention_factor / measured.factor - 1) <= measured.unit + 1e-5
    if same or not isinstance(rope.scaling, YaRN):
        return rope
    factor = rounded(measured.factor, measured.unit / 4)
    return replace(rope, scaling=replace(rope.scaling, attention_factor=factor))


def rules_of_axes(measured: Measured, head_dim: int, axis: Int64, count: int) -> list[Explanation]:
    """The rules that explain what was measured of pairs that these of so many axes turn, (p,); as `rules`, with axes.

    One series of frequencies is taken: that of all pairs, or of the axis that has the most of them. A rule explains it
    if, with the same numbers, it has the frequencies of all pairs.
    """
    layout, width, placement, _ = layout_of(measured.pairs, head_dim)
    p = len(axis)
    if layout == "none":
        return []
    found = []
    for axes in _dealings(axis, count):
        index = np.array([j for _, j in axes.assign(p)])
        own = axis == np.bincount(axis).argmax() if axes.series == "own" or axes.style == "axial" else axis >= 0
        order = np.flatnonzero(own)[np.argsort(index[own])]
        series = measured._replace(theta=measured.theta[order], uncertainty=measured.uncertainty[order])
        shape = Rope(2 * len(order), 10000.0, layout, direction=measured.direction)
        for words, rope in explain(series, shape, len(order)):
            if rope is None or not isinstance(rope.scaling, Linear | None) and len(order) < p:
                continue
            whole = Rope(head_dim, rope.base, layout, width, placement, rope.scaling, axes, measured.direction)
            expected = frequencies(whole)
            if (np.abs(measured.theta - expected) <= 4 * measured.uncertainty + 256 * U32 * expected).all():
                found.append(Explanation(words, whole))
        if found:
            break
    return found


def _dealings(axis: Int64, count: int) -> Iterator[Axes]:
    """The ways to say that these of so many axes turn the pairs, the simplest first."""
    p, counts = len(axis), np.bincount(axis, minlength=count).tolist()
    styles = [Axes(style, counts) for style in ("sections", "interleaved")] if len(counts) > 1 else []
    styles = [axes for axes in styles if [a for a, _ in axes.assign(p)] == axis.tolist()]
    if p > 1 and set(axis.tolist()) == set(range(len(counts))):
        styles.append(Axes("listed", axis.tolist()))
    yield from styles[:1]
    if p % 2 == 0 and count == 2 and axis.tolist() == [0] * (p // 2) + [1] * (p // 2):
        yield from (Axes("axial"), Axes("pixtral"))
    yield from (replace(axes, series="own") for axes in styles[:1])


def layout_of(pairs: Pairs, head_dim: int) -> tuple[str, int, str, int]:
    """Layout, rotary width, placement and distance of the halves; "none" where no layout has these pairs."""
    k = len(pairs.reads)
    if not k:
        return "none", 0, "prefix", 0
    distance = int(pairs.reads[0, 1] - pairs.reads[0, 0])
    for layout in LAYOUTS:
        for start in (0, head_dim - 2 * k):
            reads, writes = features(layout, k, start)
            if np.array_equal(reads, pairs.reads) and np.array_equal(writes, pairs.writes):
                return layout, 2 * k, "prefix" if start == 0 else "suffix", k
    if all(np.array_equal(features_apart(k, head_dim // 2), side) for side in (pairs.reads, pairs.writes)):
        return "half", 2 * k, "prefix", head_dim // 2
    return "none", 2 * k, "prefix", distance


def rules(
    measured: Measured, head_dim: int, suspects: Sequence[Rope] = (), rounding: Rounding = as_is
) -> list[Explanation]:
    """The rules that explain what was measured; none where no layout has these pairs."""
    layout, width, placement, distance = layout_of(measured.pairs, head_dim)
    if layout == "none":
        return []
    spans_head = distance == head_dim // 2
    shape = Rope(head_dim, 10000.0, layout, head_dim if spans_head else width, placement, direction=measured.direction)
    return explain(measured, shape, distance, suspects, rounding)
