"""The checklist: its rows in the order of worth. A closed row has results, and no script any more."""

from __future__ import annotations

from benchmarks.gpu import (
    batch_sizes,
    causal_crt,
    early_exit,
    estimates,
    folded_language,
    levers,
    marked_tests,
    number_formats,
    six_gigabytes,
)
from benchmarks.gpu.session import Column, Row

_MODULES = (
    six_gigabytes, levers, early_exit, causal_crt, estimates, number_formats, marked_tests, batch_sizes,
    folded_language,
)  # fmt: skip
_STUDY = (Column("rows that are missing", "missing"), Column("minutes of training", "minutes", "{:,.1f}"))
_CLOSED = (
    Row(
        3, "encoder-tables", "what do paper A's encoders score by its own protocol?",
        "scores beside the published ones; FP16 costs at most 0.001 of accuracy", None,
        (*_STUDY, Column("answers that differ in FP16", "differing"),
         Column("accuracy that FP16 costs", "accuracy_cost", "{:.4f}")),
    ),
    Row(
        8, "energy", "what does a text cost in energy, stacked against shared layers?",
        "millijoules per text, idle subtracted", None,
        (Column("mJ per text", "mj_per_sample", "{:.2f}"), Column("how", "reason")),
    ),
    Row(
        10, "folding", "what does folding a pretrained encoder cost, over five seeds?",
        "accuracy on GLUE's dev set and SST's test set, mean and standard deviation", None, _STUDY,
    ),
    Row(
        12, "out-of-memory", "does a real out-of-memory survive?",
        "training goes on with half the rows at a time and the same losses, in bf16 and fp16", None,
        (Column("rows at a time", "batch_size"), Column("first loss", "first_loss", "{:.4f}"),
         Column("last loss", "last_loss", "{:.4f}"), Column("error", "error", "{:.37}")),
    ),
)  # fmt: skip
ROWS: tuple[Row, ...] = tuple(sorted((*_CLOSED, *(module.ROW for module in _MODULES)), key=lambda row: row.number))
