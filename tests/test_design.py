"""The shape of the project: who may import whom, and what the core may use of CuPy."""

import ast
import pathlib
import subprocess
import sys

import cupy_contract
import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "pyrope"
FILES = sorted(PACKAGE.rglob("*.py"))
THIRD_PARTY = {"numpy"}
# Who may import whom. A module imports from the rows above its own and, without cycles, from its own row.
ROWS = {
    1: {"checks", "backend", "tiles", "files"},
    2: {"definition"},
    3: {"theta", "phase"},
    4: {"rotation", "softmax", "linear", "layers", "encodings"},
    5: {"configs", "model", "checkpoints", "tokenizer", "parallel"},
    6: {"plots", "oracle"},
    7: {"cli", "__main__", "__init__"},
}
ABOVE = {1: {1}, 2: {1, 2}, 3: {1, 3}, 4: {1, 2, 3, 4}, 5: {1, 2, 3, 4, 5}, 6: {1, 2, 3, 6}, 7: {1, 2, 3, 4, 5, 6, 7}}
# Inside one method, so that the core knows nothing of JSON until a config is read.
EXCEPTIONS = {
    ("theta", "configs"),
    # Reports and identifications show themselves as pages, which are imported when one is asked for.
    ("oracle/report", "oracle/page"),
    ("oracle/operator", "oracle/page"),
    # A picture of the engine, which is imported when it is drawn.
    ("plots", "parallel"),
}


def test_the_top_level_is_laid_out_as_it_was_agreed():
    top = {"setup.cfg", "tox.ini", "pyrope", "tests", "examples", "docs"}
    assert top == {name for name in top if (PACKAGE.parent / name).exists()}
    assert "[options]" in (PACKAGE.parent / "setup.cfg").read_text("utf-8")


def _name(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def _row(name: str) -> int:
    return next(row for row, modules in ROWS.items() if name.partition("/")[0] in modules)


def _imports(path: pathlib.Path) -> tuple[set[str], set[str]]:
    """Modules of pyrope and of others that a file imports anywhere, but for those that only name types."""
    tree, own, others = ast.parse(path.read_text()), set(), set()
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    unread = {child for node in typing for child in ast.walk(node)} if _name(path) != "__init__" else set()
    known = {_name(module) for module in FILES}
    for node in ast.walk(tree):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1].relative_to(PACKAGE) / (node.module or "").replace(".", "/")
            names = [(folder / alias.name).as_posix() for alias in node.names]
            own |= {name if name in known else folder.as_posix() for name in names}
    own = {name if name in known else "__init__" if name == "." else f"{name}/__init__" for name in own}
    return own, others - set(sys.stdlib_module_names) - {"__future__"}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_follow_the_rows(path):
    (own, others), name = _imports(path), _name(path)
    wrong = {other for other in own if _row(other) not in ABOVE[_row(name)] and (name, other) not in EXCEPTIONS}
    wrong |= {other for other in own if _row(other) == 7 and _row(name) != 7}
    assert not wrong, f"{name}, of row {_row(name)}, may not import {wrong}"
    assert others <= THIRD_PARTY


def test_the_definition_is_short_and_imports_the_backend_alone():
    assert len((PACKAGE / "definition.py").read_text().splitlines()) <= 250
    assert _imports(PACKAGE / "definition.py") == ({"backend"}, {"numpy"})


def test_no_module_imports_itself_by_way_of_others():
    graph = {_name(path): _imports(path)[0] - {"__init__"} for path in FILES if _name(path) != "__init__"}
    for one, other in EXCEPTIONS:
        graph[one].discard(other)
    left = dict(graph)
    while left:
        free = {name for name, imports in left.items() if not imports & left.keys()}
        assert free, f"these import each other: {sorted(left)}"
        left = {name: imports for name, imports in left.items() if name not in free}


def test_the_rules_see_what_is_imported_and_used():
    assert "oracle/candidate" in _imports(PACKAGE / "oracle/rotation.py")[0]
    assert "configs" in _imports(PACKAGE / "theta.py")[0]
    assert {"may_share_memory", "take"} <= cupy_contract.uses((PACKAGE / "rotation.py").read_text())


def test_modules_and_public_functions_never_share_a_name():
    import pyrope

    for path in PACKAGE.glob("[a-z]*.py"):
        found = getattr(pyrope, path.stem, None)
        assert found is None or type(found).__name__ == "module", path.stem


def test_import_brings_nothing_heavy():
    code = "import numpy, sys; before = set(sys.modules); import pyrope; print(*sorted(set(sys.modules) - before))"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"cupy", "matplotlib", "torch", "safetensors", "tokenizers", "gguf", "ml_dtypes", "argparse"}
    assert not heavy & {name.partition(".")[0] for name in new}
    assert not any(name.startswith("pyrope.oracle") for name in new)


@pytest.mark.skipif(cupy_contract.real is None, reason=cupy_contract.REASON)
@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=_name)
def test_core_uses_only_what_cupy_has(path):
    assert cupy_contract.violations(path.read_text()) == []


def test_data_crosses_between_host_and_device_in_one_file():
    for path in PACKAGE.glob("*.py"):
        if path.stem != "backend":
            assert not {"asarray", "array"} & cupy_contract.uses(path.read_text()), path.name
            assert ".get()" not in path.read_text(), f"{path.name}: use to_numpy"
