"""Command init: the drafted recipe is short, valid and fitted to its rows; nothing is overwritten."""

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.data.sources import Columns, load_part
from edgeformer.models import load_recipe
from edgeformer.training.init import Draft, DraftOptions, draft
from tests.own_data import LABEL, LABELS, TEXT, hostile_table
from tests.personal_data import sentences, write_jsonl

DATA, RECIPE = Path("data/reviews.csv"), Path("reviews.yaml")
TICKETS = [f"ticket {n} says {('refund', 'password')[n % 2]} again,{('billing', 'login')[n % 2]}\n" for n in range(200)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with ``data/reviews.csv``."""
    (tmp_path / "data").mkdir()
    hostile_table(tmp_path / DATA)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def draft_own(rows: Iterable[str], **options: Any) -> tuple[Draft, Any]:
    """Draft a recipe for these lines of text and label, and load it."""
    Path("own.csv").write_text("text,label\n" + "".join(rows), encoding="utf-8")
    return draft(Path("own.csv"), DraftOptions(**options)), load_recipe("own.yaml")


def test_recipe(folder: Path) -> None:
    result = draft(DATA, DraftOptions())
    assert result.path == RECIPE and RECIPE.read_text(encoding="utf-8") == result.text
    assert 10 <= result.text.count("\n") <= 24 and max(map(len, result.text.splitlines())) < 120
    recipe: Any = load_recipe("reviews.yaml")
    (source,) = recipe.data.parts["train"]
    assert source.path == str(folder / DATA) and "path: data/reviews.csv" in result.text
    assert (source.delimiter, source.text, source.label) == (";", TEXT, LABEL)
    assert recipe.data.labels == LABELS and recipe.name == "reviews"
    assert sum(result.rows.values()) == 297 and result.rows["test"] >= 29
    kinds = [finding.kind for finding in result.findings]
    assert kinds == ["empty texts", "duplicates", "contradictions", "uneven labels"]
    assert [finding.rows for finding in result.findings][:3] == [3, 3, 2]


def test_lengths_of_the_texts(folder: Path) -> None:
    """Half of the texts have 2 words, the others 12."""
    result, recipe = draft_own(f"text{n} {'word ' * (11 if n % 2 else 1)},{'ab'[n % 4 // 2]}\n" for n in range(400))
    words, tokens, padding, limit = result.lengths.split("; ")
    assert re.fullmatch(r"2 to 12 words, half of them at most (2|7|12) ▁▁[▆▇█]▁{9}[▆▇█] \(bins of 1\)", words), words
    assert "tokens, half of them at most" in tokens and f"% of batches of {recipe.training.batch_size} is" in padding
    assert re.fullmatch(rf"max_length {recipe.data.max_length} reads (9[89]|100)\.\d% of them whole", limit)
    linear = draft(Path("own.csv"), DraftOptions(out=Path("linear.yaml"), family="linear"))
    assert linear.lengths == words, "a linear model pads nothing"


def test_existing_recipe_is_kept(folder: Path) -> None:
    RECIPE.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"reviews\.yaml: already exists; .* --force"):
        draft(DATA, DraftOptions())
    with pytest.raises(DataError, match="no column"):
        draft(DATA, DraftOptions(force=True, columns=Columns(text="x")))
    assert RECIPE.read_text(encoding="utf-8") == "mine"
    draft(DATA, DraftOptions(force=True))
    assert load_recipe("reviews.yaml").name == "reviews"
    assert sorted(path.name for path in folder.iterdir()) == ["data", "reviews.yaml"]


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        ("data", {}, "is a folder; give one file of it"),
        ("data/reviews.csv", {"out": Path("data")}, "-o data: is a folder"),
        ("data/reviews.csv", {"name": "a b"}, "--name 'a b': use letters"),
        ("data/reviews.csv", {"source": "nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_unusable_options(folder: Path, data: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        draft(Path(data), DraftOptions(**options))
    assert [path.name for path in folder.iterdir()] == ["data"]


def test_notes_about_labels(folder: Path) -> None:
    result, recipe = draft_own(f"row number {n},{('good', 'Good ', 'bad', '')[n % 4]}\n" for n in range(40))
    assert result.notes == (
        "labels 'good' (10 rows), 'Good' (10 rows) differ only in capitals or spaces, and the recipe "
        "treats them as different labels; if they are the same, correct the file",
        "10 rows without a label: left out (skip_unlabelled: true)",
    )
    assert recipe.data.parts["train"][0].skip_unlabelled and recipe.data.labels == ("bad", "good", "Good")


def test_notes_about_columns(folder: Path) -> None:
    numbers = ("one", "two", "three", "four", "five", "six")
    titles = [f"Title of the {first} {second}" for first in numbers for second in numbers]
    rows = [
        {"id": f"7f6c0b1e-aaaa-bbbb-cccc-{n:012}", "when": f"Mon, {n} Jan 2024 10:00:00", "kind": f"of kind {n % 2}",
         "a title": title, "body": f"{title}, and its body", "note": f"a rare note about {n}" if n < 9 else None,
         "label": n % 3 > 0}
        for n, title in enumerate(titles)
    ]  # fmt: skip
    Path("own.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    result = draft(Path("own.jsonl"), DraftOptions(columns=Columns(label="label")))
    assert result.notes == (
        'columns a title and body hold texts; to join them: --text "a title,body"',
        "column 'label' has false and true: labels 0 and 1, which --labels A,B names",
    )
    result = draft(Path("own.jsonl"), DraftOptions(columns=Columns("a title,body", label_names="no,yes"), force=True))
    recipe: Any = load_recipe("own.yaml")
    assert recipe.data.parts["train"][0].text == ("a title", "body") and "text: [a title, body]" in result.text
    assert recipe.data.labels == ("no", "yes") and recipe.data.label_values == ("0", "1")
    texts = load_part(recipe.data, "train")
    assert texts.texts[1] == f"{titles[1]} {titles[1]}, and its body" and texts.labels[:4].tolist() == [0, 1, 1, 0]
    write_jsonl(Path("spans.jsonl"), sentences(60))
    with pytest.raises(InputError, match=r"spans\.jsonl: --labels names the labels of whole texts"):
        draft(Path("spans.jsonl"), DraftOptions(columns=Columns(label_names="a,b")))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_blanks_behind_commas_and_one_number_in_two_spellings(folder: Path, end: str) -> None:
    lines = ["text, label", *(f'"row {n}, quoted", {("0", "1", "0.0", "1.0")[n % 4]}' for n in range(40))]
    Path("own.csv").write_text(end.join(lines) + end, encoding="utf-8", newline="")
    detected = draft(Path("own.csv"), DraftOptions()).guess
    assert detected.labels == {"0": 20, "1": 20} and detected.rows == 40
    texts = load_part(load_recipe("own.yaml").data, "train")
    with Path("own.csv").open(encoding="utf-8", newline="") as file:
        expected = [(row[0], int(float(row[1]))) for row in list(csv.reader(file))[1:]]
    assert [*zip(texts.texts, texts.labels.tolist(), strict=True)] == expected


def test_pretrained_encoder(folder: Path) -> None:
    pytest.importorskip("transformers")
    from tests.export.hf_models import make_model, sentence_transformers

    make_model(folder / "models" / "bert", "bert")
    sentence_transformers(folder / "models" / "bert", "mean", normalize=True)
    result = draft(DATA, DraftOptions(source="models/bert", out=Path("recipes/mine.yaml"), name="mine"))
    recipe: Any = load_recipe("recipes/mine.yaml")
    assert recipe.data.parts["train"][0].path == str(folder / DATA) and recipe.name == "mine"
    assert "path: ../data/reviews.csv" in result.text
    assert recipe.model.kind == "pretrained" and recipe.model.source == str(folder / "models" / "bert")
    assert recipe.model.pooling == "mean"  # as its embeddings are made
    assert "source: ../models/bert" in result.text and recipe.data.cleaning == "none"
    assert recipe.data.max_length <= recipe.model.max_positions
    assert recipe.training.epochs == 20 and recipe.training.schedule.kind == "linear"


@pytest.mark.parametrize("name", ["letters.jsonl", "letters.conll"])
def test_spans(folder: Path, name: str) -> None:
    if name.endswith("jsonl"):
        write_jsonl(Path(name), sentences(120))
    else:
        lines = [f"Ada B-PERSON\nin O\nUlm{number} B-ADDRESS\n" for number in range(40)]
        Path(name).write_text("\n".join(lines), encoding="utf-8")
    result = draft(Path(name), DraftOptions())
    recipe: Any = load_recipe("letters.yaml")
    assert recipe.task == "token-classification" and recipe.tokenizer.algorithm == "wordpiece-cased"
    assert {*recipe.data.labels} == {*result.guess.labels} >= {"ADDRESS", "PERSON"}
    assert recipe.data.parts["train"][0].path == str(folder / name) and recipe.data.cleaning == "none"
    assert sum(result.rows.values()) == result.guess.rows and "longer texts are read in windows" in result.text


def test_the_better_family_is_drafted(folder: Path) -> None:
    """Two words decide, which a linear model learns from 200 rows."""
    result, recipe = draft_own(TICKETS, family=None)
    best, other = result.comparison
    assert (best.family, other.family, recipe.model.kind) == ("linear", "encoder", "linear")
    assert best.score == 1.0 >= other.score and best.validation_rows == 20 and best.rows == 160
    assert sorted(path.name for path in folder.iterdir()) == ["data", "own.csv", "own.yaml"]


def test_a_test_file_is_a_part_of_its_own(folder: Path) -> None:
    """Its rows are not among those that the comparison learns from, and are scored once."""
    Path("held.csv").write_text("text,label\n" + "".join(TICKETS[100:160]), encoding="utf-8")
    result, recipe = draft_own(TICKETS[:100], family=None, test=Path("held.csv"))
    assert result.rows == {"train": 90, "validation": 10, "given": 60}
    assert {(entry.rows, entry.validation_rows) for entry in result.comparison} == {(90, 10)}
    assert recipe.data.split == "given" and recipe.data.parts["test"][0].path == str(folder / "held.csv")
    assert "a tenth of the texts for validation\n" in result.text


def test_rare_labels_select_the_epoch_by_macro_f1(folder: Path) -> None:
    for counts, expected in (((40, 40, 10), "f1"), ((40, 40, 30), "accuracy"), ((80, 20), "accuracy")):
        rows = [f"row {label} {n},label{label}\n" for label, count in enumerate(counts) for n in range(count)]
        _, recipe = draft_own(rows, force=True)
        assert recipe.training.select_by == expected
