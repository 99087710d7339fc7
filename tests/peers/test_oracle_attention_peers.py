"""Other people's attention, judged by the oracle: torch's kernels and the eager code of transformers."""

import functools
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import pyrope
from pyrope import Rope
from pyrope.oracle.adapters import from_torch
from pyrope.oracle.attention_checks import check_attention

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
SHAPES = [{"heads": 4, "key_heads": 2}, {"heads": 3, "key_heads": 3}]
BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


def to_torch(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x))


def to_numpy(x):
    return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def lower(n, m, window=None):
    """The bottom-right causal mask, True is seen."""
    away = torch.arange(m - n, m)[:, None] - torch.arange(m)
    return (away >= 0) & (away < (window or m + 1))


def sdpa(backend="math", *, window=None, scale=None, causal=True, rope=None):
    def fn(q, k, v, positions=None, mask=None, segments=None):
        n, m = q.shape[2], k.shape[2]
        if rope is not None:
            q, k = pyrope.rotate(q, positions, rope), pyrope.rotate(k, positions, rope)
        seen = lower(n, m, window) if causal else None
        if mask is not None:
            seen = to_torch(mask) & (seen if causal else True)
        if segments is not None:
            same = to_torch(segments)
            seen = (same[:, None, :, None] == same[:, None, None, :]) & (seen if causal else True)
        with sdpa_kernel(BACKENDS[backend]):
            q, k, v = map(to_torch, (q, k, v))
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            return to_numpy(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale))

    return fn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options, shape", [
    ({}, 0), ({}, 1), ({"causal": False}, 0), ({"window": 5}, 1), ({"scale": 0.5}, 0), ({"rope": Rope(64, 1e4, "half")}, 1),
], ids=str)  # fmt: skip
def test_torch_is_right(options, shape, backend, dtype):
    report = check_attention(sdpa(backend, **options), dtype=DTYPES[dtype], **SHAPES[shape], **options)
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_causal_flag_of_torch_begins_at_the_top_left(dtype):
    def fn(q, k, v):
        q, k, v = map(to_torch, (q, k, v))
        return to_numpy(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    report = check_attention(fn, dtype=DTYPES[dtype])
    assert report.ok and any("begins at the top left" in note for note in report.notes)
    assert check_attention(fn, dtype=DTYPES[dtype], cache=False).ok
    assert check_attention(fn, dtype=DTYPES[dtype], cache=True).faults == ("causal from the top left",)


def test_a_repeat_of_torch_is_a_tile():
    def fn(q, k, v):
        q, k, v = map(to_torch, (q, k, v))
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)  # repeat_interleave is meant
        return to_numpy(scaled_dot_product_attention(q, k, v, attn_mask=lower(q.shape[2], k.shape[2])))

    assert check_attention(fn, key_heads=2).faults == ("heads tiled",)


def test_flex_attention_is_right():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def cap(score, b, h, i, j):
        score = 20.0 * torch.tanh(score / 20.0)
        return torch.where(i >= j, score, -torch.inf)

    def fn(q, k, v):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not compiled
            return to_numpy(flex.flex_attention(*map(to_torch, (q, k, v)), score_mod=cap, enable_gqa=True))

    assert check_attention(fn, softcap=20.0, cache=False).ok
    assert check_attention(fn, softcap=30.0, cache=False).faults != ()
    assert check_attention(fn, cache=False).faults != ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_attention_of_transformers(dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rope = Rope(64, 10000.0, "half")

    def fn(q, k, v, positions, mask=None):
        q, k, v = map(to_torch, (q, k, v))
        module = torch.nn.Module().eval()
        module.num_key_value_groups = q.shape[1] // k.shape[1]
        angles = torch.from_numpy(positions)[..., None].float() * 10000.0 ** -(torch.arange(0, 64, 2).float() / 64)
        cos, sin = (f(torch.cat((angles, angles), -1)).to(q.dtype) for f in (torch.cos, torch.sin))
        q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
        seen = lower(q.shape[2], k.shape[2])[None, None]
        seen = seen if mask is None else seen & to_torch(mask)
        added = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
        return to_numpy(llama.eager_attention_forward(module, q, k, v, added, 0.125)[0].transpose(1, 2))

    report = check_attention(lambda q, k, v, at: fn(q, k, v, at), dtype=DTYPES[dtype], rope=rope)
    if dtype == "float64":  # its softmax is in float32, whatever the dtype is
        assert (
            report.faults == ("softmax in low precision",)
            and "within what float32 allows" in report.findings[0].evidence
        )
        return
    assert report.ok, str(report)
    if dtype == "float16":  # it scales after the product: NaN where q·k is beyond 65504
        assert any("q·k overflows float16" in note for note in report.notes), str(report)
    assert report.precision == ("float32 angle" if dtype == "float32" else "scores rounded")
    assert check_attention(fn, dtype=DTYPES[dtype], rope=rope).faults == ("empty rows are uniform",)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_function_of_torch_gets_its_mask_as_a_tensor(dtype):
    """The adapter keeps the signature, from which the check reads that a mask may be handed over."""

    def fn(q, k, v, mask=None, *, heeds=True):
        seen = lower(q.shape[2], k.shape[2])
        seen = seen & mask if mask is not None and heeds else seen
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(q, k, v, attn_mask=seen)

    report = check_attention(from_torch(fn), dtype=DTYPES[dtype])
    assert report.ok and "no such argument: segments" in " ".join(report.notes), str(report)
    careless = from_torch(functools.partial(fn, heeds=False))
    assert check_attention(careless, dtype=DTYPES[dtype]).faults == ("mask ignored",)
