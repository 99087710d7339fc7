"""Rotary position embeddings: an auditable, exact reference in NumPy and CuPy."""

from . import encodings
from .architecture import Config, Layer, Model, Weights, random_model, weight_shapes
from .backend import from_numpy, get, namespace, to_numpy
from .checkpoints import load
from .containers import find_smollm2
from .generation import generate
from .linear import LinearState, attention_weights, linear_attention, linear_state, linear_step
from .phase import cos_sin
from .rotation import (
    Tables,
    decay,
    permute_weights,
    rotate,
    rotate_complex,
    rotation_matrix,
    rotation_tables,
    unrotate,
)
from .softmax import attention, attention_by_definition, attention_scores
from .text import Tokenizer, chat_prompt, load_tokenizer
from .theta import (
    Axes,
    DynamicNTK,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    Rope,
    YaRN,
    frequencies,
    wavelengths,
)
from .transformer import Cache, forward

__all__ = [
    "Axes",
    "Cache",
    "Config",
    "DynamicNTK",
    "Layer",
    "Linear",
    "LinearState",
    "Llama3",
    "LongRoPE",
    "Model",
    "Proportional",
    "Rope",
    "Tables",
    "Tokenizer",
    "Weights",
    "YaRN",
    "attention",
    "attention_by_definition",
    "attention_scores",
    "attention_weights",
    "chat_prompt",
    "cos_sin",
    "decay",
    "encodings",
    "find_smollm2",
    "forward",
    "frequencies",
    "from_numpy",
    "generate",
    "get",
    "linear_attention",
    "linear_state",
    "linear_step",
    "load",
    "load_tokenizer",
    "namespace",
    "permute_weights",
    "random_model",
    "rotate",
    "rotate_complex",
    "rotation_matrix",
    "rotation_tables",
    "to_numpy",
    "unrotate",
    "wavelengths",
    "weight_shapes",
]
__version__ = "0.1.0"
