"""The adapters one by one, on NumPy arrays alone and without a process: what the function inside receives, and returns."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

from pyrope.oracle import adapters as module
from pyrope.oracle.adapters import (  # fmt: skip
    CommandFailed,
    ImportFailed,
    cached,
    from_attention_command,
    from_command,
    from_complex,
    from_cos_sin,
    from_offset,
    from_sequential,
    load_target,
    with_axes,
)
from pyrope.oracle.ask import Unreadable, compiling, counts

X = np.arange(24.0).reshape(2, 3, 4)
AT = np.array([0, 5, 9])


# --- Other libraries ---


class Other:
    """An array of another library."""

    def __init__(self, x):
        self.x = x


def crossing(fn):
    return module._crossing(fn, Other, lambda x: Other(x.copy()), lambda y: y.x)


def test_arrays_of_another_library():
    seen = []

    def fn(x, n, *, mask=None):
        seen.append((type(x), type(n), type(mask)))
        return Other(x.x * n), [Other(x.x), Other(-x.x)]

    one, (two, three) = crossing(fn)(X, 3, mask=X)
    assert (
        seen == [(Other, int, Other)]
        and np.array_equal(one, 3 * X)
        and np.array_equal(three, -X)
        and np.array_equal(two, X)
    )
    assert crossing(fn).__wrapped__ is fn
    for result, words in ((None, "returns nothing instead of"), (3, "returns int instead of")):
        with pytest.raises(Unreadable, match=words):
            crossing(lambda x, result=result: result)(X)


def test_inputs_that_are_changed_inside():
    def fn(x):
        x.x[0] = 7
        return x

    x, locked = X.copy(), X.copy()
    crossing(fn)(x)
    assert (x[0] == 7).all() and (x[1] == X[1]).all()
    locked.flags.writeable = False
    crossing(fn)(locked)
    assert np.array_equal(locked, X)

    def reshapes(x):
        x.x = x.x.ravel()
        return Other(X)

    crossing(reshapes)(x)  # nothing can be written back


def test_backward_passes():
    def product(fn, inputs, g):
        return [g * fn(*inputs) for _ in inputs]

    def ones(x):
        return np.ones_like(x)

    fn = lambda x, n=1: x * n  # noqa: E731
    assert module._differentiated(fn, None, product, ones) is fn
    assert np.array_equal(module._differentiated(fn, "x", product, ones)(X, 5), 5 * X)  # at ones, not at g
    three = module._differentiated(lambda q, k, v, n: q + k + v + n, "qkv", product, ones)(1.0, 2.0, 3.0, 10.0, 4.0)
    assert three == [100.0] * 3
    with pytest.raises(ValueError, match="backward"):
        module._differentiated(fn, "y", product, ones)


# --- Tables ---


def test_parts_of_results():
    def both(q, k, cos, sin):
        assert q is not k
        return q * cos, k * sin

    tables = lambda m: (m[:, None], -m[:, None])  # noqa: E731
    assert np.array_equal(from_cos_sin(both, tables)(X, AT), X * AT[:, None])
    assert np.array_equal(from_cos_sin(both, tables, part="k")(X, AT), -X * AT[:, None])
    assert np.array_equal(from_cos_sin(lambda x, cos, sin: x + cos, tables, part="x")(X, AT), X + AT[:, None])
    assert np.array_equal(from_cos_sin(lambda q, k, cos, sin: q, tables)(X, AT), X)
    with pytest.raises(Unreadable, match='returns one array, but part="k" is the second of two'):
        from_cos_sin(lambda q, k, cos, sin: q, tables, part="k")(X, AT)
    for wrong in ({"part": "v"}, {"entries": "odd"}):
        with pytest.raises(ValueError):
            from_cos_sin(both, tables, **wrong)
    assert np.array_equal(from_complex(lambda x, z: x * z, lambda m: m[:, None], part="x")(X, AT), X * AT[:, None])


@pytest.mark.parametrize("entries, first", [("half", [1, 1, 0, 0]), ("interleaved", [1, 0, 1, 0])])
def test_entries_of_tables_by_themselves(entries, first):
    seen, first = [], np.array(first)
    wide = lambda m: (np.ones((3, 4)) * m[:, None], np.ones((3, 4), np.float32))  # noqa: E731

    def fn(x, cos, sin):
        seen.append((x[0, 1].tolist(), cos[1].tolist(), sin.dtype))
        return (x + cos).astype(np.float32)

    out = from_cos_sin(fn, wide, part="x", entries=entries)(X, AT)
    for (x, cos, dtype), own in zip(seen, (first, 1 - first), strict=True):
        assert x == (X[0, 1] * own).tolist() and cos == (5 * own).tolist() and dtype == np.float32
    assert out.dtype == np.float32 and np.array_equal(out, X + AT[:, None])
    with pytest.raises(ValueError, match=f'entries="{entries}" is for tables as wide as x, 4 features'):
        from_cos_sin(fn, lambda m: (m[:, None],), part="x", entries=entries)(X, AT)


@pytest.mark.parametrize("entries", ["equal", "half", "interleaved"])
def test_entries_of_tables_hide_nothing(entries):
    """A changed input, and what is no array, reach the caller as they are."""
    wide = lambda m: (np.ones((3, 4)) * m[:, None],)  # noqa: E731
    x = X + 1

    def spoils(x, cos):
        out = x * cos
        x[...] = 0
        return out

    out = from_cos_sin(spoils, wide, part="x", entries=entries)(x, AT)
    assert np.array_equal(out, (X + 1) * AT[:, None]) and not x.any()
    x = X.copy()
    assert from_cos_sin(lambda x, cos: None, wide, part="x", entries=entries)(x, AT) is None
    from_cos_sin(lambda x, cos: x * cos, wide, part="x", entries=entries)(x, AT)
    assert np.array_equal(x, X)


def test_autograd_hands_options_on():
    """The signature of what is differentiated says which there are."""

    def fn(q, k, v, at, mask=None):
        return q * mask

    def product(fn, inputs, g):
        return [fn(*inputs) * g] * 3

    for made in (fn, compiling(fn)):
        backward = module._differentiated(made, "qkv", product, np.ones_like)
        assert [*inspect.signature(backward).parameters] == ["q", "k", "v", "at", "mask"]
        assert [x.tolist() for x in backward(X, X, X, X, AT, mask=2)] == [(2 * X * X).tolist()] * 3


def test_rows_of_tables():
    table = np.arange(20).reshape(10, 2)
    assert cached(table)(AT).tolist() == [[0, 1], [10, 11], [18, 19]]
    one, two = cached((table, table[None]))(AT)
    assert one.shape == (3, 2) and two.shape == (1, 3, 2)
    lengths = []
    made = cached(lambda n: lengths.append(n) or np.zeros((n, 2)), 10)
    assert made(AT).shape == (3, 2) and lengths == [10] and made(np.empty(0, int)).shape == (0, 2)
    for positions, words in (
        ([10], "tables of shape (10, 2) have no row for position 10"),
        ([-1], "positions must be at least 0"),
        ([[0]], "must be (n,), had shape (1, 1)"),
    ):
        with pytest.raises(ValueError) as caught:
            cached(table)(np.array(positions))
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="positions must be below the limit, 9, the greatest was 9: set max_position"):
        cached(lambda n: table, 9)(AT)
    with pytest.raises(ValueError, match="needs a limit"):
        cached(lambda n: table)
    with pytest.raises(ValueError, match="have no row for position 9"):
        cached(np.zeros(10))(AT)


# --- Functions that count ---


def test_sequences():
    seen = []

    def fn(x):
        seen.append(x[0, :, 0].tolist())
        return x * np.arange(x.shape[-2])[:, None]

    at = np.array([2, 0, 2])
    out = from_sequential(fn)(X + 1, at)
    assert np.array_equal(out, (X + 1) * at[:, None]) and counts()
    assert (
        seen == [[5, 0, 1], [0, 0, 9]]
        and from_sequential(fn).starts == (0,) * 4
        and from_sequential(fn).__wrapped__ is fn
    )
    x = X.copy()

    def doubles(x):
        x *= 2
        return x

    assert np.array_equal(from_sequential(doubles)(x, AT), 2 * X) and np.array_equal(x, 2 * X)
    with pytest.raises(ValueError, match="below the limit, 9"):
        from_sequential(fn, 9)(X, AT)
    with pytest.raises(Unreadable, match="returns list instead of one array"):
        from_sequential(lambda x: [x])(X, AT)
    with pytest.raises(Unreadable, match=r"returns shape \(2, 10, 3\) instead of \(2, 10, 4\)"):
        from_sequential(lambda x: x[..., :3])(X, AT)


Q = np.ones((2, 1, 3, 4))


def test_attention_that_counts():
    seen = []

    def fn(q, k, v, *more, **options):
        seen.append((more, [*options]))
        return q

    at = np.arange(3)[None] + np.zeros((2, 1), int)
    sequential, offset = from_sequential(fn), from_offset(fn)
    sequential(Q, Q, Q, at, mask=Q)
    offset(Q, Q, Q, at + 7, mask=Q)
    assert seen == [((), ["mask"]), ((7,), ["mask"])] and offset.starts == (3,) * 4
    sequential(Q, Q, Q, at + 3)  # goes on
    sequential(Q, Q, Q, at)
    with pytest.raises(ValueError, match="they must begin at 0, began at 4"):
        sequential(Q, Q, Q, at + 4)
    for wrong in (at * 2, at + np.array([[0], [1]])):
        with pytest.raises(ValueError, match="they must rise one by one, and be the same in all rows"):
            offset(Q, Q, Q, wrong)


def test_runs_of_positions():
    seen = []

    def fn(x, offset):
        seen.append((x.shape[-2], offset))
        return x + (offset + np.arange(x.shape[-2]))[:, None]

    at = np.array([7, 8, 3])
    assert np.array_equal(from_offset(fn)(X, at), X + at[:, None]) and seen == [(2, 7), (1, 3)] and counts()
    assert from_offset(fn)(X[:, :0], np.empty(0, int)).shape == (2, 0, 4) and seen[-1] == (0, 0)
    x = X.copy()

    def doubles(x, offset):
        x *= 2
        return x

    from_offset(doubles)(x, at)
    assert np.array_equal(x, 2 * X)
    with pytest.raises(ValueError, match="had shape"):
        from_offset(fn)(X, at[None])


# --- Axes ---


@pytest.mark.parametrize("axes, shape, calls", [
    ("bhnd", (1, 2, 3, 4), 1), ("bnhd", (1, 3, 2, 4), 1), ("n(hd)", (3, 8), 1), ("nd", (3, 4), 2), ("(bn)hd", (3, 2, 4), 1), ("dnh", (4, 3, 2), 1), ("(bh)nd", (2, 3, 4), 1),
])  # fmt: skip
def test_axes_in_any_order(axes, shape, calls):
    seen = []

    def fn(x, n):
        seen.append((x.shape, x.flags.c_contiguous))
        x += n
        return 2 * x

    x = X.copy()
    assert (
        np.array_equal(with_axes(fn, axes)(x, 1), 2 * (X + 1))
        and seen == [(shape, True)] * calls
        and np.array_equal(x, X + 1)
    )


def test_shapes_of_x():
    def shapes(x):
        seen = []
        with_axes(lambda x: seen.append(x.shape) or x, "bhnd")(x)
        return seen[0]

    five = np.zeros((2, 3, 4, 5, 6))
    assert (
        shapes(five) == (6, 4, 5, 6)
        and shapes(five[0]) == (3, 4, 5, 6)
        and shapes(five[0, 0]) == (1, 4, 5, 6)
        and shapes(five[0, 0, 0]) == (1, 1, 5, 6)
    )
    view = np.zeros((3, 2, 4)).swapaxes(0, 1)
    seen = []
    with_axes(lambda x: seen.append(x.flags.c_contiguous) or x, "bnhd")(view)
    assert seen == [True]  # which the view is in this order
    apart = np.zeros((2, 3, 8))[..., ::2]
    with_axes(lambda x: seen.append((x.strides[-1], x.flags.c_contiguous)) or x, "bhnd")(apart)
    assert seen[-1] == (8, False)  # features side by side, in a wider array
    for wrong in ("bnh", "bnnd", "xnd", "n(h", "", "bhnd "):
        with pytest.raises(ValueError, match="axes must be n, d and any of b and h, each once"):
            with_axes(len, wrong)
    assert with_axes(lambda x: x, "nd")(np.zeros((0, 3, 4), np.float32)).dtype == np.float32


# --- Programs ---


@pytest.fixture
def program(monkeypatch):
    """Programs that are functions: words -> what they write, or an error."""
    ran = []

    def install(write):
        def run(words, timeout, log):
            log.write_bytes(b"said so\n")
            ran.append((words, timeout))
            write(*words[1:])

        monkeypatch.setattr(module, "_run", run)
        return ran

    return install


def test_programs_get_files(program):
    def double(x, positions, y):
        assert np.load(positions).dtype == np.int64
        np.save(y, 2 * np.load(x))

    ran = program(double)
    assert np.array_equal(from_command([sys.executable, "{x}", "{positions}", "{y}"], timeout=3.0)(X, AT), 2 * X)
    assert ran[0][1] == 3.0 and ran[0][0][0] == sys.executable and ran[0][0][1].endswith("x.npy")
    program(lambda x, positions, y: np.save(y, np.load(x)[0]))
    with pytest.raises(CommandFailed, match="it printed:\nsaid so"):
        from_command(f"{sys.executable} {{x}} {{positions}} {{y}}")(X, AT)


def test_programs_that_hung_are_not_called_again(program):
    def hangs(*words):
        raise CommandFailed("too long") from subprocess.TimeoutExpired("", 1)

    ran = program(hangs)
    fn = from_command([sys.executable, "{x}{positions}{y}"])
    for _ in range(2):
        with pytest.raises(CommandFailed, match="too long"):
            fn(X, AT)
    assert len(ran) == 1

    def fails(*words):
        raise CommandFailed("status 1")

    ran = program(fails)
    fn = from_command([sys.executable, "{x}{positions}{y}"])
    for _ in range(2):
        with pytest.raises(CommandFailed, match="status 1"):
            fn(X, AT)
    assert len(ran) == 3


def test_programs_for_attention(program):
    seen = {}

    def attend(q, k, v, *more):
        seen["options"] = [np.load(one) for one in more[:-1]]
        np.save(more[-1], np.load(q) + 1)

    program(attend)
    fn = from_attention_command(f"{sys.executable} {{q}} {{k}} {{v}} {{mask}} {{segments}} {{o}}")
    assert [*inspect.signature(fn).parameters] == ["q", "k", "v", "mask", "segments"]
    assert np.array_equal(fn(Q, np.ones((2, 1, 5, 4)), np.ones((2, 1, 5, 4))), Q + 1)
    mask, segments = seen["options"]
    assert (
        mask.shape == (2, 1, 3, 5)
        and mask.all()
        and segments.shape == (2, 5)
        and not segments.any()
        and segments.dtype == np.int64
    )
    fn(Q, Q, Q, mask=np.zeros((2, 1, 3, 3), bool))
    assert not seen["options"][0].any()
    turned = from_attention_command(f"{sys.executable} {{q}} {{k}} {{v}} {{positions}} {{o}}", positions=True)
    turned(Q, Q, Q, np.array([[4, 5, 6]] * 2))
    assert seen["options"][0][0].tolist() == [4, 5, 6] and [*inspect.signature(turned).parameters] == [
        "q",
        "k",
        "v",
        "positions",
    ]
    with pytest.raises(ValueError, match="must not have {positions}"):
        from_attention_command(f"{sys.executable} {{q}} {{k}} {{v}} {{positions}} {{o}}")
    with pytest.raises(ValueError, match=r'must say where {o} goes, as in "./my_attention {q} {k} {v} {o}"'):
        from_attention_command(f"{sys.executable} {{q}} {{k}} {{v}}")
    with pytest.raises(ValueError, match="there is no program 'no-such-program' that can be run$"):
        from_command("no-such-program {x} {positions} {y}")
    with pytest.raises(ValueError, match="timeout"):
        from_command("true {x} {positions} {y}", timeout=0)


class Process:
    def __init__(self, status):
        self.status, self.pid, self.killed = status, 2**30, False

    def wait(self, timeout=None):
        if isinstance(self.status, BaseException) and timeout is not None:
            raise self.status
        return self.status

    def kill(self):
        self.killed = True


@pytest.mark.parametrize("status, words", [
    (0, None), (3, "prog ended with status 3; it printed nothing"), (-9, "prog was killed by signal 9; it printed nothing"),
    (subprocess.TimeoutExpired("", 2), "prog took longer than 2 s and was killed; it printed nothing"),
])  # fmt: skip
def test_how_programs_end(status, words, tmp_path, monkeypatch):
    process = Process(status)
    monkeypatch.setattr(module.subprocess, "Popen", lambda *command, **options: process)
    if words is None:
        module._run(["prog"], 2.0, tmp_path / "log")
    else:
        with pytest.raises(CommandFailed) as caught:
            module._run(["prog"], 2.0, tmp_path / "log")
        assert str(caught.value) == words
    assert process.killed is isinstance(status, BaseException)


def test_the_last_lines_of_what_was_printed(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"a" * 2500 + b"end\n\n")
    assert module._tail(log) == "; it printed:\n" + "a" * 1995 + "end"
    log.write_bytes(b" \n")
    assert module._tail(log) == "; it printed nothing"


# --- Names ---


def test_names_of_functions(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import helper\nclass Thing:\n    @staticmethod\n    def method():\n        return helper.X\nnumber = 3\n"
    )
    (tmp_path / "helper.py").write_text("X = 7")
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "needs.py").write_text("import no_such_module_at_all")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    assert load_target("own.py:Thing.method")() == load_target("own:Thing.method")() == 7
    for target, error, words in (
        ("own.py", ValueError, "target must be"), (":f", ValueError, "target must be"), ("own.py:1x", ValueError, "target must be"), ("own.py:number", ValueError, "must be a function, was int"),
        ("own.py:Thing.methot", ValueError, "has no 'Thing.methot': did you mean 'method'?"), ("own.py:zzz", ValueError, "own.py has no 'zzz'"), ("none.py:f", ValueError, "there is no file none.py"),
        ("none:f", ValueError, "there is no module none"), ("bad.py:f", ImportFailed, "bad.py cannot be imported: ZeroDivisionError: division by zero"),
        ("needs:f", ImportFailed, "needs cannot be imported: No module named"), ("exits.py:f", ImportFailed, "exits.py cannot be imported: SystemExit: 3"),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            load_target(target)
        assert words in str(caught.value), target
        assert type(caught.value) is error


def test_a_program_that_cannot_be_started(tmp_path):
    with pytest.raises(CommandFailed, match="no-such-program cannot be started: "):
        module._run([str(tmp_path / "no-such-program")], 1.0, tmp_path / "log")
