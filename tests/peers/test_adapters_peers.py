"""The adapters around other people's rotary embeddings: one line each, every dtype, bit by bit."""

from __future__ import annotations

import re

import jax
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox import modeling_gpt_neox

import pyrope
from pyrope import Rope
from pyrope.oracle.adapters import cached, from_cos_sin, from_jax, from_mlx, from_torch, with_axes

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
LIBRARIES = {"torch": from_torch, "jax": from_jax, "mlx": from_mlx}
AT = np.array([0, 1, 2, 3, 40, 41, 7, 7, 200])
D = 16
HALF = Rope(D, 10000.0, "half")


@pytest.fixture(autouse=True)
def on_the_cpu():
    mx.set_default_device(mx.cpu)


def patterns(dtype, shape=(2, 3, 4)):
    """Any bits: subnormal numbers, infinities and NaN among them."""
    raw = np.random.default_rng(0).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)  # read-only


def vectors(dtype):
    return np.random.default_rng(0).standard_normal((2, 3, len(AT), D)).astype(dtype)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def wide_enough(library, dtype):
    return jax.enable_x64(True) if library == "jax" and np.dtype(dtype).itemsize == 8 else jax.enable_x64(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_bit_crosses_both_ways(library, dtype):
    x = patterns(dtype)
    kinds = {"torch": torch.Tensor, "jax": jax.Array, "mlx": mx.array}

    def fn(x, positions, offset):
        assert isinstance(x, kinds[library]) and isinstance(positions, kinds[library]) and offset == 3
        assert str(x.dtype).rpartition(".")[2] == np.dtype(dtype).name and "int" in str(positions.dtype)
        return x, (x, positions)

    with wide_enough(library, dtype):
        y, (again, positions) = LIBRARIES[library](fn)(x, AT, 3)
    assert_same_bits(y, x)
    assert_same_bits(again, x)
    assert y is not x and y.flags.writeable and not np.shares_memory(y, x)
    assert (positions == AT).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "view", [lambda x: x[:, ::-1], lambda x: x.transpose(2, 0, 1), lambda x: x[..., ::2], lambda x: x[:0]]
)
def test_any_strides_cross(library, view):
    for dtype in (np.float32, ml_dtypes.bfloat16):
        x = view(patterns(dtype).copy())
        assert_same_bits(LIBRARIES[library](lambda x: x)(x), x)


@pytest.mark.parametrize("axes", ["bnhd", "n(hd)"])
def test_tensors_behind_other_axes_keep_odd_strides(axes):
    """A kernel that gets a pointer and a shape: right for contiguous tensors, and wrong for all others."""
    rope = Rope(8, 10000.0, "half")
    theta = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)

    def turned(x, at):  # (…, n, h, d)
        c, s = (table(at[:, None, None] * theta) for table in (torch.cos, torch.sin))
        a, b = x.reshape(*x.shape[: axes.index("n") + 1], -1, 8).double().chunk(2, dim=-1)
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).reshape(x.shape).to(x.dtype)

    def pointer(x):
        return torch.as_strided(x, x.shape, torch.empty(x.shape).stride())

    right = with_axes(from_torch(turned), axes)
    wrong = with_axes(from_torch(lambda x, at: turned(pointer(x), at)), axes)
    assert pyrope.check_rotation(right, rope, max_position=4095).verdict == "right"
    assert pyrope.check_rotation(wrong, rope, max_position=4095).faults[0] == "strides ignored"


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_are_copies_and_what_is_not_an_array_is_refused(library):
    held = []

    def keeps(x):
        held.append(held[0] if held else x + 1)
        return held[-1]

    fn, x = LIBRARIES[library](keeps), np.ones((2, 4), np.float32)
    first = fn(x)
    first[...] = 9
    assert (fn(x) == 2).all()
    with pytest.raises(TypeError, match=r"it returns nothing, not .* for .* of shape \(2, 4\), .*float32"):
        LIBRARIES[library](lambda x: None)(x)


def test_a_failure_tells_which_tensors_the_function_received():
    def raising(x, at):
        return x @ at

    def pair(x, at):
        return x, at

    received = r"torch.Tensor of shape \(1, (\d+), 2, 8\), torch.float32; torch.Tensor of shape \(\1,\), torch.int64, adapted .*"
    for fn, reason in ((raising, "it raises RuntimeError"), (pair, "it returns tuple"), (print, "it returns nothing")):
        report = pyrope.check_rotation(with_axes(from_torch(fn), "bnhd"), pyrope.Rope(8, 10000.0, "half"))
        assert report.verdict == "not judged" and report.failure.reason.startswith(reason)
        assert re.fullmatch(received, report.failure.received), report
    assert not report.failure.frames


def test_torch_gradients_views_and_memory():
    weight = torch.ones(4, requires_grad=True)
    assert (from_torch(lambda x: x * weight)(np.full((2, 4), 3.0, np.float32)) == 3).all()
    assert_same_bits(from_torch(torch.conj)(np.array([1 + 2j], np.complex64)), np.array([1 - 2j], np.complex64))
    for dtype in (np.float32, ml_dtypes.bfloat16):
        x = np.ones((3, 4), dtype)
        from_torch(lambda x: x.mul_(2))(x)
        assert (x == 2).all()  # a function that works in place is seen to do so
        from_torch(lambda x: x.mul_(2), device="cpu")(x[:, ::-1])
        assert (x == 4).all()
        x.flags.writeable = False
        assert (from_torch(lambda x: x.mul_(2))(x) == 8).all() and (x == 4).all()


def test_mlx_functions_that_work_in_place_are_seen():
    def fn(x):
        x[...] = x * 2
        return x

    x = np.ones((3, 4), ml_dtypes.bfloat16)
    from_mlx(fn)(x)
    assert (x == 2).all()


def test_jax_does_not_cut_numbers_down_in_silence():
    fn = from_jax(lambda x, at: x)
    with jax.enable_x64(False):
        with pytest.raises(ValueError, match="JAX would halve the width of float64"):
            fn(np.ones((1, 2)), np.arange(1))
        with pytest.raises(ValueError, match="JAX would halve the width of int64"):
            fn(np.ones((1, 2), np.float32), np.array([2**31]))
        assert from_jax(lambda at: at)(np.array([2**31 - 1, -(2**31)])).tolist() == [2**31 - 1, -(2**31)]


# Other people's functions, in one line each


def assert_rotates(fn, dtype=np.float32, allowed=2e-4):
    """To what a float32 angle at position 200 leaves right."""
    x = vectors(dtype)
    for lead in ((2, 3), (3,), ()):
        part = x[(0,) * (2 - len(lead))]
        y = fn(part, AT)
        assert y.shape == part.shape and y.dtype == part.dtype
        off = np.abs(y.astype(np.float64) - pyrope.rotate(part.astype(np.float64), AT, HALF))
        assert off.max() < allowed + 4 * float(ml_dtypes.finfo(dtype).eps)


def test_tables_of_ones_own_as_transformers_takes_them():
    def tables(positions):
        cos, sin = pyrope.cos_sin(positions, HALF, np.float32)
        return tuple(np.concatenate((table, table), axis=-1)[None] for table in (cos, sin))

    for part in "qk":
        fn = from_cos_sin(from_torch(modeling_gpt_neox.apply_rotary_pos_emb), tables, part=part)
        assert_rotates(with_axes(fn, "bhnd"), allowed=1e-6)


def test_gpt_neox_with_a_cache():
    config = GPTNeoXConfig(hidden_size=D, num_attention_heads=1, rotary_pct=1.0)
    rotary, x = modeling_gpt_neox.GPTNeoXRotaryEmbedding(config), torch.ones(1)
    made = cached(from_torch(lambda n: rotary(x, torch.arange(n)[None])), 512)
    assert_rotates(with_axes(from_cos_sin(from_torch(modeling_gpt_neox.apply_rotary_pos_emb), made), "bhnd"))


def test_positions_first_and_heads_joined_as_in_vllm():
    def rope(positions, query, key):  # (n, h·d), in place, as the kernel does it
        cos, sin = (torch.from_numpy(table)[:, None] for table in pyrope.cos_sin(positions.numpy(), HALF, np.float32))
        for x in (query, key):
            split = x.view(len(positions), -1, D)
            a, b = split[..., : D // 2].clone(), split[..., D // 2 :].clone()
            split[..., : D // 2], split[..., D // 2 :] = a * cos - b * sin, b * cos + a * sin
        return query, key

    assert_rotates(with_axes(from_torch(lambda x, at: rope(at, x.clone(), x.clone())[0]), "n(hd)"), allowed=1e-6)
