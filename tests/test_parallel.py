"""What the ranks of `pyrope.parallel` compute and send: with threads for ranks, in any number, and, where there is MPI,
as programs under mpiexec, in tests/mpi."""

import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import references
from hypothesis import given, strategies as st
from models import PLAIN, by_definition, close, configs
from strategies import arrays, dtypes, to_backend
from threads_mpi import Aborted, installed, on_ranks

import pyrope
from pyrope import Rope, parallel, softmax
from pyrope.parallel import SCHEMES, forward, gather, parallel_linear_attention, ring_attention, shard_positions

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/mpi"))
import program  # noqa: E402

RNG = np.random.default_rng(0)
N = 13
Q, K, V = (RNG.standard_normal((2, h, N, d)) for h, d in ((4, 3), (2, 3), (2, 5)))


# ── Shards ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_shards_by_hand():
    # Ten tokens on three ranks. Zigzag cuts them at 10·i/6: chunks of 1, 2, 2, 1, 2 and 2 tokens.
    shards = {scheme: [shard_positions(10, rank, 3, scheme).tolist() for rank in range(3)] for scheme in SCHEMES}
    assert shards["contiguous"] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert shards["zigzag"] == [[0, 8, 9], [1, 2, 6, 7], [3, 4, 5]]
    assert shards["striped"] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@given(st.integers(0, 300), st.integers(1, 40), st.sampled_from(SCHEMES))
def test_every_position_belongs_to_one_rank(n, size, scheme):
    shards = [shard_positions(n, rank, size, scheme) for rank in range(size)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(n))
    assert all(shard.dtype == np.int64 and (np.diff(shard) > 0).all() for shard in shards)
    lengths = list(map(len, shards))
    assert max(lengths) - min(lengths) <= (2 if scheme == "zigzag" else 1)


# ── Threads for ranks ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def mpi():
    with pytest.MonkeyPatch.context() as patch:
        yield installed(patch)


def of(comm, scheme, *whole):
    """This rank's positions, and its part of arrays (…, n, d)."""
    own = shard_positions(whole[0].shape[-2], comm.rank, comm.Get_size(), scheme)
    return own, *(x[..., own, :].copy() for x in whole)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_equal_one_process(mpi, size):
    assert on_ranks(size, program.holds)[0] == ["holds"] * size


@st.composite
def cases(draw):
    """q, k and v of all tokens, and options."""
    batch = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
    g, r, n = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([0, 1, 3, 7, 12, 16, 19]))
    d, e, dtype = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(dtypes)
    q, k, v = (draw(arrays(shape, dtype)) for shape in ((*batch, g * r, n, d), (*batch, g, n, d), (*batch, g, n, e)))
    options = {"causal": draw(st.booleans()), "window": draw(st.sampled_from([None, 1, 2, 3, 5, 8, 12]))}
    options |= {"softcap": draw(st.none() | st.floats(0.25, 30.0)), "scale": draw(st.none() | st.floats(0.01, 4.0))}
    return q, k, v, options


@given(cases(), st.sampled_from([1, 2, 4]), st.sampled_from(SCHEMES), st.sampled_from([0, -5, 2**30]))
def test_a_ring_equals_the_definition(mpi, xp, case, size, scheme, shift):
    q, k, v, options = case

    def body(comm):
        own = shard_positions(q.shape[-2], comm.rank, size, scheme)
        shard = (to_backend(x[..., own, :], xp) for x in (q, k, v))
        return own, pyrope.to_numpy(ring_attention(comm, *shard, own + shift, **options))

    exact, allowed = references.attention(q, k, v, **options)
    for own, out in on_ranks(size, body)[0]:
        assert out.dtype == q.dtype and out.shape == (*q.shape[:-2], len(own), v.shape[-1])
        # Sums that shrink when a greater score arrives cost 4 u for each of at most m arrivals, and the rounding of
        # the differences of scores, which add up to twice the greatest score: three times the bound.
        error = abs(out.astype(np.float64) - exact[..., own, :])
        assert (error <= 3 * np.broadcast_to(allowed, exact.shape)[..., own, :]).all()


def test_large_queries_and_keys_with_small_scores_are_not_refused(mpi):
    q, k, v = np.float32([[[1e20, 0]] * 4]), np.float32([[[0, 1e20]] * 4]), np.float32([[[1], [2], [3], [6]]])

    def body(comm):
        own, *shard = of(comm, "contiguous", q, k, v)
        return ring_attention(comm, *shard, own)

    outs = on_ranks(2, body)[0]
    np.testing.assert_allclose(np.concatenate(outs, axis=1), 3, rtol=1e-6)


@given(config=configs().filter(lambda config: config.encoding != "alibi"), size=st.integers(1, 4), n=st.integers(1, 9))
def test_a_model_equals_its_definition(mpi, xp, config, size, n):
    model, tokens = pyrope.random_model(config, 1, xp, "float64"), np.arange(n) % config.vocabulary
    scheme = "contiguous" if config.attention == "linear" else "zigzag"

    def body(comm):
        own = shard_positions(n, comm.rank, size, scheme)
        return own, pyrope.to_numpy(forward(model, tokens, comm=comm, scheme=scheme))

    exact = by_definition(config, model.weights, tokens)
    for own, logits in on_ranks(size, body)[0]:
        if len(own):
            close(logits, exact[own])


def test_what_is_sent_and_what_is_skipped(mpi, monkeypatch):
    """Each rank sends the shards of all others but of one, before it computes; shards of later ranks are passed on and
    not computed with; zigzag gives every rank the same work."""
    events, add = defaultdict(list), softmax.Running._add
    monkeypatch.setattr(mpi.Intracomm, "Isend", _noting(mpi.Intracomm.Isend, events, "send"))
    monkeypatch.setattr(softmax.Running, "_add", _noting(add, events, "add"))
    for name, value in (("_ROWS", 8), ("_FINE", 8), ("_SCORES", 64)):
        monkeypatch.setattr(softmax, name, value)
    for scheme, share in (("contiguous", [3, 7, 11, 15]), ("zigzag", [9, 9, 9, 9])):
        events.clear()

        def body(comm, scheme=scheme):
            own, x = shard_positions(64, comm.rank, 4, scheme), np.ones((1, 16, 2))
            ring_attention(comm, x, x, x, own, causal=True)
            return threading.get_ident()

        idents, sent = on_ranks(4, body)
        assert sent == [3 * 16 * (2 + 2 + 1) * 8] * 4  # keys, values and a position, in 8 bytes each
        assert [events[ident].count("add") for ident in idents] == share
        assert all(events[ident][:3] == ["send", "send", "add"] for ident in idents)


def _noting(method, events, name):
    def call(self, *arguments):
        events[threading.get_ident()].append(name)
        return method(self, *arguments)

    return call


def test_the_order_of_linear_attention(mpi):
    striped, twice = {"scheme": "striped", "causal": False}, {"shift": -1}  # one position twice, at the seam, is right
    for size, options in (2, striped), (2, twice):
        assert all(isinstance(out, np.ndarray) for out in on_ranks(size, ordered(**options))[0])


# ── Ranks that agree, and that end together ──────────────────────────────────────────────────────────────────────────


def ordered(scheme="contiguous", causal=True, shift=0):
    q, rope = np.random.default_rng(1).standard_normal((1, N, 4)), Rope(4, 100.0, "half")

    def attend(comm):
        own, shard = of(comm, scheme, q)
        return parallel_linear_attention(comm, shard, shard, shard, own + shift * comm.rank, rope, causal=causal)

    return attend


def ring(places=lambda own: own, **options):
    def attend(comm):
        own, *shard = of(comm, "contiguous", Q, K, V)
        return ring_attention(comm, *shard, places(own), **{name: make(comm) for name, make in options.items()})

    return attend


def passed(*configs, add=lambda comm: (0, 0), **options):
    """A model, or one for each rank."""
    models, at = [pyrope.random_model(config, 1, dtype="float64") for config in configs], np.arange(4)
    return lambda comm: forward(
        models[comm.rank % len(models)], at + add(comm)[0], at + add(comm)[1], comm=comm, **options
    )


# Their facts are far longer than a message, and the last layers differ.
DEEP = [replace(PLAIN, layers=PLAIN.layers[:1] * 40 + (replace(PLAIN.layers[0], window=window),)) for window in (2, 3)]


def gathered(shape, at):
    return lambda comm: gather(comm, np.zeros(shape), at)


def overflows(sign):  # each sees itself: −inf alone would pass for nothing
    large = [x.astype(np.float32) for x in (sign * K * 1e20, K * 1e20, V)]
    return lambda comm: ring_attention(comm, *large, range(N), window=1)


SAME = "all ranks must make the same call"
FACTS = "ring_attention(q float64 (2, 4, n, 3), k float64 (2, 2, n, 3), v float64 (2, 2, n, 5), causal="


@pytest.mark.parametrize("size, body, words", [
    (1, overflows(1), "scores must not exceed float32"), (1, overflows(-1), "scores must not exceed float32"),
    (1, ring(lambda own: own[None]), "one for each token of this rank, had"),
    (2, ring(lambda own: np.arange(len(own))), "13 tokens cannot all have their own between 0 and 6"),
    (3, ring(causal=lambda comm: comm.rank == 2), f"{SAME}: rank 0 made {FACTS}False, window=None"),
    (3, ring(causal=lambda comm: comm.rank == 2), f", rank 2 {FACTS}True"),
    (2, ordered("striped"), "a rank ends at position 12, and the next begins at 1;"),
    (1, passed(PLAIN.with_encoding("alibi")), "ALiBi adds a bias to all n × n scores"),
    (1, passed(replace(PLAIN, attention="linear"), scheme="zigzag"), "scheme must be 'contiguous' for causal linear attention"),
    (2, passed(PLAIN, add=lambda comm: (comm.rank, 0)), SAME), (2, passed(PLAIN, add=lambda comm: (0, comm.rank)), SAME), (2, passed(*DEEP), SAME),
    (1, gathered((4, 2), np.arange(3)), "x must be (…, n, f) and positions (n,), had shapes (4, 2) and (3,)"),
    (1, gathered(4, np.arange(4)), "x must be (…, n, f) and positions (n,)"),
    (1, gathered((4, 2), [0, 1, 2, 2]), "4 tokens cannot all have their own between 0 and 2"),
    *((1, lambda comm, given=given: shard_positions(*given), words) for given, words in [
        ((-1, 0, 1), "n must be at least 0, was -1"), ((4, 0, 0), "size must be at least 1, was 0"), ((4.0, 0, 1), "n must be an integer"),
        ((4, 2, 2), "rank must be less than size, 2, was 2"), ((4, -1, 2), "rank must be at least 0, was -1"), ((4, 0, 1, "zig"), "scheme must be one of"),
    ]),
])  # fmt: skip
def test_what_every_rank_refuses(mpi, size, body, words):
    for error in on_ranks(size, body)[0]:
        assert isinstance(error, ValueError | TypeError) and words in str(error) and len(str(error)) < 4200, error


def test_a_rank_whose_arguments_are_wrong(mpi):
    first, second, third = on_ranks(3, ring(lambda own: own[:-1] if own[0] == 4 else own))[0]
    assert isinstance(second, ValueError) and isinstance(first, RuntimeError) and isinstance(third, RuntimeError)
    assert str(first) == str(third) == f"rank 1 of 3 failed: ValueError: {second}"


def test_ranks_that_end_together(mpi, capsys):
    def body(comm, error=None):
        with parallel.fail_together(comm):
            if comm.rank == 1 and error is not None:
                raise error
        return "ended"

    assert on_ranks(2, body)[0] == ["ended", "ended"]
    for error, code in ((LookupError("where"), 1), (SystemExit(5), 5), (SystemExit("words"), 1)):
        _, aborted = on_ranks(2, lambda comm, error=error: body(comm, error) if comm.rank == 1 else None)[0]
        assert isinstance(aborted, Aborted) and aborted.args == (code,)
    assert "rank 1 of 2 failed:\nTraceback" in capsys.readouterr().err
    left = on_ranks(2, lambda comm: body(comm, SystemExit(0)))[0]
    assert left[0] == "ended" and isinstance(left[1], SystemExit) and not left[1].code
    with pytest.raises(TypeError, match="comm must be a communicator, such as"), parallel.fail_together(None):
        raise AssertionError("it must not begin")


# ── Programs under mpiexec ───────────────────────────────────────────────────────────────────────────────────────────

PATH = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
MPIEXEC = shutil.which("mpiexec", path=PATH) if importlib.util.find_spec("mpi4py") else None
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no MPI here: pip install mpi4py mpich")
LIMIT = 420  # seconds: far beyond what any of these programs takes, so that only one that hangs meets it


def run(ranks, program, *arguments):
    """Exit code and output of a program on some ranks. One that hangs is ended and fails the test."""
    around = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        [MPIEXEC, "-n", str(ranks), sys.executable, str(program), *map(str, arguments)], env=os.environ | around,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{program} did not end: {process.communicate()[0].decode(errors='replace')[-2000:]}")
    return process.returncode, output.decode("utf-8", "replace")


@needs_mpi
def test_any_number_of_ranks_equals_one_process():
    code, output = run(8, ROOT / "tests/mpi/program.py")
    assert code == 0 and all(f"rank {rank} is right" in output for rank in range(8)), output[-6000:]


OVERFLOW = "ValueError: scores must not exceed float32, 3.4e+38: queries reach 1e+20"
LEAVES = ["all ranks must make the same call: rank 0 made ring_attention(", "rank 1 fail_together(its end)"]


@needs_mpi
@pytest.mark.parametrize("kind, code, says", [
    ("exception", 1, ["rank 1 of 3 failed:\n", "LookupError: no such file on this machine"]),
    ("exit", 5, ["rank 1 of 3 failed:\n", "SystemExit: 5"]),
    ("inside", 1, ["rank 1 of 3 failed:\n", "MemoryError: no room for the second shard"]),
    ("denominator", 1, ["rank 1 of 2 failed:\n", "ValueError: denominators must be finite and nonzero"]),
    ("overflow", 1, ["rank 1 of 3 failed:\n", OVERFLOW]), ("leaves", 1, LEAVES), ("leaves early", 1, LEAVES[1:]),
    ("dtype", 1, ["rank 0 made ring_attention(q float32", "rank 1 ring_attention(q float64"]),
    ("killed", 9, []), ("nothing", 0, []),
])  # fmt: skip
def test_a_rank_that_fails_or_leaves_ends_all(kind, code, says):
    ended, output = run(3, ROOT / "tests/mpi/failing.py", kind)
    assert ended == code, output
    assert all(words in output for words in says), output
