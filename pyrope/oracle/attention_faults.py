"""How attention goes wrong: the known mistakes, each with a name, words, and the changes of `Steps` that make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..theta import Rope
from .attention_steps import MAPS, Case, LinearSteps, Steps, candidate, incremental

Changes: TypeAlias = dict[str, Any]  # fields of Steps or LinearSteps
Variants: TypeAlias = Callable[[Case], list[Changes]]


@dataclass(frozen=True)
class Fault:
    """A known mistake."""

    name: str
    where: str  # the step that it is made in
    symptom: str
    cause: str
    fix: str
    changes: Variants  # the changes that make it, for a case; none where it would change nothing
    kind: type = Steps

    def make(self, case: Case, variant: int = 0, *, stepping: bool = False) -> Callable[..., Any]:
        """A candidate that makes this mistake; with stepping, what makes candidates with a cache."""
        steps = replace(self.kind(), **self.changes(case)[variant])
        return incremental(case, steps) if stepping else candidate(case, steps)


def _always(*changes: Changes) -> Variants:
    return lambda case: list(changes)


def _if(condition: Callable[[Case], Any], *changes: Changes) -> Variants:
    return lambda case: list(changes) if condition(case) else []


def _causal(case: Case) -> bool:
    return case.causal


def _softcap(case: Case) -> bool:
    return case.softcap is not None


def _rope(case: Case) -> bool:
    return case.rope is not None


def _factor(case: Case) -> bool:
    return case.rope is not None and case.rope.attention_factor != 1.0


def _cached_rope(case: Case) -> bool:
    return case.causal and case.rope is not None


def _grouped(case: Case) -> bool:
    return 1 < case.key_heads < case.heads


def _scales(*of: Callable[[Case], float]) -> Variants:
    """Those of these scales that are not the right one."""
    return lambda case: [{"scale": f(case) / case.scale} for f in of if abs(f(case) / case.scale - 1) > 1e-9]


def _windows(by: int) -> Variants:
    """A window that is wider by so much: to the past, or if not causal on both sides or one of them."""

    def variants(case: Case) -> list[Changes]:
        sides = [(by, 0)] if case.causal else [(by, by), (by, 0), (0, by)]
        return [{"wider": side} for side in sides] if case.window is not None and case.window + by > 0 else []

    return variants


def _ropes(change: Callable[[Rope], list[Rope]]) -> Variants:
    return lambda case: [] if case.rope is None else [{"rope": rope} for rope in change(case.rope)]


def _other_layout(rope: Rope) -> list[Rope]:
    # Scores do not see in which order both are written: "interleaved-to-half" has those of "interleaved".
    other = "interleaved" if rope.layout == "half" else "half"
    return [replace(rope, layout=other)] if rope.width > 2 else []


def _other_widths(rope: Rope) -> list[Rope]:
    """All of it where a part is meant, and halves and quarters; a rescaling may not allow it."""
    widths = {rope.head_dim, rope.width // 2 // 2 * 2, rope.width // 4 // 2 * 2} - {0, rope.width}
    return [replace(rope, rotary_dim=width) for width in sorted(widths)] if rope.scaling is None else []


def _without_scaling(rope: Rope) -> list[Rope]:
    return [] if rope.scaling is None else [replace(rope, scaling=None)]


def _other_bases(rope: Rope) -> list[Rope]:
    return [replace(rope, base=50 * rope.base)] if rope.width > 2 else []


def _backwards(rope: Rope) -> list[Rope]:
    return [replace(rope, direction=-rope.direction)]


def other_ropes(rope: Rope | None) -> list[Rope]:
    """Those in which another base shows: this one, with the other pairing, and backwards."""
    return [] if rope is None or rope.width == 2 else [rope, *_other_layout(rope), *_backwards(rope)]


# Each chunk has the positions of the first, or counts from 0: where positions count up by one, scores do not tell.
_SHARDS: tuple[Changes, ...] = tuple(
    {"chunks": count, **counted} for count in (2, 4, 8) for counted in ({}, {"positions": "counted"})
)


def _catalogue(kind: type, *rows: tuple[str, str, str, str, str, Variants]) -> dict[str, Fault]:
    return {row[0]: Fault(*row, kind=kind) for row in rows}


ATTENTION = _catalogue(
    Steps,
    ("scale missing", "scores", "weights much too sharp", "scores are not divided by √d",
     "multiply q·k by 1/√d before the softmax", _scales(lambda c: 1.0)),
    ("scale applied twice", "scores", "weights too flat", "1/d, or 1/√d both on q and on the scores",
     "scale once; many kernels scale by themselves", _scales(lambda c: c.scale**2)),
    ("scale inverted", "scores", "weights are all or nothing", "multiplied by √d instead of divided",
     "multiply by 1/√d", _scales(lambda c: 1 / c.scale)),
    ("scale of another width", "scores", "weights too flat or too sharp",
     "√ of the model's, the key heads' or half the width instead of √d", "d is the width of one head",
     _scales(lambda c: (c.heads * c.head_dim) ** -0.5, lambda c: (c.key_heads * c.head_dim) ** -0.5,
     lambda c: (c.head_dim / 2) ** -0.5)),
    ("scale ignored", "scores", "weights too flat or too sharp", "1/√d, though the model has a scale of its own",
     "pass the scale", _scales(lambda c: c.head_dim**-0.5)),
    ("another scale", "scores", "weights too flat or too sharp", "the scale is another number",
     "compare the number given here with the one expected", _always({"scale": 0.83})),
    ("softcap missing", "scores", "large scores are not bounded", "the option is ignored",
     "scores become c·tanh(score/c)", _if(_softcap, {"softcap": "missing"})),
    ("softcap without the division", "scores", "scores saturate at once", "c·tanh(score) instead of c·tanh(score/c)",
     "divide by c inside", _if(_softcap, {"softcap": "no division"})),
    ("softcap before the scale", "scores", "too strong a bound", "q·k is capped, then scaled",
     "scale first, then cap", _if(_softcap, {"softcap": "before scale"})),
    ("softcap after the mask", "mask", "hidden keys get a weight",
     "tanh(−inf) = −1: what was hidden has the score −c", "cap first, then mask", _if(_softcap,
     {"softcap": "after mask"})),
    ("not causal", "mask", "a token sees those after it", "no causal mask", "hide keys after the query", _if(_causal,
     {"causal": False})),
    ("causal by mistake", "mask", "a token does not see those after it", "a causal mask where none belongs",
     "leave the mask out", _if(lambda c: not c.causal, {"causal": True})),
    ("causal from the top left", "mask", "with a cache, queries see its first keys only",
     "query i sees keys 0 … i of m, though the n queries are the last of the m", "query i sees keys up to i + m − n",
     _if(_causal, {"corner": "top left"}, {"corner": "top left", "empty": "NaN"})),
    ("sees the next token", "mask", "training looks too good", "the causal mask is one too wide: j ≤ i + 1",
     "j ≤ i; torch.triu needs diagonal=1", _if(_causal, {"ahead": 1})),
    ("does not see itself", "mask", "the first row is empty", "the causal mask is one too narrow: j < i",
     "j ≤ i; torch.tril needs diagonal=0", _if(_causal, {"ahead": -1}, {"ahead": -1, "empty": "NaN"},
     {"ahead": -1, "hidden": "filled"})),
    ("window ignored", "mask", "all keys are seen", "the option is ignored",
     "hide keys at a distance of window or more", _if(lambda c: c.window is not None, {"window": "ignored"})),
    ("window one too wide", "mask", "one key too many", "distance ≤ window instead of < window",
     "a window of w is the token itself and w − 1 others; some APIs want w − 1", _windows(1)),
    ("window one too narrow", "mask", "one key too few", "distance < window − 1",
     "a window of w is the token itself and w − 1 others", _windows(-1)),
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
    ("packed sequences see each other", "mask", "packed differs from separate", "one causal mask over the whole row",
     "hide keys of other segments", _always({"segments": "ignored"})),
    ("softmax over queries", "softmax", "weights of a row do not add up to 1", "the axis is −2",
     "softmax over the keys, axis −1", _always({"axis": -2}, {"axis": -2, "empty": "NaN"})),
    ("softmax overflows", "softmax", "NaN or zeros where scores are large",
     "exp(score) without the maximum taken off", "subtract the greatest score of the row", _always({"stable": False},
     {"stable": False, "empty": "NaN"})),
    ("softmax in low precision", "softmax", "small weights are lost, noise far above the dtype's",
     "scores, exponentials or their sum in a smaller dtype", "softmax in float32, of float64 in float64",
     _always({"low": True})),
    ("heads tiled", "heads", "grouped heads read the wrong keys", "key heads 0 1 0 1 instead of 0 0 1 1",
     "repeat each key head h/g times in a row: repeat_interleave, not repeat or tile", _if(_grouped,
     {"groups": "tiled"})),
    ("heads mixed", "heads", "a head depends on keys that are not its own",
     "a reshape without a transpose, or one head read for all",
     "split the width into (heads, head_dim), then move the heads forward", _if(lambda c: c.key_heads > 1,
     {"groups": "first"})),
    ("batch rows mixed", "heads", "a row depends on another row",
     "batch and heads folded in the wrong order, or one row read for all", "keep the batch axis first",
     _always({"batch": "first"})),
    ("output transposed", "output", "right numbers in the wrong places", "(b, n, h, d) where (b, h, n, d) is meant",
     "transpose heads and tokens once", _if(lambda c: c.heads > 1, {"output": "transposed"}, {"output": "reshaped"})),
    ("not rotated", "rotation", "positions do not matter", "the rotation is not called", "rotate q and k", _if(_rope,
     {"rotated": ""})),
    ("keys not rotated", "rotation", "scores depend on the query's position alone",
     "only q is rotated, or the cache holds raw keys", "rotate q and k", _if(_rope, {"rotated": "q"})),
    ("queries not rotated", "rotation", "scores depend on the key's position alone", "only k is rotated",
     "rotate q and k", _if(_rope, {"rotated": "k"})),
    ("rotated twice", "rotation", "scores as if tokens were twice as far apart",
     "in the model and in the kernel, or keys again when read from the cache", "rotate once", _if(_rope,
     {"times": 2})),
    ("another width", "rotation", "wrong scores from distance 1 on", "another part of the head is rotated",
     "pass the rotary_dim, or partial_rotary_factor, of the model", _ropes(_other_widths)),
    ("values rotated", "rotation", "right weights, turned outputs", "v is rotated too", "rotate q and k only",
     _if(_rope, {"rotated": "qkv"})),
    ("attention factor not squared", "rotation", "weights too flat", "only q or only k is multiplied with it",
     "cos and sin of both", _if(_factor, {"factor": 1})),
    ("attention factor missing", "rotation", "weights too flat", "the option is ignored",
     "multiply cos and sin with it", _if(_factor, {"factor": 0})),
    ("another pairing", "rotation", "wrong scores from distance 1 on",
     "half where interleaved is meant, or the reverse", "take the layout of the checkpoint, or permute its weights",
     _ropes(_other_layout)),
    ("rotates backwards", "rotation", "scores as if the future were the past", "the sign of sin, for q and k",
     "(x cos − y sin, x sin + y cos)", _ropes(_backwards)),
    ("another base", "rotation", "wrong scores, the more the further apart",
     "a default instead of the model's rope_theta", "pass the base", _ropes(_other_bases)),
    ("scaling ignored", "rotation", "wrong scores at long distances", "the rescaling of the frequencies is left out",
     "pass the scaling", _ropes(_without_scaling)),
    ("queries one position off", "rotation", "scores of distance m − n ± 1",
     "positions of q begin at 1, or those of k", "one position for the query and the key of a token", _if(_rope,
     {"lag": 1}, {"lag": -1})),
    ("positions ignored", "rotation", "right for 0 … n−1 only", "the token's place in the array is used",
     "use the positions given", _if(_rope, {"positions": "counted"})),
    ("positions of the first chunk repeated", "rotation", "right in the first chunk, as if later ones began anew",
     "a row is cut into chunks, for several devices or calls, and each counts from the first position on",
     "give every chunk its own positions in the row", _if(_rope, *_SHARDS)),
    ("cache forgotten", "cache", "a step sees only itself", "keys and values are not kept", "append to the cache",
     _if(_causal, {"cache": "forgotten"})),
    ("cache positions restart", "cache", "right in the first call, wrong in those after it",
     "each call rotates from position 0 on", "positions go on where the cache ends",
     _if(_cached_rope, {"cache": "restarted"}, {"cache": "counted"})),
    ("cache positions one too high", "cache", "right in the first call, wrong in those after it",
     "the first new token is given position L + 1, not L", "after tokens 0 … L−1 comes L",
     _if(_cached_rope, {"cache": "late"})),
)  # fmt: skip


def _other_maps(case: Case) -> list[Changes]:
    return [{"feature_map": name} for name in MAPS if name != case.feature_map]


def _chunks(lost: str) -> Variants:
    return lambda case: [{"chunk": c, "lost": lost} for c in (64, 16, 32, 128, 192, 256)] if case.causal else []


LINEAR = _catalogue(
    LinearSteps,
    ("not rotated: Eq. (18)", "rotation", "positions do not matter", "the rotation is not called",
     "rotate φ(q) and φ(k) in the numerator", _always({"order": "no rotation"})),
    ("denominator rotated", "normaliser", "outputs explode where it is near zero",
     "one rotated similarity for both sums", "the denominator of Eq. (19) is φ(q)ᵀφ(k), not rotated",
     _always({"denominator": "rotated"})),
    ("rotated before the feature map", "rotation", "outputs change when all positions are shifted",
     "φ(R q) instead of R φ(q)", "map first, then rotate", _always({"order": "rotation first"})),
    ("keys not rotated", "rotation", "outputs change when all positions are shifted", "only φ(q) is rotated",
     "rotate φ(q) and φ(k)", _always({"rotated": "q"})),
    ("queries not rotated", "rotation", "outputs change when all positions are shifted", "only φ(k) is rotated",
     "rotate φ(q) and φ(k)", _always({"rotated": "k"})),
    ("values rotated", "rotation", "outputs change when all positions are shifted", "v is rotated too",
     "rotate φ(q) and φ(k) only", _always({"rotated": "qkv"})),
    ("rotated twice", "rotation", "outputs as if tokens were twice as far apart", "in the model and in the kernel",
     "rotate once", _always({"times": 2})),
    ("another base", "rotation", "wrong outputs, the more the further apart",
     "a default instead of the model's rope_theta", "pass the base", _ropes(_other_bases)),
    ("another width", "rotation", "wrong outputs from distance 1 on", "another part of the head is rotated",
     "pass the rotary_dim, or partial_rotary_factor, of the model", _ropes(_other_widths)),
    ("another pairing", "rotation", "wrong outputs from distance 1 on",
     "half where interleaved is meant, or the reverse", "take the layout of the checkpoint, or permute its weights",
     _ropes(_other_layout)),
    ("rotates backwards", "rotation", "outputs as if the future were the past", "the sign of sin, for φ(q) and φ(k)",
     "(x cos − y sin, x sin + y cos)", _ropes(_backwards)),
    ("scaling ignored", "rotation", "wrong outputs at long distances", "the rescaling of the frequencies is left out",
     "pass the scaling", _ropes(_without_scaling)),
    ("queries one position off", "rotation", "outputs of distance m − n ± 1",
     "positions of q begin at 1, or those of k", "one position for the query and the key of a token",
     _always({"lag": 1}, {"lag": -1})),
    ("positions ignored", "rotation", "right where positions count up by one", "the token's place in the array is used",
     "use the positions given", _always({"positions": "counted"})),
    ("positions of the first chunk repeated", "rotation", "right in the first chunk, as if later ones began anew",
     "a row is cut into chunks, for several devices or calls, and each counts from the first position on",
     "give every chunk its own positions in the row", _always(*_SHARDS)),
    ("attention factor applied", "rotation", "outputs a² times too large", "the tables of softmax attention are used",
     "Eq. (19) needs the rotation alone", _if(_factor, {"factor": True})),
    ("normaliser missing", "normaliser", "outputs grow with the length", "no division", "divide by φ(q)ᵀΣφ(k)",
     _always({"denominator": "missing"})),
    ("normaliser summed over heads", "normaliser", "outputs too small by about the number of heads",
     "a sum over one axis too many", "each head has its own", _if(lambda c: c.heads > 1,
     {"denominator": "over heads"})),
    ("normaliser of all keys", "normaliser", "early outputs too small", "Σφ(k) over the whole sequence",
     "sum the keys seen so far", _if(_causal, {"denominator": "of all keys"})),
    ("another feature map", "features", "other weights", "relu, exp or another map is used",
     "use the map of the model", _other_maps),
    ("not causal", "mask", "a token sees those after it", "sums over the whole sequence", "running sums", _if(_causal,
     {"causal": False})),
    ("causal by mistake", "mask", "a token does not see those after it", "running sums",
     "sums over the whole sequence", _if(lambda c: not c.causal, {"causal": True})),
    ("does not see itself", "mask", "the first row is empty", "the output is taken before the state is updated",
     "update first", _if(_causal, {"ahead": -1})),
    ("sees the next token", "mask", "training looks too good", "sums shifted by one", "j ≤ i", _if(_causal,
     {"ahead": 1})),
    ("state lost between chunks", "state", "wrong from the second chunk on",
     "each chunk begins with a state of zeros", "add the state of all chunks before", _chunks("both")),
    ("numerator lost between chunks", "state", "outputs fade from the second chunk on",
     "only the normaliser is carried", "carry S = Σ R φ(k) vᵀ too", _chunks("numerator")),
    ("normaliser lost between chunks", "state", "outputs too large from the second chunk on", "only S is carried",
     "carry z = Σ φ(k) too", _chunks("denominator")),
    ("state decays", "state", "early tokens are forgotten", "a gate or decay that Eq. (19) does not have",
     "leave it out", _if(_causal, {"decay": 0.97})),
    ("heads tiled", "heads", "grouped heads read the wrong keys", "key heads 0 1 0 1 instead of 0 0 1 1",
     "repeat each key head h/g times in a row", _if(_grouped, {"groups": "tiled"})),
    ("heads mixed", "heads", "a head depends on keys that are not its own", "one head read for all",
     "keep the head axis", _if(lambda c: c.key_heads > 1, {"groups": "first"})),
    ("batch rows mixed", "heads", "a row depends on another row", "one state for all rows",
     "keep the batch axis first", _always({"batch": "first"})),
    ("output transposed", "output", "right numbers in the wrong places", "(b, n, h, d) where (b, h, n, d) is meant",
     "transpose heads and tokens once", _if(lambda c: c.heads > 1, {"output": "transposed"}, {"output": "reshaped"})),
    ("cache forgotten", "cache", "a step sees only itself", "the state is not kept", "pass the state on", _if(_causal,
     {"cache": "forgotten"})),
    ("cache positions restart", "cache", "right in the first call, wrong in those after it",
     "each call rotates from position 0 on", "positions go on where the state ends", _if(_causal,
     {"cache": "restarted"}, {"cache": "counted"})),
    ("cache positions one too high", "cache", "right in the first call, wrong in those after it",
     "the first new token is given position L + 1, not L", "after tokens 0 … L−1 comes L", _if(_causal,
     {"cache": "late"})),
)  # fmt: skip

# What shows without numbers, in either kind.
BEHAVIOUR = _catalogue(
    object,
    ("fails", "call", "an exception, or no array of numbers", "a shape or a position that it was not written for",
     "take every shape that it will meet; see the options of the check for what need not be taken", _always()),
    ("not finite", "output", "NaN or infinity from finite numbers",
     "0/0, inf − inf, an overflow, or memory that is not written", "look where the first one appears", _always()),
    ("wrong dtype out", "output", "the result has another dtype than q", "float32 sums or tables promote it",
     "cast the result to the dtype of q", _always()),
    ("inputs changed", "call", "the next layer reads scaled or rotated vectors", "q, k or v is worked on in place",
     "work on a copy", _always()),
    ("sums in low precision", "state", "of linear attention: noise above the dtype's, as a smaller one has it",
     "features, states or sums in a smaller dtype", "sums in float32, of float64 in float64", _always()),
    ("state between calls", "call", "the same call returns something else later",
     "a mask, a table or a buffer of an earlier call is used again", "make its key complete, or build it anew",
     _always()),
)  # fmt: skip
