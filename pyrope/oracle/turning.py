"""How queries and keys are turned and compared inside attention, as a value (`Way`), and as it is measured.

The rotation between each query and each key is read pair by pair. With q = e_a or e_b and k = e_a + e_b, the features
a and b of one pair, the numerators are cos Δ ± sin Δ, where Δ = A_i − B_j is the angle of the query less that of the
key: so A and B are known, up to one angle for both, and with them the frequencies of each side, and the position that
each token acts at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import Rope, frequencies
from .attention_calls import unit_values
from .candidate import UNIT
from .frequencies import Measured, meant, name_frequencies
from .masks import parts
from .measured import Ask
from .operator import ladder, unwrap
from .positions import acts_at, wrapped
from .report import Finding
from .responses import Function, narrowed
from .steps import Call, Spec, capped, seen, spread

SIDES = ("queries", "keys")
COUNTED = "counts, 0, 1, 2, …, whatever is given"
BOTH = {"0": "not rotated", "−p": "direction", "2p": "rotated twice"}  # faults that are no matter of positions
ALONE = {  # faults of one side that have a name of their own
    "not rotated": "rotation: {} not rotated", "direction": "rotation: {} alone turned backwards",
    "rotated twice": "rotation: {} twice",
}  # fmt: skip
TOP = 500  # the largest position by which frequencies are measured
LONG = 400  # tokens of a call in which pairs are not read


# ── How numerators come about ────────────────────────────────────────────────────────────────────────────────────────


def same(x: Array) -> Array:
    return x


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
        """e^{iΔ} times a factor, (b, n, m, p); NaN where it is not known. One pair is in each key head at a time."""
        g, pairs = self.call.k.shape[1], np.arange(self.rope.pairs)
        parts = [[self._read(pairs[i : i + g], which) for which in (0, 1)] for i in range(0, len(pairs), g)]
        return np.concatenate([(one + other) / 2 + 1j * (one - other) / 2 for one, other in parts], axis=-1)

    def _read(self, pairs: Array, which: int) -> Array:
        """cos Δ + sin Δ, or cos Δ − sin Δ."""
        slices = definition.pairs(self.rope.layout, self.rope.width, self.rope.start)[0]
        reads, step = [np.arange(self.rope.head_dim)[s] for s in slices], self.call.q.shape[1] // self.call.k.shape[1]
        off, on = (0.0, self.spec.scale**-0.5) if self.spec.feature_map is None else (-40.0, 1.0)
        q, k = np.full(self.call.q.shape, off), np.full(self.call.k.shape, off)
        for head, pair in enumerate(pairs):
            q[:, head * step, :, reads[which][pair]] = on
            for feature in reads:
                k[:, head, :, feature[pair]] = on
        visible = np.broadcast_to(seen(self.spec, self.call), (*q.shape[:3], k.shape[2]))
        read = self._numerators if self.spec.feature_map is not None else self._scores
        return read(q, k, visible)[:, : len(pairs) * step : step].transpose(0, 2, 3, 1)

    def _weights(self, q: Array, k: Array) -> Array:
        dtype = self.call.q.dtype
        *calls, _ = unit_values(replace(self.call, q=q.astype(dtype), k=k.astype(dtype)))
        return np.concatenate([self.ask(call) for call in calls], axis=-1)[..., : k.shape[2]]

    def _numerators(self, q: Array, k: Array, visible: Array) -> Array:
        return np.where(visible, self._weights(q, k) * visible.sum(axis=-1, keepdims=True), np.nan)

    def _scores(self, q: Array, k: Array, visible: Array) -> Array:
        """Scores by two calls: every other key is zeros in each, and its score is 0."""
        out, cap = np.full(visible.shape, np.nan), self.spec.softcap
        for odd in (0, 1):
            some = np.arange(k.shape[2]) % 2 == odd
            logs = np.log(np.maximum(self._weights(q, np.where(some[:, None], k, 0)), 1e-300))
            logs = np.where(visible, logs, np.nan)
            scores = logs - np.nanmean(np.where(some, np.nan, logs), axis=-1, keepdims=True)
            out = np.where(some, scores, out)
        return out if cap is None else cap * np.arctanh(np.clip(out / cap, -0.999, 0.999))

    @cached_property
    def uneven(self) -> float:
        """How far the lengths of z are from one another: 0 if these features are the pairs."""
        size = np.abs(self.z[np.isfinite(self.z)])
        return float(np.quantile(np.abs(size / np.median(size) - 1), 0.95)) if size.size else np.inf

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


def found(spec: Spec, ask: Ask, call: Call) -> Iterator[tuple[list[Finding], Way]]:
    """How queries and keys are turned instead, and what that is called: by other positions, or else by other angles."""
    assert spec.turns is not None
    call = replace(call, options={}, judged=slice(None))
    right, loose = right_way(spec, call), 0.02 + 8 * UNIT[spec.dtype.name]
    for words, rope in _ropes(spec.turns) if call.k.shape[2] <= LONG else ():
        here = Relative(spec, ask, call, rope)
        if here.uneven > loose:
            continue
        fact = f"the pairs that turn are those of layout {rope.layout!r}, {rope.width} features wide"
        paired, theta = [Finding(words, fact)] if words else [], rope.direction * frequencies(rope)
        at = _acts(here, [theta, theta])
        if at is not None:
            named, at = _moved(call, at)
            yield [*paired, *named], _way(right, rope, [theta, theta], at)
        if at is None or not named:
            yield from _by_frequencies(here, paired, right)


def _by_frequencies(here: Relative, paired: list[Finding], right: Way) -> Iterator[tuple[list[Finding], Way]]:
    """Other frequencies, measured at positions that grow fast, or, if a candidate only counts, at those of a count."""
    for rungs in (ladder(TOP), np.arange(48)):
        at = np.concatenate(([0], rungs))[None]  # the first token is not read
        shapes = (here.spec.heads, here.spec.key_heads, here.spec.key_heads)
        q, k, v = (np.zeros((1, h, at.size, here.spec.head_dim), here.call.q.dtype) for h in shapes)
        call = Call("frequencies", q, k, v, positions=at)
        sides = [_frequencies(x, call) for x in Relative(here.spec, here.ask, call, here.rope).turned]
        theta = [side.theta for side in sides]
        acts = _acts(here, theta)
        if acts is not None:
            named, acts = _moved(here.call, acts)
            yield [*paired, *_named(sides, here.rope), *named], _way(right, here.rope, theta, acts)
            return


def _ropes(rope: Rope) -> Iterator[tuple[str, Rope]]:
    """The expected pairs first, then others: what they are called, and a rope with them."""
    yield "", rope
    other = "interleaved" if rope.layout.startswith("half") else "half"
    yield "wrong pairing", replace(rope, layout=other)
    widths = {"whole head rotated": rope.head_dim, "wrong rotary width: half of it": rope.width // 4 * 2}
    for words, width in widths.items() if rope.scaling is None else ():
        if width not in (0, rope.width):
            yield words, replace(rope, rotary_dim=width)
            yield words, replace(rope, rotary_dim=width, layout=other)


def _frequencies(turned: Array, call: Call) -> Measured:
    """θ of one side, with its sign, from angles at the positions of the ladder: unwrapped, then by least squares."""
    assert call.positions is not None
    angle, at = np.angle(np.nan_to_num(turned[0, 1:], nan=1.0)), call.positions[0, 1:]
    theta, _, _ = unwrap(angle, at, 4 * UNIT[call.q.dtype.name], subnormal=False)
    rest, squares = wrapped(angle - angle[0] - np.outer(at, theta)), float(np.square(at).sum())
    slope = (at[:, None] * rest).sum(axis=0) / squares
    off = np.sqrt(np.square(rest - np.outer(at, slope)).mean(axis=0))
    return Measured(theta + slope, (4 * off + 1e-7) / squares**0.5)


def _named(sides: list[Measured], rope: Rope) -> Iterator[Finding]:
    """What is wrong with the frequencies of both sides, or of one."""
    faults = [_fault(side, rope) for side in sides]
    if faults[0] and faults[1] and faults[0].fault == faults[1].fault:
        yield faults[0]
        return
    for side, fault in zip(SIDES, faults, strict=True):
        if fault is not None:
            name = ALONE.get(fault.fault, f"{fault.fault.partition(':')[0]}: of the {side} alone").format(side)
            yield Finding(name, f"of the {side} alone: {fault.fact}")


def _fault(side: Measured, rope: Rope) -> Finding | None:
    """What is wrong with the frequencies of one side."""
    due = meant(rope, rope.width)
    ahead, back = (name_frequencies(Measured(sign * rope.direction * side.theta, side.unsure), due) for sign in (1, -1))
    if ahead is None:
        return None
    return Finding("direction", "all pairs turn the other way") if back is None else Finding(ahead.fault, ahead.fact)


# ── Positions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _acts(here: Relative, theta: list[Array]) -> list[Array] | None:
    """The positions that queries and keys act at, (b, n) each, up to one number for each row; None if the angles of one
    side are those of no position."""
    first = np.asarray(here.call.positions, np.float64)[:, :1, None]  # where the first key should be
    turned = (x * np.exp(1j * first * theta[1]) for x in here.turned)
    both = [_side(x, side, here.call) for x, side in zip(turned, theta, strict=True)]
    known = [x for x in both if x is not None]
    return known if len(known) == 2 else None


def _side(turned: Array, theta: Array, call: Call) -> Array | None:
    """The same of one side; NaN where it is not known."""
    (b, n, p), known = turned.shape, np.isfinite(turned).all(axis=-1)
    if not np.abs(theta).max(initial=0):
        return np.where(known, 0.0, np.nan)
    most = 2.0 * np.abs(np.asarray(call.positions)).max(initial=1) + 10
    acts, off = acts_at(np.nan_to_num(turned, nan=1.0).reshape(b * n, p), theta, most)
    good = (off < (0.1 if UNIT[call.q.dtype.name] > 1e-4 else 5e-3)).reshape(b, n) & known
    if good.sum() < 0.9 * known.sum():
        return None
    acts = np.where(np.abs(acts - np.rint(acts)) < 0.05, np.rint(acts), acts)
    return np.where(good, np.reshape(acts, (b, n)), np.nan)


def _way(right: Way, rope: Rope, theta: list[Array], at: list[Array]) -> Way:
    turns = [Turn(rope, np.nan_to_num(x)[:, None], one) for one, x in zip(theta, at, strict=True)]
    return replace(right, turn_q=turns[0], turn_k=turns[1])


def _moved(call: Call, at: list[Array]) -> tuple[list[Finding], list[Array]]:
    """By which relation the positions that tokens act at come from those given, and these positions."""
    p = np.asarray(call.positions, np.float64)
    listed = list(_relations(call, p, at))
    fits = [[(i, start) for i, (_, other) in enumerate(listed) if (start := _start(x, other)) is not None] for x in at]
    both = [(q, k) for q, q_start in fits[0] for k, k_start in fits[1] if np.nanmax(np.abs(q_start - k_start)) < 0.1]
    if not both:
        acts = at[1] - at[1][:, :1] + p[:, :1]
        some = ", ".join(f"{p[-1, j]:g} as {acts[-1, j]:.6g}" for j in range(1, min(p.shape[1], 9), 2))
        return [Finding("positions: others", f"keys are turned as at other positions, up to a shift: {some}")], at
    q, k = min(both, key=lambda pair: (pair[0] != pair[1] and 0 not in pair, sum(pair)))
    return list(_relation(listed[q][0], listed[k][0])), [listed[q][1], listed[k][1]]


def _relation(q: str, k: str) -> Iterator[Finding]:
    """What it is called that queries act at q, and keys at k."""
    if q == k:
        if q != "p":
            yield Finding(BOTH.get(q, f"positions: {q}"), f"tokens are turned as at {q}")
        return
    for side, words in zip(SIDES, (q, k), strict=True):
        if words != "p":
            name = ALONE.get(BOTH.get(words, ""), f"positions: {{}} at {words}").format(side)
            yield Finding(name, f"{side} are turned as at {words}")


def _start(acts: Array, other: Array) -> Array | None:
    """By how much positions are ahead of others in each row, (b,), if that is one number for each."""
    ahead = acts - other
    start = np.nanmedian(ahead, axis=1)
    return start if np.nanmax(np.abs(ahead - start[:, None]), initial=0) < 0.2 else None


def _relations(call: Call, p: Array, at: list[Array]) -> Iterable[tuple[str, Array]]:
    """What positions may have been made of p, (b, n): the simplest first."""
    counted = np.broadcast_to(np.arange(p.shape[1], dtype=np.float64), p.shape)
    yield "p", p
    if (np.diff(p) <= 0).all():  # where a count is −p, up to a shift
        yield COUNTED, counted
    yield from (("0", 0 * p), ("−p", -p), ("2p", 2 * p))
    yield from ((f"p {by:+d}", p + by) for by in (1, -1, 2, -2))
    if call.chunks:
        first = np.repeat(np.cumsum((0, *call.chunks[:-1])), call.chunks)
        later = np.repeat(np.arange(len(call.chunks)), call.chunks) > 0
        yield "0, 1, 2, … in each call", counted - first
        yield "p less the first of its call, after the first call", np.where(later, p - p[:, first], p)
        for by in (1, -1):
            yield f"p {by:+d} after the first call", p + by * later
            yield f"counts, 0, 1, 2, …, {by:+d} after the first call", counted + by * later
    yield COUNTED, counted
    yield "those of row 0 of the batch", np.broadcast_to(p[:1], p.shape)
    yield "p less the first of its row", p - p[:, :1]
    yield "p in sorted order", np.sort(p, axis=1)
    for words, place in parts(p.shape[1]):
        yield f"counts {words}", np.broadcast_to(place, p.shape).astype(np.float64)
        yield f"p of a count {words}", p[:, place]
    yield "max(p − 1, 0)", np.maximum(p - 1, 0)
    yield from ((f"p in {name}", narrowed(p, bits)) for name, bits in (("bfloat16", 8), ("float16", 11)))
    for acts in at:
        yield from _measured(p, acts - acts[:, :1] + p[:, :1])


def _measured(p: Array, acts: Array) -> Iterator[tuple[str, Array]]:
    """Relations with a number of their own, which is read from what was measured, up to a shift of each row."""
    known = np.isfinite(acts)
    if not known.any():
        return
    lost = np.abs(np.rint((p - acts)[known])).astype(np.int64)
    if (period := int(np.gcd.reduce(lost))) > 1:
        yield f"p modulo {period}", p % period
    for top in (np.rint(np.nanmax(acts)), *np.unique(p)[::-1][:100]):
        yield f"min(p, {top:g})", np.minimum(p, top)
    yield from ((f"p // {k}", p // k) for k in range(2, 9))
    span = np.nanmax(p, axis=1) - p[:, 0]
    pace = float(np.nanmedian((np.nanmax(acts, axis=1) - acts[:, 0]) / np.where(span == 0, np.nan, span)))
    if np.isfinite(pace) and abs(pace) > 1e-3:
        yield f"p times {pace:.4g}", p * pace
