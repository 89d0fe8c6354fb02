"""Child processes end when their parent is killed; so does everything that a command starts."""

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.model_search.test_search_command import write_tickets

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills processes as POSIX does")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends any program with its parent")
PACKAGE = Path(__file__).resolve().parents[2] / "edgeformer"

PARENT = """
import subprocess, sys
from edgeformer.system import child
kind, command = sys.argv[1], sys.argv[2:]
(subprocess.Popen(command) if kind == "unrelated" else child.start(command, is_edgeformer=kind == "own")).wait()
"""
CHILD = """
import ctypes, os, sys, time
from edgeformer.system import child
{before}
child.end_with_parent()
print("ready", flush=True)
{wait}
"""
HOLDS_THE_LOCK = CHILD.format(before="", wait="ctypes.PyDLL(None).sleep(100)")
SLEEPS = CHILD.format(before="", wait="time.sleep(100)")
WATCHES = CHILD.format(before="child._is_killed_by_kernel = lambda: False", wait="time.sleep(100)")


def have_ended(processes: Sequence[psutil.Process], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        running = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                running += [process] if process.status() != psutil.STATUS_ZOMBIE else []
        if not running:
            return True
        time.sleep(0.05)
    return False


def child_of_killed(kind: str, *command: str) -> psutil.Process:
    """Start a child, kill its parent when the child is ready, and return the child."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, kind, *command], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        (process,) = psutil.Process(parent.pid).children()
        parent.kill()
    return process


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        pytest.param("own", [sys.executable, "-c", HOLDS_THE_LOCK], marks=LINUX, id="native code holds the lock"),
        pytest.param("own", [sys.executable, "-c", WATCHES], id="as on other systems"),
        pytest.param("other", ["sh", "-c", "echo ready; exec sleep 100"], marks=LINUX, id="another program"),
    ],
)
def test_a_child_ends_when_its_parent_is_killed(kind: str, command: list[str]) -> None:
    assert have_ended([child_of_killed(kind, *command)])


def test_a_process_that_the_user_started_goes_on() -> None:
    process = child_of_killed("unrelated", sys.executable, "-c", SLEEPS)
    try:
        assert not have_ended([process], within_s=2.0)
    finally:
        process.kill()


def test_a_parent_that_ended_before_the_child_could_watch_it() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    environment = {**os.environ, "EDGEFORMER_PARENT": str(ended.pid)}
    for program in (SLEEPS, WATCHES):
        assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=False).returncode == 1


def test_processes_are_started_in_one_place_only() -> None:
    starting = {"Popen", "run", "call", "check_call", "check_output", "fork", "system", "popen", "posix_spawn"}
    places = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and function.attr in starting:
                module = getattr(function.value, "id", "")
                places |= {path.relative_to(PACKAGE).as_posix()} if module in ("subprocess", "os") else set()
    # host: for 10 s at most; agent: alone on a machine; resident: a fork, which calls end_with_parent.
    assert places == {"system/child.py", "system/host.py", "machines/agent.py", "measurement/resident.py"}


def words_of(processes: Sequence[psutil.Process]) -> str:
    words = []
    for process in processes:
        with suppress(psutil.Error):
            words += process.cmdline()
    return " ".join(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "started"),
    [
        (["search", "tickets.csv", "--no-source", "--models", "small"], "edgeformer.training.plan.duration"),
        (["profile", "small", "--device", "host", "--artifact", "onnx-fp32"], "run_worker"),
        (["gate", "small", "--against", "small", "--device", "host", "--artifact", "onnx-fp32"], "run_worker"),
        (["export", "small", "--replace", "--onnx-only"], "run_worker"),
        pytest.param(["machines", "clean", "kitchen-pi"], "sleep 100", marks=LINUX),
        (["serve", "small", "--port", "0", "--json"], ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_nothing_is_left_of_a_killed_command(arguments, started, tmp_path, finished_run):
    shutil.copytree(finished_run, tmp_path / "artifacts" / "small")
    write_tickets(tmp_path / "tickets.csv")
    command, environment = [sys.executable, "-m", "edgeformer", *arguments], {**os.environ}
    environment["EDGEFORMER_SSH"] = "sh -c 'exec sleep 100' ssh"  # a machine that does not answer
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **streams) as process:  # type: ignore[call-overload]
        try:
            assert started or "url" in process.stdout.readline()
            deadline = time.monotonic() + 120
            while started not in words_of(children := psutil.Process(process.pid).children(recursive=True)):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.kill()
    assert have_ended(children)
