"""Time of training on a CUDA card, from the kernels of a step and the card's stated rates."""

from __future__ import annotations

from typing import Any

import pytest

from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.models import load_recipe
from edgeformer.report.tables import larger_batch_text, time_text
from edgeformer.training import gpu_time
from edgeformer.training.gpu_time import count_kernels
from edgeformer.training.plan import plan

RTX = load_profile("rtx4050")
TINY = load_recipe(
    "quickstart", ["model.layers=1", "model.iterations=2", "training.batch_size=4", "training.precision=fp32"]
)


def changed(**facts: Any) -> DeviceProfile:
    """The RTX 4050 with other values of some facts; None: it does not state them."""
    made = {}
    for name, value in facts.items():
        fact = getattr(RTX, name)
        made[name] = None if value is None else fact.model_copy(update={"value": value})
    return RTX.model_copy(update=made)


def seconds(device: DeviceProfile, recipe: Any = TINY) -> gpu_time.GpuTime:
    return gpu_time.gpu_time(recipe, device, "fp32", tokens=16, rows=400)


def test_operations_are_those_of_the_equations() -> None:
    kernels, parameters = count_kernels(TINY, 16, "fp32")
    tokens, rows, d, f = 16, 4, TINY.model.hidden_size, TINY.model.ffn_size
    products = 2 * tokens * (4 * d * d + 3 * d * f)
    last = 2 * tokens * 3 * d * d + 2 * (d * d + 3 * d * f)  # only the first token's output is read
    scores = 2 * 2 * tokens * tokens * d + 2 * 2 * tokens * d
    expected = rows * (3 * (products + last + 2 * d * 2) + 3.5 * scores)
    assert sum(kernel.operations * count for kernel, count in kernels.items()) == expected
    assert sum(kernel.operations for kernel in kernels if kernel.attention) > 0
    assert parameters > 0


def test_a_card_with_half_of_every_rate_takes_twice_as_long() -> None:
    assert RTX.bandwidth_bytes_per_s is not None and RTX.peaks.fp32 is not None
    fast = changed(launch_overhead_us=None)
    halved = RTX.peaks.model_copy(
        update={"fp32": RTX.peaks.fp32.model_copy(update={"value": RTX.peaks.fp32.value / 2})}
    )
    slow = changed(launch_overhead_us=None, bandwidth_bytes_per_s=RTX.bandwidth_bytes_per_s.value / 2)
    first, second = seconds(fast), seconds(slow.model_copy(update={"peaks": halved}))
    assert second.low_s == pytest.approx(2 * first.low_s) and second.high_s == pytest.approx(2 * first.high_s)


def test_the_ends_are_those_of_the_power_limits() -> None:
    with_limits = seconds(changed(launch_overhead_us=None))
    without = seconds(changed(launch_overhead_us=None, clocks_hz=None))
    assert with_limits.low_reason.startswith("115 W, boost 2370 MHz: products")
    assert with_limits.high_reason.startswith("35 W, boost 1605 MHz: products")
    assert without.low_reason.startswith("products") and without.high_reason.startswith("products")
    assert with_limits.low_s <= without.low_s < without.high_s < with_limits.high_s


def test_small_kernels_take_as_long_as_their_launches() -> None:
    kernels, _ = count_kernels(TINY, 16, "fp32")
    found = seconds(changed(launch_overhead_us=1000.0))
    assert found.low_s == pytest.approx(kernels.total() * 1e-3 * 100)  # 400 rows, 4 at a time
    assert "kernels takes longer than computing them" in found.low_reason


def test_a_missing_fact_is_named() -> None:
    with pytest.raises(EdgeformerError, match="'rtx4050' does not say bandwidth_bytes_per_s"):
        seconds(changed(bandwidth_bytes_per_s=None))


def test_the_recipe_for_six_gigabytes() -> None:
    """A regression bound: the shares in FAST and SLOW were chosen knowing 25 to 46 minutes an epoch (115 to 35 W)."""
    found = plan(load_recipe("crt_deep_rtx4050"), RTX)
    time, epochs = found.time, 10
    assert time.low_s is not None and time.high_s is not None and time.share_of_peak is not None
    assert (time.rows, time.rows_from, time.steps) == (70_590, "recipe", 4_420)
    assert 22 < time.low_s / epochs / 60 < 28 and 41 < time.high_s / epochs / 60 < 51
    assert 0.21 < time.share_of_peak[0] < time.share_of_peak[1] < 0.49
    text = time_text(time)
    assert "min an epoch): 10 epochs" in text or "s an epoch): 10 epochs" in text
    assert "low end: 115 W" in text and "high end: 35 W" in text and "never checked on a GPU" in text
    (double, fourfold) = found.larger_batches
    assert double.set == ("training.batch_size=4", "training.accumulation=4")
    assert found.peak_bytes < double.peak_bytes < fourfold.peak_bytes <= found.budget_bytes
    assert "--set training.batch_size=8 --set training.accumulation=2 would use at most" in larger_batch_text(found)
