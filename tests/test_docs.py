"""The README and the pages in docs speak of what is there."""

import doctest
import importlib
import operator
import pathlib
import re
import shlex

import pytest
from matplotlib.figure import Figure

import pyrope
from pyrope import cli, conventions, plots, theta
from pyrope.oracle import adapters

ROOT = pathlib.Path(__file__).parent.parent
ROWS = re.findall(
    r"^\| \((\d+)\) \| .* \| `pyrope\.([\w.]+)` \| `([\w/.]+)::(\w+)` \|$", (ROOT / "docs/paper.md").read_text(), re.M
)


def test_every_equation_in_the_code_is_a_row():
    code = "\n".join(path.read_text() for path in ROOT.glob("pyrope/**/*.py"))
    used = set(re.findall(r"Eq\. \((\d+)\)", code))
    assert used and used <= {number for number, *_ in ROWS}
    assert not re.search(r"(?i)\b(equation|eqn\.?|eq) *\(?\d", code), 'always spelt "Eq. (n)"'


def test_every_row_is_an_equation_on_a_line_that_computes_it():
    code = "\n".join(path.read_text() for path in ROOT.glob("pyrope/*.py"))
    computed = set(re.findall(r"Eq\. \((\d+)\)", "\n".join(re.findall(r"^ *[^\s#].*  # (.*)$", code, re.M))))
    demands = {number: (file, test) for number, _, file, test in ROWS if number not in computed}
    assert set(demands) == {"11"}, "what nothing computes"
    for number, (file, test) in demands.items():
        body = (ROOT / file).read_text().partition(f"def {test}(")[2].partition("\ndef ")[0]
        assert f"Eq. ({number})" in body, "a demand is checked by its test"


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
    block = (ROOT / "README.md").read_text().partition("in reading order\n\n```\n")[2].partition("\n```")[0]
    listed = [line.split()[0] for line in block.splitlines()]
    assert sorted(listed) == sorted(
        path.relative_to(ROOT / "pyrope").as_posix() for path in ROOT.glob("pyrope/**/[a-z]*.py")
    )
    assert all(len(line.split()) > 1 for line in block.splitlines()), "a file without a word about it"


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert 100 <= len(lines) <= 150 and max(map(len, lines)) <= 120


def test_the_rows_of_the_readme_are_rows_of_the_paper():
    shown = re.findall(r"^\| \((\d+)\) \| .* \| (.+) \|$", (ROOT / "README.md").read_text(), re.M)
    functions = {number: function for number, function, *_ in ROWS}
    assert len(shown) == 5 and all(f"`{functions[number]}`" in told for number, told in shown)


def convention_row(name: str, convention: conventions.Convention) -> str:
    """A model type as docs/conventions.md tells it."""
    base = f"{convention.base:.0f}"
    if convention.layers:
        base = ", ".join(f"{layer.base:.0f} {kind.partition('_')[0]}" for kind, layer in convention.layers.items())
    width = "all" if convention.fraction == 1 else f"first {convention.fraction:g}"
    if convention.latent or convention.rotary_dim:
        width = "`qk_rope_head_dim`, last" if convention.latent else f"first {convention.rotary_dim} features"
    particular = {
        "direction −1": convention.direction == -1,
        f'axes "{convention.axes}"': convention.axes,
        "a rope for each type of layer": convention.layers,
        f"{convention.still} layers do not turn": convention.still,
        "`alpha` in dynamic: another base": convention.alpha,
        "the config must say its scaling": convention.explicit,
        f"original length {convention.original_length}": convention.original_length,
        f"head size {convention.head_dim}": convention.head_dim,
    }
    told = "; ".join(words for words, holds in particular.items() if holds)
    return f"| `{name}` | {convention.layout} | {base} | {width} | {told} |"


def test_the_table_of_conventions_is_the_data():
    rows = re.findall(r"^\| `\w+` \| (?:half|interleaved)[^\n]*$", (ROOT / "docs/conventions.md").read_text(), re.M)
    assert rows == [convention_row(name, data) for name, data in conventions.MODEL_TYPES.items()]


def test_every_page_is_in_the_index():
    entries = re.findall(r"^([\w-]+\.md)$", (ROOT / "docs/index.md").read_text(), re.M)
    assert sorted([*entries, "index.md"]) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_every_adapter_is_on_its_page():
    text = (ROOT / "docs/adapters.md").read_text()
    made = [name for name in vars(adapters) if re.match(r"from_|with_|cached$", name) and name != "from_numpy"]
    assert len(made) >= 10 and all(re.search(rf"`.*\b{name}\(", text) for name in made)


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
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


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
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
    told = {
        module: set(re.findall(r"\w+", members)) if members else None
        for module, members in re.findall(r"^\.\. automodule:: pyrope\.([\w.]+)$(?:\n +:members: (.+)$)?", text, re.M)
    }
    for module, names in pyrope._PLACES.items():
        assert module in told, module
        assert told[module] is None or set(names.split()) <= told[module], module
    for module, members in told.items():  # None: all that have a docstring
        for name in members or ():
            assert hasattr(importlib.import_module(f"pyrope.{module}"), name), name


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_every_row_of_a_table_has_the_cells_of_its_header(path):
    for table in re.findall(r"(?:^\|.*\|\n)+", path.read_text(), re.M):
        cells = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(cells) == 1, table.splitlines()[0]


def pictures(path: pathlib.Path) -> list[tuple[str, str]]:
    """Name and command of each picture of a page; one without options may go without its command."""
    blocks = re.findall(r"^```{picture} ?([\w-]*)\n(.*?)^```$", path.read_text(), re.M | re.S)
    return [(name, "".join(body.replace("\\\n", " ").partition("pyrope plot ")[1:])) for name, body in blocks]


def test_every_picture_of_the_pages_can_be_drawn():
    drawn, files = set(), []
    for path in (ROOT / "docs").glob("*.md"):
        for name, command in pictures(path):
            assert command, f"{path.name}: a reader of the bare page sees no command"
            options = cli._parser().parse_args(shlex.split(command or f"pyrope plot {name} -o {name}.svg")[1:])
            drawn.add(options.name)
            files.append(options.output)
            if options.head_dim is not None:
                assert isinstance(plots.PLOTS[options.name](cli._rope(options)), Figure)
    assert drawn == set(plots.PLOTS) and len(files) == len(set(files)) and all(file.endswith(".svg") for file in files)


def test_every_rescaling_has_its_picture():
    shown = {
        re.search(r"--scaling \"(\w+)", command)[1]
        for _, command in pictures(ROOT / "docs/scalings.md")
        if "--sc" in command
    }
    assert shown == {kind.__name__ for kind in theta.SCALINGS.values()}
