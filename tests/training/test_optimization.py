"""Schedules and the optimizer's groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    OneCycleSchedule,
    OptimizerConfig,
    PlateauSchedule,
    Schedule,
)
from edgeformer.models import load_recipe
from edgeformer.models.adapter import Learning
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.optimizer import LearningRate, build_optimizer, resolve_precision


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


@pytest.mark.parametrize("steps", [1, 2, 19, 20, 21])
def test_one_cycle_of_few_steps(steps: int) -> None:
    found = rates(OneCycleSchedule(kind="one-cycle", warmup=0.05), steps)
    assert len(found) == steps
    assert steps == 1 or found[-1] < 1e-3, "the last step has the smallest rate"


def test_one_cycle_leaves_the_betas_as_the_recipe_says_them() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=1.0, betas=(0.5, 0.75)))
    rate = LearningRate(optimizer, OneCycleSchedule(kind="one-cycle", warmup=0.3), 10)
    for _ in range(4):
        optimizer.step()
        rate.after_step()
        assert {group["betas"] for group in optimizer.param_groups} == {(0.5, 0.75)}


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


def test_what_is_asked_for_is_taken_but_fp16_on_a_processor() -> None:
    assert [resolve_precision(name, kind) for name in ("fp32", "bf16") for kind in ("cpu", "cuda")] == [
        "fp32", "fp32", "bf16", "bf16"
    ]  # fmt: skip
    with pytest.raises(InputError, match=r"training\.precision: fp16 trains on CUDA cards only"):
        resolve_precision("fp16", "cpu")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags : fpu avx2 avx512f\n", "fp32"),
        ("flags : fpu avx512_bf16 sse\n", "bf16"),
        ("flags : fpu amx_bf16 sse\n", "bf16"),
        ("Features : fp asimd bf16 i8mm\n", "bf16"),  # Arm
        ("flags : fpu notbf16 nobf16x\n", "fp32"),
        (None, "fp32"),  # no Linux
    ],
)
def test_auto_is_bf16_where_a_processor_has_instructions_for_it(
    flags: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cpuinfo(path: Path, encoding: str) -> str:
        if flags is None or (str(path), encoding) != ("/proc/cpuinfo", "utf-8"):
            raise FileNotFoundError
        return flags

    monkeypatch.setattr(Path, "read_text", cpuinfo)
    assert resolve_precision("auto", "cpu") == expected


def test_the_optimizer_is_what_the_recipe_says() -> None:
    config = OptimizerConfig(lr=0.25, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.0)
    for group in build_optimizer(nn.Linear(2, 2), config).param_groups:
        assert (group["lr"], group["betas"], group["eps"], group["fused"]) == (0.25, (0.5, 0.75), 1e-3, True)


@pytest.mark.parametrize(
    "schedule",
    [
        PlateauSchedule(kind="plateau", factor=0.5, patience=0),
        OneCycleSchedule(kind="one-cycle", warmup=0.3),
        CosineSchedule(kind="cosine", warmup=0.3, final=0.1),
        ConstantSchedule(kind="constant"),
    ],
    ids=lambda schedule: schedule.kind,
)
def test_a_schedule_goes_on_from_its_state(schedule: Schedule) -> None:
    def start() -> tuple[torch.optim.Optimizer, LearningRate]:
        optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=1.0))
        return optimizer, LearningRate(optimizer, schedule, 20)

    def go_on(optimizer: torch.optim.Optimizer, rate: LearningRate, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            rate.after_step()
            rate.after_epoch(1.0)
            found.append(rate.current)
        return found

    optimizer, rate = start()
    go_on(optimizer, rate, 7)
    other, resumed = start()
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(rate.state_dict())
    expected = go_on(optimizer, rate, 6)
    assert go_on(other, resumed, 6) == expected
    assert (len(set(expected)) == 1) == (schedule.kind == "constant")


def test_cosine_may_rise_to_its_end_or_not_at_all() -> None:
    found = rates(CosineSchedule(kind="cosine", warmup=0.99, final=0.1), 4)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8])
    found = rates(CosineSchedule(kind="cosine", warmup=0.0, final=0.0), 4)
    assert found == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])


def test_a_schedule_that_nobody_knows_is_refused() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=1.0))
    with pytest.raises(TypeError, match="no such schedule"):
        LearningRate(optimizer, "falling", 10)  # type: ignore[arg-type]


def test_linear_rises_and_falls_in_lines() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=1.0))
    rate, seen = LearningRate(optimizer, LinearSchedule(kind="linear", warmup=0.2, final=0.1), 10), []
    for _ in range(10):
        seen.append(rate.current)
        optimizer.step()
        rate.after_step()
    assert seen == pytest.approx([1 / 3, 2 / 3, *(0.1 + 0.9 * (1 - step / 8) for step in range(8))])


@pytest.mark.parametrize("schedule", [ConstantSchedule(kind="constant"), OneCycleSchedule(kind="one-cycle")])
def test_a_parameter_learns_at_its_own_share_of_the_rate(schedule: ConstantSchedule | OneCycleSchedule) -> None:
    whole, tenth = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    learning = [Learning(tenth, rate=0.1, decays=False), Learning(whole)]
    optimizer = build_optimizer(nn.Module(), OptimizerConfig(lr=0.5, weight_decay=0.3), learning)
    rate = LearningRate(optimizer, schedule, 10)
    for _ in range(3):
        rates = {id(group["params"][0]): group for group in optimizer.param_groups if group["params"]}
        assert rates[id(tenth)]["lr"] == pytest.approx(0.1 * rates[id(whole)]["lr"])
        assert (rates[id(tenth)]["weight_decay"], rates[id(whole)]["weight_decay"]) == (0.0, 0.3)
        assert rate.current == rates[id(whole)]["lr"], "the full rate is the one that is shown"
        optimizer.step()
        rate.after_step()
