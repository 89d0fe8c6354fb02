"""Run a TensorRT engine as a Session, without torch: TensorRT runs the engine, CUDA's driver API manages memory.

An engine of tensorrt-rtx holds no kernels. With default settings the runtime compiles them in every process, and
specialises them for a shape in the background, so that a measurement would mix both; :class:`RtxContext` sets this.
These settings are untested on a GPU; they follow the documentation of tensorrt-rtx 1.7.
"""

import hashlib
import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from edgeformer.artifacts.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.artifacts.files import replacing
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.runtimes.session import PAST, PRESENT, Array, DeviceCache, Graph, InputType, shape_text
from edgeformer.runtimes.tensorrt.state import RUNTIMES, tensorrt_log
from edgeformer.system import cuda_driver
from edgeformer.system.cuda_driver import Cuda, DeviceMemory
from edgeformer.system.leftovers import cache_folder, compiled_name

_DIGEST_BYTES = 32  # a cache file begins with the sha256 of its content, so that TensorRT never reads damaged bytes
_MIN_BLOCK_BYTES = 1024
_REMEDY = "export the run again for this device, or copy the whole bundle again"


class RtxContext:
    """Execution context of an engine of tensorrt-rtx.

    With ``repeated_shapes`` it compiles kernels for a shape before the first answer, and captures a CUDA graph; else it
    compiles in the background. With ``keeps_caches``, shapes and cache addresses differ for every token, so that one
    set of kernels serves all. ``settings`` are the conditions of a measurement.
    """

    def __init__(self, trt: Any, engine: Any, plan: bytes, *, repeated_shapes: bool, keeps_caches: bool) -> None:
        config = engine.create_runtime_config()
        kernels = "NONE" if keeps_caches else "EAGER" if repeated_shapes else "LAZY"
        graphs = "WHOLE_GRAPH_CAPTURE" if repeated_shapes and not keeps_caches else "DISABLED"
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = getattr(strategies, kernels)
        config.cuda_graph_strategy = getattr(trt.CudaGraphStrategy, graphs)
        # One file per engine, GPU and version; TensorRT itself refuses a file of an incompatible driver.
        name = compiled_name(hashlib.sha256(plan).hexdigest(), cuda_driver.devices()[0], str(trt.__version__))
        self._file, self._stored = cache_folder() / "tensorrt-rtx" / f"{name}.cache", b""
        self._cache: Any = config.create_runtime_cache()
        state = "new"
        with suppress(OSError):  # there is none yet, or it cannot be read
            content = self._file.read_bytes()
            stored = content[_DIGEST_BYTES:]
            if hashlib.sha256(stored).digest() == content[:_DIGEST_BYTES] and self._cache.deserialize(stored):
                self._stored, state = stored, "loaded"
            else:
                self._cache = config.create_runtime_cache()
                state = "new, because the cache file was damaged, or of another driver or version"
        if not config.set_runtime_cache(self._cache):
            state = "none, because tensorrt-rtx does not accept the cache"
        self.settings = {  # read back, because TensorRT does not raise if it refuses a value
            "kernel_specialization": config.dynamic_shapes_kernel_specialization_strategy.name.lower(),
            "cuda_graphs": config.cuda_graph_strategy.name.lower(),
            "runtime_cache": state,
        }
        self.context = engine.create_execution_context(config)

    def save_kernels(self) -> None:
        """Write the kernels compiled since the cache file was read. Needs a current CUDA context."""
        serialized = self._cache.serialize()
        content = bytes(memoryview(serialized)) if serialized is not None else b""
        if not content or content == self._stored:
            return
        # On a full or read-only disk the next process compiles again; results do not depend on this file.
        with suppress(OSError), replacing(self._file) as temporary:
            temporary.write_bytes(hashlib.sha256(content).digest() + content)


class TensorRTSession(Graph):
    """An engine on the first GPU, which :meth:`TensorRTRuntime.cannot_run` accepts.

    The ``present…`` outputs of a decode or step engine stay on the GPU as ``past…`` inputs of the next call. A cache is
    read from one memory block and written, one token longer, to another; sizes are powers of two for reuse.

    ``artifact`` is the entry in the manifest of the engine, or of the step artifact that it is a part of. If the
    builder named inputs and outputs of a whole model differently (torch-tensorrt: ``output0``), they get these names.
    Raises ArtifactError: the file is missing, damaged, or TensorRT refuses it; EdgeformerError: the GPU or its driver
    fails, or has too little memory.
    """

    def __init__(
        self, path: Path, artifact: ArtifactManifest, max_positions: int | None = None, *,
        repeated_shapes: bool = False,
    ) -> None:  # fmt: skip
        # 1. Prepare memory and CUDA
        self.path, self.provider, self.max_positions = path, artifact.format, max_positions
        package = RUNTIMES[artifact.format]
        trt: Any = importlib.import_module(package.replace("-", "_"))
        self._log = tensorrt_log(trt)
        self._addresses: dict[str, int] = {}
        self._buffers: dict[str, DeviceMemory] = {}
        self._blocks: list[DeviceMemory] = []  # memory of all caches
        self._free_blocks: dict[int, list[DeviceMemory]] = {}  # size → blocks
        self._next: dict[str, DeviceMemory] = {}  # blocks of the current call's caches
        self._rtx: RtxContext | None = None
        try:
            plan = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}; {_REMEDY}") from None
        self._cuda: Cuda | None = Cuda()
        try:
            # 2. Open the engine
            self._log.clear()
            self._runtime = trt.Runtime(self._log)  # must live as long as the engine
            if hasattr(self._runtime, "get_engine_validity"):  # tensorrt-rtx only
                verdict, reasons = self._runtime.get_engine_validity(plan)
                if verdict == trt.EngineValidity.INVALID:
                    flags = trt.EngineInvalidityDiagnostics.__members__.items()
                    reason = ", ".join(name for name, flag in flags if int(reasons) & int(flag))
                    raise ArtifactError(f"{path}: {self.provider} refuses this engine ({reason}); {_REMEDY}")
            engine = self._engine = self._runtime.deserialize_cuda_engine(plan)
            if engine is None:
                reason = self._log.last_error()
                raise ArtifactError(f"{path}: {self.provider} cannot open this engine ({reason}); {_REMEDY}")
            tensors = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
            inputs = [name for name in tensors if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
            outputs = [name for name in tensors if name not in inputs]
            self._keeps_caches = artifact.role in ("step", "decode")
            if package == "tensorrt-rtx":
                has_caches = any(name.startswith(PAST) for name in inputs)
                self._rtx = RtxContext(trt, engine, plan, repeated_shapes=repeated_shapes, keeps_caches=has_caches)
            self._context = self._rtx.context if self._rtx is not None else engine.create_execution_context()
            if self._context is None:
                reason = self._log.last_error()
                raise EdgeformerError(
                    f"{path}: TensorRT creates no execution context, perhaps for lack of GPU memory ({reason})"
                )

            # 3. Name inputs and outputs as the manifest does
            names: dict[str, str] = {}  # the engine's names → the manifest's
            for tensor_names, manifest in ((inputs, artifact.inputs), (outputs, artifact.outputs)):
                is_unnamed = len(tensor_names) == len(manifest) and not set(tensor_names) <= manifest.keys()
                # The manifest lists the inputs and outputs of a step artifact's first part only.
                has_other_names = is_unnamed and not self._keeps_caches
                names |= zip(tensor_names, manifest if has_other_names else tensor_names, strict=True)
            self._tensors = {names[tensor]: tensor for tensor in inputs}
            self._outputs = {tensor: names[tensor] for tensor in outputs}
            self._dtypes = {name: np.dtype(trt.nptype(engine.get_tensor_dtype(name))) for name in tensors}
            types: dict[str, InputType] = {}
            for name, tensor in self._tensors.items():
                smallest, _, largest = engine.get_tensor_profile_shape(tensor, 0)
                limits = zip(smallest, largest, strict=True)
                axes = [low if low == high else range(low, high + 1) for low, high in limits]
                types[name] = InputType(str(self._dtypes[tensor]), axes)
            self.inputs = types
        except BaseException:
            self.close()
            raise

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with self._prepared(inputs) as (cuda, shapes):
            self._execute(cuda)
            results: dict[str, Any] = {}
            for tensor, shape in shapes.items():
                if tensor in self._next:
                    memory = self._next.pop(tensor)
                    results[self._outputs[tensor]] = cache = DeviceCache(memory, shape)
                    finalize(cache, self._take_back, memory)
                else:
                    dtype = self._dtypes[tensor]
                    results[self._outputs[tensor]] = cuda.download(self._buffers[tensor], shape, dtype)
            cuda.synchronise()
            return results

    def device_ms(self, inputs: Mapping[str, Array]) -> float:
        """Return the time between two CUDA events, without copies and host waits; caches of the call are discarded."""
        with self._prepared(inputs) as (cuda, _):
            return cuda.timed_ms(lambda: self._execute(cuda))

    @contextmanager
    def _prepared(self, inputs: Mapping[str, Array]) -> Iterator[tuple[Cuda, dict[str, tuple[int, ...]]]]:
        """Copy the inputs to the GPU, reserve memory for the outputs, and yield CUDA and the outputs' shapes.

        At the end, memory of unused caches is returned; the stream must be synchronised by then.
        """
        feed = self.prepare_feed(self._cuda, inputs)
        assert self._cuda is not None
        cuda = self._cuda
        cuda.make_current()
        uploaded = []  # must live until the stream is synchronised
        shapes: dict[str, tuple[int, ...]] = {}
        try:
            for name, array in feed.items():
                tensor = self._tensors[name]
                if not self._context.set_input_shape(tensor, array.shape):
                    reason = self._log.last_error()
                    raise InputError(
                        f"{self.path.name}: the engine does not accept {name} {shape_text(array)} ({reason})"
                    )
                if isinstance(array, DeviceCache):
                    self._bind(tensor, array.value)
                    continue
                uploaded.append(np.ascontiguousarray(array))
                memory = self._buffer(cuda, tensor, uploaded[-1].nbytes)
                cuda.upload(uploaded[-1], memory)
                self._bind(tensor, memory)
            for tensor in self._outputs:
                shape = shapes[tensor] = tuple(int(size) for size in self._context.get_tensor_shape(tensor))
                if any(size < 0 for size in shape):
                    raise EdgeformerError(
                        f"{self.path.name}: the shape of output {tensor!r} depends on the data: {list(shape)}"
                    )
                size_bytes = math.prod(shape) * self._dtypes[tensor].itemsize
                if self._keeps_caches and tensor.startswith(PRESENT):
                    block_bytes = max(_MIN_BLOCK_BYTES, 1 << max(0, size_bytes - 1).bit_length())
                    if free_blocks := self._free_blocks.get(block_bytes):
                        memory = free_blocks.pop()
                    else:
                        memory = DeviceMemory(cuda, block_bytes)
                        self._blocks.append(memory)
                    self._next[tensor] = memory
                else:
                    memory = self._buffer(cuda, tensor, size_bytes)
                self._bind(tensor, memory)
            yield cuda, shapes
        finally:
            for tensor in list(self._next):
                self._take_back(self._next.pop(tensor))

    def _buffer(self, cuda: Cuda, tensor: str, size: int) -> DeviceMemory:
        """Return a buffer of at least ``size`` bytes. Buffers only grow, so that repeated calls allocate nothing."""
        memory = self._buffers.get(tensor)
        if memory is None or memory.size < size:
            if memory is not None:
                memory.free()
            memory = self._buffers[tensor] = DeviceMemory(cuda, max(1, size))
        return memory

    def _bind(self, tensor: str, memory: DeviceMemory) -> None:
        """Set a tensor's address if it has changed: a captured CUDA graph holds for the same addresses."""
        if self._addresses.get(tensor) != memory.address:
            self._context.set_tensor_address(tensor, memory.address)
            self._addresses[tensor] = memory.address

    def _execute(self, cuda: Cuda) -> None:
        if not self._context.execute_async_v3(cuda.stream):
            raise EdgeformerError(f"{self.path.name}: the engine failed ({self._log.last_error()})")

    def _take_back(self, memory: DeviceMemory) -> None:
        """Reuse the memory of a deleted cache. A closed session has already freed it."""
        if any(memory is block for block in self._blocks):
            self._free_blocks.setdefault(memory.size, []).append(memory)

    def memory_by_name(self) -> dict[str, int]:
        sizes = {"inputs and outputs": sum(memory.size for memory in self._buffers.values())}
        activations = getattr(self._engine, "device_memory_size_v2", None)  # TensorRT 10.1 and later
        if activations is not None:
            sizes = {"activations (TensorRT)": int(activations), **sizes}
        if self._keeps_caches:
            sizes["kept of earlier tokens"] = sum(block.size for block in self._blocks)
        return sizes

    def settings(self) -> dict[str, Any]:
        return dict(self._rtx.settings) if self._rtx is not None else {}

    def close(self) -> None:
        if self._cuda is None:
            return
        self._cuda.make_current()
        if self._rtx is not None:
            self._rtx.save_kernels()
        self._rtx = self._context = self._engine = None
        for memory in (*self._buffers.values(), *self._blocks):
            memory.free()
        self._buffers, self._blocks, self._free_blocks, self._next = {}, [], {}, {}
        self._cuda.close()
        self._cuda = None
