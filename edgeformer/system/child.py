"""Child processes that end with their parent, however the parent ends, ``kill -9`` included.

The exception: the measurement on another machine continues when the connection is lost (``machines/agent.py``).

On Linux the kernel kills the child, also while native code holds the interpreter's lock. Elsewhere a thread of the
child waits for the end of the parent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from edgeformer.artifacts.progress import Progress

_PARENT = "EDGEFORMER_PARENT"  # environment variable of a child: the process id of its parent
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_POLL_S = 0.5


def start(command: Sequence[str], *, is_edgeformer: bool = True, **options: Any) -> subprocess.Popen[Any]:
    """Start a child, with options of subprocess.Popen. Its stdin is empty unless the options say otherwise.

    On Linux the child ends with the thread that starts it: the thread must not end before the child.

    ``is_edgeformer``: the child calls :func:`end_with_parent` first. False: on Linux this file starts the program in
    its own place; on other systems only the end of its stdin can end it.
    """
    return subprocess.Popen(**_with_parent(command, is_edgeformer, options))


def run(command: Sequence[str], *, is_edgeformer: bool = True, **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a child to its end, with options of subprocess.run; other arguments as for :func:`start`."""
    return subprocess.run(**_with_parent(command, is_edgeformer, options))


def _with_parent(command: Sequence[str], is_edgeformer: bool, options: dict[str, Any]) -> dict[str, Any]:
    launcher = [] if is_edgeformer or sys.platform != "linux" else [sys.executable, "-I", "-S", __file__]
    env = {**(options.get("env", os.environ)), _PARENT: str(os.getpid())}
    return {"stdin": subprocess.DEVNULL, **options, "args": [*launcher, *command], "env": env}


class Outcome(NamedTuple):
    """What an edgeformer command printed: stdout, exit code, and the lines of stderr that are not progress."""

    output: str
    code: int
    errors: tuple[str, ...]

    @property
    def document(self) -> dict[str, Any]:
        """The document of ``--json``; empty if the command was killed before it printed one."""
        try:
            return dict(json.loads(self.output))
        except ValueError:
            return {}

    @property
    def problem(self) -> str:
        """Message of a command that failed."""
        return str(self.document.get("error") or "; ".join(self.errors[-3:]) or "no message")


def run_edgeformer(
    arguments: Sequence[str], progress: Progress, on_start: Callable[[subprocess.Popen[str]], object]
) -> Outcome:
    """Run an edgeformer command, whose progress becomes that of this one. After Ctrl-C, wait for its end."""
    from edgeformer.artifacts.progress import forward_event

    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = start(
            [sys.executable, "-m", "edgeformer", *arguments], stdout=output, stderr=subprocess.PIPE,
            env={**os.environ, "EDGEFORMER_PROGRESS": "json"}, encoding="utf-8", errors="replace",
        )  # fmt: skip
        on_start(process)
        assert process.stderr is not None
        with process.stderr as events:
            try:
                lines = [rest.strip() for line in events if (rest := forward_event(line, progress)) is not None]
                process.wait()
            except KeyboardInterrupt:
                process.communicate()
                raise
        output.seek(0)
        return Outcome(output.read(), process.returncode, tuple(lines))


def exit_text(code: int) -> str:
    """Return ``exit code 3`` or ``killed by signal 11 (SIGSEGV)``."""
    names = {int(number): f" ({number.name})" for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}{names.get(-code, '')}"


def end_with_parent(parent: int | None = None) -> None:
    """Let this process end when its parent ends: the caller of :func:`start`, if any, or after a fork ``parent``."""
    parent = parent or int(os.environ.pop(_PARENT, "0"))

    def wait_for_end() -> None:
        if sys.platform == "win32":
            import psutil

            with suppress(psutil.NoSuchProcess):
                psutil.Process(parent).wait()
        else:
            while os.getppid() == parent:  # an orphan has another parent at once
                time.sleep(_POLL_S)
        os._exit(1)

    if parent and not _is_killed_by_kernel():
        threading.Thread(target=wait_for_end, daemon=True).start()
    elif parent and os.getppid() != parent:  # it ended before the request
        os._exit(1)


def _is_killed_by_kernel() -> bool:
    """Request SIGKILL at the end of the parent. Returns whether this system can do it."""
    import ctypes

    try:
        prctl = ctypes.CDLL(None).prctl
        return sys.platform == "linux" and bool(prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL)) == 0)
    except (OSError, AttributeError):  # a system without a shared C library
        return False


if __name__ == "__main__":
    end_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
