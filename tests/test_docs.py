"""The README and the pages say what is true of the code: names, equations, files, commands, examples."""

import argparse
import ast
import doctest
import importlib
import inspect
import json
import operator
import pathlib
import re
import runpy
import shlex
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import test_design

import pyrope
from pyrope import cli, definition, plots, theta
from pyrope.models import conventions
from pyrope.oracle import adapters

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
PAPER = (ROOT / "docs/paper.md").read_text()
# Equation, functions of the definition and of the engine ("—" if there are none), file and name of the test.
ROWS = re.findall(
    r"^\| \((\d+)\) \| .* \| (—|`\w+`(?:, `\w+`)*) \| (—|`pyrope\.[\w., `]+`) \| `([\w/.]+)::(\w+)` \|$", PAPER, re.M
)


def code_words(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def public(name: str) -> Any:
    """The function that a dotted name, such as pyrope.encodings.sinusoidal, leads to."""
    return operator.attrgetter(name.removeprefix("pyrope."))(pyrope)


def computed(source: str) -> set[str]:
    """The equations whose number stands in a comment behind code."""
    return set(re.findall(r"Eq\. \((\d+)\)", "\n".join(re.findall(r"^ *[^\s#].*  # (.*)$", source, re.M))))


def test_every_equation_in_the_code_is_a_row():
    code = "\n".join(path.read_text() for path in ROOT.glob("pyrope/**/*.py"))
    used = set(re.findall(r"Eq\. \((\d+)\)", code))
    assert used and used <= {number for number, *_ in ROWS}
    assert not re.search(r"(?i)\b(equation|eqn\.?|eq) *\(?\d", code), 'always spelt "Eq. (n)"'


def test_every_row_names_the_functions_that_compute_it():
    functions = dict(inspect.getmembers(definition, inspect.isfunction))
    equations = {name: computed(inspect.getsource(function)) for name, function in functions.items()}
    for number, cell, engine, *_ in ROWS:
        computing = {name for name in equations if number in equations[name]}
        if number == "11":  # a demand, which nothing computes
            assert not computing and set(code_words(cell)) <= functions.keys()
        elif cell == "—":
            assert not computing
            assert all(number in computed(inspect.getsource(public(name))) for name in code_words(engine))
        else:
            assert set(code_words(cell)) == computing, f"Eq. ({number})"


def test_every_row_is_read_and_its_functions_and_tests_exist():
    assert len(ROWS) == len(re.findall(r"^\| \(\d+\)", PAPER, re.M))
    assert [int(number) for number, *_ in ROWS] == sorted({int(number) for number, *_ in ROWS})
    for number, definitions, engine, file, test in ROWS:
        assert all(callable(public(name)) for name in code_words(engine)), number
        assert definitions == "—" or file == "tests/test_definition.py" and test.startswith(f"test_eq_{number}_")
        body = re.search(rf"^def {test}\(.*?(?=^\S|\Z)", (ROOT / file).read_text(), re.M | re.S)
        assert body, f"Eq. ({number}): {file} has no {test}"
        assert number != "11" or "assert" in body[0], "a demand is what its test checks"


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/paper.md"])
def test_the_pages_say_how_long_the_definition_is(page):
    lines = len((ROOT / "pyrope/definition.py").read_text().splitlines())
    stated = re.findall(r"\[`pyrope/definition\.py`\]\(\S+?\)(?:, |，)(\d+) (?:lines|行)", (ROOT / page).read_text())
    assert stated == [str(lines)]


def imported(path: pathlib.Path) -> set[pathlib.Path]:
    """The files of pyrope that a file imports when it is imported."""
    files = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [folder] if folder.with_suffix(".py").is_file() else [folder / alias.name for alias in node.names]
            files |= {name.with_suffix(".py") for name in names if name.with_suffix(".py").is_file()}
    return files


def test_the_readme_names_the_files_of_the_engine():
    """Twelve, and the definition: all that a forward pass imports."""
    needed, new = set(), {ROOT / "pyrope/models/transformer.py", ROOT / "pyrope/linear.py"}
    while new:
        needed |= new
        new = set().union(*map(imported, new)) - needed
    sentence = re.search(r"these twelve files, which are the engine: (.*?)\. ", (ROOT / "README.md").read_text(), re.S)[
        1
    ]
    named = re.findall(r"`([\w/]+\.py)`", sentence)
    assert len(named) == 12
    assert {"definition.py", *named} == {path.relative_to(ROOT / "pyrope").as_posix() for path in needed}


def test_the_workflow_for_users_can_be_read():
    text = (ROOT / "docs/on-every-push.md").read_text()
    (command,) = re.findall(r"- run: (pyrope check .*)$", text, re.M)
    assert cli._parser().parse_args(shlex.split(command)[1:]).command == "check"


def test_the_workflow_of_the_project_runs_what_ci_runs():
    assert "- run: .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()


def test_the_page_of_mistakes_is_made_from_the_data():
    made = runpy.run_path(str(ROOT / "docs/tables.py"))["page"]()
    assert (ROOT / "docs/mistakes.md").read_text("utf-8") == made, "run docs/tables.py"


def test_the_citation_has_the_version():
    assert f"\nversion: {pyrope.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_reader_meets_a_blankline():
    assert "<BLANKLINE>" not in (ROOT / "README.md").read_text() + (ROOT / "README.zh.md").read_text()


def test_contributing_has_every_environment():
    rows = re.findall(r"^\| `(\w+)`(?: … `\w+`)? \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert set(re.findall(r"^\[testenv:(\w+)\]$", (ROOT / "tox.ini").read_text(), re.M)) <= set(rows)


@each_page
def test_examples_in_words_are_true(path):
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testfile(str(path), module_relative=False, optionflags=options, encoding="utf-8")
    assert failed == 0


def test_the_page_of_files_has_a_line_for_every_file():
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs/files.md").read_text(), re.M | re.S)
    lines = "".join(blocks).splitlines()
    assert lines[0].startswith("definition.py ") and all(re.fullmatch(r"\S+\.py {2,}\S.{9,}", line) for line in lines)
    files = [path.relative_to(ROOT / "pyrope").as_posix() for path in ROOT.glob("pyrope/**/[a-z]*.py")]
    assert sorted(line.split()[0] for line in lines) == sorted(files)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    "page, row", [("docs/files.md", r"^\| {} \| (.*?) \| .*\|$"), ("CONTRIBUTING.md", r"^{}\. (.*)$")]
)
def test_the_import_rules_of_the_pages_are_those_that_are_tested(page, row):
    text = (ROOT / page).read_text()
    for number, modules in test_design.ROWS.items():
        subject = re.search(row.format(number), text, re.M)[1].partition(" import")[0]
        assert set(code_words(subject)) == modules - {"__main__", "__init__"}, f"{page}: {number}"


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert 90 <= len(lines) <= 120 and max(map(len, lines)) <= 120


def convention_row(name: str, convention: conventions.Convention) -> str:
    """The row of a model type in docs/conventions.md."""
    base = "as the config says" if convention.by_layer else f"{convention.base:.0f}"
    if convention.layers:
        base = ", ".join(f"{layer.base:.0f} {kind.partition('_')[0]}" for kind, layer in convention.layers.items())
    width = "all" if convention.fraction == 1 else f"first {convention.fraction:g}"
    if convention.latent or convention.rotary_dim:
        where = "first" if convention.placement == "prefix" else "last"
        width = "`qk_rope_head_dim`, last" if convention.latent else f"{where} {convention.rotary_dim} features"
    particular = {
        "direction −1": convention.direction == -1,
        f'axes "{convention.axes}"': convention.axes,
        "a rope for each type of layer": convention.layers or convention.by_layer,
        f"{convention.still} layers do not turn": convention.still,
        f"one layer in {abs(convention.every or 0)} does not turn": convention.every,
        "only if the config says `{}: {}`".format(*(convention.switch or ("", ""))): convention.switch,
        "`alpha` in dynamic: another base": convention.alpha,
        "the config must say its scaling": convention.explicit,
        f"original length {convention.original_length}": convention.original_length,
        f"head size {convention.head_dim}": convention.head_dim,
    }
    remarks = "; ".join(words for words, holds in particular.items() if holds)
    return f"| `{name}` | {convention.layout} | {base} | {width} | {remarks} |"


def test_the_table_of_conventions_is_the_data():
    rows = re.findall(r"^\| `[\w-]+` \| (?:half|interleaved)[^\n]*$", (ROOT / "docs/conventions.md").read_text(), re.M)
    assert rows == [convention_row(name, data) for name, data in conventions.MODEL_TYPES.items()]


def test_words_for_axes_that_are_no_style_are_explained():
    text = (ROOT / "docs/conventions.md").read_text()
    styles = {None, "sections", "interleaved", "axial", "pixtral"}
    words = {one.axes for one in conventions.MODEL_TYPES.values()} - styles
    assert words and all(f'"{word}"' in text.partition("| `model_type` |")[0] for word in words)


def test_what_was_found_in_the_wild_says_how_it_is_run():
    text = (ROOT / "docs/wild.md").read_text()
    assert "run by `tox -e peers`" in text and "by hand, by `tox -e world`" in text


def test_every_page_is_in_the_index():
    entries = re.findall(r"^([\w-]+\.md)$", (ROOT / "docs/index.md").read_text(), re.M)
    assert sorted([*entries, "index.md"]) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@each_page
def test_every_file_that_a_page_names_is_there(path):
    for name in re.findall(r"\b(?:pyrope|tests|examples)/[\w/]+\.(?:py|c)\b", path.read_text()):
        assert (ROOT / name).is_file(), name


def test_every_adapter_is_on_its_page():
    text = (ROOT / "docs/adapters.md").read_text()
    made = [name for name in vars(adapters) if re.match(r"from_|with_|cached$", name) and name != "from_numpy"]
    assert len(made) >= 10 and all(re.search(rf"`.*\b{name}\(", text) for name in made)


@each_page
def test_every_command_of_the_pages_can_be_read(path):
    fenced = re.findall(r"^```(.*?)\n(.*?)^```$", path.read_text(), re.M | re.S)
    blocks = [block for kind, block in fenced if not kind]
    lines = [
        line for block in blocks for line in re.findall(r"(?:^|&& )pyrope (.*)$", block.replace("\\\n", " "), re.M)
    ]
    read = [cli._parser().parse_args(shlex.split(line, comments=True)).command for line in lines]  # else: SystemExit
    assert path.name != "README.md" or {"check", "generate", "plot"} <= set(read)


def test_every_example_is_in_the_index():
    listed = re.findall(r"^\| `([\w/]+\.(?:py|c))` \|", (ROOT / "docs/index.md").read_text(), re.M)
    files = [
        path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".c")
    ]
    shown = [path.as_posix() for path in files if path.parts[0] != "benchmarks" and path.name != "command.py"]
    assert sorted(listed) == sorted([*shown, "benchmarks/all.py"])


def anchors(path: pathlib.Path) -> set[str]:
    """The headings of a page, as links spell them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_every_relative_link_leads_somewhere(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text()
    listed = {
        module: set(re.findall(r"\w+", members)) if members else None  # None: all that have a docstring
        for module, members in re.findall(r"^\.\. automodule:: pyrope\.([\w.]+)$(?:\n +:members: (.+)$)?", text, re.M)
    }
    assert set(pyrope._MODULES) <= listed.keys()
    for module, names in pyrope._PLACES.items():
        assert module in listed, module
        assert listed[module] is None or set(names.split()) <= listed[module], module
    for module, members in listed.items():
        for name in members or ():
            assert hasattr(importlib.import_module(f"pyrope.{module}"), name), name


@each_page
def test_every_row_of_a_table_has_the_cells_of_its_header(path):
    for table in re.findall(r"(?:^\|.*\|\n)+", path.read_text(), re.M):
        cells = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(cells) == 1, table.splitlines()[0]


PICTURE = re.compile(r"^!\[[^\]]+\]\(pictures/([\w-]+\.svg)\)\n\n\*[^*]+\*\nDrawn by `(pyrope plot [^`]+)`\.$", re.M)


def pictures(path: pathlib.Path) -> list[tuple[str, argparse.Namespace, str]]:
    """The file, the options and the command of each picture of a page."""
    drawn = [(file, command.replace("\n", " ")) for file, command in PICTURE.findall(path.read_text())]
    return [(file, cli._parser().parse_args(shlex.split(command)[1:]), command) for file, command in drawn]


DRAWN = [picture for path in sorted(ROOT.glob("docs/*.md")) for picture in pictures(path)]


def test_every_picture_has_its_command_and_every_kind_is_shown():
    files = [file for file, *_ in DRAWN]
    assert files == [options.output for _, options, _ in DRAWN]
    assert sorted(files) == sorted(path.name for path in (ROOT / "docs/pictures").iterdir())
    assert {options.name for _, options, _ in DRAWN} == set(plots.PLOTS)
    shown = {file for path in PAGES for file in re.findall(r"\(\S*pictures/(\S+?)\)", path.read_text())}
    assert shown == set(files)
    assert len(set(re.findall(r"\(docs/pictures/(\S+?)\)", (ROOT / "README.md").read_text()))) in (2, 3)


def numbers_and_words(value: Any) -> tuple[list[float], list[str]]:
    """The leaves of a description in JSON, in order."""
    if isinstance(value, dict | list):
        parts = [numbers_and_words(part) for part in (value.values() if isinstance(value, dict) else value)]
        return sum((numbers for numbers, _ in parts), []), sum((words for _, words in parts), [])
    return ([], [value]) if isinstance(value, str) else ([value], [])


@pytest.mark.parametrize("file, options, command", DRAWN, ids=[file for file, *_ in DRAWN])
def test_every_picture_is_up_to_date(file, options, command, monkeypatch):
    """What a file shows is what is drawn today: its words and colours, and its numbers but for their last digits."""
    stored = ElementTree.parse(ROOT / "docs/pictures" / file).find(".//{http://purl.org/dc/elements/1.1/}description")
    monkeypatch.setattr(plots, "_times_with_one_thread", lambda n, *_: {"softmax, Eq. (2)": n, "linear, Eq. (19)": n})
    rope = {"rope": cli._rope(dict(vars(options)))} if "head_dim" in options else {}
    old, new = (json.loads(text) for text in (stored.text, plots.description(plots.PLOTS[options.name](**rope))))
    (old_numbers, old_words), (new_numbers, new_words) = numbers_and_words(old), numbers_and_words(new)
    stale = f"cd docs/pictures && {command}"
    assert old_words == new_words, stale
    if options.name != "time":  # its numbers are those of the machine that drew it
        np.testing.assert_allclose(old_numbers, new_numbers, rtol=1e-4, atol=1e-9, err_msg=stale)


def test_every_rescaling_has_its_picture():
    shown = {
        type(cli._rope(dict(vars(options))).scaling)
        for _, options, _ in pictures(ROOT / "docs/scalings.md")
        if "scaling" in options
    }
    assert shown == set(theta.SCALINGS.values())
