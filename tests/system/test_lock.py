"""One writer per folder: a live owner keeps the lock, a dead one loses it."""

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import psutil
import pytest

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.system import lock
from edgeformer.system.lock import LOCK_FILE, LockedError, has_live_owner, lock_folder, lock_path, wait_for_lock

HOLDER = """
import sys
from pathlib import Path
from edgeformer.system.lock import lock_folder
with lock_folder(Path(sys.argv[1]), "is being trained"):
    print("held", flush=True)
    sys.stdin.read()
"""


def owner_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LOCK_FILE).read_text(encoding="utf-8"))


def write_owner(folder: Path, **changes: Any) -> None:
    """Write a lock file that names the process that runs these tests' parent, which lives."""
    parent = psutil.Process(os.getppid())
    started = parent.create_time() - (psutil.boot_time() if psutil.LINUX else 0)
    owner = {"pid": parent.pid, "host": platform.node(), "process_started": started, "since": "then"}
    (folder / LOCK_FILE).write_text(json.dumps({**owner, **changes}), encoding="utf-8")


def is_refused(folder: Path, message: str = "") -> bool:
    try:
        with lock_folder(folder, "x"):
            return False
    except LockedError as error:
        assert message in str(error)
        return True


@pytest.mark.parametrize("first_byte", [0, 1], ids=["elsewhere", "Windows"])
def test_one_process_at_a_time_until_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_byte: int) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], text=True, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        assert is_refused(tmp_path, f"x by process {holder.pid} on {platform.node()}, since 2")
        holder.kill()
    assert owner_of(tmp_path)["pid"] == holder.pid
    monkeypatch.setattr(lock, "_OWNER_AT", first_byte)
    with lock_folder(tmp_path, "x"):
        assert is_refused(tmp_path, f"{tmp_path}: x by process {os.getpid()} on {platform.node()}, since 20")
        assert is_refused(tmp_path, "; wait for it, or stop it first"), "its file is no rubbish"
    assert not (tmp_path / LOCK_FILE).exists()


@pytest.mark.parametrize("content", ["", "[1]", f'{{"host": "{platform.node()}", "pid": "x"}}'])
def test_an_unreadable_record_names_no_owner(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content, encoding="utf-8")
    assert not is_refused(tmp_path)
    with (tmp_path / LOCK_FILE).open("w") as other:  # between taking the lock and writing its name
        fcntl.flock(other, fcntl.LOCK_EX)
        assert is_refused(tmp_path, ": x by another process; wait for it, or stop it first")


def test_the_file_names_this_process_until_release(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with lock_folder(tmp_path, "x"):
            file = tmp_path / LOCK_FILE
            assert file.stat().st_mode & 0o777 == 0o666
            owner = owner_of(tmp_path)
            assert (owner.pop("pid"), owner.pop("host")) == (os.getpid(), platform.node())
            assert owner.pop("process_started") == lock._start_time(os.getpid()) and owner.keys() == {"since"}
            opened = file.open("rb")  # as another process that asks just now
    finally:
        os.umask(previous)
    with opened:
        assert opened.read() == b"" and not file.exists()
    (tmp_path / "folder").mkdir()
    with lock_path(tmp_path / "folder" / "bundle"):
        shutil.rmtree(tmp_path / "folder")  # deleted while it is locked: no error


@pytest.mark.parametrize(("off_s", "is_same"), [(1.9, True), (-1.9, True), (2.0, False), (-60.0, False)])
def test_an_owner_is_identified_by_pid_and_start(tmp_path, monkeypatch, off_s, is_same):
    monkeypatch.setattr(lock, "_start_time", lambda pid: {os.getppid(): 64.0, os.getpid(): 90.0}[pid])
    write_owner(tmp_path, process_started=64.0 + off_s)
    assert is_refused(tmp_path) is is_same


@pytest.mark.skipif(not psutil.LINUX, reason="other systems keep the moment a process started at")
@pytest.mark.parametrize("seconds", [-7200, 7200])
def test_an_owner_lives_on_when_the_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    write_owner(tmp_path)
    # As the system answers after the clock was set: the boot is as long ago as before, its moment is another.
    proc, boot = tmp_path / "proc", int(psutil.boot_time())
    proc.mkdir()
    stat = Path("/proc/stat").read_text(encoding="ascii").replace(f"btime {boot}", f"btime {boot + seconds}")
    (proc / "stat").write_text(stat, encoding="ascii")
    (proc / str(os.getppid())).symlink_to(f"/proc/{os.getppid()}")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    assert psutil.boot_time() == boot + seconds
    assert is_refused(tmp_path, f"process {os.getppid()} on")


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
        assert len(handles) == 2 and owner_of(tmp_path)["pid"] == os.getpid()
        with (tmp_path / LOCK_FILE).open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for handle in handles:
        os.close(handle)
    assert psutil.Process().num_fds() == handles_open, "both were closed"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ArtifactError, match=rf"bundle: cannot be written, because .* \({os.strerror(number)}") as error:
        lock_path(tmp_path / "bundle").__enter__()
    assert not isinstance(error.value, LockedError)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EWOULDBLOCK])
def test_a_file_system_without_locks_is_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(handle: int, blocking: bool) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock, "lock_descriptor", refuse)
    assert is_refused(tmp_path) is (number == errno.EWOULDBLOCK)
    write_owner(tmp_path)
    assert is_refused(tmp_path)


def test_an_owner_on_another_host_counts_as_running_for_a_day_after_its_last_file(tmp_path: Path) -> None:
    write_owner(tmp_path, host="elsewhere", pid=1)
    assert is_refused(tmp_path, "process 1 on elsewhere") and has_live_owner(tmp_path)
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
