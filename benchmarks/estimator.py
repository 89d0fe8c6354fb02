"""How far are estimated times from measured ones, for models that the estimator has never seen?

Makes models of several families with random weights, and times each in FP32 and INT8, at several shapes and numbers of
threads, beside a reference probe (the machine's speed at that moment): in sweeps over everything, each time by a fresh
process, in two passes with a pause between them, so that the same case comes again half an hour later. Then each model
is left out once, and estimated by what the others taught. Nothing else may use the processor meanwhile.

Usage: python -m benchmarks.estimator --json benchmarks/results/MACHINE/DATE-estimator.json
           [--work artifacts/estimator] [--threads 1,2] [--foreign DIR] [--only NAME,…] [--pause 5] [--dry-run]
           [--one-pass]

What is measured is kept in --work; the same command goes on where it stopped. --foreign: a folder in which the wheels
of magika and rapidocr-onnxruntime were unpacked, whose ONNX files are then cases, too. --dry-run: only says what would
be measured, and how long it will take. `python -m benchmarks.estimates` makes docs/estimator.md of the newest record.
Exit code 1 when the record misses what is wanted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.estimates.measuring import PASSES, Plan
from benchmarks.estimates.models import foreign_models, own_models
from benchmarks.estimates.record import Row, enough, rows_of, speeds, summary, without_kind
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.files import write_json
from edgeformer.runtimes import library_versions
from edgeformer.system.host import code_version, describe_host, now


def told(text: str) -> None:
    """Progress, beside the result."""
    print(text, file=sys.stderr, flush=True)


def measure(plan: Plan) -> None:
    """Everything that is not there yet."""
    for threads in plan.threads:
        plan.probed(threads)
    for sweep, one in plan.measure():
        refused = f", {len(one.refused)} refused" if one.refused else ""
        what = f"{one.model} {one.artifact.id}, {one.threads} threads: {len(one.items)} cases{refused}"
        told(f"sweep {sweep + 1} of {len(plan.sweeps)}: {what}; about {plan.minutes():.0f} minutes left")


def record(plan: Plan) -> Row:
    """What docs/estimator.md is made of."""
    models, rows = {model.name: model for model in plan.models}, list[Row]()
    seen: Row = {}
    for threads in plan.threads:
        timed = plan.timed(threads)
        rows += rows_of(load_profile("host"), threads, plan.probed(threads), timed, models, told)
        seen[str(threads)] = speeds(timed)
    checked, doubted = ([row for row in rows if bool(row["doubts"]) is doubts] for doubts in (False, True))
    whole, disturbed = summary(checked), plan.disturbed()
    whole["enough"] = enough(checked, plan.passes, disturbed)
    whole["wanted"]["enough"] = all(whole["enough"].values())
    return {
        "format": "left-out-models", "measured": now(), "code_version": code_version(), "host": describe_host(),
        "versions": library_versions(), "speeds": seen, "disturbed": disturbed, "summary": whole,
        "doubted": summary(doubted) if doubted else None, "missing": plan.missing(),
        "without_kind": summary(without_kind(checked)) if without_kind(checked) else None,
        "families": _groups(checked, "family"), "precisions": _groups(checked, "precision"), "cases": rows,
    }  # fmt: skip


def _groups(rows: Sequence[Row], key: str) -> Row:
    names = dict.fromkeys(row[key] for row in rows)
    return {name: summary([row for row in rows if row[key] == name]) for name in names}


def met(found: Row) -> bool:
    """Whether everything that is wanted is met, also by cases with operators that were never checked before."""
    return all(all(part["wanted"].values()) for part in (found["summary"], found["doubted"]) if part is not None)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/estimator"))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--foreign", type=Path)
    parser.add_argument("--only", help="names of models, with commas between them")
    parser.add_argument("--pause", type=float, default=5.0, help="minutes between the two passes")
    parser.add_argument("--one-pass", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    models = [*own_models(), *(foreign_models(asked.foreign) if asked.foreign else [])]
    chosen = [model for model in models if asked.only is None or model.name in asked.only.split(",")]
    threads = tuple(map(int, asked.threads.split(",")))
    plan = Plan(asked.work.resolve(), chosen, threads, 1 if asked.one_pass else PASSES, 60 * asked.pause)
    told(f"about {plan.minutes():.0f} minutes")
    if asked.dry_run:
        print("\n".join(plan.listed()))
        return 0
    measure(plan)
    found = record(plan)
    print(json.dumps(found["summary"], indent=2))
    if asked.json is not None:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.json, found)
    return 0 if met(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
