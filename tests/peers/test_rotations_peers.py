"""The oracle against other people's rotary embeddings: each is identified from its head size alone, and right by its
config. Defects are in tests/world/test_wild.py."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import equinox
import jax
import ml_dtypes
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from equinox.nn._embedding import internal_rope_embedding_cache
from theirs import class_of, module_of, their_rope
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.roformer import modeling_roformer

from pyrope import Linear, Rope, check_rotation, identify
from pyrope.oracle.adapters import from_jax, from_mlx, from_offset, from_sequential, from_torch, with_axes
from pyrope.oracle.operator import NO_RULE
from pyrope.oracle.tolerance import ANGLE32, BOTH

bfloat16 = ml_dtypes.bfloat16
HALF, INTERLEAVED = Rope(64, 10000.0, "half"), Rope(64, 10000.0, "interleaved")
LLAMA, META = Rope(64, 500000.0, "half"), Rope(64, 500000.0, "interleaved")
LONG = {"max_position": 4095}


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def assert_identified_and_right(fn: Any, rope: Rope, precision: str | None = ANGLE32, **options: Any) -> None:
    """`identify` reads this very rope, and `check_rotation` calls it right, of this precision."""
    read = identify(fn, rope.head_dim, **options)
    assert read.rope == rope, read
    assert (read.direction, read.offset, read.behaviour, read.notes) == (rope.direction, 0, (), ())
    report = check_rotation(fn, rope, **options)
    assert report.verdict == "right", report
    assert precision is None or read.precision == report.precision == precision


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────────────

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 131072}
LATENT = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 16}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3 |= {"original_max_position_embeddings": 8192}
# One of each way to write it: layouts, placements, directions, partial widths, scalings; float32 inside if it says so.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": ("llama", {"head_dim": 64}, BOTH),
    "nanochat, backwards": ("nanochat", {"head_dim": 64}, BOTH),
    "GLM": ("glm", {"head_dim": 64}, BOTH),
    "GPT-NeoX": ("gpt_neox", {}, BOTH),
    "Cohere": ("cohere", {}, BOTH),
    "ERNIE": ("ernie4_5", {"head_dim": 64}, ANGLE32),
    "DeepSeek-V2, complex": ("deepseek_v2", LATENT, ANGLE32),
    "DeepSeek-V3, YaRN": ("deepseek_v3", LATENT | {"rope_parameters": YARN}, BOTH),
    "gpt-oss": ("gpt_oss", {"head_dim": 64}, BOTH),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5}}, BOTH),
    "Llama 3": ("llama", {"rope_parameters": LLAMA3}, BOTH),
}


def family(model_type: str, more: dict[str, Any], backward: str | None = None) -> tuple[Any, Rope]:
    """A family's own class and function as a candidate, and the rope that its config means."""
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(SIZES | more))
    rope, embedding = Rope.from_config(config.to_dict()), class_of(model_type)(config)
    turn = their_rope(module_of(model_type), embedding, config.get_text_config(), None, rope)
    return with_axes(from_torch(turn, backward=backward), "bhnd"), rope


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    model_type, more, low = FAMILIES[name]
    fn, rope = family(model_type, more)
    assert_identified_and_right(fn, rope)
    for dtype in (bfloat16, np.float16):
        assert_identified_and_right(fn, rope, None if rope.scaling else low, dtype=dtype)


def test_no_rule_is_named_for_unusual_limits() -> None:
    """No rope is made up, and given the config it is right."""
    fn, rope = family("llama", {"rope_parameters": YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}})
    read = identify(fn, 64)
    assert read.explanations == (NO_RULE,) and read.rope is None
    assert check_rotation(fn, rope).verdict == "right"


# ── Tables made beforehand, and other libraries ──────────────────────────────────────────────────────────────────────


def gptj() -> Any:
    table = modeling_gptj.create_sinusoidal_positions(4096, 32)

    def turn(x: Any, at: Any) -> Any:  # (b, n, h, d)
        y = modeling_gptj.apply_rotary_pos_emb(x[..., :32], *table[at][None].to(x.dtype).chunk(2, -1))
        return torch.cat((y, x[..., 32:]), -1)

    return with_axes(from_torch(turn), "bnhd")


def roformer() -> Any:
    """The first of all, whose angles are float64."""
    table = modeling_roformer.RoFormerSinusoidalPositionalEmbedding(4096, 64).create_weight()
    apply = modeling_roformer.RoFormerSelfAttention.apply_rotary_position_embeddings
    return with_axes(from_torch(lambda x, at: apply(table[at][None, None].to(x.dtype), x, x)[0]), "bhnd")


def equinox_module() -> Any:
    internal_rope_embedding_cache.clear()  # whose keys lack the base
    module = equinox.nn.RotaryPositionalEmbedding(64, theta=500000.0)
    return from_sequential(with_axes(from_jax(jax.vmap(jax.vmap(module))), "bhnd"), 256)


def in_mlx(traditional: bool, width: int, base: float, factor: float, backward: str | None = None) -> Any:
    """It takes the exponential of a logarithm in float32 where others take a power."""
    module = mlx.nn.RoPE(width, traditional=traditional, base=base, scale=1 / factor)
    return from_offset(with_axes(from_mlx(lambda x, offset: module(x, offset), backward=backward), "bhnd"))


QUARTER = Rope(64, 1e4, "half", 32, scaling=Linear(4.0))
LIBRARIES = {
    "GPT-J": (gptj, Rope(64, 1e4, "interleaved", 32), ANGLE32, LONG),
    "RoFormer": (roformer, INTERLEAVED, "tables or products in x's dtype", LONG),
    "equinox": (equinox_module, LLAMA, ANGLE32, {"max_position": 255}),
    "MLX": (lambda: in_mlx(False, 64, 5e5, 1), LLAMA, ANGLE32, {}),
    "MLX, traditional": (lambda: in_mlx(True, 64, 1e7, 1), Rope(64, 1e7, "interleaved"), ANGLE32, {}),
    "MLX, half a head": (lambda: in_mlx(False, 32, 1e4, 4), QUARTER, ANGLE32, {}),
    "MLX in float16": (lambda: in_mlx(True, 64, 5e5, 1), META, BOTH, {"dtype": np.float16}),
    "MLX in bfloat16": (lambda: in_mlx(False, 64, 5e5, 1), LLAMA, None, {"dtype": bfloat16}),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_library(name: str) -> None:
    make, rope, precision, options = LIBRARIES[name]
    assert_identified_and_right(make(), rope, precision, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of parts of itself
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_torch(backend: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, with C++ kernels where there is a compiler: the same rotation, within the same bounds."""
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch's inductor needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    embedding = modeling_llama.LlamaRotaryEmbedding(CONFIG_MAPPING["llama"](head_dim=64, rope_theta=500000.0))
    plain = their_rope(modeling_llama, embedding, embedding.config, None, LLAMA)
    compiled = torch.compile(plain, backend=backend, dynamic=True)
    assert_identified_and_right(with_axes(from_torch(compiled), "bhnd"), LLAMA, **LONG)


BACKWARD = {
    "transformers": (lambda: family("llama", {}, "x")[0], {}),
    "transformers in bfloat16": (lambda: family("llama", {}, "x")[0], {"dtype": bfloat16}),
    "MLX": (lambda: in_mlx(False, 64, 1e4, 1, "x"), {"max_position": 255}),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_pass(name: str) -> None:
    make, options = BACKWARD[name]
    report = check_rotation(make(), HALF, backward=True, **options)
    assert report.verdict == "right", report
