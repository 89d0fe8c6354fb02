"""What a device's budget and the command line allow, and at which shapes that is judged."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from edgeformer.artifacts.device import Budget, DeviceProfile, EstimateError
from edgeformer.artifacts.errors import InputError, NotBuiltError
from edgeformer.artifacts.manifest import ArtifactManifest, BundleManifest
from edgeformer.artifacts.units import format_bytes
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.messages import Shape
from edgeformer.benchmark.search import SearchOptions, check_options
from edgeformer.benchmark.verdict import Limits
from edgeformer.runtimes import ALL_RUNTIMES, default_provider, providers_asked
from edgeformer.system import nvidia
from edgeformer.system.host import board_names, cpu_name, default_threads
from edgeformer.tasks import Task, task_named
from edgeformer.tasks.task import longest_call

if TYPE_CHECKING:
    from edgeformer.artifacts.data_config import DataSection


T = TypeVar("T")


def limits_of(
    options: ProfileOptions,
    device: DeviceProfile,
    task: Task,
    longest: int | None,
    data: DataSection | None,
    *,
    elsewhere: bool = False,
) -> Limits:
    """What a device leaves to a model of a task: its budget, and what the options say instead.

    Args:
        options: whose limits win.
        device: whose budget it is.
        task: of the model.
        longest: tokens of its longest call; None: any number.
        data: of the model's bundle; None: it is not at hand.
        elsewhere: what is judged was measured on another machine, whose memory is not this one's.
    """
    budget = device.budgets.for_task(task.name)
    seq = min(budget.seq, longest or budget.seq)
    capped = f"the budget names {budget.batch}×{budget.seq}, but the model takes at most {seq} tokens of a text"
    batch, seq = (budget.batch, seq) if data is None else task.fit_shape(data, budget.batch, seq)
    usable = device.usable_memory_bytes or device.memory_bytes
    of_host = not elsewhere and device.kind == "cpu" and device.match is None
    here = psutil.virtual_memory().total if of_host else None
    known = Limits(
        size_bytes=_first(options.max_size_bytes, budget.size_bytes),
        latency_ms=budget.latency_p50_ms,
        memory_bytes=budget.memory_bytes or (usable.value if usable else here),
        energy_mj=budget.energy_mj,
        batch=batch,
        seq=seq,
        # A budget of what writes text is per decoded token, not per forward pass over the whole text.
        phase=task.phase,
        shape_note=capped if longest is not None and seq < budget.seq else None,
        profile=device.name,
    )
    return _with_asked(known, options, task, data)


def _with_asked(known: Limits, options: ProfileOptions, task: Task, data: DataSection | None) -> Limits:
    """``known`` with the limits of the command line, which are judged at the shapes that it names, if it names any."""
    given: dict[str, Any] = {
        "latency_ms": options.max_latency_ms,
        "memory_bytes": options.max_memory_bytes,
        "energy_mj": options.max_energy_mj,
    }
    given = {name: limit for name, limit in given.items() if limit is not None}
    named = product(options.batches or (known.batch,), options.seqs or (known.seq,))
    shapes = {shape if data is None else task.fit_shape(data, *shape) for shape in named}
    if not given or shapes == {(known.batch, known.seq)}:
        return replace(known, **given)
    nothing: dict[str, Any] = dict.fromkeys(("size_bytes", "latency_ms", "memory_bytes", "energy_mj", "shape_note"))
    asked = (
        replace(known, **{**nothing, **given, "batch": batch, "seq": seq})
        for batch, seq in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))
    )
    gone: dict[str, Any] = dict.fromkeys(given)
    return replace(known, **gone, asked=tuple(asked))


def shape_notes(limits: Limits) -> list[str]:
    """What a reader must know of the shapes at which limits are judged."""
    notes = [f"budget's shape: {limits.shape_note}"] if limits.shape_note else []
    if limits.asked:
        shapes = ", ".join(f"{at.batch}×{at.seq}" for at in limits.asked)
        own = f"; the budget's own are judged at {limits.batch}×{limits.seq}" if limits.judges_calls else ""
        notes.append(f"the command's limits are judged at {shapes}, which it asked for{own}")
    return notes


def _first(asked: T | None, budget: T | None) -> T | None:
    return asked if asked is not None else budget


# What a caller asks for, and what that means for one bundle and one device: shapes, limits, artifacts, and whether
# the device is this very machine.


# Error correction takes a sixteenth of some cards' memory (T4, L4); cards of one name differ by a third and more.
_LEAST_MEMORY, _MOST_MEMORY = 0.85, 1.1
_LONGEST_QUESTION = 60
"""Characters of a file's name; the rest of the 255 that systems allow is for the device and the kind of file."""


@dataclass(frozen=True)
class ProfileOptions:
    """What a caller may ask for. Limits that are given win over the device profile's budgets.

    Attributes:
        batches: batch sizes to measure, each with every one of ``seqs``; None: 1 and 16.
        seqs: sequence lengths to measure; empty: the budget's.
        max_latency_ms: p50, at every shape that ``batches`` and ``seqs`` name, else at the budget's.
        max_size_bytes: of the artifact's file.
        max_memory_bytes: peak on the device, at the same shapes.
        max_energy_mj: per call above idle, at the same shapes.
        strict: the rules for figures to publish; ``rules`` wins over it.
        threads: of one operator; each count is measured; empty: the physical cores that this process may use.
        artifacts: ids to profile; empty: all that were built.
        provider: what shall compute, as its backend names it; None: what fits the device's kind and works here.
        runtime: what ``--runtime`` names, instead of ``provider``; None: of a search, all that are installed.
        rules: when to stop measuring; None: the usual rules.
        allow_leak: also measure a language model that looks ahead; the report says so.
        search: also name the artifact to deploy.
        estimate_error: how wrong estimates were where they could be checked, to be stated beside them.
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
    allow_leak: bool = False
    search: SearchOptions | None = None
    estimate_error: EstimateError | None = None


@dataclass(frozen=True)
class Request:
    """The options, resolved against one bundle and one device. ``shapes`` go from small to large, ``threads`` too.

    ``runtime``: what is asked for by name, see :func:`edgeformer.runtimes.providers_asked`; None: ``provider``.
    """

    shapes: tuple[Shape, ...]
    limits: Limits
    rules: MeasureRules
    threads: tuple[int, ...]
    provider: str | None
    artifacts: tuple[ArtifactManifest, ...]
    notes: tuple[str, ...]
    runtime: str | None = None
    question: str = ""

    def providers(self, artifact: ArtifactManifest) -> tuple[str | None, ...]:
        """What an artifact is measured with, one after the other; empty: the runtime asked for does not open it."""
        return (self.provider,) if self.runtime is None else providers_asked(artifact, self.runtime)


def resolve(
    options: ProfileOptions, device: DeviceProfile, manifest: BundleManifest, artifact: str | None = None
) -> Request:
    """What ``options`` mean here.

    Args:
        options: what a caller asks for.
        device: that the bundle is judged for.
        manifest: of the bundle.
        artifact: the one that the RUN argument itself names.

    Raises:
        InputError: an unknown artifact, a count below 1, a sequence that the model cannot take, or a model that leaks
            future tokens.
        NotBuiltError: none of the artifacts that were asked for was built.
    """
    if manifest.leaks and not options.allow_leak:
        raise InputError(
            f"{manifest.run!r} leaks future tokens: it sees what it is asked to predict, so its scores are void; "
            "profile it all the same, marked as leaking, with --allow-leak"
        )
    _require_counts(options, manifest)
    if options.search is not None:
        check_options(options.search, manifest)
    task = task_named(manifest.task)
    budget = device.budgets.for_task(task.name)
    limits = limits_of(
        options, device, task, longest_call(task, manifest.max_positions, manifest.max_length), manifest.data
    )
    batches = (1, 16) if options.batches is None else options.batches
    asked = {*product(batches, options.seqs or (limits.seq,)), *limits.shapes}
    shapes = {task.fit_shape(manifest.data, *shape) for shape in asked}
    artifacts, left_out = _artifacts(options, manifest, artifact)
    runtime = options.runtime or (ALL_RUNTIMES if options.search is not None and options.provider is None else None)
    _require_opened(artifacts, runtime, manifest)
    notes = [*shape_notes(limits), *task.shape_notes(manifest.data)]
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
        runtime=runtime,
        question=question_of(options, artifact),
    )


def _require_opened(artifacts: Sequence[ArtifactManifest], runtime: str | None, manifest: BundleManifest) -> None:
    """Raises InputError for a runtime that opens none of the artifacts, or that nobody knows."""
    if runtime is not None and not any(providers_asked(artifact, runtime) for artifact in artifacts):
        ids = ", ".join(artifact.id for artifact in artifacts)
        raise InputError(f"--runtime {runtime}: opens none of {manifest.run!r}'s artifacts ({ids})")


def question_of(options: ProfileOptions, artifact: str | None) -> str:
    """What is asked beside the device's own budget of the whole bundle, as a part of a file's name; usually nothing.

    How often and at which other shapes something is measured is no other question: the newer answer is the better one.

    Args:
        options: what a caller asks for.
        artifact: the one that the RUN argument itself names.
    """
    words: list[str] = []
    if options.search is not None:
        words += ["search", *(f"{name}-{bound:g}" for name, bound in options.search.bounds.items())]
        words += [f"least-{options.search.minimize}"] if options.search.minimize != "latency" else []
    limits: dict[str, tuple[float | None, Callable[[float], str]]] = {
        "latency": (options.max_latency_ms, lambda limit: f"{limit:g}ms"),
        "memory": (options.max_memory_bytes, format_bytes),
        "energy": (options.max_energy_mj, lambda limit: f"{limit:g}mJ"),
    }
    given = [f"{name}-{shown(limit)}" for name, (limit, shown) in limits.items() if limit is not None]
    if given:
        shapes = {"batch": options.batches or (), "seq": options.seqs}
        given += ["-".join([name, *map(str, sizes)]) for name, sizes in shapes.items() if sizes]
    if options.max_size_bytes is not None:
        given.append(f"size-{format_bytes(options.max_size_bytes)}")
    words += [*given, *(options.artifacts or ((artifact,) if artifact is not None else ()))]
    name = re.sub(r"[^\w.-]+", "_", "-".join(words).replace(" ", ""))
    if len(name) <= _LONGEST_QUESTION:
        return name
    return f"{name[:_LONGEST_QUESTION]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _require_counts(options: ProfileOptions, manifest: BundleManifest) -> None:
    for name, values in (("batch", options.batches or ()), ("seq", options.seqs), ("threads", options.threads)):
        if any(value < 1 for value in values):
            raise InputError(f"{name} must be 1 or more, not {min(values)}")
    if options.batches == ():
        raise InputError("at least one batch size is needed, e.g. 1")
    longest = max(options.seqs, default=0)
    if manifest.max_positions is not None and longest > manifest.max_positions:
        raise InputError(
            f"seq {longest} is too long: {manifest.run!r} takes at most {manifest.max_positions} tokens; ask for less"
        )


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
    if not wanted:
        raise InputError(f"nothing to profile in {manifest.run!r}: its bundle has no artifacts")
    if not built:
        raise NotBuiltError(f"nothing to profile in {manifest.run!r}: {'; '.join(notes)}")
    return built, notes


@dataclass(frozen=True)
class Target:
    """Whether the device is present, why (not), and the GPU that computes here if there is one."""

    present: bool
    reason: str
    gpu: nvidia.Gpu | None = None


def find_target(device: DeviceProfile, root: Path = Path("/")) -> Target:
    """Look for ``device`` on this host: by its name, by its memory too, and a Jetson by its part number.

    A CPU profile without ``match`` means "this host, whatever it is". For a GPU profile that is not present,
    ``gpu`` is the first other card, on which the host's rows are then measured.

    Args:
        device: what is looked for.
        root: where the system's files lie.
    """
    if device.kind == "cpu":
        name = cpu_name(root)
        if device.match is None or _named(device, name):
            return Target(True, f"this host: {name}")
        return Target(False, f"this host's processor is {name}, not {device.match}")
    cards = nvidia.gpus()
    if device.boards:
        return _find_board(device, cards, board_names(root))
    for card in cards:
        if _named(device, card.name) and _as_large(device, card):
            return Target(True, f"present: {card.name}", card)
    present = ", ".join(_described(device, card) for card in cards) or "no NVIDIA card"
    return Target(False, f"{device.title} is not present on this host ({present})", next(iter(cards), None))


def _find_board(device: DeviceProfile, cards: list[nvidia.Gpu], board: tuple[str, ...]) -> Target:
    """All modules of a Jetson generation give their GPU one name ("Orin"); the part number tells them apart."""
    if any(part.lower() in name.lower() for part in device.boards for name in board):
        # An older JetPack has no NVML: the GPU is there all the same.
        gpu = next((card for card in cards if _named(device, card.name)), None)
        return Target(True, f"present: {board[0]}", gpu)
    like = next((card.name for card in cards if _named(device, card.name)), None)
    if like is not None and not board:
        found = f"{like}, but which module it is on cannot be seen: /proc/device-tree is hidden, as in most containers"
    elif like is not None:
        found = f"{like} on {board[0]}, which is none of the part numbers {', '.join(device.boards)}"
    else:
        found = ", ".join(card.name for card in cards) or "no NVIDIA card"
    return Target(False, f"{device.title} is not present on this host ({found})", next(iter(cards), None))


def _named(device: DeviceProfile, name: str) -> bool:
    """Whole words only ("NVIDIA L4" is not in "NVIDIA L40S"), and none of the siblings' words."""

    def has(words: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", name, re.IGNORECASE) is not None

    return has(device.match or device.title) and not any(map(has, device.match_not))


def _as_large(device: DeviceProfile, card: nvidia.Gpu) -> bool:
    """Cards of one name come with different memory (RTX 3050, A100); not known counts as the same."""
    if device.memory_bytes is None or card.memory_bytes is None:
        return True
    return _LEAST_MEMORY <= card.memory_bytes / device.memory_bytes.value <= _MOST_MEMORY


def _described(device: DeviceProfile, card: nvidia.Gpu) -> str:
    """With its memory where that is what makes it another card."""
    return f"{card.name} with {format_bytes(card.memory_bytes)}" if _named(device, card.name) else card.name
