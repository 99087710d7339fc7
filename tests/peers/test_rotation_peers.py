"""`pyrope.rotate` against the rotary embeddings of Hugging Face transformers: their tables and their functions.

Three measures. In float32, with their own tables, they may be off by what `peer_bounds` derives, at positions up to
4096. With float64 tables in place of theirs, both sides agree to 1e-12, so what differs is the tables alone. In
bfloat16, tables and products are rounded as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs Hugging Face transformers")

from peer_bounds import SECOND_ORDER, U32, float32_bound, pair_errors  # noqa: E402
from transformers import (  # noqa: E402
    DeepseekV3Config,
    GPTNeoXConfig,
    LlamaConfig,
    NanoChatConfig,
    PixtralVisionConfig,
    Qwen2_5_VLTextConfig,
    Qwen2VLTextConfig,
    Qwen3VLTextConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3  # noqa: E402
from transformers.models.gpt_neox import modeling_gpt_neox  # noqa: E402
from transformers.models.gptj import modeling_gptj  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402
from transformers.models.nanochat import modeling_nanochat  # noqa: E402
from transformers.models.pixtral import modeling_pixtral  # noqa: E402
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl  # noqa: E402
from transformers.models.qwen2_vl import modeling_qwen2_vl  # noqa: E402
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig  # noqa: E402
from transformers.models.qwen3_vl import modeling_qwen3_vl  # noqa: E402
from transformers.models.roformer import modeling_roformer  # noqa: E402

import pyrope  # noqa: E402
from pyrope import Axes, Linear, Rope, YaRN  # noqa: E402

LENGTH = 4096
POSITIONS = np.array([0, 1, 2, 3, 17, 100, 511, 1023, 2048, 3071, 4000, LENGTH - 1])
HEADS = 3


class Tables(NamedTuple):
    """cos and sin (b, n, …) as the module under comparison wants them."""

    cos: Any
    sin: Any


def vectors(rope: Rope, n: int = len(POSITIONS)) -> Any:
    """Queries (b, h, n, d), dense and random, in float32."""
    return np.random.default_rng(0).standard_normal((1, HEADS, n, rope.head_dim)).astype(np.float32)


def doubled(rope: Rope, positions: Any) -> Tables:
    """Exact float64 tables as most modules want them: (b, n, 2p), the p columns twice."""
    return Tables(*(torch.tensor(np.concatenate((t, t), -1))[None] for t in pyrope.cos_sin(rope, positions)))


def assert_agrees_in_float32(theirs: Any, x: Any, positions: Any, rope: Rope) -> None:
    """A float32 result against the exact one, and pyrope's own float32 result against that too."""
    exact = pyrope.rotate(x.astype(np.float64), positions, rope)
    theirs = theirs.numpy()
    assert theirs.dtype == np.float32
    assert theirs.shape == exact.shape
    bound = float32_bound(x, positions, rope)
    assert (np.abs(theirs - exact) <= bound).all()
    assert (np.abs(exact - x) > 100 * bound).any()  # the bound tells a rotation from none
    ours = pyrope.rotate(x, positions, rope)
    assert ours.dtype == np.float32
    assert (np.abs(ours - exact) <= rounding(x, positions, rope, U32, exact)).all()


def assert_agrees_in_float64(theirs: Any, x: Any, positions: Any, rope: Rope) -> None:
    theirs = theirs.numpy()
    assert theirs.dtype == np.float64
    assert np.abs(theirs - pyrope.rotate(x.astype(np.float64), positions, rope)).max() < 1e-12


def rounding(x: Any, positions: Any, rope: Rope, u: float, out: Any) -> Any:
    """2u(|x·cos| + |y·sin|) + u|out|: tables and products rounded to unit roundoff u; 0 where nothing turns."""
    sums = pair_errors(x, positions, rope).sums
    bound, turned = np.zeros(x.shape), slice(rope.start, rope.start + rope.width)
    bound[..., turned] = (2 * u * sums + u * np.abs(out[..., turned])) * SECOND_ORDER
    return bound


class Peer:
    """A rotary embedding of theirs: the rope that it means, its own float32 tables, and its rotation by any tables."""

    rope: Rope

    def tables(self, dtype: Any) -> Tables:
        raise NotImplementedError

    def exact(self) -> Tables:
        return doubled(self.forward_rope, POSITIONS)

    def turn(self, x: Any, tables: Tables) -> Any:
        raise NotImplementedError

    @property
    def forward_rope(self) -> Rope:
        """The rope of the tables: a module that turns backwards does so in its function."""
        return Rope(
            self.rope.head_dim, self.rope.base, self.rope.layout, self.rope.rotary_dim, scaling=self.rope.scaling
        )


def modern(module: Any, config: Any, name: str, function: str = "apply_rotary_pos_emb") -> Peer:
    """Modules with a class XRotaryEmbedding and a function of queries, keys, cos and sin."""

    class Modern(Peer):
        rope = Rope.from_config(config.to_dict())

        def tables(self, dtype: Any) -> Tables:
            embedding = getattr(module, name)(config)
            return Tables(*embedding(torch.zeros(1, dtype=dtype), torch.tensor(POSITIONS)[None]))

        def turn(self, x: Any, tables: Tables) -> Any:
            still = self.rope.head_dim - self.rope.width if self.rope.placement == "suffix" else 0
            q, k = getattr(module, function)(x[..., still:], 2 * x[..., still:], *tables)
            assert torch.equal(k, 2 * q)
            return torch.cat((x[..., :still], q), -1)

    return Modern()


class GPTJ(Peer):
    """Tables made once, sin before cos; (b, n, h, d); the first 16 of 32 features, as its attention cuts them."""

    rope = Rope.from_config({"model_type": "gptj", "n_embd": 128, "n_head": 4, "rotary_dim": 16})

    def tables(self, dtype: Any) -> Tables:
        table = modeling_gptj.create_sinusoidal_positions(LENGTH, self.rope.width)[POSITIONS][None].to(dtype)
        sin, cos = table.chunk(2, -1)
        return Tables(cos, sin)

    def exact(self) -> Tables:
        return Tables(*(torch.tensor(t)[None] for t in pyrope.cos_sin(self.rope, POSITIONS)))

    def turn(self, x: Any, tables: Tables) -> Any:
        turned = x[..., : self.rope.width].transpose(1, 2)
        turned = modeling_gptj.apply_rotary_pos_emb(turned, tables.sin, tables.cos).transpose(1, 2)
        return torch.cat((turned, x[..., self.rope.width :]), -1)


class RoFormer(Peer):
    """The model that RoPE comes from: a table of sin and cos side by side, computed in float64 and rounded."""

    rope = Rope.from_config({"model_type": "roformer", "hidden_size": 64, "num_attention_heads": 2})

    def tables(self, dtype: Any) -> Tables:
        table = modeling_roformer.RoFormerSinusoidalPositionalEmbedding(LENGTH, self.rope.head_dim)
        sin, cos = table.create_weight()[POSITIONS][None].to(dtype).chunk(2, -1)
        return Tables(cos, sin)

    def exact(self) -> Tables:
        return Tables(*(torch.tensor(t)[None] for t in pyrope.cos_sin(self.rope, POSITIONS)))

    def turn(self, x: Any, tables: Tables) -> Any:
        table = torch.cat((tables.sin, tables.cos), -1)[:, None]
        return modeling_roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(table, x, x)[0]


SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 512}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 512}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LATENT: dict[str, Any] = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "rope_theta": 10000.0}

PEERS = {
    "llama": modern(modeling_llama, LlamaConfig(**SIZES, rope_theta=500000.0), "LlamaRotaryEmbedding"),
    "llama-linear": modern(
        modeling_llama,
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}),
        "LlamaRotaryEmbedding",
    ),
    "llama-yarn": modern(modeling_llama, LlamaConfig(**SIZES, rope_parameters=dict(_YARN)), "LlamaRotaryEmbedding"),
    "llama-llama3": modern(modeling_llama, LlamaConfig(**SIZES, rope_parameters=dict(_LLAMA3)), "LlamaRotaryEmbedding"),
    "gpt_neox": modern(modeling_gpt_neox, GPTNeoXConfig(**SIZES, rotary_pct=0.25), "GPTNeoXRotaryEmbedding"),
    "gptj": GPTJ(),
    "roformer": RoFormer(),
    "deepseek_v3": modern(
        modeling_deepseek_v3,
        DeepseekV3Config(**SIZES, **_LATENT),
        "DeepseekV3RotaryEmbedding",
        "apply_rotary_pos_emb_interleave",
    ),
    "nanochat": modern(modeling_nanochat, NanoChatConfig(**SIZES), "NanoChatRotaryEmbedding"),
}


def test_the_peers_are_what_they_are_meant_to_be() -> None:
    """Every layout, placement and direction is among them."""
    assert {peer.rope.layout for peer in PEERS.values()} == {"half", "interleaved", "interleaved-to-half"}
    assert (PEERS["gpt_neox"].rope.width, PEERS["gpt_neox"].rope.head_dim) == (16, 64)
    assert (PEERS["gptj"].rope.width, PEERS["gptj"].rope.head_dim) == (16, 32)
    assert (PEERS["deepseek_v3"].rope.width, PEERS["deepseek_v3"].rope.placement) == (32, "suffix")
    assert PEERS["nanochat"].rope.direction == -1
    assert isinstance(PEERS["llama-yarn"].rope.scaling, YaRN)
    assert isinstance(PEERS["llama-linear"].rope.scaling, Linear)


@pytest.mark.parametrize("name", PEERS)
def test_float32(name: str) -> None:
    """Their float32 tables and function, at positions up to 4096, within the derived bound of the exact rotation."""
    peer = PEERS[name]
    x = vectors(peer.rope)
    assert_agrees_in_float32(peer.turn(torch.tensor(x), peer.tables(torch.float32)), x, POSITIONS, peer.rope)


@pytest.mark.parametrize("name", PEERS)
def test_float64_tables(name: str) -> None:
    """Their function with exact float64 tables in place of theirs agrees to 1e-12."""
    peer = PEERS[name]
    x = vectors(peer.rope)
    assert_agrees_in_float64(peer.turn(torch.tensor(x, dtype=torch.float64), peer.exact()), x, POSITIONS, peer.rope)


@pytest.mark.parametrize("name", PEERS)
def test_bfloat16(name: str) -> None:
    """All in bfloat16, theirs is within 2u(|x·cos| + |y·sin|) + u|out| of the exact rotation, ours within u|out|.

    u = 2⁻⁸; their tables were float32 before, so the error of a float32 angle comes in as well. Ours is rounded once.
    """
    peer, u = PEERS[name], 2.0**-8
    x = torch.tensor(vectors(peer.rope)).bfloat16()
    wide = x.double().numpy()
    exact = pyrope.rotate(wide, POSITIONS, peer.rope)
    theirs = peer.turn(x, peer.tables(torch.bfloat16))
    assert theirs.dtype == torch.bfloat16
    error = np.abs(theirs.double().numpy() - exact)
    single = float32_bound(wide, POSITIONS, peer.rope)
    assert (error <= rounding(wide, POSITIONS, peer.rope, u, exact) + single).all()
    once = u * np.abs(exact) + single
    assert (error > once).any()  # and not by far less: dense vectors tell the two procedures apart

    ours = pyrope.rotate(x.float().numpy().astype(ml_dtypes.bfloat16), POSITIONS, peer.rope)
    assert ours.dtype == ml_dtypes.bfloat16
    close = u * np.abs(exact) + rounding(wide, POSITIONS, peer.rope, U32, exact)
    assert (np.abs(ours.astype(np.float64) - exact) <= close * SECOND_ORDER).all()


# Several axes. Positions differ in every axis, so that no axis can stand in for another.

GRID = np.array([POSITIONS, POSITIONS[::-1], (7 * POSITIONS + 5) % LENGTH])  # (time, row, column)
_TEXT: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
_SECTIONS = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]}
_INTERLEAVED = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_section": [12, 10, 10]}
MROPE = {
    "qwen2_vl": (
        modeling_qwen2_vl,
        "Qwen2VLRotaryEmbedding",
        Qwen2VLTextConfig(**_TEXT, rope_parameters=dict(_SECTIONS)),
    ),
    "qwen2_5_vl": (
        modeling_qwen2_5_vl,
        "Qwen2_5_VLRotaryEmbedding",
        Qwen2_5_VLTextConfig(**_TEXT, rope_parameters=dict(_SECTIONS)),
    ),
    "qwen3_vl": (
        modeling_qwen3_vl,
        "Qwen3VLTextRotaryEmbedding",
        Qwen3VLTextConfig(**_TEXT, head_dim=64, rope_parameters=_INTERLEAVED | {"mrope_interleaved": True}),
    ),
    "qwen3_vl-uneven": (
        modeling_qwen3_vl,
        "Qwen3VLTextRotaryEmbedding",
        Qwen3VLTextConfig(**_TEXT, head_dim=64, rope_parameters=_INTERLEAVED | {"mrope_section": [20, 9, 3]}),
    ),
}


@pytest.mark.parametrize("name", MROPE)
def test_mrope(name: str) -> None:
    """M-RoPE in sections (Qwen2-VL, Qwen2.5-VL) and interleaved (Qwen3-VL), different positions on the three axes."""
    module, embedding, config = MROPE[name]
    rope = Rope.from_config(config.to_dict())
    assert rope.axes == Axes("interleaved" if "qwen3" in name else "sections", config.rope_parameters["mrope_section"])
    x = vectors(rope)
    tables = getattr(module, embedding)(config)(torch.zeros(1), torch.tensor(GRID)[:, None])
    q, k = module.apply_rotary_pos_emb(torch.tensor(x), 2 * torch.tensor(x), *tables)
    assert torch.equal(k, 2 * q)
    assert_agrees_in_float32(q, x, GRID, rope)
    wide = torch.tensor(x, dtype=torch.float64)
    assert_agrees_in_float64(module.apply_rotary_pos_emb(wide, wide, *doubled(rope, GRID))[0], x, GRID, rope)


ROWS_AND_COLUMNS = np.array([(row, column) for row in (0, 1, 7, 63) for column in (0, 2, 5, 31, 100)]).T


def test_axial() -> None:
    """The 2-D form of Qwen2-VL's vision part: half of the pairs turn with rows, half with columns, the same Θ twice."""
    config = Qwen2VLVisionConfig(embed_dim=128, num_heads=2)
    rope = Rope(64, config.rope_parameters["rope_theta"], "half", axes=Axes("axial"))
    x = vectors(rope, ROWS_AND_COLUMNS.shape[1])
    patches = torch.tensor(x)[0].transpose(0, 1)  # (n, h, d)
    tables = modeling_qwen2_vl.Qwen2VLVisionRotaryEmbedding(config)(patches, torch.tensor(ROWS_AND_COLUMNS.T))
    q, k = modeling_qwen2_vl.apply_rotary_pos_emb_vision(patches, 2 * patches, *tables)
    assert torch.equal(k, 2 * q)
    assert_agrees_in_float32(q.transpose(0, 1)[None], x, ROWS_AND_COLUMNS, rope)


def test_pixtral() -> None:
    """The 2-D form of Pixtral: rows have the even frequencies, columns the odd ones."""
    config = PixtralVisionConfig(hidden_size=128, num_attention_heads=2, image_size=2048, patch_size=16)
    rope = Rope(64, config.rope_parameters["rope_theta"], "half", axes=Axes("pixtral"))
    x = vectors(rope, ROWS_AND_COLUMNS.shape[1])
    tables = modeling_pixtral.PixtralVisionRotaryEmbedding(config)(torch.zeros(1), torch.tensor(ROWS_AND_COLUMNS.T))
    q, k = modeling_pixtral.apply_rotary_pos_emb(torch.tensor(x), 2 * torch.tensor(x), *tables, unsqueeze_dim=0)
    assert torch.equal(k, 2 * q)
    assert_agrees_in_float32(q, x, ROWS_AND_COLUMNS, rope)
    wide, exact = torch.tensor(x, dtype=torch.float64), doubled(rope, ROWS_AND_COLUMNS)
    q, _ = modeling_pixtral.apply_rotary_pos_emb(wide, wide, exact.cos[0], exact.sin[0], unsqueeze_dim=0)
    assert_agrees_in_float64(q, x, ROWS_AND_COLUMNS, rope)
