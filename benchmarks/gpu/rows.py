"""The checklist: its rows in the order of worth."""

from __future__ import annotations

from benchmarks.gpu import (
    batch_sizes,
    causal_crt,
    early_exit,
    encoder_tables,
    energy,
    estimates,
    folded_language,
    folding,
    levers,
    marked_tests,
    number_formats,
    out_of_memory,
    six_gigabytes,
)
from benchmarks.gpu.session import Row

_MODULES = (
    six_gigabytes, levers, encoder_tables, early_exit, causal_crt, estimates, number_formats, energy, marked_tests,
    folding, batch_sizes, out_of_memory, folded_language,
)  # fmt: skip
ROWS: tuple[Row, ...] = tuple(sorted((module.ROW for module in _MODULES), key=lambda row: row.number))
