"""Cutting arrays into tiles, parts that fit the caches of a processor and are worked on one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .backend import Array


def tiles(shape: tuple[int, ...], limit: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut an array of this shape into tiles of at most limit elements, or of one row."""
    axis, inner = len(shape) - 1, shape[-1]
    while axis > 0 and inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield ()
        return
    step = max(1, limit // max(inner, 1))
    for index in itertools.product(*map(range, shape[: axis - 1])):
        for start in range(0, shape[axis - 1], step):
            yield (*index, slice(start, start + step))


def tile_of(x: Array, index: tuple[Any, ...]) -> Array:
    """x[index], where an axis of length 1 stands for one of any length."""
    each = zip(index, x.shape, strict=False)
    return x[tuple((slice(None) if isinstance(i, slice) else 0) if size == 1 else i for i, size in each)]
