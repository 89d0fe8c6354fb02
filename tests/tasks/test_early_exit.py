"""Early exit offline equals letting every row leave by itself."""

from __future__ import annotations

import numpy as np
import pytest

from edgeformer.tasks import task_named
from edgeformer.tasks.classification import score, softmax
from edgeformer.tasks.early_exit import SWEEP, ExitNotes, exit_logits
from edgeformer.tasks.metric import top_probability

EXITS, ROWS, CLASSES = (1, 2, 4), 40, 3


@pytest.fixture
def logits() -> dict[int, np.ndarray]:
    rng = np.random.default_rng(0)
    return {loop: (rng.normal(size=(ROWS, CLASSES)) * loop).astype(np.float32) for loop in EXITS}


@pytest.fixture
def labels() -> np.ndarray:
    return np.random.default_rng(1).integers(0, CLASSES, ROWS)


def noted(logits: dict[int, np.ndarray], labels: np.ndarray) -> ExitNotes:
    """Through the classifier's own meter, in batches."""
    notes = ExitNotes(EXITS)
    meter = task_named("classification").meter(EXITS, notes)
    for rows in np.array_split(np.arange(ROWS), 3):
        meter.add({exit_logits(loop): found[rows] for loop, found in logits.items()}, {"labels": labels[rows]})
    assert meter.score() == score(logits[EXITS[-1]], labels)
    assert meter.earlier() == {loop: score(logits[loop], labels) for loop in EXITS[:-1]}
    return notes


@pytest.mark.parametrize("threshold", [*SWEEP, 0.0, 1.0])
def test_every_row_leaves_where_it_is_sure(threshold: float, logits: dict[int, np.ndarray], labels: np.ndarray) -> None:
    notes = noted(logits, labels)
    total, right, loops = 0.0, 0, []
    for row in range(ROWS):
        for loop in EXITS:
            probabilities = softmax(logits[loop][row])
            if loop == EXITS[-1] or probabilities.max() >= threshold:
                break
        total -= np.log(probabilities[labels[row]])
        right += int(probabilities.argmax() == labels[row])
        loops.append(loop)
    found = notes.leave(dict.fromkeys(notes.exits[:-1], threshold))
    assert found.mean_loops == pytest.approx(np.mean(loops))
    assert found.loss == pytest.approx(total / ROWS, rel=1e-5)
    assert found.right == pytest.approx(right / ROWS)
    assert found.share == {str(loop): pytest.approx(loops.count(loop) / ROWS) for loop in EXITS}


def test_exits_without_a_threshold_are_not_taken(logits: dict[int, np.ndarray], labels: np.ndarray) -> None:
    found = noted(logits, labels).leave({2: 0.0})
    assert found.share == {"1": 0.0, "2": 1.0, "4": 0.0} and found.mean_loops == 2


def test_rightness_may_be_unknown(logits: dict[int, np.ndarray]) -> None:
    notes = ExitNotes((1, 2))
    for loop in (1, 2):
        notes.add(loop, np.array([1.0, 2.0]) / loop, np.array([0.9, 0.1]))
    found = notes.leave({1: 0.5})
    assert found.right is None and found.loss == pytest.approx((1.0 + 1.0) / 2) and found.mean_loops == 1.5


@pytest.mark.parametrize("threshold", [0.8, 0.9])  # as float32 one is more than itself, one is less
def test_who_is_just_sure_enough_leaves(threshold: float) -> None:
    notes = ExitNotes((1, 2))
    for loop in (1, 2):
        notes.add(loop, np.zeros(1), np.array([threshold]))
    assert notes.leave({1: threshold}).mean_loops == 1.0
    assert notes.leave({1: threshold + 1e-6}).mean_loops == 2.0
    assert notes.leave({1: threshold + 1e-12}).mean_loops == 2.0


def test_who_is_not_quite_sure_stays_as_in_the_session_that_lets_texts_leave() -> None:
    """In four bytes a probability of 1 - 1e-9 is 1."""
    logits = np.array([[0.0, -20.7, -25.0], [0.0, -800.0, -900.0]], np.float32)
    sure = top_probability(logits)
    assert 1 - 1e-8 < sure[0] < 1 == sure[1] == np.float32(sure[0])
    notes = ExitNotes((1, 2))
    for loop in (1, 2):
        notes.add(loop, np.zeros(2), sure)
    assert notes.leave({1: 1.0}).share == {"1": float((sure >= 1.0).mean()), "2": 0.5}
    assert (notes.confidences() == sure).all()


def test_losses_take_four_bytes_and_are_averaged_in_eight() -> None:
    notes = ExitNotes((3,))
    notes.add(3, np.array([0.1]), np.ones(1))
    assert notes.leave({}).loss == float(np.float32(0.1))
    notes = ExitNotes((3,))
    notes.add(3, np.array([2.0**24, 1.0, 1.0, 1.0]), np.ones(4))
    assert notes.leave({}).loss == (2**24 + 3) / 4


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match="exits must rise"):
        ExitNotes((2, 1))
    notes = ExitNotes((1, 2))
    with pytest.raises(ValueError, match="nothing was noted"):
        notes.leave({1: 0.5})
    notes.add(1, np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match="not at every exit"):
        notes.leave({1: 0.5})


def test_language_models_have_the_papers_schedule() -> None:
    assert task_named("classification").exit_thresholds((1, 2)) is None
    found = task_named("language-modeling").exit_thresholds((1, 4, 8))
    assert found == {1: 0.92, 4: pytest.approx(0.92 * 0.98**3), 8: 0.8}
