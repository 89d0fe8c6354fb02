"""The picture of how long a run's texts are: word counts of each set (paper A, figure 3), with our own numbers."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from edgeformer.formats.caution import cautions
from edgeformer.formats.lengths import Lengths
from edgeformer.formats.manifest import DataSummary
from edgeformer.reporting.canvas import BLUE, GREY, ORANGE, can_draw, drawing
from edgeformer.reporting.panels import named, plain
from edgeformer.run import read_run

_MOST_SETS = 5
_LABELS = 4
"""Of which shares are written over a panel."""
_CHARACTERS = 44
"""Of a line over a panel."""


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
    with drawing(path, title, len(sets), (3.6 * len(sets) + 0.6, 4.0)) as axes:
        for axis, (name, lengths) in zip(axes, sets, strict=True):
            _draw(axis, lengths)
            axis.set_title("\n".join(_lines(manifest.data, name, lengths)), fontsize=8.5, va="bottom")
        axes[0].set_ylabel("texts")
    return path


def _draw(axis: Any, lengths: Lengths) -> None:
    """Bars around whole numbers: that of one word alone reaches from 0.5 to 1.5."""
    width = lengths.edges[1] - lengths.edges[0]
    lefts = [edge - 0.5 for edge in lengths.edges[:-1]]
    bars = axis.bar(lefts, lengths.texts, width=width, align="edge", color=BLUE, linewidth=0)
    if lengths.max >= lengths.edges[-1]:
        bars[-1].set_color(GREY)  # it holds all longer texts, too
        place = (lengths.edges[-1] - 0.5, lengths.texts[-1])
        axis.annotate(f"≥ {lengths.edges[-2]:,}", place, ha="right", va="bottom", fontsize=8, color=GREY)
    axis.axvline(lengths.median, color=ORANGE, linewidth=1.2)
    axis.set(xlabel=f"words (bins of {width})" if width > 1 else "words", xlim=(-0.5, lengths.edges[-1] - 0.5))


def _lines(data: DataSummary, name: str, lengths: Lengths) -> list[str]:
    """What stands over a panel: the set, its lengths, and the shares of its labels where they are few."""
    counts, rows = data.label_rows.get(name, {}), max(data.rows[name], 1)
    shares = [f"{plain(named(label))} {count / rows:.2%}" for label, count in counts.items()]
    told = textwrap.wrap(", ".join(shares), _CHARACTERS, break_on_hyphens=False) if len(shares) <= _LABELS else []
    return [
        f"{plain(named(name))} · {sum(lengths.texts):,} texts",
        f"{lengths.min:,} to {lengths.max:,} words, median {lengths.median:g}, mean {lengths.mean:.1f}",
        *told,
    ]
