"""How much memory a check takes, as docs/diagnosis.md says it."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest
from memory import little_memory

import pyrope
from pyrope import Rope

ROPE = Rope(64, 10000.0, "half")
TEXT = (pathlib.Path(__file__).parent.parent / "docs/diagnosis.md").read_text()


def rotation(x, positions):
    p = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** -(np.arange(p) / p)
    cos, sin, a, b = np.cos(angles), np.sin(angles), x[..., :p], x[..., p:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def softmax(q, k, v):
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    n, m = q.shape[-2], k.shape[-2]
    scores = np.where(np.tri(n, m, m - n, dtype=bool), q @ k.swapaxes(-1, -2) / np.float32(8), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).astype(q.dtype)


def linear(q, k, v, positions):
    return pyrope.linear_attention(q, k, v, positions, ROPE, causal=True)


@pytest.mark.parametrize(
    "what, check",
    [
        ("rotation, head size 128", lambda: pyrope.check_rotation(rotation, Rope(128, 10000.0, "half"))),
        ("softmax attention, 4 heads of 64", lambda: pyrope.check_attention(softmax)),
        ("linear attention, 4 heads of 64", lambda: pyrope.check_linear_attention(linear, rope=ROPE)),
    ],
)
def test_a_check_takes_no_more_memory_than_the_page_says(what, check):
    figure = re.search(rf"{re.escape(what)} \| at most (\d+) MB", TEXT)
    with little_memory(1e6 * int(figure[1])):
        assert check().verdict == "right"
