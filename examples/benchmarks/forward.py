"""How fast a model runs, as ratios to its bare matrix products and to transformers, all in one run.

    python examples/benchmarks/forward.py

A Llama of 12 layers × 768, 12 heads and a vocabulary of 32,000 with random weights, float32: decoding at batch 1 after
256 tokens, and prefill of 512 and of 2,048 tokens, logits of the last token alone. "bare matrix products" are those of
the same model, attention's by blocks included, and nothing else, with as many threads. All of it with one thread and
with every core, which needs threadpoolctl. Then SmolLM2, if the package that brings it is installed; with the word
smollm2, it alone and its memory. torch and transformers are optional. So is llama.cpp, which decodes SmolLM2 with the
same float32 weights if NODE_LLAMA_CPP names the directory where "npm install --ignore-scripts node-llama-cpp" was run.
Times are the shortest and the median of several rounds, taken in turns.
NumPy's OpenBLAS waits for all its threads in every product: run this where nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
from rows import COUNTS, Row, counted, in_turns, show, threads

import pyrope
from pyrope import Cache, Config, Layer, Model, Rope

VOCABULARY, WIDTH, HEADS, LAYERS, MLP, ROWS = 32000, 768, 12, 12, 2048, 256
PREFILLS = (512, 2048)
BEFORE, STEPS = 256, 40  # tokens before those that are decoded, and how many these are
SMOLLM2_STEPS = 100
PROMPT = list(range(20, 60))
LLAMA_CPP = os.environ.get("NODE_LLAMA_CPP", "")


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
        for i in range(len(config.layers)):
            np.matmul(wide, weights[f"layers.{i}.qkv.weight"].T)
            for start in range(0, n, rows):
                visible = every[:, : keys + start + rows]
                for q, k in zip(heads[:, start : start + rows], visible, strict=True):
                    np.matmul(np.matmul(q, k.T), k)
            np.matmul(wide, weights[f"layers.{i}.out.weight"].T)
            for start in range(0, n, rows):
                np.matmul(wide[start : start + rows], weights[f"layers.{i}.up.weight"].T)
                np.matmul(inner[start : start + rows], weights[f"layers.{i}.down.weight"].T)
        np.matmul(wide[:1], weights.get("head.weight", weights["embedding"]).T)

    return run


def transformers_models() -> dict[str, object]:
    """The same architecture by transformers, with fused and with plain attention; nothing if it is not installed."""
    try:
        import torch
        import transformers
    except ImportError:
        return {}
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
    limits = {"transformers, sdpa": "1.40"} | ({"transformers, eager": "1.00"} if n >= 2048 else {})
    for count in COUNTS:
        limits["bare matrix products"] = "1.50" if count == 1 else "1.15"
        with threads(count):
            seconds = in_turns(forms, rounds=5 if n > 1000 else 9)
        yield from report(f"prefill, {n} tokens, {counted(count)}", seconds, limits)


def decoding(model: Model, others: dict[str, object]) -> Iterator[Row]:
    before, rounds = BEFORE, STEPS
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, before)
    cache = Cache(model, before + len(COUNTS) * rounds + 1)
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
    for count in COUNTS:
        limits = {"bare matrix products": "1.50" if count == 1 else "1.20", "transformers, sdpa": "1.00"}
        with threads(count):
            seconds = in_turns(forms, rounds)
        yield from report(f"decoding after {before} tokens, {counted(count)}", seconds, limits)


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
    cache = Cache(model, len(PROMPT) + count)
    size += sum(array.nbytes for array in (*cache.keys, *cache.values))
    with tempfile.TemporaryDirectory() as directory:
        wide = pathlib.Path(directory, "float32.gguf")
        if LLAMA_CPP:
            widen(path, wide)
        for threads_used in COUNTS:
            yield Row(f"SmolLM2 in float32, decoding, {counted(threads_used)}")
            with threads(threads_used):
                own = max(decoded(model, count) for _ in range(3))
            limit = "20 or more" if threads_used > 1 else ""
            yield Row("pyrope", f"{own:.1f} /s", limit=limit, note="tokens per second")
            if LLAMA_CPP:
                other = max(llama_cpp(wide, threads_used, count) for _ in range(3))
                yield Row("llama.cpp, the same weights", f"{other:.1f} /s", own / other, "pyrope / it", "1.00 or more")
    if not LLAMA_CPP:
        yield Row("llama.cpp", "left out", note="NODE_LLAMA_CPP does not name a directory with node-llama-cpp")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if before < 150_000 and not LLAMA_CPP:  # kB: this process had been small: its peak is what loading and running took
        yield Row("peak memory", f"{peak / 1e3:.0f} MB", peak * 1024 / size, "x weights+cache", "1.30")


def decoded(model: Model, count: int) -> float:
    """Tokens in a second, one at a time."""
    cache = Cache(model, len(PROMPT) + count)
    pyrope.forward(model, PROMPT, cache=cache, logits="last")
    start = time.perf_counter()
    for token in range(count):
        pyrope.forward(model, [token], cache=cache, logits="last")
    return count / (time.perf_counter() - start)


def llama_cpp(model: pathlib.Path, threads_used: int, count: int) -> float:
    """Tokens in a second by llama.cpp."""
    script = pathlib.Path(__file__).with_name("llama_cpp.mjs")
    command = ["node", script, LLAMA_CPP, model, str(threads_used), str(count)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def widen(source: pathlib.Path, target: pathlib.Path) -> None:
    """A copy of a GGUF file with all weights in float32."""
    import gguf

    reader, own = gguf.GGUFReader(source), ("general.architecture", "general.file_type", "general.quantization_version")
    writer = gguf.GGUFWriter(target, reader.fields[own[0]].contents())
    for name, field in reader.fields.items():
        if name not in own and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.reshape(tensor.shape[::-1].tolist()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arrays(model: Model) -> list[np.ndarray]:
    return [array for array in model.weights.values() if array.ndim == 2]


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
