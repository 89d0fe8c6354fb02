"""Relative paths of a recipe are found from its own folder, and stay valid in the run that it becomes."""

from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.documents import YamlDocument, resolve_paths
from edgeformer.models import load_recipe
from tests.cli import test_bad_input

RECIPE = test_bad_input.RECIPE.replace("path: reviews.tsv", "path: data/reviews.csv").replace(
    "{kind: trained}", "{kind: file, path: ../words/tokenizer.json}"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``project/mine.yaml``, its data beside it; commands are started in ``elsewhere``."""
    for folder in ("project/data", "words", "elsewhere/data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "project" / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "project" / "data" / "reviews.csv").write_text("text,label\nfine,good\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def paths(*overrides: str) -> tuple[str, str]:
    recipe: Any = load_recipe("../project/mine.yaml", [*overrides])
    return recipe.data.parts["train"][0].path, recipe.tokenizer.path


def test_a_path_that_is_not_beside_the_recipe_starts_at_the_current_folder(place: Path) -> None:
    notes: list[str] = []
    load_recipe("../project/mine.yaml", None, notes.append)
    assert not notes and paths()[1] == str(place / "words/tokenizer.json")
    (place / "project" / "data" / "reviews.csv").rename(place / "elsewhere" / "data" / "reviews.csv")
    assert paths()[0] == str(place / "elsewhere/data/reviews.csv")
    load_recipe("../project/mine.yaml", None, notes.append)
    (note,) = notes
    assert note.startswith("data.parts.train.0.path: data/reviews.csv is not in the folder of the recipe; using ")
    (place / "elsewhere" / "data" / "reviews.csv").unlink()
    assert paths()[0] == str(place / "project/data/reviews.csv")  # which the message about it then names


def test_a_typed_path_starts_where_it_was_typed(place: Path) -> None:
    (place / "elsewhere" / "data" / "reviews.csv").write_text("text,label\n", encoding="utf-8")
    assert paths("data.parts.train.0.path=data/reviews.csv")[0] == str(place / "elsewhere/data/reviews.csv")
    part = "data.parts.train=[{kind: file, path: data/reviews.csv}]"
    assert paths(part)[0] == str(place / "elsewhere/data/reviews.csv")
    assert paths("data.parts.train.0.text=text")[0] == str(place / "project/data/reviews.csv")


def test_a_saved_recipe_is_the_same_wherever_it_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("../project/mine.yaml")
    saved = place / "elsewhere" / "artifacts" / "mine-001" / "recipe.yaml"
    saved.parent.mkdir(parents=True)
    saved.write_text(recipe.to_yaml(), encoding="utf-8")
    monkeypatch.chdir(place / "words")
    assert load_recipe(str(saved)) == recipe
    assert load_recipe(str(saved)).fingerprint() == recipe.fingerprint()


def test_folders_are_found_and_names_left_alone(tmp_path: Path) -> None:
    (tmp_path / "minilm").mkdir()
    (tmp_path / "glue").mkdir()
    parts = {"train": [{"kind": "hub", "name": name} for name in ("glue", "nyu-mll/glue")]}
    content = {"data": {"parts": parts}, "model": {"source": "minilm"}, "training": {"teacher": "another-run"}}
    document = YamlDocument("mine.yaml", content)
    resolve_paths(document, tmp_path, {"model": ("source",), "training": ("teacher",)})
    sources = document.content["data"]["parts"]["train"]
    assert [source["name"] for source in sources] == [str(tmp_path / "glue"), "nyu-mll/glue"]
    assert document.content["model"] == {"source": str(tmp_path / "minilm")}
    assert document.content["training"] == {"teacher": "another-run"}
