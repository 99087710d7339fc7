"""Tensors in files, for programs in any language: .npy and .safetensors, read strictly, written whole or not at all.

A .npy file has no bfloat16: it is exchanged as uint16, the bits of each number. A .safetensors file is eight bytes of
header length, a JSON header, and the data, little-endian, without gaps; it is read through memory maps.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

NumPyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
PathLike: TypeAlias = str | os.PathLike[str]

# The floats that the oracle knows: bits of the significand, the first included, and the unit roundoff.
BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
UNIT = {name: 2.0**-bits for name, bits in BITS.items()}
_DTYPES = {
    **{f"F{8 * size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"I{8 * size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    "BF16": "bfloat16",
    "BOOL": "bool",
}
_CODES = {name: code for code, name in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the limit of the safetensors package itself


def imported(name: str, what: str) -> Any:
    """An optional module; if it is missing, an error that says what needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        told = f"{what} needs {package}, and it cannot be imported ({error}): pip install {package}"
        raise ImportError(told) from error


def dtype_named(name: str) -> np.dtype[Any]:
    """A NumPy dtype, or ml_dtypes' bfloat16.

    >>> dtype_named("float16")
    dtype('float16')
    """
    if name not in _CODES:
        raise ValueError(f"dtype must be one of {', '.join(_CODES)}, was {name!r}")
    if name != "bfloat16":
        return np.dtype(name)
    dtype: np.dtype[Any] = np.dtype(imported("ml_dtypes", "bfloat16").bfloat16)
    return dtype


def as_bits(array: NumPyArray) -> NumPyArray:
    """bfloat16 as uint16, anything else as it is."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


@contextlib.contextmanager
def whole(path: PathLike) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` at the end; after an error or Ctrl-C nothing is left of it."""
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def save_npy(path: PathLike, array: NumPyArray) -> None:
    """C order and little-endian, whatever the array was."""
    plain = as_bits(np.ascontiguousarray(array)).reshape(array.shape)  # ascontiguousarray makes (1,) of ()
    with open(path, "wb") as file:
        np.save(file, plain.astype(plain.dtype.newbyteorder("<"), copy=False), allow_pickle=False)


def load_npy(path: PathLike, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumPyArray:
    """The array in a .npy file, if it has just this shape and dtype (bfloat16 as uint16); errors call it ``what``."""
    if not os.path.isfile(path):  # a FIFO would be waited for, forever
        raise ValueError(f"{what}: there is no file {os.fspath(path)}")
    native = np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype
    wanted = native.newbyteorder("<")
    with open(path, "rb") as file:
        try:
            found, fortran, kind = _npy_header(file)
        except (ValueError, EOFError, TypeError) as error:
            raise ValueError(f"{what}: {os.fspath(path)} is no valid .npy file: {error}") from error
        if found != shape or kind != wanted:
            bits = " (the bits of bfloat16)" if dtype.name == "bfloat16" else ""
            order = "" if kind == kind.newbyteorder("<") else "big-endian "
            raise ValueError(f"{what} must be {native}{bits} of shape {shape}, was {order}{kind.name} of shape {found}")
        # Only now is anything allocated: a header may claim any size.
        data = np.fromfile(file, wanted)
        if data.size != math.prod(shape) or file.read(1):
            raise ValueError(f"{what}: {os.fspath(path)} must hold {math.prod(shape)} numbers, has {data.size}")
    return data.astype(native, copy=False).reshape(shape, order="F" if fortran else "C").view(dtype)


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype; the data follow."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"version {version} is not 1.0 or 2.0")
    return readers[version](file)


def save_safetensors(
    path: PathLike, arrays: Mapping[str, NumPyArray], metadata: Mapping[str, str], bfloat16: Collection[str] = ()
) -> None:
    """All arrays in one file; wide dtypes first, so that each is aligned. ``bfloat16``: uint16 that are such bits."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    plain, start = dict[str, NumPyArray](), 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise ValueError(f"a tensor's name must be a string of its own, was {name!r}")
        if array.dtype.name not in _CODES:
            raise TypeError(f"{name} must have a dtype of {', '.join(_CODES)}, was {array.dtype}")
        plain[name] = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        header[name] = {
            "dtype": "BF16" if name in bfloat16 else _CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, start := start + array.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole(path) as draft, open(draft, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in plain.values():
            file.write(as_bits(array).data)


def load_safetensors(path: PathLike) -> tuple[dict[str, NumPyArray], dict[str, str]]:
    """The tensors, read-only, in the order of the header, and the metadata; anything unsound in the file is refused."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length).decode(), object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its __metadata__ is no object of strings")
        places = {name: _place(name, entry) for name, entry in header.items()}
        _check_gapless(places, size - 8 - length)
        data = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8)
        tensors = {
            name: np.asarray(data[start:end]).view(dtype_named(dtype).newbyteorder("<")).reshape(shape)
            for name, (dtype, shape, start, end) in places.items()
        }
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is no sound .safetensors file: {error}") from error
    return tensors, metadata


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return found


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _place(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, first and last offset of a tensor, if they agree with each other."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} must have dtype, shape and data_offsets, and nothing else")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"{name!r} has dtype {code!r}, known are {', '.join(_DTYPES)}")
    if not (isinstance(shape, list) and all(map(_natural, shape)) and len(shape) <= 32):
        raise ValueError(f"{name!r} has the shape {shape!r}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_natural, offsets))):
        raise ValueError(f"{name!r} has the data_offsets {offsets!r}")
    start, end = offsets
    itemsize = 2 if code == "BF16" else np.dtype(_DTYPES[code]).itemsize
    if end - start != math.prod(shape) * itemsize:
        raise ValueError(f"{name!r}, {code} of shape {shape}, cannot be the bytes {start} to {end}")
    return _DTYPES[code], tuple(shape), start, end


def _check_gapless(places: Mapping[str, tuple[str, tuple[int, ...], int, int]], size: int) -> None:
    """Tensors must follow each other from the first to the last byte: no overlap, no hole, none missing."""
    reached = 0
    for name, (_, _, start, end) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start != reached:
            raise ValueError(f"{name!r} begins at byte {start} of the data, the tensor before it ends at {reached}")
        reached = end
    if reached != size:
        raise ValueError(f"its tensors end at byte {reached} of the data, the file has {size}")
