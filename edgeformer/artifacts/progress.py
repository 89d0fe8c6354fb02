"""How long work reports that it is under way; the command line draws it, libraries may ignore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any


class Progress:
    """One bar at a time, plus lines of text; this class shows nothing. ``advance`` must be cheap."""

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        """Begin a bar of ``total`` units (None: unknown)."""

    def advance(self, amount: int = 1, **fields: float) -> None:
        """Move the bar; ``fields`` are figures to show with it (loss, samples per second).

        The field ``left_s`` is no figure: it is how many seconds the whole work still takes, where this bar is a part
        of it. Without it the bar shows its own.
        """

    def finish(self) -> None:
        """End the bar."""

    def message(self, text: str) -> None:
        """Print a line above the bar."""


Silent = Progress
"""The default for library use, by the name that says what it shows."""
SILENT = Silent()


class Lasting(Progress):
    """Wrapper of a progress whose output may be closed: errors while printing do not end the work."""

    def __init__(self, progress: Progress) -> None:
        self._shown = progress

    def _show(self, method: str, *arguments: Any, **fields: Any) -> None:
        try:
            getattr(self._shown, method)(*arguments, **fields)
        except (OSError, ValueError):  # a closed pipe, a terminal that is gone, a closed stream
            self._shown = SILENT

    start, advance = partialmethod(_show, "start"), partialmethod(_show, "advance")
    finish, message = partialmethod(_show, "finish"), partialmethod(_show, "message")


@contextmanager
def bar(progress: Progress, description: str, total: int | None, unit: str = "") -> Iterator[None]:
    """A bar that ends with the block, however that ends; the arguments are those of :meth:`Progress.start`."""
    progress.start(description, total, unit)
    try:
        yield
    finally:
        progress.finish()
