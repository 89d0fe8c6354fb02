"""The bundle that is there already: what of it stays when the run is exported again, and what would be lost."""

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
from edgeformer.artifacts.workspace import BUNDLE_FILE, BUNDLE_FOLDER, CONFIG_FILE, RECIPE_FILE, TOKENIZER_FILE
from edgeformer.bundle import Bundle
from edgeformer.export.bundle_folder import TOKENIZER_CONFIG
from edgeformer.export.exportable import Exportable
from edgeformer.export.graphs import Written
from edgeformer.export.variants import ExportOptions, Variant, variants_asked
from edgeformer.models.weights import GOLDEN_INPUTS, MODEL_FOLDER, WEIGHTS
from edgeformer.runtimes.runtime import Target
from edgeformer.tasks.parity import TOLERANCES

SOURCES = (*(f"{MODEL_FOLDER}/{name}" for name in (WEIGHTS, TOKENIZER_FILE, GOLDEN_INPUTS)), RECIPE_FILE)
"""Files of a run: artifacts of one bundle are all made of the same."""

_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4", "fp16")
_ROLES = ("full", "exit", "step", "decode")


def made_from(run: Path) -> dict[str, str]:
    """The sha256 of each of ``SOURCES``."""
    return {name: sha256_of(run / name) for name in SOURCES}


@dataclass(frozen=True)
class Asked:
    """Which artifacts an export will try to make.

    Attributes:
        exits: loops whose exits become graphs.
        targets: what the builders can build for here.
        whole: precision of the graph that everything is made of.
    """

    options: ExportOptions
    exits: Sequence[int]
    targets: Sequence[Target]
    whole: Precision = "fp32"

    def again(self, old: ArtifactManifest) -> bool:
        """Whether it will make this artifact anew."""
        form = {"exit": old.exit in self.exits, "step": self.options.exits == "all"}.get(old.role, True)
        if old.is_graph:
            return form and Variant(old.precision, old.trimmed) in variants_asked(self.options)
        return form and any(self._same(old, target) and _built_for(old, target) for target in self.targets)

    def displaced(self, old: ArtifactManifest) -> str | None:
        """Why an engine cannot stay although nobody makes it anew: another device's will have its id."""
        for target in self.targets if not old.is_graph else ():
            if self._same(old, target) and not _built_for(old, target):
                return f"{old.file} is for another device than --target {target.device}"
        return None

    def _same(self, old: ArtifactManifest, target: Target) -> bool:
        asked = {target.precision or ("fp16" if self.options.fp16 else self.whole)}
        if target.device is not None and self.options.int8:
            asked.add("int8")  # engines have an INT8 of their own
        return old.format == target.format and old.precision in asked


def _built_for(old: ArtifactManifest, target: Target) -> bool:
    return target.device is None or f".{target.device}." in str(old.file)


@dataclass
class Previous:
    """What was in the bundle before.

    Attributes:
        folder: of that bundle.
        stays: what can stay: artifacts that were built, and what is known of those that were not.
        lost: id of an artifact, or a file that no manifest lists → why it cannot stay.
        again: ids of what is going to be made anew.
        notes: of that bundle.
        files: that its artifacts need beside themselves → sha256.
        needed: id → names of the files that it needs.
        carried: id → the artifact as it was written anew, because its weights got another place.
        records: what targets found of its artifacts.
    """

    folder: Path
    stays: dict[str, ArtifactManifest] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    needed: dict[str, list[str]] = field(default_factory=dict)
    carried: dict[str, ArtifactManifest] = field(default_factory=dict)
    records: TargetRecords = field(default_factory=TargetRecords)

    @classmethod
    def read(cls, run: Path, subject: Exportable, source: Mapping[str, str], asked: Asked) -> Previous:
        """Look at the bundle of ``run``, each file of which is compared with its manifest.

        Args:
            source: what the artifacts are made of now.
            subject: the whole model, by which a bundle is told that does not say what it was made of.
            asked: what is going to be made anew.
        """
        folder = run / BUNDLE_FOLDER
        if not folder.exists():
            return cls(folder)
        try:
            bundle = Bundle.open(folder)
        except ArtifactError as error:
            return cls(folder, lost={"everything in it": str(error)})
        found = cls(folder, notes=bundle.manifest.notes, files=bundle.manifest.files)
        try:
            found.records = bundle.records
        except ArtifactError as error:
            found.lost[TARGETS_FILE] = str(error)
        found._look(bundle, bundle.artifacts, asked, _not_made_of(bundle, source, subject))
        listed = {*bundle.contents.checksums, BUNDLE_FILE, TARGETS_FILE}
        for path in sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()):
            if path.as_posix() not in listed and not any(part.startswith(".") for part in path.parts):
                found.lost[path.as_posix()] = f"{BUNDLE_FILE} does not list it"
        return found

    @classmethod
    def beside(cls, bundle: Bundle, asked: Asked) -> Previous:
        """Look at what was made of a wrapped graph, which is the bundle's first artifact and always stays."""
        found = cls(bundle.folder, notes=bundle.manifest.notes, files=bundle.manifest.files)
        found._look(bundle, bundle.artifacts[1:], asked, None)
        return found

    def _look(self, bundle: Bundle, artifacts: Iterable[ArtifactManifest], asked: Asked, foreign: str | None) -> None:
        """Find what is made again, what stays and what would be lost; ``foreign``: why all of it would be."""
        for artifact in artifacts:
            built = artifact.status == "built"
            problem = foreign or asked.displaced(artifact) or (self._damage(bundle, artifact) if built else None)
            if asked.again(artifact):
                self.again.add(artifact.id)
            if problem is None:
                told = {"kept": True, "reason": None if built else artifact.reason}
                self.stays[artifact.id] = artifact.model_copy(update=told)
            elif built:
                self.lost[artifact.id] = problem

    def _damage(self, bundle: Bundle, artifact: ArtifactManifest) -> str | None:
        beside = (TOKENIZER_FILE, TOKENIZER_CONFIG, CONFIG_FILE, GOLDEN_FILE) if artifact.trimmed else ()
        names = [*bundle.contents.needed_by(artifact), *(f"{artifact.companions}/{name}" for name in beside)]
        self.needed[artifact.id] = names
        try:
            for name in names:
                bundle.contents.intact(name, f"{artifact.id} needs {name}")
        except ArtifactError as error:
            return str(error)
        return None

    def refuse_to_lose(self, but: Iterable[str]) -> None:
        """Raise InputError with everything that would be lost, ``but`` for these ids."""
        reasons: dict[str, list[str]] = {}
        for what in self.lost.keys() - set(but):
            reasons.setdefault(self.lost[what], []).append(what)
        if reasons:
            listed = "; ".join(f"{', '.join(sorted(what))} ({why})" for why, what in sorted(reasons.items()))
            raise InputError(
                f"{self.folder}: this export would lose {listed}. The bundle is as it was: ask for what can be made "
                "again too, or make the bundle from nothing with --replace"
            )

    def graphs(self, variant: Variant) -> dict[str, Path]:
        """Name in the bundle → path of the graphs of a variant that can stay."""
        return {name: self.folder / name for old in self._graphs(variant) for name in _graph_files(old)}

    def carry(self, variant: Variant, written: Written, folder: Path) -> None:
        """Take note of the graphs that were written anew into ``folder``, because their weights got another place."""
        for old in self._graphs(variant):
            names = _graph_files(old)
            if names <= set(written.others):
                told = {
                    "size_bytes": sum(written.others[name] for name in names),
                    "sha256": sha256_of(folder / str(old.file)),
                    "weights_file": variant.weights,
                }
                self.carried[old.id] = old.model_copy(update=told)

    def _graphs(self, variant: Variant) -> list[ArtifactManifest]:
        built = [old for old in self.stays.values() if old.status == "built" and old.is_graph]
        return [old for old in built if Variant(old.precision, old.trimmed) == variant]

    def with_made(self, made: Sequence[ArtifactManifest]) -> list[ArtifactManifest]:
        """All artifacts of the new bundle: what was made, or was tried, and what stays.

        Raises:
            InputError: something would be lost, because what came before it was rejected.
        """
        tried = {artifact.id: artifact for artifact in made if artifact.status != "unavailable"}
        absent = {artifact.id: artifact for artifact in made if artifact.status == "unavailable"}
        taken = {name for artifact in (*tried.values(), *self.carried.values()) for name in own_files(artifact)}
        kept = {}
        for id_, old in self.stays.items():
            if id_ in tried or (id_ in absent and old.status != "built"):
                continue
            if id_ not in self.carried and taken.intersection(self.needed.get(id_, ())):
                self.lost[id_] = "was to be made again, but what comes before it was rejected: see --keep-going"
            elif id_ in absent:
                kept[id_] = old.model_copy(update={"reason": f"kept; it cannot be made again: {absent[id_].reason}"})
            else:
                kept[id_] = self.carried.get(id_, old)
        self.refuse_to_lose(but=tried)
        return sorted((*tried.values(), *(a for a in absent.values() if a.id not in kept), *kept.values()), key=_order)

    def bring(self, artifacts: Iterable[ArtifactManifest], folder: Path) -> None:
        """Bring the files of the artifacts that stay into ``folder``, where everything that was made is already.

        Raises:
            InputError: a trimmed artifact does not fit the tokenizer that was made now.
        """
        for old in (artifact for artifact in artifacts if artifact.kept and artifact.id not in self.carried):
            own = own_files(old)
            for name in self.needed.get(old.id, ()):
                path = folder / name
                if name in own or not path.exists():
                    link(self.folder / name, path)
                elif path.name == TOKENIZER_FILE and sha256_of(path) != self.files[name]:
                    self.lost[old.id] = f"{name} is made anew, and is another one"
                    self.refuse_to_lose(but=())

    def bring_records(self, manifest: BundleManifest, folder: Path) -> None:
        """Bring what targets found of artifacts that are still the same."""
        if (kept := self.records.of(manifest)).records:
            write_json(folder / TARGETS_FILE, kept)

    def with_notes(self, notes: Sequence[str]) -> tuple[str, ...]:
        """The notes, and those of before that none of them says anew."""
        said = {note.partition(":")[0] for note in notes}
        return (*notes, *(note for note in self.notes if note.partition(":")[0] not in said))


def _graph_files(artifact: ArtifactManifest) -> set[str]:
    return {name for name in (artifact.file, *artifact.parts.values()) if name is not None}


def own_files(artifact: ArtifactManifest) -> set[str]:
    """Names of an artifact's files in the bundle: its graph or engine, the parts of one, weights that lie beside it."""
    return _graph_files(artifact) | ({artifact.weights_file} if artifact.weights_file is not None else set())


def _order(artifact: ArtifactManifest) -> tuple[bool, int, bool, int, int]:
    """As an export that makes all of them lists them."""
    precision, role = _PRECISIONS.index(artifact.precision), _ROLES.index(artifact.role)
    return not artifact.is_graph, precision, artifact.trimmed, role, artifact.exit or 0


def link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the file system has no such thing; never a symbolic link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _not_made_of(bundle: Bundle, source: Mapping[str, str], subject: Exportable) -> str | None:
    """Why a bundle is none of this run's model as it is now; None: it is.

    One that does not say what it was made of has to hold the same golden inputs and the run's tokenizer, and its golden
    answers have to be torch's by the bar that FP32 graphs are held to: whatever gives them is as good as this model.
    """
    recorded = bundle.manifest.made_from
    if recorded:
        changed = [name for name, sha256 in source.items() if recorded.get(name) != sha256]
        return f"made of another {' and '.join(changed)}" if changed else None
    try:
        before = bundle.golden().arrays
    except ArtifactError as error:
        return str(error)
    unknown = "made of another model, as its golden inputs and answers say"
    tokenizer = source[f"{MODEL_FOLDER}/{TOKENIZER_FILE}"]
    if before.keys() != subject.golden.keys() or bundle.manifest.files.get(TOKENIZER_FILE) != tokenizer:
        return unknown
    for name, array in subject.golden.items():
        bar = TOLERANCES["fp32"][1] if array.dtype.kind == "f" else 0
        if array.shape != before[name].shape or not np.allclose(array, before[name], rtol=0, atol=bar or 0):
            return unknown
    return None
