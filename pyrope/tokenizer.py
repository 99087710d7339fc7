"""Text as token ids and back: a Hugging Face folder's tokenizer.json, or the byte-level pairs inside a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import checks
from .checkpoints import gguf_value, open_gguf_file
from .files import errors_prefixed_with, read_json

# What SmolLM2 was trained to read first: its chat template has it, word for word.
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_CONTROL, _USER_DEFINED = 3, 4  # of the types of tokens in GGUF files
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How a text is cut before pairs are merged: each pattern cuts what the ones before it left.
_CUTS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "llama-bpe": (_CONTRACTIONS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_CONTRACTIONS + r"\p{N}" + _REST,),
}


def chat_prompt(question: str, system: str | None = None) -> str:
    r"""A question as ChatML, up to where the answer begins; ``system=None`` leaves the first part out.

    >>> chat_prompt("Why?", system=None)
    '<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n'
    """
    turns = [("user", question)] if system is None else [("system", system), ("user", question)]
    return "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns) + "<|im_start|>assistant\n"


class Tokenizer:
    """Text to token ids and back; made by `load_tokenizer`."""

    def __init__(self, path: Path, inner: Any, stop: Iterable[int]) -> None:
        self._path, self._inner = path, inner  # tokenizers.Tokenizer
        self.stop = frozenset(stop)  # ids that end a text
        # Names that become one token wherever they stand in a text: those who write must not use them by accident.
        added = inner.get_added_tokens_decoder().values()
        self.special: frozenset[str] = frozenset(token.content for token in added if token.special)

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The ids of a text; names of special tokens in it become those tokens.

        ``begin=False`` leaves out what the tokenizer puts around every text, such as a token for its beginning.
        """
        with errors_prefixed_with(self._path):
            return list(self._inner.encode(text, add_special_tokens=begin).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids, without special tokens, and with � where bytes make no character."""
        with errors_prefixed_with(self._path):
            return str(self._inner.decode(list(ids)))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of `decode` in parts, as the ids come; each part ends with a complete character."""
        last: list[int] = []  # what was yielded last: a decoder may treat the first token of a text in its own way
        fresh: list[int] = []
        part = ""
        for one in ids:
            fresh.append(one)
            part = self.decode(last + fresh)[len(self.decode(last)) :]
            if part and not part.endswith("�"):  # perhaps a character whose other bytes are still to come
                yield part
                last, fresh, part = fresh, [], ""
        if part:
            yield part


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder that holds tokenizer.json, or of a GGUF file."""
    path, package = Path(path), checks.imported("tokenizers", "reading a tokenizer", "checkpoints")
    if not path.is_dir():
        reader = open_gguf_file(path)
        with errors_prefixed_with(path):
            return _from_gguf(package, path, reader)
    with errors_prefixed_with(file := path / "tokenizer.json"):
        inner = package.Tokenizer.from_file(str(file))
        inner.no_truncation()  # what the file may have been saved with, and no text should be cut by
        inner.no_padding()
        return Tokenizer(path, inner, _stops(path))


def _stops(folder: Path) -> tuple[int, ...]:
    """The ids that end a text, from the first file that says them."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        ids = read_json(file).get("eos_token_id") if file.exists() else None
        if ids is not None:
            return checks.integers("eos_token_id", ids if isinstance(ids, list) else [ids], 0)
    return ()


def _from_gguf(package: Any, path: Path, reader: Any) -> Tokenizer:
    def get(name: str, kind: type, *default: Any) -> Any:
        key = f"tokenizer.ggml.{name}"
        if key not in reader.fields and default:
            return default[0]
        if key not in reader.fields or type(value := gguf_value(reader, key)) is not kind:
            raise ValueError(f"the metadata must say {key}, of type {kind.__name__}")
        return value

    if (model := get("model", str)) != "gpt2":
        raise ValueError(f"tokenizer.ggml.model must be 'gpt2' (byte-level pairs), was {model!r}: use a tokenizer.json")
    cuts, tokens = checks.choice("tokenizer.ggml.pre", get("pre", str), tuple(_CUTS)), get("tokens", list)
    vocabulary = {word: i for i, word in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in get("merges", list)]
    # Llama 3 keeps a word that is itself a token, whether merging pairs would lead to it or not.
    inner = package.Tokenizer(package.models.BPE(vocabulary, merges, ignore_merges=cuts == "llama-bpe"))
    splits = [package.pre_tokenizers.Split(package.Regex(cut), "isolated") for cut in _CUTS[cuts]]
    to_bytes = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = package.pre_tokenizers.Sequence([*splits, to_bytes])
    inner.decoder = package.decoders.ByteLevel()
    if cuts == "qwen2":
        inner.normalizer = package.normalizers.NFC()
    typed = list(zip(tokens, get("token_type", list), strict=True))
    inner.add_special_tokens([word for word, kind in typed if kind == _CONTROL])
    inner.add_tokens([word for word, kind in typed if kind == _USER_DEFINED])
    ends = [get(f"{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    if get("add_bos_token", bool, cuts == "llama-bpe"):
        first = [("first", get("bos_token_id", int))]
        inner.post_processor = package.processors.TemplateProcessing("first $0", special_tokens=first)
    return Tokenizer(path, inner, [one for one in ends if one is not None])
