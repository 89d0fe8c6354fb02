"""Fit the share of its stated rates that a device reaches to the published rows, and measure how far estimates are off.

The time of a call is the sum over seven kinds of work (:data:`WORK`) of work divided by the profile's rate, times a
factor for each kind. The logarithm of a factor is a sum of effects: of the kind of processor, of the runtime, of the
precision, and of the device. Each effect has a normal prior around 0, so that a runtime or a device with few rows stays
near the others (partial pooling). The maximum of the posterior is found by scipy's least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import least_squares

from benchmarks.published.rows import Measurement
from edgeformer.estimate.operators import NodeWork, fuse
from edgeformer.estimate.roofline import Rates, beyond_cache, far_bytes

WORK = ("kernels", "products", "attention", "convolutions", "depthwise", "cache", "memory")
"""Columns: launches, operations of products, of products of activations, of convolutions, and of convolutions of one
channel at a time, and bytes from the cache and from memory; each in milliseconds at the profile's rates."""
_TILE = 64
_NOISE = 0.25
"""Standard deviation of the logarithm of a row that no effect explains: boards, versions, power modes."""
_PRIORS = {"kind": 2.0, "runtime": 0.7, "precision": 0.5, "device": 0.35, "device and runtime": 0.25}
"""Standard deviations of effects; those of a device apply to all kinds of work alike."""


def columns(works: Sequence[NodeWork], rates: Rates, *, fused: bool) -> NDArray[np.float64]:
    """Return the work of a call in milliseconds at the profile's rates, float64 [7]."""
    totals = np.zeros(len(WORK))
    weights = sum(work.weight_bytes for work in works)
    beyond = beyond_cache(weights, rates.cache_bytes)
    kernels = fuse(works) if fused else [[work] for work in works if work.bytes and not work.host_only]
    totals[0] = len(kernels) * rates.overhead_us / 1000
    for kernel in kernels:
        for work in kernel:
            if not work.is_product:
                continue
            share = 1.0
            if rates.cores is not None and rates.gpu:
                tiles = -(-work.rows // _TILE) * -(-work.columns // _TILE)
                share = tiles / (-(-tiles // rates.cores) * rates.cores)
            kind = 2 if work.cls == "attention" else 1
            if work.trust in ("convolution", "narrow"):
                kind = 4 if work.trust == "narrow" else 3
            peak = rates.vector_peak if kind == 4 else rates.peak
            totals[kind] += 1000 * work.operations / (peak * max(share, 0.05))
        moved = _moved(kernel)
        far = sum(far_bytes(work, beyond, rates.cache_bytes) for work in kernel)
        near = moved + sum(work.weight_bytes for work in kernel)
        far = min(far, near)
        totals[5] += 1000 * (near - far) / rates.bandwidth
        totals[6] += 1000 * far / rates.bandwidth
    return totals


def _moved(kernel: Sequence[NodeWork]) -> float:
    """Return the activation bytes of a kernel: a chain of operators reads and writes once."""
    if len(kernel) == 1 or any(work.is_product for work in kernel):
        return sum(work.moved_bytes for work in kernel)
    return max(work.moved_bytes for work in kernel)


@dataclass(frozen=True)
class Effects:
    """Logarithms of factors by the name of their effect."""

    values: dict[str, float]

    def factors(self, names: Sequence[Sequence[str]]) -> NDArray[np.float64]:
        """Return the factor of each kind of work, whose effects have these names; unknown effects are 0."""
        return np.exp([sum(self.values.get(name, 0.0) for name in each) for each in names])


def effect_names(kind: str, row: Measurement) -> list[list[str]]:
    """Return the names of the effects for each kind of work."""
    device = row.profile or row.device
    precision = f"precision:{kind}:{row.runtime}:{row.precision}"
    shared = [f"device:{device}", f"device and runtime:{device}:{row.runtime}:{row.precision}"]
    return [
        [f"kind:{kind}:{work}", f"runtime:{kind}:{row.runtime}:{work}", f"{precision}:{work}", *shared]
        for work in WORK
    ]  # fmt: skip


def fit(features: NDArray[np.float64], names: Sequence[list[list[str]]], ms: NDArray[np.float64]) -> Effects:
    """Return the effects with the largest posterior.

    Args:
        features: work of the rows, [n, 7].
        names: of their effects, [n][7].
        ms: measured times [n].
    """
    index: dict[str, int] = {}
    for row in names:
        for each in row:
            for name in each:
                index.setdefault(name, len(index))
    count, width = len(ms), len(WORK)
    places = [
        (number * width + work, index[name])
        for number, row in enumerate(names)
        for work, each in enumerate(row)
        for name in each
    ]
    rows, cols = np.array(places).T
    design = sparse.csr_array((np.ones(len(rows)), (rows, cols)), shape=(count * width, len(index)))
    prior = np.array([_PRIORS[name.partition(":")[0]] for name in index])

    def parts(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return features * np.exp(np.clip(design @ values, -8, 8)).reshape(count, width)

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([np.log(parts(values).sum(1) / ms) / _NOISE, values / prior])

    def jacobian(values: NDArray[np.float64]) -> sparse.csr_array:
        each = parts(values)
        shares = sparse.diags_array((each / each.sum(1, keepdims=True)).ravel() / _NOISE) @ design
        together = sparse.csr_array(
            (np.ones(count * width), (np.repeat(np.arange(count), width), np.arange(count * width)))
        )
        return sparse.csr_array(sparse.vstack([together @ shares, sparse.diags_array(1 / prior)]))

    start = np.zeros(len(index))
    found = least_squares(residuals, start, jac=jacobian, loss="soft_l1", tr_solver="lsmr", method="trf", max_nfev=60)
    return Effects(dict(zip(index, found.x.tolist(), strict=True)))
