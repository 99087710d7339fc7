"""Other ways to do each step of attention, as data: what is compared where a measured step is not the expected one.

A weight is (is it seen?) · numerator / total. `masks` lists who may see whom, `numerators` what the numerator may be
made of, `totals` what may divide it, `weights` and `outputs` what is no such factor. Each way is one line: the step, a
key of `mistakes.ATTENTION`, words for what is done, and how to do it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import LENGTH_DEPENDENT, Rope, frequencies
from .responses import Function, narrowed, roundings
from .steps import EXACT, Call, Parts, Spec, capped, spread, weigh

Ways: TypeAlias = Iterator[tuple[str, str, Any]]
USUAL = (16, 32, 64, 128, 256, 512, 1024, 100, 1000)  # tokens of a block


def _same(x: Array) -> Array:
    return x


def blocks(m: int, measured: Iterable[int] = ()) -> tuple[int, ...]:
    """Sizes of blocks that may show among m tokens, the usual ones first."""
    some = [x for x in (4, 8, *USUAL) if x < m]
    return tuple(dict.fromkeys([*some, *(range(2, m) if m <= 130 else ()), *(x for x in measured if 0 < x < m)]))


# ── Numerators ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Turn:
    """A rotation as it is done: the pairs, the width and the factor of a rope, by angles at·theta."""

    rope: Rope
    at: Array  # (b, 1, n)
    theta: Array  # (p,)
    rounded: Function = _same  # of the angles
    table: Function = _same  # of cos and sin

    def __call__(self, x: Array) -> Array:
        """(b, h, n, d) -> the same."""
        angles = self.rounded(np.asarray(self.at, np.float64)[..., None] * self.theta)
        cos, sin = (self.table(f(angles)) * self.rope.attention_factor for f in (np.cos, np.sin))
        return definition.rotate(x, cos, sin, *definition.pairs(self.rope.layout, self.rope.width, self.rope.start))

    @classmethod
    def of(cls, rope: Rope | None, at: Any) -> Function | Turn:
        return _same if rope is None else cls(rope, at, rope.direction * frequencies(rope))


@dataclass(frozen=True)
class Way:
    """How numerators come about."""

    q: Array  # (b, h, n, d)
    k: Array  # (b, h, m, d)
    turn_q: Function | Turn
    turn_k: Function | Turn
    phi: Function = _same
    map_first: bool = True  # the feature map before the rotation
    cap: Function = _same  # of the scaled scores
    later: tuple[Turn, ...] = ()  # of the keys, as the queries of each call see them
    of: Any = None  # the call of each judged query


def right_way(spec: Spec, call: Call) -> Way:
    (q, k, _), (q_at, k_at) = spread(call), call.at()
    phi = definition.FEATURE_MAPS[spec.feature_map or "identity"]
    of = np.repeat(np.arange(len(call.chunks)), call.chunks)[call.places[0]] if call.chunks else None
    turns = Turn.of(spec.turns, q_at), Turn.of(spec.turns, k_at)
    return Way(q, k, *turns, phi, cap=lambda s: capped(s, spec.softcap), of=of)


def products(spec: Spec, way: Way) -> tuple[Array, Array]:
    """The scores, or the numerators of linear attention; and what linear attention sums in its total."""
    if spec.feature_map is None:
        scores = _compared(way, way.q, way.k) * spec.scale
        return way.cap(scores), scores
    if not way.map_first:
        numerators = way.phi(way.turn_q(way.q)) @ way.phi(way.turn_k(way.k)).swapaxes(-1, -2)
        return numerators, numerators
    fq, fk = way.phi(way.q), way.phi(way.k)
    return _compared(way, fq, fk), fq @ fk.swapaxes(-1, -2)


def _compared(way: Way, q: Array, k: Array) -> Array:
    """q̃·k̃ᵀ."""
    q = way.turn_q(q)
    if not way.later:
        return q @ way.turn_k(k).swapaxes(-1, -2)
    each = [q @ turn(k).swapaxes(-1, -2) for turn in way.later]
    return np.select([np.equal(way.of, i)[:, None] for i in range(len(each))], each)


def numerators(spec: Spec, call: Call) -> Ways:
    """Known mistakes in what is compared, and how it is mapped and capped."""
    way = right_way(spec, call)
    yield from _heads(way, call)
    if way.q.shape == way.k.shape:
        yield "operands", "queries and keys exchanged", replace(way, q=way.k, k=way.q)
        yield "operands", "keys compared with keys", replace(way, q=way.k)
        yield "operands", "queries compared with queries", replace(way, k=way.q)
    yield "operands", "values compared instead of keys", replace(way, k=spread(call)[2])
    yield from _maps(spec, way) if spec.feature_map is not None else _caps(spec, way)
    for words, norm in (("divided by their lengths", _unit), ("with their mean taken off", _centred)):
        yield "operands", f"q and k {words}", replace(way, q=norm(way.q), k=norm(way.k))
        yield "operands", f"q {words}", replace(way, q=norm(way.q))
        yield "operands", f"k {words}", replace(way, k=norm(way.k))
    if isinstance(way.turn_k, Turn) and isinstance(way.turn_q, Turn):
        yield from _turns(way, way.turn_q, way.turn_k, call)
        yield from _rounded_turns(way, way.turn_q, way.turn_k)


def _unit(x: Array) -> Array:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _centred(x: Array) -> Array:
    return x - x.mean(axis=-1, keepdims=True)


def _heads(way: Way, call: Call) -> Ways:
    """Keys of other heads, or of other rows."""
    h, g = call.q.shape[1], call.k.shape[1]
    for words, index in head_maps(h, g):
        yield "heads", f"keys {words}", replace(way, k=way.k[:, index])
    for words, rows in row_maps(len(way.k)):
        yield "batch", f"keys {words}", replace(way, k=way.k[rows])
        yield "batch", f"keys {words}", replace(way, k=way.k[rows], turn_k=_of_rows(way.turn_k, rows))


def head_maps(h: int, g: int) -> Iterator[tuple[str, Array]]:
    """Which of the h spread key heads a query head may read instead of its own."""
    own, heads = np.arange(h), [np.arange(h) % g * (h // g), np.zeros(h, int), np.arange(h)[::-1], np.roll(range(h), 1)]
    for words, index in zip(("tiled", "head 0 for all", "reversed", "shifted by one"), heads, strict=True):
        if ((own * g // h) != (index * g // h)).any():
            yield words, index


def row_maps(b: int) -> Iterator[tuple[str, Array]]:
    """Which row of a batch may be read instead of the own one."""
    if b > 1:
        yield "row 0 for all", np.zeros(b, int)
        yield "rows reversed", np.arange(b)[::-1]
        yield "rows shifted by one", np.roll(np.arange(b), 1)


def _of_rows(turn: Function | Turn, rows: Array) -> Function | Turn:
    return replace(turn, at=turn.at[rows]) if isinstance(turn, Turn) else turn


def _turns(way: Way, q: Turn, k: Turn, call: Call) -> Ways:
    """What is no matter of the positions of both: another pairing of one side, another length, keys in a cache."""
    other = replace(q.rope, layout="interleaved" if q.rope.layout.startswith("half") else "half")
    yield "wrong pairing", "of the keys alone", replace(way, turn_k=replace(k, rope=other))
    yield "wrong pairing", "of the queries alone", replace(way, turn_q=replace(q, rope=other))
    if isinstance(q.rope.scaling, LENGTH_DEPENDENT):
        for rope in map(q.rope.at, (int(np.max(k.at)) + 1, k.at.shape[-1])):
            other_way = replace(way, turn_q=Turn.of(rope, q.at), turn_k=Turn.of(rope, k.at))
            yield "length taken from each call", "", other_way
    if call.chunks:
        of = np.repeat(np.arange(len(call.chunks)), call.chunks)
        since = [np.maximum(i - of, 0) for i in range(len(call.chunks))]  # calls since that of a key
        again, raw = (
            [replace(k, at=k.at * x) for x in times] for times in ([1 + x for x in since], [x == 0 for x in since])
        )
        yield "cache", "keys rotated again in each call", replace(way, later=tuple(again))
        yield "cache", "keys of earlier calls not rotated", replace(way, later=tuple(raw))


def _rounded_turns(way: Way, q: Turn, k: Turn) -> Ways:
    """Angles and tables with few digits."""
    for bits, name in ((8, "bfloat16"), (11, "float16")):
        few = partial(narrowed, bits=bits)
        angles = replace(way, turn_q=replace(q, rounded=few), turn_k=replace(k, rounded=few))
        yield "precision", f"angles in {name}", angles
        tables = replace(way, turn_q=replace(q, table=few), turn_k=replace(k, table=few))
        yield "precision", f"cos and sin in {name}", tables


MAPS: dict[str, Function] = {
    **definition.FEATURE_MAPS,
    "elu, without the 1": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "softplus": lambda x: np.logaddexp(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "x²": np.square,
    "|x|": np.abs,
    "leaky relu, 0.01": lambda x: np.where(x > 0, x, 0.01 * x),
    "1 + x": lambda x: 1 + x,
    "cos": np.cos,
    "relu + 1e-6": lambda x: np.maximum(x, 0) + 1e-6,
    "relu + 1": lambda x: np.maximum(x, 0) + 1,
    "softmax over the features": lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
    "exp of x − max x": lambda x: np.exp(x - x.max(axis=-1, keepdims=True)),
}


def _maps(spec: Spec, way: Way) -> Ways:
    root = way.q.shape[-1] ** -0.5
    yield "feature map", "after the rotation", replace(way, map_first=False)
    for name, phi in MAPS.items():
        if name != spec.feature_map:
            yield "feature map", name, replace(way, phi=phi)
    for words, by in (("1/√d", root), ("d^−¼", root**0.5), ("√d", 1 / root)):
        yield "feature map", f"of q times {words}", replace(way, q=way.q * by)
        yield "feature map", f"of k times {words}", replace(way, k=way.k * by)
        yield "feature map", f"of q and k times {words}", replace(way, q=way.q * by, k=way.k * by)
    yield "feature map", "on q alone", replace(way, q=way.phi(way.q), phi=_same)
    yield "feature map", "on k alone", replace(way, k=way.phi(way.k), phi=_same)
    yield "feature map", "twice", replace(way, phi=lambda x: way.phi(way.phi(x)))


CAPS = (30, 50, 20, 15, 10, 5, 100)  # usual ones; others are measured


def _caps(spec: Spec, way: Way) -> Ways:
    s, c = spec.scale, spec.softcap
    if c is not None:
        yield "softcap", "missing", replace(way, cap=_same)
        yield "softcap", "by clipping", replace(way, cap=lambda x: np.clip(x, -c, c))
        yield "softcap", "without the division", replace(way, cap=lambda x: c * np.tanh(x))
        yield "softcap", "before the scale", replace(way, cap=lambda x: s * c * np.tanh(x / s / c))
        yield "softcap", "twice", replace(way, cap=lambda x: capped(capped(x, c), c))
        yield "scale", "missing inside the softcap", replace(way, cap=lambda x: c * np.tanh(x / s / c))
    for other in CAPS:
        if other != c:
            yield "softcap", other_cap(other, c), replace(way, cap=partial(capped, softcap=other))


def other_cap(cap: float, due: float | None) -> str:
    return f"{cap:.4g}, not asked for" if due is None else f"{cap:.4g}, not {due:g}"


def scales(spec: Spec, n: int, m: int) -> Iterator[tuple[str, float]]:
    """Scales in words, over the right one."""
    s, d, factor = spec.scale, spec.head_dim, 1.0 if spec.rope is None else spec.rope.attention_factor
    yield from (("missing", 1 / s), ("applied twice", s), ("inverted", 1 / s**2))
    yield from (("1/√d, not the model's", d**-0.5 / s), ("1/d, not its root", 1 / (d * s)))
    yield from (("exp2 without log₂ e", math.log(2)), ("log₂ e without exp2", 1 / math.log(2)))
    yield from (("attention factor missing", factor**-2), ("attention factor on one side alone", 1 / factor))
    yield from (("attention factor twice", factor**2), ("attention factor once too often", factor))
    widths = {"the rotated part": spec.rope.width if spec.rope else d, "half a head": d // 2, "two heads": 2 * d}
    widths |= {"all heads": spec.heads * d, "all key heads": spec.key_heads * d}
    yield from ((f"1/√ of the width of {what}", width**-0.5 / s) for what, width in widths.items())
    yield from (
        (f"1/√ of the number of {what}, not of features", x**-0.5 / s) for what, x in (("keys", m), ("queries", n))
    )
    if spec.softcap is not None:
        yield "softcap without its factor", 1 / spec.softcap


# ── Masks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def masks(spec: Spec, call: Call, measured: Iterable[int] = ()) -> Ways:
    """Who else may see whom, but for bands along the diagonal: (n, m) or (b, 1, n, m) each; by blocks of the usual
    sizes, and of those ``measured``."""
    rows, j = call.places
    i, m, w = rows[:, None], call.k.shape[2], spec.window
    causal, near = (j <= i) | (not spec.causal), abs(i - j) < (m if w is None else w)
    yield from _options(call, causal, near)
    if call.positions is not None and spec.causal and (np.diff(call.positions) != 1).any():
        at = call.positions[:, None, :, None], call.positions[:, None, None]
        at_rows = at[0][:, :, np.clip(rows, 0, m - 1)]
        yield "causality", "by position", (at_rows >= at[1]) & near
        yield "causality", "by the positions of row 0", (at_rows[:1] >= at[1][:1]) & near
    yield from _calls(call, i, j, causal & near, near) if call.chunks else ()
    if w is not None:
        yield "window", f"in blocks of {w}", causal & (i // w == j // w)
        yield from (("window", f"and the first {x} keys", causal & (near | (j < x))) for x in range(1, 9))
        yield "window", "to the past alone", (j <= i) & near
        yield "window", "of the future ignored", near | (j >= i)
    if spec.causal:
        yield "causality", "inverted: sees the future", (j >= i) & near
        yield "causality", "inverted: sees the future, not itself", (j > i) & near
        for x in (2, 3, 4, 8, 1, 5, 6, 7, 16, 32):
            yield "causality", f"the first {x} keys seen by all queries", ((j <= i) | (j < x)) & near
        yield from _ranks(i, j, near)
        yield "causality", "does not see itself, but in the first row", near & ((j < i) | ((j == i) & (i == 0)))
    for x in () if call.chunks else blocks(m, measured):
        yield from _blocks(x, i, j, causal & near, near, spec.causal)


def _calls(call: Call, i: Array, j: Array, right: Array, near: Array) -> Ways:
    """What may be lost between calls with a cache."""
    of, first = (np.repeat(x, call.chunks) for x in (range(len(call.chunks)), np.cumsum((0, *call.chunks[:-1]))))
    yield "cache", "forgotten", right & (of[i] == of)
    ends = np.isin(j, np.cumsum(call.chunks) - 1)
    yield "cache", "the last token of each earlier call lost", right & ((of[i] == of) | ~ends)
    for x in range(1, len(j)):
        yield "cache", f"the last {x} tokens of earlier calls alone are kept", right & (j >= first[i] - x)
    yield "causality", "missing within a call", (of <= of[i]) & near
    yield "causality", "from the top left in each call", (j <= i - first[i]) & near


def parts(m: int) -> Iterator[tuple[str, Array]]:
    """The place of each of m tokens in its part, (m,), where a row is split among ranks."""
    j = np.arange(m)
    for ranks in (2, 4, 3, 8):
        cuts, chunks = [m * i // ranks for i in range(ranks + 1)], np.array_split(j, 2 * ranks)
        yield f"in each of {ranks} parts", j % -(-m // ranks)
        yield f"in each of {ranks} parts", j - np.repeat(cuts[:-1], np.diff(cuts))
        yield f"by {ranks} ranks in stripes", j // ranks
        within, firsts = np.zeros(m, int), np.zeros(m, int)
        for one, other in zip(chunks[:ranks], chunks[::-1], strict=False):
            both = np.concatenate((one, other))
            within[both], firsts[both] = np.arange(len(both)), np.concatenate((one, np.resize(one, len(other))))
        yield f"by {ranks} ranks in a zigzag", within
        yield f"by {ranks} ranks in a zigzag, those of the first chunk for both", firsts


def _ranks(i: Array, j: Array, near: Array) -> Ways:
    for words, place in parts(len(j)):
        at = place[np.clip(i, 0, len(j) - 1)]
        yield "causality", f"counted {words}", (place <= at) & near


def _options(call: Call, causal: Array, near: Array) -> Ways:
    """mask= and segments= as they may be misread."""
    right, (rows, _), n = causal & near, call.places, call.q.shape[2]
    mask, segments = call.options.get("mask"), call.options.get("segments")
    if mask is not None:
        mask = mask[..., np.arange(n)[call.judged], :]
        yield "mask=", "ignored", right
        yield "mask=", "inverted", right & ~mask
        yield "mask=", "of row 0 for all", right & mask[:1]
        yield "mask=", "instead of causality", mask & near
        yield "mask=", "of the keys of query 0 for all", right & mask[..., :1, :]
        yield "mask=", "or causality, where both must hold", (causal | mask) & near
        if mask.shape[-1] == mask.shape[-2]:
            yield "mask=", "transposed", right & mask.swapaxes(-1, -2)
    if segments is not None:
        own, before = (segments[:, None, x, None] for x in (rows, np.maximum(rows - 1, 0)))
        of = segments[:, None, None]
        yield "segments=", "ignored", right
        yield "segments=", "instead of causality", (own == of) & near
        yield "segments=", "of row 0 for all", right & (own[:1] == of[:1])
        yield "segments=", "the first token sees the segment before", right & ((own == of) | (before == of))
        yield "segments=", "earlier segments are seen", right & (own >= of)


def _blocks(x: int, i: Array, j: Array, right: Array, near: Array, causal: bool) -> Ways:
    """Blocks of x tokens that are left out, or seen as a whole."""
    m, same = len(j), i // x == j // x
    if causal:
        yield "causality", f"by blocks of {x}", (j // x <= i // x) & near
    if m % x:
        yield "blocks", f"keys after the last full block of {x} left out", right & (j < m // x * x)
        yield "blocks", f"queries after the last full block of {x} left out", right & (i < m // x * x)
    yield "blocks", f"the last block of {x} keys left out", right & ((j < (m - 1) // x * x) | (m <= x))
    yield "blocks", f"the last {x} keys left out", right & (j < m - x)
    yield "blocks", f"state lost between blocks of {x}", right & same
    yield "blocks", f"state of the last block of {x} alone", right & (i // x - j // x <= 1)
    yield "blocks", f"own block of {x} left out after the first", right & (~same | (i < x))
    yield "blocks", f"own block of {x} left out", right & ~same
    yield "blocks", f"last token of a block of {x} not in the state", right & (same | (j % x != x - 1))
    yield "blocks", f"last token of a block of {x} not seen", right & (j % x != x - 1)
    yield "blocks", f"first token of a block of {x} not seen", right & (j % x != 0)
    yield "keys", f"the last {x} alone are read", right & (j >= m - x)
    yield "keys", f"the first {x} alone are read", right & (j < x)
    yield "keys", f"key {x - 1} is not seen", right & (j != x - 1)


# ── Totals, weights, outputs ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Sums:
    """What totals are made of, (b, h, n, m): which keys are seen, numerators, what is summed; all relative to e^top."""

    sees: Array
    visible: Array
    numerator: Array
    plain: Array
    top: Array  # (b, h, n, 1)


def totals(call: Call, s: Sums) -> Ways:
    """What else numerators may be divided by, (b, h, n, 1)."""
    (i, j), own, unit = (call.places[0][:, None], call.places[1]), np.where(s.sees, s.plain, 0), np.exp(-s.top)
    total, rotated = summed(own), summed(np.where(s.sees, s.numerator, 0))
    yield "normaliser", "missing", unit + 0 * total
    yield "normaliser", "missing", 1 + 0 * total
    yield "normaliser", "the number of keys", summed(s.sees) * unit + 0 * total
    yield "normaliser", "of all keys, also hidden ones", summed(s.plain)
    yield "normaliser", "of the keys that should be seen", summed(np.where(s.visible, s.plain, 0))
    yield "normaliser", "1 added (softmax1, a sink)", total + unit
    yield "normaliser", "summed over the heads", np.broadcast_to(total.sum(axis=1, keepdims=True), total.shape)
    yield "normaliser", "of the last query for all", np.broadcast_to(total[:, :, -1:], total.shape)
    yield "normaliser", "summed over heads, not tokens", np.cumsum(summed(np.where(i == j, s.plain, 0)), axis=1)
    yield "normaliser", "rotated", rotated
    yield "normaliser", "the absolute value of the rotated one", np.abs(rotated)
    yield "normaliser", "of absolute values", summed(np.abs(np.where(s.sees, s.numerator, 0)))
    yield "normaliser", "of its own key alone", summed(np.where(i == j, own, 0))
    yield "normaliser", "without the own key", summed(np.where((i == j) & (i > 0), 0, own))
    yield "normaliser", "its square root", np.sqrt(total)
    yield "normaliser", "its square", total**2
    yield "normaliser", "at least 1", np.maximum(total, unit)
    for x in blocks(len(j)):
        yield "normaliser", f"of earlier blocks of {x} lost", summed(np.where(i // x == j // x, own, 0))
    for bits, name in ((8, "bfloat16"), (11, "float16")):
        yield "precision", f"sum in {name}", _running(own, bits)
    if call.chunks:
        here = np.repeat(range(len(call.chunks)), call.chunks)
        here = here[i] == here
        yield "cache", "normaliser of earlier calls lost", summed(np.where(here, own, 0))
        turned = np.where(s.sees, s.numerator, 0)
        yield "cache", "normaliser of earlier calls rotated", summed(np.where(here, own, turned))


def summed(x: Array) -> Array:
    """Over the keys."""
    return x.sum(axis=-1, keepdims=True)


def _running(x: Array, bits: int) -> Array:
    """A sum over the keys, one by one, rounded each time."""
    total = np.zeros_like(x[..., :1])
    for j in range(x.shape[-1]):
        total = narrowed(total + narrowed(x[..., j : j + 1], bits), bits)
    return total


def weights(spec: Spec, call: Call, parts: Parts) -> Ways:
    """Other functions of the right scores than their softmax, and values of other keys."""
    for by, words in ((1, "of the token before"), (-1, "of the token after")):
        rolled = np.roll(parts.weights, -by, axis=-1)
        yield "values", words, rolled
        edge = np.arange(rolled.shape[-1]) == (rolled.shape[-1] - 1 if by > 0 else 0)
        yield "values", words, np.where(edge, 0, rolled)
    if spec.feature_map is not None:
        return
    masked = np.where(parts.seen, parts.scores, -np.inf)
    for words, axis in (("over the queries", -2), ("over the heads", 1), ("over the rows", 0)):
        yield "softmax", words, np.moveaxis(definition.softmax(np.moveaxis(masked, axis, -1)), -1, axis)
    yield "softmax", "sigmoid instead", 1 / (1 + np.exp(-masked))
    yield "softmax", "applied twice", definition.softmax(np.where(parts.seen, parts.weights, -np.inf))
    yield "softmax", "left out: the scores themselves", np.where(parts.seen, parts.scores, 0)
    for words, powers in (("relu", np.maximum(masked, 0)), ("s²", np.where(parts.seen, parts.scores**2, 0))):
        total = summed(powers)
        yield "softmax", f"{words} instead of exp", powers / np.where(total == 0, 1, total)
    for block in (1, *blocks(masked.shape[-1])):
        for kept in ("output", "sum", "output and sum"):
            yield "online softmax", f"{kept} not rescaled after blocks of {block} keys", _blockwise(masked, kept, block)


def _blockwise(scores: Array, kept: str, block: int) -> Array:
    """The weights of an online softmax that forgets to rescale what it summed when it meets a greater score."""
    m = scores.shape[-1]
    greatest = np.maximum.accumulate(scores, axis=-1)[..., np.minimum(np.arange(m) // block * block + block, m) - 1]
    greatest = np.where(greatest == -np.inf, 0, greatest)
    powers, right = np.exp(scores - greatest), np.exp(scores - greatest[..., -1:])
    total = (powers if "sum" in kept else right).sum(axis=-1, keepdims=True)
    return (powers if "output" in kept else right) / np.where(total == 0, 1, total)


def rounded_weights(spec: Spec, call: Call, parts: Parts) -> Ways:
    """The right weights with few digits at one step."""
    for words, few in roundings():
        q, k = (few(x.astype(np.float64)) for x in (call.q, call.k))
        yield "precision", f"q and k {words}", weigh(spec, replace(call, q=q, k=k)).weights
        yield "precision", f"q {words}", weigh(spec, replace(call, q=q)).weights
        yield "precision", f"k {words}", weigh(spec, replace(call, k=k)).weights
        if spec.feature_map is None:
            masked = np.where(parts.seen, few(parts.scores), -np.inf)
            yield "precision", f"scores {words}", definition.softmax(masked)
        yield "precision", f"weights {words}", few(parts.weights)


def outputs(spec: Spec, call: Call) -> Ways:
    """Results of other arguments, and right results in other places."""
    out, (b, h, n, d) = weigh(spec, call).out, call.q.shape
    yield "values", "keys and values exchanged", weigh(spec, replace(call, k=call.v, v=call.k)).out
    yield "values", "keys used as values", weigh(spec, replace(call, v=call.k)).out
    if call.q.shape == call.v.shape:
        yield "values", "queries used as values", weigh(spec, replace(call, v=call.q)).out
    if spec.rope is not None:
        turned = EXACT.turned(call.k.astype(np.float64), call.at()[1], spec.rope)
        yield "values", "rotated keys used as values", weigh(spec, replace(call, v=turned)).out
    yield "output", "zeros", np.zeros_like(out)
    yield "output", "less its mean over the features", out - out.mean(axis=-1, keepdims=True)
    yield "output", "divided by its length", _unit(out)
    yield "batch", "the result of row 0 for all", np.broadcast_to(out[:1], out.shape)
    if out.shape == call.q.shape:
        yield "output", "heads and tokens exchanged", out.swapaxes(1, 2).reshape(out.shape)
        yield "output", "heads merged by a reshape", out.reshape(b, n, h, d).swapaxes(1, 2)
        yield "output", "heads in reversed order", out[:, ::-1]
        yield "output", "tokens in reversed order", out[:, :, ::-1]
        yield "output", "shifted by one token", np.roll(out, 1, axis=2)


VALUES: dict[str, tuple[Function, Function]] = {  # features of a value in other places, and what undoes it
    "features in reversed order": (lambda x: x[..., ::-1], lambda x: x[..., ::-1]),
    "features shifted by one": (lambda x: np.roll(x, 1, axis=-1), lambda x: np.roll(x, -1, axis=-1)),
    "negated": (np.negative, np.negative),
}
