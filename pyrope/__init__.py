"""Rotary position embeddings: an auditable, exact reference in NumPy and CuPy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .oracle.checking import assert_rotation, check_rotation
    from .oracle.identification import identify
    from .oracle.report import Mismatch, Report

# The oracle is loaded when it is asked for, so that `import pyrope` stays as quick as NumPy's.
_ORACLE = {
    "Mismatch": "report",
    "Report": "report",
    "assert_rotation": "checking",
    "check_rotation": "checking",
    "identify": "identification",
}

__all__ = [
    "Axes",
    "DynamicNTK",
    "Linear",
    "LinearState",
    "Llama3",
    "LongRoPE",
    "Mismatch",
    "Proportional",
    "Report",
    "Rope",
    "Tables",
    "YaRN",
    "assert_rotation",
    "attention",
    "attention_by_definition",
    "attention_weights",
    "check_rotation",
    "cos_sin",
    "decay",
    "encodings",
    "frequencies",
    "from_numpy",
    "get",
    "identify",
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


def __getattr__(name: str) -> Any:
    if name not in _ORACLE:
        raise AttributeError(f"module 'pyrope' has no attribute {name!r}")
    return getattr(importlib.import_module(f".oracle.{_ORACLE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ORACLE})
