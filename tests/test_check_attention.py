"""`check_attention` and `check_linear_attention`: right kernels by hand are never accused, wrong ones are."""

import by_hand
import candidates
import numpy as np
import pytest
from by_hand import MAPS, linear_attention, softmax_attention
from hypothesis import given, settings, strategies as st
from strategies import DTYPES

from pyrope import (
    Mismatch,
    NotJudged,
    Rope,
    assert_attention,
    assert_linear_attention,
    check_attention,
    check_linear_attention,
    definition as d,
)
from pyrope.oracle import steps

ROPE = Rope(16, 10000.0, "half")
FEW = {"heads": 2, "head_dim": 16, "effort": "few"}


# ── Right ones ───────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def specs(draw):
    g = draw(st.integers(1, 3))
    size = draw(st.sampled_from([2, 8, 16, 20, 64]))
    rope = (
        Rope(size, draw(st.sampled_from([10000.0, 500.0])), draw(st.sampled_from(["half", "interleaved"])))
        if draw(st.booleans())
        else None
    )
    return {
        "heads": g * draw(st.integers(1, 3)),
        "key_heads": g,
        "head_dim": size,
        "causal": draw(st.booleans()),
        "rope": rope,
    }


@settings(max_examples=80)
@given(spec=specs(), window=st.none() | st.integers(1, 40), softcap=st.none() | st.floats(0.5, 60), scale=st.none() | st.floats(0.01, 2),
       block=st.none() | st.integers(1, 40), dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]))  # fmt: skip
def test_no_right_softmax_attention_is_accused(spec, window, softcap, scale, block, dtype):
    meant = {"window": window, "softcap": softcap, "scale": scale}
    compute = np.float64 if dtype == "float64" else np.float32
    fn = softmax_attention(spec["causal"], rope=spec["rope"], block=block, compute=compute, **meant)
    report = check_attention(fn, **spec, **meant, dtype=DTYPES[dtype], effort="few")
    assert report.verdict == "right", str(report)


@settings(max_examples=40)
@given(spec=specs(), name=st.sampled_from(sorted(MAPS)), chunk=st.none() | st.integers(1, 40),
       dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]))  # fmt: skip
def test_no_right_linear_attention_is_accused(spec, name, chunk, dtype):
    rope = spec["rope"] or Rope(spec["head_dim"], 10000.0, "half")
    name = name if spec["head_dim"] >= 16 else "elu+1"
    fn = linear_attention(
        rope, name, spec["causal"], chunk if spec["causal"] else None, np.float64 if dtype == "float64" else np.float32
    )
    report = check_linear_attention(fn, **(spec | {"rope": rope}), feature_map=name, dtype=DTYPES[dtype], effort="few")
    assert report.verdict == "right", str(report)


@pytest.mark.parametrize("options", [{"window": 9, "block": 16}, {"rope": ROPE, "scale": 0.5}])
def test_no_right_softmax_attention_is_accused_in_any_call(options):
    """Masks, segments, other key heads, decoding, sizes of numbers, memory."""
    meant = {name: value for name, value in options.items() if name != "block"}
    meant |= {"heads": 4, "head_dim": 16, "max_position": 131072}
    report = check_attention(softmax_attention(**options, compute=np.float32), **meant)
    assert report.verdict == "right", str(report)
    assert ("fewer queries" in report.tried) == ("rope" in meant)
    assert "mask=" not in report.tried


# ── Fewer queries than keys, and more ────────────────────────────────────────────────────────────────────────────────


def top_left(q, k, v):
    """The mask of torch's is_causal=True: query i sees the keys up to i."""
    n, t = q.shape[2], k.shape[2]
    mask = np.tri(n, t, dtype=bool)[None, None]
    return softmax_attention(causal=False)(q, k, v, mask=mask)


def test_a_mask_from_the_top_left_is_noted_and_wrong_with_a_cache():
    options = {"heads": 2, "head_dim": 16}
    report = check_attention(top_left, **options)
    assert report.verdict == "right", str(report)
    assert any("begins at the top left" in note for note in report.notes)
    assert check_attention(top_left, **options, cache=True).verdict == "wrong"
    quiet = check_attention(top_left, **options, cache=False)
    assert (quiet.verdict, quiet.notes) == ("right", ())


def test_a_cache_that_is_demanded_must_be_taken():
    def square(q, k, v):
        assert q.shape[2] == k.shape[2], "prefill alone"
        return softmax_attention()(q, k, v)

    assert check_attention(square, heads=2, head_dim=16).verdict == "right"
    report = check_attention(square, heads=2, head_dim=16, cache=True)
    assert report.verdict == "not judged"
    assert "prefill alone" in report.failure.reason


# ── Caches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def begin(past=None):
    """A step function that remembers keys and values; two of them that are given one list share it."""
    past, attend = [] if past is None else past, softmax_attention()
    past.clear()

    def step(q, k, v, positions):
        q, k = (by_hand.turned(x.astype(np.float64), positions, ROPE) for x in (q, k))
        new = [k, v.astype(np.float64)]
        past[:] = [np.concatenate(both, axis=2) for both in zip(past, new, strict=True)] if past else new
        return attend(q, *past).astype(v.dtype)

    return step


def test_a_right_cache_is_right_and_two_live_side_by_side():
    fn, shared = softmax_attention(rope=ROPE), []
    report = check_attention(fn, heads=2, head_dim=16, rope=ROPE, incremental=begin)
    assert report.verdict == "right", str(report)
    assert "with a cache" in report.tried
    one = begin()  # one cache for all
    assert check_attention(fn, heads=2, head_dim=16, rope=ROPE, incremental=lambda: one).verdict != "right"
    report = check_attention(fn, heads=2, head_dim=16, rope=ROPE, incremental=lambda: begin(shared))
    assert report.verdict == "wrong"
    assert "caches at once" in str(report.findings[0])

    def fails():
        raise MemoryError("no room for a cache")

    report = check_attention(fn, heads=2, head_dim=16, rope=ROPE, incremental=fails)
    assert report.verdict == "not judged"
    assert "no room for a cache" in report.failure.reason


# ── Backwards ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [None, "elu+1", "relu2", "exp"])
@pytest.mark.parametrize(("causal", "window", "softcap"), [(True, None, None), (False, 4, 2.0)])
def test_the_oracles_gradients_are_finite_differences_of_the_definition(name, causal, window, softcap):
    """(f(x + h) − f(x − h))/2h is off by h²·f‴/6 and by 2⁻⁵³/h: 1e-7 of the result, and of 1, is far above both at h = 1e-5."""
    rng, rope = np.random.default_rng(1), Rope(4, 100.0, "half")
    linear = name is not None
    softcap, window = (None, None) if linear else (softcap, window)
    q, g = rng.standard_normal((2, 1, 4, 5, 4))
    k, v = rng.standard_normal((2, 1, 2, 5, 4))
    at = np.array([[3, 0, 4, 9, 5]])
    spec = steps.Spec(4, 2, 4, causal, np.dtype(np.float64), 0.7, window, softcap, rope, name)
    mask = d.visible(np.arange(5), np.arange(5), causal, window)

    def turn(x):
        return by_hand.turned(x, at, rope)

    def loss(q, k, v):
        out = (
            d.linear_attention(q, k, v, turn, mask, MAPS[name])
            if linear
            else d.attention(turn(q), turn(k), v, mask, 0.7, softcap)
        )
        return (out * g).sum()

    found, given, h = steps.gradients(spec, steps.Call("", q, k, v, positions=at, g=g)), [q, k, v], 1e-5
    for i, x in enumerate(given):
        for index in list(np.ndindex(x.shape))[::3]:
            near = []
            for step in (h, -h):
                moved = x.copy()
                moved[index] += step
                near.append(loss(*given[:i], moved, *given[i + 1 :]))
            assert found[i][index] == pytest.approx((near[0] - near[1]) / (2 * h), abs=1e-7, rel=1e-7)


def test_wrong_gradients_do_not_speak_of_queries_that_see_nothing():
    report = candidates.judge(candidates.CASES["softmax-backward: dk reversed"])
    assert report.faults == ("gradients: in other places",)
    assert report.notes == ()


# ── The rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_fewer_key_heads_are_tried_where_they_are_taken():
    seen = set()
    fn = softmax_attention()
    check_attention(lambda q, k, v: (seen.add(k.shape[1]), fn(q, k, v))[1], heads=4, head_dim=8)
    assert seen == {1, 2, 4}

    def grouped(q, k, v):
        assert k.shape[1] <= 2
        return fn(q, k, v)

    report = check_attention(grouped, **(FEW | {"heads": 4}))
    assert report.verdict == "right"
    assert any("judged with 2 key heads" in note for note in report.notes)


def test_assertions_raise_what_they_report():
    fn = softmax_attention()
    assert_attention(fn, **FEW)
    assert_linear_attention(linear_attention(ROPE), rope=ROPE, effort="few")
    with pytest.raises(Mismatch, match="^attention: WRONG: scale"):
        assert_attention(softmax_attention(scale=1.0), **FEW)
    with pytest.raises(Mismatch, match="^linear attention: WRONG"):
        assert_linear_attention(linear_attention(ROPE, "exp"), rope=ROPE, effort="few")
    with pytest.raises(NotJudged, match="raises TypeError"):
        assert_attention(lambda q: q, **FEW)


@pytest.mark.parametrize(("error", "words", "options"), [
    (ValueError, "key_heads must divide heads, 4, was 3", {"heads": 4, "key_heads": 3}),
    (ValueError, "heads must be .*, was 0", {"heads": 0}),
    (ValueError, "rope must have one axis and the head_dim of the check, head_dim=64, was Rope", {"rope": ROPE, "head_dim": 64}),
    (ValueError, "window must be .*, was 0", {"window": 0}),
    (ValueError, "softcap must be .*, was 0|softcap must be .*, was -", {"softcap": -1.0}),
    (ValueError, "scale must be", {"scale": float("nan")}),
    (TypeError, "causal must be", {"causal": 1}),
    (TypeError, "cache must be", {"cache": "yes"}),
    (ValueError, "cache=True demands calls with fewer queries", {"cache": True, "rope": ROPE, "head_dim": 16}),
    (ValueError, "grade must be one of .*, was 'best'", {"grade": "best"}),
    (ValueError, "effort must be one of .*, was 'all'", {"effort": "all"}),
    (ValueError, "max_position must be .*, was 100", {"max_position": 100}),
    (ValueError, "a backward pass has no cache", {"backward": True, "cache": True}),
    (ValueError, "a backward pass has no grades", {"backward": True, "grade": "rounded once"}),
    (TypeError, "dtype must be one of", {"dtype": "int8"}),
])  # fmt: skip
def test_bad_options_are_refused_with_their_rule(error, words, options):
    with pytest.raises(error, match=words):
        check_attention(softmax_attention(), **options)


@pytest.mark.parametrize(("error", "words", "options"), [
    (ValueError, "feature_map must be one of .*, was 'identity'", {"feature_map": "identity"}),
    (ValueError, "head_dim must be at least 16 for relu, was 8", {"feature_map": "relu", "rope": Rope(8, 10000.0, "half")}),
    (ValueError, "grade must be one of .*, was 'scores rounded'", {"grade": "scores rounded"}),
    (TypeError, "rope must be", {"rope": None}),
])  # fmt: skip
def test_bad_options_of_linear_attention_are_refused_with_their_rule(error, words, options):
    with pytest.raises(error, match=words):
        check_linear_attention(linear_attention(ROPE), **({"rope": ROPE} | options))


def eager(q, k, v, cut=np.inf):
    """In float16 products overflow before they are scaled, and a query that sees nothing sees all."""
    n, t = q.shape[2], k.shape[2]
    lowest = np.triu(np.full((n, t), np.finfo(np.float16).min, np.float16), t - n + 1)
    with np.errstate(all="ignore"):
        s = (q.astype(np.float32) @ k.astype(np.float32).swapaxes(2, 3)).astype(np.float16)
        s = (np.clip(s, -cut, cut) / np.float16(8) + lowest).astype(np.float32)
        w = np.exp(s - s.max(axis=-1, keepdims=True))
        return ((w / w.sum(axis=-1, keepdims=True)) @ v.astype(np.float32)).astype(np.float16)


def test_two_answers_that_are_excused_are_both_set_aside():
    report = check_attention(eager, dtype=np.float16)
    assert report.verdict == "right", str(report)
    assert len([note for note in report.notes if "overflow" in note or "zeros" in note]) == 2


def test_an_overflow_that_is_hidden_is_wrong():
    report = check_attention(lambda q, k, v: eager(q, k, v, np.float16(65504)), dtype=np.float16, cache=False)
    assert report.verdict == "wrong"
    assert "products q·k beyond float16" in str(report)


def test_a_wrong_rotation_is_explained_in_few_calls():
    """A call may start a program: pairs are read in batches, 32 of them in two ways each."""
    asked, fn = [], softmax_attention(rope=Rope(64, 500000.0, "half"))

    def slow(*arrays):
        asked.append(1)
        return fn(*arrays)

    report = check_attention(slow, heads=1, rope=Rope(64, 10000.0, "half"), effort="few")
    assert report.faults == ("wrong base",)
    assert len(asked) < 40


def test_the_table_of_errors_says_how_far_off():
    exact = softmax_attention()

    def fn(q, k, v):
        o = exact(*(x.astype(float) for x in (q, k, v)))
        if np.abs(q).max() < 30:  # saturated scores are not in the table
            o[..., 0] += 4 * 2.0**-23 * np.abs(o).max(axis=-1)
        return o.astype(q.dtype)

    report = check_attention(fn, head_dim=16)
    assert report.ok and all(4 <= row.ulps < 5 and 1e-6 < row.worst < row.allowed for row in report.errors), str(report)
