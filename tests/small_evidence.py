"""Evidence about attention that is small enough to be worked by hand."""

import math

import numpy as np

from pyrope.oracle.attention_evidence import AttentionEvidence, Exam, Kind
from pyrope.oracle.attention_faults import Measurements
from pyrope.oracle.attention_steps import Steps
from pyrope.oracle.explain import Change, Fault
from pyrope.oracle.questions import Question
from pyrope.oracle.tolerance import OWN, Allowed
from pyrope.oracle.truth import Spec, softmax_attention

SPEC = Spec(1, 1, 2, True, scale=1.0)


def fault(name, *ways):
    """A mistake with these ways to make it, if its fields are given."""
    return Fault(name, "", "", "", changes=lambda spec, measured: [Change(str(x), x) for x in ways])


def kind(worst=0.1, mean_square=math.inf, truth=softmax_attention, faults=()):
    """Attention whose outputs may all be so far off."""

    def bounds(spec, dtype, grade, parts, positions, random):
        return Allowed(np.full(parts.out.shape, worst), mean_square)

    low = fault("low", {"low": "softmax"})
    listed = {one.name: one for one in (*faults, low)}
    return Kind("attention", Steps(), truth, bounds, ("a", "b"), listed, low, lambda evidence, fn: Measurements(), lambda evidence: ("", ""))  # fmt: skip


def question(values, name="a question", b=1, queries=None, **fields):
    """Keys are zeros, so that each query takes the mean of the values that it sees."""
    v = np.zeros((b, 1, len(values), 2), np.float32)
    v[...] = np.array(values, np.float32)[:, None]
    q = np.zeros((b, 1, len(values) if queries is None else queries, 2), np.float32)
    return Question(name, q, np.zeros_like(v), v, **fields)


def evidence(answers, questions, of=None, asks=None, spec=SPEC, **fields):
    exam = Exam(of or kind(), "", spec, "float32", questions)
    return AttentionEvidence(exam, answers, OWN, asks=asks, **fields)


def like(one, *numbers):
    """An answer to a question, by its tokens."""
    return np.zeros(one.q.shape) + np.array(numbers, float)[:, None]


SIGNS = question([1, -1, 1])
RIGHT = like(SIGNS, 1, 0, 1 / 3)
