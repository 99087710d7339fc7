"""What a model is (`Config`) and what it has learnt (`Weights`): data, checked when it is made.

One block serves every architecture; its options are words in the `Config`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .. import checks
from ..backend import Array, from_numpy, namespace
from ..layers import ACTIVATIONS, NORMS, Norm, Projection
from ..linear import FEATURE_MAPS
from ..theta import Rope

BLOCKS = ("sequential", "parallel", "post-norm")
ATTENTIONS = ("softmax", "linear")
ENCODINGS = ("rope", "none", "sinusoidal", "alibi")


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
    encoding: str = "rope"  # of positions, one of ENCODINGS; with others than "rope" no layer has a rope
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
            object.__setattr__(self, field.name, check_option(field.name, getattr(self, field.name)))
        if self.heads % self.key_heads:
            raise ValueError(f"key_heads must divide heads, {self.heads}, was {self.key_heads}")
        if self.one_norm and self.block != "parallel":
            raise ValueError(f'one_norm goes with block "parallel", was {self.block!r}')
        if self.post_norms and self.block == "post-norm":
            raise ValueError('post_norms go with the blocks "sequential" and "parallel"')
        self._check_layers()

    def _check_layers(self) -> None:
        if not isinstance(self.layers, tuple) or not self.layers or not all(isinstance(x, Layer) for x in self.layers):
            raise TypeError(f"layers must be a tuple of one Layer at least, was {self.layers!r}")
        for i, (rope, window) in enumerate((layer.rope, layer.window) for layer in self.layers):
            if window is not None:
                checks.integer(f"layers[{i}].window", window, 1)
            if rope is None:
                continue
            if not isinstance(rope, Rope):
                raise TypeError(f"layers[{i}].rope must be a Rope or None, was {type(rope).__name__}")
            if rope.head_dim != self.head_dim:
                raise ValueError(f"layers[{i}].rope has head_dim {rope.head_dim}, the model {self.head_dim}")
            if rope.axes is not None:
                raise ValueError(f"layers[{i}].rope has several axes of positions, a model of text has one")
            if self.encoding != "rope":
                raise ValueError(f"with encoding {self.encoding!r} layers have no rope: use with_encoding")
        if self.encoding == "rope" and all(layer.rope is None for layer in self.layers):
            raise ValueError('encoding "rope" needs a layer with a rope, none has one: without positions it is "none"')
        if self.encoding == "sinusoidal" and self.width % 2:
            raise ValueError(f"width must be even for sines and cosines, was {self.width}")
        if self.attention == "linear":
            unused = [name for name in ("scale", "softcap") if getattr(self, name) is not None]
            unused += ["windows"] if any(layer.window is not None for layer in self.layers) else []
            unused += ["ALiBi"] if self.encoding == "alibi" else []
            if unused:
                raise ValueError(f"linear attention has no scores, so that {', '.join(unused)} would have no effect")

    def with_encoding(self, encoding: str) -> Config:
        """The same model with another encoding of positions in place of RoPE, for comparison."""
        checks.choice("encoding", encoding, ENCODINGS[1:])
        layers = tuple(dataclasses.replace(layer, rope=None) for layer in self.layers)
        return dataclasses.replace(self, encoding=encoding, layers=layers)


_WORDS = {
    "norm": tuple(NORMS), "activation": tuple(ACTIVATIONS), "block": BLOCKS, "encoding": ENCODINGS,
    "attention": ATTENTIONS, "feature_map": tuple(FEATURE_MAPS),
}  # fmt: skip


def check_option(name: str, value: Any) -> Any:
    """One field of a `Config`, checked by itself; how fields go together is checked when the Config is made."""
    kind = Config.__annotations__[name]
    if kind == "int":
        return checks.integer(name, value, 1, checks.MAX_POSITION)
    if kind == "str":
        return checks.choice(name, value, _WORDS[name])
    if kind == "bool":
        return checks.flag(name, value)
    if kind == "float":
        return checks.real(name, value, 0)
    if kind == "float | None" and value is not None:
        return checks.real(name, value, 0, open=True)
    return value


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """What one layer has learnt."""

    attention_norm: Norm  # (e,)
    qkv: Projection  # ((h + 2g)·d, e): the heads of the queries, the keys, the values
    out: Projection  # (e, h·d)
    up: Projection  # (f, e); gated (2f, e), the gate first
    down: Projection  # (e, f)
    mlp_norm: Norm | None  # (e,); None with one_norm
    q_norm: Norm | None  # (d,), with qk_norm
    k_norm: Norm | None  # (d,), with qk_norm
    attention_post_norm: Norm | None  # (e,), with post_norms
    mlp_post_norm: Norm | None  # (e,), with post_norms


@dataclass(frozen=True, eq=False)
class Weights:
    """What a model has learnt; made by `Weights.of` from arrays by the names that `weight_shapes` lists."""

    embedding: Array  # (v, e)
    layers: tuple[LayerWeights, ...]
    norm: Norm | None  # (e,); None in a post-norm model
    head: Projection  # (v, e)
    embedding_norm: Norm | None  # (e,)
    embedding_bias: Array | None  # (e,)
    head_dense: Projection | None  # (e, e)
    head_norm: Norm | None  # (e,), with head_dense

    @classmethod
    def of(cls, config: Config, arrays: Mapping[str, Array]) -> Weights:
        """Weights from arrays by name; one error lists every name and shape that is wrong."""
        if not isinstance(arrays, Mapping):
            raise TypeError(f"arrays must be a dict of arrays by name, was {type(arrays).__name__}")
        arrays = {name: array for name, array in arrays.items() if array is not None}
        _check_arrays(config, arrays)

        def part(kind: Any, name: str) -> Any:
            weight = arrays.get(f"{name}.weight")
            return None if weight is None else kind(weight, arrays.get(f"{name}.bias"))

        def layer(i: int) -> LayerWeights:
            kinds = dict.fromkeys(("qkv", "out", "up", "down"), Projection)
            names = [field.name for field in dataclasses.fields(LayerWeights)]
            return LayerWeights(**{name: part(kinds.get(name, Norm), f"layers.{i}.{name}") for name in names})

        layers = tuple(layer(i) for i in range(len(config.layers)))
        head = Projection(arrays["embedding" if config.tied else "head.weight"], arrays.get("head.bias"))
        return cls(
            embedding=arrays["embedding"], layers=layers, norm=part(Norm, "norm"), head=head,
            embedding_norm=part(Norm, "embedding_norm"), embedding_bias=arrays.get("embedding_bias"),
            head_dense=part(Projection, "head_dense"), head_norm=part(Norm, "head_norm"),
        )  # fmt: skip

    def named(self) -> dict[str, Array]:
        """Every array by its name in `weight_shapes`; a tied head is the embedding, and not listed twice."""
        arrays: dict[str, Array] = {"embedding": self.embedding, "embedding_bias": self.embedding_bias}
        tied = self.head.weight is self.embedding
        parts: dict[str, Norm | Projection | None] = {"head": self.head._replace(weight=None) if tied else self.head}
        parts |= {name: getattr(self, name) for name in ("norm", "embedding_norm", "head_dense", "head_norm")}
        for i, layer in enumerate(self.layers):
            parts |= {f"layers.{i}.{part.name}": getattr(layer, part.name) for part in dataclasses.fields(layer)}
        for name, part in parts.items():
            if part is not None:
                arrays |= {f"{name}.weight": part.weight, f"{name}.bias": part.bias}
        return {name: array for name, array in arrays.items() if array is not None}


def _check_arrays(config: Config, arrays: Mapping[str, Array]) -> None:
    """Checks that these are the arrays of a model of this config."""
    expected = weight_shapes(config)
    if arrays:
        namespace(**arrays)
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    wrong = [f"{name} is missing, {shape}" for name, shape in expected.items() if name not in shapes]
    wrong += [f"{name} is unexpected" for name in shapes if name not in expected]
    both = [(name, shapes[name], shape) for name, shape in expected.items() if name in shapes]
    wrong += [f"{name} has shape {own}, not {shape}" for name, own, shape in both if own != shape]
    if wrong:
        raise ValueError("weights do not fit the config: " + "; ".join(wrong))
    dtypes = {array.dtype for array in arrays.values()}
    if len(dtypes) > 1 or not dtypes <= {np.dtype("f4"), np.dtype("f8")}:
        raise TypeError(f"weights must all be float32 or all float64, were {', '.join(sorted(map(str, dtypes)))}")


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The name and shape of every array that a model of this config has."""
    e, d, f = checks.instance("config", config, Config).width, config.head_dim, config.mlp_width
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocabulary, e)}

    def add(name: str, *shape: int, bias: bool = config.norm_bias, wanted: bool = True) -> None:
        shapes.update({f"{name}.weight": shape} if wanted else {})
        shapes.update({f"{name}.bias": shape[:1]} if wanted and bias else {})

    add("embedding_norm", e, wanted=config.embedding_norm)
    shapes.update({"embedding_bias": (e,)} if config.embedding_bias else {})
    for i in range(len(config.layers)):
        name = f"layers.{i}"
        add(f"{name}.attention_norm", e)
        add(f"{name}.qkv", (config.heads + 2 * config.key_heads) * d, e, bias=config.qkv_bias)
        add(f"{name}.q_norm", d, wanted=config.qk_norm)
        add(f"{name}.k_norm", d, wanted=config.qk_norm)
        add(f"{name}.out", e, config.heads * d, bias=config.out_bias)
        add(f"{name}.attention_post_norm", e, wanted=config.post_norms)
        add(f"{name}.mlp_norm", e, wanted=not config.one_norm)
        add(f"{name}.up", 2 * f if config.gated else f, e, bias=config.mlp_bias)
        add(f"{name}.down", e, f, bias=config.mlp_bias)
        add(f"{name}.mlp_post_norm", e, wanted=config.post_norms)
    add("norm", e, wanted=config.block != "post-norm")
    add("head_dense", e, e, bias=True, wanted=config.head_dense)
    add("head_norm", e, wanted=config.head_dense)
    shapes.update({} if config.tied else {"head.weight": (config.vocabulary, e)})
    shapes.update({"head.bias": (config.vocabulary,)} if config.head_bias else {})
    return shapes


@dataclass(frozen=True, eq=False)
class Model:
    """A config and weights that fit it."""

    config: Config
    weights: Weights

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config) or not isinstance(self.weights, Weights):
            kinds = f"{type(self.config).__name__} and {type(self.weights).__name__}"
            raise TypeError(f"a Model is made of a Config and Weights, not of {kinds}")
        _check_arrays(self.config, self.weights.named())


def random_model(config: Config, seed: int, backend: str | ModuleType = "numpy", dtype: str = "float32") -> Model:
    """A model with weights drawn at random, of the size that keeps activations near 1."""
    rng = np.random.default_rng(checks.integer("seed", seed, 0))

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        noise = rng.standard_normal(shape) / (math.sqrt(shape[1]) if len(shape) == 2 and name != "embedding" else 10)
        scale = 1.0 if name.endswith("norm.weight") else 0.0
        return from_numpy((scale + noise).astype(check_dtype(dtype)), backend)

    return Model(config, Weights.of(config, {name: draw(name, shape) for name, shape in weight_shapes(config).items()}))


def check_dtype(name: Any) -> np.dtype[Any]:
    """The dtype of this name, which must be one that models are computed in."""
    checks.choice("dtype", name, ("float32", "float64"))
    return np.dtype(str(name))
