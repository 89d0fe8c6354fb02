"""Bundle: a portable folder of artifacts, tokenizer, labels and manifest. Only this module writes bundle.json.

A file is used only after its bytes were compared with the manifest. Files outside the bundle, and files without a
checksum in the manifest, are never used. The manifest contains a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from edgeformer.artifacts import workspace
from edgeformer.artifacts.bundle_files import TARGETS_FILE, BundleFiles, TargetRecords
from edgeformer.artifacts.errors import ArtifactError, InputError
from edgeformer.artifacts.files import as_json, read_at_most, sha256_of, write_text
from edgeformer.artifacts.golden import GOLDEN_FILE, Golden, read_golden
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.onnx_outline import external_files
from edgeformer.runtimes import ArtifactFiles, OpenOptions, opener_of
from edgeformer.system.leftovers import restore_folder
from edgeformer.system.lock import lock_path
from edgeformer.tasks import RowSource, Task, TextReader, get_task, import_task

if TYPE_CHECKING:
    from edgeformer.runtimes.decoder import Decoder
    from edgeformer.runtimes.session import Session


_ZEROS = "0" * 64  # placeholder for the manifest's own checksum while it is computed


class Bundle:
    """An opened bundle."""

    def __init__(self, folder: Path, manifest: BundleManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.contents = BundleFiles(folder, manifest)  # comparison of its files with the manifest
        self.name = manifest.run  # of the exported run; independent of the folder's name
        self.data = manifest.data
        self.trained_on: Mapping[str, str] = manifest.data_fingerprints  # set → fingerprint
        self.leaks, self.artifacts = manifest.leaks, manifest.artifacts  # of any status
        self._readers: dict[str, TextReader] = {}
        self._golden: dict[str, Golden] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the manifest of the bundle in ``folder``. Raises ArtifactError if it is missing or damaged.

        A bundle that an interrupted export has moved aside is restored first.
        """
        restore_folder(folder)
        path = folder / workspace.BUNDLE_FILE
        import_task(path)
        content = workspace.read_json_bytes(path)
        manifest = workspace.parse_manifest(BundleManifest, path, content)
        recorded = manifest.manifest_sha256
        if recorded is not None:
            unsealed = content.replace(recorded.encode(), _ZEROS.encode())
            if hashlib.sha256(unsealed).hexdigest() != recorded:
                raise ArtifactError(f"{path}: changed since it was exported (its checksum differs); {workspace.REMEDY}")
        return cls(folder, manifest)

    @cached_property
    def task(self) -> Task:
        """The model's task. Raises ArtifactError for an unknown task."""
        return get_task(self.manifest.task)

    @cached_property
    def loops(self) -> int:
        """Number of loops of the model. Raises ArtifactError if an older bundle does not record it."""
        # Older bundles lack `loops`: a language model's last exit, or a classifier's iterations.
        last_exit = self.manifest.exits[-1] if self.manifest.exits else None
        return self.manifest.loops or last_exit or self._config_number(".", "iterations")

    def artifact(self, id_: str) -> ArtifactManifest:
        """Return the artifact with that id. Raises InputError that lists the existing ids."""
        for artifact in self.artifacts:
            if artifact.id == id_:
                return artifact
        ids = ", ".join(artifact.id for artifact in self.artifacts) or "none"
        raise InputError(f"--artifact {id_}: {self.folder} has {ids}")

    def built(self, *roles: str) -> tuple[ArtifactManifest, ...]:
        """Return the artifacts that were built, optionally of some roles only (full, exit, step, decode)."""
        built = (artifact for artifact in self.artifacts if artifact.status == "built" and artifact.file is not None)
        return tuple(artifact for artifact in built if not roles or artifact.role in roles)

    def exits(self, artifact: ArtifactManifest) -> tuple[int, ...]:
        """Return the loops of an artifact's exits in ascending order; empty: a model without loops.

        A step artifact exits at loops with a trained head; without trained exits, one head serves all loops.
        Raises ArtifactError as :attr:`loops` does.
        """
        if artifact.role == "step":
            return self.manifest.exits or tuple(range(1, self.loops + 1))
        answer = artifact.exit or (self.manifest.exits[-1] if self.manifest.exits else None)
        return () if answer is None else (answer,)

    @property
    def records(self) -> TargetRecords:
        """The records of targets.json, stale ones included. Raises ArtifactError if it is damaged."""
        path = self.folder / TARGETS_FILE
        return workspace.read_manifest(TargetRecords, path) if path.is_file() else TargetRecords()

    def record(self, *artifacts: ArtifactManifest) -> Self:
        """Replace the entries with these ids in bundle.json, and return the new bundle.

        Raises ArtifactError if another process has changed or is changing it, or if its folder cannot be written.
        """
        replaced = {artifact.id: artifact for artifact in artifacts}
        entries = tuple(replaced.get(entry.id, entry) for entry in self.artifacts)
        with lock_path(self.folder):
            if Bundle.open(self.folder).manifest != self.manifest:
                raise ArtifactError(f"{self.folder / workspace.BUNDLE_FILE}: changed during this command; start again")
            manifest = seal(self.folder, self.manifest.model_copy(update={"artifacts": entries}))
        return type(self)(self.folder, manifest)

    def check(self, artifact: ArtifactManifest) -> Path:
        """Compare an artifact's files with the manifest, and return the path of the main one.

        Raises ArtifactError: nothing was built, or a file is missing, truncated, changed, not listed or outside.
        """
        if artifact.status != "built" or artifact.file is None:
            reason = f": {artifact.reason}" if artifact.reason else ""
            raise ArtifactError(f"{self.folder}: artifact {artifact.id!r} was not built ({artifact.status}{reason})")
        for name in self.contents.needed_by(artifact):
            self.contents.intact(name, f"{artifact.id} needs {name}")
        # Its graphs may read listed files only. A file that was built for another runtime can be an ONNX graph, too.
        files = (artifact.file, *artifact.parts.values())
        for graph in dict.fromkeys(name for name in files if artifact.is_graph or name.endswith(".onnx")):
            for location in sorted(external_files(self.contents.path(graph))):
                # Joining drops the folder of "/x" and any "./"; a runtime may resolve such names differently.
                if PurePosixPath(location).as_posix() != location or not location:
                    problem = f"reads weights from {location!r}, which is no file name; {workspace.REMEDY}"
                    raise ArtifactError(f"{self.folder / graph}: {problem}")
                name = (PurePosixPath(graph).parent / location).as_posix()
                self.contents.intact(name, f"{graph} reads weights from {name}")
        return self.contents.path(artifact.file)

    def files(self, artifact: ArtifactManifest) -> ArtifactFiles:
        """Check an artifact and return the files that a runtime opens. Raises ArtifactError as :meth:`check` does."""
        file = self.check(artifact)
        parts = {part: self.contents.path(name) for part, name in artifact.parts.items()}
        loops = self.loops if artifact.role in ("step", "decode") else None
        return ArtifactFiles(artifact, file, parts, loops, self.manifest.max_positions)

    def reader(self, artifact: ArtifactManifest | None = None) -> TextReader:
        """Return the tokenizer with the model's limits; an artifact with a trimmed vocabulary has another tokenizer.

        Raises:
            ArtifactError: tokenizer or configuration are missing, changed or damaged.
            InputError: the model reads no text.
        """
        if not isinstance(self.task, RowSource):
            noun, use = self.task.noun, self.task.use
            raise InputError(f"{self.folder}: is a {noun}, which does not read text; use edgeformer {use}")
        folder = artifact.companions if artifact is not None else "."
        if folder not in self._readers:
            vocabulary = self._config_number(folder, "vocab_size")
            tokenizer = self._companion(folder, workspace.TOKENIZER_FILE)
            self._readers[folder] = self.task.reader(tokenizer, self.data, vocabulary, self.tokenizer_config)
        return self._readers[folder]

    def tokenizer_config(self) -> dict[str, Any]:
        """Return tokenizer_config.json, in which special tokens are texts; empty: the bundle has none.

        Raises ArtifactError if it was changed or is damaged.
        """
        if workspace.TOKENIZER_CONFIG not in self.contents.checksums:
            return {}
        return workspace.read_tokenizer_config(self._companion(".", workspace.TOKENIZER_CONFIG))

    def golden(self, artifact: ArtifactManifest | None = None) -> Golden:
        """Return an artifact's golden inputs with the expected answers. Raises ArtifactError if they are damaged."""
        folder = artifact.companions if artifact is not None else "."
        if folder not in self._golden:
            self._golden[folder] = read_golden(self._companion(folder, GOLDEN_FILE))
        return self._golden[folder]

    def session(self, artifact: ArtifactManifest, options: OpenOptions | None = None) -> Session:
        """Compare the artifact's files with the manifest, then open it; without ``options`` by the runtime's defaults.

        Raises:
            ArtifactError: nothing was built, or a file is missing, changed or not runnable.
            InputError: the provider is not available here, or the artifact has no early exit.
            MissingDependencyError: the runtime of its format is not installed.
        """
        options = options or OpenOptions()
        return opener_of(artifact, options.provider).open(self.files(artifact), options)

    def decoder(
        self, artifact: ArtifactManifest, exits: Collection[int], options: OpenOptions | None = None
    ) -> Decoder[Any]:
        """Open a step or decode artifact for generation token by token; otherwise as :meth:`session`.

        ``exits``: loops whose logits are read; a decode artifact has only the last loop's.

        Raises:
            ArtifactError: nothing was built, or a file is missing, changed or not runnable.
            InputError: the artifact cannot generate, or not from these exits; the provider is not available here.
        """
        if artifact.role not in ("step", "decode") or not self.task.can_write:
            raise InputError(
                f"{self.folder}: artifact {artifact.id!r} has no cache of earlier tokens, so it cannot generate text; "
                "use a decode graph or a step artifact"
            )
        if artifact.role == "decode" and set(exits) != {self.loops}:
            raise InputError(
                f"{self.folder}: artifact {artifact.id!r} always runs all {self.loops} loops; use a step artifact"
            )
        options = options or OpenOptions()
        return opener_of(artifact, options.provider).open_decoder(self.files(artifact), exits, options)

    def _companion(self, folder: str, name: str) -> Path:
        """Compare a file beside artifacts (``tokenizer.json``) with the manifest, and return its path."""
        name = name if folder == "." else f"{folder}/{name}"
        return self.contents.intact(name, f"{name} is needed")

    def _config_number(self, folder: str, key: str) -> int:
        path = self._companion(folder, workspace.CONFIG_FILE)
        try:
            return int(json.loads(read_at_most(path, workspace.MOST_JSON_BYTES))[key])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ArtifactError(f"{path}: damaged ({key}: {error}); {workspace.REMEDY}") from None


def find_enclosing_bundle(file: Path) -> Path | None:
    """Return the folder of the bundle that contains a file, or None."""
    folders = list(file.resolve().parents)[:3]
    return next((folder for folder in folders if (folder / workspace.BUNDLE_FILE).is_file()), None)


def checksum_files(
    folder: Path, artifacts: Iterable[ArtifactManifest], names: Iterable[str] | None = None
) -> dict[str, str]:
    """Return name → sha256 of the files in a bundle that are no artifact's main file; None: of all of them."""
    if names is None:
        names = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    listed = sorted(set(names) - {artifact.file for artifact in artifacts})
    return {name: sha256_of(folder / name) for name in listed if (folder / name).is_file()}


def seal(folder: Path, manifest: BundleManifest) -> BundleManifest:
    """Write bundle.json with its own checksum, and return the manifest as written."""
    unsealed = as_json(manifest.model_copy(update={"manifest_sha256": _ZEROS}))
    sealed = manifest.model_copy(update={"manifest_sha256": hashlib.sha256(unsealed.encode()).hexdigest()})
    write_text(folder / workspace.BUNDLE_FILE, as_json(sealed))
    return sealed
