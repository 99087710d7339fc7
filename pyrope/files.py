"""Files: written atomically, and read strictly, with errors that begin with the file's name; nothing is ever unpickled.

A .npy file has no bfloat16: it is exchanged as uint16, the bits of each number. The package safetensors reads and
writes .safetensors files; a tensor's bytes are read when they are used.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from . import checks

NumPyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]
PathLike: TypeAlias = str | os.PathLike[str]
_KINDS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
DTYPES = ("bool", "bfloat16", *(f"{kind}{bits}" for kind, sizes in _KINDS.items() for bits in sizes))


def dtype_named(name: str) -> np.dtype[Any]:
    """A NumPy dtype, or ml_dtypes' bfloat16.

    >>> dtype_named("float16")
    dtype('float16')
    """
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, was {name!r}")
    if name != "bfloat16":
        return np.dtype(name)
    dtype: np.dtype[Any] = np.dtype(checks.imported("ml_dtypes", "bfloat16", "checkpoints").bfloat16)
    return dtype


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` at the end; after an error or Ctrl-C the draft is removed."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a device would be replaced by a file
        raise ValueError(f"{path} is not a regular file: name a new file, or one that may be replaced")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def errors_prefixed_with(path: PathLike) -> Iterator[None]:
    """Turns what is raised about a file's content, by whatever package, into a ValueError that names the file."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{path}: {error or type(error).__name__}") from error


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_json(path: PathLike) -> dict[str, Any]:
    """The object in a JSON file, in which no key occurs twice."""
    with errors_prefixed_with(path := Path(path)):
        try:
            value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_without_duplicates)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"the file is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"the file must be a JSON object, was a {type(value).__name__}")
        return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    [(name, count)] = Counter(name for name, _ in pairs).most_common(1) or [("", 0)]
    if count > 1:
        raise ValueError(f"the key {name!r} occurs twice")
    return dict(pairs)


# ── .npy ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def save_npy(path: PathLike, array: NumPyArray) -> None:
    """Writes an array in C order and little-endian, whatever its own order is; bfloat16 as uint16."""
    plain = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray makes (1,) of ()
    plain = plain.view(np.uint16) if plain.dtype.name == "bfloat16" else plain
    with open(path, "wb") as file:
        np.save(file, plain.astype(plain.dtype.newbyteorder("<"), copy=False))


def load_npy(path: PathLike, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumPyArray:
    """The array in a .npy file, which must have this shape and dtype (bfloat16 as uint16); errors call it ``what``."""
    path, native = Path(path), np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype
    if not path.is_file():  # opening a FIFO would wait forever
        raise ValueError(f"{what}: there is no file {path}")
    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)  # allocates nothing: a header may claim any size
        found = stored.shape, stored.dtype
    except Exception as error:  # NumPy lets Python parse the header: tokenize.TokenError, SyntaxError, KeyError …
        raise ValueError(f"{what}: {path} is not a valid .npy file: {error}") from error
    if found != (shape, native.newbyteorder("<")):
        bits = " (the bits of bfloat16)" if dtype.name == "bfloat16" else ""
        order = "" if stored.dtype == stored.dtype.newbyteorder("<") else "big-endian "
        actual = f"{order}{stored.dtype.name} of shape {stored.shape}"
        raise ValueError(f"{what} must be {native}{bits} of shape {shape}, was {actual}")
    return np.array(stored, native, order="C").view(dtype)


# ── .safetensors ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Tensor(NamedTuple):
    """One stored tensor. Its values are not read before ``read()`` is called."""

    shape: tuple[int, ...]
    read: Callable[[], NumPyArray]


def open_safetensors(path: PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, and the metadata."""
    package = checks.imported("safetensors", "reading a .safetensors file", "checkpoints")
    with errors_prefixed_with(path := Path(path)):
        opened = package.safe_open(path, framework="numpy")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        if any(one.get_dtype() == "BF16" for one in slices.values()):
            dtype_named("bfloat16")  # the package can read it once ml_dtypes is imported

    def read(name: str) -> NumPyArray:
        with errors_prefixed_with(path):
            array: NumPyArray = opened.get_tensor(name)
            return array

    tensors = {name: Tensor(tuple(one.get_shape()), partial(read, name)) for name, one in slices.items()}
    return tensors, opened.metadata() or {}


def load_safetensors(path: PathLike) -> tuple[dict[str, NumPyArray], dict[str, str]]:
    """The arrays, and the metadata."""
    tensors, metadata = open_safetensors(path)
    return {name: tensor.read() for name, tensor in tensors.items()}, metadata


def save_safetensors(path: PathLike, arrays: Mapping[str, NumPyArray], metadata: Mapping[str, str]) -> None:
    """Writes all arrays to one file."""
    package = checks.imported("safetensors.numpy", "writing a .safetensors file", "checkpoints")
    plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    with errors_prefixed_with(Path(path)), atomic_path(path) as draft:
        # Its save_file would leave a file that its owner alone may read.
        draft.write_bytes(package.save(plain, metadata=dict(metadata)))
