"""Rotary position embeddings: an auditable, exact reference in NumPy and CuPy."""

from . import encodings
from .backend import from_numpy, get, namespace, to_numpy
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
from .softmax import attention, attention_by_definition
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

__all__ = [
    "Axes",
    "DynamicNTK",
    "Linear",
    "LinearState",
    "Llama3",
    "LongRoPE",
    "Proportional",
    "Rope",
    "Tables",
    "YaRN",
    "attention",
    "attention_by_definition",
    "attention_weights",
    "cos_sin",
    "decay",
    "encodings",
    "frequencies",
    "from_numpy",
    "get",
    "linear_attention",
    "linear_state",
    "linear_step",
    "namespace",
    "permute_weights",
    "rotate",
    "rotate_complex",
    "rotation_matrix",
    "rotation_tables",
    "to_numpy",
    "unrotate",
    "wavelengths",
]
__version__ = "0.1.0"
