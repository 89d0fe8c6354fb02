"""Terminal output. Control characters in texts are printed as signs and never reach the terminal as commands."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from edgeformer.artifacts.units import visible


class Terminal(Console):
    """rich's console, which shows control characters of a text as signs; with ``emoji=False``, ``:b:`` is text."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
