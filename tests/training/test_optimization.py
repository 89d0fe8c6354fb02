"""Schedules and the optimizer's groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgeformer.families import load_recipe
from edgeformer.formats.recipe import (
    ConstantSchedule,
    CosineSchedule,
    OneCycleSchedule,
    OptimizerConfig,
    PlateauSchedule,
    Schedule,
)
from edgeformer.stages.training.optimization import LearningRate, build_optimizer, resolve_precision
from edgeformer.tasks.classification.recipe import ClassificationRecipe


def rates(schedule: Schedule, steps: int) -> list[float]:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0))
    rate = LearningRate(optimizer, schedule, steps)
    found = []
    for _ in range(steps):
        found.append(rate.current)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        rate.after_step()
    return found


def test_cosine_warms_up_linearly_and_ends_at_its_final_share() -> None:
    found = rates(CosineSchedule(kind="cosine", warmup=0.1, final=0.2), 100)
    assert found[0] == pytest.approx(1 / 11)
    assert found[4] == pytest.approx(5 / 11)
    assert max(found) == found[10] == pytest.approx(1.0)
    assert found[55] == pytest.approx(0.2 + 0.8 * 0.5)
    assert found[-1] == pytest.approx(0.2, abs=2e-3)


def test_one_cycle_peaks_at_the_optimizers_rate() -> None:
    found = rates(OneCycleSchedule(kind="one-cycle", warmup=0.05), 100)
    assert max(found) == pytest.approx(1.0)
    assert found.index(max(found)) in (4, 5)
    assert found[-1] < 1e-3


@pytest.mark.parametrize("steps", [2, 19, 20, 21])
def test_one_cycle_of_few_steps(steps: int) -> None:
    assert len(rates(OneCycleSchedule(kind="one-cycle", warmup=0.05), steps)) == steps


def test_constant() -> None:
    assert set(rates(ConstantSchedule(kind="constant"), 5)) == {1.0}


def test_plateau_halves_after_patience_epochs_without_improvement() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=1.0))
    rate = LearningRate(optimizer, PlateauSchedule(kind="plateau", factor=0.5, patience=2), 100)
    found = []
    for loss in (1.0, 0.9, 0.9, 0.9, 0.9, 0.9):
        rate.after_epoch(loss)
        found.append(rate.current)
    assert found == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("name", ["baseline_sst2", "recurrent_sst2", "recurrent_wide_sst2"])
def test_the_papers_recipes_halve_the_rate_after_two_bad_epochs_before_they_stop(name: str) -> None:
    """Two bad epochs in a row halve it, says paper A; the third one ends the run."""
    recipe = load_recipe(name)
    assert isinstance(recipe, ClassificationRecipe)
    training = recipe.training
    optimizer = build_optimizer(nn.Linear(2, 2), training.optimizer)
    rate = LearningRate(optimizer, training.schedule, 100)
    found = []
    for loss in (0.5, 0.6, 0.6):
        rate.after_epoch(loss)
        found.append(rate.current)
    assert found == [3e-5, 3e-5, 1.5e-5]
    assert training.early_stopping is not None and training.early_stopping.patience == 3


def test_weight_decay_spares_vectors() -> None:
    optimizer = build_optimizer(nn.Linear(3, 2), OptimizerConfig(lr=1.0, weight_decay=0.1))
    groups = [([p.ndim for p in g["params"]], g["weight_decay"]) for g in optimizer.param_groups]
    assert groups == [([2], 0.1), ([1], 0.0)]


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((8, 6), "bf16"), ((9, 0), "bf16")]
)
def test_auto_is_bf16_from_ampere_on(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert resolve_precision("auto", "cuda") == expected
    assert resolve_precision("fp16", "cuda") == "fp16"
