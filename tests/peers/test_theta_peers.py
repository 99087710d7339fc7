"""Θ and the attention factor of every rope type, against the functions of Hugging Face transformers.

The same config goes to both: to their config class, and as a dict to `Rope.from_config`. They compute Θ in float32; how
far that may be from the truth is derived in `pyrope.oracle.tolerance`. Attention factors are float64 on both sides.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from peer_bounds import theta_bound
from transformers import HunYuanDenseV1Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import pyrope
from pyrope import Rope

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
WITH_ORIGINAL_LENGTH = ("yarn", "longrope", "llama3")
# G(s, k) = 0.1·k·ln s + 1 has 0.1, two products, a logarithm good to 1 ulp and a sum: 6 roundings; two of them and a
# quotient make 13. √(1 + ln s/ln L₀) has fewer.
ATTENTION_FACTOR = 13 * 2.0**-53

FACTORS = st.sampled_from([1.0, 2.0, 8.0, 40.0]) | st.floats(1, 64) | st.integers(1, 64)
BASES = st.sampled_from([10000.0, 10000, 500000.0, 1e6]) | st.floats(1.5, 1e8) | st.integers(2, 10**7)
SCALES = st.sampled_from([None, 0, 0.0, 1, 1.0, 0.707]) | st.floats(0.05, 4)


def test_every_rope_type_is_covered() -> None:
    """A rope type that transformers adds shows up here before it is missed."""
    assert {"default", *ROPE_INIT_FUNCTIONS} == set(KINDS)


@st.composite
def yarn(draw: Any, pairs: int) -> dict[str, Any]:
    slow = draw(st.sampled_from([1, 1.0]) | st.floats(0.25, 4))
    fast = slow * draw(st.sampled_from([32, 32.0]) | st.floats(1.5, 64))
    betas = draw(st.sampled_from([(fast, slow), (fast, slow), (None, None), (0, 0.0)]))  # null and 0 are not given
    keys = {
        "beta_fast": betas[0],
        "beta_slow": betas[1],
        "attention_factor": draw(st.none() | st.floats(0.1, 4)),
        "mscale": draw(SCALES),
        "mscale_all_dim": draw(SCALES),
        "truncate": draw(st.booleans()),
    }
    absent = draw(st.sets(st.sampled_from(["attention_factor", "mscale", "mscale_all_dim", "truncate"])))
    absent |= {"beta_fast", "beta_slow"} if betas[0] is None and draw(st.booleans()) else set()
    # transformers wants a factor, if only null
    return {"factor": draw(FACTORS | st.none())} | {key: value for key, value in keys.items() if key not in absent}


@st.composite
def longrope(draw: Any, pairs: int) -> dict[str, Any]:
    lists = st.lists(st.floats(0.75, 100), min_size=pairs, max_size=pairs)
    keys = {"factor": draw(FACTORS | st.none()), "attention_factor": draw(st.none() | st.floats(0.1, 4))}
    absent = draw(st.sets(st.sampled_from([*keys])))
    return {"short_factor": draw(lists), "long_factor": draw(lists)} | {
        k: v for k, v in keys.items() if k not in absent
    }


@st.composite
def llama3(draw: Any, pairs: int) -> dict[str, Any]:
    low = draw(st.sampled_from([1, 1.0]) | st.floats(0.1, 8))
    high = low + draw(st.sampled_from([3, 3.0]) | st.floats(0.25, 16))
    return {"factor": draw(FACTORS), "low_freq_factor": low, "high_freq_factor": high}


PARAMETERS = {
    "default": lambda pairs: st.just({}),
    "linear": lambda pairs: st.fixed_dictionaries({"factor": FACTORS}),
    "dynamic": lambda pairs: st.fixed_dictionaries({"factor": FACTORS}),
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
    "proportional": lambda pairs: st.fixed_dictionaries({}, optional={"factor": FACTORS}),
}


@st.composite
def configs(draw: Any, kind: str) -> dict[str, Any]:
    """Keyword arguments of a LlamaConfig, in the new spelling or the old one."""
    head_dim, fraction = 2 * draw(st.integers(2, 96)), draw(st.just(1.0) | st.integers(1, 100).map(lambda k: k / 100))
    width = int(head_dim * fraction)
    if width < 4 or (kind != "proportional" and width % 2):
        fraction, width = 1.0, head_dim
    parameters = draw(PARAMETERS[kind](width // 2)) | {draw(st.sampled_from(["rope_type", "type"])): kind}
    heads = draw(st.integers(1, 8))
    config: dict[str, Any] = {"num_attention_heads": heads}
    config |= draw(
        st.sampled_from([{"hidden_size": heads * head_dim}, {"hidden_size": 16 * heads, "head_dim": head_dim}])
    )
    original = draw(st.integers(2, 2**15))
    config["max_position_embeddings"] = int(original * draw(st.sampled_from([1, 4]) | st.floats(1, 40)))
    if kind in WITH_ORIGINAL_LENGTH:  # the one at the top level wins, the model's maximum stands in for both
        places = draw(st.sampled_from([("in",), ("in",), ("top",), ("in", "top"), ()]))
        if "in" in places:
            parameters["original_max_position_embeddings"] = original if "top" not in places else original + 7
        if "top" in places:
            config["original_max_position_embeddings"] = original
    common = {"rope_theta": draw(BASES), "partial_rotary_factor": fraction}
    if draw(st.booleans()):
        return config | {"rope_parameters": parameters | common}
    return config | {"rope_scaling": None if kind == "default" else parameters} | common


def theirs(kind: str, config: dict[str, Any], length: int | None = None) -> tuple[Any, float]:
    config = LlamaConfig(**copy.deepcopy(config))
    if kind != "default":
        theta, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    elif config.rope_parameters["partial_rotary_factor"] == 1.0:
        theta, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theta, factor = GPTNeoXRotaryEmbedding.compute_default_rope_parameters(config)
    return theta.numpy(), factor


def assert_same(theta: Any, factor: float, rope: Rope) -> None:
    """Their float32 Θ and attention factor against a resolved rope, within what float32 allows."""
    ours = pyrope.frequencies(rope)
    assert theta.dtype == np.float32
    assert theta.shape == ours.shape
    np.testing.assert_array_less(np.abs(theta - ours), theta_bound(rope) * ours + np.finfo(np.float64).tiny)
    assert factor == pytest.approx(rope.attention_factor, rel=ATTENTION_FACTOR, abs=0)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3", "proportional"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_theta(kind: str, data: Any) -> None:
    """Rope types whose Θ is the same at every length."""
    config = data.draw(configs(kind))
    rope = Rope.from_config({"model_type": "llama"} | config)
    assert rope.theta_is_fixed
    assert_same(*theirs(kind, config), rope)


@settings(deadline=None, max_examples=60)
@given(config=configs("dynamic"), longer=st.floats(1, 20))
def test_dynamic(config: dict[str, Any], longer: float) -> None:
    """Dynamic NTK around the length L where it sets in and beyond, with the length as an integer and as a tensor."""
    rope, longest = Rope.from_config({"model_type": "llama"} | config), config["max_position_embeddings"]
    assert not rope.theta_is_fixed
    for length in {1, longest - 1, longest, longest + 1, int(longest * longer)}:
        fixed = rope.at(length)
        assert_same(*theirs("dynamic", config, length), fixed)
        assert_same(*theirs("dynamic", config, torch.tensor(length)), fixed)
    assert np.array_equal(pyrope.frequencies(rope.at(1)), pyrope.frequencies(rope.at(longest)))


@settings(deadline=None, max_examples=60)
@given(config=configs("longrope"))
def test_longrope(config: dict[str, Any]) -> None:
    """LongRoPE: the short list up to the original length L₀, the long one from L₀ + 1, and nothing else changes."""
    rope = Rope.from_config({"model_type": "llama"} | config)
    parameters = config.get("rope_parameters") or config["rope_scaling"]
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = original or config["max_position_embeddings"]
    assert not rope.theta_is_fixed
    for length in {1, original, original + 1, config["max_position_embeddings"]}:
        assert_same(*theirs("longrope", config, length), rope.at(length))


_DEEPSEEK = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_LLAMA = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
PUBLISHED = {  # head size, maximum length, base, rope dict
    "llama-3.1": (128, 131072, 500000.0, _LLAMA | {"factor": 8.0}),
    "llama-3.2": (64, 131072, 500000.0, _LLAMA | {"factor": 32.0}),
    "gpt-oss": (64, 131072, 150000, _OSS | {"truncate": False}),
    "deepseek-v2-lite": (64, 163840, 10000, _DEEPSEEK | {"mscale": 0.707, "mscale_all_dim": 0.707}),
    "deepseek-v3": (64, 163840, 10000, _DEEPSEEK | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "qwen2.5": (128, 32768, 1e6, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "gemma-3": (256, 131072, 1e6, {"rope_type": "linear", "factor": 8.0}),
    "gemma-4": (512, 131072, 1e6, {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    """The rope settings of well-known checkpoints, in the old spelling in which they were published."""
    head_dim, length, base, parameters = PUBLISHED[name]
    config = {"head_dim": head_dim, "max_position_embeddings": length, "rope_theta": base, "rope_scaling": parameters}
    kind = parameters.get("rope_type", parameters.get("type"))
    assert_same(*theirs(kind, config), Rope.from_config({"model_type": "llama"} | config))


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("original", "base"), [(6, 10000.0), (3, 10.0), (2**20, 2.0)])
def test_yarn_where_the_ramp_has_no_place(original: int, base: float, truncate: bool) -> None:
    """Its ends fall together, which is mended by 0.001, or lie below the first pair, or beyond the last."""
    parameters = {"rope_type": "yarn", "rope_theta": base, "factor": 4.0, "truncate": truncate}
    parameters["original_max_position_embeddings"] = original
    config = {"head_dim": 16, "max_position_embeddings": 4 * original, "rope_parameters": parameters}
    assert_same(*theirs("yarn", config), Rope.from_config({"model_type": "llama"} | config))


@settings(deadline=None, max_examples=40)
@given(
    alpha=st.sampled_from([1, 1000.0]) | st.floats(1, 5000),
    head_dim=st.integers(4, 64).map(lambda k: 2 * k),  # base' stays below 1e12
    base=st.floats(10, 1e6),
    old=st.booleans(),
    unused=st.sampled_from([{}, {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}]),
)
@example(alpha=1000.0, head_dim=128, base=10000.0, old=True, unused={})
def test_hunyuan_alpha(alpha: float, head_dim: int, base: float, old: bool, unused: dict[str, Any]) -> None:
    """HunYuan's `alpha` is another base: the same Θ as HunYuanDenseV1RotaryEmbedding has at every length.

    base' = base·α^(r/(r−2)) is computed in float64 on both sides. Keys of yarn beside it change nothing.
    """
    scaling = {"alpha": alpha, "factor": 1.0, "type" if old else "rope_type": "dynamic"} | unused
    config: dict[str, Any] = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "head_dim": head_dim,
        "max_position_embeddings": 64,
    }
    config |= (
        {"rope_scaling": scaling, "rope_theta": base} if old else {"rope_parameters": scaling | {"rope_theta": base}}
    )
    rope = Rope.from_config({"model_type": "hunyuan_v1_dense"} | config)
    assert rope.theta_is_fixed
    embedding = HunYuanDenseV1RotaryEmbedding(HunYuanDenseV1Config(**copy.deepcopy(config)))
    for length in (1, 64, 65, 1000):
        embedding(torch.zeros(1), torch.tensor([[length - 1]]))
        assert_same(embedding.inv_freq.numpy(), embedding.attention_scaling, rope.at(length))
