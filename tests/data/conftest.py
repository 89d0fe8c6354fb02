"""Helpers of the data tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import TextConfig
from edgeformer.artifacts.progress import Progress
from edgeformer.data.rows import Row
from edgeformer.tasks import Origin, TextReader, get_task


class Recorder(Progress):
    """Records the messages, the titles of the bars and the number of rows of a progress display."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.bars: list[str] = []
        self.rows = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.bars.append(description)

    def advance(self, amount: int = 1, **fields: Any) -> None:
        self.rows += amount


def write_jsonl(path: Path, rows: Iterable[Row], opener: Any = open) -> Path:
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": row.text, "label": row.label}) + "\n" for row in rows)
    return path


def write_parquet(path: Path, rows: Iterable[Row]) -> Path:
    """Write the texts and labels of rows; skips the test without the library."""
    import pytest

    datasets = pytest.importorskip("datasets")
    texts, labels = zip(*((row.text, row.label) for row in rows), strict=True)
    datasets.Dataset.from_dict({"text": texts, "label": labels}).to_parquet(path)
    return path


def file_sources(path: Path, **settings: Any) -> list[dict[str, Any]]:
    return [{"kind": "file", "path": str(path), **settings}]


def read_set(data: Any, tokenizer: Tokenizer, split: str, trained_on: dict[str, str] | None = None) -> Any:
    task = get_task("language-modeling" if isinstance(data, TextConfig) else "classification")
    return task.rows.read_set(data, TextReader(tokenizer, 0, 0), split, Origin(trained_on or {}, as_trained=True))


def read_file(data: Any, tokenizer: Tokenizer, path: Path) -> Any:
    task = get_task("language-modeling" if isinstance(data, TextConfig) else "classification")
    return task.rows.encode_rows(data, TextReader(tokenizer, 0, 0), task.rows.file_texts(data, path), as_trained=True)
