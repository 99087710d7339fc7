"""Scores depend on the distance of query and key only, Eq. (16), near the start and two billion tokens later.

    python examples/scores_by_distance.py

With a float32 angle, as in most code, this is lost far from the start.
"""

import numpy as np

import pyrope
from pyrope import Rope
from pyrope.oracle.gallery import rotate_half  # the usual form, with its float32 angle

ROPE = Rope(head_dim=64, base=10000.0, layout="half")


def main() -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 64)) for _ in "qk")

    def score(m: int, n: int) -> float:
        """q at position m, k at position n."""
        return float((pyrope.rotate(q, [m], ROPE) * pyrope.rotate(k, [n], ROPE)).sum())

    def usual(m: int, n: int) -> float:
        return float((rotate_half(q, np.array([m])) * rotate_half(k, np.array([n]))).sum())

    print("query at m, key at n, always 5 apart:")
    print(f"{'m':>12}{'n':>12}{'exact':>22}{'with a float32 angle':>24}")
    for start in (0, 1000, 10**6, 2 * 10**9):
        m, n = start + 5, start
        print(f"{m:>12}{n:>12}{score(m, n):>22.13f}{usual(m, n):>24.13f}")
    print(f"float32 cannot hold {2 * 10**9 + 5}: it rounds to {float(np.float32(2 * 10**9 + 5)):.0f},")
    print("      so in the last row the distance has vanished, and the score is that of 0")
    drift = abs(score(2 * 10**9 + 5, 2 * 10**9) - score(5, 0))
    print(f"exact scores differ by {drift:.1e}, the last bits of float64")
    print("and another distance gives another score:", [round(score(d, 0), 4) for d in (0, 1, 5, 50)])


if __name__ == "__main__":
    main()
