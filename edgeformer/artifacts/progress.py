"""Progress of long work: the command line draws it, libraries may ignore it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from typing import Any


class Progress:
    """One progress bar at a time, and lines of text. This class shows nothing. ``advance`` must be cheap."""

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        """Begin a bar of ``total`` units (None: unknown)."""

    def advance(self, amount: int = 1, **fields: float) -> None:
        """Advance the bar; ``fields`` are figures to show with it (loss, samples per second).

        The field ``left_s`` is not a figure to show: it is the remaining time of the whole work in seconds, if this bar
        is a part of it. ``most_left_s`` is the same for work that can end sooner, and is shown as an upper bound.
        Without either, the bar estimates its own remaining time.
        """

    def finish(self) -> None:
        """End the bar."""

    def message(self, text: str) -> None:
        """Print a line above the bar."""


SILENT = Progress()  # default for library use


@dataclass(eq=False)
class Lasting(Progress):
    """Wrapper of a progress whose output may be closed: printing errors do not end the work."""

    shown: Progress

    def _show(self, method: str, *arguments: Any, **fields: Any) -> None:
        try:
            getattr(self.shown, method)(*arguments, **fields)
        except (OSError, ValueError):  # a closed pipe, a terminal that is gone, a closed stream
            self.shown = SILENT

    start, advance = partialmethod(_show, "start"), partialmethod(_show, "advance")
    finish, message = partialmethod(_show, "finish"), partialmethod(_show, "message")


@contextmanager
def bar(progress: Progress, description: str, total: int | None, unit: str = "") -> Iterator[None]:
    """Show a bar until the block ends, also by an exception; arguments as for :meth:`Progress.start`."""
    progress.start(description, total, unit)
    try:
        yield
    finally:
        progress.finish()


def forward_event(line: str, progress: Progress) -> str | None:
    """Replay a line of a command that ran with ``EDGEFORMER_PROGRESS=json``; return the line if it is not progress."""
    try:
        event = json.loads(line)
        kind = event["event"]
    except (ValueError, KeyError, TypeError):
        return line if line.strip() else None
    if kind == "start":
        progress.start(event["description"], event["total"], event["unit"])
    elif kind == "advance":
        progress.advance(event["amount"], **event["fields"])
    elif kind == "finish":
        progress.finish()
    else:
        progress.message(event["text"])
    return None
