"""Files: what is written is read back, bit by bit, and nothing unsound is read at all."""

import os
import pathlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyrope.files import (  # fmt: skip
    DTYPES,
    atomic_path,
    check_file,
    dtype_named,
    errors_prefixed_with,
    load_npy,
    load_safetensors,
    read_json,
    save_npy,
    save_safetensors,
)


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = dtype_named(draw(st.sampled_from(DTYPES)))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    array = np.frombuffer(bytes(byte & 1 for byte in raw) if dtype.name == "bool" else raw, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


def assert_same(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()  # NaNs and all


@pytest.mark.needs("safetensors")
@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), arrays(), max_size=4))
def test_safetensors_come_back(tmp_path_factory, given_arrays):
    path = tmp_path_factory.mktemp("s") / "a.safetensors"
    save_safetensors(path, given_arrays, {"key": "value ✓"})
    loaded, metadata = load_safetensors(path)
    assert loaded.keys() == given_arrays.keys() and metadata == {"key": "value ✓"}
    for name, array in given_arrays.items():
        assert_same(loaded[name], array)
    assert os.listdir(path.parent) == ["a.safetensors"]


@pytest.mark.needs("safetensors")
def test_safetensors_that_are_refused(tmp_path):
    with pytest.raises(TypeError, match="b must have a dtype of bool, .*, was complex128"):
        save_safetensors(tmp_path / "a", {"a": np.ones(2), "b": np.ones(2, complex)}, {})
    assert os.listdir(tmp_path) == []
    for content in (
        b"",
        bytes(8),
        b"\xff" * 20,
        (2).to_bytes(8, "little") + b"{}x",
        (6).to_bytes(8, "little") + b"[[[[[[",
    ):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ValueError, match="x: "):
            load_safetensors(tmp_path / "x")


@given(arrays())
def test_npy_comes_back(tmp_path_factory, array):
    path = tmp_path_factory.mktemp("n") / "a.npy"
    save_npy(path, array)
    assert_same(load_npy(path, "it", array.shape, array.dtype), array)
    plain, name = np.load(path), array.dtype.name
    assert plain.flags.c_contiguous and plain.dtype.name == (name if name != "bfloat16" else "uint16")


F4, TWO = np.dtype(np.float32), np.ones(2, "f4")


@pytest.mark.parametrize("stored, shape, dtype, words", [
    (TWO, (3,), F4, r"it must be float32 of shape \(3,\), was float32 of shape \(2,\)"),
    (TWO, (2,), np.dtype("f8"), "it must be float64 of shape"), (TWO.astype(">f4"), (2,), F4, "was big-endian float32"),
    (TWO, (2,), "bfloat16", r"must be uint16 .the bits of bfloat16. of shape"), (np.array([None]), (1,), F4, "was object"),
])  # fmt: skip
def test_npy_files_that_are_refused(stored, shape, dtype, words, tmp_path):
    np.save(tmp_path / "a.npy", stored, allow_pickle=True)
    with pytest.raises(ValueError, match=words):
        load_npy(tmp_path / "a.npy", "it", shape, dtype_named(dtype) if isinstance(dtype, str) else dtype)


def test_npy_files_that_are_cut_or_missing(tmp_path):
    np.save(path := tmp_path / "a.npy", np.asfortranarray(np.arange(6, dtype="f4").reshape(2, 3)))
    assert load_npy(path, "it", (2, 3), F4).tolist() == [[0, 1, 2], [3, 4, 5]]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="must hold 6 numbers of 4 bytes, has 23 bytes"):
        load_npy(path, "it", (2, 3), F4)
    with pytest.raises(ValueError, match="it: there is no file"):
        load_npy(tmp_path / "nowhere", "it", (1,), F4)


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a"
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), atomic_path(path) as draft:
            draft.write_text("half")
            raise error
    assert os.listdir(tmp_path) == []
    path.write_text("old")
    (tmp_path / "link").symlink_to(path)
    with atomic_path(tmp_path / "link") as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and (tmp_path / "link").is_symlink()
    with pytest.raises(ValueError, match="is not a regular file"), atomic_path(tmp_path):
        pass


@pytest.mark.parametrize("text, words", [
    (b"{", "the file is not valid JSON"), (b"\xff\xfe\x00", "the file is not valid JSON"), (b"[" * 100000, "the file is not valid JSON"),
    (b"[]", "the file must be a JSON object, was a list"), (b'{"a": {"b": 1, "b": 2}}', "the key 'b' occurs twice"),
    (b" " * (2**24 + 1), "the file must have at most 16777216 bytes"),
])  # fmt: skip
def test_json_that_is_refused(text, words, tmp_path):
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ValueError, match=f"x.json: {words}"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}


@pytest.mark.parametrize("name, hinted", [
    ("SmolLM2", True), ("org/model", True), ("org/model.gguf", False), ("x.npy", False), ("here/model", False), ("a/b/c", False),
    ("/nowhere", False),
])  # fmt: skip
def test_the_id_of_a_model_is_no_file(name, hinted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("here")
    with pytest.raises(FileNotFoundError) as caught:
        check_file(pathlib.Path(name))
    assert str(caught.value).startswith(f"{name} does not exist")
    assert ("Hugging Face Hub" in str(caught.value)) is hinted
    with pytest.raises(ValueError, match="must be a file, but is a directory, a pipe or a device"):
        check_file(tmp_path)


def test_errors_begin_with_the_name_of_the_file():
    panic = type("PanicException", (BaseException,), {})  # of Rust
    for error in (ValueError("why"), KeyError("why"), RecursionError("why"), panic("why")):
        with pytest.raises(ValueError, match="^folder/x: '?why'?$"), errors_prefixed_with(pathlib.Path("folder/x")):
            raise error
    for error in (KeyboardInterrupt, FileNotFoundError, ImportError):
        with pytest.raises(error), errors_prefixed_with(pathlib.Path("x")):
            raise error


def test_dtypes_have_names():
    assert dtype_named("float16") == np.float16 and dtype_named("bfloat16").itemsize == 2
    with pytest.raises(ValueError, match="dtype must be one of bool, bfloat16, int8, .*, was 'float8'"):
        dtype_named("float8")
