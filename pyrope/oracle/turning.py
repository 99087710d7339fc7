"""How queries and keys are turned and compared inside attention, as a value (`Way`), and as it is measured.

The rotation between each query and each key is read pair by pair. With q = e_a or e_b and k = e_a + e_b, the features
a and b of one pair, the numerators are cos Δ ± sin Δ, where Δ = A_i − B_j is the angle of the query less that of the
key: so A and B are known, up to one angle for both, and with them the frequencies of each side, and the position that
each token acts at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import Rope, frequencies
from .attention_calls import unit_values
from .candidate import UNIT, Unreadable
from .frequencies import Measured, meant, name_frequencies
from .measured import Ask, parts
from .operator import ladder, unwrap
from .positions import ANOTHER, AROUND, ELSEWHERE, OTHERS, ROW, SHIFTS, acts_at, relations, wrapped
from .report import Finding
from .responses import Function
from .steps import Call, Spec, capped, same, seen, spread

ALONE = {  # faults of one side that have a name of their own
    "not rotated": "rotation: {} not rotated", "direction": "rotation: {} alone turned backwards",
    "rotated twice": "rotation: {} twice",
}  # fmt: skip
TOP = 500  # the largest position by which frequencies are measured
ROWS = 96  # of a batch in which pairs are read
LONG = 400  # tokens of a call in which pairs are not read


# ── How numerators come about ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Turn:
    """A rotation as it is done: the pairs, the width and the factor of a rope, by angles at·theta."""

    rope: Rope
    at: Array  # (b, 1, n)
    theta: Array  # (p,)
    rounded: Function = same  # of the angles
    table: Function = same  # of cos and sin

    def __call__(self, x: Array) -> Array:
        """(b, h, n, d) -> the same."""
        angles = self.rounded(np.asarray(self.at, np.float64)[..., None] * self.theta)
        cos, sin = (self.table(f(angles)) * self.rope.attention_factor for f in (np.cos, np.sin))
        return definition.rotate(x, cos, sin, *definition.pairs(self.rope.layout, self.rope.width, self.rope.start))

    @classmethod
    def of(cls, rope: Rope | None, at: Any) -> Function | Turn:
        return same if rope is None else cls(rope, at, rope.direction * frequencies(rope))


@dataclass(frozen=True)
class Way:
    """How numerators come about."""

    q: Array  # (b, h, n, d)
    k: Array  # (b, h, m, d)
    turn_q: Function | Turn
    turn_k: Function | Turn
    phi: Function = same
    map_first: bool = True  # the feature map before the rotation
    cap: Function = same  # of the scaled scores
    later: tuple[Turn, ...] = ()  # of the keys, as the queries of each call see them
    of: Any = None  # the call of each judged query


def right_way(spec: Spec, call: Call) -> Way:
    (q, k, _), (q_at, k_at) = spread(call), call.at()
    phi = definition.FEATURE_MAPS[spec.feature_map or "identity"]
    of = call.of[call.places[0]] if call.chunks else None
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


# ── Reading pairs ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Relative:
    """The rotations of the pairs of a rope in one call."""

    spec: Spec
    ask: Ask
    call: Call
    rope: Rope

    @cached_property
    def z(self) -> Array:
        """e^{iΔ} times a factor, (b, n, m, p); NaN where it is not known. One pair is in each key head at a time, and
        all of them, read in two ways each, are the rows of a few batches: calls may be slow."""
        g, count, step = self.call.k.shape[1], self.rope.pairs, self.call.q.shape[1] // self.call.k.shape[1]
        groups = [np.arange(i, min(i + g, count)) for i in range(0, count, g)]
        probes = [self._probe(group, which) for group in groups for which in (0, 1)]
        parts = [self._read(probes[i : i + self.many])[:, :, ::step] for i in range(0, len(probes), self.many)]
        one, other = np.concatenate(parts).reshape(len(groups), 2, *parts[0].shape[1:]).swapaxes(0, 1)
        z = ((one + other) / 2 + 1j * (one - other) / 2).swapaxes(1, 2)  # (groups, g, b, n, m)
        return np.moveaxis(z.reshape(-1, *z.shape[2:])[:count], 0, -1)

    @cached_property
    def many(self) -> int:
        """How often the call may be made at once: one time alone, if its answer is another one in a larger batch."""
        times, once = max(1, ROWS // len(self.call.q)), self.ask(self.call)
        try:
            often = self.ask(self._tiled(self.call.q, self.call.k, times))
        except Unreadable:
            return 1
        return times if np.allclose(np.concatenate([once] * times), often, rtol=1e-3, atol=1e-3, equal_nan=True) else 1

    def _tiled(self, q: Array, k: Array, times: int) -> Call:
        """The call so often, in one batch, with these queries and keys, or as often as they come."""
        v, at = (np.concatenate([x] * times) for x in (self.call.v, np.asarray(self.call.positions)))
        q, k = (x if len(x) == len(v) else np.concatenate([x] * times) for x in (q, k))
        return replace(self.call, q=q, k=k, v=v, positions=at)

    def _probe(self, pairs: Array, which: int) -> tuple[Array, Array]:
        """q and k whose products are cos Δ + sin Δ, or cos Δ − sin Δ, of these pairs."""
        slices = definition.pairs(self.rope.layout, self.rope.width, self.rope.start)[0]
        reads, step = [np.arange(self.rope.head_dim)[s] for s in slices], self.call.q.shape[1] // self.call.k.shape[1]
        off, on = (0.0, self.spec.scale**-0.5) if self.spec.feature_map is None else (-40.0, 1.0)
        q, k = np.full(self.call.q.shape, off), np.full(self.call.k.shape, off)
        for head, pair in enumerate(pairs):
            q[:, head * step, :, reads[which][pair]] = on
            for feature in reads:
                k[:, head, :, feature[pair]] = on
        return q, k

    def _read(self, probes: list[tuple[Array, Array]]) -> Array:
        """The numerators of linear attention, or the scores: every other key is zeros in each of two rows for one, and
        its score is 0."""
        q, k = (np.stack(x) for x in zip(*probes, strict=True))
        visible, cap = np.broadcast_to(seen(self.spec, self.call), (*q.shape[1:4], k.shape[3])), self.spec.softcap
        if self.spec.feature_map is not None:
            return np.where(visible, self._weights(q, k), np.nan)
        odd = np.arange(k.shape[3]) % 2 == 1
        both = self._weights(np.stack((q, q)), np.stack([np.where(x[:, None], k, 0) for x in (odd, ~odd)]))
        logs = np.where(visible, np.log(np.maximum(both, 1e-300)), np.nan)
        some = np.stack((~odd, odd)).reshape(2, *[1] * (logs.ndim - 2), -1)  # the keys that are zeros
        zero = np.nanmean(np.where(some, logs, np.nan), axis=-1, keepdims=True)
        scores = np.where(odd, *(logs - zero))
        return scores if cap is None else cap * np.arctanh(np.clip(scores / cap, -0.999, 0.999))

    def _weights(self, q: Array, k: Array) -> Array:
        """(…, b, h, n, d) and (…, b, g, m, d) -> (…, b, h, n, m)."""
        lead, dtype, b, read = q.shape[:-4], self.call.q.dtype, len(self.call.q), list[Array]()
        q, k = (x.reshape(-1, *x.shape[-3:]).astype(dtype) for x in (q, k))
        for i in range(0, len(q), b * self.many):
            some = np.s_[i : i + b * self.many]
            *calls, _ = unit_values(self._tiled(q[some], k[some], len(q[some]) // b))
            read.append(np.concatenate([self.ask(call) for call in calls], axis=-1))
        weights = np.concatenate(read)[..., : k.shape[-2]]
        return weights.reshape(*lead, b, *weights.shape[1:])

    @cached_property
    def uneven(self) -> float:
        """How far the lengths of z are from one another: 0 if these features are the pairs. Numerators of Eq. (19) are
        divided by a total of their own for each query, whatever it is."""
        size = np.abs(self.z)
        usual = np.nanmedian(size, axis=(2, 3) if self.spec.feature_map else None, keepdims=True)
        off = np.abs(size / usual - 1)
        return float(np.nanquantile(off, 0.95)) if np.isfinite(off).any() else np.inf

    @cached_property
    def turned(self) -> tuple[Array, Array]:
        """e^{iA} and e^{iB}, (b, n, p) and (b, m, p), relative to that of the first key; NaN where it is not known."""
        z = self.z / np.abs(self.z)
        q = z[:, :, 0].copy()
        k = np.conj(z[:, -1]) * q[:, -1:]
        for j in range(1, z.shape[1]) if self.spec.window is not None else ():  # by the key before, step by step
            q[:, j] = z[:, j, j - 1] * k[:, j - 1]
            k[:, j] = np.conj(z[:, j, j]) * q[:, j]
        return q, k


# ── Frequencies and pairs ────────────────────────────────────────────────────────────────────────────────────────────


def found(spec: Spec, ask: Ask, call: Call, due: Call) -> Iterator[tuple[list[Finding], Way]]:
    """How queries and keys are turned instead, and what that is called: by other positions, or else by other angles."""
    assert spec.turns is not None
    judged, call = call.judged, replace(call, options={}, judged=slice(None))
    right, loose = right_way(spec, due), 0.02 + 8 * UNIT[spec.dtype.name]
    for words, rope in _ropes(spec.turns) if call.k.shape[2] <= LONG else ():
        here = Relative(spec, ask, call, rope)
        if here.uneven > loose:
            continue
        fact = f"the pairs that turn are those of layout {rope.layout!r}, {rope.width} features wide"
        paired, theta = [Finding(words, fact)] if words else [], [rope.direction * frequencies(rope)] * 2
        named = None
        if (at := _acts(here, theta)) is not None:
            named, at = _moved(call, at)
            yield [*paired, *named], _way(right, rope, theta, (at[0][:, judged], at[1]))
        if not named:
            yield from _by_frequencies(here, paired, right, judged)


def _by_frequencies(
    here: Relative, paired: list[Finding], right: Way, judged: Any
) -> Iterator[tuple[list[Finding], Way]]:
    """Other frequencies, measured at positions that grow fast, or, if a candidate only counts, at those of a count."""
    for rungs in (ladder(TOP), np.arange(48)):
        at = np.concatenate(([0], rungs))[None]  # the first token is not read
        shapes = (here.spec.heads, here.spec.key_heads, here.spec.key_heads)
        q, k, v = (np.zeros((1, h, at.size, here.spec.head_dim), here.call.q.dtype) for h in shapes)
        call = Call("frequencies", q, k, v, positions=at)
        sides = [_frequencies(x, call) for x in Relative(here.spec, here.ask, call, here.rope).turned]
        theta = [side.theta for side in sides]
        if (acts := _acts(here, theta)) is not None:
            named, acts = _moved(here.call, acts)
            faults = _sides(*(_fault(side, here.rope) for side in sides))
            yield [*paired, *faults, *named], _way(right, here.rope, theta, (acts[0][:, judged], acts[1]))
            return


def _ropes(rope: Rope) -> Iterator[tuple[str, Rope]]:
    """The expected pairs first, then others: what they are called, and a rope with them."""
    yield "", rope
    other = "interleaved" if rope.layout.startswith("half") else "half"
    yield "wrong pairing", replace(rope, layout=other)
    widths = {"whole head rotated": rope.head_dim, "wrong rotary width: half of it": rope.width // 4 * 2}
    for words, width in widths.items() if rope.scaling is None else ():
        if width not in (0, rope.width):
            yield from ((words, replace(rope, rotary_dim=width, layout=layout)) for layout in (rope.layout, other))


def _frequencies(turned: Array, call: Call) -> Measured:
    """θ of one side, with its sign, from angles at the positions of the ladder: unwrapped, then by least squares."""
    assert call.positions is not None
    angle, at = np.angle(np.nan_to_num(turned[0, 1:], nan=1.0)), call.positions[0, 1:]
    theta, _, _ = unwrap(angle, at, 4 * UNIT[call.q.dtype.name], subnormal=False)
    rest, squares = wrapped(angle - angle[0] - np.outer(at, theta)), float(np.square(at).sum())
    slope = (at[:, None] * rest).sum(axis=0) / squares
    off = np.sqrt(np.square(rest - np.outer(at, slope)).mean(axis=0))
    return Measured(theta + slope, (4 * off + 1e-7) / squares**0.5)


def _fault(side: Measured, rope: Rope) -> Finding | None:
    """What is wrong with the frequencies of one side."""
    due = meant(rope, rope.width)
    ahead, back = (name_frequencies(Measured(sign * rope.direction * side.theta, side.unsure), due) for sign in (1, -1))
    if ahead is None:
        return None
    return Finding("direction", "all pairs turn the other way") if back is None else Finding(ahead.fault, ahead.fact)


def _sides(queries: Finding | None, keys: Finding | None) -> Iterator[Finding]:
    """What is wrong with both sides, once if it is the same, or with one."""
    if queries and keys and queries.fault == keys.fault:
        yield queries
        return
    for side, fault in (("queries", queries), ("keys", keys)):
        if fault is not None:
            name = ALONE.get(fault.fault, f"{fault.fault}: of the {{}} alone").format(side)
            yield Finding(name, f"of the {side} alone: {fault.fact}")


# ── Positions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _acts(here: Relative, theta: list[Array]) -> list[Array] | None:
    """The positions that queries and keys act at, (b, n) each, up to one number for each row, NaN where they are not
    known; None if the angles of one side are those of no position."""
    at, close = np.asarray(here.call.positions, np.float64), 0.1 if UNIT[here.spec.dtype.name] > 1e-4 else 5e-3
    both = list[Array]()
    for turned, side in zip(here.turned, theta, strict=True):
        known = np.isfinite(turned).all(axis=-1)
        turned = turned * np.exp(1j * at[:, :1, None] * theta[1])  # the first key is where it should be
        acts, off = acts_at(np.nan_to_num(turned, nan=1.0).reshape(-1, len(side)), side, 2 * np.abs(at).max() + 10)
        good = known & ((off < close).reshape(known.shape) | (not side.any()))
        if good.sum() < 0.9 * known.sum():
            return None
        acts = np.where(np.abs(acts - np.rint(acts)) < 0.05, np.rint(acts), acts)
        both.append(np.where(good, np.reshape(acts, known.shape), np.nan))
    return both


def _way(right: Way, rope: Rope, theta: Sequence[Array], at: Sequence[Array]) -> Way:
    turns = [Turn(rope, np.nan_to_num(x)[:, None], one) for one, x in zip(theta, at, strict=True)]
    return replace(right, turn_q=turns[0], turn_k=turns[1])


def _moved(call: Call, at: list[Array]) -> tuple[list[Finding], list[Array]]:
    """By which relation the positions that tokens act at come from those given, and these positions."""
    p = np.asarray(call.positions, np.float64)
    listed = [("", "p", p), *_relations(call, p, at)]
    fits = [[(i, start) for i, (*_, y) in enumerate(listed) if (start := _start(x, y)) is not None] for x in at]
    both = [(q, k) for q, q_start in fits[0] for k, k_start in fits[1] if np.nanmax(np.abs(q_start - k_start)) < 0.1]
    if not both:
        acts = at[1] - at[1][:, :1] + p[:, :1]
        some = ", ".join(f"{p[-1, j]:g} as {acts[-1, j]:.6g}" for j in range(1, min(p.shape[1], 9), 2))
        return [Finding(ELSEWHERE, f"keys are turned as at other positions, up to a shift: {some}")], at
    pair = min(both, key=lambda pair: (pair[0] != pair[1] and 0 not in pair, sum(pair)))
    sides = (Finding(listed[i][0], f"turned as at {listed[i][1]}") if i else None for i in pair)
    return list(_sides(*sides)), [listed[i][2] for i in pair]


def _start(acts: Array, other: Array) -> Array | None:
    """By how much positions are ahead of others in each row, (b,), if that is one number for each."""
    ahead = acts - other
    start = np.nanmedian(ahead, axis=1)
    return start if np.nanmax(np.abs(ahead - start[:, None]), initial=0) < 0.2 else None


def _relations(call: Call, p: Array, at: list[Array]) -> Iterator[tuple[str, str, Array]]:
    """What positions may have been made of p, (b, n), the simplest first: the mistake, in words, and positions. Numbers
    of `relations` are read from what was measured, up to a shift of each row."""
    facts = {words: np.array([np.broadcast_to(f(row), row.shape) for row in p]) for words, (_, f) in OTHERS.items()}
    facts |= {words: np.broadcast_to(p[:1] if "first row" in words else np.nan, p.shape) for words in AROUND} | {"p": p}
    if (np.diff(p) <= 0).all():  # where a count is −p, up to a shift
        yield "positions ignored", ROW, facts[ROW]
    yield from (("not rotated", "0", 0 * p), ("direction", "−p", -p), ("rotated twice", "2p", 2 * p))
    yield from ((SHIFTS.get(by, "positions shifted"), f"p {by:+d}", p + by) for by in (1, -1, 2, -2))
    yield from _in_calls(call, p, facts[ROW]) if call.chunks else ()
    for acts in (x - x[:, :1] + p[:, :1] for x in at):
        if (known := np.isfinite(acts)).any():
            some = {name: fact[known] for name, fact in facts.items()}
            yield from ((fault, words, f(facts)) for fault, words, f in relations(acts[known], some))
        span = np.nanmax(p, axis=1) - p[:, 0]
        pace = float(np.nanmedian((np.nanmax(acts, axis=1) - acts[:, 0]) / np.where(span == 0, np.nan, span)))
        if np.isfinite(pace) and abs(pace) > 1e-3:
            yield "angles multiplied", f"p times {pace:.4g}", p * pace
    for words, place in parts(p.shape[1]):
        yield ANOTHER, f"p of a count {words}", p[:, place]
        yield "positions ignored", f"a count {words}", np.broadcast_to(place, p.shape)


def _in_calls(call: Call, p: Array, counted: Array) -> Iterator[tuple[str, str, Array]]:
    """Positions that begin anew, or are off, in the calls of a cache."""
    later, first = call.of > 0, np.repeat(np.cumsum((0, *call.chunks[:-1])), call.chunks)
    yield "first position taken as 0", "0, 1, 2, … in each call", counted - first
    yield "first position taken as 0", "p less the first of its call, after the first call", p - p[:, first] * later
    for by in (1, -1):
        yield SHIFTS[by], f"p {by:+d} after the first call", p + by * later
        yield "positions ignored", f"a count, {by:+d} after the first call", counted + by * later
