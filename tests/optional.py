"""Packages that may not be installed: of the extra "test", and other people's software that pyrope is compared with."""

from __future__ import annotations

from typing import Any

import pytest

PEERS = ("torch", "transformers", "onnx", "jax", "equinox", "mlx")  # what tests/peers cannot do without


def package(name: str) -> Any:
    """A package of the extra "test", or one of its modules; a file that needs one that is missing is skipped."""
    return pytest.importorskip(name, reason=f'needs the package {name.partition(".")[0]}: pip install ".[test]"')
