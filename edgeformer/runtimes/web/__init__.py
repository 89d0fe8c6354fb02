"""Browsers: their providers, and the JavaScript libraries of a page: files, versions, checksums and locations.

This runtime opens no sessions.
"""

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar, NamedTuple

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import read_at_most
from edgeformer.runtimes.runtime import ProviderFacts, Runtime
from edgeformer.system.capability import Capability

WASM, WEBGPU = "wasm", "webgpu"
"""ONNX Runtime's names of its providers in a browser."""
CDN = "https://cdn.jsdelivr.net"
"""Source of a page's libraries if no folder of libraries is given."""
_MAX_BYTES, _MAX_PACKAGE_BYTES = 256 << 20, 1 << 20


class Package(NamedTuple):
    """An npm package in the version that pages are tested with."""

    name: str
    version: str


ORT_WEB = Package("onnxruntime-web", "1.30.0")
TOKENIZERS = Package("@huggingface/tokenizers", "0.2.0")
"""The tokenizer of Transformers.js."""


class LibraryFile(NamedTuple):
    """One file of a package; ``sha384`` is its subresource integrity."""

    package: Package
    path: str
    size_bytes: int
    sha384: str


class WebRuntime(NamedTuple):
    """ONNX Runtime for one provider: its script, the WebAssembly binary, and the glue script that starts the binary."""

    provider: str
    label: str
    script: LibraryFile
    glue: LibraryFile
    binary: LibraryFile


TOKENIZER_LIBRARY = LibraryFile(
    TOKENIZERS, "dist/tokenizers.min.mjs", 36_601, "Tl2lMbeE3RCGFLOUGQ7LhvaagysxiOw/9dulz2sD6jxNa1MckRJQBbYdVHhOoqEs"
)
# Two builds, because the WebGPU build is slower on WebAssembly: it can be suspended at any point.
RUNTIMES = tuple(
    WebRuntime(provider, label, *(LibraryFile(ORT_WEB, f"dist/{file}", size, digest) for file, size, digest in files))
    for provider, label, files in (
        (WASM, "WebAssembly (processor)", (
            ("ort.wasm.min.mjs", 50_126, "SfFfy/pvthiOsgaw3KX0bV5TfQ6Iq+oY9KutMe4SxIuHH4cl+DCSD4rTsYOoG1tJ"),
            ("ort-wasm-simd-threaded.mjs", 24_381, "XcXA/MtAf0WpB8e023xQH9CM7RIjiugakT7x99DIwpFf7k56BIFFcAPerIF7FDad"),
            (
                "ort-wasm-simd-threaded.wasm", 14_239_897,
                "vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
            ),
        )),
        (WEBGPU, "WebGPU (graphics chip)", (
            ("ort.webgpu.min.mjs", 66_349, "FPQBMbud8ICuP0Ii+Gr95KWEX9pKHtUC3lacIp0aPI8WYluKvTsEGQ3AE2Ze3QlL"),
            (
                "ort-wasm-simd-threaded.asyncify.mjs", 53_057,
                "qViEcCGzsR/m8nlQwIsbYh7afN4thuraqFYDQY6huvmoLVoZq/eYawQ1wrv8nnhA",
            ),
            (
                "ort-wasm-simd-threaded.asyncify.wasm", 26_781_914,
                "EPVDLTxuO663dkZO/pcKJF6vOyyfq/5z9FY1oksN0UWFX2ABH4wDDZQHeNoUleWR",
            ),
        )),
    )
)  # fmt: skip


def find_local(folder: Path, library: LibraryFile) -> tuple[bytes, str | None]:
    """Find a library's file in a folder: an unpacked package, ``node_modules``, or a parent of one of them.

    Return its content, and the version of its package.json. Raises InputError: it is missing, unreadable or too large.
    """
    name, version = library.package
    for root in (folder / "node_modules" / name, folder / name, folder / PurePosixPath(name).name, folder):
        path = root / library.path
        if path.is_file():
            try:
                content = read_at_most(path, _MAX_BYTES)
            except OSError as error:
                raise InputError(f"--libraries: {path} cannot be read: {error.strerror}") from None
            try:
                local_version = json.loads(read_at_most(root / "package.json", _MAX_PACKAGE_BYTES))["version"]
            except (OSError, ValueError, LookupError, TypeError, RecursionError):
                local_version = None
            return content, str(local_version)[:40] if local_version is not None else None
    raise InputError(
        f"--libraries {folder}: has no {name}/{library.path}; install it with: npm install {name}@{version}"
    )


class BrowserRuntime(Runtime):
    name = "web"
    facts: ClassVar = {
        WASM: ProviderFacts("WASM", "cpu", counts_threads=True),
        WEBGPU: ProviderFacts("WebGPU"),  # no kind: the browser may use any GPU
    }

    def capabilities(self, timeout_s: float) -> Sequence[Capability]:
        detail = "edgeformer page writes a page that runs and measures a bundle in a browser"
        return [Capability("browser", "available", None, detail)]


RUNTIME = BrowserRuntime()
