"""What is found by running both: latency and memory of one artifact at one shape, as checks of the gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median_high

from edgeformer.formats.gate import GateCheck, GateStatus
from edgeformer.stages.profiling.gating.files import ArtifactPair, GateOptions, memory_check
from edgeformer.stages.profiling.gating.pair import Pair, Pairing, PairRules, SideError, compare_pair
from edgeformer.stages.profiling.gating.sequential import MOST_ROUNDS, fewest_rounds
from edgeformer.stages.profiling.measure import MeasureRules

RULES = replace(MeasureRules(), warmup_max_s=1.5)
"""As for any row; but a process that does not settle goes on, for the other one meets the same machine."""


def timed_checks(
    both: ArtifactPair,
    pair: Pair,
    options: GateOptions,
    error: float,
    advance: Callable[[Pairing], None] = lambda _: None,
) -> list[GateCheck]:
    """Measure both in turns.

    Args:
        both: the artifact, which the checks name.
        pair: how baseline and candidate are opened.
        options: what the candidate may be worse by, and how long to measure.
        error: the chance that an interval of this pair misses.
        advance: is told after every round.

    Returns:
        Latency and memory; of what cannot be measured latency alone. They name no shape.
    """
    rules = PairRules(longest_s=options.longest_s, most=options.max_slowdown, error=error)
    try:
        found = compare_pair(pair, rules, advance)
    except SideError as problem:
        # A candidate that does not run is worse than any; without a baseline there is nothing to compare with.
        status: GateStatus = "fail" if problem.candidate else "undecided"
        return [GateCheck(name="latency", artifact=both.candidate.id, status=status, reason=str(problem))]
    checks = [_latency(found, both, rules)]
    if options.max_memory_growth is not None:
        checks.append(memory_check(both, options.max_memory_growth, found.peaks))
    return checks


def _latency(found: Pairing, both: ArtifactPair, rules: PairRules) -> GateCheck:
    known, rounds = found.known, len(found.log_ratios)
    decision = known.decision(rules.most)
    reason = f"{rounds} rounds of two fresh processes"
    if found.needs_s is not None:
        reason = (
            f"{fewest_rounds(rules.error)} rounds are the fewest that say anything, and would take about "
            f"{found.needs_s / 60:.0f} minutes, as the first {rounds} did; compare at a shorter text or a smaller batch"
        )
    elif decision == "undecided":
        room = "all that are ever made" if rounds >= MOST_ROUNDS else f"what {rules.longest_s:.0f} s have room for"
        room = "the fewest that say anything" if rounds <= fewest_rounds(rules.error) else room
        reason += f", which are {room}: the machine is too noisy, or the change too close to what is allowed"
    if found.unsettled:
        reason += f"; {found.unsettled} of {2 * rounds} processes did not settle"
    if found.stumbles:
        reason += f"; measured once more after {', and '.join(found.stumbles)}"
    facts = {"name": "latency", "artifact": both.candidate.id, "status": decision, "unit": "ms", "limit": rules.most}
    facts |= {"found": known.change(rules.most), "change": known.middle, "rounds": rounds, "reason": reason}
    facts |= {"baseline": _typical(found.baseline_ms), "candidate": _typical(found.candidate_ms)}
    return GateCheck.model_validate({**facts, **known.ends, "log_ratios": found.log_ratios}, strict=False)


def _typical(values: Sequence[float]) -> float | None:
    return median_high(values) if values else None
