"""Early exit as a table and as a picture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rich.console import Console

from edgeformer.artifacts.scores import EarlyExitRow
from edgeformer.report.tables import early_exit_table
from tests.cli.run_cli import edgeformer

OLD = Path(__file__).parents[1] / "old_format"


def row(threshold: float | None, share: float) -> EarlyExitRow:
    return EarlyExitRow(
        artifact="onnx-fp32-step", split="test", n=10, threshold=threshold, thresholds={"1": threshold or 0.9},
        mean_loops=2 - share, loss=0.5 + share, accuracy=0.75, share={"1": share, "2": 1 - share},
    )  # fmt: skip


def printed(rows: list[EarlyExitRow]) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(early_exit_table("mine", rows))
    return capture.get()


def test_thresholds_that_change_nothing_share_a_line() -> None:
    text = printed([row(0.1, 1.0), row(0.2, 1.0), row(0.25, 1.0), row(0.3, 1.0), row(0.9, 0.25)])
    assert "0.1…0.2" in text and " 0.25 " in text and " 0.3 " in text, "what was asked for has a line of its own"
    assert "1: 25.0%, 2: 75.0%" in text and "1.75" in text and "0.7500" in text


def test_another_rule_has_lines_of_its_own() -> None:
    rows = [row(0.1, 1.0), row(0.1, 1.0).model_copy(update={"rule": "cosine"})]
    assert " cosine 0.1 " in printed(rows)


def test_what_computed_is_told_where_several_did() -> None:
    rows = [row(0.1, 1.0).model_copy(update={"provider": name}) for name in ("openvino-cpu", "openvino-cpu-bf16")]
    both, one = printed(rows), printed(rows[:1])
    assert "computed by" in both and " openvino-cpu " in both and " openvino-cpu-bf16 " in both
    assert "computed by" not in one


def test_a_named_runtime_is_told_and_leaves_the_picture_alone(tmp_path: Path) -> None:
    shutil.copytree(OLD / "classifier-v1", tmp_path / "artifacts" / "classifier-v1")
    asked = ("evaluate", "--artifact", "onnx-fp32-step", "--runtime", "onnxruntime", "--json")
    document = json.loads(edgeformer(*asked, cwd=tmp_path).out)
    found = [*document["rows"], *document["early_exit"]]
    assert len(found) > 3 and {row["provider"] for row in found} == {"CPUExecutionProvider"}
    assert not (tmp_path / "artifacts" / "classifier-v1" / "plots" / "early_exit.png").exists()


def test_the_command_tells_and_draws_it(tmp_path: Path) -> None:
    shutil.copytree(OLD / "classifier-v1", tmp_path / "artifacts" / "classifier-v1")
    asked = ("evaluate", "--artifact", "onnx-fp32-step", "--threshold", "0.55")
    outcome = edgeformer(*asked, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "early exit" in outcome.out and "0.55" in outcome.out
    picture = tmp_path / "artifacts" / "classifier-v1" / "plots" / "early_exit.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and f"drawn: {Path('artifacts')}" in outcome.out
    document = json.loads(edgeformer(*asked, "--json", cwd=tmp_path).out)
    assert [(found["exit"], found["n"]) for found in document["rows"]] == [(None, 40), (1, 40)]
    thresholds = [found["threshold"] for found in document["early_exit"]]
    assert 0.55 in thresholds and thresholds == sorted(thresholds)
    assert all(found["accuracy"] is not None and found["perplexity"] is None for found in document["early_exit"])
