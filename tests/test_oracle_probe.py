"""The probe reads what is there, notes what a candidate does beside rotating, and survives what it should not do."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from optional import package
from oracle_cases import DTYPES, right, ropes

import pyrope
from pyrope import Rope, check_rotation
from pyrope.oracle.ask import Unreadable
from pyrope.oracle.floats import float_dtype
from pyrope.oracle.probe import Probe, probe_positions

ml_dtypes = package("ml_dtypes")

ROPE = Rope(16, 10000.0, "half", 12, "suffix")


def probe_of(fn, dtype=np.float32, max_position=None, rope=ROPE):
    probe = Probe(fn, rope.head_dim, dtype, max_position)
    probe.behave()
    return probe


@pytest.mark.parametrize("rope", ropes(16), ids=repr)
def test_unit_vectors_return_the_matrix(rope):
    at = np.array([0, 1, 77])
    found = Probe(right(rope)["engine"], 16, np.float64, None).operator(at)
    for matrix, m in zip(found, at, strict=True):
        np.testing.assert_allclose(matrix, pyrope.rotation_matrix(int(m), rope), atol=1e-14)


@pytest.mark.parametrize("single", [None, "head", "row"])
def test_calls_of_one_head_or_row_return_the_same(single):
    probe = Probe(right(ROPE)["engine"], 16, np.float32, None)
    x, at = probe.random(3, 4), np.array([0, 5, 9, 1000])
    whole = probe.call(x, at)
    probe.single = single
    np.testing.assert_array_equal(probe.read(x, at), whole)


@pytest.mark.parametrize("kind", ["rounded once", "engine", "float32 angle", "low tables"])
@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.float64], ids=str)
def test_a_right_candidate_behaves(kind, dtype):
    probe = probe_of(right(ROPE)[kind], dtype)
    assert not probe.behaviour and not probe.notes


@pytest.mark.parametrize("max_position", [1, 2, 3, 17, 4095])
def test_positions_stay_within_the_cache(max_position):
    largest = []

    def short(x, positions):
        largest.append(int(positions.max()))
        assert positions.dtype == np.int64 and positions.shape == x.shape[-2:-1] and positions.min() >= 0
        return pyrope.rotate(x, positions, ROPE)

    probe = probe_of(short, max_position=max_position)
    probe.operator(probe_positions(max_position))
    assert max(largest) == max_position and not probe.behaviour


def test_probe_positions_double_and_have_neighbours():
    at = probe_positions(131071)
    assert at[0] == 0 and at[-1] == 131071 and (np.diff(at) > 0).all()
    assert {255, 256, 257, 32767, 32768, 65536, 65537} <= set(at.tolist())
    assert (at[2:] <= 2 * at[1:-1]).all()
    assert len(at) < 80  # one call for all of them is small


def failing(kind):
    def fn(x, positions):
        if kind == "raises":
            raise KeyError("cos_cached\nsecond line")
        return {"none": None, "shape": x[..., :-1], "list": x.tolist(), "integers": x.astype(int)}[kind]

    return fn


@pytest.mark.parametrize(("kind", "words"), [
    ("raises", r"it raises KeyError \('cos_cached\\nsecond line'\) for x of shape \(3, 4, 16\), dtype float32, and positions of shape \(4,\), from 0"),
    ("none", "it returns nothing for x"), ("list", "it returns list"),
    ("shape", r"it returns shape \(3, 4, 15\)"), ("integers", "it returns int64"),
])  # fmt: skip
def test_errors_of_the_candidate_are_words(kind, words):
    with pytest.raises(Unreadable, match=words):
        probe_of(failing(kind))


def test_an_interrupt_is_not_swallowed():
    def fn(x, positions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe_of(fn)


def test_changed_positions_are_seen():
    def fn(x, positions):
        y = pyrope.rotate(x, positions, ROPE)
        positions += 1
        return y

    assert "positions" in probe_of(fn).behaviour["mutates its input"]


def test_a_table_kept_by_length_is_a_state():
    kept = {}
    probe = probe_of(lambda x, m: pyrope.rotate(x, kept.setdefault(len(m), m.copy()), ROPE))
    assert probe.behaviour.keys() == {"state between calls"}


@pytest.mark.parametrize("switch", [5, 100, 4096, 40000, 131071])
def test_tables_that_change_at_a_length_are_seen(switch):
    """Wherever it is below the largest position; and whoever keeps the longer table has a state."""
    slower, longest = replace(ROPE, base=80000.0), [0]

    def of_the_call(x, m):
        return pyrope.rotate(x, m, slower if m.max() >= switch else ROPE)

    def of_the_longest_call(x, m):
        longest[0] = max(longest[0], int(m.max()))
        return pyrope.rotate(x, m, slower if longest[0] >= switch else ROPE)

    assert probe_of(of_the_call).behaviour.keys() == {"depends on the length"}
    assert probe_of(of_the_longest_call).behaviour.keys() == {"state between calls"}


def test_noise_is_a_state():
    rng = np.random.default_rng(0)
    seen = probe_of(lambda x, m: pyrope.rotate(x, m, ROPE) + rng.standard_normal(x.shape).astype(x.dtype)).behaviour
    assert "same call twice" in seen["state between calls"]


def test_numbers_of_axes_that_are_not_taken_are_notes():
    def three(x, positions):
        if x.ndim != 3:
            raise ValueError("(h, n, d) only")
        return pyrope.rotate(x, positions, ROPE)

    probe = probe_of(three)
    assert not probe.behaviour and len(probe.notes) == 2 and "x of 4 axes is not taken" in probe.notes[1]


def partly(rotated):
    """A candidate that leaves alone what is not chosen by a function of x (…, n, d) and its positions."""

    def fn(x, m):
        chosen = np.broadcast_to(rotated(x, m), x.shape)
        return np.where(chosen, pyrope.rotate(x, m, ROPE), x)

    return fn


def heads_of(x, k):
    return np.arange(x.shape[-3])[:, None, None] < k if x.ndim > 2 else True


@pytest.mark.parametrize("k", [4, 8, 16, 32])
def test_more_heads_than_a_block_has_are_seen(k):
    assert probe_of(partly(lambda x, m: heads_of(x, k))).behaviour.keys() == {"heads differ"}


@pytest.mark.parametrize("k", [128, 256, 512])
def test_more_rows_than_a_block_has_are_seen(k):
    only_first = partly(lambda x, m: np.arange(len(m))[:, None] < k)
    not_when_long = partly(lambda x, m: len(m) < k)
    assert probe_of(only_first).behaviour.keys() == probe_of(not_when_long).behaviour.keys() == {"some lengths wrong"}
    assert not probe_of(only_first, max_position=k - 1).behaviour  # there is no longer call


def test_two_rows_are_seen():
    assert probe_of(partly(lambda x, m: len(m) != 2)).behaviour.keys() == {"some lengths wrong"}


@pytest.mark.parametrize("wrong", [lambda m: m <= 1000, lambda m: m == 1, lambda m: m > 1000])
def test_one_row_is_seen_at_every_size_of_position(wrong):
    assert probe_of(partly(lambda x, m: len(m) > 1 or not wrong(m[0]))).behaviour.keys() == {"one row differs"}


def test_batches_are_seen():
    only_first = partly(lambda x, m: np.arange(len(x))[:, None, None, None] < 1 if x.ndim == 4 else True)

    def shifted(x, m):
        parts = x if x.ndim == 4 else x[None]
        return np.stack([pyrope.rotate(part, m + b, ROPE) for b, part in enumerate(parts)]).reshape(x.shape)

    def repeated(x, m):
        y = pyrope.rotate(x, m, ROPE)
        return np.broadcast_to(y[:1], y.shape).copy() if x.ndim == 4 else y

    for fn in (only_first, shifted, repeated):
        assert probe_of(fn).behaviour.keys() == {"heads differ"}


def test_shapes_are_tried_where_tables_depend_on_the_length():
    slower = replace(ROPE, base=80000.0)

    def fn(x, m):
        return np.where(heads_of(x, 8), pyrope.rotate(x, m, slower if m.max() > 4096 else ROPE), x)

    assert probe_of(fn).behaviour.keys() == {"depends on the length", "heads differ"}


def test_sizes_that_are_not_taken_are_notes():
    def fn(x, m):
        if len(m) > 256 or x.ndim > 2 and x.shape[-3] > 32:
            raise ValueError("too large")
        return pyrope.rotate(x, m, ROPE)

    probe = probe_of(fn)
    assert not probe.behaviour and [note.split(" not taken")[0] for note in probe.notes] == [
        "525 rows in one call are", "x of 130 heads is", "x of 4 axes is"]  # fmt: skip


def test_inputs_of_a_mutating_candidate_are_restored():
    x = np.ones((1, 2, 16), np.float32)

    def fn(x, positions):
        x *= 2
        return x

    probe = Probe(fn, 16, np.float32, None)
    np.testing.assert_array_equal(probe.call(x, [0, 1]), 2)
    np.testing.assert_array_equal(x, 1)
    assert "32 of 32" in probe.behaviour["mutates its input"]


def test_arguments_are_checked():
    with pytest.raises(TypeError, match="fn must be a function"):
        Probe(3, 16, np.float32, None)
    with pytest.raises(ValueError, match="max_position must be at least 1"):
        Probe(abs, 16, np.float32, 0)
    with pytest.raises(TypeError, match="dtype must be one of float64, float32, float16, bfloat16, was int32"):
        float_dtype(np.int32)
    with pytest.raises(TypeError, match="was 'brainfloat'"):
        float_dtype("brainfloat")
    assert float_dtype(ml_dtypes.bfloat16).name == "bfloat16"


GRID = Rope(16, 1e6, "half", axes=pyrope.Axes("sections", (2, 3, 3)))


@pytest.mark.parametrize(("name", "text"), [
    ("one row differs", lambda x: x.shape[-2] == 1), ("some lengths wrong", lambda x: x.shape[-2] == 64),
    ("some lengths wrong", lambda x: x.shape[-2] > 200), ("heads differ", lambda x: x.ndim == 4),
    ("heads differ", lambda x: x.ndim == 2), ("strides ignored", lambda x: not x.flags.c_contiguous),
])  # fmt: skip
def test_axes_differ_in_what_is_tried_of_the_behaviour(name, text):
    """A path that turns all pairs with the first axis, as if there were text alone."""
    fn = lambda x, m: pyrope.rotate(x, m[[0, 0, 0]] if text(x) else m, GRID)  # noqa: E731
    assert check_rotation(fn, GRID).faults == (name,)


@pytest.mark.parametrize("key", [
    lambda m: (m[..., 0].tobytes(), m.shape), lambda m: (m[..., -1].tobytes(), m.shape), lambda m: (m.max(), m.shape),
    lambda m: (m.sum(), m.shape), lambda m: m.shape, lambda m: np.atleast_2d(m)[0].tobytes(),
])  # fmt: skip
def test_tables_under_a_bad_key_are_a_state(key):
    for rope in (ROPE, GRID):
        kept = {}
        fn = lambda x, m, rope=rope, kept=kept: pyrope.rotate(x, kept.setdefault(key(m), m.copy()), rope)  # noqa: E731
        report = check_rotation(fn, rope)
        enough = rope is ROPE and len({key(np.array(m)) for m in ([1, 5, 9], [1, 6, 9], [1, 8, 6])}) == 3
        assert report.ok if enough else report.faults == ("state between calls",), report


def test_what_happens_now_and_then_is_a_state():
    calls = itertools.count()
    fn = lambda x, m: pyrope.rotate(x, m + (next(calls) % 7 == 6), ROPE)  # noqa: E731
    assert check_rotation(fn, ROPE).faults == ("state between calls",)


def test_a_loop_that_ends_too_early_is_named_alone():
    def fn(x, m):
        y = pyrope.rotate(x, m, ROPE)
        y[..., -1, :] = x[..., -1, :]
        return y

    assert check_rotation(fn, ROPE).faults == ("last row not rotated",)

    def odd(x, m):
        return fn(x, m) if len(m) > 1 and len(m) % 2 else pyrope.rotate(x, m, ROPE)

    assert "rows differ" in check_rotation(odd, ROPE).faults


def test_heads_beyond_the_usual_are_tried():
    def fn(x, m):
        y = pyrope.rotate(x, m, ROPE)
        y[..., 100:, :, :] = x[..., 100:, :, :]
        return y

    assert check_rotation(lambda x, m: fn(x, m) if x.ndim > 2 else pyrope.rotate(x, m, ROPE), ROPE).faults == (
        "heads differ",
    )


@pytest.mark.parametrize(
    "result", [lambda y: np.ma.masked_array(y), lambda y: y.view("V4"), lambda y: y.astype(object)]
)
def test_what_is_no_array_of_floats_is_said(result):
    assert check_rotation(lambda x, m: result(pyrope.rotate(x, m, ROPE)), ROPE).verdict == "not judged"


@pytest.mark.parametrize(("fn", "fix"), [
    (lambda q, k, cos, sin: q, "from_cos_sin"), (lambda x, m: x.float(), "from_torch"), (lambda x, m: x[None], "with_axes"),
])  # fmt: skip
def test_what_fails_in_a_usual_way_gets_a_hint(fn, fix):
    assert fix in check_rotation(fn, ROPE).failure.fix


def test_positions_have_an_end():
    with pytest.raises(ValueError, match=r"max_position must be at most 2\^31, was 5000000000"):
        check_rotation(lambda x, m: x, ROPE, max_position=5 * 10**9)


def test_a_prompt_that_is_counted_is_no_state():
    """Positions that begin with 0 are taken for 0, 1, 2, …: in every call alike."""

    def counted(x, positions):
        return pyrope.rotate(
            x, np.arange(len(positions)) if len(positions) > 1 and positions[0] == 0 else positions, ROPE
        )

    assert "state between calls" not in check_rotation(counted, ROPE).faults
