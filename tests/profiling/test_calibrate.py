"""Calibrating this host with a tiny bundle, and comparing estimates with measurements."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import artifact_of, classifier_graph, write_bundle, write_manifest

from edgeformer.backends.onnxruntime.node_listing import ExecutedNode, Tensor
from edgeformer.bundle import Bundle
from edgeformer.formats.device import DeviceProfile, FittedCase
from edgeformer.formats.documents import load_profile
from edgeformer.formats.errors import InputError, RecipeError
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.machine.host import cpu_name
from edgeformer.stages.profiling.estimating import calibrate as stage
from edgeformer.stages.profiling.estimating.calibrate import FIT_SHAPES, calibrate, write_profile
from edgeformer.stages.profiling.estimating.check import CHECK_SHAPES, check_estimates, with_error
from edgeformer.stages.profiling.estimating.estimate import estimate
from edgeformer.stages.profiling.estimating.listing import ItemNodes, Listing
from edgeformer.stages.profiling.estimating.probe import HostRates, ProductTime
from edgeformer.stages.profiling.estimating.rates import Rates
from edgeformer.stages.profiling.estimating.roofline import Amounts, amounts
from edgeformer.stages.profiling.estimating.work import count_node
from edgeformer.stages.profiling.measure import MeasureRules

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
        assert fact is not None and fact.verified and cpu_name() in fact.source
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
    assert path.read_text(encoding="utf-8").startswith("# Written by `edgeformer profile --calibrate`")
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
    assert checked is not None and checked.error is not None and checked.validated_on == cases
    assert (checked.error.cases, checked.error.kind, checked.error.device) == (2, "cpu", cpu_name())
    device = calibrated.model_copy(update={"calibration": checked})
    opened = Bundle.open(bundle)
    (row,) = estimate(opened, opened.artifacts[0], device, [("steady", 1, 16)])
    assert row.latency_ms.p50 == pytest.approx(cases[0].estimated_ms)


def test_cases_that_were_fitted_do_not_count(bundle: Path, calibrated: DeviceProfile) -> None:
    with pytest.raises(InputError, match="were fitted"):
        check_estimates([bundle], calibrated, [(1, 8), (2, 24)], rules=RULES)


def test_a_profile_without_a_calibration_or_with_anothers_is_refused(bundle: Path, calibrated: DeviceProfile) -> None:
    with pytest.raises(InputError, match="--calibrate"):
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


def took(duration_us: float, *, rows: int = 1, width: int = 256, weights: int = 1) -> ProductTime:
    return ProductTime(rows=rows, width=width, weights=weights, duration_us=duration_us)


def test_the_largest_cache_is_linuxs_or_what_the_products_show(tmp_path: Path) -> None:
    single = [took(10.0), took(10.0, weights=8), took(40.0, weights=64), took(1.0, rows=2, weights=512)]
    # four times slower from 16 MiB on; half of that cache was still fast
    assert stage.cache_bytes(single, tmp_path) == (2 * 8 * 256 * 256 * 4, "from the time of products of single rows")
    assert stage.cache_bytes([took(10.0)], tmp_path)[0] == 2 * 256 * 256 * 4
    for index, size in enumerate(("32K\n", "8192K\n", "1024K\n", "none\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size, encoding="ascii")
    (tmp_path / "index9" / "size").mkdir(parents=True)
    assert stage.cache_bytes(single, tmp_path) == (8 * 2**20, "as Linux says")


RATES = Rates(1e11, 1e11, 1e11, 2e10, 2**20, 1.0)


def test_a_probe_counts_half_of_its_time_and_reads_from_memory_what_no_cache_holds() -> None:
    probed = HostRates(products=(took(8.0, rows=4), took(9.0, weights=64)), bandwidth=2e10, operator_us=2.0)
    held, not_held = stage._probe_samples(RATES, probed)
    weight = 4 * 256 * 256
    assert held.work.operations == 2 * 4 * 256 * 256 and (held.work.rows, held.work.columns) == (4, 256)
    assert (held.work.cls, held.work.key, held.precision) == ("gemm", "MatMul", "fp32")
    assert (held.work.weight_bytes, held.work.moved_bytes) == (weight, 2 * 4 * 4 * 256)
    assert held.amount == Amounts(held.work.operations, weight + 8192, 0.0)
    assert not_held.amount == Amounts(not_held.work.operations, 2048, weight)
    assert (held.duration_us, held.call_us, not_held.call_us) == (8.0, 16.0, 18.0)


def linear(duration_us: float, dtype: str = "float", width: int = 512) -> ExecutedNode:
    weight = Tensor(dtype, (512, width))
    return ExecutedNode(
        "MatMul", "n", (Tensor("float", (32, 512)), weight), (Tensor("float", (32, width)),), weight.bytes, duration_us
    )


def test_a_listed_call_becomes_one_sample_of_it_and_one_of_each_kind_of_node() -> None:
    nodes = (linear(10.0), linear(14.0), linear(6.0, width=256))
    listed = ItemNodes(item=("steady", 1, 32), nodes=nodes, runs=1, feed_bytes=1, call_us=25.0)
    artifact = ArtifactManifest(id="a", file="a", format="onnx", precision="fp16", status="built")
    call, kinds = stage._samples(artifact, listed, RATES)
    weights = 4 * 512 * (512 + 512 + 256)
    assert (call.precision, call.measured_us, call.weight_bytes) == ("fp16", 25.0, weights)
    assert call.works == tuple(map(count_node, nodes))
    assert [(kind.duration_us, kind.call_us, kind.precision) for kind in kinds] == [(12, 15, "fp16"), (6, 30, "fp16")]
    assert [kind.work for kind in kinds] == [count_node(nodes[0]), count_node(nodes[2])]
    assert kinds[0].amount == amounts(count_node(nodes[0]), 1.0, 2**20), "2.6 MB are in no cache of 1 MiB"


def test_this_hosts_facts_are_the_fastest_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "cache_bytes", lambda products: (5 + len(products), "told"))
    rates = HostRates(products=(took(10.0, rows=256), took(1.0)), bandwidth=2.34567e10, operator_us=2.0)
    small = ItemNodes(item=("steady", 1, 32), nodes=(linear(1.0, "int8", 4),), runs=1, feed_bytes=1)
    quick = ItemNodes(
        item=("steady", 1, 8), nodes=(linear(2.0, "int8"), linear(8.0, "int8"), linear(0.0, "int8"), linear(0.1)),
        runs=1, feed_bytes=1,
    )  # fmt: skip
    artifact = ArtifactManifest(id="a", file="a", format="onnx", precision="int8", status="built")
    base = load_profile("host")
    found = stage._host_facts(base, 3, rates, [(artifact, Listing(items={small.item: small, quick.item: quick}))])
    assert found.peaks.fp32 is not None and found.peaks.fp32.value == float(f"{2 * 256**3 / 1e-5:.4g}")
    assert found.peaks.fp32.verified
    assert found.peaks.fp32.source.startswith("measured by edgeformer profile --calibrate on 20")
    assert f" with 3 threads ({cpu_name()}): the fastest" in found.peaks.fp32.source
    assert found.peaks.int8 is not None and found.peaks.int8.value == float(f"{2 * 32 * 512**2 / 2e-6:.4g}")
    assert found.bandwidth_bytes_per_s is not None and found.bandwidth_bytes_per_s.value == 2.346e10
    assert found.launch_overhead_us is not None and found.launch_overhead_us.value == 2.0
    assert found.cache_bytes is not None and (found.cache_bytes.value, found.cache_bytes.source) == (
        7, f"told ({cpu_name()})"
    )  # fmt: skip
    assert found.cores is not None and (found.cores.value, found.cores.verified) == (3, True)
    known = (
        found.peaks.fp32,
        found.peaks.int8,
        found.bandwidth_bytes_per_s,
        found.launch_overhead_us,
        found.cache_bytes,
    )
    assert all(fact is not None and fact.verified and "None" not in fact.source for fact in known)
    assert (found.name, found.title, found.budgets) == (base.name, base.title, base.budgets)
    assert stage._host_facts(base, 3, rates, [(artifact, Listing(items={small.item: small}))]).peaks.int8 is None
