"""Connections that are killed at every step: nothing half-written on either side, and the second call succeeds."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

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
    sshd: Sshd, cwd: Path, arguments: list[str], kill: Callable[[int], bool] = lambda lines: False
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run a command, and kill its connections once when ``kill`` says so, given the number of lines on stderr so far.

    Returns the finished command, and whether a connection was killed.
    """
    environment = {**os.environ, "EDGEFORMER_SSH": sshd.ssh, "EDGEFORMER_PROGRESS": "json"}
    command = [sys.executable, "-m", "edgeformer", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)
    lines, outputs, sockets = list[str](), list[str](), set[str]()

    def read_errors() -> None:
        for line in process.stderr:
            lines.append(line)

    readers = [threading.Thread(target=read_errors), threading.Thread(target=lambda: outputs.extend(process.stdout))]
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


VERIFY = ["verify", "small", "--on", "kitchen-pi", "--json"]
PROFILE = ["profile", "small", "--on", "kitchen-pi", "--batch", "1", "--seq", "64", "--artifact", "onnx-fp32", "--json"]
CLEAN = ["machines", "clean", "kitchen-pi", "--json"]


@pytest.mark.slow
def test_a_connection_killed_at_each_step(machine: Sshd, run: Path) -> None:
    """The k-th line of progress is the step."""
    cwd = run.parents[1]
    for step in range(1, 40):
        (run / "bundle" / "README.md").write_text(f"step {step}")  # another job, and a file to send
        first, was_killed = run_and_kill(machine, cwd, VERIFY, lambda lines, step=step: lines >= step)  # type: ignore[misc]
        print(step, was_killed, first.returncode, first.stderr.splitlines()[-1:], flush=True)
        if not was_killed:
            assert step > 5
            break
        if first.returncode != 2:
            assert first.returncode == 1 and "error" in json.loads(first.stdout)
        second, _ = run_and_kill(machine, cwd, VERIFY)
        assert second.returncode == 2 and "README.md" in second.stdout, second.stderr  # which bundle.json lists
    run_and_kill(machine, cwd, CLEAN)
    check_clean(machine)


@pytest.mark.torture
@pytest.mark.parametrize(("command", "enough"), [(PROFILE, 50), (VERIFY, 5)], ids=["profile", "install and verify"])
def test_connections_killed_at_random_moments(machine: Sshd, run: Path, command: list[str], enough: int) -> None:
    cwd, choose, kills, has_report = run.parents[1], random.Random(1), 0, command is PROFILE

    def prepare() -> None:
        (run / "reports" / "host-onnx-fp32-on-kitchen-pi.json").unlink(missing_ok=True)
        if command is VERIFY:
            run_and_kill(machine, cwd, CLEAN)
            check_clean(machine)

    prepare()
    started = time.monotonic()
    run_and_kill(machine, cwd, command)
    measured_s = time.monotonic() - started
    while kills < enough:
        prepare()
        moment = time.monotonic() + choose.uniform(0.3, measured_s)
        first, was_killed = run_and_kill(machine, cwd, command, lambda _, moment=moment: time.monotonic() > moment)
        assert check_reports(run) <= has_report
        kills += was_killed
        second, _ = run_and_kill(machine, cwd, command)
        print(kills, was_killed, first.returncode, second.returncode, flush=True)
        assert second.returncode == 0, second.stderr
        assert check_reports(run) == has_report
    run_and_kill(machine, cwd, CLEAN)
    check_clean(machine)


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["--on", "local"]], ids=["machine", "machine and this one"])
def test_ctrl_c_stops_the_job_and_writes_nothing(machine: Sshd, run: Path, others: list[str]) -> None:
    environment = {**os.environ, "EDGEFORMER_PROGRESS": "json"}
    command = [sys.executable, "-m", "edgeformer", *PROFILE, *others, "--strict"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert any("kitchen-pi: Measuring" in line or '"Measuring' in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    document = json.loads(output)
    assert (process.returncode, document["exit_code"]) == (130, 130), output
    assert "the jobs on the machines were stopped and removed" in document["error"]
    assert check_reports(run) == 0 and not any((machine.root / "jobs").iterdir())
    run_and_kill(machine, run.parents[1], CLEAN)
    check_clean(machine)
