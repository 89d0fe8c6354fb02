"""A run on disk with a small language model that has memorized one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer

from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import AttentionUse, DataSummary, RunManifest
from edgeformer.data.batching import TextRows
from edgeformer.data.encoding import PlainText, Prepared
from edgeformer.data.tokenization import train_language_tokenizer
from edgeformer.models import load_recipe, recipe_type
from edgeformer.models.crt.adapter import ADAPTER
from edgeformer.models.crt.loss import full_loss
from edgeformer.models.crt.model import CRT
from edgeformer.models.weights import save_model
from edgeformer.system.host import now
from edgeformer.tasks.language_modeling import LanguageRecipe

TEXT = "The café on Bridge Street sells coffee ☕ for 2 €, tea for 1 € and nothing else at all."


def tokenizer_of(texts: list[str]) -> Tokenizer:
    return train_language_tokenizer(290, texts)


def recipe_of(vocabulary: int, **model: Any) -> LanguageRecipe:
    """Return crt_mini with a much smaller model."""
    document = load_recipe("crt_mini").model_dump()
    document["name"] = "tiny"
    document["data"]["sequence_length"] = 64
    document["model"] |= {
        "vocab_size": vocabulary, "hidden_size": 32, "embedding_size": 16, "embedding_cycles": 1, "ffn_size": 48,
        "loops": 3, "cycles": 2, "dilations": (1, 2), "exits": (1, 2), "max_positions": 96, "dropout": 0.0, **model,
    }  # fmt: skip
    if not document["model"]["causal"]:
        document["data"]["mode"] = "paragraphs"
    if not document["model"]["exits"]:
        document["training"]["exit_weight"] = 0.0
    recipe: LanguageRecipe = recipe_type("language-modeling", "crt").model_validate(document)
    return recipe


def write_language_run(folder: Path, steps: int = 40, **model: Any) -> Path:
    """Train on TEXT until it is memorized (with 40 steps), write the run, and return its folder."""
    tokenizer = tokenizer_of([TEXT])
    recipe = recipe_of(tokenizer.get_vocab_size(), **model)
    plain = PlainText(tokenizer)
    ids = torch.tensor([[plain.boundary, *plain.encode(TEXT).ids, plain.boundary]])
    torch.manual_seed(0)
    crt = CRT(recipe.model).train()
    optimizer = torch.optim.AdamW(crt.parameters(), lr=1e-2)
    for _ in range(steps):
        loss, _ = full_loss(crt, crt(ids[:, :-1]), ids[:, 1:], 0.5)
        (loss / (ids.shape[1] - 1)).backward()
        torch.nn.utils.clip_grad_norm_(crt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    crt.eval()
    (folder / "model").mkdir(parents=True)
    stream = ids[0].numpy().astype(np.int32)
    rows = TextRows(stream, np.array([0, len(stream)]), None, len(stream) - 1, len(TEXT.split()) + 1, 1, 0)
    summary = DataSummary(split="given", synthetic=False, rows={"train": 1}, fingerprint="0")
    save_model(folder / "model", crt, recipe, Prepared(tokenizer, plain.boundary, rows, rows, {}, summary))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")), encoding="utf-8")
    causality = ADAPTER.causality(crt)
    manifest = RunManifest(
        run=folder.name,
        status="finished",
        task="language-modeling",
        recipe="tiny",
        recipe_sha256=recipe.fingerprint(),
        started=now(),
        parameters=sum(p.numel() for p in crt.parameters()),
        vocabulary=recipe.model.vocab_size,
        precision="fp32",
        attention=AttentionUse(requested="sdpa", used="sdpa"),
        data=summary,
        leaks=causality.leaks,
        causality=causality,
        versions={},
        code_version="test",
        host={"cpu": "test"},
    )
    write_json(folder / "run.json", manifest)
    return folder
