"""Changes one thing in a file at a time, and looks whether a test falls: ``tox -e mutants -- pyrope/softmax.py``.

The tree itself is never changed, only a copy of it. First the tests that concern the file (`CONCERN`) run once, traced,
so that every mutant meets only those that run its line, the quickest of them first. A line that none runs by itself,
such as one at the top of a module, meets all of them. A mutant within a function is tried in a fork of that process,
with the code of the function exchanged, which takes as long as its tests; one that survives this, or is no part of a
function, in a process of its own. Forks need a POSIX system.

As a plugin of pytest (``-p mutate``) this file traces, chooses the tests, and lets Hypothesis neither shrink nor vary.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import copy
import functools
import gc
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
# Which tests concern a file beside test_<its name>.py: enough of them, and quick ones.
CONCERN = {
    "parallel": "parallel_threads", "theta": "configs", "phase": "theta", "layers": "model", "configs": "checkpoints",
    "oracle/report": "page",
}  # fmt: skip
JUDGES = "candidates"  # what concerns every other file of the oracle
SWAPS: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.In: [ast.NotIn], ast.NotIn: [ast.In], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is],
    ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult], ast.FloorDiv: [ast.Mult], ast.Mod: [ast.Mult],
    ast.Pow: [ast.Mult], ast.BitAnd: [ast.BitOr], ast.BitOr: [ast.BitAnd], ast.LShift: [ast.RShift], ast.RShift: [ast.LShift],
    ast.And: [ast.Or], ast.Or: [ast.And],
}  # fmt: skip
SYMMETRIC = (
    "minimum",
    "maximum",
    "min",
    "max",
    "add",
    "multiply",
    "hypot",
    "logaddexp",
    "allclose",
    "isclose",
    "may_share_memory",
)


class Mutant(NamedTuple):
    path: str  # below the root
    line: int
    last: int  # line
    start: int  # in bytes
    stop: int
    before: str
    after: str
    inside: bool  # of a function, so that nothing that is done at import depends on it directly

    def applied(self, source: bytes) -> bytes:
        """The changed file, in which all that comes after has the line that it had."""
        lines = b"\n" * source[self.start : self.stop].count(b"\n")
        after = self.after.encode()
        after = after[:-1] + lines + b")" if after.endswith(b")") else after + lines
        return source[: self.start] + after + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before:.300}  ->  {self.after:.300}"


# ── What is changed ──────────────────────────────────────────────────────────────────────────────────────────────────


def replacements(node: ast.AST) -> Iterator[str]:
    """What may stand in the place of an expression or of a statement."""

    def with_fields(**fields: Any) -> str:
        changed = copy.copy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return f"({ast.unparse(changed)})"

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield from (with_fields(ops=[*ops[:i], new(), *ops[i + 1 :]]) for new in SWAPS[type(op)])
        case ast.BinOp(op=ast.MatMult()):
            yield with_fields(left=node.right, right=node.left)
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(node.op) in SWAPS:
            text = [with_fields(op=new()) for new in SWAPS[type(node.op)]]
            yield from text if not isinstance(node, ast.AugAssign) else (x[1:-1] for x in text)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield repr(value + 1)
        case ast.IfExp():
            yield with_fields(body=node.orelse, orelse=node.body)
        case ast.Call(args=[first, second, *rest]) if (
            not {ast.Starred} & {type(first), type(second)}
            and ast.unparse(node.func).rpartition(".")[2] not in SYMMETRIC
        ):
            yield with_fields(args=[second, first, *rest])
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield "return None"
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call()):
            yield "pass"
    if isinstance(node, ast.AugAssign):
        yield "pass"


def sites(tree: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, str, bool]]:
    """Every node that may be replaced, with its replacement, and whether it is in a function; not in annotations,
    decorators, texts and messages of errors."""
    yield from ((tree, text, inside) for text in replacements(tree))
    match tree:
        case ast.JoinedStr() | ast.Raise() | ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.keyword(arg="strict"):
            return
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
            yield test, f"(not ({ast.unparse(test)}))", inside
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                yield from sites(child, inside or (name == "body" and isinstance(tree, ast.FunctionDef)))


def mutants_of(
    path: pathlib.Path, first: int = 1, last: int = sys.maxsize, sample: int = 0, seed: int = 0
) -> list[Mutant]:
    """The mutants of these lines of a file, or so many of them; each of them is a program, and no two are the same."""
    source, different = path.read_bytes(), dict[str, Mutant]()
    begins = list(itertools.accumulate(map(len, source.splitlines(keepends=True)), initial=0))
    original = ast.dump(ast.parse(source))
    places = list(sites(ast.parse(source)))
    if sample:
        random.Random(seed).shuffle(places)
    for node, after, inside in places:
        if first <= node.lineno <= last and len(different) < (sample or math.inf):
            start, stop = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
            name, before = path.relative_to(ROOT).as_posix(), ast.unparse(node)
            mutant = Mutant(name, node.lineno, node.end_lineno, start, stop, before, after, inside)
            changed = ast.dump(ast.parse(mutant.applied(source)))
            if changed != original:
                different.setdefault(changed, mutant)
    return sorted(different.values(), key=lambda mutant: mutant.start)


# ── Inside of pytest ─────────────────────────────────────────────────────────────────────────────────────────────────


def pytest_load_initial_conftests(early_config: Any) -> None:
    """As a plugin, before the suite's own conftest chooses a profile by its name."""
    from hypothesis import HealthCheck, Phase, settings

    quiet: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "deadline": None, "database": None}
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", max_examples=15, derandomize=True, phases=phases, **quiet)
    early_config.pluginmanager.register(Plugin(**json.loads(pathlib.Path("task.json").read_text())))


class Plugin:
    """Runs chosen tests; or, given mutants, all tests in a fork, traced, and then some for each mutant in a fork."""

    def __init__(self, file: str, mutants: list[Any], order: list[str], limit: float) -> None:
        self.file, self.mutants, self.limit = file, [Mutant(*x) for x in mutants], limit
        self.order = {name: i for i, name in enumerate(order)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.order:
            items[:] = sorted((x for x in items if x.nodeid in self.order), key=lambda x: self.order[x.nodeid])

    def pytest_runtestloop(self, session: Any) -> bool | None:
        if self.order:
            return None
        items, fates = {item.nodeid: item for item in session.items}, []
        if forked(lambda: self.trace(items), 3600) != "survived":
            raise session.Failed("the tests do not pass as they are")
        seen = json.loads(pathlib.Path("traced.json").read_text())
        for mutant in self.mutants:
            names, seconds = chosen(mutant, seen)
            task = partial(self.implant_and_run, mutant, [items[name] for name in names])
            fates.append(forked(task, self.limit + 4 * seconds) if mutant.inside else "survived")
        pathlib.Path("fates.json").write_text(json.dumps(fates))
        return True

    def trace(self, items: dict[str, Any]) -> None:
        """Writes how long each test takes and which lines of the file it runs."""
        seen, lines = {}, set[int]()

        def enter(frame: Any, event: str, argument: Any) -> Any:
            return line if frame.f_code.co_filename == self.file else None

        def line(frame: Any, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        for name, item in items.items():
            lines.clear()
            begin = time.perf_counter()
            threading.settrace(enter)
            sys.settrace(enter)
            run_tests([item])
            sys.settrace(None)
            seen[name] = time.perf_counter() - begin, sorted(lines)
        pathlib.Path("traced.json").write_text(json.dumps(seen))

    def implant_and_run(self, mutant: Mutant, items: list[Any]) -> None:
        """Exchanges the code of functions that are imported already; what ran at import is as it was before."""
        source = mutant.applied(pathlib.Path(self.file).read_bytes())
        codes: dict[tuple[str, int], list[Any]] = collections.defaultdict(list)
        below = [compile(source, self.file, "exec")]
        for code in below:
            codes[code.co_name, code.co_firstlineno].append(code)
            below += [x for x in code.co_consts if isinstance(x, types.CodeType)]
        for thing in gc.get_objects():
            if isinstance(thing, types.FunctionType) and thing.__code__.co_filename == self.file:
                new = codes[thing.__code__.co_name, thing.__code__.co_firstlineno]
                if len(new) == 1 and new[0].co_freevars == thing.__code__.co_freevars:
                    thing.__code__ = new[0]
            elif isinstance(thing, functools._lru_cache_wrapper):
                thing.cache_clear()
        run_tests(items)


def run_tests(items: list[Any]) -> None:
    """Ends this process at the first test that falls."""
    from _pytest.runner import runtestprotocol
    from _pytest.warnings import catch_warnings_for_item

    for item in items:
        with catch_warnings_for_item(item.config, item.ihook, "runtest", item):  # which warnings a test ignores
            reports = runtestprotocol(item, log=False, nextitem=None)
        if any(report.failed for report in reports):
            os._exit(1)


def forked(task: Callable[[], None], limit: float) -> str:
    """Runs a task in a fork of this process; it is stopped after so many seconds."""
    if not (child := os.fork()):
        os.setsid()
        signal.alarm(math.ceil(limit))
        try:
            task()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it may have started
    return {0: "survived", -signal.SIGALRM: "timeout"}.get(code, "killed")


# ── Outside of it ────────────────────────────────────────────────────────────────────────────────────────────────────


def tests_of(path: str) -> list[str]:
    """The test files that concern a module, as they are in the tree."""
    module = path.removeprefix("pyrope/").removesuffix(".py")
    stem = module.rpartition("/")[2]
    judges = JUDGES if module.startswith("oracle/") else ""
    names = dict.fromkeys([stem, *(CONCERN.get(module, "") or judges).split()])
    return [f"tests/test_{name}.py" for name in names if (ROOT / f"tests/test_{name}.py").exists()]


def chosen(mutant: Mutant, seen: dict[str, Any]) -> tuple[list[str], float]:
    """The tests that run the mutant's lines, the quickest first, or all; and their seconds."""
    lines = set(range(mutant.line, mutant.last + 1))
    names = [name for name, (_, ran) in seen.items() if lines & set(ran)] or list(seen)
    return sorted(names, key=lambda name: seen[name][0]), sum(seen[name][0] for name in names)


def run_pytest(tree: pathlib.Path, tests: list[str], limit: float, **task: Any) -> str:
    """Pytest, in a process of its own and in a copy of the tree."""
    (tree / "task.json").write_text(json.dumps(task | {"limit": limit}))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "tests")]), "OPENBLAS_NUM_THREADS": "1"}
    env |= {"HYPOTHESIS_PROFILE": "mutants"} | ({"PYTHONDONTWRITEBYTECODE": "1"} if task["order"] else {})
    plugins = ["-p", "no:cacheprovider", "-p", "mutate"]
    command = [sys.executable, "-m", "pytest", f"--rootdir={tree}", "-x", "-q", "--tb=no", *plugins, *tests]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tree, env=env, start_new_session=True, **quiet) as process:
        try:
            code = process.wait(limit if task["order"] else None)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "timeout"
    if code == 5:
        raise SystemExit(f"no test was run: {' '.join(command)}")
    return "killed" if code else "survived"


def once_more(mutant: Mutant, tree: pathlib.Path, tests: list[str], limit: float) -> str:
    """The fate of a mutant in the file itself, for what is done when it is imported; the copy is restored."""
    names, seconds = chosen(mutant, json.loads((tree / "traced.json").read_text()))
    path = tree / mutant.path
    source = path.read_bytes()
    try:
        path.write_bytes(mutant.applied(source))
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):  # it may have the same size and second
            stale.unlink()
        files = [name for name in tests if any(x.startswith(name) for x in names)]
        limit += 60 + 4 * seconds  # a process has to begin, too
        return run_pytest(tree, files, limit, file=str(path), mutants=[], order=names)
    finally:
        path.write_bytes(source)


def mutate(tree: pathlib.Path, target: str, options: argparse.Namespace) -> dict[Mutant, str]:
    """The fate of the mutants of ``file`` or ``file:first-last``, in a copy of the tree."""
    name, _, span = target.partition(":")
    first, last = (int(x) for x in span.split("-")) if span else (1, sys.maxsize)
    mutants, tests = mutants_of(ROOT / name, first, last, options.sample, options.seed), options.tests or tests_of(name)
    print(f"{target}: {len(mutants)} mutants, {' '.join(tests)}", file=sys.stderr, flush=True)
    if run_pytest(tree, tests, options.limit, file=str(tree / name), mutants=mutants, order=[]) != "survived":
        raise SystemExit(f"the tests of {name} do not pass as they are: {' '.join(tests)}")
    fates = dict(zip(mutants, json.loads((tree / "fates.json").read_text()), strict=True))
    for mutant, fate in fates.items():
        if fate == "survived":
            fates[mutant] = once_more(mutant, tree, tests, options.limit)
        if fates[mutant] != "killed":
            print(f"{fates[mutant]}  {mutant}", flush=True)
    return fates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", help="files below the root, or file:first-last for some of its lines")
    parser.add_argument("--tests", nargs="+", help="test files, instead of those that concern the file")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each file, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing")
    parser.add_argument("--workers", type=int, default=1, help="files at the same time")
    parser.add_argument(
        "--limit", type=float, default=30.0, help="seconds for a mutant, beside four times what its tests need"
    )
    options = parser.parse_args()
    unneeded = shutil.ignore_patterns(".*", "__pycache__", "build", "_build", "*.egg-info")

    def row(target: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            tree = pathlib.Path(shutil.copytree(ROOT, pathlib.Path(folder).resolve() / "tree", ignore=unneeded))
            fates = collections.Counter(mutate(tree, target, options).values())
        return f"| {target} | {fates.total()} | {fates['killed']} | {fates['timeout']} | {fates['survived']} |"

    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        rows = list(pool.map(row, options.targets))
    print("", "| file | mutants | killed | timeouts | survived |", "|---|---|---|---|---|", *rows, sep="\n")
    return int(not all(line.endswith("| 0 |") for line in rows))


if __name__ == "__main__":
    sys.exit(main())
