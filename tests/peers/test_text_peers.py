"""SmolLM2's tokenizer from its GGUF file, against transformers' reading of the same file."""

from __future__ import annotations

import copy

import pytest
import tokenizers
import transformers
from hypothesis import given, strategies as st

from pyrope.models.checkpoints import open_checkpoint
from pyrope.models.gguf import find_smollm2, read_gguf
from pyrope.models.text import SMOLLM2_SYSTEM, chat_prompt, load_tokenizer


@pytest.fixture(scope="module")
def ours():
    return load_tokenizer(find_smollm2())


@pytest.fixture(scope="module")
def theirs():
    path = find_smollm2()
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def mended(theirs):
    """Theirs, with the cuts of SmolLM2's tokenizer.json, which takes out each number first."""
    own, inner = tokenizers.pre_tokenizers, copy.deepcopy(theirs.backend_tokenizer)
    inner.pre_tokenizer = own.Sequence([own.Digits(individual_digits=True), own.ByteLevel(add_prefix_space=False)])
    return inner


# SmolLM2 has no token for six control characters, nor for planes 4 to 11, where no characters are.
KNOWN = st.characters(exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF, exclude_categories=("Cs",))
TEXT = st.text(KNOWN) | st.text("ab1 2\n's½é!<|im_start|>", max_size=40) | st.just("<|im_start|>a 1<|im_end|>")


@given(text=TEXT)
def test_every_text_comes_back(ours, text):
    assert ours.decode(ours.encode(text), special=True) == text
    assert "".join(ours.stream(ours.encode(text), special=True)) == text


@given(text=TEXT.filter(lambda text: not any(map(str.isnumeric, text))))
def test_ids_are_those_of_transformers(ours, theirs, text):
    """transformers cuts the text of every GGUF file as GPT-2's, which is SmolLM2's way only where there are no numbers."""
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


@given(text=TEXT)
def test_ids_are_those_of_transformers_with_the_models_own_cuts(ours, mended, text):
    assert ours.encode(text) == mended.encode(text, add_special_tokens=False).ids


def test_numbers_are_cut_one_by_one(ours):
    assert ours.encode("1234") == [33, 34, 35, 36]
    assert len(ours.encode("½½")) == 2 * len(ours.encode("½"))


def test_known_ids(ours, theirs):
    prompt = chat_prompt("What is the capital of France?", SMOLLM2_SYSTEM)
    ids = ours.encode(prompt)
    assert ids[:2] == [1, 9690] and ids[-4:] == [1, 520, 9531, 198]
    assert ids == theirs(prompt, add_special_tokens=False)["input_ids"]
    assert ours.decode(ids, special=True) == prompt
    assert ours.vocabulary == 49152 and ours.stop == {2} == {theirs.eos_token_id}


def test_the_prompt_is_that_of_the_files_template(theirs):
    """The sentence is a fact of the model: its template says it where nobody else does."""
    assert f"system\\n{SMOLLM2_SYSTEM}<" in repr(read_gguf(find_smollm2()).metadata["tokenizer.chat_template"])
    for words, system in (("Why?", SMOLLM2_SYSTEM), ("Why?", "Be brief.")):
        turns = [{"role": "system", "content": system}] if system != SMOLLM2_SYSTEM else []
        turns.append({"role": "user", "content": words})
        wanted = theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        assert chat_prompt(words, system=system) == wanted


def test_characters_without_a_token(ours):
    for text in ("\x04", chr(0x40000)):
        with pytest.raises(ValueError, match="no token for the bytes"):
            ours.encode(text)


def test_the_model_is_what_its_file_says():
    config, tensors = open_checkpoint(find_smollm2())
    assert (config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]) == (30, 576, 9)
    assert config["num_key_value_heads"] == 3 and config["rope_theta"] == 100000.0 and config["tie_word_embeddings"]
    assert len(tensors) == 2 + 30 * 9
    assert tensors["model.layers.29.self_attn.k_proj.weight"].read().shape == (192, 576)
