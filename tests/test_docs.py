"""The README and the pages say what is true of the code: names, equations, files, commands, examples, pictures."""

import argparse
import doctest
import inspect
import operator
import pathlib
import re
import runpy
import shlex
from typing import Any

import pytest

import pyrope
from pyrope import cli, definition, plots, theta
from pyrope.oracle import adapters

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
PAPER = (ROOT / "docs/paper.md").read_text()
# Equation, functions of the definition and of the engine ("—" if there are none), and how its test's name begins.
ROWS = re.findall(
    r"^\| \((\d+)\) \| .* \| (—|`\w+`(?:, `\w+`)*) \| (—|`pyrope\.[\w., `]+`) \| `(\w+)` \|$", PAPER, re.M
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
    assert len(ROWS) == len(re.findall(r"^\| \(\d+\)", PAPER, re.M)), "a row that cannot be read"
    assert not re.search(r"(?i)\b(equation|eqn\.?|eq) *\(?\d", code), 'always spelt "Eq. (n)"'


def test_every_row_names_the_functions_that_compute_it():
    functions = dict(inspect.getmembers(definition, inspect.isfunction))
    equations = {name: computed(inspect.getsource(function)) for name, function in functions.items()}
    for number, cell, engine, _ in ROWS:
        computing = {name for name in equations if number in equations[name]}
        assert all(callable(public(name)) for name in code_words(engine)), number
        if number == "11":  # a requirement, which nothing computes
            assert not computing and set(code_words(cell)) <= functions.keys()
        elif cell == "—":
            assert not computing
            assert all(number in computed(inspect.getsource(public(name))) for name in code_words(engine))
        else:
            assert set(code_words(cell)) == computing, f"Eq. ({number})"


def test_every_row_has_its_test():
    for number, definitions, _, test in ROWS:
        file = "test_encodings.py" if definitions == "—" else "test_definition.py"
        assert definitions == "—" or test == f"eq_{number}"
        assert re.search(rf"^def test_{test}_", (ROOT / "tests" / file).read_text(), re.M), f"Eq. ({number})"


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_states_sizes(page):
    """Of the definition and of RoPE in it exactly, of the engine and of the oracle within a tenth."""
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    stated = [int(number.replace(",", "")) for number in tables["SIZE"].findall((ROOT / page).read_text())]
    assert stated[:2] == tables["sizes"]()[:2], "run docs/tables.py"
    assert stated == pytest.approx(tables["sizes"](), rel=0.1), "run docs/tables.py"


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text().splitlines()
    assert len(text) <= 110 and max(map(len, text)) <= 120


def test_what_was_found_is_counted_and_named():
    wild = (ROOT / "docs/wild.md").read_text()
    rows = re.findall(r"^\| (\S+)(?: .*)? ([\d.]+) \| .*\| (?:defect|divergence|limitation) \|", wild, re.M)
    counted = len(rows), len(dict(rows))
    for page, words in (("docs/wild.md", "{} rows of {} projects"), ("README.md", "{} rows, of {} projects"),
                        ("README.zh.md", "{} 条，涉及 {} 个项目")):  # fmt: skip
        text = (ROOT / page).read_text()
        assert words.format(*counted) in text
        listed = re.findall(r"^- \*\*(\S+) (\d[\d.]+)\*\*", text, re.M)
        assert len(listed) == 5 * page.startswith("README") and set(listed) <= set(rows)


def test_tables_are_made_from_the_data():
    tables = runpy.run_path(str(ROOT / "docs/tables.py"))
    conventions = (ROOT / "docs/conventions.md").read_text("utf-8")
    assert (ROOT / "docs/mistakes.md").read_text("utf-8") == tables["mistakes_page"](), "run docs/tables.py"
    assert conventions == tables["with_table"](conventions), "run docs/tables.py"
    words = {one.axes for one in tables["configs"].MODEL_TYPES.values()} - {None, "sections", "interleaved", "axial"}
    assert words and all(f'"{word}"' in conventions.partition("| layout |")[0] for word in words)


def test_the_citation_has_the_version():
    assert f"\nversion: {pyrope.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_contributing_and_ci_have_every_environment():
    tox, workflow = ((ROOT / name).read_text() for name in ("tox.ini", ".github/workflows/ci.yml"))
    environments = set(re.findall(r"^\[testenv:(\w+)\]$", tox, re.M))
    assert environments <= set(re.findall(r"^\| `(\w+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    run = ", ".join(re.findall(r"^    (?:first|rest) = (.*)$", tox, re.M)).split(", ")
    assert environments - {"world", "thorough"} <= set(run)
    assert set(re.search(r"environment: \[(.*)\]", workflow)[1].split(", ")) == set(run)


@each_page
def test_examples_in_words_are_true(path):
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testfile(str(path), module_relative=False, optionflags=options, encoding="utf-8")
    assert failed == 0


def test_every_page_is_in_the_index():
    entries = re.findall(r"^([\w-]+\.md)$", (ROOT / "docs/index.md").read_text(), re.M)
    assert sorted([*entries, "index.md"]) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@each_page
def test_every_file_that_a_page_names_is_there(path):
    for name in re.findall(r"\b(?:pyrope|tests|examples)/[\w/]+\.(?:py|c)\b", path.read_text()):
        assert (ROOT / name).is_file(), name


def test_every_adapter_is_on_its_page():
    text = (ROOT / "docs/check.md").read_text()
    made = [name for name in vars(adapters) if re.match(r"from_|with_", name) and name != "from_numpy"]
    assert len(made) >= 9 and all(re.search(rf"`.*\b{name}\(", text) for name in made)


@each_page
def test_every_command_of_the_pages_can_be_read(path):
    fenced = re.findall(r"^```(.*?)\n(.*?)^```$", path.read_text(), re.M | re.S)
    blocks = "\n".join(block for kind, block in fenced if kind in ("", "yaml")).replace("\\\n", " ")
    read = [
        cli._parser().parse_args(shlex.split(line, comments=True)).command  # else: SystemExit
        for line in re.findall(r"(?:^|&& |- run: )pyrope (.*)$", blocks, re.M)
    ]
    assert path.name != "README.md" or {"check", "generate"} <= set(read)


def test_every_example_is_in_the_index():
    listed = re.findall(r"^\| `([\w/]+\.(?:py|c))` \|", (ROOT / "docs/index.md").read_text(), re.M)
    files = [path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.*")]
    shown = [name for name in files if name.endswith((".py", ".c")) and not name.startswith(("benchmarks/", "command"))]
    assert sorted(name for name in listed if not name.startswith("benchmarks/")) == sorted(shown)


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
    named = set(code_words((ROOT / "docs/api.md").read_text()))
    assert set(pyrope.__all__) <= named
    types = {"ValueError", "TypeError", "Array", "NumPyArray", "Float64", "Int64", "Integers", "DType", "Function"}
    assert {name for name in named if name[0].isupper()} - types <= set(pyrope.__all__)


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


def test_every_picture_has_its_command():
    files = [file for file, *_ in DRAWN]
    assert files == [options.output for _, options, _ in DRAWN]
    assert sorted(files) == sorted(path.name for path in (ROOT / "docs/pictures").iterdir())
    assert {options.name for _, options, _ in DRAWN} == set(plots.PLOTS), "every kind is shown"
    shown = {type(cli._rope(dict(vars(options))).scaling) for _, options, _ in DRAWN if "scaling" in options}
    assert shown == set(theta.SCALINGS.values()), "every rescaling has its picture"


@pytest.mark.parametrize("file, options, command", DRAWN, ids=[file for file, *_ in DRAWN])
def test_every_picture_is_up_to_date(file, options, command):
    """The words of a file are those of the picture as it is drawn today."""

    def words(svg: str) -> list[str]:
        return re.findall(r"<text[^>]*>([^<]*)</text>", svg)

    rope = {"rope": cli._rope(dict(vars(options)))} if "head_dim" in options else {}
    stored, drawn = (ROOT / "docs/pictures" / file).read_text(), plots.svg(plots.PLOTS[options.name](**rope))
    assert words(stored) == words(drawn), f"cd docs/pictures && {command}"
