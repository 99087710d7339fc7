"""Every core: pieces of an array on several threads, with the same bits and the same errors as on one."""

import gc
import os
import subprocess
import sys
import threading
import types
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from models import PLAIN
from strategies import DTYPES

import pyrope
from pyrope import Rope, layers, linear, phase, rotation, softmax, tiles

SECONDS = 60  # no test takes so long, unless threads wait for each other


class Blas:
    """In the place of threadpoolctl: how many threads a product would have."""

    threads = 7

    @contextmanager
    def limit(self, limits):
        assert self.threads == 7, "limited once"
        self.threads = limits
        yield
        self.threads = 7


@contextmanager
def threads(count, blas=True):
    """So many threads, also where there are fewer cores, and for products too, as where threadpoolctl is installed."""
    with pytest.MonkeyPatch.context() as patch:
        control = Blas() if blas else None
        patch.setattr(tiles, "threads", lambda: count)
        patch.setattr(tiles, "_blas", lambda: control)
        yield control


# --- tiles ---


@example((2, 9, 3), 6)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple), st.integers(1, 40))
def test_tiles_cover_every_element_once_and_keep_the_limit(shape, limit):
    counted = np.zeros(shape, int)
    for index in tiles.tiles(shape, limit):
        assert counted[index].size <= max(limit, shape[-1])
        counted[index] += 1
    assert (counted == 1).all()


def test_an_axis_of_length_one_stands_for_any():
    x = np.arange(12).reshape(3, 1, 4)
    assert (tiles.tile_of(x, (2, slice(5, 9))) == x[2]).all()
    assert (tiles.tile_of(x, (slice(0, 2), 7)) == x[:2, 0]).all()
    assert [(s.start, s.stop) for s in tiles.cuts(7, 3)] == [(0, 3), (3, 6), (6, 7)]


# --- how many ---


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " 2", "²", "00", "10000"])
def test_a_number_of_threads_that_is_none(monkeypatch, value):
    monkeypatch.setenv("PYROPE_THREADS", value)
    with pytest.raises(ValueError, match="PYROPE_THREADS must be an integer from 1 to 9999, was"):
        pyrope.cos_sin(range(5000), Rope(128, 10000.0, "half"))
    pyrope.cos_sin([0], Rope(128, 10000.0, "half"))  # one piece needs no thread


def test_as_many_threads_as_cores_and_never_more(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    for value, count in (("", 3), ("1", 1), ("2", 2), ("3", 3), ("4", 3), ("9999", 3)):
        monkeypatch.setenv("PYROPE_THREADS", value)
        assert tiles.threads() == count
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert tiles.threads() == 1


def test_products_of_an_unknown_library_are_left_to_it(monkeypatch):
    control = types.SimpleNamespace(select=lambda user_api: control, lib_controllers=[])
    monkeypatch.setattr(tiles, "import_module", lambda _: types.SimpleNamespace(ThreadpoolController=lambda: control))
    assert tiles._blas.__wrapped__() is None
    control.lib_controllers = ["one"]
    assert tiles._blas.__wrapped__() is control


# --- pieces ---


@given(st.integers(0, 40), st.integers(1, 6), st.booleans(), st.booleans(), st.booleans())
def test_every_piece_is_worked_on_once(count, most, spread, products, blas):
    done, names, limited = [], set(), set()

    def work(piece):
        names.add(threading.get_ident())
        limited.add(control.threads if control else None)
        with pytest.raises(ZeroDivisionError):  # a call from a piece works in order, in its thread
            tiles.each(lambda x: done.append((piece, threading.get_ident())) or 1 / (x - 1), range(2))

    with threads(most, blas) as control:
        tiles.each(work, range(count), spread=spread, products=products)
    assert sorted(piece for piece, _ in done) == sorted([*range(count)] * 2)
    assert len(names) <= most and (spread and count > 1 or names <= {threading.get_ident()})
    if products and not blas:
        assert names <= {threading.get_ident()}
    assert not blas or limited <= ({1} if spread and products and count > 1 else {7})


def test_pieces_are_worked_on_at_the_same_time_with_the_callers_errstate():
    meeting = threading.Barrier(3)

    def work(piece):
        meeting.wait(SECONDS)
        np.array([1.0]) / piece  # 1/0 warns, but for the caller's errstate

    with threads(3), np.errstate(divide="ignore"):
        tiles.each(work, [0, 0, 0])


def test_threads_keep_apart_and_the_caller_gets_its_cores_back():
    if not hasattr(os, "sched_setaffinity") or len(before := os.sched_getaffinity(0)) < 2:
        pytest.skip("one core, or a system that does not say on which a thread is")
    meeting, cores = threading.Barrier(2), {}

    def work(fails):
        meeting.wait(SECONDS)
        cores[threading.get_ident()] = os.sched_getaffinity(0)
        assert not fails

    with threads(2):
        tiles.each(work, [False, False])  # starts a thread, if there is none
        cores.clear()
        with pytest.raises(AssertionError):
            tiles.each(work, [True, True])
    own, other = cores.pop(threading.get_ident()), *cores.values()
    assert len(own) == 1 and other == before - own and os.sched_getaffinity(0) == before


@given(st.integers(2, 20), st.sets(st.integers(0, 19), min_size=1), st.integers(1, 4))
def test_the_error_of_the_first_piece_that_fails(count, failing, most):
    first, done = min(failing), []

    def work(piece):
        done.append(piece)
        if piece in failing:
            raise ValueError(f"piece {piece}")

    with threads(most):
        if first < count:
            with pytest.raises(ValueError, match=f"piece {first}$"):
                tiles.each(work, range(count))
            assert len(done) <= first + 2 * most  # what comes after is left out
        assert not tiles._shared(os.getpid())[0].locked()


def test_an_interrupt_is_never_hidden_by_an_error_and_arrays_are_freed():
    meeting = threading.Barrier(2)

    def call(*errors):
        array = np.ones(9)

        def work(piece):
            meeting.wait(SECONDS)
            raise errors[piece](f"{piece} {array.size}")

        with pytest.raises(errors[-1]):
            tiles.each(work, range(2))
        return weakref.ref(array)

    gc.disable()  # which would find it, some time
    try:
        with threads(2):
            assert call(ValueError, KeyboardInterrupt)() is None
            assert call(ValueError, ValueError)() is None
    finally:
        gc.enable()


def test_without_new_threads_the_caller_does_it_all(monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    tiles._shared.cache_clear()
    done = []
    with threads(4):
        tiles.each(done.append, range(9))
    tiles._shared.cache_clear()
    assert done == list(range(9))


PROGRAM = """
import atexit, os, numpy as np, pyrope
from pyrope import tiles
tiles.threads = lambda: 2
rope, m = pyrope.Rope(128, 10000.0, "half"), np.arange(5000)
expected = pyrope.cos_sin(m, rope)[0]
atexit.register(lambda: print("end", (pyrope.cos_sin(m, rope)[0] == expected).all()))
if hasattr(os, "fork"):
    tiles._shared(os.getpid())[0].acquire()  # as if another thread were at work
    child = os.fork()
    if not child:
        os._exit(not (pyrope.cos_sin(m, rope)[0] == expected).all() or len(tiles._shared(os.getpid())[1]._threads) != 1)
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.filterwarnings("ignore")
def test_a_child_process_and_the_end_of_a_program():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=SECONDS
    )
    assert (run.stdout, run.stderr) == ("0\nend True\n" if hasattr(os, "fork") else "end True\n", "")


# --- the same bits ---


def results():
    """What every function returns whose work is spread, in every dtype."""
    rng, m, rope = np.random.default_rng(0), np.arange(23), Rope(6, 10000.0, "half")
    for dtype in DTYPES.values():
        q, k, v = (rng.standard_normal((2, h, 23, 6)).astype(dtype) for h in (6, 3, 3))
        by_row, by_head = rng.integers(0, 50, (2, 23)), rng.integers(0, 50, (2, 3, 23))
        for layout in ("interleaved", "half", "interleaved-to-half"):
            part, x = Rope(6, 10000.0, layout, 4), q.copy()
            yield pyrope.rotate(q.swapaxes(0, 1), m, part)
            yield pyrope.rotate(x, by_row, part, out=x)
        yield from pyrope.cos_sin(rng.integers(-(2**31), 2**31, (3, 37)), rope, dtype)
        for options in ({}, {"causal": True}, {"window": 5}, {"softcap": 2.0}, {"mask": rng.random((23, 23)) < 0.7}):
            yield pyrope.attention(q, k, v, **options)
        yield pyrope.attention(q, k, v, causal=True, q_positions=by_row)  # other keys in each row
        for causal, at in ((True, m), (False, m), (True, by_row)):
            yield pyrope.linear_attention(q, k, v, at, rope, causal=causal)
        yield pyrope.linear_attention(k, k, v, by_head, rope, causal=True)
    yield pyrope.forward(pyrope.random_model(PLAIN, seed=0), rng.integers(0, PLAIN.vocabulary, (2, 17)))


@pytest.mark.parametrize("blas", [True, False])
def test_the_same_bits_whatever_the_number_of_threads(blas, monkeypatch):
    def bits():
        return [array.tobytes() for array in results()]

    for module in (rotation, phase):
        monkeypatch.setattr(module, "_TILE", 64)
    for name, size in (("linear._SMALL", 64), ("linear._STRETCH", 2), ("linear._CHUNK", 5), ("softmax._SCORES", 64)):
        monkeypatch.setattr(f"pyrope.{name}", size)
    for module in (softmax, layers):
        monkeypatch.setattr(module, "_ROWS", 4)
    with threads(1, blas):
        one = bits()
    for count in (2, 5):
        with threads(count, blas):
            assert bits() == one

    def backwards(work, todo, pool, helpers):  # no piece reads what another one writes: whichever comes first
        for piece in reversed(todo):
            work(piece)

    monkeypatch.setattr(tiles, "_spread", backwards)
    with threads(2, blas):
        assert bits() == one


def test_arrays_on_the_device_and_functions_of_the_caller_are_not_spread(xp, monkeypatch):
    def no(*_):
        raise AssertionError("spread")

    x = pyrope.from_numpy(np.random.default_rng(0).standard_normal((2, 70, 8)).astype(np.float32), xp)
    for module, limit in ((rotation, "_TILE"), (linear, "_SMALL"), (softmax, "_DEVICE")):
        monkeypatch.setattr(module, limit, 16)
    if xp is not np:
        monkeypatch.setattr(tiles, "_spread", no)
    with threads(2):
        tables = pyrope.rotation_tables(range(70), Rope(8, 10000.0, "half"), like=x)
        pyrope.rotate(x, tables.positions, tables.rope, tables=tables)
        pyrope.attention(x, x, x, causal=True)
        monkeypatch.setattr(tiles, "_spread", no)
        pyrope.linear_attention(x, x, x, causal=True, feature_map=lambda x: x**2 + 1)
