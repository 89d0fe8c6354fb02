"""Terminal output. Control characters in texts are printed as signs and never reach the terminal as commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from edgeformer.artifacts.units import visible


class Terminal(Console):
    """rich's console, which shows control characters of a text as signs; with ``emoji=False``, ``:b:`` is text."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print a text of any origin with control characters shown as signs; ``err``: on stderr."""
    typer.echo(visible(text) + end, nl=False, err=err)
    (sys.stderr if err else sys.stdout).flush()
