"""As much of mpi4py as `pyrope.parallel` uses, with a thread for each rank: for machines that have no MPI.

Messages are read when the receiver waits for them, not when they are sent, so that a sender that writes to its buffer
too early is seen. What would wait forever ends after a minute.
"""

from __future__ import annotations

import queue
import sys
import threading
import types

import numpy as np

PATIENCE = 60.0  # seconds: far beyond what a rank takes, so that only one that would wait forever meets it


class Aborted(Exception):
    pass


class Request:
    def __init__(self, wait):
        self.wait = wait

    @staticmethod
    def Testall(requests):
        return False

    @staticmethod
    def Waitall(requests):
        for request in requests:
            request.wait()


class Ranks:
    def __init__(self, size):
        self.size, self.slots = size, [None] * size
        self.barrier = threading.Barrier(size)
        self.messages = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
        self.sent = [0] * size


class Comm:
    """A communicator of one rank."""

    def __init__(self, ranks, rank):
        self.ranks, self.rank = ranks, rank

    def Get_size(self):
        return self.ranks.size

    def Get_rank(self):
        return self.rank

    def _all(self, value):
        self.ranks.slots[self.rank] = value
        self.ranks.barrier.wait(PATIENCE)
        values = list(self.ranks.slots)
        self.ranks.barrier.wait(PATIENCE)
        return values

    def allgather(self, own):
        return self._all(own)

    def Allreduce(self, own, total, op):
        total[...] = sum(self._all(own.copy()))

    def Exscan(self, own, total, op):
        parts = self._all(own.copy())
        total[...] = sum(parts[: self.rank]) if self.rank else np.nan  # rank 0 may receive anything

    def Gatherv(self, own, into):
        parts = self._all(own.copy())
        assert (into is not None) == (self.rank == 0)
        if into is not None:
            buffer, counts = into
            assert counts == [part.size for part in parts]
            buffer.reshape(-1)[...] = np.concatenate([part.reshape(-1) for part in parts])

    def Isend(self, x, to, tag):
        assert x.flags.c_contiguous and to != self.rank
        read = threading.Event()
        self.ranks.messages[self.rank, to].put((x, tag, read))
        self.ranks.sent[self.rank] += x.nbytes

        def wait():
            assert read.wait(PATIENCE), "nobody received this"

        return Request(wait)

    def Irecv(self, x, source, tag):
        def wait():
            sent, sent_tag, read = self.ranks.messages[source, self.rank].get(timeout=PATIENCE)
            assert sent_tag == tag and sent.dtype == x.dtype and sent.nbytes == x.nbytes
            x.reshape(-1)[...] = sent.reshape(-1)
            read.set()

        return Request(wait)


def installed(monkeypatch):
    """This, in the place of mpi4py. COMM_WORLD can be aborted, and is nothing else."""

    def abort(code):
        raise Aborted(code)

    mpi = types.ModuleType("mpi4py.MPI")
    mpi.Intracomm, mpi.Request, mpi.SUM = Comm, Request, "sum"
    mpi.COMM_WORLD = types.SimpleNamespace(Abort=abort)
    monkeypatch.setitem(sys.modules, "mpi4py", types.ModuleType("mpi4py"))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    return mpi


def on_ranks(size, body):
    """What body(comm) returns or raises, on each of so many ranks, and how many bytes each has sent."""
    ranks, results = Ranks(size), [None] * size

    def run(rank):
        try:
            results[rank] = body(Comm(ranks, rank))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    return results, ranks.sent
