"""Compares two traces of a model, name by name: where they begin to differ, how, and what that suggests.

A trace is a .safetensors file of every named intermediate, in the order in which they were written (the metadata keep
it): "embedding"; for each layer i "layers.{i}.norm", ".q", ".k", ".v" (b, h or g, n, d), ".q_rotated", ".k_rotated",
".scores" (b, h, n, m) or ".state", ".attention", ".mlp_norm", ".mlp", ".output"; then "norm" and "logits".

Two tensors agree if, row by row, their difference is small beside the row (or the mean row, for rows near zero). What
is small: 16 units of roundoff of the coarser dtype, or 8 times the largest difference so far, since errors propagate
and grow little by little; but never more than √u, half of the digits. A fault shows as a jump.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from .. import checks
from ..backend import Array, to_numpy
from ..tensors import NumPyArray, PathLike, load_safetensors, save_safetensors
from .floats import UNIT, plain
from .report import ErrorRow, Finding, Report

Trace: TypeAlias = Mapping[str, NumPyArray]

_STAGES = ("norm", "q", "k", "v", "q_rotated", "k_rotated", "scores", "state", "attention", "mlp_norm", "mlp", "output")
_SHIFTS = 8  # the largest shift, in rows, that is tried
_MOST = 2**22  # elements: in larger tensors other orders are not tried


def write_trace(path: PathLike, arrays: Mapping[str, Array]) -> None:
    """Writes a trace, in this order of names; arrays on the GPU are copied to the host."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f"arrays must be a dict of arrays by name, was {type(arrays).__name__}")
    host = {name: to_numpy(array) for name, array in arrays.items()}
    save_safetensors(path, host, {"order": json.dumps(list(host))})


def read_trace(path: PathLike) -> dict[str, NumPyArray]:
    """The arrays of a trace, in the order of its metadata or, without one, in that of a forward pass."""
    arrays, metadata = load_safetensors(path)
    try:
        order = json.loads(metadata["order"])
    except (KeyError, ValueError, RecursionError):
        order = sorted(arrays, key=_usual_place)
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(arrays):
        raise ValueError(f"{path}: the order in its metadata must name every tensor once")
    return {name: arrays[name] for name in order}


def _usual_place(name: str) -> tuple[float, float, str]:
    """Where a name stands in a forward pass; unknown names come at the end of their layer, or of all."""
    if match := re.fullmatch(r"layers\.(\d{1,9})\.(.+)", name):
        return int(match[1]), _STAGES.index(match[2]) if match[2] in _STAGES else len(_STAGES), name
    ends = {"embedding": (-1.0, 0), "norm": (math.inf, 0), "logits": (math.inf, 1)}
    return *ends.get(name, (math.inf, 2)), name


# How two tensors differ


class Difference(NamedTuple):
    kind: str
    description: str  # with numbers


def _distance(a: NumPyArray, b: NumPyArray) -> float:
    """The largest difference of two rows, relative to the row or, for small rows, to the mean one."""
    if not a.size:
        return 0.0
    off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(b - a))
    if not np.isfinite(off).all():
        return math.inf
    error, rows = _root_mean_square(off), _root_mean_square(np.where(np.isfinite(a), a, 0.0))
    if not error.any():
        return 0.0
    size = np.maximum(rows, _root_mean_square(rows.reshape(-1)))
    return float((error / np.maximum(size, np.finfo(np.float64).tiny)).max())


def _root_mean_square(x: NumPyArray) -> NumPyArray:
    """Of each row, (…, n) -> (…)."""
    # Squares of float64 beyond 1e±154 overflow, or are 0: then all rows would be as far apart as inf/inf, or as 0/0.
    most = np.abs(x).max()
    return np.asarray(most * np.sqrt(np.square(np.atleast_1d(x) / (most or 1.0)).mean(axis=-1)))


def _scale(a: NumPyArray, b: NumPyArray, limit: float) -> Difference | None:
    """b = c·a."""
    c = float((a * b).sum() / max(float((a * a).sum()), 1e-300))
    if not c or _distance(c * a, b) > limit:
        return None
    if abs(c + 1) <= limit:
        return Difference("sign", "the second is minus the first")
    n = a.shape[-1] if a.ndim else 1
    known = {f"√{n}": n**0.5, f"1/√{n}": n**-0.5, f"{n}": n, f"1/{n}": 1 / n}
    named = [f", which is {name}" for name, value in known.items() if n > 1 and abs(c / value - 1) < 1e-3]
    return Difference("scale", f"the second is {c:.6g} times the first" + "".join(named))


def _shift(a: NumPyArray, b: NumPyArray, limit: float) -> Difference | None:
    """b is a, some rows later or earlier."""
    n = a.shape[-2] if a.ndim > 1 else 0
    for step in range(1, min(_SHIFTS, n - 2) + 1):
        later, earlier = slice(step, None), slice(None, n - step)
        for sign, x, y in (("+", earlier, later), ("−", later, earlier)):
            if _distance(a[..., x, :], b[..., y, :]) <= limit:
                return Difference("shift", f"row m of the first is row m {sign} {step} of the second")
    return None


def _permutation(a: NumPyArray, b: NumPyArray, limit: float) -> Difference | None:
    """b is a with one axis in another order."""
    names = ("features", "rows", "heads", "batch") if a.ndim > 3 else ("features", "rows", "batch")
    for axis, what in zip(range(a.ndim - 1, -1, -1), names, strict=False):
        n = a.shape[axis]
        if n < 2 or a.size > _MOST:
            continue
        first, second = (np.moveaxis(x, axis, 0).reshape(n, -1) for x in (a, b))
        keys = np.cos(1.0 + np.arange(first.shape[1]))  # any numbers that do not repeat
        order = np.empty(n, int)
        order[np.argsort(second @ keys)] = np.argsort(first @ keys)  # b[i] = a[order[i]]
        if (order != np.arange(n)).any() and _distance(np.take(a, order, axis=axis), b) <= limit:
            return Difference(f"permuted {what}", _layouts(order) if what == "features" else _listed(order))
    return None


def _listed(order: NumPyArray) -> str:
    return f"the second has {', '.join(map(str, order[:8]))}{', …' if order.size > 8 else ''} of the first"


def _layouts(order: NumPyArray) -> str:
    """Names the two layouts if the order leads from one to the other, else lists the order."""
    d = order.size
    for r, start in ((width, first) for width in range(d - d % 2, 2, -2) for first in {0, d - width}):
        halves = np.arange(d)
        halves[start : start + r] = start + np.concatenate((np.arange(0, r, 2), np.arange(1, r, 2)))
        part = f", {r} of {d} features" if r < d else ""
        if (order == halves).all():
            return f"the first is interleaved, the second in halves{part}"
        if (order[halves] == np.arange(d)).all():
            return f"the first is in halves, the second interleaved{part}"
    return _listed(order)


def _transposition(a: NumPyArray, b: NumPyArray, limit: float) -> Difference | None:
    """b is a with its axes in another order, or joined."""
    if a.size != b.size or a.ndim > 4 or b.ndim > 4 or a.size > _MOST:
        return None
    for order in itertools.permutations(range(a.ndim)):
        moved = order != tuple(range(a.ndim))
        if (moved or a.shape != b.shape) and _distance(a.transpose(order).reshape(b.shape), b) <= limit:
            return Difference("axes", f"the second is {f'axes {order} of ' * moved}the first, {a.shape}, as {b.shape}")
    return None


def _bias(a: NumPyArray, b: NumPyArray, limit: float) -> Difference | None:
    """b = a + one vector."""
    rows = (b - a).reshape(-1, a.shape[-1]) if a.ndim else np.empty((0, 1))
    if len(rows) < 2 or _distance(a + rows.mean(axis=0), b) > limit:
        return None
    return Difference("bias", f"every row of the second has the same vector added, of size {np.abs(rows[0]).max():.3g}")


def _mask(a: NumPyArray, b: NumPyArray, limit: float) -> Difference | None:
    """Scores are hidden as −inf before the softmax, as 0 after it."""
    first, second = (np.isinf(x) if np.isinf(x).any() else x == 0 for x in (a, b))
    counts = int((first & ~second).sum()), int((second & ~first).sum())
    description = f"{counts[0]} numbers are hidden (0 or infinite) in the first only, {counts[1]} in the second only"
    return Difference("mask", description) if any(counts) else None


_Explanation: TypeAlias = Callable[[NumPyArray, NumPyArray, float], Difference | None]
_EXPLANATIONS: tuple[_Explanation, ...] = (_scale, _shift, _permutation, _transposition, _bias)


def _difference(name: str, a: NumPyArray, b: NumPyArray, limit: float, unit: float) -> Difference:
    if a.shape != b.shape:
        return _transposition(a, b, limit) or Difference("shape", f"shapes {a.shape} and {b.shape}")
    nan = [int(np.isnan(x).sum()) for x in (a, b)]
    if nan[0] != nan[1]:
        return Difference("nan", f"{nan[0]} and {nan[1]} numbers are NaN, of {a.size}")
    finite = np.isfinite(a).all() and np.isfinite(b).all()
    explanations = _EXPLANATIONS if finite else ()
    if not finite or name.endswith(("scores", "state")):  # elsewhere a 0 is a number like any other
        explanations = (*explanations, _mask)
    for explain in explanations:
        if difference := explain(a, b, limit):
            return difference
    far = _distance(a, b)
    return Difference("other numbers", f"off by {far:.3g} of a row, {far / unit:.3g} units of roundoff")


# How two rotations of the same vectors differ


class Turn(NamedTuple):
    """What a rotation did to x (…, n, d)."""

    pairing: str  # which features make a pair
    factor: float  # by how much it made them longer
    theta: NumPyArray  # (p,): how far each pair turns from row to row, in (−π, π]
    start: NumPyArray  # (p,): how far it is turned in row 0


def _turn(x: NumPyArray, y: NumPyArray, limit: float) -> Turn | None:
    """The rotation that leads from x to y: the first pairing that keeps the lengths of pairs, full width first."""
    d = x.shape[-1]
    if x.ndim < 2 or x.shape[-2] < 2:
        return None
    for r, place, layout in itertools.product(range(d - d % 2, 1, -2), ("prefix", "suffix"), ("half", "interleaved")):
        start, i = 0 if place == "prefix" else d - r, np.arange(r // 2)
        first, second = (start + i, start + i + r // 2) if layout == "half" else (start + 2 * i, start + 2 * i + 1)
        before, after = (z[..., first] + 1j * z[..., second] for z in (x, y))
        lengths, longer = np.abs(before), np.abs(after)
        factor = math.sqrt(float(np.square(longer).sum() / max(float(np.square(lengths).sum()), 1e-300)))
        still = np.delete(np.arange(d), slice(start, start + r))
        if _distance(factor * lengths, longer) > limit or _distance(x[..., still], y[..., still]) > limit:
            continue
        # A row's angle is that of Σ after·before* over all heads, in which long vectors weigh more.
        turned = (after * before.conj()).reshape(-1, *before.shape[-2:]).sum(axis=0)
        steps = np.angle((turned[1:] * turned[:-1].conj()).sum(axis=0))
        part = "" if r == d else f", {r} of {d} features, the {place}"
        return Turn(f"{layout}{part}", factor, steps, np.angle(turned[0]))
    return None


def _turns_apart(x: NumPyArray, a: NumPyArray, b: NumPyArray, limit: float) -> Difference | None:
    """How two rotations a and b of the same x differ: in pairs, length, direction, offset or frequencies."""
    first, second = (_turn(x, y, limit) for y in (a, b))
    if first is None or second is None:
        return None
    if first.pairing != second.pairing:
        return Difference("pairing", f"the first pairs features as {first.pairing}, the second as {second.pairing}")
    if abs(first.factor / second.factor - 1) > 2 * limit:
        return Difference(
            "scale", f"the first makes vectors {first.factor:.6g} as long, the second {second.factor:.6g}"
        )
    near = 1e-2 * np.abs(first.theta) + limit / 4  # angles are means over rows and heads, better than one number
    if (np.abs(first.theta + second.theta) <= near).all():
        return Difference("direction", "the second turns as far as the first, the other way")
    if (np.abs(first.theta - second.theta) <= near).all():
        return Difference("offset", f"both turn alike, the second from {_gap(first, second):.3g} positions further on")
    return Difference(
        "frequencies", f"the first has {_series(first.theta, limit)}, the second {_series(second.theta, limit)}"
    )


def _gap(first: Turn, second: Turn) -> float:
    """The difference of the first positions: roughly by the slowest pair, which completed no turn, then finer."""
    gap, angles = 0.0, second.start - first.start
    for i in np.argsort(np.abs(first.theta)):
        if first.theta[i]:
            gap += float(np.angle(np.exp(1j * (angles[i] - gap * first.theta[i]))) / first.theta[i])
    return gap


def _series(theta: NumPyArray, limit: float) -> str:
    """Describes the frequencies; those that noise would spoil are left out of the fit."""
    size, i = np.abs(theta), np.arange(theta.size)
    span, clear = f"frequencies from {size[0]:.3g} to {size[-1]:.3g}", size > 3 * limit
    if clear.sum() < 3:
        return span
    slope, first = np.polyfit(i[clear], np.log(size[clear]), 1)
    if np.abs(np.log(size[clear]) - (slope * i[clear] + first)).max() > 0.05:
        return f"{span}, no geometric series"
    return f"{span}, those of base {math.exp(-slope * size.size):.3g}"


# What it suggests: names (any if empty), kind (any if empty), cause, fix; the first that fits

_TURNED = "q_rotated k_rotated"
_HINTS: tuple[tuple[str, str, str, str], ...] = (
    (_TURNED, "pairing", "the two pair features differently", "use one layout, or permute_weights on one side"),
    (_TURNED, "direction", "one has the sign of sin reversed", "negate sin on one side"),
    (_TURNED, "offset", "positions start elsewhere, or a cache counts them differently", "compare positions"),
    (_TURNED, "frequencies", "another base or rescaling of Θ", "compare rope_theta and rope_scaling"),
    (_TURNED, "scale", "an attention factor on one side only", "compare the factor of cos and sin"),
    (f"q k {_TURNED}", "permuted features", "weights are stored for another layout", "permute_weights on one side"),
    (_TURNED, "", "the rotation differs: tables, partial width or precision", "run check_rotation on it"),
    ("", "nan", "an overflow, or a row of a mask that hides everything", "look at the scores before it"),
    ("", "noise", "rounding, which grows from layer to layer", "compare in a wider dtype"),
    ("", "axes", "the same numbers with axes in another order", "write (b, h, n, d) on both sides"),
    ("", "shift", "tokens are shifted: one more at the start, or padding", "compare the tokens"),
    ("", "permuted rows", "tokens are in another order", "compare the tokens"),
    ("scores state", "mask", "masks differ: causal, window or padding", "compare positions and the window"),
    ("scores", "scale", "another scale of the scores, usually 1/√d", "compare head_dim and the scale"),
    ("q k v scores attention", "permuted heads", "heads are stored or grouped differently", "head i reads key i·g//h"),
    ("embedding", "scale", "embeddings are multiplied on one side, in some families by √e", "compare the configs"),
    ("embedding", "", "other tokens or another embedding table", "compare tokens and weights"),
    ("norm mlp_norm", "scale", "another norm: weight or 1 + weight, mean or mean square", "compare the norms"),
    ("norm mlp_norm", "", "another norm, or another epsilon", "compare the norms and their epsilon"),
    ("q k v mlp", "bias", "a bias on one side only", "look for biases in the checkpoint"),
    ("q k v", "", "weights, biases, q/k norms, or fused projections cut elsewhere", "compare their tensors"),
    ("scores state", "", "queries and keys agree: mask, scale or capping differ", "compare these"),
    ("attention", "", "values, their grouping or the output projection differ", "compare these"),
    ("mlp", "", "another activation, or gate and up projections exchanged", "compare the MLP's options"),
    ("logits", "", "another head: tied or not, scaled or capped", "compare the last projection"),
    ("", "", "no usual mistake gives this difference", "compare how this name is computed"),
)


def _hint(name: str, kind: str) -> tuple[str, str]:
    stage = name.rpartition(".")[2]
    fitting = (hint for hint in _HINTS if stage in (hint[0] or stage).split() and hint[1] in ("", kind))
    return next((cause, fix) for _, _, cause, fix in fitting)


# The walk


class _Step(NamedTuple):
    name: str
    difference: Difference | None
    level: float  # of the difference, in units of roundoff


def diff_traces(a: PathLike | Trace, b: PathLike | Trace, *, tolerance: float | None = None) -> Report:
    """Where trace b begins to differ from trace a, how, and what that suggests.

    ``tolerance`` is the relative difference of rows that is allowed; the default follows from the dtypes. Traces whose
    features are in another order at some names, while what follows agrees, are "equivalent".

    >>> x = np.arange(1.0, 9.0).reshape(1, 2, 4)
    >>> report = diff_traces({"embedding": x, "logits": x}, {"embedding": x, "logits": 2 * x})
    >>> report.verdict, report.faults
    ('wrong', ('scale',))
    """
    tolerance = None if tolerance is None else checks.real("tolerance", tolerance, 0)
    first, second = (_checked(x) if isinstance(x, Mapping) else read_trace(x) for x in (a, b))
    with np.errstate(all="ignore"):  # whatever the numbers are
        walk = list(_walk(first, second, tolerance))
    if not walk:
        raise ValueError(f"the traces have no name in common: {', '.join([*first][:3])}; {', '.join([*second][:3])}")
    differing = [step for step in walk if step.difference is not None]
    expected, rows = f"{len(first)} names, as in the first trace", tuple(_by_layer(walk))
    notes = tuple(_notes(first, second, len(differing)))
    if not differing and walk[-1].name == [*first][-1]:
        most = max(step.level for step in walk)
        noise = f"noise of at most {most:.3g} units of roundoff" if most else "the same bits"
        return Report("trace", expected, "right", (), noise, rows, notes)
    kinds = {step.difference.kind for step in differing if step.difference}
    if kinds == {"permuted features"} and differing[-1] is not walk[-1]:
        note = f"features are in another order at {', '.join(step.name for step in differing[:4])}; what follows agrees"
        return Report("trace", expected, "equivalent", (), None, rows, (note, *notes))
    return Report("trace", expected, "wrong", (_finding(differing, first, second),), None, rows, notes)


def _checked(trace: Trace) -> Trace:
    """The trace, if it is made of real numbers, as those in files are."""
    arrays = {name: plain(np.asarray(x) if isinstance(x, np.generic) else x) for name, x in trace.items()}
    for name, array in arrays.items():
        if not isinstance(name, str) or array is None or not (array.dtype.name in UNIT or array.dtype.kind in "biuf"):
            kind = type(trace[name]).__name__ if array is None else array.dtype.name
            raise TypeError(f"a trace must be NumPy arrays of real numbers by name, {name!r} was {kind}")
    return {name: array for name, array in arrays.items() if array is not None}


def _walk(first: Trace, second: Trace, tolerance: float | None) -> Iterator[_Step]:
    """Compares every name that both have, in the order of the first."""
    largest = 0.0
    for name in first:
        if name not in second:
            continue
        unit = max(UNIT.get(x[name].dtype.name, 2.0**-53) for x in (first, second))
        a, b = first[name].astype(np.float64), second[name].astype(np.float64)
        b = b.reshape(a.shape) if _without_ones(a.shape) == _without_ones(b.shape) else b
        grown = max(16 * unit, 8 * largest)
        limit = min(grown, math.sqrt(unit)) if tolerance is None else tolerance
        far = _distance(a, b) if a.shape == b.shape else math.inf
        difference = None
        if far > limit:
            difference = _rotated(name, first, second, a, b, limit) or _difference(name, a, b, limit, unit)
            if difference.kind == "other numbers" and far <= grown:
                difference = Difference("noise", f"differences have grown step by step, to {far:.3g} of a row")
        else:
            largest = max(largest, far)
        yield _Step(name, difference, far / unit)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without axes of one: a batch of one may have no axis of its own."""
    return tuple(size for size in shape if size != 1)


def _rotated(name: str, first: Trace, second: Trace, a: NumPyArray, b: NumPyArray, limit: float) -> Difference | None:
    """How two rotations differ, if the vectors before them agree."""
    source = name.removesuffix("_rotated")
    if source == name or source not in first or source not in second:
        return None
    x, y = (trace[source].astype(np.float64) for trace in (first, second))
    y = y.reshape(x.shape) if _without_ones(x.shape) == _without_ones(y.shape) else y
    if not a.shape == b.shape == x.shape == y.shape or not np.isfinite([a, b]).all() or _distance(x, y) > limit:
        return None
    return _turns_apart(x, a, b, limit)


def _by_layer(walk: list[_Step]) -> Iterator[ErrorRow]:
    """The differences of each layer: noise grows from one to the next, a fault jumps."""

    def layer(step: _Step) -> str:
        match = re.match(r"layers\.\d+", step.name)
        return match[0] if match else step.name

    for name, group in itertools.groupby(walk, layer):
        levels = [step.level for step in group]
        yield ErrorRow(name, max(levels), float(np.median(levels)))


def _finding(differing: list[_Step], first: Trace, second: Trace) -> Finding:
    name, difference, _ = differing[0] if differing else ("", None, 0.0)
    if difference is None:
        missing = [name for name in first if name not in second]
        evidence = f"{len(missing)} of {len(first)} names are missing in the second, the last among them"
        return Finding("missing names", evidence, "the second trace ends early, or has other names", "write all names")
    evidence = f"the first difference is at {name}: {difference.description}"
    return Finding(difference.kind, evidence, *_hint(name, difference.kind))


def _notes(first: Trace, second: Trace, differing: int) -> Iterator[str]:
    for word, one, other in (("second", first, second), ("first", second, first)):
        if missing := [name for name in one if name not in other]:
            yield f"missing in the {word} trace: {', '.join(missing[:6])}{', …' if len(missing) > 6 else ''}"
    other_dtype = [name for name in first if name in second and first[name].dtype != second[name].dtype]
    if other_dtype:
        name = other_dtype[0]
        example = f"the first of them {name}, {first[name].dtype} and {second[name].dtype}"
        yield f"{len(other_dtype)} names have other dtypes, {example}; judged by the coarser"
    if differing > 1:
        yield f"{differing} names differ in all; those after the first may follow from it"
