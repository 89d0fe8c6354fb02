"""A profile in ``<artifacts>/profiles`` is found by every command that takes a device."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from edgeformer.artifacts.documents import own_profiles, shipped_folder
from tests.cli.in_process import Edgeformer
from tests.conftest import OLD_FORMAT


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """A folder of runs with a profile that nobody ships: an RTX 4050 with 1 MiB of memory beside its CUDA context."""
    profile = yaml.safe_load((shipped_folder("profiles") / "rtx4050.yaml").read_text(encoding="utf-8"))
    profile |= {"name": "mine", "title": "My own card"}
    profile["usable_memory_bytes"]["value"] = "301MiB"
    folder = own_profiles(tmp_path / "elsewhere")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")
    shutil.copytree(OLD_FORMAT / "classifier-v1", tmp_path / "elsewhere" / "old")
    return tmp_path / "elsewhere"


def test_commands(artifacts: Path, edgeformer: Edgeformer) -> None:
    options = ("--artifacts", str(artifacts), "--json")
    planned = json.loads(edgeformer("plan", "quickstart", "--device", "mine", *options, code=3))
    assert planned["device"] == "mine" and planned["budget_bytes"] == 2**20
    listed = json.loads(edgeformer("list", "devices", *options))["devices"]
    (mine,) = [device for device in listed if device["name"] == "mine"]
    assert mine["device"] == "My own card" and mine["usable_memory_bytes"] == 301 * 2**20
    refused = edgeformer("train", "quickstart", "--as-device", "mine", "--accelerator", "cpu", *options, code=2)
    assert "error: --as-device" in refused and "no device profile" not in refused
    refused = edgeformer("profile", "old", "--device", "mine", "--max-size", "1", *options, code=2)
    assert "error: --max-size" in refused, "the profile is read before the limits are"


@pytest.mark.slow
def test_export(artifacts: Path, edgeformer: Edgeformer) -> None:
    (artifacts / "old" / "model" / "README.md").unlink()  # as training through Python left it in an earlier version
    options = ("--trt", "--target", "mine", "--replace", "--artifacts", str(artifacts), "--json")
    code = 3 if find_spec("tensorrt_rtx") is None else 0
    assert "artifacts" in json.loads(edgeformer("export", "old", *options, code=code))
    assert (artifacts / "old" / "bundle" / "README.md").read_text(encoding="utf-8").startswith("---\nlibrary_name")
