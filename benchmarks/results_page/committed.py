"""Tables in benchmarks/results/studies: those that show a study as it is written, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeformer.artifacts.errors import InputError


def read_table(path: Path) -> dict[str, Any] | None:
    """The table of a file; None where it holds something else: single runs lie beside the tables.

    Raises:
        InputError: it shows a part of the study, or a study that was changed on the command line.
    """
    document = json.loads(path.read_text(encoding="utf-8"))
    if "study" not in document or "columns" not in document:
        return None
    for key, messages in (("overrides", "--set"), ("only", "--only"), ("seeds", "--seeds")):
        if document.get(key):
            parameters = " ".join(map(str, document[key]))
            raise InputError(
                f"{path}: {key}: made with {messages} {parameters}, so it is not the study {document['study']} as it "
                "is written; only whole tables are committed"
            )
    return dict(document)


def tables(folder: Path) -> list[dict[str, Any]]:
    """Every table of a folder, by file name. Raises InputError as :func:`read_table` does."""
    results = [read_table(path) for path in sorted(folder.glob("*.json"))]
    return [document for document in results if document is not None]
