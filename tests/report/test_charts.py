"""Charts: ranges are drawn, and axes show them whole."""

import pytest

from edgeformer.report import charts
from edgeformer.report.context import ranked_candidates
from tests.report.made_reports import made_report, made_search

figure = pytest.importorskip("matplotlib.figure")


def test_ranges_of_candidates_are_drawn_whole() -> None:
    search = made_search()
    ends = ({"low_ms": 0.5, "high_ms": 2.0, "score_low": 0.8, "score_high": 0.97}, {"low_ms": 1.5, "high_ms": 6.0})
    candidates = tuple(c.model_copy(update=update) for c, update in zip(search.candidates, ends, strict=True))
    axis = figure.Figure().subplots()
    search = search.model_copy(update={"candidates": candidates})
    charts._draw_candidates(axis, search, {}, ranked_candidates(search))
    drawn = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axis.lines}
    assert {((0.5, 2.0), (0.91, 0.91)), ((1.0, 1.0), (0.8, 0.97)), ((1.5, 6.0), (0.92, 0.92))} <= drawn
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    assert left < 0.5 and right > 6.0 and bottom < 0.8 and top > 0.97


def test_a_far_limit_is_named_at_the_edge() -> None:
    axis = figure.Figure().subplots()
    assert charts._draw_limits(axis, made_report(), "latency", [1.0]) == []
    assert [text.get_text() for text in axis.texts] == ["limit 5.00 ms (to the right)"]
