"""When memory runs out, the step is repeated in smaller pieces, and the run is the one that began with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.progress import Silent
from edgeformer.models import load_recipe
from edgeformer.models.adapter import Batch, Losses
from edgeformer.run import read_run
from edgeformer.training.memory import is_out_of_memory
from edgeformer.training.objective import Objective
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL


class Messages(Silent):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def fails_above(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training runs out of memory, after its forward pass, whenever it sees more than ``limit`` rows at a time."""
    losses = Objective.losses

    def limited(self: Objective, model: nn.Module, batch: Batch) -> Losses:
        result = losses(self, model, batch)
        if len(batch["labels"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(Objective, "losses", limited)


def test_the_step_is_repeated_in_smaller_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = load_recipe("quickstart", [*SMALL, "training.batch_size=8", "training.accumulation=4"])
    expected = train(small, TrainOptions(tmp_path, name="small", max_steps=6))
    fails_above(8, monkeypatch)
    said = Messages()
    run = train(load_recipe("quickstart", SMALL), TrainOptions(tmp_path, name="large", max_steps=6), said)
    assert read_run(run).batch_size == 8
    assert [line for line in said.lines if "out of memory at step 1" in line] == [
        "out of memory at step 1: going on with 16 rows at a time instead of 32 (2 pieces per step; "
        "the effective batch stays 32), same step again",
        "out of memory at step 1: going on with 8 rows at a time instead of 16 (4 pieces per step; "
        "the effective batch stays 32), same step again",
    ]
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [r["batch_size"] for r in map(json.loads, lines) if r["kind"] == "out-of-memory"] == [16, 8]
    weights = load_file(run / "model" / "model.safetensors")
    for name, tensor in load_file(expected / "model" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name


def test_one_row_that_does_not_fit_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_above(0, monkeypatch)
    with pytest.raises(EdgeformerError, match="single row at a time"):
        train(load_recipe("quickstart", SMALL), TrainOptions(tmp_path, name="run"))
    assert read_run(tmp_path / "run").status == "failed"


def test_the_cpu_allocators_error_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)  # really asks the allocator
    assert is_out_of_memory(caught.value)
