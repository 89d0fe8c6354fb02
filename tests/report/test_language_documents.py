"""Documents of language models: the figures that run.json holds, every exit, and a leak said wherever there is one."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
from rich.console import Console
from rich.table import Table

from edgeformer.artifacts.data_warnings import LEAKS
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.manifest import RunManifest
from edgeformer.models import load_recipe
from edgeformer.models.card import model_card
from edgeformer.report.compare import format_comparison, run_records
from edgeformer.report.plots import draw_learning_curve
from edgeformer.report.tables import evaluation_table, run_table
from edgeformer.run import locate, read_run
from edgeformer.tasks import task_named
from edgeformer.tasks.language_modeling import LanguageScore

TASK = task_named("language-modeling")


def leaking(manifest: RunManifest) -> RunManifest:
    assert manifest.causality is not None
    causality = manifest.causality.model_copy(update={"leaks": True, "reach": 17})
    return manifest.model_copy(update={"leaks": True, "causality": causality})


def copy_of(run: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(run, folder)
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**document, **changes}), encoding="utf-8")
    return folder


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=220)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def final_score(manifest: RunManifest) -> LanguageScore:
    assert isinstance(manifest.test, LanguageScore)
    return manifest.test


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, matplotlib.figure.Figure]:
    """Every figure that is saved, by the name of its title; saved as always."""
    kept: dict[str, matplotlib.figure.Figure] = {}
    save = matplotlib.figure.Figure.savefig

    def keep(figure: matplotlib.figure.Figure, *arguments: Any, **options: Any) -> None:
        kept[figure.axes[0].get_title()] = figure
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return kept


def test_four_panels_hold_the_runs_own_numbers(
    finished_language_run: Path, tmp_path: Path, figures: dict[str, matplotlib.figure.Figure]
) -> None:
    run = copy_of(finished_language_run, tmp_path / "run")
    path = draw_learning_curve(run)
    assert path == run / "plots" / "learning_curve.png" and path.read_bytes().startswith(b"\x89PNG")
    manifest = read_run(run)
    score = manifest.validation
    assert isinstance(score, LanguageScore) and score.early_exit is not None
    losses, exits, shares, trade = figures["(a) loss"].axes
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    lines = {line.get_label(): list(line.get_ydata()) for line in losses.get_lines()}
    assert lines["validation, last loop"] == [record["val_loss"] for record in epochs]
    assert lines["training, weighted over exits"] == [record["train_loss"] for record in epochs]
    assert [bar.get_height() for bar in exits.patches] == [e.perplexity for e in score.exits.values()]
    assert [bar.get_height() for bar in shares.patches] == list(score.early_exit.share.values())
    by_loops = trade.get_lines()[0]
    assert list(by_loops.get_xdata()) == [2, 4]
    assert list(by_loops.get_ydata()) == [e.perplexity for e in score.exits.values()]
    assert "not time" in trade.get_xlabel()
    title = figures["(a) loss"].get_suptitle()
    assert f"{manifest.parameters:,} parameters" in title and "SYNTHETIC" in title and LEAKS not in title


def test_loss_of_each_exit_over_epochs(
    finished_language_run: Path, tmp_path: Path, figures: dict[str, matplotlib.figure.Figure]
) -> None:
    run = copy_of(finished_language_run, tmp_path / "run")
    draw_learning_curve(run)
    assert (run / "plots" / "loss_per_exit.png").read_bytes().startswith(b"\x89PNG")
    training, validation = figures["training loss of each exit"].axes
    for axis in (training, validation):
        assert [line.get_label() for line in axis.get_lines()] == ["loop 2", "loop 4"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert list(training.get_lines()[1].get_ydata()) == [record["loss_final"] for record in steps]
    assert list(training.get_lines()[0].get_ydata()) == [record["loss_exit2"] for record in steps]


def test_a_leak_is_in_every_title(
    finished_language_run: Path, tmp_path: Path, figures: dict[str, matplotlib.figure.Figure]
) -> None:
    run = copy_of(finished_language_run, tmp_path / "run", leaks=True)
    draw_learning_curve(run)
    assert len(figures) == 2
    assert all(LEAKS in " ".join(figure.get_suptitle().split()) for figure in figures.values())


def test_a_run_without_metrics_has_no_curve(finished_language_run: Path, tmp_path: Path) -> None:
    run = copy_of(finished_language_run, tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ArtifactError, match=r"metrics\.jsonl: no metrics to draw"):
        draw_learning_curve(run)


def test_stopped_in_the_first_epoch(finished_language_run: Path, tmp_path: Path) -> None:
    run = copy_of(finished_language_run, tmp_path / "run", validation=None)
    (run / "metrics.jsonl").write_text("", encoding="utf-8")
    assert draw_learning_curve(run).is_file()


class TestCard:
    def test_names_every_exit_and_how_it_was_trained(self, finished_language_run: Path) -> None:
        manifest = read_run(finished_language_run)
        card = model_card(manifest, load_recipe(str(finished_language_run / "recipe.yaml")))
        score = final_score(manifest)
        for loop, found in score.exits.items():
            assert f"| loop {loop} " in card and f"{found.perplexity:,.2f}" in card
        assert f"{score.word_perplexity:,.2f}" in card
        assert "later tokens change no output" in card
        assert "pipeline_tag: text-generation" in card
        assert "Synthetic data" in card and "LEAKS" not in card

    def test_a_leak_comes_before_every_figure(self, finished_language_run: Path) -> None:
        manifest = leaking(read_run(finished_language_run))
        card = model_card(manifest, load_recipe(str(finished_language_run / "recipe.yaml")))
        assert card.index(LEAKS) < card.index("**Model:**") < card.index("## Scores")
        assert "tokens up to 17 positions later" in card

    def test_an_imported_model_has_no_scores(self, finished_language_run: Path) -> None:
        nothing: dict[str, Any] = {
            "steps": 0,
            "validation": None,
            "test": None,
            "tests": {},
            "reason": "imported from x",
        }
        manifest = leaking(read_run(finished_language_run)).model_copy(update=nothing)
        card = model_card(manifest, load_recipe(str(finished_language_run / "recipe.yaml")))
        assert "**Training:** not here; imported from x" in card
        assert "## Scores\n\nNone yet." in card


class TestTables:
    def test_run(self, finished_language_run: Path) -> None:
        manifest = read_run(finished_language_run)
        text, score = printed(run_table(manifest)), final_score(manifest)
        assert score.early_exit is not None
        for value in (score.perplexity, score.word_perplexity, score.exits["2"].perplexity):
            assert f"{value:,.2f}" in text
        assert f"({score.early_exit.mean_loops:.2f} loops)" in text
        assert "exit 2" in text and "exit 4" not in text  # the last loop is the perplexity itself
        assert LEAKS not in text
        assert LEAKS in printed(run_table(leaking(manifest)))

    def test_run_without_scores(self, finished_language_run: Path) -> None:
        nothing: dict[str, Any] = {"steps": 0, "validation": None, "test": None, "tests": {}}
        table = run_table(read_run(finished_language_run).model_copy(update=nothing))
        text = " ".join(printed(table).split())  # a narrow table breaks its title
        assert "not trained here" in text and "no scores: evaluate it first" in text
        assert not set(printed(table)) & set("─━│┃") and "perplexity" not in text  # no table without a row

    def test_evaluation(self, finished_language_run: Path) -> None:
        score = final_score(read_run(finished_language_run))
        text = printed(evaluation_table("mine", TASK.rows("torch", "test", score)))
        lines = [line.split() for line in text.splitlines() if " torch " in f" {line} "]
        assert [line[2] for line in lines] == ["last", "2"]
        assert lines[0][5] == f"{score.perplexity:,.2f}" and lines[1][5] == f"{score.exits['2'].perplexity:,.2f}"
        assert LEAKS not in text
        assert LEAKS in printed(evaluation_table("mine", TASK.rows("torch", "test", score, leaks=True)))


class TestComparison:
    def test_has_perplexities(self, finished_language_run: Path) -> None:
        location = locate(str(finished_language_run), finished_language_run.parent)
        (row,) = run_records([location])
        score = final_score(read_run(finished_language_run))
        assert row["perplexity"] == score.perplexity and row["perplexity_exit2"] == score.exits["2"].perplexity
        assert "perplexity_exit4" not in row and "caution" not in row
        json.dumps(row)

    @pytest.mark.parametrize("style", ["plain", "markdown", "csv"])
    def test_a_leak_stands_on_top(self, finished_language_run: Path, tmp_path: Path, style: str) -> None:
        cheat = copy_of(finished_language_run, tmp_path / "cheat", leaks=True)
        rows = run_records([locate(str(run), tmp_path) for run in (finished_language_run, cheat)])
        text = format_comparison(rows, style)  # type: ignore[arg-type]
        assert text.index("caution") < text.index("perplexity")
        assert LEAKS in text

    def test_beside_a_classifier(self, finished_language_run: Path, finished_run: Path) -> None:
        locations = [locate(str(run), run.parent) for run in (finished_run, finished_language_run)]
        rows = run_records(locations)
        assert "accuracy" in rows[0] and "perplexity" not in rows[0] and "accuracy" not in rows[1]
        assert format_comparison(rows, "plain").count("–") > 4
