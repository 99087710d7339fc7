"""The one form of a candidate of the tests: a function as a person would write it, and what is true about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """Called as rotation fn(x, positions), softmax fn(q, k, v[, positions]), linear fn(q, k, v, positions); their
    backward passes have the gradient g in the place of x, or behind v."""

    name: str  # the only one of this name
    kind: str  # rotation, softmax or linear, or one of these with "-backward"
    group: str  # right, wrong, conditional (in some calls, or after others) or damaged (numbers or memory)
    fact: str  # what a report must state, or why it is right
    make: Callable[[], Any]  # the candidate, with a state of its own
    rope: dict[str, Any] | None  # the arguments of Rope; None: attention without one
    options: dict[str, Any]  # other arguments of the check
    incremental: Callable[[], Any] | None = None  # attention with a cache: a new step function
    verdict: str = ""  # what it deserves; "right" or "wrong" by the group unless it is said


CASES: dict[str, Case] = {}


def case(name, kind, group, fact, make, rope=None, incremental=None, verdict="", **options):
    assert name not in CASES, name
    verdict = verdict or ("right" if group == "right" else "wrong")
    CASES[name] = Case(name, kind, group, fact, make, rope, options, incremental, verdict)


def edited(text, *edits):
    """The text with each (old, new) put in once: a person's slip in a kernel."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def slot(old, new):
    """A place of a kernel in which a text is put, at the braces."""
    return lambda text: (old, new.replace("{}", text))


def variant(name, kind, group, fact, source, *edits, steps=False, **more):
    """A candidate by its source text, which defines fn and, if it has a cache, begin, which makes a step function."""
    text = edited(source, *edits)

    def run(entry):
        space: dict[str, Any] = {}
        exec(compile(text, name, "exec"), space)
        return space[entry]

    case(name, kind, group, fact, lambda: run("fn"), incremental=(lambda: run("begin")()) if steps else None, **more)


def rows(kind, kernel, **usual):
    """Functions row(name, fact, *edits), one for each group, which add variants of this kernel."""

    def of(group):
        def row(name, fact, *edits, source=kernel, **more):
            variant(f"{kind}: {name}", kind, group, fact, source, *edits, **(usual | more))

        return row

    return [of(group) for group in ("right", "wrong", "conditional", "damaged")]


def table(row, place, sentence, entries, **more):
    """A row for each name and text of the entries: the text is put in this slot, and into the sentence."""
    for name, text in entries.items():
        row(name, sentence.replace("{}", text), place(text), **more)
