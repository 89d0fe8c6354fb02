from __future__ import annotations

import pytest

from edgeformer.stages.profiling.statistics import summarise


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
def test_a_percentile_is_given_only_if_the_sample_can_carry_it(n: int, carried: tuple[str, ...]) -> None:
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


def test_what_the_loop_noticed_is_kept() -> None:
    latency = summarise([1.0] * 70, stable=False, warnings=["drifted"], reason="stopped after 60 s")
    assert latency.stable is False
    assert latency.warnings == ("drifted",)
    assert latency.reason == "stopped after 60 s; 70 calls: p95 needs 130, p99 needs 662"


def test_no_sample_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        summarise([], stable=True)
