"""A first recipe: short, valid, fitted to its rows, found again from anywhere; nothing is overwritten."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.errors import DataError, InputError
from edgeformer.data.sources import Columns
from edgeformer.models import load_recipe
from edgeformer.training.init import DraftOptions, draft
from tests.own_data import LABEL, LABELS, TEXT, hostile_table


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``data/reviews.csv``, in which commands are started."""
    (tmp_path / "data").mkdir()
    hostile_table(tmp_path / "data" / "reviews.csv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_is_short_and_says_what_was_guessed(place: Path) -> None:
    found = draft(Path("data/reviews.csv"), DraftOptions())
    assert found.path == Path("reviews.yaml") and found.path.read_text(encoding="utf-8") == found.text
    assert 10 <= found.text.count("\n") <= 18 and max(map(len, found.text.splitlines())) < 120
    recipe: Any = load_recipe("reviews.yaml")
    (source,) = recipe.data.parts["train"]
    assert source.path == str(place / "data" / "reviews.csv") and "path: data/reviews.csv" in found.text
    assert (source.delimiter, source.text, source.label) == (";", TEXT, LABEL)
    assert recipe.data.labels == LABELS and recipe.name == "reviews"
    assert sum(found.rows.values()) == 297 and found.rows["test"] >= 29
    kinds = [finding.kind for finding in found.findings]
    assert kinds == ["empty texts", "duplicates", "contradictions", "uneven labels"]
    assert [finding.rows for finding in found.findings][:3] == [3, 3, 2]


def test_a_recipe_elsewhere_finds_its_data(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft(Path("data/reviews.csv"), DraftOptions(out=Path("recipes/mine.yaml"), name="mine"))
    assert "path: ../data/reviews.csv" in Path("recipes/mine.yaml").read_text(encoding="utf-8")
    monkeypatch.chdir(place / "data")
    recipe: Any = load_recipe("../recipes/mine.yaml")
    assert recipe.data.parts["train"][0].path == str(place / "data" / "reviews.csv") and recipe.name == "mine"


def test_nothing_is_overwritten_unless_asked_for(place: Path) -> None:
    Path("reviews.yaml").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"reviews\.yaml: is there already; .* --force"):
        draft(Path("data/reviews.csv"), DraftOptions())
    with pytest.raises(DataError, match="no column"):
        draft(Path("data/reviews.csv"), DraftOptions(force=True, columns=Columns(text="x")))
    assert Path("reviews.yaml").read_text(encoding="utf-8") == "mine"
    draft(Path("data/reviews.csv"), DraftOptions(force=True))
    assert load_recipe("reviews.yaml").name == "reviews"
    assert sorted(path.name for path in place.iterdir()) == ["data", "reviews.yaml"]


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        ("data/gone.csv", {}, "did you mean 'reviews.csv'"),
        ("data", {}, "is a folder; name one file of it"),
        ("data/reviews.csv", {"out": Path("data")}, "-o data: is a folder"),
        ("data/reviews.csv", {"name": "a b"}, "--name 'a b': letters"),
        ("data/reviews.csv", {"source": "nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_what_cannot_be_done_is_said_and_writes_nothing(
    place: Path, data: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        draft(Path(data), DraftOptions(**options))
    assert [path.name for path in place.iterdir()] == ["data"]


def test_few_rows_are_refused(place: Path) -> None:
    Path("few.csv").write_text("text,label\na b,x\nc d,y\ne f,x\ng h,y\n", encoding="utf-8")
    with pytest.raises(DataError, match="needs at least 10"):
        draft(Path("few.csv"), DraftOptions())


def test_labels_that_look_the_same_and_rows_without_one_are_told(place: Path) -> None:
    rows = "".join(f"row number {n},{('good', 'Good ', 'bad', '')[n % 4]}\n" for n in range(40))
    Path("own.csv").write_text("text,label\n" + rows, encoding="utf-8")
    found = draft(Path("own.csv"), DraftOptions())
    assert found.notes == (
        "labels 'good' (10 rows), 'Good ' (10 rows) differ in capitals or spaces only, and each is a label of its own "
        "in the recipe; if they are one, change them in the file: 'Good ' → 'good'",
        "10 rows without a label: left out (skip_unlabelled: true)",
    )
    recipe: Any = load_recipe("own.yaml")
    assert recipe.data.parts["train"][0].skip_unlabelled and recipe.data.labels == ("bad", "good", "Good ")


def test_odd_names_come_back_from_the_recipe(place: Path) -> None:
    labels = ["a, b", "c: d", "# e", "- f", "no", "0x1", "{g}", "\u2028h", "😀", "null"]
    text, label = 'The\n"text", really: ', "[label] #1, é"
    with Path("odd.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([text, label])
        writer.writerows([f"row number {n} is this one", labels[n % len(labels)]] for n in range(60))
    draft(Path("odd.csv"), DraftOptions(name="1.0"))
    recipe: Any = load_recipe("odd.yaml")
    source = recipe.data.parts["train"][0]
    assert (source.text, source.label, recipe.name) == (text, label, "1.0")
    assert sorted(recipe.data.labels) == sorted(labels)


def test_a_pretrained_start(place: Path) -> None:
    pytest.importorskip("transformers")
    from tests.export.hf_models import make_model

    make_model(place / "models" / "bert", "bert")
    found = draft(Path("data/reviews.csv"), DraftOptions(source="models/bert"))
    recipe: Any = load_recipe("reviews.yaml")
    assert recipe.model.kind == "pretrained" and recipe.model.source == str(place / "models" / "bert")
    assert "source: models/bert" in found.text and recipe.data.cleaning == "none"
    assert recipe.data.max_length <= recipe.model.max_positions
    assert recipe.training.epochs == 8 and recipe.training.schedule.kind == "linear"
