"""Estimated rows: from nodes that were listed by hand, and from real listings of a tiny bundle."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.device import Calibration, DeviceProfile, Efficiency, EstimateError, Fact, FittedCase, Peaks
from edgeformer.artifacts.documents import load_profile, shipped_names
from edgeformer.artifacts.errors import EdgeformerError
from edgeformer.artifacts.manifest import ArtifactManifest, EngineBuild, Sharing
from edgeformer.artifacts.report import Row
from edgeformer.bundle import Bundle
from edgeformer.estimate import estimate as stage
from edgeformer.estimate.estimate import Case, estimate, estimate_row, estimated_providers, onnx_origin
from edgeformer.estimate.listing import ItemNodes, ListJob, feed_for, run_listing
from edgeformer.estimate.operators import count_nodes, stored_weight_bytes, total
from edgeformer.estimate.probe import run_probe
from edgeformer.estimate.published import Setting, published_record
from edgeformer.estimate.roofline import calibrated_nodes_us, estimate_memory, rates_of, work_ms
from edgeformer.measurement.artifact import Item, check_artifact
from edgeformer.report.sentences import published_sentence
from edgeformer.runtimes import ALL_RUNTIMES
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor
from edgeformer.system import worker
from edgeformer.system.host import cpu_name
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, write_bundle

ITEM: Item = ("steady", 4, 16)
TOKEN: Item = ("decode", 1, 64)
ITEMS: tuple[Item, ...] = (("steady", 1, 8), ("steady", 4, 16))
WEIGHT = 256 * 512 * 4
LINEAR = ExecutedNode(
    "MatMul", "n", (Tensor("float", (4, 16, 256)), Tensor("float", (256, 512))), (Tensor("float", (4, 16, 512)),),
    WEIGHT, 1.0,
)  # fmt: skip
ADD = ExecutedNode("Add", "n", (Tensor("float", (4, 16, 512)),) * 2, (Tensor("float", (4, 16, 512)),), 0, 1.0)
NODES = (LINEAR, ADD, LINEAR, ADD, ADD)
ENGINE = EngineBuild(builder="b", seconds=1, checked_by="size", activation_bytes=2**22, graph_bytes=1, shapes={})
COMPILED = {"format": "tensorrt-rtx", "engine": ENGINE}


def fact(value: Any) -> Any:
    return Fact(value=value, source="a test", verified="no")


def device(kind: str = "cpu", **changes: Any) -> DeviceProfile:
    base = DeviceProfile(
        name="made-up", title="Made up", kind="cuda" if kind == "cuda" else "cpu",
        peaks=Peaks(fp32=fact(1e11), fp16=fact(4e11), fp16_fp32_accumulate=fact(2e11), int8=fact(8e11)),
        bandwidth_bytes_per_s=fact(2e10), cache_bytes=fact(2**18), context_bytes=fact(100 * 2**20),
        launch_overhead_us=fact(5.0), cores=fact(4),
    )  # fmt: skip
    return base.model_copy(update=changes)


def artifact(precision: Any = "fp32", **changes: Any) -> ArtifactManifest:
    base = ArtifactManifest(
        id="a", file="a", format="onnx", precision=precision, status="built", size_bytes=WEIGHT + 9,
        sharing=Sharing(unique_parameters=1, stored_parameters=1, weight_bytes=WEIGHT),
    )  # fmt: skip
    return base.model_copy(update=changes)


def listed(item: Item = ITEM, runs: int = 1) -> ItemNodes:
    return ItemNodes(item=item, nodes=NODES, runs=runs, feed_bytes=640)


def row_for(target: DeviceProfile, of: ArtifactManifest, origin: ArtifactManifest | None = None, runs: int = 1) -> Row:
    return estimate_row(Case(of, origin or of, target, run="mine"), listed(runs=runs), ITEM)


@pytest.mark.parametrize(
    ("kind", "precision", "float_bytes"),
    [("cpu", "fp32", None), ("cpu", "fp16", None), ("cuda", "fp32", None), ("cuda", "fp16", 2), ("cuda", "int8", None)],
)
def test_a_row_is_the_work_of_its_nodes_at_published_factors(kind, precision, float_bytes):
    target, of = device(kind), artifact(precision)
    works = count_nodes(NODES, float_bytes)
    weights = stored_weight_bytes(NODES, works, of)
    row = row_for(target, of)
    work = work_ms(works, rates_of(target, precision), weights, fused=False)
    setting = Setting(target.kind, target.name, "onnxruntime", precision, "call")
    latency = row.latency_ms
    expected = published_record().estimate_ms(setting, work, total(works).operations)
    assert (latency.p50, latency.low, latency.high, latency.check) == expected
    assert latency.low < latency.p50 < latency.high and latency.reason == published_sentence(expected.check)
    step = max(work.moved_bytes for work in works)
    assert row.memory_bytes == estimate_memory(of, target, WEIGHT, step, 640)
    assert row.work == total(works)
    assert (row.size_bytes, row.threads, row.where) == (WEIGHT + 9, 4 if kind == "cpu" else None, "device")
    assert (row.phase, row.batch, row.seq) == ITEM
    assert row.provider.startswith(kind.upper()), "of the device, not of this host"
    assert (row.energy_mj.status, row.energy_mj.reason) == ("unavailable", "energy is measured, never estimated")


@pytest.mark.parametrize(("of", "weights"), [("fp32", WEIGHT / 2), ("fp16", WEIGHT)])
def test_an_engine_is_fused_and_its_weights_are_its_own_precisions(of: str, weights: float) -> None:
    target, engine, origin = device("cuda"), artifact("fp16", sharing=None, **COMPILED), artifact(of)
    works = count_nodes(NODES, 2)
    row = row_for(target, engine, origin)
    stored = stored_weight_bytes(NODES, works, origin)
    work = work_ms(works, rates_of(target, "fp16"), stored, fused=True)
    setting = Setting("cuda", target.name, "tensorrt", "fp16", "call")
    expected = published_record().estimate_ms(setting, work, total(works).operations)
    assert (row.latency_ms.low, row.latency_ms.high) == pytest.approx((expected.low, expected.high))
    step = max(work.moved_bytes for work in works)
    assert row.memory_bytes == estimate_memory(engine, target, weights, step, 640)
    # nobody audited either: the file's size counts
    plain = row_for(target, engine.model_copy(update={"engine": None}), origin.model_copy(update={"sharing": None}))
    assert plain.memory_bytes == estimate_memory(artifact("fp16"), target, WEIGHT + 9, step, 640)
    audited = artifact("fp16", **COMPILED)
    row = row_for(target, audited, artifact("fp16", sharing=None))
    assert row.memory_bytes == estimate_memory(audited, target, WEIGHT, step, 640)


def checked(precision: str, log2: float, run: str = "mine", **changes: Any) -> FittedCase:
    return FittedCase(
        run=run, artifact="a", precision=precision, batch=1, seq=1, measured_ms=1.0, estimated_ms=2**log2
    ).model_copy(update=changes)


def calibrated(*validated: FittedCase, spread: float | None = None, left_out: str = "fp32") -> DeviceProfile:
    """``validated``: at other shapes of models that were fitted; ``spread``: of four models that were left out."""
    result = EstimateError(
        kind="cpu", device="x", cases=6, median_log2=0.1, worst_log2=0.9, created="now", models=4, spread_log2=spread
    )  # fmt: skip
    classes = dict.fromkeys(("gemm", "elementwise"), Efficiency(overhead_us=10.0, of_peak=0.5, of_bandwidth=1.0))
    base = Calibration(
        created="now", processor=cpu_name(), threads=2, provider="CPUExecutionProvider",
        efficiencies=dict.fromkeys(("fp32", "int8"), classes), call_overhead_us={"fp32": 50.0},
        error=result if spread is not None else None, validated_on=validated,
        left_out=(checked(left_out, 0.1, "other"),) if spread is not None else (),
        fitted_on=(checked("fp32", 0.0),) * 5,
    )  # fmt: skip
    return device(calibration=base)


@pytest.mark.parametrize("runs", [1, 3])
def test_a_calibrated_row_has_the_fitted_time_in_its_middle(runs: int) -> None:
    target = calibrated(spread=0.5)
    works = count_nodes(NODES)
    weights = stored_weight_bytes(NODES, works, artifact())
    nodes_us = calibrated_nodes_us(works, rates_of(target, "fp32"), target.calibration, "fp32", weights)
    middle = (runs * 50.0 + sum(nodes_us)) / 1000
    row = row_for(target, artifact(), runs=runs)
    assert row.latency_ms.p50 == pytest.approx(middle)
    assert (row.latency_ms.low, row.latency_ms.high) == pytest.approx((middle / 2**0.5, middle * 2**0.5))
    says = "the range is the largest error in a cross-validation of 6 cases of 4 models"
    assert f"calibrated on {cpu_name()} with 5 shapes; {says}" in str(row.latency_ms.reason)
    assert row.threads == 2


def test_operators_that_a_calibration_never_saw_have_the_range_of_published_times() -> None:
    pool = replace(ADD, op="MaxPool")
    items, plain = (listed().model_copy(update={"nodes": (LINEAR, second)}) for second in (pool, ADD))
    case, bare = (Case(artifact(), artifact(), target) for target in (calibrated(spread=0.5), device()))
    unchecked, sure, published = (
        estimate_row(of, nodes, ITEM).latency_ms for of, nodes in ((case, items), (case, plain), (bare, items))
    )
    assert unchecked.p50 == pytest.approx(sure.p50) and unchecked.warnings and not sure.warnings
    assert unchecked.p50 and unchecked.high and published.p50 and published.high and sure.high
    assert unchecked.high / unchecked.p50 == pytest.approx(published.high / published.p50)
    assert unchecked.high > sure.high and unchecked.check is None


def test_operators_without_a_known_cost_are_not_estimated_if_they_may_take_most_of_the_time() -> None:
    unknown = replace(ADD, op="Mystery")
    case, nodes = Case(artifact(), artifact(), device()), listed().model_copy(update={"nodes": NODES * 20})
    lists = (nodes.model_copy(update={"nodes": (*nodes.nodes, *(unknown,) * count)}) for count in (1, 100))
    some, most = (estimate_row(case, each, ITEM).latency_ms for each in lists)
    assert some.status == "estimated" and "Mystery (1) were never checked" in some.warnings[0]
    assert most.status == "unavailable" and "operators without a known cost" in str(most.reason)


FOUR = tuple(checked("fp32", log2) for log2 in (0.1, -0.2, 0.05, 0.1))
GUESS = "so the range is a guess"


@pytest.mark.parametrize(
    ("target", "of", "item", "log2", "says"),
    [
        (calibrated(), artifact(), ITEM, 0.6, "the calibration has no cross-validation over models, " + GUESS),
        (calibrated(spread=0.3), artifact(), ITEM, 0.3, "of 4 models"),
        (calibrated(spread=0.3), artifact(role="exit"), ITEM, 0.3, "cross-validation of"),
        (calibrated(spread=0.3), artifact(role="step"), ITEM, 0.6, GUESS),
        (calibrated(spread=0.3), artifact(role="decode"), ITEM, 0.6, GUESS),
        (calibrated(spread=0.3), artifact(role="decode"), TOKEN, 0.6, "covers fp32 calls only"),
        (calibrated(spread=0.3), artifact("int8"), ITEM, 0.6, "covers fp32 calls only"),
        (calibrated(spread=0.9), artifact("int8"), ITEM, 0.9, GUESS),
        (calibrated(spread=0.3, left_out="int8"), artifact("int8"), ITEM, 0.3, "cross-validation of"),
        (calibrated(*FOUR), artifact(), ITEM, 0.2, "the worst error on 4 other shapes of this model"),
        (calibrated(*FOUR, spread=0.3), artifact(), ITEM, 0.2, "other shapes of this model"),
        (calibrated(*FOUR), artifact("int8"), ITEM, 0.6, GUESS),
        (calibrated(*FOUR[1:], spread=0.3), artifact(), ITEM, 0.3, "cross-validation of"),
        (calibrated(*FOUR[1:], checked("fp32", 0.1, "theirs")), artifact(), ITEM, 0.6, GUESS),
        (calibrated(*FOUR[1:], checked("fp32", 0.1, stable=False)), artifact(), ITEM, 0.6, GUESS),
        (calibrated(*(checked("fp32", 0.4),) * 3, checked("fp32", 0.5)), artifact(), ITEM, 0.8, "of this model"),
    ],
)
def test_a_range_is_as_narrow_as_what_is_known_of_this_model_or_of_others(target, of, item, log2, says):
    latency = estimate_row(Case(of, of, target, run="mine"), listed(item), item).latency_ms
    assert latency.high / latency.p50 == pytest.approx(2**log2)
    assert says in str(latency.reason)


def test_an_item_that_was_not_listed_says_why() -> None:
    case = Case(artifact(size_bytes=None), artifact(), device())
    row = estimate_row(case, "too long", ITEM)
    assert row.latency_ms.reason == row.memory_bytes.reason == "too long"
    assert (row.latency_ms.status, row.size_bytes, row.where) == ("unavailable", 0, "device")
    lacking = estimate_row(Case(artifact(), artifact(), device(launch_overhead_us=None)), listed(), ITEM)
    assert lacking.latency_ms.status == "unavailable" and "launch_overhead_us" in str(lacking.latency_ms.reason)
    assert lacking.size_bytes == WEIGHT + 9


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("rows") / "bundle", {"model": classifier_graph(50, 64)})


def test_the_graph_of_an_engine_is_that_of_its_exit_in_its_precision_or_a_float_one(bundle: Path) -> None:
    manifest = Bundle.open(bundle).manifest
    engine = artifact("fp16", id="engine", role="exit", exit=2, **COMPILED)

    def origin(*base: ArtifactManifest, of: ArtifactManifest = engine) -> str | None:
        result = onnx_origin(manifest.model_copy(update={"artifacts": base}), of)
        return None if result is None else result.id

    def exit_(precision: str, **changes: Any) -> ArtifactManifest:
        return artifact(precision, id=precision, role="exit", exit=2, **changes)

    fp32, fp16, int8 = exit_("fp32"), exit_("fp16"), exit_("int8")
    assert origin(fp32, fp16, int8, engine) == "fp16"
    assert origin(int8, fp32) == "fp32"
    assert origin(fp32, fp16, int8, of=exit_("int8", **COMPILED)) == "fp32", "it is quantized in another way"
    assert origin(fp16, int8, of=exit_("int8", **COMPILED)) == "fp16"
    assert origin(int8) is None and origin() is None
    for other in ({"status": "rejected"}, {"exit": 1}, {"trimmed": True}, {"role": "step"}, COMPILED):
        assert origin(fp32, fp16.model_copy(update=other)) == "fp32", other
    assert origin(fp16, of=fp32) == "fp32", "a graph is its own"


def test_what_is_estimated_is_listed_once_with_one_thread(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = []

    def run(spec: Any) -> dict[Item, ItemNodes | str]:
        specs.append(spec)
        return {ITEM: listed(), TOKEN: "too long"}

    monkeypatch.setattr(stage, "run_listing", run)
    opened, of = Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx")
    first, second = estimate(opened, of, device(), [ITEM, TOKEN])
    assert (first.latency_ms.status, second.latency_ms.status) == ("estimated", "unavailable")
    assert second.latency_ms.reason == "too long"
    (spec,) = specs
    assert (spec.items, spec.threads, spec.files.artifact.id) == ((ITEM, TOKEN), 1, of.id)


def test_each_runtime_has_its_own_estimate_whether_it_is_installed_or_not(bundle: Path) -> None:
    opened, of = Bundle.open(bundle), artifact_of(bundle, "onnx/model.onnx")
    pi, card = (load_profile(name) for name in ("raspberry-pi-5", "t4"))
    assert estimated_providers(of, "cpu", None) == (None,)
    every = estimated_providers(of, "cpu", ALL_RUNTIMES)
    assert every == ("CPUExecutionProvider", "openvino-cpu")
    assert "CUDAExecutionProvider" in estimated_providers(of, "cuda", ALL_RUNTIMES)
    rows = estimate(opened, of, pi, [ITEM], every)
    assert [row.provider for row in rows] == [*every]
    assert len({row.latency_ms.p50 for row in rows}) == len(rows)
    assert all(row.latency_ms.status == "estimated" for row in rows)
    (on_card,) = estimate(opened, of, card, [ITEM])
    assert on_card.latency_ms.check is not None and on_card.latency_ms.check.rows > 0
    assert len(on_card.latency_ms.check.nearest) == 3


def reason(bundle: Path, target: DeviceProfile, artifact: ArtifactManifest | None = None) -> str:
    result = estimate(Bundle.open(bundle), artifact or artifact_of(bundle, "onnx/model.onnx"), target, ITEMS)
    assert {row.latency_ms.status for row in result} == {row.memory_bytes.status for row in result} == {"unavailable"}
    assert [(row.phase, row.batch, row.seq) for row in result] == list(ITEMS)
    return str(result[0].latency_ms.reason)


def test_engines_and_int8_are_estimated_for_their_own_kind_of_card_only(bundle: Path) -> None:
    built_for = {"compute_capability": "8.9"}
    engine = artifact("fp16", id="engine", sharing=None, size_bytes=2**20, built_for=built_for, **COMPILED)
    (row, _) = estimate(Bundle.open(bundle), engine, device("cuda", compute_capability=fact("8.9")), ITEMS)
    assert (row.artifact, row.provider, row.precision) == ("engine", "tensorrt-rtx", "fp16")
    assert row.latency_ms.status == row.memory_bytes.status == "estimated"
    newer = device("cuda", compute_capability=fact("9.0"))
    assert "built for compute capability 8.9; 'made-up' has 9.0" in reason(bundle, newer, engine)
    assert "run on NVIDIA GPUs only" in reason(bundle, device("cpu"), engine)
    int8 = artifact_of(bundle, "onnx/model.onnx", precision="int8", quantized={"MatMulInteger": 4, "Gather": 1})
    says = reason(bundle, device("cuda"), int8)
    assert "its 4 products in INT8 (MatMulInteger, uint8 × int8)" in says and "leaves them to the CPU" in says
    tables = int8.model_copy(update={"quantized": {"Gather": 1}})
    for of, target in ((int8, device("cpu")), (tables, device("cuda"))):
        assert estimate(Bundle.open(bundle), of, target, ITEMS)[0].latency_ms.status == "estimated"


def test_a_format_that_no_installed_runtime_opens_is_a_row_with_a_reason(bundle: Path) -> None:
    of = artifact_of(bundle, "onnx/model.onnx").model_copy(update={"format": "of-a-plug-in"})
    assert "no installed runtime opens the format 'of-a-plug-in'" in reason(bundle, device(), of)


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


def test_a_listing_process_that_dies_is_a_reason(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    program = "import sys; sys.stderr.write('out of luck'); raise SystemExit(7)"
    monkeypatch.setattr(worker, "worker_command", lambda: [sys.executable, "-c", program])
    assert "ended early: exit code 7; last line on stderr: out of luck" in reason(bundle, device())
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
