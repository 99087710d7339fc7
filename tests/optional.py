"""Packages that some tests need besides NumPy, pytest and Hypothesis: without one, those tests are skipped and say so.

`package` imports one, or returns a stand-in that may be named while tests are collected, and raises ImportError when a
test uses it. conftest.py turns an ImportError for a package that is not installed into a skip.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import numpy as np
import pytest

NAMES = ("ml_dtypes", "mpmath", "safetensors", "gguf", "tokenizers", "matplotlib", "threadpoolctl")
MISSING = tuple(name for name in NAMES if importlib.util.find_spec(name) is None)


def reason(name: str) -> str:
    return f'needs the package {name}: pip install ".[test]"'


class Missing:
    """Stands for a package that is not installed, and for everything in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self()

    def __call__(self, *arguments: Any, **options: Any) -> Missing:
        if "PYTEST_CURRENT_TEST" in os.environ:  # not while tests are collected
            raise ImportError(reason(self.name), name=self.name)
        return self


def package(name: str) -> Any:
    """A package, or one of its modules, for single tests of a file."""
    first = name.partition(".")[0]
    return Missing(first) if first in MISSING else importlib.import_module(name)


def needed(name: str) -> Any:
    """A package, or one of its modules, that all tests of a file need: without it the file is skipped."""
    return pytest.importorskip(name, reason=reason(name.partition(".")[0]))


def missing_in(error: ImportError) -> str | None:
    """The package that is not installed and that an error is about."""
    return next((name for name in MISSING if name in str(error)), None)


class Dtypes(dict[str, Any]):
    """Dtypes by name, without those whose package is not installed: a test that asks for one of them is skipped."""

    def __init__(self, **dtypes: Any) -> None:
        super().__init__({name: np.dtype(dtype) for name, dtype in dtypes.items() if not isinstance(dtype, Missing)})

    def __missing__(self, name: str) -> Any:
        if name == "bfloat16":
            return Missing("ml_dtypes")()
        raise KeyError(name)
