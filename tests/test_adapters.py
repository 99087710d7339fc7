"""Every adapter gives what a plain call gives, hides nothing, and says what is wrong with what it is given."""

import importlib
import inspect
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, strategies as st
from optional import package

from pyrope.oracle import adapters
from pyrope.oracle.adapters import (
    CommandFailed,
    ImportFailed,
    framework,
    from_command,
    from_offset,
    from_sequential,
    load_target,
    with_axes,
)  # fmt: skip
from pyrope.oracle.candidate import COMPILES, COUNTS, Candidate, Unreadable

ml_dtypes = package("ml_dtypes")
X, AT = np.arange(24.0).reshape(2, 3, 4), np.array([0, 5, 9])
THETA = 10000.0 ** (-np.arange(2) / 2)


def turned(x, at):
    """Plain NumPy, x (…, n, 4): pairs (i, i + 2), angles in float64."""
    cos, sin, a, b = np.cos(at[:, None] * THETA), np.sin(at[:, None] * THETA), x[..., :2], x[..., 2:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


# ── Array libraries ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["torch", "jax", "mlx", "paddle"])
def library(request):
    """The name of a library that is installed, and its module."""
    module = pytest.importorskip(adapters.LIBRARIES[request.param].module, reason=f"needs {request.param}")
    if request.param == "mlx":
        module.set_default_device(module.cpu)
    return request.param, module


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64", "int64"])
def test_every_bit_crosses_both_ways(library, dtype):
    name, module = library
    kind = getattr(module, adapters.LIBRARIES[name].array)
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    some = np.random.default_rng(0).bytes(24 * dtype.itemsize) if dtype != "int64" else np.arange(24).tobytes()
    every = np.frombuffer(some, dtype).reshape(2, 3, 4)  # NaN and subnormal numbers among them; read-only

    def fn(x, number):
        assert isinstance(x, kind) and number == 3
        return x, [x]

    for x in (every, every[:, ::-1], every.transpose(2, 0, 1), every.copy()[..., ::2], every[:0]):
        y, (again,) = framework(fn, name)(x, 3)
        if name != "jax" or dtype != "int64":  # which it narrows, where that loses nothing
            assert_same_bits(y, x)
        assert (again == x).all() or dtype.kind in "fcV" and y.flags.writeable and not np.shares_memory(x, y)


def test_what_a_library_derives(library):
    name, _ = library
    g, p = np.full((2, 4), np.inf, np.float32), np.full((2, 4), 3, np.float32)
    g[0] = [1, 2, 3, 4]
    square = framework(lambda x, p: x * x * p, name, "x")  # its slope at ones is 2p: what g holds decides nothing
    assert_same_bits(square(g, p), 6 * g)
    assert not framework(lambda x, p: p * 2, name, "x")(p, p).any()  # no gradient at all
    q, k, v = (np.full((1, 2, 3, 4), i, np.float32) for i in (2, 3, 5))
    fn = framework(lambda q, k, v, mask=None: q * k * mask, name, "qkv")
    assert [float(dx.max()) for dx in fn(q, k, v, q, mask=k)] == [3 * 2 * 3, 2 * 2 * 3, 0]
    assert [*inspect.signature(fn).parameters] == ["q", "k", "v", "mask"]
    narrow = q.astype(ml_dtypes.bfloat16)
    assert {dx.dtype for dx in framework(lambda q, k, v: q * k * v, name, "qkv")(*[narrow] * 4)} == {narrow.dtype}


def test_a_library_hides_no_fault(library):
    name, _ = library

    def in_place(x, at):
        x[...] = x * 2
        return x

    if name != "jax":  # whose arrays cannot be changed
        for dtype in (np.float32, ml_dtypes.bfloat16):
            x = np.ones((2, 3, 4), dtype)[:, ::-1]
            candidate = Candidate(framework(in_place, name))
            assert (candidate({"x": x, "at": AT}, ["x"])[0] == 2).all() and (x == 1).all()
            assert candidate.behaviour == {"mutates its input": "24 of 24 elements of x are changed after the call"}
    if name == "torch":  # whose memory NumPy sees
        kept = {}
        again = framework(lambda x: kept.setdefault(0, x.clone()).copy_(x), name)
        first = again(np.ones(3, np.float32))
        assert (again(np.zeros(3, np.float32)) == first).all()  # it is the same memory
    for backward in (None, "x"):
        with pytest.raises(Unreadable, match=r"it returns nothing, not .* for .* of shape \(3,\), .*float32"):
            framework(lambda x: None, name, backward)(np.ones(3, np.float32))
    candidate = Candidate(framework(lambda x, at: x, name))
    candidate({"x": np.ones((3, 4), np.float32), "at": AT}, ["x"])
    assert candidate.traits == ({COMPILES} if name == "jax" else set())


def test_jax_does_not_cut_numbers_down_in_silence():
    pytest.importorskip("jax", reason="needs jax")
    for x in (np.ones(2), np.array([2**31])):
        with pytest.raises(ValueError, match=f"JAX would halve the width of {x.dtype}"):
            framework(lambda x: x, "jax")(x)


def test_libraries_have_names(monkeypatch):
    with pytest.raises(ValueError, match="framework must be one of 'torch', 'jax', 'mlx', 'paddle', 'cupy'"):
        framework(turned, "tensorflow")
    for name, row in adapters.LIBRARIES.items():
        monkeypatch.setitem(sys.modules, row.module, None)
        with pytest.raises(ImportError, match=f"{name}.*cannot be imported"):
            getattr(adapters, f"from_{name}")(turned)


def test_cupy_functions(xp):
    if xp is np:
        pytest.skip("this is about the other one")
    x = np.arange(24, dtype=np.float32).reshape(2, 4, 3).transpose(0, 2, 1)
    assert_same_bits(adapters.from_cupy(lambda x, at: x * 2)(x, AT), x * 2)
    with pytest.raises(ValueError, match="cupy derives no backward pass"):
        framework(turned, "cupy", "x")


# ── Shapes of API ────────────────────────────────────────────────────────────────────────────────────────────────────

AXES = ["bhnd", "bnhd", "nbhd", "dhnb", "nd", "dn", "hnd", "nhd", "bnd", "n(hd)", "b(nh)d", "(bh)nd"]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("lead", [(), (2, 2, 3), (0, 3)])
def test_axes_are_those_that_were_asked_for(axes, lead):
    letters, shapes = axes.replace("(", "").replace(")", ""), []
    sizes = {"b": int(np.prod(lead[:-1])), "h": lead[-1] if lead else 1, "n": 3, "d": 4}

    def fn(x, at):
        """Undoes the axes by their letters alone: (…) to b, h, n, d."""
        assert x.flags.c_contiguous and x.flags.writeable
        shapes.append(x.shape)
        home = [letters.index(a) for a in "bhnd" if a in letters]
        y = turned(x.reshape([sizes[a] for a in letters]).transpose(home), at)
        return y.transpose(np.argsort(home)).reshape(x.shape)

    x = np.random.default_rng(0).standard_normal((*lead, 3, 4))
    assert_same_bits(with_axes(fn, axes)(x, AT), turned(x, AT))
    assert len(shapes) == np.prod([1, *(sizes[a] for a in "bh" if a not in letters)])
    if axes == "n(hd)" and shapes:
        assert shapes[0] == (3, sizes["h"] * 4)


def test_axes_must_make_sense():
    for axes in ("", "bhn", "bhd", "bnhdd", "xnd", "n(hd", "n()d", "bhnd "):
        with pytest.raises(ValueError, match='axes must be n, d and any of b and h, each once, such as "bnhd"'):
            with_axes(turned, axes)


def from_the_first_byte(x):
    """x as a kernel reads it that gets a pointer and a shape, but no strides."""
    tight = np.empty(x.shape, x.dtype).strides
    span = sum(step * (size - 1) for step, size in zip(x.strides, x.shape, strict=True))
    fits = sum(step * (size - 1) for step, size in zip(tight, x.shape, strict=True)) <= span
    return np.lib.stride_tricks.as_strided(x, x.shape, tight) if fits else x


COUNTED = {
    "offset": lambda fn: from_offset(lambda x, offset: fn(x, offset + np.arange(x.shape[-2]))),
    "sequence": lambda fn: from_sequential(lambda x: fn(x, np.arange(x.shape[-2]))),
}


@pytest.mark.parametrize("name", ["bhnd", "nd", *COUNTED])
def test_ignored_strides_show_behind_an_adapter(name):
    adapt = COUNTED.get(name, lambda fn: with_axes(fn, name))
    fn = adapt(lambda x, at: turned(from_the_first_byte(x), at))
    wide = np.random.default_rng(0).standard_normal((2, 3, 12))
    part, spaced = wide[..., 4:8], wide[..., ::3]
    assert np.allclose(fn(part.copy(), AT), turned(part, AT))  # contiguous: right
    for x in (part, spaced):
        assert np.allclose(adapt(turned)(x, AT), turned(x, AT)) and not np.allclose(fn(x, AT), turned(x, AT))


@given(st.lists(st.integers(1, 3), max_size=3), st.lists(st.integers(0, 40), max_size=12))
def test_functions_that_count_their_positions(lead, at):
    at, lengths = np.array(at, np.int64), []
    x = np.random.default_rng(0).standard_normal((*lead, at.size, 4)).astype(np.float32)

    def fn(x, at):
        lengths.append(x.shape[-2])
        return turned(x, at)

    assert_same_bits(COUNTED["offset"](fn)(x, at), turned(x, at))
    assert sum(lengths) == at.size and len(lengths) == max(1, 1 + np.count_nonzero(np.diff(at) != 1))
    lengths.clear()
    assert_same_bits(COUNTED["sequence"](fn)(x, at), turned(x, at))
    assert set(lengths) == {at.max(initial=-1) + 1} and len(lengths) == max([1, *np.unique(at, return_counts=True)[1]])


def test_a_function_that_counts_is_known_to_though_its_call_failed():
    candidate = Candidate(from_offset(lambda x, offset: 1 / 0))
    with pytest.raises(Unreadable, match="raises ZeroDivisionError"):
        candidate({"x": X, "positions": AT}, ["x"])
    assert candidate.traits == {COUNTS}


def test_attention_that_counts_its_positions():
    seen, q = [], np.ones((2, 1, 3, 4))

    def fn(q, k, v, *more, mask=None):
        seen.append((more, mask is q))
        return q

    at = np.arange(3) + np.zeros((2, 1), int)
    sequential, offset = from_sequential(fn), from_offset(fn)
    sequential(q, q, q, at, mask=q)
    offset(q, q, q, at + 7)
    sequential(q, q, q, at + 3)  # goes on
    sequential(q, q, q, at)
    assert seen == [((), True), ((7,), False), ((), False), ((), False)]
    assert "mask" in inspect.signature(sequential).parameters
    with pytest.raises(ValueError, match="they must begin at 0, began at 4"):
        sequential(q, q, q, at + 4)
    for wrong in (at * 2, at + [[0], [1]]):
        with pytest.raises(ValueError, match="they must rise one by one, and be the same in all rows"):
            offset(q, q, q, wrong)


@pytest.mark.parametrize("kind, words, call", [
    (ValueError, r"positions must be \(n,\), had shape \(2, 3\)", lambda: from_offset(turned)(X, np.stack([AT, AT]))),
    (ValueError, "positions must be from 0 to 8 for this function: set max_position; they were from 0 to 9",
     lambda: from_sequential(lambda x: x, limit=9)(X, AT)),
    (ValueError, "they were from -9 to 0", lambda: from_sequential(lambda x: x)(X, -AT)),
    (Unreadable, r"returns shape \(2, 1, 3\) instead of \(2, 1, 4\)", lambda: from_offset(lambda x, m: x[..., :3])(X, AT)),
    (Unreadable, "returns nothing instead of one array", lambda: with_axes(lambda x, m: None, "nd")(X, AT)),
])  # fmt: skip
def test_what_adapters_refuse(kind, words, call):
    with pytest.raises(kind, match=words):
        call()


def spoil(x, *rest):
    x[...] = 7
    return x.copy()


@pytest.mark.parametrize("fn", [
    from_offset(spoil), from_sequential(spoil), with_axes(spoil, "bnhd"), with_axes(spoil, "nd"),
    from_offset(with_axes(spoil, "n(hd)")),
])  # fmt: skip
def test_a_changed_input_is_seen_and_what_is_read_only_stays_so(fn):
    five = np.ones((4, 2, 2, 3, 2)).transpose(2, 1, 3, 4, 0)  # whose first axes cannot be merged without a copy
    for x in (np.ones((2, 3, 2, 4)), np.ones((4, 2, 3, 2)).transpose(1, 2, 3, 0), five):
        fn(x, np.array([4, 5]))
        assert (x == 7).all()
        x.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            fn(x, np.array([4, 6]))


def test_a_failure_tells_what_the_users_function_received():
    def raising(x, *rest):
        raise KeyError("cos_cached")

    candidate = Candidate(with_axes(raising, "nhd"))
    with pytest.raises(Unreadable) as caught:
        candidate({"x": X, "positions": AT}, ["x"])
    own = "numpy.ndarray of shape (3, 2, 4), float64; numpy.ndarray of shape (3,), int64, adapted from x (2, 3, 4)"
    assert own in caught.value.received and "in raising" in "".join(caught.value.failure().frames)


# ── Programs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def program(tmp_path):
    """A Python program of these lines, as a command; x, at and y are the paths."""

    def make(body, **options):
        path = tmp_path / "program with a space.py"
        head = "import os, sys, time, subprocess\nimport numpy as np\nx, at, y = sys.argv[1:]\n"
        path.write_text(head + textwrap.dedent(body))
        return from_command(f"'{sys.executable}' '{path}' {{x}} {{positions}} {{y}}", **options)

    return make


def test_programs_get_and_give_arrays(program):
    fn = program("""
        a, m = np.load(x), np.load(at)
        assert m.dtype == np.int64 and a.flags.c_contiguous and oct(os.stat(os.path.dirname(x)).st_mode)[-3:] == "700"
        np.save(y, a ^ 0x8000 if a.dtype == np.uint16 else a * m[:, None])
    """)
    x = np.random.default_rng(0).standard_normal((2, 4, 3)).transpose(0, 2, 1)
    assert_same_bits(fn(x, [1, 2, 2**31]), x * np.array([[1], [2], [2**31]]))
    assert_same_bits(fn(x.astype(ml_dtypes.bfloat16), AT), -x.astype(ml_dtypes.bfloat16))  # the sign of its bits


@pytest.mark.parametrize("body, message", [
    ("print('no such thing'); sys.exit(5)", r"ended with status 5; it printed:\nno such thing"),
    ("os.kill(os.getpid(), 9)", "was killed by signal 9"),
    ("print(x, y)", r"{y}: there is no file {y}; it printed:\n{x} {y}"),  # and no path, which changes in every call
    ("open(y, 'w').write('hello')", "{y} is not a valid .npy file: .*; it printed nothing"),
    ("np.save(y, np.load(x).astype('f4'))", r"must be float64 of shape \(2, 4\), was float32"),
    ("print('x' * 100000 + 'the end'); sys.exit(3)", r"it printed:\nx{1992}the end"),
])  # fmt: skip
def test_bad_programs_are_told(program, body, message):
    with pytest.raises(CommandFailed, match=message):
        program(body)(np.ones((2, 4)), np.arange(2))


def test_a_program_that_takes_too_long_is_killed_and_not_started_again(program, monkeypatch):
    wait, starts = subprocess.Popen.wait, []

    def impatient(process, timeout=None):
        if timeout is None:
            return wait(process)
        starts.append((process, timeout))
        raise subprocess.TimeoutExpired("it", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", impatient)
    fn = program("time.sleep(600)", timeout=3.0)
    for _ in range(2):
        with pytest.raises(CommandFailed, match="took longer than 3 s and was killed; it printed nothing"):
            fn(np.ones((2, 4)), np.arange(2))
    assert [(process.poll(), timeout) for process, timeout in starts] == [(-9, 3.0)]


def test_programs_for_attention():
    code = "import sys, numpy as np; q, *more, o = sys.argv[1:]; np.save(o, np.load(q) * np.load(more[-1]).sum())"
    command = [sys.executable, "-c", code, "{q}", "{k}", "{v}"]
    q, k = np.ones((2, 1, 3, 4)), np.ones((2, 1, 5, 4))
    fn = from_command([*command, "{segments}", "{mask}", "{o}"])
    assert [*inspect.signature(fn).parameters] == ["q", "k", "v", "mask", "segments"]
    assert (fn(q, k, k) == 2 * 3 * 5).all() and not fn(q, k, k, mask=np.zeros((2, 1, 3, 5), bool)).any()
    fused = from_command([*command, "{positions}", "{o}"])
    assert (fused(q, q, q, np.full((2, 3), 4)) == 24).all()
    code = "import sys, numpy as np; [np.save(y, np.load(x) * i) for i, (x, y) in enumerate(zip(sys.argv[1:], sys.argv[5:]))]"
    words = [sys.executable, "-c", code, *(f"{{{name}}}" for name in ("q", "k", "v", "g", "dq", "dk", "dv"))]
    assert [dx.max() for dx in from_command(words)(q, k, k, q)] == [0, 1, 2]


def test_a_program_that_cannot_be_started_is_told():
    with pytest.raises(CommandFailed, match=r"\./nothing cannot be started: .*; it printed nothing"):
        from_command("./nothing {x} {positions} {y}")(X, AT)


@pytest.mark.parametrize("command, message", [
    ("true {x} {y}", 'must be such as "./mine {x} {positions} {y}": {positions} is missing'),
    ("true {x} {positions} {y} {z}", 'such as "./mine {x} {positions} {y}": {z} does not belong there'),
    ("'true {x} {positions} {y}", "must be such as a shell splits, .*: No closing quotation"),
    ("true {q} {k} {v} {g} {dq}", 'such as "./mine {q} {k} {v} {g} {dq} {dk} {dv}": {dk} is missing'),
])  # fmt: skip
def test_commands_that_cannot_be_run_are_refused(command, message):
    with pytest.raises(ValueError, match=message):
        from_command(command)


# ── Names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


FILES = {
    "own_rope.py": "import own_helper as own\ndef turn(x): return own.same(x)\nclass Rope:\n    turn = turn\nnumber = 3\n",
    "own_helper.py": "def same(x): return x\n",
    "own_bad.py": "import no_such_package_anywhere",
    "own_exit.py": "raise SystemExit('script')",
    "own_odd.py": "def (:",
    "sub/own_beside.py": "def same(x): return x\n",
    "sub/other.py": "from __future__ import annotations\nimport own_beside\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass A:\n    b: int\nturn = own_beside.same\n",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "sub").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    importlib.invalidate_caches()
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("own_", "pyrope_target_")):
            del sys.modules[name]


@pytest.mark.parametrize(
    "target", ["own_rope:turn", "own_rope:Rope.turn", "./own_rope.py:Rope.turn", "sub/other.py:turn"]
)
def test_targets_are_found(here, target):
    assert load_target(target)("x") == "x"


@pytest.mark.parametrize("target, kind, message", [
    ("own_rope", ValueError, 'must be "module:function"'), (":turn", ValueError, 'must be "module:function"'),
    ("own_rope:turn()", ValueError, 'must be "module:function"'), ("own_rope:tunr", ValueError, "own_rope has no 'tunr'"),
    ("own_rope:number", ValueError, "own_rope:number must be a function, was int"),
    ("own_rope:Rope", ValueError, "own_rope:Rope must be a function, was a class: make an object of it"),
    ("own_rpe:turn", ValueError, "there is no module own_rpe, here or installed"),
    ("own_rope.deeper:turn", ValueError, "there is no module own_rope.deeper, .*not a package"),
    ("own_rpe.py:turn", ValueError, "there is no file own_rpe.py"), ("sub/:turn", ValueError, "there is no module sub/"),
    ("own_bad:turn", ImportFailed, "own_bad cannot be imported: .*No module named 'no_such_package_anywhere'"),
    ("own_exit:turn", ImportFailed, "own_exit cannot be imported: SystemExit: script"),
    ("own_odd.py:turn", ImportFailed, "own_odd.py cannot be imported: SyntaxError"),
])  # fmt: skip
def test_targets_that_do_not_exist_are_refused(here, target, kind, message):
    with pytest.raises(kind, match=message) as caught:
        load_target(target)
    assert type(caught.value) is kind  # misuse, or a target that cannot be judged
