"""Loads the library that takes CUDA's place before CuPy is imported, and stands in for the package `cuda.pathfinder`.

cpucuda.pth imports it at the start of every Python of the environment: CuPy's extension modules use the functions of
this library instead of their own empty ones, because it was loaded first, for all to see.
"""

import ctypes
import os
import sys
import types

HOME = os.path.dirname(os.path.abspath(__file__))
library = ctypes.CDLL(os.path.join(HOME, "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)

os.environ.setdefault("CUPY_ACCELERATORS", "")  # CUB's kernels are made by nvcc, and there is none
os.environ.setdefault("CUPY_CACHE_DIR", os.path.join(HOME, "kernels"))  # other headers make other kernels
os.environ.setdefault("CUPY_CACHE_SAVE_CUDA_SOURCE", "1")  # for nvrtc.py


class DynamicLibNotFoundError(RuntimeError):
    pass


def load_nvidia_dynamic_lib(name):
    if name not in ("cudart", "nvrtc", "cublas"):
        raise DynamicLibNotFoundError(f"there is no {name} on the CPU")
    path = os.path.join(HOME, "lib", "library.so")
    return types.SimpleNamespace(abs_path=path, _handle_uint=library._handle, found_via="cpucuda")


def find_nvidia_header_directory(name):
    return os.path.join(HOME, "include")


def find_nvidia_binary_utility(name):
    return None


pathfinder = types.ModuleType("cuda.pathfinder")
for item in (
    DynamicLibNotFoundError,
    load_nvidia_dynamic_lib,
    find_nvidia_header_directory,
    find_nvidia_binary_utility,
):
    setattr(pathfinder, item.__name__, item)
package = types.ModuleType("cuda")
package.__path__ = []
package.pathfinder = pathfinder
sys.modules.setdefault("cuda", package)
sys.modules.setdefault("cuda.pathfinder", pathfinder)
