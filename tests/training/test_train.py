"""Training from a recipe: what is written, what is kept, and that a resumed run is the same run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edgeformer.artifacts.data_config import FileSource
from edgeformer.artifacts.errors import ArtifactError, DataError, EdgeformerError, InputError, InterruptedRun
from edgeformer.artifacts.progress import Silent
from edgeformer.artifacts.scores import Score
from edgeformer.models import load_recipe
from edgeformer.models.encoder.model import SwiGLU
from edgeformer.run import read_run
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training import run_folder
from edgeformer.training.objective import Objective
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL


class StopAfter(Silent):
    """Presses Ctrl-C for the user after some training batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def advance(self, amount: int = 1, **fields: float) -> None:
        if "loss" not in fields:
            return
        self.left -= 1
        if self.left == 0:
            import signal

            signal.raise_signal(signal.SIGINT)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def records(run: Path, kind: str) -> list[dict[str, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_run_holds_what_the_design_promises(fresh_run: Path, small_recipe: ClassificationRecipe) -> None:
    manifest = read_run(fresh_run)
    assert manifest.status == "finished"
    assert manifest.data.synthetic
    assert manifest.data.rows == {"train": 2400, "validation": 300, "random-split": 300}
    assert manifest.steps == 3 * 75
    assert manifest.test is not None and manifest.test.n == 300
    assert manifest.test == manifest.tests["random-split"]
    assert load_recipe(str(fresh_run / "recipe.yaml")) == small_recipe
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "golden_inputs.npz"):
        assert (fresh_run / "model" / name).is_file()
    config = json.loads((fresh_run / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "negative", "1": "positive"}


def test_training_learns(fresh_run: Path) -> None:
    epochs = records(fresh_run, "epoch")
    assert epochs[-1]["train_loss"] < epochs[0]["train_loss"]
    assert epochs[-1]["val_loss"] < 0.6


def test_kept_weights_are_those_of_the_best_epoch(fresh_run: Path) -> None:
    manifest = read_run(fresh_run)
    epochs = records(fresh_run, "epoch")
    best = max(range(len(epochs)), key=lambda i: epochs[i]["val_accuracy"])
    assert manifest.best_epoch == best + 1
    assert manifest.validation is not None
    assert manifest.validation.accuracy == epochs[best]["val_accuracy"]


def test_same_recipe_gives_the_same_weights(
    tmp_path: Path, small_recipe: ClassificationRecipe, fresh_run: Path
) -> None:
    again = train(small_recipe, TrainOptions(tmp_path))
    for name, tensor in weights(fresh_run).items():
        assert torch.equal(tensor, weights(again)[name]), name


@pytest.mark.parametrize("batches", [7, 75, 110])
def test_interrupted_and_resumed_is_the_same_run(
    tmp_path: Path, small_recipe: ClassificationRecipe, fresh_run: Path, batches: int
) -> None:
    """In the middle of an epoch, at its last batch, and in the second epoch."""
    with pytest.raises(InterruptedRun, match=f"step {batches}"):
        train(small_recipe, TrainOptions(tmp_path, name="run"), StopAfter(batches))
    assert read_run(tmp_path / "run").status == "interrupted"
    run = train(small_recipe, TrainOptions(tmp_path, resume=True))
    assert run.name == "run"
    manifest, straight = read_run(run), read_run(fresh_run)
    assert manifest.status == "finished"
    assert manifest.steps == straight.steps
    assert manifest.test == straight.test
    for name, tensor in weights(fresh_run).items():
        assert torch.equal(tensor, weights(run)[name]), name
    kept = [{k: r[k] for k in ("step", "val_loss", "train_loss")} for r in records(run, "epoch")]
    assert kept == [{k: r[k] for k in ("step", "val_loss", "train_loss")} for r in records(fresh_run, "epoch")]


def test_resume_refuses_a_damaged_checkpoint(tmp_path: Path, small_recipe: ClassificationRecipe) -> None:
    with pytest.raises(InterruptedRun):
        train(small_recipe, TrainOptions(tmp_path), StopAfter(3))
    weights_file = next(tmp_path.glob("*/checkpoints/*/model.safetensors"))
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.safetensors: damaged .*no good checkpoint is left"):
        train(small_recipe, TrainOptions(tmp_path, resume=True))


def test_resume_refuses_another_recipe_and_names_the_difference(
    tmp_path: Path, small_recipe: ClassificationRecipe
) -> None:
    with pytest.raises(InterruptedRun):
        train(small_recipe, TrainOptions(tmp_path), StopAfter(3))
    other = small_recipe.model_copy(update={"seed": 7})
    with pytest.raises(ArtifactError, match="differs in seed"):
        train(other, TrainOptions(tmp_path, resume=True))


def test_resume_without_a_run(tmp_path: Path, small_recipe: ClassificationRecipe) -> None:
    with pytest.raises(ArtifactError, match="no unfinished run of small"):
        train(small_recipe, TrainOptions(tmp_path, resume=True))


def test_name_that_is_taken_is_refused(small_recipe: ClassificationRecipe, fresh_run: Path) -> None:
    with pytest.raises(InputError, match=r"--name small: .* exists already"):
        train(small_recipe, TrainOptions(fresh_run.parent, name="small"))


def test_unusable_data_writes_nothing(tmp_path: Path, small_recipe: ClassificationRecipe) -> None:
    parts = {"train": (FileSource(kind="file", path=str(tmp_path / "absent.tsv")),)}
    recipe = small_recipe.model_copy(update={"data": small_recipe.data.model_copy(update={"parts": parts})})
    with pytest.raises(DataError, match=r"absent\.tsv"):
        train(recipe, TrainOptions(tmp_path / "artifacts"))
    assert not list((tmp_path).glob("artifacts/[!.]*"))


def test_failure_is_recorded(
    tmp_path: Path, small_recipe: ClassificationRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(run_folder, "save_model", explode)
    with pytest.raises(RuntimeError, match="disk full"):
        train(small_recipe, TrainOptions(tmp_path, name="run", max_steps=2))
    manifest = read_run(tmp_path / "run")
    assert (manifest.status, manifest.reason) == ("failed", "RuntimeError: disk full")


def test_max_steps(tmp_path: Path, small_recipe: ClassificationRecipe) -> None:
    run = train(small_recipe, TrainOptions(tmp_path, max_steps=4))
    assert read_run(run).steps == 4
    assert read_run(run).status == "finished"


FEW = ["data.parts.train.0.rows=400", "training.epochs=2"]
"""Ten steps of 32 rows in each of two epochs."""


def state_of(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Where training stood at its last checkpoint, and its schedule."""
    folder = max((run / "checkpoints").iterdir())
    return json.loads((folder / "state.json").read_text(encoding="utf-8")), torch.load(folder / "schedule.pt")


@pytest.mark.parametrize("steps", [4, 14])
def test_a_part_of_an_epoch_is_none(tmp_path: Path, steps: int) -> None:
    """Neither the schedule nor early stopping nor the best epoch's number knows what was validated in its middle."""
    stopping = ["training.schedule={kind: plateau, patience: 0}", "training.early_stopping={patience: 1, min_delta: 9}"]
    recipe = load_recipe("quickstart", [*SMALL, *FEW, *stopping])
    run = train(recipe, TrainOptions(tmp_path, max_steps=steps))
    manifest, (position, schedule) = read_run(run), state_of(run)
    complete = steps // 10
    assert (manifest.status, manifest.steps, manifest.epochs) == ("finished", steps, complete)
    assert manifest.reason == f"stopped by --max-steps {steps}"
    assert position["epoch"] == complete and position["epochs_without_improvement"] == 0
    assert (position["stopping_loss"] is None) == (complete == 0)
    assert schedule["last_epoch"] == complete
    epochs = records(run, "epoch")
    assert [record["epoch"] for record in epochs] == [*[1.0][:complete], steps / 10]
    best = min(epochs, key=lambda record: -record["val_accuracy"])
    assert manifest.validation is not None and manifest.validation.accuracy == best["val_accuracy"]
    assert manifest.best_epoch == (1 if best["epoch"] == 1.0 else None)


def test_max_steps_at_the_end_of_an_epoch_counts_it(tmp_path: Path) -> None:
    run = train(load_recipe("quickstart", [*SMALL, *FEW]), TrainOptions(tmp_path, max_steps=10))
    assert (read_run(run).epochs, read_run(run).best_epoch) == (1, 1)


def test_throughput_is_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, pause = Objective.evaluate, 0.5

    def slow(self: Objective, *arguments: Any, **options: Any) -> Score:
        time.sleep(pause)
        return evaluate(self, *arguments, **options)

    monkeypatch.setattr(Objective, "evaluate", slow)
    run = train(load_recipe("quickstart", [*SMALL, *FEW]), TrainOptions(tmp_path))
    manifest = read_run(run)
    assert manifest.samples_per_second is not None and manifest.seconds is not None
    training_seconds = 2 * 320 / manifest.samples_per_second
    assert manifest.seconds >= training_seconds + 2 * pause - 0.01  # of every epoch; both figures are rounded


def test_accumulation_clipping_and_token_dropout_train(tmp_path: Path) -> None:

    more = ["training.accumulation=4", "training.token_dropout=0.1", "training.clip_norm=0.5", "training.epochs=1"]
    run = train(load_recipe("quickstart", [*SMALL, *more]), TrainOptions(tmp_path))
    assert read_run(run).steps == 19  # 75 batches of 32 in steps of 4


def test_cuda_is_refused_where_there_is_none(tmp_path: Path, small_recipe: ClassificationRecipe) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA card is present")
    with pytest.raises(InputError, match="--accelerator cuda"):
        train(small_recipe, TrainOptions(tmp_path, accelerator="cuda"))


class TestBf16:
    """bf16 must really be computed in, before and after every validation and resumption."""

    def recipe(self) -> ClassificationRecipe:
        changes = ["training.precision=bf16", "training.epochs=2", "data.parts.train.0.rows=400"]
        return load_recipe("quickstart", [*SMALL, *changes])

    def test_every_step_is_bf16_and_every_validation_fp32(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[bool, torch.dtype]] = []
        forward = SwiGLU.forward

        def watch(self: SwiGLU, x: torch.Tensor) -> torch.Tensor:
            y = forward(self, x)
            seen.append((self.training, y.dtype))
            return y

        monkeypatch.setattr(SwiGLU, "forward", watch)
        run = train(self.recipe(), TrainOptions(tmp_path))
        assert read_run(run).precision == "bf16"
        assert {dtype for training, dtype in seen if training} == {torch.bfloat16}
        assert {dtype for training, dtype in seen if not training} == {torch.float32}

    def test_resumed_run_is_the_same_run(self, tmp_path: Path) -> None:
        straight = train(self.recipe(), TrainOptions(tmp_path, name="straight"))
        with pytest.raises(InterruptedRun):
            train(self.recipe(), TrainOptions(tmp_path, name="stopped"), StopAfter(6))
        resumed = train(self.recipe(), TrainOptions(tmp_path, name="stopped", resume=True))
        for name, tensor in weights(straight).items():
            assert torch.equal(tensor, weights(resumed)[name]), name


def test_diverged_training_is_a_failure_not_a_result(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [*SMALL, "training.optimizer.lr=1e30", "training.clip_norm=null"])
    with pytest.raises(EdgeformerError, match=r"diverged at step .* lower training\.optimizer\.lr"):
        train(recipe, TrainOptions(tmp_path, name="run"))
    assert read_run(tmp_path / "run").status == "failed"


def test_early_stopping_holds_after_a_failure_in_scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = ["training.early_stopping={patience: 1, min_delta: 9}", "training.epochs=9", "data.parts.train.0.rows=400"]
    recipe = load_recipe("quickstart", [*SMALL, *stop])

    def explode(*arguments: object) -> None:
        raise RuntimeError("disk full")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(run_folder, "save_model", explode)
        train(recipe, TrainOptions(tmp_path, name="run"))
    manifest = read_run(train(recipe, TrainOptions(tmp_path, name="run", resume=True)))
    assert manifest.epochs == 2


@pytest.mark.parametrize("name", ["a/b", "../x", ".hidden", ""])
def test_name_that_is_no_folder_name(tmp_path: Path, small_recipe: ClassificationRecipe, name: str) -> None:
    with pytest.raises(InputError, match="--name"):
        train(small_recipe, TrainOptions(tmp_path / "artifacts", name=name))
    assert not (tmp_path / "artifacts").exists()
