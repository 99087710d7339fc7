"""What a model does (`forward`) and what it remembers (`Cache`).

Tokens and positions are host data. Order decides which tokens a token sees, positions decide only the rotation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .. import checks, definition, encodings, linear, softmax
from ..backend import Array, from_numpy, namespace, on_host
from ..layers import ACTIVATIONS, NORMS, Norm, embed, mlp, project
from ..linear import FEATURE_MAPS, LinearState
from ..rotation import Tables, rotation_tables, turn
from ..theta import Rope, frequencies
from .architecture import Config, LayerWeights, Model, Weights

Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Trace: TypeAlias = Callable[[str, Array], object]
_AHEAD = 256  # positions whose tables a cache makes at a time


class Cache:
    """What a model remembers of the tokens so far: keys and values by layer, or the states of linear attention.

    It is made for a number of sequences and a length; that length fixes Θ of the ropes that depend on one. `forward`
    appends to it; ``used`` says how many tokens it holds. A call that fails leaves it as it was.
    """

    def __init__(self, model: Model, length: int, batch: int = 1) -> None:
        config, like = checks.instance("model", model, Model).config, model.weights.embedding
        if not config.causal:
            raise ValueError("a cache needs a causal model: here a token also sees those after it")
        xp, shape = namespace(like), (checks.integer("batch", batch, 1), config.key_heads, length, config.head_dim)
        self.config, self.weights = config, model.weights  # whose keys and values it holds
        self.length, self.batch = checks.integer("length", length, 1), batch
        self.used = 0
        ropes = [layer.rope for layer in config.layers]
        self.ropes = [rope if rope is None or rope.theta_is_fixed else rope.at(length) for rope in ropes]
        softmax = config.attention == "softmax"
        try:  # pages of zeros that nobody has written to take no memory
            self.positions = np.zeros((batch, length), np.int64)
            self.segments = np.zeros((batch, length), np.int64)
            self.order = np.zeros((batch, length), np.int64)  # see `_Places`
            self.keys = [xp.zeros(shape, like.dtype) for _ in config.layers] if softmax else []
            self.values = [xp.zeros(shape, like.dtype) for _ in config.layers] if softmax else []
        except (MemoryError, ValueError):  # NumPy raises ValueError for sizes beyond any address
            size = 2 * len(config.layers) * math.prod(shape) * like.dtype.itemsize / 1e9
            raise ValueError(f"not enough memory: a cache for {length} tokens needs {size:.3g} GB") from None
        self.states: list[LinearState | None] = [None] * len(config.layers)
        self.tables: dict[Rope, Tables] = {}  # by rope, of the positions that come next

    def check(self, model: Model, batch: int, n: int) -> None:
        """Checks that the cache was made for this model, and that n more tokens fit."""
        if self.weights is not model.weights or self.config != model.config:
            raise ValueError("the cache was made for another model, dtype or backend: make one with Cache(model, …)")
        if batch != self.batch:
            raise ValueError(f"the cache was made for a batch of {self.batch}, tokens had {batch}")
        if self.used + n > self.length:
            level = f"it holds {self.used} of {self.length} tokens, and {n} more were given"
            raise ValueError(f"the cache is full: {level}; make a longer one")

    def tables_at(self, rope: Rope, start: int, n: int, like: Array) -> Tables:
        """The tables of n positions from start on; those of the positions after them are made with them, and kept."""
        kept = self.tables.get(rope)
        first = start if kept is None else int(kept.positions[0])
        if kept is None or start < first or start + n > first + len(kept.positions):
            last = min(start + max(n, _AHEAD), checks.MAX_POSITION + 1)
            first, kept = start, rotation_tables(range(start, last), rope, like)
            self.tables[rope] = kept
        return kept.part(slice(start - first, start - first + n))


@dataclass(frozen=True)
class _Places:
    """Where the tokens of a call stand, all (b, n) or (b, used + n) and on the host."""

    positions: Int64  # (b, n)
    segments: Int64  # (b, n)
    order: Int64  # (b, used + n): run·2·limit + index in the run, so that tokens of different runs are ≥ limit apart
    starts: np.ndarray[Any, np.dtype[np.bool_]]  # (b, n): a run begins
    limit: int  # more than any index in a run
    packed: bool  # whether there is more than one run in a row


def _rows(name: str, value: Any, shape: tuple[int, int]) -> Int64:
    """Integers (n,) or (b, n), as (b, n)."""
    given = checks.positions(name, on_host(value)).astype(np.int64)
    if given.shape not in (shape, shape[1:], (1, shape[1])):
        raise ValueError(f"{name} must have shape {shape[1:]} or {shape}, as the tokens, had {given.shape}")
    return np.broadcast_to(given, shape)


def _places(positions: Any, segments: Any, shape: tuple[int, int], cache: Cache | None) -> _Places:
    b, n = shape
    limit, used = (n, 0) if cache is None else (cache.length, cache.used)
    at = np.arange(n, dtype=np.int64)
    if cache is not None and used:  # the last sequence of each row continues
        before, order, last = cache.segments[:, :used], cache.order[:, :used], slice(used - 1, used)
        segment, index, position = before[:, last], order[:, last] % (2 * limit) + 1, cache.positions[:, last] + 1
    else:
        before = order = np.zeros((b, 0), np.int64)
        segment = index = position = np.zeros((b, 1), np.int64)
    own = np.broadcast_to(segment, shape) if segments is None else _rows("segments", segments, shape)
    every = np.concatenate((before, own), axis=1)
    begins = np.diff(every, axis=1, prepend=every[:, :1] - 1) != 0
    if segments is not None:
        for row, first in zip(every, begins, strict=True):
            if len(set(row[first].tolist())) < first.sum():
                raise ValueError("the tokens of a segment must stand together, and one came back after another segment")
    starts = begins[:, used:]
    # The index of each token in its run; a run that goes on from the cache goes on counting.
    since = np.maximum.accumulate(np.where(starts, at, -1), axis=1)
    fresh = since >= 0
    within = np.where(fresh, at - since, at + index)
    runs = np.cumsum(begins, axis=1)[:, used:] - 1
    if int(runs.max()) * 2 * limit + limit > checks.MAX_POSITION:
        raise ValueError(f"{int(runs.max()) + 1} segments of up to {limit} tokens are too many for one call")
    default = np.where(fresh, at - since, at + position)
    placed = default if positions is None else _rows("positions", positions, shape)
    if int(placed.max()) > checks.MAX_POSITION:
        raise ValueError(f"positions must lie within ±2^31, the last would be {placed.max()}")
    order = np.concatenate((order, runs * 2 * limit + within), axis=1)
    return _Places(placed, own, order, starts, limit, bool((runs > 0).any()))


def check_tokens(tokens: Any, vocabulary: int) -> Int64:
    """Ids on the host, (b, n), all in range: on a GPU, ids out of range would silently wrap around."""
    ids = checks.positions("tokens", on_host(tokens)).astype(np.int64)
    if ids.ndim not in (1, 2) or not ids.size:
        raise ValueError(f"tokens must have shape (n,) or (b, n) with one token at least, had {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"tokens must lie in 0 … {vocabulary - 1}, were from {ids.min()} to {ids.max()}")
    return ids.reshape(-1, ids.shape[-1])


def _resolved(rope: Rope | None, places: _Places) -> Rope | None:
    """The rope at the length of the sequences, for a call without a cache, which would fix the length."""
    if rope is None or rope.theta_is_fixed:
        return rope
    runs = zip(places.positions, places.starts, strict=True)
    ends = [np.maximum.reduceat(row, np.flatnonzero(first)).tolist() for row, first in runs]
    lengths = sorted({max(end, 0) + 1 for row in ends for end in row})
    fixed = [rope.at(length) for length in lengths]
    if any(not np.array_equal(frequencies(one), frequencies(fixed[-1])) for one in fixed):
        rule = f"the frequencies of {type(rope.scaling).__name__} depend on the length"
        raise ValueError(f"{rule}, and the sequences have different ones, {lengths}: give a Cache, which fixes it")
    return fixed[-1]


def _silent(name: str, array: Array) -> None:
    """What is called in place of a trace when there is none."""


_Attended: TypeAlias = tuple[Array, LinearState | None]


@dataclass(frozen=True)
class _Run:
    """What all layers of one call share: all that depends on positions is made once."""

    config: Config
    cache: Cache | None
    places: _Places
    tables: list[Tables | None]  # by layer; None where it has no rope
    rules: list[softmax.Rule]  # by layer; none in linear attention
    bias: Array | None  # of ALiBi, added to the scores: (b or 1, g, h/g, n, m)
    note: Trace
    states: list[LinearState | None]  # what linear attention leaves, layer by layer
    softmax: Callable[..., Array] = softmax.attend  # `pyrope.parallel` has its own for both
    linear: Callable[..., _Attended] | None = None


def forward(
    model: Model, tokens: Any, positions: Any = None, cache: Cache | None = None, trace: Trace | None = None, *,
    segments: Any = None, logits: str = "all",
) -> Array:  # fmt: skip
    """Logits (b, n, v) of tokens (b, n), or (n, v) of (n,).

    ``positions``, (n,) or (b, n), default to 0, 1, …, and with a ``cache`` they continue from its last.
    ``segments``, (n,) or (b, n), are integers; a token sees the tokens of its own segment alone, and positions begin
    anew with each. So they pack several sequences into a row, and padding is a segment of its own: -1, -1, 0, 0, 0.
    Without them, what comes after a cache belongs to its last segment.
    ``logits`` is "all", or "last" for those of the last token alone, (b, 1, v) or (1, v).
    ``trace(name, array)`` is called with a copy of every intermediate; ``{}.__setitem__`` collects them.
    """
    config, weights = checks.instance("model", model, Model).config, model.weights
    ids = check_tokens(tokens, config.vocabulary)
    checks.choice("logits", logits, ("all", "last"))
    if trace is not None and not callable(trace):
        raise TypeError(f"trace must be a function of a name and an array, was {type(trace).__name__}")
    if cache is not None:
        checks.instance("cache", cache, Cache).check(model, *ids.shape)
    places = _places(positions, segments, (ids.shape[0], ids.shape[1]), cache)
    ropes = cache.ropes if cache is not None else [_resolved(layer.rope, places) for layer in config.layers]
    x = _embedded(config, weights, ids, places.positions)
    note: Trace = _silent if trace is None else lambda name, array: trace(name, array.copy())
    note("embedding", x)
    run = _Run(
        config=config, cache=cache, places=places, tables=_tables(config, ropes, places, x, cache),
        rules=_rules(config, places), bias=_bias(config, cache, places, x), note=note, states=[],
    )  # fmt: skip
    for i, layer in enumerate(weights.layers):
        x = _block(run, i, layer, x)
    result = _head(config, weights, x if logits == "all" else x[:, -1:], note)
    xp = namespace(result)
    if xp is not np and bool(xp.isnan(result).any()):  # the one wait for the device: on the host it was seen on the way
        raise ValueError("logits must be finite, and some are NaN: scores or sums overflow, or weights are not finite")
    if cache is not None:  # only now, so that a call that fails leaves it as it was
        new = slice(cache.used, cache.used + ids.shape[1])
        cache.positions[:, new], cache.segments[:, new] = places.positions, places.segments
        cache.order[:, new] = places.order[:, cache.used :]
        cache.states, cache.used = run.states, new.stop
    return result if np.ndim(on_host(tokens)) == 2 else result[0]


def _norm(config: Config, norm: Norm, x: Array) -> Array:
    return NORMS[config.norm](x, norm, config.eps)


def _embedded(config: Config, weights: Weights, ids: Int64, positions: Int64) -> Array:
    """(b, n) -> (b, n, e)."""
    xp, x = namespace(weights.embedding), embed(weights.embedding, ids)
    if config.embedding_scale is not None:
        x *= config.embedding_scale
    if weights.embedding_bias is not None:
        x += weights.embedding_bias
    if config.encoding == "sinusoidal":
        x += from_numpy(encodings.sinusoidal(positions, config.width).astype(x.dtype), xp)  # Eq. (4)
    return x if weights.embedding_norm is None else _norm(config, weights.embedding_norm, x)


def _tables(
    config: Config, ropes: list[Rope | None], places: _Places, like: Array, cache: Cache | None = None
) -> list[Tables | None]:
    """The tables of `rotate`, computed once for all layers that share a rope."""
    ropes = [None if rope is None else rope.rotation_only if config.attention == "linear" else rope for rope in ropes]
    m = places.positions
    start = int(m[0, 0]) if m.size else 0  # a rank may hold no tokens
    m = m[:1] if len(m) > 1 and bool((m == m[:1]).all()) else m
    tables: dict[Rope, Tables] = {}
    for rope in dict.fromkeys(ropes):
        if rope is None:
            continue
        if cache is None or rope.axes is not None or not np.array_equal(m[0], range(start, start + m.size)):
            tables[rope] = rotation_tables(m, rope, like)
        else:
            tables[rope] = cache.tables_at(rope, start, m.size, like)
    return [None if rope is None else tables[rope] for rope in ropes]


def _rules(config: Config, places: _Places) -> list[softmax.Rule]:
    """Which keys each layer sees, and how its scores are computed, once for all layers with the same window."""
    if config.attention == "linear":
        return []
    n, m = places.positions.shape[1], places.order.shape[1]
    scale = 1 / math.sqrt(config.head_dim) if config.scale is None else config.scale
    every = places.order[:, None, None] if places.packed else np.arange(m)[None, None, None]

    def rule(window: int | None) -> softmax.Rule:
        if places.packed:  # runs are at least `limit` apart in this order: a window of that size keeps them apart
            window = min(window or places.limit, places.limit)
        reach = softmax.reach(config.causal, window)
        if n == 1 and not places.packed and (window is None or window >= m):
            reach = None  # a token that comes after all others sees them all
        return softmax.Rule(every[..., m - n :], every, reach, scale, config.softcap)

    rules = {window: rule(window) for window in {layer.window for layer in config.layers}}
    return [rules[layer.window] for layer in config.layers]


def _bias(config: Config, cache: Cache | None, places: _Places, like: Array) -> Array | None:
    """What ALiBi adds to the scores: (b, g, h/g, n, m), or (1, …) where all rows have the same positions."""
    if config.encoding != "alibi":
        return None
    own = places.positions
    every = own if cache is None else np.concatenate((cache.positions[:, : cache.used], own), axis=1)
    rows = 1 if bool((every == every[:1]).all()) else len(every)
    bias = np.empty((rows, config.heads, own.shape[1], every.shape[1]), like.dtype)
    slopes = encodings.alibi_slopes(config.heads)
    for row in range(rows):  # head by head: all heads at once, in float64, would take three times the memory
        one = encodings.alibi_bias(1, own[row], every[row])[0] / encodings.alibi_slopes(1)[0]
        for head, slope in enumerate(slopes):
            bias[row, head] = slope * one
    groups = (config.key_heads, config.heads // config.key_heads)
    return from_numpy(bias.reshape(rows, *groups, *bias.shape[-2:]), namespace(like))


def _block(run: _Run, i: int, weights: LayerWeights, x: Array) -> Array:
    """One layer: (b, n, e) -> the same."""
    config, note = run.config, run.note
    parallel, post = config.block == "parallel", config.block == "post-norm"
    read = x if post else _norm(config, weights.attention_norm, x)
    note(f"layers.{i}.norm", read)
    attended = _attention(run, i, weights, read)
    if weights.attention_post_norm is not None:
        attended = _norm(config, weights.attention_post_norm, attended)
    note(f"layers.{i}.attention", attended)
    if not parallel:
        x = attended + x
    if post:
        x = _norm(config, weights.attention_norm, x)
    if post or weights.mlp_norm is not None:
        read = x if post else _norm(config, weights.mlp_norm, x)  # type: ignore[arg-type]
    note(f"layers.{i}.mlp_norm", read)
    inner = mlp(read, weights.up, weights.down, config.activation, config.gated)
    if weights.mlp_post_norm is not None:
        inner = _norm(config, weights.mlp_post_norm, inner)
    note(f"layers.{i}.mlp", inner)
    inner += x
    if parallel:
        inner += attended
    if post and weights.mlp_norm is not None:
        inner = _norm(config, weights.mlp_norm, inner)
    note(f"layers.{i}.output", inner)
    return inner


def _attention(run: _Run, i: int, weights: LayerWeights, x: Array) -> Array:
    """Attention with its projections: x (b, n, e) -> (b, n, e)."""
    config = run.config
    (b, n, _), h, g, d = x.shape, config.heads, config.key_heads, config.head_dim
    heads = project(x, weights.qkv).reshape(b, n, h + 2 * g, d).swapaxes(1, 2)
    q, k, v = heads[:, :h], heads[:, h : h + g], heads[:, h + g :]
    if weights.q_norm is not None and weights.k_norm is not None:
        q[...], k[...] = _norm(config, weights.q_norm, q), _norm(config, weights.k_norm, k)
    for name, array in zip("qkv", (q, k, v), strict=True):
        run.note(f"layers.{i}.{name}", array)
    out = _attend_linearly(run, i, q, k, v) if config.attention == "linear" else _attend(run, i, heads)
    return project(out.swapaxes(1, 2).reshape(b, n, h * d), weights.out)


def _attend(run: _Run, i: int, heads: Array) -> Array:
    """Eq. (2) between the new queries and all keys so far; heads (b, h + 2g, n, d) are overwritten: (b, h, n, d)."""
    config, cache, n = run.config, run.cache, heads.shape[2]
    h, turning = config.heads, heads[:, : config.heads + config.key_heads]
    if (tables := run.tables[i]) is not None:
        turn(turning, tables, turning)  # Eq. (16)
    q, k, v = heads[:, :h], turning[:, h:], heads[:, h + config.key_heads :]
    if cache is not None:
        new, every = slice(cache.used, cache.used + n), slice(0, cache.used + n)
        cache.keys[i][:, :, new], cache.values[i][:, :, new] = k, v
        k, v = cache.keys[i][:, :, every], cache.values[i][:, :, every]
    if run.note is not _silent:
        run.note(f"layers.{i}.q_rotated", q)
        run.note(f"layers.{i}.k_rotated", k[:, :, -n:])
        run.note(f"layers.{i}.scores", _scores(run, i, q, k))
    return run.softmax(q, k, v, run.rules[i], run.bias)  # Eq. (2)


def _scores(run: _Run, i: int, q: Array, k: Array) -> Array:
    """The scores whose softmax is taken, by the definition: (b, h, n, m)."""
    xp, rule, bias = namespace(q), run.rules[i], run.bias
    low, high = rule.reach or (-np.inf, np.inf)
    distance = rule.q_at[:, 0, :, :, None] - rule.k_at[:, 0, :, None, :]
    mask = from_numpy((distance >= low) & (distance <= high), xp)
    added = 0 if bias is None else bias.reshape(len(bias), run.config.heads, *bias.shape[-2:])
    return definition.attention_scores(q, definition.repeat_heads(k, q.shape[1]), mask, rule.scale, rule.softcap, added)


def _attend_linearly(run: _Run, i: int, q: Array, k: Array, v: Array) -> Array:
    """Eq. (19) within each run: (b, h, n, d); the state of the last run of every row goes to the states of the call."""
    places, tables, state = run.places, run.tables[i], None if run.cache is None else run.cache.states[i]
    rule = linear.Rule(q.dtype, tables, run.config.feature_map)
    if places.starts[:, 1:].any() or (places.packed and places.starts.any()):
        out, state = _by_runs(run, rule, q, k, v, state)
    else:
        out, state = (run.linear or _linear)(run.config, q, k, v, state, rule)
    run.states.append(state)
    if run.note is not _silent:
        for name, x in (("q_rotated", q), ("k_rotated", k)):
            phi = FEATURE_MAPS[run.config.feature_map](x)
            run.note(f"layers.{i}.{name}", phi if tables is None else turn(phi, tables, namespace(phi).empty_like(phi)))
        if state is not None:
            run.note(f"layers.{i}.state", state.numerator)
    return out


@np.errstate(all="ignore")  # what is not finite is refused in the end
def _linear(config: Config, q: Array, k: Array, v: Array, state: LinearState | None, rule: linear.Rule) -> _Attended:
    out = namespace(q).empty(q.shape, q.dtype)
    if not config.causal:
        linear.read(q, linear.sums(k, v, rule), rule, out)
        return out, None
    s, z = linear.zeros(k, v, rule)
    if state is not None:
        s, z = state.numerator.copy(), state.denominator.copy()
    linear.step(q, k, v, (s, z), rule, out, linear.CHUNK)
    rope = None if rule.tables is None else rule.tables.rope
    return out, LinearState(s, z, q.shape[-2] + (state.count if state else 0), rope, config.feature_map)


def _by_runs(run: _Run, rule: linear.Rule, q: Array, k: Array, v: Array, state: LinearState | None) -> _Attended:
    """Linear attention has no mask: every run is attended to by itself, with a state of its own."""
    xp, places = namespace(q), run.places
    out, lasts = xp.empty(q.shape, q.dtype), []
    for row in range(len(q)):
        last, own = None, slice(row, row + 1)
        if state is not None:
            last = dataclasses.replace(state, numerator=state.numerator[own], denominator=state.denominator[own])
        edges = sorted({0, *np.flatnonzero(places.starts[row]).tolist(), q.shape[-2]})
        for a, b in zip(edges, edges[1:], strict=False):
            cut = (own, slice(None), slice(a, b))
            before = None if places.starts[row, a] else last
            out[cut], last = _linear(run.config, q[cut], k[cut], v[cut], before, _of_run(rule, row, slice(a, b)))
        lasts.append(last)
    states = [last for last in lasts if last is not None]
    if not states:
        return out, None
    sums = {name: xp.concatenate([getattr(x, name) for x in states]) for name in ("numerator", "denominator")}
    return out, dataclasses.replace(states[0], **sums)


def _of_run(rule: linear.Rule, row: int, tokens: slice) -> linear.Rule:
    """The rule with the tables of some tokens of one row."""
    if (tables := rule.tables) is None:
        return rule
    if tables.positions.ndim > 1:  # (b, n), or (1, n) where all rows have the same positions
        own = slice(row, row + 1) if len(tables.positions) > 1 else slice(0, 1)
        crossed = None if tables.crossed is None else tables.crossed[own]
        tables = Tables(tables.rope, tables.positions[own], tables.straight[own], crossed)
    return dataclasses.replace(rule, tables=tables.part(tokens))


def _head(config: Config, weights: Weights, x: Array, note: Trace) -> Array:
    """(b, n, e) -> (b, n, v)."""
    if weights.norm is not None:
        x = _norm(config, weights.norm, x)
        note("norm", x)
    if weights.head_dense is not None and weights.head_norm is not None:
        x = project(x, weights.head_dense)
        ACTIVATIONS[config.activation](namespace(x), x)
        x = _norm(config, weights.head_norm, x)
        note("head_norm", x)
    logits = project(x, weights.head)
    if config.logit_scale is not None:
        logits *= config.logit_scale
    if config.logit_softcap is not None:
        logits = config.logit_softcap * namespace(x).tanh(logits / config.logit_softcap)
    note("logits", logits)
    return logits
