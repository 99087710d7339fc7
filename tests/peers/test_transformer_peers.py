"""Whole models against transformers: tiny random ones of every family, saved by it and loaded by pyrope."""

import types

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.cohere import modeling_cohere
from transformers.models.gptj import modeling_gptj

import pyrope
from pyrope import Cache, forward, load
from pyrope.models.families import FAMILIES

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
COMMON = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
COMMON |= {"eos_token_id": 2, "initializer_range": 0.15}
NEOX = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 8.0]}
LONG |= {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 48}

# name: (model class, config); the length of dynamic and longrope is crossed at 48 tokens.
CASES = {
    "llama2": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**COMMON)),
    "llama3": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**COMMON, rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-biases": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True)),
    "llama-dynamic": (
        hf.LlamaForCausalLM,
        lambda: hf.LlamaConfig(**COMMON, rope_parameters=DYNAMIC, max_position_embeddings=48),
    ),
    "llama-yarn": (hf.LlamaForCausalLM, lambda: hf.LlamaConfig(**COMMON, rope_parameters=YARN)),
    "mistral": (hf.MistralForCausalLM, lambda: hf.MistralConfig(**COMMON, sliding_window=7)),
    "qwen2": (hf.Qwen2ForCausalLM, lambda: hf.Qwen2Config(**COMMON)),
    "qwen2-windows": (
        hf.Qwen2ForCausalLM,
        lambda: hf.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": (hf.Qwen3ForCausalLM, lambda: hf.Qwen3Config(**COMMON, head_dim=16)),
    "phi3": (
        hf.Phi3ForCausalLM,
        lambda: hf.Phi3Config(
            **COMMON, rope_parameters=LONG, max_position_embeddings=192, original_max_position_embeddings=48
        ),
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        lambda: hf.Gemma3TextConfig(**{**COMMON, "num_hidden_layers": 7}, head_dim=8, sliding_window=6),
    ),
    "cohere": (hf.CohereForCausalLM, lambda: hf.CohereConfig(**COMMON)),
    "glm4": (hf.Glm4ForCausalLM, lambda: hf.Glm4Config(**COMMON, head_dim=8)),
    "gpt-neox": (hf.GPTNeoXForCausalLM, lambda: hf.GPTNeoXConfig(**NEOX, rotary_pct=0.5)),
    "gpt-neox-sequential": (
        hf.GPTNeoXForCausalLM,
        lambda: hf.GPTNeoXConfig(**NEOX, use_parallel_residual=False, attention_bias=False, rotary_pct=1.0),
    ),
    "gptj": (
        hf.GPTJForCausalLM,
        lambda: hf.GPTJConfig(
            vocab_size=64, n_embd=32, n_layer=3, n_head=4, rotary_dim=4, initializer_range=0.15, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        ),
    ),
    "roformer": (hf.RoFormerForMaskedLM, lambda: hf.RoFormerConfig(**NEOX)),
}  # fmt: skip


def _tokens(b, n, seed=0):
    return np.random.default_rng(seed).integers(3, 64, (b, n))


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    """A model of transformers, in float32, and the folder it was saved to."""
    kind, config = CASES[request.param]
    torch.manual_seed(1)
    model = kind(config()).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases that are not all 1 or 0
            torch.nn.init.normal_(parameter.data, mean=parameter.data.mean().item(), std=0.2)
        assert not name.endswith("inv_freq")
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, model, folder


def _twin(saved, dtype):
    """Both models in one dtype; transformers' own are left as they are."""
    name, model, folder = saved
    other = type(model).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return other, load(folder, dtype=dtype)


def _logits(model, tokens, **options):
    with torch.no_grad():
        return model(torch.from_numpy(tokens), **options).logits.numpy()


def _off(got, expected):
    return abs(got - expected).max() / abs(expected).max()


def test_every_family_is_here():
    assert {config().model_type for _, config in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("float64", 1e-6)])
@pytest.mark.parametrize("n", [1, 40, 64, 160])
def test_a_full_pass(saved, dtype, limit, n):
    theirs, ours = _twin(saved, dtype)
    tokens = _tokens(2, n)
    got = forward(ours, tokens)
    assert got.dtype == dtype
    # Angles in float32 are off by more the farther a position is.
    assert _off(got, _logits(theirs, tokens)) <= limit * (10 if n > 64 else 1)


def test_float64_throughout(saved, monkeypatch):
    # transformers computes rotary tables and norms in float32 even where all else is float64: replaced, little remains.
    theirs, ours = _twin(saved, "float64")
    tokens = _tokens(2, 40)
    monkeypatch.setattr(modeling_cohere, "apply_rotary_pos_emb", _cohere_rotation)
    monkeypatch.setattr(modeling_gptj.GPTJAttention, "_attn", _gptj_attention)
    _in_float64(theirs, ours)
    assert _off(forward(ours, tokens), _logits(theirs, tokens)) <= 1e-10


def _in_float64(theirs, ours):
    ropes = [layer.rope.at(40) for layer in ours.config.layers]
    tables = [tuple(map(torch.from_numpy, pyrope.cos_sin(np.arange(192), rope))) for rope in ropes]
    for module in theirs.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = types.MethodType(_gemma_norm if "Gemma" in kind else _rms_norm, module)
        elif kind == "CohereLayerNorm":
            module.forward = types.MethodType(_cohere_norm, module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = _table_function(tables, ours, "Cohere" in kind)
        elif kind == "Gemma3TextScaledWordEmbedding":
            module.embed_scale = torch.tensor(ours.config.embedding_scale, dtype=torch.float64)
        elif kind == "GPTJAttention":
            cos, sin = tables[0]
            module.embed_positions = torch.cat((sin, cos), dim=-1)
        elif kind == "RoFormerSinusoidalPositionalEmbedding":
            cos, sin = tables[0]
            module.weight.data = torch.cat((sin, cos), dim=-1)


def _rms_norm(self, x):
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    return self.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def _gemma_norm(self, x):
    return (1 + self.weight) * x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps)


def _cohere_norm(self, x):
    centred = x - x.mean(-1, keepdim=True)
    return self.weight * centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + self.variance_epsilon)


def _cohere_rotation(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = modeling_cohere.rotate_half
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def _gptj_attention(self, query, key, value, attention_mask=None):
    scores = query @ key.transpose(-1, -2) / 8**0.5
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return weights @ value, weights


def _table_function(tables, ours, interleaved):
    types_of_layers = {}
    for layer, table in zip(ours.config.layers, tables, strict=True):
        types_of_layers["full_attention" if layer.window is None else "sliding_attention"] = table

    def table(x, position_ids, layer_type=None):
        cos, sin = types_of_layers[layer_type] if layer_type else tables[0]
        cos, sin = cos[position_ids], sin[position_ids]
        both = (lambda t: t.repeat_interleave(2, dim=-1)) if interleaved else (lambda t: torch.cat((t, t), dim=-1))
        return both(cos), both(sin)

    return table


@pytest.mark.parametrize("lengths", [(1,) * 12, (7, 1, 4), (5, 7)])
def test_step_by_step(saved, lengths):
    theirs, ours = _twin(saved, "float32")
    if not ours.config.causal:
        pytest.skip("an encoder has no steps")
    tokens, cache, done = _tokens(2, 12, 2), Cache(ours, 12, batch=2), 0
    past, parts = None, []
    for n in lengths:
        with torch.no_grad():
            out = theirs(torch.from_numpy(tokens[:, done : done + n]), past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(_off(forward(ours, tokens[:, done : done + n], cache=cache), out.logits.numpy()))
        done += n
    assert max(parts) <= 1e-5


def test_past_the_length_that_changes_theta_a_cache_is_as_a_full_pass(saved):
    theirs, ours = _twin(saved, "float32")
    if not ours.config.causal:
        pytest.skip("an encoder has no steps")
    tokens, cache = _tokens(1, 60, 3), Cache(ours, 60)
    parts = [forward(ours, tokens[:, a:b], cache=cache) for a, b in ((0, 30), (30, 31), (31, 60))]
    assert _off(np.concatenate(parts, axis=1), _logits(theirs, tokens)) <= 1e-5


def test_length_dependent_ropes_do_change_there():
    for name in ("llama-dynamic", "phi3"):
        rope = hf_rope = CASES[name][1]()
        rope = pyrope.Rope.from_config(hf_rope.to_dict())
        assert not np.array_equal(pyrope.frequencies(rope.at(48)), pyrope.frequencies(rope.at(60)))


def test_left_padding(saved):
    theirs, ours = _twin(saved, "float32")
    tokens, pads = _tokens(3, 20, 4), (0, 6, 13)
    visible = np.ones((3, 20), np.int64)
    for row, pad in enumerate(pads):
        tokens[row, :pad], visible[row, :pad] = 0, 0
    options = {"attention_mask": torch.from_numpy(visible)}
    if "roformer" not in saved[0]:  # its positions cannot be given: it has them count the padding
        options["position_ids"] = torch.from_numpy(np.maximum(visible.cumsum(1) - 1, 0))
        got = forward(ours, tokens, segments=visible)
    else:
        got = forward(ours, tokens, positions=np.arange(20), segments=visible)
    expected = _logits(theirs, tokens, **options)
    for row, pad in enumerate(pads):
        assert _off(got[row, pad:], expected[row, pad:]) <= 1e-5


def test_greedy_generation_is_theirs(saved):
    theirs, ours = _twin(saved, "float64")
    if not ours.config.causal or not all(layer.rope.theta_is_fixed for layer in ours.config.layers):
        pytest.skip("no steps, or Θ changes on the way there")
    prompt = _tokens(1, 9, 5)
    with torch.no_grad():
        out = theirs.generate(
            torch.from_numpy(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert list(pyrope.generate(ours, prompt[0], 12)) == out[0, 9:].tolist()
