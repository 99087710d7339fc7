"""NVIDIA's own compiler judges every kernel that CuPy generated: it needs neither a GPU nor a driver.

    python tests/cpucuda/nvrtc.py DIRECTORY        # with the sources that CUPY_CACHE_SAVE_CUDA_SOURCE=1 left there

Each source is compiled with CuPy's headers and options to machine code. run.py calls it after the tests.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import importlib.util
import os
import pathlib
import re
import sys

PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt")
ARCHITECTURES = ("sm_75", "sm_90", "sm_120")
KERNEL = re.compile(r"__global__ void (\w+)")
USED = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores")


def toolkit() -> pathlib.Path | None:
    """Where the packages of the compiler lie, if they are installed."""
    spec = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    return pathlib.Path(next(iter(spec.submodule_search_locations))) if spec else None


def options(architecture: str) -> list[bytes]:
    """Those that CuPy gives."""
    cupy = pathlib.Path(importlib.util.find_spec("cupy").origin).parent / "_core/include"
    folders = [cupy, *(cupy / "cupy/_cccl" / name for name in ("libcudacxx", "cub", "thrust")), toolkit() / "include"]
    words = [f"-arch={architecture}", "-std=c++17", "-ftz=true", "--device-as-default-execution-space"]
    return [word.encode() for word in [*words, "--ptxas-options=-v", *(f"-I{folder}" for folder in folders)]]


def compile_source(path: pathlib.Path, architecture: str) -> tuple[int, str]:
    """The compiler's status, 0 if it made machine code, and what it said."""
    library = ctypes.CDLL(str(toolkit() / "lib/libnvrtc.so.13"))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), b"kernel.cu", 0, None, None)
    words = options(architecture)
    status = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode()


def judge(path: pathlib.Path) -> list[tuple[str, str, int, str]]:
    """Name, architecture, status and log of a source for each architecture."""
    name = KERNEL.search(path.read_text()).group(1)
    return [(name, architecture, *compile_source(path, architecture)) for architecture in ARCHITECTURES]


def main(directory: str) -> int:
    sources = sorted(pathlib.Path(directory).glob("*.cu"))
    if not toolkit() or not sources:
        print(f"no sources of kernels in {directory}" if toolkit() else f"SKIPPED: pip install {' '.join(PACKAGES)}")
        return int(bool(toolkit()))
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        rows = [row for some in pool.map(judge, sources, chunksize=4) for row in some]
    ours: dict[str, list[tuple[int, int]]] = {}
    for name, architecture, status, log in rows:
        if status:
            print(f"{name} for {architecture}: status {status}\n{log}")
        elif name.startswith("pyrope"):
            used, spilled = max(map(int, USED.findall(log))), max(map(int, SPILLED.findall(log)))
            ours.setdefault(name, []).append((used, spilled))
    for name, numbers in sorted(ours.items()):
        used, spilled = zip(*numbers, strict=True)
        print(f"{name}: {min(used)} to {max(used)} registers, {max(spilled)} bytes spilled, {len(numbers)} kernels")
    refused = sum(status != 0 for _, _, status, _ in rows)
    print(
        f"NVIDIA's compiler made machine code of {len(rows) - refused} of {len(rows)} kernels, {len(sources)} sources"
    )
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
