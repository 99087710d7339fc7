"""Which calls attention is tried with, one by one, and what is said of their outcomes: no check is run for that."""

from dataclasses import replace

import numpy as np
import pytest

import pyrope
from pyrope import Rope, YaRN
from pyrope.oracle import attention_checks, attention_trials as module, linear_checks
from pyrope.oracle.ask import Unreadable
from pyrope.oracle.attention_checks import SOFTMAX
from pyrope.oracle.attention_evidence import Exam
from pyrope.oracle.attention_trials import Outcome, Trial, overwritten, run_trials
from pyrope.oracle.examination import make_spec
from pyrope.oracle.linear_checks import LINEAR_KIND
from pyrope.oracle.questions import Questions
from pyrope.oracle.truth import seen

D = 8
ROPE = Rope(D, 100.0, "half")
F32 = np.dtype(np.float32)
MULTIPLES = {8, 24, 48, 96, 192, 320, 384}
POWERS = {1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513}


def drawn(rope=None, causal=True, top=4096, heads=2, key_heads=1, dtype=F32, feature_map=None, **options):
    spec = make_spec(heads, key_heads, D, causal, rope, dtype=dtype, **options)
    spec = spec if feature_map is None else replace(spec, feature_map=feature_map)
    return Questions(spec, dtype, top)


def named(trials):
    return {trial.question.name: trial for trial in trials}


def shape(trial):
    """Rows, queries and keys."""
    q, k = trial.question.q.shape, trial.question.k.shape
    return q[0], q[2], k[2]


# --- Which calls ---


def test_lengths_without_positions():
    made = named(module.lengths(drawn()))
    assert {shape(trial)[1] for trial in made.values()} == POWERS | MULTIPLES | {9, D, 2, 600}
    assert all(shape(t)[1] == shape(t)[2] and shape(t)[0] == 1 and t.needed for t in made.values())
    assert "1 token" in made and "2 tokens" in made and made["9 tokens"].fault == "some lengths wrong"
    assert made["33 tokens"].judged == ((33, 33),) and made["9 tokens"].question.positions is None
    assert made["512 tokens"].judged == ((8, 8), (258, 4), (512, 12))
    both_sides = named(module.lengths(drawn(causal=False)))
    assert both_sides["512 tokens"].judged == ((512, 12),) and both_sides["33 tokens"].judged == ((33, 33),)
    assert module._some(40, True) == ((40, 40),) and module._some(41, True) == ((8, 8), (22, 4), (41, 12))


def test_lengths_with_positions():
    made = list(module.lengths(drawn(ROPE)))
    apart = {shape(t)[1]: t.question.positions for t in made if t.fault == "some lengths wrong"}
    assert set(apart) == POWERS | MULTIPLES | {9, D, 2, 600}
    for n, at in apart.items():
        assert at.shape == (1, n) and at[0, 0] == 0 and (np.diff(at) > 0).all() and at.max() < 2 * n + 8
        assert n < 4 or (np.diff(at) > 1).any()
    consecutive = {
        t.question.name: t.question.positions[0].tolist() for t in made if t.fault == "consecutive positions wrong"
    }
    starts = {n: 0 if n % 4 else 1000 + n for n in POWERS | MULTIPLES | {9, D, 2, 600} if n % 2 == 0 or n in (1, 9, 65)}
    assert consecutive == {f"positions {m} to {m + n - 1}": list(range(m, m + n)) for n, m in starts.items()}
    short = named(t for t in module.lengths(drawn(ROPE, top=700)) if t.fault == "consecutive positions wrong")
    assert "positions 100 to 699" in short  # 600 tokens that end at 700
    few = drawn(ROPE, top=520)
    assert max(shape(t)[1] for t in module.lengths(few)) == 513
    assert {shape(t)[1] for t in module.lengths(drawn(ROPE, top=512))} == {
        n for n in POWERS | MULTIPLES | {9, D, 2} if n <= 512
    }
    few.few_shapes = True
    assert {shape(t)[1] for t in module.lengths(few)} == {2, 17, 64, 129, 512}


def test_more_lengths():
    made = list(module.more_lengths(drawn()))
    lengths = {shape(t)[1]: t for t in made}
    larger = {*range(144, 257, 16), 200, 300, 320, 384, 400, 1000, 1024}
    assert set(lengths) == (set(range(131)) | larger) - (POWERS | MULTIPLES | {9, D, 2, 600}) and not any(
        t.needed for t in made
    )
    assert lengths[0].judged == () and lengths[10].judged == ((10, 3),) and lengths[40].judged == ((21, 1), (40, 3))
    assert lengths[10].question.positions is None and lengths[10].fault == "some lengths wrong"
    assert {shape(t)[1]: t for t in module.more_lengths(drawn(causal=False))}[40].judged == ((40, 3),)
    turning = {shape(t)[1]: t for t in module.more_lengths(drawn(ROPE, top=1000))}
    assert max(turning) == 1000 and turning[40].question.positions.shape == (1, 40)
    few = drawn()
    few.few_shapes = True
    assert not list(module.more_lengths(few))


def test_all_are_the_first_of_the_same_tokens():
    draw = drawn(ROPE)
    for trial in (*module.lengths(draw), *module.more_lengths(draw)):
        n = shape(trial)[1]
        for name in "qkv":
            np.testing.assert_array_equal(getattr(trial.question, name), getattr(draw.tokens, name)[:, :, :n])
            assert getattr(trial.question, name).flags.c_contiguous


def test_orders_by_hand():
    made = {t.question.name: t for t in module.orders(drawn(ROPE))}
    counted = list(range(18))
    rows = {name: t.question.positions.tolist() for name, t in made.items()}
    assert rows["positions that start again"] == [counted[:9] * 2, counted[:6] * 3]
    assert rows["each position twice"] == [[m // 2 for m in counted], [m // 2 + 3 for m in counted]]
    assert rows["positions 0, 0, 0, 1, 2, …"] == [[0, 0, *counted[:16]], [0] * 5 + counted[:13]]
    assert rows["descending positions"] == [counted[::-1], [m + 4 for m in counted[::-1]]]
    assert rows["one position for all tokens"] == [[0] * 18, [5] * 18]
    assert [sorted(row) for row in rows["unsorted positions"]] == [counted] * 2
    assert rows["unsorted positions"][0] == rows["unsorted positions"][1][::-1] != counted
    assert rows["positions that start again, in a batch of one"] == [counted[:9] * 2]
    assert {t.judged for t in made.values()} == {((18, 18),)}
    assert {shape(t)[0] for name, t in made.items() if "batch" not in name} == {2}
    assert not list(module.orders(drawn()))


def test_decoding_by_hand():
    made = list(module.decoding(drawn()))
    needed = {shape(t): t for t in made if t.needed}
    some = {(2, 1, 128), (2, 1, 129), (2, 1, 300), (2, 3, 300), (2, 17, 300), (2, 64, 192), (1, 1, 1000), (1, 4, 1000)}
    assert set(needed) == some | {(1, n, keys) for n in (1, 4) for keys in (2100, 4098)}
    assert needed[2, 17, 300].judged == ((17, 24),) and needed[1, 4, 2100].judged == ((4, 4),)
    assert (
        needed[2, 1, 128].question.name == "1 query over 128 keys"
        and needed[2, 3, 300].question.name == "3 queries over 300 keys"
    )
    others = {shape(t) for t in made if not t.needed}
    larger = {*range(144, 257, 16), 200, 300, 320, 384, 400, 1000, 1024, 1500, 2048, 2049}
    assert others == {(1, 1, keys) for keys in {*range(2, 131), *larger}}
    assert {t.judged for t in made if not t.needed} == {((1, 1),)}
    assert all(t.question.name == f"1 query over {shape(t)[2]} keys" for t in made if not t.needed)
    assert needed[1, 4, 4098].question.name == "4 queries over 4098 keys"
    k = needed[1, 1, 4098].question.k  # twice the tokens, the second time with their features backwards
    np.testing.assert_array_equal(k[:, :, 2049:], k[:, :, :2049, ::-1])
    few = drawn()
    few.few_shapes = True
    assert [shape(t) for t in module.decoding(few)] == [(2, 1, 300), (2, 3, 300), (2, 17, 300)]


def test_caches_by_hand():
    made = {t.question.name: t for t in module.caches(drawn(ROPE))}
    assert {name: t.question.calls for name, t in made.items()} == {
        "cache: one token each": (1,) * 40, "cache: chunks of 16": (16,) * 5,
        "cache: a prompt of 64, then one each": (64, 1, 1, 1, 1), "cache: growing chunks": (1, 2, 3, 5, 8, 13, 21, 34),
        "cache: a prompt of 300, then chunks": (300, 1, 17, 1),
    }  # fmt: skip
    for trial in made.values():
        n = sum(trial.question.calls)
        assert shape(trial) == (4 if n < 64 else 1, n, n) and trial.judged == module._some(n, True)


def test_memory_is_held_in_every_way():
    made = {t.question.name: t for t in module.memory(drawn(ROPE, key_heads=2))}
    assert shape(made["a batch of four"]) == (4, 9, 9) and made["a batch of four"].fault == "batch rows mixed"
    plain = made["read-only arrays"].question
    for name in ("(b, n, h, d) in memory", "arrays in Fortran order", "arrays that are not aligned"):
        other = made[name].question
        assert all(np.array_equal(getattr(plain, x), getattr(other, x)) for x in "qkv")
    for x in "qkv":
        assert not getattr(plain, x).flags.writeable and getattr(plain, x).flags.c_contiguous
        assert not getattr(made["arrays that are not aligned"].question, x).flags.aligned
        assert getattr(made["arrays in Fortran order"].question, x).flags.f_contiguous
        assert getattr(made["(b, n, h, d) in memory"].question, x).swapaxes(1, 2).flags.c_contiguous
    one = made["k and v that are one head, expanded"].question
    longer = made["k and v as parts of a longer cache"].question
    for x in "kv":
        assert getattr(one, x).strides[:2] == (0, 0)
        assert (getattr(one, x) == getattr(plain, x)[:1, :1]).all()
        around = getattr(longer, x).base
        assert around.shape == (2, 2, 16, D) and (around[:, :, :3] == 9).all() and (around[:, :, 12:] == 9).all()
        assert np.array_equal(getattr(longer, x), getattr(plain, x))
    at = plain.positions
    assert made["int32 positions"].question.positions.dtype == np.int32
    assert made["strided positions"].question.positions.strides[1] == 16
    assert (made["strided positions"].question.positions == at).all() and (
        made["int32 positions"].question.positions == at
    ).all()
    assert (made["positions that are one row, expanded"].question.positions == at[0]).all()
    assert {t.judged for t in made.values()} == {((9, 9),)}
    assert not any(t.fault == "positions misread" for t in module.memory(drawn()))


@pytest.mark.parametrize("dtype, power", [(np.float16, 4), (np.float32, 9)])
def test_values_by_hand(dtype, power):
    made = {t.question.name: t for t in module.values(drawn(dtype=np.dtype(dtype)))}
    assert set(made) == {
        "a small row of q",
        "a small row of k",
        "a zero row of q",
        "a zero row of k",
        "a large row of q",
        "NaN in one row of q",
    }
    for name, trial in made.items():
        q, k = trial.question.q, trial.question.k
        (own, other) = (q, k) if name.endswith("q") else (k, q)
        row = own[0, :, 4].astype(float)
        rest = np.abs(np.delete(own[0], 4, axis=1).astype(float)).mean()
        assert shape(trial) == (2, 9, 9) and np.isfinite(other).all() and trial.spoilt == (4 if "NaN" in name else None)
        if "NaN" in name:
            assert np.isnan(row).all() and np.isfinite(own[1]).all() and np.isfinite(own[0, :, 5]).all()
            continue
        size = {"small": 2.0**-power, "zero": 0.0, "large": 2.0**power}[name.split()[1]]
        assert (row >= 0).all() and size * rest / 4 <= row.mean() <= 4 * size * rest
    first = drawn(dtype=np.dtype(dtype)).random("", 9, batch=2)  # the first that is drawn, before its row is made small
    small = made["a small row of q"].question.q[0, :, 4]
    np.testing.assert_allclose(small.astype(float), np.abs(first.q[0, :, 4].astype(float)) * 2.0**-power, rtol=1e-2)
    names = {kind: set(named(module.values(drawn(feature_map=kind)))) for kind in ("relu", "relu2", "exp", "elu+1")}
    assert names["elu+1"] == set(made) and names["exp"] == set(made) - {"a large row of q"}
    assert names["relu"] == names["relu2"] == set(made) - {"a zero row of q", "a zero row of k"}


def test_one_long_call_whose_sums_stop_growing():
    (trial,) = module.long(drawn(ROPE))
    assert trial.question.name == "4096 tokens" and shape(trial) == (1, 4096, 4096) and trial.judged == ((4096, 8),)
    assert trial.question.positions.tolist() == [list(range(4096))] and not trial.question.random
    v = trial.question.v
    assert (v[..., : D // 2] == 1).all() and set(np.unique(v[..., D // 2 :])) == {-1, 1}
    (far,) = module.long(drawn(top=10000))
    assert shape(far) == (1, 4096, 4096)
    (short,) = module.long(drawn(top=512))
    assert shape(short) == (1, 512, 512) and short.question.positions is None
    (many,) = module.long(drawn(heads=64))
    assert shape(many)[1] == 1024  # 64 heads of 2²⁰ weights


# --- What came of them ---

EXAM = Exam(SOFTMAX, "", drawn().spec, "float32", [])


def truth(question):
    q, k, v = (x.astype(np.float64) for x in (question.q, question.k, question.v))
    return pyrope.attention(q, k, v, causal=True)


def run(asks, trials=None, exam=EXAM):
    return run_trials(exam, asks, iter(module.lengths(drawn()) if trials is None else trials))


def spoilt(trigger):
    return lambda question: truth(question) * (0.5 if trigger(question) else 1.0)


def test_right_answers_have_no_name():
    assert run(truth) == ({}, [])
    assert run(truth, module.values(drawn())) == ({}, [])
    assert run(truth, module.decoding(drawn())) == ({}, [])


def test_what_is_compared_of_a_call():
    """A token whose own output may be anything, its row alone; and outputs that may be off by a share of themselves."""
    question = drawn().random("", 9, batch=2)
    right, whole = truth(question), ((9, 9),)
    assert module._compared(EXAM, Trial("", question, whole), right) == ""
    assert (
        module._compared(EXAM, Trial("", question, whole), right[:, :, :8])
        == "the shape is (2, 2, 8, 8), must be (2, 2, 9, 8)"
    )
    off = right.copy()
    off[0, :, 4] = np.nan
    assert module._compared(EXAM, Trial("", question, whole), off) and not module._compared(
        EXAM, Trial("", question, whole, 4), off
    )
    assert np.isnan(off[0, :, 4]).all(), "the answer is as it was"
    off[1, :, 4] = np.nan  # another row of the batch
    assert module._compared(EXAM, Trial("", question, whole, 4), off)
    spoilt = replace(question, q=question.q.copy())
    spoilt.q[0, :, 4] = np.nan  # as its query was
    assert module._compared(EXAM, Trial("", spoilt, whole, 4), right) == ""
    for size, fine in ((1.1, True), (0.9, True), (1.3, False), (0.7, False)):
        assert (module._compared(EXAM, Trial("", question, whole, slack=0.2), right * size) == "") is fine
    assert module._compared(EXAM, Trial("", question, whole), right * 1.1)
    small = replace(question, v=question.v * np.float32(2.0**-10))  # a share of small outputs is small
    assert module._compared(EXAM, Trial("", small, whole, slack=0.2), truth(small) * 1.3)
    assert module._compared(EXAM, Trial("", small, whole, slack=0.2), truth(small) * 1.1) == ""


def test_positions_that_are_apart():
    counts = drawn(ROPE).spec
    assert module._apart(4, 99, replace(counts, starts=(5, 5))).tolist() == [[5, 6, 7, 8]]
    apart = module._apart(4, 99, replace(counts, starts=(5, 7)))
    assert apart.shape == (1, 4) and apart[0, 0] == 0 and (np.diff(apart) > 0).all() and (np.diff(apart) > 1).any()


def test_a_batch_of_one_has_one_row():
    made = named(module.orders(drawn(ROPE)))
    assert shape(made["positions that start again, in a batch of one"])[0] == 1
    assert shape(made["positions that start again"])[0] == 2


def test_wrong_lengths_are_named_and_nothing_else_is_blamed():
    (fault, words), *others = run(spoilt(lambda q: q.q.shape[2] == 33))[0].items()
    assert (
        fault == "some lengths wrong"
        and not others
        and words.startswith("wrong: 33 tokens; right: 1 token, 2 tokens, 3 tokens, ")
    )
    rotated = drawn(ROPE)
    exam = replace(EXAM, spec=rotated.spec)

    def right(question):
        turned = [pyrope.rotate(x.astype(np.float64), question.positions, ROPE) for x in (question.q, question.k)]
        return pyrope.attention(*turned, question.v.astype(np.float64), causal=True)

    def wrong(question):
        return right(question) * (0.5 if question.q.shape[2] == 32 else 1.0)

    assert list(run(wrong, module.lengths(rotated), exam)[0]) == ["some lengths wrong"]
    prompt = lambda q: right(q) * (0.5 if q.q.shape[2] > 3 and (np.diff(q.positions) == 1).all() else 1.0)  # noqa: E731
    assert list(run(prompt, module.lengths(rotated), exam)[0]) == ["consecutive positions wrong"]


def test_where_every_length_is_wrong_nothing_is_said():
    """Up to three tokens show little: if they alone are right, the calls have nothing of their own."""
    assert run(spoilt(lambda q: True))[0] == {}
    assert run(spoilt(lambda q: q.q.shape[2] > 3))[0] == {}
    assert list(run(spoilt(lambda q: q.q.shape[2] > 8))[0]) == ["some lengths wrong"]


def test_decoding_is_told_from_lengths_by_its_keys():
    trials = [*module.lengths(drawn()), *module.decoding(drawn())]
    assert set(run(spoilt(lambda q: q.k.shape[2] == 129), trials)[0]) == {"some lengths wrong"}
    got = run(spoilt(lambda q: q.q.shape[2] == 1 and q.k.shape[2] >= 300), trials)[0]
    assert set(got) == {"decoding wrong"}
    assert "so all are right up to 256, and wrong from 300 on" in got["decoding wrong"]
    # 17 queries over 300 keys are wrong where 17 tokens are; one query is not.
    assert set(run(spoilt(lambda q: q.q.shape[2] == 17), trials)[0]) == {"some lengths wrong"}
    assert set(run(spoilt(lambda q: q.q.shape[2] == 1 < q.k.shape[2]), trials)[0]) == {"decoding wrong"}


def test_a_token_whose_query_is_nan_may_be_anything_and_no_other():
    trials = list(module.values(drawn()))
    assert run(lambda question: np.where(np.isnan(question.q[..., :1]), np.nan, truth(replace(question, q=np.nan_to_num(question.q)))), trials)[0] == {}  # fmt: skip

    def leaks(question):
        out = truth(replace(question, q=np.nan_to_num(question.q)))
        return np.where(np.isnan(question.q).any(axis=(1, 2, 3), keepdims=True), np.nan, out)

    assert list(run(leaks, trials)[0]) == ["rows leak into each other"]


def test_answers_of_another_shape_are_wrong():
    got = run(lambda q: truth(q) if q.q.shape[2] != 16 else truth(q)[..., :4])[0]
    assert "16 tokens: the shape is (1, 2, 16, 4), must be (1, 2, 16, 8)" in got["some lengths wrong"]

    def refuses(question):
        if question.q.shape[2] == 16:
            raise Unreadable("returns shape (3,)", "", "shape")
        return truth(question)

    assert "16 tokens: it returns shape (3,)" in run(refuses)[0]["some lengths wrong"]


def test_what_is_refused_is_noted_by_its_reason():
    def refuses(question):
        if question.q.shape[2] > 500 or not question.q.size:
            raise Unreadable("raises ValueError (too long)", "", "raised")
        return truth(question)

    named, notes = run(refuses)
    assert not named
    assert notes == [
        "not taken by the candidate: 511 tokens, 512 tokens, 513 tokens, 600 tokens; it raises ValueError (too long)"
    ]
    assert run(refuses, [t for t in module.more_lengths(drawn()) if shape(t)[1] < 20]) == ({}, [])


def test_the_same_call_twice_and_different_is_state():
    calls = []

    def once(question):
        calls.append(question.name)
        return truth(question) * (0.5 if calls.count("9 tokens") == 1 and question.name == "9 tokens" else 1.0)

    (fault, words), *others = run(once)[0].items()
    assert (
        fault == "state between calls" and not others and words.startswith('question "9 tokens", the same call twice: ')
    )
    assert calls.count("9 tokens") == 2


def test_slow_candidates_are_not_tried_with_what_may_be_left_out(monkeypatch):
    asked = []

    def asks(question):
        asked.append(question.name)
        return truth(question)

    trials = [t for t in module.more_lengths(drawn()) if shape(t)[1] < 30]
    monkeypatch.setattr(module, "cpu_seconds", lambda: 5.01 * (len(asked) > 3))
    named, notes = run(asks, trials)
    assert (
        not named
        and len(asked) == 4
        and notes[0].startswith(f"its calls are slow: not tried were {trials[4].question.name}, ")
    )
    asked.clear()
    monkeypatch.setattr(module, "cpu_seconds", lambda: 5.0 * (len(asked) > 3))
    assert run(asks, trials) == ({}, []) and len(asked) == len(trials)


def test_the_numbers_of_wrong_calls_may_be_those_of_a_known_mistake():
    """From 64 tokens on without causality."""

    def fn(question):
        if question.q.shape[2] < 64:
            return truth(question)
        return pyrope.attention(*(x.astype(np.float64) for x in (question.q, question.k, question.v)))

    words = run(fn)[0]["some lengths wrong"]
    assert "so all are right up to 63, and wrong from 64 on" in words and (
        "; the numbers there are those of: not causal; question" in words
    )


def test_two_tokens_show_too_little_to_be_like_anything():
    for n, like in ((2, False), (3, True)):
        question = drawn().random(f"{n} tokens", n, batch=1)
        answer = pyrope.attention(*(x.astype(np.float64) for x in (question.q, question.k, question.v)))
        words = module._likeness(EXAM, [Outcome(Trial("some lengths wrong", question, ()), "off", answer)])
        assert ("not causal" in words) == like


def test_judged_are_the_queries_that_are_listed():
    """Of 512 tokens: the first eight, 254 to 257, and the last twelve."""
    for token, wrong in (
        (7, True),
        (8, False),
        (253, False),
        (254, True),
        (257, True),
        (258, False),
        (499, False),
        (500, True),
        (511, True),
    ):

        def asks(question, token=token):
            out = truth(question)
            if question.q.shape[2] == 512:
                out[:, :, token] *= 0.5
            return out

        got = run(asks, [t for t in module.lengths(drawn()) if shape(t)[1] in (9, 512)])[0]
        assert bool(got) == wrong, token
        assert not wrong or f"first at token {token} of row 0" in next(iter(got.values()))


def test_a_result_that_changes_in_the_next_call():
    kept = np.zeros((2, 2, 9, D))

    def call(question):
        kept[...] = question.q
        return kept

    words = overwritten(call, drawn())
    assert words == f"9 tokens: {kept.size} of {kept.size} outputs of a result changed during the next call"
    assert overwritten(lambda question: question.q.copy(), drawn()) == ""
    assert overwritten(lambda question: np.full(3, np.nan), drawn()) == ""


@pytest.mark.parametrize(
    ("name", "reused"),
    {
        "1 token": lambda q, k: q.shape[2] == 1,
        "1 query over 64 keys": lambda q, k: q.shape[2] == 1 < k.shape[2],
        "1 query over 300 keys": lambda q, k: q.shape[2] == 1 and k.shape[2] > 128,
        "64 tokens": lambda q, k: q.shape[2] >= 32,
        "128 tokens": lambda q, k: q.shape[2] == 128,
    }.items(),
)
def test_a_result_that_changes_in_the_next_call_of_some_shapes(name, reused):
    """A buffer for each shape, of one query or of many tokens alone."""
    kept: dict[tuple[int, ...], np.ndarray] = {}

    def call(question):
        if not reused(question.q, question.k):
            return question.q.copy()
        buffer = kept.setdefault(question.q.shape, np.empty_like(question.q))
        buffer[...] = question.q
        return buffer

    assert overwritten(call, drawn()).startswith(f"{name}: ")


def test_a_shape_that_is_refused_is_not_compared():
    def call(question):
        if question.q.shape[2] != question.k.shape[2]:
            raise Unreadable("raises", "", "error")
        return question.q.copy()

    assert overwritten(call, drawn()) == ""


def test_outcomes_of_the_same_question_are_listed_once():
    question = drawn().random("again", 9, batch=1)
    twice = [Outcome(Trial("cache wrong in some calls", question, ()), "off") for _ in range(2)]
    assert module._evidence(twice, twice) == "wrong: again; right: again; again: off"


# --- Which questions ---


def questions(rope=None, accepted=(), cache=True, incremental=None, demanded=False, **options):
    draw = drawn(rope, **options)
    listed, notes = attention_checks._questions(draw, set(accepted), cache, incremental, demanded)
    return {question.name: question for question in listed}, notes


def sizes(question):
    return question.q.shape[0], question.q.shape[2], question.k.shape[2]


def test_what_softmax_attention_is_asked():
    asked, notes = questions()
    assert {name: sizes(q) for name, q in asked.items()} == {
        "random": (3, 24, 24), "sharp": (3, 24, 24), "one token": (3, 1, 1), "130 tokens": (1, 130, 130), "a few tokens": (2, 7, 7),
        "cache": (3, 5, 24), "cache, 1 query": (3, 1, 24), "cache, 2 queries": (3, 2, 24), "many small weights": (2, 128, 128),
        "large scores": (2, 24, 24),
    }  # fmt: skip
    assert notes == ["not tried, since the candidate has no such argument: mask, segments"]
    assert {q.demand for q in asked.values()} == {""}
    demanded = questions(demanded=True)[0]
    assert {name for name, q in demanded.items() if q.demand == "cache"} == {
        "cache",
        "cache, 1 query",
        "cache, 2 queries",
    }
    assert not any("cache" in name for name in questions(cache=False)[0])
    asked, notes = questions(accepted=("mask", "segments"))
    assert {"mask", "padding", "packed"} <= set(asked) and not notes
    asked, notes = questions(accepted=("segments",))
    assert (
        "packed" in asked
        and "mask" not in asked
        and notes == ["not tried, since the candidate has no such argument: mask"]
    )


def test_what_it_is_asked_with_a_rope_a_window_or_a_cap():
    slow = Rope(D, 10000.0, "half")
    turned = questions(slow, cache=False)[0]
    assert {"far apart", "positions in other orders"} <= set(turned) and "all at position 0" not in turned
    assert "all at position 0" in questions(slow, cache=False, dtype=np.dtype(np.float64))[0]
    assert "all at position 0" not in questions(dtype=np.dtype(np.float64))[0]
    near = questions(slow, window=5, cache=False)[0]
    assert "far apart" not in near and "positions in other orders" in near and sizes(near["random"]) == (3, 29, 29)
    assert "edge of the window" not in near and sizes(questions(window=48)[0]["random"]) == (3, 72, 72)
    far, notes = questions(window=49)
    assert sizes(far["random"]) == (3, 24, 24) and sizes(far["edge of the window"]) == (1, 8, 61) and len(notes) == 1
    _, notes = questions(window=20000)
    assert notes[0] == "the edge of a window of 20000 could not be tried here"
    capped, notes = questions(softcap=5.0)
    assert "saturated scores" in capped and len(notes) == 1
    _, notes = questions(softcap=5.0, window=3)
    assert "the softcap of 5.0 could not be tried here" in notes
    steps = questions(incremental=lambda: None)[0]
    assert steps["step by step, one each"].calls == (1,) * 13 and steps["step by step, a prompt first"].calls == (
        8,
        1,
        1,
        3,
    )
    assert {q.demand for q in steps.values()} == {"", "incremental"} and sizes(steps["step by step, one each"]) == (
        3,
        13,
        13,
    )


def test_what_linear_attention_is_asked():
    draw = drawn(ROPE, feature_map="elu+1")
    asked = {q.name: q for q in linear_checks._questions(draw, None)}
    assert {63, 64, 65, 264, 1, 7, 24} <= {sizes(q)[1] for q in asked.values()}
    assert {name: sizes(asked[name]) for name in ("shifted", "far apart", "a few tokens", "264 tokens", "64 tokens")} == {
        "shifted": (3, 24, 24), "far apart": (3, 24, 24), "a few tokens": (2, 7, 7), "264 tokens": (1, 264, 264), "64 tokens": (1, 64, 64),
    }  # fmt: skip
    assert (
        asked["shifted"].positions.tolist() == [list(range(1000, 1024))] * 3
        and (asked["shifted"].q == asked["random"].q).all()
    )
    near = {q.name: q for q in linear_checks._questions(drawn(ROPE, top=600, feature_map="elu+1"), None)}
    assert near["shifted"].positions[0].tolist() == list(range(576, 600))
    ones = asked["sums of weights"]
    assert (ones.v == 1).all() and not ones.random
    steps = {q.name: q for q in linear_checks._questions(draw, lambda: None) if q.calls}
    assert {name: q.calls for name, q in steps.items()} == {
        "step by step, one each": (1,) * 20,
        "step by step, in chunks": (8, 1, 1, 10),
    }
    assert {q.demand for q in steps.values()} == {"incremental"}
    wide = drawn(ROPE, dtype=np.dtype(np.float64), feature_map="elu+1")
    (zero,) = [q for q in linear_checks._questions(wide, None) if q.name == "all at position 0"]
    assert (
        (zero.q == np.round(zero.q * 512) / 512).all()
        and (zero.q >= 0).all()
        and zero.k.any()
        and not zero.positions.any()
    )
    steep = drawn(ROPE, dtype=np.dtype(np.float64), feature_map="exp")
    (zero,) = [q for q in linear_checks._questions(steep, None) if q.name == "all at position 0"]
    assert not zero.q.any() and not zero.k.any()
    assert not any(q.name == "all at position 0" for q in asked.values())


def test_numbers_whose_squares_float32_holds():
    spec = drawn(ROPE, feature_map="elu+1").spec
    assert linear_checks._short_features(spec, np.array([1.7, -0.3])).tolist() == [870 / 512, 154 / 512]
    assert linear_checks._short_features(replace(spec, feature_map="exp"), np.array([1.7])).tolist() == [0]


@pytest.mark.parametrize("heads, grouped", [(4, [2, 1]), (6, [3, 2, 1]), (2, [1]), (3, [1]), (5, [1])])
def test_fewer_key_heads_are_asked_a_little(heads, grouped):
    exam = Exam(SOFTMAX, "", drawn(heads=heads, key_heads=heads).spec, "float32", [], ("a note",))
    others = list(attention_checks.grouped_exams(exam, F32, 4096))
    assert [sizes(q) for q in others[0].questions] == [(2, 24, 24), (2, 7, 7)]
    for other, key_heads in zip(others, grouped, strict=True):
        assert other.spec == replace(exam.spec, key_heads=key_heads) and other.notes == ()
        assert all(q.k.shape[1] == key_heads and q.q.shape[1] == heads for q in other.questions)


def test_one_head_has_no_groups():
    exam = Exam(SOFTMAX, "", drawn(heads=1).spec, "float32", [])
    assert list(attention_checks.grouped_exams(exam, F32, 4096)) == []


def test_options_are_read_from_a_signature():
    assert attention_checks._accepted(lambda q, k, v, mask=None, window=3: None) == {"mask"}
    assert attention_checks._accepted(lambda q, k, v, *, segments, mask: None) == {"mask", "segments"}
    assert attention_checks._accepted(type) == set()  # which has no signature to read


def test_what_is_expected_in_words():
    words = attention_checks._described(drawn(ROPE, causal=False, window=4, softcap=2.0, scale=0.5).spec)
    assert words == f"2 heads over 1, d = 8, not causal, scale 0.5, window 4, softcap 2.0, with {ROPE!r} inside"
    assert attention_checks._described(drawn().spec) == "2 heads over 1, d = 8, causal, scale 0.353553"


# --- Ropes that are read ---


def turned_attention(rope):
    """Softmax attention with this rope inside, by the definition's own functions."""

    def fn(q, k, v, positions):
        q, k = (pyrope.rotate(x.astype(np.float64), positions, rope) for x in (q, k))
        return pyrope.attention(q, k, v.astype(np.float64), causal=True).astype(v.dtype)

    return fn


@pytest.mark.parametrize("rope", [Rope(D, 777.0, "half"), Rope(D, 777.0, "interleaved"), Rope(D, 777.0, "half", 4, "suffix", direction=-1)], ids=repr)  # fmt: skip
def test_cosines_and_sines_are_read_from_the_scores_of_unit_vectors(rope):
    read = attention_checks._unit_scores(turned_attention(rope), drawn(rope).spec, rope, F32)
    theta = np.array([777.0 ** (-i / rope.pairs) for i in range(rope.pairs)]) * rope.direction
    distances = np.array([2, 4, 16, 64, 256])
    np.testing.assert_allclose(read[0], np.cos(distances[:, None] * theta), atol=1e-4)
    np.testing.assert_allclose(read[1], np.sin((distances[:, None] - 1) * theta), atol=1e-4)


def test_what_cannot_be_read_is_nan():
    spec = drawn(ROPE).spec
    for fn in (lambda q, k, v, at: q[..., :3], lambda *arguments: 1 / 0):
        assert np.isnan(attention_checks._unit_scores(fn, spec, ROPE, F32)).all()


class Evidence:
    """As much of it as is asked for."""

    def __init__(self, spec):
        draw = Questions(spec, F32, 4096)
        self.exam = Exam(SOFTMAX, "", spec, "float32", [draw.random("random", 24)])


def test_an_attention_factor_is_taken_off_the_scores():
    rope = Rope(D, 777.0, "half", scaling=YaRN(1.0, 4096, attention_factor=1.5))  # a factor of 1 rescales nothing
    read = attention_checks._unit_scores(turned_attention(rope), drawn(rope).spec, rope, F32)
    theta = np.array([777.0 ** (-i / 4) for i in range(4)])
    np.testing.assert_allclose(read[0, 0], np.cos(2 * theta), atol=1e-3)


class Tuned(Evidence):
    """Evidence that notes which numbers are tuned, from where, and within which factor."""

    def __init__(self, spec, failed=(0,), since=(), eps=1e-7):
        super().__init__(spec)
        self.failed, self.begins, self.eps, self.asked = failed, since, eps, []

    def tuned(self, fields, starts, around=2):
        name = "+".join(fields(2.0))
        self.asked.append((name, [float(f"{x:.4g}") for x in starts], around))
        return (0.5,) if name != "rope" else (77.0,)

    def since(self, i):
        return self.begins[i]

    def windows(self):
        return (7,)


def test_which_numbers_of_softmax_attention_are_measured():
    evidence = Tuned(drawn(ROPE).spec)
    measured = attention_checks._measure(evidence, None)
    scales, added, *ropes = [asked for asked in evidence.asked if asked[0] != "cap"]
    assert (
        scales[0] == "scale"
        and scales[1][0] == 0.01562
        and scales[1][-1] == 64
        and len(scales[1]) == 25
        and scales[2] == 2
    )
    assert added == ("added", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0], 30)
    assert [(name, starts[0], starts[-1], around) for name, starts, around in ropes] == [("rope", 10, 1e9, 2)] * 3
    others = [ROPE, replace(ROPE, layout="interleaved"), replace(ROPE, direction=-1)]
    assert (measured.scales, measured.added, measured.windows) == ((0.5,), (0.5,), (7,)) and measured.ropes == tuple(
        replace(x, base=77.0) for x in others
    )
    read = Tuned(drawn(ROPE).spec)
    measured = attention_checks._measure(read, turned_attention(Rope(D, 4321.0, "half")))
    assert [len(starts) for name, starts, _ in read.asked if name == "rope"] == [1]
    assert read.asked[-1][1][0] == pytest.approx(4321.0, rel=1e-2) and measured.ropes == (replace(ROPE, base=77.0),)


def test_bases_are_measured_where_they_would_show():
    """Only if a short question failed, too: another base shows among fewer than 64 tokens."""
    long = Tuned(drawn(ROPE).spec)
    draw = drawn(ROPE)
    long.exam = replace(long.exam, questions=[draw.random("long", 65), draw.random("short", 64)])
    assert attention_checks._measure(long, None).ropes == ()
    long.failed = (0, 1)
    assert len(attention_checks._measure(long, None).ropes) == 3


def test_which_numbers_of_linear_attention_are_measured():
    causal, both = drawn(ROPE, feature_map="elu+1").spec, drawn(ROPE, causal=False, feature_map="elu+1").spec
    evidence = Tuned(causal, failed=(0, 1, 2, 3), since={0: 64, 1: 0, 2: None, 3: 48})
    evidence.exam = replace(evidence.exam, questions=evidence.exam.questions * 4)
    measured = linear_checks._measure(evidence, None)
    tuned = {name: (starts, around) for name, starts, around in evidence.asked if name != "rope"}
    assert tuned["added"] == ([1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0], 30)
    assert tuned["decay"] == ([0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999], 2)
    assert measured.chunks == (16, 32, 48, 64, 128, 192, 256) and measured.added == (0.5,)
    assert measured.decays == ({"decay": 0.5}, {"decay": 0.5, "decaying": "numerator"})
    assert len(measured.ropes) == 3 and not measured.scales
    late = Tuned(causal, failed=(1,), since={1: None}, eps=2 * 2.0**-24)
    late.exam = replace(late.exam, questions=late.exam.questions * 2)
    assert (
        linear_checks._measure(late, None).decays == ()
    )  # a decay would show among the 24 tokens of the first question
    late.eps = 2.1 * 2.0**-24  # unless noise hides it
    assert len(linear_checks._measure(late, None).decays) == 2
    two_sided = linear_checks._measure(Tuned(both, since={0: 5}), None)
    assert two_sided.chunks == two_sided.decays == () and two_sided.added == (0.5,) and len(two_sided.ropes) == 3


# --- What is handed to the examination ---


@pytest.fixture
def handed(monkeypatch):
    calls = []

    def examine(exam, fn, incremental, asked, trials, grouped):
        calls.append((exam, asked, trials, grouped))

    monkeypatch.setattr(attention_checks, "examine", examine)
    monkeypatch.setattr(linear_checks, "examine", examine)
    return calls


def kinds(trials):
    return [part.__name__ for part in (trials.lengths, *trials.others)]


def test_what_a_check_of_softmax_attention_begins_with(handed):
    def fn(q, k, v, mask=None):
        return q

    attention_checks.check_attention(fn)
    exam, asked, trials, grouped = handed.pop()
    assert (exam.kind, exam.dtype, exam.prefill, asked) == (SOFTMAX, "float32", True, 2)
    assert exam.expected == "softmax attention of 4 heads over 4, d = 64, causal, scale 0.125, float32"
    assert next(grouped).spec.key_heads == 2 and trials.draw.max_position == 4096
    assert kinds(trials) == ["lengths", "orders", "memory", "values", "decoding", "more_lengths"]
    names = {question.name for question in exam.questions}
    assert {"mask", "cache"} <= names and "packed" not in names and len(exam.notes) == 1

    attention_checks.check_attention(
        fn, cache=False, key_heads=4, incremental=lambda: fn, grade="rounded once", max_position=600, dtype="float64"
    )
    exam, asked, trials, grouped = handed.pop()
    assert (
        asked == 0
        and grouped == ()
        and not exam.prefill
        and exam.dtype == "float64"
        and trials.draw.max_position == 600
    )
    assert kinds(trials) == ["lengths", "caches", "orders", "memory", "values", "more_lengths"]
    assert not any(question.name.startswith("cache") for question in exam.questions)

    attention_checks.check_attention(fn, cache=True)
    exam, *_ = handed.pop()
    assert not exam.prefill and sum(question.demand == "cache" for question in exam.questions) == 3
    attention_checks.check_attention(fn, rope=ROPE, head_dim=D, causal=False)
    exam, _, trials, _ = handed.pop()
    assert kinds(trials) == ["lengths", "orders", "memory", "values", "more_lengths"] and not exam.prefill
    with pytest.raises(ValueError, match="cache=True demands calls with fewer queries than keys, but with RoPE inside"):
        attention_checks.check_attention(fn, rope=ROPE, head_dim=D, cache=True)


def test_what_a_check_of_linear_attention_begins_with(handed):
    linear_checks.check_linear_attention(lambda *given: None, rope=ROPE)
    exam, asked, trials, grouped = handed.pop()
    assert (exam.kind, exam.dtype, asked, next(grouped).spec.key_heads) == (LINEAR_KIND, "float32", 1, 2)
    assert exam.expected == f"linear attention, Eq. (19), of 4 heads over 4, elu+1, causal, {ROPE!r}, float32"
    assert (
        kinds(trials) == ["lengths", "orders", "memory", "values", "small", "long", "more_lengths"]
        and exam.spec.head_dim == D
    )
    assert trials.draw.max_position == 4096
    wide = Rope(16, 100.0, "half")
    linear_checks.check_linear_attention(
        lambda *given: None,
        rope=wide,
        key_heads=2,
        causal=False,
        feature_map="relu",
        incremental=lambda: None,
        max_position=600,
    )
    exam, _, trials, grouped = handed.pop()
    assert (
        grouped == ()
        and exam.spec.feature_map == "relu"
        and ", relu, not causal, " in exam.expected
        and "4 heads over 2" in exam.expected
    )
    assert kinds(trials)[:2] == ["lengths", "caches"] and trials.draw.max_position == 600
    for name in ("relu", "relu2"):
        with pytest.raises(
            ValueError, match=f"head_dim must be at least 16 for {name}, was 8: features would be all zeros"
        ):
            linear_checks.check_linear_attention(lambda *given: None, rope=ROPE, feature_map=name)


@pytest.mark.parametrize("layout, direction", [("half", 1), ("interleaved", -1)])
def test_another_base_is_read_with_pairing_and_direction(layout, direction):
    meant, other = Rope(16, 10000.0, "half"), Rope(16, 4321.0, layout, direction=direction)
    spec = make_spec(2, 1, 16, True, meant, dtype=F32)
    read = list(attention_checks._read_ropes(turned_attention(other), Evidence(spec)))
    assert [(rope.layout, rope.direction) for rope in read] == [(layout, direction)]
    assert read[0].base == pytest.approx(4321.0, rel=5e-3) and read[0].scaling is None


def test_what_hides_the_angles_is_not_read():
    fn, small = turned_attention(ROPE), Rope(2, 100.0, "half")
    for spec in (
        drawn().spec,
        drawn(ROPE, softcap=5.0).spec,
        drawn(ROPE, window=2).spec,
        make_spec(2, 1, 2, True, small, dtype=F32),
    ):
        assert list(attention_checks._read_ropes(fn, Evidence(spec))) == []
    assert len(list(attention_checks._read_ropes(fn, Evidence(drawn(ROPE, window=3).spec)))) == 1


def test_the_kinds_have_their_names():
    assert (SOFTMAX.subject, LINEAR_KIND.subject) == ("attention", "linear attention")
    assert SOFTMAX.low.name == "softmax in low precision" and LINEAR_KIND.low.name == "sums in low precision"


def test_who_sees_whom_by_hand():
    """Four tokens, of which the last three ask, in two segments; and with the third one hidden by a mask."""
    spec, segments = drawn().spec, np.array([[0, 0, 1, 1]])
    both = [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert seen(spec, 3, 4).astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert seen(spec, 3, 4, segments=segments).astype(int).tolist() == [[both]]
    hidden = np.array([True, True, False, True]) & np.ones((1, 1, 3, 4), bool)
    assert seen(spec, 3, 4, hidden).astype(int).tolist() == [[[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 1]]]]
    assert seen(spec, 3, 4, hidden, segments).astype(int).tolist() == [[[[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]]]
