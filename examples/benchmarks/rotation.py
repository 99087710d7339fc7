"""How fast pyrope rotates, as ratios to a memory copy and to torch, all in one run.

    python examples/benchmarks/rotation.py

Rotation: float32, 32 heads × 4096 positions × 128 features, tables ready, result into an array that is
there already. Tables: 131,072 positions × 64 pairs against numpy.cos and numpy.sin of the naive angle.
torch is optional; its rotation is the form of Hugging Face, eager and compiled, with two threads.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
from rows import Row, show

import pyrope
from pyrope import Rope

HEADS, LENGTH, HEAD_DIM = 32, 4096, 128
POSITIONS = 131072  # of the tables


def best(function: Callable[[], object], rounds: int = 15) -> float:
    """The shortest of several times, in seconds: what the machine can do when nobody else is at work."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def row(name: str, seconds: float, unit: float, of: str, limit: str = "") -> Row:
    return Row(name, f"{seconds * 1e3:.2f} ms", seconds / unit, f"x {of}", limit)


def rotation(seconds: dict[str, float]) -> Iterator[Row]:
    """Rows of pyrope's rotation; their times go into ``seconds``."""
    x = np.random.default_rng(0).standard_normal((HEADS, LENGTH, HEAD_DIM)).astype(np.float32)
    out, m = np.empty_like(x), np.arange(LENGTH)
    copy = best(lambda: np.copyto(out, x))
    seconds["copy"] = copy
    yield row("numpy.copyto", copy, copy, "a copy")
    for layout, limit in (("interleaved", "1.35"), ("half", "3.20"), ("interleaved-to-half", "")):
        rope = Rope(HEAD_DIM, 10000.0, layout)
        tables = pyrope.rotation_tables(rope, m, like=x)
        seconds[layout] = best(lambda r=rope, t=tables: pyrope.rotate(x, m, r, tables=t, out=out))
        yield row(f"pyrope {layout}", seconds[layout], copy, "a copy", limit)


def naive(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The plain form, as most people write it."""
    x1, x2 = x[..., ::2], x[..., 1::2]
    return np.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], axis=-1).reshape(x.shape)


def plain_numpy(copy: float) -> Iterator[Row]:
    x = np.random.default_rng(0).standard_normal((HEADS, LENGTH, HEAD_DIM)).astype(np.float32)
    tables = pyrope.cos_sin(Rope(HEAD_DIM, 10000.0, "interleaved"), np.arange(LENGTH), np.float32)
    yield row("NumPy, naive interleaved", best(lambda: naive(x, *tables), 5), copy, "a copy")


def peers(ours: dict[str, float]) -> Iterator[Row]:
    try:
        import torch
    except ImportError:
        yield Row("torch", "left out", note="it is not installed")
        return
    torch.set_num_threads(2)
    x = torch.randn(1, HEADS, LENGTH, HEAD_DIM)
    angle = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    wide = torch.cat((angle, angle), -1)

    def half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        swapped = torch.cat((-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]), -1)
        return x * cos + swapped * sin

    def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), -1).flatten(-2)

    for name, function, table in (("half", half, wide), ("interleaved", interleaved, angle)):
        arguments = (x, table.cos(), table.sin())
        yield row(
            f"torch {name}, eager", best(lambda f=function, a=arguments: f(*a), 7), ours[name], "pyrope's", "> 1 wanted"
        )
        try:
            compiled = torch.compile(function)
            compiled(*arguments)
        except Exception as error:  # no C++ compiler on this machine, for one
            yield Row(f"torch {name}: cannot be compiled here", note=type(error).__name__)
            continue
        yield row(
            f"torch {name}, compiled", best(lambda f=compiled, a=arguments: f(*a)), ours[name], "pyrope's", "> 1 wanted"
        )


def tables() -> Iterator[Row]:
    n, rope = POSITIONS, Rope(128, 10000.0, "half")
    m, theta = np.arange(n), pyrope.frequencies(rope)

    def plain() -> tuple[np.ndarray, np.ndarray]:
        angle = m[:, None] * theta
        return np.cos(angle), np.sin(angle)

    unit = best(plain, 7)
    yield row(f"numpy cos, sin of {n} x 64", unit, unit, "numpy")
    yield row("pyrope.cos_sin of the same", best(lambda: pyrope.cos_sin(rope, m), 7), unit, "numpy", "1.50")
    tracemalloc.start()
    result = pyrope.cos_sin(rope, m)
    beyond = tracemalloc.get_traced_memory()[1] - sum(table.nbytes for table in result)
    tracemalloc.stop()
    yield Row("memory of it beyond its result", f"{beyond / 2**20:.1f} MB", limit="64 MB")


def rows() -> Iterator[Row]:
    seconds: dict[str, float] = {}
    yield from rotation(seconds)
    yield from plain_numpy(seconds["copy"])
    yield from peers(seconds)
    yield from tables()


if __name__ == "__main__":
    show(rows())
