"""Times of several runs' artifacts in turns: A B C A B C …, so that what the machine does meets all alike."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeformer.backends import library_versions
from edgeformer.formats.device import Budget, Budgets, DeviceProfile
from edgeformer.formats.documents import load_profile, own_profiles
from edgeformer.formats.progress import Progress, bar
from edgeformer.formats.report import Row
from edgeformer.formats.study import Timing
from edgeformer.formats.study_result import StudyRun, StudyTimes, TimedArtifact
from edgeformer.formats.workspace import BUNDLE_FOLDER
from edgeformer.machine.host import code_version, cpu_name, default_threads, describe_host, now
from edgeformer.run import Location
from edgeformer.stages.profiling.profile import ProfileOptions, profile_bundle

SECONDS_A_TURN = 7.0
"""What measuring one artifact once takes: two processes, each warmed up and then measured for seconds. It was 7.5 s for
graphs of decoders and 6.5 s for those of encoders, on two cores."""


@dataclass
class _Turns:
    """What was measured of one artifact so far."""

    p50_ms: list[float | None] = field(default_factory=list)
    stable: bool = True
    provider: str = ""


def timed_artifacts(run: StudyRun) -> list[str]:
    """Graphs of a run that are measured: the whole model in each precision, and its exits in FP32."""
    return [
        artifact.id
        for artifact in run.artifacts
        if artifact.status == "built"
        and (artifact.role == "full" or (artifact.role == "exit" and artifact.precision == "fp32"))
    ]


def times_key(runs: Sequence[StudyRun], timing: Timing) -> str:
    """By which times are found again: those of the same graphs, of the same trainings."""
    sizes = {(run.key, artifact.id): artifact.size_bytes for run in runs for artifact in run.artifacts}
    entries = sorted(
        (run.key, artifact, run.started, sizes[run.key, artifact]) for run in runs for artifact in timed_artifacts(run)
    )
    text = json.dumps([entries, timing.batch, timing.seq, timing.rounds])
    return hashlib.sha256(text.encode()).hexdigest()


def taken_as_here(times: StudyTimes) -> bool:
    """Whether times are of this processor, by as many threads and the same runtime."""
    runtime = "onnxruntime"
    return (
        times.host.get("cpu") == cpu_name()
        and times.threads == default_threads()
        and times.versions.get(runtime) == library_versions().get(runtime)
    )


def measure_times(
    runs: Sequence[StudyRun], folders: Mapping[str, Path], timing: Timing, artifacts: Path, progress: Progress
) -> StudyTimes:
    """Measure every graph once per round, each time in processes of its own.

    Args:
        runs: those whose bundles lie here.
        folders: key → folder of the run.
        artifacts: the folder that holds the runs.

    Raises:
        ArtifactError: a damaged bundle.
    """
    asked = [(run, artifact) for run in runs for artifact in timed_artifacts(run)]
    turns = {(run.key, artifact): _Turns() for run, artifact in asked}
    budget = Budget(batch=timing.batch, seq=timing.seq)  # nothing but the shape that is asked for
    judged = Budgets.model_validate({"classification": budget, "language-modeling": budget})
    device = load_profile("host", own_profiles(artifacts)).model_copy(update={"budgets": judged})
    began, started = time.monotonic(), now()
    with bar(progress, f"Measuring {len(asked)} graphs in turns", timing.rounds * len(asked), "turns"):
        for _ in range(timing.rounds):
            for run, artifact in asked:
                _measure(run, artifact, folders[run.key], timing, device, turns[run.key, artifact])
                progress.advance()
    return StudyTimes(
        key=times_key(runs, timing),
        batch=timing.batch,
        seq=timing.seq,
        threads=default_threads(),
        entries=tuple(
            TimedArtifact(run=key, artifact=artifact, p50_ms=tuple(t.p50_ms), stable=t.stable, provider=t.provider)
            for (key, artifact), t in turns.items()
            if any(p50 is not None for p50 in t.p50_ms)
        ),
        host=describe_host(),
        versions=library_versions(),
        code_version=code_version(),
        started=started,
        seconds=round(time.monotonic() - began, 1),
    )


def _measure(run: StudyRun, artifact: str, folder: Path, timing: Timing, device: DeviceProfile, turns: _Turns) -> None:
    options = ProfileOptions(batches=(timing.batch,), seqs=(timing.seq,), artifacts=(artifact,), allow_leak=run.leaks)
    location = Location(folder, folder / BUNDLE_FOLDER)
    bundle = location.open_bundle()
    shape = bundle.task.fit_shape(bundle.data, timing.batch, timing.seq)
    row = row_of(profile_bundle(location, device, options).rows, shape)
    turns.p50_ms.append(row.latency_ms.p50 if row is not None else None)
    if row is not None:
        turns.stable = turns.stable and bool(row.latency_ms.stable)
        turns.provider = row.provider


def row_of(rows: Sequence[Row], shape: tuple[int, int]) -> Row | None:
    """The measured row of one shape among a report's, which may have others; None: it could not be measured.

    Args:
        rows: of one artifact.
        shape: batch size and length.
    """
    found = (row for row in rows if (row.batch, row.seq) == shape and row.where == "host" and row.phase == "steady")
    return next((row for row in found if row.latency_ms.p50 is not None), None)
