"""Hugging Face configs, in the old and the new spelling, become the ropes that they mean, or are refused."""

import json

import pytest

from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN
from pyrope.configs import MODEL_TYPES
from pyrope.theta import LAYOUTS

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072}
UNKNOWN = {"model_type": "novel", "head_dim": 64, "rope_theta": 10000.0}
LENGTH = "original_max_position_embeddings"
YARN = {"factor": 32.0, LENGTH: 4096}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, LENGTH: 8192}
SHORT, LONG = [1.0] * 32, [2.0] * 32
LISTS = {"short_factor": SHORT, "long_factor": LONG}
LATENT = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
FULL, SLIDING = "full_attention", "sliding_attention"


def llama(**keys):
    return LLAMA | keys


def of(model_type, **keys):
    return {"model_type": model_type, **keys}


def scaled(kind, **keys):
    """In the old spelling."""
    return {"rope_scaling": {"type": kind, **keys}}


def ropes(kind="default", **keys):
    """In the new spelling."""
    return {"rope_parameters": {"rope_type": kind, **keys}}


def sections(*counts, **keys):
    return ropes(mrope_section=list(counts), **keys)


def half(base=10000.0, head_dim=64, **more):
    return Rope(head_dim, base, "half", **more)


def assert_reads(config, expected, **options):
    """Reads a config as a rope, or refuses it in these words."""
    before = json.dumps(config)
    if isinstance(expected, Rope):
        assert Rope.from_config(config, **options) == expected
    else:
        with pytest.raises((ValueError, TypeError), match=expected):
            Rope.from_config(config, **options)
    assert json.dumps(config) == before


@pytest.mark.parametrize("config, expected", [
    (LLAMA, half()),  # no word of rope: the base that the type implies
    (llama(rope_theta=5e5, **scaled("llama3", **LLAMA3)), half(5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192))),
    (llama(**ropes("llama3", rope_theta=5e5, **LLAMA3)), half(5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192))),
    (llama(rope_theta=9, **ropes(rope_theta=9.0)), half(9.0)),  # said twice
    (llama(**scaled("linear", factor=4)), half(scaling=Linear(4.0))),
    (llama(**scaled("dynamic", factor=2.0)), half(scaling=DynamicNTK(2.0, 131072))),
    (llama(**scaled("yarn", **YARN)), half(scaling=YaRN(32.0, 4096))),
    (llama(**scaled("yarn", **YARN, beta_fast=16, beta_slow=2, truncate=False, mscale=1.0, mscale_all_dim=0.5, attention_factor=None)),
     half(scaling=YaRN(32.0, 4096, 16.0, 2.0, None, 1.0, 0.5, False))),
    (llama(**scaled("yarn", factor=None, **{LENGTH: 4096})), half(scaling=YaRN(32.0, 4096))),
    (llama(**scaled("yarn", factor=4.0, beta_fast=0)), half(scaling=YaRN(4.0, 131072))),  # 0 is not given
    (llama(max_position_embeddings=1024, **{LENGTH: 4096}, **scaled("longrope", **LISTS)), half(scaling=LongRoPE(SHORT, LONG, 1.0, 4096))),
    (llama(**{LENGTH: 4096}, **scaled("su", **LISTS)), half(scaling=LongRoPE(SHORT, LONG, 32.0, 4096))),  # an alias
    (llama(**{LENGTH: 4096}, **scaled("longrope", **LISTS, **{LENGTH: 77})), half(scaling=LongRoPE(SHORT, LONG, 32.0, 4096))),  # that on top wins
    (llama(**scaled("longrope", **LISTS, factor=4.0, attention_factor=1.5, **{LENGTH: 8192})), half(scaling=LongRoPE(SHORT, LONG, 4.0, 8192, 1.5))),
    (of("phi3", head_dim=64, max_position_embeddings=131072, **scaled("longrope", **LISTS)), half(scaling=LongRoPE(SHORT, LONG, 32.0, 4096))),
    (llama(head_dim=512, **ropes("proportional", partial_rotary_factor=0.25, rope_theta=1e6)), half(1e6, 512, scaling=Proportional(0.25))),
    (llama(partial_rotary_factor=0.5), half(rotary_dim=32)), (llama(head_dim=80), half(head_dim=80)),
    (of("gpt_neox", hidden_size=512, num_attention_heads=8, rotary_pct=0.25, rotary_emb_base=20000), half(2e4, rotary_dim=16)),
    (of("gptj", n_embd=4096, n_head=16, rotary_dim=64), Rope(256, 10000.0, "interleaved", 64)),
    (of("gptj", n_embd=4096, n_head=16, rotary_dim=None), Rope(256, 10000.0, "interleaved")),  # the whole head
    (of("kimi_k2", **LATENT, rope_theta=50000, **scaled("yarn", **YARN, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)),
     Rope(192, 50000.0, "interleaved-to-half", 64, "suffix", YaRN(32.0, 4096, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0))),
    (of("deepseek_v3", **LATENT, rope_interleave=False), half(head_dim=192, rotary_dim=64, placement="suffix")),
    (of("dbrx", d_model=256, n_heads=4, attn_config={"rope_theta": 500000}), half(5e5)),  # names of its own
    (of("ernie4_5_vl_moe_text", head_dim=8, **sections(1, 1, 2)), Rope(8, 5e5, "interleaved", axes=Axes("listed", (1, 2, 0, 0)))),
    (of("kimi_k25_vision", head_dim=8, **ropes("axial")), half(head_dim=8, axes=Axes("listed", (1, 0, 1, 0), "own"))),
    (of("qwen2_vl_vision", embed_dim=256, num_heads=4, hidden_size=999), half(axes=Axes("axial"))),
    (of("ministral3", head_dim=64, **ropes("yarn", **YARN, llama_4_scaling_beta=0.1)), half(1e6, scaling=YaRN(32.0, 4096))),  # queries grow
    (of("gemma", hidden_size=3072, num_attention_heads=16), half(head_dim=256)), (llama(model_type="nanochat"), half(direction=-1)),
    (of("qwen2_vl", head_dim=128, rope_theta=1e6, **scaled("mrope", mrope_section=[16, 24, 24])), half(1e6, 128, axes=Axes("sections", (16, 24, 24)))),
    (of("qwen3_vl", text_config=of("qwen3_vl_text", rope_theta=5e6, **sections(24, 20, 20, mrope_interleaved=True))),
     half(5e6, 128, axes=Axes("interleaved", (24, 20, 20)))),
    (of("hunyuan_v1_dense", head_dim=128, **scaled("dynamic", alpha=9.0, factor=1.0, beta_fast=32, mscale=1.0)), half(1e4 * 9.0 ** (128 / 126), 128)),
    ({"model_type": "llama", "num_attention_heads": 4, "text_config": llama(rope_theta=5e5)}, half(5e5)),  # read from within, having no size
    ({"hidden_size": 512, **LLAMA, "text_config": llama(rope_theta=5e5)}, half()), ({"n_embd": 256, "text_config": {}, **LLAMA}, half()),
    # Refused
    (llama(**scaled("ntk-by-parts")), "rope_type must be one of 'default', 'linear', .* was 'ntk-by-parts'"),
    (llama(**scaled("linear", factor=2.0, fctor=1)), "'linear' has unexpected keys, .*: fctor"),
    *((llama(**scaled(kind, **keys)), f"rope_type {kind!r} needs the key {lacks}: add it") for kind, keys, lacks in (
        ("linear", {}, "factor"), ("dynamic", {}, "factor"), ("yarn", {}, "factor"), ("longrope", LISTS, "factor"),
        ("longrope", YARN, "short_factor, long_factor"), ("llama3", YARN, "low_freq_factor, high_freq_factor"))),
    (llama(max_position_embeddings=None, **scaled("dynamic", factor=2.0)), "lacks 'max_position_embeddings', which rope_type 'dynamic' needs"),
    (llama(**scaled("yarn", rope_type="linear", factor=2.0)), "says rope_type 'linear' and type 'yarn'"),
    (llama(**scaled("yarn", **{LENGTH: 262144})), "factor must be finite and at least 1, was 0.5"),
    (llama(rope_scaling="linear"), "must be a dict, was 'linear'"), (llama(rope_scaling={1: 2, "a": 3}), "unexpected keys, .*: 1, a"),
    (llama(**scaled("linear", factor=2.0), **ropes()), "both rope_parameters and rope_scaling, and they differ"),
    (llama(rope_theta="10000"), "base must be a number"), (llama(num_attention_heads=0), "num_attention_heads must be at least 1"),
    (llama(partial_rotary_factor=1.5), "partial_rotary_factor must be .* at most 1, was 1.5"),
    (llama(partial_rotary_factor=0.27), "rotary_dim must be even, was 17"),
    (llama(partial_rotary_factor=0.5, rotary_dim=16), "rotary_dim 16 and a partial_rotary_factor that makes 32"),
    (llama(qk_rope_head_dim=64), "lacks 'qk_nope_head_dim'"), (llama(position_embedding_type="nope"), "does not use RoPE .position_embedding_type: 'nope'"),
    (llama(model_type="qwen2_vl"), "several position axes: the config must say mrope_section"),
    (llama(model_type="qwen2_vl", **sections(16, 24, 25)), r"sections \(16, 24, 25\) must add up to the number of pairs, 32"),
    (llama(**sections(8, 12, 12)), r"does not say which pairs turn with which axis.*axes=Axes\(\"sections\", …\)"),
    (llama(model_type="ernie4_5_vl_moe_text", **sections(10, 11, 11)), "must add up to the number of pairs"),
    (llama(model_type="qwen3_vl_text", **sections(24, 20, 20, mrope_interleaved=False)), "has axes of style 'interleaved', but the config says mrope_interleaved False"),
    (of("dbrx", d_model=64, n_heads=2, attn_config={"rope_theta": 5e5}, **ropes(rope_theta=1e4)), "rope_theta is 500000.0, but rope_theta 10000.0 in rope_parameters"),
    (llama(rope_theta=7.0, **ropes(rope_theta=9.0)), "rope_theta is 7.0, but rope_theta 9.0 in rope_parameters: keep one"),
    (llama(partial_rotary_factor=1.0, **ropes(partial_rotary_factor=0.5)), "partial_rotary_factor is 1.0, but partial_rotary_factor 0.5 in"),
    (of("hunyuan_vl", **scaled("xdrope")), "'hunyuan_vl' is not read: the two features of a pair follow different axes"),
    (of("granite_swa", layer_rope_theta=[1e4, 1e6, 0]), "layer_rope_theta has several bases"),
    ({"head_dim": 64}, "does not say which features make a pair"),
    (llama(per_layer_config={"1": {"head_dim": 64}}, layer_types=["a", "b"]), "layers of type None have heads of different sizes"), (3, "config must be a dict"),
])  # fmt: skip
def test_configs(config, expected):
    assert_reads(config, expected)


NESTED = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    SLIDING: {"rope_type": "default", "rope_theta": 3e4},
}
GEMMA3, DEEPSEEK4 = of("gemma3_text"), of("deepseek_v4", qk_rope_head_dim=32, **scaled("yarn", **YARN))
GEMMA4 = of("gemma4_text", head_dim=256, rope_parameters={
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4},
})  # fmt: skip
SAVED = {"layer_types": [SLIDING, FULL] * 2, "per_layer_config": {"01": {"head_dim": 64}, "3": {"head_dim": 64}}}
SCALED, STILL = scaled("linear", factor=8.0), {"layer_types": [SLIDING, FULL], "head_dim": 64}
MODERNBERT = of("modernbert", hidden_size=1024, num_attention_heads=4, **SCALED)


@pytest.mark.parametrize("config, layer_type, expected", [
    (GEMMA3, FULL, half(1e6, 256)), (GEMMA3, SLIDING, half(1e4, 256)),
    (GEMMA3 | {"rope_parameters": NESTED}, FULL, half(2e6, 256, scaling=Linear(8.0))), (GEMMA3 | {"rope_parameters": NESTED}, SLIDING, half(3e4, 256)),
    (GEMMA3 | SCALED | {"rope_theta": 5e6}, FULL, half(5e6, 256, scaling=Linear(8.0))), (GEMMA3 | SCALED | {"rope_local_base_freq": 9e3}, SLIDING, half(9e3, 256)),
    (GEMMA3 | {LENGTH: 512, "rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}}, FULL, half(1e6, 256, scaling=YaRN(32.0, 4096))),
    (MODERNBERT, FULL, half(160000.0, 256, scaling=Linear(8.0))), (MODERNBERT | {"local_rope_theta": 7.0}, SLIDING, half(7.0, 256, scaling=Linear(8.0))),
    (of("olmo3", head_dim=256, **SCALED), SLIDING, half(500000.0, 256)), (DEEPSEEK4, "main", Rope(512, 10000.0, "interleaved", 32, "suffix")),
    (DEEPSEEK4, "compress", Rope(512, 160000.0, "interleaved", 32, "suffix", YaRN(32.0, 4096, attention_factor=1.0))),
    (GEMMA4, FULL, half(1e6, 512, scaling=Proportional(0.25))), (GEMMA4, SLIDING, half(1e4, 256)),
    (GEMMA4 | {"global_head_dim": 64}, FULL, half(1e6, scaling=Proportional(0.25))),
    (GEMMA4 | SAVED, FULL, half(1e6, scaling=Proportional(0.25))), (GEMMA4 | SAVED, SLIDING, half(1e4, 256)),
    (llama(**STILL), SLIDING, half()), *((of(name, **STILL), SLIDING, Rope(64, base, layout)) for name, base, layout in [
        ("cohere2", 1e4, "interleaved"), ("exaone4", 1e4, "half"), ("llama4_text", 5e5, "interleaved")]),
    (of("cohere2", sliding_window=None, **STILL), FULL, Rope(64, 1e4, "interleaved")),
    # Refused
    (GEMMA3, None, "layer_type must be one of .*, which may have different ropes, was None"), (GEMMA4, "chunked", "was 'chunked'"),
    (GEMMA4 | SAVED | {"per_layer_config": {"01": {"head_dim": 64}, "3": {"head_dim": 128}}}, FULL, "layers of type 'full_attention' have heads of different sizes"),
    (llama(layer_types=[SLIDING, FULL]), "slides", "must be one of 'sliding_attention', 'full_attention', .* was 'slides'"),
    (llama(rope_parameters={FULL: None, "other": {"rope_theta": 5.0}}), FULL, "layers of type 'full_attention' are not rotated"),
    (of("cohere2", **STILL), FULL, "layers of type 'full_attention' are not rotated in model_type"),
])  # fmt: skip
def test_layers_with_different_ropes(config, layer_type, expected):
    assert_reads(config, expected, layer_type=layer_type)


def test_paths(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert Rope.from_config(path) == Rope.from_config(str(path)) == Rope.from_config(tmp_path) == half()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Rope.from_config(tmp_path / "nowhere")


def test_the_layout_is_never_guessed():
    for config in (UNKNOWN, {"head_dim": 64, "rope_theta": 10000.0}, UNKNOWN | {"model_type": ["llama"]}):
        assert_reads(config, "does not say which features make a pair.*pass layout=")
        assert_reads(config, half(), layout="half")
    assert_reads(LLAMA, Rope(64, 10000.0, "interleaved"), layout="interleaved")
    assert_reads({"head_dim": 64}, "does not say rope_theta", layout="half")


@pytest.mark.parametrize("key, of_known_types", [
    *((key, True) for key in ("rope_local_base_freq", "axes_dims_rope", "rotary_emb_fraction", "use_dynamic_ntk", "alibi_slopes", "rope_interleaved")),
    *((key, False) for key in ("kv_channels", "global_head_dim", "attention_head_dim", "rope_interleave")),
])  # fmt: skip
def test_a_key_that_may_change_the_rope_and_is_not_read_is_refused(key, of_known_types):
    refusal = f"says {key}, which is not read here"
    assert_reads(UNKNOWN | {key: 128}, refusal, layout="half")
    assert_reads(LLAMA | {key: 128}, refusal if of_known_types else half(), layout="half")
    assert_reads(LLAMA | {key: None}, half(), layout="half")


@pytest.mark.parametrize("key, off", [
    *((key, half()) for key in ("use_alibi", "use_mrope", "rotary_value", "use_dynamic_ntk", "rope_interleaved")), ("use_rope", "use_rope, which is not"),
])  # fmt: skip
def test_what_is_false_may_change_the_rope(key, off):
    assert_reads(LLAMA | {key: False}, off)


def test_what_says_nothing_more_is_no_reason_to_refuse():
    assert_reads(llama(rope_interleaved=True), Rope(64, 10000.0, "interleaved"), layout="interleaved")
    config = UNKNOWN | {"rope_parameters": NESTED, "swa_rope_theta": 10000.0}
    assert_reads(config, half(3e4), layout="half", layer_type=SLIDING)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_convention_makes_a_rope(model_type):
    """What its row says is needed must be said, and then the rope has what its row says."""
    convention = MODEL_TYPES[model_type]
    assert convention.layout in LAYOUTS
    config = of(model_type, head_dim=80, global_head_dim=80, **ropes())
    config |= {own: 80 for own, usual in convention.names.items() if usual == "head_dim"}
    if convention.switch:
        assert_reads(config, f"has RoPE only where the config says {convention.switch[0]}")
        config |= dict([convention.switch])
    if convention.latent:
        assert_reads(config, "lacks 'qk_rope_head_dim', which its model_type needs")
        config |= {"qk_rope_head_dim": 80, "qk_nope_head_dim": 80}
    if convention.axes:
        rest = int(40 * convention.fraction) - 6
        config["rope_parameters"]["mrope_section"] = [3, 3, rest] if convention.axes == "ernie" else [rest, 3, 3]
    if convention.by_layer:
        assert_reads(config, "differ: the config must say rope_parameters for each layer type")
        config["rope_parameters"] = {"first": config["rope_parameters"] | {"rope_theta": 5.0}, "second": None}
        assert Rope.from_config(config, layer_type="first").base == 5.0
        return
    for layer_type in convention.layers or [None]:
        rope = Rope.from_config(config, layer_type=layer_type)
        assert rope.base == (convention.layers[layer_type].base if layer_type else convention.base)
        assert rope.width == (78 if convention.axes == "thirds" else convention.rotary_dim or 80 * convention.fraction)
        assert (rope.axes is not None) == bool(convention.axes)
    if convention.explicit:
        config["rope_parameters"] = None
        assert_reads(config, "scales its frequencies: the config must say rope_parameters", layer_type=layer_type)
