"""A limit to the memory that a test may take."""

import tracemalloc
from contextlib import contextmanager


@contextmanager
def little_memory(most=2**20 * 1.5):
    """Fails if more than so many bytes are allocated meanwhile."""
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= most, f"{peak} bytes"
