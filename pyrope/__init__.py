"""Rotary position embeddings: an auditable, exact reference in NumPy and CuPy, and an oracle for others.

Every name is loaded when it is first asked for, so that `import pyrope` costs next to nothing. Type checkers run the
imports below; at run time they are not run, and their compiled form says where each name is.
"""

import dis
import importlib
import sys
import typing

if typing.TYPE_CHECKING:
    # fmt: off
    # isort: off
    from . import definition as definition, encodings as encodings, parallel as parallel
    from .backend import from_numpy as from_numpy, to_numpy as to_numpy
    from .checkpoints import load as load
    from .linear import linear_attention as linear_attention, linear_step as linear_step
    from .model import (
        Cache as Cache, Config as Config, Layer as Layer, Model as Model, forward as forward, generate as generate,
        random_model as random_model,
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
    from .rotation import permute_weights as permute_weights, rotate as rotate, rotation_tables as rotation_tables
    from .softmax import attention as attention
    from .theta import (
        Axes as Axes, DynamicNTK as DynamicNTK, Linear as Linear, Llama3 as Llama3, LongRoPE as LongRoPE,
        Proportional as Proportional, Rope as Rope, YaRN as YaRN, frequencies as frequencies,
        wavelengths as wavelengths,
    )
    from .tokenizer import load_tokenizer as load_tokenizer
    # fmt: on

_MODULE_OF, _module = dict[str, str](), ""
for _step in dis.get_instructions(sys._getframe().f_code):  # of this module, which may be installed without its source
    if _step.opname == "IMPORT_NAME":
        _module = _step.argval
    elif _step.opname == "IMPORT_FROM":
        _MODULE_OF[_step.argval] = _module
__all__ = sorted(_MODULE_OF)
__version__ = "0.1.0"


if not typing.TYPE_CHECKING:  # to type checkers, a name that is not imported above is an error

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'pyrope' has no attribute {name!r}")
        if not (place := _MODULE_OF[name]):  # a module that is public as a whole
            return importlib.import_module(f".{name}", __name__)
        globals()[name] = getattr(importlib.import_module(f".{place}", __name__), name)
        return globals()[name]  # the next time without this function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
