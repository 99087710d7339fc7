"""`rules.simplest`: the statement that holds for exactly the wrong ones, and for all of them in any case."""

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from pyrope.oracle.rules import simplest

N = np.arange(200)
FLAG, LABEL = N % 3 == 1, np.array(["plain", "strided", "held in Fortran order"])[N % 3]


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.02, 0.98))
def test_a_rule_holds_for_all_that_is_wrong(seed, share):
    rng = np.random.default_rng(seed)
    wrong = rng.random(60) < share
    assume(wrong.any() and not wrong.all())
    columns = {"n": rng.integers(0, 40, 60), "x": rng.standard_normal(60), "flag": rng.random(60) < 0.5,
               "kind": np.array(["a", "b", "c"])[rng.integers(0, 3, 60)]}  # fmt: skip
    rule = simplest(columns, wrong)
    if rule is not None:
        assert rule.holds[wrong].all()
        assert rule.share == pytest.approx(wrong.sum() / rule.holds.sum())
        assert rule.exact == (rule.holds == wrong).all()
        assert not rule.holds.all()


@pytest.mark.parametrize(("columns", "wrong", "words"), [
    ({"n": N}, N == 77, "n = 77"),
    ({"n": N}, N >= 128, "n ≥ 128 (127 is right)"),
    ({"n": N}, N <= 9, "n ≤ 9 (10 is right)"),
    ({"n": N}, (N >= 5) & (N <= 40), "5 ≤ n ≤ 40"),
    ({"n": N}, N % 64 == 0, "n is a multiple of 64"),
    ({"n": N}, N % 11 == 4, "n is 4 modulo 11"),
    ({"n": N}, N % 16 != 0, "n is no multiple of 16"),
    ({"n": N}, (N > 32) & (N % 32 != 0), "n is above 32 and no multiple of it"),
    ({"flag": FLAG}, FLAG, "flag"),
    ({"flag": FLAG}, ~FLAG, "not: flag"),
    ({"memory": LABEL}, LABEL == "strided", "memory: strided"),
    ({"memory": LABEL}, LABEL != "plain", "memory: held in Fortran order, or strided"),
    ({"x": N / 8}, N >= 20, "x ≥ 2.5 (2.375 is right)"),
    ({"n": N, "flag": N % 5 == 0}, (N >= 100) & (N % 5 == 0), "flag and n ≥ 100 (95 is right)"),
    ({"n": N, "flag": N % 5 == 0, "memory": LABEL}, (N % 5 == 0) & (LABEL == "plain"), "n is a multiple of 15"),
])  # fmt: skip
def test_an_exact_rule_is_found_in_words(columns, wrong, words):
    rule = simplest(columns, wrong)
    assert (rule.words, rule.exact) == (words, True)
    assert (rule.holds == wrong).all()


@given(low=st.integers(1, 190), width=st.integers(0, 60), data=st.data())
def test_exact_rules_of_one_or_two_columns_are_always_found(low, width, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    a, b = rng.permutation(N), rng.random(200) < 0.5
    inside = (a >= low) & (a <= low + width)
    wrong = inside & b if data.draw(st.booleans()) else inside
    assume(wrong.any())
    rule = simplest({"other": rng.permutation(N), "a": a, "b": b}, wrong)
    assert rule.exact, rule.words
    assert (rule.holds == wrong).all()


def test_two_numbers_have_no_period_but_a_usual_one_and_a_fraction_is_no_statement():
    wrong = np.isin(N, (20, 157))
    rule = simplest({"n": N, "row": N % 40, "x": N + 0.5}, wrong)
    assert rule is None or "modulo 137" not in rule.words
    assert simplest({"n": N}, np.isin(N, (20, 148, 84))).words == "n is 20 modulo 64"
    rule = simplest({"x": N + 0.5}, N == 77)
    assert rule is None or " = " not in rule.words


def test_nothing_is_said_where_there_is_nothing_to_separate():
    assert simplest({"n": N}, np.zeros(200, bool)) is None
    assert simplest({"n": N}, np.ones(200, bool)) is None
    assert simplest({"n": np.ones(200, int)}, N < 3) is None


def test_one_statement_is_preferred_to_two_and_the_first_of_equals():
    rule = simplest({"first": N >= 50, "second": N >= 50, "n": N}, N >= 50)
    assert (rule.words, rule.about) == ("first", "first")


def test_what_does_not_speak_is_neither_right_nor_wrong():
    speaks = (N < 100) | (N >= 150)
    rule = simplest({"n": N}, N >= 150, speaks)
    assert (rule.words, rule.exact) == ("n ≥ 150 (99 is right)", True)
    assert (rule.holds == (N >= 150)).all()
    assert simplest({"n": N}, N >= 150, N >= 150) is None  # what is wrong speaks; nothing is right


def test_a_random_set_has_no_exact_rule():
    wrong = np.random.default_rng(5).random(200) < 0.3
    rule = simplest({"n": N, "flag": FLAG, "memory": LABEL}, wrong)
    assert rule is None or (not rule.exact and rule.share < 0.5)
