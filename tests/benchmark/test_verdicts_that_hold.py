"""A report does not contradict itself: what is judged, at which shape, of which artifact, and under which name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.manifest import BundleManifest
from edgeformer.artifacts.report import Report, read_report
from edgeformer.benchmark.measure import MeasureRules
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.benchmark.request import question_of, resolve
from edgeformer.benchmark.search import SearchOptions
from edgeformer.bundle import Bundle
from edgeformer.report.report_files import write_report
from edgeformer.report.words import badge_text, in_words
from edgeformer.run import Location
from edgeformer.tasks.classification import ClassificationScore
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, write_bundle, write_manifest

RULES = MeasureRules(warmup_min_s=0.01, warmup_max_s=0.2, min_s=0.02, max_s=0.3, idle_s=0.01, energy_s=0.01)
FAST = ProfileOptions(rules=RULES, threads=(1,), batches=(1,), seqs=(8,))
PI, HOST = load_profile("raspberry-pi-5"), load_profile("host")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two graphs, of which the second is larger and as good, and an engine."""
    graphs = {"model": classifier_graph(), "wide": classifier_graph(width=64)}
    folder = write_bundle(tmp_path_factory.mktemp("verdicts") / "bundle", graphs)
    score = ClassificationScore(n=100, accuracy=0.9, precision=0.9, recall=0.9, f1=0.9, loss=0.3)
    scored = [artifact_of(folder, f"onnx/{name}.onnx", validation=score) for name in graphs]
    built_for = {"compute_capability": "8.9"}
    engine = artifact_of(folder, "onnx/model.onnx", id="engine", format="tensorrt-rtx", built_for=built_for)
    write_manifest(folder, [*scored, engine])
    return folder


@pytest.fixture(scope="module")
def on_pi(bundle: Path) -> Report:
    return profile_bundle(Location(None, bundle), PI, FAST)


def test_what_can_never_run_on_a_device_is_left_out_of_its_verdict_and_listed(on_pi: Report) -> None:
    assert on_pi.verdict.status == "pass"
    assert {check.artifact for check in on_pi.verdict.checks} == {"model", "wide"}
    assert on_pi.left_out == {"engine": "tensorrt-rtx engines run on NVIDIA GPUs only"}
    assert any(note.startswith("left out of the verdict") and "engine" in note for note in on_pi.notes)
    assert "Left out: 1 artifact that no" in in_words(on_pi) and "not known" not in in_words(on_pi)
    assert any(row.artifact == "engine" for row in on_pi.rows), "its row says why, as before"


def test_where_nothing_can_run_the_report_says_that_nothing_was_judged(bundle: Path) -> None:
    report = profile_bundle(Location(None, bundle), PI, replace(FAST, artifacts=("engine",)))
    assert (report.verdict.status, report.verdict.checks) == ("unknown", ())
    assert any("no artifact can ever run on this device" in note for note in report.notes)
    assert "every artifact that no" in in_words(report)


def test_the_verdict_of_a_search_is_that_of_its_pick_everywhere(bundle: Path, tmp_path: Path) -> None:
    small = (bundle / "onnx/model.onnx").stat().st_size
    options = replace(FAST, search=SearchOptions(), max_size_bytes=small)
    report = profile_bundle(Location(None, bundle), HOST, options)
    assert report.search is not None and report.search.pick is not None
    assert report.search.candidates[report.search.pick].artifact == "model"
    # once for each runtime that is installed
    assert {c.artifact for c in report.search.candidates} == {"model", "wide"}, "no engine on a processor"
    assert report.verdict.status == "pass" and {check.artifact for check in report.verdict.checks} == {"model"}
    assert badge_text(report) == "host: pass" and in_words(report).startswith("The search picks model. ")
    nothing = profile_bundle(Location(None, bundle), HOST, replace(options, max_size_bytes=1))
    assert nothing.search is not None and nothing.search.pick is None
    assert nothing.verdict.status == "fail" and in_words(nothing).startswith("The search picks nothing: ")


def test_reports_of_different_questions_do_not_overwrite_each_other(on_pi: Report, tmp_path: Path) -> None:
    location = Location(None, tmp_path)
    write_report(on_pi, location)
    searched = on_pi.model_copy(update={"question": question_of(replace(FAST, search=SearchOptions()), None)})
    written = write_report(searched, location)
    assert [path.name for path in written][:2] == ["raspberry-pi-5-search.json", "raspberry-pi-5-search.md"]
    assert read_report(location.reports / "raspberry-pi-5.json").question == ""
    assert "raspberry-pi-5-search.svg" in written[1].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "question"),
    [
        ({}, ""),
        ({"strict": True, "threads": (1, 2)}, ""),  # the same question, measured in another way
        ({"artifacts": ("onnx-int8",)}, "onnx-int8"),
        ({"search": SearchOptions({"accuracy": 0.9}, "size")}, "search-accuracy-0.9-least-size"),
        ({"max_latency_ms": 2.0, "seqs": (16, 64), "batches": None}, "latency-2ms-seq-16-64"),
        ({"max_size_bytes": 30 * 2**20, "artifacts": ("model",)}, "size-30.0MiB-model"),
        ({"artifacts": ("../../x",)}, ".._.._x"),
    ],
)
def test_a_question_names_what_is_judged(changes: dict[str, object], question: str) -> None:
    assert question_of(replace(FAST, **changes), None) == question  # type: ignore[arg-type]


def test_a_long_question_has_a_short_name_of_its_own() -> None:
    names = [question_of(replace(FAST, artifacts=("a" * 300 + end,)), None) for end in "bc"]
    assert len(set(names)) == 2 and all(len(name) < 100 for name in names)


def manifest_of(bundle: Path, **changes: object) -> BundleManifest:
    return Bundle.open(bundle).manifest.model_copy(update={"max_positions": 512, "max_length": 512, **changes})


def test_a_model_whose_texts_are_cut_to_64_tokens_is_judged_at_64_and_that_is_said(bundle: Path) -> None:
    request = resolve(ProfileOptions(), PI, manifest_of(bundle, max_length=64))
    assert (request.limits.batch, request.limits.seq) == (1, 64)
    assert request.shapes == ((1, 64), (16, 64))
    assert any("the budget names 1×128, but the model takes at most 64 tokens" in note for note in request.notes)


def test_a_flags_limit_is_judged_at_the_shapes_that_were_asked_for(bundle: Path) -> None:
    options = ProfileOptions(seqs=(16, 64), max_latency_ms=2.0)
    limits = resolve(options, PI, manifest_of(bundle)).limits
    assert [(shape.batch, shape.seq, shape.latency_ms, shape.memory_bytes) for shape in limits.asked] == [
        (1, 16, 2.0, None),
        (1, 64, 2.0, None),
    ]
    assert (limits.seq, limits.latency_ms) == (128, None) and limits.memory_bytes is not None
    notes = resolve(options, PI, manifest_of(bundle)).notes
    assert any("judged at 1×16, 1×64" in note and "the budget's own are judged at 1×128" in note for note in notes)
    alone = resolve(ProfileOptions(max_latency_ms=2.0), PI, manifest_of(bundle)).limits
    assert (alone.seq, alone.latency_ms, alone.asked) == (128, 2.0, ()), "no shape was asked for"


def test_checks_say_at_which_shape_they_judge(bundle: Path) -> None:
    options = replace(FAST, artifacts=("model",), seqs=(4, 8), max_latency_ms=1e-6)
    report = profile_bundle(Location(None, bundle), HOST, options)
    reasons = [str(check.reason) for check in report.verdict.checks if check.name == "latency"]
    assert [re.findall(r"at (\d+×\d+)", reason) for reason in reasons] == [["1×4"], ["1×8"]]
    judged = [(check.batch, check.seq, check.status) for check in report.verdict.checks if check.name == "latency"]
    assert judged == [(1, 4, "fail"), (1, 8, "fail")]
    size = next((check for check in report.verdict.checks if check.name == "size"), None)
    assert size is None or size.batch is None
