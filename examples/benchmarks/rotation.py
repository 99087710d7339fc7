"""How fast pyrope rotates, as ratios to a memory copy and to torch, all in one run.

    python examples/benchmarks/rotation.py

Rotation: float32, 32 heads × 4096 positions × 128 features, tables ready, result into an array that is
there already. Tables: 131,072 positions × 64 pairs against numpy.cos and numpy.sin of the naive angle.
All of it with one thread and with every core. Ratios are to the copy and to the cosines that NumPy makes, with one
thread; a row shows the copy with as many. torch is optional; its rotation is the form of Hugging Face, eager and
compiled. Times are the shortest of several, taken in turns.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from rows import CORES, COUNTS, Row, counted, in_turns, show, threads

import pyrope
from pyrope import Rope

HEADS, LENGTH, HEAD_DIM = 32, 4096, 128
POSITIONS = 131072  # of the tables
ROUNDS = 25


def best(function: Callable[[], object], rounds: int = 15) -> float:
    """The shortest of several times, in seconds: what the machine can do when nobody else is at work."""
    return in_turns({"": function}, rounds)[""][0]


def row(name: str, seconds: float, unit: float, of: str, limit: str = "") -> Row:
    return Row(name, f"{seconds * 1e3:.2f} ms", seconds / unit, f"x {of}", limit)


def copies(out: np.ndarray, x: np.ndarray, count: int) -> Callable[[], object]:
    """A copy of x by so many threads."""
    if count == 1:
        return lambda: np.copyto(out, x)
    edges = [i * len(x) // count for i in range(count + 1)]
    pool, parts = ThreadPoolExecutor(count), [slice(*ends) for ends in zip(edges, edges[1:], strict=False)]
    return lambda: list(pool.map(lambda part: np.copyto(out[part], x[part]), parts))


def rotation(count: int, seconds: dict[str, float]) -> Iterator[Row]:
    """Rows of pyrope's rotation with so many threads; their times go into ``seconds``."""
    x = np.random.default_rng(0).standard_normal((HEADS, LENGTH, HEAD_DIM)).astype(np.float32)
    out, m = np.empty_like(x), np.arange(LENGTH)
    forms = {"numpy.copyto": copies(out, x, 1)}
    if count > 1:
        forms[f"numpy.copyto, {counted(count)}"] = copies(out, x, count)
    limits = {
        "pyrope interleaved": ("1.35", "0.75"),
        "pyrope half": ("3.20", "2.10"),
        "pyrope interleaved-to-half": ("", ""),
    }
    for name in limits:
        rope = Rope(HEAD_DIM, 10000.0, name.removeprefix("pyrope "))
        tables = pyrope.rotation_tables(m, rope, like=x)
        forms[name] = lambda r=rope, t=tables: pyrope.rotate(x, m, r, tables=t, out=out)
    seconds |= {name: times[0] for name, times in in_turns(forms, ROUNDS).items()}
    for name in forms:
        yield row(name, seconds[name], seconds["numpy.copyto"], "a copy", (limits.get(name) or ("", ""))[count > 1])


def naive(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The plain form, as most people write it."""
    x1, x2 = x[..., ::2], x[..., 1::2]
    return np.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], axis=-1).reshape(x.shape)


def plain_numpy(copy: float) -> Iterator[Row]:
    x = np.random.default_rng(0).standard_normal((HEADS, LENGTH, HEAD_DIM)).astype(np.float32)
    tables = pyrope.cos_sin(np.arange(LENGTH), Rope(HEAD_DIM, 10000.0, "interleaved"), np.float32)
    yield row("NumPy, naive interleaved", best(lambda: naive(x, *tables), 5), copy, "a copy")


def peers(ours: dict[str, float]) -> Iterator[Row]:
    try:
        import torch
    except ImportError:
        yield Row("torch", "left out", note="it is not installed")
        return
    torch.set_num_threads(CORES)
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
        arguments, own = (x, table.cos(), table.sin()), ours[f"pyrope {name}"]
        eager = best(lambda f=function, a=arguments: f(*a), 7)
        yield row(f"torch {name}, eager", eager, own, "pyrope's", "> 1 wanted")
        try:
            compiled = torch.compile(function)
            compiled(*arguments)
        except Exception as error:  # no C++ compiler on this machine, for one
            yield Row(f"torch {name}: cannot be compiled here", note=type(error).__name__)
            continue
        fused = best(lambda f=compiled, a=arguments: f(*a))
        yield row(f"torch {name}, compiled", fused, own, "pyrope's", "> 1 wanted")


def tables() -> Iterator[Row]:
    n, rope = POSITIONS, Rope(128, 10000.0, "half")
    m, theta = np.arange(n), pyrope.frequencies(rope)

    def plain() -> tuple[np.ndarray, np.ndarray]:
        angle = m[:, None] * theta
        return np.cos(angle), np.sin(angle)

    for count in COUNTS:
        with threads(count):
            seconds = in_turns({"numpy": plain, "pyrope": lambda: pyrope.cos_sin(m, rope)}, 7)
        unit, own, each = seconds["numpy"][0], seconds["pyrope"][0], counted(count)
        if count == 1:
            yield row(f"numpy cos, sin of {n} x 64", unit, unit, "numpy")
        yield row(f"pyrope.cos_sin, {each}", own, unit, "numpy", "1.50" if count == 1 else "0.60")
    tracemalloc.start()
    result = pyrope.cos_sin(m, rope)
    beyond = tracemalloc.get_traced_memory()[1] - sum(table.nbytes for table in result)
    tracemalloc.stop()
    yield Row("memory of it beyond its result", f"{beyond / 2**20:.1f} MB", limit="64 MB")


def rows() -> Iterator[Row]:
    seconds: dict[str, float] = {}
    for count in COUNTS:
        yield Row(counted(count))
        with threads(count):
            yield from rotation(count, seconds)
    yield Row("other people's rotations")
    yield from plain_numpy(seconds["numpy.copyto"])
    yield from peers(seconds)
    yield Row("tables")
    yield from tables()


if __name__ == "__main__":
    show(rows())
