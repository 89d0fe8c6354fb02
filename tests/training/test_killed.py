"""A training that is killed goes on, and ends with the weights of one that was not."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.torture.children import OFTEN, ends, kill, start
from tests.training.test_checkpoints import assert_same

pytestmark = pytest.mark.skipif("not hasattr(__import__('os'), 'fork')", reason="kills by POSIX signals")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, never killed."""
    artifacts = tmp_path_factory.mktemp("straight")
    began = time.monotonic()
    assert ends(start(artifacts, overrides=OFTEN)) == 0
    (artifacts / "seconds.txt").write_text(str(time.monotonic() - began), encoding="utf-8")
    return artifacts / "run"


def go_on(artifacts: Path) -> Path:
    """Resume the run; begin it, where it was killed before there was one."""
    run = artifacts / "run"
    assert ends(start(artifacts, overrides=OFTEN, resume=run.exists())) == 0
    return run


@pytest.mark.parametrize("share", [0.02, 0.45, 0.98])
def test_killed_at_a_change_on_disk(tmp_path: Path, straight: Path, share: float) -> None:
    changes = int((straight.parent / "changes.txt").read_text(encoding="utf-8"))
    assert changes > 100
    assert ends(start(tmp_path, overrides=OFTEN, kill_at=round(share * changes))) == -9
    run = go_on(tmp_path)
    assert_same(run, straight)
    assert not [path for path in run.rglob(".*") if path.name.endswith(("tmp", "old"))]


def test_killed_at_random_moments_again_and_again(tmp_path: Path, straight: Path) -> None:
    moments, kills = random.Random(11), 0
    whole = float((straight.parent / "seconds.txt").read_text(encoding="utf-8"))
    for _ in range(3):
        child = start(tmp_path, overrides=OFTEN, resume=(tmp_path / "run").exists())
        time.sleep(moments.uniform(0.1, 0.6) * whole)
        if kill(child) == 0:
            break
        kills += 1
    assert kills
    run = tmp_path / "run"
    if not (run / "model").is_dir() or '"finished"' not in (run / "run.json").read_text(encoding="utf-8"):
        go_on(tmp_path)
    assert_same(run, straight)
