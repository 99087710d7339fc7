"""`load`: what each published architecture is, and checkpoints as it stores them, arranged by hand here, come back
exactly, from folders and from GGUF files, or say what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json

import gguf_files
import numpy as np
import pytest
from gguf_files import gguf
from optional import package

from pyrope import Linear, Llama3, LongRoPE, Rope, YaRN, checkpoints, frequencies, load, to_numpy
from pyrope.checkpoints import FAMILIES, read_architecture
from pyrope.model import Config, Layer, weight_shapes

ml_dtypes, save_file = package("ml_dtypes"), package("safetensors.numpy").save_file

# ── What each family is: a config.json as its authors write it, and the Config that it means ─────────────────────────

# Keys of any config.json that say nothing about the result.
HARMLESS = {
    "architectures": ["SomeForCausalLM"], "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None, "use_cache": True,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.40.0", "_name_or_path": "x", "attention_dropout": 0.0,
    "is_decoder": False, "auto_map": {"AutoConfig": "a.B"}, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_dropout_prob": 0.1,
    "classifier_dropout": 0.1, "summary_type": "cls_index", "summary_use_proj": True, "summary_activation": None, "n_ctx": 64,
    "gradient_checkpointing": False, "task_specific_params": {"text-generation": {"do_sample": True}}, "tokenizer_class": "GPT2Tokenizer",
}  # fmt: skip
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
RMS = SIZES | {"num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
LAYERNORM = SIZES | {"hidden_act": "gelu", "layer_norm_eps": 1e-5}
WINDOW = {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 1}
ROPE, LOCAL, GLOBAL = Rope(4, 500000.0, "half"), Rope(8, 10000.0, "half"), Rope(8, 1000000.0, "half")
HALF_TURNED, PAIRS = Rope(8, 10000.0, "interleaved", 4), Rope(4, 10000.0, "interleaved")
MODEL = Config(
    vocabulary=32, width=16, heads=4, key_heads=2, head_dim=4, mlp_width=24, layers=(Layer(ROPE),) * 2, norm="rms",
    eps=1e-5, activation="silu", gated=True, block="sequential", causal=True,
)  # fmt: skip
BIASES = {"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True}


def twice(rope, window=None):
    return {"layers": (Layer(rope, window),) * 2}


CONFIGS = {  # config.json, and in what the model differs from MODEL
    "llama": (RMS | {"attention_bias": False, "pretraining_tp": 1, "mlp_bias": False}, {}),
    "mistral": (RMS | {"sliding_window": 7, "head_dim": None}, twice(ROPE, 7)),
    "qwen2": (RMS | WINDOW, {"qkv_bias": True}),
    "qwen3": (RMS | WINDOW | {"head_dim": 6, "attention_bias": False}, {"qk_norm": True, "head_dim": 6, **twice(Rope(6, 500000.0, "half"))}),
    "phi3": (RMS | {"sliding_window": 9, "original_max_position_embeddings": 64, "attention_bias": False}, twice(ROPE, 9)),
    "gemma3_text": ({key: x for key, x in RMS.items() if key not in ("hidden_act", "tie_word_embeddings")} | {
        "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 25, "sliding_window": 5, "sliding_window_pattern": 2, "attention_bias": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
    }, {
        "head_dim": 8, "eps": 1e-6, "activation": "gelu_tanh", "tied": True, "qk_norm": True, "post_norms": True,
        "scale": 0.2, "logit_softcap": 30.0, "embedding_scale": 4.0, "layers": (Layer(LOCAL, 5), Layer(GLOBAL)),
    }),
    "cohere": (
        LAYERNORM | {"num_key_value_heads": 2, "hidden_act": "silu", "logit_scale": 0.0625, "use_qk_norm": False, "rope_theta": 10000.0,
                     "tie_word_embeddings": None},
        {"norm": "layer", "block": "parallel", "one_norm": True, "tied": True, "logit_scale": 0.0625, **twice(PAIRS)},
    ),
    "glm4": (
        RMS | {"head_dim": 8, "partial_rotary_factor": 0.5, "attention_bias": True, "rope_theta": 10000.0},
        {"head_dim": 8, "post_norms": True, "qkv_bias": True, **twice(HALF_TURNED)},
    ),
    "gpt_neox": (
        LAYERNORM | {"rotary_pct": 0.5, "rotary_emb_base": 10000, "use_parallel_residual": True},
        BIASES | {"key_heads": 4, "activation": "gelu", "block": "parallel", "qkv_bias": True, "out_bias": True, **twice(Rope(4, 10000.0, "half", 2))},
    ),
    "gptj": ({
        "vocab_size": 32, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_inner": None, "n_positions": 64, "rotary_dim": 4, "rotary": True,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": False,
    }, BIASES | {
        "heads": 2, "key_heads": 2, "head_dim": 8, "mlp_width": 64, "activation": "gelu_tanh", "block": "parallel", "one_norm": True,
        "head_bias": True, **twice(HALF_TURNED),
    }),
    "roformer": (
        LAYERNORM | {"layer_norm_eps": 1e-12, "embedding_size": 16, "type_vocab_size": 2, "rotary_value": False, "tie_word_embeddings": None},
        BIASES | {"eps": 1e-12, "key_heads": 4, "activation": "gelu", "block": "post-norm", "causal": False, **twice(PAIRS)}
        | dict.fromkeys(("tied", "qkv_bias", "out_bias", "head_bias", "head_dense", "embedding_norm", "embedding_bias"), True),
    ),
}  # fmt: skip
LATE = {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 7}
TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def read(name, ignore=(), **changed):
    """The Config of a family whose config.json has other values; ... leaves a key out."""
    given = {key: x for key, x in (HARMLESS | CONFIGS[name][0] | changed).items() if x is not ...}
    return read_architecture({"model_type": name, **given}, ignore)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_means_this(name):
    assert CONFIGS.keys() == FAMILIES.keys() and read(name) == dataclasses.replace(MODEL, **CONFIGS[name][1])
    with pytest.raises(ValueError, match="a_new is not known; b_new is not known; name keys .* in ignore="):
        read(name, b_new=1, a_new=False)
    assert read(name, b_new=1, a_new=None, ignore=["b_new"]) == read(name)
    with pytest.raises(ValueError, match="rope_foo is not known; remove rope_foo from config.json if .* nothing$"):
        read(name, rope_foo=3)
    for wrong in ("rope_foo", "rope_parameters", "vocab_size", "c_new", "use_cache"):
        with pytest.raises(ValueError, match=f"ignore= may name b_new here, was '{wrong}', which is absent, or read"):
            read(name, b_new=1, rope_foo=3, ignore=["b_new", wrong])
    with pytest.raises(TypeError, match="ignore must be a list of keys, was 'b_new': write"):
        read(name, b_new=1, ignore="b_new")


@pytest.mark.parametrize("name, changed, expected", [
    *((name, LATE | change, {"windows": windows}) for name in ("qwen2", "qwen3") for change, windows in [
        ({}, [None, 7, 7, 7]), ({"use_sliding_window": False}, [None] * 4), ({"sliding_window": None}, [None] * 4),
        ({"max_window_layers": 28}, [None] * 4), (TYPES, [7, None, 7, None])]),
    ("mistral", {"sliding_window": None}, {"windows": [None, None]}), ("phi3", {"sliding_window": ...}, {"windows": [None, None]}),
    ("gemma3_text", {"num_hidden_layers": 5, "sliding_window_pattern": 3}, {"windows": [5, 5, None, 5, 5]}),
    ("gemma3_text", {"num_hidden_layers": 5, "sliding_window_pattern": None, "_sliding_window_pattern": 3}, {"windows": [5, 5, None, 5, 5]}),
    ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": ...}, {"windows": [5] * 5 + [None, 5]}),
    ("llama", {"num_key_value_heads": ...}, {"key_heads": 4}), ("llama", {"num_key_value_heads": None}, {"key_heads": 4}),
    ("llama", {"attention_bias": True}, {"out_bias": True, "qkv_bias": True, "mlp_bias": False}), ("glm4", {}, {"out_bias": False}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}, {"block": "sequential", "qkv_bias": False, "out_bias": False, "mlp_bias": True}),
    ("gpt_neox", {"use_parallel_residual": ...}, {"block": "parallel"}), ("llama", {"hidden_act": "swish"}, {"activation": "silu"}),
    ("llama", {"hidden_act": "gelu"}, {"activation": "gelu"}), ("llama", {"hidden_act": "gelu_fast"}, {"activation": "gelu_tanh"}),
    ("llama", {"rope_scaling": {"rope_type": "llama3"} | LLAMA3}, twice(dataclasses.replace(ROPE, scaling=Llama3(8.0, 1.0, 4.0, 16)))),
])  # fmt: skip
def test_keys_that_say_something_else_or_are_left_out(name, changed, expected):
    config = read(name, **changed)
    said = {**vars(config), "windows": [layer.window for layer in config.layers]}
    assert {key: said[key] for key in expected} == expected


@pytest.mark.parametrize("name, changed, says", [
    ("llama", {"pretraining_tp": 2, "is_decoder": True}, "is_decoder must be False, was True; pretraining_tp must be 1, was 2"),
    ("roformer", {"embedding_size": 8}, "embedding_size must be 16, was 8"), ("phi3", {"attention_bias": True}, "attention_bias must be False, was True"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null, was 50.0"),
    ("llama", {"rms_norm_eps": None}, "'rms_norm_eps' is missing"), ("llama", {"hidden_act": "mish"}, "the activation must be one of 'silu', .*, was 'mish'"),
    ("llama", {"num_hidden_layers": 70000}, "num_hidden_layers must be at most 65536, was 70000"),
    ("llama", {"vocab_size": "40"}, "vocabulary must be an integer, was '40'"),
    ("llama", {"num_key_value_heads": 3}, "key_heads must divide heads, 4, was 3"), ("llama", {"sliding_window": 4096}, "sliding_window must be null, was 4096"),
    ("llama", {"num_hidden_layers": 4, **TYPES}, "but no layer of this llama has a window"), ("llama", {"model_type": ["llama"]}, "model_type must be one of 'roformer', 'llama'"),
    ("gemma3_text", {"query_pre_attn_scalar": -1}, "under a root must be .* greater than 0, was -1"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
    ("gpt_neox", {"use_parallel_residual": "no"}, "use_parallel_residual must be True or False, was 'no'"),
    ("mistral", {"sliding_window": 0}, r"layers\[0\].window must be at least 1, was 0"),
    ("mistral", {"sliding_window": ...}, "the config lacks 'sliding_window': say its number, or null"),  # 4096; null: none
    ("qwen2", {"num_hidden_layers": 4, **TYPES}, "but no layer of this qwen2 has a window"), ("qwen2", TYPES, "layer_types must be a list of 2 words, was "),
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types must be one of"),
    ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window must be True or False, was 'no'"),
])  # fmt: skip
def test_configs_that_are_refused(name, changed, says):
    with pytest.raises((ValueError, TypeError), match=says):
        read(name, **changed)


# ── What each family stores ──────────────────────────────────────────────────────────────────────────────────────────

ARCHITECTURE = {
    "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "phi3": "PHI3", "gemma3_text": "GEMMA3",
    "cohere": "COMMAND_R", "glm4": "GLM4", "gpt_neox": "GPTNEOX", "gptj": "GPTJ",
}  # fmt: skip


@functools.cache
def _names(name):
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURE[name]], 99)


def in_file(name, tensor):
    """What a GGUF file calls a tensor of a folder, by the authors of that format."""
    return _names(name).get_name(tensor, (".weight", ".bias"))


@pytest.mark.needs("gguf")
@pytest.mark.parametrize("name", ARCHITECTURE)
def test_the_names_are_those_that_others_know(name):
    """Of folders and of files alike; RoFormer's, which has no files, are compared with transformers, in tests/peers."""
    family = FAMILIES[name]
    for part, stored in family.names.items():
        layer = "" if part in ("embedding", "norm", "head") else family.layers.replace("{i}", "7")
        got = [in_file(name, f"{layer}{one}".removesuffix(".weight")) for one in stored.split()]
        if None not in got:  # else a name that checkpoints of this family do not have
            ours = {names[part].removesuffix(".weight") for names in (checkpoints._NAMES, checkpoints._FUSED["names"])}
            assert " ".join(got).replace("blk.7.", "") in ours, part


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
    """(config.json, our weights, its tensors): random, in steps of 1/64, so that float16 holds them, and 1 + them, exactly."""
    raw, rng = {"model_type": name, **CONFIGS[name][0], **changed}, np.random.default_rng(0)
    config = read_architecture(raw)
    w = {key: (rng.integers(-127, 128, shape) / 64).astype("f4") for key, shape in weight_shapes(config).items()}
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


@pytest.mark.parametrize("name, changed", [
    *((name, {}) for name in FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "num_hidden_layers": 12}),
    ("cohere", {"attention_bias": True, "tie_word_embeddings": False}), ("gptj", {"n_inner": 12}), ("phi3", {"num_key_value_heads": 1, "head_dim": 10}),
])  # fmt: skip
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
    part = {key: place for key, place in places.items() if place != places["model.norm.weight"]}
    for wrong, says in (
        (part, "missing: .*model.norm.weight"),
        *((wrong, "index.json: weight_map must be an object with the file of") for wrong in (None, ["x"], {"x": 3})),
        ({}, "missing: model.emb"),
    ):
        with pytest.raises(ValueError, match=f"(?s){says}"):
            loaded(wrong)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    raw, _, tensors = checkpoint("llama")
    save(tmp_path, raw, {"model.norm.weight": tensors["model.norm.weight"]}, file="a")
    save(tmp_path, raw, tensors, file="b")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a", "y": "b"}}))
    with pytest.raises(ValueError, match="model.norm.weight is in .*/a and b: remove it"):
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


HEAD, TABLE, TIED = "lm_head.weight", "roformer.embeddings.token_type_embeddings.weight", {"tie_word_embeddings": True}
SINES, _PHASES = "roformer.encoder.embed_positions.weight", np.outer(np.arange(64), (1, 0.01))
SINUSOIDAL = np.concatenate((np.sin(_PHASES), np.cos(_PHASES)), axis=1)
INV_FREQ, EMBEDDING = "model.layers.0.self_attn.rotary_emb.inv_freq", checkpoint("llama")[1]["embedding"]


@pytest.mark.parametrize("name, changed, more, says", [
    ("llama", TIED, {INV_FREQ: np.ones(2), HEAD: EMBEDDING}, None),
    *(("llama", TIED, {HEAD: head}, f"{HEAD} must be equal to model.embed_tokens.weight, and differs") for head in (EMBEDDING + 1, EMBEDDING[:-1])),
    ("gpt_neox", {}, {"gpt_neox.layers.0.attention.bias": np.ones((1, 1, 8, 8), bool)}, None),
    ("roformer", {}, {"cls.predictions.decoder.bias": checkpoint("roformer")[1]["head.bias"], SINES: SINUSOIDAL}, None),
    ("roformer", {}, {SINES: SINUSOIDAL + 2e-5}, f"{SINES} must hold the sines, then the cosines of the config's rope, and differs"),
    ("roformer", {}, {TABLE: checkpoint("roformer")[2][TABLE][:1]}, None), ("roformer", {}, {TABLE: np.zeros((2, 17), "f4")}, rf"{TABLE} has shape \(2, 17\), not \(2, 16\)"),
    ("llama", {}, {"model.norm.weight": np.ones(16, np.int32)}, "model.norm.weight holds integers .int32., and weights"),
])  # fmt: skip
def test_what_is_stored_besides(name, changed, more, says, tmp_path):
    raw, w, tensors = checkpoint(name, **changed)
    save(tmp_path, raw, tensors | more)
    if says is not None:
        with pytest.raises((ValueError, TypeError), match=says):
            load(tmp_path)
    else:
        same(load(tmp_path), w)


def test_paths_that_are_no_checkpoints(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04evil")
    for path, options, says in [
        (tmp_path, {}, "must hold model.safetensors or .* holds neither; pickles .* are never read"),
        (tmp_path / "pytorch_model.bin", {}, "model.bin: the file ends too early, or is no GGUF file: GGUF"),
        (tmp_path / "model.safetensors", {}, f"a folder or a GGUF file, was .*: give the folder, {tmp_path}"),
        ("some/model", {}, "some/model"),
        (tmp_path / "nowhere", {"dtype": "float16"}, "dtype must be one of 'float32', 'float64', was 'float16'"),
        (tmp_path / "nowhere", {"backend": "torch"}, 'backend must be "numpy" or "cupy"'),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=says):
            load(path, **options)
    raw, _, tensors = checkpoint("llama")
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \(32, 16\), not \(2147483648, 16\)"):
        load(save(tmp_path, raw | {"vocab_size": 2**31}, tensors))  # before memory is asked for


# ── GGUF files ───────────────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = {
    "block_count": 2, "context_length": 64, "embedding_length": 16, "feed_forward_length": 24, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0, "vocab_size": 32,
}  # fmt: skip
OF_NEOX = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": None,
           "rope.freq_base": 10000.0, "rope.dimension_count": 2, "use_parallel_residual": True}  # fmt: skip
OF_PHI3 = {"attention.sliding_window": 9, "rope.scaling.original_context_length": 64, "rope.dimension_count": 2}
FILES = {  # architecture: family, settings, what differs in the family's config
    "llama": ("llama", {"general.name": "x", "attention.key_length": 8, "attention.value_length": 8}, {"head_dim": 8}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"attention.key_length": 6, "attention.value_length": 6}, {}),
    "phi3": ("phi3", OF_PHI3, {"partial_rotary_factor": 0.5}),
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


@pytest.fixture
def opened(tmp_path):
    """The model of a file of this architecture with these settings and tensors."""

    def opened(architecture, stored, **changed):
        settings = SETTINGS | FILES[architecture][1] | changed
        others = {key: settings.pop(key) for key in list(settings) if key.startswith(("general.", "split.", "qwen2."))}
        return load(gguf_files.write(tmp_path / "m.gguf", architecture, settings, stored, others))

    return opened


LARGEST = {
    "num_hidden_layers": 62,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": 4,
}  # scores are scaled in its own way
IN_FILE = {"block_count": 62, "attention.sliding_window_pattern": None, "final_logit_softcapping": 0.0}


@pytest.mark.parametrize("architecture, own, settings", [
    *((name, {}, {}) for name in FILES), ("llama", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 4}), ("gemma3", LARGEST, IN_FILE),
])  # fmt: skip
def test_gguf_files_come_back_as_the_folder_does(architecture, own, settings, opened):
    raw, w, stored = in_gguf(architecture, own)
    model = opened(architecture, stored, **settings)
    assert model.config == read_architecture(raw)
    same(model, w)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_packed_numbers_are_those_of_the_package(kind, opened):
    _, w, stored = in_gguf("llama", {"hidden_size": 32, "intermediate_size": 32, "tie_word_embeddings": True})
    packed = {name: x if x.ndim == 1 else gguf_files.quantised(x, kind) for name, x in stored.items()}
    model = opened("llama", packed, embedding_length=32, feed_forward_length=32)
    number, value = gguf.GGMLQuantizationType[kind], stored["blk.1.attn_v.weight"]
    rounded = [gguf.quants.dequantize(gguf.quants.quantize(x, number), number) for x in (w["embedding"], value)]
    assert model.config.tied and np.array_equal(model.weights["embedding"], rounded[0].astype(np.float32))
    assert np.array_equal(model.weights["layers.1.qkv.weight"][-len(value) :], rounded[1])


SLOW = {"rope.freq_base": 1e10}  # so that a pair is slow enough to be divided by all of the factor
OF_LLAMA3 = Llama3(8.0, 1.0, 4.0, 8192)
DIVISORS = np.divide(*(frequencies(Rope(8, 1e10, "half", scaling=one)) for one in (None, OF_LLAMA3))).astype(np.float32)
FACTORS = {f"rope_factors_{kind}.weight": np.array([x], np.float32) for kind, x in (("short", 1.5), ("long", 4.0))}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
FREQS, LONG, MSCALE = (
    {"rope_freqs.weight": DIVISORS},
    LongRoPE((1.5,), (4.0,), 1.0, 64, 1.25),
    {"rope.scaling.attn_factor": 1.25},
)


@pytest.mark.parametrize("architecture, settings, tensors, expected", [
    ("llama", LINEAR, {}, Linear(4.0)), ("llama", {"rope.scaling.type": "none"}, {}, None), ("qwen2", YARN, {}, YaRN(4.0, 16)),
    ("qwen3", YARN | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.finetuned": True}, {}, YaRN(4.0, 16, 16.0)),
    ("llama", SLOW, FREQS, OF_LLAMA3), ("phi3", MSCALE, FACTORS, LONG), ("phi3", MSCALE | {"rope.scaling.type": "longrope"}, FACTORS, LONG),
    # Refused
    ("llama", {"rope.scaling.type": "ntk", "rope.scaling.factor": 4.0}, {}, "rope.scaling.type 'ntk'"),
    ("llama", {"rope.scaling.factor": 4.0}, {}, "rope.scaling.factor is not known"), ("llama", {"rope.scaling.type": "linear"}, {}, "'rope.scaling.factor' is missing"),
    ("llama", YARN | {"rope.scaling.attn_factor": 2.0}, {}, "rope.scaling.attn_factor is not known"), ("llama", LINEAR, FREQS, "is not understood"),
    ("llama", YARN | {"rope.scaling.original_context_length": None}, {}, "'rope.scaling.original_context_length' is missing"),
    ("llama", {}, FREQS, "is not the rescaling of Llama 3"), ("llama", SLOW, {"rope_freqs.weight": DIVISORS[None]}, "is not the rescaling of Llama 3"),
    ("phi3", {}, FACTORS, "'rope.scaling.attn_factor' is missing"), ("phi3", {"rope.scaling.type": "longrope"}, {}, "is not understood"),
    ("phi3", MSCALE, {"rope_factors_long.weight": FACTORS["rope_factors_long.weight"]}, "is not understood"),
    ("llama", MSCALE, FACTORS, "m.gguf: rope_type 'longrope' needs the key factor"),
    ("llama", {"expert_count": 2}, {}, "expert_count must be 0, was 2"), ("llama", {"vocab_size": 7}, {}, "vocab_size must be 32, was 7"),
    ("llama", {"attention.value_length": 2}, {}, "attention.value_length must be 8"),
    ("llama", {"attention.head_count": None}, {}, "'attention.head_count' is missing"), ("llama", {"attention.head_count": 0}, {}, "must be at least 1, was 0"),
    ("llama", {"block_count": 3}, {}, "missing: blk.2.attn_norm.weight"),
    ("llama", {"qwen2.block_count": 2}, {}, "qwen2.block_count is not known"),
    ("llama", {}, {"blk.0.attn_sinks.weight": np.ones(4, "f4")}, "unexpected: blk.0.attn_sinks"),
    ("gptneox", {"attention.head_count_kv": 2}, {}, "attention.head_count_kv must be 4, was 2"), ("gemma3", {"attention.sliding_window": 0}, {}, "'sliding_window' is missing"),
])  # fmt: skip
def test_rescalings_in_gguf_files_and_what_is_refused(architecture, settings, tensors, expected, opened):
    _, w, stored = in_gguf(architecture)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            opened(architecture, stored | tensors, **settings)
        return
    model = opened(architecture, stored | tensors, **settings)
    assert {layer.rope.scaling for layer in model.config.layers} == {expected}
    same(model, w)


def test_other_files_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="general.architecture must be one of 'llama', .* was 'bert'"):
        load(gguf_files.write(tmp_path / "m.gguf", "bert"))
    with pytest.raises(ValueError, match="m.gguf: missing: token_embd.weight, the embeddings"):
        load(gguf_files.write(tmp_path / "m.gguf", tensors={}))
    big = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    big.write_header_to_file()
    big.write_kv_data_to_file()
    big.close()
    with pytest.raises(ValueError, match="big.gguf: .*the other byte order"):
        load(tmp_path / "big.gguf")


# ── Damaged files ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["config.json", "model.safetensors", "m.gguf"])
def test_files_that_are_cut_are_refused(kind, tmp_path):
    """Whatever a package raises is one ValueError (or TypeError) of ours, and nothing hangs."""
    raw, _, tensors = checkpoint("llama")
    save(tmp_path, raw, tensors)
    claims = gguf_files.write(tmp_path / "m.gguf", others={"tokenizer.ggml.scores": b"ab"}).read_bytes()
    at = claims.index(b"tokenizer.ggml.scores") + len("tokenizer.ggml.scores") + 8  # a list of 2⁶⁰ numbers, it says
    file = tmp_path / kind
    where, content = file if kind == "m.gguf" else tmp_path, file.read_bytes()
    early = "m.gguf: the file ends too early, or is no GGUF file: " if kind == "m.gguf" else kind
    for n in (0, 1, 3, 8, 20, *range(30, min(len(content), 4000), 150), len(content) // 3, len(content) - 1):
        gguf_files.rewrite(file, content[:n])
        with pytest.raises(ValueError, match=early):
            load(where)
    if kind == "m.gguf":
        gguf_files.rewrite(file, claims[:at] + (2**60).to_bytes(8, "little") + claims[at + 8 :])
        with pytest.raises(ValueError, match="ends too early, .* numbers are needed at byte"):
            load(file)
