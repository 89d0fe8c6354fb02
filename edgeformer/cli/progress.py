"""Progress on stderr: a bar on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars
from rich.table import Column

from edgeformer.cli.console import Terminal, say
from edgeformer.formats.progress import Progress
from edgeformer.formats.units import format_duration

_LINE_EVERY_S = 15.0
_PER_S = ("samples_per_s", "rows_per_s")
_NAMES = {"samples_per_s": "samples/s", "rows_per_s": "rows/s", "lr": "lr", "loss": "loss", "p50_ms": "p50 ms"}


def show_progress() -> Progress:
    """A bar where stderr is a terminal, else lines."""
    return Bars() if sys.stderr.isatty() else Lines()


def _figures(fields: dict[str, float]) -> str:
    shown = []
    for name, value in fields.items():
        number = f"{value:.1e}" if name == "lr" else f"{value:,.0f}" if name in _PER_S else f"{value:.4g}"
        shown.append(f"{_NAMES.get(name, name)} {number}")
    return "  ".join(shown)


class Bars(Progress):
    """A rich progress bar with the figures of the work beside it."""

    def __init__(self) -> None:
        self._console = Terminal(stderr=True, highlight=False)
        self._bars: RichBars | None = None
        self._task: TaskID | None = None

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.finish()
        self._bars = RichBars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28 if self._console.width >= 120 else 6),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TextColumn("[cyan]{task.fields[figures]}", table_column=Column(overflow="fold")),  # wraps, is never cut
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=2,  # drawing competes with the work for the same few cores
        )
        self._task = self._bars.add_task(escape(description), total=total, unit=unit, figures="")
        self._bars.start()

    def advance(self, amount: int = 1, **fields: float) -> None:
        if self._bars is not None and self._task is not None:
            shown = {"figures": _figures(fields)} if fields else {}
            self._bars.update(self._task, advance=amount, **shown)  # type: ignore[arg-type]

    def finish(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def message(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)


class Lines(Progress):
    """A line at the start, every 15 seconds, and for messages."""

    def __init__(self) -> None:
        self._description, self._unit = "", ""
        self._total: int | None = None
        self._done, self._started, self._last = 0, 0.0, 0.0

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self._description, self._total, self._unit = description, total, unit
        self._done, self._started = 0, time.monotonic()
        self._last = self._started

    def advance(self, amount: int = 1, **fields: float) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._last < _LINE_EVERY_S:
            return
        self._last = now
        of_total = left = ""
        if self._total:
            of_total = f"/{self._total:,}"
            if self._done:
                left = f"  {format_duration((now - self._started) * (self._total - self._done) / self._done)} left"
        self.message(f"{self._description}: {self._done:,}{of_total} {self._unit}  {_figures(fields)}{left}")

    def finish(self) -> None:
        pass  # the last line stands

    def message(self, text: str) -> None:
        say(text, err=True)
