"""Writes mistakes.md, the page of every name that a report may use, from `pyrope.oracle.mistakes`."""

from __future__ import annotations

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from pyrope.oracle import mistakes  # noqa: E402, from this very tree
from pyrope.oracle.page import REPOSITORIES  # noqa: E402

HEAD = """\
# Mistakes, by name

Every name that a report may use, with its cause, its fix and the projects in which it happened. A fault of attention is
a step and what was measured of it: "window: one too wide" has the cause and the fix of "window", unless it has a row of
its own.
This page is made from `pyrope/oracle/mistakes.py` by `python docs/tables.py`. [How a check works](check.md).
"""
SECTIONS = {
    "Of rotations": mistakes.ROTATION,
    "Of calls and memory": mistakes.CALLS,
    "Of attention": mistakes.ATTENTION,
    "Of backward passes": mistakes.BACKWARD,
    "Of sharding": mistakes.SHARDING,
    "Of traces": mistakes.TRACES,
}


def linked(text: str) -> str:
    """Text in which the issues of known projects, such as vllm#590, are links."""

    def link(match: re.Match[str]) -> str:
        repository = REPOSITORIES.get(match[1])
        return f"[{match[0]}](https://github.com/{repository}/issues/{match[2]})" if repository else match[0]

    return re.sub(r"([A-Za-z][\w.-]*)#(\d+)", link, text)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, in a cell of a table."""
    return re.sub(r"(?<!`)\b(\w+_\w+)\b(?!`)", r"`\1`", text.replace("|", "\\|").replace("*", "\\*"))


def row(name: str, mistake: mistakes.Mistake) -> str:
    fields = [
        ("cause", escaped(mistake.cause)),
        ("fix", escaped(mistake.fix)),
        ("happened in", linked(mistake.happened)),
    ]
    return f"| **{escaped(name)}** | {' <br> '.join(f'*{word}* {text}' for word, text in fields if text)} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, rows in SECTIONS.items():
        lines = "\n".join(row(name, mistake) for name, mistake in rows.items())
        parts.append(f"## {title}\n\n| mistake | |\n|---|---|\n{lines}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (HERE / "mistakes.md").write_text(page(), "utf-8")
