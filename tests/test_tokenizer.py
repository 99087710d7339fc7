"""Tokenizers: every text comes back, cuts are where the model was trained with them, and a stream gives complete characters."""

from __future__ import annotations

import json
import unicodedata

import gguf_files
import pytest
from hypothesis import given, strategies as st
from optional import package

from pyrope.tokenizer import SMOLLM2_SYSTEM, chat_prompt, load_tokenizer

tokenizers = package("tokenizers")

MERGES = ["1 2", "12 3", "h e", "l l", "ll o", "he llo", "Ġ hello", "! !", "Ġ Ġ", "Ċ Ċ", "S A", "' S", "Ġ !!", "Ì ģ"]
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [
    *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    *(pair.replace(" ", "") for pair in MERGES),
    "xyz",
    *SPECIAL,
    "<user>",
]
KINDS = [1] * (len(TOKENS) - 4) + [3, 3, 3, 4]
ID = {token: i for i, token in enumerate(TOKENS)}
PRES = ["gpt-2", "smollm", "default", "llama-bpe", "qwen2"]


def _metadata(pre="smollm", **changes):
    metadata = {
        "model": "gpt2", "pre": pre, "tokens": TOKENS, "merges": MERGES, "token_type": KINDS,
        "bos_token_id": ID["<|begin|>"], "eos_token_id": ID["<|im_end|>"], "add_bos_token": False,
    } | changes  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def _load(folder, pre="smollm", **changes):
    return load_tokenizer(gguf_files.write(folder / "model.gguf", others=_metadata(pre, **changes)))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return {pre: _load(tmp_path_factory.mktemp(pre), pre) for pre in PRES}


# Lone surrogates are not text, the rest of Unicode is; words of the vocabulary come often.
TEXT = st.lists(st.text(max_size=8) | st.sampled_from(["hello", " 12", "!!", "\n\n ", "'S", " ", "á", "½", "𝄞"])).map("".join)  # fmt: skip


@given(pre=st.sampled_from(PRES), text=TEXT)
def test_every_text_comes_back(loaded, pre, text):
    wanted = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert loaded[pre].decode(loaded[pre].encode(text)) == wanted


@pytest.mark.parametrize("pre, text, wanted", [
    ("gpt-2", "1234", ["123", "4"]), ("smollm", "1234", ["1", "2", "3", "4"]), ("qwen2", "1234", ["1", "2", "3", "4"]),
    ("llama-bpe", "1212123", ["12", "1", "2", "12", "3"]), ("default", "1212123", ["12", "1", "2", "12", "3"]),  # in threes
    ("gpt-2", "1212123", ["12", "12", "123"]), ("gpt-2", " hello", ["Ġhello"]), ("gpt-2", "  hello", ["Ġ", "Ġhello"]),
    ("gpt-2", " !!", ["Ġ!!"]), ("default", " !!", ["Ġ", "!!"]),  # punctuation is cut out first
    ("gpt-2", "'SA", ["'", "SA"]), ("llama-bpe", "'SA", ["'S", "A"]), ("qwen2", "'SA", ["'S", "A"]),
    ("gpt-2", "\n\nhello", ["Ċ", "Ċ", "hello"]), ("qwen2", "\n\nhello", ["ĊĊ", "hello"]),
    ("gpt-2", "xyz", ["x", "y", "z"]), ("llama-bpe", "xyz", ["xyz"]),  # no pairs lead to it
    ("gpt-2", "a\u0301", ["a", "Ìģ"]), ("qwen2", "a\u0301", ["Ã", "¡"]),  # one character, U+00E1
    ("smollm", "<|im_start|>hello<|im_end|> <user>!!", ["<|im_start|>", "hello", "<|im_end|>", "Ġ", "<user>", "!!"]),
])  # fmt: skip
def test_cuts_and_merges(loaded, pre, text, wanted):
    ids = loaded[pre].encode(text)
    assert [TOKENS[one] for one in ids] == wanted
    assert "<|" not in loaded[pre].decode(ids)  # special tokens have no text


def test_where_a_text_begins_and_ends(tmp_path):
    tokenizer = _load(tmp_path, add_bos_token=True, eot_token_id=3, eom_token_id=4)
    assert tokenizer.stop == {ID["<|im_end|>"], 3, 4}
    assert tokenizer.encode("he") == [ID["<|begin|>"], ID["he"]] and tokenizer.encode("he", begin=False) == [ID["he"]]
    assert tokenizer.decode(tokenizer.encode("he")) == "he" and tokenizer.special == set(SPECIAL)
    assert _load(tmp_path, "llama-bpe", add_bos_token=None).encode("") == [ID["<|begin|>"]]
    assert _load(tmp_path, "gpt-2", add_bos_token=None, eos_token_id=None).encode("") == []


@given(ids=st.lists(st.integers(0, len(TOKENS) - 1) | st.integers(160, 255), max_size=30))
def test_the_parts_of_a_stream_make_the_text(loaded, ids):
    """For any bytes, even those that make no characters."""
    parts = list(loaded["gpt-2"].stream(iter(ids)))
    assert "".join(parts) == loaded["gpt-2"].decode(ids) and all(parts)


def test_pieces_come_as_soon_as_they_can(loaded):
    tokenizer, ids = loaded["smollm"], iter(loaded["smollm"].encode("hé1𝄞"))
    taken = [(part, ids.__length_hint__()) for part in tokenizer.stream(ids)]
    assert taken == [("h", 7), ("é", 5), ("1", 4), ("𝄞", 0)]
    assert list(tokenizer.stream(tokenizer.encode("a𝄞")[:-1])) == ["a", "�"]


@pytest.mark.parametrize("changes, words", [
    ({"model": "llama"}, "tokenizer.ggml.model must be 'gpt2' .* was 'llama': use a tokenizer.json"),
    ({"pre": "tekken"}, "tokenizer.ggml.pre must be one of 'gpt-2', .* was 'tekken'"),
    ({"merges": None}, "must say tokenizer.ggml.merges, of type list"), ({"tokens": "a"}, "must say tokenizer.ggml.tokens, of type list"),
    ({"token_type": KINDS[1:]}, "shorter"), ({"merges": ["a b c"]}, "Tuple|tuple"), ({"merges": ["q q"]}, "q"),
    ({"add_bos_token": True, "bos_token_id": None}, "must say tokenizer.ggml.bos_token_id"),
])  # fmt: skip
def test_tokenizers_that_are_not_understood_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=rf"(?s)model\.gguf: .*({words})"):
        _load(tmp_path, **changes)


def test_a_question_as_chatml():
    assert chat_prompt("Why?", SMOLLM2_SYSTEM) == (
        f"<|im_start|>system\n{SMOLLM2_SYSTEM}<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


# ── Folders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path, loaded):
    loaded["smollm"]._inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_where_the_stops_of_a_folder_come_from(folder):
    """The first file that says them wins."""
    assert load_tokenizer(folder).stop == frozenset()
    first, second = folder / "generation_config.json", folder / "config.json"
    for file, ids, expected in (second, 5, {5}), (first, None, {5}), (first, [0, 7], {0, 7}):
        file.write_text(json.dumps({"eos_token_id": ids}))
        assert load_tokenizer(folder).stop == expected
    first.write_text('{"eos_token_id": "6"}')
    with pytest.raises(ValueError, match="eos_token_id"):
        load_tokenizer(folder)


def test_a_folder_that_puts_a_token_before_every_text(folder, loaded):
    text = "<|im_start|>hello 123\n\n½<|im_end|>"
    assert load_tokenizer(folder).encode(text) == loaded["smollm"].encode(text)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = ("<|begin|>", ID["<|begin|>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[begin])
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("abcd") == [begin[1], *(ID[word] for word in "abcd")]  # neither cut nor filled up
    assert tokenizer.encode("ab", begin=False) == [ID["a"], ID["b"]]


def test_pieces_keep_the_spaces_of_decoders_that_drop_the_first(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁a": 0, "▁b": 1, "<0xF0>": 2}, "▁a"))
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert list(tokenizer.stream([0, 1, 0])) == ["a", " b", " a"] and tokenizer.decode([0, 1, 0]) == "a b a"


PANICS = [  # of Rust, which are no exceptions
    ("tokenizer.json: Precompiled", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
    ("Missing .UNK. token", {}), ("chunk size", {"pre_tokenizer": {"type": "FixedLength", "length": 0}}),
]  # fmt: skip


def test_what_is_no_tokenizer(tmp_path):
    broken = [("tokenizer.json: ", content) for content in (b"", b"{", b"[]", b"[" * 10000, b"\xff\xfe")]
    words = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"},
    }
    for says, content in broken + [(says, json.dumps(words | change).encode()) for says, change in PANICS]:
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=says):
            load_tokenizer(tmp_path).encode("b")
