"""How far are estimated times from measured ones, for models that the estimator has never seen?

Makes models of several families with random weights, times each in FP32 and INT8, at several shapes and numbers of
threads, beside a reference probe (the machine's speed at that moment), and the same again half an hour later. Then each
model is left out once, and estimated by what the others taught. Nothing else may use the processor meanwhile.

Usage: python -m benchmarks.estimator --json benchmarks/results/MACHINE/DATE-estimator.json
           [--work artifacts/estimator] [--threads 1,2] [--foreign DIR] [--only NAME,…] [--pause 30] [--minutes]
           [--one-pass] [--processor-time]

What is measured is kept in --work; the same command goes on where it stopped. --foreign: a folder in which the wheels
of magika and rapidocr-onnxruntime were unpacked, whose ONNX files are then cases, too. --minutes: only says how long it
will take. --processor-time: a trial on a busy machine, one thread, no result to keep. `python -m benchmarks.estimates`
makes docs/estimator.md of the newest record. Exit code 1 when the record misses what is wanted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.estimates.measuring import Plan, wait_until_old
from benchmarks.estimates.models import foreign_models, own_models
from benchmarks.estimates.record import rows_of, speeds, summary
from edgeformer.backends import library_versions
from edgeformer.formats.documents import load_profile
from edgeformer.formats.files import write_json
from edgeformer.machine.host import code_version, describe_host, now


def told(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


def measure(plan: Plan, passes: int, pause_s: float) -> None:
    """Everything that is not there yet."""
    for threads in plan.threads:
        plan.probed(threads)
    for number in range(1, passes + 1):
        if number > 1:
            wait_until_old(plan.work / f"pass{number - 1}", pause_s)
        for one in plan.measure(number):
            left = plan.minutes(passes, pause_s)
            refused = f", {len(one.refused)} refused" if one.refused else ""
            what = f"{one.model} {one.artifact.id}, {one.threads} threads: {len(one.items)} cases{refused}"
            told(f"pass {number}: {what}; about {left:.0f} minutes left")


def record(plan: Plan) -> dict[str, Any]:
    """What docs/estimator.md is made of."""
    models, rows = {model.name: model for model in plan.models}, list[dict[str, Any]]()
    every = []
    for threads in plan.threads:
        passes = plan.stored(1, threads), plan.stored(2, threads)
        rows += rows_of(load_profile("host"), plan.probed(threads), passes, models, told)
        every += [*passes[0], *passes[1]]
    families = dict.fromkeys(row["family"] for row in rows)
    return {
        "format": "left-out-models", "measured": now(), "code_version": code_version(), "host": describe_host(),
        "versions": library_versions(), "processor_time": plan.processor_time, "speeds": speeds(every),
        "summary": summary(rows),
        "families": {family: summary([row for row in rows if row["family"] == family]) for family in families},
        "precisions": {name: summary([row for row in rows if row["precision"] == name])
                       for name in dict.fromkeys(row["precision"] for row in rows)},
        "cases": rows,
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/estimator"))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--foreign", type=Path)
    parser.add_argument("--only", help="names of models, with commas between them")
    parser.add_argument("--pause", type=float, default=30.0, help="minutes between the two passes")
    parser.add_argument("--one-pass", action="store_true")
    parser.add_argument("--minutes", action="store_true")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    models = [*own_models(), *(foreign_models(asked.foreign) if asked.foreign else [])]
    chosen = [model for model in models if asked.only is None or model.name in asked.only.split(",")]
    threads = tuple(map(int, asked.threads.split(",")))
    if asked.processor_time and threads != (1,):
        parser.error("--processor-time: threads that wait count as work; say --threads 1")
    plan = Plan(asked.work.resolve(), chosen, threads, asked.processor_time)
    passes, pause_s = 1 if asked.one_pass else 2, 60 * asked.pause
    if asked.minutes:
        print(f"about {plan.minutes(passes, pause_s):.0f} minutes")
        return 0
    measure(plan, passes, pause_s)
    found = record(plan)
    print(json.dumps(found["summary"], indent=2))
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.json, found)
    return 0 if all(found["summary"]["wanted"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
