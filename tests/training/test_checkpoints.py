"""Checkpoints: complete in themselves, two of them, and a damaged one costs no run."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edgeformer.artifacts.errors import ArtifactError, InterruptedRun
from edgeformer.artifacts.files import sha256_of, write_json
from edgeformer.artifacts.progress import Silent
from edgeformer.run import read_run
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training import loop
from edgeformer.training.checkpoint import Checkpoints
from edgeformer.training.loop import TrainingLoop
from edgeformer.training.step import Stepper
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL, classifier_recipe
from tests.torture.refusals import RunsCode
from tests.training.test_out_of_memory import Messages
from tests.training.test_train import StopAfter, weights

TINY = [*SMALL, "name=tiny", "data.parts.train.0.rows=400", "model.hidden_size=16"]
"""Ten steps of 32 rows in each of three epochs."""


class Killed(BaseException):
    """What no code of the training expects, as a kill is."""


@pytest.fixture(scope="module")
def recipe() -> ClassificationRecipe:
    return classifier_recipe(TINY)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, recipe: ClassificationRecipe) -> Path:
    """The same run, never stopped."""
    return train(recipe, TrainOptions(tmp_path_factory.mktemp("straight"), name="run"))


@pytest.fixture
def stopped(tmp_path: Path, recipe: ClassificationRecipe) -> Path:
    """A run that was interrupted in its third epoch: checkpoints of steps 20 and 23."""
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run"), StopAfter(23))
    return tmp_path / "run"


def states(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def resumed(run: Path, recipe: ClassificationRecipe, progress: Silent | None = None) -> Path:
    return train(recipe, TrainOptions(run.parent, name=run.name, resume=True), progress or Silent())


def assert_same(run: Path, straight: Path) -> None:
    assert read_run(run).status == "finished"
    assert read_run(run).test == read_run(straight).test
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(run)[name]), name
    logs = [(folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines() for folder in (run, straight)]
    places = [[(record["kind"], record["step"]) for record in map(json.loads, lines)] for lines in logs]
    assert places[0] == places[1]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()  # another state may share the file
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def test_the_last_two_are_kept_and_no_weights_are_written_twice(stopped: Path) -> None:
    assert [folder.name for folder in states(stopped)] == ["000002-step-20", "000003-step-23"]
    before, last = states(stopped)
    best = (last / "best.safetensors").stat()
    assert best.st_ino == (before / "best.safetensors").stat().st_ino and best.st_nlink >= 2


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", flip),
        ("best.safetensors", flip),
        ("best.safetensors", Path.unlink),
        ("sha256.json", empty),
    ],
)
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(
    stopped: Path, recipe: ClassificationRecipe, straight: Path, name: str, damage: Callable[[Path], Any]
) -> None:
    before, last = states(stopped)
    damage(last / name)
    said = Messages()
    run = resumed(stopped, recipe, said)
    found = [line for line in said.lines if "going on from the checkpoint before" in line]
    assert len(found) == 1 and str(last / name) in found[0] and str(before) in found[0]
    assert_same(run, straight)
    assert last not in states(run)


def test_two_damaged_checkpoints_are_refused_and_both_named(stopped: Path, recipe: ClassificationRecipe) -> None:
    for folder in states(stopped):
        flip(folder / "optimizer.bin")
    with pytest.raises(ArtifactError, match=r"step-23/optimizer.*step-20/optimizer.*no good checkpoint is left"):
        resumed(stopped, recipe)


@pytest.mark.parametrize("name", ["optimizer.bin", "schedule.pt", "random_states_0.pkl"])
def test_a_checkpoint_that_runs_code_is_refused(
    stopped: Path, recipe: ClassificationRecipe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right checksum: whoever can put it there can write that as well."""
    monkeypatch.chdir(stopped)
    file = states(stopped)[-1] / name
    file.write_bytes(pickle.dumps(RunsCode()))
    sums = json.loads((file.parent / "sha256.json").read_text(encoding="utf-8"))
    write_json(file.parent / "sha256.json", {**sums, name: sha256_of(file)})
    with pytest.raises(ArtifactError, match=r"step-23: holds more than numbers, which could run code"):
        resumed(stopped, recipe)
    assert not list(stopped.rglob("proof"))
    pickle.loads(file.read_bytes())  # the bomb is a live one
    assert (stopped / "proof").exists()


def test_damaged_best_weights_that_both_share_cost_no_run(stopped: Path, recipe: ClassificationRecipe) -> None:
    best = states(stopped)[-1] / "best.safetensors"
    with best.open("rb+") as file:
        file.write(b"x")
    assert_found_again(stopped, recipe)


def assert_found_again(run: Path, recipe: ClassificationRecipe) -> None:
    """The third epoch, which the run goes on in, is the best that it knows of."""
    said = Messages()
    resumed(run, recipe, said)
    assert any(line.endswith("the best weights are looked for again from there on") for line in said.lines)
    assert (read_run(run).status, read_run(run).best_epoch) == ("finished", 3)
    last = load_file(max(run.glob("checkpoints/*-step-30")) / "model.safetensors")
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, last[name]), name


@pytest.mark.parametrize("epoch", [1, 2])
def test_killed_between_the_best_weights_and_their_checkpoint(
    tmp_path: Path, recipe: ClassificationRecipe, straight: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """Nothing of the run is written in the save after the validation of ``epoch``."""
    save, saves = Checkpoints.save, iter(range(1, 99))

    def killed(self: Checkpoints, *arguments: Any, **named: Any) -> None:
        if next(saves) == epoch:
            raise Killed
        save(self, *arguments, **named)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Checkpoints, "save", killed)
        train(recipe, TrainOptions(tmp_path, name="run"))
    assert_same(resumed(tmp_path / "run", recipe), straight)


def as_written_before(run: Path) -> None:
    """Turn the newest state into what the version before wrote: ``last/``, with the best weights beside it."""
    before, newest = states(run)
    shutil.rmtree(before)
    last = newest.rename(newest.parent / "last")
    (last / "best.safetensors").rename(last.parent / "best.safetensors")
    state = json.loads((last / "state.json").read_text(encoding="utf-8"))
    del state["records"]
    write_json(last / "state.json", state)
    sums = json.loads((last / "sha256.json").read_text(encoding="utf-8"))
    write_json(last / "sha256.json", {**sums, "state.json": sha256_of(last / "state.json")})


@pytest.mark.parametrize("aside", [False, True])
def test_checkpoints_of_earlier_versions_are_read(
    stopped: Path, recipe: ClassificationRecipe, straight: Path, aside: bool
) -> None:
    as_written_before(stopped)
    folder = stopped / "checkpoints"
    if aside:  # killed between the two renames of a replacement
        (folder / ".last.abc.old").mkdir()
        (folder / "last").rename(folder / ".last.abc.old" / "last")
    assert_same(resumed(stopped, recipe), straight)
    assert "000001-step-30" in [path.name for path in states(stopped)]


def test_best_weights_newer_than_the_state_of_an_earlier_version_are_no_damage(
    stopped: Path, recipe: ClassificationRecipe
) -> None:
    """The version before replaced best.safetensors first; killed then, it refused to go on."""
    as_written_before(stopped)
    newer = stopped / "checkpoints" / "best.safetensors"
    newer.unlink()
    shutil.copy(stopped / "checkpoints" / "last" / "model.safetensors", newer)
    assert_found_again(stopped, recipe)


def test_no_more_than_checkpoint_minutes_is_ever_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before a state gets its name everything since the one before was drawn is lost: 9 steps and one save."""
    now, kept = [0.0], []
    take, save = Stepper.take, Checkpoints.save

    def a_second(self: Stepper, *given: Any) -> Any:
        now[0] += 1
        return take(self, *given)

    def two_seconds(self: Checkpoints, *given: Any, **named: Any) -> None:
        began = now[0]
        now[0] += 2
        kept.append((began, now[0]))
        save(self, *given, **named)

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(Stepper, "take", a_second)
    monkeypatch.setattr(Checkpoints, "save", two_seconds)
    recipe = classifier_recipe([*TINY, "training.batch_size=5", f"training.checkpoint_minutes={10 / 60}"])
    train(recipe, TrainOptions(tmp_path, max_steps=40))
    lost = [end - began for (began, _), (_, end) in pairwise(kept)]
    assert len(lost) >= 4 and max(lost[1:]) == 10.0


def test_saves_that_take_long_leave_time_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted from the end of the last save, where as much as that cannot be begun early."""
    made = TrainingLoop.__new__(TrainingLoop)
    made._config = SimpleNamespace(checkpoint_minutes=10 / 60)  # type: ignore[assignment]
    now = [100.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made._saved_at, made._saving_s = 0.0, 95.0  # it ended five seconds ago
    assert not made._is_late(1.0)
    now[0] = 105.0
    assert made._is_late(1.0)


@pytest.mark.parametrize(("stop", "limit"), [(30, None), (15, 15)])
def test_a_stop_after_the_last_step_of_all(
    tmp_path: Path, recipe: ClassificationRecipe, stop: int, limit: int | None
) -> None:
    """Its weights are validated when the run goes on."""
    straight = train(recipe, TrainOptions(tmp_path / "straight", name="run", max_steps=limit))
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run", max_steps=limit), StopAfter(stop))
    assert read_run(tmp_path / "run").steps == stop
    done = train(recipe, TrainOptions(tmp_path, name="run", resume=True, max_steps=limit))
    assert_same(done, straight)
    assert read_run(done).validation == read_run(straight).validation
