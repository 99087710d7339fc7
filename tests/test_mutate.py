"""The mutation runner: what it changes, and that it tells what falls from what survives, in a project of its own."""

import ast
import pathlib
import shutil
import subprocess
import sys

import mutate
import pytest

SOURCE = '''"""A module."""

LIMIT = 3


def clamp(x: int | None, least: int = -1) -> int:
    """Not less than the limit."""
    if x is None or x < LIMIT:
        raise ValueError(f"x must be at least {LIMIT + 0}")
    total = 0
    while total < x:
        total += 1
    return pow(total, 2) + (least if x else 0)


def unused(a):
    return a @ a.T
'''
TESTS = """
import pytest
from pyrope import thing

def test_clamp():
    assert thing.clamp(3) == 8 and thing.clamp(4, 5) == 21

def test_limit():
    with pytest.raises(ValueError):
        thing.clamp(2)
"""


@pytest.fixture
def project(tmp_path):
    for name, text in {"pyrope/__init__.py": "", "pyrope/thing.py": SOURCE, "tests/test_thing.py": TESTS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(mutate.__file__, tmp_path / "tests/mutate.py")
    return tmp_path


def test_every_kind_of_change_is_made_and_is_a_program(project, monkeypatch):
    monkeypatch.setattr(mutate, "ROOT", project)
    mutants = mutate.mutants_of(project / "pyrope/thing.py")
    changes = {(mutant.before, mutant.after) for mutant in mutants}
    assert changes == {
        ("3", "4"), ("-1", "(1)"), ("1", "2"), ("x is None or x < LIMIT", "(x is None and x < LIMIT)"),
        ("x is None or x < LIMIT", "(not (x is None or x < LIMIT))"), ("x is None", "(x is not None)"),
        ("x < LIMIT", "(x <= LIMIT)"), ("x < LIMIT", "(x >= LIMIT)"), ("0", "1"), ("total < x", "(total <= x)"),
        ("total < x", "(total >= x)"), ("total += 1", "total -= 1"), ("total += 1", "pass"), ("2", "3"),
        ("raise ValueError(f'x must be at least {LIMIT + 0}')", "pass"), ("pow(total, 2)", "(pow(2, total))"),
        ("pow(total, 2) + (least if x else 0)", "(pow(total, 2) - (least if x else 0))"),
        ("least if x else 0", "(0 if x else least)"), ("x", "(not (x))"), ("a @ a.T", "(a.T @ a)"),
        ("return pow(total, 2) + (least if x else 0)", "return None"), ("return a @ a.T", "return None"),
    }  # fmt: skip
    source = (project / "pyrope/thing.py").read_bytes()
    lines = [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for mutant in mutants:
        changed = ast.parse(mutant.applied(source))
        assert [node.lineno for node in ast.walk(changed) if isinstance(node, ast.FunctionDef)] == lines
    assert [mutant.line for mutant in mutate.mutants_of(project / "pyrope/thing.py", 3, 3)] == [3]
    assert {mutant.before for mutant in mutants if not mutant.inside} == {"3", "-1", "1"}


def run(project, *options):
    command = [sys.executable, "tests/mutate.py", "--limit", "3", *options, "pyrope/thing.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_what_falls_is_told_from_what_survives(project):
    code, output, errors = run(project)
    files = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert files == {"pyrope/__init__.py", "pyrope/thing.py", "tests/test_thing.py", "tests/mutate.py"}
    assert (project / "pyrope/thing.py").read_text() == SOURCE
    assert code == 1 and "24 mutants, tests/test_thing.py" in errors
    fates = {
        line.partition("  ")[2].partition(": ")[2]: line.partition("  ")[0]
        for line in output.splitlines()
        if "->" in line
    }
    # No test runs `unused`; the loop ends at x wherever it begins; x is never 0; a loop without its step never ends.
    assert {change for change, fate in fates.items() if fate == "survived"} == {
        "return a @ a.T  ->  return None", "a @ a.T  ->  (a.T @ a)", "0  ->  1"}  # fmt: skip
    assert {change for change, fate in fates.items() if fate == "timeout"} == {
        "total += 1  ->  total -= 1", "total += 1  ->  pass"}  # fmt: skip
    assert "| pyrope/thing.py | 24 | 18 | 2 | 4 |" in output


def test_a_sample_and_lines_may_be_asked_for_and_tests_that_fail_are_no_measure(project):
    code, output, _ = run(project, "--sample", "3", "--seed", "1", "pyrope/thing.py:3-3")
    assert "| pyrope/thing.py | 3 |" in output and "| pyrope/thing.py:3-3 | 1 | 1 | 0 | 0 |" in output
    (project / "tests/test_thing.py").write_text("def test_no():\n    assert False\n")
    code, output, errors = run(project)
    assert code == 1 and "do not pass as they are" in errors and "mutants |" not in output


def test_every_file_that_is_named_is_there():
    for module, names in mutate.CONCERN.items():
        assert (mutate.ROOT / "pyrope" / f"{module}.py").is_file(), module
        for name in names.split():
            assert pathlib.Path(mutate.ROOT, "tests", f"test_{name}.py").is_file(), name
