"""Corners of the models that are easily broken unnoticed, each with numbers of its own."""

import json

import gguf_files
import numpy as np
import pytest
from gguf_files import gguf
from optional import package

import pyrope
from pyrope import Rope, load
from pyrope.models.gguf import read_gguf
from pyrope.models.text import load_tokenizer

tokenizers, safetensors = package("tokenizers"), package("safetensors.numpy")


def test_sizes_outside_come_before_a_text_config():
    """Only a config that has no size of its own is read from within."""
    inner = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "rope_theta": 500000.0}
    outer = {"model_type": "llama", "num_attention_heads": 4, "rope_theta": 10000.0, "text_config": inner}
    assert Rope.from_config(outer) == Rope(32, 500000.0, "half")
    for key in ("hidden_size", "n_embd"):
        assert Rope.from_config(outer | {key: 256}) == Rope(64, 10000.0, "half")
    assert Rope.from_config(outer | {"hidden_size": None}) == Rope(32, 500000.0, "half")
    assert Rope.from_config(outer | {"hidden_size": 256, "text_config": None}) == Rope(64, 10000.0, "half")


# Tokens


def words_of(folder, vocabulary, added=()):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a" if vocabulary else None))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_tokens(list(added))
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def test_tokens_that_were_added_count(tmp_path):
    """A vocabulary of two words, and two more that were added: ids 0 to 3."""
    tokenizer = words_of(tmp_path, {"a": 0, "b": 1}, ["c", "d"])
    assert tokenizer.vocabulary == 4
    assert tokenizer.encode("a d b") == [0, 3, 1] and tokenizer.decode([0, 3]) == "a d"
    with pytest.raises(ValueError, match="below the size of the vocabulary, 4, was 4"):
        tokenizer.decode([4])


def test_an_empty_vocabulary_has_no_token(tmp_path):
    tokenizer = words_of(tmp_path, {})
    assert tokenizer.vocabulary == 0 and tokenizer.decode([]) == ""
    with pytest.raises(ValueError, match="below the size of the vocabulary, 0, was 0"):
        tokenizer.decode([0])


# Checkpoints


def test_a_quantised_tensor_may_have_one_axis(tmp_path):
    values = np.linspace(-1, 1, 64, dtype=np.float32)
    packed, kind = gguf_files.quantised(values[None], "Q8_0")
    path = gguf_files.write(tmp_path / "x.gguf", tensors={"output_norm.weight": (packed[0], kind)})
    tensor = read_gguf(path).tensors["output_norm.weight"]
    assert tensor.shape == (64,)
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)[0]
    np.testing.assert_array_equal(tensor.read(), expected)
    assert np.abs(expected - values).max() < 0.01


GEMMA = {
    "model_type": "gemma3_text", "vocab_size": 5, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "intermediate_size": 64, "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 8,
    "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64,
}  # fmt: skip
NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
         "post_ffw_norm": "post_feedforward_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}  # fmt: skip
MATRICES = {"attn_q": ("self_attn.q_proj", (32, 32)), "attn_k": ("self_attn.k_proj", (16, 32)), "attn_v": ("self_attn.v_proj", (16, 32)),
            "attn_output": ("self_attn.o_proj", (32, 32)), "ffn_gate": ("mlp.gate_proj", (64, 32)), "ffn_up": ("mlp.up_proj", (64, 32)),
            "ffn_down": ("mlp.down_proj", (32, 64))}  # fmt: skip


def gemma(rng):
    """The same model in both forms: what a GGUF file has, in which norms are 1 + w, and what a folder has."""
    inside, folder = {}, {}

    def put(name, called, values, one=0.0):
        inside[f"{name}.weight"], folder[f"model.{called}.weight"] = values + np.float32(one), values

    put("token_embd", "embed_tokens", rng.standard_normal((5, 32)).astype(np.float32))
    put("output_norm", "norm", (rng.integers(-64, 64, 32) / 256).astype(np.float32), 1)
    for i in range(2):
        for name, called in NORMS.items():
            size = 8 if "self_attn" in called else 32
            put(f"blk.{i}.{name}", f"layers.{i}.{called}", (rng.integers(-64, 64, size) / 256).astype(np.float32), 1)
        for name, (called, shape) in MATRICES.items():
            put(f"blk.{i}.{name}", f"layers.{i}.{called}", (rng.standard_normal(shape) / 6).astype(np.float32))
    return inside, folder


def test_a_gemma_3_is_the_same_model_from_a_gguf_file_and_from_a_folder(tmp_path):
    inside, folder = gemma(np.random.default_rng(0))
    settings = gguf_files.LLAMA | {
        "block_count": 2, "attention.sliding_window": 3, "attention.sliding_window_pattern": 2, "attention.key_length": 8,
        "attention.value_length": 8, "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    path = gguf_files.write(tmp_path / "gemma.gguf", "gemma3", settings, inside)
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    safetensors.save_file(folder, tmp_path / "model.safetensors")
    tokens = np.array([[0, 3, 1, 4, 2, 2, 0, 1]])
    one, other = (load(where, dtype="float64") for where in (path, tmp_path))
    assert one.config == other.config
    np.testing.assert_array_equal(pyrope.forward(one, tokens), pyrope.forward(other, tokens))
    # A window of 3 hides in the first layer: without it the last logits are others.
    wide = load(
        gguf_files.write(tmp_path / "wide.gguf", "gemma3", settings | {"attention.sliding_window": 8}, inside),
        dtype="float64",
    )
    assert np.abs(pyrope.forward(wide, tokens) - pyrope.forward(one, tokens))[0, -1].max() > 1e-3


def test_one_is_added_to_norms_in_float64(tmp_path):
    """1 + 2⁻³⁰ is 1 in float32, and in bfloat16 1 + 2⁻⁹ is: a model in float64 must have both."""
    _, folder = gemma(np.random.default_rng(0))
    folder["model.norm.weight"] = np.full(32, 2.0**-30, np.float32)
    folder["model.layers.0.input_layernorm.weight"] = np.full(32, 2.0**-12, np.float16)
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    safetensors.save_file(folder, tmp_path / "model.safetensors")
    model = load(tmp_path, dtype="float64")
    assert (model.weights.norm.weight == 1 + 2.0**-30).all()
    assert (model.weights.layers[0].attention_norm.weight == 1 + 2.0**-12).all()
