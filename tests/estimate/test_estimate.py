"""Rows for devices that are not here, from real listings of a tiny bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.device import Calibration, DeviceProfile, Efficiency, EstimateError, Fact, FittedCase, Peaks
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest, Engine
from edgeformer.artifacts.report import Row
from edgeformer.benchmark import process
from edgeformer.benchmark.measurement import Item, check_artifact
from edgeformer.bundle import Bundle
from edgeformer.estimate import listing, probe
from edgeformer.estimate.estimate import Case, estimate, estimate_row, onnx_origin
from edgeformer.estimate.listing import ListJob, feed_for, run_listing
from edgeformer.estimate.probe import run_probe
from edgeformer.system.host import cpu_name
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, write_bundle, write_manifest

CHECKED = FittedCase(run="r", artifact="a", precision="fp32", batch=1, seq=8, measured_ms=1.0, estimated_ms=1.0)
ITEMS: tuple[Item, ...] = (("steady", 1, 8), ("steady", 4, 16))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("estimate") / "bundle", {"model": classifier_graph(50, 64)})


@pytest.fixture(scope="module")
def listed(bundle: Path) -> listing.Listing:
    checked = check_artifact(Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx"))
    return run_listing(ListJob(checked=checked, items=ITEMS, threads=1))


def fact(value: Any) -> Any:
    return Fact(value=value, source="a test", verified=False)


def device(kind: str = "cpu", **changes: Any) -> DeviceProfile:
    base = DeviceProfile(
        name="made-up",
        title="Made up",
        kind="cuda" if kind == "cuda" else "cpu",
        match=None,
        peaks=Peaks(fp32=fact(1e11), fp16=fact(4e11), fp16_fp32_accumulate=fact(2e11), int8=fact(8e11)),
        bandwidth_bytes_per_s=fact(2e10),
        cache_bytes=fact(2**20),
        context_bytes=fact(100 * 2**20),
        launch_overhead_us=fact(5.0),
        cores=fact(4),
    )
    return base.model_copy(update=changes)


def calibration(**changes: Any) -> Calibration:
    classes = ("gemm", "attention", "elementwise", "lookup", "layout")
    efficiency = Efficiency(overhead_us=10.0, of_peak=0.5, of_bandwidth=1.0, of_memory=0.5)
    base = Calibration(
        created="now", processor=cpu_name(), threads=2, provider="CPUExecutionProvider",
        efficiencies={"fp32": dict.fromkeys(classes, efficiency)}, call_overhead_us={"fp32": 50.0},
    )  # fmt: skip
    return base.model_copy(update=changes)


def shown(spread: float) -> Calibration:
    """With what models showed that were left out."""
    error = EstimateError(
        kind="cpu", device="x", cases=6, models=3, median_log2=0.1, worst_log2=0.6, spread_log2=spread, created="now"
    )
    return calibration(error=error, left_out=(CHECKED,))


def rows_for(bundle: Path, listed: listing.Listing, target: DeviceProfile, **changes: Any) -> list[Row]:
    artifact = artifact_of(bundle, "onnx/model.onnx", **changes)
    return [estimate_row(Case(artifact, artifact, target), listed, item) for item in ITEMS]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_row_is_an_estimate_with_a_range_and_nothing_else(bundle: Path, kind: str) -> None:
    result = estimate(Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx"), device(kind), ITEMS)
    assert [(row.phase, row.batch, row.seq) for row in result] == list(ITEMS)
    for row in result:
        assert row.where == "device" and row.provider.startswith("CPU" if kind == "cpu" else "CUDA")
        latency, memory = row.latency_ms, row.memory_bytes
        assert (latency.status, memory.status, row.energy_mj.status) == ("estimated", "estimated", "unavailable")
        assert latency.low and latency.high and latency.p50 and latency.low < latency.p50 < latency.high
        assert latency.p50 == pytest.approx((latency.low * latency.high) ** 0.5)
        assert latency.reason and "not calibrated" in latency.reason
        assert (latency.p90, latency.cv, latency.stable, latency.n) == (None, None, None, 0)
        assert memory.low and memory.peak and memory.high and memory.low < memory.peak < memory.high
        assert row.work is not None and row.work.operations > 0 and row.work.kernels <= row.work.operators
    assert (result[0].latency_ms.p50 or 0) < (result[1].latency_ms.p50 or 0)
    assert result[0].threads == (4 if kind == "cpu" else None)


def test_a_calibrated_estimate_is_the_sum_of_its_nodes(bundle: Path, listed: listing.Listing) -> None:
    (row, _) = rows_for(bundle, listed, device(calibration=shown(0.5)))
    nodes = len(listed.items[ITEMS[0]].nodes)
    latency = row.latency_ms
    assert latency.low is not None and latency.high is not None and latency.p50 is not None
    # 50 µs per call and 10 per node; the rest of so small a graph is next to nothing
    assert latency.p50 * 1000 == pytest.approx(50 + 10 * nodes, rel=0.02)
    assert latency.high / latency.p50 == pytest.approx(2**0.5) and latency.p50 / latency.low == pytest.approx(2**0.5)
    assert "on 6 cases of 3 models, each left out once" in str(latency.reason)
    assert row.threads == 2


def test_no_model_that_was_left_out_makes_the_range_a_guess(bundle: Path, listed: listing.Listing) -> None:
    never = rows_for(bundle, listed, device(calibration=calibration()))[0].latency_ms
    assert (never.high or 0) / (never.p50 or 1) == pytest.approx(2**0.6) and "guess" in str(never.reason)


def test_what_was_not_left_out_has_no_narrow_range(bundle: Path, listed: listing.Listing) -> None:
    """A small error on whole FP32 calls says little about INT8 or about a step bundle."""
    both = shown(0.2)
    both = both.model_copy(update={"efficiencies": {**both.efficiencies, "int8": both.efficiencies["fp32"]}})
    for changes, log2 in (({}, 0.2), ({"precision": "int8"}, 0.6), ({"role": "step"}, 0.6)):
        latency = rows_for(bundle, listed, device(calibration=both), **changes)[0].latency_ms
        assert (latency.high or 0) / (latency.p50 or 1) == pytest.approx(2**log2)
        assert ("so the range is a guess" in str(latency.reason)) == (log2 == 0.6)


def test_a_precision_that_was_not_calibrated_has_the_wide_range(bundle: Path, listed: listing.Listing) -> None:
    narrow, wide = (
        rows_for(bundle, listed, device(calibration=calibration()), precision=precision)[0].latency_ms
        for precision in ("fp32", "int8")
    )
    assert "not calibrated" in str(wide.reason) and "not calibrated" not in str(narrow.reason)


def reason(bundle: Path, target: DeviceProfile, artifact: ArtifactManifest | None = None) -> str:
    result = estimate(Bundle.open(bundle), artifact or artifact_of(bundle, "onnx/model.onnx"), target, ITEMS)
    assert {row.latency_ms.status for row in result} == {row.memory_bytes.status for row in result} == {"unavailable"}
    assert [(row.phase, row.batch, row.seq) for row in result] == list(ITEMS)
    return str(result[0].latency_ms.reason)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"peaks": Peaks()}, "peaks.fp32"),
        ({"bandwidth_bytes_per_s": None}, "bandwidth_bytes_per_s"),
        ({"launch_overhead_us": None}, "launch_overhead_us"),
    ],
)
def test_a_missing_fact_is_named(bundle: Path, changes: dict[str, Any], missing: str) -> None:
    assert f"does not say {missing}" in reason(bundle, device("cuda", **changes))
    here = reason(bundle, device("cpu", **changes))
    assert here.endswith("run edgeformer calibrate")


def test_gpus_need_the_peak_of_the_precision(bundle: Path) -> None:
    plain = device("cuda", peaks=Peaks(fp32=fact(1e11)))
    for precision in ("fp16", "int8"):
        assert f"peaks.{precision}" in reason(
            bundle, plain, artifact_of(bundle, "onnx/model.onnx", precision=precision)
        )


def test_a_gpu_without_a_known_context_has_a_time_but_no_memory(bundle: Path, listed: listing.Listing) -> None:
    (row, _) = rows_for(bundle, listed, device("cuda", context_bytes=None))
    assert row.latency_ms.status == "estimated"
    assert row.memory_bytes.status == "unavailable" and "context_bytes" in str(row.memory_bytes.reason)


def test_a_calibration_of_another_processor_is_refused(bundle: Path) -> None:
    elsewhere = calibration(processor="Another Processor 9000")
    assert "another processor (Another Processor 9000, not" in reason(bundle, device(calibration=elsewhere))
    # a profile that stands for that very processor may use it
    theirs = device(match="Processor 9000", calibration=elsewhere)
    (row, _) = estimate(Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx"), theirs, ITEMS)
    assert row.latency_ms.status == "estimated"


def engine(**changes: Any) -> ArtifactManifest:
    return ArtifactManifest(
        id="engine", file="engines/a.engine", format="tensorrt-rtx", precision="fp16", status="built", size_bytes=2**20,
        built_for={"compute_capability": "8.9"},
        engine=Engine(builder="b", seconds=1, checked_by="size", activation_bytes=2**22, graph_bytes=1, shapes={}),
    ).model_copy(update=changes)  # fmt: skip


def test_an_engine_is_estimated_from_the_graph_of_its_exit(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    card = device("cuda", compute_capability=fact("8.9"))
    (row, _) = estimate(Bundle(bundle, manifest), engine(), card, ITEMS)
    assert (row.artifact, row.provider, row.precision) == ("engine", "tensorrt-rtx", "fp16")
    assert row.latency_ms.status == row.memory_bytes.status == "estimated"
    fp16 = artifact_of(bundle, "onnx/model.onnx", id="half", precision="fp16")
    both = manifest.model_copy(update={"artifacts": (*manifest.artifacts, fp16)})
    assert (onnx_origin(both, engine()) or engine()).id == "half"
    assert onnx_origin(both, engine(exit=2, role="exit")) is None
    assert "needs an ONNX graph" in reason(bundle, card, engine(exit=2, role="exit")).replace("need an", "needs an")


def test_an_engine_runs_on_its_own_kind_of_card_only(bundle: Path) -> None:
    assert "built for compute capability 8.9; 'made-up' has 9.0" in reason(
        bundle, device("cuda", compute_capability=fact("9.0")), engine()
    )
    assert "run on NVIDIA GPUs only" in reason(bundle, device("cpu"), engine())


def test_int8_products_that_the_card_cannot_run_are_not_estimated_for_it(bundle: Path) -> None:
    """The rows would say what an INT8 graph costs on a card that leaves its products to the processor."""
    int8 = artifact_of(bundle, "onnx/model.onnx", precision="int8", quantized={"MatMulInteger": 4, "Gather": 1})
    assert "its 4 products in INT8" in reason(bundle, device("cuda"), int8)
    manifest = Bundle.open(bundle).manifest
    assert estimate(Bundle(bundle, manifest), int8, device("cpu"), ITEMS)[0].latency_ms.status == "estimated"
    tables = int8.model_copy(update={"quantized": {"Gather": 1}})
    assert estimate(Bundle(bundle, manifest), tables, device("cuda"), ITEMS)[0].latency_ms.status == "estimated"


@pytest.mark.parametrize("name", [name for name in shipped_names("profiles") if name != "host"])
def test_every_shipped_device_gives_an_estimate(bundle: Path, listed: listing.Listing, name: str) -> None:
    for row in rows_for(bundle, listed, load_profile(name)):
        assert row.latency_ms.status == "estimated", row.latency_ms.reason
        assert row.memory_bytes.status == "estimated", row.memory_bytes.reason


def test_a_shape_that_the_graph_refuses_does_not_stop_the_others(bundle: Path) -> None:
    items: list[Item] = [("steady", 1, 999), ("steady", 1, 8)]
    refused, fine = estimate(Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx"), device(), items)
    assert refused.latency_ms.status == "unavailable" and "refuses" in str(refused.latency_ms.reason)
    assert fine.latency_ms.status == "estimated"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import os; os.abort()", "ended early"),
        (
            "import sys; sys.stderr.write('out of luck'); raise SystemExit(7)",
            "exit code 7; last line on stderr: out of luck",
        ),
        ("import time; time.sleep(60)", "was silent for 1 s and was ended"),
    ],
)
def test_a_listing_process_that_dies_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, program: str, says: str
) -> None:
    monkeypatch.setattr(process, "worker_command", lambda: [sys.executable, "-c", program])
    monkeypatch.setattr(listing, "_LONGEST_S", 1.0)
    monkeypatch.setattr(probe, "_LONGEST_S", 1.0)
    assert says in reason(bundle, device())
    with pytest.raises(EdgeformerError, match="could not be measured"):
        run_probe(1)


def test_decoding_feeds_one_token_and_what_was_kept_of_the_others() -> None:
    declared = {
        "input_ids": ("tensor(int64)", (None, None)),
        "position_ids": ("tensor(int64)", (None, None)),
        "past_key_values.0.key": ("tensor(float)", (None, 8, None, 64)),
        "past_conv": ("tensor(float16)", (None, 14, 512)),
    }
    feed = feed_for(declared, ("decode", 2, 100), np.zeros((2, 1), np.int64))
    shapes = {name: array.shape for name, array in feed.items()}
    assert shapes == {
        "input_ids": (2, 1), "position_ids": (2, 1), "past_key_values.0.key": (2, 8, 99, 64), "past_conv": (2, 14, 512),
    }  # fmt: skip
    assert feed["position_ids"].tolist() == [[99], [99]] and feed["past_conv"].dtype == np.float16
    whole = feed_for(declared, ("steady", 2, 100), np.zeros((2, 100), np.int64))
    assert whole["past_key_values.0.key"].shape == (2, 8, 0, 64) and whole["position_ids"].shape == (2, 100)


def test_an_unknown_input_is_named() -> None:
    with pytest.raises(EdgeformerError, match="'pixels'"):
        feed_for({"pixels": ("tensor(float)", (None, 3))}, ("steady", 1, 4), np.zeros((1, 4), np.int64))


def test_listing_changes_nothing_in_the_bundle(bundle: Path) -> None:
    write_manifest(bundle, [artifact_of(bundle, "onnx/model.onnx")])
    before = {path: path.stat().st_mtime_ns for path in bundle.rglob("*")}
    estimate(Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx"), device(), ITEMS[:1])
    assert before == {path: path.stat().st_mtime_ns for path in bundle.rglob("*")}
    Bundle.open(bundle).session(artifact_of(bundle, "onnx/model.onnx")).close()
