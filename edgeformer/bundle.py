"""Bundle: a portable folder of artifacts, tokenizer, labels and manifest. Nobody else reads or writes bundle.json.

No file of a bundle is used before its bytes were compared with the manifest, and none that lies outside of it or that
the manifest has no checksum of. The manifest has one of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from edgeformer.artifacts.bundle_files import TARGETS_FILE, BundleFiles, TargetRecords
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import as_json, read_at_most, write_text
from edgeformer.artifacts.golden import GOLDEN_FILE, Golden, read_golden
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.workspace import (
    BUNDLE_FILE,
    CONFIG_FILE,
    MOST_JSON_BYTES,
    REMEDY,
    TOKENIZER_FILE,
    parse_manifest,
    read_json_bytes,
    read_manifest,
)
from edgeformer.runtimes import ArtifactFiles, OpenOptions, cannot_run, opener_of
from edgeformer.system.leftovers import restore_folder
from edgeformer.system.lock import claiming
from edgeformer.tasks import Task, TextReader, import_task_of, task_named

if TYPE_CHECKING:
    from edgeformer.artifacts.data_config import DataSection
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.session import Session


_ZEROS = "0" * 64
"""Where the manifest's checksum of itself will stand."""


class Bundle:
    """An opened bundle.

    Attributes:
        folder: where it lies.
        manifest: its bundle.json.
        contents: its files against the manifest.
    """

    def __init__(self, folder: Path, manifest: BundleManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.contents = BundleFiles(folder, manifest)
        self._readers: dict[str, TextReader] = {}
        self._golden: dict[str, Golden] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the manifest of the bundle in ``folder``. Raises ArtifactError where it is missing or damaged.

        One that a killed export had moved aside is put back.
        """
        restore_folder(folder)
        path = folder / BUNDLE_FILE
        import_task_of(path)
        content = read_json_bytes(path)
        manifest = parse_manifest(BundleManifest, path, content)
        if manifest.manifest_sha256 not in (None, _sum_of(content, manifest.manifest_sha256)):
            raise ArtifactError(f"{path}: changed since it was exported (it is not what its checksum says); {REMEDY}")
        return cls(folder, manifest)

    # What the manifest says of the model

    @property
    def name(self) -> str:
        """The run that it was exported from, whatever its folder is called by now."""
        return self.manifest.run

    @cached_property
    def task(self) -> Task:
        """What its model is for. Raises ArtifactError for a task that is not known here."""
        return task_named(self.manifest.task)

    @property
    def data(self) -> DataSection:
        """How to find the data again."""
        return self.manifest.data

    @property
    def trained_on(self) -> Mapping[str, str]:
        """Set → fingerprint, as training recorded it."""
        return self.manifest.data_fingerprints

    @property
    def leaks(self) -> bool:
        """Whether its model sees what it is asked to predict."""
        return self.manifest.leaks

    @cached_property
    def loops(self) -> int:
        """How often a step artifact's loop graph is run until the last answer.

        Raises:
            ArtifactError: an older bundle, whose configuration is missing, damaged, or does not say it.
        """
        # Bundles made before `loops` was written: a language model's last exit, or a classifier's iterations.
        older = self.manifest.exits[-1] if self.manifest.exits else None
        return self.manifest.loops or older or self._config_number(CONFIG_FILE, "iterations")

    # Artifacts

    @property
    def artifacts(self) -> tuple[ArtifactManifest, ...]:
        """All that were to be built, in the order of the manifest."""
        return self.manifest.artifacts

    def artifact(self, id_: str) -> ArtifactManifest:
        """The artifact of that id. Raises InputError that lists those there are."""
        for artifact in self.artifacts:
            if artifact.id == id_:
                return artifact
        known = ", ".join(artifact.id for artifact in self.artifacts) or "none"
        raise InputError(f"--artifact {id_}: {self.folder} has {known}")

    def built(self, *roles: str) -> tuple[ArtifactManifest, ...]:
        """The artifacts that were built; with ``roles`` only those of one of them (full, exit, step, decode)."""
        built = (artifact for artifact in self.artifacts if artifact.status == "built" and artifact.file is not None)
        return tuple(artifact for artifact in built if not roles or artifact.role in roles)

    def cannot_run(self, artifact: ArtifactManifest, provider: str | None = None) -> str | None:
        """Why this machine cannot run the artifact: package, libraries, driver, GPU, version; None when it can."""
        return cannot_run(artifact, provider)

    def exits(self, artifact: ArtifactManifest) -> tuple[int, ...]:
        """Loops that an artifact can answer after, in one call, the last one last; empty: it has one answer.

        A step artifact stops where a head was trained; where no exit was trained it has one head for all loops.

        Raises:
            ArtifactError: the configuration is missing or damaged.
        """
        if artifact.role == "step":
            return self.manifest.exits or tuple(range(1, self.loops + 1))
        answer = artifact.exit or (self.manifest.exits[-1] if self.manifest.exits else None)
        return () if answer is None else (answer,)

    @property
    def records(self) -> TargetRecords:
        """targets.json, what its targets found; stale records are among them. Raises ArtifactError: damaged."""
        path = self.folder / TARGETS_FILE
        return read_manifest(TargetRecords, path) if path.is_file() else TargetRecords()

    def record(self, *artifacts: ArtifactManifest) -> Self:
        """Write bundle.json anew with these entries in place of those of their ids, and open that.

        Raises ArtifactError: another process changed or is changing it, or its folder cannot be written.
        """
        fresh = {artifact.id: artifact for artifact in artifacts}
        entries = tuple(fresh.get(entry.id, entry) for entry in self.artifacts)
        with claiming(self.folder):
            if Bundle.open(self.folder).manifest != self.manifest:
                raise ArtifactError(f"{self.folder / BUNDLE_FILE}: changed while it was worked on; start again")
            manifest = seal(self.folder, self.manifest.model_copy(update={"artifacts": entries}))
        return type(self)(self.folder, manifest)

    # Files

    def check(self, artifact: ArtifactManifest) -> Path:
        """The artifact's file, after it and everything that it needs beside it were compared with the manifest.

        Raises:
            ArtifactError: nothing was built, or a file is missing, truncated, changed, not listed or outside.
        """
        if artifact.status != "built" or artifact.file is None:
            reason = f": {artifact.reason}" if artifact.reason else ""
            raise ArtifactError(f"{self.folder}: artifact {artifact.id!r} was not built ({artifact.status}{reason})")
        for name in self.contents.needed_by(artifact):
            self.contents.intact(name, f"{artifact.id} needs {name}")
        self.contents.check_weights(artifact)
        return self.contents.path(artifact.file)

    def files(self, artifact: ArtifactManifest) -> ArtifactFiles:
        """What a backend needs to open the artifact, after :meth:`check`. Raises ArtifactError as that does."""
        file = self.check(artifact)
        parts = {part: self.contents.path(name) for part, name in artifact.parts.items()}
        loops = self.loops if artifact.role == "step" else None
        return ArtifactFiles(artifact, file, parts, loops, self.manifest.max_positions)

    # What is opened

    def reader(self, artifact: ArtifactManifest | None = None) -> TextReader:
        """How the model reads text; an artifact with a trimmed vocabulary has a tokenizer of its own.

        Raises:
            ArtifactError: tokenizer or configuration are missing, changed or damaged.
            InputError: it reads no text.
        """
        if not self.task.reads_text:
            noun, use = self.task.noun, self.task.use
            raise InputError(f"{self.folder}: is a {noun}, which reads no text; use edgeformer {use}")
        where = _beside(artifact)
        if where not in self._readers:
            vocabulary = self._config_number(where + CONFIG_FILE, "vocab_size")
            tokenizer = self._companion(where + TOKENIZER_FILE)
            self._readers[where] = self.task.reader(tokenizer, self.data, vocabulary)
        return self._readers[where]

    def golden(self, artifact: ArtifactManifest | None = None) -> Golden:
        """The golden inputs that an artifact takes, and the answers to them.

        Raises:
            ArtifactError: golden.npz is missing, changed or damaged.
        """
        where = _beside(artifact)
        if where not in self._golden:
            self._golden[where] = read_golden(self._companion(where + GOLDEN_FILE))
        return self._golden[where]

    def session(self, artifact: ArtifactManifest, options: OpenOptions | None = None) -> Session:
        """Compare the artifact's files with the manifest, then open it.

        Args:
            artifact: of this bundle.
            options: how; None: with the backend's choices.

        Raises:
            ArtifactError: nothing was built, or a file is missing, changed or not runnable.
            InputError: the provider is not available here, or rows cannot leave this artifact early.
            MissingDependencyError: the format needs a runtime that is not here.
        """
        options = options or OpenOptions()
        return opener_of(artifact, options.provider).open(self.files(artifact), options)

    def decoder(
        self, artifact: ArtifactManifest, exits: Collection[int], options: OpenOptions | None = None
    ) -> Decoder[Any]:
        """Compare a language model's step or decode artifact with the manifest, then open it to write token by token.

        Args:
            artifact: of this bundle.
            exits: loops that will be asked for logits; a decode artifact answers after the last one only.
            options: how; None: with the backend's choices.

        Raises:
            ArtifactError: nothing was built, or a file is missing, changed or not runnable.
            InputError: this artifact does not write, or not from these exits; the provider is not available here.
        """
        if artifact.role not in ("step", "decode") or not self.task.writes_text:
            raise InputError(f"{self.folder}: {artifact.id!r} keeps nothing of earlier tokens, so it cannot write")
        if artifact.role == "decode" and set(exits) != {self.loops}:
            raise InputError(
                f"{self.folder}: artifact {artifact.id!r} always runs all {self.loops} loops; use a step artifact"
            )
        options = options or OpenOptions()
        return opener_of(artifact, options.provider).open_decoder(self.files(artifact), exits, options)

    def _companion(self, name: str) -> Path:
        """A file that is no artifact (``tokenizer.json``), after it was compared with the manifest."""
        return self.contents.intact(name, f"{name} is needed")

    def _config_number(self, name: str, key: str) -> int:
        path = self._companion(name)
        try:
            return int(json.loads(read_at_most(path, MOST_JSON_BYTES))[key])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ArtifactError(f"{path}: damaged ({key}: {error}); {REMEDY}") from None


def bundle_around(file: Path) -> Path | None:
    """The bundle's folder that a file lies in; None: it lies in none."""
    return next((folder for folder in list(file.resolve().parents)[:3] if (folder / BUNDLE_FILE).is_file()), None)


def seal(folder: Path, manifest: BundleManifest) -> BundleManifest:
    """Write bundle.json and return it as written, with its own checksum."""

    def text(sha256: str) -> str:
        return as_json(manifest.model_copy(update={"manifest_sha256": sha256}))

    sha256 = hashlib.sha256(text(_ZEROS).encode()).hexdigest()
    write_text(folder / BUNDLE_FILE, text(sha256))
    return manifest.model_copy(update={"manifest_sha256": sha256})


def _sum_of(content: bytes, sha256: str | None) -> str:
    """The checksum of a bundle.json whose own is ``sha256``."""
    return hashlib.sha256(content.replace((sha256 or _ZEROS).encode(), _ZEROS.encode())).hexdigest()


def _beside(artifact: ArtifactManifest | None) -> str:
    """The folder of an artifact's tokenizer, configuration and golden inputs, as a prefix of their names."""
    return "" if artifact is None or artifact.companions == "." else f"{artifact.companions}/"
