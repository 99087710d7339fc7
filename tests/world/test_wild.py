"""What docs/wild.md says of other people's software, row by row: each function returns what pyrope says of one case, and how
far off it is, and the test compares both with the page. `tox -e world` installs it all; what is missing is skipped."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
import types
import typing
from typing import Any

import ggml
import numpy as np
import pytest
from sources import alone, need_ggml, onnx_session, tables, taken

from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Rope, YaRN, check_rotation, cos_sin, rotate
from pyrope.oracle.adapters import from_jax, from_mlx, from_offset, from_sequential, from_torch, with_axes

torch = pytest.importorskip("torch", reason="needs the package torch: tox -e world")
pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = (pathlib.Path(__file__).parents[2] / "docs/wild.md").read_text("utf-8")
# Software, version, what it does, kind, how far off it is, and what pyrope says.
ROWS = re.findall(r"^\| ([^|]+?) ([\d.]+) \| (.+?) \| (\w+) \| (.+?) \| (.+?) \|$", PAGE, re.M)
HALF, INTERLEAVED = Rope(64, 10000.0, "half"), Rope(64, 10000.0, "interleaved")
YARN = Rope(64, 10000.0, "half", scaling=YaRN(8.0, 4096))
GPT_OSS = Rope(64, 150000.0, "half", scaling=YaRN(32.0, 4096, truncate=False))
SHORT, LONG = [1.0] * 32, [4.0] * 32
LISTS = Rope(64, 10000.0, "half", scaling=LongRoPE(SHORT, LONG, factor=32.0, original_length=4096))


def turning(theta: Any, factor: float = 1.0) -> Any:
    """The rotation by given frequencies."""

    def fn(x: Any, at: Any) -> Any:
        angle = at[:, None] * np.asarray(theta, np.float64)
        cos, sin = factor * np.cos(angle), factor * np.sin(angle)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)

    return fn


def tensors(axes: str, fn: Any) -> Any:
    """A function of torch's tensors with such axes."""
    return with_axes(from_torch(fn), axes)


def judged(fn: Any, rope: Rope, position: int, **options: Any) -> tuple[str, str]:
    """What pyrope says of it, and the largest error at a position where x is all ones."""
    x, at = np.ones((1, rope.head_dim), np.float32), np.array([position])
    error = np.abs(fn(x, at) - rotate(x, at, rope)).max()
    return ", ".join(check_rotation(fn, rope, **options).faults), f"{error:.2g} at {position}"


def diffusers_kandinsky_5() -> Any:
    (apply,) = taken("diffusers.models.transformers.transformer_kandinsky", "apply_rotary")

    def rotated(x: Any, at: Any) -> Any:
        cos, sin = tables(INTERLEAVED, at)
        return apply(x, torch.stack((cos, -sin, sin, cos), -1).reshape(1, len(at), 1, 32, 2, 2)).type_as(x)

    return judged(tensors("bnhd", rotated), INTERLEAVED, 1)


def diffusers_ernie_image() -> Any:
    (apply,) = taken("diffusers.models.transformers.transformer_ernie_image", "apply_rotary_emb")
    theta = 10000.0 ** -(torch.arange(32) / 32).double()

    def rotated(x: Any, at: Any) -> Any:
        return apply(x, (at[:, None] * theta).repeat_interleave(2, 1)[None, :, None].float())

    return judged(tensors("bnhd", rotated), HALF, 1)


def easydel() -> Any:
    """Its functions that make tables and frequencies, and the module of those that they call."""
    parts = alone("easydel.layers.rotary._compute_fns")
    given = {"ejit": lambda **_: lambda fn: fn, "tp": typing, **vars(parts)}
    return *taken("easydel.layers.rotary._rotary", "get_frequencies", "get_inv_frequencies", **given), parts


def easydel_tables(base: float, **scaling: Any) -> Any:
    tables, _, parts = easydel()
    table = tables(64, 64, 131072, base, rope_scaling=scaling)
    return with_axes(from_jax(lambda x, at: parts.apply_basic_rope(x, x, at[None], table, 64, True)[0]), "bnhd")


def easydel_llama_3() -> Any:
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    fn = easydel_tables(500000.0, rope_type="llama3", factor=8.0, **llama3)
    rope = Rope(64, 500000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192))
    return judged(fn, rope, 12000)


def easydel_attention_factor() -> Any:
    yarn = {"original_max_position_embeddings": 4096, "attention_factor": 1.0}
    fn = easydel_tables(10000.0, rope_type="yarn", factor=8.0, **yarn)
    rope = Rope(64, 10000.0, "half", scaling=YaRN(8.0, 4096, attention_factor=1.0))
    return judged(fn, rope, 0, max_position=8191)


def easydel_frequencies() -> Any:
    theta = easydel()[1](64, 64, 4096, 10000.0, rope_scaling={"rope_type": "linear", "factor": 4.0})
    return judged(turning(theta), Rope(64, 10000.0, "half", scaling=Linear(4.0)), 1)


def equinox() -> Any:
    import equinox
    from equinox.nn._embedding import internal_rope_embedding_cache

    internal_rope_embedding_cache.clear()  # of what other tests have left
    for base in (10000.0, 500000.0):
        fn = from_sequential(with_axes(from_jax(equinox.nn.RotaryPositionalEmbedding(64, theta=base)), "nd"))
        fn(np.ones((1, 1, 8, 64), np.float32), np.arange(8))
    return judged(fn, Rope(64, 500000.0, "half"), 7, max_position=7)


def esm() -> Any:
    from einops import rearrange, repeat

    names = "apply_rotary_emb_torch", "rotate_half"
    apply, _ = taken("esm.layers.rotary", *names, rearrange=rearrange, repeat=repeat)
    return judged(tensors("bnhd", lambda x, at: apply(x, *tables(INTERLEAVED, at), interleaved=True)), INTERLEAVED, 1)


EXLLAMA = {"head_dim": 64, "partial_rotary_factor": 1.0, "scale_alpha_value": 1.0}


def exllamav2_yarn() -> Any:
    (parameters,) = taken("exllamav2.rope", "get_rope_params_yarn")
    yarn = {"max_seq_len": 32768, "yarn_rope_original_max_position_embeddings": 4096, "yarn_rope_factor": 8.0}
    return judged(turning(*parameters("cpu", types.SimpleNamespace(**EXLLAMA, **yarn), 10000.0)), YARN, 4095)


def exllamav2_longrope() -> Any:
    (parameters,) = taken("exllamav2.rope", "get_rope_params_su")
    lists = {"max_seq_len": 4096, "original_max_seq_len": 4096, "scale_short_factor": SHORT, "scale_long_factor": LONG}
    return judged(turning(*parameters("cpu", types.SimpleNamespace(**EXLLAMA, **lists), 10000.0)), LISTS.at(4096), 0)


def fish_speech() -> Any:
    make, apply = taken("fish_speech.models.text2semantic.llama", "precompute_freqs_cis", "apply_rotary_emb")
    table = make(8192, 64)
    fn = tensors("bnhd", lambda x, at: apply(x, table[at]))
    return judged(fn, INTERLEAVED, 4095, max_position=8191)


def ggml_yarn() -> Any:
    need_ggml()
    yarn = {"length": 4096, "scale": 1 / 32, "extrapolated": 1.0}
    fn = with_axes(lambda x, at: ggml.rope_ext(x, at, 64, ggml.NEOX, 150000.0, **yarn), "bnhd")
    return judged(fn, GPT_OSS, 4095)


def ggml_interleaved_m_rope() -> Any:
    need_ggml()

    def rotated(x: Any, at: Any) -> Any:  # the fourth stream is zero, as in llama.cpp
        return ggml.rope_multi(x, np.concatenate((at, 0 * at[:1])), 128, (24, 20, 20, 0), ggml.IMROPE, 5e6)

    rope = Rope(128, 5e6, "half", axes=Axes("interleaved", (24, 20, 20)))
    report = check_rotation(with_axes(rotated, "bnhd"), rope)
    assert "61, 62" in str(report), report
    return report.faults[0], "2 pairs of 64"


def ibm_fms(factor: float, **options: Any) -> Any:
    _, cls = taken("fms.modules.positions", "PositionEncoder", "CachedYarnRotaryEmbedding", MutableMapping=dict)
    module = cls(64, 4096, 10000.0, factor, **options)
    module.compute_freqs_cis(torch.device("cpu"), 8192)
    return tensors("bnhd", lambda x, at: module.adjusted_qk(x, x, at[None].expand(len(x), -1))[0])


def ibm_fms_yarn() -> Any:
    rope = Rope(64, 10000.0, "interleaved", scaling=YaRN(8.0, 4096, attention_factor=1.0))
    return judged(ibm_fms(8.0, llama_4_scaling_beta=0.0), rope, 4095, max_position=8191)


def ibm_fms_queries() -> Any:
    return judged(ibm_fms(1.0), INTERLEAVED, 4096, max_position=8191)


def keras_layers() -> Any:
    import keras

    given = {"keras": keras, "ops": keras.ops, "keras_hub_export": lambda *names: lambda cls: cls}
    (plain,) = taken("keras_hub.src.layers.modeling.rotary_embedding", "RotaryEmbedding", **given)
    file, name = "keras_hub.src.models.llama.llama_rotary_embedding", "LlamaRotaryEmbedding"
    return plain, *taken(file, name, RotaryEmbedding=plain, **given)


def keras_hub_llama() -> Any:
    module = keras_layers()[1](position_scaling_factor=4.0)
    fn = tensors("bnhd", lambda x, at: module(x, positions=at))
    return judged(fn, Rope(64, 10000.0, "half", scaling=Linear(4.0)), 1)


def keras_hub_dynamic() -> Any:
    module = keras_layers()[0](rope_type="dynamic", scaling_factor=4.0)
    fn = tensors("bnhd", lambda x, at: module(x, positions=at))
    return judged(fn, Rope(64, 10000.0 * 4.0 ** (64 / 62), "half"), 1)


def liger_kernel() -> Any:
    from liger_kernel.ops.llama4_rope import LigerLlama4RopeFunction

    at, x = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]]), torch.ones(2, 4, 2, 64)
    turns = torch.polar(torch.ones(2, 4, 32), at[..., None] * 10000.0 ** (-torch.arange(32) / 32))
    y, _ = LigerLlama4RopeFunction.apply(x.clone(), x.clone(), turns)
    error = np.abs(y[1, 0, 0].numpy() - rotate(np.ones((1, 64)), [10], INTERLEAVED)).max()
    return "row 0 = row 1" if (y[0] == y[1]).all() else "", f"{error:.2g} at 10"


def litgpt() -> Any:
    build, apply, _ = taken("litgpt.model", "build_rope_cache", "apply_rope", "yarn_get_mscale")
    yarn = {"factor": 8.0, "beta_fast": 32, "beta_slow": 1, "original_max_seq_len": 4096, "mscale": 1.0}
    cos, sin = build(8192, 64, extra_config=yarn)
    fn = tensors("bhnd", lambda x, at: apply(x, cos[at][None], sin[at][None]))
    return judged(fn, YARN, 1, max_position=8191)


def megatron_core() -> Any:
    names = ("apply_rotary_pos_emb_with_cos_sin", "_apply_rotary_pos_emb_bshd", "_rotate_half")
    apply, *_ = taken("megatron.core.models.common.embeddings.rope_utils", *names, apply_rotary_emb_flash=None)
    fn = tensors("nbhd", lambda x, at: apply(x, *tables(HALF, at)))
    says, off = judged(fn, HALF, 0, max_position=63)
    return "wrong" if "turned at position 0" in says else says, off


def mlx_lm(base: float, **scaling: Any) -> Any:
    from mlx_lm.models.rope_utils import initialize_rope

    module = initialize_rope(64, base, False, {"original_max_position_embeddings": 4096, **scaling}, 131072)
    return from_offset(with_axes(from_mlx(lambda x, offset: module(x, int(offset))), "bhnd"))


def mlx_lm_truncate() -> Any:
    return judged(mlx_lm(150000.0, rope_type="yarn", factor=32.0, truncate=False), GPT_OSS, 4095, max_position=8191)


def mlx_lm_attention_factor() -> Any:
    rope = Rope(64, 10000.0, "half", scaling=YaRN(4.0, 4096, attention_factor=1.0))
    return judged(mlx_lm(10000.0, rope_type="yarn", factor=4.0, attention_factor=1.0), rope, 0, max_position=8191)


def mlx_lm_longrope() -> Any:
    fn = mlx_lm(10000.0, rope_type="longrope", short_factor=SHORT, long_factor=LONG)
    return judged(fn, LISTS.at(4096), 1)


def olmo_core() -> Any:
    given = {"RoPEScalingConfig": object, "dataclass": dataclasses.dataclass, "ClassVar": typing.ClassVar}
    config, _ = taken("olmo_core.nn.rope", "YaRNRoPEScalingConfig", "compute_inv_freqs", **given)
    fn = turning(*config(factor=8.0, old_context_len=131072).compute_scaled_inv_freq(10000, 64, "cpu"))
    return judged(fn, Rope(64, 10000.0, "half", scaling=YaRN(8.0, 131072)), 4095)


def onnxruntime() -> Any:
    from onnx.helper import make_node

    names = ["q", "k", "v", "", "", "past", "total", "cos", "sin", "position_ids"]
    heads = {"num_heads": 2, "kv_num_heads": 2, "do_rotary": 1}
    node = make_node("GroupQueryAttention", names, ["y", "keys", "values"], domain="com.microsoft", **heads)
    rng, (cos, sin) = np.random.default_rng(0), cos_sin(range(256), Rope(16, 10000.0, "half"), np.float32)
    feeds = {name: rng.standard_normal((1, 4, 32)).astype(np.float32) for name in "qkv"}
    feeds |= {"past": np.array([3], np.int32), "total": np.array(4, np.int32), "cos": cos, "sin": sin}
    feeds["position_ids"] = np.array([[0, 1, 2, 3]])
    inputs = {name: (array.dtype, array.shape) for name, array in feeds.items()}
    session = onnx_session(node, inputs, ["y", "keys", "values"])
    given = ([0, 1, 2, 3], [0, 7, 9, 100])
    one, other = (session.run(None, feeds | {"position_ids": np.array([at])})[0] for at in given)
    return "equal bits" if (one == other).all() else "", "as 0, 1, 2, 3"


def rotary_embedding_torch() -> Any:
    import ml_dtypes
    import rotary_embedding_torch

    module = rotary_embedding_torch.RotaryEmbedding(64, cache_if_possible=False)
    fn = from_sequential(with_axes(from_torch(module.rotate_queries_or_keys), "bhnd"))
    x = np.ones((1, 258, 64), ml_dtypes.bfloat16)
    error = np.abs(fn(x, np.arange(258)) - rotate(x, range(258), INTERLEAVED))[0, 257].astype(np.float32).max()
    report = check_rotation(fn, INTERLEAVED, dtype=ml_dtypes.bfloat16, max_position=4095)
    return ", ".join(report.faults), f"{error:.2g} at 257"


def sglang_phi_3() -> Any:
    (half,) = taken("sglang.srt.layers.rotary_embedding.utils", "rotate_neox")
    variants = "sglang.srt.layers.rotary_embedding.rope_variant"
    (phi3,) = taken(variants, "Phi3LongRoPEScaledRotaryEmbedding", rotate_neox=half)
    module = phi3(64, 64, 131072, 4096, 10000, True, torch.float32, SHORT, LONG)
    fn = tensors("n(hd)", lambda x, at: module(at, x, x)[0])
    return judged(fn, LISTS.at(4097), 4096, max_position=8191)


def sglang_linear() -> Any:
    settings = types.SimpleNamespace(SGLANG_ROPE_CACHE_ALIGN=types.SimpleNamespace(get=lambda: 128))
    methods = ("_ensure_cos_sin_cache_length", "_compute_inv_freq", "_compute_cos_sin_cache")
    grow, theta, make = taken("sglang.srt.layers.rotary_embedding.base", *methods, envs=settings)
    module = types.SimpleNamespace(base=10000, rotary_dim=64, position_start=0, max_position_embeddings=1024)
    module._force_native, module.scaling_factors = False, [4.0]
    module._compute_inv_freq = lambda base: theta(module, base)
    module.cos_sin_cache = make(module)
    grow(module, 8191)

    def rotated(x: Any, at: Any) -> Any:
        cos, sin = module.cos_sin_cache[at].chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return judged(from_torch(rotated), Rope(64, 10000.0, "half", scaling=Linear(4.0)), 4096, max_position=8191)


def transformerengine() -> Any:
    names = ("nn", "arange", "einsum", "cat", "autocast", "float32")
    on_cpu = types.SimpleNamespace(**{name: getattr(torch, name) for name in names})
    on_cpu.cuda = types.SimpleNamespace(current_device=lambda: "cpu")
    (embedding,) = taken("transformer_engine.pytorch.attention.rope", "RotaryPositionEmbedding", torch=on_cpu)
    angles = embedding(64, seq_len_interpolation_factor=4)(2)[1, 0, 0, :32]  # at position 1
    return judged(turning(angles), Rope(64, 10000.0, "half", scaling=Linear(4.0)), 1)


def hugging(model_type: str, folder: str = "", **given: Any) -> tuple[Any, Any, Any]:
    """Of a model of transformers: its config, its class of tables, and the rotation by its parts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder = folder or model_type
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = CONFIG_MAPPING[model_type](**given)
    cls = next(one for name, one in vars(module).items() if re.fullmatch(r"(?!.*Vision)\w+RotaryEmbedding", name))
    embedding = cls(config)
    turn = tensors("bhnd", lambda x, at: module.apply_rotary_pos_emb(x, x, *embedding(x, at[..., None, :]))[0])
    return config, embedding, turn


def transformer_lens() -> Any:
    (resolve,) = taken("transformer_lens.model_bridge.sources.native.model", "_resolve_rope_scaling")
    config = types.SimpleNamespace(rotary_base=10000.0, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    rope = Rope(64, 10000.0, "half", scaling=DynamicNTK(4.0, 4096))
    return judged(turning(resolve(config, 64)[2]), rope.at(4096), 1)


def transformers_dbrx() -> Any:
    given = {"d_model": 256, "n_heads": 4, "attn_config": {"kv_n_heads": 4, "rope_theta": 500000}}
    rope = Rope.from_config({"model_type": "dbrx"} | given)
    assert rope.base == 500000.0
    return judged(hugging("dbrx", **given)[2], rope, 100)


def transformers_minimax_m3() -> Any:
    _, _, fn = hugging("minimax_m3_vl_text", "minimax_m3_vl", head_dim=64, rotary_dim=32)
    return judged(fn, Rope(64, 5000000.0, "half", rotary_dim=32), 1)


def transformers_dynamic_ntk() -> Any:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config, _, fn = hugging("llama", head_dim=64, rope_parameters=dynamic, max_position_embeddings=4096)
    return check_rotation(fn, Rope.from_config(config.to_dict()).at(16384)).faults[0], "after a long call"


def transformers_olmo_3() -> Any:
    given = {"hidden_size": 256, "num_attention_heads": 4, "rope_theta": 2000000.0}
    _, embedding, _ = hugging("olmo3", **given)
    rope = Rope.from_config({"model_type": "olmo3"} | given, layer_type="sliding_attention")
    assert rope.base == 2000000.0
    return judged(turning(embedding.sliding_attention_inv_freq), rope, 100)


def transformers_gemma_3() -> Any:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 1024}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": yarn | {"truncate": False}, "sliding_attention": plain}
    config, embedding, _ = hugging("gemma3_text", "gemma3", head_dim=64, rope_parameters=ropes)
    rope = Rope.from_config(config.to_dict(), layer_type="full_attention")
    assert rope.scaling == YaRN(8.0, 1024, truncate=False)
    return judged(turning(embedding.full_attention_inv_freq, embedding.full_attention_attention_scaling), rope, 100)


def transformers_hunyuan_vl() -> Any:
    parameters = {"rope_type": "default", "mrope_section": [2, 2, 2, 2]}
    config, _, fn = hugging("hunyuan_vl_text", "hunyuan_vl", head_dim=16, rope_parameters=parameters)
    with pytest.raises(ValueError, match="which is no rotation"):
        Rope.from_config(config.to_dict())
    matrix = fn(np.eye(16, dtype=np.float32), np.tile([[5], [1], [7], [3]], 16))
    return "R·Rᵀ ≠ 1", f"{np.abs(matrix @ matrix.T - np.eye(16)).max():.2g} in R·Rᵀ"


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_it_still_shows(row: Any) -> None:
    software, _, _, _, off, says = row
    assert globals()[re.sub(r"\W+", "_", software.lower())]() == (says, off)
