"""Request: what a caller asks of one bundle on one device, resolved to shapes, limits and artifacts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

import psutil

from edgeformer.artifacts.device import Budget, DeviceProfile, EstimateError, Phase
from edgeformer.artifacts.errors import InputError, NotBuiltError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.report import MeasureRules
from edgeformer.artifacts.units import format_bytes
from edgeformer.benchmark.choice import ChoiceOptions, check_options
from edgeformer.benchmark.limits import Limit, Quantity, Requirements, limit_of
from edgeformer.measurement.artifact import Shape, items_of
from edgeformer.report import sentences
from edgeformer.report.sentences import note
from edgeformer.runtimes import ALL_RUNTIMES, default_provider, requested_providers
from edgeformer.system.host import default_threads
from edgeformer.tasks import REGISTRY, Task, get_task

if TYPE_CHECKING:
    from edgeformer.artifacts.data_config import DataSection

_LONGEST_QUESTION = 60
"""Characters in a file name; the rest of the 255 that systems allow is for the device and the kind of file."""


@dataclass(frozen=True)
class ProfileOptions:
    """Shapes, limits and artifacts to measure. Limits override the budgets of the device profile.

    Attributes:
        batches: batch sizes to measure, each with every one of ``seqs``; None: the budget's.
        seqs: sequence lengths to measure; empty: the budget's.
        max_latency_ms: p50, at every shape that ``batches`` and ``seqs`` name, else at the budget's.
        max_size_bytes: of the artifact's file.
        max_memory_bytes: peak on the device, at the same shapes.
        max_energy_mj: per call above idle, at the same shapes.
        strict: the rules for figures to publish; ``rules`` wins over it.
        threads: of one operator; each count is measured; empty: the physical cores that this process may use.
        artifacts: ids; empty: all built artifacts.
        provider: name of a provider; None: what fits the device's kind and works on this host.
        runtime: the value of ``--runtime``, instead of ``provider``; None: a choice measures all installed runtimes.
        rules: when to stop measuring; None: the usual rules.
        phase: measure only this one; None: all that an artifact can do.
        allow_leak: also measure a language model that looks ahead; the report says so.
        choose: also name the artifact to deploy.
        estimate_error: validated error of estimates, for the report.
        no_host: for a device that is not this host: estimate only.
    """

    batches: tuple[int, ...] | None = None
    seqs: tuple[int, ...] = ()
    max_latency_ms: float | None = None
    max_size_bytes: int | None = None
    max_memory_bytes: int | None = None
    max_energy_mj: float | None = None
    strict: bool = False
    threads: tuple[int, ...] = ()
    artifacts: tuple[str, ...] = ()
    provider: str | None = None
    runtime: str | None = None
    rules: MeasureRules | None = None
    phase: Phase | None = None
    allow_leak: bool = False
    choose: ChoiceOptions | None = None
    estimate_error: EstimateError | None = None
    no_host: bool = False


@dataclass(frozen=True)
class Request:
    """The options, resolved against one bundle and one device."""

    options: ProfileOptions
    device: DeviceProfile
    shapes: tuple[Shape, ...]  # from small to large
    requirements: Requirements
    rules: MeasureRules
    threads: tuple[int, ...]  # from few to many
    provider: str | None  # that computes, if ``runtime`` is None
    artifacts: tuple[ArtifactManifest, ...]
    notes: tuple[str, ...]
    runtime: str | None = None  # requested by name, see :func:`edgeformer.runtimes.requested_providers`
    question: str = ""  # see :func:`question_of`

    def providers(self, artifact: ArtifactManifest) -> tuple[str | None, ...]:
        """Return the providers to measure an artifact with; empty: the requested runtime does not open it."""
        return (self.provider,) if self.runtime is None else requested_providers(artifact, self.runtime)


def resolve(
    options: ProfileOptions, device: DeviceProfile, manifest: BundleManifest, artifact: str | None = None
) -> Request:
    """Resolve ``options`` for a bundle and a device; ``artifact``: the one that the RUN argument names.

    Raises InputError: an unknown artifact, a count below 1, a sequence that the model cannot take, a runtime that opens
    no artifact, or a model that leaks future tokens; NotBuiltError: none of the requested artifacts was built.
    """
    # 1. Options that make no sense for this model.
    if manifest.leaks and not options.allow_leak:
        raise InputError(
            f"{manifest.run!r} leaks future tokens: it sees the tokens that it predicts, so its scores are void; add "
            "--allow-leak to profile it anyway, with a note in the report"
        )
    batches = (0,) if options.batches == () else options.batches or ()
    for name, values in (("batch", batches), ("seq", options.seqs), ("threads", options.threads)):
        if min(values, default=1) < 1:
            raise InputError(f"--{name}: must be 1 or more, not {min(values)}")
    longest = max(options.seqs, default=0)
    if manifest.max_positions is not None and longest > manifest.max_positions:
        raise InputError(
            f"--seq {longest}: {manifest.run!r} takes at most {manifest.max_positions} tokens; give a smaller number"
        )
    if options.choose is not None:
        check_options(options.choose, manifest)
    # 2. Limits and shapes.
    task = get_task(manifest.task)
    longest_call = task.max_call_tokens(manifest.max_positions, manifest.max_length)
    requirements = requirements_of(options, device, task, longest_call, manifest.data)
    batch, seq = requirements.shape
    named_shapes = {*product(batches or (batch,), options.seqs or (seq,)), *requirements.shapes}
    shapes = {task.fit_shape(manifest.data, *shape) for shape in named_shapes}

    # 3. Artifacts and runtimes.
    by_id = {entry.id: entry for entry in manifest.artifacts}
    requested_ids = options.artifacts or ((artifact,) if artifact is not None else tuple(by_id))
    unknown = next((name for name in requested_ids if name not in by_id), None)
    if unknown is not None:
        raise InputError(
            f"--artifact {unknown}: {manifest.run!r} has no such artifact; it has: {', '.join(by_id) or 'none'}"
        )
    if not by_id:
        raise InputError(f"the bundle of {manifest.run!r} has no artifacts; export the run again")
    requested = [by_id[name] for name in dict.fromkeys(requested_ids)]
    artifacts = tuple(entry for entry in requested if entry.status == "built")
    unbuilt = sentences.unbuilt_notes(requested)
    if not artifacts:
        raise NotBuiltError(f"{manifest.run!r} has no artifact to profile: {'; '.join(unbuilt)}")
    runtime = options.runtime or (ALL_RUNTIMES if options.choose is not None and options.provider is None else None)
    if runtime is not None and not any(requested_providers(entry, runtime) for entry in artifacts):
        ids = ", ".join(entry.id for entry in artifacts)
        raise InputError(f"--runtime {runtime}: opens none of the artifacts of {manifest.run!r} ({ids})")

    if options.phase and not any(items_of(entry, task, [(1, 1)], options.phase) for entry in artifacts):
        needed = {"prefill": "a decode graph", "decode": "a decode graph or step artifact"}
        graph = needed.get(options.phase, "a graph that reads whole texts")
        ids = ", ".join(entry.id for entry in artifacts)
        raise InputError(f"--phase {options.phase}: needs {graph}, and {manifest.run!r} has {ids}")

    # 4. Notes.
    notes = [*shape_notes(requirements), *task.shape_notes(manifest.data)]
    notes += [note("leaks")] if manifest.leaks else []
    if device.budget(task.name, task.budget) == Budget():
        memory_bytes = limit_of(requirements.limits, "memory") if options.max_memory_bytes is None else None
        kind = "no budget" if memory_bytes is None else "memory budget"
        notes.append(note(kind, profile=device.name, task=task.noun, memory=format_bytes(memory_bytes)))
    notes += [
        note("unknown budget", profile=device.name, task=name) for name in device.budgets if REGISTRY.find(name) is None
    ]
    rules = options.rules or (MeasureRules.strict() if options.strict else MeasureRules())
    if rules not in (MeasureRules(), MeasureRules.strict()):
        notes.append(note("other rules", rules=rules))
    return Request(
        options=options, device=device,
        shapes=tuple(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))), requirements=requirements,
        rules=rules, threads=tuple(sorted({*options.threads})) or (default_threads(),),
        provider=options.provider or (default_provider("cpu") if device.kind == "cpu" else None),
        artifacts=artifacts, notes=(*notes, *unbuilt), runtime=runtime, question=question_of(options, artifact),
    )  # fmt: skip


def requirements_of(
    options: ProfileOptions,
    device: DeviceProfile,
    task: Task,
    longest: int | None,  # tokens of the model's longest call; None: any number
    data: DataSection | None,  # of the model's bundle; None: not available
    *,
    is_other_host: bool = False,  # the rows were measured on another machine, whose memory is not this one's
) -> Requirements:
    """Return the limits of a model: the device's budget, overridden by the options.

    Limits of the options are judged at the shapes that the options name, if they name any.
    """
    # 1. Shapes: of the budget, cut to what the model takes, and of the command.
    budget = device.budget(task.name, task.budget)
    shape = budget.batch, min(budget.seq, longest or budget.seq)
    is_cut = shape[1] < budget.seq
    budget_shape = f"{budget.batch}×{budget.seq}"
    shape_note = note("cut shape", shape=budget_shape, tokens=shape[1]) if is_cut else None
    if data is not None:
        shape = task.fit_shape(data, *shape)
    named_shapes = product(options.batches or (shape[0],), options.seqs or (shape[1],))
    fitted_shapes = {named if data is None else task.fit_shape(data, *named) for named in named_shapes}
    command_shapes = sorted(fitted_shapes, key=lambda named: (named[0] * named[1], named))
    # 2. Limits: the memory of the device limits a model without a budget, too.
    memory_bytes = budget.memory_bytes
    if memory_bytes is None:
        usable = device.usable_memory_bytes or device.memory_bytes
        is_host = not is_other_host and device.kind == "cpu" and device.match is None
        memory_bytes = usable.value if usable else psutil.virtual_memory().total if is_host else None
    values: tuple[tuple[Quantity, float | None, float | None], ...] = (
        ("size", budget.size_bytes, options.max_size_bytes),
        ("latency", budget.latency_p50_ms, options.max_latency_ms),
        ("memory", memory_bytes, options.max_memory_bytes),
        ("energy", budget.energy_mj, options.max_energy_mj),
    )
    limits: list[Limit] = []
    for quantity, of_budget, of_command in values:
        if of_command is not None:
            shapes: Sequence[Shape | None] = [None] if quantity == "size" else command_shapes
            limits += [Limit(quantity, of_command, named, "command") for named in shapes]
        elif of_budget is not None:
            limits.append(Limit(quantity, of_budget, None if quantity == "size" else shape, "profile"))
    if options.choose is not None and options.choose.min_score is not None:
        limits.append(Limit("score", options.choose.min_score))
    # 3. First the limits at the shape of the budget.
    if command_shapes != [shape]:
        order = {named: position for position, named in enumerate(command_shapes, start=1)}
        limits.sort(key=lambda limit: order.get(limit.shape, 0) if limit.shape and limit.origin == "command" else 0)
    # A budget of a model that writes text is per decoded token, not per pass over the whole text.
    phase: Literal["steady", "decode"] = "decode" if task.can_write else "steady"  # call that latency budgets limit
    return Requirements(tuple(limits), shape, phase, shape_note, device.name)


def shape_notes(requirements: Requirements) -> list[str]:
    """Return notes on the shapes at which limits are judged."""
    shape = f"{requirements.shape[0]}×{requirements.shape[1]}"
    notes = [note("shape", shape=shape, reason=requirements.shape_note)] if requirements.shape_note else []
    if requirements.command_shapes not in ((), (requirements.shape,)):
        shapes = ", ".join(f"{batch}×{seq}" for batch, seq in requirements.command_shapes)
        has_budget = any(limit.origin == "profile" and limit.shape is not None for limit in requirements.limits)
        notes.append(note("all shapes" if has_budget else "command shapes", shapes=shapes, shape=shape))
    return notes


def question_of(options: ProfileOptions, artifact: str | None) -> str:
    """Return a part of the report's file name for what is requested beyond the device's budget; often empty.

    How often and at which other shapes something is measured does not count: the newer report replaces the older one.
    ``artifact`` is the one that the RUN argument names.
    """
    words: list[str] = []
    if options.choose is not None:
        bound = options.choose.min_score
        words += ["choose", *([f"score-{bound:g}"] if bound is not None else [])]
        words += [f"least-{options.choose.minimize}"] if options.choose.minimize != "latency" else []
    latency_ms, memory_bytes, energy_mj = options.max_latency_ms, options.max_memory_bytes, options.max_energy_mj
    of_calls = [f"latency-{latency_ms:g}ms"] if latency_ms is not None else []
    of_calls += [f"memory-{format_bytes(memory_bytes)}"] if memory_bytes is not None else []
    of_calls += [f"energy-{energy_mj:g}mJ"] if energy_mj is not None else []
    if of_calls:
        sizes = {"batch": options.batches or (), "seq": options.seqs}
        of_calls += ["-".join([name, *map(str, values)]) for name, values in sizes.items() if values]
    words += of_calls
    if options.max_size_bytes is not None:
        words.append(f"size-{format_bytes(options.max_size_bytes)}")
    words += [f"phase-{options.phase}"] if options.phase is not None else []
    words += options.artifacts or ((artifact,) if artifact is not None else ())
    name = re.sub(r"[^\w.-]+", "_", "-".join(words).replace(" ", ""))
    if len(name) <= _LONGEST_QUESTION:
        return name
    return f"{name[:_LONGEST_QUESTION]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
