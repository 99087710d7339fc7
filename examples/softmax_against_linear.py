"""Softmax against linear attention with RoPE: what Eq. (19) gains, and what it loses.

    python examples/softmax_against_linear.py

Linear attention keeps a state of constant size instead of all keys, and its time grows with the length, not
with its square. In return, weights may be negative and do not add up to 1, since only the numerator is rotated.
Times are those of one thread, so that they do not depend on how many cores a machine has.
"""

import os
import time
from collections.abc import Callable

for library in ("PYROPE", "OPENBLAS_NUM", "OMP_NUM", "MKL_NUM"):  # read once, when NumPy is imported
    os.environ[f"{library}_THREADS"] = "1"
import numpy as np  # noqa: E402

import pyrope  # noqa: E402
from pyrope import Rope, definition  # noqa: E402

HEADS, HEAD_DIM = 2, 32
ROPE = Rope(HEAD_DIM, 10000.0, "half")


def inputs(n: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).standard_normal((3, HEADS, n, HEAD_DIM), np.float32))


def milliseconds(function: Callable[..., object], *given: object) -> float:
    """The shortest time of ten causal calls; one before them warms up."""
    times = [time.perf_counter() for _ in range(11) if function(*given, causal=True) is not None]
    return float(np.diff(times).min()) * 1e3


def main() -> None:
    print(f"{'length':>8}{'softmax':>12}{'linear':>12}   both causal, one thread, best of ten")
    for n in (256, 1024, 4096):
        (q, k, v), m = inputs(n), np.arange(n)
        turned = pyrope.rotate(q, m, ROPE), pyrope.rotate(k, m, ROPE)
        softmax, linear = (
            milliseconds(pyrope.attention, *turned, v),
            milliseconds(pyrope.linear_attention, q, k, v, m, ROPE),
        )
        print(f"{n:>8}{softmax:>9.1f} ms{linear:>9.1f} ms")

    (q, k, v), m = inputs(100), np.arange(100)
    phi, seen = definition.elu_plus_one, definition.visible(m, m, causal=True)
    rotated, total = definition.similarities(phi(q), phi(k), lambda x: pyrope.rotate(x, m, ROPE), seen)
    unrotated, _ = definition.similarities(phi(q), phi(k), lambda x: x, seen)
    weights, sums, plain = rotated / total, rotated.sum(axis=-1) / total[..., 0], unrotated.sum(axis=-1) / total[..., 0]
    print(f"row sums of Eq. (19): from {float(sums.min()):.3f} to {float(sums.max()):.3f};")
    print(f"      of Eq. (18), without RoPE: {float(plain.min()):.3f} to {float(plain.max()):.3f}")
    print(f"negative weights: {100 * float((weights < 0).mean()):.1f} % of all, the least {float(weights.min()):.5f}")

    state, steps = None, []
    for t in range(100):  # as a decoder does it: one token at a time, and a state
        row = slice(t, t + 1)
        out, state = pyrope.linear_step(q[:, row], k[:, row], v[:, row], m[row], ROPE, state=state)
        steps.append(out)
    off = np.concatenate(steps, axis=-2) - pyrope.linear_attention(q, k, v, m, ROPE, causal=True)
    assert state is not None
    print(f"token by token: off by {np.abs(off).max():.1e}")
    size = state.numerator.nbytes + state.denominator.nbytes
    print(f"      the state has {size} bytes, the keys and values {k.nbytes + v.nbytes}")


if __name__ == "__main__":
    main()
