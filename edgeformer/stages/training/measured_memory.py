"""Peak memory of this process so far: the allocator's on CUDA, the resident set on a CPU."""

from __future__ import annotations

import sys

import psutil
import torch


def reset_peak(device_type: str) -> None:
    """Begin a new peak where the system can (CUDA's allocator); a process's resident peak only ever grows."""
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def measured_peak(device_type: str) -> tuple[int | None, str]:
    """Bytes, and what they are."""
    if device_type == "cuda":
        return int(torch.cuda.max_memory_allocated()), "peak of torch's CUDA allocator, without context and cache"
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset), "peak working set of the whole process"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, "peak resident set of the whole process, libraries and data included"
