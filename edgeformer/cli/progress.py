"""Progress on stderr: a bar on a terminal, plain lines in a pipe, JSON lines for a caller on another machine."""

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial

import typer
from rich.markup import escape
from rich.progress import BarColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars
from rich.table import Column
from rich.text import Text

from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.units import format_duration, visible
from edgeformer.cli.console import Terminal

_LINE_EVERY_S = 15.0
_PER_S = "_per_s"


def _figures(fields: dict[str, float]) -> str:
    parts = []
    for name, value in fields.items():
        is_rate = name.endswith(_PER_S)
        style = ".1e" if name == "lr" else ".4g" if not is_rate else ",.0f" if value >= 10 else ".2g"
        parts.append(f"{name.replace(_PER_S, '/s').replace('_', ' ')} {value:{style}}")
    return "  ".join(parts)


def _pop_left(fields: dict[str, float]) -> str:
    """Remove the remaining time of the whole work from the figures, and return its text, if the caller reports it."""
    left_s, most_left_s = fields.pop("left_s", None), fields.pop("most_left_s", None)
    if most_left_s is not None:
        return f"at most {format_duration(most_left_s)} left"
    return f"{format_duration(left_s)} left" if left_s is not None else ""


def _count(done: float, total: float | None, unit: str) -> str:
    """``3/12 shapes``; ``3 rounds`` without a total; empty if nothing is counted."""
    if not unit:
        return ""
    if total is not None:
        return f"{done:,.0f}/{total:,.0f} {unit}"
    return f"{done:,.0f} {unit.removesuffix('s') if done == 1 else unit}"


class _LeftColumn(TimeRemainingColumn):
    """Remaining time: of the whole work where the caller reports it, else of this bar."""

    def render(self, task: Task) -> Text:
        left = task.fields.get("left")
        return Text(left, style="progress.remaining") if left else super().render(task)


@dataclass(eq=False)
class Bars(Progress):
    """A rich progress bar with the figures of the work."""

    _console: Terminal = field(default_factory=partial(Terminal, emoji=False, stderr=True, highlight=False), init=False)
    _bars: RichBars | None = field(default=None, init=False)

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.finish()
        self._bars = RichBars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28 if self._console.width >= 120 else 6),
            TextColumn("{task.fields[count]}", "progress.download", table_column=Column(), markup=False),
            TextColumn("[cyan]{task.fields[figures]}", table_column=Column(overflow="fold")),  # wraps, is never cut
            _LeftColumn(),
            console=self._console,
            transient=True,
            refresh_per_second=2,  # drawing competes with the work for the same few cores
        )
        count = _count(0, total, unit)
        self._bars.add_task(escape(description), total=total, unit=unit, count=count, figures="")
        self._bars.start()

    def advance(self, amount: int = 1, **fields: float) -> None:
        if self._bars is not None:
            left = _pop_left(fields)
            (task,) = self._bars.tasks
            updates = {"count": _count(task.completed + amount, task.total, task.fields["unit"])}
            updates |= {"figures": _figures(fields)} if fields else {}
            updates |= {"left": left} if left else {}
            self._bars.update(task.id, advance=amount, **updates)  # type: ignore[arg-type]

    def finish(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def message(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)


@dataclass(eq=False)
class Lines(Progress):
    """A line every 15 seconds, even if the work does not advance, and one for each message."""

    _fields: dict[str, float] = field(default_factory=dict, init=False)
    _done: int = field(default=0, init=False)
    _advanced_s: float = field(default=0.0, init=False)  # time of the last advance
    _ended: threading.Event | None = field(default=None, init=False)

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.finish()
        self._done, self._fields = 0, {}
        ended = self._ended = threading.Event()

        def print_lines() -> None:
            started_s = time.monotonic()
            while not ended.wait(_LINE_EVERY_S):
                now_s, fields = time.monotonic(), dict(self._fields)
                left, elapsed = _pop_left(fields), f"{format_duration(now_s - started_s)} so far"
                if not left and total and self._done:
                    # While a unit takes longer than the others, the time left must not grow: only the rest is
                    # predictable.
                    unit_s, waited_s = (self._advanced_s - started_s) / self._done, now_s - self._advanced_s
                    at_least = "at least " if waited_s > unit_s else ""
                    left_s = unit_s * (total - self._done) - min(waited_s, unit_s)
                    left = f"{at_least}{format_duration(left_s)} left" if left_s > 0 else ""
                parts = [_count(self._done, total, unit), _figures(fields)] if self._done else []
                line = "  ".join(filter(None, [*parts, left if self._done and left else elapsed]))
                try:
                    self.message(f"{description}: {line}")
                except (OSError, ValueError):  # stderr is closed
                    return

        threading.Thread(target=print_lines, name="progress", daemon=True).start()

    def advance(self, amount: int = 1, **fields: float) -> None:
        self._done += amount
        self._advanced_s = time.monotonic()
        self._fields = fields or self._fields

    def finish(self) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def message(self, text: str) -> None:
        typer.echo(visible(text), err=True)


class Events(Progress):
    """A JSON line per call, which :func:`edgeformer.artifacts.progress.forward_event` replays."""

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self._print(event="start", description=description, total=total, unit=unit)

    def advance(self, amount: int = 1, **fields: float) -> None:
        self._print(event="advance", amount=amount, fields=fields)

    def finish(self) -> None:
        self._print(event="finish")

    def message(self, text: str) -> None:
        self._print(event="message", text=text)

    def _print(self, **event: object) -> None:
        sys.stderr.write(json.dumps(event) + "\n")
        sys.stderr.flush()
