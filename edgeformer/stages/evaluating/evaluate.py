"""evaluate: scores of artifacts on a labelled set or a text, with the time per sample as paper A defines it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeformer.backends.session import Session
from edgeformer.data.encoding import Encoded
from edgeformer.data.prepare import encode_file, prepare_test
from edgeformer.formats.data_config import DataConfig, TextConfig
from edgeformer.formats.progress import Progress, Silent
from edgeformer.formats.scores import EvaluationRow, merge_rows
from edgeformer.machine.host import cpu_name
from edgeformer.run import Location
from edgeformer.stages.evaluating.language import Texts, score_texts
from edgeformer.stages.evaluating.subject import Subject, open_subject
from edgeformer.tasks import task_named
from edgeformer.tasks.running import Calls, score_calls


@dataclass(frozen=True)
class EvaluateOptions:
    """What is scored, and on which rows; a language model takes fewer than ``batch`` where its logits grow large."""

    artifact: str | None = None
    split: str = "test"
    data: Path | None = None
    batch: int = 64
    cache: Path | None = None


def evaluate(location: Location, options: EvaluateOptions, progress: Progress | None = None) -> list[EvaluationRow]:
    """Score artifacts on the test split (or another set, or a file); also kept in the run's evaluation.json.

    One row per artifact; of a language model's own weights (``torch``) one more for each earlier exit.

    Raises:
        InputError: unknown artifact or split; unusable data.
        ArtifactError: a damaged bundle.
    """
    progress = progress or Silent()
    subject = open_subject(location)
    artifacts = subject.choose(options.artifact)
    if isinstance(subject.data, TextConfig):
        texts = Texts(subject, subject.data, options.split, options.data, options.cache)
        rows = [row for artifact in artifacts for row in score_texts(texts, artifact, options.batch, progress)]
    else:
        assert isinstance(subject.data, DataConfig)
        rows = _score_labelled(subject, subject.data, artifacts, options, progress)
    if location.run is not None and options.data is None:
        merge_rows(location.run, rows)
    return rows


def _score_labelled(
    subject: Subject, data: DataConfig, artifacts: Sequence[str], options: EvaluateOptions, progress: Progress
) -> list[EvaluationRow]:
    known: dict[int, Encoded] = {}
    split = data.split if options.split == "test" else options.split
    name = options.data.name if options.data else split
    rows = []
    for artifact in artifacts:
        own = subject.reading(artifact)
        if own.vocabulary not in known:
            known[own.vocabulary] = _rows(own, data, options)
        encoded = known[own.vocabulary]
        with own.open(artifact) as session:
            rows.append(_score(session, artifact, name, encoded, (own.pad, options.batch), progress))
    return rows


def _rows(subject: Subject, data: DataConfig, options: EvaluateOptions) -> Encoded:
    if options.data is not None:
        return encode_file(options.data, data.labels, subject.tokenizer, data.max_length)
    return prepare_test(data, subject.tokenizer, data.max_length, options.cache, options.split, subject.trained_on)


def _score(
    session: Session, artifact: str, split: str, encoded: Encoded, shape: tuple[int, int], progress: Progress
) -> EvaluationRow:
    pad, batch = shape
    task = task_named("classification")
    meter = task.meter()
    calls = Calls(task, encoded, pad, task.call_batches(encoded, batch, 0))
    progress.start(f"Scoring {artifact} on {split}", len(encoded), "rows")
    try:
        seconds = score_calls(session.run, calls, meter, advance=progress.advance)
    finally:
        progress.finish()
    (row,) = task.rows(artifact, split, meter.score())
    return row.model_copy(
        update={
            "ms_per_sample": 1000 * seconds / len(encoded),
            "batch": batch,
            "provider": session.provider,
            "host": cpu_name(),
        }
    )
