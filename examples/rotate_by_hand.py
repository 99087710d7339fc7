"""Rotate one query by hand, Eq. (34), and see that pyrope does the same.

    python examples/rotate_by_hand.py

A head of 4 features has two pairs. At position m the first turns by m·1 radian, the second by m·0.01.
"""

import math

import numpy as np

import pyrope
from pyrope import Rope


def by_hand(x: list[float], m: int) -> list[float]:
    """Pairs (0, 1) and (2, 3), base 10000: θ_i = 10000^(−2i/4)."""
    y = []
    for i in range(2):
        angle = m * 10000.0 ** (-2 * i / 4)
        c, s = math.cos(angle), math.sin(angle)
        a, b = x[2 * i], x[2 * i + 1]
        y += [a * c - b * s, a * s + b * c]
    return y


def main() -> None:
    rope = Rope(head_dim=4, base=10000.0, layout="interleaved")
    print("frequencies, radians per position:", pyrope.frequencies(rope))
    x = [1.0, 0.0, 1.0, 0.0]
    positions = [0, 1, 2, 100]
    rows = np.array([x] * len(positions))  # (n, d)
    turned = pyrope.rotate(rows, positions, rope)
    for m, y in zip(positions, turned, strict=True):
        hand = by_hand(x, m)
        print(f"position {m:3}: pyrope {y.round(4)}\n             by hand {np.round(hand, 4)}")
        assert np.allclose(y, hand, atol=1e-15)
    lengths = np.hypot(turned[:, ::2], turned[:, 1::2])
    print(f"lengths of the pairs, which a rotation keeps: {lengths.min():.12f} to {lengths.max():.12f}")
    back = pyrope.rotate(turned, positions, rope.transposed)
    print("turned back, off by at most", float(np.abs(back - np.array(x)).max()))


if __name__ == "__main__":
    main()
