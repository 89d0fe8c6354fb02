"""Worker processes: one job in, messages out, each a JSON document on a line of its own.

Whatever is measured or listed may crash, hang, or take the runtime with it. In a worker process that becomes the
``reason`` of its last message. A worker runs one job, so that nothing else shares its memory and its threads.
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
from importlib import import_module
from typing import IO, Any, ClassVar, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.system.capability import exit_text

Send = Callable[[BaseModel], None]
"""Sends one message to the parent at once, so that a worker that dies afterwards has not lost it."""

_SIGKILL = -9
_EXIT_S = 10.0
_STDERR_TAIL_BYTES = 4096


class Job(Frozen):
    """What a worker does. The module that defines a subclass has the function that runs it in the worker.

    That function is ``work(document: bytes, send: Send)``; ``document`` is the job's JSON. It raises EdgeformerError if
    the job cannot be done.
    """

    name: ClassVar[str]
    """For messages: the ``measuring`` process."""

    threads: int = Field(description="of one operator; OpenMP's are pinned")
    gpu_uuid: str | None = Field(None, description="the only card that the worker sees; None: all cards")


class End(Frozen):
    """Last message of a job; the parent makes one up for a worker that sent none."""

    kind: Literal["end"] = "end"
    reason: str | None = Field(None, description="why the job could not be done")
    died: bool = Field(False, description="the worker exited without an End: another worker may continue")


def worker_command() -> list[str]:
    """Return the command of a worker: a new interpreter, never a fork, so that it shares nothing with this process."""
    return [sys.executable, "-c", "from edgeformer.measurement.worker import run_worker; run_worker()"]


def worker_environment(job: Job) -> dict[str, str]:
    """Return a worker's environment: OpenMP threads pinned (unpinned ones may share a core), one GPU visible.

    OpenMP settings of the user win.
    """
    pinned = {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": str(job.threads)}
    # On a Jetson the UUID is empty or has another form; CUDA would then see no card.
    uuid = job.gpu_uuid or ""
    visible = {"CUDA_VISIBLE_DEVICES": uuid} if uuid.startswith(("GPU-", "MIG-")) else {}
    return {**pinned, **os.environ, "PYTHONIOENCODING": "utf-8", **visible}


class WorkerClient:
    """Parent side of a running worker. Use :func:`start_worker`."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        stderr: IO[bytes],
        messages: TypeAdapter[Any],
        silence_s: float,
    ) -> None:
        self._name, self._process, self._stderr = name, process, stderr
        self._messages, self._silence_s = messages, silence_s
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        # A thread reads, because Windows cannot wait for a pipe with a time limit.
        threading.Thread(target=self._read_lines, daemon=True).start()

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:  # closed here: closing while this thread reads would block
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def send(self, line: str) -> None:
        """Write a line to the worker's stdin."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the worker died: receive() gives its exit code
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the next message.

        Returns:
            An End if the worker exits without one, is silent for too long, or writes anything but a message; it is then
            killed.
        """
        line, died = b"", False
        try:
            line = self._lines.get(timeout=self._silence_s) or b""
            if line:
                message = self._messages.validate_json(line, strict=False)
                if isinstance(message, End):  # time to exit in order
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(_EXIT_S)
                return message
            code = self._process.wait(_EXIT_S)
            hint = ", as the system does when memory runs out" if code == _SIGKILL else ""
            problem, died = f"ended early: {exit_text(code)}{hint}", True
        except subprocess.TimeoutExpired:
            problem = "closed its output without a result"
        except queue.Empty:
            problem = f"was silent for {self._silence_s:.0f} s and was ended"
        except ValidationError:
            problem = f"wrote something that is no message: {line[:80]!r}"
        self._process.kill()
        self._process.wait()
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _STDERR_TAIL_BYTES))
        lines = self._stderr.read().decode("utf-8", errors="replace").strip().splitlines()
        tail = f"; last line on stderr: {lines[-1].strip()[:300]}" if lines else ""
        return End(reason=f"the {self._name} process {problem}{tail}", died=died)


@contextlib.contextmanager
def start_worker(job: Job, messages: TypeAdapter[Any], silence_s: float) -> Iterator[WorkerClient]:
    """Start a worker and send it its job; it is killed at the end of the block.

    Args:
        job: what to do.
        messages: parses a line of the worker.
        silence_s: a worker that sends nothing for longer is killed.
    """
    command, pipe = [*worker_command(), type(job).__module__], subprocess.PIPE
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=worker_environment(job))
        try:
            client = WorkerClient(job.name, process, stderr, messages, silence_s)
            client.send(job.model_dump_json())
            yield client
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()


def run_job(job: Job, messages: TypeAdapter[Any], silence_s: float, take: Callable[[Any], None]) -> End:
    """Run a job in a worker until its End. An exception of ``take`` ends the worker at once.

    ``take`` is called with every message but the End, as it arrives; for the others see :func:`start_worker`.
    """
    with start_worker(job, messages, silence_s) as client:
        while not isinstance(message := client.receive(), End):
            take(message)
        return message


def run_worker() -> None:
    """Worker side: read a job from stdin, run it in the module of the last argument, send its messages and an End.

    An unexpected error ends in a traceback on stderr and exit code 1.
    """
    send, reason = claim_stdout(), None
    document = sys.stdin.buffer.readline()  # further lines are requests of a job that goes on
    try:
        import_module(sys.argv[-1]).work(document, send)
    except EdgeformerError as error:
        reason = str(error)
    send(End(reason=reason))


def claim_stdout() -> Send:
    """Reserve stdout for messages: what libraries print there, in Python or in C, goes to stderr from now on."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def send(message: BaseModel) -> None:
        channel.write(message.model_dump_json().encode() + b"\n")
        channel.flush()

    return send
