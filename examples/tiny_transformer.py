"""A tiny transformer from random weights: run it, look inside, decode with a cache, and shift all positions.

    python examples/tiny_transformer.py

Random weights mean nothing, but they obey every law: this is a complete forward pass of two layers.
"""

from typing import Any

import numpy as np

import pyrope
from pyrope import Cache, Config, Layer, Rope


def tiny() -> Config:
    rope = Rope(head_dim=16, base=10000.0, layout="half")
    return Config(
        vocabulary=50, width=64, heads=4, key_heads=2, head_dim=16, mlp_width=128, layers=(Layer(rope),) * 2,
        norm="rms", eps=1e-6, activation="silu", gated=True, block="sequential", causal=True,
    )  # fmt: skip


def main() -> None:
    model = pyrope.random_model(tiny(), seed=0, dtype="float64")
    tokens = [3, 14, 15, 9, 2, 6]
    trace: dict[str, Any] = {}
    logits = pyrope.forward(model, tokens, trace=trace.__setitem__)
    print(f"logits of {len(tokens)} tokens: {logits.shape}; {len(trace)} intermediates, such as")
    for name in list(trace)[:6]:
        print(f"    {name:<28}{trace[name].shape}")

    cache = Cache(model, len(tokens))
    steps = [pyrope.forward(model, [token], cache=cache) for token in tokens]
    print(f"token by token with a cache: off by {np.abs(np.concatenate(steps) - logits).max():.1e}")

    far = pyrope.forward(model, tokens, positions=np.arange(6) + 10**6)
    print(f"all positions a million later: off by {np.abs(far - logits).max():.1e}: distances alone matter, Eq. (16)")
    apart = pyrope.forward(model, tokens, positions=np.arange(6) * 2)
    print(f"every second position: off by {np.abs(apart - logits).max():.2f}")

    print("greedy:  ", list(pyrope.generate(model, tokens, max_new_tokens=8)))
    print("sampled: ", list(pyrope.generate(model, tokens, max_new_tokens=8, temperature=1.0, seed=1)))


if __name__ == "__main__":
    main()
