"""Latency of several runs' graphs in turns (A B C A B C …), so that changes of the machine meet all graphs alike."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.studies.results import StudyRun, StudyTimes, TimedArtifact
from benchmarks.studies.specification import Timing
from edgeformer.artifacts.device import Budget, Budgets
from edgeformer.artifacts.documents import load_profile, own_profiles
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Row
from edgeformer.artifacts.workspace import BUNDLE_FOLDER
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.run import Location
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, cpu_name, default_threads, describe_host, now


def timed_artifacts(run: StudyRun) -> list[str]:
    """Return the graphs of a run that are measured: the whole model in each precision, and its exits in FP32."""
    kinds = (("exit", "fp32"), *(("full", artifact.precision) for artifact in run.artifacts))
    return [a.id for a in run.artifacts if a.status == "built" and (a.role, a.precision) in kinds]


def times_key(runs: Sequence[StudyRun], timing: Timing) -> str:
    """Return the key of the times of these graphs of these trainings."""
    sizes = {(run.key, artifact.id): artifact.size_bytes for run in runs for artifact in run.artifacts}
    graphs = [(run, artifact) for run in runs for artifact in timed_artifacts(run)]
    entries = sorted((run.key, artifact, run.started, sizes[run.key, artifact]) for run, artifact in graphs)
    text = json.dumps([entries, timing.batch, timing.seq, timing.rounds])
    return hashlib.sha256(text.encode()).hexdigest()


def measured_on_this_machine(times: StudyTimes) -> bool:
    """Return whether times are of this processor, with as many threads and the same runtime."""
    current = (cpu_name(), default_threads(), library_versions().get("onnxruntime"))
    return (times.host.get("cpu"), times.threads, times.versions.get("onnxruntime")) == current


def measure_times(
    runs: Sequence[StudyRun], folders: Mapping[str, Path], timing: Timing, artifacts: Path, progress: Progress
) -> StudyTimes:
    """Measure every graph once per round, each time in processes of its own.

    Args:
        runs: whose bundles are in this folder of artifacts.
        folders: key → folder of the run.
        artifacts: the folder that holds the runs.

    Raises:
        ArtifactError: a damaged bundle.
    """
    graphs = [(run, artifact) for run in runs for artifact in timed_artifacts(run)]
    rows: dict[tuple[str, str], list[Row | None]] = {(run.key, artifact): [] for run, artifact in graphs}
    budget = Budget(batch=timing.batch, seq=timing.seq)  # so that this shape alone is measured
    budgets = Budgets.model_validate({"classification": budget, "language-modeling": budget})
    device = load_profile("host", own_profiles(artifacts)).model_copy(update={"budgets": budgets})
    start, started = time.monotonic(), now()
    with bar(progress, f"Measuring {len(graphs)} graphs in turns", timing.rounds * len(graphs), "turns"):
        for run, artifact in graphs * timing.rounds:
            options = ProfileOptions((timing.batch,), (timing.seq,), artifacts=(artifact,), allow_leak=run.leaks)
            location = Location(folders[run.key], folders[run.key] / BUNDLE_FOLDER)
            bundle = location.open_bundle()
            shape = bundle.task.fit_shape(bundle.data, timing.batch, timing.seq)
            rows[run.key, artifact].append(row_of(profile_bundle(location, device, options).rows, shape))
            progress.advance()
    entries = []
    for (key, artifact), turns in rows.items():
        if measured := [row for row in turns if row is not None]:
            p50 = tuple(row.latency_ms.p50 if row is not None else None for row in turns)
            stable = all(row.latency_ms.stable for row in measured)
            entry = TimedArtifact(run=key, artifact=artifact, p50_ms=p50, stable=stable, provider=measured[-1].provider)
            entries.append(entry)
    return StudyTimes(
        key=times_key(runs, timing), batch=timing.batch, seq=timing.seq, threads=default_threads(),
        entries=tuple(entries), host=describe_host(), versions=library_versions(), code_version=code_version(),
        started=started, seconds=round(time.monotonic() - start, 1),
    )  # fmt: skip


def row_of(rows: Sequence[Row], shape: tuple[int, int]) -> Row | None:
    """Return the measured row of one shape (batch size, length) in a report; None: it could not be measured."""
    steady = (row for row in rows if (row.batch, row.seq, row.where, row.phase) == (*shape, "host", "steady"))
    return next((row for row in steady if row.latency_ms.p50 is not None), None)
