"""Softmax against linear attention with RoPE: what Eq. (19) gains, and what it loses.

    python examples/softmax_against_linear.py

Linear attention keeps a state of constant size instead of all keys, and its time grows with the length, not
with its square. In return, weights may be negative and do not add up to 1, since only the numerator is rotated.
Times are those of one thread, so that they do not depend on how many cores a machine has.
"""

import os
import time

os.environ["PYROPE_THREADS"] = "1"
for library in ("OPENBLAS", "OMP", "MKL"):  # read once, when NumPy is imported
    os.environ[f"{library}_NUM_THREADS"] = "1"
import numpy as np  # noqa: E402

import pyrope  # noqa: E402
from pyrope import Rope, definition  # noqa: E402

HEADS, HEAD_DIM = 2, 32
ROPE = Rope(HEAD_DIM, 10000.0, "half")
SECONDS = 0.2  # for each length: short calls are easily disturbed


def main() -> None:
    rng = np.random.default_rng(0)

    def inputs(n: int) -> list[np.ndarray]:
        return [rng.standard_normal((HEADS, n, HEAD_DIM), np.float32) for _ in "qkv"]

    print(f"{'length':>8}{'softmax':>12}{'linear':>12}   both causal, one thread, best of many")
    for n in (256, 1024, 4096):
        (q, k, v), m, best, spent, rounds = inputs(n), np.arange(n), [np.inf, np.inf], 0.0, 0
        while spent < SECONDS or rounds < 3:  # measured in turns, so that a busy moment hits both
            start = time.perf_counter()
            pyrope.attention(pyrope.rotate(q, m, ROPE), pyrope.rotate(k, m, ROPE), v, causal=True)
            middle = time.perf_counter()
            pyrope.linear_attention(q, k, v, m, ROPE, causal=True)
            end = time.perf_counter()
            if rounds:  # the first one warms up: memory, tables, threads
                best = [min(best[0], middle - start), min(best[1], end - middle)]
                spent += end - start
            rounds += 1
        print(f"{n:>8}{best[0] * 1e3:>9.1f} ms{best[1] * 1e3:>9.1f} ms")

    q, k, v = inputs(100)
    m = np.arange(100)
    phi, seen = definition.elu_plus_one, definition.visible(m, m, causal=True)
    rotated, total = definition.similarities(phi(q), phi(k), lambda x: pyrope.rotate(x, m, ROPE), seen)
    unrotated, _ = definition.similarities(phi(q), phi(k), lambda x: x, seen)
    weights, sums, plain = rotated / total, rotated.sum(axis=-1) / total[..., 0], unrotated.sum(axis=-1) / total[..., 0]
    print(f"row sums of Eq. (19): from {float(sums.min()):.3f} to {float(sums.max()):.3f};")
    print(f"      of Eq. (18), without RoPE: {float(plain.min()):.3f} to {float(plain.max()):.3f}")
    print(f"negative weights: {100 * float((weights < 0).mean()):.1f} % of all, the least {float(weights.min()):.5f}")

    at_once = pyrope.linear_attention(q, k, v, m, ROPE, causal=True)
    state, steps = None, []
    for t in range(100):  # as a decoder does it: one token at a time, and a state
        row = slice(t, t + 1)
        out, state = pyrope.linear_step(q[:, row], k[:, row], v[:, row], m[row], ROPE, state=state)
        steps.append(out)
    off = np.abs(np.concatenate(steps, axis=-2) - at_once).max()
    assert state is not None
    size = state.numerator.nbytes + state.denominator.nbytes
    print(f"token by token: off by {off:.1e}")
    print(f"      the state has {size} bytes, the keys and values {k.nbytes + v.nbytes}")


if __name__ == "__main__":
    main()
