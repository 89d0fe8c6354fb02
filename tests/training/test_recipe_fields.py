"""Every field of ``training`` has its documented effect: a number differs as the formula says.

A field that is not read or not passed on fails here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import load_recipe
from edgeformer.models.distillation import classification_loss
from edgeformer.training.loop.checkpoint import Position
from edgeformer.training.loop.distributed import connect
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.step import Stepper

ROWS = 48
"""Rows of the training set: 80% of what is generated."""
BASE = [
    "data.parts.train.0.rows=60", "data.max_length=24", "model.vocab_size=150", "model.hidden_size=16",
    "model.ffn_size=32", "model.dropout=0.0", "training.epochs=1", f"training.batch_size={ROWS}",
    "training.precision=fp32", "training.schedule={kind: constant}", "training.clip_norm=null",
    "training.optimizer={lr: 0.5, eps: 1.0, weight_decay: 0.0}",
]  # fmt: skip
"""One step is an epoch. A large eps makes the step proportional to the gradient; otherwise AdamW hides its scale."""
DEFAULTS: dict[str, Any] = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1.0, "decay": 0.0, "clip": None, "smoothing": 0.0}
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
    lr, betas, eps, decay, clip, smoothing = ({**DEFAULTS, **values}[name] for name in DEFAULTS)
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
    for name, weight, gradient in zip(names, weights, gradients, strict=True):
        scaled = gradient * factor
        first, second = (1 - betas[0]) * scaled / (1 - betas[0]), (1 - betas[1]) * scaled**2 / (1 - betas[1])
        decayed = weight * (1 - lr * (decay if weight.ndim >= 2 else 0.0))
        result[name] = (decayed - lr * first / (second.sqrt() + eps)).detach()
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
    special = [number for number, token in objective.prepared.tokenizer.get_added_tokens_decoder().items()]
    is_text = ~torch.isin(batch["input_ids"], torch.tensor(special))
    for share in (0.0, 0.25, 0.75):
        training = recipe.training.model_copy(update={"token_dropout": share})
        changed: Recipe = recipe.model_copy(update={"training": training})
        classification_loss(changed, objective.prepared)(InputRecorder(), batch)
        ids = inputs.pop()
        assert float((ids[is_text] == unknown).float().mean()) == pytest.approx(share, abs=0.1)
        assert torch.equal(ids[~is_text], batch["input_ids"][~is_text])
