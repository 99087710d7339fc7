"""`load`: a checkpoint into a `Model`, strictly: every tensor is used exactly once."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from .architecture import Config, Model, Weights, check_dtype, weight_shapes
from .backend import from_numpy, get
from .containers import Tensor, open_checkpoint
from .families import FAMILIES, Family, find_family, read_architecture
from .phase import cos_sin

_LAYER = re.compile(r"^layers\.(\d+)\.")
_ROFORMER_TABLE = "roformer.encoder.embed_positions.weight"


def load(
    path: str | os.PathLike[str], backend: str = "numpy", dtype: str = "float32", *, ignore: Collection[str] = ()
) -> Model:
    """The model in a Hugging Face folder (config.json and safetensors) or a GGUF file.

    Tensors are read one after the other into arrays of ``dtype``, float32 or float64. Names and shapes that do not fit
    are told all at once. ``ignore`` names keys of config.json that are not known here and that change nothing.
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
            array[start : start + part[0]] = values
            start += part[0]
        arrays[name] = from_numpy(array, xp)
    return Model(config, Weights.of(config, arrays))


def _sources(config: Config, family: Family, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors of a checkpoint that make up one of our arrays, with their shapes, from top to bottom."""
    layer = _LAYER.match(name)
    general = _LAYER.sub("layers.{i}.", name)
    stem, _, kind = general.rpartition(".")
    found = family.tensors.get(general) or family.tensors[stem]
    suffix = "" if general in family.tensors else f".{kind}"
    named = [
        one.replace("{i}", layer[1] if layer else "") + suffix for one in ([found] if isinstance(found, str) else found)
    ]
    rows = [shape[0]]
    if len(named) == 3:
        rows = [config.heads * config.head_dim] + [config.key_heads * config.head_dim] * 2
    elif len(named) == 2:
        rows = [config.mlp_width] * 2
    return [(one, (row, *shape[1:])) for one, row in zip(named, rows, strict=True)]


def _check_fit(
    config: Config,
    family: Family,
    sources: Mapping[str, list[tuple[str, tuple[int, ...]]]],
    tensors: Mapping[str, Tensor],
) -> None:
    """All that is missing, unexpected or of another shape, in one error."""
    expected = {one: shape for parts in sources.values() for one, shape in parts}
    if config.embedding_bias:  # a table by token type, of which the first row is used
        table = str(family.tensors["embedding_bias"])
        rows = tensors[table].shape[:1] if table in tensors else ()
        expected[table] = (max((1, *rows)), config.width)
    wrong = [f"missing: {name} {shape}" for name, shape in expected.items() if name not in tensors]
    wrong += [
        f"{name} has shape {tensors[name].shape}, not {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    for name in sorted(set(tensors) - set(expected)):
        if config.tied and name == f"{family.tensors['head']}.weight":
            wrong += _differs(name, tensors[name], tensors.get(str(family.tensors["embedding"])))
        elif name == _ROFORMER_TABLE and family is FAMILIES["roformer"]:
            wrong += _other_positions(config, tensors[name])
        elif not name.endswith(family.buffers):
            wrong.append(f"unexpected: {name} {tensors[name].shape}")
    if wrong:
        told = wrong[:20] + ([f"and {len(wrong) - 20} more"] if len(wrong) > 20 else [])
        raise ValueError("the tensors do not fit the config:\n  " + "\n  ".join(told))


def _differs(name: str, head: Tensor, embedding: Tensor | None) -> list[str]:
    """A tied head that is stored beside the embedding must be the same."""
    if embedding is None or head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
        return [f"{name} is there and differs from the embedding, though the config says tie_word_embeddings"]
    return []


def _other_positions(config: Config, table: Tensor) -> list[str]:
    """RoFormer stores its sines and cosines, (length, d): they must be those of its rope, which are computed anew."""
    rope = config.layers[0].rope
    if rope is None or len(table.shape) != 2 or table.shape[1] != rope.head_dim or not table.shape[0]:
        return [f"{_ROFORMER_TABLE} has shape {table.shape}, not (length, {config.head_dim})"]
    cos, sin = cos_sin(rope, np.arange(table.shape[0]))
    off = abs(table.read().astype(np.float64) - np.concatenate((sin, cos), axis=-1)).max()
    return [] if off < 1e-2 else [f"{_ROFORMER_TABLE} differs by {off:.2g} from the sines and cosines of its rope"]


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
