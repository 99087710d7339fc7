"""What attention is asked, question by question: shapes, positions, masks and scores as they are worked by hand."""

import math

import numpy as np
import pytest

from pyrope import Rope, checks
from pyrope.definition import FEATURE_MAPS
from pyrope.oracle.floats import UNIT
from pyrope.oracle.questions import FAR, MANY, ORDERS, Question, Questions
from pyrope.oracle.truth import Spec

D = 16
ROPE = Rope(D, 10000.0, "half")
WIDE = np.dtype(np.float64)


def draw(rope=None, dtype=WIDE, max_position=4096, **fields):
    return Questions(Spec(4, 2, D, True, **({"scale": 0.5, "rope": rope} | fields)), dtype, max_position)


def question(n, m, b=1, **fields):
    q, k = np.arange(b * 2 * n * 4.0).reshape(b, 2, n, 4), 1000 + np.arange(b * m * 4.0).reshape(b, 1, m, 4)
    return Question(**({"name": "", "q": q.astype(np.float32), "k": k.astype(np.float32), "v": -k} | fields))


def scores(asked, scale=0.5):
    """Of the first head, (b, n, m)."""
    return scale * asked.q[:, 0].astype(float) @ asked.k[:, 0].astype(float).swapaxes(-1, -2)


def test_a_part_of_a_question():
    whole = question(6, 9, positions=np.arange(9)[None] * 10)
    part = whole.last(4, 2)
    assert np.array_equal(part.q, whole.q[:, :, 2:4]) and np.array_equal(part.k, whole.k[:, :, :7])
    assert np.array_equal(part.v, whole.v[:, :, :7]) and part.positions.tolist() == [[0, 10, 20, 30, 40, 50, 60]]
    assert whole.last(2, 5).q.shape[-2] == 2 and question(6, 9).last(4, 2).positions is None
    first = question(5, 5, positions=np.arange(5)[None]).first(3)
    assert first.q.shape[-2] == first.k.shape[-2] == first.v.shape[-2] == 3 and first.positions.tolist() == [[0, 1, 2]]
    assert question(5, 5).first(3).positions is None


def test_what_is_said_of_a_question():
    mask = {"mask": np.ones((1, 1, 3, 3), bool)}
    asked = question(3, 3, positions=np.zeros((1, 3), int), options=mask)
    assert asked.shapes == "q (1, 2, 3, 4), k and v (1, 1, 3, 4), positions (1, 3), mask (1, 1, 3, 3)"
    assert [*asked.arguments] == ["q", "k", "v", "positions"] and [*question(3, 3).arguments] == ["q", "k", "v"]
    assert [x.dtype for x in asked.wide()] == [np.float64] * 3 + [np.int64]
    assert question(3, 3).plain and not asked.plain and not question(2, 3).plain
    assert not question(3, 3, calls=(1, 2)).plain
    assert not any(question(3, 3, name=name).plain for name in (ORDERS, FAR))
    assert question(3, 3).telling and not question(2, 2).telling and not question(3, 3, random=False).telling
    assert question(3, 3, random=False, name=MANY).telling
    assert question(4, 5, b=3).effort == 20_000 + 3 * 2 * 4 * 5
    assert question(4, 5, calls=(2, 1, 1)).effort == 60_000 + 2 * 4 * 5
    assert question(1, 64).short and not question(1, 65).short


@pytest.mark.parametrize("bad", [511, checks.MAX_POSITION + 1])
def test_the_largest_position_has_its_limits(bad):
    draw(max_position=512), draw(max_position=checks.MAX_POSITION)
    with pytest.raises(ValueError, match="max_position"):
        draw(max_position=bad)


def test_random_numbers_and_their_size():
    asked = draw().random("name", 400, queries=3)
    assert asked.name == "name" and asked.q.shape == (3, 4, 3, D) and asked.k.shape == asked.v.shape == (3, 2, 400, D)
    assert set(np.unique(asked.v)) == {-1.0, 1.0} and asked.positions is None
    assert draw().random("", 2, queries=9).q.shape[-2] == 2
    assert 0.9 < scores(asked).std() < 1.1  # of 3·3·400 scores
    assert asked.k.std() == pytest.approx(2**-0.5, rel=0.02)  # (0.5·√16)^−½
    assert draw(dtype=np.dtype(np.float16)).random("", 2).q.dtype == np.float16
    plain, raised = (draw(feature_map=name).random("", 4) for name in ("elu+1", "relu2"))
    assert np.array_equal(raised.q, plain.q + 1) and np.array_equal(raised.k, plain.k + 1)
    assert draw().tokens.q.shape == (1, 4, 2049, D)


def test_positions():
    asked = draw(ROPE).random("", 3, batch=4)
    assert asked.positions.tolist() == [[3, 4, 5], [0, 1, 2], [7, 8, 9], [1, 2, 3]]
    far = draw(ROPE, max_position=600).random("", 24, far=True).positions
    assert far.shape == (3, 24) and (np.diff(far) > 0).all() and 400 < far.max() < 600 and far.min() >= 0
    orders = draw(ROPE).orders(8)
    assert orders.name == ORDERS
    assert orders.positions.tolist() == [[0, 1, 2, 3] * 2, [0] * 6 + [1, 2], [9, 8, 7, 6, 5, 4, 3, 2]]


@pytest.mark.parametrize("name", ["elu+1", "exp", "relu", "relu2"])
def test_small_features(name):
    for size, asked in ((0.3, draw(feature_map=name).small()), (1e-3, draw(feature_map=name).small(1e-3, "tiny"))):
        assert asked.name == ("small features" if size == 0.3 else "tiny") and asked.q.shape == (2, 4, 7, D)
        for x in (asked.q, asked.k):
            features = FEATURE_MAPS[name](x) / math.sqrt(size / D)
            assert 0.499 < features.min() < 0.6 and 1.4 < features.max() < 1.501


def test_numbers_at_position_0_and_sharp_ones():
    zero, sharp = draw(ROPE).at_zero(), draw().sharp(24)
    assert zero.positions.tolist() == [[0] * 24] * 3
    assert all(np.array_equal(x, x.astype(np.float32)) for x in (zero.q, zero.k))
    assert sharp.q.std() == pytest.approx(6 * 2**-0.5, rel=0.05) and sharp.k.std() == pytest.approx(2**-0.5, rel=0.05)


@pytest.mark.parametrize("rope, still, turns", [
    (None, 0, 0.0),
    (ROPE, 7, 10 * 10000 ** (-7 / 8)),
    (Rope(D, 10000.0, "interleaved"), 14, 10 * 10000 ** (-7 / 8)),
    (Rope(D, 10000.0, "half", rotary_dim=6), 6, 0.0),
    (Rope(D, 10000.0, "half", rotary_dim=6, placement="suffix"), 0, 0.0),
])  # fmt: skip
def test_the_feature_that_turns_least(rope, still, turns):
    asked = draw(rope)
    assert asked._still() == still and asked._turns(10) == pytest.approx(turns, rel=1e-12)
    x = asked._along(2, 3, np.array([[1.0, 2.0]]))
    assert x.shape == (2, 3, 2, D) and x[..., still].tolist() == [[[2**0.5, 2 * 2**0.5]] * 3] * 2
    assert np.count_nonzero(x) == 12


@pytest.mark.parametrize("window, n", [(None, 24), (7, 6), (1, 2), (100, 24)])
def test_large_scores(window, n):
    asked = draw(window=window).large()
    expected = np.ones((2, n, n)) * 6144
    expected[1, :, : n // 2] *= -1
    np.testing.assert_allclose(scores(asked), expected, rtol=1e-12)
    assert np.array_equal(np.sign(scores(asked))[:, 0], asked.v[:, 0, :, 0]) and not asked.random
    assert asked.q.shape == (2, 4, n, D) and asked.k.shape == asked.v.shape == (2, 2, n, D)


def test_nothing_is_asked_along_what_turns_too_fast():
    fast = Rope(D, 50.0, "half")  # its last pair turns by 0.0326 for each token
    assert draw(fast).large() is None and draw(ROPE).large() is not None
    assert draw(fast, softcap=5.0).saturated() is None and draw(ROPE, softcap=5.0).saturated() is not None
    assert draw(fast, window=16).edge(False) is None and draw(fast, window=15).edge(False) is not None


def test_saturated_scores():
    asked = draw(softcap=5.0).saturated()
    np.testing.assert_allclose(scores(asked)[0, 0], 5.0 * np.tile([3, 4, 5, 6], 4), rtol=1e-12)
    assert asked.v[0, 1, :, 3].tolist() == [-1, -1, 1, 1] * 4 and not asked.random
    assert (asked.q.shape, asked.k.shape, asked.v.shape) == ((1, 4, 16, D), (1, 2, 16, D), (1, 2, 16, D))
    assert draw().saturated() is None and draw(softcap=5.0, window=3).saturated() is None
    assert draw(softcap=5.0, window=4).saturated() is not None


@pytest.mark.parametrize("cap", [None, 50.0, 5.0])
def test_many_small_weights(cap):
    asked = draw(softcap=cap).many()
    first = [math.log(2.5 / UNIT[name]) for name in ("bfloat16", "float16")]
    first = first if cap is None else [cap * math.atanh(min(score / cap, 0.9)) for score in first]
    got = scores(asked)
    np.testing.assert_allclose(got[:, :, 0], np.repeat(np.array(first)[:, None], 128, axis=1), rtol=1e-12)
    assert not got[:, :, 1:].any() and got.shape == (2, 128, 128)
    assert (asked.v[:, :, 0] == -1).all() and (asked.v[:, :, 1:] == 1).all() and asked.name == MANY
    assert asked.q.shape == (2, 4, 128, D) and asked.k.shape == (2, 2, 128, D)


def test_the_edge_of_a_window():
    asked = draw(window=512).edge(False)
    assert asked.q.shape == (1, 4, 524, D) and asked.k.shape == asked.v.shape == (1, 2, 524, D) and not asked.random
    np.testing.assert_allclose(
        scores(asked)[0], np.where(np.arange(524) < 14, math.log(512) + 1, 0)[None] + np.zeros((524, 1))
    )
    assert draw().edge(True) is None and draw(window=513).edge(False) is None
    cached = draw(window=16384).edge(True)
    assert cached.q.shape[-2] == 8 and cached.k.shape[-2] == 16396 and draw(window=16385).edge(True) is None


def test_masks_and_padding():
    mask = draw().masked("some", 24).options["mask"]
    assert mask.shape == (3, 1, 24, 24) and not mask[:, :, 5].any() and 0.5 < np.delete(mask, 5, axis=2).mean() < 0.7
    padded = draw(ROPE).padded(8)
    assert padded.positions.tolist() == [[*range(8)], [0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4, 5]]
    assert padded.options["mask"][:, 0, 3].tolist() == [[True] * 8, [False] * 3 + [True] * 5, [False] * 2 + [True] * 6]
    assert draw(ROPE).padded(80, "long").options["mask"][2, 0, 3].tolist() == [False] * 74 + [True] * 6
    assert draw().padded(8).positions is None


def test_packed_sequences():
    packed = draw(ROPE).packed(6)
    assert packed.options["segments"].tolist() == [[0, 0, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2], [0] * 6]
    assert packed.positions.tolist() == [[0, 1, 0, 0, 1, 2], [0, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5]]
    assert draw().packed(6).positions is None
