"""Row 10: MiniLM and its folds, with and without adapters, five seeds each."""

from __future__ import annotations

from benchmarks.gpu.session import Column, Row, Session
from benchmarks.gpu.tables import OWN, tabulated


def measure(session: Session) -> None:
    """Teachers first, then what they teach."""
    session.case("folding", lambda: tabulated(session, str(OWN / "folding.yaml")))


ROW = Row(
    number=10,
    topic="folding",
    question="what does folding a pretrained encoder cost, over five seeds?",
    wanted="accuracy on GLUE's dev set and SST's test set, mean and standard deviation",
    measure=measure,
    columns=(Column("rows that are missing", "missing"), Column("minutes of training", "minutes", "{:,.1f}")),
)
