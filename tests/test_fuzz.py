"""Whatever comes in, only ValueError, TypeError or a documented error comes out, and inputs stay as they are: each argument
of each public function in turn is replaced by everything that it does not mean."""

from __future__ import annotations

import inspect
import math
import warnings

import numpy as np
import pytest
from models import KINDS

import pyrope
from pyrope import DynamicNTK, Linear, Rope, encodings
from pyrope.oracle import adapters, traces


def silly_values():
    """Values that no argument, or hardly any, means. Made anew each time, since some can be changed."""
    numbers = [None, True, 0, -1, 1, 2, 3, 2**16 + 1, 2**31 + 1, 2**63, 10**30, -(10**400), 0.0, -0.5, 1.5, 1e-320]
    numbers += [1e-46, 1e39, 1e308, math.nan, math.inf, -math.inf, 1j, np.int8(100), np.uint8(7), np.float16(2)]
    words = ["", "half", "nonsense", "\0", "θ" * 50, b"bytes"]
    others = [(), [], [1, 2, 3], [None], [[0, 1], [2]], {}, {"a": 1}, set(), object(), len, range(3)]
    kinds = [(3,), (0,), (), (1, 4), (2, 3, 4), (2, 0, 4), (1, 1, 1, 1, 1), (2, 3, 8)]
    types = ["?", "i1", "u8", "i8", "f2", "f4", "f8", "c8", "U3", "O", ">f4", "M8[s]"]
    arrays = [np.zeros(kinds[i % 8], t) for i, t in enumerate(types)]
    arrays += [np.full((2, 3, 4), x, "f4") for x in (np.nan, np.inf, 3e38, 1e-45)]
    arrays += [np.ma.masked_array([1.0]), np.broadcast_to(np.float32(1), (3, 4)), np.ones((2, 3, 2))[..., ::-1]]
    return [*numbers, *words, *others, *arrays, Exception, np.float32, iter(())]


def snapshot(value):
    """Something that compares equal as long as the value has not been changed."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes() if value.dtype != object else repr(value))
    if isinstance(value, list | tuple):
        return [snapshot(one) for one in value]
    if isinstance(value, dict):
        return {key: snapshot(one) for key, one in value.items()}
    return repr(value)


def broken(*arguments, **options):
    raise RuntimeError("this candidate always fails")


def call(*arguments, **options):
    return arguments, options


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


ROPE, MODEL, Q, X = Rope(8, 10000.0, "half"), pyrope.random_model(KINDS["plain"], 7), normal(2, 3, 8), normal(3, 4)
CONFIG = {name: getattr(KINDS["plain"], name) for name in KINDS["plain"].__dataclass_fields__}
TRACE = {name: normal(1, 3, 8) for name in ("embedding", "layers.0.q", "layers.0.q_rotated", "logits")}
# A call of each public function that works, with every option that it has.
CALLS = {
    "Rope": call(8, 1e4, "half", rotary_dim=4, placement="suffix", scaling=Linear(2.0), axes=None, direction=-1),
    "Axes": call("sections", (2, 1, 1), series="own"),
    "Linear": call(2.0),
    "DynamicNTK": call(2.0, 64, length=128),
    "YaRN": call(4.0, 2048, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0, mscale=1.0, mscale_all_dim=1.0, truncate=True),
    "LongRoPE": call([1.0] * 4, [2.0] * 4, 2.0, 64, attention_factor=1.0, length=128),
    "Llama3": call(8.0, 1.0, 4.0, 2048),
    "Proportional": call(0.5, 2.0),
    "Rope.from_config": call({"model_type": "llama", "head_dim": 8}, layout="half", layer_type=None),
    "Rope..at": call(100),
    "frequencies": call(ROPE),
    "wavelengths": call(ROPE),
    "cos_sin": call([0, 5, 2**31], ROPE, dtype=np.float32),
    "rotate": call(Q, [0, 1, 2], ROPE, tables=pyrope.rotation_tables([0, 1, 2], ROPE, Q)),
    "rotation_tables": call([0, 1, 2], ROPE, Q),
    "permute_weights": call(normal(16, 3), 2, "half", "interleaved", rotary_dim=4, placement="suffix"),
    "attention": call(Q, Q[:1], Q[:1], causal=True, window=2, softcap=5.0, scale=1.0, mask=np.tri(3, dtype=bool), q_positions=[0, 1, 2], k_positions=[0, 1, 2]),
    "linear_attention": call(Q, Q, Q, [0, 1, 2], ROPE, causal=True, feature_map="exp", denominators="nonzero"),
    "linear_step": call(Q, Q, Q, [0, 1, 2], ROPE, state=None, feature_map="exp", denominators="nonzero"),
    "Config": call(**CONFIG),
    "Layer": call(ROPE, window=3),
    "Model": call(MODEL.config, MODEL.weights),
    "random_model": call(KINDS["plain"], 1, dtype="float64", backend="numpy"),
    "forward": call(MODEL, [[1, 2, 3]], positions=[0, 1, 2], logits="last", segments=[0, 0, 1]),
    "Cache": call(MODEL, 9, batch=2),
    "generate": call(MODEL, [1, 2], 3, temperature=1.0, seed=1, stop=[3]),
    "load": call("/nowhere/at/all", backend="numpy", dtype="float64", ignore=["x"]),
    "load_tokenizer": call("/nowhere/at/all"),
    "from_numpy": call(X, "numpy"),
    "to_numpy": call(X),
    "encodings.sinusoidal": call([0, 1], 8, base=100.0),
    "encodings.shaw_embeddings": call(range(3), range(4), X),
    "encodings.shaw_scores": call(X, range(3), range(4), X),
    "encodings.shaw_values": call(X, range(3), range(4), X),
    "encodings.t5_buckets": call([0, 1], causal=True, buckets=8, max_distance=100),
    "encodings.t5_bias": call(normal(8, 2), range(3), range(4), causal=False),
    "encodings.alibi_slopes": call(8),
    "encodings.alibi_bias": call(8, [0, 1], range(3)),
    "parallel.shard_positions": call(20, 1, 3, scheme="striped"),
    "check_rotation": call(broken, ROPE, dtype=np.float32, max_position=100, min_position=-3, batched=True, grade=None, equivalent="wrong"),
    "check_attention": call(broken, heads=2, key_heads=1, head_dim=8, causal=True, rope=ROPE, window=3, softcap=2.0, scale=1.0, max_position=600, dtype=np.float64),
    "check_linear_attention": call(broken, rope=ROPE, heads=2, feature_map="exp", causal=False, dtype=np.float64, max_position=600),
    "check_sharding": call(broken),
    "identify": call(broken, 8, dtype=np.float32, max_position=100),
    "traces.diff_traces": call(TRACE, {**TRACE, "logits": normal(1, 3, 8) + 1}, tolerance=1e-3),
    "adapters.with_axes": call(broken, "bnhd"),
    "adapters.from_command": call("true {x} {positions} {y}", timeout=1.0),
    "adapters.from_sequential": call(broken, limit=5),
    "adapters.load_target": call("math:hypot"),
}  # fmt: skip
EXEMPT = {
    "definition": "checks nothing, by design",
    "encodings": "its functions are listed one by one",
    "parallel": "needs a communicator, which test_parallel.py has; shard_positions is listed",
    "Report": "made by the checks",
    **dict.fromkeys(("Mismatch", "NotJudged"), "an error"),
    **dict.fromkeys(
        [name for name in pyrope.__all__ if name.startswith("assert_")], "calls the check of the same name"
    ),
}
DOCUMENTED = {
    **dict.fromkeys(("traces.diff_traces", "load", "load_tokenizer", "Rope.from_config"), (OSError,)),
    **dict.fromkeys(("from_numpy", "random_model"), (ImportError, RuntimeError)),
}
SLOW = {"check_attention", "check_linear_attention", "forward", "generate", "Cache"}  # a quarter of the values
FUNCTIONS = {
    "traces": traces,
    "adapters": adapters,
    "Rope.": Rope(8, 1e4, "half", scaling=DynamicNTK(2.0, 64)),
    "": pyrope,
}


def test_every_public_name_is_called():
    own = [one for one in vars(encodings).values() if inspect.isfunction(one) and one.__module__ == encodings.__name__]
    functions = {f"encodings.{one.__name__}" for one in own if one.__name__[0] != "_"}
    assert set(pyrope.__all__) | functions <= set(CALLS) | set(EXEMPT)


def assert_refused_or_fine(name, arguments, options):
    """Calls a function; returns whether it succeeded."""
    owner, _, last = name.rpartition(".")
    function = getattr(FUNCTIONS[owner] if owner in FUNCTIONS else getattr(pyrope, owner), last)
    before, words = snapshot([arguments, options]), f"{name}: {arguments!r:.500}, {options!r:.500}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            result = function(*arguments, **options)
            if inspect.isgenerator(result):
                next(result)
    except (ValueError, TypeError, *DOCUMENTED.get(name, ())) as error:
        assert str(error), words
        return False
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__}: {error}, from {words}") from error
    finally:
        assert snapshot([arguments, options]) == before, f"an argument was changed: {words}"
    return True


@pytest.mark.parametrize("name", CALLS)
def test_silly_arguments(name):
    arguments, options = CALLS[name]
    assert assert_refused_or_fine(name, arguments, options) or name in ("load", "load_tokenizer", "identify")
    step = 4 if name in SLOW else 1
    for i in range(len(arguments)):
        for silly in silly_values()[i % step :: step]:
            assert_refused_or_fine(name, [*arguments[:i], silly, *arguments[i + 1 :]], options)
    for i, key in enumerate(options):
        for silly in silly_values()[i % step :: step]:
            assert_refused_or_fine(name, arguments, {**options, key: silly})


@pytest.mark.parametrize(
    "model_type", ["llama", "deepseek_v3", "gpt_neox", "gemma3_text", "phi3", "qwen2_vl", "gptj", "olmo3"]
)
def test_silly_configs(model_type):
    config = {"model_type": model_type, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "rope_theta": 1e4, "rotary_dim": 8,
              "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "max_position_embeddings": 2048,
              "partial_rotary_factor": 0.5, "layer_types": ["full_attention"]}  # fmt: skip
    config |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8} if model_type == "deepseek_v3" else {}
    for key in config:
        for silly in silly_values():
            assert_refused_or_fine("Rope.from_config", [{**config, key: silly}], {})
    for key in config["rope_scaling"]:
        for silly in silly_values():
            assert_refused_or_fine(
                "Rope.from_config", [config | {"rope_scaling": config["rope_scaling"] | {key: silly}}], {}
            )


@pytest.mark.parametrize("answer", silly_values()[::3], ids=lambda value: f"{type(value).__name__}")
@pytest.mark.parametrize(
    "name", ["check_rotation", "check_attention", "check_linear_attention", "check_sharding", "identify"]
)
def test_silly_answers(name, answer):
    """Functions that return what is no answer."""
    arguments, options = CALLS[name]
    assert_refused_or_fine(name, [lambda *given: answer, *arguments[1:]], options)
