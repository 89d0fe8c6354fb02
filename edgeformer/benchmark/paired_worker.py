"""The child's side of a round: one artifact, opened and warmed up, then a block of calls whenever it is asked."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.report import Memory
from edgeformer.benchmark.measure import measure
from edgeformer.benchmark.measurement_worker import buffers_of, opened, unpin
from edgeformer.benchmark.memory import PeakMeter, added, gpu_memory_of_process, peak_meter, resident_bytes
from edgeformer.benchmark.messages import Item, MeasureSpec
from edgeformer.benchmark.process import End, Job
from edgeformer.benchmark.worker import Send
from edgeformer.runtimes import on_gpu, opener_of


class PaceSpec(Job):
    """One artifact at one shape, called when it is asked."""

    name, answers = "comparing", "times"
    kind: Literal["pace"] = "pace"
    measure: MeasureSpec = Field(description="what to open, with the rules of its warm-up")
    item: Item = Field(strict=False)
    repeat: int = Field(1, ge=1, description="calls that are timed as one: a benchmark plants a slowdown with it")


class Ready(Frozen):
    """Opened and warm."""

    kind: Literal["ready"] = "ready"
    provider: str
    call_ms: float = Field(description="mean of the warm-up's calls, `repeat` of them together")
    memory: Memory = Field(description="that the artifact adds to a process which has loaded the runtime")
    settled: bool


class Block(Frozen):
    """What was asked for: as many times as there were lines' calls."""

    kind: Literal["block"] = "block"
    times_ms: tuple[float, ...] = Field(strict=False)


ANSWERS: TypeAdapter[Ready | Block | End] = TypeAdapter(Annotated[Ready | Block | End, Field(discriminator="kind")])


def work(told: bytes, send: Send) -> None:
    """Open; warm up at the first line of stdin; then a block for every line, which holds two numbers of calls: those
    that are not timed, and those that are."""
    spec = PaceSpec.model_validate_json(told, strict=False)
    artifact = spec.measure.checked.artifact
    runtime = opener_of(artifact, spec.measure.provider)
    provider = runtime.provider(artifact, spec.measure.provider)
    runtime.load(artifact)
    unpin()
    buffers = buffers_of(spec.measure, spec.item[1:])
    meter, baseline = peak_meter(), resident_bytes()
    with closing(meter), closing(opened(spec.measure, spec.item, provider, buffers)) as workload:

        def call(index: int) -> None:
            for again in range(spec.repeat):
                workload.call(index * spec.repeat + again)

        workload.first()
        if not sys.stdin.buffer.readline():
            return
        # The warm-up of the measuring rules; one call behind it, because the sample is taken in blocks.
        rules = replace(spec.measure.rules, min_s=0.0, min_calls=1, max_s=0.0)
        sample = measure(call, rules)
        call_ms = sample.warmup_s * 1000 / sample.warmup_calls
        memory = _memory(provider, spec.gpu_uuid, meter, baseline)
        send(Ready(provider=provider, call_ms=call_ms, memory=memory, settled=sample.stable))
        gc.disable()  # a collection in the middle of a call is Python's time, not the artifact's
        for line in sys.stdin.buffer:
            untimed, timed = map(int, line.split())
            times_ms = _block(call, untimed, timed)
            send(Block(times_ms=tuple(times_ms)))


def _memory(provider: str, gpu_uuid: str | None, meter: PeakMeter, baseline_bytes: int) -> Memory:
    """The peak so far: on a card, of its memory."""
    return gpu_memory_of_process(gpu_uuid) if on_gpu(provider) else added(meter, baseline_bytes, since_reset=True)


def _block(call: object, untimed: int, calls: int) -> list[float]:
    assert callable(call)
    for index in range(untimed):
        call(index)
    times_ms = []
    for index in range(calls):
        began = time.perf_counter_ns()
        call(index)
        times_ms.append((time.perf_counter_ns() - began) / 1e6)
    return times_ms


def typical_ms(block: Block) -> float:
    """The median call of a block."""
    return statistics.median(block.times_ms)
