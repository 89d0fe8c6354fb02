"""What a CPU trains in another way than torch: the same gradients."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.recipe import CompileConfig
from edgeformer.models import load_recipe
from edgeformer.models.adapter import Place
from edgeformer.training import optimizer as quick
from edgeformer.training.distributed import connect
from edgeformer.training.objective import Objective
from edgeformer.training.optimizer import LEAST_BYTES, QuickTable, quicken, quickens
from edgeformer.training.step import Stepper
from tests.training.test_levers import training
from tests.training.test_recipe_effects import BASE

ROWS, WIDTH = LEAST_BYTES // 4 // 16, 16
TEXTS = [[[1, 2, 2], [ROWS - 1, 1, 5]], [[7, 7, 7], [7, 7, 7]], [[1, 3, 4], [2, 1, 9]], [[0, 1, 2], [3, 4, 5]]]


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS if tied else 2)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        answer: Tensor = self.head(self.table(ids).tanh().mean(1))
        return answer


@pytest.fixture
def models() -> tuple[Model, Model]:
    """Torch's own, and the same with a quick table."""
    return pair()


def pair(*, tied: bool = False) -> tuple[Model, Model]:
    torch.manual_seed(0)
    plain = Model(tied=tied)
    quick = deepcopy(plain)
    (gradient,) = quicken(quick)
    assert type(quick.table) is QuickTable and gradient.shape == quick.table.weight.shape
    return plain, quick


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_training_takes_the_same_steps(pieces: int, tied: bool) -> None:
    models = pair(tied=tied)
    for model in models:
        optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
        for ids in TEXTS:
            for part in torch.tensor(ids).chunk(pieces):
                model(part).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    plain, quick = models
    for (name, one), other in zip(plain.state_dict().items(), quick.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7, msg=name)


def test_rows_of_the_step_before_have_no_gradient_left(models: tuple[Model, Model]) -> None:
    _, quick = models
    for ids in TEXTS:
        quick.zero_grad()
        quick(torch.tensor(ids)).sum().backward()
        gradient = quick.table.weight.grad
        assert gradient is not None
        assert gradient.abs().sum(1).nonzero().flatten().tolist() == sorted({row for text in ids for row in text})


def test_a_gradient_that_is_there_is_added_to(models: tuple[Model, Model]) -> None:
    for model in models:
        model.table.weight.grad = torch.ones_like(model.table.weight)
        model(torch.tensor(TEXTS[0])).sum().backward()
    plain, quick = (model.table.weight.grad for model in models)
    assert plain is not None and quick is not None
    torch.testing.assert_close(plain, quick)


def test_scores_and_weights_are_torchs_own(models: tuple[Model, Model]) -> None:
    plain, quick = models
    with torch.inference_mode():
        assert torch.equal(plain.eval()(torch.tensor(TEXTS[0])), quick.eval()(torch.tensor(TEXTS[0])))
    assert list(quick.state_dict()) == list(plain.state_dict())


def test_what_gains_nothing_stays() -> None:
    small, padded = nn.Embedding(ROWS - 1, WIDTH), nn.Embedding(ROWS, WIDTH, padding_idx=0)
    fixed = nn.Embedding(ROWS, WIDTH).requires_grad_(False)
    assert quicken(nn.ModuleList([small, padded, fixed])) == []
    assert {type(small), type(padded), type(fixed)} == {nn.Embedding}


def test_a_card_several_processes_and_what_is_compiled_do_without() -> None:
    assert quickens("cpu", training())
    assert not quickens("cuda", training())
    assert not quickens("cpu", training(), processes=2)
    assert not quickens("cpu", training(compile=CompileConfig()))


def test_steps_are_taken_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quick, "LEAST_BYTES", 1)
    recipe = load_recipe("quickstart", BASE)
    processes = connect(recipe, "cpu", sharded=False)
    objective = Objective(recipe, tmp_path, Place("cpu", "fp32"), SILENT)
    assert {type(module) for module in objective.model.modules()} & {nn.Embedding, QuickTable} == {nn.Embedding}
    Stepper(objective, processes, 1)
    assert {type(module) for module in objective.model.modules()} & {nn.Embedding, QuickTable} == {QuickTable}
