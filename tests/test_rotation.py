"""The rotation in every form, dtype, layout and memory layout, against the definition with mpmath's cosines and sines."""

import dataclasses

import numpy as np
import pytest
import truth
from hypothesis import given, strategies as st
from strategies import COMPUTE_UNIT, DTYPES, UNIT, arrays, dtypes, position_arrays, positions, ropes, to_backend

import pyrope
from pyrope import Axes, Linear, Rope, YaRN, definition, rotation, tiles

LIMIT = 2**30
HALF8 = Rope(8, 10000.0, "half")


def pairs(rope: Rope) -> tuple[definition.Features, definition.Features]:
    return definition.pairs(rope.layout, rope.width, rope.start)


def still(x: np.ndarray, rope: Rope) -> np.ndarray:
    """The features that are not rotated."""
    return np.delete(x, slice(rope.start, rope.start + rope.width), axis=-1)


def expected(x: np.ndarray, m: np.ndarray, rope: Rope, inverse: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """R(m)·x, or its inverse, by the definition in float64, and how far rotate in x's dtype may be from it.

    With u the unit roundoff of the arithmetic, and errors to first order in units of u(|x cos| + |y sin|): tables are
    off by 1 in float32 and 5 (2.5 ulp) in float64, the product and the sum by 1 each, and for the inverse a² by 3 and
    the division by 1: 6 or 11, and in float64 7 more, since the definition does the same with tables that are off by 1.
    Where the result is rounded to a shorter dtype, that is u_out·|out| more, or the smallest number of float16.
    """
    cos, sin = truth.tables(rope, m, x.ndim)
    reads, writes = pairs(rope)
    if inverse:
        a2 = float(truth.attention_factor(rope)) ** 2
        cos, sin, reads, writes = cos / a2, -sin / a2, writes, reads
    wide, name = x.astype(np.float64), x.dtype.name
    out = definition.rotate(wide, cos, sin, reads, writes)  # Eq. (34)
    halves = (cos, 0 * sin), (0 * cos, sin)
    size = sum(abs(definition.rotate(wide, *half, reads, writes)) for half in halves)
    units = (18 if name == "float64" else 6) * COMPUTE_UNIT[name]
    short = UNIT[name] * (abs(out) + 2**-20 * size) + 2.0**-24 * (name == "float16")
    return out, units * size + short * (name in ("float16", "bfloat16"))


def assert_rotated(y, x, m, rope, inverse=False):
    assert y.dtype == x.dtype and y.shape == x.shape
    out, allowed = expected(x, m, rope, inverse)
    host = pyrope.to_numpy(y)
    assert (abs(host.astype(np.float64) - out) <= allowed).all()
    assert (still(host, rope) == still(x, rope)).all()


@st.composite
def cases(draw, **more):
    """x (b, h, n, d), positions that fit it in one of the allowed ways, and a rope."""
    rope = draw(ropes(max_pairs=6, **more))
    b, h, n = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 4))
    x = draw(arrays((b, h, n, rope.head_dim), draw(dtypes)))
    shape = draw(st.sampled_from([(), (n,), (b, n), (1, n), (b, h, n), (b, 1, n)]))
    return x, draw(position_arrays(rope, shape)), rope


@given(cases())
def test_every_form_equals_the_definition(xp, case):
    x, m, rope = case
    before, device = x.copy(), to_backend(x, xp)
    for function in (pyrope.rotate, pyrope.rotate_complex, pyrope.unrotate):
        y = function(device, m, rope)  # Eq. (34), Eq. (12)
        assert pyrope.namespace(y) is xp
        assert_rotated(y, x, m, rope, inverse=function is pyrope.unrotate)
    assert (pyrope.to_numpy(device) == before).all()


@given(st.data(), st.floats(2.0, 1e6), st.sampled_from(["interleaved", "half", "interleaved-to-half"]))
def test_a_plain_rope_is_the_definition_from_its_base_to_its_rotation(xp, data, base, layout):
    """The definition's angle mθ is off by 16u of itself: its exponent by 1, times ln base ≤ 14, power and product 1."""
    rope = Rope(
        12, base, layout, data.draw(st.sampled_from([4, 8, 12])), data.draw(st.sampled_from(["prefix", "suffix"]))
    )
    x, m = data.draw(arrays((2, 5, 12), DTYPES["float64"])), data.draw(position_arrays(rope, (5,), 2**16))
    theta = definition.frequencies(rope.width, base)
    y = definition.rotate(x, *definition.tables(m, theta), *pairs(rope))
    allowed = (18 + 16 * abs(m[:, None])) * UNIT["float64"] * abs(x).max() * 1.5  # a pair is at most √2 as long
    assert (abs(pyrope.to_numpy(pyrope.rotate(to_backend(x, xp), m, rope)) - y) <= allowed).all()
    np.testing.assert_allclose(pyrope.frequencies(rope), theta, rtol=16 * UNIT["float64"])


@given(cases())
def test_unrotate_undoes_rotate(xp, case):
    x, m, rope = case
    device = to_backend(x, xp)
    y = pyrope.unrotate(pyrope.rotate(device, m, rope), m, rope)
    assert y.dtype == x.dtype
    tables = pyrope.rotation_tables(rope, m, like=device)
    again = pyrope.unrotate(pyrope.rotate(device, m, rope, tables=tables), m, rope, tables=tables)
    assert_same_but_for_rounding(pyrope.to_numpy(again), pyrope.to_numpy(y), x)
    # Two rotations, each with its rounding, which the second spreads over both features of a pair.
    scale = np.hypot(*np.abs(_pair_ends(x.astype(np.float64), rope))) if x.size else np.zeros(())
    unit = UNIT[x.dtype.name] + 8 * COMPUTE_UNIT[x.dtype.name]
    error = abs(pyrope.to_numpy(y).astype(np.float64) - x.astype(np.float64))
    assert (np.maximum(*_pair_ends(error, rope)) <= 3 * unit * scale + 2.0**-22 * (x.dtype.name == "float16")).all()
    assert (still(error, rope) == 0).all()


def _pair_ends(x, rope):
    reads, _ = pairs(rope)
    return x[..., reads[0]], x[..., reads[1]]


@given(st.data())
def test_matrix_is_the_truth(data):
    rope = data.draw(ropes(max_pairs=6))
    m = data.draw(position_arrays(rope, ()))
    matrix, exact = pyrope.rotation_matrix(m, rope), truth.matrix(rope, m)  # Eq. (13), Eq. (14), Eq. (15)
    assert matrix.dtype == np.float64 and (abs(matrix - exact) <= 3 * np.spacing(abs(exact))).all()


def _squared(rope):
    """a² on the rotated features, 1 on the others."""
    diagonal = np.ones(rope.head_dim)
    diagonal[rope.start : rope.start + rope.width] = rope.attention_factor**2
    return diagonal


def _unpermuted(matrix, rope):
    """A matrix of "interleaved-to-half" with its rows in the order in which it reads; others as they are."""
    return matrix[_order(rope)]


def _order(rope):
    order, feature = np.arange(rope.head_dim), np.arange(rope.head_dim)
    for read, write in zip(*pairs(rope), strict=True):
        order[read] = feature[write]
    return order


@given(st.data())
def test_orthogonality(data):
    rope = data.draw(ropes(max_pairs=6))
    matrix = pyrope.rotation_matrix(data.draw(position_arrays(rope, (), LIMIT)), rope)
    a2 = np.diag(_squared(rope))
    np.testing.assert_allclose(matrix.T @ matrix, a2, rtol=0, atol=1e-15 * a2.max())  # RᵀR = a²I


@given(st.data())
def test_rotations_compose(data):
    rope = data.draw(ropes(max_pairs=6))
    m, n = data.draw(position_arrays(rope, (), LIMIT)), data.draw(position_arrays(rope, (), LIMIT))
    r_m, r_n, r_sum = (_unpermuted(pyrope.rotation_matrix(k, rope), rope) for k in (m, n, m.astype(np.int64) + n))
    a = np.sqrt(_squared(rope))
    np.testing.assert_allclose(r_m @ r_n, a * r_sum, rtol=0, atol=2e-15 * a.max() ** 2)  # R(m)R(n) = a·R(m+n)


@given(st.data())
def test_backwards_is_transposed(data):
    rope = data.draw(ropes(max_pairs=6))
    m = data.draw(position_arrays(rope, (), LIMIT))
    back, forth = (_unpermuted(pyrope.rotation_matrix(k, rope), rope) for k in (-m, m))
    assert (back == forth.T).all()  # R(−m) = R(m)ᵀ, to the bit


@given(st.data())
def test_position_zero_is_the_factor(data):
    rope = data.draw(ropes(max_pairs=6))
    zero = np.zeros(() if rope.axes is None else (rope.axes.count,), int)
    matrix = _unpermuted(pyrope.rotation_matrix(zero, rope), rope)
    expected = np.ones(rope.head_dim)
    expected[rope.start : rope.start + rope.width] = rope.attention_factor
    assert (matrix == np.diag(expected)).all()


@given(st.data(), st.sampled_from(["float32", "float64"]))
def test_norms_are_kept(xp, data, dtype):
    rope = data.draw(ropes(max_pairs=6).filter(lambda rope: rope.attention_factor == 1))
    x = data.draw(arrays((3, rope.head_dim), DTYPES[dtype]))
    m = data.draw(position_arrays(rope, (3,), LIMIT))
    y = pyrope.to_numpy(pyrope.rotate(to_backend(x, xp), m, rope))
    norm = lambda z: np.linalg.norm(z.astype(np.float64), axis=-1)  # noqa: E731
    np.testing.assert_allclose(norm(y), norm(x), rtol=8 * UNIT[dtype])


@given(st.data())
def test_scores_depend_on_the_distance_only(xp, data):
    rope = data.draw(ropes(max_pairs=6))
    q, k = (data.draw(arrays((1, rope.head_dim), DTYPES["float64"])) for _ in "qk")
    m, n, shift = (data.draw(position_arrays(rope, (1,), LIMIT)).astype(np.int64) for _ in range(3))
    turned = lambda x, at: pyrope.to_numpy(pyrope.rotate(to_backend(x, xp), at, rope))  # noqa: E731
    here = (turned(q, m) * turned(k, n)).sum()
    there = (turned(q, m + shift) * turned(k, n + shift)).sum()  # Eq. (11): a function of m − n alone
    allowed = 1e-14 * rope.attention_factor**2 * np.linalg.norm(q) * np.linalg.norm(k) + 1e-14 * abs(q * k).sum()
    assert abs(here - there) <= allowed
    # Eq. (16): qᵀR(n − m)k, with the factor a² where the rotation has a twice; a rope's R has it once.
    relative = _unpermuted(pyrope.rotation_matrix((n - m)[..., 0], rope), rope)
    a = np.sqrt(_squared(rope))
    assert abs(here - (a * q @ relative @ k.T).item()) <= allowed


def test_all_of_rope_turns_what_the_paper_says():
    # Two dimensions, by hand: (1, 0) at m = 1 becomes (cos 1, sin 1).
    y = pyrope.rotate(np.array([[1.0, 0.0]]), [1], Rope(2, 10000.0, "interleaved"))
    np.testing.assert_allclose(y, [[0.5403023058681398, 0.8414709848078965]], rtol=1e-15)


@given(st.data())
def test_layouts_are_equal_under_permuted_weights(xp, data):
    rope = data.draw(ropes(max_pairs=5, layout=st.just("interleaved")))
    other = dataclasses.replace(rope, layout=data.draw(st.sampled_from(["half", "interleaved-to-half"])))
    heads, e, n = data.draw(st.integers(1, 3)), 3, 4
    w_q, w_k = (data.draw(arrays((heads * rope.head_dim, e), DTYPES["float64"])) for _ in "qk")
    tokens = data.draw(arrays((n, e), DTYPES["float64"]))
    m = data.draw(position_arrays(rope, (n,), LIMIT))

    def rotated(w, rope):
        x = (tokens @ pyrope.to_numpy(w).T).reshape(n, heads, rope.head_dim).swapaxes(0, 1)
        return pyrope.to_numpy(pyrope.rotate(to_backend(x, xp), m, rope))

    def moved(w):
        return pyrope.permute_weights(
            to_backend(w, xp), heads, rope.layout, other.layout, rope.rotary_dim, rope.placement
        )

    scores = rotated(w_q, rope) @ rotated(w_k, rope).swapaxes(-1, -2)
    np.testing.assert_allclose(
        rotated(moved(w_q), other) @ rotated(moved(w_k), other).swapaxes(-1, -2), scores, atol=1e-12 * abs(scores).max()
    )
    # Back again it is the same array; as a bias, and as the vector of a norm, it moves alike.
    back = pyrope.permute_weights(moved(w_q), heads, other.layout, rope.layout, rope.rotary_dim, rope.placement)
    assert (pyrope.to_numpy(back) == w_q).all()
    assert (pyrope.to_numpy(moved(np.ascontiguousarray(w_q[:, 0]))) == pyrope.to_numpy(moved(w_q))[:, 0]).all()


def test_permutation_of_the_published_rule(xp):
    # The rotated rows of each head: 2j for j < r/2, then 2(j − r/2) + 1.
    w = np.arange(24)
    got = pyrope.to_numpy(pyrope.permute_weights(to_backend(w, xp), 2, "interleaved", "half", 8))
    assert got.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11, 12, 14, 16, 18, 13, 15, 17, 19, 20, 21, 22, 23]
    got = pyrope.permute_weights(w, 2, "interleaved", "half", 4, "suffix")
    assert got.tolist() == [*range(8), 8, 10, 9, 11, *range(12, 20), 20, 22, 21, 23]
    assert pyrope.permute_weights(w, 1, "interleaved", "interleaved-to-half").tolist() == w.tolist()


@given(cases())
def test_tables_out_and_in_place_change_nothing(xp, case):
    x, m, rope = case
    device = to_backend(x, xp)
    plain = pyrope.to_numpy(pyrope.rotate(device, m, rope))
    tables = pyrope.rotation_tables(rope, m, like=device)
    with_tables = pyrope.rotate(device, m, rope, tables=tables)
    out = xp.empty(x.shape, x.dtype)
    assert pyrope.rotate(device, m, rope, out=out) is out
    own = xp.empty(x.shape, x.dtype)
    own[...] = device
    assert pyrope.rotate(own, m, rope, tables=tables, out=own) is own
    for got in (with_tables, out, own):
        assert_same_but_for_rounding(pyrope.to_numpy(got), plain, x)


def assert_same_but_for_rounding(got, wanted, x):
    """NumPy's complex product rounds once less in its vector code than in its scalar code, and which of them an
    element meets depends on the length of the array: so the last bits do."""
    name = x.dtype.name
    largest = float(abs(x.astype(np.float64)).max(initial=0)) * 8  # attention factors are at most 4
    allowed = 2 * UNIT[name] * abs(wanted.astype(np.float64)) + 4 * COMPUTE_UNIT[name] * largest
    assert (abs(got.astype(np.float64) - wanted.astype(np.float64)) <= allowed).all()


@given(cases(), st.sampled_from(["reversed", "shifted"]))
def test_out_that_overlaps_x_in_another_way(xp, case, kind):
    x, m, rope = case
    buffer = xp.empty((2, *x.shape), x.dtype)
    view, out = (
        (buffer[0], buffer[0][..., ::-1])
        if kind == "reversed"
        else (buffer.reshape(-1)[: x.size].reshape(x.shape), None)
    )
    if out is None:
        start = min(rope.head_dim, x.size)
        out = buffer.reshape(-1)[start : start + x.size].reshape(x.shape)
    view[...] = to_backend(x, xp)
    pyrope.rotate(view, m, rope, out=out)
    np.testing.assert_allclose(
        pyrope.to_numpy(out).astype(np.float64), pyrope.to_numpy(pyrope.rotate(to_backend(x, xp), m, rope)).astype(np.float64),
        rtol=4 * UNIT[x.dtype.name], atol=2.0**-20,
    )  # fmt: skip


@given(st.data())
def test_tiles_change_nothing(data):
    rope = data.draw(ropes(max_pairs=4))
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    x = data.draw(arrays((*shape, rope.head_dim), data.draw(dtypes)))
    m = data.draw(position_arrays(rope, data.draw(st.sampled_from([(), (shape[-1],), tuple(shape)]))))
    at_once = pyrope.rotate(x, m, rope)
    before = rotation._TILE
    try:
        rotation._TILE = data.draw(st.integers(1, 64))
        assert_same_but_for_rounding(pyrope.rotate(x, m, rope), at_once, x)
    finally:
        rotation._TILE = before


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), st.integers(1, 40))
def test_tiles_cover_every_element_once_and_keep_the_limit(shape, limit):
    count = np.zeros(shape, int)
    for index in tiles.tiles(shape, limit):
        count[index] += 1
        assert count[index].size <= max(limit, shape[-1])
    assert (count == 1).all()


@given(st.data(), positions())
def test_one_position_and_its_array_are_the_same(data, m):
    rope = data.draw(ropes(max_pairs=4, with_axes=False))
    x = data.draw(arrays((rope.head_dim,), data.draw(dtypes)))
    y = pyrope.rotate(x, m, rope)
    assert y.shape == x.shape
    assert_same_but_for_rounding(y, pyrope.rotate(x[None], [m], rope)[0], x)


def test_positions_on_the_device_and_tables_once_for_all_layers(xp):
    x = pyrope.from_numpy(np.ones((2, 3, 8), np.float32), xp)
    m = pyrope.from_numpy(np.arange(3), xp)
    tables = pyrope.rotation_tables(HALF8, m, like=x)
    assert (
        pyrope.to_numpy(pyrope.rotate(x, m, HALF8, tables=tables))
        == pyrope.to_numpy(pyrope.rotate(x, [0, 1, 2], HALF8))
    ).all()


def test_tables_keep_their_positions_when_the_caller_changes_hers():
    m, x = np.arange(3), np.ones((3, 8))
    tables = pyrope.rotation_tables(HALF8, m, like=x)
    m += 1
    with pytest.raises(ValueError, match="other positions"):
        pyrope.rotate(x, m, HALF8, tables=tables)


@pytest.mark.parametrize("layout, ends", [("interleaved", [2, 3]), ("half", [2, 6]), ("interleaved-to-half", [1, 5])])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:invalid value")  # inf·cos − inf·sin, as it should be
def test_a_bad_number_stays_in_its_own_pair(xp, value, layout, ends):
    x = np.ones((2, 2, 8), np.float32)
    x[0, 1, 2] = value
    y = pyrope.to_numpy(pyrope.rotate(to_backend(x, xp), [3, 4], Rope(8, 10000.0, layout)))
    bad = np.zeros(x.shape, bool)
    bad[0, 1, ends] = True
    assert (np.isfinite(y) == ~bad).all()


def test_memory_that_cannot_be_viewed_as_complex(xp):
    # float32 at an odd offset: a GPU would read complex numbers there from a misaligned address.
    flat = pyrope.from_numpy(np.arange(17, dtype=np.float32), xp)
    rope = Rope(8, 10000.0, "interleaved")
    x = flat[1:].reshape(2, 8)
    y = pyrope.to_numpy(pyrope.rotate(x, [1, 2], rope, out=xp.empty((2, 8), np.float32)))
    np.testing.assert_allclose(y, pyrope.rotate_complex(np.arange(1, 17.0).reshape(2, 8), [1, 2], rope), rtol=1e-5)


def test_decay_is_figure_2():
    rope, distances = Rope(128, 10000.0, "interleaved"), np.arange(0, 257)
    curve = pyrope.decay(distances, rope)
    tables = definition.tables(distances, definition.frequencies(128))
    np.testing.assert_allclose(curve, definition.decay(*tables), rtol=1e-12)
    # As in the paper's figure: it starts at (d/2 + 1)/2 and falls on average, with ripples.
    assert curve[0] == 32.5 and curve.argmax() == 0
    means = curve[1:].reshape(8, 32).mean(axis=-1)
    assert (np.diff(means) < 0).all()


@given(st.data())
def test_decay_equals_the_definition(data):
    """Sums of p numbers of size 1 are off by p·u each, of the tables and of the sums; the factor must not be in it."""
    rope = data.draw(ropes(max_pairs=8))
    m = data.draw(position_arrays(rope, (3,)))
    cos, sin = (table / float(truth.attention_factor(rope)) for table in truth.tables(rope, m))
    allowed = 8 * rope.pairs**2 * UNIT["float64"]
    np.testing.assert_allclose(pyrope.decay(m, rope), definition.decay(cos, sin), rtol=0, atol=allowed)


@given(st.data())
def test_decay_bounds_the_scores(data):
    rope = data.draw(ropes(max_pairs=8, with_axes=False))
    m, n = data.draw(positions(LIMIT)), data.draw(positions(LIMIT))
    q, k = (data.draw(arrays((rope.head_dim,), DTYPES["float64"])) for _ in "qk")
    (q0, q1), (k0, k1) = _pair_ends(q, rope), _pair_ends(k, rope)
    h = (q0 + 1j * q1) * (k0 - 1j * k1)
    turns = np.exp(
        1j * np.array([float((rope.direction * (m - n) * t) % (2 * truth.MP.pi)) for t in truth.theta(rope)])
    )
    score = (h * turns).sum()  # Eq. (35)
    sums = np.cumsum(turns)  # S_1 …
    steps = np.diff(h, append=0)  # h_{i+1} − h_i, h_{d/2} = 0
    assert abs(score + (sums * steps).sum()) <= 1e-12 * (1 + abs(h).sum() * rope.pairs)  # Eq. (36)
    bound = abs(steps).max() * rope.pairs * pyrope.decay(m - n, rope)
    assert abs(score) <= bound * (1 + 1e-12) + 1e-12  # Eq. (37)
    np.testing.assert_allclose(abs(sums).sum(), rope.pairs * pyrope.decay(m - n, rope), rtol=1e-12, atol=1e-12)
    # And what rope computes is the real part of Eq. (35), times a².
    turned = [pyrope.rotate(x, p, rope) for x, p in ((q, m), (k, n))]
    got = sum(turned[0][f] * turned[1][f] for f in range(rope.start, rope.start + rope.width))
    assert abs(got - rope.attention_factor**2 * score.real) <= 1e-12 * (1 + rope.attention_factor**2 * abs(h).sum())


X = np.ones((2, 3, 4, 8))  # (b, h, n, d)


@pytest.mark.parametrize(
    "x, m, error, match",
    [
        (
            np.ones((4, 8), int),
            range(4),
            TypeError,
            "x must be float16, bfloat16, float32 or float64, .* was dtype\\('int64'\\)",
        ),
        (np.ones((4, 8), complex), range(4), TypeError, "x must be float16.*complex128"),
        (np.ones((4, 8), bool), range(4), TypeError, "x must be float16.*bool"),
        (np.ones((4, 8), ">f4"), range(4), TypeError, "native byte order, was dtype\\('>f4'\\)"),
        (np.ones((4, 8), np.longdouble), range(4), TypeError, "x must be float16"),
        ([[1.0] * 8], [0], TypeError, "x must be a NumPy or CuPy array, was list"),
        (np.ones((4, 6)), range(4), ValueError, r"the last axis of x must be head_dim, 8, x had shape \(4, 6\)"),
        (np.ones(()), 0, ValueError, r"x had shape \(\)"),
        (X, range(5), ValueError, r"positions of shape \(5,\) do not fit x of shape \(2, 3, 4, 8\)"),
        (X, np.zeros((3, 4), int), ValueError, r"positions of shape \(3, 4\) do not fit"),
        (X, np.zeros((2, 2, 4), int), ValueError, "do not fit"),
        (X, np.zeros((2, 3, 1, 4), int), ValueError, "do not fit"),
        (X, np.zeros((2, 1), int), ValueError, "do not fit"),
        (np.ones(8), [0], ValueError, r"positions of shape \(1,\) do not fit x of shape \(8,\)"),
    ],
)
def test_bad_arrays(x, m, error, match):
    for function in (pyrope.rotate, pyrope.unrotate, pyrope.rotate_complex):
        with pytest.raises(error, match=match):
            function(x, m, HALF8)


@pytest.mark.parametrize(
    "more, error, match",
    [
        ({"out": np.ones((4, 8), np.float32)}, ValueError, "out must have the shape and dtype of the result"),
        ({"out": np.ones((3, 8))}, ValueError, "out must have the shape and dtype of the result"),
        ({"out": [[0.0] * 8] * 4}, TypeError, "out must be a NumPy or CuPy array, was list"),
        ({"tables": pyrope.cos_sin(HALF8, range(4))}, TypeError, "tables must come from rotation_tables, were tuple"),
        (
            {"tables": pyrope.rotation_tables(Rope(8, 500.0, "half"), range(4), X)},
            ValueError,
            "tables were made for Rope",
        ),
        ({"tables": pyrope.rotation_tables(HALF8, range(1, 5), X)}, ValueError, "tables were made for other positions"),
        ({"tables": pyrope.rotation_tables(HALF8, range(5), X)}, ValueError, "tables were made for other positions"),
        (
            {"tables": pyrope.rotation_tables(HALF8, range(4), X.astype("f4"))},
            ValueError,
            "made for float32 arithmetic, x of dtype float64 needs",
        ),
    ],
)
def test_bad_outs_and_tables(more, error, match):
    with pytest.raises(error, match=match):
        pyrope.rotate(np.ones((4, 8)), range(4), HALF8, **more)


def test_tables_do_not_excuse_float_positions():
    with pytest.raises(TypeError, match="positions must be integers"):
        pyrope.rotate(np.ones((4, 8)), [0.0, 1.0, 2.0, 3.0], HALF8, tables=pyrope.rotation_tables(HALF8, range(4), X))


def test_out_that_cannot_be_written():
    out = np.ones((4, 8))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable"):
        pyrope.rotate(np.ones((4, 8)), range(4), HALF8, out=out)


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        (
            (np.ones((8, 2)), 3, "half", "interleaved"),
            ValueError,
            r"must be a multiple of heads, 3, w had shape \(8, 2\)",
        ),
        ((np.ones((8, 2)), 0, "half", "interleaved"), ValueError, "heads must be at least 1, was 0"),
        ((np.ones((0, 2)), 1, "half", "interleaved"), ValueError, "must be a multiple of heads"),
        ((np.ones(()), 1, "half", "interleaved"), ValueError, "must be a multiple of heads"),
        ((np.ones((8, 2)), 2.0, "half", "interleaved"), TypeError, "heads must be an integer, was 2.0"),
        ((np.ones((6, 2)), 2, "half", "interleaved"), ValueError, "head_dim must be even, was 3"),
        ((np.ones((8, 2)), 2, "neox", "interleaved"), ValueError, "from_layout must be one of .* was 'neox'"),
        ((np.ones((8, 2)), 2, "half", "gptj"), ValueError, "to_layout must be one of .* was 'gptj'"),
        ((np.ones((8, 2)), 2, "half", "interleaved", 6), ValueError, "rotary_dim must be at most head_dim, 4, was 6"),
        ((np.ones((8, 2)), 2, "half", "interleaved", 2, "end"), ValueError, "placement must be one of .* was 'end'"),
        (([1, 2], 1, "half", "interleaved"), TypeError, "w must be a NumPy or CuPy array, was list"),
    ],
)
def test_bad_permutations(arguments, error, match):
    with pytest.raises(error, match=match):
        pyrope.permute_weights(*arguments)


def test_a_matrix_is_of_one_position():
    with pytest.raises(ValueError, match="m must be one position"):
        pyrope.rotation_matrix([1, 2], HALF8)
    with pytest.raises(ValueError, match="m must be one position"):
        pyrope.rotation_matrix([[0, 1], [0, 1]], Rope(8, 10000.0, "half", axes=Axes("axial")))


def test_float16_overflow_is_honest():
    # 60000 along both features of a pair, turned by 45°, is 84853: beyond float16.
    rope = Rope(2, 10000.0, "half", scaling=Linear(1.0))
    x = np.full((1, 2), 60000, np.float16)
    with pytest.warns(RuntimeWarning, match="overflow"):
        y = pyrope.rotate(x, [-1], rope)
    assert np.isinf(y).any()


def test_the_factor_leaves_what_is_not_rotated_alone():
    rope = Rope(8, 10000.0, "half", 4, scaling=YaRN(4.0, 4096, attention_factor=2.0))
    assert pyrope.rotate(np.ones((1, 8)), [0], rope).tolist() == [[2, 2, 2, 2, 1, 1, 1, 1]]
