"""The parent's side of a measurement: start a child, listen, and turn whatever happens to it into rows."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from edgeformer.runtime.child_probes import exit_text
from edgeformer.schema.progress import Progress
from edgeformer.schema.report import Row
from edgeformer.stages.profiling.messages import (
    ChildSpec,
    Done,
    Failed,
    Measured,
    Message,
    Refused,
    Shape,
    Started,
    parse_message,
    unavailable_row,
)

# On top of the loops' own bound: opening a large artifact, and a last slow call.
_ALLOWANCE_S = 120.0


def child_command() -> list[str]:
    """How the measuring process is started."""
    return [sys.executable, "-m", "edgeformer.stages.profiling.child"]


def measure_in_child(spec: ChildSpec, longest_shape_s: float, progress: Progress) -> list[Row]:
    """Rows of one artifact, in the order of ``spec.shapes``; what could not be measured says why.

    Args:
        spec: what to measure.
        longest_shape_s: upper bound of one shape's loops; a child that says nothing for longer is ended.
        progress: advanced once per shape.
    """
    heard = _Heard()
    progress.start(f"measuring {spec.artifact.id}", len(spec.shapes), "shape")
    try:
        ending = _listen(spec, longest_shape_s + _ALLOWANCE_S, heard, progress)
    finally:
        progress.finish()
    rows: list[Row] = []
    for shape in spec.shapes:
        rows += heard.rows.get(shape, [])
        if not any(row.phase == "steady" for row in heard.rows.get(shape, [])):
            reason = heard.refused.get(shape) or heard.failed or ending
            provider = heard.provider or spec.provider or "none"
            rows.append(unavailable_row(spec.artifact, spec.size_bytes, shape, provider, "host", reason))
            progress.message(f"{spec.artifact.id} at {shape[0]}×{shape[1]}: not measured: {reason}")
    return rows


@dataclass
class _Heard:
    """What the child has said so far."""

    rows: dict[Shape, list[Row]] = field(default_factory=dict)
    refused: dict[Shape, str] = field(default_factory=dict)
    failed: str | None = None
    provider: str | None = None
    done: bool = False

    def take(self, message: Message, progress: Progress) -> None:
        """Keep one message."""
        if isinstance(message, Started):
            self.provider = message.provider
        elif isinstance(message, Measured):
            row = message.row
            self.rows.setdefault((row.batch, row.seq), []).append(row)
            if row.phase == "steady":
                progress.advance(1, p50_ms=row.latency_ms.p50 or 0.0)
        elif isinstance(message, Refused):
            self.refused[message.batch, message.seq] = message.reason
            progress.advance(1)
        elif isinstance(message, Failed):
            self.failed = message.reason
        else:
            self.done = True


def _listen(spec: ChildSpec, silence_s: float, heard: _Heard, progress: Progress) -> str:
    """Run the child to its end; returns why it ended, for the shapes that it did not answer for."""
    with tempfile.TemporaryFile() as errors, _started(spec, errors) as process:
        lines = _reading(process)
        try:
            ending = _follow(lines, silence_s, heard, progress)
            if ending is None:
                ending = _wait(process, heard)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        return _with_last_words(ending, errors)


def _started(spec: ChildSpec, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        child_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=child_environment(spec.threads, spec.gpu_uuid),
    )
    assert process.stdin is not None
    # A child that dies before it reads breaks the pipe; its exit code will say more than that.
    with contextlib.suppress(OSError):
        process.stdin.write(spec.model_dump_json().encode())
    with contextlib.suppress(OSError):
        process.stdin.close()
    return process


def child_environment(threads: int, gpu_uuid: str | None) -> dict[str, str]:
    """The child's environment: OpenMP threads pinned (unpinned ones may share a core), one known GPU.

    The user's own OpenMP settings are kept. The child takes the pinning out of its environment again, for the
    processes that it might start.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_PROC_BIND", "true")
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment["PYTHONIOENCODING"] = "utf-8"
    if gpu_uuid is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu_uuid
    return environment


def _reading(process: subprocess.Popen[bytes]) -> queue.Queue[bytes | None]:
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


def _follow(lines: queue.Queue[bytes | None], silence_s: float, heard: _Heard, progress: Progress) -> str | None:
    """Take messages until the child closes its output; a reason when it had to be given up."""
    for line in _until_silent(lines, silence_s):
        if line is None:
            return None
        message = parse_message(line)
        if message is None:
            return f"the measuring process wrote something else than measurements: {line[:80]!r}"
        heard.take(message, progress)
        if isinstance(message, Done):
            return None
    return f"the measuring process was silent for {silence_s:.0f} s and was ended"


def _until_silent(lines: queue.Queue[bytes | None], silence_s: float) -> Iterator[bytes | None]:
    while True:
        try:
            yield lines.get(timeout=silence_s)
        except queue.Empty:
            return


def _wait(process: subprocess.Popen[bytes], heard: _Heard) -> str:
    """Let the child end by itself, but not take for ever; why it ended, for shapes without an answer."""
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if heard.done:
        return "the measuring process did not measure this shape"
    code = process.poll()
    if code is None:
        return "the measuring process closed its output without a result"
    return f"the measuring process ended early: {exit_text(code)}"


def _with_last_words(ending: str, errors: IO[bytes]) -> str:
    """The ending with the last line that the child wrote to stderr."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 4096))
    lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
    return f"{ending}; its last words: {lines[-1].strip()[:300]}" if lines else ending
