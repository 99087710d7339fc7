"""The notebook runs, and the outputs that are stored in it are those that it has."""

import json
import re

import notebook
import pytest

STORED = json.loads(notebook.PATH.read_text("utf-8"))


def words(outputs):
    """What outputs say, without their numbers, whose last digits are those of a machine."""
    text = ["".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs]
    return [re.sub(r"[-+]?\d[\d.]*(?:e[-+]\d+)?", "#", one) for one in text]


@pytest.fixture(scope="module")
def cells():
    pairs = zip(STORED["cells"], notebook.executed(STORED)["cells"], strict=True)
    return [(old, new) for old, new in pairs if old["cell_type"] == "code"]


def test_the_notebook_says_what_is_stored_in_it(cells):
    assert len(cells) >= 4
    for old, new in cells:
        assert words(old["outputs"]) == words(new["outputs"]), "run tests/notebook.py, which stores the outputs"
        assert old["execution_count"] == new["execution_count"]


def test_the_reports_are_stored_as_pages(cells):
    data = [output.get("data", {}) for old, _ in cells for output in old["outputs"]]
    pages = ["".join(one["text/html"]) for one in data if "text/html" in one]
    assert len(pages) >= 3 and all(text.startswith('<div class="pyrope">') for text in pages)
    assert all(any(words in text for text in pages) for words in ("WRONG", "RIGHT", "<table"))
    assert "<img" not in str(pages)


def test_the_notebook_has_the_form_of_notebooks():
    identifiers = [cell["id"] for cell in STORED["cells"]]
    assert (STORED["nbformat"], STORED["nbformat_minor"]) == (4, 5) and len(set(identifiers)) == len(identifiers)
