"""Nothing half-written ever stands under a final name."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeformer.schema.files import replacing, replacing_folder, sha256_of, write_text


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


def test_sha256(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert sha256_of(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
