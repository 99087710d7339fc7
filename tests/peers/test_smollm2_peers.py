"""A real language model, end to end: SmolLM2-135M-Instruct and its tokenizer, from the GGUF file that its package brings,
against transformers' reading of the same file."""

from __future__ import annotations

import copy
import pathlib

import pytest
import tokenizers
import torch
import transformers as hf
from hypothesis import given, strategies as st

import pyrope
from pyrope import forward
from pyrope.checkpoints import find_smollm2, gguf_value, open_gguf_file
from pyrope.cli import main
from pyrope.tokenizer import SMOLLM2_SYSTEM, chat_prompt, load_tokenizer

# The MIT licence, which every language model knows by heart: where it does not, something is broken.
LICENSE = (pathlib.Path(__file__).parents[2] / "LICENSE").read_text()


@pytest.fixture(scope="module")
def ours():
    return load_tokenizer(find_smollm2())


@pytest.fixture(scope="module")
def model():
    return pyrope.load(find_smollm2())


@pytest.fixture(scope="module")
def theirs():
    path = find_smollm2()
    return hf.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def corrected(theirs):
    """Theirs, with the cuts of SmolLM2's tokenizer.json, which takes out each number first; transformers cuts the text
    of every GGUF file as GPT-2's."""
    own, inner = tokenizers.pre_tokenizers, copy.deepcopy(theirs.backend_tokenizer)
    inner.pre_tokenizer = own.Sequence([own.Digits(individual_digits=True), own.ByteLevel(add_prefix_space=False)])
    return inner


def test_it_knows_the_capital_of_france(capsys):
    assert main(["generate", "--model", "smollm2", "What is the capital of France?"]) == 0
    output = capsys.readouterr()
    assert output.out == "The capital of France is Paris.\n"
    assert "tokens read and 7 written in" in output.err


def test_its_logits_are_those_of_transformers(model, ours):
    path, ids = find_smollm2(), ours.encode(LICENSE)
    theirs = hf.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    assert abs(forward(model, ids) - expected).max() <= 1e-4 * abs(expected).max()


# SmolLM2 has no token for six control characters, nor for planes 4 to 11, where no characters are.
KNOWN = st.characters(exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF, exclude_categories=("Cs",))
TEXT = st.text(KNOWN) | st.text("ab1 2\n's½é!<|im_start|>", max_size=40) | st.just("<|im_start|>a 1<|im_end|>")


@given(text=TEXT)
def test_ids_are_those_of_transformers(ours, theirs, corrected, text):
    ids = ours.encode(text)
    assert ids == corrected.encode(text, add_special_tokens=False).ids
    if not any(map(str.isnumeric, text)):
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    for name in ("<|im_start|>", "<|im_end|>"):  # special tokens are no text
        text = text.replace(name, "")
    assert ours.decode(ids) == "".join(ours.stream(ids)) == text


def test_a_conversation(ours, theirs):
    """The prompt is that of the file's template, and the system's sentence a fact of the model: the template says it."""
    assert f"system\\n{SMOLLM2_SYSTEM}<" in repr(gguf_value(open_gguf_file(find_smollm2()), "tokenizer.chat_template"))
    for system in (SMOLLM2_SYSTEM, "Be brief."):
        turns = [{"role": "system", "content": system}] if system != SMOLLM2_SYSTEM else []
        turns.append({"role": "user", "content": "Why?"})
        prompt = chat_prompt("Why?", system=system)
        assert prompt == theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        assert ours.encode(prompt) == theirs(prompt, add_special_tokens=False)["input_ids"]
    assert ours.stop == {2} == {theirs.eos_token_id}
