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
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from edgeformer.artifacts.base import Frozen
from edgeformer.system.capability import exit_text

Take = Callable[[Any], None]
"""Is given every message but the last."""

_KILLED = -9  # SIGKILL
_EXIT_S = 10.0
_LAST_WORDS_BYTES = 4096


class End(Frozen):
    """Every child's last message, and what the parent says in its place.

    ``reason``: why it could not do its job. ``died``: by itself, so that another one may go on.
    """

    kind: Literal["end"] = "end"
    reason: str | None = None
    died: bool = False


class Job(Frozen):
    """What a child is told; the ``kind`` of each names the job (see :mod:`.child`)."""

    name: ClassVar[str]
    """Of the process, for messages: ``measuring``."""
    answers: ClassVar[str]
    """What it says, for messages: ``measurements``."""

    threads: int = Field(description="of one operator; OpenMP's are pinned")
    gpu_uuid: str | None = Field(None, description="the one card that it sees; None: all there are")


def child_command() -> list[str]:
    """How the process is started: anew, never forked, so that it shares nothing with this one."""
    return [sys.executable, "-m", "edgeformer.benchmark.worker"]


def run_job(job: Job, messages: TypeAdapter[Any], silence_s: float, take: Take) -> End:
    """Run a child to its end, which comes at once when ``take`` raises.

    Args:
        job: what for.
        messages: parses a line of its answer.
        silence_s: a child that says nothing for longer is ended.
        take: is given every message but the last, as it is heard.
    """
    with tempfile.TemporaryFile() as errors, _started(job, errors) as process:
        try:
            heard = _hear(job, messages, silence_s, process, take)
            if not isinstance(heard, str):  # it ends by itself, but may not take for ever
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_EXIT_S)
            code = process.poll()
        finally:
            process.kill()
            process.wait()
        if isinstance(heard, End):
            return heard
        words = last_words(errors)
    if heard is None and code is not None:
        hint = ", which is what a system does that runs out of memory" if code == _KILLED else ""
        return End(reason=f"the {job.name} process ended early: {exit_text(code)}{hint}{words}", died=True)
    return End(reason=(heard or f"the {job.name} process closed its output without a result") + words)


def child_environment(job: Job) -> dict[str, str]:
    """The child's environment: OpenMP threads pinned (unpinned ones may share a core), one known GPU.

    The user's own OpenMP settings are kept.
    """
    pinned = {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": str(job.threads)}
    # An unknown UUID is empty or of another form (Jetson); CUDA would see no card at all.
    uuid = job.gpu_uuid or ""
    visible = {"CUDA_VISIBLE_DEVICES": uuid} if uuid.startswith(("GPU-", "MIG-")) else {}
    return {**pinned, **os.environ, "PYTHONIOENCODING": "utf-8", **visible}


def _started(job: Job, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        child_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=child_environment(job),
    )
    assert process.stdin is not None
    # A child that dies before it reads breaks the pipe; its exit code will say more than that.
    with contextlib.suppress(OSError):
        process.stdin.write(job.model_dump_json().encode())
    with contextlib.suppress(OSError):
        process.stdin.close()
    return process


def lines_of(process: subprocess.Popen[bytes], silence_s: float) -> Iterator[bytes]:
    """The child's lines; raises queue.Empty where it is silent for so long.

    A thread reads: Windows cannot wait for a pipe with a time limit.
    """
    lines: queue.Queue[bytes | None] = queue.Queue()
    stdout = process.stdout
    assert stdout is not None

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    yield from iter(partial(lines.get, timeout=silence_s), None)


def _hear(
    job: Job, messages: TypeAdapter[Any], silence_s: float, process: subprocess.Popen[bytes], take: Take
) -> End | str | None:
    """Take messages until the last one; or why the child had to be given up; None: it closed its output."""
    try:
        for line in lines_of(process, silence_s):
            message = messages.validate_json(line, strict=False)
            if isinstance(message, End):
                return message
            take(message)
    except queue.Empty:
        return f"the {job.name} process was silent for {silence_s:.0f} s and was ended"
    except ValidationError:
        return f"the {job.name} process wrote something else than {job.answers}: {line[:80]!r}"
    return None


def last_words(errors: IO[bytes]) -> str:
    """The last line that the child wrote to stderr."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _LAST_WORDS_BYTES))
    lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
    return f"; its last words: {lines[-1].strip()[:300]}" if lines else ""
