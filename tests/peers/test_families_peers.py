"""Every class of transformers that makes the tables of a rotary embedding: `Rope.from_config` reads the config of its
family, and then agrees with the class and with the function beside it, or it is listed here with the reason.

The classes are found by their names, so that a family that comes with another version is noticed. Each is made from the
default config of its family, or from that and what it cannot be without; tables come from the class itself, at positions
that differ from axis to axis where it has several, and the function of the module turns the identity with them.
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
from peer_bounds import float32_bound
from rotary_modules import their_rope
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pyrope
from pyrope import Rope
from pyrope.models.conventions import MODEL_TYPES, NOT_READ

MODELS = pathlib.Path(transformers.__file__).parent / "models"

# Classes that are not read, and why: by their names, or by how these end.
OTHERS = {
    "ClvpRotaryPositionalEmbedding": "its config has no words for RoPE",
    "EfficientLoFTRRotaryEmbedding": "positions of images, in halves of feature maps",
    "EomtDinov3RotaryEmbedding": "positions of images, in fractions",
    "EsmFold2RotaryEmbedding": "its config has no words for RoPE",
    "EvollaSaProtRotaryEmbedding": "the part of a model, without a model_type",
    "MusicFlamingoRotaryEmbedding": "positions are seconds, in fractions",
    "EdgeTamVideoVisionRotaryEmbedding": "of a memory, whose sizes have names of their own in the config of the whole",
    "Llama4VisionRotaryEmbedding": "a table for one size of images, without positions",
    "Sam2VideoVisionRotaryEmbedding": "as EdgeTamVideo",
    "Sam3TrackerVideoVisionRotaryEmbedding": "as EdgeTamVideo",
    "SeamlessM4TConformerRotaryPositionalEmbedding": "its config has no words for RoPE",
    "Wav2Vec2BertRotaryPositionalEmbedding": "its config has no words for RoPE",
    "Wav2Vec2ConformerRotaryPositionalEmbedding": "its config has no words for RoPE",
}

# What a class needs beyond the defaults of its config to be usable, or to have the layers that have ropes.
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_NESTED = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in
           (("sliding_attention", 20000.0), ("full_attention", 1e6))}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text", "hunyuan_v1_dense", "qwen3_omni_moe_text",
                     "qwen3_omni_moe_talker_text"), {"head_dim": 128}),
    **dict.fromkeys(("glm4v_text", "glm_image_text"), {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    **{name: {"rope_parameters": {"mrope_section": [16, 24, 24]}}
       for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")},
    **dict.fromkeys(("laguna", "mellum", "step3p5"), _TWO_KINDS | {"rope_parameters": _NESTED}),
    "cohere_compass_text": _TWO_KINDS | {"rope_parameters": _NESTED},
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


def cases() -> dict[str, tuple[Any, type, str | None]]:
    """(module, class, type of config, if it is not the annotated one) of all that transformers has."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w*Rotary\w*Embedding)\b", path.read_text(), re.M):
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            for kind in MADE_FOR.get(name, (None,)):
                found[f"{name} {kind or ''}".strip()] = module, getattr(module, name), kind
    return found


CASES = cases()


def annotated(cls: type) -> Any:
    """The class of config that a class says it takes."""
    hints = [parameter.annotation for parameter in inspect.signature(cls.__init__).parameters.values()]
    configs = [hint for hint in hints if isinstance(hint, type) and issubclass(hint, transformers.PreTrainedConfig)]
    return configs[0] if configs else None


def config_of(cls: type, model_type: str | None) -> Any:
    """The default config of the part of a model that a class belongs to, by the annotation of its argument."""
    if model_type is None:
        kind = annotated(cls)
        assert kind is not None, f"{cls} does not say which config it takes: list it in MADE_FOR or OTHERS"
        kind = kind if "Vision" in kind.__name__ else type(kind().get_text_config())
    else:
        kind = CONFIG_MAPPING[model_type]
    return kind(**copy.deepcopy(NEEDED.get(kind.model_type, {})))


def layer_kinds(embedding: Any) -> list[str | None]:
    """The types of layers that a class has tables for; None where all have the same."""
    buffers = [name for name, _ in embedding.named_buffers() if "original" not in name]
    return [name.removesuffix("inv_freq").removesuffix("_") or None for name in buffers if name.endswith("inv_freq")]


def assert_agrees(module: Any, embedding: Any, config: Any, kind: str | None, rope: Rope) -> None:
    """The identity, turned at two positions by their tables and their function, is R(Θ, m), to a float32 angle."""
    part = Rope(rope.width, rope.base, rope.layout, scaling=rope.scaling, axes=rope.axes, direction=rope.direction)
    fn, x = their_rope(module, embedding, config, kind, part), np.eye(rope.width)
    for m in (1, 77):
        at = np.repeat([[m], [3 * m], [2 * m], [5 * m]][: 1 if rope.axes is None else rope.axes.count], len(x), axis=1)
        at = at if rope.axes else at[0]
        y = fn(torch.eye(len(x))[None, None], torch.tensor(at))[0, 0].double().numpy()
        error = np.abs(y - pyrope.rotate(x, at, part))
        assert (error <= float32_bound(x, at, part)).all(), (kind, m, error.max(), rope)


@pytest.mark.parametrize("name", CASES)
def test_class(name: str) -> None:
    module, cls, model_type = CASES[name]
    if cls.__name__ in OTHERS:
        kind = annotated(cls)
        with pytest.raises(ValueError, match="is not listed here: pass layout="):
            Rope.from_config({"model_type": kind and kind.model_type, "head_dim": 64})
        return
    config = config_of(cls, model_type)
    saved = config.to_dict() | KNOWN_DIFFERENCES.get(config.model_type, {})
    if config.model_type in NOT_READ:
        with pytest.raises(ValueError, match="is not read"):
            Rope.from_config(saved)
        return
    embedding = cls(config)
    kinds = layer_kinds(embedding)
    assert kinds and hasattr(config, "qk_nope_head_dim") == MODEL_TYPES[config.model_type].latent
    for kind in kinds:
        rope = Rope.from_config(saved, layer_type=kind)
        rope = rope if rope.theta_is_fixed else rope.at(1)
        assert_agrees(module, embedding, config, kind, rope)
        sizes = head_sizes(module, config, kind)
        assert not sizes or rope.head_dim in sizes, (rope, sizes)


UNUSABLE = ("cohere_compass_text", "ernie4_5_vl_moe_text", "gradium_phonon_tts", "pocket_tts")  # from sizes alone
SIZES = {"hidden_size": 1536, "num_attention_heads": 16, "max_position_embeddings": 4096}
OPEN = "must say|lacks|has RoPE only|is not read|must add up"  # what a config with nothing but sizes leaves open


@pytest.mark.parametrize("name", CASES)
def test_bare_config(name: str) -> None:
    """A config.json with nothing but sizes means what the class takes by default, or is refused for what it leaves
    open."""
    module, cls, model_type = CASES[name]
    if cls.__name__ in OTHERS:
        return
    kind = type(config_of(cls, model_type))
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
    for layer_type in layer_kinds(embedding):
        try:
            rope = Rope.from_config({"model_type": kind.model_type} | sizes, layer_type=layer_type)
        except ValueError as error:
            assert re.search(OPEN, str(error)), error
            continue
        assert_agrees(module, embedding, config, layer_type, rope if rope.theta_is_fixed else rope.at(1))


def head_sizes(module: Any, config: Any, kind: str | None) -> set[int]:
    """The head sizes of a module's classes of attention in the first layer of this type, as far as they can be made."""
    layer = config.layer_types.index(kind) if kind in (getattr(config, "layer_types", None) or []) else 0
    sizes = set()
    for name, cls in vars(module).items():
        if isinstance(cls, type) and cls.__module__ == module.__name__ and name.endswith("Attention"):
            try:
                with torch.device("meta"):
                    attention = cls(config, layer_idx=layer)
            except Exception:  # noqa: BLE001, S112  # a vision part, or another config
                continue
            names = ("qk_head_dim", "head_dim", "head_size", "attention_head_size")
            sizes |= {getattr(attention, one) for one in names if hasattr(attention, one)}
    return sizes


def test_all_types_that_are_read_exist() -> None:
    own = {"kimi_k2"}  # its code comes with its checkpoint, and is that of deepseek_v3, as its config says
    assert set(MODEL_TYPES) - set(CONFIG_MAPPING) == own and MODEL_TYPES["kimi_k2"] == MODEL_TYPES["deepseek_v3"]
    assert set(NOT_READ) - set(CONFIG_MAPPING) == set()


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},  # Llama 4 Scout
        {"rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    ],
    ids=["Llama 4 Scout", "Kimi K2", "not truncated"],
)
def test_steps_instead_of_ramps(scaling: dict[str, Any]) -> None:
    parameters = scaling | {"rope_theta": 500000.0, "original_max_position_embeddings": 4096}
    config = transformers.LlamaConfig(head_dim=128, rope_parameters=parameters)
    module, cls, _ = CASES["LlamaRotaryEmbedding"]
    assert_agrees(module, cls(config), config, None, Rope.from_config(config.to_dict()))


def test_dbrx_ignores_its_base() -> None:
    """transformers 5.22.2 reads `attn_config.rope_theta`, as DBRX's config has it, into a field that nobody reads."""
    given = {"d_model": 256, "n_heads": 4, "attn_config": {"kv_n_heads": 4, "rope_theta": 500000}}
    module, cls, _ = CASES["DbrxRotaryEmbedding"]
    embedding = cls(transformers.DbrxConfig(**copy.deepcopy(given)))
    np.testing.assert_allclose(embedding.inv_freq, pyrope.frequencies(Rope(64, 10000.0, "half")), rtol=1e-6)
    assert Rope.from_config({"model_type": "dbrx"} | given) == Rope(64, 500000.0, "half")


def test_hunyuan_vl_is_no_rotation() -> None:
    """Where positions differ from axis to axis, the two features of a pair follow different axes; in text R is one."""
    module, cls, _ = CASES["HunYuanVLRotaryEmbedding"]
    kind = CONFIG_MAPPING["hunyuan_vl_text"]
    config = kind(head_dim=16, rope_parameters={"rope_type": "default", "mrope_section": [2, 2, 2, 2]})
    embedding, x = cls(config), torch.eye(16)[None, None]
    for positions, rotation in (([5, 5, 5, 5], True), ([5, 1, 7, 3], False)):
        at = torch.tensor(positions)[:, None, None].expand(-1, 1, 16)
        matrix = module.apply_rotary_pos_emb(x, x, *embedding(x[0], at))[0][0, 0].double().numpy()
        assert bool(np.allclose(matrix @ matrix.T, np.eye(16), atol=1e-5)) is rotation
    with pytest.raises(ValueError, match="which is no rotation"):
        Rope.from_config(config.to_dict())
