"""Rates of this host: matrix products, memory and operators, measured with graphs of our own in a worker process."""

import contextlib
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import DeviceProfile, Fact, Peaks
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.estimate.operators import NodeWork
from edgeformer.measurement.conditions import CpuReading, read_cpu, used_between
from edgeformer.measurement.speed_probe import add_chain, matmul_chain, time_calls
from edgeformer.runtimes import default_provider
from edgeformer.runtimes.onnxruntime.nodes import ProfiledGraph
from edgeformer.system.host import cpu_name, now, stated_cache_bytes, usable_cores
from edgeformer.system.memory import host_free_bytes
from edgeformer.system.worker import Send, WorkerJob, run_job

# (width, different weights): 1 MiB to 192 MiB of weights, from what every cache holds to what few do, and closest where
# most caches end.
_CHAINS = (
    (256, 4), (384, 8), (512, 8), (1024, 1), (1024, 3), (1024, 4), (1024, 5), (1024, 7), (1024, 10), (1024, 24),
    (1024, 48),
)  # fmt: skip
_COPIES = 5  # of a chain's weights in memory, while it is built, read and packed: 4.1 at the peak of the longest one
_ROWS, _PEAK_ROWS = (1, 4, 16, 64, 256), 512
_CALLS = 12
_LARGE = 1 << 24  # 3 × 64 MiB are read and written: more than the last-level cache of any device that profiles know
# The difference of two chains is operators alone, without what a call costs, and without the profiler.
_SHORT_CHAIN, _LONG_CHAIN, _CHAIN_CALLS = 32, 288, 200
_LEAST_OPERATOR_US = 0.05
_TRIES = 2
_LEAST_OPERATIONS = 1e7  # a product this small says more about overhead than about a rate
_CACHED_SHARE = 0.8  # weights that are read at more than this share of the usual rate come from the cache


class ProductTime(Frozen):
    """[rows, width] × [width, width], one of several different weights used in turn."""

    rows: int
    width: int
    weights: int
    duration_us: float


class HostRates(Frozen):
    """Rates of a host."""

    products: tuple[ProductTime, ...]
    bandwidth: float = Field(description="bytes per second, summing tensors that no cache holds")
    operator_us: float = Field(description="from one operator to the next, doing next to nothing")
    call_us: float = Field(0.0, description="of a call, beside its operators")
    disturbed: str | None = Field(None, description="other work on the machine, where that was too much")


class ProbeJob(WorkerJob):
    """Measure the rates of this host."""

    name = "probing"
    messages = (HostRates,)


def run_probe(threads: int) -> HostRates:
    """Measure this host in a worker; in a second one if other work disturbed the first. Raises EdgeformerError."""
    results: list[HostRates] = []
    for _ in range(_TRIES):
        end = run_job(ProbeJob(threads=threads), results.append)
        if not results:
            reason = end.reason or "the probe ended without a result"
            raise EdgeformerError(f"this host's rates were not measured: {reason}")
        if results[-1].disturbed is None:
            break
    return results[-1]


def work(message: bytes, send: Send) -> None:
    """Time chains of products that fit into memory, and sums of large tensors and of single numbers, in 15 s."""
    from edgeformer.runtimes.onnxruntime.session import OnnxSession

    threads, start = ProbeJob.model_validate_json(message).threads, read_cpu()
    generator, (free_bytes, _) = np.random.default_rng(0), host_free_bytes()
    with tempfile.TemporaryDirectory(prefix="edgeformer-probe-") as folder:
        file = Path(folder) / "probe.onnx"
        products: list[ProductTime] = []
        for width, weights in _CHAINS:
            if _COPIES * 4 * width**2 * weights >= free_bytes:
                continue
            file.write_bytes(matmul_chain(width, weights))
            rows = (*_ROWS, _PEAK_ROWS) if weights == 1 else _ROWS
            feeds = [{"x": generator.normal(size=(count, width)).astype(np.float32)} for count in rows]
            listed = ProfiledGraph(file, threads, prepacked=True).list_nodes(*feeds, calls=_CALLS)
            for count, executed in zip(rows, listed, strict=True):
                duration_us = median(node.duration_us for node in executed)
                products.append(ProductTime(rows=count, width=width, weights=weights, duration_us=duration_us))
        file.write_bytes(add_chain(_LARGE, 2))
        inputs = {"x": np.ones(_LARGE, np.float32)}
        (large,) = ProfiledGraph(file, threads, prepacked=True).list_nodes(inputs, calls=6)
        chains_us: list[float] = []  # of a call of each chain: the fastest tenth
        for nodes in (_SHORT_CHAIN, _LONG_CHAIN):
            file.write_bytes(add_chain(1, nodes))
            with contextlib.closing(OnnxSession(file, default_provider("cpu"), threads)) as session:
                times_us = time_calls(partial(session.run, {"x": np.ones(1, np.float32)}), 0.0, _CHAIN_CALLS)
            chains_us.append(float(np.quantile(times_us, 0.1)))
    short_us, long_us = chains_us
    operator_us = max(_LEAST_OPERATOR_US, (long_us - short_us) / (_LONG_CHAIN - _SHORT_CHAIN))
    bandwidth = 3 * 4 * _LARGE / (min(node.duration_us for node in large) * 1e-6)
    call_us = max(0.0, short_us - _SHORT_CHAIN * operator_us)
    send(HostRates(
        products=tuple(products), bandwidth=bandwidth, operator_us=operator_us, call_us=call_us,
        disturbed=disturbance(start),
    ))  # fmt: skip


def disturbance(start: CpuReading) -> str | None:
    """Return what else used the machine since a reading, if that was too much to reproduce the times; else None."""
    used = used_between(start, read_cpu())
    return "; ".join(used.warnings()) if used.disturbed(usable_cores(), None) else None


def host_facts(
    base: DeviceProfile, threads: int, rates: HostRates, works: Sequence[tuple[NodeWork, float]], disturbed: str | None
) -> DeviceProfile:
    """Return ``base`` with the measured facts of this host; it keeps its name, title and budgets.

    ``works`` are nodes of calibrated graphs and their microseconds; the fastest INT8 product is the INT8 peak.
    ``disturbed``: other work on the machine meanwhile; then no fact counts as verified.
    """
    when = f"measured by edgeformer calibrate on {now()[:10]} with {threads} threads ({cpu_name()})"
    when += f"; {disturbed}" if disturbed else ""
    verified: Literal["no", "measured here"] = "no" if disturbed else "measured here"

    def measured(value: float, description: str) -> Fact[float]:
        return Fact[float](value=float(f"{value:.4g}"), source=f"{when}: {description}", verified=verified)

    best = max(2.0 * time.rows * time.width**2 / (time.duration_us * 1e-6) for time in rates.products)
    int8 = [
        work.operations / (duration_us * 1e-6)
        for work, duration_us in works
        if work.quantized and work.operations > _LEAST_OPERATIONS and duration_us > 0
    ]
    cache, source = cache_bytes(rates.products, stated_cache_bytes())
    peaks = Peaks(
        fp32=measured(best, "the fastest of ONNX Runtime's products of float32 matrices"),
        int8=measured(max(int8), "the fastest product of the bundle's INT8 graph") if int8 else None,
    )
    facts = {
        "peaks": peaks,
        "bandwidth_bytes_per_s": measured(rates.bandwidth, "ONNX Runtime adding two tensors of 64 MiB"),
        "launch_overhead_us": measured(rates.operator_us, "an operator on one number, in chains of 32 and of 288"),
        "cache_bytes": Fact[int](value=cache, source=f"{source} ({cpu_name()})", verified=verified),
        "cores": Fact[int](value=threads, source=f"{when}: threads that were used", verified="measured here"),
    }
    return base.model_copy(update=facts)


def cache_bytes(products: Sequence[ProductTime], stated: int | None) -> tuple[int, str]:
    """Return the last-level cache in bytes and the source: the system, or the products where they show less.

    Products of single rows with different amounts of weights show from which amount on these come from memory. A
    virtual machine states the whole processor's cache, of which its neighbours use most.
    """
    single_rows = [time for time in products if time.rows == 1]
    rates = {4 * time.width**2 * time.weights: 4 * time.width**2 / time.duration_us for time in single_rows}
    cached, slowest = median(rates.values()), rates[max(rates)]
    if slowest > _CACHED_SHARE * cached:  # all of them fit
        return stated or 2 * max(rates), "as Linux says" if stated else "the products of single rows all fit"
    # At half of its size a cache delivers about the geometric mean of its own and the memory's rate.
    largest = 2 * max(size for size, rate in rates.items() if rate >= (cached * slowest) ** 0.5)
    if stated is not None and stated <= largest:
        return stated, "as Linux says"
    return largest, "from the time of products of single rows"
