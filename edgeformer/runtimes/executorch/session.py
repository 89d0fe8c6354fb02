"""Run a program with ExecuTorch on the processor. The first session imports torch and executorch, not this module.

ExecuTorch's library is imported without its Python interface ``executorch.runtime``, which imports the whole compiler.
"""

import ctypes
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.workspace import REMEDY
from edgeformer.runtimes.runtime import OptionalPackage
from edgeformer.runtimes.session import Array, Graph, InputType, reason_of, require_file
from edgeformer.system.host import default_threads
from edgeformer.system.output import capture_native_stderr

EXTRA = FORMAT = "executorch"
LIBRARY = "executorch.extension.pybindings._C"
EXECUTORCH = OptionalPackage(
    "executorch", EXTRA, "programs for phones, by export --executorch", ("executorch", "torch"),
    f"""import importlib, importlib.metadata, torch
names = importlib.import_module({LIBRARY!r})._get_registered_backend_names()
say(version=importlib.metadata.version("executorch"), devices=[name for name in names if "Xnnpack" in name])
""",
)  # fmt: skip
_METHOD = "forward"
_OPTION_BYTES = 1024
"""More than a BackendOption has (324 in 1.5): if later versions have a larger one, the rest is zeros."""
_KEY_BYTES = 64
_pool_number = 0
"""Number of the process's thread pool: programs keep a pointer to the pool that they were loaded with."""


@cache
def library() -> Any:
    """Return ExecuTorch's library. Raises MissingDependencyError if it cannot be imported."""
    with EXECUTORCH.importing():
        import torch  # noqa: F401  loads the libraries that this one needs

        return importlib.import_module(LIBRARY)


class _Option(ctypes.Structure):
    """``executorch::runtime::BackendOption``: key, then a variant whose first alternative, of index 0, is bool."""

    _fields_ = (("key", ctypes.c_char * _KEY_BYTES), ("value", ctypes.c_bool * (_OPTION_BYTES - _KEY_BYTES)))


class _Span(ctypes.Structure):
    _fields_ = (("data", ctypes.POINTER(_Option)), ("size", ctypes.c_size_t))


@cache
def share_packed_weights() -> bool:
    """Let XNNPACK pack weights with equal numbers once per process; return whether it does.

    Without it, a shared layer is packed once per loop: memory grows with loops. ExecuTorch has this option in C++ only,
    so it is set through its exported symbols, and read back.
    """
    (folder,) = util.find_spec("executorch").submodule_search_locations  # type: ignore[union-attr, misc]
    names = {"darwin": "libexecutorch.dylib", "win32": "executorch.dll"}
    option = _Option(key=b"weight_cache_enabled")
    try:
        core = ctypes.CDLL(str(Path(folder) / "lib" / names.get(sys.platform, "libexecutorch.so")))
        results = []
        for verb, value in (("set", True), ("get", False)):
            function = getattr(core, f"_ZN10executorch7runtime10{verb}_optionEPKcNS0_4SpanINS0_13BackendOptionEEE")
            function.argtypes, function.restype = (ctypes.c_char_p, _Span), ctypes.c_uint32
            option.value[0] = value
            results.append(function(b"XnnpackBackend", _Span(ctypes.pointer(option), 1)))
    except (OSError, AttributeError):  # another platform or version
        return False
    return results == [0, 0] and bool(option.value[0])


class ExecuTorchSession(Graph):
    """A .pte program with its method ``forward``, whose inputs are int64 [batch, sequence] up to sizes in the file.

    ``artifact``: its manifest entry, which names inputs and outputs. ``threads`` are those of the process's pool.
    """

    provider = FORMAT

    def __init__(
        self, path: Path, artifact: ArtifactManifest, threads: int | None = None, max_positions: int | None = None
    ) -> None:
        library()
        self.path, self.max_positions, self.threads = path, max_positions, threads or default_threads()
        self._artifact, self._shares = artifact, share_packed_weights()
        self._program: Any = None
        self._method: Any = None
        require_file(path)
        meta = self._load()
        sizes = [meta.input_tensor_meta(number).sizes() for number in range(meta.num_inputs())]
        names = tuple(artifact.inputs)
        if len(sizes) != len(names):
            raise ArtifactError(f"{path}: takes {len(sizes)} inputs, and bundle.json names {len(names)}; export again")
        axes = {name: [range(1, size + 1) for size in shape] for name, shape in zip(names, sizes, strict=True)}
        self.inputs = {name: InputType("int64", ranges) for name, ranges in axes.items()}

    def _load(self) -> Any:
        """Load the program for the pool of this session's threads, and return the sizes of its inputs."""
        global _pool_number
        messages: Sequence[str] = ()
        self.close()
        try:
            with capture_native_stderr() as messages:
                if library()._threadpool_get_thread_count() != self.threads:
                    library()._unsafe_reset_threadpool(self.threads)
                    _pool_number += 1
                self._program = library()._load_program(str(self.path))
                self._method = self._program.load_method(_METHOD)
        except Exception as error:
            version = metadata.version("executorch")
            reason = " ".join([str(error), *messages[-1:]])[:200]
            raise ArtifactError(f"{self.path}: cannot be opened by ExecuTorch {version} ({reason}); {REMEDY}") from None
        self._pool_number = _pool_number
        return self._method.method_meta()

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        import torch

        feed = self.prepare_feed(self._method, inputs, same_shape=True)
        if self._pool_number != _pool_number:  # another session has replaced the pool of threads
            self._load()
        try:
            results = self._method([torch.tensor(array) for array in feed.values()])
        except RuntimeError as error:  # e.g. a token id outside the table
            raise self.refusal(feed, reason_of(error)) from None
        names = tuple(self._artifact.outputs) or ("logits",)
        return {name: result.numpy() for name, result in zip(names, results, strict=True)}

    def settings(self) -> dict[str, Any]:
        return {"threads": self.threads, "shares_packed_weights": self._shares}

    def caveats(self) -> tuple[str, ...]:
        notes, engine = [], self._artifact.engine
        if engine is not None and engine.delegated is not None and engine.not_delegated:
            outside = sum(engine.not_delegated.values())
            names = ", ".join(f"{name} ({count})" for name, count in engine.not_delegated.items())
            total = outside + engine.delegated
            notes.append(f"ExecuTorch: {outside} of {total} operators run outside XNNPACK's kernels: {names}")
        if not self._shares:
            notes.append(
                "ExecuTorch: XNNPACK's weight cache is not available here, so shared layers are packed per loop"
            )
        return tuple(notes)

    def close(self) -> None:
        self._method = self._program = None
