"""Charts of a report."""

from __future__ import annotations

from edgeformer.report.charts import bubble_legend
from edgeformer.report.context import ranked_candidates
from tests.report.made_reports import made_report, made_search


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
