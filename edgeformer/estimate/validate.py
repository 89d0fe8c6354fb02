"""`calibrate --validate`: estimates beside measurements on the present host, at shapes that were not fitted."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError, FittedCase
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.progress import Progress, Silent
from edgeformer.artifacts.report import Row
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.measurement import MeasureSpec, Shape, measure_artifact
from edgeformer.benchmark.request import find_target
from edgeformer.bundle import Bundle
from edgeformer.estimate.calibrate import calibrate, full_graphs, write_profile
from edgeformer.estimate.estimate import estimate
from edgeformer.estimate.rates import refused_calibration
from edgeformer.estimate.speed_probe import UNMOVED, Reference, between, slowness
from edgeformer.runtimes import default_provider, library_versions, on_gpu
from edgeformer.system.host import default_threads, now

_PRECISIONS = {"cpu": ("fp32",), "cuda": ("fp32", "fp16")}
CHECK_SHAPES: tuple[Shape, ...] = tuple(product((1, 8), (16, 64, 128)))


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of ``calibrate``.

    Attributes:
        calibrate: teach the estimator this host's processor.
        check: compare its estimates with measurements, at ``shapes``.
        shapes: (batch, seq) to check at.
        threads: of one operator, to calibrate with; None: the physical cores that this process may use.
        rules: when to stop measuring; None: the usual rules.
        further: bundles of other models to calibrate with.
    """

    calibrate: bool
    check: bool
    shapes: tuple[Shape, ...]
    threads: int | None
    rules: MeasureRules | None
    further: tuple[Path, ...] = ()


def improve(
    bundle: Path, device: DeviceProfile, options: CalibrationOptions, folder: Path, progress: Progress | None = None
) -> tuple[DeviceProfile, Path]:
    """Fit the estimator to this host with a bundle, or compare it with measurements, or both; keep the profile.

    Args:
        bundle: the bundle's folder.
        device: this host's profile, or of a card in it, which can be checked and not fitted.
        options: what to do.
        folder: of the user's own profiles.
        progress: where to say what is going on.

    Returns:
        The profile with its calibration, and the file that was written.

    Raises:
        InputError, ArtifactError, EdgeformerError: as :func:`calibrate` and :func:`check_estimates`.
    """
    if options.calibrate:
        device = calibrate(bundle, device, threads=options.threads, further=options.further, progress=progress)
        write_profile(device, folder)  # kept also where checking fails
    if options.check:
        if device.kind == "cuda":
            device = on_card(device)
        cases = check_estimates([bundle], device, options.shapes, rules=options.rules, progress=progress)
        device = with_error(device, cases)
    return device, write_profile(device, folder)


def on_card(device: DeviceProfile) -> DeviceProfile:
    """The profile of a card that is here with a calibration that fits nothing: estimates stay those of its facts.

    Raises:
        InputError: the card is not here, or ONNX Runtime has nothing here that computes on it.
    """
    target = find_target(device)
    if not target.present:
        raise InputError(f"--validate: {target.reason}; estimates for a card are checked on that card")
    card = target.gpu.name if target.gpu is not None else device.match or device.title
    provider = default_provider()
    if not on_gpu(provider):
        raise InputError(
            f"--validate: ONNX Runtime computes with {provider} here, not on {card}; see edgeformer doctor for what is "
            "missing"
        )
    calibration = Calibration(
        created=now(), processor=card, threads=default_threads(), provider=provider,
        versions=library_versions(), efficiencies={},
    )  # fmt: skip
    return device.model_copy(update={"calibration": calibration})


def check_estimates(
    bundles: Sequence[Path],
    device: DeviceProfile,
    shapes: Sequence[Shape] = CHECK_SHAPES,
    *,
    rules: MeasureRules | None = None,
    progress: Progress | None = None,
) -> tuple[FittedCase, ...]:
    """Measure the full FP32 ONNX graphs of ``bundles`` as `profile` does, and estimate the same cases.

    On a CUDA card those in FP16, too: a CPU computes them in FP32, and says nothing new.

    Cases that the calibration was fitted on are left out: they would flatter it. So are those that could not be
    measured, with a message.

    Args:
        bundles: their folders.
        device: this host's calibrated profile, or what :func:`on_card` makes of a card's.
        shapes: (batch, seq); those that a model cannot take are left out.
        rules: when to stop measuring; None: the usual rules.
        progress: where to say what is going on.

    Raises:
        InputError: the profile has no calibration, or is not of this host; or every case was fitted.
        ArtifactError: a bundle, or a file of it, is missing, truncated or changed.
        EdgeformerError: nothing could be measured, or nothing estimated.
    """
    calibration, refusal = _calibration(device), refused_calibration(device)
    if refusal is not None:
        raise InputError(refusal)
    if device.kind == "cpu" and not (target := find_target(device)).present:
        raise InputError(f"--validate: {target.reason}; estimates for a device are checked on the device itself")
    calibrated_shapes = {(case.run, case.artifact, case.batch, case.seq) for case in calibration.fitted_on}
    cases: list[FittedCase] = []
    fitted = 0
    for folder in bundles:
        bundle = Bundle.open(folder)
        usable_shapes = [shape for shape in shapes if shape[1] <= (bundle.manifest.max_positions or shape[1])]
        usable_shapes.sort(key=lambda shape: (shape[0] * shape[1], shape))
        for checked in full_graphs(bundle, _PRECISIONS[device.kind]):
            unseen = tuple(
                shape for shape in usable_shapes if (bundle.name, checked.artifact.id, *shape) not in calibrated_shapes
            )
            fitted += len(shapes) - len(unseen)
            # One process for all shapes, or one per shape if the machine's speed is measured.
            parts = [unseen] if calibration.speed is None else [(shape,) for shape in unseen]
            for part in filter(None, parts):
                spec = MeasureSpec(
                    checked=checked,
                    provider=calibration.provider,
                    threads=calibration.threads,
                    shapes=part,
                    rules=rules or MeasureRules(energy_s=0.0),
                )
                cases += _cases(bundle, spec, device, progress or Silent())
    if not cases and fitted:
        raise InputError(
            "all these cases were fitted or are too long for the model: ask for other shapes or another run"
        )
    if not cases:
        raise EdgeformerError("no case could be both measured and estimated; the messages above say why")
    return tuple(cases)


def with_error(device: DeviceProfile, cases: Sequence[FittedCase]) -> DeviceProfile:
    """The profile with the cases that were checked, and their error: median and worst |log2(estimated / measured)|.

    What left-out models showed stays what is said of models to come: other shapes of a model that was fitted tell of
    that one alone. Cases that could not be measured stably count for no error.

    Args:
        device: a calibrated profile.
        cases: as :func:`check_estimates` returns them; at least one.

    Raises:
        InputError: it has no calibration.
    """
    calibration = _calibration(device)
    update: dict[str, object] = {"validated_on": tuple(cases)}
    off = [abs(math.log2(case.estimated_ms / case.measured_ms)) for case in cases if case.estimated_ms and case.stable]
    if off and not calibration.left_out:
        update["error"] = EstimateError(
            kind=device.kind, device=calibration.processor, cases=len(off),
            median_log2=statistics.median(off), worst_log2=max(off), created=now(),
        )  # fmt: skip
    return device.model_copy(update={"calibration": calibration.model_copy(update=update)})


def _calibration(device: DeviceProfile) -> Calibration:
    if device.calibration is None:
        raise InputError(f"device profile {device.name!r} has no calibration; run edgeformer calibrate")
    return device.calibration


def _cases(bundle: Bundle, spec: MeasureSpec, device: DeviceProfile, progress: Progress) -> list[FittedCase]:
    """The shapes of ``spec`` that could be both measured and estimated, as they would be at the calibration's speed."""
    rows, slow = _measured(spec, _calibration(device), progress)
    measured = {(row.batch, row.seq): row.latency_ms for row in rows if row.phase == "steady"}
    artifact, cases = bundle.artifact(spec.checked.artifact.id), list[FittedCase]()
    for row in estimate(bundle, artifact, device, spec.items):
        latency, name = measured.get((row.batch, row.seq)), f"{artifact.id} at {row.batch}×{row.seq}"
        if latency is None or latency.p50 is None or row.latency_ms.p50 is None:
            why = (latency.reason if latency and latency.p50 is None else row.latency_ms.reason) or "not measured"
            progress.message(f"{name}: not compared: {why}")
            continue
        if latency.stable is False:
            doubts = "; ".join(latency.warnings) or "no reason given"
            progress.message(f"{name}: the measurement is not stable, and counts for no error: {doubts}")
        cases.append(
            FittedCase(
                run=bundle.name, artifact=artifact.id, precision=artifact.precision, batch=row.batch, seq=row.seq,
                measured_ms=latency.p50 / slow, estimated_ms=row.latency_ms.p50, stable=latency.stable is not False,
            )
        )  # fmt: skip
    return cases


def _measured(spec: MeasureSpec, calibration: Calibration, progress: Progress) -> tuple[list[Row], float]:
    """The rows, and how many times slower than the calibration's speed the machine was around them; 1 where no speed is
    known."""
    if calibration.speed is None:
        return measure_artifact(spec, progress), 1.0
    with contextlib.closing(Reference()) as reference:
        start = reference.speed()
        rows = measure_artifact(spec, progress)
        speed = between(start, reference.speed())
    return rows, slowness(speed, calibration.speed, calibration.response or UNMOVED)
