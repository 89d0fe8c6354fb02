"""Looped decoder: exits, caches, and layers that are folded from a teacher, whose probabilities it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from edgeformer.artifacts.data_config import FileTokenizer
from edgeformer.artifacts.errors import RecipeError
from edgeformer.data.batching import IGNORED
from edgeformer.models.adapter import count_parameters
from edgeformer.models.blocks.language_loss import CHUNK_TOKENS, Taught, chunked_loss, full_loss
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.adapter import ADAPTER
from edgeformer.models.decoder.model import CachedDecoder, DecoderModel
from edgeformer.models.weights import load_model
from edgeformer.run import Run
from edgeformer.training.train import TrainOptions, train
from tests.export.language_run import language_recipe, write_language_run

SIZES: dict[str, Any] = {
    "kind": "decoder", "vocab_size": 100, "hidden_size": 48, "layers": 2, "iterations": 3, "heads": 6, "kv_heads": 2,
    "ffn_size": 64, "max_positions": 64,
}  # fmt: skip
IDS = torch.arange(20).reshape(2, 10) * 7 % 100


def decoder(**changes: Any) -> DecoderModel:
    torch.manual_seed(0)
    return DecoderModel(DecoderConfig(**{**SIZES, **changes})).eval()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 4}, "kv_heads must be a divisor of heads"),
        ({"heads": 5, "kv_heads": 1}, "hidden_size 48 must be a multiple of heads"),
        ({"heads": 16, "kv_heads": 1}, "head_size must be even"),
        ({"exits": [2, 1]}, "exits must be increasing iterations before the last one"),
        ({"exits": [3]}, "exits must be increasing iterations before the last one"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DecoderConfig(**{**SIZES, **changes})


def test_every_iteration_is_an_exit_unless_the_recipe_names_them() -> None:
    assert decoder().exits == (1, 2, 3) and decoder(exits=[2]).exits == (2, 3) and decoder(exits=[]).exits == (3,)
    assert [*decoder(exits=[2])(IDS)] == [2, 3] and [*decoder(exits=[2])(IDS, every=True)] == [0, 1, 2, 3]


def test_a_tied_head_is_no_parameter_of_its_own() -> None:
    tied, separate = decoder(), decoder(tied=False)
    assert count_parameters(separate) - count_parameters(tied) == 100 * 48
    assert "head.weight" not in tied.state_dict() and tied.head.weight is tied.tokens.weight
    assert ADAPTER.needed(tied)[3] == ADAPTER.needed(separate)[3]  # ONNX needs both orders of the table


@torch.inference_mode()
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True}, {"head_size": 16, "kv_heads": 6}])
def test_caches_change_no_answer(changes: dict[str, Any]) -> None:
    model = decoder(**changes)
    cached, states = CachedDecoder(model), []
    for start, end in ((0, 4), (4, 5), (5, 10)):
        state = cached.embed(IDS[:, start:end], start, keep=True)
        for number in range(model.loops):
            peeked = cached.run_loop(number, state, keep=False)
            state = cached.run_loop(number, state, keep=True)
            assert torch.equal(peeked, state)
        states.append(state)
    assert torch.allclose(cached.logits(torch.cat(states, 1), 3), model.logits(IDS), atol=1e-5)


def test_a_decoder_without_early_exits_trains_and_is_scored(tmp_path: Path) -> None:
    recipe = language_recipe(**{**SIZES, "vocab_size": 300, "iterations": 1}, exits=[])
    run = Run.open(train(recipe, TrainOptions(tmp_path, name="stacked", max_steps=2)))
    assert run.exits == (1,) and run.manifest.validation is not None
    assert [*run.manifest.validation.exits] == ["1"]


TEACHER_SIZES: dict[str, Any] = {
    "kind": "decoder", "hidden_size": 32, "layers": 4, "iterations": 1, "heads": 4, "kv_heads": 2, "ffn_size": 48,
    "exits": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_run(tmp_path_factory.mktemp("teacher") / "teacher", language_recipe(**TEACHER_SIZES))


def student(teacher: Path, fold: str | None = "stepwise", **model: Any) -> Any:
    recipe = language_recipe(**{**TEACHER_SIZES, "layers": 2, "iterations": 2, "vocab_size": 300, **model})
    training = recipe.training.model_copy(update={"teacher": str(teacher)})
    tokenizer = FileTokenizer(kind="file", path=str(teacher / "model" / "tokenizer.json"))
    folded = recipe.model.model_copy(update={"fold": fold})
    return recipe.model_copy(update={"training": training, "model": folded, "tokenizer": tokenizer})


@pytest.mark.parametrize(("fold", "replaced"), [("stepwise", [(0,), (2,)]), ("average", [(0, 2), (1, 3)])])
def test_a_folded_decoder_begins_with_its_teachers_layers(teacher: Path, fold: str, replaced: list[Any]) -> None:
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
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"distillation": distillation})})
    before, after = DecoderModel(recipe.model), train(recipe, TrainOptions(tmp_path, name="folded", max_steps=30))
    ADAPTER.start(before, recipe)
    ids = torch.arange(60).reshape(2, 30) * 7 % 300
    with torch.no_grad():
        known = load_model(teacher).logits(ids).softmax(-1)
        answers = (model.eval().logits(ids).log_softmax(-1) for model in (load_model(after), before))
        closer, farther = (float((known * (known.log() - answer)).sum(-1).mean()) for answer in answers)
    assert closer < 0.8 * farther
    assert Run.open(after).manifest.memory is not None


def test_chunks_and_recomputation_change_neither_loss_nor_gradients() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(**{**TEACHER_SIZES, "vocab_size": 90, "max_positions": 400, "iterations": 2, "exits": [1]})
    model, other = DecoderModel(config).double(), DecoderModel(config).double()
    ids, targets = torch.randint(0, 90, (2, 2, 400))
    targets[0, :50] = IGNORED
    assert ids.numel() > CHUNK_TOKENS
    with torch.no_grad():
        taught = Taught(other(ids)[2].flatten(0, 1), other.head.weight, 0.6, 2.0)
    results: list[tuple[Tensor, dict[str, Tensor]]] = []
    for compute, model.checkpointing in ((full_loss, "none"), (chunked_loss, "none"), (full_loss, "loop")):
        model.zero_grad()
        total, losses = compute(model, model(ids), targets, 0.3, taught)
        total.backward()
        plain, _ = compute(model, model(ids), targets, 0.3)
        assert total.detach() != plain.detach() and sorted(losses) == [1, 2]
        results.append((total.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    full, *others = results
    for result in others:
        torch.testing.assert_close(result, full)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"ffn_size": 64}, r"differs in model\.ffn_size; it must be a decoder of 4 layers"),
        ({"iterations": 3}, "has another number of layers; it must be a decoder of 6 layers"),
        ({"vocab_size": 200}, r"does language-modeling with 300 tokens; the student .* with 200"),
    ],
)
def test_unsuitable_teachers_are_refused(teacher: Path, tmp_path: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        train(student(teacher, **model), TrainOptions(tmp_path))
