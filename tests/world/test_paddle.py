"""Paddle: its tensors cross bit by bit, and functions of them are judged, forward and backward."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():  # of a compiler cache that is not installed, and the like
    warnings.simplefilter("ignore")
    paddle = pytest.importorskip("paddle", reason="needs Paddle: tox -e world")

from pyrope import Rope, check_attention, check_rotation  # noqa: E402
from pyrope.files import dtype_named  # noqa: E402
from pyrope.oracle.adapters import from_paddle  # noqa: E402

D, BASE = 16, 10000.0
DTYPES = ("float64", "float32", "float16", "bfloat16")
LAYOUTS = {True: "half", False: "interleaved"}


def tables(at: Any, half: bool) -> Any:
    """cos and sin, (n, d), each frequency twice."""
    angle = at.astype("float64").unsqueeze(-1) * paddle.to_tensor(BASE ** -(np.arange(D // 2) / (D // 2)))
    wide = paddle.concat((angle, angle), -1) if half else paddle.repeat_interleave(angle, 2, axis=-1)
    return wide.cos(), wide.sin()


def plain(half: bool) -> Any:
    def fn(x: Any, at: Any) -> Any:
        cos, sin = (table.astype(x.dtype) for table in tables(at, half))
        if half:
            a, b = x.chunk(2, axis=-1)
            return x * cos + paddle.concat((-b, a), -1) * sin
        a, b = x[..., ::2], x[..., 1::2]
        return x * cos + paddle.stack((-b, a), -1).reshape(x.shape) * sin

    return fn


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_crosses_both_ways(dtype: str) -> None:
    at = np.array([0, 5, 2**31])
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(dtype_named(dtype))
    x[0, 0, :2] = np.inf, -0.0

    def fn(x: Any, positions: Any) -> Any:
        assert isinstance(x, paddle.Tensor) and str(x.dtype).rpartition(".")[2] == dtype
        return x, positions

    for view in (x, x[:, ::-1], x.transpose(2, 0, 1), x[:0]):
        y, again = from_paddle(fn)(view, at)
        assert y.dtype == x.dtype and y.tobytes() == view.tobytes() and not np.shares_memory(x, y)
        assert (again == at).all()


def test_functions_that_work_in_place_are_seen() -> None:
    x = np.ones((1, 3, 4), np.float32)
    from_paddle(lambda x: x.scale_(2.0))(x)
    assert (x == 2).all()


@pytest.mark.parametrize(
    "dtype", DTYPES[:2]
)  # on a CPU it does not multiply in the others, nor has it its fused rotation
@pytest.mark.parametrize("half", LAYOUTS)
def test_forward_and_backward(half: bool, dtype: str) -> None:
    rope, kind, limit = Rope(D, BASE, LAYOUTS[half]), dtype_named(dtype), 4095
    assert check_rotation(from_paddle(plain(half)), rope, dtype=kind, max_position=limit).verdict == "right"
    derived = from_paddle(plain(half), backward="x")
    assert check_rotation(derived, rope, dtype=kind, max_position=limit, backward=True).verdict == "right"
    assert not check_rotation(from_paddle(plain(half)), rope, dtype=kind, max_position=limit, backward=True).ok


def test_gradients_of_attention() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        n, m = q.shape[-2], k.shape[-2]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
        scores = paddle.matmul(q, k, transpose_y=True) * D**-0.5
        seen = paddle.tril(paddle.ones((n, m)), m - n) > 0
        return paddle.nn.functional.softmax(paddle.where(seen, scores, paddle.full_like(scores, -1e30)), -1) @ v

    assert check_attention(from_paddle(attention), head_dim=D).verdict == "right"
    derived = from_paddle(attention, backward="qkv")
    assert check_attention(derived, head_dim=D, backward=True).verdict == "right"
    zero = from_paddle(lambda q, k, v: attention(q, k.detach(), v), backward="qkv")
    assert check_attention(zero, head_dim=D, backward=True).verdict == "wrong"
