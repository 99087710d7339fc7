"""A program that computes attention on several ranks, each with its own tokens, and how it is checked:

    pip install ".[mpi]"
    pyrope check --attention softmax --head-dim 64 --base 10000 --layout half \\
        --exec "mpiexec -n 4 python examples/other_languages/my_attention.py {q} {k} {v} {positions} {o}"

The paths are of .npy files: q, k and v (b, h, n, d) and positions (b, n) to be read, o (b, h, n, d) to be written.
"""

import sys

import numpy as np

import pyrope
from pyrope import Rope, parallel

ROPE = Rope(head_dim=64, base=10000.0, layout="half")


def main(paths: list[str]) -> None:
    comm = parallel.world()
    with parallel.fail_together(comm):
        q, k, v, positions = (np.load(path, mmap_mode="r") for path in paths[:4])
        own = parallel.shard_positions(q.shape[2], comm.Get_rank(), comm.Get_size(), "zigzag")
        q, k, v = (np.ascontiguousarray(x[:, :, own]) for x in (q, k, v))
        at = positions[:, None, own]  # in the sequence, not in this rank's part of it
        o = parallel.ring_attention(comm, pyrope.rotate(q, at, ROPE), pyrope.rotate(k, at, ROPE), v, own, causal=True)
        if (together := parallel.gather(comm, o, own)) is not None:
            np.save(paths[4], together)


if __name__ == "__main__":
    main(sys.argv[1:])
