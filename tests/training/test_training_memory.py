"""Predicted peak memory against torch's tracker and real tensors, free memory, measured peaks, out-of-memory errors."""

from __future__ import annotations

import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from edgeformer.artifacts.data_config import DataConfig, DataSection, FileSource, SyntheticSource, TextConfig
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import load_recipe, model_spec_of
from edgeformer.models.adapter import BuildTarget
from edgeformer.models.crt.adapter import build_crt
from edgeformer.models.crt.loss import chunked_loss, full_loss
from edgeformer.tasks import language_modeling
from edgeformer.tasks import task as task_module
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.tasks.language_modeling import LanguageRecipe
from edgeformer.training import memory
from edgeformer.training.memory import (
    KINDS,
    Event,
    Kind,
    MemoryLedger,
    check_data_fits,
    is_out_of_memory,
    predict_peak,
    share_of,
    use_cuda_dropout,
    with_gradients,
    worst_moment,
)
from edgeformer.training.optimizer import build_optimizer, use_static_gradients

MIB = 2**20
SMALL = [
    *("model.vocab_size=900", "model.hidden_size=32", "model.embedding_size=16", "model.ffn_size=64"),
    *("model.attention_heads=2", "model.loops=2", "model.exits=[1]", "model.cycles=3", "model.embedding_cycles=1"),
    *("data.sequence_length=96", "training.batch_size=8"),
]
TINY_ENCODER = ["training.batch_size=128", "model.layers=1"]


def language_recipe(*overrides: str) -> LanguageRecipe:
    recipe = load_recipe("crt_deep_rtx4050", [*SMALL, *overrides])
    assert isinstance(recipe, LanguageRecipe)
    return recipe


@pytest.fixture
def little_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation batches so small that the peak is in training even for tiny models."""
    monkeypatch.setattr(memory, "_VALIDATION_EVENTS", {})
    monkeypatch.setattr(language_modeling, "EVALUATION_TOKENS", 1)
    monkeypatch.setattr(task_module, "EVALUATION_ROWS", 1)


class RealTraining(nn.Module):
    """Training on random tokens; the loss is in a module's forward because torch's tracker needs one root."""

    def __init__(self, recipe: LanguageRecipe, precision: str = "fp32") -> None:
        super().__init__()
        self.config, self.half = recipe.training, precision == "bf16"
        self.model = build_crt(recipe.model)
        self.model.checkpointing = recipe.training.checkpointing
        self.static_gradients = use_static_gradients(self.model, "cpu", recipe.training)
        self.optimizer = build_optimizer(self.model, recipe.training.optimizer)
        shape = (recipe.training.batch_size, recipe.data.sequence_length)
        self.ids = torch.randint(0, recipe.model.vocab_size, shape)
        self.targets, self.positions = self.ids.clone(), torch.arange(shape[1]).repeat(shape[0], 1)

    def forward(self) -> Tensor:
        states = self.model(self.ids, self.positions)
        loss = chunked_loss if self.config.chunked_loss else full_loss
        return loss(self.model, states, self.targets, self.config.exit_weight)[0]

    def step(self) -> None:
        for _ in range(min(2, self.config.accumulation)):
            with torch.autocast("cpu", torch.bfloat16) if self.half else nullcontext():
                loss = self()
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def predicted_tensor_bytes(recipe: Recipe, precision: str = "fp32") -> int:
    breakdown = predict_peak(recipe, device_kind="cpu", precision=precision)
    return breakdown.peak_bytes - breakdown.reserve


@pytest.mark.usefixtures("little_validation")
class TestPrediction:
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    @pytest.mark.parametrize(
        "overrides",
        [
            ("training.checkpointing=none", "training.chunked_loss=false", "training.accumulation=1"),
            ("training.checkpointing=loop", "training.chunked_loss=true", "training.accumulation=2"),
            ("training.checkpointing=cycles", "training.chunked_loss=true", "training.accumulation=1"),
            ("model.vocab_size=17000", "training.batch_size=1", "training.accumulation=1"),  # static gradients
            ("model.vocab_size=17000", "training.batch_size=1", "training.accumulation=2"),
        ],
    )
    def test_real_tensors(self, overrides: tuple[str, ...], precision: str) -> None:
        recipe = language_recipe(*overrides)
        training = RealTraining(recipe, precision)
        training.step()  # allocates the optimizer's state
        assert bool(training.static_gradients) == (recipe.model.vocab_size > 10_000)
        ledger = MemoryLedger([])
        inputs = (training.ids, training.targets, training.positions, *training.static_gradients)
        for tensor in (*training.model.parameters(), *training.model.buffers(), *inputs):
            ledger.add(tensor, "weights")
        for state in training.optimizer.state.values():
            for tensor in state.values():
                ledger.add(tensor, "optimizer")
        with ledger.recording("temporary"):
            training.step()
        real = sum(worst_moment({}, ledger.events).values())
        assert predicted_tensor_bytes(recipe, precision) == pytest.approx(real, rel=0.01)

    def test_torchs_own_tracker(self) -> None:
        from torch.distributed._tools.mem_tracker import MemTracker

        recipe = language_recipe("training.checkpointing=none", "training.accumulation=1")
        training = RealTraining(recipe)
        training.step()
        tracker = MemTracker()
        tracker.track_external(training, training.optimizer, training.ids, training.targets, training.positions)
        with tracker:
            training.step()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        assert predicted_tensor_bytes(recipe) == pytest.approx(snapshot["Total"], rel=0.01)

    def test_real_classifier(self) -> None:
        recipe = load_recipe("quickstart", TINY_ENCODER)
        assert isinstance(recipe, ClassificationRecipe)
        model, _ = model_spec_of(recipe).adapter.build(recipe, BuildTarget())
        optimizer = build_optimizer(model, recipe.training.optimizer)
        ids = torch.randint(0, recipe.model.vocab_size, (recipe.training.batch_size, recipe.data.max_length))
        mask, labels = torch.ones_like(ids), torch.zeros(len(ids), dtype=torch.int64)
        ledger = MemoryLedger([])
        for tensor in (*model.parameters(), *model.buffers(), ids, mask, labels):
            ledger.add(tensor, "weights")
        for _ in range(2):
            with ledger.recording("temporary"):
                F.cross_entropy(model(ids, mask), labels, label_smoothing=0.1).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        real = sum(worst_moment({}, ledger.events).values())
        assert predicted_tensor_bytes(recipe) == pytest.approx(real, rel=0.01)

    def test_breakdown_and_accumulated_gradients(self) -> None:
        recipe = language_recipe("training.accumulation=2")
        parameters = sum(parameter.numel() for parameter in build_crt(recipe.model).parameters())
        breakdown = predict_peak(recipe, device_kind="cuda", precision="bf16")
        assert breakdown.weights == breakdown.gradients == 4 * parameters
        assert 8 * parameters <= breakdown.optimizer <= 8 * parameters + 1024  # two moments and the number of steps
        assert breakdown.activations > 2 * parameters and breakdown.temporary > 0  # with the weights in bf16
        assert breakdown.reserve >= 64 * MIB
        assert breakdown.peak_bytes == sum(breakdown.model_dump().values())
        without = predicted_tensor_bytes(language_recipe("training.accumulation=1"))
        assert without < predicted_tensor_bytes(recipe) <= without + 4 * parameters


@pytest.mark.parametrize("length", [128, 256])
def test_cuda_does_not_store_attention_weights(length: int) -> None:
    """Only the mask grows with the square of the length, with one byte a pair, or two in bf16."""
    recipe = load_recipe("quickstart", [*TINY_ENCODER, f"data.max_length={length}"])
    assert isinstance(recipe, ClassificationRecipe)
    on_card, on_host = (predict_peak(recipe, device_kind=kind, precision="bf16") for kind in ("cuda", "cpu"))
    weights = recipe.training.batch_size * recipe.model.heads * length**2
    layers = recipe.model.layers * recipe.model.iterations - 1  # the last has one query only
    assert on_host.activations - on_card.activations > 2 * layers * weights


def test_validation_can_be_the_peak() -> None:
    recipe = language_recipe("training.batch_size=1", "training.checkpointing=cycles", "training.accumulation=1")
    model = build_crt(recipe.model).eval()
    rows = language_modeling.EVALUATION_TOKENS // recipe.data.sequence_length
    ids = torch.zeros(rows, recipe.data.sequence_length, dtype=torch.int64)
    ledger = MemoryLedger(model.parameters())
    with ledger.recording("activations"), torch.no_grad():
        model(ids, torch.zeros_like(ids))
    forward = worst_moment({}, ledger.events)["activations"]
    breakdown = predict_peak(recipe, device_kind="cpu", precision="fp32")
    assert breakdown.gradients == 0
    assert forward <= breakdown.activations < 1.6 * forward  # the logits of the exits are added


def test_prediction_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    predict_peak(language_recipe(), device_kind="cuda", precision="bf16")
    assert torch.equal(torch.get_rng_state(), state)


def recorded(ledger: MemoryLedger) -> list[tuple[int, Kind]]:
    return [(event.size_bytes, event.kind) for event in ledger.events]


class TestLedger:
    def test_storages_are_recorded_once_and_when_freed(self) -> None:
        ledger = MemoryLedger([])
        with ledger.recording("temporary"):
            first = torch.zeros(8)
            view = first.view(2, 4)[1]
            empty = torch.zeros(0)
            with ledger.recording("optimizer"):
                second = torch.zeros(4, dtype=torch.float64)
            third = torch.zeros(1)
        assert recorded(ledger) == [(32, "temporary"), (32, "optimizer"), (4, "temporary")]
        assert [event.storage for event in ledger.events] == [0, 1, 2]
        outside = torch.zeros(16)
        assert len(ledger.events) == 3
        del first
        assert len(ledger.events) == 3, "a view keeps the storage"
        del view, second
        assert ledger.events[3:] == [Event(0, -32, "temporary"), Event(1, -32, "optimizer")]
        del third, empty, outside

    def test_addresses_are_reused(self) -> None:
        ledger = MemoryLedger([])
        for _ in range(3):
            with ledger.recording("activations"):
                torch.zeros(8)
        assert [event.storage for event in ledger.events] == [0, 0, 1, 1, 2, 2]

    def test_all_outputs_of_an_operator(self) -> None:
        values = torch.arange(6.0).view(2, 3)
        with MemoryLedger([]) as ledger:
            largest, indices = torch.max(values, dim=1)
        assert recorded(ledger) == [(8, "activations"), (16, "activations")]
        del largest, indices

    def test_error_restores_the_kind(self) -> None:
        ledger = MemoryLedger([])
        with ledger.recording("temporary"):
            with pytest.raises(RuntimeError, match="no"), ledger.recording("optimizer"):
                raise RuntimeError("no")
            tensor = torch.zeros(2)
        assert recorded(ledger) == [(8, "temporary")]
        del tensor

    def test_half_copies_of_weights_are_temporary(self) -> None:
        weight, other = nn.Parameter(torch.ones(4)), torch.ones(4)
        ledger = MemoryLedger([weight])
        with ledger.recording("activations"), torch.no_grad():
            tensors = weight.detach(), weight.to(torch.float16), other.to(torch.float16), weight * 2
        ledger.add(weight, "weights")
        assert recorded(ledger) == [(8, "temporary"), (8, "activations"), (16, "activations")]
        del tensors

    def test_gradients(self) -> None:
        parameter = nn.Parameter(torch.ones(4))
        ledger = MemoryLedger([parameter])
        with ledger.recording("temporary"):
            parameter.grad = torch.zeros(4)
        ledger.mark_gradient(parameter)
        assert ledger.events == [Event(0, 16, "temporary"), Event(0, 0, "gradients")]
        parameter.grad = torch.zeros(4)  # not recorded
        ledger.mark_gradient(parameter)
        assert len(ledger.events) == 3 and ledger.events[2].size_bytes == -16
        parameter.grad = None  # of a loss that does not use the parameter
        ledger.mark_gradient(parameter)
        assert len(ledger.events) == 3


def moment(**kinds: int) -> dict[str, int]:
    return {**dict.fromkeys(KINDS, 0), **kinds}


def test_worst_moment_is_the_first_largest_sum() -> None:
    events = [
        Event(0, 50, "activations"),
        Event(1, 30, "temporary"),  # 180
        Event(0, -50, "activations"),
        Event(2, 50, "optimizer"),  # 180 again
        Event(1, -30, "temporary"),
    ]
    existing: dict[Kind, int] = {"weights": 100}
    assert worst_moment(existing, events) == moment(weights=100, activations=50, temporary=30)
    assert worst_moment(existing, []) == moment(weights=100)
    larger = [*events, Event(3, 31, "temporary")]
    assert worst_moment(existing, larger) == moment(weights=100, temporary=31, optimizer=50)


def test_worst_moment_with_gradients() -> None:
    events = [Event(0, 50, "temporary"), Event(0, 0, "gradients")]
    assert worst_moment({}, events) == moment(gradients=50)
    other = [Event(1, 9, "activations"), Event(1, -9, "activations")]
    assert worst_moment({}, [events[0], *other, events[1]]) == moment(temporary=50, activations=9)
    freed = [*events, Event(0, -50, "temporary"), Event(1, 51, "activations")]
    assert worst_moment({"gradients": 7}, freed) == moment(gradients=7, activations=51)


def test_later_micro_batches_add_to_the_gradients() -> None:
    events = [
        Event(0, 50, "temporary"),
        Event(1, 20, "temporary"),
        Event(0, 0, "gradients"),
        Event(1, 0, "gradients"),
        Event(2, 5, "activations"),
        Event(0, 0, "gradients"),  # a weight that is used twice
        Event(2, -5, "activations"),
        Event(0, -50, "gradients"),
    ]
    gradient_bytes, later_events = with_gradients(events)
    assert gradient_bytes == 70
    freed = [Event(0, -50, "temporary"), Event(1, -20, "temporary")]
    assert later_events == [*events[:2], *freed, Event(2, 5, "activations"), Event(2, -5, "activations")]
    assert with_gradients([]) == (0, [])


def test_cuda_dropout() -> None:
    model = nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.0))
    use_cuda_dropout(model)
    dropout, without_effect = model
    assert type(without_effect) is nn.Dropout and type(dropout) is not nn.Dropout
    inputs, ledger = torch.ones(10_000, requires_grad=True), MemoryLedger([])
    with ledger.recording("activations"):
        dropped = dropout(inputs)
    assert sorted(size for size, _ in recorded(ledger) if size > 0) == [10_000, 40_000], "a mask of bytes, the result"
    assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert 0.2 < (dropped == 0).double().mean() < 0.3 and torch.equal(dropout.eval()(inputs), inputs)


def test_validation_is_traced_once_for_recipes_that_differ_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_VALIDATION_EVENTS", {})
    sizes = []
    for changes in ([], ["training.batch_size=3", "training.optimizer.lr=1e-5"], ["data.sequence_length=48"]):
        predict_peak(language_recipe(*changes), device_kind="cpu", precision="fp32")
        sizes.append(len(memory._VALIDATION_EVENTS))
    assert sizes == [1, 1, 2]


@pytest.mark.parametrize(
    ("processes", "batch_size", "accumulation"),
    [(1, 8, 3), (2, 8, 2), (3, 8, 1), (4, 6, 1), (5, 5, 1), (24, 1, 1), (25, 1, 1)],
)
def test_share_of_a_process(processes: int, batch_size: int, accumulation: int) -> None:
    recipe = accumulating_recipe(3)
    share = share_of(recipe, processes)
    assert (share.training.batch_size, share.training.accumulation) == (batch_size, accumulation)
    original = share.training.model_copy(update={"batch_size": 8, "accumulation": 3})
    assert share.model_copy(update={"training": original}) == recipe


def accumulating_recipe(accumulation: int = 1) -> Recipe:
    return load_recipe("crt_mini", ["training.batch_size=8", f"training.accumulation={accumulation}"])


STEP_EVENTS: list[Event] = [
    Event(0, 1000, "activations"),
    Event(1, 90, "temporary"),
    Event(1, 0, "gradients"),
    Event(0, -1000, "activations"),
    Event(2, 50, "temporary"),
]
"""1,000 and 90 bytes at the worst moment; the 90 become a gradient. An earlier micro-batch adds 90 bytes."""


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fixed results of tracing, and the arguments it is called with."""
    traces: dict[str, Any] = {"validation": [Event(0, 1089, "activations")]}

    def trace_step(*arguments: Any) -> tuple[dict[Kind, int], list[Event]]:
        assert isinstance(torch.zeros(1), FakeTensor), "no memory is allocated"
        traces["arguments"] = arguments
        return {"weights": 300, "optimizer": 600, "gradients": 0}, STEP_EVENTS

    monkeypatch.setattr(memory, "_trace_step", trace_step)
    monkeypatch.setattr(memory, "_trace_validation", lambda recipe: list(traces["validation"]))
    return traces


def breakdown_of(recipe: Recipe, kind: Any = "cpu", precision: str = "fp32", **options: Any) -> tuple[int, ...]:
    return tuple(predict_peak(recipe, device_kind=kind, precision=precision, **options).model_dump().values())


def test_peak_is_in_a_step_or_in_validation(traces: dict[str, Any]) -> None:
    recipe = accumulating_recipe()
    assert breakdown_of(recipe, precision="bf16") == (300, 90, 600, 1000, 0, 35 * MIB + 1200)
    assert traces["arguments"] == (recipe, "cpu", "bf16", 1)
    twice = accumulating_recipe(2)
    assert breakdown_of(twice)[:5] == (300, 90, 600, 1000, 90)
    traces["validation"] = [Event(0, 1091, "activations")]
    assert breakdown_of(recipe) == (300, 0, 600, 1091, 0, 35 * MIB + 700)
    assert breakdown_of(recipe, "cuda") == (300, 0, 600, 1091, 0, 64 * MIB + 109)


def test_peak_of_shards(traces: dict[str, Any]) -> None:
    for count, weights, optimizer in ((1, 300, 600), (2, 450, 300), (4, 375, 150), (7, 300 * 8 // 7, 600 // 7)):
        breakdown = breakdown_of(accumulating_recipe(), processes=count, sharded=count > 1)
        assert breakdown[:3] == (weights, 90, optimizer)
    twice = accumulating_recipe(2)
    assert breakdown_of(twice, processes=2, sharded=True)[:5] == (450, 90, 300, 1000, 90)
    traces["validation"] = [Event(0, 2000, "activations")]
    assert breakdown_of(accumulating_recipe(), processes=2, sharded=True)[:5] == (450, 0, 300, 2000, 0)


@pytest.mark.parametrize(
    ("platform", "device", "peak", "description"),
    [
        ("linux", "cpu", 5 * 1024, "resident set"),
        ("darwin", "cpu", 5, "resident set"),
        ("win32", "cpu", 77, "working set"),
        ("linux", "cuda", 123, "CUDA"),
    ],
)
def test_measured_peak(
    platform: str, device: str, peak: int, description: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    usage = {resource.RUSAGE_SELF: SimpleNamespace(ru_maxrss=5), resource.RUSAGE_CHILDREN: SimpleNamespace(ru_maxrss=9)}
    monkeypatch.setattr(resource, "getrusage", usage.__getitem__)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=77))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 123)
    measured = memory.measured_peak(device)
    assert measured[0] == peak and description in measured[1]


class OutOfResources(Exception):
    """Triton's error of this name derives from Exception."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("DefaultCPUAllocator"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (torch.AcceleratorError("CUDA error: too many resources requested for launch"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), False),
        (OutOfResources("out of resource: shared memory, Required: 132096, Hardware limit: 101376"), False),
        (RuntimeError("OutOfResources: out of resource: shared memory, Required: 132096"), False),
    ],
    ids=str,
)
def test_out_of_memory_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_out_of_memory_error_of_the_cpu() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)


def file_data(folder: Path, **changes: Any) -> DataSection:
    """Training files of 100 bytes, validation of 30 and 5, test of 7; and sources that are not read."""
    sources = {}
    for name, size in (("train", 100), ("validation", 30), ("more", 5), ("test", 7)):
        (folder / name).write_bytes(b"x" * size)
        sources[name] = FileSource(kind="file", path=str(folder / name))
    parts = {
        "train": (sources["train"], SyntheticSource(kind="synthetic-reviews", rows=9)),
        "validation": (sources["validation"], sources["more"]),
        "test": (sources["test"], FileSource(kind="file", path=str(folder / "missing"))),
    }
    if "labels" in changes:
        return DataConfig(parts=parts, split="given", **changes)
    return TextConfig(parts=parts, mode="packed", sequence_length=8, **changes)


@pytest.mark.parametrize(
    ("changes", "processes", "required"),
    [
        ({}, 1, 2 * 142),
        ({}, 3, 6 * 142),
        ({"labels": ("bad", "good")}, 1, 2 * 142),
        ({"stream": True}, 1, 2 * 42),
        ({"first_n": 5}, 2, 4 * 42),  # reads only a part of the training set
    ],
)
def test_files_need_twice_their_size_per_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], processes: int, required: int
) -> None:
    data = file_data(tmp_path, **changes)
    monkeypatch.setattr(memory, "free_bytes", lambda kind: ({"cpu": required}[kind], "free"))
    check_data_fits(data, processes)
    monkeypatch.setattr(memory, "free_bytes", lambda kind: ({"cpu": required - 1}[kind], "free"))
    with pytest.raises(InputError) as refused:
        check_data_fits(data, processes)
    message = str(refused.value)
    assert message.startswith(f"data.parts: {required // 2} B of files {'(' if processes > 1 else 'take'}")
    assert f"at least {required} B in memory, and {required - 1} B are free;" in message
    assert (f"(those of {processes} processes)" in message) == (processes > 1)
    assert ("make the sets besides train smaller" in message) == ("stream" in changes)
    assert ("--set data.stream=true" in message) == ("stream" not in changes)
