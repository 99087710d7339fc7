"""Runs the tests on CuPy itself, without a GPU: python tests/cpucuda/run.py [arguments of pytest]

Then NVIDIA's compiler judges the kernels, if it is installed. In a virtual environment with the project and its extra
`test`, such as that of `tox -e cupy`. On a machine that cannot do it, says why and ends with status 0.
"""

from __future__ import annotations

import os
import subprocess
import sys

import build

CHECK = """
import cupy
name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
print("CuPy", cupy.__version__, "on", name, "is", "ready" if int(cupy.arange(4).sum()) == 6 else "wrong")
"""


def main(arguments: list[str]) -> int:
    if reason := build.unable():
        print(f"SKIPPED: CuPy itself runs nothing on this machine: {reason}")
        return 0
    build.install()
    ready = f"CuPy {build.VERSION} on {build.DEVICE} is ready"
    answer = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    if answer.stdout.strip() != ready:
        print(answer.stdout + answer.stderr, end="")
        print(f"expected: {ready}. Is a wheel of CuPy installed here? It must not be: pip uninstall cupy-cuda13x")
        return 1
    print(ready, flush=True)
    tests = ("-n", "auto", "--ignore=tests/peers", "--ignore=tests/world", "-k", "cupy")
    environment = {"HYPOTHESIS_PROFILE": "device", **os.environ}
    status = subprocess.run([sys.executable, "-m", "pytest", *tests, *arguments], env=environment).returncode
    judge = [sys.executable, build.HERE / "nvrtc.py", build.built()[1] / "kernels"]  # a Python that knows CuPy
    return status or subprocess.run(judge).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
