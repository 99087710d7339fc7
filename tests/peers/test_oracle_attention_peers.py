"""Other people's attention, judged by the oracle, forward and backward: torch, transformers, JAX and MLX."""

from __future__ import annotations

import functools
import math
import warnings

import jax
import ml_dtypes
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama import modeling_llama as llama

import pyrope
from pyrope import Rope, YaRN, check_linear_attention, check_rotation
from pyrope.oracle.adapters import from_cos_sin, from_mlx, from_offset, from_torch, with_axes

D = 16
HALF, MIXED = Rope(D, 1e4, "half"), Rope(D, 1e4, "interleaved-to-half", scaling=YaRN(4.0, 64))
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
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


def sdpa(q, k, v, positions=None, mask=None, segments=None, *, backend="math", window=None, scale=None, causal=True,
         rope=None, ignored=""):  # fmt: skip
    """torch's kernels; what is ``ignored`` is a mistake."""
    seen = lower(q.shape[2], k.shape[2], window) if causal else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if rope is not None:
        q, k = (turned(x, positions[:, None], rope) for x in (q, k))
    if mask is not None and ignored != "mask":
        seen = seen & mask
    if segments is not None and ignored != "segments":
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    with sdpa_kernel(BACKENDS[backend]):
        return scaled_dot_product_attention(q, *grouped(q, k, v), attn_mask=seen, scale=scale)


TORCH = {
    "grouped": {"key_heads": 2}, "two-sided": {"causal": False}, "window": {"window": 5, "heads": 3}, "scale": {"scale": 0.5},
    "rope": {"rope": Rope(64, 1e4, "half")}, "backward": {"backward": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TORCH)
def test_torch_is_right(name, backend, dtype):
    options = {key: value for key, value in TORCH[name].items() if key not in ("heads", "key_heads", "backward")}
    report = check_attention(functools.partial(sdpa, backend=backend, **options), dtype=DTYPES[dtype], **TORCH[name])
    assert report.ok, str(report)


@pytest.mark.parametrize("ignored", ["mask", "segments"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_mask_that_is_ignored(ignored, backward):
    report = check_attention(functools.partial(sdpa, ignored=ignored), heads=2, head_dim=D, backward=backward)
    assert report.faults[0].startswith(ignored), report


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_causal_flag_of_torch_begins_at_the_top_left(dtype):
    def fn(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    report = check_attention(fn, dtype=DTYPES[dtype])
    assert report.ok and any("top left" in note for note in report.notes), report
    assert check_attention(fn, dtype=DTYPES[dtype], cache=False).ok
    assert check_attention(fn, dtype=DTYPES[dtype], cache=True).faults == ("causality: from the top left",)


def test_flex_attention_is_right():
    def cap(score, b, h, i, j):
        return torch.where(i >= j, 20.0 * torch.tanh(score / 20.0), -torch.inf)

    def fn(q, k, v):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            return flex_attention(q, k, v, score_mod=cap, enable_gqa=True)

    assert check_attention(fn, softcap=20.0, cache=False).ok
    for softcap in (30.0, None):
        assert check_attention(fn, softcap=softcap, cache=False).faults[0].startswith("softcap")


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_attention_of_transformers(dtype):
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
    if dtype == "float64":  # its softmax is in float32, whatever the dtype is
        assert report.verdict == "wrong", report
        return
    assert report.ok, str(report)
    if dtype == "float16":  # it scales after the product: NaN where q·k is beyond 65504
        assert any("overflow" in note for note in report.notes), str(report)
    assert dtype != "float32" or report.precision == "float32 angle"
    assert check_attention(fn, dtype=DTYPES[dtype], rope=rope).faults[0].startswith("empty rows")


# Backward passes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_of_transformers_is_right(dtype):
    def tables(m):
        angle = m[:, None] / 1e4 ** (np.arange(0, D, 2) / D)
        return tuple(np.tile(f(angle), 2).astype(DTYPES[dtype])[None] for f in (np.cos, np.sin))

    apply = from_torch(lambda x, cos, sin: llama.apply_rotary_pos_emb(x, x, cos, sin)[0], backward="x")
    fn = with_axes(from_cos_sin(apply, tables, part="x"), "bhnd")
    assert check_rotation(fn, HALF, dtype=DTYPES[dtype], backward=True).verdict == "right"


class Forwards(torch.autograd.Function):
    """A kernel whose backward pass is its forward pass."""

    @staticmethod
    def forward(context, x, at):
        context.at = at
        return turned(x, at, HALF)

    @staticmethod
    def backward(context, g):
        return turned(g, context.at, HALF), None


def test_what_autograd_says_of_broken_functions():
    wrong = {
        "backward equals forward": Forwards.apply,
        "no gradient": lambda x, at: turned(x.detach(), at, HALF),
        "accumulated twice": lambda x, at: turned(x, at, HALF) + turned(x, at, HALF) - turned(x.detach(), at, HALF),
    }
    for fault, fn in wrong.items():
        assert check_rotation(fn, HALF, framework="torch").verdict == "right"
        report = check_rotation(fn, HALF, backward=True, framework="torch")
        assert report.faults == (fault,), report
    report = check_rotation(lambda x, at: (turned(x, at, HALF), x), HALF, backward=True, framework="torch")
    assert report.verdict == "not judged" and "returns tuple" in report.failure.reason


def test_functions_that_work_in_place_can_be_differentiated():
    def in_place(x, at):
        x *= 1
        return turned(x, at, HALF)

    assert check_rotation(in_place, HALF, backward=True, framework="torch").verdict == "right"


@pytest.mark.parametrize("traditional, layout", [(False, "half"), (True, "interleaved")])
def test_the_backward_pass_of_mlx_is_right(traditional, layout):
    module = mlx.nn.RoPE(D, traditional=traditional)
    fn = from_offset(with_axes(from_mlx(lambda x, offset: module(x, offset), backward="x"), "bhnd"))
    assert check_rotation(fn, Rope(D, 1e4, layout), backward=True, max_position=255).verdict == "right"


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


def linear(q, k, v, at, *, rope):
    k, v = grouped(q, k, v)
    fq, fk = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    tq, tk = (turned(x, at[:, None], rope.rotation_only) for x in (fq, fk))
    seen = lower(q.shape[-2], k.shape[-2]).to(q.dtype)
    return (tq @ tk.transpose(-1, -2) * seen) @ v / (fq @ fk.transpose(-1, -2) * seen).sum(-1, keepdim=True)


def chunked(q, k, v, at, *, rope):
    """In float16 g/D is below the normal numbers: what is lost there is rounding."""
    k, v = grouped(q, k, v)
    fq, fk = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    tq, tk = (turned(x, at[:, None], rope.rotation_only) for x in (fq, fk))
    parts, states, sums = [], 0, 0
    for a, b, c, d, e in zip(*(x.split(16, dim=-2) for x in (tq, tk, fq, fk, v)), strict=True):
        seen = torch.ones(a.shape[-2], a.shape[-2], dtype=q.dtype).tril()
        above = (a @ b.transpose(-1, -2) * seen) @ e + (a @ states if parts else 0)
        below = (c @ d.transpose(-1, -2) * seen).sum(-1, keepdim=True) + (c @ sums if parts else 0)
        parts.append(above / below)
        states, sums = states + b.transpose(-1, -2) @ e, sums + d.sum(-2)[..., None]
    return torch.cat(parts, -2)


SPECS = {
    "plain": {}, "two-sided": {"causal": False}, "window": {"window": 3}, "softcap": {"softcap": 2.0, "scale": 0.5},
    "rope": {"rope": HALF}, "YaRN": {"rope": MIXED},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_autograd_is_right_in_every_dtype(name, dtype):
    options = {"heads": 4, "key_heads": 4 if name == "YaRN" else 2, "dtype": DTYPES[dtype], "backward": True}
    fn = functools.partial(eager, **SPECS[name])
    report = check_attention(fn, head_dim=D, **options, **SPECS[name])
    assert report.verdict == "right", report
    for fn in (linear, chunked) if "rope" in SPECS[name] else ():
        fn = functools.partial(fn, **SPECS[name])
        report = check_linear_attention(fn, **options, **SPECS[name], framework="torch")
        assert report.verdict == "right", report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("library", ["jax", "mlx"])
def test_jax_and_mlx(library, backward, dtype):
    def in_jax(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).swapaxes(1, 2)

    def in_mlx(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=D**-0.5, mask="causal")

    fn = {"jax": jax.jit(in_jax), "mlx": in_mlx}[library]
    options = {"heads": 2, "head_dim": D, "dtype": DTYPES[dtype], "backward": backward}
    options |= {"cache": False} if library == "mlx" else {}  # where queries see no key, it has the mean of all values
    report = check_attention(fn, framework=library, **options)
    assert report.verdict == "right", report
