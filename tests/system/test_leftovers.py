"""A folder that is replaced by one process at a time, and what is done about those that were killed meanwhile."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgeformer.system import leftovers
from edgeformer.system.leftovers import remove_leftovers, restore_folder, temporary_folder
from edgeformer.system.lock import LockedError, lock_path

HOLDER = """
import sys
from pathlib import Path
from edgeformer.system.lock import lock_path
with lock_path(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
NEW = """
import os, signal, sys
from pathlib import Path
from edgeformer.system.leftovers import temporary_folder
with temporary_folder(Path(sys.argv[1]), ".new-run.") as folder:
    (folder / "run-001").mkdir()
    print(folder.name, flush=True)
    sys.stdin.read()
"""
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def aside(folder: Path) -> Path:
    """As a process leaves it that is killed between the two renames."""
    old = folder / ".bundle.x1.old" / "bundle"
    old.mkdir(parents=True)
    (old / "bundle.json").write_text("{}", encoding="utf-8")
    (folder / ".bundle.y1.tmp").mkdir()
    return folder / "bundle"


def test_one_process_at_a_time_until_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = aside(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(bundle)], text=True, **PIPES) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LockedError, match=f"bundle: is being replaced by process {holder.pid} on "):
            lock_path(bundle).__enter__()
        # A reader waits for the living process, which is about to put something there.
        timer = threading.Timer(0.2, bundle.mkdir)
        timer.start()
        restore_folder(bundle)
        timer.join()
        assert not any(bundle.iterdir()), "what is aside belongs to the living process"
        bundle.rmdir()
        holder.kill()
    restore_folder(bundle)
    assert [path.name for path in bundle.iterdir()] == ["bundle.json"]
    with lock_path(bundle):
        remove_leftovers(bundle)
    assert list(tmp_path.iterdir()) == [bundle]
    monkeypatch.setattr(leftovers, "lock_path", lambda path: pytest.fail("a folder may be one that cannot be written"))
    restore_folder(bundle)
    restore_folder(tmp_path / "never there")


def test_a_temporary_folder_goes_with_its_process(tmp_path: Path) -> None:
    (tmp_path / ".new-run.older" / "run-001").mkdir(parents=True)  # of a version that took no lock
    (tmp_path / ".other").mkdir()
    with subprocess.Popen([sys.executable, "-c", NEW, str(tmp_path)], text=True, **PIPES) as maker:  # type: ignore[call-overload]
        theirs = maker.stdout.readline().strip()
        assert {path.name for path in tmp_path.iterdir()} == {theirs, f".{theirs}.lock", ".other"}
        with temporary_folder(tmp_path, ".new-run.") as ours:
            assert (tmp_path / theirs / "run-001").is_dir(), "its process lives"
            assert ours.is_dir() and ours.name != theirs
        maker.kill()
    assert (tmp_path / theirs).is_dir()
    with temporary_folder(tmp_path, ".new-run."):
        assert not (tmp_path / theirs).exists()
    assert [path.name for path in tmp_path.iterdir()] == [".other"]


def test_the_newest_of_several_that_were_moved_aside_is_put_back(tmp_path: Path) -> None:
    for age, name in enumerate(("b", "c", "a")):
        old = tmp_path / f".bundle.{name}.old"
        (old / "bundle" / name).mkdir(parents=True)
        os.utime(old, (0, 1000 + age))
    restore_folder(tmp_path / "bundle")
    assert [path.name for path in (tmp_path / "bundle").iterdir()] == ["a"]
    assert not (tmp_path / ".bundle.a.old").exists() and (tmp_path / ".bundle.c.old").exists()


def test_rubbish_that_cannot_be_deleted_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".new.abc.lock").write_text("{}", encoding="utf-8")
    (tmp_path / "new.file").write_text("no folder, which is what is deleted", encoding="utf-8")
    with temporary_folder(tmp_path, "new.") as folder:
        folder.rmdir()  # whatever was made in it moved on
    (tmp_path / ".bundle.1.tmp").write_text("a file, which no folder's deletion takes", encoding="utf-8")
    (tmp_path / ".bundle.2.tmp" / "half").mkdir(parents=True)
    remove_leftovers(tmp_path / "bundle")
    assert {path.name for path in tmp_path.iterdir()} == {".bundle.1.tmp", "new.file"}
