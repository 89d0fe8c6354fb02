"""The tensors of a step, of a model so small that they can be counted by hand; and which moment is the peak.

The model is a table of 10 rows of 4 numbers, a dropout, one that drops nothing, and a head of 3 rows: 52 parameters,
and 7 numbers that are none. It reads 8 rows of 5 tokens, so a state takes 8 · 5 · 4 · 4 = 640 bytes, logits 480.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import load_recipe
from edgeformer.models.adapter import Losses, ModelAdapter, Place
from edgeformer.training import memory
from edgeformer.training.memory import Event, Kind, predict_peak, share_of

PARAMETERS, BUFFERS = 52, 7
IDS, STATE, LOGITS = 8 * 5 * 8, 640, 480


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.drops = nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.0))
        self.head = nn.Linear(4, 3, bias=False)
        self.register_buffer("places", torch.zeros(BUFFERS))

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.drops(self.table(ids)))
        return result


class Scorer(nn.Module):
    inputs, optional = ("input_ids",), ()

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.model(input_ids)
        return result


class Toy:
    """Task and family of the model; what it is asked for is kept."""

    def __init__(self) -> None:
        self.adapter = self
        self.asked: list[Any] = []
        self.dropouts: list[nn.Module] = []
        self.formats: set[torch.dtype] = set()
        self.trains: bool | None = None

    def build(self, recipe: Recipe, place: Place) -> tuple[nn.Module, None]:
        assert recipe.name == "toy"
        self.asked.append(place)
        return Model(), None

    def loss(self, model: nn.Module, recipe: Recipe, prepared: None) -> Any:
        self.asked.append((type(model), recipe.name, prepared))

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Losses:
            assert isinstance(model, Model)
            self.dropouts, self.trains = list(model.drops), model.training
            logits = model(batch["input_ids"])
            self.formats.add(logits.dtype)
            return Losses(logits.square().sum())

        return loss

    def learning(self, model: nn.Module, training: Any) -> Any:
        return ModelAdapter.learning(self, model, training)  # type: ignore[arg-type]

    def as_on_cuda(self, model: nn.Module) -> None:
        self.asked.append(("as on CUDA", type(model)))

    def scorer(self, model: nn.Module) -> nn.Module:
        self.trains = model.training
        return Scorer(model)

    def example(self, recipe: Recipe, rows: int) -> dict[str, Any]:
        self.asked.append((recipe.name, rows))
        return {"input_ids": np.broadcast_to(np.int64(3), (rows, 5))}

    def evaluation_rows(self, tokens: int) -> int:
        self.asked.append(tokens)
        return 2


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    made = Toy()
    monkeypatch.setattr(memory, "task_named", {"language-modeling": made}.__getitem__)
    monkeypatch.setattr(memory, "model_spec_of", lambda recipe: made if recipe.name == "toy" else None)
    monkeypatch.setattr(memory, "_VALIDATIONS", {})
    return made


def recipe_of(*overrides: str) -> Recipe:
    small = ("name=toy", "training.batch_size=8", "training.accumulation=1", "training.clip_norm=null")
    return load_recipe("crt_mini", [*small, *overrides])


def traced(recipe: Recipe, device: Any = "cpu", precision: str = "fp32") -> tuple[dict[Kind, int], list[Event]]:
    with FakeTensorMode():
        return memory._trace(recipe, device, precision)


def made(events: list[Event], kind: Kind) -> list[int]:
    """Bytes of what was made, in turn."""
    return [event.size_bytes for event in events if event.kind == kind and event.size_bytes > 0]


def test_what_stays_as_long_as_training(toy: Toy) -> None:
    stays, _ = traced(recipe_of())
    assert stays["weights"] == 4 * (PARAMETERS + BUFFERS)
    assert stays["optimizer"] == 4 * 2 * PARAMETERS + 2 * 4, "two moments, and each tensor's count of steps"
    assert toy.asked == [Place(for_export=True), (Model, "toy", None), ("toy", 8)]
    assert toy.trains is True


def test_the_tensors_of_a_step(toy: Toy) -> None:
    _, events = traced(recipe_of())
    # ids; rows; the dropout's noise and result; logits, their squares, the loss
    assert made(events, "activations") == [IDS, STATE, STATE, STATE, LOGITS, LOGITS, 4]
    sizes = {event.storage: event.size_bytes for event in events if event.size_bytes > 0}
    gradients = [sizes[event.storage] for event in events if event.kind == "gradients"]
    assert gradients == [4 * 12, 4 * 40], "the head's, then the table's"
    # what comes back through the loss, the squares, the head, the dropout and the table; how often is torch's affair
    assert set(made(events, "temporary")) == {4, LOGITS, STATE, *gradients}
    left = {event.storage for event in events if event.size_bytes > 0}
    left -= {event.storage for event in events if event.size_bytes < 0}
    assert sorted(sizes[storage] for storage in left) == sorted([IDS, 4, *gradients]), "the batch, the loss, gradients"
    assert toy.formats == {torch.float32}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_products_are_in_half_precision(toy: Toy, precision: str) -> None:
    stays, events = traced(recipe_of(), precision=precision)
    assert toy.formats == {{"fp16": torch.float16, "bf16": torch.bfloat16}[precision]}
    # what the head takes is copied, and so is the head, which is counted as temporary
    assert made(events, "activations") == [IDS, STATE, STATE, STATE, STATE // 2, LOGITS // 2, LOGITS // 2, 2]
    assert made(events, "temporary")[0] == 2 * 12
    assert stays == traced(recipe_of())[0], "the weights and the optimizer's state are not"


def test_clipping_takes_memory_of_its_own(toy: Toy) -> None:
    _, without = traced(recipe_of())
    _, events = traced(recipe_of("training.clip_norm=1"))
    assert events[: len(without)] == without
    assert len(events) > len(without) and {event.kind for event in events[len(without) :]} == {"temporary"}


def test_cuda_keeps_masks_of_bytes(toy: Toy) -> None:
    stays, events = traced(recipe_of(), "cuda")
    assert made(events, "activations") == [IDS, STATE, STATE, STATE // 4, LOGITS, LOGITS, 4]
    assert toy.asked.count(("as on CUDA", Model)) == 1
    one, none = toy.dropouts
    assert isinstance(one, memory._MaskDropout) and one.share == 0.25
    assert type(none) is nn.Dropout, "what drops nothing keeps no mask"
    assert stays == traced(recipe_of())[0]
    assert toy.asked.count(("as on CUDA", Model)) == 1 and type(toy.dropouts[0]) is nn.Dropout


def test_dropout_with_a_mask_drops_while_it_trains() -> None:
    dropout, ones = memory._MaskDropout(0.25), torch.ones(10_000)
    found = dropout(ones)
    assert found.unique().tolist() == [0.0, pytest.approx(4 / 3)] and 0.2 < (found == 0).double().mean() < 0.3
    assert torch.equal(dropout.eval()(ones), ones)


def test_batches_hold_numbers_of_the_example(toy: Toy) -> None:
    found = memory.filled({"a": np.full((2, 3), 7), "b": np.array([1, 2, 3])})
    assert found["a"].tolist() == [[7] * 3] * 2 and found["b"].tolist() == [1] * 3
    assert {tensor.dtype for tensor in found.values()} == {torch.int64}
    assert memory._bytes([torch.zeros(3), torch.zeros(8)[2:4], torch.zeros(5, dtype=torch.int8)]) == 12 + 32 + 5


def test_a_batch_of_validation(toy: Toy) -> None:
    with FakeTensorMode():
        events = memory._validation(recipe_of())
    # two rows of five: ids, rows, logits; nothing is dropped, and nothing is kept for a gradient
    assert [event.size_bytes for event in events] == [80, 160, 120, -160, -120]
    assert {event.kind for event in events} == {"activations"}
    assert toy.asked == [Place(for_export=True), recipe_of().data.tokens_at_once, ("toy", 2)]
    assert toy.trains is False


def test_a_validation_is_counted_once_for_what_trains_differently(toy: Toy) -> None:
    with FakeTensorMode():
        first = memory._validation(recipe_of())
        assert memory._validation(recipe_of("training.batch_size=3", "training.optimizer.lr=1e-5")) is first
        assert toy.asked.count(Place(for_export=True)) == 1
        for count, change in enumerate(("model.loops=9", "data.sequence_length=64"), start=2):
            assert memory._validation(recipe_of(change)) is not first
            assert toy.asked.count(Place(for_export=True)) == count


@pytest.mark.parametrize(
    ("processes", "batch_size", "accumulation"),
    [(1, 8, 3), (2, 8, 2), (3, 8, 1), (4, 6, 1), (5, 5, 1), (24, 1, 1), (25, 1, 1)],
)
def test_a_share_is_of_every_steps_rows(processes: int, batch_size: int, accumulation: int) -> None:
    recipe = recipe_of("training.accumulation=3")
    share = share_of(recipe, processes)
    assert (share.training.batch_size, share.training.accumulation) == (batch_size, accumulation)
    same = share.training.model_copy(update={"batch_size": 8, "accumulation": 3})
    assert share.model_copy(update={"training": same}) == recipe


MIB = 2**20
STAYS: dict[Kind, int] = {"weights": 300, "optimizer": 600, "gradients": 0}
STEP: list[Event] = [
    Event(0, 1000, "activations"),
    Event(1, 90, "temporary"),
    Event(1, 0, "gradients"),
    Event(0, -1000, "activations"),
    Event(2, 50, "temporary"),
]
"""1,000 and 90 bytes at the worst moment; 90 become a gradient. With earlier gradients, 90 more of these."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the tracing finds, and the validation; what tracing was asked for."""
    found: dict[str, Any] = {"step": STEP, "validation": [Event(0, 1089, "activations")]}

    def trace(*asked: Any) -> tuple[dict[Kind, int], list[Event]]:
        assert isinstance(torch.zeros(1), FakeTensor), "no memory is taken"
        found["asked"] = asked
        return dict(STAYS), found["step"]

    def validation(recipe: Recipe) -> list[Event]:
        assert isinstance(torch.zeros(1), FakeTensor)
        found["validated"] = recipe
        return list(found["validation"])

    monkeypatch.setattr(memory, "_trace", trace)
    monkeypatch.setattr(memory, "_validation", validation)
    return found


def parts(breakdown: Any) -> tuple[int, ...]:
    return tuple(breakdown.model_dump().values())


def test_the_peak_is_the_worst_of_a_step_and_a_validation(counted: dict[str, Any]) -> None:
    recipe = recipe_of()
    found = predict_peak(recipe, device_kind="cpu", precision="bf16")
    assert counted["asked"] == (recipe, "cpu", "bf16", 1) and counted["validated"] is recipe
    # the step: 1,000 and 90, which are a gradient then, and in no gap of the heap
    assert parts(found) == (300, 90, 600, 1000, 0, 35 * MIB + 1200)
    counted["validation"] = [Event(0, 1091, "activations")]
    found = predict_peak(recipe, device_kind="cpu", precision="fp32")
    assert parts(found) == (300, 0, 600, 1091, 0, 35 * MIB + 700)
    on_card = predict_peak(recipe, device_kind="cuda", precision="fp32")
    assert parts(on_card) == (300, 0, 600, 1091, 0, 64 * MIB + 109) and counted["asked"] == (recipe, "cuda", "fp32", 1)


def test_gradients_of_earlier_rows_count_where_there_are_any(counted: dict[str, Any]) -> None:
    twice = recipe_of("training.accumulation=2")
    found = predict_peak(twice, device_kind="cpu", precision="fp32")
    assert parts(found)[:5] == (300, 90, 600, 1000, 90)
    assert parts(predict_peak(recipe_of(), device_kind="cpu", precision="fp32"))[:5] == (300, 90, 600, 1000, 0)


def test_shards_hold_their_part_and_the_weights_that_they_gather(counted: dict[str, Any]) -> None:
    for shards, weights, optimizer in ((1, 300, 600), (2, 450, 300), (4, 375, 150), (7, 300 * 8 // 7, 600 // 7)):
        found = predict_peak(recipe_of(), device_kind="cpu", precision="fp32", processes=shards, sharded=shards > 1)
        assert (found.weights, found.optimizer, found.gradients) == (weights, optimizer, 90)
    found = predict_peak(
        recipe_of("training.accumulation=2"), device_kind="cpu", precision="fp32", processes=2, sharded=True
    )
    assert parts(found)[:5] == (450, 90, 300, 1000, 90)
    counted["validation"] = [Event(0, 2000, "activations")]
    found = predict_peak(recipe_of(), device_kind="cpu", precision="fp32", processes=2, sharded=True)
    assert parts(found)[:5] == (450, 0, 300, 2000, 0)
