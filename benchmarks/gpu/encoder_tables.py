"""Row 3: the papers' encoder tables, by the published protocol with three seeds first, then by ours."""

from __future__ import annotations

from benchmarks.gpu.session import Column, Row, Session, main
from benchmarks.gpu.tables import OWN, tabulated

PUBLISHED = "published protocol"
STUDIES = {PUBLISHED: str(OWN / "published.yaml")} | {
    name: name for name in ("table6", "table13", "table7", "table9", "table10", "table11", "table12")
}
ALLOWED = 1e-3
"""Accuracy that FP16 may cost."""


def measure(session: Session) -> None:
    """One study after the other; they share their runs."""
    for title, name in STUDIES.items():
        session.case(title, lambda name=name: tabulated(session, name))  # type: ignore[misc]
    results = session.figures(PUBLISHED)
    if results is None:
        return
    # A label may have commas of its own: the last one parts it from the precision.
    means = {
        tuple(name.rsplit(", ", 1)): cells.get("accuracy", {}).get("mean") for name, cells in results["rows"].items()
    }
    costs = {
        label: means[label, "fp16"] - value
        for (label, place), value in means.items()
        if place == "fp32" and value is not None and means.get((label, "fp16")) is not None
    }
    session.conclude({"fp16_less_fp32_accuracy": costs, "within": all(abs(cost) <= ALLOWED for cost in costs.values())})


ROW = Row(
    number=3,
    topic="encoder-tables",
    question="what do paper A's encoders score by its own protocol?",
    wanted="scores beside the published ones; FP16 costs at most 0.001 of accuracy",
    measure=measure,
    columns=(Column("rows that are missing", "missing"), Column("minutes of training", "minutes", "{:,.1f}")),
    module="encoder_tables",
)

if __name__ == "__main__":
    raise SystemExit(main(ROW))
