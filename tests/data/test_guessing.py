"""Which columns of somebody's file are text and label: guessed by name, by content, never against what was named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import AmbiguousDataError, DataError
from edgeformer.data.column_detection import MAX_LABELS, Guess, guess
from edgeformer.data.sources import Columns

TEXTS = [f"this is the text of row number {n}, which is long" for n in range(12)]


def table(folder: Path, rows: list[list[str]], name: str = "mine.csv", delimiter: str = ",") -> Path:
    quoted = [[f'"{cell}"' if delimiter in cell else cell for cell in row] for row in rows]
    (folder / name).write_text("".join(delimiter.join(row) + "\n" for row in quoted), encoding="utf-8")
    return folder / name


def roles(found: Guess) -> tuple[str, str | None, str | None]:
    return found.source.text, found.source.text_pair, found.source.label


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (["id", "text", "label"], ("text", None, "label")),
        (["label", " Comment ", "Rating"], (" Comment ", None, "Rating")),
        (["A", "B", "C"], ("B", None, "C")),  # by what stands in them
        (["Nr.", "Was: gesagt wurde", "Urteil #1"], ("Was: gesagt wurde", None, "Urteil #1")),
    ],
)
def test_columns_are_found(tmp_path: Path, header: list[str], expected: tuple[str, str | None, str | None]) -> None:
    rows = [[str(100 + n), text, ("gut", "schlecht", "egal")[n % 3]] for n, text in enumerate(TEXTS)]
    found = guess(table(tmp_path, [header, *rows], delimiter=";"), Columns())
    assert roles(found) == expected
    assert (found.source.delimiter, found.source.header) == (";", True)
    assert found.labels == {"egal": 4, "gut": 4, "schlecht": 4} and list(found.labels) == ["egal", "gut", "schlecht"]


def test_what_is_named_is_taken(tmp_path: Path) -> None:
    rows = [[text, f"other text {n}", str(n % 2), str(n % 3)] for n, text in enumerate(TEXTS)]
    path = table(tmp_path, [["text", "second", "label", "stars"], *rows])
    assert roles(guess(path, Columns())) == ("text", None, "label")
    assert roles(guess(path, Columns("second", None, "stars"))) == ("second", None, "stars")
    assert roles(guess(path, Columns(text_pair="second"))) == ("text", "second", "label")
    with pytest.raises(DataError, match=r"no column 'star' \(--label\); did you mean 'stars'\? columns: text, second"):
        guess(path, Columns(label="star"))


def test_pairs_are_known_by_their_names(tmp_path: Path) -> None:
    rows = [[text, f"other text {n}", str(n % 2)] for n, text in enumerate(TEXTS)]
    path = table(tmp_path, [["premise", "hypothesis", "label"], *rows])
    assert roles(guess(path, Columns())) == ("premise", "hypothesis", "label")
    assert roles(guess(path, Columns(text="hypothesis"))) == ("hypothesis", None, "label")


@pytest.mark.parametrize("first", [["1", "a first text"], ["good", "a first text"]])
def test_a_first_line_that_is_a_row_names_nothing(tmp_path: Path, first: list[str]) -> None:
    rows = [first, *([("good", "bad")[n % 2], text] for n, text in enumerate(TEXTS))]
    found = guess(table(tmp_path, rows), Columns())
    assert roles(found) == ("2", None, "1") and not found.source.header and found.rows == 13


def test_numbers_are_in_order_of_size(tmp_path: Path) -> None:
    rows = [[text, str(8 + n % 4)] for n, text in enumerate(TEXTS)]
    found = guess(table(tmp_path, [["text", "stars"], *rows]), Columns())
    assert list(found.labels) == ["8", "9", "10", "11"]


def test_rows_without_a_label_are_skipped(tmp_path: Path) -> None:
    rows = [[text, ("", "a", "b")[n % 3]] for n, text in enumerate(TEXTS)]
    found = guess(table(tmp_path, [["text", "label"], *rows]), Columns())
    assert found.source.skip_unlabelled and sum(found.labels.values()) == 8 and found.rows == 12


def test_other_kinds_of_file(tmp_path: Path) -> None:
    lines = [json.dumps({"body": text, "label": bool(n % 2), "tags": ["x"]}) for n, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    found = guess(tmp_path / "a.jsonl", Columns())
    assert roles(found) == ("body", None, "label") and list(found.labels) == ["0", "1"]
    rows = [["text", "label"], *([text, str(n % 2)] for n, text in enumerate(TEXTS))]
    assert guess(table(tmp_path, rows, "a.txt", "|"), Columns()).source.delimiter == "|"
    plain = guess(table(tmp_path, rows, "a.tsv", "\t"), Columns()).source
    assert (plain.format, plain.delimiter) == (None, None)
    quoted = guess(table(tmp_path, [rows[0], *([f'"{a}"', b] for a, b in rows[1:])], "b.tsv", "\t"), Columns()).source
    assert (quoted.format, quoted.delimiter) == ("csv", "\t")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([["text"], ["one"], ["two"]], "has one column"),
        ([["text", "label"]], "no rows in it"),
        ([], "no rows in it"),
        ([["text", "label\rgood text", "good\rbad text", "bad"]], "not valid CSV: new-line character"),
        ([["text", "key"], *([text, f"k{n}"] for n, text in enumerate(TEXTS))], "no column looks like labels"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(tmp_path: Path, rows: list[list[str]], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        guess(table(tmp_path, rows), Columns())


def test_too_many_labels_are_none(tmp_path: Path) -> None:
    rows = [[f"text {n}", f"label {n % (MAX_LABELS + 1)}"] for n in range(2 * MAX_LABELS + 2)]
    with pytest.raises(DataError, match="holds more than 200 different labels; name another one: --label COLUMN"):
        guess(table(tmp_path, [["text", "label"], *rows]), Columns(label="label"))


SPELLINGS = ("Rechnung", "rechnung ", "RECHNUNG", "Technik", "technik", " Technik", "Vertrag", "VERTRAG", "vertrag ")


@pytest.mark.parametrize("name", ["Kategorie", "KATEGORIE_", "Catégorie", "class", "Klasse", "Sentiment", "the_label"])
def test_a_label_is_found_by_its_name_and_by_values_in_any_spelling(tmp_path: Path, name: str) -> None:
    rows = [
        [f"Kunde {'ABCD'[n % 4]}", f"Text Nummer {n}, der lang ist", SPELLINGS[n % len(SPELLINGS)]] for n in range(18)
    ]
    path = table(tmp_path, [["Kunde", "Nachricht", name], *rows])
    if name == "the_label":  # no name of a label: both columns could be one
        with pytest.raises(AmbiguousDataError, match=r"2 columns could hold the labels: 'Kunde' .4 values: .*--label"):
            guess(path, Columns())
        found = guess(path, Columns(label=name))
    else:
        found = guess(path, Columns())
    assert roles(found) == ("Nachricht", None, name) and len(found.labels) == 9
    # Three values in three spellings each, of which one is in two rows only, would not pass as nine different ones.
    few = guess(table(tmp_path, [["text", "Kategorie"], *(row[1:] for row in rows[:9])], "few.csv"), Columns())
    assert few.source.label == "Kategorie"


def test_two_columns_with_a_name_of_labels_are_listed(tmp_path: Path) -> None:
    rows = [[text, ("gut", "schlecht")[n % 2], str(n % 3)] for n, text in enumerate(TEXTS)]
    path = table(tmp_path, [["text", "Topic", "rating"], *rows])
    with pytest.raises(AmbiguousDataError) as refused:
        guess(path, Columns())
    assert refused.value.exit_code == 3
    assert str(refused.value) == (
        f"{path}: 2 columns could hold the labels: 'Topic' (2 values: 'gut', 'schlecht'); "
        "'rating' (3 values: '0', '1', '2'); choose one: --label COLUMN"
    )
    assert roles(guess(path, Columns(label="rating"))) == ("text", None, "rating")


def test_a_named_column_is_looked_for_before_rows_are_read(tmp_path: Path) -> None:
    path = table(tmp_path, [["text", "label"], ["a", "b"], ["a row that is broken"]])
    with pytest.raises(DataError, match=r"no column 'lable' \(--label\); did you mean 'label'\?"):
        guess(path, Columns(label="lable"))
