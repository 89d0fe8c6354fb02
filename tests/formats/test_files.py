"""Nothing half-written ever stands under a final name."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edgeformer.formats.files import replacing, replacing_folder, sha256_of, write_text


def test_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    with replacing_folder(folder) as temporary:
        (temporary / "one").write_text("1")
    with replacing_folder(folder) as temporary:
        (temporary / "two").write_text("2")
    assert [path.name for path in folder.iterdir()] == ["two"]
    with pytest.raises(RuntimeError), replacing_folder(folder) as temporary:
        (temporary / "three").write_text("3")
        raise RuntimeError
    assert [path.name for path in folder.iterdir()] == ["two"]
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_comes_between_the_two_renames_undoes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
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
def test_a_full_disk_is_reported_with_what_could_not_be_written(tmp_path: Path, full: int) -> None:
    folder = tmp_path / "bundle"
    with pytest.raises(OSError) as raised, replacing_folder(folder) as temporary, replacing(temporary / "part"):
        raise OSError(full, "the disk is full")
    assert raised.value.errno == full and raised.value.filename == str(folder)
    assert raised.value.strerror is not None and raised.value.strerror.startswith("the disk is full; what was there")
    with pytest.raises(PermissionError) as other, replacing_folder(folder):
        raise PermissionError(errno.EACCES, "no", "elsewhere")
    assert other.value.filename == "elsewhere"
    assert list(tmp_path.iterdir()) == []


def test_sha256(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert sha256_of(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
