"""How often is `gate` wrong? The same file against itself, and with a planted slowdown.

python -m benchmarks.gate BUNDLE --runs FILE.jsonl [--minutes 30] [--artifact onnx-int8] [--seq 64] [--same 200]
                          [--planted 50] [--json FILE]

Nothing is invented: every run measures real calls in fresh processes and judges them as `gate` does,
latency and memory, with its defaults. A slowdown is planted by timing more of the same calls as one: eleven where the
baseline has ten, which is 10% more work, or thirty-four for thirty-three, 3.0%. So it is known, and does not depend
on how a processor takes some other graph.

Every run is one line of FILE.jsonl as soon as it ends; called again, the script goes on behind the last one, so that a
quiet half hour at a time will do. The three cases take turns, in proportion, so that no hour meets one of them alone.
At the start it says how many minutes are left. Exit code 1: all runs are there, and a bar is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.benchmark import gate
from edgeformer.benchmark.gate import GateOptions
from edgeformer.benchmark.gate_result import GateCheck
from edgeformer.benchmark.gate_scores import ArtifactPair
from edgeformer.benchmark.limits import limit_of
from edgeformer.benchmark.paired_run import WARMUP_RULES, Pair, PairJob, PairRules, compare_pair
from edgeformer.bundle import Bundle
from edgeformer.measurement import conditions
from edgeformer.measurement.artifact import check_artifact, items_of
from edgeformer.run import locate
from edgeformer.runtimes import default_provider, library_versions
from edgeformer.system.host import cpu_name, default_threads, describe_host, now

MOST_ALARMS, LEAST_FOUND, MOST_MEDIAN_S = 0.05, 0.90, 60.0
_ENOUGH = 3
"""Runs of a case after which their own mean says how long the others will take."""

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """What is planted: calls that the candidate's timed unit has, to the baseline's. ``rounds``: that it needs."""

    name: str
    baseline: int
    candidate: int
    runs: int
    rounds: int

    @property
    def slowdown(self) -> float:
        """That is planted."""
        return self.candidate / self.baseline - 1


def cases_of(same: int, planted: int) -> tuple[Case, Case, Case]:
    """The file against itself, and both slowdowns; so many runs of each."""
    return (
        Case("the same file", 1, 1, same, 12),
        Case("10% planted", 10, 11, planted, 10),
        Case("3% planted", 33, 34, planted, 40),
    )


def pair_of(bundle: Bundle, settings: Mapping[str, Any], case: Case) -> Pair:
    """The same file twice."""
    entry = bundle.artifact(settings["artifact"])
    checked, shape, threads = check_artifact(bundle, entry), (1, settings["seq"]), settings["threads"]
    first, second = (
        PairJob(
            files=checked, provider=default_provider("cpu"), threads=threads,
            items=items_of(entry, bundle.task, [shape])[:1], rules=WARMUP_RULES, repeat=repeat,
        )
        for repeat in (case.baseline, case.candidate)
    )  # fmt: skip
    return first, second


def measured(bundle: Bundle, settings: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """One run. A run that ends without checks counts, with its ``error``."""
    entry, began = bundle.artifact(settings["artifact"]), time.perf_counter()
    load = conditions.describe(settings["threads"], None).get("load_average_1min")
    record: dict[str, Any] = {"case": case.name, "created": now(), "load_average_1min": load}
    try:
        options = GateOptions(longest_s=settings["longest_s"])
        checks = gate.timed_checks(ArtifactPair(entry, entry), pair_of(bundle, settings, case), options, options.error)
        record["checks"] = [check.model_dump(mode="json") for check in checks]
    except EdgeformerError as error:
        record["error"] = str(error)
    return {**record, "seconds": round(time.perf_counter() - began, 2)}


def latency_of(run: Run) -> GateCheck | None:
    """What was found of the time; None: the run ended without."""
    checks = [GateCheck.model_validate(check, strict=False) for check in run.get("checks", ())]
    return next((check for check in checks if check.name == "latency" and check.rounds), None)


def fault(run: Run) -> str | None:
    """What is wrong with a run of the same file: an alarm, or that it was not measured; None: nothing."""
    latency = latency_of(run)
    if latency is None:
        return "error"
    failed = [check["name"] for check in run["checks"] if check["status"] == "fail"]
    if failed:
        return f"{failed[0]} fails"
    return latency.found if latency.found in ("slower", "faster") else None


def result(run: Run) -> str:
    """In words: ``pass, no different``."""
    latency = latency_of(run)
    return "error" if latency is None else f"{latency.status}, {latency.found}"


def judged(runs: Sequence[Run], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Every bar, with its figure. ``met``: None as long as runs are missing."""
    same, large, small = ([run for run in runs if run["case"] == case.name] for case in cases)
    alarms = sum(fault(run) is not None for run in same)
    results = sum((latency := latency_of(run)) is not None and latency.status == "fail" for run in large)
    outcomes = [result(run) for run in small]
    faster = sum(outcome.endswith("faster") for outcome in outcomes)
    detected = sum(outcome.startswith("undecided") or outcome.endswith("slower") for outcome in outcomes)
    median_s = statistics.median(run["seconds"] for run in same) if same else 0.0
    complete = [
        case.runs <= len(case_runs) and bool(case_runs)
        for case, case_runs in zip(cases, (same, large, small), strict=True)
    ]
    bars = (
        (f"alarms and errors of the same file, at most {MOST_ALARMS:.0%}", alarms, len(same),
         alarms <= MOST_ALARMS * len(same), complete[0]),
        (f"10% found, at least {LEAST_FOUND:.0%}", results, len(large),
         results >= LEAST_FOUND * len(large), complete[1]),
        ("3% undecided or found", detected, len(small), detected == len(small), complete[2]),
        ("3% called faster, never", faster, len(small), faster == 0, complete[2]),
        # A planted slowdown costs ten calls where the model itself costs one, so its runs say nothing of the time.
        (f"median seconds of the same file, below {MOST_MEDIAN_S:.0f}", median_s, None, median_s < MOST_MEDIAN_S,
         complete[0]),
    )  # fmt: skip
    return [
        {"bar": bar, "value": value, "of": of, "met": holds if present else None}
        for bar, value, of, holds, present in bars
    ]


def upper_bound(hits: int, runs: int) -> float:
    """The one-sided 95% bound on a share of which ``hits`` of ``runs`` were seen (Clopper and Pearson)."""
    low, high = hits / runs, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        at_most = sum(math.comb(runs, k) * middle**k * (1 - middle) ** (runs - k) for k in range(hits + 1))
        low, high = (middle, high) if at_most > 0.05 else (low, middle)
    return high


def next_case(runs: Sequence[Run], cases: Sequence[Case]) -> Case | None:
    """The one of which the smallest share is done; None: all are."""
    done = Counter(run["case"] for run in runs)
    open_cases = [case for case in cases if done[case.name] < case.runs]
    return min(open_cases, key=lambda case: done[case.name] / case.runs, default=None)


def seconds_of(case: Case, runs: Sequence[Run], rounds_s: Mapping[str, float]) -> float:
    """That a run of a case is expected to take; ``rounds_s``: case → seconds of one round, where too few runs tell."""
    case_runs = [run["seconds"] for run in runs if run["case"] == case.name]
    return statistics.mean(case_runs) if len(case_runs) >= _ENOUGH else case.rounds * rounds_s[case.name]


def minutes_left(runs: Sequence[Run], cases: Sequence[Case], rounds_s: Mapping[str, float]) -> float:
    """Of all runs that are missing."""
    done = Counter(run["case"] for run in runs)
    open_cases = {case: case.runs - done[case.name] for case in cases if case.runs > done[case.name]}
    return sum(count * seconds_of(case, runs, rounds_s) for case, count in open_cases.items()) / 60


def one_round_s(
    bundle: Bundle, settings: Mapping[str, Any], cases: Sequence[Case], runs: Sequence[Run]
) -> dict[str, float]:
    """Seconds of one round, which is thrown away, of each case that has runs to come and too few to go by."""
    done, results = Counter(run["case"] for run in runs), {}
    for case in cases:
        if done[case.name] < min(_ENOUGH, case.runs):  # else its own runs tell, or there are none to come
            began = time.perf_counter()
            compare_pair(pair_of(bundle, settings, case), PairRules(longest_s=0.001))
            results[case.name] = min(time.perf_counter() - began, settings["longest_s"] / case.rounds)
    return results


def settings_of(bundle: Bundle, arguments: argparse.Namespace) -> dict[str, Any]:
    """What must be equal for runs to be one measurement, down to the gate's own source."""
    options, sources = GateOptions(), sorted(Path(gate.__file__).parent.glob("*.py"))
    return {
        "run": bundle.manifest.run,
        "artifact": arguments.artifact,
        "sha256": bundle.artifact(arguments.artifact).sha256,
        "seq": arguments.seq,
        "threads": arguments.threads,
        "max_slowdown": limit_of(options.limits, "latency"),
        "error": options.error,
        "longest_s": arguments.longest,
        "processor": cpu_name(),
        "versions": library_versions(),
        "gate": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest(),
    }


def resumed(path: Path, settings: Mapping[str, Any]) -> list[Run]:
    """The runs of a file so far; it is begun where there is none. A line that a kill cut off is dropped.

    Raises:
        ValueError: it is of other settings, or something else.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(settings) + "\n")
        return []
    text = path.read_text(encoding="utf-8").rpartition("\n")[0]
    try:
        session, *runs = map(json.loads, text.splitlines())
    except ValueError:
        raise ValueError(f"{path}: is no file of this script; name a different one") from None
    if other := [name for name in settings if session.get(name) != settings[name]]:
        raise ValueError(f"{path}: its runs are of another {', '.join(other)}; name another file")
    write_text(path, text + "\n")
    return runs


def report(runs: Sequence[Run], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Print every case and every bar; the bars."""
    for case in cases:
        case_runs = [run for run in runs if run["case"] == case.name]
        if not case_runs:
            continue
        seconds = statistics.median(run["seconds"] for run in case_runs)
        verdicts = dict(Counter(map(result, case_runs)))
        print(f"{case.name}: {len(case_runs)} of {case.runs} runs, median {seconds:.0f} s: {verdicts}")
    same = [run for run in runs if run["case"] == cases[0].name]
    if same:
        faults = Counter(filter(None, map(fault, same)))
        bound = upper_bound(faults.total(), len(same))
        print(f"alarms: {dict(faults)}; at most {bound:.1%} of all runs with 95% confidence")
    bars = judged(runs, cases)
    for bar in bars:
        met = {True: "met", False: "MISSED", None: "not enough runs yet"}[bar["met"]]
        figure = f"{bar['value']} of {bar['of']}" if bar["of"] is not None else f"{bar['value']:.1f}"
        print(f"{bar['bar']}: {figure}: {met}")
    return bars


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="a run or a bundle")
    parser.add_argument("--runs", type=Path, required=True, metavar="FILE.jsonl", help="a line per run; goes on there")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no run begins that would end later")
    parser.add_argument("--artifact", default="onnx-int8")
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--same", type=int, default=200, help="runs of the file against itself")
    parser.add_argument("--planted", type=int, default=50, help="runs of each planted slowdown")
    parser.add_argument("--longest", type=float, default=GateOptions().longest_s, help="seconds of a run")
    parser.add_argument("--json", type=Path, help="write the settings, all runs and the bars")
    arguments = parser.parse_args(words)
    began, bundle = time.perf_counter(), locate(arguments.bundle, Path("artifacts")).open_bundle()
    settings, cases = settings_of(bundle, arguments), cases_of(arguments.same, arguments.planted)
    try:
        runs = resumed(arguments.runs, settings)
    except ValueError as error:
        parser.error(str(error))
    rounds_s = one_round_s(bundle, settings, cases, runs)
    open_cases = minutes_left(runs, cases, rounds_s)
    print(f"{len(runs)} runs are there; about {open_cases:.0f} minutes are left", flush=True)
    while (case := next_case(runs, cases)) is not None:
        if time.perf_counter() - began + seconds_of(case, runs, rounds_s) > arguments.minutes * 60:
            print("the minutes are used up; call it again to go on")
            break
        run = measured(bundle, settings, case)
        runs.append(run)
        with arguments.runs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
        print(f"{len(runs)}, {case.name}: {result(run)}, {run['seconds']:.0f} s", flush=True)
    bars = report(runs, cases)
    if arguments.json is not None:
        document: dict[str, Any] = {"created": now(), "host": describe_host(), "settings": settings}
        document |= {"bars": bars, "runs": runs}
        write_json(arguments.json, document)
    return 1 if any(bar["met"] is False for bar in bars) else 0


if __name__ == "__main__":
    sys.exit(main())
