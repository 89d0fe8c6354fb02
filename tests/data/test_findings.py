"""What the owner of a data set hears of it: how many rows, where the first ones stand, and what happens with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.data_config import DataConfig, TrainedTokenizer
from edgeformer.artifacts.manifest import DataFinding
from edgeformer.data.data_warnings import label_findings
from edgeformer.data.prepare import encode_file, look, prepare
from edgeformer.data.rows import Row
from edgeformer.data.sources import load_part, part_rows, skip_empty
from tests.tasks.test_embedding import tiny_tokenizer

CLEAN = [(f"row number {n} is {'fine' if n % 2 else 'dull'}", "good" if n % 2 else "bad") for n in range(40)]


def config(folder: Path, rows: Sequence[tuple[str, str]], **settings: Any) -> DataConfig:
    lines = "".join(f'"{text}",{label}\n' for text, label in rows)
    (folder / "mine.csv").write_text(f"text,label\n{lines}", encoding="utf-8")
    source = {"kind": "file", "path": str(folder / "mine.csv")}
    document = {"parts": {"train": [source]}, "split": "stratified", "labels": ["bad", "good"], "max_length": 16}
    return DataConfig.model_validate({**document, **settings})


def found(made: DataConfig) -> dict[str, DataFinding]:
    findings = {finding.kind: finding for finding in look(made)}
    assert all(finding.message and "\n" not in finding.message for finding in findings.values())
    return findings


def test_nothing_is_said_of_clean_data(tmp_path: Path) -> None:
    assert found(config(tmp_path, CLEAN)) == {}


def test_empty_texts_are_left_out_and_told(tmp_path: Path) -> None:
    rows = [*CLEAN[:3], ("", "bad"), (" \t", "good"), *CLEAN[3:]]
    made = config(tmp_path, rows)
    finding = found(made)["empty texts"]
    assert (finding.rows, finding.examples) == (2, ("mine.csv, line 5", "mine.csv, line 6"))
    assert finding.message == "train: 2 rows without a text: left out (mine.csv, line 5; line 6)"
    assert load_part(made, "train").texts == [text for text, _ in CLEAN]


def test_where_no_text_is_empty_nothing_changes(tmp_path: Path) -> None:
    """The fingerprint of a set is that of the same rows without any such rule."""
    made = config(tmp_path, CLEAN)
    assert (
        load_part(made, "train").fingerprint()
        == load_part(config(tmp_path, [*CLEAN, ("", "bad")]), "train").fingerprint()
    )
    assert [row.text for row in part_rows(made, "train")] == [text for text, _ in CLEAN]


def test_of_a_pair_one_text_is_enough() -> None:
    texts = (("a", ""), ("", " "), "", "a")
    assert [row.text for row in skip_empty(Row(text, 0, "") for text in texts)] == [("a", ""), "a"]


def test_repeated_texts_are_counted_with_their_lines(tmp_path: Path) -> None:
    rows = [*CLEAN, CLEAN[0], (CLEAN[1][0].upper() + "  ", "good"), CLEAN[0]]
    finding = found(config(tmp_path, rows))["duplicates"]
    assert finding.rows == 3
    assert finding.examples == (
        "mine.csv, line 42 as in line 2", "mine.csv, line 43 as in line 3", "mine.csv, line 44 as in line 2",
    )  # fmt: skip
    assert "all rows of a text are in the same set" in finding.message
    other = found(config(tmp_path, rows, split="random-split"))["duplicates"]
    assert other.rows == 3 and "same set" not in other.message


def test_a_text_with_two_labels_is_shown_with_both(tmp_path: Path) -> None:
    rows = [*CLEAN, (CLEAN[3][0], "bad"), (CLEAN[3][0], "good"), (CLEAN[0][0], "good")]
    finding = found(config(tmp_path, rows))["contradictions"]
    assert finding.rows == 5  # three of one text, two of the other
    assert finding.message.startswith("train: 2 texts with two labels or more, in 5 rows: kept, and no model can be")
    assert finding.examples[0] == "mine.csv, line 2 'bad', line 44 'good': 'row number 0 is dull'"
    assert finding.examples[1] == "mine.csv, line 5 'good', line 42 'bad': 'row number 3 is fine'"


def test_rows_that_have_no_lines_are_told_as_rows(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    from datasets import Dataset

    rows = [*CLEAN, CLEAN[0], (CLEAN[1][0], "bad")]
    texts, labels = ([row[place] for row in rows] for place in (0, 1))
    Dataset.from_dict({"text": texts, "label": labels}).to_parquet(tmp_path / "mine.parquet")
    made = config(tmp_path, CLEAN)
    source = made.parts["train"][0].model_copy(update={"path": str(tmp_path / "mine.parquet")})
    findings = found(made.model_copy(update={"parts": {"train": (source,)}}))
    assert findings["duplicates"].message.endswith("(mine.parquet, row 41 as in row 1; row 42 as in row 2)")
    assert findings["contradictions"].examples == ("mine.parquet, row 2 'good', row 42 'bad': 'row number 1 is fine'",)


def test_nothing_is_said_of_generated_texts() -> None:
    source = {"kind": "synthetic-reviews", "rows": 3000}
    document = {"parts": {"train": [source]}, "split": "random-split", "labels": ["negative", "positive"]}
    assert look(DataConfig.model_validate(document)) == []


def test_examples_stand_where_their_rows_do_among_several_files(tmp_path: Path) -> None:
    made = config(tmp_path, CLEAN)
    (tmp_path / "more.csv").write_text(f"text,label\n,bad\n{CLEAN[7][0]},good\n", encoding="utf-8")
    more = [*made.parts["train"], made.parts["train"][0].model_copy(update={"path": str(tmp_path / "more.csv")})]
    findings = found(made.model_copy(update={"parts": {"train": tuple(more)}}))
    assert findings["duplicates"].examples == ("more.csv, line 3 as in mine.csv, line 9",)
    assert findings["empty texts"].examples == ("more.csv, line 2",)


def labelled(*labels: str) -> DataConfig:
    source = {"kind": "file", "path": "mine.csv"}
    return DataConfig.model_validate({"parts": {"train": [source]}, "split": "stratified", "labels": [*labels]})


def test_labels_without_rows_are_told_for_every_set() -> None:
    counts = {
        "train": {"a": 5, "b": 5, "c": 0},
        "validation": {"a": 1, "b": 0, "c": 0},
        "test": {"a": 1, "b": 1, "c": 0},
    }
    told = [finding.message for finding in label_findings(labelled("a", "b", "c"), counts)]
    assert told == [
        "train: no row has the label 'c': the model does not learn it",
        "validation: no row has the label 'b': no score says how well it is told",
    ]


def test_a_hold_out_that_cannot_be_unseen_is_told(tmp_path: Path) -> None:
    """So few different texts that no group of them is a tenth: a plain tenth is held out."""
    rows = [("yes please", "good"), ("no thanks", "bad")] * 60
    made = config(tmp_path, rows).model_copy(update={"split": "glue-dev"})
    made = made.model_copy(update={"parts": {"train": made.parts["train"], "validation": made.parts["train"]}})
    (finding,) = [one for one in look(made) if one.kind == "seen texts"]
    assert finding.rows == 12 and "12 rows of 12 stand in the training set, too" in finding.message


@pytest.mark.parametrize(("rare", "expected"), [(10, True), (11, False)])
def test_uneven_labels_have_their_baseline_beside_them(rare: int, expected: bool) -> None:
    counts = {"train": {"a": 100, "b": rare}, "test": {"a": 9, "b": 1}}
    findings = label_findings(labelled("a", "b"), counts)
    assert [finding.kind for finding in findings] == (["uneven labels"] if expected else [])
    if expected:
        assert findings[0].message == (
            "train: labels are uneven: 'b' has 10 rows (9.1%); always answering 'a' has an accuracy of 0.9000 on test"
        )


def test_training_records_what_was_found(tmp_path: Path) -> None:
    rows = [*CLEAN, ("", "bad"), CLEAN[0]]
    made = config(tmp_path, rows, labels=["bad", "good", "unheard of"])
    summary = prepare(made, TrainedTokenizer(kind="trained"), 60, tmp_path / "cache").summary
    assert [finding.kind for finding in summary.findings] == ["empty texts", "duplicates", "labels without rows"]
    assert sum(summary.rows.values()) == 41


def test_a_streamed_set_leaves_empty_texts_out_too(tmp_path: Path) -> None:
    rows = [*CLEAN, ("", "bad")]
    whole = {"stream": True, "split": "given"}
    made = config(tmp_path, rows)
    parts = dict.fromkeys(("train", "validation", "test"), made.parts["train"])
    made = DataConfig.model_validate(
        {**made.model_dump(), "parts": {k: [s.model_dump() for s in v] for k, v in parts.items()}, **whole}
    )
    for _ in range(2):  # read, and found in the cache
        summary = prepare(made, TrainedTokenizer(kind="trained"), 60, tmp_path / "cache").summary
        empty = {finding.set: finding.rows for finding in summary.findings if finding.kind == "empty texts"}
        assert empty == {"train": 1, "validation": 1, "test": 1}
        assert summary.rows == {"train": 40, "validation": 40, "given": 40}
        assert len(set(summary.fingerprints.values())) == 1


def test_a_file_to_score_on_leaves_them_out_and_counts_them(tmp_path: Path) -> None:
    made = config(tmp_path, [("a film", "good"), (" ", "bad")])
    encoded = encode_file(tmp_path / "mine.csv", made, tiny_tokenizer())
    assert (len(encoded), encoded.empty) == (1, 1)
