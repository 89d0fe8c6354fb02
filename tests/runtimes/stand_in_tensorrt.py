"""A stand-in for TensorRT and for the card: ONNX Runtime computes, memory lies in this process.

An ``.engine`` file of it holds the path of an ONNX graph. A wrong address or shape gives wrong answers, or an error.
"""

from __future__ import annotations

import enum
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.manifest import EngineBuild, Parity
from edgeformer.bundle import Bundle, seal
from edgeformer.runtimes.onnxruntime.session import OnnxSession
from edgeformer.runtimes.tensorrt import session as session_module
from edgeformer.runtimes.tensorrt import state as state_module
from edgeformer.runtimes.tensorrt.state import TensorRTState
from edgeformer.system import cuda_driver, leftovers
from edgeformer.system.cuda_driver import Device
from tests.conftest import OLD_FORMAT

CARD = Device(0, "NVIDIA GeForce RTX 4050 Laptop GPU", "8.9")
VERSION = "1.7.1"
LONGEST = 64
MAX_TOKENS_PER_CALL = LONGEST
"""Tokens that one call takes, of a text of up to LONGEST: an engine is built for the longest text of its recipe."""

_ADDRESSES = count(1000)
_MEMORY: dict[int, np.ndarray[Any, Any]] = {}


class StandInMemory:
    def __init__(self, cuda: StandInCuda, size: int) -> None:
        assert size > 0
        self.cuda, self.size, self.address = cuda, size, next(_ADDRESSES)
        _MEMORY[self.address] = np.full(size, 0xAB, np.uint8)
        cuda.allocated += 1

    def free(self) -> None:
        del _MEMORY[self.address]
        self.cuda.allocated -= 1


class StandInCuda:
    """A stream that does everything at once; only copies (10 ms) and engines (1.5 ms) move its clock."""

    stream = 7
    uploaded = 0
    """Bytes that all of them copied to the card."""
    clock_ms = 0.0

    def __init__(self) -> None:
        self.allocated = 0

    def make_current(self) -> None: ...

    def synchronise(self) -> None: ...

    def close(self) -> None:
        assert self.allocated == 0, "all memory was given back"

    def upload(self, array: np.ndarray[Any, Any], memory: StandInMemory) -> None:
        assert array.nbytes <= memory.size
        StandInCuda.uploaded += array.nbytes
        StandInCuda.clock_ms += 10.0
        _MEMORY[memory.address][: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)

    def timed_ms(self, work: Callable[[], object]) -> float:
        start_ms = StandInCuda.clock_ms
        work()
        return StandInCuda.clock_ms - start_ms

    def download(self, memory: StandInMemory, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        return _read(memory.address, shape, dtype)


def _read(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(_MEMORY[address][:size].tobytes(), dtype).reshape(shape)


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY, EAGER, NONE = range(3)


class CudaGraphStrategy(enum.Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = range(2)


class StandInRuntimeCache:
    """Kernels as bytes that begin with the environment; another environment's are refused, as TensorRT does."""

    environment = b"driver 580;"

    def __init__(self) -> None:
        self.kernels = b""

    def deserialize(self, blob: bytes) -> bool:
        if not bytes(blob).startswith(self.environment):
            return False
        self.kernels = bytes(blob).removeprefix(self.environment)
        return True

    def serialize(self) -> bytes:
        return self.environment + self.kernels


class StandInRuntimeConfig:
    """What tensorrt-rtx 1.7 has of IRuntimeConfig, as far as edgeformer uses it."""

    def __init__(self) -> None:
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.cache: StandInRuntimeCache | None = None

    def create_runtime_cache(self) -> StandInRuntimeCache:
        return StandInRuntimeCache()

    def set_runtime_cache(self, cache: StandInRuntimeCache) -> bool:
        self.cache = cache
        return True


class StandInEngine:
    """Engine and context of one graph."""

    device_memory_size_v2 = 4096
    opened: ClassVar[list[StandInEngine]] = []
    """All that were opened, oldest first."""

    def __init__(self, path: Path) -> None:
        self._session = OnnxSession(path)
        described = onnx.load(str(path), load_external_data=False).graph
        self._inputs = {value.name: value for value in described.input}
        self._outputs = {value.name: value for value in described.output}
        self._all = {**self._inputs, **self._outputs}
        self.num_io_tensors = len(self._all)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.config: StandInRuntimeConfig | None = None
        self.compiled: list[str] = []
        """Shapes that kernels were compiled for here, because the cache did not hold them."""
        self.calls: list[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]] = []
        """Shapes and addresses of each call: a captured CUDA graph is of use where both repeat."""
        StandInEngine.opened.append(self)

    def create_runtime_config(self) -> StandInRuntimeConfig:
        return StandInRuntimeConfig()

    def create_execution_context(self, config: StandInRuntimeConfig | None = None) -> StandInEngine:
        self.config = config
        return self

    def get_tensor_name(self, index: int) -> str:
        return str([*self._all][index])

    def get_tensor_dtype(self, name: str) -> Any:
        return onnx.helper.tensor_dtype_to_np_dtype(self._all[name].type.tensor_type.elem_type)

    def get_tensor_mode(self, name: str) -> str:
        return "in" if name in self._inputs else "out"

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        sizes = {"batch": (1, 1, 16), "sequence": (1, 1, MAX_TOKENS_PER_CALL), "past": (0, 8, LONGEST - 1)}
        columns = [sizes[axis] if isinstance(axis, str) else (axis,) * 3 for axis in self._axes(name)]
        return [tuple(column[which] for column in columns) for which in range(3)]

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = tuple(shape)
        return len(shape) == len(self._axes(name))

    def set_tensor_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        axis_sizes: dict[int | str, int] = {}
        for input_name, shape in self._shapes.items():
            axis_sizes |= dict(zip(self._axes(input_name), shape, strict=True))
        return tuple(
            sum(axis_sizes[part] for part in axis.split(" + ")) if isinstance(axis, str) else axis
            for axis in self._axes(name)
        )

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == StandInCuda.stream
        StandInCuda.clock_ms += 1.5
        used = [self._addresses[name] for name in self._all]
        self._compile()
        self.calls.append((tuple(self._shapes.values()), tuple(used)))
        assert len(set(used)) == len(used), "nothing is written where something else is read"
        inputs = {
            name: _read(self._addresses[name], self._shapes[name], self.get_tensor_dtype(name)) for name in self._inputs
        }
        try:
            outputs = self._session.run(inputs)
        except InputError:  # a token id outside the vocabulary
            return False
        for name, array in outputs.items():
            assert array.shape == self.get_tensor_shape(name)
            _MEMORY[self._addresses[name]][: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        return True

    def _compile(self) -> None:
        """One kernel per shape, or one for all shapes where kernels are not specialised."""
        strategy = self.config.dynamic_shapes_kernel_specialization_strategy if self.config is not None else None
        is_shared_kernel = strategy is DynamicShapesKernelSpecializationStrategy.NONE
        kernel = "any" if is_shared_kernel else str(sorted(self._shapes.items()))
        cache = self.config.cache if self.config is not None else None
        if kernel in self.compiled or (cache is not None and kernel.encode() in cache.kernels):
            return
        self.compiled.append(kernel)
        if cache is not None:
            cache.kernels += kernel.encode() + b";"

    def _axes(self, name: str) -> list[int | str]:
        return [axis.dim_param or axis.dim_value for axis in self._all[name].type.tensor_type.shape.dim]


@contextmanager
def stand_in() -> Iterator[None]:
    """While it lasts, this machine has a card and a tensorrt-rtx that runs such engines."""
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: StandInEngine(Path(bytes(plan).decode())))
    trt = SimpleNamespace(
        __version__=VERSION, Runtime=lambda logger: runtime, TensorIOMode=SimpleNamespace(INPUT="in"), nptype=np.dtype,
        DynamicShapesKernelSpecializationStrategy=DynamicShapesKernelSpecializationStrategy,
        CudaGraphStrategy=CudaGraphStrategy,
    )  # fmt: skip
    log = SimpleNamespace(clear=lambda: None, last_error=lambda: "the stand-in refuses")
    state = TensorRTState("tensorrt-rtx", VERSION, {}, ("8.9",), (CARD,))
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setenv(leftovers.VARIABLE, folder)
        patch.setattr(StandInEngine, "opened", [])
        patch.setitem(sys.modules, "tensorrt_rtx", trt)
        patch.setitem(sys.modules, "tensorrt", trt)
        patch.setattr(session_module, "tensorrt_log", lambda module: log)
        patch.setattr(session_module, "Cuda", StandInCuda)
        patch.setattr(session_module, "DeviceMemory", StandInMemory)
        patch.setattr(state_module, "tensorrt_state", lambda name: state)
        patch.setattr(cuda_driver, "devices", lambda: (CARD,))
        yield


def with_engines(name: str, folder: Path) -> Path:
    """Copy an old bundle and add engines of the stand-in: of its full, step and decode graphs in FP32."""
    shutil.copytree(OLD_FORMAT / name / "bundle", folder)
    (folder / "engines").mkdir(exist_ok=True)
    manifest = Bundle.open(folder).manifest
    engines, files = [], dict(manifest.files)
    for graph in manifest.artifacts:
        if graph.precision != "fp32" or not graph.is_graph or graph.role == "exit":
            continue
        parts = {}
        for part, source in (graph.parts or {"loop": str(graph.file)}).items():
            parts[part] = f"engines/{Path(source).stem}.rtx4050.engine"
            (folder / parts[part]).write_text(str(folder / source), encoding="utf-8")
            files |= {parts[part]: sha256_of(folder / parts[part])} if graph.parts else {}
        shapes = {"input_ids": ((1, 1), (1, 32), (16, LONGEST)), "loop": ((1,), (1,), (1,))}
        update = {
            "id": graph.id.replace("onnx", "tensorrt-rtx"), "format": "tensorrt-rtx", "weights_file": None,
            "file": parts["loop"], "parts": parts if graph.parts else {}, "sha256": sha256_of(folder / parts["loop"]),
            "built_for": {"compute_capability": "8.9", "tensorrt-rtx": VERSION}, "score": None, "validation": None,
            "parity": Parity(status="unavailable", tolerance=1e-4, tolerance_kind="absolute", reason="no GPU"),
            "engine": EngineBuild(builder="stand-in", seconds=0.0, checked_by="size", graph_bytes=1, shapes=shapes),
        }  # fmt: skip
        engines.append(graph.model_copy(update=update))
    seal(folder, manifest.model_copy(update={"artifacts": (*manifest.artifacts, *engines), "files": files}))
    return folder
