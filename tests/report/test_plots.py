"""Pictures: learning curves, sizes and charts of reports; ranges are drawn whole, titles fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import LEAKS
from edgeformer.bundle import Bundle
from edgeformer.report import charts
from edgeformer.report.canvas import drawing
from edgeformer.report.context import ranked_candidates
from edgeformer.report.plots import draw_bundle, draw_learning_curve
from edgeformer.report.tables import comparable_scores
from edgeformer.run import read_run
from tests.conftest import OLD_FORMAT
from tests.report.made_reports import copy_run, made_report, made_search


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is saved."""
    saved: list[Figure] = []
    save = Figure.savefig

    def record(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", record)
    return saved


def records_of(run: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["kind"] == kind]


class TestLearningCurve:
    def test_four_panels_of_a_run_with_exits(self, finished_language_run, tmp_path, figures):
        run = copy_run(finished_language_run, tmp_path / "run")
        path = draw_learning_curve(run)
        assert path == run / "plots" / "learning_curve.png" and path.read_bytes().startswith(b"\x89PNG")
        manifest = read_run(run)
        score = manifest.validation
        (curve,) = figures
        losses, exits, shares, trade = curve.axes
        epochs = records_of(run, "epoch")
        lines = {line.get_label(): list(line.get_ydata()) for line in losses.get_lines()}
        assert lines["validation"] == [record["val_loss"] for record in epochs]
        assert lines["training (epoch)"] == [record["train_loss"] for record in epochs]
        perplexities = [exit_.perplexity for exit_ in score.exits.values()]
        assert [bar.get_height() for bar in exits.patches] == perplexities
        assert [bar.get_height() for bar in shares.patches] == list(score.early_exit.share.values())
        by_loops = trade.get_lines()[0]
        assert list(by_loops.get_xdata()) == [2, 4] and list(by_loops.get_ydata()) == perplexities
        assert "not time" in trade.get_xlabel()
        title = curve.get_suptitle()
        assert f"{manifest.parameters:,} parameters" in title and "SYNTHETIC" in title and LEAKS not in title
        assert lines["training (running)"] == [record["loss_final"] for record in records_of(run, "step")]
        draw_learning_curve(copy_run(finished_language_run, tmp_path / "leaking", leaks=True))
        assert LEAKS in " ".join(figures[1].get_suptitle().split())

    def test_run_without_metrics(self, finished_language_run: Path, tmp_path: Path) -> None:
        run = copy_run(finished_language_run, tmp_path / "run", validation=None)
        (run / "metrics.jsonl").write_text("", encoding="utf-8")  # stopped in the first epoch
        path = draw_learning_curve(run)
        assert path is not None and path.is_file()
        (run / "metrics.jsonl").unlink()
        with pytest.raises(ArtifactError, match=r"metrics\.jsonl: no metrics to draw"):
            draw_learning_curve(run)

    def test_weights_of_a_stop_in_mid_epoch_are_marked(self, tmp_path: Path, figures: list[Figure]) -> None:
        changes = {"epochs": 0, "best_epoch": None, "reason": "stopped by --max-steps 7", "steps": 7}
        manifest = read_run(OLD_FORMAT / "classifier-v1").model_copy(update=changes)
        (tmp_path / "run.json").write_text(manifest.model_dump_json(), encoding="utf-8")
        record = {"kind": "epoch", "step": 7, "train_loss": 0.7, "val_loss": 0.6, "val_accuracy": 0.625}
        for epoch, is_marked in ((0.31, True), (1.0, False)):
            (tmp_path / "metrics.jsonl").write_text(json.dumps({**record, "epoch": epoch}) + "\n", encoding="utf-8")
            draw_learning_curve(tmp_path)
            labels = [line.get_label() for axis in figures[-1].axes for line in axis.get_lines()]
            assert ("kept: 0.6250" in labels) is is_marked


def test_picture_compares_the_same_scores_as_the_table(tmp_path: Path) -> None:
    manifest = Bundle.open(OLD_FORMAT / "language-v1" / "bundle").manifest
    scores, _ = comparable_scores(manifest)
    assert "onnx-fp32" in scores and "onnx-fp32-decode" not in scores
    path = draw_bundle(manifest, tmp_path / "bundle.png")
    assert path is not None and path.is_file()


LONG_TITLE = "crt_deep · SYNTHETIC data: says nothing about real text · split 1 of 5, seed 42, rows in order · " * 3
LONG_NAME = "a_run_that_is_named_after_every_setting_in_its_recipe_" * 4


@pytest.mark.parametrize(
    ("title", "panels", "size"),
    [("small · from $1 to $2 \x1b[31m", 1, (7.0, 3.6)), (f"{LONG_NAME} {LONG_TITLE}", 4, (17.5, 4.1))],
)
def test_figure_grows_with_the_lines_of_its_title(title, panels, size, tmp_path, figures):
    with drawing(tmp_path / "a.png", title, panels, size) as axes:
        for axis in axes:
            axis.plot([1, 2], [1, 2])
    (figure,) = figures
    lines = figure.get_suptitle()
    assert "".join(lines.split()) == "".join(title.replace("\x1b", "\ufffd").split()), "no character is lost"
    (suptitle,) = figure.texts
    box, text = figure.bbox, suptitle.get_window_extent()
    assert text.x0 >= 0 and text.x1 <= box.width and text.y0 >= 0 and text.y1 <= box.height
    assert all(axis.get_window_extent().y1 <= text.y0 for axis in figure.axes), "it covers no axes"
    breaks = lines.count("\n")
    assert (breaks > 0) if len(title) > 200 else (breaks == 0)
    assert figure.get_figheight() == pytest.approx(size[1] + breaks * 11 * 1.2 / 72)
    assert figure.axes[0].get_window_extent().height > 0.5 * size[1] * figure.dpi


def test_ranges_of_candidates_are_drawn_whole() -> None:
    search = made_search()
    ends = ({"low_ms": 0.5, "high_ms": 2.0, "score_low": 0.8, "score_high": 0.97}, {"low_ms": 1.5, "high_ms": 6.0})
    candidates = tuple(c.model_copy(update=update) for c, update in zip(search.candidates, ends, strict=True))
    axis = Figure().subplots()
    search = search.model_copy(update={"candidates": candidates})
    charts._draw_candidates(axis, search, {}, ranked_candidates(search))
    drawn = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axis.lines}
    assert {((0.5, 2.0), (0.91, 0.91)), ((1.0, 1.0), (0.8, 0.97)), ((1.5, 6.0), (0.92, 0.92))} <= drawn
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    assert left < 0.5 and right > 6.0 and bottom < 0.8 and top > 0.97


def test_a_far_limit_is_named_at_the_edge() -> None:
    axis = Figure().subplots()
    assert charts._draw_limits(axis, made_report(), "latency", [1.0]) == []
    assert [text.get_text() for text in axis.texts] == ["limit 5.00 ms (to the right)"]
