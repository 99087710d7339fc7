"""The oracle against other people's rotary embeddings: each is identified from its head size alone, and right by its
config; what somebody expects wrongly of one is named. Defects are in tests/world/test_wild.py."""

from __future__ import annotations

import copy
import dataclasses
import re
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
from theirs import class_of, module_of, their_rope
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
HALF, INTERLEAVED = Rope(64, 10000.0, "half"), Rope(64, 10000.0, "interleaved")
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 131072}
LATENT = {"qk_rope_head_dim": 32, "qk_nope_head_dim": 16}
# One of each way to write it: layouts, placements, directions, partial widths, scalings and complex tables.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "nanochat", "helium", "glm", "glm4", "ernie4_5", "gpt_oss", "phi3", "cohere2", "gemma",
                     "qwen3_next", "gemma3n_text", "qwen3_vl_text"), {"head_dim": 64}),
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese", "cohere", "falcon", "phi", "stablelm", "persimmon", "nemotron"), {}),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu"), LATENT),
    "apertus": {}, "llama4_text": {"head_dim": 64}, "minimax_m2": {"head_dim": 64, "rotary_dim": 32},
}  # fmt: skip
LOW = "llama gpt_neox gpt_oss cohere glm ernie4_5 helium deepseek_v2 deepseek_v3 llama4_text"
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
    layer_type = layer_type if model_type == "gemma3n_text" else None
    embedding, text = class_of(model_type)(config), config.get_text_config()
    shape = rope if rope.theta_is_fixed else rope.at(1)
    return with_axes(from_torch(their_rope(module_of(model_type), embedding, text, layer_type, shape)), "bhnd"), rope


def assert_identified_and_right(fn: Any, rope: Rope, precision: str | None = ANGLE32, **options: Any) -> None:
    """`identify` reads this very rope, and `check_rotation` calls it right, of this precision."""
    read = identify(fn, rope.head_dim, **options)
    assert read.rope == rope, read
    assert (read.direction, read.offset, read.behaviour, read.notes) == (rope.direction, 0, (), ())
    report = check_rotation(fn, rope, **options)
    assert report.verdict == "right", report
    assert precision is None or read.precision == report.precision == precision


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "qwen3_vl_text"])
def test_family(model_type: str) -> None:
    fn, rope = family(model_type)
    assert_identified_and_right(fn, rope)
    for dtype in (bfloat16, np.float16) if model_type in LOW.split() else ():
        assert_identified_and_right(fn, rope, ANGLE32 if model_type in WIDENED else BOTH, dtype=dtype)


@pytest.mark.parametrize("model_type", ["qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"])
def test_families_of_several_axes(model_type: str) -> None:
    """Times, rows and columns that differ, as images have them; and the mistakes that only they show."""
    fn, rope = family(model_type, rope_scaling={"rope_type": "default", "mrope_section": [8, 12, 12]})
    report = check_rotation(fn, rope)
    assert report.verdict == "right" and report.precision == ANGLE32, report
    for order in ([0, 2, 1], [0, 0, 0]):
        assert check_rotation(lambda x, at, order=order: fn(x, at[order]), rope).faults == ("wrong axes",)
    other = Axes({"sections": "interleaved", "interleaved": "sections"}[rope.axes.style], rope.axes.sections)
    assert check_rotation(fn, dataclasses.replace(rope, axes=other)).faults == ("wrong axes",)


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
    read = identify(fn, 64)
    assert read.explanations[0].startswith("yarn, base 10000, factor 8, ramp from pair") and read.rope is None
    assert read.attention_factor == pytest.approx(rope.attention_factor, rel=1e-6)
    assert check_rotation(fn, rope).verdict == "right"
    yarn = SCALINGS["yarn"] | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}
    fn, rope = family("deepseek_v3", rope_parameters=yarn)
    assert identify(fn, 48).attention_factor == pytest.approx(rope.attention_factor, rel=1e-7) != 1
    assert check_rotation(fn, rope).verdict == "right"


@pytest.mark.parametrize("length", [4096, 4097, 131072])
def test_longrope(length: int) -> None:
    """Lists fit anything, so that they are named only when they are given; the switch is after the original length."""
    rule = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
    rule["short_factor"] = [1 + i * i % 13 / 64 for i in range(32)]
    rule["long_factor"] = [2.0 + i * i % 37 for i in range(32)]
    fn, rope = family("phi3", rope_parameters=rule, original_max_position_embeddings=4096)
    short, long = (rope.at(n) for n in (4096, 131072))
    assert identify(fn, 64, max_position=length - 1).explanations[0].startswith("none of these")
    read = identify(fn, 64, max_position=length - 1, suspects=(short, long))
    assert read.rope == (short if length <= 4096 else long)
    assert check_rotation(fn, rope.at(length)).verdict == "right"
    assert check_rotation(fn, long if length <= 4096 else short, max_position=length - 1).verdict == "wrong"


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


def onnx_reference(interleaved: int, width: int, joined: bool) -> Any:
    """The reference implementation of ONNX's RotaryEmbedding, its tables computed in float32."""
    shape = ["b", "n", "e"] if joined else ["b", "h", "n", "d"]
    theta = np.float32(500000.0) ** -(np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angle, sessions = np.arange(4096, dtype=np.float32)[:, None] * theta, dict[int, Any]()

    def session(heads: int) -> Any:
        attributes = {"interleaved": interleaved, "rotary_embedding_dim": 0 if width == 64 else width}
        attributes |= {"num_heads": heads} if joined else {}
        node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin", "at"], ["y"], **attributes)
        floats = {"cos": None, "sin": None, "x": shape}
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name, axes in floats.items()]
        inputs += [helper.make_tensor_value_info("at", TensorProto.INT64, ["b", "n"])]
        graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)])
        return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))

    def fn(x: Any, at: Any) -> Any:
        heads = x.shape[2] // 64 if joined else 0
        run = sessions.setdefault(heads, session(heads)).run
        return run(None, {"x": x, "cos": np.cos(angle), "sin": np.sin(angle), "at": at[None]})[0]

    return with_axes(fn, "bn(hd)" if joined else "bhnd")


def meta() -> Any:
    """Complex tables, as in Meta's code."""

    def apply_rotary_emb(xq: Any, xk: Any, freqs_cis: Any) -> Any:  # (b, n, h, d), freqs_cis (n, d/2)
        def one(x: Any) -> Any:
            z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(z * freqs_cis[None, :, None]).flatten(3).type_as(x)

        return one(xq), one(xk)

    angle = torch.outer(torch.arange(4096), 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64))
    return with_axes(from_complex(from_torch(apply_rotary_emb), cached(torch.polar(torch.ones(()), angle))), "bnhd")


def in_jax(x: Any, at: Any) -> Any:
    theta = 10000.0 ** -(np.arange(0, 64, 2, dtype=np.float32) / 64)
    a, b = jax.numpy.split(x, 2, axis=-1)
    cos, sin = (f(at[:, None] * theta).astype(x.dtype) for f in (jax.numpy.cos, jax.numpy.sin))
    return jax.numpy.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


LONG = {"max_position": 4095}
LIBRARIES = {
    "GPT-J": (gptj, Rope(64, 1e4, "interleaved", 32), ANGLE32, LONG),
    "RoFormer": (roformer, INTERLEAVED, "tables or products in x's dtype", LONG),
    "equinox": (equinox_module, Rope(64, 500000.0, "half"), ANGLE32, {"max_position": 255}),
    "ONNX": (lambda: onnx_reference(0, 64, False), Rope(64, 500000.0, "half"), ANGLE32, LONG),
    "ONNX, half a head": (lambda: onnx_reference(0, 32, False), Rope(64, 500000.0, "half", 32), ANGLE32, LONG),
    "ONNX, joined": (lambda: onnx_reference(1, 32, True), Rope(64, 500000.0, "interleaved", 32), ANGLE32, LONG),
    "Meta": (meta, Rope(64, 500000.0, "interleaved"), None, LONG),
    "Meta in bfloat16": (meta, Rope(64, 500000.0, "interleaved"), None, {"dtype": bfloat16, **LONG}),
    "JAX": (lambda: from_jax(in_jax), HALF, ANGLE32, {}),
    "JAX, compiled": (lambda: from_jax(jax.jit(in_jax)), HALF, ANGLE32, {}),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_library(name: str) -> None:
    make, rope, precision, options = LIBRARIES[name]
    assert_identified_and_right(make(), rope, precision, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("traditional", [False, True])
def test_mlx(traditional: bool, dtype: Any) -> None:
    """`mlx.nn.RoPE` in both modes; it takes the exponential of a logarithm in float32 where others take a power."""
    layout, precision = "interleaved" if traditional else "half", {np.float32: ANGLE32, np.float16: BOTH}.get(dtype)
    for width, base, factor in ((64, 5e5, 1), (32, 1e4, 4), (64, 1e7, 1)):
        module = mlx.nn.RoPE(width, traditional=traditional, base=base, scale=1 / factor)
        rope = Rope(64, base, layout, width, scaling=Linear(4.0) if factor == 4 else None)
        assert_identified_and_right(from_offset(with_axes(from_mlx(module), "bhnd")), rope, precision, dtype=dtype)


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
    assert_identified_and_right(with_axes(from_torch(compiled), "bhnd"), rope, **LONG)


# ── What the adapter of torch does with memory and failures ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("axes", ["bnhd", "n(hd)"])
def test_tensors_behind_other_axes_keep_odd_strides(axes: str) -> None:
    """A kernel that gets a pointer and a shape: right for contiguous tensors, and wrong for all others."""
    rope, theta = Rope(8, 10000.0, "half"), 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)

    def turned(x: Any, at: Any) -> Any:  # (…, n, h, d)
        c, s = (table(at[:, None, None] * theta) for table in (torch.cos, torch.sin))
        a, b = x.reshape(*x.shape[: axes.index("n") + 1], -1, 8).double().chunk(2, dim=-1)
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).reshape(x.shape).to(x.dtype)

    def by_pointer(x: Any, at: Any) -> Any:
        return turned(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()), at)

    assert check_rotation(with_axes(from_torch(turned), axes), rope, **LONG).verdict == "right"
    assert check_rotation(with_axes(from_torch(by_pointer), axes), rope, **LONG).faults[0] == "strides ignored"


def test_a_failure_says_which_tensors_the_function_received() -> None:
    received = r"torch.Tensor of shape \(1, (\d+), 2, 8\), torch.float32; torch.Tensor of shape \(\1,\), torch.int64, adapted .*"
    reasons = {
        lambda x, at: x @ at: "it raises RuntimeError",
        lambda x, at: (x, at): "it returns tuple",
        print: "it returns nothing",
    }
    for fn, reason in reasons.items():
        report = check_rotation(with_axes(from_torch(fn), "bnhd"), Rope(8, 10000.0, "half"))
        assert report.verdict == "not judged" and report.failure.reason.startswith(reason)
        assert re.fullmatch(received, report.failure.received), report


def test_gradients_and_memory_of_torch() -> None:
    weight = torch.ones(4, requires_grad=True)
    assert (from_torch(lambda x: x * weight)(np.full((2, 4), 3.0, np.float32)) == 3).all()
    assert from_torch(torch.conj)(np.array([1 + 2j], np.complex64)) == np.complex64(1 - 2j)
    for dtype in (np.float32, bfloat16):
        x = np.ones((3, 4), dtype)
        from_torch(lambda x: x.mul_(2))(x)
        assert (x == 2).all()  # a function that works in place is seen to do so
        from_torch(lambda x: x.mul_(2), device="cpu")(x[:, ::-1])
        assert (x == 4).all()
        x.flags.writeable = False
        assert (from_torch(lambda x: x.mul_(2))(x) == 8).all() and (x == 4).all()
