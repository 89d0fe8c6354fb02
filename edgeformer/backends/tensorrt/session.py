"""Run a TensorRT engine as a Session, without torch: the engine by its Python package, memory by CUDA's driver."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeformer.backends.feeding import KEPT
from edgeformer.backends.session import Array, Session
from edgeformer.backends.tensorrt.log import TensorRTLog, tensorrt_log
from edgeformer.backends.tensorrt.rtx_context import RtxContext, create_rtx_context
from edgeformer.backends.tensorrt.state import Package
from edgeformer.formats.errors import ArtifactError, EdgeformerError, InputError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.machine import cuda_driver
from edgeformer.machine.cuda_driver import Cuda, DeviceMemory

REMEDY = "export the run again for this device, or copy the whole bundle again"


@dataclass(frozen=True)
class _Input:
    """An input of the engine and the shapes that it was built for. ``own``: what the engine itself calls it."""

    name: str
    own: str
    dtype: np.dtype[Any]
    smallest: tuple[int, ...]
    largest: tuple[int, ...]

    def check(self, inputs: Mapping[str, Array], engine: str) -> Array:
        """The array to copy. Raises InputError where it is missing, or of a type or shape that the engine refuses."""
        if self.name not in inputs:
            given = ", ".join(sorted(inputs)) or "none"
            raise InputError(f"{engine}: input {self.name!r} is missing (given: {given})")
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
    """An engine on the first GPU. Ask :func:`~edgeformer.backends.tensorrt.state.why_engine_cannot_run` before.

    Args:
        path: the .engine file.
        runtime: the TensorRT that runs it.
        artifact: its entry in the manifest. Where the builder named inputs and outputs in its own way
            (torch-tensorrt: ``output0``), the entry's names take their places, in order.
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
        """Copy in, run, copy out, wait. See :meth:`Session.run`."""
        cuda, outputs, _kept = self._fill(inputs)
        self._execute(cuda)
        found = {self._names[own]: self._fetch(cuda, own, shape) for own, shape in outputs.items()}
        cuda.synchronise()
        return found

    def device_ms(self, inputs: Mapping[str, Array]) -> float:
        """Between two CUDA events: no copies, no waiting by the host."""
        cuda, _, _kept = self._fill(inputs)
        return cuda.timed_ms(lambda: self._execute(cuda))

    def memory_by_name(self) -> dict[str, int]:
        """Bytes on the card: the engine's activations at its largest shape, and the copies of inputs and outputs."""
        size = getattr(self._engine, "device_memory_size_v2", None)  # TensorRT 10.1 and later
        named = {} if size is None else {"activations (TensorRT)": int(size)}
        return {**named, "inputs and outputs": sum(memory.size for memory in self._buffers.values())}

    def settings(self) -> dict[str, Any]:
        """How tensorrt-rtx compiles kernels and whether it captures CUDA graphs; empty for TensorRT itself."""
        return dict(self._rtx.settings) if self._rtx is not None else {}

    def caveats(self) -> tuple[str, ...]:
        """Settings that this tensorrt-rtx does not support. See :meth:`Session.caveats`."""
        return self._rtx.caveats if self._rtx is not None else ()

    def _fill(self, inputs: Mapping[str, Array]) -> tuple[Cuda, dict[str, tuple[int, ...]], dict[str, Array]]:
        """Copy the inputs in and make place for the outputs; returns their shapes, and the arrays that are copied.

        Keep the arrays until the stream is through: the copies may still be under way.
        """
        if self._cuda is None:
            raise EdgeformerError(f"{self.path}: the session is closed")
        cuda = self._cuda
        arrays = {one.own: one.check(inputs, self.path.name) for one in self._inputs}
        cuda.make_current()
        for own, array in arrays.items():
            if not self._context.set_input_shape(own, array.shape):
                given = f"{array.dtype}{list(array.shape)}"
                raise InputError(f"{self.path.name}: refuses {self._names[own]} {given} ({self._reason()})")
            arrays[own] = self._put(cuda, own, array)
        outputs = {}
        for name, dtype in self._outputs.items():
            # It follows from the inputs' shapes.
            shape = outputs[name] = tuple(int(size) for size in self._context.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                raise EdgeformerError(
                    f"{self.path.name}: the shape of output {name!r} depends on the data: {list(shape)}"
                )
            self._make_room(cuda, name, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return cuda, outputs, arrays

    def _put(self, cuda: Cuda, own: str, array: Array) -> Array:
        """Copy an input in; returns what has to live until the stream is through."""
        kept = np.ascontiguousarray(array)
        cuda.upload(kept, self._buffer(cuda, own, kept.nbytes))
        return kept

    def _make_room(self, cuda: Cuda, own: str, size: int) -> None:
        """Memory for an output."""
        self._buffer(cuda, own, size)

    def _fetch(self, cuda: Cuda, own: str, shape: tuple[int, ...]) -> Array:
        """Copy an output out."""
        return cuda.download(self._buffers[own], shape, self._outputs[own])

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
        self._runtime = runtime  # an engine must not outlive it
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
        """The tensor's memory, at least ``size`` bytes; it only ever grows, so that repeated calls allocate nothing."""
        memory = self._buffers.get(name)
        if memory is None or memory.size < size:
            if memory is not None:
                memory.free()
            memory = self._buffers[name] = DeviceMemory(cuda, max(1, size))
            self._context.set_tensor_address(name, memory.address)
        return memory

    def _reason(self) -> str:
        return self._log.last_error() or "TensorRT gives no reason"


def _renamed(own: Sequence[str], wanted: Sequence[str]) -> dict[str, str]:
    """The engine's names → those of the manifest, in order, where the engine does not have them by itself."""
    alike = set(own) <= set(wanted) or len(own) != len(wanted)
    return dict(zip(own, own if alike else wanted, strict=True))
