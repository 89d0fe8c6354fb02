"""`profile --calibrate`: this host's rates, and how near its operators come to them, from a bundle's graphs at shapes
that validation does not use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from edgeformer.backends import library_versions
from edgeformer.backends.onnxruntime.providers import CPU
from edgeformer.bundle import Bundle
from edgeformer.formats.device import Calibration, DeviceProfile, FittedCase
from edgeformer.formats.errors import EdgeformerError, InputError
from edgeformer.formats.files import write_text
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.progress import Progress, Silent
from edgeformer.machine.host import cpu_name, default_threads, now
from edgeformer.stages.profiling.estimating.fit import (
    CallSample,
    NodeSample,
    alike,
    fit_operators,
    meet_calls,
    memory_ratio,
)
from edgeformer.stages.profiling.estimating.host_facts import host_facts
from edgeformer.stages.profiling.estimating.listing import Listing, run_listing, run_probe
from edgeformer.stages.profiling.estimating.messages import ROUNDS, ListSpec, Probed
from edgeformer.stages.profiling.estimating.rates import rates_of
from edgeformer.stages.profiling.estimating.roofline import Rates, amounts, beyond_cache, fitted_us
from edgeformer.stages.profiling.estimating.work import NodeWork, count_nodes, stored_weight_bytes
from edgeformer.stages.profiling.messages import Item, Shape

HOST_FILE = "host.yaml"

# None of batch 1 or 8 with 16, 64 or 128 tokens: those stay unseen, for validation.
FIT_SHAPES: tuple[Shape, ...] = (
    (1, 8), (1, 32), (1, 48), (1, 96), (1, 192), (2, 24), (4, 8), (4, 48), (4, 96), (16, 8), (16, 32), (16, 48),
)  # fmt: skip
_PRECISIONS = ("fp32", "int8", "fp16")
# All artifacts together; the probe and the listings without timing come on top.
_BUDGET_S = 100.0
# A probe's product beside a product of the model: it shows sizes that the model lacks, but the model is what counts.
_PROBE_WEIGHT = 0.5

_COMMENT = """\
# Written by `edgeformer profile --calibrate`: this host's rates as they were measured, and what the estimator learned.
# It says nothing about another machine, and is refused there. Budgets are yours to change; the rest is not.
"""


@dataclass(frozen=True)
class _Timed:
    """One artifact with the times of its items."""

    artifact: ArtifactManifest
    listing: Listing


def calibrate(
    bundle: Path,
    base: DeviceProfile,
    *,
    threads: int | None = None,
    shapes: Sequence[Shape] = FIT_SHAPES,
    progress: Progress | None = None,
) -> DeviceProfile:
    """The profile of this host's processor with measured rates and a calibration. Takes one to three minutes.

    Args:
        bundle: whose full FP32, INT8 and FP16 ONNX graphs, as far as they are there, are timed on this host.
        base: name, title and budgets are kept.
        threads: of one operator; None: the physical cores that this process may use.
        shapes: (batch, seq) to fit on; those that the model cannot take are left out.

    Raises:
        InputError: not a CPU profile, no FP32 ONNX graph, or too few shapes to fit on.
        ArtifactError: the bundle, or a file of it, is missing, truncated or changed.
        EdgeformerError: the measuring processes did not answer.
    """
    if base.kind != "cpu":
        raise InputError(f"only processors can be calibrated so far, and {base.name!r} is a {base.kind} device")
    manifest = Bundle.open(bundle).manifest
    chosen = _artifacts(bundle, manifest)
    items = _items(manifest, shapes)
    count, shown = threads or default_threads(), progress or Silent()
    shown.start("measuring this host's rates", None)
    try:
        probed = run_probe(count)
    finally:
        shown.finish()
    timed = [_time(bundle, artifact, items, count, _BUDGET_S / len(chosen), shown) for artifact in chosen]
    return _fit(manifest, base, count, probed, timed)


def write_profile(device: DeviceProfile, folder: Path) -> Path:
    """Write a calibrated profile as ``folder/<name>.yaml``, where ``load_profile(name, folder)`` finds it."""
    document = device.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    path = folder / f"{device.name}.yaml"
    write_text(path, _COMMENT + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120))
    return path


def _artifacts(bundle: Path, manifest: BundleManifest) -> list[ArtifactManifest]:
    found = [
        artifact
        for precision in _PRECISIONS
        for artifact in manifest.artifacts
        if artifact.is_graph
        and (artifact.role, artifact.precision, artifact.status) == ("full", precision, "built")
        and not artifact.trimmed
    ]
    if not found or found[0].precision != "fp32":
        raise InputError(f"{bundle}: calibrating needs the full FP32 ONNX graph; export the run again")
    opened = Bundle(bundle, manifest)
    for artifact in found:
        opened.check(artifact)
    opened.golden()
    return found


def _items(manifest: BundleManifest, shapes: Sequence[Shape]) -> tuple[Item, ...]:
    fitting = sorted((shape for shape in shapes if shape[1] <= manifest.max_positions), key=lambda s: s[0] * s[1])
    if len(fitting) < 4:
        raise InputError(
            f"calibrating needs at least 4 shapes that the model takes (up to {manifest.max_positions} tokens), "
            f"not {len(fitting)}"
        )
    return tuple(("steady", batch, seq) for batch, seq in fitting)


def _time(
    bundle: Path, artifact: ArtifactManifest, items: tuple[Item, ...], threads: int, budget_s: float, progress: Progress
) -> _Timed:
    spec = ListSpec(
        bundle=str(bundle.resolve()), artifact=artifact, loops=1, items=items, threads=threads, timed=True,
        budget_s=budget_s,
    )  # fmt: skip
    # Every item is timed in some rounds, and then listed.
    progress.start(f"timing {artifact.id}", len(items) * (ROUNDS + 1), "step")
    try:
        listing = run_listing(spec, progress.advance)
    finally:
        progress.finish()
    for item, reason in listing.refused.items():
        progress.message(f"{artifact.id} at {item[1]}×{item[2]}: not timed: {reason}")
    return _Timed(artifact, listing)


def _fit(
    manifest: BundleManifest, base: DeviceProfile, threads: int, probed: Probed, timed: Sequence[_Timed]
) -> DeviceProfile:
    device = host_facts(base, threads, probed, [_works(one, item) for one in timed for item in one.listing.items])
    rates = {name: rates_of(device, name) for name in _PRECISIONS}
    nodes = _probe_samples(rates["fp32"], probed)
    ratio = memory_ratio(nodes, rates["fp32"])
    calls: dict[tuple[str, Item], CallSample] = {}
    for one in timed:
        for item in one.listing.items:
            call, samples = _samples(device, one, item)
            calls[one.artifact.id, item] = call
            nodes += samples
    if sum(call.precision == "fp32" for call in calls.values()) < 4:
        raise EdgeformerError("fewer than 4 shapes of the FP32 graph could be timed: too little to fit on")
    classes, operators = fit_operators(nodes, rates, ratio)
    calibration = Calibration(
        created=now(), processor=cpu_name(), threads=threads, provider=CPU, versions=library_versions(),
        efficiencies=classes, operators=operators,
    )  # fmt: skip
    calibration = meet_calls(calibration, list(calls.values()), rates)
    fitted = tuple(
        _fitted_case(manifest, device, calibration, name, item, call) for (name, item), call in calls.items()
    )
    return device.model_copy(update={"calibration": calibration.model_copy(update={"fitted_on": fitted})})


def _works(timed: _Timed, item: Item) -> list[tuple[NodeWork, float]]:
    """Work and duration of every node of one item."""
    nodes = timed.listing.nodes(item)
    return [(work, node.duration_us) for work, node in zip(count_nodes(nodes), nodes, strict=True)]


def _samples(device: DeviceProfile, timed: _Timed, item: Item) -> tuple[CallSample, list[NodeSample]]:
    precision, nodes = timed.artifact.precision, timed.listing.nodes(item)
    works = count_nodes(nodes)
    rates = rates_of(device, precision)
    weight_bytes = stored_weight_bytes(nodes, works, timed.artifact)
    beyond = beyond_cache(weight_bytes, rates.cache_bytes)
    done = tuple(amounts(work, beyond, rates.cache_bytes) for work in works)
    whole_us = sum(node.duration_us for node in nodes)
    samples = [
        NodeSample(precision, work, amount, node.duration_us, whole_us)
        for node, work, amount in zip(nodes, works, done, strict=True)
    ]
    call_us = timed.listing.items[item].call_us
    assert call_us is not None
    return CallSample(precision, tuple(works), done, call_us, weight_bytes), alike(samples)


def _probe_samples(rates: Rates, probed: Probed) -> list[NodeSample]:
    samples: list[NodeSample] = []
    for time in probed.products:
        weight = 4.0 * time.width**2
        beyond = beyond_cache(weight * time.weights, rates.cache_bytes)
        moved = 8.0 * time.rows * time.width
        work = NodeWork("gemm", "MatMul", 2.0 * time.rows * time.width**2, weight, moved, time.rows, time.width)
        amount = amounts(work, beyond, rates.cache_bytes)
        samples.append(NodeSample("fp32", work, amount, time.duration_us, time.duration_us / _PROBE_WEIGHT))
    return samples


def _fitted_case(
    manifest: BundleManifest, device: DeviceProfile, calibration: Calibration, name: str, item: Item, call: CallSample
) -> FittedCase:
    rates = rates_of(device, call.precision)
    estimated_us = fitted_us(call.works, rates, calibration, call.precision, call.weight_bytes)
    return FittedCase(
        run=manifest.run, artifact=name, precision=call.precision, batch=item[1], seq=item[2],
        measured_ms=call.measured_us / 1000, estimated_ms=estimated_us / 1000,
    )  # fmt: skip
