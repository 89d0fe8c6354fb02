"""The checklist: its rows in the order of worth. A closed row has results, and no script any more."""

from __future__ import annotations

from benchmarks.gpu import (
    batch_sizes,
    causal_crt,
    encoder_tables,
    energy,
    estimates,
    folded_language,
    folding,
    levers,
    number_formats,
)
from benchmarks.gpu.session import Column, Row

_MODULES = (
    levers, encoder_tables, causal_crt, estimates, number_formats, energy, folding, batch_sizes, folded_language,
)  # fmt: skip
_CLOSED = (
    Row(
        1, "six-gigabytes", "does the CRT-Deep recipe really train in 6 GB?",
        "no step runs out of memory, and the predicted peak is at most 10% off the measured one", None,
        (Column("predicted peak, bytes", "predicted_peak_bytes", "{:,}"),
         Column("tensors of it, bytes", "predicted_tensor_bytes", "{:,}"),
         Column("measured peak, bytes", "measured_peak_bytes", "{:,}"),
         Column("reserved peak, bytes", "reserved_peak_bytes", "{:,}"), Column("budget, bytes", "budget_bytes", "{:,}"),
         Column("rows at a time", "batch_size"), Column("tokens/s", "tokens_per_s", "{:,.0f}")),
    ),
    Row(
        4, "early-exit", "how much faster is it really to leave after loop 2, 4 or 6 of 8?",
        "measured ratios beside the claimed ones: 4.0, 2.0 and 1.33", None,
        (Column("all loops, ms", "ms.8", "{:.3f}"),
         *(Column(f"times as fast after {n} (claimed {claimed})", f"all_loops_over_exit.{n}.median", "{:.2f}")
           for n, claimed in ((2, 4.0), (4, 2.0), (6, 1.33)))),
    ),
    Row(
        9, "marked-tests", "do the tests that need a card pass on it?", "all pass; skipped ones lack a library", None,
        (Column("passed", "passed"), Column("failed", "failed"), Column("skipped", "skipped")),
    ),
    Row(
        12, "out-of-memory", "does a real out-of-memory survive?",
        "training goes on with half the rows at a time and the same losses, in bf16 and fp16", None,
        (Column("rows at a time", "batch_size"), Column("first loss", "first_loss", "{:.4f}"),
         Column("last loss", "last_loss", "{:.4f}"), Column("error", "error", "{:.37}")),
    ),
)  # fmt: skip
ROWS: tuple[Row, ...] = tuple(sorted((*_CLOSED, *(module.ROW for module in _MODULES)), key=lambda row: row.number))
