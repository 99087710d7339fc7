"""Hugging Face configs as ropes: what a ``model_type`` implies about RoPE without its config.json saying so, as data,
and how the old and the new spelling of the rest are read.

The data were read from the model code of transformers 5.22.2 and are checked against it. A type that is not listed is
not refused: `read_rope` then asks for what the config does not say. A key that may say something about the rope and is
not read is refused.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from . import checks
from .files import read_json
from .theta import SCALINGS, Axes, Rope

Json: TypeAlias = Mapping[str, Any]
Source: TypeAlias = Json | str | os.PathLike[str]  # a config, or the path of one, or of its folder


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
    "dia_decoder dia_encoder hrm_text qwen3 qwen3_omni_moe_talker_code_predictor seed_oss":
        Convention("half", head_dim=128),
    "molmo2_text": Convention("half", head_dim=128, beside=("rope_scaling_layers",)),
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
_BY_NAME = [(name, convention) for names, convention in _TYPES.items() for name in names.split()]
MODEL_TYPES: dict[str, Convention] = dict(sorted(_BY_NAME, key=lambda one: (one[1].layout, one[0])))
_UNKNOWN = Convention(None, base=None)

SYNONYMS = {  # older names of keys -> the usual ones, which win
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor",
}  # fmt: skip
_LENGTH = "original_max_position_embeddings"
# The arguments of rescalings: Hugging Face's name -> ours.
_ARGUMENTS = {
    "factor": "factor", _LENGTH: "original_length", "short_factor": "short", "long_factor": "long",
    "low_freq_factor": "low", "high_freq_factor": "high", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "attention_factor": "attention_factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}  # fmt: skip
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_ALIASES = {"mrope": "default", "su": "longrope"}
# Keys by which a config may say something about its rope; those of them that are read, or that change nothing; and
# those that are only known to mean something in the types that are listed.
_SUSPECT = re.compile("rope|rotary|alibi|use_dynamic_ntk|kv_channels|global_head_dim|attention_head_dim")
_KNOWN = {
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_dim", "qk_rope_head_dim",
    "layer_rope_theta", "no_rope_layers", "no_rope_layer_interval", "rotary",
}  # fmt: skip
_KNOWN_OF_LISTED = {"rope_interleave", "kv_channels", "global_head_dim", "attention_head_dim"}
_OFF = re.compile("alibi|mrope|dynamic_ntk|rope_interleaved|rotary_value")  # keys that change nothing if they are false
_BASE_OF_LAYERS = re.compile("rope_theta|rope_local_base_freq")  # no news where every layer type has its rope dict


def read_rope(source: Source, layout: str | None, layer_type: str | None) -> Rope:
    """The rope that a config means."""
    config, convention = _read(source)
    if layout is None:
        layout = "half" if convention.layout and config.get("rope_interleave") is False else convention.layout
    if layout is None:
        unlisted = f"and model_type {config.get('model_type')!r} is not listed here"
        raise ValueError(f"a config does not say which features make a pair, {unlisted}: pass layout=")
    _refuse_what_is_not_read(config, convention, layout)
    parameters = _rope_parameters(config, convention, layer_type)
    base = checks.real("base", parameters["rope_theta"], 1, open=True)
    head_dim, width, placement = _widths(config, convention, parameters, layer_type)
    kind, arguments = _scaling(config, parameters, convention)
    if (alpha := arguments.pop("alpha", None)) is not None:  # HunYuan: only another base
        kind, base = "default", base * checks.real("alpha", alpha, 0, 1e12, open=True) ** (width / (width - 2))
    scaling = None if kind == "default" else SCALINGS[kind](**arguments)
    axes = _axes(config, convention, parameters, width // 2)
    return Rope(head_dim, base, layout, width, placement, scaling, axes, convention.direction)


def _read(source: Source) -> tuple[dict[str, Any], Convention]:
    """The config of the text part, with the usual names of its keys; and its convention."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        source = read_json(path / "config.json" if path.is_dir() else path)
    if not isinstance(source, Mapping):
        raise TypeError(f"config must be a dict, or the path of a config.json with one, was {type(source).__name__}")
    text = source.get("text_config")
    if isinstance(text, Mapping) and all(source.get(key) is None for key in ("hidden_size", "n_embd")):
        source = text
    name = source.get("model_type")
    if isinstance(name, str) and name in NOT_READ:
        raise ValueError(f"model_type {name!r} is not read: {NOT_READ[name]}")
    convention = MODEL_TYPES.get(name, _UNKNOWN) if isinstance(name, str) else _UNKNOWN
    others = {**SYNONYMS, **convention.names}
    nulls = ("rotary_dim", "sliding_window")  # of which null means something
    config = {key: x for key, x in source.items() if key not in others and (x is not None or key in nulls)}
    for own, usual in others.items():
        outer, _, inner = own.partition(".")
        value = (source.get(outer) or {}).get(inner) if inner else source.get(outer)
        if value is not None and (own in convention.names or usual not in config):
            config[usual] = value
    return config, convention


def _refuse_what_is_not_read(config: Json, convention: Convention, layout: str) -> None:
    """Refuses configs without RoPE, and keys that may change the rope and are not read here."""
    if (kind := config.get("position_embedding_type")) not in (None, "rope", "rotary"):
        raise ValueError(f"this config does not use RoPE (position_embedding_type: {kind!r})")
    if convention.switch is not None and config.get(convention.switch[0]) != convention.switch[1]:
        (key, wanted), name = convention.switch, config["model_type"]
        raise ValueError(f"model_type {name!r} has RoPE only where the config says {key}: {wanted!r}")
    known = _KNOWN | {layer.base_key for layer in convention.layers.values()} | {*convention.beside}
    known |= {convention.switch[0]} if convention.switch else set()
    known |= {"rope_interleaved"} if layout != "half" else set()
    known |= _KNOWN_OF_LISTED if convention is not _UNKNOWN else set()
    for key, value in config.items():
        said_by_layer = _nested(_rope_dict(config)) and _BASE_OF_LAYERS.search(str(key))
        off = value is False and _OFF.search(str(key))
        if not off and _SUSPECT.search(str(key)) and key not in known and not said_by_layer:
            fix = "write the Rope out, or remove the key if it changes nothing"
            raise ValueError(f"the config says {key}, which is not read here: {fix}")
    bases = config.get("layer_rope_theta")
    if isinstance(bases, list | tuple) and len(set(map(str, bases)) - {"0", "0.0"}) > 1:
        raise ValueError(f"layer_rope_theta has several bases: write out the Rope of each layer, was {bases}")
    if convention.explicit and not _rope_dict(config):
        name = config["model_type"]
        raise ValueError(f"model_type {name!r} scales its frequencies: the config must say rope_parameters")


def _rope_dict(config: Json) -> Json:
    raw = config.get("rope_parameters", config.get("rope_scaling", {}))
    if not isinstance(raw, Mapping):
        raise TypeError(f"rope_parameters (or rope_scaling) must be a dict, was {raw!r}")
    return raw


def _nested(raw: Json) -> bool:
    """Whether there is a rope dict for each layer type."""
    return any(isinstance(value, Mapping) for value in raw.values())


def _need(config: Json, key: str, what: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"the config lacks {key!r}, which {what} needs")
    return config[key]


def _rope_dict_of(config: Json, convention: Convention, layer_type: str | None) -> Json:
    """The rope dict for layers of one type; refuses types that are not rotated, or that there are not."""
    raw, name, layers = _rope_dict(config), config.get("model_type"), dict[str, Any](convention.layers)
    if config.get("rope_scaling", raw) != raw:
        raise ValueError("the config has both rope_parameters and rope_scaling, and they differ: keep one")
    if convention.by_layer and not _nested(raw):
        rule = "the config must say rope_parameters for each layer type"
        raise ValueError(f"layers of model_type {name!r} differ: {rule}")
    if _nested(raw):
        layers = {key: rope for key, rope in raw.items() if rope is None or isinstance(rope, Mapping)}
    types = dict.fromkeys([*layers] or config.get("layer_types", []))
    if (layers or layer_type is not None) and types and layer_type not in types:
        rule = f"layer_type must be one of {', '.join(map(repr, types))}"
        raise ValueError(f"{rule}, which may have different ropes, was {layer_type!r}")
    still = layer_type == convention.still and config.get("sliding_window", 0) is not None
    if layer_type is not None and (still or layers.get(layer_type, 0) is None):
        raise ValueError(f"layers of type {layer_type!r} are not rotated in model_type {name!r}")
    own = convention.layers.get(layer_type or "")
    return raw[str(layer_type)] if _nested(raw) else raw if own is None or own.scaled else {}


def _rope_parameters(config: Json, convention: Convention, layer_type: str | None) -> dict[str, Any]:
    """The rope dict of a config in its new flat form: with rope_type, rope_theta and fraction, without nulls."""
    raw, nested = _rope_dict_of(config, convention, layer_type), _nested(_rope_dict(config))
    own = convention.layers.get(layer_type or "")
    base_key, base = ("rope_theta", convention.base) if own is None else (own.base_key, own.base)
    fraction = config.get("partial_rotary_factor", convention.fraction)
    parameters = {"rope_theta": config.get(base_key, base), "partial_rotary_factor": fraction}
    said = {key: value for key, value in raw.items() if value is not None}
    for key, inner in {base_key: "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}.items():
        if not nested and inner in said and config.get(key, said[inner]) != said[inner]:
            raise ValueError(f"{key} is {config[key]}, but {inner} {said[inner]} in rope_parameters: keep one of them")
    parameters |= said
    if parameters["rope_theta"] is None:
        raise ValueError("the config does not say rope_theta, and its model_type implies none: add it to the config")
    grid = {"axial": "default"} if convention.axes in _GRIDS else {}
    types = {key: str(parameters[key]) for key in ("rope_type", "type") if key in parameters}
    kinds = {(_ALIASES | grid).get(kind, kind) for kind in types.values()} or {"default"}
    if len(kinds) > 1:
        raise ValueError(f"the config says rope_type {types['rope_type']!r} and type {types['type']!r}")
    parameters["rope_type"] = kind = kinds.pop()
    if not nested and own is not None and own.attention_factor is not None and kind == "yarn":
        parameters.setdefault("attention_factor", own.attention_factor)
    if not nested and _LENGTH in _arguments_of(kind) and _LENGTH in config:
        parameters[_LENGTH] = config[_LENGTH]  # Phi-3 has it at the top level, and that one wins
    return parameters


def _arguments_of(kind: str) -> dict[str, str]:
    """What a rope type may say, Hugging Face's name -> ours: the fields of its class."""
    fields = {field.name for field in dataclasses.fields(SCALINGS[kind])} if kind in SCALINGS else set()
    others = {_LENGTH} if kind == "dynamic" else set()  # there it is the present length
    return {theirs: ours for theirs, ours in _ARGUMENTS.items() if ours in fields and theirs not in others}


def _scaling(config: Json, parameters: Json, convention: Convention) -> tuple[str, dict[str, Any]]:
    """The rope type and its arguments by our names."""
    kind = checks.choice("rope_type", parameters["rope_type"], ("default", *SCALINGS))
    names, what, ignored = _arguments_of(kind), f"rope_type {kind!r}", {*convention.beside}
    if convention.alpha and kind == "dynamic":
        ignored |= {"alpha", *_YARN_KEYS}
    if unknown := sorted(map(str, parameters.keys() - names.keys() - _COMMON - ignored)):
        unread = "which may change the rope and are not ignored"
        raise ValueError(f"{what} has unexpected keys, {unread}: {', '.join(unknown)}")
    if "alpha" in ignored and "alpha" in parameters:
        return kind, {"alpha": parameters["alpha"]}
    arguments = {ours: parameters[key] for key, ours in names.items() if key in parameters}
    if kind == "yarn":  # transformers takes 0 for "not given" here
        arguments = {key: x for key, x in arguments.items() if x or key not in ("beta_fast", "beta_slow")}
    original, longest = arguments.get("original_length", convention.original_length), "max_position_embeddings"
    if kind in ("yarn", "longrope") and "factor" not in arguments and original is not None:
        most = checks.integer(longest, _need(config, longest, what), 1, checks.MAX_POSITION)
        factor = most / checks.integer("original_length", original, 1, checks.MAX_POSITION)
        # YaRN refuses a factor below 1; LongRoPE's only makes its attention factor, which is 1 there.
        arguments["factor"] = factor if kind == "yarn" else max(factor, 1.0)
    if kind == "dynamic" or _LENGTH in names:
        arguments["original_length"] = _need(config, longest, what) if original is None else original
    if kind == "proportional":
        arguments["fraction"] = parameters["partial_rotary_factor"]
    fields = dataclasses.fields(SCALINGS[kind]) if kind in SCALINGS else ()
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if lacking := [key for key, ours in names.items() if ours in needed - arguments.keys()]:
        raise ValueError(f"{what} needs the key {', '.join(lacking)}: add it to rope_parameters (or rope_scaling)")
    return kind, arguments


def _widths(config: Json, convention: Convention, parameters: Json, layer_type: str | None) -> tuple[int, int, str]:
    """Head size, rotary width, and where in the head the rotated features lie."""
    if convention.latent or "qk_rope_head_dim" in config:
        width = checks.size("qk_rope_head_dim", _need(config, "qk_rope_head_dim", "its model_type"), 1)
        still = checks.size("qk_nope_head_dim", _need(config, "qk_nope_head_dim", "qk_rope_head_dim"), 0)
        return still + width, width, "suffix"
    own = convention.layers.get(layer_type or "")
    key, default = ("head_dim", convention.head_dim) if own is None else (own.head_key, own.head_dim)
    head_dim = _head_dim_by_layer(config, layer_type) or config.get(key, default or convention.head_dim)
    if head_dim is None:
        hidden = checks.integer("hidden_size", _need(config, "hidden_size", "the head size"), 1)
        heads = checks.integer("num_attention_heads", _need(config, "num_attention_heads", "the head size"), 1)
        head_dim = hidden // heads
    head_dim = checks.size("head_dim", head_dim)
    fraction = checks.real("partial_rotary_factor", parameters["partial_rotary_factor"], 0, 1, open=True)
    width = int(head_dim * fraction)  # in float64 and cut off, as transformers does
    if parameters["rope_type"] == "proportional":
        width = head_dim
    if convention.axes == "thirds":  # of as many pairs, what is left over is not rotated
        width = 6 * (head_dim // 6)
    explicit = config.get("rotary_dim", convention.rotary_dim)
    if explicit is not None and width not in (head_dim, explicit):
        raise ValueError(f"the config says rotary_dim {explicit} and a partial_rotary_factor that makes {width}")
    return head_dim, width if explicit is None else checks.integer("rotary_dim", explicit, 1), convention.placement


def _head_dim_by_layer(config: Json, layer_type: str | None) -> Any:
    """The head size of layers of one type by per_layer_config, a dict of what differs from layer to layer."""
    layers = config.get("per_layer_config", {})
    own = {int(i): layer["head_dim"] for i, layer in layers.items() if "head_dim" in layer}
    types = _need(config, "layer_types", "per_layer_config") if own else []
    sizes = {own.get(i) for i, kind in enumerate(types) if layer_type in (None, kind)}
    if len(sizes) > 1:
        raise ValueError(f"layers of type {layer_type!r} have heads of different sizes by per_layer_config")
    return sizes.pop() if sizes else None


def _axes(config: Json, convention: Convention, parameters: Json, p: int) -> Axes | None:
    """The axes of p pairs, or None: mrope_section means different things to different types."""
    name, style, sections = config.get("model_type"), convention.axes, parameters.get("mrope_section")
    if style is None and sections is not None:
        fix = 'write the Rope out, for instance with axes=Axes("sections", …) or Axes("interleaved", …)'
        raise ValueError(f"mrope_section of model_type {name!r} does not say which pairs turn with which axis: {fix}")
    if style is None:
        return None
    if (interleaved := parameters.get("mrope_interleaved")) is not None and interleaved is not (style == "interleaved"):
        said = f"but the config says mrope_interleaved {interleaved!r}"
        raise ValueError(f"model_type {name!r} has axes of style {style!r}, {said}")
    grids: dict[str, tuple[Any, ...]] = {  # without sections
        "axial": ("axial",),
        "pixtral": ("pixtral",),
        "alternating": ("interleaved", (p - p // 2, p // 2)),  # rows and columns by turns
        "columns first": ("listed", (1, 0) * (p // 2), "own"),
        "thirds": ("sections", (p // 3,) * 3, "own"),
    }
    if style in grids:
        return Axes(*grids[style])
    sections = sections if sections is not None else convention.sections or None
    if sections is None:
        raise ValueError(f"model_type {name!r} has several position axes: the config must say mrope_section")
    if style != "ernie":
        return Axes(style, sections)
    # ERNIE 4.5 VL, positions (t, h, w), sections (h, w, t): rows and columns by turns, as many of each, then times.
    rows, _, times = checks.integers("mrope_section", sections, 1)
    return Axes("listed", (1, 2) * rows + (0,) * times)


# ── What else a config says ──────────────────────────────────────────────────────────────────────────────────────────


NUMBERS = {  # of attention, by the names that a check has for them
    "heads": "num_attention_heads", "key_heads": "num_key_value_heads", "window": "sliding_window",
    "softcap": "attn_logit_softcapping", "scale": "query_pre_attn_scalar", "positions": "max_position_embeddings",
}  # fmt: skip


def attention_numbers(source: Source) -> dict[str, Any]:
    """What a config says of attention beside its rope, of `NUMBERS`.

    >>> attention_numbers({"model_type": "mistral", "num_attention_heads": 32, "sliding_window": 4096})
    {'heads': 32, 'window': 4096}
    """
    config = _read(source)[0]
    return {name: config[key] for name, key in NUMBERS.items() if config.get(key) is not None}
