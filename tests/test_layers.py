"""Projections, norms, activations and MLPs against the definition in float64 and against mpmath."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import truth
from hypothesis import given, strategies as st
from strategies import UNIT, arrays, to_backend

from pyrope import definition, layers, to_numpy
from pyrope.layers import ACTIVATIONS, NORMS, Norm, Projection

DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]
GREATEST = {np.dtype(np.float32): 3.4e38, np.dtype(np.float64): 1.7e308}
floats = st.sampled_from(DTYPES)
MP = truth.MP


def _bound(name, x, y, dtype):
    """How far act(x) may be off in a dtype, with u its unit roundoff.

    gelu: Φ(−|x|) is a series, off by 8u, times exp(−z²), off by 3x²·u, as z, √½ and z² are rounded
    before; 1 − Φ(−|x|) by 4u.
    gelu_tanh: 1 + tanh(w) by 3u, all of it absolute, for the sum cancels where w is negative.
    silu: 6u; but what is below −88 counts as −88, and −88·e⁻⁸⁸ is 6e-37.
    Results below the normal numbers lose digits: off by |x| times the smallest number there is, or a few.
    """
    u, tiny = UNIT[dtype.name], float(np.finfo(dtype).smallest_subnormal)
    x, y = abs(x), abs(y)
    if name == "gelu":
        tail = float(MP.erfc(MP.mpf(x) / MP.sqrt(2)) / 2)
        # The series has as many terms as float32 needs, 3e-9 of exp(−z²); in float64 all of them.
        series = 3e-9 * math.exp(-(min(x, 38.0) ** 2) / 2) * (dtype == np.float32)
        return 4 * u * y + x * (tail * (3 * x * x + 8) * u + series + 4 * tiny)
    if name == "gelu_tanh":
        return 3 * u * x if x < 1e3 else 2 * u * y
    return {"silu": 6 * u * y + 6e-37, "relu": 0.0}[name]


def _activated(name, x, xp):
    y = to_backend(x.copy(), xp)
    assert ACTIVATIONS[name](xp, y) is None
    return to_numpy(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_right_over_their_whole_range(xp, name, dtype):
    powers = np.logspace(-30, 1.65, 150)
    x = np.concatenate((powers, -powers, np.linspace(-15, 15, 301), [0.0])).astype(dtype)
    y = _activated(name, x, xp)
    assert y.dtype == dtype
    for at, got in zip(x.tolist(), y.tolist(), strict=True):
        expected = truth.activation(name, at)
        assert abs(MP.mpf(got) - expected) <= _bound(name, at, float(expected), dtype), at


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_extreme_numbers_neither_warn_nor_overflow(xp, name, dtype):
    large = np.array([90.0, 710.0, 1e4, 1e13, 1e20, 1e37, GREATEST[dtype]], dtype)
    assert np.array_equal(_activated(name, large, xp), large)
    assert abs(_activated(name, -large, xp)).max() < 1e-35
    tiny = np.array([np.finfo(dtype).tiny, -np.finfo(dtype).tiny], dtype)
    assert np.allclose(_activated(name, tiny, xp), tiny * [1, name != "relu"] * (1 if name == "relu" else 0.5), 1e-6, 0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_do_not_hide_nan(xp, name):
    assert np.isnan(_activated(name, np.array([np.nan, 1.0]), xp)).tolist() == [True, False]


@given(data=st.data(), dtype=floats, shape=st.lists(st.integers(0, 4), max_size=2), e=st.integers(1, 40))
def test_norms_equal_the_definition(xp, data, dtype, shape, e):
    """With s the size of x over its deviation: the mean is off by e·u of the size, the sum of squares by e·u. In
    float64 the definition is off as far."""
    kind, eps = data.draw(st.sampled_from(NORMS)), data.draw(st.sampled_from([1e-6, 1e-5, 0.5]))
    x = data.draw(arrays((*shape, e), dtype)) + data.draw(st.sampled_from([0, 3, -20])) * np.ones((), dtype)
    weight, bias = data.draw(arrays((e,), dtype)), data.draw(st.none() | arrays((e,), dtype))
    moved = to_backend(x, xp)
    norm = Norm(to_backend(weight, xp), None if bias is None else to_backend(bias, xp))
    y = to_numpy(layers.normalize(moved, norm, eps, kind == "layer"))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert np.array_equal(to_numpy(moved), x) and np.array_equal(to_numpy(norm.weight), weight)
    wide = Norm(*(None if w is None else w.astype(np.float64) for w in (weight, bias)))
    config, x = SimpleNamespace(norm=kind, eps=eps), x.astype(np.float64)
    expected = definition.norm(config, wide, x)
    main = abs(expected if bias is None else expected - wide.bias)
    rest = x - x.mean(axis=-1, keepdims=True) if kind == "layer" else x
    root = np.sqrt((rest * rest).mean(axis=-1, keepdims=True) + eps)
    s = abs(x).max(axis=-1, keepdims=True) / root if kind == "layer" else 0.0
    u = UNIT[dtype.name] * (2 if dtype == np.float64 else 1)
    assert (abs(y - expected) <= (e + 8) * u * (main * (1 + s) + abs(wide.weight) * s + abs(expected))).all()


@given(
    data=st.data(), dtype=floats, activation=st.sampled_from(list(ACTIVATIONS)), gated=st.booleans(), e=st.integers(1, 6),
    f=st.integers(1, 6), shape=st.lists(st.integers(0, 3), max_size=3),
)  # fmt: skip
def test_mlp_equals_the_definition(xp, data, dtype, activation, gated, e, f, shape):
    """The slope of every activation is below 1.13: two products, each off by its length times u, and 40u between, of
    the same with absolute values and without an activation. In float64 the definition is off as far."""
    biases = data.draw(st.booleans())
    x = data.draw(arrays((*shape, e), dtype))
    wide = f * (1 + gated)
    host = [
        Projection(data.draw(arrays((n, m), dtype)), data.draw(arrays((n,), dtype)) if biases else None)
        for n, m in ((wide, e), (e, f))
    ]
    moved = [Projection(to_backend(a.weight, xp), None if a.bias is None else to_backend(a.bias, xp)) for a in host]
    given_x = to_backend(x, xp)
    rows = math.prod(shape)
    projected = layers.project(given_x, moved[0], out=xp.empty((rows, wide), dtype))  # by rows, into memory of ours
    assert np.array_equal(to_numpy(projected).reshape(*shape, wide), to_numpy(layers.project(given_x, moved[0])))
    y = to_numpy(layers.mlp(given_x, *moved, activation, gated))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert np.array_equal(to_numpy(given_x), x)
    up, down = (Projection(*(None if w is None else w.astype(np.float64) for w in layer)) for layer in host)
    config = SimpleNamespace(mlp_width=f, gated=gated, activation=activation)
    expected = definition.mlp(
        config,
        {"up.weight": up[0], "up.bias": up[1], "down.weight": down[0], "down.bias": down[1]},
        x.astype(np.float64),
    )
    up, down = (Projection(*(None if w is None else abs(w) for w in layer)) for layer in (up, down))
    inner = definition.project(up, abs(x.astype(np.float64)))
    size = definition.project(down, inner[..., :f] * inner[..., f:] if gated else inner)
    units = (2 * e + f + 44) * UNIT[dtype.name] * (2 if dtype == np.float64 else 1)
    assert (abs(y - expected) <= 1.3 * units * size).all()
