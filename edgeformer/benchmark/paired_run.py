"""Paired comparison: rounds of two fresh worker processes, measured in turns, until a sequential test decides.

Every round draws anew what differs from process to process: where the memory lies, on which cores the threads run.
Within a round the two take turns, A B B A, so that a falling clock or other work on the machine affects both. A round
gives one number: the median log ratio of its pairs of blocks.

The test looks at the growing sample of rounds repeatedly and keeps its stated chance of an error. The interval is that
of the sign test for the median: the number of ratios above the true median is that of a fair coin, whatever their
distribution. An error spending function spreads the error over the looks, in the form that approximates Pocock's
boundaries (Lan and DeMets, Discrete sequential boundaries for clinical trials, Biometrika 70, 1983). The chance
of having crossed any boundary is counted exactly.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, e, exp, inf, log
from statistics import median
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, Field

from edgeformer.artifacts.base import Frozen
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.report import Figure, MeasureRules, Memory
from edgeformer.benchmark.limits import compare
from edgeformer.measurement import trackers
from edgeformer.measurement.artifact import ALLOWANCE_S, MeasureJob, input_buffers, load_runtime, open_workload
from edgeformer.runtimes import on_gpu
from edgeformer.system.worker import End, Send, Worker

ERROR = 0.05  # the chance that any interval of a run ever misses the truth, for all that one gate measures together
FEWEST_ROUNDS, MOST_ROUNDS, EVERY = 6, 60, 2  # a look after every second round: one of each order of the two sides
WARMUP_RULES = replace(MeasureRules(), warmup_max_s=1.5)
"""As for any row, but a process that does not settle continues: the other one runs on the same machine."""
_PAIRS, _BLOCK_S, _BLOCK_CALLS = 5, 0.05, 3
"""Pairs of blocks in a round, odd so that their median is one of them; duration of a block, and its fewest calls."""
_UNTIMED_CALLS = 2  # calls at the start of a block: the caches hold the other process's data, and the threads sleep
_SLOW_MS, _SLOW_PAIRS, _SLOW_UNTIMED_CALLS = 100.0, 3, 1
"""Slower calls vary less, and the first ones are a smaller part of them: fewer of both suffice."""
_EXTENSION = 4
_SIDES = ("baseline", "candidate")


class Ready(Frozen):
    """Message: the artifact is open and warm."""

    provider: str
    call_ms: float = Field(description="mean of the warm-up calls, `repeat` of them counted as one")
    memory: Memory = Field(description="of the artifact, above a process that has loaded the runtime")
    is_settled: bool


class Block(Frozen):
    """Message: the times of a block's calls."""

    times_ms: tuple[float, ...]


class PairJob(MeasureJob):
    """One of two artifacts and its item; its worker times blocks of calls on request."""

    messages: ClassVar[tuple[type[BaseModel], ...]] = (Ready, Block)
    repeat: int = Field(1, ge=1, description="calls timed as one, by which a benchmark plants a slowdown")


Pair = tuple[PairJob, PairJob]  # baseline and candidate


def work(document: bytes, send: Send) -> None:
    """Worker side: open the artifact, warm up at the first line of stdin, then time a block of calls for every line.

    A line holds two numbers of calls: untimed and timed ones.
    """
    job = PairJob.model_validate_json(document, strict=False)
    (item,), provider = job.items, load_runtime(job.files, job.provider)
    buffers = input_buffers(job.files, item[1:])
    meter, baseline_bytes = trackers.PeakMeter(), trackers.resident_bytes()
    with closing(meter), closing(open_workload(job.files, item, provider, job.threads, buffers)) as workload:

        def call(index: int) -> None:
            for repetition in range(job.repeat):
                workload.call(index * job.repeat + repetition)

        workload.first()
        if not sys.stdin.buffer.readline():
            return
        # One timed call after the warm-up: the sample is taken in blocks.
        sample = trackers.measure(call, replace(job.rules, min_s=0.0, min_calls=1, max_s=0.0))
        if on_gpu(provider):  # of this process alone: on the card the other one is open as well
            memory = trackers.gpu_memory(job.gpu_uuid, {})[0]
        else:
            memory = trackers.memory_above(meter, baseline_bytes, since_reset=True)
        call_ms = sample.warmup_s * 1000 / sample.warmup_calls
        send(Ready(provider=provider, call_ms=call_ms, memory=memory, is_settled=sample.stable))
        gc.disable()  # a collection within a call is Python's time, not the artifact's
        for line in sys.stdin.buffer:
            untimed_calls, timed_calls = map(int, line.split())
            for index in range(untimed_calls):
                call(index)
            times_ms = []
            for index in range(timed_calls):
                start_ns = time.perf_counter_ns()
                call(index)
                times_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
            send(Block(times_ms=tuple(times_ms)))


@dataclass(frozen=True)
class Interval:
    """The slowdown, 0.1 for 10% more time, and an interval that holds it at all looks of a run together."""

    middle: float
    low: float
    high: float

    def change(self, limit: float) -> Literal["slower", "faster", "no different", "not known"]:
        """Return the direction of the change; no different is an interval within half of ``limit`` to either side."""
        if self.low > 0:
            return "slower"
        if self.high < 0:
            return "faster"
        return "no different" if -limit / 2 < self.low and self.high < limit / 2 else "not known"

    def decision(self, limit: float) -> Literal["pass", "fail", "undecided"]:
        """Decide whether the slowdown is at most ``limit``, e.g. 0.05.

        A pass requires that a smaller slowdown is either detected or known to be less than half of ``limit``.
        """
        status = compare(Figure(self.middle, low=self.low, high=self.high), limit)
        if status == "pass" and self.low <= 0 and self.high >= limit / 2:
            return "undecided"
        return "undecided" if status == "unknown" else status


def interval(log_ratios: Sequence[float], error: float = ERROR) -> Interval:
    """Return the median slowdown and the interval that holds it at this look and at all others of the run.

    ``log_ratios`` are of candidate to baseline, one per round; ``error`` is the chance that an interval misses it.
    """
    count = min(len(log_ratios), MOST_ROUNDS) // EVERY * EVERY  # the error is counted at these looks only
    ordered = sorted(log_ratios[:count])
    boundary = boundaries(error).get(count, -1)
    ends = (ordered[boundary], ordered[count - 1 - boundary]) if boundary >= 0 else (-inf, inf)
    middle = float(np.median(ordered)) if ordered else 0.0
    low, high = (exp(end) - 1 if end < inf else inf for end in ends)
    return Interval(exp(middle) - 1, low, high)


@lru_cache(maxsize=16)
def boundaries(error: float) -> dict[int, int]:
    """Map a look (number of rounds) to its boundary: ``heads <= boundary`` of a fair coin ends on one side.

    Counts the chance of every number of heads among the sequences that no earlier look has ended. Both sides may be
    crossed, so each gets half of the error.
    """
    boundary_of: dict[int, int] = {}
    alive, spent = np.ones(1), 0.0
    for rounds in range(1, MOST_ROUNDS + 1):
        alive = (np.append(alive, 0.0) + np.append(0.0, alive)) / 2
        if rounds < FEWEST_ROUNDS or rounds % EVERY:
            continue
        allowed = error / 2 * log(1 + (e - 1) * rounds / MOST_ROUNDS)
        passed = spent + np.cumsum(alive)
        boundary = int(np.searchsorted(passed, allowed, side="right")) - 1
        if boundary >= 0:
            boundary_of[rounds], spent = boundary, float(passed[boundary])
            alive[: boundary + 1] = 0.0
    return boundary_of


class SideError(ArtifactError):
    """One of the two cannot be measured: ``side`` 0 is the baseline, 1 the candidate; ``reason`` of its process."""

    def __init__(self, side: int, reason: str, suffix: str = "") -> None:
        super().__init__(f"the {_SIDES[side]} cannot be measured: {reason}{suffix}")
        self.side, self.reason = side, reason


@dataclass(frozen=True)
class PairRules:
    """When to stop measuring rounds."""

    longest_s: float = 180.0  # no round begins later, unless there are too few for an interval: then four times as late
    max_slowdown: float = 0.05
    error: float = ERROR  # the chance that any interval of the run misses the true slowdown


@dataclass
class Pairing:
    """Result of the rounds so far; the lists hold an entry per round."""

    log_ratios: list[float] = field(default_factory=list)
    baseline_ms: list[float] = field(default_factory=list)
    candidate_ms: list[float] = field(default_factory=list)
    memory: list[tuple[Memory, Memory]] = field(default_factory=list)  # of baseline and candidate
    slowdown: Interval = field(default_factory=lambda: interval([]))
    providers: tuple[str, str] = ("", "")
    unsettled: int = 0  # processes that did not settle while warming up
    failures: list[str] = field(default_factory=list)  # why rounds were measured again
    fewest_rounds: int = MOST_ROUNDS  # before so many no interval has ends; the smaller the ``error``, the more
    needs_s: float | None = None  # time that the fewest rounds would take, if that is too long


def compare_pair(pair: Pair, rules: PairRules, advance: Callable[[Pairing], None] = lambda _: None) -> Pairing:
    """Measure rounds until the slowdown is known well enough, or time or rounds are used up.

    A worker may fail once, for want of memory at that moment or by a stray signal: its round is measured again. Raises
    SideError for a side that fails twice, in whichever rounds.
    """
    result, start_s = Pairing(), time.perf_counter()
    fewest = result.fewest_rounds = min(boundaries(rules.error), default=MOST_ROUNDS)
    failed_sides: set[int] = set()
    while (rounds := len(result.log_ratios)) < MOST_ROUNDS:
        elapsed_s = time.perf_counter() - start_s
        if rounds >= fewest and elapsed_s >= rules.longest_s:
            break
        if 0 < rounds < fewest and (needs_s := elapsed_s * fewest / rounds) > rules.longest_s * _EXTENSION:
            result.needs_s = needs_s
            break
        try:
            _measure_round(pair, rounds, result)
        except SideError as error:
            if error.side in failed_sides:
                raise SideError(error.side, error.reason, " (its second failure)") from None
            failed_sides.add(error.side)
            result.failures.append(f"the {_SIDES[error.side]} failed: {error.reason}")
            continue
        advance(result)
        if len(result.log_ratios) % EVERY == 0:
            result.slowdown = interval(result.log_ratios, rules.error)
            if result.slowdown.decision(rules.max_slowdown) != "undecided":
                break
    return result


def _measure_round(pair: Pair, number: int, result: Pairing) -> None:
    """Add a round of two fresh processes to ``result``; every second round begins with the candidate."""
    order = (0, 1) if number % 2 == 0 else (1, 0)
    with ExitStack() as stack:
        clients = {
            side: stack.enter_context(closing(Worker(pair[side], pair[side].rules.warmup_max_s + ALLOWANCE_S)))
            for side in order
        }

        def request(side: int, line: str) -> Any:
            clients[side].send(line)
            message = clients[side].receive()
            if isinstance(message, End):
                raise SideError(side, message.reason or "its process ended without a result")
            return message

        # Both open at once, but warm up one after the other: they share the cores.
        ready: dict[int, Ready] = {side: request(side, "warm up") for side in order}
        slowest_ms = max(side.call_ms for side in ready.values())
        slow = slowest_ms > _SLOW_MS
        calls = max(_BLOCK_CALLS, ceil(_BLOCK_S * 1000 / slowest_ms))
        line = f"{_SLOW_UNTIMED_CALLS if slow else _UNTIMED_CALLS} {calls}"
        medians_ms: tuple[list[float], list[float]] = ([], [])
        for turn in range(_SLOW_PAIRS if slow else _PAIRS):
            for side in order if turn % 2 == 0 else order[::-1]:
                medians_ms[side].append(median(request(side, line).times_ms))
    baseline_ms, candidate_ms = medians_ms
    result.log_ratios.append(median(log(b / a) for a, b in zip(baseline_ms, candidate_ms, strict=True)))
    result.baseline_ms.append(median(baseline_ms) / pair[0].repeat)
    # In the baseline's calls, so that a planted slowdown shows.
    result.candidate_ms.append(median(candidate_ms) / pair[0].repeat)
    result.memory.append((ready[0].memory, ready[1].memory))
    result.providers = ready[0].provider, ready[1].provider
    result.unsettled += sum(not side.is_settled for side in ready.values())
