"""The calls of the probe one by one: which arrays a candidate receives, and what is said of what it returns."""

import math

import numpy as np
import pytest

from pyrope.oracle import probe as module
from pyrope.oracle.ask import Unreadable, counting
from pyrope.oracle.probe import Probe, along_axes, probe_positions

D = 4


def turn(x, m):
    """Neighbours turn by m and by m/100; of several axes, by the sum of them."""
    angle = np.asarray(m, np.float64)
    angle = (angle if angle.ndim == 1 else angle.sum(axis=0))[:, None] * [1.0, 0.01]
    a, b = x[..., ::2].astype(np.float64), x[..., 1::2].astype(np.float64)
    y = np.stack((a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)), axis=-1)
    return y.reshape(x.shape).astype(x.dtype)


def probe_of(fn=turn, dtype=np.float32, top=1000, axes=None):
    return Probe(fn, D, dtype, top, axes)


def behaviour(trial, fn, **options):
    probe = probe_of(fn, **options)
    getattr(probe, trial)()
    return probe.behaviour


# --- Where it is read ---


def test_positions_of_a_short_cache():
    at = probe_positions(20).tolist()
    assert (
        [m for m in at if m < 10] == [0, 1, 2, 3, 4, 5, 7, 8, 9] and {10, 13, 15, 16, 17, 20} <= {*at} and at[-1] == 20
    )
    assert probe_positions(1).tolist() == [0, 1] and probe_positions(4).tolist() == [0, 1, 2, 3, 4]
    far = probe_positions(10**6)
    assert (far >= 500_000).sum() == 12 + 3 + 1 and len(set(far.tolist())) == len(far)


def test_positions_of_several_axes():
    at = np.array([0, 6, 100, 1000, 1000])
    assert along_axes(at, None) is at
    spread = along_axes(at, 2)
    assert spread.shape == (2, 5) and spread[[0, 1, 0, 1, 0], range(5)].tolist() == at.tolist()
    assert (spread <= at).all() and (spread >= 0).all() and (spread[0] != spread[1]).sum() >= 3
    probe = probe_of(axes=3)
    assert probe.apart(np.array([0, 5, 7])).tolist() == [[0, 5, 7], [0, 2, 3], [0, 1, 2]]
    assert probe.everywhere(np.array([0, 5])).tolist() == [[0, 5]] * 3
    assert probe_of().apart(at) is probe_of().everywhere(at) is at


def test_the_numbers_of_a_probe():
    probe = probe_of(dtype=np.float16)
    assert (probe.unit, probe.step, probe.head_dim, probe.max_position) == (2.0**-11, 2.0**-25, D, 1000)
    assert probe_of().step == 0 and Probe(turn, D, np.float32, None).max_position == 131071
    with pytest.raises(ValueError, match="head_dim"):
        Probe(turn, 1, np.float32, None)
    x = probe.random(3, 2)
    assert x.shape == (3, 2, D) and x.dtype == np.float16 and not np.array_equal(x, probe.random(3, 2, seed=1))


def test_arrays_are_handed_over_as_they_are_listed():
    seen = []

    def fn(x, m):
        seen.append((x.shape, m.tolist()))
        return turn(x, m)

    x = probe_of().random(2, 3)
    assert np.array_equal(probe_of(fn).call(x, [0, 4, 8]), turn(x, [0, 4, 8]))
    probe_of(fn, axes=2).call(x, [0, 4, 8])
    probe_of(fn, axes=2).call(x, [[0, 4, 8], [1, 1, 1]])
    assert [at for _, at in seen] == [[0, 4, 8], [[0, 4, 8], [0, 2, 4]], [[0, 4, 8], [1, 1, 1]]]
    with pytest.raises(Unreadable, match=r"returns shape \(2, 3, 3\)"):
        probe_of(lambda x, m: x[..., :3]).call(x, [0, 4, 8])


@pytest.mark.parametrize("single, calls", [
    (None, [(3, 15)]), ("last", [(3, 16)]), ("row", [(3, 1)] * 15), ("seven rows", [(3, 7), (3, 7), (3, 1)]), ("head", [(1, 15)] * 3),
])  # fmt: skip
def test_calls_that_are_known_to_be_right(single, calls, monkeypatch):
    seen = []

    def fn(x, m):
        seen.append((x.shape[0], x.shape[1], np.atleast_2d(m)[0, -1]))
        return turn(x, m)

    for axes in (None, 2):
        probe, at = probe_of(fn, axes=axes), np.arange(15) * 3
        at = probe.apart(at)
        x = probe.random(3, 15)
        probe.single = single
        np.testing.assert_array_equal(probe.read(x, at), turn(x, at))
        assert [shape[:2] for shape in seen] == calls and seen[-1][2] == 42
        seen.clear()
    monkeypatch.setattr(module, "_CALL_LIMIT", 2 * 15 * D + 1)
    if single is None:
        probe_of(fn).read(x, np.arange(15))
        assert [shape[0] for shape in seen] == [2, 1]


def test_the_operator_is_read_in_parts(monkeypatch):
    at, seen = np.array([0, 3, 50]), []

    def fn(x, m):
        seen.append(x.shape)
        return turn(x, m)

    whole = probe_of(fn, dtype=np.float64).operator(at)
    for matrix, m in zip(whole, at, strict=True):
        cos, sin = math.cos(m), math.sin(m)
        np.testing.assert_allclose(matrix[:2, :2], [[cos, -sin], [sin, cos]], atol=1e-15)
        assert not matrix[:2, 2:].any() and matrix[2, 2] == pytest.approx(math.cos(m / 100))
    monkeypatch.setattr(module, "_CALL_LIMIT", 3 * 3 * D)
    np.testing.assert_array_equal(probe_of(fn, dtype=np.float64).operator(at), whole)
    assert [shape[0] for shape in seen] == [4, 3, 1]
    on_axes = probe_of(dtype=np.float64, axes=2).operator(np.array([[0, 3], [1, 0]]))
    assert on_axes[0, 0, 0] == pytest.approx(math.cos(1)) and on_axes[1, 0, 0] == pytest.approx(math.cos(3))
    both = probe_of(dtype=np.float64, axes=2).operator(np.array([3]))
    assert both[0, 0, 0] == pytest.approx(math.cos(6))


# --- How results differ ---


def test_the_last_bits_are_no_difference():
    probe, zero, u = probe_of(), np.zeros((2, 3, D)), 2.0**-24

    def differs(off, at=0, b=zero, probe=probe, **options):
        a = b.copy()
        a[1, 2, 3] += off
        return bool(probe._differ(a, b, at, **options))

    for limit, options in (
        (8 * 4 * u, {}), (8 * 4 * u, {"at": [7, 7, 0]}), (8 * 4 * 8 * u, {"at": [0, 0, 7]}), (8 * 16 * u, {"scale": 16.0}),
        (8 * 4 * u, {"probe": probe_of(dtype=np.float64)}), (8 * 4 * 2.0**-11, {"probe": probe_of(dtype=np.float16)}),
        (8 * 4 * 2.0**-9, {"least": 2.0**-9}), (8 * 100 * u, {"b": zero + [100.0, 0, 0, 0]}),
    ):  # fmt: skip
        assert not differs(0.99 * limit, **options) and differs(1.01 * limit, **options)
    assert differs(np.nan) and differs(np.inf) and not probe._differ(zero + np.inf, zero + np.inf)
    assert not probe._differ(zero * np.nan, zero * np.nan)


def test_differences_in_words():
    zero, probe = np.zeros((12, 2, D)), probe_of()
    one = zero.copy()
    one[3, 1, 2] = 0.5
    where = "first at head 3, row 1, feature 2: 0 and 0.5"
    assert probe._differ(one, zero) == f"1 of 96 outputs differ, by up to 0.5; {where}; heads that differ: 3"
    one[1:11, 0, 0] = -0.25
    where = "first at head 1, row 0, feature 0: 0 and -0.25"
    heads = "heads that differ: 1, 2, 3, 4, 5, 6, 7, 8, …"
    assert probe._differ(one, zero) == f"11 of 96 outputs differ, by up to 0.5; {where}; {heads}"
    one[9:] = 0
    assert probe._differ(one, zero).endswith("heads that differ: 1, 2, 3, 4, 5, 6, 7, 8")
    assert probe._differ(zero + 1, zero).endswith("first at head 0, row 0, feature 0: 0 and 1")
    assert probe._differ(one[3], zero[3]).endswith("first at row 0, feature 0: 0 and -0.25")


# --- State ---


def test_a_call_that_differs_the_second_time():
    counts = []

    def fn(x, m):
        counts.append(len(m))
        return turn(x, m) + np.float32(len(counts) == 3)

    found = behaviour("_keeps_no_state", fn)["state between calls"]
    assert found.startswith("the same call twice: 48 of 48 outputs") and counts == [4, 4, 4]
    later, earlier = map(float, found.rpartition(": ")[2].split(" and "))
    assert later == pytest.approx(earlier + 1, abs=1e-5)


@pytest.mark.parametrize("at, least", [((0, 1, 250, 500), (0, 1, 3, 4)), ((0, 1, 1, 2), (0, 1, 2, 2))])
def test_longer_calls_between_shorter_ones(at, least):
    seen = []

    def fn(x, m):
        seen.append(tuple(m.tolist()))
        return turn(x, m)

    top = 1000 if at[-1] == 500 else 5
    assert behaviour("_keeps_no_state", fn, top=top) == {}
    assert seen == [least, at, at, (*at[:3], top), at, least]


@pytest.mark.parametrize("sticky, words", [
    (500, "positions up to 500, before and after a call with position 1000: "),
    (4, "positions up to 4, before and after a call with position 1000: "),
])  # fmt: skip
def test_what_a_longer_call_changes(sticky, words):
    long = []

    def fn(x, m):
        long.append(m.max() == 1000)
        return turn(x, m) + np.float32(any(long) and m.max() == sticky)

    assert behaviour("_keeps_no_state", fn)["state between calls"].startswith(words)


def test_rows_beside_a_long_one():
    def at_row(j):
        def fn(x, m):
            y = turn(x, m)
            y[:, j] += m.max() == 1000
            return y

        return behaviour("_keeps_no_state", fn)

    for j in (0, 1, 2):
        assert at_row(j)["depends on the length"].startswith("rows that stay, when position 1000 joins the call: ")
    assert at_row(3) == {}

    def short(x, m):  # differs in the shortest call alone
        y = turn(x, m)
        y[:, 1] += m.max() == 4
        return y

    assert "depends on the length" in behaviour("_keeps_no_state", short)


def test_what_changes_now_and_then_is_all_that_is_said():
    calls = []

    def fn(x, m):
        calls.append(m.tolist())
        return turn(x, m) + np.float32(len(calls) == 13)

    probe = probe_of(fn)
    probe.behaviour["not linear"] = "…"
    probe._keeps_to_itself()
    assert [*probe.behaviour] == ["state between calls"] and calls == [[0, 1, 5, 1000]] * 13
    assert probe.behaviour["state between calls"].startswith("the same call, again and again: ")
    probe = probe_of()
    probe.behaviour["not linear"] = "…"
    probe._keeps_to_itself()
    assert probe.behaviour == {"not linear": "…"}


# --- Rows and heads ---


def test_equal_rows_and_heads_by_hand():
    def untouched(heads=slice(0, 0), rows=slice(0, 0)):
        def fn(x, m):
            y = turn(x, m)
            y[heads], y[:, rows] = x[heads], x[:, rows]
            return y

        probe = probe_of(fn)
        probe._agrees()
        return probe.behaviour, probe.single

    assert untouched() == ({}, None)
    assert untouched(slice(1, None)) == (
        {"only the first head rotated": "of 3 equal heads, 2 come back as they were"},
        "head",
    )
    found, single = untouched(slice(0, 1))
    assert [*found] == ["heads differ"] and single == "head" and found["heads differ"].startswith("equal heads: ")
    rows = {"only the first row rotated": "rows after the first come back as they were"}
    assert untouched(rows=slice(1, None)) == (rows, "row")
    assert untouched(rows=slice(-1, None)) == (
        {"last row not rotated": "the last of 6 rows comes back as it was"},
        "last",
    )
    found, single = untouched(rows=slice(2, 3))
    assert found["rows differ"].startswith("5 equal rows, all at position 5: ") and single is None

    def by_head(x, m):  # the first head turns by the first position, and so on
        return np.stack([turn(x[h], np.repeat(m[h], len(m))) for h in range(len(x))])

    probe = probe_of(by_head)
    probe.behaviour["depends on the length"] = "…"
    probe._agrees()
    assert [*probe.behaviour] == ["heads read as positions"] and probe.single == "head"
    assert probe.behaviour["heads read as positions"].endswith("; equal along the positions")


def test_rows_in_another_order():
    def fixed(x, m):  # the positions of the first call of this length
        kept.setdefault(len(m), m)
        return turn(x, kept[len(m)])

    kept = {}
    assert behaviour("_takes_any_shape", fixed)["state between calls"].startswith("the positions of an earlier call")

    def ordered(x, m):
        y = turn(x, m)
        y[:, 1:2] += m[0] == 0 and len(m) == 7 and m[1] != 5
        return y

    found = behaviour("_takes_any_shape", ordered)["rows differ"]
    assert found.startswith("the same rows and positions in another order: ")
    seen = []

    def fn(x, m):
        seen.append(m.tolist())
        return turn(x, m)

    assert behaviour("_takes_any_shape", fn) == {}
    assert seen[:3] == [[0, 5, 1, 1000, 5, 0, 5], [1000, 5, 5, 0, 1, 0, 5], [0, 0, 1000, 1, 5, 5, 5]]


def test_numbers_of_rows():
    def at_length(*wrong):
        seen = []

        def fn(x, m):
            seen.append(len(m))
            return turn(x, m) + np.float32(len(m) in wrong)

        return behaviour("_takes_any_shape", fn), seen

    found, seen = at_length()
    assert found == {} and seen == [7] * 3 + [1] * 4 + [2, 525] + [7] * 3
    assert at_length(1)[0]["one row differs"].startswith("position 1000 alone and in a call of seven: ")
    assert at_length(2)[0]["some lengths wrong"].startswith("2 rows in one call, and in a call of seven: ")
    assert at_length(525)[0]["some lengths wrong"].startswith("525 rows in one call, and in a call of seven: ")
    long = []
    behaviour("_takes_any_shape", lambda x, m: long.append(len(m)) or turn(x, m), top=100)
    assert max(long) == 101
    probe = probe_of(lambda x, m: long.append(m.tolist()) or turn(x, m))
    probe.behaviour["depends on the length"] = "…"
    long.clear()
    probe._takes_any_shape()
    assert [at for at in long if len(at) == 1] == [[1000]]


def test_candidates_that_count_get_few_rows():
    seen = []
    fn = counting(lambda x, m: seen.append((x.shape, m.tolist())) or turn(x, m))
    assert behaviour("_takes_any_shape", fn) == {}
    assert max(len(m) for _, m in seen) == 7 and [m for _, m in seen[-3:]] == [[0, 5, 1]] * 3
    probe = probe_of(fn)
    probe.behaviour["depends on the length"] = "…"
    probe._takes_any_shape()
    assert len(seen[-1][1]) == 7


def test_numbers_of_heads():
    def with_shape(wrong):
        seen = []

        def fn(x, m):
            seen.append(x.shape[:-2])
            return turn(x, m) + np.float32(wrong(x))

        probe = probe_of(fn)
        probe._takes_any_shape()
        return probe.behaviour.get("heads differ", "").partition(": ")[0], seen[-3:], probe.single

    assert with_shape(lambda x: False) == ("", [(), (130,), (2, 130)], None)
    assert with_shape(lambda x: x.ndim == 2)[::2] == ("x of 2 axes, and of 3 axes and 3 heads", "head")
    assert with_shape(lambda x: x.shape[0] == 130)[0] == "x of 130 heads, and of 3 axes and 3 heads"
    assert with_shape(lambda x: x.ndim == 4)[0] == "x of 4 axes, and of 3 axes and 3 heads"


def test_axes_beside_the_first():
    kept = {}

    def first_axis(x, m):
        return turn(x, kept.setdefault(m[0].tobytes(), m))

    found = behaviour("_takes_any_shape", first_axis, axes=2)["state between calls"]
    assert found.startswith("positions that differ from an earlier call's, but not on the first axis: ")
    assert behaviour("_takes_any_shape", turn, axes=2) == {}


# --- What a rotation must not do ---


def test_nan_and_infinity_stay_where_they_are():
    def spreads(x, m):
        y = turn(x, m)
        return y + 0 * y.sum(axis=-2, keepdims=True)

    found = behaviour("_poison", spreads)
    assert found == {"rows leak into each other": "inf in one row of one head reaches 3 other rows"}
    assert behaviour("_poison", turn) == {}
    cleaned = behaviour("_poison", lambda x, m: np.nan_to_num(turn(x, m), posinf=0, neginf=0))
    assert cleaned == {"not linear": "a row of nan comes out as finite numbers"}
    bounded = behaviour("_poison", lambda x, m: turn(np.where(np.isinf(x), np.float32(9), x), m))
    assert bounded == {"not linear": "a row of inf comes out as finite numbers"}
    lost = behaviour("_poison", lambda x, m: turn(x, m) * np.float32(np.nan))
    assert lost == {"not finite": "NaN or infinity comes out of finite x"}
    assert behaviour("_poison", lambda x, m: x * 0) == {}


@pytest.mark.parametrize("fn, linear", [
    (turn, True), (lambda x, m: x * np.float32(7), True), (lambda x, m: x + np.float32(1), False), (lambda x, m: np.abs(x), False),
    (lambda x, m: np.clip(x, -3, 3), False), (lambda x, m: turn(x, m) * np.float32(1 + 2**-21), True),
])  # fmt: skip
def test_sums_and_multiples(fn, linear):
    found = behaviour("_linear", fn)
    assert [*found] == ([] if linear else ["not linear"])
    assert linear or found["not linear"].startswith(("4·f(x) and f(4x): ", "f(x + y) and f(x) + f(y): "))


def test_views_of_x():
    def contiguous_only(x, m):
        return turn(x if x.flags.c_contiguous else np.zeros_like(x), m)

    found = behaviour("_memory", contiguous_only)["strides ignored"]
    assert found.startswith("the same x, transposed in memory: ")
    strided = behaviour("_memory", lambda x, m: turn(x if x.strides[-1] == 4 else 2 * x, m))["strides ignored"]
    assert strided.startswith("the same x, strided in memory: ") and behaviour("_memory", turn) == {}


def test_results_that_are_written_again():
    held = np.zeros((2, 4, D), np.float32)

    def reuses(x, m):
        if x.shape != held.shape:
            return turn(x, m)
        held[...] = turn(x, m)
        return held

    found = behaviour("_owns_its_result", reuses)
    assert found["result overwritten"] == "32 of 32 outputs of an earlier call change in later ones"
    assert behaviour("_owns_its_result", turn) == {}
    probe = probe_of(lambda x, m: np.full_like(x, np.nan))
    probe._owns_its_result()
    assert "result overwritten" not in probe.behaviour
    probe._kept[0][0][0, 0, 0] = 1
    probe.look_again()
    assert probe.behaviour["result overwritten"].startswith("1 of 32 outputs")


def test_what_is_added_to_a_result_is_said():
    def found(fn):
        return behaviour("_linear", fn)["not linear"]

    added = found(lambda x, m: turn(x, m) + np.float32(0.5))
    assert added.startswith(
        "4·f(x) and f(4x): 32 of 32 outputs differ, by up to 1.5; first at head 0, row 0, feature 0: "
    )
    first, second = (float(number) for number in added.partition("feature 0: ")[2].partition(";")[0].split(" and "))
    assert first - second == pytest.approx(1.5, abs=1e-4)
    assert added.endswith("; f(0) is not 0 but 0.5: a constant is added")
    ramp = found(lambda x, m: turn(x, m) + np.arange(D, dtype=np.float32))
    assert ramp.endswith("; f(0) is not 0 but from 0 to 3: something is added that does not depend on x")
    for fn in (lambda x, m: np.clip(turn(x, m), -1, 1), lambda x, m: turn(x / np.abs(x).max(-1, keepdims=True), m)):
        assert "f(0)" not in found(fn)

    def refuses(x, m):
        if not x.any():
            raise ValueError("zeros")
        return turn(x, m) + 1

    assert "f(0)" not in found(refuses)


def test_output_that_is_not_written():
    def skips(x, m):
        y = np.full_like(x, 97.25)
        y[..., 1:] = turn(x, m)[..., 1:]
        return y

    several = behaviour("_owns_its_result", lambda x, m: skips(x, m) if len(m) > 1 else turn(x, m))
    assert several == {"output not written": "8 of 32 outputs are what stood in memory before"}
    alone = behaviour("_owns_its_result", lambda x, m: skips(x, m) if x.shape == (1, 1, D) else turn(x, m))
    assert alone == {"output not written": "1 of 4 outputs are what stood in memory before"}
    calls = []

    def later(x, m):
        calls.append(x.shape)
        return turn(x, m) + np.float32(len(calls) == 6)

    found = behaviour("_owns_its_result", later)["state between calls"]
    assert found.startswith("the same call, some calls later: ") and calls[6:] == [(1, 1, D)] * 4

    def refuses_one(x, m):
        if len(m) == 1:
            raise ValueError
        return turn(x, m)

    assert behaviour("_owns_its_result", refuses_one) == {}


def test_the_order_of_trials():
    def trials(fn):
        probe, done = probe_of(fn), []
        for name in ("_agrees", "_takes_any_shape", "_poison", "_linear", "_memory", "_keeps_to_itself"):
            setattr(probe, name, lambda name=name: done.append(name))
        probe.behave()
        return done

    usual = ["_agrees", "_takes_any_shape", "_poison", "_linear", "_memory"]
    assert trials(turn) == usual
    assert trials(lambda x, m: turn(x, m).astype(np.float64)) == usual  # harmless
    assert trials(lambda x, m: turn(x, m + (m.max() == 1000))) == [*usual, "_keeps_to_itself"]
    assert trials(lambda x, m: np.full_like(x, 97.25)) == []
    probe = probe_of()

    def differs():
        probe.behaviour["rows differ"] = "…"

    done = []
    probe._agrees, probe._takes_any_shape = differs, lambda: done.append("shapes")
    probe.behave()
    assert done == [] and [*probe.behaviour] == ["rows differ"]


def test_what_is_not_taken_is_a_note():
    probe = probe_of()

    def trial():
        raise Unreadable("refuses", "this", "raised")

    probe._if_taken("some calls", trial)
    assert probe.notes == ["some calls: not tried to the end, since it refuses this"]
    probe = probe_of(lambda x, m: None)
    x, at = probe.random(1, 2), np.array([0, 1])
    assert probe._same_as(x, at, turn(x, at), "two rows are") == "" and probe.notes[0].startswith(
        "two rows are not taken: it "
    )
