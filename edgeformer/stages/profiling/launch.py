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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import IO

from edgeformer.backends import on_gpu
from edgeformer.formats.progress import Progress
from edgeformer.formats.report import Row
from edgeformer.machine.capability import exit_text
from edgeformer.stages.profiling.inputs import items_of
from edgeformer.stages.profiling.measure import MeasureRules
from edgeformer.stages.profiling.messages import (
    ChildSpec,
    Done,
    Failed,
    Item,
    Measured,
    Message,
    Refused,
    Started,
    parse_message,
    unavailable_row,
)
from edgeformer.stages.profiling.repeating import confirmed, item_of, stable_items

# On top of the loops' own bound: opening a large artifact, and a last slow call.
_ALLOWANCE_S = 120.0
_KILLED = -9  # SIGKILL


def child_command() -> list[str]:
    """How the measuring process is started."""
    return [sys.executable, "-m", "edgeformer.stages.profiling.child"]


def measure_in_child(spec: ChildSpec, longest_shape_s: float, progress: Progress) -> list[Row]:
    """Rows of one artifact, in the order of ``spec.shapes``; what could not be measured says why.

    Language models' step and decode artifacts get a row per decoded token (``phase: decode``) at every shape. Where a
    child dies, another one goes on behind the shape that killed it, until two in a row have died without an answer.
    What was stable is measured once more, for a third of the time, by a process of its own; see :mod:`.repeating`.

    Args:
        spec: what to measure.
        longest_shape_s: upper bound of one shape's loops; a child that says nothing for longer is ended.
        progress: advanced once per shape and phase, and once more where it is measured again.

    Raises:
        ArtifactError: the golden inputs are missing or damaged.
    """
    items, silence_s = items_of(spec), longest_shape_s + _ALLOWANCE_S
    progress.start(f"measuring {spec.artifact.id}", len(items), "shape")
    rows = _measure_items(spec, items, silence_s, progress)
    for row in rows:
        if row.latency_ms.status == "unavailable":
            what = "" if row.phase == "steady" else f", {row.phase}"
            reason = row.latency_ms.reason
            progress.message(f"{spec.artifact.id} at {row.batch}×{row.seq}{what}: not measured: {reason}")
    calm = stable_items(rows)
    if not calm:
        return rows
    rules = MeasureRules.from_fields(spec.rules)
    others = tuple(item for item in items if item not in calm)
    second = spec.model_copy(update={"rules": asdict(rules.repeated()), "answered": others})
    progress.start(f"measuring {spec.artifact.id} again", len(calm), "shape")
    again = {item_of(row): row for row in _measure_items(second, calm, silence_s, progress)}
    return [
        confirmed(row, again[item], rules.repeat_tolerance) if (item := item_of(row)) in calm else row for row in rows
    ]


def _measure_items(spec: ChildSpec, items: Sequence[Item], silence_s: float, progress: Progress) -> list[Row]:
    """Rows of ``items``, all that ``spec.answered`` leaves over, and a cold row; ends what the caller has started."""
    heard = _Heard()
    try:
        endings = _work_through(spec, items, silence_s, heard, progress)
    finally:
        progress.finish()
    rows: list[Row] = []
    for item in items:
        rows += heard.rows.get(item, [])
        if item not in heard.measured:
            reason = heard.refused.get(item) or heard.failed or endings[item]
            rows.append(_missing(spec, item, heard.provider or spec.provider or "none", reason))
    return rows


def _missing(spec: ChildSpec, item: Item, provider: str, reason: str) -> Row:
    phase, *shape = item
    row = unavailable_row(spec.artifact, spec.size_bytes, (shape[0], shape[1]), provider, "host", reason)
    return row.model_copy(update={"phase": phase, "threads": None if on_gpu(provider) else spec.threads})


@dataclass
class _Heard:
    """What the children have said so far. ``at``: what the present one is measuring."""

    rows: dict[Item, list[Row]] = field(default_factory=dict)
    measured: set[Item] = field(default_factory=set)
    refused: dict[Item, str] = field(default_factory=dict)
    failed: str | None = None
    provider: str | None = None
    at: Item | None = None
    done: bool = False

    def take(self, message: Message, progress: Progress) -> None:
        """Keep one message."""
        if isinstance(message, Started):
            self.provider = message.provider
            self.at = (message.phase, message.batch, message.seq)
        elif isinstance(message, Measured):
            self._keep(message.row, progress)
        elif isinstance(message, Refused):
            self.refused[message.phase, message.batch, message.seq] = message.reason
            progress.advance(1)
        elif isinstance(message, Failed):
            self.failed = message.reason
        else:
            self.done = True

    def _keep(self, row: Row, progress: Progress) -> None:
        if row.phase == "cold":
            # A child that goes on after another one has a first call, too; one such row is enough.
            if not any(kept.phase == "cold" for rows in self.rows.values() for kept in rows):
                self.rows.setdefault(self.at or ("steady", row.batch, row.seq), []).append(row)
            return
        item: Item = (row.phase, row.batch, row.seq)
        self.rows.setdefault(item, []).append(row)
        self.measured.add(item)
        progress.advance(1, p50_ms=row.latency_ms.p50 or 0.0)

    def answered(self) -> set[Item]:
        """Items that need no other child."""
        return self.measured | set(self.refused)


@dataclass(frozen=True)
class _Ending:
    """Why a child ended before it had answered everything. ``died``: by itself, so that another one may go on."""

    reason: str
    died: bool = False


def _work_through(
    spec: ChildSpec, items: Sequence[Item], silence_s: float, heard: _Heard, progress: Progress
) -> dict[Item, str]:
    """Run children until every item is answered or given up; returns why, for those that were given up."""
    lost: dict[Item, str] = {}
    barren = 0
    while True:
        before = heard.answered()
        skipped = (*spec.answered, *(item for item in items if item in before or item in lost))
        heard.at, heard.done = None, False
        ending = _listen(spec.model_copy(update={"answered": skipped}), silence_s, heard, progress)
        left = [item for item in items if item not in heard.answered() and item not in lost]
        barren = barren + 1 if heard.answered() == before else 0
        if not ending.died or heard.failed is not None or barren > 1:
            return {**lost, **dict.fromkeys(left, ending.reason)}
        if left:
            fatal = heard.at if heard.at is not None and heard.at in left else left[0]
            lost[fatal] = ending.reason
        if set(left) <= set(lost):
            return lost


def _listen(spec: ChildSpec, silence_s: float, heard: _Heard, progress: Progress) -> _Ending:
    """Run one child to its end; returns why it ended, for the items that it did not answer for."""
    with tempfile.TemporaryFile() as errors, _started(spec, errors) as process:
        lines = _reading(process)
        try:
            reason = _follow(lines, silence_s, heard, progress)
            ending = _Ending(reason) if reason is not None else _wait(process, heard)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        return replace(ending, reason=_with_last_words(ending.reason, errors))


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


def _wait(process: subprocess.Popen[bytes], heard: _Heard) -> _Ending:
    """Let the child end by itself, but not take for ever; why it ended, for items without an answer."""
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if heard.done:
        return _Ending("the measuring process did not measure this shape")
    code = process.poll()
    if code is None:
        return _Ending("the measuring process closed its output without a result")
    hint = ", which is what a system does that runs out of memory" if code == _KILLED else ""
    return _Ending(f"the measuring process ended early: {exit_text(code)}{hint}", died=True)


def _with_last_words(ending: str, errors: IO[bytes]) -> str:
    """The ending with the last line that the child wrote to stderr."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 4096))
    lines = errors.read().decode("utf-8", errors="replace").strip().splitlines()
    return f"{ending}; its last words: {lines[-1].strip()[:300]}" if lines else ending
