"""In which ways each mistake of attention is tried, by hand: which fields, with which numbers, and where it is none."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from pyrope import DynamicNTK, Rope, YaRN
from pyrope.oracle.attention_faults import ATTENTION, LINEAR, Measurements, other_ropes
from pyrope.oracle.attention_steps import MAPS, REPEATED, SPLITS
from pyrope.oracle.truth import Spec, linear_attention, softmax_attention

ROPE = Rope(16, 10000.0, "half")
PLAIN = Spec(4, 4, 16, True, 0.25)
TURNED = replace(PLAIN, rope=ROPE)


def ways(fault, spec, measured=None, listed=ATTENTION):
    return [dict(change.fields) for change in listed[fault].changes(spec, measured)]


def possible(listed, spec):
    return {name for name, fault in listed.items() if list(fault.changes(spec, None))}


# What a mistake needs, so that it is one.
OF_A_CAP = {
    "softcap missing",
    "softcap without the division",
    "softcap without the factor",
    "softcap before the scale",
    "softcap by clipping",
    "softcap after the mask",
}
OF_CAUSALITY = {"not causal", "causal by blocks", "causal from the top left", "sees the next token", "does not see itself", "finite mask value",
                "mask instead of causality", "cache forgotten"}  # fmt: skip
OF_A_ROPE = {
    "keys not rotated", "queries not rotated", "keys rotated twice", "queries rotated twice", "values rotated", "queries one position off",
    "not rotated", "rotated twice", "wrong pairing", "direction", "wrong base", "positions ignored", "positions modulo a length",
    "table clamped at its end", "half the width rotated", "a quarter of the width rotated",
}  # fmt: skip
OF_A_CACHE = {
    "cache positions restart",
    "cache positions one too high",
    "cached keys rotated again",
    "cached keys not rotated",
    "causal by position",
}
OF_A_WINDOW = {
    "window ignored",
    "window one too wide",
    "window one too narrow",
    "window doubled",
    "window halved",
    "window with sinks",
}
OF_SHARDS = {"positions of the first chunk repeated", "positions local to the rank"}
OF_A_SCALE = {"scale ignored"}  # where it is not 1/√d anyway
SCALES = {"scale missing", "scale applied twice", "scale inverted", "scale of another width", "another scale"}
ALWAYS = {
    *SCALES, "ALiBi added", "last partial block dropped", "empty rows are NaN", "empty rows are uniform", "mask ignored", "mask inverted",
    "mask of another row", "packed sequences see each other", "softmax over queries", "normaliser missing", "softmax overflows",
    "rescaling forgotten", "one more in the denominator", "eps in the denominator", "softmax in low precision", "batch rows mixed",
    "keys and values exchanged", "queries and keys exchanged",
}  # fmt: skip
HEADS = {"heads mixed", "output transposed"}


CONDITIONAL = {
    "heads tiled", "causal by mistake", "whole head rotated", "scaling ignored", "length taken from each call",
}  # fmt: skip


@pytest.mark.parametrize(
    "spec, expected",
    [
        (PLAIN, ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS),
        (replace(PLAIN, causal=False), ALWAYS | HEADS | {"causal by mistake"}),
        (replace(PLAIN, key_heads=2), ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | {"heads tiled"}),
        (replace(PLAIN, key_heads=1), ALWAYS | OF_CAUSALITY | OF_SHARDS | {"output transposed"}),
        (replace(PLAIN, heads=1, key_heads=1), ALWAYS | OF_CAUSALITY | OF_SHARDS),
        (replace(PLAIN, scale=1.0), (ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_SCALE) - {"scale missing", "scale applied twice", "scale inverted"}),
        (replace(PLAIN, softcap=5.0), ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_CAP),
        (replace(PLAIN, window=6), ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_WINDOW),
        (replace(PLAIN, window=3), (ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_WINDOW) - {"window halved"}),
        (replace(PLAIN, window=1), (ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_WINDOW) - {"window halved", "window one too narrow"}),
        (replace(PLAIN, window=6, causal=False), ALWAYS | HEADS | OF_SHARDS | OF_A_WINDOW | {"causal by mistake"}),
        (TURNED, ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_ROPE | OF_A_CACHE),
        (replace(TURNED, causal=False), ALWAYS | HEADS | OF_SHARDS | OF_A_ROPE | {"causal by mistake"}),
        (replace(TURNED, rope=replace(ROPE, rotary_dim=8)), ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_ROPE | OF_A_CACHE | {"whole head rotated"}),
        (replace(TURNED, rope=replace(ROPE, rotary_dim=4)), (ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_ROPE | OF_A_CACHE | {"whole head rotated"}) - {"a quarter of the width rotated"}),
        (replace(TURNED, rope=replace(ROPE, rotary_dim=2)), (ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_ROPE | OF_A_CACHE | {"whole head rotated"}) - {"a quarter of the width rotated", "half the width rotated", "wrong pairing", "wrong base"}),
        (replace(TURNED, rope=replace(ROPE, scaling=YaRN(4.0, 64))), (ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_ROPE | OF_A_CACHE | {"scaling ignored", "attention factor missing", "attention factor not squared"}) - {"half the width rotated", "a quarter of the width rotated"}),
        (replace(TURNED, rope=replace(ROPE, scaling=DynamicNTK(2.0, 64, 128))), (ALWAYS | HEADS | OF_CAUSALITY | OF_SHARDS | OF_A_ROPE | OF_A_CACHE | {"scaling ignored", "length taken from each call"}) - {"half the width rotated", "a quarter of the width rotated"}),
    ],
)  # fmt: skip
def test_which_mistakes_of_softmax_attention_are_possible(spec, expected):
    conditional = set(CONDITIONAL)
    conditional |= {"attention factor missing", "attention factor not squared"}
    listed = (
        ALWAYS
        | HEADS
        | OF_CAUSALITY
        | OF_SHARDS
        | OF_A_SCALE
        | OF_A_CAP
        | OF_A_WINDOW
        | OF_A_ROPE
        | OF_A_CACHE
        | conditional
    )
    assert possible(ATTENTION, spec) & listed == expected and listed <= set(ATTENTION)


LINEAR_ALWAYS = {
    "denominator at least 1", "another feature map", "scaled before the feature map", "normaliser missing", "last partial block dropped",
    "eps in the denominator", "keys and values exchanged", "queries and keys exchanged", "batch rows mixed",
}  # fmt: skip
LINEAR_HEADS = {"normaliser summed over heads", "heads mixed", "output transposed"}
LINEAR_CAUSAL = {
    "normaliser of all keys", "state not reset", "normaliser not kept", "numerator not kept", "state lost between chunks",
    "numerator lost between chunks", "normaliser lost between chunks", "state decays", "causal by position", "not causal",
    "causal by blocks", "does not see itself", "sees the next token", "cache forgotten",
}  # fmt: skip
LINEAR_CACHE = {
    "cache positions restart",
    "cache positions one too high",
    "cached keys rotated again",
    "cached keys not rotated",
}
LINEAR_ROPE = OF_A_ROPE | OF_SHARDS | {"denominator rotated", "rotated before the feature map"}


@pytest.mark.parametrize(
    "spec, expected",
    [
        (TURNED, LINEAR_ALWAYS | LINEAR_HEADS | LINEAR_CAUSAL | LINEAR_CACHE | LINEAR_ROPE),
        (replace(TURNED, causal=False), LINEAR_ALWAYS | LINEAR_HEADS | LINEAR_ROPE | {"causal by mistake"}),
        (replace(TURNED, key_heads=2), LINEAR_ALWAYS | LINEAR_HEADS | LINEAR_CAUSAL | LINEAR_CACHE | LINEAR_ROPE | {"heads tiled"}),
        (replace(TURNED, heads=1, key_heads=1), LINEAR_ALWAYS | LINEAR_CAUSAL | LINEAR_CACHE | LINEAR_ROPE),
        (PLAIN, LINEAR_ALWAYS | LINEAR_HEADS | LINEAR_CAUSAL),
        (replace(TURNED, rope=replace(ROPE, scaling=YaRN(4.0, 64))), (LINEAR_ALWAYS | LINEAR_HEADS | LINEAR_CAUSAL | LINEAR_CACHE | LINEAR_ROPE | {"scaling ignored", "attention factor applied"}) - {"half the width rotated", "a quarter of the width rotated"}),
        (replace(TURNED, rope=replace(ROPE, scaling=DynamicNTK(2.0, 64, 128))), (LINEAR_ALWAYS | LINEAR_HEADS | LINEAR_CAUSAL | LINEAR_CACHE | LINEAR_ROPE | {"scaling ignored", "length taken from each call"}) - {"half the width rotated", "a quarter of the width rotated"}),
    ],
)  # fmt: skip
def test_which_mistakes_of_linear_attention_are_possible(spec, expected):
    conditional = set(CONDITIONAL)
    listed = (
        LINEAR_ALWAYS
        | LINEAR_HEADS
        | LINEAR_CAUSAL
        | LINEAR_CACHE
        | LINEAR_ROPE
        | conditional
        | {"attention factor applied"}
    )
    assert possible(LINEAR, spec) & listed == expected and listed <= set(LINEAR)


def test_scales_by_hand():
    """Over the right one: 16 features, 4 heads over 2."""
    spec = replace(PLAIN, key_heads=2)
    expected = {
        "scale missing": [4.0],
        "scale applied twice": [0.25],
        "scale inverted": [16.0],
        "scale of another width": [0.5, 0.5**0.5, 2**0.5],
    }
    for name, ratios in expected.items():
        assert [fields["scale"] for fields in ways(name, spec)] == pytest.approx(ratios)
    assert ways("scale ignored", replace(spec, scale=1.0)) == [{"scale": 0.25}]
    assert ways("another scale", spec) == [{"scale": 0.83}]
    assert ways("another scale", spec, Measurements(scales=(3.0, 5.0))) == [{"scale": 3.0}, {"scale": 5.0}]
    assert [fields["alibi"] for fields in ways("ALiBi added", spec)] == [1.0, 0.25, -1.0]


def test_windows_by_hand():
    both, past = replace(PLAIN, window=6, causal=False), replace(PLAIN, window=6)
    for name, sizes in (
        ("window one too wide", (1,)),
        ("window one too narrow", (-1,)),
        ("window doubled", (6,)),
        ("window halved", (-3, -2)),
    ):
        assert ways(name, past) == [{"wider": (by, 0)} for by in sizes]
        assert ways(name, both) == [{"wider": side} for by in sizes for side in ((by, by), (by, 0), (0, by))]
    assert ways("window halved", replace(PLAIN, window=4)) == [{"wider": (-2, 0)}]
    assert [fields["sinks"] for fields in ways("window with sinks", past)] == [4, 1, 2, 8]
    assert ways("window ignored", past) == [{"window": "ignored"}]


def test_ropes_by_hand():
    partial = replace(ROPE, rotary_dim=12)
    spec = replace(TURNED, rope=partial)
    for listed in (ATTENTION, LINEAR):
        expected = {
            "whole head rotated": replace(ROPE, rotary_dim=16), "half the width rotated": replace(ROPE, rotary_dim=6),
            "a quarter of the width rotated": replace(ROPE, rotary_dim=2), "wrong pairing": replace(partial, layout="interleaved"),
            "direction": replace(partial, direction=-1), "wrong base": replace(partial, base=500000.0),
        }  # fmt: skip
        for name, rope in expected.items():
            both = [{"rope": rope}, {"key_rope": rope}] if name in ("wrong pairing", "direction") else [{"rope": rope}]
            assert ways(name, spec, listed=listed) == both, name
        other = replace(ROPE, base=7.0)
        assert ways("wrong base", spec, Measurements(ropes=(other,)), listed) == [{"rope": other}]
        mixed = replace(spec, rope=replace(ROPE, layout="interleaved-to-half"))
        assert ways("wrong pairing", mixed, listed=listed) == [{"rope": ROPE}, {"key_rope": ROPE}]
        scaled = replace(spec, rope=replace(ROPE, scaling=YaRN(4.0, 64)))
        assert ways("scaling ignored", scaled, listed=listed) == [{"rope": ROPE}]
        assert ways("queries one position off", spec, listed=listed) == [{"lag": 1}, {"lag": -1}]
        assert ways("rotated twice", spec, listed=listed) == [{"times": 2}]
        for end, name in (("modulo", "positions modulo a length"), ("clamped", "table clamped at its end")):
            lengths = (1024, 16, 32, 64, 100, 128, 256, 500, 512, 1000, 2000, 2048, 3000)
            counted = [{"table": (end, n), "positions": "counted"} for n in (16, 64, 32, 8, 4, 128)]
            tables = [{"table": (end, n)} for n in lengths] + (counted if end == "modulo" else [])
            assert ways(name, spec, listed=listed) == tables
    assert other_ropes(ROPE) == [ROPE, replace(ROPE, layout="interleaved"), replace(ROPE, direction=-1)]
    assert list(other_ropes(None)) == list(other_ropes(replace(ROPE, rotary_dim=2))) == []


def test_blocks_and_chunks_by_hand():
    blocks = [("keys", n) for n in (16, 64, 32, 8, 4, 128)] + [("queries", n) for n in (16, 64, 32, 8, 4, 128)]
    dropped = [{"dropped": block} for block in blocks]
    assert ways("last partial block dropped", TURNED, listed=LINEAR) == dropped
    assert ways("last partial block dropped", TURNED) == dropped + [
        {"dropped": block, "empty": "NaN"} for block in blocks[:6]
    ]
    online = [{"online": (kept, n)} for n in (8, 16, 32, 64, 1, 2, 4, 5, 7, 10) for kept in ("output", "total", "both")]
    assert ways("rescaling forgotten", PLAIN) == online
    for name, lost in (("state lost", "both"), ("numerator lost", "numerator"), ("normaliser lost", "denominator")):
        made = ways(f"{name} between chunks", TURNED, listed=LINEAR)
        assert made == [{"chunk": n, "lost": lost} for n in (64, 16, 32, 128, 192, 256)]
        assert ways(f"{name} between chunks", TURNED, Measurements(chunks=(5,)), LINEAR) == [{"chunk": 5, "lost": lost}]
    assert ways("state decays", TURNED, listed=LINEAR) == [{"decay": 0.97}, {"decay": 0.97, "decaying": "numerator"}]
    assert ways("state decays", TURNED, Measurements(decays=({"decay": 0.5},)), LINEAR) == [{"decay": 0.5}]


def test_shards_by_hand():
    rotated = [{"local": ("rotate",)}, {"local": ("rotate",), "positions": "counted"}]
    masked = [{"local": ("rotate", "mask"), "positions": "counted"}, {"local": ("mask",)}]
    for name, splits in (("positions of the first chunk repeated", REPEATED), ("positions local to the rank", SPLITS)):
        for spec, parts, listed in (
            (TURNED, rotated + masked, ATTENTION), (PLAIN, masked[1:], ATTENTION), (replace(TURNED, causal=False), rotated, ATTENTION),
            (replace(PLAIN, causal=False, window=5), masked[1:], ATTENTION), (TURNED, rotated, LINEAR),
        ):  # fmt: skip
            expected = [
                {"shards": (split, ranks), **way}
                for ranks, split, way in itertools.product((2, 4, 3, 8), splits, parts)
            ]
            assert ways(name, spec, listed=listed) == expected


def test_what_is_added_and_multiplied_by_hand():
    assert ways("eps in the denominator", PLAIN) == [{"added": 0.1}]
    assert ways("eps in the denominator", TURNED, listed=LINEAR) == [{"added": 3.0}]
    for listed in (ATTENTION, LINEAR):
        assert ways("eps in the denominator", TURNED, Measurements(added=(0.25,)), listed) == [{"added": 0.25}]
    scaled = [fields["scaled"] for fields in ways("scaled before the feature map", TURNED, listed=LINEAR)]
    assert scaled == [(0.25, 1.0), (0.5, 0.5), (1.0, 0.25), (0.25, 0.25)]
    assert ways("one more in the denominator", PLAIN) == [{"added": 1.0}, {"sink": True}]
    maps = ways("another feature map", TURNED, listed=LINEAR)
    assert maps == [{"feature_map": name} for name in MAPS if name != "elu+1"] + [
        {"feature_map": name, "nothing": "zeros"} for name in MAPS if name.startswith("relu")]  # fmt: skip


FIELDS = {
    "not causal": [{"causal": False}], "sees the next token": [{"ahead": 1}], "finite mask value": [{"hidden": "added"}],
    "causal from the top left": [{"corner": "top left"}, {"corner": "top left", "empty": "NaN"}],
    "does not see itself": [{"ahead": -1}, {"ahead": -1, "empty": "NaN"}, {"ahead": -1, "hidden": "filled"}],
    "causal by position": [{"causality": "by position"}], "empty rows are NaN": [{"empty": "NaN"}], "empty rows are uniform": [{"hidden": "filled"}],
    "softmax over queries": [{"axis": -2}, {"axis": -2, "empty": "NaN"}], "softmax in low precision": [{"low": True}],
    "normaliser missing": [{"denominator": "missing"}, {"denominator": "missing", "stable": False}],
    "softmax overflows": [{"stable": False}, {"stable": False, "empty": "NaN"}],
    "cache positions restart": [{"cache": "restarted"}, {"cache": "counted"}],
    **{f"mask {name}": [{"mask": how}, {"mask": how, "empty": "NaN"}, {"mask": how, "hidden": "filled"}]
       for name, how in (("inverted", "inverted"), ("instead of causality", "instead"), ("of another row", "first"))},
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_fields_by_hand(name):
    assert ways(name, TURNED) == FIELDS[name]
    assert ATTENTION[name].changes(TURNED, None)[0].note == ", ".join(
        f"{key}={value!r}" for key, value in FIELDS[name][0].items()
    )


def test_mistakes_of_linear_attention_that_differ():
    two_sided = replace(TURNED, causal=False)
    assert (
        ways("causal by mistake", two_sided)
        == ways("causal by mistake", two_sided, listed=LINEAR)
        == [{"causal": True}]
    )
    assert ways("not causal", TURNED, listed=LINEAR) == [{"causal": False}] and ways(
        "sees the next token", TURNED, listed=LINEAR
    ) == [{"ahead": 1}]
    assert ways("does not see itself", TURNED, listed=LINEAR) == [{"ahead": -1}]
    factor = replace(TURNED, rope=replace(ROPE, scaling=YaRN(4.0, 64)))
    assert ways("attention factor applied", factor, listed=LINEAR) == [{"factor": True}]
    assert (ways("attention factor missing", factor), ways("attention factor not squared", factor)) == (
        [{"factor": 0}],
        [{"factor": 1}],
    )


@pytest.mark.parametrize("listed, truth", [(ATTENTION, softmax_attention), (LINEAR, linear_attention)])
def test_a_mistake_is_made_as_a_call_or_step_by_step(listed, truth):
    """Values exchanged with keys: as a function, and as what makes functions with a cache."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 5, 16))
    at = np.arange(5) + np.zeros((2, 1), int)
    fault = listed["keys and values exchanged"]
    expected = truth(TURNED, q, v, k, at)
    np.testing.assert_allclose(fault.make(TURNED)(q, k, v, at), expected, rtol=1e-10, atol=1e-12)
    step = fault.make(TURNED, stepping=True)()
    steps = [step(*(x[:, :, i : i + 1] for x in (q, k, v)), at[:, i : i + 1]) for i in range(5)]
    np.testing.assert_allclose(np.concatenate(steps, axis=2), expected, rtol=1e-10, atol=1e-12)
    late = listed["queries one position off"].make(TURNED, 1)(q, k, v, at)
    assert not np.allclose(late, listed["queries one position off"].make(TURNED)(q, k, v, at))
