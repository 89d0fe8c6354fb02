"""The existing bundle: what stays when a run is exported again, and what would be lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeformer.artifacts.bundle_files import TARGETS_FILE, TargetRecords
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.golden import GOLDEN_FILE
from edgeformer.artifacts.manifest import ArtifactManifest, Precision
from edgeformer.artifacts.workspace import (
    BUNDLE_FILE,
    CONFIG_FILE,
    MODEL_FOLDER,
    RECIPE_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
)
from edgeformer.bundle import Bundle
from edgeformer.export.variants import ExportOptions, Variant, requested_variants
from edgeformer.models.weights import GOLDEN_INPUTS, WEIGHTS
from edgeformer.runtimes.runtime import Target

SOURCES = (*(f"{MODEL_FOLDER}/{name}" for name in (WEIGHTS, TOKENIZER_FILE, GOLDEN_INPUTS)), RECIPE_FILE)
"""Files of a run that artifacts are made of; all artifacts of a bundle are made of the same."""

_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4", "fp16")
_ROLES = ("full", "exit", "step", "decode")
"""Order in which one export of everything lists artifacts."""


@dataclass
class PreviousBundle:
    """The bundle that is replaced: by id what can stay (``kept``), what is built again, and what would be lost.

    ``losses`` also has files that no manifest lists. ``checksums`` and ``required_files`` are of the files that
    artifacts need; ``records`` are measurements of target devices.
    """

    folder: Path
    kept: dict[str, ArtifactManifest] = field(default_factory=dict)
    losses: dict[str, str] = field(default_factory=dict)
    rebuilt: dict[str, ArtifactManifest] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)
    required_files: dict[str, list[str]] = field(default_factory=dict)
    records: TargetRecords = field(default_factory=TargetRecords)

    @classmethod
    def of(
        cls, folder: Path, options: ExportOptions, targets: Sequence[Target], made_from: Mapping[str, str] | None,
        exits: Collection[int] = (), base_precision: Precision = "fp32",
    ) -> PreviousBundle:  # fmt: skip
        """Compare each file of a bundle with its manifest, and fill ``rebuilt``, ``kept`` and ``losses``.

        Args:
            targets: what the builders can build for on this machine.
            made_from: file of the run → sha256, which artifacts must be made of; None: an imported graph, which is the
                bundle's first artifact and always stays, like files that no manifest lists.
            exits: all exits of the model. A variant that is made again keeps its exits and its step artifact.
            base_precision: precision of the graph that everything is made of.
        """
        # 1. Open the bundle, and compare its origin
        if not folder.exists():
            return cls(folder)
        try:
            bundle = Bundle.open(folder)
        except ArtifactError as error:
            return cls(folder, losses={"every artifact": str(error)})
        previous = cls(folder, notes=bundle.manifest.notes, checksums=bundle.manifest.files)
        difference = None
        if made_from is not None:
            recorded = bundle.manifest.made_from
            changed = [name for name, sha256 in made_from.items() if recorded.get(name) != sha256]
            if changed:
                difference = f"another {' and '.join(changed)}" if recorded else "exported by an older version"
            try:
                previous.records = bundle.records
            except ArtifactError as error:
                previous.losses[TARGETS_FILE] = str(error)
            listed = {*bundle.contents.checksums, BUNDLE_FILE, TARGETS_FILE}
            for path in sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()):
                if path.as_posix() not in listed and not any(part.startswith(".") for part in path.parts):
                    previous.losses[path.as_posix()] = f"not listed in {BUNDLE_FILE}"

        # 2. Decide what stays
        variants, engine_precision = requested_variants(options), "fp16" if options.fp16 else base_precision
        for artifact in bundle.artifacts[made_from is None :]:
            is_built = artifact.status == "built"
            # Devices whose engines get the id of this one; None: an engine for any device. A builder may also make an
            # INT8 of its own.
            has_int8 = artifact.precision == "int8" and options.int8
            devices = [
                target.device
                for target in targets
                if artifact.format == target.format
                and (artifact.precision == (target.precision or engine_precision) or has_int8)
            ]
            is_same_device = [device is None or f".{device}." in str(artifact.file) for device in devices]
            is_rebuilt = any(is_same_device)
            if artifact.is_graph:
                is_rebuilt = Variant(artifact.precision, artifact.trimmed) in variants
            is_rebuilt = is_rebuilt and (artifact.role != "exit" or artifact.exit in exits)
            problem = difference
            if problem is None and not all(is_same_device):
                device = devices[is_same_device.index(False)]
                problem = f"{artifact.file} is for another device than {device}"
            if problem is None and is_built:
                companions = (TOKENIZER_FILE, TOKENIZER_CONFIG, CONFIG_FILE, GOLDEN_FILE) if artifact.trimmed else ()
                names = [f"{artifact.companions}/{name}" for name in companions]
                names = previous.required_files[artifact.id] = [*bundle.contents.needed_by(artifact), *names]
                try:
                    for name in names:
                        bundle.contents.intact(name, f"{artifact.id} needs {name}")
                except ArtifactError as error:
                    problem = str(error)
            if is_rebuilt:
                previous.rebuilt[artifact.id] = artifact
            if problem is None:
                update = {"kept": True, "reason": None if is_built else artifact.reason}
                previous.kept[artifact.id] = artifact.model_copy(update=update)
            elif is_built:
                previous.losses[artifact.id] = problem
        return previous

    def refuse_losses(self, *, ignored: Iterable[str] = ()) -> None:
        """Raise InputError that lists everything that would be lost, except the ``ignored`` ids."""
        by_reason: dict[str, list[str]] = {}
        for name in self.losses.keys() - set(ignored):
            by_reason.setdefault(self.losses[name], []).append(name)
        if by_reason:
            listed = "; ".join(f"{', '.join(sorted(names))} ({why})" for why, names in sorted(by_reason.items()))
            raise InputError(
                f"{self.folder}: this export would delete {listed}; nothing was changed; add the options that make "
                "these artifacts again, or write a new bundle with --replace"
            )

    def merge(self, new: Sequence[ArtifactManifest]) -> list[ArtifactManifest]:
        """Return all artifacts of the new bundle. Raises InputError where a rejected one would cost another."""
        tried = {artifact.id: artifact for artifact in new if artifact.status != "unavailable"}
        unavailable = {artifact.id: artifact for artifact in new if artifact.status == "unavailable"}
        new_files = {name for artifact in tried.values() for name in own_files(artifact)}
        kept = {}
        for id_, old in self.kept.items():
            if id_ in tried or (id_ in unavailable and old.status != "built"):
                continue
            if new_files.intersection(self.required_files.get(id_, ())):
                self.losses[id_] = "not made again, because an earlier artifact was rejected; use --keep-going"
            elif id_ in unavailable:
                reason = f"kept, because it cannot be made again: {unavailable[id_].reason}"
                kept[id_] = old.model_copy(update={"reason": reason})
            else:
                kept[id_] = old
        self.refuse_losses(ignored=tried)

        absent = (artifact for id_, artifact in unavailable.items() if id_ not in kept)
        return sorted(
            (*tried.values(), *absent, *kept.values()),
            key=lambda a: (
                not a.is_graph, _PRECISIONS.index(a.precision), a.trimmed, _ROLES.index(a.role), a.exit or 0
            ),
        )  # fmt: skip

    def link_kept(self, artifacts: Iterable[ArtifactManifest], folder: Path) -> None:
        """Link the files of artifacts that stay into the new ``folder``. Raises InputError for another tokenizer."""
        for old in (artifact for artifact in artifacts if artifact.kept):
            files = own_files(old)
            for name in self.required_files.get(old.id, ()):
                path = folder / name
                if name in files or not path.exists():
                    link(self.folder / name, path)
                elif path.name == TOKENIZER_FILE and sha256_of(path) != self.checksums[name]:
                    self.losses[old.id] = f"needs the previous {name}"
                    self.refuse_losses()


def own_files(artifact: ArtifactManifest) -> set[str]:
    """Names of an artifact's files in the bundle: graph or engine, its parts, and external weights."""
    names = (artifact.file, artifact.weights_file, *artifact.parts.values())
    return {name for name in names if name is not None}


def link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system has no hard links; never a symbolic link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
