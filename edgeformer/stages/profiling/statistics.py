"""What a sample of call times can honestly say. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeformer.formats.report import Latency

# Samples that a percentile needs for 99 % confidence: MLPerf loadgen's early-stopping estimate.
PERCENTILE_NEEDS = {90: 64, 95: 130, 99: 662}
NOISY_CV = 0.025
# Points of the sample's distribution that a report can draw: every 2.5 %.
_QUANTILES = 41


def summarise(
    samples_ms: Sequence[float], stable: bool | None, warnings: Sequence[str] = (), reason: str | None = None
) -> Latency:
    """Summarise the times of single calls, in milliseconds.

    Args:
        samples_ms: one time per call, in the order they were taken; at least one.
        stable: whether warm-up settled and the sample did not drift; None for a single call.
        warnings: what the measuring loop noticed.
        reason: why the sample is smaller than the rules ask for, if it is.

    Returns:
        ``status: measured``; a percentile that the sample cannot carry is None and ``reason`` says so.
    """
    values = np.asarray(samples_ms, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a latency needs at least one sample")
    n, mean = int(values.size), float(values.mean())
    # ddof=1: the spread of the calls that were not taken is estimated from those that were.
    cv = float(values.std(ddof=1)) / mean if n > 1 and mean > 0 else None
    percentiles = {p: float(np.percentile(values, p)) for p, needed in PERCENTILE_NEEDS.items() if n >= needed}
    noted = list(warnings)
    if cv is not None and cv > NOISY_CV:
        noted.append(f"the calls vary by {cv:.1%} (coefficient of variation; above {NOISY_CV:.1%} is noisy)")
    return Latency(
        status="measured",
        p50=float(np.median(values)),
        p90=percentiles.get(90),
        p95=percentiles.get(95),
        p99=percentiles.get(99),
        mean=mean,
        min=float(values.min()),
        cv=cv,
        n=n,
        stable=stable,
        reason="; ".join(filter(None, (reason, missing_percentiles(n)))) or None,
        warnings=tuple(noted),
        # To the nanosecond, which is what the clock gives. One call has no distribution.
        quantiles_ms=tuple(np.quantile(values, np.linspace(0, 1, _QUANTILES)).round(6).tolist()) if n > 1 else (),
    )


def missing_percentiles(n: int) -> str | None:
    """Why some percentiles of ``n`` samples are absent; None when none is."""
    absent = [(p, needed) for p, needed in PERCENTILE_NEEDS.items() if n < needed]
    if not absent:
        return None
    needs = ", ".join(f"p{p} needs {needed}" for p, needed in absent)
    return f"{n} {'call' if n == 1 else 'calls'}: {needs}"
