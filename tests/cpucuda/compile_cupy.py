"""Compiles CuPy from its unpacked sdist, against CuPy's own documentation stubs: no CUDA toolkit, no NVIDIA code.

    python compile_cupy.py SDIST DESTINATION        # build.py calls it, with setuptools, Cython and NumPy

CuPy's sources are not changed. Two things are added to its stub build (CUPY_INSTALL_USE_STUB):
- its Cython code is compiled with CUPY_CUDA_VERSION = 13000 instead of 0, so that it takes the branches of a
  CUDA 13 build and asks for a driver and a compiler at run time, where our library answers;
- for the runtime wrapper, four structs of the stub header get the fields that those branches use. The names of
  the fields are read from CuPy's own declarations; the layout is ours, and only our library fills it.
Extensions that importing CuPy does not need are left out.
"""

import os
import pathlib
import re
import runpy
import sys

WRITTEN_FOR = "14.2.0"
CUDA = 13000
UNUSED = (
    *("nccl", "cutensor", "_cutensor", "cusparselt", "jitify", "thrust"),
    *("cufft", "curand", "cusolver", "_cusolver", "cusparse", "_bbox_slices"),
)
# Calls must go through the symbol table, or CuPy's own empty stubs would be inlined and our library never asked.
FLAGS = "-O0 -g0 -w -fPIC -fsemantic-interposition"


def version(sdist: pathlib.Path) -> str:
    """What the sources say that they are."""
    return re.search(r"__version__ = '(.+?)'", (sdist / "cupy/_version.py").read_text()).group(1)


def types_header(sdist: pathlib.Path) -> str:
    """A header that replaces four structs of CuPy's stub."""
    text = (sdist / "cupy_backends/cuda/api/_runtime_typedef.pxi").read_text()
    block = re.search(rf"IF CUPY_CUDA_VERSION >= {CUDA}:.*?'cudaDeviceProp':\n(.*?)\n    ELIF", text, re.S)
    if not block:
        raise LookupError("_runtime_typedef.pxi does not declare cudaDeviceProp where it is looked for")
    lines = [line.partition("#")[0].strip() for line in block.group(1).splitlines()]
    fields = "".join(f"    {line.replace('cudaUUID ', 'cudaUUID_t ')};\n" for line in lines if line)
    names = ["cudaDeviceProp", "cudaPointerAttributes", "cudaMemLocation", "cudaMemPoolProps"]
    hide, show = ("".join(text.format(name) for name in names) for text in ("#define {0} stub_{0}\n", "#undef {0}\n"))
    return f"""#pragma once
#include <cstddef>
#ifndef CPUCUDA_LIBRARY
{hide}#include "{sdist}/cupy_backends/stub/cupy_cuda_runtime.h"
{show}struct cudaMemLocation {{ enum cudaMemLocationType type; int id; }};
struct cudaMemPoolProps {{
    enum cudaMemAllocationType allocType;
    enum cudaMemAllocationHandleType handleTypes;
    struct cudaMemLocation location;
}};
#endif
struct cudaPointerAttributes {{ int type, device; void *devicePointer, *hostPointer; }};
typedef struct {{ char bytes[16]; }} cudaUUID_t;
typedef struct {{
{fields}}} cudaDeviceProp;
"""


def compile_cupy(sdist: pathlib.Path, destination: pathlib.Path) -> None:
    """CuPy's own `setup.py build`, with what this file adds."""
    import Cython.Build

    header = sdist / "cpucuda_types.h"
    header.write_text(types_header(sdist))
    genuine = Cython.Build.cythonize

    def cythonize(extensions, compile_time_env, **options):
        extensions[:] = [extension for extension in extensions if extension.name.rpartition(".")[2] not in UNUSED]
        (runtime,) = [extension for extension in extensions if extension.name == "cupy_backends.cuda.api.runtime"]
        runtime.extra_compile_args = [*runtime.extra_compile_args, "-include", str(header)]
        return genuine(extensions, compile_time_env={**compile_time_env, "CUPY_CUDA_VERSION": CUDA}, **options)

    Cython.Build.cythonize = cythonize
    os.chdir(sdist)
    os.environ.update(CUPY_INSTALL_USE_STUB="1", CUPY_INSTALL_NO_RPATH="1", CFLAGS=FLAGS, CXXFLAGS=FLAGS)
    os.environ["CUPY_NUM_BUILD_JOBS"] = str(os.cpu_count() or 2)
    sys.argv = ["setup.py", "build", "--build-lib", str(destination)]
    runpy.run_path("setup.py", run_name="__main__")


def main() -> None:
    sdist, destination = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
    try:
        compile_cupy(sdist, destination)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        advice = (
            f"this build is written for CuPy {WRITTEN_FOR}; for another version, mend {pathlib.Path(__file__).name}"
        )
        sys.exit(f"CuPy {version(sdist)} could not be built ({type(error).__name__}: {error}): {advice}")


if __name__ == "__main__":
    main()
