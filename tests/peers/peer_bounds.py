"""How far a correct float32 pipeline may be from the truth, as the oracle judges it."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyrope import Rope
from pyrope.oracle.tolerance import ANGLE32, SECOND_ORDER, U32, Expected, Tables, theta_errors


def theta_bound(rope: Rope) -> Any:
    """Relative error allowed to each float32 θ_i, (p,)."""
    return theta_errors(rope) * U32 * SECOND_ORDER


def float32_bound(x: Any, positions: Any, rope: Rope) -> Any:
    """Error allowed to each feature of x (…, n, d), rotated with tables of float32 angles."""
    expected = Expected(Tables(rope, positions), np.asarray(x, np.float64), np.atleast_2d(positions), "float32")
    return expected.allowed(ANGLE32)
