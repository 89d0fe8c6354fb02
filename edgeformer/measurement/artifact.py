"""Rows of one artifact, measured by worker processes of their own: whatever happens to one costs its own row only.

A stable row is measured a second time by another process, whose median may differ: its memory lies elsewhere, its
threads run on other cores, or other work has begun on the same hardware that no counter shows.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import Speed
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.golden import GOLDEN_FILE, read_golden
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Energy, Latency, MeasureRules, Memory, Row
from edgeformer.bundle import Bundle
from edgeformer.measurement import conditions, trackers
from edgeformer.measurement.speed_probe import SpeedProbe, typical
from edgeformer.measurement.worker import End, Job, Send, run_job
from edgeformer.runtimes import ArtifactFiles, OpenOptions, on_gpu, opener_of, provider_facts
from edgeformer.runtimes.session import Array
from edgeformer.system.host import usable_cores
from edgeformer.tasks import Task, get_task

Shape = tuple[int, int]
"""(batch, seq)"""

Phase = Literal["steady", "decode"]
"""Whole inputs in one call; or the next token of a text, with caches of the tokens before it."""

Item = tuple[Phase, int, int]
"""(phase, batch, seq): what gets one row."""

Where = Literal["host", "device"]
"""Measured on this host, or a figure of the device that an artifact is judged for."""

Buffers = Sequence[Mapping[str, Array]]

ALLOWANCE_S = 120.0
"""Silence of a worker beyond the bound of its loops: opening a large artifact, and a slow last call."""
_DEVICE_CALLS = 100
_SPEED_PROBES = 5  # a single one may be disturbed
_BUFFERS, _FEWEST_BUFFERS, _BUFFER_BYTES = 8, 2, 256 << 20
"""Different inputs in rotation keep a cache from answering instead of the artifact; large inputs are fewer."""


def items_of(artifact: ArtifactManifest, task: Task, shapes: Iterable[Shape]) -> tuple[Item, ...]:
    """Return what can be measured of an artifact: every phase at every shape, shape by shape.

    A decode graph writes token by token; the step bundle of a language model does that and also takes whole texts.
    """
    phases: tuple[Phase, ...] = ("steady",)
    if artifact.role == "decode":
        phases = ("decode",)
    elif artifact.role == "step" and task.writes_text:
        phases = ("steady", "decode")
    return tuple((phase, *shape) for shape in shapes for phase in phases)


def check_artifact(bundle: Bundle, artifact: ArtifactManifest) -> ArtifactFiles:
    """Compare the files of a built artifact with the manifest; return all that a worker needs, with absolute paths.

    Raises:
        ArtifactError: a file is missing, truncated or changed, or the golden inputs are damaged.
    """
    bundle.golden(artifact)
    files = bundle.files(artifact)
    # Without its scores, which only its task can parse.
    facts: dict[str, Any] = {"score": None, "validation": None, "rounded": {}}
    size_bytes = artifact.size_bytes or files.file.stat().st_size
    return replace(
        files,
        artifact=artifact.model_copy(update={**facts, "size_bytes": size_bytes}),
        file=files.file.resolve(),
        parts={name: path.resolve() for name, path in files.parts.items()},
        golden=(bundle.folder / artifact.companions / GOLDEN_FILE).resolve(),
        task=bundle.task.name,
        axes=dict(bundle.task.axes(bundle.data)),
    )


def golden_calls(files: ArtifactFiles, shape: Shape, count: int) -> list[dict[str, Array]]:
    """Return different real inputs of one shape, of files from :func:`check_artifact`. Raises GoldenError."""
    assert files.golden is not None and files.task is not None
    return get_task(files.task).calls(read_golden(files.golden), files.axes, shape, count)


class MeasureSpec(Job):
    """One artifact, the items to measure, and the rules."""

    name = "measuring"
    files: ArtifactFiles
    provider: str | None = Field(description="None: the runtime's choice for this machine")
    items: tuple[Item, ...] = Field(strict=False)
    rules: MeasureRules


class Start(Frozen):
    """Message: an item is being opened and measured."""

    kind: Literal["start"] = "start"
    item: Item = Field(strict=False)
    provider: str


class FinishedRow(Frozen):
    """Message: a row, sent as soon as it is finished."""

    kind: Literal["row"] = "row"
    row: Row


class Refusal(Frozen):
    """Message: one item cannot be measured or listed; the others continue."""

    kind: Literal["refusal"] = "refusal"
    item: Item = Field(strict=False)
    reason: str


MESSAGES: TypeAdapter[Start | FinishedRow | Refusal | End] = TypeAdapter(
    Annotated[Start | FinishedRow | Refusal | End, Field(discriminator="kind")]
)


def row_of(artifact: ArtifactManifest, item: Item, provider: str, where: Where, **figures: Any) -> Row:
    """Return a row of an artifact; ``figures`` are the row's other fields."""
    phase, batch, seq = item
    identity: Any = {"provider": provider, "where": where, "phase": phase, "batch": batch, "seq": seq}
    return Row(artifact=artifact.id, precision=artifact.precision, **identity, **figures)


def unavailable_row(
    artifact: ArtifactManifest, size_bytes: int, item: Item, provider: str, where: Where, reason: str
) -> Row:
    """Return a row without figures except the file's size, and with the reason."""
    return row_of(artifact, item, provider, where, size_bytes=size_bytes, **absent_figures(reason))


def absent_figures(reason: str) -> dict[str, Any]:
    """Return the figures of a row of which nothing was measured or estimated."""
    absent: Any = {"status": "unavailable", "reason": reason}
    return {"latency_ms": Latency(**absent), "memory_bytes": Memory(**absent), "energy_mj": Energy(**absent)}


class MeasuringInterrupted(KeyboardInterrupt):
    """Ctrl-C while an artifact was measured; ``rows`` were finished before it."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


def measure_artifact(spec: MeasureSpec, progress: Progress) -> list[Row]:
    """Return the rows of one artifact, in the order of ``spec.items``; a row without figures has a reason.

    After a worker died, a new one continues behind the item that killed it, until two in a row have died without a
    row. Stable rows are measured again, for a third of the time, by a second process; see :func:`confirmed`.

    Args:
        spec: what to measure.
        progress: advanced once per item, and once more if the item is measured again.

    Raises:
        MeasuringInterrupted: Ctrl-C.
    """
    name = spec.files.artifact.id
    rows, is_interrupted = _measure_items(spec, progress, f"measuring {name}")
    stable = tuple(item_of(row) for row in rows if row.phase != "cold" and row.latency_ms.stable)
    second_rows: list[Row] = []
    if not is_interrupted:
        for row in rows:
            if row.latency_ms.status == "unavailable":
                phase = "" if row.phase == "steady" else f", {row.phase}"
                progress.message(f"{name} at {row.batch}×{row.seq}{phase}: not measured: {row.latency_ms.reason}")
        if stable:
            second = spec.model_copy(update={"rules": spec.rules.repeated(), "items": stable})
            second_rows, is_interrupted = _measure_items(second, progress, f"measuring {name} again")
    by_item = {item_of(row): row for row in second_rows if row.phase != "cold"}
    for position, row in enumerate(rows):
        if row.phase != "cold" and row.latency_ms.stable:
            rows[position] = confirmed(row, by_item.get(item_of(row)), spec.rules.repeat_tolerance)
    if is_interrupted:
        raise MeasuringInterrupted(rows)
    return rows


def item_of(row: Row) -> Item:
    """Return the item that a row answers; a cold row answers none."""
    assert row.phase != "cold"
    return (row.phase, row.batch, row.seq)


def confirmed(row: Row, second_row: Row | None, tolerance: float) -> Row:
    """Return the row with the second process's median noted; not stable if the two medians differ.

    Args:
        row: of the first process; its sample is kept.
        second_row: the same item from the second process; None: interrupted before it was measured.
        tolerance: relative difference of the medians that is allowed.
    """
    facts = row.conditions
    if second_row is None:
        warnings = ["not confirmed: interrupted before a second process measured it"]
    else:
        first, second = row.latency_ms.p50, second_row.latency_ms.p50
        facts = {**facts, "repeated_p50_ms": second}
        if (seconds := second_row.conditions.get("measuring_s")) is not None:
            facts["repeated_measuring_s"] = seconds
        if first is not None and second is not None and max(first, second) <= min(first, second) * (1 + tolerance):
            return row.model_copy(update={"conditions": facts})
        result = f"found {second:.3g} ms" if second is not None else f"found nothing: {second_row.latency_ms.reason}"
        warnings = [f"not confirmed: this process has a median of {first:.3g} ms, a second one {result}"]
        # Work that disturbed the second process does not concern the first one's calls, but may explain the difference.
        warnings += [f"the second process: {text}" for text in second_row.latency_ms.warnings]
    latency = row.latency_ms.model_copy(update={"stable": False, "warnings": (*row.latency_ms.warnings, *warnings)})
    return row.model_copy(update={"latency_ms": latency, "conditions": facts})


def _measure_items(spec: MeasureSpec, progress: Progress, description: str) -> tuple[list[Row], bool]:
    """Run workers until every item has a row or a refusal.

    Returns:
        A row per item and a cold row before that of the first one; and whether Ctrl-C ended it, with fewer rows.
    """
    rows: dict[Item, Row] = {}
    refusals: dict[Item, str] = {}
    cold: tuple[Item | None, Row] | None = None  # the first worker's first call, and the item it was measured with
    current: Item | None = None
    provider = spec.provider or "none"

    def take(message: Start | FinishedRow | Refusal) -> None:
        nonlocal cold, current, provider
        if isinstance(message, Start):
            provider, current = message.provider, message.item
        elif isinstance(message, Refusal):
            refusals[message.item] = message.reason
            progress.advance(1)
        elif message.row.phase != "cold":
            rows[item_of(message.row)] = message.row
            progress.advance(1, p50_ms=message.row.latency_ms.p50 or 0.0)
        elif cold is None:  # a worker that continues has a first call, too
            cold = current, message.row

    fruitless_workers, unanswered = 0, spec.items
    try:
        with bar(progress, description, len(spec.items), "shape"):
            while unanswered:
                open_items, current = unanswered, None
                job = spec.model_copy(update={"items": open_items})
                end = run_job(job, MESSAGES, spec.rules.longest_s + ALLOWANCE_S, take)
                unanswered = tuple(item for item in open_items if item not in rows and item not in refusals)
                fruitless_workers = fruitless_workers + 1 if unanswered == open_items else 0
                reason = end.reason or "the measuring process did not measure this shape"
                if not end.died or fruitless_workers > 1:
                    refusals |= dict.fromkeys(unanswered, reason)
                    break
                if unanswered:
                    fatal = current if current is not None and current in unanswered else unanswered[0]
                    refusals[fatal] = reason
                    unanswered = tuple(item for item in unanswered if item != fatal)
    except KeyboardInterrupt:
        return [*([cold[1]] if cold is not None else []), *rows.values()], True
    ordered: list[Row] = []
    artifact = spec.files.artifact
    for item in spec.items:
        if cold is not None and cold[0] == item:
            ordered.append(cold[1])
        row = rows.get(item)
        if row is None:
            row = unavailable_row(artifact, artifact.size_bytes or 0, item, provider, "host", refusals[item])
            row = row.model_copy(update={"threads": None if on_gpu(provider) else spec.threads})
        ordered.append(row)
    return ordered, False


# The worker's side: every item is opened afresh, called and timed.


@dataclass(frozen=True)
class Workload:
    """An opened artifact and its calls.

    Attributes:
        first: the first call; while decoding it reads the text before the timed token.
        call: one timed call; its argument counts calls, to rotate inputs.
        close: releases the memory.
        load_ms: opening alone: the runtime was imported and the files were checked before.
        facts: for the row's conditions.
        caveats: warnings for the row: nodes that another provider computes.
        device_ms: milliseconds of a call on the card alone; None if nothing measures that.
        memory_by_name: bytes on the card that the runtime itself reports.
    """

    first: Callable[[], object]
    call: Callable[[int], object]
    close: Callable[[], None]
    load_ms: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    device_ms: Callable[[int], float | None] = lambda index: None
    memory_by_name: Callable[[], dict[str, int]] = dict


def open_workload(files: ArtifactFiles, item: Item, provider: str, threads: int, buffers: Buffers) -> Workload:
    """Open an artifact afresh for one item; ``buffers`` of its shape are used in turn.

    A steady call takes a whole input. A decode call takes one more token at the end of the same text every time, its
    output discarded; the first call reads the tokens before it.
    """
    runtime = opener_of(files.artifact, provider)
    options = OpenOptions(provider, threads, repeated_shapes=True)
    start_s = time.perf_counter()
    if item[0] == "steady":
        session = runtime.open(files, options)
        load_ms = (time.perf_counter() - start_s) * 1000
        return Workload(
            first=lambda: session.run(buffers[0]),
            call=lambda index: session.run(buffers[index % len(buffers)]),
            close=session.close,
            load_ms=load_ms,
            facts=session.settings(),
            caveats=session.caveats(),
            device_ms=lambda index: session.device_ms(buffers[index % len(buffers)]),
            memory_by_name=session.memory_by_name,
        )
    decoder = runtime.open_decoder(files, None, options)
    load_ms = (time.perf_counter() - start_s) * 1000
    context = np.ascontiguousarray(buffers[0]["input_ids"][:, :-1])
    tokens = [np.ascontiguousarray(buffer["input_ids"][:, -1:]) for buffer in buffers]

    def decode(index: int) -> object:
        return decoder.peek(tokens[index % len(tokens)], decoder.loops)

    def read_context() -> None:
        if context.size:
            decoder.read_rows(context)
            decoder.advance(decoder.loops)
        else:
            decode(0)

    facts = {"context_tokens": context.shape[1], "loops": decoder.loops, **decoder.settings()}
    return Workload(read_context, decode, decoder.close, load_ms, facts, decoder.caveats())


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


def input_buffers(files: ArtifactFiles, shape: Shape) -> Buffers:
    """Return two to eight different inputs of one shape, of 256 MiB together if they are large."""
    size_bytes = sum(array.nbytes for array in golden_calls(files, shape, 1)[0].values())
    count = min(_BUFFERS, _BUFFER_BYTES // max(1, size_bytes))
    return golden_calls(files, shape, max(_FEWEST_BUFFERS, count))


def work(document: bytes, send: Send) -> None:
    """Measure the items of a MeasureSpec. An item that the artifact refuses does not stop the others."""
    spec = MeasureSpec.model_validate_json(document, strict=False)
    files, provider = spec.files, load_runtime(spec.files, spec.provider)
    is_gpu = on_gpu(provider)
    # The imported runtime and the speed probe are part of the memory baseline.
    speed_probe = None if is_gpu else SpeedProbe()
    buffers = {shape: input_buffers(files, shape) for shape in dict.fromkeys(item[1:] for item in spec.items)}
    gpu_memory_before = trackers.gpu_memory_in_use(spec.gpu_uuid)
    meter, baseline_bytes = trackers.peak_meter(), trackers.resident_bytes()

    def read_memory(workload: Workload, since_reset: bool) -> tuple[Memory, dict[str, Any]]:
        """Return the row's memory, and other memory figures for the row's conditions."""
        resident = trackers.memory_above(meter, baseline_bytes, since_reset)
        if "context_tokens" in workload.facts:
            method = f"{resident.method}; reading the text before the token included"
            resident = resident.model_copy(update={"method": method})
        if not is_gpu:
            return resident, {}
        by_name = trackers.gpu_memory_by_name(spec.gpu_uuid, gpu_memory_before)
        facts = {"host_memory_peak_bytes": resident.peak, "gpu_memory_bytes": {**by_name, **workload.memory_by_name()}}
        return trackers.gpu_memory(spec.gpu_uuid, gpu_memory_before, by_name), facts

    def make_row(item: Item, latency: Latency, memory: Memory, energy: Energy, facts: Mapping[str, Any]) -> Row:
        return row_of(
            files.artifact,
            item,
            provider,
            "host",
            latency_ms=latency,
            memory_bytes=memory,
            size_bytes=files.artifact.size_bytes,
            throughput_per_s=item[1] * 1000 / latency.mean if latency.mean else None,
            energy_mj=energy,
            threads=None if is_gpu else spec.threads,
            conditions=facts,
        )

    def probe_speeds() -> list[Speed]:
        return [] if speed_probe is None else [speed_probe.speed() for _ in range(_SPEED_PROBES)]

    def measure_item(item: Item, workload: Workload, since_reset: bool, facts: dict[str, Any]) -> Row:
        # A provider with threads of its own may use any number of them.
        threads = spec.threads if provider_facts(provider).counts_threads else None
        pools = max(1, len(files.parts))
        speeds = probe_speeds()
        first_reading = conditions.read_cpu()
        sample = trackers.measure(workload.call, spec.rules)
        use = conditions.used_between(first_reading, conditions.read_cpu())
        speeds += probe_speeds()
        memory, memory_facts = read_memory(workload, since_reset)
        surroundings = conditions.describe(spec.threads, spec.gpu_uuid)
        energy_counter = trackers.energy_counter(provider, spec.gpu_uuid)
        energy = trackers.measure_energy(workload.call, energy_counter, spec.rules)
        warnings = [*sample.warnings, *workload.caveats, *use.warnings(threads, pools)]
        warnings += conditions.doubts(surroundings, provider)
        stable = sample.stable and not use.disturbed(usable_cores(), threads, pools)
        latency = trackers.summarise(sample.samples_ms, stable, warnings, sample.reason)
        facts = {
            **memory_facts,
            **surroundings,
            "warmup_calls": sample.warmup_calls,
            "warmup_s": round(sample.warmup_s, 3),
            "own_cores": round(use.own_cores, 2),
            "foreign_cores": round(use.foreign_cores, 2),
            "buffers": len(buffers[item[1:]]),
            **facts,
        }
        if speeds:
            facts["speed"] = typical(speeds).model_dump()
        device_ms = None
        try:
            if workload.device_ms(0) is not None:
                calls_ms = [workload.device_ms(index) for index in range(_DEVICE_CALLS)]
                device_ms = statistics.median(ms for ms in calls_ms if ms is not None)
        except EdgeformerError as error:
            facts["no_device_ms"] = str(error)
        return make_row(item, latency, memory, energy, facts).model_copy(update={"device_ms": device_ms})

    try:
        for position, item in enumerate(spec.items):
            send(Start(item=item, provider=provider))
            left_over_bytes = max(0, trackers.resident_bytes() - baseline_bytes)
            since_reset = meter.reset() or position == 0
            try:
                # Opened afresh, so that the peak holds nothing of earlier shapes.
                opened = open_workload(files, item, provider, spec.threads, buffers[item[1:]])
                with closing(opened) as workload:
                    start_s = time.perf_counter()
                    workload.first()
                    first_ms = (time.perf_counter() - start_s) * 1000
                    if position == 0:  # opening and first call are the cold row
                        latency = trackers.summarise([first_ms], stable=None, warnings=workload.caveats)
                        energy = Energy(status="unavailable", reason="one call is too short for an energy counter")
                        memory, facts = read_memory(workload, since_reset=True)
                        facts |= {**conditions.describe(spec.threads, spec.gpu_uuid), **workload.facts}
                        facts["file_cache"] = "warm"  # the parent has just hashed the file
                        update = {"phase": "cold", "load_ms": workload.load_ms, "throughput_per_s": None}
                        send(FinishedRow(row=make_row(item, latency, memory, energy, facts).model_copy(update=update)))
                    facts = {"load_ms": round(workload.load_ms, 3), "left_over_bytes": left_over_bytes}
                    facts |= workload.facts
                    if item[0] == "decode":
                        facts["read_context_ms"] = round(first_ms, 3)
                    row = measure_item(item, workload, since_reset, facts)
                    measuring_s = round(time.perf_counter() - start_s, 3)  # first call, warm-up and timed calls
                    row = row.model_copy(update={"conditions": {**row.conditions, "measuring_s": measuring_s}})
                    send(FinishedRow(row=row))
            except EdgeformerError as error:
                send(Refusal(item=item, reason=str(error)))
            trackers.release_unused()
    finally:
        meter.close()
        if speed_probe is not None:
            speed_probe.close()
