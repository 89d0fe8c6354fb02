"""The two fastest candidates of a search, measured in turns where their own times cannot tell them apart.

A candidate's time is the median of a process, and of a second one right behind it; that of the next candidate was taken
minutes later. What `gate` would call no different, or the other way round, is not picked by such times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Candidate, Comparison, Search
from edgeformer.benchmark.gate import RULES
from edgeformer.benchmark.messages import CheckedArtifact, MeasureSpec
from edgeformer.benchmark.paired_run import PairRules, SideError, compare_pair
from edgeformer.benchmark.paired_worker import PaceSpec
from edgeformer.benchmark.request import Request
from edgeformer.benchmark.search import CLOSE, NOISE, Choice, Option, choose, pool_of
from edgeformer.benchmark.verdict import Quantity
from edgeformer.bundle import Bundle

_LONGEST_S, _ROWS = 60.0, 20
"""No new round begins later, nor after so many times what a row takes at least: a quick look stays one."""


@dataclass(frozen=True)
class Grounds:
    """What candidates are opened from. ``gpu_uuid``: of the one card that they see."""

    bundle: Bundle
    request: Request
    gpu_uuid: str | None
    progress: Progress


def rivals(found: Search) -> tuple[int, int] | None:
    """The two fastest that may be picked, by position; None: one is clearly faster, or was not measured here.

    Args:
        found: a search for the least latency.
    """
    known = [
        (candidate.latency_ms, position)
        for position in pool_of(found.candidates)
        if (candidate := found.candidates[position]).latency_status == "measured" and candidate.latency_ms is not None
    ]
    if found.minimize != "latency" or found.basis == "estimated" or len(known) < 2:
        return None
    (least, first), (following, second) = sorted(known)[:2]
    return (first, second) if following <= least * (1 + CLOSE) else None


def settle(found: Search, choice: Choice, grounds: Grounds) -> Search:
    """The search, its pick decided by measuring the two fastest in turns; as it is where that is not needed.

    Args:
        found: without such a comparison.
        choice: what was asked for.
        grounds: what the candidates are of.
    """
    pair = rivals(found)
    if pair is None:
        return found
    first, second = (found.candidates[position] for position in pair)
    rules = PairRules(longest_s=min(_LONGEST_S, _ROWS * grounds.request.rules.min_s), most=2 * NOISE)
    try:
        with bar(grounds.progress, f"comparing {first.artifact} with {second.artifact}", None, "round"):
            known = compare_pair(
                (_spec(first, found, grounds), _spec(second, found, grounds)),
                rules,
                lambda _: grounds.progress.advance(1),
            )
    except SideError as error:
        grounds.progress.message(f"not compared in turns: {error}")
        return found
    compared = Comparison(
        first=pair[0],
        second=pair[1],
        found=known.known.change(rules.most),
        change=known.known.middle,
        rounds=len(known.log_ratios),
        **known.known.ends,
    )
    pick, reason = choose(_options(found.candidates), choice, found.basis, compared)
    return found.model_copy(update={"pick": pick, "reason": reason, "compared": compared})


def _options(candidates: Sequence[Candidate]) -> list[Option]:
    """The candidates with what is known of their time, as the search had them."""
    return [
        Option(one, Quantity(one.latency_ms, one.latency_status, "", one.low_ms, one.high_ms)) for one in candidates
    ]


def _spec(candidate: Candidate, found: Search, grounds: Grounds) -> PaceSpec:
    """How a candidate is opened: at the shape at which all are ranked."""
    request, artifact = grounds.request, grounds.bundle.artifact(candidate.artifact)
    threads = candidate.threads or request.threads[0]
    at = request.limits.ranked
    measure = MeasureSpec(
        checked=CheckedArtifact.of(grounds.bundle, artifact),
        provider=candidate.provider,
        threads=threads,
        shapes=((at.batch, at.seq),),
        rules=replace(request.rules, warmup_max_s=min(request.rules.warmup_max_s, RULES.warmup_max_s)),
        gpu_uuid=grounds.gpu_uuid,
    )
    phase = "steady" if artifact.role in ("full", "exit") else request.limits.phase
    return PaceSpec(threads=threads, gpu_uuid=grounds.gpu_uuid, item=(phase, at.batch, at.seq), measure=measure)
