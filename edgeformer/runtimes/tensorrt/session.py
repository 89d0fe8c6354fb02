"""Run a TensorRT engine as a Session, without torch: TensorRT runs the engine, CUDA's driver API manages memory.

An engine of tensorrt-rtx holds no kernels: the runtime compiles them on the GPU that opens it. With default settings it
compiles them again in every process, and specialises them for a shape in the background while it already computes that
shape, so that a measurement would mix both. :func:`create_rtx_context` sets this explicitly.

The tensorrt-rtx settings are untested on a GPU. They follow the documentation and Python API of tensorrt-rtx 1.7.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.session import KEPT, Array, Session
from edgeformer.runtimes.tensorrt.log import TensorRTLog, tensorrt_log
from edgeformer.runtimes.tensorrt.state import Package
from edgeformer.system import cuda_driver
from edgeformer.system.cuda_driver import Cuda, Device, DeviceMemory
from edgeformer.system.leftovers import cache_folder, compiled_name

_DIGEST_BYTES = 32  # a cache file begins with the sha256 of its content, so that TensorRT never reads damaged bytes

_UNSUPPORTED = "default: this tensorrt-rtx does not support the setting"


@dataclass
class RtxContext:
    """An execution context and how it was configured.

    Attributes:
        context: TensorRT's execution context.
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
        """Write the kernels compiled since the cache file was read. Needs a current CUDA context."""
        if self._cache is None or self._file is None:
            return
        serialized = self._cache.serialize()
        content = bytes(memoryview(serialized)) if serialized is not None else b""
        if not content or content == self._stored:
            return
        # On a full or read-only disk the next process compiles again; results do not depend on this file.
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

    With ``keeps_caches`` every token has a different shape and cache addresses change, so that kernels or graphs of one
    token cannot be reused. Measurement and generation therefore use the same settings.

    Args:
        trt: the module tensorrt_rtx.
        engine: a deserialised engine.
        plan: content of the engine file.
        gpu: the GPU that the engine is opened on; its CUDA context is current.
        repeated_shapes: calls repeat a few shapes, as in a measurement.
        keeps_caches: the engine is a decode or step graph with keys and values as inputs and outputs.
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
        # One file per engine, GPU and version; TensorRT itself refuses a file of an incompatible driver.
        cache_name = compiled_name(hashlib.sha256(plan).hexdigest(), gpu, str(trt.__version__))
        file = cache_folder() / "tensorrt-rtx" / f"{cache_name}.cache"
        cache, stored, settings["runtime_cache"] = _open_cache(config, file)
    else:
        settings["runtime_cache"] = "none: this tensorrt-rtx does not support the setting"
    return RtxContext(engine.create_execution_context(config), settings, tuple(caveats), cache, file, stored)


def _set(config: Any, trt: Any, name: str, enum: str, value: str) -> tuple[str, str | None]:
    """Set ``config.name`` to an enum value of tensorrt-rtx, if this version supports both.

    Returns:
        The effective setting, and a caveat if it differs from the requested one.
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


def _open_cache(config: Any, file: Path) -> tuple[Any, bytes, str]:
    """Attach a cache with the kernels in ``file`` to ``config``.

    Returns:
        The cache, the kernels read from the file, and the state for the report.
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


REMEDY = "export the run again for this device, or copy the whole bundle again"


@dataclass(frozen=True)
class _Input:
    """An engine input: its names in the manifest and the engine (``tensor``), and the shapes it was built for."""

    name: str
    tensor: str
    dtype: np.dtype[Any]
    smallest: tuple[int, ...]
    largest: tuple[int, ...]

    def check(self, inputs: Mapping[str, Array], engine: str) -> Array:
        """Return the array to copy. Raises InputError if it is missing or its type or shape does not fit the engine."""
        if self.name not in inputs:
            provided = ", ".join(sorted(inputs)) or "none"
            raise InputError(f"{engine}: input {self.name!r} is missing (given: {provided})")
        array = inputs[self.name]
        fits = len(array.shape) == len(self.smallest) and all(
            low <= size <= high for low, size, high in zip(self.smallest, array.shape, self.largest, strict=True)
        )
        if array.dtype != self.dtype or not fits:
            raise InputError(
                f"{engine}: input {self.name!r} must be {self.dtype} between {list(self.smallest)} and "
                f"{list(self.largest)}, for which the engine was built, but is {array.dtype}{list(array.shape)}"
            )
        return array


class TensorRTSession(Session):
    """An engine on the first GPU. Call :func:`~edgeformer.runtimes.tensorrt.state.why_engine_cannot_run` first.

    Args:
        path: the .engine file.
        runtime: the TensorRT that runs it.
        artifact: its entry in the manifest. If the builder named inputs and outputs differently (torch-tensorrt:
            ``output0``), they get the entry's names, in order.
        repeated_shapes: see :attr:`OpenOptions.repeated_shapes`; only tensorrt-rtx uses it.

    Raises:
        ArtifactError: the file is missing, damaged, or TensorRT refuses it.
        EdgeformerError: the GPU or its driver fails, or has too little memory.
    """

    def __init__(
        self, path: Path, runtime: Package, artifact: ArtifactManifest, *, repeated_shapes: bool = False
    ) -> None:
        self.path = path
        self.provider = artifact.format
        self._trt: Any = importlib.import_module(runtime.replace("-", "_"))
        self._buffers: dict[str, DeviceMemory] = {}
        self._log: TensorRTLog = tensorrt_log(self._trt)
        try:
            plan = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}; {REMEDY}") from None
        self._cuda: Cuda | None = Cuda()
        self._rtx: RtxContext | None = None
        try:
            self._engine = self._deserialize(plan)
            if runtime == "tensorrt-rtx":
                names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
                self._rtx = create_rtx_context(
                    self._trt,
                    self._engine,
                    plan,
                    cuda_driver.devices()[0],
                    repeated_shapes=repeated_shapes,
                    keeps_caches=any(name.startswith(KEPT) for name in names),
                )
                self._context = self._rtx.context
            else:
                self._context = self._engine.create_execution_context()
            if self._context is None:
                raise EdgeformerError(f"{path}: no execution context, perhaps too little GPU memory ({self._reason()})")
            self._inputs, self._outputs = self._describe(artifact)
        except BaseException:
            self.close()
            raise

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Copy the inputs to the GPU, run, copy the outputs back. See :meth:`Session.run`."""
        cuda, outputs, _kept = self._fill(inputs)
        self._execute(cuda)
        results = {self._names[tensor]: self._fetch(cuda, tensor, shape) for tensor, shape in outputs.items()}
        cuda.synchronise()
        return results

    def device_ms(self, inputs: Mapping[str, Array]) -> float:
        """Return the time between two CUDA events, without copies and host waits."""
        cuda, _, _kept = self._fill(inputs)
        return cuda.timed_ms(lambda: self._execute(cuda))

    def memory_by_name(self) -> dict[str, int]:
        """Return GPU bytes: activations at the engine's largest shape, and the buffers of inputs and outputs."""
        size = getattr(self._engine, "device_memory_size_v2", None)  # TensorRT 10.1 and later
        activations = {} if size is None else {"activations (TensorRT)": int(size)}
        return {**activations, "inputs and outputs": sum(memory.size for memory in self._buffers.values())}

    def settings(self) -> dict[str, Any]:
        """Return how tensorrt-rtx compiles kernels and captures CUDA graphs; empty for TensorRT."""
        return dict(self._rtx.settings) if self._rtx is not None else {}

    def caveats(self) -> tuple[str, ...]:
        """Return the settings that this tensorrt-rtx does not support. See :meth:`Session.caveats`."""
        return self._rtx.caveats if self._rtx is not None else ()

    def _fill(self, inputs: Mapping[str, Array]) -> tuple[Cuda, dict[str, tuple[int, ...]], dict[str, Array]]:
        """Copy the inputs to the GPU and reserve memory for the outputs.

        Returns:
            CUDA, the outputs' shapes, and the arrays being copied: keep them until the stream is synchronised.
        """
        if self._cuda is None:
            raise EdgeformerError(f"{self.path}: the session is closed")
        cuda = self._cuda
        arrays = {port.tensor: port.check(inputs, self.path.name) for port in self._inputs}
        cuda.make_current()
        for tensor, array in arrays.items():
            if not self._context.set_input_shape(tensor, array.shape):
                actual = f"{array.dtype}{list(array.shape)}"
                raise InputError(f"{self.path.name}: refuses {self._names[tensor]} {actual} ({self._reason()})")
            arrays[tensor] = self._put(cuda, tensor, array)
        outputs = {}
        for name, dtype in self._outputs.items():
            shape = outputs[name] = tuple(int(size) for size in self._context.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                raise EdgeformerError(
                    f"{self.path.name}: the shape of output {name!r} depends on the data: {list(shape)}"
                )
            self._reserve_output(cuda, name, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return cuda, outputs, arrays

    def _put(self, cuda: Cuda, tensor: str, array: Array) -> Array:
        """Copy an input to the GPU. Return the array that must live until the stream is synchronised."""
        kept = np.ascontiguousarray(array)
        cuda.upload(kept, self._buffer(cuda, tensor, kept.nbytes))
        return kept

    def _reserve_output(self, cuda: Cuda, tensor: str, size: int) -> None:
        self._buffer(cuda, tensor, size)

    def _fetch(self, cuda: Cuda, tensor: str, shape: tuple[int, ...]) -> Array:
        return cuda.download(self._buffers[tensor], shape, self._outputs[tensor])

    def _execute(self, cuda: Cuda) -> None:
        if not self._context.execute_async_v3(cuda.stream):
            raise EdgeformerError(f"{self.path.name}: the engine fails to run ({self._reason()})")

    def close(self) -> None:
        if self._cuda is None:
            return
        self._cuda.make_current()
        if self._rtx is not None:
            self._rtx.save_kernels()
        self._rtx = self._context = self._engine = None
        for memory in self._buffers.values():
            memory.free()
        self._buffers = {}
        self._cuda.close()
        self._cuda = None

    def _deserialize(self, plan: bytes) -> Any:
        self._log.clear()
        runtime = self._trt.Runtime(self._log.logger)
        validity = getattr(runtime, "get_engine_validity", None)  # tensorrt-rtx only
        if validity is not None:
            verdict, reasons = validity(plan)
            if verdict == self._trt.EngineValidity.INVALID:
                flags = self._trt.EngineInvalidityDiagnostics.__members__.items()
                why = ", ".join(name for name, flag in flags if int(reasons) & int(flag)) or self._reason()
                raise ArtifactError(
                    f"{self.path}: {self.provider} says that this engine cannot run here ({why}); {REMEDY}"
                )
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise ArtifactError(f"{self.path}: {self.provider} cannot open this engine ({self._reason()}); {REMEDY}")
        self._runtime = runtime  # must live as long as the engine
        return engine

    def _describe(self, artifact: ArtifactManifest) -> tuple[list[_Input], dict[str, np.dtype[Any]]]:
        engine, inputs = self._engine, list[_Input]()
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        is_input = {name: engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT for name in names}
        self._names = {
            **_renamed([name for name in names if is_input[name]], tuple(artifact.inputs)),
            **_renamed([name for name in names if not is_input[name]], tuple(artifact.outputs)),
        }
        outputs: dict[str, np.dtype[Any]] = {}
        for name in names:
            dtype: np.dtype[Any] = np.dtype(self._trt.nptype(engine.get_tensor_dtype(name)))
            if is_input[name]:
                smallest, _, largest = engine.get_tensor_profile_shape(name, 0)
                inputs.append(_Input(self._names[name], name, dtype, tuple(smallest), tuple(largest)))
            else:
                outputs[name] = dtype
        return inputs, outputs

    def _buffer(self, cuda: Cuda, name: str, size: int) -> DeviceMemory:
        """Return a buffer of at least ``size`` bytes. Buffers only grow, so that repeated calls allocate nothing."""
        memory = self._buffers.get(name)
        if memory is None or memory.size < size:
            if memory is not None:
                memory.free()
            memory = self._buffers[name] = DeviceMemory(cuda, max(1, size))
            self._context.set_tensor_address(name, memory.address)
        return memory

    def _reason(self) -> str:
        return self._log.last_error() or "TensorRT gives no reason"


def _renamed(engine_names: Sequence[str], manifest_names: Sequence[str]) -> dict[str, str]:
    """Map the engine's tensor names to the manifest's, in order, unless the engine already uses those."""
    alike = set(engine_names) <= set(manifest_names) or len(engine_names) != len(manifest_names)
    return dict(zip(engine_names, engine_names if alike else manifest_names, strict=True))


_CACHE_OUTPUT_PREFIX = "present"
"""Prefix of the outputs that are inputs of the next call."""

_MIN_BLOCK_BYTES = 1024


class OnCard:
    """An output that stays on the GPU and is passed to the next call in place of an array.

    Its memory returns to its session when the object is deleted.
    """

    def __init__(self, session: TensorRTGraph, memory: DeviceMemory, shape: tuple[int, ...], dtype: np.dtype[Any]):
        self.memory, self.shape, self.dtype = memory, shape, dtype
        self._session = session

    def __del__(self) -> None:
        self._session.take_back(self.memory)


class TensorRTGraph(TensorRTSession):
    """An engine of a decode or step graph: its ``past…`` inputs are the ``present…`` outputs of the previous call.

    Those outputs are :class:`OnCard` and stay on the GPU; all others are arrays. The first call takes :meth:`empty`
    inputs. A cache is read from one memory block and written, one token longer, to another. Block sizes are powers of
    two, so that blocks can be reused.

    Args:
        path: the .engine file.
        runtime: the TensorRT that runs it.
        artifact: its entry in the manifest, or the entry of the step artifact that it is a part of.
        max_positions: longest text that the model takes; None: not known.
        repeated_shapes: as in :class:`TensorRTSession`; it makes no difference for an engine with caches.

    Raises:
        ArtifactError: the file is missing, damaged, or TensorRT refuses it.
        EdgeformerError: the GPU or its driver fails, or has too little memory.
    """

    def __init__(
        self,
        path: Path,
        runtime: Package,
        artifact: ArtifactManifest,
        max_positions: int | None = None,
        *,
        repeated_shapes: bool = False,
    ) -> None:
        self.max_positions = max_positions
        self._free: dict[int, list[DeviceMemory]] = {}
        self._blocks: list[DeviceMemory] = []
        self._next: dict[str, DeviceMemory] = {}
        # Keep the engine's names: the manifest lists the inputs and outputs of the first part only.
        unnamed = artifact.model_copy(update={"inputs": {}, "outputs": {}})
        super().__init__(path, runtime, unnamed, repeated_shapes=repeated_shapes)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the engine's inputs."""
        return tuple(port.name for port in self._inputs)

    def most_tokens(self) -> int | None:
        """Return the longest sequence the engine was built for. See :meth:`Session.most_tokens`."""
        largest = [port.largest for port in self._inputs if not port.name.startswith(KEPT)]
        return min((sizes[1] for sizes in largest if len(sizes) > 1), default=None)

    def empty(self, name: str, rows: int) -> Array:
        """Return the initial value of a ``past…`` input for ``rows`` texts: zeros, with size 0 in dynamic axes."""
        port = next(port for port in self._inputs if port.name == name)
        sizes = zip(port.smallest[1:], port.largest[1:], strict=True)
        return np.zeros((rows, *(low if low == high else 0 for low, high in sizes)), port.dtype)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """As :meth:`Session.run`; ``present…`` outputs are :class:`OnCard`."""
        try:
            return super().run(inputs)
        finally:
            self._return_unused()

    def device_ms(self, inputs: Mapping[str, Array]) -> float:
        """As :meth:`Session.device_ms`; the caches of the call are discarded."""
        try:
            return super().device_ms(inputs)
        finally:
            self._return_unused()

    def memory_by_name(self) -> dict[str, int]:
        """As :meth:`Session.memory_by_name`, with the caches."""
        return {**super().memory_by_name(), "kept of earlier tokens": sum(block.size for block in self._blocks)}

    def close(self) -> None:
        if self._cuda is not None:
            self._cuda.make_current()
            for block in self._blocks:
                block.free()
            self._blocks, self._free, self._next = [], {}, {}
        super().close()

    def take_back(self, memory: DeviceMemory) -> None:
        """Reuse the memory of a deleted output. A closed session has already freed it."""
        if any(memory is block for block in self._blocks):
            self._free.setdefault(memory.size, []).append(memory)

    def _put(self, cuda: Cuda, tensor: str, array: Any) -> Any:
        if isinstance(array, OnCard):
            self._context.set_tensor_address(tensor, array.memory.address)
            return array
        kept = super()._put(cuda, tensor, array)
        if tensor.startswith(KEPT):  # the previous call may have read it from another address
            self._context.set_tensor_address(tensor, self._buffers[tensor].address)
        return kept

    def _reserve_output(self, cuda: Cuda, tensor: str, size: int) -> None:
        if tensor.startswith(_CACHE_OUTPUT_PREFIX):
            block = self._next[tensor] = self._block(cuda, size)
            self._context.set_tensor_address(tensor, block.address)
        else:
            super()._reserve_output(cuda, tensor, size)

    def _fetch(self, cuda: Cuda, tensor: str, shape: tuple[int, ...]) -> Array:
        if tensor not in self._next:
            return super()._fetch(cuda, tensor, shape)
        kept: Any = OnCard(self, self._next.pop(tensor), shape, self._outputs[tensor])
        return kept  # type: ignore[no-any-return]

    def _block(self, cuda: Cuda, size: int) -> DeviceMemory:
        """Return an unused memory block of at least ``size`` bytes."""
        block_bytes = max(_MIN_BLOCK_BYTES, 1 << (size - 1).bit_length()) if size else _MIN_BLOCK_BYTES
        if free := self._free.get(block_bytes):
            return free.pop()
        block = DeviceMemory(cuda, block_bytes)
        self._blocks.append(block)
        return block

    def _return_unused(self) -> None:
        for tensor in list(self._next):
            self.take_back(self._next.pop(tensor))
