"""The existing bundle: what stays when a run is exported again, and what would be lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgeformer.artifacts.bundle_files import TARGETS_FILE, TargetRecords
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.golden import GOLDEN_FILE
from edgeformer.artifacts.manifest import ArtifactManifest, Precision
from edgeformer.artifacts.workspace import BUNDLE_FILE, CONFIG_FILE, RECIPE_FILE, TOKENIZER_FILE
from edgeformer.bundle import Bundle
from edgeformer.export.variants import ExportOptions, Variant, requested_variants
from edgeformer.models.weights import GOLDEN_INPUTS, MODEL_FOLDER, WEIGHTS
from edgeformer.runtimes.runtime import Target
from edgeformer.runtimes.session import Array
from edgeformer.tasks.metric import FP32_ABSOLUTE

TOKENIZER_CONFIG = "tokenizer_config.json"
SOURCES = (*(f"{MODEL_FOLDER}/{name}" for name in (WEIGHTS, TOKENIZER_FILE, GOLDEN_INPUTS)), RECIPE_FILE)
"""Files of a run that artifacts are made of; all artifacts of a bundle are made of the same."""

_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4", "fp16")
_ROLES = ("full", "exit", "step", "decode")
"""Order in which one export of everything lists artifacts."""


@dataclass(frozen=True)
class Requested:
    """Selects the artifacts that an export builds.

    Attributes:
        exits: loops whose exits become graphs.
        targets: what the builders can build for on this machine.
        base_precision: precision of the graph that everything is made of.
    """

    options: ExportOptions
    exits: Sequence[int]
    targets: Sequence[Target]
    base_precision: Precision = "fp32"

    def includes(self, old: ArtifactManifest) -> bool:
        """Whether the export builds this artifact again."""
        if (old.role == "exit" and old.exit not in self.exits) or (old.role == "step" and self.options.exits != "all"):
            return False
        if old.is_graph:
            return Variant(old.precision, old.trimmed) in requested_variants(self.options)
        devices = [target.device for target in self._same_id(old)]
        return any(device is None or f".{device}." in str(old.file) for device in devices)

    def replaces_device(self, old: ArtifactManifest) -> str | None:
        """Return why an engine is lost although it is not built again: another device's engine gets its id."""
        for target in self._same_id(old):
            if target.device is not None and f".{target.device}." not in str(old.file):
                return f"{old.file} is for another device than --target {target.device}"
        return None

    def _same_id(self, old: ArtifactManifest) -> list[Target]:
        """Targets whose engines get the same id as ``old``."""
        base = "fp16" if self.options.fp16 else self.base_precision
        return [
            target
            for target in self.targets
            if old.format == target.format
            # Engines for a device also have an INT8 of their own.
            and (
                old.precision == (target.precision or base)
                or (old.precision == "int8" and self.options.int8 and target.device is not None)
            )
        ]


@dataclass
class PreviousBundle:
    """The bundle that is replaced.

    Attributes:
        kept: id → artifact that can stay: built ones, and the reasons of those that were not built.
        losses: id of an artifact, or a file that no manifest lists → why it cannot stay.
        rebuilt: ids of artifacts that are built again.
        notes: of the bundle.
        checksums: file that artifacts need → sha256.
        required_files: id → names of the files that the artifact needs.
        rewritten: id → artifact that was written again, because the offsets of its shared weights changed.
        records: measurements that target devices recorded.
    """

    folder: Path
    kept: dict[str, ArtifactManifest] = field(default_factory=dict)
    losses: dict[str, str] = field(default_factory=dict)
    rebuilt: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)
    required_files: dict[str, list[str]] = field(default_factory=dict)
    rewritten: dict[str, ArtifactManifest] = field(default_factory=dict)
    records: TargetRecords = field(default_factory=TargetRecords)

    @classmethod
    def of_run(
        cls, folder: Path, golden: Mapping[str, Array], sources: Mapping[str, str], requested: Requested
    ) -> PreviousBundle:
        """Compare each file of a run's bundle with its manifest, and ``sources`` (file of the run → sha256)."""
        if not folder.exists():
            return cls(folder)
        try:
            bundle = Bundle.open(folder)
        except ArtifactError as error:
            return cls(folder, losses={"everything in it": str(error)})
        previous = cls(folder, notes=bundle.manifest.notes, checksums=bundle.manifest.files)
        try:
            previous.records = bundle.records
        except ArtifactError as error:
            previous.losses[TARGETS_FILE] = str(error)
        previous._classify(bundle, bundle.artifacts, requested, _source_difference(bundle, sources, golden))
        listed = {*bundle.contents.checksums, BUNDLE_FILE, TARGETS_FILE}
        for path in sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()):
            if path.as_posix() not in listed and not any(part.startswith(".") for part in path.parts):
                previous.losses[path.as_posix()] = f"{BUNDLE_FILE} does not list it"
        return previous

    @classmethod
    def of_imported(cls, bundle: Bundle, requested: Requested) -> PreviousBundle:
        """Look at what was made of an imported graph, which is the bundle's first artifact and always stays."""
        previous = cls(bundle.folder, notes=bundle.manifest.notes, checksums=bundle.manifest.files)
        previous._classify(bundle, bundle.artifacts[1:], requested, None)
        return previous

    def _classify(
        self, bundle: Bundle, artifacts: Iterable[ArtifactManifest], requested: Requested, difference: str | None
    ) -> None:
        """Fill ``rebuilt``, ``kept`` and ``losses``. ``difference``: why no artifact can stay."""
        for artifact in artifacts:
            is_built = artifact.status == "built"
            problem = difference or requested.replaces_device(artifact)
            if problem is None and is_built:
                companions = (TOKENIZER_FILE, TOKENIZER_CONFIG, CONFIG_FILE, GOLDEN_FILE) if artifact.trimmed else ()
                names = [f"{artifact.companions}/{name}" for name in companions]
                names = self.required_files[artifact.id] = [*bundle.contents.needed_by(artifact), *names]
                try:
                    for name in names:
                        bundle.contents.intact(name, f"{artifact.id} needs {name}")
                except ArtifactError as error:
                    problem = str(error)
            if requested.includes(artifact):
                self.rebuilt.add(artifact.id)
            if problem is None:
                update = {"kept": True, "reason": None if is_built else artifact.reason}
                self.kept[artifact.id] = artifact.model_copy(update=update)
            elif is_built:
                self.losses[artifact.id] = problem

    def refuse_losses(self, *, ignored: Iterable[str] = ()) -> None:
        """Raise InputError that lists everything that would be lost, except the ``ignored`` ids."""
        by_reason: dict[str, list[str]] = {}
        for name in self.losses.keys() - set(ignored):
            by_reason.setdefault(self.losses[name], []).append(name)
        if by_reason:
            listed = "; ".join(f"{', '.join(sorted(names))} ({why})" for why, names in sorted(by_reason.items()))
            raise InputError(
                f"{self.folder}: this export would lose {listed}. The bundle is unchanged: also request what can be "
                "made again, or make the bundle from nothing with --replace"
            )

    def graphs(self, variant: Variant) -> list[ArtifactManifest]:
        """Return the graphs of a variant that can stay."""
        built = [old for old in self.kept.values() if old.status == "built" and old.is_graph]
        return [old for old in built if Variant(old.precision, old.trimmed) == variant]

    def note_rewritten(self, variant: Variant, sizes: Mapping[str, int], folder: Path) -> None:
        """Note the graphs (file → size) that were written again, with other offsets of shared weights."""
        for old in self.graphs(variant):
            names = graph_files(old)
            if names <= set(sizes):
                update = {
                    "size_bytes": sum(sizes[name] for name in names),
                    "sha256": sha256_of(folder / str(old.file)),
                    "weights_file": variant.weights,
                }
                self.rewritten[old.id] = old.model_copy(update=update)

    def merge(self, new: Sequence[ArtifactManifest]) -> list[ArtifactManifest]:
        """Return all artifacts of the new bundle. Raises InputError where a rejected one would cost another."""
        tried = {artifact.id: artifact for artifact in new if artifact.status != "unavailable"}
        unavailable = {artifact.id: artifact for artifact in new if artifact.status == "unavailable"}
        new_files = {name for artifact in (*tried.values(), *self.rewritten.values()) for name in own_files(artifact)}
        kept = {}
        for id_, old in self.kept.items():
            if id_ in tried or (id_ in unavailable and old.status != "built"):
                continue
            if id_ not in self.rewritten and new_files.intersection(self.required_files.get(id_, ())):
                self.losses[id_] = "was to be made again, but what comes before it was rejected: see --keep-going"
            elif id_ in unavailable:
                reason = f"kept; it cannot be made again: {unavailable[id_].reason}"
                kept[id_] = old.model_copy(update={"reason": reason})
            else:
                kept[id_] = self.rewritten.get(id_, old)
        self.refuse_losses(ignored=tried)

        def order(artifact: ArtifactManifest) -> tuple[bool, int, bool, int, int]:
            precision, role = _PRECISIONS.index(artifact.precision), _ROLES.index(artifact.role)
            return not artifact.is_graph, precision, artifact.trimmed, role, artifact.exit or 0

        absent = (artifact for id_, artifact in unavailable.items() if id_ not in kept)
        return sorted((*tried.values(), *absent, *kept.values()), key=order)

    def link_kept(self, artifacts: Iterable[ArtifactManifest], folder: Path) -> None:
        """Link the files of artifacts that stay into the new ``folder``. Raises InputError for another tokenizer."""
        for old in (artifact for artifact in artifacts if artifact.kept and artifact.id not in self.rewritten):
            files = own_files(old)
            for name in self.required_files.get(old.id, ()):
                path = folder / name
                if name in files or not path.exists():
                    link(self.folder / name, path)
                elif path.name == TOKENIZER_FILE and sha256_of(path) != self.checksums[name]:
                    self.losses[old.id] = f"{name} is made again with other content"
                    self.refuse_losses()


def graph_files(artifact: ArtifactManifest) -> set[str]:
    """Names of an artifact's graph or engine and its parts in the bundle."""
    return {name for name in (artifact.file, *artifact.parts.values()) if name is not None}


def own_files(artifact: ArtifactManifest) -> set[str]:
    """Names of an artifact's files in the bundle: graph or engine, its parts, and external weights."""
    return graph_files(artifact) | ({artifact.weights_file} if artifact.weights_file is not None else set())


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system has no hard links; never a symbolic link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _source_difference(bundle: Bundle, sources: Mapping[str, str], golden: Mapping[str, Array]) -> str | None:
    """Return why a bundle was not made of this run's model, or None if it was."""
    recorded = bundle.manifest.made_from
    if recorded:
        changed = [name for name, sha256 in sources.items() if recorded.get(name) != sha256]
        return f"made of another {' and '.join(changed)}" if changed else None
    try:  # of an older version, which recorded no sources: compare golden inputs and answers
        arrays = bundle.golden().arrays
    except ArtifactError as error:
        return str(error)
    same_tokenizer = bundle.manifest.files.get(TOKENIZER_FILE) == sources[f"{MODEL_FOLDER}/{TOKENIZER_FILE}"]
    if same_tokenizer and arrays.keys() == golden.keys():
        tolerances = {name: FP32_ABSOLUTE if array.dtype.kind == "f" else 0 for name, array in golden.items()}
        if all(
            array.shape == arrays[name].shape and np.allclose(array, arrays[name], rtol=0, atol=tolerances[name])
            for name, array in golden.items()
        ):
            return None
    return "made of another model, as its golden inputs and answers say"
