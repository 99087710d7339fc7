"""What the runs of other people's software share: kernels of Triton are interpreted, and what is missing is skipped."""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its kernels then run on the CPU
os.environ.setdefault("KERAS_BACKEND", "torch")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error}: tox -e world")
