"""GGUF files as (config, tensors) in Hugging Face terms: what each architecture is called, stores and leaves unsaid.

Metadata that may change the result and are not understood are refused.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..rotation import permute_weights
from ..theta import Rope, frequencies
from .files import Checkpoint, Tensor, abridged, errors_prefixed_with
from .gguf import MOST_ENTRIES, GgufArray, read_gguf


def open_gguf(path: str | os.PathLike[str]) -> Checkpoint:
    """The config, as config.json would have it, and the tensors by their Hugging Face names."""
    path = pathlib.Path(path)
    metadata, tensors = read_gguf(path)
    with errors_prefixed_with(path):
        return _in_hugging_face_terms(metadata, tensors)


class _Architecture(NamedTuple):
    """What a GGUF architecture is called in Hugging Face terms, and what its files do not say."""

    model_type: str
    constants: dict[str, Any]
    blocks: dict[str, str]  # names of a layer's tensors, without .weight or .bias
    layers: str = "model.layers"
    ends: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    base: str = "rope_theta"
    fraction: str | None = None  # the key for a rotary width that is not the head's


_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_PLAIN = _NORMS | {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_FUSED = _PLAIN | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SILU = {"hidden_act": "silu"}
_ARCHITECTURES = {
    "llama": _Architecture("llama", _SILU, _PLAIN),
    "qwen2": _Architecture("qwen2", _SILU | {"use_sliding_window": False}, _PLAIN),
    "qwen3": _Architecture("qwen3", _SILU | {"use_sliding_window": False, "attention_bias": False}, _PLAIN | _QK_NORM),
    "phi3": _Architecture("phi3", _SILU, _FUSED, fraction="partial_rotary_factor"),
    "gemma3": _Architecture(
        "gemma3_text",
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attn_logit_softcapping": None},
        _PLAIN | _QK_NORM | {
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "gptneox": _Architecture(
        "gpt_neox",
        {"hidden_act": "gelu", "attention_bias": True},
        _NORMS | {
            "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
        },
        layers="gpt_neox.layers",
        ends={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        base="rotary_emb_base",
        fraction="rotary_pct",
    ),
}  # fmt: skip
_HARMLESS = ("general.", "tokenizer.", "quantize.")  # who made the file, and its text: nothing that changes a tensor


def _in_hugging_face_terms(metadata: Mapping[str, Any], stored: dict[str, Tensor]) -> Checkpoint:
    name = checks.choice("general.architecture", metadata.get("general.architecture"), tuple(_ARCHITECTURES))
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ValueError(f"general.type must be 'model', was {kind!r}: adapters and the like are not read")
    if metadata.get("split.count", 1) != 1:
        raise ValueError("this is one of several files of a model: join them with gguf-split --merge")
    left = {key: value for key, value in metadata.items() if not key.startswith((*_HARMLESS, "split."))}
    config, tensors = _config(name, _Settings(name, left), dict(stored))
    if left:
        raise ValueError(f"the metadata may change the result, and are not understood: {abridged(left)}")
    return config, _renamed(_ARCHITECTURES[name], config, tensors)


class _Settings:
    """The metadata of one architecture. Each value that is read is removed, so that what is left was not understood."""

    def __init__(self, architecture: str, left: dict[str, Any]) -> None:
        self.architecture, self.left = architecture, left

    def take(self, key: str, default: Any = None) -> Any:
        value = self.left.pop(f"{self.architecture}.{key}", default)
        if value is None:
            raise ValueError(f"the metadata lacks {self.architecture}.{key}")
        if isinstance(value, GgufArray):
            raise ValueError(f"{self.architecture}.{key} must be one value, was a list: layers may not differ")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        return checks.integer(f"{self.architecture}.{key}", self.take(key, default), least)

    def real(self, key: str, default: float | None = None, open: bool = True) -> float:
        return checks.real(f"{self.architecture}.{key}", self.take(key, default), 0, open=open)

    def must_be(self, key: str, value: Any) -> None:
        """Refuses a setting that has another value than the one that is understood."""
        if (actual := self.take(key, value)) != value:
            raise ValueError(f"{self.architecture}.{key} must be {value!r}, was {actual!r}: that is not understood")


def _config(name: str, given: _Settings, tensors: dict[str, Tensor]) -> Checkpoint:
    """The config, and the tensors without those that are part of the config."""
    architecture = _ARCHITECTURES[name]
    if (embedding := tensors.get("token_embd.weight")) is None or len(embedding.shape) != 2:
        raise ValueError("the file must hold token_embd.weight, with two axes")
    config: dict[str, Any] = {"model_type": architecture.model_type, **architecture.constants}
    config["vocab_size"] = embedding.shape[0]
    given.must_be("vocab_size", embedding.shape[0])
    config["hidden_size"] = given.count("embedding_length")
    config["intermediate_size"] = given.count("feed_forward_length")
    config["max_position_embeddings"] = given.count("context_length")
    config["num_hidden_layers"] = layers = given.count("block_count")
    if layers > len(tensors):
        raise ValueError(f"{name}.block_count is {layers}, for {len(tensors)} tensors")
    config["num_attention_heads"] = heads = given.count("attention.head_count")
    config["num_key_value_heads"] = given.count("attention.head_count_kv", heads)
    head_dim, rest = divmod(config["hidden_size"], heads)
    config["head_dim"] = head_dim = given.count("attention.key_length", None if rest else head_dim)
    given.must_be("attention.value_length", head_dim)
    config[architecture.epsilon[1]] = given.real(architecture.epsilon[0])
    config[architecture.base] = given.real("rope.freq_base", 10000.0)  # the format's own default
    config["tie_word_embeddings"] = "output.weight" not in tensors
    given.must_be("attention.causal", True)
    for key in ("expert_count", "expert_used_count", "pooling_type"):
        given.must_be(key, 0)
    given.take("rope.scaling.finetuned", False)  # says where a scaling comes from, not what it is
    _rotary_width(architecture, given, config)
    if name in _OWN:
        _OWN[name](given, config, tensors)
    if (scaling := _rope_scaling(given)) is not None:
        if "rope_scaling" in config:
            raise ValueError("there are two rope scalings, one in the metadata and one in the tensors")
        config["rope_scaling"] = scaling
    return config, tensors


def _rotary_width(architecture: _Architecture, given: _Settings, config: dict[str, Any]) -> None:
    head_dim = config["head_dim"]
    width = given.count("rope.dimension_count", head_dim)
    if architecture.fraction is not None:
        fraction = width / head_dim
        # Readers take the integer part of head_dim·fraction, so it must not be below width.
        config[architecture.fraction] = fraction if int(head_dim * fraction) == width else math.nextafter(fraction, 2)
    elif width != head_dim:
        raise ValueError(f"rope.dimension_count must be the size of a head, {head_dim}, was {width}")


def _rope_scaling(given: _Settings) -> dict[str, Any] | None:
    if (kind := given.take("rope.scaling.type", "none")) == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type must be 'none', 'linear' or 'yarn', was {kind!r}")
    scaling = {"rope_type": kind, "factor": given.real("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = given.count("rope.scaling.original_context_length")
        scaling["beta_fast"] = given.real("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = given.real("rope.scaling.yarn_beta_slow", 1.0)
    return scaling


def _llama(given: _Settings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    given.must_be("tensor_data_layout", "Meta AI original pth")  # q and k for interleaved pairs, as all files have them
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if "rope_freqs.weight" in tensors:
        config["rope_scaling"] = _llama3(_vector(tensors.pop("rope_freqs.weight")), config)


def _llama3(stored: list[float], config: Mapping[str, Any]) -> dict[str, Any]:
    """The rescaling that a file stores as one divisor for each frequency: Llama 3's, with its published numbers."""
    factor, plain = max(stored), {"model_type": "llama"} | {key: config[key] for key in ("head_dim", "rope_theta")}
    if len(stored) * 2 == config["head_dim"] and 1 < factor < math.inf:
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 8192
        before, after = (frequencies(Rope.from_config(plain | {"rope_scaling": one})) for one in (None, scaling))
        if np.allclose(before / after, stored, rtol=1e-5, atol=0):
            return scaling
    raise ValueError(
        "rope_freqs.weight is not the rescaling of Llama 3 (low 1, high 4, length 8192), the only one that is read"
    )


def _vector(tensor: Tensor) -> list[float]:
    if len(tensor.shape) != 1 or tensor.shape[0] > MOST_ENTRIES:
        raise ValueError(f"factors of frequencies must have one axis, had shape {tensor.shape}")
    return [float(value) for value in tensor.read()]


def _phi3(given: _Settings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["sliding_window"] = given.count("attention.sliding_window", least=0) or None  # 0 says: none
    config["original_max_position_embeddings"] = given.count("rope.scaling.original_context_length")
    names = [f"rope_factors_{which}.weight" for which in ("short", "long")]
    factors = [_vector(tensors.pop(name)) for name in names if name in tensors]
    if not factors:
        return
    if len(factors) < 2:
        raise ValueError(f"of {' and '.join(names)} one is missing")
    given.must_be("rope.scaling.type", "longrope")
    config["rope_scaling"] = {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
    config["rope_scaling"]["attention_factor"] = given.real("rope.scaling.attn_factor")


def _gemma3(given: _Settings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["sliding_window"] = given.count("attention.sliding_window")
    period = given.count("attention.sliding_window_pattern", 6)
    layers = range(1, config["num_hidden_layers"] + 1)
    config["layer_types"] = ["sliding_attention" if i % period else "full_attention" for i in layers]
    config["rope_local_base_freq"] = given.real("rope.freq_base_swa", 10000.0)
    config["final_logit_softcapping"] = given.real("final_logit_softcapping", 0.0, open=False) or None
    # Not in the file: all sizes divide scores by √head_dim, but the one of 62 layers (27B) by √(width / heads).
    own = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = own if config["num_hidden_layers"] == 62 else config["head_dim"]


def _gptneox(given: _Settings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["use_parallel_residual"] = checks.flag("use_parallel_residual", given.take("use_parallel_residual"))
    heads, key_heads = config["num_attention_heads"], config.pop("num_key_value_heads")
    if key_heads != heads or config.pop("head_dim") * heads != config["hidden_size"]:
        raise ValueError(
            f"gptneox must have {heads} key heads, as query heads, which together are as wide as the model"
        )


_OWN: dict[str, Callable[[_Settings, dict[str, Any], dict[str, Tensor]], None]]
_OWN = {"llama": _llama, "phi3": _phi3, "gemma3": _gemma3, "gptneox": _gptneox}


def _renamed(architecture: _Architecture, config: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their Hugging Face names, arranged as Hugging Face has them; unknown tensors keep their names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        new = name
        if match := re.fullmatch(r"(?:blk\.(0|[1-9][0-9]*)\.)?([a-z_]+)\.(weight|bias)", name):
            layer, part, kind = match.groups()
            names = architecture.ends if layer is None else architecture.blocks
            if part in names:
                new = ("" if layer is None else f"{architecture.layers}.{layer}.") + f"{names[part]}.{kind}"
                tensor = _rearranged(tensor, architecture.model_type, part, config)
        if new in tensors:
            raise ValueError(f"two tensors are called {new!r}")
        tensors[new] = tensor
    return tensors


def _rearranged(tensor: Tensor, model_type: str, part: str, config: Mapping[str, Any]) -> Tensor:
    """A tensor of the file as Hugging Face has it."""
    if model_type == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return Tensor(tensor.shape, lambda: permute_weights(tensor.read(), heads, "interleaved", "half"))
    if model_type == "gemma3_text" and part.endswith("norm"):  # the file has 1 + w, which the model multiplies with
        return Tensor(tensor.shape, lambda: (w := tensor.read()) - w.dtype.type(1))
    if model_type == "gpt_neox" and part == "attn_qkv":
        # Rows q of all heads, k of all heads, v of all heads -> q, k, v of the first head, then of the next.
        split = (3, config["num_attention_heads"], -1, *tensor.shape[1:])
        return Tensor(tensor.shape, lambda: tensor.read().reshape(split).swapaxes(0, 1).reshape(tensor.shape))
    return tensor
