"""A folder that is replaced by one process at a time, and what is done about those that were killed meanwhile."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from edgeformer.formats import claims
from edgeformer.formats.claims import ClaimedError, claiming, remove_leftovers, restore_folder

HOLDER = """
import sys
from pathlib import Path
from edgeformer.formats.claims import claiming
with claiming(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def aside(folder: Path) -> Path:
    """As a process leaves it that is killed between the two renames."""
    old = folder / ".bundle.x1.old" / "bundle"
    old.mkdir(parents=True)
    (old / "bundle.json").write_text("{}", encoding="utf-8")
    (folder / ".bundle.y1.tmp").mkdir()
    return folder / "bundle"


def test_one_process_at_a_time_until_it_dies(tmp_path: Path) -> None:
    bundle = aside(tmp_path)
    (tmp_path / ".bundle.lock").write_bytes(b"process 1, which left it on Windows")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(bundle)], text=True, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ClaimedError, match=f"bundle: process {holder.pid} is replacing it"), claiming(bundle):
            pass
        # A reader waits for the living process, which is about to put something there.
        timer = threading.Timer(0.2, bundle.mkdir)
        timer.start()
        restore_folder(bundle)
        assert bundle.is_dir(), "it waited"
        timer.join()
        assert not any(bundle.iterdir()), "what is aside belongs to the living process"
        bundle.rmdir()
        holder.kill()
    restore_folder(bundle)
    assert [path.name for path in bundle.iterdir()] == ["bundle.json"]
    with claiming(bundle):
        remove_leftovers(bundle)
    assert list(tmp_path.iterdir()) == [bundle]


def test_a_bundle_that_is_there_is_not_touched(tmp_path: Path) -> None:
    bundle = aside(tmp_path)
    bundle.mkdir()
    restore_folder(bundle)
    assert not any(bundle.iterdir())
    with claiming(bundle):
        remove_leftovers(bundle)
    assert list(tmp_path.iterdir()) == [bundle]
    assert not any(bundle.iterdir())


def test_an_error_inside_a_claim_ends_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), claiming(tmp_path / "bundle"):
        raise FileNotFoundError
    with claiming(tmp_path / "bundle"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_reader_waits_only_so_long_for_a_living_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = aside(tmp_path)
    monkeypatch.setattr(claims, "_SWAP_S", 0.05)
    with (tmp_path / ".bundle.lock").open("wb") as other:
        other.write(b"\xff")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        restore_folder(bundle)
        assert not bundle.exists()
        with pytest.raises(ClaimedError, match="is replacing it"), claiming(bundle):
            pass


def test_a_bundle_that_is_there_is_read_without_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = aside(tmp_path)
    bundle.mkdir()
    monkeypatch.setattr(claims, "claiming", lambda path: pytest.fail("a folder may be one that cannot be written"))
    restore_folder(bundle)
    restore_folder(tmp_path / "never there")


def test_the_newest_of_several_that_were_moved_aside_is_put_back(tmp_path: Path) -> None:
    for age, name in enumerate(("b", "c", "a")):
        old = tmp_path / f".bundle.{name}.old"
        (old / "bundle" / name).mkdir(parents=True)
        os.utime(old, (0, 1000 + age))
    restore_folder(tmp_path / "bundle")
    assert [path.name for path in (tmp_path / "bundle").iterdir()] == ["a"]
    assert not (tmp_path / ".bundle.a.old").exists() and (tmp_path / ".bundle.c.old").exists()


def test_rubbish_that_cannot_be_deleted_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".bundle.1.tmp").write_text("a file, which no folder's deletion takes", encoding="utf-8")
    (tmp_path / ".bundle.2.tmp" / "half").mkdir(parents=True)
    remove_leftovers(tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == [".bundle.1.tmp"]


def test_a_claim_ends_where_its_file_is_gone_or_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claiming(tmp_path / "bundle"):
        (tmp_path / ".bundle.lock").unlink()

    def open_on_windows(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "unlink", open_on_windows)
    with claiming(tmp_path / "bundle"):
        pass
    with claiming(tmp_path / "bundle"):
        pass


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lock_whose_file_was_deleted_meanwhile_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    path, locks, lock = tmp_path / ".bundle.lock", [], claims._lock

    def late(file: IO[bytes]) -> None:
        lock(file)
        locks.append(file.fileno())
        if len(locks) == 1:
            path.unlink()
            if made_again:
                path.touch()

    monkeypatch.setattr(claims, "_lock", late)
    with claiming(tmp_path / "bundle"):
        assert len(locks) == 2 and path.read_bytes() == f"process {os.getpid()}".encode()
