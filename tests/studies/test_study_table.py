"""The table of given results: exits, exported precisions, thresholds, labels, times in turns, and recommendations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.figures import draw_study
from benchmarks.studies.jobs import Data, Job
from benchmarks.studies.render import study_csv, study_markdown, study_page
from benchmarks.studies.results import ExportedSize, StudyRow, StudyRun, StudyTable, StudyTimes, TimedArtifact
from benchmarks.studies.specification import FigureSpec, Study
from benchmarks.studies.store import Match
from benchmarks.studies.table import Outcome, mixed_formats, mixed_hosts, pick, rows_of
from benchmarks.studies.timing import row_of
from benchmarks.studies.train import missing_steps
from edgeformer.artifacts.manifest import DataSummary
from edgeformer.artifacts.report import Energy, Latency, Memory, Row
from edgeformer.artifacts.scores import EarlyExitRow, Evaluation, EvaluationRow
from edgeformer.models import load_recipe
from edgeformer.tasks.early_exit import Rule
from tests.studies.tiny_study import run, study

HOST = {"cpu": "a processor", "cores": 2}
SUMMARY = DataSummary(split="given", synthetic=False, rows={"train": 30, "validation": 4}, fingerprint="f")


def made(key: str, **changes: Any) -> StudyRun:
    """The results of a run that nobody trained."""
    facts: dict[str, Any] = {
        "key": key, "recipe_sha256": "r", "revision": 1, "alike": "a", "task": "classification", "recipe": {},
        "run": f"run-{key}", "data": SUMMARY, "parameters": 2**20, "loops": 8, "steps": 10, "epochs": 2,
        "planned_steps": 10, "best_epoch": 1, "seconds": 90.0, "rows_per_s": 5.0, "precision": "fp32",
        "evaluation": Evaluation(), "versions": {}, "code_version": "0", "host": HOST, "started": "now",
        "finished": "then",
    }  # fmt: skip
    return StudyRun(**{**facts, **changes})


def row(artifact: str, split: str, **figures: Any) -> EvaluationRow:
    return EvaluationRow(artifact=artifact, split=split, n=4, **{"loss": 1.0, **figures})


def graph(precision: str, **changes: Any) -> ExportedSize:
    facts = {"id": f"onnx-{precision}", "precision": precision, "role": "full", "exit": None, "status": "built"}
    return ExportedSize(**{**facts, "size_bytes": 1000, **changes})


def table_of(
    table: dict[str, Any], results: dict[str, list[StudyRun]], times: StudyTimes | None = None
) -> tuple[Study, tuple[StudyRow, ...]]:
    """The study, and the lines of its table, of given results."""
    written = study("made", {name: run(name.title()) for name in results}, table=table)
    figures = Study.model_validate(written, strict=False)
    outcomes = [
        Outcome(job_of(figures, name), Match(item, "results in hand"))
        for name, runs in results.items()
        for item in runs
    ]
    return figures, rows_of(figures, outcomes, times)


def job_of(found: Study, name: str) -> Job:
    recipe = load_recipe("quickstart")
    return Job(name, 1, found.runs[name], recipe, recipe, "r", Data(SUMMARY), ())


def test_exits_are_measured_against_the_whole_model() -> None:
    rows = [
        row("torch", "validation", loss=2.0),
        *(row("torch", "validation", loss=2.0 + 1 / e, exit=e) for e in (2, 4)),
    ]
    exits = [graph("fp32"), graph("fp32", id="onnx-fp32-exit2", role="exit", exit=2), graph("fp16")]
    item = made("k", evaluation=Evaluation(rows=tuple(rows)), artifacts=tuple(exits))
    entries = [("onnx-fp32", (8.0, 9.0, 10.0)), ("onnx-fp32-exit2", (4.0, 3.0, 2.5))]
    times = StudyTimes(
        key="t", batch=1, seq=8, threads=1, host=HOST, versions={}, code_version="0", started="now", seconds=1.0,
        entries=tuple(
            TimedArtifact(run="k", artifact=name, p50_ms=p50, stable=True, provider="p") for name, p50 in entries
        ),
    )  # fmt: skip
    timing = {"batch": 1, "seq": 8, "rounds": 3, "against": "model/8"}
    columns = ["loss", "loop_ratio", "latency_ms", "speedup"]
    _, lines = table_of({"rows": "exits", "columns": columns, "timing": timing}, {"model": [item]}, times)
    assert [line.at for line in lines] == ["2", "4", "8"]
    early, middle, last = (line.cells for line in lines)
    assert (early["loop_ratio"].mean, last["loop_ratio"].mean, early["loss"].mean) == (4.0, 1.0, 2.5)
    assert (early["speedup"].mean, early["speedup"].low, early["speedup"].high) == (3.0, 2.0, 4.0)
    assert (early["latency_ms"].mean, last["speedup"].mean) == (3.0, 1.0)
    assert middle["latency_ms"].mean is None and middle["speedup"].mean is None


def test_precisions_and_the_pick_across_runs(tmp_path: Path) -> None:
    def exported(key: str, accuracy: float, size: int) -> StudyRun:
        scores = [row("torch", "test", accuracy=accuracy), row("onnx-fp32", "test", accuracy=accuracy)]
        scores.append(row("onnx-fp16", "test", accuracy=accuracy - 0.001, ms_per_sample=0.5))
        rejected = graph("int8", status="rejected", reason="it loses too much", size_bytes=None)
        artifacts = (graph("fp32", size_bytes=size), graph("fp16", size_bytes=size // 2), rejected)
        return made(key, evaluation=Evaluation(rows=tuple(scores)), artifacts=artifacts)

    choices = [{"title": "Small", "smallest": "size_bytes", "keep": "accuracy", "within": 0.01, "paper": "the other"}]
    printed = [{"run": "wide", "at": "fp16", "source": "Table 0", "values": {"accuracy": 0.8}}]
    spec = {
        "rows": "artifacts",
        "columns": ["size_bytes", "megabytes", "accuracy"],
        "choices": choices,
        "published": printed,
    }
    results, lines = table_of(
        spec, {"wide": [exported("w", 0.9, 4000), exported("x", 0.92, 4000)], "thin": [exported("t", 0.7, 100)]}
    )
    assert [(line.run, line.at) for line in lines][:3] == [("wide", "fp32"), ("wide", "fp16"), ("wide", "int8")]
    half = lines[1].cells
    assert half["accuracy"].mean == pytest.approx(0.909) and half["accuracy"].sd == pytest.approx(0.02 / 2**0.5)
    assert half["megabytes"].mean == 2.0 and half["accuracy"].difference == pytest.approx(0.109)
    assert lines[2].missing == "rejected: it loses too much"
    picked = pick(results.table.choices[0], lines)
    assert picked.row == 1 and "Wide, fp16: bytes 2,000, of 2 whose accuracy is within 0.01" in picked.reason
    table = StudyTable(
        study="made", title="T|itle", element="Table 0", protocol="-", columns=results.table.columns, rows=lines,
        picks=(picked,), minutes=3.0,
    )  # fmt: skip
    page = study_page(table, [])
    assert "0.9090 ± 0.0141" in page and "+0.1090" in page and "it loses too much" in page and "T\\|itle" in page
    assert study_markdown(table).count("\n|") == len(lines) + 1
    assert study_csv(table).splitlines()[2].startswith("wide,fp16,2000.0,0.0")
    look: dict[str, Any] = {"x": "size_bytes", "y": ("accuracy",), "size": "megabytes"}
    kinds: tuple[Any, ...] = ("bubbles", "bars", "lines")
    figures = [FigureSpec(kind=kind, title=kind, **look) for kind in kinds]
    assert draw_study(tmp_path, table, figures, {}) == ["figure1.png", "figure2.png", "figure3.png"]


def test_thresholds_and_the_schedule() -> None:
    def early(threshold: float | None, loops: float, rule: Rule = "confidence") -> EarlyExitRow:
        return EarlyExitRow(
            artifact="torch", split="validation", n=4, threshold=threshold, thresholds={}, mean_loops=loops, loss=1.5,
            perplexity=4.5, share={}, rule=rule,
        )  # fmt: skip

    results = (early(None, 3.2), early(0.85, 4.0), early(0.85, 1.6, "cosine"))
    item = made("k", evaluation=Evaluation(early_exit=results))
    _, lines = table_of({"rows": "thresholds", "columns": ["mean_loops", "loop_ratio"]}, {"model": [item]})
    ratios = [("schedule", 2.5), ("0.85", 2.0), ("cosine 0.85", 5.0)]
    assert [(line.at, line.cells["loop_ratio"].mean) for line in lines] == ratios


def test_the_time_of_another_shape_is_nobodys() -> None:
    def timed(batch: int, seq: int, p50: float | None) -> Row:
        latency = Latency(status="unavailable", reason="none") if p50 is None else Latency(status="measured", p50=p50)
        return Row(
            artifact="onnx-fp32", precision="fp32", provider="p", where="host", phase="steady", batch=batch, seq=seq,
            latency_ms=latency, size_bytes=1,
            memory_bytes=Memory(status="unavailable", reason="none"),
            energy_mj=Energy(status="unavailable", reason="none"),
        )  # fmt: skip

    rows = [timed(1, 64, 0.5), timed(1, 128, 1.0), timed(8, 128, 7.0), timed(2, 128, None)]
    results = row_of(rows, (8, 128))
    assert results is not None and results.latency_ms.p50 == 7.0
    assert row_of(rows, (2, 128)) is None and row_of(rows, (8, 64)) is None


def test_times_of_two_processors_are_not_put_side_by_side() -> None:
    def scored(host: str) -> StudyRun:
        rows = (row("torch", "test"), row("onnx-fp32", "test", ms_per_sample=0.5, host=host))
        return made(f"k-{host}", evaluation=Evaluation(rows=rows), artifacts=(graph("fp32"),))

    spec = {"rows": "tests", "columns": ["loss", "ms_per_sample"]}
    _, lines = table_of(spec, {"here": [scored("this")], "there": [scored("that")]})
    assert [line.cells["ms_per_sample"].mean for line in lines] == [None, None] and lines[0].cells["loss"].mean == 1.0
    assert "this and that" in mixed_hosts([scored("this"), scored("that")])
    fp32, bf16 = (made("k", precision=precision) for precision in ("fp32", "bf16"))
    assert mixed_formats([fp32, fp32]) == "" and "Trained in fp32 and bf16" in mixed_formats([fp32, bf16])
    _, lines = table_of(spec, {"here": [scored("this")], "again": [scored("this")]})
    assert [line.cells["ms_per_sample"].mean for line in lines] == [0.5, 0.5]


def test_what_leaks_is_said_and_never_picked() -> None:
    void, honest = made("v", leaks=True), made("h")
    scored = {key: item.model_copy(update={"evaluation": Evaluation(rows=(row("torch", "test", loss=loss),))})
              for key, item, loss in (("void", void, 0.1), ("honest", honest, 3.0))}  # fmt: skip
    choices = [{"title": "Best", "smallest": "loss"}]
    results, lines = table_of(
        {"rows": "tests", "columns": ["loss"], "choices": choices}, {k: [v] for k, v in scored.items()}
    )
    assert "LEAKS FUTURE TOKENS" in lines[0].remark
    assert pick(results.table.choices[0], lines).row == 1


def test_what_a_finished_run_still_lacks(tmp_path: Path) -> None:
    results, _ = table_of({}, {"model": [made("k")]})
    spec = results.runs["model"].model_copy(update={"export": ("int8",)})
    job = job_of(results, "model")
    job = Job(job.row, 1, spec, job.written, job.recipe, "r", job.data, ())
    scores = Evaluation(rows=(row("torch", "random-split"), row("onnx-fp32", "random-split")))
    item = made("k", evaluation=scores)
    (step,) = missing_steps(job, item, tmp_path, ("test",))
    assert step[:4] == ("export", str(tmp_path), "--int8", "--keep-going")
    item = item.model_copy(update={"artifacts": (graph("fp32"), graph("int8"))})
    (step,) = missing_steps(job, item, tmp_path, ("test",))
    assert step[:4] == ("evaluate", str(tmp_path), "--artifact", "onnx-int8")
    scored = Evaluation(rows=(*scores.rows, row("onnx-int8", "random-split")))
    assert not [*missing_steps(job, item.model_copy(update={"evaluation": scored}), tmp_path, ("test",))]


def test_what_was_asked_for_has_its_line_with_a_reason() -> None:
    """Results of a run that another study, which asked for less, left behind."""
    scores = Evaluation(rows=(row("torch", "test", accuracy=0.9), row("onnx-fp32", "test", accuracy=0.9)))
    item = made("k", evaluation=scores, artifacts=(graph("fp32"), graph("fp16")))
    printed = [
        {"run": "model", "at": place, "source": "Table 0", "values": {"accuracy": 0.8}} for place in ("fp32", "int8")
    ]
    spec = {"rows": "artifacts", "columns": ["size_bytes", "accuracy"], "published": printed}
    written = study("made", {"model": {**run("Model"), "export": ["fp16", "int8"]}}, table=spec)
    results = Study.model_validate(written, strict=False)
    outcome = Outcome(job_of(results, "model"), Match(item, "results in hand"))
    complete, half, whole_numbers = rows_of(results, [outcome], None)
    assert complete.missing is None and complete.cells["accuracy"].mean == 0.9
    assert (half.at, half.missing) == ("fp16", "model, seed 1: fp16 is exported, and not scored")
    assert (whole_numbers.at, whole_numbers.missing) == ("int8", "model, seed 1: its results have no int8")
    assert whole_numbers.cells["accuracy"].published == 0.8 and whole_numbers.cells["accuracy"].mean is None
    alone = Outcome(outcome.job, None, "has no results")
    assert [line.at for line in rows_of(results, [alone], None)] == ["fp32", "fp16", "int8"]


def test_one_run_is_one_seed_however_often_it_is_named() -> None:
    item = made("k", evaluation=Evaluation(rows=(row("torch", "test", accuracy=0.9),)))
    _, (line,) = table_of({"columns": ["accuracy"]}, {"model": [item, item, item]})
    assert (line.keys, line.cells["accuracy"].n, line.cells["accuracy"].sd) == (("k",), 1, None)


def test_a_part_of_a_study_is_marked() -> None:
    complete = StudyTable(study="s", title="T", element="E", protocol="-", columns=("loss",), rows=(), minutes=0.0)
    part = complete.model_copy(update={"only": ("wide",)})
    for render in (study_markdown, lambda table: study_page(table, [])):
        assert "Not the study as it is written: there are only the rows wide" in render(part)
        assert "Not the study" not in render(complete)
