"""How queries and keys are turned inside attention: the rotation between each query and each key, read pair by pair.

With q = e_a or e_b and k = e_a + e_b, the features a and b of one pair, the numerators are cos Δ ± sin Δ, where
Δ = A_i − B_j is the angle of the query less that of the key: so A and B are known, up to one angle for both, and with
them the frequencies of each side, and the position that each token acts at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from .. import definition
from ..backend import Array
from ..theta import Rope, frequencies
from . import ways
from .candidate import UNIT
from .frequencies import Measured, meant, name_frequencies
from .operator import ladder, unwrap
from .positions import acts_at, wrapped
from .report import Finding
from .responses import narrowed
from .steps import Call, Spec, seen

Ask: TypeAlias = Callable[[Call], Array]
SIDES = ("queries", "keys")
COUNTED = "counts, 0, 1, 2, …, whatever is given"
BOTH = {"0": "not rotated", "−p": "direction", "2p": "rotated twice"}  # faults that are no matter of positions
ALONE = {  # faults of one side that have a name of their own
    "not rotated": "rotation: {} not rotated", "direction": "rotation: {} alone turned backwards",
    "rotated twice": "rotation: {} twice",
}  # fmt: skip
TOP = 500  # the largest position by which frequencies are measured
FEW = 130  # keys of a call in which all pairs are read; of longer ones SOME are
SOME = 8


@dataclass(frozen=True)
class Relative:
    """The rotations of some pairs in one call: z (b, n, m, p) is e^{iΔ} times a factor; NaN where it is not known."""

    spec: Spec
    ask: Ask
    call: Call
    rope: Rope
    pairs: Array  # their numbers

    @cached_property
    def keys(self) -> Array:
        """The keys that are read: all, or of a long call as many as there are features."""
        m, d = self.call.k.shape[2:]
        return np.unique(np.linspace(0, m - 1, m if m <= FEW else d).astype(int))

    @cached_property
    def z(self) -> Array:
        g = self.call.k.shape[1]
        parts = [self._some(self.pairs[i : i + g]) for i in range(0, len(self.pairs), g)]
        return np.concatenate(parts, axis=-1)

    def _some(self, pairs: Array) -> Array:
        """One pair in each key head."""
        one, other = (self._read(pairs, which) for which in (0, 1))
        return (one + other) / 2 + 1j * (one - other) / 2

    def _read(self, pairs: Array, which: int) -> Array:
        """cos Δ + sin Δ, or cos Δ − sin Δ."""
        reads = [
            np.arange(self.rope.head_dim)[s]
            for s in definition.pairs(self.rope.layout, self.rope.width, self.rope.start)[0]
        ]
        off, on = (0.0, self.spec.scale**-0.5) if self.spec.feature_map is None else (-40.0, 1.0)
        off = 0.0 if self.spec.feature_map == "identity" else off
        q, k = np.full(self.call.q.shape, off), np.full(self.call.k.shape, off)
        for head, pair in enumerate(pairs):
            q[:, head * (q.shape[1] // k.shape[1]), :, reads[which][pair]] = on
            for feature in reads:
                k[:, head, self.keys, feature[pair]] = on
        first = np.arange(len(pairs)) * (q.shape[1] // k.shape[1])
        if self.spec.feature_map is not None:
            w = self._weights(q, k)[:, first]
            counts = np.broadcast_to(seen(self.spec, self.call), (*w.shape[:3], k.shape[2]))[..., self.keys]
            return np.where(counts, w * counts.sum(axis=-1, keepdims=True), np.nan).transpose(0, 2, 3, 1)
        return self._scores(q, k)[:, first].transpose(0, 2, 3, 1)

    def _weights(self, q: Array, k: Array) -> Array:
        """The weights of the keys that are read, (b, h, n, m)."""
        parts, (d, dtype) = [], (self.call.v.shape[-1], self.call.q.dtype)
        for start in range(0, len(self.keys), d):
            v, keys = np.zeros(self.call.v.shape), self.keys[start : start + d]
            v[:, :, keys, range(len(keys))] = 1
            call = replace(self.call, q=q.astype(dtype), k=k.astype(dtype), v=v.astype(dtype))
            parts.append(self.ask(call)[..., : len(keys)])
        return np.concatenate(parts, axis=-1)

    def _scores(self, q: Array, k: Array) -> Array:
        """Scores by two calls: every other key is zeros in each, and its score is 0."""
        visible = np.broadcast_to(seen(self.spec, self.call), (*q.shape[:3], k.shape[2]))[..., self.keys]
        out = np.full(visible.shape, np.nan)
        for odd in (0, 1):
            some, rest = np.arange(len(self.keys)) % 2 == odd, k.copy()
            rest[:, :, self.keys[~some]] = 0
            logs = np.where(visible, np.log(np.maximum(self._weights(q, rest), 1e-300)), np.nan)
            scores = logs - np.nanmean(np.where(some, np.nan, logs), axis=-1, keepdims=True)
            out = np.where(some, scores, out)
        cap = self.spec.softcap
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
        places = {int(key): index for index, key in enumerate(self.keys)}
        q = z[:, :, 0].copy()
        k = np.conj(z[:, -1]) * q[:, -1:]
        for j in range(1, z.shape[1]) if self.spec.window is not None else ():  # by the key before, step by step
            at, before = places.get(j), places.get(j - 1)
            if at is not None and before is not None:
                q[:, j] = z[:, j, before] * k[:, before]
                k[:, at] = np.conj(z[:, j, at]) * q[:, j]
        return q, k


# ── Frequencies and pairs ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Side:
    """How one side is turned: θ (p,), with its sign, and by how much that may be off."""

    theta: Array
    unsure: Array


def found(spec: Spec, ask: Ask, call: Call) -> Iterator[tuple[list[Finding], ways.Way]]:
    """How queries and keys are turned instead, and what that is called: by other positions, or else by other angles."""
    assert spec.turns is not None
    call, right, loose = replace(call, options={}), ways.right_way(spec, call), 0.02 + 8 * UNIT[spec.dtype.name]
    for words, rope in _ropes(spec.turns):
        every = np.arange(rope.pairs)
        pairs = every if call.k.shape[2] <= FEW else every[:: max(1, len(every) // SOME)]
        here = Relative(spec, ask, call, rope, pairs)
        if here.uneven > loose:
            continue
        theta = rope.direction * frequencies(rope)
        at = _acts(here, [theta, theta])
        if at is not None:
            named, at = _moved(call, at)
            yield [*_paired(rope, words), *named], _way(right, rope, [theta, theta], at)
        if at is None or not named:
            yield from _by_frequencies(here, words, right)


def _by_frequencies(here: Relative, words: str, right: ways.Way) -> Iterator[tuple[list[Finding], ways.Way]]:
    """Other frequencies, measured at positions that grow fast, or, if a candidate only counts, at those of a count."""
    for ladder_at in (ladder(TOP), np.arange(48)):
        call = _steps(here.spec, here.call, ladder_at)
        there = Relative(here.spec, here.ask, call, here.rope, np.arange(here.rope.pairs))
        sides = [_frequencies(x, call) for x in there.turned]
        at = _acts(here, [side.theta for side in sides])
        if at is not None:
            named, at = _moved(here.call, at)
            theta = [side.theta for side in sides]
            yield [*_paired(here.rope, words), *_named(sides, here.rope), *named], _way(right, here.rope, theta, at)
            return


def _ropes(rope: Rope) -> Iterator[tuple[str, Rope]]:
    """The expected pairs first, then others: what they are called, and a rope with them."""
    yield "", rope
    other = "interleaved" if rope.layout.startswith("half") else "half"
    yield "wrong pairing", replace(rope, layout=other)
    for words, width in (
        ("whole head rotated", rope.head_dim),
        ("wrong rotary width: half of it", rope.width // 4 * 2),
    ):
        if width not in (0, rope.width) and rope.scaling is None:
            yield words, replace(rope, rotary_dim=width)
            yield words, replace(rope, rotary_dim=width, layout=other)


def _steps(spec: Spec, call: Call, positions: Array) -> Call:
    """A call of one row with these positions, after one at 0 that is not read."""
    at = np.concatenate(([0], positions))
    shapes = (spec.heads, spec.key_heads, spec.key_heads)
    q, k, v = (np.zeros((1, h, len(at), spec.head_dim), call.q.dtype) for h in shapes)
    return Call("frequencies", q, k, v, positions=at[None])


def _frequencies(turned: Array, call: Call) -> Side:
    """From angles at the positions of the ladder: unwrapped, then by least squares."""
    assert call.positions is not None
    angle, at = np.angle(np.nan_to_num(turned[0, 1:], nan=1.0)), call.positions[0, 1:]
    theta, _, _ = unwrap(angle, at, 4 * UNIT[call.q.dtype.name], subnormal=False)
    rest, squares = wrapped(angle - angle[0] - np.outer(at, theta)), float(np.square(at).sum())
    slope = (at[:, None] * rest).sum(axis=0) / squares
    off = np.sqrt(np.square(rest - np.outer(at, slope)).mean(axis=0))
    return Side(theta + slope, (4 * off + 1e-7) / squares**0.5)


def _paired(rope: Rope, words: str) -> Iterator[Finding]:
    if words:
        yield Finding(words, f"the pairs that turn are those of layout {rope.layout!r}, {rope.width} features wide")


def _named(sides: list[Side], rope: Rope) -> Iterator[Finding]:
    """What is wrong with the frequencies of both sides, or of one."""
    faults = [_fault(side, rope) for side in sides]
    if faults[0] and faults[1] and faults[0].fault == faults[1].fault:
        yield faults[0]
        return
    for side, fault in zip(SIDES, faults, strict=True):
        if fault is not None:
            name = ALONE.get(fault.fault, f"{fault.fault.partition(':')[0]}: of the {side} alone").format(side)
            yield Finding(name, f"of the {side} alone: {fault.fact}")


def _fault(side: Side, rope: Rope) -> Finding | None:
    """What is wrong with the frequencies of one side."""
    due = meant(rope, rope.width)
    ahead, back = (name_frequencies(Measured(sign * rope.direction * side.theta, side.unsure), due) for sign in (1, -1))
    if ahead is None:
        return None
    if back is None:
        return Finding("direction", "all pairs turn the other way")
    return Finding(ahead.fault, ahead.fact)


# ── Positions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _acts(here: Relative, theta: list[Array]) -> list[Array] | None:
    """The positions that queries and keys act at, (b, n) each, up to one number for each row; None if the angles of one
    side are those of no position."""
    m, (q, k) = here.call.k.shape[2], here.turned
    keys = np.full((len(k), m, k.shape[-1]), np.nan, complex)
    keys[:, here.keys] = k
    first = np.asarray(here.call.positions, np.float64)[:, :1, None]  # where the first key should be
    q, keys = (x * np.exp(1j * first * theta[1][here.pairs]) for x in (q, keys))
    both = [_side(x, side[here.pairs], here.call) for x, side in zip((q, keys), theta, strict=True)]
    known = [x for x in both if x is not None]
    return known if len(known) == 2 else None


def _side(turned: Array, theta: Array, call: Call) -> Array | None:
    """The same of one side; NaN where it is not known."""
    (b, n, p), known = turned.shape, np.isfinite(turned).all(axis=-1)
    assert call.positions is not None
    most = 2.0 * np.abs(call.positions).max(initial=1) + 10
    if not np.abs(theta).max(initial=0):
        return np.where(known, 0.0, np.nan)
    acts, off = acts_at(np.nan_to_num(turned, nan=1.0).reshape(b * n, p), theta, most)
    good = (off < (0.1 if UNIT[call.q.dtype.name] > 1e-4 else 5e-3)).reshape(b, n) & known
    if good.sum() < 0.9 * known.sum():
        return None
    acts = np.where(np.abs(acts - np.rint(acts)) < 0.05, np.rint(acts), acts)
    return np.where(good, np.reshape(acts, (b, n)), np.nan)


def _way(right: ways.Way, rope: Rope, theta: list[Array], at: list[Array]) -> ways.Way:
    turns = [ways.Turn(rope, np.nan_to_num(x)[:, None], one) for one, x in zip(theta, at, strict=True)]
    return replace(right, turn_q=turns[0], turn_k=turns[1])


def _moved(call: Call, at: list[Array]) -> tuple[list[Finding], list[Array]]:
    """By which relation the positions that tokens act at come from those given, and these positions."""
    assert call.positions is not None
    p = call.positions.astype(np.float64)
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
    yield from _in_calls(call, p, counted)
    yield COUNTED, counted
    yield "those of row 0 of the batch", np.broadcast_to(p[:1], p.shape)
    yield "p less the first of its row", p - p[:, :1]
    yield "counts, 0, 2, 4, …", 2 * counted
    yield "the positions of the row in reversed order", p[:, ::-1]
    yield "p in sorted order", np.sort(p, axis=1)
    yield "the position of the token before", np.concatenate((p[:, :1], p[:, :-1]), axis=1)
    for words, place in ways.parts(p.shape[1]):
        yield f"counts {words}", np.broadcast_to(place, p.shape).astype(np.float64)
        yield f"p of a count {words}", p[:, place]
    yield from ((f"max(p − {by}, 0)", np.maximum(p - by, 0)) for by in (1, 2))
    yield from ((f"p in {name}", narrowed(p, bits)) for name, bits in (("bfloat16", 8), ("float16", 11)))
    yield from ((f"p in int{bits}", (p + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)) for bits in (8, 16))
    for acts in at:
        yield from _measured(p, acts - acts[:, :1] + p[:, :1])


def _in_calls(call: Call, p: Array, counted: Array) -> Iterator[tuple[str, Array]]:
    """With a cache: positions that are counted in each call, or off after the first one."""
    if not call.chunks:
        return
    first = np.repeat(np.cumsum((0, *call.chunks[:-1])), call.chunks)
    later = np.repeat(np.arange(len(call.chunks)), call.chunks) > 0
    yield "0, 1, 2, … in each call", counted - first
    yield "p less the first of its call", p - p[:, first]
    yield "p less the first of its call, after the first call", np.where(later, p - p[:, first], p)
    yield "0, 1, 2, … in each call, after the first call", np.where(later, counted - first, p)
    yield "the first of its call", p[:, first]
    yield "the number of tokens before its call", np.broadcast_to(first, p.shape).astype(np.float64)
    for by in (1, -1):
        yield f"p {by:+d} after the first call", p + by * later
        yield f"counts, 0, 1, 2, …, {by:+d} after the first call", counted + by * later


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
    for k in range(2, 9):
        yield f"p // {k}", p // k
        yield f"p // {k} · {k}", p // k * k
    span = np.nanmax(p, axis=1) - p[:, 0]
    pace = float(np.nanmedian((np.nanmax(acts, axis=1) - acts[:, 0]) / np.where(span == 0, np.nan, span)))
    if np.isfinite(pace) and abs(pace) > 1e-3:
        yield f"p times {pace:.4g}", p * pace
