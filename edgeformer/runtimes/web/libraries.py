"""The JavaScript libraries of a page: which files, of which versions, with which checksums, and where they lie."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import read_at_most

WASM, WEBGPU = "wasm", "webgpu"
"""What computes in a browser, as ONNX Runtime calls it there."""
CDN = "https://cdn.jsdelivr.net"
"""Where a page gets its libraries from that was made without a folder of them."""
_MOST_BYTES, _MOST_PACKAGE_BYTES = 256 << 20, 1 << 20


@dataclass(frozen=True)
class Package:
    """A package of npm, in the version that pages were tried with."""

    name: str
    version: str


RUNTIME = Package("onnxruntime-web", "1.30.0")
TOKENIZERS = Package("@huggingface/tokenizers", "0.2.0")
"""The part of Transformers.js that makes tokens of text."""


@dataclass(frozen=True)
class LibraryFile:
    """One file of a package.

    Attributes:
        path: in the package.
        integrity: subresource integrity of the file in that version of the package.
        size_bytes: its size there.
    """

    package: Package
    path: str
    integrity: str
    size_bytes: int

    @property
    def address(self) -> str:
        """At the CDN."""
        return f"{CDN}/npm/{self.package.name}@{self.package.version}/{self.path}"


@dataclass(frozen=True)
class WebRuntime:
    """ONNX Runtime for one provider.

    Attributes:
        provider: what computes.
        label: for people.
        script: ONNX Runtime itself.
        glue: what starts the binary, also in its threads.
        binary: its WebAssembly.
    """

    provider: str
    label: str
    script: LibraryFile
    glue: LibraryFile
    binary: LibraryFile

    @property
    def files(self) -> tuple[LibraryFile, LibraryFile, LibraryFile]:
        """All of them."""
        return self.script, self.glue, self.binary


def _runtime_file(name: str, sha384: str, size_bytes: int) -> LibraryFile:
    return LibraryFile(RUNTIME, f"dist/{name}", f"sha384-{sha384}", size_bytes)


# Not one build for both: the one for WebGPU computes more slowly without it, because it can be suspended anywhere.
RUNTIMES = (
    WebRuntime(
        WASM,
        "WebAssembly (processor)",
        _runtime_file("ort.wasm.min.mjs", "SfFfy/pvthiOsgaw3KX0bV5TfQ6Iq+oY9KutMe4SxIuHH4cl+DCSD4rTsYOoG1tJ", 50_126),
        _runtime_file(
            "ort-wasm-simd-threaded.mjs", "XcXA/MtAf0WpB8e023xQH9CM7RIjiugakT7x99DIwpFf7k56BIFFcAPerIF7FDad", 24_381
        ),
        _runtime_file(
            "ort-wasm-simd-threaded.wasm",
            "vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
            14_239_897,
        ),
    ),
    WebRuntime(
        WEBGPU,
        "WebGPU (graphics chip)",
        _runtime_file("ort.webgpu.min.mjs", "FPQBMbud8ICuP0Ii+Gr95KWEX9pKHtUC3lacIp0aPI8WYluKvTsEGQ3AE2Ze3QlL", 66_349),
        _runtime_file(
            "ort-wasm-simd-threaded.asyncify.mjs",
            "qViEcCGzsR/m8nlQwIsbYh7afN4thuraqFYDQY6huvmoLVoZq/eYawQ1wrv8nnhA",
            53_057,
        ),
        _runtime_file(
            "ort-wasm-simd-threaded.asyncify.wasm",
            "EPVDLTxuO663dkZO/pcKJF6vOyyfq/5z9FY1oksN0UWFX2ABH4wDDZQHeNoUleWR",
            26_781_914,
        ),
    ),
)
TOKENIZER_LIBRARY = LibraryFile(
    TOKENIZERS,
    "dist/tokenizers.min.mjs",
    "sha384-Tl2lMbeE3RCGFLOUGQ7LhvaagysxiOw/9dulz2sD6jxNa1MckRJQBbYdVHhOoqEs",
    36_601,
)


@dataclass(frozen=True)
class FoundFile:
    """A library's file in a local folder.

    Attributes:
        content: its bytes.
        integrity: theirs, whatever the version.
        version: as its package.json says; None: there is none.
    """

    content: bytes
    integrity: str
    version: str | None


def runtimes_named(providers: Sequence[str]) -> tuple[WebRuntime, ...]:
    """The runtimes of some providers, in the order of :data:`RUNTIMES`. Raises InputError for an unknown one."""
    known = [runtime.provider for runtime in RUNTIMES]
    if unknown := [name for name in providers if name not in known]:
        raise InputError(f"--provider {unknown[0]}: browsers have {' and '.join(known)}")
    return tuple(runtime for runtime in RUNTIMES if not providers or runtime.provider in providers)


def find_local(folder: Path, wanted: LibraryFile) -> FoundFile:
    """A library's file in a folder: an unpacked package, ``node_modules``, or what holds one of them.

    Raises:
        InputError: it is not there, cannot be read, or is too large.
    """
    for root in _roots(folder, wanted.package.name):
        path = root / wanted.path
        if path.is_file():
            try:
                content = read_at_most(path, _MOST_BYTES)
            except OSError as error:
                raise InputError(f"--libraries: {path} cannot be read: {error.strerror}") from None
            return FoundFile(content, integrity_of(content), _version_in(root))
    package = f"{wanted.package.name}@{wanted.package.version}"
    raise InputError(
        f"--libraries {folder}: has no {wanted.package.name}/{wanted.path}; npm install {package} brings it, in "
        "node_modules"
    )


def integrity_of(content: bytes) -> str:
    """Subresource integrity of some bytes."""
    return f"sha384-{base64.b64encode(hashlib.sha384(content).digest()).decode()}"


def _roots(folder: Path, name: str) -> Iterator[Path]:
    yield folder / "node_modules" / name
    yield folder / name
    last = PurePosixPath(name).name
    if folder.name == last or _name_in(folder) == name:
        yield folder
    yield folder / last


def _package(root: Path) -> dict[str, object]:
    try:
        found = json.loads(read_at_most(root / "package.json", _MOST_PACKAGE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _name_in(root: Path) -> str | None:
    name = _package(root).get("name")
    return name if isinstance(name, str) else None


def _version_in(root: Path) -> str | None:
    version = _package(root).get("version")
    return version[:40] if isinstance(version, str) else None
