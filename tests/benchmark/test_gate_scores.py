"""The gate's score check: both bundles answer the same rows, labels are matched by name, and nothing unknown passes."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.files import write_text
from edgeformer.artifacts.progress import SILENT
from edgeformer.benchmark import gate as gate_module
from edgeformer.benchmark.gate import GateOptions, gate_bundles
from edgeformer.benchmark.gate_result import UNDECIDED, Gate, GateCheck
from edgeformer.benchmark.gate_scores import ArtifactPair, common_rows, compare_figures, score_check
from edgeformer.benchmark.profile import ProfileOptions
from edgeformer.bundle import Bundle, seal
from edgeformer.data.rows import comparison_key
from edgeformer.data.synthetic import synthetic_reviews
from edgeformer.inference.evaluate import EvaluateOptions, evaluate
from edgeformer.run import Location, locate
from edgeformer.tasks import get_task
from tests.measurement.measuring_child import RULES

HOST = load_profile("host")
FP32 = "onnx-fp32"
LANGUAGE = Path(__file__).parents[1] / "old_format" / "language-v1" / "bundle"


def changed(bundle: Path, folder: Path, **changes: Any) -> Bundle:
    """A copy whose manifest says something else; ``data``: keys of that section."""
    shutil.copytree(bundle, folder)
    manifest = Bundle.open(folder).manifest
    document = manifest.model_dump(mode="json")
    document["data"] |= changes.pop("data", {})
    seal(folder, type(manifest).model_validate_json(json.dumps(document | changes), strict=False))
    return Bundle.open(folder)


@pytest.fixture
def baseline(finished_run: Path) -> Bundle:
    return Bundle.open(finished_run / "bundle")


@pytest.fixture
def one_row_more(baseline: Bundle, tmp_path: Path) -> Bundle:
    """As if it had been trained with one more row: its sets are drawn anew, by the same protocol."""
    source = json.loads(baseline.manifest.model_dump_json())["data"]["parts"]["train"][0]
    data = {"parts": {"train": [{**source, "rows": source["rows"] + 1}]}}
    bundle = changed(baseline.folder, tmp_path / "more", data=data)
    prints = {name: bundle.task.rows.set_texts(bundle.data, name).fingerprint() for name in bundle.trained_on}
    assert all(prints[name] != baseline.trained_on[name] for name in prints)
    shutil.rmtree(bundle.folder)
    return changed(baseline.folder, tmp_path / "more", data=data, data_fingerprints=prints)


@pytest.fixture
def swapped(baseline: Bundle, tmp_path: Path) -> Bundle:
    """The same model with the names of its labels exchanged: every answer has the other name now."""
    labels = list(reversed(baseline.manifest.labels))
    return changed(baseline.folder, tmp_path / "swapped", data={"labels": labels}, labels=labels)


def score_of(
    candidate: Bundle, baseline: Bundle, eval_data: Path | None = None, limit: float = 0.01, artifact: str = FP32
) -> GateCheck:
    both = ArtifactPair(baseline.artifact(artifact), candidate.artifact(artifact))
    rows = common_rows(baseline, candidate, eval_data)
    return score_check((baseline, candidate), both, None, rows, limit, SILENT)


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    """200 labelled rows that nobody was trained on."""
    path = tmp_path / "held_out.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "text"])
        writer.writerows((row.label, row.text) for row in synthetic_reviews(200, seed=991))
    return path


def test_scores_are_those_of_evaluate_on_the_shared_test_set_or_a_file(baseline, one_row_more, held_out):
    check = score_of(baseline, baseline)
    scored = evaluate(locate(str(baseline.folder), baseline.folder), EvaluateOptions(artifact=FP32)).rows[0]
    assert (check.status, check.rows, check.change) == ("pass", scored.n, 0.0)
    assert check.baseline == check.candidate == scored.accuracy
    assert check.low is not None and check.high is not None and check.low < 0 < check.high
    assert "0 answers changed from right to wrong and 0 from wrong to right" in check.reason
    check = score_of(one_row_more, baseline, held_out)
    scored = evaluate(locate(str(baseline.folder), baseline.folder), EvaluateOptions(FP32, data=held_out)).rows[0]
    assert (check.rows, check.baseline, check.candidate) == (200, scored.accuracy, scored.accuracy)
    assert "200 rows: the file held_out.csv" in check.reason


def test_with_one_row_more_the_rows_that_the_candidate_trained_on_are_left_out(baseline, one_row_more):
    check = score_of(one_row_more, baseline)
    data: Any = baseline.data
    mine = {name: baseline.task.rows.set_texts(data, name) for name in ("validation", "random-split")}
    trained_on = {comparison_key(text) for text in one_row_more.task.rows.set_texts(one_row_more.data, "train").texts}
    kept = [text for texts in mine.values() for text in texts.texts if comparison_key(text) not in trained_on]
    everything = sum(map(len, mine.values()))
    assert 0 < len(kept) < everything and check.rows == len(kept)
    assert f"without {everything - len(kept):,} rows that the candidate was trained on" in check.reason
    assert check.change == 0.0 and check.candidate is not None and check.candidate > 0.8


def test_labels_are_matched_by_name(baseline: Bundle, swapped: Bundle, held_out: Path, tmp_path: Path) -> None:
    """By index the two would be equally good."""
    for file in (None, held_out):
        check = score_of(swapped, baseline, file)
        assert check.status == "fail" and check.baseline is not None and check.candidate is not None
        assert check.candidate == pytest.approx(1 - check.baseline) and check.candidate < 0.2
    other = changed(baseline.folder, tmp_path / "other", data={"labels": ["negative", "good"]})
    check = score_of(other, baseline, held_out)
    assert check.status == "undecided" and "the candidate lacks the label 'positive'" in check.reason


def test_data_that_changed_leave_it_undecided_with_the_remedy(baseline, one_row_more, tmp_path, held_out):
    """The file was changed in place: the baseline's rows cannot be drawn again, and export's scores are of others."""
    prints = baseline.manifest.data_fingerprints
    lost_rows = changed(one_row_more.folder, tmp_path / "lost", data_fingerprints=dict(prints))
    check = score_of(baseline, Bundle.open(changed(lost_rows.folder, tmp_path / "l", run="l").folder))
    assert check.status == "pass" and "scores recorded by export on the same" in check.reason
    other = {**prints, "validation": "0", "random-split": "1"}
    renewed = changed(baseline.folder, tmp_path / "renewed", data_fingerprints=other)
    check = score_of(renewed, lost_rows)
    assert check.status == "undecided" and check.candidate is None
    assert "its random-split set differs from the recorded one" in check.reason and "--eval-data FILE" in check.reason
    assert score_of(renewed, lost_rows, held_out).status == "pass"


def answers(right: int, wrong: int) -> np.ndarray[Any, Any]:
    return np.array([[1.0]] * right + [[0.0]] * wrong)


@pytest.mark.parametrize(
    ("old", "new", "limit", "status", "message"),
    [
        # 1,000 rows, a row lost: far from a limit of 5 points.
        ((900, 100), (899, 101), 0.05, "pass", None),
        # 100 lost of 1,000: beyond a limit of 1 point for sure.
        ((900, 100), (800, 200), 0.01, "fail", None),
        # 15 lost and limits on either side of that: the estimate decides, the reason says how sure it is.
        ((900, 100), (885, 115), 0.016, "pass", "lies inside the interval"),
        ((900, 100), (885, 115), 0.014, "fail", "lies inside the interval"),
        # 2 lost of 1,000 may be chance.
        ((900, 100), (898, 102), 0.001, "undecided", "may be chance"),
        # One row of 50 is twice the limit: only an interval beyond it decides.
        ((45, 5), (45, 5), 0.01, "undecided", "too few rows for a limit of 0.01"),
        ((45, 5), (44, 6), 0.01, "undecided", "--eval-data FILE"),
        ((45, 5), (5, 45), 0.01, "fail", None),
    ],
)
def test_the_estimate_decides_and_the_reason_has_its_interval(old, new, limit, status, message):
    task = get_task("classification")
    check = GateCheck(name="score", artifact="a", status="undecided", unit="accuracy", limit=limit)
    check = compare_figures(task, check, answers(*old), answers(*new), "a file")
    assert check.status == status and "95% interval of the difference" in check.reason
    if message is None:
        assert not any(words in check.reason for words in ("lies inside the", "too few", "chance"))
    else:
        assert message in check.reason


@pytest.fixture
def running_text(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt", "".join(f"{row.text}\n" for row in synthetic_reviews(60, seed=8)))
    return tmp_path / "text.txt"


def test_a_language_model_is_scored_by_perplexity_and_a_decode_graph_as_its_full_graph(running_text: Path) -> None:
    bundle = Bundle.open(LANGUAGE)
    scored = evaluate(locate(str(LANGUAGE), LANGUAGE), EvaluateOptions(FP32, data=running_text)).rows[0]
    decode = next(single.id for single in bundle.built("decode") if single.precision == "fp32")
    for artifact in (FP32, decode):
        check = score_of(bundle, bundle, running_text, artifact=artifact)
        assert check.status == "pass" and check.artifact == artifact and check.unit == "perplexity"
        assert check.candidate == check.baseline == pytest.approx(scored.perplexity)


def test_perplexities_of_other_tokens_are_compared_per_word(running_text: Path, tmp_path: Path) -> None:
    """Cut to fewer tokens, rows are other rows: those that neither cuts are compared, by their words."""
    bundle, cut = Bundle.open(LANGUAGE), 28
    rows = bundle.task.rows
    lengths = rows.encode_rows(bundle.data, bundle.reader(), rows.file_texts(bundle.data, running_text)).lengths
    shorter = changed(LANGUAGE, tmp_path / "short", data={"sequence_length": cut}, max_length=cut)
    check = score_of(shorter, bundle, running_text)
    assert bundle.manifest.max_length == 32 and check.rows == int((lengths < cut).sum()) > 0
    assert "per word, because the two tokenizers differ" in check.reason and check.change == pytest.approx(0, abs=1e-6)
    lost_rows = changed(LANGUAGE, tmp_path / "tiny", data={"sequence_length": 8}, max_length=8)
    assert "every text of" in score_of(lost_rows, bundle, running_text).reason


@pytest.fixture
def timed_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing that found nothing: what is left decides."""
    passed = GateCheck(name="latency", artifact=FP32, status="pass")
    monkeypatch.setattr(gate_module, "timed_checks", lambda *_: [passed])


OPTIONS = ProfileOptions(threads=(1,), batches=(1,), seqs=(8,), artifacts=(FP32,), rules=RULES)


def gated(candidate: Bundle, baseline: Bundle, eval_data: Path | None = None) -> Gate:
    gate = GateOptions(rules=RULES, eval_data=eval_data)
    return gate_bundles(Location(None, candidate.folder), baseline, HOST, OPTIONS, gate)


@pytest.mark.usefixtures("timed_well")
def test_a_gate_with_an_unknown_score_does_not_pass(baseline, swapped, tmp_path, held_out):
    """The issue's case: other rows were called unknown, and 0.94 against 0.14 passed."""
    assert gated(baseline, baseline).exit_code == 0
    assert gated(swapped, baseline).exit_code == 3
    elsewhere = changed(swapped.folder, tmp_path / "elsewhere", data_fingerprints={"train": "0", "validation": "1"})
    for file, status, code in ((None, "undecided", UNDECIDED), (held_out, "fail", 3)):
        gate = gated(elsewhere, baseline, file)
        assert (gate.status, gate.exit_code) == (status, code)


@pytest.mark.usefixtures("timed_well")
def test_every_provider_of_a_runtime_is_scored(baseline: Bundle) -> None:
    pytest.importorskip("openvino", reason="the second runtime that opens an ONNX file")
    options = replace(OPTIONS, runtime="all")
    gate = gate_bundles(Location(None, baseline.folder), baseline, HOST, options, GateOptions(rules=RULES))
    providers = [check.provider for check in gate.checks if check.name == "score"]
    assert {"CPUExecutionProvider", "openvino-cpu"} <= {*providers} and len(providers) == len({*providers})
    assert {*providers} == {check.provider for check in gate.checks if check.name == "latency"}


@pytest.mark.usefixtures("timed_well")
def test_the_command_scores_on_a_file_and_says_so(baseline, swapped, held_out, tmp_path, edgeformer):
    requested = ["gate", str(swapped.folder), "--device", "host", "--artifact", FP32, "--against", str(baseline.folder)]
    files = ["--junit", str(tmp_path / "gate.xml"), "--summary", str(tmp_path / "gate.md")]
    gate = json.loads(edgeformer(*requested, "--eval-data", str(held_out), *files, "--json", code=3))
    (score,) = [check for check in gate["checks"] if check["name"] == "score"]
    assert (score["status"], score["rows"]) == ("fail", 200) and score["high"] < -0.5
    for name in ("gate.xml", "gate.md"):
        assert "200 rows: the file held_out.csv" in (tmp_path / name).read_text(encoding="utf-8").replace("\\_", "_")
    printed = edgeformer(*requested, "--max-score-loss", "off", code=0)
    assert "not checked: score (--max-score-loss off)" in printed.replace("\n", " ")
