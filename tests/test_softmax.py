"""Softmax attention in every form against the definition in float64, and against numbers worked by hand."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, strategies as st
from strategies import COMPUTE_UNIT, DTYPES, UNIT, arrays, dtypes, to_backend

import pyrope
from pyrope import attention, attention_by_definition, attention_scores, definition, softmax

MASKS = ["none", "bool", "float", "hidden"]  # hidden: a float mask of 0 and −inf


def expected(q, k, v, *, causal=False, q_at, k_at, mask=None, window=None, softcap=None, scale=None):
    """Scores and outputs by the definition in float64, and how far the engine's may be off.

    With u the unit roundoff of the arithmetic and S the greatest sum of |q·k| terms of a row, scaled, and of what a
    mask adds: a score is off by (d + 4)·u·S, a weight by that much relative to itself (twice, as the maximum is off
    too) and by 4u from the exponential, their sums over m keys by m·u more: so an output by
    (2(d + 4)·S + 2m + 8)·u·Σ|weight·v|. In float64 the definition is off as far.
    """
    name, (h, d), m = q.dtype.name, q.shape[-3::2], k.shape[-2]
    q, k, v = (x.astype(np.float64) for x in (q, definition.repeat_heads(k, h), definition.repeat_heads(v, h)))
    visible = definition.visible(q_at[..., None, :], k_at[..., None, :], causal, window)
    bias = 0 if mask is None or mask.dtype == bool else mask.astype(np.float64)
    visible = visible & mask if mask is not None and mask.dtype == bool else visible & (bias > -np.inf)
    options = visible, 1 / math.sqrt(d) if scale is None else scale, softcap, bias
    scores, out = definition.attention_scores(q, k, *options), definition.attention(q, k, v, *options)
    terms = abs(q) @ abs(k).swapaxes(-1, -2) * options[1] + np.where(visible, abs(bias), 0)
    size = np.where(visible, terms, 0).max(axis=-1, keepdims=True)
    u = COMPUTE_UNIT[name] * (1.01 if name != "float64" else 2.02)
    bound = (2 * (d + 4) * size + 2 * m + 8) * u * (definition.softmax(scores) @ abs(v))
    rounding = UNIT[name] * abs(out) * (name in ("float16", "bfloat16")) + 2.0**-24 * (name == "float16")
    return scores, (d + 4) * u * size, out, bound + rounding + 1e-37


def _mask(data, kind, shape, dtype, rng):
    """A mask that broadcasts to shape, of any rank; rows that see nothing are in it."""
    *lead, n, m = shape
    full = [data.draw(st.sampled_from([1, size])) for size in (*lead, n)] + [m]
    full = full[data.draw(st.integers(0, len(full) - 1)) :]
    visible = rng.random(full) < data.draw(st.sampled_from([0.2, 0.7, 1.0]))
    if kind == "none":
        return None
    if kind == "bool":
        return visible
    if kind == "hidden":
        return np.where(visible, 0.0, -np.inf).astype(dtype)
    return rng.standard_normal(full).astype(data.draw(st.sampled_from([dtype, np.dtype(np.float32)])))


@st.composite
def cases(draw, dtype=dtypes):
    """q, k, v of any sizes, groups and memory layout, and options for all that `attention` can do."""
    batch = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
    g, r, n, m = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    d, e, kind = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(dtype)
    q = draw(arrays((*batch, g * r, n, d), kind))
    k, v = draw(arrays((*batch, g, m, d), kind)), draw(arrays((*batch, g, m, e), kind))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    options = {"causal": draw(st.booleans())}
    at = {}
    for name, length, start in (("k_positions", m, 0), ("q_positions", n, m - n)):
        shape = draw(st.sampled_from([(length,), (*batch, length), (*(1 for _ in batch), length)]))
        some = {
            "default": None,
            "sorted": np.sort(rng.integers(-12, 12, shape), axis=-1),
            "any": rng.integers(-12, 12, shape),
        }[draw(st.sampled_from(["default", "sorted", "any"]))]
        if some is not None:
            options[name] = some.astype(draw(st.sampled_from([np.int64, np.int32])))
        at[name] = np.arange(start, start + length) if some is None else some
    if "k_positions" in options and "q_positions" not in options:
        options["q_positions"] = at["q_positions"]
    data = draw(st.data())
    mask = _mask(data, draw(st.sampled_from(MASKS)), (*batch, g * r, n, m), kind, rng)
    more = {
        "mask": mask,
        "window": draw(st.none() | st.integers(1, 12)),
        "softcap": draw(st.none() | st.floats(0.25, 30.0)),
        "scale": draw(st.none() | st.floats(0.01, 4.0)),
    }
    options |= {name: value for name, value in more.items() if value is not None}
    return q, k, v, options, at


def _on(xp, options):
    """Options with the mask on a backend; positions are host data."""
    return {name: to_backend(value, xp) if name == "mask" else value for name, value in options.items()}


def _expected(case):
    q, k, v, options, at = case
    rest = {name: value for name, value in options.items() if not name.endswith("positions")}
    return expected(q, k, v, q_at=at["q_positions"], k_at=at["k_positions"], **rest)


@given(cases(), st.none() | st.integers(1, 10), st.sampled_from([1, softmax._FEW]))
def test_every_form_equals_the_definition(xp, case, block, few):
    q, k, v, options, _ = case
    before = [x.copy() for x in (q, k, v)]
    given = [to_backend(x, xp) for x in (q, k, v)]
    *_, out, allowed = _expected(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "_FEW", few)  # with few queries, too, keys may be measured
        fast = attention(*given, block=block, **_on(xp, options))
    forms = fast, attention_by_definition(*given, **_on(xp, options))
    for got in forms:  # Eq. (2)
        assert got.dtype == q.dtype and got.shape == (*q.shape[:-1], v.shape[-1]) and pyrope.namespace(got) is xp
        assert (abs(pyrope.to_numpy(got).astype(np.float64) - out) <= allowed).all()
    for x, old in zip(given, before, strict=True):
        assert (pyrope.to_numpy(x) == old).all()


@given(cases())
def test_scores_equal_the_definition(xp, case):
    q, k, _, options, _ = case
    scores, allowed, *_ = _expected(case)
    got = attention_scores(to_backend(q, xp), to_backend(k, xp), **_on(xp, options))
    assert got.dtype == DTYPES["float64" if q.dtype == np.float64 else "float32"]
    got = pyrope.to_numpy(got).astype(np.float64)
    hidden = np.isneginf(scores)
    assert (np.isneginf(got) == hidden).all()
    assert (abs(np.where(hidden, 0, got) - np.where(hidden, 0, scores)) <= allowed).all()


@given(cases(st.just(DTYPES["float64"])), st.integers(1, 10), st.integers(0, 10**6))
def test_tiles_change_nothing(case, block, small):
    # Whatever the tiles are, and whether heads are taken one by one or together.
    q, k, v, options, _ = case
    exact, before = attention_by_definition(q, k, v, **options), softmax._SMALL
    try:
        softmax._SMALL = small if small % 3 else 0
        got = attention(q, k, v, block=block, **options)
    finally:
        softmax._SMALL = before
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-13 * abs(v).max())


@pytest.mark.parametrize("block", [None, 7, 64, 128, 1000])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 50}, {"window": 50}])
def test_many_tiles_as_the_definition(xp, block, options):
    rng = np.random.default_rng(0)
    q, k, v = (
        to_backend(rng.standard_normal((2, h, n, 8)).astype(np.float32), xp) for h, n in ((4, 300), (2, 301), (2, 301))
    )
    got, exact = attention(q, k, v, block=block, **options), attention_by_definition(q, k, v, **options)
    np.testing.assert_allclose(pyrope.to_numpy(got), pyrope.to_numpy(exact), rtol=0, atol=2e-6)


def test_two_keys_by_hand(xp):
    # Scores 0 and ln 3: weights 1/4 and 3/4. Capped at 1: tanh(ln 3) = 4/5, so weights are as exp(0) to exp(4/5).
    q, k = np.ones((1, 1, 1)), np.array([[[0.0], [math.log(3)]]])
    v = np.array([[[4.0, 0.0], [0.0, 8.0]]])
    on = [to_backend(x, xp) for x in (q, k, v)]
    np.testing.assert_allclose(pyrope.to_numpy(attention(*on)), [[[1, 6]]], rtol=1e-15)
    weight = 1 / (1 + math.exp(0.8))
    np.testing.assert_allclose(
        pyrope.to_numpy(attention(*on, softcap=1.0)), [[[4 * weight, 8 - 8 * weight]]], rtol=1e-15
    )


def test_query_heads_read_their_group(xp):
    # Six query heads, two key heads: 0, 1, 2 read the first. Values say which head they are of.
    v = np.broadcast_to(np.arange(2.0)[:, None, None], (2, 3, 1)).copy()
    got = attention(*(to_backend(x, xp) for x in (np.ones((6, 1, 4)), np.ones((2, 3, 4)), v)))
    assert pyrope.to_numpy(got).ravel().tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "options, n, m, visible",
    [
        ({"causal": True}, 3, 3, ["100", "110", "111"]),
        ({"causal": True}, 2, 4, ["1110", "1111"]),  # the last two of four
        ({"causal": True}, 4, 2, ["00", "00", "10", "11"]),
        ({"window": 1}, 3, 3, ["100", "010", "001"]),
        ({"window": 2}, 3, 4, ["1110", "0111", "0011"]),
        ({"causal": True, "window": 2}, 4, 4, ["1000", "1100", "0110", "0011"]),
        ({"causal": True, "q_positions": [5, 0]}, 2, 4, ["1111", "1000"]),
        ({"causal": True, "k_positions": [3, 1, 2, 0]}, 2, 4, ["0111", "0001"]),  # queries at 2 and 0
        ({"causal": True, "k_positions": [9, 9, 0], "q_positions": [0]}, 1, 3, ["001"]),
        ({"q_positions": [-7], "k_positions": [9, -9]}, 1, 2, ["11"]),  # nothing asks for positions
        ({"causal": True, "window": 2**31 - 1, "q_positions": [2**31]}, 1, 2, ["00"]),
        ({"causal": True, "window": 2**31, "q_positions": [2**31]}, 1, 2, ["01"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("block", [None, 1, 2])
def test_who_sees_whom(xp, options, n, m, visible, block):
    on = [to_backend(x, xp) for x in (np.zeros((1, n, 2)), np.zeros((1, m, 2)), np.eye(m)[None])]
    got = pyrope.to_numpy(attention(*on, block=block, **options))[0]
    assert ["".join("1" if x else "0" for x in row) for row in got] == visible
    assert (pyrope.to_numpy(attention_by_definition(*on, **options))[0] == got).all()


def _rows(rng, *shape, dtype=np.float64):
    return rng.standard_normal(shape).astype(dtype)


@given(st.integers(1, 12), st.integers(0, 11), st.none() | st.integers(1, 5), st.none() | st.integers(1, 4))
def test_the_future_changes_nothing(xp, n, cut, window, block):
    cut, rng = min(cut, n), np.random.default_rng(n)
    q, k, v = (_rows(rng, 2, n, 4) for _ in "qkv")
    changed = [x.copy() for x in (q, k, v)]
    for x in changed:
        x[:, cut:] = 1e3 * _rows(rng, 2, n - cut, 4)
    one, two = (
        pyrope.to_numpy(attention(*(to_backend(x, xp) for x in xs), causal=True, window=window, block=block))
        for xs in ((q, k, v), changed)
    )
    assert (one[:, :cut] == two[:, :cut]).all()  # to the bit


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.none() | st.integers(1, 6), st.none() | st.integers(1, 4)
)
def test_with_a_cache_as_at_once(xp, steps, window, block):
    n, rng = sum(steps), np.random.default_rng(7)
    q, k, v = (_rows(rng, 2, h, n, 4) for h in (4, 2, 2))
    full = pyrope.to_numpy(attention(*(to_backend(x, xp) for x in (q, k, v)), causal=True, window=window))
    end = 0
    for step in steps:
        start, end = end, end + step
        parts = [to_backend(np.ascontiguousarray(x), xp) for x in (q[:, :, start:end], k[:, :, :end], v[:, :, :end])]
        for at in (None, np.arange(start, end)):  # the queries are the last of the keys, said or not
            got = attention(*parts, causal=True, window=window, q_positions=at, block=block)
            np.testing.assert_allclose(pyrope.to_numpy(got), full[:, :, start:end], rtol=0, atol=1e-14)


@pytest.mark.parametrize("hide", ["mask", "positions"])
@pytest.mark.parametrize("block", [None, 1, 3])
def test_left_padding_as_without(xp, hide, block):
    rng, lengths, n = np.random.default_rng(1), [5, 2, 8], 8
    q, k, v = (_rows(rng, 3, 2, n, 4) for _ in "qkv")
    at = np.arange(n) - (n - np.array(lengths)[:, None])  # (b, n): negative where it is padding
    k_at = np.where(at < 0, 2**31, at) if hide == "positions" else at
    mask = to_backend((at >= 0)[:, None, None, :], xp) if hide == "mask" else None
    on = [to_backend(x, xp) for x in (q, k, v)]
    got = pyrope.to_numpy(
        attention(*on, causal=True, window=4, q_positions=at, k_positions=k_at, mask=mask, block=block)
    )
    for b, length in enumerate(lengths):
        alone = attention(*(x[b][:, n - length :] for x in (q, k, v)), causal=True, window=4)
        np.testing.assert_allclose(got[b, :, n - length :], alone, rtol=0, atol=1e-14)
        assert (got[b, :, : n - length] == 0).all()  # padding sees nothing


@pytest.mark.parametrize("block", [None, 1, 3])
@pytest.mark.parametrize("by", ["mask", "positions"])
def test_packing_as_apart(xp, by, block):
    rng, lengths = np.random.default_rng(2), [4, 1, 6]
    n, owner = sum(lengths), np.repeat(np.arange(3), lengths)
    q, k, v = (_rows(rng, 2, n, 4) for _ in "qkv")
    at = np.concatenate([np.arange(length) for length in lengths])
    options = {"mask": to_backend(owner[:, None] == owner, xp)}
    if by == "positions":  # far apart, and a window that no sequence is longer than
        at, options = at + 100 * owner, {"window": 50}
    on = [to_backend(x, xp) for x in (q, k, v)]
    got = pyrope.to_numpy(attention(*on, causal=True, q_positions=at, k_positions=at, block=block, **options))
    for i in range(3):
        alone = attention(*(np.ascontiguousarray(x[:, owner == i]) for x in (q, k, v)), causal=True)
        np.testing.assert_allclose(got[:, owner == i], alone, rtol=0, atol=1e-14)


def test_order_of_keys_does_not_matter(xp):
    rng = np.random.default_rng(3)
    q, k, v = (_rows(rng, 2, 40, 4) for _ in "qkv")
    order = rng.permutation(40)
    straight = attention(*(to_backend(x, xp) for x in (q, k, v)), causal=True, window=9)
    turned = attention(
        *(to_backend(np.ascontiguousarray(x), xp) for x in (q, k[:, order], v[:, order])),
        causal=True, window=9, k_positions=order, q_positions=range(40), block=4,
    )  # fmt: skip
    np.testing.assert_allclose(pyrope.to_numpy(turned), pyrope.to_numpy(straight), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "options, products",
    [
        ({}, 64),
        ({"causal": True}, 36),  # 1 + 2 + … + 8
        ({"causal": True, "window": 8}, 15),  # the diagonal and the tile before it
        ({"causal": True, "window": 9}, 15),
        ({"causal": True, "window": 10}, 21),
        ({"window": 8}, 22),
        ({"causal": True, "q_positions": np.full(64, -1)}, 0),
        ({"causal": True, "q_positions": np.repeat([0, 100], 32), "k_positions": np.repeat([100, 0], 32)}, 48),
        ({"window": 1, "q_positions": np.repeat([0, 1, 0, 1], 16), "k_positions": np.repeat([0, 1, 0, 1], 16)}, 32),
    ],
)
def test_what_is_hidden_is_never_computed(monkeypatch, options, products):
    # Eight tiles of eight queries and of eight keys: counted in products of one such pair.
    counted, genuine = [], np.matmul

    def matmul(a, b, **more):
        counted.append(a.shape[-2] * b.shape[-1] / 64)
        return genuine(a, b, **more)

    monkeypatch.setattr(softmax.np, "matmul", matmul)
    x = np.ones((1, 64, 4))
    attention(x, x, x, block=8, **options)
    assert sum(counted) == products


@pytest.mark.parametrize(
    "options, masked",
    [
        ({}, 0),
        ({"causal": True}, 8),  # the diagonal
        ({"causal": True, "window": 16}, 14),  # … and the other end of the window, but for the first two
        ({"causal": True, "q_positions": np.full(64, 7)}, 0),  # all of the first tile, nothing of the others
        ({"window": 8, "k_positions": np.zeros(64, int), "q_positions": np.full(64, 7)}, 0),
        ({"window": 8, "k_positions": np.zeros(64, int), "q_positions": np.arange(1, 65)}, 8),  # 1 … 8
    ],
)
def test_only_the_edge_is_masked(monkeypatch, options, masked):
    # Eight tiles of eight queries and of eight keys: counted in pairs of them that go through a mask.
    counted, genuine = [], softmax._hidden
    monkeypatch.setattr(softmax, "_hidden", lambda *a: counted.append(genuine(*a)) or counted[-1])
    x = np.ones((1, 64, 4))
    attention(x, x, x, block=8, **options)
    assert sum(mask.size / 64 for mask in counted) == masked


def test_tiles_of_the_device_fit_its_memory(monkeypatch):
    spy, sizes, rng = _Spy(), [], np.random.default_rng(0)
    q, k, v = (_rows(rng, 2, h, 20, 4) for h in (4, 2, 2))
    on_host = attention(q, k, v, causal=True)
    spy.empty = lambda shape, dtype: sizes.append(shape) or np.empty(shape, dtype)
    monkeypatch.setattr(softmax, "namespace", lambda **_: spy)
    monkeypatch.setattr(softmax, "_DEVICE", 1000)
    np.testing.assert_allclose(attention(q, k, v, causal=True), on_host, rtol=0, atol=1e-14)
    assert sizes == [2 * 4 * 6 * 20]  # six queries of each head: seven would be 1120 scores


def test_fully_masked_rows_are_zeros(xp):
    rng = np.random.default_rng(0)
    q, k, v = (to_backend(_rows(rng, 2, 3, 4, dtype=np.float32), xp) for _ in "qkv")
    visible = np.array([[False] * 3, [True] * 3, [False] * 3])
    for mask in (visible, np.where(visible, 0.0, -np.inf), np.where(visible, 0, -np.inf).astype(np.float16)):
        for function in (attention, attention_by_definition):
            got = pyrope.to_numpy(function(q, k, v, mask=to_backend(mask, xp)))
            assert got.dtype == np.float32 and (got[:, [0, 2]] == 0).all() and (got[:, 1] != 0).all()


def test_a_finite_mask_hides_nothing():
    # −1000 on every key is a constant: the softmax does not change.
    x = np.eye(3)[None]
    np.testing.assert_allclose(attention(x, x, x, mask=np.full((3, 3), -1e3)), attention(x, x, x), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_great_scores_do_not_overflow(xp, dtype):
    # exp(200) is beyond float32, exp(1000) beyond float64; differences are what counts.
    q, k = np.array([[[100.0]]]), np.array([[[100.0], [99.99], [-100.0]]])
    v = np.array([[[1.0], [2.0], [3.0]]])
    on = [to_backend(x.astype(dtype), xp) for x in (q, k, v)]
    weight = 1 / (1 + math.exp(100 * (float(k.astype(dtype)[0, 1, 0]) - 100)))
    for function in (attention, attention_by_definition):
        got = float(pyrope.to_numpy(function(*on)).item())
        assert abs(got - (2 - weight)) <= {"float64": 1e-12, "float32": 2e-3, "float16": 2e-3}[dtype]


def test_scale_before_the_product(xp):
    # (1e20·1e20)·1e-37 overflows on its way in float32; (1e20·1e-37)·1e20 does not.
    q, k = np.full((1, 1, 1), 1e20, np.float32), np.array([[[1e20], [0.0]]], np.float32)
    got = attention(
        to_backend(q, xp), to_backend(k, xp), to_backend(np.array([[[1.0], [0.0]]], np.float32), xp), scale=1e-37
    )
    assert pyrope.to_numpy(got).item() == 1.0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("function", [attention, attention_by_definition])
def test_empty_sequences(xp, shape, function):
    n, m = shape
    q, k, v = (to_backend(np.ones(s, np.float32), xp) for s in ((2, 4, n, 8), (2, 2, m, 8), (2, 2, m, 5)))
    mask = to_backend(np.ones((n, m), bool), xp)
    for options in (
        {},
        {"causal": True},
        {"mask": mask},
        {"causal": True, "q_positions": range(n), "k_positions": [*range(m)]},
    ):
        got = pyrope.to_numpy(function(q, k, v, **options))
        assert got.shape == (2, 4, n, 5) and got.dtype == np.float32 and (got == 0).all()


def test_empty_batches_and_values(xp):
    on = lambda *shape: to_backend(np.ones(shape), xp)  # noqa: E731
    assert attention(on(0, 2, 3, 4), on(0, 1, 3, 4), on(0, 1, 3, 4)).shape == (0, 2, 3, 4)
    assert attention(on(2, 3, 4), on(1, 3, 4), on(1, 3, 0)).shape == (2, 3, 0)


@given(st.data())
def test_probabilities(xp, data):
    axis = data.draw(st.integers(-2, 1))
    x = data.draw(arrays((3, 4), DTYPES[data.draw(st.sampled_from(["float32", "float64"]))])) * 30
    got = pyrope.to_numpy(softmax.probabilities(to_backend(x, xp), axis))
    wide = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(
        got, wide / wide.sum(axis=axis, keepdims=True), rtol=300 * UNIT[x.dtype.name], atol=1e-30
    )
    assert got.dtype == x.dtype


class _Spy:
    """numpy, but it notes the dtypes of all that its functions take and return."""

    def __init__(self):
        self.dtypes = set()

    def __getattr__(self, name):
        function = getattr(np, name)
        if (
            isinstance(function, type) or not callable(function) or name in ("where", "clip")
        ):  # these may see a wide mask
            return function

        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            for value in (*args, *kwargs.values(), result):
                if isinstance(value, np.ndarray | np.generic):
                    self.dtypes.add(value.dtype.name)
            return result

        return call


class _Watched(np.ndarray):
    """An array that notes the dtypes of everything that is computed from it."""

    dtypes: set[str] = set()

    def __array_finalize__(self, other):
        _Watched.dtypes.add(self.dtype.name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("function", [attention, attention_by_definition])
@pytest.mark.parametrize("mask", [None, "bool", "float64"])
def test_nothing_is_computed_in_float64(monkeypatch, dtype, function, mask):
    spy, rng = _Spy(), np.random.default_rng(0)
    _Watched.dtypes = set()
    monkeypatch.setattr(softmax, "namespace", lambda **_: spy)
    monkeypatch.setattr(definition, "namespace", lambda *_: spy)
    q, k, v = (rng.standard_normal((4, 300, 8)).astype(DTYPES[dtype]).view(_Watched) for _ in "qkv")
    bias = None if mask is None else np.ones((300, 300)).astype(mask)
    got = function(q, k, v, causal=True, window=290, softcap=5.0, scale=0.5, mask=bias)
    assert got.dtype == DTYPES[dtype]
    assert {name for name in spy.dtypes | _Watched.dtypes if "float" in name} == {dtype, "float32"}


@pytest.mark.parametrize("function", [attention, attention_by_definition])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_what_is_finite_in_a_wider_mask_hides_nothing(xp, function, dtype):
    v = np.arange(6.0).reshape(1, 6, 1).astype(DTYPES[dtype])
    q, k = (to_backend(np.ones((1, 6, 8)).astype(DTYPES[dtype]), xp) for _ in "qk")
    mask = np.full((6, 6), np.finfo(np.float64).min)
    got = function(q, k, to_backend(v, xp), mask=to_backend(mask, xp))
    assert (pyrope.to_numpy(got).astype(float) == 2.5).all()  # the mean of all values
    mask[:, 1:] = -np.inf
    got = function(q, k, to_backend(v, xp), mask=to_backend(mask, xp))
    assert (pyrope.to_numpy(got).astype(float) == 0).all()  # the first alone


def test_options_that_do_not_exist():
    x = np.ones((1, 3, 4))
    assert attention(x, x, x, causal=True, block=2**70).shape == (1, 3, 4)
    with pytest.raises(TypeError, match="attention\\(\\) got unexpected options: block, windw"):
        attention_by_definition(x, x, x, block=2, windw=3)


def test_many_short_texts_are_not_taken_one_by_one(monkeypatch):
    calls, genuine = [], softmax._attend
    monkeypatch.setattr(softmax, "_attend", lambda *args: calls.append(genuine(*args)))
    x = np.ones((64, 16, 9, 8), np.float32)
    attention(x, x, x, causal=True)
    assert len(calls) <= 4  # 1024 heads of 81 scores


def _peak(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": 100}, {"window": 100, "softcap": 9.0}]
)
def test_memory_is_linear(options):
    # 4,096 positions: all scores of a head would be 67 MB in float32; 64 rows of them are 1 MB.
    q, k, v = (np.ones((2, 4096, 8), np.float32) for _ in "qkv")
    small = _peak(lambda: attention(q[:, :1024], k[:, :1024], v[:, :1024], block=64, **options))
    large = _peak(lambda: attention(q, k, v, block=64, **options))
    scores = 64 * 4096 * 4
    assert large <= q.nbytes + 1.5 * scores + 2**18 and large <= 5 * small + 2**18


def test_memory_with_a_mask_and_groups():
    q, k = np.ones((8, 2048, 8), np.float32), np.ones((2, 2048, 8), np.float32)
    mask = np.ones((2048, 2048), bool)
    assert _peak(lambda: attention(q, k, k, mask=mask)) <= q.nbytes + 2.5 * 128 * 2048 * 4 + 2**18


def test_keys_are_not_copied():
    # Nor tiled for the query heads, nor made contiguous for the heads of a (b, n, h, d) array.
    wide = np.ones((1, 100_000, 2, 16), np.float32)
    k = wide.swapaxes(1, 2)
    q = np.ones((1, 8, 1, 16), np.float32)
    assert _peak(lambda: attention(q, k, k)) < 0.6 * wide.nbytes


Q, K = np.ones((2, 4, 3, 8), np.float32), np.ones((2, 2, 5, 8), np.float32)
NAN = np.full(3, np.nan)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"q": Q.astype(int)}, TypeError, "q must be float16, bfloat16, float32 or float64, .* was dtype\\('int64'\\)"),
        ({"k": K.astype(complex)}, TypeError, "k must be float16.*complex128"),
        ({"v": K.astype(">f4")}, TypeError, "v must be float16.* native byte order, was dtype\\('>f4'\\)"),
        ({"k": K.astype(np.float64)}, TypeError, "q, k and v must have one dtype, k was float64 and q float32: convert"),
        ({"v": K.astype(np.float16)}, TypeError, "one dtype, v was float16 and q float32"),
        ({"q": Q.tolist()}, TypeError, "q must be a NumPy or CuPy array, was list"),
        ({"mask": [[True]]}, TypeError, "mask must be a NumPy or CuPy array, was list"),
        ({"q": np.ones((3, 8), np.float32)}, ValueError, r"q must have shape \(…, h, n, d\) .*, had \(3, 8\)"),
        ({"k": np.ones((5, 8), np.float32)}, ValueError, r"k must have shape \(…, g, m, d\) .*, had \(5, 8\)"),
        ({"v": np.ones(8, np.float32)}, ValueError, r"v must have shape \(…, g, m, e\) .*, had \(8,\)"),
        ({"q": Q[..., :0]}, ValueError, r"q must have .* a feature at least, had \(2, 4, 3, 0\)"),
        ({"q": Q[:, :0]}, ValueError, r"q must have .* a head .* had \(2, 0, 3, 8\)"),
        ({"k": K[:, :0]}, ValueError, r"k must have .* a head .* had \(2, 0, 5, 8\)"),
        ({"v": K[:, :0]}, ValueError, r"v must have .* a head .* had \(2, 0, 5, 8\)"),
        ({"k": K[..., :7]}, ValueError, r"must agree in …, g, m and d, had shapes .*\(2, 2, 5, 7\)"),
        ({"v": K[:, :, :4]}, ValueError, "must agree in …, g, m and d"),
        ({"v": K[:, :1]}, ValueError, "must agree in …, g, m and d"),
        ({"k": K[:1]}, ValueError, "must agree in …, g, m and d"),
        ({"v": K[:1]}, ValueError, "must agree in …, g, m and d"),
        ({"q": Q[0]}, ValueError, "must agree in …, g, m and d"),
        ({"q": Q[:, :3]}, ValueError, "the 2 key heads must divide the 3 query heads"),
        ({"q": Q[:, :1]}, ValueError, "the 2 key heads must divide the 1 query heads"),
        ({"mask": np.ones((3, 4), bool)}, ValueError, r"mask must be broadcastable to \(…, h, n, m\), \(2, 4, 3, 5\), had shape \(3, 4\)"),
        ({"mask": np.ones((2, 3, 5), bool)}, ValueError, "mask must be broadcastable"),
        ({"mask": np.ones((1, 2, 4, 3, 5), bool)}, ValueError, r"mask must be broadcastable .* had shape \(1, 2, 4, 3, 5\)"),
        ({"mask": np.ones((3, 5), int)}, TypeError, "mask must be bool, where True is visible; one that is added must be float16, .* was dtype\\('int64'\\)"),
        ({"mask": np.ones((3, 5), complex)}, TypeError, "mask must be bool"),
        ({"window": 0}, ValueError, "window must be at least 1, was 0"),
        ({"window": -3}, ValueError, "window must be at least 1, was -3"),
        ({"window": 2.0}, TypeError, "window must be an integer, was 2.0"),
        ({"causal": 1}, TypeError, "causal must be True or False, was 1"),
        ({"softcap": 0.0}, ValueError, "softcap must be finite and greater than 0, was 0.0"),
        ({"softcap": math.nan}, ValueError, "softcap must be finite and greater than 0, was nan"),
        ({"scale": -1.0}, ValueError, "scale must be finite and greater than 0, was -1.0"),
        ({"scale": math.inf}, ValueError, "scale must be finite"),
        ({"scale": "1"}, TypeError, "scale must be a number, was '1'"),
        ({"q_positions": NAN}, TypeError, "q_positions must be integers, .*were float64"),
        ({"k_positions": np.zeros(5)}, TypeError, "k_positions must be integers, .*were float64"),
        ({"q_positions": np.zeros(3, bool)}, TypeError, "q_positions must be integers, .*were bool"),
        ({"q_positions": [0, 1]}, ValueError, r"q_positions must have shape \(3,\), or \(…, 3\) with .* \(2,\), had \(2,\)"),
        ({"q_positions": 4}, ValueError, r"q_positions must have shape .* had \(\)"),
        ({"q_positions": np.zeros((4, 3), int)}, ValueError, r"q_positions must have shape .* had \(4, 3\)"),
        ({"k_positions": np.zeros((2, 4, 5), int)}, ValueError, r"k_positions must have shape \(5,\).* had \(2, 4, 5\)"),
        ({"k_positions": [0, 1, 2, 3, 2**31 + 1]}, ValueError, r"k_positions must lie within ±2\^31, were from 0 to 2147483649"),
        ({"q_positions": [0, 1, -(2**31) - 1]}, ValueError, r"q_positions must lie within ±2\^31"),
        ({"k": K[:, :, :2], "v": K[:, :, :2], "k_positions": [0, 1]}, ValueError, "q_positions must be given: 3 queries cannot be the last of 2 keys"),
    ],
)  # fmt: skip
def test_bad_input(change, error, match):
    arguments = {"q": Q, "k": K, "v": K} | change
    for function in (attention, attention_by_definition):
        with pytest.raises(error, match=match):
            function(
                arguments["q"],
                arguments["k"],
                arguments["v"],
                **{name: x for name, x in arguments.items() if name not in "qkv"},
            )


@pytest.mark.parametrize(
    "block, error, match",
    [
        (0, ValueError, "block must be at least 1, was 0"),
        (-1, ValueError, "block must be at least 1"),
        (1.5, TypeError, "block must be an integer, was 1.5"),
        (True, TypeError, "block must be an integer, was True"),
    ],
)
def test_bad_blocks(block, error, match):
    with pytest.raises(error, match=match):
        attention(Q, K, K, block=block)


def test_mixed_libraries(xp):
    if xp is np:
        pytest.skip("both sides are NumPy")
    with pytest.raises(TypeError, match="q is a numpy array, k is a cupy array, v is a cupy array"):
        attention(Q, to_backend(K, xp), to_backend(K, xp))
    with pytest.raises(TypeError, match="mask is a numpy array"):
        attention(*(to_backend(x, xp) for x in (Q, K, K)), mask=np.ones((3, 5), bool))


def test_positions_on_the_device(xp):
    on = [to_backend(x, xp) for x in (Q, K, K)]
    at = pyrope.from_numpy(np.arange(2, 5), xp)
    same = [pyrope.to_numpy(attention(*on, causal=True, q_positions=p)) for p in (at, None)]
    assert (same[0] == same[1]).all()


@pytest.mark.parametrize("size", [0.0, 1.0, 59.0, 61.0, 88.0, 1e4, 1e30])
@pytest.mark.parametrize("window", [None, 1, 70])
def test_scores_of_any_size_with_many_queries(size, window):
    # Small scores are taken to exp as they are, large ones would overflow or vanish: both sides of the border.
    rng = np.random.default_rng(3)
    q, k, v = (_rows(rng, 2, 80, 8) for _ in "qkv")
    q *= np.sqrt(size * np.sqrt(8)) / np.linalg.norm(q, axis=-1, keepdims=True)
    k = q.copy() if size else k
    k[:, ::2] *= -1  # scores from −size to size
    got = attention(*(x.astype(np.float32) for x in (q, k, v)), causal=True, window=window, block=80)
    exact = attention_by_definition(q, k, v, causal=True, window=window)
    np.testing.assert_allclose(got, exact, rtol=0, atol=3e-6 * max(1.0, min(size, 1e4) / 10) if size < 1e5 else 1e-2)


def test_a_row_that_sees_nothing_is_zeros_among_many():
    x = np.ones((1, 80, 4), np.float32)
    mask = np.ones((80, 80), bool)
    mask[7] = False
    out = attention(x, x, x, mask=mask)
    assert not out[0, 7].any()
    np.testing.assert_allclose(out[0, 8], 1, rtol=1e-6)
