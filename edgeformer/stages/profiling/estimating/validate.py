"""`profile --validate`: estimates beside measurements on the present host, at shapes that were not fitted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from edgeformer.bundle import Bundle
from edgeformer.formats.device import Calibration, DeviceProfile, EstimateError, FittedCase
from edgeformer.formats.errors import EdgeformerError, InputError
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.progress import Progress, Silent
from edgeformer.machine.host import now
from edgeformer.stages.profiling.estimating.estimate import estimate
from edgeformer.stages.profiling.estimating.rates import refused_calibration
from edgeformer.stages.profiling.launch import measure_in_child
from edgeformer.stages.profiling.measure import MeasureRules
from edgeformer.stages.profiling.messages import ChildSpec, Item, Shape

VALIDATION_SHAPES: tuple[Shape, ...] = tuple(product((1, 8), (16, 64, 128)))


def validate_estimates(
    bundles: Sequence[Path],
    device: DeviceProfile,
    shapes: Sequence[Shape] = VALIDATION_SHAPES,
    *,
    precisions: Sequence[str] = ("fp32",),
    rules: MeasureRules | None = None,
    progress: Progress | None = None,
) -> tuple[FittedCase, ...]:
    """Measure the full ONNX graphs of ``bundles`` as `profile` does, and estimate the same cases.

    Cases that the calibration was fitted on are left out: they would flatter it. So are those that could not be
    measured, with a message.

    Raises:
        InputError: the profile has no calibration, or not this host's; or every case was fitted.
        ArtifactError: a bundle, or a file of it, is missing, truncated or changed.
        EdgeformerError: nothing could be measured, or nothing estimated.
    """
    calibration = _own_calibration(device)
    shown = progress or Silent()
    cases: list[FittedCase] = []
    fitted = 0
    for bundle in bundles:
        manifest = Bundle.open(bundle).manifest
        for artifact in _artifacts(bundle, manifest, precisions):
            unseen = _unseen(calibration, manifest, artifact, shapes)
            fitted += len(shapes) - len(unseen)
            if unseen:
                cases += _compare(bundle, manifest, artifact, (device, unseen, rules or MeasureRules()), shown)
    if not cases and fitted:
        raise InputError(
            "all these cases were fitted or are too long for the model: ask for other shapes or another run"
        )
    if not cases:
        raise EdgeformerError("no case could be both measured and estimated; the messages above say why")
    return tuple(cases)


def with_error(device: DeviceProfile, cases: Sequence[FittedCase]) -> DeviceProfile:
    """``device`` with the error of its calibration on ``cases``, as :func:`validate_estimates` returns them."""
    calibration = device.calibration
    if calibration is None:
        raise InputError(f"device profile {device.name!r} has no calibration; run edgeformer profile --calibrate")
    error = error_of(cases, calibration.processor, device.kind)
    updated = calibration.model_copy(update={"validated_on": tuple(cases), "error": error})
    return device.model_copy(update={"calibration": updated})


def error_of(cases: Sequence[FittedCase], processor: str, kind: str) -> EstimateError:
    """Median and worst |log2(estimated / measured)|. Raises ValueError without cases."""
    off = [abs(math.log2(case.estimated_ms / case.measured_ms)) for case in cases if case.estimated_ms]
    if not off:
        raise ValueError("an error needs at least one case")
    return EstimateError(
        kind="cuda" if kind == "cuda" else "cpu", device=processor, cases=len(off),
        median_log2=statistics.median(off), worst_log2=max(off), created=now(),
    )  # fmt: skip


def _own_calibration(device: DeviceProfile) -> Calibration:
    if device.calibration is None:
        raise InputError(f"device profile {device.name!r} has no calibration; run edgeformer profile --calibrate")
    refusal = refused_calibration(device)
    if refusal is not None:
        raise InputError(refusal)
    return device.calibration


def _artifacts(bundle: Path, manifest: BundleManifest, precisions: Sequence[str]) -> list[ArtifactManifest]:
    found = [
        artifact
        for artifact in manifest.artifacts
        if artifact.is_graph
        and artifact.role == "full"
        and artifact.status == "built"
        and not artifact.trimmed
        and artifact.precision in precisions
    ]
    opened = Bundle(bundle, manifest)
    for artifact in found:
        opened.check(artifact)
    opened.golden()
    return found


def _unseen(
    calibration: Calibration, manifest: BundleManifest, artifact: ArtifactManifest, shapes: Sequence[Shape]
) -> tuple[Shape, ...]:
    """The shapes that the model takes and that were not fitted, from small to large."""
    seen = {(case.run, case.artifact, case.batch, case.seq) for case in calibration.fitted_on}
    unseen = [
        (batch, seq)
        for batch, seq in shapes
        if seq <= manifest.max_positions and (manifest.run, artifact.id, batch, seq) not in seen
    ]
    return tuple(sorted(unseen, key=lambda shape: (shape[0] * shape[1], shape)))


def _compare(
    bundle: Path,
    manifest: BundleManifest,
    artifact: ArtifactManifest,
    asked: tuple[DeviceProfile, tuple[Shape, ...], MeasureRules],
    progress: Progress,
) -> list[FittedCase]:
    device, shapes, rules = asked
    calibration = device.calibration
    assert calibration is not None and artifact.file is not None
    spec = ChildSpec(
        bundle=str(bundle.resolve()),
        file=str((bundle / artifact.file).resolve()),
        size_bytes=artifact.size_bytes or 0,
        artifact=artifact,
        max_positions=manifest.max_positions,
        provider=calibration.provider,
        threads=calibration.threads,
        shapes=shapes,
        rules=asdict(rules),
    )
    rows = measure_in_child(spec, rules.longest_s, progress)
    measured = {(row.batch, row.seq): row.latency_ms for row in rows if row.phase == "steady"}
    items: list[Item] = [("steady", batch, seq) for batch, seq in shapes]
    cases: list[FittedCase] = []
    for row in estimate(bundle, manifest, artifact, device, items):
        latency = measured.get((row.batch, row.seq))
        if latency is None or latency.p50 is None or row.latency_ms.p50 is None:
            reason = (latency.reason if latency and latency.p50 is None else row.latency_ms.reason) or "not measured"
            progress.message(f"{artifact.id} at {row.batch}×{row.seq}: not compared: {reason}")
            continue
        if latency.stable is False:
            doubts = "; ".join(latency.warnings) or "no reason given"
            progress.message(f"{artifact.id} at {row.batch}×{row.seq}: the measurement is not stable: {doubts}")
        cases.append(
            FittedCase(
                run=manifest.run, artifact=artifact.id, precision=artifact.precision, batch=row.batch, seq=row.seq,
                measured_ms=latency.p50, estimated_ms=row.latency_ms.p50,
            )
        )  # fmt: skip
    return cases
