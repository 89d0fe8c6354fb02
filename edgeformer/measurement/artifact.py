"""Rows of one artifact, measured by worker processes of their own: whatever happens to one costs its own row only.

A stable row is measured a second time by another process, whose median may differ: its memory lies elsewhere, its
threads run on other cores, or other work has begun on the same hardware that no counter shows.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import psutil
from pydantic import BaseModel, Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import Phase
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.golden import GOLDEN_FILE, read_golden
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Conditions, Energy, Latency, MeasureRules, Memory, Row
from edgeformer.artifacts.units import format_duration
from edgeformer.bundle import Bundle
from edgeformer.measurement import conditions, trackers
from edgeformer.measurement.speed_probe import SpeedProbe
from edgeformer.runtimes import ArtifactFiles, OpenOptions, on_gpu, opener_of, provider_facts
from edgeformer.runtimes.session import Array
from edgeformer.system.host import usable_cores
from edgeformer.system.memory import release_heap
from edgeformer.system.worker import Send, WorkerJob, run_job
from edgeformer.tasks import Task, get_task

Shape = tuple[int, int]  # (batch, seq)

Item = tuple[Phase, int, int]  # (phase, batch, seq): what gets one row

ALLOWANCE_S = 120.0  # silence of a worker beyond the bound of its loops: opening a large artifact, and a slow last call
_DEVICE_CALLS = 100
_SPEED_PROBES = 5  # a single one may be disturbed
_BUFFERS, _FEWEST_BUFFERS, _BUFFER_BYTES = 8, 2, 256 << 20
"""Different inputs in rotation keep a cache from answering instead of the artifact; large inputs are fewer."""


def items_of(
    artifact: ArtifactManifest, task: Task, shapes: Iterable[Shape], requested: Phase | None = None
) -> tuple[Item, ...]:
    """Return what can be measured of an artifact: every phase at every shape, shape by shape.

    A decode graph reads a prompt and writes token by token; the step artifact of a language model writes, and takes
    whole texts. ``requested``: only this phase.
    """
    phases: tuple[Phase, ...] = ("steady",)
    if artifact.role == "decode":
        phases = ("prefill", "decode")
    elif artifact.role == "step" and task.can_write:
        phases = ("steady", "decode")
    if requested is not None:
        phases = tuple(phase for phase in phases if phase == requested)
    return tuple((phase, *shape) for shape in shapes for phase in phases)


def check_artifact(bundle: Bundle, artifact: ArtifactManifest) -> ArtifactFiles:
    """Compare the files of a built artifact with the manifest; return all that a worker needs, with absolute paths.

    Raises ArtifactError: a file is missing, truncated or changed, or the golden inputs are damaged.
    """
    bundle.golden(artifact)
    files = bundle.files(artifact)
    # Without its scores, which only its task can parse.
    facts: dict[str, Any] = {"score": None, "validation": None, "rounded": {}}
    size_bytes = artifact.size_bytes or files.file.stat().st_size
    return replace(
        files, artifact=artifact.model_copy(update={**facts, "size_bytes": size_bytes}), file=files.file.resolve(),
        parts={name: path.resolve() for name, path in files.parts.items()},
        golden=(bundle.folder / artifact.companions / GOLDEN_FILE).resolve(), task=bundle.task.name,
        axes=dict(bundle.task.axes(bundle.data)),
    )  # fmt: skip


def golden_calls(files: ArtifactFiles, shape: Shape, count: int) -> list[dict[str, Array]]:
    """Return different real inputs of one shape, of files from :func:`check_artifact`. Raises GoldenError."""
    assert files.golden is not None and files.task is not None
    return get_task(files.task).calls(read_golden(files.golden), files.axes, shape, count)


class Start(Frozen):
    """Message: an item is being opened and measured."""

    item: Item
    provider: str


class Refusal(Frozen):
    """Message: one item cannot be measured or listed; the others continue."""

    item: Item
    reason: str


class MeasureJob(WorkerJob):
    """One artifact, the items to measure, and the rules; each finished row is sent at once."""

    name = "measuring"
    messages: ClassVar[tuple[type[BaseModel], ...]] = (Start, Row, Refusal)
    files: ArtifactFiles
    items: tuple[Item, ...]
    provider: str | None = Field(None, description="None: the runtime's choice for this machine")
    rules: MeasureRules = MeasureRules()


def row_of(
    artifact: ArtifactManifest, item: Item, provider: str, where: Literal["host", "device"], reason: str | None = None,
    **figures: Any,
) -> Row:  # fmt: skip
    """Return a row, measured on this host or a figure of the device; with ``reason``, all figures are unavailable."""
    phase, batch, seq = item
    figures |= {"provider": provider, "where": where, "phase": phase, "batch": batch, "seq": seq}
    if reason is not None:
        figures |= {"size_bytes": artifact.size_bytes or 0, **absent_figures(reason)}
    return Row(artifact=artifact.id, precision=artifact.precision, **figures)


def absent_figures(reason: str) -> dict[str, Any]:
    """Return the figures of a row of which nothing was measured or estimated."""
    absent: Any = {"status": "unavailable", "reason": reason}
    return {"latency_ms": Latency(**absent), "memory_bytes": Memory(**absent), "energy_mj": Energy(**absent)}


@dataclass(eq=False)
class MeasuringInterrupted(KeyboardInterrupt):
    """Ctrl-C while an artifact was measured; ``rows`` were finished before it."""

    rows: list[Row]


def measure_artifact(job: MeasureJob, progress: Progress, place: str = "") -> list[Row]:
    """Return the rows of one artifact, in the order of ``job.items``; a row without figures has a reason.

    After a worker died, a new one continues behind the item that killed it, until two in a row have died without a
    row. Stable rows are measured again, for a third of the time, by a second process; see :func:`confirmed`.
    ``progress`` is advanced once per item, and once more if the item is measured again; its description ends with
    ``place``, the job's place in a longer work. Raises MeasuringInterrupted: Ctrl-C.
    """
    name = job.files.artifact.id
    rows, is_interrupted = _measure_items(job, progress, f"Measuring {name}{place}")
    stable = tuple(item_of(row) for row in rows if row.phase != "cold" and row.latency_ms.stable)
    second_rows: list[Row] = []
    if not is_interrupted:
        for row in rows:
            if row.latency_ms.status == "unavailable":
                phase = "" if row.phase == "steady" else f", {row.phase}"
                progress.message(f"{name} at {row.batch}×{row.seq}{phase} was not measured: {row.latency_ms.reason}")
        if stable:
            second = job.model_copy(update={"rules": job.rules.repeated(), "items": stable})
            second_rows, is_interrupted = _measure_items(second, progress, f"Measuring {name} again{place}")
    by_item = {item_of(row): row for row in second_rows if row.phase != "cold"}
    for position, row in enumerate(rows):
        if row.phase != "cold" and row.latency_ms.stable:
            rows[position] = confirmed(row, by_item.get(item_of(row)), job.rules.repeat_tolerance)
    if is_interrupted:
        raise MeasuringInterrupted(rows)
    return rows


def item_of(row: Row) -> Item:
    """Return the item that a row answers; a cold row answers none."""
    assert row.phase != "cold"
    return (row.phase, row.batch, row.seq)


def confirmed(row: Row, second_row: Row | None, tolerance: float) -> Row:
    """Return the row with the second process's median noted; not stable if the two medians differ.

    ``second_row`` is None if it was interrupted; ``tolerance`` is the relative difference that is allowed.
    """
    if second_row is None:
        warnings = ["not confirmed: you stopped profile before a second process measured it"]
    else:
        first, second = row.latency_ms.p50, second_row.latency_ms.p50
        facts = {"repeated_p50_ms": second, "repeated_measuring_s": second_row.conditions.measuring_s}
        row = row.model_copy(update={"conditions": row.conditions.model_copy(update=facts)})
        if first is not None and second is not None and max(first, second) <= min(first, second) * (1 + tolerance):
            return row
        result = f"{second:.3g} ms" if second is not None else f"no result ({second_row.latency_ms.reason})"
        warnings = [f"not confirmed: the median is {first:.3g} ms in one process and {result} in a second process"]
        # Work that disturbed the second process does not concern the first one's calls, but may explain the difference.
        warnings += [f"second process: {text}" for text in second_row.latency_ms.warnings]
    latency = row.latency_ms.model_copy(update={"stable": False, "warnings": (*row.latency_ms.warnings, *warnings)})
    return row.model_copy(update={"latency_ms": latency})


def _measure_items(job: MeasureJob, progress: Progress, description: str) -> tuple[list[Row], bool]:
    """Run workers until every item has a row or a refusal.

    Returns a row per item and a cold row before that of the first one; and whether Ctrl-C ended it, with fewer rows.
    """
    # 1. Messages of the workers.
    rows: dict[Item, Row] = {}
    refusals: dict[Item, str] = {}
    cold: tuple[Item | None, Row] | None = None  # the first worker's first call, and the item it was measured with
    current: Item | None = None
    provider = job.provider or "none"

    def take(message: Start | Row | Refusal) -> None:
        nonlocal cold, current, provider
        if isinstance(message, Start):
            provider, current = message.provider, message.item
        elif isinstance(message, Refusal):
            refusals[message.item] = message.reason
            progress.advance(1)
        elif message.phase != "cold":
            rows[item_of(message)] = message
            progress.advance(1, p50_ms=message.latency_ms.p50 or 0.0)
        elif cold is None:  # a worker that continues has a first call, too
            cold = current, message

    # 2. Start workers for the items that are left.
    fruitless_workers, unanswered = 0, job.items
    try:
        longest = format_duration(job.rules.longest_s)
        with bar(progress, description, len(job.items), f"shapes, at most {longest} each"):
            while unanswered:
                open_items, current = unanswered, None
                end = run_job(
                    job.model_copy(update={"items": open_items}), take, silence_s=job.rules.longest_s + ALLOWANCE_S
                )
                unanswered = tuple(item for item in open_items if item not in rows and item not in refusals)
                fruitless_workers = fruitless_workers + 1 if unanswered == open_items else 0
                reason = end.reason or "the measuring process ended without a result for this shape"
                if not end.died or fruitless_workers > 1:
                    refusals |= dict.fromkeys(unanswered, reason)
                    break
                if unanswered:
                    fatal = current if current is not None and current in unanswered else unanswered[0]
                    refusals[fatal] = reason
                    unanswered = tuple(item for item in unanswered if item != fatal)
    except KeyboardInterrupt:
        return [*([cold[1]] if cold is not None else []), *rows.values()], True
    # 3. Put the rows in the order of the items.
    ordered: list[Row] = []
    for item in job.items:
        if cold is not None and cold[0] == item:
            ordered.append(cold[1])
        row = rows.get(item)
        if row is None:
            threads = None if on_gpu(provider) else job.threads
            row = row_of(job.files.artifact, item, provider, "host", refusals[item], threads=threads)
        ordered.append(row)
    return ordered, False


# The worker's side: every item is opened afresh, called and timed.


@dataclass(frozen=True)
class Workload:
    """An opened artifact and its calls."""

    first: Callable[[], object]  # while decoding it reads the text before the timed token
    call: Callable[[int], object]  # one timed call; its argument counts calls, to rotate inputs
    close: Callable[[], None]
    load_ms: float  # opening alone: the runtime was imported and the files were checked before
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the row's conditions
    caveats: tuple[str, ...] = ()  # warnings for the row: nodes that another provider computes
    device_ms: Callable[[int], float | None] = lambda index: None  # of a call on the card alone; None: not measured
    memory_by_name: Callable[[], dict[str, int]] = dict  # bytes on the card that the runtime itself reports


def open_workload(
    files: ArtifactFiles, item: Item, provider: str, threads: int, buffers: Sequence[Mapping[str, Array]]
) -> Workload:
    """Open an artifact afresh for one item; ``buffers`` of its shape are used in turn.

    A steady call takes a whole input. A prefill call reads a prompt, a decode call one more token at the end of the
    same text every time; caches and outputs are discarded. The first decode call reads the tokens before it.
    """
    runtime = opener_of(files.artifact, provider)
    options = OpenOptions(provider, threads, repeated_shapes=True)
    start_s = time.perf_counter()
    if item[0] == "steady":
        session = runtime.open(files, options)
        load_ms = (time.perf_counter() - start_s) * 1000
        return Workload(
            first=lambda: session.run(buffers[0]), call=lambda index: session.run(buffers[index % len(buffers)]),
            close=session.close, load_ms=load_ms, facts=session.settings(), caveats=session.caveats(),
            device_ms=lambda index: session.device_ms(buffers[index % len(buffers)]),
            memory_by_name=session.memory_by_name,
        )  # fmt: skip
    decoder = runtime.open_decoder(files, None, options)
    load_ms = (time.perf_counter() - start_s) * 1000
    start = item[2] - 1 if item[0] == "decode" else 0
    context = np.ascontiguousarray(buffers[0]["input_ids"][:, :start])
    tokens = [np.ascontiguousarray(buffer["input_ids"][:, start:]) for buffer in buffers]

    def read_context() -> None:
        if context.size:
            decoder.read_rows(context)
            decoder.advance(decoder.loops)
        else:
            decoder.peek(tokens[0], decoder.loops)

    facts = {"context_tokens": context.shape[1], "loops": decoder.loops, **decoder.settings()}
    return Workload(
        read_context, lambda index: decoder.peek(tokens[index % len(tokens)], decoder.loops), decoder.close, load_ms,
        facts, decoder.caveats(),
    )  # fmt: skip


def load_runtime(files: ArtifactFiles, requested_provider: str | None) -> str:
    """Import the library that opens the artifact; return the provider that computes.

    Then the OpenMP settings, which the library has read, are removed: no child process may inherit them.
    """
    runtime = opener_of(files.artifact, requested_provider)
    provider = runtime.provider(files.artifact, requested_provider)
    runtime.load(files.artifact)
    for name in ("OMP_PROC_BIND", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    return provider


def input_buffers(files: ArtifactFiles, shape: Shape) -> Sequence[Mapping[str, Array]]:
    """Return two to eight different inputs of one shape, of 256 MiB together if they are large."""
    size_bytes = sum(array.nbytes for array in golden_calls(files, shape, 1)[0].values())
    count = min(_BUFFERS, _BUFFER_BYTES // max(1, size_bytes))
    return golden_calls(files, shape, max(_FEWEST_BUFFERS, count))


def own_memory(files: ArtifactFiles, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return this process's anonymous bytes and resident pages of files in the artifact's folder, above ``before``.

    Memory of memfd_create, in which XNNPACK keeps packed weights, has no file on disk and counts as anonymous. Only
    Linux separates the two.
    """
    maps, folder = psutil.Process().memory_maps(grouped=False), f"{files.file.parent}{os.sep}"
    mapped = sum(area.rss - area.anonymous for area in maps if area.path.startswith(folder))
    anonymous = sum(area.rss if area.path.startswith("/memfd:") else area.anonymous for area in maps)
    return max(0, anonymous - before[0]), max(0, mapped - before[1])


def work(document: bytes, send: Send) -> None:
    """Measure the items of a MeasureJob. An item that the artifact refuses does not stop the others."""
    # 1. Prepare the runtime, the inputs and the meters.
    job = MeasureJob.model_validate_json(document, strict=False)
    files, provider = job.files, load_runtime(job.files, job.provider)
    is_gpu, gpu_uuid = on_gpu(provider), job.gpu_uuid
    # The imported runtime and the speed probe are part of the memory baseline.
    speed_probe = None if is_gpu else SpeedProbe()
    buffers = {shape: input_buffers(files, shape) for shape in dict.fromkeys(item[1:] for item in job.items)}
    gpu_memory_before = trackers.gpu_memory_in_use(gpu_uuid)
    resident_before = own_memory(files) if psutil.LINUX else None
    meter, baseline_bytes = trackers.PeakMeter(), trackers.resident_bytes()

    # 2. Functions that measure a row.
    def read_memory(workload: Workload, since_reset: bool) -> tuple[Memory, dict[str, Any]]:
        """Return the row's memory, and other memory figures for the row's conditions."""
        resident = trackers.memory_above(meter, baseline_bytes, since_reset)
        if workload.facts.get("context_tokens"):
            method = f"{resident.method}, including reading the text before the token"
            resident = resident.model_copy(update={"method": method})
        if not is_gpu:
            return resident, {}
        memory, by_name = trackers.gpu_memory(gpu_uuid, gpu_memory_before)
        facts = {"host_memory_peak_bytes": resident.peak, "gpu_memory_bytes": {**by_name, **workload.memory_by_name()}}
        return memory, facts

    def make_row(item: Item, latency: Latency, **figures: Any) -> Row:
        # Tokens of a prompt, or inputs of a steady call.
        each = item[2] if item[0] == "prefill" else 1
        throughput = each * item[1] * 1000 / latency.mean if latency.mean and "load_ms" not in figures else None
        threads, size_bytes = None if is_gpu else job.threads, files.artifact.size_bytes
        figures |= {"latency_ms": latency, "throughput_per_s": throughput, "threads": threads, "size_bytes": size_bytes}
        return row_of(files.artifact, item, provider, "host", **figures)

    def measure_item(item: Item, workload: Workload, since_reset: bool, facts: dict[str, Any], start_s: float) -> Row:
        # A provider with threads of its own may use any number of them.
        threads = job.threads if provider_facts(provider).counts_threads else None
        pools = max(1, len(files.parts))
        speeds = [speed_probe.speed() for _ in range(_SPEED_PROBES)] if speed_probe is not None else []
        first_reading = conditions.read_cpu()
        sample = trackers.measure(workload.call, job.rules)
        use = conditions.used_between(first_reading, conditions.read_cpu())
        speeds += [speed_probe.speed() for _ in range(_SPEED_PROBES)] if speed_probe is not None else []
        memory, memory_facts = read_memory(workload, since_reset)
        surroundings = conditions.describe(job.threads, gpu_uuid)
        energy = trackers.measure_energy(workload.call, trackers.energy_counter(provider, gpu_uuid), job.rules)
        warnings = [*sample.warnings, *workload.caveats, *use.warnings(threads, pools)]
        warnings += conditions.doubts(Conditions(**surroundings), provider)
        stable = sample.stable and not use.disturbed(usable_cores(), threads, pools)
        facts = {
            **memory_facts, **surroundings, "warmup_calls": sample.warmup_calls, "warmup_s": round(sample.warmup_s, 3),
            "own_cores": round(use.own_cores, 2),
            "foreign_cores": round(use.foreign_cores, 2) if use.foreign_cores is not None else None,
            "buffers": len(buffers[item[1:]]), **facts,
        }  # fmt: skip
        if speeds:
            parts = ([speed.product_us for speed in speeds], [speed.copy_us for speed in speeds])
            facts["speed"] = dict(zip(("product_us", "copy_us"), map(statistics.median, parts), strict=True))
        device_ms = None
        try:
            if workload.device_ms(0) is not None:
                calls_ms = [workload.device_ms(index) for index in range(_DEVICE_CALLS)]
                device_ms = statistics.median(ms for ms in calls_ms if ms is not None)
        except EdgeformerError as error:
            facts["no_device_ms"] = str(error)
        latency = trackers.summarise(sample.samples_ms, stable, warnings, sample.reason)
        facts["measuring_s"] = round(time.perf_counter() - start_s, 3)
        figures = {"memory_bytes": memory, "energy_mj": energy, "device_ms": device_ms}
        return make_row(item, latency, conditions=Conditions(**facts), **figures)

    # 3. Measure the items; the first call of all becomes a row of its own.
    try:
        for position, item in enumerate(job.items):
            send(Start(item=item, provider=provider))
            left_over_bytes = max(0, trackers.resident_bytes() - baseline_bytes)
            since_reset = meter.reset() or position == 0
            try:
                # Opened afresh, so that the peak holds nothing of earlier shapes.
                opened = open_workload(files, item, provider, job.threads, buffers[item[1:]])
                with closing(opened) as workload:
                    start_s = time.perf_counter()
                    workload.first()
                    first_ms = (time.perf_counter() - start_s) * 1000
                    if position == 0:  # opening and first call are the cold row
                        latency = trackers.summarise([first_ms], stable=None, warnings=workload.caveats)
                        energy = Energy(status="unavailable", reason="one call is too short for the energy counter")
                        memory, facts = read_memory(workload, since_reset=True)
                        facts |= {**conditions.describe(job.threads, gpu_uuid), **workload.facts}
                        if resident_before is not None and not is_gpu:
                            facts["resident_bytes"] = sum(own_memory(files, resident_before))
                        facts["file_cache"] = "warm"  # the parent has just hashed the file
                        figures = {"memory_bytes": memory, "energy_mj": energy, "conditions": Conditions(**facts)}
                        cold = make_row(item, latency, load_ms=workload.load_ms, **figures)
                        send(cold.model_copy(update={"phase": "cold"}))
                    facts = {"load_ms": round(workload.load_ms, 3), "left_over_bytes": left_over_bytes}
                    facts |= workload.facts
                    if item[0] != "steady":
                        facts["read_context_ms"] = round(first_ms, 3)
                    send(measure_item(item, workload, since_reset, facts, start_s))
            except EdgeformerError as error:
                send(Refusal(item=item, reason=str(error)))
            # So that one shape's memory is not counted with the next one's.
            gc.collect()
            release_heap()
    finally:
        meter.close()
