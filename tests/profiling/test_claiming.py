"""claim and verify-claim: a real report of a real bundle, packed, checked, measured again, made a device profile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from measuring_child import RULES, make_spec
from tiny_bundle import classifier_graph, write_bundle

from edgeformer.bundle import Bundle
from edgeformer.formats.claim import UNDECIDED, Claim, ClaimCase, ClaimVerification
from edgeformer.formats.claim_file import ClaimFile, write_claim
from edgeformer.formats.device import Calibration, DeviceProfile, Fact, Peaks
from edgeformer.formats.documents import load_profile
from edgeformer.formats.errors import ArtifactError, InputError
from edgeformer.formats.files import write_json
from edgeformer.formats.report import Report, Row
from edgeformer.formats.report_file import read_report
from edgeformer.run import Location
from edgeformer.stages.profiling.claiming import rounds as rounds_module
from edgeformer.stages.profiling.claiming.check import ClaimOptions, _judged, open_claim, verify_claim
from edgeformer.stages.profiling.claiming.comparing import Machine, differences, why_not_here
from edgeformer.stages.profiling.claiming.contribute import require_free, write_contribution
from edgeformer.stages.profiling.claiming.make import make_claim, measured_rows
from edgeformer.stages.profiling.claiming.rounds import Again, AgainRules, common_factor, measure_again, unknown_speed
from edgeformer.stages.profiling.gating.pacing import PaceSpec
from edgeformer.stages.profiling.gating.sequential import FEWEST_ROUNDS, fewest_rounds, interval
from edgeformer.stages.profiling.profile import ProfileOptions, profile_bundle
from tests.cli.in_process import in_process

HOST = load_profile("host")
FILE_ALONE = ClaimOptions(measure=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a bundle and a report of it, really measured."""
    folder = tmp_path_factory.mktemp("claims")
    write_bundle(folder / "bundle", {"model": classifier_graph(), "wide": classifier_graph(width=64)})
    options = ProfileOptions(threads=(1,), batches=(1,), seqs=(8,), rules=RULES)
    report = profile_bundle(Location(None, folder / "bundle"), HOST, options)
    write_json(folder / "reports" / "host.json", report)
    return folder


@pytest.fixture(scope="module")
def report(run: Path) -> Report:
    return read_report(run / "reports" / "host.json")


@pytest.fixture(scope="module")
def whole(run: Path) -> Path:
    return make_claim(run / "reports" / "host.json", run / "whole.claim.zip", run / "profiles", whole=True).path


def claimed(run: Path, change: Callable[[dict[str, Any]], object], target: Path, **of_claim: object) -> Path:
    """The same claim with another report, and whatever else is changed in its claim.json."""
    document = json.loads((run / "reports" / "host.json").read_text(encoding="utf-8"))
    change(document)
    claim = ClaimFile.open(run / "whole.claim.zip").claim
    environment = claim.environment.model_copy(update={"host": document["host"]})
    members = {name: run / name for name in claim.members if name.startswith("bundle/")}
    told = claim.model_copy(update={"environment": environment, **of_claim})
    write_claim(target, told, {"report.json": json.dumps(document).encode(), **members})
    return target


# The claim


def test_a_claim_holds_report_checksums_and_machine(run: Path, report: Report) -> None:
    made = make_claim(run / "reports" / "host.json", None, run / "profiles", whole=False)
    claim, path = made.claim, made.path
    assert made.sha256 == ClaimFile.open(path).sha256 and path == run / "reports" / "host.claim.zip"
    assert claim.members.keys() == {"report.json", "bundle/bundle.json"} and not claim.whole_bundle
    assert ClaimFile.open(path).claim == claim and ClaimFile.open(path).report() == report
    told = claim.environment
    assert told.host == report.host and told.threads == (1,) and told.code_version
    assert told.power[0] == measured_rows(report)[0].conditions["power"]
    assert {row.phase for row in report.rows} == {"cold", "steady"}
    assert len(measured_rows(report)) == len({row.artifact for row in measured_rows(report)}) * 2, "8 and 24 tokens"


def test_a_whole_bundle_is_one_that_opens(whole: Path, tmp_path: Path) -> None:
    opened = open_claim(whole, tmp_path)
    assert {*opened.claim.members} == {
        "report.json", "bundle/bundle.json", "bundle/golden.npz", "bundle/onnx/model.onnx", "bundle/onnx/wide.onnx",
    }  # fmt: skip
    assert opened.inside.check(opened.inside.artifact("model")).is_file()


def test_a_changed_bundle_can_no_longer_be_claimed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    path = tmp_path / "reports" / "host.json"
    write_json(path, read_report(run / "reports" / "host.json").model_copy(update={"bundle": "bundle"}))
    write_bundle(tmp_path / "bundle", {"model": classifier_graph(width=16), "wide": classifier_graph(width=64)})
    with pytest.raises(ArtifactError, match="not the one that was measured"):
        make_claim(path, None, tmp_path, whole=False)
    with pytest.raises(ArtifactError, match="the bundle has another artifact of that name"):
        make_claim(path, None, tmp_path, whole=False, bundle=Bundle.open(tmp_path / "bundle"))
    assert not path.with_suffix(".claim.zip").exists()
    make_claim(path, None, tmp_path, whole=False, bundle=Bundle.open(run / "bundle"))


def test_the_calibrated_profile_of_that_machine_comes_along(run: Path, report: Report, tmp_path: Path) -> None:
    write_json(tmp_path / "host.yaml", calibrated(str(report.host["cpu"])))
    own = make_claim(run / "reports" / "host.json", tmp_path / "a.zip", tmp_path, whole=False).claim.profile
    assert own is not None and own.calibration is not None and own.peaks.fp32 is not None
    write_json(tmp_path / "host.yaml", calibrated("Another CPU"))
    assert make_claim(run / "reports" / "host.json", tmp_path / "a.zip", tmp_path, whole=False).claim.profile is None


def calibrated(cpu: str) -> DeviceProfile:
    calibration = Calibration(created="now", processor=cpu, threads=1, provider="p", efficiencies={})
    peaks = Peaks(fp32=Fact[float](value=1e11, source="measured by edgeformer profile --calibrate", verified=True))
    bandwidth = Fact[float](value=2e10, source="a data sheet", verified=False)
    return HOST.model_copy(update={"calibration": calibration, "peaks": peaks, "bandwidth_bytes_per_s": bandwidth})


# What contradicts itself


def row_of(document: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in document["rows"] if row["phase"] == "steady")


def set_(*path: str | int, to: object) -> Callable[[dict[str, Any]], object]:
    """A change of one value of a report; ``row``: of its first steady row."""

    def change(document: dict[str, Any]) -> None:
        here: Any = row_of(document) if path[0] == "row" else document
        for step in path[1:-1] if path[0] == "row" else path[:-1]:
            here = here[step]
        here[path[-1]] = to

    return change


def as_fast_as_its_fastest_call(document: dict[str, Any]) -> None:
    row_of(document)["latency_ms"]["p50"] = row_of(document)["latency_ms"]["min"]


def of_few_calls(document: dict[str, Any]) -> None:
    row_of(document)["latency_ms"] |= {"n": 10, "p99": 1e9}


def slower_than_its_slowest_call(document: dict[str, Any]) -> None:
    row_of(document)["latency_ms"] |= {"n": 10_000, "p99": 1e9}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_("row", "latency_ms", "p50", to=1e-9), r"rows\.\d\.latency_ms: min is above p50"),
        (as_fast_as_its_fastest_call, r"latency_ms\.p50: says .* ms, but its distribution"),
        (set_("row", "latency_ms", "mean", to=1e-9), "throughput_per_s: says"),
        (set_("row", "throughput_per_s", to=7.0), "throughput_per_s: says 7, but its mean gives"),
        (set_("row", "latency_ms", "quantiles_ms", to=[2.0, 1.0]), "quantiles_ms: do not grow"),
        (of_few_calls, r"p9\d of 10 calls, where \d+ are needed"),
        (slower_than_its_slowest_call, r"latency_ms\.p99: says 1e\+09 ms, but its longest call"),
        (set_("row", "size_bytes", to=12), r"rows\.\d\.size_bytes: says 12, where the bundle says"),
        (set_("row", "precision", to="int8"), "precision: says int8, where the bundle says fp32"),
        (set_("row", "artifact", to="another"), "'another' is not among those that were measured"),
        (set_("run", to="another"), "run: says 'another', where the bundle says 'tiny': they do not belong together"),
        (set_("parameters", to=3), "parameters: says 3"),
        (set_("subject", to=None), "says no checksums of what was measured"),
        (set_("subject", "artifacts", "model", "sha256", to="0" * 64), "another artifact of that name"),
        (set_("verdict", "status", to="fail"), "verdict.status: says fail, but its checks say pass"),
        (set_("verdict", "checks", 0, "status", to="fail"), "says fail, but its figures say pass"),
        (set_("verdict", "judged", to=["energy"]), "verdict.judged: says energy, but its checks say otherwise"),
        (
            set_("verdict", "not_judged", to=[{"name": "size", "reason": "no limit is set"}]),
            "verdict.not_judged: names size, which a check decides",
        ),
        (set_("verdict", "checks", 0, "value", to=1), "value: is of no row"),
        (set_("rows", to=[]), "value: is of no row"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    run: Path, whole: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    path = claimed(run, change, tmp_path / "x.claim.zip")
    with pytest.raises(ArtifactError, match=said):
        verify_claim(path, None, FILE_ALONE)


@pytest.mark.parametrize(
    ("of_claim", "said"),
    [
        ({"run": "another"}, "run is 'another', and 'tiny' in its report"),
        ({"profile": calibrated("Another CPU")}, "its calibration is of another machine"),
        ({"whole_bundle": False}, "it holds other files of the bundle than the manifest lists"),
        (
            {"environment": {"host": {"cpu": "Another"}, "threads": (1,)}},
            "environment's host is not what its report says",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    run: Path, whole: Path, tmp_path: Path, of_claim: dict[str, Any], said: str
) -> None:
    claim = ClaimFile.open(whole).claim
    changed = Claim.model_validate({**claim.model_dump(), **{k: v for k, v in of_claim.items() if k != "profile"}})
    changed = changed.model_copy(update={"profile": of_claim.get("profile")})
    members = {name: run / name for name in claim.members if name.startswith("bundle/")}
    write_claim(tmp_path / "x.claim.zip", changed, {"report.json": run / "reports" / "host.json", **members})
    with pytest.raises(ArtifactError, match=said):
        verify_claim(tmp_path / "x.claim.zip", None, FILE_ALONE)


def test_a_damaged_bundle_inside_names_the_claim_and_leaves_nothing(run: Path, whole: Path, tmp_path: Path) -> None:
    members: dict[str, bytes | Path] = {"report.json": run / "reports" / "host.json", "bundle/bundle.json": b"{}"}
    write_claim(tmp_path / "x.claim.zip", ClaimFile.open(whole).claim, members)
    with pytest.raises(ArtifactError, match=r"x\.claim\.zip/bundle/bundle\.json: damaged"):
        verify_claim(tmp_path / "x.claim.zip", None, FILE_ALONE)


def test_another_bundle_is_not_measured(run: Path, tmp_path: Path) -> None:
    path = make_claim(run / "reports" / "host.json", tmp_path / "x.zip", tmp_path, whole=False).path
    other = write_bundle(tmp_path / "bundle", {"model": classifier_graph(width=16), "wide": classifier_graph(width=64)})
    with pytest.raises(ArtifactError, match=r"is not the bundle of .*'onnx/model\.onnx'"):
        verify_claim(path, Bundle.open(other), FILE_ALONE)
    verify_claim(path, Bundle.open(run / "bundle"), FILE_ALONE)


# What this machine can say


def one_row(document: dict[str, Any]) -> None:
    document["rows"] = [row_of(document)]
    document["verdict"] = {"status": "unknown", "checks": []}


def test_a_claim_of_this_machine_is_measured_again(run: Path, whole: Path, tmp_path: Path) -> None:
    """Six processes; with a tolerance so wide that no neighbour on the processor spoils it."""
    options = ClaimOptions(AgainRules(tolerance=20.0, error=0.5), rules=RULES)
    found, _ = verify_claim(claimed(run, one_row, tmp_path / "x.claim.zip"), None, options)
    assert {case.status for case in found.cases} == {"confirmed"} and found.exit_code == 0
    for case in found.cases:
        assert case.here_ms is not None and case.low is not None and case.low <= (case.change or 0) <= (case.high or 0)
        assert case.rounds >= 6 and case.provider == "CPUExecutionProvider" and case.slowness is not None
    assert found.bundle == "inside the claim"


def test_without_its_bundle_and_on_another_processor_nothing_is_compared(
    run: Path, whole: Path, tmp_path: Path
) -> None:
    path = make_claim(run / "reports" / "host.json", tmp_path / "x.zip", tmp_path, whole=False).path
    found, _ = verify_claim(path, None, ClaimOptions())
    assert {case.status for case in found.cases} == {"not comparable"} and found.exit_code == UNDECIDED
    assert all("name the bundle itself with --bundle" in case.reason for case in found.cases)
    elsewhere = claimed(run, set_("host", "cpu", to="Another CPU"), tmp_path / "y.zip")
    found, _ = verify_claim(elsewhere, None, ClaimOptions())
    assert {case.status for case in found.cases} == {"not comparable"} and found.bundle == "inside the claim"
    assert all(case.reason.startswith("it was measured on Another CPU, and this is ") for case in found.cases)


@pytest.fixture
def row(report: Report) -> Row:
    return measured_rows(report)[0]


@pytest.fixture
def machine() -> Machine:
    return Machine.here()


def test_why_a_machine_says_nothing_about_a_row(run: Path, whole: Path, row: Row, machine: Machine) -> None:
    artifact, told = Bundle.open(run / "bundle").artifact("model"), ClaimFile.open(whole).claim.environment
    assert why_not_here(row, artifact, told, machine) is None
    many = row.model_copy(update={"threads": 4_000})
    assert "measured with 4000 threads" in str(why_not_here(many, artifact, told, machine))
    strange = row.model_copy(update={"provider": "NoProvider"})
    assert "measured with NoProvider, which this installation" in str(why_not_here(strange, artifact, told, machine))
    card = row.model_copy(update={"provider": "CUDAExecutionProvider"})
    of_card = told.model_copy(update={"host": {**told.host, "gpu": "NVIDIA Example"}})
    bare = replace(machine, cards={"NVIDIA Other": "uuid"})
    assert why_not_here(card, artifact, of_card, bare) == "it was measured on NVIDIA Example, and here is NVIDIA Other"
    engine = artifact.model_copy(update={"format": "of nobody"})
    assert "cannot be opened here" in str(why_not_here(row, engine, told, machine))


def test_what_is_not_as_it_was(run: Path, whole: Path, row: Row, machine: Machine) -> None:
    artifact, told = Bundle.open(run / "bundle").artifact("model"), ClaimFile.open(whole).claim.environment
    calm = row.model_copy(update={"latency_ms": row.latency_ms.model_copy(update={"stable": True})})
    assert list(differences(calm, artifact, told, machine)) == []
    versions = {**told.host["versions"], "onnxruntime": "1.0"}
    other = told.model_copy(
        update={"host": {**told.host, "versions": versions, "cores": 77}, "cpu_flags": (*(machine.flags or ()), "sse9")}
    )
    on_battery = calm.model_copy(update={"conditions": {**calm.conditions, "power": "battery 83 %"}})
    found = list(differences(on_battery, artifact, other, machine))
    assert [text.split(" is ")[0] for text in found] == [
        "onnxruntime was 1.0 and",
        "cores was 77 and",
        "the processors do not offer the same instructions: sse9",
        "power was battery and",
    ]


# Rounds, and what they mean


@pytest.fixture
def again(run: Path, row: Row) -> Callable[..., Again]:
    """Rounds that were measured: their times over the claimed one, which is stable however busy the machine was."""
    measure = make_spec(run / "bundle")
    row = row.model_copy(update={"latency_ms": row.latency_ms.model_copy(update={"stable": True})})
    spec = PaceSpec(threads=1, item=("steady", 1, 8), measure=measure)

    def made(*ratios: float) -> Again:
        logs = [log(ratio) for ratio in ratios]
        return Again(row, spec, logs, interval(logs))

    return made


CALM = AgainRules(tolerance=0.15)


@pytest.mark.parametrize(
    ("ratio", "status"), [(1.0, "confirmed"), (1.1, "confirmed"), (1.5, "contradicted"), (0.6, "contradicted")]
)
def test_a_time_holds_if_its_whole_interval_is_within_the_tolerance(
    again: Callable[..., Again], ratio: float, status: str
) -> None:
    case = _judged(again(*[ratio] * 10), CALM, None, [])
    assert case.status == status and case.here_ms == pytest.approx(case.claimed_ms * ratio)
    assert case.change == pytest.approx(ratio - 1) and (not case.reason) == (status == "confirmed")


def test_noise_and_too_few_rounds_are_undecided(again: Callable[..., Again]) -> None:
    few = "too little time: {} of the 6 rounds that say anything"
    for rounds, why in (
        (again(*[1.0, 1.5] * 5), "too noisy"),
        (again(1.0, 1.0), few.format(2)),
        (again(), few.format(0)),
    ):
        case = _judged(rounds, CALM, None, [])
        assert case.status == "undecided" and why in case.reason
    assert (case.here_ms, case.low, case.change) == (None, None, None)


def test_what_differs_excuses_another_time_and_spoils_no_confirmed_one(again: Callable[..., Again]) -> None:
    doubts = ["onnxruntime was 1.0 and is 2.0 here"]
    excused = _judged(again(*[1.5] * 10), CALM, None, doubts)
    assert excused.status == "not comparable" and doubts[0] in excused.reason
    assert _judged(again(*[1.0] * 10), CALM, None, doubts).status == "confirmed"
    speed = _judged(again(*[1.5] * 10), CALM, 1.5, [])
    assert speed.status == "not comparable" and "every row takes 1.50 times as long here" in speed.reason


@pytest.mark.parametrize(
    ("ratio", "speed", "status"),
    [
        (1.33, 1.33, "not comparable"),
        (0.75, 0.75, "not comparable"),
        (1.0, 1.33, "confirmed"),
        (1.5, 1.0, "contradicted"),
        (1.9, 1.3, "contradicted"),
        (3.0, 3.0, "contradicted"),
    ],
)
def test_a_time_is_not_contradicted_that_would_hold_at_equal_speed(
    again: Callable[..., Again], ratio: float, speed: float, status: str
) -> None:
    rounds = again(*[ratio] * 10)
    rounds.log_speeds.extend([log(speed)] * 10)
    rounds.look(0.05)
    case = _judged(rounds, CALM, None, unknown_speed(rounds, 1))
    assert (case.status, case.slowness) == (status, pytest.approx(speed))
    assert ("at equal speed the time would hold" in case.reason) == (status == "not comparable")


def test_a_row_alone_cannot_tell_another_speed_where_the_claim_does_not_say_its_own(
    again: Callable[..., Again],
) -> None:
    rounds = again(*[1.5] * 10)
    assert unknown_speed(rounds, 3) == [] and unknown_speed(again(*[2.1] * 10), 1) == []
    assert "tell whether the processor is at another speed" in unknown_speed(rounds, 2)[0]
    assert _judged(rounds, CALM, None, unknown_speed(rounds, 2)).status == "not comparable"


def test_every_measured_row_says_how_fast_its_processor_was(row: Row, again: Callable[..., Again]) -> None:
    one = again()
    assert one.claimed_speed is not None and one.claimed_speed.product_us > 1
    one.add(one.claimed_ms, one.claimed_speed)
    assert one.log_ratios == one.log_speeds == [0.0]
    for written in ({"product_us": -1, "copy_us": 1}, {"product_us": 1e999, "copy_us": 1}, {"product_us": "1"}, 7):
        unread = replace(again(), row=row.model_copy(update={"conditions": {"speed": written}}))
        unread.add(1.0, one.claimed_speed)
        assert unread.log_speeds == [] and unread.slowness is None


@pytest.mark.parametrize(
    ("ratio", "warnings", "status"),
    [
        (1.6, ("drifted while it was measured",), "confirmed"),
        (1.6, (), "contradicted"),
        (0.8, ("drifted while it was measured",), "contradicted"),
        (2.5, ("drifted while it was measured",), "contradicted"),
    ],
)
def test_a_row_that_is_not_stable_claims_a_range_which_excuses_nothing_beyond_it(
    again: Callable[..., Again], ratio: float, warnings: tuple[str, ...], status: str
) -> None:
    """Its second process took half as long again; a second process ten times as slow counts as twice."""
    rounds = again(*[ratio] * 10)
    shaky = rounds.row.latency_ms.model_copy(update={"stable": False, "warnings": warnings, "quantiles_ms": ()})
    for slower in (1.5, 10.0) if ratio < 2 else (10.0,):
        noted = {"repeated_p50_ms": slower * rounds.claimed_ms}
        row = rounds.row.model_copy(update={"latency_ms": shaky, "conditions": noted})
        case = _judged(replace(rounds, row=row), CALM, None, [])
        assert case.status == status
        assert ("the claim calls this row not stable, and its time" in case.reason) == bool(warnings)


def test_another_speed_is_one_factor_for_three_rows_or_more_and_no_more_than_two(again: Callable[..., Again]) -> None:
    def factor(*ratios: float) -> float | None:
        return common_factor([again(*[ratio] * 10) for ratio in ratios], 0.15)

    assert factor(1.30, 1.33, 1.36) == pytest.approx(1.33)
    assert factor(0.75, 0.75, 0.76) == pytest.approx(0.75)
    assert factor(1.33, 1.33) is None, "two rows agree by chance"
    assert factor(1.3, 1.3, 2.0) is None and factor(1.0, 1.05, 1.1) is None and factor(3.0, 3.0, 3.0) is None


def test_what_does_not_open_here_is_not_comparable(run: Path, again: Callable[..., Again]) -> None:
    case = again()
    damaged = case.spec.measure.checked.model_copy(update={"file": run / "absent.onnx"})
    measure = case.spec.measure.model_copy(update={"checked": damaged, "rules": RULES})
    broken = replace(case, spec=case.spec.model_copy(update={"measure": measure}))
    measure_again([broken], AgainRules(longest_s=60))
    judged = _judged(broken, CALM, None, [])
    assert judged.status == "not comparable" and judged.reason.startswith("it cannot be measured here: ")


def test_of_many_rows_five_are_measured_before_the_others(
    again: Callable[..., Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve rows, all as claimed, and a limit that lets every group have what it needs."""
    rows, order = [again() for _ in range(12)], []

    def one(row: Again) -> None:
        order.append(next(place for place, known in enumerate(rows) if known is row))
        row.add(row.claimed_ms, None)

    monkeypatch.setattr(rounds_module, "_one", one)
    measure_again(rows, AgainRules())
    fewest = fewest_rounds(0.05 / 12)
    assert {len(row.log_ratios) for row in rows} == {fewest} == {row.fewest for row in rows} and fewest > FEWEST_ROUNDS
    assert {row.holds(0.15) for row in rows} == {"yes"}
    assert [set(order[start : start + 5 * fewest]) for start in (0, 5 * fewest, 10 * fewest)] == [
        {0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}, {10, 11},
    ]  # fmt: skip


def verification(*statuses: str, measured: bool = True) -> ClaimVerification:
    same = {"artifact": "a", "provider": "p", "phase": "steady", "batch": 1, "seq": 8, "claimed_ms": 1.0}
    excused = {"status": "not comparable", "rounds": 8}
    told = [excused if status == "excused" else {"status": status} for status in statuses]
    cases = tuple(ClaimCase.model_validate({**same, **one}) for one in told)
    return ClaimVerification(
        claim="x", sha256="0" * 64, run="r", device="host", claimed_on="c", host={}, created="2026-11-23", seconds=1.0,
        tolerance=0.15, error=0.05, measured=measured, bundle=None, cases=cases,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("confirmed",), 0),
        (("confirmed", "not comparable"), 0),
        (("confirmed", "excused"), 4),
        (("confirmed", "undecided"), 4),
        (("not comparable",), 4),
        (("confirmed", "undecided", "contradicted"), 3),
    ],
)
def test_exit_codes(statuses: tuple[str, ...], code: int) -> None:
    assert verification(*statuses).exit_code == code
    assert verification(measured=False).exit_code == 0


# A device profile of it


def test_facts_are_verified_where_times_were_confirmed(run: Path, report: Report, tmp_path: Path) -> None:
    cpu = str(report.host["cpu"])
    write_json(tmp_path / "host.yaml", calibrated(cpu))
    path = make_claim(run / "reports" / "host.json", tmp_path / "a.zip", tmp_path, whole=False).path
    opened = open_claim(path, tmp_path / "out")
    for statuses, verified in ((("confirmed", "undecided"), True), (("not comparable",), False)):
        target = tmp_path / f"box-{len(statuses)}.yaml"
        write_contribution(opened, verification(*statuses), target)
        profile = load_profile(str(target))
        assert (profile.name, profile.title, profile.match, profile.kind) == (target.stem, cpu, cpu, "cpu")
        fp32, bandwidth, memory = profile.peaks.fp32, profile.bandwidth_bytes_per_s, profile.memory_bytes
        assert fp32 is not None and bandwidth is not None and memory is not None
        assert (fp32.verified, memory.verified, bandwidth.verified) == (verified, verified, False)
        assert fp32.source.startswith("measured by edgeformer profile --calibrate; claim 000000000000, of which ")
        assert ("1 of 2 times hold" in fp32.source) is verified and bandwidth.source == "a data sheet"
        assert profile.calibration is not None and profile.budgets == HOST.budgets


def test_without_a_calibration_the_profile_has_what_the_report_knows(run: Path, tmp_path: Path) -> None:
    path = make_claim(run / "reports" / "host.json", tmp_path / "a.zip", tmp_path, whole=False).path
    profile = write_contribution(open_claim(path, tmp_path / "o"), verification("confirmed"), tmp_path / "box.yaml")
    assert profile.memory_bytes is not None and profile.peaks == Peaks() and profile.budgets == HOST.budgets
    with pytest.raises(InputError, match="1 of the claim's times do not hold here"):
        write_contribution(open_claim(path, tmp_path / "p"), verification("contradicted"), tmp_path / "no.yaml")


@pytest.mark.parametrize("name", ["box.txt", "host.yaml", "a b.yaml", "there.yaml", "there.yaml/box.yaml"])
def test_files_that_are_no_place_for_a_profile(tmp_path: Path, name: str) -> None:
    (tmp_path / "there.yaml").touch()
    with pytest.raises(InputError, match="--write-profile"):
        require_free(tmp_path / name)


# The commands


def test_the_commands(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edgeformer = in_process(monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    packed, report = str(tmp_path / "mine.claim.zip"), str(run / "reports" / "host.json")
    assert "the bundle's checksums, no calibration" in edgeformer("claim", report, "-o", packed)
    assert json.loads(edgeformer("claim", report, "-o", packed, "--json"))["claim"]["run"] == "tiny"
    said = edgeformer("verify-claim", packed, "--no-measure").replace("\n", " ")
    rows = read_report(Path(report)).rows
    memory, energy = (
        sum(vars(row)[name].status == "measured" for row in rows) for name in ("memory_bytes", "energy_mj")
    )
    assert memory and f"the report states memory of {memory} rows, which was not measured again" in said
    assert ("the report states energy" in said) is (energy > 0)
    assert "Nothing was measured again." in edgeformer("verify-claim", packed, "--no-measure")
    found = json.loads(edgeformer("verify-claim", packed, "--json", code=UNDECIDED))
    assert found["not_again"]["memory"] == memory and any("not measured again" in note for note in found["notes"])
    assert found["exit_code"] == UNDECIDED and {case["status"] for case in found["cases"]} == {"not comparable"}
    assert "profile box.yaml" in edgeformer("verify-claim", packed, "--no-measure", "--write-profile", "box.yaml")
    assert load_profile(str(tmp_path / "box.yaml")).name == "box"
    for options, said in (
        (["--tolerance", "0.1"], "--tolerance: '0.1' is no share"),
        (["--tolerance", "0%"], "allow more than 0%"),
        (["--write-profile", "box.yaml"], "exists already"),
    ):
        assert said in edgeformer("verify-claim", packed, *options, code=2).replace("\n", " ")
    assert "cannot be read" in edgeformer("verify-claim", "absent.zip", code=2)
    assert "is no claim" in edgeformer("verify-claim", report, code=2).replace("\n", " ")
    assert "cannot be read" in edgeformer("claim", "absent.json", code=2)
    assert f"-o {tmp_path}: is a folder" in edgeformer("claim", report, "-o", str(tmp_path), code=2).replace("\n", " ")
