"""Pictures of studies say how sure their figures are, where axes begin, and which scores are void."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import figures
from benchmarks.studies.figures import draw_study
from benchmarks.studies.results import Cell, StudyRow, StudyTable
from benchmarks.studies.specification import FigureSpec

matplotlib = pytest.importorskip("matplotlib")


def row(run: str, *, seeds: int = 3, at: str = "2", leaks: bool = False, **cells: Cell) -> StudyRow:
    keys = tuple(f"{run}{number}" for number in range(seeds))
    return StudyRow(run=run, label=run.title(), at=at, origin="here", keys=keys, leaks=leaks, cells=cells)


def table_of(*rows: StudyRow) -> StudyTable:
    return StudyTable(study="made", title="T", element="E", protocol="-", columns=("loss",), rows=rows, minutes=1.0)


def draw(monkeypatch: pytest.MonkeyPatch, table: StudyTable, figure: FigureSpec, curves: Any = None) -> tuple[str, Any]:
    """Return title and axes of a study's one picture, which is drawn and not written."""
    from matplotlib.figure import Figure

    kept: list[tuple[str, Any]] = []

    @contextmanager
    def drawing(path: Path, title: str, panels: int, size: tuple[float, float]) -> Iterator[list[Any]]:
        axes = list(Figure(figsize=size).subplots(1, panels, squeeze=False)[0])
        kept.append((title, axes))
        yield axes

    monkeypatch.setattr(figures, "drawing", drawing)
    assert draw_study(Path("nowhere"), table, [figure], curves or {}) == ["figure1.png"]
    return kept[0]


def test_a_picture_says_how_many_seeds_and_what_its_whiskers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, lone = Cell(mean=5.3, sd=0.04, n=3), Cell(mean=5.3, n=1)
    ranged, share = Cell(mean=2.7, n=3, low=2.6, high=2.9), Cell(mean=0.9, n=1)

    def texts(name: str, *rows: StudyRow) -> tuple[str, str]:
        title, (axis,) = draw(monkeypatch, table_of(*rows), FigureSpec(kind="dots", title="T", y=(name,)))
        return title, axis.get_xlabel()

    deviation = "loss, nats per token\nwhiskers: ± standard deviation over the seeds\n(axis does not start at 0)"
    assert texts("loss", row("a", loss=spread)) == ("T (3 seeds)", deviation)
    assert texts("loss", row("a", seeds=1, loss=lone))[0] == "T (one seed)"
    assert texts("loss", row("a", seeds=1, loss=lone), row("b", loss=spread)) == ("T (1 to 3 seeds)", deviation)
    assert "whiskers: least and most of the rounds" in texts("speedup", row("a", speedup=ranged))[1]
    _, label = texts("accuracy", row("a", seeds=1, accuracy=share, rows=Cell(mean=100.0)))
    assert "whiskers: 95% interval over the rows of the set" in label


def test_each_group_has_a_panel_and_a_point_alone_is_no_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(run, loss=Cell(mean=1.0)).model_copy(update={"group": f"of {run}"}) for run in ("a", "b", "c")]
    curve = [{"epoch": float(number), "val_loss": 3.0 / number} for number in (1, 2)]
    figure = FigureSpec(kind="curves", title="T", y=("val_loss",), panels="group", unit="nats per text")
    _, axes = draw(monkeypatch, table_of(*rows), figure, {"a": [curve], "b": [curve[:1]], "c": [curve]})
    assert [axis.get_title() for axis in axes] == ["of a", "of c"]
    assert axes[0].get_ylabel().startswith("validation loss, nats per text")


def test_a_run_that_leaks_is_marked_in_dots_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(mean=1.0, sd=0.2, n=3)
    table = table_of(row("causal", loss=cell), row("published", leaks=True, loss=cell))
    _, (axis,) = draw(monkeypatch, table, FigureSpec(kind="dots", title="Loss", y=("loss",)))
    assert [text.get_text() for text in axis.get_yticklabels()] == ["Causal", "Published (leaks: void)"]
    curve = [{"epoch": float(number), "val_loss": 3.0 / number} for number in (1, 2)]
    curves = {"causal": [curve, curve], "published": [curve, curve]}
    title, (axis,) = draw(monkeypatch, table, FigureSpec(kind="curves", title="Validation", y=("val_loss",)), curves)
    assert title == "Validation (a line for each of 2 seeds)" and len(axis.lines) == 4
    (legend,) = axis.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["Causal", "Published (leaks: void)"]
    label = "validation loss, nats per token\n(axis does not start at 0)"
    assert axis.get_ylabel() == label and axis.get_xlim()[0] == 0
