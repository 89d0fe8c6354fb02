"""Rules of the measuring loop, and what a sample of calls supports."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from edgeformer.artifacts.report import MeasureRules
from edgeformer.measurement.trackers import drifted, measure, summarise, windows_agree

RULES, STRICT = MeasureRules(), MeasureRules.strict()


class FakeArtifact:
    """Advances a clock by what each call 'takes'; ``cost_ms`` maps the call's number to milliseconds."""

    def __init__(self, cost_ms: Callable[[int], float]) -> None:
        self.cost_ms = cost_ms
        self.now_ns = self.start_ns = 10**12  # a clock's zero means nothing
        self.indices: list[int] = []

    def __call__(self, index: int) -> None:
        self.indices.append(index)
        self.now_ns += int(self.cost_ms(index) * 1e6)

    def clock(self) -> int:
        return self.now_ns


@dataclass(frozen=True)
class Loop:
    """Milliseconds per call, and what the loop makes of them; ``warning``: how the only one starts."""

    cost_ms: float | Callable[[int], float]
    warmup_calls: int
    calls: int
    stable: bool = True
    warning: str | None = None
    reason: str | None = None
    rules: MeasureRules = RULES


DRIFT = "drifted: median 10 ms at first, 1"
LOOPS = {
    "three windows and then three seconds": Loop(10.0, 75, 300),
    "fast: at least 200 ms": Loop(0.1, 2000, 30_000),
    "slow: at least 100 calls": Loop(100.0, 75, 100),
    # Windows of 25: calls 50–74 still hold ten slow ones, but their median is already that of the fast calls.
    "until the windows agree": Loop(lambda index: 20.0 if index < 60 else 10.0, 125, 300),
    "never settles": Loop(
        lambda index: 10.0 + 5.0 * ((index // 25) % 2), 2400, 240, False,
        "did not settle: after 30.0 s of warm-up (2400 calls)",
    ),
    "three windows are enough to disagree": Loop(
        lambda index: (300.0, 500.0, 400.0, 400.0)[min(3, index // 25)], 75, 100, False,
        "did not settle: after 30.0 s of warm-up (75 calls), the medians of the last 3 windows of 25 calls",
    ),
    "too slow": Loop(
        2000.0, 15, 30, False, "warm-up was too short to judge: only 15 calls in 30.0 s",
        "only 30 of 100 calls in the time limit of 60 s",
    ),
    "slower than the ceiling": Loop(
        90_000.0, 1, 1, False, "warm-up was too short to judge: only 1 ",
        "only 1 of 100 calls in the time limit of 90 s",
    ),
    "throttles": Loop(lambda index: 10.0 if index < 200 else 13.0, 75, 260, False, f"{DRIFT}3 ms at the end"),
    # Both halves have the same median; a part in the middle has not.
    "other work comes and goes": Loop(
        lambda index: 12.0 if 205 <= index < 245 else 10.0, 75, 292, False,
        f"{DRIFT}0 ms at the end, 10 to 12 ms over 10 parts",
    ),
    "single slow calls are no drift": Loop(lambda index: 50.0 if index % 30 == 0 else 10.0, 75, 265),
    "strict: a minute": Loop(5.0, 75, 12_000, rules=STRICT),
    "strict: calls for a p99": Loop(200.0, 75, 662, rules=STRICT),
    "strict: the ceiling": Loop(
        5000.0, 12, 180, False, "warm-up was too short to judge: only 12 calls in 60.0 s",
        "only 180 of 662 calls in the time limit of 900 s", STRICT,
    ),
    "the fewest warm-up calls": Loop(
        1.0, 10, 3000, rules=MeasureRules(warmup_min_s=0.0, warmup_min_calls=10, window_calls=5, windows=2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_loop_stops_by_the_rules(loop: Loop) -> None:
    cost = loop.cost_ms
    artifact = FakeArtifact(cost if callable(cost) else lambda _: cost)
    sample = measure(artifact, loop.rules, artifact.clock)
    assert (sample.warmup_calls, sample.stable, sample.reason) == (loop.warmup_calls, loop.stable, loop.reason)
    assert len(sample.samples_ms) == pytest.approx(loop.calls, abs=2)
    assert sum(sample.samples_ms) / 1000 + sample.warmup_s == pytest.approx((artifact.now_ns - artifact.start_ns) / 1e9)
    assert artifact.indices == list(range(len(artifact.indices))), "buffers rotate on through warm-up and measuring"
    if loop.warning is None:
        assert sample.warnings == ()
    else:
        assert sample.warnings[0].startswith(loop.warning)


def test_a_second_process_takes_a_third_and_no_energy() -> None:
    assert RULES.repeated() == MeasureRules(
        warmup_max_s=10.0, min_s=1.0, min_calls=34, max_s=20.0, idle_s=0.0, energy_s=0.0
    )
    assert RULES.longest_s == 30.0 + 60.0 + 30 * 1.0 + 5.0


def test_windows_agree_within_ten_percent_of_the_smallest() -> None:
    assert not windows_agree([1.0] * 74, RULES)
    assert windows_agree([1.0] * 25 + [1.05] * 25 + [1.1] * 25, RULES)
    assert not windows_agree([1.0] * 25 + [1.05] * 25 + [1.11] * 25, RULES)
    assert windows_agree([9.0] * 25 + [1.0] * 75, RULES), "only the last three count"
    assert windows_agree([1.0] * 13 + [2.0] * 24 + [1.0] * 38, RULES), "what lies across two windows is none"


@pytest.mark.parametrize(
    ("samples_ms", "parts"),
    [
        ([1.0] * 9 + [2.0] * 9, None),  # too few
        ([1.0] * 10 + [2.0] * 10, 2),
        ([1.0] * 10 + [1.1] * 10, None),  # the tolerance itself
        ([1.0] * 10 + [2.0] * 10 + [1.0] * 10, None),  # few calls are cut in halves only
        ([1.0] * 60, None),
        ([1.0] * 30 + [2.0] * 30, 2),
    ],
)
def test_few_samples_cannot_drift(samples_ms: list[float], parts: int | None) -> None:
    warning = drifted(samples_ms, 0.1)
    if parts is None:
        assert warning is None
    else:
        ends = "median 1 ms at first, 2 ms at the end, 1 to 2 ms"
        assert warning == f"drifted: {ends} over {parts} parts of the sample"


def test_garbage_collection_is_off_while_measured_and_restored() -> None:
    was_enabled: list[bool] = []
    artifact = FakeArtifact(lambda _: 10.0)
    measure(lambda index: (artifact(index), was_enabled.append(gc.isenabled())), RULES, artifact.clock)
    assert not any(was_enabled) and gc.isenabled()

    def fails(index: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        measure(fails, RULES, artifact.clock)
    assert gc.isenabled()


@pytest.mark.parametrize("n", [1, 63, 64, 129, 130, 661, 662])
def test_a_percentile_needs_enough_samples(n: int) -> None:
    latency, needs = summarise([1 / 3] * n, stable=True), {"p90": 64, "p95": 130, "p99": 662}
    assert latency.p50 == 1 / 3
    supported = [name for name, needed in needs.items() if n >= needed]
    assert [name for name in needs if getattr(latency, name) is not None] == supported
    missing = ", ".join(f"{name} needs {needed}" for name, needed in needs.items() if name not in supported)
    assert latency.reason == (f"{n} {'call' if n == 1 else 'calls'}: {missing}" if missing else None)
    assert set(latency.quantiles_ms) == (set() if n == 1 else {0.333333}), "rounded to nanoseconds"


def test_figures_of_a_sample() -> None:
    latency = summarise([float(value) for value in range(1000, -1, -1)], stable=True)
    assert (latency.p50, latency.p90, latency.p95, latency.p99) == (500, 900, 950, 990)
    assert (latency.mean, latency.min, latency.n, latency.stable, latency.status) == (500, 0, 1001, True, "measured")
    assert latency.quantiles_ms == tuple(25.0 * step for step in range(41))
    short = summarise([1.0] * 70, stable=False, warnings=["drifted"], reason="stopped after 60 s")
    assert (short.stable, short.warnings) == (False, ("drifted",))
    assert short.reason == "stopped after 60 s; 70 calls: p95 needs 130, p99 needs 662"
    with pytest.raises(ValueError, match="at least one"):
        summarise([], stable=True)


@pytest.mark.parametrize(
    ("samples_ms", "cv", "warning"),
    [
        ([99.0, 101.0] * 50, 0.01, None),
        ([97.0, 103.0] * 50, 0.03, "noisy: the calls have a coefficient of variation of 3.0%, above 2.5%"),
        ([0.25, 0.75], 0.5**0.5, "noisy: the calls have a coefficient of variation of 70.7%, above 2.5%"),
        ([0.0, 0.0], None, None),
        ([12.5], None, None),
    ],
)
def test_the_spread_warns_above_two_and_a_half_percent(
    samples_ms: list[float], cv: float | None, warning: str | None
) -> None:
    latency = summarise(samples_ms, stable=None)
    assert latency.cv == (None if cv is None else pytest.approx(cv, rel=0.02))
    assert [text.split(" (")[0] for text in latency.warnings] == ([] if warning is None else [warning])
