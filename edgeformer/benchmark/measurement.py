"""Rows of one artifact, measured by worker processes of their own: whatever happens to one costs its own row only.

A stable row is measured a second time by another process, whose median may differ: its memory lies elsewhere, its
threads run on other cores, or other work has begun on the same hardware that no counter shows.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import Speed
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.golden import GOLDEN_FILE, read_golden
from edgeformer.artifacts.manifest import ArtifactManifest
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Energy, Latency, Memory, Row
from edgeformer.benchmark import conditions
from edgeformer.benchmark import memory as memory_meter
from edgeformer.benchmark.measure import MeasureRules, energy_counter, measure, measure_energy, summarise
from edgeformer.benchmark.process import End, Job, Send, run_job
from edgeformer.benchmark.speed_probe import SpeedProbe, typical
from edgeformer.bundle import Bundle
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


def phases_of(artifact: ArtifactManifest, task: Task) -> tuple[Phase, ...]:
    """Return the phases that can be measured of an artifact.

    A decode graph writes token by token; the step bundle of a language model does that and also takes whole texts.
    """
    if artifact.role == "decode":
        return ("decode",)
    return ("steady", "decode") if artifact.role == "step" and task.writes_text else ("steady",)


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
    """One artifact, the shapes to measure it at, and the rules."""

    name, answers = "measuring", "measurements"
    kind: Literal["measure", "pair"] = Field("measure", description="pair: blocks of calls on request, of one item")
    files: ArtifactFiles
    provider: str | None = Field(description="None: the runtime's choice for this machine")
    phases: tuple[Phase, ...] = Field(("steady",), strict=False)
    shapes: tuple[Shape, ...] = Field(strict=False)
    answered: tuple[Item, ...] = Field((), strict=False, description="items that an earlier worker finished or died of")
    rules: MeasureRules
    repeat: int = Field(1, ge=1, description="pair: calls timed as one, by which a benchmark plants a slowdown")

    @property
    def items(self) -> tuple[Item, ...]:
        """The items that are left, shape by shape, and phase by phase at each of them."""
        items: list[Item] = [(phase, *shape) for shape, phase in product(self.shapes, self.phases)]
        return tuple(item for item in items if item not in self.answered)


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
    absent: Any = {"status": "unavailable", "reason": reason}
    figures = {"latency_ms": Latency(**absent), "memory_bytes": Memory(**absent), "energy_mj": Energy(**absent)}
    return row_of(artifact, item, provider, where, size_bytes=size_bytes, **figures)


class MeasuringInterrupted(KeyboardInterrupt):
    """Ctrl-C while an artifact was measured; ``rows`` were finished before it."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


def measure_artifact(spec: MeasureSpec, progress: Progress) -> list[Row]:
    """Return the rows of one artifact, in the order of ``spec.items``; a row without figures has a reason.

    Decode and step artifacts of language models get a row per decoded token (``phase: decode``) at every shape. After
    a worker died, a new one continues behind the shape that killed it, until two in a row have died without a row.
    Stable rows are measured again, for a third of the time, by a second process; see :func:`confirmed`.

    Args:
        spec: what to measure.
        progress: advanced once per item, and once more if the item is measured again.

    Raises:
        MeasuringInterrupted: Ctrl-C.
    """
    name, interrupted = spec.files.artifact.id, False
    try:
        with bar(progress, f"measuring {name}", len(spec.items), "shape"):
            rows = _measure_items(spec, progress)
    except MeasuringInterrupted as error:
        rows, interrupted = error.rows, True
    stable = tuple(item_of(row) for row in rows if row.phase != "cold" and row.latency_ms.stable)
    second_rows: list[Row] = []
    if not interrupted:
        for row in rows:
            if row.latency_ms.status == "unavailable":
                phase = "" if row.phase == "steady" else f", {row.phase}"
                progress.message(f"{name} at {row.batch}×{row.seq}{phase}: not measured: {row.latency_ms.reason}")
        if not stable:
            return rows
        unstable = tuple(item for item in spec.items if item not in stable)
        second = spec.model_copy(update={"rules": spec.rules.repeated(), "answered": unstable})
        try:
            with bar(progress, f"measuring {name} again", len(stable), "shape"):
                second_rows = _measure_items(second, progress)
        except MeasuringInterrupted as error:
            second_rows, interrupted = error.rows, True
    by_item = {item_of(row): row for row in second_rows if row.phase != "cold"}
    for position, row in enumerate(rows):
        if row.phase != "cold" and row.latency_ms.stable:
            rows[position] = confirmed(row, by_item.get(item_of(row)), spec.rules.repeat_tolerance)
    if interrupted:
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
    row_conditions = row.conditions
    if second_row is None:
        warnings = ["not confirmed: interrupted before a second process measured it"]
    else:
        first, second = row.latency_ms.p50, second_row.latency_ms.p50
        row_conditions = {**row_conditions, "repeated_p50_ms": second}
        if (seconds := second_row.conditions.get("measuring_s")) is not None:
            row_conditions["repeated_measuring_s"] = seconds
        if first is not None and second is not None and max(first, second) <= min(first, second) * (1 + tolerance):
            return row.model_copy(update={"conditions": row_conditions})
        result = f"found {second:.3g} ms" if second is not None else f"found nothing: {second_row.latency_ms.reason}"
        warnings = [f"not confirmed: this process has a median of {first:.3g} ms, a second one {result}"]
        # Work that disturbed the second process does not concern the first one's calls, but may explain the difference.
        warnings += [f"the second process: {text}" for text in second_row.latency_ms.warnings]
    latency = row.latency_ms.model_copy(update={"stable": False, "warnings": (*row.latency_ms.warnings, *warnings)})
    return row.model_copy(update={"latency_ms": latency, "conditions": row_conditions})


def _measure_items(spec: MeasureSpec, progress: Progress) -> list[Row]:
    """Return a row per item of ``spec`` and a cold row: runs workers until every item has a row or a refusal."""
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

    fruitless_workers = 0
    while open_items := [item for item in spec.items if item not in rows and item not in refusals]:
        current = None
        remaining = spec.model_copy(update={"answered": (*spec.answered, *rows, *refusals)})
        try:
            end = run_job(remaining, MESSAGES, spec.rules.longest_s + ALLOWANCE_S, take)
        except KeyboardInterrupt:
            raise MeasuringInterrupted([*([cold[1]] if cold is not None else []), *rows.values()]) from None
        reason = end.reason or "the measuring process did not measure this shape"
        unanswered = [item for item in open_items if item not in rows and item not in refusals]
        fruitless_workers = fruitless_workers + 1 if unanswered == open_items else 0
        if not end.died or fruitless_workers > 1:
            refusals |= dict.fromkeys(unanswered, reason)
        elif unanswered:
            fatal = next((item for item in unanswered if item == current), unanswered[0])
            refusals[fatal] = reason
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
    return ordered


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


def open_workload(spec: MeasureSpec, item: Item, provider: str, buffers: Buffers) -> Workload:
    """Open the artifact of ``spec`` afresh for one item; ``buffers`` of its shape are used in turn.

    A steady call takes a whole input. A decode call takes one more token at the end of the same text every time, its
    output discarded; the first call reads the tokens before it.
    """
    runtime = opener_of(spec.files.artifact, provider)
    options = OpenOptions(provider, spec.threads, repeated_shapes=True)
    start_s = time.perf_counter()
    if item[0] == "steady":
        session = runtime.open(spec.files, options)
        load_ms = (time.perf_counter() - start_s) * 1000
        placement = session.placement()
        return Workload(
            first=lambda: session.run(buffers[0]),
            call=lambda index: session.run(buffers[index % len(buffers)]),
            close=session.close,
            load_ms=load_ms,
            facts={**({} if placement is None else {"nodes_by_provider": placement}), **session.settings()},
            caveats=session.caveats(),
            device_ms=lambda index: session.device_ms(buffers[index % len(buffers)]),
            memory_by_name=session.memory_by_name,
        )
    decoder = runtime.open_decoder(spec.files, None, options)
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


def load_runtime(spec: MeasureSpec) -> str:
    """Import the library that opens the artifact; return the provider that computes."""
    artifact = spec.files.artifact
    runtime = opener_of(artifact, spec.provider)
    provider = runtime.provider(artifact, spec.provider)
    runtime.load(artifact)
    return provider


def unpin() -> None:
    """Remove the OpenMP settings, once the libraries have read them: no child process may inherit them."""
    for name in ("OMP_PROC_BIND", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)


def input_buffers(spec: MeasureSpec, shape: Shape) -> Buffers:
    """Return two to eight different inputs of one shape, of 256 MiB together if they are large."""
    size_bytes = sum(array.nbytes for array in golden_calls(spec.files, shape, 1)[0].values())
    count = min(_BUFFERS, _BUFFER_BYTES // max(1, size_bytes))
    return golden_calls(spec.files, shape, max(_FEWEST_BUFFERS, count))


def work(document: bytes, send: Send) -> None:
    """Measure the items of a MeasureSpec. An item that the artifact refuses does not stop the others."""
    spec = MeasureSpec.model_validate_json(document, strict=False)
    provider = load_runtime(spec)
    # The imported runtime and the speed probe are part of the memory baseline.
    speed_probe = None if on_gpu(provider) else SpeedProbe()
    unpin()
    buffers = {shape: input_buffers(spec, shape) for shape in spec.shapes}
    other_threads = conditions.other_threads()
    gpu_memory_before = memory_meter.gpu_memory_in_use(spec.gpu_uuid)
    meter, baseline_bytes = memory_meter.peak_meter(), memory_meter.resident_bytes()

    def probe_speeds() -> list[Speed]:
        return [] if speed_probe is None else [speed_probe.speed() for _ in range(_SPEED_PROBES)]

    def read_memory(workload: Workload, since_reset: bool) -> tuple[Memory, dict[str, Any]]:
        """Return the row's memory, and other memory figures for the row's conditions."""
        resident = memory_meter.memory_above(meter, baseline_bytes, since_reset)
        if "context_tokens" in workload.facts:
            method = f"{resident.method}; reading the text before the token included"
            resident = resident.model_copy(update={"method": method})
        if not on_gpu(provider):
            return resident, {}
        by_name = memory_meter.gpu_memory_by_name(spec.gpu_uuid, gpu_memory_before)
        facts = {"host_memory_peak_bytes": resident.peak, "gpu_memory_bytes": {**by_name, **workload.memory_by_name()}}
        return memory_meter.gpu_memory(spec.gpu_uuid, gpu_memory_before, by_name), facts

    def make_row(
        item: Item, latency: Latency, memory: tuple[Memory, dict[str, Any]], energy: Energy, facts: Mapping[str, Any]
    ) -> Row:
        return row_of(
            spec.files.artifact,
            item,
            provider,
            "host",
            latency_ms=latency,
            memory_bytes=memory[0],
            size_bytes=spec.files.artifact.size_bytes,
            throughput_per_s=item[1] * 1000 / latency.mean if latency.mean else None,
            energy_mj=energy,
            threads=None if on_gpu(provider) else spec.threads,
            conditions={**memory[1], **facts},
        )

    def measure_item(item: Item, is_first: bool) -> None:
        """Open the artifact afresh, so that the peak holds nothing of earlier shapes, and send the item's rows.

        Opening and first call of the first item are the cold row.
        """
        left_over_bytes = max(0, memory_meter.resident_bytes() - baseline_bytes)
        since_reset = meter.reset() or is_first
        with closing(open_workload(spec, item, provider, buffers[item[1:]])) as workload:
            start_s = time.perf_counter()
            workload.first()
            first_ms = (time.perf_counter() - start_s) * 1000
            if is_first:
                latency = summarise([first_ms], stable=None, warnings=workload.caveats)
                energy = Energy(status="unavailable", reason="one call is too short for an energy counter")
                facts = conditions.describe(spec.threads, spec.gpu_uuid)
                # The parent has just hashed the file, so it comes from the page cache, not from the disk.
                facts |= {**workload.facts, "file_cache": "warm"}
                cold = make_row(item, latency, read_memory(workload, since_reset=True), energy, facts)
                update = {"phase": "cold", "load_ms": workload.load_ms, "throughput_per_s": None}
                send(FinishedRow(row=cold.model_copy(update=update)))
            facts = {"load_ms": round(workload.load_ms, 3), "left_over_bytes": left_over_bytes, **workload.facts}
            if item[0] == "decode":
                facts["read_context_ms"] = round(first_ms, 3)
            row = measure_calls(item, workload, since_reset)
            facts["measuring_s"] = round(time.perf_counter() - start_s, 3)  # first call, warm-up and timed calls
            send(FinishedRow(row=row.model_copy(update={"conditions": {**row.conditions, **facts}})))

    def measure_calls(item: Item, workload: Workload, since_reset: bool) -> Row:
        # A provider with threads of its own may use any number of them.
        threads = spec.threads if provider_facts(provider).counts_threads else None
        pools = max(1, len(spec.files.parts))
        speeds = probe_speeds()
        first_reading = conditions.read_cpu()
        sample = measure(workload.call, spec.rules)
        use = conditions.used_between(first_reading, conditions.read_cpu(), other_threads)
        speeds += probe_speeds()
        memory = read_memory(workload, since_reset)
        facts = conditions.describe(spec.threads, spec.gpu_uuid)
        energy = measure_energy(workload.call, energy_counter(provider, spec.gpu_uuid), spec.rules)
        warnings = (
            *sample.warnings,
            *workload.caveats,
            *use.warnings(threads, pools),
            *conditions.doubts(facts, provider),
        )
        stable = sample.stable and not use.disturbed(usable_cores(), threads, pools)
        latency = summarise(sample.samples_ms, stable, warnings, sample.reason)
        facts |= {
            "warmup_calls": sample.warmup_calls,
            "warmup_s": round(sample.warmup_s, 3),
            "own_cores": round(use.own_cores, 2),
            "foreign_cores": round(use.foreign_cores, 2),
            "buffers": len(buffers[item[1:]]),
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
            try:
                measure_item(item, is_first=position == 0)
            except EdgeformerError as error:
                send(Refusal(item=item, reason=str(error)))
            memory_meter.release_unused()
    finally:
        meter.close()
        if speed_probe is not None:
            speed_probe.close()
