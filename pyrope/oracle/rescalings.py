"""Other frequencies that a rope's own numbers make, as data: what measured frequencies are compared with.

Each variant is a mistake: its name, what was measured if it is the one, and θ (p,).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..backend import Array
from ..theta import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, frequencies

TURN = 2 * math.pi
RULES = {
    Linear: "linear", DynamicNTK: "NTK", YaRN: "YaRN", LongRoPE: "LongRoPE", Llama3: "llama3",
    Proportional: "proportional",
}  # fmt: skip
Variants: TypeAlias = Iterator[tuple[str, str, Array]]


class Meant(NamedTuple):
    """The expected rope, in the width that was measured."""

    rope: Rope
    theta: Array  # (p,)
    w: Array  # (p,): without a rescaling
    e: Array  # (p,): w = base^(−e)


def meant(rope: Rope, width: int) -> Meant:
    """A rope in another width; without its rescaling and its axes, if these are for its own width alone."""
    if width != rope.width:
        plain = replace(rope, scaling=None, axes=None, rotary_dim=width)
        with suppress(ValueError):
            plain = replace(rope, rotary_dim=width)
        rope = plain
    e = exponents(rope)
    return Meant(rope, frequencies(rope), rope.base**-e, e)


def exponents(rope: Rope) -> Array:
    """e of θ = base^(−e) without a rescaling, (p,): 2i/r, or that of the series of its axis."""
    if rope.axes is None:
        return np.arange(rope.pairs) * 2 / rope.width
    dealt = zip(rope.axes.assign(rope.pairs), rope.axes.widths(rope.pairs), strict=True)
    return np.array([2 * j / width for (_, j), width in dealt])


def span(theta: Array) -> str:
    return f"{theta[0]:.7g} … {theta[-1]:.7g}" if len(theta) else "none"


def listed(indices: Any, what: str = "pair") -> str:
    """Pairs in a few words."""
    some = [int(i) for i in indices]
    if len(some) > 2 and some == [*range(some[0], some[-1] + 1)]:
        return f"{what}s {some[0]} to {some[-1]}"
    return f"{what}{'s' * (len(some) != 1)} {', '.join(map(str, some[:6]))}{', …' * (len(some) > 6)}"


def variants(due: Meant) -> Variants:
    rope, theta, w, _ = due
    scaling, ratio = rope.scaling, theta / w
    yield from _series(due)
    if scaling is None:
        return
    rule = f"{RULES[type(scaling)]} scaling"
    if isinstance(scaling, Proportional):
        fact = f"all {rope.head_dim} features turn, not {2 * np.count_nonzero(theta)}"
        yield "whole head rotated", fact, w / scaling.factor
        turning = np.count_nonzero(theta)
        narrow = np.where(theta > 0, rope.base ** -(np.arange(rope.pairs) / turning), 0) / scaling.factor
        yield "wrong exponent", f"the exponents are 2i/{2 * turning}, not 2i/{rope.head_dim}", narrow
    yield "scaling ignored", f"the frequencies are those without {rule}, {span(w)}, not {span(theta)}", w
    yield "scaling applied twice", f"the effect of {rule} on the frequencies is squared", w * ratio**2
    yield "scaling inverted", f"frequencies are multiplied where {rule} divides them", w / ratio
    if isinstance(scaling, YaRN | Llama3) and scaling.factor > 1:
        yield from _ramps(due, scaling)
    if isinstance(scaling, LongRoPE):
        yield from _lists(due, scaling)
    if isinstance(scaling, DynamicNTK):
        yield from _stretches(due, scaling)
    if not isinstance(scaling, Linear | Proportional):
        yield from _exponents(due)


def _exponents(due: Meant) -> Variants:
    """Other exponents, with the rescaling that is expected."""
    rope, theta, _, e = due
    r, d = rope.width, rope.head_dim
    base = float(theta[1] ** (-1 / e[1])) if isinstance(rope.scaling, DynamicNTK) else rope.base  # as it has grown
    others = {"2(i + 1)/r": e + 2 / r, "(2i + 1)/r": e + 1 / r, "i/r": e / 2, "4i/r": 2 * e, f"2i/{d}": e * r / d}
    if r > 2:
        others["2i/(r − 2)"] = e * r / (r - 2)
    for words, other in others.items():
        fault = "index counted from 1" if "1)" in words else "wrong exponent"
        yield fault, f"the exponents are {words}, not 2i/{r}", base**-other * (theta / base**-e)


def _series(due: Meant) -> Variants:
    """Of axes: one series for all of them, or one for each."""
    rope, axes = due.rope, due.rope.axes
    if axes is None:
        return
    owners = [axis for axis, _ in axes.assign(rope.pairs)]
    within = np.array([owners[:i].count(axis) for i, axis in enumerate(owners)])
    count = np.array([owners.count(axis) for axis in owners])
    each, shared = rope.base ** -(within / count), rope.base ** -(np.arange(rope.pairs) / rope.pairs)
    name = "series of the axes"
    if not axes.sections:
        other = replace(axes, style="axial" if axes.style == "pixtral" else "pixtral")
        fact = f"the frequencies are dealt as with the axes {other.style!r}, not {axes.style!r}"
        yield name, fact, frequencies(replace(rope, axes=other))
    yield name, "each axis has a series of its own, base^(−j/k) for its k pairs, not one that runs over all", each
    yield name, "each axis begins again with θ₀, θ₁, … of the series over all pairs", shared[within]
    yield name, "one series runs over all axes, where each has its own", shared


def _ramps(due: Meant, scaling: YaRN | Llama3) -> Variants:
    """Other ramps between the pairs that are kept and those that are divided by s."""
    _, theta, w, _ = due
    s = scaling.factor
    kept = np.clip((theta / w - 1 / s) / (1 - 1 / s), 0, 1)
    inside = (kept > 1e-9) & (kept < 1 - 1e-9)
    swapped = ", as with beta_fast and beta_slow exchanged" if isinstance(scaling, YaRN) else ""
    shapes = {
        f"inverted: fast pairs are divided and slow ones kept{swapped}": 1 - kept,
        f"inverted: the blend is inverted within the ramp, {listed(np.flatnonzero(inside))}": np.where(
            inside, 1 - kept, kept
        ),
    }
    shapes |= _yarn_ramps(due, scaling) if isinstance(scaling, YaRN) else _llama3_ramps(w, scaling)
    for words, t in shapes.items():
        name, _, fact = words.partition(": ")
        yield f"wrong ramp: {name}", fact, w * (t + (1 - t) / s)
    slower, faster = w / (kept + (1 - kept) * s), w * (kept + (1 - kept) * s)
    yield "wrong ramp: of wavelengths", "within the ramp wavelengths are blended, where frequencies are meant", slower
    yield "scaling inverted", f"slow pairs are multiplied by {s:g} where they should be divided by it", faster


def _yarn_ramps(due: Meant, scaling: YaRN) -> dict[str, Array]:
    """What each pair keeps, (p,), by a name and the fact."""
    i, fast, slow = np.arange(len(due.w)), scaling.beta_fast, scaling.beta_slow
    turns, last = scaling.original_length * due.w / TURN, len(i) - 1

    def pair(times: float) -> float:  # that turns so often within the original length
        return due.rope.width * math.log(scaling.original_length / (TURN * times)) / (2 * math.log(due.rope.base))

    def between(low: float, high: float) -> Array:
        low, high = max(low, 0), min(high, due.rope.width - 1)
        return np.asarray(1 - np.clip((i - low) / (high - low if high != low else 0.001), 0, 1))

    low, high = pair(fast), pair(slow)
    low, high = (math.floor(low), math.ceil(high)) if scaling.truncate else (low, high)
    shapes = {
        f"clamped: the ramp ends at the last pair, {last}": between(low, min(high, last)),
        "betas swapped: the ramp is that of beta_fast and beta_slow exchanged": between(
            math.floor(pair(slow)), math.ceil(pair(fast))
        ),
        f"a step: pairs below {math.ceil(low)} are kept, all others divided": 1.0 * (i < low),
        f"a step: pairs up to {math.floor(high)} are kept, all others divided": 1.0 * (i <= high),
    }
    if fast > slow:
        linear, wave = (turns - slow) / (fast - slow), (1 / turns - 1 / fast) / (1 / slow - 1 / fast)
        shapes["over turns: the ramp is linear in the turns of a pair, not in its index"] = np.clip(linear, 0, 1)
        shapes["over wavelengths: the ramp is linear in the wavelength, not in the index"] = 1 - np.clip(wave, 0, 1)
    return shapes


def _llama3_ramps(w: Array, scaling: Llama3) -> dict[str, Array]:
    turns, low, high = scaling.original_length * w / TURN, scaling.low, scaling.high
    if low == high:
        return {}
    steps = {
        f"a step: pairs that turn less than {at:g} times are divided, all others kept, without a blend, as with low "
        "and high exchanged": 1.0 * (turns >= at)
        for at in (high, low)
    }
    wave = (1 / turns - 1 / high) / (1 / low - 1 / high)
    return steps | {
        "backwards: the ramp runs from high to low": np.clip((turns - high) / (low - high), 0, 1),
        "not limited: the ramp goes on beyond its ends": (turns - low) / (high - low),
        "over wavelengths: the ramp is linear in the wavelength, not in the frequency": 1 - np.clip(wave, 0, 1),
    }


def _lists(due: Meant, scaling: LongRoPE) -> Variants:
    """Other lists of factors."""
    long = (scaling.length or 0) > scaling.original_length
    fault, expected = "wrong list of factors", "long" if long else "short"
    for name, factors in (("short", scaling.short), ("long", scaling.long)):
        f = np.array(factors)
        if name != expected:
            yield fault, f"the {name} list is used where the {expected} one is expected", due.w / f
            yield fault, f"the {name} list is used, and multiplies the frequencies", due.w * f
        uses = {"in reverse": f[::-1], "squared": f * f, "by their roots": np.sqrt(f)}
        uses |= {"shifted by a pair": np.roll(f, 1), "shifted back by a pair": np.roll(f, -1)}
        uses |= {"one pair late": np.append(f[:1], f[:-1]), "one pair early": np.append(f[1:], f[-1])}
        for words, other in uses.items():
            yield fault, f"the factors of the {name} list are used {words}", due.w / other
    fact = f"all frequencies are divided by {scaling.factor:g}, not each by a factor of its own"
    yield "another rescaling: linear", fact, due.w / scaling.factor


def _stretches(due: Meant, scaling: DynamicNTK) -> Variants:
    """Other formulas for the base of NTK."""
    s, r, d, length = scaling.factor, due.rope.width, due.rope.head_dim, scaling.original_length
    n = max(scaling.length or 0, length) / length
    g, power = s * n - (s - 1), r / (r - 2)
    ways = {
        "without the exponent r/(r − 2)": g,
        "factor·N/L, without − (factor − 1)": (s * n) ** power,
        "N/L, without the factor": n**power,
        "the factor, whatever the length": s**power,
        "factor·N/L − factor": max(s * n - s, 1e-9) ** power,
        "the exponent (r − 2)/r": g ** (1 / power),
        "the exponent r/(r − 1)": g ** (r / (r - 1)),
        "the exponent d/(d − 2)": g ** (d / max(d - 2, 1)),
        "the exponent 1 + 2/r": g ** (1 + 2 / r),
    }
    for words, stretch in ways.items():
        fact = f"the base is multiplied by {stretch:.6g}, not {g**power:.6g}: {words}"
        yield "dynamic NTK formula", fact, (due.rope.base * stretch) ** -due.e
    for words, by in {"the factor": s, "the stretch of the length": g, "N/L": n}.items():
        yield "another rescaling: linear", f"all frequencies are divided by {words}, {by:g}", due.w / by
