"""Run by `mpiexec -n 4 python tests/mpi/messages.py`: what is sent, when, and which shards are computed with."""

import numpy as np
from mpi4py import MPI

from pyrope import Rope, parallel, softmax
from pyrope.parallel import parallel_linear_attention, ring_attention, shard_positions

events: list[tuple[str, int]] = []


class Watched(MPI.Intracomm):
    """Notes messages and their bytes, and has no method that pickles."""

    def Isend(self, buffer, *where):  # noqa: N802, as MPI spells it
        events.append(("send", buffer.nbytes))
        return super().Isend(buffer, *where)

    def Irecv(self, buffer, *where):  # noqa: N802
        events.append(("receive", buffer.nbytes))
        return super().Irecv(buffer, *where)

    def Exscan(self, own, sums, *operation):  # noqa: N802
        events.append(("scan", own.nbytes))
        return super().Exscan(own, sums, *operation)

    def pickled(self, *arguments, **options):
        raise AssertionError("a lower-case method of mpi4py pickles its argument")

    send = recv = isend = irecv = sendrecv = bcast = gather = scatter = pickled
    allgather = alltoall = reduce = allreduce = scan = exscan = pickled


def watched(method):
    def call(self, k, *others):
        keys.append(k.shape[-2])
        return method(self, k, *others)

    return call


comm = Watched(MPI.COMM_WORLD)
rank, size = comm.rank, comm.size
keys: list[int] = []  # of every product
with parallel.fail_together(comm):
    softmax.Running._add = watched(softmax.Running._add)

    # 14 tokens on 4 ranks: 3, 4, 3 and 4 of them. Two key heads of 4 + 3 features in float32, and a position in int64.
    n, rng = 14, np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, n, 4), (2, n, 4), (2, n, 3)))
    own = shard_positions(n, rank, size, "contiguous")
    ring_attention(comm, q[:, own], k[:, own], v[:, own], own, causal=True)
    lengths = [len(shard_positions(n, r, size, "contiguous")) for r in range(size)]
    assert lengths == [3, 4, 3, 4]
    expected = []
    for step in range(size):
        here, next_one = (lengths[(rank - step - i) % size] for i in (0, 1))
        if step < size - 1:  # the next shard is on its way before this one is computed with
            expected += [("receive", 56 * next_one), ("receive", 8 * next_one), ("send", 56 * here), ("send", 8 * here)]
    assert events == expected, (events, expected)
    # Under a causal mask, the shards of later ranks are passed on and not computed with.
    assert keys == [lengths[rank - step] for step in range(rank + 1)], keys

    # Eight chunks of one tile each, two of them on every rank: of the 8·9/2 = 36 tiles that a causal mask leaves, zigzag
    # gives 9 to each rank, whatever chunks it has; contiguous gives 1 + 2 to the first and 7 + 8 to the last.
    softmax._ROWS = softmax._FINE = 8
    softmax._SCORES = 64
    for scheme, share in (("contiguous", [3, 7, 11, 15]), ("zigzag", [9, 9, 9, 9])):
        keys.clear()
        own, x = shard_positions(64, rank, size, scheme), np.ones((1, 16, 2))
        ring_attention(comm, x, x, x, own, causal=True)
        assert len(keys) == share[rank], (scheme, rank, keys)

    # Linear attention sends d·(e + 1) numbers for each key head, whatever the length.
    for n in (8, 800):
        events.clear()
        own = shard_positions(n, rank, size, "contiguous")
        q, k, v = (np.ones((g, len(own), w)) for g, w in ((4, 4), (2, 4), (2, 3)))
        parallel_linear_attention(comm, q, k, v, own, Rope(4, 10000.0, "half"), causal=True)
        assert events == [("scan", 8 * 2 * 4 * (3 + 1))], events

    # No communicator, no MPI call: the error says what is expected.
    try:
        ring_attention(None, q, k, v, own)
    except TypeError as error:
        assert "such as pyrope.parallel.world()" in str(error)
    else:
        raise AssertionError("None is no communicator")
    print(f"rank {rank} is right\n", end="", flush=True)  # in one piece
