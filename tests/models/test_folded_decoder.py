"""A decoder folded from its teacher's layers: what it begins with, what it learns, and which teachers are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import RecipeError
from edgeformer.data.batching import IGNORED
from edgeformer.models import load_recipe
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.adapter import ADAPTER
from edgeformer.models.decoder.model import DecoderModel
from edgeformer.models.language_loss import CHUNK_TOKENS, Taught, chunked_loss, full_loss
from edgeformer.models.weights import load_model
from edgeformer.run import Run
from edgeformer.training.plan.plan import plan
from edgeformer.training.train import TrainOptions, train
from tests.export.language_run import language_recipe, write_language_run

SIZES: dict[str, Any] = {
    "kind": "decoder", "hidden_size": 32, "layers": 4, "iterations": 1, "heads": 4, "kv_heads": 2, "ffn_size": 48,
    "exits": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_run(tmp_path_factory.mktemp("teacher") / "teacher", language_recipe(**SIZES))


def student(teacher: Path, fold: str | None = "stepwise", **model: Any) -> Any:
    recipe = language_recipe(**{**SIZES, "layers": 2, "iterations": 2, "vocab_size": 300, **model})
    training = recipe.training.model_copy(update={"teacher": str(teacher)})
    tokenizer = load_recipe(
        "looped_mini", [f"tokenizer={{kind: file, path: {teacher / 'model' / 'tokenizer.json'}}}"]
    ).tokenizer
    folded = recipe.model.model_copy(update={"fold": fold})
    return recipe.model_copy(update={"training": training, "model": folded, "tokenizer": tokenizer})


@pytest.mark.parametrize(("fold", "replaced"), [("stepwise", [(0,), (2,)]), ("average", [(0, 2), (1, 3)])])
def test_a_folded_decoder_begins_with_layers_of_its_teacher(
    teacher: Path, fold: str, replaced: list[tuple[int, ...]]
) -> None:
    recipe, source = student(teacher, fold), load_model(teacher).state_dict()
    model = DecoderModel(recipe.model)
    assert ADAPTER.start(model, recipe) == ()
    state = model.state_dict()
    assert torch.equal(state["tokens.weight"], source["tokens.weight"])
    for number, layers in enumerate(replaced):
        expected = sum((source[f"layers.{layer}.ffn.w12.weight"] for layer in layers), torch.zeros(())) / len(layers)
        torch.testing.assert_close(state[f"layers.{number}.ffn.w12.weight"], expected)


def test_it_learns_from_its_teacher_and_comes_closer_to_it(teacher: Path, tmp_path: Path) -> None:
    recipe = student(teacher)
    distillation = recipe.training.distillation.model_copy(update={"weight": 1.0, "temperature": 1.0})
    training = recipe.training.model_copy(update={"distillation": distillation})
    recipe = recipe.model_copy(update={"training": training})
    before, after = DecoderModel(recipe.model), train(recipe, TrainOptions(tmp_path, name="folded", max_steps=30))
    ADAPTER.start(before, recipe)
    ids = torch.arange(60).reshape(2, 30) * 7 % 300
    with torch.no_grad():
        known = load_model(teacher).logits(ids).softmax(-1)
        distances = [
            float((known * (known.log() - model.eval().logits(ids).log_softmax(-1))).sum(-1).mean())
            for model in (before, load_model(after))
        ]
    assert distances[1] < 0.8 * distances[0]
    assert Run.open(after).manifest.memory is not None


def test_chunks_change_neither_loss_nor_gradients() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(**{**SIZES, "vocab_size": 90, "max_positions": 400, "iterations": 2, "exits": [1]})
    model, other = DecoderModel(config).double(), DecoderModel(config).double()
    ids = torch.randint(0, 90, (2, 400))
    targets = torch.randint(0, 90, (2, 400))
    targets[0, :50] = IGNORED
    assert ids.numel() > CHUNK_TOKENS
    with torch.no_grad():
        taught = Taught(other(ids)[2].flatten(0, 1), other.head.weight, 0.6, 2.0)
    results: list[tuple[Tensor, list[Tensor]]] = []
    for compute in (full_loss, chunked_loss):
        model.zero_grad()
        total, losses = compute(model, model(ids), targets, 0.3, taught)
        total.backward()
        plain, _ = compute(model, model(ids), targets, 0.3)
        assert total.detach() != plain.detach() and sorted(losses) == [1, 2]
        results.append((total.detach(), [parameter.grad.clone() for parameter in model.parameters()]))  # type: ignore[union-attr]
    (full, full_grads), (chunked, chunked_grads) = results
    torch.testing.assert_close(chunked, full)
    for name, expected, got in zip(dict(model.named_parameters()), full_grads, chunked_grads, strict=True):
        torch.testing.assert_close(got, expected, msg=name)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"ffn_size": 64}, r"differs in model\.ffn_size; it must be a decoder of 4 layers"),
        ({"iterations": 3}, "has another number of layers; it must be a decoder of 6 layers"),
        ({"vocab_size": 200}, r"does language-modeling with 300 tokens; the student .* with 200"),
    ],
)
def test_a_teacher_that_cannot_be_folded_is_refused(
    teacher: Path, tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        train(student(teacher, **model), TrainOptions(tmp_path))


def test_a_teacher_with_another_tokenizer_is_refused(teacher: Path, tmp_path: Path) -> None:
    recipe = student(teacher).model_copy(update={"tokenizer": language_recipe(**SIZES).tokenizer, "seed": 7})
    recipe = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"min_characters": 60}), "model": recipe.model}
    )
    with pytest.raises(RecipeError, match=r"training\.teacher: .* tokenizes differently"):
        train(recipe, TrainOptions(tmp_path))


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"model\.fold needs training\.teacher"):
        load_recipe("looped_mini", ["model.fold=average"])
    with pytest.raises(RecipeError, match=r"training\.distillation\.states: exists for pretrained encoders only"):
        load_recipe("looped_mini", ["training.teacher=x", "training.distillation.states=1.0"])


def test_a_plan_counts_the_teacher(teacher: Path, tmp_path: Path) -> None:
    recipe = student(teacher)
    alone = recipe.model_copy(update={"training": recipe.training.model_copy(update={"teacher": None})})
    with_teacher, without = (plan(each, load_profile("host"), tmp_path).breakdown.weights for each in (recipe, alone))
    assert with_teacher > 1.5 * without
