"""Files: what is written is read back, bit by bit, and nothing unsound is read at all."""

import os
import pathlib
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

import pyrope
from pyrope import files
from pyrope.files import DTYPES, atomic_path, dtype_named, errors_prefixed_with, load_npy, read_json


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
    files.save_safetensors(path, given_arrays, {"key": "value ✓"})
    loaded, metadata = files.load_safetensors(path)
    assert loaded.keys() == given_arrays.keys() and metadata == {"key": "value ✓"}
    for name, array in given_arrays.items():
        assert_same(loaded[name], array)
    assert os.listdir(path.parent) == ["a.safetensors"]


@given(arrays())
def test_npy_comes_back(tmp_path_factory, array):
    path = tmp_path_factory.mktemp("n") / "a.npy"
    files.save_npy(path, array)
    assert_same(load_npy(path, "it", array.shape, array.dtype), array)
    plain, name = np.load(path), array.dtype.name
    assert plain.flags.c_contiguous and plain.dtype.name == (name if name != "bfloat16" else "uint16")


def npy(header, content=bytes(12)):
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


F4 = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }"
NO_NPY = "it: .*x is not a valid .npy file: "


def numbers(path, dtype="float32"):
    return load_npy(path, "it", (3,), dtype_named(dtype))


@pytest.mark.parametrize("read, content, words", [
    *((numbers, npy(header), NO_NPY) for header in (b"{'descr': '<f4', 'shape': (", b"{", b"'''", b"\\x", b"[" * 200, b"\xff\xfe", b"1e", b"  x\n y")),
    (numbers, npy(F4, bytes(11)), NO_NPY), (numbers, b"", NO_NPY), (numbers, npy(F4.replace(b"3", b"2") + b" " * 9999), NO_NPY),
    (numbers, npy(F4.replace(b"3", b"2")), r"it must be float32 of shape \(3,\), was float32 of shape \(2,\)"),
    (numbers, npy(F4.replace(b"<", b">")), "was big-endian float32"), (numbers, npy(F4.replace(b"<f4", b"|O")), NO_NPY),
    (lambda path: numbers(path, "bfloat16"), npy(F4), r"must be uint16 .the bits of bfloat16. of shape"),
    *((read_json, content, "x: the file is not valid JSON") for content in (b"{", b"\xff\xfe\x00", b"[" * 100000)),
    (read_json, b"[]", "x: the file must be a JSON object, was a list"), (read_json, b'{"a": {"b": 1, "b": 2}}', "x: the key 'b' occurs twice"),
    *((files.load_safetensors, content, "x: ") for content in (b"", bytes(8), b"\xff" * 20, b"\2" + bytes(7) + b"{}x", b"\6" + bytes(7) + b"[[[[[[")),
])  # fmt: skip
def test_content_that_is_refused(read, content, words, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read(tmp_path / "x")


def test_what_is_nearly_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}
    (tmp_path / "x.npy").write_bytes(npy(F4))
    assert numbers(tmp_path / "x.npy").tolist() == [0, 0, 0]
    np.save(tmp_path / "f.npy", np.asfortranarray(np.arange(6, dtype="f4").reshape(2, 3)))
    assert load_npy(tmp_path / "f.npy", "it", (2, 3), np.dtype("f4")).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "a"
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), atomic_path(path) as draft:
            draft.write_text("half")
            raise error
    with pytest.raises(ValueError, match="a: .*complex128"):
        files.save_safetensors(path, {"a": np.ones(2), "b": np.ones(2, complex)}, {})
    assert os.listdir(tmp_path) == []
    path.write_text("old")
    (tmp_path / "link").symlink_to(path)
    with atomic_path(tmp_path / "link") as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and (tmp_path / "link").is_symlink()
    files.save_safetensors(tmp_path / "x", {"a": np.ones(2)}, {})
    assert (tmp_path / "x").stat().st_mode == path.stat().st_mode  # others may read it, too
    with pytest.raises(ValueError, match="is not a regular file"), atomic_path(tmp_path):
        pass


def test_errors_begin_with_the_name_of_the_file():
    panic = type("PanicException", (BaseException,), {})  # of Rust
    for error in (ValueError("why"), KeyError("why"), RecursionError("why"), panic("why")):
        with pytest.raises(ValueError, match="^folder/x: '?why'?$"), errors_prefixed_with(pathlib.Path("folder/x")):
            raise error
    for error in (KeyboardInterrupt, FileNotFoundError, ImportError):
        with pytest.raises(error), errors_prefixed_with(pathlib.Path("x")):
            raise error


@pytest.mark.parametrize("package, extra, call", [
    ("safetensors", "checkpoints", files.load_safetensors), ("safetensors.numpy", "checkpoints", lambda x: files.save_safetensors(x, {}, {})),
    ("ml_dtypes", "checkpoints", lambda _: dtype_named("bfloat16")), ("tokenizers", "checkpoints", pyrope.load_tokenizer),
    ("gguf", "checkpoints", lambda path: pyrope.load(path)), ("mpi4py.MPI", "mpi", lambda _: pyrope.parallel.world()),
    ("mpi4py.MPI", "mpi", lambda _: pyrope.parallel.gather(None, np.zeros((1, 1)), [0])),
])  # fmt: skip
def test_a_package_that_is_missing_is_named_with_its_extra(package, extra, call, tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf'needs {package.partition(".")[0]}.*pip install "\.\[{extra}\]" in a clone'
    ):
        call(tmp_path / "x.gguf")


def test_dtypes_have_names():
    assert dtype_named("float16") == np.float16 and dtype_named("bfloat16").itemsize == 2
    with pytest.raises(ValueError, match="dtype must be one of bool, bfloat16, int8, .*, was 'float8'"):
        dtype_named("float8")
