import json
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import AmbiguousDataError, DataError
from edgeformer.data.column_detection import MAX_LABELS, DetectedColumns, detect_columns
from edgeformer.data.sources import Columns
from tests.data.conftest import write

TEXTS = [f"this is the text of row number {n}, which is long" for n in range(12)]


def table(folder: Path, rows: list[list[str]], name: str = "mine.csv", delimiter: str = ",") -> Path:
    quoted = [[f'"{cell}"' if delimiter in cell else cell for cell in row] for row in rows]
    return write(folder, name, "".join(delimiter.join(row) + "\n" for row in quoted))


def names(result: DetectedColumns) -> tuple[str | tuple[str, ...], str | None, str | None]:
    return result.source.text, result.source.text_pair, result.source.label


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (["id", "text", "label"], ("text", None, "label")),
        (["label", " Comment ", "Rating"], (" Comment ", None, "Rating")),
        (["A", "B", "C"], ("B", None, "C")),  # by their values
        (["Nr.", "Was: gesagt wurde", "Urteil #1"], ("Was: gesagt wurde", None, "Urteil #1")),
    ],
)
def test_columns_are_detected(tmp_path: Path, header: list[str], expected: tuple[str, str | None, str | None]) -> None:
    rows = [[str(100 + n), text, ("gut", "schlecht", "egal")[n % 3]] for n, text in enumerate(TEXTS)]
    result = detect_columns(table(tmp_path, [header, *rows], delimiter=";"), Columns())
    assert names(result) == expected
    assert (result.source.delimiter, result.source.header) == (";", True)
    assert list(result.labels.items()) == [("egal", 4), ("gut", 4), ("schlecht", 4)]


def test_named_columns_are_used(tmp_path: Path) -> None:
    rows = [[text, f"other text {n}", str(n % 2), str(n % 3)] for n, text in enumerate(TEXTS)]
    path = table(tmp_path, [["text", "second", "label", "stars"], *rows])
    assert names(detect_columns(path, Columns())) == ("text", None, "label")
    assert names(detect_columns(path, Columns("second", None, "stars"))) == ("second", None, "stars")
    assert names(detect_columns(path, Columns(text_pair="second"))) == ("text", "second", "label")
    pairs = table(tmp_path, [["premise", "hypothesis", "label"], *(row[:3] for row in rows)], "pairs.csv")
    assert names(detect_columns(pairs, Columns())) == ("premise", "hypothesis", "label")
    assert names(detect_columns(pairs, Columns(text="hypothesis"))) == ("hypothesis", None, "label")
    stars = [[row[0], ("", "9", "10")[n % 3]] for n, row in enumerate(rows)]
    result = detect_columns(table(tmp_path, [["text", "stars"], *stars]), Columns())
    assert list(result.labels) == ["9", "10"] and result.source.skip_unlabelled and result.rows == 12
    many = [[f"text {n}", f"label {n % (MAX_LABELS + 1)}"] for n in range(2 * MAX_LABELS + 2)]
    with pytest.raises(DataError, match="has more than 200 different labels, and 2 to 200 are possible"):
        detect_columns(table(tmp_path, [["text", "label"], *many]), Columns(label="label"))
    broken = table(tmp_path, [["text", "second", "stars"], ["a", "b", "c"], ["a broken row"]], "broken.csv")
    with pytest.raises(DataError, match=r"no column 'star' \(--label\); did you mean 'stars'\? columns: text, second"):
        detect_columns(broken, Columns(label="star"))


@pytest.mark.parametrize("header", [True, False])
def test_several_text_columns_and_label_names(tmp_path: Path, header: bool) -> None:
    rows = [[str((4, 10, -1)[n % 3]), f"Head {n}", text] for n, text in enumerate(TEXTS)]
    path = table(tmp_path, [["class", "title", "body"], *rows] if header else rows)
    text, label = ("title,body", "class") if header else ("2,3", "1")
    result = detect_columns(path, Columns(text, label_names="minus, four ,ten"))
    assert names(result) == (tuple(text.split(",")), None, label)
    assert result.labels == {"minus": 4, "four": 4, "ten": 4} and result.label_values == (-1, 4, 10)
    assert detect_columns(path, Columns(text)).labels == {"-1": 4, "4": 4, "10": 4}
    for label_names in ("a,b", "a,b,c,d", "a,b,a", "a,,c", ""):
        with pytest.raises(DataError, match=rf"mine\.csv: --labels must name each .* '{label}': -1, 4, 10") as caught:
            detect_columns(path, Columns(text, label_names=label_names))
        assert caught.value.exit_code == 2
    words = table(tmp_path, [["text", "label"], *([text, "ab"[n % 2]] for n, text in enumerate(TEXTS))], "words.csv")
    with pytest.raises(DataError, match="--labels must name each number of column 'label': a, b"):
        detect_columns(words, Columns(label_names="x,y"))


@pytest.mark.parametrize("first", [["1", "a first text"], ["good", "a first text"]])
def test_first_row_without_names_is_data(tmp_path: Path, first: list[str]) -> None:
    rows = [first, *([("good", "bad")[n % 2], text] for n, text in enumerate(TEXTS))]
    result = detect_columns(table(tmp_path, rows), Columns())
    assert names(result) == ("2", None, "1") and not result.source.header and result.rows == 13


def test_other_formats(tmp_path: Path) -> None:
    lines = [json.dumps({"body": text, "label": bool(n % 2), "tags": ["x"]}) for n, text in enumerate(TEXTS)]
    result = detect_columns(write(tmp_path, "a.jsonl", "\n".join(lines)), Columns())
    assert names(result) == ("body", None, "label") and list(result.labels) == ["0", "1"]
    rows = [["text", "label"], *([text, str(n % 2)] for n, text in enumerate(TEXTS))]
    quoted = [rows[0], *([f'"{a}"', b] for a, b in rows[1:])]
    plain, marked = ("a.txt", "|", rows, (None, "|")), ("a.tsv", "\t", rows, (None, None))
    for name, delimiter, content, expected in (plain, marked, ("b.tsv", "\t", quoted, ("csv", "\t"))):
        source = detect_columns(table(tmp_path, content, name, delimiter), Columns()).source
        assert (source.format, source.delimiter) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([["text"], ["one"], ["two"]], "has one column"),
        ([["text", "label"]], "has no rows"),
        ([], "has no rows"),
        ([["text", "label\rgood text", "good\rbad text", "bad"]], "not valid CSV: new-line character"),
        ([["text", "label"], *([text, "ham"] for text in TEXTS)], "same label, 'ham' .column 'label'.; add"),
        ([["text", "key"], *([text, f"k{n}"] for n, text in enumerate(TEXTS))], "no column looks like labels"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, rows: list[list[str]], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        detect_columns(table(tmp_path, rows), Columns())


@pytest.mark.parametrize("name", ["KATEGORIE_", "Catégorie", "class", "the_label"])
def test_label_is_detected_by_name_and_by_values_in_any_spelling(tmp_path: Path, name: str) -> None:
    spellings = [spelling for label in ("Rechnung", "Technik", "Vertrag") for spelling in (label, f" {label.upper()}")]
    rows = [[f"Kunde {'ABCD'[n % 4]}", f"Text Nummer {n}, der lang ist", spellings[n % 6]] for n in range(18)]
    path, columns = table(tmp_path, [["Kunde", "Nachricht", name], *rows]), Columns()
    if name == "the_label":  # no name of a label: both columns could be one
        with pytest.raises(AmbiguousDataError, match=r"2 columns could hold the labels: 'Kunde' .4 values: .*--label"):
            detect_columns(path, columns)
        columns = Columns(label=name)
    result = detect_columns(path, columns)
    assert names(result) == ("Nachricht", None, name) and len(result.labels) == 6
    # Six spellings in six rows count as three values.
    short = table(tmp_path, [["text", "Kategorie"], *(row[1:] for row in rows[:6])], "short.csv")
    assert detect_columns(short, Columns()).source.label == "Kategorie"


def test_ambiguous_label_columns_are_listed(tmp_path: Path) -> None:
    rows = [[text, ("gut", "schlecht")[n % 2], str(n % 3)] for n, text in enumerate(TEXTS)]
    path = table(tmp_path, [["text", "Topic", "rating"], *rows])
    columns = r"'Topic' \(2 values: 'gut', 'schlecht'\); 'rating' \(3 values: '0', '1', '2'\)"
    message = rf"mine\.csv: 2 columns could hold the labels: {columns}; choose one: --label COLUMN$"
    with pytest.raises(AmbiguousDataError, match=message) as caught:
        detect_columns(path, Columns())
    assert caught.value.exit_code == 3
    assert names(detect_columns(path, Columns(label="rating"))) == ("text", None, "rating")
