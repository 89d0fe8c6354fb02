"""The models of a search: their order, their teachers, and where further texts are used."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from edgeformer.artifacts.progress import SILENT
from edgeformer.data.sources import Columns
from edgeformer.model_search.ladder import ladder_of_file, ladder_of_recipe
from edgeformer.models import load_recipe

TAUGHT = {"linear-distilled", "light-distilled", "folded"}
WITH_SOURCE = ["linear", "frozen", "small", "light", "pretrained"]
UNLABELLED = ["training.teacher=x", "data.unlabelled=[{kind: synthetic-reviews, rows: 9}]"]
TOPICS = ["task=multi-label-classification", "tokenizer={kind: trained}", "model={kind: linear}", "training={}"]


@pytest.mark.parametrize(
    ("name", "changes", "source", "expected"),
    [
        ("quickstart", UNLABELLED, True,
         [*WITH_SOURCE, "folded", "linear-distilled", "light-distilled"]),
        ("quickstart", TOPICS, True, WITH_SOURCE),
        ("quickstart", [], False, ["linear", "small", "light"]),
    ],
)  # fmt: skip
def test_models_from_cheap_to_expensive(name, changes, source, expected, minilm, tmp_path):
    """Every model is a valid recipe, and only those with a teacher read texts without labels."""
    if changes == TOPICS:
        lines = [f'{number} cups;"{("food", "price", "food,price")[number % 3]}"' for number in range(60)]
        (tmp_path / "topics.csv").write_text("\n".join(["text;label", *lines]), encoding="utf-8")
        part = f"{{kind: file, path: {tmp_path / 'topics.csv'}, delimiter: ';'}}"
        data = f"parts: {{train: [{part}]}}, split: stratified, labels: [food, price], label_separator: ','"
        changes = [*changes, f"data={{{data}, max_length: 32}}"]
    ladder = ladder_of_recipe(load_recipe(name, changes), str(minilm) if source else None)
    assert [model.name for model in ladder] == expected
    for model in ladder:
        assert bool(model.teachers) == (model.name in TAUGHT)
        sections = {"name": model.name, **model.sections}
        if model.teachers:
            sections["training"] = {**sections["training"], "teacher": "some-run"}
        path = tmp_path / f"{model.name}.yaml"
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        recipe: Any = load_recipe(str(path))
        assert bool(recipe.data.unlabelled) == (bool(model.teachers) and changes == UNLABELLED)


def test_spans_get_the_pretrained_encoder_first(minilm: Path, tmp_path: Path) -> None:
    """The others would use up the budget; the larger is skipped where the pretrained encoder is far better."""
    path = tmp_path / "names.conll"
    path.write_text("".join(f"Ada B-PER\nis O\nin O\nUlm{number} B-LOC\n\n" for number in range(40)), encoding="utf-8")
    ladder = ladder_of_file(path, Columns(), str(minilm), SILENT)
    assert [model.name for model in ladder] == ["pretrained", "small", "light"]
