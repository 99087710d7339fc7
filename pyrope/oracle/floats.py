"""The float formats that the oracle knows: their precision, their names, and rounding to the narrow ones."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from ..tensors import dtype_named

Float64: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Int64: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}  # of the significand, the first one included
UNIT = {name: 2.0**-bits for name, bits in BITS.items()}  # unit roundoff: half the step from 1 to the next number
U32, U64 = UNIT["float32"], UNIT["float64"]
NARROW = ("float16", "bfloat16")


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype, or the dtype of this name, if it is one of these formats."""
    try:
        known: np.dtype[Any] = dtype_named(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"dtype must be one of {', '.join(UNIT)}, was {dtype!r}") from error
    if known.name not in UNIT or not known.isnative:
        raise TypeError(f"dtype must be one of {', '.join(UNIT)}, was {known}")
    return known


def plain(x: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of a NumPy array, without the arithmetic that a subclass may have of its own; None of anything else,
    masked arrays among it."""
    return x.view(np.ndarray) if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray) else None


def to_bfloat16(x: Any) -> Any:
    """Values rounded to the 8 bits of bfloat16, kept as float32: NumPy alone has no such dtype."""
    bits = np.asarray(x, np.float32).copy().view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    bits &= np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def to_float16(x: Any) -> Any:
    """Values rounded to float16, kept as float32."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(np.float16).astype(np.float32)
