"""The one way to call a candidate: what it receives, and what is noted of what it does."""

import contextvars
import re

import numpy as np
import pytest

from pyrope.oracle import ask as module
from pyrope.oracle.ask import (
    Unreadable,
    ask,
    compiles,
    compiling,
    counting,
    counts,
    hand_over,
    last_call,
    position_range,
)

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def called(fn, x=X, options=None, seen=None):
    return ask(fn, {"x": x}, options or {}, "for the question", {} if seen is None else seen)


def refusal(fn, **options):
    with pytest.raises(Unreadable) as caught:
        called(fn, **options)
    return caught.value


def test_arguments_by_place_and_options_by_name():
    seen = []
    out = ask(lambda q, k, *, mask: seen.append((q.shape, k.shape, mask.shape)) or q * 2, {"q": X, "k": X[:1]}, {"mask": X[:, :1]}, "", {})  # fmt: skip
    assert seen == [((2, 3), (1, 3), (2, 1))] and np.array_equal(out, 2 * X)


@pytest.mark.parametrize("fn, reason, kind", [
    (lambda x: None, "it returns nothing", "type"), (lambda x: [1], "it returns list, which is no NumPy array", "type"),
    (lambda x: np.ma.masked_array(x), "it returns MaskedArray, which is no NumPy array", "type"),
    (lambda x: x.astype(int), "it returns int64", "dtype"), (lambda x: 1 / 0, "it raises ZeroDivisionError (division by zero)", "raised"),
    (lambda x: setattr(x, "shape", (6,)) or x, "it changes the shape of x to (6,)", "reshaped"),
    (lambda x: setattr(x, "dtype", np.int32) or x, "it changes the dtype of x to int32", "reshaped"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_read(fn, reason, kind):
    error = refusal(fn, x=X.copy())
    assert (error.reason, error.kind, error.received) == (reason, kind, "for the question")
    assert str(error) == f"{reason}{',' if 'no NumPy' in reason else ''} for the question"
    failure = error.failure()
    assert failure.received == "the question" and failure.fix and failure.reason == reason


def test_long_messages_are_shortened():
    def raising(error):
        def fn(x):
            raise error

        return refusal(fn).reason

    assert (
        raising(ValueError("a\nb\n  c ")) == "it raises ValueError (a … c)"
        and raising(ValueError()) == "it raises ValueError (no message)"
    )
    assert raising(SystemExit(3)) == "it raises SystemExit (3)"

    class Odd(Exception):
        def __str__(self):
            raise KeyError

    assert raising(Odd()) == "it raises Odd (a message that cannot be printed: KeyError)"
    assert len(raising(ValueError("x" * 5000))) < 500
    with pytest.raises(KeyboardInterrupt):
        raising(KeyboardInterrupt())
    assert raising(Unreadable("is odd", "here", "type")) == "it is odd"  # as it is


def test_the_fix_follows_the_words_of_the_exception():
    def fix(words):
        error = Unreadable("raises", "", "raised")
        error.__cause__ = ValueError(words)
        return error.failure().fix

    assert "from_cos_sin" in fix("takes 2 positional arguments") and "max_position=" in fix("index 9 is out of bounds")
    assert "with_axes" in fix("could not broadcast") and fix("anything else").startswith("mend the exception")
    assert Unreadable("x", "", "gradients").failure().fix == "return three gradients, (dq, dk, dv)"


def test_inputs_that_are_changed_are_restored():
    x, seen = X.copy(), {}

    def fn(x):
        x.ravel()[:5] += 1
        return x

    out = called(fn, x, seen=seen)
    assert (
        np.array_equal(x, X)
        and out[0, 0] == 1
        and seen == {"mutates its input": "5 of 6 elements of x are changed after the call"}
    )
    called(lambda x: x + 0, x, seen=seen)
    assert len(seen) == 1
    lost = np.full((1, 2), np.nan, np.float32)
    seen = {}
    called(lambda x: x + 0, lost, seen=seen)
    assert seen == {}  # NaN is equal to itself
    mask = np.zeros(3, bool)

    def unmask(x, mask):
        mask[1] = True
        return x + 0

    called(unmask, options={"mask": mask}, seen=seen)
    assert seen == {"mutates its input": "1 of 3 elements of mask are changed after the call"} and not mask.any()


def test_the_dtype_of_the_result():
    seen = {}
    assert called(lambda x: x.astype(np.float64), seen=seen).dtype == np.float64
    assert seen == {"wrong dtype out": "the input is float32, the result float64"}
    called(lambda x: x.astype(np.float16), seen=seen)
    assert seen == {"wrong dtype out": "the input is float32, the result float64"}  # the first is kept

    class Matrix(np.ndarray):
        pass

    assert type(called(lambda x: x.view(Matrix))) is np.ndarray


def test_every_call_is_announced(monkeypatch):
    heard = []
    monkeypatch.setattr(module, "listeners", [heard.append])

    def adapter(x):
        return hand_over(lambda x, n: x + n, x, 3)

    called(adapter)
    described = "for numpy.ndarray of shape (2, 3), float32; 3, adapted from the question"
    assert heard == ["for the question", described, ""] and last_call() == described
    heard.clear()
    refusal(lambda x: 1 / 0)
    assert heard == ["for the question", ""]
    hand_over(len, "y" * 99)
    assert heard[-1] == "for '" + "y" * 39


def test_what_compiles_and_what_counts():
    assert not any(contextvars.Context().run(known) for known in (compiles, counts))  # before any call
    called(compiling(lambda x: x + 0))
    assert compiles() and not counts()
    called(counting(lambda x: x + 0))
    assert counts() and not compiles()
    called(lambda x: x + 0)
    assert not counts() and not compiles()


def test_positions_in_words():
    assert position_range(np.array([[3, 7, 5]])) == "positions of shape (1, 3), from 3 to 7"
    assert position_range(np.empty(0)) == "no positions"


def test_warnings_of_the_candidate_are_its_own():
    assert re.match("inf|nan", str(called(lambda x: x / np.float32(0))[0, 1]))
