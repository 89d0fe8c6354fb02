"""Which cases are compared, and what is said of those that are not; measuring and estimating are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.device import Calibration, DeviceProfile, EstimateError, FittedCase, Response, Speed
from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.artifacts.progress import Silent
from edgeformer.artifacts.report import Energy, Latency, Memory, Row
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.measurement import Item, MeasureSpec
from edgeformer.benchmark.request import Target
from edgeformer.bundle import Bundle
from edgeformer.estimate import validate as stage
from edgeformer.estimate.rates import known_error
from edgeformer.estimate.validate import CalibrationOptions, check_estimates, improve, with_error
from edgeformer.system.host import cpu_name
from edgeformer.system.nvidia import Gpu
from tests.runtimes.tiny_bundle import POSITIONS, artifact_of, classifier_graph, write_bundle, write_manifest

RULES = MeasureRules(min_s=0.5)


class Messages(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_bundle(tmp_path_factory.mktemp("check") / "bundle", {"model": classifier_graph(50, 64)})
    full = artifact_of(folder, "onnx/model.onnx")
    write_manifest(folder, [full, full.model_copy(update={"id": "half", "precision": "fp16"})])
    return folder


def device(*fitted: tuple[str, str, int, int], **changes: Any) -> DeviceProfile:
    cases = tuple(FittedCase(run=run, artifact=of, batch=b, seq=s, measured_ms=1.0) for run, of, b, s in fitted)
    known = Calibration(
        created="now", processor=cpu_name(), threads=3, provider="CPUExecutionProvider", efficiencies={},
        fitted_on=cases,
    )  # fmt: skip
    return DeviceProfile(name="host", title="Host", kind="cpu", calibration=known).model_copy(update=changes)


def row(item: Item, latency: Latency) -> Row:
    phase, batch, seq = item
    return Row(
        artifact="model", precision="fp32", provider="p", where="host", phase=phase, batch=batch, seq=seq,
        latency_ms=latency, memory_bytes=Memory(status="unavailable"), size_bytes=1,
        energy_mj=Energy(status="unavailable"),
    )  # fmt: skip


class Machine:
    """A call takes its rows times its tokens in milliseconds; estimates are twice that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.specs: list[MeasureSpec] = []
        self.measured: dict[tuple[int, int], Latency | None] = {}
        self.estimated: dict[tuple[int, int], Latency] = {}
        self.asked: list[Any] = []
        monkeypatch.setattr(stage, "measure_artifact", self.measure)
        monkeypatch.setattr(stage, "estimate", self.estimate)

    def measure(self, spec: MeasureSpec, progress: Any) -> list[Row]:
        assert progress is not None
        self.specs.append(spec)
        rows = [row(("cold", *shape), Latency(status="measured", p50=999.0)) for shape in spec.shapes]  # type: ignore[arg-type]
        for shape in spec.shapes:
            usual = Latency(status="measured", p50=float(shape[0] * shape[1]), stable=True)
            latency = self.measured.get(shape, usual)
            if latency is not None:
                rows.append(row(("steady", *shape), latency))
        return rows

    def estimate(self, bundle: Bundle, artifact: Any, target: DeviceProfile, items: Any) -> list[Row]:
        self.asked.append((bundle.name, artifact.id, target, tuple(items)))
        return [
            row(item, self.estimated.get(item[1:], Latency(status="estimated", p50=2.0 * item[1] * item[2])))
            for item in items
        ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_full_fp32_graphs_are_measured_as_profile_does_from_the_smallest_shape_on(
    bundle: Path, machine: Machine
) -> None:
    shapes = [(4, 8), (2, 8), (8, 2), (1, 8), (1, POSITIONS), (1, POSITIONS + 1)]
    name = Bundle.open(bundle).name
    target = device((name, "model", 2, 8), (name, "half", 1, 8), ("other", "model", 1, 8))
    cases = check_estimates([bundle], target, shapes, rules=RULES)
    (spec,) = machine.specs
    wanted = sorted([(1, 8), (8, 2), (4, 8), (1, POSITIONS)], key=lambda shape: (shape[0] * shape[1], shape))
    assert list(spec.shapes) == wanted and spec.phases == ("steady",)
    assert (spec.provider, spec.threads, spec.rules) == ("CPUExecutionProvider", 3, RULES)
    assert spec.checked.artifact.id == "model"
    assert machine.asked == [(name, "model", target, spec.items)]
    assert list(cases) == [
        FittedCase(
            run=name, artifact="model", precision="fp32", batch=batch, seq=seq,
            measured_ms=batch * seq, estimated_ms=2 * batch * seq,
        )
        for batch, seq in wanted
    ]  # fmt: skip


def test_several_bundles_with_the_usual_rules(bundle: Path, machine: Machine) -> None:
    cases = check_estimates([bundle, bundle], device(), [(1, 8)])
    assert len(cases) == 2 and [spec.rules for spec in machine.specs] == [MeasureRules(energy_s=0.0)] * 2


def test_nothing_to_check_is_told_from_nothing_that_could_be(bundle: Path, machine: Machine) -> None:
    fitted = device((Bundle.open(bundle).name, "model", 1, 8))
    for shapes in ([(1, 8)], [(1, POSITIONS + 1)]):
        with pytest.raises(InputError, match="were fitted or are too long for the model"):
            check_estimates([bundle], fitted, shapes)
    assert machine.specs == []
    machine.measured[1, 4] = None
    with pytest.raises(EdgeformerError, match="no case could be both measured and estimated") as raised:
        check_estimates([bundle], fitted, [(1, 4)])
    assert not isinstance(raised.value, InputError)


def test_what_is_not_compared_is_said_with_its_reason_and_what_is_unstable_too(bundle: Path, machine: Machine) -> None:
    machine.measured = {
        (1, 1): None,
        (1, 2): Latency(status="unavailable", reason="it crashed"),
        (1, 4): Latency(status="measured", p50=4.0, stable=False, warnings=("drifted", "noisy")),
        (1, 5): Latency(status="measured", p50=5.0, stable=False),
        (1, 6): Latency(status="measured", p50=6.0, stable=None),
    }
    machine.estimated = {
        (1, 3): Latency(status="unavailable", reason="no such operator"),
        (1, 1): Latency(status="unavailable", reason="no node"),
        (1, 7): Latency(status="unavailable"),
    }
    said = Messages()
    cases = check_estimates([bundle], device(), [(1, seq) for seq in range(1, 9)], progress=said)
    assert [(case.seq, case.stable) for case in cases] == [(4, False), (5, False), (6, True), (8, True)]
    assert said.lines == [
        "model at 1×1: not compared: no node",
        "model at 1×2: not compared: it crashed",
        "model at 1×3: not compared: no such operator",
        "model at 1×4: the measurement is not stable, and counts for no error: drifted; noisy",
        "model at 1×5: the measurement is not stable, and counts for no error: no reason given",
        "model at 1×7: not compared: not measured",
    ]


def cases_of(*times: tuple[float, float | None, bool]) -> list[FittedCase]:
    return [
        FittedCase(run="r", artifact="a", batch=1, seq=1, measured_ms=measured, estimated_ms=estimated, stable=stable)
        for measured, estimated, stable in times
    ]


def test_what_left_out_models_showed_stays_what_is_said_of_others() -> None:
    """The same model at other shapes is estimated well, which says nothing of a model that was never seen."""
    shown = EstimateError(
        kind="cpu", device="x", cases=40, models=5, median_log2=0.2, worst_log2=0.6, spread_log2=0.5, created="then"
    )
    known = device().calibration
    assert known is not None
    left_out = tuple(cases_of((1.0, 1.3, True)))
    taught = device(calibration=known.model_copy(update={"error": shown, "left_out": left_out}))
    found = with_error(taught, cases_of((1.0, 1.01, True))).calibration
    assert found is not None and found.error == shown and found.left_out == left_out
    assert [case.estimated_ms for case in found.validated_on] == [1.01]


def test_what_is_not_stable_counts_for_no_error() -> None:
    found = with_error(device(), cases_of((1.0, 2.0, True), (1.0, 8.0, False))).calibration
    assert found is not None and found.error is not None and (found.error.cases, found.error.worst_log2) == (1, 1.0)
    nothing = with_error(device(), cases_of((1.0, 8.0, False))).calibration
    assert nothing is not None and nothing.error is None and len(nothing.validated_on) == 1


def test_a_measurement_is_compared_at_the_speed_that_estimates_hold_for(
    bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product takes 1.5 times as long as when it was calibrated, and so does everything else."""

    class Slow:
        def speed(self) -> Speed:
            return Speed(product_us=600.0, copy_us=1.0)

        def close(self) -> None:
            pass

    monkeypatch.setattr(stage, "Reference", Slow)
    known = device().calibration
    assert known is not None
    at = {"speed": Speed(product_us=400.0, copy_us=1.0), "response": Response(of_product=1.0)}
    taught = device(calibration=known.model_copy(update=at))
    cases = check_estimates([bundle], taught, [(1, 4), (2, 8)])
    assert [case.measured_ms for case in cases] == pytest.approx([4 / 1.5, 16 / 1.5])
    assert [spec.shapes for spec in machine.specs] == [((1, 4),), ((2, 8),)], "the speed around each"


def test_an_error_is_of_the_cases_that_were_estimated() -> None:
    cases = cases_of((1.0, 4.0, True), (8.0, 4.0, True), (2.0, 2.0, True), (1.0, None, True))
    found = with_error(device(), cases).calibration
    assert found is not None and found.error is not None and found.validated_on == tuple(cases)
    assert (found.error.kind, found.error.device, found.error.cases) == ("cpu", cpu_name(), 3)
    assert (found.error.median_log2, found.error.worst_log2) == (1.0, 2.0)
    assert found.error.created[:2] == "20"
    with pytest.raises(InputError, match="'host' has no calibration; run edgeformer calibrate"):
        with_error(device(calibration=None), cases)


@pytest.mark.parametrize(("calibrates", "checks"), [(True, False), (False, True), (True, True)])
def test_a_profile_is_kept_when_it_was_calibrated_and_again_when_it_was_checked(
    bundle: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calibrates: bool, checks: bool
) -> None:
    did: list[Any] = []
    fresh, said = device(title="Calibrated"), Messages()

    def calibrate(folder: Path, base: DeviceProfile, *, further: Any, threads: int | None, progress: Any) -> Any:
        did.append(("calibrate", folder, base.title, further, threads, progress))
        return fresh

    def write(profile: DeviceProfile, folder: Path) -> Path:
        did.append(("write", profile.calibration is not None and profile.calibration.error is not None, folder))
        return folder / "host.yaml"

    monkeypatch.setattr(stage, "calibrate", calibrate)
    monkeypatch.setattr(stage, "write_profile", write)
    options = CalibrationOptions(calibrates, checks, ((1, 4), (1, 6)), 5, RULES, (tmp_path / "also",))
    machine.measured[1, 4] = Latency(status="measured", p50=1.0, stable=False)
    found, path = improve(bundle, device(), options, tmp_path, said)
    assert path == tmp_path / "host.yaml"
    assert found.title == ("Calibrated" if calibrates else "Host")
    calibrated = (
        [("calibrate", bundle, "Host", (tmp_path / "also",), 5, said), ("write", False, tmp_path)] if calibrates else []
    )
    assert did == [*calibrated, ("write", checks, tmp_path)]
    assert [spec.rules for spec in machine.specs] == ([RULES] if checks else [])
    assert len(said.lines) == int(checks)
    if checks:
        assert machine.specs[0].shapes == ((1, 4), (1, 6))


CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> DeviceProfile:
    """The shipped profile of a card that is here, with an ONNX Runtime that computes on it."""
    target = Target(True, f"present: {CARD}", Gpu(0, CARD, "GPU-0", None, "9.0"))
    monkeypatch.setattr(stage, "find_target", lambda device: target)
    monkeypatch.setattr(stage, "default_provider", lambda: "CUDAExecutionProvider")
    return load_profile("h100")


def test_a_card_is_checked_in_both_formats_and_its_profile_says_how_wrong_it_was(
    bundle: Path, machine: Machine, card: DeviceProfile, tmp_path: Path
) -> None:
    options = CalibrationOptions(False, True, ((1, 4), (2, 8)), None, RULES)
    _, path = improve(bundle, card, options, tmp_path)
    assert [(spec.checked.artifact.id, spec.provider) for spec in machine.specs] == [
        ("model", "CUDAExecutionProvider"), ("half", "CUDAExecutionProvider"),
    ]  # fmt: skip
    assert machine.asked[0][2].calibration.efficiencies == {}, "estimates from the facts, as before"
    kept = load_profile("h100", tmp_path)
    assert kept.calibration is not None and len(kept.calibration.validated_on) == 4
    assert kept.model_copy(update={"calibration": None}) == card, "nothing else of the profile changes"
    error = known_error(kept)
    assert error is not None and (error.kind, error.device, error.cases, error.median_log2) == ("cuda", CARD, 4, 1.0)
    assert "calibrate --validate" in path.read_text(encoding="utf-8").splitlines()[0]
    again, _ = improve(bundle, kept, options, tmp_path)
    assert again.calibration is not None and len(again.calibration.validated_on) == 4, "those of the last time only"
    elsewhere = kept.model_copy(update={"match": "NVIDIA H200"})
    assert known_error(elsewhere) is None


def test_a_card_is_checked_where_it_is_and_by_what_computes_on_it(
    bundle: Path, machine: Machine, card: DeviceProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = CalibrationOptions(False, True, ((1, 4),), None, RULES)
    monkeypatch.setattr(stage, "default_provider", lambda: "CPUExecutionProvider")
    with pytest.raises(InputError, match=f"CPUExecutionProvider here, not on {CARD}"):
        improve(bundle, card, options, tmp_path)
    monkeypatch.setattr(stage, "find_target", lambda device: Target(False, "no such card"))
    with pytest.raises(InputError, match="--validate: no such card; estimates for a card are checked on that card"):
        improve(bundle, card, options, tmp_path)
    assert machine.specs == [] and not [*tmp_path.iterdir()]


def test_another_machines_calibration_is_not_checked_here(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, theirs = Machine(monkeypatch), device(match="Another 9000")
    assert theirs.calibration is not None
    calibration = theirs.calibration.model_copy(update={"processor": "Another 9000 with 8 cores"})
    with pytest.raises(InputError, match="not Another 9000; estimates for a device are checked on the device itself"):
        check_estimates([bundle], theirs.model_copy(update={"calibration": calibration}), [(1, 8)])
    assert host.specs == []
