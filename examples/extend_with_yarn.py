"""Extend a context from 4,096 to 32,768 positions with YaRN, and see what it does to Θ.

    python examples/extend_with_yarn.py

A pair that turns often within the original length met all its angles in training: it is kept. One that does
not finish a turn would meet angles that are new to it: it is slowed down by the factor. Between them there is a ramp.
Draw it with pyrope plot wavelengths -o wavelengths.png
"""

import numpy as np

import pyrope
from pyrope import Linear, Rope, YaRN

ORIGINAL, FACTOR = 4096, 8.0


def main() -> None:
    plain = Rope(head_dim=64, base=10000.0, layout="half")
    yarn = Rope(64, 10000.0, "half", scaling=YaRN(factor=FACTOR, original_length=ORIGINAL))
    linear = Rope(64, 10000.0, "half", scaling=Linear(FACTOR))
    waves = pyrope.wavelengths(plain)
    slower = pyrope.frequencies(plain) / pyrope.frequencies(yarn)
    print(f"{'pair':>5}{'wavelength':>13}{'turns in ' + str(ORIGINAL):>16}{'slowed down by':>16}")
    for i in range(0, plain.pairs, 3):
        change = "kept" if slower[i] == 1 else "interpolated" if slower[i] > FACTOR - 1e-9 else "ramp"
        print(f"{i:>5}{waves[i]:>13.1f}{ORIGINAL / waves[i]:>16.2f}{slower[i]:>16.3f}  {change}")
    print(f"attention factor {yarn.attention_factor:.6f} = 0.1·ln {FACTOR:g} + 1: scores grow by its square")

    # The largest angle of the pairs that have not finished a turn in training, over the largest in training.
    longest = int(ORIGINAL * FACTOR)
    slow = waves > ORIGINAL
    for name, rope in {"no rescaling": plain, "linear": linear, "YaRN": yarn}.items():
        beyond = (longest * pyrope.frequencies(rope)[slow]).max() / (ORIGINAL * pyrope.frequencies(plain)[slow]).max()
        near = np.abs(pyrope.frequencies(rope)[:8] / pyrope.frequencies(plain)[:8] - 1).max()
        print(f"{name:<14}slow pairs reach {beyond:.2f} x trained angles, fast ones change by {near:.1%}")
    print("Linear interpolation blurs the fast pairs, which tell neighbours apart;\nYaRN leaves them alone.")


if __name__ == "__main__":
    main()
