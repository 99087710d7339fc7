"""The oracle against other people's rotary embeddings: each is identified without being told, and right by its config.

Nothing but the head size is told to `identify`. What is known to be broken in them is found, and what somebody expects
wrongly of them is named.
"""

from __future__ import annotations

import copy
import dataclasses
import math
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
from rotary_modules import COMPOSITE, MODEL_TYPES, MROPE, SINUSOIDAL, known_keys, their_rope
from transformers import LlamaConfig, PixtralVisionConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.pixtral import modeling_pixtral
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

import pyrope
from pyrope import Axes, Linear, Llama3, LongRoPE, Rope, YaRN, check_rotation, identify
from pyrope.oracle import trials
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
from pyrope.oracle.tolerance import ANGLE32, BOTH, LOW_TABLES

bfloat16 = ml_dtypes.bfloat16
EVERY_TRIAL = trials.trials
TOP = 131071  # the largest position, unless tables are made beforehand
MADE_BEFOREHAND = 4095
LAYERS = [
    (name, layer_type) for name, convention in MODEL_TYPES.items() for layer_type in (convention.layers or (None,))
]


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


# Families of transformers. Sizes as far as a class knows their names: heads of 64 features, 48 where they are latent.
SIZES = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4,
    "max_position_embeddings": TOP + 1, "n_embd": 256, "n_head": 4, "n_positions": MADE_BEFOREHAND + 1,
    "rotary_dim": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 16,
}  # fmt: skip
_PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
BESIDES: dict[str, dict[str, Any]] = {
    **{name: {"rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}} for name in MROPE},
    **{name: _TWO_KINDS for name, convention in MODEL_TYPES.items() if convention.layers},
    "gemma4_text": _TWO_KINDS
    | {"global_head_dim": 128, "rope_parameters": {
        "full_attention": _PROPORTIONAL, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
}  # fmt: skip


def family(model_type: str, layer_type: str | None = None, with_grid: bool = False, **more: Any) -> tuple[Any, Rope]:
    """A family's own functions as a candidate, and the rope that its config means, of text alone unless a grid is asked
    for."""
    given = known_keys(model_type, SIZES) | BESIDES.get(model_type, {}) | more
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(given))
    text = config.get_text_config()
    told = {"model_type": model_type} | given if model_type in COMPOSITE else config.to_dict()
    if (still := MODEL_TYPES[model_type].still) is not None:  # any other layer
        rope = Rope.from_config(told, layer_type=next(kind for kind in text.layer_types if kind != still))
    else:
        rope = Rope.from_config(told, layer_type=layer_type)
    fn = with_axes(from_torch(their_rope(model_type, text, layer_type, MADE_BEFOREHAND + 1)), "bhnd")
    if with_grid:
        return fn, rope
    return fn, dataclasses.replace(rope, axes=None)  # t = h = w, and no axis has frequencies of its own


def top_of(model_type: str) -> int:
    return MADE_BEFOREHAND if model_type in SINUSOIDAL else TOP


def assert_identified_and_right(
    fn: Any, rope: Rope, precision: str | None = ANGLE32, dtype: Any = np.float32, max_position: int = TOP
) -> None:
    """Told nothing, `identify` finds this very rope, and `check_rotation` finds it right, of this precision."""
    found = identify(fn, rope.head_dim, dtype=dtype, max_position=max_position)
    assert found.rope == rope, found
    assert (found.layout, found.rotary_dim, found.placement) == (rope.layout, rotary_dim(rope), rope.placement)
    assert (found.direction, found.offset, found.behaviour, found.notes) == (rope.direction, 0, (), ())
    report = check_rotation(fn, rope, dtype=dtype, max_position=max_position)
    assert report.verdict == "right", report
    assert found.precision == report.precision == (precision or report.precision)


def rotary_dim(rope: Rope) -> int:
    """How many features turn: not those with a frequency of 0."""
    return 2 * int((pyrope.frequencies(rope) > 0).sum())


EVERY_LENGTH = ("llama", "gptj", "glm", "deepseek_v3", "nanochat", "roformer")  # one of each way to write it


@pytest.mark.parametrize(("model_type", "layer_type"), LAYERS)
def test_family(model_type: str, layer_type: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family that `pyrope.models.conventions` lists, by its own functions, in float32; some at every length."""
    if model_type in EVERY_LENGTH:
        monkeypatch.setattr(trials, "trials", EVERY_TRIAL)
    fn, rope = family(model_type, layer_type)
    precision = LOW_TABLES if model_type == "roformer" else ANGLE32  # whose tables are made in float64
    assert_identified_and_right(fn, rope, precision, max_position=top_of(model_type))


@pytest.mark.parametrize("model_type", MROPE)
def test_families_of_several_axes(model_type: str) -> None:
    """Times, rows and columns that differ, as images have them; and the mistakes that only they show."""
    fn, rope = family(model_type, with_grid=True)
    report = check_rotation(fn, rope)
    assert report.verdict == "right" and report.precision == ANGLE32, report
    assert check_rotation(lambda x, at: fn(x, at[[0, 2, 1]]), rope).faults == ("axes in another order",)
    assert check_rotation(lambda x, at: fn(x, at[0]), rope).faults == ("one axis for all pairs",)
    other = Axes({"sections": "interleaved", "interleaved": "sections"}[rope.axes.style], rope.axes.sections)
    report = check_rotation(fn, dataclasses.replace(rope, axes=other))
    assert (
        report.faults == ("pairs dealt otherwise",) and f"{rope.axes.style} instead of" in report.findings[0].evidence
    )


def test_vision_parts() -> None:
    """Rows and columns: of Qwen2-VL, with a table for each; of Pixtral, with the even and the odd frequencies."""
    config = Qwen2VLVisionConfig(embed_dim=128, num_heads=2)
    tables = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)

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
    assert check_rotation(fn, axial, max_position=127).faults == ("pairs dealt otherwise",)


def test_the_families_differ() -> None:
    """Many of them, of every layout, placement, direction, partial width and kind of scaling by default."""
    ropes = [family(*names)[1] for names in LAYERS]
    assert len(MODEL_TYPES) >= 20
    assert {rope.layout for rope in ropes} == {"half", "interleaved", "interleaved-to-half"}
    assert {rope.placement for rope in ropes} == {"prefix", "suffix"}
    assert {rope.direction for rope in ropes} == {1, -1}
    assert {rotary_dim(rope) / rope.head_dim for rope in ropes} == {1.0, 0.5, 0.25, 2 / 3, 0.8}
    assert len({rope.base for rope in ropes}) >= 8
    assert {type(rope.scaling) for rope in ropes} == {type(None), Llama3, YaRN, pyrope.Proportional}


OTHER_BASES = {"llama": 500000.0, "gemma": 25000.0, "cohere": 8e6, "deepseek_v3": 11158840.0, "glm": 283461.0}


@pytest.mark.parametrize("model_type", OTHER_BASES)
def test_base_that_the_class_has_not_by_default(model_type: str) -> None:
    fn, rope = family(model_type, rope_theta=OTHER_BASES[model_type])
    assert rope.base == OTHER_BASES[model_type]
    assert_identified_and_right(fn, rope)


LOW = ("llama", "gemma3n_text", "gpt_neox", "phi", "gpt_oss", "nanochat", "cohere", "glm", "ernie4_5", "helium", "gptj",
       "codegen", "roformer", "deepseek_v2", "deepseek_v3", "llama4_text", "qwen2_vl_text")  # fmt: skip


WIDENED = ("deepseek_v2", "ernie4_5", "llama4_text")  # float32 inside, x too


@pytest.mark.parametrize("model_type", LOW)
def test_family_in_bfloat16_and_float16(model_type: str) -> None:
    """Base and rule are found in 8 bits too, and whether tables and products are in x's dtype."""
    layer_type = "full_attention" if MODEL_TYPES[model_type].layers else None
    for dtype in (bfloat16, np.float16):
        fn, rope = family(model_type, layer_type)
        precision: str | None = ANGLE32 if model_type in WIDENED else BOTH
        if model_type in SINUSOIDAL:  # up to 4095 a float32 angle may not show
            precision = LOW_TABLES if model_type == "roformer" else None
        assert_identified_and_right(fn, rope, precision, dtype, top_of(model_type))


# Scalings, as far as outputs show them: all of them with the limits that everybody uses.

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "linear by 2.5": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.5},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096},
    "yarn, not rounded": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "truncate": False,
                          "original_max_position_embeddings": 4096},
    "yarn without a factor": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 1.0,
                              "original_max_position_embeddings": 16384},
    "llama3": _LLAMA3 | {"rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
    "llama3 by 32": _LLAMA3 | {"rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("model_type", ["llama", "cohere", "deepseek_v3", "llama4_text"])
def test_scaling(model_type: str, name: str) -> None:
    fn, rope = family(model_type, rope_parameters=dict(SCALINGS[name]))
    kind = {"linear": Linear, "yarn": YaRN, "llama3": Llama3}[SCALINGS[name]["rope_type"]]
    assert isinstance(rope.scaling, kind) and rope.base == SCALINGS[name]["rope_theta"]
    assert_identified_and_right(fn, rope)
    assert_identified_and_right(fn, rope, ANGLE32 if model_type == "llama4_text" else BOTH, bfloat16)


def test_of_unusual_limits_only_the_ramp_is_seen() -> None:
    """Base, factor and where the ramp begins and ends; no rope is made up, and given the config it is right."""
    yarn = SCALINGS["yarn"] | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}
    fn, rope = family("llama", rope_parameters=yarn)
    ends = [32 * math.log(4096 / (2 * math.pi * beta)) / math.log(10000) for beta in (20, 2)]
    found = identify(fn, 64)
    (words,) = found.explanations
    assert words.startswith(f"yarn, base 10000, factor 8, ramp from pair {ends[0]:.4g} to {ends[1]:.4g}")
    assert found.rope is None
    assert found.attention_factor == pytest.approx(rope.attention_factor, rel=1e-6)
    assert check_rotation(fn, rope).verdict == "right"

    llama3 = SCALINGS["llama3"] | {"low_freq_factor": 2.0, "high_freq_factor": 6.0}
    fn, rope = family("llama", rope_parameters=llama3 | {"original_max_position_embeddings": 3000})
    ends = [2 * math.pi * turns / 3000 for turns in (6, 2)]
    found = identify(fn, 64)
    (words,) = found.explanations
    assert words.startswith(f"llama3, base 500000, factor 8, ramp from frequency {ends[0]:.4g} to {ends[1]:.4g}")
    assert found.rope is None
    assert check_rotation(fn, rope).verdict == "right"


def test_deepseeks_attention_factor() -> None:
    """mscale and mscale_all_dim show as one number, which is measured."""
    yarn = SCALINGS["yarn"] | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707}
    fn, rope = family("deepseek_v3", rope_parameters=yarn)
    found = identify(fn, 48)
    assert found.attention_factor == pytest.approx(rope.attention_factor, rel=1e-7) != 1
    assert isinstance(found.rope, Rope) and isinstance(found.rope.scaling, YaRN)
    assert (found.rope.base, found.rope.scaling.factor, found.rope.scaling.original_length) == (10000.0, 40.0, 4096)
    assert check_rotation(fn, rope).verdict == "right"


def longrope() -> tuple[Any, Rope]:
    lists = {"short_factor": [1 + i / 64 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
    rule = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
    return family("phi3", rope_parameters=rule | lists, original_max_position_embeddings=4096)


@pytest.mark.parametrize("length", [512, 4096, 4097, 16384, 131072])
def test_longrope(length: int) -> None:
    """Lists fit anything, so that they are named only when they are given; the switch is after the original length."""
    fn, rope = longrope()
    short, long = (rope.at(n) for n in (4096, 131072))
    assert isinstance(rope.scaling, LongRoPE)
    assert identify(fn, 64, max_position=length - 1).explanations[0].startswith("none of these")
    found = identify(fn, 64, max_position=length - 1, suspects=(short, long))
    assert found.rope == (short if length <= 4096 else long)
    assert [told.partition(":")[0] for told in found.behaviour] == ["depends on the length"] * (length > 4096)
    assert check_rotation(fn, rope.at(length)).verdict == "right"
    other = rope.at(4097 if length <= 4096 else 4096)
    assert check_rotation(fn, other, max_position=length - 1).faults == ("LongRoPE's other list",)


# Real defects


def test_dynamic_ntk_of_transformers_keeps_a_state() -> None:
    """A longer call changes a later shorter one: the table that was made for it stays. Up to the original length all
    is well."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    fn, rope = family("llama", rope_parameters=dynamic, max_position_embeddings=4096)
    report = check_rotation(fn, rope.at(16384))
    assert report.faults == ("state between calls",)
    assert "positions up to 8191, before and after a call with position 16383" in report.findings[0].evidence
    found = identify(family("llama", rope_parameters=dynamic, max_position_embeddings=4096)[0], 64, max_position=16383)
    assert found.behaviour[0].startswith("state between calls")
    assert check_rotation(fn, rope.at(4096)).verdict == "right"


def equinox_rope(base: float, limit: int = 256) -> Any:
    module = equinox.nn.RotaryPositionalEmbedding(64, theta=base)
    return from_sequential(with_axes(from_jax(jax.vmap(jax.vmap(module))), "bhnd"), limit)


def test_equinox_and_its_cache_without_the_base() -> None:
    """Alone either is right; equinox 0.13.8 then gives the second module the table of the first."""
    ropes = {base: Rope(64, base, "half") for base in (10000.0, 500000.0)}
    for base, rope in ropes.items():
        internal_rope_embedding_cache.clear()
        assert_identified_and_right(equinox_rope(base), rope, max_position=255)
    report = check_rotation(equinox_rope(10000.0), ropes[10000.0], max_position=255)
    assert report.faults == ("wrong base",)
    assert "base 500000 instead of 10000" in report.findings[0].evidence
    assert identify(equinox_rope(10000.0), 64, max_position=255).rope == ropes[500000.0]
    internal_rope_embedding_cache.clear()


# Expectations that are wrong: what is right of itself is named for what it is


@pytest.mark.parametrize(
    ("model_type", "expected", "fault", "evidence"),
    [
        ("llama", {"layout": "interleaved"}, "wrong pairing", ""),
        ("llama", {"base": 500000.0}, "wrong base", "base 10000 instead of 500000"),
        ("llama", {"direction": -1}, "direction", ""),
        ("llama", {"rotary_dim": 32}, "whole head rotated", ""),
        ("llama", {"scaling": Linear(4.0)}, "scaling ignored", ""),
        ("llama", {"scaling": YaRN(8.0, 4096)}, "scaling ignored", ""),
        ("gptj", {"layout": "half"}, "wrong pairing", ""),
        ("gpt_neox", {"layout": "interleaved"}, "wrong pairing", ""),
        ("glm", {"layout": "half"}, "wrong pairing", ""),
        ("cohere", {"base": 10000.0}, "wrong base", "base 500000 instead of 10000"),
        ("nanochat", {"direction": 1}, "direction", ""),
        ("deepseek_v3", {"placement": "prefix"}, "wrong end rotated", ""),
        ("gpt_oss", {"scaling": None}, "another rescaling", "those of yarn, base 150000, factor 32, ramp"),
        ("apertus", {"scaling": None}, "another rescaling", "those of llama3, base 1.2e+07, factor 8, ramp"),
    ],
)
def test_wrong_expectation(model_type: str, expected: dict[str, Any], fault: str, evidence: str) -> None:
    fn, rope = family(model_type)
    for dtype in (np.float32, bfloat16):
        report = check_rotation(fn, dataclasses.replace(rope, **expected), dtype=dtype, max_position=top_of(model_type))
        assert report.verdict == "wrong"
        named = {*report.faults, *(name for finding in report.findings for name in finding.alternatives)}
        assert fault in named, report
        assert any(evidence in re.sub(" ± [^ ,;]+", "", finding.evidence) for finding in report.findings), report


def test_deepseeks_order_is_equivalent() -> None:
    """Pairs read interleaved and written as halves: the scores of the interleaved rope, and a note says what must
    match."""
    fn, rope = family("deepseek_v3")
    report = check_rotation(fn, dataclasses.replace(rope, layout="interleaved"))
    assert report.verdict == "equivalent"
    assert "pairs are written half, expected was interleaved" in report.notes[0]
    fn, rope = family("deepseek_v2")
    report = check_rotation(fn, dataclasses.replace(rope, layout="interleaved-to-half"))
    assert report.verdict == "equivalent"
    assert "pairs are written interleaved, expected was interleaved-to-half" in report.notes[0]


# Other libraries


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("traditional", [False, True])
def test_mlx(traditional: bool, dtype: Any) -> None:
    """`mlx.nn.RoPE` in both modes; it takes the exponential of a logarithm in float32 where others take a power."""
    layout, precision = "interleaved" if traditional else "half", ANGLE32 if dtype == np.float32 else BOTH
    forms = [
        (64, 5e5, 1),
        (32, 1e4, 4),
        (64, 1e4, 1),
        (32, 1e5, 1),
        (64, 1e7, 1),
    ]  # of narrow dtypes only two: it is slow
    for width, base, factor in forms if dtype == np.float32 else forms[:2]:
        module = mlx.nn.RoPE(width, traditional=traditional, base=base, scale=1 / factor)
        rope = Rope(64, base, layout, width, scaling=Linear(4.0) if factor == 4 else None)
        assert_identified_and_right(from_offset(with_axes(from_mlx(module), "bhnd")), rope, precision, dtype)


def test_mlx_mode_mistaken() -> None:
    fn = from_offset(with_axes(from_mlx(mlx.nn.RoPE(64, traditional=False)), "bhnd"))
    assert check_rotation(fn, Rope(64, 10000.0, "interleaved")).faults == ("wrong pairing",)


@pytest.mark.parametrize(
    ("interleaved", "width", "heads_joined"), [(0, 64, False), (1, 64, False), (0, 32, False), (1, 32, True)]
)
def test_onnx(interleaved: int, width: int, heads_joined: bool) -> None:
    """The reference implementation of ONNX's RotaryEmbedding, its tables computed in float32."""
    rope = Rope(64, 500000.0, "interleaved" if interleaved else "half", width)
    shape = ["b", "n", "e"] if heads_joined else ["b", "h", "n", "d"]
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": 0 if width == 64 else width}
    theta = np.float32(500000.0) ** -(np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angle = np.arange(4096, dtype=np.float32)[:, None] * theta
    sessions: dict[int, Any] = {}

    def session(heads: int) -> Any:
        told = attributes | ({"num_heads": heads} if heads_joined else {})
        node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin", "at"], ["y"], **told)
        inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("cos", "sin")]
        inputs += [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        inputs += [helper.make_tensor_value_info("at", TensorProto.INT64, ["b", "n"])]
        graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)])
        return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))

    def fn(x: Any, at: Any) -> Any:
        heads = x.shape[2] // 64 if heads_joined else 0
        run = sessions.setdefault(heads, session(heads)).run
        return run(None, {"x": x, "cos": np.cos(angle), "sin": np.sin(angle), "at": at[None]})[0]

    assert_identified_and_right(with_axes(fn, "bn(hd)" if heads_joined else "bhnd"), rope, max_position=4095)


def test_complex_tables_as_in_metas_code() -> None:
    def apply_rotary_emb(xq: Any, xk: Any, freqs_cis: Any) -> Any:  # (b, n, h, d), freqs_cis (n, d/2)
        def one(x: Any) -> Any:
            z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(z * freqs_cis[None, :, None]).flatten(3).type_as(x)

        return one(xq), one(xk)

    theta = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    angle = torch.outer(torch.arange(MADE_BEFOREHAND + 1), theta)
    fn = with_axes(from_complex(from_torch(apply_rotary_emb), cached(torch.polar(torch.ones(()), angle))), "bnhd")
    rope = Rope(64, 500000.0, "interleaved")
    assert_identified_and_right(fn, rope, max_position=MADE_BEFOREHAND)
    assert_identified_and_right(fn, rope, None, bfloat16, MADE_BEFOREHAND)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of parts of itself
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_torch(backend: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, with C++ kernels where there is a compiler: the same rotation, within the same bounds."""
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch's inductor needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_theta=500000.0)
    compiled = torch.compile(their_rope("llama", config), backend=backend, dynamic=True)
    assert_identified_and_right(with_axes(from_torch(compiled), "bhnd"), Rope(64, 500000.0, "half"), max_position=4095)
