"""`profile` of any ONNX file: measured here, estimated for a device, judged, and nothing written beside the file."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from onnx import helper

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.report import MeasureRules, Report
from edgeformer.benchmark import request
from edgeformer.benchmark.choice import ChoiceOptions
from edgeformer.benchmark.profile import ProfileOptions, profile_bundle
from edgeformer.benchmark.request import resolve
from edgeformer.bundle import Bundle
from edgeformer.estimate.estimate import estimate
from edgeformer.imports.onnx import OnnxImportOptions, import_onnx
from edgeformer.measurement.artifact import Item
from edgeformer.run import Location
from tests.cli.in_process import Edgeformer
from tests.export import graphs
from tests.export.graphs import save

QUICK = MeasureRules(
    warmup_min_s=0.0, warmup_min_calls=2, warmup_max_s=0.1, min_s=0.02, min_calls=5, max_s=0.5, idle_s=0.0, energy_s=0.0
)
PI = load_profile("raspberry-pi-5")


def bundle_of(folder: Path, graph: object, **options: object) -> Bundle:
    import_onnx(save(folder, graph), folder / "bundle", OnnxImportOptions(**options))  # type: ignore[arg-type]
    return Bundle.open(folder / "bundle")


def profiled(bundle: Bundle, **options: object) -> Report:
    all_options = ProfileOptions(rules=QUICK, threads=(1,), **options)  # type: ignore[arg-type]
    return profile_bundle(Location(None, bundle.folder), PI, all_options)


def test_rows_at_every_size_that_the_graph_takes(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, graphs.embedding())
    report = profiled(bundle, batches=(1, 3), seqs=(5,), max_latency_ms=50.0)
    steady = [row for row in report.rows if row.phase == "steady"]
    assert {(row.where, row.batch, row.seq) for row in steady} == {
        (where, *shape) for where in ("host", "device") for shape in ((1, 5), (3, 5), (1, 128))
    }
    row = next(row for row in steady if (row.where, row.batch, row.seq) == ("host", 3, 5))
    assert row.inputs == {"input_ids": (3, 5), "attention_mask": (3, 5)} and row.latency_ms.status == "measured"
    # The command's limit at the shapes that it names, the budget's own at the budget's.
    judged = [(check.name, check.batch, check.seq) for check in report.verdict.checks]
    assert judged == [("memory", 1, 128), ("latency", 1, 5), ("latency", 3, 5)]
    assert any(note.startswith("inputs: input_ids [B, S]") for note in report.notes)


def test_fixed_sizes_are_one_row_that_says_what_went_in(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, graphs.recurrent(), shapes={"x": (5, 1, 4)}, ranges={"rate": (8000, 16000)})
    resolved = resolve(ProfileOptions(), PI, bundle.manifest)
    assert resolved.shapes == ((1, 1),) and resolved.requirements.shape == (1, 1)
    assert "all sizes are fixed" in resolved.notes[0]


ITEM: Item = ("steady", 1, 1)


@pytest.mark.parametrize(("name", "graph"), [("If", graphs.branching()), ("Loop", graphs.looping())])
def test_an_estimate_says_what_was_never_checked(tmp_path: Path, name: str, graph: object) -> None:
    bundle = bundle_of(tmp_path, graph)
    (row,) = estimate(bundle, bundle.artifacts[0], PI, [ITEM])
    assert row.latency_ms.status == "estimated" and row.latency_ms.warnings
    assert f"{name}: counted as often as it ran" in str(row.latency_ms.reason)


def test_a_loop_counts_every_round_and_unknown_operators_give_no_estimate(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, graphs.looping(6))
    (row,) = estimate(bundle, bundle.artifacts[0], PI, [ITEM])
    assert row.work is not None and row.work.operations == 6 * 2 * 6 * 6
    nodes = [helper.make_node("GridSample", ["x", "grid"], ["y"], mode="linear")]
    inputs = [graphs.value("x", graphs.FLOAT, [1, 3, 64, 64]), graphs.value("grid", graphs.FLOAT, [1, 64, 64, 2])]
    graph = graphs.model(nodes, inputs, [graphs.value("y", graphs.FLOAT, [1, 3, 64, 64])], opset=20)
    bundle = bundle_of(tmp_path / "unknown", graph)
    (row,) = estimate(bundle, bundle.artifacts[0], PI, [ITEM])
    assert row.latency_ms.status == "unavailable" and row.latency_ms.p50 is None
    assert "GridSample (1)" in str(row.latency_ms.reason) and "without a known cost" in str(row.latency_ms.reason)


def test_search_by_how_close_the_outputs_are(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, graphs.embedding())
    report = profiled(bundle, batches=(1,), seqs=(5,), runtime="onnxruntime", choose=ChoiceOptions(0.99, "size"))
    assert report.search is not None and report.search.pick == 0 and report.search.metric == "cosine"
    assert report.search.not_in_bundle[0] == "FP16 graphs: add them with edgeformer export --fp16"


@dataclass(frozen=True)
class QuickRules(MeasureRules):
    """Rules of the command, without an option of their own."""

    min_s: float = 0.02
    min_calls: int = 5


@pytest.mark.slow
def test_the_command_takes_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgeformer: Edgeformer) -> None:
    monkeypatch.setattr(request, "MeasureRules", QuickRules)
    theirs, work = save(tmp_path / "theirs", graphs.convolutions()), tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    line = ("profile", str(theirs), "--device", "raspberry-pi-5", "--batch", "1", "--max-latency", "1s", "--json")
    report = json.loads(edgeformer(*line))
    assert report["verdict"]["status"] == "pass" and {row["where"] for row in report["rows"]} == {"host", "device"}
    assert [path.name for path in theirs.parent.iterdir()] == ["net.onnx"]
    (folder,) = (work / "artifacts/wrapped").iterdir()
    assert (folder / "reports/raspberry-pi-5-latency-1000ms-batch-1.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["theirs/net.onnx", "--shape", "y=1"], "no such input"),
        (["bundle", "--shape", "x=1"], "--shape: is for an ONNX file"),
        (["theirs/net.onnx", "--choose", "--min-score", "2"], "lowest accepted cosine of a graph"),
        (["theirs/gone.onnx"], "no run 'theirs/gone.onnx'"),
    ],
)
def test_slips(tmp_path, monkeypatch, edgeformer, arguments, says):
    import_onnx(save(tmp_path / "theirs", graphs.convolutions()), tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    printed = edgeformer("profile", *arguments, "--device", "raspberry-pi-5", code=2)
    assert says in printed.replace("\n", " ")
