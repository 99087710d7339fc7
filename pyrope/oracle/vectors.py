"""Portable test vectors: what an implementation in any language needs to test itself, and the judgement of its results.

A case is a check with ``effort="few"`` whose calls were recorded: its rows, vectors of a rotation or sequences of
attention, stand in files, all as one call. What another program answers to them is looked up by that very check, which
asks again; so verdicts and names are those of `check_rotation`, `check_attention` and `check_linear_attention`.
docs/check.md describes the files.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .. import checks, theta
from ..backend import Array
from ..files import (
    PathLike,
    dtype_named,
    errors_prefixed_with,
    load_npy,
    load_safetensors,
    read_json,
    save_npy,
)
from ..theta import Axes, Rope
from .attention import Asked, Check, examine
from .attention_calls import Scope
from .calls import FARTHEST
from .candidate import BITS
from .operator import ladder
from .report import Failure, Report
from .rotation import check_rotation
from .steps import Call, Spec, allowed, grades, results
from .tolerance import APPLICABLE, ExactTables, Expected
from .turning import TOP

FORMAT, VERSION = "pyrope-vectors", 2
SUITES = ("rotation", "attention", "linear", "gradients", "all")
LEAST_POSITION = 63  # no table of one's own may be shorter
TOKENS = 1 + len(ladder(TOP))  # as many as there are in the calls that read frequencies
LARGEST = 2**18  # numbers of a case: where they are more, calls that explain mistakes are left out
Rows: TypeAlias = dict[str, Array]  # by name, each (rows, …)
Keyed: TypeAlias = dict[bytes, tuple[Array, ...]]  # rows, by the bits of their numbers
Cases: TypeAlias = dict[str, tuple[Rope | None, dict[str, Any]]]  # by name: a rope, and options
EVERY_DTYPE = ("half", "interleaved", "interleaved-to-half", "causal", "own", "own-continued")  # others: float32 alone


@dataclass(frozen=True)
class Case:
    """One test: a check and its options."""

    name: str
    kind: str  # "rotation", "attention" or "linear"
    backward: bool
    dtype: str  # of the inputs and of the outputs that are asked for
    rope: Rope | None
    options: Mapping[str, Any]

    @property
    def inputs(self) -> tuple[str, ...]:
        if self.kind == "rotation":
            return "g" if self.backward else "x", "positions"
        return ("q", "k", "v", *["g"] * self.backward, *["positions"] * (self.rope is not None))

    @property
    def outputs(self) -> dict[str, str]:
        """The names of the results, and under which names they are to be written."""
        if self.kind != "rotation" and self.backward:
            return {name: f"{self.name}.{name}" for name in ("dq", "dk", "dv")}
        return {"y" if self.kind == "rotation" else "o": self.name}

    @property
    def spec(self) -> Spec:
        known = {name: value for name, value in self.options.items() if name not in ("queries", "max_position")}
        known.setdefault("scale", known["head_dim"] ** -0.5)
        return Spec(**known, dtype=dtype_named(self.dtype), rope=self.rope)

    def check(self, fn: Callable[..., Any]) -> Report:
        """What the check says of fn, which gets and returns arrays."""
        if self.kind == "rotation":
            options = {**self.options, "dtype": self.dtype, "backward": self.backward}
            return check_rotation(fn, theta.check_rope(self.rope), effort="few", **options)
        queries, last = self.options.get("queries"), len(grades(self.spec)) - 1
        scope = Scope(effort="few", backward=self.backward, queries=queries, batch=1, tokens=TOKENS)
        check = Check(self.spec, Asked(fn, None, self.backward), scope, FARTHEST, last, queries is not None)
        return examine(check, None)

    def rows(self, arrays: tuple[Array, ...]) -> Rows:
        """What a call hands over, as rows: those of a rotation are vectors, those of attention sequences."""
        if self.kind == "rotation":
            x, at = arrays
            axes = at.shape[:-1]
            at = np.broadcast_to(at.reshape(*axes, *[1] * (x.ndim - 2), -1), (*axes, *x.shape[:-1]))
            arrays = x.reshape(-1, x.shape[-1]), np.moveaxis(at.reshape(*axes, -1), -1, 0)
        return dict(zip(self.inputs, arrays, strict=True))

    def truth(self, rows: Rows) -> list[Array]:
        """The right results."""
        if self.kind == "rotation":
            return [self._rotated(rows).y]
        return [*results(self.spec, Call("", **rows))]

    def allowed(self, rows: Rows) -> list[Array]:
        """How far off each number may be."""
        if self.kind == "rotation":
            return [self._rotated(rows).allowed(APPLICABLE[self.dtype][-1])]
        limits = allowed(self.spec, Call("", **rows), [*grades(self.spec).values()][-1])
        return [np.broadcast_to(limit.worst, limit.truth.shape) for limit in limits]

    def _rotated(self, rows: Rows) -> Expected:
        rope, at = theta.check_rope(self.rope), np.atleast_2d(np.moveaxis(rows["positions"], 0, -1))
        tables = ExactTables(rope.transposed if self.backward else rope, at)
        return Expected(tables, rows[self.inputs[0]].astype(float), at, self.dtype)

    def answered(self, results: list[Array], like: Array) -> Any:
        """Rows of results as a candidate returns them."""
        results = [x.astype(like.dtype) for x in results]
        return tuple(results) if len(results) > 1 else results[0].reshape(like.shape)


# ── The cases ────────────────────────────────────────────────────────────────────────────────────────────────────────


def last_position(rope: Rope, most: int | None = None) -> int:
    """The largest position that the cases of a rope have: 131071 or ``most``, or what its length allows."""
    last = FARTHEST if most is None else checks.integer("max_position", most, LEAST_POSITION, checks.MAX_POSITION)
    return min(last, int(rope.scaling.length or 2) - 1) if isinstance(rope.scaling, theta.LENGTH_DEPENDENT) else last


def _own(kind: str, rope: Rope, heads: dict[str, int], max_position: int | None) -> Cases:
    options = {"max_position": last_position(rope, max_position)}
    if kind == "rotation":
        return {"own": (rope, options)}
    return {"own": (rope, options | heads), "own-continued": (rope, options | heads | {"queries": 3})}


def _rotations() -> Cases:
    half, yarn = Rope(16, 500000.0, "half"), theta.YaRN(factor=4.0, original_length=4096)
    short, long = (tuple(1 + (i * k) / 8 for i in range(8)) for k in (1, 5))
    scalings: dict[str, Any] = {
        "linear": theta.Linear(4.0), "dynamic": theta.DynamicNTK(2.0, 4096, length=8192), "yarn": yarn,
        "yarn-mscale": replace(yarn, mscale=1.0, mscale_all_dim=0.5), "yarn-untruncated": replace(yarn, truncate=False),
        "longrope-short": theta.LongRoPE(short, long, 8.0, 4096, length=4096),
        "longrope-long": theta.LongRoPE(short, long, 8.0, 4096, length=4097),
        "llama3": theta.Llama3(8.0, 1.0, 4.0, 8192), "proportional": theta.Proportional(0.5),
    }  # fmt: skip
    axes = {"sections": (2, 3, 3), "interleaved": (4, 2, 2), "axial": (), "pixtral": ()}
    ropes = {layout: Rope(16, 10000.0, layout) for layout in ("interleaved", "half", "interleaved-to-half")}
    ropes |= {name: replace(half, scaling=scaling) for name, scaling in scalings.items()}
    for layout in ("interleaved", "half"):
        ropes[f"prefix-{layout}"] = Rope(32, 10000.0, layout, rotary_dim=16)
        ropes[f"suffix-{layout}"] = Rope(32, 10000.0, layout, rotary_dim=12, placement="suffix")
    ropes |= {"backwards": replace(half, direction=-1), "head-2": Rope(2, 10000.0, "half")}
    ropes |= {f"axes-{style}": replace(half, axes=Axes(style, sections)) for style, sections in axes.items()}
    listed: Cases = {name: (rope, {"max_position": last_position(rope)}) for name, rope in ropes.items()}
    return listed | {"far": (Rope(16, 1000000.0, "half"), {"max_position": checks.MAX_POSITION})}


def _attentions(kind: str) -> Cases:
    rope, few = Rope(8, 10000.0, "half"), {"key_heads": 2, "queries": 3}
    either: Cases = {
        "causal": (rope, {}), "unrotated": (None, {}), "two-sided": (rope, {"causal": False}),
        "grouped": (rope, {"heads": 6, "key_heads": 2}), "adjacent": (Rope(8, 500000.0, "interleaved"), {}),
        "continued": (rope, few),
    }  # fmt: skip
    if kind == "linear":
        return either | {"exp": (rope, {"feature_map": "exp"})}
    return either | {
        "window": (rope, {"window": 5}), "two-sided-window": (rope, {"causal": False, "window": 5}),
        "continued-window": (rope, {**few, "window": 5}), "softcap": (rope, {"softcap": 0.5}),
        "scale": (rope, {"scale": 1.0}),
    }  # fmt: skip


def cases(
    suite: str = "all", rope: Rope | None = None, heads: int = 4, key_heads: int | None = None,
    max_position: int | None = None, dtype: str | None = None,
) -> list[Case]:  # fmt: skip
    """The cases of a suite: the standard ones, or those of one's own rope; of one dtype, or of all that there are."""
    kinds = [kind for kind in SUITES[:3] if checks.choice("suite", suite, SUITES) in (kind, "all", "gradients")]
    if rope is not None and theta.check_rope(rope).axes is not None:  # in attention positions are (b, n)
        kinds = [kind for kind in kinds if kind == "rotation"]
        if not kinds:
            raise ValueError("a rope with several axes has vectors for rotations alone: give --suite rotation")
    sizes = {"heads": checks.size("heads", heads), "key_heads": checks.size("key_heads", key_heads or heads)}
    if heads % sizes["key_heads"]:
        raise ValueError(f"key_heads must divide heads, {heads}, was {key_heads}")
    chosen = BITS if dtype is None else [checks.choice("dtype", dtype, tuple(BITS))]
    dtypes = [name for name in chosen if name != "bfloat16" or dtype or importlib.util.find_spec("ml_dtypes")]
    backward, listed = suite == "gradients", list[Case]()
    for kind in kinds:
        standard = _rotations() if kind == "rotation" else _attentions(kind)
        for name, (turns, options) in (standard if rope is None else _own(kind, rope, sizes, max_position)).items():
            some = [one for one in dtypes if name in EVERY_DTYPE or one == "float32"]
            listed += [_case(kind, backward, name, one, turns, options) for one in some]
    return [case for case in listed if not (case.backward and "queries" in case.options)]


def _case(kind: str, backward: bool, name: str, dtype: str, rope: Rope | None, options: Mapping[str, Any]) -> Case:
    usual: dict[str, Any] = {"max_position": FARTHEST}
    if kind != "rotation":
        usual |= {"heads": 4, "key_heads": 4, "head_dim": 8 if rope is None else rope.head_dim, "causal": True}
        usual |= {"feature_map": "elu+1"} if kind == "linear" else {}
    return Case(f"{kind}{'-backward' * backward}-{name}-{dtype}", kind, backward, dtype, rope, {**usual, **options})


# ── What is recorded ─────────────────────────────────────────────────────────────────────────────────────────────────


def _recorded(case: Case) -> Rows:
    """Every row that the check may hand over, once each: to a right candidate and, if they are not too many numbers, to
    wrong ones, of which it asks more."""

    def below(row: tuple[Array, ...]) -> bool:  # whether it has no position beyond the last one
        return case.rope is None or bool((row[-1] <= case.options["max_position"]).all())

    rows: Keyed = {}
    for listed in _asked(case):
        shapes = [x.shape for x in next(iter((rows or listed).values()))]
        more = {key: row for key, row in listed.items() if [x.shape for x in row] == shapes and below(row)}
        if not rows or len(rows | more) * sum(map(math.prod, shapes)) * (1 + case.backward) <= LARGEST:
            rows |= more
    return dict(zip(case.inputs, map(np.stack, zip(*rows.values(), strict=True)), strict=True))


def _asked(case: Case) -> Iterator[Keyed]:
    """The rows that are handed over to a right candidate, then to wrong ones: with another mask, with values cut off,
    or with another base."""
    values = case.inputs[0] if case.kind == "rotation" else "v"
    yield _asked_of(case, case.truth)
    if case.kind != "rotation":
        yield _asked_of(case, replace(case, options={**case.options, "causal": not case.options["causal"]}).truth)
        if case.backward:  # most mistakes show in the plain call
            return
    yield _asked_of(case, lambda rows: case.truth({**rows, values: np.clip(rows[values], -1, 1)}))
    if case.rope is not None:
        yield _asked_of(case, replace(case, rope=replace(case.rope, base=50 * case.rope.base)).truth)


def _asked_of(case: Case, answer: Callable[[Rows], list[Array]]) -> Keyed:
    rows: Keyed = {}

    def candidate(*arrays: Array) -> Any:
        given = case.rows(arrays)
        rows.update(_keyed(given))
        return case.answered(answer(given), arrays[0])

    case.check(candidate)
    return rows


def _keyed(rows: Rows) -> list[tuple[bytes, tuple[Array, ...]]]:
    """The bits of each row, and the row."""
    return [(b"".join(x.tobytes() for x in row), row) for row in zip(*rows.values(), strict=True)]


# ── Files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def write_vectors(directory: PathLike, suite: str = "all", **options: Any) -> dict[str, Any]:
    """Writes a suite ("rotation", "attention", "linear", "all" of these three, or "gradients") to a directory, and
    returns its manifest: the standard cases or, with ``rope=`` and perhaps ``heads=``, ``key_heads=`` and
    ``max_position=``, those of one's own rope; of one ``dtype=`` or of all.

    The directory must be new or empty; the manifest is written last.
    """
    target, listed = Path(directory), cases(suite, **options)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{directory} must be a new or an empty directory: name another, or remove what is there")
    (target / "npy").mkdir(parents=True)
    manifest = {"format": FORMAT, "version": VERSION, "cases": [_written(target, case) for case in listed]}
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _written(target: Path, case: Case) -> dict[str, Any]:
    """Writes the arrays of a case; returns what the manifest says of it."""
    rows = _recorded(case)
    arrays = dict(rows)
    if case.kind == "rotation":
        arrays["positions"] = np.moveaxis(rows["positions"], 0, -1)
    for name, y, most in zip(case.outputs, case.truth(rows), case.allowed(rows), strict=True):
        arrays |= {name: y, f"{name}.allowed": np.nextafter(most.astype(np.float32), np.float32(np.inf))}
    described = {}
    for name, array in arrays.items():
        described[name] = {"npy": _path(case, name), "dtype": array.dtype.name, "shape": list(array.shape)}
        save_npy(target / _path(case, name), array)
    entry = {**asdict(case), "rope": _rope_to_json(case.rope), "inputs": case.inputs, "outputs": case.outputs}
    return entry | {"arrays": described}


def _path(case: Case, name: str) -> str:
    return f"npy/{case.name}.{name}.npy"


def _rope_to_json(rope: Rope | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    kinds = {kind: name for name, kind in theta.SCALINGS.items()}
    return {
        **asdict(rope),
        "scaling": None if rope.scaling is None else {"type": kinds[type(rope.scaling)], **asdict(rope.scaling)},
        "theta": theta.frequencies(rope).tolist(),
        "axis_of_pair": None if rope.axes is None else [axis for axis, _ in rope.axes.assign(rope.pairs)],
        "attention_factor": rope.attention_factor,
    }


def _rope_from_json(value: Any) -> Rope | None:
    if value is None:
        return None
    plain = {name: value[name] for name in ("head_dim", "base", "layout", "rotary_dim", "placement", "direction")}
    scaling, axes = value["scaling"], value["axes"]
    if scaling is not None:
        scaling = theta.SCALINGS[scaling["type"]](**{name: x for name, x in scaling.items() if name != "type"})
    return Rope(**plain, scaling=scaling, axes=None if axes is None else Axes(**axes))


def _read_cases(directory: Path) -> list[Case]:
    manifest = read_json(path := directory / "manifest.json")
    with errors_prefixed_with(path):
        if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
            rule = f'the file must have "format": "{FORMAT}", "version": {VERSION}'
            raise ValueError(f"{rule}, has {manifest.get('format')!r}, {manifest.get('version')!r}: write it anew")
        names, entries = [field.name for field in fields(Case)], manifest["cases"]
        read = [{name: entry[name] for name in names} for entry in entries]
        return [Case(**{**entry, "rope": _rope_from_json(entry["rope"])}) for entry in read]


# ── Judgement ────────────────────────────────────────────────────────────────────────────────────────────────────────


def verify_vectors(directory: PathLike, outputs: PathLike | Mapping[str, Array], *, only: str = "*") -> list[Report]:
    """What became of test vectors elsewhere: a report for each case whose name fits ``only``, a shell pattern.

    ``outputs`` are a directory with a file ``<case>.npy`` each (three for gradients, ``<case>.dq.npy``, …), a
    .safetensors file with a tensor for each of these names, or a dict. An output has the shape of the truth and the
    dtype of the case, bfloat16 in .npy as uint16 bits.
    """
    directory = Path(directory)
    chosen = [case for case in _read_cases(directory) if fnmatch.fnmatchcase(case.name, only)]
    given: Mapping[str, Array] | Path = outputs if isinstance(outputs, Mapping) else Path(outputs)
    if isinstance(given, Path) and not given.is_dir():
        given = load_safetensors(given)[0]
    if not chosen:
        raise ValueError(f"no case has a name like {only!r}: see the manifest in {directory}")
    with errors_prefixed_with(directory / "manifest.json"):  # whose options may be no numbers
        return [_judged(case, directory, given) for case in chosen]


def _judged(case: Case, directory: Path, given: Mapping[str, Array] | Path) -> Report:
    rows = _read_rows(case, directory)
    shapes = {name: rows[{"dk": "k", "dv": "v"}.get(name, case.inputs[0])].shape for name in case.outputs}
    try:
        results = [_read_output(given, case.outputs[name], shape, case.dtype) for name, shape in shapes.items()]
    except ValueError as error:
        bits = ", as uint16 bits" if case.dtype == "bfloat16" else ""
        fix = f"write {case.dtype}, in .npy little-endian{bits}; --only judges some cases alone"
        expected = f"{case.kind} in {case.dtype}, {case.rope or 'not rotated'}"
        return Report(case.name, expected, "not judged", failure=Failure(str(error), "", fix))
    places = {key: i for i, (key, _) in enumerate(_keyed(rows))}

    def look_up(*arrays: Array) -> Any:
        at = [places.get(key, -1) for key, _ in _keyed(case.rows(arrays))]
        if -1 in at:
            raise LookupError("this call was not recorded: if it is the first, write the vectors anew")
        return case.answered([x[at] for x in results], arrays[0])

    return replace(case.check(look_up), subject=case.name)


def _read_rows(case: Case, directory: Path) -> Rows:
    rows = {}
    for name in case.inputs:
        with errors_prefixed_with(path := directory / _path(case, name)):
            array = np.load(path, allow_pickle=False)
            rows[name] = array.view(dtype_named("bfloat16")) if array.dtype == np.uint16 else array
    if case.kind == "rotation":
        rows["positions"] = np.moveaxis(rows["positions"], -1, 0)
    return rows


def _read_output(given: Mapping[str, Array] | Path, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """An output; whatever is wrong with it, or with its file, is a ValueError."""
    if isinstance(given, Path):
        return load_npy(given / f"{name}.npy", name, shape, dtype_named(dtype))
    if name not in given:
        raise ValueError(f"{name}: there is no output")
    array = np.asarray(given[name])
    array = array.view(dtype_named(dtype)) if dtype == "bfloat16" and array.dtype == np.uint16 else array
    if array.shape != shape or array.dtype.name != dtype:
        raise ValueError(f"{name} must be {dtype} of shape {shape}, was {array.dtype} of shape {array.shape}")
    return array
