"""Rows for devices that are not here, from real listings of a tiny bundle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.device import DeviceProfile, Fact, Peaks
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest, EngineBuild
from edgeformer.bundle import Bundle
from edgeformer.estimate.estimate import Case, estimate, estimate_row
from edgeformer.estimate.listing import ListJob, feed_for, run_listing
from edgeformer.estimate.probe import run_probe
from edgeformer.measurement.artifact import Item, check_artifact
from edgeformer.system import worker
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, write_bundle

ITEMS: tuple[Item, ...] = (("steady", 1, 8), ("steady", 4, 16))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("estimate") / "bundle", {"model": classifier_graph(50, 64)})


def fact(value: Any) -> Any:
    return Fact(value=value, source="a test", verified="no")


def device(kind: str = "cpu", **changes: Any) -> DeviceProfile:
    base = DeviceProfile(
        name="made-up", title="Made up", kind="cuda" if kind == "cuda" else "cpu",
        peaks=Peaks(fp32=fact(1e11), fp16=fact(4e11), fp16_fp32_accumulate=fact(2e11), int8=fact(8e11)),
        bandwidth_bytes_per_s=fact(2e10), cache_bytes=fact(2**20), context_bytes=fact(100 * 2**20),
        launch_overhead_us=fact(5.0), cores=fact(4),
    )  # fmt: skip
    return base.model_copy(update=changes)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_row_is_an_estimate_with_a_range_and_nothing_else(bundle: Path, kind: str) -> None:
    result = estimate(Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx"), device(kind), ITEMS)
    assert [(row.phase, row.batch, row.seq) for row in result] == list(ITEMS)
    for row in result:
        assert row.where == "device" and row.provider.startswith("CPU" if kind == "cpu" else "CUDA")
        latency, memory = row.latency_ms, row.memory_bytes
        assert (latency.status, memory.status, row.energy_mj.status) == ("estimated", "estimated", "unavailable")
        assert latency.low and latency.high and latency.p50 and latency.low < latency.p50 < latency.high
        assert latency.reason and "published measurements of onnxruntime on other" in latency.reason
        assert (latency.p90, latency.cv, latency.stable, latency.n) == (None, None, None, 0)
        assert memory.low and memory.peak and memory.high and memory.low < memory.peak < memory.high
        assert row.work is not None and row.work.operations > 0 and row.work.kernels <= row.work.operators
    assert (result[0].latency_ms.p50 or 0) < (result[1].latency_ms.p50 or 0)


def reason(bundle: Path, target: DeviceProfile, artifact: ArtifactManifest | None = None) -> str:
    result = estimate(Bundle.open(bundle), artifact or artifact_of(bundle, "onnx/model.onnx"), target, ITEMS)
    assert {row.latency_ms.status for row in result} == {row.memory_bytes.status for row in result} == {"unavailable"}
    assert [(row.phase, row.batch, row.seq) for row in result] == list(ITEMS)
    return str(result[0].latency_ms.reason)


def test_an_engine_is_estimated_for_its_own_kind_of_card_only(bundle: Path) -> None:
    engine = ArtifactManifest(
        id="engine", file="engines/a.engine", format="tensorrt-rtx", precision="fp16", status="built", size_bytes=2**20,
        built_for={"compute_capability": "8.9"},
        engine=EngineBuild(builder="b", seconds=1, checked_by="size", activation_bytes=2**22, graph_bytes=1, shapes={}),
    )  # fmt: skip
    (row, _) = estimate(Bundle.open(bundle), engine, device("cuda", compute_capability=fact("8.9")), ITEMS)
    assert (row.artifact, row.provider, row.precision) == ("engine", "tensorrt-rtx", "fp16")
    assert row.latency_ms.status == row.memory_bytes.status == "estimated"
    newer = device("cuda", compute_capability=fact("9.0"))
    assert "built for compute capability 8.9; 'made-up' has 9.0" in reason(bundle, newer, engine)
    assert "run on NVIDIA GPUs only" in reason(bundle, device("cpu"), engine)


def test_only_tables_in_int8_are_estimated_for_a_card_without_int8_kernels(bundle: Path) -> None:
    """The rows would say what an INT8 graph costs on a card that leaves its products to the processor."""
    int8 = artifact_of(bundle, "onnx/model.onnx", precision="int8", quantized={"MatMulInteger": 4, "Gather": 1})
    assert "its 4 products in INT8" in reason(bundle, device("cuda"), int8)
    tables = int8.model_copy(update={"quantized": {"Gather": 1}})
    for artifact, target in ((int8, device("cpu")), (tables, device("cuda"))):
        assert estimate(Bundle.open(bundle), artifact, target, ITEMS)[0].latency_ms.status == "estimated"


def test_every_shipped_device_gives_an_estimate(bundle: Path) -> None:
    artifact = artifact_of(bundle, "onnx/model.onnx")
    listed = run_listing(ListJob(files=check_artifact(Bundle.open(bundle), artifact), items=ITEMS, threads=1))
    for name in shipped_names("profiles"):
        if name == "host":  # its rates are measured
            continue
        for item in ITEMS:
            row = estimate_row(Case(artifact, artifact, load_profile(name)), listed[item], item)
            assert row.latency_ms.status == "estimated", row.latency_ms.reason
            assert row.memory_bytes.status == "estimated", row.memory_bytes.reason


def test_a_shape_that_the_graph_refuses_does_not_stop_the_others(bundle: Path) -> None:
    items: list[Item] = [("steady", 1, 999), ("steady", 1, 8)]
    refused, fine = estimate(Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx"), device(), items)
    assert refused.latency_ms.status == "unavailable" and "does not accept" in str(refused.latency_ms.reason)
    assert fine.latency_ms.status == "estimated"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import os; os.abort()", "ended early"),
        ("import sys; sys.stderr.write('out of luck'); raise SystemExit(7)", "last line on stderr: out of luck"),
    ],
)
def test_a_listing_process_that_dies_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, program: str, says: str
) -> None:
    monkeypatch.setattr(worker, "worker_command", lambda: [sys.executable, "-c", program])
    assert says in reason(bundle, device())
    with pytest.raises(EdgeformerError, match="were not measured"):
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
    first_call = feed_for(declared, ("steady", 2, 100), np.zeros((2, 100), np.int64))
    assert first_call["past_key_values.0.key"].shape == (2, 8, 0, 64) and first_call["position_ids"].shape == (2, 100)
    with pytest.raises(EdgeformerError, match="'pixels'"):
        feed_for({"pixels": ("tensor(float)", (None, 3))}, ("steady", 1, 4), np.zeros((1, 4), np.int64))
