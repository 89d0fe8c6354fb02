"""The table of given results: exits, precisions, thresholds, times in turns, recommendations, and the finding."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import results
from benchmarks.studies.figures import draw_study
from benchmarks.studies.render import finding_of, study_body, study_page
from benchmarks.studies.results import Cell, Outcome, StudyRow, StudyRun, StudyTable
from benchmarks.studies.specification import FigureSpec, Study
from benchmarks.studies.table import mixed_formats, mixed_hosts, pick, rows_of
from edgeformer.artifacts.errors import RecipeError
from edgeformer.artifacts.scores import Evaluation
from tests.studies.tiny_study import graph, job_of, results_of, run, scores, study, table_of


def test_exits_are_measured_against_the_whole_model() -> None:
    by_exit = [scores("torch", "validation", loss=2.0 + 1 / exit_, exit=exit_) for exit_ in (2, 4)]
    evaluation = Evaluation(rows=(scores("torch", "validation", loss=2.0), *by_exit))
    exits = (graph("fp32"), graph("fp32", id="onnx-fp32-exit2", role="exit", exit=2), graph("fp16"))
    times = results.StudyTimes(
        key="t", batch=1, seq=8, threads=1, host={}, versions={}, code_version="0", started="now", seconds=1.0,
        entries=tuple(
            results.TimedArtifact(run="k", artifact=name, p50_ms=p50, stable=True, provider="p")
            for name, p50 in {"onnx-fp32": (8.0, 9.0, 10.0), "onnx-fp32-exit2": (4.0, 3.0, 2.5)}.items()
        ),
    )  # fmt: skip
    timing = {"batch": 1, "seq": 8, "rounds": 3, "against": "model/8"}
    table = {"rows": "exits", "columns": ["loss", "loop_ratio", "latency_ms", "speedup"], "timing": timing}
    _, lines = table_of(table, {"model": [results_of("k", evaluation=evaluation, artifacts=exits)]}, times)
    assert [line.at for line in lines] == ["2", "4", "8"]
    early, middle, last = (line.cells for line in lines)
    assert (early["loop_ratio"].mean, last["loop_ratio"].mean, early["loss"].mean) == (4.0, 1.0, 2.5)
    assert (early["speedup"].mean, early["speedup"].low, early["speedup"].high) == (3.0, 2.0, 4.0)
    assert (early["latency_ms"].mean, last["speedup"].mean) == (3.0, 1.0)
    assert middle["latency_ms"].mean is None and middle["speedup"].mean is None


def test_precisions_and_the_pick_across_runs(tmp_path: Path) -> None:
    def exported(key: str, accuracy: float, size: int) -> StudyRun:
        rows = [scores(artifact, "test", accuracy=accuracy) for artifact in ("torch", "onnx-fp32")]
        rows.append(scores("onnx-fp16", "test", accuracy=accuracy - 0.001, ms_per_sample=0.5))
        rejected = graph("int8", status="rejected", reason="it loses too much", size_bytes=None)
        artifacts = (graph("fp32", size_bytes=size), graph("fp16", size_bytes=size // 2), rejected)
        return results_of(key, evaluation=Evaluation(rows=tuple(rows)), artifacts=artifacts)

    choices = [{"title": "Small", "smallest": "size_bytes", "keep": "accuracy", "within": 0.01, "paper": "the other"}]
    printed = [{"run": "wide", "at": "fp16", "source": "Table 0", "values": {"accuracy": 0.8}}]
    columns = ["size_bytes", "megabytes", "accuracy"]
    table = {"rows": "artifacts", "columns": columns, "choices": choices, "published": printed}
    runs = {"wide": [exported("w", 0.9, 4000), exported("x", 0.92, 4000)], "thin": [exported("t", 0.7, 100)]}
    specification, lines = table_of(table, runs)
    assert [(line.run, line.at) for line in lines][:3] == [("wide", "fp32"), ("wide", "fp16"), ("wide", "int8")]
    half = lines[1].cells
    assert half["accuracy"].mean == pytest.approx(0.909) and half["accuracy"].sd == pytest.approx(0.02 / 2**0.5)
    assert half["megabytes"].mean == 2.0 and half["accuracy"].difference == pytest.approx(0.109)
    assert lines[2].missing == "rejected: it loses too much"
    picked = pick(specification.table.choices[0], lines)
    assert picked.row == 1 and "Wide, fp16: bytes 2,000, of 2 whose accuracy is within 0.01" in picked.reason
    complete = StudyTable(
        study="made", title="T|itle", element="Table 0", protocol="-", columns=tuple(columns), rows=lines,
        picks=(picked,), minutes=3.0,
    )  # fmt: skip
    page = study_page(complete, {})
    assert "0.9090 ± 0.0141" in page and "+0.1090" in page and "it loses too much" in page and "T\\|itle" in page
    assert "| model" in page and "(paper: " in page and "- **±**: standard deviation" in page and "**min**" not in page
    assert study_body(complete, "", {})[0].count("\n|") == len(lines) + 1
    look: dict[str, Any] = {"x": "size_bytes", "y": ("accuracy",), "size": "megabytes"}
    figures = [FigureSpec(kind=kind, title=kind, **look) for kind in ("bubbles", "dots", "lines")]
    assert draw_study(tmp_path, complete, figures, {}) == ["figure1.png", "figure2.png", "figure3.png"]


def test_minutes_of_two_machines_are_left_out_and_code_in_notes_stays_code() -> None:
    def page(*hosts: str) -> str:
        made = StudyTable(
            study="made", title="T", element="E", protocol="-", columns=("minutes",), minutes=2.0, hosts=hosts,
            rows=(line("wide", minutes=Cell(mean=1.0)),), notes=("`sst-test` is *another* set",),
        )  # fmt: skip
        return study_page(made, {"figure1.png": "Loss"}, "{{ clear('a', 'b', 'test', 'loss') }}")

    card = results.machine_of({"cpu": "X", "accelerator": "cuda"})
    assert "**min**" in page("X, fp32", "X, bf16") and "**min**" not in page("X, fp32", f"{card}, bf16")
    assert card == "graphics card not recorded"
    assert results.machine_of({"cpu": "X", "accelerator": "cuda", "gpu": "H"}) == "H"
    text = page("X, fp32")
    assert "`sst-test` is \\*another\\* set" in text and "Welch" in text and "![Loss](figure1.png)" in text


def test_times_of_two_processors_are_not_put_side_by_side() -> None:
    def scored(host: str) -> StudyRun:
        rows = (scores("torch", "test"), scores("onnx-fp32", "test", ms_per_sample=0.5, host=host))
        return results_of(f"k-{host}", evaluation=Evaluation(rows=rows), artifacts=(graph("fp32"),))

    table = {"rows": "tests", "columns": ["loss", "ms_per_sample"]}
    _, lines = table_of(table, {"first": [scored("that")], "second": [scored("this")], "third": [scored("this")]})
    assert [line.cells["ms_per_sample"].mean for line in lines] == [None, 0.5, 0.5]  # of the one with most runs
    assert lines[0].cells["loss"].mean == 1.0
    note = mixed_hosts([scored("that"), scored("this"), scored("this")])
    assert note == "Times per sample are those of this; runs that that timed show none."
    assert mixed_hosts([scored("this")]) == ""
    fp32, bf16 = (results_of("k", precision=precision) for precision in ("fp32", "bf16"))
    assert mixed_formats([fp32, results_of("k", precision="bf16", recipe={"model": {"kind": "linear"}})]) == ""
    assert mixed_formats([fp32, fp32]) == "" and "Trained in fp32 and bf16" in mixed_formats([fp32, bf16])
    _, lines = table_of(table, {"first": [scored("this")], "second": [scored("this")]})
    assert [line.cells["ms_per_sample"].mean for line in lines] == [0.5, 0.5]


def test_what_leaks_is_said_and_never_picked() -> None:
    def scored(key: str, loss: float, *, leaks: bool) -> StudyRun:
        return results_of(key, leaks=leaks, evaluation=Evaluation(rows=(scores("torch", "test", loss=loss),)))

    table = {"rows": "tests", "columns": ["loss"], "choices": [{"title": "Best", "smallest": "loss"}]}
    runs = {"void": [scored("v", 0.1, leaks=True)], "honest": [scored("h", 3.0, leaks=False)]}
    specification, lines = table_of(table, runs)
    assert "LEAKS FUTURE TOKENS" in lines[0].remark
    assert pick(specification.table.choices[0], lines).row == 1


def test_what_was_asked_for_has_its_line_with_a_reason() -> None:
    """Results of a run that another study, which asked for less, left behind."""
    rows = (scores("torch", "test", accuracy=0.9), scores("onnx-fp32", "test", accuracy=0.9))
    item = results_of("k", evaluation=Evaluation(rows=rows), artifacts=(graph("fp32"), graph("fp16")))
    printed = [{"run": "model", "at": at, "source": "Table 0", "values": {"accuracy": 0.8}} for at in ("fp32", "int8")]
    table = {"rows": "artifacts", "columns": ["size_bytes", "accuracy"], "published": printed}
    content = study("made", {"model": {**run("Model"), "export": ["fp16", "int8"]}}, table=table)
    specification = Study.model_validate(content, strict=False)
    job = job_of(specification, "model")
    complete, half, int8 = rows_of(specification, [Outcome(job, item)], None)
    assert complete.missing is None and complete.cells["accuracy"].mean == 0.9
    assert (half.at, half.missing) == ("fp16", "model, seed 1: fp16 is exported, and not scored")
    assert (int8.at, int8.missing) == ("int8", "model, seed 1: its results have no int8")
    assert int8.cells["accuracy"].published == 0.8 and int8.cells["accuracy"].mean is None
    alone = Outcome(job, None, "has no results")
    assert [line.at for line in rows_of(specification, [alone], None)] == ["fp32", "fp16", "int8"]


TEXT = """
{% if clear('wide', 'small', 'test', 'loss') and of('wide', 'test', 'loss') < of('small', 'test', 'loss') %}
Wide wins, {{ said('wide', 'test', 'loss') }}{% else %}No difference{% endif %}:
{{ '%.1f' | format(of('small', 'test', 'loss') / of('wide', 'test', 'loss')) }} times.
"""


def finding(text: str, *rows: StudyRow) -> str:
    content = study("made", {"wide": run("Wide"), "small": run("Small")}, finding=text)
    return finding_of(Study.model_validate(content, strict=False), rows)


def line(name: str, at: str = "test", **cells: Cell) -> StudyRow:
    return StudyRow(run=name, label=name, at=at, cells=cells, origin="here")


def test_a_finding_says_what_the_rows_say() -> None:
    def losses(wide: float | None, sd: float | None, n: int = 3) -> tuple[StudyRow, StudyRow]:
        return line("wide", loss=Cell(mean=wide, sd=sd, n=n)), line("small", loss=Cell(mean=2.0, sd=0.1, n=3))

    assert finding(TEXT, *losses(1.0, 0.1)) == "Wide wins, 1.0000 ± 0.1000: 2.0 times."
    assert finding(TEXT, *losses(1.0, 1.9)) == "No difference: 2.0 times."
    assert finding(TEXT, *losses(1.0, None, 1)).startswith("No difference")
    assert finding(TEXT, *losses(None, None, 0)) == "Nothing is said yet: wide, test has no loss."
    # 2.5 standard errors, and only four degrees of freedom: chance gives that once in 15 times.
    assert finding(TEXT, *losses(1.8, 0.1)).startswith("No difference") and finding("") == ""
    ranked = "{{ ranked('wide', 'small', 'test', 'loss') | join(', ') }}"
    assert finding(ranked, *losses(3.0, None)) == "small (2.0000 ± 0.1000), wide (3.0000)"


@pytest.mark.parametrize("text", ["{{ of('wide', 'test', 'lo' ~ 'ss2') }}", "{{ '%d' | format('x') }}", "{{ 1 / 0 }}"])
def test_a_finding_that_cannot_be_filled_says_so(text: str) -> None:
    with pytest.raises(RecipeError, match="made: finding: "):
        finding(text, line("wide", loss=Cell(mean=1.0, sd=0.1, n=3)))


def test_two_lines_of_a_run_are_compared_seed_by_seed() -> None:
    """Seeds that differ by more than the lines do hide nothing: each is compared with itself."""

    def apart(first: tuple[float, ...], second: tuple[float, ...]) -> str:
        values_at = {"2": first, "4": second}
        rows = [line("wide", at, loss=Cell(mean=1.0, n=len(values), values=values)) for at, values in values_at.items()]
        return finding("{{ apart('wide', '2', '4', 'loss') }}", *rows)

    assert apart((1.0, 2.0, 3.0), (0.9, 1.91, 2.89)) == "True"
    assert apart((1.0, 2.0, 3.0), (1.1, 1.9, 2.9)) == "False"
    assert apart((1.0,), (0.9,)) == apart((1.0, 2.0), (1.0, 2.0)) == "False"
