"""What a checkpoint holds, whatever number of processes wrote it. Shards themselves: test_processes.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from edgeformer.artifacts.recipe import OptimizerConfig
from edgeformer.training import checkpoint
from edgeformer.training.distributed import Processes
from edgeformer.training.optimizer import build_optimizer


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
    found = checkpoint.gather(processes, model, optimizer)
    assert set(found) == {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}
    checkpoint.write(found, tmp_path)
    expected = drawn()
    assert all(a != b for a, b in zip(drawn(), expected, strict=True))
    checkpoint.load(tmp_path, processes, model, optimizer)
    assert drawn() == expected
    (tmp_path / "random_states_0.pkl").unlink()  # as where fewer processes wrote it
    before = torch.get_rng_state()
    checkpoint.load(tmp_path, processes, model, optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizers_state_by_names_is_the_one_by_numbers() -> None:
    """Shards are gathered by names; a file has numbers, in the order of the optimizer's groups."""
    model = Tied()
    optimizer = stepped(model)
    by_number = optimizer.state_dict()
    by_name = checkpoint._by_name(model, optimizer, by_number)
    assert [group["params"] for group in by_name["param_groups"]] == [["table"], ["scale"]]
    assert float(by_name["state"]["table"]["exp_avg"].max()) == pytest.approx(0.2)  # (1 − β₁) · its gradient of 2
    assert float(by_name["state"]["scale"]["exp_avg"].max()) == pytest.approx(0.1)
    again = checkpoint._by_number(by_name)
    assert again["param_groups"] == by_number["param_groups"]
    assert again["state"].keys() == by_number["state"].keys()
    assert all(again["state"][number] is by_number["state"][number] for number in again["state"])
    stepped(model).load_state_dict(again)


def test_weights_that_a_file_has_once_have_all_their_names() -> None:
    model, table, scale = Tied(), torch.rand(4, 3), torch.rand(3)
    for stored in ("table", "head"):
        found = checkpoint._with_shared(model, {stored: table, "scale": scale})
        assert found.keys() == {"table", "head", "scale"}
        assert found["table"] is table and found["head"] is table and found["scale"] is scale


def test_the_scaler_of_fp16_comes_back(tmp_path: Path, processes: Processes) -> None:
    model, optimizer = processes.prepare(nn.Linear(2, 2), build_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=0.1)))
    processes.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    checkpoint.write(checkpoint.gather(processes, model, optimizer), tmp_path)
    processes.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    checkpoint.load(tmp_path, processes, model, optimizer)
    assert processes.accelerator.scaler.state_dict()["scale"] == 8.0


@pytest.fixture
def one_of_one(processes: Processes) -> Iterator[Processes]:
    """Shards as several processes have them, in a group of this process alone: no child, no network."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    processes.sharded = True
    yield processes
    distributed.destroy_process_group()


class Reader(nn.Module):
    """As language models tie them: the weight of one module is another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))
        self.table = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.table.weight


def sharded(processes: Processes, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A tied model after one step, weights and moments in shards."""
    torch.manual_seed(seed)
    model = Reader()
    prepared, optimizer = processes.prepare(model, build_optimizer(model, OptimizerConfig(lr=0.1)))
    for parameter in prepared.parameters():
        parameter.grad = torch.full_like(parameter, float(parameter.ndim + seed))
    optimizer.step()
    return prepared, optimizer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_shards_are_written_whole_and_read_as_shards(tmp_path: Path, one_of_one: Processes) -> None:
    model, optimizer = sharded(one_of_one, 1)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    found = checkpoint.gather(one_of_one, model, optimizer)
    assert set(found) == {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}
    assert not any(isinstance(tensor, DTensor) for tensor in found["model.safetensors"].values())
    moments = found["optimizer.bin"]["state"]
    assert set(moments) == {0, 1}, "by number, as one process writes them"
    assert not any(isinstance(tensor, DTensor) for one in moments.values() for tensor in one.values())
    assert float(moments[0]["exp_avg"].max()) == pytest.approx(0.3)  # the table first: (1 − β₁) · its gradient of 3
    checkpoint.write(found, tmp_path)
    other, other_optimizer = sharded(one_of_one, 2)
    checkpoint.load(tmp_path, one_of_one, other, other_optimizer)
    for name, parameter in other.named_parameters(remove_duplicate=False):
        assert isinstance(parameter, DTensor), "it would not fit into one process"
        assert torch.equal(whole(parameter), whole(dict(model.named_parameters(remove_duplicate=False))[name])), name
    again = checkpoint.gather(one_of_one, other, other_optimizer)["optimizer.bin"]
    for before, after in zip(found["optimizer.bin"]["param_groups"], again["param_groups"], strict=True):
        assert {**after, "betas": tuple(after["betas"])} == before
    for number, one in moments.items():
        assert all(torch.equal(tensor, again["state"][number][key]) for key, tensor in one.items()), number
    held = [tensor for one in other_optimizer.state.values() for key, tensor in one.items() if key != "step"]
    assert held and all(isinstance(tensor, DTensor) for tensor in held)


def test_only_the_main_process_numbers_the_optimizers_state(one_of_one: Processes) -> None:
    model, optimizer = sharded(one_of_one, 1)
    one_of_one.rank = 1
    assert checkpoint.gather(one_of_one, model, optimizer)["optimizer.bin"] == {}


class Cards:
    """torch.cuda's random states, of a machine with some cards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int) -> None:
        self.was_set: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([70 + current], dtype=torch.uint8))
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda found: self.was_set.append(int(found)))


def test_a_cards_random_numbers_are_this_process_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(monkeypatch, current=2)
    saved = checkpoint._random_states()
    assert [int(found) for found in saved["torch_cuda_manual_seed"]] == [72]
    checkpoint._restore(saved)
    assert cards.was_set == [72]
    for of_all, expected in (([60, 61, 62, 63], 62), ([60, 61], 61)):  # as earlier versions wrote them
        checkpoint._restore({**saved, "torch_cuda_manual_seed": [torch.tensor(number) for number in of_all]})
        assert cards.was_set[-1] == expected
    del saved["torch_cuda_manual_seed"]  # written on a CPU
    checkpoint._restore(saved)
    assert len(cards.was_set) == 3


def test_a_cards_random_numbers_mean_nothing_to_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {**checkpoint._random_states(), "torch_cuda_manual_seed": [torch.tensor(1)]}
    cards = Cards(monkeypatch, current=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checkpoint._restore(saved)
    assert cards.was_set == []
