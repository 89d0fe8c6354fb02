"""Tables of runs and bundles, from a run and bundles of before the move (tests/old_format)."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from edgeformer.artifacts.manifest import BundleManifest, RunManifest
from edgeformer.artifacts.workspace import BUNDLE_FILE, read_manifest
from edgeformer.models import read_recipe_of
from edgeformer.models.card import model_card
from edgeformer.report.plots import draw_bundle, draw_learning_curve
from edgeformer.report.tables import artifact_table, comparable_scores, run_table
from edgeformer.run import read_run
from edgeformer.tasks import all_tasks

OLD = Path(__file__).resolve().parents[1] / "old_format"


def manifest_of(name: str) -> BundleManifest:
    all_tasks()
    return read_manifest(BundleManifest, OLD / name / "bundle" / BUNDLE_FILE)


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=220)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line_of(text: str, artifact: str) -> list[str]:
    (line,) = [line.split() for line in text.splitlines() if line.split()[:1] == [artifact]]
    return line


@pytest.mark.parametrize(
    ("name", "metric", "golden_only"),
    [
        ("language-v1", "perplexity", ("onnx-fp32-step", "onnx-fp32-decode", "onnx-fp16-decode")),
        ("classifier-v1", "accuracy", ("onnx-fp32-step", "onnx-int8-step")),
    ],
)
def test_scores_of_golden_inputs_do_not_stand_under_a_caption_about_validation(
    name: str, metric: str, golden_only: tuple[str, ...]
) -> None:
    bundle = manifest_of(name)
    text = printed(artifact_table(bundle))
    assert "of the validation split" in text
    for artifact in bundle.artifacts:
        cell = line_of(text, artifact.id)[-2]
        if artifact.id in golden_only:
            assert artifact.score is not None and cell == "–"
        elif artifact.validation is not None:
            assert float(cell.replace(",", "")) == pytest.approx(getattr(artifact.validation, metric), abs=6e-3)


def test_without_a_validation_split_golden_scores_are_shown_as_such() -> None:
    bundle = manifest_of("language-v1")
    artifacts = tuple(artifact.model_copy(update={"validation": None}) for artifact in bundle.artifacts)
    golden = bundle.model_copy(update={"artifacts": artifacts})
    scores, scored_on = comparable_scores(golden)
    assert set(scores) == {artifact.id for artifact in bundle.artifacts}
    assert scored_on is not None and scored_on.startswith("scores on the golden inputs only")
    text = printed(artifact_table(golden))
    assert "golden inputs only" in text and "validation split" not in text
    assert line_of(text, "onnx-fp32-decode")[-2] != "–"


def test_the_picture_and_the_table_compare_the_same_scores(tmp_path: Path) -> None:
    scores, _ = comparable_scores(manifest_of("language-v1"))
    assert "onnx-fp32" in scores and "onnx-fp32-decode" not in scores
    assert draw_bundle(manifest_of("language-v1"), tmp_path / "bundle.png").is_file()


class TestStoppedInMidEpoch:
    """``--max-steps`` in mid-epoch: the kept weights are of no whole epoch."""

    def stopped(self) -> RunManifest:
        changes = {"epochs": 0, "best_epoch": None, "reason": "stopped by --max-steps 7", "steps": 7}
        return read_run(OLD / "classifier-v1").model_copy(update=changes)

    def test_table(self) -> None:
        text = " ".join(printed(run_table(self.stopped())).split())
        assert "7 steps in" in text and "stopped in mid-epoch" in text and "None" not in text
        whole = " ".join(printed(run_table(read_run(OLD / "classifier-v1"))).split())
        assert "best epoch" in whole and "mid-epoch" not in whole

    def test_card(self) -> None:
        card = model_card(self.stopped(), read_recipe_of(OLD / "classifier-v1"))
        assert "weights of the last step, stopped in mid-epoch, chosen by validation" in card and "None" not in card
        whole = model_card(read_run(OLD / "classifier-v1"), read_recipe_of(OLD / "classifier-v1"))
        assert "weights of epoch" in whole and "mid-epoch" not in whole

    @pytest.mark.parametrize(("name", "epoch", "kept"), [("a", 0.31, True), ("b", 1.0, False)])
    def test_curve_marks_the_weights_of_the_stop(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, epoch: float, kept: bool
    ) -> None:
        run = tmp_path / name
        run.mkdir()
        (run / "run.json").write_text(self.stopped().model_dump_json(), encoding="utf-8")
        record = {"kind": "epoch", "step": 7, "epoch": epoch, "train_loss": 0.7, "val_loss": 0.6, "val_accuracy": 0.625}
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
        labels: list[str] = []
        from matplotlib.axes import Axes

        draw = Axes.legend
        monkeypatch.setattr(
            Axes,
            "legend",
            lambda axis, **options: (
                labels.extend(str(line.get_label()) for line in axis.get_lines()), draw(axis, **options),
            )[1],
        )  # fmt: skip
        assert draw_learning_curve(run).is_file()
        assert ("kept: 0.6250" in labels) is kept


def test_an_old_run_keeps_its_curve(tmp_path: Path) -> None:
    run = Path(shutil.copytree(OLD / "language-v1", tmp_path / "run"))
    assert draw_learning_curve(run) == run / "plots" / "learning_curve.png"
    assert (run / "plots" / "loss_per_exit.png").is_file()
