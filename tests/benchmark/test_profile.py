"""profile: measured and estimated rows, the verdict, notes; what Ctrl-C leaves; any ONNX file, which stays alone."""

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from onnx import helper

from edgeformer.artifacts.documents import load_profile
from edgeformer.artifacts.errors import InputError
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.report import MeasureRules, Report, Row
from edgeformer.benchmark import profile, request
from edgeformer.benchmark.choice import ChoiceOptions
from edgeformer.benchmark.profile import ProfileOptions, card_notes, profile_bundle
from edgeformer.benchmark.request import resolve
from edgeformer.bundle import Bundle
from edgeformer.cli import main
from edgeformer.estimate.estimate import estimate
from edgeformer.imports.onnx import OnnxImportOptions, import_onnx
from edgeformer.measurement.artifact import Item
from edgeformer.measurement.target import DevicePresence
from edgeformer.report.sentences import verdict_sentence, verdict_status
from edgeformer.run import Location
from edgeformer.system import nvidia
from edgeformer.tasks.classification import ClassificationScore
from tests.benchmark import choice_cases
from tests.cli.in_process import Edgeformer
from tests.export import graphs
from tests.export.graphs import save
from tests.measurement.measuring_child import RULES, Recorder
from tests.runtimes.tiny_bundle import artifact_of, classifier_graph, greedy_graph, write_bundle, write_manifest

FAST = ProfileOptions(rules=RULES, threads=(1,))
ONE_SHAPE = replace(FAST, batches=(1,), seqs=(8,))
PI, HOST = load_profile("raspberry-pi-5"), load_profile("host")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    graphs = {"model": classifier_graph(), "greedy": greedy_graph()}
    return write_bundle(tmp_path_factory.mktemp("profile") / "bundle", graphs)


@pytest.fixture(scope="module")
def on_cpu(bundle: Path) -> Report:
    return profile_bundle(Location(None, bundle), HOST, FAST)


def test_the_cpu_profile_measures_the_target_itself(on_cpu: Report, bundle: Path) -> None:
    assert (on_cpu.device, on_cpu.on_target, on_cpu.run, on_cpu.synthetic) == ("host", True, "tiny", True)
    assert {row.where for row in on_cpu.rows} == {"host"}
    model = [row for row in on_cpu.rows if row.artifact == "model"]
    assert [(row.phase, row.batch, row.seq) for row in model] == [("cold", 1, 24), ("steady", 1, 24)]
    for row in model:
        assert row.latency_ms.status == "measured"
        assert (row.memory_bytes.peak or 0) > 0
        assert row.size_bytes == (bundle / "onnx" / "model.onnx").stat().st_size
        assert row.energy_mj.status == "measured" or row.energy_mj.reason


def test_an_artifact_that_fails_leaves_the_others_and_an_unknown_verdict(on_cpu: Report) -> None:
    greedy = [row for row in on_cpu.rows if row.artifact == "greedy"]
    assert [row.latency_ms.status for row in greedy] == ["unavailable"]
    assert all("not enough memory" in str(row.latency_ms.reason) for row in greedy)
    checks = {(check.artifact, check.name): check for check in on_cpu.verdict.checks}
    assert [checks["model", name].status for name in ("size", "latency", "memory")] == ["pass"] * 3
    assert [checks["greedy", name].status for name in ("size", "latency", "memory")] == ["pass", "unknown", "unknown"]
    assert on_cpu.verdict.status == "unknown"


def test_progress_says_how_much_is_left(bundle: Path) -> None:
    progress = Recorder()
    options = replace(ONE_SHAPE, artifacts=("model",), threads=(1, 2))
    profile_bundle(Location(None, bundle), HOST, options, progress)
    first, *others = [text for text in progress.started if "again" not in text]
    assert first == "Measuring model (1 of 2)"
    assert re.fullmatch(r"Measuring model \(2 of 2, about \d+ s left\)", *others)


def test_an_absent_device_gets_rows_that_say_so_and_its_size_is_judged(bundle, monkeypatch):
    monkeypatch.setattr(nvidia, "gpus", list)
    options = replace(FAST, artifacts=("model",), batches=(1,), max_size_bytes=1000)
    report = profile_bundle(Location(None, bundle), load_profile("rtx4050"), options)
    assert report.on_target is False
    cold, host, device = report.rows
    assert (cold.where, cold.phase, host.where, host.phase) == ("host", "cold", "host", "steady")
    assert (device.where, device.phase) == ("device", "steady")
    assert host.latency_ms.status == "measured" and host.provider == "CPUExecutionProvider"
    assert device.provider == "CUDAExecutionProvider"
    assert device.latency_ms.status == device.memory_bytes.status == "estimated"
    assert device.latency_ms.low < device.latency_ms.p50 < device.latency_ms.high  # type: ignore[operator]
    assert device.memory_bytes.low < device.memory_bytes.peak < device.memory_bytes.high  # type: ignore[operator]
    assert device.latency_ms.p90 is None and device.latency_ms.n == 0 and device.throughput_per_s is None
    assert device.energy_mj.status == "unavailable" and "never estimated" in str(device.energy_mj.reason)
    assert report.estimated_for == "cuda" and report.estimate_error is None
    assert any("this host has no" in note for note in report.notes)
    assert device.size_bytes == host.size_bytes > 1000
    checks = {check.name: check for check in report.verdict.checks}
    assert (checks["size"].status, checks["size"].basis) == ("fail", "measured")
    assert checks["latency"].status == checks["memory"].status == "pass"  # eight weights
    assert checks["latency"].basis == checks["memory"].basis == "estimated"
    assert report.verdict.status == "fail"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host has an RTX 4050."""
    gpu = nvidia.Gpu(0, "NVIDIA GeForce RTX 4050 Laptop GPU", "GPU-1", 6 * 2**30, "8.9")
    monkeypatch.setattr(nvidia, "gpus", lambda: [gpu])


@pytest.mark.usefixtures("card")
def test_a_card_without_a_cuda_runtime_is_not_measured_by_the_cpu(bundle: Path) -> None:
    options = replace(FAST, artifacts=("model",), batches=(1,), provider="CPUExecutionProvider")
    report = profile_bundle(Location(None, bundle), load_profile("rtx4050"), options)
    assert report.on_target is True
    assert (report.rows[-1].where, report.rows[-1].latency_ms.status) == ("device", "estimated")
    expected = "CPUExecutionProvider measured the rows, and this device needs CUDAExecutionProvider"
    assert any(expected in note and "estimated instead" in note for note in report.notes)
    assert {check.name: check.basis for check in report.verdict.checks}["latency"] == "estimated"
    rest = next(note for note in report.notes if note.startswith("measured on the card: nothing"))
    assert "measured on the processor: model; edgeformer doctor says how to run ONNX graphs on the card" in rest


def test_a_note_separates_card_rows_from_cpu_rows() -> None:
    device, present = load_profile("rtx4050"), DevicePresence(True, "present: RTX 4050")
    engine, graph = choice_cases.row("tensorrt-rtx-fp16", provider="tensorrt-rtx"), choice_cases.row("onnx-fp16")
    (note,) = card_notes(device, present, [engine, graph])
    assert str(note).startswith("measured on the card: tensorrt-rtx-fp16; measured on the processor: onnx-fp16; ")
    assert card_notes(device, present, [engine]) == []
    assert card_notes(device, DevicePresence(False, "absent"), [engine, graph]) == []


@pytest.mark.usefixtures("card")
def test_an_engine_that_cannot_run_here_is_a_row_with_a_reason(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    engine = artifact_of(bundle, "onnx/model.onnx", id="engine", format="tensorrt-rtx")
    write_manifest(bundle, [engine])
    report = profile_bundle(Location(None, bundle), load_profile("rtx4050"), FAST)
    assert {row.where for row in report.rows} == {"host", "device"}
    host = [row for row in report.rows if row.where == "host"]
    assert all("engine was built for" in str(row.latency_ms.reason) for row in host)
    device = [row for row in report.rows if row.where == "device"]
    assert all("bundle has none for engine" in str(row.latency_ms.reason) for row in device)
    latency = next(check for check in report.verdict.checks if check.name == "latency")
    assert latency.status == "unknown" and "needs an ONNX graph" in str(latency.reason)
    assert any("cannot run here" in note for note in report.notes)


@pytest.fixture(scope="module")
def two_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def on_pi(two_graphs: Path) -> Report:
    return profile_bundle(Location(None, two_graphs), PI, ONE_SHAPE)


def test_artifacts_that_never_run_on_the_device_are_left_out(on_pi: Report, two_graphs: Path) -> None:
    assert on_pi.verdict.status == "pass"
    assert {check.artifact for check in on_pi.verdict.checks} == {"model", "wide"}
    assert on_pi.left_out == {"engine": "tensorrt-rtx engines run on NVIDIA GPUs only"}
    assert any(note.startswith("left out of the verdict") and "engine" in note for note in on_pi.notes)
    assert "Left out: 1 artifact that no" in verdict_sentence(on_pi) and "not known" not in verdict_sentence(on_pi)
    assert any(row.artifact == "engine" for row in on_pi.rows), "its row says why, as before"
    report = profile_bundle(Location(None, two_graphs), PI, replace(ONE_SHAPE, artifacts=("engine",)))
    assert (report.verdict.status, report.verdict.checks) == ("unknown", ())
    assert any("no artifact can run on this device" in note for note in report.notes)
    assert "every artifact that no" in verdict_sentence(report)


def test_the_verdict_on_an_absent_device_precedes_all_measurements(two_graphs, on_pi, monkeypatch):
    """What is estimated first is what the report says in the end; without the host nothing else is done."""
    first: list[Report] = []

    def measure(*arguments: object) -> list[Row]:
        assert first, "nothing is measured before the verdict is known"
        return []

    monkeypatch.setattr(profile, "measure_artifact", measure)
    profile_bundle(Location(None, two_graphs), PI, ONE_SHAPE, on_estimates=first.append)
    alone = profile_bundle(Location(None, two_graphs), PI, replace(ONE_SHAPE, no_host=True))
    for report in (*first, alone):
        assert {row.where for row in report.rows} == {"device"} and report.left_out == on_pi.left_out
        assert report.verdict == on_pi.verdict
    assert any("nothing was measured, the figures for the device are estimates" in note for note in alone.notes)
    with pytest.raises(InputError, match=r"--no-host: This host .* is this host"):
        profile_bundle(Location(None, two_graphs), HOST, replace(ONE_SHAPE, no_host=True))


def test_the_verdict_of_a_search_is_that_of_its_pick(two_graphs: Path, tmp_path: Path) -> None:
    small = (two_graphs / "onnx/model.onnx").stat().st_size
    options = replace(ONE_SHAPE, choose=ChoiceOptions(), max_size_bytes=small, runtime="onnxruntime")
    report = profile_bundle(Location(None, two_graphs), HOST, options)
    assert report.search.candidates[report.search.pick].artifact == "model"
    assert {c.artifact for c in report.search.candidates} == {"model", "wide"}, "no engine on a processor"
    assert report.verdict.status == "pass" and {check.artifact for check in report.verdict.checks} == {"model"}
    assert verdict_status(report) == "pass" and verdict_sentence(report).startswith("The search picks model. ")
    nothing = profile_bundle(Location(None, two_graphs), HOST, replace(options, max_size_bytes=1, artifacts=("model",)))
    assert nothing.search is not None and nothing.search.pick is None
    assert nothing.verdict.status == "fail" and verdict_sentence(nothing).startswith("The search picks no artifact: ")


class PressesCtrlC(Progress):
    """Raises KeyboardInterrupt, as Ctrl-C does, after some shapes were measured."""

    def __init__(self, shapes: int) -> None:
        self.left = shapes

    def advance(self, amount: int = 1, **fields: float) -> None:
        self.left -= 1
        if self.left <= 0:
            raise KeyboardInterrupt

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        if self.left <= 0:
            raise KeyboardInterrupt


def interrupted(folder: Path, shapes: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("edgeformer.cli.options.show_progress", lambda: PressesCtrlC(shapes))
    words = ["edgeformer", "profile", str(folder), "--device", "host", "--json", "--batch", "1,2", "--seq", "8"]
    monkeypatch.setattr(sys, "argv", [*words, "--max-latency", "50ms"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 130
    return str(json.loads(capsys.readouterr().out)["error"])


@pytest.mark.slow
def test_rows_that_were_measured_before_ctrl_c_are_written(tmp_path, monkeypatch, capsys):
    folder = write_bundle(tmp_path / "bundle")
    (folder / "reports").mkdir()
    (folder / "reports" / "host.json").write_text("an earlier report", encoding="utf-8")
    message = interrupted(folder, 1, monkeypatch, capsys)
    (path,) = (folder / "reports" / "interrupted").iterdir()
    report = Report.model_validate_json(path.read_text(encoding="utf-8"))
    assert [(row.phase, row.batch) for row in report.rows] == [("cold", 1), ("steady", 1)]
    assert {row.latency_ms.status for row in report.rows} == {"measured"}
    assert report.verdict.status == "unknown" and report.verdict.checks == ()
    assert report.notes == (
        "interrupted after 2 rows of 1 of 1 artifacts; there is no verdict",
        "the model was trained on synthetic text, so its scores say nothing about real text",
    )
    assert verdict_sentence(report) == "No limit was checked; size, latency and memory were not judged: interrupted."
    assert report.rows[1].latency_ms.stable is False
    assert report.estimate_evidence == () and report.estimated_for is None
    assert "2 rows of" in message and str(path) in message and "without a verdict" in message
    assert (folder / "reports" / "host.json").read_text(encoding="utf-8") == "an earlier report"


def test_ctrl_c_before_the_first_row_says_that_nothing_was_written(tmp_path, monkeypatch, capsys):
    folder = write_bundle(tmp_path / "bundle")
    files = sorted(folder.rglob("*"))
    message = interrupted(folder, 0, monkeypatch, capsys)
    assert message == "interrupted before the first row was measured; nothing was written"
    assert sorted(folder.rglob("*")) == files


QUICK = MeasureRules(
    warmup_min_s=0.0, warmup_min_calls=2, warmup_max_s=0.1, min_s=0.02, min_calls=5, max_s=0.5, idle_s=0.0, energy_s=0.0
)


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
