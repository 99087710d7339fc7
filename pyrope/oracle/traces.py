"""Compares two traces of a model, name by name: where they begin to differ, how, and what that suggests.

docs/traces.md says what a trace holds. Two tensors agree if, row by row, their difference is small beside the row (or
the mean row, for rows near zero). What is small: 16 units of roundoff of the coarser dtype, or 8 times the largest
difference so far, since errors grow little by little; but never more than √u, half of the digits. A fault is a jump.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from .. import checks, definition
from ..backend import Array, on_host
from ..files import PathLike, errors_prefixed_with, load_safetensors, save_safetensors
from ..theta import Rope
from .candidate import UNIT
from .frequencies import MeasuredTheta, guess_rope
from .positions import acts_at
from .report import ErrorRow, Finding, Report

Trace: TypeAlias = Mapping[str, Array]
Difference: TypeAlias = tuple[str, str]  # a name of `TRACES`, and the fact
STAGES = ("norm", "q", "k", "v", "q_rotated", "k_rotated", "scores", "state", "attention", "mlp_norm", "mlp", "output")


def write_trace(path: PathLike, arrays: Mapping[str, Array]) -> None:
    """Writes a trace, in this order of names; arrays on the GPU are copied to the host."""
    host = _on_host(checks.instance("arrays", arrays, dict))
    save_safetensors(path, host, {"order": json.dumps(list(host))})


def _on_host(trace: Trace) -> dict[str, Array]:
    return {name: np.asarray(on_host(array)) for name, array in trace.items()}


def read_trace(path: PathLike) -> dict[str, Array]:
    """The arrays of a trace, in the order of its metadata or, without one, in that of a forward pass."""
    arrays, metadata = load_safetensors(path)
    with errors_prefixed_with(Path(path)):
        order = json.loads(metadata["order"]) if "order" in metadata else sorted(arrays, key=_usual_place)
        if sorted(order) != sorted(arrays):
            raise ValueError("the order in its metadata must name every tensor once")
        return {name: arrays[name] for name in order}


def _usual_place(name: str) -> tuple[float, float, str]:
    """Where a name stands in a forward pass; unknown names come at the end of their layer, or of all."""
    if match := re.fullmatch(r"layers\.(\d{1,9})\.(.+)", name):
        return int(match[1]), [*STAGES, match[2]].index(match[2]), name
    ends = {"embedding": (-1.0, 0), "norm": (math.inf, 0), "logits": (math.inf, 1)}
    return *ends.get(name, (math.inf, 2)), name


# ── How two tensors differ ───────────────────────────────────────────────────────────────────────────────────────────


def _distance(a: Array, b: Array) -> float:
    """The largest difference of two rows, relative to the row or, for small rows, to the mean one."""
    off = _off(a, b)
    if not off.any():
        return 0.0
    rows = _size(np.where(np.isfinite(a), a, 0.0))
    far = _size(off) / np.maximum(np.maximum(rows, _size(rows.ravel())), 1e-300)
    return float(np.nan_to_num(far, nan=math.inf).max())


def _off(a: Array, b: Array) -> Array:
    """How far off each number is: not at all, where both are hidden as −inf, or both are NaN."""
    off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(b - a))
    return np.asarray(np.where(np.isnan(off), np.inf, off))


def _size(x: Array) -> Array:
    """The root of the mean square of each row, (…, n) -> (…); no square overflows."""
    return np.asarray(np.hypot.reduce(np.atleast_1d(x), axis=-1) / math.sqrt(np.atleast_1d(x).shape[-1]))


def _forms(a: Array, b: Array) -> Iterator[tuple[str, str, Array, Array]]:
    """What b may be of a, which has its shape: the kind, the fact, and two arrays that are equal if it is so."""
    c = float((a * b).sum() / max(float((a * a).sum()), 1e-300))
    root = f"{'−' * (c < 0)}{'1/' * (abs(c) < 1)}√{max(c * c, c**-2 if c else 0):.6g}"
    yield "scaled", f"the second is {c:.6g} times the first, {root}", (c or 1) * a, b
    if a.ndim > 1:
        bias = (b - a).reshape(-1, a.shape[-1]).mean(axis=0)
        yield "bias added", f"the second has a vector of size {abs(bias).max():.3g} added to each row", a + bias, b
    for axis, what in enumerate(("features", "rows", "heads")[: a.ndim], 1):
        order, words = _order(a, b, axis)
        yield f"permuted {what}", f"{what} {words}", np.take(a, order, axis=-axis), b


def _order(a: Array, b: Array, axis: int) -> tuple[Array, str]:
    """In which order a has what b has along an axis, counted from the last: b[i] = a[order[i]]; also in words."""
    first, second = (np.moveaxis(x, -axis, 0).reshape(x.shape[-axis], -1) for x in (a, b))
    # It is the order in which their products with any vector are sorted alike.
    order, vector = np.empty(len(first), int), np.cos(1.0 + np.arange(first.shape[1]))
    order[np.argsort(second @ vector)] = np.argsort(first @ vector)
    start = int(np.argmax(order != np.arange(len(order))))
    some = ", ".join(map(str, order[start : start + 8])) + ", …" * (len(order) > start + 8)
    return order, f"from {start} on of the second are {some} of the first"


def _difference(name: str, a: Array, b: Array, limit: float) -> Difference:
    """How b differs from a: the first kind that explains it."""
    if a.shape != b.shape:
        return "other shape", f"shapes {a.shape} and {b.shape}"
    hidden_in_both = np.isinf(a) & (a == b)  # which says nothing about the rest
    shown = [np.where(hidden_in_both, 0.0, x) for x in (a, b)]
    finite = bool(np.isfinite(shown).all())
    for kind, fact, x, y in _forms(*shown) if finite else ():
        if _distance(x, y) <= limit:
            return kind, fact
    one, other = (int(np.isnan(x).sum()) for x in (a, b))
    if one != other:
        return "NaN in one trace", f"{one} and {other} numbers are NaN, of {a.size}"
    # Scores are hidden as −inf before the softmax, as 0 after it; elsewhere a 0 is a number like any other.
    hidden = [np.isinf(x) if np.isinf(x).any() else x == 0 for x in (a, b)]
    if (not finite or name.endswith(("scores", "state"))) and (hidden[0] != hidden[1]).any():
        one, other = (int((x & ~y).sum()) for x, y in (hidden, hidden[::-1]))
        return "masked otherwise", f"{one} numbers are 0 or infinite in the first only, {other} in the second only"
    return "other numbers", f"rows are off by up to {_distance(a, b):.3g} of their size"


# ── How two rotations of the same vectors differ ─────────────────────────────────────────────────────────────────────


class SeenRotation(NamedTuple):
    """What a rotation did to x (…, n, d)."""

    pairs: str  # in words
    turned: Array  # complex (n, p): what each pair of each row was multiplied with, times its weight
    theta: Array  # (p,): how far each pair turns from row to row, in (−π, π]
    series: str  # what these are, in words


def _turn(x: Array, y: Array, limit: float) -> SeenRotation | None:
    """The rotation that leads from x to y: the first pairing that keeps the lengths of pairs, full width first."""
    d = x.shape[-1]
    for r, place, layout in itertools.product(range(d - d % 2, 1, -2), ("prefix", "suffix"), ("half", "interleaved")):
        rope = Rope(d, 10000.0, layout, rotary_dim=r, placement=place)
        (first, second), still = definition.pairs(layout, r, rope.start)[0], np.r_[0 : rope.start, rope.start + r : d]
        before, after = (z[..., first] + 1j * z[..., second] for z in (x, y))
        factor = float(np.linalg.norm(after) / (np.linalg.norm(before) or 1))
        if max(_distance(factor * abs(before), abs(after)), _distance(x[..., still], y[..., still])) <= limit:
            turned = (after * before.conj()).reshape(-1, *before.shape[-2:]).sum(axis=0)  # long vectors weigh more
            theta = np.median(np.angle(turned[1:] * turned[:-1].conj()), axis=0)  # whatever a few rows do
            known = guess_rope(MeasuredTheta(np.abs(theta), np.full(r // 2, limit / 4)), rope)
            rule = "".join(f" ({explanation.fact.partition(' (')[0]})" for explanation in known[:1])
            series = f"{abs(theta[0]):.3g} to {abs(theta[-1]):.3g}{rule}"
            part = f", {r} of {d} features, the {place}" if r < d else ""
            return SeenRotation(layout + part, turned, theta, series)
    return None


def _rotated(name: str, first: Trace, second: Trace, limit: float) -> Difference | None:
    """How two rotations of the same vectors differ: in pairs, direction, frequencies or positions."""
    source = name.removesuffix("_rotated")
    if source == name or source not in first or source not in second:
        return None
    (a, b), (x, y) = (_alike(first, second, each) for each in (name, source))
    several = a.shape == b.shape == x.shape == y.shape and x.ndim > 1 and x.shape[-2] > 1
    if not several or not np.isfinite([a, b]).all() or _distance(x, y) > limit:
        return None
    one, other = (_turn(x, y, limit) for y in (a, b))
    if one is None or other is None:
        return None
    if one.pairs != other.pairs:
        return "other pairs", f"the first pairs features as {one.pairs}, the second as {other.pairs}"
    near = 1e-2 * np.abs(one.theta) + limit / 4  # angles are of many rows and heads, better than one number
    if (np.abs(one.theta + other.theta) <= near).all():
        return "turned backwards", "the second turns as far as the first, the other way"
    if (np.abs(one.theta - other.theta) > near).any():
        return "other frequencies", f"from row to row the first turns by {one.series}, the second by {other.series}"
    ahead: Array = np.round(acts_at(other.turned * one.turned.conj(), one.theta, 2.0**17)[0], 1) + 0.0
    if not ahead.any():
        return None
    rows = ", ".join(f"{ahead[row]:g} from row {row} on" for row in np.flatnonzero(np.diff(ahead, prepend=np.nan))[:4])
    return "other positions", f"both turn alike, but the second is so many positions ahead: {rows}"


# ── The walk ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Step(NamedTuple):
    name: str
    far: float  # the largest difference of rows
    limit: float
    unit: float  # of roundoff
    kind: str = ""  # of the difference, if there is one
    fact: str = ""


@np.errstate(all="ignore")  # whatever the numbers are
def diff_traces(a: PathLike | Trace, b: PathLike | Trace, *, tolerance: float | None = None) -> Report:
    """Where trace b begins to differ from trace a, how, and what that suggests.

    ``tolerance`` is the relative difference of rows that is allowed; the default follows from the dtypes. Traces whose
    features are in another order at some names, while what follows agrees, are "equivalent".

    >>> x = np.arange(1.0, 9.0).reshape(1, 2, 4)
    >>> report = diff_traces({"embedding": x, "logits": x}, {"embedding": x, "logits": 2 * x})
    >>> report.verdict, report.faults
    ('wrong', ('scaled',))
    """
    tolerance = None if tolerance is None else checks.real("tolerance", tolerance, 0)
    first, second = (_on_host(x) if isinstance(x, Mapping) else read_trace(x) for x in (a, b))
    walk = list(_walk(first, second, tolerance))
    if not walk:
        raise ValueError(f"the traces have no name in common: {', '.join([*first][:3])}; {', '.join([*second][:3])}")
    differing, findings, precision = [step for step in walk if step.kind], tuple[Finding, ...](), None
    verdict, notes = "wrong", tuple(_notes(first, second))
    if not differing and walk[-1].name == [*first][-1]:
        most = max(step.far / step.unit for step in walk)
        verdict, precision = "right", f"noise of at most {most:.3g} units of roundoff" if most else "the same bits"
    elif {step.kind for step in differing} == {"permuted features"} and not walk[-1].kind:
        some = ", ".join(step.name for step in differing[:4])
        verdict, notes = "equivalent", (f"features are in another order at {some}; what follows agrees", *notes)
    else:
        findings = (_finding(differing, first, second),)
    expected, rows = f"{len(first)} names, as in the first trace", tuple(_by_layer(walk, verdict == "right"))
    return Report("trace", expected, verdict, findings, precision, f"{len(walk)} names", (), rows, notes)


def _walk(first: Trace, second: Trace, tolerance: float | None) -> Iterator[Step]:
    """Compares every name that both have, in the order of the first."""
    largest = 0.0
    for name in (name for name in first if name in second):
        a, b = _alike(first, second, name)
        unit = max(UNIT.get(trace[name].dtype.name, 2.0**-53) for trace in (first, second))
        grown, far = max(16 * unit, 8 * largest), _distance(a, b) if a.shape == b.shape else math.inf
        limit = min(grown, math.sqrt(unit)) if tolerance is None else tolerance
        kind, fact = "", ""
        if far <= limit:
            largest = max(largest, far)
        else:
            kind, fact = _rotated(name, first, second, limit) or _difference(name, a, b, limit)
            if kind == "other numbers" and far <= grown:
                kind, fact = "grown noise", f"differences have grown step by step, to {far:.3g} of a row"
        yield Step(name, far, limit, unit, kind, fact)


def _alike(first: Trace, second: Trace, name: str) -> tuple[Array, Array]:
    """Both arrays in float64 and, if they differ in axes of one alone, in one shape: a batch of one needs no axis."""
    a, b = (trace[name].astype(np.float64) for trace in (first, second))
    return a, b.reshape(a.shape) if np.squeeze(a).shape == np.squeeze(b).shape else b


def _by_layer(walk: list[Step], right: bool) -> Iterator[ErrorRow]:
    """The differences of each layer: noise grows from one to the next, a fault jumps."""
    for name, group in itertools.groupby(walk, lambda step: re.sub(r"^(layers\.\d+)\..*", r"\1", step.name)):
        worst = max(group, key=lambda step: step.far)
        yield ErrorRow(name, worst.far, worst.limit, worst.far / worst.unit if right else None)


def _finding(differing: list[Step], first: Trace, second: Trace) -> Finding:
    if not differing:
        missing = [name for name in first if name not in second]
        return Finding("missing names", f"{len(missing)} of {len(first)} names are missing, {missing[-1]} among them")
    step, (a, b) = differing[0], _alike(first, second, differing[0].name)
    where = f"first at {step.name}"
    if a.shape == b.shape:
        at = np.unravel_index(int(np.argmax(_off(a, b))), a.shape)
        where += f", most at {tuple(map(int, at))}: {a[at]:.6g} in the first, {b[at]:.6g} in the second"
    if len(differing) > 1:
        where += f"; {len(differing)} names differ in all, and those after the first may follow from it"
    return Finding(step.kind, step.fact, where)


def _notes(first: Trace, second: Trace) -> Iterator[str]:
    for word, one, other in (("second", first, second), ("first", second, first)):
        if missing := [name for name in one if name not in other]:
            yield f"missing in the {word} trace: {', '.join(missing[:6])}{', …' if len(missing) > 6 else ''}"
