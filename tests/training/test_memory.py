"""The predicted peak: the same bytes as torch's tracker counts, and as real tensors take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.artifacts.errors import InputError
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.adapter import Place
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.loss import chunked_loss, whole_loss
from edgeformer.tasks import labels as one_answer
from edgeformer.tasks import language_modeling
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.tasks.language_modeling import LanguageRecipe
from edgeformer.training import memory
from edgeformer.training.memory import KINDS, MemoryLedger, predict_peak, worst_moment
from edgeformer.training.optimizer import build_optimizer, quicken
from edgeformer.training.plan import check_fits

SMALL = [
    *("model.vocab_size=900", "model.hidden_size=32", "model.embedding_size=16", "model.ffn_size=64"),
    *("model.attention_heads=2", "model.loops=2", "model.exits=[1]", "model.cycles=3", "model.embedding_cycles=1"),
    *("data.sequence_length=96", "training.batch_size=8"),
]
TINY_ENCODER = ["training.batch_size=128", "model.layers=1"]


def small(*overrides: str) -> LanguageRecipe:
    recipe = load_recipe("crt_deep_rtx4050", [*SMALL, *overrides])
    assert isinstance(recipe, LanguageRecipe)
    return recipe


@pytest.fixture
def hardly_any_validation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So little of it that the peak is in training, also of models as small as these."""
    memory._VALIDATIONS.clear()
    monkeypatch.setattr(language_modeling, "EVALUATION_TOKENS", 1)
    monkeypatch.setattr(one_answer, "EVALUATION_ROWS", 1)
    yield
    memory._VALIDATIONS.clear()


class Steps(nn.Module):
    """Real training on random tokens; the loss in a module's forward, because torch's tracker wants one root."""

    def __init__(self, recipe: LanguageRecipe, precision: str = "fp32") -> None:
        super().__init__()
        self.config, self.half = recipe.training, precision == "bf16"
        self.model = build_crt(recipe.model)
        self.model.checkpointing = recipe.training.checkpointing
        self.kept = quicken(self.model)
        self.optimizer = build_optimizer(self.model, recipe.training.optimizer)
        shape = (recipe.training.batch_size, recipe.data.sequence_length)
        self.ids = torch.randint(0, recipe.model.vocab_size, shape)
        self.targets, self.positions = self.ids.clone(), torch.arange(shape[1]).repeat(shape[0], 1)

    def forward(self) -> Tensor:
        states = self.model(self.ids, self.positions)
        measure = chunked_loss if self.config.chunked_loss else whole_loss
        return measure(self.model, states, self.targets, self.config.exit_weight)[0]

    def step(self) -> None:
        for _ in range(min(2, self.config.accumulation)):
            with torch.autocast("cpu", torch.bfloat16) if self.half else nullcontext():
                loss = self()
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def counted(recipe: LanguageRecipe, precision: str = "fp32") -> int:
    breakdown = predict_peak(recipe, device_kind="cpu", precision=precision)
    return breakdown.peak_bytes - breakdown.reserve


@pytest.mark.usefixtures("hardly_any_validation")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("training.checkpointing=none", "training.chunked_loss=false", "training.accumulation=1"),
        ("training.checkpointing=loop", "training.chunked_loss=true", "training.accumulation=2"),
        ("training.checkpointing=cycles", "training.chunked_loss=true", "training.accumulation=1"),
        ("model.vocab_size=17000", "training.batch_size=1", "training.accumulation=1"),  # keeps its table's gradient
        ("model.vocab_size=17000", "training.batch_size=1", "training.accumulation=2"),
    ],
)
def test_the_prediction_is_what_real_tensors_take(overrides: tuple[str, ...], precision: str) -> None:
    recipe = small(*overrides)
    steps = Steps(recipe, precision)
    steps.step()  # the optimizer has its state from here on
    ledger = MemoryLedger([])
    assert bool(steps.kept) == (recipe.model.vocab_size > 10_000)
    given = (steps.ids, steps.targets, steps.positions, *steps.kept)
    for tensor in (*steps.model.parameters(), *steps.model.buffers(), *given):
        ledger.enter(tensor, "weights")
    for state in steps.optimizer.state.values():
        for tensor in state.values():
            ledger.enter(tensor, "optimizer")
    with ledger.making("temporary"):
        steps.step()
    real = sum(worst_moment({}, ledger.events).values())
    assert counted(recipe, precision) == pytest.approx(real, rel=0.01)


@pytest.mark.usefixtures("hardly_any_validation")
def test_the_ledger_finds_what_torchs_own_tracker_finds() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    recipe = small("training.checkpointing=none", "training.accumulation=1")
    steps = Steps(recipe)
    steps.step()
    tracker = MemTracker()
    tracker.track_external(steps, steps.optimizer, steps.ids, steps.targets, steps.positions)
    with tracker:
        steps.step()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    assert counted(recipe) == pytest.approx(snapshot["Total"], rel=0.01)


@pytest.mark.usefixtures("hardly_any_validation")
def test_breakdown_of_a_language_model() -> None:
    recipe = small("training.accumulation=2")
    found = predict_peak(recipe, device_kind="cuda", precision="bf16")
    parameters = sum(parameter.numel() for parameter in build_crt(recipe.model).parameters())
    assert found.weights == found.gradients == 4 * parameters
    assert 8 * parameters <= found.optimizer <= 8 * parameters + 1024  # two moments, and the count of steps
    assert found.activations > 2 * parameters and found.temporary > 0  # the weights in bf16 are among the activations
    assert found.reserve >= 64 * 2**20
    assert found.peak_bytes == sum(found.model_dump().values())


@pytest.mark.usefixtures("hardly_any_validation")
def test_accumulation_keeps_the_gradients() -> None:
    once, twice = small("training.accumulation=1"), small("training.accumulation=2")
    assert counted(once) < counted(twice) <= counted(once) + 4 * sum(
        parameter.numel() for parameter in build_crt(once.model).parameters()
    )  # fmt: skip


@pytest.mark.parametrize("length", [128, 256])
def test_cuda_never_holds_the_attention_weights(length: int) -> None:
    """The part that grows with the square of the length is the mask alone, one byte a pair or two in bf16."""
    overrides = ["data.max_length=512", f"data.max_length={length}"]
    recipe = load_recipe("quickstart", [*TINY_ENCODER, *overrides])
    assert isinstance(recipe, ClassificationRecipe)
    on_card = predict_peak(recipe, device_kind="cuda", precision="bf16")
    on_host = predict_peak(recipe, device_kind="cpu", precision="bf16")
    weights = recipe.training.batch_size * recipe.model.heads * length**2  # one byte each
    layers = recipe.model.layers * recipe.model.iterations - 1  # the last looks from one position only
    assert on_host.activations - on_card.activations > 2 * layers * weights


@pytest.mark.usefixtures("hardly_any_validation")
def test_prediction_of_a_classifier_is_what_real_tensors_take() -> None:
    recipe = load_recipe("quickstart", TINY_ENCODER)
    assert isinstance(recipe, ClassificationRecipe)
    model, _ = model_spec_of(recipe).adapter.build(recipe, Place())
    optimizer = build_optimizer(model, recipe.training.optimizer)
    ids = torch.randint(0, recipe.model.vocab_size, (recipe.training.batch_size, recipe.data.max_length))
    mask, labels = torch.ones_like(ids), torch.zeros(len(ids), dtype=torch.int64)
    ledger = MemoryLedger([])
    for tensor in (*model.parameters(), *model.buffers(), ids, mask, labels):
        ledger.enter(tensor, "weights")
    for _ in range(2):
        with ledger.making("temporary"):
            F.cross_entropy(model(ids, mask), labels, label_smoothing=0.1).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    found = predict_peak(recipe, device_kind="cpu", precision="fp32")
    assert found.peak_bytes - found.reserve == pytest.approx(sum(worst_moment({}, ledger.events).values()), rel=0.01)


def test_validation_counts_where_it_takes_more_than_a_step() -> None:
    recipe = small("training.batch_size=1", "training.checkpointing=cycles", "training.accumulation=1")
    model = build_crt(recipe.model).eval()
    rows = language_modeling.EVALUATION_TOKENS // recipe.data.sequence_length
    ids = torch.zeros(rows, recipe.data.sequence_length, dtype=torch.int64)
    ledger = MemoryLedger(model.parameters())
    with ledger.making("activations"), torch.no_grad():
        model(ids, torch.zeros_like(ids))
    forward = worst_moment({}, ledger.events)["activations"]
    found = predict_peak(recipe, device_kind="cpu", precision="fp32")
    assert found.gradients == 0
    assert forward <= found.activations < 1.6 * forward  # the exits' logits come on top


def test_a_prediction_draws_no_random_numbers() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    predict_peak(small(), device_kind="cuda", precision="bf16")
    assert torch.equal(torch.rand(3), expected)


def test_events_in_order() -> None:
    ledger = MemoryLedger([])
    with ledger.making("activations"):
        first = torch.zeros(256)
        second = torch.zeros(512)
        del first
        third = torch.zeros(64)
    assert [event.size_bytes for event in ledger.events] == [1024, 2048, -1024, 256]
    assert worst_moment({"weights": 100}, ledger.events) == {
        **dict.fromkeys(KINDS, 0),
        "weights": 100,
        "activations": 3072,
    }
    del second, third


def test_what_fits_is_returned_and_what_does_not_is_refused() -> None:
    recipe = small("training.batch_size=64", "training.accumulation=1", "training.checkpointing=none")
    peak = predict_peak(recipe, device_kind="cpu", precision="fp32").peak_bytes
    fits = check_fits(recipe, device_kind="cpu", precision="fp32", free=(peak, "free here"))
    assert fits.peak_bytes == peak
    with pytest.raises(InputError, match=r"MiB are free here; it would fit .* --set training\.\w+=.*--ignore-memory"):
        check_fits(recipe, device_kind="cpu", precision="fp32", free=(peak - 2**20, "free here"))
    with pytest.raises(InputError, match=r"use a smaller model, or train anyway with --ignore-memory"):
        check_fits(recipe, device_kind="cpu", precision="fp32", free=(2**20, "free here"))
