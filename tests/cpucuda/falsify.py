"""A plugin of pytest, `-p cpucuda.falsify`: while a test is called, no kernel runs. Tests on the device must fail."""

import os

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    os.environ["CPUCUDA_NO_EXECUTION"] = "1"
    try:
        return (yield)
    finally:
        del os.environ["CPUCUDA_NO_EXECUTION"]
