"""Embedding, norms, activations and MLPs against mpmath and against sums that are written out."""

import math

import numpy as np
import pytest
import truth
from hypothesis import given, strategies as st
from strategies import UNIT, arrays, to_backend

from pyrope import from_numpy, layers, to_numpy
from pyrope.layers import ACTIVATIONS, NORMS, Norm, Projection

DTYPES = [np.dtype(np.float32), np.dtype(np.float64)]
GREATEST = {np.dtype(np.float32): 3.4e38, np.dtype(np.float64): 1.7e308}
floats = st.sampled_from(DTYPES)
MP = truth.MP


def _exact(name, x):
    """act(x) of one number, by mpmath."""
    x = MP.mpf(x)
    if name == "gelu":
        return x * MP.erfc(-x / MP.sqrt(2)) / 2
    if name == "gelu_tanh":
        return x * (1 + MP.tanh(MP.sqrt(2 / MP.pi) * (x + MP.mpf("0.044715") * x**3))) / 2
    if name == "silu":
        return x / (1 + MP.exp(-x))
    return max(x, MP.mpf(0))


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
    for at, found in zip(x.tolist(), y.tolist(), strict=True):
        expected = _exact(name, at)
        assert abs(MP.mpf(found) - expected) <= _bound(name, at, float(expected), dtype), at


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


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_work_on_part_of_an_array(xp, name):
    """As in an MLP, where the gate is the first half of a wider array."""
    whole = to_backend(np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6), xp)
    before = to_numpy(whole).copy()
    ACTIVATIONS[name](xp, whole[:, :3])
    after = to_numpy(whole)
    assert np.array_equal(after[:, 3:], before[:, 3:])
    assert np.array_equal(after[:, :3], _activated(name, before[:, :3].copy(), xp))


@given(data=st.data(), dtype=floats, shape=st.lists(st.integers(0, 4), max_size=2), e=st.integers(1, 40))
def test_norms_are_their_definition(xp, data, dtype, shape, e):
    """With s the size of x over its deviation: the mean is off by e·u of the size, the sum of squares by e·u."""
    kind, eps = data.draw(st.sampled_from(list(NORMS))), data.draw(st.sampled_from([1e-6, 1e-5, 0.5]))
    x = data.draw(arrays((*shape, e), dtype)) + data.draw(st.sampled_from([0, 3, -20])) * np.ones((), dtype)
    weight, bias = data.draw(arrays((e,), dtype)), data.draw(st.none() | arrays((e,), dtype))
    moved = to_backend(x, xp)
    norm = Norm(to_backend(weight, xp), None if bias is None else to_backend(bias, xp))
    y = to_numpy(NORMS[kind](moved, norm, eps))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert np.array_equal(to_numpy(moved), x) and np.array_equal(to_numpy(norm.weight), weight)
    u = UNIT[dtype.name]
    for row, found in zip(x.reshape(-1, e).tolist(), y.reshape(-1, e), strict=True):
        centre = math.fsum(row) / e if kind == "layer" else 0.0
        rest = [value - centre for value in row]
        root = math.sqrt(math.fsum(value * value for value in rest) / e + eps)
        s = max(map(abs, row)) / root if kind == "layer" else 0.0
        for j in range(e):
            main = rest[j] / root * float(weight[j])
            expected = main + (0.0 if bias is None else float(bias[j]))
            allowed = (e + 8) * u * (abs(main) * (1 + s) + abs(float(weight[j])) * s + abs(expected))
            assert abs(float(found[j]) - expected) <= allowed


def test_norms_by_closed_form(xp):
    ones = Norm(from_numpy(np.array([2.0, 2.0, 2.0]), xp), from_numpy(np.array([0.0, 1.0, 0.0]), xp))
    x = from_numpy(np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]), xp)
    root = math.sqrt(14 / 3 + 0.25)
    assert np.allclose(to_numpy(layers.rms_norm(x, ones, 0.25)), [[2 / root, 4 / root + 1, 6 / root], [0, 1, 0]], 1e-15)
    root = math.sqrt(2 / 3 + 0.25)
    assert np.allclose(to_numpy(layers.layer_norm(x, ones, 0.25)), [[-2 / root, 1, 2 / root], [0, 1, 0]], 1e-15)


@given(
    data=st.data(),
    dtype=floats,
    shape=st.lists(st.integers(0, 4), max_size=3),
    sizes=st.tuples(*[st.integers(1, 9)] * 2),
)
def test_project_is_a_sum_of_products(xp, data, dtype, shape, sizes):
    into, out = sizes
    x, weight = data.draw(arrays((*shape, into), dtype)), data.draw(arrays((out, into), dtype))
    bias = data.draw(st.none() | arrays((out,), dtype))
    moved = to_backend(x, xp)
    layer = Projection(to_backend(weight, xp), None if bias is None else to_backend(bias, xp))
    y = to_numpy(layers.project(moved, layer))
    assert (y.dtype, y.shape) == (dtype, (*shape, out))
    assert np.array_equal(to_numpy(moved), x)
    if shape:
        rows = math.prod(shape)
        given_out = xp.empty((rows, out), dtype)
        layers.project(moved, layer, out=given_out)
        assert np.array_equal(to_numpy(given_out).reshape(y.shape), y)
    for row, found in zip(x.reshape(-1, into).tolist(), y.reshape(-1, out), strict=True):
        for j in range(out):
            terms = [a * b for a, b in zip(row, weight[j].tolist(), strict=True)]
            expected = math.fsum(terms) + (0.0 if bias is None else float(bias[j]))
            allowed = (into + 2) * UNIT[dtype.name] * (math.fsum(map(abs, terms)) + abs(expected))
            assert abs(float(found[j]) - expected) <= allowed


@given(data=st.data(), dtype=floats, shape=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_embed_takes_rows(xp, data, dtype, shape):
    table = data.draw(arrays((7, 3), dtype))
    ids = np.array(data.draw(st.lists(st.integers(0, 6), min_size=math.prod(shape), max_size=math.prod(shape))))
    moved = to_backend(table, xp)
    found = layers.embed(moved, ids.reshape(shape))
    assert found.dtype == dtype
    assert np.array_equal(to_numpy(found), np.array([table[i] for i in ids]).reshape(*shape, 3))
    found *= 0  # forward works on it in place
    assert np.array_equal(to_numpy(moved), table)


def _mlp(x, up, down, activation, gated):
    """One row at a time, in float64; and the same of absolute values, for the size of the errors."""
    f = down.weight.shape[1]
    out, size = [], []
    for row in x.astype(np.float64):
        inner = up.weight.astype(np.float64) @ row + (0 if up.bias is None else up.bias)
        most = abs(up.weight.astype(np.float64)) @ abs(row) + (0 if up.bias is None else abs(up.bias))
        hidden = np.array([float(_exact(activation, value)) for value in inner[:f]])
        grown = most[:f]
        if gated:
            hidden, grown = hidden * inner[f:], grown * most[f:]
        out.append(down.weight.astype(np.float64) @ hidden + (0 if down.bias is None else down.bias))
        size.append(abs(down.weight.astype(np.float64)) @ grown + (0 if down.bias is None else abs(down.bias)))
    return np.array(out), np.array(size)


@given(
    data=st.data(), dtype=floats, activation=st.sampled_from(list(ACTIVATIONS)), gated=st.booleans(), e=st.integers(1, 6),
    f=st.integers(1, 6), shape=st.lists(st.integers(1, 3), min_size=1, max_size=2), rows=st.sampled_from([1, 2, 256]),
)  # fmt: skip
def test_mlp_is_its_definition(xp, data, dtype, activation, gated, e, f, shape, rows):
    """The slope of every activation is below 1.13: two products, each off by its length times u, and 40u between."""
    biases = data.draw(st.booleans())
    x = data.draw(arrays((*shape, e), dtype))
    wide = f * (1 + gated)
    host = [
        Projection(data.draw(arrays((n, m), dtype)), data.draw(arrays((n,), dtype)) if biases else None)
        for n, m in ((wide, e), (e, f))
    ]
    moved = [Projection(to_backend(a.weight, xp), None if a.bias is None else to_backend(a.bias, xp)) for a in host]
    given_x = to_backend(x, xp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_ROWS", rows)
        y = to_numpy(layers.mlp(given_x, *moved, activation, gated))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert np.array_equal(to_numpy(given_x), x)
    expected, size = _mlp(x.reshape(-1, e), *host, activation, gated)
    assert (abs(y.reshape(-1, e) - expected) <= 1.3 * (2 * e + f + 44) * UNIT[dtype.name] * size).all()


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 600])
def test_mlp_does_not_depend_on_the_number_of_rows(xp, n):
    rng = np.random.default_rng(n)
    x, up, down = (rng.standard_normal(shape) for shape in ((n, 4), (12, 4), (4, 6)))
    moved = [Projection(from_numpy(weight, xp), None) for weight in (up, down)]
    y = to_numpy(layers.mlp(from_numpy(x, xp), *moved, "silu", gated=True))
    inner = x @ up.T
    expected = (inner[:, :6] / (1 + np.exp(-inner[:, :6])) * inner[:, 6:]) @ down.T
    assert y.shape == (n, 4) and np.allclose(y, expected, 1e-12, 1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mlp_computes_in_the_dtype_of_its_input(xp, dtype, monkeypatch):
    seen = []
    monkeypatch.setitem(ACTIVATIONS, "relu", lambda xp, x: seen.append(x.dtype))
    one = Projection(from_numpy(np.ones((2, 2), dtype), xp), None)
    assert layers.mlp(from_numpy(np.ones((3, 2), dtype), xp), one, one, "relu", gated=False).dtype == dtype
    assert seen == [dtype]
