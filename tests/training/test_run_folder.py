"""The folder of a run: one writer, the same tokenizer, no leftovers, full disks, kills at any moment."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.errors import InputError, InterruptedRun
from edgeformer.run import read_run
from edgeformer.system import host
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.train import TrainOptions, train
from tests.cli.run_cli import edgeformer
from tests.mounts import on_disk
from tests.torture.children import OFTEN, TINY, ends, kill, start
from tests.training.runs import AfterSteps, StopAfter, assert_same_run, states

needs_fork = pytest.mark.skipif("not hasattr(__import__('os'), 'fork')", reason="kills by POSIX signals")
TINY_FLAGS = [part for override in TINY for part in ("--set", override)]


@needs_fork
def test_run_that_is_being_trained_is_locked(tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    child = start(artifacts, overrides=[*OFTEN, "training.epochs=5000"])
    try:
        while not list(artifacts.glob("run/checkpoints/*")):
            time.sleep(0.05)
            assert child.is_alive()
        recipe = str(artifacts / "run" / "recipe.yaml")
        log = artifacts / "run" / "metrics.jsonl"
        inode = log.stat().st_ino
        outcome = edgeformer("train", recipe, "--resume", "--name", "run", cwd=tmp_path)
        assert outcome.code == 2
        assert f"is being trained by process {child.pid} on " in outcome.err
        assert child.is_alive() and log.stat().st_ino == inode
    finally:
        kill(child)
    outcome = edgeformer("train", recipe, "--resume", "--name", "run", "--max-steps", "1", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert not (artifacts / "run" / ".lock").exists()


def test_changed_tokenizer_is_refused(tmp_path: Path, tiny_run: Path, tiny_recipe: ClassificationRecipe) -> None:
    file = tmp_path / "tokenizer.json"
    shutil.copy(tiny_run / "model" / "tokenizer.json", file)
    recipe = tiny_recipe.model_copy(update={"tokenizer": FileTokenizer(kind="file", path=str(file))})
    with pytest.raises(InterruptedRun):
        train(recipe, TrainOptions(tmp_path, name="run"), StopAfter(3))
    content = file.read_text(encoding="utf-8")
    words = json.loads(content)["model"]["vocab"]
    first, second = [word for word in words if len(word) == 2 and word.isalpha()][:2]
    swapped = content.replace(f'"{first}": {words[first]}', f'"{second}": {words[first]}', 1)
    swapped = swapped.replace(f'"{second}": {words[second]}', f'"{first}": {words[second]}', 1)
    assert swapped != content
    file.write_text(swapped, encoding="utf-8")
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


@pytest.mark.parametrize("hours", [-30, 30])
def test_changed_clock(
    tmp_path: Path, tiny_recipe: ClassificationRecipe, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """It changes dates, but neither durations nor the times of checkpoints."""
    (tmp_path / ".new-run.abc" / "run").mkdir(parents=True)  # of a killed process
    clock = time.time

    class ShiftedDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(hours=hours)

    def change_clock() -> None:
        monkeypatch.setattr(time, "time", lambda: clock() + 3600 * hours)
        monkeypatch.setattr(host, "datetime", ShiftedDatetime)

    run = train(tiny_recipe, TrainOptions(tmp_path, name="run"), AfterSteps(2, change_clock))
    manifest = read_run(run)
    difference = datetime.fromisoformat(str(manifest.finished)) - datetime.fromisoformat(manifest.started)
    assert timedelta(hours=hours - 1) < difference < timedelta(hours=hours + 1)
    assert manifest.status == "finished" and 0 < manifest.seconds < 3600
    assert [path.name for path in states(run)] == ["000001-step-4", "000002-step-8"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", "run"]


# Runs in its own mount namespace, which removes the small disk whatever happens.
_FILL_DISK = """
import subprocess, sys, time
from pathlib import Path

disk, sets = Path(sys.argv[1]), [part for override in sys.argv[2:] for part in ("--set", override)]
command = [sys.executable, "-m", "edgeformer", "train", "quickstart", "--name", "run", "--artifacts", str(disk), *sets]
with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
    while not list((disk / "run").glob("checkpoints/000002-*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    with (disk / "filler").open("wb") as filler:
        try:
            while True:
                filler.write(bytes(1 << 16))
        except OSError:
            pass
    errors = process.communicate()[1]
print(process.returncode, errors)
print("FILES", *sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()))
(disk / "filler").unlink()
done = subprocess.run([*command, "--resume", "--max-steps", "9"], capture_output=True, text=True)
print("RESUMED", done.returncode, done.stderr)
"""


@pytest.mark.torture
def test_full_disk(disk: Path) -> None:
    overrides = [*TINY, *OFTEN, "training.epochs=4000"]  # it must not end before the disk is full
    done = on_disk(disk, "size=32m", sys.executable, "-c", _FILL_DISK, str(disk), *overrides)
    assert done.returncode == 0, done.stderr
    ended, _, rest = done.stdout.partition("FILES ")
    files, _, resumed = rest.partition("RESUMED ")
    assert ended.startswith("1 ") and "Traceback" not in ended, ended
    message = ended[ended.index("error:") :]
    assert "No space left on device" in message or "cannot be written" in message
    assert files.split() and not [name for name in files.split() if name.startswith(".")]
    assert resumed.startswith("0 "), resumed


def test_read_only_folder(disk: Path) -> None:
    command = [sys.executable, "-m", "edgeformer", "train", "quickstart", "--artifacts", str(disk / "mine")]
    done = on_disk(disk, "ro", *command, *TINY_FLAGS)
    assert done.returncode == 2, done.stderr
    assert "".join(done.stderr.split("\n")) == (
        f"error: --artifacts {disk / 'mine'}: {disk} cannot be written; choose another folder, or allow it"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of a POSIX shell")
def test_closed_pipe_does_not_end_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "edgeformer", "train", "quickstart", "--name", "run", *TINY_FLAGS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=200)
    assert read_run(tmp_path / "artifacts" / "run").status == "finished"
    assert process.returncode in (0, 1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that saves after every step, and the seconds of its training."""
    artifacts = tmp_path_factory.mktemp("uninterrupted")
    started = time.monotonic()
    assert ends(start(artifacts, overrides=OFTEN)) == 0
    return artifacts / "run", time.monotonic() - started


@needs_fork
@pytest.mark.parametrize("share", [0.02, 0.45, 0.98])
def test_killed_at_a_change_on_disk(tmp_path: Path, uninterrupted: tuple[Path, float], share: float) -> None:
    expected, _ = uninterrupted
    changes = int((expected.parent / "changes.txt").read_text(encoding="utf-8"))
    assert changes > 100
    assert ends(start(tmp_path, overrides=OFTEN, kill_at=round(share * changes))) == -9
    run = tmp_path / "run"
    assert ends(start(tmp_path, overrides=OFTEN, resume=run.exists())) == 0
    assert_same_run(run, expected)
    assert not [path for path in run.rglob(".*") if path.name.endswith(("tmp", "old"))]


@needs_fork
@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, uninterrupted: tuple[Path, float]) -> None:
    moments, kills, run = random.Random(11), 0, tmp_path / "run"
    expected, delay_s = uninterrupted
    for _ in range(6):
        child = start(tmp_path, overrides=OFTEN, resume=run.exists())
        time.sleep(moments.uniform(0.1, 0.6) * delay_s)
        if kill(child) != 0:
            kills += 1
        elif kills:
            break
        else:  # faster than the uninterrupted training, which also started the server: begin again, kill earlier
            shutil.rmtree(run)
            delay_s /= 3
        if kills == 3:
            break
    assert kills
    if not (run / "run.json").exists() or read_run(run).status != "finished":
        assert ends(start(tmp_path, overrides=OFTEN, resume=run.exists())) == 0
    assert_same_run(run, expected)
