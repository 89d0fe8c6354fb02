"""Memory runs out at some operation of a step on the CPU: training goes on as if it had begun with smaller pieces."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import load_recipe
from edgeformer.models.adapter import Place
from edgeformer.training import distributed
from edgeformer.training import step as stepper_module
from edgeformer.training.checkpoint import Position
from edgeformer.training.distributed import Processes, connect
from edgeformer.training.objective import Objective
from edgeformer.training.optimizer import LearningRate, allocate_state, build_optimizer
from edgeformer.training.step import Stepper
from tests.conftest import SMALL

ROWS, STEPS = 8, 2
FP32, BF16, FP16 = "fp32", "bf16", "fp16"
Sizes = tuple[int, ...]
HALVED = ((ROWS // 2, ROWS // 2), (ROWS, ROWS // 2))
"""Rows at a time in each step, where memory ran out in the first or in the second one."""
PHASES = ["state", "forward", "backward", "unscale", "clip", "step", "zero_grad"]


class Allocator(TorchDispatchMode):
    """Note in which phase each operation of torch is run, and run out of memory instead of running number ``fails``."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__()
        self.fails, self.phase, self.phases, self.names = fails, "", list[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(func._schema.name if hasattr(func, "_schema") else str(func))
        return func(*args, **(kwargs or {}))

    def _note(self, name: str) -> None:
        self.names.append(name)
        self.phases.append(self.phase)
        if len(self.phases) - 1 == self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    def within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose operations belong to ``phase``."""

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            if phase == "zero_grad":  # it has no operation that could fail
                self._note(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        return called


@dataclass
class Trained:
    """What a few steps leave behind."""

    tensors: dict[str, Tensor]
    batch_sizes: list[int]
    skipped: int
    allocator: Allocator


@contextmanager
def phases_of(allocator: Allocator) -> Iterator[None]:
    """Tell the allocator where a step is."""
    places = [
        (stepper_module, "allocate_state", "state"),
        (Objective, "losses", "forward"),
        (accelerate.Accelerator, "backward", "backward"),
        (torch.amp.GradScaler, "unscale_", "unscale"),
        (Processes, "clip", "clip"),
        (accelerate.optimizer.AcceleratedOptimizer, "step", "step"),
        (accelerate.optimizer.AcceleratedOptimizer, "zero_grad", "zero_grad"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, phase in places:
            patch.setattr(owner, name, allocator.within(phase, getattr(owner, name)))
        yield


def recipe_of(kernels: str, *changes: str) -> Recipe:
    sets = [
        "data.parts.train.0.rows=400",
        "model.vocab_size=500",
        "model.hidden_size=16",
        "model.ffn_size=16",
        "training.clip_norm=0.1",
    ]
    sets += [f"training.batch_size={ROWS}", f"training.optimizer.kernels={kernels}", "training.clip_norm=0.1"]
    return load_recipe("quickstart", [*SMALL, *sets, *changes])


def connected(recipe: Recipe, precision: str) -> Processes:
    """Processes that compute in ``precision``; edgeformer refuses fp16 on a CPU, which is slow but the same code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "resolve_precision", lambda *_: precision)
        processes = connect(recipe, "cpu", sharded=False)
    if precision == FP16:
        processes.accelerator.native_amp = True
        processes.accelerator.scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    return processes


def trained(
    prepared: Objective, recipe: Recipe, precision: str, *, fails: int | None = None, sizes: Sizes = (ROWS, ROWS)
) -> Trained:
    """Take two steps; ``sizes``: rows at a time in each, unless memory runs out."""
    processes = connected(recipe, precision)
    objective = copy.copy(prepared)
    objective.recipe, objective.model = recipe, copy.deepcopy(prepared.model)
    torch.manual_seed(1)
    stepper, position = Stepper(objective, processes, total_steps=10), Position(batch_size=sizes[0])
    stepper.model.train()
    allocator, batch_sizes, skipped = Allocator(fails), [], 0
    with phases_of(allocator), allocator:
        for number in range(STEPS):
            position.batch_size = min(position.batch_size, sizes[number])
            rows = np.arange(number * ROWS, (number + 1) * ROWS)
            skipped += stepper.take(rows, position, lambda size: None).skipped
            position.step += 1
            batch_sizes.append(position.batch_size)
    tensors = {name: tensor.detach().clone() for name, tensor in objective.model.state_dict().items()}
    for number, state in stepper.optimizer.state_dict()["state"].items():
        tensors |= {f"{number} {name}": tensor for name, tensor in state.items()}
    if (scaler := processes.accelerator.scaler) is not None:
        tensors |= {f"scaler {name}": torch.tensor(value) for name, value in scaler.state_dict().items()}
    tensors["random numbers"] = torch.get_rng_state()
    assert all(parameter.grad is None for parameter in objective.model.parameters())
    return Trained(tensors, batch_sizes, skipped, allocator)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Objective:
    return Objective(recipe_of("fused"), tmp_path_factory.mktemp("tokens"), Place("cpu", FP32), SILENT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only wait for further ones
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kernels", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("precision", [FP32, BF16, FP16])
def test_memory_that_runs_out_anywhere_in_a_step_changes_no_weight(
    precision: str, kernels: str, prepared: Objective
) -> None:
    recipe = recipe_of(kernels)
    whole = trained(prepared, recipe, precision)
    half = {number: trained(prepared, recipe, precision, sizes=sizes) for number, sizes in enumerate(HALVED)}
    phases = whole.allocator.phases
    second = phases.index("zero_grad") + 1  # where the second step begins
    for phase in PHASES:
        first_step = [number for number, other in enumerate(phases[:second]) if other == phase]
        second_step = [number for number, other in enumerate(phases) if other == phase and number >= second]
        assert first_step or (phase == "unscale" and precision != FP16)
        for fails in {*first_step[:1], *first_step[len(first_step) // 2 :][:1], *first_step[-1:], *second_step[:1]}:
            if phase == "step" and fails not in (first_step[0], second_step[0]):
                with pytest.raises(
                    EdgeformerError, match="after it had begun to change weights, so it cannot be repea"
                ):
                    trained(prepared, recipe, precision, fails=fails)
                continue
            found = trained(prepared, recipe, precision, fails=fails)
            expected = whole if phase == "zero_grad" else half[int(fails >= second)]
            assert found.batch_sizes == expected.batch_sizes, (phase, fails)
            assert found.skipped == 0 and found.tensors.keys() == expected.tensors.keys()
            for name, tensor in expected.tensors.items():
                assert torch.equal(tensor, found.tensors[name]), (phase, fails, name)


@pytest.mark.parametrize(
    ("precision", "owner", "name"),
    [(FP32, LearningRate, "after_step"), (FP16, LearningRate, "after_step"), (FP16, torch.amp.GradScaler, "get_scale")],
)
def test_memory_that_runs_out_after_the_update_never_repeats_the_step(
    precision: str, owner: type, name: str, prepared: Objective, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[int] = []
    update, original = Stepper._update, getattr(owner, name)

    def counted(stepper: Stepper, position: Position) -> None:
        update(stepper, position)
        updates.append(position.step)

    def failing(*arguments: Any) -> Any:
        if updates:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return original(*arguments)

    monkeypatch.setattr(Stepper, "_update", counted)
    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(EdgeformerError, match="step 1 had changed the weights, so it cannot be repeated"):
        trained(prepared, recipe_of("fused"), precision)
    assert updates == [0]


def test_what_the_scaler_hands_to_a_fused_step_does_not_outlive_a_fault(prepared: Objective) -> None:
    """Without clipping, the fused step divides by the scaler's factor: once, also after an attempt that failed."""
    recipe = recipe_of("fused", "training.clip_norm=null")
    whole, half = trained(prepared, recipe, FP16), trained(prepared, recipe, FP16, sizes=HALVED[0])
    allocator, repeated = whole.allocator, 0
    end = allocator.names.index("aten::_foreach_add_")
    for fails in (number for number in range(end + 1) if allocator.phases[number] == "step"):
        found = trained(prepared, recipe, FP16, fails=fails)
        assert all(torch.equal(tensor, found.tensors[name]) for name, tensor in half.tensors.items()), fails
        repeated += 1
    assert repeated > 3 and whole.batch_sizes != half.batch_sizes


def test_a_fused_step_allocates_nothing(prepared: Objective) -> None:
    allocator = trained(prepared, recipe_of("fused"), FP32).allocator
    run = {name for name, phase in zip(allocator.names, allocator.phases, strict=True) if phase == "step"}
    assert {name for name in run if not name.startswith("profiler::")} == {"aten::_foreach_add_", "aten::_fused_adamw_"}


@pytest.mark.parametrize("kernels", ["fused", "foreach", "loop"])
def test_the_state_is_the_one_that_the_first_step_would_make(kernels: str, prepared: Objective) -> None:
    states = []
    for allocated in (True, False):
        model = copy.deepcopy(prepared.model)
        optimizer = build_optimizer(model, recipe_of(kernels).training.optimizer)
        if allocated:
            allocate_state(optimizer)
            assert len(optimizer.state) == len(list(model.parameters()))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        states.append(optimizer.state_dict())
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for number, state in states[1]["state"].items():
        assert states[0]["state"][number].keys() == state.keys()
        for name, tensor in state.items():
            other = states[0]["state"][number][name]
            assert torch.equal(other, tensor) and other.dtype == tensor.dtype and not other.requires_grad
