"""The checklist: its rows in the order of worth. A closed row has results, and no script any more."""

from __future__ import annotations

from benchmarks.gpu import early_exit, levers, number_formats, six_gigabytes
from benchmarks.gpu.session import Column, Row

_MODULES = (six_gigabytes, levers, early_exit, number_formats)
_STUDY = (Column("rows that are missing", "missing"), Column("minutes of training", "minutes", "{:,.1f}"))
_CLOSED = (
    Row(
        3, "encoder-tables", "what do paper A's encoders score by its own protocol?",
        "scores beside the published ones; FP16 costs at most 0.001 of accuracy", None,
        (*_STUDY, Column("answers that differ in FP16", "differing"),
         Column("accuracy that FP16 costs", "accuracy_cost", "{:.4f}")),
    ),
    Row(
        5, "causal-crt", "what perplexity does the causal CRT-Deep reach on WikiText-2, at every exit?",
        "honest figures per token and per word; the probe finds no leak", None,
        (Column("epochs", "epochs"), Column("perplexity per token", "perplexity", "{:.2f}"),
         Column("per word", "word_perplexity", "{:.1f}"), Column("leaks", "leaks")),
    ),
    Row(
        6, "estimates", "how far are the estimates for this card from what it takes?",
        "the ratio of measured to estimated times, and how often the range holds the measurement", None,
        tuple(
            Column(f"{label}: {what}", f"shapes.{place}.{key}", "{:.3f}")
            for place, label in ((0, "first shape"), (-1, "last shape"))
            for key, what in (("low_ms", "low, ms"), ("high_ms", "high, ms"), ("measured_over_estimated", "off by"))
        ),
    ),
    Row(
        8, "energy", "what does a text cost in energy, stacked against shared layers?",
        "millijoules per text, idle subtracted", None,
        (Column("mJ per text", "mj_per_sample", "{:.2f}"), Column("how", "reason")),
    ),
    Row(
        9, "marked-tests", "do the tests that need a card pass on it?", "all pass; skipped ones lack a library", None,
        (Column("passed", "passed"), Column("failed", "failed"), Column("skipped", "skipped")),
    ),
    Row(
        10, "folding", "what does folding a pretrained encoder cost, over five seeds?",
        "accuracy on GLUE's dev set and SST's test set, mean and standard deviation", None, _STUDY,
    ),
    Row(
        11, "batch-sizes", "is the card busy with 2, 4 and 8 rows at a time at the same effective batch?",
        "2 rows at a time reach the speed of 8, or a larger batch that fits becomes the recipe's", None,
        (Column("tokens/s", "tokens_per_s", "{:,.0f}"), Column("rows at a time", "batch_size")),
    ),
    Row(
        12, "out-of-memory", "does a real out-of-memory survive?",
        "training goes on with half the rows at a time and the same losses, in bf16 and fp16", None,
        (Column("rows at a time", "batch_size"), Column("first loss", "first_loss", "{:.4f}"),
         Column("last loss", "last_loss", "{:.4f}"), Column("error", "error", "{:.37}")),
    ),
    Row(
        13, "folded-language", "what perplexity does SmolLM2 keep when its layers are folded and trained?",
        "perplexity of WikiText-2 after three epochs, beside the teacher's own", None,
        (Column("parameters", "parameters", "{:,}"), Column("perplexity, test", "perplexity.test", "{:.2f}")),
    ),
)  # fmt: skip
ROWS: tuple[Row, ...] = tuple(sorted((*_CLOSED, *(module.ROW for module in _MODULES)), key=lambda row: row.number))
