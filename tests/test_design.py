"""The shape of the project: who may import whom, and what the core may use of CuPy."""

import ast
import pathlib
import re
import subprocess
import sys

import cupy_contract
import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "pyrope"
ENGINE = {"checks", "backend", "conventions", "theta", "phase", "rotation", "encodings", "softmax", "linear"}
MODELS = {"architecture", "transformer", "generation", "checkpoints", "containers", "text"}
ORACLE = {
    "oracle/report",
    "oracle/checking",
    "oracle/identification",
    "oracle/attention_checks",
    "oracle/linear_checks",
}
# The import table of the design: what each module may import of pyrope. One direction, no way back.
MAY_IMPORT = {
    "__init__": ENGINE | MODELS | ORACLE,  # for types, and by name when it is asked for
    "checks": set(),
    "backend": set(),
    "conventions": {"checks"},
    "theta": {"checks", "conventions"},
    "phase": {"checks", "theta"},
    "rotation": {"checks", "backend", "theta", "phase"},
    "encodings": {"checks", "backend"},
    "softmax": {"checks", "backend"},
    "linear": {"checks", "backend", "theta", "rotation"},
    "layers": {"backend"},
    "architecture": {"checks", "backend", "layers", "linear", "theta"},
    "transformer": {
        "checks",
        "backend",
        "encodings",
        "theta",
        "rotation",
        "softmax",
        "linear",
        "layers",
        "architecture",
    },
    "generation": {"checks", "backend", "architecture", "transformer"},
    "families": {"checks", "conventions", "theta", "architecture"},
    "containers": {"checks", "theta", "rotation"},
    "checkpoints": {"backend", "theta", "phase", "architecture", "families", "containers"},
    "text": {"checks", "containers"},
    "cli": ENGINE | MODELS | ORACLE | {"__init__", "oracle/__init__", "oracle/tensors", "plots"},
    "plots": ENGINE | MODELS | ORACLE | {"__init__", "oracle/gallery", "oracle/probe", "oracle/recipes"},
    "__main__": {"cli"},
    "oracle/__init__": set(),
    "oracle/report": set(),
    "oracle/probe": {"checks", "oracle/tensors"},
    "oracle/tolerance": {"oracle/tensors", "theta", "phase"},
    "oracle/recipes": {"theta", "oracle/probe"},
    "oracle/identification": {"oracle/tensors", "theta", "phase", "oracle/probe", "oracle/recipes", "oracle/tolerance", "oracle/report"},
    "oracle/faults": {"theta", "oracle/probe", "oracle/recipes", "oracle/tolerance"},
    "oracle/explaining": {"oracle/tensors",
        "theta", "oracle/probe", "oracle/recipes", "oracle/tolerance", "oracle/identification", "oracle/faults",
    },
    "oracle/checking": {"oracle/tensors",
        "checks", "theta", "oracle/probe", "oracle/recipes", "oracle/tolerance", "oracle/identification", "oracle/faults",
        "oracle/explaining", "oracle/report",
    },
    "oracle/gallery": {"theta", "oracle/probe", "oracle/checking", "oracle/identification", "oracle/report"},
    "oracle/tensors": set(),
    "oracle/adapters": {"backend", "checks", "oracle/tensors"},
    "oracle/vector_cases": {"checks", "phase", "theta", "linear", "oracle/attention_steps", "oracle/tolerance", "oracle/tensors"},
    "oracle/vectors": {
        "checks", "phase", "theta", "oracle/__init__", "oracle/attention_checks", "oracle/attention_faults",
        "oracle/attention_steps", "oracle/judging", "oracle/linear_checks", "oracle/report", "oracle/tensors",
        "oracle/tolerance", "oracle/vector_cases", "oracle/explaining", "oracle/faults", "oracle/identification",
        "oracle/recipes",
    },
    "oracle/traces": {"checks", "backend", "oracle/report", "oracle/tensors"},
    "oracle/attention_steps": {"backend", "rotation", "theta"},
    "oracle/attention_faults": {"theta", "oracle/attention_steps"},
    "oracle/judging": {"oracle/tensors",
        "backend", "theta", "oracle/attention_faults", "oracle/attention_steps", "oracle/probe", "oracle/report",
        "oracle/tolerance",
    },
    "oracle/attention_checks": {"oracle/tensors",
        "checks", "oracle/probe", "backend", "rotation", "softmax", "theta",
        "oracle/attention_faults", "oracle/attention_steps", "oracle/judging", "oracle/report", "oracle/tolerance",
    },
    "oracle/linear_checks": {"oracle/tensors",
        "checks", "oracle/probe", "backend", "linear", "theta",
        "oracle/attention_checks", "oracle/attention_faults", "oracle/attention_steps", "oracle/judging", "oracle/report",
        "oracle/tolerance",
    },
}  # fmt: skip
THIRD_PARTY = {"numpy"}


FILES = sorted(PACKAGE.rglob("*.py"))


def _name(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def _imports(path: pathlib.Path) -> tuple[set[str], set[str]]:
    """Modules of pyrope and of others that a file imports, anywhere in it."""
    own, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                folder = path.parents[node.level - 1].relative_to(PACKAGE).as_posix()
                names = [node.module.replace(".", "/")] if node.module else [alias.name for alias in node.names]
                own |= {name if folder == "." else f"{folder}/{name}" for name in names}
            else:
                others.add(node.module.partition(".")[0])
    return own, others - set(sys.stdlib_module_names) - {"__future__"}


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_follow_the_table(path):
    own, others = _imports(path)
    assert _name(path) in MAY_IMPORT, f"{_name(path)} is not in the import table"
    known = {_name(module) for module in FILES}
    own = {name if name in known else "__init__" for name in own}
    assert own <= MAY_IMPORT[_name(path)], f"{_name(path)} may not import {own - MAY_IMPORT[_name(path)]}"
    assert others <= THIRD_PARTY


def test_nothing_imports_plots_but_the_command_line():
    for path in FILES:
        assert _name(path) == "cli" or not re.search(r"import.*\bplots\b|\.plots\b", path.read_text()), path.name


def test_modules_and_public_functions_never_share_a_name():
    import pyrope

    for path in PACKAGE.rglob("[a-z]*.py"):
        found = getattr(pyrope, path.stem, None)
        assert found is None or type(found).__name__ == "module", path.stem


def test_import_brings_nothing_heavy():
    code = "import numpy, sys; before = set(sys.modules); import pyrope; print(*sorted(set(sys.modules) - before))"
    new = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"cupy", "matplotlib", "torch", "safetensors", "tokenizers", "gguf", "ml_dtypes", "argparse"}
    assert not heavy & {name.partition(".")[0] for name in new}
    assert not any(name.startswith("pyrope.oracle") for name in new)


@pytest.mark.skipif(cupy_contract.real is None, reason=cupy_contract.REASON)
@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_core_uses_only_what_cupy_has(path):
    assert cupy_contract.violations(path.read_text()) == []


@pytest.mark.skipif(cupy_contract.real is None, reason=cupy_contract.REASON)
def test_the_contract_sees_the_core():
    assert {"multiply", "add", "empty", "take"} <= cupy_contract.uses((PACKAGE / "rotation.py").read_text())
    assert {"einsum", "exp", "matmul", "take"} <= cupy_contract.uses((PACKAGE / "layers.py").read_text())
    assert {"concatenate", "empty", "zeros"} <= cupy_contract.uses((PACKAGE / "transformer.py").read_text())


def test_data_crosses_between_host_and_device_in_one_file():
    for path in PACKAGE.glob("*.py"):
        if path.stem != "backend":
            assert not {"asarray", "array"} & cupy_contract.uses(path.read_text()), path.name
            assert ".get()" not in path.read_text(), f"{path.name}: use to_numpy"
