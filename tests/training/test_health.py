"""Numbers going wrong: what is not finite stops training, or is skipped under fp16 scaling; leaping losses are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models import load_recipe
from edgeformer.models.adapter import Batch, Losses
from edgeformer.run import read_run
from edgeformer.training import metrics
from edgeformer.training import train as training
from edgeformer.training.objective import Objective
from edgeformer.training.train import TrainOptions, train
from tests.torture.children import OFTEN, TINY
from tests.training.test_checkpoints import states
from tests.training.test_out_of_memory import Messages
from tests.training.test_train import records, weights


def change(monkeypatch: pytest.MonkeyPatch, at: dict[int, Any]) -> None:
    """What happens to a step's losses, by the number of the step."""
    losses, count = Objective.losses, iter(range(1, 10_000))

    def changed(self: Objective, model: nn.Module, batch: Batch) -> Losses:
        found, act = losses(self, model, batch), at.get(next(count))
        return found if act is None else act(model, found)

    monkeypatch.setattr(Objective, "losses", changed)


def times(factor: float) -> Any:
    return lambda model, found: Losses(found.total * factor, found.parts)


def spoil_gradient(model: nn.Module, found: Losses) -> Losses:
    """A gradient of one layer that is not finite, of a loss that is."""
    _, parameter = list(model.named_parameters())[3]
    parameter.register_hook(lambda gradient: gradient * torch.inf)
    return found


@pytest.mark.parametrize("clip", ["1.0", "null"])
def test_a_gradient_that_is_not_finite_stops_training_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: str
) -> None:
    recipe = load_recipe("quickstart", [*TINY, *OFTEN, f"training.clip_norm={clip}"])
    change(monkeypatch, {6: spoil_gradient})
    with pytest.raises(EdgeformerError, match="at step 6: the gradient is not finite") as caught:
        train(recipe, TrainOptions(tmp_path, name="run", accelerator="cpu"))
    with monkeypatch.context():
        monkeypatch.undo()
        run = train(recipe, TrainOptions(tmp_path, name="run", accelerator="cpu", resume=True))
        straight = train(recipe, TrainOptions(tmp_path, name="straight", accelerator="cpu"))
    from edgeformer.models.weights import load_model

    name = [name for name, _ in load_model(run).named_parameters()][3]
    assert f"first layer with a gradient that is not finite is {name};" in str(caught.value)
    for key, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(run)[key]), key


def test_a_loss_that_is_not_finite_stops_training_and_the_weights_before_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch, {6: times(float("nan"))})
    with pytest.raises(EdgeformerError, match=r"at step 6: the loss is nan; the first layer with a gradient"):
        train(load_recipe("quickstart", [*TINY, *OFTEN]), TrainOptions(tmp_path, name="run"))
    assert [folder.name for folder in states(tmp_path / "run")] == ["000005-step-4", "000006-step-5"]
    assert read_run(tmp_path / "run").status == "failed"


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is finite, the step that it makes is not."""

    def spoil(model: nn.Module, found: Losses) -> Losses:
        list(model.parameters())[2].data[0] = torch.inf
        return Losses(found.total.detach().nan_to_num(1.0) + 0 * list(model.parameters())[5].sum(), found.parts)

    change(monkeypatch, {6: spoil})
    with pytest.raises(EdgeformerError, match="the weights are not finite; the first layer with weights that are not"):
        train(load_recipe("quickstart", [*TINY, *OFTEN]), TrainOptions(tmp_path, name="run"))
    assert [folder.name for folder in states(tmp_path / "run")] == ["000005-step-4", "000006-step-5"]


class TestScaling:
    """fp16's scaling, which computes on a CPU as well: the scaler is torch's own, what overflows is made to."""

    @pytest.fixture(autouse=True)
    def scaled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make = training.connect

        def with_scaler(*given: Any, **named: Any) -> Any:
            processes = make(*given, **named)
            processes.accelerator.scaler = torch.amp.GradScaler("cpu")
            return processes

        monkeypatch.setattr(training, "connect", with_scaler)

    recipe = load_recipe("quickstart", [*TINY, "training.clip_norm=null"])

    @pytest.mark.parametrize("how", ["gradient", "loss"])
    def test_a_step_that_overflows_is_skipped_and_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        change(monkeypatch, {3: times(1e38 if how == "gradient" else float("inf"))})
        said = Messages()
        run = train(self.recipe, TrainOptions(tmp_path, name="run"), said)
        manifest = read_run(run)
        assert (manifest.status, manifest.steps, manifest.skipped_steps) == ("finished", 8, 1)
        assert [line for line in said.lines if line.startswith("step 3 skipped: fp16 cannot hold its gradient")]
        assert [(record["step"], record["skipped_steps"]) for record in records(run, "skipped")] == [(3, 1.0)]
        steps = records(run, "step")
        assert [record.get("skipped") for record in steps] == [None, 1.0, None, None]
        rates = {record["step"]: record["lr"] for record in steps}
        usual = train(self.recipe, TrainOptions(tmp_path, name="usual"))
        before = {record["step"]: record["lr"] for record in records(usual, "step")}
        assert rates[2] == before[2] and rates[4] != before[4]  # the schedule waited

    def test_so_many_in_a_row_end_training(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics, "SKIPPED_IN_A_ROW", 4)
        change(monkeypatch, {number: times(float("nan")) for number in (1, *range(3, 99))})
        with pytest.raises(EdgeformerError, match="4 steps in a row were skipped up to step 6"):
            train(self.recipe, TrainOptions(tmp_path, name="run"))


def test_a_leap_of_the_loss_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("quickstart", [*TINY, "training.epochs=8"])
    change(monkeypatch, {28: times(50.0)})
    said = Messages()
    run = train(recipe, TrainOptions(tmp_path, name="run"), said)
    found = [line for line in said.lines if "loss spike" in line]
    assert len(found) == 1 and found[0].startswith("loss spike at step 28: ")
    (spike,) = records(run, "spike")
    assert spike["step"] == 28 and spike["loss"] > 20 > 1 > spike["usual_loss"]


@pytest.mark.parametrize(
    ("loss", "before", "spike"),
    [
        (1.61, [0.9, 1.1] * 50, True),
        (1.59, [0.9, 1.1] * 50, False),
        (9.0, [0.9, 1.1] * 9, False),
        (9.0, [0.9, 1.1] * 10, True),
    ],
)
def test_what_a_spike_is(loss: float, before: list[float], spike: bool) -> None:
    """More than six standard deviations (here 0.1) above the mean (here 1), of at least 20 steps."""
    assert metrics.is_spike(loss, before) is spike


def two_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[0].weight.grad = torch.tensor([[3.0, 0.0]])
    model[1].weight.grad = torch.tensor([[0.0], [4.0]])
    return model


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_weights_are_worth_keeping_if_all_are_finite(wrong: float) -> None:
    model = two_layers()
    assert metrics.weights_are_finite(model)
    model[1].weight.data[0] = wrong
    assert not metrics.weights_are_finite(model)


def test_the_first_layer_where_it_shows_is_named() -> None:
    model = two_layers()
    assert metrics.divergence(model, 7, "the loss is nan").startswith(
        "training diverged at step 7: the loss is nan; the"
    )
    model[2].weight.data[0, 0] = torch.nan
    assert "the first layer with weights that are not finite is 2.weight;" in metrics.divergence(model, 7, "x")
    model[1].weight.grad[1] = torch.inf
    assert "the first layer with a gradient that is not finite is 1.weight;" in metrics.divergence(model, 7, "x")


def test_a_loss_that_only_reaches_the_bound_is_no_spike() -> None:
    assert not metrics.is_spike(7.0, [0.0, 2.0] * 20)
