"""A measured description against the expected rope, field by field: each difference is a mistake with a name.

Causes come first, and what follows from a difference that was named is not said again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..theta import Rope, frequencies
from .candidate import BITS, UNIT
from .frequencies import RAMPS, Measured, listed, meant, name_frequencies
from .operator import Description, dealt, shape_of
from .positions import SHIFTS
from .responses import narrowed
from .tolerance import U32, Tables

NEAR = 2048  # positions up to which the angles of any float32 pipeline are nearly exact
BACKWARDS, SWAPPED = "some pairs turn backwards", "sine and cosine swapped"
VAGUE = ("wrong frequencies", "inexact frequencies")


class Difference(NamedTuple):
    """The name of a mistake, and what was measured of it."""

    fault: str
    fact: str


@np.errstate(all="ignore")  # a candidate may return anything
def differences(found: Description, rope: Rope) -> list[Difference]:
    """How a description differs from that of a rope, causes first."""
    shapes = _shapes(found, rope)
    if not found.known.any():
        return shapes
    due = meant(rope, found.shape.width)
    truth, rest = Truth.of(found, due), _rest(found)
    if no_rotation := _terms(found, truth) or _lengths(found, truth):
        return shapes + no_rotation + rest
    start, factor = _start(found), _factor(found, rope) + rest
    signs, axes, apart = _signs(found, due), _axes(found, due), _own_angles(found, due)
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
    if shapes and numbers and numbers[0].fault in ("wrong exponent", "scaling ignored"):  # as the other width has them
        numbers = []
    return shapes + signs + axes + numbers + start + factor


# ── Pairs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pairing(reached: Array, expected: Array) -> Difference:
    """Where outputs are made from other features than those of any layout: bool (d, d), output and input."""
    wrong = (reached & ~expected).any(axis=1) | (reached.sum(axis=1) > 2)
    f, mixed = int(np.argmax(wrong)), (reached.sum(axis=1) > 2).mean() > 0.25
    got, due = (_and(np.flatnonzero(made[f])) for made in (reached, expected))
    count = f"{int(wrong.sum())} of {len(wrong)} outputs are made from other features than expected"
    return Difference("features mixed" if mixed else "wrong pairing", f"{count}: output {f} from {got}, not {due}")


def _and(some: Any) -> str:
    return " and ".join(map(str, some[:4])) + " …" * (len(some) > 4)


def _shapes(found: Description, rope: Rope) -> list[Difference]:
    """Other pairs, or other features that turn."""
    got, due, d = found.shape, shape_of(rope), found.head_dim
    if got == due:
        return []
    made, expected = (", ".join(f"({a}, {b})" for a, b in shape.features(d)[0][:3].tolist()) for shape in (got, due))
    fact = f"the pairs are {got.layout}, {made}, …, where {due.layout}, {expected}, … are expected"
    turning = int(found.measured.turning.sum())
    apart = got.layout == due.layout == "half" and turning == np.count_nonzero(frequencies(rope)) < d // 2
    other = got.layout != due.layout and min(got.width, due.width) > 2
    if apart and d in (got.width, due.width):  # a part of a head whose pairs are those of all of it, or the reverse
        return [Difference("wrong pairing", fact)]
    said = [Difference("wrong pairing", fact)] if other else []
    if (got.width, got.start) != (due.width, due.start):
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
        tables = Tables(rope.rotation_only, found.at)
        mine = np.array(tables.owner or [0] * rope.pairs) == np.arange(len(found.theta))[:, None, None]  # (axes, 1, p)
        still = ((tables.cos, 1.0), (tables.sin, 0.0), (tables.off32, 0.0))  # of pairs that another axis turns
        cos, sin, allowed = (np.where(mine, table, other) for table, other in still)
        return cls(rope, found.at[:, None] * mine, cos, sin, allowed)


def _terms(found: Description, truth: Truth) -> list[Difference]:
    """What each output has in the place of cos and sin, if these have another form."""
    some, close, names = found.at <= NEAR, 0.02 + 4 * UNIT[found.dtype], []
    if found.factor and not 0.1 < found.factor < 10:
        return []
    forms = _forms(truth, some)
    for j, (side, due) in product((0, 1), (("own", "cos"), ("other", "sin"))):
        entry = getattr(found, side)[:, some][..., j]
        off = {name: float(np.abs(entry - form).max()) for name, form in forms.items()}
        best = min(off, key=lambda name: off[name])
        names.append(due if off[due] < close else best if off[best] < min(close, off[due] / 4) else "?")
    order = {name.partition(" of the ")[2] for name in names}  # of the frequencies, if all have the same
    if names == ["cos", "sin"] * 2 or "?" in names or (order != {""} and len(order) == 1):
        return []
    if all("without" in name for name in names):
        return []  # a matter of the factor
    fault = next((fault for fault, is_so in _TERMS if is_so(names)), "wrong term in the pairs")
    a, b, c, d = (name if name in ("cos", "sin") else f"({name})" for name in names)
    fact = f"the outputs of a pair are x₁·{a} − x₂·{b}, x₂·{c} + x₁·{d}, not x₁·cos − x₂·sin, x₂·cos + x₁·sin"
    return [Difference(fault, fact)]


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


def _has(words: str) -> Callable[[list[str]], bool]:
    return lambda names: any(words in name for name in names)


_TERMS: list[tuple[str, Callable[[list[str]], bool]]] = [
    ("zeros returned", lambda names: set(names) == {"0"}),
    ("not rotated", lambda names: names == ["1", "0", "1", "0"]),
    ("direction", lambda names: names == ["cos", "−sin"] * 2),
    (SWAPPED, _are("sin", "cos")),
    ("wrong sign of one term", _are("cos", "sin")),
    ("in-place aliasing", _has("sin·cos")),
    ("cosine of a cosine", _has(")")),
    ("sign of the sine lost", _has("|sin|")),
    ("attention factor: in part", _has("without")),
]


def _lengths(found: Description, truth: Truth) -> list[Difference]:
    """Lengths that are not those of a rotation times one number."""
    size, unit = np.where(found.known, found.size, np.nan), UNIT[found.dtype]
    each = np.nanmedian(size, axis=(0, 1))  # (p, 2)
    wrong = np.abs(each / found.factor - 1) > 4 * unit + 1e-4
    if wrong.any() and np.nanmax(np.abs(size / each - 1), initial=0) <= 4 * unit + 1e-5:
        which = listed(np.sort(found.shape.features(found.head_dim)[1][wrong]), "feature")
        numbers = f"{each[wrong].min():.6g} to {each[wrong].max():.6g}"
        fact = f"lengths are multiplied by {numbers} in {which}, by {found.factor:.6g} in most others"
        return [Difference("features multiplied differently", fact)]
    if found.uneven <= 0.05 + 4 * unit:
        return []
    if (rate := found.growth) is not None:
        fact = f"lengths are multiplied by {math.exp(rate.min()):.6g} to {math.exp(rate.max()):.6g} with each position"
        return [Difference("lengths grow with the position", fact)]
    some = (found.at <= NEAR) & found.known.all(axis=(0, 2, 3))
    by = [np.abs(side[:, some]).mean() / np.abs(due[:, some]).mean()
          for side, due in ((found.own, truth.cos), (found.other, truth.sin))]  # fmt: skip
    fact = f"outputs of pairs have lengths from {np.nanmin(size):.4g} to {np.nanmax(size):.4g}"
    means = f"in the mean, {by[0]:.4g}·cos of their own feature and {by[1]:.4g}·sin of the other one"
    return [Difference("no rotation", f"{fact}, where all should be alike; {means}")]


# ── Signs, axes, angles ──────────────────────────────────────────────────────────────────────────────────────────────


def _signs(found: Description, rope: Rope) -> list[Difference]:
    """The direction in which each output turns."""
    total, p = found.theta.sum(axis=0), found.theta.shape[1]
    seen = (np.abs(total) > 8 * found.unsure.max(axis=0)) & (np.abs(total) < 1.6)
    back = seen & (np.sign(total) == -rope.direction)
    if not back.any():
        return []
    if back[seen].all():
        return [Difference("direction", "all pairs turn the other way")]
    if (back[:, 0] == back[:, 1]).all():
        return [Difference(BACKWARDS, f"{listed(np.flatnonzero(back[:, 0]))} of {p} turn the other way")]
    outputs = np.sort(found.shape.features(found.head_dim)[1][back])
    fact = f"{listed(outputs, 'output')} of {back.size} have the sine with the other sign"
    return [Difference("wrong sign of one term", fact)]


def _axes(found: Description, rope: Rope) -> list[Difference]:
    """Which axis turns each pair."""
    if rope.axes is None:
        return []
    turns = np.abs(found.theta) > 8 * found.unsure  # (axes, p, 2)
    due, owner = np.array([axis for axis, _ in rope.axes.assign(rope.pairs)]), found.owner
    several = np.flatnonzero((turns.sum(axis=0) > 1).any(axis=-1))
    wrong = np.flatnonzero((owner != due) & turns.any(axis=(0, 2)))
    if len(several):
        first = _and(np.flatnonzero(turns[:, several[0]].any(axis=-1)))
        return [Difference("axes mixed", f"{listed(several)} turn with several axes, pair {several[0]} with {first}")]
    if not len(wrong):
        return []
    to = {int(axis): set(owner[due == axis].tolist()) for axis in set(due.tolist())}
    exchanged = all(len(axes) == 1 for axes in to.values()) and len({min(axes) for axes in to.values()}) == len(to)
    one = len(set(owner.tolist())) == 1
    fault = "one axis for all pairs" if one else "axes in another order" if exchanged else "pairs dealt otherwise"
    return [Difference(fault, f"the pairs turn with the axes {dealt(owner)}, where {dealt(due)} is expected")]


def _own_angles(found: Description, rope: Rope) -> list[Difference]:
    """Two outputs of a pair that turn by different angles, or with different axes."""
    theta, unsure = np.abs(found.theta).max(axis=0), found.unsure.max(axis=0)
    axes = np.argmax(np.abs(found.theta), axis=0)  # (p, 2)
    apart = np.abs(theta[:, 0] - theta[:, 1]) > 8 * unsure.max(axis=1) + 200 * U32 * theta.max(axis=1)
    apart |= (axes[:, 0] != axes[:, 1]) & (theta > 8 * unsure).all(axis=1)
    if not apart.any():
        return []
    due, p, i, k = frequencies(rope), rope.pairs, np.arange(rope.pairs), int(np.flatnonzero(apart)[0])
    tables = {
        "repeated table with split features": np.stack((i // 2, (i + p) // 2), 1),
        "concatenated table with interleaved features": np.stack((2 * i % p, (2 * i + 1) % p), 1),
    }
    fits = {name: np.abs(theta - due[index]) <= 8 * unsure + 200 * U32 * due[index] for name, index in tables.items()}
    fault = next((name for name, near in fits.items() if near.all()), "two angles in one pair")
    which = f", with axes {_and(axes[k])}" if axes[k, 0] != axes[k, 1] else ""
    first = f"pair {k} by {theta[k, 0]:.6g} and {theta[k, 1]:.6g} for a position{which}"
    fact = f"the two outputs turn by different angles in {listed(np.flatnonzero(apart))} of {p}"
    return [Difference(fault, f"{fact}: {first}")]


def _frequencies(found: Description, due: Rope, rope: Rope) -> tuple[list[Difference], Rope | None]:
    """What is wrong with the frequencies, and the rope that has them, if that is known; those of another width may also
    be as expected of the first pairs."""
    measured, p = found.measured, due.pairs
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
    i = int(np.argmax(np.abs(found.start[:, 0])))
    if quarter.any() or found.unexplained_start > 0.02 + 8 * UNIT[found.dtype]:
        fact = f"pair {i} is turned by {found.start[i, 0]:.4g} at position 0, which no position offset explains"
        return [Difference(SWAPPED if quarter.any() else "turned at position 0", fact)]
    moved = {axis: offset for axis, offset in enumerate(found.offsets) if offset}
    if not moved:
        return []
    on = ", ".join(f"{m:+.6g}" + f" on axis {axis}" * (len(found.offsets) > 1) for axis, m in moved.items())
    fault = SHIFTS.get(next(iter(moved.values())), "positions shifted")
    return [Difference(fault, f"position 0 is turned as if it were at {on}")]


def _factor(found: Description, rope: Rope) -> list[Difference]:
    """What lengths are multiplied with."""
    due, got, d = rope.attention_factor, found.factor, found.head_dim
    near = 2 * UNIT[found.dtype] + 2e-5 + min(found.uneven, 0.02) / 2
    if abs(got / due - 1) <= near:
        return []
    fact = f"the length of every pair is multiplied by {got:.6g}, where {due:.6g} is expected"
    known = {"missing": 1.0, "squared": due**2, "inverted": 1 / due, "its root": math.sqrt(due)} if due != 1 else {}
    names = {f"attention factor: {how}": value for how, value in known.items()}
    names |= {"softmax scale folded in": due * d**-0.5, "softmax scale folded in, by its root": due * d**-0.25}
    names |= {"zeros returned": 0.0}
    other = f"attention factor: {'another' if due != 1 else 'unwanted'}"
    return [Difference(next((name for name, by in names.items() if abs(got - by) <= (near + 1e-4) * by), other), fact)]


# ── Precision ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rounded(found: Description, truth: Truth) -> list[Difference]:
    """Positions, frequencies, angles or tables that are numbers of a narrow dtype."""
    a = truth.rope.attention_factor
    measured, close = (found.own + 1j * found.other) / a, (8 * UNIT[found.dtype] + 2e-5 + 2 * truth.allowed)[..., None]

    def share(table: Array) -> float:
        return float(((np.abs(measured - table[..., None]) <= close) | ~found.known).mean())

    exact = share(truth.cos + 1j * truth.sin)
    ways = ((fault, fact) for fault, fact, table in _narrow(truth) if share(table) > max(0.97, exact + 0.02))
    return [Difference(*way) for way in ways][:1] if exact < 1 else []


def _narrow(truth: Truth) -> Iterator[tuple[str, str, Array]]:
    """cos + i·sin (axes, n, p) with one of their parts, or several, rounded: the mistake, the fact."""
    theta = frequencies(truth.rope) * truth.rope.direction
    parts = ("positions", "inverse frequencies", "angle", "tables")
    for name, chosen in product(("bfloat16", "float16"), sorted(product((0, 1), repeat=4), key=sum)[1:]):
        at, of, whole, table = (partial(narrowed, bits=BITS[name]) if flag else np.asarray for flag in chosen)
        angle, tables = whole(at(truth.m) * of(theta)), (truth.cos, truth.sin)
        cos, sin = (np.cos(angle), np.sin(angle)) if any(chosen[:3]) else tables
        which = [part for part, flag in zip(parts, chosen, strict=True) if flag]
        fact = f"cosines and sines are as if {' and '.join(which)} were rounded to {name}"
        yield f"{name} {which[-1]}", fact, table(cos) + 1j * table(sin)


def _inexact(found: Description, truth: Truth) -> list[Difference]:
    """Cosines and sines that are off alike at all positions, or more at larger ones, but not in proportion, as with
    other frequencies."""
    measured, exact = (found.own + 1j * found.other) / found.factor, (truth.cos + 1j * truth.sin)[..., None]
    error = np.where(found.known, np.abs(measured - exact), 0).max(axis=(0, 3))  # (n, p)
    allowed = 2 * truth.allowed.max(axis=0) + 16 * UNIT[found.dtype] + 1e-6
    near, far = float(error[found.at <= 64].max()), float(error.max())
    if found.at[-1] < 1000 or not (error > allowed).any() or far > 0.5:
        return []
    k, i = np.unravel_index(np.argmax(error > allowed), error.shape)
    first = f"first at position {found.at[k]}, in pair {i}, by {error[k, i]:.2g}"
    fact = f"cosines and sines are off by up to {far:.2g}, {first}"
    if 1e-5 < far < 4 * near:
        return [Difference("inexact sine", f"{fact}, at small positions as at large ones")]
    theta = frequencies(truth.rope)
    same = (np.abs(found.measured.theta - theta) <= 4 * found.measured.unsure + 2.0**-10 * theta).all()
    late = found.at > found.at[-1] // 64
    pair = int(np.argmax(error[late].max(axis=0)))
    rate = error[late, pair] / found.at[late]
    return [Difference("angle too coarse", fact)] if same and np.ptp(rate) > 0.5 * rate.max() and near < 0.05 else []
