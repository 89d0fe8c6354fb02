"""The calls of CUDA's driver, against a stand-in of a few lines of C: pointers must arrive whole."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.system import cuda_driver
from edgeformer.system.cuda_driver import Cuda, Device, DeviceMemory

# Handles are larger than 32 bits, and each call checks the one that it is given.
STAND_IN = r"""
#include <stdlib.h>
#include <string.h>
#define CONTEXT ((void *)0x7fff12345678)
#define STREAM ((void *)0x7fffabcdef01)
typedef unsigned long long Address;
static int blocks;
int open_blocks(void) { return blocks; }
int cuInit(unsigned flags) { return flags; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "made up"; return error < 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Stand-in", size); return device; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 8 : 9; return device; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = CONTEXT; return device; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxSetCurrent(void *context) { return context == CONTEXT ? 0 : 201; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = STREAM; return flags; }
int cuStreamSynchronize(void *stream) { return stream == STREAM ? 0 : 400; }
static int events;
static float clock_ms;
int open_events(void) { return events; }
void let_pass(float milliseconds) { clock_ms += milliseconds; }
int cuEventCreate(void **event, unsigned flags) { *event = malloc(sizeof(float)); events++; return flags; }
int cuEventRecord(void *event, void *stream) { *(float *)event = clock_ms; return stream == STREAM ? 0 : 400; }
int cuEventElapsedTime(float *ms, void *first, void *last) { *ms = *(float *)last - *(float *)first; return 0; }
int cuEventDestroy_v2(void *event) { free(event); events--; return 0; }
int cuStreamDestroy_v2(void *stream) { return stream == STREAM ? 0 : 400; }
int cuMemAlloc_v2(Address *address, size_t size) {
    if (size > 1ull << 33) return 2;
    *address = (Address)malloc(size); blocks++; return 0;
}
int cuMemFree_v2(Address address) { free((void *)address); blocks--; return 0; }
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream) {
    memcpy((void *)to, from, size); return stream == STREAM ? 0 : 400;
}
int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream) {
    memcpy(to, (void *)from, size); return stream == STREAM ? 0 : 400;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or os.name == "nt":
        pytest.skip("no C compiler here")
    (tmp_path / "driver.c").write_text(STAND_IN, encoding="ascii")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "driver.so", "driver.c"], cwd=tmp_path, check=True)
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(tmp_path / "driver.so"))
    return tmp_path / "driver.so"


def test_without_the_library_there_is_a_reason_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libnowhere.so.1")
    monkeypatch.setattr("sys.platform", "linux")
    assert cuda_driver.problem() == "the driver library libnowhere.so.1 is not installed"
    assert (cuda_driver.version(), cuda_driver.devices()) == (None, [])
    with pytest.raises(EdgeformerError, match="libnowhere"):
        Cuda()


def test_arrays_go_there_and_back_and_memory_is_given_back(driver: Path) -> None:
    assert (cuda_driver.problem(), cuda_driver.version()) == (None, "12.8")
    assert cuda_driver.devices() == [Device(0, "Stand-in", "8.9")]
    cuda = Cuda()
    array = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
    memory = DeviceMemory(cuda, array.nbytes)
    assert ctypes.CDLL(str(driver)).open_blocks() == 1
    cuda.upload(array, memory)
    result = cuda.download(memory, array.shape, array.dtype)
    cuda.synchronise()
    assert np.array_equal(result, array)
    assert cuda.download(memory, (0, 4), np.float32).shape == (0, 4)
    memory.free()
    memory.free()
    assert ctypes.CDLL(str(driver)).open_blocks() == 0
    cuda.close()
    cuda.close()


def test_work_is_timed_between_two_events_that_are_given_back(driver: Path) -> None:
    library = ctypes.CDLL(str(driver))
    library.let_pass.argtypes = (ctypes.c_float,)
    cuda = Cuda()
    library.let_pass(100.0)
    assert cuda.timed_ms(lambda: library.let_pass(2.5)) == pytest.approx(2.5)
    message = r"not enough GPU memory: CUDA's cuMemAlloc_v2 fails with error 2 \(made up"
    with pytest.raises(EdgeformerError, match=message):
        cuda.timed_ms(lambda: DeviceMemory(cuda, 2**40))
    assert library.open_events() == 0
    cuda.close()
