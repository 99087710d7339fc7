"""What the numerators of weights are made of: q̃·k̃ as expected, in another way, or with something besides.

log W = scale·q̃·k̃ + c of softmax attention, W = c·(Rφ(q))·(Rφ(k)) of Eq. (19), with one c for each query: so ratios
within a row compare numerators, whatever divides them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..definition import FEATURE_MAPS
from . import turning, ways
from .candidate import UNIT
from .masks import runs
from .measured import Fit, Measured, centred, fit, read
from .report import Finding
from .steps import Call, capped

FITS, LOOSELY = 0.9999, 0.6  # the share of weights that are near: of a way that is right, and of one but for counts
PREDICTED = "the ratios of the weights of a query are those of this mistake"
FEATURES = np.array([1.0, -3, -2, -1, -0.5, 0.5, 2, 3])
SCORES = np.array([1.0, -12, -6, -3, -1, 3, 6, 12])


class Numerators(NamedTuple):
    """Numerators as they were measured to be made, what is summed in their total, and how well they fit."""

    found: list[Finding]
    number: Any = None  # (b, h, n, m); None if they are not known
    plain: Any = None
    fit: Any = None
    scale: float = 1.0  # times the expected one


def numerators(m: Measured) -> Numerators:
    """The step that makes other numerators, if there is one."""
    best = _made(m, ways.right_way(m.spec, m.call), [])
    if np.isnan(best.fit.share):
        return Numerators([])  # no row has weights enough to compare
    for found, way in () if best.fit.share > FITS else _others(m):
        other = _made(m, way, found)
        if other.fit.share > max(best.fit.share, LOOSELY) + (0.004 if other.fit.share < FITS else 0):
            best = other
        if best.fit.share > FITS:
            break
    best = best._replace(found=[*best.found, *_scale(m, best)])
    if best.fit.share >= LOOSELY and (best.fit.share > FITS or m.linear or best.found):
        return best
    listed = (_bias, _single, _features, _rounded, _foreign)
    if unlisted := next((finding for look in listed if (finding := look(m)) is not None), None):
        return Numerators([unlisted])
    return best if best.fit.share >= LOOSELY else Numerators([_unlike(m, best.fit)])


def _made(m: Measured, way: ways.Way, found: list[Finding]) -> Numerators:
    """The numerators of a way; of scores times one number, if these fit better."""
    x, plain = ways.products(m.spec, way)
    if m.linear:
        return Numerators(found, x, plain, fit(m.weights, x, m.some, m.close))
    some = m.some & (m.weights > 0)
    scores, logs = centred(x, some), centred(np.log(np.where(some, m.weights, 1)), some)
    scale = float((scores * logs).sum() / max(np.square(scores).sum(), 1e-300))
    both = [np.exp(np.clip(a * (x - m.top(x)), -700, 700)) for a in (1.0, scale)]
    one, other = (fit(m.weights, y, some, m.close) for y in both)
    if other.share > one.share + 0.01:
        return Numerators(found, both[1], both[1], other, scale)
    return Numerators(found, both[0], both[0], one)


def _others(m: Measured) -> Iterator[tuple[list[Finding], ways.Way]]:
    """How the rotation was measured to be done, then the other ways that are known."""
    if m.spec.rope is not None:
        yield from turning.found(m.spec, m.ask, m.call)
    for step, how, way in ways.numerators(m.spec, m.call):
        yield [Finding(f"{step}: {how}".removesuffix(": "), PREDICTED)], way


def _scale(m: Measured, best: Numerators) -> Iterator[Finding]:
    a, scale = best.scale, m.spec.scale
    if abs(a - 1) <= m.close * (10 if best.found else 1):
        return
    if abs(a) < 1e-3:
        yield Finding("scores: all alike", "every query gives the same weight to all keys that it sees")
        return
    listed = ways.scales(m.spec, m.call.q.shape[2], m.call.k.shape[2])
    named = (how for how, x in listed if abs(a / x - 1) < 20 * m.close and abs(x - 1) > 1e-9)
    number = f"{a * scale:.4g}, not {scale:.4g}"
    words = f"scores are {a:.5g} times the expected ones: a scale of {number}"
    yield Finding(f"scale: {next(named, number)}", words)


# ── What is in no list ───────────────────────────────────────────────────────────────────────────────────────────────


def _logs(m: Measured) -> tuple[Array, Array]:
    """log(W/N) of the expected numerators, less its mean in each row, and where that says something."""
    number = _made(m, ways.right_way(m.spec, m.call), []).number
    some = m.sees & m.visible & (m.weights / number > 0)
    if m.linear:
        some = some & (np.abs(number) > 0.05 * np.abs(number).max(axis=-1, keepdims=True))
    some = some & (some.sum(axis=-1, keepdims=True) > 2)
    return centred(np.log(np.where(some, m.weights / number, 1)), some), some


def _bias(m: Measured) -> Finding | None:
    """A term in the logarithm that depends on the distance, or on the key, alone."""
    (y, some), (i, j) = _logs(m), m.call.places
    for what, index in (("distance", i[:, None] - j), ("key", np.broadcast_to(j, some.shape[2:]))):
        term = _term(y, some, index - index.min())
        acts, size = centred(np.take(term, index - index.min(), axis=-1), some), float(np.ptp(term))
        if size > 30 * m.close and np.abs(acts - y).max() < min(30 * m.close, 0.05 * size):
            seen = np.unique((index - index.min())[some.any(axis=(0, 1))])
            return _bias_in_words(what, term[0][:, seen])
    return None


def _term(y: Array, some: Array, index: Array) -> Array:
    """The term of each index, by least squares, beside one number for each row: (b, h, n, m) -> (b, h, indices)."""
    (b, h), count = y.shape[:2], int(index.max()) + 1
    at = (np.arange(b * h)[:, None, None] * count + index)[some.reshape(b * h, *index.shape)]
    counts, term = np.maximum(np.bincount(at, minlength=b * h * count), 1), np.zeros(b * h * count)
    rest = y
    for _ in range(40):
        term = term + np.bincount(at, rest[some], b * h * count) / counts
        rest = centred(y - np.take(term.reshape(b, h, count), index, axis=-1), some)
    return term.reshape(b, h, count)


def _bias_in_words(what: str, term: Array) -> Finding:
    """term (h, distances or keys)."""
    steps, times = np.diff(term, axis=-1), np.exp(term[0] - term[0].min())
    slopes, straight = steps.mean(axis=-1), np.ptp(steps, axis=-1).max() < 0.05 * np.abs(steps).max()
    if what == "key" and np.abs(times - np.rint(times)).max() < 0.01:
        several = np.rint(times) > 1
        return Finding("keys: counted more than once", f"keys {runs(several)} are counted {times.max():.0f} times")
    if what == "distance" and straight and np.ptp(slopes) < 1e-2 * np.abs(slopes).max():
        factor = f"{np.exp(slopes[0]):.4g}"
        return Finding(
            f"bias: a decay of {factor} for each token", f"for each token further back, weights are times {factor}"
        )
    numbers = ", ".join(f"{x:+.4g}" for x in (-slopes[:8] if straight else term[0, :6] - term[0, 0]))
    if what == "distance" and straight:
        return Finding("bias: by distance", f"for each token nearer, {numbers} is added to the scores of heads 0, 1, …")
    return Finding(f"bias: by {what}", f"a number for each {what} is added to scores: {numbers}, … in head 0")


def _rounded(m: Measured) -> Finding | None:
    """Differences of the size of a rounding: at which step, if one predicts them; else if they have no pattern."""
    y, some = _logs(m)
    off = float(np.sqrt(np.square(y[some]).mean())) if some.any() else 1.0
    if not m.close / 30 < off < 0.2:
        return None

    def error(w: Array) -> float:
        return float(np.square(m.weights - w)[m.visible].mean())

    words = f"the weights are off by {off:.2g} of their size"
    left, how = min((error(w), how) for _, how, w in ways.rounded_weights(m.spec, m.call, m.right))
    if left < 0.02 * error(m.right.weights):
        return Finding(f"precision: {how}", f"{words}, as this rounding makes them")
    scores, shared = centred(m.right.scores, some), np.where(some, y, 0).mean(axis=-2)
    alike = abs((scores * y).sum()) / np.sqrt(np.square(scores).sum() * np.square(y).sum())
    near = [name for name, unit in UNIT.items() if 0.2 * unit < off < 6 * unit and unit > UNIT[m.spec.dtype.name]]
    few = np.median(np.abs(y[some])) < 0.3 * off  # large errors of some weights are no rounding
    pattern = few or np.sqrt(np.square(shared).mean()) > 0.6 * off or alike > 0.2 or (m.sees & ~m.visible).any()
    if pattern or not near:
        return None
    return Finding(f"precision: as if a step were rounded to {near[0]}", f"{words}, without a pattern")


def _single(m: Measured) -> Finding | None:
    """What single features, or scores, act as: all features of a vector are alike, and tokens at one position."""
    spec, given = m.spec, FEATURES if m.linear else SCORES
    if spec.head_dim < len(given) or (spec.window or len(given)) < len(given) or m.call.chunks:
        return None
    size = 1.0 if m.linear else (spec.scale * spec.head_dim) ** -0.5
    ones = np.ones(spec.head_dim)
    read, again, back = (_ratios(m, q * ones, size * keys[:, None] * ones)
                         for q, keys in ((size, given), (2 * size, given), (size, given[::-1])))  # fmt: skip
    back = back[::-1] / back[-1]  # in the other order: positions are all 0, and must not matter
    if not (np.isfinite(read).all() and (read > 0).all()) or np.abs(back / read - 1).max() > 20 * m.close:
        return None
    if spec.feature_map is None:
        return _capped(m, np.log(read) + capped(SCORES, spec.softcap)[0])
    due = FEATURE_MAPS[spec.feature_map](FEATURES) / FEATURE_MAPS[spec.feature_map](FEATURES[:1])
    if (np.abs(read - due) < 5 * m.close * (1 + due)).all() or np.abs(again / read - 1).max() > 20 * m.close:
        return None
    words = f"φ of {_listed(FEATURES)}, over φ(1), is {_listed(read)}, expected {_listed(due)}"
    return Finding("feature map: another function", words)


def _features(m: Measured) -> Finding | None:
    """Features that do not meet themselves: q and k are zeros but for one, whose score is 1."""
    d, size = m.spec.head_dim, m.spec.scale**-0.5
    if m.linear or m.call.chunks or m.spec.window == 1:
        return None
    keys = np.zeros((d, 2, d))
    keys[range(d), 1, range(d)] = size
    acts = np.array([np.log(_ratios(m, k[1], k)[1]) for k in keys])
    wrong = np.abs(acts / capped(np.ones(1), m.spec.softcap) - 1) > 20 * m.close
    if not wrong.any() or wrong.all():
        return None
    words = f"features {runs(wrong)} bring {acts[wrong].min():.3g} … {acts[wrong].max():.3g} times what they should"
    return Finding("operands: some features compared otherwise", words)


def _capped(m: Measured, acts: Array) -> Finding | None:
    """The cap that scores have, if there is one, or what they act as."""
    due = capped(SCORES, m.spec.softcap)
    if (np.abs(acts - due) < 5 * m.close * (1 + np.abs(due))).all():
        return None
    words = f"beside one of 1, scores of {_listed(SCORES)} act as {_listed(acts)}, expected {_listed(due)}"
    for cap in np.geomspace(0.2, 200, 3000):
        for how, other in (("softcap: " + ways.other_cap(cap, m.spec.softcap), capped(SCORES, cap)),
                           (f"scores: clipped at ±{cap:.3g}", np.clip(SCORES, -cap, cap))):  # fmt: skip
            if (np.abs(acts - acts[0] - other + other[0]) < 2e-3 * (1 + np.abs(other)) + 5 * m.close).all():
                return Finding(how, words)
    slopes = np.diff(np.sort(acts)) / np.diff(np.sort(SCORES))
    return None if np.ptp(slopes) < 0.01 else Finding("scores: another function of q·k", words)


def _listed(numbers: Array) -> str:
    return ", ".join(f"{x:.4g}" for x in numbers[1:])


def _ratios(m: Measured, query: Array, keys: Array) -> Array:
    """The weights that the last query (d,) gives to keys (n, d), over that of the first key, at one position."""
    (n, d), h, g, dtype = keys.shape, m.call.q.shape[1], m.call.k.shape[1], m.call.q.dtype
    q, k = (np.broadcast_to(x, (1, heads, n, d)).astype(dtype) for x, heads in ((query, h), (keys, g)))
    v, at = np.zeros((1, g, n, d), dtype), None if m.call.positions is None else np.zeros((1, n), np.int64)
    v[..., range(n), range(n)] = 1
    out = m.ask(Call("single features", q, k, v, positions=at))[0, 0, -1, :n]
    return np.asarray(out / out[0])


def _foreign(m: Measured) -> Finding | None:
    """Whether keys of row 0, or of key head 0, alone change the weights of other rows, or of other heads."""
    step = m.call.q.shape[1] // m.call.k.shape[1]
    none = read(m.ask, replace(m.call, k=np.zeros_like(m.call.k))).weights
    for name, what, own, others in (
        ("batch", "row", np.s_[:1], np.s_[1:]),
        ("heads", "head", np.s_[:, :1], np.s_[:, step:]),
    ):
        k = np.zeros_like(m.call.k)
        k[own] = m.call.k[own]
        off = np.abs(read(m.ask, replace(m.call, k=k)).weights - none)[others].max(initial=0)
        if off > 10 * m.close:
            return Finding(
                f"{name}: keys mixed", f"keys of {what} 0 alone change weights of other {what}s by up to {off:.3g}"
            )
    return None


def _unlike(m: Measured, fitted: Fit) -> Finding:
    some = m.sees & m.visible
    b, h, i, _ = np.unravel_index(int(np.abs(m.weights - m.right.weights).argmax()), some.shape)
    got, due = (" ".join(f"{x:.3g}" for x in np.asarray(w)[b, h, i, :6]) for w in (m.weights, m.right.weights))
    words = f"query {m.call.places[0][i]} of row {b}, head {h}, has the weights {got} …, expected {due} …"
    return Finding("scores: not q̃·k̃", words + m.where(~fitted.near, some))
