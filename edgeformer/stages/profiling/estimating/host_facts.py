"""This host's rates as a device profile's facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from edgeformer.formats.device import DeviceProfile, Fact, Peaks
from edgeformer.machine.host import cpu_name, now
from edgeformer.stages.profiling.estimating.messages import Probed, ProductTime
from edgeformer.stages.profiling.estimating.work import NodeWork

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}
# A product this small says more about overhead than about a rate.
_LEAST_OPERATIONS = 1e7


def host_facts(
    base: DeviceProfile, threads: int, probed: Probed, calls: Iterable[Sequence[tuple[NodeWork, float]]]
) -> DeviceProfile:
    """``base`` with the facts of this host.

    Args:
        probed: what the probe measured with ``threads`` threads.
        calls: work and microseconds of every node of the calls that were timed: INT8's peak is the best of them.
    """
    when = f"measured by edgeformer profile --calibrate on {now()[:10]} with {threads} threads ({cpu_name()})"

    def measured(value: float, what: str) -> Fact[float]:
        return Fact[float](value=float(f"{value:.4g}"), source=f"{when}: {what}", verified=True)

    best = max(2.0 * time.rows * time.width**2 / (time.duration_us * 1e-6) for time in probed.products)
    int8 = [
        work.operations / (us * 1e-6)
        for call in calls
        for work, us in call
        if work.quantized and work.operations > _LEAST_OPERATIONS and us > 0
    ]
    cache, how = cache_bytes(probed.products)
    return base.model_copy(
        update={
            "peaks": Peaks(
                fp32=measured(best, "the fastest of ONNX Runtime's products of float32 matrices"),
                int8=measured(max(int8), "the fastest product of the bundle's INT8 graph") if int8 else None,
            ),
            "bandwidth_bytes_per_s": measured(probed.bandwidth, "ONNX Runtime adding two tensors of 64 MiB"),
            "launch_overhead_us": measured(probed.operator_us, "an operator on one number, in chains of 32 and of 288"),
            "cache_bytes": Fact[int](value=cache, source=f"{how} ({cpu_name()})", verified=True),
            "cores": Fact[int](value=threads, source=f"{when}: threads that were used", verified=True),
        }
    )


def cache_bytes(products: Sequence[ProductTime], root: Path = _CACHES) -> tuple[int, str]:
    """The last-level cache in bytes, and where that is from: the system, or else the probe's products.

    Args:
        products: single rows times different amounts of weights show from where on these come from memory.
    """
    said = _system_cache(root)
    if said is not None:
        return said, "as Linux says"
    sizes = {4 * time.width**2 * time.weights: time for time in products if time.rows == 1}
    rates = {size: 4 * time.width**2 / time.duration_us for size, time in sizes.items()}
    middle = (max(rates.values()) * min(rates.values())) ** 0.5
    # At half of its size a cache delivers about the geometric middle of its own and the memory's rate.
    return 2 * max(size for size, rate in rates.items() if rate >= middle), "from the time of products of single rows"


def _system_cache(root: Path) -> int | None:
    """Linux: the largest cache of the first core."""
    found: list[int] = []
    for file in root.glob("index*/size"):
        try:
            match = re.fullmatch(r"(\d+)([KMG]?)", file.read_text(encoding="ascii").strip())
        except OSError:
            continue
        if match is not None:
            found.append(int(match[1]) * _UNITS[match[2]])
    return max(found, default=None)
