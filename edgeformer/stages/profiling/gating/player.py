"""A process that holds one artifact open and times blocks of calls whenever it is asked, seen from outside."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import IO

from pydantic import ValidationError

from edgeformer.formats.errors import ArtifactError
from edgeformer.stages.profiling.gating.pacing import ANSWERS, Block, PaceSpec, Ready
from edgeformer.stages.profiling.process import End, child_command, child_environment, last_words, lines_of

_SILENCE_S = 120.0


class PlayerError(ArtifactError):
    """The process cannot open its artifact, or cannot go on; says why."""


def calls_of_block(call_ms: float, block_s: float, fewest: int) -> int:
    """Calls that take about ``block_s``, but at least ``fewest``; ``call_ms``: of one."""
    return max(fewest, ceil(block_s * 1000 / call_ms))


class Player:
    """A child that answers when it is asked. Each of its answers may be a PlayerError."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], silence_s: float) -> None:
        self._process, self._errors = process, errors
        self._lines = lines_of(process, silence_s)

    def ready(self) -> Ready:
        """Open and warm up."""
        self._ask("warm up")
        answer = self._answer()
        assert isinstance(answer, Ready)
        return answer

    def block(self, calls: int, untimed: int = 2) -> Block:
        """Time so many calls, after some ``untimed`` ones."""
        self._ask(f"{untimed} {calls}")
        answer = self._answer()
        assert isinstance(answer, Block)
        return answer

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a child that died breaks the pipe; what it last said tells more
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _answer(self) -> Ready | Block:
        try:
            line = next(self._lines, None)
            answer = ANSWERS.validate_json(line, strict=False) if line is not None else None
        except queue.Empty:
            raise PlayerError("its process was silent for too long and was ended") from None
        except ValidationError:
            raise PlayerError("its process wrote something else than times") from None
        if answer is None:
            self._process.wait(_SILENCE_S)
            raise PlayerError(f"its process ended early{last_words(self._errors)}")
        if isinstance(answer, End):
            raise PlayerError(answer.reason or "its process ended before it was asked to")
        return answer


@contextmanager
def player(spec: PaceSpec) -> Iterator[Player]:
    """A fresh process for the block's length, told what to open and not yet asked anything."""
    with tempfile.TemporaryFile() as errors, _started(spec, errors) as process:
        yield Player(process, errors, spec.measure.rules.warmup_max_s + _SILENCE_S)


@contextmanager
def _started(spec: PaceSpec, errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        child_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=child_environment(spec),
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(spec.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
