"""Execution contexts of TensorRT for RTX: when kernels are compiled, CUDA graphs, and the compiled kernels on disk.

An engine of tensorrt-rtx holds no kernels: the runtime compiles them on the GPU that opens it. With default settings it
compiles them again in every process, and specialises them for a shape in the background while that shape is already
computed, so that a measurement would mix both.

Not checked on a GPU by us. It follows the package's own documentation and the Python API of tensorrt-rtx 1.7.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.formats.files import replacing
from edgeformer.machine.cache_folder import cache_folder, compiled_name
from edgeformer.machine.cuda_driver import Device

_DIGEST_BYTES = 32  # a cache file begins with the sha256 of what follows: damaged bytes never reach TensorRT

_UNSUPPORTED = "default: this tensorrt-rtx does not support the setting"


@dataclass
class RtxContext:
    """An execution context and how it was configured.

    Attributes:
        context: TensorRT's.
        settings: ``kernel_specialization``, ``cuda_graphs`` and ``runtime_cache``, for the conditions of a measurement.
        caveats: settings that this tensorrt-rtx does not support, with the remedy.
    """

    context: Any
    settings: dict[str, str]
    caveats: tuple[str, ...] = ()
    _cache: Any = None
    _file: Path | None = None
    _stored: bytes = b""

    def save_kernels(self) -> None:
        """Write the kernels that were compiled since the cache file was read. Needs a current CUDA context."""
        if self._cache is None or self._file is None:
            return
        serialized = self._cache.serialize()
        content = bytes(memoryview(serialized)) if serialized is not None else b""
        if not content or content == self._stored:
            return
        # The next process compiles again where the disk is full or read-only; no answer depends on this file.
        with suppress(OSError), replacing(self._file) as temporary:
            temporary.write_bytes(hashlib.sha256(content).digest() + content)


def create_rtx_context(
    trt: Any, engine: Any, plan: bytes, gpu: Device, *, repeated_shapes: bool, keeps_caches: bool
) -> RtxContext:
    """Create the execution context of an engine of tensorrt-rtx.

    =====================  ======================  ============
    use                    kernels                 CUDA graphs
    =====================  ======================  ============
    ``repeated_shapes``    eager: specialised      whole graph
                           before the first answer
    else                   lazy: in the background no
    ``keeps_caches``       none: one set for all   no
    =====================  ======================  ============

    With ``keeps_caches`` every token has a shape of its own, and caches lie at changing addresses: what is compiled or
    captured for one token is not used again. A measurement then has the same settings as writing.

    Args:
        trt: the module tensorrt_rtx.
        engine: a deserialised engine.
        plan: its file's content.
        gpu: the GPU that it was opened on, whose CUDA context is current.
        repeated_shapes: calls repeat a few shapes, as in a measurement.
        keeps_caches: an engine of a decode or step graph, with keys and values as inputs and outputs.
    """
    create_config = getattr(engine, "create_runtime_config", None)
    config = create_config() if create_config is not None else None
    version = f"tensorrt-rtx {trt.__version__}"
    if config is None:
        caveat = (
            f"{version} has no runtime settings: kernels may be specialised while they are measured, and are compiled "
            "again in every process; install tensorrt-rtx 1.3 or newer"
        )
        settings = dict.fromkeys(("kernel_specialization", "cuda_graphs", "runtime_cache"), _UNSUPPORTED)
        return RtxContext(engine.create_execution_context(), settings, (caveat,))

    kernels = "NONE" if keeps_caches else "EAGER" if repeated_shapes else "LAZY"
    graphs = "WHOLE_GRAPH_CAPTURE" if repeated_shapes and not keeps_caches else "DISABLED"
    specialization = "dynamic_shapes_kernel_specialization_strategy"
    settings = {}
    settings["kernel_specialization"], kernels_caveat = _set(
        config, trt, specialization, "DynamicShapesKernelSpecializationStrategy", kernels
    )
    settings["cuda_graphs"], graphs_caveat = _set(config, trt, "cuda_graph_strategy", "CudaGraphStrategy", graphs)
    caveats = [caveat for caveat in (kernels_caveat, graphs_caveat) if caveat is not None]

    cache, file, stored = None, None, b""
    if hasattr(config, "create_runtime_cache") and hasattr(config, "set_runtime_cache"):
        file = _cache_file(plan, gpu, str(trt.__version__))
        cache, stored, settings["runtime_cache"] = _open_cache(config, file)
    else:
        settings["runtime_cache"] = "none: this tensorrt-rtx does not support the setting"
    return RtxContext(engine.create_execution_context(config), settings, tuple(caveats), cache, file, stored)


def _set(config: Any, trt: Any, name: str, enum: str, value: str) -> tuple[str, str | None]:
    """Set ``config.name`` to a value of one of tensorrt-rtx's enums, if this version has both.

    Returns:
        The setting that holds now, and a caveat if it is not the requested one.
    """
    version, values = f"tensorrt-rtx {trt.__version__}", getattr(trt, enum, None)
    if values is None or not hasattr(config, name):
        return _UNSUPPORTED, f"{version} has no {name}; install tensorrt-rtx 1.3 or newer"
    requested = getattr(values, value)
    setattr(config, name, requested)
    if getattr(config, name) == requested:
        return value.lower(), None
    # The setter does not raise.
    return f"default: {value.lower()} was refused", f"{version} refuses {name} = {value}"


def _cache_file(plan: bytes, gpu: Device, version: str) -> Path:
    """One file per engine, GPU and version; TensorRT itself refuses one that an incompatible driver wrote."""
    return cache_folder() / "tensorrt-rtx" / f"{compiled_name(hashlib.sha256(plan).hexdigest(), gpu, version)}.cache"


def _open_cache(config: Any, file: Path) -> tuple[Any, bytes, str]:
    """Give ``config`` a cache with the kernels in ``file``.

    Returns:
        The cache, the kernels that were read, and what to say of it.
    """
    cache, stored, state = config.create_runtime_cache(), b"", "new"
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        content = b""
    except OSError as error:
        content, state = b"", f"new: the cache file cannot be read ({error.strerror})"
    if content:
        kernels = content[_DIGEST_BYTES:]
        intact = hashlib.sha256(kernels).digest() == content[:_DIGEST_BYTES]
        if intact and cache.deserialize(kernels):
            stored, state = kernels, "loaded"
        else:
            why = "it was of another driver or version" if intact else "it was damaged"
            cache, state = config.create_runtime_cache(), f"new: the cache file was discarded, {why}"
            with suppress(OSError):
                file.unlink()
    if not config.set_runtime_cache(cache):
        return None, b"", "none: tensorrt-rtx refuses the cache"
    return cache, stored, state
