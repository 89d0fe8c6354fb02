"""Bundle: a portable folder of artifacts with tokenizer, labels and a manifest. The only reader of bundle.json.

No file of a bundle is used before its bytes were compared with the manifest, and none that lies outside of it or that
the manifest has no checksum of. Each is hashed once per opened bundle.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from edgeformer.backends import ArtifactFiles, OpenOptions, backend_of
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.files import sha256_of
from edgeformer.formats.golden import GOLDEN_FILE, Golden, read_golden
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.report import FileCheck
from edgeformer.formats.workspace import BUNDLE_FILE, CONFIG_FILE, REMEDY, TOKENIZER_FILE, read_manifest
from edgeformer.tasks import Task, TextReader, all_tasks, task_named

if TYPE_CHECKING:
    from edgeformer.backends.decoder import Decoder
    from edgeformer.backends.session import Session


class Bundle:
    """An opened bundle.

    Attributes:
        folder: where it lies.
        manifest: its bundle.json.
    """

    def __init__(self, folder: Path, manifest: BundleManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._checks: dict[str, FileCheck] = {}
        self._readers: dict[str, TextReader] = {}
        self._golden: dict[str, Golden] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the manifest of the bundle in ``folder``. Raises ArtifactError where it is missing or damaged."""
        all_tasks()  # a manifest's scores are recognised by the tasks that are loaded
        return cls(folder, read_manifest(BundleManifest, folder / BUNDLE_FILE))

    @property
    def name(self) -> str:
        """The run that it was exported from, whatever its folder is called by now."""
        return self.manifest.run

    @cached_property
    def task(self) -> Task:
        """What its model is for. Raises ArtifactError for a task that is not known here."""
        return task_named(self.manifest.task)

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

    def cannot_run(self, artifact: ArtifactManifest) -> str | None:
        """Why this machine cannot run the artifact: package, libraries, driver, GPU, version; None when it can."""
        try:
            return backend_of(artifact).cannot_run(artifact)
        except ArtifactError as error:  # nobody knows its format
            return str(error)

    @cached_property
    def loops(self) -> int:
        """How often a step artifact's loop graph is run: to a language model's last exit, or a classifier's iterations.

        Raises:
            ArtifactError: the configuration is missing, damaged, or does not say it.
        """
        if self.manifest.exits:
            return self.manifest.exits[-1]
        return int(self._config_value(CONFIG_FILE, "iterations"))

    def exits(self, artifact: ArtifactManifest) -> tuple[int | None, ...]:
        """The loops that an artifact can answer after, the last one last; None: the only one, whose loop nobody needs.

        A step artifact stops where a head was trained; where no exit was trained it has one head for all loops.

        Raises:
            ArtifactError: the configuration is missing or damaged.
        """
        if artifact.role == "step":
            return self.manifest.exits or tuple(range(1, self.loops + 1))
        last = self.manifest.exits[-1] if self.manifest.exits else None
        return (artifact.exit or last,)

    # Files

    @property
    def checksums(self) -> dict[str, str]:
        """Every file that the manifest vouches for, and its sha256."""
        own = {a.file: a.sha256 for a in self.artifacts if a.file is not None and a.sha256 is not None}
        return {**self.manifest.files, **own}

    def inspect(self, name: str) -> FileCheck:
        """Compare a file with the manifest.

        Args:
            name: relative to the bundle; a file that the manifest has no checksum of is ``unexpected``.

        Raises:
            ArtifactError: it lies outside the bundle.
        """
        if name not in self._checks:
            self._checks[name] = self._compare(name)
        return self._checks[name]

    def companion(self, name: str) -> Path:
        """A file that is no artifact (``tokenizer.json``), after it was compared with the manifest.

        Raises:
            ArtifactError: it is missing, truncated, changed, not listed, or outside the bundle.
        """
        return self._intact(name, f"{name} is needed")

    def check(self, artifact: ArtifactManifest) -> Path:
        """The artifact's file, after it and everything that it needs beside it were compared with the manifest.

        Raises:
            ArtifactError: nothing was built, or a file is missing, truncated, changed, not listed or outside.
        """
        if artifact.status != "built" or artifact.file is None:
            reason = f": {artifact.reason}" if artifact.reason else ""
            raise ArtifactError(f"{self.folder}: artifact {artifact.id!r} was not built ({artifact.status}{reason})")
        for name in self.files_of(artifact):
            self._intact(name, f"{artifact.id} needs {name}")
        return self._inside(artifact.file)

    def files_of(self, artifact: ArtifactManifest) -> list[str]:
        """Names of the files without which the artifact does not run, its own first."""
        own = [name for name in (artifact.file, artifact.weights_file, *artifact.parts.values()) if name is not None]
        beside = self._neighbours(artifact) if len(set(own)) == 1 else ()
        return list(dict.fromkeys((*own, *beside)))

    def files(self, artifact: ArtifactManifest, *, checked: bool = False) -> ArtifactFiles:
        """What a backend needs to open the artifact.

        Args:
            artifact: of this bundle.
            checked: another process has compared its files just now, so that none is hashed again here.

        Raises:
            ArtifactError: as :meth:`check`.
        """
        file = self._inside(str(artifact.file)) if checked else self.check(artifact)
        parts = {part: self._inside(name) for part, name in artifact.parts.items()}
        loops = self.loops if artifact.role == "step" else None
        return ArtifactFiles(artifact, file, parts, loops, self.manifest.max_positions)

    # What is opened

    def reader(self, artifact: ArtifactManifest | None = None) -> TextReader:
        """How the model reads text; an artifact with a trimmed vocabulary has a tokenizer of its own.

        Raises:
            ArtifactError: tokenizer or configuration are missing, changed or damaged.
        """
        where = _beside(artifact)
        if where not in self._readers:
            vocabulary = int(self._config_value(where + CONFIG_FILE, "vocab_size"))
            tokenizer = self.companion(where + TOKENIZER_FILE)
            self._readers[where] = self.task.reader(tokenizer, self.manifest.data, vocabulary)
        return self._readers[where]

    def golden(self, artifact: ArtifactManifest | None = None) -> Golden:
        """The golden inputs that an artifact takes, and the answers to them.

        Raises:
            ArtifactError: golden.npz is missing, changed or damaged.
        """
        where = _beside(artifact)
        if where not in self._golden:
            self._golden[where] = read_golden(self.companion(where + GOLDEN_FILE))
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
        return backend_of(artifact).open(self.files(artifact), options or OpenOptions())

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
            raise InputError(
                f"{self.folder}: artifact {artifact.id!r} keeps nothing of earlier tokens, so it cannot write"
            )
        if artifact.role == "decode" and set(exits) != {self.loops}:
            raise InputError(
                f"{self.folder}: artifact {artifact.id!r} always runs all {self.loops} loops; use a step artifact"
            )
        return backend_of(artifact).open_decoder(self.files(artifact), exits, options or OpenOptions())

    def _compare(self, name: str) -> FileCheck:
        path, sha256 = self._inside(name), self.checksums.get(name)
        if sha256 is None:
            return FileCheck(file=name, status="unexpected", detail=f"{BUNDLE_FILE} has no checksum of it")
        try:
            actual_bytes = path.stat().st_size
            if sha256_of(path) == sha256:
                return FileCheck(file=name, status="intact")
        except FileNotFoundError:
            return FileCheck(file=name, status="missing")
        except OSError as error:
            return FileCheck(file=name, status="missing", detail=f"cannot be read: {error.strerror}")
        size_bytes = self._size_of(name)
        if size_bytes is not None and actual_bytes < size_bytes:
            detail = f"{actual_bytes:,} of {size_bytes:,} bytes are there"
            return FileCheck(file=name, status="truncated", detail=detail)
        return FileCheck(file=name, status="changed", detail=f"its sha256 is not the one in {BUNDLE_FILE}")

    def _intact(self, name: str, need: str) -> Path:
        path, check = self._inside(name), self.inspect(name)
        if check.status == "intact":
            return path
        if check.status == "unexpected":
            raise ArtifactError(f"{self.folder / BUNDLE_FILE}: {need}, which is not listed with a checksum; {REMEDY}")
        what = {
            "missing": check.detail or "cannot be read: it is missing",
            "truncated": f"truncated: {check.detail}",
            "changed": f"changed since it was exported (its sha256 differs from {BUNDLE_FILE})",
        }
        raise ArtifactError(f"{path}: {what[check.status]}; {REMEDY}")

    def _inside(self, name: str) -> Path:
        pure, path = PurePosixPath(name), self.folder / name
        foreign = pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name
        if foreign or not path.resolve().is_relative_to(self.folder.resolve()):
            raise ArtifactError(
                f"{self.folder / BUNDLE_FILE}: names {name!r}, which lies outside the bundle; do not use it"
            )
        return path

    def _size_of(self, name: str) -> int | None:
        """Bytes of an artifact that is one file; a size that counts parts or weights beside it says nothing of it."""
        for artifact in self.artifacts:
            if artifact.file == name and not artifact.parts and artifact.weights_file is None:
                return artifact.size_bytes
        return None

    def _neighbours(self, artifact: ArtifactManifest) -> Iterator[str]:
        """The bundle's other files in the same folder: of an older bundle they may be weights. Parts are not."""
        folder = PurePosixPath(str(artifact.file)).parent
        parts = {part for other in self.artifacts for part in other.parts.values()}
        for name in self.manifest.files:
            if folder != PurePosixPath() and PurePosixPath(name).parent == folder and name not in parts:
                yield name

    def _config_value(self, name: str, key: str) -> Any:
        path = self.companion(name)
        try:
            return json.loads(path.read_text(encoding="utf-8"))[key]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{path}: damaged ({key}: {error}); {REMEDY}") from None


def _beside(artifact: ArtifactManifest | None) -> str:
    """The folder of an artifact's tokenizer, configuration and golden inputs, as a prefix of their names."""
    return "" if artifact is None or artifact.companions == "." else f"{artifact.companions}/"


def read_bundle(folder: Path) -> BundleManifest:
    """The manifest of the bundle in ``folder``, where nothing else of it is wanted. Raises ArtifactError."""
    return Bundle.open(folder).manifest
