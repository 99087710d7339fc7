"""A sequence that is split among ranks: memory, bytes sent and time of each rank, for growing lengths.

    pip install ".[mpi]" && mpiexec -n 4 python examples/parallel.py

With `python examples/parallel.py` alone there is one rank, which sends nothing: compare its memory with that of four.
"""

import time
import tracemalloc
from functools import partial
from typing import Any

import numpy as np

import pyrope
from pyrope import Rope, parallel

HEADS, KEY_HEADS, D = 8, 2, 64
ROPE = Rope(head_dim=D, base=10000.0, layout="half")
SHARD = 4 * KEY_HEADS * 2 * D + 8  # bytes of a token: keys and values in float32, and its position
STATE = 4 * KEY_HEADS * D * (D + 1)  # bytes of S and z, whatever the length
RUNNING = 4 * HEADS * (2 * D + 2)  # bytes of a token: scaled queries, sums, greatest scores; two shards are held


def measured(comm: Any, call: Any) -> tuple[Any, list[float]]:
    """What a call returns on this rank; and of all ranks the most seconds, the most MB in use and the most MB sent."""
    sent = [0]

    class Counting(type(comm)):  # type: ignore[misc]
        def Isend(self, buffer: Any, *where: Any) -> Any:  # noqa: N802, as MPI spells it
            sent[0] += buffer.nbytes
            return super().Isend(buffer, *where)

        def Exscan(self, own: Any, *more: Any) -> None:  # noqa: N802
            sent[0] += own.nbytes
            super().Exscan(own, *more)

    comm.Barrier()
    tracemalloc.start()
    begin = time.perf_counter()
    out = call(Counting(comm))
    own = np.array([time.perf_counter() - begin, tracemalloc.get_traced_memory()[1] / 1e6, sent[0] / 1e6])
    tracemalloc.stop()
    every = np.empty((comm.Get_size(), 3))
    comm.Allgather(own, every)
    return out, every.max(axis=0).tolist()


def main(tokens: int = 4096) -> None:
    try:
        comm = parallel.world()
    except ImportError as error:
        print("this example needs MPI:", *str(error).replace(" (", ": (").split(": "), sep="\n    ")
        return
    rank, size, say = comm.Get_rank(), comm.Get_size(), print if comm.Get_rank() == 0 else lambda *words: None
    say(f"ranks: {size}; {HEADS} heads, {KEY_HEADS} key heads of {D}, float32; the most of any rank")
    say(" tokens attention scheme       MB used formula MB sent formula       s")
    for n in (tokens // 4, tokens // 2, tokens):
        normal = np.random.default_rng(0).standard_normal  # the same on every rank, which keeps its shard
        every = [normal((h, n, D), dtype=np.float32) for h in (HEADS, KEY_HEADS, KEY_HEADS)]
        for kind, scheme in (("softmax", "zigzag"), ("softmax", "contiguous"), ("linear", "contiguous")):
            at = parallel.shard_positions(n, rank, size, scheme)
            q, k, v = (x[:, at] for x in every)
            function: Any = partial(parallel.parallel_linear_attention, rope=ROPE)
            if kind == "softmax":  # each rank rotates its own tokens, by their positions in the sequence
                q, k, function = pyrope.rotate(q, at, ROPE), pyrope.rotate(k, at, ROPE), parallel.ring_attention
            out, (seconds, peak, sent) = measured(comm, partial(function, q=q, k=k, v=v, positions=at, causal=True))
            formula = (STATE if kind == "linear" else (n - n // size) * SHARD) / 1e6
            memory = f"{n / size * (RUNNING + min(size, 2) * SHARD) / 1e6:.2f}" if kind == "softmax" else ""
            say(f"{n:>7} {kind:<10}{scheme:<12}{peak:>8.2f}{memory:>8}{sent:>8.3f}{formula:>8.3f}{seconds:>8.3f}")
    if (together := parallel.gather(comm, out, at)) is not None:
        alone = pyrope.linear_attention(*every, np.arange(n), ROPE, causal=True)
        say(f"the last one, gathered, is off by {abs(together - alone).max():.1e} from one process")


if __name__ == "__main__":
    main()
