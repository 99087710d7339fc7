"""docs/paper.md and the README speak of what is there."""

import doctest
import operator
import pathlib
import re

import pytest

import pyrope

ROOT = pathlib.Path(__file__).parent.parent
ROWS = re.findall(
    r"^\| \((\d+)\) \| .* \| `pyrope\.([\w.]+)` \| `([\w/.]+)::(\w+)` \|$", (ROOT / "docs/paper.md").read_text(), re.M
)


def test_every_equation_in_the_code_is_a_row():
    code = "\n".join(path.read_text() for path in ROOT.glob("pyrope/**/*.py"))
    used = set(re.findall(r"Eq\. \((\d+)\)", code))
    assert used and used <= {number for number, *_ in ROWS}
    assert not re.search(r"(?i)\b(equation|eqn\.?|eq) *\(?\d", code), 'always spelt "Eq. (n)"'


def test_every_row_is_read_and_its_function_and_test_exist():
    assert len(ROWS) == len(re.findall(r"^\| \(\d+\)", (ROOT / "docs/paper.md").read_text(), re.M))
    assert [int(number) for number, *_ in ROWS] == sorted({int(number) for number, *_ in ROWS})
    for number, function, file, test in ROWS:
        assert callable(operator.attrgetter(function)(pyrope)), function
        body = (ROOT / file).read_text().partition(f"def {test}(")[2]
        assert body, f"Eq. ({number}): {file} has no {test}"


@pytest.mark.parametrize("name", ["README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))])
def test_examples_in_words_are_true(name):
    path = ROOT / name if name == "README.md" else ROOT / "docs" / name
    failed, _ = doctest.testfile(
        str(path), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    assert failed == 0


def test_the_readme_lists_every_file():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"^\| `(pyrope/[\w/]+\.py)`", text, re.M):
        assert (ROOT / path).is_file(), path
    listed = set(re.findall(r"^\| `pyrope/([\w/]+\.py)`", text, re.M))
    files = {path.relative_to(ROOT / "pyrope").as_posix() for path in ROOT.glob("pyrope/**/[a-z]*.py")}
    assert listed == files
