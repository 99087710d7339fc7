"""Backward passes by the autograd of torch, JAX and MLX: pyrope's gradients are held to theirs, and theirs are judged."""

from __future__ import annotations

import functools
import math

import jax
import ml_dtypes
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import pyrope
from pyrope import Rope, YaRN, check_attention, check_linear_attention, check_rotation
from pyrope.oracle.adapters import from_cos_sin, from_jax, from_mlx, from_offset, from_torch, with_axes
from pyrope.oracle.gradients import Roundings, linear_gradients, softmax_gradients
from pyrope.oracle.truth import Spec

D, BASE = 16, 10000.0
HALF, INTERLEAVED = Rope(D, BASE, "half"), Rope(D, BASE, "interleaved")
MIXED = Rope(D, BASE, "interleaved-to-half", scaling=YaRN(4.0, 64))
DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(autouse=True)
def plain_products():
    mx.set_default_device(mx.cpu)
    was, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    yield  # without oneDNN, whose bfloat16 products need instructions that not every CPU has
    torch.backends.mkldnn.enabled = was


def turned(x, at, rope):
    """R·x in torch, in the dtype of x, from exact tables: x (…, n, d), at (…, n)."""
    cos, sin = (torch.from_numpy(np.asarray(t)).to(x.dtype) for t in pyrope.cos_sin(rope, at.numpy()))
    r, start = rope.width, rope.start
    near = rope.layout.startswith("interleaved")
    a, b = (
        (x[..., start : start + r : 2], x[..., start + 1 : start + r : 2])
        if near
        else x[..., start : start + r].chunk(2, -1)
    )
    pair = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(pair, -1).flatten(-2) if rope.layout.endswith("interleaved") else torch.cat(pair, -1)
    return torch.cat((x[..., :start], out, x[..., start + r :]), -1)


# Rotations


@pytest.mark.parametrize("rope", [HALF, INTERLEAVED, MIXED, Rope(D, BASE, "half", 8, "suffix")], ids=str)
def test_the_rotation_of_the_transposed_rope_is_the_gradient_of_autograd(rope):
    rng = np.random.default_rng(0)
    x, g, at = rng.standard_normal((3, 5, D)), rng.standard_normal((3, 5, D)), np.array([0, 1, 7, 100, 4095])
    leaf = torch.from_numpy(x).requires_grad_()
    turned(leaf, torch.from_numpy(at), rope).backward(torch.from_numpy(g))
    np.testing.assert_allclose(pyrope.rotate(g, at, rope.transposed), leaf.grad.numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_of_transformers_is_right(dtype):
    def tables(m):
        angle = m[:, None] / BASE ** (np.arange(0, D, 2) / D)
        return tuple(np.tile(f(angle), 2).astype(DTYPES[dtype])[None] for f in (np.cos, np.sin))

    apply = from_torch(lambda x, cos, sin: apply_rotary_pos_emb(x, x, cos, sin)[0], backward="x")
    for entries in ("equal", "half"):  # autograd multiplies with the sine first: equal halves are not needed
        fn = with_axes(from_cos_sin(apply, tables, part="x", entries=entries), "bhnd")
        assert check_rotation(fn, HALF, dtype=DTYPES[dtype], backward=True).verdict == "right"


def test_tables_of_torch_have_entries_by_themselves():
    def tables(m):
        angle = torch.from_numpy(m)[:, None] / BASE ** (torch.arange(0, D, 2) / D)
        return angle.cos().tile(2).float(), angle.sin().tile(2).float()

    g, m = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32), np.arange(5)
    apply = from_torch(lambda x, cos, sin: apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=0)[0], backward="x")
    equal, half = (from_cos_sin(apply, tables, part="x", entries=entries)(g, m) for entries in ("equal", "half"))
    np.testing.assert_allclose(half, equal, rtol=0, atol=1e-6)


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
        assert check_rotation(from_torch(fn), HALF).verdict == "right"
        assert check_rotation(from_torch(fn, backward="x"), HALF, backward=True).faults == (fault,)
    report = check_rotation(from_torch(lambda x, at: (turned(x, at, HALF), x), backward="x"), HALF, backward=True)
    assert report.verdict == "not judged" and "returns tuple" in report.failure.reason
    with pytest.raises(ValueError, match="backward must be one of 'x', 'qkv', was 'k'"):
        from_torch(Forwards.apply, backward="k")


def test_functions_that_work_in_place_can_be_differentiated():
    def in_place(x, at):
        x *= 2
        return turned(x, at, HALF)

    g, at = np.ones((2, 3, D), np.float32), np.array([0, 1, 5])
    np.testing.assert_allclose(
        from_torch(in_place, backward="x")(g, at), 2 * pyrope.rotate(g, at, HALF.transposed), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("traditional, rope", [(False, HALF), (True, INTERLEAVED)])
def test_the_backward_pass_of_mlx_is_right(traditional, rope):
    module = mlx.nn.RoPE(D, traditional=traditional, base=BASE)
    fn = from_offset(with_axes(from_mlx(lambda x, offset: module(x, offset), backward="x"), "bhnd"))
    assert check_rotation(fn, rope, backward=True, max_position=255).verdict == "right"


def test_the_backward_pass_of_jax():
    theta = BASE ** -(np.arange(0, D, 2, dtype=np.float32) / D)

    def rotate(x, at):
        angle = at[:, None] * theta
        a, b = jax.numpy.split(x, 2, axis=-1)
        cos, sin = jax.numpy.cos(angle), jax.numpy.sin(angle)
        return jax.numpy.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    g = np.random.default_rng(1).standard_normal((2, 5, D)).astype(np.float32)
    at = np.array([0, 1, 2, 77, 1000])
    got = from_jax(rotate, backward="x")(g, at)
    np.testing.assert_allclose(got, pyrope.rotate(g, at, HALF.transposed), rtol=0, atol=1e-3)
    assert got.dtype == np.float32
    dead = from_jax(lambda x, at: rotate(jax.lax.stop_gradient(x), at), backward="x")(g, at)
    assert not dead.any()


# Attention


def eager(q, k, v, at=None, *, spec):
    if spec.rope is not None:
        q, k = (turned(x, at[:, None], spec.rope) for x in (q, k))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * spec.scale
    s = s if spec.softcap is None else spec.softcap * torch.tanh(s / spec.softcap)
    n, m = s.shape[-2:]
    away = torch.arange(m - n, m)[:, None] - torch.arange(m)
    seen = (away >= 0) | (not spec.causal)
    seen = seen & (abs(away) < (spec.window or m + n))
    return torch.softmax(s.masked_fill(~seen, -math.inf), -1) @ v


def linear(q, k, v, at, *, spec):
    phi = {"elu+1": lambda x: torch.nn.functional.elu(x) + 1, "exp": torch.exp}[spec.feature_map]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    fq, fk = phi(q), phi(k)
    tq, tk = (turned(x, at[:, None], spec.rope.pure) for x in (fq, fk))
    seen = torch.ones(q.shape[-2], k.shape[-2]).tril() if spec.causal else torch.ones(q.shape[-2], k.shape[-2])
    seen = seen.to(q.dtype)
    return (tq @ tk.transpose(-1, -2) * seen) @ v / (fq @ fk.transpose(-1, -2) * seen).sum(-1, keepdim=True)


SPECS = {
    "plain": Spec(4, 4, D, True, 0.25), "two-sided": Spec(4, 2, D, False, 0.25), "window": Spec(4, 2, D, True, 0.25, window=3),
    "softcap": Spec(4, 1, D, True, 0.5, softcap=2.0), "rope": Spec(4, 2, D, True, 0.25, rope=HALF), "YaRN": Spec(4, 4, D, True, 0.25, rope=MIXED),
}  # fmt: skip


@pytest.mark.parametrize("name, kind", [*((name, "softmax") for name in SPECS), ("rope", "linear"), ("YaRN", "linear")])
def test_gradients_are_those_of_torch(name, kind):
    spec = SPECS[name]
    rng = np.random.default_rng(3)
    q, g = rng.standard_normal((2, 2, 4, 9, D))
    k, v = rng.standard_normal((2, 2, spec.key_heads, 9, D))
    at = np.sort(rng.integers(0, 500, (2, 9)), axis=-1)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    (eager if kind == "softmax" else linear)(*leaves, torch.from_numpy(at), spec=spec).backward(torch.from_numpy(g))
    ours = softmax_gradients if kind == "softmax" else linear_gradients
    for own, leaf in zip(ours(spec, Roundings.of("float64", False), q, k, v, g, at), leaves, strict=True):
        off, allowed = np.abs(own.value - leaf.grad.numpy()), own.allowed("float64")
        assert allowed.ratio(off) < 1 and off.max() < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_autograd_is_right_in_every_dtype(name, dtype):
    """Eager attention, every step in the dtype of q: the coarsest that is right."""
    spec = SPECS[name]
    options = {field: getattr(spec, field) for field in ("key_heads", "causal", "scale", "window", "softcap", "rope")}
    fn = from_torch(functools.partial(eager, spec=spec), backward="qkv")
    report = check_attention(fn, heads=4, head_dim=D, dtype=DTYPES[dtype], backward=True, **options)
    assert report.verdict == "right", report
    if spec.rope is not None:
        fn = from_torch(functools.partial(linear, spec=spec), backward="qkv")
        options = {"rope": spec.rope, "heads": 4, "key_heads": spec.key_heads, "dtype": DTYPES[dtype]}
        report = check_linear_attention(fn, backward=True, **options)
        assert report.verdict == "right", report


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunked_kernel_of_linear_attention_is_right(dtype):
    """In float16 g/D is below the normal numbers: what is lost there is rounding."""

    def chunked(q, k, v, at):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        fq, fk = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        tq, tk = (turned(x, at[:, None], HALF) for x in (fq, fk))
        parts, states, sums = [], 0, 0
        for some in zip(*(x.split(16, dim=-2) for x in (tq, tk, fq, fk, v)), strict=True):
            a, b, c, d, e = some
            seen = torch.ones(a.shape[-2], a.shape[-2], dtype=q.dtype).tril()
            above = (a @ b.transpose(-1, -2) * seen) @ e + (a @ states if parts else 0)
            below = (c @ d.transpose(-1, -2) * seen).sum(-1, keepdim=True) + (c @ sums if parts else 0)
            parts.append(above / below)
            states, sums = states + b.transpose(-1, -2) @ e, sums + d.sum(-2)[..., None]
        return torch.cat(parts, -2)

    report = check_linear_attention(from_torch(chunked, backward="qkv"), rope=HALF, dtype=DTYPES[dtype], backward=True)
    assert report.verdict == "right", report


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "flash"])
def test_the_kernels_of_torch_are_right(backend, dtype):
    def fn(q, k, v):
        with sdpa_kernel(backend):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    report = check_attention(from_torch(fn, backward="qkv"), dtype=DTYPES[dtype], backward=True)
    assert report.verdict == "right", report


@pytest.mark.parametrize("ignored", ["", "mask", "segments"])
def test_autograd_is_tried_with_masks_and_segments(ignored):
    def fn(q, k, v, mask=None, segments=None):
        seen = torch.ones((q.shape[-2],) * 2, dtype=torch.bool).tril()
        if mask is not None and ignored != "mask":
            seen = seen & mask
        if segments is not None and ignored != "segments":
            seen = seen & (segments[:, None, :, None] == segments[:, None, None])
        rows = seen.any(-1)[..., None]  # a row that sees nothing is zeros
        s = torch.where(seen, q @ k.transpose(-1, -2) * D**-0.5, torch.where(rows, -math.inf, 0.0))
        return torch.where(rows, torch.softmax(s, -1), 0.0) @ v

    options = {"heads": 2, "key_heads": 2, "head_dim": D}
    report = check_attention(from_torch(fn, backward="qkv"), backward=True, **options)
    assert report.verdict == ("wrong" if ignored else "right"), report
    assert not any("no such argument" in note for note in report.notes)


def test_gradients_of_jax_and_mlx():
    @jax.jit
    def in_jax(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).swapaxes(1, 2)

    def in_mlx(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=D**-0.5, mask="causal")

    for fn in (from_jax(in_jax, backward="qkv"), from_mlx(in_mlx, backward="qkv")):
        assert check_attention(fn, heads=2, head_dim=D, backward=True).verdict == "right"
