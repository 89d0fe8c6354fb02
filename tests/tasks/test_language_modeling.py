import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from edgeformer.data.batching import IGNORED
from edgeformer.tasks.classification import softmax
from edgeformer.tasks.early_exit import ExitNotes
from edgeformer.tasks.language_modeling import LanguageMeter, LanguageScore, exit_thresholds
from edgeformer.tasks.metric import token_losses, top_probability

EXITS = (2, 4, 6, 8)


def measurements(tokens, seed=0):
    generator = np.random.default_rng(seed)
    losses = {loop: generator.gamma(2.0, 1.5, tokens).astype(np.float32) for loop in EXITS}
    confidence = {loop: generator.uniform(0.6, 1.0, tokens).astype(np.float32) for loop in EXITS}
    return losses, confidence


def cut(values, where):
    return {loop: array[where] for loop, array in values.items()}


def in_batches(losses, confidence, sizes) -> LanguageMeter:
    meter = LanguageMeter(EXITS)
    ends = np.cumsum(sizes)
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        part = slice(start, end)
        meter.add_tokens(cut(losses, part), None if confidence is None else cut(confidence, part))
    return meter


def test_losses_and_confidence_against_other_implementations():
    generator = np.random.default_rng(3)
    logits = (generator.normal(size=(300, 40)) * 4).astype(np.float32)
    targets = generator.integers(0, 40, 300)
    losses = token_losses(logits, targets)
    assert (losses.dtype, losses.shape) == (np.float64, (300,))
    probabilities = softmax(logits)
    assert losses.mean() == pytest.approx(metrics.log_loss(targets, probabilities, labels=range(40)), rel=1e-9)
    assert losses == pytest.approx(-np.log(probabilities[np.arange(300), targets]), rel=1e-9)
    assert top_probability(logits) == pytest.approx(probabilities.max(axis=-1), rel=1e-12)


def test_large_logits_do_not_overflow():
    logits = np.array([[3e4, -3e4, 0.0], [0.0, 0.0, 0.0]], dtype=np.float32)
    assert token_losses(logits, np.array([1, 2])) == pytest.approx([6e4, math.log(3)])
    assert top_probability(logits) == pytest.approx([1.0, 1 / 3])


@pytest.mark.parametrize("target", [-100, -1, 3])
def test_what_is_not_predicted_has_no_loss(target):
    with pytest.raises(ValueError, match=r"targets must be in 0…2"):
        token_losses(np.zeros((2, 3)), np.array([0, target]))
    assert token_losses(np.zeros((0, 3)), np.zeros(0, dtype=np.int64)).shape == (0,)


def test_thresholds_fall_to_their_floor():
    found = exit_thresholds(range(1, 12))
    assert found[1] == 0.92
    assert found[3] == pytest.approx(0.92 * 0.98 * 0.98)
    assert found[7] == pytest.approx(0.81497499)
    assert found[8] == found[11] == 0.80  # 0.92 · 0.98⁷ is 0.7987
    assert exit_thresholds([2], start=0.5, floor=0.1, decay=0.5) == {2: 0.25}


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any), st.integers(0, 99))
def test_batches_do_not_matter(sizes, seed):
    losses, confidence = measurements(sum(sizes), seed)
    one = in_batches(losses, confidence, [sum(sizes)]).score(words=sum(sizes))
    many = in_batches(losses, confidence, sizes).score(words=sum(sizes))
    assert many.n == one.n == sum(sizes)
    assert many.loss == pytest.approx(one.loss, rel=1e-12)
    assert many.early_exit.loss == pytest.approx(one.early_exit.loss, rel=1e-12)
    assert many.early_exit.share == one.early_exit.share
    for loop in EXITS:
        expected = losses[loop].astype(np.float64).mean()
        assert many.exits[str(loop)].loss == pytest.approx(expected, rel=1e-12)
        assert many.exits[str(loop)].perplexity == pytest.approx(math.exp(expected), rel=1e-9)


def test_it_is_no_mean_of_batch_means():
    losses = {loop: np.concatenate([np.full(90, 1.0), np.full(10, 5.0)]) for loop in EXITS}
    score = in_batches(losses, None, [90, 10]).score()
    assert score.loss == pytest.approx(1.4)  # the mean of the two batches' means is 3


def test_early_exit_against_token_by_token():
    losses, confidence = measurements(500)
    score = in_batches(losses, confidence, [300, 200]).score()
    thresholds = {2: 0.92 * 0.98, 4: 0.92 * 0.98**3, 6: 0.92 * 0.98**5}
    total, left = 0.0, dict.fromkeys(EXITS, 0)
    for token in range(500):
        sure = (loop for loop in (2, 4, 6) if confidence[loop][token] >= thresholds[loop])
        loop = next(sure, 8)
        left[loop] += 1
        total += float(losses[loop][token])
    assert min(left.values()) > 10
    early = score.early_exit
    assert early.loss == pytest.approx(total / 500)
    assert early.perplexity == pytest.approx(math.exp(total / 500))
    assert early.share == {str(loop): count / 500 for loop, count in left.items()}
    assert early.mean_loops == pytest.approx(sum(loop * count for loop, count in left.items()) / 500)
    assert early.thresholds == pytest.approx({str(loop): value for loop, value in thresholds.items()})


@pytest.mark.parametrize(("value", "leaves"), [(0.0, "8"), (1.0, "2")])
def test_all_or_nobody_leaves_early(value, leaves):
    losses, _ = measurements(50)
    sure = {loop: np.full(50, value) for loop in EXITS[:-1]}  # nobody asks how sure the last loop is
    early = in_batches(losses, sure, [50]).score().early_exit
    assert (early.share[leaves], early.mean_loops) == (1.0, float(leaves))
    assert early.loss == pytest.approx(losses[int(leaves)].astype(np.float64).mean())


def test_words_make_another_perplexity():
    losses = {8: np.array([1.0, 2.0, 3.0, 6.0])}
    meter = LanguageMeter([8])
    meter.add_tokens(losses)
    score = meter.score(words=3)
    assert (score.n, score.words, score.loss) == (4, 3, 3.0)
    assert score.perplexity == pytest.approx(math.exp(3.0))
    assert score.word_perplexity == pytest.approx(math.exp(4.0))
    assert (meter.score().words, meter.score().word_perplexity, meter.score().early_exit) == (None, None, None)


def test_a_hopeless_model_has_a_score_that_can_be_written():
    meter = LanguageMeter([1])
    meter.add_tokens({1: np.array([6e4])})
    score = meter.score(words=1)
    assert score.loss == 6e4
    assert math.isfinite(score.perplexity)
    assert score.perplexity > 1e300
    assert LanguageScore.model_validate_json(score.model_dump_json()) == score


class TestBatchesOfAModel:
    """[B, S] targets, of which some are padding, against each form in which models answer."""

    targets = np.array([[1, 2, IGNORED, IGNORED], [0, 1, 2, 0]])
    kept = targets.reshape(-1) != IGNORED

    def logits(self, seed):
        return np.random.default_rng(seed).normal(size=(2, 4, 3)).astype(np.float32) * 6

    def losses(self, logits):
        flat = logits.reshape(-1, 3)[self.kept]
        return token_losses(flat, self.targets.reshape(-1)[self.kept])

    def sure(self, logits):
        return top_probability(logits.reshape(-1, 3)[self.kept])

    def test_logits_of_the_last_loop(self):
        meter = LanguageMeter([8])
        meter.add({"logits": self.logits(0)}, {"targets": self.targets})
        score = meter.score()
        assert (score.n, score.loss) == (6, pytest.approx(self.losses(self.logits(0)).mean()))
        assert score.early_exit is None

    def test_logits_of_every_exit(self):
        answers = {loop: self.logits(loop) for loop in (1, 3)}
        meter, expected = LanguageMeter([1, 3]), LanguageMeter([1, 3])
        meter.add({f"logits_exit{loop}": found for loop, found in answers.items()}, {"targets": self.targets})
        expected.add_tokens(
            {loop: self.losses(found) for loop, found in answers.items()},
            {loop: self.sure(found) for loop, found in answers.items()},
        )
        assert meter.score() == expected.score()
        assert meter.score().early_exit is not None and 0 < meter.score().early_exit.share["1"] < 1

    @pytest.mark.parametrize("with_confidence", [False, True])
    def test_losses_of_every_exit(self, with_confidence):
        answers = {loop: np.random.default_rng(loop).gamma(2.0, size=(2, 4)).astype(np.float32) for loop in (1, 3)}
        sure = np.array([[0.99, 0.5, 1.0, 1.0], [0.5, 0.99, 0.99, 0.5]], dtype=np.float32)
        outputs = {f"loss_exit{loop}": found for loop, found in answers.items()}
        if with_confidence:
            outputs["confidence_exit1"] = sure
        meter = LanguageMeter([1, 3])
        meter.add(outputs, {"targets": self.targets})
        score, flat = meter.score(), {loop: found.reshape(-1)[self.kept] for loop, found in answers.items()}
        assert {loop: found.loss for loop, found in score.by_exit.items()} == pytest.approx(
            {loop: float(found.mean()) for loop, found in flat.items()}
        )
        if not with_confidence:
            assert score.early_exit is None
            return
        left = np.where(sure.reshape(-1)[self.kept] > 0.9, flat[1], flat[3])
        assert score.early_exit.loss == pytest.approx(float(left.mean()))
        assert score.early_exit.share == {"1": 0.5, "3": 0.5}

    def test_rows_without_their_targets_are_refused(self):
        for targets in (self.targets[:1], np.concatenate([self.targets, self.targets])):
            with pytest.raises((ValueError, IndexError)):
                LanguageMeter([8]).add({"logits": self.logits(0)}, {"targets": targets})


def test_notes_hear_of_every_token_at_every_exit():
    losses, confidence = measurements(100)
    notes = ExitNotes(EXITS)
    meter = LanguageMeter(EXITS, notes)
    del confidence[8]  # nobody asks how sure the last loop is
    meter.add_tokens(losses, confidence)
    early, found = meter.score().early_exit, notes.leave(exit_thresholds(EXITS[:-1]))
    assert (found.loss, found.mean_loops, found.share) == (pytest.approx(early.loss), early.mean_loops, early.share)
    assert notes.leave({}).loss == pytest.approx(float(losses[8].mean()))


def test_tokens_leave_by_cosine_where_it_is_known():
    notes = ExitNotes((1, 2))
    meter = LanguageMeter((1, 2), notes)
    outputs = {f"loss_exit{loop}": np.array([[float(loop), 10.0 * loop]]) for loop in (1, 2)}
    outputs |= {f"confidence_exit{loop}": np.array([[0.1, 0.99]]) for loop in (1, 2)}
    assert notes.rules == ()
    meter.add(
        {**outputs, "cosine_exit1": np.array([[0.99, 0.1]]), "cosine_exit2": np.ones((1, 2))},
        {"targets": np.ones((1, 2), dtype=int)},
    )
    assert notes.rules == ("confidence", "cosine")
    assert notes.leave({1: 0.9}).loss == pytest.approx((2 + 10) / 2)
    assert notes.leave({1: 0.9}, "cosine").loss == pytest.approx((1 + 20) / 2)


def test_a_token_that_is_just_sure_enough_leaves():
    meter = LanguageMeter([1, 2])
    meter.add_tokens({1: np.zeros(1), 2: np.ones(1)}, {1: np.array([0.92])})
    assert meter.score().early_exit.share == {"1": 1.0, "2": 0.0}


def test_exits_come_in_the_order_of_their_loops():
    meter = LanguageMeter([2, 10])
    meter.add_tokens({2: np.array([2.0]), 10: np.array([1.0])})
    score = meter.score()
    assert [(loop, found.loss) for loop, found in score.by_exit.items()] == [(2, 2.0), (10, 1.0)]
    shuffled = score.model_copy(update={"exits": dict(sorted(score.exits.items()))})
    assert list(shuffled.exits) == ["10", "2"] and list(shuffled.by_exit) == [2, 10]


def test_sums_are_double_precision():
    meter = LanguageMeter([1])
    for _ in range(4):
        meter.add_tokens({1: np.array([2.0**24, 1.0, 1.0, 1.0], dtype=np.float32)})
    assert meter.score().loss == (2**24 + 3) / 4


def test_wrong_use_is_refused():
    losses, confidence = measurements(10)
    with pytest.raises(ValueError, match="empty"):
        LanguageMeter(EXITS).score()
    with pytest.raises(ValueError, match="exits must rise"):
        LanguageMeter([4, 2])
    with pytest.raises(ValueError, match="losses of the same tokens"):
        LanguageMeter(EXITS).add_tokens({2: losses[2]})
    with pytest.raises(ValueError, match="losses of the same tokens"):
        LanguageMeter(EXITS).add_tokens({**losses, 4: losses[4][:5]})
    with pytest.raises(ValueError, match="confidence of the same tokens at exit 4"):
        LanguageMeter(EXITS).add_tokens(losses, {**confidence, 4: confidence[4][:5]})
    meter = LanguageMeter(EXITS)
    meter.add_tokens(losses, confidence)
    with pytest.raises(ValueError, match="every batch comes with confidence, or none"):
        meter.add_tokens(losses)
