"""A study whose runs take a second or two, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

TINY = {
    "data.parts.train.0.rows": 400,
    "training.epochs": 2,
    "training.precision": "fp32",
    "training.log_every": 1,
    "training.batch_size": 32,
    "model.hidden_size": 16,
    "model.heads": 2,
    "model.ffn_size": 32,
    "model.vocab_size": 300,
}
"""The quickstart recipe on synthetic reviews, as small as it gets."""


def run(label: str, seeds: tuple[int, ...] = (1,), **changes: Any) -> dict[str, Any]:
    """A row of the study. ``changes``: ``model__iterations=3`` is the recipe's model.iterations."""
    subset = {key.replace("__", "."): value for key, value in changes.items()}
    return {"label": label, "recipe": "quickstart", "set": {**TINY, **subset}, "seeds": [*seeds]}


def study(name: str, runs: dict[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The content of a study's file."""
    table = {"rows": "tests", "columns": ["parameters", "accuracy", "loss"]}
    return {
        "name": name,
        "title": f"The study {name}",
        "element": "no table of a paper",
        "protocol": "Two epochs of next to nothing.",
        "runs": runs,
        "table": {**table, **more.pop("table", {})},
        **more,
    }


def write(folder: Path, content: dict[str, Any]) -> str:
    """The path of the study's file, written into ``folder``."""
    path = folder / f"{content['name']}.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(path)
