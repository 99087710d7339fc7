"""The backend switch: NumPy on the CPU, CuPy on the GPU.

A function on arrays starts with ``xp = namespace(x, …)`` and computes with ``xp``. `to_numpy` and
`from_numpy` are the only two places where data crosses between host and device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray: CuPy has no types to name where it is not installed

_INSTALL = 'pip install ".[cuda13]" in a clone of pyrope (or ".[cuda12]", to match the CUDA version of the driver)'


def _library(array: object) -> str:
    """The library that an array belongs to, by its type alone, so that nothing is imported."""
    kind = type(array)
    if kind in (np.ndarray, np.memmap):  # masked arrays and matrices have rules of their own
        return "numpy"
    root = kind.__module__.partition(".")[0]
    if root == "cupy" and kind.__name__ == "ndarray":
        return "cupy"
    return f"{root}.{kind.__qualname__}" if root != "builtins" else kind.__qualname__


def namespace(*arrays: Array, **named: Array) -> ModuleType:
    """The module, ``numpy`` or ``cupy``, that all these arrays belong to; ``None`` is ignored, unless it has a name.

    >>> namespace(np.zeros(3), None).__name__
    'numpy'

    Arrays given by keyword are called by that name in errors and must be there.
    """
    if {*map(type, arrays), *map(type, named.values())} == {np.ndarray}:  # the usual case, quickly
        return np
    unnamed = {f"argument {i}": array for i, array in enumerate(arrays, 1) if array is not None}
    libraries = {name: _library(array) for name, array in (unnamed | named).items()}
    if not libraries:
        raise TypeError("namespace needs at least one array, but none was given")
    for name, library in libraries.items():
        if library not in ("numpy", "cupy"):
            fix = "convert it first, with numpy.asarray or cupy.asarray"
            raise TypeError(f"{name} must be a NumPy or CuPy array, was {library}: {fix}")
    if len(set(libraries.values())) > 1:
        mixture = ", ".join(f"{name} is a {library} array" for name, library in libraries.items())
        raise TypeError(f"arrays of different libraries: {mixture}; move one side with to_numpy or from_numpy")
    return np if library == "numpy" else importlib.import_module("cupy")


def get(name: str) -> ModuleType:
    """The array module of this name; for "cupy" only if a device answers.

    >>> get("numpy") is np
    True
    """
    if name == "numpy":
        return np
    if name != "cupy":
        raise ValueError(f'backend must be "numpy" or "cupy", was {name!r}')
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise ImportError(f'backend "cupy" needs CuPy, which cannot be imported ({error}): {_INSTALL}') from error
    try:
        # CuPy imports without a driver, and a driver can be installed without a working compiler:
        # only a kernel that ran and returned the right number shows that the device can be used.
        if cupy.cuda.runtime.getDeviceCount() < 1:
            raise RuntimeError("no device")
        total = int(cupy.arange(4).sum())
    except Exception as error:
        fix = 'check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES, or use backend "numpy"'
        problem = f"CuPy {cupy.__version__} is installed, but no CUDA device answers ({error})"
        raise RuntimeError(f"{problem}: {fix}") from error
    if total != 6:
        raise RuntimeError(f"the CUDA device computes 0+1+2+3 = {total}: check driver and CuPy versions")
    return cupy


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """The same values as a NumPy array: itself, or copied from the device."""
    host: np.ndarray[Any, Any] = array if namespace(array=array) is np else array.get()
    return host


def on_host(value: Any) -> Any:
    """An array on the device as a NumPy array; anything else as it is."""
    return value.get() if type(value).__module__.startswith("cupy") and _library(value) == "cupy" else value


def fused(formula: Callable[..., Any]) -> Callable[..., Any]:
    """A function of xp and arrays: as it is on the host, and one launch on a GPU, by cupy.fuse.

    It is made of operators and functions of xp, and reads an array before it writes into it. It may end with one
    reduction over the last axis, if its arguments are arrays alone: others would make blocks wait for each other.
    """

    @wraps(formula)
    def call(xp: ModuleType, *arrays: Any) -> Any:
        return formula(xp, *arrays) if xp is np else _kernel(xp, formula)(*arrays)

    return call


@cache
def _kernel(xp: ModuleType, formula: Callable[..., Any]) -> Callable[..., Any]:
    fuse = xp.fuse(kernel_name=f"pyrope_{formula.__name__.strip('_')}")
    return fuse(partial(formula, xp))  # type: ignore[no-any-return]


def compute_dtype(name: str, x: Array) -> np.dtype[Any]:
    """The dtype that x is computed in: its own, or float32 for float16 and bfloat16."""
    if x.dtype in (np.float32, np.float64):
        return x.dtype  # type: ignore[no-any-return]
    if x.dtype != np.float16 and x.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, in native byte order, was {x.dtype!r}")
    return np.dtype(np.float32)


def from_numpy(array: np.ndarray[Any, Any], backend: str | ModuleType) -> Array:
    """The same values on a backend, given by its name or as the module that `namespace` returned."""
    if namespace(array=array) is not np:
        raise TypeError("array must be a NumPy array, was a CuPy array: to_numpy copies it to the host")
    xp = get(backend) if isinstance(backend, str) else backend
    if not hasattr(xp, "asarray"):
        raise TypeError(f"backend must be a name or an array module, was {backend!r}")
    return array if xp is np else xp.asarray(array)
