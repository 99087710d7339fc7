"""flash-linear-attention's Triton kernels, interpreted, which takes long: so checks make the calls that are needed."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its kernels then run on the CPU

import warnings  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

torch = pytest.importorskip("torch", reason="needs the package torch: tox -e world")

from pyrope import Rope, check_linear_attention, check_rotation, cos_sin, rotate  # noqa: E402
from pyrope.oracle.adapters import from_offset, from_torch, with_axes  # noqa: E402


def fla(name: str) -> Any:
    """A module of flash-linear-attention: its kernels take their first configuration, since nothing can be measured."""
    tuner = pytest.importorskip("triton.runtime.autotuner", reason="needs the package triton: tox -e world").Autotuner
    tuner.do_bench = property(lambda self: lambda call, quantiles: [1.0] * len(quantiles))
    with warnings.catch_warnings():  # of a CPU
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason="needs the package fla-core: tox -e world")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_fla_rotary(layout: str, backward: bool) -> None:
    """The Triton kernel, interpreted, and the one of its backward pass, which is the same with another sign."""
    module, rope = fla("fla.modules.rotary"), Rope(64, 10000.0, layout, 48)
    tables = [torch.tensor(table, dtype=torch.float32) for table in cos_sin(range(128), rope)]

    def apply(x: Any, at: Any) -> Any:
        return module.rotary_embedding(x, *(t[at] for t in tables), interleaved=layout == "interleaved")

    derived: Any = {"backward": "x"} if backward else {}
    fn = with_axes(from_torch(apply, **derived), "bnhd")
    assert check_rotation(fn, rope, max_position=127, backward=backward).verdict == "right"


def test_fla_offsets() -> None:
    """Positions by an offset for each row of a batch, as in decoding."""
    module, rope = fla("fla.modules.rotary"), Rope(64, 10000.0, "half", 48)
    tables = [torch.tensor(table, dtype=torch.float32) for table in cos_sin(range(128), rope)]
    x, offsets = np.random.default_rng(0).standard_normal((3, 2, 5, 64)).astype(np.float32), np.array([0, 7, 100])
    turn = with_axes(from_torch(lambda x, at: module.rotary_embedding(x, *tables, seqlen_offsets=at)), "bnhd")
    expected = rotate(x, (offsets[:, None] + np.arange(5))[:, None], rope)
    np.testing.assert_allclose(turn(x, offsets), expected, atol=1e-6)
    np.testing.assert_allclose(from_offset(turn)(x, np.arange(9, 14)), rotate(x, np.arange(9, 14), rope), atol=1e-6)


@pytest.mark.parametrize("backward", [False, True])
def test_fla_linear_attention(backward: bool) -> None:
    """Eq. (19): the recurrent kernel, interpreted, has the sums over rotated features, torch those over plain ones."""
    module, rope = fla("fla.ops.linear_attn"), Rope(16, 10000.0, "half")

    def attention(q: Any, k: Any, v: Any, at: Any) -> Any:
        q, k = (torch.nn.functional.elu(x.transpose(1, 2)) + 1 for x in (q, k))
        cos, sin = (torch.tensor(t[:, :, None], dtype=torch.float32) for t in cos_sin(at.numpy(), rope))

        def turned(x: Any) -> Any:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

        sums = module.fused_recurrent_linear_attn(turned(q), turned(k), v.transpose(1, 2), scale=1.0, normalize=False)[
            0
        ]
        return (sums / (q * k.cumsum(1)).sum(-1, keepdim=True)).transpose(1, 2)

    derived: Any = {"backward": "qkv"} if backward else {}
    report = check_linear_attention(
        from_torch(attention, **derived), rope=rope, heads=2, key_heads=2, backward=backward
    )
    assert report.verdict == "right", report
