"""Tensors in files, for programs in any language: .npy and .safetensors, read strictly and written atomically.

A .npy file has no bfloat16: it is exchanged as uint16, the bits of each number. A .safetensors file is eight bytes of
header length, a JSON header, and the data, little-endian, without gaps. It is memory-mapped: opening it reads the
header alone, and a tensor's bytes are read when they are used.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

import numpy as np

from . import checks

NumPyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
PathLike: TypeAlias = str | os.PathLike[str]
_Value = TypeVar("_Value")

_DTYPES = {
    **{f"F{8 * size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"I{8 * size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    "BF16": "bfloat16",
    "BOOL": "bool",
}
_CODES = {name: code for code, name in _DTYPES.items()}
LONGEST_JSON = 2**24  # bytes: real headers, configs and indices stay below a few millions


def dtype_named(name: str) -> np.dtype[Any]:
    """A NumPy dtype, or ml_dtypes' bfloat16.

    >>> dtype_named("float16")
    dtype('float16')
    """
    if name not in _CODES:
        raise ValueError(f"dtype must be one of {', '.join(_CODES)}, was {name!r}")
    if name != "bfloat16":
        return np.dtype(name)
    dtype: np.dtype[Any] = np.dtype(checks.imported("ml_dtypes", "bfloat16", "checkpoints").bfloat16)
    return dtype


def as_bits(array: NumPyArray) -> NumPyArray:
    """Numbers of bfloat16 as uint16, and any other array unchanged."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` at the end; after an error or Ctrl-C the draft is removed."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a device would be replaced by a file
        raise ValueError(f"{path} is no regular file: name a new file, or one that may be replaced")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def save_npy(path: PathLike, array: NumPyArray) -> None:
    """Writes an array in C order and little-endian, whatever its own order is."""
    plain = as_bits(np.ascontiguousarray(array)).reshape(array.shape)  # ascontiguousarray makes (1,) of ()
    with open(path, "wb") as file:
        np.save(file, plain.astype(plain.dtype.newbyteorder("<"), copy=False), allow_pickle=False)


def load_npy(path: PathLike, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumPyArray:
    """The array in a .npy file, which must have this shape and dtype (bfloat16 as uint16); errors call it ``what``."""
    path = Path(path)
    if not path.is_file():  # opening a FIFO would wait forever
        raise ValueError(f"{what}: there is no file {path}")
    native = np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype
    wanted = native.newbyteorder("<")
    with open(path, "rb") as file:
        try:
            stored_shape, fortran, stored = _npy_header(file)
        except Exception as error:  # NumPy lets Python parse the header: tokenize.TokenError, SyntaxError, KeyError …
            raise ValueError(f"{what}: {path} is not a valid .npy file: {error}") from error
        if stored_shape != shape or stored != wanted:
            bits = " (the bits of bfloat16)" if dtype.name == "bfloat16" else ""
            order = "" if stored == stored.newbyteorder("<") else "big-endian "
            actual = f"{order}{stored.name} of shape {stored_shape}"
            raise ValueError(f"{what} must be {native}{bits} of shape {shape}, was {actual}")
        # Nothing is allocated before this line: a header may claim any size, and so may the size of the file.
        there = os.fstat(file.fileno()).st_size - file.tell()
        if there != math.prod(shape) * wanted.itemsize:
            raise ValueError(
                f"{what}: {path} must hold {math.prod(shape)} numbers of {wanted.itemsize} bytes, has {there} bytes"
            )
        data = np.fromfile(file, wanted)
    return data.astype(native, copy=False).reshape(shape, order="F" if fortran else "C").view(dtype)


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and dtype; the data follow in the file."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"its version must be 1.0 or 2.0, was {version}")
    with warnings.catch_warnings():  # those of Python's parser, and of headers that Python 2 has written
        warnings.simplefilter("ignore")
        return readers[version](file)


def save_safetensors(
    path: PathLike, arrays: Mapping[str, NumPyArray], metadata: Mapping[str, str], bfloat16: Collection[str] = ()
) -> None:
    """Writes all arrays to one file, wide dtypes first, so that each is aligned.

    ``bfloat16`` names the arrays of uint16 that are the bits of bfloat16 numbers.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    plain, start = dict[str, NumPyArray](), 0
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize):
        if not isinstance(name, str) or not name or name == "__metadata__":
            raise ValueError(f"a tensor's name must be a string, not empty and not '__metadata__', was {name!r}")
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
    with atomic_path(path) as draft, open(draft, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in plain.values():
            file.write(as_bits(array).data)


def load_safetensors(path: PathLike) -> tuple[dict[str, NumPyArray], dict[str, str]]:
    """The tensors, as read-only views of the file in the order of its header, and the metadata.

    Nothing in the file is trusted: every number in it is checked before it is used.
    """
    path = Path(path)  # not an integer, which would be an open file
    if path.exists() and not path.is_file():  # opening a FIFO would wait forever
        raise ValueError(f"{path} must be a file, and is something else")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, LONGEST_JSON):
                raise ValueError(
                    f"the header claims {length} bytes, in a file of {size}: it is cut short, or no header"
                )
            header = json_object(file.read(length), "the header")
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
                raise ValueError("__metadata__ must be an object of strings")
            places = {name: _place(name, entry) for name, entry in header.items()}
            _check_gapless(places, size - 8 - length)
            data = np.memmap(file, np.uint8, "r", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8)
        tensors = {name: _view(data, place) for name, place in places.items()}
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid .safetensors file: {error}") from error
    return tensors, metadata


def json_object(text: bytes, what: str) -> dict[str, Any]:
    """The one object that a JSON text holds, with no key twice in any object of it; errors call the text ``what``.

    >>> json_object(b'{"a": {"b": 1}}', "the header")
    {'a': {'b': 1}}
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, was a {type(value).__name__}")
    return value


def json_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file; larger files than any config, and keys that occur twice, are refused."""
    if not path.is_file():  # opening a FIFO would wait forever
        raise ValueError(f"{path} must be a file, and is something else")
    if (size := path.stat().st_size) > LONGEST_JSON:
        raise ValueError(f"{path} must have at most {LONGEST_JSON} bytes, had {size}")
    return json_object(path.read_bytes(), "the file")


def without_duplicates(pairs: list[tuple[str, _Value]]) -> dict[str, _Value]:
    """Keys and values as a dict, if no key occurs twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        [(repeated, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {repeated!r} occurs twice")
    return mapping


class _Place(NamedTuple):
    """Where a tensor lies in the data of a .safetensors file, and how it is stored."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _view(data: NumPyArray, place: _Place) -> NumPyArray:
    stored: NumPyArray = np.asarray(data[place.start : place.end])
    return stored.view(dtype_named(place.dtype).newbyteorder("<")).reshape(place.shape)


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _place(name: str, entry: Any) -> _Place:
    """What the header says of one tensor, if the parts of it agree with each other."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} must have dtype, shape and data_offsets, and nothing else")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"{name!r} is stored as {code!r}, and only {', '.join(_DTYPES)} can be read: convert it first")
    if not (isinstance(shape, list) and all(map(_is_natural, shape)) and len(shape) <= 32):
        raise ValueError(f"the shape of {name!r} must be at most 32 integers of at least 0, was {shape!r}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_natural, offsets))):
        raise ValueError(f"the data_offsets of {name!r} must be two integers of at least 0, were {offsets!r}")
    start, end = offsets
    itemsize = 2 if code == "BF16" else np.dtype(_DTYPES[code]).itemsize
    if end - start != math.prod(shape) * itemsize:
        raise ValueError(f"{name!r}, {code} of shape {shape}, cannot be the bytes {start} to {end}")
    return _Place(_DTYPES[code], tuple(shape), start, end)


def _check_gapless(places: Mapping[str, _Place], size: int) -> None:
    """The tensors must follow each other from the first to the last byte, without overlaps and holes."""
    reached = 0
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != reached:
            raise ValueError(
                f"{name!r} begins at byte {place.start} of the data, the tensor before it ends at {reached}"
            )
        reached = place.end
    if reached != size:
        raise ValueError(f"the tensors end at byte {reached} of the data, which has {size}")
