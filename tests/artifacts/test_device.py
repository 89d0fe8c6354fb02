"""Peak rates of a device, by the precision of what runs on it."""

from pathlib import Path

import yaml

from edgeformer.artifacts.device import DeviceProfile, Fact, Peaks
from edgeformer.artifacts.documents import load_profile

HOST = load_profile("host")


def test_one_table_of_peaks_the_surest_first() -> None:
    slow, fast = (Fact[float](value=value, source="a test", verified="no") for value in (1e12, 2e12))
    peaks = Peaks(fp32=slow, fp16=fast, fp16_fp32_accumulate=slow)
    assert peaks.of("fp16") == (slow, fast)
    assert peaks.of("fp32") == (slow,)
    assert peaks.of("int8") == () == Peaks().of("fp16")


def test_a_calibration_of_an_earlier_estimator_is_dropped_and_reported(tmp_path: Path) -> None:
    calibration = {"created": "now", "processor": "x", "threads": 2, "provider": "p", "efficiencies": {}}
    kept = HOST.model_dump(exclude={"budgets"}) | {"calibration": calibration}
    former = HOST.model_dump(exclude={"budgets"}) | {"calibration": calibration | {"speed": {"product_us": 396.0}}}
    assert DeviceProfile.model_validate(kept).calibration is not None
    assert DeviceProfile.model_validate(former).calibration is None
    path, notes = tmp_path / "mine.yaml", list[str]()
    content = {"name": "mine", "title": "Mine", "kind": "cpu", "calibration": {"speed": {"product_us": 396.0}}}
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    assert load_profile(str(path), note=notes.append).calibration is None
    assert notes == [f"{path}:4: calibration: made by an earlier estimator and ignored; run edgeformer calibrate again"]
