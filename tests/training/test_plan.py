"""Command plan: whether a recipe fits, the budget of a device, and suggested changes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from edgeformer.artifacts.data_config import DataConfig, FileSource
from edgeformer.artifacts.device import DeviceProfile, Fact
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_bytes, parse_bytes
from edgeformer.data import sources
from edgeformer.models import load_recipe
from edgeformer.tasks.classification import ClassificationRecipe
from edgeformer.training import train
from edgeformer.training.distributed import Processes
from edgeformer.training.memory import predict_peak
from edgeformer.training.plan import check_fits, count_offline, plan, planned_precision, suggest
from edgeformer.training.train import TrainOptions
from tests.fakes.nvml import LAPTOP, UUID, WINDOWS, Driver

MIB = 2**20
RTX = load_profile("rtx4050")
assert RTX.context_bytes is not None
CONTEXT = RTX.context_bytes.value


def with_budget(size_bytes: int) -> DeviceProfile:
    """Return a card with this budget for the tensors of a process."""
    fact = Fact[int](value=size_bytes + CONTEXT, source="this test", verified=True)
    return RTX.model_copy(update={"usable_memory_bytes": fact})


def test_recipe_that_fits() -> None:
    recipe = load_recipe("recurrent_sst2")
    result = plan(recipe, RTX)
    assert result.parameters == count_offline(recipe) == 10_972_162
    assert result.breakdown.weights == pytest.approx(4 * 10_972_162, rel=0.01)  # and the rotary table
    assert result.budget_bytes == parse_bytes("5.4 GiB") - CONTEXT
    assert (result.status, result.fits, result.precision, result.suggestions) == ("pass", True, "fp32", ())
    assert result.peak_bytes == sum(result.breakdown.model_dump().values()) < result.budget_bytes


def test_recipe_that_does_not_fit() -> None:
    large = ["training.batch_size=1024", "model.layers=1", "model.iterations=1"]
    recipe = load_recipe("quickstart", large)
    peak = plan(recipe, RTX).peak_bytes
    device = with_budget(peak // 2)
    result = plan(recipe, device)
    assert (result.status, result.fits) == ("fail", False)
    best = result.suggestions[0]
    assert best.fits and best.peak_bytes <= peak // 2 == result.budget_bytes
    sizes = {key: int(value) for key, value in (pair.split("=") for pair in best.set)}
    assert sizes["training.batch_size"] * sizes["training.accumulation"] == 1024
    changed = plan(load_recipe("quickstart", [*large, *best.set]), device)
    assert changed.fits and changed.peak_bytes == best.peak_bytes


def test_check_fits() -> None:
    recipe = load_recipe("quickstart", ["training.batch_size=1024", "model.layers=1", "model.iterations=1"])
    peak = predict_peak(recipe, device_kind="cpu", precision="fp32").peak_bytes
    fits = check_fits(recipe, device_kind="cpu", precision="fp32", free=(peak, "free here"))
    assert fits.peak_bytes == peak
    with pytest.raises(InputError, match=r"MiB are free here; it would fit .* --set training\.\w+=.*--ignore-memory"):
        check_fits(recipe, device_kind="cpu", precision="fp32", free=(peak - MIB, "free here"))
    with pytest.raises(InputError, match=r"use a smaller model, or train anyway with --ignore-memory"):
        check_fits(recipe, device_kind="cpu", precision="fp32", free=(MIB, "free here"))


class TestBudget:
    def test_context_of_cuda(self) -> None:
        recipe = load_recipe("quickstart")
        result = plan(recipe, RTX)
        assert plan(recipe, with_budget(result.peak_bytes)).fits
        short = plan(recipe, with_budget(result.peak_bytes - 1))
        assert (short.status, short.fits, short.budget_bytes) == ("fail", False, result.peak_bytes - 1)
        assert f"less {format_bytes(CONTEXT)} for CUDA's context" in short.budget_source
        without = plan(recipe, RTX.model_copy(update={"context_bytes": None}))
        assert without.budget_bytes == result.budget_bytes + CONTEXT
        assert "for CUDA's context" not in without.budget_source

    @pytest.mark.parametrize("persona", [LAPTOP, WINDOWS])
    def test_as_device(
        self, persona: dict[str, Any], nvml: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The limit of a larger card's allocator; only the driver is simulated."""
        nvml.answer(persona)
        total, free, caps, reserved = 16 * 2**30, [15 * 2**30], list[float](), 2**20
        card = SimpleNamespace(total_memory=total, uuid=UUID.removeprefix("GPU-"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: card)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", caps.append)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[-1], total))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        assert RTX.usable_memory_bytes is not None
        usable = RTX.usable_memory_bytes.value - CONTEXT
        recipe, options = load_recipe("quickstart"), TrainOptions(tmp_path, as_device=RTX)
        processes = cast(Processes, SimpleNamespace(
            device=torch.device("cuda"), count=1, local_count=1, sharded=False, precision="bf16"
        ))  # fmt: skip
        assert train._plan_memory(recipe, options, processes).budget_bytes == usable and caps.pop() == usable / total
        free.append(2**30)  # other processes use the card
        assert train._plan_memory(recipe, options, processes).budget_bytes == 2**30
        # They may free their memory later, and until then the driver refuses; under Windows it does not.
        assert caps.pop() == ((2**30 + reserved) if persona is WINDOWS else usable) / total

    @pytest.mark.parametrize("persona", [WINDOWS, LAPTOP])
    def test_allocator_is_limited_under_windows(
        self, persona: dict[str, Any], nvml: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Under WDDM no allocation fails: torch's allocator must, or no step is repeated with fewer rows."""
        nvml.answer(persona)
        total, free, reserved, caps = 6 * 2**30, 5 * 2**30, 2**29, list[float]()
        card = SimpleNamespace(total_memory=total, uuid=UUID.removeprefix("GPU-"))
        for name, answer in {
            "get_device_properties": card,
            "get_device_name": LAPTOP["nvmlDeviceGetName"],
            "mem_get_info": (free, total),
            "memory_reserved": reserved,
            "reset_peak_memory_stats": None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", caps.append)
        cuda = torch.device("cuda")
        processes = SimpleNamespace(device=cuda, count=1, local_count=1, sharded=False, precision="bf16")
        use = train._plan_memory(load_recipe("quickstart"), TrainOptions(tmp_path), cast(Processes, processes))
        assert use.budget_bytes == free
        assert caps == ([(free + reserved) / total] if persona is WINDOWS else [])

    def test_host(self) -> None:
        result = plan(load_recipe("quickstart"), load_profile("host"))
        assert result.fits and "now" in result.budget_source

    def test_card_without_memory_facts(self) -> None:
        bare = RTX.model_copy(update={"usable_memory_bytes": None, "memory_bytes": None})
        with pytest.raises(InputError, match="usable_memory_bytes"):
            plan(load_recipe("quickstart"), bare)


@pytest.mark.parametrize(("capability", "expected"), [("7.5", "fp16"), ("8.9", "bf16"), ("12.0", "bf16")])
def test_precision(capability: str, expected: str) -> None:
    fact = Fact[str](value=capability, source="this test", verified=True)
    card = RTX.model_copy(update={"compute_capability": fact})
    assert planned_precision("auto", card) == expected
    assert planned_precision("fp32", card) == "fp32"
    with pytest.raises(InputError, match="fp16 trains on CUDA cards only"):
        planned_precision("fp16", load_profile("host"))


def language_recipe(*overrides: str) -> Recipe:
    switches = ["training.checkpointing=none", "training.chunked_loss=false", "training.batch_size=16"]
    return load_recipe("crt_deep_rtx4050", [*switches, "training.accumulation=1", *overrides])


def simple_peak(recipe: Recipe) -> int:
    """Return a peak that is linear in the rows: 100 MiB + rows × (10, 4 with checkpointing, + 20 without chunks)."""
    training = recipe.training
    row = 10 if training.checkpointing == "none" else 4  # type: ignore[union-attr]
    row += 0 if training.chunked_loss else 20  # type: ignore[union-attr]
    return (100 + training.batch_size * row) * MIB


CHUNKED = "training.chunked_loss=true"


@pytest.mark.parametrize(
    ("overrides", "budget", "changes", "peak"),
    [
        ([], 261, [CHUNKED], 260),
        ([], 145, [CHUNKED, "training.batch_size=4", "training.accumulation=4"], 140),
        (
            [],
            105,
            [CHUNKED, "training.batch_size=1", "training.accumulation=16", "training.checkpointing=loop"],
            104,
        ),
        ([CHUNKED, "training.batch_size=9"], 135, ["training.batch_size=3", "training.accumulation=3"], 130),
    ],
)
def test_cheapest_changes_that_fit(overrides: list[str], budget: int, changes: list[str], peak: int) -> None:
    best = suggest(language_recipe(*overrides), budget * MIB, simple_peak, None)[0]
    assert best.set == tuple(changes) and best.fits and best.peak_bytes == peak * MIB


def test_every_change_is_suggested_alone() -> None:
    suggestions = suggest(language_recipe("training.precision=fp32"), 145 * MIB, simple_peak, "bf16")[1:]
    assert {suggestion.set[0]: suggestion.peak_bytes // MIB for suggestion in suggestions} == {
        CHUNKED: 260,
        "training.batch_size=8": 340,
        "training.checkpointing=loop": 484,
        "training.precision=bf16": 580,
        "data.sequence_length=512": 580,
    }
    suggestions += suggest(language_recipe(), 50 * MIB, simple_peak, None)  # nothing makes it fit
    assert not any(suggestion.fits for suggestion in suggestions)


def test_sizes_that_cannot_fit_are_not_predicted() -> None:
    predicted: list[int] = []

    def peak(recipe: Recipe) -> int:
        predicted.append(recipe.training.batch_size)
        return simple_peak(recipe)

    best = suggest(language_recipe(CHUNKED), 120 * MIB, peak, None)[0]
    assert "training.batch_size=2" in best.set
    assert predicted.count(4) + predicted.count(8) <= 2  # a binary search


def test_larger_batches() -> None:
    small = ["model.layers=1", "model.iterations=1", "training.batch_size=32", "training.accumulation=4"]
    recipe = load_recipe("quickstart", small)
    larger = load_recipe("quickstart", [*small[:2], "training.batch_size=64", "training.accumulation=2"])
    exact = predict_peak(larger, device_kind="cuda", precision="fp32")
    result = plan(recipe, RTX)
    assert result.larger_batches[0].set == ("training.batch_size=64", "training.accumulation=2")
    assert result.larger_batches[0].peak_bytes == exact.peak_bytes
    assert result.larger_batches[0].fits and len(result.larger_batches) == 2
    assert plan(recipe, with_budget(exact.peak_bytes - 1)).larger_batches == ()


def test_data_is_read_once(tiny_recipe: ClassificationRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.tsv"
    rows = [f"{label}\ttext number {number}" for number in range(40) for label in ("negative", "positive")]
    path.write_text("\n".join(["label\ttext", *rows]) + "\n", encoding="utf-8")
    part = (FileSource(kind="file", path=str(path)),)
    data = tiny_recipe.data.model_copy(update={"parts": {"train": part}})
    parts: list[str] = []
    part_rows = sources.part_rows

    def record_part(config: DataConfig, part: str, *arguments: Any) -> Any:
        parts.append(part)
        return part_rows(config, part, *arguments)

    monkeypatch.setattr(sources, "part_rows", record_part)
    result = plan(tiny_recipe.model_copy(update={"data": data}), RTX)
    assert parts == ["train"] and result.time.rows_from == "data"
    assert any("two labels or more" in note for note in result.notes)
