"""Calibrating this host with a tiny bundle, and comparing estimates with measurements."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeformer.artifacts.device import Calibration, DeviceProfile, FittedCase
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import EdgeformerError, InputError, NoisyMachineError
from edgeformer.artifacts.progress import SILENT
from edgeformer.artifacts.report import Energy, Latency, MeasureRules, Memory, Row
from edgeformer.bundle import Bundle, seal
from edgeformer.estimate import calibrate as calibrate_module
from edgeformer.estimate.calibrate import TimedItem, TimeJob, Timing, calibrate, improve, run_timing, validate
from edgeformer.estimate.estimate import estimate
from edgeformer.estimate.listing import ItemNodes
from edgeformer.estimate.probe import HostRates, ProductTime
from edgeformer.estimate.roofline import known_error
from edgeformer.measurement.artifact import Item, MeasureJob, check_artifact
from edgeformer.measurement.target import DevicePresence
from edgeformer.runtimes.onnxruntime.nodes import ExecutedNode, Tensor
from edgeformer.system.capability import kernel_flags
from edgeformer.system.host import cpu_name, stated_cache_bytes
from edgeformer.system.nvidia import Gpu
from tests.measurement.measuring_child import Recorder
from tests.runtimes.tiny_bundle import POSITIONS, artifact_of, classifier_graph, write_bundle, write_manifest
from tests.training.runs import Messages

RULES = MeasureRules(warmup_min_s=0.05, warmup_max_s=0.5, min_s=0.1, max_s=1.0, idle_s=0.01, energy_s=0.01)
CALL_US = 7.0
PRODUCTS = tuple(
    ProductTime(rows=rows, width=256, weights=weights, duration_us=5 + rows * 2.0 + weights)
    for rows, weights in product((1, 16, 256), (1, 8))
)
RATES = HostRates(products=PRODUCTS, bandwidth=2e10, operator_us=2.0, call_us=CALL_US)
PRECISIONS = ("fp16", "int8", "fp32")  # not the order that they are timed in
NODE_US = {"fp32": 10.0, "int8": 5.0, "fp16": 20.0}
"""Microseconds of a product per row of 512."""
SHAPES = [(2, 8), (1, 24), (4, 3), (1, 8), (1, 25)]  # the model takes 24 tokens
SORTED = [(1, 8), (4, 3), (2, 8), (1, 24)]
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("calibrate") / "bundle", {"model": classifier_graph(50, 64)})


@pytest.fixture(scope="module")
def calibrated(tiny: Path) -> DeviceProfile:
    """A real calibration in one sweep, but for the probe, which takes ten seconds and a hundred megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate_module, "run_probe", lambda threads: RATES)
        patch.setattr(calibrate_module, "SWEEPS", 1)
        return calibrate(tiny, load_profile("host"), threads=1, allow_noise=True)


@pytest.mark.slow
def test_a_calibrated_profile_has_measured_facts_and_fitted_rates(calibrated: DeviceProfile) -> None:
    base = load_profile("host")
    fitted, checked = calibrate_module.FIT_SHAPES, calibrate_module.CHECK_SHAPES
    assert not set(fitted) & set(checked), "no shape is both fitted and validated"
    assert (calibrated.name, calibrated.title, calibrated.budgets) == (base.name, base.title, base.budgets)
    calibration = calibrated.calibration
    assert calibration is not None and (calibration.processor, calibration.threads) == (cpu_name(), 1)
    for fact in (calibrated.peaks.fp32, calibrated.bandwidth_bytes_per_s, calibrated.launch_overhead_us):
        assert fact is not None and cpu_name() in fact.source
        assert fact.verified == ("no" if calibration.disturbed else "measured here")
    assert "onnxruntime" in calibration.versions and calibration.error is None
    assert (calibration.instructions, calibration.stated_cache_bytes) == (kernel_flags(), stated_cache_bytes())
    assert {(case.batch, case.seq) for case in calibration.fitted_on} == {(1, 8), (2, 24), (4, 8), (16, 8)}
    assert {"gemm", "lookup", "elementwise", "layout"} <= set(calibration.efficiencies["fp32"])
    for case in calibration.fitted_on:
        # a handful of nodes that take microseconds each: only the order of magnitude is stable
        assert case.estimated_ms is not None and abs(math.log2(case.estimated_ms / case.measured_ms)) < 1.5


@pytest.mark.slow
def test_estimates_are_compared_with_measurements(tiny: Path, calibrated: DeviceProfile) -> None:
    device = validate(tiny, calibrated, [(1, 16), (8, 16)], rules=RULES)
    cases = device.calibration.validated_on
    assert [(case.batch, case.seq, case.artifact) for case in cases] == [(1, 16, "model"), (8, 16, "model")]
    bundle = Bundle.open(tiny)
    (row,) = estimate(bundle, bundle.artifacts[0], device, [("steady", 1, 16)])
    assert row.latency_ms.p50 == pytest.approx(cases[0].estimated_ms)
    with pytest.raises(InputError, match="calibration used every one of these shapes"):
        validate(tiny, calibrated, [(1, 8), (2, 24)], rules=RULES)


def test_a_timing_worker_leaves_out_what_is_beyond_its_budget(tiny: Path) -> None:
    checked = check_artifact(Bundle.open(tiny), artifact_of(tiny, "onnx/model.onnx"))
    items: tuple[Item, ...] = (("steady", 1, 8), ("steady", 2, 8))
    timing = run_timing(TimeJob(files=checked, items=items, threads=1, nodes=False, budget_s=-1.0))
    assert timing.items == () and set(timing.refused) == {"1×8", "2×8"}
    assert "the -1 s for timing this artifact had passed" in timing.refused["1×8"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full graphs in three precisions, and artifacts that must not be timed."""
    excluded: dict[str, dict[str, Any]] = {"exit1": {"role": "exit", "exit": 1}, "trimmed": {"trimmed": True}}
    excluded |= {"engine": {"format": "tensorrt"}, "rejected": {"status": "rejected"}}
    names = [*excluded, *PRECISIONS]
    folder = write_bundle(tmp_path_factory.mktemp("calibrating") / "bundle", dict.fromkeys(names, classifier_graph()))
    entries = [artifact_of(folder, f"onnx/{name}.onnx", **changes) for name, changes in excluded.items()]
    entries += [artifact_of(folder, f"onnx/{name}.onnx", precision=name) for name in PRECISIONS]
    write_manifest(folder, entries)
    return folder


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Measuring processes that answer at once; what they were given, and what they shall answer."""
    state = SimpleNamespace(jobs=[], threads=[], refused={}, disturbed={})

    def run_probe(threads: int) -> HostRates:
        state.threads.append(threads)
        return RATES.model_copy(update={"disturbed": state.disturbed.get("probe")})

    def run_timing(job: TimeJob, progress: Any, title: str) -> Timing:
        state.jobs.append(job)
        precision, items = job.files.artifact.precision, []
        refused = state.refused.get(precision, ())
        for item in job.items:
            rows = item[1] * item[2]
            weight, states = Tensor("float", (512, 512)), Tensor("float", (rows, 512))
            node = ExecutedNode("MatMul", "n", (states, weight), (states,), weight.bytes, 0.0)
            nodes = tuple(replace(node, duration_us=NODE_US[precision] * rows + extra_us) for extra_us in (1.0, 3.0))
            if item[1:] not in refused:
                listed = ItemNodes(item=item, nodes=nodes, runs=1, feed_bytes=8 * rows) if job.nodes else None
                call_us = sum(node.duration_us for node in nodes) + CALL_US
                items.append(TimedItem(item=item, call_us=call_us, nodes=listed))
        reasons = {f"{batch}×{seq}": "out of memory" for batch, seq in refused}
        return Timing(items=tuple(items), refused=reasons, disturbed=state.disturbed.get(precision))

    monkeypatch.setattr(calibrate_module, "run_probe", run_probe)
    monkeypatch.setattr(calibrate_module, "run_timing", run_timing)
    monkeypatch.setattr(calibrate_module, "default_threads", lambda: 3)
    return state


def test_every_precision_is_timed_at_the_shapes_that_the_model_takes(bundle: Path, host: SimpleNamespace) -> None:
    device = calibrate(bundle, load_profile("host"), shapes=SHAPES)
    forward, backward = ("fp32", "int8", "fp16"), ("fp16", "int8", "fp32")
    assert [job.files.artifact.id for job in host.jobs] == [*forward, *backward, *forward]
    assert [job.nodes for job in host.jobs] == [True] * 3 + [False] * 6, "nodes are listed once"
    for job in host.jobs:
        assert job.items == tuple(("steady", batch, seq) for batch, seq in SORTED), "from small to large"
        assert (job.threads, job.budget_s) == (3, pytest.approx(200 / 9))
    calibration = device.calibration
    assert calibration is not None and host.threads == [3] and calibration.threads == 3
    assert set(calibration.efficiencies) == set(calibration.call_overhead_us) == {"fp32", "int8", "fp16"}
    fitted = [(case.precision, (case.batch, case.seq)) for case in calibration.fitted_on]
    assert fitted == [*product(forward, SORTED)]
    for case in calibration.fitted_on:
        assert case.measured_ms == pytest.approx((2 * NODE_US[case.precision] * case.batch * case.seq + 11) / 1000)
        assert case.estimated_ms == pytest.approx(case.measured_ms, rel=0.05)
    two = calibrate(bundle, load_profile("host"), shapes=SHAPES, threads=2)
    assert two.cores is not None and (host.threads[-1], two.cores.value) == (2, 2)


@pytest.mark.parametrize("process", ["int8", "probe"])
def test_disturbed_times_are_no_verified_facts(bundle: Path, host: SimpleNamespace, process: str) -> None:
    messages = Messages()
    host.disturbed = {process: "other processes used 1.4 cores"}
    message = r"other processes used 1\.4 cores; nothing was written;.* --allow-noise"
    with pytest.raises(NoisyMachineError, match=message):
        calibrate(bundle, load_profile("host"), shapes=SHAPES)
    device = calibrate(bundle, load_profile("host"), shapes=SHAPES, allow_noise=True, progress=messages)
    count = {"int8": 3, "probe": 1}[process]
    text = f"{count} of 10 measuring processes were disturbed: other processes used 1.4 cores"
    assert device.calibration is not None and device.calibration.disturbed == text
    facts = (device.peaks.fp32, device.bandwidth_bytes_per_s, device.launch_overhead_us, device.cache_bytes)
    assert [fact.verified for fact in facts if fact is not None] == ["no"] * 4
    assert messages.lines == [f"the calibration is unreliable, because {text}; calibrate again on an idle machine"]


def test_a_disturbed_calibration_keeps_the_profile_that_is_there(bundle, host, tmp_path):
    host.disturbed = {"fp32": "other processes used 1.4 cores"}
    options = calibrate_module.CalibrationOptions(True, False, (), None, None)
    (tmp_path / "host.yaml").write_text("an earlier calibration", encoding="utf-8")
    with pytest.raises(NoisyMachineError) as refused:
        improve(bundle, load_profile("host"), options, tmp_path)
    assert refused.value.exit_code == 4
    assert (tmp_path / "host.yaml").read_text(encoding="utf-8") == "an earlier calibration"
    improve(bundle, load_profile("host"), replace(options, allow_noise=True), tmp_path)
    kept = load_profile("host", tmp_path).calibration
    assert kept is not None and kept.disturbed is not None


def test_a_repeated_timing_counts_its_shapes_again(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """The second process of a disturbed timing has a bar of its own, so that none exceeds its total."""
    item: Item = ("steady", 1, 8)
    first, disturbed = TimedItem(item=item, call_us=1.0), calibrate_module.Disturbance(text="other work")
    answers: list[list[Any]] = [[first, disturbed], [TimedItem(item=item, call_us=2.0)]]

    def run_job(job: TimeJob, take: Any) -> SimpleNamespace:
        for message in answers.pop(0):
            take(message)
        return SimpleNamespace(reason=None)

    monkeypatch.setattr(calibrate_module, "run_job", run_job)
    files = check_artifact(Bundle.open(tiny), artifact_of(tiny, "onnx/model.onnx"))
    job = TimeJob(files=files, items=(item,), threads=1, nodes=False, budget_s=1.0)
    progress = Recorder()
    timing = run_timing(job, progress, "Timing it")
    assert timing.disturbed is None and timing.items[0].call_us == 2.0
    assert progress.started == ["Timing it", "Timing it again, because other work disturbed it"]
    assert (progress.totals, progress.advanced) == ([1, 1], 2)


def test_shapes_that_could_not_be_timed_are_named_and_four_must_remain(bundle: Path, host: SimpleNamespace) -> None:
    messages = Messages()
    host.refused = {"int8": ((4, 3), (1, 24))}
    device = calibrate(bundle, load_profile("host"), shapes=SHAPES, progress=messages)
    assert messages.lines == [f"int8 at {shape}: not used for the fit: out of memory" for shape in ("4×3", "1×24")]
    assert device.calibration is not None and len(device.calibration.fitted_on) == 10
    host.refused = {"fp32": ((4, 3),)}
    with pytest.raises(EdgeformerError, match="fewer than 4 shapes of the FP32 graph"):
        calibrate(bundle, load_profile("host"), shapes=SHAPES)


def test_nothing_is_measured_that_could_not_be_fitted(bundle: Path, host: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"takes at most 24 tokens, so only 3 shapes"):
        calibrate(bundle, load_profile("host"), shapes=[(2, 8), (1, 24), (1, 8), (1, 25), (9, 26)])
    with pytest.raises(InputError, match="--device rtx4050: is a GPU"):
        calibrate(bundle, load_profile("rtx4050"), shapes=SHAPES)
    absent = load_profile("host").model_copy(update={"name": "theirs", "match": "Another 9000"})
    with pytest.raises(InputError, match=r"--device theirs: this host's processor is .*; run calibrate on that device"):
        calibrate(bundle, absent, shapes=SHAPES)
    folder = write_bundle(tmp_path / "bundle")
    for changes in ({"precision": "int8"}, {"trimmed": True}, {"role": "exit", "exit": 1}):
        write_manifest(folder, [artifact_of(folder, "onnx/model.onnx", **changes)])
        with pytest.raises(InputError, match="has no FP32 ONNX graph"):
            calibrate(folder, load_profile("host"), shapes=SHAPES)
    assert host.threads == host.jobs == []


def test_each_of_three_models_is_left_out_once(bundle: Path, host: SimpleNamespace, tmp_path: Path) -> None:
    models = [write_bundle(tmp_path / name / "bundle") for name in ("second", "third")]
    for folder, name in zip(models, ("second", "third"), strict=True):
        seal(folder, Bundle.open(folder).manifest.model_copy(update={"run": name}))
    two = calibrate(bundle, load_profile("host"), shapes=SHAPES, further=models[:1]).calibration
    assert two is not None and two.error is None, "two models say nothing of a third"
    three = calibrate(bundle, load_profile("host"), shapes=SHAPES, further=models).calibration
    assert three is not None and three.error is not None and three.error.models == 3
    # only one model has INT8 and FP16 graphs
    assert [case.run for case in three.left_out] == [name for name in ("tiny", "second", "third") for _ in SORTED]
    assert {case.precision for case in three.left_out} == {"fp32"}
    with pytest.raises(InputError, match="--also: tiny is given twice"):
        calibrate(bundle, load_profile("host"), shapes=SHAPES, further=[bundle])


def device_of(*fitted: tuple[str, str, int, int], **changes: Any) -> DeviceProfile:
    cases = tuple(FittedCase(run=run, artifact=id_, batch=b, seq=s, measured_ms=1.0) for run, id_, b, s in fitted)
    calibration = Calibration(
        created="now", processor=cpu_name(), threads=3, provider="CPUExecutionProvider", efficiencies={},
        fitted_on=cases,
    )  # fmt: skip
    return DeviceProfile(name="host", title="Host", kind="cpu", calibration=calibration).model_copy(update=changes)


class Machine:
    """Made-up measurements: a call takes its rows times its tokens in milliseconds; estimates are twice that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.specs: list[MeasureJob] = []
        self.measured: dict[tuple[int, int], Latency | None] = {}
        self.estimated: dict[tuple[int, int], Latency] = {}
        monkeypatch.setattr(calibrate_module, "measure_artifact", self.measure)
        monkeypatch.setattr(calibrate_module, "estimate", self.estimate)

    def row(self, item: Item, latency: Latency) -> Row:
        phase, batch, seq = item
        return Row(
            artifact="model", precision="fp32", provider="p", where="host", phase=phase, batch=batch, seq=seq,
            latency_ms=latency, memory_bytes=Memory(status="unavailable"), size_bytes=1,
            energy_mj=Energy(status="unavailable"),
        )  # fmt: skip

    def measure(self, spec: MeasureJob, progress: Any) -> list[Row]:
        self.specs.append(spec)
        rows = [self.row(("cold", *item[1:]), Latency(status="measured", p50=999.0)) for item in spec.items]  # type: ignore[arg-type]
        for shape in [item[1:] for item in spec.items]:
            usual = Latency(status="measured", p50=float(shape[0] * shape[1]), stable=True)
            if (latency := self.measured.get(shape, usual)) is not None:
                rows.append(self.row(("steady", *shape), latency))
        return rows

    def estimate(self, bundle: Bundle, artifact: Any, device: DeviceProfile, items: Any) -> list[Row]:
        usual = {item: Latency(status="estimated", p50=2.0 * item[1] * item[2]) for item in items}
        return [self.row(item, self.estimated.get(item[1:], latency)) for item, latency in usual.items()]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a full graph in FP32 and in FP16."""
    folder = write_bundle(tmp_path_factory.mktemp("check") / "bundle", {"model": classifier_graph(50, 64)})
    full = artifact_of(folder, "onnx/model.onnx")
    write_manifest(folder, [full, full.model_copy(update={"id": "half", "precision": "fp16"})])
    return folder


def validation(bundle: Path, device: DeviceProfile, shapes: Any, progress: Any = SILENT) -> Calibration:
    return validate(bundle, device, shapes, rules=RULES, progress=progress).calibration


def test_unfitted_shapes_of_the_fp32_graph_are_measured_from_the_smallest_on(halves: Path, machine: Machine) -> None:
    shapes = [(4, 8), (2, 8), (8, 2), (1, 8), (1, POSITIONS), (1, POSITIONS + 1)]
    name = Bundle.open(halves).name
    device = device_of((name, "model", 2, 8), (name, "half", 1, 8), ("other", "model", 1, 8))
    cases = validation(halves, device, shapes).validated_on
    (spec,) = machine.specs
    unseen = sorted([(1, 8), (8, 2), (4, 8), (1, POSITIONS)], key=lambda shape: (shape[0] * shape[1], shape))
    assert list(spec.items) == [("steady", *shape) for shape in unseen]
    assert (spec.provider, spec.threads, spec.rules) == ("CPUExecutionProvider", 3, RULES)
    assert {(case.run, case.artifact) for case in cases} == {(name, "model")}
    assert [(case.batch, case.seq) for case in cases] == unseen
    assert all(case.estimated_ms == 2 * case.measured_ms for case in cases)


def test_bad_input_is_told_from_a_failed_measurement(halves: Path, machine: Machine) -> None:
    fitted = device_of((Bundle.open(halves).name, "model", 1, 8))
    for shapes in ([(1, 8)], [(1, POSITIONS + 1)]):
        with pytest.raises(InputError, match="or they are too long for the model"):
            validate(halves, fitted, shapes)
    with pytest.raises(InputError, match="'host' has no calibration; run edgeformer calibrate"):
        validate(halves, load_profile("host"), [(1, 16)])
    elsewhere = fitted.calibration.model_copy(update={"processor": "Another 9000"})
    moved = fitted.model_copy(update={"calibration": elsewhere})
    with pytest.raises(InputError, match="calibrated on another processor"):
        validate(halves, moved, [(1, 16)])
    assert machine.specs == []
    machine.measured[1, 4] = None
    with pytest.raises(EdgeformerError, match="no shape has both a measurement and an estimate") as raised:
        validate(halves, fitted, [(1, 4)])
    assert not isinstance(raised.value, InputError)


def test_cases_that_are_not_compared_are_named_and_stable_ones_make_the_error(halves: Path, machine: Machine) -> None:
    machine.measured = {
        (1, 1): None,
        (1, 2): Latency(status="unavailable", reason="it crashed"),
        (1, 4): Latency(status="measured", p50=64.0, stable=False, warnings=("drifted", "noisy")),
    }
    machine.estimated = {
        (1, 3): Latency(status="unavailable", reason="no such operator"),
        (1, 6): Latency(status="estimated", p50=1.5),
    }
    messages = Messages()
    calibration = validation(halves, device_of(), [(1, seq) for seq in range(1, 8)], messages)
    stable = {case.seq: case.stable for case in calibration.validated_on}
    assert stable == {4: False, 5: True, 6: True, 7: True}
    assert messages.lines == [
        "model at 1×1: not compared: no row",
        "model at 1×2: not compared: it crashed",
        "model at 1×3: not compared: no such operator",
        "model at 1×4: left out of the error, because the measurement is unstable: drifted; noisy",
    ]
    error = calibration.error
    assert error is not None and (error.kind, error.device, error.cases) == ("cpu", cpu_name(), 3)
    assert (error.median_log2, error.worst_log2) == (1.0, 2.0), "too much and too little count alike"
    assert validation(halves, device_of(), [(1, 4)]).error is None, "no stable case"


def test_a_card_is_checked_in_both_precisions_where_it_is(halves, machine, monkeypatch, tmp_path):
    card = load_profile("h100")
    options = calibrate_module.CalibrationOptions(False, True, ((1, 4), (2, 8)), None, RULES)
    target = DevicePresence(True, f"present: {CARD}", Gpu(0, CARD, "GPU-0", None, "9.0"))
    monkeypatch.setattr(calibrate_module, "find_target", lambda device: target)
    with pytest.raises(InputError, match=f"CPUExecutionProvider here, not on {CARD}"):
        improve(halves, card, options, tmp_path)
    monkeypatch.setattr(calibrate_module, "default_provider", lambda: "CUDAExecutionProvider")
    _, path = improve(halves, card, options, tmp_path)
    measured = {spec.files.artifact.id: spec.provider for spec in machine.specs}
    assert measured == dict.fromkeys(("model", "half"), "CUDAExecutionProvider") and len(machine.specs) == 2
    kept = load_profile("h100", tmp_path)
    assert kept.calibration is not None and len(kept.calibration.validated_on) == 4
    assert kept.calibration.efficiencies == {}, "estimates stay those of the facts"
    assert kept.model_copy(update={"calibration": None}) == card, "nothing else of the profile changes"
    error = known_error(kept)
    assert error is not None and (error.kind, error.device, error.cases, error.median_log2) == ("cuda", CARD, 4, 1.0)
    assert "calibrate --validate" in path.read_text(encoding="utf-8").splitlines()[0]
    assert known_error(kept.model_copy(update={"match": "NVIDIA H200"})) is None
    monkeypatch.setattr(calibrate_module, "find_target", lambda device: DevicePresence(False, "no such card"))
    with pytest.raises(InputError, match="--validate: no such card; run it on that device"):
        improve(halves, card, options, tmp_path)
