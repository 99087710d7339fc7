"""A measured description against the expected rope, field by field: each difference is a mistake with a name.

Causes come first, and what follows from a difference that was named is not said again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..theta import Rope, frequencies
from .candidate import BITS, UNIT
from .frequencies import Named, listed, name_frequencies
from .operator import Description, dealt, shape_of
from .positions import SHIFTS
from .responses import narrowed
from .tolerance import U32, ExactTables

NEAR = 2048  # positions up to which the angles of any float32 pipeline are nearly exact
SOME, WIDE = 8, 60  # pairs whose axes are listed alone, and letters of such a list
# Own and other term of both outputs that are a matter of the direction, the frequencies or the factor.
USUAL = [["cos", "sin"], ["cos", "−sin"], ["1", "0"], ["cos without the factor", "sin without the factor"]]


@np.errstate(all="ignore")  # a candidate may return anything
def differences(found: Description, rope: Rope) -> list[Named]:
    """How a description differs from that of a rope, causes first."""
    shapes = [*_shapes(found, rope)]
    if not found.known.any():
        return shapes
    width = found.shape.width
    due = rope if width == rope.width else replace(rope, scaling=None, axes=None, rotary_dim=width)
    truth, rest = Truth.of(found, due), [*_rest(found)]
    if no_rotation := [*_terms(found, truth)] or [*_lengths(found)]:
        return shapes + no_rotation + rest
    start, factor = [*_start(found)], [*_factor(found, rope), *rest]
    signs, axes, apart = [*_signs(found, due)], [*_axes(found, due)], [*_own_angles(found, due)]
    inexact = chain(_rounded(found, truth), _inexact(found, truth))
    if not (shapes or signs or axes or start) and (one := next(inexact, None)):
        return [one, *factor]
    if apart:
        return shapes + signs + apart + start + factor
    if found.straight < found.at[-1] // 2:  # a matter of the positions: frequencies mean little
        return shapes + axes + factor
    named = None if due.pairs != rope.pairs else name_frequencies(found.measured, due)
    numbers = [] if named is None else [named]
    return shapes + signs + axes + numbers + start + factor


# ── Pairs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pairing(reached: Array, expected: Array) -> Named:
    """Where outputs are made from other features than those of any layout: bool (d, d), output and input."""
    wrong = (reached & ~expected).any(axis=1) | (reached.sum(axis=1) > 2)
    f, mixed = int(np.argmax(wrong)), (reached.sum(axis=1) > 2).mean() > 0.25
    got, due = (_and(np.flatnonzero(made[f])) for made in (reached, expected))
    count = f"{int(wrong.sum())} of {len(wrong)} outputs are made from other features than expected"
    return Named("features mixed" if mixed else "wrong pairing", f"{count}: output {f} from {got}, not {due}")


def _and(some: Any) -> str:
    return " and ".join(map(str, some[:4])) + " …" * (len(some) > 4)


def _shapes(found: Description, rope: Rope) -> Iterator[Named]:
    """Other pairs, or other features that turn."""
    got, due, d = found.shape, shape_of(rope), found.head_dim
    made, expected = (", ".join(f"({a}, {b})" for a, b in shape.features(d)[0][:3].tolist()) for shape in (got, due))
    fact = f"the pairs are {got.layout}, {made}, …, where {due.layout}, {expected}, … are expected"
    turning = int(found.measured.turning.sum())
    # A part of a head whose pairs are those of all of it, or the reverse.
    apart = got.layout == due.layout == "half" and turning == np.count_nonzero(frequencies(rope)) < d // 2
    apart = apart and got != due and d in (got.width, due.width)
    if apart or (got.layout != due.layout and min(got.width, due.width) > 2):
        yield Named("wrong pairing", fact)
    if not apart and (got.width, got.start) != (due.width, due.start):
        fact = f"{got.width} features turn, from {got.start} on, where {due.width} from {due.start} on are expected"
        names = {due.width: "wrong end rotated", d: "whole head rotated"}
        yield Named(names.get(got.width, "wrong rotary width"), fact)


def _rest(found: Description) -> Iterator[Named]:
    """Features outside of the pairs, which should stay."""
    wrong = ~(np.abs(found.still - 1) <= 2 * found.unit + 2e-5).all(axis=(0, 1))
    if wrong.any():
        outside, factors = found.outside[wrong], found.rest[wrong]
        fact = f"{listed(outside, 'feature')} should stay, and come back times {np.median(factors):.6g}"
        yield Named("rest changed" if factors.any() else "rest zeroed", fact)


# ── What stands in the place of cos and sin ──────────────────────────────────────────────────────────────────────────


class Truth(NamedTuple):
    """What is expected of the pairs that were measured, at the same positions."""

    rope: Rope
    m: Array  # (axes, n, p): the position that turns each pair, 0 where another axis has one
    z: Array  # complex (axes, n, p): cos + i·sin, without the attention factor
    allowed: Array  # (axes, n, p): how far off a float32 angle may be

    @classmethod
    def of(cls, found: Description, rope: Rope) -> Truth:
        tables = ExactTables(rope.rotation_only, found.at)
        mine = np.array(tables.owner) == np.arange(len(found.theta))[:, None, None]  # (axes, 1, p)
        z = np.where(mine, tables.cos + 1j * tables.sin, 1.0)
        return cls(rope, found.at[:, None] * mine, z, np.where(mine, tables.off32, 0.0))


def _terms(found: Description, truth: Truth) -> Iterator[Named]:
    """What each output has in the place of cos and sin, if these have another form."""
    some, close, names = found.at <= NEAR, 0.02 + 4 * found.unit, []
    if found.factor and not 0.1 < found.factor < 10:
        return
    forms = _forms(truth, some)
    for j, (side, due) in product((0, 1), (("real", "cos"), ("imag", "sin"))):
        entry = getattr(found.z, side)[:, some][..., j]
        off = {name: float(np.nanmax(np.abs(entry - form))) for name, form in forms.items()}
        best = min(off, key=lambda name: off[name])
        names.append(due if off[due] < close else best if off[best] < min(close, off[due] / 4) else "?")
    if names in [two * 2 for two in USUAL] or "?" in names:
        return
    signs = all({name.strip("−") for name in names[k::2]} == {due} for k, due in enumerate(("cos", "sin")))
    a, b, c, d = (name if name in ("cos", "sin") else f"({name})" for name in names)
    fact = f"the outputs of a pair are x₁·{a} − x₂·{b}, x₂·{c} + x₁·{d}, not x₁·cos − x₂·sin, x₂·cos + x₁·sin"
    yield Named("wrong sign of one term" if signs else "wrong term in the pairs", fact)


def _forms(truth: Truth, some: Array) -> dict[str, Array]:
    """What an output may have of a feature, by its name."""
    cos, sin, a = truth.z.real[:, some], truth.z.imag[:, some], truth.rope.attention_factor
    forms = {
        "cos": cos, "sin": sin, "−cos": -cos, "−sin": -sin, "0": 0 * cos, "1": 1 + 0 * cos, "sin·cos": sin * cos,
        "cos − sin²": cos - sin**2, "|cos|": np.abs(cos), "|sin|": np.abs(sin), "cos(cos)": np.cos(cos),
        "sin(sin)": np.sin(sin),
    }  # fmt: skip
    forms = {name: a * form for name, form in forms.items()}
    return forms if a == 1 else forms | {"cos without the factor": cos, "sin without the factor": sin}


def _lengths(found: Description) -> Iterator[Named]:
    """Lengths that are not those of a rotation times one number."""
    size, unit = np.where(found.known, found.size, np.nan), found.unit
    each = np.nanmedian(size, axis=(0, 1))  # (p, 2)
    wrong = np.abs(each / found.factor - 1) > 4 * unit + 1e-4
    if wrong.any() and np.nanmax(np.abs(size / each - 1), initial=0) <= 4 * unit + 1e-5:
        which = listed(np.sort(found.shape.features(found.head_dim)[1][wrong]), "feature")
        numbers = " to ".join(dict.fromkeys(f"{f(each[wrong]):.6g}" for f in (np.min, np.max)))
        fact = f"lengths are multiplied by {numbers} in {which}, by {found.factor:.6g} in most others"
        yield Named("features multiplied differently" if each[wrong].any() else "features not written", fact)
    elif found.uneven > 0.05 + 4 * unit:
        least, most = (np.unravel_index(some, size.shape) for some in (np.nanargmin(size), np.nanargmax(size)))
        lengths = (f"{size[k]:.4g} in pair {k[2]} at position {found.at[k[1]]}" for k in (least, most))
        yield Named("no rotation", f"outputs have lengths from {' to '.join(lengths)}, where all should be alike")


# ── Signs, axes, angles ──────────────────────────────────────────────────────────────────────────────────────────────


def _signs(found: Description, rope: Rope) -> Iterator[Named]:
    """The direction in which each output turns."""
    total = found.theta.sum(axis=0)
    seen = (np.abs(total) > 8 * found.unsure.max(axis=0)) & (np.abs(total) < 1.6)
    if seen.any() and (np.sign(total) == -rope.direction)[seen].all():
        yield Named("direction", "all pairs turn the other way")


def _axes(found: Description, rope: Rope) -> Iterator[Named]:
    """Which axis turns each pair."""
    if rope.axes is None:
        return
    due, got = [str(axis) for axis, _ in rope.axes.assign(rope.pairs)], found.dealing
    turns = (np.abs(found.theta) > 8 * found.unsure).any(axis=(0, 2))
    wrong = np.flatnonzero(turns & (np.array(got) != np.array(due)))
    if len(wrong):
        which = wrong if len(wrong) <= SOME else np.arange(rope.pairs)
        axes = (shorten(dealt(each[i] for i in which), WIDE, placeholder=" …") for each in (got, due))
        fact = "the axes that turn {} are {}, where {} is expected".format(listed(which), *axes)
        yield Named("wrong axes", fact)


def _own_angles(found: Description, rope: Rope) -> Iterator[Named]:
    """Two outputs of a pair that turn by different angles, or with different axes."""
    theta, unsure = np.abs(found.theta).max(axis=0), found.unsure.max(axis=0)
    axes = np.argmax(np.abs(found.theta), axis=0)  # (p, 2)
    apart = np.abs(theta[:, 0] - theta[:, 1]) > 8 * unsure.max(axis=1) + 200 * U32 * theta.max(axis=1)
    apart |= (axes[:, 0] != axes[:, 1]) & (theta > 8 * unsure).all(axis=1)
    if apart.any():
        due, k = frequencies(rope), int(np.flatnonzero(apart)[0])
        whose = [int(np.argmin(np.abs(due - angle))) for angle in theta[k]]
        which = f", with axes {_and(axes[k])}" if axes[k, 0] != axes[k, 1] else ""
        first = f"pair {k} by {theta[k, 0]:.6g} and {theta[k, 1]:.6g}, as pairs {_and(whose)} should{which}"
        fact = f"the two outputs turn by different angles in {listed(np.flatnonzero(apart))} of {len(apart)}"
        yield Named("two angles in one pair", f"{fact}: {first}")


def _start(found: Description) -> Iterator[Named]:
    """Pairs that are turned at position 0 already."""
    i, moved = int(np.argmax(np.abs(found.start[:, 0]))), {axis: by for axis, by in enumerate(found.offsets) if by}
    if found.unexplained_start > 0.02 + 8 * found.unit:
        fact = f"pair {i} is turned by {found.start[i, 0]:.4g} at position 0, which no position offset explains"
        yield Named("turned at position 0", fact)
    elif moved:
        on = ", ".join(f"{m:+.6g}" + f" on axis {axis}" * (len(found.offsets) > 1) for axis, m in moved.items())
        fault = SHIFTS.get(next(iter(moved.values())), "positions shifted")
        yield Named(fault, f"position 0 is turned as if it were at {on}")


def _factor(found: Description, rope: Rope) -> Iterator[Named]:
    """What lengths are multiplied with."""
    due, got = rope.attention_factor, found.factor
    near = 2 * found.unit + 2e-5 + min(found.uneven, 0.02)
    if not abs(got / due - 1) <= near:
        fact = f"the length of every pair is multiplied by {got:.6g}, where {due:.6g} is expected"
        yield Named("attention factor" if got else "zeros returned", fact)


# ── Precision ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rounded(found: Description, truth: Truth) -> Iterator[Named]:
    """Positions, frequencies, angles or tables that are numbers of a narrow dtype, as all that comes after may be."""
    z, tables = found.z / truth.rope.attention_factor, [("", "", truth.z), *_narrow(truth)]
    for unit in (found.unit, UNIT["float16"], UNIT["bfloat16"]):
        close = (8 * unit + 2e-5 + 2 * truth.allowed)[..., None]
        near = ((np.abs(z - table[..., None]) <= close) | ~found.known for *_, table in tables)
        right, *shares = (float(some.mean()) for some in near)
        for (fault, fact, _), share in zip(tables[1:], shares, strict=True):
            if share > max(0.97, right + 0.02):
                yield Named(fault, fact)


def _narrow(truth: Truth) -> Iterator[tuple[str, str, Array]]:
    """cos + i·sin (axes, n, p) with one of their parts, or several, rounded: the mistake, the fact."""
    theta = frequencies(truth.rope) * truth.rope.direction
    parts = ("positions", "inverse frequencies", "angle", "tables")
    for name, chosen in product(("bfloat16", "float16"), sorted(product((0, 1), repeat=4), key=sum)[1:]):
        at, of, whole, table = (partial(narrowed, bits=BITS[name]) if flag else np.asarray for flag in chosen)
        z = np.exp(1j * whole(at(truth.m) * of(theta))) if any(chosen[:3]) else truth.z
        which = [part for part, flag in zip(parts, chosen, strict=True) if flag]
        fact = f"cosines and sines are as if {' and '.join(which)} were rounded to {name}"
        yield f"{name} {which[-1]}", fact, table(z.real) + 1j * table(z.imag)


def _inexact(found: Description, truth: Truth) -> Iterator[Named]:
    """Cosines and sines that are off alike at all positions, or more at larger ones, but not in proportion, as with
    other frequencies."""
    exact, factor = truth.z, truth.rope.attention_factor
    z = found.z / (factor if abs(found.factor / factor - 1) < 2e-3 else found.factor)
    error = np.where(found.known, np.abs(z - exact[..., None]), 0).max(axis=(0, 3))  # (n, p)
    allowed = 2 * truth.allowed.max(axis=0) + 16 * found.unit + 1e-6
    near, far, late = float(error[found.at <= 64].max()), float(error.max()), found.at > found.at[-1] // 64
    if found.at[-1] < 1000 or not (error > allowed).any() or far > 0.5 or (error > allowed)[0].any():
        return
    k, i = np.unravel_index(np.argmax(error > allowed), error.shape)
    fact = f"cosines and sines are off by up to {far:.2g}, first at position {found.at[k]}, in pair {i}"
    if 1e-5 < far < 4 * near:
        yield Named("inexact sine", f"{fact}, at small positions as at large ones")
        return
    theta, measured = frequencies(truth.rope), found.measured
    rate = error[late, np.argmax(error[late].max(axis=0))] / found.at[late]
    same = (np.abs(measured.theta - theta) <= 4 * measured.unsure + 2.0**-10 * theta).all()
    if same and np.ptp(rate) > 0.5 * rate.max() and near < 0.05:
        yield Named("angle too coarse", fact)
