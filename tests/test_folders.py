"""Hugging Face folders: what is stored comes back, and every defect of a file is refused, whatever its bytes are."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys

import numpy as np
import pytest
from hostile_files import DTYPES, assert_refused, assert_refused_or_read, damages, random_values, same
from hypothesis import given, settings, strategies as st
from memory import little_memory
from optional import needed

from pyrope.models.checkpoints import open_checkpoint

ml_dtypes, save_file = needed("ml_dtypes"), needed("safetensors.numpy").save_file


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "nested": {"a": [1, 2.5, null]}}')
    return tmp_path


NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _raw(header, data=b""):
    """A safetensors file by hand: the length of the header, the header, the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(dtype, shape, start, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_stored_comes_back(folder, dtype):
    stored = {
        "a.weight": random_values((3, 5), dtype),
        "b": random_values((), dtype),
        "none": random_values((0, 4), dtype),
    }
    save_file(stored, folder / "model.safetensors")
    config, tensors = open_checkpoint(folder)
    assert config == {"model_type": "llama", "nested": {"a": [1, 2.5, None]}}
    assert {name: tensor.shape for name, tensor in tensors.items()} == {k: v.shape for k, v in stored.items()}
    assert all(same(tensors[name].read(), values) for name, values in stored.items())


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_])
def test_integers_have_a_shape_but_are_not_read(folder, dtype):
    save_file({"ids": np.ones((2, 3), dtype)}, folder / "model.safetensors")
    tensor = open_checkpoint(str(folder))[1]["ids"]
    assert tensor.shape == (2, 3)
    with pytest.raises(TypeError, match="ids holds integers"):
        tensor.read()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_other_types_are_refused_by_name(folder, dtype):
    (folder / "model.safetensors").write_bytes(_raw({"w": _entry(dtype, [4], 0, 4)}, bytes(4)))
    with pytest.raises(ValueError, match=f"'w' is stored as '{dtype}', and only F16, .* can be read: convert it first"):
        open_checkpoint(folder)


def _shards(folder, change=None):
    files = {"model-1.safetensors": {"a": random_values((2,), np.float32), "b": random_values((3,), np.float32, 1)}}
    files["model-2.safetensors"] = {"c": random_values((4,), np.float16, 2)}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    if change:
        change(places)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return files


def test_several_files_are_one_checkpoint(folder):
    files = _shards(folder)
    _, tensors = open_checkpoint(folder)
    assert set(tensors) == {"a", "b", "c"}
    for stored in files.values():
        assert all(same(tensors[name].read(), values) for name, values in stored.items())


def test_files_may_be_links_as_in_the_cache_of_the_hub(folder, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")
    files = _shards(folder)
    for name in [*files, "config.json", "model.safetensors.index.json"]:
        shutil.move(folder / name, blobs / name)
        os.symlink(os.path.relpath(blobs / name, folder), folder / name)
    assert same(open_checkpoint(folder)[1]["c"].read(), files["model-2.safetensors"]["c"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda places: places.pop("b"), "not where weight_map says, or not in it: 'b'$"),
        (lambda places: places.update(d="model-1.safetensors"), "not in it: 'd'$"),
        (lambda places: places.update(a="model-2.safetensors"), "not in it: 'a'$"),
        (lambda places: places.clear(), "weight_map must say the file of each tensor"),
        (lambda places: places.update(a=3), "weight_map must say the file of each tensor"),
    ],
)
def test_the_index_must_be_true(folder, change, words):
    _shards(folder, change)
    with pytest.raises(ValueError, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "c:x", "a\\b", "\0"]
)
def test_the_index_names_no_file_elsewhere(folder, name):
    _shards(folder, lambda places: places.update(a=name))
    with pytest.raises(ValueError, match="files must lie in the folder itself"):
        open_checkpoint(folder)


def test_no_tensor_is_in_two_files(folder):
    _shards(folder)
    save_file(
        {"c": random_values((4,), np.float16), "a": random_values((2,), np.float32)}, folder / "model-2.safetensors"
    )
    with pytest.raises(ValueError, match="in several files: 'a'"):
        open_checkpoint(folder)


def test_a_file_of_the_index_is_missing(folder):
    _shards(folder)
    os.remove(folder / "model-2.safetensors")
    with pytest.raises(FileNotFoundError, match="model-2.safetensors does not exist"):
        open_checkpoint(folder)


def test_one_file_or_several_but_not_both(folder):
    _shards(folder)
    save_file({"a": random_values((2,), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="holds both model.safetensors and model.safetensors.index.json"):
        open_checkpoint(folder)


def test_what_is_unsound_is_refused_with_the_name_of_the_file(folder):
    """test_tensors.py has every way in which a file can be unsound."""
    (folder / "model.safetensors").write_bytes(_raw({"a": _entry("F32", [3], 0, 8)}, bytes(8)))
    with pytest.raises(
        ValueError, match=r"model.safetensors is not a valid .safetensors file: 'a', F32 of shape \[3\]"
    ):
        open_checkpoint(folder)


def test_a_tensor_is_read_when_it_is_used_and_not_copied(folder):
    stored = {"a": random_values((512, 1024), np.float32), "b": random_values((3,), ml_dtypes.bfloat16)}
    save_file(stored, folder / "model.safetensors")
    with little_memory(2**16):
        values = open_checkpoint(folder)[1]["a"].read()
    assert same(values, stored["a"]) and not values.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_data_may_lie_at_any_byte(folder, dtype):
    """The headers of some writers are not padded, so that no number lies at a multiple of its size."""
    values = random_values((5,), dtype)
    for pad in range(8):
        header = json.dumps({"a": _entry(NAMES[dtype], [5], 0, values.nbytes)}).encode() + b" " * pad
        (folder / "model.safetensors").write_bytes(_raw(header, values.tobytes()))
        read = open_checkpoint(folder)[1]["a"].read()
        assert same(read, values) and np.array_equal(read.astype(np.float64), values.astype(np.float64))


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "config.json: the file is not valid JSON"),
        ("[]", "config.json: the file must be a JSON object, was a list"),
        ('{"a": {"b": 1, "b": 2}}', "config.json: the key 'b' occurs twice"),
        ('{"a":' * 100000, "config.json: the file is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "config.json: Exceeds the limit"),
    ],
)
def test_bad_configs_are_refused(folder, text, words):
    save_file({"a": random_values((2,), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        open_checkpoint(folder)


def test_the_key_that_stands_twice_is_found_among_many(folder):
    # Compared with each other, 400,000 keys would take an hour; counted, they take no time.
    save_file({"a": random_values((2,), np.float32)}, folder / "model.safetensors")
    keys = [f'"{i}": 0' for i in range(400_000)]
    (folder / "config.json").write_text("{" + ", ".join([*keys, keys[-1]]) + "}")
    with pytest.raises(ValueError, match="config.json: the key '399999' occurs twice"):
        open_checkpoint(folder)


def test_a_config_of_many_megabytes_is_not_read(folder):
    save_file({"a": random_values((2,), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(b" " * (2**24 + 1))
    with little_memory(), pytest.raises(ValueError, match="must have at most 16777216 bytes"):
        open_checkpoint(folder)


def test_what_is_not_there_is_missed(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds neither model.safetensors nor"):
        open_checkpoint(folder)
    save_file({"a": random_values((2,), np.float32)}, folder / "model.safetensors")
    os.remove(folder / "config.json")
    with pytest.raises(FileNotFoundError, match="config.json does not exist"):
        open_checkpoint(folder)


def test_folders_are_no_files(folder):
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match="model.safetensors must be a file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.PTH", "last.ckpt"])
def test_pickles_are_refused_with_what_to_do(folder, name):
    (folder / name).write_bytes(b"\x80\x02cos\nsystem\n")
    for path in (folder, folder / name):
        with pytest.raises(ValueError, match="never unpickles: convert it, with .*safetensors"):
            open_checkpoint(path)
    save_file({"a": random_values((2,), np.float32)}, folder / "model.safetensors")
    assert set(open_checkpoint(folder)[1]) == {"a"}  # a pickle beside it does not matter


def test_other_paths_are_refused_with_what_to_do(folder):
    (folder / "x.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="holds x.gguf: give the path of that file"):
        open_checkpoint(folder)
    with pytest.raises(ValueError, match="neither a Hugging Face folder nor a GGUF file"):
        open_checkpoint(folder / "x.gguf")
    save_file({"a": random_values((2,), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="give the folder that holds it"):
        open_checkpoint(folder / "model.safetensors")


# --- Any bytes ---


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A valid file, and how it is opened: the bytes, the path, a function."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_text("{}")
    file = folder / "model.safetensors"
    values = random_values((3, 4), np.float32), np.arange(4), random_values((2,), ml_dtypes.bfloat16)
    save_file(dict(zip("abc", values, strict=True)), file)
    return file.read_bytes(), file, lambda: open_checkpoint(folder)[1]


@given(data=st.data())
def test_a_file_cut_short_is_refused(sample, data):
    content, file, opened = sample
    assert_refused(opened, file, content[: data.draw(st.integers(0, len(content) - 1))])


@given(damage=damages)
@settings(max_examples=150)
def test_a_file_with_wrong_bytes_is_refused_or_read_as_it_says(sample, damage):
    content, file, opened = sample
    assert_refused_or_read(opened, file, content, damage)


@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused(sample, content):
    _, file, opened = sample
    assert_refused(opened, file, content)


def test_bfloat16_needs_a_package_that_is_named_with_the_command(folder, monkeypatch):
    save_file({"a": random_values((2,), ml_dtypes.bfloat16)}, folder / "model.safetensors")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r'bfloat16 needs ml_dtypes.*pip install "\.\[checkpoints\]"'):
        open_checkpoint(folder)


def test_nothing_but_numpy_is_needed_for_the_rest(folder, monkeypatch):
    save_file({"a": (stored := random_values((2,), np.float16))}, folder / "model.safetensors")
    for package in ("ml_dtypes", "safetensors", "gguf"):
        monkeypatch.setitem(sys.modules, package, None)
    assert same(open_checkpoint(folder)[1]["a"].read(), stored)
