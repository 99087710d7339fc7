"""Hugging Face configs, in the old and the new spelling, become the ropes that they mean, or are refused."""

import json

import numpy as np
import pytest

from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, configs, frequencies
from pyrope.configs import MODEL_TYPES
from pyrope.theta import LAYOUTS

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072}
LLAMA3_OLD = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096}
SHORT, LONG = [1.0] * 32, [2.0] * 32


def half(**more):
    return Rope(64, more.pop("base", 10000.0), "half", **more)


@pytest.mark.parametrize(
    "config, expected",
    [
        pytest.param(LLAMA, half(), id="no word of rope: the base that the type implies"),
        pytest.param(LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_OLD}, half(base=500000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192)), id="llama3, old"),
        pytest.param(LLAMA | {"rope_parameters": LLAMA3_OLD | {"rope_theta": 500000.0}}, half(base=500000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192)), id="llama3, new"),
        pytest.param(LLAMA | {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, half(base=9.0), id="the inner rope_theta wins"),
        pytest.param(
            LLAMA | {"max_position_embeddings": 1024, "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
            half(scaling=LongRoPE(SHORT, LONG, 1.0, 4096)), id="longrope for less than its original length",
        ),
        pytest.param(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}}, half(scaling=Linear(4.0)), id="type instead of rope_type"),
        pytest.param(LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, half(scaling=DynamicNTK(2.0, 131072)), id="dynamic"),
        pytest.param(LLAMA | {"rope_scaling": {"rope_type": "yarn", **YARN}}, half(scaling=YaRN(32.0, 4096)), id="yarn"),
        pytest.param(
            LLAMA | {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": None}},
            half(scaling=YaRN(32.0, 4096, 16.0, 2.0, None, 1.0, 0.5, False)), id="yarn with all its keys",
        ),
        pytest.param(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096}}, half(scaling=YaRN(32.0, 4096)), id="yarn, factor null"),
        pytest.param(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, half(scaling=YaRN(4.0, 131072)), id="yarn, no original length"),
        pytest.param(
            LLAMA | {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG}},
            half(scaling=LongRoPE(SHORT, LONG, 32.0, 4096)), id="longrope by its alias, original length at the top",
        ),
        pytest.param(
            LLAMA | {"original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 77}},
            half(scaling=LongRoPE(SHORT, LONG, 32.0, 4096)), id="the top level's original length wins",
        ),
        pytest.param(
            LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0, "original_max_position_embeddings": 8192, "attention_factor": 1.5}},
            half(scaling=LongRoPE(SHORT, LONG, 4.0, 8192, 1.5)), id="longrope with its own factors",
        ),
        pytest.param(LLAMA | {"head_dim": 512, "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}}, Rope(512, 1e6, "half", scaling=Proportional(0.25)), id="proportional"),
        pytest.param(LLAMA | {"partial_rotary_factor": 0.5}, half(rotary_dim=32), id="partial, at the top"),
        pytest.param(LLAMA | {"head_dim": 80}, Rope(80, 10000.0, "half"), id="head_dim that is not hidden size / heads"),
        pytest.param({"model_type": "gpt_neox", "hidden_size": 512, "num_attention_heads": 8, "rotary_pct": 0.25, "rotary_emb_base": 20000}, Rope(64, 20000.0, "half", 16), id="GPT-NeoX"),
        pytest.param({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64}, Rope(256, 10000.0, "interleaved", 64), id="GPT-J"),
        pytest.param({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": None}, Rope(256, 10000.0, "interleaved"), id="GPT-J, whole head"),
        pytest.param(
            {"model_type": "kimi_k2", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 50000, "max_position_embeddings": 131072, "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}},
            Rope(192, 50000.0, "interleaved-to-half", 64, "suffix", YaRN(32.0, 4096, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0)), id="Kimi-K2: DeepSeek-V3's form, equal betas",
        ),
        pytest.param({"model_type": "dbrx", "d_model": 256, "n_heads": 4, "attn_config": {"rope_theta": 500000}}, half(base=500000.0), id="DBRX, its own names"),
        pytest.param({"model_type": "ernie4_5_vl_moe_text", "head_dim": 8, "rope_scaling": {"mrope_section": [1, 1, 2]}}, Rope(8, 500000.0, "interleaved", axes=Axes("listed", (1, 2, 0, 0))), id="ERNIE 4.5 VL: rows and columns, then times"),
        pytest.param({"model_type": "kimi_k25_vision", "head_dim": 8, "rope_parameters": {"rope_type": "axial"}}, Rope(8, 10000.0, "half", axes=Axes("listed", (1, 0, 1, 0), "own")), id="Kimi's vision: columns and rows"),
        pytest.param({"model_type": "qwen2_vl_vision", "embed_dim": 256, "num_heads": 4, "hidden_size": 999}, half(axes=Axes("axial")), id="the vision part of Qwen2-VL"),
        pytest.param({"model_type": "ministral3", "head_dim": 64, "rope_parameters": {"rope_type": "yarn", **YARN, "llama_4_scaling_beta": 0.1}}, half(base=1e6, scaling=YaRN(32.0, 4096)), id="queries that grow are not of the rope"),
        pytest.param({"model_type": "gemma", "hidden_size": 3072, "num_attention_heads": 16}, Rope(256, 10000.0, "half"), id="Gemma's head is not hidden size / heads"),
        pytest.param({"model_type": "nanochat", "hidden_size": 256, "num_attention_heads": 4}, half(direction=-1), id="nanochat turns backwards"),
        pytest.param({"model_type": "deepseek_v3", "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_interleave": False}, Rope(192, 10000.0, "half", 64, "suffix"), id="DeepSeek-V3 with half pairs"),
        pytest.param(
            {"model_type": "qwen2_vl", "hidden_size": 1536, "num_attention_heads": 12, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
            Rope(128, 1e6, "half", axes=Axes("sections", (16, 24, 24))), id="Qwen2-VL",
        ),
        pytest.param(
            {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", "head_dim": 128, "rope_theta": 5e6, "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}}},
            Rope(128, 5e6, "half", axes=Axes("interleaved", (24, 20, 20))), id="Qwen3-VL, inside text_config",
        ),
        pytest.param(
            {"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
            Rope(128, 10000.0 * 1000.0 ** (128 / 126), "half"), id="HunYuan's alpha is another base",
        ),
        pytest.param(
            {"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}},
            Rope(128, 10000.0 * 9.0 ** (128 / 126), "half"), id="with keys of YaRN beside it",
        ),
        pytest.param(
            {"model_type": "phi3", "head_dim": 64, "max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}},
            half(scaling=LongRoPE(SHORT, LONG, 32.0, 4096)), id="Phi-3 has an original length of its own",
        ),
    ],
)  # fmt: skip
def test_configs(config, expected):
    before = json.dumps(config)
    assert Rope.from_config(config) == expected
    assert json.dumps(config) == before


SCALED = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 256}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}
GEMMA4 = {"model_type": "gemma4_text", "head_dim": 256, "rope_parameters": {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_theta": 1e4},
}}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"] * 2
SAVED = {"layer_types": LAYERS, "per_layer_config": {"01": {"head_dim": 64}, "3": {"head_dim": 64}}}
MODERNBERT = {"model_type": "modernbert", "hidden_size": 1024, "num_attention_heads": 4} | SCALED
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("config, layer_type, expected", [
    (GEMMA3, FULL, Rope(256, 1e6, "half")), (GEMMA3, SLIDING, Rope(256, 1e4, "half")),
    (GEMMA3 | {"rope_parameters": NESTED}, FULL, Rope(256, 2e6, "half", scaling=Linear(8.0))), (GEMMA3 | {"rope_parameters": NESTED}, SLIDING, Rope(256, 3e4, "half")),
    (GEMMA3 | SCALED | {"rope_theta": 5e6}, FULL, Rope(256, 5e6, "half", scaling=Linear(8.0))),
    (GEMMA3 | SCALED | {"rope_local_base_freq": 9e3}, SLIDING, Rope(256, 9e3, "half")),
    (GEMMA3 | {"original_max_position_embeddings": 512, "rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}}, FULL, Rope(256, 1e6, "half", scaling=YaRN(32.0, 4096))),
    (MODERNBERT, FULL, Rope(256, 160000.0, "half", scaling=Linear(8.0))), (MODERNBERT | {"local_rope_theta": 7.0}, SLIDING, Rope(256, 7.0, "half", scaling=Linear(8.0))),
    ({"model_type": "olmo3", "head_dim": 256} | SCALED, SLIDING, Rope(256, 500000.0, "half")),
    ({"model_type": "deepseek_v4", "qk_rope_head_dim": 32, "rope_scaling": {"type": "yarn", **YARN}}, "main", Rope(512, 10000.0, "interleaved", 32, "suffix")),
    ({"model_type": "deepseek_v4", "qk_rope_head_dim": 32, "rope_scaling": {"type": "yarn", **YARN}}, "compress", Rope(512, 160000.0, "interleaved", 32, "suffix", YaRN(32.0, 4096, attention_factor=1.0))),
    (GEMMA4, FULL, Rope(512, 1e6, "half", scaling=Proportional(0.25))), (GEMMA4, SLIDING, Rope(256, 1e4, "half")),
    (GEMMA4 | {"global_head_dim": 64}, FULL, Rope(64, 1e6, "half", scaling=Proportional(0.25))),
    (GEMMA4 | SAVED, FULL, Rope(64, 1e6, "half", scaling=Proportional(0.25))), (GEMMA4 | SAVED, SLIDING, Rope(256, 1e4, "half")),
])  # fmt: skip
def test_layers_with_different_ropes(config, layer_type, expected):
    assert Rope.from_config(config, layer_type=layer_type) == expected
    with pytest.raises(ValueError, match="layer_type must be one of .*, which have different ropes, was None"):
        Rope.from_config(config)
    with pytest.raises(ValueError, match="was 'chunked'"):
        Rope.from_config(config, layer_type="chunked")


def test_heads_of_different_sizes():
    sizes = {"per_layer_config": {"01": {"head_dim": 64}, "3": {"head_dim": 128}}}
    with pytest.raises(ValueError, match="layers of type 'full_attention' have heads of different sizes"):
        Rope.from_config(GEMMA4 | SAVED | sizes, layer_type=FULL)
    with pytest.raises(ValueError, match="layers of type None have heads of different sizes"):
        Rope.from_config(LLAMA | {"per_layer_config": {"1": {"head_dim": 64}}})


def test_layer_types_that_share_one_rope():
    config = LLAMA | {"layer_types": ["full_attention", "sliding_attention"]}
    assert Rope.from_config(config, layer_type="sliding_attention") == half()
    with pytest.raises(ValueError, match="has no layers of type 'full_attention': leave layer_type out"):
        Rope.from_config(LLAMA | {"layer_types": 5}, layer_type="full_attention")
    nested = {"full_attention": None, "other": {"rope_theta": 5.0}}
    with pytest.raises(ValueError, match="layers of type 'full_attention' are not rotated"):
        Rope.from_config(LLAMA | {"rope_parameters": nested}, layer_type="full_attention")
    with pytest.raises(TypeError, match="layer_type must be a word"):
        Rope.from_config(LLAMA, layer_type=["full_attention"])


def test_paths(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert Rope.from_config(path) == Rope.from_config(str(path)) == Rope.from_config(tmp_path) == half()
    path.write_text(json.dumps(LLAMA).replace("{", '{"model_type": "gptj", ', 1))
    with pytest.raises(ValueError, match="config.json: the key 'model_type' occurs twice"):
        Rope.from_config(path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        Rope.from_config(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="config must be a dict"):
        Rope.from_config(3)


def test_sizes_outside_come_before_a_text_config():
    """Only a config that has no size of its own is read from within."""
    inner = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 500000.0}
    outer = {"model_type": "llama", "num_attention_heads": 4, "rope_theta": 10000.0, "text_config": inner}
    assert Rope.from_config(outer) == Rope.from_config(outer | {"hidden_size": None}) == Rope(32, 500000.0, "half")
    for key in ("hidden_size", "n_embd"):
        assert Rope.from_config(outer | {key: 256}) == Rope(64, 10000.0, "half")


UNKNOWN = {"model_type": "novel", "head_dim": 64, "rope_theta": 10000.0}


def test_the_layout_is_never_guessed():
    for config in (UNKNOWN, {"head_dim": 64, "rope_theta": 10000.0}, UNKNOWN | {"model_type": ["llama"]}):
        with pytest.raises(ValueError, match="does not say which features make a pair.*pass layout="):
            Rope.from_config(config)
        assert Rope.from_config(config, layout="half") == half()
    assert Rope.from_config(LLAMA, layout="interleaved").layout == "interleaved"
    with pytest.raises(ValueError, match="does not say rope_theta"):
        Rope.from_config({"head_dim": 64}, layout="half")


@pytest.mark.parametrize("key", [
    "rope_local_base_freq", "swa_rope_theta", "axes_dims_rope", "rope_interleaved", "rotary_emb_fraction", "rope_ratio",
    "use_dynamic_ntk", "rotary_base", "alibi_slopes", "use_rope_of_tomorrow",
])  # fmt: skip
@pytest.mark.parametrize("config", [LLAMA, UNKNOWN], ids=["known", "unknown"])
def test_a_key_that_may_change_the_rope_and_is_not_read_is_refused(config, key):
    with pytest.raises(ValueError, match=f"says {key}, which is not read here"):
        Rope.from_config(config | {key: 10000.0}, layout="half")
    assert Rope.from_config(config | {key: False}, layout="half") == half()


def test_what_says_nothing_more_is_no_reason_to_refuse():
    assert Rope.from_config(LLAMA | {"rope_interleaved": True}, layout="interleaved").layout == "interleaved"
    ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 10000.0}}
    config = {"model_type": "novel", "head_dim": 64, "rope_parameters": ropes, "swa_rope_theta": 10000.0}
    assert Rope.from_config(config, layout="half", layer_type="sliding_attention") == half()
    for key in ("kv_channels", "global_head_dim", "attention_head_dim", "rope_interleave"):  # of an unknown type alone
        assert Rope.from_config(LLAMA | {key: 128}) == half()
        with pytest.raises(ValueError, match=f"says {key}, which is not read here"):
            Rope.from_config(UNKNOWN | {key: 128}, layout="half")


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"rope_scaling": {"rope_type": "ntk-by-parts"}}, ValueError, "rope_type must be one of 'default', 'linear', .* was 'ntk-by-parts'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "fctor": 1}}, ValueError, "'linear' has unexpected keys, .*: fctor"),
        ({"rope_scaling": {"rope_type": "linear"}}, ValueError, "the config lacks 'factor', which rope_type 'linear' needs"),
        ({"rope_scaling": {"rope_type": "yarn"}}, ValueError, "lacks 'factor', which rope_type 'yarn' needs: add it, or original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}}, ValueError, "lacks 'factor', which rope_type 'longrope' needs: add"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ValueError, "lacks 'low_freq_factor', 'high_freq_factor', which"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "max_position_embeddings": None}, ValueError, "lacks 'max_position_embeddings', which rope_type 'llama3' needs"),
        ({"model_type": "hunyuan_vl", "rope_scaling": {"type": "xdrope"}}, ValueError, "'hunyuan_vl' is not read: the two features of a pair follow different axes"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": SHORT}}, ValueError, "lacks 'long_factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, TypeError, "factor must be a number, was '4'"),
        ({"rope_scaling": "linear"}, TypeError, "must be a dict with words as its keys, was 'linear'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, ValueError, "both rope_parameters and rope_scaling, and they differ"),
        ({"rope_theta": "10000"}, TypeError, "rope_theta must be a number"),
        ({"rope_theta": 0.5}, ValueError, "rope_theta must be finite and greater than 1"),
        ({"hidden_size": 255}, ValueError, "hidden_size, 255, must be a multiple of num_attention_heads, 4"),
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads must be at least 1"),
        ({"head_dim": 63}, ValueError, "head_dim must be even"),
        ({"partial_rotary_factor": 1.5}, ValueError, "partial_rotary_factor must be .* at most 1, was 1.5"),
        ({"partial_rotary_factor": 0.27}, ValueError, "partial_rotary_factor 0.27 makes 17 of the head_dim, 64"),
        ({"partial_rotary_factor": 0.5, "rotary_dim": 16}, ValueError, "rotary_dim 16 and a partial_rotary_factor that makes 32"),
        ({"qk_rope_head_dim": 64}, ValueError, "lacks 'qk_nope_head_dim'"),
        ({"model_type": "qwen2_vl"}, ValueError, "several position axes: the config must say mrope_section"),
        ({"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}, ValueError, r"mrope_section \(16, 24, 25\) must add up to the number of pairs, 32"),
        ({"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": 32}}, TypeError, "mrope_section must be a list of integers"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, ValueError, r"does not say which pairs turn with which axis.*axes=Axes\(\"sections\", …\)"),
        ({"model_type": "ernie4_5_vl_moe_text", "rope_scaling": {"mrope_section": [10, 11, 11]}}, ValueError, "pairs for rows, as many for columns"),
        ({"model_type": "dbrx", "d_model": 64, "n_heads": 2, "attn_config": {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 1e4}}, ValueError, r"attn_config.rope_theta is 500000.0, but 10000 in rope_parameters"),
        ({"rope_parameters": {"rope_type": "axial"}}, ValueError, "was 'axial'"),
        ({"model_type": "zamba2"}, ValueError, "has RoPE only where the config says use_mem_rope: True"),
        ({"model_type": "laguna"}, ValueError, "layers of model_type 'laguna' differ: the config must say rope_parameters for each"),
        ({"model_type": "granite_swa", "layer_rope_theta": [1e4, 1e6, 0]}, ValueError, "layer_rope_theta has several bases"),
        ({"model_type": "jetmoe", "kv_channels": "many"}, TypeError, "kv_channels must be an integer, was 'many'"),
        ({"rope_scaling": LLAMA3_OLD | {"low_freq_factor": 5.0}}, ValueError, "high_freq_factor must be at least low_freq_factor, 5, was 4"),
        ({"rope_scaling": LLAMA3_OLD | {"original_max_position_embeddings": 1}}, ValueError, "original_max_position_embeddings must be at least 2, was 1"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, ValueError, "says rope_type 'linear' and type 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 262144}}, ValueError, "factor must be finite and at least 1, was 0.5"),
        ({"rope_scaling": {"type": "longrope", "short_mscale": 1.2, "long_mscale": 1.2}}, ValueError, "unexpected keys, .*: long_mscale, short_mscale"),
        ({"rope_scaling": {1: 2, "a": 3}}, ValueError, "unexpected keys, .*: 1, a"),
        ({"model_type": "qwen3_vl_text", "head_dim": 128, "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": False}}, ValueError, "has axes of style 'interleaved', but the config says mrope_interleaved False"),
        ({"position_embedding_type": "nope"}, ValueError, "does not use RoPE .position_embedding_type: 'nope'"),
        ({"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 5.0}, "head_dim": 2}, ValueError, "alpha needs a rotary width of at least 4"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": None}, ValueError, "lacks 'max_position_embeddings'"),
    ],
)  # fmt: skip
def test_bad_configs(change, error, match):
    with pytest.raises(error, match=match):
        Rope.from_config(LLAMA | change)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_convention_makes_a_rope(model_type):
    convention = MODEL_TYPES[model_type]
    assert convention.layout in LAYOUTS
    config = {"model_type": model_type, "head_dim": 80, "global_head_dim": 80, "rope_parameters": {"type": "default"}}
    config |= {own: 80 for own, usual in convention.names.items() if usual == "head_dim"}
    if convention.switch:
        with pytest.raises(ValueError, match=f"has RoPE only where the config says {convention.switch[0]}"):
            Rope.from_config(config)
        config |= dict([convention.switch])
    if convention.latent:
        with pytest.raises(ValueError, match="lacks 'qk_rope_head_dim', which its model_type needs"):
            Rope.from_config(config)
        config |= {"qk_rope_head_dim": 80, "qk_nope_head_dim": 80}
    if convention.axes:
        rest = int(40 * convention.fraction) - 6
        sections = [3, 3, rest] if convention.axes == "ernie" else [rest, 3, 3]
        config["rope_parameters"]["mrope_section"] = sections
    if convention.by_layer:
        with pytest.raises(ValueError, match="differ: the config must say rope_parameters for each layer type"):
            Rope.from_config(config)
        config["rope_parameters"] = {"first": config["rope_parameters"] | {"rope_theta": 5.0}, "second": None}
        assert Rope.from_config(config, layer_type="first").base == 5.0
        return
    for layer_type in convention.layers or [None]:
        rope = Rope.from_config(config, layer_type=layer_type)
        assert rope.base == (convention.layers[layer_type].base if layer_type else convention.base)
        assert rope.width == (78 if convention.axes == "thirds" else convention.rotary_dim or 80 * convention.fraction)
        assert (rope.axes is not None) == bool(convention.axes)
    if convention.explicit:
        with pytest.raises(ValueError, match="scales its frequencies: the config must say rope_parameters"):
            Rope.from_config(config | {"rope_parameters": None}, layer_type=layer_type)


def test_a_step_instead_of_a_ramp():
    """Llama 4 Scout's low = high, and Kimi K2's beta_fast = beta_slow, by numbers that are worked out here."""
    scout = LLAMA | {"head_dim": 128, "rope_theta": 500000.0, "rope_scaling": LLAMA3_OLD | {"high_freq_factor": 1.0}}
    theta, w = frequencies(Rope.from_config(scout)), 500000.0 ** (-np.arange(64) / 64)
    assert np.allclose(theta, np.where(2 * np.pi / w > 8192, w / 8, w), rtol=1e-14)
    equal = {"rope_type": "yarn", **YARN, "beta_fast": 1.0, "beta_slow": 1.0}
    theta, w = frequencies(Rope.from_config(LLAMA | {"rope_scaling": equal})), 10000.0 ** (-np.arange(32) / 32)
    step = 32 * np.log(4096 / (2 * np.pi)) / np.log(10000)  # between pairs 22 and 23
    assert np.allclose(theta, np.where(np.arange(32) > step, w / 32, w), rtol=1e-14)


def test_layers_that_are_not_rotated_are_said():
    smollm3 = {"model_type": "smollm3", "num_hidden_layers": 8}
    assert configs.still_layers(smollm3) == [3, 7]
    assert configs.still_layers(smollm3 | {"no_rope_layer_interval": 2}) == [1, 3, 5, 7]
    assert configs.still_layers(smollm3 | {"no_rope_layers": [1, 1, 0, 1]}) == [2]
    assert configs.still_layers(smollm3 | {"model_type": "muse_spark_text", "num_hidden_layers": 6}) == [1, 5]
    kinds = {"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert configs.still_layers(kinds | {"num_hidden_layers": 4}) == [1, 3]
    ropes = {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": None}}
    assert configs.still_layers(kinds | ropes | {"model_type": "beam", "num_hidden_layers": 4}) == [1, 3]
    assert configs.still_layers({"model_type": "granite_swa", "layer_rope_theta": [1e4, 0, 1e4]}) == [1]
    assert configs.still_layers(LLAMA | {"num_hidden_layers": 32}) == []
    assert configs.still_layers(LLAMA | {"num_hidden_layers": "many", "no_rope_layers": "x"}) == []


@pytest.mark.parametrize("model_type", ["cohere2", "exaone4", "llama4_text"])
def test_layers_that_are_not_rotated_have_no_rope(model_type):
    config = {"model_type": model_type, "head_dim": 64, "layer_types": ["sliding_attention", "full_attention"]}
    assert Rope.from_config(config, layer_type="sliding_attention").head_dim == 64
    with pytest.raises(ValueError, match="layers of type 'full_attention' are not rotated in model_type"):
        Rope.from_config(config, layer_type="full_attention")
    assert Rope.from_config(config | {"sliding_window": None}, layer_type="full_attention").head_dim == 64
