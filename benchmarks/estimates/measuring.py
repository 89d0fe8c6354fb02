"""Times of every model, precision and number of threads, kept in a work folder: what is there is not measured again.

Two passes of some sweeps each, with a pause between them. In a sweep every artifact is timed once, by a fresh process:
models are what is left out, so a spell in which the machine was slower must not fall on one of them alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import Field

from benchmarks.estimates.models import Model
from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.benchmark.measurement import CheckedArtifact, Item, Shape
from edgeformer.bundle import Bundle
from edgeformer.estimate.listing import SWEEPS, ItemNodes, Listing, ListSpec, Repeats, in_turn, run_listing, together
from edgeformer.estimate.probe import HostRates, run_probe
from edgeformer.estimate.profiled import Timed
from edgeformer.system.host import now

SHAPES: tuple[Shape, ...] = ((1, 8), (1, 16), (1, 64), (1, 128), (8, 16), (8, 64))
TOKENS: tuple[Shape, ...] = ((1, 16), (1, 64), (1, 128), (1, 256))
"""Where a token is decoded: behind so many others."""
BATCHES: tuple[Shape, ...] = ((1, 1), (2, 1), (4, 1), (8, 1))
"""Of a wrapped graph, which has no lengths."""
PRECISIONS = ("fp32", "int8")
PASSES = 2
# A process with its sessions; an item's round; its nodes under the profiler; a model, made; the host's rates.
_PROCESS_S, _ROUND_S, _NODES_S, _MODEL_S, _PROBE_S = 3.0, 0.9, 1.5, 90.0, 20.0
# Of a process, beyond which it leaves large items out.
_BUDGET_S = 60.0
# Second tries of processes that were disturbed, all together.
_REPEATS_S = 300.0


class Stored(Frozen):
    """What one process said of one artifact with one number of threads."""

    model: str
    artifact: ArtifactManifest
    threads: int
    measured: str
    items: tuple[ItemNodes, ...] = Field(strict=False)
    refused: dict[str, str] = Field({})
    disturbed: str | None = Field(None, description="by what else used the machine, in the second try too")

    @property
    def listing(self) -> Listing:
        """As the process sent it."""
        return Listing({item.item: item for item in self.items})


@dataclass(frozen=True)
class Subject:
    """What one process times: an artifact of a model."""

    model: str
    checked: CheckedArtifact
    items: tuple[Item, ...]
    threads: int

    @property
    def file(self) -> str:
        """Of what it says, in the folder of a sweep."""
        return f"{self.model}-{self.checked.artifact.id}-{self.threads}.json"

    def time(self, nodes: bool, repeats: Repeats) -> Stored:
        """A process of its own does, or a second one where the first was disturbed."""
        spec = ListSpec(
            checked=self.checked, items=self.items, threads=self.threads, timed=True, nodes=nodes, budget_s=_BUDGET_S
        )
        listing = repeats.undisturbed(partial(run_listing, spec))
        refused = {f"{item[1]}×{item[2]}": reason for item, reason in listing.refused.items()}
        return Stored(
            model=self.model, artifact=self.checked.artifact, threads=self.threads, measured=now(),
            items=tuple(listing.items.values()), refused=refused, disturbed=listing.disturbed,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is measured, and where it is kept.

    Attributes:
        work: the folder.
        models: of the record.
        threads: each of them.
        passes: one, or two with a pause between them.
        pause_s: from the end of the first pass to the start of the second.
    """

    work: Path
    models: Sequence[Model]
    threads: tuple[int, ...]
    passes: int = PASSES
    pause_s: float = 0.0

    @property
    def sweeps(self) -> range:
        """Numbers of all of them; the first half is the first pass."""
        return range(self.passes * SWEEPS)

    def folder(self, sweep: int) -> Path:
        """Of what a sweep says."""
        return self.work / f"sweep{sweep + 1}"

    def minutes(self) -> float:
        """About how long everything takes that is not there yet."""
        taken_s = _PROBE_S * sum(not self._probe(threads).is_file() for threads in self.threads)
        taken_s += sum(_MODEL_S for model in self.models if not model.made(self.work))
        for sweep in self.sweeps:
            each_s = _ROUND_S + (_NODES_S if sweep == 0 else 0)
            for model in self.models:
                there = len(list(self.folder(sweep).glob(f"{model.name}-onnx*.json")))
                left = max(0, model.artifacts * len(self.threads) - there)
                taken_s += left * (_PROCESS_S + each_s * len(SHAPES))
        paused = self.passes > 1 and not any(self.folder(SWEEPS).glob("*.json"))
        return (taken_s + (self.pause_s if paused else 0)) / 60

    def listed(self) -> Iterator[str]:
        """What would be measured, a line each."""
        for model in self.models:
            made = "made" if model.made(self.work) else "to be made"
            yield f"{model.name} ({model.model_spec}; {made}): {model.artifacts} artifacts, threads {self.threads}"
        yield f"{self.passes} passes of {SWEEPS} sweeps, {self.pause_s / 60:.0f} minutes between them"

    def measure(self) -> Iterator[tuple[int, Stored]]:
        """Every sweep that is not there yet, told as it goes."""
        subjects, repeats = list(self._subjects()), Repeats(_REPEATS_S)
        for sweep in self.sweeps:
            if sweep == SWEEPS:
                wait_until_old(self.folder(SWEEPS - 1), self.pause_s)
            for subject in in_turn(subjects, sweep):
                file = self.folder(sweep) / subject.file
                if not file.is_file():
                    stored = subject.time(sweep == 0, repeats)
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_text(file, stored.model_dump_json())
                    yield sweep, stored

    def timed(self, threads: int) -> list[Timed]:
        """What all sweeps say, artifact by artifact; those that the first one lacks are left out."""
        found = []
        for file in sorted(self.folder(0).glob(f"*-{threads}.json")):
            stored = {
                sweep: Stored.model_validate_json(one.read_bytes(), strict=False)
                for sweep in self.sweeps
                if (one := self.folder(sweep) / file.name).is_file()
            }
            if stored[0].model in {model.name for model in self.models}:
                listing = together({sweep: one.listing for sweep, one in stored.items()})
                found.append(Timed(stored[0].model, stored[0].artifact, listing))
        return found

    def missing(self) -> list[dict[str, str]]:
        """Cases that could not be timed, and why."""
        return [
            {"model": one.model, "artifact": one.artifact.id, "threads": str(one.threads), "shape": shape, "why": why}
            for one in self._stored(0)
            for shape, why in one.refused.items()
        ]

    def disturbed(self) -> float:
        """The share of processes beside which something else used the machine, in their second try too."""
        every = [one.disturbed is not None for sweep in self.sweeps for one in self._stored(sweep)]
        return sum(every) / len(every)

    def _stored(self, sweep: int) -> list[Stored]:
        names = {model.name for model in self.models}
        files = sorted(self.folder(sweep).glob("*.json"))
        found = [Stored.model_validate_json(file.read_bytes(), strict=False) for file in files]
        return [one for one in found if one.model in names and one.threads in self.threads]

    def probed(self, threads: int) -> HostRates:
        """The host's rates, measured once."""
        file = self._probe(threads)
        if not file.is_file():
            self.work.mkdir(parents=True, exist_ok=True)
            write_text(file, run_probe(threads).model_dump_json())
        return HostRates.model_validate_json(file.read_bytes(), strict=False)

    def _probe(self, threads: int) -> Path:
        return self.work / f"probe-{threads}.json"

    def _subjects(self) -> Iterator[Subject]:
        for model in self.models:
            bundle = Bundle.open(model.bundle(self.work))
            for artifact in subjects(bundle):
                checked, items = CheckedArtifact.of(bundle, artifact), items_of(bundle, artifact)
                for threads in self.threads:
                    yield Subject(model.name, checked, items, threads)


def subjects(bundle: Bundle) -> list[ArtifactManifest]:
    """Full graphs and decoders, FP32 and INT8, as long as they are whole."""
    return [
        artifact
        for artifact in bundle.artifacts
        if artifact.is_graph
        and artifact.status == "built"
        and artifact.role in ("full", "decode")
        and artifact.precision in PRECISIONS
        and not artifact.trimmed
    ]


def items_of(bundle: Bundle, artifact: ArtifactManifest) -> tuple[Item, ...]:
    """What is measured of an artifact, from small to large."""
    longest = bundle.manifest.max_positions
    if longest is None:
        return tuple(("steady", *shape) for shape in BATCHES)
    phase, shapes = ("decode", TOKENS) if artifact.role == "decode" else ("steady", SHAPES)
    taken = sorted((shape for shape in shapes if shape[1] <= longest), key=lambda shape: shape[0] * shape[1])
    return tuple(("decode" if phase == "decode" else "steady", *shape) for shape in taken)


def wait_until_old(folder: Path, seconds: float) -> None:
    """Sleep until the newest file of a folder is so old: the same case again, at another time."""
    newest = max((file.stat().st_mtime for file in folder.glob("*.json")), default=0.0)
    time.sleep(max(0.0, newest + seconds - time.time()))
