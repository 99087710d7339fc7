"""Other people's software that is not in the environment of the peers: right as it should be, or with the defect that
docs/wild.md lists. `tox -e world` installs it; a package that is missing is skipped."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its kernels then run on the CPU

import importlib  # noqa: E402
import importlib.util  # noqa: E402
import sys  # noqa: E402
import types  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

torch = pytest.importorskip("torch", reason="needs the package torch: tox -e world")

from pyrope import Axes, Rope, YaRN, check_rotation, cos_sin, identify, rotate  # noqa: E402
from pyrope.oracle.adapters import from_torch, with_axes  # noqa: E402

HALF, INTERLEAVED = Rope(64, 10000.0, "half"), Rope(64, 10000.0, "interleaved")


def doubled(positions: Any) -> Any:
    """Tables (n, d) of float32, each half the same, as functions of the form of GPT-NeoX take them."""
    return [
        torch.tensor(np.concatenate((t, t), axis=-1), dtype=torch.float32) for t in cos_sin(positions.numpy(), HALF)
    ]


def alone(patch: pytest.MonkeyPatch, name: str) -> Any:
    """A module without its packages' own imports: those of timm and torchtune need torchvision and torchao, whose
    compiled parts do not load beside a torch for the CPU."""
    packages = name.split(".")[:-1]
    for depth in range(1, len(packages) + 1):
        package = ".".join(packages[:depth])
        found = importlib.util.find_spec(package)
        if found is None:
            pytest.skip(f"needs the package {package}: tox -e world")
        patch.setitem(sys.modules, package, bare := types.ModuleType(package))
        bare.__path__ = list(found.submodule_search_locations or ())
    patch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def test_rotary_embedding_torch() -> None:
    package = pytest.importorskip("rotary_embedding_torch")
    module = package.RotaryEmbedding(32, cache_if_possible=False)
    fn = with_axes(from_torch(lambda x, at: package.apply_rotary_emb(module(at.float()), x)), "bhnd")
    assert check_rotation(fn, Rope(64, 10000.0, "interleaved", 32)).verdict == "right"


def test_x_transformers() -> None:
    package = pytest.importorskip("x_transformers.x_transformers")
    module = package.RotaryEmbedding(64)
    fn = with_axes(from_torch(lambda x, at: package.apply_rotary_pos_emb(x, *module(at))), "bhnd")
    assert check_rotation(fn, INTERLEAVED).verdict == "right"


def test_diffusers_flux() -> None:
    """A block of features for each axis, each with a series of its own."""
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    module = flux.FluxPosEmbed(10000, [16, 24, 24])
    fn = with_axes(from_torch(lambda x, at: embeddings.apply_rotary_emb(x, module(at.T.float()))), "bhnd")
    rope = Rope(64, 10000.0, "interleaved", axes=Axes("sections", (8, 12, 12), series="own"))
    assert check_rotation(fn, rope).verdict == "right"


@pytest.mark.parametrize("half", [False, True])
def test_timm(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    """The rotation of EVA and its like: rows turn the first half of the pairs, columns the second, each with a series of its own."""
    timm, side = alone(monkeypatch, "timm.layers.pos_embed_sincos"), 64
    sin, cos = timm.build_rotary_pos_embed([side, side], dim=64, in_pixels=False, rotate_half=half)

    def apply(x: Any, at: Any) -> Any:
        rows = at[0] * side + at[1]
        return timm.apply_rot_embed(x, sin[rows], cos[rows], half=half)

    fn, layout = with_axes(from_torch(apply), "bhnd"), "half" if half else "interleaved"
    assert check_rotation(fn, Rope(64, 10000.0, layout, axes=Axes("axial")), max_position=side - 1).verdict == "right"
    assert identify(fn, 64, max_position=side - 1, axes=2).axes == (0,) * 16 + (1,) * 16
    shared = Rope(64, 10000.0, layout, axes=Axes("sections", (16, 16)))
    assert check_rotation(fn, shared, max_position=side - 1).verdict == "wrong"


def test_torchtune(monkeypatch: pytest.MonkeyPatch) -> None:
    module = alone(monkeypatch, "torchtune.modules.position_embeddings")
    rotary = module.RotaryPositionalEmbeddings(64, max_seq_len=4096)
    fn = with_axes(from_torch(lambda x, at: rotary(x, input_pos=at[None])), "bnhd")
    assert check_rotation(fn, INTERLEAVED, max_position=4095).verdict == "right"


def test_liger_rope() -> None:
    """The Triton kernel, interpreted: a few rows, since each call takes long."""
    ops = pytest.importorskip("liger_kernel.ops.rope")
    at, x = np.array([0, 1, 5, 7, 100]), np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)

    def apply(x: Any, at: Any) -> Any:
        cos, sin = (table[None] for table in doubled(at))
        return ops.LigerRopeFunction.apply(x.clone(), x.clone(), cos, sin)[0]

    y = with_axes(from_torch(apply), "bhnd")(x, at)
    np.testing.assert_allclose(y, rotate(x, at, HALF), atol=1e-6)


def test_liger_llama4_takes_the_first_rows_positions() -> None:
    """liger-kernel 0.8.5: all rows of a batch are turned by the table of its first row."""
    ops = pytest.importorskip("liger_kernel.ops.llama4_rope")
    b, n, h, d = 2, 4, 2, 16
    q = torch.randn(b, n, h, d, generator=torch.Generator().manual_seed(0))
    at = torch.stack((torch.arange(n), torch.arange(n) + 10))
    turns = torch.polar(torch.ones(b, n, d // 2), at[..., None] * 10000.0 ** (-torch.arange(d // 2) / (d // 2)))
    y, _ = ops.LigerLlama4RopeFunction.apply(q.clone(), q.clone(), turns)

    def turned(by: Any) -> Any:
        return torch.view_as_real(torch.view_as_complex(q.reshape(b, n, h, -1, 2)) * by[:, :, None]).reshape(q.shape)

    assert (y[0] - turned(turns)[0]).abs().max() < 1e-5 and (y[1] - turned(turns)[1]).abs().max() > 1
    assert (y - turned(turns[:1])).abs().max() < 1e-5


def test_megatron_takes_the_cosine_of_a_cosine() -> None:
    """megatron-core 0.16.1 without flash-attn: tables of cosines and sines are taken for angles."""
    utils = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")

    def apply(x: Any, at: Any) -> Any:
        tables = (torch.tensor(table, dtype=torch.float32) for table in cos_sin(at.numpy(), HALF))
        return utils.apply_rotary_pos_emb_with_cos_sin(x, *tables)

    fn = with_axes(from_torch(apply), "nbhd")
    x = np.ones((1, 1, 64), np.float32)
    assert np.abs(fn(x, np.array([0])) - x).max() > 0.4
    report = check_rotation(fn, HALF, max_position=63)
    assert report.verdict == "wrong", report


def session(node: Any, inputs: dict[str, tuple[Any, list[Any]]], outputs: list[str]) -> Any:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper = onnx.helper
    values = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "graph", values, results), opset_imports=opsets, ir_version=10)
    return runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_onnxruntime_rotary_embedding() -> None:
    onnx = pytest.importorskip("onnx")
    kind = onnx.TensorProto
    node = onnx.helper.make_node("RotaryEmbedding", ["x", "at", "cos", "sin"], ["y"], domain="com.microsoft")
    table = (kind.FLOAT, [8192, 32])
    inputs = {"x": (kind.FLOAT, ["b", "h", "n", 64]), "at": (kind.INT64, ["b", "n"]), "cos": table, "sin": table}
    run = session(node, inputs, ["y"])
    cos, sin = cos_sin(range(8192), HALF, np.float32)

    def fn(x: Any, at: Any) -> Any:
        return run.run(None, {"x": x, "at": np.repeat(at[None], len(x), 0), "cos": cos, "sin": sin})[0]

    assert check_rotation(with_axes(fn, "bhnd"), HALF, max_position=8191).verdict == "right"


def test_onnxruntime_ignores_the_positions_of_a_prompt() -> None:
    """onnxruntime 1.31.1, GroupQueryAttention with do_rotary: any position_ids give what 0, 1, 2, … give."""
    onnx = pytest.importorskip("onnx")
    kind, (n, h, d) = onnx.TensorProto, (4, 2, 16)
    names = ["q", "k", "v", "", "", "past", "total", "cos", "sin", "at"]
    more = {"num_heads": h, "kv_num_heads": h, "do_rotary": 1}
    node = onnx.helper.make_node("GroupQueryAttention", names, ["y", "k2", "v2"], domain="com.microsoft", **more)
    inputs: dict[str, tuple[Any, list[Any]]] = {name: (kind.FLOAT, [1, n, h * d]) for name in "qkv"}
    inputs |= {"past": (kind.INT32, [1]), "total": (kind.INT32, []), "at": (kind.INT64, [1, n])}
    inputs |= dict.fromkeys(("cos", "sin"), (kind.FLOAT, [256, d // 2]))
    rng, rope = np.random.default_rng(0), Rope(d, 10000.0, "half")
    cos, sin = cos_sin(range(256), rope, np.float32)
    feeds = {name: rng.standard_normal((1, n, h * d)).astype(np.float32) for name in "qkv"}
    feeds |= {"past": np.array([n - 1], np.int32), "total": np.array(n, np.int32), "cos": cos, "sin": sin}
    run = session(node, inputs, ["y", "k2", "v2"])
    one, other = (run.run(None, feeds | {"at": np.array([at])})[0] for at in ([0, 1, 2, 3], [0, 7, 9, 100]))
    assert (one == other).all()


@pytest.fixture
def ggml() -> Any:
    import ggml

    if not ggml.library("cpu").exists():
        pytest.skip("ggml is not built here: python tests/world/ggml.py builds it, or says why not")
    return ggml


@pytest.mark.parametrize(("layout", "width"), [("half", 64), ("interleaved", 64), ("half", 32)])
def test_ggml_rope_ext(ggml: Any, layout: str, width: int) -> None:
    """Each angle is the one before times a ratio, in float32: a little worse than a float32 angle, and taken for one."""
    mode = ggml.NEOX if layout == "half" else ggml.NORMAL
    fn = with_axes(lambda x, at: ggml.rope_ext(x, at, width, mode, 10000.0), "bnhd")
    report = check_rotation(fn, Rope(64, 10000.0, layout, width))
    assert report.verdict == "right", report
    assert check_rotation(fn, Rope(64, 500000.0, layout, width)).faults == ("wrong base",)


def test_ggml_yarn_always_truncates(ggml: Any) -> None:
    """ggml 0.25.3: the ends of YaRN's ramp are whole pairs, as with "truncate": true; gpt-oss has false."""
    options = {"length": 4096, "scale": 1 / 32, "extrapolated": 1.0, "fast": 32.0, "slow": 1.0}
    fn = with_axes(lambda x, at: ggml.rope_ext(x, at, 64, ggml.NEOX, 150000.0, **options), "bnhd")
    rope = Rope(64, 150000.0, "half", scaling=YaRN(32.0, 4096))
    assert check_rotation(fn, rope).verdict == "right"
    whole = Rope(64, 150000.0, "half", scaling=YaRN(32.0, 4096, truncate=False))
    assert check_rotation(fn, whole).verdict == "wrong"


def test_ggml_sections(ggml: Any) -> None:
    """M-RoPE of Qwen2-VL; the fourth stream of positions, which no section follows, is zero as in llama.cpp."""
    sections, rope = (16, 24, 24), Rope(128, 1000000.0, "half", axes=Axes("sections", (16, 24, 24)))
    fn = with_axes(lambda x, at: ggml.rope_multi(x, zero_last(at), 128, (*sections, 0), ggml.MROPE, 1e6), "bnhd")
    assert check_rotation(fn, rope).verdict == "right"


def test_ggml_imrope_leaves_pairs_still(ggml: Any) -> None:
    """ggml 0.25.3: the pairs that are left when a section has ended follow the fourth stream, which llama.cpp keeps at
    zero; in Qwen3-VL they turn with time."""
    sections, base = (24, 20, 20), 5000000.0
    fn = with_axes(lambda x, at: ggml.rope_multi(x, at, 128, (*sections, 0), ggml.IMROPE, base), "bnhd")
    three = lambda x, at: fn(x, zero_last(at))  # noqa: E731
    report = check_rotation(three, Rope(128, base, "half", axes=Axes("interleaved", sections)))
    assert report.verdict == "wrong" and report.faults[0] == "some pairs not turned"
    read = identify(three, 128, axes=3)
    assert "features 61, 62, 125, 126 do not turn" in " ".join(read.notes)
    # With a fourth axis it is a rope, and `identify` finds which.
    listed = tuple(i % 3 if i < 3 * sections[i % 3] else 3 for i in range(64))
    assert [i for i, axis in enumerate(listed) if axis == 3] == [61, 62] and identify(fn, 128, axes=4).axes == listed
    assert check_rotation(fn, Rope(128, base, "half", axes=Axes("listed", listed))).verdict == "right"


def zero_last(at: Any) -> Any:
    """Positions (4, n) of (3, n), the last all zero."""
    return np.concatenate((at, np.zeros_like(at[:1])))
