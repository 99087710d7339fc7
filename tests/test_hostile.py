"""What was once accepted, or ended in a wrong number, a wrong exception or a hang, and must not again."""

from __future__ import annotations

import itertools
from unittest.mock import MagicMock

import numpy as np
import pytest
from models import PLAIN

import pyrope
from pyrope import Rope, definition, encodings
from pyrope.model import Config, weight_shapes
from pyrope.oracle.traces import diff_traces
from pyrope.oracle.vectors import verify_vectors, write_vectors

HALF, SMALL = Rope(16, 10000.0, "half"), Rope(4, 1e4, "half")
Y = np.ones((1, 3, 4))
YARN = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "max_position_embeddings": 64, "original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn"}}  # fmt: skip


def attention_of(**options):
    return pyrope.check_attention(len, **{"heads": 1, "head_dim": 8, "causal": True, **options})


REFUSED = {
    # Sizes have limits
    "head_dim must be at most 65536, was 2000000000": lambda: Rope.from_config({"model_type": "llama", "head_dim": 2 * 10**9, "rope_theta": 1e4}),
    "head_dim must be at most 65536, was 65538": lambda: Rope(65538, 10000.0, "half"),
    "head_dim must be at most 1024, was 2050": lambda: pyrope.identify(len, 2050),
    "d must be at most 65536, was 2147483648": lambda: encodings.sinusoidal([0], 2**31),
    "buckets must be at most 1024, was 1000": lambda: encodings.t5_buckets([0], causal=True, buckets=10**30),
    r"max_distance must be at most 2\^31, was 1000": lambda: encodings.t5_buckets([0], causal=True, max_distance=10**30),
    r"n must be at most 2\^31, was 4294967296": lambda: pyrope.parallel.shard_positions(2**32, 0, 1),
    "heads·head_dim must be at most 65536, was 131072": lambda: attention_of(heads=1024, head_dim=128),
    r"max_position must be at most 2\^31, was 1000": lambda: attention_of(max_position=10**30),
    "the length of long must be at most 65536, was 65537": lambda: pyrope.LongRoPE([1.0], [1.0] * 65537, 2.0, 64),
    # Integers that no float holds
    r"max_position_embeddings must be at most 2\^31, was 1000": lambda: Rope.from_config(YARN | {"max_position_embeddings": 10**400}),
    r"^(hidden_size|head_dim) must be at most (2\^31|65536), was 1[02]": lambda: Rope.from_config(YARN | {"hidden_size": 10**400}),
    # Other types
    "config must be a Config, was dict": lambda: weight_shapes({}),
    "incremental must be a function that makes one, was int": lambda: pyrope.check_attention(len, incremental=3),
    "cache must be True or False, was 'no'": lambda: pyrope.check_attention(len, cache="no"),
}  # fmt: skip


@pytest.mark.parametrize("says", REFUSED)
def test_refused_in_words(says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, TypeError), match=says):
        REFUSED[says]()
    assert not [*tmp_path.iterdir()]


def test_sizes_of_a_config_are_python_integers():
    """As int8 they would wrap around: 64·4 is 0."""
    fields = {name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}
    sizes = {name: fields[name] for name in ("vocabulary", "width", "head_dim", "mlp_width")}
    sizes |= {"heads": 64, "key_heads": 32}
    small = {name: np.int8(size) for name, size in sizes.items()} | {"eps": np.float32(0.5), "scale": np.float16(2)}
    config = Config(**fields | small)
    assert weight_shapes(config)["layers.0.qkv.weight"] == (128 * 4, 8)
    assert all(type(getattr(config, name)) is int for name in sizes) and type(config.eps) is type(config.scale) is float


# ── The oracle ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1e300, 1e200, 1.0, 1e-200, 1e-310])
def test_traces_of_any_size(size):
    """Squares of such numbers are infinite, or 0: other numbers must not pass for the same, and no warning is given."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1, 4, 8)) * size
    a = {"embedding": x, "layers.0.q": x, "layers.0.q_rotated": x, "logits": x}
    assert diff_traces(a, a).verdict == "right"
    for other in (y, -x, x * 0, np.full_like(x, np.inf), np.full_like(x, np.nan), rng.standard_normal(x.shape)):
        assert diff_traces(a, a | {"logits": other}).verdict == "wrong"


def softmax(q, k, v, at):
    return pyrope.attention(*(pyrope.rotate(x, at[:, None], HALF) for x in (q, k)), v, causal=True)


def linear(q, k, v, at):
    return pyrope.linear_attention(q, k, v, at, HALF, causal=True)


CHECKS = {
    "softmax": (pyrope.check_attention, {"rope": HALF, "head_dim": 16}, softmax),
    "linear": (pyrope.check_linear_attention, {"rope": HALF}, linear),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("calls", [0, 5, 11])
def test_a_backward_pass_that_fails_later_is_not_judged(name, calls):
    """The last time, in a call that it has answered before."""
    (check, options, _), made = CHECKS[name], itertools.count()

    def fails(q, k, v, *rest):
        if next(made) >= calls:
            raise RuntimeError("no more")
        return q, k, v

    report = check(fails, backward=True, **options)
    assert report.verdict == "not judged" and "RuntimeError (no more)" in report.failure.reason


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("value", [np.inf, np.nan, np.finfo(np.float64).max])
def test_no_number_makes_a_check_warn(name, backward, value):
    """Warnings are errors in tests."""
    check, options, _ = CHECKS[name]

    def fn(q, k, v, *rest):
        return (q, np.full_like(k, value), v) if backward else np.full_like(q, value)

    assert check(fn, backward=backward, dtype=np.float64, **options).verdict == "wrong"


@pytest.mark.parametrize("name", CHECKS)
def test_attributes_of_a_candidate_mean_nothing(name):
    """A mock has every one. What the adapters say about a candidate, they say by its type."""
    check, options, right = CHECKS[name]
    assert check(MagicMock(side_effect=right), **options).verdict == "right"


class Odd(np.ndarray):
    """Zeros that are equal to everything."""

    def __sub__(self, other):
        return np.zeros(self.shape)

    __rsub__ = __sub__


def test_arithmetic_of_an_output_is_not_trusted(tmp_path):
    manifest = write_vectors(tmp_path / "v", "rotation", rope=HALF, max_position=63, dtype="float32")
    zeros = {case["outputs"]["y"]: np.zeros(case["arrays"]["y"]["shape"], np.float32) for case in manifest["cases"]}
    odd = {name: array.view(Odd) for name, array in zeros.items()}
    assert {report.verdict for report in verify_vectors(tmp_path / "v", odd)} == {"wrong"}
    assert diff_traces({"q": np.ones((2, 4))}, {"q": np.zeros((2, 4)).view(Odd)}).verdict == "wrong"


def test_a_denominator_that_float32_refuses_is_right_in_float64():
    x = np.full((1, 4, 2), -52.0) + np.linspace(0, 1, 4)[:, None]
    v, mask = np.arange(8.0).reshape(1, 4, 2), definition.visible(np.arange(4), np.arange(4), True)
    true = definition.linear_attention(x, x, v, lambda y: y, mask, definition.FEATURE_MAPS["elu+1"])
    np.testing.assert_allclose(pyrope.linear_attention(x, x, v, causal=True), true, rtol=1e-13)
