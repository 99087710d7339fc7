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
FLOAT32, INT32 = 0, 26  # types of tensors


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


_POINTER, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_NUMBERS = [_I32, _I32, *[_F32] * 6]  # mode, length; base, scale, extrapolated, factor, fast, slow
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "init": (_POINTER, [_Memory]),
    "free": (None, [_POINTER]),
    "new_tensor_4d": (_POINTER, [_POINTER, _I32, *[_I64] * 4]),
    "new_tensor_1d": (_POINTER, [_POINTER, _I32, _I64]),
    "get_data": (_POINTER, [_POINTER]),
    "new_graph": (_POINTER, [_POINTER]),
    "build_forward_expand": (None, [_POINTER] * 2),
    "rope_ext": (_POINTER, [*[_POINTER] * 4, _I32, *_NUMBERS]),
    "rope_multi": (_POINTER, [*[_POINTER] * 4, _I32, _POINTER, *_NUMBERS]),
    "graph_compute_with_ctx": (_I32, [_POINTER, _POINTER, _I32]),
}


@functools.cache
def _function(name: str) -> Any:
    base, cpu = (ctypes.CDLL(str(library(part)), mode=ctypes.RTLD_GLOBAL) for part in ("base", "cpu"))
    function = getattr(cpu if "compute" in name else base, f"ggml_{name}")
    function.restype, function.argtypes = _SIGNATURES[name]
    return function


def rope_ext(x: Any, positions: Any, width: int, mode: int, base: float, length: int = 0, scale: float = 1.0,
             extrapolated: float = 0.0) -> Any:  # fmt: skip
    """x (b, n, h, d), float32, at positions (n,): ggml_rope_ext in one thread."""
    return _computed("rope_ext", x, positions, width, mode, length, base, scale, extrapolated, 1.0, 32.0, 1.0)


def rope_multi(x: Any, positions: Any, width: int, sections: Sequence[int], mode: int, base: float) -> Any:
    """x (b, n, h, d), float32, at positions (4, n): ggml_rope_multi in one thread, with sections of so many pairs."""
    given = (ctypes.c_int * STREAMS)(*sections)
    return _computed("rope_multi", x, positions, width, given, mode, 0, base, 1.0, 0.0, 1.0, 32.0, 1.0)


def _computed(name: str, x: Any, positions: Any, *numbers: Any) -> Any:
    if not x.size:
        return x.copy()
    b, n, h, d = x.shape
    context = _function("init")(_Memory(2 * x.nbytes + 8 * positions.size + 2**22, None, False))
    try:
        a = _function("new_tensor_4d")(context, FLOAT32, d, h, n, b)
        at = _function("new_tensor_1d")(context, INT32, positions.size)
        for tensor, array in ((a, np.array(x, np.float32, order="C")), (at, np.array(positions, np.int32, order="C"))):
            ctypes.memmove(_function("get_data")(tensor), array.ctypes.data, array.nbytes)
        y, graph = _function(name)(context, a, at, None, *numbers), _function("new_graph")(context)
        _function("build_forward_expand")(graph, y)
        if status := _function("graph_compute_with_ctx")(context, graph, 1):
            raise RuntimeError(f"ggml ended with status {status}")
        out = np.empty(x.shape, np.float32)
        ctypes.memmove(out.ctypes.data, _function("get_data")(y), out.nbytes)
        return out
    finally:
        _function("free")(context)


if __name__ == "__main__":
    print(build() or f"ggml {VERSION} is in {cache()}")
