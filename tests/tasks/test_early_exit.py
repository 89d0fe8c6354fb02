"""Early exit from recorded answers equals a loop over rows and exits."""

import numpy as np
import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.tasks import get_task
from edgeformer.tasks.classification import score, softmax
from edgeformer.tasks.early_exit import EarlyExit, ExitRecords, exit_logits, first_exits
from edgeformer.tasks.metric import top_probability

EXITS, ROWS, CLASSES = (1, 2, 4), 40, 3
GENERATOR = np.random.default_rng(0)
LOGITS = {loop: (GENERATOR.normal(size=(ROWS, CLASSES)) * loop).astype(np.float32) for loop in EXITS}
LABELS = np.random.default_rng(1).integers(0, CLASSES, ROWS)


@pytest.fixture
def records() -> ExitRecords:
    """Records of a classifier's meter, in batches."""
    records = ExitRecords(EXITS)
    meter = get_task("classification").meter(EXITS, records)
    for rows in np.array_split(np.arange(ROWS), 3):
        meter.add({exit_logits(loop): logits[rows] for loop, logits in LOGITS.items()}, {"labels": LABELS[rows]})
    assert meter.score() == score(LOGITS[EXITS[-1]], LABELS)
    assert meter.earlier() == {loop: score(LOGITS[loop], LABELS) for loop in EXITS[:-1]}
    return records


def two_exits(losses: np.ndarray, confidence: np.ndarray) -> ExitRecords:
    """Records with the same answers at both exits."""
    records = ExitRecords((1, 2))
    for loop in records.exits:
        records.add(loop, losses, confidence)
    return records


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.7, 0.95, 1.0])
def test_rows_exit_where_confidence_reaches_the_threshold(threshold: float, records: ExitRecords) -> None:
    total, right, loops = 0.0, 0, []
    for row in range(ROWS):
        for loop in EXITS:
            probabilities = softmax(LOGITS[loop][row])
            if loop == EXITS[-1] or probabilities.max() >= threshold:
                break
        total -= np.log(probabilities[LABELS[row]])
        right += int(probabilities.argmax() == LABELS[row])
        loops.append(loop)
    result = records.leave(dict.fromkeys(EXITS[:-1], threshold))
    assert result.mean_loops == pytest.approx(np.mean(loops))
    assert result.loss == pytest.approx(total / ROWS, rel=1e-5)
    assert result.right == pytest.approx(right / ROWS)
    assert result.share == {str(loop): pytest.approx(loops.count(loop) / ROWS) for loop in EXITS}


@pytest.mark.parametrize("threshold", [0.8, 0.9])  # float32 rounds one up, the other down
def test_confidence_equal_to_the_threshold_exits(threshold: float) -> None:
    records = two_exits(np.zeros(1), np.array([threshold]))
    assert records.leave({1: threshold}).mean_loops == 1.0
    assert records.leave({1: threshold + 1e-12}).mean_loops == 2.0


def test_confidence_just_below_one_is_not_rounded() -> None:
    """In float32 a probability of 1 − 1e-9 is 1; sessions compare it in float64."""
    confidence = top_probability(np.array([[0.0, -20.7, -25.0], [0.0, -800.0, -900.0]], np.float32))
    assert 1 - 1e-8 < confidence[0] < 1 == confidence[1] == np.float32(confidence[0])
    records = two_exits(np.zeros(2), confidence)
    assert records.leave({1: 1.0}).share == {"1": 0.5, "2": 0.5}
    assert (records.stacked("confidence") == confidence).all()


def test_incomplete_records_are_refused() -> None:
    with pytest.raises(ValueError, match="exits must be increasing"):
        ExitRecords((2, 1))
    records = ExitRecords((1, 2))
    with pytest.raises(ValueError, match="nothing was noted"):
        records.leave({1: 0.5})
    records.add(1, np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="not at every exit"):
        records.leave({1: 0.5})


def test_thresholds_of_the_paper_fall_to_their_floor() -> None:
    """Paper B, equation 6: max(floor, start · decay^(loop − 1)); the last loop needs none."""
    assert EarlyExit(0.5, 0.1, 0.5).thresholds((2, 3)) == {2: 0.25}
    assert get_task("language-modeling").exit_schedule == EarlyExit()
    assert get_task("classification").exit_schedule is None
    assert EarlyExit().thresholds((1, 3, 7, 8, 11, 12)) == {
        1: 0.92, 3: pytest.approx(0.92 * 0.98**2), 7: pytest.approx(0.92 * 0.98**6), 8: 0.80, 11: 0.80,
    }  # fmt: skip
    assert EarlyExit(0.0, 1.0, 1.0).thresholds((1, 2)) == {1: 1.0}
    for name, values in (("threshold", (1.1, 0.5, 0.5)), ("floor", (0.5, -0.1, 0.5)), ("decay", (0.5, 0.5, 1.1))):
        with pytest.raises(InputError, match=rf"(?<!X){name}"):
            EarlyExit(*values)


def test_a_loop_without_a_threshold_lets_no_row_leave() -> None:
    confidence = np.array([[0.95, 0.5], [1.0, 1.0], [0.5, 0.95], [0.1, 0.1]])
    assert first_exits((1, 2, 4, 8), confidence, {1: 0.9, 4: 0.9}).tolist() == [0, 2]
    # Compared in the type it was computed in: 0.9 in float32 is larger than in float64.
    assert first_exits((1, 2), np.full((2, 1), 0.9, np.float32), {1: 0.9}).tolist() == [0]
