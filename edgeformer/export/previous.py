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
from edgeformer.artifacts.files import sha256_of, write_json
from edgeformer.artifacts.golden import GOLDEN_FILE
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest, Precision
from edgeformer.artifacts.workspace import BUNDLE_FILE, CONFIG_FILE, RECIPE_FILE, TOKENIZER_FILE
from edgeformer.bundle import Bundle
from edgeformer.export.graphs import Written
from edgeformer.export.variants import ExportOptions, Variant, requested_variants
from edgeformer.models.weights import GOLDEN_INPUTS, MODEL_FOLDER, WEIGHTS
from edgeformer.runtimes.runtime import Target
from edgeformer.runtimes.session import Array
from edgeformer.tasks.parity import FP32_ABSOLUTE

TOKENIZER_CONFIG = "tokenizer_config.json"
SOURCES = (*(f"{MODEL_FOLDER}/{name}" for name in (WEIGHTS, TOKENIZER_FILE, GOLDEN_INPUTS)), RECIPE_FILE)
"""Files of a run that artifacts are made of; all artifacts of a bundle are made of the same."""

_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4", "fp16")
_ROLES = ("full", "exit", "step", "decode")


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
        return any(_is_for_device(old, target) for target in self._targets_of(old))

    def replaces_device(self, old: ArtifactManifest) -> str | None:
        """Return why an engine is lost although it is not built again: another device's engine gets its id."""
        for target in self._targets_of(old):
            if not _is_for_device(old, target):
                return f"{old.file} is for another device than --target {target.device}"
        return None

    def _targets_of(self, old: ArtifactManifest) -> list[Target]:
        """Targets whose engines get the same id as ``old``."""
        if old.is_graph:
            return []
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


def _is_for_device(old: ArtifactManifest, target: Target) -> bool:
    return target.device is None or f".{target.device}." in str(old.file)


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
        """Look at the bundle of a run, and compare each of its files with its manifest.

        Args:
            golden: golden inputs and answers of the run's model.
            sources: file of the run → sha256, as of ``SOURCES``.
        """
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
                problem = self._damage(bundle, artifact)
            if requested.includes(artifact):
                self.rebuilt.add(artifact.id)
            if problem is None:
                update = {"kept": True, "reason": None if is_built else artifact.reason}
                self.kept[artifact.id] = artifact.model_copy(update=update)
            elif is_built:
                self.losses[artifact.id] = problem

    def _damage(self, bundle: Bundle, artifact: ArtifactManifest) -> str | None:
        companions = (TOKENIZER_FILE, TOKENIZER_CONFIG, CONFIG_FILE, GOLDEN_FILE) if artifact.trimmed else ()
        names = [*bundle.contents.needed_by(artifact), *(f"{artifact.companions}/{name}" for name in companions)]
        self.required_files[artifact.id] = names
        try:
            for name in names:
                bundle.contents.intact(name, f"{artifact.id} needs {name}")
        except ArtifactError as error:
            return str(error)
        return None

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

    def graph_paths(self, variant: Variant) -> dict[str, Path]:
        """Name in the bundle → path of every graph of a variant that can stay."""
        return {name: self.folder / name for old in self._graphs(variant) for name in _graph_files(old)}

    def note_rewritten(self, variant: Variant, written: Written, folder: Path) -> None:
        """Note the graphs that were written again into ``folder``, with other offsets of shared weights."""
        for old in self._graphs(variant):
            names = _graph_files(old)
            if names <= set(written.rewritten_sizes):
                update = {
                    "size_bytes": sum(written.rewritten_sizes[name] for name in names),
                    "sha256": sha256_of(folder / str(old.file)),
                    "weights_file": variant.weights,
                }
                self.rewritten[old.id] = old.model_copy(update=update)

    def _graphs(self, variant: Variant) -> list[ArtifactManifest]:
        built = [old for old in self.kept.values() if old.status == "built" and old.is_graph]
        return [old for old in built if Variant(old.precision, old.trimmed) == variant]

    def merge(self, new: Sequence[ArtifactManifest]) -> list[ArtifactManifest]:
        """Return all artifacts of the new bundle: new ones (built or rejected), and those that stay.

        Raises:
            InputError: an artifact would be lost, because one that it depends on was rejected.
        """
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
        absent = (artifact for id_, artifact in unavailable.items() if id_ not in kept)
        return sorted((*tried.values(), *absent, *kept.values()), key=_order)

    def link_kept(self, artifacts: Iterable[ArtifactManifest], folder: Path) -> None:
        """Link the files of artifacts that stay into ``folder``, after everything new was written there.

        Raises:
            InputError: a trimmed artifact does not match the new tokenizer.
        """
        for old in (artifact for artifact in artifacts if artifact.kept and artifact.id not in self.rewritten):
            files = own_files(old)
            for name in self.required_files.get(old.id, ()):
                path = folder / name
                if name in files or not path.exists():
                    link(self.folder / name, path)
                elif path.name == TOKENIZER_FILE and sha256_of(path) != self.checksums[name]:
                    self.losses[old.id] = f"{name} is made again with other content"
                    self.refuse_losses()

    def write_records(self, manifest: BundleManifest, folder: Path) -> None:
        """Write the target devices' records of artifacts that did not change."""
        if (kept := self.records.of(manifest)).records:
            write_json(folder / TARGETS_FILE, kept)

    def merge_notes(self, notes: Sequence[str]) -> tuple[str, ...]:
        """Return the notes, and older ones whose subject (the text before a colon) none of them has."""
        subjects = {note.partition(":")[0] for note in notes}
        return (*notes, *(note for note in self.notes if note.partition(":")[0] not in subjects))


def _graph_files(artifact: ArtifactManifest) -> set[str]:
    return {name for name in (artifact.file, *artifact.parts.values()) if name is not None}


def own_files(artifact: ArtifactManifest) -> set[str]:
    """Names of an artifact's files in the bundle: graph or engine, its parts, and external weights."""
    return _graph_files(artifact) | ({artifact.weights_file} if artifact.weights_file is not None else set())


def _order(artifact: ArtifactManifest) -> tuple[bool, int, bool, int, int]:
    """Sort key: the order in which one export of everything lists artifacts."""
    precision, role = _PRECISIONS.index(artifact.precision), _ROLES.index(artifact.role)
    return not artifact.is_graph, precision, artifact.trimmed, role, artifact.exit or 0


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system has no hard links; never a symbolic link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _source_difference(bundle: Bundle, sources: Mapping[str, str], golden: Mapping[str, Array]) -> str | None:
    """Return why a bundle was not made of this run's model, or None if it was.

    A bundle without recorded sources must hold the same golden inputs, the run's tokenizer, and golden answers within
    the tolerance of FP32 graphs.
    """
    recorded = bundle.manifest.made_from
    if recorded:
        changed = [name for name, sha256 in sources.items() if recorded.get(name) != sha256]
        return f"made of another {' and '.join(changed)}" if changed else None
    try:
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
