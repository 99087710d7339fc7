"""All measurements in one run: every ratio as a table, printed and written as Markdown.

    python examples/benchmarks/all.py [-o benchmarks.md] [--quick]

Takes some minutes; run it where nothing else runs. With --quick, everything is tiny: that shows that it works and says
nothing about speed. torch, transformers, threadpoolctl and SmolLM2 are optional; what is not installed is left out, and
a row says so. Everything is measured with one thread and with every core.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import textwrap
from types import ModuleType

import attention
import forward
import numpy as np
import oracle
import rotation
from rows import CONTROL, CORES, Row, show

import pyrope

PARTS = {"Rotation": rotation, "Attention": attention, "Whole models": forward, "The oracle": oracle}
TINY: dict[ModuleType, dict[str, object]] = {
    rotation: {"HEADS": 2, "LENGTH": 64, "POSITIONS": 256, "ROUNDS": 3},
    attention: {"HEADS": 2, "LENGTH": 256, "MEMORY": 512, "LENGTHS": (192, 384, 768), "BEFORE": (16, 64), "STEPS": 3},
    forward: {
        "VOCABULARY": 64, "WIDTH": 32, "HEADS": 2, "LAYERS": 2, "MLP": 64, "PREFILLS": (16, 32), "BEFORE": 16,
        "STEPS": 3, "SMOLLM2_STEPS": 2,
    },
    oracle: {"SIZES": (16,), "ATTENTION": (16,)},
}  # fmt: skip


QUICK = "Tiny sizes (--quick): these times and ratios say nothing about speed."
RATIOS = 'Times are the shortest of several. "pyrope / it" is pyrope\'s time over that.'


def machine() -> str:
    limited = os.environ.get("OPENBLAS_NUM_THREADS")
    blas = f", OPENBLAS_NUM_THREADS={limited}" if limited else ""
    control = "with" if CONTROL else "without"
    system = f"{platform.system()} {platform.machine()}, {CORES} cores{blas}, {control} threadpoolctl"
    return f"pyrope {pyrope.__version__}, Python {platform.python_version()}, NumPy {np.__version__}; {system}"


def markdown(results: dict[str, list[Row]], quick: bool) -> str:
    lines = ["# Benchmarks", "", machine() + ".", "", *([QUICK, ""] if quick else []), RATIOS]
    for title, rows in results.items():
        lines += ["", f"## {title}", "", "| what | measured | ratio | to | limit | note |", "|---|---|---|---|---|---|"]
        for row in rows:
            what = row.what if row.value else f"**{row.what}**"
            cells = (what, row.value, "" if row.ratio is None else f"{row.ratio:.2f}", row.of, row.limit, row.note)
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", default="benchmarks.md", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only to see that it works")
    options = parser.parse_args()
    if not options.output.parent.is_dir():
        parser.error(f"there is no directory {options.output.parent}")
    if options.quick:
        for part, sizes in TINY.items():
            for name, value in sizes.items():
                setattr(part, name, value)
    print(textwrap.fill(machine(), 80), *([QUICK] if options.quick else []), RATIOS, sep="\n\n")
    results = {}
    for title, part in PARTS.items():
        print(f"\n== {title}")
        # Limits are for the full sizes.
        results[title] = show(row._replace(limit="") if options.quick else row for row in part.rows())
        options.output.write_text(markdown(results, options.quick), encoding="utf-8")  # kept if it is stopped
    print(f"\nwritten to {options.output}" + (f"\n{QUICK}" if options.quick else ""))


if __name__ == "__main__":
    main()
