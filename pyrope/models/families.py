"""What each published architecture is, as data: the names of its tensors and the options of the one block.

`read_architecture` makes a `Config` of a Hugging Face config.json. Every key of it must be known: one that changes
the result and is not read would silently make a wrong model. How to add a family: docs/families.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import checks
from ..theta import Rope
from .architecture import Config, Layer, check_option
from .conventions import BASE_KEYS, FRACTION_KEYS, HEADS_KEYS, HIDDEN_KEYS, LENGTH_KEYS, MODEL_TYPES

_REQUIRED = object()


@dataclass(frozen=True)
class Family:
    """One architecture. Tensors are named as in `weight_shapes`, with or without .weight and .bias at the end."""

    tensors: Mapping[str, str]  # where they are in a checkpoint; several, as words, are put one below the other
    fixed: Mapping[str, Any]  # options of the Config that are the same in all models
    read: Mapping[str, Any]  # options of the Config and the key that says them, or (key, default)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys, and the values that they may have
    needed: tuple[str, ...] = ()  # keys that a config must have, null or not: left out, they would mean a number
    unused: tuple[str, ...] = ()  # keys that change nothing
    windows: str = "none"  # which layers slide if layer_types does not say: "none", "all", "late", "pattern"
    pattern: int = 0  # with "pattern": one layer in so many sees everything, if the config does not say
    buffers: tuple[str, ...] = ()  # names of tensors that are computed, not learnt
    copies: Mapping[str, str] = field(default_factory=dict)  # names under which some checkpoints repeat a tensor
    qkv_by_head: bool = False  # rows of queries, keys and values alternate head by head
    norm_from_one: bool = False  # the weights of norms are stored less 1


# Keys of any config.json that change nothing in a forward pass, or that are read by Rope.from_config and below.
_UNUSED = {
    "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "head_dim", "id2label", "initializer_range", "label2id",
    "layer_types", "model_type", "n_ctx", "num_hidden_layers", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "gradient_checkpointing", "task_specific_params", "tokenizer_class",
    "model_max_length", "is_llama_config", "transformers.js_config", "return_dict", "rope_parameters",
    "rope_scaling", "rotary_dim", "sliding_window", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
    *BASE_KEYS, *FRACTION_KEYS, *HEADS_KEYS, *HIDDEN_KEYS, *LENGTH_KEYS,
}  # fmt: skip
# Keys that would change the result, and the values with which they do not; families that read one say so themselves.
_OFF = ("is_encoder_decoder", "add_cross_attention", "is_decoder", "attention_bias", "mlp_bias", "lm_head_bias")
_ONLY: dict[str, tuple[Any, ...]] = dict.fromkeys((*_OFF, "use_mrope", "rope_interleaved"), (False,))
_ONLY |= dict.fromkeys(("pretraining_tp", "full_attn_mod", "interpolate_factor"), (1,))
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
_ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh")
_SIZES = {"vocabulary": "vocab_size", "width": "hidden_size", "heads": "num_attention_heads"}
_SIZES["mlp_width"] = "intermediate_size"


def _in_layers(place: str, **parts: str) -> dict[str, str]:
    """The tensors of a layer, by what they are called at its place in a checkpoint."""
    return {f"layers.{{i}}.{ours}": " ".join(f"{place}.{x}" for x in parts[ours].split()) for ours in parts}


def _but(family: Family, *without: str, **read: Any) -> dict[str, Any]:
    """The options that a family reads, without some of them and with others replaced."""
    return {key: value for key, value in {**family.read, **read}.items() if key not in without}


_MODEL = "model.layers.{i}"
_LLAMA = Family(
    tensors={"embedding": "model.embed_tokens.weight", "norm": "model.norm", "head": "lm_head"} | _in_layers(
        _MODEL, attention_norm="input_layernorm", mlp_norm="post_attention_layernorm",
        qkv="self_attn.q_proj self_attn.k_proj self_attn.v_proj", out="self_attn.o_proj",
        q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", up="mlp.gate_proj mlp.up_proj", down="mlp.down_proj",
    ),
    fixed={"norm": "rms", "gated": True, "block": "sequential", "causal": True},
    read={
        **_SIZES, "key_heads": ("num_key_value_heads", None), "eps": "rms_norm_eps", "activation": "hidden_act",
        "tied": ("tie_word_embeddings", False), "qkv_bias": ("attention_bias", False),
        "out_bias": ("attention_bias", False), "mlp_bias": ("mlp_bias", False),
    },
    buffers=(f"{_MODEL}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
)  # fmt: skip
_MISTRAL = replace(
    _LLAMA, read=_but(_LLAMA, "qkv_bias", "out_bias", "mlp_bias"), windows="all", needed=("sliding_window",)
)
_QWEN2 = replace(
    _MISTRAL, fixed={**_LLAMA.fixed, "qkv_bias": True}, windows="late", needed=(),
    unused=("max_window_layers", "use_sliding_window"),
)  # fmt: skip
_QWEN3 = replace(_QWEN2, fixed={**_LLAMA.fixed, "qk_norm": True}, read=_but(_LLAMA, "mlp_bias"))
_PHI3 = replace(
    _MISTRAL,
    tensors={**_LLAMA.tensors, **_in_layers(_MODEL, qkv="self_attn.qkv_proj", up="mlp.gate_up_proj")},
    needed=(),
    unused=("embd_pdrop", "resid_pdrop", "original_max_position_embeddings"),
)
_GEMMA3 = replace(
    _LLAMA,
    tensors={**_LLAMA.tensors, **_in_layers(
        _MODEL, attention_post_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )},
    fixed={**_LLAMA.fixed, "qk_norm": True, "post_norms": True},
    read=_but(
        _LLAMA, "mlp_bias", activation="hidden_activation", tied=("tie_word_embeddings", True),
        scale="query_pre_attn_scalar", logit_softcap=("final_logit_softcapping", None), embedding_scale="hidden_size",
    ),
    only={"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},
    unused=("_sliding_window_pattern", "sliding_window_pattern", "cache_implementation", "rope_local_base_freq"),
    windows="pattern", pattern=6, needed=("sliding_window",), norm_from_one=True,
)  # fmt: skip
_COHERE = replace(
    _LLAMA,
    tensors={key: value for key, value in _LLAMA.tensors.items() if "mlp_norm" not in key},
    fixed={"norm": "layer", "gated": True, "block": "parallel", "one_norm": True, "causal": True},
    read=_but(_LLAMA, "mlp_bias", eps="layer_norm_eps", tied=("tie_word_embeddings", True), logit_scale="logit_scale"),
    only={"use_qk_norm": (False,)},
)
_GLM4 = replace(
    _LLAMA,
    tensors={**_LLAMA.tensors, **_in_layers(
        _MODEL, up="mlp.gate_up_proj", attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )},
    fixed={**_LLAMA.fixed, "post_norms": True},
    read=_but(_LLAMA, "out_bias", "mlp_bias"),
)  # fmt: skip
_GPT_NEOX = Family(
    tensors={
        "embedding": "gpt_neox.embed_in.weight", "norm": "gpt_neox.final_layer_norm", "head": "embed_out",
    } | _in_layers(
        "gpt_neox.layers.{i}", attention_norm="input_layernorm", mlp_norm="post_attention_layernorm",
        qkv="attention.query_key_value", out="attention.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h",
    ),
    fixed={"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True, "causal": True},
    read={
        **_SIZES, "eps": "layer_norm_eps", "activation": "hidden_act", "tied": ("tie_word_embeddings", False),
        "qkv_bias": ("attention_bias", True), "out_bias": ("attention_bias", True),
        "block": ("use_parallel_residual", True),
    },
    unused=("classifier_dropout", "hidden_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
    buffers=tuple(f"gpt_neox.layers.{{i}}.attention.{x}" for x in ("rotary_emb.inv_freq", "bias", "masked_bias")),
    qkv_by_head=True,
)  # fmt: skip
_GPTJ = Family(
    tensors={"embedding": "transformer.wte.weight", "norm": "transformer.ln_f", "head": "lm_head"} | _in_layers(
        "transformer.h.{i}", attention_norm="ln_1", qkv="attn.q_proj attn.k_proj attn.v_proj", out="attn.out_proj",
        up="mlp.fc_in", down="mlp.fc_out",
    ),
    fixed={
        "norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True, "head_bias": True, "one_norm": True,
        "block": "parallel", "causal": True,
    },
    read={
        "vocabulary": "vocab_size", "width": "n_embd", "heads": "n_head", "mlp_width": ("n_inner", None),
        "eps": "layer_norm_epsilon", "activation": "activation_function", "tied": ("tie_word_embeddings", False),
    },
    only={"scale_attn_weights": (True,)},
    unused=(
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "n_layer", "rotary", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj",
    ),
    buffers=("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)  # fmt: skip
_ROFORMER = Family(
    tensors={
        "embedding": "roformer.embeddings.word_embeddings.weight",
        "embedding_bias": "roformer.embeddings.token_type_embeddings.weight",
        "embedding_norm": "roformer.embeddings.LayerNorm",
        "head_dense": "cls.predictions.transform.dense", "head_norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions.decoder", "head.bias": "cls.predictions.bias",
    } | _in_layers(
        "roformer.encoder.layer.{i}", qkv="attention.self.query attention.self.key attention.self.value",
        out="attention.output.dense", attention_norm="attention.output.LayerNorm",
        up="intermediate.dense", down="output.dense", mlp_norm="output.LayerNorm",
    ),
    fixed={
        "norm": "layer", "norm_bias": True, "gated": False, "block": "post-norm", "causal": False, "qkv_bias": True,
        "out_bias": True, "mlp_bias": True, "head_bias": True, "head_dense": True, "embedding_norm": True,
        "embedding_bias": True, "tied": True,
    },
    read={**_SIZES, "eps": "layer_norm_eps", "activation": "hidden_act"},
    only={"rotary_value": (False,), "tie_word_embeddings": (True,)},
    unused=(
        "attention_probs_dropout_prob", "hidden_dropout_prob", "type_vocab_size", "embedding_size", "directionality",
        *(f"pooler_{x}" for x in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")),
    ),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "cohere": _COHERE, "gemma3_text": _GEMMA3, "glm4": _GLM4, "gpt_neox": _GPT_NEOX, "gptj": _GPTJ, "llama": _LLAMA,
    "mistral": _MISTRAL, "phi3": _PHI3, "qwen2": _QWEN2, "qwen3": _QWEN3, "roformer": _ROFORMER,
}  # fmt: skip


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a config.json."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, was {model_type!r}")
    return FAMILIES[model_type]


def read_architecture(config: Mapping[str, Any], ignore: Collection[str] = ()) -> Config:
    """The `Config` that a config.json means; unknown keys are refused, except those to ignore."""
    family = find_family(config)
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
    if options.get("scale") is not None:  # said as what stands under the root
        options["scale"] = 1 / math.sqrt(checks.real("query_pre_attn_scalar", options["scale"], 0, open=True))
    if options.get("embedding_scale") is not None:
        width = checks.integer("hidden_size", options["embedding_scale"], 1, checks.MAX_POSITION)
        options["embedding_scale"] = math.sqrt(width)
    for option, key in family.read.items():
        try:
            check_option(option, options[option])
        except (ValueError, TypeError) as error:  # it has our name of the option
            raise type(error)(f"{error} (in config.json: {(key if isinstance(key, str) else key[0])!r})") from error
    return Config(layers=layers, **options)


def _value(config: Mapping[str, Any], key: str | tuple[str, Any]) -> Any:
    """What a config says under a key, or the default where that is allowed."""
    name, default = key if isinstance(key, tuple) else (key, _REQUIRED)
    value = config.get(name)
    if value is None and default is _REQUIRED:
        raise ValueError(f"the config lacks {name!r}, which model_type {config['model_type']!r} needs")
    return default if value is None else value


def _check_keys(config: Mapping[str, Any], family: Family, ignore: Collection[str]) -> None:
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a list of keys, was {ignore!r}")
    read = {key if isinstance(key, str) else key[0] for key in family.read.values()}
    only = {key: allowed for key, allowed in {**_ONLY, **family.only}.items() if key not in read}
    if family.windows == "none":
        only["sliding_window"] = ()
    unknown = set(config) - _UNUSED - read - set(only) - set(family.unused) - set(ignore)
    wrong = [f"{key} is not known" for key in sorted(unknown) if config[key] is not None]
    wrong += [f"{key} is missing" for key in family.needed if key not in config]
    wrong += [
        f"{key} must be {' or '.join(map(repr, allowed)) or 'null'}, was {config[key]!r}"
        for key, allowed in only.items()
        if config.get(key) is not None and config[key] not in allowed and key not in ignore
    ]
    if config.get("embedding_size") not in (None, config.get("hidden_size")):
        wrong.append(f"embedding_size must be hidden_size, was {config['embedding_size']!r}")
    if wrong:
        rule = f"the config of model_type {config['model_type']!r} says what is not read here"
        raise ValueError(f"{rule}: {'; '.join(wrong)}; name keys that change nothing in ignore=")


def _layers(config: Mapping[str, Any], family: Family) -> tuple[Layer, ...]:
    """Rope and window of every layer."""
    key = next((key for key in ("num_hidden_layers", "n_layer") if config.get(key) is not None), "num_hidden_layers")
    count = checks.size(key, _value(config, key))
    types = config.get("layer_types")
    if types is None:
        types = [_layer_type(config, family, i) for i in range(count)]
    if not isinstance(types, list | tuple) or len(types) != count or not all(isinstance(kind, str) for kind in types):
        raise ValueError(f"layer_types must be a list of {count} words, was {types!r}")
    convention = MODEL_TYPES[config["model_type"]]
    layers = {}
    for kind in dict.fromkeys(types):
        checks.choice("layer_types", kind, ("full_attention", "sliding_attention"))
        if kind == "sliding_attention" and (family.windows == "none" or config.get("use_sliding_window") is False):
            raise ValueError(f"layer_types says {kind}, but no layer of this {config['model_type']} has a window")
        window = _value(config, "sliding_window") if kind == "sliding_attention" else None
        layer_type = kind if convention.layers or isinstance(config.get("layer_types"), list) else None
        layers[kind] = Layer(Rope.from_config(config, layer_type=layer_type), window)
    return tuple(layers[kind] for kind in types)


def _layer_type(config: Mapping[str, Any], family: Family, i: int) -> str:
    """Whether layer i slides, by the rule of its family, where the config has no layer_types."""
    if family.windows == "late":
        use = checks.flag("use_sliding_window", _value(config, ("use_sliding_window", False)))
        use = use and config.get("sliding_window", "missing") is not None
        slides = use and i >= checks.integer("max_window_layers", _value(config, "max_window_layers"), 0)
    elif family.windows == "pattern":
        keys = ("sliding_window_pattern", "_sliding_window_pattern")
        period = next((config[key] for key in keys if config.get(key) is not None), family.pattern)
        slides = (i + 1) % checks.integer("sliding_window_pattern", period, 1) != 0
    else:
        slides = family.windows == "all" and config.get("sliding_window") is not None
    return "sliding_attention" if slides else "full_attention"
