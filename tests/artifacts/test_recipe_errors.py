"""A wrong recipe is refused with file, line, key, what is allowed, and the nearest key."""

from pathlib import Path

import pytest

from edgeformer.artifacts.documents import shipped_folder, shipped_names
from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import load_recipe

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
