"""Parts of a recipe's data: the rows of all their sources, or as many of them as these say."""

from __future__ import annotations

from collections.abc import Iterator

from edgeformer.data.labelled import LabelledTexts, label_rows
from edgeformer.data.rows import Row, Told
from edgeformer.data.selection import sampled_rows
from edgeformer.data.sources import read, with_text
from edgeformer.formats.data_config import DataConfig


def source_rows(config: DataConfig, part: str, number: int, empty: Told = lambda row: None) -> Iterator[Row]:
    """Rows of one source of a part, as many as its ``rows`` says, as :func:`with_text` has them."""
    source = config.parts[part][number]

    def rows(told: Told) -> Iterator[Row]:
        return with_text(read(source, config.labels, config.separator), told)

    if source.kind == "synthetic-reviews" or source.rows is None:  # a generator makes as many as are wanted
        return rows(empty)
    key = f"data.parts.{part}.{number}.rows"
    return sampled_rows(rows, source.rows, config.split_seed, key, empty)


def part_rows(config: DataConfig, part: str, empty: Told = lambda row: None) -> Iterator[Row]:
    """Rows of all sources of one part, one after the other, as :func:`source_rows` has them."""
    return (row for number in range(len(config.parts[part])) for row in source_rows(config, part, number, empty))


def load_part(config: DataConfig, part: str, empty: Told = lambda row: None) -> LabelledTexts:
    """Read :func:`part_rows`; with the numbers of their sources where rows are balanced by these.

    Raises DataError, MissingDependencyError.
    """
    if config.balance in (None, "label"):
        return label_rows(part_rows(config, part, empty), config.labels)
    numbers = range(len(config.parts[part]))
    found = [label_rows(source_rows(config, part, number, empty), config.labels) for number in numbers]
    return LabelledTexts.joined(found, apart=True)


def load_parts(config: DataConfig) -> dict[str, LabelledTexts]:
    """Read every part of the config. Raises DataError, MissingDependencyError."""
    return {part: load_part(config, part) for part in config.parts}
