"""`rotate` equals the definition for every rope, dtype, memory layout and backend."""

import numpy as np
import pytest
import references
from hypothesis import given, strategies as st
from references import close
from strategies import DTYPES, arrays, dtypes, position_arrays, ropes, to_backend

import pyrope
from pyrope import Rope, rotation
from pyrope.theta import LAYOUTS

HALF8 = Rope(8, 10000.0, "half")


@st.composite
def cases(draw, dtype=dtypes):
    """x, positions and a rope: positions are a scalar, (n,), or have some of the first axes of x."""
    rope = draw(ropes(max_pairs=5))
    batch = draw(st.sampled_from([(), (2,), (2, 3), (1, 2, 1)]))
    n = draw(st.integers(0, 4))
    x = draw(arrays((*batch, n, rope.head_dim), draw(dtype)))
    lead = draw(st.sampled_from([batch[:i] for i in range(len(batch) + 1)]))
    shape = draw(st.sampled_from([(), (*lead, n), (*(1 for _ in lead), n)]))
    return x, draw(position_arrays(rope, shape)), rope


@given(cases())
def test_rotate_is_the_definition_and_the_transpose_undoes_it(xp, case):
    x, m, rope = case
    before, device = x.copy(), to_backend(x, xp)
    got = pyrope.rotate(device, m, rope)
    assert got.dtype == x.dtype and got.shape == x.shape
    exact, allowed = references.rotate(x, m, rope)
    close(got, exact, allowed, xp)
    if x.ndim == 2 and len(x) and np.shape(m)[rope.axes is not None :] == ():  # one row by itself
        close(pyrope.rotate(device[0], m, rope), exact[0], allowed[0], xp)
    assert (pyrope.to_numpy(device) == before).all()
    factors = np.ones(rope.head_dim)
    factors[rope.start : rope.start + rope.width] = rope.attention_factor**2  # RᵀR = a², of what turns
    off = 8 * references.UNIT[x.dtype.name] * factors.max() * abs(references.wide(x)).max(initial=0)
    close(pyrope.rotate(got, m, rope.transposed), references.wide(x) * factors, off, xp)


@given(cases(st.sampled_from([DTYPES["bfloat16"], DTYPES["float32"], DTYPES["float64"]])), st.sampled_from([-60, 60]))
def test_numbers_of_any_size_have_the_same_digits(xp, case, power):
    x, m, rope = case
    size = x.dtype.type(2.0**power)
    got, sized = (pyrope.to_numpy(pyrope.rotate(to_backend(y, xp), m, rope)) for y in (x, x * size))
    assert (got * size == sized).all()


@given(cases(), st.sampled_from(["new", "x", "turned", "reversed", "shifted", "tables"]), st.sampled_from([1, 8, 64]))
def test_tables_out_and_tiles_change_nothing(xp, case, kind, tile):
    x, m, rope = case
    expected = pyrope.to_numpy(pyrope.rotate(to_backend(x, xp), m, rope))
    n, d = x.shape[-2:]
    memory = xp.zeros((*x.shape[:-2], n + 1, d), x.dtype)
    if kind == "turned":  # its axes lie in another order
        memory = xp.zeros((*x.shape[:-2], d, n + 1), x.dtype).swapaxes(-1, -2)
    device = memory[..., :n, :]
    device[...] = to_backend(np.ascontiguousarray(x), xp)
    out = {"new": xp.zeros(x.shape, x.dtype), "x": device, "turned": device, "reversed": device[..., ::-1, :]}
    out |= {"shifted": memory[..., 1:, :], "tables": None}
    tables = pyrope.rotation_tables(m, rope, like=device) if kind in ("tables", "x") else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation, "_TILE", tile)
        got = pyrope.rotate(device, m, rope, tables=tables, out=out[kind])
    assert out[kind] is None or got is out[kind]
    # NumPy's vector code may fuse a product and a sum, its scalar code does not.
    unit = references.UNIT[x.dtype.name]
    allowed = 2 * unit * abs(references.wide(expected)) + references.rotate(x, m, rope)[1]
    close(got, references.wide(expected), allowed, xp)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_once(dtype):
    # Products of float16 or bfloat16 in their own arithmetic would be off by more than half a unit in the last place.
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(DTYPES[dtype])
    exact, _ = references.rotate(x, range(64), Rope(64, 10000.0, "half"))
    got = pyrope.rotate(x, range(64), Rope(64, 10000.0, "half"))
    assert (got != exact.astype(np.float32).astype(got.dtype)).mean() < 0.002  # float32 on the way rounds a tie


@pytest.mark.parametrize("layout, ends", [("interleaved", [2, 3]), ("half", [2, 6]), ("interleaved-to-half", [1, 5])])
@pytest.mark.filterwarnings("ignore:invalid value")  # inf·cos − inf·sin, as it should be
def test_a_bad_number_stays_in_its_own_pair(xp, layout, ends):
    x = np.ones((3, 8))
    x[1, 2] = np.nan
    got = pyrope.to_numpy(pyrope.rotate(to_backend(x, xp), range(3), Rope(8, 10000.0, layout)))
    assert np.argwhere(~np.isfinite(got)).tolist() == [[1, i] for i in ends]


def test_tables_once_for_all_layers(xp):
    x, m = to_backend(np.random.default_rng(0).standard_normal((2, 3, 4, 8)), xp), np.arange(4)
    tables = pyrope.rotation_tables(pyrope.from_numpy(m, xp), HALF8, like=x)
    m[:] = 9  # the caller's, of which the tables have a copy
    assert tables.positions.tolist() == [0, 1, 2, 3] and not tables.positions.flags.writeable
    part = tables.part(slice(1, 3))
    got = pyrope.rotate(x[:, :, 1:3], [1, 2], HALF8, tables=part)
    assert (pyrope.to_numpy(got) == pyrope.to_numpy(pyrope.rotate(x, range(4), HALF8))[:, :, 1:3]).all()
    if xp is not np:
        with pytest.raises(TypeError, match="x is a numpy array, tables is a cupy array"):
            pyrope.rotate(pyrope.to_numpy(x), range(4), HALF8, tables=tables)


@given(st.data())
def test_layouts_are_equal_under_permuted_weights(xp, data):
    one, other = data.draw(st.permutations(LAYOUTS))[:2]
    pairs, heads, placement = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.booleans())
    placement = ("prefix", "suffix")[placement]
    d, m = 2 * pairs + 2, [3, 7]
    w = data.draw(arrays((heads * d, 5), np.float64))
    moved = pyrope.permute_weights(to_backend(w, xp), heads, one, other, 2 * pairs, placement)
    again = pyrope.permute_weights(moved, heads, other, one, 2 * pairs, placement)
    assert (pyrope.to_numpy(again) == w).all()
    x = np.random.default_rng(0).standard_normal((2, 5))
    scores = []
    for weights, layout in ((w, one), (pyrope.to_numpy(moved), other)):
        turned = (weights @ x.T).T.reshape(2, heads, d).swapaxes(0, 1)
        turned = pyrope.rotate(turned, m, Rope(d, 10000.0, layout, 2 * pairs, placement))
        scores.append(turned[:, 0, None] @ turned[:, 1, :, None])
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-12, atol=1e-12)


def test_permutation_of_the_published_rule():
    assert pyrope.permute_weights(np.arange(8), 2, "interleaved", "half").tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    # As in transformers' conversion of Llama: view(heads, d/2, 2, …).transpose(1, 2).
    w = np.random.default_rng(0).standard_normal((12, 3))
    rule = w.reshape(2, 3, 2, 3).swapaxes(1, 2).reshape(12, 3)
    assert (pyrope.permute_weights(w, 2, "interleaved", "half") == rule).all()


X = np.ones((2, 3, 4, 8), np.float32)
TABLES = pyrope.rotation_tables(range(4), HALF8, like=X)


@pytest.mark.parametrize(
    "x, m, error, match",
    [
        (X.astype(int), range(4), TypeError, "x must be float16, bfloat16, float32 or float64, .* was dtype\\('int64'\\)"),
        (X.astype(">f4"), range(4), TypeError, "native byte order"),
        (X.tolist(), range(4), TypeError, "x must be a NumPy or CuPy array, was list"),
        (X[..., :6], range(4), ValueError, "the last axis of x must be head_dim, 8, x had shape"),
        (np.array(1.0), 0, ValueError, r"x had shape \(\)"),
        (X, range(5), ValueError, r"positions of shape \(5,\) do not fit x of shape \(2, 3, 4, 8\)"),
        (X, np.zeros((3, 4), int), ValueError, r"positions of shape \(3, 4\) do not fit"),
        (X[0, 0, 0], [0], ValueError, r"positions of shape \(1,\) do not fit x of shape \(8,\)"),
        (X, [0.0] * 4, TypeError, "positions must be integers, were float"),
        (X, [0, 1, 2, 2**31 + 1], ValueError, "positions must lie within ±2\\^31"),
    ],
)  # fmt: skip
def test_bad_arrays(x, m, error, match):
    with pytest.raises(error, match=match):
        pyrope.rotate(x, m, HALF8)


@pytest.mark.parametrize(
    "more, error, match",
    [
        ({"out": np.empty((2, 3, 4, 8))}, ValueError, "out must have the shape and dtype of the result, .* had .* float64"),
        ({"out": np.empty((2, 3, 4, 7), np.float32)}, ValueError, "out must have the shape"),
        ({"out": np.broadcast_to(np.float32(0), X.shape)}, ValueError, "out must be writable, was read-only"),
        ({"out": X.tolist()}, TypeError, "out must be a NumPy or CuPy array, was list"),
        ({"tables": "no"}, TypeError, "tables must come from rotation_tables, were str"),
        ({"tables": pyrope.rotation_tables([0, 1, 2, 4], HALF8, X)}, ValueError, "made for other positions"),
        ({"tables": pyrope.rotation_tables(range(4), HALF8, X.astype(float))}, ValueError, "tables were made for float64"),
        ({"tables": pyrope.rotation_tables(range(4), Rope(8, 1e6, "half"), X)}, ValueError, "tables were made for Rope"),
    ],
)  # fmt: skip
def test_bad_outs_and_tables(more, error, match):
    with pytest.raises(error, match=match):
        pyrope.rotate(X, range(4), HALF8, **more)
    with pytest.raises(TypeError, match="integers"):
        pyrope.rotate(X, [0.0, 1.0, 2.0, 3.0], HALF8, tables=TABLES)


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        ((np.ones((8, 2)), 3, "half", "interleaved"), ValueError, "the first axis of w must be a multiple of heads, 3"),
        ((np.ones((0, 2)), 1, "half", "interleaved"), ValueError, "multiple of heads"),
        ((np.ones((8, 2)), 0, "half", "interleaved"), ValueError, "heads must be at least 1"),
        ((np.ones((8, 2)), 2, "halves", "interleaved"), ValueError, "from_layout must be one of"),
        ((np.ones((8, 2)), 2, "half", "gptj"), ValueError, "to_layout must be one of"),
        ((np.ones((8, 2)), 2, "half", "interleaved", 6), ValueError, "rotary_dim must be at most head_dim"),
        ((np.ones((6, 2)), 2, "half", "interleaved"), ValueError, "head_dim must be even"),
    ],
)  # fmt: skip
def test_bad_permutations(arguments, error, match):
    with pytest.raises(error, match=match):
        pyrope.permute_weights(*arguments)
