"""Other people's software that is right, as docs/wild.md says: each function makes a candidate and says what it must be.
`tox -e world` installs it all; what is missing is skipped."""

from __future__ import annotations

import functools
from typing import Any

import ggml
import numpy as np
import pytest
from sources import alone, need_ggml, onnx_session, tables

from pyrope import Axes, Rope, check_rotation, cos_sin, identify, rotate
from pyrope.files import dtype_named
from pyrope.oracle.adapters import from_offset, from_paddle, from_torch, with_axes

torch = pytest.importorskip("torch", reason="needs the package torch: tox -e world")
pytestmark = pytest.mark.filterwarnings("ignore")
HALF, INTERLEAVED = Rope(64, 10000.0, "half"), Rope(64, 10000.0, "interleaved")
PART = Rope(64, 10000.0, "half", 48)


def rotary_embedding_torch() -> Any:
    import rotary_embedding_torch as package

    module = package.RotaryEmbedding(32, cache_if_possible=False)
    fn = from_torch(lambda x, at: package.apply_rotary_emb(module(at.float()), x))
    return with_axes(fn, "bhnd"), Rope(64, 10000.0, "interleaved", 32), {}


def x_transformers() -> Any:
    from x_transformers import x_transformers as package

    module = package.RotaryEmbedding(64)
    return with_axes(from_torch(lambda x, at: package.apply_rotary_pos_emb(x, *module(at))), "bhnd"), INTERLEAVED, {}


def diffusers_flux() -> Any:
    """A block of features for each axis, each with a series of its own."""
    from diffusers.models.embeddings import apply_rotary_emb
    from diffusers.models.transformers.transformer_flux import FluxPosEmbed

    module = FluxPosEmbed(10000, [16, 24, 24])
    rope = Rope(64, 10000.0, "interleaved", axes=Axes("sections", (8, 12, 12), series="own"))
    return with_axes(from_torch(lambda x, at: apply_rotary_emb(x, module(at.T.float()))), "bhnd"), rope, {}


def timm(half: bool) -> Any:
    """EVA and its like: rows turn the first half of the pairs, columns the second, each with a series of its own."""
    module, side = alone("timm.layers.pos_embed_sincos"), 64
    sin, cos = module.build_rotary_pos_embed([side, side], dim=64, in_pixels=False, rotate_half=half)

    def apply(x: Any, at: Any) -> Any:
        rows = at[0] * side + at[1]
        return module.apply_rot_embed(x, sin[rows], cos[rows], half=half)

    rope = Rope(64, 10000.0, "half" if half else "interleaved", axes=Axes("axial"))
    return with_axes(from_torch(apply), "bhnd"), rope, {"max_position": side - 1}


def torchtune() -> Any:
    rotary = alone("torchtune.modules.position_embeddings").RotaryPositionalEmbeddings(64, max_seq_len=4096)
    fn = with_axes(from_torch(lambda x, at: rotary(x, input_pos=at[None])), "bnhd")
    return fn, INTERLEAVED, {"max_position": 4095}


def onnxruntime() -> Any:
    from onnx.helper import make_node

    node = make_node("RotaryEmbedding", ["x", "at", "cos", "sin"], ["y"], domain="com.microsoft")
    inputs = {"x": ("f4", ["b", "h", "n", 64]), "at": ("i8", ["b", "n"])}
    session = onnx_session(node, inputs | dict.fromkeys(("cos", "sin"), ("f4", [8192, 32])), ["y"])
    cos, sin = cos_sin(range(8192), HALF, np.float32)

    def fn(x: Any, at: Any) -> Any:
        return session.run(None, {"x": x, "at": np.repeat(at[None], len(x), 0), "cos": cos, "sin": sin})[0]

    return with_axes(fn, "bhnd"), HALF, {"max_position": 8191}


def ggml_ext(layout: str, width: int) -> Any:
    """Each angle is the one before times a ratio, in float32: a little worse than a float32 angle, and taken for one."""
    need_ggml()
    mode = ggml.NEOX if layout == "half" else ggml.NORMAL
    fn = with_axes(lambda x, at: ggml.rope_ext(x, at, width, mode, 10000.0), "bnhd")
    return fn, Rope(64, 10000.0, layout, width), {}


def ggml_sections() -> Any:
    """M-RoPE of Qwen2-VL; the fourth stream of positions, which no section follows, is zero as in llama.cpp."""
    need_ggml()
    rope = Rope(128, 1e6, "half", axes=Axes("sections", (16, 24, 24)))

    def fn(x: Any, at: Any) -> Any:
        return ggml.rope_multi(x, np.concatenate((at, 0 * at[:1])), 128, (16, 24, 24, 0), ggml.MROPE, 1e6)

    return with_axes(fn, "bnhd"), rope, {}


def ggml_four_axes() -> Any:
    """Interleaved M-RoPE as ggml has it: the pairs that are left when a section has ended follow a fourth axis."""
    need_ggml()
    sections = (24, 20, 20)
    axes = tuple(i % 3 if i < 3 * sections[i % 3] else 3 for i in range(64))
    fn = with_axes(lambda x, at: ggml.rope_multi(x, at, 128, (*sections, 0), ggml.IMROPE, 5e6), "bnhd")
    assert identify(fn, 128, axes=4).axes == axes
    return fn, Rope(128, 5e6, "half", axes=Axes("listed", axes)), {}


def fla_rotary() -> Any:
    """A module of flash-linear-attention: its kernels take their first configuration, since nothing can be measured."""
    from triton.runtime.autotuner import Autotuner

    Autotuner.do_bench = property(lambda self: lambda call, quantiles: [1.0] * len(quantiles))
    import fla.modules.rotary

    return fla.modules.rotary.rotary_embedding


def fla(layout: str, backward: bool) -> Any:
    """The Triton kernel, and the one of its backward pass, which is the same with another sign."""
    rope, kernel = Rope(64, 10000.0, layout, 48), fla_rotary()
    table = tables(rope, range(128))

    def apply(x: Any, at: Any) -> Any:
        return kernel(x, *(t[at] for t in table), interleaved=layout == "interleaved")

    fn = with_axes(from_torch(apply, **({"backward": "x"} if backward else {})), "bnhd")
    return fn, rope, {"max_position": 127, "backward": backward}


def paddle_rotation(layout: str, dtype: str, backward: bool) -> Any:
    """A plain function of Paddle's tensors; on a CPU it has no fused rotation, and does not multiply below float32."""
    import paddle

    theta = paddle.to_tensor(10000.0 ** -(np.arange(32) / 32))

    def fn(x: Any, at: Any) -> Any:
        angle = at.astype("float64").unsqueeze(-1) * theta
        cos, sin = (table.astype(x.dtype) for table in (angle.cos(), angle.sin()))
        a, b = x.chunk(2, axis=-1) if layout == "half" else (x[..., ::2], x[..., 1::2])
        y = a * cos - b * sin, b * cos + a * sin
        return paddle.concat(y, -1) if layout == "half" else paddle.stack(y, -1).reshape(x.shape)

    options = {"dtype": dtype_named(dtype), "max_position": 4095, "backward": backward}
    return from_paddle(fn, **({"backward": "x"} if backward else {})), Rope(64, 10000.0, layout), options


ROTATIONS = [
    rotary_embedding_torch, x_transformers, diffusers_flux, torchtune, onnxruntime, ggml_sections, ggml_four_axes,
    *(functools.partial(timm, half) for half in (False, True)),
    *(functools.partial(ggml_ext, *case) for case in (("half", 64), ("interleaved", 64), ("half", 32))),
    *(functools.partial(fla, layout, backward) for layout in ("half", "interleaved") for backward in (False, True)),
    *(functools.partial(paddle_rotation, *case) for case in (("half", "float64", False), ("interleaved", "float32", True))),
]  # fmt: skip


def named(make: Any) -> str:
    return make.__name__ if not isinstance(make, functools.partial) else f"{make.func.__name__} {make.args}"


@pytest.mark.parametrize("make", ROTATIONS, ids=named)
def test_rotation(make: Any) -> None:
    fn, rope, options = make()
    report = check_rotation(fn, rope, **options)
    assert report.verdict == "right", report


def test_kernels_that_are_slow_in_few_rows() -> None:
    """Liger's rotation, and flash-linear-attention's with an offset for each row of a batch, as in decoding."""
    kernel, x = fla_rotary(), np.random.default_rng(0).standard_normal((3, 2, 5, 64)).astype(np.float32)
    table, offsets = tables(PART, range(128)), np.array([0, 7, 100])
    turn = with_axes(from_torch(lambda x, at: kernel(x, *table, seqlen_offsets=at)), "bnhd")
    expected = rotate(x, (offsets[:, None] + np.arange(5))[:, None], PART)
    np.testing.assert_allclose(turn(x, offsets), expected, atol=1e-6)
    np.testing.assert_allclose(from_offset(turn)(x, np.arange(9, 14)), rotate(x, np.arange(9, 14), PART), atol=1e-6)
    from liger_kernel.ops.rope import LigerRopeFunction

    def apply(x: Any, at: Any) -> Any:
        cos, sin = (torch.cat((t, t), dim=-1)[None] for t in tables(HALF, at))
        return LigerRopeFunction.apply(x.clone(), x.clone(), cos, sin)[0]

    at = np.array([0, 1, 5, 7, 100])
    np.testing.assert_allclose(with_axes(from_torch(apply), "bhnd")(x[0], at), rotate(x[0], at, HALF), atol=1e-6)
