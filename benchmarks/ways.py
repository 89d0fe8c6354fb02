"""Compared ways, each a process that stays open and computes on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(threads: int, *, torch_alone: bool) -> dict[str, str]:
    """Of a process that computes with so many threads.

    OpenMP's threads are pinned, as ``edgeformer train`` pins them, where torch alone computes: unpinned ones may share
    a core. Elsewhere they must not be: pinning binds the main thread to its core, and the threads that ONNX Runtime or
    OpenVINO start from it would all inherit that one core.
    """
    thread_settings = {"OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true" if torch_alone else "false"}
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # of this package
    return {**thread_settings, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": python_path}


class Way:
    """A child process that answers each line of JSON by one.

    The first line of ``command`` is ``{"ready": …}`` or ``{"unavailable": why}``. ``reason`` says why the way cannot be
    measured; empty: it can. ``stack`` ends the process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], stack: ExitStack) -> None:
        self.name = name
        self._errors = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        self._process = stack.enter_context(
            subprocess.Popen(
                [*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env={**os.environ, **environment},
            )
        )  # fmt: skip
        stack.callback(self._process.terminate)
        answer = self._answer()
        self.reason = f"it ended: {self._last_words()}" if answer is None else answer.get("unavailable", "")

    def ask(self, request: object) -> Any:
        """Its answer. Raises SystemExit where the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(f"{self.name} ended: {self._last_words()}") from None
        python_path = self._answer()
        if python_path is None:
            raise SystemExit(f"{self.name} ended at {str(request)[:80]}: {self._last_words()}")
        return python_path

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}, without a word"


def serve(name: str, make: Callable[[], Callable[[Any], Any]]) -> None:
    """Answer requests in the child; whatever ``make`` raises makes the way unavailable."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print what they like
    try:
        answer = make()
    except Exception as error:  # report whatever is missing
        print(json.dumps({"unavailable": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    print(json.dumps({"ready": name}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
