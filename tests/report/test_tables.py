"""Columns for scripts and for people, and terminal tables of runs, bundles, scores, early exit and calibrations."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.device import Calibration, EstimateError, FittedCase
from edgeformer.artifacts.manifest import LEAKS
from edgeformer.artifacts.scores import EarlyExitRow
from edgeformer.bundle import Bundle
from edgeformer.report import tables
from edgeformer.report.columns import Column, TableColumns
from edgeformer.report.tables import artifact_table, evaluation_table, print_calibration
from edgeformer.run import read_run
from edgeformer.tasks import get_task
from tests.conftest import OLD_FORMAT
from tests.report.made_reports import rendered


def score_cell(text: str, artifact: str) -> str:
    (line,) = [line.split() for line in text.splitlines() if line.split()[:1] == [artifact]]
    return line[-2]


class TestArtifacts:
    @pytest.mark.parametrize(
        ("name", "metric", "golden_only"),
        [
            ("language-v1", "perplexity", ("onnx-fp32-step", "onnx-fp32-decode", "onnx-fp16-decode")),
            ("classifier-v1", "accuracy", ("onnx-fp32-step", "onnx-int8-step")),
        ],
    )
    def test_scores_of_golden_inputs_are_not_mixed_with_validation_scores(self, name, metric, golden_only):
        bundle = Bundle.open(OLD_FORMAT / name / "bundle").manifest
        text = rendered(artifact_table(bundle), 220)
        assert "of the validation split" in text
        for artifact in bundle.artifacts:
            cell = score_cell(text, artifact.id)
            if artifact.id in golden_only:
                assert artifact.score is not None and cell == "–"
            elif artifact.validation is not None:
                assert float(cell.replace(",", "")) == pytest.approx(getattr(artifact.validation, metric), abs=6e-3)

    def test_golden_scores_without_a_validation_split(self) -> None:
        bundle = Bundle.open(OLD_FORMAT / "language-v1" / "bundle").manifest
        artifacts = tuple(artifact.model_copy(update={"validation": None}) for artifact in bundle.artifacts)
        golden = bundle.model_copy(update={"artifacts": artifacts})
        scores, scored_on = tables.comparable_scores(golden)
        assert set(scores) == {artifact.id for artifact in bundle.artifacts}
        assert scored_on is not None and "golden inputs only" in scored_on
        text = rendered(artifact_table(golden), 220)
        assert "golden inputs only" in text and "validation split" not in text
        assert score_cell(text, "onnx-fp32-decode") != "–"


def test_run_of_a_language_model(finished_language_run: Path) -> None:
    manifest = read_run(finished_language_run)
    score, text = manifest.test, rendered(tables.run_table(manifest), 220)
    for value in (score.perplexity, score.word_perplexity, score.exits["2"].perplexity):
        assert f"{value:,.2f}" in text
    assert f"({score.early_exit.mean_loops:.2f} loops)" in text
    assert "exit 2" in text and "exit 4" not in text, "the last exit has the perplexity of the model"
    assert LEAKS not in text
    assert LEAKS in rendered(tables.run_table(manifest.model_copy(update={"leaks": True})), 220)
    changes: dict[str, Any] = {"steps": 0, "validation": None, "test": None, "tests": {}}
    text = rendered(tables.run_table(manifest.model_copy(update=changes)), 220)
    assert "not trained here" in text and "no scores yet; compute them with: edgeformer evaluate" in text
    assert not set(text) & set("─━│┃") and "perplexity" not in text, "no table without a row"


def test_evaluation(finished_language_run: Path) -> None:
    score, task = read_run(finished_language_run).test, get_task("language-modeling")
    text = rendered(evaluation_table("mine", task, task.evaluation_rows("torch", "test", score, leaks=False)), 220)
    lines = [line.split() for line in text.splitlines() if " torch " in f" {line} "]
    assert [line[2] for line in lines] == ["last", "2"]
    assert lines[0][5] == f"{score.perplexity:,.2f}" and lines[1][5] == f"{score.exits['2'].perplexity:,.2f}"
    leaking = evaluation_table("mine", task, task.evaluation_rows("torch", "test", score, leaks=True))
    assert LEAKS not in text and LEAKS in rendered(leaking, 220)


def early_exit_row(threshold: float | None, share: float, **changes: Any) -> EarlyExitRow:
    row = EarlyExitRow(
        artifact="onnx-fp32-step", split="test", n=10, threshold=threshold, thresholds={"1": threshold or 0.9},
        mean_loops=2 - share, loss=0.5 + share, accuracy=0.75, share={"1": share, "2": 1 - share},
    )  # fmt: skip
    return row.model_copy(update=changes)


def test_thresholds_loops_and_shares_of_early_exit() -> None:
    rows = (early_exit_row(None, 1.0), early_exit_row(0.9, 0.25), early_exit_row(0.1, 1.0, rule="cosine"))
    text = rendered(tables.early_exit_table("mine", rows))
    assert "paper: 0.90" in text and " 0.9 " in text and " cosine 0.1 " in text
    assert "1: 25.0%, 2: 75.0%" in text and "1.75" in text and "0.7500" in text


def test_calibration_shows_its_cases_and_its_error() -> None:
    case = FittedCase(run="light", artifact="onnx-fp32", batch=1, seq=16, measured_ms=2.0, estimated_ms=4.0)
    calibration = Calibration(
        created="2026-11-21T00:00:00.000+00:00", processor="a processor", threads=1, provider="CPUExecutionProvider",
        efficiencies={}, fitted_on=(case,),
    )  # fmt: skip
    text = rendered(lambda console: print_calibration(calibration, Path("host.yaml"), console))
    assert "the error of these estimates is unknown" in text and "profile host.yaml" in text
    assert "2.00 ms" in text and "≈ 4.00 ms" in text and "+1.00" in text
    unstable = calibration.model_copy(update={"validated_on": (case.model_copy(update={"stable": False}),)})
    assert "every measurement is unstable" in rendered(lambda console: print_calibration(unstable, None, console))
    facts = {"kind": "cpu", "device": "a processor", "cases": 18, "created": calibration.created}
    checked = calibration.model_copy(update={"error": EstimateError(**facts, median_log2=0.1, worst_log2=1.0)})
    text = rendered(lambda console: print_calibration(checked, None, console))
    assert "by a factor of 1.07 (median) and 2.00 (largest)" in text


@dataclass(frozen=True)
class Item:
    name: str
    size: int | None = None
    time: float | None = None
    good: bool = True


COLUMNS: TableColumns[Item] = TableColumns(
    Column("item", lambda item: item.name),
    Column("size", lambda item: item.size, "bytes"),
    Column("time", lambda item: item.time, "ms", "how long"),
    Column("good", lambda item: item.good),
)
ITEMS = [Item("a", 3 * 2**20, 1.5), Item("b|[red]x[/]\n<i>", None, None, good=False)]
TERMINAL = rendered(COLUMNS.terminal("[bold]items[/]", ITEMS))


def test_csv_has_bare_values_of_the_picked_columns() -> None:
    rows = list(csv.DictReader(io.StringIO(COLUMNS.csv(ITEMS))))
    assert rows[0] == {"item": "a", "size_bytes": str(3 * 2**20), "time_ms": "1.5", "good": "True"}
    assert rows[1] == {"item": "b|[red]x[/]\n<i>", "size_bytes": "", "time_ms": "", "good": "False"}
    assert COLUMNS.pick("size", "item").csv(ITEMS[:1]) == f"size_bytes,item\n{3 * 2**20},a\n"
    assert COLUMNS.drop_empty(ITEMS[1:], "size", "time").csv(ITEMS[1:]).startswith("item,good\n")
    assert COLUMNS.drop_empty(ITEMS, "size", "time").csv(ITEMS).startswith("item,size_bytes,time_ms,good\n")


def test_people_read_units_and_no_markup() -> None:
    table = COLUMNS.html(ITEMS, ["", "unknown"])
    assert table.rows[0] == ("", ["a", "3.0 MiB", "1.50 ms", "yes"])
    assert table.rows[1] == ("unknown", ["b|[red]x[/]\n<i>", "–", "–", "no"])
    assert [column.is_numeric for column in table.columns] == [False, True, True, False]
    for text in (COLUMNS.markdown(ITEMS), COLUMNS.plain(ITEMS), TERMINAL):
        assert "3.0 MiB" in text and "1.50 ms" in text and "how long" in text

    assert "[red]x[/]" in TERMINAL and "[bold]items[/]" in TERMINAL
    assert "b\\|\\[red\\]x\\[/\\] &lt;i&gt;" in COLUMNS.markdown(ITEMS)
    lines = COLUMNS.markdown(ITEMS, bold=lambda item: item.name == "a").splitlines()
    assert "**a**" in lines[2] and "**3.0 MiB**" in lines[2] and "**" not in lines[3]
