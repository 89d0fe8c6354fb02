"""One writer per folder: held by the living, taken over from the dead."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgeformer.machine.lock import LOCK_FILE, LockedError, locked


def hold(folder: Path, ready: Connection) -> None:
    with locked(folder, "is being trained"):
        ready.send(True)
        ready.recv()


@contextmanager
def holding(folder: Path) -> Iterator[BaseProcess]:
    """Another process that has the lock; killed at the end, so that its lock file stays."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(folder, theirs))
    process.start()
    theirs.close()  # or a child that dies before it has the lock would be waited for
    try:
        assert ours.recv()
        yield process
    finally:
        process.kill()
        process.join()


def named(folder: Path, **changes: Any) -> None:
    """A lock file that names the process that runs these tests' parent, which lives."""
    parent = psutil.Process(os.getppid())
    started = parent.create_time() - (psutil.boot_time() if psutil.LINUX else 0)
    owner = {"pid": parent.pid, "host": platform.node(), "process_started": started, "since": "then"}
    (folder / LOCK_FILE).write_text(json.dumps({**owner, **changes}), encoding="utf-8")


def test_a_second_process_is_refused_and_the_first_one_named(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        who = rf"is being trained by process {process.pid} on {platform.node()}, since 2"
        with pytest.raises(LockedError, match=who):
            locked(tmp_path, "is being trained").__enter__()
    assert json.loads((tmp_path / LOCK_FILE).read_text(encoding="utf-8"))["pid"] == process.pid
    with locked(tmp_path, "is being trained"):
        assert json.loads((tmp_path / LOCK_FILE).read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert not (tmp_path / LOCK_FILE).exists()


def test_the_same_process_cannot_have_it_twice(tmp_path: Path) -> None:
    with locked(tmp_path, "x"), pytest.raises(LockedError, match=f"x by process {os.getpid()}"):
        locked(tmp_path, "x").__enter__()


def test_a_living_owner_is_believed_where_the_file_system_knows_no_locks(tmp_path: Path) -> None:
    named(tmp_path)
    with pytest.raises(LockedError, match=f"process {os.getppid()} on .* if it is gone, remove"):
        locked(tmp_path, "x").__enter__()


def test_of_another_host_nothing_is_known(tmp_path: Path) -> None:
    named(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(LockedError, match="process 1 on elsewhere"):
        locked(tmp_path, "x").__enter__()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
def test_an_unreadable_name_is_no_owner(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content.replace('{"pid"', f'{{"host": "{platform.node()}", "pid"'))
    with locked(tmp_path, "x"):
        pass


def test_a_number_that_another_process_has_by_now_is_no_owner(tmp_path: Path) -> None:
    named(tmp_path, process_started=-60.0)
    with locked(tmp_path, "x"):
        pass


def test_it_is_given_back_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path, "x"):
        raise ZeroDivisionError
    with locked(tmp_path, "x"):
        pass


@pytest.mark.skipif(not psutil.LINUX, reason="other systems keep the moment a process started at")
@pytest.mark.parametrize("seconds", [-7200, 7200])
def test_an_owner_lives_on_when_the_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """Where the file system knows no locks: then the process's number and start are all that there is."""
    with holding(tmp_path) as process:
        without_locks = tmp_path / "copy"
        without_locks.mkdir()
        shutil.copy(tmp_path / LOCK_FILE, without_locks)
        # As the system answers after the clock was set: the boot is as long ago as before, its moment is another.
        proc, boot = tmp_path / "proc", int(psutil.boot_time())
        proc.mkdir()
        stat = Path("/proc/stat").read_text(encoding="ascii").replace(f"btime {boot}", f"btime {boot + seconds}")
        (proc / "stat").write_text(stat, encoding="ascii")
        (proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
        assert psutil.boot_time() == boot + seconds
        with pytest.raises(LockedError, match=f"process {process.pid} on"):
            locked(without_locks, "x").__enter__()
