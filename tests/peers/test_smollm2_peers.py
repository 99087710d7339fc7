"""A real language model, end to end: SmolLM2-135M-Instruct, from the GGUF file that its package brings."""

import dataclasses
import pathlib

import numpy as np
import pytest
import torch
import transformers as hf

import pyrope
from pyrope import Model, forward
from pyrope.cli import main

# The MIT licence, which every language model knows by heart: where it does not, something is broken.
TEXT = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text()


@pytest.fixture(scope="module")
def smollm2():
    path = pyrope.find_smollm2()
    return path, pyrope.load(path), pyrope.load_tokenizer(path)


def _perplexity(model, ids):
    logits = forward(model, ids[:-1]).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(np.exp(-likely[np.arange(len(ids) - 1), ids[1:]].mean()))


def test_it_knows_the_capital_of_france(capsys):
    assert main(["generate", "--model", "smollm2", "What is the capital of France?"]) == 0
    output = capsys.readouterr()
    assert output.out == "The capital of France is Paris.\n"
    assert "tokens read in" in output.err and "tokens per second" in output.err


def test_the_wrong_pairing_makes_the_perplexity_explode(smollm2):
    _, model, tokenizer = smollm2
    ids = tokenizer.encode(TEXT)
    right = _perplexity(model, ids)
    layers = tuple(
        dataclasses.replace(layer, rope=dataclasses.replace(layer.rope, layout="interleaved"))
        for layer in model.config.layers
    )
    wrong = _perplexity(Model(dataclasses.replace(model.config, layers=layers), model.weights), ids)
    assert right < 4 and wrong > 30 * right  # 2.7 and 268


def test_its_logits_are_those_of_transformers(smollm2):
    path, model, tokenizer = smollm2
    ids = tokenizer.encode(TEXT)
    theirs = hf.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    assert abs(forward(model, ids) - expected).max() <= 1e-4 * abs(expected).max()
