"""`load`: checkpoints as each family stores them, written out by hand here, come back exactly, or say what is wrong."""

from __future__ import annotations

import json
import math
import re
import tracemalloc

import gguf_files
import numpy as np
import pytest
from gguf_files import gguf
from models import named_weights
from optional import needed
from test_families import CONFIGS

from pyrope import Rope, frequencies, load, to_numpy
from pyrope.models import checkpoints
from pyrope.models.architecture import weight_shapes
from pyrope.models.families import read_architecture
from pyrope.models.files import Tensor

ml_dtypes, save_file = needed("ml_dtypes"), needed("safetensors.numpy").save_file

FAMILY = pytest.mark.parametrize("name", CONFIGS)


def _weights(config, seed=0):
    """Random weights by our names, in steps of 1/64 so that float16 holds them, and 1 + them, exactly."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(-127, 128, shape) / 64).astype(np.float32) for name, shape in weight_shapes(config).items()
    }


# --- What each family stores: our weights -> its tensors, by names that are written out. ---


def _split(config, rows):
    """Rows of all heads -> those of queries, keys, values."""
    h, g, d = config.heads, config.key_heads, config.head_dim
    return rows[: h * d], rows[h * d : (h + g) * d], rows[(h + g) * d :]


def _llama(config, w, name):
    out = {"model.embed_tokens.weight": w["embedding"], "model.norm.weight": w["norm.weight"]}
    if not config.tied:
        out["lm_head.weight"] = w["head.weight"]
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    if name == "gemma3_text":
        norms |= {"attention_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
        norms |= {"mlp_post_norm": "post_feedforward_layernorm"}
    if name == "glm4":
        norms |= {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
    for i in range(len(config.layers)):
        own, theirs = f"layers.{i}", f"model.layers.{i}"
        for ours, called in norms.items():
            if f"{own}.{ours}.weight" in w:
                out[f"{theirs}.{called}.weight"] = w[f"{own}.{ours}.weight"]
        for kind in ("weight", "bias"):
            if f"{own}.qkv.{kind}" in w:
                rows = w[f"{own}.qkv.{kind}"]
                if name == "phi3":
                    out[f"{theirs}.self_attn.qkv_proj.{kind}"] = rows
                else:
                    for x, part in zip("qkv", _split(config, rows), strict=True):
                        out[f"{theirs}.self_attn.{x}_proj.{kind}"] = part
            if f"{own}.up.{kind}" in w:
                up = w[f"{own}.up.{kind}"]
                if name in ("phi3", "glm4"):
                    out[f"{theirs}.mlp.gate_up_proj.{kind}"] = up
                else:
                    out[f"{theirs}.mlp.gate_proj.{kind}"] = up[: config.mlp_width]
                    out[f"{theirs}.mlp.up_proj.{kind}"] = up[config.mlp_width :]
                out[f"{theirs}.mlp.down_proj.{kind}"] = w[f"{own}.down.{kind}"]
            if f"{own}.out.{kind}" in w:
                out[f"{theirs}.self_attn.o_proj.{kind}"] = w[f"{own}.out.{kind}"]
    if name == "gemma3_text":
        out = {key: x - 1 if "norm" in key else x for key, x in out.items()}
    return out


def _gpt_neox(config, w, name):
    out = {"gpt_neox.embed_in.weight": w["embedding"], "embed_out.weight": w["head.weight"]}
    for kind in ("weight", "bias"):
        out[f"gpt_neox.final_layer_norm.{kind}"] = w[f"norm.{kind}"]
        for i in range(len(config.layers)):
            own, theirs, d = f"layers.{i}", f"gpt_neox.layers.{i}", config.head_dim
            parts = _split(config, w[f"{own}.qkv.{kind}"])
            by_head = [part[head * d : (head + 1) * d] for head in range(config.heads) for part in parts]
            out[f"{theirs}.attention.query_key_value.{kind}"] = np.concatenate(by_head)
            out[f"{theirs}.attention.dense.{kind}"] = w[f"{own}.out.{kind}"]
            out[f"{theirs}.input_layernorm.{kind}"] = w[f"{own}.attention_norm.{kind}"]
            out[f"{theirs}.post_attention_layernorm.{kind}"] = w[f"{own}.mlp_norm.{kind}"]
            out[f"{theirs}.mlp.dense_h_to_4h.{kind}"] = w[f"{own}.up.{kind}"]
            out[f"{theirs}.mlp.dense_4h_to_h.{kind}"] = w[f"{own}.down.{kind}"]
    return out


def _gptj(config, w, name):
    out = {"transformer.wte.weight": w["embedding"]}
    for kind in ("weight", "bias"):
        out[f"transformer.ln_f.{kind}"], out[f"lm_head.{kind}"] = w[f"norm.{kind}"], w[f"head.{kind}"]
        for i in range(len(config.layers)):
            out[f"transformer.h.{i}.ln_1.{kind}"] = w[f"layers.{i}.attention_norm.{kind}"]
            out[f"transformer.h.{i}.mlp.fc_in.{kind}"] = w[f"layers.{i}.up.{kind}"]
            out[f"transformer.h.{i}.mlp.fc_out.{kind}"] = w[f"layers.{i}.down.{kind}"]
    for i in range(len(config.layers)):
        for x, part in zip("qkv", _split(config, w[f"layers.{i}.qkv.weight"]), strict=True):
            out[f"transformer.h.{i}.attn.{x}_proj.weight"] = part
        out[f"transformer.h.{i}.attn.out_proj.weight"] = w[f"layers.{i}.out.weight"]
    return out


def _sines(length, d, base=10000.0):
    """RoFormer's table: the sines, then the cosines, of m·base^(−2i/d)."""
    angles = [[m * base ** (-2 * i / d) for i in range(d // 2)] for m in range(length)]
    return np.array([[*map(math.sin, row), *map(math.cos, row)] for row in angles], np.float32)


def _roformer(config, w, name):
    types = np.stack((w["embedding_bias"], np.full_like(w["embedding_bias"], 9)))  # the second is for second sentences
    out = {
        "roformer.embeddings.word_embeddings.weight": w["embedding"],
        "roformer.embeddings.token_type_embeddings.weight": types,
        "roformer.encoder.embed_positions.weight": _sines(64, config.head_dim),
        "cls.predictions.bias": w["head.bias"],
    }
    for kind in ("weight", "bias"):
        out[f"roformer.embeddings.LayerNorm.{kind}"] = w[f"embedding_norm.{kind}"]
        out[f"cls.predictions.transform.dense.{kind}"] = w[f"head_dense.{kind}"]
        out[f"cls.predictions.transform.LayerNorm.{kind}"] = w[f"head_norm.{kind}"]
        for i in range(len(config.layers)):
            own, theirs = f"layers.{i}", f"roformer.encoder.layer.{i}"
            for x, part in zip(("query", "key", "value"), _split(config, w[f"{own}.qkv.{kind}"]), strict=True):
                out[f"{theirs}.attention.self.{x}.{kind}"] = part
            out[f"{theirs}.attention.output.dense.{kind}"] = w[f"{own}.out.{kind}"]
            out[f"{theirs}.attention.output.LayerNorm.{kind}"] = w[f"{own}.attention_norm.{kind}"]
            out[f"{theirs}.intermediate.dense.{kind}"] = w[f"{own}.up.{kind}"]
            out[f"{theirs}.output.dense.{kind}"] = w[f"{own}.down.{kind}"]
            out[f"{theirs}.output.LayerNorm.{kind}"] = w[f"{own}.mlp_norm.{kind}"]
    return out


WRITERS = {"gpt_neox": _gpt_neox, "gptj": _gptj, "roformer": _roformer}


def _checkpoint(name, **changed):
    """(config.json, our weights, its tensors)."""
    raw = CONFIGS[name] | changed
    config = read_architecture(raw)
    w = _weights(config)
    return raw, w, WRITERS.get(name, _llama)(config, w, name)


def _save(folder, raw, tensors, dtype=np.float32, file="model.safetensors"):
    (folder / "config.json").write_text(json.dumps(raw))
    stored = {key: np.array(x, dtype if x.dtype.kind == "f" else x.dtype, order="C") for key, x in tensors.items()}
    save_file(stored, folder / file)
    return folder


def _same(model, expected, dtype=np.float32):
    loaded = named_weights(model)
    if model.config.tied:
        assert loaded.pop("head.weight") is model.weights.embedding
    assert loaded.keys() == expected.keys()
    for name, x in loaded.items():
        assert x.dtype == dtype and np.array_equal(to_numpy(x), expected[name]), name


# --- What is stored comes back ---


@FAMILY
def test_every_family_comes_back_exactly(xp, name, tmp_path):
    raw, w, tensors = _checkpoint(name)
    model = load(_save(tmp_path, raw, tensors), backend="numpy" if xp is np else "cupy")
    assert model.config == read_architecture(raw)
    assert (type(model.weights.embedding) is np.ndarray) == (xp is np)
    _same(model, w)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64], ids=["F16", "BF16", "F64"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox"])
def test_any_float_is_read(name, stored, dtype, tmp_path):
    raw, w, tensors = _checkpoint(name)
    one = {key for key in w if name == "gemma3_text" and key.endswith("norm.weight")}
    expected = {key: (x - (key in one)).astype(stored).astype(dtype) + (key in one) for key, x in w.items()}
    _same(load(_save(tmp_path, raw, tensors, stored), dtype=dtype), expected, dtype)


def test_what_float32_cannot_hold_is_not_made_infinite(tmp_path):
    raw, _, tensors = _checkpoint("llama")
    tensors["model.norm.weight"] = np.full(16, 1e300)
    folder = _save(tmp_path, raw, tensors, np.float64)
    with pytest.raises(
        ValueError, match="model.norm.weight holds numbers too large for float32: load it with dtype float64"
    ):
        load(folder)
    assert load(folder, dtype="float64").weights.norm.weight.max() == 1e300


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}), ("llama", {"head_dim": 10}),
        ("llama", {"num_hidden_layers": 12}), ("cohere", {"attention_bias": True, "tie_word_embeddings": False}),
        ("qwen3", {"attention_bias": True}), ("glm4", {"attention_bias": False}), ("gptj", {"n_inner": 12}),
        ("gemma3_text", {"tie_word_embeddings": False}), ("phi3", {"num_key_value_heads": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_options_change_what_is_stored(name, changed, tmp_path):
    raw, w, tensors = _checkpoint(name, **changed)
    _same(load(_save(tmp_path, raw, tensors)), w)


def test_biases_and_blocks_of_gpt_neox(tmp_path):
    raw, w, tensors = _checkpoint("gpt_neox", use_parallel_residual=False)
    model = load(str(_save(tmp_path, raw, tensors)))
    assert model.config.block == "sequential"
    _same(model, w)


def test_several_files(tmp_path):
    raw, w, tensors = _checkpoint("llama")
    names, places = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        _save(tmp_path, raw, {name: tensors[name] for name in names[i::3]}, file=file)
        places |= dict.fromkeys(names[i::3], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    _same(load(tmp_path), w)


@FAMILY
def test_every_tensor_is_read_exactly_once(name, tmp_path, monkeypatch):
    raw, _, tensors = _checkpoint(name)
    reads = dict.fromkeys(tensors, 0)

    def counted(key, tensor):
        def read():
            reads[key] += 1
            return tensor.read()

        return Tensor(tensor.shape, read)

    def opened(path, original=checkpoints.open_checkpoint):
        config, tensors = original(path)
        return config, {key: counted(key, tensor) for key, tensor in tensors.items()}

    monkeypatch.setattr(checkpoints, "open_checkpoint", opened)
    load(_save(tmp_path, raw, tensors))
    assert set(reads.values()) == {1}


def test_buffers_are_passed_over(tmp_path):
    raw, w, tensors = _checkpoint("gpt_neox")
    buffers = {
        "gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), bool),
        "gpt_neox.layers.1.attention.masked_bias": np.array(-1e9, np.float32),
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": np.ones(1, np.float32),
    }
    _same(load(_save(tmp_path, raw, tensors | buffers)), w)
    raw, w, tensors = _checkpoint("llama")
    name, theta = "model.layers.0.self_attn.rotary_emb.inv_freq", frequencies(read_architecture(raw).layers[0].rope)
    _same(load(_save(tmp_path, raw, tensors | {name: theta.astype(np.float16)})), w)
    for other in (theta * 1.1, theta[:-1], np.ones((3, 3))):
        with pytest.raises(ValueError, match=f"{name} must hold the frequencies of the config, and has others"):
            load(_save(tmp_path, raw, tensors | {name: other}))
    with pytest.raises(ValueError, match="unexpected: evil.rotary_emb.inv_freq"):
        load(_save(tmp_path, raw, tensors | {"evil.rotary_emb.inv_freq": theta}))
    with pytest.raises(ValueError, match="unexpected: gpt_neox.layers.0.attention.bias"):
        load(_save(tmp_path, raw, tensors | buffers))


# --- Tied heads ---


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen2"])
def test_tied_heads_may_be_stored_too_if_they_are_the_same(name, tmp_path):
    raw, w, tensors = _checkpoint(name, tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    _same(load(_save(tmp_path, raw, tensors)), w)
    _same(load(_save(tmp_path, raw, tensors | {"lm_head.weight": w["embedding"]})), w)
    other = w["embedding"].copy()
    other[3, 2] += 1
    for head in (other, w["embedding"][:-1]):
        with pytest.raises(ValueError, match="lm_head.weight must be equal to model.embed_tokens.weight, and differs"):
            load(_save(tmp_path, raw, tensors | {"lm_head.weight": head}))


def test_a_head_that_is_not_tied_must_be_there(tmp_path):
    raw, _, tensors = _checkpoint("llama")
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing: lm_head.weight \(32, 16\)"):
        load(_save(tmp_path, raw, tensors))


# --- What does not fit ---


@FAMILY
def test_all_that_does_not_fit_is_said_at_once(name, tmp_path):
    raw, _, tensors = _checkpoint(name)
    matrices = sorted(key for key, x in tensors.items() if x.ndim == 2 and "embed" not in key)
    gone, turned, norm = matrices[0], matrices[1], next(key for key in tensors if "norm" in key.lower() or "ln_" in key)
    shape, was, size = tensors[gone].shape, tensors[turned].shape, tensors[norm].shape[0]
    del tensors[gone]
    tensors |= {
        turned: np.zeros((was[0], was[1] + 1), "f4"),
        norm: np.zeros(size + 1, "f4"),
        "extra": np.zeros(3, "f4"),
    }
    with pytest.raises(ValueError, match="the tensors do not fit the config:\n") as caught:
        load(_save(tmp_path, raw, tensors))
    assert set(str(caught.value).splitlines()[1:]) == {
        f"  missing: {gone} {shape}",
        f"  {turned} has shape {(was[0], was[1] + 1)}, not {was}",
        f"  {norm} has shape {(size + 1,)}, not {(size,)}",
        "  unexpected: extra (3,)",
    }


def test_a_long_list_is_cut(tmp_path):
    raw, _, tensors = _checkpoint("llama")
    del tensors["model.norm.weight"]
    extra = {f"x{i}": np.zeros(1, "f4") for i in range(30)}
    with pytest.raises(ValueError, match="missing: model.norm.weight") as caught:
        load(_save(tmp_path, raw, tensors | extra))
    assert len(str(caught.value).splitlines()) == 22 and str(caught.value).endswith("and 11 more")
    with pytest.raises(ValueError, match="missing: model.norm.weight") as caught:
        load(_save(tmp_path, raw, tensors | dict(list(extra.items())[:19])))
    assert len(str(caught.value).splitlines()) == 21 and "more" not in str(caught.value)
    with pytest.raises(ValueError, match="and 1 more$"):
        load(_save(tmp_path, raw, tensors | dict(list(extra.items())[:20])))


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.gguf"])
def test_what_does_not_exist_is_said_before_all_else(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
        load(tmp_path / name)


def test_absurd_configs_are_refused_without_the_work(tmp_path, monkeypatch):
    """10,000 layers of which the file has none: one list of names, not one for each name; and no array at all."""
    raw, _, tensors = _checkpoint("llama")
    calls = []

    def counted(config):
        calls.append(1)
        assert len(calls) <= 3, "the names of all weights are listed again and again"
        return weight_shapes(config)

    monkeypatch.setattr(checkpoints, "weight_shapes", counted)
    for absurd in ({"num_hidden_layers": 10000}, {"vocab_size": 2**31}, {"intermediate_size": 2**30}):
        with pytest.raises(ValueError, match="the tensors do not fit the config"):
            load(_save(tmp_path, raw | absurd, tensors))


def test_fused_tensors_of_another_split_are_refused(tmp_path):
    raw, _, tensors = _checkpoint("phi3")
    raw["num_key_value_heads"] = 4
    with pytest.raises(ValueError, match=r"qkv_proj.weight has shape \(32, 16\), not \(48, 16\)"):
        load(_save(tmp_path, raw, tensors))


TABLE = "roformer.encoder.embed_positions.weight"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (_sines(64, 4, base=500.0), "differs by 1.* from the sines and cosines of its rope"),
        (_sines(64, 4)[:, [0, 2, 1, 3]], "differs by .* from the sines and cosines of its rope"),
        (_sines(64, 6), r"has shape \(64, 6\), not \(length, 4\)"),
        (_sines(64, 4)[:0], r"has shape \(0, 4\), not \(length, 4\)"),
        (_sines(64, 4)[0], r"has shape \(4,\), not \(length, 4\)"),
    ],
)
def test_roformer_tables_must_be_those_of_its_rope(table, says, tmp_path):
    raw, _, tensors = _checkpoint("roformer")
    with pytest.raises(ValueError, match=f"{TABLE} {says}"):
        load(_save(tmp_path, raw, tensors | {TABLE: table}))


def test_roformer_without_its_table_or_with_one_token_type(tmp_path):
    raw, w, tensors = _checkpoint("roformer")
    types = "roformer.embeddings.token_type_embeddings.weight"
    del tensors[TABLE]
    _same(load(_save(tmp_path, raw, tensors | {types: tensors[types][:1]})), w)
    with pytest.raises(ValueError, match=rf"{types} has shape \(2, 17\), not \(2, 16\)"):
        load(_save(tmp_path, raw, tensors | {types: np.zeros((2, 17), "f4")}))
    for shape in ((0, 16), ()):
        with pytest.raises(ValueError, match=rf"{types} has shape {re.escape(str(shape))}, not \(1, 16\)"):
            load(_save(tmp_path, raw, tensors | {types: np.zeros(shape, "f4")}))
    del tensors[types]
    with pytest.raises(ValueError, match=rf"missing: {types} \(1, 16\)"):
        load(_save(tmp_path, raw, tensors))


def test_a_table_of_roformer_in_another_family_is_unexpected(tmp_path):
    raw, _, tensors = _checkpoint("llama")
    with pytest.raises(ValueError, match=f"unexpected: {TABLE}"):
        load(_save(tmp_path, raw, tensors | {TABLE: _sines(8, 4)}))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dtype": "float16"}, ValueError, "dtype must be one of 'float32', 'float64', was 'float16'"),
        ({"dtype": np.float32}, ValueError, "dtype must be one of"),
        ({"backend": "torch"}, ValueError, 'backend must be "numpy" or "cupy", was \'torch\''),
    ],
)
def test_wrong_arguments_are_said_before_a_file_is_opened(options, error, says, tmp_path):
    with pytest.raises(error, match=says):
        load(tmp_path / "nowhere", **options)


def test_keys_may_be_ignored(tmp_path):
    raw, w, tensors = _checkpoint("llama")
    _save(tmp_path, raw | {"new_key": 1}, tensors)
    with pytest.raises(ValueError, match="new_key is not known"):
        load(tmp_path)
    _same(load(tmp_path, ignore=("new_key",)), w)


def test_unknown_model_types_are_refused(tmp_path):
    raw, _, tensors = _checkpoint("llama")
    with pytest.raises(ValueError, match="model_type must be one of .*, was 'mamba'"):
        load(_save(tmp_path, raw | {"model_type": "mamba"}, tensors))


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16], ids=["F32", "BF16"])
def test_loading_needs_little_more_than_the_model(stored, tmp_path):
    """Its own size, one tensor as it is stored, and some; 1 MB is less than any of the large ones."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 3}
    raw, w, tensors = _checkpoint("llama", **sizes)
    _save(tmp_path, raw, tensors, stored)
    final, largest = (
        sum(x.nbytes for x in w.values()),
        max(x.size for x in tensors.values()) * np.dtype(stored).itemsize,
    )
    del w, tensors
    tracemalloc.start()
    model = load(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert model.weights.embedding.shape == (2048, 512)
    assert final <= peak <= final + largest + 2**20


# --- GGUF ---


def _gguf_llama(tied=False, dtype=np.float32):
    """The settings of gguf_files.LLAMA: one layer of width 32, 4 heads of 8, 2 of keys, MLP 64, 5 words."""
    raw = {
        "model_type": "llama", "vocab_size": 5, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "intermediate_size": 64, "hidden_act": "silu", "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
    }  # fmt: skip
    config = read_architecture(raw)
    w = {name: x.astype(dtype) for name, x in _weights(config).items()}
    q, k, v = _split(config, w["layers.0.qkv.weight"])

    def neighbours(rows, heads):
        """Feature i of the first half of a head and of the second, one after the other."""
        order = [head * 8 + j for head in range(heads) for i in range(4) for j in (i, i + 4)]
        return rows[order]

    up = w["layers.0.up.weight"]
    tensors = {
        "token_embd.weight": w["embedding"], "output_norm.weight": w["norm.weight"],
        "blk.0.attn_norm.weight": w["layers.0.attention_norm.weight"], "blk.0.ffn_norm.weight": w["layers.0.mlp_norm.weight"],
        "blk.0.attn_q.weight": neighbours(q, 4), "blk.0.attn_k.weight": neighbours(k, 2), "blk.0.attn_v.weight": v,
        "blk.0.attn_output.weight": w["layers.0.out.weight"], "blk.0.ffn_gate.weight": up[:64],
        "blk.0.ffn_up.weight": up[64:], "blk.0.ffn_down.weight": w["layers.0.down.weight"],
    }  # fmt: skip
    return config, w, tensors | ({} if tied else {"output.weight": w["head.weight"]})


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["F32", "F16"])
def test_a_gguf_llama_comes_back(tied, dtype, tmp_path):
    config, w, tensors = _gguf_llama(tied, dtype)
    model = load(gguf_files.write(tmp_path / "model.gguf", tensors=tensors))
    assert model.config == config and model.config.layers[0].rope == Rope(8, 10000.0, "half")
    _same(model, w)


def test_a_quantised_gguf_llama_comes_back(tmp_path):
    """As the gguf package reads it, row by row, wherever the rows stand."""
    _, w, tensors = _gguf_llama(tied=True)
    packed = {name: x if x.ndim == 1 else gguf_files.quantised(x, "Q8_0") for name, x in tensors.items()}
    model = load(gguf_files.write(tmp_path / "model.gguf", tensors=packed))

    def rounded(x):
        kind = gguf.GGMLQuantizationType.Q8_0
        return x if x.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)

    expected = {name: rounded(x) for name, x in w.items()}
    assert not np.array_equal(expected["embedding"], w["embedding"])
    _same(model, expected)


def test_a_gguf_file_that_lacks_a_tensor_says_so(tmp_path):
    _, _, tensors = _gguf_llama()
    del tensors["blk.0.ffn_up.weight"]
    tensors["blk.0.attn_sinks.weight"] = np.zeros(4, np.float32)
    with pytest.raises(
        ValueError, match=r"missing: model.layers.0.mlp.up_proj.weight \(64, 32\)\n.*unexpected: blk.0.attn_sinks"
    ):
        load(gguf_files.write(tmp_path / "model.gguf", tensors=tensors))
