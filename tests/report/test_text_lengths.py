"""The picture of word counts has the numbers of run.json, a panel for each set; a run that knows none gets none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgeformer.report.plots import draw_text_lengths

OLD = Path(__file__).parent.parent / "old_format"
WORDS = {"min": 1, "median": 7.0, "mean": 9.5, "max": 52, "edges": [0, 2, 4, 6], "texts": [5, 3, 16]}


def test_every_set_has_its_bars_and_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path(shutil.copytree(OLD / "classifier-v1", tmp_path / "run"))
    assert draw_text_lengths(run) is None, "an earlier version counted nothing"
    manifest = json.loads((run / "run.json").read_text(encoding="utf-8"))
    sets = list(manifest["data"]["rows"])
    manifest["data"]["text_words"] = {name: {**WORDS, "max": 52 if name == "train" else 5} for name in sets}
    (run / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    panels: list[Axes] = []

    def keep(figure: Any, *arguments: Any, **options: Any) -> None:
        panels.extend(figure.axes)
        save(figure, *arguments, **options)

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", keep)
    path = draw_text_lengths(run)
    assert path == run / "plots" / "text_lengths.png" and path.is_file()
    assert len(panels) == len(sets)
    for axis, name in zip(panels, sets, strict=True):
        assert [bar.get_height() for bar in axis.patches] == [5, 3, 16]
        assert [bar.get_x() for bar in axis.patches] == [-0.5, 1.5, 3.5], "the bar of 0 and 1 words is around them"
        title = axis.get_title()
        assert title.startswith(f"{name} · 24 texts\n1 to {52 if name == 'train' else 5} words, median 7, mean 9.5\n")
        assert all(label in title for label in manifest["data"]["label_rows"][name])
        assert [text.get_text() for text in axis.texts] == (["≥ 4"] if name == "train" else [])
