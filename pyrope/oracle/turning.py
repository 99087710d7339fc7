"""How queries and keys are turned and compared inside attention, as a value (`Way`), and as it is measured.

The rotation between each query and each key is read pair by pair. A query of ones and a key that is one feature of a
pair, a or b, make the numerators cos Δ ± sin Δ, where Δ = A_i − B_j is the angle of the query less that of the key: so
A and B are known, up to one angle for both, and with them the frequencies of each side, and the position that each
token acts at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import Rope, frequencies
from .attention_calls import unit_values
from .candidate import UNIT, Unreadable
from .frequencies import MeasuredTheta, name_frequencies
from .measured import Ask
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

    def __call__(self, x: Array) -> Array:
        """(b, h, n, d) -> the same."""
        angles = np.asarray(self.at, np.float64)[..., None] * self.theta
        cos, sin = (f(angles) * self.rope.attention_factor for f in (np.cos, np.sin))
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
    fq, fk = way.phi(way.q), way.phi(way.k)
    tq = way.turn_q(fq)
    each = [tq @ turn(fk).swapaxes(-1, -2) for turn in way.later or (way.turn_k,)]
    turned = np.select([np.equal(way.of, i)[:, None] for i in range(len(each))], each) if way.later else each[0]
    if spec.feature_map is None:
        return way.cap(turned * spec.scale), turned * spec.scale
    return turned, fq @ fk.swapaxes(-1, -2)


# ── Reading pairs ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Relative:
    """How queries are turned against keys in one call."""

    spec: Spec
    ask: Ask
    call: Call

    @cached_property
    def compared(self) -> Array:
        """What a query of ones makes of a key that is one feature, (b, n, m, d), times a factor; NaN where it is not
        known. Each key head has another feature, and all features are the rows of a few batches: calls may be slow."""
        (b, g, m, d), visible = self.call.k.shape, seen(self.spec, self.call)
        off, on = (0.0, self.spec.scale**-0.5) if self.spec.feature_map is None else (-40.0, 1.0)
        k = np.full((-(-d // g), b, g, m, d), off)
        for feature in range(d):
            k[feature // g, :, feature % g, :, feature] = on
        if self.spec.feature_map is not None:
            y = np.where(visible, self._weights(on, k), np.nan)
        else:  # every other key is zeros in each of two rows for one, and its score is 0
            odd, cap = np.arange(m) % 2 == 1, self.spec.softcap
            both = self._weights(on, np.stack([np.where(x[:, None], k, 0) for x in (odd, ~odd)]))
            logs = np.where(visible, np.log(np.maximum(both, 1e-300)), np.nan)
            zeros = np.where(np.stack((~odd, odd))[:, None, None, None, None], logs, np.nan)
            y = np.where(odd, *(logs - np.nanmean(zeros, axis=-1, keepdims=True)))
            y = y if cap is None else cap * np.arctanh(np.clip(y / cap, -0.999, 0.999))
        y = np.moveaxis(y[:, :, :: y.shape[2] // g], (0, 2), (3, 4))
        return y.reshape(*y.shape[:3], -1)[..., :d]

    def _weights(self, query: float, k: Array) -> Array:
        """(…, b, g, m, d) -> (…, b, h, n, m)."""
        each, read, dtype = k.reshape(-1, *k.shape[-4:]), list[Array](), self.call.q.dtype
        q = np.full(self.call.q.shape, query, dtype)
        for i in range(0, len(each), self.many):
            some = each[i : i + self.many]
            *calls, _ = unit_values(self._tiled(q, np.concatenate(some).astype(dtype), len(some)))
            read.append(np.concatenate([self.ask(call) for call in calls], axis=-1)[..., : k.shape[-2]])
        weights = np.concatenate(read)
        return weights.reshape(*k.shape[:-3], *weights.shape[1:])

    @cached_property
    def many(self) -> int:
        """How often the call may be made at once: one time alone, if its answer is another one in a larger batch."""
        times, once = max(1, ROWS // len(self.call.q)), self.ask(self.call)
        try:
            often = self.ask(self._tiled(self.call.q, np.concatenate([self.call.k] * times), times))
        except Unreadable:
            return 1
        return times if np.allclose(np.concatenate([once] * times), often, rtol=1e-3, atol=1e-3, equal_nan=True) else 1

    def _tiled(self, q: Array, k: Array, times: int) -> Call:
        """The call so often, in one batch, with these queries, each time the same, and these keys."""
        q, v, at = (np.concatenate([x] * times) for x in (q, self.call.v, np.asarray(self.call.positions)))
        return replace(self.call, q=q, k=k, v=v, positions=at)

    def turned(self, rope: Rope) -> tuple[Array, Array, float]:
        """e^{iA} and e^{iB} of its pairs, (b, n, p) and (b, m, p), relative to that of the first key, NaN where it is
        not known; and how far their lengths are from one another: 0 if these features are the pairs. Numerators of
        Eq. (19) are divided by a total of their own for each query, whatever it is."""
        a, b = (self.compared[..., x] for x in definition.pairs(rope.layout, rope.width, rope.start)[0])
        size, z = np.hypot(a, b), a + b + 1j * (b - a)
        off = np.abs(size / np.nanmedian(size, axis=(2, 3) if self.spec.feature_map else None, keepdims=True) - 1)
        z = z / np.abs(z)
        q = z[:, :, 0].copy()
        k = np.conj(z[:, -1]) * q[:, -1:]
        for j in range(1, z.shape[1]) if self.spec.window is not None else ():  # by the key before, step by step
            q[:, j] = z[:, j, j - 1] * k[:, j - 1]
            k[:, j] = np.conj(z[:, j, j]) * q[:, j]
        return q, k, float(np.nanquantile(off, 0.95)) if np.isfinite(off).any() else np.inf


# ── Frequencies and pairs ────────────────────────────────────────────────────────────────────────────────────────────


def found(spec: Spec, ask: Ask, call: Call, due: Call) -> Iterator[tuple[list[Finding], Way]]:
    """How queries and keys are turned instead, and what that is called: by other positions, or else by other angles."""
    assert spec.turns is not None
    judged, call = call.judged, replace(call, options={}, judged=slice(None))
    right, loose = right_way(spec, due), 0.02 + 8 * UNIT[spec.dtype.name]
    here = Relative(spec, ask, call)
    for words, rope in _ropes(spec.turns) if call.k.shape[2] <= LONG else ():
        *turned, uneven = here.turned(rope)
        if uneven > loose:
            continue
        fact = f"the pairs that turn are those of layout {rope.layout!r}, {rope.width} features wide"
        paired, theta = [Finding(words, fact)] if words else [], [rope.direction * frequencies(rope)] * 2
        named = list[Finding]()
        if (at := _acts(here, turned, theta)) is not None:
            named, at = _moved(call, at)
            yield [*paired, *named], _way(right, rope, theta, at, judged)
        for rungs in () if named else (ladder(TOP), np.arange(48)):
            measured = _frequencies(here, rope, rungs)
            theta = [side.theta for side in measured]
            if (at := _acts(here, turned, theta)) is not None:
                moved, at = _moved(call, at)
                faults = _sides(*(_fault(side, rope) for side in measured))
                yield [*paired, *faults, *moved], _way(right, rope, theta, at, judged)
                break


def _ropes(rope: Rope) -> Iterator[tuple[str, Rope]]:
    """The expected pairs first, then others: what they are called, and a rope with them."""
    yield "", rope
    other = "interleaved" if rope.layout.startswith("half") else "half"
    yield "wrong pairing", replace(rope, layout=other)
    if rope.width < rope.head_dim:
        yield "wrong end rotated", replace(rope, placement="prefix" if rope.start else "suffix")
    widths = {"whole head rotated": rope.head_dim, "wrong rotary width: half of it": rope.width // 4 * 2}
    for words, width in widths.items() if rope.scaling is None else ():
        if width not in (0, rope.width):
            yield from ((words, replace(rope, rotary_dim=width, layout=layout)) for layout in (rope.layout, other))


def _frequencies(here: Relative, rope: Rope, rungs: Array) -> list[MeasuredTheta]:
    """θ of queries and of keys, with its sign, from angles at positions that grow fast or, as a candidate may look at
    their size, one by one: unwrapped, then by least squares. The first token is not read."""
    at = np.concatenate(([0], rungs))[None]
    shapes = (here.spec.heads, here.spec.key_heads, here.spec.key_heads)
    q, k, v = (np.zeros((1, h, at.size, here.spec.head_dim), here.call.q.dtype) for h in shapes)
    *sides, _ = replace(here, call=Call("frequencies", q, k, v, positions=at)).turned(rope)
    listed, squares = list[MeasuredTheta](), float(np.square(rungs.astype(np.float64)).sum())
    for turned in sides:
        angle = np.angle(np.nan_to_num(turned[0, 1:], nan=1.0))
        theta, _, _ = unwrap(angle, rungs, 4 * UNIT[q.dtype.name], subnormal=False)
        rest = wrapped(angle - angle[0] - np.outer(rungs, theta))
        slope = (rungs[:, None] * rest).sum(axis=0) / squares
        off = np.sqrt(np.square(rest - np.outer(rungs, slope)).mean(axis=0))
        listed.append(MeasuredTheta(theta + slope, (4 * off + 1e-7) / squares**0.5))
    return listed


def _fault(side: MeasuredTheta, rope: Rope) -> Finding | None:
    """What is wrong with the frequencies of one side."""
    ahead, back = (
        name_frequencies(MeasuredTheta(sign * rope.direction * side.theta, side.unsure), rope) for sign in (1, -1)
    )
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


def _acts(here: Relative, sides: list[Array], theta: list[Array]) -> list[Array] | None:
    """The positions that queries and keys act at, (b, n) each, up to one number for each row, NaN where they are not
    known; None if the angles of one side are those of no position."""
    at, close = np.asarray(here.call.positions, np.float64), 0.1 if UNIT[here.spec.dtype.name] > 1e-4 else 5e-3
    both = list[Array]()
    for turned, side in zip(sides, theta, strict=True):
        known = np.isfinite(turned).all(axis=-1)
        turned = turned * np.exp(1j * at[:, :1, None] * theta[1])  # the first key is where it should be
        acts, off = acts_at(np.nan_to_num(turned, nan=1.0).reshape(-1, len(side)), side, 2 * np.abs(at).max() + 10)
        good = known & ((off < close).reshape(known.shape) | (not side.any()))
        if good.sum() < 0.9 * known.sum():
            return None
        acts = np.where(np.abs(acts - np.rint(acts)) < 0.05, np.rint(acts), acts)
        both.append(np.where(good, np.reshape(acts, known.shape), np.nan))
    return both


def _way(right: Way, rope: Rope, theta: list[Array], at: list[Array], judged: Any) -> Way:
    acts = at[0][:, judged], at[1]
    turns = [Turn(rope, np.nan_to_num(x)[:, None], one) for one, x in zip(theta, acts, strict=True)]
    return replace(right, turn_q=turns[0], turn_k=turns[1])


def _moved(call: Call, at: list[Array]) -> tuple[list[Finding], list[Array]]:
    """By which relation the positions that tokens act at come from those given, and these positions."""
    p = np.asarray(call.positions, np.float64)
    listed = [("", "p", p), *other_positions(call, p, [x - x[:, :1] + p[:, :1] for x in at])]
    fits = [[(i, start) for i, (*_, y) in enumerate(listed) if (start := _start(x, y)) is not None] for x in at]
    both = [(q, k) for q, q_start in fits[0] for k, k_start in fits[1] if np.nanmax(np.abs(q_start - k_start)) < 0.1]
    if not both:
        acts = at[1] - at[1][:, :1] + p[:, :1]
        moved = np.argwhere(np.abs(acts - p) > 0.2)[:4]
        some = ", ".join(f"{p[i, j]:g} as {acts[i, j]:.6g}" for i, j in moved)
        return [Finding(ELSEWHERE, f"keys are turned as at other positions, up to a shift: {some}")], at
    pair = min(both, key=lambda pair: (pair[0] != pair[1] and 0 not in pair, sum(pair)))
    sides = (Finding(listed[i][0], f"turned as at {listed[i][1]}") if i else None for i in pair)
    return list(_sides(*sides)), [listed[i][2] for i in pair]


def _start(acts: Array, other: Array) -> Array | None:
    """By how much positions are ahead of others in each row, (b,), if that is one number for each."""
    ahead = acts - other
    start = np.nanmedian(ahead, axis=1)
    return start if np.nanmax(np.abs(ahead - start[:, None]), initial=0) < 0.2 else None


def other_positions(call: Call, p: Array, at: list[Array]) -> Iterator[tuple[str, str, Array]]:
    """What positions may have been made of p, (b, n), the simplest first: the mistake, in words, and positions. Numbers
    of `relations` are read from what was measured, (b, n) each, NaN where it is not known."""
    facts = {words: np.array([np.broadcast_to(f(row), row.shape) for row in p]) for words, (_, f) in OTHERS.items()}
    facts |= {words: np.broadcast_to(p[:1] if "first row" in words else np.nan, p.shape) for words in AROUND} | {"p": p}
    if (np.diff(p) <= 0).all():  # where a count is −p, up to a shift
        yield "positions ignored", ROW, facts[ROW]
    yield from (("not rotated", "0", 0 * p), ("direction", "−p", -p), ("rotated twice", "2p", 2 * p))
    yield from ((SHIFTS.get(by, "positions shifted"), f"p {by:+d}", p + by) for by in (1, -1, 2, -2))
    yield from _in_calls(call, p, facts[ROW]) if call.chunks else ()
    for acts in at:
        if (known := np.isfinite(acts)).any():
            some = {name: fact[known] for name, fact in facts.items()}
            yield from ((fault, words, f(facts)) for fault, words, f in relations(acts[known], some))
        span = np.nanmax(p, axis=1) - p[:, 0]
        pace = float(np.nanmedian((np.nanmax(acts, axis=1) - acts[:, 0]) / np.where(span == 0, np.nan, span)))
        if np.isfinite(pace) and abs(pace) > 1e-3:
            yield "angles multiplied", f"p times {pace:.4g}", p * pace
    for words, place in _parts(p.shape[1]):
        yield ANOTHER, f"p of a count {words}", p[:, place]


def _parts(m: int) -> Iterator[tuple[str, Array]]:
    """The place of each of m tokens in its part, (m,), where a row is split among ranks."""
    j = np.arange(m)
    for ranks in (2, 4, 3, 8):
        yield f"in each of {ranks} parts", j % -(-m // ranks)
        firsts, chunks = j.copy(), np.array_split(j, 2 * ranks)
        for one, other in zip(chunks[:ranks], chunks[::-1], strict=False):
            firsts[other] = np.resize(one, len(other))
        yield f"by {ranks} ranks in a zigzag, those of the first chunk for both", firsts


def _in_calls(call: Call, p: Array, counted: Array) -> Iterator[tuple[str, str, Array]]:
    """Positions that begin anew, or are off, in the calls of a cache."""
    later, first = call.of > 0, call.first
    yield "first position taken as 0", "0, 1, 2, … in each call", counted - first
    yield "first position taken as 0", "p less the first of its call, after the first call", p - p[:, first] * later
    for by in (1, -1):
        yield SHIFTS[by], f"p {by:+d} after the first call", p + by * later
        yield "positions ignored", f"a count, {by:+d} after the first call", counted + by * later
