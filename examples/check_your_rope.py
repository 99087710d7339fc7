"""Check a RoPE: a NumPy function, a torch function and a C program, all by the same oracle.

    python examples/check_your_rope.py

torch is left out if it is not installed, and C if there is no compiler. The command line does the same:

    pyrope check --exec "./my_rope {x} {positions} {y}" --head-dim 64 --base 10000 --layout half
"""

import importlib.util
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import numpy as np

import pyrope
from pyrope import Rope
from pyrope.oracle import adapters

ROPE = Rope(head_dim=64, base=10000.0, layout="half")
SOURCE = pathlib.Path(__file__).parent / "other_languages" / "my_rope.c"


def my_rope(x: Any, positions: Any) -> Any:
    angles = positions[:, None] * 10000.0 ** -(np.arange(0, 64, 2) / 64)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :32], x[..., 32:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def torch_rope(x: Any, positions: Any) -> Any:
    import torch

    angles = positions[:, None].float() / 10000.0 ** (torch.arange(0, 64, 2).float() / 64)
    table = torch.cat((angles, angles), -1)
    return x * table.cos() + torch.cat((-x[..., 32:], x[..., :32]), -1) * table.sin()


def main() -> None:
    print("-- NumPy", pyrope.check_rotation(my_rope, ROPE), "", sep="\n")
    if importlib.util.find_spec("torch"):
        print("-- torch", pyrope.check_rotation(torch_rope, ROPE, framework="torch"), "", sep="\n")
    else:
        print("-- torch is not installed: left out\n")
    if compiler := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"):
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/my_rope"
            subprocess.run([compiler, "-O2", "-o", program, str(SOURCE), "-lm"], check=True)
            fn = adapters.from_command([program, "{x}", "{positions}", "{y}"])
            print("-- C", pyrope.check_rotation(fn, ROPE, max_position=4095), "", sep="\n")
    else:
        print("-- there is no C compiler: left out\n")
    pyrope.assert_rotation(my_rope, ROPE)  # your test suite needs this line alone
    print("assert_rotation(my_rope, ROPE) has passed")


if __name__ == "__main__":
    main()
