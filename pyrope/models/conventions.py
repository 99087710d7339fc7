"""Hugging Face configs: what a ``model_type`` implies about RoPE without its config.json saying so, as data, and how
the old and the new spelling of the rest are read.

The data were read from the model code of transformers 5.22.2 and are checked against it. A type that is not
listed is not refused: `read_config` then asks for what the config does not say.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from .. import checks
from .files import read_json


class LayerRope(NamedTuple):
    """One kind of layer of a model whose layers have different ropes, in the old flat spelling."""

    base: float  # if the config does not say
    base_key: str  # where the flat config says it
    scaled: bool  # whether rope_scaling applies to these layers
    head_key: str = "head_dim"
    head_dim: int | None = None  # if the config does not say it under head_key


class Convention(NamedTuple):
    layout: str | None
    base: float | None = 10000.0  # if the config does not say
    fraction: float = 1.0  # of the head that is rotated, if the config does not say
    head_dim: int | None = None  # if the config does not say; None: hidden size / heads
    rotary_dim: int | None = None  # if the config does not say; None: by the fraction
    latent: bool = False  # multi-head latent attention: a head is [nope | rope], and the config must say both sizes
    original_length: int | None = None  # if the config does not say; None: max_position_embeddings
    direction: int = 1
    axes: str | None = None  # how mrope_section is meant
    layers: dict[str, LayerRope] = {}  # by layer type
    still: str | None = None  # the type of layer that is not rotated, unless sliding_window is null
    alpha: bool = False  # whether "dynamic" with alpha means another base, with YaRN's keys beside it unused
    explicit: bool = False  # its class scales Θ where a config says nothing, so that such a config is refused


# Older and newer spellings of one and the same number, at the top level of a config.json.
HIDDEN_KEYS = ("hidden_size", "n_embd")
HEADS_KEYS = ("num_attention_heads", "n_head")
LENGTH_KEYS = ("max_position_embeddings", "n_positions")
BASE_KEYS = ("rope_theta", "rotary_emb_base")
FRACTION_KEYS = ("partial_rotary_factor", "rotary_pct")
ROPE_TYPE_ALIASES = {"mrope": "default", "su": "longrope"}


def _layers(full: LayerRope, sliding: LayerRope) -> dict[str, LayerRope]:
    return {"full_attention": full, "sliding_attention": sliding}


_GEMMA3 = _layers(LayerRope(1000000.0, "rope_theta", True), LayerRope(10000.0, "rope_local_base_freq", False))
_GEMMA4 = _layers(
    LayerRope(1000000.0, "rope_theta", True, "global_head_dim", 512),
    LayerRope(10000.0, "rope_local_base_freq", False, "head_dim", 256),
)
_MODERNBERT = _layers(LayerRope(160000.0, "global_rope_theta", True), LayerRope(10000.0, "local_rope_theta", True))
_OLMO3 = _layers(LayerRope(500000.0, "rope_theta", True), LayerRope(500000.0, "rope_theta", False))
_TYPES = {
    # Pairs (i, i + r/2).
    "arcee diffllama doge dots1 falcon gpt_neox_japanese granite granitemoe llama ministral mistral olmo olmo2 olmoe "
    "qwen2 qwen2_moe qwen3_moe starcoder2": Convention("half"),
    "bitnet csm flex_olmo mllama_text_model": Convention("half", base=500000.0),
    "lfm2 mixtral phimoe": Convention("half", base=1000000.0),
    "smollm3": Convention("half", base=2000000.0),
    "apertus": Convention("half", base=12000000.0, explicit=True),
    "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text": Convention("half", base=1000000.0, axes="sections"),
    "qwen3_vl_moe_text": Convention("half", base=500000.0, axes="interleaved"),
    "qwen3_vl_text": Convention("half", base=500000.0, head_dim=128, axes="interleaved"),
    "qwen3 seed_oss": Convention("half", head_dim=128),
    "minimax_m2": Convention("half", base=5000000.0, head_dim=128),
    "gpt_oss": Convention("half", base=150000.0, head_dim=64, explicit=True),
    "gemma gemma2 vaultgemma": Convention("half", head_dim=256),
    "gemma3_text gemma3n_text": Convention("half", head_dim=256, layers=_GEMMA3),
    "gemma4_text": Convention("half", layers=_GEMMA4, explicit=True),
    "modernbert": Convention("half", layers=_MODERNBERT),
    "olmo3": Convention("half", layers=_OLMO3),
    "glm4_moe nemotron persimmon phi": Convention("half", fraction=0.5),
    "gpt_neox stablelm": Convention("half", fraction=0.25),
    "qwen3_next": Convention("half", fraction=0.25, head_dim=256),
    "exaone4": Convention("half", still="full_attention"),
    "hunyuan_v1_dense": Convention("half", alpha=True),
    "nanochat": Convention("half", direction=-1),
    "phi3": Convention("half", original_length=4096),
    # Pairs (2i, 2i+1).
    "roformer": Convention("interleaved"),
    "cohere ernie4_5_moe": Convention("interleaved", base=500000.0),
    "cohere2": Convention("interleaved", still="full_attention"),
    "codegen gptj": Convention("interleaved", rotary_dim=64),
    "ernie4_5": Convention("interleaved", base=500000.0, head_dim=128),
    "glm glm4": Convention("interleaved", fraction=0.5, head_dim=128),
    "helium": Convention("interleaved", base=100000.0, head_dim=128),
    "llama4_text": Convention("interleaved", base=500000.0, head_dim=128, still="full_attention"),
    "deepseek_v2": Convention("interleaved", latent=True),
    # Reads pairs (2i, 2i+1), writes (i, i + r/2), unless the config says "rope_interleave": false.
    "deepseek_v3 glm4_moe_lite youtu": Convention("interleaved-to-half", latent=True),
}
_BY_NAME = [(name, convention) for names, convention in _TYPES.items() for name in names.split()]
MODEL_TYPES: dict[str, Convention] = dict(sorted(_BY_NAME, key=lambda one: (one[1].layout, one[0])))
_UNKNOWN = Convention(None, base=None)

# Keys by which some model types change their rope and which are read for no type, or for listed types only.
_NOT_READ = ("rope_pct", "rotary_emb_fraction", "rotary_emb_interleaved", "use_dynamic_ntk")
_NOT_READ_IF_UNKNOWN = ("global_head_dim", "kv_channels", "attention_head_dim", "rope_interleave")

# The keys of the rope dict that every rope type may have, and those of each: Hugging Face's name -> ours.
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_FACTOR, _LENGTH = {"factor": "factor"}, {"original_max_position_embeddings": "original_length"}
_SAME = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_LISTS = {"short_factor": "short", "long_factor": "long", "attention_factor": "attention_factor"}
_REQUIRED = {"linear": ("factor",), "dynamic": ("factor",), "longrope": ("short_factor", "long_factor")}
_REQUIRED["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "yarn": _FACTOR | _LENGTH | {key: key for key in _SAME},
    "longrope": _FACTOR | _LENGTH | _LISTS,
    "llama3": _FACTOR | _LENGTH | {"low_freq_factor": "low", "high_freq_factor": "high"},
    "proportional": _FACTOR,
}
Json: TypeAlias = Mapping[str, Any]
Source: TypeAlias = Json | str | os.PathLike[str]  # a config, or the path of one, or of its folder


def read_config(config: Source, layout: str | None, layer_type: str | None) -> dict[str, Any]:
    """The arguments of the `Rope` that a config means, with ``scaling`` as (rope type, arguments) and ``axes`` as
    (style, sections) or None."""
    config = _load(config)
    if layer_type is not None and not isinstance(layer_type, str):
        raise TypeError(f"layer_type must be a word, was {layer_type!r}")
    model_type = config.get("model_type")
    convention = MODEL_TYPES.get(model_type, _UNKNOWN) if isinstance(model_type, str) else _UNKNOWN
    if layout is None:
        layout = "half" if convention.layout and config.get("rope_interleave") is False else convention.layout
    if layout is None:
        unlisted = f"and model_type {model_type!r} is not listed here"
        raise ValueError(f"a config does not say which features make a pair, {unlisted}: pass layout=")
    _refuse_other_ropes(config, convention)
    parameters = _rope_parameters(config, convention, layer_type)
    base = checks.real("rope_theta", parameters["rope_theta"], 1, open=True)
    head_dim, width, placement = _widths(config, convention, parameters, layer_type)
    kind, scaling = _scaling(config, parameters, convention)
    if (alpha := scaling.pop("alpha", None)) is not None:  # HunYuan: only another base
        if width <= 2:
            raise ValueError(f"alpha needs a rotary width of at least 4, was {width}")
        base *= checks.real("alpha", alpha, 0, 1e12, open=True) ** (width / (width - 2))
        kind = "default"
    axes, sections = convention.axes, parameters.get("mrope_section")
    if axes and sections is None:
        raise ValueError(f"model_type {model_type!r} has several position axes: the config must say mrope_section")
    said = parameters.get("mrope_interleaved")
    style = axes or ("interleaved" if said else "sections")
    if said is not None and said is not (style == "interleaved"):
        raise ValueError(f"model_type {model_type!r} has {style} axes, but the config says mrope_interleaved {said!r}")
    arguments = {"head_dim": head_dim, "base": base, "layout": layout, "rotary_dim": width, "placement": placement}
    axial = None if sections is None else (style, sections)
    return arguments | {"scaling": (kind, scaling), "axes": axial, "direction": convention.direction}


def _refuse_other_ropes(config: Json, convention: Convention) -> None:
    """Refuses configs without RoPE, and keys that would change the rope and are not read here."""
    if config.get("alibi") is True:
        raise ValueError("this config uses ALiBi instead of RoPE (alibi: true)")
    if (kind := config.get("position_embedding_type")) not in (None, "rope", "rotary"):
        raise ValueError(f"this config does not use RoPE (position_embedding_type: {kind!r})")
    for key in _NOT_READ + (_NOT_READ_IF_UNKNOWN if convention is _UNKNOWN else ()):
        if config.get(key):
            raise ValueError(f"the config says {key}, which is not read here: write the Rope out instead")
    if convention.explicit and _first(config, ("rope_parameters", "rope_scaling")) is None:
        name = config["model_type"]
        raise ValueError(f"model_type {name!r} scales its frequencies: the config must say rope_parameters")


def _load(config: Source) -> Json:
    if isinstance(config, str | os.PathLike):
        path = pathlib.Path(config)
        config = read_json(path / "config.json" if path.is_dir() else path)
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a dict, or the path of a config.json with one, was {type(config).__name__}")
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and _first(config, HIDDEN_KEYS) is None else config


def _first(config: Json, keys: Sequence[str], default: Any = None) -> Any:
    """The value of the first of these keys that the config has and that is not null."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _words(value: Any) -> list[str]:
    return [word for word in value if isinstance(word, str)] if isinstance(value, list | tuple) else []


def _need(config: Json, keys: Sequence[str], what: str) -> Any:
    if (value := _first(config, keys)) is None:
        raise ValueError(f"the config lacks {' or '.join(map(repr, keys))}, which {what} needs")
    return value


def _rope_parameters(config: Json, convention: Convention, layer_type: str | None) -> dict[str, Any]:
    """The rope dict of a config in its new flat form: with rope_type, rope_theta and fraction, without nulls."""
    raw = _first(config, ("rope_parameters", "rope_scaling"), {})
    if not isinstance(raw, Mapping):
        raise TypeError(f"rope_parameters (or rope_scaling) must be a dict, was {raw!r}")
    if config.get("rope_scaling") not in (None, raw):
        raise ValueError("the config has both rope_parameters and rope_scaling, and they differ: keep one")
    nested = any(isinstance(value, Mapping) for value in raw.values())
    layers: Mapping[str, Any] = raw if nested else convention.layers
    base = convention.base
    base_keys: tuple[str, ...] = BASE_KEYS
    if layers and layer_type not in layers:
        listed = ", ".join(map(repr, layers))
        raise ValueError(f"layer_type must be one of {listed}, which have different ropes, was {layer_type!r}")
    if layer_type is not None and layer_type in convention.layers:
        layer = convention.layers[layer_type]
        base, base_keys = layer.base, (layer.base_key,)
        raw = raw if nested or layer.scaled else {}
    if nested:
        raw = raw[str(layer_type)]
        if not isinstance(raw, Mapping):
            raise ValueError(f"layers of type {layer_type!r} have no rope in this config ({raw!r})")
    if layer_type is not None and layer_type == convention.still and config.get("sliding_window", 0) is not None:
        raise ValueError(f"layers of type {layer_type!r} are not rotated in model_type {config['model_type']!r}")
    if layer_type is not None and not layers and layer_type not in _words(config.get("layer_types")):
        raise ValueError(f"the config has no layers of type {layer_type!r}: leave layer_type out, all have one rope")
    parameters = {key: value for key, value in raw.items() if value is not None}
    parameters.setdefault("rope_theta", _first(config, base_keys, base))
    if parameters["rope_theta"] is None:
        raise ValueError("the config does not say rope_theta, and its model_type implies none: add it to the config")
    parameters.setdefault("partial_rotary_factor", _first(config, FRACTION_KEYS, convention.fraction))
    kinds = {str(parameters[key]) for key in ("rope_type", "type") if key in parameters} or {"default"}
    kinds = {ROPE_TYPE_ALIASES.get(kind, kind) for kind in kinds}
    if len(kinds) > 1:
        raise ValueError(f"the config says rope_type {parameters['rope_type']!r} and type {parameters['type']!r}")
    parameters["rope_type"] = kinds.pop()
    if not nested and "original_max_position_embeddings" in _KEYS.get(parameters["rope_type"], {}):
        # Phi-3 has it at the top level, and that one wins.
        parameters |= {key: config[key] for key in _LENGTH if config.get(key) is not None}
    return parameters


def _scaling(config: Json, parameters: Json, convention: Convention) -> tuple[str, dict[str, Any]]:
    """The rope type and its arguments by our names."""
    kind = checks.choice("rope_type", parameters["rope_type"], tuple(_KEYS))
    names, what = _KEYS[kind], f"rope_type {kind!r}"
    if convention.alpha and kind == "dynamic":
        unused = dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), "")
        names = names | {"alpha": "alpha"} | unused
    if unknown := ", ".join(sorted(set(map(str, parameters)) - set(names) - _COMMON)):
        raise ValueError(f"{what} has unexpected keys, which may change the rope and are not ignored: {unknown}")
    arguments = {names[key]: value for key, value in parameters.items() if names.get(key)}
    if kind == "yarn":  # transformers takes 0 for "not given" here
        arguments = {key: value for key, value in arguments.items() if value or key not in ("beta_fast", "beta_slow")}
    if kind == "dynamic" and "alpha" not in arguments:
        arguments["original_length"] = _need(config, LENGTH_KEYS, what)
    if "original_max_position_embeddings" in names and "original_length" not in arguments:
        arguments["original_length"] = convention.original_length or _need(config, LENGTH_KEYS, what)
    if kind in ("yarn", "longrope") and "factor" not in arguments:
        most = checks.MAX_POSITION
        longest = checks.integer("max_position_embeddings", _need(config, LENGTH_KEYS, what), 1, most)
        original = checks.integer("original_max_position_embeddings", arguments["original_length"], 1, most)
        # YaRN refuses a factor below 1; LongRoPE's only makes its attention factor, which is 1 there.
        arguments["factor"] = longest / original if kind == "yarn" else max(longest / original, 1.0)
    if kind == "proportional":
        arguments["fraction"] = parameters["partial_rotary_factor"]
    for key in () if "alpha" in arguments else _REQUIRED.get(kind, ()):
        if names[key] not in arguments:
            raise ValueError(f"the config lacks {key!r}, which {what} needs")
    return kind, arguments


def _own_head_dim(config: Json, layer_type: str | None) -> Any:
    """The head size of layers of one type by per_layer_config, a dict of what differs from layer to layer."""
    layers = config.get("per_layer_config")
    if not layers or not isinstance(layers, Mapping):
        return None
    by_index = {str(i).zfill(9): layer for i, layer in layers.items() if isinstance(layer, Mapping)}  # 5, "5" or "05"
    own = {i: layer["head_dim"] for i, layer in by_index.items() if "head_dim" in layer}
    types = _words(config.get("layer_types")) if layer_type else [None] * len(own)
    sizes = {own.get(str(i).zfill(9)) for i, kind in enumerate(types) if kind == layer_type}
    if len(sizes) > 1 or (own and not layer_type):
        raise ValueError(f"layers of type {layer_type!r} have heads of different sizes by per_layer_config")
    return sizes.pop() if sizes else None


def _widths(config: Json, convention: Convention, parameters: Json, layer_type: str | None) -> tuple[int, int, str]:
    """Head size, rotary width, and where in the head the rotated features lie."""
    if convention.latent or config.get("qk_rope_head_dim") is not None:
        width = checks.integer("qk_rope_head_dim", _need(config, ("qk_rope_head_dim",), "its model_type"), 1)
        still = checks.integer("qk_nope_head_dim", _need(config, ("qk_nope_head_dim",), "qk_rope_head_dim"), 0)
        return still + width, width, "suffix"
    layer = convention.layers.get(layer_type) if layer_type else None
    key, default = (layer.head_key, layer.head_dim) if layer else ("head_dim", None)
    head_dim = _own_head_dim(config, layer_type) or _first(config, (key,), default or convention.head_dim)
    if head_dim is None:
        hidden = checks.integer("hidden_size", _need(config, HIDDEN_KEYS, "the head size"), 1)
        heads = checks.integer("num_attention_heads", _need(config, HEADS_KEYS, "the head size"), 1)
        if hidden % heads:
            raise ValueError(f"hidden_size, {hidden}, must be a multiple of num_attention_heads, {heads}")
        head_dim = hidden // heads
    head_dim = checks.size("head_dim", head_dim)
    fraction = checks.real("partial_rotary_factor", parameters["partial_rotary_factor"], 0, 1, open=True)
    # A width is computed in float64 and cut off, as transformers does.
    width = head_dim if parameters["rope_type"] == "proportional" else int(head_dim * fraction)
    explicit = _first(config, ("rotary_dim",), None if "rotary_dim" in config else convention.rotary_dim)
    if explicit is not None and width not in (head_dim, explicit):
        raise ValueError(f"the config says rotary_dim {explicit} and a partial_rotary_factor that makes {width}")
    return head_dim, width if explicit is None else checks.integer("rotary_dim", explicit, 1), "prefix"
