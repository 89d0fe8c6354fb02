"""Calibration: time graphs on this host, fit the estimator to them, and compare its estimates with measurements."""

import contextlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError, FittedCase
from edgeformer.artifacts.documents import save_profile
from edgeformer.artifacts.errors import EdgeformerError, InputError, NoisyMachineError
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import SILENT, Progress, bar
from edgeformer.artifacts.report import EstimateCheck, MeasureRules, Row
from edgeformer.bundle import Bundle
from edgeformer.estimate.estimate import estimate
from edgeformer.estimate.fit import FEWEST_SHAPES, TimedCall, fit, with_cross_validation
from edgeformer.estimate.listing import ItemNodes, list_item
from edgeformer.estimate.operators import count_nodes, stored_weight_bytes
from edgeformer.estimate.probe import disturbance, host_facts, run_probe
from edgeformer.estimate.roofline import refused_calibration
from edgeformer.measurement.artifact import (
    Item,
    MeasureJob,
    Refusal,
    Shape,
    check_artifact,
    golden_calls,
    measure_artifact,
    open_workload,
)
from edgeformer.measurement.conditions import read_cpu
from edgeformer.measurement.speed_probe import time_calls
from edgeformer.measurement.target import find_target
from edgeformer.runtimes import ArtifactFiles, default_provider, library_versions, on_gpu
from edgeformer.system.capability import kernel_flags
from edgeformer.system.host import cpu_name, default_threads, now, stated_cache_bytes
from edgeformer.system.worker import Send, run_job

PRECISIONS = ("fp32", "int8", "fp16")
_CHECKED_PRECISIONS = {"cpu": ("fp32",), "cuda": ("fp32", "fp16")}
# None of batch 1 or 8 with 16, 64 or 128 tokens: those stay unseen, to check estimates at.
FIT_SHAPES: tuple[Shape, ...] = (
    (1, 8), (1, 32), (1, 48), (1, 96), (1, 192), (2, 24), (4, 8), (4, 48), (4, 96), (16, 8), (16, 32), (16, 48),
)  # fmt: skip
CHECK_SHAPES: tuple[Shape, ...] = tuple(product((1, 8), (16, 64, 128)))
DECODE_SHAPES: tuple[Shape, ...] = ((1, 24), (1, 96), (1, 192))  # where a token is decoded: behind so many others
SWEEPS = 3  # processes that time an artifact, interleaved with those of other artifacts; one of three may be off
# Seconds: all timed calls of all artifacts; the probe; starting a process; an item's nodes under the profiler; the
# longest calibration.
_BUDGET_S, _PROBE_S, _PROCESS_S, _NODES_S, _LONGEST_S = 200.0, 20.0, 3.0, 1.3, 600.0
# Of one item: warm-up, timed calls, and how many calls run under the profiler.
_WARM_UP_S, _ROUND_S, _FEWEST_CALLS = 0.15, 0.3, 3
_NODES_ROUND_S, _FEWEST_NODE_CALLS, _MOST_NODE_CALLS = 0.5, 5, 30
_NOISE_REMEDY = "nothing was written; calibrate again on an idle machine, or keep this calibration with --allow-noise"
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
class CalibrationOptions:
    """Options of ``calibrate``."""

    calibrate: bool  # fit the estimator to this host's processor
    check: bool  # compare its estimates with measurements, at ``shapes``
    shapes: tuple[Shape, ...]  # (batch, seq) to check at
    threads: int | None  # of one operator, to calibrate with; None: the physical cores that this process may use
    rules: MeasureRules | None  # when to stop measuring; None: the usual rules
    further: tuple[Path, ...] = ()  # bundles of other models to calibrate with
    allow_noise: bool = False  # keep a calibration that other work on the machine disturbed


def improve(
    bundle: Path, device: DeviceProfile, options: CalibrationOptions, folder: Path, progress: Progress = SILENT
) -> tuple[DeviceProfile, Path]:
    """Fit the estimator to this host with a bundle, or compare it with measurements, or both; keep the profile.

    Returns the profile with its calibration, and the file in ``folder``. Raises as :func:`calibrate` and
    :func:`validate`.
    """
    path = folder / f"{device.name}.yaml"
    if options.calibrate:
        device = calibrate(
            bundle, device, threads=options.threads, further=options.further, allow_noise=options.allow_noise,
            progress=progress,
        )  # fmt: skip
        save_profile(device, path, _COMMENTS[device.kind])  # kept also where checking fails
    if options.check:
        device = validate(bundle, device, options.shapes, rules=options.rules, progress=progress)
    save_profile(device, path, _COMMENTS[device.kind])
    return device, path


class TimedItem(Frozen):
    """Message: the median duration of a call, and its nodes if they were requested."""

    item: Item
    call_us: float
    nodes: ItemNodes | None = None


class Disturbance(Frozen):
    """Message: other work on the machine while calls were timed, too much to reproduce the times."""

    text: str


class TimeJob(MeasureJob):
    """Time whole calls of one artifact at some items, from small to large; ``nodes``: then time their nodes."""

    name = "timing"
    messages: ClassVar[tuple[type[BaseModel], ...]] = (TimedItem, Refusal, Disturbance)
    nodes: bool
    budget_s: float = Field(description="items that would start later are left out")


class Timing(Frozen):
    """What one worker process timed of an artifact."""

    items: tuple[TimedItem, ...]
    refused: dict[str, str] = Field({}, description="batch×seq → reason")
    disturbed: str | None = None


def run_timing(job: TimeJob, progress: Progress = SILENT, title: str = "Timing") -> Timing:
    """Time an artifact in a worker, and in a second one if other work disturbed the first."""
    timing = Timing(items=())
    for again in ("", " again, because other work disturbed it"):
        messages: list[TimedItem | Refusal | Disturbance] = []

        def take(message: TimedItem | Refusal | Disturbance, messages: list[Any] = messages) -> None:
            messages.append(message)
            if isinstance(message, TimedItem):
                progress.advance()

        with bar(progress, f"{title}{again}", len(job.items), "shapes"):
            reason = run_job(job, take).reason or "the timing process ended without a result for this shape"
        items = {message.item: message for message in messages if isinstance(message, TimedItem)}
        refused = {item: reason for item in job.items if item not in items}
        refused |= {message.item: message.reason for message in messages if isinstance(message, Refusal)}
        disturbances = [message.text for message in messages if isinstance(message, Disturbance)]
        timing = Timing(
            items=tuple(items.values()), refused={f"{batch}×{seq}": why for (_, batch, seq), why in refused.items()},
            disturbed=disturbances[0] if disturbances else None,
        )  # fmt: skip
        if not disturbances:
            break
    return timing


def work(message: bytes, send: Send) -> None:
    """Time the items of a TimeJob in a worker: first all calls, then, after the sessions are closed, the nodes."""
    job = TimeJob.model_validate_json(message, strict=False)
    provider, start, end = default_provider("cpu"), read_cpu(), time.perf_counter() + job.budget_s
    calls_us: dict[Item, float] = {}
    for item in job.items:
        if time.perf_counter() > end:
            send(Refusal(item=item, reason=f"the {job.budget_s:.0f} s for timing this artifact had passed"))
            continue
        try:
            inputs = golden_calls(job.files, item[1:], count=2)
            with contextlib.closing(open_workload(job.files, item, provider, job.threads, inputs)) as workload:
                workload.first()
                time_calls(partial(workload.call, 0), _WARM_UP_S, 1)
                calls_us[item] = statistics.median(time_calls(partial(workload.call, 0), _ROUND_S, _FEWEST_CALLS))
        except EdgeformerError as error:
            send(Refusal(item=item, reason=str(error)))
    if (text := disturbance(start)) is not None:
        send(Disturbance(text=text))
    for item, call_us in calls_us.items():
        nodes = None
        if job.nodes:
            count = min(_MOST_NODE_CALLS, max(_FEWEST_NODE_CALLS, round(_NODES_ROUND_S * 1e6 / call_us)))
            try:
                nodes = list_item(job.files, item, job.threads, timed_calls=count)
            except EdgeformerError as error:
                send(Refusal(item=item, reason=str(error)))
                continue
        send(TimedItem(item=item, call_us=call_us, nodes=nodes))


def combine_sweeps(run: str, artifact: ArtifactManifest, timings: Sequence[Timing]) -> list[TimedCall]:
    """Return the calls of one artifact: nodes of the first process, and the median duration over all processes."""
    combined = []
    for timed in timings[0].items:
        if timed.nodes is None:
            continue
        nodes, runs = timed.nodes.nodes, timed.nodes.runs
        works = tuple(count_nodes(nodes))
        process_us = tuple(other.call_us for timing in timings for other in timing.items if other.item == timed.item)
        call_us = statistics.median(process_us)
        durations = tuple(node.duration_us * call_us / timed.call_us for node in nodes)  # as fast as their process was
        weights = stored_weight_bytes(nodes, works, artifact)
        call = TimedCall(run, artifact, timed.item, runs, works, durations, call_us, weights, process_us)
        combined.append(call)
    return combined


@dataclass(frozen=True)
class _Subject:
    """A graph of a run, and the items that it is timed at."""

    run: str
    files: ArtifactFiles
    items: tuple[Item, ...]


def calibrate(
    bundle: Path, base: DeviceProfile, *, threads: int | None = None, shapes: Sequence[Shape] = FIT_SHAPES,
    further: Sequence[Path] = (), allow_noise: bool = False, progress: Progress = SILENT,
) -> DeviceProfile:  # fmt: skip
    """Return the profile of this host's processor with measured rates and a calibration. Takes at most ten minutes.

    Args:
        bundle: whose full FP32, INT8 and FP16 ONNX graphs, where it has them, are timed on this host.
        base: name, title and budgets are kept.
        shapes: (batch, seq) to fit on; those that the model cannot take are left out.
        further: of other models; with two of them or more, each model is left out once, which measures the error of
            estimates for a model that was not fitted.

    Raises:
        InputError: not a CPU profile, or not of this processor; no FP32 ONNX graph, or too few shapes to fit on; one
            model twice, or so many that they take more than ten minutes.
        NoisyMachineError: other work disturbed a measuring process twice, and ``allow_noise`` is not set.
        EdgeformerError: the measuring processes did not answer.
    """
    # 1. Check that it can be calibrated here
    if base.kind != "cpu":
        raise InputError(
            f"--device {base.name}: is a GPU, and only a CPU can be calibrated; add --validate-only to compare the "
            "estimates for this GPU with measurements"
        )
    if not (target := find_target(base)).present:
        raise InputError(
            f"--device {base.name}: {target.reason}; run calibrate on that device, or calibrate this host with "
            "--device host"
        )
    # 2. Choose the graphs that are timed, and their items, in time
    subjects: list[_Subject] = []
    for folder in (bundle, *further):
        opened = Bundle.open(folder)
        graphs, longest = full_graphs(opened, PRECISIONS), opened.manifest.max_positions
        if not graphs or graphs[0].artifact.precision != "fp32":
            raise InputError(f"{folder}: has no FP32 ONNX graph, which calibrate times; export the run again")
        if longest is None:
            raise InputError(
                f"{folder}: is an imported ONNX graph, and calibrate needs a text model; give a run that was trained "
                "here or imported with import hf"
            )
        fitting = sorted((shape for shape in shapes if shape[1] <= longest), key=lambda shape: shape[0] * shape[1])
        if len(fitting) < FEWEST_SHAPES:
            raise InputError(
                f"{folder}: takes at most {longest} tokens, so only {len(fitting)} shapes can be timed, and a "
                f"calibration needs {FEWEST_SHAPES}; give a model that reads longer texts"
            )
        if further and len(fitting) >= 2 * FEWEST_SHAPES:
            fitting = fitting[::2]
        items: tuple[Item, ...] = tuple(("steady", *shape) for shape in fitting)
        tokens: tuple[Item, ...] = tuple(("decode", *shape) for shape in DECODE_SHAPES if shape[1] <= longest)
        decoders = full_graphs(opened, PRECISIONS, role="decode") if tokens else []
        subjects += [_Subject(opened.name, graph, items) for graph in graphs]
        subjects += [_Subject(opened.name, graph, tokens) for graph in decoders]
    ids = [(subject.run, subject.files.artifact.id) for subject in subjects]
    if repeated := sorted({run for run, artifact in ids if ids.count((run, artifact)) > 1}):
        raise InputError(f"--also: {', '.join(repeated)} is given twice; give each run once")
    seconds = _PROBE_S + _BUDGET_S
    seconds += sum(SWEEPS * _PROCESS_S + _NODES_S * len(subject.items) for subject in subjects)
    if seconds > _LONGEST_S:
        raise InputError(
            f"--also: timing {len(subjects)} graphs takes about {seconds / 60:.0f} minutes, and the limit is "
            f"{_LONGEST_S / 60:.0f}; give fewer runs"
        )
    # 3. Measure the rates of the host, and time the graphs
    count = threads or default_threads()
    with bar(progress, "Measuring this host's rates (15 s, and longer if other programs run)", None):
        rates = run_probe(count)
    if rates.disturbed is not None and not allow_noise:
        raise NoisyMachineError(f"no calibration, because {rates.disturbed}; {_NOISE_REMEDY}")
    timings: list[list[Timing]] = [[] for _ in subjects]
    for sweep in range(SWEEPS):
        order = range(len(subjects))
        for index in reversed(order) if sweep % 2 else order:  # so that a steady drift falls on all alike
            subject = subjects[index]
            job = TimeJob(
                files=subject.files, items=subject.items, threads=count, nodes=sweep == 0,
                budget_s=_BUDGET_S / len(subjects) / SWEEPS,
            )  # fmt: skip
            title = f"Timing {subject.files.artifact.id} of {subject.run}, sweep {sweep + 1} of {SWEEPS}"
            timings[index].append(run_timing(job, progress, title))
    # 4. Report what was refused or disturbed
    for subject, (first, *_) in zip(subjects, timings, strict=True):
        for shape, reason in first.refused.items():
            progress.message(f"{subject.files.artifact.id} at {shape}: not used for the fit: {reason}")
    reports = [rates.disturbed, *(timing.disturbed for sweeps in timings for timing in sweeps)]
    disturbed = None
    if disturbances := [text for text in reports if text is not None]:
        disturbed = f"{len(disturbances)} of {len(reports)} measuring processes were disturbed: {disturbances[-1]}"
        if not allow_noise:
            raise NoisyMachineError(f"no calibration, because {disturbed}; {_NOISE_REMEDY}")
        progress.message(f"the calibration is unreliable, because {disturbed}; calibrate again on an idle machine")
    # 5. Fit the rates of nodes to the calls
    nodes = [timed.nodes.nodes for sweeps in timings for timed in sweeps[0].items if timed.nodes is not None]
    works = [(w, node.duration_us) for each in nodes for w, node in zip(count_nodes(each), each, strict=True)]
    device = host_facts(base, count, rates, works, disturbed)
    calls = [
        call
        for subject, sweeps in zip(subjects, timings, strict=True)
        for call in combine_sweeps(subject.run, subject.files.artifact, sweeps)
    ]
    bare = Calibration(
        created=now(), processor=cpu_name(), instructions=kernel_flags(), stated_cache_bytes=stated_cache_bytes(),
        threads=count, disturbed=disturbed, provider=default_provider("cpu"), versions=library_versions(),
        efficiencies={},
    )  # fmt: skip
    fitted = fit(device, calls, rates.call_us, bare)
    try:
        return with_cross_validation(fitted, calls, rates.call_us, bare)
    except EdgeformerError as error:
        progress.message(f"the error of estimates for other models is unknown: {error}")
        return fitted


def full_graphs(bundle: Bundle, precisions: Sequence[str], role: str = "full") -> list[ArtifactFiles]:
    """Check and return the untrimmed ONNX graphs of a role, in the order of ``precisions``. Raises ArtifactError."""
    full = [artifact for artifact in bundle.built(role) if artifact.is_graph and not artifact.trimmed]
    selected = [artifact for precision in precisions for artifact in full if artifact.precision == precision]
    return [check_artifact(bundle, artifact) for artifact in selected]


def validate(
    folder: Path, device: DeviceProfile, shapes: Sequence[Shape] = CHECK_SHAPES, *, rules: MeasureRules | None = None,
    progress: Progress = SILENT,
) -> DeviceProfile:  # fmt: skip
    """Return the profile with estimates beside measurements of a bundle's full FP32 ONNX graph at unfitted shapes.

    The graphs are measured as `profile` does, on a CUDA card the FP16 graph, too: a CPU computes it in FP32. A card
    gets a calibration without rates, so that estimates stay those of its facts. The error of a cross-validation stays.
    Cases that could not be measured stably count for no error; those that could not be compared are left out. Raises
    InputError: the profile has no calibration, or its device is not here; or every case was fitted; EdgeformerError:
    nothing could be measured, or nothing estimated.
    """
    # 1. The calibration to check; a card gets one without rates
    target = find_target(device)
    if device.kind == "cuda":
        provider = default_provider()
        card = target.gpu.name if target.gpu is not None else device.match or device.title
        if target.present and not on_gpu(provider):
            raise InputError(
                f"--validate: ONNX Runtime runs on {provider} here, not on {card}; edgeformer doctor says why"
            )
        calibration = Calibration(
            created=now(), processor=card, threads=default_threads(), provider=provider, versions=library_versions(),
            efficiencies={},
        )  # fmt: skip
        device = device.model_copy(update={"calibration": calibration})
    elif device.calibration is not None:
        calibration = device.calibration
    else:
        raise InputError(f"--validate: the profile {device.name!r} has no calibration; run edgeformer calibrate first")
    refusal = refused_calibration(device) if device.kind == "cpu" else None
    if refusal is not None:
        raise InputError(refusal)
    if not target.present:
        raise InputError(f"--validate: {target.reason}; run it on that device")
    # 2. Measure and estimate every shape that was not fitted
    fitted_on = {(case.run, case.artifact, case.batch, case.seq) for case in calibration.fitted_on}
    cases: list[FittedCase] = []
    fitted = 0
    bundle = Bundle.open(folder)
    longest = bundle.manifest.max_positions
    usable = sorted((s for s in shapes if longest is None or s[1] <= longest), key=lambda s: (s[0] * s[1], s))
    for checked in full_graphs(bundle, _CHECKED_PRECISIONS[device.kind]):
        id_ = checked.artifact.id
        unseen = tuple(shape for shape in usable if (bundle.name, id_, *shape) not in fitted_on)
        fitted += len(shapes) - len(unseen)
        if not unseen:
            continue
        spec = MeasureJob(
            files=checked, provider=calibration.provider, threads=calibration.threads,
            items=tuple(("steady", *shape) for shape in unseen), rules=rules or MeasureRules(energy_s=0.0),
        )  # fmt: skip
        rows = [row for row in measure_artifact(spec, progress) if row.phase == "steady"]
        measured = {(row.batch, row.seq): row.latency_ms for row in rows}
        for row in estimate(bundle, bundle.artifact(id_), device, spec.items):
            latency, name = measured.get((row.batch, row.seq)), f"{id_} at {row.batch}×{row.seq}"
            if latency is None or latency.p50 is None or row.latency_ms.p50 is None:
                reason = (latency.reason if latency and latency.p50 is None else row.latency_ms.reason) or "no row"
                progress.message(f"{name}: not compared: {reason}")
                continue
            if latency.stable is False:
                doubts = "; ".join(latency.warnings) or "no reason given"
                progress.message(f"{name}: left out of the error, because the measurement is unstable: {doubts}")
            cases.append(
                FittedCase(
                    run=bundle.name, artifact=id_, precision=row.precision, batch=row.batch, seq=row.seq,
                    measured_ms=latency.p50, estimated_ms=row.latency_ms.p50, stable=latency.stable is not False,
                )
            )  # fmt: skip
    if not cases and fitted:
        raise InputError(
            "--validate: nothing to compare: the calibration used every one of these shapes, or they are too long for "
            "the model; give other shapes (--batch, --seq) or another run"
        )
    if not cases:
        raise EdgeformerError("--validate: no shape has both a measurement and an estimate; the messages above say why")
    return with_cases(device, calibration, cases)


def with_cases(device: DeviceProfile, calibration: Calibration, cases: Sequence[FittedCase]) -> DeviceProfile:
    """Return the profile with a calibration that was compared with measured ``cases``.

    The error of a cross-validation stays; otherwise it is that of the stable cases.
    """
    update: dict[str, object] = {"validated_on": tuple(cases)}
    errors = [
        abs(math.log2(case.estimated_ms / case.measured_ms)) for case in cases if case.estimated_ms and case.stable
    ]
    if errors and not calibration.left_out:
        update["error"] = EstimateError(
            kind=device.kind, device=calibration.processor, cases=len(errors), median_log2=statistics.median(errors),
            worst_log2=max(errors), created=now(),
        )  # fmt: skip
    return device.model_copy(update={"calibration": calibration.model_copy(update=update)})


def check_estimates(bundle: Bundle, device: DeviceProfile, rows: Sequence[Row]) -> list[EstimateCheck]:
    """Estimate rows that were measured on a device, and return both; empty: the profile has no facts to estimate from.

    Rows of other runtimes or thread counts than an estimate is for are left out.
    """
    checks: list[EstimateCheck] = []
    if device.peaks.fp32 is None:
        return checks
    phases = ("steady", "prefill", "decode")
    measured = [row for row in rows if row.where == "host" and row.phase in phases and row.latency_ms.p50]
    for id_ in dict.fromkeys(row.artifact for row in measured):
        by_item: dict[Any, Row] = {(row.phase, row.batch, row.seq): row for row in measured if row.artifact == id_}
        for estimated in estimate(bundle, bundle.artifact(id_), device, [*by_item]):
            row, latency = by_item[estimated.phase, estimated.batch, estimated.seq], estimated.latency_ms
            same_setting = (row.provider, row.threads) == (estimated.provider, estimated.threads)
            if row.phase == "cold" or not row.latency_ms.p50 or not latency.p50 or not same_setting:
                continue
            checks.append(
                EstimateCheck(
                    artifact=id_, precision=row.precision, phase=row.phase, batch=row.batch, seq=row.seq,
                    measured_ms=row.latency_ms.p50, estimated_ms=latency.p50, low_ms=latency.low, high_ms=latency.high,
                    stable=row.latency_ms.stable is not False,
                )
            )  # fmt: skip
    return checks


def add_checks(device: DeviceProfile, run: str, checks: Sequence[EstimateCheck]) -> DeviceProfile:
    """Return a calibrated profile with the cases of ``checks``, except those that were fitted.

    A case replaces an earlier one of the same shape.
    """
    if device.calibration is None or not checks:
        return device
    shape_of = attrgetter("run", "artifact", "phase", "batch", "seq")
    checked = [FittedCase(run=run, **check.model_dump(exclude={"low_ms", "high_ms"})) for check in checks]
    fitted = {shape_of(case) for case in device.calibration.fitted_on}
    new = [case for case in checked if shape_of(case) not in fitted]
    cases = {shape_of(case): case for case in (*device.calibration.validated_on, *new)}
    return with_cases(device, device.calibration, [*cases.values()])
