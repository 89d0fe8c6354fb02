"""From timed graphs to a calibration: all at one speed, without the profiler, operator by operator, then the calls."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError, FittedCase, Response, Speed
from edgeformer.artifacts.documents import save_profile
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.progress import Progress, Silent, bar
from edgeformer.benchmark.measurement import CheckedArtifact, Item, Shape
from edgeformer.benchmark.request import find_target
from edgeformer.bundle import Bundle
from edgeformer.estimate.fit import CallSample, NodeSample, fit_operators, fit_response, meet_calls, memory_ratio
from edgeformer.estimate.host_facts import host_facts, shown_ramp
from edgeformer.estimate.listing import SWEEPS, Listing, ListSpec, Repeats, in_turn, run_listing, together
from edgeformer.estimate.operators import NodeWork
from edgeformer.estimate.probe import HostRates, run_probe
from edgeformer.estimate.profiled import Timed, TimedCall, at_one_speed, counted, speeds_of, without_profiler
from edgeformer.estimate.rates import RAMP, Rates, rates_of
from edgeformer.estimate.roofline import amounts, beyond_cache, fitted_nodes_us
from edgeformer.estimate.speed_probe import UNMOVED, slowness, two_speeds, typical
from edgeformer.runtimes import default_provider, library_versions
from edgeformer.system.capability import kernel_flags
from edgeformer.system.host import cpu_name, default_threads, now, stated_cache_bytes

PRECISIONS = ("fp32", "int8", "fp16")
# A probe's product beside a product of the model: it shows sizes that the model lacks, but the model is what counts.
_PROBE_WEIGHT = 0.5
_FEWEST_SHAPES = 4
OVERLAP = 1.5
"""Exponent of a product that computes while it reads weights of the cache, see :attr:`Rates.overlap`. Of 1, 1.5, 2 and
3 what estimated models best that were left out, on a Xeon with AMX; with 1, products of 16 rows come out a seventh too
slow."""


def fit(
    device: DeviceProfile,
    probed: HostRates,
    calls: Sequence[TimedCall],
    speed: Speed | None = None,
) -> DeviceProfile:
    """The device with a calibration.

    Args:
        device: with this host's facts; ``cores`` are the threads that ``calls`` used.
        probed: the products and the cost of a call, with as many threads.
        calls: of one model or of several.
        speed: of the machine, that the calibration is to hold for; None: the usual one, of two the faster.

    Raises:
        EdgeformerError: too little was timed.
    """
    speeds = two_speeds(speeds_of(calls))
    response = fit_response(calls)
    scaled_calls, target_speed = at_one_speed(calls, speed or (speeds[0] if speeds else None), response)
    threads = device.cores.value if device.cores is not None else 1
    ramp = shown_ramp(probed.products, threads, device.cache_bytes.value if device.cache_bytes is not None else 0)
    rates = {name: replace(rates_of(device, name), ramp=ramp or RAMP, overlap=OVERLAP) for name in PRECISIONS}
    probes = _probe_samples(rates["fp32"], probed, target_speed, response)
    ratio = memory_ratio(probes, rates["fp32"])
    bare = Calibration(
        created=now(), processor=cpu_name(), instructions=kernel_flags(), stated_cache_bytes=stated_cache_bytes(),
        cache_ramp=ramp, overlap=OVERLAP,
        threads=threads, provider=default_provider("cpu"),
        versions=library_versions(), speed=target_speed, other_speed=speeds[1] if speeds else None, response=response,
        efficiencies={},
    )  # fmt: skip
    met = _taught(bare, without_profiler(scaled_calls, probed.call_us), rates, probes, ratio)
    fitted = device.model_copy(update={"calibration": met})
    cases = tuple(case_of(fitted, call) for call in scaled_calls)
    return fitted.model_copy(update={"calibration": met.model_copy(update={"fitted_on": cases})})


def estimated_us(device: DeviceProfile, call: TimedCall) -> float:
    """Microseconds of a call on a calibrated device. Raises EdgeformerError where the calibration cannot tell.

    Args:
        device: a calibrated one.
        call: what it consists of; its own times have no influence.
    """
    calibration, precision = device.calibration, call.artifact.precision
    assert calibration is not None
    rates = rates_of(device, precision)
    each = fitted_nodes_us(call.works, rates, calibration, precision, call.weight_bytes)
    nodes_us = sum(us * count for us, count in zip(each, call.counts, strict=True))
    return call.runs * calibration.call_overhead_us.get(precision, 0.0) + nodes_us


def case_of(device: DeviceProfile, call: TimedCall) -> FittedCase:
    """A timed call beside its estimate."""
    phase, batch, seq = call.item
    return FittedCase(
        run=call.run, artifact=call.artifact.id, precision=call.artifact.precision, phase=phase, batch=batch, seq=seq,
        measured_ms=call.call_us / 1000, estimated_ms=estimated_us(device, call) / 1000,
    )  # fmt: skip


def _taught(
    bare: Calibration, calls: Sequence[TimedCall], rates: Mapping[str, Rates], probes: list[NodeSample], ratio: float
) -> Calibration:
    """``bare`` with what calls teach.

    Args:
        probes: products beside those of the calls.
        ratio: how much longer a byte takes from memory.
    """
    if sum(call.artifact.precision == "fp32" for call in calls) < _FEWEST_SHAPES:
        raise EdgeformerError("fewer than 4 shapes of the FP32 graph could be timed: too little to fit on")
    believed = [call for call in calls if call.believed]
    if not any(call.artifact.precision == "fp32" for call in believed):
        raise EdgeformerError("the nodes of no FP32 call add up to it: something else used the processor meanwhile")
    nodes = [sample for call in believed for sample in _samples(call, rates[call.artifact.precision])]
    classes, operators = fit_operators([*probes, *nodes], rates, ratio)
    call_samples = [
        CallSample(call.artifact.precision, call.works, call.call_us, call.weight_bytes, call.counts) for call in calls
    ]
    return meet_calls(bare.model_copy(update={"efficiencies": classes, "operators": operators}), call_samples, rates)


def _samples(call: TimedCall, rates: Rates) -> list[NodeSample]:
    """Nodes that do the same are one sample, with their mean duration and the weight of all of them."""
    beyond, whole_us = beyond_cache(call.weight_bytes, rates.cache_bytes, rates.ramp), call.nodes_us
    return [
        NodeSample(
            call.artifact.precision, work, amounts(work, beyond, rates.cache_bytes, rates.ramp), us, whole_us / count
        )
        for work, us, count in zip(call.works, call.durations_us, call.counts, strict=True)
    ]


def _probe_samples(
    rates: Rates, probed: HostRates, target_speed: Speed | None = None, response: Response = UNMOVED
) -> list[NodeSample]:
    """The probe's products as they would be at the speed ``held``."""
    samples: list[NodeSample] = []
    for time in probed.products:
        weight = 4.0 * time.width**2
        beyond = beyond_cache(weight * time.weights, rates.cache_bytes, rates.ramp)
        moved = 8.0 * time.rows * time.width
        work = NodeWork("gemm", "MatMul", 2.0 * time.rows * time.width**2, weight, moved, time.rows, time.width)
        amount = amounts(work, beyond, rates.cache_bytes, rates.ramp)
        slow = 1.0
        if time.speed is not None and target_speed is not None:
            slow = slowness(time.speed, target_speed, response)
        us = time.duration_us / slow
        samples.append(NodeSample("fp32", work, amount, us, us / _PROBE_WEIGHT))
    return samples


# How far off estimates of a model are that was never seen: each model is left out once (leave one group out).


FEWEST_MODELS = 3
"""Fewer say nothing of a model that was never seen."""
PERCENT = 95
"""Of a model's cases that a range must hold, whichever of the known models the next one is like."""


def left_out(
    device: DeviceProfile, probed: HostRates, calls: Sequence[TimedCall], speed: Speed | None = None
) -> list[FittedCase]:
    """Every timed call beside what is estimated from the other models alone; empty for fewer than three models.

    Args:
        device: with this host's facts.
        probed: by the same number of threads.
        calls: of several models.
        speed: that all times are brought to; None: the usual one.
    """
    runs = list(dict.fromkeys(call.run for call in calls))
    if len(runs) < FEWEST_MODELS:
        return []
    speeds = speeds_of(calls)
    target_speed = speed or (typical(speeds) if speeds else None)
    cases: list[FittedCase] = []
    for run in runs:
        fitted = fit(device, probed, [call for call in calls if call.run != run], speed=target_speed)
        assert fitted.calibration is not None
        efficiencies = fitted.calibration.efficiencies
        held_out_calls = as_taught(fitted, [call for call in calls if call.run == run])
        cases += [case_of(fitted, call) for call in held_out_calls if call.artifact.precision in efficiencies]
    return cases


def as_taught(taught: DeviceProfile, calls: Sequence[TimedCall]) -> list[TimedCall]:
    """Times as they would be at the speed of a calibration, by what its own calls show of the way to it.

    Args:
        taught: a calibrated profile.
        calls: others than it was fitted on.
    """
    assert taught.calibration is not None
    return at_one_speed(calls, taught.calibration.speed, taught.calibration.response or UNMOVED)[0]


def error_of(device: DeviceProfile, cases: Sequence[FittedCase]) -> EstimateError:
    """What cases that were left out say of those to come.

    Args:
        device: a calibrated profile.
        cases: at least one, with estimates.
    """
    assert device.calibration is not None
    by_model: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        if case.estimated_ms:
            by_model[case.run].append(abs(math.log2(case.estimated_ms / case.measured_ms)))
    off = [value for values in by_model.values() for value in values]
    return EstimateError(
        kind=device.kind, device=device.calibration.processor, cases=len(off), models=len(by_model),
        median_log2=statistics.median(off), worst_log2=max(off), spread_log2=spread(by_model), created=now(),
    )  # fmt: skip


def spread(off: Mapping[str, Sequence[float]]) -> float:
    """Half of a range, in log2: what 95 % of a model's cases stay within, of the model that is the worst at it.

    The cases of a model share an error, so many cases of few models are few: what the next model will be off by is as
    likely above each of these quantiles as any of the models was above the others'.

    Args:
        off: model → |log2(estimated / measured)| of its cases, estimated by what the others taught.
    """
    return max(float(np.quantile(values, PERCENT / 100)) for values in off.values())


def with_left_out(device: DeviceProfile, cases: Sequence[FittedCase]) -> DeviceProfile:
    """The calibrated profile with the error that left-out cases show."""
    assert device.calibration is not None
    update = {"left_out": tuple(cases), "error": error_of(device, cases)}
    return device.model_copy(update={"calibration": device.calibration.model_copy(update=update)})


# `calibrate`: this host's rates, and how near its operators come to them, from a bundle's graphs at shapes
# that :mod:`.validate` does not use.


# None of batch 1 or 8 with 16, 64 or 128 tokens: those stay unseen, to check estimates at.
FIT_SHAPES: tuple[Shape, ...] = (
    (1, 8), (1, 32), (1, 48), (1, 96), (1, 192), (2, 24), (4, 8), (4, 48), (4, 96), (16, 8), (16, 32), (16, 48),
)  # fmt: skip
DECODE_SHAPES: tuple[Shape, ...] = ((1, 24), (1, 96), (1, 192))
"""Where a token is decoded: behind so many others."""
# Of several models each shows every other shape, as long as so many are left: those of the others are there, too.
# Whole calls of all artifacts together. What comes on top: the probe, starting a process, an item's nodes under the
# profiler.
_BUDGET_S, _PROBE_S, _PROCESS_S, _NODES_S = 200.0, 20.0, 3.0, 1.3
_LONGEST_S = 600.0
_COMMENTS = {
    "cpu": """\
# Written by `edgeformer calibrate`: this host's measured rates, and the fitted estimator.
# It says nothing about another machine, and is refused there. Budgets are yours to change; the rest is not.
""",
    "cuda": """\
# Written by `edgeformer calibrate --validate-only`: the unchanged profile, and how far estimates from its facts were
# from measurements on the card itself. Facts and budgets are yours to change; then validate again.
""",
}


@dataclass(frozen=True)
class _Subject:
    """A graph that is timed, and at what."""

    run: str
    checked: CheckedArtifact
    items: tuple[Item, ...]


def calibrate(
    bundle: Path,
    base: DeviceProfile,
    *,
    threads: int | None = None,
    shapes: Sequence[Shape] = FIT_SHAPES,
    further: Sequence[Path] = (),
    progress: Progress | None = None,
) -> DeviceProfile:
    """The profile of this host's processor with measured rates and a calibration. Takes at most ten minutes.

    Args:
        bundle: whose full FP32, INT8 and FP16 ONNX graphs, as far as they are there, are timed on this host.
        base: name, title and budgets are kept.
        threads: of one operator; None: the physical cores that this process may use.
        shapes: (batch, seq) to fit on; those that the model cannot take are left out, and of several models every
            other one.
        further: bundles of other models, from which to learn, too; with two of them or more, each model is left out
            once, which measures the error of estimates for an unseen model.
        progress: where to say what is going on.

    Raises:
        InputError: not a CPU profile, or not of this processor; no FP32 ONNX graph, or too few shapes to fit on; one
            model twice, or so many that they take more than ten minutes.
        ArtifactError: the bundle, or a file of it, is missing, truncated or changed.
        EdgeformerError: the measuring processes did not answer.
    """
    if base.kind != "cpu":
        raise InputError(f"only processors can be calibrated so far, and {base.name!r} is a {base.kind} device")
    if not (target := find_target(base)).present:
        raise InputError(
            f"--device {base.name}: {target.reason}; calibrate on the device itself, or this host with --device host"
        )
    folders = (bundle, *further)
    subjects = [subject for folder in folders for subject in _subjects(folder, shapes, bool(further))]
    repeats = Repeats(_spare_s(subjects))
    count, progress = threads or default_threads(), progress or Silent()
    with bar(progress, "measuring this host's rates", None):
        probed = run_probe(count)
    timed, noted = _timed(subjects, count, repeats, progress)
    disturbed = _words([probed.disturbed, *noted])
    if disturbed is not None:
        progress.message(f"these times are no facts: {disturbed}; calibrate again when nothing else runs")
    device = host_facts(base, count, probed, timed, disturbed)
    calls = counted(timed)
    fitted = fit(device, probed, calls)
    assert fitted.calibration is not None
    calibration = fitted.calibration.model_copy(update={"disturbed": disturbed})
    cases = left_out(device, probed, calls, calibration.speed)
    fitted = fitted.model_copy(update={"calibration": calibration})
    return with_left_out(fitted, cases) if cases else fitted


def _subjects(folder: Path, shapes: Sequence[Shape], several: bool) -> list[_Subject]:
    opened = Bundle.open(folder)
    chosen = full_graphs(opened, PRECISIONS)
    if not chosen or chosen[0].artifact.precision != "fp32":
        raise InputError(f"{folder}: calibrating needs the full FP32 ONNX graph; export the run again")
    longest = opened.manifest.max_positions
    if longest is None:
        raise InputError(f"{folder}: calibrating needs a model that takes texts of many lengths, not a wrapped graph")
    fitting = sorted((shape for shape in shapes if shape[1] <= longest), key=lambda shape: shape[0] * shape[1])
    if len(fitting) < _FEWEST_SHAPES:
        raise InputError(
            f"calibrating needs at least {_FEWEST_SHAPES} shapes that the model takes (up to {longest} tokens), not "
            f"{len(fitting)}"
        )
    if several and len(fitting) >= 2 * _FEWEST_SHAPES:
        fitting = fitting[::2]
    items: tuple[Item, ...] = tuple(("steady", batch, seq) for batch, seq in fitting)
    tokens: tuple[Item, ...] = tuple(("decode", *shape) for shape in DECODE_SHAPES if shape[1] <= longest)
    decoders = full_graphs(opened, PRECISIONS, role="decode") if tokens else []
    subjects = [_Subject(opened.name, graph, items) for graph in chosen]
    return subjects + [_Subject(opened.name, graph, tokens) for graph in decoders]


def _spare_s(subjects: Sequence[_Subject]) -> float:
    """What timing them leaves of ten minutes. Raises InputError where that is nothing, or a model is there twice."""
    artifacts = [(subject.run, subject.checked.artifact.id) for subject in subjects]
    twice = sorted({run for run, artifact in artifacts if artifacts.count((run, artifact)) > 1})
    if twice:
        raise InputError(f"--also: {', '.join(twice)} is there twice; each model teaches once")
    each_s = SWEEPS * _PROCESS_S
    taken_s = _PROBE_S + _BUDGET_S + sum(each_s + _NODES_S * len(subject.items) for subject in subjects)
    if taken_s > _LONGEST_S:
        raise InputError(
            f"--also: {len(subjects)} graphs take about {taken_s / 60:.0f} minutes, and a calibration takes at most "
            f"{_LONGEST_S / 60:.0f}; name fewer runs"
        )
    return _LONGEST_S - taken_s


def write_profile(device: DeviceProfile, folder: Path) -> Path:
    """Write a calibrated profile as ``folder/<name>.yaml``, where ``load_profile(name, folder)`` finds it.

    Args:
        device: the profile.
        folder: of the user's own profiles.
    """
    path = folder / f"{device.name}.yaml"
    save_profile(device, path, _COMMENTS[device.kind])
    return path


def full_graphs(bundle: Bundle, precisions: Sequence[str], role: str = "full") -> list[CheckedArtifact]:
    """The full, untrimmed ONNX graphs of a bundle, after their files were checked.

    Args:
        bundle: an opened one.
        precisions: of the graphs, in the order that is wanted.
        role: decode: those that write a token.

    Raises:
        ArtifactError: a file is missing, truncated or changed.
    """
    full = [artifact for artifact in bundle.built(role) if artifact.is_graph and not artifact.trimmed]
    selected = [artifact for precision in precisions for artifact in full if artifact.precision == precision]
    return [CheckedArtifact.of(bundle, artifact) for artifact in selected]


def _words(doubts_per_process: Sequence[str | None]) -> str | None:
    """Of how many processes were disturbed, after each was given a second try, and by what at the last."""
    disturbances = [doubts for doubts in doubts_per_process if doubts is not None]
    if not disturbances:
        return None
    return f"{len(disturbances)} of {len(doubts_per_process)} measuring processes were disturbed: {disturbances[-1]}"


def _timed(
    subjects: Sequence[_Subject], threads: int, repeats: Repeats, progress: Progress
) -> tuple[list[Timed], list[str | None]]:
    """Every subject by a process in each sweep, its nodes listed in the first; and what disturbed each of them."""
    listings: list[dict[int, Listing]] = [{} for _ in subjects]
    budget_s = _BUDGET_S / len(subjects) / SWEEPS
    for sweep in range(SWEEPS):
        for place in in_turn(range(len(subjects)), sweep):
            subject, nodes = subjects[place], sweep == 0
            spec = ListSpec(
                checked=subject.checked, items=subject.items, threads=threads, timed=True, nodes=nodes,
                budget_s=budget_s,
            )  # fmt: skip
            name = f"{subject.run}'s {subject.checked.artifact.id}, sweep {sweep + 1} of {SWEEPS}"
            # Every item is timed, and then listed or said.
            with bar(progress, f"timing {name}", 2 * len(subject.items), "step"):
                listings[place][sweep] = repeats.undisturbed(partial(run_listing, spec, progress.advance))
    timed = [
        Timed(subject.run, subject.checked.artifact, together(of_sweep))
        for subject, of_sweep in zip(subjects, listings, strict=True)
    ]
    for entry in timed:
        for item, reason in entry.listing.refused.items():
            progress.message(f"{entry.artifact.id} at {item[1]}×{item[2]}: not timed: {reason}")
    return timed, [listing.disturbed for of in listings for listing in of.values()]
