"""A picture's title stays within its figure, whatever a run or a study is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from edgeformer.report.canvas import drawing

SHORT = "small · 41,250 parameters"
LONG = "crt_deep · SYNTHETIC data: says nothing about real text · split 1 of 5, seed 42, rows in order · " * 3
NAME = "a_run_that_somebody_called_by_everything_that_is_set_in_it_" * 4


@pytest.mark.parametrize("title", [SHORT, LONG, NAME, f"{NAME} {LONG}", "from $1 to $2", "a\x1b[31m b", "w" * 400])
@pytest.mark.parametrize(("panels", "size"), [(1, (7.0, 3.6)), (4, (17.5, 4.1))])
def test_a_long_title_takes_more_lines_and_the_figure_grows_by_them(
    title: str, panels: int, size: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Figure] = []

    def keep(figure: Any, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        saved.append(figure)

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", keep)
    with drawing(tmp_path / "a.png", title, panels, size) as axes:
        for axis in axes:
            axis.plot([1, 2], [1, 2])
    (figure,) = saved
    written = figure.get_suptitle()
    shown = title.replace("\x1b", "\ufffd")
    assert "".join(written.split()) == "".join(shown.split()), "every letter is there"
    (place,) = figure.texts
    box, text = figure.bbox, place.get_window_extent()
    assert text.x0 >= 0 and text.x1 <= box.width and text.y0 >= 0 and text.y1 <= box.height
    assert all(axis.get_window_extent().y1 <= text.y0 for axis in figure.axes), "it lies on no axes"
    lines = written.count("\n")
    assert (lines > 0) if len(title) > 200 else (lines == 0)
    assert figure.get_figheight() == pytest.approx(size[1] + lines * 11 * 1.2 / 72)
    assert figure.axes[0].get_window_extent().height > 0.5 * size[1] * figure.dpi
