"""Every core: pieces of an array on several threads, with the same bits and the same errors as on one."""

import dataclasses
import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, strategies as st
from models import KINDS
from strategies import DTYPES, layouts

import pyrope
from pyrope import Rope, layers, linear, phase, rotation, softmax, tiles

SECONDS = 60  # no test takes so long, unless threads wait for each other


class Blas:
    """In the place of threadpoolctl: how many threads a product would have."""

    def __init__(self):
        self.threads, self.limits = 7, 0

    def limit(self, limits):
        assert self.threads == 7, "limited once, whoever else needs it"
        self.threads, self.limits = limits, self.limits + 1
        return self

    def restore_original_limits(self):
        self.threads = 7


@contextmanager
def threads(count, blas=True):
    """So many threads, also where there are fewer cores, and for products too, as where threadpoolctl is installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYROPE_THREADS", str(count))
        patch.setattr(tiles, "_cores", lambda: 64)
        control = Blas() if blas else None
        patch.setattr(tiles, "_blas", lambda: control)
        yield control


@contextmanager
def small_tiles(size):
    """Tiles so small that a small array has many; products of all sizes are by tiles of four rows."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (rotation, phase, layers, linear):
            patch.setattr(module, "_TILE" if module is not linear else "_SMALL", size)
        for module in (softmax, layers):
            patch.setattr(module, "_ROWS", 4)
        patch.setattr(softmax, "_SMALL", size)
        patch.setattr(linear, "_STRETCH", 10)
        yield


def disorder(queue, work, spare, count):
    """In the place of threads: every piece once, in a random order, each with memory of its own that holds rubbish."""
    todo = list(queue)
    random.Random(len(todo)).shuffle(todo)
    for _, piece in todo:
        memory = spare()
        for array in (memory, getattr(memory, "scores", None)):
            if isinstance(array, np.ndarray):
                array.view(np.uint8).fill(255)  # NaN, if it holds floats
        work(piece, memory)


# --- how many ---


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", " 2", "2 ", "²", "00", "10000", "9" * 5000])
def test_a_number_of_threads_that_is_none(monkeypatch, value):
    monkeypatch.setenv("PYROPE_THREADS", value)
    rule = "PYROPE_THREADS must be an integer from 1 to 9999, was '.*': set it to a number of threads, or unset it"
    with pytest.raises(ValueError, match=rule):
        tiles.threads()
    with pytest.raises(ValueError, match="PYROPE_THREADS must be"):
        pyrope.cos_sin(Rope(128, 10000.0, "half"), np.arange(5000))


def test_as_many_threads_as_cores_and_never_more(monkeypatch):
    monkeypatch.delenv("PYROPE_THREADS", raising=False)
    assert tiles.threads() == len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    monkeypatch.setattr(tiles, "_cores", lambda: 3)
    for value, count in {"": 3, "1": 1, "2": 2, "3": 3, "4": 3, "9999": 3}.items():
        monkeypatch.setenv("PYROPE_THREADS", value)
        assert tiles.threads() == count


def test_importing_and_small_arrays_start_no_thread():
    code = """
import threading, numpy as np, pyrope
x = np.ones((2, 8, 64), np.float32)
pyrope.rotate(x, np.arange(8), pyrope.Rope(64, 10000.0, "half"))
pyrope.attention(x, x, x)
assert threading.active_count() == 1, threading.enumerate()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS, env=os.environ | {"PYROPE_THREADS": "2"})


# --- every piece, once ---


@given(st.integers(0, 40), st.integers(1, 6), st.booleans(), st.booleans())
def test_every_piece_is_worked_on_once_with_memory_of_its_thread(count, most, products, blas):
    done, memories = [], []

    def work(piece, memory):
        memory.append(threading.get_ident())
        done.append(piece)

    def spare():
        memories.append([])
        return memories[-1]

    with threads(most, blas) as control:
        tiles.each(range(count), work, spare, spread=True, products=products)
    assert sorted(done) == list(range(count)) and 1 <= len(memories) <= max(1, min(most, count))
    assert all(len(set(memory)) <= 1 for memory in memories) and sum(map(len, memories)) == count
    if not blas and products:
        assert done == list(range(count)) and len(memories) == 1, "the products have threads of their own"
    if control:
        assert control.threads == 7 and control.limits == int(products and count > 1)


def test_pieces_are_worked_on_at_the_same_time():
    meeting = threading.Barrier(3)  # nobody passes before three threads are here
    with threads(3):
        tiles.each(range(3), lambda *_: meeting.wait(SECONDS), lambda: None, spread=True)
        tiles.each(range(3), lambda *_: meeting.wait(SECONDS), lambda: None, spread=True, products=True)


def test_products_have_one_thread_each_also_where_pieces_do_not():
    for count in (1, 3):
        with threads(count) as control:
            found = []
            tiles.each(range(5), lambda *_: found.append(control.threads), lambda: None, spread=True, products=True)  # noqa: B023
            assert found == [1] * 5 and control.threads == 7


def test_the_callers_errstate_holds_in_every_thread():
    meeting = threading.Barrier(2)

    def work(*_):
        meeting.wait(SECONDS)
        np.array([1e300]) * 1e300

    with threads(2), np.errstate(over="ignore"):
        tiles.each(range(2), work, lambda: None, spread=True)
    with threads(2), np.errstate(over="raise"), pytest.raises(FloatingPointError):
        tiles.each(range(2), work, lambda: None, spread=True)


# --- errors ---


class Interrupt(BaseException):
    pass


@given(st.integers(2, 20), st.sets(st.integers(0, 19), min_size=1), st.integers(1, 4), st.booleans())
def test_the_error_of_the_first_piece_that_fails(count, failing, most, products):
    failing = {piece for piece in failing if piece < count} or {count - 1}
    done = []

    def work(piece, _):
        if piece in failing:
            raise ValueError(f"piece {piece}")
        done.append(piece)

    with threads(most) as control:
        for _ in range(2):  # and nothing is left behind
            done.clear()
            with pytest.raises(ValueError, match=f"^piece {min(failing)}$"):
                tiles.each(range(count), work, lambda: None, spread=True, products=products)
            assert set(range(min(failing))) <= set(done), "what comes before it is done"
            assert control.threads == 7
        tiles.each(range(count), lambda *_: None, lambda: None, spread=True, products=products)


def test_pieces_after_an_error_are_left_out():
    failed, done = threading.Event(), []

    def work(piece, _):
        if piece == 0:
            failed.set()
            raise ValueError("the first")
        failed.wait(SECONDS)
        time.sleep(0.02)
        done.append(piece)

    with threads(2), pytest.raises(ValueError, match="the first"):
        tiles.each(range(100), work, lambda: None, spread=True)
    assert len(done) < 50


def test_an_interrupt_in_a_piece_is_never_hidden_by_an_error():
    meeting = threading.Barrier(2)

    def work(piece, _):
        meeting.wait(SECONDS)
        raise (ValueError, Interrupt)[piece]

    with threads(2), pytest.raises(Interrupt):
        tiles.each(range(2), work, lambda: None, spread=True)


@pytest.mark.ctrl_c
@pytest.mark.parametrize("piece", [0, 1], ids=["in the piece of the main thread", "while it waits"])
def test_ctrl_c_ends_the_call_and_the_next_one_works(piece):
    code = f"""
import os, signal, threading, time
from pyrope import tiles
tiles._cores = lambda: 2
both, late, done = threading.Barrier(2), threading.Event(), []
def work(piece, _):
    if piece > 1:
        done.append(piece)
        return
    both.wait({SECONDS})
    mine = threading.current_thread() is threading.main_thread()
    if mine == ({piece} == 0):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Timer(0.5, late.set).start()
        late.wait({SECONDS})
        time.sleep(0.2)
    elif not mine:
        late.wait({SECONDS})
try:
    tiles.each(range(2 if {piece} else 50), work, lambda: None, spread=True)
except KeyboardInterrupt:
    late.set()
    tiles.each(range(2, 9), work, lambda: done.clear(), spread=True)
    print(len(done) <= 7, not tiles._state.spreading.locked())
"""
    env = os.environ | {"PYROPE_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, env=env)
    assert (run.stdout, run.stderr, run.returncode) == ("True True\n", "", 0)


def test_no_piece_is_begun_after_ctrl_c_while_threads_are_started(monkeypatch):
    began, ended, done = threading.Event(), threading.Event(), []

    def work(piece, _):
        began.set()
        ended.wait(0.2)  # until the call has ended, which must not be before this piece has
        done.append((piece, ended.is_set()))

    class Pool(tiles.ThreadPoolExecutor):
        def submit(self, *arguments):
            if began.is_set():
                raise KeyboardInterrupt
            helper = super().submit(*arguments)
            assert began.wait(SECONDS)
            return helper

    monkeypatch.setattr(tiles, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(tiles, "_state", tiles._State())
    with threads(3), pytest.raises(KeyboardInterrupt):
        tiles.each(range(100), work, lambda: None, spread=True)
    ended.set()
    tiles._state.pool(2).shutdown()
    assert done == [(0, False)]


def test_an_error_does_not_keep_arrays_in_memory():
    both = threading.Barrier(2)

    def call():
        array = np.ones(9)

        def work(piece, _):
            both.wait(SECONDS)
            raise ValueError(f"{piece} {array.size}")

        with pytest.raises(ValueError, match="^0 9$"):
            tiles.each(range(2), work, lambda: None, spread=True)
        return weakref.ref(array)

    gc.disable()  # which would find it, some time
    try:
        with threads(2):
            assert call()() is None
    finally:
        gc.enable()


def test_without_new_threads_the_caller_does_it_all(monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tiles, "_state", tiles._State())
    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2):
        done = []
        with threads(4):
            tiles.each(range(9), lambda piece, _: done.append(piece), lambda: None, spread=True)  # noqa: B023
        assert done == list(range(9))


def test_at_the_end_of_a_program():
    code = """
import atexit, numpy as np, pyrope
from pyrope import tiles
tiles._cores = lambda: 2
rope = pyrope.Rope(128, 10000.0, "half")
atexit.register(lambda: print(pyrope.cos_sin(rope, np.arange(5000))[0].shape))
pyrope.cos_sin(rope, np.arange(5000))
"""
    env = os.environ | {"PYROPE_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, env=env)
    assert (run.stdout, run.stderr) == ("(5000, 64)\n", "")


# --- calls within calls, and beside them ---


def test_a_call_within_a_piece_is_not_spread():
    inner = {}

    def work(piece, _):
        found = inner[piece] = set()
        tiles.each(range(9), lambda *_: found.add(threading.get_ident()), lambda: None, spread=True, products=True)
        assert found == {threading.get_ident()}

    with threads(3) as control:
        outer = {"spread": True, "products": True}
        caller = threading.Thread(target=tiles.each, args=(range(6), work, list), kwargs=outer, daemon=True)
        caller.start()
        caller.join(SECONDS)
        assert not caller.is_alive(), "it waits for itself"
        assert sorted(inner) == list(range(6)) and (control.threads, control.limits) == (7, 1)


def test_calls_from_many_threads_of_a_program():
    rope, m = Rope(16, 10000.0, "half"), np.arange(40)
    x = np.random.default_rng(0).standard_normal((4, 40, 16))
    with small_tiles(64), threads(1):
        right = pyrope.attention(pyrope.rotate(x, m, rope), x, x).tobytes()
    found, start = [], threading.Barrier(6)

    def call():
        start.wait(SECONDS)
        found.extend(pyrope.attention(pyrope.rotate(x, m, rope), x, x).tobytes() == right for _ in range(5))

    with small_tiles(64), threads(2) as control:
        callers = [threading.Thread(target=call) for _ in range(6)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(SECONDS)
        assert found == [True] * 30 and control.threads == 7
    assert sum(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate()) <= 64


FORK = """
import os, threading, sys, warnings, numpy as np, pyrope
from pyrope import tiles
warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork of a process with threads
tiles._cores = lambda: 2
class Blas:
    threads = 7
    def limit(self, limits):
        limited, before = Blas(), self.threads
        limited.restore_original_limits = lambda: setattr(self, "threads", before)
        self.threads = limits
        return limited
blas = Blas()
tiles._blas = lambda: blas
rope, m = pyrope.Rope(128, 10000.0, "half"), np.arange(3000)
right = pyrope.cos_sin(rope, m)[0].tobytes()
def meet(*_): barrier.wait(20)
def child():
    global barrier
    barrier = threading.Barrier(2)  # passes if two threads work
    tiles.each(range(2), meet, lambda: None, spread=True, products=True)
    return os._exit(0 if pyrope.cos_sin(rope, m)[0].tobytes() == right and blas.threads == 7 else 1)
def fork():
    if not (one := os.fork()):
        child()
    assert os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) == 0
fork()  # after the pool has begun,
began, go = threading.Event(), threading.Event()
def hold(piece, _):
    began.set()
    go.wait(20)
holder = threading.Thread(target=tiles.each, args=(range(4), hold, lambda: None), kwargs={"spread": True, "products": True})
holder.start()
began.wait(20)
assert tiles._state.spreading.locked() and blas.threads == 1
fork()  # and while another thread holds it
assert blas.threads == 1
go.set()
holder.join(20)
assert not tiles._state.spreading.locked() and blas.threads == 7
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_process_has_threads_of_its_own():
    env = os.environ | {"PYROPE_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=SECONDS, env=env)
    assert (run.stdout, run.stderr, run.returncode) == ("done\n", "", 0)


# --- the same bits ---


def _rotations(rng):
    for layout in ("interleaved", "half", "interleaved-to-half"):
        for dtype in DTYPES.values():
            x = rng.standard_normal((2, 3, 11, 12)).astype(dtype)
            rope, m = Rope(12, 10000.0, layout, 8), np.arange(11)
            yield pyrope.rotate(x, m, rope)
            yield pyrope.unrotate(x.swapaxes(0, 1), m, rope)
            yield pyrope.rotate(x, rng.integers(0, 99, (2, 11)), rope, out=x)


def _tables(rng):
    for rope in (Rope(12, 10000.0, "half"), Rope(6, 500.0, "half", scaling=pyrope.YaRN(4.0, 64))):
        for dtype in DTYPES.values():
            yield from pyrope.cos_sin(rope, rng.integers(-(2**31), 2**31, (3, 37)), dtype)


def _softmax(rng):
    for dtype in DTYPES.values():
        q, k, v = (rng.standard_normal((2, h, 23, 6)).astype(dtype) for h in (6, 3, 3))
        for options in ({}, {"causal": True}, {"window": 5}, {"softcap": 2.0}, {"mask": rng.random((23, 23)) < 0.7}):
            yield pyrope.attention(q, k, v, **options)
        yield pyrope.attention(q, k, v, causal=True, q_positions=rng.permutation(23), k_positions=rng.permutation(23))
        yield pyrope.attention(q, k, v, causal=True, q_positions=rng.integers(0, 23, (2, 23)))  # other keys in each row
        yield pyrope.attention(q[:, :, :1], k, v, causal=True)


def _linear(rng):
    rope, m = Rope(6, 10000.0, "half"), np.arange(23)
    for dtype in DTYPES.values():
        q, k, v = (rng.standard_normal((2, h, 23, 6)).astype(dtype) for h in (6, 3, 3))
        for options in (
            {"causal": True, "chunk": 5},
            {"causal": False, "chunk": 4},
            {"causal": True, "form": "recurrent"},
        ):
            yield pyrope.linear_attention(q, k, v, m, rope, **options)
        at = rng.integers(0, 50, (2, 23))
        yield pyrope.linear_attention(q, k, v, at, rope, causal=True, chunk=5)
        yield pyrope.linear_attention(k, k, v, rng.integers(0, 50, (2, 3, 23)), rope, causal=True, chunk=5)
        yield pyrope.linear_attention(q[0, 0], k[0, 0], v[0, 0], m, rope, causal=True, chunk=5)
        state = pyrope.linear_state(k, v, m, rope)
        yield from (state.numerator, state.denominator)


def _layers(rng):
    for dtype in (np.float32, np.float64):
        x, weight = rng.standard_normal((3, 17, 10)).astype(dtype), rng.standard_normal((5, 10)).astype(dtype)
        norm = layers.Norm(weight[0], weight[1])
        yield layers.rms_norm(x, norm, 1e-6)
        yield layers.layer_norm(x.swapaxes(0, 1), norm, 1e-6)
        up, down = (layers.Projection(rng.standard_normal(shape).astype(dtype), None) for shape in ((14, 10), (10, 7)))
        yield layers.project(x, layers.Projection(weight, weight[:, 0]))
        for activation in layers.ACTIVATIONS:
            yield layers.mlp(x, up, down, activation, gated=True)


def _forward(rng):
    for config in KINDS.values():
        config = dataclasses.replace(config, heads=4, key_heads=2)
        yield pyrope.forward(pyrope.random_model(config, seed=1), rng.integers(0, 11, (2, 19)))


CALLS = {"rotate": _rotations, "cos_sin": _tables, "softmax": _softmax, "linear": _linear, "layers": _layers, "forward": _forward}  # fmt: skip


def _bits(name):
    return [array.tobytes() for array in CALLS[name](np.random.default_rng(0))]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [8, 64])
def test_the_same_bits_whatever_the_number_of_threads(name, size, monkeypatch):
    with small_tiles(size):
        with threads(1):
            one = _bits(name)
        for count in (2, 3, 7):
            with threads(count):
                assert _bits(name) == one
        # No piece reads what another writes, or what one left in spare memory: whichever comes first.
        spread = []
        monkeypatch.setattr(tiles, "_spread", lambda *arguments: spread.append(1) or disorder(*arguments))
        with threads(2):
            assert _bits(name) == one and len(spread) >= 4


@pytest.mark.parametrize("name", CALLS)
def test_without_threadpoolctl_too(name):
    with small_tiles(8):
        with threads(1, blas=False):
            one = _bits(name)
        with threads(3, blas=False):
            assert _bits(name) == one


@given(st.data())
def test_the_same_bits_for_any_shape(data):
    g, r, n, pairs = (data.draw(st.integers(1, most)) for most in (4, 3, 12, 3))
    batch, size = data.draw(st.lists(st.integers(1, 3), max_size=2)), data.draw(st.integers(1, 200))
    rope, dtype = Rope(2 * pairs, 10000.0, data.draw(layouts)), DTYPES[data.draw(st.sampled_from(sorted(DTYPES)))]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    q, k, v = (rng.standard_normal((*batch, h, n, 2 * pairs)).astype(dtype) for h in (g * r, g, g))
    m, causal = rng.integers(-99, 99, n), data.draw(st.booleans())

    def results():
        yield pyrope.rotate(q, m, rope)
        yield pyrope.attention(q, k, v, causal=causal)
        yield pyrope.linear_attention(q, k, v, m, rope, causal=causal, chunk=3)
        yield layers.rms_norm(q.astype(np.float32), layers.Norm(np.ones(2 * pairs, np.float32), None), 1e-5)

    with small_tiles(size):
        with threads(1):
            one = [array.tobytes() for array in results()]
        with threads(data.draw(st.integers(2, 5))):
            assert [array.tobytes() for array in results()] == one


BLAS = """
import numpy as np, pyrope, sys
from pyrope import tiles
tiles._cores = lambda: 2
assert tiles._blas() is not None, "threadpoolctl knows the library of NumPy's products"
rng = np.random.default_rng(0)
for dtype, d in (("f4", 64), ("f8", 35), ("f8", 80)):
    q, k, v = (rng.standard_normal((3, 700, d)).astype(dtype) for _ in "qkv")
    sys.stdout.buffer.write(pyrope.attention(q, k, v, causal=True).tobytes())
    sys.stdout.buffer.write(pyrope.linear_attention(q, k, v, causal=True).tobytes())
"""


@pytest.mark.needs("threadpoolctl")
def test_the_same_bits_with_the_threads_of_a_real_blas():
    for blas in ("1", "2"):  # what is not cut into pieces has the threads of BLAS, and their bits
        outputs = set()
        for own in ("1", "2"):
            env = os.environ | {"PYROPE_THREADS": own, "OPENBLAS_NUM_THREADS": blas, "OMP_NUM_THREADS": blas}
            run = subprocess.run([sys.executable, "-c", BLAS], capture_output=True, timeout=SECONDS, env=env)
            assert run.returncode == 0, run.stderr.decode()
            outputs.add(run.stdout)
        assert len(outputs) == 1 and len(outputs.pop()) > 10**6


def test_an_mlp_and_a_projection_are_cut_by_tokens(monkeypatch):
    weight, spread = np.ones((6, 6), np.float32), []
    monkeypatch.setattr(tiles, "_spread", lambda queue, *_: spread.append(len(queue)))
    layer = layers.Projection(weight, None)
    with small_tiles(10**9), threads(2) as control:
        for rows, pieces in ((4, []), (5, [2]), (16, [4])):
            for call in (
                lambda x: layers.project(x, layer),
                lambda x: layers.mlp(x, layer, layer, "relu", gated=False),
            ):
                spread.clear()
                call(np.ones((rows, 6), np.float32))
                assert spread == pieces  # and within a piece nothing is spread again
        assert control.limits == 4 and control.threads == 7


# --- what stays on one thread ---


def test_arrays_on_the_device_are_not_spread(xp, monkeypatch):
    if xp is np:
        pytest.skip("the host has several cores")
    monkeypatch.setattr(tiles, "_spread", lambda *_: pytest.fail("arrays on a device are not worked on by threads"))
    monkeypatch.setattr(phase, "_TILE", 2**40)  # tables are computed on the host
    monkeypatch.setattr(softmax, "_DEVICE", 100)
    rope, m = Rope(8, 10000.0, "half"), np.arange(20)
    x = pyrope.from_numpy(np.random.default_rng(0).standard_normal((4, 20, 8)).astype(np.float32), xp)
    norm = layers.Norm(x[0, 0], None)
    with small_tiles(8), threads(2) as control:
        monkeypatch.setattr(phase, "_TILE", 2**40)
        pyrope.rotate(x, m, rope)
        pyrope.attention(x, x, x, causal=True)
        pyrope.linear_attention(x, x, x, m, rope, causal=True)
        layers.rms_norm(x, norm, 1e-6)
        assert control.limits == 0


def test_a_function_of_the_callers_is_called_by_the_callers_thread():
    x = np.random.default_rng(0).standard_normal((6, 20, 4))

    def feature_map(y):
        callers.add(threading.get_ident())
        return np.exp(y)

    callers = set()
    with small_tiles(8), threads(3):
        got = pyrope.linear_attention(x, x, x, causal=True, feature_map=feature_map, chunk=3)
        assert callers == {threading.get_ident()}
        assert got.tobytes() == pyrope.linear_attention(x, x, x, causal=True, feature_map="exp", chunk=3).tobytes()


def test_errors_name_the_head_and_the_token_whatever_the_pieces():
    x = np.random.default_rng(0).random((2, 6, 20, 4)) + 0.5
    q, k = x.copy(), x[:, :3]
    q[1, 5, 17] = -1  # the denominator of this query is negative
    for causal in (True, False):
        with small_tiles(8), threads(2), pytest.raises(ValueError, match=r"the first at \(1, 5, 17\)"):
            pyrope.linear_attention(q, k, k, causal=causal, feature_map="identity", chunk=3)


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    assert tiles._cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert tiles._cores() == 9
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert tiles._cores() == 1


def test_products_are_limited_by_the_first_call_and_freed_by_the_last(monkeypatch):
    done = []

    class Blas:
        def limit(self, limits):
            done.append(limits)
            return self

        def restore_original_limits(self):
            done.append("restored")

    monkeypatch.setattr(tiles, "_blas", Blas)
    state = tiles._State()
    with state.one_blas_thread() as one:
        with state.one_blas_thread() as two:
            assert one is two is True and done == [1]
        assert done == [1]
    assert done == [1, "restored"]
    monkeypatch.setattr(tiles, "_blas", lambda: None)
    with state.one_blas_thread() as allowed:
        assert allowed is False and done == [1, "restored"]
