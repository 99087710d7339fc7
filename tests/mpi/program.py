"""Run by `mpiexec -n 8 python tests/mpi/program.py`: what must hold on 1, 2, 3 and 8 ranks. test_parallel.py runs the
same with threads."""

from __future__ import annotations

import pathlib
import sys
from dataclasses import replace

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import references
from models import PLAIN, by_definition

import pyrope
from pyrope import DynamicNTK, Rope, parallel
from pyrope.model import Layer
from pyrope.parallel import SCHEMES, gather, parallel_linear_attention, ring_attention, shard_positions

ROPE = Rope(4, 100.0, "half")
OPTIONS = [{}, {"causal": True, "window": 3}, {"window": 4}, {"causal": True, "softcap": 0.7, "scale": 2.0}]
GROWING = Rope(4, 10000.0, "half", scaling=DynamicNTK(4.0, 6))  # Θ depends on the length of all tokens, not of a shard
CONFIGS = {
    "zigzag": PLAIN, "contiguous": replace(PLAIN, attention="linear"), "striped": replace(PLAIN, softcap=2.0, causal=False),
}  # fmt: skip


def holds(comm):
    """Every function of `parallel`, in float64, equals one process and the definition."""
    rng, n = np.random.default_rng(0), 13
    size, rank = comm.Get_size(), comm.Get_rank()

    def gathered(out, own, expected, bound):
        whole = gather(comm, out, own)
        assert (whole is None) == (rank != 0)
        assert whole is None or (whole.shape == expected.shape and abs(whole - expected).max() <= bound)

    q, k, v = (rng.standard_normal((2, h, n, d)) for h, d in ((4, 4), (2, 4), (2, 5)))
    for scheme in SCHEMES:
        own = shard_positions(n, rank, size, scheme)
        shard = [np.ascontiguousarray(x[..., own, :]) for x in (q, k, v)]
        for options in OPTIONS:
            out = ring_attention(comm, *shard, own + 1000, **options)
            gathered(out, own, references.attention(q, k, v, **options)[0], 1e-13)
        for causal in (False, True)[: 1 + (scheme == "contiguous")]:
            for where in ((), (own * 2, ROPE)):
                out = parallel_linear_attention(comm, *shard, *where, causal=causal)
                exact = references.linear_attention(q, k, v, np.arange(n) * 2, where[1] if where else None, causal)
                gathered(out, own, exact[0], 1e-12)
    for scheme, config in CONFIGS.items():
        layers = (Layer(GROWING, 4 if config.attention == "softmax" else None), *config.layers[1:])
        config, tokens = replace(config, layers=layers), rng.integers(0, 11, (2, n))
        model, at = pyrope.random_model(config, 1, dtype="float64"), np.arange(n) + 3
        out = parallel.forward(model, tokens, at, comm=comm, scheme=scheme)
        fixed = replace(config, layers=tuple(replace(one, rope=one.rope.at(n + 3)) for one in layers))
        expected = np.stack([by_definition(fixed, model.weights, row, at) for row in tokens])
        gathered(out, shard_positions(n, rank, size, scheme), expected, 1e-10)
        assert np.allclose(parallel.forward(model, tokens[0], at, comm=comm, scheme=scheme), out[0], rtol=0, atol=1e-10)
    return "holds"


if __name__ == "__main__":
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with parallel.fail_together(world):
        for size in (1, 2, 3, 8):
            some = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
            if world.rank < size:
                holds(some)
        print(f"rank {world.rank} is right\n", end="", flush=True)  # in one piece
