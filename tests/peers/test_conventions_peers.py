"""What `pyrope.configs` says of Hugging Face model types, against the model code of transformers itself.

Every class with its default config is in test_families_peers.py. Here are the spellings of configs, and complete tiny
models, whose queries and keys are caught on their way to attention.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from peer_bounds import U32, float32_bound, theta_bound
from rotary_modules import class_of, module_of, their_config, their_theta
from transformers import AttentionInterface, AutoModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pyrope
from pyrope import Rope, YaRN
from pyrope.configs import MODEL_TYPES
from pyrope.theta import LAYOUTS

# The types whose whole models are run.
_EXAMINED = """
    apertus arcee bitnet codegen cohere cohere2 csm deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5
    ernie4_5_moe exaone4 falcon flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe
    glm4_moe_lite gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe helium hunyuan_v1_dense lfm2 llama
    llama4_text minimax_m2 ministral mistral mixtral mllama_text_model modernbert nanochat nemotron olmo olmo2 olmo3
    olmoe persimmon phi phi3 phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_next
    qwen3_vl_moe_text qwen3_vl_text roformer seed_oss smollm3 stablelm starcoder2 vaultgemma youtu
"""
EXAMINED = _EXAMINED.split()
OWN_ATTENTION = ("codegen", "falcon", "gptj", "gpt_neox_japanese", "roformer")
MROPE = [name for name in EXAMINED if MODEL_TYPES[name].axes]
PER_LAYER = [name for name in EXAMINED if MODEL_TYPES[name].layers]
TINY = np.finfo(np.float64).tiny  # pairs that do not turn have θ = 0 on both sides


def assert_same_theta(theirs: Any, rope: Rope) -> None:
    """Width and frequencies, and with them base and scaling."""
    rope = rope if rope.axes is None else dataclasses.replace(rope, axes=None)
    assert 2 * len(theirs) == rope.width
    ours = pyrope.frequencies(rope)
    np.testing.assert_array_less(np.abs(theirs - ours), theta_bound(rope) * ours + TINY)


def their_head_dim(model_type: str, config: Any, layer_type: str) -> int:
    """The head size that transformers' attention uses, in the first layer of this type."""
    with torch.device("meta"):
        attention = class_of(model_type, "Attention")(config, layer_idx=config.layer_types.index(layer_type))
    return attention.head_dim


def flat(model_type: str, **keys: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 8192}
    return {"model_type": model_type, **sizes, **keys}


_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
OLD = {
    "gemma3_text": flat("gemma3_text", head_dim=64, rope_theta=2000000.0, rope_local_base_freq=5000.0),
    "gemma3_text-scaled": flat("gemma3_text", head_dim=64, rope_theta=2000000.0, rope_local_base_freq=5000.0,
                               rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma3n_text-scaled": flat("gemma3n_text", head_dim=64, rope_theta=2000000.0, rope_local_base_freq=5000.0,
                                rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "modernbert": flat("modernbert", global_rope_theta=80000.0, local_rope_theta=5000.0),
    "modernbert-scaled": flat("modernbert", global_rope_theta=80000.0, local_rope_theta=5000.0,
                              rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "olmo3": flat("olmo3", rope_theta=500000.0, rope_scaling=_YARN),
    "gpt_neox": flat("gpt_neox", rotary_pct=0.5, rotary_emb_base=5000),
    "gpt_neox-whole": flat("gpt_neox", rotary_pct=1.0, rotary_emb_base=1000000),
    "gpt_neox_japanese": flat("gpt_neox_japanese", rotary_pct=0.25, rotary_emb_base=5000),
    "minimax_m2": flat("minimax_m2", head_dim=128, rotary_dim=64, rope_theta=5000000),
    "falcon": flat("falcon", rope_theta=50000.0, rope_scaling={"type": "linear", "factor": 2.0}),
    "glm4_moe": flat("glm4_moe", head_dim=128, partial_rotary_factor=0.5, rope_theta=1000000),
    **{name: flat(name, partial_rotary_factor=0.75, rope_theta=25000.0)
       for name in ("glm", "nemotron", "persimmon", "phi", "phi3", "qwen3_next", "stablelm")},
    **{name: flat(name, rope_theta=50000.0, rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]})
       for name in ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")},
    "deepseek_v3": flat("deepseek_v3", qk_nope_head_dim=32, qk_rope_head_dim=16, rope_theta=50000, rope_scaling=_YARN),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_old_spellings(name: str) -> None:
    """Configs as they were written before `rope_parameters`: Θ of each layer type as transformers reads it."""
    config = OLD[name]
    theta = their_theta(config["model_type"], config)
    for layer_type, theirs in theta.items():
        assert_same_theta(theirs, Rope.from_config(config, layer_type=layer_type))


@pytest.mark.parametrize("model_type", [name for name in PER_LAYER if name != "gemma4_text"])
def test_ropes_by_layer_type(model_type: str) -> None:
    """The new spelling with one dict for each layer type: different bases and rope types."""
    parameters = {
        "full_attention": {"rope_type": "llama3", "rope_theta": 250000.0, "factor": 8.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
        "sliding_attention": {"rope_type": "linear", "rope_theta": 2500.0, "factor": 2.0},
    }  # fmt: skip
    config = flat(model_type, head_dim=64, rope_parameters=parameters)
    theta = their_theta(model_type, config)
    assert set(theta) == set(parameters)
    for layer_type, theirs in theta.items():
        assert_same_theta(theirs, Rope.from_config(config, layer_type=layer_type))


@pytest.mark.parametrize(
    ("kind", "inside", "top"), [("longrope", None, 512), ("su", 1024, 512), ("longrope", None, None)]
)
def test_phi3_longrope(kind: str, inside: int | None, top: int | None) -> None:
    """Phi-3 has the original length at the top level, and that one wins, or else has 4096 by default."""
    scaling = {
        "type": kind,
        "short_factor": [1 + i / 9 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
    }
    scaling |= {"original_max_position_embeddings": inside} if inside else {}
    config = flat("phi3", rope_scaling=scaling) | ({"original_max_position_embeddings": top} if top else {})
    rope, embedding = Rope.from_config(config), class_of("phi3")(their_config("phi3", config))
    for length in (512, 513, 1024, 1025, 4096, 4097):
        embedding(torch.zeros(1), torch.tensor([[length - 1]]))
        assert_same_theta(embedding.inv_freq.numpy(), rope.at(length))
    assert rope.attention_factor == pytest.approx(embedding.attention_scaling, rel=1e-15)


@pytest.mark.parametrize("saved", [False, True])
def test_gemma4(saved: bool) -> None:
    """Gemma 4: full layers have larger heads, in which some pairs turn; `per_layer_config` says so once it is saved."""
    config = flat("gemma4_text", head_dim=64, global_head_dim=128, num_hidden_layers=4)
    config |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    proportional = {"rope_type": "proportional", "rope_theta": 2e6, "partial_rotary_factor": 0.5}
    config["rope_parameters"] = {"full_attention": proportional}
    config["rope_parameters"]["sliding_attention"] = {"rope_type": "default", "rope_theta": 5e3}
    theirs = their_config("gemma4_text", config)
    for layer_type, theta in their_theta("gemma4_text", config).items():
        rope = Rope.from_config(theirs.to_dict() if saved else config, layer_type=layer_type)
        assert rope.head_dim == their_head_dim("gemma4_text", theirs, layer_type)
        assert_same_theta(theta, rope)


def test_known_differences() -> None:
    """Where transformers 5.22.2 drops what the config says and pyrope does not; both are pinned, to notice a change.

    OLMo 3, old spelling: `rope_theta` reaches the full layers only, the sliding ones keep the default. One dict for
    each layer type: `"truncate": false` of yarn is looked for beside the dicts, not in them.
    """
    config = flat("olmo3", rope_theta=2000000.0)
    theta = their_theta("olmo3", config)
    assert_same_theta(theta["full_attention"], Rope.from_config(config, layer_type="full_attention"))
    assert_same_theta(theta["sliding_attention"], Rope(64, 500000.0, "half"))
    assert Rope.from_config(config, layer_type="sliding_attention").base == 2000000.0

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 1024}
    parameters = {
        "full_attention": yarn | {"truncate": False},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = flat("gemma3_text", head_dim=64, rope_parameters=parameters)
    theta = their_theta("gemma3_text", config)
    ours = Rope.from_config(config, layer_type="full_attention")
    assert_same_theta(theta["full_attention"], Rope(64, 1e6, "half", scaling=YaRN(8.0, 1024)))
    assert ours.scaling == YaRN(8.0, 1024, truncate=False)


# Whole models. Sizes for all of them, as far as a class has the name, and what some need besides.
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
_GEMMA4 = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
BESIDES: dict[str, dict[str, Any]] = {
    **{name: {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}} for name in MROPE},
    **{name: {"head_dim": 16, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
       for name in MROPE if name.startswith("qwen3")},
    **{name: {"head_dim": 16} for name in ("helium", "hunyuan_v1_dense", "ministral")},
    **dict.fromkeys(PER_LAYER, _TWO_KINDS),
    "gemma4_text": _TWO_KINDS | {"head_dim": 16, "global_head_dim": 32, "rope_parameters": _GEMMA4},
    "minimax_m2": {"head_dim": 32, "rotary_dim": 16},
    "falcon": {"num_hidden_layers": 1},
}  # fmt: skip
MODELS = {  # where the automatic class is missing, or takes more than the text part
    "csm": "CsmBackboneModel",
    "mllama_text_model": "MllamaTextModel",
}
NORMED_AFTERWARDS = ("hunyuan_v1_dense", "llama4_text", "nanochat")  # queries and keys, after they were rotated
STILL = {  # layers that transformers does not rotate, of four
    "cohere2": [3],
    "exaone4": [3],
    "llama4_text": [3],
    "smollm3": [3],  # a list in the config says so, not the type of the layer
}

POSITIONS = np.array([0, 1, 5, 17, 40, 99])
GRID = np.array([POSITIONS, [3, 2, 50, 7, 7, 9], [1, 4, 4, 60, 2, 2]])  # time, row, column

CAUGHT: list[tuple[int, Any, Any]] = []


def catch(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    """An attention that keeps what it is given and returns zeros, so that no layer's input depends on positions."""
    CAUGHT.append((module.layer_idx, query.double().numpy(), key.double().numpy()))
    return torch.zeros(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None


AttentionInterface.register("catch", catch)
AttentionMaskInterface.register("catch", lambda *_, **__: None)


def catch_in(model_type: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the models that have an attention of their own, in the first layer."""
    (first, *_) = (module for module in model.modules() if getattr(module, "layer_idx", None) == 0)
    if model_type in ("codegen", "gptj", "gpt_neox_japanese"):
        attend = first._attn
        monkeypatch.setattr(first, "_attn", lambda *args: (catch(first, *args), attend(*args))[1])
    elif model_type == "falcon":
        attend = torch.nn.functional.scaled_dot_product_attention
        wrapped = lambda *args, **known: (catch(first, *args), attend(*args, **known))[1]  # noqa: E731
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrapped)
    elif model_type == "roformer":
        turn = first.apply_rotary_position_embeddings

        def turned(*args: Any) -> Any:
            query, key = turn(*args)
            catch(first, query, key, key)
            return query, key

        monkeypatch.setattr(first, "apply_rotary_position_embeddings", turned)


def tiny_model(model_type: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[dict[str, Any], Any]:
    """A small model with random weights whose queries and keys are caught, and its config.json."""
    cls = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    given = {key: size for key, size in SMALL.items() if key in known} | BESIDES.get(model_type, {}) | more
    config = cls(**copy.deepcopy(given))
    text = config.get_text_config()
    text._attn_implementation = {"falcon": "sdpa"}.get(model_type, "eager") if model_type in OWN_ATTENTION else "catch"
    torch.manual_seed(0)
    if model_type in MODELS:
        model = getattr(module_of(model_type), MODELS[model_type])(text)
    else:
        model = AutoModel.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:  # so that queries and keys are of a size worth comparing
            torch.nn.init.normal_(parameter, std=0.3)
    if model_type in OWN_ATTENTION:
        catch_in(model_type, model, monkeypatch)
    as_given = model_type == "gemma4_text"  # as saved, see test_gemma4
    return {"model_type": model_type} | given if as_given else config.to_dict(), model.eval()


def queries_and_keys(model: Any, positions: Any) -> list[tuple[int, Any, Any]]:
    """Layer, queries and keys (b, h, n, d) as attention gets them, for tokens at these positions."""
    CAUGHT.clear()
    known = {} if model.config.model_type == "roformer" else {"position_ids": torch.tensor(positions)[..., None, :]}
    if model.config.model_type == "csm":  # whose tokens are made of many
        known["inputs_embeds"] = torch.cos(torch.arange(6 * 64.0) ** 2).reshape(1, 6, 64)
    else:
        known["input_ids"] = torch.arange(0, 42, 7)[None] * (model.config.model_type != "roformer")
    with torch.no_grad():
        model(use_cache=False, **known)
    return [*CAUGHT]


def assert_whole_model_agrees(
    model_type: str, config: dict[str, Any], model: Any, layout: str | None = None
) -> set[Any]:
    """Every query and key of a model against `pyrope.rotate` by the rope of its layer; returns the layer types met.

    R(0) = a·I but for the order of features, so the same tokens, all at position 0, say what was rotated. RoFormer
    takes no positions: there all tokens are one and the same, and the first of them is at position 0.
    """
    positions = GRID if model_type in MROPE else np.arange(6) if model_type == "roformer" else POSITIONS
    rotated = queries_and_keys(model, positions)
    still = queries_and_keys(model, 0 * positions)
    assert len(rotated) == len(still) > 0
    met, layer_types = set(), config.get("layer_types")
    for (layer, *after), (_, *before) in zip(rotated, still, strict=True):
        layer_type = layer_types[layer] if layer_types else None
        met.add(layer_type)
        if layer in STILL.get(model_type, ()):
            assert all(np.array_equal(y, y0) for y, y0 in zip(after, before, strict=True))
            if model_type != "smollm3":
                with pytest.raises(ValueError, match="not rotated"):
                    Rope.from_config(config, layer_type=layer_type)
            continue
        rope = Rope.from_config(config, layer_type=layer_type)
        for y, y0 in zip(after, before, strict=True):
            if model_type == "roformer":
                y0 = np.broadcast_to(y0[:, :, :1], y0.shape)
            x = pyrope.unrotate(np.ascontiguousarray(y0), 0 * positions, rope)
            assert y.shape == x.shape
            # x itself was read from rounded numbers: 4u. A norm that comes after has a mean of d squares: d + 8.
            slack = (rope.head_dim + 8 if model_type in NORMED_AFTERWARDS else 4) * U32 * np.abs(x).max()
            bound = float32_bound(x, positions, rope) + slack
            for other in LAYOUTS:
                error = np.abs(y - pyrope.rotate(x, positions, dataclasses.replace(rope, layout=other)))
                if other == (layout or MODEL_TYPES[model_type].layout):
                    assert rope.layout == other
                    np.testing.assert_array_less(error, bound)
                else:
                    assert error.max() > 0.1 * np.abs(x).max()
    return met


@pytest.mark.parametrize("model_type", EXAMINED)
def test_whole_model(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys of a tiny model, on their way to attention, are those of `Rope.from_config` of its config."""
    met = assert_whole_model_agrees(model_type, *tiny_model(model_type, monkeypatch))
    assert met >= {"full_attention", "sliding_attention"} or model_type not in PER_LAYER


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite", "youtu"])
def test_rope_interleave_false(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`"rope_interleave": false` in a config means halves instead."""
    assert_whole_model_agrees(model_type, *tiny_model(model_type, monkeypatch, rope_interleave=False), layout="half")


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("cohere2", {"layer_types": ["full_attention"] * 4}), ("llama4_text", {"no_rope_layers": [0] * 4})],
)
def test_model_without_rotated_layers(
    model_type: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of nothing but layers that are not rotated has no rope."""
    config, model = tiny_model(model_type, monkeypatch, **changes)
    assert set(config["layer_types"]) == {"full_attention"}
    rotated, still = (queries_and_keys(model, m * POSITIONS) for m in (1, 0))
    assert all(np.array_equal(q, q0) for (_, q, _), (_, q0, _) in zip(rotated, still, strict=True))
    with pytest.raises(ValueError, match="not rotated"):
        Rope.from_config(config, layer_type="full_attention")
