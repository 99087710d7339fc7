"""Convert query and key weights between the two layouts, so that every score stays what it was.

    python examples/convert_weights.py

Meta's Llama pairs adjacent features, Hugging Face's pairs halves: their checkpoints differ in the order of the
rows of W_q and W_k. The same weights under the wrong layout run without an error and talk nonsense.
"""

from typing import Any

import numpy as np

import pyrope
from pyrope import Rope

HEADS, HEAD_DIM, WIDTH, N = 4, 16, 64, 10


def main() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((N, WIDTH))
    w_q, w_k = (rng.standard_normal((HEADS * HEAD_DIM, WIDTH)) / 8 for _ in "qk")

    def scores(w_q: Any, w_k: Any, layout: str) -> Any:
        """q_mᵀk_n of every head: (heads, n, n)."""
        rope, m = Rope(HEAD_DIM, 10000.0, layout), np.arange(N)
        q, k = ((tokens @ w.T).reshape(N, HEADS, HEAD_DIM).swapaxes(0, 1) for w in (w_q, w_k))
        return pyrope.rotate(q, m, rope) @ pyrope.rotate(k, m, rope).swapaxes(-1, -2)

    right = scores(w_q, w_k, "interleaved")
    wrong = scores(w_q, w_k, "half")
    converted = [pyrope.permute_weights(w, HEADS, "interleaved", "half") for w in (w_q, w_k)]
    same = scores(*converted, "half")
    back = pyrope.permute_weights(converted[0], HEADS, "half", "interleaved")
    print(f"a score has a size of about {np.abs(right).mean():.2f}")
    print(f"weights as they are, layout half: scores are off by up to {np.abs(wrong - right).max():.2f}")
    print(f"weights converted, layout half:   scores are off by up to {np.abs(same - right).max():.1e}")
    order = pyrope.permute_weights(np.arange(16), 1, "interleaved", "half")
    print(f"the rows of the first head, in their new order:\n    {order}")
    print("converted back, they are the same weights:", bool((back == w_q).all()))


if __name__ == "__main__":
    main()
