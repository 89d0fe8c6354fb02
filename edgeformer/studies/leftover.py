"""What is left of a study's runs together: shared ones once, teachers where they are needed, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgeformer.formats.progress import Progress
from edgeformer.studies.estimating import Estimate, Estimator
from edgeformer.studies.jobs import Job
from edgeformer.studies.needs import status_of
from edgeformer.studies.results import Found, Results

NOT_TRAINED = (
    "has no results here, and --no-train trains nothing; run this in a clone of edgeformer, or add "
    "--results CLONE/benchmarks/results/studies"
)


def known_only(job: Job, found: Found | None, results: Results) -> Estimate:
    """Of a run where nothing is trained: it has results, or why it has none."""
    if found is not None:
        return Estimate(job, "done", basis=found.origin)
    return Estimate(job, "unavailable", basis=results.doubt(job) or NOT_TRAINED)


def doubted(estimate: Estimate, results: Results) -> Estimate:
    """With the reason for which results that there are were not taken."""
    doubt = results.doubt(estimate.job) if estimate.state == "unavailable" else ""
    return replace(estimate, basis=f"{estimate.basis}; {doubt}") if doubt else estimate


def with_teachers(
    estimates: Sequence[Estimate], estimator: Estimator, artifacts: Path, progress: Progress
) -> list[Estimate]:
    """A teacher whose scores are known but whose weights are not here is trained again where a row needs them."""
    needed: set[str | None] = set()
    for estimate in estimates:
        job, state = estimate.job, estimate.state
        while state in ("missing", "resumable") and job.teacher is not None:
            job = job.teacher
            if status_of(artifacts / job.folder_name) == "finished":
                break
            needed.add(job.key)
    return [
        estimator.of(estimate.job, None, progress)
        if estimate.job.key in needed and estimate.state == "done"
        else estimate
        for estimate in estimates
    ]


def once(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Runs that several rows share are trained once: the second time they cost nothing."""
    seen: set[str] = set()
    told = []
    for estimate in estimates:
        key = estimate.job.key
        again = key is not None and key in seen and estimate.state not in ("done", "unavailable")
        told.append(Estimate(estimate.job, "shared", basis="the same run as above") if again else estimate)
        seen |= {key} if key is not None else set()
    return told


def makespan(estimates: Sequence[Estimate], at_a_time: int) -> float:
    """Seconds until the last run ends, each begun in order as soon as a place is free and its teacher is ready.

    Args:
        estimates: of every run; those that take no time are there already.
        at_a_time: places.
    """
    waiting = [estimate for estimate in estimates if estimate.seconds]
    running: list[tuple[float, str | None]] = []  # end, key
    now = 0.0
    while waiting or running:
        unready = {one.job.key for one in waiting} | {key for _, key in running}
        ready = [one for one in waiting if one.job.teacher is None or one.job.teacher.key not in unready]
        if ready and len(running) < at_a_time:
            waiting.remove(ready[0])
            running.append((now + ready[0].seconds, ready[0].job.key))
            continue
        now, _ = first = min(running, key=lambda run: run[0])
        running.remove(first)
    return now
