"""What a Hugging Face ``model_type`` implies about RoPE and its config.json does not say, as data.

Read from the model code of transformers 5.22.2 and checked against it. A type that is not listed
here is not refused: `Rope.from_config` then asks for what the config leaves open.
"""

from __future__ import annotations

from typing import NamedTuple


class LayerRope(NamedTuple):
    """One kind of layer of a model whose layers have different ropes, in the old flat spelling."""

    base: float  # if the config does not say
    base_key: str  # where the flat config says it
    scaled: bool  # whether rope_scaling applies to these layers


class Convention(NamedTuple):
    layout: str
    base: float = 10000.0  # if the config does not say
    fraction: float = 1.0  # of the head that is rotated, if the config does not say
    head_dim: int | None = None  # if the config does not say; None: hidden size / heads
    rotary_dim: int | None = None  # if the config does not say; None: by the fraction
    direction: int = 1
    axes: str | None = None  # how mrope_section is meant
    layers: dict[str, LayerRope] = {}  # by layer type


# Older and newer spellings of one and the same number, at the top level of a config.json.
HIDDEN_KEYS = ("hidden_size", "n_embd")
HEADS_KEYS = ("num_attention_heads", "n_head")
LENGTH_KEYS = ("max_position_embeddings", "n_positions")
BASE_KEYS = ("rope_theta", "rotary_emb_base")
FRACTION_KEYS = ("partial_rotary_factor", "rotary_pct")
ROPE_TYPE_ALIASES = {"mrope": "default", "su": "longrope"}

_HALF = Convention("half")
_HALF_1M = Convention("half", base=1000000.0)
_HALF_500K = Convention("half", base=500000.0)
_GEMMA = Convention("half", head_dim=256)
_INTERLEAVED = Convention("interleaved")
_DEEPSEEK = Convention("interleaved-to-half")  # unless the config says "rope_interleave": false
_GEMMA3 = {
    "full_attention": LayerRope(1000000.0, "rope_theta", True),
    "sliding_attention": LayerRope(10000.0, "rope_local_base_freq", False),
}
_MODERNBERT = {
    "full_attention": LayerRope(160000.0, "global_rope_theta", True),
    "sliding_attention": LayerRope(10000.0, "local_rope_theta", True),
}
_OLMO3 = {
    "full_attention": LayerRope(500000.0, "rope_theta", True),
    "sliding_attention": LayerRope(500000.0, "rope_theta", False),
}

MODEL_TYPES: dict[str, Convention] = {
    # Pairs (i, i + r/2).
    "apertus": Convention("half", base=12000000.0),
    "arcee": _HALF,
    "bitnet": _HALF_500K,
    "csm": _HALF_500K,
    "diffllama": _HALF,
    "doge": _HALF,
    "dots1": _HALF,
    "exaone4": _HALF,
    "falcon": _HALF,
    "flex_olmo": _HALF_500K,
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": Convention("half", head_dim=256, layers=_GEMMA3),
    "gemma3n_text": Convention("half", head_dim=256, layers=_GEMMA3),
    "glm4_moe": Convention("half", fraction=0.5),
    "gpt_neox": Convention("half", fraction=0.25),
    "gpt_neox_japanese": _HALF,
    "gpt_oss": Convention("half", base=150000.0, head_dim=64),
    "granite": _HALF,
    "granitemoe": _HALF,
    "hunyuan_v1_dense": _HALF,
    "lfm2": _HALF_1M,
    "llama": _HALF,
    "minimax": _HALF_1M,
    "minimax_m2": Convention("half", base=5000000.0, head_dim=128),
    "ministral": _HALF,
    "mistral": _HALF,
    "mixtral": _HALF_1M,
    "mllama_text_model": _HALF_500K,
    "modernbert": Convention("half", layers=_MODERNBERT),
    "nanochat": Convention("half", direction=-1),
    "nemotron": Convention("half", fraction=0.5),
    "olmo": _HALF,
    "olmo2": _HALF,
    "olmo3": Convention("half", layers=_OLMO3),
    "olmoe": _HALF,
    "persimmon": Convention("half", fraction=0.5),
    "phi": Convention("half", fraction=0.5),
    "phi3": _HALF,
    "phimoe": _HALF_1M,
    "qwen2": _HALF,
    "qwen2_moe": _HALF,
    "qwen2_vl": Convention("half", base=1000000.0, axes="sections"),
    "qwen2_vl_text": Convention("half", base=1000000.0, axes="sections"),
    "qwen2_5_vl": Convention("half", base=1000000.0, axes="sections"),
    "qwen2_5_vl_text": Convention("half", base=1000000.0, axes="sections"),
    "qwen3": Convention("half", head_dim=128),
    "qwen3_moe": _HALF,
    "qwen3_next": Convention("half", fraction=0.25, head_dim=256),
    "qwen3_vl_text": Convention("half", base=500000.0, head_dim=128, axes="interleaved"),
    "qwen3_vl_moe_text": Convention("half", base=500000.0, axes="interleaved"),
    "seed_oss": Convention("half", head_dim=128),
    "smollm3": Convention("half", base=2000000.0),
    "stablelm": Convention("half", fraction=0.25),
    "starcoder2": _HALF,
    "vaultgemma": _GEMMA,
    # Pairs (2i, 2i+1).
    "codegen": Convention("interleaved", rotary_dim=64),
    "cohere": Convention("interleaved", base=500000.0),
    "cohere2": _INTERLEAVED,
    "deepseek_v2": _INTERLEAVED,
    "ernie4_5": Convention("interleaved", base=500000.0, head_dim=128),
    "ernie4_5_moe": Convention("interleaved", base=500000.0),
    "glm": Convention("interleaved", fraction=0.5, head_dim=128),
    "glm4": Convention("interleaved", fraction=0.5, head_dim=128),
    "gptj": Convention("interleaved", rotary_dim=64),
    "helium": Convention("interleaved", base=100000.0, head_dim=128),
    "llama4_text": Convention("interleaved", base=500000.0, head_dim=128),
    "roformer": _INTERLEAVED,
    # Reads pairs (2i, 2i+1), writes (i, i + r/2).
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "youtu": _DEEPSEEK,
}
