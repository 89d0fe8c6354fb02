"""How often an artifact is called before its times say something, and what they can say: the same rules wherever it is
measured, in a child process here or in somebody's browser."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

PERCENTILE_NEEDS = {90: 64, 95: 130, 99: 662}
"""Samples that a percentile needs for 99 % confidence: MLPerf loadgen's early-stopping estimate."""
NOISY_CV = 0.025
"""Coefficient of variation above which calls are called noisy."""
QUANTILES = 41
"""Points of the sample's distribution that a report can draw: every 2.5 %."""
DRIFT_PARTS, DRIFT_PART_CALLS, DRIFT_FEWEST_CALLS = 10, 25, 20
"""A sample is cut into up to so many parts, of at least so many calls, to see whether it drifts; fewer calls cannot."""


@dataclass(frozen=True)
class MeasureRules:
    """When to stop. The defaults are what every report uses; tests use shorter ones, and a report says which were used.

    Warm-up ends when ``warmup_min_s`` and ``warmup_min_calls`` have passed and the medians of the last
    ``windows`` windows of ``window_calls`` calls lie within ``window_tolerance`` of each other; at
    ``warmup_max_s`` it ends unsettled. Measuring ends when ``min_s`` and ``min_calls`` are both reached, or
    at ``max_s``. Energy is read over ``energy_s`` (0: not at all) once the idle power has settled: the means of the
    last ``windows`` windows of ``idle_s`` lie within ``window_tolerance`` of each other. After ``idle_windows``
    windows without that, energy is unavailable.
    """

    warmup_min_s: float = 0.2
    warmup_min_calls: int = 10
    warmup_max_s: float = 30.0
    window_calls: int = 25
    windows: int = 3
    window_tolerance: float = 0.10
    min_s: float = 3.0
    min_calls: int = 100
    max_s: float = 60.0
    idle_s: float = 1.0
    idle_windows: int = 30
    energy_s: float = 5.0
    repeat_tolerance: float = 0.05

    def repeated(self) -> MeasureRules:
        """For the second process: a third of the time and of the calls, and no energy."""
        return replace(
            self,
            warmup_max_s=self.warmup_max_s / 3,
            min_s=self.min_s / 3,
            min_calls=math.ceil(self.min_calls / 3),
            max_s=self.max_s / 3,
            idle_s=0.0,
            energy_s=0.0,
        )

    @classmethod
    def strict(cls) -> MeasureRules:
        """Rules for a figure to publish: enough calls for a p99, long enough for a laptop to heat up."""
        return cls(warmup_max_s=60.0, min_s=60.0, min_calls=662, max_s=900.0, idle_s=3.0, energy_s=10.0)

    @property
    def longest_s(self) -> float:
        """Upper bound of one shape's loops, without the time by which a last slow call overruns."""
        return self.warmup_max_s + self.max_s + self.idle_s * self.idle_windows + self.energy_s
