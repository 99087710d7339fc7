"""Tensors in files: what is written is read back, bit by bit, and nothing unsound is read at all."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, strategies as st
from memory import little_memory
from optional import package

from pyrope import tensors
from pyrope.tensors import atomic_path, dtype_named, load_npy, load_safetensors, save_npy, save_safetensors

ml_dtypes = package("ml_dtypes")

NAMES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"]
NAMES += ["uint64", "uint32", "uint16", "uint8", "bool"]


@st.composite
def arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    dtype = dtype_named(draw(st.sampled_from(NAMES)))
    raw = draw(st.binary(min_size=int(np.prod(shape)) * dtype.itemsize, max_size=int(np.prod(shape)) * dtype.itemsize))
    if dtype.name == "bool":
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


def assert_same(a, b):
    assert (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()  # NaNs and all


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), arrays(), max_size=4))
def test_safetensors_come_back(tmp_path_factory, given_arrays):
    path = tmp_path_factory.mktemp("s") / "a.safetensors"
    save_safetensors(path, given_arrays, {"key": "value ✓"})
    loaded, metadata = load_safetensors(path)
    assert loaded.keys() == given_arrays.keys() and metadata == {"key": "value ✓"}
    for name, array in given_arrays.items():
        assert_same(loaded[name], array)
        assert not loaded[name].flags.writeable or not array.size
        assert loaded[name].ctypes.data % array.dtype.itemsize == 0
    assert os.listdir(path.parent) == ["a.safetensors"]


@given(arrays())
def test_npy_comes_back(tmp_path_factory, array):
    path = tmp_path_factory.mktemp("n") / "a.npy"
    save_npy(path, array)
    assert_same(load_npy(path, "it", array.shape, array.dtype), array)
    plain = np.load(path)
    assert plain.flags.c_contiguous and plain.dtype.name == (
        array.dtype.name if array.dtype.name != "bfloat16" else "uint16"
    )


def test_bits_can_be_called_bfloat16(tmp_path):
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    save_safetensors(tmp_path / "a", {"x": values.view(np.uint16), "y": values.view(np.uint16)}, {}, {"x"})
    loaded, _ = load_safetensors(tmp_path / "a")
    assert_same(loaded["x"], values)
    assert loaded["y"].dtype == np.uint16


def test_fortran_order_is_read(tmp_path):
    np.save(tmp_path / "a.npy", np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert_same(
        np.ascontiguousarray(load_npy(tmp_path / "a.npy", "it", (2, 3), np.dtype("f8"))), np.arange(6.0).reshape(2, 3)
    )


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": list(offsets),
        **more,
    }


UNSOUND = {
    "empty": (b"", "claims 0 bytes, in a file of 0"),
    "short": (b"\0\0\0", "in a file of 3"),
    "header beyond the file": (raw({}, length=3), "claims 3 bytes, in a file of 10"),
    "absurd header": (raw({}, length=2**64 - 1), "claims 18446744073709551615 bytes"),
    "no header": (bytes(8), "the header is not valid JSON"),
    "no JSON": (raw(b"nothing"), "Expecting value"),
    "no UTF-8": (raw(b'{"\xff": 1}'), "utf-8"),
    "deep JSON": (raw(b"[" * 100000), "the header is not valid JSON: .*(recursion|depth|Expecting)"),
    "a long number": (raw(b'{"x": ' + b"9" * 5000 + b"}"), "digits|must have dtype"),
    "a list": (raw([]), "the header must be a JSON object, was a list"),
    "metadata": (raw({"__metadata__": {"a": 1}}), "must be an object of strings"),
    "metadata list": (raw({"__metadata__": []}), "must be an object of strings"),
    "no entry": (raw({"x": 3}, bytes(8)), "'x' must have dtype, shape and data_offsets"),
    "a key missing": (raw({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)), "must have dtype, shape"),
    "a key too many": (raw({"x": entry(more=1)}, bytes(8)), "and nothing else"),
    "twice": (raw(b'{"x":' + json.dumps(entry()).encode() + b',"x":' + json.dumps(entry()).encode() + b"}", bytes(8)), "the key 'x' occurs twice"),
    "unknown dtype": (raw({"x": entry("F8_E4M3")}, bytes(8)), "'x' is stored as 'F8_E4M3', and only F16"),
    "dtype no string": (raw({"x": entry(["F32"])}, bytes(8)), "is stored as"),
    "negative shape": (raw({"x": entry(shape=(-2, -1))}, bytes(8)), "the shape of 'x' must be at most 32 integers"),
    "shape of floats": (raw({"x": entry(shape=(2.0,))}, bytes(8)), "the shape of 'x' must be at most 32 integers"),
    "shape of booleans": (raw({"x": entry(shape=(True, 2))}, bytes(8)), "the shape of 'x' must be at most 32 integers"),
    "shape no list": (raw({"x": entry(shape=2)}, bytes(8)), "the shape of 'x' must be at most 32 integers"),
    "too many axes": (raw({"x": entry(shape=(1,) * 65 + (2,))}, bytes(8)), "the shape of 'x' must be at most 32 integers"),
    "absurd shape": (raw({"x": entry(shape=(2**40, 2**40))}, bytes(8)), "cannot be the bytes 0 to 8"),
    "absurd shape of nothing": (raw({"x": entry(shape=(2**62, 2**62, 0), offsets=(0, 0))}), "cannot reshape|too big"),
    "absurd dimension": (raw({"x": entry(shape=(2**70, 0), offsets=(0, 0))}), "too large|int too big|dimension"),
    "offsets": (raw({"x": entry(offsets=(0, 4, 8))}, bytes(8)), "the data_offsets of 'x' must be two"),
    "negative offsets": (raw({"x": entry(offsets=(-8, 0))}, bytes(8)), "the data_offsets of 'x' must be two"),
    "backwards": (raw({"x": entry(offsets=(8, 0))}, bytes(8)), "cannot be the bytes 8 to 0"),
    "offsets far outside": (raw({"x": entry(shape=(2**60,), offsets=(0, 2**62))}, bytes(4)), "end at byte 4611686018427387904"),
    "wrong size": (raw({"x": entry(offsets=(0, 7))}, bytes(8)), "cannot be the bytes 0 to 7"),
    "beyond the end": (raw({"x": entry()}, bytes(7)), "end at byte 8 of the data, which has 7"),
    "left over": (raw({"x": entry()}, bytes(9)), "end at byte 8 of the data, which has 9"),
    "a gap": (raw({"x": entry(), "y": entry(offsets=(9, 17))}, bytes(17)), "'y' begins at byte 9 of the data"),
    "overlap": (raw({"x": entry(), "y": entry(offsets=(4, 12))}, bytes(12)), "'y' begins at byte 4 of the data"),
    "the same bytes": (raw({"x": entry(), "y": entry()}, bytes(8)), "'y' begins at byte 0 of the data"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_safetensors_are_refused(tmp_path, case):
    data, message = UNSOUND[case]
    (tmp_path / "bad").write_bytes(data)
    with little_memory(), pytest.raises(ValueError, match=f"(?s)bad is not a valid .safetensors file: .*({message})"):
        load_safetensors(tmp_path / "bad")


def test_a_header_of_many_megabytes_is_not_read(tmp_path):
    (tmp_path / "bad").write_bytes(raw(b"[" + b" " * 2**24 + b"]"))
    with little_memory(), pytest.raises(ValueError, match="the header claims 16777218 bytes"):
        load_safetensors(tmp_path / "bad")


@given(st.data())
def test_damaged_files_are_refused_or_differ_in_numbers_alone(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("d") / "a"
    save_safetensors(path, {"x": np.arange(6.0).reshape(2, 3), "yy": np.arange(3, dtype=np.int8)}, {"k": "v"})
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = data.draw(
        st.sampled_from(
            [good[:at], good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :], good + b"x"]
        )
    )
    path.write_bytes(bad)
    try:
        loaded, _ = load_safetensors(path)
    except ValueError:
        return
    assert len(bad) == len(good) and sum(array.nbytes for array in loaded.values()) == 51


def test_what_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(TypeError, match="x must have a dtype of .*, was complex128"):
        save_safetensors(tmp_path / "a", {"x": np.ones(2, complex)}, {})
    with pytest.raises(ValueError, match="a tensor's name must be a string, not empty and not '__metadata__', was"):
        save_safetensors(tmp_path / "a", {"__metadata__": np.ones(2)}, {})
    with pytest.raises(ValueError, match="dtype must be one of float16, .*, was 'float8'"):
        dtype_named("float8")
    assert os.listdir(tmp_path) == []


def test_bfloat16_needs_ml_dtypes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="bfloat16 needs ml_dtypes"):
        dtype_named("bfloat16")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_file_is_written_completely_or_not_at_all(tmp_path, monkeypatch, error):
    path = tmp_path / "a"
    save_safetensors(path, {"x": np.ones(2)}, {})
    before = path.read_bytes()

    def fails(array):
        raise error

    monkeypatch.setattr(tensors, "as_bits", fails)
    with pytest.raises(error):
        save_safetensors(path, {"x": np.zeros(2)}, {})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a"]


def test_links_are_followed_and_permissions_are_usual(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "file")
    with atomic_path(tmp_path / "link") as draft:
        draft.write_text("hello")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "file").read_text() == "hello"
    (tmp_path / "usual").write_text("")
    assert (tmp_path / "there" / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    for name in ("fifo", "link", "."):
        with pytest.raises(ValueError, match="is no regular file: name a new file"), atomic_path(tmp_path / name):
            raise AssertionError("nothing is written")
    assert (tmp_path / "fifo").is_fifo()
