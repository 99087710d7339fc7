"""How fast a model runs, as ratios to its bare matrix products and to transformers, all in one run.

    python examples/benchmarks/forward.py

A Llama of 12 layers × 768, 12 heads and a vocabulary of 32,000 with random weights, float32, two threads: decoding at
batch 1 after 256 tokens, and prefill of 512 and of 2,048 tokens, logits of the last token alone. "bare matrix
products" are those of the same model, attention's by blocks included, and nothing else. Then SmolLM2, if the package
that brings it is installed; with the word smollm2, it alone and its memory. torch and transformers are optional. Times
are the shortest and the median of several rounds, taken in turns.
NumPy's OpenBLAS waits for all its threads in every product: run this where nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")  # before NumPy is imported

import numpy as np
from rows import Row, show

import pyrope
from pyrope import Cache, Config, Layer, Model, Rope

VOCABULARY, WIDTH, HEADS, LAYERS, MLP, ROWS = 32000, 768, 12, 12, 2048, 256
PREFILLS = (512, 2048)
BEFORE, STEPS = 256, 40  # tokens before those that are decoded, and how many these are
SMOLLM2_STEPS = 100


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The times of each, in seconds, sorted: taken in turns, so that a busy moment hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: sorted(times) for name, times in seconds.items()}


def report(title: str, seconds: dict[str, list[float]], limits: dict[str, str]) -> Iterator[Row]:
    yield Row(title)
    own = seconds["pyrope"]
    for name, times in seconds.items():
        best, middle = times[0], statistics.median(times)
        note = f"median {middle * 1e3:.1f} ms, ratio {statistics.median(own) / middle:.2f}"
        yield Row(name, f"{best * 1e3:.1f} ms", own[0] / best, "pyrope / it", limits.get(name, ""), note)


def llama() -> Model:
    layer = Layer(Rope(WIDTH // HEADS, 10000.0, "half"))
    config = Config(
        vocabulary=VOCABULARY, width=WIDTH, heads=HEADS, key_heads=HEADS, head_dim=WIDTH // HEADS, mlp_width=MLP,
        layers=(layer,) * LAYERS, norm="rms", eps=1e-6, activation="silu", gated=True, block="sequential", causal=True,
    )  # fmt: skip
    return pyrope.random_model(config, seed=0)


def products(model: Model, n: int, keys: int = 0) -> Callable[[], None]:
    """The matrix products of a forward pass of n tokens after so many keys, without anything between them."""
    config, weights = model.config, model.weights
    wide, inner = np.ones((n, config.width), np.float32), np.ones((n, config.mlp_width), np.float32)
    heads = np.ones((config.key_heads, config.heads // config.key_heads * n, config.head_dim), np.float32)
    rows = min(n, ROWS)
    every = np.ones((config.key_heads, keys + n, config.head_dim), np.float32)

    def run() -> None:
        for layer in weights.layers:
            np.matmul(wide, layer.qkv.weight.T)
            for start in range(0, n, rows):
                visible = every[:, : keys + start + rows]
                for q, k in zip(heads[:, start : start + rows], visible, strict=True):
                    np.matmul(np.matmul(q, k.T), k)
            np.matmul(wide, layer.out.weight.T)
            for start in range(0, n, rows):
                np.matmul(wide[start : start + rows], layer.up.weight.T)
                np.matmul(inner[start : start + rows], layer.down.weight.T)
        np.matmul(wide[:1], weights.head.weight.T)

    return run


def transformers_models() -> dict[str, object]:
    """The same architecture by transformers, with fused and with plain attention; nothing if it is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return {}
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    options = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": MLP}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **options)
    made = {}
    for kind in ("sdpa", "eager"):
        config._attn_implementation = kind
        made[f"transformers, {kind}"] = transformers.LlamaForCausalLM(config).eval()
    return made


def prefill(model: Model, others: dict[str, object], n: int) -> Iterator[Row]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, n)
    forms: dict[str, Callable[[], object]] = {
        "pyrope": lambda: pyrope.forward(model, tokens, logits="last"),
        "bare matrix products": products(model, n),
    }
    for name, other in others.items():
        import torch

        batch = torch.from_numpy(tokens)[None]
        forms[name] = lambda other=other, batch=batch: other(batch, logits_to_keep=1, use_cache=False)  # type: ignore[operator]
    limits = {
        "bare matrix products": "1.50",
        "transformers, sdpa": "1.40",
        "transformers, eager": "1.00",
    }
    if n < 2048:
        del limits["transformers, eager"]
    yield from report(f"prefill, {n} tokens", in_turns(forms, rounds=5 if n > 1000 else 9), limits)


def decoding(model: Model, others: dict[str, object]) -> Iterator[Row]:
    before, rounds = BEFORE, STEPS
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, before)
    cache = Cache(model, before + rounds + 1)
    pyrope.forward(model, tokens, cache=cache, logits="last")
    forms: dict[str, Callable[[], object]] = {
        "pyrope": lambda: pyrope.forward(model, [7], cache=cache, logits="last"),
        "bare matrix products": products(model, 1, before),
    }
    for name, other in others.items():
        import torch

        past = other(torch.from_numpy(tokens)[None], use_cache=True).past_key_values  # type: ignore[operator]
        one = torch.tensor([[7]])
        forms[name] = lambda other=other, past=past, one=one: other(one, past_key_values=past)  # type: ignore[operator]
    limits = {"bare matrix products": "1.50", "transformers, sdpa": "1.00"}
    yield from report(f"decoding after {before} tokens", in_turns(forms, rounds), limits)


def smollm2() -> Iterator[Row]:
    count = SMOLLM2_STEPS
    try:
        path = pyrope.find_smollm2()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model = pyrope.load(path)
    except (ImportError, FileNotFoundError) as error:
        yield Row("SmolLM2", "left out", note=str(error))
        return
    size = sum(weight.nbytes for weight in _arrays(model))
    prompt = list(range(20, 60))
    cache = Cache(model, len(prompt) + count)
    pyrope.forward(model, prompt, cache=cache, logits="last")
    start = time.perf_counter()
    for token in range(count):
        pyrope.forward(model, [token], cache=cache, logits="last")
    speed = count / (time.perf_counter() - start)
    size += sum(array.nbytes for array in (*cache.keys, *cache.values))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield Row("SmolLM2, decoding", f"{speed:.1f} /s", limit="20 or more", note="tokens per second")
    if before < 150_000:  # kB: this process had been small, so that its peak is what loading and running took
        yield Row("peak memory", f"{peak / 1e3:.0f} MB", peak * 1024 / size, "x weights+cache", "1.30")


def _arrays(model: Model) -> list[np.ndarray]:
    weights, matrices = model.weights, [model.weights.embedding]
    for layer in weights.layers:
        matrices += [layer.qkv.weight, layer.out.weight, layer.up.weight, layer.down.weight]
    return matrices


def rows() -> Iterator[Row]:
    model, others = llama(), transformers_models()
    if not others:
        yield Row("torch and transformers", "left out", note="they are not installed")
    yield from decoding(model, others)
    for n in PREFILLS:
        yield from prefill(model, others, n)
    yield from smollm2()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("only", nargs="?", choices=("smollm2",), help="it alone, so that its peak memory can be seen")
    show(smollm2() if parser.parse_args().only else rows())
