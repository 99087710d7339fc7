"""The oracle against other people's rotary embeddings: each is identified without being told, and right by its config.

Nothing but the head size is told to `identify`. What is known to be broken in them is found, and what somebody expects
wrongly of them is named.
"""

from __future__ import annotations

import copy
import dataclasses
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
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from rotary_modules import class_of, module_of, their_rope
from transformers import LlamaConfig, PixtralVisionConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gptj import modeling_gptj
from transformers.models.pixtral import modeling_pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.roformer import modeling_roformer

from pyrope import Axes, Linear, Rope, YaRN, check_rotation, identify
from pyrope.oracle.adapters import (
    cached,
    from_complex,
    from_jax,
    from_mlx,
    from_offset,
    from_sequential,
    from_torch,
    with_axes,
)
from pyrope.oracle.tolerance import ANGLE32, BOTH

bfloat16 = ml_dtypes.bfloat16
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 131072}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
LATENT = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 16}
GRID = {"rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}}
# One of each way to write it: layouts, placements, directions, partial widths, scalings and complex tables.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "nanochat", "helium", "glm", "glm4", "ernie4_5", "gpt_oss", "phi3", "cohere2", "gemma",
                     "qwen3_next", "gemma3n_text"), {"head_dim": 64}),
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "cohere", "falcon", "phi", "stablelm", "persimmon", "nemotron"), {}),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu"), LATENT),
    "apertus": {}, "llama4_text": {"head_dim": 64}, "minimax_m2": {"head_dim": 64, "rotary_dim": 32},
}  # fmt: skip
LOW = (
    "llama",
    "gpt_neox",
    "gpt_oss",
    "cohere",
    "glm",
    "ernie4_5",
    "helium",
    "deepseek_v2",
    "deepseek_v3",
    "llama4_text",
)
WIDENED = ("deepseek_v2", "ernie4_5", "llama4_text")  # float32 inside, x too
LAYERS = {"cohere2": "sliding_attention", "gemma3n_text": "full_attention", "llama4_text": "chunked_attention"}


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def family(model_type: str, **more: Any) -> tuple[Any, Rope]:
    """A family's own class and function as a candidate, and the rope that its config means."""
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(SIZES | FAMILIES.get(model_type, {}) | more))
    layer_type = LAYERS.get(model_type)
    rope = Rope.from_config(config.to_dict(), layer_type=layer_type)
    kind = layer_type if model_type == "gemma3n_text" else None
    embedding, text = class_of(model_type)(config), config.get_text_config()
    shape = rope if rope.theta_is_fixed else rope.at(1)
    return with_axes(from_torch(their_rope(module_of(model_type), embedding, text, kind, shape)), "bhnd"), rope


def assert_identified_and_right(fn: Any, rope: Rope, precision: str | None = ANGLE32, **options: Any) -> None:
    """Told nothing, `identify` finds this very rope, and `check_rotation` finds it right, of this precision."""
    found = identify(fn, rope.head_dim, **options)
    assert found.rope == rope, found
    assert (found.layout, found.rotary_dim, found.placement) == (rope.layout, rope.width, rope.placement)
    assert (found.direction, found.offset, found.behaviour, found.notes) == (rope.direction, 0, (), ())
    report = check_rotation(fn, rope, **options)
    assert report.verdict == "right", report
    assert precision is None or found.precision == report.precision == precision


@pytest.mark.parametrize("model_type", FAMILIES)
def test_family(model_type: str) -> None:
    fn, rope = family(model_type)
    assert_identified_and_right(fn, rope)
    for dtype in (bfloat16, np.float16) if model_type in LOW else ():
        assert_identified_and_right(fn, rope, ANGLE32 if model_type in WIDENED else BOTH, dtype=dtype)


def test_tables_made_beforehand() -> None:
    """GPT-J's, whose angles are float32, and RoFormer's, the first of all, whose angles are float64."""
    gptj, limit = modeling_gptj.create_sinusoidal_positions(4096, 32), {"max_position": 4095}

    def turn(x: Any, at: Any) -> Any:  # (b, n, h, d)
        y = modeling_gptj.apply_rotary_pos_emb(x[..., :32], *gptj[at][None].to(x.dtype).chunk(2, -1))
        return torch.cat((y, x[..., 32:]), -1)

    assert_identified_and_right(with_axes(from_torch(turn), "bnhd"), Rope(64, 1e4, "interleaved", 32), **limit)
    table = modeling_roformer.RoFormerSinusoidalPositionalEmbedding(4096, 64).create_weight()
    apply = modeling_roformer.RoFormerSelfAttention.apply_rotary_position_embeddings
    fn = with_axes(from_torch(lambda x, at: apply(table[at][None, None].to(x.dtype), x, x)[0]), "bhnd")
    assert_identified_and_right(fn, Rope(64, 1e4, "interleaved"), "tables or products in x's dtype", **limit)


@pytest.mark.parametrize("model_type", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"])
def test_families_of_several_axes(model_type: str) -> None:
    """Times, rows and columns that differ, as images have them; and the mistakes that only they show."""
    fn, rope = family(model_type, **GRID, **({"head_dim": 64} if "qwen3" in model_type else {}))
    report = check_rotation(fn, rope)
    assert report.verdict == "right" and report.precision == ANGLE32, report
    assert check_rotation(lambda x, at: fn(x, at[[0, 2, 1]]), rope).faults == ("axes in another order",)
    assert check_rotation(lambda x, at: fn(x, at[[0, 0, 0]]), rope).faults == ("one axis for all pairs",)
    other = Axes({"sections": "interleaved", "interleaved": "sections"}[rope.axes.style], rope.axes.sections)
    assert check_rotation(fn, dataclasses.replace(rope, axes=other)).faults == ("pairs dealt otherwise",)


def test_vision_parts() -> None:
    """Rows and columns: of Qwen2-VL, with a table for each; of Pixtral, with the even and the odd frequencies."""
    tables = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding(Qwen2VLVisionConfig(embed_dim=128, num_heads=2))

    def qwen(x: Any, at: Any) -> Any:  # x (n, h, d)
        return modeling_qwen2_vl.apply_rotary_pos_emb_vision(x, x, *tables(x, at.T))[0]

    axial = Rope(64, 10000.0, "half", axes=Axes("axial"))
    assert check_rotation(with_axes(from_torch(qwen), "nhd"), axial).verdict == "right"
    pixtral = PixtralVisionConfig(hidden_size=128, num_attention_heads=2, image_size=2048, patch_size=16)
    embedding = modeling_pixtral.PixtralVisionRotaryEmbedding(pixtral)

    def theirs(x: Any, at: Any) -> Any:
        return modeling_pixtral.apply_rotary_pos_emb(x, x, *embedding(x, at.T), unsqueeze_dim=0)[0]

    fn, rope = with_axes(from_torch(theirs), "bhnd"), Rope(64, 10000.0, "half", axes=Axes("pixtral"))
    assert check_rotation(fn, rope, max_position=127).verdict == "right"
    assert check_rotation(fn, axial, max_position=127).verdict == "wrong"


_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
SCALINGS: dict[str, dict[str, Any]] = {
    "base": {"rope_type": "default", "rope_theta": 8e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5},
    "yarn": _YARN | {"rope_theta": 10000.0, "factor": 8.0},
    "yarn, not rounded": _YARN | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False},
    "yarn without a factor": _YARN | {"rope_theta": 1e6, "factor": 4.0, "attention_factor": 1.0},
    "llama3": _LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "llama4_text"])
def test_scaling(model_type: str, name: str) -> None:
    fn, rope = family(model_type, rope_parameters=dict(SCALINGS[name]))
    assert rope.base == SCALINGS[name]["rope_theta"] and (rope.scaling is None) == (name == "base")
    assert_identified_and_right(fn, rope)
    assert_identified_and_right(fn, rope, None, dtype=bfloat16)


def test_of_unusual_limits_only_the_ramp_is_seen() -> None:
    """No rope is made up, and given the config it is right; mscale and mscale_all_dim show as one number."""
    yarn = SCALINGS["yarn"] | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}
    fn, rope = family("llama", rope_parameters=yarn)
    found = identify(fn, 64)
    assert found.explanations[0].startswith("yarn, base 10000, factor 8, ramp from pair") and found.rope is None
    assert found.attention_factor == pytest.approx(rope.attention_factor, rel=1e-6)
    assert check_rotation(fn, rope).verdict == "right"
    yarn = SCALINGS["yarn"] | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}
    fn, rope = family("deepseek_v3", rope_parameters=yarn)
    assert identify(fn, 48).attention_factor == pytest.approx(rope.attention_factor, rel=1e-7) != 1
    assert check_rotation(fn, rope).verdict == "right"


@pytest.mark.parametrize("length", [4096, 4097, 131072])
def test_longrope(length: int) -> None:
    """Lists fit anything, so that they are named only when they are given; the switch is after the original length."""
    lists = {
        "short_factor": [1 + i * i % 13 / 64 for i in range(32)],
        "long_factor": [2.0 + i * i % 37 for i in range(32)],
    }
    rule = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
    fn, rope = family("phi3", rope_parameters=rule | lists, original_max_position_embeddings=4096)
    short, long = (rope.at(n) for n in (4096, 131072))
    assert identify(fn, 64, max_position=length - 1).explanations[0].startswith("none of these")
    found = identify(fn, 64, max_position=length - 1, suspects=(short, long))
    assert found.rope == (short if length <= 4096 else long)
    assert check_rotation(fn, rope.at(length)).verdict == "right"
    other = rope.at(4097 if length <= 4096 else 4096)
    assert check_rotation(fn, other, max_position=length - 1).verdict == "wrong"


# Real defects


def test_dynamic_ntk_of_transformers_keeps_a_state() -> None:
    """A longer call changes a later shorter one: the table that was made for it stays."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    fn, rope = family("llama", rope_parameters=dynamic, max_position_embeddings=4096)
    report = check_rotation(fn, rope.at(16384))
    assert report.faults[0] == "state between calls", report
    assert check_rotation(fn, rope.at(4096)).verdict == "right"  # up to the original length all is well


def equinox_rope(base: float) -> Any:
    module = equinox.nn.RotaryPositionalEmbedding(64, theta=base)
    return from_sequential(with_axes(from_jax(jax.vmap(jax.vmap(module))), "bhnd"), 256)


def test_equinox_and_its_cache_without_the_base() -> None:
    """Alone either is right; equinox 0.13.8 then gives the second module the table of the first."""
    ropes = {base: Rope(64, base, "half") for base in (10000.0, 500000.0)}
    for base, rope in ropes.items():
        internal_rope_embedding_cache.clear()
        assert_identified_and_right(equinox_rope(base), rope, max_position=255)
    report = check_rotation(equinox_rope(10000.0), ropes[10000.0], max_position=255)
    assert report.faults == ("wrong base",) and "500000" in report.findings[0].fact
    assert identify(equinox_rope(10000.0), 64, max_position=255).rope == ropes[500000.0]
    internal_rope_embedding_cache.clear()


@pytest.mark.parametrize(
    ("model_type", "expected", "fault"),
    [
        ("llama", {"layout": "interleaved"}, "wrong pairing"),
        ("llama", {"base": 500000.0}, "wrong base"),
        ("llama", {"direction": -1}, "direction"),
        ("llama", {"rotary_dim": 32}, "whole head rotated"),
        ("llama", {"scaling": Linear(4.0)}, "scaling ignored"),
        ("llama", {"scaling": YaRN(8.0, 4096)}, "scaling ignored"),
        ("glm", {"layout": "half"}, "wrong pairing"),
        ("nanochat", {"direction": 1}, "direction"),
        ("deepseek_v3", {"placement": "prefix"}, "wrong end rotated"),
        ("gpt_oss", {"scaling": None}, "another rescaling"),
        ("apertus", {"scaling": None}, "another rescaling"),
    ],
)
def test_wrong_expectation(model_type: str, expected: dict[str, Any], fault: str) -> None:
    """What is right of itself is named for what it is."""
    fn, rope = family(model_type)
    for dtype in (np.float32, bfloat16):
        report = check_rotation(fn, dataclasses.replace(rope, **expected), dtype=dtype)
        assert report.verdict == "wrong" and any(name.startswith(fault) for name in report.faults), report


def test_deepseeks_order_is_equivalent() -> None:
    """Pairs read interleaved and written as halves: the scores of the interleaved rope, and the other way round."""
    for model_type, layout in (("deepseek_v3", "interleaved"), ("deepseek_v2", "interleaved-to-half")):
        fn, rope = family(model_type)
        assert check_rotation(fn, dataclasses.replace(rope, layout=layout)).verdict == "equivalent"


# Other libraries


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("traditional", [False, True])
def test_mlx(traditional: bool, dtype: Any) -> None:
    """`mlx.nn.RoPE` in both modes; it takes the exponential of a logarithm in float32 where others take a power."""
    layout, precision = "interleaved" if traditional else "half", {np.float32: ANGLE32, np.float16: BOTH}.get(dtype)
    for width, base, factor in ((64, 5e5, 1), (32, 1e4, 4), (64, 1e7, 1)):
        module = mlx.nn.RoPE(width, traditional=traditional, base=base, scale=1 / factor)
        rope = Rope(64, base, layout, width, scaling=Linear(4.0) if factor == 4 else None)
        fn = from_offset(with_axes(from_mlx(module), "bhnd"))
        assert_identified_and_right(fn, rope, precision, dtype=dtype)
    assert check_rotation(fn, Rope(64, 1e7, "half" if traditional else "interleaved")).faults == ("wrong pairing",)


@pytest.mark.parametrize("jitted", [False, True])
def test_jax(jitted: bool) -> None:
    theta = 10000.0 ** -(np.arange(0, 64, 2, dtype=np.float32) / 64)

    def rotate(x: Any, at: Any) -> Any:
        a, b = jax.numpy.split(x, 2, axis=-1)
        cos, sin = (f(at[:, None] * theta).astype(x.dtype) for f in (jax.numpy.cos, jax.numpy.sin))
        return jax.numpy.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    fn, rope = jax.jit(rotate) if jitted else rotate, Rope(64, 10000.0, "half")
    assert_identified_and_right(fn, rope, framework="jax")
    assert check_rotation(fn, rope, framework="jax", backward=True).verdict == "right"
    assert check_rotation(fn, Rope(64, 5e5, "half"), framework="jax").faults == ("wrong base",)


@pytest.mark.parametrize(("interleaved", "width", "joined"), [(0, 64, False), (0, 32, False), (1, 32, True)])
def test_onnx(interleaved: int, width: int, joined: bool) -> None:
    """The reference implementation of ONNX's RotaryEmbedding, its tables computed in float32."""
    rope = Rope(64, 500000.0, "interleaved" if interleaved else "half", width)
    shape = ["b", "n", "e"] if joined else ["b", "h", "n", "d"]
    theta = np.float32(500000.0) ** -(np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angle, sessions = np.arange(4096, dtype=np.float32)[:, None] * theta, dict[int, Any]()

    def session(heads: int) -> Any:
        told = {"interleaved": interleaved, "rotary_embedding_dim": 0 if width == 64 else width}
        told |= {"num_heads": heads} if joined else {}
        node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin", "at"], ["y"], **told)
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("cos", "sin")]
        inputs += [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        inputs += [helper.make_tensor_value_info("at", TensorProto.INT64, ["b", "n"])]
        graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)])
        return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))

    def fn(x: Any, at: Any) -> Any:
        heads = x.shape[2] // 64 if joined else 0
        run = sessions.setdefault(heads, session(heads)).run
        return run(None, {"x": x, "cos": np.cos(angle), "sin": np.sin(angle), "at": at[None]})[0]

    assert_identified_and_right(with_axes(fn, "bn(hd)" if joined else "bhnd"), rope, max_position=4095)


def test_complex_tables_as_in_metas_code() -> None:
    def apply_rotary_emb(xq: Any, xk: Any, freqs_cis: Any) -> Any:  # (b, n, h, d), freqs_cis (n, d/2)
        def one(x: Any) -> Any:
            z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(z * freqs_cis[None, :, None]).flatten(3).type_as(x)

        return one(xq), one(xk)

    angle = torch.outer(torch.arange(4096), 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64))
    fn = with_axes(from_complex(from_torch(apply_rotary_emb), cached(torch.polar(torch.ones(()), angle))), "bnhd")
    for dtype in (np.float32, bfloat16):
        assert_identified_and_right(fn, Rope(64, 500000.0, "interleaved"), None, dtype=dtype, max_position=4095)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of parts of itself
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_torch(backend: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, with C++ kernels where there is a compiler: the same rotation, within the same bounds."""
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch's inductor needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    config, rope = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_theta=500000.0), Rope(64, 500000.0, "half")
    plain = their_rope(module_of("llama"), class_of("llama")(config), config, None, rope)
    compiled = torch.compile(plain, backend=backend, dynamic=True)
    assert_identified_and_right(with_axes(from_torch(compiled), "bhnd"), rope, max_position=4095)
