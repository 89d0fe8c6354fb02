"""Messages of the listing worker, and timing of whole calls."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from pydantic import Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.device import Speed
from edgeformer.benchmark.conditions import CpuReading, read_cpu, used_between
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.measurement import CheckedArtifact, Item, MeasureSpec
from edgeformer.benchmark.measurement_worker import Buffers, open_workload
from edgeformer.benchmark.process import Job, Send
from edgeformer.estimate.speed_probe import Reference, between
from edgeformer.runtimes import default_provider
from edgeformer.system.host import usable_cores


class Round(Frozen):
    """The median of some whole calls of one item in one process, and the machine's speed around them."""

    us: float
    speed: Speed
    process: int = Field(0, description="which of the processes that timed the artifact, one after another")


class Tick(Frozen):
    """An item was timed; what it consists of may follow."""

    kind: Literal["tick"] = "tick"


class Beside(Frozen):
    """What else the machine did while a process measured; ``disturbed``: so much that it could not be had again."""

    kind: Literal["beside"] = "beside"
    disturbed: bool
    doubts: str = ""


class ListSpec(Job):
    """One artifact and the items to list; ``timed``: also time whole calls, and where ``nodes`` are wanted, those."""

    name, answers = "listing", "nodes"
    kind: Literal["list"] = "list"
    checked: CheckedArtifact
    items: tuple[Item, ...] = Field((), strict=False)
    timed: bool = False
    nodes: bool = Field(True, description="list them; without, only whole calls are timed")
    budget_s: float = Field(60.0, description="items, given from small to large, that would take longer are left out")


# Whole calls of one artifact as they are made in production, each round beside the machine's speed at that moment.


# Several processes do it, so that a long call needs few repetitions in each.
_ROUND_S, _LEAST_CALLS, _WARM_UP_S = 0.3, 3, 0.15


class Timer:
    """Times every item of a spec once, in one round of calls.

    One process does not represent the machine on another day: several processes are timed, interleaved with those of
    other artifacts (:mod:`.listing`).

    Args:
        spec: what is timed; items go from small to large, and those that there is no time for are left out.
        send: called after every item.
    """

    def __init__(self, spec: ListSpec, send: Send) -> None:
        self._reference = Reference()
        self.rounds: dict[Item, Round] = {}
        ending = time.perf_counter() + spec.budget_s
        start = read_cpu()
        with contextlib.ExitStack() as stack:
            stack.callback(self._reference.close)
            calls = _Calls(spec, stack)
            for item in spec.items:
                if time.perf_counter() > ending:
                    break
                self.rounds[item] = self._round(calls.of(item))
                send(Tick())
            send(beside(start))

    def of(self, item: Item) -> dict[str, Any]:
        """What is sent of an item."""
        return {"call_us": self.rounds[item].us, "rounds": (self.rounds[item],)}

    def calls_in(self, item: Item, seconds: float, minimum: int, maximum: int) -> int:
        """As many calls of an item as take about so long, within bounds."""
        return max(minimum, min(maximum, round(seconds * 1e6 / self.rounds[item].us)))

    def _round(self, call: Callable[[], object]) -> Round:
        time_calls(call, _WARM_UP_S, 1)
        start = self._reference.speed()
        times_us = time_calls(call, _ROUND_S, _LEAST_CALLS)
        return Round(us=statistics.median(times_us), speed=between(start, self._reference.speed()))


def beside(start: CpuReading) -> Beside:
    """What other processes did since a reading. The reference has a thread of its own, so threads are not counted."""
    used = used_between(start, read_cpu())
    return Beside(disturbed=used.disturbed(usable_cores(), None), doubts="; ".join(used.warnings()))


class _Calls:
    """One call of an item, of sessions that stay open. Whole inputs of all shapes share one, as they do in production;
    a decoder reads its text when it is opened."""

    def __init__(self, spec: ListSpec, stack: contextlib.ExitStack) -> None:
        self._spec, self._stack = spec, stack
        self._whole: Any = None
        self._decoding: dict[Item, Callable[[int], object]] = {}

    def of(self, item: Item) -> Callable[[], object]:
        phase, batch, seq = item
        spec = self._spec
        measured = MeasureSpec(
            threads=spec.threads, checked=spec.checked, provider=default_provider("cpu"), phases=(phase,),
            shapes=((batch, seq),), rules=MeasureRules(),
        )  # fmt: skip
        inputs: Buffers = spec.checked.calls((batch, seq), count=2)
        if phase == "steady":
            if self._whole is None:
                from edgeformer.runtimes import OpenOptions, opener_of

                runtime = opener_of(spec.checked.artifact, measured.provider)
                options = OpenOptions(default_provider("cpu"), spec.threads)
                self._whole = self._stack.enter_context(contextlib.closing(runtime.open(spec.checked.files, options)))
            return partial(self._whole.run, inputs[0])
        if item not in self._decoding:
            workload = self._stack.enter_context(
                contextlib.closing(open_workload(measured, item, default_provider("cpu"), inputs))
            )
            workload.first()
            self._decoding[item] = workload.call
        return partial(self._decoding[item], 0)


def time_calls(call: Callable[[], object], seconds: float, least: int) -> list[float]:
    """Microseconds of single calls.

    Args:
        call: what is timed.
        seconds: as many calls as these allow,
        least: but no fewer than that.
    """
    times_us: list[float] = []
    ending = time.perf_counter() + seconds
    while time.perf_counter() < ending or len(times_us) < least:
        began = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - began) / 1000)
    return times_us
