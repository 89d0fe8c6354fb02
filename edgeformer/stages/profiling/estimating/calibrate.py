"""`profile --calibrate`: this host's rates, and how near its operators come to them, from a bundle's graphs at shapes
that :mod:`.check` does not use."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import yaml

from edgeformer.backends import default_provider, library_versions
from edgeformer.bundle import Bundle
from edgeformer.formats.device import Calibration, DeviceProfile, Fact, FittedCase, Peaks
from edgeformer.formats.errors import EdgeformerError, InputError
from edgeformer.formats.files import write_text
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.progress import Progress, Silent, bar
from edgeformer.formats.units import parse_bytes
from edgeformer.machine.host import cpu_name, default_threads, now
from edgeformer.stages.profiling.estimating.fit import (
    CallSample,
    NodeSample,
    alike,
    fit_operators,
    meet_calls,
    memory_ratio,
)
from edgeformer.stages.profiling.estimating.listing import ROUNDS, ItemNodes, Listing, ListSpec, run_listing
from edgeformer.stages.profiling.estimating.probe import HostRates, ProductTime, run_probe
from edgeformer.stages.profiling.estimating.rates import Rates, rates_of
from edgeformer.stages.profiling.estimating.roofline import amounts, beyond_cache, fitted_us
from edgeformer.stages.profiling.estimating.work import NodeWork, count_nodes, stored_weight_bytes
from edgeformer.stages.profiling.messages import CheckedArtifact, Item, Shape

# None of batch 1 or 8 with 16, 64 or 128 tokens: those stay unseen, to check estimates at.
FIT_SHAPES: tuple[Shape, ...] = (
    (1, 8), (1, 32), (1, 48), (1, 96), (1, 192), (2, 24), (4, 8), (4, 48), (4, 96), (16, 8), (16, 32), (16, 48),
)  # fmt: skip
_PRECISIONS = ("fp32", "int8", "fp16")
# All artifacts together; the probe and the listings without timing come on top.
_BUDGET_S = 100.0
# A probe's product beside a product of the model: it shows sizes that the model lacks, but the model is what counts.
_PROBE_WEIGHT = 0.5

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# A product this small says more about overhead than about a rate.
_LEAST_OPERATIONS = 1e7

Timed = tuple[ArtifactManifest, Listing]
"""An artifact and its items, timed."""

_COMMENTS = {
    "cpu": """\
# Written by `edgeformer profile --calibrate`: this host's rates as they were measured, and what the estimator learned.
# It says nothing about another machine, and is refused there. Budgets are yours to change; the rest is not.
""",
    "cuda": """\
# Written by `edgeformer profile --validate`: the profile as it was, and how far estimates from its facts were from
# measurements on the card itself. Facts and budgets are yours to change; then validate again.
""",
}


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
        progress: where to say what is going on.

    Raises:
        InputError: not a CPU profile, no FP32 ONNX graph, or too few shapes to fit on.
        ArtifactError: the bundle, or a file of it, is missing, truncated or changed.
        EdgeformerError: the measuring processes did not answer.
    """
    if base.kind != "cpu":
        raise InputError(f"only processors can be calibrated so far, and {base.name!r} is a {base.kind} device")
    opened = Bundle.open(bundle)
    chosen = full_graphs(opened, _PRECISIONS)
    if not chosen or chosen[0].artifact.precision != "fp32":
        raise InputError(f"{bundle}: calibrating needs the full FP32 ONNX graph; export the run again")
    longest = opened.manifest.max_positions
    if longest is None:
        raise InputError(f"{bundle}: calibrating needs a model that takes texts of many lengths, not a wrapped graph")
    fitting = sorted((shape for shape in shapes if shape[1] <= longest), key=lambda shape: shape[0] * shape[1])
    if len(fitting) < 4:
        raise InputError(
            f"calibrating needs at least 4 shapes that the model takes (up to {longest} tokens), not {len(fitting)}"
        )
    items: tuple[Item, ...] = tuple(("steady", batch, seq) for batch, seq in fitting)
    count, shown = threads or default_threads(), progress or Silent()
    with bar(shown, "measuring this host's rates", None):
        probed = run_probe(count)
    timed = [_time(checked, items, count, _BUDGET_S / len(chosen), shown) for checked in chosen]
    return _fit(opened.name, _host_facts(base, count, probed, timed), count, probed, timed)


def write_profile(device: DeviceProfile, folder: Path) -> Path:
    """Write a calibrated profile as ``folder/<name>.yaml``, where ``load_profile(name, folder)`` finds it.

    Args:
        device: the profile.
        folder: of the user's own profiles.
    """
    document = device.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    path = folder / f"{device.name}.yaml"
    write_text(path, _COMMENTS[device.kind] + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120))
    return path


def full_graphs(bundle: Bundle, precisions: Sequence[str]) -> list[CheckedArtifact]:
    """The full, untrimmed ONNX graphs of a bundle, after their files were checked.

    Args:
        bundle: an opened one.
        precisions: of the graphs, in the order that is wanted.

    Raises:
        ArtifactError: a file is missing, truncated or changed.
    """
    full = [artifact for artifact in bundle.built("full") if artifact.is_graph and not artifact.trimmed]
    wanted = [artifact for precision in precisions for artifact in full if artifact.precision == precision]
    return [CheckedArtifact.of(bundle, artifact) for artifact in wanted]


def _time(checked: CheckedArtifact, items: tuple[Item, ...], threads: int, budget_s: float, shown: Progress) -> Timed:
    spec = ListSpec(checked=checked, items=items, threads=threads, timed=True, budget_s=budget_s)
    name = checked.artifact.id
    # Every item is timed in some rounds, and then listed.
    with bar(shown, f"timing {name}", len(items) * (ROUNDS + 1), "step"):
        listing = run_listing(spec, shown.advance)
    for item, reason in listing.refused.items():
        shown.message(f"{name} at {item[1]}×{item[2]}: not timed: {reason}")
    return checked.artifact, listing


def _fit(run: str, device: DeviceProfile, threads: int, probed: HostRates, timed: Sequence[Timed]) -> DeviceProfile:
    rates = {name: rates_of(device, name) for name in _PRECISIONS}
    nodes = _probe_samples(rates["fp32"], probed)
    ratio = memory_ratio(nodes, rates["fp32"])
    calls: dict[tuple[str, Item], CallSample] = {}
    for artifact, listing in timed:
        for item, listed in listing.items.items():
            calls[artifact.id, item], samples = _samples(artifact, listed, rates[artifact.precision])
            nodes += samples
    if sum(call.precision == "fp32" for call in calls.values()) < 4:
        raise EdgeformerError("fewer than 4 shapes of the FP32 graph could be timed: too little to fit on")
    classes, operators = fit_operators(nodes, rates, ratio)
    calibration = Calibration(
        created=now(), processor=cpu_name(), threads=threads, provider=default_provider("cpu"),
        versions=library_versions(), efficiencies=classes, operators=operators,
    )  # fmt: skip
    calibration = meet_calls(calibration, list(calls.values()), rates)
    fitted: list[FittedCase] = []
    for (name, (_, batch, seq)), call in calls.items():
        estimated_us = fitted_us(call.works, rates[call.precision], calibration, call.precision, call.weight_bytes)
        times = {"measured_ms": call.measured_us / 1000, "estimated_ms": estimated_us / 1000}
        fitted.append(FittedCase(run=run, artifact=name, precision=call.precision, batch=batch, seq=seq, **times))
    return device.model_copy(update={"calibration": calibration.model_copy(update={"fitted_on": tuple(fitted)})})


def _samples(artifact: ArtifactManifest, item: ItemNodes, rates: Rates) -> tuple[CallSample, list[NodeSample]]:
    precision, nodes = artifact.precision, item.nodes
    works = count_nodes(nodes)
    weight_bytes = stored_weight_bytes(nodes, works, artifact)
    beyond = beyond_cache(weight_bytes, rates.cache_bytes)
    whole_us = sum(node.duration_us for node in nodes)
    samples = [
        NodeSample(precision, work, amounts(work, beyond, rates.cache_bytes), node.duration_us, whole_us)
        for node, work in zip(nodes, works, strict=True)
    ]
    assert item.call_us is not None
    return CallSample(precision, tuple(works), item.call_us, weight_bytes), alike(samples)


def _probe_samples(rates: Rates, probed: HostRates) -> list[NodeSample]:
    samples: list[NodeSample] = []
    for time in probed.products:
        weight = 4.0 * time.width**2
        beyond = beyond_cache(weight * time.weights, rates.cache_bytes)
        moved = 8.0 * time.rows * time.width
        work = NodeWork("gemm", "MatMul", 2.0 * time.rows * time.width**2, weight, moved, time.rows, time.width)
        amount = amounts(work, beyond, rates.cache_bytes)
        samples.append(NodeSample("fp32", work, amount, time.duration_us, time.duration_us / _PROBE_WEIGHT))
    return samples


def _host_facts(base: DeviceProfile, threads: int, rates: HostRates, timed: Sequence[Timed]) -> DeviceProfile:
    """``base``, which keeps its name, title and budgets, with the facts of this host."""
    when = f"measured by edgeformer profile --calibrate on {now()[:10]} with {threads} threads ({cpu_name()})"

    def measured(value: float, what: str) -> Fact[float]:
        return Fact[float](value=float(f"{value:.4g}"), source=f"{when}: {what}", verified=True)

    best = max(2.0 * time.rows * time.width**2 / (time.duration_us * 1e-6) for time in rates.products)
    int8 = [
        work.operations / (node.duration_us * 1e-6)
        for _, listing in timed
        for item in listing.items.values()
        for work, node in zip(count_nodes(item.nodes), item.nodes, strict=True)
        if work.quantized and work.operations > _LEAST_OPERATIONS and node.duration_us > 0
    ]
    cache, how = cache_bytes(rates.products)
    return base.model_copy(
        update={
            "peaks": Peaks(
                fp32=measured(best, "the fastest of ONNX Runtime's products of float32 matrices"),
                int8=measured(max(int8), "the fastest product of the bundle's INT8 graph") if int8 else None,
            ),
            "bandwidth_bytes_per_s": measured(rates.bandwidth, "ONNX Runtime adding two tensors of 64 MiB"),
            "launch_overhead_us": measured(rates.operator_us, "an operator on one number, in chains of 32 and of 288"),
            "cache_bytes": Fact[int](value=cache, source=f"{how} ({cpu_name()})", verified=True),
            "cores": Fact[int](value=threads, source=f"{when}: threads that were used", verified=True),
        }
    )


def cache_bytes(products: Sequence[ProductTime], root: Path = _CACHES) -> tuple[int, str]:
    """The last-level cache in bytes, and where that is from: the system, or else the probe's products.

    Args:
        products: single rows times different amounts of weights show from where on these come from memory.
        root: where Linux describes the first core's caches.
    """
    found: list[int] = []
    for file in root.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            found.append(parse_bytes(file.read_text(encoding="ascii").strip() + "iB"))  # it writes 512K
    if found:
        return max(found), "as Linux says"
    sizes = {4 * time.width**2 * time.weights: time for time in products if time.rows == 1}
    rates = {size: 4 * time.width**2 / time.duration_us for size, time in sizes.items()}
    middle = (max(rates.values()) * min(rates.values())) ** 0.5
    # At half of its size a cache delivers about the geometric middle of its own and the memory's rate.
    return 2 * max(size for size, rate in rates.items() if rate >= middle), "from the time of products of single rows"
