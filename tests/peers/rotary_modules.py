"""The rotary embeddings of Hugging Face transformers, family by family: how each is looked up and called.

Families differ in where the tables come from (a module, one for each type of layer, a function), in their form
(doubled, repeated, complex, sin before cos), in the order of axes, and in who leaves alone the features that stay.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pyrope.models import conventions

# The families that are examined in every way: their functions under the oracle, whole models, configs of all spellings.
# All others that are read are compared with their classes in test_families_peers.py.
EXAMINED = (
    "apertus arcee bitnet codegen cohere cohere2 csm deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5 "
    "ernie4_5_moe exaone4 falcon flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe "
    "glm4_moe_lite gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe helium hunyuan_v1_dense lfm2 llama "
    "llama4_text minimax_m2 ministral mistral mixtral mllama_text_model modernbert nanochat nemotron olmo olmo2 "
    "olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text "
    "qwen3 qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text roformer seed_oss smollm3 stablelm starcoder2 "
    "vaultgemma youtu"
)
MODEL_TYPES = {name: conventions.MODEL_TYPES[name] for name in EXAMINED.split()}
COMPOSITE = ("qwen2_vl", "qwen2_5_vl")  # a text and a vision part; older configs have the text part at the top level
SINUSOIDAL = ("codegen", "gptj", "roformer")  # tables made once, no base in the config, no rotary module
MROPE = [name for name, convention in MODEL_TYPES.items() if convention.axes]
LATENT = [name for name, convention in MODEL_TYPES.items() if convention.latent]
CUT_BY_ATTENTION = ("codegen", "gptj", "gpt_neox_japanese", "persimmon", "phi", "stablelm")  # others do it themselves

# What the function that rotates is called, where it is not apply_rotary_pos_emb.
_FUNCTIONS = {
    "deepseek_v2": "apply_rotary_emb",
    "llama4_text": "apply_rotary_emb",
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu"), "apply_rotary_pos_emb_interleave"),
}


def module_of(model_type: str) -> Any:
    return importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_"))


def class_of(model_type: str, ending: str) -> type:
    """The one class of a model's text part whose name ends so, e.g. LlamaRotaryEmbedding."""
    module = module_of(model_type)
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    classes = [c for c in own if c.__name__.endswith(ending) and not any(w in c.__name__ for w in ("Vision", "Audio"))]
    assert len(classes) == 1, classes
    return classes[0]


def known_keys(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config that the model's class, or that of its text part, has."""
    cls = CONFIG_MAPPING[f"{model_type}_text" if model_type in COMPOSITE else model_type]
    names = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    return {key: value for key, value in config.items() if key in names}


def their_config(model_type: str, config: dict[str, Any]) -> Any:
    """What transformers makes of a config.json: the part of it that says how text is rotated."""
    return CONFIG_MAPPING[model_type](**copy.deepcopy(config)).get_text_config()


def in_their_form(model_type: str, cos: Any, sin: Any) -> tuple[Any, ...]:
    """Tables (b, n, p) as a family's function wants them."""
    if model_type == "roformer":
        return (torch.cat((sin, cos), -1)[:, None],)
    if model_type in SINUSOIDAL:
        return sin, cos
    if model_type in ("deepseek_v2", "llama4_text"):
        return (torch.complex(cos, sin),)
    if model_type == "gpt_oss":
        return cos, sin
    if model_type in ("cohere", "cohere2"):
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def turned(model_type: str, x: Any, tables: tuple[Any, ...]) -> tuple[Any, ...]:
    """x (b, h, n, d) as the family's function turns it, as a query and, where the function takes both, as a key."""
    function = getattr(module_of(model_type), _FUNCTIONS.get(model_type, "apply_rotary_pos_emb"), None)
    if model_type == "roformer":
        return class_of(model_type, "SelfAttention").apply_rotary_position_embeddings(*tables, x, x)  # type: ignore
    if model_type in SINUSOIDAL:
        return (function(x.transpose(1, 2), *tables).transpose(1, 2),)
    if model_type == "llama4_text":
        return tuple(y.transpose(1, 2) for y in function(x.transpose(1, 2), x.transpose(1, 2), *tables))
    if model_type in ("gemma3n_text", "gemma4_text"):
        return (function(x, *tables),)
    return function(x, x, *tables)


def their_tables(model_type: str, config: Any, layer_type: str | None, length: int) -> Callable[..., tuple[Any, ...]]:
    """tables(x, positions (n,) or (axes, n)) as the model makes them, in the form that its function wants."""
    if model_type in SINUSOIDAL:
        if model_type == "roformer":
            width = config.hidden_size // config.num_attention_heads
            table = class_of(model_type, "SinusoidalPositionalEmbedding")(length, width).create_weight()
        else:
            table = module_of(model_type).create_sinusoidal_positions(length, config.rotary_dim)

        def rows(x: Any, at: Any) -> tuple[Any, ...]:
            sin, cos = table[at][None].to(x.dtype).chunk(2, -1)
            return in_their_form(model_type, cos, sin)

        return rows

    embedding, layer = class_of(model_type, "RotaryEmbedding")(config), (layer_type,) if layer_type else ()

    def made(x: Any, at: Any) -> tuple[Any, ...]:
        at = at.expand(3, -1)[:, None] if model_type in MROPE else at[None]
        tables = embedding(x, at, *layer)
        return tables if isinstance(tables, tuple) else (tables,)

    return made


def their_rope(model_type: str, config: Any, layer_type: str | None = None, length: int = 131072) -> Callable[..., Any]:
    """fn(x (b, h, n, d), positions (n,)) -> the queries that x becomes in a model of this config."""
    tables = their_tables(model_type, config, layer_type, length)
    still, width = 0, None
    if model_type in LATENT:
        still = config.qk_nope_head_dim
    elif model_type in CUT_BY_ATTENTION:
        head_dim = config.hidden_size // config.num_attention_heads
        parameters = getattr(config, "rope_parameters", None) or {}
        width = getattr(config, "rotary_dim", None) or int(head_dim * parameters.get("partial_rotary_factor", 1.0))

    def fn(x: Any, at: Any) -> Any:
        end = x.shape[-1] if width is None else width
        turn = x[..., still:end]
        return torch.cat((x[..., :still], turned(model_type, turn, tables(turn, at))[0], x[..., end:]), -1)

    return fn
