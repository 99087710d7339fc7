"""`generate`: against full passes, token by token, and against probabilities that are counted out."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, strategies as st
from models import KINDS, PLAIN, configs, fewer

from pyrope import DynamicNTK, Rope, from_numpy, to_numpy
from pyrope.models import generation
from pyrope.models.architecture import Layer, Model, Weights, random_model, weight_shapes
from pyrope.models.generation import generate, sample
from pyrope.models.transformer import Cache, forward


class Choice:
    """A generator that says what it was asked to choose from, and takes the last."""

    def choice(self, ids, p):
        self.asked = dict(zip(ids.tolist(), p.tolist(), strict=True))
        return ids[-1]


def _asked(logits, *options):
    choice = Choice()
    token = sample(np.asarray(logits), *options, choice)
    assert type(token) is int and token in choice.asked
    return choice.asked


# --- Greedy ---


@fewer
@given(config=configs(causal=st.just(True)), seed=st.integers(0, 99), data=st.data())
def test_greedy_tokens_are_the_likeliest_of_full_passes(xp, config, seed, data):
    model = random_model(config, seed, xp, "float64")
    tokens = data.draw(st.lists(st.integers(0, config.vocabulary - 1), min_size=1, max_size=4))
    new, so_far = list(generate(model, tokens, 4)), list(tokens)
    assert len(new) == 4
    for token in new:
        logits = to_numpy(forward(model, so_far))[-1]
        assert logits[token] >= logits.max() - 1e-9  # a tie may fall either way
        so_far.append(token)


def test_generate_fixes_the_length_that_it_may_reach(monkeypatch):
    """Frequencies that depend on the length are those of prompt and all new tokens, from the first on."""
    rope, made = Rope(4, 10000.0, "half", scaling=DynamicNTK(8.0, 4)), []
    model = random_model(dataclasses.replace(PLAIN, layers=(Layer(rope),)), 0)
    monkeypatch.setattr(generation, "Cache", lambda *args: made.append(Cache(*args)) or made[-1])
    assert len(list(generate(model, [1, 2, 3], 20))) == 20
    assert [cache.ropes for cache in made] == [[rope.at(23)]]


def test_tokens_come_one_at_a_time(monkeypatch):
    calls = []
    monkeypatch.setattr(
        generation, "forward", lambda *args, **options: calls.append(len(args[1])) or forward(*args, **options)
    )
    tokens = generate(random_model(PLAIN, 0), [1, 2, 3], 5)
    assert calls == []
    next(tokens)
    assert calls == [3]
    next(tokens)
    assert calls == [3, 1]
    assert len(list(tokens)) == 3 and calls == [3, 1, 1, 1, 1]


def test_two_generations_do_not_disturb_each_other():
    model = random_model(PLAIN, 0)
    one, two = generate(model, [1, 2], 4), generate(model, [5], 4)
    mixed = [(next(one), next(two)) for _ in range(4)]
    assert [a for a, _ in mixed] == list(generate(model, [1, 2], 4))
    assert [b for _, b in mixed] == list(generate(model, [5], 4))


def test_a_stop_token_ends_it_and_is_not_returned(xp):
    model = random_model(PLAIN, 2, xp)
    unstopped = list(generate(model, [1, 2], 8, temperature=5.0, seed=1))
    last = unstopped[4]
    expected = unstopped[: unstopped.index(last)]
    for stop in ([last], (last, 10**6), {last}, frozenset([last]), np.array([last])):
        assert list(generate(model, [1, 2], 8, temperature=5.0, seed=1, stop=stop)) == expected
    assert list(generate(model, [1, 2], 8, temperature=5.0, seed=1, stop=())) == unstopped


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_may_be_on_the_device(xp, kind):
    model = random_model(KINDS[kind], 0, xp)
    assert list(generate(model, from_numpy(np.array([1, 2]), xp), 3)) == list(generate(model, [1, 2], 3))


# --- Drawn ---


def test_a_seed_makes_it_reproducible(xp):
    model = random_model(PLAIN, 0, xp)
    draw = lambda seed: list(generate(model, [1, 2], 20, temperature=2.0, seed=seed))  # noqa: E731
    assert draw(7) == draw(7) != draw(8)
    assert draw(None) != draw(None)  # the chance that they agree is far below 1e-9


def _naive(logits, temperature, top_k, top_p):
    """What may be drawn and how likely, in exact fractions of the float64 exponentials."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    weights = {i: Fraction(math.exp((logits[i] - logits[order[0]]) / temperature)) for i in order}
    total = sum(weights.values())
    kept, reached = [], Fraction(0)
    for i in order:
        kept.append(i)
        reached += weights[i] / total
        if top_p is not None and reached >= Fraction(top_p):
            break
    part = sum(weights[i] for i in kept)
    return {i: float(weights[i] / part) for i in kept}


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 15),
    top_p=st.none() | st.sampled_from([0.1, 0.37, 0.9, 0.999, 1.0]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_what_is_drawn_from(logits, temperature, top_k, top_p, dtype):
    asked = _asked(np.array(logits, dtype), temperature, top_k, top_p)
    expected = _naive(np.array(logits, dtype).astype(float).tolist(), temperature, top_k, top_p)
    rest = max(sum(expected.values()), 1.0)
    for token in asked.keys() ^ expected.keys():  # at the edge of top_p rounding may decide, on next to nothing
        assert max(asked.get(token, 0), expected.get(token, 0)) / rest < 1e-12
    assert all(asked[i] == pytest.approx(expected[i], rel=1e-9) for i in asked.keys() & expected.keys())
    assert math.fsum(asked.values()) == pytest.approx(1, rel=1e-12)


def test_top_k_and_top_p_by_hand():
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    assert _asked(logits, 1.0, None, None) == pytest.approx({1: 0.4, 3: 0.3, 2: 0.2, 0: 0.1})
    assert _asked(logits, 1.0, 2, None) == pytest.approx({1: 4 / 7, 3: 3 / 7})
    assert _asked(logits, 1.0, None, 0.69) == pytest.approx({1: 4 / 7, 3: 3 / 7})
    assert _asked(logits, 1.0, None, 0.71) == pytest.approx({1: 4 / 9, 3: 3 / 9, 2: 2 / 9})
    assert _asked(logits, 1.0, None, 0.01) == {1: 1.0}
    assert _asked(logits, 1.0, 2, 0.5) == {1: 1.0}  # 0.4 of the 0.7 that top_k leaves is more than half
    assert _asked(logits, 0.5, None, None) == pytest.approx({1: 16 / 30, 3: 9 / 30, 2: 4 / 30, 0: 1 / 30})
    assert list(_asked(np.zeros(3), 1.0, 2, None)) == [0, 1]  # the first of equals


def test_tokens_are_drawn_as_often_as_they_are_likely():
    """χ² of 5,000 draws with 3 degrees of freedom: above 16.3 once in a thousand, and the seed is fixed."""
    rng, p, n = np.random.default_rng(5), np.array([0.1, 0.4, 0.2, 0.3]), 5000
    counts = np.bincount([sample(np.log(p), 1.0, None, None, rng) for _ in range(n)], minlength=4)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 16.3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_temperatures(dtype):
    logits = np.array([1.0, 3.0, 2.0, -1e30], dtype)
    for temperature in (5e-324, 1e-300, 1e-30, 1e-3):
        asked = _asked(logits, temperature, None, None)
        assert asked == {1: 1.0, 2: 0.0, 0: 0.0, 3: 0.0}
        assert _asked(logits, temperature, None, 0.5) == {1: 1.0}
    assert _asked(logits[:3], 1e300, None, None) == pytest.approx({0: 1 / 3, 1: 1 / 3, 2: 1 / 3})
    huge = np.array([np.finfo(dtype).max, np.finfo(dtype).min])
    assert _asked(huge, 1.0, None, None) == {0: 1.0, 1: 0.0}


def test_temperature_0_takes_the_first_of_the_likeliest():
    assert sample(np.array([1.0, 3.0, 3.0]), 0, None, None, np.random.default_rng(0)) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_finite_are_refused(bad, temperature):
    with pytest.raises(
        ValueError, match="logits must be finite, and some are not: weights or input may hold NaN or inf"
    ):
        sample(np.array([0.0, bad]), temperature, None, None, np.random.default_rng(0))


def test_a_model_with_nan_says_so(xp):
    arrays = {name: np.ones(shape) for name, shape in weight_shapes(PLAIN).items()}
    arrays["norm.weight"][2] = math.nan
    model = Model(PLAIN, Weights.of(PLAIN, {name: from_numpy(x, xp) for name, x in arrays.items()}))
    with pytest.raises(ValueError, match="logits must be finite"):
        next(generate(model, [1], 3))


# --- Bad input ---

WRONG = [
    ({"model": None}, TypeError, "model must be a Model, was NoneType"),
    ({"tokens": []}, ValueError, "tokens must have shape .* with one token at least"),
    ({"tokens": [[1, 2]]}, ValueError, r"tokens must be one sequence, \(n,\), had shape \(1, 2\)"),
    ({"tokens": [11]}, ValueError, "tokens must lie in 0 … 10, were from 11 to 11"),
    ({"tokens": "hello"}, TypeError, "tokens must be integers"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, was 0"),
    ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens must be an integer, was 2.0"),
    ({"temperature": -0.1}, ValueError, "temperature must be finite and at least 0, was -0.1"),
    ({"temperature": math.nan}, ValueError, "temperature must be finite and at least 0, was nan"),
    ({"temperature": math.inf}, ValueError, "temperature must be finite and at least 0, was inf"),
    ({"temperature": "hot"}, TypeError, "temperature must be a number, was 'hot'"),
    ({"temperature": 1.0, "top_k": 0}, ValueError, "top_k must be at least 1, was 0"),
    ({"temperature": 1.0, "top_k": 2.5}, TypeError, "top_k must be an integer, was 2.5"),
    ({"temperature": 1.0, "top_p": 0}, ValueError, "top_p must be finite and greater than 0 and at most 1, was 0"),
    ({"temperature": 1.0, "top_p": 2}, ValueError, "top_p must be finite and greater than 0 and at most 1, was 2"),
    ({"temperature": 1.0, "seed": -1}, ValueError, "seed must be at least 0, was -1"),
    ({"temperature": 1.0, "seed": 1.5}, TypeError, "seed must be an integer, was 1.5"),
    *[({name: 1}, ValueError, "top_k, top_p and seed need a temperature above 0") for name in ("top_k", "top_p", "seed")],
    ({"stop": [-1]}, ValueError, r"stop\[0\] must be at least 0, was -1"),
    ({"stop": [2, "x"]}, TypeError, r"stop\[1\] must be an integer, was 'x'"),
    ({"stop": 5}, TypeError, "stop must be a list of integers, was 5"),
    ({"stop": "ab"}, TypeError, r"stop\[0\] must be an integer, was 'a'"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "says"), WRONG, ids=lambda x: str(x)[:30] if isinstance(x, dict) else "")
def test_wrong_arguments_are_refused_at_the_call(options, error, says):
    """Not at the first next, which may be far away."""
    with pytest.raises(error, match=says):
        generate(**({"model": random_model(PLAIN, 0), "tokens": [1, 2], "max_new_tokens": 3} | options))


def test_a_model_that_sees_what_comes_cannot_generate():
    with pytest.raises(ValueError, match="a cache needs a causal model"):
        generate(random_model(dataclasses.replace(PLAIN, causal=False), 0), [1], 3)
