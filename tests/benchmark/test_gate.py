"""gate: real bundles measured in turns in fresh processes, and the files for CI."""

import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import ArtifactError
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.manifest import Drift, LoopDrift
from edgeformer.artifacts.report import Memory
from edgeformer.benchmark import gate as gate_module
from edgeformer.benchmark import paired_run
from edgeformer.benchmark.gate import GATE_LIMITS, GateOptions, file_checks, gate_bundles, memory_check, named_baseline
from edgeformer.benchmark.gate_result import UNDECIDED, Gate, GateCheck
from edgeformer.benchmark.gate_scores import ArtifactPair
from edgeformer.benchmark.paired_run import Pairing
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.bundle import Bundle, seal
from edgeformer.report.gate import append_summary, junit_xml
from edgeformer.run import Location
from edgeformer.system.worker import Worker
from tests.cli.in_process import Edgeformer
from tests.measurement.measuring_child import RULES
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, greedy_graph, write_bundle, write_manifest

HOST = load_profile("host")
ONE = ProfileOptions(threads=(1,), batches=(1,), seqs=(8,), artifacts=("model",), rules=RULES)
GATE = GateOptions(rules=RULES)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("gate") / "bundle", {"model": classifier_graph()})


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty thousand numbers per token instead of eight."""
    return write_bundle(tmp_path_factory.mktemp("slower") / "bundle", {"model": classifier_graph(width=50_000)})


def gated(candidate: Path, baseline: Path, gate: GateOptions = GATE, options: ProfileOptions = ONE) -> Gate:
    return gate_bundles(Location(None, candidate), Bundle.open(baseline), HOST, options, gate)


OPTIONS = ["--device", "host", "--threads", "1", "--batch", "1", "--seq", "8"]


@pytest.fixture(scope="module")
def failed(slower: Path, baseline: Path) -> Gate:
    """With this chance of an error, six rounds are the fewest that say anything."""
    return gated(slower, baseline, replace(GATE, error=0.3))


def checks(gate: Gate) -> dict[str, GateCheck]:
    return {check.name: check for check in gate.checks}


@pytest.mark.slow
def test_a_slower_candidate_fails_early(failed: Gate) -> None:
    latency = checks(failed)["latency"]
    assert (failed.status, failed.exit_code) == ("fail", 3)
    assert (latency.status, latency.found, latency.rounds) == ("fail", "slower", 6)
    assert latency.low is not None and latency.low > 0.05 and len(latency.log_ratios) == 6
    assert latency.candidate is not None and latency.baseline is not None and latency.candidate > latency.baseline
    assert (latency.phase, latency.batch, latency.seq) == ("steady", 1, 8)
    assert checks(failed)["size"].status == checks(failed)["memory"].status == "fail"
    assert checks(failed)["score"].status == "undecided", "the tiny bundle was never scored"


def test_too_few_rounds_are_undecided_with_their_own_exit_code(baseline: Path) -> None:
    gate = gated(baseline, baseline, replace(GATE, longest_s=0.0001))
    latency = checks(gate)["latency"]
    assert (gate.status, gate.exit_code) == ("undecided", UNDECIDED)
    assert (latency.status, latency.found, latency.low) == ("undecided", "not known", None)
    assert "a decision needs at least 8 rounds" in latency.reason and latency.rounds == 1
    case = next(case for case in ElementTree.fromstring(junit_xml(gate)) if "latency" in case.attrib["name"])
    assert [child.tag for child in case] == ["error"]


def test_junit_and_summary_hold_every_check_and_escape_its_text(failed: Gate, tmp_path: Path) -> None:
    suite = ElementTree.fromstring(junit_xml(failed))
    assert int(suite.attrib["tests"]) == len(failed.checks) == len(suite)
    assert int(suite.attrib["failures"]) == sum(check.status == "fail" for check in failed.checks)
    assert {child.tag for case in suite for child in case} == {"failure", "error"}
    assert int(suite.attrib["errors"]) == sum(check.status == "undecided" for check in failed.checks) > 0
    for _ in range(2):  # a workflow's steps write one file
        append_summary(failed, tmp_path / "made" / "summary.md")
    text = (tmp_path / "made" / "summary.md").read_text(encoding="utf-8")
    assert text.startswith("## edgeformer gate: fail") and "| **fail**" in text and "1 × 8" in text
    assert text.count("## edgeformer gate") == 2
    check = GateCheck(name="presence", artifact='a"<\x00>&', status="fail", reason="<x>\x1b[31m")
    gate = failed.model_copy(update={"checks": (check,)})
    assert ElementTree.fromstring(junit_xml(gate)).attrib["failures"] == "1"


def test_unusable_options_are_refused(slower: Path, baseline: Path, edgeformer: Edgeformer) -> None:
    requested = [*OPTIONS, "--against", str(baseline)]
    for options, message in (
        (["--max-slowdown", "0.05"], "--max-slowdown: '0.05' is not a percentage; write e.g. 5%"),
        (["--max-latency", "5ms"], "No such option"),
        (["--artifact", "onnx-other"], "--artifact onnx-other: neither bundle has this artifact; they have model"),
        (["--max-slowdown", "off"], "'off' is not a percentage"),
        (["--eval-data", "nowhere.csv"], "nowhere.csv"),
        (["--eval-data", "x.csv", "--max-score-loss", "off"], "no effect with --max-score-loss off"),
    ):
        assert message in edgeformer("gate", str(slower), *requested, *options, code=2).replace("\n", "")
    assert "Missing option" in edgeformer("gate", str(slower), code=2)


def test_a_baseline_report_needs_its_unchanged_bundle(slower: Path, baseline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "bundle"
    shutil.copytree(baseline, folder)
    report = profile_bundle(Location(None, folder), HOST, ONE)
    path = tmp_path / "run" / "reports" / "host.json"
    path.parent.mkdir()
    write_json(path, report)
    assert named_baseline(path)[0].folder == folder and named_baseline(path)[1] == []
    moved, path = tmp_path / "moved", tmp_path / "moved" / "reports" / "host.json"
    shutil.move(tmp_path / "run", moved)
    assert named_baseline(path)[0].folder == moved / "bundle", "a run may be moved as a whole"
    bundle = Bundle.open(moved / "bundle")
    seal(bundle.folder, bundle.manifest.model_copy(update={"notes": ("exported again",)}))
    assert "bundle.json has changed since host.json was measured" in named_baseline(path)[1][0]
    shutil.rmtree(moved / "bundle")
    shutil.copytree(slower, moved / "bundle")
    with pytest.raises(ArtifactError, match="has changed since it was measured"):
        named_baseline(path)


@pytest.mark.parametrize(("broken", "status"), [("candidate", "fail"), ("baseline", "undecided")])
def test_a_side_that_does_not_run_is_named(baseline: Path, tmp_path: Path, broken: str, status: str) -> None:
    crashing = write_bundle(tmp_path / "crashing", {"model": greedy_graph()})  # asks for more memory than there is
    sides = (crashing, baseline) if broken == "candidate" else (baseline, crashing)
    latency = checks(gated(*sides))["latency"]
    assert latency.status == status and latency.reason.startswith(f"the {broken} cannot be measured: ")
    assert "not enough memory" in latency.reason and "(its second failure)" in latency.reason


def kill_workers(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Kill the worker processes of these numbers, in the order in which they are started."""
    started = count()

    class Mortal(Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if next(started) in numbers:
                self._process.kill()

    monkeypatch.setattr(paired_run, "Worker", Mortal)


def test_a_worker_may_die_once_but_not_twice(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidate's process is the second of a round, and of the same round once more the fourth."""
    short = replace(GATE, longest_s=0.0001)
    kill_workers(monkeypatch, 1)
    latency = checks(gated(baseline, baseline, short))["latency"]
    assert (latency.status, latency.rounds) == ("undecided", 1)
    repeated = "one round was repeated after a failure: the candidate failed: the measuring process ended early"
    assert repeated in latency.reason
    kill_workers(monkeypatch, 1, 3)
    latency = checks(gated(baseline, baseline, short))["latency"]
    assert latency.status == "fail" and latency.reason.endswith("(its second failure)")


ENTRIES = {
    "built": {},
    "foreign": {"format": "onnx-of-tomorrow"},  # which nothing here runs
    "rejected": {"status": "rejected", "reason": "it drifts", "file": None},
}


def with_artifacts(folder: Path, **statuses: str) -> Path:
    """A bundle with an artifact of each name, in one of the states of ``ENTRIES``."""
    write_bundle(folder, {name: classifier_graph() for name in statuses})
    entries = [artifact_of(folder, f"onnx/{name}.onnx", **ENTRIES[status]) for name, status in statuses.items()]
    write_manifest(folder, entries)
    return folder


BUILT, FOREIGN = ({"model": status, "other": "built"} for status in ("built", "foreign"))


@pytest.mark.parametrize(
    ("old", "new", "requested", "status", "exit_code", "reason"),
    [
        (BUILT, FOREIGN, ("model",), "fail", 3, "this machine runs the baseline but not the candidate: "),
        (*(FOREIGN | {"other": "foreign"},) * 2, (), "undecided", UNDECIDED, "this machine cannot run it: "),
        (FOREIGN, FOREIGN, (), "undecided", UNDECIDED, "this machine cannot run it: "),
    ],
)
def test_an_artifact_that_cannot_run_is_not_ignored(tmp_path: Path, old, new, requested, status, exit_code, reason):
    """In the last case `other` is timed, here for one round only."""
    sides = with_artifacts(tmp_path / "new", **new), with_artifacts(tmp_path / "old", **old)
    gate = gated(*sides, replace(GATE, longest_s=0.0001), replace(ONE, artifacts=requested))
    latencies = {check.artifact: check for check in gate.checks if check.name == "latency"}
    assert {check.status for check in latencies.values()} == {status} and gate.exit_code == exit_code
    assert latencies["model"].reason.startswith(reason) and "onnx-of-tomorrow" in latencies["model"].reason
    if not requested and old["other"] == "built":
        assert latencies["other"].rounds == 1 and "use --artifact ID" in latencies["model"].reason


def test_memory_by_two_methods_is_not_compared(baseline: Path) -> None:
    entry = Bundle.open(baseline).artifacts[0]
    resident = Memory(status="measured", peak=100 * 2**20, method="resident")
    card = Memory(status="measured", peak=1, method="card")
    result = Pairing(memory=[(resident, card)], providers=("CPUExecutionProvider", "CUDAExecutionProvider"))
    check = memory_check(ArtifactPair(entry, entry), 0.1, result)
    assert (check.status, check.baseline, check.candidate) == ("undecided", None, None)
    assert "resident, with CPUExecutionProvider and card, with CUDAExecutionProvider" in check.reason


def test_output_files_are_checked_before_measuring(slower, baseline, tmp_path, monkeypatch, edgeformer):
    monkeypatch.setattr(gate_module, "gate_bundles", None)  # measuring would be another error
    (tmp_path / "file").write_text("", encoding="utf-8")
    requested = ["gate", str(slower), *OPTIONS, "--against", str(baseline)]
    for option in ("--junit", "--summary"):
        for path, message in ((tmp_path, "is a folder"), (tmp_path / "file" / "gate", "is not a writable folder")):
            printed = edgeformer(*requested, option, str(path), code=2).replace("\n", " ")
            assert f"{option} {path}: " in printed and message in printed


@pytest.mark.parametrize(
    ("old", "new", "requested", "presence", "exit_code"),
    [
        # Not named: what the baseline has built is wanted of the candidate, and nothing else.
        ({"a": "built", "b": "built"}, {"a": "built", "b": "rejected"}, (), {"b": "fail"}, 3),
        ({"a": "built"}, {"b": "built"}, (), {"a": "fail"}, 3),
        ({"b": "rejected"}, {"b": "rejected"}, (), {}, UNDECIDED),
        # Named: these, in both directions, and no others.
        ({"a": "built", "b": "built"}, {"a": "built", "b": "rejected"}, ("b",), {"b": "fail"}, 3),
        ({"a": "built"}, {"a": "built", "b": "built"}, ("b",), {"b": "undecided"}, UNDECIDED),
    ],
)
def test_presence_of_selected_artifacts_in_both_directions(tmp_path: Path, old, new, requested, presence, exit_code):
    """Where nothing is missing, one round of timing leaves the gate undecided."""
    sides = with_artifacts(tmp_path / "new", **new), with_artifacts(tmp_path / "old", **old)
    gate = gated(*sides, replace(GATE, longest_s=0.0001), replace(ONE, artifacts=requested))
    result = {check.artifact: check for check in gate.checks if check.name == "presence"}
    assert {name: check.status for name, check in result.items()} == presence
    assert gate.exit_code == exit_code
    if "a" not in old:
        assert gate.notes[-1].startswith("nothing was compared") and gate.notes[0].startswith("b: not compared; ")
    for name, check in result.items():
        side = "candidate" if check.status == "fail" else "baseline"
        rejected = (new if side == "candidate" else old).get(name) == "rejected"
        message = f"rejected in the {side}: it drifts" if rejected else f"the {side} lacks it"
        assert check.reason.startswith(message)


def test_an_artifact_that_export_rejected_is_exit_code_3(tmp_path: Path, edgeformer: Edgeformer) -> None:
    """Of the gate, and of `profile` alone; not 2, which blames the command."""
    old = with_artifacts(tmp_path / "old", a="built", b="built")
    new = with_artifacts(tmp_path / "new", a="built", b="rejected")
    options = [str(new), *OPTIONS, "--artifact", "b", "--json"]
    assert "rejected in the candidate: it drifts" in edgeformer("gate", *options, "--against", str(old), code=3)
    assert "'tiny' has no artifact to profile: b: rejected: it drifts" in edgeformer("profile", *options, code=3)


def drifting(worst: float) -> Drift:
    return Drift(tolerance=0.1, loops=(LoopDrift(loop=1, rms_error=worst, max_error=worst),))


@pytest.mark.parametrize(
    ("old", "new", "check", "status"),
    [
        ({"size_bytes": 1000}, {"size_bytes": 1050}, "size", "pass"),
        ({"size_bytes": 1000}, {"size_bytes": 1051}, "size", "fail"),
        ({"size_bytes": None}, {"size_bytes": 1050}, "size", "undecided"),
        ({"drift": drifting(0.02)}, {"drift": drifting(0.05)}, "drift", "fail"),
        ({"drift": drifting(0.001)}, {"drift": drifting(0.009)}, "drift", "pass"),  # rounding, far from the tolerance
        ({"drift": drifting(0.09)}, {"drift": drifting(0.11)}, "drift", "fail"),
        ({}, {}, "drift", "undecided"),
    ],
)
def test_size_and_drift_are_compared(baseline: Path, old, new, check, status):
    entry = Bundle.open(baseline).artifacts[0]
    both = ArtifactPair(*(entry.model_copy(update=changes) for changes in (old, new)))
    assert {single.name: single.status for single in file_checks(both, GateOptions())}[check] == status


def test_checks_that_are_off_are_not_made(baseline: Path) -> None:
    off = replace(GATE, longest_s=0.0001, limits=GATE_LIMITS[:1])
    gate = gated(baseline, baseline, off)
    assert {check.name for check in gate.checks} == {"latency", "drift"}
    unchecked = {note.split(" (")[0] for note in gate.notes if note.startswith("not checked")}
    assert unchecked == {"not checked: memory", "not checked: size", "not checked: score"}
