"""What makes steps faster where it is there: it changes nothing else, and where it is not there, that is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.progress import SILENT, Silent
from edgeformer.artifacts.recipe import CompileConfig, TrainingConfig
from edgeformer.data.batching import IGNORED
from edgeformer.models import load_recipe
from edgeformer.models.adapter import Place
from edgeformer.training import distributed
from edgeformer.training import step as compiled
from edgeformer.training.objective import Objective
from edgeformer.training.step import CompiledModel, Levers, _keep_gradients
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL, SMALL_LANGUAGE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Messages(Silent):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def training(**changes: Any) -> TrainingConfig:
    return load_recipe("quickstart").training.model_copy(update=changes)


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["loss"] for record in records if record["kind"] == "step"]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the input of every graph that torch.compile was given; they are run as they are."""
    given: list[int] = []

    def runtime(graph: Any, inputs: Any, **options: Any) -> Any:
        given.append(max(len(one) for one in inputs if one.dtype == torch.int64))
        return graph.forward

    monkeypatch.setattr(compiled, "RUNTIME", runtime)
    return given


def test_a_lever_that_is_not_there_is_named_and_the_others_change_no_loss(tmp_path: Path, graphs: list[int]) -> None:
    sets = [*SMALL, "training.log_every=1", "model.dropout=0.0"]
    asked = ["training.tf32=true", "training.pinned_memory=true", "training.compile={shapes: 2, cuda_graphs: true}"]
    said, found = Messages(), []
    for name, changes in (("plain", []), ("levers", asked)):
        recipe = load_recipe("quickstart", [*sets, *changes])
        found.append(losses(train(recipe, TrainOptions(tmp_path, name=name, max_steps=6, accelerator="cpu"), said)))
    assert [line.partition(":")[0] for line in said.lines if "not used" in line] == [
        "training.tf32 is not used",
        "training.pinned_memory is not used",
        "training.compile.cuda_graphs is not used",
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-5), "padding to few lengths changes nothing"
    assert 1 <= len(graphs) <= 2


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_a_language_model_is_compiled_once_with_everything_recomputed(tmp_path: Path, graphs: list[int]) -> None:
    found = []
    for name, changes in (("plain", []), ("fast", ["training.compile={shapes: 1}", "training.checkpointing=loop"])):
        sizes = ("model.loops=2", "model.exits=[1]", "model.cycles=2", "model.embedding_cycles=1", "model.dropout=0.0")
        recipe = load_recipe("crt_mini", [*SMALL_LANGUAGE, *sizes, "training.log_every=1", *changes])
        found.append(losses(train(recipe, TrainOptions(tmp_path, name=name, max_steps=3, accelerator="cpu"))))
    assert found[0] == pytest.approx(found[1], abs=1e-5) and len(graphs) == 1


@pytest.mark.parametrize(("capability", "used"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_card_has_tf32_from_its_capability_on(
    capability: tuple[int, int], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = Levers.on(training(tf32=True), CUDA)
    assert found.tf32 is used and bool(found.unused) is not used
    assert not Levers.on(training(), CUDA).tf32


@pytest.mark.parametrize(("asked", "on_card"), [(None, True), (True, True), (False, False)])
def test_memory_is_pinned_on_a_card_unless_it_shall_not(asked: bool | None, on_card: bool) -> None:
    assert Levers.on(training(pinned_memory=asked), CUDA).pinned is on_card
    there = Levers.on(training(pinned_memory=asked), CPU)
    assert there.pinned is False and len(there.unused) == (1 if asked else 0)


def test_only_steps_are_multiplied_in_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    with Levers(tf32=True, pinned=False, graphs=False).multiplying():
        assert torch.get_float32_matmul_precision() == "high"
    with Levers(tf32=False, pinned=False, graphs=False).multiplying():
        assert torch.get_float32_matmul_precision() == before
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_so_many_shapes_are_compiled_and_no_more(graphs: list[int]) -> None:
    model = nn.Embedding(5, 3)
    fast = CompiledModel(model, 2, graphs=False)
    fast.starts_over(4)
    for rows, length in ((4, 2), (4, 3), (4, 2), (4, 5), (3, 2), (2, 3)):
        ids = torch.ones(rows, length, dtype=torch.int64)
        assert torch.equal(fast(ids), model(ids))
    assert graphs == [4, 4] and fast.shapes == 2, "neither a third length nor fewer rows"
    fast.starts_over(2)
    assert torch.equal(fast(ids), model(ids)) and graphs == [4, 4, 2] and fast.shapes == 1
    assert not [*fast.parameters()], "the model's weights are its own"


@pytest.mark.parametrize("scored", [False, True])
def test_batches_have_few_lengths_and_what_padding_counts_for_stays(tmp_path: Path, scored: bool) -> None:
    sets = [*SMALL_LANGUAGE, "data.mode=paragraphs", f"training.score_padding={str(scored).lower()}"]
    recipe = load_recipe("crt_mini", [*sets, "training.compile={shapes: 3}"])
    plain = Objective(load_recipe("crt_mini", sets), tmp_path, Place(), SILENT)
    padded = Objective(recipe, tmp_path, Place(), SILENT)
    found = [[one.batch(rows, CPU) for rows in plain.steps(0)] for one in (plain, padded)]
    lengths = {batch["input_ids"].shape[1] for batch, _ in found[1]}
    assert lengths <= ({32} if scored else {11, 22, 32}), "thirds of the 32 tokens that rows are cut to"
    assert [weight for _, weight in found[0]] == [weight for _, weight in found[1]]
    for (batch, _), (longer, _) in zip(*found, strict=True):
        known = batch["targets"].shape[1]
        assert torch.equal(longer["targets"][:, :known], batch["targets"])
        assert bool((longer["targets"][:, known:] == IGNORED).all())


def test_a_model_that_cannot_be_compiled_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def runtime(graph: Any, inputs: Any, **options: Any) -> Any:
        raise RuntimeError("no compiler\nand much more")

    monkeypatch.setattr(compiled, "RUNTIME", runtime)
    fast = CompiledModel(nn.Linear(3, 3), 2, graphs=False)
    fast.starts_over(2)
    with pytest.raises(InputError, match=r"training\.compile: the model cannot be compiled here: .*no compiler; take"):
        fast(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("skipping cudagraphs due to a cpu device"), InputError),
        (RuntimeError("an assertion on the card"), RuntimeError),
        (torch.OutOfMemoryError("CUDA out of memory in cudagraphs"), torch.OutOfMemoryError),
    ],
)
def test_what_cannot_be_recorded_is_bad_input_and_other_errors_are_themselves(
    error: RuntimeError, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def runtime(graph: Any, inputs: Any, **options: Any) -> Any:
        def run(*given: Any) -> Any:
            raise error

        return run

    monkeypatch.setattr(compiled, "RUNTIME", runtime)
    fast = CompiledModel(nn.Linear(3, 3), 2, graphs=False)
    fast.starts_over(2)
    with pytest.raises(told):
        fast(torch.ones(2, 3))


def test_several_processes_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        process_index, num_processes, device = 0, 2, CPU

    monkeypatch.setattr(distributed, "_accelerator", lambda precision, use_cpu: Two())
    recipe = load_recipe("quickstart", ["training.precision=fp32"])
    assert distributed.connect(recipe, "cpu", sharded=False).count == 2
    compiling = recipe.training.model_copy(update={"compile": CompileConfig()})
    with pytest.raises(InputError, match=r"training\.compile: compiles in one process only, not in 2"):
        distributed.connect(recipe.model_copy(update={"training": compiling}), "cpu", sharded=False)


class FromOneBuffer(torch.autograd.Function):
    """A product whose gradient is always returned in the same memory, as that of a CUDA graph."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.buffer = buffer
        return weight * x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.buffer.copy_(slope * x)
        return ctx.buffer.detach(), None, None


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_several_micro_batches_add_up(kept: bool) -> None:
    model, buffer = nn.Linear(2, 1, bias=False), torch.zeros(1, 2)
    if kept:
        _keep_gradients(model)
    for step in range(2):
        for number in (1.0, 2.0, 4.0):
            FromOneBuffer.apply(model.weight, torch.full((1, 2), number), buffer).sum().backward()
        assert model.weight.grad is not None
        assert (model.weight.grad.tolist() == [[7.0, 7.0]]) is kept, (
            f"step {step}: without it the buffer adds to itself"
        )
        model.weight.grad = None


def test_levers_that_are_not_moved_leave_the_recipe_what_it_was() -> None:
    for name in ("quickstart", "crt_mini"):
        recipe = load_recipe(name)
        moved = {
            "training.pinned_memory=false": False, "training.tf32=true": True, "training.compile={shapes: 2}": True,
            "training.optimizer.kernels=loop": True,
        }  # fmt: skip
        if name == "crt_mini":
            moved["model.attention=varlen"] = True
        for change, decides in moved.items():
            assert (load_recipe(name, [change]).fingerprint() != recipe.fingerprint()) is decides, change
        text = json.dumps(recipe.model_dump(mode="json", exclude={"training": {"checkpoint_minutes"}}))
        assert "tf32" in text and "kernels" in text, "the resolved recipe says all of them"
