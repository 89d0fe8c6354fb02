"""Whole calls of one artifact as they are made in production, each round beside the machine's speed at that moment."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from edgeformer.backends import default_provider
from edgeformer.stages.profiling.child import Send
from edgeformer.stages.profiling.estimating.jobs import ROUNDS, ListSpec, Round, Tick
from edgeformer.stages.profiling.estimating.reference import Clock, Reference, between, slowness, typical
from edgeformer.stages.profiling.measure import MeasureRules
from edgeformer.stages.profiling.measuring import Buffers, opened
from edgeformer.stages.profiling.messages import Item, MeasureSpec

T = TypeVar("T")

_ROUND_S, _LEAST_CALLS, _WARM_UP_S = 0.3, 5, 0.15


class Timer:
    """Times the items of a spec in rounds over all of them, so that a spell in which something else ran falls on many.

    Args:
        spec: what is timed; items go from small to large, and those that there is no time for are left out.
        send: told of every piece of work.
    """

    def __init__(self, spec: ListSpec, send: Send) -> None:
        clock = time.process_time_ns if spec.processor_time else time.perf_counter_ns
        self._clock: Clock = clock
        self._reference = Reference(clock)
        self.rounds: dict[Item, list[Round]] = {}
        ending = time.perf_counter() + spec.budget_s
        # The first round decides how many items there is time for.
        first = time.perf_counter() + spec.budget_s / ROUNDS
        with contextlib.ExitStack() as stack:
            calls = _Calls(spec, stack)
            for number in range(ROUNDS):
                for item in spec.items:
                    if time.perf_counter() > (ending if number else first) or (number and item not in self.rounds):
                        break
                    self.rounds.setdefault(item, []).append(self._round(calls.of(item)))
                    send(Tick())
        speeds = [one.speed for rounds in self.rounds.values() for one in rounds]
        self.speed = typical(speeds) if speeds else self._reference.speed()

    def of(self, item: Item) -> dict[str, Any]:
        """What is sent of an item: its time at the typical speed, and what that is made of."""
        rounds = self.rounds[item]
        call_us = statistics.median(one.us / slowness(one.speed, self.speed) for one in rounds)
        return {"call_us": call_us, "speed": self.speed, "rounds": tuple(rounds)}

    def calls_in(self, item: Item, seconds: float, least: int, most: int) -> int:
        """As many calls of an item as take about so long, within bounds."""
        call_us = statistics.median(one.us for one in self.rounds[item])
        return max(least, min(most, round(seconds * 1e6 / call_us)))

    def beside(self, work: Callable[[], T]) -> tuple[T, float]:
        """What ``work`` answers, and how many times slower than typical the machine was meanwhile."""
        before = self._reference.speed()
        answer = work()
        return answer, slowness(between(before, self._reference.speed()), self.speed)

    def _round(self, call: Callable[[], object]) -> Round:
        time_calls(call, _WARM_UP_S, 2, self._clock)
        before = self._reference.speed()
        times_us = time_calls(call, _ROUND_S, _LEAST_CALLS, self._clock)
        return Round(us=statistics.median(times_us), speed=between(before, self._reference.speed()))


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
        fed: Buffers = spec.checked.calls((batch, seq), count=2)
        if phase == "steady":
            if self._whole is None:
                from edgeformer.backends import OpenOptions, opener_of

                backend = opener_of(spec.checked.artifact, measured.provider)
                options = OpenOptions(default_provider("cpu"), spec.threads)
                self._whole = self._stack.enter_context(contextlib.closing(backend.open(spec.checked.files, options)))
            return partial(self._whole.run, fed[0])
        if item not in self._decoding:
            workload = self._stack.enter_context(
                contextlib.closing(opened(measured, item, default_provider("cpu"), fed))
            )
            workload.first()
            self._decoding[item] = workload.call
        return partial(self._decoding[item], 0)


def time_calls(
    call: Callable[[], object], seconds: float, least: int, clock: Clock = time.perf_counter_ns
) -> list[float]:
    """Microseconds of single calls.

    Args:
        call: what is timed.
        seconds: as many calls as these allow,
        least: but no fewer than that.
        clock: nanoseconds.
    """
    times_us: list[float] = []
    ending = time.perf_counter() + seconds
    while time.perf_counter() < ending or len(times_us) < least:
        began = clock()
        call()
        times_us.append((clock() - began) / 1000)
    return times_us
