"""Measuring workers for tests: a spec, a program in the worker's place, and its rows."""

import sys
from pathlib import Path

import pytest

from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.report import MeasureRules, Row
from edgeformer.bundle import Bundle
from edgeformer.measurement.artifact import MeasureJob, check_artifact, measure_artifact
from edgeformer.system import worker
from tests.runtimes.tiny_bundle import artifact_of

RULES = MeasureRules(warmup_min_s=0.01, warmup_max_s=0.3, min_s=0.02, max_s=0.5, idle_s=0.01, energy_s=0.01)


def make_spec(bundle: Path, **changes: object) -> MeasureJob:
    """Return a spec of the tiny bundle's artifact at two shapes."""
    files = check_artifact(Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx"))
    items = (("steady", 1, 8), ("steady", 2, 8))
    job = MeasureJob(files=files, provider="CPUExecutionProvider", threads=1, items=items, rules=RULES)
    return job.model_copy(update=changes)


class Recorder(Progress):
    def __init__(self) -> None:
        self.advanced = 0
        self.started: list[str] = []
        self.totals: list[int | None] = []
        self.messages: list[str] = []
        self.open = False

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.open = True
        self.started.append(description)
        self.totals.append(total)

    def advance(self, amount: int = 1, **fields: float) -> None:
        self.advanced += amount

    def finish(self) -> None:
        self.open = False

    def message(self, text: str) -> None:
        self.messages.append(text)


class Interrupting(Progress):
    def advance(self, amount: int = 1, **fields: float) -> None:
        raise KeyboardInterrupt


def run_as(monkeypatch: pytest.MonkeyPatch, bundle: Path, program: str, **changes: object) -> list[Row]:
    """Return the rows if the worker runs ``program`` instead of measuring."""
    monkeypatch.setattr(worker, "worker_command", lambda: [sys.executable, "-c", program])
    return measure_artifact(make_spec(bundle, **changes), Progress())


def reasons(rows: list[Row]) -> list[str]:
    assert all(row.latency_ms.status == row.memory_bytes.status == "unavailable" for row in rows)
    return [str(row.latency_ms.reason) for row in rows]


def states(rows: list[Row]) -> list[tuple[str, int, str]]:
    """Return phase, batch and status of every row."""
    return [(row.phase, row.batch, row.latency_ms.status) for row in rows]
