"""CUDA driver API through ctypes: devices, memory, copies, a stream.

Every machine that can run an engine has the driver's library, also a Jetson and Windows, and these functions have
had the same signatures since CUDA 11. TensorRT's packages bring no Python binding of CUDA, and NVIDIA's own
(cuda-bindings, 30 MB) follows the CUDA version, which an edge device should not have to match.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeformer.artifacts.errors import EdgeformerError

Array = npt.NDArray[Any]

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and …_MINOR
_OUT_OF_MEMORY = 2
_POINTER, _INT_POINTER, _EVENT, _STREAM = POINTER(c_void_p), POINTER(c_int), c_void_p, c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,), "cuDriverGetVersion": (_INT_POINTER,), "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (_INT_POINTER,), "cuDeviceGet": (_INT_POINTER, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int), "cuDeviceGetAttribute": (_INT_POINTER, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_POINTER, c_int), "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuStreamCreate": (_POINTER, c_uint), "cuStreamSynchronize": (_STREAM,), "cuStreamDestroy_v2": (_STREAM,),
    "cuEventCreate": (_POINTER, c_uint), "cuEventRecord": (_EVENT, _STREAM), "cuEventDestroy_v2": (_EVENT,),
    "cuEventElapsedTime": (POINTER(c_float), _EVENT, _EVENT),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t), "cuMemFree_v2": (c_uint64,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, _STREAM),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, _STREAM),
}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """One GPU that CUDA programs of this process may use (``CUDA_VISIBLE_DEVICES`` is respected)."""

    index: int
    name: str
    compute_capability: str


def problem() -> str | None:
    """Return why CUDA's driver library cannot be used; None if it can."""
    if sys.platform == "darwin":
        return "macOS has no CUDA driver"
    try:
        library = _library()
    except OSError:
        return f"the driver library {LIBRARY} is not installed"
    status = int(library.cuInit(0))
    return None if status == 0 else f"{LIBRARY} is installed but cuInit fails with CUDA error {status}"


def version() -> str | None:
    """Return the newest CUDA version that the driver can run ("12.8"); None without a driver."""
    number = c_int(0)
    if problem() is not None or _library().cuDriverGetVersion(byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def devices() -> list[Device]:
    """Return the GPUs in the order in which CUDA numbers them; empty without driver or GPU."""
    count = c_int(0)
    if problem() is not None or _library().cuDeviceGetCount(byref(count)) != 0:
        return []
    library, devices = _library(), []
    for index in range(count.value):
        handle, name, major, minor = c_int(0), ctypes.create_string_buffer(256), c_int(0), c_int(0)
        library.cuDeviceGet(byref(handle), index)
        library.cuDeviceGetName(name, len(name), handle)
        for attribute, value in ((_MAJOR, major), (_MINOR, minor)):
            library.cuDeviceGetAttribute(byref(value), attribute, handle)
        devices.append(Device(index, name.value.decode("utf-8", "replace"), f"{major.value}.{minor.value}"))
    return devices


class DeviceMemory:
    """Bytes on the GPU, freed by :meth:`free`."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._cuda, self.size = cuda, size
        pointer = c_uint64(0)
        cuda.call("cuMemAlloc_v2", byref(pointer), size)
        self.address = pointer.value

    def free(self) -> None:
        """Free the bytes; a second call has no effect."""
        if self.address:
            self._cuda.call("cuMemFree_v2", self.address)
            self.address = 0


class Cuda:
    """The primary context of the first GPU, which TensorRT uses too, and a stream in it.

    Raises EdgeformerError with the driver's message.
    """

    def __init__(self) -> None:
        reason = problem()
        if reason is not None:
            raise EdgeformerError(reason)
        self._driver = _library()
        handle, context, stream = c_int(0), c_void_p(), c_void_p()
        self.call("cuDeviceGet", byref(handle), 0)
        self._device = handle.value
        self.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context: c_void_p | None = context
        self.make_current()
        self.call("cuStreamCreate", byref(stream), 0)
        self._stream = stream
        self.stream: int = stream.value or 0  # as TensorRT takes it

    def make_current(self) -> None:
        """Set this context for the calling thread; required in every thread that computes."""
        self.call("cuCtxSetCurrent", self._context)

    def upload(self, array: Array, memory: DeviceMemory) -> None:
        """Copy a C-contiguous array to the GPU, in the stream. Keep ``array`` until :meth:`synchronise`."""
        self.call("cuMemcpyHtoDAsync_v2", memory.address, array.ctypes.data, array.nbytes, self._stream)

    def download(self, memory: DeviceMemory, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return a new array, which is filled in the stream until :meth:`synchronise`."""
        array = np.empty(shape, dtype)
        if array.nbytes:
            self.call("cuMemcpyDtoHAsync_v2", array.ctypes.data, memory.address, array.nbytes, self._stream)
        return array

    def synchronise(self) -> None:
        """Wait for the end of the stream's work. Errors of kernels are raised here."""
        self.call("cuStreamSynchronize", self._stream)

    def timed_ms(self, work: Callable[[], object]) -> float:
        """Return the milliseconds of the work that ``work`` enqueues in the stream; waits for its end."""
        events = [c_void_p(), c_void_p()]
        elapsed = c_float(0)
        for event in events:
            self.call("cuEventCreate", byref(event), 0)
        try:
            self.call("cuEventRecord", events[0], self._stream)
            work()
            self.call("cuEventRecord", events[1], self._stream)
            self.synchronise()
            self.call("cuEventElapsedTime", byref(elapsed), events[0], events[1])
        finally:
            for event in events:
                self.call("cuEventDestroy_v2", event)
        return float(elapsed.value)

    def close(self) -> None:
        """Destroy the stream and release the context; a second call has no effect."""
        if self._context is None:
            return
        self.make_current()
        self.call("cuStreamDestroy_v2", self._stream)
        self.call("cuDevicePrimaryCtxRelease_v2", self._device)
        self._context = None

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises EdgeformerError with the driver's own explanation."""
        status = int(getattr(self._driver, function)(*arguments))
        if status == 0:
            return
        text = c_char_p()
        self._driver.cuGetErrorString(status, byref(text))
        explained = (text.value or b"no explanation").decode("utf-8", "replace")
        memory = "not enough GPU memory: " if status == _OUT_OF_MEMORY else ""
        raise EdgeformerError(f"{memory}CUDA's {function} fails with error {status} ({explained})")


def _library() -> Any:
    """Load the driver and declare its signatures; without them ctypes truncates pointers to 32 bits."""
    library = ctypes.CDLL(LIBRARY)
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return library
