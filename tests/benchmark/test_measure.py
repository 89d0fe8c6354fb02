from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from edgeformer.measurement.trackers import MeasureRules, drifted, measure, summarise, windows_agree


class FakeArtifact:
    """Advances a clock by what each call 'takes'; ``cost_ms`` maps the call's number to milliseconds."""

    def __init__(self, cost_ms: Callable[[int], float]) -> None:
        self.cost_ms = cost_ms
        self.now_ns = self.began_ns = 10**12  # a clock's zero means nothing
        self.indices: list[int] = []

    def __call__(self, index: int) -> None:
        self.indices.append(index)
        self.now_ns += int(self.cost_ms(index) * 1e6)

    def clock(self) -> int:
        return self.now_ns


def test_a_steady_artifact_warms_up_for_three_windows_and_then_three_seconds() -> None:
    artifact = FakeArtifact(lambda _: 10.0)
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert sample.warmup_calls == 75
    assert sample.warmup_s == pytest.approx(0.75)
    assert len(sample.samples_ms) == 300
    assert sample.stable and sample.reason is None and sample.warnings == ()
    assert artifact.indices == list(range(375)), "buffers rotate on through warm-up and measuring"


def test_a_fast_artifact_warms_up_for_at_least_200_ms() -> None:
    artifact = FakeArtifact(lambda _: 0.1)
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert sample.warmup_calls == 2000
    assert len(sample.samples_ms) == 30_000


def test_a_slow_artifact_still_takes_100_calls() -> None:
    artifact = FakeArtifact(lambda _: 100.0)
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert len(sample.samples_ms) == 100
    assert sample.stable and sample.reason is None


def test_warm_up_goes_on_until_the_windows_agree() -> None:
    artifact = FakeArtifact(lambda index: 20.0 if index < 60 else 10.0)
    sample = measure(artifact, MeasureRules(), artifact.clock)
    # Windows of 25: calls 50–74 still hold ten slow ones, but their median is already that of the fast calls.
    assert sample.warmup_calls == 125
    assert sample.stable
    assert set(sample.samples_ms) == {10.0}


def test_an_artifact_that_never_settles_is_measured_and_marked() -> None:
    artifact = FakeArtifact(lambda index: 10.0 + 5.0 * ((index // 25) % 2))
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert not sample.stable
    assert sample.warmup_s == pytest.approx(30.0, abs=0.02)
    assert "did not settle" in sample.warnings[0]
    assert len(sample.samples_ms) >= 100


def test_a_very_slow_artifact_stops_at_the_ceiling_and_says_so() -> None:
    artifact = FakeArtifact(lambda _: 2000.0)
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert (artifact.now_ns - artifact.began_ns) / 1e9 <= MeasureRules().longest_s + 2 * 2.0
    assert not sample.stable
    assert "too slow to see whether it has settled: 15 warm-up calls" in sample.warnings[0]
    assert len(sample.samples_ms) == 30
    assert sample.reason == "stopped after 60 s with 30 of 100 calls"


def test_an_artifact_slower_than_the_ceiling_is_called_once_each() -> None:
    artifact = FakeArtifact(lambda _: 90_000.0)
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert (sample.warmup_calls, len(sample.samples_ms), sample.stable) == (1, 1, False)


def test_strict_rules_take_a_minute_and_enough_calls_for_a_p99() -> None:
    fast = FakeArtifact(lambda _: 5.0)
    assert len(measure(fast, MeasureRules.strict(), fast.clock).samples_ms) == 12_000
    slow = FakeArtifact(lambda _: 200.0)
    assert len(measure(slow, MeasureRules.strict(), slow.clock).samples_ms) == 662


def test_an_early_stop_states_its_seconds() -> None:
    artifact = FakeArtifact(lambda _: 5000.0)
    sample = measure(artifact, MeasureRules.strict(), artifact.clock)
    assert sample.reason == "stopped after 900 s with 180 of 662 calls"
    assert sample.warnings == ("too slow to see whether it has settled: 12 warm-up calls in 60.0 s",)


def test_three_windows_are_enough_to_see_that_they_do_not_agree() -> None:
    artifact = FakeArtifact(lambda index: (300.0, 500.0, 400.0, 400.0)[min(3, index // 25)])
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert sample.warmup_calls == 75
    assert sample.warnings[0].startswith("did not settle: after 75 warm-up calls in 30.0 s the last 3 windows of 25")


def test_the_fewest_calls_of_a_warm_up_are_enough() -> None:
    artifact = FakeArtifact(lambda _: 1.0)
    rules = MeasureRules(warmup_min_s=0.0, warmup_min_calls=10, window_calls=5, windows=2)
    assert measure(artifact, rules, artifact.clock).warmup_calls == 10


def test_a_second_process_takes_a_third_and_no_energy() -> None:
    assert MeasureRules().repeated() == MeasureRules(
        warmup_max_s=10.0, min_s=1.0, min_calls=34, max_s=20.0, idle_s=0.0, energy_s=0.0
    )
    assert MeasureRules().longest_s == 30.0 + 60.0 + 30 * 1.0 + 5.0


def test_throttling_while_measured_is_not_stable() -> None:
    artifact = FakeArtifact(lambda index: 10.0 if index < 200 else 13.0)
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert not sample.stable
    assert sample.warnings == (
        "drifted while it was measured: median 10 ms at first, 13 ms at the end, 10 to 13 ms over 10 parts",
    )


def test_other_work_that_comes_and_goes_is_not_stable() -> None:
    """Both halves have the same median; a part in the middle has not."""
    artifact = FakeArtifact(lambda index: 12.0 if 205 <= index < 245 else 10.0)
    sample = measure(artifact, MeasureRules(), artifact.clock)
    assert not sample.stable
    assert "10 to 12 ms over 10 parts" in sample.warnings[0]


def test_single_slow_calls_are_no_drift() -> None:
    artifact = FakeArtifact(lambda index: 50.0 if index % 30 == 0 else 10.0)
    assert measure(artifact, MeasureRules(), artifact.clock).stable


def test_windows_agree_within_ten_percent_of_the_smallest() -> None:
    rules = MeasureRules()
    assert not windows_agree([1.0] * 74, rules)
    assert windows_agree([1.0] * 25 + [1.05] * 25 + [1.1] * 25, rules)
    assert not windows_agree([1.0] * 25 + [1.05] * 25 + [1.11] * 25, rules)
    assert windows_agree([9.0] * 25 + [1.0] * 75, rules), "only the last three count"
    across = [1.0] * 13 + [2.0] * 24 + [1.0] * 38
    assert windows_agree(across, rules), "what lies across two windows is none"


def test_few_samples_cannot_drift() -> None:
    assert drifted([1.0] * 9 + [2.0] * 9, 0.1) is None
    assert drifted([1.0] * 10 + [2.0] * 10, 0.1) == (
        "drifted while it was measured: median 1 ms at first, 2 ms at the end, 1 to 2 ms over 2 parts"
    )
    assert drifted([1.0] * 10 + [1.1] * 10, 0.1) is None, "the tolerance itself is tolerated"
    assert drifted([1.0] * 10 + [2.0] * 10 + [1.0] * 10, 0.1) is None, "few calls are cut in halves only"
    assert drifted([1.0] * 60, 0.1) is None
    assert str(drifted([1.0] * 30 + [2.0] * 30, 0.1)).endswith("over 2 parts")


def test_garbage_collection_is_off_while_measured_and_restored() -> None:
    indexes: list[bool] = []
    artifact = FakeArtifact(lambda _: 10.0)
    measure(lambda index: (artifact(index), indexes.append(gc.isenabled())), MeasureRules(), artifact.clock)
    assert not any(indexes)
    assert gc.isenabled()

    def fails(index: int) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        measure(fails, MeasureRules(), artifact.clock)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("n", "carried"),
    [
        (1, ()),
        (63, ()),
        (64, ("p90",)),
        (129, ("p90",)),
        (130, ("p90", "p95")),
        (661, ("p90", "p95")),
        (662, ("p90", "p95", "p99")),
    ],
)
def test_a_percentile_needs_enough_samples(n: int, carried: tuple[str, ...]) -> None:
    latency = summarise([5.0] * n, stable=True)
    assert latency.p50 == 5.0
    assert tuple(name for name in ("p90", "p95", "p99") if getattr(latency, name) is not None) == carried
    for name, needed in (("p90", 64), ("p95", 130), ("p99", 662)):
        missing = f"{name} needs {needed}" in (latency.reason or "")
        assert missing == (name not in carried)


def test_figures_of_a_known_sample() -> None:
    latency = summarise([float(value) for value in range(1, 1002)], stable=True)
    assert (latency.p50, latency.p90, latency.p95, latency.p99) == (501, 901, 951, 991)
    assert (latency.mean, latency.min, latency.n, latency.stable) == (501, 1, 1001, True)
    assert latency.status == "measured"


def test_the_distribution_is_kept_at_41_even_steps() -> None:
    latency = summarise([float(value) for value in range(1000, -1, -1)], stable=True)
    assert latency.quantiles_ms == tuple(25.0 * step for step in range(41))
    assert summarise([1.0, 3.0], stable=True).quantiles_ms[::20] == (1.0, 2.0, 3.0)
    assert summarise([1.0], stable=None).quantiles_ms == (), "one call has no distribution"


def test_two_calls_have_a_spread_and_calls_of_no_time_have_none() -> None:
    assert summarise([0.25, 0.75], stable=True).cv == pytest.approx(0.5**0.5)
    assert summarise([0.0, 0.0], stable=True).cv is None


def test_quantiles_are_rounded_to_nanoseconds() -> None:
    latency = summarise([1 / 3] * 662, stable=True)
    assert set(latency.quantiles_ms) == {0.333333}
    assert latency.reason is None


def test_the_spread_warns_above_two_and_a_half_percent() -> None:
    quiet = summarise([99.0, 101.0] * 50, stable=True)
    assert quiet.cv == pytest.approx(0.01, rel=0.02)
    assert quiet.warnings == ()
    noisy = summarise([97.0, 103.0] * 50, stable=True)
    assert noisy.cv == pytest.approx(0.03, rel=0.02)
    assert "vary by 3.0%" in noisy.warnings[0]


def test_one_call_has_no_spread_and_cannot_be_stable() -> None:
    latency = summarise([12.5], stable=None)
    assert (latency.p50, latency.mean, latency.cv, latency.stable, latency.n) == (12.5, 12.5, None, None, 1)
    assert latency.reason == "1 call: p90 needs 64, p95 needs 130, p99 needs 662"


def test_warnings_of_the_loop_are_kept() -> None:
    latency = summarise([1.0] * 70, stable=False, warnings=["drifted"], reason="stopped after 60 s")
    assert latency.stable is False
    assert latency.warnings == ("drifted",)
    assert latency.reason == "stopped after 60 s; 70 calls: p95 needs 130, p99 needs 662"


def test_no_sample_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarise([], stable=True)
