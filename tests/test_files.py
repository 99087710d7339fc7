"""What all readers of checkpoint files share."""

import os
import pathlib

import pytest

from pyrope.models.files import abridged, check_file, errors_prefixed_with, integer_tensor, read_json


@pytest.mark.parametrize("name, hinted", [
    ("SmolLM2", True), ("org/model", True), ("org/model.gguf", False), ("model.JSON", False), ("x.safetensors", False),
    ("x.npy", False), ("here/model", False), ("a/b/c", False), ("/nowhere", False), ("/nowhere/model", False),
])  # fmt: skip
def test_the_id_of_a_model_is_no_file(name, hinted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("here")
    with pytest.raises(FileNotFoundError) as caught:
        check_file(pathlib.Path(name))
    hint = (
        ": if this is the id of a model on the Hugging Face Hub, download it, and give its folder; nothing is fetched"
    )
    assert str(caught.value) == f"{name} does not exist{hint if hinted else ''}"


def test_only_files_are_read(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    check_file(tmp_path / "x.json")
    assert read_json(tmp_path / "x.json") == {"a": 1}
    with pytest.raises(ValueError, match="must be a file, and is something else"):
        check_file(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist$"):
        read_json(tmp_path / "y.json")


@pytest.mark.parametrize("error", [ValueError, TypeError, OverflowError, RecursionError])
def test_errors_begin_with_the_name_of_the_file(error):
    with pytest.raises(ValueError, match="^folder/x: why$"), errors_prefixed_with(pathlib.Path("folder/x")):
        raise error("why")
    with pytest.raises(KeyError), errors_prefixed_with(pathlib.Path("x")):
        raise KeyError


def test_integers_have_a_shape_and_no_values():
    tensor = integer_tensor("mask", "I8", (2, 3))
    assert tensor.shape == (2, 3)
    with pytest.raises(TypeError, match=r"mask holds integers \(I8\), and weights must be floats"):
        tensor.read()


def test_five_names_are_listed():
    assert abridged("edcba") == "'a', 'b', 'c', 'd', 'e'"
    assert abridged("fedcba") == "'a', 'b', 'c', 'd', 'e' and 1 more"
    assert abridged([]) == ""
