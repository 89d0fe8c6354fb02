"""JSON files of a study: scores of each finished run, times of graphs, and the table that is made of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.manifest import DataSummary, cautions
from edgeformer.artifacts.scores import Evaluation

TRAINING_REVISION = 1
"""Counted up when the same recipe on the same data trains to other weights: older results are no longer used."""


class ExportedSize(Frozen):
    """An exported artifact."""

    id: str
    precision: str
    role: str
    exit: int | None
    status: str
    reason: str | None = None
    size_bytes: int | None = None
    max_abs_error: float | None = None


class StudyRun(Frozen):
    """The scores of a finished run."""

    format_version: Literal[1] = 1
    key: str = Field(description="sha256 over recipe_sha256, the data's fingerprint, the revision and origins")
    recipe_sha256: str = Field(description="of the recipe as the study says it, without keys that decide nothing")
    revision: int = Field(description="TRAINING_REVISION of the code that trained it")
    alike: str = Field(description="sha256 over what decides how long a training row takes")
    task: str
    recipe: dict[str, Any] = Field(description="what differs from the defaults")
    run: str = Field(description="name of its folder")
    data: DataSummary
    data_notes: Annotated[tuple[str, ...], Field(strict=False)] = Field((), description="what was read, part by part")
    origins: dict[str, str] = Field({}, description="sha256 of tokenizer, source, teacher (a key, if it is a row)")
    tokenizer_fingerprint: str | None = None
    parameters: int
    loops: int
    steps: int
    epochs: int
    planned_steps: int = Field(description="of all epochs, had training not stopped early")
    best_epoch: int | None
    seconds: float = Field(description="wall time of training with validation")
    rows_per_s: float | None = Field(description="training alone")
    scoring_s: float = Field(0.0, description="wall time of exporting and scoring artifacts")
    overhead_s: float | None = Field(None, description="of the training's process beside `seconds`; None: was resumed")
    precision: str
    leaks: bool = False
    evaluation: Evaluation
    artifacts: Annotated[tuple[ExportedSize, ...], Field(strict=False)] = ()
    curve: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = Field((), description="from metrics.jsonl")
    versions: dict[str, str]
    code_version: str
    host: dict[str, Any]
    started: str
    finished: str | None


class TimedArtifact(Frozen):
    """Median times of one artifact, one per round; None: it could not be measured in that round."""

    run: str = Field(description="key of the run")
    artifact: str
    p50_ms: Annotated[tuple[float | None, ...], Field(strict=False)]
    stable: bool
    provider: str


class StudyTimes(Frozen):
    """Artifacts of several runs, measured in turns on one machine."""

    format_version: Literal[1] = 1
    key: str = Field(description="sha256 over runs, artifacts and shape")
    batch: int
    seq: int
    threads: int | None
    entries: Annotated[tuple[TimedArtifact, ...], Field(strict=False)]
    host: dict[str, Any]
    versions: dict[str, str]
    code_version: str
    started: str
    seconds: float


class Cell(Frozen):
    """A figure of one row over its seeds, and the published value."""

    mean: float | None = None
    sd: float | None = Field(None, description="of the sample (n − 1); None: one seed")
    n: int = 0
    values: Annotated[tuple[float, ...], Field(strict=False)] = Field((), description="of each seed, in order")
    low: float | None = Field(None, description="speedup: the least of all rounds")
    high: float | None = None
    published: float | None = None

    @property
    def difference(self) -> float | None:
        """Ours less the published value."""
        return None if self.mean is None or self.published is None else self.mean - self.published


NO_CELL = Cell()


class StudyRow(Frozen):
    """One line of a study's table."""

    run: str
    label: str
    at: str = Field(description="test set, precision, exit or threshold")
    group: str = ""
    cells: dict[str, Cell]
    source: str = Field("", description="of the published values")
    origin: str = Field(description="where its results are from")
    keys: Annotated[tuple[str, ...], Field(strict=False)] = ()
    missing: str | None = Field(None, description="why there are no figures of ours")
    leaks: bool = Field(False, description="the model sees the tokens that it predicts: the scores are void")
    synthetic: bool = Field(False, description="trained and tested on generated text")
    note: str = ""

    @property
    def remark(self) -> str:
        """Cautions, the reason for missing figures, and the note."""
        return "; ".join(part for part in (*cautions(self), self.missing or "", self.note) if part)

    def cell(self, name: str) -> Cell:
        """Return a figure; an empty cell where the row does not have it."""
        return self.cells.get(name, NO_CELL)


class Picked(Frozen):
    """The row that a recommendation names."""

    title: str
    row: int | None
    reason: str
    paper: str = ""


class StudyTable(Frozen):
    """table.json: all that a study shows."""

    format_version: Literal[1] = 1
    study: str
    title: str
    element: str
    protocol: str
    columns: Annotated[tuple[str, ...], Field(strict=False)]
    rows: Annotated[tuple[StudyRow, ...], Field(strict=False)]
    picks: Annotated[tuple[Picked, ...], Field(strict=False)] = ()
    data: dict[str, tuple[str, ...]] = Field({}, description="row → what was read, part by part")
    sets: dict[str, dict[str, int]] = Field({}, description="row → set → rows")
    minutes: float = Field(description="of training, all runs of the table")
    hosts: Annotated[tuple[str, ...], Field(strict=False)] = ()
    times: str = Field("", description="how times were measured")
    overrides: Annotated[tuple[str, ...], Field(strict=False)] = Field((), description="--set of earlier versions")
    only: Annotated[tuple[str, ...], Field(strict=False)] = Field((), description="--only of the command: its rows")
    seeds: Annotated[tuple[int, ...], Field(strict=False)] = Field((), description="--seeds of earlier versions")
    notes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    finding: str = Field("", description="what the figures say, in a paragraph")
