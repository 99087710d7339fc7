"""`load`: what each published architecture is, and checkpoints as it stores them, written out by hand here, come back
exactly, from folders and from GGUF files, or say what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys

import gguf_files
import numpy as np
import pytest
from gguf_files import gguf
from optional import package

from pyrope import Linear, Llama3, LongRoPE, Rope, YaRN, frequencies, load, to_numpy
from pyrope.checkpoints import FAMILIES, read_architecture
from pyrope.model import Config, Layer, weight_shapes

ml_dtypes, save_file = package("ml_dtypes"), package("safetensors.numpy").save_file

# ── What each family is: a config.json as its authors write it, and the Config that it means ─────────────────────────

# Keys of any config.json that say nothing about the result.
EVERYWHERE = {
    "architectures": ["SomeForCausalLM"], "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None,
    "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "_name_or_path": "x", "attention_dropout": 0.0, "is_decoder": False,
}  # fmt: skip
_SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24,
}  # fmt: skip
_LLAMA = _SIZES | {
    "model_type": "llama", "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 500000.0, "tie_word_embeddings": False, "attention_bias": False,
    "pretraining_tp": 1, "mlp_bias": False,
}  # fmt: skip
_QWEN = {key: value for key, value in _LLAMA.items() if key not in ("attention_bias", "mlp_bias", "pretraining_tp")}
_ROPE = Rope(4, 500000.0, "half")
_MODEL = Config(
    vocabulary=32, width=16, heads=4, key_heads=2, head_dim=4, mlp_width=24, layers=(Layer(_ROPE),) * 2, norm="rms",
    eps=1e-5, activation="silu", gated=True, block="sequential", causal=True,
)  # fmt: skip
CONFIGS = {
    "llama": _LLAMA,
    "mistral": _QWEN | {"model_type": "mistral", "sliding_window": 7, "head_dim": None},
    "qwen2": _QWEN | {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False, "max_window_layers": 1},
    "qwen3": _QWEN | {"model_type": "qwen3", "head_dim": 6, "attention_bias": False, "sliding_window": None}
    | {"use_sliding_window": False, "max_window_layers": 1},
    "phi3": _QWEN | {"model_type": "phi3", "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False}
    | {"sliding_window": 9, "original_max_position_embeddings": 64, "auto_map": {"AutoConfig": "a.B"}},
    "gemma3_text": _SIZES | {
        "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 25, "sliding_window": 5, "sliding_window_pattern": 2, "attention_bias": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
    },
    "cohere": _SIZES | {
        "model_type": "cohere", "num_key_value_heads": 2, "hidden_act": "silu", "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625, "use_qk_norm": False, "rope_theta": 10000.0, "attention_bias": False,
        "max_position_embeddings": 64,
    },
    "glm4": _SIZES | {
        "model_type": "glm4", "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5, "attention_bias": True, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    },
    "gpt_neox": _SIZES | {
        "model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.5,
        "rotary_emb_base": 10000, "use_parallel_residual": True, "tie_word_embeddings": False, "hidden_dropout": 0.0,
        "classifier_dropout": 0.1, "max_position_embeddings": 64,
    },
    "gptj": {
        "model_type": "gptj", "vocab_size": 32, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_inner": None, "n_ctx": 64,
        "n_positions": 64, "rotary_dim": 4, "rotary": True, "activation_function": "gelu_new", "attn_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": False, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "summary_type": "cls_index", "summary_use_proj": True, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "gradient_checkpointing": False,
        "task_specific_params": {"text-generation": {"do_sample": True}}, "tokenizer_class": "GPT2Tokenizer",
    },
    "roformer": _SIZES | {
        "model_type": "roformer", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "embedding_size": 16,
        "type_vocab_size": 2, "rotary_value": False, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 64,
    },
}  # fmt: skip


def _layers(rope, *windows):
    return tuple(Layer(rope, window) for window in windows)


_LOCAL, _GLOBAL = Rope(8, 10000.0, "half"), Rope(8, 1000000.0, "half")
_HALF_TURNED = Rope(8, 10000.0, "interleaved", 4)
EXPECTED = {
    "llama": {},
    "mistral": {"layers": _layers(_ROPE, 7, 7)},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 6, "layers": _layers(Rope(6, 500000.0, "half"), None, None)},
    "phi3": {"layers": _layers(_ROPE, 9, 9)},
    "gemma3_text": {
        "head_dim": 8, "eps": 1e-6, "activation": "gelu_tanh", "tied": True, "qk_norm": True, "post_norms": True,
        "scale": 0.2, "logit_softcap": 30.0, "embedding_scale": 4.0, "layers": (Layer(_LOCAL, 5), Layer(_GLOBAL)),
    },
    "cohere": {
        "norm": "layer", "block": "parallel", "one_norm": True, "tied": True, "logit_scale": 0.0625,
        "layers": _layers(Rope(4, 10000.0, "interleaved"), None, None),
    },
    "glm4": {"head_dim": 8, "post_norms": True, "qkv_bias": True, "layers": _layers(_HALF_TURNED, None, None)},
    "gpt_neox": {
        "norm": "layer", "norm_bias": True, "key_heads": 4, "activation": "gelu", "gated": False, "block": "parallel",
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "layers": _layers(Rope(4, 10000.0, "half", 2), None, None),
    },
    "gptj": {
        "norm": "layer", "norm_bias": True, "heads": 2, "key_heads": 2, "head_dim": 8, "mlp_width": 64,
        "activation": "gelu_tanh", "gated": False, "block": "parallel", "one_norm": True, "mlp_bias": True,
        "head_bias": True, "layers": _layers(_HALF_TURNED, None, None),
    },
    "roformer": {
        "norm": "layer", "norm_bias": True, "eps": 1e-12, "key_heads": 4, "activation": "gelu", "gated": False,
        "block": "post-norm", "causal": False, "tied": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True,
        "head_bias": True, "head_dense": True, "embedding_norm": True, "embedding_bias": True,
        "layers": _layers(Rope(4, 10000.0, "interleaved"), None, None),
    },
}  # fmt: skip
FAMILY = pytest.mark.parametrize("name", FAMILIES)


def read(name, *without, ignore=(), **changed):
    given = {key: value for key, value in (CONFIGS[name] | changed).items() if key not in without}
    return read_architecture(EVERYWHERE | given, ignore)


@FAMILY
def test_a_config_means_this(name):
    assert CONFIGS.keys() == EXPECTED.keys() == FAMILIES.keys()
    assert read(name) == dataclasses.replace(_MODEL, **EXPECTED[name])
    with pytest.raises(ValueError, match="a_new is not known; b_new is not known; name keys .* in ignore="):
        read(name, b_new=1, a_new=False)
    assert read(name, b_new=1, a_new=None, ignore=["b_new"]) == read(name)


def _windows(name, *without, **changed):
    return [layer.window for layer in read(name, *without, **changed).layers]


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_late_layers_slide(name):
    late = {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 7}
    assert _windows(name, **late) == [None, 7, 7, 7]
    for off in ({"use_sliding_window": False}, {"sliding_window": None}, {"max_window_layers": 28}):
        assert _windows(name, **late | off) == [None] * 4
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    assert _windows(name, **late | kinds) == [7, None, 7, None]


def test_which_layers_of_others_slide():
    assert _windows("mistral", sliding_window=None) == _windows("phi3", "sliding_window") == [None, None]
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        own = {"num_hidden_layers": 5, "sliding_window_pattern": None, key: 3}
        assert _windows("gemma3_text", **own) == [5, 5, None, 5, 5]
    config = read("gemma3_text", "sliding_window_pattern", num_hidden_layers=7)
    assert config.layers == (*[Layer(_LOCAL, 5)] * 5, Layer(_GLOBAL), Layer(_LOCAL, 5))


def test_keys_that_say_something_else_or_are_left_out():
    assert read("llama", "num_key_value_heads").key_heads == read("llama", num_key_value_heads=None).key_heads == 4
    config = read("gpt_neox", use_parallel_residual=False, attention_bias=False)
    assert (config.block, config.qkv_bias, config.out_bias, config.mlp_bias) == ("sequential", False, False, True)
    assert read("gpt_neox", "use_parallel_residual").block == "parallel" and not read("glm4").out_bias
    assert read("llama", attention_bias=True).out_bias and read("llama", attention_bias=True).qkv_bias
    names = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}
    assert {said: read("llama", hidden_act=said).activation for said in names} == names
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    rope = read("llama", rope_scaling={"rope_type": "llama3"} | scaling).layers[1].rope
    assert rope == dataclasses.replace(_ROPE, scaling=Llama3(8.0, 1.0, 4.0, 16))


@pytest.mark.parametrize(("name", "changed", "error", "says"), [
    ("llama", {"pretraining_tp": 2, "is_decoder": True}, ValueError, "is_decoder must be False, was True; pretraining_tp must be 1, was 2"),
    ("roformer", {"embedding_size": 8}, ValueError, "embedding_size must be 16, was 8"),
    ("cohere", {"use_qk_norm": True}, ValueError, "use_qk_norm must be False, was True"),
    ("phi3", {"attention_bias": True}, ValueError, "attention_bias must be False, was True"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, ValueError, "attn_logit_softcapping must be null, was 50.0"),
    ("gptj", {"scale_attn_weights": False}, ValueError, "scale_attn_weights must be True, was False"),
    ("llama", {"rms_norm_eps": None}, ValueError, "'rms_norm_eps' is missing"),
    ("llama", {"hidden_act": "mish"}, ValueError, "activation must be one of 'silu', .*, was 'mish'"),
    ("llama", {"num_hidden_layers": 70000}, ValueError, "num_hidden_layers must be at most 65536, was 70000"),
    ("llama", {"vocab_size": "40"}, TypeError, r"vocabulary must be an integer, was '40' \(in config.json: 'vocab_size'\)"),
    ("llama", {"num_key_value_heads": 3}, ValueError, "key_heads must divide heads, 4, was 3"),
    ("llama", {"sliding_window": 4096}, ValueError, "sliding_window must be null, was 4096"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, ValueError, "but no layer of this llama has a window"),
    ("llama", {"model_type": ["llama"]}, ValueError, "model_type must be one of 'roformer', 'llama'"),
    ("gemma3_text", {"query_pre_attn_scalar": -1}, ValueError, "under a root must be .* greater than 0, was -1"),
    ("gemma3_text", {"sliding_window_pattern": 0}, ValueError, "sliding_window_pattern must be at least 1"),
    ("gpt_neox", {"use_parallel_residual": "no"}, TypeError, "use_parallel_residual must be True or False"),
    ("mistral", {"sliding_window": 0}, ValueError, r"layers\[0\].window must be at least 1, was 0"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, ValueError, "but no layer of this qwen2 has a window"),
    ("qwen2", {"layer_types": ["full_attention"] * 3}, ValueError, "layer_types must be a list of 2 words, was "),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, ValueError, "layer_types must be one of"),
    ("qwen2", {"use_sliding_window": "no"}, TypeError, "use_sliding_window must be True or False, was 'no'"),
    ("llama", {"ignore": "pretraining_tp"}, TypeError, "ignore must be a list of keys"),
])  # fmt: skip
def test_configs_that_are_refused(name, changed, error, says):
    with pytest.raises(error, match=says):
        read(name, **changed)


def test_mistral_says_its_window():
    """Left out it would mean 4096, and null none: neither is guessed."""
    with pytest.raises(ValueError, match="the config lacks 'sliding_window': say its number, or null if there is none"):
        read("mistral", "sliding_window")


def _weights(config, seed=0):
    """Random weights by our names, in steps of 1/64 so that float16 holds them, and 1 + them, exactly."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(-127, 128, shape) / 64).astype(np.float32) for name, shape in weight_shapes(config).items()
    }


# ── What each family stores ──────────────────────────────────────────────────────────────────────────────────────────

# Our parts as the authors of GGUF call them, whose package knows the Hugging Face names of each architecture.
PARTS = {
    "embedding": "token_embd", "norm": "output_norm", "head": "output", "attention_norm": "attn_norm", "mlp_norm": "ffn_norm",
    "qkv": "attn_q attn_k attn_v", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "out": "attn_output", "down": "ffn_down",
    "attention_post_norm": "post_attention_norm", "up": "ffn_gate ffn_up", "mlp_post_norm": "post_ffw_norm",
}  # fmt: skip
FUSED = {"qkv": "attn_qkv", "up": "ffn_up"}
ARCHITECTURE = {
    "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "phi3": "PHI3", "gemma3_text": "GEMMA3",
    "cohere": "COMMAND_R", "glm4": "GLM4", "gpt_neox": "GPTNEOX", "gptj": "GPTJ",
}  # fmt: skip
ROFORMER = {
    "embedding": "roformer.embeddings.word_embeddings.weight", "embedding_norm": "roformer.embeddings.LayerNorm",
    "embedding_bias": "roformer.embeddings.token_type_embeddings.weight", "head_norm": "cls.predictions.transform.LayerNorm",
    "head_dense": "cls.predictions.transform.dense", "head": "cls.predictions.decoder", "head.bias": "cls.predictions.bias",
    "qkv": "attention.self.query attention.self.key attention.self.value", "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense", "down": "output.dense", "mlp_norm": "output.LayerNorm",
}  # fmt: skip


@functools.cache
def _names(name):
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURE[name]], 99)


def in_file(name, tensor):
    """What a GGUF file calls a tensor of a folder."""
    return _names(name).get_name(tensor, (".weight", ".bias"))


@pytest.mark.needs("gguf")
@FAMILY
def test_the_names_are_those_that_others_know(name):
    family = FAMILIES[name]
    if name == "roformer":
        assert family.names == ROFORMER and family.layers == "roformer.encoder.layer.{i}."
        return
    for part, stored in family.names.items():
        layer = "" if part in ("embedding", "norm", "head") else family.layers.replace("{i}", "7")
        means = [PARTS[part], FUSED.get(part)]
        got = [in_file(name, f"{layer}{one}".removesuffix(".weight")) for one in stored.split()]
        if None not in got:  # else a name that checkpoints of this family do not have
            assert " ".join(got).replace("blk.7.", "") in means, part


def as_stored(name, config, w):
    """Our weights as the tensors of a family."""
    h, g, d, f, out = config.heads, config.key_heads, config.head_dim, config.mlp_width, {}
    family = FAMILIES[name]
    for ours, x in w.items():
        layer = ours.split(".")[1] if ours.startswith("layers.") else ""
        own = ours.removeprefix(f"layers.{layer}.")
        part, _, kind = own.rpartition(".")
        if name == "gemma3_text" and part.endswith("norm"):
            x = x - 1
        if name == "gpt_neox" and part == "qkv":  # queries, keys and values of the first head, then of the next
            x = np.concatenate([x[k * h * d + i * d :][:d] for i in range(h) for k in range(3)])
        if ours == "embedding_bias":  # the second is for second sentences
            x = np.stack((x, np.full_like(x, 9)))
        theirs = family.names.get(own) or " ".join(f"{one}.{kind}" for one in family.names[part].split())
        names = [(layer and family.layers.replace("{i}", layer)) + one for one in theirs.split()]
        cuts = {1: [], 2: [f], 3: [h * d, (h + g) * d]}[len(names)]
        out |= dict(zip(names, np.split(x, cuts), strict=True))
    return out


def checkpoint(name, **changed):
    """(config.json, our weights, its tensors)."""
    raw = CONFIGS[name] | changed
    config = read_architecture(raw)
    w = _weights(config)
    return raw, w, as_stored(name, config, w)


def save(folder, raw, tensors, dtype=np.float32, file="model.safetensors"):
    (folder / "config.json").write_text(json.dumps(raw))
    stored = {key: np.array(x, dtype if x.dtype.kind == "f" else x.dtype, order="C") for key, x in tensors.items()}
    save_file(stored, folder / file)
    return folder


def same(model, expected, dtype=np.float32):
    assert model.weights.keys() == expected.keys()
    for name, x in model.weights.items():
        assert x.dtype == dtype and np.array_equal(to_numpy(x), expected[name]), name


OPTIONS = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "num_hidden_layers": 12}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}), ("gptj", {"n_inner": 12}),
    ("phi3", {"num_key_value_heads": 1, "head_dim": 10}), ("gemma3_text", {"tie_word_embeddings": False}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changed"), [(name, {}) for name in FAMILIES] + OPTIONS, ids=str)
def test_every_family_comes_back_exactly(xp, name, changed, tmp_path):
    raw, w, tensors = checkpoint(name, **changed)
    model = load(save(tmp_path, raw, tensors), backend="numpy" if xp is np else "cupy")
    assert model.config == read_architecture(raw)
    same(model, w)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64], ids=["F16", "BF16", "F64"])
def test_any_float_is_read_and_rounded_once(stored, tmp_path):
    """1 is added to Gemma's norms in float64: 1 + 2⁻³⁰ is 1 in float32."""
    raw, w, tensors = checkpoint("gemma3_text")
    tensors["model.norm.weight"], w["norm.weight"] = np.full(16, 2.0**-20), np.full(16, 1 + 2.0**-20)
    expected = {key: x.astype(np.float64) for key, x in w.items()}
    same(load(save(tmp_path, raw, tensors, stored), dtype="float64"), expected, np.float64)
    same(load(tmp_path), {key: x.astype(np.float32) for key, x in expected.items()})


@pytest.mark.parametrize(
    ("number", "fix"), [(1e300, "load it with dtype float64"), (np.nan, "damaged"), (-np.inf, "damaged")]
)
def test_numbers_that_are_not_finite_are_refused(number, fix, tmp_path):
    """Large ones, whose sum alone overflows, are read."""
    raw, _, tensors = checkpoint("llama")
    tensors["model.norm.weight"] = np.full(16, 3e38)
    assert load(save(tmp_path, raw, tensors, np.float64)).weights["norm.weight"].min() > 2e38
    tensors["model.norm.weight"][3] = number
    save(tmp_path, raw, tensors, np.float64)
    with pytest.raises(ValueError, match=f"model.norm.weight holds NaN, infinity or .* too large for float32: .*{fix}"):
        load(tmp_path)
    if number == 1e300:
        assert load(tmp_path, dtype="float64").weights["norm.weight"].max() == 1e300


# ── Folders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_several_files(tmp_path):
    raw, w, tensors = checkpoint("llama")
    index, names, places = tmp_path / "model.safetensors.index.json", sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save(tmp_path, raw, {name: tensors[name] for name in names[i::3]}, file=file)
        places |= dict.fromkeys(names[i::3], file)

    def loaded(places):
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return load(tmp_path)

    same(loaded(places), w)
    name, first = "model.norm.weight", min(places.values())
    again = {key: tensors[key] for key in ("model.embed_tokens.weight", name)}
    save(tmp_path, raw, again, file="again.safetensors")
    without = {key: place for key, place in places.items() if key != name}
    for wrong in (places | {name: first}, places | {"new": first}, without, places | {name: "again.safetensors"}):
        with pytest.raises(ValueError, match="not where weight_map says, or not in it: "):
            loaded(wrong)
    for outside in ("../x.safetensors", "a\\x.safetensors", "", "/etc/x"):
        with pytest.raises(ValueError, match="must lie in the folder itself|must be a file"):
            loaded(places | {name: outside})
    for no_map in (None, [], {}, {"a": 1}):
        with pytest.raises(ValueError, match="weight_map must name the file of each tensor"):
            loaded(no_map)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="must hold model.safetensors or model.safetensors.index.json, and holds both"):
        load(tmp_path)


def test_all_that_does_not_fit_is_said_at_once(tmp_path):
    raw, _, tensors = checkpoint("llama")
    del tensors["lm_head.weight"]
    tensors |= {"model.norm.weight": np.zeros(17, "f4"), **{f"x{i}": np.zeros(1, "f4") for i in range(30)}}
    with pytest.raises(ValueError, match="the tensors do not fit the config:\n") as caught:
        load(save(tmp_path, raw, tensors))
    lines = str(caught.value).splitlines()[1:]
    assert lines[:2] == ["  missing: lm_head.weight (32, 16)", "  unexpected: x0 (1,)"]
    assert len(lines) == 21 and lines[-1] == "  and 12 more"
    raw, _, tensors = checkpoint("phi3")
    with pytest.raises(ValueError, match=r"qkv_proj.weight has shape \(32, 16\), not \(48, 16\)"):
        load(save(tmp_path, raw | {"num_key_value_heads": 4}, tensors))


def test_what_is_stored_besides_is_compared(tmp_path):
    """A tied head, masks, Θ before and after its rescaling, RoFormer's table and its second bias."""
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    raw, w, tensors = checkpoint("llama", tie_word_embeddings=True, **scaled)
    name, theta = "model.layers.0.self_attn.rotary_emb.inv_freq", frequencies(_ROPE)
    for stored in (theta.astype(np.float16), theta / 2):
        same(load(save(tmp_path, raw, tensors | {name: stored, "lm_head.weight": w["embedding"]})), w)
    for other in (theta * 1.1, theta[:-1], np.ones((3, 3))):
        with pytest.raises(ValueError, match=f"{name} must hold the frequencies of the config, and differs"):
            load(save(tmp_path, raw, tensors | {name: other}))
    for head in (w["embedding"] + 1, w["embedding"][:-1]):
        with pytest.raises(ValueError, match="lm_head.weight must be equal to model.embed_tokens.weight, and differs"):
            load(save(tmp_path, raw, tensors | {"lm_head.weight": head}))
    raw, w, tensors = checkpoint("gpt_neox")
    masks = {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), bool)}
    same(load(save(tmp_path, raw, tensors | masks)), w)
    raw, w, tensors = checkpoint("roformer")
    types = "roformer.embeddings.token_type_embeddings.weight"
    copy = {"cls.predictions.decoder.bias": w["head.bias"], types: tensors[types][:1]}
    same(load(save(tmp_path, raw, tensors | copy | {"roformer.encoder.embed_positions.weight": np.ones((64, 4))})), w)
    with pytest.raises(ValueError, match=rf"{types} has shape \(2, 17\), not \(2, 16\)"):
        load(save(tmp_path, raw, tensors | {types: np.zeros((2, 17), "f4")}))


def test_paths_that_are_no_checkpoints(tmp_path):
    raw, _, tensors = checkpoint("llama")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04evil")
    with pytest.raises(ValueError, match="must hold model.safetensors or .* holds neither; pickles .* are never read"):
        load(tmp_path)
    with pytest.raises(ValueError, match="neither a Hugging Face folder nor a GGUF file.*pickles"):
        load(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="does not exist: if this is the id of a model on the Hugging Face Hub"):
        load("some/model")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo must be a file, but is a directory, a pipe or a device"):
        load(tmp_path / "fifo")
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'float64', was 'float16'"):
        load(tmp_path / "nowhere", dtype="float16")
    with pytest.raises(ValueError, match='backend must be "numpy" or "cupy"'):
        load(tmp_path / "nowhere", backend="torch")
    with pytest.raises(TypeError, match="model.norm.weight holds integers .int32., and weights"):
        load(save(tmp_path, raw, tensors | {"model.norm.weight": np.ones(16, np.int32)}))
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \(32, 16\), not \(2147483648, 16\)"):
        load(save(tmp_path, raw | {"vocab_size": 2**31}, tensors))  # before memory is asked for


@pytest.mark.parametrize(("package", "path"), [("safetensors", "."), ("gguf", "model.gguf")])
def test_a_missing_package_is_named_with_the_extra(package, path, tmp_path, monkeypatch):
    raw, _, tensors = checkpoint("llama")
    save(tmp_path, raw, tensors)
    gguf_files.write(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'needs {package}.*pip install "\.\[checkpoints\]"'):
        load(tmp_path / path)


# ── GGUF files ───────────────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = {
    "block_count": 2, "context_length": 64, "embedding_length": 16, "feed_forward_length": 24, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0, "vocab_size": 32,
}  # fmt: skip
OF_NEOX = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": None,
           "rope.freq_base": 10000.0, "rope.dimension_count": 2, "use_parallel_residual": True}  # fmt: skip
WINDOW = {"attention.sliding_window": 9, "rope.scaling.original_context_length": 64, "rope.dimension_count": 2}
FILES = {  # architecture: family, settings, what differs in the family's config
    "llama": ("llama", {"general.name": "x", "attention.key_length": 8, "attention.value_length": 8}, {"head_dim": 8}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"attention.key_length": 6, "attention.value_length": 6}, {}),
    "phi3": ("phi3", WINDOW, {"partial_rotary_factor": 0.5}),
    "gemma3": ("gemma3_text", {
        "attention.sliding_window": 5, "attention.sliding_window_pattern": 2, "attention.key_length": 8, "attention.value_length": 8,
        "rope.freq_base": 1000000.0, "final_logit_softcapping": 30.0, "attention.layer_norm_rms_epsilon": 1e-6,
    }, {"query_pre_attn_scalar": 8}),
    "gptneox": ("gpt_neox", OF_NEOX, {}),
}  # fmt: skip


def in_gguf(architecture, changed=None):
    """(config.json, our weights, the tensors of a file), from those of the folder, arranged by hand."""
    family, _, own = FILES[architecture]
    raw, w, tensors = checkpoint(family, **own | (changed or {}))
    stored = {}
    for name, x in tensors.items():
        new = in_file(family, name)
        part = new.rpartition(".")[0]
        if architecture == "llama" and part[-2:] in ("_q", "_k"):  # i and i + 4 of each head of 8 become neighbours
            order = (0, 2, 1, 3, 4, 5, 6, 7) if raw.get("partial_rotary_factor") else (0, 4, 1, 5, 2, 6, 3, 7)
            x = x[[head + i for head in range(0, len(x), 8) for i in order]]
        if architecture == "gemma3" and part.endswith("norm"):
            x = x + 1
        if architecture == "gptneox" and part.endswith("qkv"):  # all queries, all keys, all values
            x = x[[head * 12 + part * 4 + row for part in range(3) for head in range(4) for row in range(4)]]
        stored[new] = x.astype(np.float32)
    return raw, w, stored


def write(path, architecture, stored, **changed):
    settings = SETTINGS | FILES[architecture][1] | changed
    others = {key: settings.pop(key) for key in list(settings) if key.startswith(("general.", "split.", "qwen2."))}
    return gguf_files.write(path, architecture, settings, stored, others)


PARTIAL = ("llama", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 4})


@pytest.mark.parametrize(("architecture", "own", "settings"), [*((name, {}, {}) for name in FILES), PARTIAL], ids=str)
def test_gguf_files_come_back_as_the_folder_does(architecture, own, settings, tmp_path):
    raw, w, stored = in_gguf(architecture, own)
    model = load(write(tmp_path / "m.gguf", architecture, stored, **settings))
    assert model.config == read_architecture(raw)
    same(model, w)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_packed_numbers_are_those_of_the_package(kind, tmp_path):
    raw, w, stored = in_gguf("llama", {"hidden_size": 32, "intermediate_size": 32, "tie_word_embeddings": True})
    number = gguf.GGMLQuantizationType[kind]
    packed = {
        name: x if x.ndim == 1 else gguf_files.quantised(x, kind) for name, x in stored.items() if x.shape[-1] == 32
    }
    model = load(write(tmp_path / "m.gguf", "llama", packed, embedding_length=32, feed_forward_length=32))
    rounded = gguf.quants.dequantize(gguf.quants.quantize(w["embedding"], number), number)
    assert model.config.tied and np.array_equal(model.weights["embedding"], rounded.astype(np.float32))
    value = stored["blk.1.attn_v.weight"]
    assert np.array_equal(
        model.weights["layers.1.qkv.weight"][-len(value) :],
        gguf.quants.dequantize(gguf.quants.quantize(value, number), number),
    )


LLAMA3 = Llama3(8.0, 1.0, 4.0, 8192)
SLOW = {"rope.freq_base": 1e10}  # so that a pair is slow enough to be divided by all of the factor
DIVISORS = np.divide(*(frequencies(Rope(8, 1e10, "half", scaling=one)) for one in (None, LLAMA3))).astype(np.float32)
FACTORS = {
    "rope_factors_short.weight": np.array([1.5], np.float32),
    "rope_factors_long.weight": np.array([4.0], np.float32),
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


@pytest.mark.parametrize(("architecture", "settings", "tensors", "scaling"), [
    ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, Linear(4.0)),
    ("llama", {"rope.scaling.type": "none"}, {}, None),
    ("qwen2", YARN, {}, YaRN(4.0, 16)),
    ("qwen3", YARN | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.finetuned": True}, {}, YaRN(4.0, 16, 16.0)),
    ("llama", SLOW, {"rope_freqs.weight": DIVISORS}, LLAMA3),
    ("phi3", {"rope.scaling.attn_factor": 1.25}, FACTORS, LongRoPE((1.5,), (4.0,), 1.0, 64, 1.25)),
    ("phi3", {"rope.scaling.attn_factor": 1.25, "rope.scaling.type": "longrope"}, FACTORS, LongRoPE((1.5,), (4.0,), 1.0, 64, 1.25)),
])  # fmt: skip
def test_rescalings_in_gguf_files(architecture, settings, tensors, scaling, tmp_path):
    _, w, stored = in_gguf(architecture)
    model = load(write(tmp_path / "m.gguf", architecture, stored | tensors, **settings))
    assert {layer.rope.scaling for layer in model.config.layers} == {scaling}
    same(model, w)


@pytest.mark.parametrize(("architecture", "settings", "tensors", "says"), [
    ("llama", {"rope.scaling.type": "ntk", "rope.scaling.factor": 4.0}, {}, "rope.scaling.type 'ntk'"),
    ("llama", {"rope.scaling.factor": 4.0}, {}, "rope.scaling.factor is not known"),
    ("llama", {"rope.scaling.type": "linear"}, {}, "'rope.scaling.factor' is missing"),
    ("llama", YARN | {"rope.scaling.attn_factor": 2.0}, {}, "rope.scaling.attn_factor is not known"),
    ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, "'rope.scaling.original_context_length' is missing"),
    ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_freqs.weight": DIVISORS}, "is not understood"),
    ("llama", {}, {"rope_freqs.weight": DIVISORS}, "is not the rescaling of Llama 3"),
    ("llama", SLOW, {"rope_freqs.weight": DIVISORS[None]}, "is not the rescaling of Llama 3"),
    ("phi3", {}, FACTORS, "'rope.scaling.attn_factor' is missing"),
    ("phi3", {"rope.scaling.attn_factor": 1.25}, {"rope_factors_long.weight": FACTORS["rope_factors_long.weight"]}, "is not understood"),
    ("phi3", {"rope.scaling.type": "longrope"}, {}, "is not understood"),
    ("llama", {"expert_count": 2}, {}, "expert_count must be 0, was 2"),
    ("llama", {"attention.value_length": 2}, {}, "attention.value_length must be 8"), ("llama", {"vocab_size": 7}, {}, "vocab_size must be 32, was 7"),
    ("llama", {"attention.head_count": None}, {}, "'attention.head_count' is missing"), ("llama", {"attention.head_count": 0}, {}, "must be at least 1, was 0"),
    ("llama", {"attention.head_count_kv": [2, 2]}, {}, "must be one value, was a list"), ("llama", {"general.type": "adapter"}, {}, "general.type must be 'model'"),
    ("llama", {"split.count": 2}, {}, "gguf-split --merge"), ("llama", {"qwen2.block_count": 2}, {}, "qwen2.block_count is not known"),
    ("llama", {"block_count": 3}, {}, "missing: blk.2.attn_norm.weight"), ("llama", {}, {"blk.0.attn_sinks.weight": np.ones(4, "f4")}, "unexpected: blk.0.attn_sinks"),
    ("gptneox", {"attention.head_count_kv": 2}, {}, "attention.head_count_kv must be 4, was 2"),
    ("gemma3", {"attention.sliding_window": 0}, {}, "'sliding_window' is missing"),
])  # fmt: skip
def test_gguf_files_that_are_refused(architecture, settings, tensors, says, tmp_path):
    _, _, stored = in_gguf(architecture)
    with pytest.raises(ValueError, match=says):
        load(write(tmp_path / "m.gguf", architecture, stored | tensors, **settings))


def test_other_files_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="general.architecture must be one of 'llama', .* was 'bert'"):
        load(gguf_files.write(tmp_path / "m.gguf", "bert"))
    with pytest.raises(ValueError, match="m.gguf: the file must hold token_embd.weight"):
        load(gguf_files.write(tmp_path / "m.gguf", tensors={"output.weight": np.ones((5, 32), np.float32)}))
    big = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    big.write_header_to_file()
    big.write_kv_data_to_file()
    big.close()
    with pytest.raises(ValueError, match="big.gguf: .*the other byte order"):
        load(tmp_path / "big.gguf")


def test_the_largest_gemma3_scales_its_scores_in_its_own_way(tmp_path):
    config = {"num_hidden_layers": 62, "sliding_window_pattern": 6, "final_logit_softcapping": None}
    _, _, stored = in_gguf("gemma3", config)
    settings = {"block_count": 62, "attention.sliding_window_pattern": None, "final_logit_softcapping": 0.0}
    path = write(tmp_path / "m.gguf", "gemma3", stored, **settings)
    config = load(path).config
    assert config.scale == (16 / 4) ** -0.5 and config.logit_softcap is None
    assert [i for i, layer in enumerate(config.layers) if layer.window is None] == list(range(5, 62, 6))


@pytest.mark.parametrize(("head_dim", "width"), [(44, 30), (46, 26), (78, 62), (64, 16)])
def test_a_partial_width_is_kept_by_its_fraction(head_dim, width, tmp_path):
    """head_dim·(width/head_dim), in floats, is less than the first three widths, and would be cut off."""
    sizes = {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": width}
    _, _, stored = in_gguf("phi3", {"head_dim": head_dim, "partial_rotary_factor": 1.0})
    assert load(write(tmp_path / "m.gguf", "phi3", stored, **sizes)).config.layers[0].rope.width == width


# ── Damaged files ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["config.json", "model.safetensors", "m.gguf"])
def test_files_that_are_cut_or_changed_are_refused_or_read(kind, tmp_path):
    """Whatever a package raises is one ValueError (or TypeError) of ours, and nothing hangs."""
    raw, _, tensors = checkpoint("llama")
    save(tmp_path, raw, tensors)
    write(tmp_path / "m.gguf", "llama", in_gguf("llama")[2])
    file = tmp_path / kind
    where, content, rng = file if kind == "m.gguf" else tmp_path, file.read_bytes(), np.random.default_rng(0)
    header = min(len(content), 4000)
    damaged = [content[:n] for n in {0, 1, 8, 20, len(content) - 1, *rng.integers(0, header, 30).tolist()}]
    for at, size in zip(rng.integers(0, header, 150).tolist(), rng.integers(1, 9, 150).tolist(), strict=True):
        damaged.append(content[:at] + rng.bytes(size) + content[at + size :])
    outcomes = set()
    for new in damaged:
        gguf_files.rewrite(file, new)
        try:
            load(where)
            outcomes.add("read")
        except (ValueError, TypeError):
            outcomes.add("refused")
    assert "refused" in outcomes
    for n in (1, len(content) // 3, len(content) - 1):
        gguf_files.rewrite(file, content[:n])
        with pytest.raises(ValueError, match=kind):
            load(where)


def test_a_list_that_claims_more_than_the_file_has_ends_at_once(tmp_path):
    file = gguf_files.write(tmp_path / "m.gguf", others={"tokenizer.ggml.scores": b"ab"})
    content = file.read_bytes()
    at = content.index(b"tokenizer.ggml.scores") + len("tokenizer.ggml.scores") + 8
    file.write_bytes(content[:at] + (2**60).to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(ValueError, match="m.gguf: the file ends too early"):
        load(file)
