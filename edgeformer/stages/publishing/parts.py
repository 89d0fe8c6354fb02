"""The parts of a page, each copied into its folder and described: graphs, what reads text, golden inputs, libraries."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from tokenizers import Tokenizer

from edgeformer.backends.web.libraries import LibraryFile, find_local
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.onnx_files import external_files
from edgeformer.formats.page import PageArtifact, PageFile, PageReader, PageWeights
from edgeformer.formats.workspace import REMEDY, TOKENIZER_FILE

_MODEL, _LIBRARIES = "model", "libraries"
_TOKENIZER_CONFIG, _GOLDEN = "tokenizer_config.json", "golden.json"
_IDS, _MASK = "input_ids", "attention_mask"


def can_publish(artifact: ArtifactManifest) -> str | None:
    """Why a browser cannot run an artifact in one call; None: it can."""
    if artifact.status != "built" or artifact.file is None:
        return f"{artifact.status}: {artifact.reason or 'no reason given'}"
    if not artifact.is_graph:
        return f"browsers run ONNX graphs, no {artifact.format}"
    if artifact.role not in ("full", "exit"):
        return "it is run in several calls, which pages do not do"
    if unknown := set(artifact.inputs) - {_IDS, _MASK}:
        return f"it takes {', '.join(sorted(unknown))}, which no text gives it"
    return None


class PageFolder:
    """A page that is being written.

    Args:
        folder: its own.
        bundle: that its models are from.
        libraries: folder with npm packages; None: the page gets the libraries from a CDN.
    """

    def __init__(self, folder: Path, bundle: Bundle, libraries: Path | None) -> None:
        self.folder = folder
        self.bundle = bundle
        self._libraries = libraries
        self.versions: dict[str, str] = {}

    def artifact(self, artifact: ArtifactManifest) -> PageArtifact:
        """Copy an artifact's graph and the weights beside it. Raises ArtifactError for a damaged bundle."""
        self.bundle.check(artifact)
        assert artifact.file is not None and artifact.role in ("full", "exit")
        beside = sorted(external_files(self.bundle.contents.path(artifact.file)))
        folder = PurePosixPath(artifact.file).parent
        return PageArtifact(
            id=artifact.id,
            precision=artifact.precision,
            role=artifact.role,
            exit=artifact.exit,
            size_bytes=artifact.size_bytes or 0,
            graph=self._copy(artifact.file),
            weights=tuple(PageWeights(name=name, file=self._copy(str(folder / name))) for name in beside),
            masked=_MASK in artifact.inputs or not artifact.inputs,
            reader=artifact.companions,
        )

    def reader(self, artifact: ArtifactManifest, *, answers: bool) -> PageReader:
        """Copy what an artifact reads text with, and its golden inputs. Raises ArtifactError for a damaged bundle.

        Args:
            artifact: those with a trimmed vocabulary have a tokenizer of their own.
            answers: whether the page answers texts; else golden inputs are all that it needs.
        """
        where = "" if artifact.companions == "." else f"{artifact.companions}/"
        rows = [row.tolist() for row in self.bundle.golden(artifact).texts()]
        golden = self._write(f"{_MODEL}/{where}{_GOLDEN}", json.dumps({"rows": rows}).encode())
        longest = self.bundle.data.tokens_at_once
        if not answers:
            return PageReader(golden=golden, max_tokens=longest)
        tokenizer = self.bundle.reader(artifact).tokenizer
        config = f"{where}{_TOKENIZER_CONFIG}"
        listed = config in self.bundle.contents.checksums
        return PageReader(
            tokenizer=self._copy(f"{where}{TOKENIZER_FILE}"),
            config=self._copy(config) if listed else self._write(f"{_MODEL}/{config}", b"{}"),
            golden=golden,
            max_tokens=longest,
            suffix=_suffix(tokenizer),
        )

    def library(self, wanted: LibraryFile) -> PageFile:
        """A library's file: copied, or its address. Raises InputError where the folder has none."""
        name = wanted.package.name
        if self._libraries is None:
            self.versions[name] = wanted.package.version
            return PageFile(url=wanted.address, integrity=wanted.integrity, size_bytes=wanted.size_bytes)
        found = find_local(self._libraries, wanted)
        self.versions[name] = found.version or "unknown"
        path = f"{_LIBRARIES}/{name.replace('@', '').replace('/', '-')}/{PurePosixPath(wanted.path).name}"
        return self._write(path, found.content, found.integrity)

    def _copy(self, name: str) -> PageFile:
        """A file of the bundle, after it was compared with the manifest; its checksum there is the page's, too."""
        content = self.bundle.contents.intact(name, f"the page needs {name}").read_bytes()
        sha256 = hashlib.sha256(content)
        if sha256.hexdigest() != self.bundle.contents.checksums[name]:
            raise ArtifactError(f"{self.bundle.folder / name}: changed while it was copied; {REMEDY}")
        return self._write(f"{_MODEL}/{name}", content, f"sha256-{base64.b64encode(sha256.digest()).decode()}")

    def _write(self, name: str, content: bytes, integrity: str | None = None) -> PageFile:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        own = f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
        return PageFile(url=quote(name), integrity=integrity or own, size_bytes=len(content))


def _suffix(tokenizer: Tokenizer) -> int:
    """Special tokens that the tokenizer puts behind every text."""
    special = tokenizer.encode("a").special_tokens_mask
    return next((number for number, one in enumerate(reversed(special)) if not one), 0)
