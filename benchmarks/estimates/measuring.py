"""Times of every model, precision and number of threads, kept in a work folder: what is stored is not measured again.

In each sweep every artifact is timed once, by a fresh process, so that a spell in which the machine was slower falls on
all models alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.estimates.models import Model
from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.bundle import Bundle
from edgeformer.estimate.calibrate import SWEEPS, TimeJob, Timing, combine_sweeps, run_timing
from edgeformer.estimate.fit import TimedCall
from edgeformer.estimate.listing import ItemNodes
from edgeformer.estimate.probe import HostRates, run_probe
from edgeformer.measurement.artifact import Item, Shape, check_artifact

SHAPES: tuple[Shape, ...] = ((1, 8), (1, 16), (1, 64), (1, 128), (8, 16), (8, 64))
TOKENS: tuple[Shape, ...] = ((1, 16), (1, 64), (1, 128), (1, 256))
"""Where a token is decoded: behind so many others."""
BATCHES: tuple[Shape, ...] = ((1, 1), (2, 1), (4, 1), (8, 1))
"""Of an imported graph without lengths."""
PRECISIONS = ("fp32", "int8")
# Seconds: starting a process; an item's calls; its nodes under the profiler; making a model; the host's rates.
_PROCESS_S, _ROUND_S, _NODES_S, _MODEL_S, _PROBE_S = 3.0, 0.9, 1.5, 15.0, 20.0
# Of a process, beyond which it leaves large items out.
_BUDGET_S = 60.0


class StoredTiming(Frozen):
    """What one process timed of one artifact with one number of threads."""

    model: str
    artifact: ArtifactManifest
    threads: int
    timing: Timing


@dataclass(frozen=True)
class TimedArtifact:
    """All sweeps of one artifact."""

    model: str
    artifact: ArtifactManifest
    calls: list[TimedCall]
    nodes: dict[Item, ItemNodes]


@dataclass(frozen=True)
class Plan:
    """What is measured, and the folder that keeps it."""

    work: Path
    models: Sequence[Model]
    threads: tuple[int, ...]

    def minutes(self) -> float:
        """Estimate how long the missing measurements take."""
        seconds = _PROBE_S * sum(not self._probe_file(threads).is_file() for threads in self.threads)
        seconds += sum(_MODEL_S for model in self.models if not model.exists(self.work))
        for sweep in range(SWEEPS):
            item_s = _ROUND_S + (_NODES_S if sweep == 0 else 0)
            for model in self.models:
                stored = len(list(self._folder(sweep).glob(f"{model.name}-onnx*.json")))
                missing = max(0, model.artifacts * len(self.threads) - stored)
                seconds += missing * (_PROCESS_S + item_s * len(SHAPES))
        return seconds / 60

    def measure(self) -> Iterator[tuple[int, StoredTiming]]:
        """Measure what is missing, and yield each result with the number of its sweep."""
        subjects = []
        for model in self.models:
            bundle = Bundle.open(model.bundle(self.work))
            for artifact in timed_artifacts(bundle):
                checked, items = check_artifact(bundle, artifact), items_of(bundle, artifact)
                subjects += [(model.name, checked, items, threads) for threads in self.threads]
        for sweep in range(SWEEPS):
            for name, checked, items, threads in reversed(subjects) if sweep % 2 else subjects:
                file = self._folder(sweep) / f"{name}-{checked.artifact.id}-{threads}.json"
                if file.is_file():
                    continue
                job = TimeJob(files=checked, items=items, threads=threads, nodes=sweep == 0, budget_s=_BUDGET_S)
                stored = StoredTiming(model=name, artifact=checked.artifact, threads=threads, timing=run_timing(job))
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, stored.model_dump_json())
                yield sweep, stored

    def timed(self, threads: int) -> list[TimedArtifact]:
        """Return the results of all sweeps, artifact by artifact; those that the first one lacks are left out."""
        results = []
        for first in self._stored(0):
            if first.threads != threads:
                continue
            file = f"{first.model}-{first.artifact.id}-{threads}.json"
            files = [self._folder(sweep) / file for sweep in range(SWEEPS)]
            timings = [_read(path).timing for path in files if path.is_file()]
            nodes = {timed.item: timed.nodes for timed in timings[0].items if timed.nodes is not None}
            calls = combine_sweeps(first.model, first.artifact, timings)
            results.append(TimedArtifact(first.model, first.artifact, calls, nodes))
        return results

    def missing(self) -> list[dict[str, str]]:
        """Return the cases that could not be timed, with reasons."""
        return [
            {"model": stored.model, "artifact": stored.artifact.id, "threads": str(stored.threads), "shape": shape,
             "why": reason}
            for stored in self._stored(0)
            for shape, reason in stored.timing.refused.items()
        ]  # fmt: skip

    def disturbed(self) -> float:
        """Return the share of processes that other work disturbed, in their second try too."""
        results = [stored.timing.disturbed is not None for sweep in range(SWEEPS) for stored in self._stored(sweep)]
        return sum(results) / len(results)

    def rates(self, threads: int) -> HostRates:
        """Return the host's rates, measured once."""
        file = self._probe_file(threads)
        if not file.is_file():
            self.work.mkdir(parents=True, exist_ok=True)
            write_text(file, run_probe(threads).model_dump_json())
        return HostRates.model_validate_json(file.read_bytes(), strict=False)

    def _stored(self, sweep: int) -> list[StoredTiming]:
        names = {model.name for model in self.models}
        stored = [_read(file) for file in sorted(self._folder(sweep).glob("*.json"))]
        return [timing for timing in stored if timing.model in names and timing.threads in self.threads]

    def _folder(self, sweep: int) -> Path:
        return self.work / f"sweep{sweep + 1}"

    def _probe_file(self, threads: int) -> Path:
        return self.work / f"probe-{threads}.json"


def _read(file: Path) -> StoredTiming:
    return StoredTiming.model_validate_json(file.read_bytes(), strict=False)


def timed_artifacts(bundle: Bundle) -> list[ArtifactManifest]:
    """Return the untrimmed full and decode graphs in FP32 and INT8."""
    return [
        artifact
        for role in ("full", "decode")
        for artifact in bundle.built(role)
        if artifact.is_graph and artifact.precision in PRECISIONS and not artifact.trimmed
    ]


def items_of(bundle: Bundle, artifact: ArtifactManifest) -> tuple[Item, ...]:
    """Return the items that are timed of an artifact, from small to large."""
    longest = bundle.manifest.max_positions
    if longest is None:
        return tuple(("steady", *shape) for shape in BATCHES)
    shapes = sorted(TOKENS if artifact.role == "decode" else SHAPES, key=lambda shape: shape[0] * shape[1])
    return tuple(
        ("decode" if artifact.role == "decode" else "steady", *shape) for shape in shapes if shape[1] <= longest
    )
