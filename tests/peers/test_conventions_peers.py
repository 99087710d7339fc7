"""What `pyrope.models.conventions` says of each Hugging Face model type, against the model code of transformers itself.

Four ways: the default config of each class, a config with nothing in it but sizes, the module's own function that
rotates, fed with the identity, and a complete tiny model, whose queries and keys are caught on their way to attention.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import references

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs Hugging Face transformers")

from peer_bounds import U32, float32_bound, theta_bound  # noqa: E402
from rotary_modules import (  # noqa: E402
    COMPOSITE,
    LATENT,
    MODEL_TYPES,
    MROPE,
    SINUSOIDAL,
    class_of,
    in_their_form,
    known_keys,
    module_of,
    their_config,
    turned,
)
from transformers import AttentionInterface, AutoModel  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

import pyrope  # noqa: E402
from pyrope import Rope, YaRN  # noqa: E402
from pyrope.theta import LAYOUTS  # noqa: E402

OWN_ATTENTION = ("codegen", "falcon", "gptj", "gpt_neox_japanese", "roformer")
SCALED = [name for name, convention in MODEL_TYPES.items() if convention.explicit]
PER_LAYER = [name for name, convention in MODEL_TYPES.items() if convention.layers]
PLAIN = [name for name in MODEL_TYPES if name not in LATENT + SCALED]
NO_HEAD_DIM = (  # whose classes have no head_dim
    *("codegen", "falcon", "gpt_neox", "gpt_neox_japanese", "gptj", "mllama_text_model", "modernbert", "persimmon"),
    *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "roformer", "stablelm"),
)
OTHER_NAMES = {  # where the sizes have other names
    "codegen": {"hidden_size": "n_embd", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"},
    "gptj": {"hidden_size": "n_embd", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"},
}


def their_theta(model_type: str, config: Any) -> dict[str | None, Any]:
    """Θ as transformers computes it, by layer type; None where all layers have the same."""
    if model_type == "roformer":
        head_dim = config.hidden_size // config.num_attention_heads
        table = class_of(model_type, "SinusoidalPositionalEmbedding")(2, head_dim).create_weight()
    elif model_type in SINUSOIDAL:
        table = module_of(model_type).create_sinusoidal_positions(2, config.rotary_dim)
    if model_type in SINUSOIDAL:  # position 1 turns by θ
        sin, cos = table.double().numpy()[1].reshape(2, -1)
        return {None: np.arctan2(sin, cos)}
    buffers = dict(class_of(model_type, "RotaryEmbedding")(config).named_buffers())
    if "inv_freq" in buffers:
        return {None: buffers["inv_freq"].numpy()}
    ending = "_inv_freq"
    return {n.removesuffix(ending): b.numpy() for n, b in buffers.items() if n.endswith(ending) and "original" not in n}


def their_head_dim(model_type: str, config: Any, layer_type: str | None = None) -> int:
    """The head size that transformers' attention uses, in the first layer of this type."""
    layer = config.layer_types.index(layer_type) if layer_type else 0
    ending = "SelfAttention" if model_type in ("mllama_text_model", "roformer") else "Attention"
    with torch.device("meta"):
        attention = class_of(model_type, ending)(config, layer_idx=layer)
    names = ("qk_head_dim", "head_dim", "head_size", "attention_head_size")
    return next(getattr(attention, name) for name in names if hasattr(attention, name))


TINY = np.finfo(np.float64).tiny  # pairs that do not turn have θ = 0 on both sides


def assert_same_theta(theirs: Any, rope: Rope) -> None:
    """Width and frequencies, and with them base and scaling; 2 more roundings where Θ was read from a table."""
    rope = rope if rope.axes is None else dataclasses.replace(rope, axes=None)
    assert 2 * len(theirs) == rope.width
    ours = pyrope.frequencies(rope)
    np.testing.assert_array_less(np.abs(theirs - ours), (theta_bound(rope) + 2 * U32) * ours + TINY)


_SECTIONS = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
_INTERLEAVED = {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}}
NEEDED: dict[str, dict[str, Any]] = {  # what a class needs beyond its defaults to be usable
    **{name: _SECTIONS if MODEL_TYPES[name].axes == "sections" else _INTERLEAVED for name in MROPE},
    "glm4_moe": {"head_dim": 128},  # 4096 / 96 is not an integer
    "hunyuan_v1_dense": {"head_dim": 128},  # their attention wants it said
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_default_config(model_type: str) -> None:
    """The default instance of the config class, written out in full: base, scaling, width and head size."""
    full = CONFIG_MAPPING[model_type](**copy.deepcopy(NEEDED.get(model_type, {})))
    config = full.get_text_config()
    theta = their_theta(model_type, config)
    assert (None not in theta) == (model_type in PER_LAYER)
    assert hasattr(config, "qk_rope_head_dim") == (model_type in LATENT)
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {rope["rope_type"] for rope in (parameters.values() if None not in theta else (parameters,)) if rope}
    assert (not kinds <= {"default"}) == (model_type in SCALED)
    for layer_type, theirs in theta.items():
        rope = Rope.from_config(full.to_dict(), layer_type=layer_type)
        assert_same_theta(theirs, rope)
        assert rope.head_dim == their_head_dim(model_type, config, layer_type)


def bare(model_type: str, **more: Any) -> dict[str, Any]:
    """A config with nothing but sizes, such as no class has by default: 768 / 16 = 48, or 96."""
    sizes = {"hidden_size": 1536 if MODEL_TYPES[model_type].rotary_dim else 768, "num_attention_heads": 16}
    sizes |= {"max_position_embeddings": 4096} | more
    if model_type in MROPE:
        head_dim = more.get("head_dim") or MODEL_TYPES[model_type].head_dim or 48
        sizes["rope_scaling"] = NEEDED[model_type]["rope_scaling"] | {"mrope_section": [head_dim // 2 - 16, 8, 8]}
    return {OTHER_NAMES.get(model_type, {}).get(key, key): value for key, value in sizes.items()}


@pytest.mark.parametrize("model_type", PLAIN)
def test_bare_config(model_type: str) -> None:
    """A config with nothing but sizes: Θ, width and head size are those that the class takes by default."""
    config = bare(model_type)
    theirs = their_config(model_type, config)
    parameters = getattr(theirs, "rope_parameters", None) or {"rope_theta": 10000.0}
    for layer_type, theta in their_theta(model_type, theirs).items():
        rope = Rope.from_config({"model_type": model_type} | config, layer_type=layer_type)
        assert rope.base == (parameters if layer_type is None else parameters[layer_type])["rope_theta"]
        assert_same_theta(theta, rope)
        theirs.num_key_value_heads = 16
        if model_type in ("hunyuan_v1_dense", "ministral"):  # their attention wants it said
            theirs.head_dim = 48
        assert rope.head_dim == their_head_dim(model_type, theirs, layer_type)


@pytest.mark.parametrize("model_type", LATENT + SCALED)
def test_bare_config_that_leaves_too_much_open(model_type: str) -> None:
    """Where the class has widths or a scaling by default that a bare config does not say, there is no guessing."""
    config = bare(model_type)
    (layer_type, theta), *_ = their_theta(model_type, their_config(model_type, config)).items()
    guess = pyrope.frequencies(Rope(48, MODEL_TYPES[model_type].base, "half"))
    assert len(theta) != 24 or not np.allclose(theta, guess)
    with pytest.raises(ValueError, match="rope_parameters|qk_rope_head_dim"):
        Rope.from_config({"model_type": model_type} | config, layer_type=layer_type)


@pytest.mark.parametrize("model_type", [name for name in PLAIN if name not in NO_HEAD_DIM])
def test_head_dim_in_the_config(model_type: str) -> None:
    """A `head_dim` in the config is what both sides take."""
    config = bare(model_type, head_dim=96)
    theirs = their_config(model_type, config)
    theirs.num_key_value_heads = 16
    for layer_type, theta in their_theta(model_type, theirs).items():
        rope = Rope.from_config({"model_type": model_type} | config, layer_type=layer_type)
        assert rope.width == 2 * len(theta)
        assert rope.head_dim == their_head_dim(model_type, theirs, layer_type) == 96


def flat(model_type: str, **keys: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "max_position_embeddings": 8192,
    } | keys


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
    "gptj": flat("gptj", rotary_dim=32) | {"n_embd": 512, "n_head": 8},
    "codegen": flat("codegen", rotary_dim=16) | {"n_embd": 512, "n_head": 8},
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
    theta = their_theta(config["model_type"], their_config(config["model_type"], config))
    assert (None not in theta) == (config["model_type"] in PER_LAYER)
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
    theta = their_theta(model_type, their_config(model_type, config))
    assert set(theta) == set(parameters)
    for layer_type, theirs in theta.items():
        assert_same_theta(theirs, Rope.from_config(config, layer_type=layer_type))


@pytest.mark.parametrize(("kind", "inside"), [("longrope", None), ("longrope", 1024), ("su", 1024)])
def test_phi3_longrope(kind: str, inside: int | None) -> None:
    """Phi-3 has the original length at the top level, and that one wins; Θ at it and one above, and the factor."""
    scaling = {
        "type": kind,
        "short_factor": [1 + i / 9 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
    }
    if inside:
        scaling["original_max_position_embeddings"] = inside
    config = flat("phi3", original_max_position_embeddings=512, rope_scaling=scaling)
    rope, embedding = Rope.from_config(config), class_of("phi3", "RotaryEmbedding")(their_config("phi3", config))
    for length in (511, 512, 513, 1024, 1025):
        embedding(torch.zeros(1), torch.tensor([[length - 1]]))
        assert_same_theta(embedding.inv_freq.numpy(), rope.at(length))
    assert rope.attention_factor == pytest.approx(embedding.attention_scaling, rel=1e-15)


def test_phi3_without_an_original_length() -> None:
    """Phi-3's class has 4096 for the original length by default, and a config without it means that."""
    lists = {"short_factor": [1.0 + i for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
    config = flat("phi3", max_position_embeddings=131072, rope_scaling={"type": "longrope"} | lists)
    embedding = class_of("phi3", "RotaryEmbedding")(their_config("phi3", config))
    rope = Rope.from_config(config)
    for length in (4096, 4097):
        embedding(torch.zeros(1), torch.tensor([[length - 1]]))
        assert_same_theta(embedding.inv_freq.numpy(), rope.at(length))
    assert rope.attention_factor == pytest.approx(embedding.attention_scaling, rel=1e-15)


def test_original_length_of_a_layer_type() -> None:
    """Where each layer type has its own dict, its own original length holds and the one at the top level does not."""
    full = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 1024}
    parameters = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = flat("gemma3_text", head_dim=64, original_max_position_embeddings=512, rope_parameters=parameters)
    theta = their_theta("gemma3_text", their_config("gemma3_text", config))
    assert_same_theta(theta["full_attention"], Rope.from_config(config, layer_type="full_attention"))


@pytest.mark.parametrize("saved", [False, True])
def test_gemma4(saved: bool) -> None:
    """Gemma 4: full layers have larger heads, in which some pairs turn; `per_layer_config` says so once it is saved."""
    config = flat("gemma4_text", head_dim=64, global_head_dim=128, num_hidden_layers=4)
    config |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    proportional = {"rope_type": "proportional", "rope_theta": 2e6, "partial_rotary_factor": 0.5}
    config["rope_parameters"] = {"full_attention": proportional}
    config["rope_parameters"]["sliding_attention"] = {"rope_type": "default", "rope_theta": 5e3}
    theirs = their_config("gemma4_text", config)
    for layer_type, theta in their_theta("gemma4_text", theirs).items():
        rope = Rope.from_config(theirs.to_dict() if saved else config, layer_type=layer_type)
        assert rope.head_dim == their_head_dim("gemma4_text", theirs, layer_type)
        assert_same_theta(theta, rope)


def test_known_differences() -> None:
    """Where transformers 5.22.2 drops what the config says and pyrope does not; both are pinned, to notice a change.

    OLMo 3, old spelling: `rope_theta` reaches the full layers only, the sliding ones keep the default. One dict for
    each layer type: `"truncate": false` of yarn is looked for beside the dicts, not in them.
    """
    config = flat("olmo3", rope_theta=2000000.0)
    theta = their_theta("olmo3", their_config("olmo3", config))
    assert_same_theta(theta["full_attention"], Rope.from_config(config, layer_type="full_attention"))
    assert_same_theta(theta["sliding_attention"], Rope(64, 500000.0, "half"))
    assert Rope.from_config(config, layer_type="sliding_attention").base == 2000000.0

    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 1024}
    parameters = {
        "full_attention": yarn | {"truncate": False},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = flat("gemma3_text", head_dim=64, rope_parameters=parameters)
    theta = their_theta("gemma3_text", their_config("gemma3_text", config))
    ours = Rope.from_config(config, layer_type="full_attention")
    assert_same_theta(theta["full_attention"], Rope(64, 1e6, "half", scaling=YaRN(8.0, 1024)))
    assert ours.scaling == YaRN(8.0, 1024, truncate=False)


def their_rotation(model_type: str, cos: Any, sin: Any) -> list[Any]:
    """The matrices by which a module's own function turns queries and keys, from tables (p,) of one position."""
    d = 2 * len(cos)
    cos, sin = (torch.tensor(table).expand(1, d, -1) for table in (cos, sin))  # (b, n, p), the d unit vectors as n
    x = torch.eye(d, dtype=torch.float64)[None, None]  # (b, h, n, d)
    results = turned(model_type, x, in_their_form(model_type, cos, sin))
    assert all(result.dtype == torch.float64 for result in results)
    return [result[0, 0].T.numpy() for result in results]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_layout_and_direction(model_type: str) -> None:
    """The module's own rotation of the identity, with exact float64 tables, is R(Θ, m) in this layout and no other."""
    convention = MODEL_TYPES[model_type]
    for m in (1, 5, 37):
        cos, sin = pyrope.cos_sin(Rope(16, 100.0, "half"), m)
        for matrix in their_rotation(model_type, cos, sin):
            for layout in LAYOUTS:
                for direction in (1, -1):
                    rope = Rope(16, 100.0, layout, direction=direction)
                    error = np.abs(matrix - references.matrix(rope, m)).max()
                    if (layout, direction) == (convention.layout, convention.direction):
                        assert error < 1e-12
                        assert np.abs(matrix.T - pyrope.rotate(np.eye(16), [m] * 16, rope)).max() < 1e-12
                    else:
                        assert error > 0.1


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
    **{name: {"head_dim": 16, "rope_scaling": _INTERLEAVED["rope_scaling"] | {"mrope_section": [4, 2, 2]}}
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
    "qwen2_vl": "Qwen2VLTextModel",
    "qwen2_5_vl": "Qwen2_5_VLTextModel",
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
    given = known_keys(model_type, SMALL) | BESIDES.get(model_type, {}) | more
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
    as_given = model_type in (*COMPOSITE, "gemma4_text")  # for Gemma 4 as saved see test_gemma4
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


@pytest.mark.parametrize("model_type", MODEL_TYPES)
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
