"""Attention timed against its own bare matrix products, in one run.

    OPENBLAS_NUM_THREADS=1 python examples/benchmarks/attention.py

Times are CPU times, the best of several, with one BLAS thread: other work
on the machine disturbs them least. A ratio is of two that were measured in
turns.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np

import pyrope
from pyrope import Rope
from pyrope.linear import CHUNK


def best(*functions: Callable[[], object], seconds: float = 2.0) -> list[float]:
    """The shortest time of each, called in turns, at least five times."""
    times: list[list[float]] = [[] for _ in functions]
    while len(times[0]) < 5 or sum(map(sum, times)) < seconds:
        for function, own in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            own.append(time.process_time() - start)
    return [min(own) for own in times]


def bare_products(n: int, h: int, d: int) -> Callable[[], None]:
    """The matrix products of chunked linear attention, and nothing else."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, h, CHUNK, d)).astype(np.float32)
    lower = np.tril(np.ones((CHUNK, CHUNK), np.float32))
    scores = np.empty((h, CHUNK, CHUNK), np.float32)
    out, state = np.empty_like(q), np.zeros((h, d, d), np.float32)

    def run() -> None:
        for _ in range(n // CHUNK):
            np.matmul(q, k.swapaxes(-1, -2), out=scores)
            np.matmul(scores, v, out=out)
            np.matmul(q, state, out=out)
            np.matmul(lower, k, out=out)
            np.matmul(k.swapaxes(-1, -2), v, out=state)

    return run


def linear_rows(h: int = 8, d: int = 64) -> Iterator[tuple[str, ...]]:
    """Causal linear attention, Eq. (19), float32: rows of a table."""
    yield "causal linear attention", "n", "µs/token", "to products"
    rng = np.random.default_rng(0)
    for layout in ("half", "interleaved"):
        rope = Rope(d, 10000.0, layout)
        for n in (4096, 16384, 65536, 262144):
            shape = (h, n, d)
            q, k, v = (rng.standard_normal(shape, np.float32) for _ in "qkv")
            m = np.arange(n)

            def attend(q=q, k=k, v=v, m=m, rope=rope) -> object:
                return pyrope.linear_attention(q, k, v, m, rope, causal=True)

            took, products = best(attend, bare_products(n, h, d))
            yield (
                f"{h} heads of {d}, {layout}",
                f"{n}",
                f"{took / n * 1e6:.2f}",
                f"{took / products:.2f}",
            )
    yield from decoding_rows(h, d)


def decoding_rows(h: int = 8, d: int = 64) -> Iterator[tuple[str, ...]]:
    """One token at a time, early and late: the same time and memory."""
    yield "recurrent decoding", "tokens before", "µs/token", "peak bytes"
    rope = Rope(d, 10000.0, "half")
    x = np.random.default_rng(0).standard_normal((h, 1, d), np.float32)
    for before in (16, 4096, 262144):
        past = np.repeat(x, before, axis=-2)
        state = pyrope.linear_state(past, past, np.arange(before), rope)

        def step(state=state, before=before) -> object:
            return pyrope.linear_step(x, x, x, [before], rope, state=state)

        (took,) = best(step)
        tracemalloc.start()
        step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        yield f"{h} heads of {d}", f"{before}", f"{took * 1e6:.0f}", f"{peak}"


def main() -> None:
    for row in linear_rows():
        print(f"{row[0]:32}{row[1]:>15}{row[2]:>14}{row[3]:>14}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
