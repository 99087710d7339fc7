"""What each published architecture is: a config.json as its authors write it gives the Config that is written out here."""

import dataclasses
import math
import re

import pytest

from pyrope import DynamicNTK, Linear, Llama3, LongRoPE, Rope, YaRN
from pyrope.models.architecture import Config, Layer, weight_shapes
from pyrope.models.families import FAMILIES, find_family, read_architecture

# Keys of any config.json that say nothing about the result.
EVERYWHERE = {
    "architectures": ["SomeForCausalLM"], "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None,
    "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "_name_or_path": "x", "attention_dropout": 0.0, "is_decoder": False,
}  # fmt: skip
_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
}
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


def _read(name, *without, ignore=(), **changed):
    given = {key: value for key, value in (CONFIGS[name] | changed).items() if key not in without}
    return read_architecture(EVERYWHERE | given, ignore)


def test_every_family_is_tested():
    assert CONFIGS.keys() == EXPECTED.keys() == FAMILIES.keys()


@FAMILY
def test_a_config_means_this(name):
    assert _read(name) == dataclasses.replace(_MODEL, **EXPECTED[name])


@FAMILY
def test_every_weight_has_a_name_in_a_checkpoint(name):
    """In its family, once; and no name of the family is of nothing."""
    family, config = FAMILIES[name], _read(name)
    everything = dataclasses.replace(config, qkv_bias=True, out_bias=True, mlp_bias=True, tied=False)
    names = {key.replace("layers.1.", "layers.{i}.") for key in weight_shapes(everything) if "layers.0." not in key}
    stems = {key.removesuffix(".weight").removesuffix(".bias") for key in names}
    assert stems == {key.removesuffix(".bias") for key in family.tensors if key.removesuffix(".bias") in stems}
    unused = {key for key in family.tensors if key.removesuffix(".bias") not in stems}
    assert unused <= {"layers.{i}.q_norm", "layers.{i}.k_norm"}


# --- Old and new spellings ---

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("spelt", "scaling"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Linear(2.0)),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, DynamicNTK(2.0, 64)),
        ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3}, Llama3(8.0, 1.0, 4.0, 16)),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0} | LLAMA3}, Llama3(8.0, 1.0, 4.0, 16)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}, YaRN(4.0, 16)),
    ],
)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
def test_rope_scalings_old_and_new(name, spelt, scaling):
    rope = _read(name, *(["rope_theta"] if "rope_parameters" in spelt else []), **spelt).layers[0].rope
    assert rope == dataclasses.replace(_ROPE, scaling=scaling)


def test_phi3_is_rotated_in_part_and_by_longrope():
    factors = {"short_factor": [1.0], "long_factor": [4.0]}
    config = _read(
        "phi3", partial_rotary_factor=0.5, max_position_embeddings=256, rope_scaling={"type": "longrope"} | factors
    )  # fmt: skip
    scaling = LongRoPE((1.0,), (4.0,), 4.0, 64)
    assert config.layers[0].rope == Rope(4, 500000.0, "half", 2, scaling=scaling)


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_a_window_of_null_is_none(name):
    assert [layer.window for layer in _read(name, sliding_window=None).layers] == [None, None]


def test_mistral_says_its_window():
    """Left out it would mean 4096, and null none: neither is guessed."""
    with pytest.raises(ValueError, match="sliding_window is missing"):
        _read("mistral", "sliding_window")
    assert _read("phi3", "sliding_window").layers[0].window is None


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_late_layers_slide_if_they_shall(name):
    def windows(*without, **changed):
        given = {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 7}
        return [layer.window for layer in _read(name, *without, **(given | changed)).layers]

    assert windows() == [None, 7, 7, 7]
    assert windows(max_window_layers=0) == [7] * 4
    assert windows(max_window_layers=28) == [None] * 4
    assert windows(use_sliding_window=False) == [None] * 4
    assert windows("use_sliding_window") == [None] * 4
    assert windows(sliding_window=None) == [None] * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(layer_types=types) == [7, None, 7, None]
    for key in ("sliding_window", "max_window_layers"):
        with pytest.raises(ValueError, match=f"the config lacks '{key}'"):
            windows(key)
    with pytest.raises(TypeError, match="use_sliding_window must be True or False, was 'no'"):
        windows(use_sliding_window="no")


def test_gemma3_layers_are_local_but_every_sixth():
    local, everything = Layer(_LOCAL, 5), Layer(_GLOBAL)
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        given = {"num_hidden_layers": 7, key: 3}
        config = read_architecture({k: v for k, v in CONFIGS["gemma3_text"].items() if "pattern" not in k} | given)
        assert config.layers == (local, local, everything, local, local, everything, local)
    unsaid = _read("gemma3_text", "sliding_window_pattern", num_hidden_layers=7)
    assert unsaid.layers == (*[local] * 5, everything, local)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert _read("gemma3_text", num_hidden_layers=3, layer_types=types).layers == (everything, local, everything)
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
    }
    config = _read("gemma3_text", "rope_theta", "rope_local_base_freq", rope_parameters=nested)
    scaled = dataclasses.replace(_GLOBAL, scaling=Linear(8.0))
    assert config.layers == (Layer(Rope(8, 123.0, "half"), 5), Layer(scaled))
    for window in ({"sliding_window": None}, {}):
        with pytest.raises(ValueError, match="sliding_window"):
            _read("gemma3_text", "sliding_window" if not window else "", **window)


def test_gpt_neox_blocks_in_sequence():
    config = _read("gpt_neox", use_parallel_residual=False, attention_bias=False)
    assert (config.block, config.qkv_bias, config.out_bias, config.mlp_bias) == ("sequential", False, False, True)
    assert _read("gpt_neox", "use_parallel_residual").block == "parallel"


def test_gptj_sizes():
    assert _read("gptj", n_inner=20).mlp_width == 20
    assert _read("gptj", "n_layer", num_hidden_layers=3).layers == _layers(_HALF_TURNED, None, None, None)


def test_keys_that_may_be_left_out():
    assert _read("llama", "num_key_value_heads").key_heads == 4
    assert _read("llama", num_key_value_heads=None).key_heads == 4
    for name, tied in (("llama", False), ("qwen2", False), ("gemma3_text", True), ("cohere", True), ("roformer", True)):
        assert _read(name, "tie_word_embeddings").tied is tied
    assert _read("cohere", tie_word_embeddings=False).tied is False
    assert _read("llama", attention_bias=True).out_bias and _read("llama", attention_bias=True).qkv_bias
    assert not _read("glm4").out_bias  # the bias of GLM-4 is one of queries, keys and values alone
    with pytest.raises(ValueError, match="attn_logit_softcapping must be null, was 50.0"):
        _read("gemma3_text", attn_logit_softcapping=50.0)  # transformers has the key and does not use it
    assert math.isclose(_read("gemma3_text", query_pre_attn_scalar=2).scale, 2**-0.5)


@pytest.mark.parametrize(
    ("said", "meant"),
    [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)  # fmt: skip
def test_activations(said, meant):
    assert _read("llama", hidden_act=said).activation == meant


# --- Refusals ---


@FAMILY
def test_unknown_keys_are_refused_unless_ignored(name):
    with pytest.raises(
        ValueError, match=f"model_type '{name}' says what is not read here: a_new is not known; b_new is"
    ):
        _read(name, b_new=1, a_new=False)
    assert _read(name, b_new=1, a_new=False, ignore=("a_new", "b_new")) == _read(name)
    with pytest.raises(ValueError, match="here: b_new is not known; name keys that change nothing in ignore="):
        _read(name, b_new=1, a_new=False, ignore=["a_new"])
    assert _read(name, a_new=None) == _read(name)  # null says nothing


WRONG = [
    ("llama", {"pretraining_tp": 2}, ValueError, "pretraining_tp must be 1, was 2"),
    ("llama", {"is_encoder_decoder": True}, ValueError, "is_encoder_decoder must be False, was True"),
    ("llama", {"add_cross_attention": True}, ValueError, "add_cross_attention must be False, was True"),
    ("roformer", {"is_decoder": True}, ValueError, "is_decoder must be False, was True"),
    ("roformer", {"rotary_value": True}, ValueError, "rotary_value must be False, was True"),
    ("roformer", {"embedding_size": 8}, ValueError, "embedding_size must be hidden_size, was 8"),
    ("cohere", {"use_qk_norm": True}, ValueError, "use_qk_norm must be False, was True"),
    ("phi3", {"attention_bias": True}, ValueError, "attention_bias must be False, was True"),
    ("gemma3_text", {"use_bidirectional_attention": True}, ValueError, "use_bidirectional_attention must be False"),
    ("gptj", {"scale_attn_weights": False}, ValueError, "scale_attn_weights must be True, was False"),
    ("llama", {"hidden_act": "mish"}, ValueError, "activation must be one of 'silu', .*, was 'mish'"),
    ("llama", {"hidden_act": ["silu"]}, ValueError, r"activation must be one of 'silu', .*, was \['silu'\]"),
    ("llama", {"num_hidden_layers": 0}, ValueError, "num_hidden_layers must be at least 1, was 0"),
    ("llama", {"num_hidden_layers": -3}, ValueError, "num_hidden_layers must be at least 1, was -3"),
    ("llama", {"num_hidden_layers": 70000}, ValueError, "num_hidden_layers must be at most 65536, was 70000"),
    ("llama", {"num_hidden_layers": 2.0}, TypeError, "num_hidden_layers must be an integer, was 2.0"),
    ("gptj", {"n_layer": 65537}, ValueError, "n_layer must be at most 65536, was 65537"),
    ("llama", {"vocab_size": "many"}, TypeError, "vocabulary must be an integer, was 'many'"),
    ("llama", {"tie_word_embeddings": "yes"}, TypeError, "tied must be True or False, was 'yes'"),
    ("llama", {"num_key_value_heads": 3}, ValueError, "key_heads must divide heads, 4, was 3"),
    ("llama", {"hidden_size": 18}, ValueError, "hidden_size, 18, must be a multiple of num_attention_heads, 4"),
    ("llama", {"rope_scaling": {"type": "ntk"}}, ValueError, "rope_type must be one of .*, was 'ntk'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, ValueError, "unexpected keys, .*: beta"),
    ("gemma3_text", {"query_pre_attn_scalar": -1}, ValueError, "query_pre_attn_scalar must be finite and greater than 0"),
    ("gemma3_text", {"sliding_window_pattern": 0}, ValueError, "sliding_window_pattern must be at least 1, was 0"),
    ("gptj", {"n_embd": "x"}, TypeError, "must be an integer, was 'x'"),
    ("mistral", {"sliding_window": 0}, ValueError, r"layers\[0\].window must be at least 1, was 0"),
    *[("qwen2", {"layer_types": bad}, ValueError, "layer_types must be a list of 2 words, was ")
      for bad in ("full_attention", ["full_attention"], ["full_attention"] * 3, [["full_attention"]] * 2, [{}, 1], [None] * 2, {})],
    ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, ValueError,
     "layer_types must be one of 'full_attention', 'sliding_attention', was 'chunked_attention'"),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, ValueError, "but no layer of this llama has a window"),
    ("llama", {"sliding_window": 4096}, ValueError, "sliding_window must be null, was 4096"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": False}, ValueError, "no layer of this qwen2 has a window"),
    ("llama", {"vocab_size": "40"}, TypeError, "vocabulary must be an integer, was '40' (in config.json: 'vocab_size')"),
    ("llama", {"use_mrope": True}, ValueError, "use_mrope must be False, was True"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changed", "error", "says"), WRONG, ids=lambda x: str(x)[:40] if isinstance(x, dict) else ""
)
def test_what_is_wrong_is_said(name, changed, error, says):
    with pytest.raises(error, match=re.escape(says) if "(in config" in says else says):
        _read(name, **changed)


def test_all_keys_that_are_wrong_are_said_at_once():
    with pytest.raises(ValueError, match="x is not known; .*pretraining_tp must be 1, was 2") as caught:
        _read("llama", x=1, pretraining_tp=2, is_decoder=True)
    assert "is_decoder must be False, was True" in str(caught.value)
    assert _read("llama", pretraining_tp=2, ignore=("pretraining_tp",)) == _read("llama")
    with pytest.raises(TypeError, match="ignore must be a list of keys, was 'pretraining_tp'"):
        _read("llama", ignore="pretraining_tp")


@FAMILY
def test_keys_that_are_needed_are_asked_for(name):
    for key in FAMILIES[name].read.values():
        if isinstance(key, str):
            for change in ({"without": key}, {key: None}):
                with pytest.raises(ValueError, match=f"the config lacks '{key}'|embedding_size must be hidden_size"):
                    _read(name, change.pop("without", ""), **change)


@pytest.mark.parametrize("name", [None, "", "gpt2", "LLAMA", 5, ["llama"]])
def test_unknown_model_types_are_refused(name):
    for read in (find_family, read_architecture):
        with pytest.raises(ValueError, match="model_type must be one of cohere, gemma3_text, .*, roformer, was "):
            read(_LLAMA | {"model_type": name})
    with pytest.raises(ValueError, match="was None"):
        find_family({})
