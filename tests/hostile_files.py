"""Files that are cut, damaged or made of any bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf_files import gguf, rewrite
from hypothesis import strategies as st
from memory import little_memory
from optional import needed

ml_dtypes = needed("ml_dtypes")

assert gguf.quants  # imported before memory is measured
DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}
_bytes = st.integers(0, 255).map(lambda value: bytes([value]))
_numbers = st.sampled_from([0, 1, 2, 31, 2**31, 2**32, 2**40, 2**63, 2**64 - 1]).map(lambda x: struct.pack("<Q", x))
damages = st.lists(st.tuples(st.floats(0, 1), _bytes | _bytes | _numbers), min_size=1, max_size=4)


def random_values(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_refused(open_tensors, file, content):
    """A file of this content must be refused, without much memory."""
    rewrite(file, content)
    with little_memory(), pytest.raises(ValueError):
        open_tensors()


def assert_refused_or_read(open_tensors, file, content, damage):
    """A damaged file must be refused, or read as it says, without much memory."""
    for where, new in damage:
        at = int(where**2 * (len(content) - 1))  # more often in the header
        content = content[:at] + new + content[at + len(new) :]
    rewrite(file, content)
    with little_memory():
        try:
            tensors = open_tensors()
        except ValueError:
            return
        for tensor in tensors.values():
            try:
                values = tensor.read()
            except (TypeError, ValueError):
                continue
            assert values.shape == tensor.shape and values.dtype in DTYPES.values()
