"""One writer, the same tokenizer, nothing left of killed processes, and a clear end whatever happens to the folder."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import ClassVar

import pytest

from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError, InterruptedRun
from edgeformer.artifacts.progress import Silent
from edgeformer.artifacts.workspace import resume_command
from edgeformer.models import load_recipe
from edgeformer.run import read_run
from edgeformer.system import host
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.train import TrainOptions, train
from tests.cli.run_cli import edgeformer
from tests.conftest import classifier_recipe
from tests.torture.children import OFTEN, TINY, kill, start
from tests.training.test_checkpoints import states
from tests.training.test_train import StopAfter


@pytest.fixture(scope="module")
def recipe() -> ClassificationRecipe:
    return classifier_recipe(TINY)


@pytest.fixture
def stopped(tmp_path: Path, recipe: ClassificationRecipe) -> Path:
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path / "artifacts", name="run"), StopAfter(3))
    return tmp_path / "artifacts" / "run"


class At(Silent):
    """Does something after some training batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def advance(self, amount: int = 1, **fields: float) -> None:
        self.left -= "loss" in fields
        if self.left == 0:
            self.left = -1
            self.happen()

    def happen(self) -> None:
        raise NotImplementedError


def test_a_run_that_is_being_trained_is_not_resumed(tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    child = start(artifacts, overrides=[*OFTEN, "training.epochs=5000"])
    try:
        while not list(artifacts.glob("run/checkpoints/*")):
            time.sleep(0.05)
            assert child.is_alive()
        recipe = str(artifacts / "run" / "recipe.yaml")
        log = artifacts / "run" / "metrics.jsonl"
        before = log.stat().st_ino
        outcome = edgeformer("train", recipe, "--resume", "--name", "run", cwd=tmp_path)
        assert outcome.code == 2
        assert f"is being trained by process {child.pid} on " in outcome.err
        assert child.is_alive() and log.stat().st_ino == before
    finally:
        kill(child)
    outcome = edgeformer("train", recipe, "--resume", "--name", "run", "--max-steps", "1", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert not (artifacts / "run" / ".lock").exists()


def test_a_changed_tokenizer_is_noticed(tmp_path: Path, stopped: Path, recipe: ClassificationRecipe) -> None:
    """The run is made to have begun with this very tokenizer from a file, which then changes."""
    done = train(recipe, TrainOptions(tmp_path / "other", name="run"))
    file = tmp_path / "tokenizer.json"
    shutil.copy(done / "model" / "tokenizer.json", file)
    from_file = recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(file))})
    options = TrainOptions(tmp_path / "mine", name="run")
    with pytest.raises(InterruptedRun):
        train(from_file, options, StopAfter(3))
    content = file.read_text(encoding="utf-8")
    words = json.loads(content)["model"]["vocab"]
    one, two = [word for word in words if len(word) == 2 and word.isalpha()][:2]
    changed = content.replace(f'"{one}": {words[one]}', f'"{two}": {words[one]}', 1)
    changed = changed.replace(f'"{two}": {words[two]}', f'"{one}": {words[two]}', 1)
    assert changed != content
    file.write_text(changed, encoding="utf-8")
    again = TrainOptions(tmp_path / "mine", name="run", resume=True)
    with pytest.raises(InputError, match="tokenizer changed since this run began"):
        train(from_file, again)
    file.write_text(content, encoding="utf-8")
    assert read_run(train(from_file, again)).status == "finished"


def test_a_run_of_an_earlier_version_is_resumed(stopped: Path, recipe: ClassificationRecipe) -> None:
    """It knows neither its tokenizer nor how often it saves."""
    manifest = json.loads((stopped / "run.json").read_text(encoding="utf-8"))
    del manifest["tokenizer_fingerprint"]
    (stopped / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    lines = (stopped / "recipe.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if "checkpoint_minutes" not in line]
    assert len(kept) == len(lines) - 1
    (stopped / "recipe.yaml").write_text("".join(kept), encoding="utf-8")
    run = train(recipe, TrainOptions(stopped.parent, name="run", resume=True))
    assert read_run(run).status == "finished"


def test_how_often_it_is_saved_decides_nothing_and_may_change(stopped: Path, recipe: ClassificationRecipe) -> None:
    other = load_recipe("quickstart", [*TINY, *OFTEN])
    assert other.fingerprint() == recipe.fingerprint() != load_recipe("quickstart", [*TINY, "seed=3"]).fingerprint()
    run = train(other, TrainOptions(stopped.parent, name="run", resume=True))
    assert len({path.name for path in states(run)}) == 2


@pytest.mark.parametrize(("often", "saved"), [(True, ["000003-step-3", "000004-step-4"]), (False, ["000001-step-4"])])
def test_states_are_saved_within_an_epoch(
    tmp_path: Path, recipe: ClassificationRecipe, often: bool, saved: list[str]
) -> None:
    recipe = load_recipe("quickstart", [*TINY, *(OFTEN if often else []), "training.epochs=1"])
    run = train(recipe, TrainOptions(tmp_path, name="run"))
    assert [path.name for path in states(run)] == saved


def test_leftovers_of_killed_processes_are_removed(stopped: Path, recipe: ClassificationRecipe) -> None:
    inside = stopped / "checkpoints"
    for folder in (inside / ".last.abc.tmp", inside / ".000009-step-9.abc.tmp", stopped / ".model.abc.old"):
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
    (stopped.parent / ".new-run.abc").mkdir()
    temporary = [stopped / f".{name}.abc.tmp.json" for name in ("run.json", "evaluation.json")]
    for file in (inside / ".best.safetensors.abc.tmp.safetensors", *temporary):
        file.write_bytes(b"x")
    others = [stopped / ".bundle.abc.tmp", inside / "mine"]
    for folder in others:
        folder.mkdir()
    train(recipe, TrainOptions(stopped.parent, name="run", resume=True))
    hidden = list(stopped.rglob(".*"))
    assert hidden == [others[0]] and others[1].is_dir()
    assert sorted(path.name for path in stopped.parent.iterdir()) == [".cache", "run"]


def test_what_a_killed_start_left_is_removed_by_the_next_one(tmp_path: Path, recipe: ClassificationRecipe) -> None:
    (tmp_path / ".new-run.abc" / "run").mkdir(parents=True)
    train(recipe, TrainOptions(tmp_path, name="run", max_steps=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "run"]


@pytest.mark.parametrize("hours", [-30, 30])
def test_a_clock_that_is_set_changes_what_is_dated_only(
    tmp_path: Path, recipe: ClassificationRecipe, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """No minute between checkpoints passes by it, and no second of a run's time."""
    clock = time.time

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(hours=hours)

    class Sets(At):
        def happen(self) -> None:
            monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours)
            monkeypatch.setattr(host, "datetime", Later)

    run = train(recipe, TrainOptions(tmp_path, name="run"), Sets(2))
    found = read_run(run)
    dated = datetime.fromisoformat(str(found.finished)) - datetime.fromisoformat(found.started)
    assert timedelta(hours=hours - 1) < dated < timedelta(hours=hours + 1)
    assert found.status == "finished" and 0 < found.seconds < 3600
    assert [path.name for path in states(run)] == ["000001-step-4", "000002-step-8"]  # each epoch's, none by the clock
    with pytest.raises(ArtifactError, match="is finished"):
        train(recipe, TrainOptions(tmp_path, name="run", resume=True))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_end_a_training_that_goes_on_later(tmp_path: Path, recipe: ClassificationRecipe, name: str) -> None:
    if not hasattr(signal, name):
        pytest.skip(f"no {name} here")
    if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
        pytest.skip(f"{name} is ignored, as nohup has it, and stays so")

    class Sends(At):
        def happen(self) -> None:
            signal.raise_signal(getattr(signal, name))

    with pytest.raises(InterruptedRun, match="after step 3"):
        train(recipe, TrainOptions(tmp_path, name="run"), Sends(3))
    assert read_run(tmp_path / "run").status == "interrupted"
    assert [path.name for path in states(tmp_path / "run")] == ["000001-step-3"]
    assert read_run(train(recipe, TrainOptions(tmp_path, name="run", resume=True))).status == "finished"


def test_interrupted_before_the_first_checkpoint_begins_anew(tmp_path: Path, recipe: ClassificationRecipe) -> None:
    class Twice(At):
        def happen(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(InterruptedRun, match="--resume --name run"):
        train(recipe, TrainOptions(tmp_path, name="run"), Twice(2))
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert read_run(train(recipe, TrainOptions(tmp_path, name="run", resume=True))).steps == 8


def test_nobody_reads_the_progress_any_more(tmp_path: Path, recipe: ClassificationRecipe) -> None:
    class Closed(At):
        said = 0

        def happen(self) -> None:
            raise BrokenPipeError

        def message(self, text: str) -> None:
            self.said += self.left < 0

    progress = Closed(2)
    assert read_run(train(recipe, TrainOptions(tmp_path, name="run"), progress)).status == "finished"
    assert progress.said == 0


def test_tensorboards_files_that_cannot_be_written_end_no_training(
    tmp_path: Path, recipe: ClassificationRecipe, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its thread has failed by the time that it is asked for more."""

    class Replaces(At):
        said: ClassVar[list[str]] = []

        def happen(self) -> None:
            shutil.rmtree(tmp_path / "run" / "tensorboard")
            (tmp_path / "run" / "tensorboard").write_bytes(b"")

        def message(self, text: str) -> None:
            self.said.append(text)

    before = threading.excepthook
    run = train(
        load_recipe("quickstart", [*TINY, "training.log_every=1"]), TrainOptions(tmp_path, name="run"), Replaces(1)
    )
    assert read_run(run).status == "finished"
    assert [text for text in Replaces.said if "TensorBoard" in text] == [
        f"{run}: TensorBoard's files cannot be written (Not a directory); metrics.jsonl has the same numbers"
    ]
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is before


def test_a_removed_folder_is_said_and_does_not_come_back(tmp_path: Path, recipe: ClassificationRecipe) -> None:
    class Removes(At):
        def happen(self) -> None:
            shutil.rmtree(tmp_path / "run")

    with pytest.raises(EdgeformerError, match="was removed while it was being trained"):
        train(recipe, TrainOptions(tmp_path, name="run"), Removes(2))
    assert not (tmp_path / "run").exists()


def test_the_command_to_go_on_has_what_the_recipe_does_not_hold(tmp_path: Path) -> None:
    flags = TrainOptions(tmp_path, accelerator="cpu", max_steps=9, ignore_memory=True).flags
    assert flags == ["--accelerator", "cpu", "--max-steps", "9", "--ignore-memory"]
    assert resume_command(Path("artifacts/a"), flags).endswith(
        "--name a --accelerator cpu --max-steps 9 --ignore-memory"
    )
    assert TrainOptions(tmp_path).flags == []
