"""What the ranks of `pyrope.parallel` compute and send, with threads for ranks: in any number, without MPI."""

import math
from dataclasses import replace

import numpy as np
import pytest
import references
from models import PLAIN
from threads_mpi import Aborted, installed, on_ranks

import pyrope
from pyrope import Rope, parallel, softmax
from pyrope.parallel import SCHEMES, forward, gather, parallel_linear_attention, ring_attention, shard_positions

RNG = np.random.default_rng(0)
N = 13
Q, K, V = (RNG.standard_normal((2, h, N, d)) for h, d in ((4, 3), (2, 3), (2, 5)))


@pytest.fixture(autouse=True)
def mpi(monkeypatch):
    return installed(monkeypatch)


def whole(q, k, v, **options):
    """Eq. (2), by the definition."""
    return references.attention(q, k, v, **options)[0]


def of(comm, scheme, *arrays):
    own = shard_positions(arrays[0].shape[-2], comm.rank, comm.Get_size(), scheme)
    return own, *(x[..., own, :].copy() for x in arrays)


OPTIONS = [{}, {"causal": True, "window": 3}, {"window": 4}, {"causal": True, "softcap": 0.7, "scale": 2.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tiles", [None, (4, 3, 8)])
def test_a_ring_equals_the_whole(options, size, tiles, monkeypatch):
    for name, value in zip(("_ROWS", "_FINE", "_SCORES"), tiles or (), strict=False):
        monkeypatch.setattr(softmax, name, value)
    expected = whole(Q, K, V, **options)
    for scheme in SCHEMES:

        def body(comm, scheme=scheme):
            own, *shard = of(comm, scheme, Q, K, V)
            return own, ring_attention(comm, *shard, own + 1000, **options)

        results, sent = on_ranks(size, body)
        for own, out in results:
            np.testing.assert_allclose(out, expected[:, :, own], atol=1e-13)
        # Each rank sends the shards of all others but of one: keys and values of 8 features, and positions.
        held = [len(shard_positions(N, rank, size, scheme)) * (2 * 2 * 8 + 1) * 8 for rank in range(size)]
        assert sent == [sum(held) - held[(rank + 1) % size] if size > 1 else 0 for rank in range(size)]


def test_more_ranks_than_tokens_and_smaller_dtypes():
    q, k, v = (x[:, :, :2].astype(np.float16) for x in (Q, K, V))

    def body(comm):
        own, *shard = of(comm, "contiguous", q, k, v)
        return own, ring_attention(comm, *shard, own, causal=True)

    expected = whole(*(x.astype(float) for x in (q, k, v)), causal=True)
    results, _ = on_ranks(3, body)
    assert [out.shape[-2] for _, out in results] == [0, 1, 1]
    for own, out in results:
        assert out.dtype == np.float16
        np.testing.assert_allclose(out, expected[:, :, own], atol=2e-3)
    nobody = on_ranks(2, lambda comm: ring_attention(comm, Q[:, :, :0], K[:, :, :0], V[:, :, :0], []).shape)[0]
    assert nobody == [(2, 4, 0, 5)] * 2


def test_scores_that_overflow():
    def body(comm, sign):
        own, *shard = of(comm, "contiguous", *(x.astype(np.float32) for x in (sign * K * 1e20, K * 1e20, V)))
        return ring_attention(comm, *shard, own, window=1)  # each sees itself: −inf alone would pass for nothing

    for sign in (1, -1):
        (error,) = on_ranks(1, lambda comm, sign=sign: body(comm, sign))[0]
        assert isinstance(error, ValueError) and "scores must not exceed float32" in str(error)


def test_positions_of_a_ring():
    def at(positions):
        return on_ranks(1, lambda comm: ring_attention(comm, Q, K, V, positions))[0][0]

    assert "positions must be (n,), one for each token of this rank, had shape (1, 13)" in str(at(np.arange(N)[None]))

    def local(comm):
        own, *shard = of(comm, "contiguous", Q, K, V)
        return ring_attention(comm, *shard, np.arange(len(own)))

    for error in on_ranks(2, local)[0]:
        assert isinstance(error, ValueError) and "13 tokens cannot all have their own between 0 and 6" in str(error)


# --- Linear attention ---

ROPE = Rope(4, 100.0, "half")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rope", [None, ROPE])
def test_linear_attention_equals_the_whole(causal, size, rope):
    q, k, v = (RNG.standard_normal((2, h, N, d)) for h, d in ((4, 4), (2, 4), (2, 3)))
    at = np.arange(N) * 2
    where = () if rope is None else (at, rope)
    expected = pyrope.linear_attention(q, k, v, *where, causal=causal)

    def body(comm):
        own, *shard = of(comm, "contiguous", q, k, v)
        return own, parallel_linear_attention(comm, *shard, *(() if rope is None else (at[own], rope)), causal=causal)

    for own, out in on_ranks(size, body)[0]:
        np.testing.assert_allclose(out, expected[:, :, own], atol=1e-12)


def test_the_order_of_linear_attention():
    q = RNG.standard_normal((1, N, 4))

    def body(comm, scheme="contiguous", causal=True, reverse=False, shift=0):
        own, shard = of(comm, scheme, q)
        at = (own[::-1] if reverse else own) + shift * comm.rank
        return parallel_linear_attention(comm, shard, shard, shard, at, ROPE, causal=causal)

    falling = on_ranks(1, lambda comm: body(comm, reverse=True))[0][0]
    assert "positions must ascend in causal linear attention, were [12, 11" in str(falling)
    for error in on_ranks(2, lambda comm: body(comm, "striped"))[0]:
        assert "a rank ends at position 12, and the next begins at 1;" in str(error)
    right = [(2, {"scheme": "striped", "causal": False}), (2, {"shift": -1}), (1, {"causal": False, "reverse": True})]
    for size, options in right:  # one position twice, at the seam, is right
        assert all(isinstance(out, np.ndarray) for out in on_ranks(size, lambda comm, o=options: body(comm, **o))[0])


# --- Models ---


@pytest.mark.parametrize("config, scheme", [
    (PLAIN, "zigzag"), (replace(PLAIN, attention="linear"), "contiguous"), (replace(PLAIN, softcap=2.0, causal=False), "striped"),
    (replace(PLAIN, attention="linear", causal=False), "striped"),
])  # fmt: skip
def test_a_model_equals_the_whole(config, scheme):
    model, tokens = pyrope.random_model(config, 1, dtype="float64"), RNG.integers(0, 11, (2, 9))
    for given in (tokens, tokens[0]):
        expected = pyrope.forward(model, given, np.arange(9) + 3)

        def body(comm, given=given):
            logits = forward(model, given, np.arange(9) + 3, comm=comm, scheme=scheme)
            own = shard_positions(9, comm.rank, comm.Get_size(), scheme)
            return own, logits, gather(comm, logits, own, root=1)

        results, _ = on_ranks(3, body)
        for own, logits, _ in results:
            np.testing.assert_allclose(logits, expected[..., own, :], atol=1e-10)
        assert results[0][2] is None and results[2][2] is None
        np.testing.assert_allclose(results[1][2], expected, atol=1e-10)


def test_what_models_are_not_run():
    def on_one(config, **options):
        model = pyrope.random_model(config, 1, dtype="float64")
        return str(on_ranks(1, lambda comm: forward(model, np.arange(4), comm=comm, **options))[0][0])

    assert "ALiBi adds a bias to all n × n scores" in on_one(PLAIN.with_encoding("alibi"))
    assert "scheme must be 'contiguous' for causal linear attention, was 'zigzag'" in on_one(replace(PLAIN, attention="linear"), scheme="zigzag")  # fmt: skip


def test_all_ranks_have_the_same_tokens():
    model = pyrope.random_model(PLAIN, 1, dtype="float64")
    for options in (
        lambda rank: {"tokens": np.arange(4) + rank},
        lambda rank: {"tokens": np.arange(4), "positions": np.arange(4) + rank},
    ):
        for error in on_ranks(2, lambda comm, options=options: forward(model, **options(comm.rank), comm=comm))[0]:
            assert "all ranks must make the same call" in str(error)


# --- Gathering ---


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_shards_are_put_in_order(shape):
    *lead, f = shape
    x = np.arange(math.prod(lead) * N * f, dtype=np.float32).reshape(*lead, N, f)

    def body(comm):
        own = shard_positions(N, comm.rank, 3, "zigzag")
        return gather(comm, x[..., own, :], own, root=2)

    results, _ = on_ranks(3, body)
    assert results[:2] == [None, None] and np.array_equal(results[2], x) and results[2].dtype == np.float32


@pytest.mark.parametrize("arguments, words", [
    ((np.zeros((4, 2)), np.arange(3)), "x must be (…, n, f) and positions (n,), had shapes (4, 2) and (3,)"),
    ((np.zeros(4), np.arange(4)), "x must be (…, n, f) and positions (n,)"),
    ((np.zeros((4, 2)), np.arange(4), 1), "root must be a rank, less than 1, was 1"),
    ((np.zeros((4, 2)), [0, 1, 2, 2]), "4 tokens cannot all have their own between 0 and 2"),
])  # fmt: skip
def test_what_cannot_be_gathered(arguments, words):
    x, at, *root = arguments
    error = on_ranks(1, lambda comm: gather(comm, x, at, **({"root": root[0]} if root else {})))[0][0]
    assert isinstance(error, ValueError) and words in str(error)


# --- Agreement ---


def test_ranks_that_make_different_calls():
    def body(comm):
        own, *shard = of(comm, "contiguous", Q, K, V)
        return ring_attention(comm, *shard, own, causal=comm.rank == 2)

    facts = "ring_attention(q float64 (2, 4, n, 3), k float64 (2, 2, n, 3), v float64 (2, 2, n, 5), causal="
    for error in on_ranks(3, body)[0]:
        assert isinstance(error, ValueError)
        assert f"all ranks must make the same call: rank 0 made {facts}False, window=None" in str(error)
        assert f", rank 2 {facts}True" in str(error)


def test_a_rank_whose_arguments_are_wrong():
    def body(comm):
        own, *shard = of(comm, "contiguous", Q, K, V)
        return ring_attention(comm, *shard, own[:-1] if comm.rank == 1 else own)

    first, second, third = on_ranks(3, body)[0]
    assert isinstance(second, ValueError) and isinstance(first, RuntimeError) and isinstance(third, RuntimeError)
    assert str(first) == str(third) == f"rank 1 of 3 failed: ValueError: {second}"


def test_long_texts_are_cut_and_compared_as_a_whole():
    def check(comm, text):
        return lambda: (comm.rank, text, (7, comm.rank, -1))

    for error in on_ranks(2, lambda comm: parallel._agreed(comm, "f", check(comm, "ä" * 3000 + str(comm.rank))))[0]:
        assert 1900 < len(str(error)) < 2200 and "rank 1 f(ä" in str(error)
    same = on_ranks(2, lambda comm: parallel._agreed(comm, "f", check(comm, "")))[0]
    assert same == [(0, [[7, 0, -1], [7, 1, -1]]), (1, [[7, 0, -1], [7, 1, -1]])]


def test_what_is_no_communicator_is_refused_before_the_program():
    def body(comm):
        with parallel.fail_together(None):
            raise AssertionError("it must not begin")

    (error,) = on_ranks(1, body)[0]
    assert isinstance(error, TypeError) and "comm must be a communicator, such as" in str(error)


def test_ranks_that_end_together(capsys):
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

    def alone(comm):
        with parallel._aborting(comm):
            raise LookupError("where")

    assert isinstance(on_ranks(1, alone)[0][0], LookupError)
