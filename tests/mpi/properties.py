"""Run by `mpiexec -n 8 python tests/mpi/properties.py SEED EXAMPLES`: everything equals one process and the definition.

Every rank draws the same examples, from one seed, and cuts its own shard out of them. What fails on one rank ends
all. An example takes 1, 2, 3, 4 or 8 of the ranks; the others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import cupy_contract
import references
import test_linear
from device_double import DeviceDouble
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from models import PLAIN, by_definition, close, configs
from mpi4py import MPI
from strategies import arrays, dtypes, layouts, to_backend

import pyrope
from pyrope import DynamicNTK, Rope, definition, parallel, softmax
from pyrope.parallel import SCHEMES, gather, parallel_linear_attention, ring_attention, shard_positions

WORLD = MPI.COMM_WORLD
SIZES = (1, 2, 3, 4, 8)
COMMS = {size: WORLD.Split(0 if WORLD.rank < size else MPI.UNDEFINED, WORLD.rank) for size in SIZES}
DOUBLE = DeviceDouble() if cupy_contract.real is not None else None
if DOUBLE is not None:
    sys.modules["cupy"] = DOUBLE

SEED, EXAMPLES = int(sys.argv[1]), int(sys.argv[2])
sizes = st.sampled_from(SIZES)
schemes = st.sampled_from(SCHEMES)
backends = st.sampled_from([np] if DOUBLE is None else [np, np, DOUBLE])


@contextlib.contextmanager
def described(example):
    try:
        yield
    except Exception as error:
        raise AssertionError(example) from error


def on_all_ranks(body, *strategies):
    """Runs a property. An example that fails on one rank ends all, and that rank says which it was."""

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(sizes, st.tuples(*strategies))
    def run(size, drawn):
        if WORLD.rank < size:
            # At once: Hypothesis would try the example again, on this rank alone.
            with parallel._aborting(WORLD), described(f"{body.__name__}, seed {SEED}, {size} ranks: {drawn}"):
                body(COMMS[size], *drawn)

    run()


@st.composite
def softmax_cases(draw):
    """q, k and v of all tokens, and options."""
    batch = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
    g, r, n = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 3, 7, 12, 16, 19]))
    d, e, dtype = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(dtypes)
    q, k, v = (draw(arrays(shape, dtype)) for shape in ((*batch, g * r, n, d), (*batch, g, n, d), (*batch, g, n, e)))
    options = {"causal": draw(st.booleans()), "window": draw(st.sampled_from([None, 1, 2, 3, 5, 8, 12]))}
    options |= {"softcap": draw(st.none() | st.floats(0.25, 30.0)), "scale": draw(st.none() | st.floats(0.01, 4.0))}
    return q, k, v, options


def shards(comm, scheme, xp, *whole):
    """This rank's positions, and its part of arrays (…, n, d), of any memory layout."""
    own = shard_positions(whole[0].shape[-2], comm.rank, comm.size, scheme)
    return own, *(to_backend(x[..., own, :], xp) for x in whole)


def assert_gathered(comm, out, own, exact, allowed, xp):
    """The gathered result is where it should be, of its kind, and within its bounds."""
    assert pyrope.namespace(out) is xp
    whole = gather(comm, out, own, root=comm.size - 1)
    assert (whole is not None) == (comm.rank == comm.size - 1)
    if whole is not None:
        assert pyrope.namespace(whole) is xp and whole.dtype == out.dtype and whole.shape == exact.shape
        assert (abs(pyrope.to_numpy(whole).astype(np.float64) - exact) <= allowed).all()


def ring(comm, case, xp, tiles, shift):
    q, k, v, options = case
    at, before = np.arange(q.shape[-2]), (softmax._ROWS, softmax._FINE, softmax._SCORES)
    for scheme in SCHEMES:
        own, *shard = shards(comm, scheme, xp, q, k, v)
        softmax._ROWS, softmax._FINE, softmax._SCORES = tiles or before
        out = ring_attention(comm, *shard, own + shift, **options)
        softmax._ROWS, softmax._FINE, softmax._SCORES = before
        if not len(at):
            assert out.shape == (*q.shape[:-1], v.shape[-1])
            continue
        exact, allowed = references.attention(q, k, v, **options)
        # Sums that shrink when a greater score arrives cost 4 u for each of at most m arrivals, and the rounding of
        # the differences of scores, which add up to twice the greatest score: three times the bound.
        assert_gathered(comm, out, own, exact, 3 * allowed, xp)


def in_states(comm, case, scheme, xp):
    q, k, v, m, rope, feature_map = case
    if q.ndim == 2:  # a shard is gathered with its heads
        q, k, v = q[None], k[None], v[None]
    causal = scheme == "contiguous"
    own, *shard = shards(comm, scheme, xp, q, k, v)
    if rope is not None and rope.axes is None and m.ndim == 1 and causal:
        m = np.sort(m)  # else the positions are refused
    where = () if rope is None else (m[..., own], rope)
    out = parallel_linear_attention(comm, *shard, *where, causal=causal, feature_map=feature_map)
    # The same sums in another order: keys are added to shards, and shards to each other, n − 1 additions at most.
    exact, allowed = references.linear_attention(q, k, v, m, rope, causal, definition.FEATURE_MAPS[feature_map])
    assert_gathered(comm, out, own, exact, allowed, xp)


@st.composite
def model_cases(draw):
    """A config without ALiBi, tokens (b, n) or (n,), positions, and a seed for the weights."""
    config = draw(configs().filter(lambda config: config.encoding != "alibi"))
    b, n = draw(st.integers(0, 2)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    tokens = rng.integers(0, config.vocabulary, (b, n) if b else n)
    positions = draw(st.sampled_from([None, np.arange(n) + 7, rng.integers(-99, 99, n)]))
    return config, tokens, positions, draw(st.integers(0, 999))


def whole_model(comm, case, xp):
    config, tokens, positions, number = case
    model = pyrope.random_model(config, number, xp, "float64")
    weights = model.weights
    for scheme in SCHEMES[:1] if config.attention == "linear" and config.causal else SCHEMES:
        own = shard_positions(tokens.shape[-1], comm.rank, comm.size, scheme)
        logits = parallel.forward(model, tokens, positions, comm=comm, scheme=scheme)
        assert logits.shape == (*tokens.shape[:-1], len(own), config.vocabulary)
        together = gather(comm, logits, own)
        if together is not None:
            together = pyrope.to_numpy(together)
            rows = [by_definition(config, weights, row, positions) for row in tokens.reshape(-1, tokens.shape[-1])]
            close(together.reshape(-1, *together.shape[-2:]), np.stack(rows))
            close(together, pyrope.to_numpy(pyrope.forward(model, tokens, positions)))


def length_of_all(comm, n, scheme, layout):
    """Frequencies that depend on the length depend on that of the sequence, not on that of a shard."""
    rope = Rope(4, 10000.0, layout, scaling=DynamicNTK(4.0, 6))
    layers = tuple(dataclasses.replace(layer, rope=rope) for layer in PLAIN.layers)
    config = dataclasses.replace(PLAIN, layers=layers)
    tokens, model = np.arange(n) % config.vocabulary, pyrope.random_model(config, 3, dtype="float64")
    own = shard_positions(n, comm.rank, comm.size, scheme)
    together = gather(comm, parallel.forward(model, tokens, comm=comm, scheme=scheme), own)
    if together is not None:
        fixed = tuple(dataclasses.replace(layer, rope=rope.at(n)) for layer in layers)
        close(together, by_definition(dataclasses.replace(config, layers=fixed), model.weights, tokens))


def failures(comm, guilty, kind):
    """Wrong arguments of one rank, or arguments that differ, raise on every rank and name the guilty one."""
    guilty %= comm.size
    x = np.ones((2, 4, 4), np.float32)
    at, options, function = np.arange(4) + 4 * comm.rank, {"causal": True}, ring_attention
    if comm.rank == guilty:
        x = {"dtype": x.astype(np.float64), "heads": x[:1], "nan": x * np.nan}.get(kind, x)
        at = {"positions": at[:3], "floats": at / 2}.get(kind, at)
        options = {"option": {"causal": False}, "window": {"causal": True, "window": 0}}.get(kind, options)
        function = parallel_linear_attention if kind == "function" else function
    extra = () if function is ring_attention else (Rope(4, 10000.0, "half"),)
    try:
        function(comm, x, x, x, at, *extra, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        message = f"{error}"
    else:
        message = None
    same = comm.size == 1 and kind in ("dtype", "heads", "option", "function")
    assert (message is None) == (same or kind == "nan"), (kind, message)  # NaN is a value like any other
    words = {
        "dtype": "all ranks must make the same call: rank 0 made ring_attention(q float", "heads": "q float32 (1, n, 4)", "floats": "must be integers",
        "option": "causal=False", "function": "parallel_linear_attention(q float32", "positions": "positions must have shape (4,)",
        "window": "window must be at least 1, was 0",
    }  # fmt: skip
    if message is not None:
        assert words[kind] in message
        if kind in ("positions", "floats", "window") and comm.rank != guilty:
            assert message.startswith(f"rank {guilty} of {comm.size} failed: ")


numbers = st.integers(1, 4)
few_tiles = st.none() | st.tuples(numbers, numbers, st.integers(1, 40))
kinds = ["dtype", "heads", "nan", "positions", "floats", "option", "window", "function"]
PROPERTIES = [
    (ring, softmax_cases(), backends, few_tiles, st.sampled_from([0, -5, 2**30])),
    (in_states, test_linear.cases(most=12), schemes, backends),
    (whole_model, model_cases(), backends),
    (length_of_all, st.integers(1, 20), schemes, layouts),
    (failures, st.integers(0, 7), st.sampled_from(kinds)),
]

if __name__ == "__main__":
    with parallel.fail_together(WORLD):
        for body, *strategies in PROPERTIES:
            on_all_ranks(body, *strategies)
            if WORLD.rank == 0:
                print(body.__name__, "holds", flush=True)
