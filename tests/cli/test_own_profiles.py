"""A profile in ``<artifacts>/profiles`` is found by every command that takes a device."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgeformer.artifacts.documents import own_profiles, shipped_folder
from edgeformer.cli import main

OLD = Path(__file__).resolve().parents[1] / "old_format"


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """A folder of runs with a profile that nobody ships: an RTX 4050 with 1 MiB of memory beside its CUDA context."""
    profile = yaml.safe_load((shipped_folder("profiles") / "rtx4050.yaml").read_text(encoding="utf-8"))
    profile |= {"name": "mine", "title": "My own card"}
    profile["usable_memory_bytes"]["value"] = "301MiB"
    folder = own_profiles(tmp_path / "elsewhere")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")
    shutil.copytree(OLD / "classifier-v1", tmp_path / "elsewhere" / "old")
    return tmp_path / "elsewhere"


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(artifacts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command on these artifacts; return its exit code and its JSON document."""

    def run_command(*arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["edgeformer", *arguments, "--artifacts", str(artifacts), "--json"])
        with pytest.raises(SystemExit) as stop:
            main()
        assert isinstance(stop.value.code, int)
        return stop.value.code, json.loads(capsys.readouterr().out)

    return run_command


def test_plan(run: Run) -> None:
    code, results = run("plan", "quickstart", "--device", "mine")
    assert code == 3 and results["device"] == "mine" and results["budget_bytes"] == 2**20


def test_train(run: Run) -> None:
    code, results = run("train", "quickstart", "--as-device", "mine", "--accelerator", "cpu")
    assert code == 2 and results["error"].startswith("--as-device") and "no device profile" not in results["error"]


@pytest.mark.slow
def test_export(artifacts: Path, run: Run) -> None:
    (artifacts / "old" / "model" / "README.md").unlink()  # as training through Python left it in an earlier version
    code, results = run("export", "old", "--trt", "--target", "mine", "--replace")
    assert code in (0, 3) and "artifacts" in results, results
    assert (artifacts / "old" / "bundle" / "README.md").read_text(encoding="utf-8").startswith("---\nlibrary_name")


def test_profile(run: Run) -> None:
    code, results = run("profile", "old", "--device", "mine", "--max-size", "1")
    assert code == 2 and results["error"].startswith("--max-size"), "the profile is read before the limits are"


def test_list(run: Run) -> None:
    code, results = run("list", "devices")
    (mine,) = [device for device in results["devices"] if device["name"] == "mine"]
    assert code == 0 and mine["device"] == "My own card" and mine["usable_memory_bytes"] == 301 * 2**20
