"""`load`: a checkpoint into a `Model`, strictly: every tensor is used exactly once."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ..backend import from_numpy, get
from ..phase import cos_sin
from ..theta import frequencies
from .architecture import Config, Model, Weights, check_dtype, weight_shapes
from .families import FAMILIES, Family, find_family, read_architecture
from .files import Checkpoint, Tensor, check_file
from .folders import is_pickle, open_folder, pickle_error
from .gguf_architectures import open_gguf

_Sources: TypeAlias = list[tuple[str, tuple[int, ...]]]  # the tensors of a checkpoint, and their shapes
_LAYER = re.compile(r"^layers\.(\d+)\.")
_ROFORMER_TABLE = "roformer.encoder.embed_positions.weight"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The config, as in config.json, and the tensors by their Hugging Face names: of a folder, or of a GGUF file."""
    path = pathlib.Path(path)
    if path.is_dir():
        return open_folder(path)
    check_file(path)
    if is_pickle(path.name):
        raise pickle_error(str(path))
    if path.suffix.lower() == ".safetensors":
        raise ValueError(f"{path} has no config of its own: give the folder that holds it and its config.json")
    return open_gguf(path)


def load(
    path: str | os.PathLike[str], backend: str = "numpy", dtype: str = "float32", *, ignore: Collection[str] = ()
) -> Model:
    """The model in a Hugging Face folder (config.json and safetensors) or a GGUF file.

    Tensors are read one after the other into arrays of ``dtype``, float32 or float64. All names and
    shapes that do not fit are listed in one error. ``ignore`` names keys of config.json that are not known here and
    that change nothing.
    """
    target, xp = check_dtype(dtype), get(backend)
    raw, tensors = open_checkpoint(path)
    config, family = read_architecture(raw, ignore), find_family(raw)
    shapes = weight_shapes(config)
    sources = {name: _sources(config, family, name, shape) for name, shape in shapes.items()}
    _check_fit(config, family, sources, tensors)
    arrays = {}
    for name, shape in shapes.items():
        array, start = np.empty(shape, target), 0
        for source, part in sources[name]:
            values = _arranged(config, family, name, tensors[source].read())
            _fill(array[start : start + part[0]], source, values)
            start += part[0]
        arrays[name] = from_numpy(array, xp)
    return Model(config, Weights.of(config, arrays))


def _sources(config: Config, family: Family, name: str, shape: tuple[int, ...]) -> _Sources:
    """The tensors of the checkpoint that make up one of our arrays, from its first rows to its last."""
    layer = _LAYER.match(name)
    general = _LAYER.sub("layers.{i}.", name)
    stem, _, kind = general.rpartition(".")
    stored, suffix = (family.tensors[general], "") if general in family.tensors else (family.tensors[stem], f".{kind}")
    names = [one.replace("{i}", layer[1] if layer else "") + suffix for one in stored.split()]
    rows = [shape[0]]
    if len(names) == 3:
        rows = [config.heads * config.head_dim] + [config.key_heads * config.head_dim] * 2
    elif len(names) == 2:
        rows = [config.mlp_width] * 2
    return [(one, (row, *shape[1:])) for one, row in zip(names, rows, strict=True)]


def _check_fit(config: Config, family: Family, sources: Mapping[str, _Sources], tensors: Mapping[str, Tensor]) -> None:
    """Raises one error that lists every tensor that is missing, unexpected or of another shape."""
    expected = {one: shape for parts in sources.values() for one, shape in parts}
    if config.embedding_bias:  # a table by token type, of which the first row is used
        table = family.tensors["embedding_bias"]
        rows = tensors[table].shape[:1] if table in tensors else ()
        expected[table] = (max((1, *rows)), config.width)
    wrong = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in tensors]
    both = [(name, tensors[name].shape, shape) for name, shape in expected.items() if name in tensors]
    wrong += [f"{name} has shape {own}, not {shape}" for name, own, shape in both if own != shape]
    copies, layers = dict(family.copies), range(len(config.layers))
    if config.tied:
        copies[f"{family.tensors['head']}.weight"] = family.tensors["embedding"]
    for name in sorted(set(tensors) - set(expected)):
        if name in copies:
            wrong += _differs(name, tensors[name], copies[name], tensors.get(copies[name]))
        elif name == _ROFORMER_TABLE and family is FAMILIES["roformer"]:
            wrong += _other_positions(config, tensors[name])
        elif any(name == one.replace("{i}", str(i)) for one in family.buffers for i in layers):
            wrong += _other_frequencies(config, name, tensors[name]) if name.endswith("inv_freq") else []
        else:
            wrong.append(f"unexpected: {name} {tensors[name].shape}")
    if wrong:
        lines = wrong[:20] + ([f"and {len(wrong) - 20} more"] if len(wrong) > 20 else [])
        raise ValueError("the tensors do not fit the config:\n  " + "\n  ".join(lines))


def _differs(name: str, copy: Tensor, original: str, tensor: Tensor | None) -> list[str]:
    """A copy of a tensor, such as a tied head beside the embedding, must be equal to it."""
    if tensor is None or copy.shape != tensor.shape or not np.array_equal(copy.read(), tensor.read()):
        return [f"{name} must be equal to {original}, and differs from it"]
    return []


def _other_frequencies(config: Config, name: str, tensor: Tensor) -> list[str]:
    """Old checkpoints store Θ, some in bfloat16: it must be that of the rope, before or after its rescaling."""
    ropes = [layer.rope for layer in config.layers if layer.rope is not None]
    known = [frequencies(one) for rope in ropes for one in (rope, replace(rope, scaling=None)) if one.theta_is_fixed]
    values = tensor.read().astype(np.float64)
    if any(values.shape == theta.shape and np.allclose(values, theta, rtol=1e-2, atol=0) for theta in known):
        return []
    return [f"{name} must hold the frequencies of the config, and has others: {values.max():g} to {values.min():g}"]


def _other_positions(config: Config, table: Tensor) -> list[str]:
    """RoFormer stores its sines and cosines, (length, d): they must be those of its rope, which are computed anew."""
    rope = config.layers[0].rope
    if rope is None or len(table.shape) != 2 or table.shape[1] != rope.head_dim or not table.shape[0]:
        return [f"{_ROFORMER_TABLE} has shape {table.shape}, not (length, {config.head_dim})"]
    cos, sin = cos_sin(np.arange(table.shape[0]), rope)
    off = abs(table.read().astype(np.float64) - np.concatenate((sin, cos), axis=-1)).max()
    return [] if off < 1e-2 else [f"{_ROFORMER_TABLE} differs by {off:.2g} from the sines and cosines of its rope"]


def _fill(part: np.ndarray[Any, Any], name: str, values: np.ndarray[Any, Any]) -> None:
    try:
        with np.errstate(over="raise"):
            part[...] = values
    except FloatingPointError:
        raise ValueError(f"{name} holds numbers too large for {part.dtype}: load it with dtype float64") from None


def _arranged(config: Config, family: Family, name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values of a tensor as our arrays have them."""
    if name == "embedding_bias":
        return values[:1].reshape(-1)
    if family.norm_from_one and name.endswith("norm.weight"):
        return values.astype(np.float64) + 1.0
    if family.qkv_by_head and ".qkv." in name:
        by_head = values.reshape(config.heads, 3, config.head_dim, *values.shape[1:])
        return by_head.swapaxes(0, 1).reshape(values.shape)
    return values
