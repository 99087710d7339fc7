"""Every adapter gives what a plain call gives, hides nothing, and says what is wrong with what it is given."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st
from optional import package
from strategies import DTYPES

import pyrope
from pyrope import Rope
from pyrope.oracle import adapters
from pyrope.oracle.adapters import (
    CommandFailed,
    cached,
    from_command,
    from_complex,
    from_cos_sin,
    from_offset,
    from_sequential,
    load_target,
    with_axes,
)

ml_dtypes = package("ml_dtypes")

HALF = Rope(8, 10000.0, "half")


def plain(x, positions):
    return pyrope.rotate(x, positions, HALF)


def numbers(shape, dtype=np.float64):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


position_lists = st.lists(st.integers(0, 40), max_size=12).map(lambda m: np.array(m, np.int64))
shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))


@given(shapes, position_lists, dtypes)
def test_offsets_are_taken_from_runs_of_positions(lead, at, dtype):
    x, calls = numbers((*lead, at.size, 8), DTYPES[dtype]), []

    def fn(x, offset):
        assert type(offset) is int
        calls.append(x.shape[-2])
        return plain(x, offset + np.arange(x.shape[-2]))

    assert_same_bits(from_offset(fn)(x, at), plain(x, at))
    assert sum(calls) == at.size and len(calls) == max(1, 1 + np.count_nonzero(np.diff(at) != 1))


@given(shapes, position_lists, dtypes)
def test_sequences_hold_every_position_once_a_call(lead, at, dtype):
    x, calls = numbers((*lead, at.size, 8), DTYPES[dtype]), []

    def fn(x):
        calls.append(x.shape[-2])
        return plain(x, np.arange(x.shape[-2]))

    assert_same_bits(from_sequential(fn)(x, at), plain(x, at))
    assert set(calls) == {at.max(initial=-1) + 1}
    assert len(calls) == max([1, *np.unique(at, return_counts=True)[1]])


def turned(x, at):
    """Plain NumPy, x (…, n, 8): pairs (i, i + 4), angles in float64."""
    angles = at[:, None] * 10000.0 ** (-np.arange(4) / 4)
    a, b = x[..., :4].astype(float), x[..., 4:].astype(float)
    y = np.concatenate((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), axis=-1)
    return y.astype(x.dtype)


COUNTED = {
    "offset": lambda fn: from_offset(lambda x, offset: fn(x, offset + np.arange(x.shape[-2]))),
    "sequence": lambda fn: from_sequential(lambda x: fn(x, np.arange(x.shape[-2]))),
}


@pytest.mark.parametrize("adapter", COUNTED)
def test_functions_that_count_their_positions_are_called_a_thousand_times_at_most(adapter):
    """One call for each of many scattered rows, or for each of many equal positions, would make tens of thousands."""
    calls, rows = [], []

    def fn(x, at):
        calls.append(x.shape[-2])
        rows.append(x.size // 8)
        return turned(x, at)

    assert pyrope.check_rotation(COUNTED[adapter](fn), HALF, max_position=4095).verdict == "right"
    assert len(calls) < 1000 and sum(rows) < 2_000_000
    assert {*range(1, 131), 255, 256, 1000, 1024, 2049, 4000} <= {*calls}  # as many lengths as of any other function


@pytest.mark.parametrize("adapter", COUNTED)
@pytest.mark.parametrize("fault, wrong", [
    ("some lengths wrong", lambda x, at: len(at) == 97), ("heads differ", lambda x, at: x.shape[-3] == 96),
])  # fmt: skip
def test_functions_that_count_their_positions_are_wrong_in_some_calls(adapter, fault, wrong):
    fn = COUNTED[adapter](lambda x, at: turned(x, at + (x.ndim > 2 and bool(wrong(x, at)))))
    found = pyrope.check_rotation(fn, HALF, max_position=4095)
    assert found.faults == (fault,)


def test_lengths_that_are_wrong_are_those_that_the_function_gets():
    fn = from_offset(lambda x, offset: turned(x, offset + np.arange(x.shape[-2]) + (x.shape[-2] >= 700)))
    found = pyrope.check_rotation(fn, HALF, max_position=4095)
    assert found.faults == ("some lengths wrong",)
    assert "so all are right up to 640, and wrong from 700 on" in found.findings[0].evidence


@pytest.mark.parametrize("adapter", COUNTED)
def test_a_state_is_not_hidden_by_calls_that_are_left_out(adapter):
    grown = []

    def fn(x, at):
        """A table that a longer call stretches for all calls after it."""
        grown.append(int(at.max(initial=0)))
        return turned(x, at * (2 if max(grown) > 3000 else 1))

    assert pyrope.check_rotation(COUNTED[adapter](fn), HALF, max_position=4095).faults == ("state between calls",)


def attended(q, k, v, at, base=10000.0, keys=1, linear=False):
    """Causal attention with RoPE inside by hand, in float64: q, k, v (b, h, n, 8), at (n,)."""

    def rotated(x, at):
        angles = at[:, None] * base ** (-np.arange(4) / 4)
        a, b = x[..., :4].astype(float), x[..., 4:].astype(float)
        return np.concatenate((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), -1)

    seen = np.tri(len(at)) > 0
    if linear:
        fq, fk = (np.where(x > 0, x + 1.0, np.exp(np.minimum(x, 0.0))) for x in (q.astype(float), k.astype(float)))
        weights = np.where(seen, rotated(fq, at) @ rotated(fk, keys * at).swapaxes(-1, -2), 0)
        return (weights @ v / np.where(seen, fq @ fk.swapaxes(-1, -2), 0).sum(-1, keepdims=True)).astype(q.dtype)
    scores = np.where(seen, rotated(q, at) @ rotated(k, keys * at).swapaxes(-1, -2) / np.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).astype(q.dtype)


ATTENDING = {
    "sequence": (from_sequential, lambda **made: lambda q, k, v: attended(q, k, v, np.arange(q.shape[2]), **made)),
    "offset": (from_offset, lambda **made: lambda q, k, v, m: attended(q, k, v, m + np.arange(q.shape[2]), **made)),
}  # fmt: skip


@pytest.mark.parametrize("adapter", ATTENDING)
@pytest.mark.parametrize("linear", [False, True])
def test_attention_whose_positions_are_implied(adapter, linear):
    wrap, make = ATTENDING[adapter]

    def check(**made):
        own = {"linear": True} if linear else {}
        judge = pyrope.check_linear_attention if linear else pyrope.check_attention
        return judge(wrap(make(**made, **own)), rope=HALF, head_dim=8, key_heads=4)

    found = check()
    assert found.verdict == "right" and any("this function counts its positions" in note for note in found.notes)
    assert check(base=500000.0).faults == ("wrong base",)
    assert check(keys=0).faults == ("keys not rotated",)


def test_attention_that_counts_its_positions_in_a_cache():
    def begin(first):
        seen = []

        def step(q, k, v):
            """The tokens so far, with those of this call: a cache of keys before they are rotated."""
            seen.append((q, k, v))
            q, k, v = (np.concatenate(x, axis=2) for x in zip(*seen, strict=True))
            return attended(q, k, v, first + np.arange(q.shape[2]))[:, :, -seen[-1][0].shape[2] :]

        return from_sequential(step)

    options = {"rope": HALF, "head_dim": 8, "key_heads": 4}
    whole = ATTENDING["sequence"][1]()
    assert pyrope.check_attention(from_sequential(whole), incremental=lambda: begin(0), **options).verdict == "right"
    assert pyrope.check_attention(from_sequential(whole), incremental=lambda: begin(9), **options).verdict == "right"


def test_sequences_have_a_limit():
    fn = from_sequential(lambda x: x, limit=10)
    assert fn(np.ones((1, 2)), np.array([9])).shape == (1, 2)
    with pytest.raises(ValueError, match="below the limit, 10, the greatest was 10"):
        fn(np.ones((1, 2)), np.array([10]))
    with pytest.raises(ValueError, match="at least 0 for this kind of function, the least was -1"):
        fn(np.ones((1, 2)), np.array([-1]))
    with pytest.raises(ValueError, match="limit must be at least 1"):
        from_sequential(lambda x: x, limit=0)
    message = r"it returns shape \(2, 2\) instead of \(3, 2\) for numpy.ndarray of shape \(3, 2\), float64"
    with pytest.raises(ValueError, match=message):
        from_sequential(lambda x: x[1:])(np.ones((1, 2)), np.array([2]))


AXES = ["".join(order) for order in itertools.permutations("bhnd")] + [
    "nd",
    "dn",
    "hnd",
    "nhd",
    "bnd",
    "n(hd)",
    "b(nh)d",
]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_axes_are_those_that_were_asked_for(axes, lead):
    letters = axes.replace("(", "").replace(")", "")
    sizes = {"b": int(np.prod(lead[:-1])), "h": lead[-1] if lead else 1, "n": 5, "d": 8}
    shapes = []

    def fn(x, at):
        """Undoes the axes by their letters alone: (…) to b, h, n, d."""
        assert x.flags.c_contiguous and x.flags.writeable
        shapes.append(x.shape)
        spread = x.reshape([sizes[a] for a in letters])
        home = [letters.index(a) for a in "bhnd" if a in letters]
        turned = plain(spread.transpose(home), at)
        return turned.transpose(np.argsort(home)).reshape(x.shape)

    x, at = numbers((*lead, 5, 8)), np.array([3, 0, 7, 7, 1])
    assert_same_bits(with_axes(fn, axes)(x, at), plain(x, at))
    loops = [sizes[a] for a in "bh" if a not in letters]
    assert len(shapes) == np.prod([1, *loops])
    if axes == "n(hd)":
        assert shapes[0] == (5, sizes["h"] * 8)


def from_the_first_byte(x):
    """x as a kernel reads it that gets a pointer and a shape, but no strides."""
    base = x if x.base is None else x.base
    if not isinstance(base, np.ndarray) or base.dtype != x.dtype:
        return x
    first = (x.ctypes.data - base.ctypes.data) // x.itemsize
    return np.resize(np.roll(base.reshape(-1), -first), x.shape)


@pytest.mark.parametrize("axes", ["bhnd", "bnhd", "nhd", "nbhd", "n(hd)", "nd", "offset", "sequence"])
def test_ignored_strides_are_named_behind_an_adapter_as_without_it(axes):
    letters = axes.replace("(", "").replace(")", "")

    def fn(x, at, read):
        """Takes x with these axes."""
        spread = read(x).reshape([*x.shape[:-1], -1, 8] if "(" in axes else x.shape)
        home = [letters.index(a) for a in "bhnd" if a in letters]
        return turned(spread.transpose(home), at).transpose(np.argsort(home)).reshape(x.shape)

    def adapted(read):
        if axes in COUNTED:
            return COUNTED[axes](lambda x, at: turned(read(x), at))
        return with_axes(lambda x, at: fn(x, at, read), axes)

    assert pyrope.check_rotation(adapted(lambda x: x), HALF, max_position=4095).verdict == "right"
    wrong = pyrope.check_rotation(adapted(from_the_first_byte), HALF, max_position=4095)
    plain = pyrope.check_rotation(lambda x, at: turned(from_the_first_byte(x), at), HALF, max_position=4095)
    assert wrong.faults == plain.faults == ("strides ignored",), wrong


@pytest.mark.parametrize("axes", ["", "bhn", "bhd", "bnhdd", "xnd", "n(hd", "n)hd(", "n()d", "b,n,h,d", "(b)(n"])
def test_axes_must_make_sense(axes):
    with pytest.raises(ValueError, match='axes must be n, d and any of b and h, each once, such as "bnhd"'):
        with_axes(plain, axes)


def test_axes_and_offsets_go_together():
    def fn(x, offset):  # (b, n, h, d)
        return plain(x.swapaxes(1, 2), offset + np.arange(x.shape[1])).swapaxes(1, 2)

    x, at = numbers((2, 3, 6, 8), np.float32), np.array([4, 5, 6, 0, 1, 9])
    for both in (from_offset(with_axes(fn, "bnhd")), from_offset(with_axes(fn, "bnhd"))):
        assert_same_bits(both(x, at), plain(x, at))


def test_tables_come_from_functions_and_caches():
    cos, sin = pyrope.cos_sin(HALF, range(50))
    at, x = np.array([49, 0, 7]), numbers((2, 3, 8))

    def apply(q, k, cos, sin):
        def one(x):
            a, b = x[..., :4], x[..., 4:]
            return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

        return one(q), -one(k)

    for tables in (cached((cos, sin)), cached(lambda n: (cos[:n], sin[:n]), 50), lambda m: (cos[m], sin[m])):
        np.testing.assert_allclose(from_cos_sin(apply, tables)(x, at), plain(x, at), rtol=1e-14)
        assert_same_bits(from_cos_sin(apply, tables, part="k")(x, at), -from_cos_sin(apply, tables)(x, at))
        single = from_cos_sin(lambda x, c, s: apply(x, x, c, s)[0], tables, part="x")
        assert_same_bits(single(x, at), from_cos_sin(apply, tables)(x, at))
    rotor = cached(cos + 1j * sin)
    z = from_complex(lambda q, k, f: (q[..., :4] + 1j * q[..., 4:]) * f, rotor)(x, at)
    np.testing.assert_allclose(np.concatenate((z.real, z.imag), -1), plain(x, at), rtol=1e-14)


def test_tables_that_do_not_fit_are_refused():
    table = np.ones((5, 4))
    with pytest.raises(ValueError, match=r"tables of shape \(5, 4\) have no row for position 5"):
        cached((table, table))(np.array([5]))
    with pytest.raises(ValueError, match="at least 0"):
        cached(table)(np.array([-1]))
    with pytest.raises(ValueError, match="a function that makes tables needs a limit"):
        cached(lambda n: table)
    with pytest.raises(ValueError, match="the greatest was 7"):
        cached(lambda n: table, 5)(np.array([7]))
    with pytest.raises(ValueError, match="part must be one of 'q', 'k', 'x'"):
        from_cos_sin(plain, cached(table), part="v")
    with pytest.raises(TypeError, match='it returns one array, but part="k" is the second of two'):
        from_cos_sin(lambda q, k, c: q, lambda m: (table,), part="k")(np.ones((1, 4)), np.array([0]))


@pytest.mark.parametrize(
    "fn", [from_offset(plain), from_sequential(plain), from_cos_sin(plain, cached(np.ones((5, 4))))]
)
def test_functions_of_one_axis_refuse_several(fn):
    with pytest.raises(ValueError, match=r"positions must be \(n,\), had shape \(3, 2\)"):
        fn(np.ones((2, 4)), np.zeros((3, 2), np.int64))


def spoil(x, *rest):
    x[...] = 7
    return x.copy()


@pytest.mark.parametrize(
    "fn",
    [
        from_offset(spoil),
        from_sequential(spoil),
        with_axes(spoil, "bnhd"),
        with_axes(spoil, "nd"),
        from_offset(with_axes(spoil, "n(hd)")),
        from_cos_sin(spoil, lambda m: (m, m)),
        from_cos_sin(lambda q, k, *t: (q, spoil(k)), lambda m: (m, m), part="k"),
    ],
)
@pytest.mark.parametrize("make", [lambda: np.ones((2, 3, 2, 4)), lambda: np.ones((4, 2, 3, 2)).transpose(1, 2, 3, 0)])
def test_a_changed_input_is_seen(fn, make):
    x = make()
    fn(x, np.array([4, 5]))
    assert (x == 7).all()
    still = np.ones((2, 3, 2, 4))
    still.flags.writeable = False
    if fn(still.copy(), np.array([4, 5])) is not None:
        with pytest.raises(ValueError, match="read-only"):
            spoil(still)


@pytest.mark.parametrize("name, module", [("from_torch", "torch"), ("from_jax", "jax"), ("from_mlx", "mlx.core"),
                                          ("from_paddle", "paddle")])  # fmt: skip
def test_a_missing_library_is_named(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"{name} needs {module.partition('.')[0]}, and it cannot be imported"):
        getattr(adapters, name)(plain)


def test_cupy_functions(xp):
    if xp is np:
        pytest.skip("this is about the other one")
    fn = adapters.from_cupy(plain)
    for dtype in DTYPES.values():
        x = numbers((2, 8, 3), dtype).transpose(0, 2, 1)
        assert_same_bits(fn(x, np.array([1, 2, 300])), plain(x, [1, 2, 300]))
    x = np.ones((1, 3, 8))
    adapters.from_cupy(spoil)(x, np.array([1, 2, 3]))
    assert (x == 7).all()
    with pytest.raises(TypeError, match=r"it returns nothing instead of .*ndarray for .*ndarray of shape"):
        adapters.from_cupy(lambda x, at: None)(x, np.array([0]))


# Failures


def in_a_list(x, *rest):
    return [x, x]


def too_short(x, *rest):
    return x[1:]


def raising(x, *rest):
    raise KeyError("cos_cached")


ADAPTED = {  # what the user's function receives in the first call, at positions 0, 1, 3 and 2
    "(b, n, h, d)": (lambda fn: with_axes(fn, "bnhd"), "ndarray of shape (1, 4, 3, 8), float32; numpy.ndarray of"),
    "offset": (from_offset, "numpy.ndarray of shape (3, 2, 8), float32; 0"),
    "sequence": (from_sequential, "numpy.ndarray of shape (3, 4, 8), float32"),
    "tables": (
        lambda fn: with_axes(from_cos_sin(fn, lambda m: (m[:, None], m[:, None])), "nhd"),
        "(4, 3, 8), float32; numpy.ndarray of shape (4, 3, 8), float32; numpy.ndarray of shape (4, 1), int64; numpy.",
    ),
    "offset, (n, d)": (lambda fn: from_offset(with_axes(fn, "nd")), "numpy.ndarray of shape (2, 8), float32; 0"),
}


@pytest.mark.parametrize("adapter", ADAPTED)
def test_a_failure_tells_what_the_users_function_received(adapter):
    wrap, received = ADAPTED[adapter]
    report = pyrope.check_rotation(wrap(raising), HALF, max_position=7)
    assert report.verdict == "not judged" and "it raises KeyError ('cos_cached')" in report.failure.reason
    assert received in report.failure.received
    assert [line for line in report.failure.frames if "File" in line][0].endswith("in raising")
    assert report.failure.frames[-1] == "KeyError: 'cos_cached'" and len(report.failure.frames) <= 4
    with pytest.raises(pyrope.NotJudged) as caught:
        pyrope.assert_rotation(wrap(raising), HALF, max_position=7)
    assert isinstance(caught.value.__cause__, KeyError)
    for fn in (in_a_list, too_short) if adapter != "tables" else (too_short,):  # two results are what tables may give
        failure = pyrope.check_rotation(wrap(fn), HALF, max_position=7).failure
        assert failure.reason.startswith(f"it returns {'list' if fn is in_a_list else 'shape'}")
        assert received in failure.received and not failure.frames


# Programs


@pytest.fixture
def program(tmp_path):
    """A Python program of these lines, as a command; x, at and y are the paths, np is there."""

    def make(body: str, **options):
        path = tmp_path / "program with a space.py"
        head = "import os, sys, time, struct\nimport numpy as np\nx, at, y = sys.argv[1:]\n"
        path.write_text(head + textwrap.dedent(body))
        return from_command(f"'{sys.executable}' '{path}' {{x}} {{positions}} {{y}}", **options)

    return make


def test_programs_get_and_give_arrays(program):
    fn = program("""
        a, m = np.load(x), np.load(at)
        assert m.dtype == np.int64 and m.ndim == 1
        assert a.flags.c_contiguous and oct(os.stat(os.path.dirname(x)).st_mode)[-3:] == "700"
        np.save(y, a * m[:, None].astype(a.dtype))
    """)
    for dtype in (np.float64, np.float32, np.float16):
        x, last = numbers((2, 4, 3), dtype).transpose(0, 2, 1), 2**31 if dtype != np.float16 else 300
        before = x.copy()
        assert_same_bits(fn(x, np.array([1, 2, last])), x * np.array([[1], [2], [last]]).astype(dtype))
        assert_same_bits(x, before)


def test_bfloat16_is_exchanged_as_bits(program):
    fn = program("""
        bits = np.load(x)
        assert bits.dtype == np.uint16
        np.save(y, bits ^ 0x8000)  # negated
    """)
    x = numbers((3, 4), ml_dtypes.bfloat16)
    assert_same_bits(fn(x, np.arange(3)), -x)


BAD = {
    "sys.exit('no such thing')": r"ended with status 1; it printed:\nno such thing",
    "pass": r"there is no file .*y\.npy; it printed nothing",
    "print('lost'); os.mkdir(y)": r"there is no file .*; it printed:\nlost",
    "os.mkfifo(y)": r"there is no file",
    "open(y, 'w').write('hello')": "is not a valid .npy file",
    "open(y, 'wb').write(open(x, 'rb').read()[:-1])": "must hold 8 numbers of 8 bytes, has 63 bytes",
    "open(y, 'wb').write(open(x, 'rb').read() + bytes(8))": "must hold 8 numbers of 8 bytes, has 72 bytes",
    "open(y, 'wb').write(open(x, 'rb').read() + bytes(1))": "must hold 8 numbers of 8 bytes, has 65 bytes",
    "open(y, 'wb').write(open(x, 'rb').read()); os.truncate(y, 2**42 + 128)": "has 4398046511104 bytes",
    "open(y, 'wb').write(open(x, 'rb').read()[:20])": "is not a valid .npy file",
    "open(y, 'wb')": "is not a valid .npy file",
    "np.save(y, np.array([None]), allow_pickle=True)": r"was object of shape \(1,\)",
    "np.savez(y, np.ones(1)); os.rename(y + '.npz', y) if os.path.exists(y + '.npz') else None": "is not a valid .npy file",
    "np.save(y, np.ones((2, 3)))": r"must be float64 of shape \(2, 4\), was float64 of shape \(2, 3\)",
    "np.save(y, np.load(x).astype('f4'))": r"must be float64 of shape \(2, 4\), was float32",
    "np.save(y, np.load(x).astype('>f8'))": r"must be float64 of shape \(2, 4\), was big-endian float64 of shape \(2, 4\)",
    "os.kill(os.getpid(), 9)": "was killed by signal 9",
    "print('x' * 100000 + 'the end'); sys.exit(3)": r"ended with status 3; it printed:\nx{1992}the end",
    "sys.stdout.buffer.write(b'\\xff\\xfe'); sys.exit(3)": "ended with status 3; it printed:\n\ufffd\ufffd",
    # A header that claims 2⁶⁰ bytes, which must not be allocated.
    "h = b\"{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,)}\".ljust(117) + b'\\n'\n"
    "open(y, 'wb').write(b'\\x93NUMPY\\x01\\x00' + struct.pack('<H', len(h)) + h)": r"was float64 of shape \(1152921504606846976,\)",
}


@pytest.mark.parametrize("body", BAD)
def test_bad_programs_are_told(program, body):
    if "mkfifo" in body and not hasattr(os, "mkfifo"):
        pytest.skip("no FIFOs here")
    with pytest.raises(CommandFailed, match=BAD[body]):
        program(body)(np.ones((2, 4)), np.arange(2))


def alive(pid: int) -> bool:
    try:
        return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


GRANDCHILD = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({path!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
    time.sleep(600)
"""


def wait_for(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_program_that_takes_too_long_is_killed_with_its_children(program, tmp_path, monkeypatch):
    noted, wait, waits = tmp_path / "pids", subprocess.Popen.wait, []

    def in_no_hurry(process, timeout=None):
        """The time is up once the grandchild is there, however slow the machine."""
        waits.append(timeout)
        if timeout is None:
            return wait(process)
        wait_for(lambda: noted.exists() and len(noted.read_text().split()) == 2)
        raise subprocess.TimeoutExpired("it", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", in_no_hurry)
    fn = program(GRANDCHILD.format(path=str(noted)), timeout=3.0)
    with pytest.raises(CommandFailed, match="took longer than 3 s and was killed; it printed nothing"):
        fn(np.ones((2, 4)), np.arange(2))
    assert waits[0] == 3.0
    with pytest.raises(CommandFailed, match="took longer than 3 s"):  # it is not started again
        fn(np.ones((2, 4)), np.arange(2))
    assert waits.count(3.0) == 1
    pids = [int(pid) for pid in noted.read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: not any(map(alive, pids)))


def test_the_time_limit_is_real(program):
    with pytest.raises(CommandFailed, match="took longer than 0.05 s"):
        program("time.sleep(600)", timeout=0.05)(np.ones((2, 4)), np.arange(2))


@pytest.mark.ctrl_c
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_ctrl_c_kills_the_program_and_leaves_nothing(tmp_path):
    noted, own = tmp_path / "pids", tmp_path / "tmp"
    own.mkdir()
    script = tmp_path / "slow.py"
    script.write_text("import os, sys, time\n" + textwrap.dedent(GRANDCHILD.format(path=str(noted))))
    code = f"""if True:
        import numpy as np
        from pyrope.oracle.adapters import from_command
        from_command([{sys.executable!r}, {str(script)!r}, "{{x}}", "{{positions}}", "{{y}}"])(np.ones((1, 2)), np.arange(1))
    """
    environment = {**os.environ, "TMPDIR": str(own), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE)
    wait_for(lambda: noted.exists() and len(noted.read_text().split()) == 2)
    process.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate(timeout=30)[1]
    pids = [int(pid) for pid in noted.read_text().split()]
    wait_for(lambda: not any(map(alive, pids)))
    assert list(own.iterdir()) == []


def test_commands_are_no_shell(tmp_path, program):
    target = tmp_path / "made"
    with pytest.raises(ValueError, match="there is no program 'no-such-program-at-all' that can be run"):
        from_command(f"no-such-program-at-all {{x}} {{positions}} {{y}}; touch {target}")
    fake = tmp_path / "fake"
    fake.write_bytes(b"\x7fELF no program")
    fake.chmod(0o755)
    with pytest.raises(CommandFailed, match="cannot be started"):
        from_command([fake, "{x}", "{positions}", "{y}"])(np.ones((1, 2)), np.arange(1))
    assert not target.exists()
    fn = from_command(
        [
            sys.executable,
            "-c",
            "import sys; print(sys.argv[1:]); sys.exit(1)",
            "$HOME",
            "*",
            "{}",
            "a={x}{y}",
            "{positions}",
        ]
    )
    with pytest.raises(CommandFailed, match=r"\['\$HOME', '\*', '\{\}', 'a=/.*x\.npy/.*y\.npy', '/.*positions\.npy'\]"):
        fn(np.ones((1, 2)), np.arange(1))


@pytest.mark.parametrize("missing", ["{x}", "{positions}", "{y}"])
def test_commands_must_say_where_everything_goes(missing):
    with pytest.raises(ValueError, match=rf"the command must say where \{missing[:-1]}\}} goes"):
        from_command("program {x} {positions} {y}".replace(missing, "x"))
    with pytest.raises(ValueError, match="No closing quotation"):
        from_command("program '{x} {positions} {y}")
    with pytest.raises(ValueError, match="timeout must be finite and greater than 0"):
        from_command("program {x} {positions} {y}", timeout=0)


# Targets


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "own_rope.py").write_text(
        "import own_helper\ndef turn(x, at): return own_helper.same(x)\n"
        "class Rope:\n    @staticmethod\n    def turn(x, at): return x\nnumber = 3\n"
    )
    (tmp_path / "own_helper.py").write_text("def same(x): return x\n")
    (tmp_path / "own_bad.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "own_exit.py").write_text("raise SystemExit('used as a script')\n")
    (tmp_path / "own_syntax.py").write_text("def (:\n")
    sub = tmp_path / "sub"
    sub.mkdir()
    (sub / "other.py").write_text(
        "from __future__ import annotations\nimport beside\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    b: int\ndef turn(x, at): return beside.same(x)\n"
    )
    (sub / "beside.py").write_text("def same(x): return x\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("own_", "beside", "pyrope_target_")):
            del sys.modules[name]


@pytest.mark.parametrize(
    "target",
    ["own_rope:turn", "own_rope:Rope.turn", "own_rope.py:turn", "./own_rope.py:Rope.turn", "sub/other.py:turn"],
)
def test_targets_are_found(here, target):
    assert load_target(target)("x", 0) == "x"


@pytest.mark.parametrize(
    "target, message",
    [
        ("own_rope", 'must be "module:function"'),
        (":turn", 'must be "module:function"'),
        ("own_rope:", 'must be "module:function"'),
        ("own_rope:turn()", 'must be "module:function"'),
        ("own_rope:tunr", "own_rope has no 'tunr': did you mean 'turn'"),
        ("own_rope:number", "own_rope:number must be a function, was int"),
        ("own_rope:Rope.trun", "own_rope has no 'Rope.trun': did you mean 'turn'"),
        ("own_rpe:turn", "there is no module own_rpe, here or installed"),
        ("own_rope.deeper:turn", "there is no module own_rope.deeper, .*not a package"),
        ("own_rpe.py:turn", "there is no file own_rpe.py"),
        ("own_bad:turn", "own_bad cannot be imported: No module named 'no_such_package_anywhere'"),
        ("own_bad.py:turn", "own_bad.py cannot be imported: No module named 'no_such_package_anywhere'"),
        ("own_exit:turn", "own_exit cannot be imported: SystemExit: used as a script"),
        ("own_syntax:turn", "own_syntax cannot be imported: SyntaxError"),
        ("sub/:turn", "there is no file sub/"),
    ],
)
def test_targets_that_do_not_exist_are_refused(here, target, message):
    with pytest.raises(ValueError, match=message):
        load_target(target)


@pytest.mark.parametrize("axes", ["bhnd", "bnhd"])
def test_features_are_handed_over_side_by_side(axes):
    """As complex views need them; the array is no more contiguous than x for that."""
    given = []
    x = np.arange(48, dtype=np.float32).reshape(2, 3, 8)[..., ::2]
    y = adapters.with_axes(lambda x, at: given.append(x) or x * 2, axes)(x, np.arange(3))
    assert given[0].strides[-1] == 4 and not given[0].flags.c_contiguous
    np.testing.assert_array_equal(y, x * 2)
