"""check_sharding: right splits of every kind pass, every known mistake is named, and what cannot be judged is said."""

import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

import pyrope
from pyrope import NotJudged, assert_sharding, check_sharding
from pyrope.oracle import sharding
from pyrope.parallel import SCHEMES, shard_positions


def chunks(n, count):
    """Positions of count chunks whose first n % count have one token more: another remainder than pyrope's."""
    return np.array_split(np.arange(n), count)


def zigzag(n, rank, size):
    parts = chunks(n, 2 * size)
    return np.concatenate((parts[rank], parts[2 * size - 1 - rank]))


def even_only(n, rank, size):
    if n % (2 * size):
        raise ValueError("the length must be a multiple of twice the ranks")
    return zigzag(n, rank, size)


def last_takes_the_rest(n, rank, size):
    return range(rank * (n // size), n if rank == size - 1 else (rank + 1) * (n // size))


def first_chunk_repeated(n, rank, size):
    part = chunks(n, 2 * size)[rank].tolist()
    return part * 2


def shared_ends(n, rank, size):
    return range(n * rank // size, min(n * (rank + 1) // size + 1, n))


def lost_ends(n, rank, size):
    return range(n * rank // size, n * (rank + 1) // size - (rank < size - 1))


def padded(n, rank, size):
    length = -(-n // size)
    return range(rank * length, (rank + 1) * length)


RIGHT = {
    **{scheme: lambda n, rank, size, scheme=scheme: shard_positions(n, rank, size, scheme) for scheme in SCHEMES},
    "zigzag, another remainder": zigzag,
    "the last takes the rest": last_takes_the_rest,
    "refuses a remainder": even_only,
    "backwards": lambda n, rank, size: list(range(rank, n, size))[::-1],
    "rows of a batch": lambda n, rank, size: np.stack([zigzag(n, rank, size)] * 3),
    "int32 rows": lambda n, rank, size: chunks(n, size)[rank].astype(np.int32)[None],
}
WRONG = {
    "positions local to the rank": [
        lambda n, rank, size: range(len(chunks(n, size)[rank])),
        lambda n, rank, size: range(n // size),
    ],
    "first chunk repeated": [first_chunk_repeated],
    "positions one too high": [lambda n, rank, size: chunks(n, size)[rank] + 1, lambda n, rank, size: zigzag(n, rank, size) + 1],
    "off by one at the seams": [
        shared_ends,
        lost_ends,
        lambda n, rank, size: range(n * rank // size, n * (rank + 1) // size + 1),
        lambda n, rank, size: range(rank * -(-n // size), min((rank + 1) * -(-n // size), n - 1)),
    ],
    "padding counted": [
        padded,
        lambda n, rank, size: [min(m, n - 1) for m in padded(n, rank, size)],
        lambda n, rank, size: [m if m < n else 0 for m in padded(n, rank, size)],
        lambda n, rank, size: [m if m < n else -1 for m in padded(n, rank, size)],
        lambda n, rank, size: padded(-(-n // 128) * 128, rank, size),
    ],
    "rank counted from 1": [lambda n, rank, size: last_takes_the_rest(n, rank + 1, size), lambda n, rank, size: range((rank + 1) * (n // size), (rank + 2) * (n // size))],
    "rank ignored": [lambda n, rank, size: range(0, n, size), lambda n, rank, size: np.arange(n // size) * size],
    "remainder lost": [
        lambda n, rank, size: range(rank * (n // size), (rank + 1) * (n // size)),
        lambda n, rank, size: zigzag(n - n % (2 * size), rank, size),
    ],
    "not split": [lambda n, rank, size: range(n)],
    "unexplained": [lambda n, rank, size: [(7 * m) % (n + 5) for m in range(rank, n, size)]],
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_splits_pass(name):
    report = check_sharding(RIGHT[name])
    assert report.verdict == "right" and not report.faults, str(report)
    assert_sharding(RIGHT[name])


@pytest.mark.parametrize("name, candidate", [(name, one) for name, all_of in WRONG.items() for one in all_of])
def test_every_mistake_is_named(name, candidate):
    report = check_sharding(candidate)
    assert report.verdict == "wrong" and report.faults == (name,), str(report)
    assert name in str(report) and "tokens on" in report.findings[0].evidence
    with pytest.raises(pyrope.Mismatch, match=name):
        assert_sharding(candidate)


def test_the_catalogue_is_tested():
    assert {fault.name for fault in sharding.FAULTS} | {"unexplained"} == WRONG.keys()


def test_the_evidence_by_hand():
    # 33 tokens on 2 ranks, 16 each: position 32 is the first that is lost.
    finding = check_sharding(lambda n, rank, size: range(rank * (n // size), (rank + 1) * (n // size))).findings[0]
    assert finding.evidence.startswith("50 tokens on 3 ranks: missing: 48, 49; rank 1 holds 16, 17, 18")


@pytest.mark.parametrize("scheme, share", [("contiguous", "1.74"), ("zigzag", "1.00"), ("striped", "1.05")])
def test_the_balance_under_a_causal_mask(scheme, share):
    # 64 tokens on 4 ranks, 2080 scores, the mean 520: contiguous 904, zigzag 520, striped 544.
    note = check_sharding(RIGHT[scheme]).notes[0]
    assert note.endswith(f"with 64 tokens, the busiest of 4 ranks has {share} times the mean work")


def test_what_is_refused_is_noted():
    assert "refused, which is no mistake: 50 tokens on 3 ranks" in check_sharding(even_only).notes[-1]


@given(st.integers(0, 40), st.integers(1, 6), st.data())
def test_any_partition_is_right_and_any_change_of_it_is_not(n, size, data):
    order = data.draw(st.permutations(range(n)))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=size - 1, max_size=size - 1)))
    shards = [order[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    assert sharding._fault(n, shards) is None
    if n:
        wrong = [list(shard) for shard in shards]
        shard = next(shard for shard in wrong if shard)
        shard[0] = data.draw(st.integers(-3, n + 3).filter(lambda m: m != shard[0]))
        assert sharding._fault(n, wrong) is not None


class Unprintable(Exception):
    def __str__(self):
        return 1 // 0


def unprintable(n, rank, size):
    raise Unprintable


@pytest.mark.parametrize(
    "candidate, reason",
    [
        (lambda n, rank, size: [m / 2 for m in range(n)], "TypeError: positions must be integers"),
        (lambda n, rank, size: None, "TypeError: positions must be integers"),
        (lambda n, rank, size: 1 // 0, "ZeroDivisionError"),
        (
            lambda n, rank, size: np.arange(2 * n).reshape(2, n),
            "TypeError: positions must be (n,), or the same in each",
        ),
        (lambda n, rank, size: slice(0, n), "TypeError: positions must be integers, were slice"),
        (lambda n, rank: [], "TypeError"),
        (lambda n, rank, size: sys.exit(0), "SystemExit: 0"),
        (unprintable, "Unprintable: a message that cannot be printed: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_judged(candidate, reason):
    report = check_sharding(candidate)
    assert report.verdict == "not judged" and report.failure.reason.startswith(reason)
    fix = "return the positions" if reason.startswith("TypeError: ") else "mend what the function raises"
    assert report.failure.fix.startswith(fix)
    with pytest.raises(NotJudged):
        assert_sharding(candidate)


def test_ctrl_c_is_no_failure_of_the_function():
    def interrupted(n, rank, size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_sharding(interrupted)


def test_a_function_is_needed():
    with pytest.raises(TypeError, match="fn must be a function of n, rank and size, was int"):
        check_sharding(3)


@pytest.mark.parametrize("n, shards, fault", [
    (8, ["0123", "45678"], sharding.SEAMS),  # the end of the last chunk is a seam, too
    (8, ["0123", "456"], sharding.SEAMS),
    (7, ["0123", "4567"], sharding.PADDING),
    (7, ["012", "345"], sharding.REMAINDER),
    (8, ["01234", "34567"], sharding.SEAMS),  # two in common: one is the first of its chunk, the other the last
    (8, ["012345", "34567"], sharding.UNEXPLAINED),  # of three in common, one is within both chunks
    (8, ["0123", "3", "3456", "7"], sharding.UNEXPLAINED),  # three times
    (8, ["012", "567"], sharding.UNEXPLAINED),  # a gap of two, which is no remainder
    (8, ["012", "4567"], sharding.SEAMS),
    (8, ["0101", "2323"], sharding.REPEATED),
    (8, ["0", "0"], sharding.LOCAL),
    (8, ["25", "52"], sharding.NO_RANK),
    (8, ["", ""], sharding.UNEXPLAINED),
    (8, ["", "01234567"], None),
    (8, ["0123567"], sharding.SEAMS),  # one rank cannot be ignored
    (6, ["123", "456"], sharding.HIGH),
    (6, ["345", "678"], sharding.FROM_ONE),
    (9, ["012", "34"], sharding.UNEXPLAINED),  # four are lost, twice as many as there are ranks
    (9, ["012", "345"], sharding.REMAINDER),
])  # fmt: skip
def test_what_is_wrong_with_shards(n, shards, fault):
    assert sharding._fault(n, [[int(m) for m in shard] for shard in shards]) is fault


def test_what_is_said_of_shards():
    said = sharding._evidence(9, [[0, 1, 2], [], [2, 3, 9, -1]])
    lost = "missing: 4, 5, 6, 7, 8; held more than once: 2; outside: -1, 9"
    assert said == f"9 tokens on 3 ranks: {lost}; rank 2 holds 2, 3, 9, -1"
    assert sharding._evidence(2, [[0], []]) == "2 tokens on 2 ranks: missing: 1; rank 0 holds 0"
    assert sharding._few([*range(8)]) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert sharding._few([*range(9)]) == "0, 1, 2, 3, 4, 5, 6, 7, … (9 of them)"


def test_lengths_that_divide_evenly_must_be_taken():
    def refuses(n, rank, size):
        if n == 48:
            raise ValueError("48")
        return range(rank, n, size)

    report = check_sharding(refuses)
    assert report.verdict == "not judged" and report.failure.received == "n=48, rank=0, size=3"


def test_positions_of_a_shard():
    assert (
        sharding._row(np.array(5)) == [5]
        and sharding._row(np.empty(0, int)) == sharding._row(np.empty((2, 0), int)) == []
    )
    assert sharding._row(np.array([[3, 1], [3, 1]])) == [3, 1]
