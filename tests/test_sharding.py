"""check_sharding: right splits of every kind pass, every known mistake is named, and what cannot be judged is said."""

import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pyrope.oracle.mistakes import SHARDING
from pyrope.oracle.report import Mismatch, NotJudged
from pyrope.oracle.sharding import assert_sharding, check_sharding, finding


def chunks(n, count):
    """Positions of count chunks whose first n % count have one token more."""
    return np.array_split(np.arange(n), count)


def zigzag(n, rank, size):
    return np.concatenate((chunks(n, 2 * size)[rank], chunks(n, 2 * size)[2 * size - 1 - rank]))


def even_only(n, rank, size):
    if n % (2 * size):
        raise ValueError("the length must be a multiple of twice the ranks")
    return zigzag(n, rank, size)


def last_takes_the_rest(n, rank, size):
    return range(rank * (n // size), n if rank == size - 1 else (rank + 1) * (n // size))


def padded(n, rank, size):
    length = -(-n // size)
    return range(rank * length, (rank + 1) * length)


RIGHT = [
    zigzag, even_only, last_takes_the_rest, lambda n, rank, size: chunks(n, size)[rank].astype(np.int32)[None],
    lambda n, rank, size: list(range(rank, n, size))[::-1], lambda n, rank, size: np.stack([zigzag(n, rank, size)] * 3),
]  # fmt: skip
WRONG = {
    "positions local to the rank": [lambda n, r, s: range(len(chunks(n, s)[r])), lambda n, r, s: range(n // s)],
    "first chunk repeated": [lambda n, r, s: chunks(n, 2 * s)[r].tolist() * 2],
    "rank ignored": [lambda n, r, s: range(0, n, s), lambda n, r, s: range(n)],
    "positions beyond the sequence": [
        lambda n, r, s: chunks(n, s)[r] + 1, padded, lambda n, r, s: padded(-(-n // 128) * 128, r, s),
        lambda n, r, s: [m if m < n else -1 for m in padded(n, r, s)],
    ],
    "positions held twice": [
        lambda n, r, s: range(n * r // s, min(n * (r + 1) // s + 1, n)),
        lambda n, r, s: [min(m, n - 1) for m in padded(n, r, s)],
    ],
    "positions lost": [
        lambda n, r, s: range(r * (n // s), (r + 1) * (n // s)), lambda n, r, s: zigzag(n - n % (2 * s), r, s),
        lambda n, r, s: range(n * r // s, n * (r + 1) // s - (r < s - 1)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("fn", RIGHT)
def test_right_splits_pass(fn):
    report = check_sharding(fn)
    assert report.verdict == "right" and report.tried.startswith(f"{4 if fn is even_only else 9} splits")
    assert_sharding(fn)


@pytest.mark.parametrize("name, fn", [(name, one) for name, several in WRONG.items() for one in several])
def test_every_mistake_is_named(name, fn):
    with pytest.raises(Mismatch) as raised:
        assert_sharding(fn)
    assert raised.value.report.faults == (name,), str(raised.value)


@pytest.mark.parametrize("n, shards, name", [
    (8, "012345 34567", "positions held twice"), (8, "012 4567", "positions lost"), (8, "012", "positions lost"),
    (4, "01 ", "positions lost"), (4, "0101", "positions held twice"), (8, "25 52", "rank ignored"),
    (2, "01 01", "rank ignored"), (4, "12  12", "positions held twice"), (0, "5", "positions beyond the sequence"),
])  # fmt: skip
def test_what_positions_show_by_hand(n, shards, name):
    assert finding(n, [[int(m) for m in shard] for shard in shards.split(" ")]).fault == name


def test_the_names_are_those_of_the_table():
    assert SHARDING.keys() == WRONG.keys()


@given(st.integers(0, 40), st.integers(1, 6), st.data())
def test_any_partition_is_right_and_any_change_of_it_is_not(n, size, data):
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=size - 1, max_size=size - 1)))
    shards = [order[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    assert finding(n, shards) is None
    if n:
        shard = next(shard for shard in shards if shard)
        shard[0] = data.draw(st.integers(-3, n + 3).filter(lambda m: m != shard[0]))
        assert finding(n, shards) is not None


def test_what_a_report_says():
    found = check_sharding(WRONG["positions lost"][0]).findings[0]
    assert found.fact == "50 tokens on 3 ranks: positions lost: 48, 49"
    assert found.where == "rank 1 holds 16, 17, 18, 19, 20, 21, 22, 23, … (16 of them)"
    # 64 tokens on 4 ranks, 2080 scores, the mean 520: the last of contiguous ranks has 904.
    (balance,) = check_sharding(last_takes_the_rest).notes
    assert balance.endswith("with 64 tokens, the busiest of 4 ranks has 1.74 times the mean work")
    assert check_sharding(even_only).tried.endswith(
        "32 on 1; refused, which is no mistake: 50 on 3, 51 on 4, 33 on 2, 7 on 3, 3 on 4"
    )
    with pytest.raises(KeyboardInterrupt):
        check_sharding(interrupted)


def interrupted(n, rank, size):
    raise KeyboardInterrupt


def refuses_48(n, rank, size):
    assert n != 48
    return range(rank, n, size)


@pytest.mark.parametrize("fn, reason", [
    (lambda n, r, s: [m / 2 for m in range(n)], "TypeError: positions must be integers"),
    (lambda n, r, s: None, "TypeError: positions must be integers"),
    (lambda n, r, s: np.arange(2 * n).reshape(2, n), "TypeError: positions must be (n,), or the same in each row"),
    (lambda n, r, s: 1 // 0, "ZeroDivisionError"), (lambda n, r: [], "TypeError"),
    (lambda n, r, s: sys.exit(0), "SystemExit: 0"), (refuses_48, "AssertionError"),
])  # fmt: skip
def test_what_cannot_be_judged(fn, reason):
    report = check_sharding(fn)
    assert report.verdict == "not judged" and report.failure.reason.startswith(reason)
    assert report.failure.received == ("n=48, rank=0, size=3" if fn is refuses_48 else "n=64, rank=0, size=4")
    with pytest.raises(NotJudged):
        assert_sharding(fn)
