"""Times of every model, precision and number of threads, kept in a work folder: what is there is not measured again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from benchmarks.estimates.models import Model
from edgeformer.bundle import Bundle
from edgeformer.formats.base import Frozen
from edgeformer.formats.files import write_text
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.machine.host import now
from edgeformer.stages.profiling.estimating.listing import ItemNodes, Listing, ListSpec, run_listing
from edgeformer.stages.profiling.estimating.probe import HostRates, run_probe
from edgeformer.stages.profiling.estimating.profiled import Timed
from edgeformer.stages.profiling.messages import CheckedArtifact, Item, Shape

SHAPES: tuple[Shape, ...] = ((1, 8), (1, 16), (1, 64), (1, 128), (8, 16), (8, 64))
TOKENS: tuple[Shape, ...] = ((1, 16), (1, 64), (1, 128), (1, 256))
"""Where a token is decoded: behind so many others."""
BATCHES: tuple[Shape, ...] = ((1, 1), (2, 1), (4, 1), (8, 1))
"""Of a wrapped graph, which has no lengths."""
PRECISIONS = ("fp32", "int8")
# Rounds of 0.45 s, nodes under the profiler, opening: per item, and per artifact.
_ITEM_S, _ARTIFACT_S, _MODEL_S, _PROBE_S = 3.0, 8.0, 90.0, 20.0


class Stored(Frozen):
    """What was measured of one artifact with one number of threads."""

    model: str
    artifact: ArtifactManifest
    threads: int
    measured: str
    processor_time: bool
    items: tuple[ItemNodes, ...] = Field(strict=False)
    refused: dict[str, str] = Field({})

    @property
    def timed(self) -> Timed:
        """As a calibration takes it."""
        return Timed(self.model, self.artifact, Listing({item.item: item for item in self.items}))


@dataclass(frozen=True)
class Plan:
    """What is measured, and where it is kept.

    Attributes:
        work: the folder.
        models: of the record.
        threads: each of them.
        processor_time: a trial on a busy machine, with one thread.
    """

    work: Path
    models: Sequence[Model]
    threads: tuple[int, ...]
    processor_time: bool = False

    def minutes(self, passes: int, pause_s: float) -> float:
        """About how long everything takes that is not there yet."""
        absent = [model for model in self.models if not (model.folder(self.work) / "bundle.json").is_file()]
        left = sum(not (self.work / f"probe-{threads}.json").is_file() for threads in self.threads)
        taken_s = _MODEL_S * len(absent) + _PROBE_S * left
        artifact_s = _ARTIFACT_S + _ITEM_S * len(SHAPES)
        first = len(list((self.work / "pass1").glob("*.json")))
        for number in range(1, passes + 1):
            there = len(list((self.work / f"pass{number}").glob("*.json")))
            taken_s += artifact_s * max(0, 2 * len(self.models) * len(self.threads) - there)
        return (taken_s + (pause_s if not first and passes > 1 else 0)) / 60

    def measure(self, number: int) -> Iterator[Stored]:
        """One pass over everything, told as it goes."""
        for model in self.models:
            bundle = Bundle.open(model.bundle(self.work))
            for artifact in subjects(bundle):
                for threads in self.threads:
                    file = self.work / f"pass{number}" / f"{model.name}-{artifact.id}-{threads}.json"
                    if not file.is_file():
                        stored = self._measured(model, bundle, artifact, threads)
                        file.parent.mkdir(parents=True, exist_ok=True)
                        write_text(file, stored.model_dump_json())
                        yield stored

    def stored(self, number: int, threads: int) -> list[Stored]:
        """What there is of a pass. A model that is no longer in the plan is left out."""
        names = {model.name for model in self.models}
        files = sorted((self.work / f"pass{number}").glob(f"*-{threads}.json"))
        found = [Stored.model_validate_json(file.read_bytes(), strict=False) for file in files]
        return [one for one in found if one.model in names]

    def probed(self, threads: int) -> HostRates:
        """The host's rates, measured once."""
        file = self.work / f"probe-{threads}.json"
        if not file.is_file():
            self.work.mkdir(parents=True, exist_ok=True)
            write_text(file, run_probe(threads).model_dump_json())
        return HostRates.model_validate_json(file.read_bytes(), strict=False)

    def _measured(self, model: Model, bundle: Bundle, artifact: ArtifactManifest, threads: int) -> Stored:
        items = items_of(bundle, artifact)
        budget_s = 3 * _ITEM_S * len(items)
        spec = ListSpec(
            checked=CheckedArtifact.of(bundle, artifact), items=items, threads=threads, timed=True, budget_s=budget_s,
            processor_time=self.processor_time,
        )  # fmt: skip
        listing = run_listing(spec)
        refused = {f"{item[1]}×{item[2]}": reason for item, reason in listing.refused.items()}
        return Stored(
            model=model.name, artifact=spec.checked.artifact, threads=threads, measured=now(),
            processor_time=self.processor_time, items=tuple(listing.items.values()), refused=refused,
        )  # fmt: skip


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
