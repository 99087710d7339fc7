"""How precision dies with position: the errors of five ways to compute cos mθ and sin mθ.

    python examples/precision.py

The error shown is the largest of all pairs at that position; 2 is as wrong as a cosine can be.
Draw it with pyrope plot precision -o precision.png
"""

import numpy as np

import pyrope
from pyrope import Rope

ROPE = Rope(head_dim=128, base=10000.0, layout="half")
POSITIONS = np.array([1, 257, 8191, 65537, 1000001])


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to the 8 significant bits of bfloat16."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def main() -> None:
    theta = pyrope.frequencies(ROPE)
    m = POSITIONS[:, None]
    truth = np.stack(pyrope.cos_sin(POSITIONS, ROPE))  # within 1 ulp of float64

    def of(angle: np.ndarray) -> np.ndarray:
        return np.stack((np.cos(angle), np.sin(angle)))

    ways = {
        "pyrope, rounded to float32": np.stack(pyrope.cos_sin(POSITIONS, ROPE, np.float32)),
        "angle in float64": of(m * theta),
        "angle in float32": of(m.astype(np.float32) * theta.astype(np.float32)),
        "bfloat16 frequencies": of(m * bfloat16(theta)),
        "bfloat16 positions": of(bfloat16(m.astype(float)) * theta),
    }
    print(f"{'position':<28}" + "".join(f"{p:>10}" for p in POSITIONS))
    for name, tables in ways.items():
        error = np.abs(tables - truth).max(axis=(0, 2))
        print(f"{name:<28}" + "".join(f"{e:>10.1e}" for e in error))
    print(
        "\nA float32 angle loses one bit each time the position doubles."
        "\nbfloat16 has 8 bits: it rounds 257 to 256, and far positions to few numbers."
        "\nbfloat16 frequencies, made by model.to(bfloat16), are wrong from position 1 on."
    )


if __name__ == "__main__":
    main()
