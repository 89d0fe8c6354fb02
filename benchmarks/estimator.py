"""How far are estimated times from measured ones, for models that the estimator was not fitted on?

Makes models of several families with random weights, and times each in FP32 and INT8, at several shapes and numbers of
threads, in sweeps over everything, each time by a fresh process. Then each model is left out once and estimated by a
fit to the others. Nothing else may use the processor meanwhile.

Measurements are kept in --work; the same command continues where it stopped. --foreign: a folder with the unpacked
wheels of magika and rapidocr-onnxruntime, whose ONNX files are then cases, too. `python -m benchmarks.estimates` makes
docs/results/estimates.md of the newest record. Exit code 1 when the record misses a target.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.estimates.measuring import Plan
from benchmarks.estimates.models import foreign_models, own_models
from benchmarks.estimates.record import Row, enough, rows_of, summary, without_kind
from benchmarks.frame import run_script, stamp
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.files import as_json, write_json
from edgeformer.estimate.calibrate import SWEEPS


def say(text: str) -> None:
    """Print progress beside the result."""
    print(text, file=sys.stderr, flush=True)


def record(plan: Plan) -> Row:
    """Return the content of the record."""
    models, rows = {model.name: model for model in plan.models}, list[Row]()
    for threads in plan.threads:
        rows += rows_of(load_profile("host"), threads, plan.rates(threads), plan.timed(threads), models, say)
    checked, doubted = ([row for row in rows if bool(row["doubts"]) is doubts] for doubts in (False, True))
    figures, disturbed = summary(checked), plan.disturbed()
    figures["enough"] = enough(checked, disturbed)
    figures["wanted"]["enough"] = all(figures["enough"].values())
    return {
        "format": "left-out-models", **stamp(), "disturbed": disturbed, "summary": figures,
        "doubted": summary(doubted) if doubted else None, "missing": plan.missing(),
        "without_kind": summary(without_kind(checked)) if without_kind(checked) else None,
        "families": _groups(checked, "family"), "precisions": _groups(checked, "precision"), "cases": rows,
    }  # fmt: skip


def _groups(rows: Sequence[Row], key: str) -> Row:
    names = dict.fromkeys(row[key] for row in rows)
    return {name: summary([row for row in rows if row[key] == name]) for name in names}


def main(
    work: Path = Path("artifacts/estimator"), threads: str = "1,2", foreign: Path | None = None, only: str = "",
    json: Path | None = None,
) -> int:  # fmt: skip
    """Measure, fit and compare; ``only`` names models, with commas between them."""
    models = [*own_models(), *(foreign_models(foreign) if foreign else [])]
    selected = [model for model in models if not only or model.name in only.split(",")]
    plan = Plan(work.resolve(), selected, tuple(map(int, threads.split(","))))
    say(f"about {plan.minutes():.0f} minutes")
    for count in plan.threads:
        plan.rates(count)
    for sweep, stored in plan.measure():
        refused = f", {len(stored.timing.refused)} refused" if stored.timing.refused else ""
        disturbed = f", disturbed: {stored.timing.disturbed}" if stored.timing.disturbed else ""
        cases = f"{stored.model} {stored.artifact.id}, {stored.threads} threads: {len(stored.timing.items)} cases"
        say(f"sweep {sweep + 1} of {SWEEPS}: {cases}{refused}{disturbed}; about {plan.minutes():.0f} minutes left")
    result = record(plan)
    print(as_json(result["summary"]))
    if json is not None:
        write_json(json, result)
    parts = [part for part in (result["summary"], result["doubted"]) if part is not None]
    return 0 if all(all(part["wanted"].values()) for part in parts) else 1


if __name__ == "__main__":
    run_script(main)
