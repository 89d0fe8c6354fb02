"""Time that a training still takes: all epochs, scoring included, up to --max-steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeformer.artifacts.progress import Silent
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.loop import RemainingTime
from edgeformer.training.train import TrainOptions, train


def test_steps_validations_and_test_sets_are_counted() -> None:
    left = RemainingTime(10, 30, step_rows=20, validation_rows=40, test_rows=60)
    assert left.seconds(0, 0) is None
    left.stepped(2.0)
    row = 2.0 / 20 / 3  # until something was scored: a third of a row's time in a step
    assert left.seconds(5, 0) == pytest.approx(25 * 2.0 + (3 * 40 + 60) * row)
    left.scored(40, 8.0)
    assert left.seconds(10, 1) == pytest.approx(20 * 2.0 + (2 * 40 + 60) * 0.2)
    assert left.seconds(30, 2, scored=30) == pytest.approx((40 - 30 + 60) * 0.2)
    assert left.seconds(30, 3) == pytest.approx(60 * 0.2)


def test_max_steps_ends_it() -> None:
    left = RemainingTime(10, 4, step_rows=20, validation_rows=40, test_rows=60)
    left.stepped(1.0)
    left.scored(10, 10.0)
    assert left.seconds(3, 0) == pytest.approx(1.0 + 40 + 60)


class Bars(Silent):
    """Keeps every bar: description, total, and what it advanced by."""

    def __init__(self) -> None:
        self.bars: list[tuple[str, int | None, list[tuple[int, dict[str, float]]]]] = []

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.bars.append((description, total, []))

    def advance(self, amount: int = 1, **fields: float) -> None:
        self.bars[-1][2].append((amount, fields))


def test_every_part_of_a_training_has_a_bar(small_recipe: ClassificationRecipe, tmp_path: Path) -> None:
    progress = Bars()
    train(small_recipe, TrainOptions(tmp_path, accelerator="cpu", max_steps=4), progress)
    names = [name for name, _, _ in progress.bars]
    assert names[0] == "Predicting the peak memory" and "Training the tokenizer" in names
    assert names[-3:] == ["Epoch 1/3", "Scoring validation", "Scoring random-split"]
    (_, steps_total, steps), (_, validation_total, validation), (_, tests_total, tests) = progress.bars[-3:]
    assert (steps_total, validation_total, tests_total) == (4 * 32, 300, 300)
    assert sum(amount for amount, _ in validation) == sum(amount for amount, _ in tests) == 300
    # What is left falls with every step to the scoring of 600 rows, not to the end of three epochs.
    left = [fields["left_s"] for _, fields in steps if fields]
    assert len(left) == 4
    step_s = [32 / fields["samples_per_s"] for _, fields in steps if fields][-1]
    assert left[-1] == pytest.approx(600 / 32 * step_s / 3)
