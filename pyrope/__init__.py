"""Rotary position embeddings: an auditable, exact reference in NumPy and CuPy, and an oracle for others.

Every name is loaded when it is first asked for, so that `import pyrope` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # fmt: off
    # isort: off
    from . import definition as definition, encodings as encodings, parallel as parallel
    from .backend import from_numpy as from_numpy, get as get, namespace as namespace, to_numpy as to_numpy
    from .checkpoints import find_smollm2 as find_smollm2, load as load
    from .linear import (
        LinearState as LinearState, linear_attention as linear_attention, linear_state as linear_state,
        linear_step as linear_step,
    )
    from .model import (
        Cache as Cache, Config as Config, Layer as Layer, Model as Model, Sampling as Sampling, forward as forward,
        generate as generate, random_model as random_model, weight_shapes as weight_shapes,
    )
    from .oracle.attention import (
        assert_attention as assert_attention, assert_linear_attention as assert_linear_attention,
        check_attention as check_attention, check_linear_attention as check_linear_attention,
    )
    from .oracle.operator import identify as identify
    from .oracle.rotation import assert_rotation as assert_rotation, check_rotation as check_rotation
    from .oracle.report import Mismatch as Mismatch, NotJudged as NotJudged, Report as Report
    from .oracle.sharding import assert_sharding as assert_sharding, check_sharding as check_sharding
    from .phase import cos_sin as cos_sin
    from .rotation import (
        Tables as Tables, permute_weights as permute_weights, rotate as rotate, rotation_tables as rotation_tables,
        unrotate as unrotate,
    )
    from .softmax import attention as attention
    from .theta import (
        Axes as Axes, DynamicNTK as DynamicNTK, Linear as Linear, Llama3 as Llama3, LongRoPE as LongRoPE,
        Proportional as Proportional, Rope as Rope, YaRN as YaRN, frequencies as frequencies,
        wavelengths as wavelengths,
    )
    from .tokenizer import Tokenizer as Tokenizer, chat_prompt as chat_prompt, load_tokenizer as load_tokenizer
    # fmt: on

_PLACES = {
    "backend": "from_numpy get namespace to_numpy",
    "checkpoints": "find_smollm2 load",
    "linear": "LinearState linear_attention linear_state linear_step",
    "model": "Cache Config Layer Model Sampling forward generate random_model weight_shapes",
    "oracle.attention": "assert_attention assert_linear_attention check_attention check_linear_attention",
    "oracle.operator": "identify",
    "oracle.rotation": "assert_rotation check_rotation",
    "oracle.report": "Mismatch NotJudged Report",
    "oracle.sharding": "assert_sharding check_sharding",
    "phase": "cos_sin",
    "rotation": "Tables permute_weights rotate rotation_tables unrotate",
    "softmax": "attention",
    "theta": "Axes DynamicNTK Linear Llama3 LongRoPE Proportional Rope YaRN frequencies wavelengths",
    "tokenizer": "Tokenizer chat_prompt load_tokenizer",
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names.split()}
_MODULES = ("definition", "encodings", "parallel")  # public as a whole
__all__ = sorted([*_MODULE_OF, *_MODULES])
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pyrope' has no attribute {name!r}")
    globals()[name] = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    return globals()[name]  # the next time without this function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
