"""Attention written out plainly, with all scores in memory, each step rightly or in one of the known wrong ways.

`Steps` and `LinearSteps` say how each step is done; the defaults are right, and call the definition. A mistake is a
change of some of them. That gives a broken candidate to test the oracle with, and, in float64, the numbers that a
candidate with this mistake must return. What is right is never taken from here, but from `truth`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import definition
from ..backend import Array, compute_dtype
from ..checks import MAX_POSITION
from ..theta import Rope
from .floats import to_bfloat16, to_float16
from .truth import Spec, exact_tables

_NARROW: dict[str, Callable[[Any], Any]] = {"float16": to_float16, "bfloat16": to_bfloat16}


@dataclass(frozen=True)
class Steps:
    """How softmax attention is done, step by step; the defaults are right."""

    scale: float = 1.0  # times the right one
    root: str = "right"  # or "keys", "queries": one over the root of their number, whatever is meant
    groups: str = "repeated"  # or "tiled", or "first": all read key head 0
    batch: str = "own"  # or "first": all rows read the keys of row 0
    exchanged: str = ""  # or "kv", keys as values and values as keys; "kk", "vv", one for both; "qk", where n = m
    rotated: str = "qk"  # each as often as it stands here
    rope: Rope | None = None  # instead of the right one
    key_rope: Rope | None = None  # the same, for the keys alone
    times: int = 1  # how often q and k are rotated
    factor: int = 2  # how often the attention factor enters a score
    positions: str = "given"  # or "counted": 0 … n−1, whatever is given; or "first": those of row 0 for all rows
    table: tuple[str, int] = ("long", 0)  # or "modulo" a length, "clamped" to it, "float16" or "bfloat16" numbers
    length: str = "fixed"  # or "of the call": a rope that depends on the length takes it from the largest position
    shards: tuple[str, int] = ("even", 1)  # how a row is split among so many ranks, one of SPLITS …
    local: tuple[str, ...] = ()  # … which use positions of their own where they "rotate", "mask", or both
    lag: int = 0  # added to the positions of queries
    causal: bool | None = None  # instead of the right one
    ahead: int = 0  # how many tokens of the future a query sees
    causality: str = "by order"  # or "by position", and the window, too
    diagonal: int = 1  # tokens of blocks that are seen as a whole if their first key is
    corner: str = "bottom right"  # or "top left"
    window: str = "kept"  # or "ignored"
    wider: tuple[int, int] = (0, 0)  # to the past, to the future
    near: int | None = None  # a window that is not meant
    sinks: int = 0  # so many first tokens are seen outside of the window, too
    dropped: tuple[str, int] = ("", 1)  # the "keys" or the "queries" of a last block shorter than this
    alibi: float = 0.0  # times the slope of a head and the distance, taken from the scores
    cap: float | None = None  # instead of the softcap that is meant, or of none
    softcap: str = "right"  # or "missing", "clipped", "after mask", "no division", "no product", "before scale"
    hidden: str = "−inf"  # or "added", −1e4 added; "filled", the lowest finite number
    empty: str = "zeros"  # or "NaN": rows that see nothing
    mask: str = "kept"  # or "ignored", "inverted"; "instead" of causality; "first": that of row 0 for all
    segments: str = "kept"  # or "ignored"
    axis: int = -1
    stable: bool = True  # the maximum is subtracted
    denominator: str = "plain"  # or "missing"
    added: float = 0.0  # to the denominator
    sink: bool = False  # a score of 0 more in the denominator
    online: tuple[str, int] = ("right", 0)  # or "total", "output" or "both" not rescaled after blocks of so many keys
    low: bool = False  # exponentials and their sum in low precision
    output: str = "right"  # or "transposed", "reshaped"
    # "restarted" after the first call, "counted" from 0 in every call, "late", "forgotten"; the keys kept from before
    # "turned" once more in every call, or "raw"; of linear attention, "numerator" or "denominator" not kept
    cache: str = "right"


@dataclass(frozen=True)
class Parts:
    """What `attend` went through, heads spread out: q, k, v as they were multiplied."""

    q: Array  # (b, h, n, d)
    k: Array  # (b, h, m, d)
    v: Array
    scores: Array  # (b, h, n, m), as they enter the softmax; of linear attention, 1/D, which multiplies products
    weights: Array
    out: Array  # (b, h, n, e), or as `Steps.output` says


def attend(
    spec: Spec,
    steps: Steps,
    q: Array,
    k: Array,
    v: Array,
    positions: Any = None,
    mask: Any = None,
    segments: Any = None,
    turns: Any = 1,
) -> Parts:
    """Softmax attention, Eq. (2): q (b, h, n, d), k and v (b, g, m, d), positions (b, m), mask (b, 1, n, m); turns (m,)
    is how often the keys of a cache are rotated."""
    work = compute_dtype("q", q)
    q, k, v = (x.astype(work) for x in (q, k, v))
    (_, h, n, _), m = q.shape, k.shape[-2]
    if steps.batch == "first":
        k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    k, v = _exchanged(steps, k, v)
    if spec.rope is not None:
        rope, places = _rope_of(steps, spec.rope, positions), _places(steps, positions, n, turns)
        with_factor = {"q": steps.factor > 0, "k": steps.factor > 1, "v": False}
        q, k, v = (
            _turned(steps, name, x, places[name], rope if with_factor[name] else rope.pure)
            for name, x in (("q", q), ("k", k), ("v", v))
        )
    k, v = (_spread(x, h, steps.groups) for x in (k, v))
    if steps.exchanged == "qk" and n == m:
        q, k = k, q
    with np.errstate(all="ignore"):
        scores = _scores(spec, steps, q, k, _seen(spec, steps, n, m, positions, mask, segments))
        weights = _softmax(spec, steps, scores)
        out = weights @ v  # Eq. (2)
    return Parts(q, k, v, scores, weights, _laid_out(steps, out))


def _exchanged(steps: Steps | LinearSteps, k: Array, v: Array) -> tuple[Array, Array]:
    """What is taken for the keys and for the values."""
    return {"kv": (v, k), "kk": (k, k), "vv": (v, v)}.get(steps.exchanged, (k, v))


def _laid_out(steps: Steps | LinearSteps, out: Array) -> Array:
    what, block = steps.dropped
    if what == "queries":
        out[..., out.shape[-2] // block * block :, :] = 0
    output = steps.output
    if output == "right":
        return out
    return out.swapaxes(1, 2) if output == "transposed" else out.swapaxes(1, 2).reshape(out.shape)


def _rope_of(steps: Steps | LinearSteps, rope: Rope, at: Array) -> Rope:
    """The rope that is used for tokens at (b, m) in the place of the right one."""
    rope = steps.rope or rope
    return rope if steps.length == "fixed" else rope.at(int(at.max()) + 1)


def _places(steps: Steps | LinearSteps, at: Array, n: int, turns: Any = 1) -> dict[str, Array]:
    """Where the n queries, the keys and the values are taken to be, when the m tokens are at (b, m). To turn a key
    several times is to turn it once at a multiple of its position."""
    m, (end, length) = at.shape[-1], steps.table
    if steps.positions == "counted":
        at = np.broadcast_to(np.arange(m), at.shape)
    at = np.broadcast_to(at[:1], at.shape) if steps.positions == "first" else at
    at = at[:, own_places(m, *steps.shards)] if "rotate" in steps.local else at
    at = at % length if end == "modulo" else np.minimum(at, length - 1) if end == "clamped" else at
    if end in _NARROW:
        at = np.minimum(_NARROW[end](at.astype(np.float64)), MAX_POSITION).astype(np.int64)
    return {"q": at[:, m - n :] + steps.lag, "k": at * turns, "v": at}


# Where the shards of m tokens begin and end: m·i/p, as long as they can be, and two ways to give away a remainder.
_CUTS: dict[str, Callable[[int, int], list[int]]] = {
    "even": lambda m, p: [m * i // p for i in range(p + 1)],
    "rounded up": lambda m, p: [min(-(-m // p) * i, m) for i in range(p + 1)],
    "first longer": lambda m, p: [m // p * i + min(i, m % p) for i in range(p + 1)],
    "last longer": lambda m, p: [*(m // p * i for i in range(p)), m],
}
# "striped" deals tokens out one by one; in a "zigzag" a rank has one of 2p chunks from the front and one from the back.
SPLITS = (*_CUTS, "striped", "zigzag, even", "zigzag, first longer")
REPEATED = ("first chunk, even", "first chunk, first longer")


def own_places(m: int, split: str, ranks: int) -> Array:
    """The place of each of m tokens within its rank's part, (m,): what a rank takes for a position if it counts its own
    tokens; of REPEATED, the positions of a rank's first chunk of a zigzag, for both of its chunks."""
    if split == "striped":
        return np.arange(m) // ranks
    kind, _, cut = split.rpartition(", ")
    cuts = np.array(_CUTS[cut](m, 2 * ranks if kind else ranks))
    within = np.arange(m) - np.repeat(cuts[:-1], np.diff(cuts))
    if not kind:
        return within
    chunk = np.repeat(np.arange(2 * ranks), np.diff(cuts))
    front = np.minimum(chunk, 2 * ranks - 1 - chunk)  # a rank's first chunk
    if split in REPEATED:
        return np.minimum(cuts[front] + within, m - 1)
    return within + np.where(chunk < ranks, 0, np.diff(cuts)[front])


def _turned(steps: Steps | LinearSteps, name: str, x: Array, at: Array, rope: Rope | None) -> Array:
    """q, k or v, rotated as often as the steps say, if they rotate it at all."""
    times = steps.times * steps.rotated.count(name)
    if rope is None or times == 0:
        return x
    if name == "k" and steps.key_rope is not None:
        rope = steps.key_rope if rope.attention_factor != 1.0 else steps.key_rope.pure
    at = at[:, None].astype(np.int64)
    tables = exact_tables(rope, at.tobytes(), at.shape, x.dtype)
    for _ in range(times):
        x = definition.rotate(x, *tables, *definition.pairs(rope.layout, rope.width, rope.start))
    return x


def _spread(x: Array, h: int, groups: str) -> Array:
    """Key heads (b, g, m, d) as (b, h, m, d), one for each query head."""
    if groups == "repeated":
        return definition.repeat_heads(x, h)
    return x[:, np.arange(h) % x.shape[1] if groups == "tiled" else np.zeros(h, int)]


def _seen(spec: Spec, steps: Steps, n: int, m: int, positions: Any, mask: Any, segments: Any) -> Array:
    """Which key each query sees, (n, m), or (b, 1, n, m)."""
    q_at, k_at = np.arange(n) + (m - n if steps.corner == "bottom right" else 0), np.arange(m)
    if "mask" in steps.local:
        places = own_places(m, *steps.shards)
        q_at, k_at = places[q_at], places
    if steps.causality == "by position" and positions is not None:
        q_at, k_at = positions[:, None, m - n :], positions[:, None]
    causal = spec.causal if steps.causal is None else steps.causal
    causal = causal and not (steps.mask == "instead" and mask is not None)
    seen = definition.visible(*_in_blocks(steps, q_at + steps.ahead, k_at), causal)
    if spec.window is not None and steps.window == "kept":
        distance, (past, future) = q_at[..., :, None] - k_at[..., None, :], steps.wider
        near = (distance < spec.window + past) & (causal | (-distance < spec.window + future))
        seen = seen & (near | (k_at[..., None, :] < steps.sinks))
    if steps.near is not None:
        seen = seen & (np.abs(q_at[..., :, None] - k_at[..., None, :]) < steps.near)
    if steps.dropped[0] == "keys":
        seen = seen & (np.arange(m) < m // steps.dropped[1] * steps.dropped[1])
    if mask is not None and steps.mask != "ignored":
        mask = mask[:1] if steps.mask == "first" else mask
        seen = seen & (mask == (steps.mask != "inverted"))
    if segments is not None and steps.segments == "kept":
        seen = seen & (segments[:, None, m - n :, None] == segments[:, None, None, :])
    return seen


def _in_blocks(steps: Steps | LinearSteps, q_at: Array, k_at: Array) -> tuple[Array, Array]:
    """The places that decide who sees whom: those of tokens, or of blocks."""
    return q_at // steps.diagonal, k_at // steps.diagonal


def _scores(spec: Spec, steps: Steps, q: Array, k: Array, seen: Array) -> Array:
    """What the softmax is taken of, (b, h, n, m)."""
    cap = spec.softcap if steps.cap is None else steps.cap
    right = {"keys": k.shape[-2] ** -0.5, "queries": q.shape[-2] ** -0.5}.get(steps.root, spec.scale)
    scale, bias = right * steps.scale, _alibi(steps, q.shape[1], seen.shape[-2:])
    if steps.hidden == "−inf" and (cap is None or steps.softcap in ("right", "missing")):
        return definition.attention_scores(q, k, seen, scale, cap if steps.softcap == "right" else None, bias)
    products = q @ k.swapaxes(-1, -2)
    scores = products * scale
    if cap is not None and steps.softcap == "before scale":
        scores = cap * np.tanh(products / cap) * scale
    elif cap is not None and steps.softcap in ("right", "no division", "no product"):
        inner, outer = (1.0 if steps.softcap == way else cap for way in ("no division", "no product"))
        scores = outer * np.tanh(scores / inner)
    elif cap is not None and steps.softcap == "clipped":
        scores = np.clip(scores, -cap, cap)
    scores = scores + bias
    if steps.hidden == "added":
        scores = scores + np.where(seen, 0, scores.dtype.type(-1e4))
    else:
        scores = np.where(seen, scores, -np.inf if steps.hidden == "−inf" else np.finfo(scores.dtype).min)
    return cap * np.tanh(scores / cap) if cap is not None and steps.softcap == "after mask" else scores


def _alibi(steps: Steps, h: int, shape: tuple[int, ...]) -> Any:
    """What ALiBi adds to the scores (h, n, m): −2^(−8/h), −2^(−16/h), … for each token further away. Where h is no
    power of two, the slopes of the next smaller one come first, then every other slope of the next greater one."""
    if not steps.alibi:
        return 0
    power = 2 ** (h.bit_length() - 1)
    exponents = [8 * (i + 1) / power for i in range(power)] + [8 * (i + 0.5) / power for i in range(h - power)]
    n, m = shape
    distance = np.arange(m - n, m)[:, None] - np.arange(m)
    return -steps.alibi * 2.0 ** -np.array(exponents)[:, None, None] * np.abs(distance)


def _blockwise(steps: Steps, scores: Array) -> Array:
    """The weights of an online softmax that forgets to rescale what it summed when it meets a greater score."""
    kept, block = steps.online
    m = scores.shape[-1]
    greatest = np.maximum.accumulate(scores, axis=-1)[..., np.minimum(np.arange(m) // block * block + block, m) - 1]
    none = greatest == -np.inf
    powers = np.exp(scores - np.where(none, 0, greatest))
    right = np.exp(scores - np.where(none, 0, greatest)[..., -1:])
    total = (powers if kept in ("total", "both") else right).sum(axis=-1, keepdims=True)
    return (powers if kept in ("output", "both") else right) / np.where(total == 0, 1, total)


def _softmax(spec: Spec, steps: Steps, scores: Array) -> Array:
    if steps.online[1]:
        return _blockwise(steps, scores)
    unusual = (steps.axis, steps.stable, steps.low, steps.empty, steps.added, steps.sink, steps.denominator)
    if unusual == (-1, True, False, "zeros", 0.0, False, "plain"):
        return definition.softmax(scores)
    work = scores.dtype
    if steps.low:
        scores = scores.astype(spec.low)
    top = scores.max(axis=steps.axis, keepdims=True) if steps.stable else scores.dtype.type(0)
    powers = np.exp(scores - np.where(np.isfinite(top.astype(work)), top, scores.dtype.type(0)))
    if steps.low:  # one after the other, each sum rounded
        total = np.add.accumulate(powers, axis=steps.axis).take([-1], axis=steps.axis)
    else:
        total = powers.sum(axis=steps.axis, keepdims=True)
    total = total + steps.added + (np.exp(-np.where(np.isfinite(top), top, 0)) if steps.sink else 0)
    if steps.empty == "zeros":
        total = np.where(total == 0, total.dtype.type(1), total)
    return (powers if steps.denominator == "missing" else powers / total).astype(work)


@dataclass(frozen=True)
class LinearSteps:
    """How linear attention is done, step by step; the defaults are Eq. (19)."""

    feature_map: str | None = None  # instead of the right one
    scaled: tuple[float, float] = (1.0, 1.0)  # q and k, before the map
    exchanged: str = ""  # as in Steps
    order: str = "map first"  # or "rotation first", "no rotation"
    rotated: str = "qk"
    times: int = 1
    rope: Rope | None = None  # instead of the right one
    key_rope: Rope | None = None  # as in Steps, and the next six
    positions: str = "given"
    table: tuple[str, int] = ("long", 0)
    length: str = "fixed"
    shards: tuple[str, int] = ("even", 1)
    local: tuple[str, ...] = ()
    lag: int = 0
    added: float = 0.0  # to the denominator
    dropped: tuple[str, int] = ("", 1)  # as in Steps
    denominator: str = "plain"  # or "rotated", "missing", "over heads", "of all keys", "at least 1"
    nothing: str = "NaN"  # what 0/0 is, where all features are 0; or "zeros"
    factor: bool = False  # whether the rope's attention factor enters
    causal: bool | None = None
    ahead: int = 0
    causality: str = "by order"  # as in Steps, and the next two
    diagonal: int = 1
    groups: str = "repeated"
    batch: str = "own"  # or "first", or "after another": a row begins with the state of the row before
    chunk: int | None = None  # after so many tokens …
    lost: str = ""  # … these sums are forgotten: "both", "numerator", "denominator"
    decay: float = 1.0  # of the state, for each token
    decaying: str = "both"  # sums, or the "numerator" alone
    output: str = "right"
    cache: str = "right"  # as in Steps


MAPS: dict[str, Callable[[Array], Array]] = {
    **definition.FEATURE_MAPS,
    "elu": lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1),
    "softplus": lambda x: np.logaddexp(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softmax": lambda x: np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True),
}


def attend_linearly(
    spec: Spec, steps: LinearSteps, q: Array, k: Array, v: Array, positions: Array, turns: Any = 1
) -> Parts:
    """Linear attention, Eq. (19), with all weights: q (b, h, n, d), k and v (b, g, m, d), positions (b, m); turns (m,)
    is how often the keys of a state are rotated."""
    work, phi, h, n = compute_dtype("q", q), MAPS[steps.feature_map or spec.feature_map], q.shape[1], q.shape[-2]
    q, k, v = (x.astype(work) for x in (q, k, v))
    if steps.batch == "first":
        k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    k, v = (_spread(x, h, steps.groups) for x in (k, v))
    k, v = _exchanged(steps, k, v)
    q, k = (k, q) if steps.exchanged == "qk" and n == k.shape[-2] else (q, k)
    q, k = (x if scale == 1 else x * scale for x, scale in zip((q, k), steps.scaled, strict=True))
    rope = None if spec.rope is None or steps.order == "no rotation" else _rope_of(steps, spec.rope, positions)
    rope = rope.pure if rope is not None and not steps.factor else rope
    places = _places(steps, positions, n, turns)

    def turned(name: str, x: Array) -> Array:
        return _turned(steps, name, x, places[name], rope)

    with np.errstate(all="ignore"):
        if steps.order == "rotation first":
            q, k = phi(turned("q", q)), phi(turned("k", k))
            turned_q, turned_k = q, k
        else:
            q, k = phi(q), phi(k)
            turned_q, turned_k = turned("q", q), turned("k", k)
        v = turned("v", v)
        kept = _kept(spec, steps, n, k.shape[-2], positions)
        scores = turned_q @ turned_k.swapaxes(-1, -2)
        plain = scores if steps.denominator == "rotated" else q @ k.swapaxes(-1, -2)
        total = (plain if steps.denominator == "of all keys" else plain * kept[1]).sum(axis=-1, keepdims=True)
        if steps.denominator == "over heads":
            total = np.broadcast_to(total.sum(axis=1, keepdims=True), total.shape)
        carried: Any = 0
        if steps.batch == "after another":
            carried = turned_q @ _before(turned_k.swapaxes(-1, -2) @ v)
            total = total + q @ _before(k.sum(axis=-2, keepdims=True).swapaxes(-1, -2))
        total = np.where(kept[1].any(axis=-1, keepdims=True), total + steps.added, 1)
        total = np.maximum(total, 1) if steps.denominator == "at least 1" else total
        total = np.where(total == 0, 1, total) if steps.nothing == "zeros" else total
        total = total if steps.denominator != "missing" else 1.0
        shares = kept[0] / total
        weights = scores * shares
        out = weights @ v + carried / total  # Eq. (19)
    return Parts(turned_q, turned_k, v, shares, weights, _laid_out(steps, out))


def _before(states: Array) -> Array:
    """The sum of the states of all rows before: (b, …) -> the same."""
    return np.cumsum(states, axis=0) - states


def _kept(spec: Spec, steps: LinearSteps, n: int, m: int, positions: Array) -> list[Array]:
    """How much each query sees of a key in the numerator and in the denominator: (n, m), or (b, 1, n, m), each."""
    i, j = np.arange(m - n, m), np.arange(m)
    by = (positions[:, None, m - n :], positions[:, None]) if steps.causality == "by position" else (i, j)
    causal = spec.causal if steps.causal is None else steps.causal
    seen = definition.visible(*_in_blocks(steps, by[0] + steps.ahead, by[1]), causal)
    here = np.ones((n, m), bool) if steps.chunk is None else i[:, None] // steps.chunk == j // steps.chunk
    if steps.dropped[0] == "keys":
        seen = seen & (j < m // steps.dropped[1] * steps.dropped[1])
    faded = np.float64(steps.decay) ** np.maximum(i[:, None] - j, 0) * seen
    sums = {"numerator": faded, "denominator": faded if steps.decaying == "both" else seen}
    parts = [x * here if steps.lost in ("both", part) else x for part, x in sums.items()]
    return [
        x * (j >= m - n) if steps.cache == part else x
        for part, x in zip(("numerator", "denominator"), parts, strict=True)
    ]


def run(spec: Spec, steps: Steps | LinearSteps, *arrays: Array, **options: Any) -> Parts:
    """Attention of the kind that the steps are of."""
    if isinstance(steps, Steps):
        return attend(spec, steps, *arrays, **options)
    return attend_linearly(spec, steps, *arrays, **options)


def candidate(spec: Spec, steps: Steps | LinearSteps) -> Callable[..., Array]:
    """A candidate for `check_attention` or `check_linear_attention` that takes these steps."""

    def fn(q: Array, k: Array, v: Array, positions: Any = None, mask: Any = None, segments: Any = None) -> Array:
        more = {"mask": mask, "segments": segments} if isinstance(steps, Steps) else {}
        return run(spec, steps, q, k, v, positions, **more).out.astype(q.dtype)

    return fn


def incremental(spec: Spec, steps: Steps | LinearSteps) -> Callable[[], Callable[..., Array]]:
    """Makes functions that remember keys, values and positions from call to call."""

    def begin() -> Callable[..., Array]:
        past: list[Array] = []
        turns = np.ones(0, np.int64)

        def step(q: Array, k: Array, v: Array, positions: Any = None) -> Array:
            nonlocal turns
            b, n = q.shape[0], q.shape[-2]
            at = np.zeros((b, n), np.int64) if positions is None else positions
            if steps.cache == "counted" or (past and steps.cache == "restarted"):
                at = np.broadcast_to(np.arange(n), at.shape)
            at = at + 1 if past and steps.cache == "late" else at
            if past and steps.cache != "forgotten":
                axes = zip(past, (k, v, at), (-2, -2, -1), strict=True)
                k, v, at = (np.concatenate((old, new), axis=axis) for old, new, axis in axes)
            past[:] = k, v, at
            turns = turns + 1 if steps.cache == "turned" else turns * (steps.cache != "raw")
            turns = np.concatenate((turns, np.ones(n, np.int64)))[-k.shape[-2] :]
            return run(spec, steps, q, k, v, at, turns=turns).out.astype(q.dtype)

        return step

    return begin
