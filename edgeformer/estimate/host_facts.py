"""Measured facts of this host (`verified: true`), each with method and date."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeformer.artifacts.device import DeviceProfile, Fact, Peaks
from edgeformer.estimate.fit import Floats, nnls
from edgeformer.estimate.operators import count_nodes
from edgeformer.estimate.probe import HostRates, ProductTime
from edgeformer.estimate.profiled import Timed
from edgeformer.estimate.rates import RAMP
from edgeformer.estimate.roofline import beyond_cache
from edgeformer.system.host import cpu_name, now, stated_cache_bytes

# A product this small says more about overhead than about a rate.
_LEAST_OPERATIONS = 1e7
# Products that read weights rather than compute; sets that the cores do not hold for themselves, for each of them; and
# enough of these.
_FEW_ROWS, _LEAST_SHOWN, _FEWEST_SETS = 4, 3 << 20, 4
# Sets so much smaller than that are not looked at either: what the cores hold would be taken for the last-level cache.
_SMALL_FOR_CORES = 2
_MOST_OFF = 0.5
"""A product that was disturbed is not counted as further off than that."""
# A smaller cache is believed where the stated one leaves more than that of the times unexplained, and it much less.
_EXPLAINED, _CLEARLY = 0.05, 0.5
# Of a cache: where it may begin to keep less than everything, and where it may keep nothing.
_BEGINS, _ENDS = (0.125, 0.25, 0.5, 0.7, 1.0), (0.75, 1.0, 1.25, 1.5, 2.0, 3.0)


def host_facts(
    base: DeviceProfile, threads: int, rates: HostRates, timed: Sequence[Timed], disturbed: str | None = None
) -> DeviceProfile:
    """``base``, which keeps its name, title and budgets, with the facts of this host.

    Args:
        base: of a host.
        threads: that were used.
        rates: measured.
        timed: artifacts.
        disturbed: what else used the machine meanwhile: then nothing of this counts as verified.
    """
    when = f"measured by edgeformer calibrate on {now()[:10]} with {threads} threads ({cpu_name()})"
    when += f"; {disturbed}" if disturbed else ""
    quiet = disturbed is None

    def measured(value: float, description: str) -> Fact[float]:
        return Fact[float](value=float(f"{value:.4g}"), source=f"{when}: {description}", verified=quiet)

    best = max(2.0 * time.rows * time.width**2 / (time.duration_us * 1e-6) for time in rates.products)
    int8 = [
        work.operations / (node.duration_us * 1e-6)
        for entry in timed
        for item in entry.listing.items.values()
        for work, node in zip(count_nodes(item.nodes), item.nodes, strict=True)
        if work.quantized and work.operations > _LEAST_OPERATIONS and node.duration_us > 0
    ]
    cache, how = shown_cache(rates.products, threads, *cache_bytes(rates.products, stated_cache_bytes()))
    return base.model_copy(
        update={
            "peaks": Peaks(
                fp32=measured(best, "the fastest of ONNX Runtime's products of float32 matrices"),
                int8=measured(max(int8), "the fastest product of the bundle's INT8 graph") if int8 else None,
            ),
            "bandwidth_bytes_per_s": measured(rates.bandwidth, "ONNX Runtime adding two tensors of 64 MiB"),
            "launch_overhead_us": measured(rates.operator_us, "an operator on one number, in chains of 32 and of 288"),
            "cache_bytes": Fact[int](value=cache, source=f"{how} ({cpu_name()})", verified=quiet),
            "cores": Fact[int](value=threads, source=f"{when}: threads that were used", verified=True),
        }
    )


def cache_bytes(products: Sequence[ProductTime], stated: int | None) -> tuple[int, str]:
    """The last-level cache in bytes, and where that is from: the system, or else the probe's products.

    Args:
        products: single rows times different amounts of weights show from where on these come from memory.
        stated: bytes, as the system says; None: it does not.
    """
    if stated is not None:
        return stated, "as Linux says"
    sizes = {4 * time.width**2 * time.weights: time for time in products if time.rows == 1}
    rates = {size: 4 * time.width**2 / time.duration_us for size, time in sizes.items()}
    middle = (max(rates.values()) * min(rates.values())) ** 0.5
    # At half of its size a cache delivers about the geometric middle of its own and the memory's rate.
    return 2 * max(size for size, rate in rates.items() if rate >= middle), "from the time of products of single rows"


def shown_cache(products: Sequence[ProductTime], threads: int, stated: int, how: str) -> tuple[int, str]:
    """How much of a cache is really there for one process, where products show that it is less than is stated.

    A virtual machine says how large the whole processor's cache is, of which its neighbours use most.

    Args:
        products: of few rows, times different amounts of weights.
        threads: that computed them.
        stated: bytes.
        how: that is known.
    """
    small_products = _of_few_rows(products, threads)
    smaller = [size for step in range(20) for size in (4 << 20 + step, 6 << 20 + step) if size < stated]
    if not small_products or not smaller:
        return stated, how
    # The mean: few sets are larger than what is really there, and they are what shows it.
    off = {size: float(np.minimum(_off(small_products, size, RAMP), _MOST_OFF).mean()) for size in (*smaller, stated)}
    best = min(smaller, key=lambda size: off[size])
    if off[stated] < _EXPLAINED or off[best] > _CLEARLY * off[stated]:
        return stated, how
    return best, f"as products of few rows show ({how} it is {stated / 2**20:.0f} MiB)"


def shown_ramp(products: Sequence[ProductTime], threads: int, cache: int) -> tuple[float, float] | None:
    """From which share of a cache on weights come from memory, and from which on all of them do, where products show
    clearly that it is not as usual.

    Args:
        products: of few rows, times different amounts of weights.
        threads: that computed them.
        cache: bytes; 0: none is known.
    """
    small_products = _of_few_rows(products, threads)
    if not small_products or not cache:
        return None
    ramps = [(begin, end) for begin in _BEGINS for end in _ENDS if begin < end]
    # The mean: few products lie on the ramp, and a disturbed one makes all ramps alike.
    off = {ramp: float(np.mean(_off(small_products, cache, ramp))) for ramp in ramps}
    best, usual = min(ramps, key=lambda ramp: off[ramp]), off[RAMP]
    return best if usual >= _EXPLAINED and off[best] <= _CLEARLY * usual else None


def _of_few_rows(products: Sequence[ProductTime], threads: int) -> list[ProductTime]:
    """Those that read weights rather than compute, more of them than the cores hold for themselves: of many cores, the
    largest sets that there are. None where these are too few different amounts, or all of them small for the cores."""
    sizes = [(time, 4 * time.width**2 * time.weights) for time in products if time.rows <= _FEW_ROWS]
    largest = sorted({size for _, size in sizes if size >= _LEAST_SHOWN}, reverse=True)[:_FEWEST_SETS]
    if len(largest) < _FEWEST_SETS or threads * _LEAST_SHOWN > _SMALL_FOR_CORES * largest[-1]:
        return []
    least = min(threads * _LEAST_SHOWN, largest[-1])
    return [time for time, size in sizes if size >= least]


def _off(products: Sequence[ProductTime], cache: int, ramp: tuple[float, float]) -> Floats:
    """How far each time is, relative to it, from what weights of such a cache and of the memory take at a rate each."""
    rows = []
    for time in products:
        weight = 4.0 * time.width**2
        beyond = beyond_cache(weight * time.weights, cache, ramp)
        rows.append([1.0, weight * (1 - beyond) / 1e6, weight * beyond / 1e6])
    took = np.array([time.duration_us for time in products])
    matrix = np.array(rows) / took[:, None]
    off: Floats = np.abs(matrix @ nnls(matrix, np.ones(len(took))) - 1)
    return off
