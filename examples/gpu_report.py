"""Check and measure pyrope on your GPU, and print a block to paste into an issue.

    python examples/gpu_report.py [cupy]

The oracle judges the functions on the device, and a model's logits are compared with the definition's in float64, as
parts of the largest. Times are the shortest of five, with one thread. By default NumPy does the same on the CPU.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

for library in ("PYROPE", "OPENBLAS_NUM", "OMP_NUM", "MKL_NUM"):  # read once, when NumPy is imported
    os.environ[f"{library}_THREADS"] = "1"
import numpy as np  # noqa: E402

import pyrope  # noqa: E402
from pyrope import Config, Layer, Model, Rope, definition  # noqa: E402
from pyrope.backend import get  # noqa: E402
from pyrope.oracle import adapters  # noqa: E402

HALF, INTERLEAVED = (Rope(head_dim=64, base=10000.0, layout=layout) for layout in ("half", "interleaved"))


def reports(dtype: str, wrap: Callable[[Any], Any]) -> Iterator[tuple[str, pyrope.Report]]:
    """What the oracle says of functions of device arrays, of which ``wrap`` makes functions of NumPy arrays."""
    for rope in (HALF, INTERLEAVED):
        turn = wrap(lambda x, m, rope=rope: pyrope.rotate(x, m, rope))
        yield f"rotate, {rope.layout}", pyrope.check_rotation(turn, rope, dtype=dtype)
    softmax = wrap(lambda q, k, v: pyrope.attention(q, k, v, causal=True))
    yield "attention", pyrope.check_attention(softmax, heads=2, dtype=dtype)
    linear = wrap(lambda q, k, v, m: pyrope.linear_attention(q, k, v, m, HALF, causal=True))
    yield "linear_attention", pyrope.check_linear_attention(linear, rope=HALF, heads=2, dtype=dtype)


def llama(backend: str, dtype: str) -> Model:
    config = Config(
        vocabulary=1000, width=256, heads=4, key_heads=2, head_dim=64, mlp_width=512, layers=(Layer(HALF),) * 2,
        norm="rms", eps=1e-6, activation="silu", gated=True, block="sequential", causal=True,
    )  # fmt: skip
    return pyrope.random_model(config, seed=0, backend=backend, dtype=dtype)


def error(model: Model, exact: Model, tokens: np.ndarray) -> float:
    """How far off the logits of a model are from the definition's, as a part of the largest."""
    tables, pairs = pyrope.cos_sin(np.arange(len(tokens)), HALF), definition.pairs("half", 64)
    turns = [lambda x: definition.rotate(x, *tables, *pairs)] * 2
    truth = definition.forward(exact.config, exact.weights, tokens[None], turns)[0]
    return float(np.abs(pyrope.to_numpy(pyrope.forward(model, tokens)) - truth).max() / np.abs(truth).max())


def work(xp: Any, model: Model, n: int = 1024) -> Iterator[tuple[str, Callable[[], Any]]]:
    m, (q, k, v) = np.arange(n), pyrope.from_numpy(np.random.default_rng(0).random((3, 8, n, 64), np.float32), xp)
    yield "rotate", lambda: pyrope.rotate(q, m, HALF)
    yield "attention", lambda: pyrope.attention(q, k, v, causal=True)
    yield "linear_attention", lambda: pyrope.linear_attention(q, k, v, m, HALF, causal=True)
    yield "forward of 256 tokens", lambda: pyrope.forward(model, m[:256], logits="last")


def main(backend: str = "numpy") -> None:
    xp = get(backend)
    device = "CPU (NumPy)" if xp is np else xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
    print(f"```\npyrope {pyrope.__version__}, {xp.__name__} {xp.__version__} on {device}")
    for dtype in ("float16", "float32", "float64"):
        for what, report in reports(dtype, adapters.from_cupy if xp is not np else lambda fn: fn):
            print(f"{dtype} {what:<24} {', '.join((report.verdict, *report.faults))}", flush=True)
    for dtype in ("float64", "float32"):
        off = error(model := llama(backend, dtype), llama("numpy", "float64"), np.arange(32))
        print(f"{dtype} forward                  off by {off:.1e}")
    for what, function in work(xp, model):  # the device has finished when a number of the result has arrived
        starts = [time.perf_counter() for _ in range(6) if np.isfinite(float(function().ravel()[0]))]
        print(f"float32 {what:<24} {np.diff(starts).min() * 1e3:.3f} ms", flush=True)
    print("```")


if __name__ == "__main__":
    main(*sys.argv[1:])
