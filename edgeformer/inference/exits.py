"""Exits: choose early-exit thresholds with a guarantee from held-out rows, and measure the time they save."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.artifacts.manifest import ExitGuarantee, ExitTime
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.report import PERCENTILE_NEEDS
from edgeformer.bundle import Bundle
from edgeformer.inference.evaluate import EvaluateOptions, Evaluator
from edgeformer.inference.predict import NAME_ONE_RUNTIME, OpenableModel, select_candidates
from edgeformer.run import Location
from edgeformer.runtimes import ALL_RUNTIMES, OpenOptions, cannot_run
from edgeformer.system.host import cpu_name, default_threads, now
from edgeformer.tasks.risk_control import METHOD, bootstrap_interval, choose_thresholds, rows_needed

_TIMED_ROWS = 300
_MIN_TIMED_ROWS = 64
_TIMING_LIMIT_S = 20.0  # timing stops after this time, but not before `_MIN_TIMED_ROWS`
_WARM_UP_ROWS = 20


@dataclass(frozen=True)
class GuaranteeOptions:
    """The guarantee to show, and ``rows`` to show it with: a held-out set or file, and the artifact (None: all steps).

    A guarantee says if the set is the validation split, which training has used to select the model.
    """

    rows: EvaluateOptions = field(default_factory=lambda: EvaluateOptions(split="validation"))
    max_drop: float = 0.01  # ε, the largest drop of accuracy
    risk: float = 0.05  # δ, the probability that the guarantee does not hold

    def __post_init__(self) -> None:
        for option, value in (("--max-drop", self.max_drop), ("--risk", self.risk)):
            if not 0 < value < 1:
                raise InputError(f"{option} {100 * value:g}%: must be above 0% and below 100%")


def calibrate_exits(
    location: Location, options: GuaranteeOptions, progress: Progress = SILENT
) -> dict[str, ExitGuarantee]:
    """Choose thresholds for each step artifact, time them, and write both into bundle.json: artifact id → guarantee.

    Raises InputError: no step artifact, a task whose answers are not right or wrong, or training rows; DataError: too
    few held-out rows, or exits that differ too much, for any thresholds that let a row leave; ArtifactError: a damaged
    bundle.
    """
    # 1. Step artifacts, and rows that training has not used
    if options.rows.runtime == ALL_RUNTIMES:
        raise InputError(NAME_ONE_RUNTIME)
    if options.rows.split == "train" and options.rows.data is None:
        raise InputError("--split train: a guarantee needs rows that the model was not trained on; use --data FILE")
    bundle = location.open_bundle()
    task, name = bundle.task, location.name
    if task.can_write:
        raise InputError(
            f"{name}: is a {task.noun}, and there is no guarantee for perplexity; compare exits with: edgeformer "
            f"evaluate {location.argument}"
        )
    if task.confidence is None:
        raise InputError(f"{name}: is a {task.noun}, which gives no single probability for an early exit")
    if not bundle.built("step"):
        raise InputError(f"{name}: has no step artifact; write it with: {location.step_command}")
    artifact = options.rows.artifact
    steps: dict[str, OpenableModel] = {}
    for candidate in select_candidates(location, artifact or "all", options.rows.runtime):
        if candidate.artifact is not None and candidate.artifact.role == "step" and len(candidate.exits) > 1:
            steps.setdefault(candidate.id, candidate)  # the first of a runtime's providers, which predict uses
    if not steps:
        raise InputError(
            f"--artifact {artifact}: is one graph without early exit; give a step artifact: "
            f"{', '.join(entry.id for entry in bundle.built('step'))}"
        )
    guarantees: dict[str, ExitGuarantee] = {}
    for id_, candidate in steps.items():
        # 2. Thresholds from the answers of every exit to the held-out rows
        rows = replace(options.rows, batch=1) if candidate.depends_on_batch else options.rows
        evaluator = Evaluator(rows, progress)
        set_name, records = evaluator.set_name(candidate), evaluator.record_exits(candidate)[1]
        right, confidence = records.stacked("right"), records.stacked("confidence")
        count, full_accuracy = right.shape[1], float(right[-1].mean())
        promised = choose_thresholds(records.exits, confidence, right, options.max_drop, options.risk)
        if promised is None or not promised.thresholds:
            level, percent = options.risk / (len(right) - 1), 100 * (1 - options.risk)
            goal = f"a score drop of at most {options.max_drop:.1%} (absolute) with {percent:.4g}% confidence"
            needed = rows_needed(options.max_drop, level)
            if needed is None or count < needed:
                minimum = "more than 131,072" if needed is None else f"at least {needed:,}"
                problem = (
                    f"{count:,} held-out rows are too few to guarantee {goal}, which needs {minimum} rows; give more "
                    "rows with --data FILE, or a larger --max-drop"
                )
            elif promised is None:
                problem = f"{id_} cannot keep {goal} at any threshold; give a larger --max-drop"
            else:
                losses, gains = promised.stopped_by or (promised.lost, promised.won)
                enough = rows_needed(options.max_drop, level, losses, gains, count)
                advice = f"give about {enough:,} such rows or" if enough else "more such rows would not help; give"
                problem = (
                    f"no threshold of {id_} keeps {goal} on these {count:,} rows: the best one turns {losses:,} right "
                    f"answers wrong and {gains:,} wrong answers right; {advice} a larger --max-drop"
                )
            raise DataError(f"{set_name}: {problem}")
        # 3. The guarantee, with the time that it saves
        guarantees[id_] = ExitGuarantee(
            max_drop=options.max_drop, confidence=1 - options.risk, method=METHOD, split=set_name, rows=count,
            thresholds={str(loop): value for loop, value in promised.thresholds.items()},
            reused=rows.data is None and rows.split == "validation",  # it has chosen the epoch and judged INT8
            lost=promised.lost, won=promised.won, p_value=promised.p_value, level=promised.level,
            accuracy=full_accuracy - (promised.lost - promised.won) / count, full_accuracy=full_accuracy,
            mean_loops=float(np.dot(promised.shares, records.exits)),
            share={str(loop): share for loop, share in zip(records.exits, promised.shares, strict=True)},
            time=_measure_time(candidate, evaluator, promised.thresholds, progress), created=now(),
        )  # fmt: skip
    # Written after the last artifact, so that a failure leaves bundle.json unchanged.
    bundle.record(*(bundle.artifact(id_).model_copy(update={"guarantee": guarantees[id_]}) for id_ in guarantees))
    return guarantees


def _measure_time(
    candidate: OpenableModel, evaluator: Evaluator, thresholds: Mapping[int, float], progress: Progress
) -> ExitTime:
    """Time single texts with early exit, with all loops of the step artifact, and in the full graph, in turns."""
    # 1. What is timed
    bundle, step, provider = candidate.owner, candidate.artifact, candidate.provider
    assert isinstance(bundle, Bundle) and step is not None
    full_graphs = [
        graph
        for graph in bundle.built("full")
        if (graph.format, graph.precision, graph.trimmed) == (step.format, step.precision, step.trimmed)
    ]
    full_graph = next((graph for graph in full_graphs if cannot_run(graph, provider) is None), None)
    rows, pad = evaluator.labelled_rows(candidate), candidate.reader().pad
    numbers = np.random.default_rng(0).permutation(len(rows))[:_TIMED_ROWS]
    batches = [bundle.task.rows.batch(rows, numbers[place : place + 1], pad) for place in range(len(numbers))]
    times: list[list[float]] = [[], [], []]
    options = OpenOptions(provider, in_turns=True)
    # 2. Time text by text
    with (
        bar(progress, f"Timing {candidate.id}", len(batches), "texts"),
        candidate.session(thresholds=thresholds) as early,
        candidate.session() as all_loops,
        nullcontext() if full_graph is None else bundle.session(full_graph, options) as full,
    ):
        sessions = [early, all_loops, *([full] if full is not None else [])]
        for batch in batches[:_WARM_UP_ROWS]:
            for session in sessions:
                session.run(batch)
        began = time.perf_counter()
        for place, batch in enumerate(batches):
            if place >= _MIN_TIMED_ROWS and time.perf_counter() - began > _TIMING_LIMIT_S:
                break
            for turn in range(len(sessions)):
                number = (place + turn) % len(sessions)
                started = time.perf_counter()
                sessions[number].run(batch)
                times[number].append(1000 * (time.perf_counter() - started))
            progress.advance()
        used_provider = early.provider
    # 3. Compare with the quicker of the others
    early_ms, all_loops_ms, graph_ms = (np.array(session_ms) for session_ms in times)
    percentiles = [50, *(percentile for percentile, needed in PERCENTILE_NEEDS.items() if len(early_ms) >= needed)]

    def summary(times_ms: NDArray[np.float64]) -> dict[str, float]:
        figures = {f"p{percentile}": float(np.percentile(times_ms, percentile)) for percentile in percentiles}
        return {"mean": float(times_ms.mean()), **figures}

    graph_is_faster = full_graph is not None and graph_ms.sum() < all_loops_ms.sum()
    quickest_ms = graph_ms if graph_is_faster else all_loops_ms
    low, high = bootstrap_interval(lambda sample: early_ms[sample].sum() / quickest_ms[sample].sum(), len(early_ms))
    return ExitTime(
        provider=used_provider, host=cpu_name(), threads=default_threads(), rows=len(early_ms),
        early_ms=summary(early_ms), full_ms=summary(all_loops_ms),
        ratio=float(early_ms.sum() / all_loops_ms.sum()),
        full_graph=full_graph.id if full_graph is not None else None,
        full_graph_ms=summary(graph_ms) if full_graph is not None else {},
        quickest=full_graph.id if full_graph is not None and graph_is_faster else candidate.id,
        quickest_ratio=float(early_ms.sum() / quickest_ms.sum()),
        ratio_low=low, ratio_high=high,
    )  # fmt: skip
