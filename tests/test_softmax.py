"""`attention` equals the definition for every option, dtype, memory layout, tiling and backend."""

import numpy as np
import pytest
import references
from hypothesis import given, strategies as st
from memory import little_memory
from references import close
from strategies import DTYPES, UNIT, arrays, dtypes, to_backend

import pyrope
from pyrope import attention, softmax


@st.composite
def masks(draw, shape, dtype, rng):
    """None, or a mask with axes of length 1 or left out: bool, or floats, which may be wider than the scores."""
    kind = draw(st.sampled_from(["none", "none", "bool", "same", "float64", "infinite"]))
    if kind == "none":
        return None
    full = [1 if draw(st.integers(0, 3)) == 0 else size for size in shape][draw(st.integers(0, len(shape) - 2)) :]
    if kind == "bool":
        return rng.random(full) < 0.7
    mask = rng.standard_normal(full).astype(np.float64 if kind == "float64" else dtype)
    return np.where(rng.random(full) < 0.3, -np.inf, mask).astype(mask.dtype) if kind == "infinite" else mask


@st.composite
def cases(draw, dtype=dtypes):
    """q, k, v, the options of `attention`, and those of `references.attention`."""
    batch = draw(st.sampled_from([(), (2,), (2, 3), (1,)]))
    g, r, n, m = (draw(st.integers(low, high)) for low, high in ((1, 3), (1, 3), (1, 6), (1, 7)))
    d, e, kind = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(dtype)
    q = draw(arrays((*batch, g * r, n, d), kind))
    k, v = draw(arrays((*batch, g, m, d), kind)), draw(arrays((*batch, g, m, e), kind))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    same = {"causal": draw(st.booleans())}
    options, at = {}, {}
    for name, length in (("k_positions", m), ("q_positions", n)):
        shape = draw(st.sampled_from([(length,), (*batch, length), (*(1 for _ in batch), length)]))
        if draw(st.booleans()) or (name == "q_positions" and options):
            some = rng.integers(-12, 12, shape)
            options[name] = np.sort(some, axis=-1) if draw(st.booleans()) else some
            at[name[0] + "_at"] = options[name]
    more = {
        "mask": draw(masks((*batch, g * r, n, m), kind, rng)),
        "window": draw(st.none() | st.integers(1, 12)),
        "softcap": draw(st.none() | st.floats(0.25, 30.0)),
        "scale": draw(st.none() | st.floats(0.01, 4.0)),
    }
    same |= {name: value for name, value in more.items() if value is not None}
    return q, k, v, same | options, same | at


def run(xp, q, k, v, mask=None, **options):
    """The outputs on a backend, on the host; positions are host data."""
    mask = None if mask is None else to_backend(mask, xp)
    return pyrope.to_numpy(attention(*(to_backend(x, xp) for x in (q, k, v)), mask=mask, **options))


@given(cases(), st.sampled_from([1, 3, 256]), st.sampled_from([1, softmax._FEW]), st.sampled_from([1, 30, 2**17]))
def test_attention_is_the_definition(xp, case, rows, few, scores):
    q, k, v, options, same = case
    device = [to_backend(x, xp) for x in (q, k, v)]
    before = [x.copy() for x in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "_FEW", few)  # with few queries, too, keys may be measured
        for name, size in (("_FINE", 2), ("_SCORES", scores), ("_DEVICE", scores), ("_ROWS", rows)):
            patch.setattr(softmax, name, size)
        mask = None if (mask := options.pop("mask", None)) is None else to_backend(mask, xp)
        got = attention(*device, mask=mask, **options)
    assert got.dtype == q.dtype and got.shape == (*q.shape[:-1], v.shape[-1])
    close(got, *references.attention(q, k, v, **same), xp)
    for x, old in zip(device, before, strict=True):
        assert (pyrope.to_numpy(x) == old).all()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 50}, {"window": 50}])
@pytest.mark.parametrize("size", [0.0, 1.0, 8.0, 60.0, 1e15])
def test_many_tiles_and_scores_of_any_size(options, size):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, h, n, 8)).astype(np.float32) for h, n in ((4, 700), (2, 801), (2, 801)))
    q *= size
    exact, allowed = references.attention(q, k, v, **options)
    close(attention(q, k, v, **options), exact, allowed)
    shuffled = rng.permutation(801)  # positions decide who sees whom, not places
    k, v = k[..., shuffled, :], v[..., shuffled, :]
    close(attention(q, k, v, q_positions=np.arange(101, 801), k_positions=shuffled, **options), exact, allowed)


@pytest.mark.parametrize("softcap", [None, 0.5, 20.0])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_token_after_all_others(dtype, softcap):
    rng = np.random.default_rng(0)
    q, k, v = ((3 * rng.standard_normal((2, h, n, 8))).astype(DTYPES[dtype]) for h, n in ((4, 1), (2, 50), (2, 50)))
    close(attention(q, k, v, softcap=softcap, causal=True), *references.attention(q, k, v, softcap=softcap))


@pytest.mark.parametrize(
    "options, n, m, visible",
    [
        ({"causal": True}, 3, 3, ["100", "110", "111"]),
        ({"causal": True}, 2, 4, ["1110", "1111"]),  # the last two of four
        ({"causal": True}, 4, 2, ["00", "00", "10", "11"]),
        ({"causal": True}, 1, 3, ["111"]),
        ({"window": 1}, 3, 3, ["100", "010", "001"]),
        ({"window": 2}, 3, 4, ["1110", "0111", "0011"]),
        ({"causal": True, "window": 2}, 4, 4, ["1000", "1100", "0110", "0011"]),
        ({"causal": True, "window": 2}, 1, 4, ["0011"]),
        ({"causal": True, "q_positions": [5, 0]}, 2, 4, ["1111", "1000"]),
        ({"causal": True, "k_positions": [3, 1, 2, 0]}, 2, 4, ["0111", "0001"]),  # queries at 2 and 0
        ({"q_positions": [-7], "k_positions": [9, -9]}, 1, 2, ["11"]),  # nothing asks for positions
        ({"causal": True, "window": 2**31 - 1, "q_positions": [2**31]}, 1, 2, ["00"]),
        ({"causal": True, "window": 2**31, "q_positions": [2**31]}, 1, 2, ["01"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tile", [1, 2, 2**17])
def test_who_sees_whom(xp, options, n, m, visible, tile, monkeypatch):
    for name in ("_ROWS", "_SCORES", "_DEVICE"):
        monkeypatch.setattr(softmax, name, tile)
    got = run(xp, np.zeros((1, n, 2)), np.zeros((1, m, 2)), np.eye(m)[None], **options)[0]
    assert ["".join("1" if x else "0" for x in row) for row in got] == visible


def test_rows_that_see_nothing_are_zeros_among_many(xp):
    q, k, v = (np.random.default_rng(0).standard_normal((2, 80, 4)) for _ in "qkv")
    seen = np.arange(80) % 3 > 0
    for mask in (seen[:, None], np.where(seen, 0.0, -np.inf)[:, None]):
        got = run(xp, q, k, v, mask)
        assert (got[:, ~seen] == 0).all() and (got[:, seen] != 0).all()
    for mask in (None, np.zeros((1, 1))):  # nothing at all is seen
        assert (run(xp, q, k, v, mask, causal=True, q_positions=[-1] * 80) == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_finite_in_a_wider_mask_hides_nothing(xp, dtype):
    # The lowest float64, "almost −inf": a row of it alone is the mean of the values, not zeros.
    x, v = np.zeros((1, 2, 4), DTYPES[dtype]), np.array([[[1.0], [3.0]]], DTYPES[dtype])
    mask = np.array([[np.finfo(np.float64).min] * 2, [0, np.finfo(np.float64).min]])
    assert run(xp, x, x, v, mask).astype(float).ravel().tolist() == [2, 1]


@pytest.mark.parametrize("n", [1, 100])
def test_scores_that_overflow_are_refused(xp, n):
    big = np.full((1, n, 4), 1e20, np.float32)
    for sign in (1, -1):  # +inf would be NaN, −inf would pass for a hidden key
        for options in ({}, {"causal": True}, {"mask": np.zeros((n, n))}):
            with pytest.raises(ValueError, match="must not exceed float32, 3.4e.38: queries reach 2e.20, keys 1e.20"):
                run(xp, big * np.float32(2 * sign), big, big, **options)
    np.testing.assert_allclose(run(xp, *(x.astype(float) for x in (big, big, big))), 1e20, rtol=1e-7)
    np.testing.assert_allclose(run(xp, big, big, np.ones_like(big), scale=2e-38), 1, rtol=1e-6)  # before the product
    with pytest.raises(ValueError, match="queries reach 1e.18, keys 1e.18, and scale is 1e.03"):
        run(xp, *(x * np.float32(0.01) for x in (big, big, big)), scale=1e3)
    one = big * np.where(np.arange(4) == 0, np.float32(1), np.float32(0))  # one overflow beside scores that do not
    low = np.concatenate((np.zeros_like(one), -one), axis=-2)
    np.testing.assert_allclose(run(xp, one, low, np.where(low < 0, low, np.float32(7))), 7, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": np.zeros((3, 3), np.float32)}], ids=str)
def test_on_a_device_the_core_marks_what_overflows_and_nothing_else(xp, options):
    if xp is np:
        return
    x, mask = np.full((1, 3, 4), 1e20, np.float32), options.get("mask")
    rule = softmax.checked_rule(x, x, x, (options.get("causal", False), None), (None, None), (None, None))
    mask = None if mask is None else to_backend(mask[None, None], xp)
    for sign in (1, -1):  # without a wait, so that `forward` sees it in the logits
        out = softmax.attend(*(to_backend(y, xp) for y in (x * np.float32(sign), x, x)), rule, mask)
        assert np.isnan(pyrope.to_numpy(out)).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0])
@pytest.mark.parametrize("many", [3, 900])
def test_a_mean_of_large_values_does_not_overflow(scale, many):
    rng, most = np.random.default_rng(0), np.finfo(np.float32).max
    q, k = (rng.standard_normal((1, many, 4)).astype(np.float32) * 4 for _ in "qk")
    v = np.full((1, many, 3), most / 2, np.float32)
    v[..., 1], v[..., 2] = 1e-30, rng.standard_normal(many)
    got = attention(q, k, v, scale=scale)
    np.testing.assert_allclose(got[..., :2], v[..., :2], rtol=1e-5)
    close(got[..., 2:], *references.attention(q, k, v[..., 2:], scale=scale))


def test_a_large_softcap_does_not_make_scores_small():
    # q·scale/softcap is so small that its square is 0, but the scores are not.
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 80, 4)).astype(np.float32) * np.float32(size) for size in (30, 30, 1))
    np.testing.assert_allclose(attention(q, k, v, softcap=1e30), attention(q, k, v), atol=2e-3)


def test_scores_that_are_known_to_be_small_need_no_maximum(monkeypatch):
    monkeypatch.delattr(softmax, "_top")
    monkeypatch.setattr(softmax, "_SCORES", 1024)  # several tiles of keys
    x = np.ones((1, 80, 4), np.float32)
    assert np.allclose(attention(x, x, x, causal=True), 1)
    with pytest.raises(NameError):
        attention(x * 100, x, x, causal=True)


def test_nan_stays_in_its_row_and_its_column(xp):
    q, k, v = (np.ones((1, 70, 4)) for _ in "qkv")
    q[0, 3, 1] = np.nan
    got = run(xp, q, k, v, causal=True)
    assert np.unique(np.argwhere(np.isnan(got))[:, 1]).tolist() == [3]
    v[0, 60, 2] = np.nan
    got = run(xp, k, k, v)
    assert np.isnan(got[..., 2]).all()
    np.testing.assert_allclose(got[..., [0, 1, 3]], 1, rtol=2 * 70 * UNIT["float64"])  # two sums of 70 numbers


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_empty_sequences_batches_and_values(xp, shape):
    n, m = shape
    got = run(xp, *(np.ones((2, k, 4)) for k in (n, m, m)), causal=True)
    assert got.shape == (2, n, 4) and (got == 0).all()
    assert run(xp, *np.ones((3, 0, 2, 3, 4))).shape == (0, 2, 3, 4)
    assert run(xp, *(np.ones((2, 3, e)) for e in (4, 4, 0))).shape == (2, 3, 0)


@pytest.mark.parametrize(
    "options, most", [({"causal": True}, 36), ({"causal": True, "window": 8}, 15), ({"window": 1}, 8), ({}, 64)]
)
def test_keys_that_nobody_sees_are_not_multiplied(monkeypatch, options, most):
    # Eight tiles of eight queries and of eight keys: counted in keys that go into a product with eight queries.
    counted, add = [], softmax.Running._add
    for name, size in (("_FINE", 8), ("_ROWS", 8), ("_SCORES", 512)):
        monkeypatch.setattr(softmax, name, size)
    watched = lambda self, k, *more: (counted.append(k.shape[-2]), add(self, k, *more))  # noqa: E731
    monkeypatch.setattr(softmax.Running, "_add", watched)
    q, k, v = (np.ones((1, 64, 2)) for _ in "qkv")
    order = np.arange(64).reshape(8, 8)[[3, 1, 7, 0, 2, 6, 5, 4]].ravel()
    for at in (None, order):
        counted.clear()
        attention(q, k, v, q_positions=at, k_positions=at, **options)
        assert sum(counted) == 8 * most


def test_many_short_texts_are_taken_together(monkeypatch):
    calls, add = [], softmax.Running._add
    monkeypatch.setattr(softmax.Running, "_add", lambda self, k, *more: (calls.append(k.shape), add(self, k, *more)))
    attention(*(np.ones((64, 4, 8, 16), np.float32) for _ in "qkv"), causal=True)
    assert len(calls) == 1


def test_memory_is_linear():
    q, k, v = (np.ones((2, 4096, 16), np.float32) for _ in "qkv")
    with little_memory(5e6):  # n × m scores of one head alone are 67 MB
        attention(q, k, v, causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounded_once_and_nothing_in_float64(monkeypatch, dtype):
    seen, take = set(), softmax.Running._add
    monkeypatch.setattr(
        softmax.Running, "_add", lambda self, *more: (take(self, *more), seen.add(self.numerator.dtype))
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 80, 8)).astype(DTYPES[dtype]) for _ in "qkv")
    mask = rng.standard_normal((80, 80))
    got = attention(q, k, v, mask=mask, causal=True)
    assert seen == {np.dtype(np.float32)}
    single = attention(*(x.astype(np.float32) for x in (q, k, v)), mask=mask, causal=True)
    assert (got == single.astype(got.dtype)).all()


A = np.ones((2, 4, 3, 8), np.float32)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"q": A.astype(int)}, TypeError, "q must be float16, bfloat16, float32 or float64"),
        ({"k": A.astype(float)}, TypeError, "q, k and v must have one dtype, k was float64 and q float32: convert one"),
        ({"q": A[0, 0]}, ValueError, r"must agree in …, g, t and d, with d, g and h at least 1, had shapes \(3, 8\)"),
        ({"q": A[..., :0], "k": A[..., :0]}, ValueError, "with d, g and h at least 1"),
        ({"k": A[:, :0], "v": A[:, :0]}, ValueError, "with d, g and h at least 1"),
        ({"k": A[..., :7]}, ValueError, r"had shapes \(2, 4, 3, 8\), \(2, 4, 3, 7\)"),
        ({"v": A[:1]}, ValueError, "must agree"),
        ({"k": A[:, :3], "v": A[:, :3]}, ValueError, "the 3 key heads must divide the 4 query heads"),
        ({"k": A.tolist()}, TypeError, "k must be a NumPy or CuPy array, was list"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"window": 2.0}, TypeError, "window must be an integer"),
        ({"softcap": 0}, ValueError, "softcap must be finite and greater than 0"),
        ({"softcap": 1e39}, ValueError, "softcap must lie within"),
        ({"scale": -1.0}, ValueError, "scale must be finite and greater than 0"),
        ({"scale": 1e30, "softcap": 1e-20}, ValueError, "scale/softcap, which queries are multiplied with, must lie"),
        ({"scale": 1e-46}, ValueError, "scale must lie within"),
        ({"q_positions": [0, 1]}, ValueError, r"q_positions must have shape \(3,\), or \(…, 3\) with the first of the"),
        ({"k_positions": 1}, ValueError, r"k_positions must have shape"),
        ({"k_positions": np.zeros((3, 3), int)}, ValueError, "k_positions must have shape"),
        ({"k_positions": [0.5, 1, 2]}, TypeError, "k_positions must be integers"),
        ({"q": np.ones((2, 4, 5, 8), np.float32), "k_positions": range(3)}, ValueError, "5 queries cannot be the last of 3"),
        ({"mask": np.ones((3, 4), bool)}, ValueError, r"mask must be broadcastable to \(…, h, n, t\), \(2, 4, 3, 3\)"),
        ({"mask": np.ones((1, 2, 4, 3, 3), bool)}, ValueError, "mask must be broadcastable"),
        ({"mask": np.ones((3, 3), int)}, TypeError, "mask must be bool, where True is visible; one that is added must be"),
    ],
)  # fmt: skip
def test_bad_input(change, error, match):
    options = {"q": A, "k": A, "v": A} | change
    arrays = [options.pop(name) for name in "qkv"]
    with pytest.raises(error, match=match):
        attention(*arrays, **options)


def test_mixed_libraries_and_positions_on_the_device(xp):
    if xp is not np:
        with pytest.raises(TypeError, match="arrays of different libraries: q is a cupy array, k is a numpy array"):
            attention(to_backend(A, xp), A, A)
    at = pyrope.from_numpy(np.arange(3), xp)
    got = attention(*(to_backend(A, xp) for _ in "qkv"), causal=True, q_positions=at, k_positions=at)
    np.testing.assert_allclose(pyrope.to_numpy(got), 1, rtol=1e-6)


@pytest.mark.parametrize("size", [-300.0, 300.0])
def test_what_is_added_to_small_scores_may_be_large(xp, size):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, softmax._FEW, 4), dtype=np.float32)
    mask = np.full((softmax._FEW, softmax._FEW), size, np.float32)
    close(run(xp, q, k, v, mask), *references.attention(q, k, v, mask=mask))  # exp(±300) is 0 or inf


def test_tiles_of_keys_with_masks_of_unlike_shapes(xp, monkeypatch):
    """One entry for all keys in the first tile, and in the second another one for each query."""
    q, k, v = (np.random.default_rng(0).standard_normal((1, n, 4)).astype(np.float32) for n in (2, 3, 3))
    for name, size in (("_FINE", 2), ("_SCORES", 30), ("_DEVICE", 30), ("_ROWS", 1), ("_FEW", 1)):
        monkeypatch.setattr(softmax, name, size)
    options = {"mask": np.ones((1, 1, 1), bool), "causal": True}
    close(run(xp, q, k, v, **options), *references.attention(q, k, v, **options))
