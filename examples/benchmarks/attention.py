"""How fast pyrope attends, as ratios to torch and to bare matrix products, all in one run.

    python examples/benchmarks/attention.py

Softmax: causal, float32, 8 heads × 4096 positions × 64 features, and memory at 32,768 positions. Linear: causal,
Eq. (19), the same heads, from 2,048 to 262,144 positions, and decoding token by token. "bare matrix products" are
those of the same blocks or chunks and nothing else, with as many threads. All of it with one thread and with every
core; the latter needs threadpoolctl, without which the products alone have several threads. torch is optional.
Times are the shortest of several rounds, taken in turns. NumPy's OpenBLAS waits for all its threads in every
product: run this where nothing else runs.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
from rows import CONTROL, COUNTS, Row, counted, in_turns, show, threads

import pyrope
from pyrope import Rope

HEADS, LENGTH, HEAD_DIM, ROWS = 8, 4096, 64, 256
CHUNK = 192  # tokens: of the products that linear attention is held against, whatever it uses itself
MEMORY = 32768  # positions
LENGTHS = (2048, 4096, 32768, 262144)  # of linear attention; times per token are held against the second
BEFORE = (16, 4096, 262144)  # tokens before the one that is decoded
STEPS = 500


def inputs(n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((HEADS, n, HEAD_DIM), dtype=np.float32) for _ in "qkv"]


def products(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    """The matrix products of causal attention by blocks, without the softmax between them."""
    spare = np.empty(ROWS * LENGTH, np.float32)
    for head in range(HEADS):
        for start in range(0, LENGTH, ROWS):
            stop = start + ROWS
            scores = spare[: ROWS * stop].reshape(ROWS, stop)
            np.matmul(q[head, start:stop], k[head, :stop].T, out=scores)
            np.matmul(scores, v[head, :stop])


def torch_forms(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Callable[[], object]]:
    """torch's fused attention and a plain one; nothing if torch is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    a, b, c = (torch.from_numpy(x)[None] for x in (q, k, v))
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def eager() -> torch.Tensor:
        scores = (a @ b.transpose(-1, -2)) * HEAD_DIM**-0.5
        return scores.masked_fill(future, float("-inf")).softmax(-1) @ c

    fused = torch.nn.functional.scaled_dot_product_attention
    return {"torch SDPA": lambda: fused(a, b, c, is_causal=True), "torch eager": eager}


def softmax_speed() -> Iterator[Row]:
    arrays = inputs(LENGTH)
    forms: dict[str, Callable[[], object]] = {
        "pyrope.attention": lambda: pyrope.attention(*arrays, causal=True),
        "bare matrix products": lambda: products(*arrays),
        **torch_forms(*arrays),
    }
    for count in COUNTS:
        yield Row(f"causal softmax, {HEADS} x {LENGTH} x {HEAD_DIM}, {counted(count)}")
        limits = {"torch eager": "0.33"}
        if count > 1:
            limits |= {"torch SDPA": "1.10", "bare matrix products": "1.35"}
        with threads(count):
            seconds = {name: times[0] for name, times in in_turns(forms, 7).items()}
        for name, time_taken in seconds.items():
            ratio = seconds["pyrope.attention"] / time_taken
            yield Row(name, f"{time_taken * 1e3:.0f} ms", ratio, "pyrope / it", limits.get(name, ""))
    if "torch SDPA" not in forms:
        yield Row("torch", "left out", note="it is not installed")


def softmax_memory() -> Iterator[Row]:
    n = MEMORY
    arrays = inputs(n)
    tracemalloc.start()
    out = pyrope.attention(*arrays, causal=True)
    beyond = tracemalloc.get_traced_memory()[1] - out.nbytes
    tracemalloc.stop()
    yield Row("memory beyond in- and outputs", f"{beyond / 1e6:.0f} MB", limit="300 MB", note=f"for {n} positions")


def chunk_products(n: int) -> Callable[[], None]:
    """The matrix products of chunked linear attention, and nothing else."""
    q, k, v = inputs(CHUNK)
    lower = np.tril(np.ones((CHUNK, CHUNK), np.float32))
    scores = np.empty((HEADS, CHUNK, CHUNK), np.float32)
    out, state = np.empty_like(q), np.zeros((HEADS, HEAD_DIM, HEAD_DIM), np.float32)

    def run() -> None:
        for _ in range(n // CHUNK):
            np.matmul(q, k.swapaxes(-1, -2), out=scores)
            np.matmul(scores, v, out=out)
            np.matmul(q, state, out=out)
            np.matmul(lower, k, out=out)
            np.matmul(k.swapaxes(-1, -2), v, out=state)

    return run


def linear_speed(count: int) -> Iterator[Row]:
    rope, flat, most = Rope(HEAD_DIM, 10000.0, "half"), 0.0, "2.50" if count == 1 else "1.30"
    for n in LENGTHS:
        arrays, m = inputs(n), np.arange(n)
        out, tables = np.empty_like(arrays[0]), pyrope.rotation_tables(m, rope, like=arrays[0])
        options = {"causal": True, "tables": tables, "out": out}  # as a model has them ready for all its layers
        forms = {
            "linear": lambda a=arrays, m=m, o=options: pyrope.linear_attention(*a, m, rope, **o),
            "products": chunk_products(n),
        }
        if n <= LENGTHS[1]:
            forms["softmax"] = lambda a=arrays: pyrope.attention(*a, causal=True)
        with threads(count):
            seconds = {name: times[0] for name, times in in_turns(forms, max(3, min(9, 2**17 // n))).items()}
        each = seconds["linear"] / n
        flat = each if n == LENGTHS[1] else flat
        if "softmax" in seconds:
            note, limit = f"softmax takes {seconds['softmax'] / seconds['linear']:.2f} times as long", most
        else:
            note = f"{each / flat:.2f} times as long, for each token, as at {LENGTHS[1]}"
            limit = f"{most}, 1.15"
        ratio = seconds["linear"] / seconds["products"]
        name = f"linear, {n} positions, per token"
        yield Row(name, f"{each * 1e6:.2f} µs", ratio, "x its products", limit, note)


def decoding() -> Iterator[Row]:
    rope, (x, *_) = Rope(HEAD_DIM, 10000.0, "half"), inputs(1)
    for before in BEFORE:
        past = np.repeat(x, before, axis=-2)
        state = pyrope.linear_state(past, past, np.arange(before), rope)

        def step(state: object = state, before: int = before) -> object:
            return pyrope.linear_step(x, x, x, [before], rope, state=state)

        seconds = in_turns({"step": step}, rounds=STEPS)["step"][0]
        tracemalloc.start()
        step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        yield Row(f"linear, one token after {before}", f"{seconds * 1e6:.0f} µs", note=f"{peak} bytes at most")


def rows() -> Iterator[Row]:
    if not CONTROL:
        yield Row("threadpoolctl", "left out", note="it is not installed: attention runs in order, its products do not")
    yield from softmax_speed()
    yield from softmax_memory()
    for count in COUNTS:
        yield Row(f"causal linear attention, {counted(count)}")
        yield from linear_speed(count)
    yield from decoding()


if __name__ == "__main__":
    show(rows())
