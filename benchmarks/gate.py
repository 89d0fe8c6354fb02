"""How often is `gate` wrong? The same file against itself, and with a planted slowdown.

Nothing is invented: every run measures real calls in fresh processes and judges them as `gate` does,
latency and memory, with its defaults. A slowdown is planted by timing more of the same calls as one: eleven where the
baseline has ten, which is 10% more work, or thirty-four for thirty-three, 3.0%. So it is known, and does not depend
on how a processor takes some other graph.

Every run is one line of FILE.jsonl as soon as it ends; called again, the script goes on behind the last one, so that a
quiet half hour at a time will do. The three cases take turns, in proportion, so that no hour meets one of them alone.
At the start it says how many minutes are left. Exit code 1: all runs are there, and a bar is missed.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any

import typer
from scipy.stats import binomtest

from benchmarks.frame import run_script
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.files import write_json, write_text
from edgeformer.benchmark import gate
from edgeformer.benchmark.gate import GateOptions
from edgeformer.benchmark.gate_result import GateCheck
from edgeformer.benchmark.gate_scores import ArtifactPair
from edgeformer.benchmark.limits import limit_of
from edgeformer.benchmark.paired_run import WARMUP_RULES, Pair, PairJob
from edgeformer.bundle import Bundle
from edgeformer.measurement import conditions
from edgeformer.measurement.artifact import check_artifact, items_of
from edgeformer.run import locate
from edgeformer.runtimes import default_provider, library_versions
from edgeformer.system.host import cpu_name, default_threads, describe_host, now

MOST_ALARMS, LEAST_FOUND, MOST_MEDIAN_S = 0.05, 0.90, 60.0

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """What is planted: calls that the candidate's timed unit has, to the baseline's."""

    name: str
    baseline: int
    candidate: int
    runs: int


def cases_of(same: int, planted: int) -> tuple[Case, Case, Case]:
    """The file against itself, and both slowdowns; so many runs of each."""
    return (
        Case("the same file", 1, 1, same),
        Case("10% planted", 10, 11, planted),
        Case("3% planted", 33, 34, planted),
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


def next_case(runs: Sequence[Run], cases: Sequence[Case]) -> Case | None:
    """The one of which the smallest share is done; None: all are."""
    done = Counter(run["case"] for run in runs)
    open_cases = [case for case in cases if done[case.name] < case.runs]
    return min(open_cases, key=lambda case: done[case.name] / case.runs, default=None)


def seconds_of(case: Case, runs: Sequence[Run], longest_s: float) -> float:
    """Return the mean seconds of a case's runs; ``longest_s`` where there is none yet."""
    case_runs = [run["seconds"] for run in runs if run["case"] == case.name]
    return statistics.mean(case_runs) if case_runs else longest_s


def resumed(path: Path, settings: Mapping[str, Any]) -> list[Run]:
    """The runs of a file so far; it is begun where there is none. A line that a kill cut off is dropped.

    Raises:
        ValueError: it is of other settings, or something else.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, dumps(settings) + "\n")
        return []
    text = path.read_text(encoding="utf-8").rpartition("\n")[0]
    try:
        session, *runs = map(loads, text.splitlines())
    except ValueError:
        raise ValueError(f"{path}: is no file of this script; name a different one") from None
    if other := [name for name in settings if session.get(name) != settings[name]]:
        raise ValueError(f"{path}: its runs are of another {', '.join(other)}; name another file")
    write_text(path, text + "\n")
    return runs


def report(runs: Sequence[Run], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Print every case and every bar; the bars."""
    for case in cases:
        if case_runs := [run for run in runs if run["case"] == case.name]:
            seconds = statistics.median(run["seconds"] for run in case_runs)
            verdicts = dict(Counter(map(result, case_runs)))
            print(f"{case.name}: {len(case_runs)} of {case.runs} runs, median {seconds:.0f} s: {verdicts}")
    if same := [run for run in runs if run["case"] == cases[0].name]:
        faults = Counter(filter(None, map(fault, same)))
        bound = binomtest(faults.total(), len(same), alternative="less").proportion_ci(0.95).high
        print(f"alarms: {dict(faults)}; at most {bound:.1%} of all runs with 95% confidence")
    bars = judged(runs, cases)
    for bar in bars:
        met = {True: "met", False: "MISSED", None: "not enough runs yet"}[bar["met"]]
        figure = f"{bar['value']} of {bar['of']}" if bar["of"] is not None else f"{bar['value']:.1f}"
        print(f"{bar['bar']}: {figure}: {met}")
    return bars


def main(
    bundle: str, runs: Annotated[Path, typer.Option(help="a line per run; goes on there")], minutes: float = math.inf,
    artifact: str = "onnx-int8", seq: int = 64, threads: int = default_threads(), same: int = 200, planted: int = 50,
    longest: float = GateOptions().longest_s, json: Path | None = None,
) -> int:  # fmt: skip
    """Measure a run or bundle; no run begins that would end after ``minutes``.

    Args:
        same: runs of the file against itself.
        planted: runs of each planted slowdown.
        longest: seconds of a run.
    """
    began, subject = time.perf_counter(), locate(bundle, Path("artifacts")).open_bundle()
    options, sources = GateOptions(), sorted(Path(gate.__file__).parent.glob("*.py"))
    settings = {  # what must be equal for runs to be one measurement, down to the gate's own source
        "run": subject.manifest.run, "artifact": artifact, "sha256": subject.artifact(artifact).sha256, "seq": seq,
        "threads": threads, "max_slowdown": limit_of(options.limits, "latency"), "error": options.error,
        "longest_s": longest,
        "processor": cpu_name(), "versions": library_versions(),
        "gate": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest(),
    }  # fmt: skip
    cases = cases_of(same, planted)
    try:
        done = resumed(runs, settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    open_runs = {case: max(0, case.runs - sum(run["case"] == case.name for run in done)) for case in cases}
    left_s = sum(count * seconds_of(case, done, longest) for case, count in open_runs.items())
    print(f"{len(done)} runs are there; at most about {left_s / 60:.0f} minutes are left", flush=True)
    while (case := next_case(done, cases)) is not None:
        if time.perf_counter() - began + seconds_of(case, done, longest) > minutes * 60:
            print("the minutes are used up; call it again to go on")
            break
        run = measured(subject, settings, case)
        done.append(run)
        with runs.open("a", encoding="utf-8") as file:
            file.write(dumps(run) + "\n")
        print(f"{len(done)}, {case.name}: {result(run)}, {run['seconds']:.0f} s", flush=True)
    bars = report(done, cases)
    if json is not None:
        write_json(json, {"created": now(), "host": describe_host(), "settings": settings, "bars": bars, "runs": done})
    return 1 if any(bar["met"] is False for bar in bars) else 0


if __name__ == "__main__":
    run_script(main)
