"""The folder of a run: one writer, the same tokenizer, no leftovers, full disks, kills at any moment."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.errors import ArtifactError, InputError, InterruptedRun
from edgeformer.models import load_recipe
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.train import TrainOptions, train
from tests.torture.children import OFTEN, ends, kill, start
from tests.training.runs import StopAfter, assert_same_run

needs_fork = pytest.mark.skipif("not hasattr(__import__('os'), 'fork')", reason="kills by POSIX signals")


@needs_fork
def test_run_that_is_being_trained_is_locked(tmp_path: Path) -> None:
    child = start(tmp_path, overrides=[*OFTEN, "training.epochs=5000"])
    options = TrainOptions(tmp_path, name="run", resume=True, max_steps=1)
    try:
        while not list(tmp_path.glob("run/checkpoints/*")):
            time.sleep(0.05)
            assert child.is_alive()
        recipe = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
        log = tmp_path / "run" / "metrics.jsonl"
        inode = log.stat().st_ino
        with pytest.raises(ArtifactError, match=f"is being trained by process {child.pid} on "):
            train(recipe, options)
        assert child.is_alive() and log.stat().st_ino == inode
    finally:
        kill(child)
    train(recipe, options)
    assert not (tmp_path / "run" / ".lock").exists()


def test_changed_tokenizer_is_refused(tmp_path: Path, tiny_run: Path, tiny_recipe: ClassificationRecipe) -> None:
    file = tmp_path / "tokenizer.json"
    shutil.copy(tiny_run / "model" / "tokenizer.json", file)
    recipe = tiny_recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(file))})
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run"), StopAfter(3))
    content = json.loads(file.read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    first, second = [word for word in words if len(word) == 2 and word.isalpha()][:2]
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match="tokenizer changed since this run began"):
        train(recipe, TrainOptions(tmp_path, name="run", resume=True))


def test_leftovers_are_removed(stopped_run: Path, tiny_recipe: ClassificationRecipe) -> None:
    checkpoints = stopped_run / "checkpoints"
    for folder in (checkpoints / ".000009-step-9.abc.tmp", stopped_run / ".model.abc.old"):
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
    (stopped_run.parent / ".new-run.abc").mkdir()
    temporary = [stopped_run / f".{name}.abc.tmp.json" for name in ("run.json", "evaluation.json")]
    for file in (checkpoints / ".best.safetensors.abc.tmp.safetensors", *temporary):
        file.write_bytes(b"x")
    foreign = [stopped_run / ".bundle.abc.tmp", checkpoints / "mine"]
    for folder in foreign:
        folder.mkdir()
    train(tiny_recipe, TrainOptions(stopped_run.parent, name="run", resume=True))
    assert list(stopped_run.rglob(".*")) == [foreign[0]] and foreign[1].is_dir()
    assert sorted(path.name for path in stopped_run.parent.iterdir()) == [".cache", "run"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that saves after every step, and the seconds of its training."""
    artifacts = tmp_path_factory.mktemp("uninterrupted")
    started = time.monotonic()
    assert ends(start(artifacts, overrides=OFTEN)) == 0
    return artifacts / "run", time.monotonic() - started


@needs_fork
@pytest.mark.parametrize("share", [0.02, 0.6])
def test_killed_at_a_change_on_disk(tmp_path: Path, uninterrupted: tuple[Path, float], share: float) -> None:
    expected, _ = uninterrupted
    changes = int((expected.parent / "changes.txt").read_text(encoding="utf-8"))
    assert changes > 100
    assert ends(start(tmp_path, overrides=OFTEN, kill_at=round(share * changes))) == -9
    run = tmp_path / "run"
    assert ends(start(tmp_path, overrides=OFTEN, resume=run.exists())) == 0
    assert_same_run(run, expected)
    assert not [path for path in run.rglob(".*") if path.name.endswith(("tmp", "old"))]
