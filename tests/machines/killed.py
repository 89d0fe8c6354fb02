"""Calls of a machine whose connection is killed, and what may be left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from edgeformer.artifacts.report import read_report
from tests.machines.sshd import Sshd

_LIMIT_S = 600.0


def kill_connections(command: psutil.Process, sockets: set[str]) -> int:
    """Kill the ssh processes of a command and their shared login, and return how many there were.

    ``sockets``: control sockets that were seen so far; the shared login has nothing else in its name.
    """
    processes = find_clients(command, sockets)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(f"ssh: {socket} " in " ".join(process.cmdline()) for socket in sockets):
                processes.append(process)
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    return len(processes)


def find_clients(command: psutil.Process, sockets: set[str]) -> list[psutil.Process]:
    """The ssh processes that a command has started; adds the control sockets in their arguments."""
    processes = []
    with suppress(psutil.Error):
        for process in command.children():
            if process.name() == "ssh":
                processes.append(process)
                words = process.cmdline()
                sockets.update(word.partition("=")[2] for word in words if word.startswith("ControlPath="))
    return processes


def run_and_kill(
    sshd: Sshd, cwd: Path, arguments: list[str], kill: Callable[[int], bool]
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run a command, and kill its connections once when ``kill`` says so.

    Args:
        sshd: the machine.
        cwd: working directory.
        arguments: of ``edgeformer``.
        kill: takes the number of lines that the command has printed on stderr so far; called often.

    Returns:
        The finished command, and whether a connection was killed.
    """
    environment = {**os.environ, "EDGEFORMER_SSH": sshd.ssh, "EDGEFORMER_PROGRESS": "json"}
    command = [sys.executable, "-m", "edgeformer", *arguments]
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    lines: list[str] = []
    outputs: list[str] = []
    sockets: set[str] = set()
    errors, output = process.stderr, process.stdout

    def read_errors() -> None:
        for line in errors:
            lines.append(line)

    readers = [threading.Thread(target=read_errors), threading.Thread(target=lambda: outputs.extend(output))]
    was_killed, deadline = False, time.monotonic() + _LIMIT_S
    with process:
        for reader in readers:
            reader.start()
        while process.poll() is None:
            assert time.monotonic() < deadline, lines[-3:]
            find_clients(psutil.Process(process.pid), sockets)
            if not was_killed and kill(len(lines)):
                was_killed = kill_connections(psutil.Process(process.pid), sockets) > 0
            time.sleep(0.02)
        for reader in readers:
            reader.join()
    return subprocess.CompletedProcess(command, process.returncode, "".join(outputs), "".join(lines)), was_killed


def check_reports(run: Path) -> int:
    """Every report of a run is complete; return how many there are."""
    reports = [*(run / "reports").glob("*")]
    assert not [path for path in reports if path.name.startswith(".")]
    for path in reports:
        if path.suffix == ".json":
            read_report(path)
    return len([path for path in reports if path.suffix == ".json"])


def check_clean(sshd: Sshd) -> None:
    """Nothing of edgeformer is left on the machine, neither files nor processes."""
    assert not sshd.root.parent.exists(), [*sshd.root.parent.rglob("*")][:5]
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(sshd.root) in " ".join(process.cmdline()):
                left.append(process)
    assert not left
