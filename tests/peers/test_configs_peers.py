"""What `Rope.from_config` reads, against transformers: the same config goes to both, and Θ, the attention factor and the
rotation must agree within what float32 allows, which `pyrope.oracle.tolerance` derives.

Configs are written down here, drawn at random, and those of every class of transformers that makes rotary tables. The
classes are found by their names, so that a family that comes with another version is noticed.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from theirs import class_of, layer_types, their_config, their_rope, theta_bound
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pyrope
from pyrope import Rope, check_rotation
from pyrope.configs import MODEL_TYPES, NOT_READ
from pyrope.oracle.adapters import from_torch, with_axes
from pyrope.oracle.tolerance import ANGLE32

# G(s, k) = 0.1·k·ln s + 1 has 0.1, two products, a logarithm good to 1 ulp and a sum: 6 roundings; two of them and a
# quotient make 13. √(1 + ln s/ln L₀) has fewer.
ATTENTION_FACTOR = 13 * 2.0**-53
TINY = np.finfo(np.float64).tiny  # pairs that do not turn have θ = 0 on both sides


def assert_theta_is_theirs(config: dict[str, Any]) -> None:
    """Θ and the attention factor of each layer type, at the lengths where they may change; the class is made anew for
    each, since it keeps the table that a longer call made."""
    parsed, cls = their_config(config), class_of(config["model_type"])
    for layer_type in layer_types(cls(parsed)):
        rope = Rope.from_config(config, layer_type=layer_type)
        border = getattr(rope.scaling, "original_length", config.get("max_position_embeddings", 4096))
        for length in {1, border - 1, border, border + 1, 3 * border} - {0}:
            embedding, fixed = cls(parsed), rope.at(length)
            axes = () if rope.axes is None else (3,)
            embedding(torch.zeros(1), torch.full((*axes, 1, 1), length - 1), *filter(None, [layer_type]))
            prefix = f"{layer_type}_" if layer_type else ""
            theta, ours = getattr(embedding, f"{prefix}inv_freq").numpy(), pyrope.frequencies(fixed)
            assert theta.dtype == np.float32 and theta.shape == ours.shape, (layer_type, length)
            np.testing.assert_array_less(np.abs(theta - ours), theta_bound(fixed) * ours + TINY)
            factor = getattr(embedding, f"{prefix}attention_scaling")
            assert factor == pytest.approx(fixed.attention_factor, rel=ATTENTION_FACTOR, abs=0)


# ── Configs written down ─────────────────────────────────────────────────────────────────────────────────────────────


def sized(model_type: str, **keys: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 8192}
    return {"model_type": model_type, **sizes, **keys}


def scaled(head_dim: int, base: float, original: int, **scaling: Any) -> dict[str, Any]:
    scaling |= {"original_max_position_embeddings": original}
    return sized("llama", head_dim=head_dim, rope_theta=base, rope_scaling=scaling) | {
        "max_position_embeddings": 4 * original
    }


def phi3(kind: str, **keys: Any) -> dict[str, Any]:
    lists = {"short_factor": [1 + i / 9 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
    return sized("phi3", rope_scaling={"type": kind, **lists, **keys.pop("inside", {})}, **keys)


def hunyuan(alpha: float, **keys: Any) -> dict[str, Any]:
    scaling = {"alpha": alpha, "factor": 1.0, "type": "dynamic", **keys}
    return sized("hunyuan_v1_dense", head_dim=128, rope_theta=10000.0, rope_scaling=scaling)


LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 512}
STEP = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GEMMA = {"head_dim": 64, "rope_theta": 2000000.0, "rope_local_base_freq": 5000.0}
MODERN = {"global_rope_theta": 80000.0, "local_rope_theta": 5000.0}
TWO_ROPES = {
    "full_attention": LLAMA3 | {"rope_theta": 250000.0},
    "sliding_attention": {"rope_type": "linear", "rope_theta": 2500.0, "factor": 2.0},
}
GEMMA4 = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 2e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
CONFIGS = {
    # Ramps that are steps, fall together, lie below the first pair or beyond the last
    "Llama 4 Scout": scaled(128, 5e5, 4096, rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=1.0),
    **{f"a step, truncated {truncate}": scaled(128, 5e5, 4096, **STEP, truncate=truncate) for truncate in (True, False)},
    **{f"yarn {original} {base} {truncate}": scaled(16, base, original, type="yarn", factor=4.0, truncate=truncate)
       for original, base in ((6, 10000.0), (3, 10.0), (2**20, 2.0)) for truncate in (True, False)},
    # Keys of a family's own, and spellings from before `rope_parameters`
    "gemma3": sized("gemma3_text", **GEMMA),
    "gemma3 scaled": sized("gemma3_text", **GEMMA, rope_scaling=LINEAR),
    "gemma3n scaled": sized("gemma3n_text", **GEMMA, rope_scaling=LINEAR),
    "modernbert": sized("modernbert", **MODERN),
    "modernbert scaled": sized("modernbert", **MODERN, rope_scaling=LINEAR),
    "olmo3": sized("olmo3", rope_theta=500000.0, rope_scaling=YARN),
    "gpt_neox": sized("gpt_neox", rotary_pct=0.5, rotary_emb_base=5000),
    "gpt_neox whole": sized("gpt_neox", rotary_pct=1.0, rotary_emb_base=1000000),
    "gpt_neox_japanese": sized("gpt_neox_japanese", rotary_pct=0.25, rotary_emb_base=5000),
    "minimax_m2": sized("minimax_m2", head_dim=128, rotary_dim=64, rope_theta=5000000),
    "falcon": sized("falcon", rope_theta=50000.0, rope_scaling=LINEAR),
    "glm4_moe": sized("glm4_moe", head_dim=128, partial_rotary_factor=0.5, rope_theta=1000000),
    **{name: sized(name, partial_rotary_factor=0.75, rope_theta=25000.0)
       for name in ("glm", "nemotron", "persimmon", "phi", "phi3", "qwen3_next", "stablelm")},
    **{name: sized(name, rope_theta=50000.0, rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]})
       for name in ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")},
    "deepseek_v3": sized("deepseek_v3", qk_nope_head_dim=32, qk_rope_head_dim=16, rope_theta=50000, rope_scaling=YARN),
    "phi3, the original length at the top": phi3("longrope", original_max_position_embeddings=512),
    "phi3, the original length twice": phi3("su", original_max_position_embeddings=512,
                                            inside={"original_max_position_embeddings": 1024}),
    "phi3, no original length": phi3("longrope"),
    "hunyuan": hunyuan(1000.0),
    "hunyuan, keys of yarn": hunyuan(2.5, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    # A rope for each type of layer
    **{f"{name}, two ropes": sized(name, head_dim=64, rope_parameters=TWO_ROPES)
       for name in ("gemma3_text", "gemma3n_text", "modernbert", "olmo3")},
    "gemma4": sized("gemma4_text", head_dim=64, global_head_dim=128, num_hidden_layers=4, rope_parameters=GEMMA4,
                    layer_types=["sliding_attention", "full_attention"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name: str) -> None:
    """As it is written, and as transformers saves it."""
    assert_theta_is_theirs(CONFIGS[name])
    assert_theta_is_theirs(their_config(CONFIGS[name]).to_dict())


# ── Configs drawn at random ──────────────────────────────────────────────────────────────────────────────────────────

FACTORS = st.sampled_from([1.0, 2.0, 8.0, 40.0]) | st.floats(1, 64) | st.integers(1, 64)
BASES = st.sampled_from([10000.0, 10000, 500000.0, 1e6]) | st.floats(1.5, 1e8) | st.integers(2, 10**7)
SCALES = st.sampled_from([None, 0, 0.0, 1, 1.0, 0.707]) | st.floats(0.05, 4)
GAINS = st.none() | st.floats(0.1, 4)
ABSENT = st.sampled_from([None, 0, 0.0])  # null and 0 are not given
# What each rope type needs, and what it may have besides; lists of LongRoPE are added.
KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "linear": ({"factor": FACTORS}, {}),
    "dynamic": ({"factor": FACTORS}, {}),
    "yarn": (
        {"factor": FACTORS | st.none()},
        {"beta_fast": ABSENT | st.floats(6, 64), "beta_slow": ABSENT | st.floats(0.25, 4), "attention_factor": GAINS,
         "mscale": SCALES, "mscale_all_dim": SCALES, "truncate": st.booleans()},
    ),
    "longrope": ({}, {"factor": FACTORS | st.none(), "attention_factor": GAINS}),
    "llama3": ({"factor": FACTORS, "low_freq_factor": st.just(1) | st.floats(0.1, 3.75),
                "high_freq_factor": st.just(4) | st.floats(4, 24)}, {}),
    "proportional": ({}, {"factor": FACTORS}),
}  # fmt: skip


@st.composite
def configs(draw: Any, kind: str) -> dict[str, Any]:
    """A config of type llama, in the new spelling or the old one."""
    head_dim, fraction = 2 * draw(st.integers(2, 96)), draw(st.just(1.0) | st.integers(1, 100).map(lambda k: k / 100))
    width = int(head_dim * fraction)
    if width < 4 or kind == "default" or (kind != "proportional" and width % 2):  # Llama's default rotates whole heads
        fraction, width = 1.0, head_dim
    lists = st.lists(st.floats(0.75, 100), min_size=width // 2, max_size=width // 2)
    needed = dict.fromkeys(("short_factor", "long_factor"), lists) if kind == "longrope" else KEYS[kind][0]
    parameters = draw(st.fixed_dictionaries(needed, optional=KEYS[kind][1]))
    parameters[draw(st.sampled_from(["rope_type", "type"]))] = kind
    heads, original = draw(st.integers(1, 8)), draw(st.integers(2, 2**15))
    config: dict[str, Any] = {"model_type": "llama", "num_attention_heads": heads}
    config |= draw(
        st.sampled_from([{"hidden_size": heads * head_dim}, {"hidden_size": 16 * heads, "head_dim": head_dim}])
    )
    config["max_position_embeddings"] = int(original * draw(st.sampled_from([1, 4]) | st.floats(1, 40)))
    if kind in ("yarn", "longrope", "llama3"):  # the one at the top level wins, the model's maximum stands in for both
        places = draw(st.sampled_from([("in",), ("top",), ("in", "top"), ()]))
        if "in" in places:
            parameters["original_max_position_embeddings"] = original + 7 * len(places) - 7
        if "top" in places:
            config["original_max_position_embeddings"] = original
        if not places and kind != "llama3" and not parameters.get("factor"):  # nothing to make the factor from
            parameters["factor"] = 4.0
    common = {"rope_theta": draw(BASES), "partial_rotary_factor": fraction}
    if draw(st.booleans()):
        return config | {"rope_parameters": parameters | common}
    return config | {"rope_scaling": None if kind == "default" else parameters} | common


@pytest.mark.parametrize("kind", KEYS)
@settings(max_examples=60)
@given(data=st.data())
def test_random_config(kind: str, data: Any) -> None:
    assert_theta_is_theirs(data.draw(configs(kind)))


def test_every_rope_type_is_drawn() -> None:
    """A rope type that transformers adds shows up here before it is missed."""
    assert {"default", *ROPE_INIT_FUNCTIONS} == set(KEYS)


# ── Every class ──────────────────────────────────────────────────────────────────────────────────────────────────────

NO_WORDS, MEMORY = "its config has no words for RoPE", "sizes of a memory, with names of their own"
# Classes that are not read, and why.
OTHERS = {
    "ClvpRotaryPositionalEmbedding": NO_WORDS,
    "EfficientLoFTRRotaryEmbedding": "positions of images, in halves of feature maps",
    "EomtDinov3RotaryEmbedding": "positions of images, in fractions",
    "EsmFold2RotaryEmbedding": NO_WORDS,
    "EvollaSaProtRotaryEmbedding": "the part of a model, without a model_type",
    "MusicFlamingoRotaryEmbedding": "positions are seconds, in fractions",
    "EdgeTamVideoVisionRotaryEmbedding": MEMORY,
    "Llama4VisionRotaryEmbedding": "a table for one size of images, without positions",
    "Sam2VideoVisionRotaryEmbedding": MEMORY,
    "Sam3TrackerVideoVisionRotaryEmbedding": MEMORY,
    "SeamlessM4TConformerRotaryPositionalEmbedding": NO_WORDS,
    "Wav2Vec2BertRotaryPositionalEmbedding": NO_WORDS,
    "Wav2Vec2ConformerRotaryPositionalEmbedding": NO_WORDS,
}
# What a class needs beyond the defaults of its config to be usable, or to have the layers that have ropes.
BASES_OF_LAYERS = {"sliding_attention": 20000.0, "full_attention": 1e6}
TWO_KINDS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in BASES_OF_LAYERS.items()},
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text", "hunyuan_v1_dense", "qwen3_omni_moe_text",
                     "qwen3_omni_moe_talker_text"), {"head_dim": 128}),
    **dict.fromkeys(("glm4v_text", "glm_image_text"), {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
                    {"rope_parameters": {"mrope_section": [16, 24, 24]}}),
    **dict.fromkeys(("laguna", "mellum", "step3p5", "cohere_compass_text"), TWO_KINDS),
    "esm": {"position_embedding_type": "rotary"},
    "glm_ocr_text": {"rope_parameters": {"mrope_section": [8, 12, 12]}},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "nemotron": {"num_key_value_heads": 48},
    "qwen4_exp_text": {"rope_parameters": {"partial_rotary_factor": 0.25}},
    "zamba2": {"use_mem_rope": True},
}  # fmt: skip
# transformers 5.22.2 reads `rotary_dim` of MiniMax-M3 nowhere, though its config has it: 64 features, of which 128 turn.
KNOWN_DIFFERENCES = {"minimax_m3_vl_text": {"rotary_dim": None}}
# Classes that are made for other parts of a model, or for more of them, than their annotations say: types of configs.
MADE_FOR = {
    "BltRotaryEmbedding": ("blt_global_transformer", "blt_local_decoder", "blt_local_encoder", "blt_patcher"),
    "CsmRotaryEmbedding": ("csm", "csm_depth_decoder_model"),
    "DeepseekOcr2VisionRotaryEmbedding": ("deepseek_ocr2_encoder",),
    "DiaRotaryEmbedding": ("dia_decoder", "dia_encoder"),
    "GlmAsrRotaryEmbedding": ("glmasr_encoder",),
    "MimiRotaryEmbedding": ("mimi", "mimi_encoder", "mimi_decoder"),
    "Nemotron3DiarizationRotaryEmbedding": ("nemotron3_diarization_audio",),
    "Qwen3OmniMoeRotaryEmbedding": ("qwen3_omni_moe_talker_code_predictor",),
    "Qwen3OmniMoeTalkerRotaryEmbedding": ("qwen3_omni_moe_talker_text",),
    "T5Gemma2RotaryEmbedding": ("t5gemma2_text", "t5gemma2_decoder"),
    "VoxtralRealtimeRotaryEmbedding": ("voxtral_realtime_text", "voxtral_realtime_encoder"),
}
UNUSABLE = ("cohere_compass_text", "ernie4_5_vl_moe_text", "gradium_phonon_tts", "pocket_tts")  # from sizes alone
SIZES = {"hidden_size": 1536, "num_attention_heads": 16, "max_position_embeddings": 4096}
OPEN = "must say|lacks|has RoPE only|is not read|must add up"  # what a config with nothing but sizes leaves open


def classes() -> dict[str, tuple[Any, type, str | None]]:
    """(module, class, type of config, if it is not the annotated one) of all that transformers has, but for OTHERS."""
    listed = {}
    for path in sorted((pathlib.Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w*Rotary\w*Embedding)\b", path.read_text(), re.M):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for kind in () if name in OTHERS else MADE_FOR.get(name, (None,)):
                listed[f"{name} {kind or ''}".strip()] = module, getattr(module, name), kind
    return listed


CLASSES = classes()
each_class = pytest.mark.parametrize("name", CLASSES)


def config_class(cls: type, model_type: str | None) -> Any:
    """The class of config that a class takes, of the part of a model that it belongs to; None if it does not say."""
    if model_type is not None:
        return CONFIG_MAPPING[model_type]
    hints = [parameter.annotation for parameter in inspect.signature(cls.__init__).parameters.values()]
    configs = [hint for hint in hints if isinstance(hint, type) and issubclass(hint, transformers.PreTrainedConfig)]
    kind = configs[0] if configs else None
    return kind if kind is None or "Vision" in kind.__name__ else type(kind().get_text_config())


def assert_rotation_is_theirs(module: Any, embedding: Any, config: Any, layer_type: str | None, rope: Rope) -> None:
    """The oracle finds nothing wrong with their tables and their function, to a float32 angle."""
    shape = rope if rope.theta_is_fixed else rope.at(1)
    fn = with_axes(from_torch(their_rope(module, embedding, config, layer_type, shape)), "bhnd")
    report = check_rotation(fn, rope, effort="few", max_position=4095)
    assert report.verdict == "right" and report.precision == ANGLE32, report


@each_class
def test_class(name: str) -> None:
    """The default config of each family, and what it cannot be without."""
    module, cls, model_type = CLASSES[name]
    kind = config_class(cls, model_type)
    assert kind is not None, f"{cls} does not say which config it takes: list it in MADE_FOR or OTHERS"
    config = kind(**copy.deepcopy(NEEDED.get(kind.model_type, {})))
    saved = config.to_dict() | KNOWN_DIFFERENCES.get(config.model_type, {})
    if config.model_type in NOT_READ:
        with pytest.raises(ValueError, match="is not read"):
            Rope.from_config(saved)
        return
    embedding = cls(config)
    assert hasattr(config, "qk_nope_head_dim") == MODEL_TYPES[config.model_type].latent
    assert layer_types(embedding)
    for layer_type in layer_types(embedding):
        rope = Rope.from_config(saved, layer_type=layer_type)
        assert_rotation_is_theirs(module, embedding, config, layer_type, rope)


@each_class
def test_bare_config(name: str) -> None:
    """A config.json with nothing but sizes means what the class takes by default, or is refused for what it leaves
    open."""
    module, cls, model_type = CLASSES[name]
    kind = config_class(cls, model_type)
    own = {usual: own for own, usual in getattr(MODEL_TYPES.get(kind.model_type), "names", {}).items()}
    known = {field.name for field in dataclasses.fields(kind)}
    sizes = {own.get(key, key): size for key, size in SIZES.items() if own.get(key, key) in known}
    try:
        config = kind(**sizes)
        embedding = cls(config)
    except Exception:  # noqa: BLE001  # whatever a class raises
        assert kind.model_type in UNUSABLE, kind
        return
    assert kind.model_type not in UNUSABLE
    for layer_type in layer_types(embedding):
        try:
            rope = Rope.from_config({"model_type": kind.model_type} | sizes, layer_type=layer_type)
        except ValueError as error:
            assert re.search(OPEN, str(error)), error
            continue
        assert_rotation_is_theirs(module, embedding, config, layer_type, rope)


def test_all_types_that_are_read_exist() -> None:
    own = {"kimi_k2"}  # its code comes with its checkpoint, and is that of deepseek_v3, as its config says
    assert set(MODEL_TYPES) - set(CONFIG_MAPPING) == own and MODEL_TYPES["kimi_k2"] == MODEL_TYPES["deepseek_v3"]
    assert set(NOT_READ) - set(CONFIG_MAPPING) == set()
