"""Data of a model that was trained elsewhere: whatever labelled files, or scored pairs, are at hand for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeformer.data.folders import imported_parts
from edgeformer.data.sources import file_source, pairs_source


def imported_data(path: Path | None, labels: Sequence[str] | None, max_length: int) -> tuple[dict[str, Any], list[str]]:
    """A recipe's ``data`` on a file, on the files of a folder, or on nothing; and notes for the user.

    Args:
        path: a file is the test set, which stands in for the validation set; of a folder the files train, validation
            and test.
        labels: of a classifier; None: an embedding model.
        max_length: tokens.

    Raises:
        DataError: no such file or folder, or no usable columns in one.
    """
    path = path.resolve() if path is not None else None
    section: dict[str, Any] = {"parts": {}, "max_length": max_length}
    notes: list[str] = []
    if path is not None and path.is_dir():
        parts, notes = imported_parts(path, scored=labels is None)
        section["parts"] = {part: [source.model_dump() for source in sources] for part, sources in parts.items()}
    elif path is not None:
        source = pairs_source(path) if labels is None else file_source(path)
        section["parts"] = {"test": [source.model_dump()]}
    if labels is not None:
        section |= {"split": "imported", "labels": list(labels), "cleaning": "none"}
    return section, notes
