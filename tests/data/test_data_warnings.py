from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.data_config import DataConfig
from edgeformer.artifacts.manifest import DataFinding
from edgeformer.data.data_warnings import label_findings
from edgeformer.data.prepare import data_findings
from edgeformer.data.sources import load_part
from tests.data.conftest import file_sources, read_file, write
from tests.tasks.test_embedding import tiny_tokenizer

CLEAN = [(f"row number {n} is {'fine' if n % 2 else 'dull'}", "good" if n % 2 else "bad") for n in range(40)]


def config(folder: Path, rows: Sequence[tuple[str, str]], **options: Any) -> DataConfig:
    path = write(folder, "mine.csv", "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows))
    return config_of(file_sources(path), max_length=16, **options)


def config_of(sources: list[dict[str, Any]], **options: Any) -> DataConfig:
    document = {"parts": {"train": sources}, "split": "stratified", "labels": ["bad", "good"]}
    return DataConfig.model_validate({**document, **options})


def findings_of(config: DataConfig) -> dict[str, DataFinding]:
    findings = {finding.kind: finding for finding in data_findings(config)}
    assert all(finding.message and "\n" not in finding.message for finding in findings.values())
    return findings


def test_empty_texts_are_left_out_and_reported(tmp_path: Path) -> None:
    chosen = config(tmp_path, [*CLEAN[:3], ("", "bad"), (" \t", "good"), *CLEAN[3:]])
    finding = findings_of(chosen)["empty texts"]
    assert (finding.rows, finding.examples) == (2, ("mine.csv, line 5", "mine.csv, line 6"))
    assert finding.message == "train: 2 rows without a text: left out (mine.csv, line 5; mine.csv, line 6)"
    rows = load_part(chosen, "train")
    assert rows.texts == [text for text, _ in CLEAN]
    assert rows.fingerprint() == load_part(config(tmp_path, CLEAN), "train").fingerprint()
    chosen = config(tmp_path, [("a film", "good"), (" ", "bad")])
    encoded = read_file(chosen, tiny_tokenizer(), tmp_path / "mine.csv")
    assert (len(encoded), encoded.empty) == (1, 1)


def test_repeated_texts_are_reported_with_their_lines(tmp_path: Path) -> None:
    rows = [*CLEAN, CLEAN[0], (CLEAN[1][0].upper() + "  ", "good"), CLEAN[0]]
    finding = findings_of(config(tmp_path, rows))["duplicates"]
    assert finding.rows == 3
    places = ((42, 2), (43, 3), (44, 2))
    assert finding.examples == tuple(f"mine.csv, line {row} as in mine.csv, line {other}" for row, other in places)
    assert "rows with the same text stay in one set" in finding.message
    finding = findings_of(config(tmp_path, rows, split="random-split"))["duplicates"]
    assert finding.rows == 3 and "one set" not in finding.message
    assert findings_of(config(tmp_path, CLEAN)) == {}
    assert data_findings(config_of([{"kind": "synthetic-reviews", "rows": 900}], labels=["negative", "positive"])) == []


def test_contradictions_are_reported_with_both_labels(tmp_path: Path) -> None:
    rows = [*CLEAN, (CLEAN[3][0], "bad"), (CLEAN[3][0], "good"), (CLEAN[0][0], "good")]
    finding = findings_of(config(tmp_path, rows))["contradictions"]
    assert finding.rows == 5  # three rows of one text, two of the other
    assert finding.message.startswith("train: 2 texts have different labels in 5 rows: kept, although no model can be")
    assert finding.examples[0] == "mine.csv, line 2 'bad', mine.csv, line 44 'good': 'row number 0 is dull'"
    assert finding.examples[1] == "mine.csv, line 5 'good', mine.csv, line 42 'bad': 'row number 3 is fine'"


def test_labels_without_rows_are_reported_for_every_set() -> None:
    rows = {"train": (5, 5, 0), "test": (1, 1, 0), "validation": (1, 0, 0)}
    counts = {name: dict(zip("abc", numbers, strict=True)) for name, numbers in rows.items()}
    findings = label_findings(config_of(file_sources("mine.csv"), labels=["a", "b", "c"]), counts)
    assert [finding.message for finding in findings] == [
        "train: no row has the label 'c': the model cannot learn it",
        "validation: no row has the label 'b': how well the model recognises it is not scored",
    ]


@pytest.mark.parametrize(("rare", "is_uneven"), [(10, True), (11, False)])
def test_uneven_labels_are_reported_with_a_baseline(rare: int, is_uneven: bool) -> None:
    counts = {"train": {"a": 100, "b": rare}, "test": {"a": 9, "b": 1}}
    findings = label_findings(config_of(file_sources("mine.csv"), labels=["a", "b"]), counts)
    message = "train: labels are uneven: 'b' has 10 rows (9.1%); always answering 'a' has an accuracy of 0.9000 on test"
    assert [finding.message for finding in findings] == [message] * is_uneven


def test_validation_texts_of_the_training_set_are_reported(tmp_path: Path) -> None:
    """There are so few different texts that no group of them is a tenth: a plain tenth is held out."""
    chosen = config(tmp_path, [("yes please", "good"), ("no thanks", "bad")] * 60)
    source = chosen.parts["train"]
    chosen = chosen.model_copy(update={"split": "glue-dev", "parts": {"train": source, "validation": source}})
    finding = findings_of(chosen)["seen texts"]
    assert finding.rows == 12 and "12 rows of 12 are also in the training set" in finding.message
