"""Runs the cells of a notebook in plain Python, as Jupyter would show them: what is printed, and the last expression.

`python tests/notebook.py` runs examples/notebook.ipynb and stores its outputs in it, so that it can be read on GitHub.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import pathlib
import re
import sys
from typing import Any

PATH = pathlib.Path(__file__).parent.parent / "examples" / "notebook.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell, in the format of notebooks."""
    tree, value = ast.parse(source), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = _lines(re.sub("<figure>.*?</figure>", "", value._repr_html_()))  # too large to store
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with fresh outputs; the cells share their names, and run from the first to the last."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            outputs = run_cell("".join(cell["source"]), names)
            shown = [output | ({"execution_count": count} if "data" in output else {}) for output in outputs]
            cell = cell | {"execution_count": count, "outputs": shown}
        cells.append(cell)
    return notebook | {"cells": cells}


if __name__ == "__main__":
    sys.path.insert(0, str(PATH.parent.parent))
    PATH.write_text(
        json.dumps(executed(json.loads(PATH.read_text("utf-8"))), indent=1, ensure_ascii=False) + "\n", "utf-8"
    )
