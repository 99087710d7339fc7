"""Kernels as people write them, right and wrong, as data; what the oracle says of each is frozen in verdicts.json.

`python -m candidates`, in this folder's parent, writes that table anew: read its diff before you commit it.
"""

import importlib
import json
import pathlib

import pyrope

from .registry import CASES as CASES, Case

for _name in ("rotation", "softmax", "linear", "backward"):
    importlib.import_module(f".{_name}", __name__)

TABLE = pathlib.Path(__file__).with_name("verdicts.json")
CHECKS = {
    "rotation": pyrope.check_rotation,
    "softmax": pyrope.check_attention,
    "linear": pyrope.check_linear_attention,
}


def judge(case: Case, **more) -> pyrope.Report:
    """What the oracle says of a candidate."""
    kind, _, backward = case.kind.partition("-")
    options = {**case.options, **({"backward": True} if backward else {}), **more}
    options |= {"incremental": case.incremental} if case.incremental is not None else {}
    rope = None if case.rope is None else pyrope.Rope(**case.rope)
    if kind == "rotation":
        return CHECKS[kind](case.make(), rope, **options)
    options |= {"rope": rope, "head_dim": rope.head_dim} if rope is not None else {}
    return CHECKS[kind](case.make(), **options)


def frozen() -> dict[str, list[str]]:
    """The verdict and the faults of every candidate, by its name."""
    return json.loads(TABLE.read_text("utf-8"))
