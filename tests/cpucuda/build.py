"""Builds CuPy and the library that takes CUDA's place, once, into a cache; installs both into a virtual environment.

What is built is found again by what it was made of: the sdist's hash, the version of Python, and the sources here.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable

HERE = pathlib.Path(__file__).resolve().parent
VERSION = "14.2.0"
SHA256 = "cfed725e612178cfbdbf62f4a3a598b60edecbbca718c0d4580c21a16ae4a62c"  # of the sdist
DEVICE = "CPU (cpucuda)"  # what the library calls itself
TOOLS = ("setuptools==84.2.1", "Cython==3.2.9")
CPUINFO = pathlib.Path("/proc/cpuinfo")
PROCESSOR = ("avx2", "fma", "f16c")
COMPILER = os.environ.get("CPUCUDA_CXX", "g++")
# What kernels are compiled with. A product and a sum may become one, as on a GPU; a misaligned access is counted.
INSTRUCTIONS = " ".join(f"-m{name}" for name in PROCESSOR)
KERNELS = f"-std=gnu++17 -fPIC -O1 -w {INSTRUCTIONS} -ffp-contract=fast -fno-strict-aliasing -fsanitize=alignment"


def unable() -> str:
    """Why this machine cannot run it, or nothing."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"it needs Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    flags = CPUINFO.read_text().split()
    if missing := [name for name in PROCESSOR if name not in flags]:
        return f"the processor does not have {', '.join(missing)}"
    if not shutil.which(COMPILER):
        return f"it needs g++ 12 or newer, and there is no {COMPILER} (set CPUCUDA_CXX to another)"
    major = subprocess.run([COMPILER, "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
    return "" if int(major.partition(".")[0]) >= 12 else f"it needs g++ 12 or newer, {COMPILER} is version {major}"


def cache() -> pathlib.Path:
    """The directory that keeps what was built; it may be deleted at any time."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("PYROPE_CPUCUDA_CACHE") or pathlib.Path(home) / "pyrope-cpucuda").resolve()


def key(*parts: str | pathlib.Path) -> str:
    """A name for what is made of these texts and files."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, pathlib.Path) else part.encode()
        total.update(hashlib.sha256(data).digest())
    return total.hexdigest()[:16]


def run(what: str, *command: str | pathlib.Path, log: pathlib.Path, **environment: str) -> None:
    """Runs a command; if it fails, exits with the end of its output."""
    with log.open("ab") as output:
        status = subprocess.run(command, stdout=output, stderr=output, env={**os.environ, **environment}).returncode
    if status:
        whole = pathlib.Path(tempfile.gettempdir()) / "cpucuda-failed.log"
        shutil.copy(log, whole)
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        sys.exit(f"{end}\ncpucuda: {what} failed with exit status {status}; the whole output is in {whole}")


def kept(name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """The directory of this name in the cache; `make(directory)` fills it if it is not there."""
    target = cache() / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{name}-") as temporary:
            (unfinished := pathlib.Path(temporary) / name).mkdir()
            make(unfinished)
            if not target.exists():  # another run may have been quicker
                unfinished.rename(target)
    return target


def build_cupy(directory: pathlib.Path) -> None:
    """CuPy itself, as `setup.py build` leaves it, and the declarations that our library is compiled with."""
    print(f"cpucuda: building CuPy {VERSION}, for some minutes; this is done once", flush=True)
    work, log = directory.parent, directory / "build.log"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run("installing Cython", *pip, "install", "--target", work / "tools", *TOOLS, log=log)
    # pip compares the hash before anything of the sdist is run. Then it asks the sdist for its metadata, which without
    # a CUDA toolkit is given for the stub build alone.
    (wanted := work / "requirements.txt").write_text(f"cupy=={VERSION} --hash=sha256:{SHA256}\n")
    download = ("download", "--no-deps", "--no-binary", "cupy", "--no-build-isolation", "--require-hashes")
    environment = {"PYTHONPATH": str(work / "tools"), "CUPY_INSTALL_USE_STUB": "1"}
    run(f"fetching CuPy {VERSION}", *pip, *download, "-d", work, "-r", wanted, log=log, **environment)
    with tarfile.open(work / f"cupy-{VERSION}.tar.gz") as archive:
        archive.extractall(work, filter="data")
    sdist = work / f"cupy-{VERSION}"
    run("the build", sys.executable, HERE / "compile_cupy.py", sdist, directory / "site", log=log, **environment)
    shutil.copytree(sdist / "cupy_backends/stub", directory / "stub")
    shutil.copy(sdist / "cpucuda_types.h", directory)


def missing(stubs: pathlib.Path, source: str) -> str:
    """For every function of CuPy's stubs that the source does not have, one that fails and says so."""
    here = set(re.findall(r"\b((?:cuda|cu|nvrtc|cublas)\w+)\(", source))
    here |= {f"cublas{x}{f}" for x in "SDCZ" for f in ("gemm", "gemv", "gemmBatched", "gemmStridedBatched")}
    lines = []
    for name, status in (("cuda_runtime", 801), ("cublas", 15), ("cusolver", 7), ("cusparse", 11), ("curand", 999)):
        for function in re.findall(r"^\w+\s+(\w+)\(", (stubs / f"cupy_{name}.h").read_text(), re.M):
            if function not in here and not function.startswith("make_"):
                lines.append(f'int {function}() {{ return cpucuda_missing("{function}", {status}); }}\n')
    return "".join(lines)


def build_library(cupy: pathlib.Path, directory: pathlib.Path) -> None:
    """Our library, the headers for kernels, and the module that loads it."""
    print("cpucuda: building the library that takes CUDA's place", flush=True)
    source, log = HERE / "runtime.cpp", directory / "build.log"
    shutil.copytree(HERE / "include", directory / "include")
    shutil.copy(HERE / "cpucuda_start.py", directory)
    (directory / "missing.inc").write_text(missing(cupy / "stub", source.read_text()))
    choices = ("-DCPUCUDA_LIBRARY", f'-DCPUCUDA_CXX="{COMPILER}"', f'-DCPUCUDA_KERNELS="{KERNELS}"')
    options = (
        f"-std=gnu++17 -O3 {INSTRUCTIONS} -w -shared -fPIC -I{cupy} -I{directory} -Wl,-soname,libcuda.so.1 -ldl".split()
    )
    run("compiling", COMPILER, source, "-o", directory / "libcuda.so.1", *choices, *options, log=log)
    prelude = directory / "include/prelude.h"
    run("compiling prelude.h", COMPILER, *KERNELS.split(), "-x", "c++-header", prelude, "-o", f"{prelude}.gch", log=log)


def built() -> tuple[pathlib.Path, pathlib.Path]:
    """The directories of CuPy and of our library."""
    compiler = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    name = key(SHA256, sys.implementation.cache_tag, *TOOLS, HERE / "compile_cupy.py")
    cupy = kept(f"cupy-{VERSION}-{sys.implementation.cache_tag}-{name}", build_cupy)
    sources = [HERE / "build.py", HERE / "runtime.cpp", HERE / "cpucuda_start.py", *sorted(HERE.glob("include/**/*.h"))]
    library = kept(f"library-{key(name, compiler, *sources)}", lambda directory: build_library(cupy, directory))
    return cupy / "site", library


def install() -> None:
    """Makes CuPy, and before it our library, known to every Python of this virtual environment."""
    if sys.prefix == sys.base_prefix:
        sys.exit("cpucuda: install into a virtual environment, not into the Python of the system")
    cupy, library = built()
    lines = [str(cupy), str(library), "import cpucuda_start"]
    (pathlib.Path(sysconfig.get_path("platlib")) / "cpucuda.pth").write_text("\n".join(lines) + "\n")
