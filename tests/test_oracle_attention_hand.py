"""Every known mistake of attention, made by hand in plain NumPy as a person would make it: each must have its name.

Nothing here uses the steps that the oracle predicts mistakes with, so that an error in those cannot cancel out.
"""

import math

import numpy as np
import pytest

import pyrope
from pyrope import DynamicNTK, Rope, YaRN, check_attention, check_linear_attention
from pyrope.oracle.attention_faults import ATTENTION, LINEAR

D, SHAPE = 32, {"heads": 4, "key_heads": 2}
ROPE = Rope(D, 10000.0, "half")
pytestmark = pytest.mark.usefixtures("needed_trials")
YARN = Rope(D, 10000.0, "half", scaling=YaRN(8.0, 1024))
PARTIAL = Rope(D, 100.0, "half", rotary_dim=16)
DYNAMIC = Rope(D, 10000.0, "half", scaling=DynamicNTK(4.0, 256, 4096))


# Rotations


def powers(base=10000.0, width=D):
    return base ** (-np.arange(0, width, 2) / width)


def turn(x, at, theta=None, factor=1.0):
    """Half pairs of the first features: x (b, h, n, d), at (b, n)."""
    theta = powers() if theta is None else theta
    angle = at[:, None, :, None] * theta
    p = theta.size
    a, b, rest = x[..., :p], x[..., p : 2 * p], x[..., 2 * p :]
    cos, sin = factor * np.cos(angle), factor * np.sin(angle)
    return np.concatenate((a * cos - b * sin, a * sin + b * cos, rest), axis=-1)


def turn_neighbours(x, at):
    """Pairs of neighbours, as GPT-J has them."""
    angle, out = at[:, None, :, None] * powers(), np.empty_like(x)
    out[..., ::2] = x[..., ::2] * np.cos(angle) - x[..., 1::2] * np.sin(angle)
    out[..., 1::2] = x[..., ::2] * np.sin(angle) + x[..., 1::2] * np.cos(angle)
    return out


def by(theta, factor=1.0):
    return lambda x, at: turn(x, at, theta, factor)


def at(change):
    return lambda x, positions: turn(x, change(positions))


def rounded_to(bits, m):
    """Whole numbers of so many bits."""
    step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(m, 1))) + 1 - bits, 0)
    return np.rint(m / step) * step


def twice(x, positions):
    return turn(turn(x, positions), positions)


def never(x, positions):
    return x


def dynamic(x, positions):
    """A base that grows with the length of this call."""
    length = max(positions.max() + 1, 256)
    base = 10000.0 * (4.0 * length / 256 - 3.0) ** (D / (D - 2))
    return turn(x, positions, powers(base))


def shards(count, local):
    """Each of so many devices rotates its part of a row with the positions of the first part, or counts from 0."""

    def change(positions):
        n = positions.shape[1]
        size = math.ceil(n / count)
        first = np.broadcast_to(np.arange(size), (len(positions), size)) if local else positions[:, :size]
        return np.concatenate([first] * count, axis=1)[:, :n]

    return at(change)


def zigzag(count):
    """Each of so many devices holds a chunk from the front and one from the back, and has positions for the first."""

    def change(positions):
        chunks = np.array_split(positions, 2 * count, axis=1)
        for i in range(count, 2 * count):
            chunks[i] = chunks[2 * count - 1 - i][:, : chunks[i].shape[1]]
        return np.concatenate(chunks, axis=1)

    return at(change)


# Softmax attention


def repeated(x, h):
    return np.repeat(x, h // x.shape[1], axis=1)


def products(q, k):
    return q @ k.swapaxes(-1, -2)


def scaled(q, k):
    return products(q, k) / math.sqrt(q.shape[-1])


def distance(n, m):
    """By how much each query is after each key; the queries are the last."""
    return np.arange(m - n, m)[:, None] - np.arange(m)


def seen_if(rule, value=-np.inf):
    def hide(s):
        return np.where(rule(distance(*s.shape[-2:])), s, value)

    return hide


causal = seen_if(lambda i: i >= 0)


def seen_by(rule, value=-np.inf):
    """By the places of the query and of the key."""

    def hide(s):
        n, m = s.shape[-2:]
        return np.where(rule(np.arange(m - n, m)[:, None], np.arange(m)), s, value)

    return hide


def whole_blocks(size):
    """The diagonal goes through blocks, which are not masked."""
    return seen_by(lambda i, j: i // size >= j // size)


def softmax(s, axis=-1):
    e = np.exp(s - s.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def empty_are_zeros(s):
    return np.nan_to_num(softmax(s))


def softmax_with(total):
    def soft(s):
        top = s.max(axis=-1, keepdims=True)
        e = np.exp(s - top)
        return e / total(e.sum(axis=-1, keepdims=True), top)

    return soft


def unstable(s):
    e = np.exp(s)
    return e / e.sum(axis=-1, keepdims=True)


def in_half(s):
    return softmax(s.astype(np.float16)).astype(np.float64)


def attention(
    turn_q=turn, turn_k=turn, turn_v=never, spread=repeated, score=scaled, hide=causal, soft=softmax, mix=np.matmul
):
    """A candidate of these parts."""

    def fn(q, k, v, positions=None):
        dtype, h = q.dtype, q.shape[1]
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        if positions is not None:
            q, k, v = turn_q(q, positions), turn_k(k, positions), turn_v(v, positions)
        with np.errstate(all="ignore"):
            return mix(soft(hide(score(q, spread(k, h)))), spread(v, h)).astype(dtype)

    return fn


def with_mask(
    combine=lambda s, seen: np.where(seen, s, -np.inf),
    mask_of=lambda mask: mask,
    together=np.logical_and,
    packed=True,
    soft=empty_are_zeros,
    score=scaled,
):
    """A candidate that takes a mask and segments."""

    def fn(q, k, v, mask=None, segments=None):
        dtype, h, n, m = q.dtype, q.shape[1], q.shape[2], k.shape[2]
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        seen = np.tril(np.ones((n, m), bool), m - n)
        if mask is not None:
            seen = together(seen, mask_of(mask))
        if segments is not None and packed:
            seen = seen & (segments[:, None, -n:, None] == segments[:, None, None, :])
        with np.errstate(all="ignore"):
            return (soft(combine(score(q, repeated(k, h)), seen)) @ repeated(v, h)).astype(dtype)

    return fn


def online(block=8, rescaled=("total", "out"), blocks=lambda m, block: -(-m // block), empty=0.0):
    """Keys by blocks, with a running maximum."""

    def fn(q, k, v):
        dtype, h, m = q.dtype, q.shape[1], k.shape[2]
        q, k, v = (x.astype(np.float64) for x in (q, repeated(k, h), repeated(v, h)))
        top, total, out = np.full(q.shape[:3], -np.inf)[..., None], np.zeros(q.shape[:3])[..., None], np.zeros(q.shape)
        s = causal(scaled(q, k))
        for i in range(blocks(m, block)):
            here = slice(i * block, (i + 1) * block)
            new = np.maximum(top, s[..., here].max(axis=-1, keepdims=True))
            with np.errstate(invalid="ignore"):
                p, old = np.nan_to_num(np.exp(s[..., here] - new)), np.nan_to_num(np.exp(top - new))
            total = (total * old if "total" in rescaled else total) + p.sum(axis=-1, keepdims=True)
            out = (out * old if "out" in rescaled else out) + p @ v[:, :, here]
            top = new
        with np.errstate(invalid="ignore"):
            return np.where(total == 0, empty, out / np.where(total == 0, 1, total)).astype(dtype)

    return fn


def queries_by_blocks(block):
    def fn(q, k, v):
        out = np.zeros(q.shape, q.dtype)
        for i in range(q.shape[2] // block):
            stop = k.shape[2] - q.shape[2] + (i + 1) * block
            here = slice(i * block, (i + 1) * block)
            out[:, :, here] = attention()(q[:, :, here], k[:, :, :stop], v[:, :, :stop])
        return out

    return fn


def alibi(slopes, sign=-1, before=False):
    """A bias by distance, added to the scores, or before they are scaled."""

    def score(q, k):
        bias = sign * np.array(slopes)[:, None, None] * np.abs(distance(q.shape[2], k.shape[2]))
        return (products(q, k) + bias) / math.sqrt(D) if before else scaled(q, k) + bias

    return {"score": score}


def capped(score=scaled, inside=20.0):
    return lambda q, k: 20.0 * np.tanh(score(q, k) / inside)


def exchanged(q, k, v):
    return attention()(q, v, k)


def causal_by_position(q, k, v, positions):
    seen = positions[:, None, :, None] >= positions[:, None, None, :]
    return attention(hide=lambda s: np.where(seen, s, -np.inf))(q, k, v, positions)


def first_row(fn):
    return lambda q, k, v, *more: fn(q, np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape), *more)


def transposed(fn):
    return lambda *x: fn(*x).swapaxes(1, 2)


def reshaped(fn):
    return lambda *x: fn(*x).swapaxes(1, 2).reshape(x[0].shape)


CAP, WINDOW, SINCE, SIDES = {"softcap": 20.0}, {"window": 7}, {"cache": True}, {"window": 7, "causal": False}
SOFTMAX = [
    ("scale missing", {}, attention(score=products)),
    ("scale missing", {}, with_mask(score=products)),  # what is right beside it, masks and segments, is predicted, too
    ("scale applied twice", {}, attention(score=lambda q, k: products(q, k) / D)),
    ("scale inverted", {}, attention(score=lambda q, k: products(q, k) * math.sqrt(D))),
    ("scale of another width", {}, attention(score=lambda q, k: products(q, k) / math.sqrt(4 * D))),
    ("scale of another width", {}, attention(score=lambda q, k: products(q, k) / math.sqrt(2 * D))),
    ("scale of another width", {}, attention(score=lambda q, k: products(q, k) / math.sqrt(D // 2))),
    ("scale ignored", {"scale": 0.3}, attention()),
    ("another scale", {}, attention(score=lambda q, k: 0.0711 * products(q, k))),
    ("softcap missing", CAP, attention()),
    ("softcap without the division", CAP, attention(score=capped(inside=1.0))),
    ("softcap without the factor", CAP, attention(score=lambda q, k: np.tanh(scaled(q, k) / 20))),
    ("softcap before the scale", CAP, attention(score=lambda q, k: capped(products)(q, k) / math.sqrt(D))),
    ("softcap by clipping", CAP, attention(score=lambda q, k: np.clip(scaled(q, k), -20, 20))),
    ("softcap after the mask", CAP, attention(hide=lambda s: 20.0 * np.tanh(causal(s) / 20.0))),
    ("another softcap", {}, attention(score=lambda q, k: 50 * np.tanh(scaled(q, k) / 50))),
    ("another softcap", {}, attention(score=lambda q, k: 6.5 * np.tanh(scaled(q, k) / 6.5))),
    ("another softcap", CAP, attention(score=lambda q, k: 30 * np.tanh(scaled(q, k) / 30))),
    ("ALiBi added", {}, attention(**alibi([1 / 4, 1 / 16, 1 / 64, 1 / 256]))),
    ("ALiBi added", {}, attention(**alibi([1 / 4, 1 / 16, 1 / 64, 1 / 256], sign=1))),
    ("ALiBi added", {}, attention(**alibi([1 / 4, 1 / 16, 1 / 64, 1 / 256], before=True))),
    ("ALiBi added", {"heads": 6}, attention(**alibi([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]))),
    ("not causal", {}, attention(hide=lambda s: s)),
    ("causal by mistake", {"causal": False}, attention()),
    ("causal from the top left", SINCE, attention(hide=lambda s: np.where(np.tri(*s.shape[-2:]), s, -np.inf))),
    ("sees the next token", {}, attention(hide=seen_if(lambda i: i >= -1))),
    ("does not see itself", {}, attention(hide=seen_if(lambda i: i > 0), soft=empty_are_zeros)),
    ("does not see itself", {}, attention(hide=seen_if(lambda i: i > 0))),
    ("does not see itself", {}, attention(hide=seen_if(lambda i: i > 0, -3e38))),
    *[("causal by blocks", {}, attention(hide=whole_blocks(size))) for size in (8, 64)],
    ("scale by the length", {}, attention(score=lambda q, k: products(q, k) / math.sqrt(k.shape[2]))),
    ("scale by the length", {}, attention(score=lambda q, k: products(q, k) / math.sqrt(q.shape[2]))),
    ("scale by the length", {}, attention(score=lambda q, k: scaled(q, k) * math.log(k.shape[2] + 1, 512))),
    ("window not asked for", {}, attention(hide=seen_if(lambda i: (i >= 0) & (i < 11)))),
    ("window not asked for", {}, attention(hide=seen_if(lambda i: (i >= 0) & (i < 100)))),
    ("window not asked for", {}, attention(hide=seen_if(lambda i: (i >= 0) & (i < 256)))),
    ("window ignored", WINDOW, attention()),
    ("window one too wide", WINDOW, attention(hide=seen_if(lambda i: (i >= 0) & (i <= 7)))),
    ("window one too wide", SIDES, attention(hide=seen_if(lambda i: (i <= 7) & (i >= -7)))),
    ("window one too wide", SIDES, attention(hide=seen_if(lambda i: (i <= 7) & (i >= -6)))),
    ("window one too wide", SIDES, attention(hide=seen_if(lambda i: (i <= 6) & (i >= -7)))),
    ("window one too narrow", WINDOW, attention(hide=seen_if(lambda i: (i >= 0) & (i < 6)))),
    ("window one too narrow", SIDES, attention(hide=seen_if(lambda i: (i <= 5) & (i >= -6)))),
    ("window doubled", WINDOW, attention(hide=seen_if(lambda i: (i >= 0) & (i < 14)))),
    ("window doubled", SIDES, attention(hide=seen_if(lambda i: np.abs(i) < 14))),
    ("window halved", WINDOW, attention(hide=seen_if(lambda i: (i >= 0) & (i <= 7 // 2)))),
    ("window halved", SIDES, attention(hide=seen_if(lambda i: np.abs(i) <= 7 // 2))),
    ("window halved", {"window": 8, "causal": False}, attention(hide=seen_if(lambda i: np.abs(i) <= 8 // 2))),
    *[("window with sinks", WINDOW, attention(hide=lambda s, sinks=sinks: np.where((distance(*s.shape[-2:]) >= 0) & ((distance(*s.shape[-2:]) < 7) | (np.arange(s.shape[-1]) < sinks)), s, -np.inf))) for sinks in (4, 1)],
    ("last partial block dropped", {}, online(16, blocks=lambda m, block: m // block)),
    ("last partial block dropped", {}, online(64, blocks=lambda m, block: m // block, empty=np.nan)),
    ("last partial block dropped", {}, queries_by_blocks(16)),
    ("finite mask value", {}, attention(hide=lambda s: s + np.where(distance(*s.shape[-2:]) < 0, -10000.0, 0.0))),
    ("empty rows are NaN", {}, with_mask(soft=softmax)),
    ("empty rows are uniform", {}, with_mask(combine=lambda s, seen: np.where(seen, s, -3e38))),
    ("mask ignored", {}, with_mask(mask_of=lambda mask: True)),
    ("mask inverted", {}, with_mask(mask_of=lambda mask: ~mask)),
    ("mask inverted", {}, with_mask(mask_of=lambda mask: ~mask, soft=softmax)),
    ("mask inverted", {}, with_mask(mask_of=lambda mask: ~mask, combine=lambda s, seen: np.where(seen, s, -3e38))),
    ("packed sequences see each other", {}, with_mask(packed=False)),
    ("softmax over queries", {}, attention(soft=lambda s: softmax(s, axis=-2))),
    ("softmax overflows", {}, attention(soft=unstable)),
    ("rescaling forgotten", {}, online(rescaled=("total",))),
    ("rescaling forgotten", {}, online(rescaled=("out",))),
    ("rescaling forgotten", {}, online(16, rescaled=())),
    ("one more in the denominator", {}, attention(soft=softmax_with(lambda total, top: 1 + total))),
    ("one more in the denominator", {}, attention(soft=softmax_with(lambda total, top: np.exp(0 - top) + total))),
    ("eps in the denominator", {}, attention(soft=softmax_with(lambda total, top: total + 0.05))),
    ("softmax in low precision", {}, attention(soft=in_half)),
    ("heads tiled", {}, attention(spread=lambda x, h: np.tile(x, (1, h // x.shape[1], 1, 1)))),
    ("heads mixed", {}, attention(spread=lambda x, h: np.repeat(x[:, :1], h, axis=1))),
    ("batch rows mixed", {}, first_row(attention())),
    ("batch rows mixed", {}, lambda q, k, v: attention()(q, np.broadcast_to(k[:1], k.shape), v)),
    ("keys and values exchanged", {}, exchanged),
    ("keys and values exchanged", {}, lambda q, k, v: attention()(q, k, k)),
    ("keys and values exchanged", {}, lambda q, k, v: attention()(q, v, v)),
    ("queries and keys exchanged", {"key_heads": 4}, lambda q, k, v: attention()(k, q, v)),
    ("mask of another row", {}, with_mask(mask_of=lambda mask: mask[:1])),
    ("mask instead of causality", {}, with_mask(together=lambda seen, mask: mask)),
    ("normaliser missing", {}, attention(soft=softmax_with(lambda total, top: 1.0))),
    ("causal by position", {"rope": ROPE}, causal_by_position),
    ("output transposed", {}, transposed(attention())),
    ("output transposed", {}, reshaped(attention())),
    ("wrong pairing", {"rope": ROPE}, attention(turn_k=turn_neighbours)),
    ("direction", {"rope": ROPE}, attention(turn_k=by(-powers()))),
    ("keys not rotated", {"rope": ROPE}, attention(turn_k=never)),
    ("queries not rotated", {"rope": ROPE}, attention(turn_q=never)),
    ("keys rotated twice", {"rope": ROPE}, attention(turn_k=twice)),
    ("queries rotated twice", {"rope": ROPE}, attention(turn_q=twice)),
    ("values rotated", {"rope": ROPE}, attention(turn_v=turn)),
    ("values rotated", {"rope": ROPE}, attention(turn_k=never, turn_v=turn)),
    ("queries one position off", {"rope": ROPE}, attention(turn_q=at(lambda m: m + 1))),
    ("queries one position off", {"rope": ROPE}, attention(turn_k=at(lambda m: m + 1))),
    ("attention factor not squared", {"rope": YARN}, attention(*(by(pyrope.frequencies(YARN), a) for a in (0.1 * math.log(8) + 1, 1.0)))),
]  # fmt: skip
# Both q and k rotated in one wrong way; the same mistakes in softmax and in linear attention.
BOTH = [
    ("float16 positions", ROPE, at(lambda m: m.astype(np.float16).astype(float))),
    ("bfloat16 positions", ROPE, at(lambda m: rounded_to(8, m))),
    ("not rotated", ROPE, never),
    ("rotated twice", ROPE, twice),
    ("whole head rotated", PARTIAL, by(powers(100.0))),
    ("half the width rotated", ROPE, by(powers(width=D // 2))),
    ("a quarter of the width rotated", ROPE, by(powers(width=D // 4))),
    ("wrong pairing", ROPE, turn_neighbours),
    ("direction", ROPE, by(-powers())),
    ("positions of a batch misread", ROPE, at(lambda m: np.broadcast_to(m[:1], m.shape))),
    ("wrong base", ROPE, by(powers(500000.0))),
    ("scaling ignored", YARN, by(powers())),
    ("length taken from each call", DYNAMIC, dynamic),
    ("positions ignored", ROPE, at(lambda m: np.broadcast_to(np.arange(m.shape[1]), m.shape))),
    ("positions local to the rank", ROPE, shards(2, False)),
    ("positions local to the rank", ROPE, shards(4, True)),
    ("positions of the first chunk repeated", ROPE, zigzag(2)),
    ("positions modulo a length", ROPE, at(lambda m: m % 1024)),
    ("positions modulo a length", ROPE, at(lambda m: np.broadcast_to(np.arange(m.shape[1]) % 16, m.shape))),
    ("table clamped at its end", ROPE, at(lambda m: np.minimum(m, 1024 - 1))),
]
SOFTMAX += [(name, {"rope": rope}, attention(wrong, wrong)) for name, rope, wrong in BOTH]
SOFTMAX += [("attention factor missing", {"rope": YARN}, attention(*[by(pyrope.frequencies(YARN))] * 2))]


# Caches


def cached(fn, positions=lambda new, old: new, keep=True):
    """Raw keys and all positions are kept, and everything is rotated in every call; earlier queries are of no account."""

    def begin():
        past = []

        def step(q, k, v, at):
            at = positions(at, past[2].shape[1] if past else 0)
            if past and keep:
                k, v, at = (
                    np.concatenate(x, axis=a)
                    for x, a in zip(zip(past, (k, v, at), strict=True), (2, 2, 1), strict=True)
                )
            past[:] = k, v, at
            n = q.shape[2]
            q = np.concatenate((np.zeros((*q.shape[:2], k.shape[2] - n, D), q.dtype), q), axis=2)
            return fn(q, k, v, at)[:, :, -n:]

        return step

    return begin


def again(kept, new, before, at):
    """The cache holds what this call rotated, and all of it is rotated in every call."""
    used = turn(np.concatenate((kept, new), axis=2), np.concatenate((before, at), axis=1))
    return used, used


def raw(kept, new, before, at):
    """Only the new keys are rotated, and the cache holds them as they came."""
    return np.concatenate((kept, turn(new, at)), axis=2), np.concatenate((kept, new), axis=2)


def cached_by(keys, attend):
    """The keys that are used and those that are kept, as `again` or `raw` has them."""

    def begin():
        past = []

        def step(q, k, v, at):
            features, values, before, rotated = past or (k[:, :, :0], v[:, :, :0], at[:, :0], k[:, :, :0])
            used, rotated = keys(rotated, attend.phi(k), before, at)
            past[:] = (
                np.concatenate((features, k), 2),
                np.concatenate((values, v), 2),
                np.concatenate((before, at), 1),
                rotated,
            )
            return attend(q, past[0], used, past[1], at)

        return step

    return begin


def restart(new, old):
    return new if not old else np.broadcast_to(np.arange(new.shape[1]), new.shape)


def count(new, old):
    return np.broadcast_to(np.arange(new.shape[1]), new.shape)


def late(new, old):
    return new + 1 if old else new


def caches(fn, attend):
    """Mistakes with a cache, in either kind of attention."""
    return [
        ("cache forgotten", cached(fn, keep=False)),
        ("cache positions restart", cached(fn, restart)),
        ("cache positions restart", cached(fn, count)),
        ("cache positions one too high", cached(fn, late)),
        ("cached keys rotated again", cached_by(again, attend)),
        ("cached keys not rotated", cached_by(raw, attend)),
    ]


def softmax_of_rotated(q, k, rotated, v, at):
    return attention()(turn(q.astype(np.float64), at), rotated, v).astype(q.dtype)


softmax_of_rotated.phi = lambda k: k.astype(np.float64)


# Linear attention


def elu_plus_one(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def lower(n, m):
    return np.tri(n, m, m - n)


def sums(q, k, see):
    return (products(q, k) * see).sum(axis=-1, keepdims=True)


def plain(q, k, turned_q, turned_k, see):
    return sums(q, k, see)


def linear(
    phi=elu_plus_one,
    turn_q=turn,
    turn_k=turn,
    turn_v=never,
    spread=repeated,
    see=lower,
    normaliser=plain,
    before=False,
    scales=(1, 1),
):
    """A candidate with all weights at once."""

    def fn(q, k, v, positions):
        dtype, h = q.dtype, q.shape[1]
        q, k, v = (x.astype(np.float64) for x in (q, spread(k, h), spread(v, h)))
        q, k = q * scales[0], k * scales[1]
        if before:
            turned_q, turned_k = q, k = phi(turn_q(q, positions)), phi(turn_k(k, positions))
        else:
            q, k = phi(q), phi(k)
            turned_q, turned_k = turn_q(q, positions), turn_k(k, positions)
        seen = see(q.shape[2], k.shape[2])
        with np.errstate(all="ignore"):
            total = normaliser(q, k, turned_q, turned_k, seen)
            total = np.where(seen.any(axis=-1, keepdims=True), total, 1)
            return (products(turned_q, turned_k) * seen @ turn_v(v, positions) / total).astype(dtype)

    return fn


def recurrent(kept=("S", "z"), chunk=10**9, decay=1.0, reset=True, stop=lambda n: n):
    """Token by token with a state S, z, of which some is kept after a chunk, and all at the end of a row."""

    def fn(q, k, v, positions):
        dtype, h = q.dtype, q.shape[1]
        q, k, v = (x.astype(np.float64) for x in (q, repeated(k, h), repeated(v, h)))
        q, k = elu_plus_one(q), elu_plus_one(k)
        turned_q, turned_k, out = turn(q, positions), turn(k, positions), np.zeros(q.shape)
        for head in range(h):
            for row in range(len(q)):
                if row == 0 or reset:
                    S, z = np.zeros((D, D)), np.zeros(D)
                for t in range(stop(q.shape[2])):
                    if t % chunk == 0 and t:
                        S, z = S * ("S" in kept), z * ("z" in kept)
                    S = decay * S + np.outer(turned_k[row, head, t], v[row, head, t])
                    z = decay * z + k[row, head, t]
                    out[row, head, t] = turned_q[row, head, t] @ S / (q[row, head, t] @ z)
        return out.astype(dtype)

    return fn


def stepwise(kept):
    """A state from call to call, of which a part is counted anew in every call."""

    def begin():
        state = [0.0, 0.0]

        def step(q, k, v, at):
            h, n = q.shape[1], q.shape[2]
            phi_q, phi_k, v = (
                elu_plus_one(q.astype(np.float64)),
                elu_plus_one(repeated(k, h).astype(np.float64)),
                repeated(v, h),
            )
            turned_q, turned_k, see = turn(phi_q, at), turn(phi_k, at), lower(n, n)
            S, z = (part if name in kept else 0.0 * part for name, part in zip("Sz", state, strict=True))
            out = products(turned_q, turned_k) * see @ v + (turned_q @ S if np.ndim(S) else 0)
            total = sums(phi_q, phi_k, see) + (phi_q @ z if np.ndim(z) else 0)
            state[:] = S + turned_k.swapaxes(-1, -2) @ v, z + phi_k.sum(axis=2)[..., None]
            return (out / total).astype(q.dtype)

        return step

    return begin


def linear_of_rotated(q, k, rotated, v, at):
    h = q.shape[1]
    phi_q, phi_k = elu_plus_one(q.astype(np.float64)), repeated(elu_plus_one(k.astype(np.float64)), h)
    see = lower(q.shape[2], k.shape[2])
    numerator = products(turn(phi_q, at), repeated(rotated, h)) * see @ repeated(v, h)
    return (numerator / sums(phi_q, phi_k, see)).astype(q.dtype)


linear_of_rotated.phi = lambda k: elu_plus_one(k.astype(np.float64))


def faded(decay):
    """What a query sees of a key, the less the longer ago it was."""
    return lambda n, m: lower(n, m) * decay ** np.maximum(distance(n, m), 0)


def over_heads(q, k, turned_q, turned_k, see):
    total = sums(q, k, see)
    return np.broadcast_to(total.sum(axis=1, keepdims=True), total.shape)


def chunks_without_the_last(size):
    """All whole chunks; what is left at the end is zeros."""
    return recurrent(stop=lambda n: n // size * size)


FACTOR = 0.1 * math.log(8) + 1
ROOT, FOURTH = D**-0.5, D**-0.25
LINEARLY = [
    ("denominator rotated", {}, linear(normaliser=lambda q, k, turned_q, turned_k, see: sums(turned_q, turned_k, see))),
    ("rotated before the feature map", {}, linear(before=True)),
    ("attention factor applied", {"rope": YARN}, linear(turn_q=by(pyrope.frequencies(YARN), FACTOR), turn_k=by(pyrope.frequencies(YARN), FACTOR))),
    ("normaliser missing", {}, linear(normaliser=lambda *x: 1.0)),
    ("normaliser summed over heads", {}, linear(normaliser=over_heads)),
    ("normaliser of all keys", {}, linear(normaliser=lambda q, k, turned_q, turned_k, see: sums(q, k, 1.0))),
    ("another feature map", {}, linear(phi=lambda x: np.maximum(x, 0))),
    ("another feature map", {}, linear(phi=lambda x: np.maximum(x, 0) ** 2)),
    ("another feature map", {}, linear(phi=np.exp)),
    ("another feature map", {}, linear(phi=lambda x: x)),
    ("another feature map", {}, linear(phi=lambda x: elu_plus_one(x) - 1)),
    ("another feature map", {}, linear(phi=lambda x: np.log(1 + np.exp(x)))),
    ("another feature map", {}, linear(phi=lambda x: 1 / (1 + np.exp(-x)))),
    ("another feature map", {}, linear(phi=lambda x: x / (1 + np.exp(-x)))),
    ("another feature map", {}, linear(phi=softmax)),
    ("another feature map", {}, linear(phi=lambda x: np.maximum(x, 0) + 0.01)),  # none that is known: read from weights
    ("another feature map", {}, linear(phi=lambda x: elu_plus_one(x) + 0.01)),
    ("another feature map", {}, linear(phi=lambda x: x**2)),
    ("scaled before the feature map", {}, linear(scales=(ROOT, 1))),
    ("scaled before the feature map", {}, linear(scales=(FOURTH, FOURTH))),
    ("scaled before the feature map", {}, linear(scales=(1, ROOT))),
    ("scaled before the feature map", {}, linear(scales=(ROOT, ROOT))),
    ("state not reset", {}, recurrent(reset=False)),
    ("state lost between chunks", {}, recurrent((), 16)),
    ("numerator lost between chunks", {}, recurrent(("z",), 16)),
    ("normaliser lost between chunks", {}, recurrent(("S",), 16)),
    ("state decays", {}, recurrent(decay=0.95)),
    ("state decays", {}, linear(see=faded(0.999), normaliser=lambda q, k, turned_q, turned_k, see: sums(q, k, see > 0))),
    ("direction", {}, linear(turn_k=by(-powers()))),
    ("last partial block dropped", {}, chunks_without_the_last(16)),
    ("eps in the denominator", {}, linear(normaliser=lambda q, k, turned_q, turned_k, see: sums(q, k, see) + 2e-5)),
    ("some values wrong", {}, linear(normaliser=lambda q, k, turned_q, turned_k, see: np.maximum(sums(q, k, see), 0.01))),
    ("eps in the denominator", {}, linear(normaliser=lambda q, k, turned_q, turned_k, see: sums(q, k, see) + 2.0)),
    ("keys and values exchanged", {}, lambda q, k, v, at: linear()(q, v, k, at)),
    ("queries and keys exchanged", {"key_heads": 4}, lambda q, k, v, at: linear()(k, q, v, at)),
    ("denominator at least 1", {}, linear(normaliser=lambda q, k, turned_q, turned_k, see: np.maximum(sums(q, k, see), 1))),
    ("causal by position", {}, lambda q, k, v, at: linear(see=lambda n, m: at[:, None, :, None] >= at[:, None, None, :])(q, k, v, at)),
    ("keys not rotated", {}, linear(turn_k=never)),
    ("queries not rotated", {}, linear(turn_q=never)),
    ("values rotated", {}, linear(turn_v=turn)),
    ("keys rotated twice", {}, linear(turn_k=twice)),
    ("queries rotated twice", {}, linear(turn_q=twice)),
    ("queries one position off", {}, linear(turn_q=at(lambda m: m + 1))),
    ("queries one position off", {}, linear(turn_k=at(lambda m: m + 1))),
    ("not causal", {}, linear(see=lambda n, m: np.ones((n, m)))),
    ("causal by mistake", {"causal": False}, linear()),
    ("does not see itself", {}, linear(see=lambda n, m: np.tri(n, m, m - n - 1))),
    ("sees the next token", {}, linear(see=lambda n, m: np.tri(n, m, m - n + 1))),
    ("heads tiled", {}, linear(spread=lambda x, h: np.tile(x, (1, h // x.shape[1], 1, 1)))),
    ("heads mixed", {}, linear(spread=lambda x, h: np.repeat(x[:, :1], h, axis=1))),
    ("batch rows mixed", {}, first_row(linear())),
    ("output transposed", {}, transposed(linear())),
    ("output transposed", {}, reshaped(linear())),
    ("sums in low precision", {}, linear(normaliser=lambda q, k, turned_q, turned_k, see: sums(q.astype(np.float16), k.astype(np.float16), see.astype(np.float16)))),
    ("causal by blocks", {}, linear(see=lambda n, m: np.arange(m - n, m)[:, None] // 16 >= np.arange(m) // 16)),
    ("keys and values exchanged", {}, lambda q, k, v, positions: linear()(q, k, k, positions)),
]  # fmt: skip
LINEARLY += [(name, {"rope": rope}, linear(turn_q=wrong, turn_k=wrong)) for name, rope, wrong in BOTH]


# The verdicts

STEPS = {"softmax": caches(attention(), softmax_of_rotated), "linear": caches(linear(), linear_of_rotated)}
STEPS["linear"] += [("normaliser not kept", stepwise("S")), ("numerator not kept", stepwise("z"))]


def test_there_is_one_by_hand_of_every_mistake():
    assert {name for name, *_ in SOFTMAX + STEPS["softmax"]} == ATTENTION.keys()
    assert {name for name, *_ in LINEARLY + STEPS["linear"]} - {"some values wrong"} == LINEAR.keys()


@pytest.mark.parametrize("rope", [None, ROPE])
def test_what_they_are_made_of_is_right(rope):
    options = SHAPE | {"head_dim": D, "rope": rope}
    begin = None if rope is None else cached(attention())
    assert check_attention(attention(), incremental=begin, **options).verdict == "right"
    if rope is None:
        assert check_attention(online(), **options).ok and check_attention(with_mask(), **options).ok
        return
    assert check_linear_attention(linear(), rope=rope, incremental=cached(linear()), **SHAPE).verdict == "right"
    rng, step, positions = np.random.default_rng(0), stepwise("Sz")(), np.arange(9) + np.zeros((2, 1), int)
    q, k, v = (rng.standard_normal((2, h, 9, D)) for h in (4, 2, 2))
    expected = linear()(q, k, v, positions)
    assert np.allclose(recurrent()(q, k, v, positions), expected, rtol=0, atol=1e-12)
    for here in (slice(0, 4), slice(4, 9)):
        out = step(*(x[:, :, here] for x in (q, k, v)), positions[:, here])
        assert np.allclose(out, expected[:, :, here], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name, options, fn", SOFTMAX)
def test_a_mistake_of_attention_made_by_hand_has_its_name(name, options, fn):
    report = check_attention(fn, **(SHAPE | {"head_dim": D} | options))
    assert report.faults == (name,), str(report)


@pytest.mark.parametrize("name, options, fn", LINEARLY)
def test_a_mistake_of_linear_attention_made_by_hand_has_its_name(name, options, fn):
    report = check_linear_attention(fn, **(SHAPE | {"rope": ROPE} | options))
    assert report.faults == (name,), str(report)


def padded_with_zeros(q, k, v, block=16):
    """Keys of zeros fill the last block, and take part."""
    more = ((0, 0), (0, 0), (0, -k.shape[2] % block), (0, 0))
    return attention(hide=lambda s: s)(q, np.pad(k, more), np.pad(v, more))


def after_the_softmax(q, k, v):
    return attention(hide=lambda s: s, soft=lambda s: softmax(s) * (distance(*s.shape[-2:]) >= 0))(q, k, v)


READ = {  # what no known mistake predicts: its name, and what the weights say
    "chunks": ("other keys seen", "seen: 8 by token 8 of row 0, head 0, expected 2 … 8", WINDOW,
               attention(hide=seen_by(lambda i, j: (j <= i) & (i // 8 == j // 8) & (i - j < 7)))),
    "every other key": ("other keys seen", "seen: 1 by token 1 of row 0, head 0, expected 0, 1; 1, 3, 5, 7, … by", {},
                        attention(hide=seen_by(lambda i, j: (j <= i) & ((i - j) % 2 == 0)))),
    "no key after the 128th": ("other keys seen", "seen: 0 … 127 by token 128", {},
                               attention(hide=seen_by(lambda i, j: (j <= i) & (j < 128)))),
    "prefix": ("not causal", "seen: 0 … 3 by token 0 of row 0, head 0, expected 0; 0 … 3 by token 2", {},
               attention(hide=seen_by(lambda i, j: (j <= i) | (j < 4)))),
    "reversed": ("not causal", "expected 0; 23 by token 23", {}, attention(hide=seen_by(lambda i, j: j >= i))),
    "window on both sides": ("window not asked for", "each query sees the 9 nearest keys alone", {"causal": False},
                             attention(hide=seen_if(lambda i: np.abs(i) < 9))),
    "sink": ("another normaliser", "the right ones times one number", {},
             attention(soft=softmax_with(lambda total, top: total + np.exp(1.7 - top)))),
    "mask after the softmax": ("another normaliser", ", 1 at token 23", {}, after_the_softmax),
    "mask of queries": ("other keys seen", 'question "mask"', {},
                        with_mask(mask_of=lambda mask: mask if mask.shape[2] < mask.shape[3] else mask.swapaxes(2, 3))),
    "zeros in the last block": ("some lengths wrong", "only multiples of 16 are right", {"causal": False},
                                padded_with_zeros),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_keys_that_are_seen_and_sums_that_divide_are_read_from_the_weights(name):
    fault, words, options, fn = READ[name]
    report = check_attention(fn, **(SHAPE | {"head_dim": D} | options))
    assert report.faults == (fault,) and words in report.findings[0].evidence, report


def test_padding_that_is_longer_than_a_block_is_tried():
    """A running maximum of −inf through the whole first block, and exp(−inf + inf) = NaN taken for 1."""

    def first_block(q, k, v, mask=None):
        out = with_mask()(q, k, v, mask)
        lost = False if mask is None else ~mask[..., :64].any(axis=-1)[..., None] & mask.any(axis=-1)[..., None]
        return np.where(lost, out / 2, out).astype(q.dtype)

    report = check_attention(first_block, head_dim=D)
    assert report.verdict == "wrong" and 'question "long padding"' in report.findings[0].evidence


def test_weights_by_the_logarithm_of_the_sum_are_right_in_float32():
    def fn(q, k, v):
        s = causal(scaled(q, repeated(k, q.shape[1])).astype(np.float32))
        return np.exp(s - np.logaddexp.reduce(s, axis=-1, keepdims=True)) @ repeated(v, q.shape[1])

    assert check_attention(fn, head_dim=D, **SHAPE).verdict == "right"


def test_of_linear_attention_numerator_and_normaliser_are_read_from_the_weights():
    def without_itself(q, k, turned_q, turned_k, see):
        return sums(q, k, see * (1 - np.eye(*see.shape) * (np.arange(see.shape[1]) > 0)))

    def numerator(q, k, v, positions):
        out = linear()(q, k, v, positions)
        own = linear(see=lambda n, m: np.eye(n, m), normaliser=lambda q, k, *more: sums(q, k, lower(*q.shape[2:3] * 2)))
        return out - own(q, k, v, positions)

    report = check_linear_attention(linear(normaliser=without_itself), rope=ROPE, **SHAPE)
    assert report.faults == ("another normaliser",) and "1 at token 0, " in report.findings[0].evidence
    report = check_linear_attention(numerator, rope=ROPE, **SHAPE)
    assert report.faults == ("other keys seen",) and "none by token 0 of" in report.findings[0].evidence


def test_how_scores_act_is_said():
    """Of what no known mistake is: softmax of normed vectors, and relu instead of exp."""

    def normed(q, k):
        return scaled(*(x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)))

    evidence = check_attention(attention(score=normed), head_dim=D).findings[0].evidence
    assert "beside one of 1, scores of -8, -4, -2, -1, 2, 4, 8 act as" in evidence and "1, 1, 1, expected" in evidence
    relu = attention(soft=lambda s: np.maximum(s, 0) / np.maximum(np.maximum(s, 0).sum(axis=-1, keepdims=True), 1e-9))
    assert "act as -inf, -inf, -inf, -inf, 1.693" in check_attention(relu, head_dim=D).findings[0].evidence


def test_outputs_that_are_a_multiple_are_said_to_be():
    for fn in (lambda *x: 1.001 * attention()(*x), lambda *x: attention()(*x) / 8):
        report = check_attention(lambda *x, fn=fn: fn(*x).astype(np.float32), head_dim=D)
        factor = "1.001" if fn(*np.ones((3, 1, 1, 1, D))).max() > 1 else "0.125"
        assert f"all outputs are the right ones times {factor}" in report.findings[0].evidence


@pytest.mark.parametrize("eps", [1e-6, 1e-8])
def test_a_small_eps_in_the_denominator_is_right(eps):
    added = linear(normaliser=lambda q, k, turned_q, turned_k, see: sums(q, k, see) + eps)
    bounded = linear(normaliser=lambda q, k, turned_q, turned_k, see: np.maximum(sums(q, k, see), eps))
    for fn in (added, bounded):
        assert check_linear_attention(fn, rope=ROPE, max_position=600).verdict == "right"


@pytest.mark.parametrize("kind, name, begin", [(kind, *case) for kind, listed in STEPS.items() for case in listed])
def test_a_mistake_with_a_cache_made_by_hand_has_its_name(kind, name, begin):
    if kind == "softmax":
        report = check_attention(attention(), rope=ROPE, incremental=begin, head_dim=D, **SHAPE)
    else:
        report = check_linear_attention(linear(), rope=ROPE, incremental=begin, **SHAPE)
    assert report.faults == (name,), str(report)
