"""Whole models against transformers, tiny and random: queries and keys of seventy model types on their way to attention,
and the logits of every family that pyrope loads, by the engine and by the definition."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from models import by_definition
from theirs import U32, float32_bound, module_of
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pyrope
from pyrope import Cache, Rope, forward, load
from pyrope.checkpoints import FAMILIES
from pyrope.configs import MODEL_TYPES

# ── Queries and keys ─────────────────────────────────────────────────────────────────────────────────────────────────

_EXAMINED = """
    apertus arcee bitnet codegen cohere cohere2 csm deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5
    ernie4_5_moe exaone4 flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe
    glm4_moe_lite gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe helium hunyuan_v1_dense lfm2 llama
    llama4_text minimax_m2 ministral mistral mixtral mllama_text_model modernbert nanochat nemotron olmo olmo2 olmo3
    olmoe persimmon phi phi3 phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_next
    qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 stablelm starcoder2 vaultgemma youtu
"""
EXAMINED = _EXAMINED.split()
OWN_ATTENTION = ("codegen", "gptj", "gpt_neox_japanese")
MROPE = [name for name in EXAMINED if MODEL_TYPES[name].axes]
PER_LAYER = [name for name in EXAMINED if MODEL_TYPES[name].layers]
STILL = ("cohere2", "exaone4", "llama4_text", "smollm3")  # the last of four layers is not rotated
MODELS = {"csm": "CsmBackboneModel", "mllama_text_model": "MllamaTextModel"}  # where the automatic class takes more
# Sizes for all of them, as far as a class has the name, and what some need besides.
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 50,
    "num_hidden_layers": 4, "max_position_embeddings": 256, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256,
    "rotary_dim": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_local_experts": 2, "num_experts": 2, "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50, "laurel_rank": 4, "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": None, "cross_attention_layers": [], "pad_token_id": None,
}  # fmt: skip
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
INTERLEAVED = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
GEMMA4 = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
BESIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(MROPE, {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_vl_text"), {"head_dim": 16, "rope_scaling": INTERLEAVED}),
    **dict.fromkeys(("helium", "hunyuan_v1_dense", "ministral"), {"head_dim": 16}),
    **dict.fromkeys(PER_LAYER, TWO_KINDS),
    "gemma4_text": TWO_KINDS | {"head_dim": 16, "global_head_dim": 32, "rope_parameters": GEMMA4},
    "minimax_m2": {"head_dim": 32, "rotary_dim": 16},
}
# Type, what its config says besides, and the layout if it is then another.
TYPES = [
    *((name, {}, None) for name in EXAMINED),
    *((name, {"rope_interleave": False}, "half") for name in ("deepseek_v3", "glm4_moe_lite", "youtu")),
    ("cohere2", {"layer_types": ["full_attention"] * 4}, None),  # none of the layers is rotated
    ("llama4_text", {"no_rope_layers": [0] * 4}, None),
]
POSITIONS = np.array([0, 1, 5, 17, 40, 99])
GRID = np.array([POSITIONS, [3, 2, 50, 7, 7, 9], [1, 4, 4, 60, 2, 2]])  # time, row, column
CAUGHT: list[tuple[int, Any, Any]] = []


def catch(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    """An attention that keeps what it is given and returns zeros, so that no layer's input depends on positions."""
    CAUGHT.append((module.layer_idx, query.double().numpy(), key.double().numpy()))
    return torch.zeros(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None


hf.AttentionInterface.register("catch", catch)
AttentionMaskInterface.register("catch", lambda *_, **__: None)


def catching_model(model_type: str, more: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """A small model with random weights whose queries and keys are caught, and its config.json."""
    cls = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    given = {key: size for key, size in SMALL.items() if key in known} | BESIDES.get(model_type, {}) | more
    config = cls(**copy.deepcopy(given))
    text = config.get_text_config()
    text._attn_implementation = "eager" if model_type in OWN_ATTENTION else "catch"
    torch.manual_seed(0)
    named = MODELS.get(model_type)
    model = getattr(module_of(model_type), named)(text) if named else hf.AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:  # so that queries and keys are of a size worth comparing
            torch.nn.init.normal_(parameter, std=0.3)
    if model_type in OWN_ATTENTION:
        first = next(module for module in model.modules() if getattr(module, "layer_idx", None) == 0)
        attend = first._attn
        first._attn = lambda *args: (catch(first, *args), attend(*args))[1]
    as_given = model_type == "gemma4_text"  # one head size for all layers is in what it saves
    return {"model_type": model_type} | given if as_given else config.to_dict(), model.eval()


def queries_and_keys(model: Any, positions: Any) -> list[tuple[int, Any, Any]]:
    """Layer, queries and keys (b, h, n, d) as attention gets them, for tokens at these positions."""
    CAUGHT.clear()
    inputs = {"position_ids": torch.tensor(positions)[..., None, :]}
    if model.config.model_type == "csm":  # whose tokens are made of many
        inputs["inputs_embeds"] = torch.cos(torch.arange(6 * 64.0) ** 2).reshape(1, 6, 64)
    else:
        inputs["input_ids"] = torch.arange(0, 42, 7)[None]
    with torch.no_grad():
        model(use_cache=False, **inputs)
    return [*CAUGHT]


def assert_rotated(rope: Rope, before: Any, after: Any, positions: Any) -> None:
    """R(0) = a·I but for the order of features, so the same tokens, all at position 0, say what was rotated. x itself is
    read from rounded numbers: 4u; a norm that comes after has a mean of d squares: d + 8."""
    x = pyrope.rotate(np.ascontiguousarray(before), 0 * positions, rope.transposed)
    x[..., rope.start : rope.start + rope.width] /= rope.attention_factor**2
    bound = float32_bound(x, positions, rope) + (rope.head_dim + 8) * U32 * np.abs(x).max()
    np.testing.assert_array_less(np.abs(after - pyrope.rotate(x, positions, rope)), bound)


@pytest.mark.parametrize("model_type, more, layout", TYPES, ids=[f"{name} {more or ''}" for name, more, _ in TYPES])
def test_queries_and_keys(model_type: str, more: dict[str, Any], layout: str | None) -> None:
    """Every one of a model, by `pyrope.rotate` with the rope that its config means for the layer."""
    config, model = catching_model(model_type, more)
    positions = GRID if model_type in MROPE else POSITIONS
    rotated, at_zero = (queries_and_keys(model, m * positions) for m in (1, 0))
    assert len(rotated) == len(at_zero) > 0
    for (layer, *after), (_, *before) in zip(rotated, at_zero, strict=True):
        layer_type = config["layer_types"][layer] if config.get("layer_types") else None
        if (model_type in STILL and layer == 3) or (model_type in STILL and more):
            assert all(np.array_equal(y, y0) for y, y0 in zip(after, before, strict=True))
            if model_type != "smollm3":  # whose config has a list of them, not a type
                with pytest.raises(ValueError, match="not rotated"):
                    Rope.from_config(config, layer_type=layer_type)
            continue
        rope = Rope.from_config(config, layer_type=layer_type)
        assert rope.layout == (layout or MODEL_TYPES[model_type].layout)
        for y, y0 in zip(after, before, strict=True):
            assert_rotated(rope, y0, y, positions)


# ── Logits ───────────────────────────────────────────────────────────────────────────────────────────────────────────

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPTJ = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}
GPTJ |= {key: SIZES[key] for key in ("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0]}
LONG |= {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 48}
# name: (classes, what differs from the sizes); the length of dynamic and longrope is crossed at 48 tokens.
CASES = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 48}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {"rope_parameters": LONG, "max_position_embeddings": 192, "original_max_position_embeddings": 48}),
    "gemma3": ("Gemma3", {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 6}),
    "cohere": ("Cohere", {}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
    "gptj": ("GPTJ", {}),
    "roformer": ("RoFormer", {}),
}


def tiny_config(name):
    kind, own = CASES[name]
    sizes = {"GPTNeoX": SIZES, "RoFormer": SIZES, "GPTJ": GPTJ}.get(kind, GROUPED)
    return getattr(hf, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**{**sizes, **own})


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    """The class of a model and the folder it was saved to."""
    kind, _ = CASES[request.param]
    torch.manual_seed(1)
    cls = getattr(hf, f"{kind}For{'Masked' if kind == 'RoFormer' else 'Causal'}LM")
    model = cls(tiny_config(request.param)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases that are not all 1 or 0
            torch.nn.init.normal_(parameter.data, mean=parameter.data.mean().item(), std=0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return cls, folder


def both(saved, dtype="float32"):
    """The model of transformers, and that of pyrope."""
    cls, folder = saved
    return cls.from_pretrained(folder, dtype=getattr(torch, dtype)).eval(), load(folder, dtype=dtype)


def random_tokens(b, n, seed=0):
    return np.random.default_rng(seed).integers(3, 64, (b, n))


def logits(model, tokens, **options):
    with torch.no_grad():
        return model(torch.from_numpy(tokens), **options).logits.numpy()


def off(got, expected):
    return abs(got - expected).max() / abs(expected).max()


def test_every_family_is_here():
    assert {tiny_config(name).model_type for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize("n", [1, 40, 64, 160])
def test_a_full_pass(saved, n):
    """Their tables and norms are float32 even in a float64 model; angles are off by more the farther a position is."""
    tokens = random_tokens(2, n)
    for dtype, limit in (("float32", 1e-5), ("float64", 1e-6)):
        theirs, ours = both(saved, dtype)
        got, expected = forward(ours, tokens), logits(theirs, tokens)
        assert got.dtype == dtype and off(got, expected) <= limit * (10 if n > 64 else 1)
    fixed = [dataclasses.replace(layer, rope=layer.rope.at(n)) for layer in ours.config.layers]
    config = dataclasses.replace(ours.config, layers=tuple(fixed))
    assert n > 40 or off(by_definition(config, ours.weights, tokens[0]), expected[0]) <= 1e-6


@pytest.mark.parametrize("lengths", [(1,) * 12, (7, 1, 4), (30, 1, 29)])
def test_step_by_step(saved, lengths):
    """Past 48 tokens some Θ change: theirs is then a full pass, since a cache of theirs keeps keys of the old Θ."""
    theirs, ours = both(saved)
    if not ours.config.causal:
        pytest.skip("an encoder has no steps")
    tokens, cache, got = random_tokens(2, sum(lengths), 2), Cache(ours, sum(lengths), batch=2), []
    for part in np.split(tokens, np.cumsum(lengths)[:-1], axis=1):
        got.append(forward(ours, part, cache=cache))
    assert off(np.concatenate(got, axis=1), logits(theirs, tokens)) <= 1e-5


def test_left_padding(saved):
    theirs, ours = both(saved)
    tokens, pads = random_tokens(3, 20, 4), (0, 6, 13)
    visible = np.ones((3, 20), np.int64)
    for row, pad in enumerate(pads):
        tokens[row, :pad], visible[row, :pad] = 0, 0
    options = {"attention_mask": torch.from_numpy(visible)}
    if ours.config.causal:
        options["position_ids"] = torch.from_numpy(np.maximum(visible.cumsum(1) - 1, 0))
        got = forward(ours, tokens, segments=visible)
    else:  # RoFormer takes no positions: it has them count the padding
        got = forward(ours, tokens, positions=np.arange(20), segments=visible)
    expected = logits(theirs, tokens, **options)
    for row, pad in enumerate(pads):
        assert off(got[row, pad:], expected[row, pad:]) <= 1e-5
