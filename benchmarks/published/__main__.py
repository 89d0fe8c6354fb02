"""How far are estimates from published measurements: fitted to other sources or devices, and by the estimator of today?

    python -m benchmarks.published

Prints how many rows can be used, and errors on those of supported runtimes and shipped profiles. Takes five minutes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from benchmarks.published.fit import columns, effect_names, fit
from benchmarks.published.rows import Measurement, load, rebuilt
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.estimate.operators import count_nodes
from edgeformer.estimate.roofline import Rates, range_us, rates_of

SUPPORTED = {"tensorrt", "onnxruntime", "openvino", "litert", "executorch", "llama.cpp", "torch", "torch.compile"}
_FUSING = {"tensorrt", "fastertransformer", "openvino", "tensorflow", "torch.compile"}
_WEIGHT_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.55}
"""Bytes of a stored weight; those of four bits have scales."""
_FOLDS = 10


def rates(row: Measurement) -> Rates:
    """Return the rates of a row's device for its precision and threads. Raises EdgeformerError: a fact is missing."""
    device = load_profile(row.profile)
    on_gpu = device.kind == "cuda"
    of_profile = rates_of(
        device, {"tf32": "fp32", "int4": "fp16" if on_gpu else "int4"}.get(row.precision, row.precision)
    )
    if row.precision == "tf32" and device.peaks.fp16 is not None:  # tensor cores compute TF32 at half that
        of_profile = replace(of_profile, peak=device.peaks.fp16.value / 2)
    if not on_gpu and row.threads and of_profile.cores:
        share = min(1.0, row.threads / of_profile.cores)
        of_profile = replace(of_profile, peak=of_profile.peak * share, vector_peak=of_profile.vector_peak * share)
    return of_profile


def errors(
    rows: list[Measurement], features: NDArray[np.float64], key: Callable[[Measurement], str]
) -> NDArray[np.float64]:
    """Return log(estimated / measured) of each row by a fit to rows of other groups."""
    groups = [key(row) for row in rows]
    folds = {group: number % _FOLDS for number, (group, _) in enumerate(Counter(groups).most_common())}
    fold_of_row = np.array([folds[group] for group in groups])
    names = [effect_names(load_profile(row.profile).kind, row) for row in rows]
    ms, found = np.array([row.ms for row in rows]), np.zeros(len(rows))
    for fold in range(_FOLDS):
        train = np.flatnonzero(fold_of_row != fold)
        effects = fit(features[train], [names[number] for number in train], ms[train])
        for number in np.flatnonzero(fold_of_row == fold):
            found[number] = math.log(features[number] @ effects.factors(names[number]) / ms[number])
    return found


def main() -> None:
    """Command line."""
    usable, left_out = load()
    print(f"{len(usable):,} usable rows; left out: {left_out}")
    profiles, rows, features, today = set(shipped_names("profiles")), list[Measurement](), [], []
    count = 0
    for row, nodes in rebuilt():
        count += 1
        if row.profile not in profiles:
            continue
        try:
            of_device = rates(row)
        except EdgeformerError:
            continue
        float_bytes = 2 if of_device.gpu and row.precision in ("fp16", "int8", "int4") else 4
        scale = _WEIGHT_BYTES[row.precision] / float_bytes
        works = [replace(work, weight_bytes=scale * work.weight_bytes) for work in count_nodes(nodes, float_bytes)]
        fused = row.runtime in _FUSING
        rows.append(row)
        features.append(columns(works, of_device, fused=fused))
        today.append(range_us(works, of_device, sum(work.weight_bytes for work in works), fused))
    print(f"{count:,} rows of rebuilt models, {len(rows):,} of them of {len({row.profile for row in rows})} profiles")
    is_supported = np.array([row.runtime in SUPPORTED for row in rows])
    table = []
    low, high = np.array(today).T / 1000
    ms = np.array([row.ms for row in rows])
    found = {
        "estimator of today": np.log(np.sqrt(low * high) / ms),
        "other sources": errors(rows, np.array(features), lambda row: row.source),
        "other devices": errors(rows, np.array(features), lambda row: row.profile),
    }
    for name, error in found.items():
        sizes = np.abs(error[is_supported])
        width = f"{np.exp(2 * np.quantile(sizes, 0.9)):.1f}"
        table.append([name, len(sizes), f"{np.expm1(np.median(sizes)):.0%}", width])
    print(tabulate(table, ["fitted to", "rows", "median error", "width that holds 90%"], tablefmt="github"))
    inside = np.mean(((ms >= low) & (ms <= high))[is_supported])
    print(f"ranges of today: {inside:.0%} held, median width {np.median((high / low)[is_supported]):.1f}")


if __name__ == "__main__":
    main()
