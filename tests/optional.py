"""Packages of the extra "test": a file that needs one that is not installed is skipped, and says so."""

from __future__ import annotations

from typing import Any

import pytest


def package(name: str) -> Any:
    """A package, or one of its modules."""
    return pytest.importorskip(name, reason=f'needs the package {name.partition(".")[0]}: pip install ".[test]"')
