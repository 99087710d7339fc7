"""What all readers of checkpoint files share: strict JSON, errors that begin with the file's name, stored tensors."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..tensors import json_file


class Tensor(NamedTuple):
    """One stored tensor. Its values are not read before ``read()`` is called, and must not be written to."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]  # float16, bfloat16, float32 or float64; TypeError if stored as integers


Checkpoint: TypeAlias = tuple[dict[str, Any], dict[str, Tensor]]  # the config, and the tensors by their names


def integer_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of integers, such as a mask: a checkpoint may hold it, but it cannot be read as weights."""

    def refuse() -> np.ndarray[Any, Any]:
        raise TypeError(f"{name} holds integers ({dtype}), and weights must be floats")

    return Tensor(shape, refuse)


@contextmanager
def errors_prefixed_with(path: pathlib.Path) -> Iterator[None]:
    """Turns an error about a file's content into a ValueError that begins with the file's name."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _hub_hint(path: pathlib.Path) -> str:
    """For one name, or two in no folder that exists: what to do if that is the id of a model on a hub."""
    one = len(path.parts) == 1
    two = len(path.parts) == 2 and not path.parent.exists()
    if path.is_absolute() or not (one or two) or path.suffix.lower() in (".json", ".safetensors", ".gguf", ".npy"):
        return ""
    return (
        ": if this is the id of a model on the Hugging Face Hub, download it, and give its folder; nothing is fetched"
    )


def check_file(path: pathlib.Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist{_hub_hint(path)}")
    if not path.is_file():
        raise ValueError(f"{path} must be a file, and is something else")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; larger files than any config, and keys that occur twice, are refused."""
    check_file(path)
    with errors_prefixed_with(path):
        return json_file(path)


def abridged(names: Iterable[str]) -> str:
    """The first of many names, for an error.

    >>> abridged("gfedcba")
    "'a', 'b', 'c', 'd', 'e' and 2 more"
    """
    names = sorted(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
