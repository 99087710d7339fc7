"""Hugging Face configs: what a ``model_type`` implies about RoPE without its config.json saying so, as data, and how
the old and the new spelling of the rest are read.

The data were read from the model code of transformers 5.22.2 and are checked against it. A type that is not
listed is not refused: `read_config` then asks for what the config does not say.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from .. import checks
from .files import read_json


class LayerRope(NamedTuple):
    """One kind of layer of a model whose layers have different ropes, in the old flat spelling."""

    base: float  # if the config does not say
    base_key: str  # where the flat config says it
    scaled: bool  # whether rope_scaling applies to these layers
    head_key: str = "head_dim"
    head_dim: int | None = None  # if the config does not say it under head_key
    attention_factor: float | None = None  # of yarn, if a flat config does not say


class Convention(NamedTuple):
    layout: str | None
    base: float | None = 10000.0  # if the config does not say
    fraction: float = 1.0  # of the head that is rotated, if the config does not say
    head_dim: int | None = None  # if the config does not say; None: hidden size / heads
    rotary_dim: int | None = None  # if the config does not say; None: by the fraction
    latent: bool = False  # multi-head latent attention: a head is [nope | rope], and the config must say both sizes
    placement: str = "prefix"
    original_length: int | None = None  # if the config does not say; None: max_position_embeddings
    direction: int = 1
    axes: str | None = None  # how mrope_section is meant: see _axes
    sections: tuple[int, ...] = ()  # if the config does not say; none: it must
    layers: dict[str, LayerRope] = {}  # by layer type
    by_layer: bool = False  # layers have different ropes, and the config must say rope_parameters for each type
    still: str | None = None  # the type of layer that is not rotated, unless sliding_window is null
    every: int | None = None  # one layer in so many is not rotated, if the config does not say; −4: 4, from the last on
    switch: tuple[str, Any] | None = None  # what the config must say, since without it nothing is rotated
    names: dict[str, str] = {}  # its own names of keys -> the usual ones
    beside: tuple[str, ...] = ()  # keys of its rope dict that say nothing of the rope
    alpha: bool = False  # whether "dynamic" with alpha means another base, with YaRN's keys beside it unused
    explicit: bool = False  # its class scales Θ where a config says nothing, so that such a config is refused


# Older and newer spellings of one and the same number, at the top level of a config.json.
HIDDEN_KEYS = ("hidden_size", "n_embd")
HEADS_KEYS = ("num_attention_heads", "n_head")
LENGTH_KEYS = ("max_position_embeddings", "n_positions")
BASE_KEYS = ("rope_theta", "rotary_emb_base")
FRACTION_KEYS = ("partial_rotary_factor", "rotary_pct")
ROPE_TYPE_ALIASES = {"mrope": "default", "su": "longrope"}


def _layers(full: LayerRope, sliding: LayerRope) -> dict[str, LayerRope]:
    return {"full_attention": full, "sliding_attention": sliding}


_GEMMA3 = _layers(LayerRope(1000000.0, "rope_theta", True), LayerRope(10000.0, "rope_local_base_freq", False))
_GEMMA4 = _layers(
    LayerRope(1000000.0, "rope_theta", True, "global_head_dim", 512),
    LayerRope(10000.0, "rope_local_base_freq", False, "head_dim", 256),
)
_MODERNBERT = _layers(LayerRope(160000.0, "global_rope_theta", True), LayerRope(10000.0, "local_rope_theta", True))
_OLMO3 = _layers(LayerRope(500000.0, "rope_theta", True), LayerRope(500000.0, "rope_theta", False))
_DEEPSEEK4 = {
    "main": LayerRope(10000.0, "rope_theta", False),  # of sliding layers
    "compress": LayerRope(160000.0, "compress_rope_theta", True, attention_factor=1.0),  # of all others
}
_GRIDS = ("axial", "pixtral", "columns first", "thirds")
_VISION = {"num_heads": "num_attention_heads", "embed_dim": "hidden_size"}
_YARN_KEYS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_SCALED_QUERIES = ("llama_4_scaling_beta", "max_position_embeddings")  # queries grow with the position, not the rope
_TYPES = {
    # Pairs (i, i + r/2).
    "arcee aria_text chameleon deepseek_ocr2_encoder deepseek_ocr2_text diffllama doge dots1 esmc eurobert falcon "
    "falcon_h1 gpt_neox_japanese gradium_phonon_tts granite granite4_vision_text granite_swa granitemoe "
    "granitemoe_swa granitemoeshared hyperclovax idefics jais2 kyutai_speech_to_text lasr_encoder llama mimi "
    "mimi_decoder mimi_encoder ministral mistral moshi nemotron3_diarization_audio olmo olmo2 olmo_hybrid olmoe "
    "pocket_tts pocket_tts_audio_tokenizer qwen2 qwen2_moe qwen3_moe starcoder2 unlimited_ocr_text "
    "voxtral_realtime_text":
        Convention("half"),
    "nomic_bert": Convention("half", base=1000.0),
    "jina_embeddings_v3": Convention("half", base=20000.0),
    "gte": Convention("half", base=160000.0),
    "bitnet csm csm_depth_decoder_model evolla flex_olmo mllama_text_model": Convention("half", base=500000.0),
    "emu3_text_model lfm2 lfm2_moe minimax mixtral phimoe": Convention("half", base=1000000.0),
    "smollm3": Convention("half", base=2000000.0, every=4),
    "apertus": Convention("half", base=12000000.0, explicit=True),
    "neucodec qwen2_5_omni_dit voxtral_realtime_encoder xcodec2": Convention("half", head_dim=64),
    "timesfm2_5": Convention("half", head_dim=80),
    "dia_decoder dia_encoder hrm_text molmo2_text qwen3 qwen3_omni_moe_talker_code_predictor seed_oss":
        Convention("half", head_dim=128),
    "muse_glimmer_assistant": Convention("half", base=500000.0, head_dim=128),
    "solar_open": Convention("half", base=1000000.0, head_dim=128),
    "minimax_m2 minimax_m3_vl_text": Convention("half", base=5000000.0, head_dim=128),
    "hy_v3": Convention("half", base=11158840.0, head_dim=128),
    "cwm": Convention("half", base=1000000.0, head_dim=128, explicit=True),
    "higgs_audio_v2": Convention("half", base=500000.0, head_dim=128, explicit=True),
    "ministral3": Convention("half", base=1000000.0, head_dim=128, explicit=True, beside=_SCALED_QUERIES),
    "gpt_oss": Convention("half", base=150000.0, head_dim=64, explicit=True),
    "gemma gemma2 t5_gemma_module vaultgemma": Convention("half", head_dim=256),
    "bamba glm4_moe glmasr_encoder nemotron nemotron3_5_transcribe_asr_audio persimmon phi recurrent_gemma":
        Convention("half", fraction=0.5),
    "gpt_neox stablelm": Convention("half", fraction=0.25),
    "qwen3_next": Convention("half", fraction=0.25, head_dim=256),
    "phi3 phi4_multimodal": Convention("half", original_length=4096),
    "nanochat": Convention("half", direction=-1),
    "hunyuan_v1_dense hunyuan_v1_moe": Convention("half", alpha=True),
    # The same, by other names, or only if the config says so.
    "dbrx":
        Convention("half", names={"d_model": "hidden_size", "n_heads": "num_attention_heads",
                                  "attn_config.rope_theta": "rope_theta"}),
    "jetmoe": Convention("half", names={"kv_channels": "head_dim"}),
    "zamba2": Convention("half", names={"attention_head_dim": "head_dim"}, switch=("use_mem_rope", True)),
    "esm": Convention("half", switch=("position_embedding_type", "rotary")),
    "granitemoehybrid": Convention("half", switch=("position_embedding_type", "rope")),
    # Layers that differ, or that are not rotated.
    "gemma3_text gemma3n_text t5gemma2_decoder t5gemma2_text": Convention("half", head_dim=256, layers=_GEMMA3),
    "diffusion_gemma_text embedding_gemma2_text gemma4_text gemma4_unified_text":
        Convention("half", layers=_GEMMA4, explicit=True),
    "modernbert modernbert-decoder": Convention("half", layers=_MODERNBERT),
    "olmo3": Convention("half", layers=_OLMO3),
    "ultrabert": Convention("half", by_layer=True),
    "beam laguna mellum step3p5 zaya": Convention("half", head_dim=128, by_layer=True),
    "mimo_v2_flash": Convention("half", head_dim=192, by_layer=True),
    "afmoe flint kolibri1": Convention("half", head_dim=128, still="full_attention"),
    "exaone4 exaone_moe": Convention("half", still="full_attention"),
    "muse_glimmer_text": Convention("half", head_dim=128, every=-4),
    "muse_spark_text": Convention("half", base=500000.0, head_dim=64, every=-4),
    # Positions of several axes.
    "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text": Convention("half", base=1000000.0, axes="sections"),
    "qwen2_5_omni_text": Convention("half", base=1000000.0, axes="sections", sections=(16, 24, 24)),
    "paddleocr_vl_text": Convention("half", base=500000.0, head_dim=128, axes="sections", sections=(16, 24, 24)),
    "glm_image_text": Convention("half", axes="sections", sections=(8, 12, 12)),
    "glm4v_moe_text": Convention("half", fraction=0.5, axes="sections", sections=(8, 12, 12)),
    "qwen3_vl_moe_text": Convention("half", base=500000.0, axes="interleaved"),
    "qwen3_vl_text": Convention("half", base=500000.0, head_dim=128, axes="interleaved"),
    "qwen3_omni_moe_talker_text": Convention("half", axes="interleaved", sections=(24, 20, 20)),
    "qwen3_omni_moe_text": Convention("half", base=1000000.0, axes="interleaved", sections=(24, 20, 20)),
    "qwen3_5_text qwen3_5_moe_text":
        Convention("half", fraction=0.25, head_dim=256, axes="interleaved", sections=(11, 11, 10)),
    "qwen4_exp_text": Convention("half", head_dim=256, axes="interleaved", sections=(11, 11, 10)),
    "cosmos3_edge_text": Convention("half", base=100000000.0, head_dim=128, axes="interleaved", sections=(24, 20, 20)),
    "cohere_compass_text": Convention("half", by_layer=True, axes="interleaved", sections=(24, 20, 20)),
    "neomme": Convention("half", head_dim=64, by_layer=True, axes="alternating"),
    # The vision parts: rows and columns, or times, rows and columns, with a series of frequencies for each.
    "cohere_compass_vision ernie4_5_vl_moe_vision exaone4_5_vision glm4v_moe_vision glm4v_vision glm5_next_vision "
    "glm_ocr_vision mlcd_vision_model muse_glimmer_vision muse_spark_vision paddleocr_vl_vision "
    "qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision "
    "qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision step3p5_vision "
    "video_llama_3_vision":
        Convention("half", axes="axial", names=_VISION),
    "pixtral": Convention("half", axes="pixtral"),
    "kimi_k25_vision": Convention("half", axes="columns first"),
    "minimax_m3_vl_vision": Convention("half", axes="thirds"),
    # Pairs (2i, 2i+1).
    "blt_patcher roformer": Convention("interleaved"),
    "blt_global_transformer blt_local_decoder blt_local_encoder cohere ernie4_5_moe":
        Convention("interleaved", base=500000.0),
    "cohere2": Convention("interleaved", still="full_attention"),
    "cohere2_moe": Convention("interleaved", head_dim=128, still="full_attention"),
    "codegen gptj": Convention("interleaved", rotary_dim=64),
    "ernie4_5": Convention("interleaved", base=500000.0, head_dim=128),
    "glm glm4": Convention("interleaved", fraction=0.5, head_dim=128),
    "helium": Convention("interleaved", base=100000.0, head_dim=128),
    "pe_audio_encoder pe_audio_video_encoder pe_video_encoder": Convention("interleaved", base=20000.0, head_dim=128),
    "openai_privacy_filter": Convention("interleaved", base=150000.0, head_dim=64, explicit=True),
    "moonshine": Convention("interleaved", fraction=0.9, names={"decoder_num_attention_heads": "num_attention_heads"}),
    "moonshine_streaming": Convention("interleaved", fraction=0.8),
    "llama4_text": Convention("interleaved", base=500000.0, head_dim=128, still="full_attention", every=4),
    "glm4v_text glm_ocr_text": Convention("interleaved", axes="sections", sections=(8, 12, 12)),
    "sam3_vit_model": Convention("interleaved", axes="axial"),
    "ernie4_5_vl_moe_text": Convention("interleaved", base=500000.0, axes="ernie", sections=(22, 22, 20)),
    "deepseek_v2": Convention("interleaved", latent=True),
    "deepseek_v4":
        Convention("interleaved", head_dim=512, rotary_dim=64, placement="suffix", layers=_DEEPSEEK4,
                   names={"qk_rope_head_dim": "rotary_dim"}),
    # Reads pairs (2i, 2i+1), writes (i, i + r/2), unless the config says "rope_interleave": false.
    "axk1 axk2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 youtu":
        Convention("interleaved-to-half", latent=True),
    "bailing_hybrid": Convention("interleaved-to-half", base=6000000.0, latent=True),
    "longcat_flash": Convention("interleaved-to-half", base=10000000.0, latent=True),
    "mistral4": Convention("interleaved-to-half", latent=True, explicit=True, beside=_SCALED_QUERIES),
    # Latent, with pairs (i, i + r/2).
    "hy_v4 minicpm3": Convention("half", latent=True),
}  # fmt: skip
# Types that are known and are no `Rope`.
NOT_READ: dict[str, str] = {
    "gemma4_vision": "rows and columns have a block of features each, with pairs (i, i + w/2) within its width w",
    **dict.fromkeys(
        ("hunyuan_vl", "hunyuan_vl_text"),  # flat, and as a part
        "the two features of a pair follow different axes of the positions, which is no rotation",
    ),
    "mistral_large4_text": "its frequencies are multiplied by learnt numbers, which the checkpoint holds",
}
# Types without RoPE, of which no layout would make one.
_WITHOUT_ROPE = (
    "albert", "bart", "bert", "bloom", "ctrl", "deberta", "deberta-v2", "distilbert", "electra", "gpt2",
    "gpt_bigcode", "gpt_neo", "mamba", "mamba2", "mbart", "mpt", "openai-gpt", "opt", "pegasus", "roberta", "t5",
    "umt5", "mt5", "vit", "whisper", "xglm", "xlm-roberta", "xlnet",
)  # fmt: skip
_BY_NAME = [(name, convention) for names, convention in _TYPES.items() for name in names.split()]
MODEL_TYPES: dict[str, Convention] = dict(sorted(_BY_NAME, key=lambda one: (one[1].layout, one[0])))
_UNKNOWN = Convention(None, base=None)

# Keys by which some model types change their rope and which are read for no type, or for listed types only.
_NOT_READ = ("rope_pct", "rotary_emb_fraction", "rotary_emb_interleaved", "use_dynamic_ntk")
_NOT_READ_IF_UNKNOWN = ("global_head_dim", "kv_channels", "attention_head_dim", "rope_interleave", "axes_dims_rope")
# Bases of some layers alone, which say nothing more where there is a rope dict for each layer type.
_BASES_OF_LAYERS = (
    "rope_local_base_freq", "local_rope_theta", "global_rope_theta", "swa_rope_theta", "compress_rope_theta",
)  # fmt: skip

# The keys of the rope dict that every rope type may have, and those of each: Hugging Face's name -> ours.
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_FACTOR, _LENGTH = {"factor": "factor"}, {"original_max_position_embeddings": "original_length"}
_SAME = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_LISTS = {"short_factor": "short", "long_factor": "long", "attention_factor": "attention_factor"}
_REQUIRED = {"linear": ("factor",), "dynamic": ("factor",), "longrope": ("short_factor", "long_factor")}
_REQUIRED["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "yarn": _FACTOR | _LENGTH | {key: key for key in _SAME},
    "longrope": _FACTOR | _LENGTH | _LISTS,
    "llama3": _FACTOR | _LENGTH | {"low_freq_factor": "low", "high_freq_factor": "high"},
    "proportional": _FACTOR,
}
Json: TypeAlias = Mapping[str, Any]
Source: TypeAlias = Json | str | os.PathLike[str]  # a config, or the path of one, or of its folder


# Our names in the errors of `Rope` -> the keys of a config.
_KEYS_OF = {ours: theirs for names in _KEYS.values() for theirs, ours in names.items()}
_KEYS_OF |= {"base": "rope_theta", "sections": "mrope_section", "fraction": "partial_rotary_factor"}


@contextlib.contextmanager
def errors_by_keys(names: Mapping[str, str] = _KEYS_OF) -> Iterator[None]:
    """Errors within say the keys of the config where they would say our names, or the usual ones."""
    try:
        yield
    except (TypeError, ValueError) as error:
        words = "|".join(map(re.escape, names)) or "$^"
        message = re.sub(rf"(?<![\w\"])({words})(?![\w\"])", lambda word: names[word[0]], str(error))
        raise type(error)(message) from error


def read_config(config: Source, layout: str | None, layer_type: str | None) -> dict[str, Any]:
    """The arguments of the `Rope` that a config means, with ``scaling`` as (rope type, arguments) and ``axes`` as
    the arguments of `Axes` or None."""
    config = _load(config)
    if layer_type is not None and not isinstance(layer_type, str):
        raise TypeError(f"layer_type must be a word, was {layer_type!r}")
    model_type = config.get("model_type")
    convention = _convention(config)
    says_rope = _first(config, (*BASE_KEYS, "rope_parameters", "rope_scaling")) is not None
    if model_type in _WITHOUT_ROPE and not says_rope:
        raise ValueError(f"models of model_type {model_type!r} have no RoPE")
    if layout is None:
        layout = "half" if convention.layout and config.get("rope_interleave") is False else convention.layout
    if layout is None:
        unlisted = f"and model_type {model_type!r} is not listed here"
        ropes = (config.get("rope_parameters"), config.get("rope_scaling"))
        several = any(isinstance(rope, Mapping) and rope.get("mrope_section") is not None for rope in ropes)
        fix = f"{_WRITTEN_OUT}, since it says mrope_section" if several else "pass layout="
        raise ValueError(f"a config does not say which features make a pair, {unlisted}: {fix}")
    _refuse_other_ropes(config, convention, layout)
    found = {usual: _at(config, own) for own, usual in convention.names.items()}
    renamed = {usual: value for usual, value in found.items() if value is not None}
    config = {key: value for key, value in config.items() if key not in convention.names} | renamed
    with errors_by_keys({usual: own for own, usual in convention.names.items()}):
        parameters = _rope_parameters(config, convention, layer_type)
        base = checks.real("rope_theta", parameters["rope_theta"], 1, open=True)
        if "rope_theta" in renamed and renamed["rope_theta"] != base:
            raise ValueError(
                f"rope_theta is {renamed['rope_theta']}, but {base:g} in rope_parameters: keep one of them"
            )
        head_dim, width, placement = _widths(config, convention, parameters, layer_type)
        kind, scaling = _scaling(config, parameters, convention)
    if (alpha := scaling.pop("alpha", None)) is not None:  # HunYuan: only another base
        if width <= 2:
            raise ValueError(f"alpha needs a rotary width of at least 4, was {width}")
        base *= checks.real("alpha", alpha, 0, 1e12, open=True) ** (width / (width - 2))
        kind = "default"
    arguments = {"head_dim": head_dim, "base": base, "layout": layout, "rotary_dim": width, "placement": placement}
    axes = _axes(config, convention, parameters, width // 2)
    return arguments | {"scaling": (kind, scaling), "axes": axes, "direction": convention.direction}


def _convention(config: Json) -> Convention:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return _UNKNOWN
    if model_type in NOT_READ:
        raise ValueError(f"model_type {model_type!r} is not read: {NOT_READ[model_type]}")
    return MODEL_TYPES.get(model_type, _UNKNOWN)


_WRITTEN_OUT = 'write the Rope out, for instance with axes=Axes("sections", …) or Axes("interleaved", …)'


def _axes(config: Json, convention: Convention, parameters: Json, p: int) -> dict[str, Any] | None:
    """The arguments of the `Axes` of p pairs, or None: mrope_section means different things to different types."""
    name, style, sections = config.get("model_type"), convention.axes, parameters.get("mrope_section")
    if style is None:
        if sections is not None:
            rule = "says mrope_section, but not which pairs turn with which axis: model types differ in that"
            unknown = f"and this one is not known to have it: {_WRITTEN_OUT}"
            raise ValueError(f"the config of model_type {name!r} {rule}, {unknown}")
        return None
    if (interleaved := parameters.get("mrope_interleaved")) is not None and interleaved is not (style == "interleaved"):
        raise ValueError(f"model_type {name!r} has {style} axes, but the config says mrope_interleaved {interleaved!r}")
    grids: dict[str, dict[str, Any]] = {  # without sections
        "axial": {"style": "axial"},
        "pixtral": {"style": "pixtral"},
        "alternating": {"style": "interleaved", "sections": (p - p // 2, p // 2)},  # rows and columns by turns
        "columns first": {"style": "listed", "sections": (1, 0) * (p // 2), "series": "own"},
        "thirds": {"style": "sections", "sections": (p // 3,) * 3, "series": "own"},
    }
    if style in grids:
        return grids[style]
    sections = convention.sections or None if sections is None else sections
    if sections is None:
        raise ValueError(f"model_type {name!r} has several position axes: the config must say mrope_section")
    if style != "ernie":
        return {"style": style, "sections": sections}
    # ERNIE 4.5 VL, positions (t, h, w), sections (h, w, t): rows and columns by turns, then times.
    counts = checks.integers("mrope_section", sections, 1)
    if len(counts) != 3 or counts[0] != counts[1]:
        raise ValueError(f"mrope_section must say as many rows as columns, and how many times, was {sections}")
    return {"style": "listed", "sections": (1, 2) * counts[0] + (0,) * counts[2]}


def head_counts(config: Source) -> dict[str, int]:
    """How many heads of queries and of keys a config has; nothing, if it does not say it of queries.

    >>> head_counts({"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8})
    {'heads': 32, 'key_heads': 8}
    """
    config = _load(config)
    keys = {"heads": "num_attention_heads", "key_heads": "num_key_value_heads"}
    counts = {name: checks.size(key, config[key]) for name, key in keys.items() if config.get(key) is not None}
    return counts if "heads" in counts else {}


def position_count(config: Source) -> int | None:
    """How many positions a config says that its model has, if it says it.

    >>> position_count({"model_type": "llama", "max_position_embeddings": 8192})
    8192
    """
    count = _first(_load(config), LENGTH_KEYS)
    return None if count is None else checks.integer("max_position_embeddings", count, 1)


def still_layers(config: Source) -> list[int]:
    """The layers of a config that its rope does not turn: those of SmolLM3 and Llama 4 by no_rope_layers, and others.

    >>> still_layers({"model_type": "smollm3", "num_hidden_layers": 9})
    [3, 7]
    """
    config = _load(config)
    convention, count = _convention(config), config.get("num_hidden_layers")
    count = checks.size("num_hidden_layers", count, 0) if isinstance(count, int) else 0
    types, ropes = _words(config.get("layer_types")), config.get("rope_parameters")
    turned: Any = config.get("no_rope_layers") or config.get("layer_rope_theta")
    if not isinstance(turned, list | tuple):
        every = _first(config, ("no_rope_layer_interval",), convention.every)
        every = every if isinstance(every, int) and every else count + 1
        turned = [(i + 1) % every if every > 0 else (count - 1 - i) % every for i in range(count)]
    if convention.still in types and config.get("sliding_window", 0) is not None:
        turned = [kind != convention.still for kind in types]
    if isinstance(ropes, Mapping) and types:
        turned = [bool(turn) and ropes.get(kind, 0) is not None for turn, kind in zip(turned, types, strict=False)]
    return [i for i, turn in enumerate(turned) if not turn]


def _refuse_other_ropes(config: Json, convention: Convention, layout: str) -> None:
    """Refuses configs without RoPE, and keys that would change the rope and are not read here."""
    if config.get("alibi") is True:
        raise ValueError("this config uses ALiBi instead of RoPE (alibi: true)")
    if (kind := config.get("position_embedding_type")) not in (None, "rope", "rotary"):
        raise ValueError(f"this config does not use RoPE (position_embedding_type: {kind!r})")
    if convention.switch is not None and config.get(convention.switch[0]) != convention.switch[1]:
        (key, wanted), name = convention.switch, config["model_type"]
        raise ValueError(f"model_type {name!r} has RoPE only where the config says {key}: {wanted!r}")
    raw = _first(config, ("rope_parameters", "rope_scaling"))
    nested = isinstance(raw, Mapping) and any(isinstance(value, Mapping) for value in raw.values())
    if_unknown = _NOT_READ_IF_UNKNOWN + (() if nested else _BASES_OF_LAYERS)
    other_pairs = ("rope_interleaved",) if layout == "half" else ()
    for key in _NOT_READ + other_pairs + (if_unknown if convention is _UNKNOWN else ()):
        if config.get(key):
            raise ValueError(f"the config says {key}, which is not read here: write the Rope out instead")
    bases = config.get("layer_rope_theta")
    if isinstance(bases, list | tuple) and len(set(map(str, bases)) - {"0", "0.0"}) > 1:
        raise ValueError(f"layer_rope_theta says several bases: write the Rope of each layer out, was {bases}")
    if convention.explicit and _first(config, ("rope_parameters", "rope_scaling")) is None:
        name = config["model_type"]
        raise ValueError(f"model_type {name!r} scales its frequencies: the config must say rope_parameters")


def _load(config: Source) -> Json:
    if isinstance(config, str | os.PathLike):
        path = pathlib.Path(config)
        config = read_json(path / "config.json" if path.is_dir() else path)
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a dict, or the path of a config.json with one, was {type(config).__name__}")
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and _first(config, HIDDEN_KEYS) is None else config


def _first(config: Json, keys: Sequence[str], default: Any = None) -> Any:
    """The value of the first of these keys that the config has and that is not null."""
    return next((config[key] for key in keys if config.get(key) is not None), default)


def _at(config: Json, path: str) -> Any:
    """The value of a key, or of a key within a dict: "attn_config.rope_theta"."""
    first, _, rest = path.partition(".")
    value = config.get(first)
    return value if not rest else _at(value, rest) if isinstance(value, Mapping) else None


def _words(value: Any) -> list[str]:
    return [word for word in value if isinstance(word, str)] if isinstance(value, list | tuple) else []


def _need(config: Json, keys: Sequence[str], what: str) -> Any:
    if (value := _first(config, keys)) is None:
        raise ValueError(f"the config lacks {' or '.join(map(repr, keys))}, which {what} needs")
    return value


def _rope_parameters(config: Json, convention: Convention, layer_type: str | None) -> dict[str, Any]:
    """The rope dict of a config in its new flat form: with rope_type, rope_theta and fraction, without nulls."""
    raw = _first(config, ("rope_parameters", "rope_scaling"), {})
    if not isinstance(raw, Mapping) or None in raw:
        raise TypeError(f"rope_parameters (or rope_scaling) must be a dict with words as its keys, was {raw!r}")
    if config.get("rope_scaling") not in (None, raw):
        raise ValueError("the config has both rope_parameters and rope_scaling, and they differ: keep one")
    nested = any(isinstance(value, Mapping) for value in raw.values())
    if convention.by_layer and not nested:
        name = config["model_type"]
        rule = "the config must say rope_parameters for each layer type"
        raise ValueError(f"layers of model_type {name!r} differ: {rule}")
    layers: Mapping[str, Any] = {key: rope for key, rope in raw.items() if rope is None or isinstance(rope, Mapping)}
    layers = layers if nested else convention.layers
    base = convention.base
    base_keys: tuple[str, ...] = BASE_KEYS
    if layers and layer_type not in layers:
        listed = ", ".join(map(repr, layers))
        raise ValueError(f"layer_type must be one of {listed}, which have different ropes, was {layer_type!r}")
    if layer_type is not None and layer_type in convention.layers:
        layer = convention.layers[layer_type]
        base, base_keys = layer.base, (layer.base_key,)
        raw = raw if nested or layer.scaled else {}
        if not nested and layer.attention_factor is not None and "yarn" in (raw.get("rope_type"), raw.get("type")):
            raw = {"attention_factor": layer.attention_factor} | dict(raw)
    if nested:
        raw = raw[str(layer_type)]
        if not isinstance(raw, Mapping):
            raise ValueError(f"layers of type {layer_type!r} have no rope in this config ({raw!r})")
    if layer_type is not None and layer_type == convention.still and config.get("sliding_window", 0) is not None:
        raise ValueError(f"layers of type {layer_type!r} are not rotated in model_type {config['model_type']!r}")
    if layer_type is not None and not layers and layer_type not in _words(config.get("layer_types")):
        raise ValueError(f"the config has no layers of type {layer_type!r}: leave layer_type out, all have one rope")
    parameters = {key: value for key, value in raw.items() if value is not None}
    parameters.setdefault("rope_theta", _first(config, base_keys, base))
    if parameters["rope_theta"] is None:
        raise ValueError("the config does not say rope_theta, and its model_type implies none: add it to the config")
    parameters.setdefault("partial_rotary_factor", _first(config, FRACTION_KEYS, convention.fraction))
    kinds = {str(parameters[key]) for key in ("rope_type", "type") if key in parameters} or {"default"}
    aliases = ROPE_TYPE_ALIASES | ({"axial": "default"} if convention.axes in _GRIDS else {})
    kinds = {aliases.get(kind, kind) for kind in kinds}
    if len(kinds) > 1:
        raise ValueError(f"the config says rope_type {parameters['rope_type']!r} and type {parameters['type']!r}")
    parameters["rope_type"] = kinds.pop()
    if not nested and "original_max_position_embeddings" in _KEYS.get(parameters["rope_type"], {}):
        # Phi-3 has it at the top level, and that one wins.
        parameters |= {key: config[key] for key in _LENGTH if config.get(key) is not None}
    return parameters


def _scaling(config: Json, parameters: Json, convention: Convention) -> tuple[str, dict[str, Any]]:
    """The rope type and its arguments by our names."""
    kind = checks.choice("rope_type", parameters["rope_type"], tuple(_KEYS))
    names, what = _KEYS[kind], f"rope_type {kind!r}"
    if convention.alpha and kind == "dynamic":
        names = names | {"alpha": "alpha"} | dict.fromkeys(_YARN_KEYS, "")
    names = names | dict.fromkeys(convention.beside, "")
    if unknown := ", ".join(sorted(set(map(str, parameters)) - set(names) - _COMMON)):
        raise ValueError(f"{what} has unexpected keys, which may change the rope and are not ignored: {unknown}")
    arguments = {names[key]: value for key, value in parameters.items() if names.get(key)}
    if kind == "yarn":  # transformers takes 0 for "not given" here
        arguments = {key: value for key, value in arguments.items() if value or key not in ("beta_fast", "beta_slow")}
    if kind == "dynamic" and "alpha" not in arguments:
        arguments["original_length"] = _need(config, LENGTH_KEYS, what)
    required = () if "alpha" in arguments else _REQUIRED.get(kind, ())
    missing = [key for key in required if names[key] not in arguments]
    length = arguments.get("original_length") or convention.original_length or _first(config, LENGTH_KEYS)
    if kind == "llama3" and length is None:
        missing += _LENGTH
    if missing:
        raise ValueError(f"the config lacks {', '.join(map(repr, missing))}, which {what} needs")
    if "original_max_position_embeddings" in names and "original_length" not in arguments:
        arguments["original_length"] = convention.original_length or _need(config, LENGTH_KEYS, what)
    if kind in ("yarn", "longrope") and "factor" not in arguments:
        most = checks.MAX_POSITION
        longest = checks.integer("max_position_embeddings", _need(config, LENGTH_KEYS, what), 1, most)
        original = checks.integer("original_max_position_embeddings", arguments["original_length"], 1, most)
        # YaRN refuses a factor below 1; LongRoPE's only makes its attention factor, which is 1 there.
        arguments["factor"] = longest / original if kind == "yarn" else max(longest / original, 1.0)
    if kind == "proportional":
        arguments["fraction"] = parameters["partial_rotary_factor"]
    return kind, arguments


def _own_head_dim(config: Json, layer_type: str | None) -> Any:
    """The head size of layers of one type by per_layer_config, a dict of what differs from layer to layer."""
    layers = config.get("per_layer_config")
    if not layers or not isinstance(layers, Mapping):
        return None
    by_index = {str(i).zfill(9): layer for i, layer in layers.items() if isinstance(layer, Mapping)}  # 5, "5" or "05"
    own = {i: layer["head_dim"] for i, layer in by_index.items() if "head_dim" in layer}
    types = _words(config.get("layer_types")) if layer_type else [None] * len(own)
    sizes = {own.get(str(i).zfill(9)) for i, kind in enumerate(types) if kind == layer_type}
    if len(sizes) > 1 or (own and not layer_type):
        raise ValueError(f"layers of type {layer_type!r} have heads of different sizes by per_layer_config")
    return sizes.pop() if sizes else None


def _widths(config: Json, convention: Convention, parameters: Json, layer_type: str | None) -> tuple[int, int, str]:
    """Head size, rotary width, and where in the head the rotated features lie."""
    if convention.latent or config.get("qk_rope_head_dim") is not None:
        width = checks.integer("qk_rope_head_dim", _need(config, ("qk_rope_head_dim",), "its model_type"), 1)
        still = checks.integer("qk_nope_head_dim", _need(config, ("qk_nope_head_dim",), "qk_rope_head_dim"), 0)
        return still + width, width, "suffix"
    layer = convention.layers.get(layer_type) if layer_type else None
    key, default = (layer.head_key, layer.head_dim) if layer else ("head_dim", None)
    head_dim = _own_head_dim(config, layer_type) or _first(config, (key,), default or convention.head_dim)
    if head_dim is None:
        hidden = checks.integer("hidden_size", _need(config, HIDDEN_KEYS, "the head size"), 1)
        heads = checks.integer("num_attention_heads", _need(config, HEADS_KEYS, "the head size"), 1)
        if hidden % heads:
            raise ValueError(f"hidden_size, {hidden}, must be a multiple of num_attention_heads, {heads}")
        head_dim = hidden // heads
    head_dim = checks.size("head_dim", head_dim)
    fraction = checks.real("partial_rotary_factor", parameters["partial_rotary_factor"], 0, 1, open=True)
    # A width is computed in float64 and cut off, as transformers does.
    width = head_dim if parameters["rope_type"] == "proportional" else int(head_dim * fraction)
    if convention.axes == "thirds":  # of as many pairs, what is left over is not rotated
        width = 6 * (head_dim // 6)
    explicit = _first(config, ("rotary_dim",), None if "rotary_dim" in config else convention.rotary_dim)
    if explicit is not None and width not in (head_dim, explicit):
        raise ValueError(f"the config says rotary_dim {explicit} and a partial_rotary_factor that makes {width}")
    if explicit is None and fraction < 1 and width % 2:
        rule = (
            f"makes {width} of the head_dim, {head_dim}, features: they must be even in number, as they turn in pairs"
        )
        raise ValueError(f"partial_rotary_factor {fraction:g} {rule}")
    return head_dim, width if explicit is None else checks.integer("rotary_dim", explicit, 1), convention.placement
