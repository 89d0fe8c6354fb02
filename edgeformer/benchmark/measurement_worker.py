"""What the measuring child does: one artifact over its shapes and phases, each opened afresh, called and timed."""

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
from edgeformer.benchmark.memory import (
    added,
    gpu_memory,
    gpu_memory_by_name,
    gpu_memory_in_use,
    peak_meter,
    release_unused,
    resident_bytes,
)
from edgeformer.benchmark.messages import FinishedRow, Item, MeasureSpec, Refusal, Shape, Start, row_of
from edgeformer.benchmark.worker import Send
from edgeformer.estimate.speed_probe import Reference, typical
from edgeformer.runtimes import OpenOptions, on_gpu, opener_of, provider_facts
from edgeformer.runtimes.session import Array
from edgeformer.system.host import usable_cores

Buffers = Sequence[Mapping[str, Array]]
# Set by the parent for this process only.
_PINNING = ("OMP_PROC_BIND", "OMP_NUM_THREADS")
_DEVICE_CALLS = 100
_PROBES = 5
_BUFFERS, _LEAST_BUFFERS, _BUFFER_BYTES = 8, 2, 256 << 20
"""Different inputs in rotation keep a cache from answering instead of the artifact; large ones are fewer."""


def work(told: bytes, send: Send) -> None:
    """Measure what a MeasureSpec asks for. See :mod:`.child`."""
    _Measurement(MeasureSpec.model_validate_json(told, strict=False), send).run()


@dataclass(frozen=True)
class Workload:
    """An opened artifact and what is called of it.

    Attributes:
        first: the first call; decoding: reads the text before the token that is timed.
        call: one timed call; its argument counts calls, to rotate inputs.
        close: gives the memory back.
        load_ms: what opening took, and nothing else: the runtime was imported and the files were found before.
        facts: what to note in the row's conditions.
        caveats: what to warn the row's reader of: nodes that another provider computes.
        device_ms: one call's milliseconds on the card alone; None where nothing times that.
        memory_by_name: bytes on the card that the runtime itself names.
    """

    first: Callable[[], object]
    call: Callable[[int], object]
    close: Callable[[], None]
    load_ms: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    device_ms: Callable[[int], float | None] = lambda index: None
    memory_by_name: Callable[[], dict[str, int]] = dict

    def median_device_ms(self) -> tuple[float | None, str | None]:
        """Median of some calls of their own on the card, and why there is none (None: nothing times it here)."""
        try:
            if self.device_ms(0) is None:
                return None, None
            timed = [self.device_ms(index) for index in range(_DEVICE_CALLS)]
            return statistics.median(ms for ms in timed if ms is not None), None
        except EdgeformerError as error:
            return None, str(error)


def _open_whole(spec: MeasureSpec, provider: str, buffers: Buffers) -> Workload:
    """Open the artifact of ``spec`` for whole inputs in one call; ``buffers`` have one shape and are used in turn."""
    runtime = opener_of(spec.checked.artifact, provider)
    files, options = spec.checked.files, OpenOptions(provider, spec.threads, repeated_shapes=True)
    began = time.perf_counter()
    session = runtime.open(files, options)
    load_ms = (time.perf_counter() - began) * 1000
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


def _open_decoding(spec: MeasureSpec, provider: str, buffers: Buffers) -> Workload:
    """Open it for one more token at the end of the same text every time, its output thrown away; the tokens before
    the last of the first buffer are read once."""
    runtime = opener_of(spec.checked.artifact, provider)
    files, options = spec.checked.files, OpenOptions(provider, spec.threads, repeated_shapes=True)
    began = time.perf_counter()
    decoder = runtime.open_decoder(files, None, options)
    load_ms = (time.perf_counter() - began) * 1000
    context = np.ascontiguousarray(buffers[0]["input_ids"][:, :-1])
    tokens = [np.ascontiguousarray(buffer["input_ids"][:, -1:]) for buffer in buffers]

    def call(index: int) -> object:
        return decoder.peek(tokens[index % len(tokens)], decoder.loops)

    def first() -> None:
        if context.size:
            decoder.read_rows(context)
            decoder.advance(decoder.loops)
        else:
            call(0)

    facts = {"context_tokens": context.shape[1], "loops": decoder.loops, **decoder.settings()}
    return Workload(first, call, decoder.close, load_ms, facts, decoder.caveats())


def opened(spec: MeasureSpec, item: Item, provider: str, buffers: Buffers) -> Workload:
    """The artifact of ``spec``, opened afresh for one item.

    Args:
        spec: what to open.
        item: phase and shape.
        provider: what computes it.
        buffers: of that shape, used in turn.
    """
    return (_open_whole if item[0] == "steady" else _open_decoding)(spec, provider, buffers)


def unpin() -> None:
    """Call it once the runtime is imported: OpenMP has read its settings, and no other process may inherit them."""
    for name in _PINNING:
        os.environ.pop(name, None)


def buffers_of(spec: MeasureSpec, shape: Shape) -> Buffers:
    """Different inputs of one shape: as many as take a quarter of a GiB, but no more than are worth having."""
    size = sum(array.nbytes for array in spec.checked.calls(shape, 1)[0].values())
    return spec.checked.calls(shape, max(_LEAST_BUFFERS, min(_BUFFERS, _BUFFER_BYTES // max(1, size))))


def probed(reference: Reference | None) -> list[Speed]:
    """Some probes of the processor's speed, as one side of a measurement needs them: one alone may meet a hiccup."""
    return [reference.speed() for _ in range(_PROBES)] if reference is not None else []


class _Measurement:
    """One artifact over its shapes and phases. The first one's opening and first call are the cold row."""

    def __init__(self, spec: MeasureSpec, send: Send) -> None:
        self.spec = spec
        self.send = send
        self.rules = spec.rules
        runtime = opener_of(spec.checked.artifact, spec.provider)
        self.provider = runtime.provider(spec.checked.artifact, spec.provider)
        runtime.load(spec.checked.artifact)  # part of the baseline: the runtime, nothing opened
        # So is what tells the processor's speed, by which another machine can compare the times.
        self.reference = None if on_gpu(self.provider) else Reference()

        unpin()
        self.buffers = {shape: buffers_of(spec, shape) for shape in spec.shapes}
        self.other_threads = conditions.other_threads()
        self.before_gpu = gpu_memory_in_use(spec.gpu_uuid)
        self.meter = peak_meter()
        self.baseline_bytes = resident_bytes()

    def run(self) -> None:
        """Measure everything; a shape that the artifact refuses does not stop the others."""
        try:
            for position, item in enumerate(self.spec.items):
                self.send(Start(item=item, provider=self.provider))
                try:
                    self._measure_item(item, cold=position == 0)
                except EdgeformerError as error:
                    self.send(Refusal(item=item, reason=str(error)))
                release_unused()
        finally:
            self.meter.close()
            if self.reference is not None:
                self.reference.close()

    def _measure_item(self, item: Item, cold: bool) -> None:
        """Open afresh every time: a peak must not hold what earlier shapes made the runtime keep."""
        phase, batch, seq = item
        left_over_bytes = max(0, resident_bytes() - self.baseline_bytes)
        since_reset = self.meter.reset() or cold
        with closing(opened(self.spec, item, self.provider, self.buffers[batch, seq])) as workload:
            began = time.perf_counter()
            workload.first()
            first_ms = (time.perf_counter() - began) * 1000
            if cold:
                self._send_cold(item, workload, first_ms)
            facts = {"load_ms": round(workload.load_ms, 3), "left_over_bytes": left_over_bytes, **workload.facts}
            if phase == "decode":
                facts["read_context_ms"] = round(first_ms, 3)
            row = self._repeated(item, workload, since_reset)
            facts["measuring_s"] = round(time.perf_counter() - began, 3)  # the first call, warming up, and what counts
            self.send(FinishedRow(row=row.model_copy(update={"conditions": {**row.conditions, **facts}})))

    def _send_cold(self, item: Item, workload: Workload, first_ms: float) -> None:
        latency = summarise([first_ms], stable=None, warnings=workload.caveats)
        energy = Energy(status="unavailable", reason="one call is too short for an energy counter")
        described = conditions.describe(self.spec.threads, self.spec.gpu_uuid)
        # The parent has just hashed the file, so it comes from the page cache, not from the disk.
        noted = {**described, **workload.facts, "file_cache": "warm"}
        row = self._row(item, latency, self._memory(workload, since_reset=True), energy, noted)
        cold = row.model_copy(update={"phase": "cold", "load_ms": workload.load_ms, "throughput_per_s": None})
        self.send(FinishedRow(row=cold))

    def _repeated(self, item: Item, workload: Workload, since_reset: bool) -> Row:
        """The steady or decode row."""
        # A provider that brings threads of its own has as many as it likes.
        counted = self.spec.threads if provider_facts(self.provider).counts_threads else None
        pools = max(1, len(self.spec.checked.parts))
        speeds = probed(self.reference)
        before = conditions.read_cpu()
        sample = measure(workload.call, self.rules)
        use = conditions.used_between(before, conditions.read_cpu(), self.other_threads)
        speeds += probed(self.reference)
        memory = self._memory(workload, since_reset)
        described = conditions.describe(self.spec.threads, self.spec.gpu_uuid)
        energy = measure_energy(workload.call, energy_counter(self.provider, self.spec.gpu_uuid), self.rules)
        doubts = (*workload.caveats, *use.warnings(counted, pools), *conditions.doubts(described, self.provider))
        stable = sample.stable and not use.disturbed(usable_cores(), counted, pools)
        latency = summarise(sample.samples_ms, stable, (*sample.warnings, *doubts), sample.reason)
        device_ms, why_none = workload.median_device_ms()
        facts: dict[str, Any] = {
            **described,
            "warmup_calls": sample.warmup_calls,
            "warmup_s": round(sample.warmup_s, 3),
            "own_cores": round(use.own_cores, 2),
            "foreign_cores": round(use.foreign_cores, 2),
            "buffers": len(self.buffers[item[1:]]),
        }
        if speeds:
            facts["speed"] = typical(speeds).model_dump()
        if why_none is not None:
            facts["no_device_ms"] = why_none
        return self._row(item, latency, memory, energy, facts).model_copy(update={"device_ms": device_ms})

    def _memory(self, workload: Workload, since_reset: bool) -> tuple[Memory, dict[str, Any]]:
        """The row's memory, and other figures of it by name, for the row's conditions."""
        resident = added(self.meter, self.baseline_bytes, since_reset)
        if "context_tokens" in workload.facts:
            method = f"{resident.method}; reading the text before the token included"
            resident = resident.model_copy(update={"method": method})
        if not on_gpu(self.provider):
            return resident, {}
        found = gpu_memory_by_name(self.spec.gpu_uuid, self.before_gpu)
        named = {"host_memory_peak_bytes": resident.peak, "gpu_memory_bytes": {**found, **workload.memory_by_name()}}
        return gpu_memory(self.spec.gpu_uuid, self.before_gpu, found), named

    def _row(
        self, item: Item, latency: Latency, memory: tuple[Memory, dict[str, Any]], energy: Energy, noted: dict[str, Any]
    ) -> Row:
        checked = self.spec.checked
        return row_of(
            checked.artifact,
            item,
            self.provider,
            "host",
            latency_ms=latency,
            memory_bytes=memory[0],
            size_bytes=checked.size_bytes,
            throughput_per_s=item[1] * 1000 / latency.mean if latency.mean else None,
            energy_mj=energy,
            threads=None if on_gpu(self.provider) else self.spec.threads,
            conditions={**memory[1], **noted},
        )
