"""The measuring process: ``python -m edgeformer.stages.profiling.child``, ChildSpec in, messages out.

It does nothing but measure one artifact, so that nothing else shares its memory and its threads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from edgeformer.runtime.opening import default_provider, open_checked
from edgeformer.runtime.providers import on_gpu
from edgeformer.runtime.session import Session
from edgeformer.schema.errors import EdgeformerError
from edgeformer.schema.report import Energy, Latency, Memory, Row
from edgeformer.stages.profiling import conditions
from edgeformer.stages.profiling.energy import energy_counter, measure_energy
from edgeformer.stages.profiling.inputs import Tokens, make_buffers, read_golden
from edgeformer.stages.profiling.measure import MeasureRules, measure
from edgeformer.stages.profiling.memory import (
    PeakMeter,
    added,
    gpu_memory,
    peak_meter,
    release_unused,
    resident_bytes,
)
from edgeformer.stages.profiling.messages import (
    ChildSpec,
    Done,
    Failed,
    Measured,
    Message,
    Refused,
    Shape,
    Started,
)
from edgeformer.stages.profiling.statistics import summarise

# Set by the parent for this process only.
_PINNING = ("OMP_PROC_BIND", "OMP_NUM_THREADS")


def main() -> int:
    """Read the spec, measure, answer. An unexpected error ends in a traceback on stderr and exit code 1."""
    out = _claim_stdout()

    def send(message: Message) -> None:
        out.write(message.model_dump_json().encode() + b"\n")
        out.flush()

    spec = ChildSpec.model_validate_json(sys.stdin.buffer.read(), strict=False)
    try:
        _Measuring(spec, send).run()
    except EdgeformerError as error:
        send(Failed(reason=str(error)))
    send(Done())
    return 0


def _claim_stdout() -> BinaryIO:
    """stdout for messages only: what libraries print, in Python or in C, goes to stderr instead."""
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return ours


class _Measuring:
    """One artifact over its shapes. The first shape's opening and first call are the cold row."""

    def __init__(self, spec: ChildSpec, send: Callable[[Message], None]) -> None:
        self.spec = spec
        self.send = send
        self.rules = _rules(spec.rules)
        engine = spec.artifact.format if spec.artifact.format != "onnx" else None
        self.provider = engine or spec.provider or default_provider()
        import edgeformer.runtime.onnx_session  # noqa: F401  part of the baseline: the runtime, nothing opened

        # OpenMP has read them by now; a process that a library starts from here must not inherit the pinning.
        for name in _PINNING:
            os.environ.pop(name, None)
        golden = read_golden(Path(spec.bundle) / spec.artifact.companions)
        self.buffers = {shape: make_buffers(golden, *shape) for shape in spec.shapes}
        self.meter: PeakMeter = peak_meter()
        self.baseline_bytes = resident_bytes()

    def run(self) -> None:
        """Measure every shape; one that the artifact refuses does not stop the others."""
        try:
            for position, shape in enumerate(self.spec.shapes):
                self.send(Started(batch=shape[0], seq=shape[1], provider=self.provider))
                try:
                    self._measure_shape(shape, cold=position == 0)
                except EdgeformerError as error:
                    self.send(Refused(batch=shape[0], seq=shape[1], reason=str(error)))
                release_unused()
        finally:
            self.meter.close()

    def _measure_shape(self, shape: Shape, cold: bool) -> None:
        """Open afresh for every shape: its peak must not hold what earlier shapes made the runtime keep."""
        left_over_bytes = max(0, resident_bytes() - self.baseline_bytes)
        since_reset = self.meter.reset() or cold
        began = time.perf_counter()
        with self._open() as session:
            load_ms = (time.perf_counter() - began) * 1000
            buffers = self.buffers[shape]
            began = time.perf_counter()
            session.run(buffers[0])
            first_ms = (time.perf_counter() - began) * 1000
            if cold:
                self._send_cold(shape, load_ms, first_ms)
            row = self._steady(session, shape, buffers, since_reset)
            self.send(Measured(row=_noting(row, load_ms=round(load_ms, 3), left_over_bytes=left_over_bytes)))

    def _open(self) -> Session:
        spec = self.spec
        return open_checked(Path(spec.file), spec.artifact, spec.max_positions, self.provider, spec.threads)

    def _send_cold(self, shape: Shape, load_ms: float, first_ms: float) -> None:
        latency = summarise([first_ms], stable=None)
        energy = Energy(status="unavailable", reason="one call is too short for an energy counter")
        row = self._row(shape, latency, self._memory(since_reset=True), energy)
        cold = row.model_copy(update={"phase": "cold", "load_ms": load_ms, "throughput_per_s": None})
        # The parent has just hashed the file, so it comes from the page cache, not from the disk.
        self.send(Measured(row=_noting(cold, file_cache="warm")))

    def _steady(self, session: Session, shape: Shape, buffers: list[dict[str, Tokens]], since_reset: bool) -> Row:
        def call(index: int) -> object:
            return session.run(buffers[index % len(buffers)])

        before = conditions.read_cpu()
        sample = measure(call, self.rules)
        use = conditions.used_between(before, conditions.read_cpu())
        memory = self._memory(since_reset)
        energy = measure_energy(call, energy_counter(self.provider, self.spec.gpu_uuid), self.rules)
        warnings = (*sample.warnings, *use.warnings())
        row = self._row(shape, summarise(sample.samples_ms, sample.stable, warnings, sample.reason), memory, energy)
        return _noting(
            row,
            warmup_calls=sample.warmup_calls,
            warmup_s=round(sample.warmup_s, 3),
            own_cores=round(use.own_cores, 2),
            foreign_cores=round(use.foreign_cores, 2),
            buffers=len(buffers),
        )

    def _memory(self, since_reset: bool) -> Memory:
        resident = added(self.meter, self.baseline_bytes, since_reset)
        return gpu_memory(self.provider) or resident

    def _row(self, shape: Shape, latency: Latency, memory: Memory, energy: Energy) -> Row:
        spec = self.spec
        noted = conditions.describe(spec.threads, spec.gpu_uuid)
        if on_gpu(self.provider):
            noted["host_memory_peak_bytes"] = max(0, self.meter.peak_bytes() - self.baseline_bytes)
        return Row(
            artifact=spec.artifact.id,
            precision=spec.artifact.precision,
            provider=self.provider,
            where="host",
            phase="steady",
            batch=shape[0],
            seq=shape[1],
            latency_ms=latency,
            memory_bytes=memory,
            size_bytes=spec.size_bytes,
            throughput_per_s=shape[0] * 1000 / latency.mean if latency.mean else None,
            energy_mj=energy,
            conditions=noted,
        )


def _noting(row: Row, **facts: Any) -> Row:
    return row.model_copy(update={"conditions": {**row.conditions, **facts}})


def _rules(fields: dict[str, float]) -> MeasureRules:
    whole = ("warmup_min_calls", "window_calls", "windows", "min_calls")  # JSON does not tell 10 from 10.0
    kept: dict[str, Any] = {name: int(value) if name in whole else value for name, value in fields.items()}
    return MeasureRules(**kept)


if __name__ == "__main__":
    sys.exit(main())
