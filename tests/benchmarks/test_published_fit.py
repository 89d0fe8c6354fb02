"""The fit finds the factors that made the times, and its ranges hold the share of errors that they state."""

import numpy as np
import pytest

from benchmarks.published.fit import Groups, estimated_ms, fit, left_out
from edgeformer.estimate.published import Setting
from edgeformer.estimate.roofline import WORK

DEVICES = {"slow": 2.0, "fast": 1.0}


def made_times(noise: float) -> tuple[np.ndarray, list[Setting], np.ndarray]:
    """Times of 200 rows per device: three times the products, twice the rest, times the device's factor."""
    generator = np.random.default_rng(0)
    settings = [Setting("cpu", device, "onnxruntime", "fp32", "call") for device in DEVICES for _ in range(200)]
    features = generator.lognormal(0.0, 1.0, (len(settings), len(WORK)))
    factors = np.where(np.array(WORK) == "products", 3.0, 2.0)
    ms = features @ factors * [DEVICES[setting.device] for setting in settings]
    return features, settings, ms * np.exp(generator.normal(0.0, noise, len(ms)))


def test_times_without_noise_are_estimated() -> None:
    features, settings, ms = made_times(0.0)
    assert estimated_ms(features, settings, fit(features, settings, ms)) == pytest.approx(ms, rel=0.1)


def test_ranges_from_other_sources_hold_nine_of_ten_times() -> None:
    features, settings, ms = made_times(0.2)
    sources = [f"source {row % 20}" for row in range(len(ms))]
    errors = left_out(features, settings, ms, sources)
    factors = Groups(errors, settings, sources, is_known=True).factors()
    assert 0.85 < np.mean(np.abs(errors) <= np.log(factors)) < 0.97
