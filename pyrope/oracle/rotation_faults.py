"""The known mistakes: how each shows, where it comes from, what mends it, where it happened, and a way to make it.

A fault of the operator is a change of a `Recipe`: it makes broken candidates, and it is the hypothesis that the oracle
compares a black box with. A fault of behaviour (a skipped head, a state, …) wraps a right candidate; `Probe` sees it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..theta import LENGTH_DEPENDENT, Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, frequencies
from .ask import Candidate
from .explain import Change, Fault
from .floats import Float64, Int64, to_bfloat16, to_float16
from .probe import DEFAULT_MAX_POSITION, along_axes, probe_positions
from .recipes import (
    BACKWARDS,
    FORWARDS,
    Block,
    OnOneAxis,
    fast_cos_sin,
    features,
    features_apart,
    frequency_order,
    half_turn_cos_sin,
    recipe_of,
    reduced_cos_sin,
)
from .tolerance import angle_bound


class Measurements(NamedTuple):
    """What was measured of a candidate, for the mistakes that have a number of their own."""

    bases: tuple[float, ...] = ()  # bases that may explain its frequencies
    stretches: tuple[float, ...] = ()  # by how much its pairs are slower than without any rescaling
    offset: int | None = None
    offsets: tuple[int | None, ...] = ()  # of the pairs of each axis
    factor: float | None = None
    length: int | None = None  # the first position that is wrong, if some before it are right
    lengths: tuple[int | None, ...] = ()  # the same of each axis alone
    axis: Int64 | None = None  # (p,): which axis turns each pair
    rules: tuple[str, ...] = ()  # published rules that explain its frequencies, in words
    theta: Float64 | None = None  # its frequencies, if there are such rules
    block: Block | None = None  # its 2 × 2 blocks, if all pairs have the same
    width: int | None = None  # how many of its features turn
    turning: Any = None  # (p,): which of the expected pairs turn, where all that turn are among these
    growth: Float64 | None = None  # (p,): by how much its pairs grow with the position, if they do
    turn: float | None = None  # what it takes for 2π where it reduces angles, if its first pair shows another number
    narrow: str = ""  # the dtype that all its frequencies are numbers of, if that is a narrow one
    narrow_theta: Float64 | None = None  # these frequencies


Changes: TypeAlias = Callable[[Rope, Measurements | None], Iterable[Change]]
Wrap: TypeAlias = Callable[[Candidate, Rope], Candidate | None]


def _ways(changes: Changes, of_axes: bool, rope: Rope, measured: Measurements | None = None) -> list[Change]:
    """The ways to make a mistake with this rope; none where it would change nothing."""
    if of_axes and rope.axes is None:
        return []
    if of_axes or rope.axes is None:
        return _possible(changes, rope, measured)
    return [*_dealt(changes, rope, measured), *_on_one_axis(changes, rope, measured)]


def _dealt(changes: Changes, rope: Rope, measured: Measurements | None) -> Iterator[Change]:
    """Changes of a rope without axes for this one, its pairs as many: each has the frequency that it would have in a
    head as wide as its series. Where a series is not changed, such as one of one pair, it is right."""
    widths, plain, order = _dealing(rope).widths(rope.pairs), replace(rope, axes=None), frequency_order(rope)
    narrower = {r: dict(_possible(changes, replace(plain, rotary_dim=r), measured)) for r in {*widths} - {rope.width}}
    for note, fields in _possible(changes, plain, measured):
        if "theta" in fields:
            if len(fields["theta"]) != rope.pairs:
                continue
            theta = frequencies(rope).copy()
            for r in {*widths}:
                own, part = np.array(widths) == r, fields if r == rope.width else narrower[r].get(note, {})
                theta[own] = part["theta"][order[own]] if "theta" in part else theta[own]
            fields = {**fields, "theta": theta}
        yield Change(note, fields)


def _possible(changes: Changes, rope: Rope, measured: Measurements | None) -> list[Change]:
    try:
        return list(changes(rope, measured))
    except ValueError:  # a rope that cannot be, such as LongRoPE's lists with another width
        return []


def _on_one_axis(changes: Changes, rope: Rope, measured: Measurements | None) -> Iterator[Change]:
    """Changes of the positions alone, made on one of the axes."""
    for axis in range(_dealing(rope).count):
        if measured is not None:
            measured = measured._replace(offset=measured.offsets[axis] if measured.offsets else None)
            measured = measured._replace(length=measured.lengths[axis] if measured.lengths else measured.length)
        for note, fields in _possible(changes, replace(rope, axes=None), measured):
            if fields.keys() == {"place"}:
                yield Change(f"{note or 'so'}, on axis {axis} alone", {"place": OnOneAxis(fields["place"], axis)})


def _broken(
    ways: Callable[[Rope], list[Change]], right_in: tuple[str, ...], rope: Rope, dtype: Any = np.float32
) -> Candidate | None:
    """A candidate with a mistake of the operator, or None where the mistake has no effect on this rope."""
    if np.dtype(dtype).name in right_in:
        return None
    length = rope.scaling.length if isinstance(rope.scaling, LENGTH_DEPENDENT) else None
    positions = np.roll(probe_positions(max(length - 1, 1) if length else DEFAULT_MAX_POSITION), 5)  # not from 0 on
    x = np.random.default_rng(0).standard_normal((len(positions), rope.head_dim))
    positions = along_axes(positions, None if rope.axes is None else rope.axes.count)
    right = recipe_of(rope)
    for _, fields in ways(rope):
        wrong = replace(right, **fields)
        if not np.allclose(wrong.predict(x, positions), right.predict(x, positions), rtol=0, atol=1e-5):
            return wrong.candidate()
    return None


def _misbehaving(wrap: Wrap, rope: Rope, dtype: Any = np.float32) -> Candidate | None:
    """A right candidate with a mistake of behaviour."""
    return wrap(recipe_of(rope).candidate(), rope)


FAULTS: dict[str, Fault] = {}
GENERIC = True


def _add(
    name: str, symptom: str, cause: str, fix: str, happened: str, changes: Changes, generic: bool = False, *,
    of_axes: bool = False, right_in: tuple[str, ...] = (),
) -> None:  # fmt: skip
    ways = partial(_ways, changes, of_axes)
    make = partial(_broken, ways, right_in)
    FAULTS[name] = Fault(name, symptom, cause, fix, happened, "rotation", ways, make, generic, right_in)


def _add_behaviour(name: str, symptom: str, cause: str, fix: str, happened: str, wrap: Wrap) -> None:
    FAULTS[name] = Fault(name, symptom, cause, fix, happened, "behaviour", make=partial(_misbehaving, wrap))


# ── Numbers that the mistakes are made of ────────────────────────────────────────────────────────────────────────────


def _powers(rope: Rope, numerator: Any = None, denominator: float | None = None, base: float | None = None) -> Float64:
    """base^(−2i/r), or with another numerator (p,) or denominator; the base that NTK has grown."""
    if base is None:
        base = _grown_base(rope) if isinstance(rope.scaling, DynamicNTK) else rope.base
    numerator = 2 * np.arange(rope.pairs) if numerator is None else numerator
    return np.asarray(float(base) ** -(numerator / (denominator or rope.width)))


def _grown_base(rope: Rope) -> float:
    """The base that NTK's frequencies have."""
    return float(frequencies(rope)[1] ** (-rope.width / 2))


def _ratio(rope: Rope, w: Float64) -> Float64:
    """Other powers, rescaled as the rope rescales its own."""
    if isinstance(rope.scaling, Llama3):
        return _llama3(w, rope.scaling, rope.scaling.low, rope.scaling.high)
    return np.asarray(w * (frequencies(rope) / _powers(rope)))


def _llama3(w: Float64, s: Llama3 | YaRN, low: float, high: float) -> Float64:
    """A ramp over the turns that a pair makes within the original length; a step where it has no width."""
    turns = s.original_length * w / (2 * np.pi)
    t = np.clip((turns - low) / (high - low), 0, 1) if high != low else turns > low
    return np.asarray(w * ((1 - t) / s.factor + t))


def _yarn_ramp(rope: Rope, lo: float, hi: float) -> Float64:
    s = rope.scaling.factor  # type: ignore[union-attr]  # only called with YaRN
    lo, hi = max(lo, 0), min(hi, rope.width - 1)
    gamma = np.clip((np.arange(rope.pairs) - lo) / (hi - lo if hi != lo else 0.001), 0, 1)
    return np.asarray(_powers(rope) * (1 - gamma + gamma / s))


def _yarn_pair(rope: Rope, s: YaRN, turns: float) -> float:
    return rope.width * math.log(s.original_length / (2 * np.pi * turns)) / (2 * math.log(rope.base))


def _theta(note: str, theta: Any, rope: Rope, **fields: Any) -> Iterable[Change]:
    """The change to these frequencies, if it is one."""
    theta = np.asarray(theta, np.float64)
    if not np.allclose(theta, frequencies(rope), rtol=1e-6, atol=0) or any(
        value != getattr(recipe_of(rope), name) for name, value in fields.items() if name == "factor"
    ):
        yield Change(note, {"theta": theta, **fields})


def _scaled(note: str, rope: Rope, scaling: Any, **fields: Any) -> Iterable[Change]:
    other = replace(rope, scaling=scaling, **fields)
    return _theta(note, frequencies(other), rope, factor=other.attention_factor)


def _has(rope: Rope) -> tuple[float, int] | None:
    """Factor and original length of the rope's rescaling, where another rule could take them for its own."""
    s = rope.scaling
    if isinstance(s, Linear | DynamicNTK | YaRN | Llama3) and s.factor > 1:
        return s.factor, getattr(s, "original_length", 4096)
    return None


# ── Pairs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pairing(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    others = {
        "half": ("interleaved", "interleaved-to-half"),
        "interleaved": ("half",),
        "interleaved-to-half": ("half",),
        "half-to-interleaved": ("interleaved",),
    }
    for layout in others[rope.layout] if rope.pairs > 1 else ():
        reads, writes = features(layout, rope.pairs, rope.start)
        yield Change(f"{layout} instead of {rope.layout}", {"reads": reads, "writes": writes})


def _mixed(layout: str, one: Any, two: Any) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        p = rope.pairs
        if p > 1:
            reads, writes = features(layout, p, rope.start)
            angles = np.stack((one(np.arange(p), p), two(np.arange(p), p)), -1)
            yield Change(f"features {layout}", {"reads": reads, "writes": writes, "angles": angles})

    return changes


def _in_place(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if "-to-" in rope.layout and rope.pairs > 1:
        yield Change("", {"in_place": True})


def _width(share: Callable[[Rope], int]) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        if isinstance(s := rope.scaling, Proportional) and share(rope) == rope.head_dim:
            theta = _powers(rope) / s.factor
            yield from _theta(f"all {rope.head_dim} features turn, not the first {s.fraction:g} of them", theta, rope)
        r = share(rope)
        if r != rope.width and r % 2 == 0 and r and not isinstance(rope.scaling, Proportional):
            other = recipe_of(replace(rope, rotary_dim=r))
            fields = {"theta": other.theta, "reads": other.reads, "writes": other.writes}
            yield Change(f"{r} features turn instead of {rope.width}", fields)

    return changes


def _other_width(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    r = (rope.width * 3 // 4 // 2 * 2) if measured is None else measured.width
    if not r or r == rope.width or r > rope.head_dim:
        return
    if isinstance(s := rope.scaling, Proportional):
        p, turning = 2 * int(np.count_nonzero(frequencies(rope))), 2 * np.arange(rope.pairs) < r
        yield from _theta(f"{r} features turn, {p} expected", np.where(turning, _powers(rope) / s.factor, 0), rope)
        return
    for placement in dict.fromkeys((rope.placement, "prefix", "suffix")):
        other = recipe_of(replace(rope, rotary_dim=r, placement=placement))
        fields = {"reads": other.reads, "writes": other.writes}
        yield Change(f"{r} features turn, {rope.width} expected", {**fields, "theta": other.theta})
        if r < rope.width:
            kept = frequencies(rope)[: r // 2]
            note = f"{r} features turn, {rope.width} expected, with exponents over {rope.width}"
            yield Change(note, {**fields, "theta": kept})


def _placement(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if rope.width < rope.head_dim:
        other = recipe_of(replace(rope, placement="suffix" if rope.placement == "prefix" else "prefix"))
        note = "the last features turn" if rope.placement == "prefix" else "the first features turn"
        yield Change(note, {"reads": other.reads, "writes": other.writes})


def _proportional(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if rope.width < rope.head_dim and rope.layout == "half":
        d = rope.head_dim
        apart = features_apart(rope.pairs, d // 2)
        w = _ratio(rope, _powers(rope, denominator=d))
        yield Change(f"pairs {d // 2} apart, exponent over {d}", {"reads": apart, "writes": apart, "theta": w})
        yield Change(f"pairs {d // 2} apart, exponent over {rope.width}", {"reads": apart, "writes": apart})


def _contiguous(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(rope.scaling, Proportional) and (p := int(np.count_nonzero(frequencies(rope)))) < rope.pairs:
        reads, writes = features(rope.layout, p)
        for words, k in (("", p), (f", exponent over {rope.width}", rope.pairs)):
            theta = rope.base ** -(np.arange(p) / k) / rope.scaling.factor
            yield Change(f"the first {2 * p} features{words}", {"reads": reads, "writes": writes, "theta": theta})


def _skipped(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    """Some pairs stay as they are: for a candidate, those of a last part of a vector that is not whole."""
    turning = np.arange(rope.pairs) < rope.pairs * 7 // 8 if measured is None else measured.turning
    if turning is not None and rope.layout != "interleaved-to-half" and not turning.all() and turning.any():
        still = np.flatnonzero(~turning & (frequencies(rope) > 0))
        words = ", ".join(map(str, still[:6])) + (", …" if len(still) > 6 else "")
        yield from _theta(f"pairs that do not turn: {words}", np.where(turning, frequencies(rope), 0), rope)


_add("wrong pairing", "off-diagonal support of R at i ± r/2 instead of i ^ 1, or the reverse",
     "half and interleaved layouts exchanged, or q/k weights not permuted for the layout that is used",
     "use the layout that the checkpoint was trained with, or permute the rows of W_q and W_k (permute_weights)",
     "vllm#590, llama.cpp#22611", _pairing)  # fmt: skip
_add("repeated table with split features", "R is no rotation: the two ends of a pair turn by different angles",
     "cos and sin repeated as θ₀θ₀θ₁θ₁… but the features split in halves",
     "concatenate the table (θ₀…θ₀…) for halves, repeat it for interleaved pairs", "ERNIE-Image#6",
     _mixed("half", lambda i, p: i // 2, lambda i, p: (i + p) // 2))  # fmt: skip
_add("concatenated table with interleaved features",
     "R is no rotation: the two ends of a pair turn by different angles",
     "cos and sin concatenated as θ₀θ₁…θ₀θ₁… but the features taken in adjacent pairs",
     "repeat the table (θ₀θ₀θ₁θ₁…) for interleaved pairs", "ERNIE-Image#6, the other way round",
     _mixed("interleaved", lambda i, p: 2 * i % p, lambda i, p: (2 * i + 1) % p))  # fmt: skip
_add("interleaved-to-half in place", "R is not orthogonal; later pairs read what earlier ones wrote",
     "the result is written over x while pairs are still being read from it",
     "write to another array, or permute after the rotation", "—", _in_place)  # fmt: skip
_add("whole head rotated", "features beyond the rotary width turn",
     "partial_rotary_factor ignored: all d features turn",
     "rotate the first r features only, with 2i/r in the exponent", "vllm#43770",
     _width(lambda rope: rope.head_dim))  # fmt: skip
_add("half the width rotated", "features within the rotary width do not turn",
     "the rotary width divided by two once too often (r/2 is the number of pairs)", "rotate r features, r/2 pairs",
     "—", _width(lambda rope: rope.width // 2))  # fmt: skip
_add("another rotary width", "more or fewer features turn than expected",
     "rotary_dim, or the fraction of the head that turns, of another model",
     "rotate rotary_dim features, partial_rotary_factor·head_dim", "—", _other_width, GENERIC)  # fmt: skip
_add("some pairs not turned", "some pairs come back as they were, all others turn as expected",
     "a loop over pairs that ends early, a last part of a vector left out, or slow frequencies rounded to zero",
     "cover all pairs, whatever the width of a vector", "kernels", _skipped, GENERIC)  # fmt: skip
_add("wrong end rotated", "the features that turn are at the other end of the head",
     "prefix and suffix exchanged: [rope, nope] for [nope, rope]", "rotate the end that the model rotates",
     "DeepSeek's [nope, rope] read as a prefix", _placement)  # fmt: skip
_add("proportional instead of contiguous", "pairs are d/2 apart though only r features turn",
     "Gemma's proportional rotation where a contiguous part was meant", "pair i with i + r/2, exponent 2i/r",
     "pie#602", _proportional)  # fmt: skip
_add("contiguous instead of proportional", "the features that turn are the first 2k instead of k in each half",
     "a proportional rotation read as a partial one", "pair i with i + d/2, exponent 2i/d, zeros behind",
     "Megatron-Bridge#4195", _contiguous)  # fmt: skip


# ── Frequencies ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _base(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    bases = measured.bases if measured else (10000.0 if rope.base != 10000.0 else 500000.0,)
    if measured and isinstance(rope.scaling, DynamicNTK):  # what was measured has grown; if not to a usual one, wrongly
        bases = tuple(_ungrown(rope, base) for base in bases if _round(_ungrown(rope, base)))
    for base in bases:
        if 1 < base <= 1e12:
            note = f"base {_apart(base, rope.base)} instead of {rope.base:g}{_as_width(rope, base)}"
            yield from _theta(note, frequencies(replace(rope, base=base)), rope)


def _as_width(rope: Rope, base: float) -> str:
    """The width in the exponent that would look like this base, in words, if it is a whole number."""
    k = rope.width * math.log(rope.base) / math.log(base)
    if abs(k - round(k)) > 1e-3 or round(k) == rope.width or round(k) % 2:
        return ""
    return f" (exponents over {round(k)} instead of {rope.width} are the same)"


def _ungrown(rope: Rope, base: float) -> float:
    """The base that NTK would have grown to this one."""
    return base * rope.base / _grown_base(rope)


def _round(number: float) -> bool:
    """Whether a number is one of two digits, nearly: a base that somebody chose."""
    return abs(float(f"{number:.2g}") / number - 1) < 2e-3


def _apart(number: float, other: float) -> str:
    """A number with as many digits as it takes to tell it from another one."""
    return next((s for k in range(6, 17) if (s := f"{number:.{k}g}") != f"{other:.{k}g}"), repr(number))


def _ignored(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if rope.scaling is not None and not isinstance(rope.scaling, Proportional):
        yield from _scaled("frequencies and factor of the unscaled rope", rope, None)
    elif isinstance(rope.scaling, Proportional) and rope.scaling.factor != 1:
        yield from _theta("factor ignored", frequencies(rope) * rope.scaling.factor, rope)


def _rule(make: Callable[[float, int, Rope], Any], *kinds: type) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        if (has := _has(rope)) and not isinstance(rope.scaling, kinds):
            scaling = make(*has, rope)
            yield from _scaled(f"{scaling}", rope, scaling)
            if rope.attention_factor != 1:
                theta = frequencies(replace(rope, scaling=scaling))
                yield from _theta(f"{scaling}, with the attention factor of the expected one", theta, rope)

    return changes


def _yarn_flip(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN):
        note = "ramp between fractions of pairs" if s.truncate else "ramp between whole pairs"
        yield from _scaled(note, rope, replace(s, truncate=not s.truncate))


def _yarn_swapped(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN):
        lo, hi = _yarn_pair(rope, s, s.beta_slow), _yarn_pair(rope, s, s.beta_fast)
        if s.truncate:
            lo, hi = math.floor(lo), math.ceil(hi)
        yield from _theta("the ramp runs backwards", _yarn_ramp(rope, lo, hi), rope)


def _yarn_wavelength(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN) and s.beta_fast > s.beta_slow:
        w = _powers(rope)
        wave, lo, hi = 2 * np.pi / w, s.original_length / s.beta_fast, s.original_length / s.beta_slow
        gamma = np.clip((wave - lo) / (hi - lo), 0, 1)
        yield from _theta("ramp over the wavelength", w * (1 - gamma + gamma / s.factor), rope)


def _yarn_turns(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN):
        yield from _theta("ramp over turns", _llama3(_powers(rope), s, s.beta_slow, s.beta_fast), rope)


def _ramp_inverted(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN | Llama3) and s.factor > 1:
        w, kept = _powers(rope), _kept(rope, s)
        yield from _theta("fast pairs are slowed down, slow ones kept", w * (1 - kept + kept / s.factor), rope)
        between = np.where((kept > 1e-9) & (kept < 1 - 1e-9), 1 - kept, kept)
        yield from _theta("within the ramp alone", w * (between + (1 - between) / s.factor), rope)


def _kept(rope: Rope, s: YaRN | Llama3) -> Float64:
    """How far each pair is kept: 1 as it was, 0 slowed down by the factor."""
    return np.asarray((frequencies(rope) / _powers(rope) - 1 / s.factor) / (1 - 1 / s.factor))


def _wavelengths_blended(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN | Llama3) and s.factor > 1:
        kept = _kept(rope, s)
        yield from _theta("within the ramp", _powers(rope) / (kept + (1 - kept) * s.factor), rope)


def _blend_inverted(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN | Llama3) and s.factor > 1:
        kept = _kept(rope, s)
        note = f"slow pairs times {s.factor:g} instead of over it"
        yield from _theta(note, _powers(rope) * (kept + (1 - kept) * s.factor), rope)
        yield from _theta(note, _powers(rope) ** 2 / frequencies(rope), rope)


def _rescaled_twice(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(rope.scaling, YaRN | Llama3 | LongRoPE):
        theta, a = frequencies(rope) ** 2 / _powers(rope), rope.attention_factor
        for factor in dict.fromkeys((a, a * a)):
            yield from _theta("θ rescaled once more", theta, rope, **({"factor": factor} if factor != a else {}))


def _yarn_end(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN):
        lo, hi = _yarn_pair(rope, s, s.beta_fast), _yarn_pair(rope, s, s.beta_slow)
        lo, hi = (math.floor(lo), math.ceil(hi)) if s.truncate else (lo, hi)
        last = rope.pairs - 1
        yield from _theta(f"the ramp ends at pair {last}", _yarn_ramp(rope, lo, min(hi, last)), rope)


def _long_original(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, YaRN | Llama3) and s.factor > 1:
        length = int(s.factor * s.original_length)
        yield from _scaled(f"original length {length}", rope, replace(s, original_length=length))


def _llama3_swapped(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, Llama3):
        w = _powers(rope)
        for turns in (s.high, s.low):  # whichever comes first: what is slowed down, or what is kept
            step = np.where(s.original_length * w / (2 * np.pi) < turns, w / s.factor, w)
            yield from _theta(f"a step at {turns:g} turns where the ramp should be", step, rope)
        yield from _theta("the ramp runs backwards", _llama3(w, s, s.high, s.low), rope)


def _factor_power(power: int) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        if isinstance(s := rope.scaling, Linear) and s.factor > 1:
            yield from _theta(f"θ times {s.factor**-power:g}", _powers(rope) * s.factor**-power, rope)

    return changes


def _other_factor(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    s = rope.scaling
    if isinstance(s, Proportional | LongRoPE | DynamicNTK):
        return
    for stretch in measured.stretches if measured else (getattr(s, "factor", 1.0) * 1.5,):
        if s is None:
            yield from _theta(f"all frequencies over {stretch:.6g}", frequencies(rope) / stretch, rope)
        elif stretch >= 1:
            other, note = (
                replace(rope, scaling=replace(s, factor=stretch)),
                f"factor {stretch:.6g} instead of {s.factor:g}",
            )
            yield from _theta(note, frequencies(other), rope)
            if other.attention_factor != rope.attention_factor:
                note = f"{note}, with the attention factor that follows"
                yield from _theta(note, frequencies(other), rope, factor=other.attention_factor)


def _ntk_exponent(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, DynamicNTK):
        g = 1 + s.factor * max((s.length or 0) - s.original_length, 0) / s.original_length
        yield from _theta(f"base times {g:g}", _powers(rope, base=rope.base * g), rope)


def _ntk_formula(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if not isinstance(s := rope.scaling, DynamicNTK):
        return
    n, power = max(s.length or 0, s.original_length) / s.original_length, rope.width / (rope.width - 2)
    right = s.factor * n - (s.factor - 1)
    ways = {
        "factor·N/L, without − (factor − 1)": (s.factor * n) ** power,
        "N/L, without the factor": n**power,
        "factor, whatever the length": s.factor**power,
        "factor·N/L − factor": max(s.factor * n - s.factor, 1e-9) ** power,
        "the exponent (r − 2)/r": right ** (1 / power),
        "the exponent r/(r − 1)": right ** (rope.width / (rope.width - 1)),
        "the exponent d/(d − 2)": right ** (rope.head_dim / (rope.head_dim - 2)),
        "the exponent 1 + 2/r": right ** (1 + 2 / rope.width),
    }
    for length in (s.length + 1, s.length - 1) if s.length else ():  # the last position for the length, or the reverse
        stretch = s.factor * max(length, s.original_length) / s.original_length - (s.factor - 1)
        ways[f"the length {length:g} instead of {s.length:g}"] = stretch**power
    for words, stretch in ways.items():
        if 1 < rope.base * stretch <= 1e12:
            yield from _theta(f"base times {stretch:.6g}: {words}", _powers(rope, base=rope.base * stretch), rope)
    for base in (base for base in measured.bases if not _round(_ungrown(rope, base))) if measured else ():
        note = f"base times {base / rope.base:.6g}, {_grown_base(rope) / rope.base:.6g} expected"
        yield from _theta(note, _powers(rope, base=base), rope)
    yield from _theta("frequencies divided by the stretch", _powers(rope, base=rope.base) / right, rope)


def _other_list(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, LongRoPE):
        yield from _scaled("the other list", rope, replace(s, long=s.short, short=s.long))


def _multiplied_list(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(rope.scaling, LongRoPE):
        yield from _theta("θ times the factors of the list", _powers(rope) ** 2 / frequencies(rope), rope)


def _whole_positions(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, Linear) and s.factor > 1:
        ways: dict[str, Callable[[Any], Any]] = {
            f"⌊m/{s.factor:g}⌋": lambda m: m // s.factor,
            f"m/{s.factor:g}, rounded": lambda m: np.rint(m / s.factor),
        }
        for words, whole in ways.items():
            yield Change(f"{words}, for m/{s.factor:g}", {"theta": _powers(rope), "place": whole})


def _other_rule(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    s = rope.scaling
    if measured is not None:
        if measured.theta is not None:
            yield Change("the frequencies are those of " + ", or of ".join(measured.rules), {"theta": measured.theta})
    elif isinstance(s, YaRN):
        yield from _theta("another ramp", frequencies(replace(rope, scaling=replace(s, beta_fast=20.0))), rope)
    elif isinstance(s, Llama3):
        yield from _theta("another ramp", frequencies(replace(rope, scaling=replace(s, low=0.5, high=6.0))), rope)
    elif s is None:
        yield from _theta("llama3", frequencies(replace(rope, scaling=Llama3(8.0, 1.0, 4.0, 8192))), rope)


def _exponent(note: str, make: Callable[[Rope], Float64 | None]) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        w = make(rope)
        if w is not None and not isinstance(rope.scaling, Proportional):
            yield from _theta(note, _ratio(rope, w), rope)

    return changes


def _from_one(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if not isinstance(rope.scaling, Proportional):
        for note, ahead in (("2(i+1)/r", 2), ("(2i+1)/r", 1)):
            yield from _theta(note, _ratio(rope, _powers(rope, 2 * np.arange(rope.pairs) + ahead)), rope)


def _over_another(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if isinstance(s := rope.scaling, Proportional):
        p = int(np.count_nonzero(frequencies(rope)))
        theta = np.where(np.arange(rope.pairs) < p, _powers(rope, denominator=2 * p) / s.factor, 0)
        yield from _theta(f"2i/{2 * p}, over the features that turn", theta, rope)
    widths = (rope.width - 1, rope.width + 1, *(256 * k for k in (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 32)))
    others = {rope.width, rope.width - 2, rope.head_dim, 2 * rope.width}  # which have names of their own
    for k in (512,) if measured is None else widths:
        if k not in others and not isinstance(rope.scaling, Proportional):
            yield from _theta(f"2i/{k}", _ratio(rope, _powers(rope, denominator=k)), rope)


def _times(constants: dict[str, float]) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        for name, constant in constants.items():
            yield from _theta(f"θ·{name}", frequencies(rope) * constant, rope)

    return changes


def _ordered(note: str, order: Callable[[int], Any]) -> Changes:
    return lambda rope, measured: _theta(note, frequencies(rope)[order(rope.pairs)], rope)


def _twice(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if "-to-" not in rope.layout:
        a, s = rope.attention_factor, rope.scaling
        same = f" (factor {s.factor / 2:g} instead of {s.factor:g} is the same)" if isinstance(s, Linear) else ""
        note, fields = f"angles doubled, the factor squared{same}", {"factor": a * a} if a != 1 else {}
        yield from _theta(note, 2 * frequencies(rope), rope, **fields)


def _still(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    reads = recipe_of(rope).reads
    yield Change("", {"theta": np.zeros(rope.pairs), "factor": 1.0, "writes": reads, "reads": reads})


def _ratios(rope: Rope, measured: Measurements | None) -> Iterator[tuple[Any, Float64]]:
    """Ratios of neighbouring frequencies in float32, the right one and, since a library's power is good to 1 ulp, those
    beside it, and the frequencies that their running products are, where these are worse than any float32 pipeline."""
    if rope.scaling is not None or rope.pairs < 3:
        return
    step = np.float32(frequencies(rope)[1])
    for ulps in (0,) if measured is None else (0, 1, -1):
        ratio = np.full(rope.pairs, step + ulps * np.spacing(step), np.float32)
        ratio[0] = 1
        theta = np.multiply.accumulate(ratio, dtype=np.float32).astype(np.float64)
        if (np.abs(theta / frequencies(rope) - 1) > 1.5 * angle_bound(rope)).any():
            yield ratio[1], theta


def _recursive(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    for _, theta in _ratios(rope, measured):
        yield Change("", {"theta": theta})


def _recurrent(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    for ratio, _ in _ratios(rope, measured):
        yield Change("", {"ratio": float(ratio)})


_CONFIG = "read it from the config, under its new and its old name (rope_parameters, rope_scaling)"
_add("scaling ignored", "the slow frequencies are those of the unscaled rope", "rope_scaling not read", _CONFIG,
     "mlx-vlm#1710, unsloth#6907", _ignored)  # fmt: skip
for _name, _make, _kinds in (
    ("linear", lambda s, n, rope: Linear(s), (Linear,)),
    ("NTK", lambda s, n, rope: DynamicNTK(s, 2048, 4096 - int(2048 / s)), (DynamicNTK,)),  # base·s^(r/(r−2))
    ("YaRN", lambda s, n, rope: YaRN(s, n), (YaRN,)),
    ("llama3", lambda s, n, rope: Llama3(s, 1.0, 4.0, n), (Llama3,)),
):
    _add(f"{_name} scaling instead", f"the frequencies follow the {_name} rule with the right factor",
         f"one rescaling taken for another: {_name} for what the config says",
         "dispatch on rope_type, and refuse a type that is not known", "—",
         _rule(_make, *_kinds))  # fmt: skip
_add("YaRN ramp truncation", "the band between kept and interpolated pairs differs by fractions of a pair",
     "⌊⌋ and ⌈⌉ of the ramp's ends left out, or applied where truncate is false", "follow `truncate`",
     "torchtitan#3787", _yarn_flip)  # fmt: skip
_add("YaRN betas swapped", "fast pairs are interpolated and slow ones kept", "beta_fast and beta_slow exchanged",
     "beta_fast = 32 gives the ramp's begin, beta_slow = 1 its end", "torchtitan#3787", _yarn_swapped)  # fmt: skip
_add("YaRN ramp over wavelengths", "the band between kept and interpolated pairs has the wrong shape",
     "the ramp is made linear in the wavelength, not in the index of the pair", "γ = (i − lo)/(hi − lo)", "—",
     _yarn_wavelength)  # fmt: skip
_add("YaRN ramp over turns", "the band between kept and interpolated pairs has the wrong shape",
     "the ramp is linear in the turns within the original length, as in the paper, not in the index of the pair",
     "γ = (i − lo)/(hi − lo), as every checkpoint's code has it", "—", _yarn_turns)  # fmt: skip
_add("ramp inverted", "fast pairs are slowed down and slow ones kept", "the two sides of the blend exchanged",
     "w·((1 − γ) + γ/s), with γ = 0 for the fast pairs", "litgpt 0.5.13", _ramp_inverted)  # fmt: skip
_add("YaRN ramp clamped", "the ramp ends at the last pair", "its end is clamped to r/2 − 1, not to r − 1",
     "hi = min(hi, r − 1), as every checkpoint's code has it", "OLMo-core 3.0.0", _yarn_end)  # fmt: skip
_add("original length mistaken", "the band between kept and interpolated pairs lies too far down",
     "max_position_embeddings used where original_max_position_embeddings is meant", "use the original length", "—",
     _long_original)  # fmt: skip
_add("llama3 low and high swapped", "a step, or a backward ramp, where the band should be",
     "low_freq_factor and high_freq_factor exchanged, or the blend left out",
     "wavelengths above L₀/low are slowed down, below L₀/high kept",
     "—", _llama3_swapped)  # fmt: skip
_add("linear factor inverted", "the frequencies are times the factor instead of over it",
     "positions multiplied by the factor, or its reciprocal stored", "divide by the factor", "—",
     _factor_power(-1))  # fmt: skip
_add("linear factor applied twice", "the frequencies are over the factor squared",
     "both positions and frequencies were interpolated", "interpolate one of them", "—",
     _factor_power(2))  # fmt: skip
_add("rescaling inverted", "slow pairs are times the factor instead of over it",
     "the factor, or its reciprocal (as ggml's freq_scale), taken for the other", "divide by the factor", "—",
     _blend_inverted)  # fmt: skip
_add("rescaling applied twice", "each frequency is rescaled by the square of what it should be",
     "frequencies that are rescaled already, from a checkpoint or a config, are rescaled again", "rescale once",
     "TensorRT-LLM#16378", _rescaled_twice)  # fmt: skip
_add("wavelengths blended", "the band between kept and slowed pairs has the wrong shape",
     "wavelengths 2π/θ are blended where frequencies are meant", "w·((1 − γ) + γ/s)", "—",
     _wavelengths_blended)  # fmt: skip
_add("positions divided in integers", "several positions in a row are turned alike",
     "position // factor instead of position / factor", "divide as floats, or divide the frequencies", "—",
     _whole_positions)  # fmt: skip
_add("another factor", "the slow frequencies are divided by another number",
     "the factor of another model, or none meant", _CONFIG, "—", _other_factor, GENERIC)  # fmt: skip
_add("another rescaling", "the frequencies follow a published rule with other numbers, or one that is not meant",
     "original length, betas or limits of another model, or a rule applied where the config has none", _CONFIG,
     "torchtitan#3787", _other_rule, GENERIC)  # fmt: skip
_add("NTK exponent missing", "the base is larger, but not as large as it should be",
     "base·g instead of base·g^(r/(r−2))", "raise g to r/(r−2)", "—", _ntk_exponent)  # fmt: skip
_add("dynamic NTK formula", "the base is stretched by another number than the formula's",
     "a term of base·(s·N/L − (s − 1))^(r/(r−2)) is missing or another", "base·(s·N/L − (s − 1))^(r/(r−2)), N ≥ L", "—",
     _ntk_formula)  # fmt: skip
_add("LongRoPE's other list", "each pair is divided by the factor of the other list",
     "short and long exchanged, or the switch is at < instead of <=", "long if N > L₀, else short", "unsloth#10681",
     _other_list)  # fmt: skip
_add("LongRoPE factors inverted", "each pair is multiplied with its factor instead of divided by it",
     "the factors, or their reciprocals, taken for the other", "θ_i = base^(−2i/r) / factor_i", "—",
     _multiplied_list)  # fmt: skip
_add("exponent over the head size", "the frequencies fall too slowly",
     "base^(−2i/d) though only r of d features turn", "base^(−2i/r)", "pie#602",
     _exponent("2i/d", lambda rope: _powers(rope, denominator=rope.head_dim)))  # fmt: skip
_add("exponent over r − 2", "the frequencies fall too fast: the slowest is 1/base",
     "linspace(0, 1, r/2) as the exponent", "exponents 2i/r, which stop short of 1", "—",
     _exponent("2i/(r−2)",
                lambda rope: _powers(rope, denominator=rope.width - 2) if rope.pairs > 1 else None))  # fmt: skip
_add("exponent without its 2", "the frequencies are those of the base's root", "base^(−i/r) instead of base^(−2i/r)",
     "arange(0, r, 2)/r", "—", _exponent("i/r", lambda rope: _powers(rope, np.arange(rope.pairs))))  # fmt: skip
_add("exponent doubled", "the frequencies are those of the base squared", "base^(−4i/r): 2i over the number of pairs",
     "arange(0, r, 2)/r", "—", _exponent("4i/r", lambda rope: _powers(rope, 4 * np.arange(rope.pairs))))  # fmt: skip
_add("exponent over another width", "the frequencies fall too slowly or too fast, as base^(−2i/k)",
     "the width of the model, or r ± 1, in the exponent", "base^(−2i/r), r the rotary width of one head", "—",
     _over_another)  # fmt: skip
_add("index counted from 1", "every pair has its neighbour's frequency; none turns by 1",
     "i = 1 … r/2, or 1, 3, 5, … for 2i, put into base^(−2i/r)", "Eq. (15) counts from 1 and subtracts it: 2(i − 1)",
     "—", _from_one)  # fmt: skip
_add("frequencies not inverted", "every pair turns faster than the one before it", "base^(2i/r), not over 1",
     "1/base^(2i/r)", "—", _exponent("base^(+2i/r)", lambda rope: 1 / _powers(rope)))  # fmt: skip
_add("exponent in integers", "all pairs turn alike, by 1", "2i/r as a quotient of integers, which is 0",
     "divide as floats", "—", _exponent("base^0", lambda rope: np.ones(rope.pairs)))  # fmt: skip
_add("degrees", "all frequencies are off by 180/π", "degrees and radians confused", "angles in radians", "—",
     _times({"π/180": math.pi / 180, "180/π": 180 / math.pi}))  # fmt: skip
_add("frequencies times 2π", "all frequencies are 2π times too high, or π times",
     "angles in turns or half turns taken for radians", "angles in radians: m·θ, without 2π", "—",
     _times({"2π": 2 * math.pi, "π": math.pi, "1/2π": 0.5 / math.pi}))  # fmt: skip
_add("frequencies in reverse", "the first pair is the slowest", "the table is flipped", "fastest pair first", "—",
     _ordered("slowest first", lambda p: np.arange(p)[::-1]))  # fmt: skip
_add("frequencies dealt to axes", "even frequencies first, then the odd ones", "Pixtral's order used for plain text",
     "θ₀, θ₁, θ₂ … in order", "Pixtral's vision part taken for its text part",
     _ordered("θ₀ θ₂ … θ₁ θ₃ …", lambda p: np.append(np.arange(0, p, 2), np.arange(1, p, 2))))  # fmt: skip
_add("rotated twice", "all frequencies are doubled", "applied in the model and again in the kernel", "rotate once",
     "TensorRT-LLM#16378", _twice)  # fmt: skip
_add("not rotated", "R is the identity at every position", "the call is missing, or its result dropped",
     "use what the function returns", "—", _still)  # fmt: skip
_add("ggml's recurrence", "errors grow with the index of the pair, beyond those of a float32 power",
     "each angle is the one before times a rounded ratio", "compute each frequency as a power of its own, once",
     "ggml", _recurrent,
     right_in=("float16", "bfloat16"))  # fmt: skip
FAULTS["ggml's recurrence"] = replace(FAULTS["ggml's recurrence"], make=None)  # as good as others but for many pairs
_add("wrong base", "the frequencies are a geometric series of another base",
     "rope_theta not read, or read from where it is no longer kept", _CONFIG, "DeepSpeed#8345", _base)  # fmt: skip
_add("recursive frequencies", "the slopes drift with the index of the pair, ten times beyond float32's error",
     "a running product instead of a power", "compute each power by itself", "—", _recursive)  # fmt: skip


# ── Positions, angles, factor, signs ─────────────────────────────────────────────────────────────────────────────────


def _shift(by: int) -> Changes:
    words = f"position m turns by (m {'+' if by > 0 else '−'} {abs(by)})·θ"
    return lambda rope, measured: [Change(words, {"place": lambda m: m + by})]


def _any_shift(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    by = measured.offset if measured else 17
    if by not in (None, -1, 0, 1):
        yield from _shift(by)(rope, measured)


def _length(measured: Measurements | None) -> int | None:
    """The length of a table that was right up to its end, as measured."""
    return measured.length if measured else None


def _from_first(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    yield Change("m − m₀", {"place": lambda m: m - m[..., :1]})
    yield Change("m − min m", {"place": lambda m: m - m.min(axis=-1, keepdims=True)})


def _of_other_rows(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    ways: dict[str, Callable[[Int64], Any]] = {
        "in reverse": lambda m: m[..., ::-1],
        "sorted": lambda m: np.sort(m, axis=-1),
        "of the row before": lambda m: np.roll(m, 1, axis=-1),
        "of the row after": lambda m: np.roll(m, -1, axis=-1),
        "of the first row for all": lambda m: m[..., :1] + 0 * m,
        "of the last row for all": lambda m: m[..., -1:] + 0 * m,
        "the largest for all": lambda m: m.max(axis=-1, keepdims=True) + 0 * m,
        "minus that of the last row": lambda m: m - m[..., -1:],
        "subtracted from that of the last row": lambda m: m[..., -1:] - m,
        "by their rank": lambda m: np.apply_along_axis(lambda row: np.unique(row, return_inverse=True)[1], -1, m),
    }
    for words, place in ways.items():
        yield Change(f"positions {words}", {"place": place})


def _modulo(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    for length in dict.fromkeys((_length(measured) or 4096, *(2**k for k in range(4, 17)))):
        yield Change(f"modulo {length}", {"place": lambda m, n=length: m % n})


def _clamped(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    original = getattr(rope.scaling, "original_length", 4096)
    for length in dict.fromkeys((_length(measured) or original, original, *(2**k for k in range(4, 17)))):
        yield Change(f"at row {length - 1}", {"place": lambda m, n=length: np.minimum(m, n - 1)})


def _fixed(**fields: Any) -> Changes:
    return lambda rope, measured: [Change("", fields)]


def _low_angle(rounding: Any) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        one = {"round_angle": rounding}
        yield Change("the angle alone", one)
        yield Change("frequencies and angle", {**one, "round_theta": rounding})
        yield Change("positions and angle", {**one, "round_position": rounding})
        yield Change("positions, frequencies and angle", {**one, "round_theta": rounding, "round_position": rounding})

    return changes


def _low_theta(kind: str, rounding: Any) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        if measured is not None and measured.narrow == kind and measured.narrow_theta is not None:
            yield Change(f"all measured frequencies are {kind} numbers", {"theta": measured.narrow_theta})
        if (rounding(frequencies(rope)) != frequencies(rope)).any():
            off = np.abs(rounding(frequencies(rope)) / np.where(frequencies(rope), frequencies(rope), 1) - 1)
            yield Change(
                f"off by up to {off[frequencies(rope) > 0].max():.2g} of themselves", {"round_theta": rounding}
            )

    return changes


def _scale(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    for name, power in (("1/√d", -0.5), ("d^(−1/4)", -0.25)):
        if rope.head_dim > 2:
            yield Change(f"times {name}", {"factor": rope.attention_factor * rope.head_dim**power})


def _aliased(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if "-to-" not in rope.layout:
        yield Change("the second output is computed from the first", {"aliased": 0})
        yield Change("the first output is computed from the second", {"aliased": 1})


def _rest(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if rope.width < rope.head_dim:
        yield Change(f"{rope.head_dim - rope.width} features are zero", {"rest": 0.0})


def _unsigned_cos_sin(angle: Any) -> tuple[Any, Any]:
    return np.cos(angle), np.abs(np.sin(angle))


def _twice_cos_sin(angle: Any) -> tuple[Any, Any]:
    return np.cos(np.cos(angle)), np.sin(np.sin(angle))


def _factor(make: Callable[[Rope, Measurements | None], float | None], wanted: bool) -> Changes:
    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        a = make(rope, measured)
        if (rope.attention_factor != 1) == wanted and a is not None and abs(a / rope.attention_factor - 1) > 1e-5:
            yield Change(f"{a:.6g} instead of {rope.attention_factor:.6g}", {"factor": a})

    return changes


def _scaled_cos_sin(cosine: float, sine: float, angle: Any) -> tuple[Any, Any]:
    return cosine * np.cos(angle), sine * np.sin(angle)


def _factor_in_part(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if (a := rope.attention_factor) != 1:
        yield Change("on the cosine alone", {"factor": 1.0, "cos_sin": partial(_scaled_cos_sin, a, 1.0)})
        yield Change("on the sine alone", {"factor": 1.0, "cos_sin": partial(_scaled_cos_sin, 1.0, a)})
        if rope.width < rope.head_dim:
            yield Change("on the features that do not turn, too", {"rest": a})


def _fast(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    if not angle_bound(rope)[0]:  # else its error is as small as that of a float32 angle, and hides behind it
        yield Change("the angle in turns is rounded to float32", {"cos_sin": fast_cos_sin})
        half_turns, way = np.float32(frequencies(rope) / np.pi).astype(np.float64), {"cos_sin": half_turn_cos_sin}
        yield Change("the angle in half turns is rounded to float32", way)
        yield Change("θ/π is rounded to float32, and its product with m", {"theta": half_turns * np.pi, **way})


def _rounded_turn(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    turn = 6.2832 if measured is None else measured.turn
    if turn is not None:
        for whole in (np.floor, np.rint):
            change = {"cos_sin": partial(reduced_cos_sin, turn, whole)}
            yield Change(f"angles are reduced by {turn:.10g}, 2π is {2 * math.pi:.10g}", change)


def _block(note: str, first: tuple[str, str], second: tuple[str, str]) -> Changes:
    """Another block than the one that turns forwards; for a rope that turns backwards, the same with −sin for sin."""

    def changes(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
        block = (first, second)
        if rope.direction == -1:
            other = {"sin": "-sin", "-sin": "sin"}
            block = tuple(tuple(other.get(term, term) for term in row) for row in block)  # type: ignore[assignment]
        yield Change(note, {"block": block})

    return changes


def _measured_block(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    block = (FORWARDS[0], ("sin", "0")) if measured is None else measured.block
    if block is not None and block != recipe_of(rope).block:
        yield Change(f"{_as_equations(block)} instead of {_as_equations(recipe_of(rope).block)}", {"block": block})


def _as_equations(block: Block) -> str:
    """Such as "x·cos − y·sin, x·sin + y·cos"."""

    def output(row: tuple[str, str]) -> str:
        terms = [
            (factor, f"{feature}·{factor.lstrip('-')}".removesuffix("·1"))
            for factor, feature in zip(row, "xy", strict=True)
        ]
        words = "".join(f" {'−' if factor[0] == '-' else '+'} {term}" for factor, term in terms if factor != "0")
        return words.removeprefix(" + ").replace(" − ", "−", 1) if words[:3] == " − " else words.removeprefix(" + ")

    return ", ".join(output(row) or "0" for row in block)


_OFF = "count positions from 0, and pass the position of the token itself"
_add("positions one too high", "at position 0 each pair is turned by its own frequency",
     "m + 1 for m: counted from 1, or the position of the token that comes next", _OFF, "sglang#25015, llama3.np",
     _shift(1))  # fmt: skip
_add("positions one too low", "at position 0 each pair is turned back by its own frequency", "m − 1 for m", _OFF, "—",
     _shift(-1))  # fmt: skip
_add("positions shifted", "the phase at position 0 over the frequency is a whole number",
     "padding counted, or the row count of a cache used as position", _OFF, "unsloth#3699, VeloxQuant-MLX#389",
     _any_shift)  # fmt: skip
_add("positions modulo a length", "right up to a length, often a power of two, then from the start again",
     "positions in too few bits, or a ring buffer's row as position", "int64 positions, unwrapped", "—",
     _modulo)  # fmt: skip
_add("positions in int16", "right up to 32767, then turned backwards", "positions overflow 16 bits", "int32 or int64",
     "—", _fixed(place=lambda m: (m + 32768) % 65536 - 32768))  # fmt: skip
_add("table clamped at its end", "all positions beyond a length turn alike",
     "a lookup that clips its index (JAX does)", "grow the table, or raise", "XLA's clamped gather",
     _clamped)  # fmt: skip
_add("positions ignored", "rows turn by their index in the call", "arange(n) instead of the positions given",
     "index with the positions", "x-transformers#346",
     _fixed(place=lambda m: np.zeros_like(m) + np.arange(m.shape[-1])))  # fmt: skip
_add("consecutive positions assumed", "rows turn by the first position plus their index", "positions[0] + arange(n)",
     "index with the positions", "kernels that take an offset",
     _fixed(place=lambda m: m[..., :1] + np.arange(m.shape[-1])))  # fmt: skip
_add("first position taken as 0", "rows turn by their distance from the first row, or from the least position",
     "an offset is lost: positions − positions[0]", "use the positions as they are, in a cache too",
     "caches that count from the call", _from_first)  # fmt: skip
_add("another row's position", "rows turn by the positions of other rows, or by their rank or distance among them",
     "positions are sorted, reversed, shifted by a row, or those of one row are used for all",
     "give each row its own position, as it is", "kernels", _of_other_rows)  # fmt: skip
_add("positions of the first chunk repeated", "rows of the second half of a call turn like those of the first half",
     "context parallel: a rank that holds several chunks indexes the table for the first of them alone",
     "give each row its own position: [0, 3, 4, 7], not [0, 3, 0, 3]", "Megatron-LM#5243",
     _fixed(place=lambda m: m[..., np.arange(m.shape[-1]) % ((m.shape[-1] + 1) // 2)]))  # fmt: skip
for _kind, _rounding, _limit, _in in (
    ("bfloat16", to_bfloat16, 256, ("bfloat16",)),
    ("float16", to_float16, 2048, ("bfloat16", "float16")),
):
    _keep = "keep inverse frequencies, positions and angles in float32 (or wider), and cast cos and sin"
    _add(f"{_kind} inverse frequencies", "noise-like relative error in the slopes",
         f"inverse frequencies kept in {_kind}, by model.to({_kind}) or in the checkpoint", _keep, "gpt-neox#1003",
         _low_theta(_kind, _rounding))  # fmt: skip
    _add(f"{_kind} positions", f"exact up to {_limit}, wrong from {_limit + 1} on", f"positions cast to {_kind}",
         _keep, "diffusers#13920" if _kind == "bfloat16" else "—", _fixed(round_position=_rounding))  # fmt: skip
    _add(f"{_kind} tables", f"errors of 1 in {2 * _limit} from the first positions on, everywhere alike",
         f"cos and sin cast to {_kind}, or computed there, though x is wider", "tables in the dtype of x, or wider",
         "kernels with a packed cache of cos and sin", _fixed(round_table=_rounding), right_in=_in)  # fmt: skip
    _add(f"{_kind} results", f"errors of 1 in {2 * _limit} at every position, 0 among them",
         f"the rotated x goes through {_kind}, though x is wider", "keep the dtype of x to the end",
         "autocast", _fixed(round_result=_rounding), right_in=_in)  # fmt: skip
    _add(f"{_kind} input", f"errors of 1 in {2 * _limit} at every position, features that do not turn among them",
         f"x goes through {_kind} before it is rotated", "keep the dtype of x from the beginning", "autocast",
         _fixed(round_input=_rounding), right_in=_in)  # fmt: skip
    _add(f"{_kind} angle", "wrong from the first positions on, by a part of the angle",
         f"m·θ computed in {_kind}, by autocast or model.to({_kind})", _keep, "gpt-neox#1003",
         _low_angle(_rounding))  # fmt: skip
_add("fast sine", "residual phase grows with the position even where the angle is exact",
     "a hardware sine (__sinf, fast math), or sincospi of a float32 number: turns are rounded before they are reduced",
     "a full sine for the table, or turns that are reduced in float64 or in integers", "imp#1316", _fast)  # fmt: skip
_add("2π rounded", "angles are off by the same amount more with each full turn",
     "angles are reduced by a 2π of few digits, such as 6.2832 or float32's", "2π in float64, or a sine that reduces",
     "—", _rounded_turn, GENERIC)  # fmt: skip
_add("attention factor missing", "the operator's norm is 1", "cos and sin are not multiplied by the attention factor",
     "multiply both tables by a", "exllamav3#259", _factor(lambda rope, measured: 1.0, True))  # fmt: skip
_add("attention factor squared", "the operator's norm is a²",
     "multiplied into the tables and again into x, or a² meant for the scores used for q and k",
     "multiply q and k by a: scores get a²", "TensorRT-LLM#16378",
     _factor(lambda rope, measured: rope.attention_factor**2, True))  # fmt: skip
_add("attention factor inverted", "the operator's norm is 1/a", "divided by the attention factor", "multiply by it",
     "—", _factor(lambda rope, measured: 1 / rope.attention_factor, True))  # fmt: skip
_add("attention factor in part", "cosines and sines have different lengths, or features that do not turn are scaled",
     "the attention factor multiplies one table of the two, or the whole head instead of what turns",
     "multiply cos and sin by it, and nothing else", "—", _factor_in_part)  # fmt: skip
_add("softmax scale folded in", "all outputs are times 1/√d, or its root",
     "queries or keys are scaled for the softmax while they are rotated", "leave the scale to the attention", "kernels",
     _scale)  # fmt: skip
_add("attention factor unwanted", "the operator's norm is not 1",
     "an attention factor (YaRN's 0.1·ln s + 1, LongRoPE's) where the rope has none", "leave cos and sin as they are",
     "vllm#48623", _factor(lambda rope, measured: measured.factor if measured else 1.277, False))  # fmt: skip
_add("another attention factor", "the operator's norm is not the expected one",
     "mscale, mscale_all_dim or attention_factor read otherwise",
     "transformers: attention_factor, else mscale over mscale_all_dim if both are set", "vllm#48623",
     _factor(lambda rope, measured: measured.factor if measured else 1.5 * rope.attention_factor, True),
     GENERIC)  # fmt: skip
_add("direction", "all slopes have the other sign", "the transpose of the textbook matrix: rotated by −mθ",
     "exchange the signs of sin, or say direction=-1 if the model was trained so", "nanochat#489",
     _block("turned by −mθ", *BACKWARDS))  # fmt: skip
_add("sign missing", "R is no rotation: its off-diagonal entries have equal signs", "rotate_half without its minus",
     "(−x₂, x₁)", "—", _block("both sines added", ("cos", "sin"), ("sin", "cos")))  # fmt: skip
_add("sine and cosine swapped", "at position 0 pairs are a quarter turn off", "the table's halves exchanged",
     "(cos, sin) in that order", "—",
     _block("", ("sin", "-cos"), ("cos", "sin")))  # fmt: skip
_add("wrong term in the pairs", "R is no rotation: a sign, a sine or a cosine is another in one output of every pair",
     "a minus in the wrong place, or a term dropped, in one half", "(x cos − y sin, x sin + y cos)", "kernels",
     _measured_block, GENERIC)  # fmt: skip
_add("in-place aliasing", "one output of every pair is computed from the other output, not from the input",
     "the first result is stored over x before the second one is computed",
     "keep both inputs in variables until both outputs are computed", "kernels", _aliased)  # fmt: skip
_add("rest zeroed", "features beyond the rotary width come back as zeros",
     "the result begins as zeros, and only the rotated part is written to it", "copy the rest of x", "—",
     _rest)  # fmt: skip
_add("zeros returned", "every output is zero", "the kernel did not run, or its result was not written",
     "check the launch, and the array that is returned", "kernels",
     _fixed(block=(("0", "0"), ("0", "0")), rest=0.0))  # fmt: skip
_add("sign of the sine lost", "pairs that have made more than half a turn are turned the other way",
     "sin computed as √(1 − cos²)", "compute the sine itself", "—", _fixed(cos_sin=_unsigned_cos_sin))  # fmt: skip
_add("cosine of a cosine", "at position 0 the factor is cos 1, not 1",
     "cos and sin are taken of tables that are cos and sin already", "hand over angles, or the tables as they are",
     "megatron-core 0.16.1", _fixed(cos_sin=_twice_cos_sin))  # fmt: skip


def xpos_growth(p: int) -> Float64:
    """Of xPos (Sun et al., arXiv 2212.10554): lengths times ζ^(m/512) with ζ = (2i + 0.4r)/(1.4r), as a logarithm."""
    return np.log((np.arange(p) / p + 0.4) / 1.4) / 512


def _growing(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    usual = xpos_growth(rope.pairs)
    growth = usual if measured is None else measured.growth
    if growth is not None and len(growth) == rope.pairs:
        ratio = float(np.median(growth / usual))
        same = np.allclose(growth, ratio * usual, rtol=0.02, atol=1e-9)
        note = f"as in xPos, ζ^({'−' * (ratio < 0)}m/{512 / abs(ratio):.4g})" if same and ratio else "not as in xPos"
        yield Change(f"by up to {np.abs(growth).max():.3g} of themselves at every position, {note}", {"growth": growth})


_add("lengths grow with the position", "pairs grow or shrink with the position, each at a rate of its own",
     "the scale of xPos: queries times ζ^(m/s), keys times its inverse",
     "leave it out, or check queries and keys without it, if the model has plain RoPE", "—", _growing,
     GENERIC)  # fmt: skip


# ── Axes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _dealing(rope: Rope) -> Axes:
    assert rope.axes is not None  # faults of axes are asked for no other rope
    return rope.axes


def _turned_by(note: str, rope: Rope, axis: Any, order: Any = None) -> Iterable[Change]:
    """The change to these axes, and to frequencies in this order, if it is one."""
    right, fields = recipe_of(rope), {"axis": np.asarray(axis)}
    if order is not None:
        fields["theta"] = frequencies(replace(rope, axes=None))[np.asarray(order)]
    if any((value != getattr(right, name)).any() for name, value in fields.items()):
        yield Change(note, fields)


def _one_axis(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    for axis in range(_dealing(rope).count):
        yield from _turned_by(f"axis {axis} turns all pairs", rope, np.full(rope.pairs, axis))


def _axes_reordered(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    axis = np.array([axis for axis, _ in _dealing(rope).assign(rope.pairs)])
    for order in itertools.islice(itertools.permutations(range(_dealing(rope).count)), 1, 24):
        yield from _turned_by(f"axes {order} for {tuple(sorted(order))}", rope, np.array(order)[axis])


def _dealt_otherwise(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    axes = _dealing(rope)
    styles = ("sections", "interleaved") if axes.sections else ("axial", "pixtral")
    for style in styles if axes.style in styles else ():
        dealt = recipe_of(replace(rope, axes=replace(axes, style=style)))
        if dealt.axis is not None and style != axes.style:
            yield Change(f"{style} instead of {axes.style}", {"axis": dealt.axis, "theta": dealt.theta})


def _one_series(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    axes = _dealing(rope)
    if axes.series == "own":
        theta = frequencies(replace(rope, axes=replace(axes, series="shared")))
        if (theta != frequencies(rope)).any():
            yield Change("θ₀, θ₁, … over all axes", {"theta": theta})


def _sections_otherwise(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    """Any other dealing: as measured, or for a candidate, one pair more of the first axis."""
    right = recipe_of(rope).axis
    axis = measured.axis if measured is not None else np.roll(np.asarray(right), 1)
    if axis is not None and right is not None and (axis != right).any():
        i = int(np.argmax(axis != right))
        note = f"{int((axis != right).sum())} pairs turn with another axis, the first of them pair {i}, with axis "
        yield from _turned_by(f"{note}{axis[i]} instead of {right[i]}", rope, axis)


def _wide_sections(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    sections = _dealing(rope).sections
    if sections and _dealing(rope).style != "listed":
        axis = np.repeat(np.arange(len(sections)), 2 * np.array(sections))[: rope.pairs]
        yield from _turned_by("sections twice as wide, cut off at the last pair", rope, axis)


def _restarted(rope: Rope, measured: Measurements | None) -> Iterable[Change]:
    """Each axis with a table of its own."""
    axes, p = _dealing(rope), rope.pairs
    if axes.series == "own":
        return
    axis = [axis for axis, _ in axes.assign(p)]
    within = [axis[:i].count(axis[i]) for i in range(p)]
    yield from _turned_by("θ₀, θ₁, … for each axis", rope, axis, within)
    theta = np.array([rope.base ** -(j / axis.count(a)) for j, a in zip(within, axis, strict=True)])
    if rope.scaling is None and not np.allclose(theta, frequencies(rope)):
        yield Change("base^(−j/k) for the k pairs of each axis", {"theta": theta})


_EACH = "turn each pair by the axis that the model gives it; test with t, h and w that differ"
_add("one axis for all pairs", "pairs of the other axes turn with the position of one",
     "positions of text, (n,), used where (axes, n) are meant, or the other rows dropped", _EACH, "sglang#36763",
     _one_axis, of_axes=True)  # fmt: skip
_add("axes in another order", "the right pairs, each turned by the position of another axis",
     "(t, w, h) or (x, y) for (t, h, w) or (row, column)", _EACH, "—", _axes_reordered,
     of_axes=True)  # fmt: skip
_add("pairs dealt otherwise", "some pairs turn with the position of another axis",
     "sections of Qwen2-VL for the interleaved axes of Qwen3-VL, Pixtral's frequencies for axial ones, or the reverse",
     "follow mrope_interleaved, or the model's vision code", "MNN#4133, mlx-vlm#576", _dealt_otherwise,
     of_axes=True)  # fmt: skip
_add("other sections", "some pairs turn with the position of another axis",
     "the mrope_section of another model, or one position read for two axes", _EACH, "—", _sections_otherwise,
     GENERIC, of_axes=True)  # fmt: skip
_add("sections too wide", "pairs turn with the axis of an earlier section",
     "mrope_section counted in features: it counts pairs", "cut the frequencies, not the features, by it", "—",
     _wide_sections, of_axes=True)  # fmt: skip
_add("frequencies restart with each axis", "the first pair of each axis is the fastest",
     "a table for each axis, where one series runs over all of them", "deal one series of frequencies to the axes", "—",
     _restarted, of_axes=True)  # fmt: skip
_add("one series for all axes", "only the first axis has a pair that turns by 1",
     "one series of frequencies over all pairs, where each axis has its own",
     "give each axis base^(−j/k) for its k pairs", "—", _one_series, of_axes=True)  # fmt: skip


# ── Behaviour ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _only(pick: Callable[[int, int], Any]) -> Wrap:
    """Rotates only the part of x (h, n, d) that pick(h, n) selects."""

    def wrap(fn: Candidate, rope: Rope) -> Candidate:
        def broken(x: Any, positions: Any) -> Any:
            y = x.copy()
            part = (..., *pick(x.shape[-3] if x.ndim > 2 else 1, x.shape[-2]), slice(None))
            part = part if x.ndim > 2 else (..., *part[2:])
            y[part] = fn(x, positions)[part]
            return y

        return broken

    return wrap


def _after(change: Callable[[Any, Any, Any], Any]) -> Wrap:
    """change(y, x, positions) of a right result."""
    return lambda fn, rope: lambda x, positions: change(fn(x, positions), x, positions)


def _heads_as_positions(fn: Candidate, rope: Rope) -> Candidate:
    def broken(x: Any, positions: Any) -> Any:
        if x.ndim < 3:
            return fn(x, positions)
        rows = np.arange(x.shape[-3]) % x.shape[-2]
        return fn(x.swapaxes(-2, -3), positions[..., rows]).swapaxes(-2, -3)

    return broken


def _single_row(fn: Candidate, rope: Rope) -> Candidate:
    return lambda x, positions: fn(x, positions if x.shape[-2] > 1 else np.zeros_like(positions))


def _counted(fn: Candidate, rope: Rope) -> Candidate:
    def broken(x: Any, positions: Any) -> Any:
        n = x.shape[-2]
        up = n > 1 and bool((np.diff(positions) == 1).all())
        return fn(x, positions + 1 if up else positions)

    return broken


def _sorted(fn: Candidate, rope: Rope) -> Candidate:
    def broken(x: Any, positions: Any) -> Any:
        falling = positions.shape[-1] > 2 and bool((np.diff(positions) < 0).all())
        return fn(x, positions[..., ::-1] if falling else positions)

    return broken


def _misread(fn: Candidate, rope: Rope) -> Candidate:
    def broken(x: Any, positions: Any) -> Any:
        raw = np.frombuffer(positions.base if positions.base is not None else positions, np.int64)
        same = positions.dtype == np.int64 and positions.flags.c_contiguous
        return fn(x, positions if same else np.resize(np.abs(raw) % 4096, positions.shape))

    return broken


def _one_buffer(fn: Candidate, rope: Rope) -> Candidate:
    kept: dict[tuple[int, ...], Any] = {}

    def broken(x: Any, positions: Any) -> Any:
        out = kept.setdefault(x.shape, np.empty_like(x))
        out[...] = fn(x, positions)
        return out

    return broken


def _unwritten(fn: Candidate, rope: Rope) -> Candidate:
    def broken(x: Any, positions: Any) -> Any:
        out = np.empty_like(x)
        out[..., : rope.head_dim // 2] = fn(x, positions)[..., : rope.head_dim // 2]
        return out

    return broken


def _grown_theta(rope: Rope, length: int) -> Candidate:
    g = max(1.0, length / 2048)
    theta = frequencies(rope) * g ** -(np.arange(rope.pairs) / max(rope.pairs - 1, 1))
    return replace(recipe_of(rope), theta=theta).candidate()


def _stale(fn: Candidate, rope: Rope) -> Candidate:
    longest = [0]

    def broken(x: Any, positions: Any) -> Any:
        longest[0] = max(longest[0], int(np.max(positions)) + 1)
        return _grown_theta(rope, longest[0])(x, positions)

    return broken


def _grown(fn: Candidate, rope: Rope) -> Candidate | None:
    if isinstance(rope.scaling, LENGTH_DEPENDENT) or rope.pairs < 2:
        return None
    return lambda x, positions: _grown_theta(rope, int(np.max(positions)) + 1)(x, positions)


def _mutate(y: Any, x: Any, positions: Any) -> Any:
    x[...] = y
    return x


def _strides(fn: Candidate, rope: Rope) -> Candidate:
    return lambda x, positions: fn(x if x.flags.c_contiguous else np.resize(x.base.ravel(), x.shape), positions)


def _other_dtype(y: Any, x: Any, positions: Any) -> Any:
    return y.astype(np.float64 if x.dtype == np.float32 else np.float32)


def _at_zero(y: Any, x: Any, positions: Any) -> Any:
    with np.errstate(invalid="ignore"):
        return (y * (positions / positions).reshape(-1, x.shape[-2])[0][:, None]).astype(y.dtype)


def _leak(y: Any, x: Any, positions: Any) -> Any:
    return y + 0 * x.sum(axis=-2, keepdims=True)


def _normalised(fn: Candidate, rope: Rope) -> Candidate:
    def broken(x: Any, positions: Any) -> Any:
        wide = x.astype(np.float32)
        return fn((wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype), positions)

    return broken


_ALL = slice(None)
_add_behaviour("only the first head rotated", "heads after the first come back as they were",
     "a kernel's grid, or a loop, that covers one head", "cover all heads", "mlx-rs#359",
     _only(lambda h, n: (slice(0, 1), _ALL)))  # fmt: skip
_add_behaviour("only the first row rotated", "rows after the first come back as they were", "a loop left too early",
     "cover all rows", "—", _only(lambda h, n: (_ALL, slice(0, 1))))  # fmt: skip
_add_behaviour("last row not rotated", "the last row comes back as it was", "a loop to n − 1", "loop to n", "—",
     _only(lambda h, n: (_ALL, slice(0, max(n - 1, 1)))))  # fmt: skip
_add_behaviour("heads read as positions", "equal heads come out different, along the positions nothing changes",
     "(b, h, n, d) read as (b, n, h, d)", "transpose, or say which axis is which", "—",
     _heads_as_positions)  # fmt: skip
_add_behaviour("heads differ", "equal heads come out different, or some numbers of heads, batches or axes are wrong",
     "heads that share no table, an axis mistaken, or a path for certain shapes",
     "use one table and one path for all heads", "—", _only(lambda h, n: (slice(0, 2), _ALL)))  # fmt: skip
_add_behaviour("rows differ", "equal rows at equal positions come out different, or their order matters",
     "a row's place in the call is used beside its position", "let the position alone decide", "—",
     _only(lambda h, n: (_ALL, slice(0, max(n - 2, 1)))))  # fmt: skip
_add_behaviour("one row differs", "a row alone is rotated otherwise than within a call",
     "a special path for decoding", "use one path", "mlx-rs#359", _single_row)  # fmt: skip
_add_behaviour("some lengths wrong", "most numbers of rows are right, some are wrong",
     "a block of the kernel at its edge: the last, partial block dropped, or a path for certain lengths",
     "cover partial blocks; test lengths around powers of two, and n = d", "kernels",
     _only(lambda h, n: (_ALL, slice(0, n if n < 64 else n // 64 * 64))))  # fmt: skip
_add_behaviour("consecutive positions wrong", "positions that count up by one are rotated otherwise than others",
     "a fast path for a prompt, which takes an offset or a slice of the table instead of the positions",
     "hold the fast path to the general one, from 0 and from other positions", "kernels",
     _counted)  # fmt: skip
_add_behaviour("order of positions matters", "equal positions, or positions that fall, are rotated otherwise",
     "positions are sorted, made unique, or only their first and last are read", "index with the positions as they are",
     "kernels", _sorted)  # fmt: skip
_add_behaviour("positions misread", "positions of int32, or with strides, are read wrongly",
     "the bytes are read as contiguous int64", "convert the positions first", "kernels", _misread)  # fmt: skip
FAULTS["positions of a batch misread"] = Fault(
    "positions of a batch misread", "positions (b, n), which batched= claims, are not each row's own for each row of x",
    "the positions of the first row, or the batch stride of a table left out, for all rows",
    "index the table with every row's positions, or refuse what is not (n,)", "Liger, Llama 4")  # fmt: skip
_add_behaviour("result overwritten", "a result changes when the function is called again",
     "one output buffer is used for all calls", "allocate the result, or copy it", "kernels", _one_buffer)  # fmt: skip
_add_behaviour("output not written", "outputs hold what stood in memory before",
     "the result is allocated without being filled, and a part of it is not written",
     "write every feature of every row, those that do not turn too", "kernels", _unwritten)  # fmt: skip
_add_behaviour("rows leak into each other", "NaN in one row reaches others",
     "a reduction over rows, or memory that is read before it is written", "rows are independent", "kernels",
     _after(_leak))  # fmt: skip
_add_behaviour("state between calls", "the same call returns something else later",
     "a table cached without its key, or grown by a longer call",
     "make the table's key complete, or fix the length beforehand", "equinox 0.13.8, transformers#25104",
     _stale)  # fmt: skip
_add_behaviour("depends on the length", "a row changes with the largest position of its call",
     "a base that grows with the length where none is meant", "fix the length beforehand", "transformers#25104",
     _grown)  # fmt: skip
_add_behaviour("mutates its input", "x is changed after the call", "in-place arithmetic", "write to another array",
     "kernels", _after(_mutate))  # fmt: skip
_add_behaviour("strides ignored", "a view of x is rotated otherwise than its copy",
     "memory read as if it were contiguous, or a path for some views", "use the strides, or copy first", "kernels",
     _strides)  # fmt: skip
_add_behaviour("wrong dtype out", "the result has another dtype than x",
     "the result keeps the dtype that tables or arithmetic gave it, wider or narrower than that of x",
     "cast the result to the dtype of x", "kernels", _after(_other_dtype))  # fmt: skip
_add_behaviour("not finite", "NaN or infinity from finite x",
     "a division by the position, a table that ends, or an overflow",
     "check the extreme positions", "kernels", _after(_at_zero))  # fmt: skip
_add_behaviour("not linear", "f(4x) is not 4·f(x), or NaN comes out as a number",
     "x is normalised, clipped or cleaned of NaN on the way; or a constant is added, or results are rounded to a grid",
     "rotation alone", "kernels with a fused norm", _normalised)  # fmt: skip
FAULTS["negative positions wrong"] = Fault(
    "negative positions wrong", "positions below 0, which min_position= allows, are rotated otherwise than expected",
    "a table indexed from its end, an unsigned type, or the size of m alone",
    "turn backwards for negative positions, or refuse them",
    "kernels")  # fmt: skip
FAULTS["wrong beyond a position"] = Fault(
    "wrong beyond a position", "right below a position, wrong from there on, by no known rule",
    "a table that ends there, is read beyond its end, or was grown by another rule",
    "make the table as long as the positions; grow it by the rule that made it", "sglang 0.5.23")  # fmt: skip
FAULTS["one position wrong"] = Fault(
    "one position wrong", "one position is wrong in every call, all others are right",
    "a row of the table that was overwritten, or filled by something else", "compare this row with its neighbours",
    "—")  # fmt: skip
FAULTS["some positions wrong"] = Fault(
    "some positions wrong", "some positions are wrong in every call, others, beyond them too, are right",
    "a part of the table that was filled by something else, or positions that are rounded, or lose some of their bits",
    "compare these rows of the table with their neighbours", "—")  # fmt: skip
FAULTS["switch at another length"] = Fault(
    "switch at another length", "right in long calls, but calls about as long as the original length have another Θ",
    "the length compared by < for <=, or the largest position taken for the length, which is one more",
    "the original length L₀ itself is short: switch, or stretch, where the largest position + 1 > L₀", "—")  # fmt: skip
FAULTS["another order of features"] = Fault(
    "another order of features", "the right numbers in other places, or with other signs, at every position alike",
    "pairs are written in another layout, or the rows of a weight are permuted",
    "use one layout for queries and keys, and write features where the model expects them", "DeepSeek-V3")  # fmt: skip
FAULTS["coarser than asked"] = Fault(
    "coarser than asked", "errors are within a float32 angle's, but not within the grade that was asked for",
    "angles in float32, or tables or products in the dtype of x", "exact or float64 angles; round the result once",
    "every library")  # fmt: skip
