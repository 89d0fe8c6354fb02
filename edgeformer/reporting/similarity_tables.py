"""Terminal tables of what an embedding model says of texts: cosines, and the nearest of a list."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from rich.table import Table
from rich.text import Text

from edgeformer.reporting.columns import Column, Columns
from edgeformer.stages.evaluating.similarity import Similarities

MOST_IN_A_MATRIX = 10
"""More texts than this are shown each with the one that is nearest to it."""


def similarity_table(name: str, found: Similarities) -> Table:
    """How similar the texts are to each other, or which of a list are nearest to each.

    Args:
        name: of the run or bundle.
        found: of one text or more.
    """
    title = f"{name} · {found.artifact}"
    if found.nearest is not None:
        return _nearest(title, found)
    if len(found.texts) == 1:
        return _vector(title, found)
    return _matrix(title, found) if len(found.texts) <= MOST_IN_A_MATRIX else _pairs(title, found)


def _nearest(title: str, found: Similarities) -> Table:
    rows = [
        (text if rank == 1 else "", rank, match.cosine, match.text)
        for text, matches in zip(found.texts, found.nearest or (), strict=True)
        for rank, match in enumerate(matches, start=1)
    ]
    columns: list[Column[Any]] = [
        Column("text", itemgetter(0)),
        Column("rank", itemgetter(1), number=True),
        Column("cosine", itemgetter(2), text=lambda row: f"{row[2]:.4f}", number=True),
        Column("nearest", itemgetter(3)),
    ]
    return Columns(columns).terminal(title, rows)


def _vector(title: str, found: Similarities) -> Table:
    vector: Any = found.predictions[0]["vector"]
    columns: list[Column[Any]] = [
        Column("dimensions", lambda _: len(vector), number=True),
        Column("vector", lambda _: ", ".join(f"{number:.4f}" for number in vector[:5]) + ", …"),
        Column("text", itemgetter(0)),
    ]
    caption = Text("give a second text for their cosine, or --nearest FILE; --json has the whole vector")
    return Columns(columns).terminal(title, [found.texts], caption)


def _matrix(title: str, found: Similarities) -> Table:
    """Two texts have one figure; of more, every text has a number, and a column with its cosines."""
    texts = found.texts
    if len(texts) == 2:
        columns: list[Column[Any]] = [
            Column("cosine", lambda _: found.cosines[0][1], text=lambda _: f"{found.cosines[0][1]:.4f}", number=True),
            Column("text", itemgetter(0)),
            Column("other text", itemgetter(1)),
        ]
        return Columns(columns).terminal(title, [texts])

    def cosine(number: int) -> Column[Any]:
        return Column(
            f"{number + 1}",
            lambda row: found.cosines[row][number],
            text=lambda row: f"{found.cosines[row][number]:.4f}" if row != number else "",
            number=True,
        )

    columns = [
        Column("", lambda row: row + 1, number=True),
        *map(cosine, range(len(texts))),
        Column("text", lambda row: texts[row]),
    ]
    return Columns(columns).terminal(title, range(len(texts)))


def _pairs(title: str, found: Similarities) -> Table:
    """Every text with the other one that is nearest to it."""
    columns: list[Column[Any]] = [
        Column("text", lambda row: found.texts[row]),
        Column("cosine", lambda row: max(_others(found.cosines[row], row)), text=lambda row: _best(found, row)[0]),
        Column("nearest", lambda row: _best(found, row)[1]),
    ]
    return Columns(columns).terminal(title, range(len(found.texts)))


def _others(cosines: Sequence[float], row: int) -> list[float]:
    return [cosine for number, cosine in enumerate(cosines) if number != row]


def _best(found: Similarities, row: int) -> tuple[str, str]:
    cosine, number = max((value, -place) for place, value in enumerate(found.cosines[row]) if place != row)
    return f"{cosine:.4f}", found.texts[-number]
