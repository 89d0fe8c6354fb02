"""One writer per folder: held by the living, taken over from the dead."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from edgeformer.formats.errors import ArtifactError
from edgeformer.machine.lock import LOCK_FILE, locked


def hold(folder: Path, ready: Connection) -> None:
    with locked(folder, "is being trained"):
        ready.send(True)
        ready.recv()


def named(folder: Path, **changes: Any) -> None:
    """A lock file that names the process that runs these tests' parent, which lives."""
    parent = psutil.Process(os.getppid())
    owner = {"pid": parent.pid, "host": platform.node(), "process_started": parent.create_time(), "since": "then"}
    (folder / LOCK_FILE).write_text(json.dumps({**owner, **changes}), encoding="utf-8")


def test_a_second_process_is_refused_and_the_first_one_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert ours.recv()
    with pytest.raises(
        ArtifactError, match=rf"is being trained by process {process.pid} on {platform.node()}, since 2"
    ):
        locked(tmp_path, "is being trained").__enter__()
    process.kill()  # its lock file stays
    process.join()
    assert json.loads((tmp_path / LOCK_FILE).read_text(encoding="utf-8"))["pid"] == process.pid
    with locked(tmp_path, "is being trained"):
        assert json.loads((tmp_path / LOCK_FILE).read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert not (tmp_path / LOCK_FILE).exists()


def test_the_same_process_cannot_have_it_twice(tmp_path: Path) -> None:
    with locked(tmp_path, "x"), pytest.raises(ArtifactError, match=f"x by process {os.getpid()}"):
        locked(tmp_path, "x").__enter__()


def test_a_living_owner_is_believed_where_the_file_system_knows_no_locks(tmp_path: Path) -> None:
    named(tmp_path)
    with pytest.raises(ArtifactError, match=f"process {os.getppid()} on .* if it is gone, remove"):
        locked(tmp_path, "x").__enter__()


def test_of_another_host_nothing_is_known(tmp_path: Path) -> None:
    named(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(ArtifactError, match="process 1 on elsewhere"):
        locked(tmp_path, "x").__enter__()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
def test_an_unreadable_name_is_no_owner(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_FILE).write_text(content.replace('{"pid"', f'{{"host": "{platform.node()}", "pid"'))
    with locked(tmp_path, "x"):
        pass


def test_a_number_that_another_process_has_by_now_is_no_owner(tmp_path: Path) -> None:
    named(tmp_path, process_started=psutil.Process(os.getppid()).create_time() - 60)
    with locked(tmp_path, "x"):
        pass


def test_it_is_given_back_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path, "x"):
        raise ZeroDivisionError
    with locked(tmp_path, "x"):
        pass
