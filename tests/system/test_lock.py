"""One writer per folder: a live owner keeps the lock, a dead one loses it."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import filelock
import psutil
import pytest

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.system import lock
from edgeformer.system.lock import (
    LOCK_FILE,
    LockedError,
    has_live_owner,
    lock_folder,
    lock_path,
    remote_owner,
    wait_for_lock,
)


def hold(folder: Path, ready: Connection) -> None:
    with lock_folder(folder, "is being trained"):
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
            lock_folder(tmp_path, "is being trained").__enter__()
    assert json.loads((tmp_path / LOCK_FILE).read_text(encoding="utf-8"))["pid"] == process.pid
    with lock_folder(tmp_path, "is being trained"):
        assert json.loads((tmp_path / LOCK_FILE).read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("first", [0, 1], ids=["elsewhere", "Windows"])
def test_the_same_process_cannot_lock_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr(lock, "_OWNER_AT", first)
    with lock_folder(tmp_path, "x"), pytest.raises(LockedError) as refused:
        lock_folder(tmp_path, "x").__enter__()
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}: x by process {os.getpid()} on {platform.node()}, since 20")
    assert message.endswith("; wait for it, or stop it first"), "its file is no rubbish"


def test_an_owner_on_another_host_counts_as_running(tmp_path: Path) -> None:
    named(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(LockedError, match="process 1 on elsewhere"):
        lock_folder(tmp_path, "x").__enter__()


@pytest.mark.parametrize("content", ["", "[1]", f'{{"host": "{platform.node()}", "pid": "x"}}'])
def test_an_unreadable_name_is_no_owner(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content, encoding="utf-8")
    with lock_folder(tmp_path, "x"):
        pass


def test_a_lock_without_a_record_belongs_to_another_process(tmp_path: Path) -> None:
    """Between taking the lock and writing its name."""
    with (tmp_path / LOCK_FILE).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=r": x by another process; wait for it, or stop it first$"):
            lock_folder(tmp_path, "x").__enter__()
    with lock_folder(tmp_path, "x"):
        pass


def test_the_file_names_this_process_until_release(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with lock_folder(tmp_path, "x"):
            file = tmp_path / LOCK_FILE
            assert file.stat().st_mode & 0o777 == 0o666
            owner = json.loads(file.read_text(encoding="utf-8"))
            assert owner.keys() == {"pid", "host", "process_started", "since"}
            assert (owner["pid"], owner["host"]) == (os.getpid(), platform.node())
            assert owner["process_started"] == lock._start_time(os.getpid())
            opened = file.open("rb")  # as another process that asks just now
    finally:
        os.umask(previous)
    with opened:
        assert opened.read() == b"" and not file.exists()


def test_a_folder_deleted_while_locked_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with lock_path(tmp_path / "folder" / "bundle"):
        shutil.rmtree(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(("off", "same"), [(1.9, True), (-1.9, True), (2.0, False), (-60.0, False)])
def test_an_owner_is_identified_by_pid_and_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: float, same: bool
) -> None:
    monkeypatch.setattr(lock, "_start_time", lambda pid: {os.getppid(): 64.0, os.getpid(): 90.0}[pid])
    named(tmp_path, process_started=64.0 + off)
    if same:
        with pytest.raises(LockedError):
            lock_folder(tmp_path, "x").__enter__()
    else:
        with lock_folder(tmp_path, "x"):
            pass


def test_a_lock_file_removed_after_opening_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner gives it back between our opening and our taking it: what we took has no name any more."""
    lock_descriptor, handles = filelock.lock_descriptor, []

    def removing(handle: int, blocking: bool) -> bool:
        free = lock_descriptor(handle, blocking=blocking)
        if not handles:
            (tmp_path / LOCK_FILE).unlink()
        handles.append(os.dup(handle))
        return free

    monkeypatch.setattr(filelock, "lock_descriptor", removing)
    handles_open = psutil.Process().num_fds()
    with lock_folder(tmp_path, "x"):
        owner = json.loads((tmp_path / LOCK_FILE).read_text(encoding="utf-8"))
        assert len(handles) == 2 and owner["pid"] == os.getpid()
        with (tmp_path / LOCK_FILE).open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for handle in handles:
        os.close(handle)
    assert psutil.Process().num_fds() == handles_open, "both were closed"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*given: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ArtifactError) as refused:
        lock_path(tmp_path / "bundle").__enter__()
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'bundle'}: cannot be written, because {tmp_path} cannot (")
    assert os.strerror(number) in message and not isinstance(refused.value, LockedError)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EWOULDBLOCK])
def test_a_file_system_without_locks_is_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(handle: int, blocking: bool) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock, "lock_descriptor", refuse)
    if number == errno.EWOULDBLOCK:
        with pytest.raises(LockedError):
            lock_folder(tmp_path, "x").__enter__()
        return
    with lock_folder(tmp_path, "x"):
        assert (tmp_path / LOCK_FILE).is_file()
    named(tmp_path)
    with pytest.raises(LockedError):
        lock_folder(tmp_path, "x").__enter__()


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
            lock_folder(without_locks, "x").__enter__()


def test_a_lock_of_another_host_counts_for_a_day_after_its_last_file(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": 1, "host": "far", "since": "2026-01-02"}), encoding="utf-8")
    assert has_live_owner(tmp_path) and remote_owner(tmp_path) == "far, since 2026-01-02"
    os.utime(tmp_path / LOCK_FILE, (0, time.time() - 25 * 3600))
    assert not has_live_owner(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    assert has_live_owner(tmp_path)


def test_wait_for_lock_takes_turns(tmp_path: Path) -> None:
    """Each adds a line to what it reads: without turns, lines would be lost. Nobody waits for ever."""
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")

    def add(line: int) -> None:
        with wait_for_lock(path):
            text = path.read_text(encoding="utf-8")
            time.sleep(0.01)
            path.write_text(f"{text}{line}\n", encoding="utf-8")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert sorted(path.read_text(encoding="utf-8").split()) == [str(line) for line in range(8)]
    with lock_path(path), pytest.raises(LockedError, match="is being replaced by"), wait_for_lock(path, 0.1):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
