"""Nothing half-written ever stands under a final name."""

import errno
import os
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from edgeformer.artifacts.files import read_at_most, replacing, replacing_folder, sha256_of, write_json, write_text

MIB = 2**20
Replace = Callable[[Path], AbstractContextManager[Path]]


def test_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "bundle"
    with replacing_folder(folder) as temporary, replacing(folder.with_suffix(".json")) as beside:
        # So that those who clean up after a killed process know them, and whose they were.
        assert temporary.parent == folder.parent == beside.parent and not folder.exists()
        assert temporary.match(".bundle.*.tmp") and beside.match(".bundle.json.*.tmp.json")
        (temporary / "one").write_text("1")
    folder.with_suffix(".json").unlink()
    with replacing_folder(folder) as temporary:
        (temporary / "two").write_text("2")
    assert [path.name for path in folder.iterdir()] == ["two"]
    with pytest.raises(RuntimeError), replacing_folder(folder) as temporary:
        (temporary / "three").write_text("3")
        raise RuntimeError
    assert [path.name for path in folder.iterdir()] == ["two"]
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_comes_between_the_two_renames_undoes_the_first(tmp_path, monkeypatch, error):
    folder = tmp_path / "bundle"
    write_text(folder / "one", "1")
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp":
            raise error
        return replace(self, target)

    with pytest.raises(error), replacing_folder(folder) as temporary:
        monkeypatch.setattr(Path, "replace", interrupted)
    assert [path.name for path in folder.iterdir()] == ["one"]
    assert list(tmp_path.iterdir()) == [folder] and not temporary.exists()


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("replace", [replacing, replacing_folder])
def test_a_full_disk_is_reported_with_what_could_not_be_written(tmp_path: Path, replace: Replace, full: int) -> None:
    path = tmp_path / "bundle"
    with pytest.raises(OSError) as raised, replace(path), replacing(path.with_suffix(".part")):
        raise OSError(full, "the disk is full")
    assert raised.value.errno == full and raised.value.filename == str(path)
    assert raised.value.strerror == "the disk is full; the previous content is unchanged"
    with pytest.raises(PermissionError) as denied, replace(path):
        raise PermissionError(errno.EACCES, "no", "elsewhere")
    assert denied.value.filename == "elsewhere"
    assert list(tmp_path.iterdir()) == []


def test_a_large_file_is_hashed_piece_by_piece_and_read_up_to_a_limit(tmp_path: Path) -> None:
    tracemalloc.start()
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    assert sha256_of(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with path.open("wb") as file:
        file.truncate(32 * MIB)
    assert sha256_of(path) == "83ee47245398adee79bd9c0a8bc57b821e92aba10f5f9ade8a5d1fae4d8c4302"
    with pytest.raises(OSError, match="larger than 1 MiB"):
        read_at_most(path, MIB)
    assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    tracemalloc.stop()
    path.write_bytes(b"\r\n\xff")
    assert read_at_most(path, 3) == b"\r\n\xff"
    with pytest.raises(OSError, match="larger than") as raised:
        read_at_most(path, 2)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))


def test_a_folder_that_is_replaced_waits_aside_under_a_name_that_restoring_knows(tmp_path, monkeypatch):
    folder, replace, asides = tmp_path / "bundle", Path.replace, []
    write_text(folder / "one", "1")

    def watched(self: Path, target: Path) -> Path:
        asides.extend(path for path in tmp_path.glob(".bundle.*.old/bundle/one"))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    with replacing_folder(folder):
        pass
    assert len(asides) == 1 and not any(folder.iterdir())


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_what_is_published_follows_the_umask(tmp_path: Path, umask: int, file_mode: int, folder_mode: int) -> None:
    previous = os.umask(umask)
    try:
        write_text(tmp_path / "file", "x")
        with replacing_folder(tmp_path / "folder"):
            pass
    finally:
        os.umask(previous)
    assert (tmp_path / "file").stat().st_mode & 0o777 == file_mode
    assert (tmp_path / "folder").stat().st_mode & 0o777 == folder_mode


class Manifest(BaseModel):
    file: Path
    from_: str = Field(alias="from", default="–")


def test_a_manifest_is_indented_json_with_its_own_names_and_letters(tmp_path: Path) -> None:
    write_json(tmp_path / "model", Manifest(file=Path("a")))
    assert (tmp_path / "model").read_bytes() == '{\n  "file": "a",\n  "from": "–"\n}\n'.encode()
    write_json(tmp_path / "plain", {"ü": None})
    assert (tmp_path / "plain").read_bytes() == '{\n  "ü": null\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "nan", {"loss": float("nan")})
    assert not (tmp_path / "nan").exists()


def test_who_works_in_a_replaced_folder_works_in_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "run" / "plots"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    with replacing_folder(tmp_path / "run") as folder:
        (folder / "plots").mkdir()
        (folder / "new.txt").write_text("text")
    assert Path.cwd().parent.joinpath("new.txt").is_file()
    monkeypatch.chdir(tmp_path)
    with replacing_folder(tmp_path / "run"):
        pass
    assert Path.cwd() == tmp_path
