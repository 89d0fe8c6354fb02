"""Language-model scores: losses per exit, early exit by confidence, and every form of model outputs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeformer.data.batching import IGNORED
from edgeformer.tasks.early_exit import EarlyExit, ExitRecords
from edgeformer.tasks.language_modeling import LanguageMeter, LanguageScore
from edgeformer.tasks.metric import token_losses, top_probability

EXITS = (2, 4, 6, 8)
TARGETS = np.array([[1, 2, IGNORED, IGNORED], [0, 1, 2, 0]])
COUNTED = TARGETS.reshape(-1) != IGNORED


def random_tokens(count, seed=0):
    """Losses and confidence of ``count`` tokens at every exit."""
    generator = np.random.default_rng(seed)
    losses = {loop: generator.gamma(2.0, 1.5, count).astype(np.float32) for loop in EXITS}
    confidence = {loop: generator.uniform(0.6, 1.0, count).astype(np.float32) for loop in EXITS}
    return losses, confidence


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any), st.integers(0, 99))
def test_scores_do_not_depend_on_batches(sizes, seed):
    count, scores = sum(sizes), []
    losses, confidence = random_tokens(count, seed)
    for parts in ([count], sizes):
        meter, ends = LanguageMeter(EXITS), np.cumsum(parts)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            batch = [{loop: array[start:end] for loop, array in values.items()} for values in (losses, confidence)]
            meter.add_tokens(*batch)
        scores.append(meter.score(count))
    single, batched = scores
    assert batched.n == single.n == count
    assert batched.loss == pytest.approx(single.loss, rel=1e-12)
    assert batched.early_exit.loss == pytest.approx(single.early_exit.loss, rel=1e-12)
    assert batched.early_exit.share == single.early_exit.share
    for loop in EXITS:
        expected = losses[loop].astype(np.float64).mean()
        assert batched.exits[str(loop)].loss == pytest.approx(expected, rel=1e-12)
        assert batched.exits[str(loop)].perplexity == pytest.approx(math.exp(expected), rel=1e-9)


def test_perplexity_per_word_uses_the_total_loss():
    meter = LanguageMeter([8])
    meter.add_tokens({8: np.array([1.0, 2.0, 3.0, 6.0])})
    score = meter.score(words=3)
    assert (score.n, score.words, score.loss) == (4, 3, 3.0)
    assert score.perplexity == pytest.approx(math.exp(3.0))
    assert score.word_perplexity == pytest.approx(math.exp(4.0))
    assert (meter.score().words, meter.score().word_perplexity, meter.score().early_exit) == (None, None, None)
    meter = LanguageMeter([2, 10])
    meter.add_tokens({2: np.array([2.0]), 10: np.array([6e4])})
    score = meter.score(words=1)
    assert score.loss == 6e4 and math.isfinite(score.perplexity) and score.perplexity > 1e300
    assert LanguageScore.model_validate_json(score.model_dump_json()) == score
    shuffled = score.model_copy(update={"exits": dict(sorted(score.exits.items()))})
    assert list(shuffled.exits) == ["10", "2"] and list(shuffled.by_exit) == [2, 10]
    meter = LanguageMeter([1])
    for _ in range(4):
        meter.add_tokens({1: np.array([2.0**24, 1.0, 1.0, 1.0], dtype=np.float32)})
    assert meter.score().loss == (2**24 + 3) / 4, "sums are in double precision"
    with pytest.raises(ValueError, match="empty"):
        LanguageMeter(EXITS).score()
    with pytest.raises(ValueError, match="exits must be increasing"):
        LanguageMeter([4, 2])


def test_meter_reads_logits_of_every_exit():
    logits = {loop: np.random.default_rng(loop).normal(size=(2, 4, 3)).astype(np.float32) * 6 for loop in (1, 3)}
    counted = {loop: array.reshape(-1, 3)[COUNTED] for loop, array in logits.items()}
    meter, expected = LanguageMeter([1, 3]), LanguageMeter([1, 3])
    meter.add({f"logits_exit{loop}": array for loop, array in logits.items()}, {"targets": TARGETS})
    expected.add_tokens(
        {loop: token_losses(array, TARGETS.reshape(-1)[COUNTED]) for loop, array in counted.items()},
        {loop: top_probability(array) for loop, array in counted.items()},
    )
    assert meter.score() == expected.score()
    assert 0 < meter.score().early_exit.share["1"] < 1


@pytest.mark.parametrize("with_confidence", [False, True])
def test_meter_reads_losses_of_every_exit(with_confidence):
    losses = {loop: np.random.default_rng(loop).gamma(2.0, size=(2, 4)).astype(np.float32) for loop in (1, 3)}
    confidence = np.array([[0.99, 0.5, 1.0, 1.0], [0.5, 0.99, 0.99, 0.5]], dtype=np.float32)
    outputs = {f"loss_exit{loop}": array for loop, array in losses.items()}
    if with_confidence:
        outputs["confidence_exit1"] = confidence
    meter = LanguageMeter([1, 3])
    meter.add(outputs, {"targets": TARGETS})
    score, counted = meter.score(), {loop: array.reshape(-1)[COUNTED] for loop, array in losses.items()}
    assert {loop: exit_.loss for loop, exit_ in score.by_exit.items()} == pytest.approx(
        {loop: float(array.mean()) for loop, array in counted.items()}
    )
    if not with_confidence:
        assert score.early_exit is None
        return
    early_losses = np.where(confidence.reshape(-1)[COUNTED] > 0.9, counted[1], counted[3])
    assert score.early_exit.loss == pytest.approx(float(early_losses.mean()))
    assert score.early_exit.share == {"1": 0.5, "3": 0.5}


def test_every_token_is_recorded_at_every_exit():
    losses, confidence = random_tokens(100)
    records = ExitRecords(EXITS)
    meter = LanguageMeter(EXITS, records)
    del confidence[8]  # the last loop needs no confidence
    meter.add_tokens(losses, confidence)
    early, result = meter.score().early_exit, records.leave(EarlyExit().thresholds(EXITS))
    assert (result.loss, result.mean_loops, result.share) == (pytest.approx(early.loss), early.mean_loops, early.share)
    assert records.leave({}).loss == pytest.approx(float(losses[8].mean()))


def test_cosine_is_an_exit_rule():
    records = ExitRecords((1, 2))
    outputs = {f"loss_exit{loop}": np.array([[float(loop), 10.0 * loop]]) for loop in (1, 2)}
    outputs |= {f"confidence_exit{loop}": np.array([[0.1, 0.99]]) for loop in (1, 2)}
    outputs |= {"cosine_exit1": np.array([[0.99, 0.1]]), "cosine_exit2": np.ones((1, 2))}
    assert records.rules == ()
    LanguageMeter((1, 2), records).add(outputs, {"targets": np.ones((1, 2), dtype=int)})
    assert records.rules == ("confidence", "cosine") and records.stacked("cosine").dtype == np.float32
    assert records.leave({1: 0.9}).loss == pytest.approx((2 + 10) / 2)
    assert records.leave({1: 0.9}, "cosine").loss == pytest.approx((1 + 20) / 2)
