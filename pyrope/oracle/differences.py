"""A measured description against the expected rope, field by field: each difference is a mistake with a name.

Causes come first, and what follows from a difference that was named is not said again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..phase import cos_sin
from ..theta import Proportional, Rope, frequencies
from .candidate import BITS, UNIT
from .frequencies import RAMPS, Measured, name_frequencies, rounded, to_narrow, wrapped
from .operator import Description, dealt, shape_of
from .rescalings import Meant, listed, meant
from .tolerance import U32, angle_errors

NEAR = 2048  # positions up to which the angles of any float32 pipeline are nearly exact
BACKWARDS, SWAPPED = "some pairs turn backwards", "sine and cosine swapped"
VAGUE = ("wrong frequencies", "inexact frequencies")


class Difference(NamedTuple):
    """The name of a mistake, and what was measured of it."""

    fault: str
    fact: str


@np.errstate(all="ignore")  # a candidate may return anything
def differences(found: Description, rope: Rope, dtype: str) -> list[Difference]:
    """How a description differs from that of a rope, causes first."""
    shapes = _shapes(found, rope)
    if found.shape.layout == "none" or not found.known.any():
        return shapes
    due, unit = meant(rope, found.shape.width), UNIT[dtype]
    truth, rest = Truth.of(found, due.rope), _rest(found)
    if no_rotation := _terms(found, truth) or _by_output(found):
        return shapes + no_rotation + rest
    if found.uneven > 0.05 + 4 * unit:
        return shapes + (_growth(found) or _lengths(found, truth)) + rest
    start, factor = _start(found), _factor(found, rope) + rest
    if start and start[0].fault == SWAPPED:
        return shapes + start + factor
    signs, axes, apart = _signs(found, due.rope), _axes(found, due.rope), _own_angles(found, due.rope)
    if not (shapes or signs or axes or start) and (inexact := _rounded(found, truth) or _inexact(found, truth)):
        return inexact + factor
    if apart:
        return shapes + signs + apart + start + factor
    if found.straight < found.at[-1] // 2:  # a matter of the positions: frequencies mean little
        return shapes + axes + factor
    numbers, follows = _frequencies(found, due, rope)
    if follows is not None and not _factor(found, follows):  # the factor of lengths comes with the frequencies
        factor = rest
    if numbers and numbers[0].fault not in VAGUE:  # beyond half a turn for a position pairs seem to turn backwards
        signs = [one for one in signs if one.fault != BACKWARDS]
    if numbers and numbers[0].fault == "not rotated":
        return numbers + factor
    if shapes and numbers and numbers[0].fault in ("wrong exponent", "scaling ignored"):  # as the other width has them
        shapes, numbers = [Difference(shapes[0].fault, f"{shapes[0].fact}; {numbers[0].fact}"), *shapes[1:]], []
    return shapes + signs + axes + numbers + start + factor


# ── Pairs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pairing(reached: Array, expected: Array) -> Difference:
    """Where outputs are made from other features than those of any layout: bool (d, d), output and input."""
    wrong = (reached & ~expected).any(axis=1) | (reached.sum(axis=1) > 2)
    f = int(np.argmax(wrong))
    got, due = (np.flatnonzero(made[f]) for made in (reached, expected))
    if (reached.sum(axis=1) > 2).mean() > 0.25:
        fact = f"output {f} depends on {len(got)} features, not on {_and(due)} alone"
        return Difference("features mixed", fact)
    count = f"{int(wrong.sum())} of {len(wrong)} outputs are made from other features than expected"
    return Difference("wrong pairing", f"{count}: output {f} from {_and(got)}, not {_and(due)}")


def _and(some: Any) -> str:
    return " and ".join(map(str, some[:4])) + " …" * (len(some) > 4)


def _shapes(found: Description, rope: Rope) -> list[Difference]:
    """Other pairs, or other features that turn."""
    got, due, d = found.shape, shape_of(rope), found.head_dim
    if got == due:
        return []
    made, expected = (", ".join(f"({a}, {b})" for a, b in shape.features(d)[0][:3].tolist()) for shape in (got, due))
    name = "" if got.layout == "none" else f"{got.layout}, "
    fact = f"the pairs are {name}{made}, …, where {due.layout}, {expected}, … are expected"
    turning, meant_to = found.measured.turning, int(np.count_nonzero(frequencies(rope)))
    if got.layout == due.layout == "half" and d in (got.width, due.width) and turning.sum() == meant_to < d // 2:
        apart = f"pairs are {got.width // 2} features apart, {made}, …, not {due.width // 2}, {expected}, …"
        known = isinstance(rope.scaling, Proportional)
        return [Difference("wrong pairing", apart + ": a proportional rotation read as a partial one" * known)]
    other = got.layout == "none" or (got.layout != due.layout and min(got.width, due.width) > 2)
    said = [Difference("wrong pairing", fact)] if other else []
    if (got.width, got.start) != (due.width, due.start) and got.layout != "none":
        fact = f"{got.width} features turn, from {got.start} on, where {due.width} from {due.start} on are expected"
        names = {due.width: "wrong end rotated", d: "whole head rotated"}
        said.append(Difference(names.get(got.width, "wrong rotary width"), fact))
    return said


def _rest(found: Description) -> list[Difference]:
    """Features outside of the pairs, which should stay."""
    wrong = ~(np.abs(found.still - 1) <= 2 * UNIT[found.dtype] + 2e-5).all(axis=(0, 1))
    if not wrong.any():
        return []
    outside, factors = found.outside[wrong], found.rest[wrong]
    fact = f"{listed(outside, 'feature')} should stay, and come back times {np.median(factors):.6g}"
    return [Difference("rest changed" if factors.any() else "rest zeroed", fact)]


# ── What stands in the place of cos and sin ──────────────────────────────────────────────────────────────────────────


class Truth(NamedTuple):
    """What is expected of the pairs that were measured, at the same positions."""

    rope: Rope
    m: Array  # (axes, n, p): the position that turns each pair, 0 where another axis has one
    cos: Array  # (axes, n, p), without the attention factor
    sin: Array
    allowed: Array  # (axes, n, p): how far off a float32 angle may be

    @classmethod
    def of(cls, found: Description, rope: Rope) -> Truth:
        at, owner = found.at, np.zeros(rope.pairs, int)
        positions = [at]
        if rope.axes is not None:
            owner = np.array([axis for axis, _ in rope.axes.assign(rope.pairs)])
            count = range(rope.axes.count)
            positions = [np.stack([at * (j == axis) for j in count]) for axis in count]
        m = np.stack([at[:, None] * (owner == axis) for axis in range(len(positions))])
        tables = [cos_sin(one, rope.rotation_only) for one in positions]
        cos, sin = (np.stack([table[k] for table in tables]) for k in (0, 1))
        return cls(rope, m, cos, sin, angle_errors(rope, m))

    @property
    def angle(self) -> Array:
        return np.asarray(np.arctan2(self.sin, self.cos))


def _terms(found: Description, truth: Truth) -> list[Difference]:
    """What each output has in the place of cos and sin, if these have another form."""
    some, unit, names = found.at <= NEAR, UNIT[found.dtype], []
    if found.factor and not 0.1 < found.factor < 10:
        return []
    forms = _forms(truth, some)
    for j, (side, due) in product((0, 1), (("own", "cos"), ("other", "sin"))):
        entry = getattr(found, side)[:, some][..., j]
        off = {name: float(np.abs(entry - form).max()) for name, form in forms.items()}
        best = due if off[due] < 0.02 + 4 * unit else min(off, key=lambda name: off[name])
        names.append(
            best
            if off[best] < min(0.02 + 4 * unit, off[due] / 4) or (best == due and off[due] < 0.02 + 4 * unit)
            else "?"
        )
    order = [name.partition(" of the ")[2] for name in names]  # of the frequencies, if all have the same
    if names == ["cos", "sin"] * 2 or "?" in names or (order[0] and len(set(order)) == 1):
        return []
    if all("without" in name for name in names):
        return []  # a matter of the factor
    fault = next((fault for fault, is_so in _TERMS if is_so(names)), "wrong term in the pairs")
    a, b, c, d = (name if name in ("cos", "sin") else f"({name})" for name in names)
    fact = f"the outputs of a pair are x₁·{a} − x₂·{b}, x₂·{c} + x₁·{d}, not x₁·cos − x₂·sin, x₂·cos + x₁·sin"
    return [Difference(fault, _PLAIN.get(fault, fact))]


def _forms(truth: Truth, some: Array) -> dict[str, Array]:
    """What an output may have of a feature, by its name."""
    cos, sin, a, p = truth.cos[:, some], truth.sin[:, some], truth.rope.attention_factor, truth.rope.pairs
    ahead = (truth.m[:, some] + (truth.m[:, some] > 0)) * frequencies(truth.rope)
    forms = {
        "cos": cos, "sin": sin, "−cos": -cos, "−sin": -sin, "0": 0 * cos, "1": 1 + 0 * cos, "−1": 0 * cos - 1,
        "sin·cos": sin * cos, "−sin·cos": -sin * cos, "cos − sin²": cos - sin**2, "cos + sin²": cos + sin**2,
        "|cos|": np.abs(cos), "|sin|": np.abs(sin), "cos²": cos**2, "sin²": sin**2, "cos² − sin²": cos**2 - sin**2,
        "cos(cos)": np.cos(cos), "sin(sin)": np.sin(sin), "cos(sin)": np.cos(sin), "sin(cos)": np.sin(cos),
        "sin, a position ahead": truth.rope.direction * np.sin(ahead), "cos, a position ahead": np.cos(ahead),
    }  # fmt: skip
    orders = {
        "pairs in reverse": np.arange(p)[::-1],
        "next pair": np.arange(1, p + 1) % p,
        "pair before": np.arange(p) - 1,
    }
    for words, order in orders.items() if truth.rope.axes is None and p > 2 else ():
        forms |= {f"cos of the {words}": cos[..., order], f"sin of the {words}": sin[..., order]}
    forms = {name: a * form for name, form in forms.items()}
    return forms if a == 1 else forms | {"cos without the factor": cos, "sin without the factor": sin}


def _are(*kinds: str) -> Callable[[list[str]], bool]:
    """Whether the terms of the own and of the other features are these, but for a sign."""
    return lambda names: all({name.strip("−") for name in names[k::2]} == {kind} for k, kind in enumerate(kinds))


_PLAIN = {
    "direction": "all pairs turn the other way",
    "zeros returned": "every output of the pairs is 0",
    "not rotated": "x comes back as it was",
}
_TERMS: list[tuple[str, Callable[[list[str]], bool]]] = [
    ("zeros returned", lambda names: set(names) == {"0"}),
    ("not rotated", lambda names: names == ["1", "0", "1", "0"]),
    ("direction", lambda names: names == ["cos", "−sin"] * 2),
    (SWAPPED, _are("sin", "cos")),
    ("wrong sign of one term", _are("cos", "sin")),
    ("in-place aliasing", lambda names: any("sin·cos" in name for name in names)),
    ("cosine of a cosine", lambda names: any(name.endswith(")") for name in names)),
    ("sign of the sine lost", lambda names: "|sin|" in names),
    ("attention factor: in part", lambda names: any("without" in name for name in names)),
]


def _growth(found: Description) -> list[Difference]:
    """Lengths that grow or shrink with the position, as in xPos."""
    if (rate := found.growth) is None:
        return []
    p = len(rate)
    usual = np.log((np.arange(p) / p + 0.4) / 1.4) / 512  # of xPos: ζ^(m/512), ζ = (2i + 0.4r)/(1.4r)
    ratio = float(np.median(rate / usual))
    same = ratio and np.allclose(rate, ratio * usual, rtol=0.02, atol=1e-9)
    how = f", as in xPos: ζ^({'−' * (ratio < 0)}m/{512 / abs(ratio):.4g})" if same else ""
    fact = f"lengths are multiplied by {math.exp(rate.min()):.6g} to {math.exp(rate.max()):.6g} with each position{how}"
    return [Difference("lengths grow with the position", fact)]


def _by_output(found: Description) -> list[Difference]:
    """Outputs that are multiplied by different numbers, the same at all positions."""
    size, unit = np.where(found.known, found.size, np.nan), UNIT[found.dtype]
    each = np.nanmedian(size, axis=(0, 1))  # (p, 2)
    wrong = np.abs(each / found.factor - 1) > 4 * unit + 1e-4
    if not wrong.any() or np.nanmax(np.abs(size / each - 1), initial=0) > 4 * unit + 1e-5:
        return []
    _, writes = found.shape.features(found.head_dim)
    order = np.argsort(writes[wrong])
    by = each[wrong][order]
    numbers = f"{by[0]:.6g}" + f" to {by[-1]:.6g}" * (len(by) > 1)
    which = listed(writes[wrong][order], "feature")
    fact = f"lengths are multiplied by {numbers} in {which}, by {found.factor:.6g} in most others"
    return [Difference("features multiplied differently", fact)]


def _lengths(found: Description, truth: Truth) -> list[Difference]:
    """Cosines or sines that are multiplied by numbers of their own, or lengths that no form has."""
    some, numbers = found.at <= NEAR, []
    for j, (side, table) in product((0, 1), ((found.own, truth.cos), (found.other, truth.sin))):
        big = np.abs(table[:, some]) > 0.1
        numbers.append((side[:, some][..., j] / table[:, some])[big])
    if all(part.size and np.ptp(part) < 0.01 * abs(part[0]) + 8 * UNIT[found.dtype] for part in numbers):
        a, b, c, d = (f"{np.median(part):.4g}" for part in numbers)
        fact = f"the outputs of a pair are x₁·{a}·cos − x₂·{b}·sin, x₂·{c}·cos + x₁·{d}·sin"
        return [Difference("wrong term in the pairs", fact)]
    low, high = (float(limit(found.size[found.known])) for limit in (np.min, np.max))
    return [
        Difference(
            "no rotation", f"the outputs of pairs have lengths from {low:.4g} to {high:.4g} where all should be alike"
        )
    ]


# ── Signs, axes, angles ──────────────────────────────────────────────────────────────────────────────────────────────


def _signs(found: Description, rope: Rope) -> list[Difference]:
    """The direction in which each output turns."""
    total, p = found.theta.sum(axis=0), found.theta.shape[1]
    seen = (np.abs(total) > 8 * found.unsure.max(axis=0)) & (np.abs(total) < 1.6)
    back = seen & (np.sign(total) == -rope.direction)
    if not back.any():
        return []
    if back[seen].all():
        return [Difference("direction", _PLAIN["direction"])]
    if (back[:, 0] == back[:, 1]).all():
        return [Difference(BACKWARDS, f"{listed(np.flatnonzero(back[:, 0]))} of {p} turn the other way")]
    which = [
        name for j, name in enumerate(("first", "second")) if (back == seen)[:, j].all() and not back[:, 1 - j].any()
    ]
    some = f"the {which[0]} outputs of all pairs" if which else f"{int(back.sum())} of {back.size} outputs"
    return [Difference("wrong sign of one term", f"{some} have the sine with the other sign")]


def _axes(found: Description, rope: Rope) -> list[Difference]:
    """Which axis turns each pair."""
    if rope.axes is None:
        return []
    turns = np.abs(found.theta) > 8 * found.unsure  # (axes, p, 2)
    due, owner = np.array([axis for axis, _ in rope.axes.assign(rope.pairs)]), found.owner
    several = np.flatnonzero((turns.sum(axis=0) > 1).any(axis=-1))
    if len(several):
        first = _and(np.flatnonzero(turns[:, several[0]].any(axis=-1)))
        return [Difference("axes mixed", f"{listed(several)} turn with several axes, pair {several[0]} with {first}")]
    wrong = np.flatnonzero((owner != due) & turns.any(axis=(0, 2)))
    if not len(wrong):
        return []
    if len(set(owner.tolist())) == 1:
        return [Difference("one axis for all pairs", f"axis {owner[0]} turns all pairs")]
    to = {int(axis): set(owner[due == axis].tolist()) for axis in set(due.tolist())}
    if all(len(axes) == 1 for axes in to.values()) and len({min(axes) for axes in to.values()}) == len(to):
        order = ", ".join(f"{min(axes)} for {axis}" for axis, axes in to.items())
        return [Difference("axes in another order", f"pairs turn with the axes {order}")]
    i = int(wrong[0])
    fact = f"{len(wrong)} of {len(owner)} pairs turn with another axis, pair {i} with {owner[i]}, not {due[i]}"
    return [Difference("pairs dealt otherwise", f"{fact}: {dealt(owner)}, where {dealt(due)} is expected")]


def _own_angles(found: Description, rope: Rope) -> list[Difference]:
    """Two outputs of a pair that turn by different angles, or with different axes."""
    theta, unsure, axes = np.abs(found.theta).max(axis=0), found.unsure.max(axis=0), found.theta
    axes = np.argmax(np.abs(found.theta), axis=0)  # (p, 2)
    apart = np.abs(theta[:, 0] - theta[:, 1]) > 8 * unsure.max(axis=1) + 200 * U32 * theta.max(axis=1)
    apart |= (axes[:, 0] != axes[:, 1]) & (theta > 8 * unsure).all(axis=1)
    if not apart.any():
        return []
    due, p, i = frequencies(rope), rope.pairs, np.arange(rope.pairs)
    tables = {
        "repeated table with split features": np.stack((i // 2, (i + p) // 2), 1),
        "concatenated table with interleaved features": np.stack((2 * i % p, (2 * i + 1) % p), 1),
    }
    for fault, index in tables.items():
        if (np.abs(theta - due[index]) <= 8 * unsure + 200 * U32 * due[index]).all():
            fact = f"the two outputs of pair 1 turn with the frequencies of pairs {_and(index[1 % p])}"
            return [Difference(fault, fact)]
    k = int(np.flatnonzero(apart)[0])
    which = f", with axes {_and(axes[k])}" if axes[k, 0] != axes[k, 1] else ""
    fact = f"the two outputs turn by different angles in {listed(np.flatnonzero(apart))} of {p}"
    first = f"pair {k} by {theta[k, 0]:.6g} and {theta[k, 1]:.6g} for a position{which}"
    return [Difference("two angles in one pair", f"{fact}: {first}")]


def _frequencies(found: Description, due: Meant, rope: Rope) -> tuple[list[Difference], Rope | None]:
    """What is wrong with the frequencies, and the rope that has them, if that is known; those of another width may also
    be as expected of the first pairs."""
    measured, p = found.measured, len(due.theta)
    if p != rope.pairs:
        first = np.concatenate((frequencies(rope), np.zeros(p)))[:p]
        whole = np.arange(p) < np.count_nonzero(frequencies(rope))
        series = [rope.base ** (-2 * np.arange(p) / r) for r in (rope.width, rope.head_dim)]
        if any(measured.fits(theta, RAMPS) for theta in (first, *series, *(one * whole for one in series))):
            return [], None
    named = name_frequencies(measured, due)
    if named is not None and named.fault in VAGUE and (measured.theta < 0).any():
        named = name_frequencies(Measured(np.abs(measured.theta), measured.unsure), due)  # that some turn back is said
    return ([], None) if named is None else ([Difference(named.fault, named.fact)], named.rope)


def _start(found: Description) -> list[Difference]:
    """Pairs that are turned at position 0 already."""
    quarter = (np.abs(np.abs(found.start) - math.pi / 2) < 0.01).all(axis=0)
    if quarter.any():
        which = "all" if quarter.all() else "the first" if quarter[0] else "the second"
        return [Difference(SWAPPED, f"at position 0 {which} outputs of the pairs are turned by a quarter")]
    if found.unexplained_start > 0.02 + 8 * UNIT[found.dtype]:
        i = int(np.argmax(np.abs(found.start[:, 0])))
        fact = f"pair {i} is turned by {found.start[i, 0]:.4g} at position 0, which no position offset explains"
        return [Difference("turned at position 0", fact)]
    moved = {axis: offset for axis, offset in enumerate(found.offsets) if offset}
    if not moved:
        return []
    on = {axis: f" on axis {axis}" if len(found.offsets) > 1 else "" for axis in moved}
    words = ", ".join(f"{m:+.6g}{on[axis]}" for axis, m in moved.items())
    whole = all(m == round(m) for m in moved.values())
    names = {1.0: "positions one too high", -1.0: "positions one too low"}
    fault = names.get(next(iter(moved.values())), "positions shifted")
    return [
        Difference(fault, f"position 0 is turned as if it were at {words}{', which is not an integer' * (not whole)}")
    ]


def _factor(found: Description, rope: Rope) -> list[Difference]:
    """What lengths are multiplied with."""
    due, got, d = rope.attention_factor, found.factor, found.head_dim
    near = 2 * UNIT[found.dtype] + 2e-5 + min(found.uneven, 0.02) / 2
    if abs(got / due - 1) <= near:
        return []
    fact = f"the length of every pair is multiplied by {got:.6g}, where {due:.6g} is expected"
    known = {"missing": 1.0, "squared": due**2, "inverted": 1 / due, "its root": math.sqrt(due)} if due != 1 else {}
    for how, value in known.items():
        if abs(got / value - 1) < near + 1e-4:
            return [Difference(f"attention factor: {how}", fact)]
    for words, value in {f"1/√{d}": d**-0.5, f"{d}^(−1/4)": d**-0.25}.items():
        if abs(got / due / value - 1) < near + 1e-4:
            return [Difference("softmax scale folded in", f"{fact}: {words} times")]
    return [Difference(f"attention factor: {'another' if due != 1 else 'unwanted'}" if got else "zeros returned", fact)]


# ── Precision ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rounded(found: Description, truth: Truth) -> list[Difference]:
    """Tables, positions, frequencies or angles that are numbers of a narrow dtype."""
    unit, read, a = UNIT[found.dtype], np.stack((found.own, found.other)), truth.rope.attention_factor
    parts = {"cosines and sines": read, "cosines": found.own, "sines": found.other}
    for name, (what, part), by in product(("bfloat16", "float16"), parts.items(), (1, a)):
        entries, bits = part / by, BITS[name]
        off, size = np.abs(entries - to_narrow(entries, bits)), np.abs(entries)
        tells = (size > 1e-3) & (size < 1)
        if 2.0**-bits > unit and tells.sum() > 16 and (off <= 4 * max(unit, U32) * size)[tells].all():
            return [Difference(f"{name} tables", f"all {what} are {name} numbers")]
    size = np.abs(read / a)
    for levels in (127, 128, 255, 32767, 32768) if unit < 1e-5 and ((size > 1e-3) & (size < 1)).sum() > 16 else ():
        if (np.abs(size * levels - np.rint(size * levels)) < levels * 4 * U32 + 1e-5).all():
            return [Difference("tables in few bits", f"all cosines and sines are multiples of 1/{levels}")]
    allowed = (8 * unit + 2e-5 + 2 * truth.allowed)[..., None]

    def share(angle: Array) -> float:
        return float(((np.abs(wrapped(found.angle - angle[..., None])) <= allowed) | ~found.known).mean())

    exact = share(truth.angle)
    ways = ((fault, fact) for fault, fact, angle in _rounded_angles(truth) if share(angle) > max(0.97, exact + 0.02))
    return [Difference(*way) for way in ways][:1] if exact < 1 else []


def _rounded_angles(truth: Truth) -> Iterator[tuple[str, str, Array]]:
    """Angles (axes, n, p) with one of their parts, or several, rounded: the mistake, the fact."""
    theta, parts = frequencies(truth.rope) * truth.rope.direction, ("positions", "inverse frequencies", "angles")
    for name, chosen in product(("bfloat16", "float16"), sorted(product((0, 1), repeat=3), key=sum)[1:]):
        bits = BITS[name]
        m, w = (to_narrow(part, bits) if flag else part for part, flag in zip((truth.m, theta), chosen, strict=False))
        angle = to_narrow(m * w, bits) if chosen[2] else m * w
        which = [part for part, flag in zip(parts, chosen, strict=True) if flag]
        fact = f"angles are as m·θ is if {' and '.join(which)} are rounded to {name}"
        yield f"{name} {which[-1].removesuffix('s') if chosen[2] else which[-1]}", fact, angle


def _inexact(found: Description, truth: Truth) -> list[Difference]:
    """Angles that lose a little in each turn, a sine that is not exact, or angles of few bits."""
    off = np.where(found.known, wrapped(found.angle - truth.angle[..., None]), 0)
    exact = np.stack((truth.cos, truth.sin))[..., None]
    error = np.where(found.known, np.abs(np.stack((found.own, found.other)) / found.factor - exact), 0)
    worst = error.max(axis=(0, 1, 3, 4))  # (n,)
    near, far = float(worst[found.at <= 64].max()), float(worst.max())
    if found.at[-1] >= 1000 and 16 * UNIT[found.dtype] + 1e-5 < far < min(0.3, 4 * near):
        fact = f"cosines and sines are off by up to {far:.2g}, at small positions as at large ones"
        return [Difference("inexact sine", fact)]
    return _lost_in_turns(off, found, truth) or _coarse_angle(off, found, truth)


def _lost_in_turns(off: Array, found: Description, truth: Truth) -> list[Difference]:
    """The same error more with each turn: off, of the angles, is (axes, n, p, 2)."""
    whole = np.floor(truth.m * frequencies(truth.rope) / (2 * math.pi)) * truth.rope.direction
    turns = np.broadcast_to(whole[..., None], off.shape)
    allowed = np.broadcast_to(truth.allowed[..., None] + 8 * UNIT[found.dtype], off.shape)
    lost, most = 0.0, 64.0
    for _ in range(3):  # more turns, the better it is known
        some = (turns != 0) & (np.abs(turns) < most) & found.known
        weight = np.square(turns[some] / allowed[some])
        lost = float((off[some] / turns[some] * weight).sum() / max(weight.sum(), 1e-300))
        most = 0.5 / max(abs(lost), 1e-12)
    some = (np.abs(turns) < most) & found.known
    left = np.abs(off - lost * turns) <= allowed + 1.1 * abs(lost)
    missed = (some & ~left).sum(axis=(0, 1, 3)) / np.maximum(some.sum(axis=(0, 1, 3)), 1)  # (p,)
    if not (5e-8 < abs(lost) < 0.05 and missed.max() < 0.1 and (np.abs(off) > allowed)[some].any()):
        return []
    turn = rounded(2 * math.pi - lost, 1e-9, 10)
    return [Difference("2π rounded", f"angles gain {lost:.3g} in each turn, as if 2π were {turn:.9g}")]


def _coarse_angle(off: Array, found: Description, truth: Truth) -> list[Difference]:
    """Errors of the angle, (axes, n, p, 2), that grow with the position, but not in proportion, as with other θ."""
    beyond = (np.abs(off) > (2 * truth.allowed + 16 * UNIT[found.dtype] + 1e-6)[..., None]).any(axis=(0, 3))  # (n, p)
    measured, theta, far = found.measured, frequencies(truth.rope), found.at > found.at[-1] // 64
    same = (np.abs(measured.theta - theta) <= 4 * measured.unsure + 2.0**-10 * theta).all()
    if not beyond.any() or not same or np.abs(off[:, found.at <= 64]).max() > 0.05:
        return []
    pair = int(np.argmax(np.abs(off[:, far]).max(axis=(0, 1, 3))))
    rate = off[:, far][:, :, pair] / found.at[far][:, None]
    if np.ptp(rate) <= 0.5 * np.abs(rate).max() or np.abs(off[:, far][:, :, pair]).max() > 0.5:
        return []
    first = int(np.argmax(beyond.any(axis=1)))
    i = int(np.argmax(beyond[first]))
    worst = f"{np.abs(off[:, first, i]).max():.2g} at position {found.at[first]}, in pair {i}"
    fact = f"angles are off by {worst}, and by up to {np.abs(off).max():.2g} at larger ones"
    return [Difference("angle too coarse", fact)]
