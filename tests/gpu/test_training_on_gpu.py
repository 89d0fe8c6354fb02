"""Training on a card: number formats, a scaler that skips and recovers, a card cut down, memory that runs out."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs

from edgeformer.artifacts.device import Fact
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.recipe import Recipe
from edgeformer.models import load_recipe
from edgeformer.run import read_run
from edgeformer.training.loop import distributed
from edgeformer.training.train import TrainOptions, train
from tests.conftest import SMALL_LANGUAGE
from tests.training.runs import Messages, records

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDE = ("model.hidden_size=128", "model.ffn_size=512")
_REVIEWS = "kind: synthetic-reviews"
LARGE = (
    f"data.parts={{train: [{{{_REVIEWS}, rows: 2000, seed: 1}}], validation: [{{{_REVIEWS}, rows: 60, seed: 2}}]}}",
    "data.sequence_length=128", "model.hidden_size=512", "model.ffn_size=2048", "training.batch_size=256",
)  # fmt: skip
"""A tensor of its states has 64 MiB, and of these there are dozens."""


def language(*overrides: str) -> Recipe:
    """The small language model, a line of its log for every step."""
    return load_recipe("crt_mini", [*SMALL_LANGUAGE, "training.log_every=1", "model.dropout=0.0", *overrides])


def losses(run: Path) -> list[float]:
    """Of every step that was not skipped."""
    return [record["loss"] for record in records(run, "step") if not record.get("skipped")]


def trained(recipe: Recipe, folder: Path, name: str, **options: Any) -> Path:
    return train(recipe, TrainOptions(folder, name=name, accelerator="cuda", max_steps=12, **options))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_formats_learn_what_fp32_learns(precision: str, tmp_path: Path) -> None:
    if precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bf16 products need compute capability 8.0")
    exact = losses(trained(language("training.precision=fp32"), tmp_path, "exact"))
    run = trained(language(f"training.precision={precision}"), tmp_path, precision)
    assert read_run(run).precision == precision
    actual = losses(run)
    # Skipped steps of fp16 come first, while its scaling factor falls; the steps behind them see later rows.
    tolerance = 0.02 if precision == "bf16" else 0.2
    assert actual[0] == pytest.approx(exact[0], rel=0.02) and actual[-1] == pytest.approx(exact[-1], rel=tolerance)


def test_a_scaler_that_is_too_loud_skips_steps_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loud(**options: Any) -> Accelerator:
        options["kwargs_handlers"] = [*options["kwargs_handlers"], GradScalerKwargs(init_scale=2.0**30)]
        return Accelerator(**options)

    monkeypatch.setattr(distributed, "Accelerator", loud)
    messages = Messages()
    options = TrainOptions(tmp_path, name="loud", accelerator="cuda", max_steps=40)
    run = train(language("training.precision=fp16", "training.epochs=40"), options, messages)
    manifest = read_run(run)
    assert manifest.status == "finished" and 1 <= manifest.skipped_steps < 32
    assert any("skipped: its gradient overflows in fp16" in line for line in messages.lines)
    assert math.isfinite(losses(run)[-1]) and losses(run)[-1] < losses(run)[0]


def cut_down(usable_bytes: int) -> Any:
    """A device that leaves so little to a process, CUDA's context not counted."""
    device = load_profile("rtx4050")
    context = device.context_bytes.value if device.context_bytes is not None else 0
    usable = Fact(value=usable_bytes + context, source="this test", verified="no")
    return device.model_copy(update={"usable_memory_bytes": usable})


def test_what_will_not_fit_a_smaller_card_is_refused_before_it_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rtx4050"):
        trained(language(*LARGE), tmp_path, "refused", as_device=cut_down(256 * MIB))
    assert not (tmp_path / "refused").exists()


def test_the_card_is_cut_down_to_the_device_and_a_step_is_computed_in_pieces(tmp_path: Path) -> None:
    recipe = language(*LARGE)
    messages = Messages()
    device = cut_down(768 * MIB)
    options = TrainOptions(tmp_path, name="cut", accelerator="cuda", max_steps=2, as_device=device, ignore_memory=True)
    cut = read_run(train(recipe, options, messages))
    assert any("out of memory at step 1" in line for line in messages.lines)
    assert cut.batch_size is not None and cut.batch_size < 256 and cut.effective_batch == 256
    assert cut.memory is not None and cut.memory.measured_peak_bytes is not None
    assert cut.memory.measured_peak_bytes <= 768 * MIB
    torch.cuda.set_per_process_memory_fraction(1.0)
    full = train(recipe, TrainOptions(tmp_path, name="whole", accelerator="cuda", max_steps=2, ignore_memory=True))
    assert losses(tmp_path / "cut") == pytest.approx(losses(full), rel=1e-3)  # the same rows, the same gradient


def test_predicted_memory_is_near_the_measured_peak(tmp_path: Path) -> None:
    recipe = language(*LARGE, "training.batch_size=32")
    memory = read_run(trained(recipe, tmp_path, "memory")).memory
    assert memory is not None and memory.predicted_peak_bytes is not None and memory.measured_peak_bytes is not None
    assert memory.device == "cuda" and "CUDA allocator" in str(memory.measured_as)
    assert 0.8 <= memory.predicted_peak_bytes / memory.measured_peak_bytes <= 2.0


def learned(folder: Path, *overrides: str) -> list[float]:
    return losses(trained(language(*overrides), folder, f"run-{len([*folder.iterdir()])}"))


@pytest.mark.parametrize(
    ("common", "change", "tolerance"),
    [
        (WIDE, "training.tf32=true", 5e-3), ((), "training.pinned_memory=false", 1e-5),
        ((), "training.optimizer.kernels=foreach", 1e-4), ((), "training.optimizer.kernels=loop", 1e-4),
    ],
)  # fmt: skip
def test_other_ways_to_compute_learn_the_same(common, change, tolerance, tmp_path):
    if common and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 needs compute capability 8.0")
    exact, actual = learned(tmp_path, *common), learned(tmp_path, *common, change)
    assert actual == pytest.approx(exact, rel=tolerance) and (exact != actual or common != WIDE)
    assert torch.get_float32_matmul_precision() == "highest"  # in scores


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("checkpointing", ["none", "loop"])
def test_compiled_steps_learn_what_eager_ones_learn(checkpointing: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pieces = ("training.batch_size=4", "training.accumulation=2", f"training.checkpointing={checkpointing}")
    exact = learned(tmp_path, *pieces)
    assert learned(tmp_path, *pieces, "training.compile={shapes: 1}") == pytest.approx(exact, rel=2e-3)
