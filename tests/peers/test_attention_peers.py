"""Other people's attention, judged by the oracle, forward and backward: torch, transformers, JAX and MLX."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import elu, scaled_dot_product_attention
from transformers.models.llama import modeling_llama as llama

import pyrope
from pyrope import Rope, YaRN

D = 16
HALF, MIXED = Rope(D, 1e4, "half"), Rope(D, 1e4, "interleaved-to-half", scaling=YaRN(4.0, 64))
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
check_attention = functools.partial(pyrope.check_attention, framework="torch")


@pytest.fixture(autouse=True)
def plain_products():
    mx.set_default_device(mx.cpu)
    was, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    yield  # without oneDNN, whose bfloat16 products need instructions that not every CPU has
    torch.backends.mkldnn.enabled = was


def lower(n, m, window=None):
    """The bottom-right causal mask, True is seen."""
    away = torch.arange(m - n, m)[:, None] - torch.arange(m)
    return (away >= 0) & (away < (window or m + 1))


def turned(x, at, rope):
    """R·x in torch, in the dtype of x, from exact tables: x (…, n, d), at (…, n)."""
    cos, sin = (torch.from_numpy(np.asarray(t)).to(x.dtype) for t in pyrope.cos_sin(at.numpy(), rope))
    a, b = (x[..., ::2], x[..., 1::2]) if rope.layout.startswith("interleaved") else x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def grouped(q, *others):
    return (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in others)


# ── Right ones ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sdpa(
    q, k, v, positions=None, mask=None, segments=None, *, backend, window=None, scale=None, causal=True, rope=None
):
    seen = lower(q.shape[2], k.shape[2], window) if causal else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if rope is not None:
        q, k = (turned(x, positions[:, None], rope) for x in (q, k))
    seen = seen if mask is None else seen & mask
    seen = seen if segments is None else seen & (segments[:, None, :, None] == segments[:, None, None, :])
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, *grouped(q, k, v), attn_mask=seen, scale=scale)


def eager(q, k, v, at=None, *, scale=0.25, causal=True, window=None, softcap=None, rope=None):
    """Every step in the dtype of q: the coarsest that is right."""
    if rope is not None:
        q, k = (turned(x, at[:, None], rope) for x in (q, k))
    k, v = grouped(q, k, v)
    s = q @ k.transpose(-1, -2) * scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    seen = lower(*s.shape[-2:], window) if causal else torch.ones(s.shape[-2:], dtype=torch.bool)
    rows = seen.any(-1)[..., None]  # a row that sees nothing is zeros
    s = s.masked_fill(~seen & rows, -math.inf)
    return torch.softmax(s, -1).masked_fill(~rows, 0.0) @ v


def chunked(q, k, v, at, *, rope, size=16):
    """Linear attention, Eq. (19); in float16 g/D is below the normal numbers: what is lost there is rounding."""
    k, v = grouped(q, k, v)
    fq, fk = (elu(x) + 1 for x in (q, k))
    tq, tk = (turned(x, at[:, None], rope.rotation_only) for x in (fq, fk))
    parts, states, sums = [], 0, 0
    for a, b, c, d, e in zip(*(x.split(size, dim=-2) for x in (tq, tk, fq, fk, v)), strict=True):
        seen = torch.ones(a.shape[-2], a.shape[-2], dtype=q.dtype).tril()
        above = (a @ b.transpose(-1, -2) * seen) @ e + (a @ states if parts else 0)
        below = (c @ d.transpose(-1, -2) * seen).sum(-1, keepdim=True) + (c @ sums if parts else 0)
        parts.append(above / below)
        states, sums = states + b.transpose(-1, -2) @ e, sums + d.sum(-2)[..., None]
    return torch.cat(parts, -2)


def in_jax(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).swapaxes(1, 2)


def in_mlx(q, k, v):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=D**-0.5, mask="causal")


class Row(NamedTuple):
    fn: Any
    spec: dict[str, Any] = {}  # said to the function and to the check
    options: dict[str, Any] = {}  # said to the check alone
    framework: str = "torch"
    dtypes: tuple[str, ...] = tuple(DTYPES)
    check: Any = pyrope.check_attention


SPECS = {
    "plain": {}, "two-sided": {"causal": False}, "window": {"window": 3}, "softcap": {"softcap": 2.0, "scale": 0.5},
    "rope": {"rope": HALF}, "YaRN": {"rope": MIXED},
}  # fmt: skip
TORCH = {
    "grouped": ({}, {"key_heads": 2}), "two-sided": ({"causal": False}, {}), "window": ({"window": 5}, {"heads": 3}),
    "scale": ({"scale": 0.5}, {}), "rope": ({"rope": Rope(64, 1e4, "half")}, {}), "backward": ({}, {"backward": True}),
}  # fmt: skip
BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
SMALL = {"heads": 2, "head_dim": D}
BACKWARD = {"heads": 4, "key_heads": 2, "backward": True}
UNSEEN = {"cache": False}  # where queries see no key, MLX has the mean of all values
ROWS = {
    **{f"torch {kind}, {name}": Row(functools.partial(sdpa, backend=backend), spec, options)
       for kind, backend in BACKENDS.items() for name, (spec, options) in TORCH.items()},
    **{f"autograd, {name}": Row(eager, spec, BACKWARD | {"head_dim": D}) for name, spec in SPECS.items()},
    **{f"autograd of Eq. (19), {name}, {size}":
       Row(functools.partial(chunked, size=size), SPECS[name], BACKWARD, check=pyrope.check_linear_attention)
       for name in ("rope", "YaRN") for size in (16, 10**4)},
    **{f"{library}, {backward}": Row(fn, {}, SMALL | more | {"backward": backward}, library, ("float32", "bfloat16"))
       for library, fn, more in (("jax", jax.jit(in_jax), {}), ("mlx", in_mlx, UNSEEN)) for backward in (False, True)},
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", [(name, dtype) for name, row in ROWS.items() for dtype in row.dtypes])
def test_right(name, dtype):
    row = ROWS[name]
    fn = functools.partial(row.fn, **row.spec) if row.spec else row.fn
    report = row.check(fn, framework=row.framework, dtype=DTYPES[dtype], **row.spec, **row.options)
    assert report.verdict == "right", report


# ── What is known of others ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_causal_flag_of_torch_begins_at_the_top_left(dtype):
    def fn(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    report = check_attention(fn, dtype=DTYPES[dtype])
    assert report.ok and any("top left" in note for note in report.notes), report
    assert check_attention(fn, dtype=DTYPES[dtype], cache=False).ok
    assert check_attention(fn, dtype=DTYPES[dtype], cache=True).faults == ("causality: from the top left",)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_attention_of_transformers(dtype):
    """Right without a mask, but in float64: its softmax is in float32. Rows that see nothing are not zeros. In float16 it
    scales after the product: NaN where q·k is beyond 65504."""
    rope = Rope(64, 10000.0, "half")

    def fn(q, k, v, positions, mask=None):
        module = torch.nn.Module().eval()
        module.num_key_value_groups = q.shape[1] // k.shape[1]
        angles = positions[..., None].float() * 10000.0 ** -(torch.arange(0, 64, 2).float() / 64)
        cos, sin = (f(torch.cat((angles, angles), -1)).to(q.dtype) for f in (torch.cos, torch.sin))
        q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
        seen = lower(q.shape[2], k.shape[2])[None, None]
        seen = seen if mask is None else seen & mask
        added = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
        return llama.eager_attention_forward(module, q, k, v, added, 0.125)[0].transpose(1, 2)

    report = check_attention(lambda q, k, v, at: fn(q, k, v, at), dtype=DTYPES[dtype], rope=rope)
    assert report.verdict == ("wrong" if dtype == "float64" else "right"), report
    if dtype != "float64":
        assert (dtype == "float16") == any("overflow" in note for note in report.notes), report
        assert check_attention(fn, dtype=DTYPES[dtype], rope=rope).faults[0].startswith("empty rows")
