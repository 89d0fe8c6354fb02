"""exits: what early exit of a step artifact may cost, promised from held-out rows, and what it saves, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import ArtifactManifest, ExitGuarantee, ExitTime
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.report import PERCENTILE_NEEDS
from edgeformer.bundle import Bundle
from edgeformer.inference.evaluate import ONE_ANSWERS, Choice, EvaluateOptions, Scoring, choose
from edgeformer.run import Location
from edgeformer.runtimes import ALL_RUNTIMES, OpenOptions, cannot_run
from edgeformer.system.host import cpu_name, default_threads, now
from edgeformer.tasks.early_exit import ExitNotes
from edgeformer.tasks.risk_control import METHOD, Promise, bootstrap_interval, promise, rows_needed, rows_that_would_do


@dataclass(frozen=True)
class Promised:
    """A step artifact, and what is promised of its exits."""

    id: str
    guarantee: ExitGuarantee


_TIMED_ROWS, _FEWEST_ROWS, _LONGEST_S = 300, 64, 20.0
_WARM_ROWS = 20


@dataclass(frozen=True)
class GuaranteeOptions:
    """What is to be promised, and which rows show it.

    Attributes:
        rows: the held-out set or file, and the artifact; None there: every step artifact. The validation split is at
            hand for every run, but not independent of the model; what is written says so.
        max_drop: ε, of accuracy.
        risk: δ, that the promise does not hold.
    """

    rows: EvaluateOptions = field(default_factory=lambda: EvaluateOptions(split="validation"))
    max_drop: float = 0.01
    risk: float = 0.05

    def __post_init__(self) -> None:
        for option, value in (("--max-drop", self.max_drop), ("--risk", self.risk)):
            if not 0 < value < 1:
                raise InputError(f"{option} {100 * value:g}%: must be above 0 % and below 100 %")


def promise_exits(location: Location, options: GuaranteeOptions, progress: Progress = SILENT) -> list[Promised]:
    """Choose thresholds for each step artifact, measure what they save, and write both into bundle.json.

    Args:
        location: of a bundle; where the set is one of the model's own data, these must be there.
        options: what is promised, and on which rows.
        progress: is told of rows.

    Returns:
        What bundle.json says now of each.

    Raises:
        InputError: no step artifact, a task whose answers are not right or wrong, or training rows.
        DataError: the held-out rows are too few, or the exits too different, to promise anything that saves anything.
        ArtifactError: a damaged bundle.
    """
    if options.rows.runtime == ALL_RUNTIMES:
        raise InputError(ONE_ANSWERS)
    if options.rows.split == "train" and options.rows.data is None:
        raise InputError("--split train: the model knows these rows; a promise needs rows that it was not trained on")
    bundle = location.open_bundle()
    _check(location, bundle)
    asked = options.rows.artifact
    chosen: dict[str, Choice] = {}
    for one in choose(location, asked or "all", options.rows.runtime):
        if len(one.exits) > 1 and one.artifact is not None and one.artifact.role == "step":
            chosen.setdefault(one.id, one)  # the first of a runtime's providers, as predict takes it
    if not chosen:
        raise InputError(f"--artifact {asked}: is one graph, which all texts go through; name a step artifact")
    entries = []
    for choice in chosen.values():
        assert choice.artifact is not None
        guarantee = _promised(choice, options, progress)
        entries.append(choice.artifact.model_copy(update={"guarantee": guarantee}))
    bundle.record(*entries)  # behind the last of them: where one can promise nothing, nothing is written
    return [Promised(entry.id, entry.guarantee) for entry in entries if entry.guarantee is not None]


def _check(location: Location, bundle: Bundle) -> None:
    task = bundle.task
    if task.writes_text:
        raise InputError(f"{location.name}: is a {task.noun}; what its exits cost in perplexity cannot be promised")
    if not task.has_confidence:
        raise InputError(f"{location.name}: is a {task.noun}; its answers have no one probability to stop at")
    if not bundle.built("step"):
        raise InputError(
            f"{location.name}: has no step bundle, whose exits texts could take; write one: edgeformer export "
            f"{location.argument} --exit all"
        )


def _promised(choice: Choice, options: GuaranteeOptions, progress: Progress) -> ExitGuarantee:
    scoring = Scoring(_alone(options.rows) if choice.heeds_neighbours else options.rows, progress)
    notes = scoring.notes(choice)[1]
    confidences, rights = notes.confidences(), notes.rights()
    found = promise(notes.exits, confidences, rights, options.max_drop, options.risk)
    if found is None or not found.thresholds:
        raise DataError(_refusal(choice, notes, found, options, scoring.name(choice)))
    count = rights.shape[1]
    full = float(rights[-1].mean())
    return ExitGuarantee(
        max_drop=options.max_drop,
        confidence=1 - options.risk,
        method=METHOD,
        thresholds={str(loop): value for loop, value in found.thresholds.items()},
        split=scoring.name(choice),
        reused=_reused(options.rows),
        rows=count,
        lost=found.lost,
        won=found.won,
        p_value=found.p_value,
        level=found.level,
        accuracy=full - (found.lost - found.won) / count,
        full_accuracy=full,
        mean_loops=float(np.dot(found.shares, notes.exits)),
        share={str(loop): share for loop, share in zip(notes.exits, found.shares, strict=True)},
        time=_measured(choice, scoring, found.thresholds, progress),
        created=now(),
    )


def _reused(rows: EvaluateOptions) -> bool:
    """Whether training and export have looked at these rows: by them the best epoch is kept, and INT8 is judged."""
    return rows.data is None and rows.split == "validation"


def _alone(rows: EvaluateOptions) -> EvaluateOptions:
    return EvaluateOptions(**{**vars(rows), "batch": 1})


def _refusal(choice: Choice, notes: ExitNotes, found: Promise | None, options: GuaranteeOptions, name: str) -> str:
    """Why nothing can be promised, and how many rows would do."""
    count, level = notes.rights().shape[1], options.risk / (len(notes.exits) - 1)
    asked = f"a loss of at most {100 * options.max_drop:g} points with {100 * (1 - options.risk):.4g} % confidence"
    needed = rows_needed(options.max_drop, level)
    if count < needed:
        return (
            f"{name}: {count:,} held-out rows are too few to promise {asked}: that takes at least {needed:,}, even if "
            f"early exit changes the answer to none of them. Give more rows (--data FILE), or ask for less (--max-drop)"
        )
    if found is None:
        return f"{name}: {choice.id} loses more than {asked} allows wherever a text leaves, even at probability 1"
    lost, won = found.stopped_by or (found.lost, found.won)
    more = rows_that_would_do(lost, won, count, options.max_drop, level)
    instead = f"some {more:,} rows like them would do" if more else "more rows like them would not help"
    return (
        f"{name}: of {count:,} held-out rows none could leave {choice.id} early under {asked}: the next threshold "
        f"gets {lost:,} rows wrong that are right with all loops, and {won:,} the other way; {instead}, or a larger "
        "--max-drop"
    )


def _measured(choice: Choice, scoring: Scoring, thresholds: Mapping[int, float], progress: Progress) -> ExitTime:
    """Time single texts with early exit, with all loops of the step artifact, and in the full graph, in turn.

    None of the three has the faster minute of a machine to itself.
    """
    assert isinstance(choice.owner, Bundle) and choice.artifact is not None
    whole = _full_graph(choice.owner, choice.artifact, choice.provider)
    texts, pad = scoring.texts(choice), choice.reader().pad
    task, drawn = choice.owner.task, np.random.default_rng(0)
    numbers = drawn.permutation(len(texts))[:_TIMED_ROWS]
    calls = [task.batch(texts, numbers[place : place + 1], pad) for place in range(len(numbers))]
    times_ms: list[list[float]] = [[], [], []]
    with (
        bar(progress, f"Timing {choice.id}", len(calls), "texts"),
        choice.session(early=thresholds) as early,
        choice.session() as full,
        nullcontext()
        if whole is None
        else choice.owner.session(whole, OpenOptions(choice.provider, in_turns=True)) as graph,
    ):
        sessions = [early, full, *([graph] if graph is not None else [])]
        for call in calls[:_WARM_ROWS]:
            for session in sessions:
                session.run(call)
        began = time.perf_counter()
        for place, call in enumerate(calls):
            if place >= _FEWEST_ROWS and time.perf_counter() - began > _LONGEST_S:
                break
            for turn in range(len(sessions)):
                number = (place + turn) % len(sessions)
                times_ms[number].append(_milliseconds(sessions[number].run, call))
            progress.advance()
        provider = early.provider
    early_ms, full_ms, graph_ms = (np.array(times) for times in times_ms)
    in_graph = whole is not None and graph_ms.sum() < full_ms.sum()
    quickest_ms = graph_ms if in_graph else full_ms
    low, high = bootstrap_interval(lambda rows: early_ms[rows].sum() / quickest_ms[rows].sum(), len(early_ms))
    return ExitTime(
        provider=provider,
        host=cpu_name(),
        threads=default_threads(),
        rows=len(early_ms),
        early_ms=_figures(early_ms),
        full_ms=_figures(full_ms),
        ratio=float(early_ms.sum() / full_ms.sum()),
        full_graph=whole.id if whole is not None else None,
        full_graph_ms=_figures(graph_ms) if whole is not None else {},
        quickest=whole.id if whole is not None and in_graph else choice.id,
        quickest_ratio=float(early_ms.sum() / quickest_ms.sum()),
        ratio_low=low,
        ratio_high=high,
    )


def _full_graph(bundle: Bundle, step: ArtifactManifest, provider: str | None) -> ArtifactManifest | None:
    """Return the graph that runs all loops of a step artifact in one call; None: there is none that runs here."""
    same = (step.format, step.precision, step.trimmed)
    return next(
        (
            graph
            for graph in bundle.built("full")
            if (graph.format, graph.precision, graph.trimmed) == same and cannot_run(graph, provider) is None
        ),
        None,
    )


def _milliseconds(run: Callable[[Any], Any], call: Any) -> float:
    started = time.perf_counter()
    run(call)
    return 1000 * (time.perf_counter() - started)


def _figures(times: NDArray[np.float64]) -> dict[str, float]:
    told = [50, *(percentile for percentile, needed in PERCENTILE_NEEDS.items() if len(times) >= needed)]
    return {"mean": float(times.mean()), **{f"p{one}": float(np.percentile(times, one)) for one in told}}
