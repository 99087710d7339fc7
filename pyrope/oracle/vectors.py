"""Portable test vectors: what an implementation in any language needs to test itself, and the judgement of its results.

docs/other-languages.md describes the files and how they are used; `vector_cases` says what is in them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..phase import cos_sin
from ..tensors import NumPyArray, PathLike, load_npy, load_safetensors, save_npy, save_safetensors
from ..theta import SCALINGS, Rope, frequencies
from . import tolerance
from .attention_evidence import AttentionEvidence
from .backward_checks import GradientCheck
from .backward_faults import BACKWARD
from .drawings import Readings
from .examination import explained
from .explain import Change, Fault, Hypothesis, findings
from .floats import BITS, plain
from .manifest import FORMAT, VERSION, npy_path, read_case, read_json, read_manifest, widened
from .readings import errors_by_place
from .recipes import recipe_of
from .report import ErrorRow, Failure, Finding, Report
from .rotation_evidence import RotationEvidence
from .rotation_faults import FAULTS, Measurements
from .rules import COMMON_BASES, rounded
from .sample import Sample
from .vector_cases import TRUTH, Case, Own, Truth, cases, exam_of, gradient_asked, gradients_of

# Files


def _stored(array: NumPyArray, dtype: str) -> NumPyArray:
    """As it is written: exact; bfloat16, which NumPy alone does not have, as its bits."""
    if array.dtype == np.int64:
        return array
    if dtype == "bfloat16":
        return np.asarray(array.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return array.astype(dtype)


def _rope_to_json(rope: Rope | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    kinds = {kind: name for name, kind in SCALINGS.items()}
    return {
        **asdict(rope),
        "scaling": None if rope.scaling is None else {"type": kinds[type(rope.scaling)], **asdict(rope.scaling)},
        "theta": frequencies(rope).tolist(),
        "axis_of_pair": None if rope.axes is None else [axis for axis, _ in rope.axes.assign(rope.pairs)],
        "attention_factor": rope.attention_factor,
    }


def _rounded_up(x: float) -> float:
    return float(f"{x * 1.005:.3g}")  # three digits, so that no library's last bit is seen


def _entry(case: Case, truth: Truth, tensors: Mapping[str, tuple[str, NumPyArray]]) -> dict[str, Any]:
    """A case in the manifest; tolerances are for each position, or row, the greatest error of a right result."""
    *_, n, _ = truth.out.shape
    rows = {grade: np.moveaxis(allowed.worst, -2, 0).reshape(n, -1) for grade, allowed in truth.bounds.items()}
    if not case.rotates:
        rows["any"] = list(rows.values())[-1]  # as in manifests of 0.1.0: the loosest
    squares = {g: _rounded_up(a.mean_square) for g, a in truth.bounds.items() if math.isfinite(a.mean_square)}
    return {
        "name": case.name,
        "kind": case.kind,
        "dtype": case.dtype,
        "rope": _rope_to_json(case.rope),
        "options": dict(case.options),
        "safetensors": f"{case.kind}.safetensors",
        "tensors": {
            name: {
                "dtype": dtype,
                "shape": list(array.shape),
                "key": f"{case.name}.{name}",
                "npy": npy_path(case.name, name),
            }
            for name, (dtype, array) in tensors.items()
        },
        "truth_error": _rounded_up(truth.error),
        "tolerances": {grade: list(map(_rounded_up, row.max(axis=-1).tolist())) for grade, row in rows.items()},
        **({"mean_square": squares} if squares else {}),
    }


def write_vectors(
    directory: PathLike, suite: str = "all", *, own: Own | None = None, dtype: str | None = None
) -> dict[str, Any]:
    """Writes a suite ("rotation", "attention", "linear", "all" of these three, or "gradients") to a directory, and
    returns its manifest: the standard cases, or those for one's own rope, of one dtype or of all.

    The directory appears when all is written. One that exists is replaced if it is empty, or holds such vectors and
    nothing else.
    """
    target = Path(os.path.realpath(directory))
    _check_replaceable(target)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        (draft / "npy").mkdir(parents=True)
        manifest = _write(draft, cases(suite, own, dtype))
        _replace(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return manifest


def _write(draft: Path, listed: list[Case]) -> dict[str, Any]:
    entries, files = [], dict[str, dict[str, NumPyArray]]()
    for case in listed:
        truth = TRUTH[case.kind](case)
        tensors = {
            name: ("int64" if array.dtype == np.int64 else case.dtype, _stored(array, case.dtype))
            for name, array in case.inputs.items()
        }
        if case.rotates and case.rope is not None:
            cos, sin = cos_sin(case.rope, case.inputs["positions"])
            tensors |= {"cos": ("float64", cos), "sin": ("float64", sin)}
        tensors["y"] = ("float64", truth.out)
        for name, (_, array) in tensors.items():
            save_npy(draft / npy_path(case.name, name), array)
            files.setdefault(case.kind, {})[f"{case.name}.{name}"] = array
        entries.append(_entry(case, truth, tensors))
    bfloat16 = {
        tensor["key"] for entry in entries for tensor in entry["tensors"].values() if tensor["dtype"] == "bfloat16"
    }
    for kind, arrays in files.items():
        save_safetensors(draft / f"{kind}.safetensors", arrays, {}, bfloat16)
    written = sorted(path for path in draft.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "files": {
            path.relative_to(draft).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in written
        },
        "cases": entries,
    }
    (draft / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        return
    if not target.is_dir():
        raise ValueError(f"{target} must be a directory, or nothing yet")
    own = {"manifest.json", *read_json(target)["files"]} if (target / "manifest.json").is_file() else set()
    for path in target.rglob("*"):
        name = path.relative_to(target).as_posix()
        if name not in own and (path.is_symlink() or not path.is_dir()):
            raise ValueError(
                f"{target} holds something else than test vectors, such as {name}: name an empty or a new directory"
            )


def _replace(draft: Path, target: Path) -> None:
    """The draft becomes the target; if that fails, the old target comes back."""
    if not target.exists():
        os.rename(draft, target)
        return
    old = draft.with_name(f"{draft.name}.old")
    os.rename(target, old)
    try:
        os.rename(draft, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


# Judgement


@np.errstate(all="ignore")  # whatever the vectors and the outputs are
def verify_vectors(
    directory: PathLike, outputs: PathLike | Mapping[str, NumPyArray], *, only: str = "*"
) -> list[Report]:
    """What became of test vectors elsewhere: a report for each case whose name fits ``only``, a shell pattern.

    ``outputs`` are a directory with a file ``<case>.npy`` each, a .safetensors file with a tensor for each case, or a
    dict. An output has the shape of y and the dtype of the case, bfloat16 in .npy as uint16 bits.
    """
    directory, results, manifest = Path(directory), _Outputs(outputs), read_manifest(directory)
    read = [read_case(directory, manifest, entry) for entry in manifest["cases"]]
    unknown = sorted(results.names - {case.name for case, _ in read}, key=str)
    read = [(case, y) for case, y in read if fnmatch.fnmatchcase(case.name, only)]
    if not read:
        raise ValueError(f"no case has a name like {only!r}: see the manifest in {directory}")
    return [_judged(case, y, results, unknown) for case, y in read]


class _Outputs:
    """Where the outputs are, and their names."""

    def __init__(self, source: PathLike | Mapping[str, NumPyArray]) -> None:
        self.arrays: Mapping[str, NumPyArray] | None = None
        if isinstance(source, Mapping):
            self.arrays, self.names = source, set(source)
        elif Path(source).is_dir():
            self.directory, self.names = Path(source), {path.stem for path in Path(source).glob("*.npy")}
        else:
            self.arrays = load_safetensors(source)[0]
            self.names = set(self.arrays)

    def read(self, case: Case, shape: tuple[int, ...]) -> NumPyArray:
        """float64; whatever is wrong with the file or the array is a ValueError."""
        if self.arrays is None:
            dtype = np.dtype("uint16" if case.dtype == "bfloat16" else case.dtype)
            return widened(load_npy(self.directory / f"{case.name}.npy", case.name, shape, dtype), case.dtype)
        given = self.arrays[case.name]
        array, good = plain(given), {case.dtype, "uint16"} if case.dtype == "bfloat16" else {case.dtype}
        if array is None or array.shape != shape or array.dtype.name not in good:
            was = type(given).__name__ if array is None else f"{array.dtype} of shape {array.shape}"
            raise ValueError(f"{case.name} must be {case.dtype} of shape {shape}, was {was}")
        return widened(array, case.dtype)


def _judged(case: Case, y: NumPyArray, outputs: _Outputs, unknown: Sequence[str]) -> Report:
    expected = f"{case.kind} in {case.dtype}, {case.rope or 'not rotated'}"
    expected += "".join(f", {name}={value}" for name, value in case.options.items())
    if case.name not in outputs.names:
        other = f"; there is {unknown[0]!r}, which is no case" if unknown else ""
        fix = "write it, or take vectors of the suites that you support"
        return _not_judged(case, expected, f"there is no output {case.name!r}{other}", fix)
    try:
        out = outputs.read(case, y.shape)
    except ValueError as error:
        fix = f"write {case.dtype}, in .npy little-endian{', as uint16 bits' if case.dtype == 'bfloat16' else ''}"
        return _not_judged(case, expected, str(error), f"{fix}, of y's shape")
    truth = TRUTH[case.kind](case)._replace(out=y)
    off = np.abs(out - y)
    off = np.where(np.isnan(off), np.inf, off)
    errors = _error_rows(case, off, truth)
    for grade, allowed in truth.bounds.items():
        if allowed.ratio(off) <= 1:
            readings = _readings(case, off, truth, False)
            return Report(case.name, expected, "right", (), grade or None, errors, _limits(case, grade), None, readings)
    why = _why(case, out, off, truth)
    if isinstance(why, str):
        return Report(case.name, expected, "equivalent", notes=(why,))
    return Report(case.name, expected, "wrong", tuple(why), None, errors, readings=_readings(case, off, truth, True))


def _not_judged(case: Case, expected: str, reason: str, fix: str) -> Report:
    return Report(case.name, expected, "not judged", failure=Failure(reason, "", fix))


def _limits(case: Case, grade: str) -> tuple[str, ...]:
    """What a grade leaves undecided."""
    if (
        not case.rotates
        or case.rope is None
        or "float32" not in grade
        or (last := tolerance.decides_up_to(case.rope)) >= 2**31
    ):
        return ()
    return (f"a float32 angle may be anything beyond position {last} in the fastest pair: not decided there",)


def _ulps(case: Case, off: NumPyArray, truth: Truth) -> NumPyArray:
    """Errors in units of the last place of the pair's length, or of the size of what is summed."""
    tiny = np.finfo(np.float16 if case.dtype == "float16" else np.float32).tiny
    exponent = np.frexp(np.maximum(truth.size, tiny))[1] - BITS[case.dtype]
    return np.asarray(off * np.exp2(-exponent.astype(np.float64)))


def _ranges(case: Case, count: int) -> list[tuple[str, NumPyArray]]:
    """Names of ranges of positions, by decade, and which of so many rows lie in them."""
    if not case.rotates:
        return [("all rows", np.ones(count, bool))]
    at = np.atleast_2d(np.abs(case.inputs["positions"])).max(axis=0)
    named = [("position 0", at == 0), ("positions 1 to 9", (at > 0) & (at < 10))]
    named += [(f"positions {10**k} to {10 ** (k + 1) - 1}", (at >= 10**k) & (at < 10 ** (k + 1))) for k in range(1, 10)]
    return [(name, rows) for name, rows in named if rows.any()]


def _error_rows(case: Case, off: NumPyArray, truth: Truth) -> tuple[ErrorRow, ...]:
    errors, every = [], _ulps(case, off, truth)
    for name, rows in _ranges(case, off.shape[-2]):
        ulps = every[..., rows, :]
        errors.append(ErrorRow(name, float(ulps.max()), float(np.median(ulps)), float(off[..., rows, :].max())))
    return tuple(errors)


def _readings(case: Case, off: NumPyArray, truth: Truth, wrong: bool) -> Readings:
    """The errors by position, or by token."""
    at = np.arange(off.shape[-2])
    if case.rotates:
        at = np.atleast_2d(np.abs(case.inputs["positions"])).max(axis=0)
    allowed = {grade or "allowed": bound.worst for grade, bound in truth.bounds.items()}
    place = "position" if case.rotates else "token"
    return Readings(errors=errors_by_place(place, at, off, allowed, (off > truth.loosest) & wrong))


_INT32 = Fault(
    "positions in int32", "right below 2^31, where positions turn backwards", "positions overflow 32 bits",
    "use 64 bits, or refuse what does not fit", "kernels", "rotation",
    lambda rope, measured: [Change("", {"place": lambda m: (m + 2**31) % 2**32 - 2**31})])  # fmt: skip


def _why(case: Case, out: NumPyArray, off: NumPyArray, truth: Truth) -> list[Finding] | str:
    """What is wrong; or a note, where only the order of the features differs."""
    bad = off > truth.loosest
    if not bad.any():  # it is the mean square that is off
        bad = off == off.max()
    description, since = _described(case, bad, off, truth)
    if case.turn is not None and case.rotates:
        named = _named_rotation(case, case.turn, out, bad, description)
    elif "of" in case.options:
        name = f"d{case.options['of']}"
        asked = replace(gradient_asked(case), answers={name: out[None]})
        named = GradientCheck(gradients_of(case), case.dtype, "").explained(asked, name)
    else:
        exam = exam_of(case)
        evidence = AttentionEvidence(exam, [out[None]], exam.grades[-1], description)
        named = [] if evidence.holds else explained(evidence)  # the truth that was written may differ in its last bits
    if named:
        return named if isinstance(named, str) or since is None else [replace(f, since=since) for f in named]
    if not np.isfinite(out).all():
        return [FAULTS["not finite"].finding(description, since)]
    fix = "compare step by step, cos and sin first"
    return [Finding("unexplained", description, "none of the known mistakes gives these numbers", fix, since)]


def _named_rotation(case: Case, rope: Rope, out: NumPyArray, bad: NumPyArray, description: str) -> list[Finding] | str:
    """The mistake, of those that `check_rotation` knows, that gives these numbers; or a note."""
    sample = Sample(case.x.astype(np.float64), out, case.inputs["positions"])
    backward = rope is not case.rope
    faults = BACKWARD if backward else FAULTS
    evidence = RotationEvidence(sample, rope, case.dtype, np.where(bad, 2.0, 0.0), faults=faults)
    reads, _, writes = rope.layout.partition("-to-")
    others = {"interleaved": "interleaved-to-half", "half": "half-to-interleaved"}
    if other := reads if writes else others[reads]:
        written = Change("", {"writes": recipe_of(replace(rope, layout=other)).writes})
        if evidence.fitting([order := Hypothesis((faults["another order of features"],), (written,))]):
            if backward:
                return [order.faults[0].finding(description)]
            return f'the features are in the order of "{other}": scores agree if keys are so too'
    factor = None
    if rope.width == rope.head_dim and np.isfinite(out).all():
        factor = rounded(math.sqrt(float(np.square(out).sum() / np.square(sample.x).sum())), 1e-3)
    known = evidence.known(Measurements(bases=COMMON_BASES, factor=factor))
    known += [(_INT32, change) for change in _INT32.changes(rope, None)]
    matches = evidence.fitting(Hypothesis((fault,), (change,)) for fault, change in known)
    matches = [h for h in matches if not evidence.by_chance(evidence.recipe(h))]
    return findings(matches, lambda h, k: "; ".join(filter(None, (h.changes[k].note, description))), None)


def _described(case: Case, bad: NumPyArray, off: NumPyArray, truth: Truth) -> tuple[str, int | None]:
    """How many numbers are off and by how much, and the first position where one is."""
    where = np.unravel_index(int(np.argmax(np.where(bad, off, -1.0))), off.shape)
    worst = f"{off[where]:.3g} ({_ulps(case, off, truth)[where]:.3g} ulps) at {tuple(map(int, where))}"
    words = f"{int(bad.sum())} of {bad.size} numbers are off, the worst by {worst}"
    if not case.rotates:
        return words, None
    at = np.atleast_2d(case.inputs["positions"]).max(axis=0)
    rows, features = bad.any(axis=(0, 2)), bad.any(axis=(0, 1))
    right = f", within what is allowed at {', '.join(map(str, at[~rows][:6]))}" if not rows.all() else ""
    since = int(at[rows].min())
    return f"{words}; first at position {since}{right}; in {int(features.sum())} of {features.size} features", since
