"""Teachers of any family: their logits are computed once, from raw texts, and further texts need no labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import DataError, RecipeError
from edgeformer.artifacts.progress import SILENT
from edgeformer.data.batching import IGNORED
from edgeformer.data.prepare import sentences, unlabelled_texts
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.models import load_recipe
from edgeformer.models.distillation import classification_loss
from edgeformer.models.linear.adapter import ADAPTER
from edgeformer.models.weights import load_model
from edgeformer.run import read_run
from edgeformer.tasks import get_task
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.loop.objective import Objective
from edgeformer.training.plan.plan import plan
from edgeformer.training.train import TrainOptions, train
from tests.training.runs import Messages

CPU = torch.device("cpu")
DATA = (
    "data={parts: {train: [{kind: synthetic-reviews, rows: 300, seed: 3}]}, split: random-split, "
    "labels: [negative, positive], max_length: 32}"
)
ENCODER = [
    DATA, "training.epochs=2", "training.batch_size=32", "training.precision=fp32",
    "model={kind: encoder, vocab_size: 300, hidden_size: 16, layers: 1, iterations: 2, heads: 2, ffn_size: 16, "
    "residual_scale: 0.5}",
]  # fmt: skip


@pytest.fixture(scope="module")
def teacher(small_recipe: ClassificationRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A better classifier than 240 rows make."""
    return train(small_recipe, TrainOptions(tmp_path_factory.mktemp("artifacts"), name="teacher"))


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with wrong labels, which must not be read."""
    path = tmp_path_factory.mktemp("further") / "further.jsonl"
    rows = [json.dumps({"text": row.text, "label": "neither"}) for row in synthetic_reviews(1500, 9)]
    path.write_text("\n".join([*rows, rows[0]]) + "\n", encoding="utf-8")
    return path


def taught(name: str, settings: list[str], teacher: Path, further: Path, *changes: str) -> Any:
    unlabelled = f"data.unlabelled=[{{kind: file, path: {further}}}]"
    return load_recipe(name, [*settings, f"training.teacher={teacher}", unlabelled, *changes])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("linear_sst2", [DATA]), ("quickstart", ENCODER)])
def test_student_learns_from_texts_without_labels(
    name: str, settings: list[str], teacher: Path, further: Path, tmp_path: Path
) -> None:
    """Both families keep the teacher's logits in a file, and the second student computes none."""
    recipe, messages = taught(name, settings, teacher, further), Messages()
    manifest = read_run(train(recipe, TrainOptions(tmp_path, name="student"), messages))
    assert manifest.status == "finished" and 1000 < manifest.data.rows["train"] <= 240 + 1500
    assert sum(manifest.data.label_rows["train"].values()) == 240
    (stored,) = (tmp_path / ".cache/tokens").glob("teacher-*.npz")
    objective = Objective(recipe, tmp_path / ".cache/tokens", SILENT)
    rows = np.arange(len(objective.prepared.train))
    batch, _ = objective.batch(rows, CPU)
    assert (batch["labels"].numpy() == IGNORED).sum() == len(rows) - 240
    with np.load(stored, allow_pickle=False) as arrays:
        assert len(arrays["keys"]) == len(np.unique(arrays["keys"])) <= len(rows)
    first_text = next(iter(get_task(recipe.task).rows.prepare(recipe, tmp_path, SILENT).train_texts()))
    with torch.inference_mode():
        ids = torch.tensor([Tokenizer.from_file(str(teacher / "model/tokenizer.json")).encode(first_text).ids])
        torch.testing.assert_close(load_model(teacher)(ids)[0], batch["teacher_logits"][0], atol=1e-4, rtol=0)
    stored.write_bytes(stored.read_bytes()[:-4])
    again = Objective(recipe, tmp_path / ".cache/tokens", messages)
    assert any("is damaged" in message for message in messages.lines)
    np.testing.assert_allclose(again.prepared.teacher_logits, batch["teacher_logits"].numpy(), atol=1e-5)


def test_linear_fit_minimises_the_loss_of_distillation(teacher: Path, further: Path, tmp_path: Path) -> None:
    """The loss of the encoders, with the penalty, has no gradient at the fitted weights."""
    changes = ("training.distillation={weight: 0.6, temperature: 3.0}", "training.tolerance=1e-12",
               "training.regularization=2.0", "model.minimum_count=1")  # fmt: skip
    objective = Objective(taught("linear_sst2", [DATA], teacher, further, *changes), tmp_path, SILENT)
    model: Any = objective.model
    batch, rows = objective.batch(np.arange(len(objective.prepared.train)), CPU)
    loss = classification_loss(objective.recipe, objective.prepared)

    def bias_gradient() -> float:
        model.zero_grad()
        loss(model, batch).total.backward()
        return float(model.readout.bias.grad.abs().max()) / rows

    before = loss(model, batch).total.item()
    assert bias_gradient() > 1e-4
    ADAPTER.fit(model, objective.recipe, objective.prepared, 2000, lambda mean: True)
    assert bias_gradient() < 1e-5 and loss(model, batch).total.item() < 0.7 * before


def test_sentences_of_unlabelled_texts(tmp_path: Path) -> None:
    path = tmp_path / "reviews.jsonl"
    text = "It was <br /><br />a long and dull film. Short one. Would they make it again? It was a LONG and dull film."
    path.write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    assert sentences(text) == ["It was a long and dull film.", "Would they make it again?",
                               "It was a LONG and dull film."]  # fmt: skip
    source = f"{{kind: file, path: {path}}}"
    changes = ["training.teacher=x", f"data.unlabelled=[{source}]", "data.unlabelled_unit=sentences"]
    data: Any = load_recipe("quickstart", changes).data
    assert unlabelled_texts(data, ["would they  make it again?"]) == ["It was a long and dull film."]
    with pytest.raises(DataError, match=r"data\.unlabelled\.0\.rows: 5 rows requested, but there are 2"):
        unlabelled_texts(load_recipe("quickstart", [*changes, "data.unlabelled.0.rows=5"]).data, [])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("looped_mini", ["model.iterations=1"], "training.exit_weight has no effect without early exits"),
        ("looped_mini", ["training.checkpointing=cycles"], "checkpointing: cycles exists for model.kind: crt only"),
        ("looped_mini", ["model.fold=average"], r"model\.fold needs training\.teacher"),
        ("looped_mini", ["training.teacher=x", "training.distillation.states=1.0"],
         r"states: exists for pretrained encoders only"),
        ("linear_sst2", ["model.ngrams=[3, 1]"], r"ngrams: from 3 to 1 is empty"),
        ("linear_sst2", ["training.epochs=3"], r"training.epochs"),
        ("quickstart", ["data.unlabelled=[{kind: synthetic-reviews, rows: 9}]"],
         r"data\.unlabelled: has no effect without a teacher.*set training\.teacher"),
        ("quickstart", ["training.teacher=x", "data.unlabelled=[{kind: hub, name: a/b, text_pair: other}]"],
         "unlabelled: has pairs of texts where parts has single texts"),
        ("linear_sst2", ["training.teacher=x", "training.distillation.states=1.0"],
         r"training\.distillation\.states: a linear model has no states"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(name: str, changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(name, changes)


def test_plan_adds_the_time_of_the_teacher(teacher: Path, further: Path, tmp_path: Path) -> None:
    planned = plan(taught("linear_sst2", [DATA], teacher, further), load_profile("host"), tmp_path)
    assert "for the teacher's logits" in planned.time.basis
