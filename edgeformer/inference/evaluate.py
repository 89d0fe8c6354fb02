"""Evaluate: score artifacts on a labelled set or a text, at every exit and with early exit, and time them.

An artifact is first scored and timed as it is deployed (timing as in paper A, Table 6). If it can answer at several
exits, a second pass records the answers of all exits. Scores of the exits and of early exit at any threshold are
computed from these records; that pass is not timed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.scores import EVALUATION_FILE, EarlyExitRow, Evaluation, EvaluationRow, merge_rows
from edgeformer.inference.predict import OpenableModel, select_candidates
from edgeformer.run import Location
from edgeformer.runtimes import ALL_RUNTIMES
from edgeformer.system.host import cpu_name
from edgeformer.system.lock import wait_for_lock
from edgeformer.tasks import Meter, Origin
from edgeformer.tasks.early_exit import SWEEP, ExitRecords, Rule
from edgeformer.tasks.metric import perplexity_of
from edgeformer.tasks.scoring import score_batches


@dataclass(frozen=True)
class EvaluateOptions:
    """Artifacts and labelled rows to score.

    Attributes:
        artifact: an id, ``torch`` or ``all``; None: all artifacts that run on this machine.
        split: ``test`` (the protocol's own), ``validation``, or a test set by name.
        data: a file to score on instead of a split.
        batch: rows per call; fewer where an engine takes fewer, or where logits would grow too large.
        threshold: a top probability for early exit at every exit, in addition to the sweep.
        text, label, pair: columns of ``data``; None: the names of the model's own data.
        runtime: a runtime, one of its providers, or ``all``; scores of a named runtime are not saved.
        encoding: of ``data``, e.g. cp1252; None: UTF-8.
    """

    artifact: str | None = None
    split: str = "test"
    data: Path | None = None
    batch: int = 64
    threshold: float | None = None
    text: str | None = None
    label: str | None = None
    pair: str | None = None
    runtime: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.data is None and (self.text or self.label or self.pair or self.encoding):
            raise InputError("--text, --label, --pair, --encoding: describe a file of rows; add --data FILE")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise InputError(f"--threshold {self.threshold}: must be a probability from 0 to 1")


def evaluate(location: Location, options: EvaluateOptions, progress: Progress = SILENT) -> Evaluation:
    """Score artifacts on the test split, another set, or a file, and save scores of a set in evaluation.json.

    Each artifact has one row. One with several exits has another row for each earlier exit, and early-exit rows.
    Raises InputError: unknown artifact or split, unusable data, a threshold without exits; ArtifactError.
    """
    candidates = select_candidates(location, options.artifact, options.runtime)
    if options.threshold is not None and not any(candidate.can_exit_early for candidate in candidates):
        task = candidates[0].owner.task
        why = f"a {task.noun} gives no single probability to compare; leave it out"
        if task.confidence is not None:
            why = f"only step artifacts do; write them with: {location.step_command}"
        raise InputError(f"--threshold: {', '.join(each.id for each in candidates)} cannot exit early; {why}")
    evaluator = Evaluator(options, progress)
    # evaluation.json has one row per artifact and set, so the scores of a named runtime are shown only.
    run_folder = location.run if options.data is None and options.runtime is None else None
    for candidate in candidates:
        saved_rows, saved_early = len(evaluator.rows), len(evaluator.early_exit)
        try:
            evaluator.score(candidate)
        except InputError as error:
            # Of all runtimes, some may lack what they need of this processor; what fails for all of them is an error.
            if options.runtime != ALL_RUNTIMES or (candidate is candidates[-1] and not evaluator.rows):
                raise
            progress.message(f"{candidate.id}: not scored: {error}")
        if run_folder is not None:  # saved after each artifact: the next one may fail or be interrupted
            with wait_for_lock(run_folder / EVALUATION_FILE):  # another process may add its rows to the same file
                merge_rows(run_folder, evaluator.rows[saved_rows:], evaluator.early_exit[saved_early:])
    return Evaluation(rows=tuple(evaluator.rows), early_exit=tuple(evaluator.early_exit))


@dataclass
class Evaluator:
    """Scores of artifacts on one set, which is read once per tokenizer."""

    options: EvaluateOptions
    progress: Progress
    rows: list[EvaluationRow] = field(default_factory=list)
    early_exit: list[EarlyExitRow] = field(default_factory=list)
    _sets: dict[tuple[int, bool], Any] = field(default_factory=dict)

    def score(self, candidate: OpenableModel) -> None:
        """Score an artifact: append its rows to ``rows`` and ``early_exit``."""
        owner, set_name = candidate.owner, self.set_name(candidate)
        task, provider = owner.task, None
        rows = self.labelled_rows(candidate)
        words = None if rows.truncated else getattr(rows, "words", None)  # truncated to the artifact's length
        if not candidate.answers_with_losses:
            meter = task.meter(candidate.exits[-1:], data=owner.data)
            timing = self._run(candidate, meter, every_exit=False)
            row = task.evaluation_rows(candidate.id, set_name, meter.score(words), leaks=owner.leaks)[0]
            earlier_exit = candidate.artifact.exit if candidate.artifact is not None else None
            self.rows.append(row.model_copy(update={**timing, "exit": earlier_exit}))
            provider = self.rows[-1].provider
            if len(candidate.exits) <= 1:
                return
        meter, records = self.record_exits(candidate)
        last, *earlier = task.evaluation_rows(candidate.id, set_name, meter.score(words), leaks=owner.leaks)
        if candidate.answers_with_losses:
            self.rows.append(last)
        else:
            last = last.model_copy(update={"provider": provider})
        for loop, score in meter.earlier().items():
            (row,) = task.evaluation_rows(candidate.id, set_name, score, leaks=owner.leaks)
            earlier.append(row.model_copy(update={"exit": loop, "provider": last.provider}))
        self.rows += earlier
        if not candidate.can_exit_early:
            return
        # The schedule of the task's paper (threshold None), the sweep and the requested threshold.
        exits, requested = records.exits, () if self.options.threshold is None else (self.options.threshold,)
        settings: list[tuple[Rule, float | None, dict[int, float]]] = []
        for rule in records.rules:
            if task.exit_schedule is not None and rule == "confidence":
                settings.append((rule, None, task.exit_schedule.thresholds(exits)))
            swept = sorted({*SWEEP, *requested})
            settings += [(rule, value, dict.fromkeys(exits[:-1], float(value))) for value in swept]
        for rule, value, thresholds in settings:
            outcome = records.leave(thresholds, rule)
            self.early_exit.append(
                EarlyExitRow(
                    **last.model_dump(include={"artifact", "provider", "split", "n", "leaks"}), rule=rule,
                    threshold=value, thresholds={str(loop): threshold for loop, threshold in thresholds.items()},
                    mean_loops=outcome.mean_loops, loss=outcome.loss, accuracy=outcome.right,
                    perplexity=perplexity_of(outcome.loss) if outcome.right is None else None, share=outcome.share,
                )
            )  # fmt: skip

    def record_exits(self, candidate: OpenableModel) -> tuple[Meter, ExitRecords]:
        """Run the set with answers at every exit; return the scores, and the early-exit records of each row."""
        records = ExitRecords(candidate.exits)
        meter = candidate.owner.task.meter(candidate.exits, records, candidate.owner.data)
        self._run(candidate, meter, every_exit=not candidate.answers_with_losses)
        return meter, records

    def _run(self, candidate: OpenableModel, meter: Meter, *, every_exit: bool) -> dict[str, Any]:
        """Add an artifact's answers to ``meter``; return the timing fields of its row."""
        rows, reader, task = self.labelled_rows(candidate), candidate.reader(), candidate.owner.task
        logits_per_row = reader.vocabulary * (len(candidate.exits) if every_exit else 1)
        losses = candidate.answers_with_losses
        max_rows = min(self.options.batch, candidate.max_rows or self.options.batch)
        batches = task.rows.call_batches(rows, max_rows, logits_per_row, losses=losses)
        title = f"Scoring {candidate.id} on {self.set_name(candidate)}" + (" at every exit" if every_exit else "")
        with bar(self.progress, title, len(rows), "rows"), candidate.session(every_exit=every_exit) as session:
            if candidate.artifact is None and (losses or not every_exit):  # once, though the set may be run twice
                self.progress.message(f"{candidate.id}: the weights of the run, computed by {session.provider}")
            inputs = (task.rows.batch(rows, numbers, reader.pad) for numbers in batches)
            warm_up = not (every_exit or losses)  # only a timed pass needs it
            seconds = score_batches(session.run, inputs, meter, warm_up=warm_up, advance=self.progress.advance)
            return {
                "ms_per_sample": 1000 * seconds / len(rows), "batch": max(map(len, batches)),
                "provider": session.provider, "host": cpu_name(),
            }  # fmt: skip

    def set_name(self, candidate: OpenableModel) -> str:
        """Return the name of the set: the file's, or the split's."""
        if self.options.data is not None:
            return self.options.data.name
        return candidate.owner.task.rows.set_name(candidate.owner.data, self.options.split)

    def labelled_rows(self, candidate: OpenableModel) -> Any:
        """Return the set as an artifact reads it: with its tokenizer, and packed as in training or row by row."""
        options, owner, reader = self.options, candidate.owner, candidate.reader()
        as_trained = candidate.answers_with_losses
        key = (reader.vocabulary, as_trained)
        if key in self._sets:
            return self._sets[key]
        if options.data is None:
            origin = Origin(owner.trained_on, as_trained)
            rows = owner.task.rows.read_set(owner.data, reader, options.split, origin)
        else:
            from edgeformer.data.sources import Columns  # scoring a split reads no files

            columns = Columns(options.text, options.pair, options.label, options.encoding)
            texts = owner.task.rows.file_texts(owner.data, options.data, columns)
            rows = owner.task.rows.encode_rows(owner.data, reader, texts, as_trained=as_trained)
            if empty := getattr(rows, "empty", 0):
                noun = "row" if empty == 1 else "rows"
                self.progress.message(f"{options.data}: left out {empty:,} {noun} without a text")
        self._sets[key] = rows
        return rows
