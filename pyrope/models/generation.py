"""`generate`: token after token, each the likeliest or drawn at random."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from .. import checks
from ..backend import on_host, to_numpy
from .architecture import Model
from .transformer import Cache, check_tokens, forward


def generate(
    model: Model, tokens: Any, max_new_tokens: int, temperature: float = 0, top_k: int | None = None,
    top_p: float | None = None, seed: int | None = None, stop: Collection[int] = (),
) -> Iterator[int]:  # fmt: skip
    """Continues one sequence of tokens (n,), and yields each new token as it comes.

    ``temperature`` 0 takes the likeliest token; else it is drawn, by ``seed``, from softmax(logits/temperature), of the
    ``top_k`` likeliest alone, or of the fewest that together have the probability ``top_p``. A token of ``stop`` ends
    the sequence and is not yielded. Ropes that depend on the length (dynamic NTK, LongRoPE) are fixed from the first
    token on, at the length of the prompt and ``max_new_tokens`` together.
    """
    ids = check_tokens(tokens, checks.instance("model", model, Model).config.vocabulary)
    if np.ndim(on_host(tokens)) != 1:
        raise ValueError(f"tokens must be one sequence, (n,), had shape {np.shape(on_host(tokens))}")
    ends = check_sampling(max_new_tokens, temperature, top_k, top_p, seed, stop)
    cache = Cache(model, ids.shape[1] + max_new_tokens)
    rng = np.random.default_rng(seed)

    def steps() -> Iterator[int]:
        new = ids[0]
        for _ in range(max_new_tokens):
            logits = to_numpy(forward(model, new, cache=cache, logits="last"))[0]
            token = sample(logits, temperature, top_k, top_p, rng)
            if token in ends:
                return
            yield token
            new = np.array([token], np.int64)

    return steps()


def check_sampling(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int | None,
    stop: Collection[int] = (),
) -> frozenset[int]:  # fmt: skip
    """Checks the options of `generate`, also before a model is loaded, and returns the ids that end a text."""
    checks.integer("max_new_tokens", max_new_tokens, 1)
    checks.real("temperature", temperature, 0)
    if temperature == 0 and (top_k, top_p, seed) != (None, None, None):
        raise ValueError("top_k, top_p and seed need a temperature above 0: at 0 the likeliest token is taken")
    if top_k is not None:
        checks.integer("top_k", top_k, 1)
    if top_p is not None:
        checks.real("top_p", top_p, 0, 1, open=True)
    if seed is not None:
        checks.integer("seed", seed, 0)
    return frozenset(checks.integers("stop", list(stop) if isinstance(stop, Collection) else stop, 0))


def sample(
    logits: np.ndarray[Any, Any], temperature: float, top_k: int | None, top_p: float | None, rng: np.random.Generator
) -> int:
    """One token id, from logits (v,) on the host.

    >>> sample(np.array([1.0, 3.0, 2.0]), 0, None, None, np.random.default_rng(0))
    1
    """
    if not np.isfinite(logits).all():
        raise ValueError("logits must be finite, and some are not: weights or input may hold NaN or inf")
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[:top_k]
    scores = logits[order].astype(np.float64)
    # exp(scores/temperature) overflows at a tiny temperature, and inf/inf is NaN: the greatest is taken off first.
    with np.errstate(over="ignore"):  # a quotient of −inf is right, for its exponential is 0
        weights = np.exp((scores - scores[0]) / temperature)
    weights /= weights.sum()
    if top_p is not None:
        kept = int(np.searchsorted(weights.cumsum(), top_p)) + 1
        order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
    return int(rng.choice(order, p=weights))
