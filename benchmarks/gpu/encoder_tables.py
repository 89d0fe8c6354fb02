"""Row 3: paper A's encoders on SST-2, by the paper's own protocol first, then by ours; and what FP16 costs them."""

from __future__ import annotations

from benchmarks.gpu.session import Column, Figures, Row, Session
from benchmarks.gpu.tables import options_of, tabulated

STUDIES = ("own-protocol", "controls", "table6", "table13", "table7", "table9", "table10")
FP16 = "FP16"
ALLOWED = 1e-3
"""Accuracy that FP16 may cost."""


def measure(session: Session) -> None:
    """One study after the other; they share their runs."""
    for name in STUDIES:
        session.case(name, lambda name=name: tabulated(session, name))  # type: ignore[misc]
    session.case(FP16, lambda: _scored_in_fp16(session))
    if (figures := session.figures(FP16)) is not None and figures["accuracy_cost"] is not None:
        session.conclude({"within": abs(figures["accuracy_cost"]) <= ALLOWED})


def _scored_in_fp16(session: Session) -> Figures:
    """Score the runs of the first two studies that this session trained, in FP32 and FP16."""
    from benchmarks.gpu.half_precision import score_run
    from benchmarks.studies.study import plan_study
    from edgeformer.artifacts.workspace import MODEL_FOLDER

    options = options_of(session, train=False)
    outcomes = [outcome for name in STUDIES[:2] for outcome in plan_study(name, options).outcomes]
    encoders = [outcome.job.folder_name for outcome in outcomes if outcome.job.written.model.kind == "encoder"]
    folders = [session.work / name for name in dict.fromkeys(encoders)]
    runs = {folder.name: score_run(folder, "random-split") for folder in folders if (folder / MODEL_FOLDER).is_dir()}
    costs = (run["fp32"]["accuracy"] - run["fp16"]["accuracy"] for run in runs.values())
    return {"scores": runs, "differing": sum(run["differing"] for run in runs.values()),
            "accuracy_cost": max(costs, key=abs, default=None)}  # fmt: skip


ROW = Row(
    number=3,
    topic="encoder-tables",
    question="what do paper A's encoders score by its own protocol?",
    wanted="scores beside the published ones; FP16 costs at most 0.001 of accuracy",
    measure=measure,
    columns=(
        Column("rows that are missing", "missing"),
        Column("minutes of training", "minutes", "{:,.1f}"),
        Column("answers that differ in FP16", "differing"),
        Column("accuracy that FP16 costs", "accuracy_cost", "{:.4f}"),
    ),
)
