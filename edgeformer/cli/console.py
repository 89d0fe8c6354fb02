"""The one way to the terminal: whatever came from data is shown, never obeyed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from edgeformer.artifacts.units import visible


class Terminal(Console):
    """rich's console; control characters that a text brings along are shown as signs, rich's own still work.

    ``:b:`` in a text is no picture, as rich would have it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"emoji": False, **options})

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print a text as it is, but for control characters.

    Args:
        text: of any origin.
        err: on stderr.
        end: behind it.
    """
    typer.echo(visible(text) + end, nl=False, err=err)
    (sys.stderr if err else sys.stdout).flush()
