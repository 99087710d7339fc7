"""How attention goes wrong: the known mistakes, and the changes of `Steps` or `LinearSteps` that make them.

A mistake that a rotation by itself can have, too, has the name, the cause and the fix that `rotation_faults` gives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from ..theta import LENGTH_DEPENDENT, Rope
from .attention_steps import MAPS, REPEATED, SPLITS, LinearSteps, Steps, candidate, incremental
from .explain import Change, Fault
from .rotation_faults import FAULTS
from .sharding import LOCAL
from .truth import Spec

Fields: TypeAlias = dict[str, Any]  # of Steps or LinearSteps


class Measurements(NamedTuple):
    """What was measured of a candidate, for the mistakes that have a number of their own."""

    scales: tuple[float, ...] = ()  # over the right one
    ropes: tuple[Rope, ...] = ()  # with another base
    chunks: tuple[int, ...] = ()  # lengths after which a state may be lost
    decays: tuple[Fields, ...] = ()
    caps: tuple[float, ...] = ()  # softcaps
    windows: tuple[int, ...] = ()  # that are not meant
    added: tuple[float, ...] = ()  # to the denominator


Ways: TypeAlias = Callable[[Spec, Measurements | None], Iterable[Fields]]  # measurements: None to make the mistake


def _changes(ways: Ways, spec: Spec, measured: Measurements | None = None) -> list[Change]:
    """The ways to make a mistake, each with its fields in words; none where it would change nothing."""
    listed = ways(spec, measured)
    return [Change(", ".join(f"{name}={value!r}" for name, value in fields.items()), fields) for fields in listed]


_IN_WORDS: dict[str, Callable[[Any], str]] = {
    "scale": lambda x: f"a scale {x:.4g} times the expected one",
    "scaled": lambda x: f"q times {x[0]:.4g} and k times {x[1]:.4g} before the map",
    "rope": lambda x: f"{x}",
    "table": lambda x: (
        f"positions {'modulo' if x[0] == 'modulo' else 'cut off at'} {x[1]}" if x[1] else f"positions in {x[0]}"
    ),
    "root": lambda x: f"one over the root of the number of {x}",
    "near": lambda x: f"each query sees the {x} nearest keys alone",
    "shards": lambda x: f"{x[1]} ranks, split: {x[0]}",
    "lag": lambda x: f"queries {x:+d} positions",
    "sinks": lambda x: f"the first {'token' if x == 1 else f'{x} tokens'}",
    "diagonal": lambda x: f"blocks of {x} tokens",
    "dropped": lambda x: f"blocks of {x[1]} {x[0]}",
    "alibi": lambda x: f"slopes times {x:.4g}",
    "added": lambda x: f"{x:.4g} added",
    "online": lambda x: f"blocks of {x[1]} keys; not rescaled: {x[0] if x[0] != 'both' else 'output and total'}",
    "feature_map": lambda x: f"{x}",
    "chunk": lambda x: f"after {x} tokens",
    "decay": lambda x: f"{x:.4g} for each token",
}


def in_words(change: Change) -> str:
    """The numbers and choices of a change; nothing where the name of the mistake says it all."""
    words = [_IN_WORDS[name](value) for name, value in change.fields.items() if name in _IN_WORDS]
    return ", ".join(words) if change.fields else change.note


def _make(right: Steps | LinearSteps, ways: Ways, spec: Spec, variant: int = 0, stepping: bool = False) -> Any:
    """A candidate that makes this mistake, or, with stepping, what makes candidates with a cache."""
    steps = replace(right, **_changes(ways, spec)[variant].fields)
    return incremental(spec, steps) if stepping else candidate(spec, steps)


# ── In which ways ────────────────────────────────────────────────────────────────────────────────────────────────────


def _always(*listed: Fields) -> Ways:
    return lambda spec, measured: listed


def _if(condition: Callable[[Spec], Any], *listed: Fields) -> Ways:
    return lambda spec, measured: listed if condition(spec) else ()


def _measured(fields: Callable[[Any], Fields], numbers: Callable[[Spec, Measurements | None], Iterable[Any]]) -> Ways:
    """With the numbers that were measured, or, to make the mistake, with some."""
    return lambda spec, measured: map(fields, numbers(spec, measured))


def _causal(spec: Spec) -> bool:
    return spec.causal


def _two_sided(spec: Spec) -> bool:
    return not spec.causal


def _softcap(spec: Spec) -> bool:
    return spec.softcap is not None


def _rope(spec: Spec) -> bool:
    return spec.rope is not None


def _factor(spec: Spec) -> bool:
    return spec.rope is not None and spec.rope.attention_factor != 1.0


def _cached_rope(spec: Spec) -> bool:
    return spec.causal and spec.rope is not None


def _grouped(spec: Spec) -> bool:
    return 1 < spec.key_heads < spec.heads


def _scales(*scales: Callable[[Spec], float]) -> Ways:
    """Those of these scales that are not the right one."""

    def ways(spec: Spec, measured: Measurements | None) -> Iterable[Fields]:
        ratios = (scale(spec) / spec.scale for scale in scales)
        return ({"scale": ratio} for ratio in ratios if abs(ratio - 1) > 1e-9)

    return ways


def _windows(*wider: Callable[[int], int]) -> Ways:
    """A window that is wider by so much: to the past, or if not causal on both sides or one of them."""

    def ways(spec: Spec, measured: Measurements | None) -> Iterable[Fields]:
        for by in (by for more in wider if spec.window and (by := more(spec.window)) not in (0, -spec.window)):
            yield from ({"wider": side} for side in ([(by, 0)] if spec.causal else [(by, by), (by, 0), (0, by)]))

    return ways


def _ropes(others: Callable[[Rope], Iterable[Rope]], *which: str) -> Ways:
    """Another rope for queries and keys, or for the keys alone: "key_rope"."""
    fields = which or ("rope",)
    return lambda spec, measured: (
        () if spec.rope is None else ({name: rope} for name in fields for rope in others(spec.rope))
    )


def _other_layout(rope: Rope) -> Sequence[Rope]:
    # Scores do not depend on the order in which both are written: "interleaved-to-half" has those of "interleaved".
    other = "interleaved" if rope.layout.startswith("half") else "half"
    return [replace(rope, layout=other)] if rope.width > 2 else []


def _width(share: Callable[[Rope], int]) -> Ways:
    """So many features, down to an even number; a rescaling may not allow it."""

    def others(rope: Rope) -> Iterable[Rope]:
        r = share(rope) // 2 * 2
        return [replace(rope, rotary_dim=r)] if r not in (0, rope.width) and rope.scaling is None else []

    return _ropes(others)


def _quarter(rope: Rope) -> int:
    """A quarter of the width, unless that is half of it, down to an even number."""
    return rope.width // 4 if rope.width // 4 // 2 != rope.width // 2 // 2 else 0


def _without_scaling(rope: Rope) -> Sequence[Rope]:
    return [] if rope.scaling is None else [replace(rope, scaling=None)]


def _backwards(rope: Rope) -> Sequence[Rope]:
    return [replace(rope, direction=-rope.direction)]


def _other_bases(spec: Spec, measured: Measurements | None) -> Iterable[Rope]:
    if measured is not None:
        return measured.ropes
    return [replace(spec.rope, base=50 * spec.rope.base)] if spec.rope is not None and spec.rope.width > 2 else []


def other_ropes(rope: Rope | None) -> Sequence[Rope]:
    """Those in which another base shows: this one, with the other pairing, and backwards."""
    return [] if rope is None or rope.width == 2 else [rope, *_other_layout(rope), *_backwards(rope)]


def _lost(part: str) -> Ways:
    def ways(spec: Spec, measured: Measurements | None) -> Iterable[Fields]:
        chunks = USUAL_CHUNKS if measured is None else measured.chunks
        return ({"chunk": chunk, "lost": part} for chunk in chunks if spec.causal)

    return ways


def _added(example: float) -> Ways:
    """A small number in the denominator, as it was measured, or, to make the mistake, this one."""
    return _measured(lambda x: {"added": x}, lambda spec, measured: (example,) if measured is None else measured.added)


def _scaled(spec: Spec, measured: Measurements | None) -> Iterable[Fields]:
    d = spec.head_dim
    return [{"scaled": scales} for scales in ((d**-0.5, 1.0), (d**-0.25, d**-0.25), (1.0, d**-0.5), (d**-0.5, d**-0.5))]


_LENGTHS = (16, 32, 64, 100, 128, 256, 500, 512, 1000, 2000, 2048, 3000)
_BLOCKS = (16, 64, 32, 8, 4, 128)


def _tables(end: str) -> Ways:
    """Tables of usual lengths that are too short; what starts again may also be counted, in blocks of its own."""
    counted = [{"table": (end, block), "positions": "counted"} for block in _BLOCKS if end == "modulo"]
    return _if(_rope, *({"table": (end, length)} for length in (1024, *_LENGTHS)), *counted)


_DROPPED: tuple[Fields, ...] = tuple({"dropped": (what, block)} for what in ("keys", "queries") for block in _BLOCKS)
_EMPTY: tuple[Fields, ...] = tuple({"dropped": ("keys", block), "empty": "NaN"} for block in _BLOCKS)
_ONLINE: tuple[Fields, ...] = tuple(
    {"online": (kept, block)} for block in (8, 16, 32, 64, 1, 2, 4, 5, 7, 10) for kept in ("output", "total", "both")
)
USUAL_CHUNKS = (64, 16, 32, 128, 192, 256)


def _split(splits: Sequence[str], *ways: Fields) -> Ways:
    """A row is split among ranks, which rotate or mask by positions of their own, in these ways."""

    def shards(spec: Spec, measured: Measurements | None) -> Iterable[Fields]:
        possible = {"rotate": spec.rope is not None, "mask": spec.causal or spec.window is not None}
        for ranks, split, way in itertools.product((2, 4, 3, 8), splits, ways):
            if all(possible[part] for part in way["local"]):
                yield {"shards": (split, ranks), **way}

    return shards


# A rank takes the first of the positions that are given, or counts from 0, and may mask by what it counts.
_ROTATED: tuple[Fields, ...] = ({"local": ("rotate",)}, {"local": ("rotate",), "positions": "counted"})
_MASKED: tuple[Fields, ...] = ({"local": ("rotate", "mask"), "positions": "counted"}, {"local": ("mask",)})
_BASES = _measured(lambda rope: {"rope": rope}, _other_bases)

# ── The catalogues ───────────────────────────────────────────────────────────────────────────────────────────────────

Rows: TypeAlias = tuple[tuple[str, str, str, str, str, Ways], ...]  # name, step, symptom, cause, fix, ways
SharedRows: TypeAlias = tuple[tuple[str, str, str, Ways], ...]  # name, step, symptom, ways; the rest is said elsewhere


def _catalogue(
    right: Steps | LinearSteps, before: dict[str, Fault], rows: Rows, shared: SharedRows
) -> dict[str, Fault]:
    """The mistakes of these rows; what is shared has its cause and its fix from the catalogues before."""
    listed = [(Fault(name, symptom, cause, fix, step=step), ways) for name, step, symptom, cause, fix, ways in rows]
    listed += [(replace(before[name], symptom=symptom, step=step), ways) for name, step, symptom, ways in shared]
    return {
        fault.name: replace(fault, changes=partial(_changes, ways), make=partial(_make, right, ways))
        for fault, ways in listed
    }


ATTENTION = _catalogue(Steps(), FAULTS | {LOCAL.name: LOCAL}, (
    ("scale missing", "scores", "weights much too sharp", "scores are not divided by √d",
     "multiply q·k by 1/√d before the softmax", _scales(lambda s: 1.0)),
    ("scale applied twice", "scores", "weights too flat", "1/d, or 1/√d both on q and on the scores",
     "scale once; many kernels scale by themselves", _scales(lambda s: s.scale**2)),
    ("scale inverted", "scores", "weights are all or nothing", "multiplied by √d instead of divided",
     "multiply by 1/√d", _scales(lambda s: 1 / s.scale)),
    ("scale of another width", "scores", "weights too flat or too sharp",
     "√ of the model's, the key heads' or half the width instead of √d", "d is the width of one head",
     _scales(lambda s: (s.heads * s.head_dim) ** -0.5, lambda s: (s.key_heads * s.head_dim) ** -0.5,
     lambda s: (s.head_dim / 2) ** -0.5)),
    ("scale by the length", "scores", "weights too sharp in short calls, too flat in long ones",
     "1/√n, n the number of keys or queries, instead of 1/√d", "multiply q·k by 1/√d, d the width of one head",
     _always({"root": "keys"}, {"root": "queries"})),
    ("scale ignored", "scores", "weights too flat or too sharp", "1/√d, though the model has a scale of its own",
     "pass the scale", _scales(lambda s: s.head_dim**-0.5)),
    ("another scale", "scores", "weights too flat or too sharp", "the scale is another number",
     "compare the number given here with the one expected",
     _measured(lambda x: {"scale": x}, lambda spec, measured: (0.83,) if measured is None else measured.scales)),
    ("softcap missing", "scores", "large scores are not bounded", "the option is ignored",
     "scores become c·tanh(score/c)", _if(_softcap, {"softcap": "missing"})),
    ("softcap without the division", "scores", "scores saturate at once", "c·tanh(score) instead of c·tanh(score/c)",
     "divide by c inside", _if(_softcap, {"softcap": "no division"})),
    ("softcap without the factor", "scores", "all scores are within ±1", "tanh(score/c) instead of c·tanh(score/c)",
     "multiply by c outside", _if(_softcap, {"softcap": "no product"})),
    ("softcap before the scale", "scores", "too strong a bound", "q·k is capped, then scaled",
     "scale first, then cap", _if(_softcap, {"softcap": "before scale"})),
    ("softcap by clipping", "scores", "scores beyond the cap are all alike", "min and max instead of tanh",
     "scores become c·tanh(score/c)", _if(_softcap, {"softcap": "clipped"})),
    ("another softcap", "scores", "large scores count too little, or too much",
     "a softcap that the model does not have, or one of another number",
     "compare the number given here with the one expected",
     _measured(lambda x: {"cap": x}, lambda spec, measured: (0.4 * (spec.softcap or 10.0),) if measured is None else
     measured.caps)),
    ("ALiBi added", "scores", "near keys weigh more", "a bias by distance, which the model does not have",
     "leave it out, where there is RoPE or no encoding at all",
     lambda spec, measured: [{"alibi": x} for x in dict.fromkeys((1.0, spec.scale, -1.0))]),
    ("softcap after the mask", "mask", "hidden keys get a weight",
     "tanh(−inf) = −1: what was hidden has the score −c", "cap first, then mask", _if(_softcap,
     {"softcap": "after mask"})),
    ("not causal", "mask", "a token sees those after it",
     "no causal mask, or in linear attention sums over the whole sequence",
     "hide keys after the query; in linear attention, running sums", _if(_causal, {"causal": False})),
    ("causal by mistake", "mask", "a token does not see those after it",
     "a causal mask, or in linear attention running sums, where none belong",
     "leave the mask out; in linear attention, sums over the whole sequence", _if(_two_sided, {"causal": True})),
    ("causal from the top left", "mask", "with a cache, queries see its first keys only",
     "query i sees keys 0 … i of m, though the n queries are the last of the m", "query i sees keys up to i + m − n",
     _if(_causal, {"corner": "top left"}, {"corner": "top left", "empty": "NaN"})),
    ("sees the next token", "mask", "training looks too good",
     "the causal mask is one too wide, j ≤ i + 1, or running sums are shifted by one",
     "j ≤ i; torch.triu needs diagonal=1", _if(_causal, {"ahead": 1})),
    ("does not see itself", "mask", "the first row is empty",
     "the causal mask is one too narrow, j < i, or the output is taken before the state is updated",
     "j ≤ i; torch.tril needs diagonal=0; a state is updated first", _if(_causal, {"ahead": -1},
     {"ahead": -1, "empty": "NaN"}, {"ahead": -1, "hidden": "filled"})),
    ("causal by blocks", "mask", "a token sees those after it, up to the end of its block",
     "blocks of keys are skipped or taken as a whole, and those on the diagonal, or within a chunk, are not masked",
     "mask within the blocks that the diagonal crosses", _if(_causal, *({"diagonal": block} for block in _BLOCKS))),
    ("causal by position", "mask", "packed or padded rows see the wrong tokens",
     "the mask compares positions, which may repeat or start again, instead of the order of the tokens",
     "j ≤ i by the order of the tokens; positions are for the rotation",
     _if(_cached_rope, {"causality": "by position"})),
    ("window not asked for", "mask", "right up to a number of tokens, then distant keys are not seen",
     "a sliding window that is not meant, such as another model's or another layer's",
     "leave the window out, or say window= if it is meant",
     _measured(lambda x: {"near": x}, lambda spec, measured: () if spec.window is not None else
     (9,) if measured is None else measured.windows)),
    ("window ignored", "mask", "all keys are seen", "the option is ignored",
     "hide keys at a distance of window or more", _if(lambda s: s.window is not None, {"window": "ignored"})),
    ("window one too wide", "mask", "one key too many", "distance ≤ window instead of < window",
     "a window of w is the token itself and w − 1 others; some APIs want w − 1", _windows(lambda w: 1)),
    ("window one too narrow", "mask", "one key too few", "distance < window − 1",
     "a window of w is the token itself and w − 1 others", _windows(lambda w: -1)),
    ("window doubled", "mask", "twice as many keys", "w to each side, or w given where an API wants half of it",
     "a window of w is the token itself and w − 1 others", _windows(lambda w: w)),
    ("window halved", "mask", "half of the keys", "w/2 to each side, or w given where an API wants twice of it",
     "a window of w is the token itself and w − 1 others", _windows(lambda w: -(w // 2) if w > 3 else 0,
     lambda w: 1 - (w + 1) // 2 if w > 4 else 0)),
    ("window with sinks", "mask", "the first keys are seen from everywhere",
     "attention sinks (StreamingLLM), which the model does not have", "hide them, too",
     _if(lambda s: s.window is not None, *({"sinks": x} for x in (4, 1, 2, 8)))),
    ("last partial block dropped", "blocks", "wrong or zeros at the end, if the length is no multiple of a block",
     "a loop over n // block blocks", "round the number of blocks up, and mask the last one",
     _always(*_DROPPED, *_EMPTY)),
    ("finite mask value", "mask", "hidden keys get a weight where scores are large",
     "−10000 is added instead of −inf", "use −inf, or a boolean mask", _if(_causal, {"hidden": "added"})),
    ("empty rows are NaN", "softmax", "NaN in rows that see no key, such as padding", "exp(−inf + inf), or 0/0",
     "let such rows be zeros", _always({"empty": "NaN"})),
    ("empty rows are uniform", "softmax", "padding attends to everything",
     "the lowest finite number as mask: all scores are equal", "let such rows be zeros",
     _always({"hidden": "filled"})),
    ("mask ignored", "mask", "padding is seen: padded differs from unpadded", "the mask is not passed on",
     "pass it on", _always({"mask": "ignored"})),
    ("mask inverted", "mask", "only padding is seen", "True means hidden there",
     "True is seen here, as in torch's attention; its key_padding_mask is the opposite", _always({"mask": "inverted"},
     {"mask": "inverted", "empty": "NaN"}, {"mask": "inverted", "hidden": "filled"})),
    ("mask instead of causality", "mask", "where a mask is given, a token sees those after it",
     "the mask that is given takes the place of the causal one", "both must hold: causal & mask",
     _if(_causal, {"mask": "instead"}, {"mask": "instead", "empty": "NaN"}, {"mask": "instead", "hidden": "filled"})),
    ("mask of another row", "mask", "right in the first row of a batch, wrong in those after it",
     "the mask of the first row is read for all", "give each row its own mask, (b, 1, n, m)",
     _always({"mask": "first"}, {"mask": "first", "empty": "NaN"}, {"mask": "first", "hidden": "filled"})),
    ("packed sequences see each other", "mask", "packed differs from separate", "one causal mask over the whole row",
     "hide keys of other segments", _always({"segments": "ignored"})),
    ("softmax over queries", "softmax", "weights of a row do not add up to 1", "the axis is −2",
     "softmax over the keys, axis −1", _always({"axis": -2}, {"axis": -2, "empty": "NaN"})),
    ("normaliser missing", "softmax", "weights do not add up to 1: outputs grow with the length", "no division",
     "divide by the sum of the weights, Σexp or φ(q)ᵀΣφ(k)",
     _always({"denominator": "missing"}, {"denominator": "missing", "stable": False})),
    ("softmax overflows", "softmax", "NaN or zeros where scores are large",
     "exp(score) without the maximum taken off", "subtract the greatest score of the row", _always({"stable": False},
     {"stable": False, "empty": "NaN"})),
    ("rescaling forgotten", "softmax", "wrong where a later block has a greater score",
     "an online softmax whose output, sum or both are not multiplied by exp(old maximum − new maximum)",
     "rescale both when the maximum grows", _always(*_ONLINE)),
    ("one more in the denominator", "softmax", "outputs too small",
     "1 + Σ, or exp(0) beside the scores (softmax1, a sink)", "divide by the sum alone",
     _always({"added": 1.0}, {"sink": True})),
    ("eps in the denominator", "softmax", "outputs a little too small", "a small number is added to the sum",
     "divide by the sum alone; let empty rows be zeros by a condition", _added(0.1)),
    ("softmax in low precision", "softmax", "small weights are lost, noise far above the dtype's",
     "scores, exponentials or their sum in a smaller dtype", "softmax in float32, of float64 in float64",
     _always({"low": True})),
    ("heads tiled", "heads", "grouped heads read the wrong keys", "key heads 0 1 0 1 instead of 0 0 1 1",
     "repeat each key head h/g times in a row: repeat_interleave, not repeat or tile", _if(_grouped,
     {"groups": "tiled"})),
    ("heads mixed", "heads", "a head depends on keys that are not its own",
     "a reshape without a transpose, or one head read for all",
     "split the width into (heads, head_dim), then move the heads forward", _if(lambda s: s.key_heads > 1,
     {"groups": "first"})),
    ("batch rows mixed", "heads", "a row depends on another row",
     "batch and heads folded in the wrong order, or one row or one state read for all", "keep the batch axis first",
     _always({"batch": "first"})),
    ("keys and values exchanged", "heads", "outputs are mixtures of keys, or keys are values",
     "the arguments are in another order, or one buffer is read for both", "q, k, v",
     _always({"exchanged": "kv"}, {"exchanged": "kk"}, {"exchanged": "vv"})),
    ("queries and keys exchanged", "heads", "each token is weighed by the queries of others, not by their keys",
     "the arguments are in another order, or k·qᵀ instead of q·kᵀ", "q, k, v", _always({"exchanged": "qk"})),
    ("output transposed", "output", "right numbers in the wrong places", "(b, n, h, d) where (b, h, n, d) is meant",
     "transpose heads and tokens once", _if(lambda s: s.heads > 1, {"output": "transposed"}, {"output": "reshaped"})),
    ("keys not rotated", "rotation", "scores depend on the query's position alone",
     "only q, or φ(q), is rotated, or the cache holds raw keys", "rotate both", _if(_rope, {"rotated": "q"})),
    ("queries not rotated", "rotation", "scores depend on the key's position alone", "only k, or φ(k), is rotated",
     "rotate both", _if(_rope, {"rotated": "k"})),
    ("keys rotated twice", "rotation", "scores of distance m − 2n",
     "rotated keys are cached, or passed on, and rotated again", "rotate once", _if(_rope, {"rotated": "qkk"})),
    ("queries rotated twice", "rotation", "scores of distance 2m − n",
     "rotated in the model and again in the kernel", "rotate once", _if(_rope, {"rotated": "qqk"})),
    ("length taken from each call", "rotation", "right in calls as long as the rope is meant for",
     "a rope that depends on the length reads it from the largest position of each call",
     "fix the length beforehand: keys in a cache keep their angles", _if(lambda s: s.rope is not None and
     isinstance(s.rope.scaling, LENGTH_DEPENDENT), {"length": "of the call"})),
    ("a quarter of the width rotated", "rotation", "wrong scores from distance 1 on",
     "a rotary width that is a part of the head already is divided again",
     "pass the rotary_dim, or partial_rotary_factor, of the model", _width(_quarter)),
    ("values rotated", "rotation", "turned outputs", "v is rotated, too, or in the place of k",
     "rotate what is compared: q and k, or φ(q) and φ(k)", _if(_rope, {"rotated": "qkv"}, {"rotated": "qv"})),
    ("attention factor not squared", "rotation", "weights too flat", "only q or only k is multiplied with it",
     "cos and sin of both", _if(_factor, {"factor": 1})),
    ("queries one position off", "rotation", "scores of distance m − n ± 1",
     "positions of q begin at 1, or those of k", "one position for the query and the key of a token", _if(_rope,
     {"lag": 1}, {"lag": -1})),
    ("cache forgotten", "cache", "a step sees only itself", "keys and values, or the state, are not kept",
     "append to the cache, or pass the state on", _if(_causal, {"cache": "forgotten"})),
    ("cache positions restart", "cache", "right in the first call, wrong in those after it",
     "each call rotates from position 0 on", "positions go on where the cache ends",
     _if(_cached_rope, {"cache": "restarted"}, {"cache": "counted"})),
    ("cache positions one too high", "cache", "right in the first call, wrong in those after it",
     "the first new token is given position L + 1, not L", "after tokens 0 … L−1 comes L",
     _if(_cached_rope, {"cache": "late"})),
    ("cached keys rotated again", "cache", "right in the first call, wrong in those after it",
     "the cache holds rotated keys, and every call rotates all of it", "rotate new keys only",
     _if(_cached_rope, {"cache": "turned"})),
    ("cached keys not rotated", "cache", "right in the first call, wrong in those after it",
     "the cache holds raw keys, and a call rotates the new ones only", "keep rotated keys, or rotate all in every call",
     _if(_cached_rope, {"cache": "raw"})),
), (
    ("not rotated", "rotation", "positions do not matter", _if(_rope, {"rotated": ""})),
    ("rotated twice", "rotation", "scores as if tokens were twice as far apart", _if(_rope, {"times": 2})),
    ("whole head rotated", "rotation", "wrong scores from distance 1 on", _width(lambda rope: rope.head_dim)),
    ("half the width rotated", "rotation", "wrong scores from distance 1 on", _width(lambda rope: rope.width // 2)),
    ("attention factor missing", "rotation", "weights too flat", _if(_factor, {"factor": 0})),
    ("wrong pairing", "rotation", "wrong scores from distance 1 on", _ropes(_other_layout, "rope", "key_rope")),
    ("direction", "rotation", "scores as if the future were the past", _ropes(_backwards, "rope", "key_rope")),
    ("wrong base", "rotation", "wrong scores, the more the further apart", _BASES),
    ("scaling ignored", "rotation", "wrong scores at long distances", _ropes(_without_scaling)),
    ("positions ignored", "rotation", "right for 0 … n−1 only", _if(_rope, {"positions": "counted"})),
    ("positions of a batch misread", "rotation", "right in the first row of a batch, wrong in those after it",
     _if(_rope, {"positions": "first"})),
    ("positions of the first chunk repeated", "rotation", "right in the first half, wrong in the second",
     _split(REPEATED, *_ROTATED, *_MASKED)),
    ("positions local to the rank", "rotation", "right in the part of the first rank, as if the others began anew",
     _split(SPLITS, *_ROTATED, *_MASKED)),
    ("positions modulo a length", "rotation", "right up to a length, then from the start again", _tables("modulo")),
    ("table clamped at its end", "rotation", "right up to a length, then all at one place", _tables("clamped")),
    ("float16 positions", "rotation", "right up to 2048, wrong from 2049 on", _if(_rope, {"table": ("float16", 0)})),
    ("bfloat16 positions", "rotation", "right up to 256, wrong from 257 on", _if(_rope, {"table": ("bfloat16", 0)})),
))  # fmt: skip

LINEAR = _catalogue(LinearSteps(), FAULTS | ATTENTION, (
    ("denominator rotated", "normaliser", "outputs explode where it is near zero",
     "one rotated similarity for both sums", "the denominator of Eq. (19) is φ(q)ᵀφ(k), not rotated",
     _if(_rope, {"denominator": "rotated"})),
    ("rotated before the feature map", "rotation", "outputs change when all positions are shifted",
     "φ(R q) instead of R φ(q)", "map first, then rotate", _if(_rope, {"order": "rotation first"})),
    ("attention factor applied", "rotation", "outputs a² times too large", "the tables of softmax attention are used",
     "Eq. (19) needs the rotation alone", _if(_factor, {"factor": True})),
    ("denominator at least 1", "normaliser", "outputs too small where features are small",
     "max(Σ, 1) is divided by, as in RetNet", "divide by the sum alone", _always({"denominator": "at least 1"})),
    ("normaliser summed over heads", "normaliser", "outputs too small by about the number of heads",
     "a sum over one axis too many", "each head has its own", _if(lambda s: s.heads > 1,
     {"denominator": "over heads"})),
    ("normaliser of all keys", "normaliser", "early outputs too small", "Σφ(k) over the whole sequence",
     "sum the keys seen so far", _if(_causal, {"denominator": "of all keys"})),
    ("another feature map", "features", "other weights", "relu, exp or another map is used",
     "use the map of the model",
     lambda spec, measured: [
         {"feature_map": name, **more} for more in ({}, {"nothing": "zeros"}) for name in MAPS
         if name != spec.feature_map and (not more or name.startswith("relu"))
     ]),
    ("scaled before the feature map", "features", "other weights", "q, or k, times 1/√d as for a softmax",
     "leave it out: the normaliser does what it is for", _scaled),
    ("state not reset", "state", "right in the first row of a batch, wrong in those after it",
     "a row begins with the state of the one before", "zeros for each sequence", _if(_causal,
     {"batch": "after another"})),
    ("normaliser not kept", "cache", "right in the first call, outputs too large in those after it",
     "a step keeps S and counts z anew", "carry z = Σ φ(k) too", _if(_causal, {"cache": "denominator"})),
    ("numerator not kept", "cache", "right in the first call, outputs too small in those after it",
     "a step keeps z and counts S anew", "carry S = Σ R φ(k) vᵀ too", _if(_causal, {"cache": "numerator"})),
    ("state lost between chunks", "state", "wrong from the second chunk on",
     "each chunk begins with a state of zeros", "add the state of all chunks before", _lost("both")),
    ("numerator lost between chunks", "state", "outputs fade from the second chunk on",
     "only the normaliser is carried", "carry S = Σ R φ(k) vᵀ too", _lost("numerator")),
    ("normaliser lost between chunks", "state", "outputs too large from the second chunk on", "only S is carried",
     "carry z = Σ φ(k) too", _lost("denominator")),
    ("state decays", "state", "early tokens are forgotten", "a gate or decay that Eq. (19) does not have",
     "leave it out", lambda spec, measured: () if not spec.causal else
     ({"decay": 0.97}, {"decay": 0.97, "decaying": "numerator"}) if measured is None else measured.decays),
), (
    ("normaliser missing", "normaliser", "outputs grow with the length", _always({"denominator": "missing"})),
    ("causal by position", "mask", "packed or padded rows see the wrong tokens",
     _if(_causal, {"causality": "by position"})),
    ("not rotated", "rotation", "positions do not matter: Eq. (18)", _if(_rope, {"order": "no rotation"})),
    ("keys not rotated", "rotation", "outputs change when all positions are shifted", _if(_rope, {"rotated": "q"})),
    ("queries not rotated", "rotation", "outputs change when all positions are shifted", _if(_rope, {"rotated": "k"})),
    ("values rotated", "rotation", "outputs change when all positions are shifted",
     _if(_rope, {"rotated": "qkv"}, {"rotated": "qv"})),
    ("keys rotated twice", "rotation", "outputs of distance m − 2n", _if(_rope, {"rotated": "qkk"})),
    ("queries rotated twice", "rotation", "outputs of distance 2m − n", _if(_rope, {"rotated": "qqk"})),
    ("length taken from each call", "rotation", "right in calls as long as the rope is meant for",
     _if(lambda s: s.rope is not None and isinstance(s.rope.scaling, LENGTH_DEPENDENT), {"length": "of the call"})),
    ("positions modulo a length", "rotation", "right up to a length, then from the start again", _tables("modulo")),
    ("table clamped at its end", "rotation", "right up to a length, then all at one place", _tables("clamped")),
    ("float16 positions", "rotation", "right up to 2048, wrong from 2049 on", _if(_rope, {"table": ("float16", 0)})),
    ("bfloat16 positions", "rotation", "right up to 256, wrong from 257 on", _if(_rope, {"table": ("bfloat16", 0)})),
    ("last partial block dropped", "blocks", "wrong or zeros at the end, if the length is no multiple of a chunk",
     _always(*_DROPPED)),
    ("eps in the denominator", "normaliser", "outputs a little too small", _added(3.0)),
    ("keys and values exchanged", "heads", "outputs are mixtures of keys, or keys are values",
     _always({"exchanged": "kv"}, {"exchanged": "kk"}, {"exchanged": "vv"})),
    ("queries and keys exchanged", "heads", "each token is weighed by the queries of others, not by their keys",
     _always({"exchanged": "qk"})),
    ("rotated twice", "rotation", "outputs as if tokens were twice as far apart", _if(_rope, {"times": 2})),
    ("wrong base", "rotation", "wrong outputs, the more the further apart", _BASES),
    ("whole head rotated", "rotation", "wrong outputs from distance 1 on", _width(lambda rope: rope.head_dim)),
    ("half the width rotated", "rotation", "wrong outputs from distance 1 on", _width(lambda rope: rope.width // 2)),
    ("a quarter of the width rotated", "rotation", "wrong outputs from distance 1 on", _width(_quarter)),
    ("wrong pairing", "rotation", "wrong outputs from distance 1 on", _ropes(_other_layout, "rope", "key_rope")),
    ("direction", "rotation", "outputs as if the future were the past", _ropes(_backwards, "rope", "key_rope")),
    ("scaling ignored", "rotation", "wrong outputs at long distances", _ropes(_without_scaling)),
    ("queries one position off", "rotation", "outputs of distance m − n ± 1", _if(_rope, {"lag": 1}, {"lag": -1})),
    ("positions ignored", "rotation", "right where positions count up by one", _if(_rope, {"positions": "counted"})),
    ("positions of a batch misread", "rotation", "right in the first row of a batch, wrong in those after it",
     _if(_rope, {"positions": "first"})),
    ("positions of the first chunk repeated", "rotation", "right in the first half, wrong in the second",
     _split(REPEATED, *_ROTATED)),
    ("positions local to the rank", "rotation", "right in the part of the first rank, as if the others began anew",
     _split(SPLITS, *_ROTATED)),
    ("not causal", "mask", "a token sees those after it", _if(_causal, {"causal": False})),
    ("causal by blocks", "mask", "a token sees those after it, up to the end of its chunk",
     _if(_causal, *({"diagonal": block} for block in _BLOCKS))),
    ("causal by mistake", "mask", "a token does not see those after it", _if(_two_sided, {"causal": True})),
    ("does not see itself", "mask", "the first row is empty", _if(_causal, {"ahead": -1})),
    ("sees the next token", "mask", "training looks too good", _if(_causal, {"ahead": 1})),
    ("heads tiled", "heads", "grouped heads read the wrong keys", _if(_grouped, {"groups": "tiled"})),
    ("heads mixed", "heads", "a head depends on keys that are not its own",
     _if(lambda s: s.key_heads > 1, {"groups": "first"})),
    ("batch rows mixed", "heads", "a row depends on another row", _always({"batch": "first"})),
    ("output transposed", "output", "right numbers in the wrong places",
     _if(lambda s: s.heads > 1, {"output": "transposed"}, {"output": "reshaped"})),
    ("cache forgotten", "cache", "a step sees only itself", _if(_causal, {"cache": "forgotten"})),
    ("cache positions restart", "cache", "right in the first call, wrong in those after it",
     _if(_cached_rope, {"cache": "restarted"}, {"cache": "counted"})),
    ("cache positions one too high", "cache", "right in the first call, wrong in those after it",
     _if(_cached_rope, {"cache": "late"})),
    ("cached keys rotated again", "cache", "right in the first call, wrong in those after it",
     _if(_cached_rope, {"cache": "turned"})),
    ("cached keys not rotated", "cache", "right in the first call, wrong in those after it",
     _if(_cached_rope, {"cache": "raw"})),
))  # fmt: skip
LINEAR["sums in low precision"] = Fault(
    "sums in low precision", "noise above the dtype's, as a smaller one has it",
    "features, states or sums in a smaller dtype", "sums in float32, of float64 in float64", step="state")  # fmt: skip

# What shows in how a candidate behaves, or in some calls: the same in attention and in a rotation, but for what x is.
BEHAVIOUR = {
    name: replace(FAULTS[name], symptom=symptom)
    for name, symptom in {
        "not finite": "NaN or infinity from finite q, k and v",
        "wrong dtype out": "the result has another dtype than q",
        "mutates its input": "q, k or v is changed after the call",
        "state between calls": "the same call returns something else later",
        "coarser than asked": "float32 angles, where a better grade was asked for",
        "some lengths wrong": "most numbers of tokens are right, some are wrong",
        "consecutive positions wrong": "positions that count up by one give other results than those that do not",
        "order of positions matters": "positions that repeat, fall or start again give wrong results",
        "zeros returned": "every output is zero",
        "positions misread": "positions of int32, or with strides, are read wrongly",
        "strides ignored": "a view of q, k or v gives other results than its copy",
        "rows leak into each other": "NaN in one query reaches others",
        "result overwritten": "a result changes when the function is called again",
    }.items()
}
BEHAVIOUR |= {name: ATTENTION[name] for name in ("batch rows mixed", "not causal", "window not asked for")}
for _fault in (
    Fault("other keys seen", "weights are right but for the keys that have one",
          "a mask, a window, or a loop over the keys that begins or ends elsewhere",
          "compare the keys that are listed here with those expected", step="mask"),
    Fault("another normaliser", "the weights of a query are the right ones times one number",
          "the sum that divides has more terms than the keys that are seen, or fewer: a sink, the zeros of a partial "
          "block, hidden keys, a bound", "divide by the sum over the keys that are seen", step="softmax"),
    Fault("decoding wrong", "a prompt is right, one query or a few over many keys are wrong",
          "a path of its own for few queries: keys split among blocks, the last of them, or the mask's corner",
          "hold it to the general path, at many numbers of keys", step="calls"),
    Fault("long sequences wrong", "right for hundreds of tokens, wrong for thousands",
          "a sum in a narrow dtype that stops growing, or an index that overflows",
          "keep states and sums in float32", step="calls"),
    Fault("cache wrong in some calls", "right in one way to cut a sequence into calls, wrong in another",
          "a cache that is cut, wrapped or grown in the wrong place, or a chunk masked as a prompt is",
          "let a call of n new tokens after m old ones be the last n rows of one of m + n", step="calls"),
    Fault("dropout", "some weights are zeros at random, all others too large by the same factor",
          "dropout is left on outside of training", "model.eval(), dropout_p=0.0", step="weights"),
    Fault("some values wrong", "rows of zeros, or large or small ones, are wrong",
          "a normalisation, a clip, or a branch for zeros", "treat all values alike", step="calls"),
):  # fmt: skip
    BEHAVIOUR[_fault.name] = _fault
