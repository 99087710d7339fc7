"""Which calls a rotation is tried with, one by one, and what is said of their outcomes: no check is run for that."""

import functools

import numpy as np
import pytest

from pyrope.oracle import trials as module
from pyrope.oracle.ask import Unreadable, compiling
from pyrope.oracle.probe import Probe
from pyrope.oracle.trials import (
    Expectation,
    Outcome,
    Trial,
    first_wrong,
    lengths_in_words,
    listed_names,
    run_trials,
    trials,
)

D = 8
LENGTHS, CONSECUTIVE, POSITIONS, MEMORY, VALUES = (
    "some lengths wrong", "consecutive positions wrong", "order of positions matters", "strides ignored", "not linear")  # fmt: skip
STEPS, HEADS, BATCHES, MISREAD, NEGATIVE = (
    "one row differs", "heads read as positions", "heads differ", "positions misread", "negative positions wrong")  # fmt: skip


def same(x, m):
    return x.copy()


def tried(top=131071, *, d=D, by_call=False, axes=None, **options):
    return list(trials(Probe(same, d, np.float32, top, axes), by_call, **options))


@functools.cache
def everything():
    return tried()


@pytest.fixture(autouse=True)
def of_this_test():
    """Each test makes the trials anew, so that it is known which tests reach a line."""
    everything.cache_clear()


def of(fault, made=None):
    return {trial.name: trial for trial in made or everything() if trial.fault == fault}


def at(trial):
    return trial.positions.tolist()


# --- Lengths ---

USUAL = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257, 384, 511, 512, 513, 640, 1024, 4097}  # fmt: skip


def rows(n):
    return "1 row" if n == 1 else f"{n} rows"


def test_every_length_up_to_130_is_tried_and_the_usual_ones_first():
    lengths = {int(name.split()[0]): trial for name, trial in of(LENGTHS).items()}
    assert {n for n, trial in lengths.items() if trial.needed} == USUAL | {D // 2, D, D + 1}
    assert {n for n, trial in lengths.items() if not trial.needed} == (
        set(range(131)) | set(range(136, 257, 8)) | set(range(288, 513, 32)) | set(range(576, 1025, 64)) | set(range(200, 1001, 100))
        | {1023, 1025, 1280, 1500, 1536, 2000, 2047, 2048, 2049, 2560, 3000, 4000, 4096}
    ) - USUAL  # fmt: skip
    for n, trial in lengths.items():
        assert trial.name == rows(n) and trial.x.shape == (2 if n <= 64 else 1, n, D) and len(trial.positions) == n
        assert not n or trial.positions.max() < 8 * n
    other = {int(name.split()[0]): trial for name, trial in of(LENGTHS, tried(d=44)).items()}
    assert {22, 44, 45} <= {n for n, trial in other.items() if trial.needed}


def test_positions_of_a_length_are_in_no_order_and_none_is_next_to_another():
    at = of(LENGTHS)["4097 rows"].positions
    gaps = np.diff(np.sort(at))
    assert gaps.min() >= 2 and gaps.max() <= 6  # 4·i and 0 to 2 more
    assert (at % 4 < 3).all() and set(at % 4) == {0, 1, 2} and (np.sort(at) // 4 == np.arange(4097)).all()
    for n in (8, 64, 512, 4096):  # shuffled among the first 2, 4, 8, …
        assert (np.sort(at[:n]) // 4 == np.arange(n)).all() and (np.diff(at[:n]) < 0).any()
    short = of(LENGTHS, tried(100))["96 rows"].positions  # where there is no room, each once
    assert len(set(short.tolist())) == 96 and short.max() <= 100
    just, below = (of(LENGTHS, tried(top))["4097 rows"].positions for top in (4 * 4097, 4 * 4097 - 1))
    assert just.max() > 4097 and sorted(below.tolist()) == list(range(4097))


def test_consecutive_positions_begin_at_0_and_elsewhere_or_end_at_the_largest():
    consecutive = of(CONSECUTIVE)
    for n in sorted(USUAL):
        assert at(consecutive[f"positions 0 to {n - 1}"]) == list(range(n))
        if n % 2:
            assert at(consecutive[f"positions 500 to {500 + n - 1}"]) == list(range(500, 500 + n))
        elif n <= 513:
            assert at(consecutive[f"positions {131072 - n} to 131071"]) == list(range(131072 - n, 131072))
        else:
            assert f"positions {131072 - n} to 131071" not in consecutive
    assert (
        all(f"positions 0 to {n - 1}" in consecutive for n in range(1, 131)) and "positions 0 to -1" not in consecutive
    )
    assert not consecutive["positions 0 to 9"].needed and "positions 0 to 135" not in consecutive
    short = of(CONSECUTIVE, tried(515))
    assert at(short["positions 451 to 515"]) == list(range(451, 516)) and "positions 0 to 512" in short  # 65 end there
    assert at(of(CONSECUTIVE, tried(515))["positions 3 to 515"]) == list(range(3, 516))


def test_no_call_is_longer_than_the_positions_that_there_are():
    lengths = {int(name.split()[0]) for name in of(LENGTHS, tried(16))}
    assert max(lengths) == 17 and lengths == set(range(18))
    assert {int(name.split()[0]) for name in of(LENGTHS, tried(9))} == set(range(11))
    assert {int(name.split()[0]) for name in of(LENGTHS, tried(0 + 1))} == {0, 1, 2}


def test_large_heads_are_not_tried_at_more_than_a_million_numbers():
    empty = module.Pool(np.zeros((0, 2048)), np.arange(0))
    made = module._more_lengths(Probe(same, 2048, np.float32, None), set(), module.Pools(empty, empty, empty))
    assert max(int(trial.name.split()[0]) for trial in made if trial.fault == LENGTHS) == 512  # 512 · 2048 = 2²⁰


def test_numbers_of_heads_and_of_batches():
    shapes = {trial.x.shape for trial in of(BATCHES).values() if not trial.needed}
    assert shapes == {(h, 5, D) for h in (*range(1, 41), 48, 64, 96, 128)} | {
        (b, 2, 5, D) for b in (*range(1, 10), 16, 32)
    } | {(32, 4097, D)}  # and one of more than 2²⁰ numbers
    needed = {name: trial.x.shape for name, trial in of(BATCHES).items() if trial.needed}
    assert set(needed.values()) == {
        (1, 5, 8, D), (3, 2, 1, D), (2, 96, D), (4, 3, 8, D), (2, 1, 32, 5, D), (2, 4, 8, D), (1, D),
    }  # fmt: skip
    assert all(name == f"x of shape {shape}" for name, shape in needed.items() if name.startswith("x of"))
    assert at(of(CONSECUTIVE)[f"x of shape {(2, 16, 8, D)}"]) == list(range(8))
    assert at(of(BATCHES)[f"x of shape {(3, 2, 1, D)}"]) == [7] and at(of(BATCHES)["one row of one head"]) == [3]
    few = of(BATCHES, tried(2))
    assert at(few[f"x of shape {(3, 2, 1, D)}"]) == [2] and at(few["one row of one head"]) == [2]
    assert {trial.x.shape[-2] for trial in few.values() if not trial.needed} == {3}


def test_where_each_shape_is_compiled_few_are_tried():
    made = tried(compiled=True)
    assert {int(name.split()[0]) for name in of(LENGTHS, made)} == {1, 2, 8, 17, 64, 129, 1024}
    assert {trial.x.shape for trial in of(BATCHES, made).values()} == {(1, 5, 8, D), (3, 2, 1, D), (2, 4, 8, D), (1, D)}
    assert all(trial.needed for trial in made)


# --- Orders, memory, values ---


def test_orders_by_hand():
    made = of(POSITIONS)
    assert {name: at(trial) for name, trial in made.items()} == {
        "descending positions": [7, 6, 5, 4, 3, 2, 1, 0],
        **{f"positions {step} apart": list(range(0, 8 * step, step)) for step in (2, 3, 4, 8, 16, 64)},
        "one position for all rows": [5] * 8, "position 0 for all rows": [0] * 8,
        "two positions exchanged": [0, 1, 2, 4, 3, 5, 6, 7], "each position twice": [0, 0, 1, 1, 2, 2, 3, 3],
        "positions that start again": [0, 1, 2, 3, 0, 1, 2, 3], "positions 0, 0, 0, 1, 2, …": [0, 0, 0, 1, 2, 3, 4, 5],
    }  # fmt: skip
    assert all(trial.x.shape == (2, 8, D) for trial in made.values())
    consecutive = of(CONSECUTIVE)
    assert at(consecutive["positions from 1 on"]) == [1, 2, 3, 4, 5, 6, 7, 8]
    for edge in (2048, 4096):
        assert at(consecutive[f"positions around {edge}"]) == list(range(edge - 4, edge + 4))
        assert f"positions around {edge}" in of(CONSECUTIVE, tried(edge + 8))
        assert f"positions around {edge}" not in of(CONSECUTIVE, tried(edge + 7))
    steps = of(STEPS)
    assert [at(trial) for trial in steps.values()] == [[m] for m in (*range(12), 64, 128, 500, 1000, 2047, 2048, 4096)]
    assert all(trial.x.shape == (2, 1, D) for trial in steps.values())
    (heads,) = of(HEADS).values()
    assert heads.name == "8 heads of 8 rows" and heads.x.shape == (8, 8, D) and sorted(at(heads)) == list(range(8))
    assert heads.positions.tolist() not in (list(range(8)), list(range(7, -1, -1)))


def test_orders_within_few_positions():
    made = of(POSITIONS, tried(6))
    assert at(made["descending positions"]) == [6, 5, 4, 3, 2, 1, 0] and "positions 2 apart" not in made
    assert at(made["positions that start again"]) == [0, 1, 2, 0, 1, 2, 0] and "one position for all rows" in made
    assert "one position for all rows" not in of(POSITIONS, tried(4))
    assert "positions from 1 on" not in of(CONSECUTIVE, tried(6))
    assert [at(trial) for trial in of(STEPS, tried(6)).values()] == [[m] for m in range(7)]


def test_memory_is_held_in_every_way():
    made = {name: trial.x for name, trial in of(MEMORY).items()}
    plain = made["read-only x"]
    shared = made.pop("heads that share their memory")
    assert shared.strides[0] == 0 and (shared == plain[0]).all()
    assert all(np.array_equal(x, plain) for x in made.values())
    assert not plain.flags.writeable and plain.flags.c_contiguous
    assert made["x as (n, h, d) in memory"].transpose(1, 0, 2).flags.c_contiguous
    assert made["x as a part of a longer array"].base.shape == (2, 13, D)
    assert made["x as a part of a fused projection"].strides == (4 * 8 * 3 * D, 4 * 3 * D, 4)
    assert not made["x that is not aligned"].flags.aligned and made["x in Fortran order"].flags.f_contiguous
    assert made["x with rows backwards in memory"].strides[1] == -4 * D
    around = made["x as a part of a longer array"].base
    assert (around[:, :2] == 9).all() and (around[:, 10:] == 9).all()
    fused = made["x as a part of a fused projection"].base
    assert not fused[..., :D].any() and not fused[..., 2 * D :].any()


def test_positions_are_held_in_every_way():
    made = {name: trial.positions for name, trial in of(MISREAD).items()}
    expected = made["read-only positions"].tolist()
    assert sorted(expected) == list(range(8)) and all(m.tolist() == expected for m in made.values())
    assert made["strided positions"].strides == (16,) and made["positions backwards in memory"].strides == (-8,)
    assert made["int32 positions"].dtype == np.int32 and not made["read-only positions"].flags.writeable


@pytest.mark.parametrize("dtype, row, whole", [(np.float16, 5, 8), (np.float32, 60, 100)])
def test_values_by_hand(dtype, row, whole):
    made = {t.name: t.x for t in trials(Probe(same, D, dtype, None), False) if t.fault == VALUES}
    large, small = made["a large row"], made["a small row"]
    one = large[0, 0].astype(float) / 2.0**row
    assert (small[0, 0].astype(float) * 2.0**row == one).all() and (large[1:] == small[1:]).all()
    assert (large[0, 1:] == small[0, 1:]).all() and 0.1 < np.abs(one).max() < 10
    calls = {name.split(",")[0]: x.astype(float) for name, x in made.items() if "times" in name}
    assert set(calls) == {"large x", "small x", "very small x"} and f"large x, times 2^{whole}" in made
    assert np.allclose(calls["large x"] / 2.0**whole, calls["small x"] * 2.0**row, rtol=0.01, atol=0.01)
    assert np.allclose(calls["very small x"] * 2.0**whole, calls["small x"] * 2.0**row, rtol=0.01, atol=0.01)
    ones, zeros = made["x of ones and minus ones"], made["a row of zeros"]
    assert set(np.unique(ones)) == {-1, 1} and not zeros[0, 0].any() and zeros[0, 1:].all() and zeros[1].all()


def test_negative_positions_are_tried_where_they_are_claimed():
    (trial,) = of(NEGATIVE, tried(least=-100)).values()
    assert (
        at(trial) == [-1, 0, -100, -50, -7, 1] and trial.name == "positions from -100 on" and trial.x.shape == (2, 6, D)
    )
    assert at(of(NEGATIVE, tried(least=-5))["positions from -5 on"]) == [-1, 0, -5, -2, -5, 1]
    assert not of(NEGATIVE) and not of(NEGATIVE, tried(by_call=True, least=-5))


def test_where_the_largest_position_decides_only_calls_with_it_are_tried():
    made = tried(1000, by_call=True)
    assert all(trial.positions.max() == 1000 for trial in made)
    first = of(LENGTHS, made)["64 rows"].positions
    assert first[0] == 1000 and len(set(first.tolist())) == 64
    assert len(of(LENGTHS, made)) > 50
    assert sorted(at(of(LENGTHS, tried(7, by_call=True))["8 rows"])) == list(range(8))


def test_positions_of_several_axes():
    made = tried(axes=3)
    scattered = of(LENGTHS, made)["9 rows"].positions
    assert (
        scattered.shape == (3, 9)
        and (scattered[1] == scattered[0] // 2).all()
        and (scattered[2] == scattered[0] // 3).all()
    )
    assert at(of(POSITIONS, made)["each position twice"]) == [[0, 0, 1, 1, 2, 2, 3, 3]] * 3


# --- What is expected ---


def twice(x, m):
    """Twice x plus nothing, within a 1000th of |x|."""
    return 2 * x, 1e-3 * np.abs(x)


@pytest.mark.parametrize("by_row", [False, True])
def test_parts_of_a_pool_are_expected_as_any_other_call(by_row):
    expectation = Expectation(twice, by_row)
    for trial in [t for t in everything() if t.pool is not None and t.x.shape[-2] in (0, 1, 5, 64, 65, 640)]:
        out, allowed = expectation.of(trial)
        np.testing.assert_array_equal(out, 2 * trial.x.astype(float))
        np.testing.assert_allclose(allowed, 1e-3 * np.abs(trial.x.astype(float)), rtol=1e-12)
    heads = of(BATCHES)[f"x of shape {(7, 5, D)}"].x
    for i, factor in enumerate([1, -2, 4, -1, 2, -4, 1]):
        np.testing.assert_array_equal(heads[i], factor * heads[0])


def test_rows_of_a_pool_are_computed_once_in_blocks_of_256():
    calls = []

    def expected(x, m):
        calls.append((x.shape, m.tolist()))
        return twice(x, m)

    expectation = Expectation(expected)
    for _ in range(2):
        expectation.of(of(CONSECUTIVE)["positions 0 to 639"])
    assert len(of(CONSECUTIVE)["positions 0 to 639"].pool.x) == 4597  # 4097 rows and 500 more
    assert calls == [((1, 256, D), list(range(start, start + 256))) for start in (0, 256, 512)]
    expectation.of(of(CONSECUTIVE)["positions 500 to 1012"])
    assert len(calls) == 4 and calls[3] == ((1, 256, D), list(range(768, 1024)))


# --- What is said of outcomes ---


def run(fn, expected=twice, top=131071, d=D, **options):
    probe = Probe(fn, d, np.float32, top)
    probe.call(np.ones((1, 1, d), np.float32), [0])  # whether it compiles is known of the last call
    return run_trials(probe, Expectation(expected), False, **options)


def doubled(x, m):
    return 2 * x


def test_right_calls_have_no_name():
    assert run(doubled) == ({}, [])


@pytest.mark.parametrize("times, right", [(0.999, True), (3.99, True), (4.01, False)])
def test_a_call_is_wrong_beyond_four_times_what_is_allowed(times, right):
    """Right everywhere is within it: calls that are wrong now and then take another path, and that is far off."""
    named, _ = run(lambda x, m: 2 * x if x.ndim != 4 else 2 * x + times * 1e-3 * np.abs(x))
    assert (named == {}) == right
    if not right:
        assert list(named) == [BATCHES] and "so all calls with x of 4 axes are wrong, and no others" in named[BATCHES]


def test_nan_is_right_where_it_is_expected_alone():
    def nans(x, m):
        return np.where(m[:, None] % 5 == 0, x.dtype.type(np.nan), 2 * x)

    def expected(x, m):
        return nans(x, m), np.abs(x)

    assert run(nans, expected) == ({}, [])
    assert BATCHES in run(lambda x, m: 2 * x if x.ndim > 3 else nans(x, m), expected)[0]
    assert BATCHES in run(lambda x, m: 2 * x if x.ndim <= 3 else nans(x, m))[0]


@pytest.mark.parametrize(
    "trigger, common, fault",
    [
        (lambda x: x.ndim == 2, "x of 2 axes", BATCHES),
        (lambda x: x.ndim > 2 and x.shape[-3] == 1, "1 head", BATCHES),
        (lambda x: x.ndim > 2 and x.shape[-3] == 7, "7 heads", BATCHES),
        (lambda x: x.ndim > 3 and x.shape[-4] > 1, "a batch of more than one", BATCHES),
        (lambda x: x.ndim == 5, "x of 5 axes", BATCHES),
        (lambda x: not x.flags.writeable, "a read-only x", MEMORY),
    ],
)
def test_what_wrong_calls_have_in_common_is_blamed(trigger, common, fault):
    named, _ = run(lambda x, m: 3 * x if trigger(x) else 2 * x)
    assert list(named) == [fault] and f"; so all calls with {common} are wrong, and no others" in named[fault]


def test_lengths_that_are_wrong_are_not_blamed_on_anything_else():
    named, _ = run(lambda x, m: 3 * x if len(m) == 8 else 2 * x)
    assert list(named) == [LENGTHS] and named[LENGTHS].startswith(
        "wrong: 8 rows; right: 1 row, 2 rows, 3 rows, 4 rows, 5 rows, 6 rows and "
    )
    assert "first at position 2, head 0, row 0, feature 0: expected " in named[LENGTHS]
    named, _ = run(lambda x, m: 3 * x if len(m) > 1 and m[0] == 0 and (np.diff(m) == 1).all() else 2 * x)
    assert list(named) == [CONSECUTIVE]
    named, _ = run(lambda x, m: 3 * x)  # every length
    assert list(named) == [LENGTHS] and "right" not in named[LENGTHS].split(";")[1]


def test_calls_of_a_prompt_with_wrong_heads_are_not_blamed_on_the_prompt():
    """(2, 16, 8, d) has consecutive positions; 16 heads are wrong with any, and so are calls of one row."""
    named, _ = run(lambda x, m: 3 * x if len(m) == 1 or (x.ndim > 2 and x.shape[-3] == 16) else 2 * x)
    assert set(named) == {LENGTHS, BATCHES}


def test_results_of_another_shape_are_wrong_lengths_and_otherwise_not_tried():
    named, notes = run(lambda x, m: 2 * x if len(m) != 5 else 2 * x[..., :1])
    assert list(named) == [LENGTHS] and "returns shape" in named[LENGTHS] and len(notes) == 2


def test_a_call_that_is_wrong_once_is_state():
    seen = []

    def fn(x, m):
        seen.append(x.shape)
        return 3 * x if seen.count((2, 12, D)) == 1 and x.shape == (2, 12, D) else 2 * x

    named, _ = run(fn)
    assert list(named) == ["state between calls"]
    assert named["state between calls"].startswith("12 rows: first at") and named["state between calls"].endswith("; in the same call once more, all outputs are right")  # fmt: skip


def test_what_is_refused_is_noted_once_for_each_kind_of_call():
    def fn(x, m):
        if m.dtype != np.int64 or len(m) in (0, 40, 41) or len(m) >= 511:
            raise ValueError("not these")
        return 2 * x

    named, notes = run(fn)
    refused = [n for n in (*sorted(USUAL), 40, 41) if n >= 511 or n in (40, 41)]
    assert not named and len(notes) == 4
    assert any(note.startswith(f"x of shape (32, 4097, {D}): not tried") for note in notes)
    assert any(note.startswith("int32 positions: not tried, since it raises ValueError (not these)") for note in notes)
    assert len(refused) > 6 and any(
        note.startswith("511 rows, 512 rows, 513 rows, 640 rows, 1024 rows, 4097 rows and ") for note in notes
    )


def test_slow_candidates_are_not_tried_with_what_may_be_left_out(monkeypatch):
    shapes, clock = [], [0.0]

    def fn(x, m):
        shapes.append(x.shape)
        clock[0] += 1.0
        return 2 * x

    monkeypatch.setattr(module, "cpu_seconds", lambda: clock[0])
    named, notes = run(fn)
    assert not named and notes == [f"its calls are slow: other lengths, from x of shape {(1, 5, D)} on, were not tried"]
    assert len(shapes) == 1 + sum(trial.needed for trial in everything())
    shapes.clear()
    monkeypatch.setattr(module, "cpu_seconds", lambda: 5.0 * (len(shapes) > 1))
    assert run(fn) == ({}, []) and len(shapes) == 1 + len(everything())  # five seconds are not too many


def test_what_is_compiled_is_noted():
    probe = Probe(compiling(doubled), D, np.float32, None)
    probe.call(np.ones((1, 1, D), np.float32), [0])
    named, notes = run_trials(probe, Expectation(twice), False)
    assert not named and notes == [
        "each new shape is compiled: of the lengths only 1, 2, 8, 17, 64, 129, 1024 were tried"
    ]


# --- Positions of a batch ---


def times(x, m):
    """(m + 1)·x, for positions (n,), or for each row of a batch its own."""
    places = m if m.ndim == 1 else m.reshape(len(m), 1, -1)
    return (x * (1.0 + places)[..., None]).astype(x.dtype)


def by_position(x, m):
    y = x * (1.0 + m)[:, None]
    return y, 1e-5 * np.abs(y)


def test_rows_of_a_batch_by_their_own_positions():
    assert run(times, by_position, batched=True) == ({}, [])

    def first_row(x, m):
        return times(x, m if m.ndim == 1 else np.broadcast_to(m[:1], m.shape))

    assert run(first_row, by_position)[0] == {}
    named, notes = run(first_row, by_position, batched=True)
    words = named["positions of a batch misread"]
    assert not notes and words.startswith("positions of shape (3, 5) for x of shape (3, 2, 5, 8): all rows are turned by the positions of row 0; row 1: first at")  # fmt: skip
    named, _ = run(lambda x, m: times(x, m if m.ndim < 3 else m[::-1]), by_position, batched=True)
    words = named["positions of a batch misread"]
    assert words.startswith("positions of shape (3, 1, 5)") and "row 0;" not in words and "row 0: first" in words

    def one_row(x, m):
        return times(x, m.reshape(len(m)))

    with pytest.raises(
        Unreadable, match=r"it refuses positions \(b, n\) and \(b, 1, n\), which batched= claims: it raises"
    ):
        run(one_row, by_position, batched=True)
    assert run(one_row, by_position, top=59, batched=True) == ({}, [])  # 4·3·5 positions are needed, and one more
    with pytest.raises(Unreadable):
        run(one_row, by_position, top=60, batched=True)


def test_sizes_of_a_batch_are_not_those_of_a_head():
    """Primes other than d and d/2."""
    for d, shape in ((8, (3, 2, 5, 8)), (10, (3, 2, 7, 10)), (6, (2, 5, 7, 6)), (4, (3, 5, 7, 4)), (2, (3, 5, 7, 2))):
        asked = []

        def fn(x, m, asked=asked):
            asked.append((x.shape, m.shape))
            return times(x, m)

        probe = Probe(fn, d, np.float32, None)
        module._by_batch_row(probe, Expectation(by_position), False)
        assert asked[-2:] == [(shape, (shape[0], shape[2])), (shape, (shape[0], 1, shape[2]))]


# --- Words ---


def test_the_first_wrong_output_is_that_of_the_least_position():
    truth, y = np.zeros((2, 3, 4)), np.zeros((2, 3, 4))
    y[1, 0, 2], y[1, 2, 3], y[1, 2, 1] = 5.0, 6.0, 7.0
    words = first_wrong(truth, y, y != 0, np.array([9, 1, -4]))
    assert words == "first at position -4, head 1, row 2, feature 1: expected 0, got 7; 3 of 24 outputs are wrong"
    assert first_wrong(truth, y, y != 0, np.array([[3, 1, 9], [5, 0, 2]])).startswith(
        "first at position 5, head 1, row 0, feature 2"
    )


def test_six_names_are_listed():
    assert listed_names(list("abcdef")) == "a, b, c, d, e, f" and listed_names(list("abcdefg")).endswith("f and 1 more")


def test_the_rule_of_wrong_lengths():
    assert lengths_in_words({2, 4, 6}, {1, 3, 5, 7}) == "; so the multiples of 2 are wrong"
    assert lengths_in_words({3, 5, 7}, {1, 2, 4, 6, 8}) == "; so above 2 only multiples of 2 are right"
    assert lengths_in_words({7, 8, 9}, {6, 10, 12, 14}) == ""  # 8 is a multiple of 2, and wrong
    many = {301, 320, 400, 600}
    assert lengths_in_words(many, {1, 1024, 2048}) == "", "it may be the multiples of 512, or of 256"
    assert lengths_in_words(many, {1, 512, 768}) == "", "or of 128"
    assert lengths_in_words(many | {384}, {1, 512, 768}) == "; so above 300 only multiples of 256 are right"
    assert lengths_in_words({512, 1024, 2048}, {1, 3, 1500}) == "", "256 was not tried"
    assert lengths_in_words({512, 1024, 2048}, {1, 256, 1500}) == "; so the multiples of 512 are wrong"
    assert lengths_in_words({3, 5, 8}, {1, 2, 7}) == "", "one right length above them is no rule"
    assert lengths_in_words({4, 6, 8}, {1, 3, 10, 11}) == "" and lengths_in_words({4, 6}, {1, 3}) == ""


def test_outcomes_are_named_by_what_is_wrong_and_beside_it_what_is_right():
    x = np.ones((2, 3, D))
    some = [Outcome(Trial(fault, name, x[:, : i + 1], np.arange(i + 1)), wrong) for i, (fault, name, wrong) in enumerate(
        [(POSITIONS, "falling", "off by 1"), (POSITIONS, "rising", ""), (LENGTHS, "three", "")])]  # fmt: skip
    assert module._named(some) == {POSITIONS: "wrong: falling; right: rising; falling: off by 1"}


# --- Candidates that count, refuse, remember, or depend on the length ---


def test_calls_of_a_candidate_that_counts_its_positions():
    """Lengths are tried with positions from 0 on, so that consecutive positions from there are no call more."""
    made, usual = tried(counted=True), of(CONSECUTIVE)
    lengths = of(LENGTHS, made)
    assert all(at(trial) == list(range(trial.x.shape[-2])) for trial in lengths.values())
    begins = {name: trial.positions[0] for name, trial in of(CONSECUTIVE, made).items() if trial.pool is not None}
    assert 0 not in begins.values() and begins.keys() == {name for name, trial in usual.items() if trial.start}
    assert any(trial.positions[0] == 0 for trial in usual.values())


def test_a_candidate_that_refuses_most_calls_is_not_judged():
    def short(x, m):
        if x.shape[-2] > 2:
            raise ValueError("too long")
        return 2 * x

    with pytest.raises(
        Unreadable, match=r"refuses \d+ of \d+ calls of many shapes, and takes .*: it raises ValueError .too long."
    ):
        run(short)

    def short_and_wrong(x, m):
        return short(x, m) * (1 if x.shape[-2] == 1 else 3)

    assert run(short_and_wrong)[0], "what is wrong in a call that it takes is judged"


def test_what_was_right_first_and_is_wrong_after_other_calls():
    seen = []

    def fn(x, m):
        seen.append(x.shape)
        return x * (2 if len(seen) < 40 else 3)

    named, _ = run(fn)
    assert list(named) == ["state between calls"] and "which was right before " in named["state between calls"]


@pytest.mark.parametrize("length, taken, words", [
    (4, 5, "a call up to position 3, of length 4: first at "),
    (8, 9, "a call up to position 7, of length 8: it has the Θ of length 9, so the length is compared by >="),
    (9, 8, "a call up to position 8, of length 9: it has the Θ of length 8, so the largest position is compared"),
])  # fmt: skip
def test_calls_around_the_original_length(length, taken, words):
    """With an original length of 8: calls of 4, 8 and 9 positions, of which x comes back times the length."""

    class Rope:
        def __init__(self, length):
            self.length = length

        def at(self, length):
            return Rope(length)

    def named(taken, top=131071):
        def fn(x, m):
            n = int(max(m)) + 1
            return x * np.float32(taken if n == length else n)

        def expected(x, positions, rope):
            return x * rope.length, np.full(x.shape, 1e-6)

        return list(module.at_the_switch(Probe(fn, D, np.float32, top), Rope(0), 8, expected).values())

    (found,) = named(taken)
    assert found.startswith(words) and named(length) == []
    assert named(taken, top=length - 2) == [], "there is no call beyond the largest position"


def test_properties_of_calls():
    x = np.ones((2, 3, 4, D), np.float32)

    def properties(x, *positions):
        return list(module._properties(x, np.array(positions)))

    assert properties(x, 0, 1, 2, 3) == ["x of 4 axes", "3 heads", "a batch of more than one"]
    assert properties(x[:1, :1], 0, 1, 2, 4) == ["positions that rise with gaps", "x of 4 axes", "1 head"]
    assert properties(x[0, 0], 0, 2, 1, 4) == ["x of 2 axes"] == properties(x[0, 0, :1], 5)
    assert properties(x[0, 0], 3, 3, 5, 6) == ["x of 2 axes"]
    fixed = x[0].copy()
    fixed.flags.writeable = False
    assert properties(fixed, 0, 1, 2, 3) == ["x of 3 axes", "3 heads", "a read-only x"]
