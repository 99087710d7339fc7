"""A stand-in for CuPy on machines without a GPU: arrays over NumPy that refuse what CuPy refuses.

Refused: implicit conversion to NumPy, mixing with NumPy arrays, names and keywords that the installed CuPy
wheel does not have, views of another item size unless contiguous and aligned, in-place operations that fail.
Stricter than CuPy on purpose: NumPy scalars (a float64 one would widen float32), and uninitialised memory is NaN,
or nonsense in integers. As in CuPy, indices in arrays wrap around if they are out of range.
"""

from __future__ import annotations

import collections
import numbers
from types import ModuleType, SimpleNamespace
from typing import Any

import cupy_contract
import numpy as np

_PLAIN = (str, bytes, type(None), type(Ellipsis), slice, bool, np.dtype, type)
_POISON = {"empty", "empty_like"}
COUNTS: collections.Counter[str] = collections.Counter()  # "launches" of kernels, and "waits" of the host for a result


def _launched(result: Any, inputs: Any = (), out: Any = None) -> Any:
    """The result of a call, which is a launch unless it is a view of an input."""
    views = isinstance(result, np.ndarray) and any(
        isinstance(x, np.ndarray) and np.may_share_memory(result, x) for x in inputs
    )
    COUNTS["launches"] += out is not None or not views
    return result


def _unwrap(value: Any) -> Any:
    """The NumPy value behind an operand, if CuPy would take it."""
    if isinstance(value, ndarray):
        return value._host
    if isinstance(value, tuple | list):
        return type(value)(_unwrap(item) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"Unsupported type {type(value)}: a NumPy value among device arrays")
    if isinstance(value, (*_PLAIN, numbers.Number)):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def _index(index: Any, shape: tuple[int, ...]) -> Any:
    """An index as CuPy reads it: what is out of range in an integer array wraps around, without an error."""
    items = [_unwrap(item) for item in (index if isinstance(index, tuple) else (index,))]
    kinds = [item.dtype.kind if isinstance(item, np.ndarray) else "" for item in items]
    widths = [
        item.ndim if kind == "b" else int(item is not None and item is not Ellipsis)
        for item, kind in zip(items, kinds, strict=True)
    ]
    axis = 0
    for i, (item, kind, width) in enumerate(zip(items, kinds, widths, strict=True)):
        if kind and kind in "iu" and axis < len(shape) and shape[axis]:
            items[i] = item % shape[axis]
        axis += len(shape) - sum(widths) if item is Ellipsis else width
    return tuple(items)


def _poison(array: np.ndarray) -> None:
    """Fills new memory with what nobody can take for a result."""
    if array.dtype.kind in "fcV":
        array.fill(np.nan)
    else:  # as bytes; in an array of bool every byte that is not zero is true
        array.fill(True if array.dtype == bool else np.frombuffer(b"\xa5" * array.itemsize, array.dtype)[0])


def _wrap(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return ndarray(np.asarray(value))
    if isinstance(value, tuple | list):
        return type(value)(_wrap(item) for item in value)
    return value


def _check_keywords(name: str, function: Any, given: dict[str, Any]) -> None:
    known = cupy_contract.keywords(function)
    for keyword in given:
        if known is not None and keyword not in known:
            raise TypeError(f"cupy.{name} got an unexpected keyword argument {keyword!r}")


class _Flags:
    """The flags of an array, as far as CuPy has them: not `writeable`, not `aligned`."""

    def __init__(self, host: Any) -> None:
        self._host = host

    def __getattr__(self, name: str) -> bool:
        if not hasattr(cupy_contract.real._core.flags.Flags, name):
            raise AttributeError(f"'cupy._core.flags.Flags' object has no attribute {name!r}")
        return getattr(self._host, name)


class ndarray:  # noqa: N801, the name is what CuPy calls it
    __array_ufunc__ = None  # NumPy must not compute with it
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: np.ndarray) -> None:
        self._host = host

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def get(self) -> np.ndarray:
        COUNTS["waits"] += 1
        return self._host.copy()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(cupy_contract.real.ndarray, name):
            raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")
        value = getattr(self._host, name)
        if not callable(value):
            return _wrap(value)

        def method(*args: Any, **kwargs: Any) -> Any:
            _check_keywords(f"ndarray.{name}", getattr(cupy_contract.real.ndarray, name), kwargs)
            result = value(*map(_unwrap, args), **{key: _unwrap(item) for key, item in kwargs.items()})
            return _wrap(_launched(result, [self._host], kwargs.get("out")))

        return method

    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    flags = property(lambda self: _Flags(self._host.flags))
    data = property(lambda self: SimpleNamespace(ptr=self._host.__array_interface__["data"][0]))

    def _part(name: str) -> property:  # type: ignore[misc]
        def put(self: ndarray, value: Any) -> None:
            getattr(self._host, name)[...] = _unwrap(value)

        return property(lambda self: ndarray(getattr(self._host, name)), put)

    real, imag = _part("real"), _part("imag")

    def view(self, dtype: Any = None) -> ndarray:
        dtype = np.dtype(dtype)
        if dtype.itemsize != self._host.itemsize:
            if not self._host.flags.c_contiguous:
                raise ValueError("the array must be contiguous to change its item size")
            if self.data.ptr % dtype.itemsize:
                raise RuntimeError("misaligned address")
        return ndarray(self._host.view(dtype))

    def __getitem__(self, index: Any) -> ndarray:
        if isinstance(index, list):
            raise TypeError("index with device arrays, slices and integers")
        return ndarray(np.asarray(self._host[_index(index, self.shape)]))

    def __setitem__(self, index: Any, value: Any) -> None:
        self._host[_index(index, self.shape)] = _unwrap(value)
        COUNTS["launches"] += 1

    def __len__(self) -> int:
        return len(self._host)

    def __repr__(self) -> str:
        return f"device {self._host!r}"


_TO_HOST = ("__bool__", "__int__", "__float__", "__complex__")


def _operator(name: str) -> Any:
    in_place = name.startswith("__i") and name not in ("__int__", "__invert__")

    def apply(self: ndarray, *others: Any) -> Any:
        try:
            result = getattr(self._host, name)(*map(_unwrap, others))
        except TypeError:
            if in_place:  # else Python would try `x = x + y`, which makes a new array
                raise
            return NotImplemented
        COUNTS["waits" if name in _TO_HOST else "launches"] += 1
        if in_place and result is NotImplemented:
            raise TypeError(f"unsupported operand of ndarray.{name}")
        if in_place or result is NotImplemented:
            return self if in_place else result
        return result if name in _TO_HOST else _wrap(result)

    return apply


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHERS = "neg pos abs invert lt le eq ne gt ge bool int float complex"
for _name in [*(prefix + name for name in _BINARY.split() for prefix in ("", "r", "i")), *_OTHERS.split()]:
    if _name != "imatmul":  # CuPy has none, and makes a new array
        setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))
ndarray.__module__ = "cupy"


class DeviceDouble(ModuleType):
    """The module itself; it takes the place of ``cupy`` while a test runs on it."""

    __version__ = "double"
    ndarray = ndarray

    def __init__(self) -> None:
        super().__init__("cupy")
        properties = {"name": b"the device double"}
        runtime = SimpleNamespace(getDeviceCount=lambda: 1, getDeviceProperties=lambda device: properties)
        self.cuda = SimpleNamespace(runtime=runtime)

    def asarray(self, a: Any, dtype: Any = None) -> ndarray:
        return a if isinstance(a, ndarray) else ndarray(np.array(a, dtype))  # the one way in, always a copy

    def fuse(self, kernel_name: str) -> Any:
        """What is fused is one launch; what cannot be fused is not known here."""

        def fuse(function: Any) -> Any:
            def call(*arrays: Any) -> Any:
                before = COUNTS["launches"]
                result = function(*arrays)
                COUNTS["launches"] = before + 1
                return result

            return call

        return fuse

    def may_share_memory(self, a: Any, b: Any) -> bool:
        return np.may_share_memory(_unwrap(a), _unwrap(b))

    def __getattr__(self, name: str) -> Any:
        real = getattr(cupy_contract.real, name)  # AttributeError where CuPy has none
        function = getattr(np, name)
        if isinstance(real, type) or not callable(function):
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            _check_keywords(name, real, kwargs)
            out = kwargs.get("out")
            host = {key: _unwrap(value) for key, value in kwargs.items()}
            if name == "take":
                host["mode"] = "wrap"
            if name == "where" and not isinstance(args[0], ndarray):
                raise AttributeError(f"{type(args[0]).__name__!r} object has no attribute 'astype'")
            hosts = list(map(_unwrap, args))
            result = function(*hosts, **host)
            if name in _POISON:
                _poison(result)
            else:
                _launched(result, hosts, out)
            return out if out is not None else _wrap(result)

        return call
