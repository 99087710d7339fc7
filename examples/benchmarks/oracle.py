"""What a check costs: CPU time and memory by head size and verdict, for candidates in plain NumPy.

    python examples/benchmarks/oracle.py

The limits are seconds of CPU time, all cores together; what a slow candidate takes for its own calls comes on top.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rows import Row, show

import pyrope
from pyrope import Report, Rope

SIZES = (64, 128, 576)
LIMITS = {64: (1, 2), 128: (1, 2), 576: (5, 5)}  # seconds, where it is right and where it is wrong
ATTENTION = (64, 128)


def half(base: float, scale: Any = 1.0) -> Callable[..., Any]:
    """Rotate-half as people write it, times a number."""

    def fn(x: Any, positions: Any) -> Any:
        p = x.shape[-1] // 2
        angles = positions[:, None] * base ** -(np.arange(p) / p)
        cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :p], x[..., p:]
        return (np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1) * scale).astype(x.dtype)

    return fn


def softmax(q: Any, k: Any, v: Any, scale: float = 1.0, power: float = 1.0) -> Any:
    """Causal attention with all scores in memory."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    n, m = q.shape[-2], k.shape[-2]
    scores = np.where(np.tri(n, m, m - n, dtype=bool), q @ k.swapaxes(-1, -2) * (scale / np.sqrt(q.shape[-1])), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) ** power
    return (weights / weights.sum(axis=-1, keepdims=True) ** power @ v).astype(q.dtype)


def measured(what: str, check: Callable[[], Report], verdict: str, limit: float) -> Row:
    check()  # what is cached by the first check is not its cost
    start = time.process_time()
    report = check()
    seconds = time.process_time() - start
    tracemalloc.start()
    check()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    if report.verdict != verdict:
        raise RuntimeError(f"{what}: expected {verdict}, the verdict was {report.verdict}")
    return Row(
        what if what == verdict else f"{verdict}: {what}",
        f"{seconds:.2f} s",
        None,
        "",
        f"{limit:g} s",
        f"at most {peak:.0f} MB",
    )


def rows() -> Iterator[Row]:
    for d in SIZES:
        rope, odd = Rope(d, 10000.0, "half"), np.linspace(1, 1.3, d)
        yield Row(f"check_rotation, head size {d}")
        cases = (
            ("right", half(1e4), "right"),
            ("wrong base", half(5e5), "wrong"),
            ("unexplained", half(1e4, odd), "wrong"),
        )
        for name, fn, verdict in cases:
            limit = LIMITS.get(d, (1, 2))[verdict == "wrong"]
            yield measured(name, lambda fn=fn, rope=rope: pyrope.check_rotation(fn, rope), verdict, limit)  # type: ignore[misc]
    for d in ATTENTION:
        yield from attention_rows(d)


def attention_rows(d: int) -> Iterator[Row]:
    """Softmax and linear attention of 4 heads of d features."""
    yield Row(f"check_attention, head size {d}")
    for name, options, verdict in (
        ("right", {}, "right"), ("wrong scale", {"scale": 2.0}, "wrong"), ("unexplained", {"power": 1.3}, "wrong"),
    ):  # fmt: skip
        fn = lambda q, k, v, options=options: softmax(q, k, v, **options)  # noqa: E731
        yield measured(name, lambda fn=fn: pyrope.check_attention(fn, head_dim=d), verdict, 2)  # type: ignore[misc]
    rope = Rope(d, 10000.0, "half")
    yield Row(f"check_linear_attention, head size {d}")
    for name, base, factor in (("right", 1e4, 1.0), ("wrong base", 5e5, 1.0), ("unexplained", 1e4, 1.21)):
        used = Rope(d, base, "half")

        def linear(q: Any, k: Any, v: Any, at: Any, used: Rope = used, factor: float = factor) -> Any:
            return (pyrope.linear_attention(q, k, v, at, used, causal=True) * factor).astype(q.dtype)

        verdict = "right" if name == "right" else "wrong"
        yield measured(name, lambda fn=linear: pyrope.check_linear_attention(fn, rope=rope), verdict, 2)  # type: ignore[misc]


if __name__ == "__main__":
    show(rows())
