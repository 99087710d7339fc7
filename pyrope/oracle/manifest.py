"""Reads the manifest of test vectors, and their arrays. Nothing in the files is trusted: they may come from anybody.

Every array has a name that leads to a file of the directory, which the manifest lists with its digest, and the true
results must be those that `vector_cases` computes from the inputs.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import checks
from ..definition import FEATURE_MAPS
from ..tensors import NumPyArray, PathLike, as_bits, json_file, load_npy
from ..theta import SCALINGS, Axes, Rope
from .floats import BITS
from .vector_cases import KINDS, TRUTH, Case

FORMAT, VERSION = "pyrope-vectors", 1
_LARGEST = 2**30  # bytes of a file of vectors, which are a few megabytes
_MOST_SCORES = 2**24  # of a case, over all heads: a file may claim any length
_ATTENTION = ("q", "k", "v", "q_positions", "k_positions")
_INPUTS = {
    **dict.fromkeys(KINDS[1:3], _ATTENTION),
    **dict.fromkeys(KINDS[4:], (*_ATTENTION, "g")),
    "rotation": ("x", "positions"),
    "rotation-backward": ("g", "positions"),
}
_DTYPES = {"y": "float64"} | dict.fromkeys(("positions", "q_positions", "k_positions"), "int64")  # others: the case's
_OPTIONS: dict[str, Callable[[str, Any], Any]] = {
    "causal": checks.flag,
    "of": partial(checks.choice, choices=("q", "k", "v")),
    "window": partial(checks.integer, least=1),
    "feature_map": partial(checks.choice, choices=tuple(FEATURE_MAPS)),
    **dict.fromkeys(("softcap", "scale"), partial(checks.in_range, dtype=np.dtype(np.float32))),
}


def read_json(directory: Path) -> dict[str, Any]:
    """The manifest, as far as it says what it is."""
    path = directory / "manifest.json"
    if not path.exists():
        raise ValueError(f"{directory} holds no test vectors: there is no manifest.json")
    try:
        manifest = json_file(path)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(f'{path} is no manifest of test vectors: it must have "format": "{FORMAT}"')
    if manifest.get("version") != VERSION:
        raise ValueError(f"{path} has version {manifest.get('version')!r}, this pyrope reads {VERSION}: write it anew")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(re.fullmatch(r"[\w+-][\w./+-]*", name) for name in files):
        raise ValueError(f"{path} must list its files")
    if not isinstance(manifest.get("cases"), list):
        raise ValueError(f"{path} must list its cases")
    return manifest


def read_manifest(directory: PathLike) -> dict[str, Any]:
    """The manifest of test vectors, if all its files are there and unchanged."""
    manifest = read_json(Path(directory))
    for name, digest in manifest["files"].items():
        path = Path(directory, name)
        if ".." in path.parts or not path.is_file():
            raise ValueError(f"{name} is missing in {os.fspath(directory)}: write the vectors anew")
        if path.stat().st_size > _LARGEST or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ValueError(f"{name} in {os.fspath(directory)} is not what was written: write the vectors anew")
    return manifest


def npy_path(case: str, name: str) -> str:
    """Where an array of a case lies in the directory."""
    return f"npy/{case}.{name}.npy"


def widened(array: NumPyArray, dtype: str) -> NumPyArray:
    """As it is computed with: float64, or int64 positions."""
    if dtype == "bfloat16":
        array = (as_bits(array).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array if array.dtype == np.int64 else array.astype(np.float64)


def read_case(directory: Path, manifest: Mapping[str, Any], entry: Any) -> tuple[Case, NumPyArray]:
    """A case of the manifest and its true result."""
    try:
        name, kind = entry["name"], checks.choice("kind", entry["kind"], KINDS)
        dtype = checks.choice("dtype", entry["dtype"], tuple(BITS))
        expected = {key: _DTYPES.get(key, dtype) for key in (*_INPUTS[kind], "y")}
        arrays = {}
        for key, tensor in {key: entry["tensors"][key] for key in expected}.items():
            path, stored = npy_path(name, key), expected[key]
            if path not in manifest["files"]:  # whose names lead nowhere else, and which have digests
                raise ValueError(f"{path} must be listed among its files")
            if tensor["dtype"] != stored:
                raise ValueError(f"{path} must be {stored}, was {tensor['dtype']!r}")
            native = np.dtype("uint16" if stored == "bfloat16" else stored)
            shape = checks.integers("shape", tensor["shape"], 1)
            arrays[key] = widened(load_npy(directory / path, f"{name}.{key}", shape, native), stored)
        options = {key: _OPTIONS[key](key, value) for key, value in entry["options"].items()}
        y = arrays.pop("y")
        case = Case(name, kind, dtype, _rope_from_json(entry["rope"]), options, arrays)
        _check_truth(case, y)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a case of the manifest is incomplete: {error!r} in {str(entry)[:200]}") from error
    except ValueError as error:
        raise ValueError(f"a case of the manifest cannot be read: {error}; it is {str(entry)[:200]}") from error
    return case, y


def _rope_from_json(value: Any) -> Rope | None:
    if value is None:
        return None
    derived = ("theta", "axis_of_pair", "attention_factor")
    fields = {name: field for name, field in value.items() if name not in derived}
    scaling, axes = fields.pop("scaling"), fields.pop("axes")
    if scaling is not None:
        scaling = SCALINGS[scaling["type"]](**{name: field for name, field in scaling.items() if name != "type"})
    return Rope(**fields, scaling=scaling, axes=None if axes is None else Axes(**axes))


def _check_truth(case: Case, y: NumPyArray) -> None:
    """y must be what the case gives; it may differ in its last bits, as those of exp do elsewhere."""
    _check_shapes(case)
    if not all(np.isfinite(x).all() for x in case.inputs.values()):
        raise ValueError("its inputs must be finite")
    truth = TRUTH[case.kind](case)
    if y.shape != truth.out.shape or not (abs(y - truth.out) <= 2 * truth.error).all():
        raise ValueError(f"y must be the true result, of shape {truth.out.shape}: write the vectors anew")


def _check_shapes(case: Case) -> None:
    inputs, rope, shapes = case.inputs, case.rope, {name: x.shape for name, x in case.inputs.items()}
    if case.rotates:
        (*axes, n), x = shapes["positions"], case.x.shape
        fits = rope is not None and x[1:] == (n, rope.head_dim) and len(x) == 3
        fits = fits and axes == ([] if rope is None or rope.axes is None else [rope.axes.count])
    else:
        (h, n, d), (g, m, _), at = shapes["q"], shapes["k"], inputs["k_positions"]
        fits = shapes["k"] == shapes["v"] == (g, m, d) and h % g == 0 and n <= m and h * n * m <= _MOST_SCORES
        fits = fits and at.shape == (m,) and np.array_equal(at[m - n :], inputs["q_positions"])
        fits = fits and (rope is None or (rope.head_dim == d and rope.axes is None))
        fits = fits and ("feature_map" in case.options) == case.kind.startswith("linear")
        fits = fits and ("of" in case.options) == ("g" in shapes) and shapes.get("g", (h, n, d)) == (h, n, d)
    if not fits:
        raise ValueError(f"its rope, its options and the shapes of its tensors must fit each other: {shapes}")
