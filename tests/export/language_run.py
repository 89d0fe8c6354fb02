"""A finished run of a tiny language model with random weights: everything that export and evaluate read, untrained."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

from edgeformer.artifacts.files import write_json, write_text
from edgeformer.artifacts.manifest import AttentionUse, RunManifest
from edgeformer.artifacts.progress import Progress
from edgeformer.data.batching import TextRows
from edgeformer.data.encoding import Prepared
from edgeformer.data.language import prepare_text
from edgeformer.models import model_spec_of, recipe_type
from edgeformer.models.adapter import count_parameters
from edgeformer.models.blocks.layers import TokenBatchNorm
from edgeformer.models.weights import save_model
from edgeformer.tasks.language_modeling import LanguageRecipe

SEQUENCE_LENGTH, POSITIONS, WORDS = 64, 80, 300
LOOPS, EXIT = 2, 1
SIZES = {
    "kind": "crt", "hidden_size": 32, "embedding_size": 16, "embedding_cycles": 1, "attention_heads": 4, "ffn_size": 48,
    "loops": LOOPS, "cycles": 2, "dilations": [1, 4], "exits": [EXIT],
}  # fmt: skip


def language_recipe(mode: str = "packed", **model: object) -> LanguageRecipe:
    """Two loops of two cycles, one exit, on generated reviews; ``model`` with a kind: that model instead."""
    rows = {"train": 200, "validation": 20, "reviews": 20}
    reviews = {"kind": "synthetic-reviews"}
    parts = {part: [{**reviews, "rows": count, "seed": n}] for n, (part, count) in enumerate(rows.items(), start=1)}
    document: dict[str, Any] = {"name": "tiny-language", "task": "language-modeling", "target": "cpu"}
    document["data"] = {"parts": parts, "mode": mode, "sequence_length": SEQUENCE_LENGTH, "min_characters": 20}
    document["tokenizer"] = {"kind": "trained", "algorithm": "bpe"}
    sizes = {} if "kind" in model else SIZES
    document["model"] = {"vocab_size": WORDS, "max_positions": POSITIONS, **sizes, **model}
    steps = {"epochs": 1, "batch_size": 4, "optimizer": {"lr": 1e-3}, "schedule": {"kind": "constant"}}
    document["training"] = steps | ({"exit_weight": 0.0} if model.get("exits") == [] else {})
    kind = str(model.get("kind", "crt"))
    return recipe_type("language-modeling", kind).model_validate(document, strict=False)


def write_language_run(folder: Path, recipe: LanguageRecipe | None = None) -> Path:
    """The run's folder, as training leaves it."""
    recipe = recipe or language_recipe(mode="packed")
    data = prepare_text(recipe.data, recipe.tokenizer, recipe.model.vocab_size, folder / "cache", Progress())
    torch.manual_seed(0)
    model = _everything_random(model_spec_of(recipe).adapter.build(recipe))
    (folder / "model").mkdir(parents=True)
    save_model(folder / "model", model, recipe, data)
    write_text(folder / "recipe.yaml", recipe.to_yaml())
    write_json(folder / "run.json", _manifest(folder.name, recipe, model, data))
    return folder


def exported_language_run(temporary: pytest.TempPathFactory) -> Path:
    """One run with every exit in FP32 and INT8, for all test files and workers. Do not change it."""
    base = temporary.getbasetemp()
    run = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exported-language" / "tiny"
    run.parent.mkdir(exist_ok=True)
    with FileLock(run.parent / "lock"):
        if not (run / "bundle").exists():
            from edgeformer.export.export import export
            from edgeformer.export.variants import ExportOptions

            write_language_run(run)
            export(run, ExportOptions(int8=True, exits="all"))
    return run


def _everything_random(model: nn.Module) -> nn.Module:
    """As after training: no parameter holds its initial ones or zeros, no two hold the same numbers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for module in model.modules():
            if isinstance(module, TokenBatchNorm):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 2.0)
    return model.eval()


def _manifest(name: str, recipe: LanguageRecipe, model: nn.Module, data: Prepared[TextRows]) -> RunManifest:
    causality = model_spec_of(recipe).adapter.causality(model)
    return RunManifest(
        run=name, status="finished", task=recipe.task, recipe=recipe.name, recipe_sha256=recipe.fingerprint(),
        started="2026-11-21T00:00:00.000+00:00", parameters=count_parameters(model),
        vocabulary=recipe.model.vocab_size, precision="fp32", attention=AttentionUse(requested="sdpa", used="sdpa"),
        data=data.summary, leaks=causality.leaks, causality=causality, versions={}, code_version="0", host={},
    )  # fmt: skip
