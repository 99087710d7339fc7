"""Text as token ids and back: a Hugging Face folder's tokenizer.json, or the tokenizer inside a GGUF file."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .. import checks
from .files import errors_prefixed_with, read_json
from .gguf import GgufArray, read_gguf

# What SmolLM2 was trained to read first: its chat template has it, word for word.
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_MARKS = ("<|im_start|>", "<|im_end|>")
_package = functools.partial(checks.imported, "tokenizers", "reading a tokenizer", "checkpoints")


def chat_prompt(question: str, system: str | None = None) -> str:
    r"""A question as ChatML, up to where the answer begins; ``system=None`` leaves the first part out.

    >>> chat_prompt("Why?", system=None)
    '<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n'
    """
    turns = [("user", question)] if system is None else [("system", system), ("user", question)]
    for role, words in turns:
        if not isinstance(words, str):
            raise TypeError(f"the words of the {role} must be a string, were {words!r}")
        if marks := [mark for mark in _MARKS if mark in words]:
            raise ValueError(f"the words of the {role} must not contain {marks[0]}, which ends or starts a turn")
    return "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns) + "<|im_start|>assistant\n"


@contextlib.contextmanager
def _package_errors(what: str) -> Iterator[None]:
    """Turns what the package tokenizers raises into a ValueError: a bare Exception, or a panic, which is none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}") from error


class Tokenizer:
    """Text to token ids and back; made by `load_tokenizer`."""

    def __init__(self, inner: Any, stop: Iterable[int], first: Iterable[int] = (), missing: Iterable[int] = ()) -> None:
        self._inner = inner  # tokenizers.Tokenizer
        self._first = tuple(first)  # ids that every text begins with, if inner does not add them itself
        self._missing = frozenset(missing)  # bytes that no token has, and that inner would drop silently
        with _package_errors("the tokenizer has no valid vocabulary"):
            self.vocabulary: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.stop: frozenset[int] = frozenset(stop)  # ids that end a text
        # Names that become one token wherever they stand in a text: those who write must not use them by accident.
        added = inner.get_added_tokens_decoder().values()
        self.special: frozenset[str] = frozenset(token.content for token in added if token.special)
        for one in (*self.stop, *self._first):
            self._check(one)

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The ids of a text; names of special tokens in it become those tokens.

        ``begin=False`` leaves out what the tokenizer puts around every text, such as a token for its beginning.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, was {type(text).__name__}")
        try:
            stored = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be Unicode without lone surrogates: {error}") from error
        if self._missing and (lost := self._missing.intersection(stored)):
            listed = ", ".join(f"{byte:#04x}" for byte in sorted(lost))
            raise ValueError(f"the vocabulary has no token for the bytes {listed} of the text: leave them out")
        checks.flag("begin", begin)
        with _package_errors("the tokenizer cannot encode the text"):
            ids = self._inner.encode(text, add_special_tokens=begin).ids
        return [*self._first, *ids] if begin else list(ids)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of these ids, � where bytes make no character; ``special`` keeps the names of special tokens."""
        checked, skip = [self._check(one) for one in ids], not checks.flag("special", special)
        with _package_errors("the tokenizer cannot decode the ids"):
            return str(self._inner.decode(checked, skip_special_tokens=skip))

    def stream(self, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
        """The text of `decode` in parts, as the ids come; each part ends with a complete character."""
        last: list[int] = []  # what was yielded last: a decoder may treat the first token of a text in its own way
        fresh: list[int] = []
        for one in ids:
            fresh.append(one)
            text = self.decode(last + fresh, special=special)
            if text.endswith("�"):  # perhaps a character whose other bytes are still to come
                continue
            if part := text[len(self.decode(last, special=special)) :]:
                yield part
                last, fresh = fresh, []
        if part := self.decode(last + fresh, special=special)[len(self.decode(last, special=special)) :]:
            yield part

    def _check(self, one: Any) -> int:
        if (number := checks.integer("a token id", one, 0)) >= self.vocabulary:
            raise ValueError(f"a token id must be below the size of the vocabulary, {self.vocabulary}, was {number}")
        return number


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder that holds tokenizer.json, or of a GGUF file."""
    path = pathlib.Path(path)
    if path.is_dir():
        return _from_folder(path)
    metadata = read_gguf(path).metadata
    with errors_prefixed_with(path):
        return _from_metadata({key: value for key, value in metadata.items() if key.startswith("tokenizer.")})


# --- Folders --------------------------------------------------------------------------------------------------------


def _from_folder(folder: pathlib.Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist, or is not a file: tokenizers of other forms are not read")
    package = _package()
    with _package_errors(str(file)):
        inner = package.Tokenizer.from_file(str(file))
    inner.no_truncation()  # what the file may have been saved with, and no text should be cut by
    inner.no_padding()
    with errors_prefixed_with(folder):
        return Tokenizer(inner, _stops(folder, inner))


def _stops(folder: pathlib.Path, inner: Any) -> list[int]:
    """The ids that end a text, from the first file that says them."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists() and (ids := read_json(folder / name).get("eos_token_id")) is not None:
            return list(checks.integers("eos_token_id", ids if isinstance(ids, list) else [ids], 0))
    if (folder / "tokenizer_config.json").exists():
        word = read_json(folder / "tokenizer_config.json").get("eos_token")
        word = word.get("content") if isinstance(word, dict) else word
        if word is not None:
            if (one := inner.token_to_id(word) if isinstance(word, str) else None) is None:
                raise ValueError(f"the eos_token of tokenizer_config.json, {word!r}, is not in the vocabulary")
            return [one]
    return []


# --- GGUF files -----------------------------------------------------------------------------------------------------

_CONTROL, _USER_DEFINED = 3, 4  # of the types of tokens
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


def _from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    if (model := _get(metadata, "model", str)) != "gpt2":
        raise ValueError(f"tokenizer.ggml.model must be 'gpt2' (byte-level pairs), was {model!r}: use a tokenizer.json")
    cuts = checks.choice("tokenizer.ggml.pre", _get(metadata, "pre", str), tuple(_CUTS))
    if _get(metadata, "add_eos_token", bool, False):
        raise ValueError("this tokenizer ends every text with a token (add_eos_token), and nothing could follow it")
    tokens = _get(metadata, "tokens", list)
    inner = _byte_pairs(tokens, _get(metadata, "merges", list), cuts)
    _add_special(inner, tokens, _get(metadata, "token_type", list))
    ends = [_get(metadata, f"{name}_token_id", int, None) for name in ("eos", "eot", "eom")]
    begins = _get(metadata, "add_bos_token", bool, cuts == "llama-bpe")
    first = [_get(metadata, "bos_token_id", int)] if begins else []
    words = set(tokens)
    missing = [byte for byte, name in enumerate(_byte_names()) if name not in words]
    return Tokenizer(inner, [one for one in ends if one is not None], first, missing)


def _byte_names() -> list[str]:
    """How byte-level vocabularies write the 256 bytes: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_NEEDED = object()


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any = _NEEDED) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is _NEEDED:
        raise ValueError(f"the metadata lacks tokenizer.ggml.{name}")
    value = value.tolist() if isinstance(value, GgufArray) else value
    if value is not default and type(value) is not kind:
        raise ValueError(f"tokenizer.ggml.{name} must be of type {kind.__name__}, was {type(value).__name__}")
    return value


def _byte_pairs(tokens: list[Any], merges: list[Any], cuts: str) -> Any:
    if not all(isinstance(word, str) for word in tokens + merges):
        raise ValueError("tokenizer.ggml.tokens and tokenizer.ggml.merges must be lists of words")
    vocabulary = {word: i for i, word in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise ValueError("tokenizer.ggml.tokens must hold no token twice")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if wrong := [pair for pair in pairs if len(pair) != 2 or not vocabulary.keys() >= {*pair, "".join(pair)}]:
        pair = " ".join(wrong[0])
        raise ValueError(f"tokenizer.ggml.merges must be pairs of tokens that make a token, one was {pair!r}")
    package = _package()
    # Llama 3 keeps a word that is itself a token, whether merging pairs would lead to it or not.
    with _package_errors("tokenizer.ggml.merges"):
        inner = package.Tokenizer(package.models.BPE(vocabulary, pairs, ignore_merges=cuts == "llama-bpe"))
    before = [package.pre_tokenizers.Split(package.Regex(cut), "isolated") for cut in _CUTS[cuts]]
    to_bytes = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = package.pre_tokenizers.Sequence([*before, to_bytes])
    inner.decoder = package.decoders.ByteLevel()
    if cuts == "qwen2":
        inner.normalizer = package.normalizers.NFC()
    return inner


def _add_special(inner: Any, tokens: list[str], kinds: list[Any]) -> None:
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type must have one number for each token, had {len(kinds)}")
    added = _package().AddedToken
    typed = list(zip(tokens, kinds, strict=True))
    special = [added(word, special=True, normalized=False) for word, kind in typed if kind == _CONTROL]
    with _package_errors("tokenizer.ggml.token_type"):
        inner.add_special_tokens(special)
        inner.add_tokens([added(word, normalized=False) for word, kind in typed if kind == _USER_DEFINED])
