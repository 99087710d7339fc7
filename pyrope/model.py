"""A transformer: what it is (`Config`), what it has learnt (arrays by name), what it does (`forward`, `generate`).

One block serves every architecture; its options are words in the `Config`. Tokens and positions are host data. Order
decides which tokens a token sees, positions decide only the rotation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from . import checks, definition, encodings, linear, softmax
from .backend import Array, from_numpy, namespace, on_host, to_numpy
from .layers import ACTIVATIONS, NORMS, Norm, Projection, by_rows, mlp, normalize, project
from .linear import FEATURE_MAPS, LinearState
from .rotation import Tables, rotation_tables, turn
from .theta import Rope

Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Trace: TypeAlias = Callable[[str, Array], object]
Attend: TypeAlias = Callable[[int, Array], Array]  # of layer i: q, k and v together, (b, h + 2g, n, d) -> (b, h, n, d)

_AHEAD = 64  # tokens: for so many to come a cache holds the tables

# ── What a model is, and what it has learnt ──────────────────────────────────────────────────────────────────────────

WORDS = {
    "norm": NORMS, "activation": tuple(ACTIVATIONS), "block": ("sequential", "parallel", "post-norm"),
    "encoding": ("rope", "none", "sinusoidal", "alibi"), "attention": ("softmax", "linear"),
    "feature_map": tuple(FEATURE_MAPS),
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """What may differ from layer to layer."""

    rope: Rope | None
    window: int | None = None  # how many tokens a token sees, itself included; None: all


@dataclass(frozen=True)
class Config:
    """What a model is. Numbers have no defaults, and every option is off by default."""

    vocabulary: int  # v
    width: int  # e
    heads: int  # h
    key_heads: int  # g, which divides h
    head_dim: int  # d
    mlp_width: int  # f
    layers: tuple[Layer, ...]
    norm: str  # "rms" or "layer"
    eps: float  # ε of all norms
    activation: str  # one of layers.ACTIVATIONS
    gated: bool  # act(gate(x))·up(x) instead of act(up(x))
    block: str  # x + attend(norm(x)), then x + mlp(norm(x)); both "parallel" from x; or "post-norm": norm(x + …)
    causal: bool
    encoding: str = "rope"  # of positions; with "none", "sinusoidal" and "alibi" no layer has a rope
    attention: str = "softmax"  # or "linear", Eq. (19)
    feature_map: str = "elu+1"  # of linear attention
    scale: float | None = None  # of scores; None: 1/√d
    softcap: float | None = None  # of scores
    logit_softcap: float | None = None
    logit_scale: float | None = None
    embedding_scale: float | None = None
    tied: bool = False  # the head is the embedding
    norm_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False  # a norm of every query and key before it is rotated
    post_norms: bool = False  # one more norm of what attention and MLP return
    one_norm: bool = False  # in a parallel block, attention and MLP read the same norm
    embedding_norm: bool = False
    embedding_bias: bool = False  # added to every embedding
    head_dense: bool = False  # before the head a projection, the activation and a norm, as BERT has it

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # as Python numbers: sizes in int8 would wrap around when multiplied
            value = _RULES[str(field.type)](field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        encoding, block = self.encoding, self.block
        sizes = {layer.rope.head_dim for layer in self.layers if layer.rope is not None}
        scored = {"scale": self.scale, "softcap": self.softcap, "ALiBi": encoding == "alibi"}
        scored["windows"] = any(layer.window for layer in self.layers)
        unused = ", ".join(name for name, value in scored.items() if value and self.attention == "linear")
        rules = (
            (self.heads % self.key_heads, f"key_heads must divide heads, {self.heads}, was {self.key_heads}"),
            (self.one_norm and block != "parallel", f'one_norm goes with block "parallel", was {block!r}'),
            (self.post_norms and block == "post-norm", 'post_norms go with blocks "sequential" and "parallel"'),
            (sizes - {self.head_dim}, f"ropes must have head_dim {self.head_dim}, as the model, had {sorted(sizes)}"),
            (sizes and encoding != "rope", f"with encoding {encoding!r} layers have no rope: use with_encoding"),
            (not sizes and encoding == "rope", 'encoding "rope" needs a layer with a rope: else it is "none"'),
            (encoding == "sinusoidal" and self.width % 2, f"width must be even for sines, was {self.width}"),
            (unused, f"linear attention has no scores, so that {unused} would have no effect"),
        )
        for broken, message in rules:
            if broken:
                raise ValueError(message)

    @property
    def score_scale(self) -> float:
        return self.scale or 1 / math.sqrt(self.head_dim)

    def with_encoding(self, encoding: str) -> Config:
        """The same model with another encoding of positions in place of RoPE, for comparison."""
        checks.choice("encoding", encoding, WORDS["encoding"][1:])
        layers = tuple(dataclasses.replace(layer, rope=None) for layer in self.layers)
        return dataclasses.replace(self, encoding=encoding, layers=layers)


def _checked_layers(name: str, value: Any) -> tuple[Layer, ...]:
    if not isinstance(value, tuple) or not value or not all(isinstance(layer, Layer) for layer in value):
        raise TypeError(f"layers must be a tuple of at least one Layer, was {value!r}")
    for i, layer in enumerate(value):
        if layer.window is not None:
            checks.integer(f"layers[{i}].window", layer.window, 1)
        if layer.rope is not None and checks.instance(f"layers[{i}].rope", layer.rope, Rope).axes is not None:
            raise ValueError(f"layers[{i}].rope has several axes of positions, a model of text has one")
    return value


_RULES: dict[str, Callable[[str, Any], Any]] = {  # by the annotation of a field
    "int": partial(checks.integer, least=1, most=checks.MAX_POSITION),
    "str": lambda name, value: checks.choice(name, value, WORDS[name]),
    "bool": checks.flag,
    "float": partial(checks.real, low=0),
    "float | None": lambda name, value: None if value is None else checks.real(name, value, 0, open=True),
    "tuple[Layer, ...]": _checked_layers,
}


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The name and shape of every array that a model of this config has learnt."""
    e, d, f = checks.instance("config", config, Config).width, config.head_dim, config.mlp_width
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocabulary, e)}

    def add(name: str, *shape: int, bias: bool = config.norm_bias, exists: bool = True) -> None:
        shapes.update({f"{name}.weight": shape} if exists else {})
        shapes.update({f"{name}.bias": shape[:1]} if exists and bias else {})

    add("embedding_norm", e, exists=config.embedding_norm)
    shapes.update({"embedding_bias": (e,)} if config.embedding_bias else {})
    for i in range(len(config.layers)):
        layer = f"layers.{i}."
        add(layer + "attention_norm", e)
        # The heads of the queries, the keys, the values; in a gated MLP the gate comes before what goes up.
        add(layer + "qkv", (config.heads + 2 * config.key_heads) * d, e, bias=config.qkv_bias)
        add(layer + "q_norm", d, exists=config.qk_norm)
        add(layer + "k_norm", d, exists=config.qk_norm)
        add(layer + "out", e, config.heads * d, bias=config.out_bias)
        add(layer + "attention_post_norm", e, exists=config.post_norms)
        add(layer + "mlp_norm", e, exists=not config.one_norm)
        add(layer + "up", 2 * f if config.gated else f, e, bias=config.mlp_bias)
        add(layer + "down", e, f, bias=config.mlp_bias)
        add(layer + "mlp_post_norm", e, exists=config.post_norms)
    add("norm", e, exists=config.block != "post-norm")
    add("head_dense", e, e, bias=True, exists=config.head_dense)
    add("head_norm", e, exists=config.head_dense)
    shapes.update({} if config.tied else {"head.weight": (config.vocabulary, e)})
    shapes.update({"head.bias": (config.vocabulary,)} if config.head_bias else {})
    return shapes


def misfits(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is missing, unexpected or of another shape."""
    wrong = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in actual]
    wrong += [f"unexpected: {name} {shape}" for name, shape in actual.items() if name not in expected]
    both = [(name, actual[name], shape) for name, shape in expected.items() if name in actual]
    return wrong + [f"{name} has shape {own}, not {shape}" for name, own, shape in both if own != shape]


@dataclass(frozen=True, eq=False)
class Model:
    """A config, and the arrays that `weight_shapes` lists, all float32 or all float64."""

    config: Config
    weights: Mapping[str, Array]

    def __post_init__(self) -> None:
        expected, arrays = weight_shapes(self.config), dict(self.weights)
        object.__setattr__(self, "weights", arrays)  # a copy, which later changes of the caller's do not reach
        if arrays:
            namespace(**arrays)
        if wrong := misfits(expected, {name: tuple(array.shape) for name, array in arrays.items()}):
            raise ValueError("weights do not fit the config: " + "; ".join(wrong))
        dtypes = {array.dtype for array in arrays.values()}
        if len(dtypes) > 1 or not dtypes <= {np.dtype("f4"), np.dtype("f8")}:
            raise TypeError(f"weights must all be float32 or all float64, were {', '.join(sorted(map(str, dtypes)))}")

    def norm(self, name: str, x: Array) -> Array:
        """x normalised, (…, e) -> the same; x itself if the model has no norm of this name."""
        weight, bias = self.weights.get(f"{name}.weight"), self.weights.get(f"{name}.bias")
        norm, config = Norm(weight, bias), self.config
        return x if weight is None else normalize(x, norm, config.eps, centred=config.norm == "layer")

    def projection(self, name: str) -> Projection:
        return Projection(self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def random_model(config: Config, seed: int, backend: str | ModuleType = "numpy", dtype: str = "float32") -> Model:
    """A model with weights drawn at random, of the size that keeps activations near 1."""
    rng, target = np.random.default_rng(checks.integer("seed", seed, 0)), check_dtype(dtype)

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        noise = rng.standard_normal(shape) / (math.sqrt(shape[1]) if len(shape) == 2 and name != "embedding" else 10)
        return from_numpy((noise + name.endswith("norm.weight")).astype(target), backend)

    return Model(config, {name: draw(name, shape) for name, shape in weight_shapes(config).items()})


def check_dtype(name: Any) -> np.dtype[Any]:
    """The dtype of this name, which must be one that models are computed in."""
    return np.dtype(str(checks.choice("dtype", name, ("float32", "float64"))))


# ── What it remembers, and what it does ──────────────────────────────────────────────────────────────────────────────


class Cache:
    """What a model remembers of the tokens so far: keys and values by layer, or the states of linear attention.

    It is made for a number of sequences and a length; that length fixes Θ of the ropes that depend on one. `forward`
    appends to it; ``used`` says how many tokens it holds. A call that fails leaves it as it was.
    """

    def __init__(self, model: Model, length: int, batch: int = 1) -> None:
        config, like = checks.instance("model", model, Model).config, model.weights["embedding"]
        if not config.causal:
            raise ValueError("a cache needs a causal model: here a token also sees those after it")
        self.length, self.batch = checks.integer("length", length, 1, checks.MAX_POSITION), checks.size("batch", batch)
        self.model, self.used = model, 0
        self.ropes = fixed_ropes(config, length)
        self.states: list[LinearState | None] = [None] * len(config.layers)
        self.ahead: tuple[int, list[Tables | None]] = 0, []  # the tables of some positions from the first on

        xp, shape = namespace(like), (batch, config.key_heads, length, config.head_dim)
        stored = config.layers if config.attention == "softmax" else ()
        # Pages of zeros that nobody has written to take no memory.
        self.positions, self.segments = np.zeros((2, batch, length), np.int64)
        self.keys, self.values = ([xp.zeros(shape, like.dtype) for _ in stored] for _ in "kv")

    def check(self, model: Model, batch: int, n: int) -> None:
        """Checks that the cache was made for this model, and that n more tokens fit."""
        another = "another model" if model is not self.model else f"a batch of {self.batch} and not of {batch}"
        if model is not self.model or batch != self.batch:
            raise ValueError(f"the cache was made for {another}: make one with Cache(model, …)")
        if self.used + n > self.length:
            level = f"it holds {self.used} of {self.length} tokens, and {n} more were given"
            raise ValueError(f"the cache is full: {level}; make a longer one")


def forward(
    model: Model, tokens: Any, positions: Any = None, cache: Cache | None = None, trace: Trace | None = None, *,
    segments: Any = None, logits: str = "all",
) -> Array:  # fmt: skip
    """Logits (b, n, v) of tokens (b, n), or (n, v) of (n,).

    ``positions``, (n,) or (b, n), default to 0, 1, …, and with a ``cache`` they continue from its last.
    ``segments``, (n,) or (b, n), are integers; a token sees the tokens of its own segment alone, and positions begin
    anew with each. So they pack several sequences into a row, and padding is a segment of its own: -1, -1, 0, 0, 0.
    Without them, what comes after a cache belongs to its last segment. Linear attention, which has no scores to mask,
    takes none.
    ``logits`` is "all", or "last" for those of the last token alone, (b, 1, v) or (1, v).
    ``trace(name, array)`` is called with a copy of every intermediate; ``{}.__setitem__`` collects them.
    """
    config = checks.instance("model", model, Model).config
    ids, last = check_tokens(tokens, config.vocabulary), checks.choice("logits", logits, ("all", "last")) == "last"
    if cache is not None:
        checks.instance("cache", cache, Cache).check(model, *ids.shape)
    m, own, together = _places(config, positions, segments, ids, cache)
    x = embedded(model, ids, m)
    note = _silent if trace is None else lambda name, array: trace(name, array.copy())
    note("embedding", x)
    ropes = fixed_ropes(config, max(int(m.max()), 0) + 1) if cache is None else cache.ropes
    mask, tables = _mask(config, m, together, cache, x), rotations(config, ropes, m, x, cache)
    total = ids.shape[1] + (0 if cache is None else cache.used)
    rules = {window: _score_rule(config, window, ids.shape[1], total) for window in {x.window for x in config.layers}}
    attention = _Attention(config, cache, tables, mask, note, rules, [])
    result = layers_and_head(model, x, attention, note, last)
    if cache is not None:  # only now, so that a call that fails leaves it as it was
        new = slice(cache.used, cache.used + ids.shape[1])
        cache.positions[:, new], cache.segments[:, new] = m, own
        cache.states, cache.used = attention.states, new.stop
    return result if np.ndim(on_host(tokens)) == 2 else result[0]


def check_tokens(tokens: Any, vocabulary: int) -> Int64:
    """Ids on the host, (b, n), all in range: on a GPU, ids out of range would silently wrap around."""
    ids = checks.positions("tokens", on_host(tokens)).astype(np.int64)
    if ids.ndim not in (1, 2) or not ids.size:
        raise ValueError(f"tokens must have shape (n,) or (b, n) with at least one token, had {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"tokens must lie in 0 … {vocabulary - 1}, were from {ids.min()} to {ids.max()}")
    return ids.reshape(-1, ids.shape[-1])


def rows(name: str, value: Any, like: Int64) -> Int64:
    """Integers (n,) or (b, n), as (b, n)."""
    given = checks.positions(name, on_host(value)).astype(np.int64)
    if given.shape not in (like.shape, like.shape[1:], (1, like.shape[1])):
        raise ValueError(f"{name} must have shape {like.shape[1:]} or {like.shape}, as the tokens, had {given.shape}")
    return np.broadcast_to(given, like.shape)


def _places(config: Config, positions: Any, segments: Any, ids: Int64, cache: Cache | None) -> tuple[Any, ...]:
    """Positions and segments (b, n), and which tokens so far belong to the same segment, (b, n, used + n) or None."""
    (b, n), used = ids.shape, 0 if cache is None else cache.used
    before = np.zeros((b, 0), np.int64) if cache is None else cache.segments[:, :used]
    last = before[:, -1:] if used else np.zeros((b, 1), np.int64)
    own = np.broadcast_to(last, ids.shape) if segments is None else rows("segments", segments, ids)
    every, together = np.concatenate((before, own), axis=1), None
    follows = np.zeros((b, 1), np.int64) if cache is None or not used else cache.positions[:, used - 1 : used] + 1
    default = follows + np.arange(n)
    if (every != every[:, :1]).any():
        if config.attention == "linear":
            raise ValueError("linear attention has no scores to mask: give it one segment at a time")
        if any(len(np.unique(row)) <= np.count_nonzero(np.diff(row)) for row in every):
            raise ValueError("the tokens of a segment must be adjacent, but one segment goes on after another")
        together = own[:, :, None] == every[:, None, :]
        first = together.argmax(axis=2)  # where a token's segment begins
        default = np.where(first < used, default, np.arange(used, used + n) - first)
    m = default if positions is None else rows("positions", positions, ids)
    if int(m.max()) > checks.MAX_POSITION:
        raise ValueError(f"positions must lie within ±2^31, the last would be {m.max()}")
    return m, own, together


def fixed_ropes(config: Config, length: int) -> list[Rope | None]:
    """The ropes of all layers, at this length where they depend on one."""
    ropes = (layer.rope for layer in config.layers)
    return [rope if rope is None or rope.theta_is_fixed else rope.at(length) for rope in ropes]


def rotations(
    config: Config, ropes: list[Rope | None], positions: Int64, like: Array, cache: Cache | None = None
) -> list[Tables | None]:
    """The tables of every layer, made once for all that share a rope; linear attention has no attention factor."""
    m = positions[:1] if (positions == positions[:1]).all() else positions
    if cache is None or m.size > 1:
        pure = [rope.rotation_only if rope is not None and config.attention == "linear" else rope for rope in ropes]
        tables = {rope: rotation_tables(m, rope, like) for rope in set(pure) if rope is not None}
        return [None if rope is None else tables[rope] for rope in pure]
    start, ahead = cache.ahead
    if not 0 <= (row := int(m[0, 0]) - start) < _AHEAD or not ahead:  # the tables of the tokens to come, at once
        start, row = int(m[0, 0]), 0
        next_ones = np.minimum(np.arange(start, start + _AHEAD), checks.MAX_POSITION)[None]
        cache.ahead = start, ahead = start, rotations(config, ropes, next_ones, like)
    parts = {id(table): table.part(slice(row, row + 1)) for table in ahead if table is not None}
    return [None if table is None else parts[id(table)] for table in ahead]


def _mask(config: Config, m: Int64, together: Any, cache: Cache | None, like: Array) -> Array | None:
    """What hides keys of other segments, bool (b, 1, 1, n, t), or what ALiBi adds to scores, (b or 1, g, h/g, n, t)."""
    if config.encoding != "alibi":
        return None if together is None else from_numpy(together[:, None, None], namespace(like))
    every = m if cache is None else np.concatenate((cache.positions[:, : cache.used], m), axis=1)
    count = 1 if together is None and (every == every[:1]).all() else len(m)
    biases = [encodings.alibi_bias(config.heads, m[row], every[row]).astype(like.dtype) for row in range(count)]
    bias = np.stack(biases) if together is None else np.where(together[:, None], np.stack(biases), -math.inf)
    groups = config.key_heads, config.heads // config.key_heads
    return from_numpy(bias.reshape(count, *groups, *bias.shape[2:]), namespace(like))


# ── The pass itself: arguments are not checked, and `pyrope.parallel` calls it with an attention of its own ──────────


def _silent(name: str, array: Array) -> None:
    """What is called in place of a trace when there is none."""


def embedded(model: Model, ids: Int64, positions: Int64) -> Array:
    """(b, n) -> (b, n, e)."""
    config, table, xp = model.config, model.weights["embedding"], namespace(model.weights["embedding"])
    x = xp.take(table, from_numpy(ids, xp), axis=0)
    if config.embedding_scale is not None:
        x *= config.embedding_scale
    if config.embedding_bias:
        x += model.weights["embedding_bias"]
    if config.encoding == "sinusoidal":
        x += from_numpy(encodings.sinusoidal(positions, config.width).astype(x.dtype), namespace(x))  # Eq. (4)
    return model.norm("embedding_norm", x)


def layers_and_head(model: Model, x: Array, attend: Attend, note: Trace = _silent, last: bool = False) -> Array:
    """(b, n, e) -> (b, n, v), or (b, 1, v) of the last token alone."""
    for i in range(len(model.config.layers)):
        x = _block(model, i, x, attend, note)
    logits = _head(model, x[:, -1:] if last else x, note)
    if bool(namespace(logits).isnan(logits).any()):  # the one wait for a device
        raise ValueError("logits must be finite, and some are NaN: scores or sums overflow, or weights are not finite")
    return logits


def _block(model: Model, i: int, x: Array, attend: Attend, note: Trace) -> Array:
    """One layer: (b, n, e) -> the same. What is not attention goes by rows, each a token: (b·n, e)."""
    config, name, xp, (b, n, e) = model.config, f"layers.{i}.", namespace(x), x.shape
    h, g, d, traced = config.heads, config.key_heads, config.head_dim, note is not _silent

    def told(part: str, array: Array) -> None:
        if traced:
            note(name + part, array.reshape(b, n, -1))

    rows, out, qkv = x.reshape(b * n, e), xp.empty((b * n, e), x.dtype), xp.empty((b * n, (h + 2 * g) * d), x.dtype)
    by_rows(partial(_before, model, name, told), qkv, rows, cut=not traced)
    heads = qkv.reshape(b, n, h + 2 * g, d).swapaxes(1, 2)
    if traced:
        for part, values in {"q": heads[:, :h], "k": heads[:, h : h + g], "v": heads[:, h + g :]}.items():
            note(name + part, values)
    mixed = attend(i, heads).swapaxes(1, 2).reshape(b * n, h * d)
    by_rows(partial(_after, model, name, told), out, rows, mixed, cut=not traced)
    told("output", out)
    return out.reshape(b, n, e)


def _before(model: Model, name: str, told: Trace, qkv: Array, x: Array) -> None:
    """Queries, keys and values of rows (n, e), into qkv (n, (h + 2g)·d)."""
    config, h, g = model.config, model.config.heads, model.config.key_heads
    read = x if config.block == "post-norm" else model.norm(name + "attention_norm", x)
    told("norm", read)
    project(read, model.projection(name + "qkv"), out=qkv)
    if config.qk_norm:
        heads = qkv.reshape(-1, h + 2 * g, config.head_dim)
        heads[:, :h] = model.norm(name + "q_norm", heads[:, :h])
        heads[:, h : h + g] = model.norm(name + "k_norm", heads[:, h : h + g])


def _after(model: Model, name: str, told: Trace, out: Array, x: Array, mixed: Array) -> None:
    """The rest of a layer, of rows x (n, e) and what attention returned, (n, h·d), into out (n, e)."""
    config, post = model.config, model.config.block == "post-norm"
    attended = model.norm(name + "attention_post_norm", project(mixed, model.projection(name + "out")))
    told("attention", attended)
    both = attended + x
    if post:
        read = both = model.norm(name + "attention_norm", both)
    else:  # a parallel block reads x, with its own norm or once more with that of the attention
        own = "attention_norm" if config.one_norm else "mlp_norm"
        read = model.norm(name + own, x if config.block == "parallel" else both)
    told("mlp_norm", read)
    inner = mlp(read, model.projection(name + "up"), model.projection(name + "down"), config.activation, config.gated)
    inner = model.norm(name + "mlp_post_norm", inner)
    told("mlp", inner)
    namespace(x).add(inner, both, out=out)
    if post:
        out[...] = model.norm(name + "mlp_norm", out)


@dataclass(frozen=True)
class _Attention:
    """The attention of all layers of one call; what depends on positions is made once."""

    config: Config
    cache: Cache | None
    tables: list[Tables | None]  # by layer; None where it has no rope
    mask: Array | None  # see _mask
    note: Trace
    rules: dict[int | None, softmax.ScoreRule]  # of scores, by window
    states: list[LinearState | None]  # what linear attention leaves, layer by layer

    def __call__(self, i: int, heads: Array) -> Array:
        return self._linear(i, heads) if self.config.attention == "linear" else self._softmax(i, heads)

    def _softmax(self, i: int, heads: Array) -> Array:
        """Eq. (2) between the new queries and all keys so far; heads are overwritten."""
        config, cache, n = self.config, self.cache, heads.shape[2]
        h, turning = config.heads, heads[:, : config.heads + config.key_heads]
        if (tables := self.tables[i]) is not None:
            turn(turning, tables, turning)  # Eq. (16)
        q, k, v = heads[:, :h], turning[:, h:], heads[:, h + config.key_heads :]
        if cache is not None:
            new, every = slice(cache.used, cache.used + n), slice(0, cache.used + n)
            cache.keys[i][:, :, new], cache.values[i][:, :, new] = k, v
            k, v = cache.keys[i][:, :, every], cache.values[i][:, :, every]
        if self.note is not _silent:
            self.note(f"layers.{i}.q_rotated", q)
            self.note(f"layers.{i}.k_rotated", k[:, :, -n:])
            self.note(f"layers.{i}.scores", self._scores(i, q, k))
        return softmax.attend(q, k, v, self.rules[config.layers[i].window], self.mask)  # Eq. (2)

    def _scores(self, i: int, q: Array, k: Array) -> Array:
        """The scores whose softmax is taken, by the definition: (b, h, n, t)."""
        config, (n, t), bias = self.config, (q.shape[2], k.shape[2]), 0
        seen = definition.visible(np.arange(t - n, t), np.arange(t), config.causal, config.layers[i].window)
        seen = from_numpy(seen, namespace(q))
        if self.mask is not None:
            mask = self.mask.reshape(len(self.mask), -1, n, t)
            seen, bias = (seen & mask, 0) if mask.dtype == bool else (seen, mask)
        k = definition.repeat_heads(k, config.heads)
        return definition.attention_scores(q, k, seen, config.score_scale, config.softcap, bias)

    @np.errstate(all="ignore")  # what is not finite is refused in the end
    def _linear(self, i: int, heads: Array) -> Array:
        """Eq. (19); the state that it leaves goes to the states of the call."""
        config, xp, h, g = self.config, namespace(heads), self.config.heads, self.config.key_heads
        q, k, v = heads[:, :h], heads[:, h : h + g], heads[:, h + g :]
        tables, state = self.tables[i], None
        rule = linear.LinearRule(q.dtype, tables, config.feature_map)
        if config.causal:
            rope = None if tables is None else tables.rope
            before = None if self.cache is None else self.cache.states[i]
            state = LinearState(*linear.zeros(k, v, rule), q.shape[2], rope, config.feature_map)
            state = state if before is None else state + before
            out = linear.step(q, k, v, (state.numerator, state.denominator), rule)
        else:
            out = linear.read(q, linear.sums(k, v, rule), rule)
        self.states.append(state)
        if self.note is not _silent:
            for name, x in (("q_rotated", q), ("k_rotated", k)):
                phi = FEATURE_MAPS[config.feature_map](x)
                self.note(f"layers.{i}.{name}", phi if tables is None else turn(phi, tables, xp.empty_like(phi)))
            if state is not None:
                self.note(f"layers.{i}.state", state.numerator)
        return out


def _score_rule(config: Config, window: int | None, n: int, t: int) -> softmax.ScoreRule:
    """How scores come about, of the last n of t tokens to all of them."""
    every, seen = np.arange(t)[None, None, None], n == 1 and (window is None or window >= t)
    reach = None if seen else softmax.reach(config.causal, window)  # a token that comes after all others sees them all
    return softmax.ScoreRule(every[..., t - n :], every, reach, config.score_scale, config.softcap)


def _head(model: Model, x: Array, note: Trace) -> Array:
    """(b, n, e) -> (b, n, v)."""
    config, xp = model.config, namespace(x)
    if config.block != "post-norm":
        x = model.norm("norm", x)
        note("norm", x)
    if config.head_dense:
        x = project(x, model.projection("head_dense"))
        ACTIVATIONS[config.activation](xp, x)
        x = model.norm("head_norm", x)
        note("head_norm", x)
    head = model.weights["embedding" if config.tied else "head.weight"]
    logits = project(x, Projection(head, model.weights.get("head.bias")))
    if config.logit_scale is not None:
        logits *= config.logit_scale
    if config.logit_softcap is not None:
        logits = config.logit_softcap * xp.tanh(logits / config.logit_softcap)
    note("logits", logits)
    return logits


# ── Generation ───────────────────────────────────────────────────────────────────────────────────────────────────────


def generate(
    model: Model, tokens: Any, max_new_tokens: int, temperature: float = 0.0, seed: int | None = None,
    stop: Collection[int] = (),
) -> Iterator[int]:  # fmt: skip
    """Continues one sequence of tokens (n,), and yields each new token as it comes.

    At ``temperature`` 0 it is the likeliest, else one drawn from softmax(logits/temperature), differently each time
    unless there is a ``seed``. A token of ``stop`` ends the sequence and is not yielded. Ropes that depend on the
    length (dynamic NTK, LongRoPE) are fixed from the first token on, at that of the prompt and ``max_new_tokens``.
    """
    ids = check_tokens(tokens, checks.instance("model", model, Model).config.vocabulary)
    if np.ndim(on_host(tokens)) != 1:
        raise ValueError(f"tokens must be one sequence, (n,), had shape {np.shape(on_host(tokens))}")
    count, temperature = checks.integer("max_new_tokens", max_new_tokens, 1), checks.real("temperature", temperature, 0)
    ends = {checks.integer("a token of stop", one, 0) for one in stop}
    rng = np.random.default_rng(None if seed is None else checks.integer("seed", seed, 0))
    cache = Cache(model, ids.shape[1] + count)

    def steps() -> Iterator[int]:
        new = ids[0]
        for _ in range(count):
            logits = to_numpy(forward(model, new, cache=cache, logits="last"))[0]
            if not np.isfinite(logits).all():
                raise ValueError("logits must be finite, and some are not: weights or input may hold NaN or inf")
            if (token := _drawn(logits, temperature, rng)) in ends:
                return
            yield token
            new = np.array([token], np.int64)

    return steps()


def _drawn(logits: np.ndarray[Any, Any], temperature: float, rng: np.random.Generator) -> int:
    """One token id, from logits (v,) on the host."""
    if temperature == 0:
        return int(logits.argmax())
    # exp(logits/temperature) overflows at a tiny temperature, and inf/inf is NaN: the greatest is taken off first.
    with np.errstate(over="ignore"):  # a quotient of −inf is right, for its exponential is 0
        weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    return int(rng.choice(len(weights), p=weights / weights.sum()))
