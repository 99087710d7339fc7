"""What was once accepted, or ended in a wrong number, a wrong exception or a hang, and must not again."""

from __future__ import annotations

import itertools
import json
import os
from bisect import bisect_left
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from models import PLAIN

import pyrope
from pyrope import Axes, Rope, definition, encodings
from pyrope.configs import still_layers
from pyrope.files import load_npy, load_safetensors, save_npy
from pyrope.model import Config, Model
from pyrope.oracle.traces import diff_traces, read_trace, write_trace
from pyrope.oracle.vectors import Own, verify_vectors, write_vectors
from pyrope.tokenizer import load_tokenizer

AXES = Rope(8, 10000.0, "half", axes=Axes("sections", (2, 1, 1)))
X = np.random.default_rng(0).standard_normal((2, 3, 8))


# --- None, and what is no array ---

NONE = {
    "x": lambda y: pyrope.rotate(None, [0], Rope(4, 1e4, "half")),
    "q": lambda y: pyrope.attention(None, y, y),
    "k": lambda y: pyrope.attention(y, None, y),
    "v": lambda y: pyrope.linear_attention(y, y, None, causal=True),
    "w": lambda y: pyrope.permute_weights(None, 1, "half", "half"),
    "like": lambda y: pyrope.rotation_tables([0], Rope(4, 1e4, "half"), None),
    "table": lambda y: encodings.learned([0], None),
    "array": lambda y: pyrope.to_numpy(None),
}


@pytest.mark.parametrize("name", NONE)
def test_none_is_no_array(name):
    with pytest.raises(TypeError, match=f"^{name} must be a NumPy or CuPy array, was NoneType"):
        NONE[name](np.ones((1, 3, 4)))


def test_none_without_a_name_is_ignored():
    assert pyrope.namespace(np.ones(3), None) is np


# --- Sizes ---

LARGE = {
    "head_dim must be at most 65536, was 2000000000": lambda: Rope.from_config({"model_type": "llama", "head_dim": 2 * 10**9, "rope_theta": 1e4}),
    "head_dim must be at most 65536, was 65538": lambda: Rope(65538, 10000.0, "half"),
    "head_dim must be at most 1024, was 100000": lambda: pyrope.identify(len, 100000),
    "head_dim must be at most 1024, was 2050": lambda: pyrope.identify(len, 2050),
    "num_hidden_layers must be at most 65536, was 2000000000": lambda: still_layers({"model_type": "llama", "num_hidden_layers": 2 * 10**9}),
    "rotary_dim must be at most 65536, was": lambda: Rope(8, 10000.0, "half", 10**30),
    "h must be at most 65536, was 2147483648": lambda: encodings.alibi_slopes(2**31),
    "d must be at most 65536, was 2147483648": lambda: encodings.sinusoidal([0], 2**31),
    "d must be at most 65536, was 2147483650": lambda: encodings.sinusoidal_shift(0, 2**31 + 2),
    "buckets must be at most 65536, was 1000": lambda: encodings.t5_buckets([0], causal=True, buckets=10**30),
    r"max_distance must be at most 2\^31, was 1000": lambda: encodings.t5_buckets([0], causal=True, max_distance=10**30),
    r"positions must lie within ±2\^31, were from 0 to 999": lambda: pyrope.cos_sin(range(10**12), Rope(8, 1e4, "half")),
    r"n must be at most 2\^31, was 4294967296": lambda: pyrope.parallel.shard_positions(2**32, 0, 1),
    "head_dim must be at most 65536, was 65537": lambda: pyrope.check_attention(len, heads=1, head_dim=65537, causal=True),
    "heads·head_dim must be at most 65536, was 131072": lambda: pyrope.check_attention(len, heads=1024, head_dim=128, causal=True),
    r"max_position must be at most 2\^31, was 1000": lambda: pyrope.check_attention(len, heads=1, head_dim=8, causal=True, max_position=10**30),
    "scale must lie within 6.1e-05 … 6.6e[+]04, the range of float16, was 1e-30": lambda: pyrope.check_attention(len, heads=1, head_dim=8, causal=True, scale=1e-30, dtype=np.float16),
}  # fmt: skip


@pytest.mark.parametrize("says", LARGE)
def test_sizes_have_limits(says):
    with pytest.raises(ValueError, match=says):
        LARGE[says]()


@pytest.mark.parametrize("key", ["max_position_embeddings", "original_max_position_embeddings", "hidden_size"])
def test_integers_that_no_float_holds(key):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn"},
    }
    with pytest.raises(ValueError, match=r"must be at most (2\^31|65536), was 1[02]"):
        Rope.from_config(config | {key: 10**400})


@given(exact=st.integers(1, 40), w=st.integers(1, 40), more=st.integers(1, 2**31 - 40))
def test_borders_of_t5_are_those_in_integers(exact, w, more):
    """The least x with x^w·e^j ≥ max^j·e^w, found by halving."""
    most = exact + more
    wide = range(exact, most + 1)
    borders = tuple(wide[bisect_left(wide, most**j * exact**w, key=lambda x: x**w * exact**j)] for j in range(1, w))  # noqa: B023
    assert encodings._t5_starts(exact, w, most) == borders


# --- Config ---


def test_sizes_of_a_config_are_python_integers():
    """As int8 they would wrap around: 64·4 is 0."""
    small = {
        name: np.int8(getattr(PLAIN, name))
        for name in ("vocabulary", "width", "heads", "key_heads", "head_dim", "mlp_width")
    }
    fields = {name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}
    config = Config(
        **fields
        | small
        | {"heads": np.int8(64), "key_heads": np.int8(32), "eps": np.float32(0.5), "scale": np.float16(2)}
    )
    assert pyrope.weight_shapes(config)["layers.0.qkv.weight"] == (128 * 4, 8)
    assert all(type(getattr(config, name)) is int for name in small) and type(config.eps) is type(config.scale) is float


def test_what_is_no_config_or_no_arrays():
    with pytest.raises(TypeError, match="config must be a Config, was dict"):
        pyrope.weight_shapes({})
    with pytest.raises(TypeError, match="weights must be a dict of arrays by name, was list"):
        Model(PLAIN, [])


@pytest.mark.parametrize("read", [Rope.from_config, pyrope.load], ids=["from_config", "load"])
def test_a_key_that_occurs_twice_is_refused_by_every_reader(read, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "head_dim": 8, "head_dim": 16}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="config.json: .*the key 'head_dim' occurs twice"):
        read(tmp_path)


def test_a_fifo_is_no_config(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ValueError, match="config.json must be a file, and is something else"):
            Rope.from_config(path)


# --- Files of tensors ---


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'shape': (",
        b"{",
        b"'''",
        b"\\x",
        b"[" * 200,
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3L,), }",
        b"\xff\xfe",
        b"1e",
        b"  x\n y",
    ],
)
def test_damaged_npy_headers(tmp_path, header):
    """Python's own parser reads them, and raises whatever it does: tokenize.TokenError, SyntaxError, MemoryError."""
    file = tmp_path / "x.npy"
    file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(12))
    if b"3L" in header:  # as Python 2 wrote it
        assert (load_npy(file, "x", (3,), np.dtype(np.float32)) == 0).all()
        return
    with pytest.raises(ValueError, match="x.npy is not a valid .npy file: "):
        load_npy(file, "x", (3,), np.dtype(np.float32))


@pytest.mark.parametrize("read", [load_safetensors, read_trace])
def test_paths_are_no_integers_and_no_fifos(tmp_path, read):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="fifo must be a file, and is something else"):
        read(tmp_path / "fifo")
    with pytest.raises(TypeError):
        read(0)  # would be standard input


def test_fifo_in_place_of_an_array(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    save_npy(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(ValueError, match="x: there is no file .*fifo"):
        load_npy(tmp_path / "fifo", "x", (3,), np.dtype(np.float64))


# --- Tokenizers ---

_TOKENIZER = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
              "post_processor": None, "decoder": None, "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}  # fmt: skip


def _written(folder, **changes):
    (folder / "tokenizer.json").write_text(json.dumps(_TOKENIZER | changes))
    return folder


def test_a_tokenizer_that_panics_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: Precompiled"):
        load_tokenizer(_written(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}))


def test_a_text_that_a_tokenizer_cannot_encode(tmp_path):
    with pytest.raises(ValueError, match="Missing .UNK. token"):
        load_tokenizer(_written(tmp_path)).encode("b")
    panics = _written(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0})
    with pytest.raises(ValueError, match="chunk size"):
        load_tokenizer(panics).encode("a")


def test_ctrl_c_is_no_error_of_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer(_written(tmp_path))

    class Interrupted:
        def encode(self, *arguments, **options):
            raise KeyboardInterrupt

    tokenizer._inner = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


# --- The oracle ---


@pytest.mark.parametrize("rope", [None, 3, {}])
def test_linear_attention_is_checked_against_a_rope(rope):
    with pytest.raises(TypeError, match="rope must be a Rope, was"):
        pyrope.check_linear_attention(lambda *arguments: arguments[0], rope=rope)


@pytest.mark.parametrize("size", [1e300, 1e200, 1.0, 1e-200, 1e-310])
def test_traces_of_any_size(size):
    """Squares of such numbers are infinite, or 0: other numbers must not pass for the same, and no warning is given."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1, 4, 8)) * size
    a = {"embedding": x, "layers.0.q": x, "layers.0.q_rotated": x, "logits": x}
    assert diff_traces(a, a).verdict == "right"
    for other in (y, -x, x * 0, np.full_like(x, np.inf), np.full_like(x, np.nan), rng.standard_normal(x.shape)):
        assert diff_traces(a, a | {"logits": other}).verdict == ("wrong" if size or other.any() else "right")


@pytest.mark.parametrize("bad", [{"a": None}, {"a": np.array(["x"])}, {"a": np.zeros(3, complex)}, {"a": [1.0]}])
def test_traces_are_real_numbers_by_name(bad):
    with pytest.raises(TypeError, match="a trace must be arrays of real numbers by name, .* was"):
        diff_traces(bad, bad)


HALF = Rope(16, 10000.0, "half")
CHECKS = {
    "softmax": (
        pyrope.check_attention,
        {"rope": HALF, "head_dim": 16},
        lambda q, k, v, at: pyrope.attention(*(pyrope.rotate(x, at[:, None], HALF) for x in (q, k)), v, causal=True),
    ),
    "linear": (
        pyrope.check_linear_attention,
        {"rope": HALF},
        lambda q, k, v, at: pyrope.linear_attention(q, k, v, at, HALF, causal=True),
    ),
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


class Named:
    """A right candidate with attributes of its own."""

    def __init__(self, fn, starts):
        self.fn, self.starts = fn, starts

    def __call__(self, *arguments):
        return self.fn(*arguments)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("starts", [1, None, (5,) * 4, "mock"])
def test_attributes_of_a_candidate_mean_nothing(name, starts):
    """What the adapters say about a candidate, they say by its type."""
    check, options, right = CHECKS[name]
    fn = MagicMock(side_effect=right) if starts == "mock" else Named(right, starts)
    assert check(fn, **options).verdict == "right"


@pytest.mark.parametrize("cache", ["no", 0, 1, [], np.True_])
@pytest.mark.parametrize("backward", [False, True])
def test_cache_is_a_flag_or_none(cache, backward):
    with pytest.raises(TypeError, match="cache must be True or False, was"):
        pyrope.check_attention(len, cache=cache, backward=backward)


class Odd(np.ndarray):
    """Zeros that are equal to everything."""

    def __sub__(self, other):
        return np.zeros(self.shape)

    __rsub__ = __sub__


def test_arithmetic_of_an_output_is_not_trusted(tmp_path):
    manifest = write_vectors(tmp_path / "v", "rotation", own=Own(HALF, max_position=63), dtype="float32")
    zeros = {case["outputs"]["y"]: np.zeros(case["arrays"]["y"]["shape"], np.float32) for case in manifest["cases"]}
    odd = {name: array.view(Odd) for name, array in zeros.items()}
    assert {report.verdict for report in verify_vectors(tmp_path / "v", odd)} == {"wrong"}
    trace = {"q": np.ones((2, 4))}
    assert diff_traces(trace, {"q": np.zeros((2, 4)).view(Odd)}).verdict == "wrong"


# --- Wrong exceptions ---

TABLE = np.arange(20.0).reshape(10, 2)
REFUSED = {
    "own must be None or Own[(]rope[)], with a rope of your own, was Rope": lambda path: write_vectors(path / "v", own=HALF),
    "arrays must be a dict, was NoneType": lambda path: write_trace(path / "t.safetensors", None),
}  # fmt: skip


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_refused_is_refused_in_words(says, tmp_path):
    with pytest.raises(TypeError, match=says):
        REFUSED[says](tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_definition_is_what_the_limits_protect():
    """A denominator that float32 refuses is right in float64: the definition agrees."""
    x = np.full((1, 4, 2), -52.0) + np.linspace(0, 1, 4)[:, None]
    v = np.arange(8.0).reshape(1, 4, 2)
    mask = definition.visible(np.arange(4), np.arange(4), True)
    true = definition.linear_attention(x, x, v, lambda y: y, mask, definition.FEATURE_MAPS["elu+1"])
    np.testing.assert_allclose(pyrope.linear_attention(x, x, v, causal=True), true, rtol=1e-13)
