"""evaluate: scores of artifacts on a labelled set or a text, at every exit and with early exit, and their time.

An artifact is scored as it is deployed, timed as paper A defines it. One that can answer at several exits goes over the
set once more and answers at all of them: the time of all exits is nobody's. Early exit is computed from what that pass
noted, whatever the thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeformer.formats.errors import InputError
from edgeformer.formats.progress import SILENT, Progress, bar
from edgeformer.formats.scores import EVALUATION_FILE, EarlyExitRow, Evaluation, EvaluationRow, merge_rows
from edgeformer.machine.host import cpu_name
from edgeformer.machine.lock import in_turn
from edgeformer.run import Location
from edgeformer.stages.evaluating.choice import Choice, choose
from edgeformer.tasks import Meter, Origin, Task
from edgeformer.tasks.early_exit import SWEEP, ExitNotes, Rule
from edgeformer.tasks.running import score_batches


@dataclass(frozen=True)
class EvaluateOptions:
    """What is scored, and on which rows; fewer than ``batch`` at a time where an engine takes no more, or logits grow.

    Attributes:
        artifact: an id, ``torch`` or ``all``; None: the one that RUN names, else all of the bundle that run here.
        split: ``test`` (the protocol's own), ``validation``, or a test set by name.
        runtime: what ``--runtime`` names, whose scores are not kept; None: see :func:`choose`.
        data: a file to score on instead.
        batch: rows per call.
        cache: where encoded sets are kept; None: nowhere.
        text, label, pair: columns of ``data``, where they are not called as in the model's own data.
        encoding: of ``data``, e.g. cp1252; None: UTF-8.
        threshold: a top probability that lets a row or token leave at any exit, beside those of the sweep.
    """

    artifact: str | None = None
    split: str = "test"
    data: Path | None = None
    batch: int = 64
    cache: Path | None = None
    threshold: float | None = None
    text: str | None = None
    label: str | None = None
    pair: str | None = None
    runtime: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.data is None and (self.text or self.label or self.pair or self.encoding):
            raise InputError("--text, --label, --pair, --encoding: are of a file; give the file with --data FILE")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise InputError(f"--threshold {self.threshold}: a probability is in 0…1")


def evaluate(location: Location, options: EvaluateOptions, progress: Progress = SILENT) -> Evaluation:
    """Score artifacts on the test split (or another set, or a file); also kept in the run's evaluation.json.

    One row per artifact; of one that can answer at several exits (the run's own weights, a step artifact) one more for
    each earlier exit, and what comes of early exit.

    Args:
        location: the run, the bundle, or both.
        options: what, and on which rows.
        progress: is told of rows.

    Raises:
        InputError: unknown artifact or split; unusable data; a threshold for artifacts without exits.
        ArtifactError: a damaged bundle.
    """
    chosen = choose(location, options.artifact, options.runtime)
    if options.threshold is not None and not any(choice.leaves_early for choice in chosen):
        task, ids = chosen[0].owner.task, ", ".join(choice.id for choice in chosen)
        if not task.has_confidence:
            raise InputError(
                f"--threshold: {location.name} is a {task.noun}; its answers have no one probability to leave by"
            )
        hint = f"edgeformer export {location.argument} --exit all"
        raise InputError(f"--threshold: {ids} cannot leave early; step artifacts can: {hint}")
    scoring = Scoring(options, progress)
    # What a named runtime scores is shown and not kept: evaluation.json has one row for an artifact and a set.
    kept_in = location.run if options.data is None and options.runtime is None else None
    for choice in chosen:
        known, left = len(scoring.rows), len(scoring.early_exit)
        scoring.score(choice)
        if kept_in is not None:  # now: the next artifact may fail, or take longer than its user waits
            with in_turn(kept_in / EVALUATION_FILE):  # or what another process adds meanwhile would be lost
                merge_rows(kept_in, scoring.rows[known:], scoring.early_exit[left:])
    return Evaluation(rows=tuple(scoring.rows), early_exit=tuple(scoring.early_exit))


@dataclass
class Scoring:
    """One set, read once for each way of reading it, and the rows so far.

    Attributes:
        options: the set, and rows per call.
        progress: is told of rows.
        rows: scores so far.
        early_exit: the same of early exit.
    """

    options: EvaluateOptions
    progress: Progress
    rows: list[EvaluationRow] = field(default_factory=list)
    early_exit: list[EarlyExitRow] = field(default_factory=list)
    _sets: dict[tuple[int, bool], Any] = field(default_factory=dict)

    def score(self, choice: Choice) -> None:
        """Add the rows of an artifact."""
        task, name, texts = choice.owner.task, self.name(choice), self.texts(choice)
        if not choice.answers_with_losses:
            # What an artifact reads is cut to its length, whatever exit answers.
            meter = task.meter(choice.exits[-1:], data=choice.owner.data)
            timed = self._run(choice, meter, every_exit=False)
            (row, *_) = task.rows(choice.id, name, meter.score(task.words(texts, cut=True)), leaks=choice.owner.leaks)
            earlier = choice.artifact.exit if choice.artifact is not None else None
            self.rows.append(row.model_copy(update={**timed, "exit": earlier}))
        if choice.answers_with_losses or len(choice.exits) > 1:
            self._score_exits(choice, name, texts)

    def _score_exits(self, choice: Choice, name: str, texts: Any) -> None:
        task = choice.owner.task
        meter, notes = self.notes(choice)
        score = meter.score(task.words(texts, cut=True))
        last, *earlier = task.rows(choice.id, name, score, leaks=choice.owner.leaks)
        if choice.answers_with_losses:
            self.rows.append(last)
        else:  # the same session answered after the last loop
            last = last.model_copy(update={"provider": self.rows[-1].provider})
        for loop, found in meter.earlier().items():
            (row,) = task.rows(choice.id, name, found, leaks=choice.owner.leaks)
            earlier.append(row.model_copy(update={"exit": loop, "provider": last.provider}))
        self.rows += earlier
        if choice.leaves_early:
            self._leave_early(task, last, notes)

    def notes(self, choice: Choice) -> tuple[Meter, ExitNotes]:
        """What an artifact answers at each of its exits, added up, and noted row by row."""
        notes = ExitNotes(choice.exits)
        meter = choice.owner.task.meter(choice.exits, notes, choice.owner.data)
        self._run(choice, meter, every_exit=not choice.answers_with_losses)
        return meter, notes

    def _leave_early(self, task: Task, last: EvaluationRow, notes: ExitNotes) -> None:
        """With the paper's schedule where the task has one (threshold None), what was asked for, and the sweep."""
        schedule = task.exit_thresholds(notes.exits[:-1])
        asked = () if self.options.threshold is None else (self.options.threshold,)
        swept = {threshold: dict.fromkeys(notes.exits[:-1], threshold) for threshold in sorted({*SWEEP, *asked})}
        tried: list[tuple[Rule, float | None, Mapping[int, float]]] = []
        for rule in notes.rules:
            tried += [(rule, None, schedule)] if schedule is not None and rule == "confidence" else []
            tried += [(rule, threshold, thresholds) for threshold, thresholds in swept.items()]
        for rule, threshold, thresholds in tried:
            found = notes.leave(thresholds, rule)
            row = EarlyExitRow(
                artifact=last.artifact,
                provider=last.provider,
                split=last.split,
                n=last.n,
                rule=rule,
                threshold=threshold,
                thresholds={str(loop): value for loop, value in thresholds.items()},
                mean_loops=found.mean_loops,
                share=found.share,
                leaks=last.leaks,
                **task.departures(found),  # type: ignore[arg-type]
            )
            self.early_exit.append(row)

    def _run(self, choice: Choice, meter: Meter, *, every_exit: bool) -> dict[str, Any]:
        """Add an artifact's answers to ``meter``; what is known of the time that they took."""
        texts, reader, task = self.texts(choice), choice.reader(), choice.owner.task
        wide = len(choice.exits) if every_exit else 1
        losses = choice.answers_with_losses
        most = min(self.options.batch, choice.most_rows or self.options.batch)
        batches = task.call_batches(texts, most, reader.vocabulary * wide, losses=losses)
        what = f"Scoring {choice.id} on {self.name(choice)}" + (" at every exit" if every_exit else "")
        with bar(self.progress, what, len(texts), "rows"), choice.session(every_exit=every_exit) as session:
            if choice.artifact is None and (losses or not every_exit):  # it goes over the set once or twice
                self.progress.message(f"{choice.id}: the run's own weights are computed by {session.provider}")
            arrays = (task.batch(texts, numbers, reader.pad) for numbers in batches)
            warm_up = not (every_exit or losses)  # of those no time is told
            seconds = score_batches(session.run, arrays, meter, warm_up=warm_up, advance=self.progress.advance)
            about = {"batch": max(map(len, batches)), "provider": session.provider, "host": cpu_name()}
        return {"ms_per_sample": 1000 * seconds / len(texts), **about}

    def name(self, choice: Choice) -> str:
        """The set's own name."""
        data = self.options.data
        return data.name if data is not None else choice.owner.task.set_name(choice.owner.data, self.options.split)

    def _own_file(self, choice: Choice, file: Path) -> Any:
        from edgeformer.data.sources import Columns  # scoring a known set reads no files

        owner, asked = choice.owner, self.options
        columns = Columns(asked.text, asked.pair, asked.label, asked.encoding)
        rows = owner.task.read_file(owner.data, choice.reader(), file, columns, as_trained=choice.answers_with_losses)
        if empty := getattr(rows, "empty", 0):
            self.progress.message(f"{file}: {empty:,} {'row' if empty == 1 else 'rows'} without a text: left out")
        return rows

    def texts(self, choice: Choice) -> Any:
        """The rows as an artifact reads them: with its own tokenizer, and packed as in training or one by one."""
        reader, owner, as_trained = choice.reader(), choice.owner, choice.answers_with_losses
        key = (reader.vocabulary, as_trained)
        if key not in self._sets:
            if (file := self.options.data) is not None:
                self._sets[key] = self._own_file(choice, file)
            else:
                origin = Origin(self.options.cache, owner.trained_on, as_trained)
                self._sets[key] = owner.task.read_set(owner.data, reader, self.options.split, origin)
        return self._sets[key]
