"""Trainings are killed before every change on the disk, and at random moments: each ends with the same weights."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from edgeformer.run import read_run
from edgeformer.system.lock import LOCK_FILE
from tests.torture.children import OFTEN, ends, kill, start

pytestmark = pytest.mark.torture
SHORT = [*OFTEN, "training.batch_size=160", "training.log_every=1"]
"""Two steps in each of two epochs, a checkpoint after every step and every epoch."""
TRIALS = 120
"""Trainings that are killed at random moments, up to twice each."""


class Straight(NamedTuple):
    """A training that nobody kills."""

    weights: dict[str, torch.Tensor]
    changes: int
    seconds: float


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # more of them take longer for models this small
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    for _ in range(2):  # the first one waits for the libraries
        folder, begun = tmp_path_factory.mktemp("straight"), time.perf_counter()
        assert ends(start(folder, overrides=SHORT)) == 0
        seconds = time.perf_counter() - begun
    weights = load_file(folder / "run" / "model" / "model.safetensors")
    return Straight(weights, int((folder / "changes.txt").read_text(encoding="utf-8")), seconds)


def is_finished(run: Path) -> bool:
    return (run / "run.json").exists() and read_run(run).status == "finished"


def check_resumed(artifacts: Path, straight: Straight) -> None:
    """Finish the run; its weights are those of a training that nobody kills, and nothing is left behind."""
    run, error = artifacts / "run", artifacts / "error.txt"
    if not is_finished(run):
        code = ends(start(artifacts, overrides=SHORT, resume=run.exists()))
        assert code == 0, error.read_text(encoding="utf-8") if error.exists() else code
    results = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(tensor, results[name]) for name, tensor in straight.weights.items())
    remaining = [*run.rglob(".*"), *(path for path in artifacts.glob(".*") if path.name != ".cache")]
    # Killed when all was written: nobody will hold a finished run's lock again, and nobody asks for it.
    assert [path for path in remaining if path != run / LOCK_FILE] == []


def test_training_killed_before_every_change(tmp_path: Path, straight: Straight) -> None:
    for number in range(1, straight.changes + 1):
        artifacts = tmp_path / str(number)
        artifacts.mkdir()
        assert ends(start(artifacts, overrides=SHORT, kill_at=number)) == -9, number
        check_resumed(artifacts, straight)
    print(f"{straight.changes} kills before a change on the disk; every training ended with the same weights")


def test_training_killed_at_random_moments(tmp_path: Path, straight: Straight) -> None:
    kills = 0
    for trial in range(TRIALS):
        moments, artifacts = random.Random(trial), tmp_path / str(trial)
        artifacts.mkdir()
        for _ in range(2):
            if not is_finished(artifacts / "run"):
                child = start(artifacts, overrides=SHORT, resume=(artifacts / "run" / "run.json").exists())
                time.sleep(moments.uniform(0, straight.seconds))
                kills += kill(child) == -9
        check_resumed(artifacts, straight)
    print(f"{kills} kills at random moments in {TRIALS} trainings; every training ended with the same weights")
