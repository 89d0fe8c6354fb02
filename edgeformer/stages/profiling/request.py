"""What a caller asks for, and what that means for one bundle and one device: shapes, limits, artifacts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import psutil

from edgeformer.backends import default_provider
from edgeformer.formats.device import Budget, DeviceProfile, EstimateError
from edgeformer.formats.errors import InputError
from edgeformer.formats.manifest import ArtifactManifest, BundleManifest
from edgeformer.machine.host import default_threads
from edgeformer.stages.profiling.measure import MeasureRules
from edgeformer.stages.profiling.messages import Shape
from edgeformer.stages.profiling.search import SearchOptions, check_options
from edgeformer.stages.profiling.verdict import Limits

T = TypeVar("T")


@dataclass(frozen=True)
class ProfileOptions:
    """What a caller may ask for. Limits that are given win over the device profile's budgets.

    Attributes:
        batches: batch sizes to measure, each with every one of ``seqs``.
        seqs: sequence lengths to measure; empty: the budget's.
        max_latency_ms: p50 at the budget's shape.
        max_size_bytes: of the artifact's file.
        max_memory_bytes: peak on the device at the budget's shape.
        max_energy_mj: per call above idle at the budget's shape.
        strict: the rules for figures to publish; ``rules`` wins over it.
        threads: of one operator; each count is measured; empty: the physical cores that this process may use.
        artifacts: ids to profile; empty: all that were built.
        provider: an ONNX Runtime execution provider; None: what fits the device's kind and works here.
        rules: when to stop measuring; None: DESIGN.md's.
        allow_leak: also measure a language model that looks ahead; the report says so.
        search: also name the artifact to deploy.
        estimate_error: how wrong estimates were where they could be checked, to be stated beside them.
    """

    batches: tuple[int, ...] = (1, 16)
    seqs: tuple[int, ...] = ()
    max_latency_ms: float | None = None
    max_size_bytes: int | None = None
    max_memory_bytes: int | None = None
    max_energy_mj: float | None = None
    strict: bool = False
    threads: tuple[int, ...] = ()
    artifacts: tuple[str, ...] = ()
    provider: str | None = None
    rules: MeasureRules | None = None
    allow_leak: bool = False
    search: SearchOptions | None = None
    estimate_error: EstimateError | None = None


@dataclass(frozen=True)
class Request:
    """The options, resolved against one bundle and one device. ``shapes`` go from small to large, ``threads`` too."""

    shapes: tuple[Shape, ...]
    limits: Limits
    rules: MeasureRules
    threads: tuple[int, ...]
    provider: str | None
    artifacts: tuple[ArtifactManifest, ...]
    notes: tuple[str, ...]
    search: SearchOptions | None = None
    estimate_error: EstimateError | None = None


def resolve(
    options: ProfileOptions, device: DeviceProfile, manifest: BundleManifest, artifact: str | None = None
) -> Request:
    """Resolve ``options``; ``artifact`` is the one that the RUN argument itself names.

    Raises:
        InputError: an unknown or unbuilt artifact, a count below 1, a sequence that the model cannot take, or a model
            that leaks future tokens.
    """
    if manifest.leaks and not options.allow_leak:
        raise InputError(
            f"{manifest.run!r} leaks future tokens: it sees what it is asked to predict, so its scores are void; "
            "profile it all the same, marked as leaking, with --allow-leak"
        )
    _require_counts(options, manifest)
    if options.search is not None:
        check_options(options.search, manifest)
    budget = device.budgets.for_task(manifest.task)
    limits = _limits(options, device, manifest, budget)
    shapes = {*product(options.batches, options.seqs or (limits.seq,)), (limits.batch, limits.seq)}
    artifacts, left_out = _artifacts(options, manifest, artifact)
    notes = [f"budget's shape: {limits.shape_note}"] if limits.shape_note else []
    if manifest.leaks:
        notes.append("leaks future tokens: the model sees what it is asked to predict, so its scores are void")
    if budget == Budget():
        notes.append(f"device profile {device.name!r} has no budget for {manifest.task}")
    rules = options.rules or (MeasureRules.strict() if options.strict else MeasureRules())
    if rules not in (MeasureRules(), MeasureRules.strict()):
        notes.append(f"measured by other rules than the usual ones: {rules}")
    return Request(
        shapes=tuple(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))),
        limits=limits,
        rules=rules,
        threads=tuple(sorted({*options.threads})) or (default_threads(),),
        provider=options.provider or (default_provider("cpu") if device.kind == "cpu" else None),
        artifacts=artifacts,
        notes=(*notes, *left_out),
        search=options.search,
        estimate_error=options.estimate_error,
    )


def _require_counts(options: ProfileOptions, manifest: BundleManifest) -> None:
    for name, values in (("batch", options.batches), ("seq", options.seqs), ("threads", options.threads)):
        if any(value < 1 for value in values):
            raise InputError(f"{name} must be 1 or more, not {min(values)}")
    if not options.batches:
        raise InputError("at least one batch size is needed, e.g. 1")
    longest = max(options.seqs, default=0)
    if longest > manifest.max_positions:
        raise InputError(
            f"seq {longest} is too long: {manifest.run!r} takes at most {manifest.max_positions} tokens; ask for less"
        )


def _limits(options: ProfileOptions, device: DeviceProfile, manifest: BundleManifest, budget: Budget) -> Limits:
    seq = min(budget.seq, manifest.max_positions)
    capped = f"the budget names {budget.batch}×{budget.seq}, but the model takes at most {seq} positions"
    usable = device.usable_memory_bytes or device.memory_bytes
    here = psutil.virtual_memory().total if device.kind == "cpu" and device.match is None else None
    return Limits(
        size_bytes=_first(options.max_size_bytes, budget.size_bytes),
        latency_ms=_first(options.max_latency_ms, budget.latency_p50_ms),
        memory_bytes=_first(options.max_memory_bytes, budget.memory_bytes or (usable.value if usable else here)),
        energy_mj=_first(options.max_energy_mj, budget.energy_mj),
        batch=budget.batch,
        seq=seq,
        # A language model's budget is per decoded token, not per forward pass over the whole text.
        phase="decode" if manifest.task == "language-modeling" else "steady",
        shape_note=capped if seq < budget.seq else None,
    )


def _first(asked: T | None, budget: T | None) -> T | None:
    return asked if asked is not None else budget


def _artifacts(
    options: ProfileOptions, manifest: BundleManifest, artifact: str | None
) -> tuple[tuple[ArtifactManifest, ...], list[str]]:
    """The artifacts to measure, and a note for each one that exists in name only."""
    by_id = {known.id: known for known in manifest.artifacts}
    asked = options.artifacts or ((artifact,) if artifact is not None else ())
    for name in asked:
        if name not in by_id:
            raise InputError(f"no artifact {name!r} in {manifest.run!r}; it has: {', '.join(by_id) or 'none'}")
    wanted = [by_id[name] for name in dict.fromkeys(asked)] or list(manifest.artifacts)
    built = tuple(known for known in wanted if known.status == "built")
    notes = [
        f"{known.id}: {known.status}: {known.reason or 'no reason given'}" for known in wanted if known not in built
    ]
    if not built:
        raise InputError(f"nothing to profile in {manifest.run!r}: {'; '.join(notes) or 'its bundle has no artifacts'}")
    return built, notes
