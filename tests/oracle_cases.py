"""Ropes and candidates for the tests of the oracle: every fault with a rope that it changes, every right pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from optional import Dtypes, package

import pyrope
from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN
from pyrope.oracle import checking
from pyrope.oracle.page import REPOSITORIES
from pyrope.oracle.recipes import recipe_of
from pyrope.oracle.rotation_faults import FAULTS

ml_dtypes = package("ml_dtypes")

DTYPES = Dtypes(float32=np.float32, float16=np.float16, bfloat16=ml_dtypes.bfloat16)


def ropes(d: int) -> list[Rope]:
    """A rope of every kind; the first that a fault changes is the one it is tried with."""
    lists = [1 + 0.01 * i for i in range(d // 2)], [1 + 0.5 * i for i in range(d // 2)]
    return [
        Rope(d, 10000.0, "half"),
        Rope(d, 10000.0, "half", d // 2),
        Rope(d, 500000.0, "interleaved", d // 4, "suffix"),
        Rope(d, 10000.0, "half", scaling=YaRN(8.0, 4096)),
        Rope(d, 500000.0, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192)),
        Rope(d, 10000.0, "interleaved", scaling=Linear(4.0)),
        Rope(d, 10000.0, "half", scaling=DynamicNTK(2.0, 4096, 65536)),
        Rope(d, 1e6, "half", scaling=Proportional(0.25, 2.0)),
        Rope(d, 10000.0, "half", scaling=LongRoPE(*lists, 16.0, 4096, length=65536)),
        Rope(d, 1e6, "interleaved-to-half", direction=-1),
        Rope(d, 10000.0, "half", scaling=YaRN(4.0, 262144)),
    ]


def with_axes(d: int) -> list[Rope]:
    """Ropes of every way to deal pairs to axes."""
    return [
        Rope(d, 1e6, "half", axes=Axes("sections", (d // 8, d // 16 * 3, d // 16 * 3))),
        Rope(d, 500000.0, "half", axes=Axes("interleaved", (d // 2 - d // 8 * 3 + d // 16, d // 16 * 2, d // 16 * 3))),
        Rope(d, 10000.0, "half", axes=Axes("axial")),
        Rope(d, 10000.0, "interleaved", d // 2, axes=Axes("pixtral")),
        Rope(d, 1e6, "half", scaling=YaRN(4.0, 4096), axes=Axes("sections", (d // 4, d // 4))),
        Rope(d, 10000.0, "interleaved", axes=Axes("sections", (d // 16, 7 * d // 32, 7 * d // 32), "own")),  # Flux
    ]


SIZES = {"float32": 64, "float16": 64, "bfloat16": 128}  # of a head


def cases(name: str, which: int = 0, sizes: dict[str, int] = SIZES) -> Iterator[tuple[Rope, str, Callable[..., Any]]]:
    """A fault in each dtype, with the rope (of this place in order) that it changes."""
    for dtype, d in sizes.items():
        made = [(rope, FAULTS[name].make(rope, DTYPES[dtype])) for rope in ropes(d) + with_axes(d)]
        made = [(rope, fn) for rope, fn in made if fn is not None]
        if made:
            rope, fn = made[which % len(made)]
            yield rope, dtype, fn


def dealt(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Mistakes of attention, each in bfloat16, which hides the most, and in one of three other ways in turn: name,
    dtype and shape."""
    others = ("float32", "grouped"), ("float16", "grouped"), ("float32", "plain")
    return [(name, *way) for i, name in enumerate(names) for way in (("bfloat16", "grouped"), others[i % 3])]


@contextmanager
def by_the_sample_alone() -> Iterator[None]:
    """Checks of rotations judge and explain their sample here, and make none of the calls of special kinds: for
    matrices of mistakes, in which these calls take the most time and find the same each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "run_trials", lambda *arguments, **options: ({}, []))
        yield


def right(rope: Rope) -> dict[str, Callable[..., Any]]:
    """The same rotation in every precision that is right."""
    return {
        "rounded once": lambda x, m: pyrope.rotate(x.astype(np.float64), m, rope).astype(x.dtype),
        "engine": lambda x, m: pyrope.rotate(x, m, rope),
        "float32 angle": recipe_of(rope).candidate(),
        "low tables": recipe_of(rope).candidate(low_tables=True),
    }


# ── The catalogues in the docs ───────────────────────────────────────────────────────────────────────────────────────

_ISSUE = re.compile(r"([A-Za-z][\w.-]*)#(\d+)")
_CODE = re.compile(r"(?<![\w`])((?:torch\.)?[a-z]+(?:_[a-z]+)+|torch\.[a-z_]+|arange\(n\)|[a-z_]{3,}=-?\d+)(?![\w`])")


def _markdown(text: str) -> str:
    """Text of a catalogue with code as code, and with links to issues."""

    def link(match: re.Match[str]) -> str:
        repository = REPOSITORIES.get(match[1])
        return match[0] if repository is None else f"[{match[0]}](https://github.com/{repository}/issues/{match[2]})"

    return _ISSUE.sub(link, _CODE.sub(r"`\1`", text))


def listed_fields(name: str, fields: dict[str, str]) -> str:
    """The row of a mistake in docs/diagnosis.md or docs/diagnosis-attention.md: its name, and the rest below it."""
    words = [f"*{field}* {_markdown(text)}" for field, text in fields.items() if text.strip("—")]
    return f"| **{name}** | {' <br> '.join(words)} |"


def turn(x: Any, angle: Any) -> Any:
    """Rotate-half by these angles, by hand, in float64, rounded once."""
    cos, sin, p = np.cos(angle), np.sin(angle), x.shape[-1] // 2
    a, b = x[..., :p].astype(float), x[..., p:].astype(float)
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)
