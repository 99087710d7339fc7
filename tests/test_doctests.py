"""Every example in a docstring is true."""

import doctest
import importlib
import pkgutil

import pytest

import pyrope

MODULES = [
    found.name for found in pkgutil.walk_packages(pyrope.__path__, "pyrope.") if not found.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    found = [test for name in MODULES for test in doctest.DocTestFinder().find(importlib.import_module(name))]
    assert sum(len(test.examples) for test in found) > 20
