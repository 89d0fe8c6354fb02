"""Every field of a recipe's ``training`` and ``model`` does what it says: with and without it a number differs, as the
formula says. A field that nobody reads, or that is not passed on, fails here; so does a new one without an entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import Tensor, nn

from edgeformer.artifacts.data_config import DataConfig, FileSource
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.recipe import CompileConfig, EarlyStopping, OptimizerConfig, Recipe
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.adapter import Place, count_parameters
from edgeformer.models.crt import CRTConfig
from edgeformer.models.distillation import classification_loss
from edgeformer.models.encoder import EncoderConfig
from edgeformer.tasks import task_named
from edgeformer.tasks.classification import ClassificationTraining
from edgeformer.tasks.language_modeling import LanguageTraining
from edgeformer.training.objective import Objective
from edgeformer.training.optimizer import build_optimizer
from edgeformer.training.train import TrainOptions, train

ROWS = 48
"""Rows of the training set: 80 % of what is generated."""
BASE = [
    "data.parts.train.0.rows=60", "data.max_length=24", "model.vocab_size=150", "model.hidden_size=16",
    "model.ffn_size=32", "model.dropout=0.0", "training.epochs=1", f"training.batch_size={ROWS}",
    "training.precision=fp32", "training.schedule={kind: constant}", "training.clip_norm=null",
    "training.optimizer={lr: 0.5, eps: 1.0, weight_decay: 0.0}",
]  # fmt: skip


def metrics(run: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# One optimizer step over the whole training set: its order does not matter, and the formula can be written down.


def one_step(folder: Path, *changes: str) -> tuple[Recipe, Objective, dict[str, Tensor]]:
    """A recipe, what it trains on with fresh weights, and the weights after its first step."""
    recipe = load_recipe("quickstart", [*BASE, *changes])
    run = train(recipe, TrainOptions(folder / "artifacts", name="one", max_steps=1))
    objective = Objective(recipe, folder / "cache", Place("cpu", "fp32"), SILENT)
    return recipe, objective, load_file(run / "model" / "model.safetensors")


def by_hand(
    objective: Objective,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    clip: float | None,
    smoothing: float,
) -> dict[str, Tensor]:
    """The first step of AdamW (Loshchilov and Hutter, algorithm 2) on mean cross-entropy with smoothed labels."""
    model = objective.model.train()
    batch, counted = objective.batch(np.arange(len(objective.prepared.train)), torch.device("cpu"))
    logits = model(batch["input_ids"], batch.get("attention_mask"))
    logs = torch.log_softmax(logits, -1)
    right = -logs[torch.arange(len(logs)), batch["labels"]]
    loss = ((1 - smoothing) * right - smoothing * logs.mean(-1)).sum() / counted
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, weights)
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))  # type: ignore[arg-type]
    factor = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
    found = {}
    for name, weight, gradient in zip(names, weights, gradients, strict=True):
        scaled = gradient * factor
        first, second = (1 - betas[0]) * scaled / (1 - betas[0]), (1 - betas[1]) * scaled**2 / (1 - betas[1])
        kept = weight * (1 - lr * (decay if weight.ndim >= 2 else 0.0))
        found[name] = (kept - lr * first / (second.sqrt() + eps)).detach()
    return found


# A large eps keeps the step in proportion to the gradient, as SGD does: else AdamW hides what scales it.
USUAL: dict[str, Any] = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1.0, "decay": 0.0, "clip": None, "smoothing": 0.0}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "optimizer.lr": ("training.optimizer.lr=0.1", {"lr": 0.1}),
    "optimizer.eps": ("training.optimizer.eps=0.5", {"eps": 0.5}),
    "optimizer.weight_decay": ("training.optimizer.weight_decay=0.3", {"decay": 0.3}),
    "clip_norm": ("training.clip_norm=0.05", {"clip": 0.05}),
    "label_smoothing": ("training.label_smoothing=0.4", {"smoothing": 0.4}),
}


@pytest.mark.parametrize("field", STEPS)
def test_one_step_is_the_formulas_with_the_field_and_not_without_it(field: str, tmp_path: Path) -> None:
    change, numbers = STEPS[field]
    _, objective, after = one_step(tmp_path, change)
    expected, without = by_hand(objective, **{**USUAL, **numbers}), by_hand(objective, **USUAL)
    assert all(torch.allclose(after[name], value, rtol=1e-5, atol=1e-6) for name, value in expected.items())
    apart = max(float((after[name] - value).abs().max()) for name, value in without.items())
    assert apart > 1e-3, f"training.{field} changes nothing"


def test_kernels_of_the_optimizer_are_others_and_take_the_same_step(tmp_path: Path) -> None:
    after = {}
    for kernels in ("fused", "foreach", "loop"):
        change = f"training.optimizer.kernels={kernels}"
        after[kernels] = one_step(tmp_path / kernels, change)[2]
        config = load_recipe("quickstart", [*BASE, change]).training.optimizer
        built = build_optimizer(nn.Linear(2, 2), config).defaults
        assert (built["fused"], built["foreach"]) == (kernels == "fused", {"foreach": True, "loop": False}.get(kernels))
    for kernels in ("foreach", "loop"):
        assert all(torch.allclose(after[kernels][name], value, atol=1e-6) for name, value in after["fused"].items())


def test_betas_weigh_earlier_gradients(tmp_path: Path) -> None:
    """In the first step they cancel out (by bias correction); from the second on they count."""
    weights = []
    for number, betas in enumerate(("[0.9, 0.999]", "[0.0, 0.999]", "[0.9, 0.1]")):
        recipe = load_recipe("quickstart", [*BASE, f"training.optimizer.betas={betas}", "training.epochs=2"])
        run = train(recipe, TrainOptions(tmp_path / str(number), name="two"))
        weights.append(load_file(run / "model" / "model.safetensors")["tokens.weight"])
    assert not torch.allclose(weights[0], weights[1]) and not torch.allclose(weights[0], weights[2])


def test_accumulation_multiplies_the_rows_of_a_step_and_pieces_change_nothing(tmp_path: Path) -> None:
    whole = one_step(tmp_path / "whole")[2]
    pieces = one_step(tmp_path / "pieces", f"training.batch_size={ROWS // 4}", "training.accumulation=4")[2]
    fewer = one_step(tmp_path / "fewer", f"training.batch_size={ROWS // 4}")[2]
    assert all(torch.allclose(whole[name], pieces[name], atol=1e-6) for name in whole)
    assert any(not torch.allclose(whole[name], fewer[name], atol=1e-4) for name in whole)


def test_epochs_and_log_every_are_counted(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [*BASE, "training.batch_size=8", "training.epochs=3", "training.log_every=5"])
    run = train(recipe, TrainOptions(tmp_path, name="counted"))
    steps = -(-ROWS // 8) * 3
    assert [record["kind"] for record in metrics(run)].count("epoch") == 3
    assert [record["step"] for record in metrics(run) if record["kind"] == "step"] == list(range(5, steps + 1, 5))


def test_early_stopping_waits_for_its_patience_and_wants_its_delta(tmp_path: Path) -> None:
    """Nothing is learned, so no epoch improves on the first one."""
    still = [*BASE, "training.optimizer.lr=1e-12", "training.epochs=9"]
    for patience in (1, 3):
        recipe = load_recipe("quickstart", [*still, f"training.early_stopping={{patience: {patience}}}"])
        run = train(recipe, TrainOptions(tmp_path / str(patience), name="still"))
        assert [record["kind"] for record in metrics(run)].count("epoch") == 1 + patience
    learning = [*BASE, "training.optimizer.eps=1e-8", "training.optimizer.lr=1e-3", "training.epochs=5"]
    for delta, epochs in ((0.0, 5), (10.0, 3)):  # every epoch improves a little; none by 10 nats
        stop = f"training.early_stopping={{patience: 2, min_delta: {delta}}}"
        run = train(load_recipe("quickstart", [*learning, stop]), TrainOptions(tmp_path / f"delta{delta}", name="d"))
        assert [record["kind"] for record in metrics(run)].count("epoch") == epochs


def test_batching_by_length_makes_steps_of_like_rows(tmp_path: Path) -> None:
    spreads = {}
    for kind in ("shuffled", "bucketed"):
        recipe = load_recipe("quickstart", [*BASE, "training.batch_size=8", f"training.batching={kind}"])
        objective = Objective(recipe, tmp_path, Place("cpu", "fp32"), SILENT)
        lengths = objective.prepared.train.lengths
        spreads[kind] = np.mean([np.ptp(lengths[rows]) for rows in objective.steps(0)])
    assert spreads["bucketed"] < spreads["shuffled"] / 2


def test_token_dropout_is_the_share_of_tokens_that_become_unknown(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Watching(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            seen.append(ids)
            return torch.zeros(len(ids), 2)

    recipe, objective, _ = one_step(tmp_path)
    batch, _ = objective.batch(np.arange(ROWS), torch.device("cpu"))
    unknown = objective.prepared.tokenizer.token_to_id("[UNK]")
    special = [number for number, token in objective.prepared.tokenizer.get_added_tokens_decoder().items()]
    text = ~torch.isin(batch["input_ids"], torch.tensor(special))
    for share in (0.0, 0.25, 0.75):
        training = recipe.training.model_copy(update={"token_dropout": share})
        changed = recipe.model_copy(update={"training": training})
        classification_loss(changed, objective.prepared)(Watching(), batch)
        ids = seen.pop()
        assert float((ids[text] == unknown).float().mean()) == pytest.approx(share, abs=0.1)
        assert torch.equal(ids[~text], batch["input_ids"][~text])


def test_select_by_names_the_metric_that_picks_the_weights() -> None:
    """Epoch 1 has the lower loss, epoch 2 the higher accuracy."""
    picked = {}
    for by in ("loss", "accuracy"):
        recipe = load_recipe("quickstart", [*BASE, f"training.select_by={by}"])
        task: Any = task_named(recipe.task)
        scores = [task.score_type(n=9, loss=0.4, accuracy=0.8, f1=0.8, precision=0.8, recall=0.8),
                  task.score_type(n=9, loss=0.5, accuracy=0.9, f1=0.9, precision=0.9, recall=0.9)]  # fmt: skip
        picked[by] = int(np.argmin([task.criterion(score, recipe.training) for score in scores]))
    assert picked == {"loss": 0, "accuracy": 1}


MODEL: dict[str, tuple[str, str]] = {
    "vocab_size": ("200", "parameters"), "hidden_size": ("32", "parameters"), "layers": ("2", "parameters"),
    "ffn_size": ("64", "parameters"), "iterations": ("3", "answers"), "heads": ("4", "answers"),
    "residual_scale": ("0.9", "answers"), "rope_theta": ("10.0", "answers"), "norm_eps": ("0.5", "answers"),
    "dropout": ("0.5", "training"), "max_positions": ("64", "positions"),
}  # fmt: skip
"""Field of the encoder → another value, and what it changes: how many weights there are, what the same weights answer,
what they answer in training only, or how long an input may be."""


@pytest.mark.parametrize("field", MODEL)
def test_a_field_of_the_encoder_changes_what_it_says(field: str) -> None:
    value, what = MODEL[field]
    found: list[dict[str, Any]] = []
    for changes in ([], [f"model.{field}={value}"]):
        recipe = load_recipe("quickstart", [*BASE, *changes])
        torch.manual_seed(1)
        model, _ = model_spec_of(recipe).adapter.build(recipe, Place("cpu", "fp32"))
        ids = torch.arange(1, 13).reshape(2, 6)
        with torch.no_grad():
            facts = {"parameters": count_parameters(model), "answers": model.eval()(ids), "positions": len(model.cos)}
            torch.manual_seed(2)
            facts["training"] = model.train()(ids)
        found.append(facts)
    usual, changed = found
    if what in ("parameters", "positions"):
        assert usual[what] != changed[what]
        return
    assert usual["parameters"] == changed["parameters"]
    assert not torch.allclose(usual[what], changed[what], atol=1e-5)
    assert what == "answers" or torch.equal(usual["answers"], changed["answers"])


ELSEWHERE: Mapping[type[BaseModel], Mapping[str, str]] = {
    ClassificationTraining: {
        "precision": "tests/training/test_train.py", "optimizer": "here, field by field",
        "schedule": "tests/training/test_optimization.py", "checkpoint_minutes": "tests/training",
        "layer_decay": "tests/models/test_pretrained.py", "teacher": "tests/training/test_distillation.py",
        "teacher_sha256": "tests/training/test_distillation.py",
        "distillation": "tests/training/test_distillation.py",
        **dict.fromkeys(("tf32", "pinned_memory", "compile"), "tests/training/test_levers.py"),
    },
    CompileConfig: dict.fromkeys(("shapes", "cuda_graphs"), "tests/training/test_levers.py"),
    LanguageTraining: {
        "exit_weight": "tests/models/test_crt_loss.py", "chunked_loss": "tests/models/test_crt_loss.py",
        "checkpointing": "tests/models/test_crt.py", "score_padding": "tests/training/test_train_language.py",
    },
    EncoderConfig: {"kind": "names the family", "attention": "tests/models/test_encoder.py"},
    FileSource: {
        "kind": "names the kind of source", "path": "tests/artifacts/test_recipe_paths.py",
        "delimiter": "tests/data/test_records.py", "header": "tests/data/test_records.py",
        "text_pair": "tests/data/test_prepare.py", "format": "tests/data/test_records.py",
        **dict.fromkeys(("text", "label", "label_value", "skip_unlabelled"), "tests/data/test_records.py"),
        "rows": "tests/data/test_splits.py", "encoding": "tests/data/test_records.py",
    },
    DataConfig: {
        "parts": "tests/data/test_sources.py", "stream": "tests/training/test_streamed.py",
        "split": "tests/data/test_splits.py", "split_seed": "tests/data/test_splits.py",
        "expected_rows": "tests/training/test_plan_time.py",
        **dict.fromkeys(("labels", "cleaning", "max_length"), "tests/data/test_prepare.py"),
        **dict.fromkeys(("rows", "longest", "shortest", "balance"), "tests/data/test_splits.py"),
    },
}  # fmt: skip
"""Fields whose effect another test shows."""
HERE: Mapping[type[BaseModel], set[str]] = {
    OptimizerConfig: {"kind", "betas", "kernels", *(name.split(".")[1] for name in STEPS if "." in name)},
    EarlyStopping: {"patience", "min_delta"},
    ClassificationTraining: {
        "epochs", "batch_size", "accumulation", "clip_norm", "batching", "early_stopping", "log_every",
        "label_smoothing", "token_dropout", "select_by",
    },
    EncoderConfig: set(MODEL),
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [OptimizerConfig, EarlyStopping, CompileConfig, ClassificationTraining, LanguageTraining, EncoderConfig,
     FileSource, DataConfig],
)  # fmt: skip
def test_no_field_is_without_a_test_of_its_effect(config: type[BaseModel]) -> None:
    inherited = set(ClassificationTraining.model_fields) if config is LanguageTraining else set()
    tested = HERE.get(config, set()) | set(ELSEWHERE.get(config, {}))
    assert set(config.model_fields) - inherited - tested == set()
    assert CRTConfig.model_fields  # the other family's fields are held against an oracle: tests/models/test_crt.py
