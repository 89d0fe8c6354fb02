"""Charts of a report."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from edgeformer.artifacts.report import Report, Work
from edgeformer.report.charts import CHARTS, bubble_legend
from edgeformer.report.context import ranked_candidates
from tests.report.made_reports import ARTIFACT_NAMES, crowded_report, made_report, made_search


def test_bubbles_of_many_candidates_are_numbered_as_in_the_table() -> None:
    first = made_search().candidates[0]
    candidates = tuple(
        first.model_copy(update={"artifact": f"a{i}", "latency_ms": 9.0 - i, "on_front": i == 5, "feasible": i != 6})
        for i in range(7)
    )
    search = made_search().model_copy(update={"candidates": candidates, "pick": 5})
    ranked = ranked_candidates(search)
    assert [(row.number, row.candidate.artifact) for row in ranked][:2] == [(1, "a5"), (2, "a4")]
    assert ranked[-1].candidate.artifact == "a6"
    assert bubble_legend(made_report(search=search)) == ["1  a5 ≈ ← pick"]


def roofline(report: Report) -> Any:
    axis = Figure(figsize=(4.7, 4.3), layout="constrained").subplots()
    CHARTS["roofline"].draw(axis, report)
    axis.figure.canvas.draw()
    return axis


def test_labels_of_a_roofline_do_not_overlap() -> None:
    report = crowded_report()
    works = [Work(operations=4e8, bytes_moved=3e7 + n, weight_bytes=2e7, operators=90, kernels=40) for n in range(22)]
    rows = [row.model_copy(update={"work": work}) for row, work in zip(report.rows, works, strict=True)]
    shorter = [row.model_copy(update={"seq": 16}) for row in rows]
    for drawn in (rows, [*rows, *shorter]):
        axis = roofline(report.model_copy(update={"rows": tuple(drawn)}))
        texts = [text for text in axis.texts if text.get_text()]
        boxes = [text.get_window_extent() for text in texts]
        pairs = [(a, b) for index, a in enumerate(boxes) for b in boxes[:index]]
        assert not any(a.overlaps(b) for a, b in pairs), [text.get_text() for text in texts]
        legend = [text.get_text() for text in axis.get_legend().get_texts()]
        assert set(legend) >= {*ARTIFACT_NAMES, "estimated", "on this host"}
