"""plan: fits or not, against which budget, and what to change."""

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
from edgeformer.training.memory import predict_peak, predict_peaks
from edgeformer.training.plan import count_offline, plan, planned_precision, suggest
from edgeformer.training.train import TrainOptions
from tests.fakes.nvml import LAPTOP, UUID, WINDOWS, Driver

MIB = 2**20
RTX = load_profile("rtx4050")
assert RTX.context_bytes is not None
CONTEXT = RTX.context_bytes.value


def with_budget(size_bytes: int) -> DeviceProfile:
    """A card that leaves so much to the tensors of a process."""
    fact = Fact[int](value=size_bytes + CONTEXT, source="this test", verified=True)
    return RTX.model_copy(update={"usable_memory_bytes": fact})


def test_the_light_model_fits() -> None:
    recipe = load_recipe("recurrent_sst2")
    found = plan(recipe, RTX)
    assert found.parameters == count_offline(recipe) == 10_972_162
    assert found.breakdown.weights == pytest.approx(4 * 10_972_162, rel=0.01)  # and the rotary table
    assert found.budget_bytes == parse_bytes("5.4 GiB") - CONTEXT
    assert (found.status, found.fits, found.precision, found.suggestions) == ("pass", True, "fp32", ())
    assert found.peak_bytes == sum(found.breakdown.model_dump().values()) < found.budget_bytes


def test_what_does_not_fit_comes_with_changes_that_do() -> None:
    large = ["training.batch_size=1024", "model.layers=1", "model.iterations=1"]
    recipe = load_recipe("quickstart", large)
    budget = plan(recipe, RTX).peak_bytes // 2
    device = with_budget(budget)
    found = plan(recipe, device)
    assert (found.status, found.fits) == ("fail", False)
    best = found.suggestions[0]
    assert best.fits and best.peak_bytes <= budget == found.budget_bytes
    sizes = {key: int(value) for key, value in (pair.split("=") for pair in best.set)}
    assert sizes["training.batch_size"] * sizes["training.accumulation"] == 1024
    again = plan(load_recipe("quickstart", [*large, *best.set]), device)
    assert again.fits and again.peak_bytes == best.peak_bytes


def test_the_context_of_cuda_is_taken_before_the_first_tensor() -> None:
    recipe = load_recipe("quickstart")
    peak = plan(recipe, RTX).peak_bytes
    assert plan(recipe, with_budget(peak)).fits
    short = plan(recipe, with_budget(peak - 1))
    assert (short.status, short.fits, short.budget_bytes) == ("fail", False, peak - 1)
    assert f"less {format_bytes(CONTEXT)} for CUDA's context" in short.budget_source
    without = RTX.model_copy(update={"context_bytes": None})
    assert plan(recipe, without).budget_bytes == plan(recipe, RTX).budget_bytes + CONTEXT
    assert "for CUDA's context" not in plan(recipe, without).budget_source


def test_as_device_leaves_the_context_out_too(nvml: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a larger card would be capped to; its driver is the only part that is not here."""
    nvml.answer(LAPTOP)
    total, capped = 16 * 2**30, list[float]()
    card = SimpleNamespace(total_memory=total, uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", capped.append)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**20)
    assert RTX.usable_memory_bytes is not None
    usable = RTX.usable_memory_bytes.value
    free, what = train._cap(RTX, "cuda", 15 * 2**30)
    assert free == usable - CONTEXT and capped == [(usable - CONTEXT) / total]
    assert what == f"what rtx4050 leaves to a process, less {format_bytes(CONTEXT)} for CUDA's context"
    assert train._cap(RTX, "cuda", 2**30)[0] == 2**30  # others are on the card already
    assert capped.pop() == (usable - CONTEXT) / total, "they may leave it again, and until then the driver says no"
    nvml.answer(WINDOWS)
    assert train._cap(RTX, "cuda", 2**30)[0] == 2**30
    assert capped.pop() == (2**30 + 2**20) / total, "nobody would say no"


@pytest.mark.parametrize("persona", [WINDOWS, LAPTOP])
def test_the_allocator_is_capped_where_the_driver_would_take_the_systems_memory(
    persona: dict[str, Any], nvml: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Windows' WDDM lets no allocation fail; torch's own allocator must, or no step is ever repeated in pieces."""
    nvml.answer(persona)
    total, free, reserved, capped = 6 * 2**30, 5 * 2**30, 2**29, list[float]()
    card = SimpleNamespace(total_memory=total, uuid=UUID.removeprefix("GPU-"))
    for name, answer in {
        "get_device_properties": card,
        "get_device_name": LAPTOP["nvmlDeviceGetName"],
        "mem_get_info": (free, total),
        "memory_reserved": reserved,
        "reset_peak_memory_stats": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", capped.append)
    processes = SimpleNamespace(device=torch.device("cuda"), count=1, here=1, sharded=False, precision="bf16")
    use = train._memory(load_recipe("quickstart"), TrainOptions(tmp_path), cast(Processes, processes))
    assert use.budget_bytes == free
    assert capped == ([(free + reserved) / total] if persona is WINDOWS else [])


def test_the_host_is_asked_for_its_memory() -> None:
    found = plan(load_recipe("quickstart"), load_profile("host"))
    assert found.fits and "now" in found.budget_source


def test_a_card_without_memory_facts_is_refused() -> None:
    bare = RTX.model_copy(update={"usable_memory_bytes": None, "memory_bytes": None})
    with pytest.raises(InputError, match="usable_memory_bytes"):
        plan(load_recipe("quickstart"), bare)


@pytest.mark.parametrize(("capability", "expected"), [("7.5", "fp16"), ("8.9", "bf16"), ("12.0", "bf16")])
def test_auto_precision_on_a_card(capability: str, expected: str) -> None:
    fact = Fact[str](value=capability, source="this test", verified=True)
    card = RTX.model_copy(update={"compute_capability": fact})
    assert planned_precision("auto", card) == expected
    assert planned_precision("fp32", card) == "fp32"


def test_fp16_on_the_host_is_refused_as_in_training() -> None:
    with pytest.raises(InputError, match="fp16 trains on CUDA cards only"):
        plan(load_recipe("quickstart", ["training.precision=fp16"]), load_profile("host"))


def language(*overrides: str) -> Recipe:
    switches = ["training.checkpointing=none", "training.chunked_loss=false", "training.batch_size=16"]
    return load_recipe("crt_deep_rtx4050", [*switches, "training.accumulation=1", *overrides])


def peak_in_mib(recipe: Recipe) -> int:
    """A stand-in for the predictor whose answers can be worked out by hand: 100 + rows × (cost of a row)."""
    training = recipe.training
    row = 10 if training.checkpointing == "none" else 4  # type: ignore[union-attr]
    row += 0 if training.chunked_loss else 20  # type: ignore[union-attr]
    return (100 + training.batch_size * row) * MIB


def test_cheaper_changes_come_first_and_only_as_many_as_needed() -> None:
    nothing_else = suggest(language(), 261 * MIB, peak_in_mib, None)[0]
    assert nothing_else.set == ("training.chunked_loss=true",)
    assert nothing_else.fits and nothing_else.peak_bytes == 260 * MIB
    smaller = suggest(language(), 145 * MIB, peak_in_mib, None)[0]
    assert smaller.set == ("training.chunked_loss=true", "training.batch_size=4", "training.accumulation=4")
    recomputed = suggest(language(), 105 * MIB, peak_in_mib, None)[0]
    assert recomputed.set == (
        "training.chunked_loss=true",
        "training.batch_size=1",
        "training.accumulation=16",
        "training.checkpointing=loop",
    )
    assert recomputed.peak_bytes == 104 * MIB


def test_every_change_is_also_reported_by_itself() -> None:
    found = suggest(language("training.precision=fp32"), 145 * MIB, peak_in_mib, "bf16")
    assert [suggestion.set[0] for suggestion in found[1:]] == [
        "training.chunked_loss=true",
        "training.batch_size=8",
        "training.checkpointing=loop",
        "training.precision=bf16",
        "data.sequence_length=512",
    ]
    assert [suggestion.peak_bytes // MIB for suggestion in found[1:]] == [260, 340, 484, 580, 580]
    assert not any(suggestion.fits for suggestion in found[1:])


def test_nothing_helps() -> None:
    found = suggest(language(), 50 * MIB, peak_in_mib, None)
    assert found and not any(suggestion.fits for suggestion in found)


def test_hopeless_micro_batches_are_not_predicted() -> None:
    asked: list[int] = []

    def peak(recipe: Recipe) -> int:
        asked.append(recipe.training.batch_size)
        return peak_in_mib(recipe)

    best = suggest(language("training.chunked_loss=true"), 120 * MIB, peak, None)[0]
    assert "training.batch_size=2" in best.set
    assert 4 not in asked  # 16 and 8 rows say that 4 take 140 MiB at least


def test_rows_that_do_not_halve_evenly_keep_the_effective_batch() -> None:
    best = suggest(language("training.chunked_loss=true", "training.batch_size=9"), 135 * MIB, peak_in_mib, None)[0]
    assert best.set == ("training.batch_size=3", "training.accumulation=3")


def test_peaks_of_larger_batches_are_upper_bounds() -> None:
    small = ["model.layers=1", "model.iterations=1", "training.batch_size=32", "training.accumulation=4"]
    recipe = load_recipe("quickstart", small)
    once, double = predict_peaks(recipe, (1, 2), device_kind="cuda", precision="fp32")
    assert once == predict_peak(recipe, device_kind="cuda", precision="fp32")
    larger = load_recipe("quickstart", [*small[:2], "training.batch_size=64", "training.accumulation=2"])
    exact = predict_peak(larger, device_kind="cuda", precision="fp32")
    assert exact.peak_bytes <= double.peak_bytes < 1.1 * exact.peak_bytes
    found = plan(recipe, RTX)
    assert found.larger_batches[0].set == ("training.batch_size=64", "training.accumulation=2")
    assert found.larger_batches[0].fits and len(found.larger_batches) == 2
    assert plan(recipe, with_budget(exact.peak_bytes - 1)).larger_batches == ()


def test_data_that_is_here_is_read_once(
    small_recipe: ClassificationRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes minutes where there is much of it; what it finds is in the notes all the same."""
    path = tmp_path / "train.tsv"
    rows = [f"{label}\ttext number {number}" for number in range(40) for label in ("negative", "positive")]
    path.write_text("\n".join(["label\ttext", *rows]) + "\n", encoding="utf-8")
    part = (FileSource(kind="file", path=str(path)),)
    data = small_recipe.data.model_copy(update={"parts": {"train": part}})
    read: list[str] = []
    real = sources.part_rows

    def counted(config: DataConfig, part: str, *others: Any) -> Any:
        read.append(part)
        return real(config, part, *others)

    monkeypatch.setattr(sources, "part_rows", counted)
    found = plan(small_recipe.model_copy(update={"data": data}), RTX)
    assert read == ["train"] and found.time.rows_from == "data"
    assert any("two labels or more" in note for note in found.notes)
