"""From a bundle to a report: measure each artifact on this host in a child process, judge it for a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgeformer.backends import computes_on, default_provider, library_versions, on_gpu
from edgeformer.bundle import Bundle
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.formats.progress import Progress, Silent
from edgeformer.formats.report import Report, Row, SizeParts
from edgeformer.machine.host import describe_host, now
from edgeformer.run import Location
from edgeformer.stages.profiling.estimating.estimate import estimate
from edgeformer.stages.profiling.inputs import phases_of
from edgeformer.stages.profiling.launch import measure_in_child
from edgeformer.stages.profiling.messages import ChildSpec, unavailable_row
from edgeformer.stages.profiling.request import ProfileOptions, Request, resolve
from edgeformer.stages.profiling.search import search
from edgeformer.stages.profiling.target import Target, find_target
from edgeformer.stages.profiling.verdict import Judged, judge, spared_of_latency

__all__ = ["ProfileOptions", "profile_bundle"]


@dataclass(frozen=True)
class _Bundle:
    """An opened bundle and the device that it is profiled for."""

    folder: Path
    manifest: BundleManifest
    device: DeviceProfile
    target: Target
    request: Request
    notes: list[str] = field(default_factory=list)


def profile_bundle(
    location: Location, device: DeviceProfile, options: ProfileOptions, progress: Progress | None = None
) -> Report:
    """Measure the bundle's artifacts here and judge them for ``device``.

    All files are checked before anything is measured. What fails later (an artifact that crashes its process,
    a shape that it refuses) becomes a row that says so; the other rows survive.

    Raises:
        ArtifactError: the bundle, or a file of it that is needed, is missing, truncated or changed.
        InputError: an unknown artifact, or a shape that the model cannot take.
    """
    opened = location.open_bundle()
    folder, manifest = opened.folder, opened.manifest
    request = resolve(options, device, manifest, location.artifact)
    bundle = _Bundle(folder, manifest, device, find_target(device), request)
    for artifact in request.artifacts:
        opened.golden(artifact)
    files = [(artifact, opened.check(artifact)) for artifact in request.artifacts]
    rows: list[Row] = []
    judged: list[Judged] = []
    for artifact, file in files:
        measured = _measure(bundle, artifact, file, progress or Silent())
        of_device, why_none = _on_device(bundle, measured)
        rows += measured
        if not of_device:
            if bundle.target.present:
                bundle.notes.append(f"{artifact.id}: {why_none}; rows `device` are estimated instead")
            of_device = _estimate(bundle, artifact, progress or Silent())
            rows += of_device
        whole_texts = artifact.role in ("full", "exit")
        judged.append(Judged(artifact.id, _size_bytes(artifact, file), of_device, why_none, whole_texts))
    return _report(bundle, rows, judged)


def _measure(bundle: _Bundle, artifact: ArtifactManifest, file: Path, progress: Progress) -> list[Row]:
    """The host's rows of one artifact, for every number of threads."""
    request, gpu, size_bytes = bundle.request, bundle.target.gpu, _size_bytes(artifact, file)
    refusal = Bundle(bundle.folder, bundle.manifest).cannot_run(artifact)
    if refusal is not None:
        progress.message(f"{artifact.id}: not measured: {refusal}")
        return [
            unavailable_row(artifact, size_bytes, shape, artifact.format, "host", refusal) for shape in request.shapes
        ]
    rows: list[Row] = []
    for threads in request.threads:
        spec = ChildSpec(
            bundle=str(bundle.folder.resolve()),
            file=str(file.resolve()),
            size_bytes=size_bytes,
            artifact=artifact,
            max_positions=bundle.manifest.max_positions,
            provider=request.provider,
            threads=threads,
            shapes=request.shapes,
            rules=asdict(request.rules),
            gpu_uuid=gpu.uuid if gpu is not None else None,
        )
        measured = measure_in_child(spec, request.rules.longest_s, progress)
        rows += measured
        if any(on_gpu(row.provider) for row in measured):
            break  # the threads of the CPU make no difference there
    return rows


def _estimate(bundle: _Bundle, artifact: ArtifactManifest, progress: Progress) -> list[Row]:
    """The device's rows of one artifact, from its graph and the profile's facts."""
    phases = phases_of(artifact, bundle.folder)
    items = [(phase, *shape) for shape in bundle.request.shapes for phase in phases]
    progress.start(f"estimating {artifact.id} on {bundle.device.name}", None)
    try:
        return estimate(bundle.folder, bundle.manifest, artifact, bundle.device, items)
    finally:
        progress.finish()


def _on_device(bundle: _Bundle, rows: list[Row]) -> tuple[list[Row], str]:
    """The host's rows that were measured on the device itself, and why there are none."""
    if not bundle.target.present:
        return [], bundle.target.reason
    kind, usual = bundle.device.kind, default_provider(bundle.device.kind)
    # Engines and other providers that compute on the same kind of device measure it just as well.
    there = [row for row in rows if computes_on(row.provider) == kind and row.latency_ms.status == "measured"]
    found = there if kind == "cuda" and there else [row for row in rows if row.provider == usual] or there
    if found:
        limits = bundle.request.limits
        return found, f"{limits.batch}×{limits.seq} was not measured"
    measured_with = [row.provider for row in rows if row.latency_ms.status == "measured"]
    if not measured_with:
        return [], next((row.latency_ms.reason for row in rows if row.latency_ms.reason), "not measured")
    return [], (
        f"{bundle.target.reason}, but the rows were measured with {measured_with[0]}: {usual} is needed "
        "(`edgeformer doctor` says what is missing)"
    )


def _size_bytes(artifact: ArtifactManifest, file: Path) -> int:
    """With its share of the weights that lie beside the graph."""
    return artifact.size_bytes or file.stat().st_size


def _report(bundle: _Bundle, rows: list[Row], judged: list[Judged]) -> Report:
    target, manifest = bundle.target, bundle.manifest
    limits, options = bundle.request.limits, bundle.request.search
    verdict = judge(judged, limits)
    notes = [*bundle.request.notes, *bundle.notes]
    if not target.present:
        notes.append(f"{target.reason}: rows `host` were measured here, rows `device` are estimated for it")
    if not verdict.checks:
        notes.append("nothing was judged: neither the profile nor the command sets a limit")
    spared = spared_of_latency(judged, limits)
    if spared:
        notes.append(f"not judged per decoded token, because other artifacts decode: {', '.join(spared)}")
    if manifest.synthetic:
        notes.append("the model was trained on generated text")
    return Report(
        device=bundle.device.name,
        device_title=bundle.device.title,
        host={
            **describe_host(),
            "gpu": target.gpu.name if target.gpu is not None else None,
            "threads": max(bundle.request.threads),
            "versions": library_versions(),
        },
        on_target=target.present,
        run=manifest.run,
        bundle=str(bundle.folder),
        created=now(),
        synthetic=manifest.synthetic,
        leaks=manifest.leaks,
        parameters=manifest.parameters,
        rows=tuple(rows),
        verdict=verdict,
        notes=tuple(notes),
        **_estimated(bundle, rows),
        sizes=tuple(_size_parts(artifact) for artifact in bundle.request.artifacts if artifact.size_bytes),
        search=search(manifest, rows, limits, options, kind=bundle.device.kind, on_target=target.present)
        if options is not None
        else None,
        profile=bundle.device.model_dump(mode="json", by_alias=True, exclude={"calibration"}),
    )


def _estimated(bundle: _Bundle, rows: list[Row]) -> dict[str, Any]:
    """For which kind of device rows were estimated, and how wrong the estimator was where it could be checked."""
    if not any(row.latency_ms.status == "estimated" for row in rows):
        return {}
    return {"estimated_for": bundle.device.kind, "estimate_error": bundle.request.estimate_error}


def _size_parts(artifact: ArtifactManifest) -> SizeParts:
    """What the artifact's bytes are for; all of them are `other` where export did not count (engines)."""
    parts, size_bytes = artifact.parts_bytes, artifact.size_bytes or 0
    known = {name: parts.get(name, 0) for name in ("embeddings", "block", "heads")}
    return SizeParts(artifact=artifact.id, **known, other=max(0, size_bytes - sum(known.values())))
