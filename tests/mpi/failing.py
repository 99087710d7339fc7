"""Run by `mpiexec -n 3 python tests/mpi/failing.py KIND`: one rank fails while the others wait for it."""

import os
import signal
import sys

import numpy as np
from mpi4py import MPI

from pyrope import parallel

comm = MPI.COMM_WORLD
x = np.ones((1, 4, 2), np.float32)


def attend(x=x):
    at = np.arange(4) + 4 * comm.rank
    return parallel.ring_attention(comm, x, x, x, at, causal=True)


def fails(self, *given):
    if comm.rank == 1:
        raise MemoryError("no room for the second shard")
    return self


def main(kind):
    if kind == "inside":  # a call of pyrope fails after the ranks have agreed, without fail_together around it
        parallel.softmax.Running.see = fails
    elif kind == "denominator" and comm.rank < 2:
        # Keys of both signs: the sum over the ranks is 0 on rank 1 alone, where the numerator is not.
        k = x * (1 if comm.rank == 0 else -1)
        parallel.parallel_linear_attention(comm.Split(0), x, k, x[..., :1] * (comm.rank + 1), causal=True, feature_map="identity", denominators="nonzero")  # fmt: skip
    elif kind == "denominator":
        comm.Split(1)
    elif kind == "overflow":  # scores of −2e40, which float32 has not, to the keys of rank 1, all that rank 1 sees
        at, keys = np.arange(4) + 4 * comm.rank, x * (1e20 if comm.rank == 1 else 1.0)
        parallel.ring_attention(comm, -keys, keys, x, at, causal=True, window=1)
    elif kind == "dtype":  # an error on every rank, without fail_together
        attend(x.astype(np.float64) if comm.rank == 1 else x)
    elif kind == "leaves" and comm.rank == 1:
        return
    elif kind == "leaves early" and comm.rank == 1:
        sys.exit()
    elif comm.rank == 1 and kind != "nothing":
        {"killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "exit": lambda: sys.exit(5)}.get(kind, raises)()
    attend()


def raises():
    raise LookupError("no such file on this machine")


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind in ("exception", "exit", "leaves", "leaves early", "nothing"):
        with parallel.fail_together(comm):
            main(kind)
    else:
        main(kind)
