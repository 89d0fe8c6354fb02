"""The parent's side of a process of its own: start it, tell it its job as one JSON document, hear it line by line.

What is measured or listed may kill its process, hang, or take the runtime with it; here that is one sentence.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Generic, Literal, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from edgeformer.formats.base import Frozen
from edgeformer.machine.capability import exit_text

M = TypeVar("M", bound=BaseModel)

_KILLED = -9  # SIGKILL
_EXIT_S = 10.0
_LAST_WORDS_BYTES = 4096


class End(Frozen):
    """Every child's last message. ``reason``: why it could not do its job."""

    kind: Literal["end"] = "end"
    reason: str | None = None


@dataclass(frozen=True)
class Job(Generic[M]):
    """What a child is started for.

    Attributes:
        name: of the process, for messages: ``measuring``.
        answers: what it says, for messages: ``measurements``.
        spec: what it is told; its ``kind`` names the job (see :mod:`.child`).
        messages: parses a line of its answer.
        threads: of one operator; OpenMP's are pinned.
        silence_s: a child that says nothing for longer is ended.
        gpu_uuid: the one card that it sees; None: all there are.
    """

    name: str
    answers: str
    spec: BaseModel
    messages: TypeAdapter[M | End]
    threads: int
    silence_s: float
    gpu_uuid: str | None = None


@dataclass(frozen=True)
class Ending:
    """How a child ended. ``reason`` None: it did its job. ``died``: by itself, so that another one may go on."""

    reason: str | None
    died: bool = False


def child_command() -> list[str]:
    """How the process is started: anew, never forked, so that it shares nothing with this one."""
    return [sys.executable, "-m", "edgeformer.stages.profiling.child"]


def run_job(job: Job[M], take: Callable[[M], None]) -> Ending:
    """Run a child to its end, which comes at once when ``take`` raises.

    Args:
        job: what for.
        take: is given every message but the last, as it is heard.
    """
    with tempfile.TemporaryFile() as errors, _started(job, errors) as process:
        try:
            end = _hear(job, _lines(process), take)
            ending = _exit(job, process) if end is None else end
            if isinstance(ending, End):
                _wait(process)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if isinstance(ending, End):
            return Ending(ending.reason)
        return Ending(f"{ending.reason}{_last_words(errors)}", ending.died)


def child_environment(threads: int, gpu_uuid: str | None) -> dict[str, str]:
    """The child's environment: OpenMP threads pinned (unpinned ones may share a core), one known GPU.

    The user's own OpenMP settings are kept.

    Args:
        threads: of one operator.
        gpu_uuid: the card that the child sees; None: all there are.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_PROC_BIND", "true")
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment["PYTHONIOENCODING"] = "utf-8"
    if gpu_uuid is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu_uuid
    return environment


def _started(job: Job[M], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        child_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=child_environment(job.threads, job.gpu_uuid),
    )
    assert process.stdin is not None
    # A child that dies before it reads breaks the pipe; its exit code will say more than that.
    with contextlib.suppress(OSError):
        process.stdin.write(job.spec.model_dump_json().encode())
    with contextlib.suppress(OSError):
        process.stdin.close()
    return process


def _lines(process: subprocess.Popen[bytes]) -> queue.Queue[bytes | None]:
    """The child's lines, then None. A thread reads: Windows cannot wait for a pipe with a time limit."""
    lines: queue.Queue[bytes | None] = queue.Queue()
    stdout = process.stdout
    assert stdout is not None

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _hear(job: Job[M], lines: queue.Queue[bytes | None], take: Callable[[M], None]) -> End | Ending | None:
    """Take messages: until the last one, or until the child had to be given up; None: it closed its output."""
    while True:
        try:
            line = lines.get(timeout=job.silence_s)
        except queue.Empty:
            return Ending(f"the {job.name} process was silent for {job.silence_s:.0f} s and was ended")
        if line is None:
            return None
        try:
            message = job.messages.validate_json(line, strict=False)
        except ValidationError:
            return Ending(f"the {job.name} process wrote something else than {job.answers}: {line[:80]!r}")
        if isinstance(message, End):
            return message
        take(message)


def _exit(job: Job[M], process: subprocess.Popen[bytes]) -> Ending:
    """Why a child that closed its output without a last message ended."""
    _wait(process)
    code = process.poll()
    if code is None:
        return Ending(f"the {job.name} process closed its output without a result")
    hint = ", which is what a system does that runs out of memory" if code == _KILLED else ""
    return Ending(f"the {job.name} process ended early: {exit_text(code)}{hint}", died=True)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Let the child end by itself, but not take for ever."""
    deadline = time.monotonic() + _EXIT_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def _last_words(errors: IO[bytes]) -> str:
    """The last line that the child wrote to stderr."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _LAST_WORDS_BYTES))
    lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
    return f"; its last words: {lines[-1].strip()[:300]}" if lines else ""
