"""A wrong recipe is refused with file, line, key, what is allowed, and the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeformer.artifacts.documents import load_profile, shipped_folder, shipped_names
from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import load_recipe
from edgeformer.tasks.classification import ClassificationRecipe

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


def test_resolved_recipe_reads_back_as_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("recurrent_sst2_fast")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    again = load_recipe(str(path))
    assert again == recipe
    assert again.fingerprint() == recipe.fingerprint()


def test_unknown_key_names_line_nearest_and_allowed(tmp_path: Path) -> None:
    text = QUICKSTART.replace("  epochs: ", "  epoch: ")
    line = next(i for i, line in enumerate(text.splitlines(), 1) if line.startswith("  epoch: "))
    message = refusal(tmp_path, text)
    assert f"recipe.yaml:{line}: unknown key 'training.epoch'; did you mean 'epochs'?" in message
    assert "batch_size" in message  # an allowed key
    assert "key 'training.epochs' is missing" in message


def test_unknown_key_inside_a_union_lists_that_variants_keys(tmp_path: Path) -> None:
    text = QUICKSTART.replace("{kind: cosine, warmup: 0.06}", "{kind: cosine, warmpu: 0.06}")
    message = refusal(tmp_path, text)
    assert "'training.schedule.warmpu'; did you mean 'warmup'?" in message
    assert "patience" not in message  # a key of another schedule


def test_wrong_type_is_not_coerced(tmp_path: Path) -> None:
    message = refusal(tmp_path, QUICKSTART.replace("vocab_size: 700", 'vocab_size: "700"'))
    assert "model.vocab_size" in message and "integer" in message and "'700'" in message


def test_wrong_choice_lists_the_allowed_values(tmp_path: Path) -> None:
    message = refusal(tmp_path, QUICKSTART.replace("split: random-split", "split: random"))
    assert "data.split" in message and "'glue-dev'" in message and "(got 'random')" in message


def test_unknown_kind_lists_the_kinds(tmp_path: Path) -> None:
    message = refusal(tmp_path, QUICKSTART.replace("kind: trained", "kind: traned"))
    assert "tokenizer.kind must be one of 'hub', 'file', 'trained', not 'traned'" in message


def test_repeated_key_is_refused(tmp_path: Path) -> None:
    assert "key 'seed' is given twice" in refusal(tmp_path, QUICKSTART + "\nseed: 3\n")


def test_empty_part_is_refused(tmp_path: Path) -> None:
    text = QUICKSTART.replace("      - {kind: synthetic-reviews, rows: 8000, seed: 1}", "      []")
    assert "data.parts.train" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a: [1", "not valid YAML"), ("- a", "must hold keys and values"), ("", "must hold keys and values")],
)
def test_unreadable_yaml(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


def test_recipe_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: é".encode("latin-1"))
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(str(path))


def test_missing_recipe_lists_the_shipped_ones_and_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"did you mean 'quickstart'\?.*recurrent_sst2"):
        load_recipe("quikstart")


def test_a_path_outside_of_the_clone_is_the_shipped_recipe_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []
    for path in ("recipes/quickstart.yaml", "./recipes/quickstart", "recipes/quickstart.yml"):
        assert load_recipe(path, note=notes.append) == load_recipe("quickstart")
        assert notes.pop().startswith(f"{path}: no such file; the shipped recipe 'quickstart' is used: ")
        with pytest.raises(RecipeError, match="no such file"):  # nobody would hear of it
            load_recipe(path)
    profile = load_profile("profiles/rtx4050.yaml", note=notes.append)
    assert profile == load_profile("rtx4050") and "the shipped device profile 'rtx4050' is used" in notes.pop()
    with pytest.raises(RecipeError, match="no such file"):  # the same file name in another folder
        load_recipe("no/such/quickstart.yaml", note=notes.append)
    with pytest.raises(RecipeError, match=r"no recipe 'recipes/quikstart\.yaml': no such file"):
        load_recipe("recipes/quikstart.yaml", note=notes.append)
    own = tmp_path / "recipes" / "quickstart.yaml"
    own.parent.mkdir()
    own.write_text(QUICKSTART.replace("name: quickstart", "name: mine"), encoding="utf-8")
    assert load_recipe("recipes/quickstart.yaml", note=notes.append).name == "mine" and not notes


def test_part_that_the_split_needs(tmp_path: Path) -> None:
    message = refusal(tmp_path, QUICKSTART.replace("split: random-split", "split: glue-dev"))
    assert "needs the parts train, validation; missing: validation" in message


def test_heads_must_divide(tmp_path: Path) -> None:
    assert "hidden_size 64 must be heads (3)" in refusal(tmp_path, QUICKSTART.replace("heads: 2", "heads: 3"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.layer_decay=0.5", "training.layer_decay: is for pretrained layers"),
        ("training.distillation.states=1.0", "distillation: does nothing without a teacher"),
        ("training.distillation={weight: 0.5}", "distillation: does nothing without a teacher"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(override: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("quickstart", [override])
    defaults = ["training.layer_decay=1.0", "training.distillation={weight: 0.7, temperature: 2.0, states: 0.0}"]
    assert load_recipe("quickstart", defaults) == load_recipe("quickstart")


class TestOverrides:
    def test_value_is_yaml_and_validated(self) -> None:
        recipe = load_recipe("quickstart", ["training.optimizer.lr=1e-3", "data.parts.train.0.rows=50", "target=null"])
        assert recipe.training.optimizer.lr == 1e-3
        assert recipe.data.parts["train"][0].model_dump()["rows"] == 50
        assert recipe.target is None

    def test_replaces_a_whole_section(self) -> None:
        recipe = load_recipe("quickstart", ["training.schedule={kind: plateau, patience: 1}"])
        assert recipe.training.schedule.kind == "plateau"

    def test_creates_a_section_that_is_absent(self) -> None:
        recipe = load_recipe("quickstart", ["training.early_stopping.patience=2"])
        assert recipe.training.early_stopping is not None
        assert recipe.training.early_stopping.patience == 2

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


def test_recipes_are_frozen() -> None:
    recipe: ClassificationRecipe = load_recipe("quickstart")
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 1  # type: ignore[misc]
