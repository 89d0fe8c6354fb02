"""Rows that are pairs of texts: read, split, joined by the tokenizer's template, and told from single texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from edgeformer.artifacts.data_config import DataConfig, FileSource, TrainedTokenizer
from edgeformer.artifacts.errors import DataError
from edgeformer.data.encoding import encode
from edgeformer.data.prepare import encode_file, prepare, prepare_test
from edgeformer.data.rows import LabelledTexts
from edgeformer.data.sources import file_source, imported_data, load_part, read
from edgeformer.data.splits import split
from tests.tasks.test_embedding import tiny_tokenizer

ROWS = "premise\thypothesis\tlabel\na b\tc\tyes\nb\td a\tno\nc c c c\td\tyes\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "nli.tsv"
    path.write_text(ROWS, encoding="utf-8")
    return path


def config(path: Path, split: str = "imported", **changes: object) -> DataConfig:
    source = {"kind": "file", "path": str(path), "text": "premise", "text_pair": "hypothesis"}
    parts = {"given": ("train", "validation", "test")}.get(split, ("test",))
    document = {
        "split": split, "labels": ["no", "yes"], "max_length": 8, "cleaning": "none",
        "parts": {part: [source] for part in parts}, **changes,
    }  # fmt: skip
    return DataConfig.model_validate(document)


def test_a_tokenizer_joins_them_by_its_template_and_cuts_the_longer_one(table: Path) -> None:
    texts = load_part(config(table), "test")
    assert texts.texts[1] == ("b", "d a") and texts.labels.tolist() == [1, 0, 1]
    encoded = encode(texts, tiny_tokenizer(), 7)
    cls, sep, a, b, c, d = 2, 3, 4, 5, 6, 7
    assert encoded.row(0).tolist() == [cls, a, b, sep, c, sep]
    assert encoded.row(2).tolist() == [cls, c, c, c, sep, d, sep] and encoded.truncated == 1


def test_columns_of_pairs_are_found(table: Path) -> None:
    source = file_source(table)
    assert (source.text, source.text_pair, source.label) == ("premise", "hypothesis", "label")
    like = FileSource(kind="file", path="other.tsv", text="hypothesis")
    assert file_source(table, like).text_pair is None  # what it is read instead of has single texts
    plain = table.with_suffix(".txt")
    plain.write_text("a b\n", encoding="utf-8")
    pairs = FileSource(kind="file", path=str(plain), text_pair="other", label_value="yes")
    with pytest.raises(DataError, match="plain text has one column, and no second text"):
        [*read(pairs)]


NOTHING = {"parts": {}}
SINGLE: dict[str, object] = {"parts": {"train": [{"kind": "synthetic-reviews", "rows": 9}]}}
BOTH = "question\tsentence\tlabel\na b\tc\tyes\nb\td a\tno\n"


@pytest.mark.parametrize("texts", [("question", "sentence"), ("text", "text_pair")])
def test_a_file_is_read_as_the_model_reads_texts(table: Path, texts: tuple[str, str]) -> None:
    file = table.with_name("other.tsv")
    file.write_text(BOTH.replace("question\tsentence", "\t".join(texts)), encoding="utf-8")

    def first(data: DataConfig) -> list[int]:
        return encode_file(file, data, tiny_tokenizer()).row(0).tolist()

    cls, sep, a, b, c = 2, 3, 4, 5, 6
    alone = [cls, c, sep] if texts[0] == "question" else [cls, a, b, sep]
    assert first(config(table, **SINGLE)) == alone
    assert first(config(table, parts={"test": [{"kind": "file", "path": "gone.tsv"}]})) == alone
    assert first(config(table)) == [cls, a, b, sep, c, sep]
    with pytest.raises(DataError, match=r"could be single texts \((sentence|text)\) or pairs"):
        first(config(table, **NOTHING))
    assert len(encode_file(table, config(table, **NOTHING), tiny_tokenizer())) == 3  # can be pairs only


def test_a_file_may_call_pairs_what_the_runs_own_data_does(table: Path) -> None:
    file = table.with_name("own.tsv")
    file.write_text(BOTH.replace("question\tsentence\tlabel", "left\tright\tsame"), encoding="utf-8")
    source = {"kind": "file", "path": "gone.tsv", "text": "left", "text_pair": "right", "label": "same"}
    own = config(table, parts={"train": [{**source, "skip_unlabelled": True}]})
    assert encode_file(file, own, tiny_tokenizer()).row(0).tolist() == [2, 4, 5, 3, 6, 3]
    file.write_text("left\tright\tsame\na\tb\t\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 2: has no label"):  # a row is only skipped where the recipe says so
        encode_file(file, own, tiny_tokenizer())
    file.write_text("text\tlabel\na\tyes\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no pairs of texts; columns: text, label; .* left and right, sentence1 and"):
        encode_file(file, own, tiny_tokenizer())


def test_two_texts_are_no_pair_and_pairs_are_ordered() -> None:
    labels = np.zeros(1, dtype=np.int64)
    prints = {LabelledTexts([row], labels).fingerprint() for row in ("a b", ("a", "b"), ("b", "a"), ("a b", ""))}
    assert len(prints) == 4


def test_they_can_be_trained_on(tmp_path: Path) -> None:
    table = tmp_path / "many.tsv"
    lines = [f"a{n} b\tc d{n % 7}\t{('no', 'yes')[n % 2]}" for n in range(40)]
    table.write_text("premise\thypothesis\tlabel\n" + "\n".join(lines) + "\n", encoding="utf-8")
    prepared = prepare(
        config(table, "random-split", parts={"train": [file_source(table)]}),
        TrainedTokenizer(kind="trained"),
        74,
        tmp_path,
    )
    row = prepared.validation.row(0)
    separator = prepared.tokenizer.token_to_id("[SEP]")
    assert (row == separator).sum() == 2
    with pytest.raises(ValidationError, match="reads single texts, not pairs"):
        config(table, "given", stream=True)


def test_sets_of_an_imported_model_stand_in_for_each_other(table: Path, tmp_path: Path) -> None:
    found = prepare_test(config(table), tiny_tokenizer(), 8, None, "validation")
    assert len(found) == 3
    nothing, notes = imported_data(None, ("no", "yes"), 8)
    assert nothing["parts"] == {} and notes == []
    with pytest.raises(DataError, match="trained elsewhere, and nothing is known of a test set; import it again"):
        prepare_test(DataConfig.model_validate(nothing), tiny_tokenizer(), 8, None, "test")
    with pytest.raises(DataError, match=r"nothing is known of its training text; import it again .*: --data DIR$"):
        split(DataConfig.model_validate(nothing), {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="has none of the files train, validation and test"):
        imported_data(tmp_path / "folder", ("no", "yes"), 8)
    (tmp_path / "folder" / "dev.tsv").write_text(ROWS, encoding="utf-8")
    section, notes = imported_data(tmp_path / "folder", ("no", "yes"), 8)
    assert [*section["parts"]] == ["validation"] and len(notes) == 2
