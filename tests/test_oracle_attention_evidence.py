"""How answers of attention are held against predictions: single steps, with numbers worked by hand, and no check."""

import math
from dataclasses import replace

import numpy as np
import pytest
from small_evidence import RIGHT, SIGNS, SPEC, evidence, fault, kind, like, question

from pyrope import Rope
from pyrope.oracle import attention_evidence as module
from pyrope.oracle.ask import Unreadable
from pyrope.oracle.attention_evidence import AttentionEvidence, Prediction, call_by_call, first_wrong
from pyrope.oracle.explain import Change, Hypothesis
from pyrope.oracle.floats import U32
from pyrope.oracle.questions import MANY, Question
from pyrope.oracle.tolerance import ANGLE32, OWN, Allowed

NOISE = Change("", {"low": "softmax"})


# --- Calls of a cache ---


def test_arrays_are_cut_into_calls():
    q, at, seen = np.arange(12.0).reshape(1, 1, 6, 2), np.arange(6)[None] * 10, []

    def step(q, k, positions):
        seen.append((q[0, 0, :, 0].tolist(), k.shape, positions.tolist()))
        return q + positions[:, None, :, None]

    out = call_by_call(step, (1, 2, 3), (q, q[:, :, :, :1], at))
    assert np.array_equal(out, q + 10 * np.arange(6)[:, None])
    assert seen == [([0], (1, 1, 1, 1), [[0]]), ([2, 4], (1, 1, 2, 1), [[10, 20]]), ([6, 8, 10], (1, 1, 3, 1), [[30, 40, 50]])]  # fmt: skip


@pytest.mark.parametrize(
    "result, words", [(None, "returns nothing from"), ([1], "list, which is no NumPy array, from")]
)
def test_a_step_must_return_an_array(result, words):
    with pytest.raises(Unreadable, match=words):
        call_by_call(lambda q: result, (1, 1), [np.zeros((1, 1, 2, 2))])


def test_what_a_mistake_answers_call_by_call():
    exam = evidence([], []).exam
    steps = replace(SIGNS, calls=(2, 1))
    np.testing.assert_allclose(exam.output({}, steps), RIGHT)
    np.testing.assert_allclose(exam.output({"causal": False}, SIGNS), like(SIGNS, 1 / 3, 1 / 3, 1 / 3))
    np.testing.assert_allclose(exam.output({"causal": False}, steps), like(SIGNS, 0, 0, 1 / 3))
    assert exam.output({"output": "transposed"}, steps).size == 0
    assert exam.output({"output": "transposed"}, SIGNS).size == 6


# --- How far off ---


def test_how_far_off_an_answer_is():
    right = Prediction(np.array([1.0, np.inf, 2.0]), Allowed(np.array([0.1, 0.1, 0.5])))
    assert right.ratio(np.array([1.2, np.nan, 2.0])) == pytest.approx(2)
    assert right.ratio(np.array([1.0, np.inf, 2.75])) == pytest.approx(1.5)
    assert right.ratio(np.array([1.0, 5.0, 2.0])) == math.inf == right.ratio(np.array([np.nan, np.inf, 2.0]))
    assert right.ratio(np.zeros(2)) == math.inf


def test_where_an_answer_is_wrong():
    right = Prediction(np.zeros((3, 2, 4, 2)), Allowed(np.full((3, 2, 4, 2), 0.5)))
    answer = np.zeros((3, 2, 4, 2))
    answer[0, 0, 0, 0] = 0.5  # as much as is allowed
    assert first_wrong(right, answer).startswith("no output by itself is further off")
    answer[2, 0, 3], answer[1, 0, 2, 1] = -2, 1.25
    assert first_wrong(right, answer, 10) == (
        "first at token 12 of row 1, head 0, feature 1: expected 0, got 1.25; "
        "3 of 48 outputs are wrong, in 2 of 4 tokens, in rows 1, 2 only, in head 0 only"
    )
    answer[:, 1, 3] = np.nan
    assert first_wrong(right, answer, 10).endswith("; 9 of 48 outputs are wrong, in 2 of 4 tokens; 6 are not finite, from token 13 on")  # fmt: skip
    lost = Prediction(np.full((1, 1, 1, 2), np.nan), Allowed(np.ones((1, 1, 1, 2))))
    assert first_wrong(lost, np.full((1, 1, 1, 2), np.nan)).startswith("no output")
    assert first_wrong(lost, np.zeros((1, 1, 1, 2))).startswith("first at token 0")


def test_the_grades_of_attention():
    exam = evidence([], []).exam
    turned = replace(SPEC, rope=Rope(2, 100.0, "half"))
    assert exam.grades == (OWN,) and replace(exam, spec=turned).grades == (OWN, ANGLE32)
    assert replace(exam, dtype="float16").grades == ("a", "b")


def test_which_answers_are_right():
    more = question([1, 1, 1])
    some = evidence([RIGHT + 0.09, like(more, 1, 1, 1.2)], [SIGNS, more])
    assert some.failed == [1] and not some.holds and some.right(1) is some.right(1)
    assert evidence([RIGHT], [SIGNS]).holds
    assert some.part([0]).holds and some.part([0]).exam.questions == [SIGNS] and some.part([1, 0]).failed == [0]


# --- Which mistakes fit ---


def test_the_nearest_prediction_comes_first():
    near, far = fault("near", {"causal": False}), fault("far", {"added": 0.01, "causal": False})
    tried = [Hypothesis((one,), (one.changes(SPEC, None)[0],)) for one in (far, near)]
    some = evidence([like(SIGNS, 1 / 3, 1 / 3, 1 / 3)], [SIGNS])
    assert [h.faults[0].name for h in some.fitting(tried)] == ["near", "far"]
    other = evidence([like(SIGNS, -1, -1, -1)], [SIGNS])
    assert other.fitting(tried) == []


def test_noise_is_what_is_left(monkeypatch):
    low, other = fault("low", {"low": "softmax"}), fault("other", {"causal": False})
    single = Hypothesis((low,), (NOISE,))
    both = Hypothesis((low, other), (NOISE, Change("", {"causal": False})))
    monkeypatch.setattr(AttentionEvidence, "loses_weights", property(lambda self: True))
    some = evidence([RIGHT + 1], [SIGNS])
    assert some.fitting([single, both]) == [single]
    monkeypatch.setattr(AttentionEvidence, "loses_weights", property(lambda self: False))
    assert some.fitting([single, both]) == []


def test_pairs_take_only_so_much_work(monkeypatch):
    effort = SIGNS.effort  # 20009 for each prediction
    monkeypatch.setattr(module, "_EFFORT", 2.5 * effort)
    a, b = fault("a"), fault("b")
    pairs = [Hypothesis((a, b), (Change(f"{i}", {"causal": False}), Change("", {}))) for i in range(2)]
    some = evidence([RIGHT + 1], [SIGNS])
    assert some.fitting(pairs) == [] and some.remarks == []
    monkeypatch.setattr(module, "_EFFORT", 0.5 * effort)
    monkeypatch.setattr(AttentionEvidence, "_affordable", lambda self, all_of_them: all_of_them)
    assert some.fitting(pairs * 2) == [] and some.remarks == ["the last 3 of these were left out: they take too long"]
    singles = [Hypothesis((a,), (Change("", {"causal": False}),))] * 3
    assert some.fitting(singles) == [] and len(some.remarks) == 1


def test_the_usual_pairs_are_tried_first(monkeypatch):
    a, b = fault("a"), fault("b")
    pairs = [Hypothesis((a, b), (Change(x, {}), Change(y, {}))) for x, y in ("00", "10", "20", "01", "11", "21")]
    some = evidence([RIGHT + 1], [SIGNS])
    monkeypatch.setattr(module, "_PAIRS", 6)
    assert some._affordable(pairs) is pairs and some.remarks == []
    monkeypatch.setattr(module, "_PAIRS", 4)
    kept = some._affordable(pairs)
    assert ["".join(change.note for change in h.changes) for h in kept] == ["00", "10", "01", "20"]
    assert some.remarks == ["of 6 pairs of known mistakes the 4 likeliest were tried"]
    singles = [Hypothesis((a,), (Change("", {}),))] * 5
    assert some._affordable(singles) is singles
    monkeypatch.setattr(module, "_PAIRS", 1000)
    monkeypatch.setattr(module, "_EFFORT", 3 * SIGNS.effort)
    assert len(some._affordable(pairs)) == 3


def test_what_shows_in_the_wrong_answers():
    one = question([1])
    some = evidence([RIGHT + 1], [SIGNS])
    assert some.matters(Change("", {"causal": False})) and not some.matters(Change("", {}))
    assert not some.matters(NOISE) and not some.matters(Change("", {"causal": False, "sinks": 1}))
    assert not evidence([like(one, 2)], [one]).matters(Change("", {"causal": False}))  # with one key nothing is hidden
    # The shortest three are looked at, those with one key last.
    questions = [one, one, SIGNS, question([1, 1]), question([1, 1])]
    some = evidence([like(x, *[5] * x.q.shape[2]) for x in questions], questions)
    assert some.matters(Change("", {"causal": False}))
    long = question([1] * 33 + [-1] * 32)
    some = evidence([like(one, 5), like(long, *[5] * 65)], [one, long])
    assert not some.matters(Change("", {"causal": False}))  # the short one is looked at alone
    assert evidence([like(long, *[5] * 65)], [long]).matters(Change("", {"causal": False}))


def test_what_a_prediction_leaves_open():
    def bounds(spec, dtype, grade, parts, positions, random):
        return Allowed(np.array([0.1, 0.2, 0.3])[:, None] + np.zeros(parts.out.shape), 0.05)

    steps = replace(SIGNS, calls=(2, 1))
    some = evidence([RIGHT, RIGHT], [SIGNS, steps], replace(kind(), bounds=bounds))
    plain = some.predict({"causal": False}, 0)
    assert plain.allowed.worst[0, 0, :, 0].tolist() == [0.1, 0.2, 0.3] and plain.allowed.mean_square == 0.05
    np.testing.assert_allclose(plain.out, like(SIGNS, 1 / 3, 1 / 3, 1 / 3))
    elsewhere = some.predict({"output": "transposed"}, 0).allowed
    assert elsewhere.worst == 0.3 and elsewhere.mean_square == 0.05
    assert some.predict({"batch": "after another"}, 0).allowed == (0.3, math.inf)
    by_step = some.predict({"causal": False}, 1)
    np.testing.assert_allclose(by_step.out, like(SIGNS, 0, 0, 1 / 3))
    assert by_step.allowed.mean_square == 0.05 and some.predict({"causal": False}, 0).out[0, 0, 0, 0] != 0


def test_a_mistake_must_leave_less_than_half_of_an_error():
    wrong = like(SIGNS, 1 / 3, 1 / 3, 1 / 3)  # off by (−2/3, 1/3, 0) from the right (1, 0, 1/3)
    some = evidence([wrong], [SIGNS], kind(worst=0.5))
    assert some.failed == [0] and some._explains({"causal": False}) and not some._explains({})
    # Beyond what is allowed is the first token alone, by 2/3. Its rest is compared with half of that.
    assert evidence([wrong + like(SIGNS, 0.3, 0, 0)], [SIGNS], kind(worst=0.1))._explains({"causal": False}) is False
    assert evidence([wrong + like(SIGNS, -0.3, 0, 0)], [SIGNS], kind(worst=0.1))._explains({"causal": False})
    # What makes other outputs wrong does not explain one of them.
    one = evidence([like(SIGNS, 1, 1 / 3, 1 / 3)], [SIGNS], kind(worst=0.3))
    assert one.failed == [0] and not one._explains({"causal": False})
    assert not evidence([np.zeros((1, 1, 2, 2))], [SIGNS])._explains({"causal": False})
    assert evidence([RIGHT * np.nan], [SIGNS])._explains({"causal": False})  # as the prediction may be
    before = some._work["done"]
    some._explains({"causal": False})
    assert some._work["done"] == before + SIGNS.effort


def test_the_worst_question_counts():
    more = question([-1, 1])
    wrong = [like(SIGNS, 1 / 3, 1 / 3, 1 / 3), like(more, 0.02, 0)]
    some = evidence(wrong, [SIGNS, more])
    assert some._ratio({"causal": False}) == pytest.approx(0.2) and some._ratio({}) == math.inf
    wrong[1] = like(more, 0.15, 0)
    assert evidence(wrong, [SIGNS, more])._ratio({"causal": False}) == pytest.approx(1.5)


# --- Low precision ---


def many(kept, lost):
    """Outputs of MANY: −1, and above that so much of what the small weights bring, in the first row and the second."""
    out = np.full((2, 1, 128, 2), -1.0)
    out[0, :, 64:] += 0.2 * kept
    out[1, :, 64:] += 0.2 * lost
    return out


@pytest.mark.parametrize("dtype, low, kept, lost, expected", [
    ("float32", "float16", 1, 0.79, True), ("float32", "float16", 1, 0.81, False), ("float32", "float16", 1, -0.24, True),
    ("float32", "float16", 1, -0.26, False), ("float32", "float16", 0.51, 0, True), ("float32", "float16", 0.49, 0, False),
    ("float32", "float16", 1.49, 0, True), ("float32", "float16", 1.51, 0, False), ("float32", "bfloat16", 0, 0, True),
    ("float32", "bfloat16", 1.24, 0, True), ("float32", "bfloat16", 1.26, 0, False), ("bfloat16", "float16", 0, 0, True),
    ("float16", "float16", 0, 0, False), ("float16", "float16", 1, 0, True),
])  # fmt: skip
def test_small_weights_that_are_lost(dtype, low, kept, lost, expected):
    some = evidence([], [], spec=replace(SPEC, low=type("", (), {"name": low})()))
    some = replace(some, exam=replace(some.exam, dtype=dtype))
    assert some._lost(many(1, 1), many(kept, lost)) is expected
    assert not some._lost(many(1, 1), many(kept, lost)[:, :, 1:])
    assert not some._lost(many(1, 1), many(kept, math.nan))


def losing(asks, ratio=1.5, **fields):
    """MANY with its small weights lost, and another question that is so many times further off than is allowed."""
    lossy = question([1] * 128, MANY, b=2, random=False)
    some = evidence([many(1, 0), RIGHT + 0.1 * ratio], [lossy, SIGNS], kind(truth=lambda spec, q, k, v: many(1, 1)[:, :, : q.shape[2]] if q.shape[2] > 3 else RIGHT), asks)  # fmt: skip
    return replace(some, **fields)


def test_weights_are_lost_among_fewer_tokens_too(monkeypatch):
    monkeypatch.setattr(AttentionEvidence, "scattered", True)
    asked = []

    def asks(cut):
        asked.append(cut.q.shape)
        return many(1, 0)[:, :, :100]

    assert losing(asks).loses_weights and asked == [(2, 1, 100, 2)]
    assert not losing(lambda cut: many(1, 1)[:, :, :100]).loses_weights
    assert losing(None).loses_weights and losing(asks, 3.9).loses_weights and not losing(asks, 4.1).loses_weights
    kept = losing(asks)
    assert not replace(kept, answers=[many(1, 1), kept.answers[1]]).loses_weights
    assert not replace(kept, answers=[many(1.9, 1.9), kept.answers[1]]).loses_weights
    monkeypatch.setattr(AttentionEvidence, "scattered", False)
    assert not losing(asks).loses_weights


def test_what_cannot_be_asked():
    def refuses(asked):
        raise Unreadable("refuses", "", "raised")

    assert evidence([], [])._asked(SIGNS) is None and evidence([], [], asks=refuses)._asked(SIGNS) is None
    assert evidence([], [], asks=lambda asked: 3)._asked(SIGNS) == 3


def test_rounding_is_other_when_the_numbers_change_a_little():
    rng = np.random.default_rng(0)
    at_zero = question(rng.standard_normal(32), positions=np.zeros((1, 32), int))
    elsewhere = question(rng.standard_normal(32), positions=np.arange(32)[None])
    calm = question(rng.standard_normal(32), random=False)
    truth = kind(truth=lambda spec, q, k, v, positions=None: np.zeros(q.shape))
    noise = rng.standard_normal((1, 1, 32, 2))
    asked = []

    def asks(answer):
        def reply(near):
            asked.append(near)
            return answer

        return reply

    for answer, expected in ((noise, False), (-noise, True), (rng.standard_normal(noise.shape), True), (noise * np.nan, False), (noise[..., :1], False)):  # fmt: skip
        assert evidence([noise], [at_zero], truth, asks(answer)).scattered is expected
    across = noise[..., ::-1] * [1, -1]  # as long, and at right angles
    for cosine, expected in ((0.49, True), (0.51, False)):
        mixed = 3 * (cosine * noise + math.sqrt(1 - cosine**2) * across)
        assert evidence([noise], [at_zero], truth, asks(mixed)).scattered is expected
    assert evidence([noise], [at_zero], truth).scattered  # nothing more can be asked
    asked.clear()
    assert evidence([noise] * 3, [calm, elsewhere, at_zero], truth, asks(-noise)).scattered
    assert [one.positions is at_zero.positions for one in asked] == [
        True
    ]  # where angles are exact, if it is wrong there
    asked.clear()
    assert evidence([noise] * 5, [elsewhere] * 5, truth, asks(-noise)).scattered and len(asked) == 3
    ones = replace(at_zero, q=np.ones_like(at_zero.q), k=np.full_like(at_zero.k, 2))
    asked.clear()
    evidence([noise], [ones], truth, asks(-noise)).scattered  # noqa: B018
    for near, x in ((asked[0].q, 1), (asked[0].k, 2)):
        assert near.dtype == np.float32 and 2**-7 < (near / x - 1).std() < 2**-5 and abs(near / x - 1).max() < 2**-3


def test_what_rounding_looks_like(monkeypatch):
    monkeypatch.setattr(AttentionEvidence, "scattered", True)
    unit, rng = 2.0**-11, np.random.default_rng(0)
    out = rng.standard_normal((1, 1, 40, 2))
    out /= math.sqrt((out**2).mean())
    noise = rng.standard_normal(out.shape)
    noise /= math.sqrt((noise[..., -21:, :] ** 2).mean())
    asked = question([1] * 40)

    def looks(error, count=1, questions=None):
        """Of errors of so many times what the outputs are."""
        of = kind(truth=lambda spec, q, k, v, **options: 4 * out[:, :, -q.shape[2] :])
        listed = questions or [asked] * count
        return evidence([4 * (out[:, :, -x.q.shape[2] :] + error) for x in listed], listed, of).rounds_to("float16")

    assert looks(unit * noise) and looks(unit / 31.9 * noise) and not looks(unit / 32.1 * noise)
    assert not looks(unit * (noise + 0.5)) and looks(unit * (noise + 0.2)) and not looks(unit * np.abs(noise))
    assert not looks(unit * (0.6 * out + 0.5 * noise)) and looks(unit * (0.2 * out + noise))
    sparse = np.where(rng.random(out.shape) < 0.3, noise, 0)
    assert not looks(unit * sparse) and not looks(unit * noise * np.nan)
    for small, rounding in ((1 / 19.5, True), (1 / 20.5, False)):  # of the spread, in most outputs
        uneven = np.zeros(out.shape)
        large = math.sqrt((42 - 24 * small**2) / 18)
        uneven[0, 0, -21:].flat = np.where(np.arange(42) % 7 < 3, large, small) * np.where(np.arange(42) % 2, 1, -1)
        assert looks(unit * uneven) is rounding
    early = unit * noise
    early[:, :, :19] = 5  # only the second half of the tokens is looked at, and one more
    assert looks(early)
    early[:, :, 19] = 5
    assert not looks(early)
    assert not looks(0, questions=[question([1, 1])]) and not looks(0, questions=[replace(asked, random=False)])
    monkeypatch.setattr(AttentionEvidence, "scattered", False)
    assert not looks(unit * noise)


def test_most_questions_must_look_like_rounding(monkeypatch):
    monkeypatch.setattr(AttentionEvidence, "scattered", True)
    rng, asked = np.random.default_rng(0), question([1] * 40)
    out = np.ones((1, 1, 40, 2))
    of = kind(truth=lambda spec, q, k, v: out)
    noisy = out + 2.0**-11 * np.where(np.arange(80).reshape(out.shape) // 2 % 2, 1, -1) * (
        1 + 0.1 * rng.random(out.shape)
    )
    for exact, expected in ((1, True), (2, False)):
        answers = [noisy] * (5 - exact) + [out] * exact
        assert evidence(answers, [asked] * 5, of).rounds_to("float16") is expected


# --- Numbers that are measured ---


def scored(scale):
    """Two keys of the scores ±1 for each query, which sees both, with the values 1 and −1."""
    share = math.exp(scale) / (math.exp(scale) + math.exp(-scale))
    return 2 * share - 1


def two_keys(scale, **fields):
    k = np.array([[1.0, 0], [-1, 0]], np.float32)[None, None]
    q = np.array([[1.0, 0], [1, 0]], np.float32)[None, None]
    v = np.array([[1.0, 1], [-1, -1]], np.float32)[None, None]
    asked = Question("two keys", q, k, v, **fields)
    return asked, np.full((1, 1, 2, 2), scored(scale))


def test_a_scale_is_tuned():
    spec = replace(SPEC, causal=False)
    asked, answer = two_keys(1.7)

    def tuned(starts, around=2, answer=answer, asked=asked):
        some = evidence([answer], [asked], kind(worst=1e-3), spec=spec)
        return some.tuned(lambda x: {"scale": x}, starts, around)

    assert tuned([1.5]) == pytest.approx((1.7,), rel=1e-9) and tuned([0.01, 1.5, 30.0]) == pytest.approx(
        (1.7,), rel=1e-9
    )
    assert tuned([1.0], 1.05) == (1.0,)  # it is further off than that
    assert tuned([1.0], answer=answer * np.nan) == () and tuned([1.0], answer=answer[..., :1]) == ()
    for other in (replace(asked, random=False), replace(asked, calls=(1, 1))):
        assert tuned([1.0], asked=other) == ()
    assert tuned([1.0], answer=np.full((1, 1, 2, 2), scored(1.0))) == ()  # nothing failed


def test_the_scale_of_calls_of_several_lengths():
    k = np.array([[1.0, 0], [-1, 0], [-1, 0], [1, 0]], np.float32)[None, None]
    v = np.array([[1.0, 1], [-1, -1], [-1, -1], [1, 1]], np.float32)[None, None]

    def asked(m, queries=1):
        q = np.array([[1.0, 0]] * queries, np.float32)[None, None]
        return Question(f"{m} keys", q, k[:, :, :m], v[:, :, :m])

    def answer(m, scale):
        weights = np.exp(scale * k[0, 0, :m, 0].astype(float))
        return np.full((1, 1, 1, 2), (weights * v[0, 0, :m, 0]).sum() / weights.sum())

    def scales(listed, scale=1.0):
        questions = [asked(m) for m, _ in listed]
        return evidence(
            [answer(m, s) for m, s in listed],
            questions,
            kind(worst=1e-3),
            spec=replace(SPEC, causal=False, scale=scale),
        ).scales()

    assert scales([(3, 0.5), (4, 2.0)]) == "the scale is 0.5 with 3 keys, 2 with 4 keys, 1 expected"
    assert scales([(4, 2.0), (3, 0.5), (3, 0.6)]) == "the scale is 0.5 with 3 keys, 2 with 4 keys, 1 expected"
    assert scales([(3, 0.5)]) == scales([(3, 0.5), (4, 0.503)]) == scales([(2, 0.5), (4, 2.0)]) == ""
    assert scales([(3, 0.5), (4, 0.507)]) != ""
    assert scales([(3, 0.5), (4, 2.0)], 2.0) == ""  # the second is right then, so that one length alone is wrong
    assert scales([(3, 0.5), (4, 1.0)], 2.0) == "the scale is 0.5 with 3 keys, 1 with 4 keys, 2 expected"


def test_windows_that_the_first_wrong_tokens_show():
    late, cached = question([1] * 6), question([1] * 6, queries=2)
    masked = question([1] * 6, options={"mask": np.ones((1, 1, 6, 6), bool)})
    wrong, short = np.ones((1, 1, 6, 2)), np.ones((1, 1, 2, 2))
    wrong[:, :, 3:] = 5
    short[:, :, 1:] = 5
    questions, answers = [late, cached, masked, replace(late, calls=(3, 3))], [wrong, short, wrong, wrong]
    assert evidence(answers, questions).windows() == (3, 5)
    assert evidence([wrong, wrong * 0 + 5], [late, late]).windows() == (3,)  # at the first token none can be seen
    assert evidence(answers, questions, spec=replace(SPEC, causal=False)).windows() == ()
    other = [np.where(np.arange(6)[:, None] >= i, 5.0, np.ones((1, 1, 6, 2))) for i in (5, 4, 2, 1, 3)]
    assert evidence(other, [late] * 5).windows() == (1, 2, 3, 4)


# --- In words ---


def test_mistakes_of_a_part_of_the_calls():
    ways = [
        {"causal": True, "added": 1.0},
        {"causal": True, "added": 2.0},
        {"causal": False},
        {"causal": False, "nothing": "x"},
    ]
    tried = []
    some = evidence([like(SIGNS, 1 / 3, 1 / 3, 1 / 3)], [SIGNS], kind(faults=[fault("masks", *ways)]))
    object.__setattr__(some, "fitting", lambda hypotheses: tried.extend(hypotheses) or tried)
    some.alike()
    assert [(h.faults[0].name, h.changes[0].fields) for h in tried] == [("masks", way) for way in ways[:3]]
    assert evidence([np.zeros((1, 1, 2, 2))], [question([1, 1])], kind(faults=[fault("masks", *ways)])).alike() == []


def test_what_separates_wrong_from_right():
    short, long = question([1] * 3), question([1] * 9)
    right, wrong = (lambda x: like(x, *[1] * x.q.shape[2])), (lambda x: like(x, *[5] * x.q.shape[2]))
    some = evidence([right(short), wrong(long)], [short, long])
    assert some.separated() == "by queries: wrong 9; right 3; by keys: wrong 9; right 3"
    batch, cached = question([1] * 3, b=2), question([1] * 9, queries=3)
    assert evidence([right(short), wrong(batch)], [short, batch]).separated() == "by rows: wrong 2; right 1"
    keys = "by keys: wrong 9; right 3; by queries and keys: wrong fewer; right as many"
    assert evidence([right(short), wrong(cached)], [short, cached]).separated() == keys
    stepwise = replace(short, calls=(1, 2))
    assert (
        evidence([right(short), wrong(stepwise)], [short, stepwise]).separated()
        == "by way to call: wrong step by step; right at once"
    )
    masked = replace(short, options={"mask": np.ones((1, 1, 3, 3), bool)})
    assert evidence([wrong(short), right(masked)], [short, masked]).separated() == "by options: wrong none; right mask"
    both = evidence([right(short), wrong(long), wrong(short)], [short, long, short])
    assert both.separated() == ""
    silent = replace(short, random=False)
    assert evidence([right(silent), wrong(long)], [silent, long]).separated() == ""
    sizes = [question([1] * m) for m in range(3, 10)]
    for count, words in (
        (5, "by queries: wrong 9; right 3, 4, 5, 6, 7; by keys: wrong 9; right 3, 4, 5, 6, 7"),
        (6, ""),
    ):
        asked = [*sizes[:count], sizes[-1]]
        answers = [right(x) for x in asked[:-1]] + [wrong(asked[-1])]
        assert evidence(answers, asked).separated() == words


def test_multiples_of_what_is_right():
    more = question([1, 1])
    some = evidence([RIGHT * 3, like(more, 3, 3)], [SIGNS, more])
    assert some.multiple() == "all outputs are the right ones times 3"
    assert evidence([RIGHT * 3, like(more, 3, 3.5)], [SIGNS, more]).multiple() == ""
    assert evidence([RIGHT * 0, like(more, 0, 0)], [SIGNS, more]).multiple() == ""
    assert evidence([RIGHT * np.nan], [SIGNS]).multiple() == evidence([RIGHT[..., :1]], [SIGNS]).multiple() == ""


def test_errors_in_ulps():
    off, more = RIGHT.copy(), question([1, 1], "more")
    off[0, 0, 0, 0] += 4 * U32
    some = evidence([off, like(more, 1, np.inf), np.zeros((1, 1, 2, 1))], [SIGNS, more, more])
    assert some.eps == 2 * U32 == 2.0**-23
    first, second = some.errors()
    assert (first.where, first.worst, first.typical, first.absolute) == ("a question", 2, 0, 4 * U32)
    assert second.where == "more" and second.worst == second.typical == second.absolute == math.inf


def test_what_is_wrong_in_numbers():
    def described(answer, of=None, **fields):
        return evidence([RIGHT, answer], [SIGNS, SIGNS], of, **fields).described()

    answer = RIGHT.copy()
    answer[0, 0, 2, 1] += 0.5
    where = "first at token 2 of row 0, head 0, feature 1: expected 0.333333, got 0.833333; 1 of 6 outputs are wrong, in 1 of 3 tokens"
    assert (
        described(answer) == f'question "a question": outputs are off by up to 0.5 where rounding explains 0.1; {where}'
    )
    mean = f", and in the mean square by {math.sqrt(0.25 / 6):.2g} instead of 0.01; {where}"
    assert described(answer, kind(mean_square=0.01)).endswith(f"rounding explains 0.1{mean}")
    assert described(answer, description="said before") == "said before"
    assert described(RIGHT[..., :1]) == 'question "a question": the shape is (1, 1, 3, 1), must be (1, 1, 3, 2)'
    answer[0, 0, 2] = np.nan
    assert described(answer).startswith('question "a question": 33% of the outputs are not finite; first at token 2')

    def bounds(spec, dtype, grade, parts, positions, random):
        return Allowed(np.array([10.0, 0.1, 0.1])[:, None] + np.zeros(parts.out.shape))

    answer = RIGHT.copy()
    answer[0, 0, 0, 0] += 5
    answer[0, 0, 1, 0] += 0.3
    assert "off by up to 5, by 0.3 where rounding explains 0.1;" in described(answer, replace(kind(), bounds=bounds))


def test_the_evidence_for_a_mistake():
    one = Hypothesis((fault("a"), fault("b")), (Change("", {"scale": 2.0}), Change("", {"causal": False})))
    some = evidence([RIGHT + 1], [SIGNS], description="wrong")
    assert (
        some.explained_by(one, 0)
        == "wrong. This mistake (a scale 2 times the expected one) gives the numbers of this case."
    )
    assert some.explained_by(one, 1) == "wrong. This mistake gives the numbers of this case."
    both = evidence([RIGHT + 1] * 2, [SIGNS] * 2, description="wrong")
    assert both.explained_by(one, 1).endswith("gives the numbers of all 2 questions.")
    assert some.explained_by(Hypothesis((fault("low"),), (NOISE,)), 0) == "wrong."


def test_the_first_wrong_token():
    answer = RIGHT.copy()
    answer[0, 0, 1:, 1] += 0.11
    assert evidence([answer], [SIGNS]).since(0) == 1 and evidence([RIGHT], [SIGNS]).since(0) is None
    assert evidence([RIGHT[..., :1]], [SIGNS]).since(0) is None
    answer[0, 0, 0, 0] = np.nan
    assert evidence([answer], [SIGNS]).since(0) == 0
