"""The picture of how long a run's texts are: word counts of each set (paper A, figure 3), with our own numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgeformer.formats.caution import cautions
from edgeformer.formats.lengths import Lengths
from edgeformer.formats.manifest import DataSummary
from edgeformer.reporting.canvas import BLUE, GREY, INK, ORANGE, can_draw, drawing
from edgeformer.reporting.panels import named, plain
from edgeformer.run import read_run

_MOST_SETS = 5
_LABELS = 4
"""Of which shares are written over a panel."""


def draw_text_lengths(run: Path) -> Path | None:
    """Write ``plots/text_lengths.png``: how many texts of each set have how many words.

    Returns:
        Its path; None where matplotlib is not installed, or the run knows of no lengths.
    """
    manifest = read_run(run)
    sets = list(manifest.data.text_words.items())[:_MOST_SETS]
    if not sets or not can_draw():
        return None
    path = run / "plots" / "text_lengths.png"
    title = " · ".join((manifest.run, "words of a text, once cleaned", *cautions(manifest)))
    with drawing(path, plain(title), len(sets), (3.6 * len(sets) + 0.6, 3.7)) as axes:
        for axis, (name, lengths) in zip(axes, sets, strict=True):
            _draw(axis, lengths)
            axis.set_title(
                f"{plain(named(name))} · {sum(lengths.texts):,} texts{_labels(manifest.data, name)}", fontsize=9
            )
        axes[0].set_ylabel("texts")
    return path


def _draw(axis: Any, lengths: Lengths) -> None:
    width = lengths.edges[1] - lengths.edges[0]
    colours = [BLUE] * len(lengths.texts)
    if lengths.max >= lengths.edges[-1]:
        colours[-1] = GREY  # it holds all longer texts, too
        axis.annotate(
            f"≥ {lengths.edges[-2]:,}", (lengths.edges[-1], lengths.texts[-1]), ha="right", va="bottom", fontsize=8,
            color=GREY,
        )  # fmt: skip
    axis.bar(lengths.edges[:-1], lengths.texts, width=width, align="edge", color=colours, linewidth=0)
    axis.axvline(lengths.median, color=ORANGE, linewidth=1.2)
    note = f"median {lengths.median:g}\nmean {lengths.mean:.1f}\n{lengths.min:,} to {lengths.max:,}"
    axis.text(0.97, 0.97, note, transform=axis.transAxes, ha="right", va="top", fontsize=8, color=INK)
    axis.set(xlabel=f"words (bins of {width})", xlim=(0, lengths.edges[-1]))


def _labels(data: DataSummary, name: str) -> str:
    """The shares of the labels in a line of their own, where they are few."""
    counts, rows = data.label_rows.get(name, {}), max(data.rows[name], 1)
    if not 0 < len(counts) <= _LABELS:
        return ""
    return "\n" + ", ".join(f"{plain(named(label))} {count / rows:.2%}" for label, count in counts.items())
