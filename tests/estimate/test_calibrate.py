"""Calibrating this host with a tiny bundle, and comparing estimates with measurements."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.device import DeviceProfile, FittedCase
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError, RecipeError
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.bundle import Bundle
from edgeformer.estimate import calibrate as stage
from edgeformer.estimate.calibrate import FIT_SHAPES, calibrate, write_profile
from edgeformer.estimate.estimate import estimate
from edgeformer.estimate.probe import HostRates, ProductTime
from edgeformer.estimate.validate import CHECK_SHAPES, check_estimates, with_error
from edgeformer.system.host import cpu_name
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, write_bundle, write_manifest

RULES = MeasureRules(warmup_min_s=0.05, warmup_max_s=0.5, min_s=0.1, max_s=1.0, idle_s=0.01, energy_s=0.01)
PROBED = HostRates(
    products=tuple(
        ProductTime(rows=rows, width=256, weights=weights, duration_us=5 + rows * 2.0 + weights)
        for rows in (1, 16, 256)
        for weights in (1, 8)
    ),
    bandwidth=2e10,
    operator_us=2.0,
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("calibrate") / "bundle", {"model": classifier_graph(50, 64)})


@pytest.fixture(scope="module")
def calibrated(bundle: Path) -> DeviceProfile:
    """A real calibration, but for the probe, which takes ten seconds and a hundred megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "run_probe", lambda threads: PROBED)
        return calibrate(bundle, load_profile("host"), threads=1)


def test_no_shape_is_both_fitted_and_validated() -> None:
    assert not set(FIT_SHAPES) & set(CHECK_SHAPES)
    assert set(CHECK_SHAPES) == {(b, s) for b in (1, 8) for s in (16, 64, 128)}


def test_a_calibrated_profile_holds_measured_facts_and_what_was_fitted(calibrated: DeviceProfile) -> None:
    base = load_profile("host")
    assert (calibrated.name, calibrated.title, calibrated.budgets) == (base.name, base.title, base.budgets)
    for fact in (calibrated.peaks.fp32, calibrated.bandwidth_bytes_per_s, calibrated.launch_overhead_us):
        assert fact is not None and cpu_name() in fact.source
        assert calibrated.calibration is not None and fact.verified == (calibrated.calibration.disturbed is None)
    found = calibrated.calibration
    assert found is not None and found.processor == cpu_name() and found.threads == 1
    assert "onnxruntime" in found.versions and found.error is None
    assert {(case.batch, case.seq) for case in found.fitted_on} == {(1, 8), (2, 24), (4, 8), (16, 8)}
    assert {"gemm", "lookup", "elementwise", "layout"} <= set(found.efficiencies["fp32"])
    for case in found.fitted_on:
        # a handful of nodes that take microseconds each: the order of magnitude is what can be asked for
        assert case.estimated_ms is not None and abs(math.log2(case.estimated_ms / case.measured_ms)) < 1.5


def test_the_written_profile_is_found_before_the_shipped_one(calibrated: DeviceProfile, tmp_path: Path) -> None:
    path = write_profile(calibrated, tmp_path / "profiles")
    assert path.name == "host.yaml"
    assert path.read_text(encoding="utf-8").startswith("# Written by `edgeformer calibrate`")
    assert load_profile("host", tmp_path / "profiles") == calibrated
    assert load_profile(str(path)) == calibrated
    assert load_profile("host").calibration is None
    assert load_profile("rtx4050", tmp_path / "profiles").name == "rtx4050"
    with pytest.raises(RecipeError, match="the shipped ones are"):
        load_profile("nonesuch", tmp_path / "profiles")


def test_measured_beside_estimated(bundle: Path, calibrated: DeviceProfile) -> None:
    cases = check_estimates([bundle], calibrated, [(1, 16), (8, 16)], rules=RULES)
    assert [(case.batch, case.seq, case.artifact) for case in cases] == [(1, 16, "model"), (8, 16, "model")]
    checked = with_error(calibrated, cases).calibration
    assert checked is not None and checked.validated_on == cases
    stable = sum(case.stable for case in cases)  # where something else runs beside this test, none may be
    assert (checked.error.cases if checked.error is not None else 0) == stable
    assert checked.error is None or (checked.error.kind, checked.error.device) == ("cpu", cpu_name())
    device = calibrated.model_copy(update={"calibration": checked})
    opened = Bundle.open(bundle)
    (row,) = estimate(opened, opened.artifacts[0], device, [("steady", 1, 16)])
    assert row.latency_ms.p50 == pytest.approx(cases[0].estimated_ms)


def test_cases_that_were_fitted_do_not_count(bundle: Path, calibrated: DeviceProfile) -> None:
    with pytest.raises(InputError, match="were fitted"):
        check_estimates([bundle], calibrated, [(1, 8), (2, 24)], rules=RULES)


def test_a_profile_without_a_calibration_or_with_anothers_is_refused(bundle: Path, calibrated: DeviceProfile) -> None:
    with pytest.raises(InputError, match="run edgeformer calibrate"):
        check_estimates([bundle], load_profile("host"), [(1, 16)])
    assert calibrated.calibration is not None
    moved = calibrated.model_copy(
        update={"calibration": calibrated.calibration.model_copy(update={"processor": "Another 9000"})}
    )
    with pytest.raises(InputError, match="calibrated for another processor"):
        check_estimates([bundle], moved, [(1, 16)])


def case(measured: float, estimated: float) -> FittedCase:
    return FittedCase(run="r", artifact="a", batch=1, seq=1, measured_ms=measured, estimated_ms=estimated)


def test_an_error_is_the_same_up_and_down(calibrated: DeviceProfile) -> None:
    checked = with_error(calibrated, [case(1.0, 2.0), case(4.0, 1.0), case(3.0, 3.0)]).calibration
    assert checked is not None and (error := checked.error) is not None
    assert (error.median_log2, error.worst_log2, error.cases) == (1.0, 2.0, 3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"precision": "int8"}, "needs the full FP32 ONNX graph"), ({"role": "exit", "exit": 1}, "needs the full FP32")],
)
def test_calibrating_needs_the_fp32_graph(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = write_bundle(tmp_path / "bundle")
    write_manifest(folder, [artifact_of(folder, "onnx/model.onnx", **changes)])
    with pytest.raises(InputError, match=says):
        calibrate(folder, load_profile("host"))


def test_only_processors_are_calibrated_and_only_with_enough_shapes(bundle: Path) -> None:
    with pytest.raises(InputError, match="only processors"):
        calibrate(bundle, load_profile("rtx4050"))
    with pytest.raises(InputError, match="at least 4 shapes"):
        calibrate(bundle, load_profile("host"), shapes=[(1, 8), (1, 200), (1, 300), (1, 400)])
