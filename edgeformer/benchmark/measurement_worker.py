"""Worker side of a measurement: one artifact over its shapes and phases, each opened afresh, called and timed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgeformer.artifacts.device import Speed
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.report import Energy, Latency, Memory, Row
from edgeformer.benchmark import conditions
from edgeformer.benchmark.energy import energy_counter, measure_energy
from edgeformer.benchmark.measure import measure, summarise
from edgeformer.benchmark.measurement import FinishedRow, Item, MeasureSpec, Refusal, Shape, Start, row_of
from edgeformer.benchmark.memory import (
    gpu_memory,
    gpu_memory_by_name,
    gpu_memory_in_use,
    memory_above,
    peak_meter,
    release_unused,
    resident_bytes,
)
from edgeformer.benchmark.process import Send
from edgeformer.benchmark.speed_probe import SpeedProbe, typical
from edgeformer.runtimes import OpenOptions, on_gpu, opener_of, provider_facts
from edgeformer.runtimes.session import Array
from edgeformer.system.host import usable_cores

Buffers = Sequence[Mapping[str, Array]]
_DEVICE_CALLS = 100
_SPEED_PROBES = 5
_BUFFERS, _FEWEST_BUFFERS, _BUFFER_BYTES = 8, 2, 256 << 20
"""Different inputs in rotation keep a cache from answering instead of the artifact; large inputs are fewer."""


def work(document: bytes, send: Send) -> None:
    """Measure the items of a MeasureSpec. An item that the artifact refuses does not stop the others."""
    measurement = _Measurement(MeasureSpec.model_validate_json(document, strict=False), send)
    try:
        for position, item in enumerate(measurement.spec.items):
            send(Start(item=item, provider=measurement.provider))
            try:
                measurement.measure_item(item, is_first=position == 0)
            except EdgeformerError as error:
                send(Refusal(item=item, reason=str(error)))
            release_unused()
    finally:
        measurement.close()


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
    runtime = opener_of(spec.checked.artifact, provider)
    files, options = spec.checked.files, OpenOptions(provider, spec.threads, repeated_shapes=True)
    start_s = time.perf_counter()
    if item[0] == "steady":
        session = runtime.open(files, options)
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


def unpin() -> None:
    """Remove the OpenMP settings once the runtime has read them: no process that this one starts may inherit them."""
    for name in ("OMP_PROC_BIND", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)


def input_buffers(spec: MeasureSpec, shape: Shape) -> Buffers:
    """Return two to eight different inputs of one shape, of 256 MiB together if they are large."""
    size_bytes = sum(array.nbytes for array in spec.checked.calls(shape, 1)[0].values())
    count = min(_BUFFERS, _BUFFER_BYTES // max(1, size_bytes))
    return spec.checked.calls(shape, max(_FEWEST_BUFFERS, count))


class _Measurement:
    """One artifact over its items. Opening and first call of the first item are the cold row."""

    def __init__(self, spec: MeasureSpec, send: Send) -> None:
        self.spec = spec
        self.send = send
        artifact = spec.checked.artifact
        runtime = opener_of(artifact, spec.provider)
        self.provider = runtime.provider(artifact, spec.provider)
        # The imported runtime and the speed probe are part of the memory baseline.
        runtime.load(artifact)
        self.speed_probe = None if on_gpu(self.provider) else SpeedProbe()
        unpin()
        self.buffers = {shape: input_buffers(spec, shape) for shape in spec.shapes}
        self.other_threads = conditions.other_threads()
        self.gpu_memory_before = gpu_memory_in_use(spec.gpu_uuid)
        self.meter = peak_meter()
        self.baseline_bytes = resident_bytes()

    def close(self) -> None:
        self.meter.close()
        if self.speed_probe is not None:
            self.speed_probe.close()

    def measure_item(self, item: Item, is_first: bool) -> None:
        """Open the artifact afresh, so that the peak holds nothing of earlier shapes, and send the item's rows."""
        phase, batch, seq = item
        left_over_bytes = max(0, resident_bytes() - self.baseline_bytes)
        since_reset = self.meter.reset() or is_first
        with closing(open_workload(self.spec, item, self.provider, self.buffers[batch, seq])) as workload:
            start_s = time.perf_counter()
            workload.first()
            first_ms = (time.perf_counter() - start_s) * 1000
            if is_first:
                latency = summarise([first_ms], stable=None, warnings=workload.caveats)
                energy = Energy(status="unavailable", reason="one call is too short for an energy counter")
                facts = conditions.describe(self.spec.threads, self.spec.gpu_uuid)
                # The parent has just hashed the file, so it comes from the page cache, not from the disk.
                facts |= {**workload.facts, "file_cache": "warm"}
                cold = self._row(item, latency, self._memory(workload, since_reset=True), energy, facts)
                update = {"phase": "cold", "load_ms": workload.load_ms, "throughput_per_s": None}
                self.send(FinishedRow(row=cold.model_copy(update=update)))
            facts = {"load_ms": round(workload.load_ms, 3), "left_over_bytes": left_over_bytes, **workload.facts}
            if phase == "decode":
                facts["read_context_ms"] = round(first_ms, 3)
            row = self._measure_calls(item, workload, since_reset)
            facts["measuring_s"] = round(time.perf_counter() - start_s, 3)  # first call, warm-up and timed calls
            self.send(FinishedRow(row=row.model_copy(update={"conditions": {**row.conditions, **facts}})))

    def _measure_calls(self, item: Item, workload: Workload, since_reset: bool) -> Row:
        """Return the steady or decode row."""
        # A provider with threads of its own may use any number of them.
        threads = self.spec.threads if provider_facts(self.provider).counts_threads else None
        pools = max(1, len(self.spec.checked.parts))
        speeds = self._speeds()
        first_reading = conditions.read_cpu()
        sample = measure(workload.call, self.spec.rules)
        use = conditions.used_between(first_reading, conditions.read_cpu(), self.other_threads)
        speeds += self._speeds()
        memory = self._memory(workload, since_reset)
        facts = conditions.describe(self.spec.threads, self.spec.gpu_uuid)
        energy = measure_energy(workload.call, energy_counter(self.provider, self.spec.gpu_uuid), self.spec.rules)
        warnings = (
            *sample.warnings,
            *workload.caveats,
            *use.warnings(threads, pools),
            *conditions.doubts(facts, self.provider),
        )
        stable = sample.stable and not use.disturbed(usable_cores(), threads, pools)
        latency = summarise(sample.samples_ms, stable, warnings, sample.reason)
        device_ms, no_device_ms = None, None
        try:
            if workload.device_ms(0) is not None:
                calls_ms = [workload.device_ms(index) for index in range(_DEVICE_CALLS)]
                device_ms = statistics.median(ms for ms in calls_ms if ms is not None)
        except EdgeformerError as error:
            no_device_ms = str(error)
        facts |= {
            "warmup_calls": sample.warmup_calls,
            "warmup_s": round(sample.warmup_s, 3),
            "own_cores": round(use.own_cores, 2),
            "foreign_cores": round(use.foreign_cores, 2),
            "buffers": len(self.buffers[item[1:]]),
        }
        if speeds:
            facts["speed"] = typical(speeds).model_dump()
        if no_device_ms is not None:
            facts["no_device_ms"] = no_device_ms
        return self._row(item, latency, memory, energy, facts).model_copy(update={"device_ms": device_ms})

    def _speeds(self) -> list[Speed]:
        """Probe the processor's speed several times: a single probe may be disturbed."""
        return [self.speed_probe.speed() for _ in range(_SPEED_PROBES)] if self.speed_probe is not None else []

    def _memory(self, workload: Workload, since_reset: bool) -> tuple[Memory, dict[str, Any]]:
        """Return the row's memory, and other memory figures for the row's conditions."""
        resident = memory_above(self.meter, self.baseline_bytes, since_reset)
        if "context_tokens" in workload.facts:
            method = f"{resident.method}; reading the text before the token included"
            resident = resident.model_copy(update={"method": method})
        if not on_gpu(self.provider):
            return resident, {}
        by_name = gpu_memory_by_name(self.spec.gpu_uuid, self.gpu_memory_before)
        facts = {"host_memory_peak_bytes": resident.peak, "gpu_memory_bytes": {**by_name, **workload.memory_by_name()}}
        return gpu_memory(self.spec.gpu_uuid, self.gpu_memory_before, by_name), facts

    def _row(
        self, item: Item, latency: Latency, memory: tuple[Memory, dict[str, Any]], energy: Energy, facts: dict[str, Any]
    ) -> Row:
        return row_of(
            self.spec.checked.artifact,
            item,
            self.provider,
            "host",
            latency_ms=latency,
            memory_bytes=memory[0],
            size_bytes=self.spec.checked.size_bytes,
            throughput_per_s=item[1] * 1000 / latency.mean if latency.mean else None,
            energy_mj=energy,
            threads=None if on_gpu(self.provider) else self.spec.threads,
            conditions={**memory[1], **facts},
        )
