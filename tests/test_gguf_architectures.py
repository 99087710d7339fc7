"""GGUF files in Hugging Face terms: configs and tensors as a folder would have them, and refusals of the rest."""

from __future__ import annotations

import math

import gguf_files
import numpy as np
import pytest
from gguf_files import EMBEDDING, LLAMA, gguf
from hostile_files import random_values, same
from hypothesis import given, strategies as st

from pyrope import Llama3, Rope
from pyrope.models import gguf_architectures
from pyrope.models.checkpoints import open_checkpoint


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.gguf"


def _opened(file, *arguments, **named):
    return open_checkpoint(gguf_files.write(file, *arguments, **named))


def test_a_llama_in_hugging_face_terms(file):
    others = {"general.name": "x", "quantize.imatrix.file": "y", "tokenizer.ggml.tokens": ["a", "b"]}
    names = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    blocks = {f"blk.0.{name}.weight": np.ones((32, 32), np.float32) for name in names}
    ends = {"output_norm.weight": np.ones(32, np.float32), "output.weight": np.ones((5, 32), np.float32)}
    config, tensors = _opened(file, tensors=EMBEDDING | blocks | ends, others=others)
    assert config == {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 5,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    layer = "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj"
    wanted = [f"model.layers.0.{name}.weight" for name in layer.split()]
    assert list(tensors) == ["model.embed_tokens.weight", *wanted, "model.norm.weight", "lm_head.weight"]


def test_settings_that_are_left_out(file):
    without = {
        "attention.head_count_kv": None,
        "rope.freq_base": None,
        "rope.dimension_count": None,
        "vocab_size": None,
    }
    config, _ = _opened(file, settings=LLAMA | without)
    assert config["num_key_value_heads"] == 4 and config["rope_theta"] == 10000.0 and config["head_dim"] == 8
    assert config["tie_word_embeddings"] is True
    config, _ = _opened(
        file, settings=LLAMA | {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
    )
    assert config["head_dim"] == 16


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_queries_and_keys_get_their_rows_back(file, kind):
    """d = 32, 4 query and 2 key heads: the file has rows 0, 16, 1, 17, … of each head."""
    sizes = {"embedding_length": 128, "rope.dimension_count": 32}
    wanted = {"q": random_values((128, 128), np.float32), "k": random_values((64, 128), np.float32, 1)}
    stored = {}
    for name, w in wanted.items():
        rows = [head + row + half for head in range(0, len(w), 32) for row in range(16) for half in (0, 16)]
        stored[f"blk.0.attn_{name}.weight"] = w[rows] if kind == "F32" else gguf_files.quantised(w[rows], kind)
        stored[f"blk.0.attn_{name}.bias"] = w[rows, 0]
    embedding = {"token_embd.weight": np.ones((5, 128), np.float32)}
    config, tensors = _opened(file, settings=LLAMA | sizes, tensors=embedding | stored)
    assert config["attention_bias"] is True
    for name, w in wanted.items():
        values = tensors[f"model.layers.0.self_attn.{name}_proj.weight"].read()
        raw = gguf.quants.dequantize(gguf_files.quantised(w, kind)[0], gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(values, raw)
        np.testing.assert_array_equal(tensors[f"model.layers.0.self_attn.{name}_proj.bias"].read(), w[:, 0])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures_keep_their_rows(file, architecture):
    w = random_values((32, 32), np.float32)
    stored = {f"blk.0.{name}.weight": w for name in ("attn_q", "attn_k")} | {"blk.0.attn_q_norm.weight": w[0, :8]}
    config, tensors = _opened(file, architecture, tensors=EMBEDDING | stored)
    assert config["model_type"] == architecture and config["use_sliding_window"] is False
    assert same(tensors["model.layers.0.self_attn.q_proj.weight"].read(), w)
    assert same(tensors["model.layers.0.self_attn.k_proj.weight"].read(), w)
    norm = "model.layers.0.self_attn.q_norm.weight" if architecture == "qwen3" else "blk.0.attn_q_norm.weight"
    assert same(
        tensors[norm].read(), w[0, :8]
    )  # what an architecture does not have keeps its name, for the loader to refuse


GEMMA = LLAMA | {
    "attention.sliding_window": 16,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "rope.freq_base": 1e6,
}


def test_gemma3(file):
    norms = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }
    w = random_values((8,), np.float32)
    stored = {f"blk.{i}.{name}.weight": w + 1 for i in range(8) for name in norms} | {"output_norm.weight": w + 1}
    stored["blk.0.attn_q.weight"] = matrix = random_values((32, 32), np.float32)
    scaled = {"block_count": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config, tensors = _opened(file, "gemma3", GEMMA | scaled, EMBEDDING | stored)
    assert config["model_type"] == "gemma3_text" and config["tie_word_embeddings"] is True
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    assert config["query_pre_attn_scalar"] == 8 and config["sliding_window"] == 16
    assert config["final_logit_softcapping"] is None and config["hidden_activation"] == "gelu_pytorch_tanh"
    sliding = Rope.from_config(config, layer_type="sliding_attention")
    assert sliding == Rope(8, 10000.0, "half")
    full = Rope.from_config(config, layer_type="full_attention")
    assert full.base == 1e6 and full.scaling.factor == 8.0
    for name in [f"model.layers.7.{name}.weight" for name in norms.values()] + ["model.norm.weight"]:
        np.testing.assert_array_equal(tensors[name].read(), (w + 1) - 1)
    assert same(tensors["model.layers.0.self_attn.q_proj.weight"].read(), matrix)


def test_the_largest_gemma3_scales_its_scores_in_its_own_way(file):
    stored = {f"blk.{i}.attn_norm.weight": np.ones(32, np.float32) for i in range(62)}
    own = {"block_count": 62, "attention.key_length": 6, "attention.value_length": 6, "rope.dimension_count": 6}
    assert _opened(file, "gemma3", GEMMA | own, EMBEDDING | stored)[0]["query_pre_attn_scalar"] == 32 // 4


PHI = LLAMA | {"attention.sliding_window": 0, "rope.scaling.original_context_length": 16, "rope.dimension_count": 6}


def test_phi3(file):
    w = random_values((64, 32), np.float32)
    stored = {"blk.0.attn_qkv.weight": w, "blk.0.ffn_up.weight": w}
    config, tensors = _opened(file, "phi3", PHI, EMBEDDING | stored)
    assert config["sliding_window"] is None and config["partial_rotary_factor"] == 0.75
    assert same(tensors["model.layers.0.self_attn.qkv_proj.weight"].read(), w)
    assert same(tensors["model.layers.0.mlp.gate_up_proj.weight"].read(), w)
    assert Rope.from_config(config) == Rope(8, 10000.0, "half", 6)


def test_phi3_with_longrope(file):
    short, long = [1.0, 1.5, 2.0], [1.0, 2.5, 4.0]
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    stored = {name: np.array(values, np.float32) for name, values in factors.items()}
    own = {"attention.sliding_window": 12, "rope.scaling.attn_factor": 1.25}
    for kind in ({}, {"rope.scaling.type": "longrope"}):
        config, tensors = _opened(file, "phi3", PHI | own | kind, EMBEDDING | stored)
        assert config["sliding_window"] == 12 and set(tensors) == {"model.embed_tokens.weight"}
        scaling = Rope.from_config(config).scaling
        assert (list(scaling.short), list(scaling.long)) == (short, long)
        assert scaling.original_length == 16 and Rope.from_config(config).at(64).attention_factor == 1.25
    with pytest.raises(ValueError, match="one is missing"):
        _opened(file, "phi3", PHI | own, EMBEDDING | {"rope_factors_long.weight": stored["rope_factors_long.weight"]})


def test_gptneox_has_queries_keys_and_values_by_head(file):
    own = {"attention.layer_norm_epsilon": 1e-5, "use_parallel_residual": True, "rope.dimension_count": 2}
    settings = (
        LLAMA
        | own
        | {"attention.layer_norm_rms_epsilon": None, "attention.head_count_kv": None, "rope.freq_base": None}
    )
    w = random_values((96, 32), np.float32)  # 4 heads of 8: q, k, v of each
    order = [head * 24 + part * 8 + row for part in range(3) for head in range(4) for row in range(8)]
    stored = {"blk.0.attn_qkv.weight": w[order], "blk.0.attn_qkv.bias": w[order, 0]}
    config, tensors = _opened(file, "gptneox", settings, EMBEDDING | stored)
    np.testing.assert_array_equal(tensors["gpt_neox.layers.0.attention.query_key_value.weight"].read(), w)
    np.testing.assert_array_equal(tensors["gpt_neox.layers.0.attention.query_key_value.bias"].read(), w[:, 0])
    assert config["layer_norm_eps"] == 1e-5 and config["use_parallel_residual"] is True
    assert Rope.from_config(config) == Rope(8, 10000.0, "half", 2)
    for other in ({"attention.head_count_kv": 2}, {"attention.key_length": 16, "attention.value_length": 16}):
        with pytest.raises(ValueError, match="gptneox must have 4 key heads, as query heads"):
            _opened(file, "gptneox", settings | other, EMBEDDING | stored)


@given(head_dim=st.integers(1, 300), data=st.data())
def test_a_partial_width_is_kept_by_its_fraction(head_dim, data):
    width = data.draw(st.integers(1, head_dim))
    config = {"head_dim": head_dim}
    gguf_architectures._rotary_width(
        gguf_architectures._ARCHITECTURES["phi3"],
        gguf_architectures._Settings("phi3", {"phi3.rope.dimension_count": width}),
        config,
    )
    assert int(head_dim * config["partial_rotary_factor"]) == width


def _llama3_divisors(head_dim, base, factor, low, high, length):
    """As the files have them: float32, one for each frequency."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = float(np.float32(2 * math.pi) * np.float32(base) ** np.float32(i / head_dim))
        t = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - t) / factor + t))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_is_recognised_by_its_divisors(file, factor):
    own = LLAMA | {"embedding_length": 256, "rope.dimension_count": 64, "rope.freq_base": 500000.0}
    tensors = EMBEDDING | {"rope_freqs.weight": _llama3_divisors(64, 500000.0, factor, 1.0, 4.0, 8192)}
    config, tensors = _opened(file, settings=own, tensors=tensors)
    assert set(tensors) == {"model.embed_tokens.weight"}
    assert Rope.from_config(config) == Rope(64, 500000.0, "half", scaling=Llama3(factor, 1.0, 4.0, 8192))


@pytest.mark.parametrize("low, high, length", [(2.0, 4.0, 8192), (1.0, 8.0, 8192), (1.0, 4.0, 4096), (1.0, 4.0, 8000)])
def test_other_divisors_are_refused(file, low, high, length):
    own = LLAMA | {"embedding_length": 256, "rope.dimension_count": 64, "rope.freq_base": 500000.0}
    divisors = _llama3_divisors(64, 500000.0, 8.0, low, high, length)
    for stored in (
        divisors,
        divisors[:-1],
        np.full(32, np.nan, np.float32),
        np.ones(32, np.float32),
        np.ones((32, 32), np.float32),
    ):
        with pytest.raises(ValueError, match="rope_freqs.weight is not the rescaling of Llama 3|must have one axis"):
            _opened(file, settings=own, tensors=EMBEDDING | {"rope_freqs.weight": stored})


def test_yarn_and_linear(file):
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    config, _ = _opened(file, "qwen2", LLAMA | yarn | {"rope.scaling.finetuned": True})
    scaling = Rope.from_config(config).scaling
    assert (scaling.factor, scaling.original_length, scaling.beta_fast, scaling.beta_slow) == (4.0, 32, 32.0, 1.0)
    config, _ = _opened(file, settings=LLAMA | {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert "rope_scaling" not in _opened(file, settings=LLAMA | {"rope.scaling.type": "none"})[0]


REFUSED = {
    "unknown key": (
        {"attention.clamp_kqv": 1.0},
        "may change the result, and are not understood: 'llama.attention.clamp_kqv'",
    ),
    "two unknown keys": ({"a": 1, "b": 1}, "'llama.a', 'llama.b'"),
    "window": ({"attention.sliding_window": 16}, "not understood: 'llama.attention.sliding_window'"),
    "experts": ({"expert_count": 8, "expert_used_count": 2}, "llama.expert_count must be 0, was 8"),
    "not causal": ({"attention.causal": False}, "llama.attention.causal must be True, was False"),
    "layout": ({"tensor_data_layout": "other"}, "tensor_data_layout must be 'Meta AI original pth'"),
    "vocabulary": ({"vocab_size": 6}, "llama.vocab_size must be 5, was 6"),
    "value length": ({"attention.value_length": 4}, "attention.value_length must be 8, was 4"),
    "rotary width": ({"rope.dimension_count": 4}, "rope.dimension_count must be the size of a head, 8, was 4"),
    "scaling type": (
        {"rope.scaling.type": "longrope"},
        "rope.scaling.type must be 'none', 'linear' or 'yarn', was 'longrope'",
    ),
    "scaling without type": ({"rope.scaling.factor": 2.0}, "not understood: 'llama.rope.scaling.factor'"),
    "scaling without factor": ({"rope.scaling.type": "linear"}, "lacks llama.rope.scaling.factor"),
    "yarn's factor": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 2.0},
        "scaling.attn_factor",
    ),
    "no blocks": ({"block_count": None}, "the metadata lacks llama.block_count"),
    "zero blocks": ({"block_count": 0}, "llama.block_count must be at least 1, was 0"),
    "too many blocks": ({"block_count": 2**31}, "llama.block_count is 2147483648, for 1 tensors"),
    "heads differ": ({"attention.head_count": [4, 4]}, "must be one value, was a list"),
    "heads do not fit": ({"attention.head_count": 5}, "lacks llama.attention.key_length"),
    "a word": ({"block_count": "one"}, "llama.block_count must be an integer, was 'one'"),
    "not finite": ({"rope.freq_base": math.nan}, "llama.rope.freq_base must be finite"),
    "zero epsilon": ({"attention.layer_norm_rms_epsilon": 0.0}, "must be finite and greater than 0"),
}


@pytest.mark.parametrize("change, words", REFUSED.values(), ids=REFUSED)
def test_metadata_that_is_not_understood_is_refused(file, change, words):
    with pytest.raises(ValueError, match=words) as error:
        _opened(file, settings=LLAMA | change)
    assert "model.gguf: " in str(error.value)


OTHERS = {
    "other architecture": ("mamba", {}, "general.architecture must be one of 'llama', .*, was 'mamba'"),
    "adapter": ("llama", {"general.type": "adapter"}, "general.type must be 'model', was 'adapter'"),
    "one of several": ("llama", {"split.count": 3}, "one of several files"),
    "other prefix": ("llama", {"qwen2.block_count": 3}, "not understood: 'qwen2.block_count'"),
    "alignment": ("llama", {"general.alignment": 48}, "general.alignment must be a power of two, was 48"),
    "small alignment": ("llama", {"general.alignment": 4}, "general.alignment must be at least 8, was 4"),
    "alignment as a word": ("llama", {"general.alignment": "32"}, "general.alignment must be an integer"),
}


@pytest.mark.parametrize("architecture, others, words", OTHERS.values(), ids=OTHERS)
def test_files_of_another_kind_are_refused(file, architecture, others, words):
    with pytest.raises(ValueError, match=words):
        _opened(file, architecture, LLAMA, others=others)


def test_two_scalings_are_refused(file):
    own = LLAMA | {
        "embedding_length": 256,
        "rope.dimension_count": 64,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
    }
    tensors = EMBEDDING | {"rope_freqs.weight": _llama3_divisors(64, 10000.0, 8.0, 1.0, 4.0, 8192)}
    with pytest.raises(ValueError, match="two rope scalings"):
        _opened(file, settings=own, tensors=tensors)


def test_names_that_would_collide_are_refused_or_kept_apart(file):
    one = np.ones(32, np.float32)
    _, tensors = _opened(file, tensors=EMBEDDING | {"blk.00.attn_norm.weight": one, "blk.0.attn_norm.weight": one})
    assert set(tensors) == {
        "model.embed_tokens.weight",
        "blk.00.attn_norm.weight",
        "model.layers.0.input_layernorm.weight",
    }
    with pytest.raises(ValueError, match="two tensors are called 'model.norm.weight'"):
        _opened(file, tensors=EMBEDDING | {"model.norm.weight": one, "output_norm.weight": one})
