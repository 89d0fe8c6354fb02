"""A tiny encoder, trained in a few seconds on the data of a test."""

from pathlib import Path
from typing import Any

import yaml

import edgeformer


def train_tiny(folder: Path, task: str, data: dict[str, Any], **training: Any) -> Path:
    """Train on ``data`` of a task, split by itself, and return the folder of the run."""
    recipe = {
        "name": "tiny",
        "task": task,
        "data": {"split": "stratified", "cleaning": "none", **data},
        "tokenizer": {"kind": "trained"},
        "model": {
            "kind": "encoder", "vocab_size": 120, "hidden_size": 32, "layers": 1, "iterations": 2, "heads": 2,
            "ffn_size": 48, "residual_scale": 0.5,
        },
        "training": {
            "batch_size": 16, "optimizer": {"lr": 4.0e-3}, "schedule": {"kind": "one-cycle"}, **training,
        },
    }  # fmt: skip
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return edgeformer.train(path, artifacts=folder / "artifacts").folder
