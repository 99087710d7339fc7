"""What the numerators of weights are made of: q̃·k̃ as expected, in another way, or with something besides.

log W = scale·q̃·k̃ + c of softmax attention, W = c·(Rφ(q))·(Rφ(k)) of Eq. (19), with one c for each query: so ratios
within a row compare numerators, whatever divides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import definition
from ..backend import Array
from . import turning
from .attention_calls import unit_values
from .candidate import UNIT, Unreadable
from .measured import BLOCKS, Measured, Ways, as_rounded, coarser, query_at, where
from .report import Finding, side_by_side
from .responses import Function, alike, examples, narrowed, response, roundings
from .steps import Call, Spec, capped, same, spread
from .turning import Turn, Way, products, right_way

# The share of weights that are near: of a way that is right, of the expected one but for counts, and of another one.
FITS, LOOSELY, NEARLY = 0.9999, 0.6, 0.9
PREDICTED = "the ratios of the weights of a query are those of this mistake"
LENGTHS = "operands: q and k divided by their lengths"
FEATURES = np.array([-3, -2, -1, -0.5, 0.5, 1.0, 2, 3])
# So close to one another that no weight is lost beside the next.
_SIZES = np.concatenate(([0.05, 0.1, 0.3, 1.1, 2.3, 4.7], np.linspace(9.1, 123.4, 14)))
SCORES = np.concatenate((-_SIZES[::-1], [0.0], _SIZES))


class Numerators(NamedTuple):
    """Numerators as they were measured to be made, what is summed in their total, and how well weights are these
    numerators times a factor of each row."""

    found: list[Finding]
    number: Any = None  # (b, h, n, m); None if they are not known
    plain: Any = None
    share: float = 1.0  # of the weights that fit; NaN if no row has three
    factors: Any = None  # (b, h, n, 1)
    near: Any = None  # which ones fit, (b, h, n, m)
    scale: float = 1.0  # times the expected one


def fits(m: Measured) -> bool:
    """Whether numerators are the expected ones, as far as there are weights enough to compare."""
    return not _made(m, right_way(m.spec, m.due), []).share <= FITS


def numerators(m: Measured) -> Numerators:
    """The step that makes other numerators, if there is one."""
    best = _made(m, right_way(m.spec, m.due), [])
    if np.isnan(best.share):
        return Numerators([])  # no row has weights enough to compare
    for found, way in () if best.share > FITS else _others(m):
        other = _made(m, way, found)
        if other.share > max(best.share, NEARLY) + (0.004 if other.share < FITS else 0):
            best = other
        if best.share > FITS:
            break
    if best.share <= FITS and not m.linear and (scaled := _scaled(m)):
        return Numerators([scaled])
    if best.share <= FITS and (alone := _alone(m)):
        return alone
    if [x.fault for x in best.found] == [LENGTHS] and abs(best.scale / m.spec.head_dim - 1) < 10 * m.close:
        best = best._replace(found=[Finding("operands: q and k divided by their RMS", PREDICTED)], scale=1.0)
    if abs(best.scale - 1) > m.close * (10 if best.found else 1):
        best = best._replace(found=[*best.found, _scale(m, best.scale)])
    if best.share >= LOOSELY and (best.share > FITS or m.linear or best.found):
        return best
    listed = (_bias, _single, _rounded) if m.linear else (_bias, _merged, _rounded, _single)
    if unlisted := next((finding for look in listed if (finding := look(m)) is not None), None):
        return Numerators([unlisted])
    return best if best.share >= LOOSELY else Numerators([_unlike(m, best.near)])


def _alone(m: Measured) -> Numerators | None:
    """What makes other numerators in some heads alone: in the first of them, as if there were no other."""
    right = _made(m, right_way(m.spec, m.due), [])
    wrong = (m.some & ~right.near).sum(axis=(0, 2, 3)) > 0.05 * m.some.sum(axis=(0, 2, 3))
    heads, keys = len(wrong), m.call.k.shape[1]
    if not 0 < wrong.sum() < heads or not right.near[:, ~wrong][m.some[:, ~wrong]].mean() > FITS:
        return None
    one = int(wrong.argmax())

    def cut(call: Call) -> Call:
        q, k, v = (x[:, [one * x.shape[1] // heads]] for x in (call.q, call.k, call.v))
        return replace(call, q=q, k=k, v=v)

    def ask(call: Call) -> Array:
        q, k, v = (np.repeat(x, times, axis=1) for x, times in ((call.q, heads), (call.k, keys), (call.v, keys)))
        return m.ask(replace(call, q=q, k=k, v=v))[:, [one]]

    spec = replace(m.spec, heads=1, key_heads=1)
    made = numerators(replace(m, spec=spec, ask=ask, call=cut(m.call), read=m.read[:, [one]], due=cut(m.due)))
    if made.share <= FITS or made.number is None or not made.found:
        return None
    words = where(m.call, wrong[:, None, None] & m.some, m.some)
    return Numerators([replace(x, fact=x.fact + words) for x in made.found])


def _made(m: Measured, way: Way, found: list[Finding]) -> Numerators:
    """The numerators of a way; of scores times one number, if these fit better."""
    x, plain = products(m.spec, way)
    if m.linear:
        return _fitted(m, found, x, plain, m.some, 0.05)
    some = m.some & (m.weights > 0)
    scores, logs = _centred(x, some), _centred(np.log(np.where(some, m.weights, 1)), some)
    scale = float((scores * logs).sum() / max(np.square(scores).sum(), 1e-300))
    floor = 0.05 if UNIT[m.spec.dtype.name] > 1e-6 else 0.0  # in float16, small weights have few digits
    both = (np.exp(np.clip(a * (x - m.top(x)), -700, 700)) for a in (1.0, scale))
    one, other = (_fitted(m, found, y, y, some, floor) for y in both)
    return other._replace(scale=scale) if other.share > one.share + 0.01 else one


def _fitted(m: Measured, found: list[Finding], number: Array, plain: Array, some: Array, floor: float) -> Numerators:
    """The factor of each row is the median over some of its weights. A part of the largest is an error, too."""
    factors = np.nanmedian(np.where(some & (number != 0), m.weights / number, np.nan), axis=-1, keepdims=True)
    right = (factors := np.nan_to_num(factors)) * number
    size = np.abs(np.where(some, right, 0)).max(axis=-1, keepdims=True)
    near = np.abs(m.weights - right) <= m.close * (np.abs(right) + floor * size)
    counted = some & (some.sum(axis=-1, keepdims=True) > 2)
    return Numerators(found, number, plain, float(near[counted].mean()) if counted.any() else np.nan, factors, near)


def _centred(x: Array, some: Array) -> Array:
    """Less the mean of each row, over some of it; 0 elsewhere."""
    mean = np.where(some, x, 0).sum(axis=-1, keepdims=True) / np.maximum(some.sum(axis=-1, keepdims=True), 1)
    return np.where(some, x - mean, 0)


def _others(m: Measured) -> Iterator[tuple[list[Finding], Way]]:
    """What scores become, and how queries and keys are turned, as measured, then the other ways that are known."""
    yield from _scored(m) if not m.linear else ()
    if m.spec.rope is not None:
        yield from turning.found(m.spec, m.ask, m.call, m.due)
    for fault, way in _ways(m.spec, m.due):
        yield [Finding(fault, PREDICTED)], way


def _scale(m: Measured, a: float) -> Finding:
    """What it is that scores are so many times the expected ones."""
    if abs(a) < m.close:
        return Finding("scores: zeros", "the weights of a query are all alike, as those of scores of 0")
    scale, listed = m.spec.scale, _scales(m.spec, m.call.k.shape[2])
    named = (how for how, x in listed.items() if abs(a / x - 1) < 20 * m.close and abs(x - 1) > 1e-9)
    number = "{}, not {}".format(*side_by_side(a * scale, scale, digits=4))
    words = f"scores are {side_by_side(a, 1.0, digits=5)[0]} times the expected ones: a scale of {number}"
    return Finding(f"scale: {next(named, number)}", words)


# ── Known mistakes in what is compared ───────────────────────────────────────────────────────────────────────────────


def _scales(spec: Spec, m: int) -> dict[str, float]:
    """Scales in words, over the right one."""
    s, d, cap = spec.scale, spec.head_dim, spec.softcap or 1.0
    named = {"missing": 1 / s, "applied twice": s, "inverted": 1 / s**2, "1/√d, not the model's": d**-0.5 / s}
    named |= {"exp2 without log₂ e": np.log(2), "log₂ e without exp2": 1 / np.log(2)}
    named |= {"softcap without its factor": 1 / cap, "softcap without its division": cap}
    factor = 1.0 if spec.rope is None else spec.rope.attention_factor
    powers = {"missing": -2, "on one side alone": -1, "twice": 2, "once too often": 1}
    named |= {f"attention factor {words}": factor**power for words, power in powers.items()}
    widths = {"the rotated part": spec.rope.width if spec.rope else d, "half a head": d // 2}
    widths |= {"all heads": spec.heads * d, "all key heads": spec.key_heads * d}
    named |= {f"1/√ of the width of {what}": width**-0.5 / s for what, width in widths.items()}
    return named | {"1/√ of the number of keys, not of features": m**-0.5 / s}


def _ways(spec: Spec, call: Call) -> Ways:
    way = right_way(spec, call)
    if way.q.shape == way.k.shape:
        yield "operands: queries and keys exchanged", replace(way, q=way.k, k=way.q)
        yield "operands: keys compared with keys", replace(way, q=way.k)
    yield "operands: values compared instead of keys", replace(way, k=spread(call)[2])
    yield from _maps(spec, way) if spec.feature_map is not None else ()
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (way.q, way.k))
    yield LENGTHS, replace(way, q=q, k=k)
    if isinstance(way.turn_k, Turn) and isinstance(way.turn_q, Turn):
        yield from _turns(way, way.turn_q, way.turn_k, call)


def _turns(way: Way, q: Turn, k: Turn, call: Call) -> Ways:
    """What is no matter of the positions of both: another pairing of one side, few digits, keys in a cache."""
    other = replace(q.rope, layout="interleaved" if q.rope.layout.startswith("half") else "half")
    yield "wrong pairing: of the keys alone", replace(way, turn_k=replace(k, rope=other))
    yield "wrong pairing: of the queries alone", replace(way, turn_q=replace(q, rope=other))
    for bits, name in ((8, "bfloat16"), (11, "float16")):
        few = partial(narrowed, bits=bits)
        angles = replace(way, turn_q=replace(q, rounded=few), turn_k=replace(k, rounded=few))
        tables = replace(way, turn_q=replace(q, table=few), turn_k=replace(k, table=few))
        yield from ((f"precision: angles in {name}", angles), (f"precision: cos and sin in {name}", tables))
    since = [np.maximum(i - call.of, 0) for i in range(len(call.chunks))]  # calls since that of a key
    if since:
        times = {"keys rotated again in each call": [1 + x for x in since]}
        times |= {"keys of earlier calls not rotated": [x == 0 for x in since]}
        for how, each in times.items():
            yield f"cache: {how}", replace(way, later=tuple(replace(k, at=k.at * x) for x in each))


MAPS: dict[str, Function] = {
    **definition.FEATURE_MAPS,
    "elu, without the 1": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "softplus": lambda x: np.logaddexp(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "x²": np.square,
    "softmax over the features": lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
    "exp of x − max x": lambda x: np.exp(x - x.max(axis=-1, keepdims=True)),
}


def _maps(spec: Spec, way: Way) -> Ways:
    turned = {"q": way.turn_q(way.q), "k": way.turn_k(way.k), "turn_q": same, "turn_k": same}
    yield "feature map: after the rotation", replace(way, **turned)
    yield from ((f"feature map: {name}", replace(way, phi=phi)) for name, phi in MAPS.items())
    for words, by in (("1/√d", spec.head_dim**-0.5), ("d^−¼", spec.head_dim**-0.25)):
        yield f"feature map: of q times {words}", replace(way, q=way.q * by)
        yield f"feature map: of q and k times {words}", replace(way, q=way.q * by, k=way.k * by)
    yield "feature map: on q alone", replace(way, q=way.phi(way.q), phi=same)
    yield "feature map: on k alone", replace(way, k=way.phi(way.k), phi=same)


# ── Single numbers ───────────────────────────────────────────────────────────────────────────────────────────────────


def _acts(m: Measured, numbers: Array, query: float = 1.0) -> tuple[Array, Array]:
    """Scores near these numbers, or single features, and what they act as: a logarithm, less that of the first one. Two
    keys stand in each row of a batch, at position 0, and all features of a vector are alike."""
    (_, h, _, d), g, dtype, rows = m.call.q.shape, m.call.k.shape[1], m.call.q.dtype, len(numbers) - 1
    by = 1.0 if m.linear else query * d * m.spec.scale
    keys = narrowed(numbers / by, 8)  # of any dtype
    both = np.stack((keys[:-1], keys[1:]), axis=1)[:, None, :, None]
    q, k = np.full((rows, h, 2, d), query, dtype), np.broadcast_to(both, (rows, g, 2, d)).astype(dtype)
    at = None if m.spec.rope is None else np.zeros((rows, 2), np.int64)
    *calls, _ = unit_values(Call("single numbers", q, k, k, positions=at))
    try:
        first, second = np.moveaxis(np.concatenate([m.ask(x) for x in calls], axis=-1)[:, 0, -1, :2], -1, 0)
    except Unreadable:  # it may take other shapes, or positions, alone
        return keys * by, np.full(len(keys), np.nan)
    return keys * by, np.concatenate(([0.0], np.cumsum(np.log(second / first))))


def _scored(m: Measured) -> Iterator[tuple[list[Finding], Way]]:
    """The function that scores go through, and the scale of small ones, if they are others."""
    (x, y), zero, cap, way = _acts(m, SCORES), len(SCORES) // 2, m.spec.softcap, right_way(m.spec, m.due)
    y = y - y[zero]
    one, two = y[zero + 1 : zero + 3] / x[zero + 1 : zero + 3]
    slope = float(4 * one - two) / 3  # at 0, of odd functions
    known, unit = (1.0, *_scales(m.spec, m.call.k.shape[2]).values()), UNIT[m.spec.dtype.name]
    slope = next((a for a in known if abs(slope / a - 1) < 0.01 + 20 * unit), slope)
    if not np.isfinite(y).all() or alike(capped(x, cap), y, m.close):
        return
    y = np.where(np.abs(x) < 50 * unit, np.nan, y)  # whose weights are too alike to tell
    scaled, way = slope * x, replace(way, q=slope * way.q)
    found = [] if slope == 1 else [_scale(m, slope)]
    if alike(capped(scaled, cap), y, m.close):
        yield found, way
        return
    words, function = response(scaled[None], y[None], m.close)
    few = words.startswith(("rounded", "cut off", "quantised"))
    step = "softcap:" if cap is not None or "tanh" in words else "precision: scores" if few else "scores:"
    if function is not None or not words:
        early = cap is not None and "tanh" in words and abs(np.nanmax(np.abs(y)) / (cap * m.spec.scale) - 1) < 0.01
        how = "before the scale" if early else words or "missing"
        yield [Finding(f"{step} {how}", f"of scores, {examples(x, y)}"), *found], replace(way, cap=function or same)


def _single(m: Measured) -> Finding | None:
    """Another function of single features, or of scores, whatever the query, and the order of the keys."""
    some = FEATURES if m.linear else SCORES
    (x, got), (_, again), (_, back) = _acts(m, some), _acts(m, some, 2.0), _acts(m, some[::-1])
    due = np.log(definition.FEATURE_MAPS[m.spec.feature_map](x)) if m.spec.feature_map else capped(x, m.spec.softcap)
    unlike = max(np.abs(y - y[0] - got).max() for y in (again, back[::-1])) > 20 * m.close
    if (
        unlike
        or not np.isfinite(got).all()
        or np.ptp(got) < m.close
        or (np.abs(got - due + due[0]) < 0.03 * (1 + np.abs(due))).all()
    ):
        return None
    if m.linear:
        numbers = (", ".join(f"{x:.4g}" for x in np.exp(y - y[-1])) for y in (got, due))
        words = f"φ of {', '.join(f'{x:g}' for x in FEATURES)}, over φ of the last, is {{}}, expected {{}}"
        return Finding("feature map: another function", words.format(*numbers))
    return Finding("scores: another function of them", f"of scores, {examples(x, got - got[len(x) // 2])}")


# ── What is in no list ───────────────────────────────────────────────────────────────────────────────────────────────


def _logs(m: Measured) -> tuple[Array, Array]:
    """log(W/N) of the expected numerators, less its mean in each row, and where that says something."""
    number = _made(m, right_way(m.spec, m.due), []).number
    some = m.sees & m.visible & (m.weights / number > 0)
    if m.linear:
        some = some & (np.abs(number) > 0.05 * np.abs(number).max(axis=-1, keepdims=True))
    some = some & (some.sum(axis=-1, keepdims=True) > 2)
    return _centred(np.log(np.where(some, m.weights / number, 1)), some), some


def _scaled(m: Measured) -> Finding | None:
    """A scale of scores that depends on the head, the query or the key alone, log W = a·s + c with a c of each row: by
    least squares, in the first row of the batch."""
    head, i, j = np.nonzero(some := (m.some & (m.weights > 0))[0])
    scores, logs, every, left = m.right.scores[0][some], np.log(m.weights[0][some]), np.arange(len(i)), np.inf
    row, columns = head * some.shape[1] + i, some.shape[0] * some.shape[1]
    for what, index in (("", 0 * i), ("head", head), ("query", i), ("key", j)) if 0 < len(i) * columns < 1e7 else ():
        count = np.bincount(index)
        design = np.zeros((len(i), columns + len(count)))
        design[every, row], design[every, columns + index] = 1, scores
        a = np.linalg.lstsq(design, logs, rcond=None)[0]
        off, known = float(np.square(design @ a - logs).sum()), np.flatnonzero(count > 2 * len(some))
        if what and off < 0.01 * left:
            places = known if what == "head" else m.call.places[what == "key"][known]
            numbers = ", ".join(f"{x:.4g} ({at})" for x, at in zip(a[columns + known][:6], places, strict=False))
            return Finding(f"scale: by the {what}", f"scores are multiplied, by the {what}, with {numbers}, …")
        left = left if what else off
    return None


def _bias(m: Measured) -> Finding | None:
    """A term in the logarithm that depends on the distance, or on the key, alone: by differences of neighbours, in
    which what is common to a row is not."""
    (y, some), (i, j) = _logs(m), m.call.places
    steps = np.where(some[..., 1:] & some[..., :-1], np.diff(y, axis=-1), np.nan)[0]  # (h, n, m − 1)
    for what, index in (("distance", (i[:, None] - j)[:, 1:]), ("key", np.broadcast_to(j[1:], steps.shape[1:]))):
        known = np.unique(index[np.isfinite(steps).any(axis=0)])
        each = np.array([np.nanmean(np.where(index == x, steps, np.nan), axis=(1, 2)) for x in known]).T  # (h, indices)
        count = int(np.isfinite(each).all(axis=0).argmin()) if each.size and np.isnan(each).any() else known.size
        if not count:
            continue
        each, at = each[:, :count], np.minimum(np.searchsorted(known, index), count - 1)
        off = np.nanmax(np.where(np.isin(index, known[:count]), np.abs(steps - each[:, at]), np.nan))
        term = np.concatenate((np.zeros((len(each), 1)), each.cumsum(axis=1)), axis=1)
        if np.ptp(term) > 30 * m.close and off < min(30 * m.close, 0.05 * np.ptp(term)):
            return _bias_in_words(what, -each if what == "distance" else each)
    return None


def _merged(m: Measured) -> Finding | None:
    """Keys in parts that are right within themselves and were merged with other factors: log(W/N) changes between the
    same neighbours alone, in any query."""
    y, some = _logs(m)
    steps = np.where(some[..., 1:] & some[..., :-1], np.abs(np.diff(y, axis=-1)), np.nan)
    most = np.nanmax(steps, axis=(0, 1, 2))
    edges = np.flatnonzero(most > 30 * m.close)
    if not 0 < len(edges) < len(most) / 4 or np.nanmax(np.delete(most, edges)) > m.close:
        return None
    first, last = m.call.places[1][edges], m.call.places[1][edges + 1]
    places = ", ".join(f"{a} and {b}" for a, b in zip(first[:4], last, strict=False))
    return Finding(
        "online softmax: parts of the keys merged with other factors",
        f"weights are right to one another within parts of the keys, and not across {places}, by up to a factor of "
        f"{np.exp(np.nanmax(most)):.4g}",
    )


def _bias_in_words(what: str, steps: Array) -> Finding:
    """By how much the term changes from one distance, or key, to the next, (h, distances or keys)."""
    slopes, straight = steps.mean(axis=-1), np.ptp(steps, axis=-1).max() < 0.05 * np.abs(steps).max()
    if what == "key" or not straight:
        numbers = ", ".join(f"{x:+.4g}" for x in (0, *steps[0, :5].cumsum()))
        return Finding(f"bias: by {what}", f"a number for each {what} is added to scores: {numbers}, … in head 0")
    if np.ptp(slopes) < 1e-2 * np.abs(slopes).max():
        factor = f"{np.exp(slopes[0]):.4g}"
        words = f"for each token further back, weights are times {factor}"
        return Finding(f"bias: a decay of {factor} for each token", words)
    numbers = ", ".join(f"{x:+.4g}" for x in -slopes[:8])
    return Finding("bias: by distance", f"for each token nearer, {numbers} is added to the scores of heads 0, 1, …")


def _rounded(m: Measured) -> Finding | None:
    """Differences of the size of a rounding: at which step, if one predicts them; else if they have no pattern."""
    y, some = _logs(m)
    off = float(np.sqrt(np.square(y[some]).mean())) if some.any() else 1.0
    if not m.close / 30 < off < 0.2:
        return None
    if predicted := rounded(m, off):
        return predicted
    scores, shared = _centred(m.right.scores, some), np.where(some, y, 0).mean(axis=-2)
    alike = abs((scores * y).sum()) / np.sqrt(np.square(scores).sum() * np.square(y).sum())
    few = np.median(np.abs(y[some])) < 0.3 * off  # large errors of some weights are no rounding
    pattern = few or np.sqrt(np.square(shared).mean()) > 0.6 * off or alike > 0.2 or (m.sees & ~m.visible).any()
    if pattern or not (name := coarser(off, m.spec)):
        return None
    fact = f"the weights are off by {off:.2g} of their size, without a pattern"
    return Finding(as_rounded(name, m.spec), fact)


def rounded(m: Measured, off: float) -> Finding | None:
    """The step whose rounding predicts the errors of the weights."""
    errors = ((float(np.square(m.weights - w)[m.visible].mean()), how) for how, w in _rounded_weights(m))
    left, how = min(errors, key=lambda x: x[0])  # of those that are alike, the first
    if left > 0.02 * np.square(m.weights - m.right.weights)[m.visible].mean():
        return None
    return Finding(f"precision: {how}", f"weights are off by {off:.2g} of their size, as this rounding makes them")


def _rounded_weights(m: Measured) -> Iterator[tuple[str, Array]]:
    """The right weights with few digits at one step."""
    way, visible = right_way(m.spec, m.due), m.right.seen
    for words, few in roundings():
        for on_q, on_k, what in ((few, few, "q and k"), (few, same, "q"), (same, few, "k")):
            yield f"{what} {words}", _weights(m, replace(way, q=on_q(way.q), k=on_k(way.k)))
            if m.linear:
                mapped = replace(way, q=on_q(way.phi(way.q)), k=on_k(way.phi(way.k)), phi=same)
                yield f"features of {what} {words}", _weights(m, mapped)
        if m.linear and "rounded" in words:
            total = np.where(m.right.total == 0, 1, m.right.total)
            yield f"numerators {words}", np.where(visible, few(m.right.scores), 0) / total
            yield from ((f"state {words}", w) for w in _of_states(m, way, few))
        elif not m.linear:
            yield f"scores {words}", definition.softmax(np.where(visible, few(m.right.scores), -np.inf))
            powers = np.where(visible, np.exp(m.right.scores - m.top(m.right.scores)), 0)
            for total in (powers, few(powers)):
                yield f"weights {words}", few(powers) / total.sum(axis=-1, keepdims=True)
        yield f"weights {words}", few(m.right.weights)


def _of_states(m: Measured, way: Way, few: Function) -> Iterator[Array]:
    """Weights of Eq. (19) by a state with few digits, of each token or of each block: a value that is a unit vector
    alone leaves Rφ(k) of its token in it. The sums of φ(k) are kept so, too, or are exact."""
    (i, j), fq, fk = m.call.places, way.phi(way.q), way.phi(way.k)
    tq, tk, sums = way.turn_q(fq), way.turn_k(fk), np.zeros_like(fk)
    exact, rounded = (tq @ x.swapaxes(-1, -2) for x in (tk, few(tk)))
    for block in (0, *(x for x in BLOCKS if x < j.size)):
        kept = np.zeros_like(fk[:, :, 0])
        for token in j:
            kept = (few(kept) if block and token % block == 0 else kept) + fk[:, :, token]
            kept = kept if block else few(kept)
            sums[:, :, token] = kept
        earlier = i[:, None] // block > j // block if block else np.True_
        made = np.where(m.right.seen, np.where(earlier, rounded, exact), 0)
        last = sums[:, :, i if m.spec.causal else np.full(i.shape, j[-1])]
        for total in ((fq * last).sum(axis=-1, keepdims=True), m.right.total):
            yield made / np.where(total == 0, 1, total)


def _weights(m: Measured, way: Way) -> Array:
    """Those that a way makes."""
    made, plain = products(m.spec, way)
    if not m.linear:
        return definition.softmax(np.where(m.right.seen, made, -np.inf))
    total = np.where(m.right.seen, plain, 0).sum(axis=-1, keepdims=True)
    return np.where(m.right.seen, made, 0) / np.where(total == 0, 1, total)


def _unlike(m: Measured, near: Array) -> Finding:
    some = m.sees & m.visible
    b, h, i, _ = np.unravel_index(int(np.abs(m.weights - m.right.weights).argmax()), some.shape)
    got, due = (" ".join(f"{x:.3g}" for x in np.asarray(w)[b, h, i, :6]) for w in (m.weights, m.right.weights))
    words = f"{query_at(m.call, b, h, i)} has the weights {got} …, expected {due} …"
    return Finding("operands: not q̃·k̃", words + where(m.call, ~near, some))
