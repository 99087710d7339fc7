"""Small GGUF files for the tests, written by the package of the format's authors, and torn apart by hand."""

from __future__ import annotations

import numpy as np
from optional import package

gguf = package("gguf")

LLAMA = {
    "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 4,
    "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
    "rope.dimension_count": 8, "vocab_size": 5,
}  # fmt: skip
EMBEDDING = {"token_embd.weight": np.ones((5, 32), np.float32)}


def write(path, architecture="llama", settings=LLAMA, tensors=EMBEDDING, others=None):
    """A file with these settings (without the architecture's name before them), tensors, and other metadata.

    A tensor is an array, or (bytes as uint8 (…, row), name of its type). A setting of None is left out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    named = {f"{architecture}.{key}": value for key, value in settings.items()}
    for key, value in (named | (others or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=gguf.GGMLQuantizationType[tensor[1]])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, key, value):
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def quantised(values: np.ndarray, kind: str) -> tuple[np.ndarray, str]:
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]), kind


def rewrite(path, content: bytes) -> None:
    """Another content for a file, hundreds of times: a new file, since some systems flush one that is cut and refilled."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
