"""Hugging Face folders as (config, tensors): config.json beside one or several .safetensors files.

Nothing in a file is trusted, and nothing is ever unpickled. Tensors are views of the memory-mapped files.
"""

from __future__ import annotations

import os
import pathlib

from ..tensors import NumPyArray, load_safetensors
from .files import Checkpoint, Tensor, abridged, check_file, integer_tensor, read_json

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def is_pickle(name: str) -> bool:
    return name.lower().endswith(_PICKLES)


def pickle_error(where: str) -> ValueError:
    """The refusal of a pickle; ``where`` is the beginning of its sentence."""
    danger = "is a pickle, which can run any program while it is read, and pyrope never unpickles"
    fix = "convert it, with model.save_pretrained(folder) of transformers, or safetensors.torch.save_file"
    return ValueError(f"{where} {danger}: {fix}")


def open_folder(folder: pathlib.Path) -> Checkpoint:
    """The config and the tensors of a folder."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    present = [file for file in (single, index) if os.path.lexists(file)]
    if not present:
        raise _missing_safetensors(folder)
    if len(present) > 1:
        raise ValueError(f"{folder} holds both {single.name} and {index.name}: remove the one that is not meant")
    config = read_json(folder / "config.json")
    return config, _read_file(single) if present == [single] else _read_shards(folder, index)


def _missing_safetensors(folder: pathlib.Path) -> Exception:
    """What to say of a folder without safetensors."""
    names = sorted(entry.name for entry in folder.iterdir())
    if pickles := [name for name in names if is_pickle(name)]:
        return pickle_error(f"{folder} holds no safetensors, and {pickles[0]}")
    if others := [name for name in names if name.lower().endswith(".gguf")]:
        return ValueError(f"{folder} is not a Hugging Face folder, but holds {others[0]}: give the path of that file")
    return FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")


def _read_shards(folder: pathlib.Path, index: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of several files, which must be exactly those that the index names for each."""
    expected = read_json(index).get("weight_map")
    if not isinstance(expected, dict) or not expected or not all(isinstance(name, str) for name in expected.values()):
        raise ValueError(f"{index}: weight_map must say the file of each tensor")
    tensors: dict[str, Tensor] = {}
    actual: dict[str, str] = {}
    for name in sorted(set(expected.values())):
        if not name or name in (".", "..") or set(name) & set("/\\:\0"):
            raise ValueError(f"{index}: files must lie in the folder itself, weight_map names {name!r}")
        shard = _read_file(folder / name)
        if repeated := shard.keys() & tensors.keys():
            raise ValueError(f"{folder}: tensors that are in several files: {abridged(repeated)}")
        tensors |= shard
        actual |= dict.fromkeys(shard, name)
    if wrong := {name for name in expected | actual if expected.get(name) != actual.get(name)}:
        raise ValueError(f"{index}: tensors that are not where weight_map says, or not in it: {abridged(wrong)}")
    return tensors


def _read_file(path: pathlib.Path) -> dict[str, Tensor]:
    check_file(path)
    arrays, _ = load_safetensors(path)
    return {name: _tensor(f"{path}: {name}", array) for name, array in arrays.items()}


def _tensor(name: str, array: NumPyArray) -> Tensor:
    if array.dtype.kind in "biu":
        return integer_tensor(name, array.dtype.name, array.shape)
    return Tensor(array.shape, lambda: array)  # a view of the file, which is read where the array is used
