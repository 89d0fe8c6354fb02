"""Worker processes: one job in, messages out, each a line with the name of its type and a JSON document.

Whatever is measured or listed may crash, hang, or take the runtime with it. In a worker process that becomes the
``reason`` of its last message. A worker runs one job, so that nothing else shares its memory and its threads.
"""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

from pydantic import BaseModel, Field, ValidationError

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.system import child
from edgeformer.system.child import exit_text
from edgeformer.system.output import claim_stdout

Send = Callable[[BaseModel], None]
"""Sends one message to the parent at once, so that a worker that dies afterwards has not lost it."""

SILENCE_S = 600.0  # a worker that sends nothing for so long hangs, and is killed
_SIGKILL = -9
_EXIT_S = 10.0
_STDERR_TAIL_BYTES = 4096


class WorkerJob(Frozen):
    """What a worker does: it calls ``work(document: bytes, send: Send)`` of the module that defines the subclass.

    ``document`` is the job's JSON. ``work`` raises EdgeformerError if the job cannot be done.
    """

    name: ClassVar[str]  # for messages: the ``measuring`` process
    messages: ClassVar[tuple[type[BaseModel], ...]]  # what it sends before its End

    threads: int = Field(description="of one operator; OpenMP's are pinned")
    gpu_uuid: str | None = Field(None, description="the only card that the worker sees; None: all cards")


class End(Frozen):
    """Last message of a job; the parent makes one up for a worker that sent none."""

    reason: str | None = Field(None, description="why the job could not be done")
    died: bool = Field(False, description="the worker exited without an End: another worker may continue")


def worker_command() -> list[str]:
    """Return the command of a worker: a new interpreter, never a fork, so that it shares nothing with this process."""
    return [sys.executable, "-c", "from edgeformer.system.worker import run_worker; run_worker()"]


def worker_environment(job: WorkerJob) -> dict[str, str]:
    """Return a worker's environment: OpenMP threads pinned unless the user has set them, one GPU visible."""
    pinned = {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": str(job.threads)}
    # On a Jetson the UUID is empty or has another form; CUDA would then see no card.
    uuid = job.gpu_uuid or ""
    visible = {"CUDA_VISIBLE_DEVICES": uuid} if uuid.startswith(("GPU-", "MIG-")) else {}
    return {**pinned, **os.environ, "PYTHONIOENCODING": "utf-8", **visible}


class Worker:
    """A worker process that has been sent its job. :meth:`close` kills it."""

    def __init__(self, job: WorkerJob, silence_s: float = SILENCE_S) -> None:
        self._job, self._silence_s = job, silence_s
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        command, pipe = [*worker_command(), type(job).__module__], subprocess.PIPE
        self._process = child.start(command, stdin=pipe, stdout=pipe, stderr=self._stderr, env=worker_environment(job))
        self._lines: queue.Queue[bytes | None] = queue.Queue()

        def read_lines() -> None:
            assert self._process.stdout is not None
            with self._process.stdout as lines:  # closed here: closing while this thread reads would block
                for line in lines:
                    self._lines.put(line)
            self._lines.put(None)

        # A thread reads, because Windows cannot wait for a pipe with a time limit.
        threading.Thread(target=read_lines, daemon=True).start()
        self.send(job.model_dump_json())

    def send(self, line: str) -> None:
        """Write a line to the worker's stdin."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the worker died: receive() gives its exit code
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the next message, or an End if the worker exits without one, is silent, or writes something else."""
        line, died = b"", False
        types: dict[str, type[BaseModel]] = {"End": End, **{kind.__name__: kind for kind in self._job.messages}}
        try:
            line = self._lines.get(timeout=self._silence_s) or b""
            if line:
                name, _, document = line.decode().partition(" ")
                message = types[name].model_validate_json(document, strict=False)
                if isinstance(message, End):  # time to exit in order
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_EXIT_S)
                return message
            code = self._process.wait(_EXIT_S)
            hint = ", as happens when memory runs out" if code == _SIGKILL else ""
            problem, died = f"ended early: {exit_text(code)}{hint}", True
        except subprocess.TimeoutExpired:
            problem = "ended without a result"
        except queue.Empty:
            problem = f"gave no sign of life for {self._silence_s:.0f} s and was stopped"
        except (KeyError, UnicodeDecodeError, ValidationError):
            problem = f"wrote an unreadable message: {line[:80]!r}"
        self._process.kill()
        self._process.wait()
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL_BYTES))
        lines = self._stderr.read().decode("utf-8", errors="replace").strip().splitlines()
        tail = f"; last line on stderr: {lines[-1].strip()[:300]}" if lines else ""
        return End(reason=f"the {self._job.name} process {problem}{tail}", died=died)

    def close(self) -> None:
        """Kill the worker."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._stderr.close()


def run_job(job: WorkerJob, take: Callable[[Any], None], silence_s: float = SILENCE_S) -> End:
    """Run a job in a worker until its End; ``take`` is called with every other message as it arrives.

    An exception of ``take`` ends the worker at once.
    """
    with contextlib.closing(Worker(job, silence_s)) as worker:
        while not isinstance(message := worker.receive(), End):
            take(message)
        return message


def run_worker() -> None:
    """Worker side: read a job from stdin, run it in the module of the last argument, send its messages and an End.

    An unexpected error ends in a traceback on stderr and exit code 1.
    """
    child.end_with_parent()
    channel, reason = claim_stdout(), None

    def send(message: BaseModel) -> None:
        channel.write(f"{type(message).__name__} {message.model_dump_json()}\n".encode())
        channel.flush()

    document = sys.stdin.buffer.readline()  # further lines are requests of a job that goes on
    try:
        import_module(sys.argv[-1]).work(document, send)
    except EdgeformerError as error:
        reason = str(error)
    send(End(reason=reason))
