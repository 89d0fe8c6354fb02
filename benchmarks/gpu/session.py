"""What all rows share: options, the card, and one JSON of figures that is written after every case and gone on with."""

from __future__ import annotations

import _thread
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.frame import ROOT
from edgeformer.artifacts.errors import InterruptedRun
from edgeformer.artifacts.files import write_json
from edgeformer.runtimes import library_versions
from edgeformer.system import nvidia
from edgeformer.system.host import code_version, describe_host, now

BROUGHT = ROOT / "benchmarks" / "gpu" / "brought"
DONE, FAILED, NO_CARD, UNFINISHED = 0, 1, 2, 3
"""Exit codes: every case is measured; one failed; nothing can be measured here; the time is up, and it can go on."""
CLOSED = "e793f47f"
"""Last commit with the scripts of closed rows."""
Figures = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """How a row is run."""

    dry_run: bool  # tiny sizes, on whatever computes here; its figures mean nothing and are never kept as results
    out: Path  # folder of results, a folder per card below it
    work: Path  # runs and bundles, which are gone on with
    data: Path | None  # the public data; None where nothing was brought
    minutes: float | None = None  # until the row stops; None: it does not
    again: bool = False  # measure what is known of this commit once more


@dataclass(frozen=True)
class Column:
    """A figure as a table shows it. ``key``: of a case's figures, parts of it between dots."""

    heading: str
    key: str
    format: str = "{}"


@dataclass(frozen=True)
class Row:
    """One question of the checklist."""

    number: int  # its place in the checklist, which is the order of worth
    topic: str  # of its file: DATE-TOPIC.json
    question: str
    wanted: str  # what would be a good answer
    measure: Callable[[Session], None] | None  # None: the row is closed, and its script is in commit CLOSED only
    columns: tuple[Column, ...]  # of the table that docs/results/gpu.md shows
    variants: Column | None = None  # the figure that it shows of cases "model, shape, variant", a column per variant


class Session:
    """One row at work: cases by name, each measured once for a commit.

    Raises SystemExit: there is no card, and it is no dry run.
    """

    def __init__(self, row: Row, options: Options) -> None:
        import torch

        if not (options.dry_run or torch.cuda.is_available()):
            print(f"{row.topic}: torch sees no CUDA card here; --dry-run tries it on the CPU", file=sys.stderr)
            raise SystemExit(NO_CARD)
        self.row, self.options, self.tiny = row, options, options.dry_run
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._ends = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        self._left: list[str] = []
        card = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        self.card = next((gpu for gpu in nvidia.gpus() if gpu.name == card), None)
        self.path, self.document = _file(row, options, card)

    @property
    def work(self) -> Path:
        """The row's own folder for runs and bundles."""
        return self.options.work / self.row.topic

    @property
    def cases(self) -> dict[str, Any]:
        """Name → what is known of it."""
        details: dict[str, Any] = self.document["cases"]
        return details

    @property
    def seconds_left(self) -> float:
        """Until this row must stop."""
        return float("inf") if self._ends is None else self._ends - time.monotonic()

    def figures(self, name: str) -> Figures | None:
        """Of a case that was measured; None: it was not, or failed."""
        details: Figures | None = self.cases.get(name, {}).get("figures")
        return details

    def case(self, name: str, measure: Callable[[], Figures]) -> Figures | None:
        """Measure a case that this commit does not know yet, and write it down; what fails is written down as well.

        Return its figures; None: it failed, or the time is up.
        """
        if (existing := self.figures(name)) is not None:
            return existing
        if self.seconds_left <= 0:
            self._left.append(name)
            return None
        began = time.monotonic()
        try:
            details: Figures = {"figures": measure()}
        except (KeyboardInterrupt, InterruptedRun):
            self._left.append(name)
            if self.seconds_left > 0:
                raise
            return None  # the time is up: the row still says what its other cases show
        except Exception as error:  # whatever it is: it is this case's answer, and the others go on
            details = {"failed": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        self.cases[name] = {**details, "seconds": round(time.monotonic() - began, 2), "card": self._state()}
        write_json(self.path, self.document)
        print(f"{name}: {_brief(self.cases[name])}", flush=True)
        return self.figures(name)

    def conclude(self, summary: Figures) -> None:
        """What the cases say together; later calls add to it."""
        self.document["summary"] = {**self.document["summary"], **summary}
        write_json(self.path, self.document)

    def end(self, *, cut: bool) -> int:
        """Write down whether all is measured. ``cut``: it was stopped in a case. Returns an exit code."""
        failed = [name for name, case in self.cases.items() if "failed" in case]
        self.document |= {"complete": not (cut or self._left or failed), "left": self._left, "ended": now()}
        write_json(self.path, self.document)
        print(f"{self.row.topic}: {'out of time' if cut or self._left else 'ended'}; {self.path}", flush=True)
        return UNFINISHED if cut or self._left else FAILED if failed else DONE

    def _state(self) -> Figures | None:
        """Clocks, temperature and what slowed the card down, as they are now; None without NVML."""
        details = nvidia.state(self.card.uuid) if self.card is not None else None
        keys = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_limit_w", "slowed_by")
        return None if details is None else {key: getattr(details, key) for key in keys}


def commit() -> str:
    """The version of the code: of the checkout, else of what was packed with it."""
    details, packed = code_version(), BROUGHT / "manifest.json"
    if "+" in details or not packed.is_file():
        return details
    return str(json.loads(packed.read_text(encoding="utf-8"))["commit"])


def known(row: Row, options: Options, folder: Path) -> Path | None:
    """The newest file of a row's figures at this very commit; None: there is none, or the checkout was changed."""
    version = commit()
    if options.again or version.endswith("-dirty"):
        return None
    for path in sorted(folder.glob(f"*-{row.topic}.json"), reverse=True):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["commit"] == version and document["dry_run"] == options.dry_run:
            return path
    return None


def folder_of(card: str, options: Options) -> Path:
    """Where a card's results lie: its name in small letters, or ``dry-run``."""
    name = "dry-run" if options.dry_run else re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return options.out / name


def _file(row: Row, options: Options, card: str) -> tuple[Path, dict[str, Any]]:
    folder = folder_of(card, options)
    if (path := known(row, options, folder)) is not None:
        document = json.loads(path.read_text(encoding="utf-8"))
        document["cases"] = {name: case for name, case in document["cases"].items() if "figures" in case}
        return path, document
    fresh = {"row": row.number, "topic": row.topic, "question": row.question, "wanted": row.wanted}
    fresh |= {"dry_run": options.dry_run, "gpu": card, "commit": commit(), "versions": versions()}
    fresh |= {"host": describe_host(), "began": now(), "complete": False, "cases": {}, "summary": {}}
    return folder / f"{now()[:10]}-{row.topic}.json", fresh


def versions() -> dict[str, str]:
    """Of Python, libraries, CUDA and the driver, as far as they are there."""
    import torch

    details = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": nvidia.driver_version()}
    return {**library_versions(), **{name: str(version) for name, version in details.items() if version is not None}}


def _brief(case: dict[str, Any]) -> str:
    if "failed" in case:
        return f"failed: {case['failed']}"
    displayed = [(key, value) for key, value in case["figures"].items() if isinstance(value, (int, float, str))]
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in displayed[:6]
    )


@contextmanager
def limited(minutes: float | None) -> Any:
    """End the block after so many minutes, as a signal would: trainings and studies save their state.

    From the main thread only, as signals are; None: no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    start = signal.signal(signal.SIGTERM, stop)
    timer = threading.Timer(60 * (minutes or 0), _thread.interrupt_main, (signal.SIGTERM,))
    timer.daemon = True
    if minutes is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, start)


def perform(row: Row, options: Options) -> int:
    """Do a row, as far as its time goes. Returns an exit code."""
    session = Session(row, options)
    cut = False
    try:
        with limited(options.minutes):
            if row.measure is not None:
                row.measure(session)
    except (KeyboardInterrupt, InterruptedRun):
        cut = True
    return session.end(cut=cut)
