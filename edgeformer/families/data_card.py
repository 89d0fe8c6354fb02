"""What a model card says of the texts: labels in each set with their shares, and how long the texts are."""

from __future__ import annotations

from tabulate import tabulate

from edgeformer.formats.escaping import markdown
from edgeformer.formats.lengths import Lengths
from edgeformer.formats.manifest import DataSummary

_MOST_LABELS = 6
"""More columns than a reader can compare: run.json has them all."""


def data_tables(data: DataSummary) -> str:
    """A table of labels and one of lengths as Markdown, each with a heading; nothing where nothing was counted."""
    tables = []
    labels = list(next(iter(data.label_rows.values()), {}))
    if labels and len(labels) <= _MOST_LABELS:
        rows = [[markdown(name), *_shares(counts, data.rows[name])] for name, counts in data.label_rows.items()]
        tables.append("## Labels\n\n" + _table(["set", "rows", *map(markdown, labels)], rows))
    if data.text_words:
        rows = [[markdown(name), *_lengths(data, name)] for name in data.text_words]
        header = ["set", "words: least", "median", "mean", "most", "tokens read: median", "most", "texts cut"]
        said = "Words of a text are counted once it is cleaned; tokens as the model reads them, special ones included."
        tables.append(f"## Lengths\n\n{_table(header, rows)}\n{said}\n")
    return "".join(f"{table}\n" for table in tables)


def _table(header: list[str], rows: list[list[str]]) -> str:
    align = ("left", *("right" for _ in header[1:]))
    return tabulate(rows, header, tablefmt="github", disable_numparse=True, colalign=align) + "\n"


def _shares(counts: dict[str, int], rows: int) -> list[str]:
    return [f"{rows:,}", *(f"{count:,} ({count / max(rows, 1):.2%})" for count in counts.values())]


def _lengths(data: DataSummary, name: str) -> list[str]:
    words, tokens = data.text_words[name], data.text_tokens.get(name)
    cut = data.truncated_rows.get(name, 0)
    return [
        f"{words.min:,}", _middle(words), f"{words.mean:.1f}", f"{words.max:,}",
        *(["", ""] if tokens is None else [_middle(tokens), f"{tokens.max:,}"]),
        f"{cut:,} ({cut / max(data.rows[name], 1):.1%})",
    ]  # fmt: skip


def _middle(lengths: Lengths) -> str:
    return f"{lengths.median:,.1f}".removesuffix(".0")
