"""Fit the estimator's record to published measurements, cross-validate it, and write the pages of the devices.

    python -m benchmarks.published

Writes edgeformer/estimate/published.json, which ships, and benchmarks/results/published.json, of which
docs/results/devices.md and the pages of the devices are made. Takes a minute.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.fit import Groups, fit, left_out, summary
from benchmarks.published.networks import FOLDER
from benchmarks.published.pages import RESULT, draw, index_facts
from benchmarks.published.rows import Measurement, load, rebuilt
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.estimate.estimate import works_of
from edgeformer.estimate.published import Errors, PublishedRecord, Setting, phase_of, product_type
from edgeformer.estimate.roofline import Rates, rates_of, work_ms
from edgeformer.system.host import now

SUPPORTED = {"tensorrt", "onnxruntime", "openvino", "litert", "executorch", "llamacpp", "torch", "torch.compile"}
TF32 = ("tensorrt", "onnxruntime", "tensorflow")
"""Runtimes that multiply FP32 in TF32 by default on cards since Ampere."""
_FUSING = {"tensorrt", "fastertransformer", "openvino", "tensorflow", "torch.compile"}
_VARIANTS = {
    "A100.*40GB": (1.0, 1555 / 2039), "A100 PCIe 80GB": (1.0, 1935 / 2039), "H100 PCIe": (756 / 989, 2000 / 3350),
    "Orin Nano.*(25 W|MAXN|Super)": (1.0, 1.0), "Orin Nano": (625 / 1020, 68 / 102.4), r"Pi 4.*1\.8 GHz": (1.2, 1.0),
}  # fmt: skip
"""Pattern of a device → its rates of arithmetic and of memory as multiples of those of its profile, by data sheets."""
_TOO_FAST = "faster than the device's peak allows"
_LEAST_SHARE, _WINOGRAD = 0.6, 2.25
"""A time below this share of that of its products at the peak is wrong; convolutions may need fewer multiplications."""
RECORD = Path(__file__).parents[2] / "edgeformer" / "estimate" / "published.json"


@cache
def profile(name: str) -> DeviceProfile:
    """Return a shipped profile, or the processor of this name in processors.csv."""
    if name in shipped_names("profiles"):
        return load_profile(name)
    row = processors()[name]

    def fact(key: str) -> Any:
        return {"value": float(row[key]), "source": row["source"], "verified": "data sheet"} if row[key] else None

    names = ("bandwidth_bytes_per_s", "cache_bytes", "cores", "launch_overhead_us")
    peaks = {"fp32": fact("fp32_ops_per_s"), "int8": fact("int8_ops_per_s")}
    sections = {"name": name, "title": row["title"], "kind": "cpu", "peaks": peaks, **{key: fact(key) for key in names}}
    return DeviceProfile.model_validate(sections, strict=False)


@cache
def processors() -> dict[str, dict[str, str]]:
    """Return the processors of published rows that have no profile, by name."""
    lines = (FOLDER / "processors.csv").read_text(encoding="utf-8").splitlines()
    return {row["name"]: row for row in csv.DictReader(lines)}


def rates(row: Measurement) -> Rates:
    """Return the rates of a row's device for its precision and threads. Raises EdgeformerError: a fact is missing."""
    device = profile(row.profile)
    on_gpu = device.kind == "cuda"
    computed = product_type(device, row.runtime, row.precision, TF32)
    of_profile = rates_of(device, "fp16" if on_gpu and computed == "int4" else computed)
    clock, memory = next((factors for text, factors in _VARIANTS.items() if re.search(text, row.device)), (1.0, 1.0))
    if not on_gpu and row.threads and of_profile.cores:
        clock *= min(1.0, row.threads / of_profile.cores)
    return replace(
        of_profile, peak=of_profile.peak * clock, vector_peak=of_profile.vector_peak * clock,
        bandwidth=of_profile.bandwidth * memory,
    )  # fmt: skip


def counted() -> tuple[list[Measurement], NDArray[np.float64], list[float], dict[str, Any]]:
    """Return the rows of rebuilt models on shipped profiles, their work, their operations, and how many there are."""
    usable, reasons = load()
    profiles, rows, features, operations, every = {*shipped_names("profiles"), *processors()}, [], [], [], 0
    for row, nodes in rebuilt():
        every += 1
        if row.profile not in profiles:
            continue
        try:
            of_device = rates(row)
        except EdgeformerError:
            continue
        works = works_of(nodes, row.precision, on_gpu=of_device.gpu)
        weights = sum(work.weight_bytes for work in works)
        work = work_ms(works, of_device, weights, fused=row.runtime in _FUSING)
        if row.ms < _LEAST_SHARE * (work[1] + work[2] + work[3] / _WINOGRAD):
            reasons[_TOO_FAST] = reasons.get(_TOO_FAST, 0) + 1
            continue
        rows.append(row)
        features.append(work)
        operations.append(sum(work.operations for work in works))
    published = len(usable) + sum(reasons.values()) - reasons.get(_TOO_FAST, 0)
    counts: dict[str, Any] = {"published": published, "usable": len(usable), "rebuilt": every, "of devices": len(rows)}
    counts["left out"] = reasons
    return rows, np.array(features), operations, counts


def setting_of(row: Measurement, work: Sequence[float]) -> Setting:
    """Return what the estimate of a row depends on."""
    device = profile(row.profile)
    precision = product_type(device, row.runtime, row.precision, TF32)
    return Setting(device.kind, row.profile, row.runtime, precision, phase_of(row.phase, work))


def main() -> None:
    """Count, fit, cross-validate and write."""
    rows, features, operations, counts = counted()
    settings = [setting_of(row, work) for row, work in zip(rows, features.tolist(), strict=True)]
    sources = [row.source for row in rows]
    ms = np.array([row.ms for row in rows])
    is_supported = np.array([row.runtime in SUPPORTED for row in rows])
    print({**counts, "supported": int(is_supported.sum())})
    kept = np.flatnonzero(is_supported)
    of_kept: list[Setting] = [settings[row] for row in kept]
    kept_sources = [sources[row] for row in kept]
    errors, factors, groups = {}, {}, {}
    for is_known, keys in ((True, sources), (False, [row.profile for row in rows])):
        errors[is_known] = left_out(features, settings, ms, keys)[kept]
        groups[is_known] = Groups(errors[is_known], of_kept, [keys[row] for row in kept], is_known=is_known)
        factors[is_known] = groups[is_known].factors()
    of_groups = {
        name: summary(errors[known][numbers], factors[known][numbers], [kept_sources[number] for number in numbers],
                      groups[known].factor(name))
        for known in (True, False)
        for name in groups[known].names
        for numbers in (groups[known].rows(name),)
    }  # fmt: skip
    devices = {}
    for device in sorted({setting.device for setting in of_kept} - processors().keys()):
        numbers = np.array([number for number, setting in enumerate(of_kept) if setting.device == device])
        own_sources = [kept_sources[number] for number in numbers]
        of_device = errors[True][numbers], factors[True][numbers]
        devices[device] = summary(*of_device, own_sources, float(np.median(of_device[1])))
    write_record(rows, kept.tolist(), operations, fit(features, settings, ms), of_kept, devices, of_groups)
    names: dict[str, int] = {}

    def place(name: str) -> int:
        return names.setdefault(name, len(names))

    cases = []
    for number, row in enumerate(kept):
        of_row, setting = rows[row], of_kept[number]
        size = of_row.past if of_row.phase == "decode" else of_row.size
        checks = [float(f"{values[known][number]:.4f}") for known in (True, False) for values in (errors, factors)]
        cases.append([
            place(of_row.profile), place(of_row.runtime), setting.precision, setting.phase,
            place(of_row.model.partition("|")[0]), of_row.batch, size, of_row.ms, place(of_row.source), *checks,
        ])  # fmt: skip
    result = {"created": now()[:10], "counts": counts, "names": [*names], "rows": cases}
    RESULT.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    draw()
    facts = index_facts()
    print(facts["by_device"], facts["by_class"], sep="\n\n")


def write_record(
    rows: list[Measurement], kept: list[int], operations: list[float], effects: dict[str, float],
    settings: list[Setting], devices: dict[str, Errors], errors: dict[str, Errors],
) -> None:  # fmt: skip
    """Write the record that ships: effects, errors of devices and of groups, and the rows of supported runtimes."""
    names: dict[str, int] = {}

    def place(name: str) -> int:
        return names.setdefault(name, len(names))

    lines = []
    for number, setting in zip(kept, settings, strict=True):
        row = rows[number]
        model, size = row.model.partition("|")[0], row.past if row.phase == "decode" else row.size
        figures = float(f"{row.ms:.4g}"), float(f"{operations[number] / 1e9:.3g}")
        if row.profile not in processors():
            lines.append((
                place(row.profile), place(row.runtime), setting.precision, setting.phase, place(model), row.batch, size,
                *figures, place(row.source),
            ))  # fmt: skip
    supported = {f"{word} {runtime}" for word in ("cpu", "cuda") for runtime in SUPPORTED}
    record = PublishedRecord(
        created=now()[:10], tf32=tuple(name for name in TF32 if name in SUPPORTED),
        devices=devices, errors=errors,
        names=tuple(names), rows=tuple(lines),
        effects={
            name: round(value, 3) for name, value in effects.items()
            if abs(value) >= 0.0005 and (not name.startswith(("runtime", "precision", "phase"))
                                         or " ".join(name.split(":")[0].split()[1:3]) in supported)
        },
    )  # fmt: skip
    RECORD.write_text(record.model_dump_json() + "\n", encoding="utf-8")
    print(f"{RECORD.name}: {RECORD.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
