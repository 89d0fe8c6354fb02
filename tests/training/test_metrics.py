"""Losses and gradients that are not finite end training or are skipped under fp16 scaling; spikes are reported."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models import load_recipe
from edgeformer.models.distillation import Batch, Losses
from edgeformer.models.weights import load_model
from edgeformer.run import read_run
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training import train as train_module
from edgeformer.training.loop import loop
from edgeformer.training.loop.objective import Objective
from edgeformer.training.train import TrainOptions, train
from tests.torture.children import OFTEN, TINY
from tests.training.runs import AfterSteps, Messages, assert_equal_weights, records, states


def change_losses(monkeypatch: pytest.MonkeyPatch, changes: dict[int, Any]) -> None:
    """Apply ``changes`` to the losses of steps, by the number of the step."""
    original, count = Objective.losses, iter(range(1, 10_000))

    def losses(self: Objective, model: nn.Module, batch: Batch) -> Losses:
        result, change = original(self, model, batch), changes.get(next(count))
        return result if change is None else change(model, result)

    monkeypatch.setattr(Objective, "losses", losses)


def times(factor: float) -> Any:
    return lambda model, losses: Losses(losses.total * factor, losses.parts)


def spoil_gradient(model: nn.Module, losses: Losses) -> Losses:
    """Make the gradient of one layer infinite, but not the loss."""
    _, parameter = list(model.named_parameters())[3]
    parameter.register_hook(lambda gradient: gradient * torch.inf)
    return losses


def spoil_weights(model: nn.Module, losses: Losses) -> Losses:
    """Make a weight infinite, but not the gradient."""
    parameters = list(model.parameters())
    parameters[2].data[0] = torch.inf
    return Losses(losses.total.detach().nan_to_num(1.0) + 0 * parameters[5].sum(), losses.parts)


@pytest.mark.parametrize(
    ("change", "clip_norm", "message"),
    [
        (
            spoil_gradient,
            "null",
            "step 6: the gradient is not finite; the first layer with a gradient .* is {name};",
        ),
        (times(float("nan")), "1.0", "at step 6: the loss is nan; the first layer with a gradient"),
        (spoil_weights, "1.0", "the weights are not finite; the first layer with weights that are not"),
    ],
)
def test_divergence_keeps_the_weights_before(
    tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch, change: Any, clip_norm: str, message: str
) -> None:
    recipe = load_recipe("quickstart", [*TINY, *OFTEN, f"training.clip_norm={clip_norm}"])
    name = [name for name, _ in load_model(tiny_run).named_parameters()][3]
    with monkeypatch.context() as patch, pytest.raises(EdgeformerError, match=message.format(name=name)):
        change_losses(patch, {6: change})
        train(recipe, TrainOptions(tmp_path, name="run", accelerator="cpu"))
    assert [folder.name for folder in states(tmp_path / "run")] == ["000005-step-4", "000006-step-5"]
    assert read_run(tmp_path / "run").status == "failed"
    if "{name}" in message:
        resumed = train(recipe, TrainOptions(tmp_path, name="run", accelerator="cpu", resume=True))
        assert_equal_weights(resumed, tiny_run)


class TestFp16Scaling:
    """torch's scaler of fp16 also works on a CPU."""

    recipe = load_recipe("quickstart", [*TINY, "training.clip_norm=null"])

    @pytest.fixture(autouse=True)
    def scaler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = train_module.connect

        def connect_with_scaler(*arguments: Any, **options: Any) -> Any:
            processes = original(*arguments, **options)
            processes.accelerator.scaler = torch.amp.GradScaler("cpu")
            return processes

        monkeypatch.setattr(train_module, "connect", connect_with_scaler)

    def test_overflowing_step_is_skipped(self, tmp_path: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        change_losses(monkeypatch, {3: times(1e38)})
        messages = Messages()
        run = train(self.recipe, TrainOptions(tmp_path, name="run"), messages)
        manifest = read_run(run)
        assert (manifest.status, manifest.steps, manifest.skipped_steps) == ("finished", 8, 1)
        assert messages.containing("step 3 skipped: its gradient overflows in fp16")
        assert [(record["step"], record["skipped_steps"]) for record in records(run, "skipped")] == [(3, 1.0)]
        steps = records(run, "step")
        assert [record.get("skipped") for record in steps] == [None, 1.0, None, None]
        rates = [{record["step"]: record["lr"] for record in records(each, "step")} for each in (run, tiny_run)]
        assert rates[0][2] == rates[1][2] and rates[0][4] != rates[1][4], "the schedule waits"

    def test_too_many_in_a_row(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loop, "MAX_SKIPPED_IN_A_ROW", 4)
        change_losses(monkeypatch, {number: times(float("nan")) for number in (1, *range(3, 99))})
        with pytest.raises(EdgeformerError, match="4 steps in a row were skipped up to step 6"):
            train(self.recipe, TrainOptions(tmp_path, name="run"))


@pytest.mark.parametrize(("last", "reported"), [(26, 0), (28, 1)])
def test_a_spike_is_reported_once_if_the_loss_stays_high(
    last: int, reported: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch has the steps 25 to 28."""
    change_losses(monkeypatch, dict.fromkeys(range(26, last + 1), times(50.0)))
    messages = Messages()
    run = train(load_recipe("quickstart", [*TINY, "training.epochs=8"]), TrainOptions(tmp_path, name="run"), messages)
    said = messages.containing("loss spike at step 26: ")
    assert len(messages.containing("loss spike")) == len(said) == reported
    spike, *_ = records(run, "spike")
    assert spike["step"] == 26 and spike["loss"] > 20 > 1 > spike["usual_loss"]


def test_tensorboard_error_ends_training_without_a_traceback(
    tmp_path: Path, tiny_recipe: ClassificationRecipe, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's thread has failed before the next record."""

    def replace_folder() -> None:
        shutil.rmtree(tmp_path / "run" / "tensorboard")
        (tmp_path / "run" / "tensorboard").write_bytes(b"")

    excepthook, progress = threading.excepthook, AfterSteps(1, replace_folder)
    recipe = load_recipe("quickstart", [*TINY, "training.log_every=1"])
    with pytest.raises(OSError, match="Not a directory"):
        train(recipe, TrainOptions(tmp_path, name="run"), progress)
    assert read_run(tmp_path / "run").status == "failed"
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is excepthook
