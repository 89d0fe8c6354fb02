"""The measuring process: ``python -m edgeformer.stages.profiling.child``, ChildSpec in, messages out.

It does nothing but measure one artifact, so that nothing else shares its memory and its threads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgeformer.backends import backend_of, on_gpu
from edgeformer.formats.errors import EdgeformerError
from edgeformer.formats.report import Energy, Latency, Memory, Row
from edgeformer.machine.host import usable_cores
from edgeformer.stages.profiling import conditions
from edgeformer.stages.profiling.answering import claim_stdout
from edgeformer.stages.profiling.energy import energy_counter, measure_energy
from edgeformer.stages.profiling.gpu_memory import before_opening, gpu_memory, gpu_memory_by_name
from edgeformer.stages.profiling.inputs import items_of, make_buffers, read_golden
from edgeformer.stages.profiling.measure import MeasureRules, measure
from edgeformer.stages.profiling.memory import PeakMeter, added, peak_meter, release_unused, resident_bytes
from edgeformer.stages.profiling.messages import ChildSpec, Done, Failed, Item, Measured, Message, Refused, Started
from edgeformer.stages.profiling.opened import Opened, open_for
from edgeformer.stages.profiling.statistics import summarise
from edgeformer.tasks import all_tasks

# Set by the parent for this process only.
_PINNING = ("OMP_PROC_BIND", "OMP_NUM_THREADS")


def main() -> int:
    """Read the spec, measure, answer. An unexpected error ends in a traceback on stderr and exit code 1."""
    send = claim_stdout()
    all_tasks()  # the artifact's scores are recognised by the tasks that are loaded
    spec = ChildSpec.model_validate_json(sys.stdin.buffer.read(), strict=False)
    try:
        _Measuring(spec, send).run()
    except EdgeformerError as error:
        send(Failed(reason=str(error)))
    send(Done())
    return 0


class _Measuring:
    """One artifact over its shapes and phases. The first one's opening and first call are the cold row."""

    def __init__(self, spec: ChildSpec, send: Callable[[Message], None]) -> None:
        self.spec = spec
        self.send = send
        self.rules = MeasureRules.from_fields(spec.rules)
        backend = backend_of(spec.artifact)
        self.provider = backend.provider(spec.artifact, spec.provider)
        backend.load(spec.artifact)  # part of the baseline: the runtime, nothing opened

        # OpenMP has read them by now; a process that a library starts from here must not inherit the pinning.
        for name in _PINNING:
            os.environ.pop(name, None)
        golden = read_golden(Path(spec.bundle) / spec.artifact.companions)
        self.buffers = {shape: make_buffers(golden, *shape) for shape in spec.shapes}
        self.other_threads = conditions.other_threads()
        self.before_gpu = before_opening(spec.gpu_uuid)
        self.meter: PeakMeter = peak_meter()
        self.baseline_bytes = resident_bytes()

    def run(self) -> None:
        """Measure everything; a shape that the artifact refuses does not stop the others."""
        left = [item for item in items_of(self.spec) if item not in self.spec.answered]
        try:
            for position, item in enumerate(left):
                phase, batch, seq = item
                self.send(Started(phase=phase, batch=batch, seq=seq, provider=self.provider))
                try:
                    self._measure_item(item, cold=position == 0)
                except EdgeformerError as error:
                    self.send(Refused(phase=phase, batch=batch, seq=seq, reason=str(error)))
                release_unused()
        finally:
            self.meter.close()

    def _measure_item(self, item: Item, cold: bool) -> None:
        """Open afresh every time: a peak must not hold what earlier shapes made the runtime keep."""
        phase, batch, seq = item
        left_over_bytes = max(0, resident_bytes() - self.baseline_bytes)
        since_reset = self.meter.reset() or cold
        began = time.perf_counter()
        with open_for(self.spec, self.provider, phase, self.buffers[batch, seq]) as opened:
            load_ms = (time.perf_counter() - began) * 1000
            began = time.perf_counter()
            opened.first()
            first_ms = (time.perf_counter() - began) * 1000
            if cold:
                self._send_cold(item, opened, load_ms, first_ms)
            facts = {"load_ms": round(load_ms, 3), "left_over_bytes": left_over_bytes, **opened.facts}
            if phase == "decode":
                facts["read_context_ms"] = round(first_ms, 3)
            self.send(Measured(row=_noting(self._repeated(item, opened, since_reset), **facts)))

    def _send_cold(self, item: Item, opened: Opened, load_ms: float, first_ms: float) -> None:
        latency = summarise([first_ms], stable=None)
        energy = Energy(status="unavailable", reason="one call is too short for an energy counter")
        described = conditions.describe(self.spec.threads, self.spec.gpu_uuid)
        row = self._row(item, latency, self._memory(opened, since_reset=True), energy)
        cold = row.model_copy(update={"phase": "cold", "load_ms": load_ms, "throughput_per_s": None})
        # The parent has just hashed the file, so it comes from the page cache, not from the disk.
        self.send(Measured(row=_noting(cold, **described, **opened.facts, file_cache="warm")))

    def _repeated(self, item: Item, opened: Opened, since_reset: bool) -> Row:
        """The steady or decode row."""
        counted = conditions.counted_threads(self.provider, self.spec.threads)
        pools = max(1, len(self.spec.artifact.parts))
        before = conditions.read_cpu()
        sample = measure(opened.call, self.rules)
        use = conditions.used_between(before, conditions.read_cpu(), self.other_threads)
        memory = self._memory(opened, since_reset)
        described = conditions.describe(self.spec.threads, self.spec.gpu_uuid)
        energy = measure_energy(opened.call, energy_counter(self.provider, self.spec.gpu_uuid), self.rules)
        doubts = (*use.warnings(counted, pools), *conditions.doubts(described, self.provider))
        stable = sample.stable and not use.disturbed(usable_cores(), counted, pools)
        row = self._row(
            item, summarise(sample.samples_ms, stable, (*sample.warnings, *doubts), sample.reason), memory, energy
        )
        device_ms, why_none = opened.median_device_ms()
        facts: dict[str, Any] = {
            **described,
            "warmup_calls": sample.warmup_calls,
            "warmup_s": round(sample.warmup_s, 3),
            "own_cores": round(use.own_cores, 2),
            "foreign_cores": round(use.foreign_cores, 2),
            "buffers": len(self.buffers[item[1:]]),
        }
        if why_none is not None:
            facts["no_device_ms"] = why_none
        return _noting(row.model_copy(update={"device_ms": device_ms}), **facts)

    def _memory(self, opened: Opened, since_reset: bool) -> tuple[Memory, dict[str, Any]]:
        """The row's memory, and other figures of it by name."""
        resident = added(self.meter, self.baseline_bytes, since_reset)
        if "context_tokens" in opened.facts:
            method = f"{resident.method}; reading the text before the token included"
            resident = resident.model_copy(update={"method": method})
        if not on_gpu(self.provider):
            return resident, {}
        found = gpu_memory_by_name(self.before_gpu)
        named = {"host_memory_peak_bytes": resident.peak, "gpu_memory_bytes": {**found, **opened.memory_by_name()}}
        return gpu_memory(self.provider, self.before_gpu, found) or resident, named

    def _row(self, item: Item, latency: Latency, memory: tuple[Memory, dict[str, Any]], energy: Energy) -> Row:
        spec, (phase, batch, seq) = self.spec, item
        return Row(
            artifact=spec.artifact.id,
            precision=spec.artifact.precision,
            provider=self.provider,
            where="host",
            phase=phase,
            batch=batch,
            seq=seq,
            latency_ms=latency,
            memory_bytes=memory[0],
            size_bytes=spec.size_bytes,
            throughput_per_s=batch * 1000 / latency.mean if latency.mean else None,
            energy_mj=energy,
            threads=None if on_gpu(self.provider) else spec.threads,
            conditions=memory[1],
        )


def _noting(row: Row, **facts: Any) -> Row:
    return row.model_copy(update={"conditions": {**row.conditions, **facts}})


if __name__ == "__main__":
    sys.exit(main())
