"""What the numerators of weights are made of: q̃·k̃ as expected, in another way, or with something besides.

log W = scale·q̃·k̃ + c of softmax attention, W = c·(Rφ(q))·(Rφ(k)) of Eq. (19), with one c for each query: so ratios
within a row compare numerators, whatever divides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import definition
from ..backend import Array
from . import turning
from .attention_calls import unit_values
from .candidate import UNIT, Unreadable
from .measured import Measured, Ways, digits, query_at, where
from .report import Finding, side_by_side
from .responses import alike, depends, examples, narrowed, response
from .steps import Call, Spec, capped, same, spread
from .turning import Turn, Way, products, right_way

# The share of weights that are near: of a way that is right, of one that is loosely so, and of another one.
FITS, LOOSELY, NEARLY = 0.9999, 0.6, 0.9
PREDICTED = "the ratios of the weights of each query are what this mistake makes"
NORMED = "operands: q and k normed"  # by their lengths, or by what is that times a number
MERGED = "online softmax: parts of the keys merged with other factors"
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
        if other.share > max(best.share, NEARLY):
            best = other
        if best.share > FITS:
            break
    if best.share <= FITS and not m.linear and (scaled := _scaled(m)):
        return scaled
    if best.share <= FITS and (alone := _alone(m)):
        return alone
    if abs(best.scale - 1) > m.close * (10 if best.found else 1) and not any(x.fault == NORMED for x in best.found):
        best = best._replace(found=[*best.found, _scale(m, best.scale)])
    if best.share > FITS or (m.linear or best.found) and best.share >= LOOSELY:
        return best
    listed = (_bias, _mapped, _rounded) if m.linear else (_bias, _merged, _changed, _rounded)
    unlisted = next((finding for look in listed if (finding := look(m)) is not None), None)
    return Numerators([unlisted or _unexplained(m, best.near)])


def _alone(m: Measured) -> Numerators | None:
    """What makes other numerators in some heads alone: in the first of them, as if there were no other."""
    right = _made(m, right_way(m.spec, m.due), [])
    wrong = (m.some & ~right.near).sum(axis=(0, 2, 3)) > 0.05 * m.some.sum(axis=(0, 2, 3))
    if wrong.all() or not right.near[:, ~wrong][m.some[:, ~wrong]].mean() > FITS:
        return None
    heads, one = len(wrong), int(wrong.argmax())

    def cut(call: Call) -> Call:
        q, k, v = (x[:, [one * x.shape[1] // heads]] for x in (call.q, call.k, call.v))
        return replace(call, q=q, k=k, v=v)

    def ask(call: Call) -> Array:
        shared = m.call.k.shape[1]
        q, k, v = (x.repeat(h, axis=1) for x, h in ((call.q, heads), (call.k, shared), (call.v, shared)))
        return m.ask(replace(call, q=q, k=k, v=v))[:, [one]]

    spec = replace(m.spec, heads=1, key_heads=1)
    single = replace(m, spec=spec, ask=ask, call=cut(m.call), read=m.read[:, [one]], due=cut(m.due))
    try:
        made = numerators(single)
    except Unreadable:  # it may take other numbers of heads, or the recorded calls, alone
        return None
    words = where(m.call, wrong[:, None, None] & m.some, m.some)
    return Numerators([replace(x, fact=x.fact + words) for x in made.found]) if made.share > FITS else None


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
    named |= {"exp2 without log₂ e": np.log(2), "softcap without its factor": 1 / cap}
    named |= {"softcap without its division": cap, "1/√ of the number of keys, not of features": m**-0.5 / s}
    factor = 1.0 if spec.rope is None else spec.rope.attention_factor
    named |= {"attention factor missing": factor**-2, "attention factor on one side alone": 1 / factor}
    widths = {"the rotated part": spec.rope.width if spec.rope else d, "all heads": spec.heads * d}
    return named | {f"1/√ of the width of {what}": width**-0.5 / s for what, width in widths.items()}


def _ways(spec: Spec, call: Call) -> Ways:
    way = right_way(spec, call)
    if way.q.shape == way.k.shape:
        yield "operands: queries and keys exchanged", replace(way, q=way.k, k=way.q)
        yield "operands: keys compared with keys", replace(way, q=way.k)
    yield "operands: values compared instead of keys", replace(way, k=spread(call)[2])
    yield from _maps(spec, way) if spec.feature_map is not None else ()
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (way.q, way.k))
    yield NORMED, replace(way, q=q, k=k)
    if isinstance(way.turn_k, Turn) and isinstance(way.turn_q, Turn):
        yield from _turns(way, way.turn_q, way.turn_k, call)


def _turns(way: Way, q: Turn, k: Turn, call: Call) -> Ways:
    """What is no matter of the positions of both: another pairing of one side, and keys in a cache."""
    other = replace(q.rope, layout="interleaved" if q.rope.layout.startswith("half") else "half")
    yield "wrong pairing: of the keys alone", replace(way, turn_k=replace(k, rope=other))
    yield "wrong pairing: of the queries alone", replace(way, turn_q=replace(q, rope=other))
    since = [np.maximum(i - call.of, 0) for i in range(len(call.chunks))]  # calls since that of a key
    if since:
        times = {"keys rotated again in each call": [1 + x for x in since]}
        times |= {"keys of earlier calls not rotated": [x == 0 for x in since]}
        for how, each in times.items():
            yield f"cache: {how}", replace(way, later=tuple(replace(k, at=k.at * x) for x in each))


def _maps(spec: Spec, way: Way) -> Ways:
    turned = {"q": way.turn_q(way.q), "k": way.turn_k(way.k), "turn_q": same, "turn_k": same}
    yield "feature map: after the rotation", replace(way, **turned)
    maps = definition.FEATURE_MAPS.items()
    yield from ((f"feature map: {name}", replace(way, phi=phi)) for name, phi in maps)
    by = spec.head_dim**-0.5
    yield "feature map: of q times 1/√d", replace(way, q=way.q * by)
    yield "feature map: of q and k times 1/√d", replace(way, q=way.q * by, k=way.k * by)


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
    few = words.startswith(("rounded", "quantised"))
    step = "softcap:" if cap is not None or "tanh" in words else "precision: scores" if few else "scores:"
    if function is not None or not words:
        early = cap is not None and "tanh" in words and abs(np.nanmax(np.abs(y)) / (cap * m.spec.scale) - 1) < 0.01
        how = "before the scale" if early else words or "missing"
        yield [Finding(f"{step} {how}", f"of scores, {examples(x, y)}"), *found], replace(way, cap=function or same)


def _mapped(m: Measured) -> Finding | None:
    """Another function of single features, whatever the query, and the order of the keys."""
    (x, got), (_, again), (_, back) = _acts(m, FEATURES), _acts(m, FEATURES, 2.0), _acts(m, FEATURES[::-1])
    due = np.log(definition.FEATURE_MAPS[m.spec.feature_map or "identity"](x))
    unlike = max(np.abs(y - y[0] - got).max() for y in (again, back[::-1])) > 20 * m.close
    right = (np.abs(got - due + due[0]) < 0.03 * (1 + np.abs(due))).all()
    if unlike or right or not np.isfinite(got).all() or np.ptp(got) < m.close:
        return None
    numbers = (", ".join(f"{x:.4g}" for x in np.exp(y - y[-1])) for y in (got, due))
    words = f"φ of {', '.join(f'{x:g}' for x in FEATURES)}, over φ of the last, is {{}}, expected {{}}"
    return Finding("feature map: another function", words.format(*numbers))


# ── What is in no list ───────────────────────────────────────────────────────────────────────────────────────────────


def _logs(m: Measured) -> tuple[Array, Array]:
    """log(W/N) of the expected numerators, less its mean in each row, and where that says something."""
    number = _made(m, right_way(m.spec, m.due), []).number
    some = m.sees & m.visible & (m.weights / number > 0)
    if m.linear:
        some = some & (np.abs(number) > 0.05 * np.abs(number).max(axis=-1, keepdims=True))
    some = some & (some.sum(axis=-1, keepdims=True) > 2)
    return _centred(np.log(np.where(some, m.weights / number, 1)), some), some


def _scaled(m: Measured) -> Numerators | None:
    """Scores that have another scale in each head, or for each query: by least squares in each row."""
    some, scores = m.some & (m.weights > 0), m.right.scores
    x, y = _centred(scores, some), _centred(np.log(np.where(some, m.weights, 1)), some)
    scale = (x * y).sum(axis=-1, keepdims=True) / np.square(x).sum(axis=-1, keepdims=True)
    number = np.exp(np.clip(np.nan_to_num(scale) * (scores - m.top(scores)), -700, 700))
    made = _fitted(m, [], number, number, some, 0.05)
    if not made.share > FITS:
        return None
    each = np.where(some.sum(axis=-1) > 3, scale[..., 0], np.nan)  # (b, h, n)
    heads, queries = np.nanmedian(each, axis=(0, 2)), np.nanmedian(each, axis=(0, 1))
    alike = np.nanmax(np.abs(each / heads[:, None] - 1)) < 0.01
    what, places, numbers = ("head", range(len(heads)), heads) if alike else ("query", m.call.places[0], queries)
    listed = [f"{x:.4g} ({at})" for x, at in zip(numbers, places, strict=True) if np.isfinite(x)]
    words = f"scores are multiplied, by the {what}, with {', '.join(listed[:6])}, …"
    return made._replace(found=[Finding(f"scale: by the {what}", words)])


def _bias(m: Measured) -> Finding | None:
    """A term in the logarithm that depends on the distance alone: by differences of neighbours, in which what is common
    to a row is not."""
    (y, some), (i, j) = _logs(m), m.call.places
    steps = np.where(some[..., 1:] & some[..., :-1], np.diff(y, axis=-1), np.nan)[0]  # (h, n, m − 1)
    distance = (i[:, None] - j)[:, 1:]
    at, times = np.unique(distance[np.isfinite(steps).any(axis=0)], return_counts=True)
    known = at[: max(int((times > 1).argmin()), 0) or len(at)] if (times > 1).any() else at[:0]  # of several queries
    each = np.array([np.nanmean(np.where(distance == x, steps, np.nan), axis=(1, 2)) for x in known]).T
    count = int(np.isfinite(each).all(axis=0).argmin()) if np.isnan(each).any() else known.size
    if not count:
        return None
    each, at = each[:, :count], np.minimum(np.searchsorted(known, distance), count - 1)  # (h, distances)
    off = np.nanmax(np.where(np.isin(distance, known[:count]), np.abs(steps - each[:, at]), np.nan))
    term = -each.cumsum(axis=1)
    if np.ptp(term) < 30 * m.close or off > min(30 * m.close, 0.05 * np.ptp(term)):
        return None
    numbers = ", ".join(f"{x:+.4g}" for x in term[0, :5])
    words = f"a number for each distance is added to the logarithms of weights: 0, {numbers}, … in head 0"
    return Finding("bias: by distance", words)


def _merged(m: Measured) -> Finding | None:
    """Keys in parts that are right within themselves and were merged with other factors: log(W/N) changes between the
    same neighbours alone, in any query."""
    y, some = _logs(m)
    steps = np.where(some[..., 1:] & some[..., :-1], np.abs(np.diff(y, axis=-1)), np.nan)
    most = np.nanmax(steps, axis=(0, 1, 2))
    edges = np.flatnonzero(most > 30 * m.close)
    if (
        not 0 < len(edges) < len(most) / 4
        or np.diff(edges, prepend=-1, append=len(most)).min() < 2
        or np.nanmax(np.delete(most, edges)) > m.close
    ):
        return None
    places = ", ".join(f"{j} and {j + 1}" for j in edges[:4])
    words = f"weights are right to one another within parts of the keys, and not across {places}, by up to a factor of "
    return Finding(MERGED, f"{words}{np.exp(np.nanmax(most)):.4g}")


def _changed(m: Measured) -> Finding | None:
    """Weights that are another function of the right ones, or of what these are over the greatest of their row."""
    right = m.right.weights
    greatest = np.where(m.some, right, 0).argmax(axis=-1)[..., None]
    for what, places in (("weights", None), ("exponentials", greatest)):
        both = (w if places is None else w / np.take_along_axis(w, places, axis=-1) for w in (right, m.weights))
        x, y = (w[m.some & (right > 0.02)][None] for w in both)  # of small ones, other digits may be left
        words, function = response(x, y, m.close)
        if function is not None or y.size > 9 and depends(np.log(x), np.log(np.maximum(y, 1e-300) / x)):
            few = words.startswith(("rounded", "quantised"))
            how = f"{what} {words}" if few or places is not None else words
            return Finding(f"{'precision' if few else 'weights'}: {how}", f"of {what}, {examples(x, y)}")
    return None


def _rounded(m: Measured) -> Finding | None:
    """Differences of the size of a rounding, if they have no pattern."""
    y, some = _logs(m)
    off = float(np.sqrt(np.square(y[some]).mean())) if some.any() else 1.0
    if not m.close / 30 < off < 0.2:
        return None
    scores, shared = _centred(m.right.scores, some), np.where(some, y, 0).mean(axis=-2)
    alike = abs((scores * y).sum()) / np.sqrt(np.square(scores).sum() * np.square(y).sum())
    few = np.median(np.abs(y[some])) < 0.3 * off  # large errors of some weights are no rounding
    pattern = few or np.sqrt(np.square(shared).mean()) > 0.6 * off or alike > 0.2 or (m.sees & ~m.visible).any()
    return None if pattern else digits(off, m.spec)


def _unexplained(m: Measured, near: Array) -> Finding:
    some = m.sees & m.visible
    b, h, i, _ = np.unravel_index(int(np.abs(m.weights - m.right.weights).argmax()), some.shape)
    got, due = (" ".join(f"{x:.3g}" for x in np.asarray(w)[b, h, i, :6]) for w in (m.weights, m.right.weights))
    words = f"{query_at(m.call, b, h, i)} has the weights {got} …, expected {due} …"
    return Finding("unexplained: weights", words + where(m.call, ~near, some))
