"""Times of calls on a card: on the card alone, between two CUDA events, and as the caller waits for them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from edgeformer.artifacts.report import MeasureRules
from edgeformer.measurement.trackers import measure, summarise

TINY = MeasureRules(
    warmup_min_s=0.0, warmup_min_calls=1, warmup_max_s=0.05, window_calls=1, min_s=0.0, min_calls=3, max_s=0.2,
    idle_s=0.01, energy_s=0.02,
)  # fmt: skip
SHORT = MeasureRules(warmup_max_s=3.0, min_s=0.5, max_s=5.0)
"""Of a row that has minutes for dozens of cases; energy takes as long as anywhere."""


def rules_of(tiny: bool) -> MeasureRules:
    """When to stop measuring."""
    return TINY if tiny else SHORT


def times(call: Callable[[], object], device: str, rules: MeasureRules) -> dict[str, Any]:
    """Return what one call takes, which puts its work into the current stream.

    ``p50_ms`` is until the caller could go on, the card having finished, ``device_p50_ms`` on the card alone (None on a
    CPU); the other figures say how well the sample can be trusted.
    """
    import torch

    def waited(_: int) -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    sample = measure(waited, rules)
    summary = summarise(sample.samples_ms, sample.stable, sample.warnings, sample.reason)
    alone = on_device_ms(call, min(len(sample.samples_ms), 50)) if device == "cuda" else None
    return {
        "p50_ms": summary.p50, "device_p50_ms": alone, "cv": summary.cv, "n": summary.n, "stable": summary.stable,
        "warnings": list(summary.warnings),
    }  # fmt: skip


def on_device_ms(call: Callable[[], object], calls: int) -> float:
    """Median milliseconds between two events around a call, with the next call already in the stream.

    The launches of a small model take longer than its kernels; then this is the time of the launches, as it is for
    anyone who does not use CUDA graphs.
    """
    import torch

    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for first, second in pairs:
        first.record()
        call()
        second.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(second) for first, second in pairs)
