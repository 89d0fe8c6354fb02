"""JavaScript libraries of a page: files, versions, checksums and locations."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import read_at_most

WASM, WEBGPU = "wasm", "webgpu"
"""ONNX Runtime's names of its providers in a browser."""
CDN = "https://cdn.jsdelivr.net"
"""Source of a page's libraries if no folder of libraries is given."""
_MAX_BYTES, _MAX_PACKAGE_BYTES = 256 << 20, 1 << 20


@dataclass(frozen=True)
class Package:
    """An npm package in the version that pages are tested with."""

    name: str
    version: str


RUNTIME = Package("onnxruntime-web", "1.30.0")
TOKENIZERS = Package("@huggingface/tokenizers", "0.2.0")
"""The tokenizer of Transformers.js."""


@dataclass(frozen=True)
class LibraryFile:
    """One file of a package; ``integrity`` is its subresource integrity."""

    package: Package
    path: str
    integrity: str
    size_bytes: int

    @property
    def address(self) -> str:
        """URL at the CDN."""
        return f"{CDN}/npm/{self.package.name}@{self.package.version}/{self.path}"


@dataclass(frozen=True)
class WebRuntime:
    """ONNX Runtime for one provider: its script, the WebAssembly binary, and the glue script that starts the binary."""

    provider: str
    label: str
    script: LibraryFile
    glue: LibraryFile
    binary: LibraryFile

    @property
    def files(self) -> tuple[LibraryFile, LibraryFile, LibraryFile]:
        """Script, glue and binary."""
        return self.script, self.glue, self.binary


def _runtime_file(name: str, sha384: str, size_bytes: int) -> LibraryFile:
    return LibraryFile(RUNTIME, f"dist/{name}", f"sha384-{sha384}", size_bytes)


# Two builds, because the WebGPU build is slower on WebAssembly: it can be suspended at any point.
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
class LocalFile:
    """A library's file in a local folder; ``version`` is that of package.json, if there is one."""

    content: bytes
    integrity: str
    version: str | None


def select_runtimes(providers: Sequence[str]) -> tuple[WebRuntime, ...]:
    """Return the runtimes of providers (empty: all) in the order of :data:`RUNTIMES`. Raises InputError if unknown."""
    for name in providers:
        if name not in (WASM, WEBGPU):
            raise InputError(f"--provider {name}: browsers have {WASM} and {WEBGPU}")
    return tuple(runtime for runtime in RUNTIMES if not providers or runtime.provider in providers)


def find_local(folder: Path, library: LibraryFile) -> LocalFile:
    """Find a library's file in a folder: an unpacked package, ``node_modules``, or a parent of one of them.

    Raises:
        InputError: it is missing, cannot be read, or is too large.
    """
    name = library.package.name
    last = PurePosixPath(name).name
    is_package = folder.name == last or _package_json(folder).get("name") == name
    for root in (folder / "node_modules" / name, folder / name, *([folder] if is_package else []), folder / last):
        path = root / library.path
        if path.is_file():
            try:
                content = read_at_most(path, _MAX_BYTES)
            except OSError as error:
                raise InputError(f"--libraries: {path} cannot be read: {error.strerror}") from None
            version = _package_json(root).get("version")
            return LocalFile(content, integrity_of(content), version[:40] if isinstance(version, str) else None)
    raise InputError(
        f"--libraries {folder}: has no {name}/{library.path}; npm install {name}@{library.package.version} brings it, "
        "in node_modules"
    )


def integrity_of(content: bytes) -> str:
    """Return the subresource integrity of some bytes."""
    return f"sha384-{base64.b64encode(hashlib.sha384(content).digest()).decode()}"


def _package_json(root: Path) -> dict[str, object]:
    try:
        package = json.loads(read_at_most(root / "package.json", _MAX_PACKAGE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return package if isinstance(package, dict) else {}
