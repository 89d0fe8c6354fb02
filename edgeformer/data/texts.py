"""LabelledTexts: the rows of a part with their labels as class indices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeformer.data.rows import Row
from edgeformer.data.sources import read
from edgeformer.formats.data_config import DataConfig
from edgeformer.formats.errors import DataError


@dataclass(frozen=True)
class LabelledTexts:
    """``texts`` [n] as the source has them, not cleaned; ``labels`` int64 [n], indices into data.labels."""

    texts: list[str]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: NDArray[np.int64]) -> LabelledTexts:
        """The rows at ``indices``, in that order."""
        return LabelledTexts([self.texts[i] for i in indices.tolist()], self.labels[indices])

    def fingerprint(self) -> str:
        """sha256 over texts and labels, in order."""
        digest = hashlib.sha256(np.ascontiguousarray(self.labels, dtype="<i8").tobytes())
        for text in self.texts:
            content = text.encode("utf-8")
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
        return digest.hexdigest()


def label_rows(rows: Iterable[Row], labels: Sequence[str]) -> LabelledTexts:
    """Map each row's label to its class index.

    A label is matched by name first (so that labels may be called "1" … "5"), then read as an index.

    Raises:
        DataError: a label that is neither, or a row without one.
    """
    by_name = {name: index for index, name in enumerate(labels)}
    texts: list[str] = []
    indices: list[int] = []
    for row in rows:
        indices.append(_index(row, by_name))
        texts.append(row.text)
    return LabelledTexts(texts, np.array(indices, dtype=np.int64))


def _index(row: Row, by_name: dict[str, int]) -> int:
    name = str(row.label)
    if row.label is not None:
        if name in by_name:
            return by_name[name]
        # isdecimal alone lets other scripts' digits through; those are names, not indices.
        if name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < len(by_name):
            return int(name)
    allowed = ", ".join(by_name)
    problem = "has no label" if row.label is None else f"label {row.label!r} is not in the set"
    raise DataError(
        f"{row.where}: {problem}; allowed: {allowed} (or their numbers 0 to {len(by_name) - 1}); "
        "change the row, or data.labels"
    )


def load_part(config: DataConfig, part: str) -> LabelledTexts:
    """Read all sources of one part, one after the other. Raises DataError, MissingDependencyError."""
    rows = (row for source in config.parts[part] for row in read(source, config.labels))
    return label_rows(rows, config.labels)


def load_parts(config: DataConfig) -> dict[str, LabelledTexts]:
    """Read every part of the config. Raises DataError, MissingDependencyError."""
    return {part: load_part(config, part) for part in config.parts}
