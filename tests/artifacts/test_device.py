"""Peak rates of a device, by the precision of what runs on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from edgeformer.artifacts.device import Calibration, DeviceProfile, Fact, Peaks
from edgeformer.artifacts.documents import load_profile, save_profile
from edgeformer.report.charts import _bandwidth, _peak_rate
from tests.report.made_reports import made_report


def test_one_table_of_peaks_the_surest_first() -> None:
    slow, fast = (Fact[float](value=value, source="a test", verified=False) for value in (1e12, 2e12))
    peaks = Peaks(fp32=slow, fp16=fast, fp16_fp32_accumulate=slow)
    assert peaks.of("fp16") == (slow, fast)
    assert peaks.of("fp32") == (slow,)
    assert peaks.of("int8") == () == Peaks().of("fp16")


def test_the_roofline_is_drawn_with_the_surest_rate() -> None:
    def fact(value: float) -> dict[str, object]:
        return {"value": value, "source": "a test", "verified": False}

    peaks = {"fp32": fact(9e12), "fp16": fact(4e13), "fp16_fp32_accumulate": fact(2e13), "int8": None}
    report = made_report(profile={"bandwidth_bytes_per_s": fact(192e9), "peaks": peaks})
    assert [_peak_rate(report, precision) for precision in ("fp32", "fp16", "int8")] == [9e12, 2e13, None]
    assert _bandwidth(report) == 192e9
    assert _bandwidth(made_report(profile={})) is None and _peak_rate(made_report(profile={}), "fp32") is None


def test_profiles_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They have a second fit, which nothing ever used."""
    fitted: dict[str, Any] = {"efficiencies": {"fp32": {"gemm": {"of_peak": 0.5, "overhead_us": 1.0}}}}
    known = {"created": "2026-11-01", "processor": "Some CPU", "threads": 4, "provider": "p", **fitted}
    profile = {"name": "mine", "title": "Mine", "kind": "cpu", "calibration": known}
    expected = DeviceProfile.model_validate_json(json.dumps(profile))
    old = {**profile, "calibration": {**known, "one_thread": {"threads": 1, **fitted}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(old), encoding="utf-8")
    assert load_profile("mine", tmp_path) == expected
    save_profile(expected, tmp_path / "mine.yaml", "")
    assert "one_thread" not in (tmp_path / "mine.yaml").read_text(encoding="utf-8")


def test_cases_of_models_that_were_left_out_were_stored_as_validated_ones() -> None:
    case = {"run": "r", "artifact": "a", "batch": 1, "seq": 8, "measured_ms": 1.0, "estimated_ms": 1.1}
    error: dict[str, Any] = {
        "kind": "cpu", "device": "c", "cases": 1, "median_log2": 0.1, "worst_log2": 0.1, "created": "then",
    }  # fmt: skip
    known = {"created": "2026-11-01", "processor": "c", "threads": 1, "provider": "p", "efficiencies": {}}
    found = Calibration.model_validate({**known, "validated_on": [case], "error": {**error, "models": 3}})
    assert (len(found.left_out), found.validated_on) == (1, ())
    assert Calibration.model_validate(found.model_dump()) == found
    one = Calibration.model_validate({**known, "validated_on": [case], "error": error})
    assert (one.left_out, len(one.validated_on)) == ((), 1)
