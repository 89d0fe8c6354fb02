"""Command plan: whether a recipe fits, the budget of a device, and suggested changes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgeformer.artifacts.device import DeviceProfile, Fact
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.artifacts.units import format_bytes, parse_bytes
from edgeformer.models import load_recipe
from edgeformer.training import train
from edgeformer.training.plan import plan as plan_module
from edgeformer.training.plan.memory import predict_peak
from edgeformer.training.plan.plan import count_offline, plan, planned_precision, suggest
from edgeformer.training.train import TrainOptions
from tests.fakes.nvml import LAPTOP, UUID, WINDOWS, Driver

MIB = 2**20
RTX = load_profile("rtx4050")
assert RTX.context_bytes is not None
CONTEXT = RTX.context_bytes.value


def with_budget(size_bytes: int) -> DeviceProfile:
    """Return a card with this budget for the tensors of a process."""
    fact = Fact[int](value=size_bytes + CONTEXT, source="this test", verified="measured here")
    return RTX.model_copy(update={"usable_memory_bytes": fact})


SMALL = ["data.parts.train.0.rows=60", "model.layers=1", "model.iterations=1"]
SMALL_RECIPE = load_recipe("quickstart", [*SMALL, "training.batch_size=4"])


def test_recipe_that_fits_and_larger_batches() -> None:
    recipe = load_recipe("recurrent_sst2")
    result = plan(recipe, RTX)
    assert result.parameters == count_offline(recipe) == 10_972_162
    assert result.breakdown.weights == pytest.approx(4 * 10_972_162, rel=0.01)  # and the rotary table
    assert result.budget_bytes == parse_bytes("5.4 GiB") - CONTEXT
    assert (result.status, result.fits, result.precision, result.suggestions) == ("pass", True, "fp32", ())
    assert result.peak_bytes == sum(result.breakdown.model_dump().values()) < result.budget_bytes
    recipe = load_recipe("quickstart", [*SMALL, "training.batch_size=32", "training.accumulation=4"])
    larger, _ = batches = plan(recipe, RTX).larger_batches
    assert larger.set == ("training.batch_size=64", "training.accumulation=2") and all(each.fits for each in batches)
    assert larger.peak_bytes == plan(load_recipe("quickstart", [*SMALL, *larger.set]), RTX).peak_bytes
    assert plan(recipe, with_budget(larger.peak_bytes - 1)).larger_batches == ()


def test_recipe_that_does_not_fit() -> None:
    recipe = load_recipe("quickstart", [*SMALL, "training.batch_size=1024"])
    peak = plan(recipe, RTX).peak_bytes
    device = with_budget(peak // 2)
    result = plan(recipe, device)
    assert (result.status, result.fits) == ("fail", False)
    best = result.suggestions[0]
    assert best.fits and best.peak_bytes <= peak // 2 == result.budget_bytes
    sizes = {key: int(value) for key, value in (pair.split("=") for pair in best.set)}
    assert sizes["training.batch_size"] * sizes["training.accumulation"] == 1024
    changed = plan(load_recipe("quickstart", [*SMALL, "training.batch_size=1024", *best.set]), device)
    assert changed.fits and changed.peak_bytes == best.peak_bytes


def test_training_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [*SMALL, "training.batch_size=1024"])
    peak = predict_peak(recipe, device_kind="cpu", precision="fp32").peak_bytes
    host: Any = SimpleNamespace(device=torch.device("cpu"), count=1, local_count=1, sharded=False, precision="fp32")
    monkeypatch.setattr(train, "check_data_fits", lambda *_: None)
    monkeypatch.setattr(train, "host_free_bytes", lambda: (peak, "free here"))
    assert train._plan_memory(recipe, TrainOptions(tmp_path), host).predicted_peak_bytes == peak
    monkeypatch.setattr(train, "host_free_bytes", lambda: (peak - 1, "free here"))
    assert train._plan_memory(recipe, TrainOptions(tmp_path, ignore_memory=True), host).budget_bytes == peak - 1
    with pytest.raises(InputError, match=r"MiB are free here; it fits .* --set training\.\w+=.*--ignore-memory"):
        train._plan_memory(recipe, TrainOptions(tmp_path), host)
    monkeypatch.setattr(train, "host_free_bytes", lambda: (1, "free here"))
    with pytest.raises(InputError, match="use a smaller model, or train anyway"):
        train._plan_memory(recipe, TrainOptions(tmp_path), host)


class TestBudget:
    def test_context_of_cuda(self) -> None:
        result = plan(SMALL_RECIPE, RTX)
        assert plan(SMALL_RECIPE, with_budget(result.peak_bytes)).fits
        short = plan(SMALL_RECIPE, with_budget(result.peak_bytes - 1))
        assert (short.status, short.fits, short.budget_bytes) == ("fail", False, result.peak_bytes - 1)
        assert f"less {format_bytes(CONTEXT)} for CUDA's context" in short.budget_source
        without = plan(SMALL_RECIPE, RTX.model_copy(update={"context_bytes": None}))
        assert without.budget_bytes == result.budget_bytes + CONTEXT
        assert "for CUDA's context" not in without.budget_source
        with pytest.raises(InputError, match="usable_memory_bytes"):
            plan(SMALL_RECIPE, RTX.model_copy(update={"usable_memory_bytes": None, "memory_bytes": None}))

    @pytest.mark.parametrize("persona", [LAPTOP, WINDOWS])
    def test_limits_of_the_allocator(
        self, persona: dict[str, Any], nvml: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A larger card is limited to a profile. Windows fails no allocation unless torch's allocator is limited."""
        nvml.answer(persona)  # only the driver is simulated
        total, free, caps, reserved = 16 * 2**30, [15 * 2**30], list[float](), 2**20
        for name, answer in {
            "get_device_properties": lambda: SimpleNamespace(total_memory=total, uuid=UUID.removeprefix("GPU-")),
            "get_device_name": lambda: "a card",
            "memory_reserved": lambda: reserved,
            "mem_get_info": lambda: (free[-1], total),
            "reset_peak_memory_stats": lambda: None,
            "set_per_process_memory_fraction": caps.append,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        assert RTX.usable_memory_bytes is not None
        usable, is_windows = RTX.usable_memory_bytes.value - CONTEXT, persona is WINDOWS
        options: dict[str, Any] = {"count": 1, "local_count": 1, "sharded": False, "precision": "bf16"}
        card: Any = SimpleNamespace(device=torch.device("cuda"), **options)

        def budget(device: DeviceProfile | None) -> int | None:
            return train._plan_memory(SMALL_RECIPE, TrainOptions(tmp_path, as_device=device), card).budget_bytes

        assert budget(RTX) == usable and caps.pop() == usable / total
        free.append(2**30)  # other processes use the card; they may free their memory later
        assert budget(RTX) == 2**30 and caps.pop() == ((2**30 + reserved) if is_windows else usable) / total
        assert budget(None) == 2**30 and caps == ([(2**30 + reserved) / total] if is_windows else [])


def test_precision() -> None:
    for capability, expected in (("7.5", "fp16"), ("8.9", "bf16"), ("12.0", "bf16")):
        fact = Fact[str](value=capability, source="this test", verified="measured here")
        assert planned_precision("auto", RTX.model_copy(update={"compute_capability": fact})) == expected
    with pytest.raises(InputError, match="fp16 needs a CUDA card"):
        planned_precision("fp16", load_profile("host"))


def language_recipe(*overrides: str) -> Recipe:
    switches = ["training.checkpointing=none", "training.chunked_loss=false", "training.batch_size=16"]
    return load_recipe("crt_deep_rtx4050", [*switches, "training.accumulation=1", *overrides])


def simple_peak(recipe: Any, **_: Any) -> Any:
    """Return a peak that is linear in the rows: 100 MiB + rows × (10, 4 with checkpointing, + 20 without chunks)."""
    training = recipe.training
    row = (10 if training.checkpointing == "none" else 4) + (0 if training.chunked_loss else 20)
    return SimpleNamespace(peak_bytes=(100 + training.batch_size * row) * MIB)


def suggested(recipe: Recipe, budget_mib: int, monkeypatch: pytest.MonkeyPatch, fast: str = "fp32") -> Any:
    """Return the suggestions for a device on which ``fast`` is the fast format, with simple peaks."""
    monkeypatch.setattr(plan_module, "predict_peak", simple_peak)
    return suggest(recipe, budget_mib * MIB, device_kind="cuda", precision="fp32", fast_precision=fast)


CHUNKED = "training.chunked_loss=true"


@pytest.mark.parametrize(
    ("overrides", "budget", "changes", "peak"),
    [
        ([], 261, [CHUNKED], 260),
        ([], 105, [CHUNKED, "training.batch_size=1", "training.accumulation=16", "training.checkpointing=loop"], 104),
        ([CHUNKED, "training.batch_size=9"], 135, ["training.batch_size=3", "training.accumulation=3"], 130),
    ],
)
def test_cheapest_changes_that_fit(
    overrides: list[str], budget: int, changes: list[str], peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = suggested(language_recipe(*overrides), budget, monkeypatch)[0]
    assert best.set == tuple(changes) and best.fits and best.peak_bytes == peak * MIB


def test_every_change_is_suggested_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    suggestions = suggested(language_recipe("training.precision=fp32"), 145, monkeypatch, "bf16")[1:]
    assert {suggestion.set[0]: suggestion.peak_bytes // MIB for suggestion in suggestions} == {
        CHUNKED: 260,
        "training.batch_size=8": 340,
        "training.checkpointing=loop": 484,
        "training.precision=bf16": 580,
        "data.sequence_length=512": 580,
    }
    suggestions += suggested(language_recipe(), 50, monkeypatch)  # nothing makes it fit
    assert not any(suggestion.fits for suggestion in suggestions)
