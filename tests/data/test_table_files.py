"""Tables as people have them: any delimiter, quoted line ends, odd headers, no header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from edgeformer.artifacts.data_config import FileSource
from edgeformer.artifacts.errors import DataError
from edgeformer.data.column_detection import guess
from edgeformer.data.records import delimiter_of
from edgeformer.data.sources import Columns, file_source, read, replacement_source


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_bytes(content.encode())
    return path


def rows(path: Path, **settings: Any) -> list[tuple[object, object, str]]:
    found = read(FileSource.model_validate({"kind": "file", "path": str(path), **settings}))
    return [(row.text, row.label, row.where.rpartition(", ")[2]) for row in found]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_a_csv_file_is_found(tmp_path: Path, delimiter: str) -> None:
    cells = [["text", "label"], [f'"so{delimiter} good, really; yes"', "1"], ["plain", "0"]]
    path = write(tmp_path, "a.csv", "\r\n".join(delimiter.join(row) for row in cells))
    expected = [(f"so{delimiter} good, really; yes", "1", "line 2"), ("plain", "0", "line 3")]
    assert rows(path) == expected
    assert rows(path, delimiter=delimiter) == expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["text\n", "one, two; three\n"], ","),  # one column: as it always was
        (["a,b\n", "x;y,z\n"], ","),
        (["name, first;text;label\n", "a;b, c;d\n", "e, f, g;h;i\n"], ";"),
        (["text;label\n", "nice, really, yes;good\n"], ";"),
        (["a|b\n", "x|y\n"], "|"),
        ([], ","),
    ],
)
def test_what_parts_most_rows_alike_is_the_delimiter(lines: list[str], expected: str) -> None:
    assert delimiter_of(lines) == expected


def test_a_row_is_named_by_the_line_in_which_it_begins(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", '\ufefftext;label\r\n"two\r\nlines";1\r\n\r\nlast;0\r\n')
    assert rows(path) == [("two\r\nlines", "1", "line 2"), ("last", "0", "line 5")]
    broken = write(tmp_path, "b.csv", 'text;label\nfine;1\n"open;1\nand\nso on;1\n')
    with pytest.raises(DataError, match=r"b\.csv, line 3: not valid CSV"):
        rows(broken)


def test_a_spreadsheet_may_state_its_delimiter(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "sep=;\r\ntext;label\r\na, b;1\r\n")
    assert rows(path) == [("a, b", "1", "line 3")]


def test_columns_without_a_name_have_their_number(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", ";text;label;\n0;fine;1;\n")
    assert rows(path) == [("fine", "1", "line 2")]
    assert rows(path, text="column 1") == [("0", "1", "line 2")]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ";"), ("a.tsv", "\t"), ("a.txt", "|"), ("a", ",")])
def test_a_file_without_header_is_read_by_column_numbers(tmp_path: Path, name: str, delimiter: str) -> None:
    path = write(tmp_path, name, f"good{delimiter}fine film\nbad{delimiter}dull film\n")
    told = {} if name in ("a.csv", "a.tsv") else {"delimiter": delimiter}
    found = rows(path, header=False, text=2, label=1, **told)
    assert found == [("fine film", "good", "line 1"), ("dull film", "bad", "line 2")]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"header": False}, "given by their numbers from 1 (text: 1, label: 2), not as 'text'"),
        ({"header": False, "text": 1, "label": "stars"}, "not as 'stars'"),
        ({"header": False, "format": "jsonl"}, "header: is for tables of text, and format is jsonl"),
        ({"delimiter": ";", "format": "text"}, "delimiter: is for tables of text"),
        ({"delimiter": ";", "format": "tsv"}, "set format: csv"),
        ({"delimiter": "; "}, "Input should be"),
        ({"text": 0}, "valid string"),
        ({"text": True}, "valid string"),
    ],
)
def test_what_cannot_be_of_a_table_is_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        FileSource.model_validate({"kind": "file", "path": "a.csv", **settings})
    assert expected in str(caught.value)


def test_a_label_for_all_rows_needs_no_column(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "7,fine film\n")
    assert rows(path, header=False, text=2, label_value="good") == [("fine film", "good", "line 1")]


def test_errors_of_a_table_name_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "a film;good\nanother\n")
    with pytest.raises(
        DataError, match=r"line 2: has 1 columns, the first row 2 \(1, 2\); put a text that holds a semi"
    ):
        rows(path, header=False, text=1, label=2)
    with pytest.raises(DataError, match="no column '3'"):
        rows(path, header=False, text=1, label=3)
    with pytest.raises(DataError, match="is jsonl, which has no delimiter and no header"):
        rows(write(tmp_path, "a.jsonl", "{}"), delimiter=";")


def like(**settings: Any) -> FileSource:
    return FileSource.model_validate({"kind": "file", "path": "own.csv", **settings})


def named(source: FileSource) -> tuple[str, str | None, str | None, bool]:
    return source.text, source.text_pair, source.label, source.header


def test_columns_can_be_named_each_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "sentence1,sentence2,Review,stars,label\na,b,c,5,1\n")
    assert named(file_source(path, columns=Columns(label="stars"))) == ("sentence1", "sentence2", "stars", True)
    assert named(file_source(path, columns=Columns("Review"))) == ("Review", None, "label", True)
    assert named(file_source(path, columns=Columns(text_pair="sentence2"))) == ("sentence1", "sentence2", "label", True)
    assert named(file_source(path, columns=Columns(text_pair="sentence1"))) == ("Review", "sentence1", "label", True)
    with pytest.raises(DataError, match=r"no column 'star' \(--label\); did you mean 'stars'\? columns: sentence1"):
        file_source(path, columns=Columns(label="star"))
    with pytest.raises(DataError, match="cannot be both texts"):
        file_source(path, columns=Columns("Review", "Review"))


def test_numbers_name_the_columns_of_a_file_without_header(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "1;fine film\n0;dull film\n")
    assert named(file_source(path, columns=Columns("2", None, "1"))) == ("2", None, "1", False)
    with pytest.raises(DataError, match=r"--text COLUMN; --text NUMBER if the first line names no columns"):
        file_source(path, columns=Columns())
    with pytest.raises(DataError, match=r"rename one to one of text, sentence") as caught:
        file_source(path)
    assert "--text" not in str(caught.value)


def test_a_file_of_ones_own_is_read_as_the_recipe_says(tmp_path: Path) -> None:
    bare = write(tmp_path, "bare.csv", "1;fine film\n0;dull film\n")
    assert named(replacement_source(bare, {"train": [like(header=False, text=2, label=1)]})) == (
        "2",
        None,
        "1",
        False,
    )
    table = write(tmp_path, "table.csv", "body,stars\nfine,1\n")
    headerless = {"train": [like(header=False, text=2, label=1)]}
    assert named(replacement_source(table, headerless, Columns("body", None, "stars"))) == (
        "body",
        None,
        "stars",
        True,
    )
    odd = write(tmp_path, "table.dat", "body|stars\nfine|1\n")
    assert (
        replacement_source(odd, {"train": [like(path="x.dat", delimiter="|", text="body", label="stars")]}).delimiter
        == "|"
    )


def test_a_second_text_is_for_models_that_read_pairs(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "question,answer,right\na,b,1\n")
    with pytest.raises(DataError, match="--pair answer: this model reads single texts"):
        replacement_source(path, {"train": [like()]}, Columns("question", "answer", "right"))
    pairs = {"train": [like(text="question", text_pair="answer")]}
    assert named(replacement_source(path, pairs, Columns(label="right"))) == ("question", "answer", "right", True)
    assert named(replacement_source(path, pairs, Columns("question", None, "right"))) == (
        "question",
        "answer",
        "right",
        True,
    )


@pytest.mark.parametrize("name", ["Kategorie", "CATEGORY", "Catégorie", "étiquette", "Rating ", "sentiment", "topic"])
def test_a_column_of_labels_is_recognised_by_the_same_names_as_init(tmp_path: Path, name: str) -> None:
    table = "".join(f"A text about number {n};{'ab'[n % 2]}\n" for n in range(8))
    path = write(tmp_path, "a.csv", f"Text;{name}\n{table}")
    assert guess(path, Columns()).source.label == replacement_source(path, {}).label == file_source(path).label == name


def test_of_several_columns_of_labels_none_is_taken_silently(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text;rating;topic\nfine;1;2\ndull;2;1\n")
    with pytest.raises(DataError, match=r"2 columns could hold the labels: rating, topic; choose one: --label COLUMN"):
        file_source(path, columns=Columns())
    with pytest.raises(DataError, match=r"rating, topic; rename the one that does to label"):
        file_source(path)
    assert file_source(path, like(label="Topic")).label == "topic"
    assert file_source(path, columns=Columns("topic")).label == "rating"
    assert file_source(write(tmp_path, "b.csv", "text;topic;sentiment\na;1;2\n")).label == "sentiment"
