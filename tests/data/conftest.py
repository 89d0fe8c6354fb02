"""Helpers of the data tests."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from edgeformer.artifacts.data_config import TextConfig
from edgeformer.data.rows import Row
from edgeformer.tasks import Origin, TextReader, get_task


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_jsonl(path: Path, rows: Iterable[Row], opener: Any = open) -> Path:
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": row.text, "label": row.label}) + "\n" for row in rows)
    return path


def write_parquet(path: Path, rows: Iterable[Row]) -> Path:
    """Write the texts and labels of rows; skips the test without the library."""
    import pytest

    texts, labels = zip(*((row.text, row.label) for row in rows), strict=True)
    pytest.importorskip("datasets").Dataset.from_dict({"text": texts, "label": labels}).to_parquet(path)
    return path


def file_sources(path: Path, **settings: Any) -> list[dict[str, Any]]:
    return [{"kind": "file", "path": str(path), **settings}]


def read_set(data: Any, tokenizer: Tokenizer, split: str, trained_on: dict[str, str] | None = None) -> Any:
    task = get_task("language-modeling" if isinstance(data, TextConfig) else "classification")
    return task.rows.read_set(data, TextReader(tokenizer, 0, 0), split, Origin(trained_on or {}, as_trained=True))


def read_file(data: Any, tokenizer: Tokenizer, path: Path) -> Any:
    task = get_task("language-modeling" if isinstance(data, TextConfig) else "classification")
    return task.rows.encode_rows(data, TextReader(tokenizer, 0, 0), task.rows.file_texts(data, path), as_trained=True)
