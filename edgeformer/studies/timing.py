"""Times of several runs' artifacts in turns: A B C A B C …, so that what the machine does meets all alike."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.documents import load_profile, own_profiles
from edgeformer.formats.progress import Progress, bar
from edgeformer.formats.study import Timing
from edgeformer.formats.study_result import StudyRun, StudyTimes, TimedArtifact
from edgeformer.formats.workspace import BUNDLE_FOLDER
from edgeformer.machine.host import code_version, default_threads, describe_host, now
from edgeformer.run import Location
from edgeformer.stages.profiling.profile import ProfileOptions, profile_bundle

SECONDS_A_TURN = 16.0
"""What measuring one artifact once takes: two processes, each warmed up and then measured for seconds."""


@dataclass
class _Turns:
    """What was measured of one artifact so far."""

    p50_ms: list[float] = field(default_factory=list)
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
    """By which times are found again."""
    entries = sorted((run.key, artifact) for run in runs for artifact in timed_artifacts(run))
    text = json.dumps([entries, timing.batch, timing.seq, timing.rounds])
    return hashlib.sha256(text.encode()).hexdigest()


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
    device, began, started = load_profile("host", own_profiles(artifacts)), time.monotonic(), now()
    versions = runs[0].versions if runs else {}
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
            if t.p50_ms
        ),
        host=describe_host(),
        versions=versions,
        code_version=code_version(),
        started=started,
        seconds=round(time.monotonic() - began, 1),
    )


def _measure(run: StudyRun, artifact: str, folder: Path, timing: Timing, device: DeviceProfile, turns: _Turns) -> None:
    options = ProfileOptions(batches=(timing.batch,), seqs=(timing.seq,), artifacts=(artifact,), allow_leak=run.leaks)
    report = profile_bundle(Location(folder, folder / BUNDLE_FOLDER), device, options)
    for row in report.rows:
        latency = row.latency_ms
        if row.where == "host" and row.phase == "steady" and latency.p50 is not None:
            turns.p50_ms.append(latency.p50)
            turns.stable = turns.stable and bool(latency.stable)
            turns.provider = row.provider
            return
