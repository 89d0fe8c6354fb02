"""A wrong recipe is refused with file, line, key, what is allowed and the nearest key; relative paths stay valid."""

from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.documents import YamlDocument, resolve_paths, shipped_folder, shipped_names
from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import load_recipe
from tests.cli import test_bad_input

QUICKSTART = (shipped_folder("recipes") / "quickstart.yaml").read_text(encoding="utf-8")


def refusal(tmp_path: Path, text: str, overrides: list[str] | None = None) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_names("recipes"))
def test_shipped_recipes_are_valid_and_named_like_their_file(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.target == "rtx4050"


def test_an_unknown_key_is_refused_with_line_nearest_and_allowed(tmp_path: Path) -> None:
    text = QUICKSTART.replace("  epochs: ", "  epoch: ")
    line = next(i for i, line in enumerate(text.splitlines(), 1) if line.startswith("  epoch: "))
    message = refusal(tmp_path, text)
    assert f"recipe.yaml:{line}: unknown key 'training.epoch'; did you mean 'epochs'?" in message
    assert "batch_size" in message  # an allowed key
    assert "key 'training.epochs' is missing" in message
    text = QUICKSTART.replace("{kind: cosine, warmup: 0.06}", "{kind: cosine, warmpu: 0.06}")
    message = refusal(tmp_path, text)
    assert "'training.schedule.warmpu'; did you mean 'warmup'?" in message
    assert "patience" not in message  # a key of another schedule


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("vocab_size: 700", 'vocab_size: "700"', ["model.vocab_size", "integer", "'700'"]),
        ("split: random-split", "split: random", ["data.split", "'glue-dev'", "(got 'random')"]),
        ("kind: trained", "kind: traned", ["tokenizer.kind must be one of 'hub', 'file', 'source'", "not 'traned'"]),
        ("name: quickstart", "name: quickstart\nname: x", ["key 'name' is given twice"]),
        ("      - {kind: synthetic-reviews, rows: 8000, seed: 1}", "      []", ["data.parts.train"]),
        ("split: random-split", "split: glue-dev", ["needs the parts train, validation; missing: validation"]),
        ("heads: 2", "heads: 3", ["hidden_size 64 must be heads (3)"]),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, old: str, new: str, parts: list[str]) -> None:
    assert old in QUICKSTART
    message = refusal(tmp_path, QUICKSTART.replace(old, new))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a: [1", "not valid YAML"), ("- a", "must hold keys and values"), ("", "must hold keys and values")],
)
def test_unreadable_yaml(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_a_recipe_that_is_not_utf8_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é".encode("latin-1"))
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(str(path))
    with pytest.raises(RecipeError, match=r"did you mean 'quickstart'\?.*recurrent_sst2"):
        load_recipe("quikstart")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.layer_decay=0.5", "training.layer_decay applies to pretrained encoders"),
        ("training.distillation.states=1.0", "distillation: has no effect without a teacher"),
        ("training.distillation={weight: 0.5}", "distillation: has no effect without a teacher"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe("quickstart", [override])
    defaults = ["training.layer_decay=1.0", "training.distillation={weight: 0.7, temperature: 2.0, states: 0.0}"]
    assert load_recipe("quickstart", defaults) == load_recipe("quickstart")


class TestOverrides:
    def test_value_is_yaml_and_validated(self) -> None:
        overrides = ["training.optimizer.lr=1e-3", "data.parts.train.0.rows=50", "target=null"]
        sections = ["training.schedule={kind: plateau, patience: 1}", "training.early_stopping.patience=2"]
        recipe = load_recipe("quickstart", [*overrides, *sections])
        assert recipe.training.optimizer.lr == 1e-3
        assert recipe.data.parts["train"][0].model_dump()["rows"] == 50
        assert recipe.target is None and recipe.training.schedule.kind == "plateau"
        assert recipe.training.early_stopping is not None and recipe.training.early_stopping.patience == 2
        with pytest.raises(ValueError, match="frozen"):
            recipe.seed = 1  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("override", "expected"),
        [
            ("training.epochs", "write key.path=value"),
            ("training.epochz=3", "--set training.epochz=3: unknown key 'training.epochz'; did you mean 'epochs'?"),
            ("training.epochs=many", "--set training.epochs=many: training.epochs"),
            ("training.epochs.x=3", "training.epochs is a single value"),
            ("data.parts.train.7.rows=3", "'7' is not one of its positions 0…0"),
            ("training.epochs=[3", "not valid YAML"),
        ],
    )
    def test_wrong_ones_are_named(self, override: str, expected: str) -> None:
        with pytest.raises(RecipeError) as caught:
            load_recipe("quickstart", [override])
        assert expected in str(caught.value)


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
