"""How often is the gate of `profile --against` wrong? The same file against itself, and with a planted slowdown.

python benchmarks/gate.py BUNDLE [--artifact onnx-int8] [--seq 64] [--same 200] [--planted 50] [--json FILE]

Nothing is invented: every run measures real calls in fresh processes, as `profile --against` does. A slowdown is
planted by timing more of the same calls as one: eleven where the baseline has ten, which is 10 % more work, or
thirty-four for thirty-three, 3.0 %. So it is known, and does not depend on how a processor takes some other graph.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.backends import default_provider
from edgeformer.bundle import Bundle
from edgeformer.formats.errors import ArtifactError
from edgeformer.formats.files import write_json
from edgeformer.machine.host import default_threads, describe_host, now
from edgeformer.run import locate
from edgeformer.stages.profiling.gating.gate import RULES
from edgeformer.stages.profiling.gating.pacing import PaceSpec
from edgeformer.stages.profiling.gating.pair import PairRules, compare_pair
from edgeformer.stages.profiling.messages import CheckedArtifact, MeasureSpec, phases_of


@dataclass(frozen=True)
class Case:
    """What is planted: calls that the candidate's timed unit has, to the baseline's."""

    name: str
    baseline: int
    candidate: int
    runs: int

    @property
    def slowdown(self) -> float:
        """That is planted."""
        return self.candidate / self.baseline - 1


def pair_of(
    bundle: Bundle, artifact: str, shape: tuple[int, int], threads: int, case: Case
) -> tuple[PaceSpec, PaceSpec]:
    """The same file twice."""
    entry = bundle.artifact(artifact)
    checked, (batch, seq) = CheckedArtifact.of(bundle, entry), shape
    measure = MeasureSpec(
        checked=checked, provider=default_provider("cpu"), threads=threads, shapes=(shape,), rules=RULES
    )
    item = (phases_of(entry, bundle.task)[0], batch, seq)
    first, second = (
        PaceSpec(threads=threads, measure=measure, item=item, repeat=repeat)
        for repeat in (case.baseline, case.candidate)
    )
    return first, second


def run(bundle: Bundle, arguments: argparse.Namespace, case: Case, rules: PairRules) -> list[dict[str, Any]]:
    """All runs of a case, each told as it ends."""
    found = []
    pair = pair_of(bundle, arguments.artifact, (1, arguments.seq), arguments.threads, case)
    for number in range(case.runs):
        began = time.perf_counter()
        try:
            one = compare_pair(pair, rules)
        except ArtifactError as error:
            print(f"{case.name} {number + 1}: {error}", file=sys.stderr)
            continue
        seconds, known = time.perf_counter() - began, one.known
        record = {"decision": known.decision(rules.most), "found": known.change, "seconds": round(seconds, 2)}
        record |= {"rounds": len(one.log_ratios), "log_ratios": [round(ratio, 5) for ratio in one.log_ratios]}
        record |= {"low": round(known.low, 5), "high": round(known.high, 5)} if math.isfinite(known.high) else {}
        found.append({**record, "baseline_ms": round(statistics.median(one.baseline_ms), 4)})
        said = f"{record['decision']}, {known.change}, {known.middle:+.1%} ({known.low:+.1%} to {known.high:+.1%})"
        print(f"{case.name} {number + 1}/{case.runs}: {said}, {record['rounds']} rounds, {seconds:.0f} s", flush=True)
    return found


def upper_bound(hits: int, runs: int) -> float:
    """The one-sided 95 % bound on a share of which ``hits`` of ``runs`` were seen (Clopper and Pearson)."""
    low, high = hits / runs, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        at_most = sum(math.comb(runs, k) * middle**k * (1 - middle) ** (runs - k) for k in range(hits + 1))
        low, high = (middle, high) if at_most > 0.05 else (low, middle)
    return high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="a run or a bundle")
    parser.add_argument("--artifact", default="onnx-int8")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--same", type=int, default=200, help="runs of the file against itself")
    parser.add_argument("--planted", type=int, default=50, help="runs of each planted slowdown")
    parser.add_argument("--longest", type=float, default=120.0, help="seconds of a run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    bundle, rules = locate(arguments.bundle, Path("artifacts")).open_bundle(), PairRules(longest_s=arguments.longest)
    cases = [
        Case("the same file", 1, 1, arguments.same),
        Case("10 % planted", 10, 11, arguments.planted),
        Case("3 % planted", 33, 34, arguments.planted),
    ]
    document: dict[str, Any] = {"created": now(), "host": describe_host(), "run": bundle.manifest.run}
    document |= {"artifact": arguments.artifact, "seq": arguments.seq, "threads": arguments.threads}
    document |= {"max_slowdown": rules.most, "error": rules.error, "cases": []}
    for case in cases:
        found = run(bundle, arguments, case, rules)
        if not found:
            continue
        counts = Counter(f"{one['decision']}, {one['found']}" for one in found)
        seconds = statistics.median(one["seconds"] for one in found)
        summary = {"case": case.name, "slowdown": case.slowdown, "runs": len(found), "counts": dict(counts)}
        document["cases"].append({**summary, "median_seconds": seconds, "found": found})
        alarms = sum(one["decision"] == "fail" for one in found)
        bound = f"; at most {upper_bound(alarms, len(found)):.1%} with 95 % confidence" if not case.slowdown else ""
        print(f"\n{case.name}: {json.dumps(dict(counts))}; failed: {alarms} of {len(found)}{bound}; {seconds:.0f} s\n")
        if arguments.json is not None:
            write_json(arguments.json, document)  # after every case, so that a long run can be stopped
    return 0


if __name__ == "__main__":
    sys.exit(main())
