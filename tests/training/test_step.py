"""Optimizer steps: memory running out in any phase, torch.compile, options for speed."""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.recipe import Recipe
from edgeformer.data.batching import IGNORED
from edgeformer.models import load_recipe
from edgeformer.models.distillation import Batch, Losses
from edgeformer.run import read_run
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training.loop import distributed
from edgeformer.training.loop import step as step_module
from edgeformer.training.loop.checkpoint import Position
from edgeformer.training.loop.distributed import Processes, connect
from edgeformer.training.loop.objective import Objective
from edgeformer.training.loop.step import CompiledModel, Stepper
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL, SMALL_LANGUAGE
from tests.torture.children import TINY
from tests.training.runs import Messages, assert_equal_weights, losses, records

ROWS, STEPS = 8, 2
FP32, BF16, FP16 = "fp32", "bf16", "fp16"
CPU = torch.device("cpu")
PHASES: dict[str, tuple[Any, str]] = {
    "state": (step_module, "allocate_state"),
    "forward": (Objective, "losses"),
    "backward": (accelerate.Accelerator, "backward"),
    "clip": (Processes, "clip"),  # and divide by the scaler's factor
    "step": (accelerate.optimizer.AcceleratedOptimizer, "step"),
    "zero_grad": (accelerate.optimizer.AcceleratedOptimizer, "zero_grad"),
}


@dataclass
class StepsResult:
    """State after a few steps."""

    tensors: dict[str, Tensor]
    batch_sizes: list[int]
    skipped: int


def recipe_with(kernels: str, *changes: str) -> Recipe:
    sizes = ["data.parts.train.0.rows=400", "model.vocab_size=500", "model.hidden_size=16", "model.ffn_size=16"]
    training = ["training.clip_norm=0.1", f"training.batch_size={ROWS}", f"training.optimizer.kernels={kernels}"]
    return load_recipe("quickstart", [*SMALL, *sizes, *training, *changes])


def run_steps(
    prepared: Objective, recipe: Recipe, precision: str, *, failing: Any = None, sizes: tuple[int, int] = (ROWS, ROWS)
) -> StepsResult:
    """Take two steps, with micro-batches of ``sizes``; memory runs out in the call ``failing`` (phase, number)."""
    with pytest.MonkeyPatch.context() as patch:  # edgeformer refuses fp16 on a CPU: it is slow, but the same code
        patch.setattr(distributed, "resolve_precision", lambda *_: precision)
        processes = connect(recipe, "cpu", sharded=False)
    if precision == FP16:
        processes.accelerator.native_amp = True
        processes.accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    objective = copy.copy(prepared)
    objective.recipe, objective.model = recipe, copy.deepcopy(prepared.model)
    torch.manual_seed(1)
    stepper, position = Stepper(objective, processes, total_steps=10), Position(batch_size=sizes[0])
    stepper.model.train()
    calls, batch_sizes, skipped = Counter[str](), [], 0

    def failing_in(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            calls[phase] += 1
            if (phase, calls[phase]) == failing:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for phase, (owner, name) in PHASES.items():
            patch.setattr(owner, name, failing_in(phase, getattr(owner, name)))
        for number in range(STEPS):
            position.batch_size = min(position.batch_size, sizes[number])
            skipped += stepper.take(np.arange(number * ROWS, (number + 1) * ROWS), position).skipped
            position.step += 1
            batch_sizes.append(position.batch_size)
    tensors = {name: tensor.detach().clone() for name, tensor in objective.model.state_dict().items()}
    for number, state in stepper.optimizer.state_dict()["state"].items():
        tensors |= {f"{number} {name}": tensor for name, tensor in state.items()}
    if (scaler := processes.accelerator.scaler) is not None:
        tensors |= {f"scaler {name}": torch.tensor(value) for name, value in scaler.state_dict().items()}
    tensors["random numbers"] = torch.get_rng_state()
    assert all(parameter.grad is None for parameter in objective.model.parameters())
    return StepsResult(tensors, batch_sizes, skipped)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Objective:
    return Objective(recipe_with("fused"), tmp_path_factory.mktemp("tokens"), SILENT)


@pytest.mark.parametrize(("precision", "kernels"), [(FP32, "fused"), (BF16, "foreach"), (FP16, "loop")])
def test_out_of_memory_in_each_phase_of_a_step(precision: str, kernels: str, prepared: Objective) -> None:
    recipe = recipe_with(kernels)
    full = run_steps(prepared, recipe, precision)
    halved = [run_steps(prepared, recipe, precision, sizes=(first, ROWS // 2)) for first in (ROWS // 2, ROWS)]
    for phase, number in product(PHASES, (1, 2)):
        if phase == "step":
            with pytest.raises(EdgeformerError, match="may have changed weights, so it cannot be repeated"):
                run_steps(prepared, recipe, precision, failing=(phase, number))
            continue
        result = run_steps(prepared, recipe, precision, failing=(phase, number))
        is_full = phase == "zero_grad" or (phase == "state" and number == 2)  # it is allocated once
        expected = full if is_full else halved[number - 1]
        assert result.batch_sizes == expected.batch_sizes, (phase, number)
        assert result.skipped == 0 and result.tensors.keys() == expected.tensors.keys()
        for name, tensor in expected.tensors.items():
            assert torch.equal(tensor, result.tensors[name]), (phase, number, name)


def limit_rows(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run out of memory after the forward pass of more than ``limit`` rows."""
    original = Objective.losses

    def limited(self: Objective, model: nn.Module, batch: Batch) -> Losses:
        result = original(self, model, batch)
        if len(batch["labels"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    monkeypatch.setattr(Objective, "losses", limited)


def test_smaller_batches(tmp_path: Path, tiny_recipe: ClassificationRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    small = load_recipe("quickstart", [*TINY, "training.batch_size=20", "training.accumulation=4"])
    expected = train(small, TrainOptions(tmp_path, name="small", max_steps=3))
    limit_rows(20, monkeypatch)
    messages = Messages()
    run = train(tiny_recipe, TrainOptions(tmp_path, name="large", max_steps=3), messages)
    assert read_run(run).batch_size == 20
    assert messages.containing("out of memory at step 1") == [
        "out of memory at step 1: continuing with 20 rows at a time instead of 80 (4 micro-batches per step; "
        "the effective batch stays 80)"
    ]
    assert [record["batch_size"] for record in records(run, "out-of-memory")] == [20]
    assert_equal_weights(run, expected)
    limit_rows(0, monkeypatch)
    with pytest.raises(EdgeformerError, match="single row at a time"):
        train(tiny_recipe, TrainOptions(tmp_path, name="run"))
    assert read_run(tmp_path / "run").status == "failed"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the input of every graph that torch.compile produces; the graphs run uncompiled."""
    rows: list[int] = []

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        rows.append(max(len(value) for value in inputs if value.dtype == torch.int64))
        return graph.forward

    monkeypatch.setattr(step_module, "BACKEND", backend)
    return rows


class TestCompile:
    def test_unavailable_options_are_reported_and_change_no_loss(self, tmp_path: Path, graphs: list[int]) -> None:
        options = ["training.tf32=true", "training.pinned_memory=true", "training.compile={shapes: 2}"]
        messages, curves = Messages(), []
        for name, changes in (("plain", []), ("fast", options)):
            recipe = load_recipe("quickstart", [*TINY, "training.log_every=1", "model.dropout=0.0", *changes])
            run = train(recipe, TrainOptions(tmp_path, name=name, max_steps=6, accelerator="cpu"), messages)
            curves.append(losses(run))
        noted = [line.partition(":")[0] for line in messages.containing("no effect")]
        assert noted == ["training.tf32 has no effect", "training.pinned_memory has no effect"]
        assert curves[0] == pytest.approx(curves[1], abs=1e-5), "padding to few lengths changes no loss"
        assert 1 <= len(graphs) <= 2

    def test_number_of_shapes_is_limited(self, graphs: list[int]) -> None:
        model = nn.Embedding(5, 3)
        compiled = CompiledModel(model, 2, 4)
        for rows, length in ((4, 2), (4, 3), (4, 2), (4, 5), (3, 2), (2, 3)):
            ids = torch.ones(rows, length, dtype=torch.int64)
            assert torch.equal(compiled(ids), model(ids))
        assert graphs == [4, 4] and len(compiled._shapes) == 2, "neither a third length nor fewer rows"
        assert not [*compiled.parameters()], "it has no parameters of its own"

    @pytest.mark.parametrize("score_padding", [False, True])
    def test_batches_are_padded_to_few_lengths(self, tmp_path: Path, score_padding: bool) -> None:
        base = [*SMALL_LANGUAGE, "data.mode=paragraphs", f"training.score_padding={str(score_padding).lower()}"]
        plain = Objective(load_recipe("crt_mini", base), tmp_path, SILENT)
        padded = Objective(load_recipe("crt_mini", [*base, "training.compile={shapes: 3}"]), tmp_path, SILENT)
        batches = [[objective.batch(rows, CPU) for rows in plain.steps(0)] for objective in (plain, padded)]
        lengths = {batch["input_ids"].shape[1] for batch, _ in batches[1]}
        assert lengths <= ({32} if score_padding else {11, 22, 32}), "thirds of the longest row"
        for (batch, weight), (padded_batch, padded_weight) in zip(*batches, strict=True):
            length = batch["targets"].shape[1]
            assert weight == padded_weight and torch.equal(padded_batch["targets"][:, :length], batch["targets"])
            assert bool((padded_batch["targets"][:, length:] == IGNORED).all())

    def test_compiler_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError("no compiler\nand more")

        monkeypatch.setattr(step_module, "BACKEND", fail)
        with pytest.raises(InputError, match=r"training\.compile: the model cannot be compiled .*no compiler; leave"):
            CompiledModel(nn.Linear(3, 3), 2, 2)(torch.ones(2, 3))

    def test_several_processes_cannot_compile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class TwoProcesses:
            process_index, num_processes, device = 0, 2, CPU

        monkeypatch.setattr(distributed, "Accelerator", lambda **_: TwoProcesses())
        assert connect(load_recipe("quickstart", ["training.precision=fp32"]), "cpu", sharded=False).count == 2
        with pytest.raises(InputError, match=r"training\.compile: not possible with 2 processes"):
            connect(load_recipe("quickstart", ["training.compile={shapes: 2}"]), "cpu", sharded=False)
