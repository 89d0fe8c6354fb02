"""What a training optimizes: every field of ``training`` has its effect, streamed sets, smaller vocabularies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InterruptedRun
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import plan_batches
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.models import load_recipe, read_run_recipe
from edgeformer.models.distillation import classification_loss
from edgeformer.run import read_run
from edgeformer.training.loop import objective
from edgeformer.training.loop.checkpoint import Position
from edgeformer.training.loop.distributed import connect
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.step import Stepper
from edgeformer.training.plan.plan import plan
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL, SMALL_LANGUAGE, classifier_recipe
from tests.data.conftest import write_jsonl
from tests.training.runs import Messages, StopAfter, assert_equal_weights, assert_same_run, weights


class TestStreaming:
    @pytest.fixture(params=["classification", "language-modeling"])
    def recipe(self, request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
        """Streamed rows of one JSONL file per part."""
        parts = {}
        for part, count, seed in (("train", 80, 1), ("validation", 40, 2), ("test", 40, 3)):
            path = write_jsonl(tmp_path / f"{part}.jsonl", synthetic_reviews(count, seed))
            parts[part] = f"[{{kind: file, path: {path}}}]"
        data = f"data.parts={{{', '.join(f'{part}: {sources}' for part, sources in parts.items())}}}"
        if request.param == "classification":
            base = [setting for setting in SMALL if not setting.startswith("data.parts")]
            small = [*base, "data.split=given", "model.hidden_size=16", "training.epochs=2", "training.batch_size=8"]
            return load_recipe("quickstart", [*small, data, "data.stream=true"])
        base = [setting for setting in SMALL_LANGUAGE if not setting.startswith("data.parts")]
        small = [*base, "model.loops=2", "model.exits=[1]"]
        return load_recipe("crt_mini", [*small, data, "data.first_n=null", "data.stream=true"])

    def test_resumed_run_is_identical(self, recipe: Recipe, tmp_path: Path) -> None:
        expected = train(recipe, TrainOptions(tmp_path / "expected", name="run"))
        assert read_run(expected).steps > 13
        with pytest.raises(InterruptedRun):
            train(recipe, TrainOptions(tmp_path / "stopped", name="run"), StopAfter(13))
        assert_same_run(train(recipe, TrainOptions(tmp_path / "stopped", name="run", resume=True)), expected)

    def test_weights_are_those_in_memory(self, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Only the order of the rows differs, so the streamed run gets the order in memory."""
        row_counts: list[int] = []

        def plan_in_memory(rows: Any, size: int, *, streamed: bool, **options: Any) -> Sequence[Any]:
            row_counts.extend([len(rows)] * streamed)
            return plan_batches(rows, size, **options)

        monkeypatch.setattr(objective, "plan_batches", plan_in_memory)
        in_memory = recipe.model_copy(update={"data": recipe.data.model_copy(update={"stream": False})})
        expected = train(in_memory, TrainOptions(tmp_path / "memory"))
        run = train(recipe, TrainOptions(tmp_path / "stream"))
        assert read_run(run).data == read_run(expected).data
        assert read_run(run).tokenizer_fingerprint == read_run(expected).tokenizer_fingerprint
        assert_equal_weights(run, expected)
        assert row_counts == [read_run(expected).data.rows["train"]] * 2  # in each epoch of the streamed run


def test_model_and_saved_recipe_follow_a_smaller_tokenizer(tmp_path: Path) -> None:
    """Both the original recipe, whose ``model.vocab_size`` is too large, and the saved one resume the run."""
    oversized = classifier_recipe([*SMALL, "training.epochs=1", "data.rows.train=0.05", "model.vocab_size=4000"])
    messages = Messages()
    run = train(oversized, TrainOptions(tmp_path, name="complete"), messages)
    saved = read_run_recipe(run)
    size = saved.model.vocab_size
    note = f"model.vocab_size is {size} instead of 4000"
    assert 100 < size < 4000 and read_run(run).vocabulary == size and messages.containing(note)
    assert size in {len(tensor) for tensor in weights(run).values()}
    for name, recipe in (("original", oversized), ("saved", saved)):
        with pytest.raises(InterruptedRun):
            train(oversized, TrainOptions(tmp_path, name=name), StopAfter(1))
        resumed = train(recipe, TrainOptions(tmp_path, name=name, resume=True))
        assert read_run(resumed).recipe_sha256 == read_run(run).recipe_sha256 == saved.fingerprint()
        assert_equal_weights(resumed, run)
    planned = plan(oversized, load_profile("rtx4050"))
    assert planned.parameters == read_run(run).parameters and any(note in line for line in planned.notes)


ROWS = 48
"""Rows of the training set: 80% of what is generated."""
BASE = [
    "data.parts.train.0.rows=60", "data.max_length=24", "model.vocab_size=150", "model.hidden_size=16",
    "model.ffn_size=32", "model.dropout=0.0", "training.epochs=1", f"training.batch_size={ROWS}",
    "training.precision=fp32", "training.schedule={kind: constant}", "training.clip_norm=null",
    "training.optimizer={lr: 0.5, eps: 1.0, weight_decay: 0.0}",
]  # fmt: skip
"""One step is an epoch. A large eps makes the step proportional to the gradient; otherwise AdamW hides its scale."""
DEFAULTS: dict[str, Any] = {"lr": 0.5, "eps": 1.0, "decay": 0.0, "clip": None, "smoothing": 0.0}
STEP_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "optimizer.lr": ("training.optimizer.lr=0.1", {"lr": 0.1}),
    "optimizer.eps": ("training.optimizer.eps=0.5", {"eps": 0.5}),
    "optimizer.weight_decay": ("training.optimizer.weight_decay=0.3", {"decay": 0.3}),
    "clip_norm": ("training.clip_norm=0.05", {"clip": 0.05}),
    "label_smoothing": ("training.label_smoothing=0.4", {"smoothing": 0.4}),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def objective_of(cache: Path, *changes: str) -> Objective:
    return Objective(load_recipe("quickstart", [*BASE, *changes]), cache, SILENT)


def take_step(cache: Path, change: str) -> dict[str, Tensor]:
    """Return the weights after one optimizer step."""
    objective = objective_of(cache, change)
    stepper = Stepper(objective, connect(objective.recipe, "cpu", sharded=False), 1)
    stepper.model.train()
    stepper.take(objective.steps(0)[0], Position(batch_size=ROWS))
    return {name: parameter.detach().clone() for name, parameter in objective.model.named_parameters()}


def expected_step(objective: Objective, values: dict[str, Any]) -> dict[str, Tensor]:
    """Compute the first step of AdamW (Loshchilov and Hutter, algorithm 2) on cross-entropy with smoothed labels."""
    lr, eps, decay, clip, smoothing = ({**DEFAULTS, **values}[name] for name in DEFAULTS)
    model = objective.model.train()
    batch, weight_sum = objective.batch(np.arange(len(objective.prepared.train)), torch.device("cpu"))
    logits = model(batch["input_ids"], batch.get("attention_mask"))
    logs = torch.log_softmax(logits, -1)
    nll = -logs[torch.arange(len(logits)), batch["labels"]]
    loss = ((1 - smoothing) * nll - smoothing * logs.mean(-1)).sum() / weight_sum
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights)
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))  # type: ignore[arg-type]
    factor = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
    result = {}
    for name, weight, gradient in zip(names, weights, gradients, strict=True):  # its moments: gradient, gradient²
        decayed = weight * (1 - lr * (decay if weight.ndim >= 2 else 0.0))
        result[name] = (decayed - lr * factor * gradient / ((factor * gradient).abs() + eps)).detach()
    return result


@pytest.mark.parametrize("field", STEP_FIELDS)
def test_step_follows_the_formula(field: str, cache: Path) -> None:
    change, values = STEP_FIELDS[field]
    objective, stepped = objective_of(cache, change), take_step(cache, change)
    expected, without = expected_step(objective, values), expected_step(objective, {})
    assert all(torch.allclose(stepped[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())
    difference = max(float((stepped[name] - value).abs().max()) for name, value in without.items())
    assert difference > 1e-3, f"training.{field} changes nothing"


def test_token_dropout(cache: Path) -> None:
    inputs: list[Tensor] = []

    class InputRecorder(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            inputs.append(ids)
            return torch.zeros(len(ids), 2)

    objective = objective_of(cache)
    recipe: Any = objective.recipe
    batch, _ = objective.batch(np.arange(ROWS), torch.device("cpu"))
    unknown = objective.prepared.tokenizer.token_to_id("[UNK]")
    special = torch.tensor([*objective.prepared.tokenizer.get_added_tokens_decoder()])
    is_text = ~torch.isin(batch["input_ids"], special)
    for share in (0.0, 0.25, 0.75):
        changed = recipe.model_copy(update={"training": recipe.training.model_copy(update={"token_dropout": share})})
        classification_loss(changed, objective.prepared)(InputRecorder(), batch)
        ids = inputs.pop()
        assert float((ids[is_text] == unknown).float().mean()) == pytest.approx(share, abs=0.1)
        assert torch.equal(ids[~is_text], batch["input_ids"][~is_text])
