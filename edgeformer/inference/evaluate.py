"""What can be scored: an artifact of a bundle, or the run's own weights in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.scores import EVALUATION_FILE, EarlyExitRow, Evaluation, EvaluationRow, merge_rows
from edgeformer.bundle import Bundle
from edgeformer.checkpoint_session import computed_by
from edgeformer.run import TORCH, Location, Run
from edgeformer.runtime_preference import fastest_here
from edgeformer.runtimes import ALL_RUNTIMES, OpenOptions, providers_asked
from edgeformer.runtimes.session import Session
from edgeformer.system.host import cpu_name
from edgeformer.system.lock import in_turn
from edgeformer.tasks import Meter, Origin, Task, TextReader
from edgeformer.tasks.early_exit import SWEEP, ExitNotes, Rule
from edgeformer.tasks.scoring import most_rows, score_batches

_WHOLE_TEXTS = ("full", "exit", "step")
"""Roles of what can be scored: not the graphs with caches, which take a text token by token."""


ONE_ANSWERS = f"--runtime {ALL_RUNTIMES}: one of them answers; name it"
"""Why not all of them are taken for what one session does."""


@dataclass(frozen=True)
class Choice:
    """One of them; nothing is opened yet.

    Attributes:
        owner: the bundle, or the run.
        artifact: of the bundle; None: the run's own weights.
        provider: what shall compute it; None: its format's runtime decides, or for a run's weights torch.
    """

    owner: Bundle | Run
    artifact: ArtifactManifest | None = None
    provider: str | None = None

    @property
    def id(self) -> str:
        """The artifact's, or ``torch``."""
        return TORCH if self.artifact is None else self.artifact.id

    @property
    def exits(self) -> tuple[int, ...]:
        """Loops that it can answer after, the last one last; empty: it has one answer, after whatever loop."""
        if isinstance(self.owner, Run):
            return self.owner.exits
        return self.owner.exits(self._entry)

    @property
    def answers_with_losses(self) -> bool:
        """It answers with the losses of all exits at once: their logits would not fit."""
        return isinstance(self.owner, Run) and self.owner.answers_with_losses

    @property
    def leaves_early(self) -> bool:
        """What it answers at several exits says how sure it is, so that a row or token could leave at any of them."""
        return len(self.exits) > 1 and self.owner.task.has_confidence

    @property
    def most_rows(self) -> int | None:
        """Rows that one call takes; None: any number."""
        return most_rows(self.artifact) if self.artifact is not None else None

    @property
    def heeds_neighbours(self) -> bool:
        """INT8 scales activations by the whole call: what a text answers depends on those beside it, and on padding.

        So what is promised of early exit is shown by single texts, and holds for single texts.
        """
        return self.artifact is not None and self.artifact.precision == "int8"

    def reader(self) -> TextReader:
        """How it reads text. Raises ArtifactError or DataError."""
        return self.owner.reader() if isinstance(self.owner, Run) else self.owner.reader(self._entry)

    def session(self, *, every_exit: bool = False, early: Mapping[int, float] | None = None) -> Session:
        """Open it.

        Args:
            every_exit: to answer after each of ``exits``.
            early: to let rows leave when it is sure of them.

        Raises:
            InputError: rows cannot leave it early.
            ArtifactError: a file is missing, changed or not runnable.
            MissingDependencyError: what it needs is not installed.
        """
        if not isinstance(self.owner, Run):
            exits = self.exits if every_exit else ()
            return self.owner.session(self._entry, OpenOptions(self.provider, early=early, exits=exits))
        if early is not None:
            raise InputError(f"--confidence: needs a step artifact of a bundle, not {TORCH}")
        return self.owner.session(every_exit=every_exit, provider=self.provider)

    @property
    def _entry(self) -> ArtifactManifest:
        assert self.artifact is not None
        return self.artifact


def choose(location: Location, wanted: str | None, runtime: str | None = None) -> list[Choice]:
    """What ``--artifact ID|all`` stands for; None: the one that RUN names, else all of the bundle that run here.

    Args:
        location: the run, the bundle, or both.
        wanted: an artifact's id, ``torch`` or ``all``.
        runtime: what ``--runtime`` names: a choice for each of its providers; None: what a search found fastest here.

    Raises:
        InputError: no such artifact, or a runtime that opens none of them.
        ArtifactError: none at all, or a damaged run or bundle.
    """
    chosen = _artifacts(location, wanted)
    if runtime is None:
        known = fastest_here(location) if location.bundle is not None else {}
        return [replace(one, provider=known.get(one.id)) for one in chosen]
    found = [replace(one, provider=provider) for one in chosen for provider in _asked(one, runtime)]
    if not found:
        raise InputError(f"--runtime {runtime}: opens none of {', '.join(one.id for one in chosen)}")
    return found


def _asked(one: Choice, runtime: str) -> tuple[str, ...]:
    """Providers of a named runtime that compute it; empty: none. Raises InputError: no such runtime."""
    if one.artifact is not None:
        return providers_asked(one.artifact, runtime)
    return (runtime,) if computed_by(runtime) else ()


def _artifacts(location: Location, wanted: str | None) -> list[Choice]:
    bundle = location.open_bundle() if location.bundle is not None else None
    built = [Choice(bundle, artifact) for artifact in bundle.built(*_WHOLE_TEXTS)] if bundle is not None else []
    ids = [*(choice.id for choice in built), *([TORCH] if location.run is not None else [])]
    if not ids:
        entries = bundle.artifacts if bundle is not None else ()
        why = "; ".join(f"{entry.id} {entry.status}: {entry.reason}" for entry in entries)
        raise ArtifactError(f"{location.name}: the bundle holds no usable artifact ({why})")
    if wanted is None and location.artifact is None:
        here = [one for one in built if one.artifact is not None and bundle and bundle.cannot_run(one.artifact) is None]
        if here:
            return here
    name = wanted or location.artifact or "all"
    if name not in (*ids, "all"):
        raise InputError(f"--artifact {name}: {location.name} has {', '.join(ids)}, or all")
    own = [Choice(location.open_run())] if TORCH in ids and name in (TORCH, "all") else []
    return [one for one in (*built, *own) if name in (one.id, "all")]


# evaluate: scores of artifacts on a labelled set or a text, at every exit and with early exit, and their time.
#
# An artifact is scored as it is deployed, timed as paper A defines it. One that can answer at several exits goes over
# the
# set once more and answers at all of them: the time of all exits is nobody's. Early exit is computed from what that
# pass
# noted, whatever the thresholds.


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
