"""A study whose runs take a second or two, as a file; and results of runs that nobody trained."""

from pathlib import Path
from typing import Any

import yaml

from benchmarks.studies.jobs import Job
from benchmarks.studies.results import ExportedSize, Outcome, StudyRow, StudyRun, StudyTimes
from benchmarks.studies.specification import Study
from benchmarks.studies.table import rows_of
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.scores import Evaluation, EvaluationRow
from edgeformer.models import load_recipe

TINY = {
    "data.parts.train.0.rows": 400, "training.epochs": 2, "training.precision": "fp32", "training.log_every": 1,
    "training.batch_size": 32, "model.hidden_size": 16, "model.heads": 2, "model.ffn_size": 32,
    "model.vocab_size": 300,
}  # fmt: skip
"""The quickstart recipe on synthetic reviews, as small as it gets."""
SUMMARY = DataSummary(split="given", synthetic=False, rows={"train": 30, "validation": 4}, fingerprint="f")


def run(label: str, seeds: tuple[int, ...] = (1,), **changes: Any) -> dict[str, Any]:
    """A row of the study. ``changes``: ``model__iterations=3`` is the recipe's model.iterations."""
    subset = {key.replace("__", "."): value for key, value in changes.items()}
    return {"label": label, "recipe": "quickstart", "set": {**TINY, **subset}, "seeds": [*seeds]}


def study(name: str, runs: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    table = {"rows": "tests", "columns": ["parameters", "accuracy", "loss"], **more.pop("table", {})}
    text = {"title": f"The study {name}", "element": "no table of a paper", "protocol": "Two epochs."}
    return {"name": name, **text, "runs": runs, "table": table, **more}


def write(folder: Path, content: dict[str, Any]) -> str:
    path = folder / f"{content['name']}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(path)


def results_of(key: str, **changes: Any) -> StudyRun:
    facts: dict[str, Any] = {
        "key": key, "recipe_sha256": "r", "revision": 1, "task": "classification", "recipe": {}, "run": f"run-{key}",
        "data": SUMMARY, "parameters": 2**20, "loops": 8, "steps": 10, "epochs": 2, "best_epoch": 1, "seconds": 90.0,
        "precision": "fp32", "evaluation": Evaluation(), "versions": {}, "code_version": "0",
        "host": {"cpu": "a processor", "cores": 2}, "started": "now", "finished": "then", "origin": "results in hand",
    }  # fmt: skip
    return StudyRun(**{**facts, **changes})


def scores(artifact: str, split: str, **figures: Any) -> EvaluationRow:
    return EvaluationRow(artifact=artifact, split=split, n=4, **{"loss": 1.0, **figures})


def graph(precision: str, **changes: Any) -> ExportedSize:
    facts = {"id": f"onnx-{precision}", "precision": precision, "role": "full", "exit": None, "status": "built"}
    return ExportedSize(**{**facts, "size_bytes": 1000, **changes})


def job_of(study: Study, row: str, **changes: Any) -> Job:
    recipe, spec = load_recipe("quickstart"), study.runs[row].model_copy(update=changes)
    return Job(row, 1, spec, recipe, recipe, "r", SUMMARY)


def table_of(
    table: dict[str, Any], results: dict[str, list[StudyRun]], times: StudyTimes | None = None
) -> tuple[Study, tuple[StudyRow, ...]]:
    content = study("made", {name: run(name.title()) for name in results}, table=table)
    specification = Study.model_validate(content, strict=False)
    outcomes = [Outcome(job_of(specification, name), item) for name, runs in results.items() for item in runs]
    return specification, rows_of(specification, outcomes, times)
