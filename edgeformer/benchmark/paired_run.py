"""A process that holds one artifact open and times blocks of calls whenever it is asked, seen from outside."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import ceil, log
from statistics import median
from typing import IO

from pydantic import ValidationError

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.report import Memory
from edgeformer.benchmark.gate_checks import SidePeak
from edgeformer.benchmark.paired_worker import ANSWERS, Block, PaceSpec, Ready, typical_ms
from edgeformer.benchmark.process import End, child_command, child_environment, last_words, lines_of
from edgeformer.benchmark.sequential import ERROR, EVERY, MOST_ROUNDS, Interval, fewest_rounds, interval

_SILENCE_S = 120.0


class PlayerError(ArtifactError):
    """The process cannot open its artifact, or cannot go on; says why."""


def calls_of_block(call_ms: float, block_s: float, fewest: int) -> int:
    """Calls that take about ``block_s``, but at least ``fewest``; ``call_ms``: of one."""
    return max(fewest, ceil(block_s * 1000 / call_ms))


class Player:
    """A child that answers when it is asked. Each of its answers may be a PlayerError."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], silence_s: float) -> None:
        self._process, self._errors = process, errors
        self._lines = lines_of(process, silence_s)

    def ready(self) -> Ready:
        """Open and warm up."""
        self._ask("warm up")
        answer = self._answer()
        assert isinstance(answer, Ready)
        return answer

    def block(self, calls: int, untimed: int = 2) -> Block:
        """Time so many calls, after some ``untimed`` ones."""
        self._ask(f"{untimed} {calls}")
        answer = self._answer()
        assert isinstance(answer, Block)
        return answer

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a child that died breaks the pipe; what it last said tells more
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _answer(self) -> Ready | Block:
        try:
            line = next(self._lines, None)
            answer = ANSWERS.validate_json(line, strict=False) if line is not None else None
        except queue.Empty:
            raise PlayerError("its process was silent for too long and was ended") from None
        except ValidationError:
            raise PlayerError("its process wrote something else than times") from None
        if answer is None:
            self._process.wait(_SILENCE_S)
            raise PlayerError(f"its process ended early{last_words(self._errors)}")
        if isinstance(answer, End):
            raise PlayerError(answer.reason or "its process ended before it was asked to")
        return answer


@contextmanager
def player(spec: PaceSpec) -> Iterator[Player]:
    """A fresh process for the block's length, told what to open and not yet asked anything."""
    with tempfile.TemporaryFile() as errors, _started(spec, errors) as process:
        yield Player(process, errors, spec.measure.rules.warmup_max_s + _SILENCE_S)


@contextmanager
def _started(spec: PaceSpec, errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        child_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=child_environment(spec),
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(spec.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


# The parent's side: rounds of two fresh processes, measured in turns, until a sequential test is sure.
#
# What is drawn anew in every round is what differs from process to process: where the memory lies, on which cores the
# threads meet. Within a round the two take turns, A B B A, so that a clock that falls or a neighbour that comes and
# goes
# meets both. A round therefore gives one number: the median log ratio of its pairs of blocks.


Pair = tuple[PaceSpec, PaceSpec]
"""Baseline and candidate."""


_RETURN = 2
"""Calls at the start of a block, not timed: the caches are the other process's by then, and the threads sleep."""
_SLOW_MS, _SLOW_PAIRS, _SLOW_RETURN = 100.0, 3, 1
"""Calls that take longer vary less, and what a return costs is a smaller part of them: fewer of both are enough."""
_EXTENDED = 4
_SIDES = ("baseline", "candidate")


class SideError(ArtifactError):
    """One of the two cannot be measured. ``candidate``: it is that one. ``why``: as its process said."""

    def __init__(self, side: int, why: str, again: str = "") -> None:
        super().__init__(f"the {_SIDES[side]} cannot be measured: {why}{again}")
        self.side, self.candidate, self.why = side, side == 1, why


@dataclass(frozen=True)
class PairRules:
    """How a round is measured, and when to give up.

    Attributes:
        pairs: of blocks in a round; odd, so that their median is one of them.
        block_s: about what a block takes; ``block_calls`` are its fewest calls.
        longest_s: no new round begins later than this after the first one, unless too few were measured to say
            anything: then up to four times as late.
        most: the largest slowdown that is allowed; None: measured until the interval is ``error`` narrow or time ends.
        error: the chance that any interval misses.
    """

    pairs: int = 5
    block_s: float = 0.05
    block_calls: int = 3
    longest_s: float = 180.0
    most: float = 0.05
    error: float = ERROR


@dataclass
class Pairing:
    """What the rounds have given, of the baseline and the candidate. Of their ``…_ms``: a round's medians.

    ``stumbles``: what made a round be measured once more, in words. ``needs_s``: that the fewest rounds would take,
    where that is too long to begin.
    """

    log_ratios: list[float] = field(default_factory=list)
    baseline_ms: list[float] = field(default_factory=list)
    candidate_ms: list[float] = field(default_factory=list)
    memory: list[tuple[Memory, Memory]] = field(default_factory=list)
    known: Interval = field(default_factory=lambda: interval([]))
    providers: tuple[str, str] = ("", "")
    unsettled: int = 0
    stumbles: list[str] = field(default_factory=list)
    needs_s: float | None = None

    @property
    def peaks(self) -> tuple[SidePeak, SidePeak]:
        """Over all rounds."""
        first, second = (SidePeak.of([memory[side] for memory in self.memory], self.providers[side]) for side in (0, 1))
        return first, second


def compare_pair(pair: Pair, rules: PairRules, advance: Callable[[Pairing], None] = lambda _: None) -> Pairing:
    """Measure rounds until the slowdown is known well enough, or time or rounds are used up.

    A process that cannot go on may have met a moment without memory, or a signal meant for another one: the round is
    measured once more. A side that fails twice, in whichever rounds, cannot be measured.

    Args:
        pair: baseline and candidate.
        rules: how, and what is enough.
        advance: is told after every round.

    Raises:
        SideError: one of the two cannot be measured.
    """
    found, began, failed, fewest = Pairing(), time.perf_counter(), set[int](), fewest_rounds(rules.error)
    while len(found.log_ratios) < MOST_ROUNDS:
        took_s, rounds = time.perf_counter() - began, len(found.log_ratios)
        if rounds >= fewest and took_s >= rules.longest_s:
            break
        if 0 < rounds < fewest and (needs_s := took_s * fewest / rounds) > rules.longest_s * _EXTENDED:
            found.needs_s = needs_s
            break
        _insist(pair, rules, found, failed)
        advance(found)
        if len(found.log_ratios) % EVERY == 0:
            found.known = interval(found.log_ratios, rules.error)
            if found.known.decision(rules.most) != "undecided":
                break
    return found


def _insist(pair: Pair, rules: PairRules, found: Pairing, failed: set[int]) -> None:
    """A round, measured once more for each side that fails for the first time; ``failed``: those that have."""
    while True:
        try:
            return _round(pair, rules, len(found.log_ratios), found)
        except SideError as error:
            if error.side in failed:
                raise SideError(error.side, error.why, " (its second failure)") from None
            failed.add(error.side)
            found.stumbles.append(f"the {_SIDES[error.side]} failed: {error.why}")


def _round(pair: Pair, rules: PairRules, number: int, found: Pairing) -> None:
    """Two fresh processes; every second round begins with the candidate."""
    with ExitStack() as stack:
        order = (0, 1) if number % 2 == 0 else (1, 0)
        players: dict[int, Player] = {}
        ready: dict[int, Ready] = {}
        for side in order:
            players[side] = stack.enter_context(player(pair[side]))
        for side in order:  # both open at once, but warm up one after the other: they share the cores
            with _named(side):
                ready[side] = players[side].ready()
        slowest_ms = max(one.call_ms for one in ready.values())
        calls = calls_of_block(slowest_ms, rules.block_s, rules.block_calls)
        slow = slowest_ms > _SLOW_MS
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(min(rules.pairs, _SLOW_PAIRS) if slow else rules.pairs):
            for side in order if turn % 2 == 0 else order[::-1]:
                with _named(side):
                    times[side].append(typical_ms(players[side].block(calls, _SLOW_RETURN if slow else _RETURN)))
    baseline, candidate = times
    found.log_ratios.append(median(log(b / a) for a, b in zip(baseline, candidate, strict=True)))
    found.baseline_ms.append(median(baseline) / pair[0].repeat)
    found.candidate_ms.append(median(candidate) / pair[0].repeat)  # in the baseline's calls: what is planted shows
    found.memory.append((ready[0].memory, ready[1].memory))
    found.providers = ready[0].provider, ready[1].provider
    found.unsettled += sum(not one.settled for one in ready.values())


@contextmanager
def _named(side: int) -> Iterator[None]:
    """Tell which of the two it was that could not go on."""
    try:
        yield
    except PlayerError as error:
        raise SideError(side, str(error)) from None
