"""Kernels as people write them: wrong only in some calls, wrong in a term, or right in an unusual way.

Every candidate here is plain NumPy, written by hand: none is made by the code that has to recognise it.
"""

import pathlib
import re
import warnings

import numpy as np
import pytest
from optional import package
from oracle_cases import turn

import pyrope
from pyrope import Axes, DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rope, YaRN, check_rotation
from pyrope.oracle.adapters import from_offset
from pyrope.oracle.ask import compiling
from pyrope.oracle.probe import Probe
from pyrope.oracle.trials import lengths_in_words, trials

ml_dtypes = package("ml_dtypes")

D, BASE = 64, 10000.0
ROPE = Rope(D, BASE, "half")


def angles(m, d=D, base=BASE):
    return np.asarray(m, np.float64)[..., None] * base ** (-np.arange(0, d, 2) / d)


def right(x, m):
    return turn(x, angles(m))


def consecutive(m):
    return len(m) > 1 and bool((np.diff(m) == 1).all())


# ── Wrong only in some calls ─────────────────────────────────────────────────────────────────────────────────────────


def when(trigger, wrong=lambda x, m: turn(x, angles(np.asarray(m) + 1))):
    return lambda x, m: wrong(x, m) if trigger(x, m) else right(x, m)


def tail_dropped(block):
    """A loop over whole blocks of rows: the rest of the rows is copied."""

    def fn(x, m):
        y, n = x.copy(), x.shape[-2] // block * block if x.shape[-2] >= block else x.shape[-2]
        y[..., :n, :] = right(x[..., :n, :], m[:n])
        return y

    return fn


def contiguous(x, m):
    """Reads the memory of x from its beginning, whatever its strides are."""
    base = x if x.base is None else x.base
    flat = base.reshape(-1) if isinstance(base, np.ndarray) and base.dtype == x.dtype else x.reshape(-1)
    return right(np.resize(flat, x.shape), m)


def int64_positions(x, m):
    """A pointer to int64, whatever the positions are."""
    raw = (
        m if m.dtype == np.int64 and m.flags.c_contiguous else np.resize(np.frombuffer(m.tobytes(), np.int64), m.shape)
    )
    return right(x, np.abs(raw) % 4096)


def from_call(k):
    """Right up to the call before the k-th, then one position too high."""
    calls = []

    def fn(x, m):
        calls.append(None)
        return turn(x, angles(np.asarray(m) + (len(calls) >= k)))

    return fn


def kept_by_its_first_number():
    """Returns the last result again if shape, positions and first number are the same."""
    last = {}

    def fn(x, m):
        key = (x.shape, m.tobytes(), x.ravel()[:1].tobytes())
        if key not in last:
            last.clear()
            last[key] = right(x, m)
        return last[key].copy()

    return fn


TRIGGERS = {
    "a prompt from 0": (lambda: when(lambda x, m: consecutive(m) and m[0] == 0), "consecutive positions wrong"),
    "a prompt from elsewhere": (lambda: when(lambda x, m: consecutive(m) and m[0] > 0), "consecutive positions wrong"),
    "any prompt": (lambda: when(lambda x, m: consecutive(m)), "consecutive positions wrong"),
    "a prompt of 128": (lambda: when(lambda x, m: consecutive(m) and len(m) >= 128), "consecutive positions wrong"),
    **{
        f"{n} rows": (lambda n=n: when(lambda x, m: len(m) == n), "some lengths wrong")
        for n in (2, 11, 16, 17, 33, 63, 64, 99, 100, 128, 129, 160, 200, 255, 300, 512, 600, 640, 1000, 2048)
    },
    "more than 512 rows": (lambda: when(lambda x, m: len(m) > 512), "some lengths wrong"),
    "n = d/2": (lambda: when(lambda x, m: len(m) == x.shape[-1] // 2), "some lengths wrong"),
    "blocks of 16": (lambda: tail_dropped(16), "some lengths wrong"),
    "blocks of 64": (lambda: tail_dropped(64), "some lengths wrong"),
    "blocks of 256": (lambda: tail_dropped(256), "some lengths wrong"),
    "one row": (lambda: when(lambda x, m: len(m) == 1), "one row differs"),
    "falling positions": (lambda: when(lambda x, m: len(m) > 2 and (np.diff(m) == -1).all()), "order of positions matters"),
    "equal positions": (lambda: when(lambda x, m: len(m) == 8 and len(set(m.tolist())) == 1), "order of positions matters"),
    "n heads of n rows": (lambda: when(lambda x, m: x.ndim == 3 and len(x) == len(m) == 8), "heads read as positions"),
    "0 rows": (lambda: when(lambda x, m: not len(m), lambda x, m: x[..., :2]), "some lengths wrong"),
    "32 heads": (lambda: when(lambda x, m: x.ndim == 3 and len(x) == 32), "heads differ"),
    "a batch of four": (lambda: when(lambda x, m: x.ndim == 4 and len(x) == 4), "heads differ"),
    "first and last read": (lambda: when(lambda x, m: len(m) > 2 and m[-1] - m[0] == len(m) - 1,
                                         lambda x, m: turn(x, angles(m[0] + np.arange(len(m))))), "order of positions matters"),
    "strides": (lambda: contiguous, "strides ignored"),
    "read-only": (lambda: when(lambda x, m: not x.flags.writeable), "strides ignored"),
    "not aligned": (lambda: when(lambda x, m: not x.flags.aligned), "strides ignored"),
    "positions as int64": (lambda: int64_positions, "positions misread"),
    "positions 10000 to 10999": (lambda: lambda x, m: turn(x, angles(np.where(np.asarray(m) // 1000 == 10, 9, m))),
                                 "some positions wrong"),
    "more than 2²⁰ numbers": (lambda: when(lambda x, m: x.size > 2**20), "heads differ"),
    "gaps filled": (lambda: when(lambda x, m: len(m) > 1 and (np.diff(m) > 0).all() and not consecutive(m),
                                 lambda x, m: right(x, m[0] + np.arange(len(m)))), "order of positions matters"),
    "from the 51st call on": (lambda: from_call(51), "state between calls"),
    "results kept by a number": (kept_by_its_first_number, "state between calls"),
    "large rows": (lambda: lambda x, m: right(np.clip(x, -1000, 1000), m), "not linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRIGGERS)
def test_what_is_wrong_only_in_some_calls_is_caught_and_named(name):
    make, fault = TRIGGERS[name]
    report = check_rotation(make(), ROPE)
    assert fault in report.faults, report
    assert len(report.findings) <= 2 and max(map(len, str(report).splitlines())) <= 80


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_triggers_show_in_every_dtype(dtype):
    for name in ("any prompt", "255 rows", "blocks of 64"):
        make, fault = TRIGGERS[name]
        assert check_rotation(make(), ROPE, dtype=dtype).faults == (fault,), name


def test_a_trigger_beside_another_mistake_is_named_too():
    """A wrong base everywhere, and one position more where a prompt is rotated."""

    def fn(x, m):
        return turn(x, angles(np.asarray(m) + consecutive(m), base=500000.0))

    assert check_rotation(fn, ROPE).faults == ("wrong base", "consecutive positions wrong")


def test_the_evidence_says_which_calls_and_where():
    evidence = check_rotation(when(lambda x, m: len(m) == 256), ROPE).findings[0].evidence
    assert "wrong: 256 rows" in evidence and "right: 1 row," in evidence
    assert "head 0, row " in evidence and "expected" in evidence and "got" in evidence


def test_the_evidence_says_by_which_rule_lengths_are_wrong():
    assert lengths_in_words({48, 96, 144}, {1, 47, 49, 100, 16, 24}) == "; so the multiples of 48 are wrong"
    assert lengths_in_words({49, 50, 97, 64, 72}, {1, 48, 96, 144}) == "; so above 48 only multiples of 48 are right"
    assert lengths_in_words({9, 10, 11}, {1, 8}) == "; so all are right up to 8, and wrong from 9 on"
    assert lengths_in_words({1, 2, 3}, {4, 8}) == "; so all are wrong up to 3, and right from 4 on"
    assert (
        lengths_in_words({7, 8, 9}, {6, 10, 11})
        == lengths_in_words({1}, {2})
        == lengths_in_words({1, 2, 3}, set())
        == ""
    )
    assert "so above 48 only multiples of 48 are right" in check_rotation(tail_dropped(48), ROPE).findings[0].evidence


def test_the_evidence_says_which_heads_differ():
    def fn(x, m):
        y = right(x, m)
        if x.ndim > 2:
            y[..., 2:3, :, :] = x[..., 2:3, :, :]
        return y

    evidence = check_rotation(fn, ROPE).findings[0].evidence
    assert "first at head 2, row 0, feature 0: " in evidence and "heads that differ: 2" in evidence


@pytest.mark.parametrize("misread", [lambda m: m[:1], lambda m: np.roll(m, 1, 0)])
def test_positions_for_each_row_of_a_batch_are_judged_where_they_are_claimed(misread):
    """Those of row 0, or of another row. Without a claim (b, n) is not asked: to some it means axes."""

    def fn(x, m):
        return right(x, m) if m.ndim == 1 else turn(x, angles(misread(m.reshape(len(m), -1)))[:, None])

    assert check_rotation(fn, ROPE).verdict == "right"
    assert check_rotation(fn, ROPE, batched=True).faults == ("positions of a batch misread",)


def test_positions_for_each_row_of_a_batch_are_right_where_they_are_taken():
    def fn(x, m):
        return turn(x, angles(m)[:, None] if m.ndim == 2 else angles(m))

    taken = check_rotation(fn, ROPE, batched=True)
    assert taken.verdict == "right" and not taken.notes
    refused = check_rotation(lambda x, m: turn(x, angles(m.reshape(len(m)))), ROPE, batched=True)
    assert refused.verdict == "not judged" and "(b, 1, n), which batched= claims: it raises" in refused.failure.reason
    assert check_rotation(lambda x, m: turn(x, angles(m.reshape(len(m)))), ROPE).verdict == "right"
    axes = Rope(D, BASE, "half", axes=Axes("sections", (8, 12, 12)))
    assert check_rotation(lambda x, m: pyrope.rotate(x, m, axes), axes, batched=True).verdict == "right"
    one = check_rotation(lambda x, m: pyrope.rotate(x, m if m.ndim == 2 else m[:, 0], axes), axes, batched=True)
    assert one.faults == ("positions of a batch misread",) and "positions of row 0" in one.findings[0].evidence


def test_few_shapes_are_tried_where_each_is_compiled():
    shapes = set()

    def fn(x, m):
        shapes.add(x.shape)
        return right(x, m)

    report = check_rotation(compiling(fn), ROPE)
    assert report.verdict == "right" and len(shapes) < 30 and "each new shape is compiled" in report.notes[0]
    assert check_rotation(compiling(when(lambda x, m: len(m) == 129)), ROPE).faults == ("some lengths wrong",)
    assert not any("compiled" in note for note in check_rotation(right, ROPE).notes)


def test_slow_candidates_are_tried_with_the_usual_lengths(monkeypatch):
    from pyrope.oracle import trials as module

    monkeypatch.setattr(module, "PATIENCE", -1.0)
    report = check_rotation(when(lambda x, m: len(m) == 100), ROPE)
    assert report.verdict == "right" and any("its calls are slow" in note for note in report.notes)
    assert check_rotation(when(lambda x, m: len(m) == 128), ROPE).faults == ("some lengths wrong",)


def test_a_call_that_is_wrong_once_is_state():
    calls = [0]

    def fn(x, m):
        calls[0] += 1
        return turn(x, angles(np.asarray(m) + (calls[0] % 50 == 0)))

    report = check_rotation(fn, ROPE)
    assert (
        report.faults == ("state between calls",) and "once more, all outputs are right" in report.findings[0].evidence
    )


def test_a_result_that_a_later_call_overwrites():
    kept = {}

    def fn(x, m):
        out = kept.setdefault((x.shape, x.dtype), np.empty_like(x))
        out[...] = right(x, m)
        return out

    assert check_rotation(fn, ROPE).faults == ("result overwritten",)


def test_memory_that_is_not_written():
    def fn(x, m):
        out = np.empty(x.shape, x.dtype)
        out[..., :32] = turn(x[..., :32], angles(m, 32))
        return out  # the other half is what stood there

    assert "output not written" in check_rotation(fn, Rope(D, BASE, "half", 32)).faults


def test_calls_of_seven_rows_stand_for_a_candidate_that_fails_in_long_ones():
    report = check_rotation(when(lambda x, m: len(m) > 60), Rope(D, BASE, "half"))
    assert report.faults == ("some lengths wrong",) and report.precision is not None


def test_what_is_not_taken_is_a_note_not_a_fault():
    def fn(x, m):
        if x.shape[-2] > 256 or m.dtype != np.int64 or not x.flags.writeable:
            raise ValueError("not taken")
        return right(x, m)

    report = check_rotation(fn, ROPE)
    assert report.verdict == "right" and any("not t" in note for note in report.notes)


# ── Right, in unusual ways ───────────────────────────────────────────────────────────────────────────────────────────


def reduced(x, m):
    """The angle modulo a turn in float64, then in float32."""
    return turn(x, np.mod(angles(m), 2 * np.pi).astype(np.float32))


def fixed_point(x, m):
    """Tables in steps of 2⁻²²."""
    cos, sin = (np.rint(t * 2**22) / 2**22 for t in (np.cos(angles(m)), np.sin(angles(m))))
    a, b = x[..., :32], x[..., 32:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1).astype(x.dtype)


def by_timescale(x, m):
    """Divides by a timescale, and rounds the angle otherwise in a call of one row, as a compiler may."""
    scale = np.float32(BASE) ** (np.arange(0, D, 2, dtype=np.float32) / np.float32(D))
    position = np.asarray(m, np.float32)[:, None]
    return turn(x, (position / scale if len(m) > 1 else position * (1 / scale)).astype(np.float64))


def ggml(x, m, d=D, base=BASE):
    """Each angle is the one before times a ratio, in float32."""
    angle, ratio = np.empty((len(m), d // 2), np.float32), np.float32(base) ** np.float32(-2.0 / d)
    angle[:, 0] = m
    for i in range(1, d // 2):
        angle[:, i] = angle[:, i - 1] * ratio
    return turn(x, angle.astype(np.float64))


@pytest.mark.parametrize("fn", [right, reduced, fixed_point, by_timescale, ggml], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_unusual_ways_are_right(fn, dtype):
    assert check_rotation(fn, ROPE, dtype=dtype).verdict == "right"


def test_the_recurrence_of_ggml_has_its_own_name():
    """A note where it is about as good as a float32 angle; never another base."""
    for d, base in ((64, BASE), (128, BASE), (128, 5e5)):
        report = check_rotation(lambda x, m, d=d, base=base: ggml(x, m, d, base), Rope(d, base, "half"))
        assert report.verdict == "right" and any("ggml" in note for note in report.notes), report
    strict = check_rotation(ggml, ROPE, grade="rounded once")
    assert strict.faults == ("coarser than asked",)


@pytest.mark.parametrize("rope", [
    Rope(D, BASE, "half", scaling=DynamicNTK(2.0, 4096, 8192)),
    Rope(D, BASE, "interleaved", scaling=LongRoPE([1.0] * 32, [4.0] * 32, 8.0, 4096, length=8192)),
    Rope(D, 1e6, "half", axes=Axes("sections", (8, 12, 12))), Rope(D, BASE, "half", 16, "suffix"),
    Rope(D, 5e5, "interleaved-to-half", scaling=Llama3(8.0, 1.0, 4.0, 8192)), Rope(2, BASE, "half"),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("max_position", [None, 1, 6, 100])
def test_the_trials_accuse_nobody(rope, max_position):
    if max_position is None or not isinstance(rope.scaling, DynamicNTK | LongRoPE):
        report = check_rotation(lambda x, m: pyrope.rotate(x, m, rope), rope, max_position=max_position)
        assert report.verdict == "right", report


def test_a_table_by_the_largest_position_of_a_call_is_right_for_a_rope_that_depends_on_it():
    """As transformers has it: dynamic NTK by the largest position of each call."""
    rope = Rope(D, BASE, "half", scaling=DynamicNTK(2.0, 4096))
    fn = lambda x, m: pyrope.rotate(x, m, rope.at(max(int(np.max(m)) + 1, 1)))  # noqa: E731
    assert check_rotation(fn, rope.at(16384)).verdict == "right"


def test_trials_stay_within_the_positions_that_are_allowed():
    for top in (1, 5, 40, 131071):
        probe = Probe(right, D, np.float32, top)
        some = [t.positions for t in trials(probe, False) if t.positions.size]
        assert all(at.min() >= 0 and at.max() <= top for at in some)
        assert all(t.positions.max() == top for t in trials(probe, True))
    shapes = [t.x.shape for t in trials(Probe(right, D, np.float32, None), False, compiled=True)]
    assert len(set(shapes)) < 16, "each new shape is compiled anew in JAX"


# ── Names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def halves(x):
    return x[..., : D // 2].astype(float), x[..., D // 2 :].astype(float)


def term(first, second):
    """The two outputs by the formulas given."""

    def fn(x, m):
        (a, b), cos, sin = halves(x), np.cos(angles(m)), np.sin(angles(m))
        return np.concatenate((first(a, b, cos, sin), second(a, b, cos, sin)), axis=-1).astype(x.dtype)

    return fn


def one(a, b, cos, sin):
    return a * cos - b * sin


def two(a, b, cos, sin):
    return b * cos + a * sin


def in_place(x, m):
    y, cos, sin = x.astype(float), np.cos(angles(m)), np.sin(angles(m))
    a, b = y[..., :32], y[..., 32:]
    a[...] = a * cos - b * sin
    b[...] = b * cos + a * sin  # a is the new one
    return y.astype(x.dtype)


def rest_zeroed(x, m):
    y = np.zeros_like(x)
    y[..., :32] = turn(x[..., :32], angles(m, 32))
    return y


def ntk(stretch):
    """Dynamic NTK with the base stretched by this function of s and N/L."""
    base = BASE * stretch(2.0, 4.0)
    return lambda x, m: turn(x, angles(m, base=base))


def of_each_call(theta):
    """A table that is made for each call, by its largest position."""

    def fn(x, m):
        angles = m[:, None] * theta(int(m.max(initial=0)))
        a, b = x[..., : D // 2].astype(float), x[..., D // 2 :].astype(float)
        c, s = np.cos(angles), np.sin(angles)
        return np.concatenate((a * c - b * s, b * c + a * s), axis=-1).astype(x.dtype)

    return fn


def listed(switch):
    long, plain = 1 + np.arange(D // 2) / 8, BASE ** (-np.arange(D // 2) / (D // 2))
    return of_each_call(lambda last: plain / (long if switch(last) else 1))


def stretched(length):
    def theta(last):
        base = BASE * (2.0 * length(last) / 4096 - 1) ** (D / (D - 2))
        return base ** (-np.arange(D // 2) / (D // 2))

    return of_each_call(theta)


LENGTHS_OF_CALLS = {
    "LongRoPE": (listed(lambda last: last + 1 > 4096), ""),
    "LongRoPE, >=": (listed(lambda last: last + 1 >= 4096), "of length 4096: it has the Θ of length 4097, so the length is compared by >="),
    "LongRoPE, the position": (listed(lambda last: last > 4096), "of length 4097: it has the Θ of length 4096, so the largest position is"),
    "LongRoPE from half the length on": (listed(lambda last: last > 1000), "a call up to position 2047, of length 2048: first at"),
    "NTK": (stretched(lambda last: max(last + 1, 4096)), ""),
    "NTK, one more to begin with": (stretched(lambda last: 4096 if last < 4097 else last + 1), "of length 4097: it has the Θ of length 4096"),
    "NTK that shrinks": (stretched(lambda last: max(last + 1, 3000)), "a call up to position 2047, of length 2048: first at"),
}  # fmt: skip


@pytest.mark.parametrize("case", LENGTHS_OF_CALLS)
def test_the_length_at_which_a_rope_changes(case):
    fn, words = LENGTHS_OF_CALLS[case]
    lists = LongRoPE([1.0] * 32, [1 + i / 8 for i in range(32)], 8.0, 4096, attention_factor=1.0)
    rope = Rope(D, BASE, "half", scaling=DynamicNTK(2.0, 4096) if case.startswith("NTK") else lists)
    found = check_rotation(fn, rope.at(8192))
    assert any("and some near the original one" in note for note in found.notes)
    if words:
        (finding,) = found.findings
        assert finding.fault == "switch at another length" and words in finding.evidence
    else:
        assert found.verdict == "right"


NTK = Rope(D, BASE, "half", scaling=DynamicNTK(2.0, 4096, 16384))
YARN = Rope(D, BASE, "half", scaling=YaRN(8.0, 4096, attention_factor=1.0))
POWER = D / (D - 2)


def yarn_inverted(x, m):
    i, w = np.arange(32), BASE ** (-np.arange(32) / 32)
    low, high = (D * np.log(4096 / (2 * np.pi * beta)) / (2 * np.log(BASE)) for beta in (32, 1))
    ramp = np.clip((i - np.floor(low)) / (np.ceil(high) - np.floor(low)), 0, 1)
    return turn(x, np.asarray(m)[:, None] * (w * (ramp + (1 - ramp) / 8)))


LLAMA = Rope(D, 5e5, "half", scaling=Llama3(8.0, 1.0, 4.0, 8192))
LONG = Rope(D, BASE, "half", scaling=LongRoPE([1.0] * 32, [1 + i / 8 for i in range(32)], 8.0, 4096, length=8192))


def llama3(low, high, blend=lambda t: t, slow=1 / 8):
    """As the checkpoints' code has it: a choice between three cases."""
    w = 5e5 ** (-np.arange(0, D, 2) / D)
    wavelength = 2 * np.pi / w
    t = blend((8192 / wavelength - low) / (high - low))
    between = (1 - t) * w * slow + t * w
    theta = np.where(wavelength < 8192 / high, w, np.where(wavelength > 8192 / low, w * slow, between))
    return lambda x, m: turn(x, np.asarray(m)[:, None] * theta)


NAMES = {
    "llama3 exchanged": (llama3(4.0, 1.0), LLAMA, "llama3 low and high swapped"),
    "llama3 blended the wrong way": (llama3(1.0, 4.0, lambda t: 1 - t), LLAMA, "ramp inverted"),
    "⌊m/4⌋": (lambda x, m: turn(x, angles(np.asarray(m) // 4)), Rope(D, BASE, "half", scaling=Linear(4.0)),
              "positions divided in integers"),
    "m/4 rounded": (lambda x, m: turn(x, angles(np.rint(np.asarray(m) / 4))), Rope(D, BASE, "half", scaling=Linear(4.0)),
                    "positions divided in integers"),
    "YaRN with half the factor": (
        lambda x, m: (1.2079441541679836 * turn(x, np.asarray(m)[:, None] * pyrope.frequencies(YARN))).astype(x.dtype),
        Rope(D, BASE, "half", scaling=YaRN(16.0, 4096)), "another factor"),
    "LongRoPE multiplied": (
        lambda x, m: (turn(x, angles(m) * (1 + np.arange(32) / 8)) * LONG.attention_factor).astype(x.dtype), LONG,
        "LongRoPE factors inverted"),
    "linear for YaRN": (
        lambda x, m: (turn(x, angles(m) / 8) * 1.25).astype(x.dtype),
        Rope(D, BASE, "half", scaling=YaRN(8.0, 4096, attention_factor=1.25)), "linear scaling instead"),
    **{f"positions {name}": (lambda x, m, used=used: right(x, used(m)), ROPE, "another row's position") for name, used in {
        "in reverse": lambda m: m[::-1], "sorted": np.sort, "of the row before": lambda m: np.roll(m, 1),
        "of the last row": lambda m: np.full_like(m, m[-1]), "counted back": lambda m: m - m[-1],
        "ranked": lambda m: np.searchsorted(np.unique(m), m)}.items()},
    "the least position lost": (lambda x, m: right(x, m - m.min()), ROPE, "first position taken as 0"),
    "odd positions rounded": (lambda x, m: right(x, np.asarray(m) // 2 * 2), ROPE, "some positions wrong"),
    "a vector's tail": (lambda x, m: turn(x, angles(m) * (np.arange(32) < 24)), ROPE, "some pairs not turned"),
    "not inverted": (lambda x, m: turn(x, np.asarray(m)[:, None] / angles(1)), ROPE, "frequencies not inverted"),
    "a quotient of integers": (lambda x, m: turn(x, np.asarray(m)[:, None] * np.ones(32)), ROPE, "exponent in integers"),
    "1, 3, 5, … for 2i": (lambda x, m: turn(x, angles(m) * BASE ** (-1 / D)), ROPE, "index counted from 1"),
    "to degrees": (lambda x, m: turn(x, np.degrees(angles(m))), ROPE, "degrees"),
    "llama3 twice": (lambda x, m: turn(x, np.asarray(m)[:, None] * pyrope.frequencies(LLAMA) ** 2 / angles(1, base=5e5)),
                     LLAMA, "rescaling applied twice"),
    "llama3 times the factor": (llama3(1.0, 4.0, slow=8.0), LLAMA, "rescaling inverted"),
    "wavelengths of llama3 blended": (llama3(1.0, 4.0, lambda t: 1 / (8 - 7 * t) * 8 / 7 - 1 / 7), LLAMA,
                                      "wavelengths blended"),
    "attention factor on the cosine": (
        lambda x, m: term(lambda a, b, c, s: 1.25 * a * c - b * s, lambda a, b, c, s: 1.25 * b * c + a * s)(x, m),
        Rope(D, BASE, "half", scaling=YaRN(1.0, 4096, attention_factor=1.25)), "attention factor in part"),
    "attention factor on the whole head": (
        lambda x, m: (1.25 * np.concatenate((turn(x[..., :32], angles(m, 32)), x[..., 32:]), -1)).astype(x.dtype),
        Rope(D, BASE, "half", 32, scaling=YaRN(1.0, 4096, attention_factor=1.25)), "attention factor in part"),
    **{f"a proportional rope, {name}": (
        lambda x, m, theta=theta: turn(x, np.asarray(m)[:, None] * theta), Rope(D, BASE, "half", scaling=Proportional(0.25)),
        fault) for name, theta, fault in (
            ("its exponent over what turns", np.where(np.arange(32) < 8, BASE ** (-np.arange(32) / 8), 0),
             "exponent over another width"),
            ("twice as many pairs", np.where(np.arange(32) < 16, angles(1), 0), "another rotary width"))},
    "a base that is nearly right": (lambda x, m: turn(x, angles(m, base=100000.4)), Rope(D, 1e5, "half"), "wrong base"),
    "sign in the second half": (term(one, lambda a, b, c, s: b * c - a * s), ROPE, "wrong term in the pairs"),
    "sign in the first half": (term(lambda a, b, c, s: a * c + b * s, two), ROPE, "sign missing"),
    "sine lost in one half": (term(one, lambda a, b, c, s: b * c), ROPE, "wrong term in the pairs"),
    "cosine lost in one half": (term(lambda a, b, c, s: -b * s, two), ROPE, "wrong term in the pairs"),
    "cosine lost": (term(one, lambda a, b, c, s: b + a * s), ROPE, "wrong term in the pairs"),
    "minus on a cosine": (term(one, lambda a, b, c, s: a * s - b * c), ROPE, "wrong term in the pairs"),
    "in place": (in_place, ROPE, "in-place aliasing"),
    "rest zeroed": (rest_zeroed, Rope(D, BASE, "half", 32), "rest zeroed"),
    "zeros": (lambda x, m: np.zeros_like(x), ROPE, "zeros returned"),
    "times 2π": (lambda x, m: turn(x, 2 * np.pi * angles(m)), ROPE, "frequencies times 2π"),
    "times π": (lambda x, m: turn(x, np.pi * angles(m)), ROPE, "frequencies times 2π"),
    "x in float16": (lambda x, m: right(x.astype(np.float16).astype(x.dtype), m), ROPE, "float16 input"),
    "x in bfloat16": (lambda x, m: right(x.astype(ml_dtypes.bfloat16).astype(x.dtype), m), ROPE, "bfloat16 input"),
    "40 of 64 features": (
        lambda x, m: np.concatenate((turn(x[..., :40], angles(m, 40)), x[..., 40:]), -1), ROPE, "another rotary width"),
    "NTK without − (s − 1)": (ntk(lambda s, n: (s * n) ** POWER), NTK, "dynamic NTK formula"),
    "NTK for one token more": (ntk(lambda s, n: (s * 16385 / 4096 - s + 1) ** POWER), NTK, "dynamic NTK formula"),
    "NTK without the factor": (ntk(lambda s, n: n**POWER), NTK, "dynamic NTK formula"),
    "NTK by the factor alone": (ntk(lambda s, n: s**POWER), NTK, "dynamic NTK formula"),
    "NTK with the exponent upside down": (ntk(lambda s, n: (s * n - s + 1) ** (1 / POWER)), NTK, "dynamic NTK formula"),
    "NTK without its exponent": (ntk(lambda s, n: s * n - s + 1), NTK, "NTK exponent missing"),
    "YaRN inverted": (yarn_inverted, YARN, "ramp inverted"),
    "sine by a root": (
        term(lambda a, b, c, s: a * c - b * np.sqrt(1 - c * c), lambda a, b, c, s: b * c + a * np.sqrt(1 - c * c)), ROPE,
        "sign of the sine lost"),
    "1/√d folded in": (lambda x, m: (right(x, m) / np.sqrt(D)).astype(x.dtype), ROPE, "softmax scale folded in"),
    "an offset lost": (lambda x, m: right(x, np.asarray(m) - m[0]), ROPE, "first position taken as 0"),
    "4i/d": (lambda x, m: turn(x, angles(m, base=BASE**2)), ROPE, "exponent doubled"),
    "over the width of the model": (lambda x, m: turn(x, angles(m, base=BASE ** (D / 512))), ROPE,
                                    "exponent over another width"),
    "NTK with d/(d − 1)": (ntk(lambda s, n: (s * n - s + 1) ** (D / (D - 1))), NTK, "dynamic NTK formula"),
    "cosine of the cosine": (
        term(lambda a, b, c, s: a * np.cos(c) - b * np.sin(s), lambda a, b, c, s: b * np.cos(c) + a * np.sin(s)), ROPE,
        "cosine of a cosine"),
    "twice as fast from 2048 on": (
        lambda x, m: turn(x, angles(np.where(np.asarray(m) < 2048, m, 2 * np.asarray(m)))), ROPE,
        "wrong beyond a position"),
    "a proportional rope, all of it": (right, Rope(D, BASE, "half", scaling=Proportional(0.25)), "whole head rotated"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.needs("ml_dtypes")] * ("bfloat16" in name)) for name in NAMES]
)
def test_mistakes_written_by_hand_are_named(name):
    fn, rope, fault = NAMES[name]
    report = check_rotation(fn, rope)
    assert report.faults == (fault,), report
    assert report.findings[0].evidence.strip() and max(map(len, str(report).splitlines())) <= 80


def test_frequencies_that_are_all_one_are_not_low_precision():
    report = check_rotation(lambda x, m: turn(x, np.asarray(m)[:, None] * np.ones(32)), ROPE)
    assert not any("bfloat16" in fault for fault in report.faults) and not report.ok


def test_negative_positions_are_tried_where_they_are_claimed():
    """By a candidate that turns by |m|; one that refuses them gets a note; without a claim nothing is said."""
    fn = lambda x, m: right(x, np.abs(m))  # noqa: E731
    assert check_rotation(fn, ROPE).verdict == "right"
    assert check_rotation(fn, ROPE, min_position=-100).faults == ("negative positions wrong",)
    assert check_rotation(right, ROPE, min_position=-100).verdict == "right"

    def refuses(x, m):
        if min(m) < 0:
            raise ValueError("negative")
        return right(x, m)

    report = check_rotation(refuses, ROPE, min_position=-5)
    assert report.verdict == "right" and any("positions from -5 on: not tried" in note for note in report.notes)
    with pytest.raises(ValueError, match="min_position must be 0, or negative where such positions are taken, was 3"):
        check_rotation(right, ROPE, min_position=3)


@pytest.mark.parametrize("refused", [
    lambda x, m: not x.flags.c_contiguous, lambda x, m: x.strides[-1] != x.itemsize, lambda x, m: not np.isfinite(x).all(),
    lambda x, m: len(set(m.tolist())) < len(m), lambda x, m: len(m) > 100, lambda x, m: x.ndim != 3,
])  # fmt: skip
def test_candidates_that_refuse_some_calls_are_judged_by_the_others(refused):
    def fn(x, m):
        if refused(x, m):
            raise ValueError("not like this")
        return right(x, m)

    report = check_rotation(fn, ROPE)
    assert report.verdict == "right" and report.notes
    wrong = check_rotation(lambda x, m: turn(fn(x, m), angles(np.ones(len(m), int))), ROPE)
    assert not wrong.ok and wrong.verdict == "wrong"


def test_buffers_in_turn_are_overwritten_in_the_end():
    buffers, calls = {}, [0]

    def fn(x, m):
        calls[0] += 1
        ring = buffers.setdefault(x.shape, [np.empty_like(x) for _ in range(3)])
        out = ring[calls[0] % 3]
        out[...] = right(x, m)
        return out

    assert "result overwritten" in check_rotation(fn, ROPE).faults


def test_a_subclass_with_arithmetic_of_its_own_is_read_as_numbers():
    class Odd(np.ndarray):
        def __array_ufunc__(self, *arguments, **options):
            raise RuntimeError("not with me")

    assert check_rotation(lambda x, m: right(x, m).view(Odd), ROPE).verdict == "right"


def test_evidence_of_what_nobody_knows():
    """A factor that grows with the feature: no known mistake. The block of the worst pair is shown beside the right one."""
    report = check_rotation(lambda x, m: right(x, m) * np.linspace(1, 1.3, D).astype(x.dtype), ROPE)
    evidence = report.findings[0].evidence
    assert report.faults == ("unexplained",) and "pair 31 is multiplied with" in evidence and "feature" in evidence


@pytest.mark.parametrize("theta, words", [
    (np.round(BASE ** (-np.arange(32) / 32), 4), "pair 2 turns by 0.5623, 0.5623413 expected, "),
    (np.round(BASE ** (-np.arange(32) / 32), 2), "pair 1 turns by 0.75, 0.7498942 expected, "),
    (BASE ** (-np.r_[0:16, 31:15:-1] / 32), "in another order: pair 16 turns by 0.0001333521, 0.01 expected, "),
    (BASE ** (-np.r_[1, 0, 2:32] / 32), "pair 0 turns by 0.7498942, 1 expected, pair 1 turns by 1, 0.7498942 expected, all"),
], ids=["rounded", "to zero", "in another order", "exchanged"])  # fmt: skip
def test_the_frequencies_that_differ_are_listed(theta, words):
    report = check_rotation(lambda x, m: turn(x, np.asarray(m)[:, None] * theta), ROPE)
    assert report.faults == ("unexplained",) and words in report.findings[0].evidence


def test_numbers_that_differ_are_printed_so_that_they_do():
    """Never "base 100000 instead of 100000"."""
    report = check_rotation(lambda x, m: turn(x, angles(m, base=100000.4)), Rope(D, 100000.0, "half"))
    assert not report.ok and "base 100000 instead of 100000;" not in str(report).replace("\n            ", " ")
    off = check_rotation(lambda x, m: right(x, m) * np.float32(1 + 2e-6), ROPE).findings[0].evidence
    expected, got = re.search(r"expected (\S+), got (\S+);", off).groups()
    assert expected != got and abs(float(got) / float(expected) - 1 - 2e-6) < 1e-6


@pytest.mark.parametrize("fn, rope, words", [
    (lambda x, m: turn(x, angles(m, base=BASE ** (64 / 96))), ROPE, "(exponents over 96 instead of 64 are the same)"),
    (lambda x, m: turn(x, angles(m) / 4), Rope(D, BASE, "half", scaling=Linear(8.0)),
     "(factor 4 instead of 8 is the same)"),
], ids=["width", "factor"])  # fmt: skip
def test_another_mistake_that_looks_the_same_is_told(fn, rope, words):
    assert words in check_rotation(fn, rope).findings[0].evidence


def test_frequencies_that_are_far_off_are_no_phase_of_few_bits():
    theta = angles(1) * np.where(np.arange(32) % 2, 1, 1.5)
    evidence = check_rotation(lambda x, m: turn(x, np.asarray(m)[:, None] * theta), ROPE).findings[0].evidence
    assert "bits" not in evidence and "the frequencies of 16 of 32 pairs are off by" in evidence


def test_features_that_are_wrong_are_told():
    def fn(x, m):
        return np.concatenate((right(x, m)[..., :48], x[..., 48:]), -1)

    assert "in 16 of 64 features, 48 to 63" in check_rotation(fn, ROPE).findings[0].evidence


def test_no_pair_is_shown_where_all_pairs_are_right():
    def fn(x, m):
        return np.concatenate((turn(x[..., :32], angles(m, 32)), 2 * x[..., 32:]), -1)

    evidence = check_rotation(fn, Rope(D, BASE, "half", 32)).findings[0].evidence
    assert "features 32 to 63, which should stay, are multiplied with 2" in evidence and "pair" not in evidence


def test_theta_computed_in_bfloat16_is_known_to_the_check_too():
    narrow = ml_dtypes.bfloat16
    theta = (narrow(1) / np.power(narrow(BASE), np.arange(0, D, 2).astype(narrow) / narrow(D))).astype(float)
    report = check_rotation(lambda x, m: turn(x, np.asarray(m)[:, None] * theta), ROPE)
    assert report.faults == ("bfloat16 inverse frequencies",)


def test_nan_says_from_where_on():
    fn = lambda x, m: np.where((np.asarray(m) >= 5000)[:, None], np.nan, right(x, m)).astype(x.dtype)  # noqa: E731
    report = check_rotation(fn, ROPE)
    assert report.faults == ("not finite",) and "right below position 5000" in report.findings[0].evidence


@pytest.mark.parametrize("m", [0, 5, 77, 1000, 3000, 65536])
def test_one_bad_row_of_a_table_is_named_by_its_position(m):
    report = check_rotation(lambda x, at: turn(x, angles(np.where(np.asarray(at) == m, m + 1, at))), ROPE)
    assert report.faults == ("one position wrong",) and f"first at position {m}," in report.findings[0].evidence
    two = check_rotation(lambda x, at: turn(x, angles(np.where(np.isin(at, [m, m + 2]), 9, at))), ROPE)
    assert "one position wrong" not in two.faults and not two.ok


@pytest.mark.parametrize("theta, words", [
    (angles(1) / 4, "from there on the frequencies are those of base 10000, linear scaling by 4"),
    (angles(1, base=5e5), "from there on the frequencies are those of base 500000"),
])  # fmt: skip
def test_a_table_that_is_grown_by_another_rule_says_by_which(theta, words):
    fn = lambda x, m: turn(x, np.asarray(m)[:, None] * np.where(np.asarray(m)[:, None] < 4096, angles(1), theta))  # noqa: E731
    report = check_rotation(fn, ROPE)
    assert report.faults == ("wrong beyond a position",) and words in report.findings[0].evidence, report


@pytest.mark.parametrize("fn", [
    lambda x, m: apart(x, angles(m, 32)), lambda x, m: apart(x, ggml_angles(m, 32)),
], ids=["power", "recurrence"])  # fmt: skip
def test_partners_in_the_other_half_of_a_partial_head_are_no_recurrence(fn):
    """Pairs (i, i + d/2), where (i, i + r/2) are meant."""
    assert check_rotation(fn, Rope(D, BASE, "half", 32)).faults == ("proportional instead of contiguous",)


def apart(x, angle):
    y, p = x.astype(float), angle.shape[-1]
    a, b = y[..., :p].copy(), y[..., D // 2 : D // 2 + p].copy()
    y[..., :p], y[..., D // 2 : D // 2 + p] = (
        a * np.cos(angle) - b * np.sin(angle),
        a * np.sin(angle) + b * np.cos(angle),
    )
    return y.astype(x.dtype)


def ggml_angles(m, r):
    factors = np.full((len(m), r // 2), BASE ** (-2 / r), np.float32)
    factors[:, 0] = m
    return np.multiply.accumulate(factors, axis=1, dtype=np.float32)


# ── Angles in turns ──────────────────────────────────────────────────────────────────────────────────────────────────


def phase(bits, whole=np.rint):
    """The angle as an integer that wraps at 2^bits for a full turn, added up from position to position."""
    step = whole(angles(1) / (2 * np.pi) * 2.0**bits).astype(np.int64)
    return lambda x, m: turn(x, np.asarray(m)[:, None] * step % 2**bits * (2 * np.pi / 2.0**bits))


def half_turns(x, m, count):
    """As CUDA's sincospi: count is the number of half turns, which it reduces exactly."""
    return turn(x, np.float32(np.pi) * np.fmod(count, 2).astype(np.float32))


@pytest.mark.parametrize("fn", [
    phase(32), phase(32, np.floor), phase(48),
    lambda x, m: half_turns(x, m, np.fmod(angles(m) / np.pi, 2)),  # reduced before it is rounded to float32
    lambda x, m: turn(x, np.fmod(angles(m), 6.283185307)),
], ids=["phase of 32 bits", "truncated", "48 bits", "sincospi of what is reduced", "2π of ten digits"])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_an_angle_error_far_below_that_of_a_float32_angle_is_right(fn, dtype):
    """Also in the first pair, where a float32 angle is exact."""
    assert check_rotation(fn, ROPE, dtype=dtype).verdict == "right"


def test_the_angle_error_of_a_phase_is_right_up_to_one_unit_for_each_position():
    for units, verdict in ((0.98, "right"), (1.1, "wrong")):
        fn = lambda x, m, units=units: turn(x, angles(m) + np.asarray(m)[:, None] * (units * 2 * np.pi / 2**32))  # noqa: E731
        assert check_rotation(fn, ROPE).verdict == verdict


@pytest.mark.parametrize(("fn", "fault", "words"), [
    (lambda x, m: half_turns(x, m, (angles(m) / np.pi).astype(np.float32)), "fast sine", "angle in half turns is rounded"),
    (lambda x, m: half_turns(x, m, np.float32(m)[:, None] * np.float32(angles(1) / np.pi)), "fast sine", "θ/π is rounded"),
    (lambda x, m: turn(x, np.fmod(angles(m), 6.283185)), "2π rounded", "reduced by 6.283185, 2π is"),
    (lambda x, m: turn(x, np.fmod(angles(m), 2 * 3.1416)), "2π rounded", "reduced by 6.2832, 2π is"),
    (lambda x, m: turn(x, np.fmod(np.float32(angles(m)), np.float32(2 * np.pi))), "2π rounded", "reduced by 6.28318548"),
    (phase(30), "unexplained", "the error of the angle grows with the position, by up to"),
    (phase(24), "unexplained", "in fast and slow pairs alike, as that of a phase of 24 bits for a turn"),
])  # fmt: skip
def test_turns_in_too_few_bits_are_told_apart(fn, fault, words):
    report = check_rotation(fn, ROPE)
    assert report.faults == (fault,) and words in report.findings[0].evidence, report


# ── Verdicts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_order_can_be_refused():
    rope, fn = Rope(D, BASE, "interleaved"), lambda x, m: pyrope.rotate(x, m, Rope(D, BASE, "interleaved-to-half"))
    assert check_rotation(fn, rope).verdict == "equivalent" and check_rotation(fn, rope).ok
    report = check_rotation(fn, rope, equivalent="wrong")
    assert report.faults == ("another order of features",) and "written half" in report.findings[0].evidence
    assert check_rotation(right, ROPE, equivalent="wrong").verdict == "right"
    with pytest.raises(ValueError, match="equivalent must be one of 'right', 'wrong', was 'no'"):
        check_rotation(right, ROPE, equivalent="no")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def raising(error):
    def fn(x, m):
        raise error

    return fn


def reshaping(x, m):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy 2.5 deprecates what this candidate does
        x.shape = (-1,)
    return x


@pytest.mark.parametrize(("fn", "reason", "fix"), [
    (raising(ValueError("bad")), r"it raises ValueError \(bad\)", "mend the exception"),
    (raising(IndexError("index 4096 is out of bounds for axis 0")), "out of bounds", "max_position="),
    (raising(SystemExit(3)), r"it raises SystemExit \(3\)", "mend"),
    (raising(GeneratorExit()), "it raises GeneratorExit", "mend"),
    (raising(Unprintable()), "a message that cannot be printed", "mend"),
    (raising(RuntimeError("Found no NVIDIA driver: CUDA is not available")), "CUDA", "run it where its device is"),
    (raising(RuntimeError("Found no NVIDIA driver on your system")), "NVIDIA", "run it where its device is"),
    (raising(MemoryError("Unable to allocate 72.8 TiB for an array with shape (10,)")), "TiB", "memory"),
    (lambda x, m: (x, x), "it returns tuple", r"fn\(…\)\[0\]"), (lambda x, m: None, "it returns nothing", "return"),
    (lambda x, m: x[..., :3], r"it returns shape \(3, 4, 3\)", "with_axes"), (lambda x, m: x.astype(int), "int64", "floats"),
    (lambda q, k, cos, sin: q, "positional argument", "from_cos_sin"), (reshaping, "changes the shape of x", "reshape"),
])  # fmt: skip
def test_what_cannot_be_judged_is_not_called_wrong(fn, reason, fix):
    report = check_rotation(fn, ROPE)
    assert report.verdict == "not judged" and not report.ok and not report.findings
    assert re.search(reason, report.failure.reason) and re.search(fix, report.failure.fix), report.failure
    assert "x of shape (3, 4, 64)" in report.failure.received
    with pytest.raises(pyrope.NotJudged) as caught:
        pyrope.assert_rotation(fn, ROPE)
    assert isinstance(caught.value, AssertionError) and caught.value.__cause__ is caught.value.report.failure.error


def test_the_report_shows_the_frames_of_the_candidate_alone():
    def helper(x):
        return x.no_such_attribute

    report = check_rotation(lambda x, m: helper(x), ROPE)
    frames = "\n".join(report.failure.frames)
    assert "in helper" in frames and "no_such_attribute" in frames and "oracle/ask.py" not in frames
    assert tuple(report.to_dict()["failure"]["frames"]) == tuple(report.failure.frames)


def test_an_error_in_the_search_leaves_the_verdict(monkeypatch):
    from pyrope.oracle import rotation_explainer

    def broken(*arguments):
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(rotation_explainer, "search", broken)
    report = check_rotation(lambda x, m: turn(x, angles(m, base=5e5)), ROPE)
    assert report.faults == ("unexplained",) and any("ZeroDivisionError: inside" in note for note in report.notes)


def test_the_page_has_these_figures():
    text = (pathlib.Path(__file__).parent.parent / "docs/diagnosis.md").read_text()
    assert f"named | {len(TRIGGERS)} of {len(TRIGGERS)} |" in text and f"named | {len(NAMES)} of {len(NAMES)} |" in text


def test_a_candidate_that_is_wrong_everywhere_is_tried_with_fewer_calls():
    """The lengths of every kind are for when it is mended."""

    def counted(base):
        shapes = []

        def fn(x, positions):
            shapes.append(x.shape)
            return turn(x, angles(positions, base=base))

        return fn, shapes

    (fine, all_), (wrong, few) = counted(BASE), counted(5e5)
    assert check_rotation(fine, ROPE).verdict == "right"
    assert check_rotation(wrong, ROPE).faults == ("wrong base",)
    assert len(few) < len(all_) - 200


@pytest.mark.parametrize("rows, shape", [((1,), (3, 1)), ((32,), (2, 32)), (range(16, 9999), (2, 16))])
def test_a_buffer_that_is_reused_for_some_lengths_alone(rows, shape):
    held = {}

    def reuses(x, m):
        if x.shape[-2] not in rows:
            return right(x, m)
        out = held.setdefault(x.shape, np.empty_like(x))
        out[...] = right(x, m)
        return out

    report = check_rotation(reuses, ROPE)
    size = np.prod(shape) * D
    evidence = f"{size} of {size} outputs of an earlier call, of shape {(*shape, D)}, change in later ones"
    assert report.faults == ("result overwritten",) and report.findings[0].evidence == evidence


def test_a_table_kept_by_length_from_a_length_on():
    kept = {}
    report = check_rotation(lambda x, m: right(x, m if len(m) < 32 else kept.setdefault(len(m), m.copy())), ROPE)
    assert report.faults == ("state between calls",)
    words = "the positions of an earlier call of the same length are used again: positions 0 to 31 as in the call of 32"
    assert report.findings[0].evidence.startswith(words)


def test_positions_that_are_counted_from_a_length_on_are_no_state():
    counted = when(lambda x, m: len(m) > 31, lambda x, m: right(x, np.arange(len(m))))
    assert "state between calls" not in check_rotation(counted, ROPE).faults


@pytest.mark.parametrize("error", [ValueError("sequence length exceeds max_position_embeddings"), AssertionError()])
@pytest.mark.parametrize("last", [1, 2, 4095])
def test_positions_that_are_refused_from_one_on(error, last):
    def refuses(x, m):
        if m.max() > last:
            raise error
        return right(x, m)

    fix = f"it takes positions up to {last}, and raises from {last + 1} on: if its table is meant to end there, give "
    assert check_rotation(refuses, ROPE).failure.fix.startswith(f"{fix}max_position={last} (--max-position {last});")
    assert check_rotation(refuses, ROPE, max_position=last).verdict == "right"


def test_what_is_refused_for_another_reason_than_its_position():
    def refuses(x, m):
        raise ValueError("no") if x.shape[-2] > 4 else TimeoutError("it took longer") if m.max() > 9 else MemoryError

    assert "takes positions" not in check_rotation(refuses, ROPE).failure.fix
    assert "takes positions" not in check_rotation(refuses, ROPE, max_position=9).failure.fix
    few = check_rotation(lambda x, m: right(x, m) if x.shape[-2] == 4 else refuses(x, m), ROPE)
    assert few.verdict == "not judged" and "takes positions" not in few.failure.fix


@pytest.mark.parametrize("place, what", [(0, "batch row"), (1, "head")])
def test_batch_rows_and_heads_that_hold_the_result_of_others(place, what):
    def exchanges(x, m):
        y = right(x, m)
        return np.take(y, [0, 2, 1, *range(3, y.shape[place])], place) if x.shape[:-2] == (4, 3) else y

    report = check_rotation(exchanges, ROPE)
    words = f"in x of shape (4, 3, 8, 64), {what} 1 holds the right result of {what} 2; wrong: x of shape (4, 3, 8, 64)"
    assert report.faults == ("heads differ",) and report.findings[0].evidence.startswith(words)


def test_batches_that_are_wrong_otherwise_hold_no_other_result():
    report = check_rotation(when(lambda x, m: x.ndim == 4 and len(x) == 4), ROPE)
    assert report.faults == ("heads differ",) and "holds the right result" not in report.findings[0].evidence


@pytest.mark.parametrize("patience, words", [(1e9, "has {} calls"), (-1.0, "of which {} are made in any case")])
def test_the_number_of_calls_is_what_the_page_says(patience, words, monkeypatch):
    monkeypatch.setattr("pyrope.oracle.trials.PATIENCE", patience)
    calls = []
    assert check_rotation(lambda x, m: calls.append(m) or right(x, m), ROPE).verdict == "right"
    text = (pathlib.Path(__file__).parent.parent / "docs/other-languages.md").read_text()
    assert words.format(len(calls)) in text


def test_an_offset_that_is_ignored():
    report = check_rotation(from_offset(lambda x, offset: right(x, np.arange(x.shape[-2]))), ROPE)
    assert report.faults == ("positions ignored",)
    assert report.findings[0].evidence.startswith("the offset is ignored: positions in a row begin at 0, as in a call")


def test_an_offset_that_is_not_rotated_by_is_another_mistake():
    def short(x, offset):
        return right(x, offset + np.arange(x.shape[-2])) if offset < 4 else x.copy()

    assert "positions ignored" not in check_rotation(from_offset(short), ROPE).faults
