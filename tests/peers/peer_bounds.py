"""How far a correct float32 pipeline may be from the truth: derived where the oracle judges by it."""

from pyrope.oracle.tolerance import SECOND_ORDER, U32, U64, float32_bound, pair_errors, theta_bound

__all__ = ["SECOND_ORDER", "U32", "U64", "float32_bound", "pair_errors", "theta_bound"]
