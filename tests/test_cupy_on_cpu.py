"""tests/cpucuda: what it builds, what it catches where it runs, and that the suite on it can fail."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from cupy_contract import ON_CPU
from hypothesis import given, strategies as st

import pyrope

HERE = pathlib.Path(__file__).parent
on_cpu = pytest.mark.skipif(not ON_CPU, reason="`tox -e cupy` runs CuPy itself on the CPU")


def part(name):
    """A module of tests/cpucuda, where each is a script or imported by one."""
    return importlib.import_module(f"cpucuda.{name}")


@pytest.fixture
def build():
    return part("build")


# --- the build, wherever it runs ---


def test_the_wheel_of_the_contract_and_the_build_are_one_version(build):
    pins = re.findall(r"cupy-cuda13x==([\d.]+)", (HERE.parent / "tox.ini").read_text())
    assert pins == [build.VERSION] == [part("compile_cupy").WRITTEN_FOR]


def test_what_was_built_is_kept_and_what_was_not_finished_is_not(build, tmp_path, monkeypatch):
    monkeypatch.setenv("PYROPE_CPUCUDA_CACHE", str(tmp_path / "kept"))
    with pytest.raises(ZeroDivisionError):
        build.kept("one", lambda directory: 1 // 0)
    assert not list((tmp_path / "kept").iterdir())
    for text in ("first", "second"):
        target = build.kept("one", lambda directory, text=text: (directory / "file").write_text(text))
    assert [path.name for path in target.parent.iterdir()] == ["one"] and (target / "file").read_text() == "first"


# --- what the library catches, where CuPy runs on it ---


@pytest.fixture
def cupy():
    return pyrope.backend.get("cupy")


@on_cpu
def test_new_memory_is_poisoned(cupy):
    freed = cupy.ones((3, 5), np.int32)
    assert freed.get().all()
    del freed  # CuPy's pool would give the same memory again, with the ones in it
    assert (cupy.empty((3, 5), np.int32).get() == -1515870811).all()


KERNELS = r"""
extern "C" __global__ void behind(int* x) { x[8] = 1; }
extern "C" __global__ void misaligned(char* x) { *(double*)(x + 4) = 1; }
extern "C" __global__ void apart(int* x) { if (threadIdx.x < 3) __syncthreads(); else __syncwarp(0xffffffffu); x[0] = 1; }
"""


@on_cpu
@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("behind", -6, "wrote behind a block of 32 bytes"),
        ("misaligned", 1, "cudaErrorMisalignedAddress"),
        ("apart", 1, "threads of a block wait at different barriers"),
    ],
)
def test_a_kernel_that_does_what_a_gpu_forbids_fails(name, status, says):
    code = f"import cupy; cupy.cuda.set_allocator(None); x = cupy.zeros(8, 'i4'); kernels = cupy.RawModule(code={KERNELS!r})"
    code += f"\nkernels.get_function({name!r})((1,), (8,), (x,)); del x"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == status and says in run.stderr


@on_cpu
def test_what_is_not_there_says_so(cupy, capfd):
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.runtime.deviceEnablePeerAccess(0)
    assert "cudaDeviceEnablePeerAccess is not implemented" in capfd.readouterr().err


@on_cpu
@pytest.mark.parametrize("reverse", ["0", "1"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8"])
def test_reductions_with_barriers_are_those_of_numpy(cupy, dtype, reverse, monkeypatch):
    monkeypatch.setenv("CPUCUDA_REVERSE", reverse)
    host = (np.arange(70 * 513) % 7 - 3).reshape(70, 513).astype(dtype)  # sums are exact, even in float16
    device = cupy.asarray(host)
    for axis in (None, 0, 1):
        for name in ("sum", "max", "argmin"):
            ours, theirs = getattr(device, name)(axis=axis).get(), getattr(host, name)(axis=axis)
            assert ours.dtype == theirs.dtype and (ours == theirs).all(), (axis, name)


@on_cpu
@given(data=st.data(), dtype=st.sampled_from(["f2", "f4", "f8", "c8", "c16"]))
def test_products_are_those_of_numpy(data, dtype):
    cupy = pyrope.backend.get("cupy")
    m, n, k, b = (data.draw(st.integers(1, most)) for most in (9, 9, 20, 3))
    rng = np.random.default_rng(0)
    a, c = (rng.integers(-3, 4, (b, *shape)).astype(dtype) for shape in ((m, k), (k, n)))  # every sum is exact
    for x in (a, c):
        if x.dtype.kind == "c":
            x.imag = rng.integers(-3, 4, x.shape)
    flipped = (data.draw(st.booleans()), data.draw(st.booleans()))
    there = [cupy.asarray(x.swapaxes(1, 2).copy() if flip else x) for x, flip in zip((a, c), flipped, strict=True)]
    left, right = (x.swapaxes(1, 2) if flip else x for x, flip in zip(there, flipped, strict=True))
    assert (cupy.matmul(left, right).get() == a @ c).all()
    assert (cupy.matmul(left[0], right[0, :, 0]).get() == a[0] @ c[0, :, 0]).all()


# --- the suite on it can fail ---

ROTATION = (
    "test_definition.py::test_eq_34_the_rotation_feature_by_feature[cupy-float32]",
    "test_rotation.py::test_rotate_is_the_definition_and_the_transpose_undoes_it[cupy]",
)
ATTENTION = (
    "test_softmax.py::test_attention_is_the_definition[cupy]",
    "test_linear.py::test_linear_attention_is_the_definition[cupy]",
)
MODELS = (
    "test_layers.py::test_norms_equal_the_definition[cupy]",
    "test_model.py::test_forward_is_its_definition[cupy]",
)
TABLES = ("test_definition.py::test_frequencies_and_tables_by_mpmath[cupy]",)


def outcomes(tests, *options, **environment):
    """The summary of a run of these tests in a process of its own."""
    around = {**os.environ, "PYTHONPATH": str(HERE), "HYPOTHESIS_PROFILE": "device", **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", *options]
    run = subprocess.run(
        [*command, *(str(HERE / test) for test in tests)], cwd=HERE.parent, env=around, capture_output=True, text=True
    )
    return re.sub(r" in .*", "", run.stdout.splitlines()[-1])


@on_cpu
def test_without_kernels_every_test_fails():
    tests = ROTATION + ATTENTION + MODELS + TABLES  # which pass, or this run has failed already
    assert outcomes(tests, "-p", "cpucuda.falsify") == f"{len(tests)} failed"


@on_cpu
@pytest.mark.parametrize(
    ("mutation", "tests"),
    [
        (r"in0 \* in1=in0 + in1", ROTATION + ATTENTION),
        (r"in0 \+ in1=in0 - in1", ROTATION),
        (r"cos\(in0\)=sin(in0)", TABLES),
        (r"sin\(in0\)=cos(in0)", TABLES),
    ],
)
def test_with_another_operator_in_the_kernels_every_test_fails(mutation, tests, tmp_path):
    assert outcomes(tests, CPUCUDA_MUTATION=mutation, CUPY_CACHE_DIR=str(tmp_path)) == f"{len(tests)} failed"
