"""ggml's rotations, ggml_rope_ext and ggml_rope_multi, of the sources in llama-cpp-python's sdist: built once into a
cache, called by ctypes.

`python tests/world/ggml.py` fetches and builds it, or says why it cannot; `rope_ext` and `rope_multi` are then there.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

PACKAGE, VERSION = "0.3.36", "0.25.3"  # of llama-cpp-python, and of the ggml in it
OPTIONS = ("NATIVE", "OPENMP", "BUILD_TESTS", "BUILD_EXAMPLES", "LLAMAFILE", "CCACHE")  # none of which is needed
NORMAL, NEOX = 0, 2  # pairs (2i, 2i + 1), and (i, i + r/2)
MROPE, IMROPE = 8, 40  # several axes: sections of pairs, and dealt in turn
STREAMS = 4  # of positions that ggml_rope_multi takes: time, row, column, and one more
_F32, _I32 = 0, 26


def cache() -> pathlib.Path:
    """Where the libraries are kept; it may be deleted at any time."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "pyrope-world" / f"ggml-{VERSION}"


def build() -> str:
    """Builds the libraries, unless they are there; returns why that is impossible, or nothing."""
    if missing := [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]:
        return f"ggml is built by cmake and g++, and there is no {' and no '.join(missing)}"
    if library("cpu").exists():
        return ""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        fetch = ["download", "--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={PACKAGE}"]
        subprocess.run([sys.executable, "-m", "pip", *fetch, "-d", name], check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        sources = next(folder.glob("*/vendor/llama.cpp/ggml"))
        (sources / "ggml.pc.in").touch()  # which the sdist lacks, and nothing here needs
        options = [f"-DGGML_{option}=OFF" for option in OPTIONS]
        made = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", *options]
        subprocess.run(["cmake", "-S", sources, "-B", folder / "build", *made], check=True)
        subprocess.run(["cmake", "--build", folder / "build", "--target", "ggml-cpu", "-j", "2"], check=True)
        cache().mkdir(parents=True, exist_ok=True)
        for part in ("base", "cpu"):
            shutil.copy(next((folder / "build").rglob(f"libggml-{part}.so")), library(part))
    return ""


def library(part: str) -> pathlib.Path:
    return cache() / f"libggml-{part}.so.0"


class _Memory(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@functools.cache
def _functions() -> dict[str, Any]:
    base, cpu = (ctypes.CDLL(str(library(part)), mode=ctypes.RTLD_GLOBAL) for part in ("base", "cpu"))
    pointer, i64, i32, f32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    signatures: dict[str, tuple[Any, Any, list[Any]]] = {
        "ggml_init": (base, pointer, [_Memory]),
        "ggml_free": (base, None, [pointer]),
        "ggml_new_tensor_4d": (base, pointer, [pointer, i32, i64, i64, i64, i64]),
        "ggml_new_tensor_1d": (base, pointer, [pointer, i32, i64]),
        "ggml_get_data": (base, pointer, [pointer]),
        "ggml_new_graph": (base, pointer, [pointer]),
        "ggml_build_forward_expand": (base, None, [pointer, pointer]),
        "ggml_rope_ext": (base, pointer, [pointer] * 4 + [i32] * 3 + [f32] * 6),
        "ggml_rope_multi": (base, pointer, [pointer] * 4 + [i32, pointer] + [i32] * 2 + [f32] * 6),
        "ggml_graph_compute_with_ctx": (cpu, i32, [pointer, pointer, i32]),
    }
    found = {}
    for name, (where, result, arguments) in signatures.items():
        found[name] = getattr(where, name)
        found[name].restype, found[name].argtypes = result, arguments
    return found


def rope_ext(
    x: Any, positions: Any, width: int, mode: int, base: float, *, length: int = 0, scale: float = 1.0,
    extrapolated: float = 0.0, factor: float = 1.0, fast: float = 32.0, slow: float = 1.0,
) -> Any:  # fmt: skip
    """x (b, n, h, d), float32, at positions (n,): ggml_rope_ext in one thread."""
    numbers = (width, mode, length, base, scale, extrapolated, factor, fast, slow)
    return _computed("ggml_rope_ext", x, positions, numbers)


def rope_multi(x: Any, positions: Any, width: int, sections: Sequence[int], mode: int, base: float) -> Any:
    """x (b, n, h, d), float32, at positions (4, n): ggml_rope_multi in one thread, with sections of so many pairs."""
    given = (ctypes.c_int * STREAMS)(*sections)
    return _computed("ggml_rope_multi", x, positions, (width, given, mode, 0, base, 1.0, 0.0, 1.0, 32.0, 1.0))


def _computed(name: str, x: Any, positions: Any, numbers: tuple[Any, ...]) -> Any:
    if not x.size:
        return x.copy()
    call, (b, n, h, d) = _functions(), x.shape
    context = call["ggml_init"](_Memory(2 * x.nbytes + 8 * positions.size + 2**22, None, False))
    try:
        a = call["ggml_new_tensor_4d"](context, _F32, d, h, n, b)
        at = call["ggml_new_tensor_1d"](context, _I32, positions.size)
        for tensor, array in ((a, np.array(x, np.float32, order="C")), (at, np.array(positions, np.int32, order="C"))):
            ctypes.memmove(call["ggml_get_data"](tensor), array.ctypes.data, array.nbytes)
        y, graph = call[name](context, a, at, None, *numbers), call["ggml_new_graph"](context)
        call["ggml_build_forward_expand"](graph, y)
        if status := call["ggml_graph_compute_with_ctx"](context, graph, 1):
            raise RuntimeError(f"ggml ended with status {status}")
        out = np.empty(x.shape, np.float32)
        ctypes.memmove(out.ctypes.data, call["ggml_get_data"](y), out.nbytes)
        return out
    finally:
        call["ggml_free"](context)


if __name__ == "__main__":
    print(build() or f"ggml {VERSION} is in {cache()}")
