"""JSON files of a study: scores of each finished run, times of graphs, and the table that is made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from benchmarks.studies.jobs import TRAINING_REVISION, Job, decisive
from benchmarks.studies.paired import Paired
from benchmarks.studies.specification import Several
from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import DataSummary, cautions
from edgeformer.artifacts.scores import Evaluation
from edgeformer.artifacts.workspace import read_manifest

COMMITTED = Path(__file__).resolve().parents[1] / "results" / "studies"
TRAINED = "trained here"
"""Origin of results that were made in this folder of artifacts."""


class Kept(Frozen):
    """Base of what is read from files of this and of earlier versions, which have further keys."""

    model_config = ConfigDict(extra="ignore", from_attributes=True)


def machine_of(host: Mapping[str, Any]) -> str:
    """Return the processor or graphics card that a host's figures are of; earlier hosts do not name the card."""
    if str(host.get("accelerator")).startswith("cuda"):
        return str(host.get("gpu", "graphics card not recorded"))
    return str(host.get("cpu"))


class ExportedSize(Kept):
    """An exported artifact."""

    id: str
    precision: str
    role: str
    exit: int | None
    status: str
    reason: str | None = None
    size_bytes: int | None = None


class StudyRun(Kept):
    """The scores of a finished run."""

    format_version: Literal[1] = 1
    key: str = Field(description="sha256 over recipe_sha256, the data's fingerprint, the revision and origins")
    recipe_sha256: str = Field(description="of the recipe as the study says it, without keys that decide nothing")
    revision: int = Field(description="TRAINING_REVISION of the code that trained it")
    task: str
    recipe: dict[str, Any] = Field(description="what differs from the defaults")
    run: str = Field(description="name of its folder")
    data: DataSummary
    data_notes: Several[str] = Field((), description="what was read, part by part")
    origins: dict[str, str] = Field({}, description="sha256 of tokenizer, source, teacher (a key, if it is a row)")
    parameters: int
    loops: int
    steps: int
    epochs: int
    best_epoch: int | None
    seconds: float = Field(description="wall time of training with validation")
    precision: str
    leaks: bool = False
    evaluation: Evaluation
    artifacts: Several[ExportedSize] = ()
    curve: Several[dict[str, Any]] = Field((), description="from metrics.jsonl")
    right: dict[str, str] = Field(
        {}, description="test set → which rows the run's own weights answer right, as packed by paired.py"
    )
    versions: dict[str, str]
    code_version: str
    host: dict[str, Any]
    started: str
    finished: str | None
    origin: str = Field("", exclude=True, description="where these results were read; not in the file")

    def graph(self, precision: str, exit_: int | None = None) -> ExportedSize | None:
        """Return the graph of the whole model, or of one of its exits; None: it was not exported."""
        for artifact in self.artifacts:
            if artifact.precision == precision and (
                artifact.role == "full" if exit_ is None else (artifact.role, artifact.exit) == ("exit", exit_)
            ):
                return artifact
        return None


class TimedArtifact(Frozen):
    """Median times of one artifact, one per round; None: it could not be measured in that round."""

    run: str = Field(description="key of the run")
    artifact: str
    p50_ms: Several[float | None]
    stable: bool
    provider: str


class StudyTimes(Frozen):
    """Artifacts of several runs, measured in turns on one machine."""

    format_version: Literal[1] = 1
    key: str = Field(description="sha256 over runs, artifacts and shape")
    batch: int
    seq: int
    threads: int | None
    entries: Several[TimedArtifact]
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
    values: Several[float] = Field((), description="of each seed, in order")
    low: float | None = Field(None, description="speedup: the least of all rounds")
    high: float | None = None
    published: float | None = None

    @property
    def difference(self) -> float | None:
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
    keys: Several[str] = ()
    missing: str | None = Field(None, description="why there are no figures of ours")
    leaks: bool = Field(False, description="the model sees the tokens that it predicts: the scores are void")
    synthetic: bool = Field(False, description="trained and tested on generated text")
    note: str = ""

    @property
    def remark(self) -> str:
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


class StudyTable(Kept):
    """table.json: all that a study shows."""

    format_version: Literal[1] = 1
    study: str
    title: str
    element: str
    protocol: str
    kind: str = Field("tests", description="what the rows of a run are: TableSpec.rows")
    columns: Several[str]
    rows: Several[StudyRow]
    picks: Several[Picked] = ()
    data: dict[str, Several[str]] = Field({}, description="row → what was read, part by part")
    minutes: float = Field(description="of training, all runs of the table")
    hosts: Several[str] = ()
    times: str = Field("", description="how times were measured")
    notes: Several[str] = ()
    finding: str = Field("", description="what the figures say, in a paragraph")
    pairs: Several[Paired] = ()


@dataclass(frozen=True)
class Outcome:
    """The results of one job."""

    job: Job
    run: StudyRun | None
    reason: str = ""  # why there are none, or why some are missing
    state: str = "done"  # before training: done, to score, resumable, missing or unavailable


class Results:
    """Results of finished runs by key: files in a folder of artifacts, and the committed ones."""

    def __init__(self, artifacts: Path, *, committed: bool = True) -> None:
        self.folder = artifacts / "studies" / "runs"
        self._committed = kept_documents() if committed else {}

    def find(self, job: Job) -> StudyRun | None:
        """Return the results of the same recipe, data and revision; of two files the one with most scores.

        Where the job's data cannot be read, results of any data count, unless there is an :meth:`ambiguity`.
        """
        if job.key is not None:
            path = self.folder / f"{job.key}.json"
            matches = [read_manifest(StudyRun, path).model_copy(update={"origin": TRAINED})] if path.is_file() else []
            matches += [_committed_run(job.key)] if job.key in self._committed else []
        else:
            matches = [run for run in self._runs(job) if run.recipe_sha256 == job.sha256 and not self.ambiguity(job)]

        def richness(run: StudyRun) -> tuple[int, int, int]:
            built = sum(artifact.status == "built" for artifact in run.artifacts)
            return built, len(run.artifacts), len(run.evaluation.rows) + len(run.evaluation.early_exit)

        return max(matches, key=richness, default=None)

    def _runs(self, job: Job) -> list[StudyRun]:
        """Return all results that may be of the job's data."""
        fingerprint = job.summary.fingerprint if job.summary is not None else None
        runs = [*runs_in(self.folder), *(_committed_run(name) for name in self._committed if _is_run(name))]
        return [
            run for run in runs
            if run.revision == TRAINING_REVISION and fingerprint in (None, run.data.fingerprint)
        ]  # fmt: skip

    def ambiguity(self, job: Job) -> str:
        """Return why no results are used of a job whose data cannot be read; empty: all there are read the same."""
        data = decisive(job.written)["data"]
        same = {run.data.fingerprint: run for run in self._runs(job) if run.recipe.get("data") == data}
        return _different_data([(run.data, run.origin) for run in same.values()]) if len(same) > 1 else ""

    def keep(self, run: StudyRun) -> StudyRun:
        """Write results."""
        write_json(self.folder / f"{run.key}.json", run)
        runs_in.cache_clear()
        return run

    def with_data(self, job: Job) -> Job:
        """Return the job with what its data is: kept, where it can be read here; else as all earlier counts agree."""
        name = f"data-{job.sha256}-"
        if job.summary is not None:
            path = self.folder / f"{name}{job.summary.fingerprint[:16]}.json"
            write_json(path, job.summary.model_copy(update={"findings": ()}))
            return job
        counted = [read_manifest(DataSummary, path) for path in sorted(self.folder.glob(f"{name}*.json"))]
        counted += [
            DataSummary.model_validate(document, strict=False)
            for key, document in self._committed.items()
            if key.startswith(name)
        ]
        summaries = {summary.fingerprint: summary for summary in counted}
        if len(summaries) > 1:
            return replace(job, reason=_different_data([(summary, "counted") for summary in summaries.values()]))
        return replace(job, summary=next(iter(summaries.values()), None))

    def times(self, key: str) -> StudyTimes | None:
        """Return times by their key. Raises ArtifactError for a damaged file."""
        path = self.folder / f"times-{key}.json"
        if path.is_file():
            return read_manifest(StudyTimes, path)
        document = self._committed.get(path.stem)
        return StudyTimes.model_validate(document, strict=False) if document is not None else None

    def commit(self, table: StudyTable, folder: Path = COMMITTED) -> None:
        """Put a table, and the results of its runs that are not committed yet, among the committed results."""
        known, keys = kept_documents(folder), {key for row in table.rows for key in row.keys}
        lines = []
        for path in sorted(self.folder.glob("*.json")):
            document = json.loads(path.read_text(encoding="utf-8"))
            runs = {entry["run"] for entry in document["entries"]} if path.stem.startswith("times-") else {path.stem}
            if path.stem not in known and runs <= keys:
                lines.append(json.dumps({"name": path.stem, **document}, ensure_ascii=False) + "\n")
        write_json(folder / f"{table.study}.json", table)
        (folder / "runs").mkdir(exist_ok=True)
        if lines:
            with (folder / "runs" / f"{table.study}.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(lines)
        kept_documents.cache_clear()


def _different_data(summaries: Sequence[tuple[DataSummary, str]]) -> str:
    texts = (f"{data.fingerprint[:8]} with {sum(data.rows.values()):,} rows ({origin})" for data, origin in summaries)
    return f"there are results of different data: {', '.join(texts)}; choose with --data, or move the others"


def _is_run(name: str) -> bool:
    return not name.startswith(("times-", "data-"))


@cache
def kept_documents(folder: Path = COMMITTED) -> dict[str, dict[str, Any]]:
    """Return the committed results of single runs, times and data by name: lines of runs/*.jsonl, a file per study."""
    paths = sorted((folder / "runs").glob("*.jsonl"))
    documents = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return {document.pop("name"): document for document in documents}


@cache
def _committed_run(key: str) -> StudyRun:
    return StudyRun.model_validate({**kept_documents()[key], "origin": "results in studies"}, strict=False)


@cache
def runs_in(folder: Path) -> tuple[StudyRun, ...]:
    """Return the results of single runs in a folder of artifacts."""
    runs = []
    for path in sorted(folder.glob("*.json")):
        if _is_run(path.name):
            with suppress(ArtifactError):  # of another version; Results.find reports a damaged file by its key
                runs.append(read_manifest(StudyRun, path).model_copy(update={"origin": TRAINED}))
    return tuple(runs)
