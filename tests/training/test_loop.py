"""The training loop: remaining time, checkpoints in time, early stopping, losses that are not finite."""

import json
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from edgeformer.artifacts.errors import EdgeformerError, InterruptedRun
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.scores import read_evaluation
from edgeformer.models import load_recipe
from edgeformer.models.distillation import Batch, Losses
from edgeformer.models.weights import load_model
from edgeformer.run import read_run
from edgeformer.tasks import texts
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training import train as train_module
from edgeformer.training.loop import loop
from edgeformer.training.loop.checkpoint import Checkpoints
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.step import Stepper
from edgeformer.training.train import TrainOptions, train
from tests.torture.children import OFTEN, TINY
from tests.training.runs import AfterSteps, Messages, StopAfter, assert_equal_weights, assert_same_run, records, states


class Bars(Progress):
    """Collects description and total of every bar, and the figures of the steps."""

    def __init__(self) -> None:
        self.bars: list[tuple[str, int | None]] = []
        self.figures: list[dict[str, float]] = []

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.bars.append((description, total))

    def advance(self, amount: int = 1, **fields: float) -> None:
        self.figures += [fields] if fields else []


def test_every_part_of_a_training_has_a_bar(tmp_path: Path) -> None:
    progress = Bars()
    recipe = load_recipe("quickstart", [*TINY, "training.log_every=50"])
    train(recipe, TrainOptions(tmp_path, accelerator="cpu", max_steps=3), progress)
    assert progress.bars[0] == ("Predicting the peak memory", None)
    assert progress.bars[-3:] == [("Epoch 1/2", 3 * 80), ("Scoring validation", 40), ("Scoring random-split", 40)]
    # After the last step only the scoring of 80 rows remains, not the second epoch.
    *_, last = progress.figures
    assert len(progress.figures) == 3 and last["left_s"] == pytest.approx(80 / last["samples_per_s"] / 3)


@pytest.mark.parametrize(("steps", "validated", "tested"), [(3, 8, 8), (6, 40, 40)])
def test_a_trial_is_scored_on_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, validated: int, tested: int
) -> None:
    """Only where --max-steps ends the first epoch: scores of later epochs are compared with each other."""
    for module in (loop, train_module):
        monkeypatch.setattr(module, "SCORING_S", 1e-9)
    monkeypatch.setattr(texts, "EVALUATION_ROWS", 8)
    progress = Messages()
    run = train(load_recipe("quickstart", TINY), TrainOptions(tmp_path, accelerator="cpu", max_steps=steps), progress)
    validation = read_run(run).validation
    (test,) = [row for row in read_evaluation(run).rows if row.split == "random-split"]
    assert validation is not None and (validation.n, test.n) == (validated, tested)
    assert ("random-split: scored on 8 of 40 rows" in " ".join(progress.lines)) == (tested < 40)


def test_no_epoch_begins_after_the_time_of_a_training(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [*TINY, "training.epochs=3"])
    run = train(recipe, TrainOptions(tmp_path, accelerator="cpu", max_s=0.0))
    assert read_run(run).status == "finished" and len(records(run, "epoch")) == 1


def test_time_left_is_an_upper_bound_while_early_stopping_can_end_training(tmp_path: Path) -> None:
    for settings, expected in (
        # Epoch 2 does not improve by 9, so training ends after it instead of epoch 3.
        (["training.early_stopping={patience: 1, min_delta: 9}", "training.epochs=3"], "most_left_s"),
        (["training.early_stopping={patience: 2}"], "left_s"),  # it could not have ended earlier
    ):
        progress = Bars()
        train(load_recipe("quickstart", [*TINY, *settings]), TrainOptions(tmp_path, accelerator="cpu"), progress)
        assert progress.figures and len(progress.figures) % 2 == 0
        assert all({"left_s", "most_left_s"} & figures.keys() == {expected} for figures in progress.figures)


def test_at_most_checkpoint_minutes_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill just before a rename loses everything since the previous state was collected: 9 steps and a save."""
    now, saves = [0.0], []
    take, save = Stepper.take, Checkpoints.save

    def take_one_second(self: Stepper, *arguments: Any) -> Any:
        now[0] += 1
        return take(self, *arguments)

    def save_two_seconds(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        started = now[0]
        now[0] += 2
        saves.append((started, now[0]))
        save(self, *arguments, **options)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0]))
    monkeypatch.setattr(Stepper, "take", take_one_second)
    monkeypatch.setattr(Checkpoints, "save", save_two_seconds)
    recipe = load_recipe("quickstart", [*TINY, "training.batch_size=5", f"training.checkpoint_minutes={10 / 60}"])
    train(recipe, TrainOptions(tmp_path, max_steps=40))
    lost_s = [end - start for (start, _), (_, end) in pairwise(saves)]
    assert len(lost_s) >= 4 and max(lost_s[1:]) == 10.0


def test_checkpoint_interval_changes_no_result(stopped_run: Path, tiny_run: Path) -> None:
    """The recipe's fingerprint does not contain it, so it may change when a run is resumed."""
    assert [folder.name for folder in states(tiny_run)] == ["000001-step-4", "000002-step-8"]
    manifest = json.loads((stopped_run / "run.json").read_text(encoding="utf-8"))
    del manifest["tokenizer_fingerprint"]  # runs of version 0.1 have none
    (stopped_run / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    recipe = load_recipe("quickstart", [*TINY, *OFTEN])
    run = train(recipe, TrainOptions(stopped_run.parent, name="run", resume=True, accelerator="cpu"))
    assert [folder.name for folder in states(run)] == ["000002-step-7", "000003-step-8"]
    assert_same_run(run, tiny_run)


@pytest.mark.parametrize("steps", [3, 6])
def test_part_of_an_epoch(tmp_path: Path, steps: int) -> None:
    """Schedule, early stopping and the number of the best epoch ignore a validation within an epoch."""
    settings = ["training.schedule={kind: plateau, patience: 0}", "training.early_stopping={patience: 1, min_delta: 9}"]
    run = train(load_recipe("quickstart", [*TINY, *settings]), TrainOptions(tmp_path, max_steps=steps))
    manifest, complete = read_run(run), steps // 4
    position = json.loads((states(run)[-1] / "state.json").read_text(encoding="utf-8"))
    assert (manifest.status, manifest.steps, manifest.epochs) == ("finished", steps, complete)
    assert manifest.reason == f"stopped by --max-steps {steps}"
    assert position["epoch"] == complete and position["epochs_without_improvement"] == 0
    assert (position["stopping_loss"] is None) == (complete == 0)
    assert torch.load(states(run)[-1] / "schedule.pt")["last_epoch"] == complete
    epochs = records(run, "epoch")
    assert [record["epoch"] for record in epochs] == [*[1.0][:complete], steps / 4]
    best = min(epochs, key=lambda record: -record["val_accuracy"])
    assert manifest.validation is not None and manifest.validation.accuracy == best["val_accuracy"]
    assert manifest.best_epoch == (1 if best["epoch"] == 1.0 else None)


def test_stop_after_the_last_step(tmp_path: Path, tiny_recipe: ClassificationRecipe, tiny_run: Path) -> None:
    """Its weights are validated when the run is resumed."""
    with pytest.raises(InterruptedRun):
        train(tiny_recipe, TrainOptions(tmp_path, name="run"), StopAfter(8))
    assert read_run(tmp_path / "run").steps == 8
    run = train(tiny_recipe, TrainOptions(tmp_path, name="run", resume=True))
    assert_same_run(run, tiny_run)
    assert read_run(run).validation == read_run(tiny_run).validation


def test_failure_is_recorded_and_early_stopping_persists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["training.early_stopping={patience: 1, min_delta: 9}", "training.epochs=9"]
    recipe = load_recipe("quickstart", [*TINY, *settings])

    def fail(*arguments: object) -> None:
        raise RuntimeError("disk full")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="disk full"):
        patch.setattr(train_module, "save_model", fail)
        train(recipe, TrainOptions(tmp_path, name="run"))
    manifest = read_run(tmp_path / "run")
    assert (manifest.status, manifest.reason) == ("failed", "RuntimeError: disk full")
    assert read_run(train(recipe, TrainOptions(tmp_path, name="run", resume=True))).epochs == 2


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
        (spoil_gradient, "null", "step 6: the gradient is not finite; the first layer with a gradient .* is {name};"),
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
        assert [record.get("skipped") for record in records(run, "step")] == [None, 1.0, None, None]
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
    assert len(messages.containing("loss spike")) == len(messages.containing("loss spike at step 26: ")) == reported
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
