"""What a checkpoint holds, whatever number of processes wrote it. Shards themselves: test_processes.py."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from edgeformer.formats.recipe import OptimizerConfig
from edgeformer.stages.training import state
from edgeformer.stages.training.optimization import build_optimizer
from edgeformer.stages.training.processes import Processes


class Tied(nn.Module):
    """A head that is the table, and a vector, which is in the optimizer's other group."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.table = nn.Parameter(torch.rand(4, 3))
        self.head = self.table


@pytest.fixture
def processes() -> Processes:
    return Processes(Accelerator(cpu=True), "fp32")


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(parameter.ndim))
    optimizer.step()
    return optimizer


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_librarys_random_numbers_go_on(tmp_path: Path, processes: Processes) -> None:
    model, optimizer = processes.prepare(nn.Linear(2, 2), build_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=0.1)))
    found = state.gather(processes, model, optimizer)
    assert set(found) == {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}
    state.write(found, tmp_path)
    expected = drawn()
    assert all(a != b for a, b in zip(drawn(), expected, strict=True))
    state.load(tmp_path, processes, model, optimizer)
    assert drawn() == expected
    (tmp_path / "random_states_0.pkl").unlink()  # as where fewer processes wrote it
    before = torch.get_rng_state()
    state.load(tmp_path, processes, model, optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizers_state_by_names_is_the_one_by_numbers() -> None:
    """Shards are gathered by names; a file has numbers, in the order of the optimizer's groups."""
    model = Tied()
    optimizer = stepped(model)
    by_number = optimizer.state_dict()
    by_name = state._by_name(model, optimizer, by_number)
    assert [group["params"] for group in by_name["param_groups"]] == [["table"], ["scale"]]
    assert float(by_name["state"]["table"]["exp_avg"].max()) == pytest.approx(0.2)  # (1 − β₁) · its gradient of 2
    assert float(by_name["state"]["scale"]["exp_avg"].max()) == pytest.approx(0.1)
    again = state._by_number(by_name)
    assert again["param_groups"] == by_number["param_groups"]
    assert again["state"].keys() == by_number["state"].keys()
    assert all(again["state"][number] is by_number["state"][number] for number in again["state"])
    stepped(model).load_state_dict(again)


def test_weights_that_a_file_has_once_have_all_their_names() -> None:
    model, table, scale = Tied(), torch.rand(4, 3), torch.rand(3)
    for stored in ("table", "head"):
        found = state._with_shared(model, {stored: table, "scale": scale})
        assert found.keys() == {"table", "head", "scale"}
        assert found["table"] is table and found["head"] is table and found["scale"] is scale


def test_the_scaler_of_fp16_comes_back(tmp_path: Path, processes: Processes) -> None:
    model, optimizer = processes.prepare(nn.Linear(2, 2), build_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=0.1)))
    processes.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state.write(state.gather(processes, model, optimizer), tmp_path)
    processes.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    state.load(tmp_path, processes, model, optimizer)
    assert processes.accelerator.scaler.state_dict()["scale"] == 8.0
