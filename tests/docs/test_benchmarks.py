"""``python -m benchmarks``, `make bench` and benchmarks/gpu: scripts, skipped cases, bars, and rows at tiny sizes."""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import typer
from onnx import numpy_helper

from benchmarks import bench, judging
from benchmarks.__main__ import SCRIPTS, main
from benchmarks.floors import floor_s, needed_by
from benchmarks.gpu import estimates, levers
from benchmarks.gpu import session as sessions
from benchmarks.gpu.__main__ import OPEN
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.session import DONE, FAILED, Column, Options, Row, Session, perform
from benchmarks.judging import INCOMPLETE, MET, NOT_JUDGED, NOT_MET, Limit, Watch, judged, report_bars, unless
from benchmarks.results_page.gpu import gpu, table
from edgeformer.artifacts.errors import InputError
from edgeformer.bundle import Bundle
from edgeformer.measurement.conditions import CpuReading
from edgeformer.models import load_recipe
from tests.docs.document import ROOT


def test_the_list_has_every_script() -> None:
    folder = ROOT / "benchmarks"
    files = [*folder.glob("[a-z]*.py"), *folder.glob("*/__main__.py")]
    started = {file for file in files if 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")}
    assert {file.stem if file.parent == folder else file.parent.name for file in started} == SCRIPTS.keys()
    keys = {"question", "machine", "target", "results", "page", "resume"}
    for name, script in SCRIPTS.items():
        assert {"question", "machine"} <= script.keys() <= keys
        assert "page" not in script or (ROOT / "docs" / script["page"]).is_file(), name


def test_a_script_is_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert "waiting " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no benchmark 'nothing'; there are bench"):
        main(["nothing"])
    main(["waiting", "--help"])
    assert capsys.readouterr().out.startswith("question  how long")


def read_cases(folder: Path) -> dict[str, dict[str, object]]:
    return json.loads((folder / "session.json").read_text(encoding="utf-8"))["cases"]


def test_skipped_and_unknown_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(only="hugging_face_trainer", out=tmp_path) == 0
    (result,) = read_cases(tmp_path).values()
    assert result["status"] == "skipped" and str(result["reason"]).startswith("needs ")
    assert "hugging_face_trainer: skipped: needs " in capsys.readouterr().out
    assert bench.main(only="floors,waiting", minutes=0, out=tmp_path / "later") == 0
    assert {case["reason"] for case in read_cases(tmp_path / "later").values()} == {"no time is left"}
    with pytest.raises(typer.BadParameter, match="unknown nothing; there are waiting, floors"):
        bench.main(only="nothing", out=tmp_path)


def test_a_script_that_fails_says_why_and_leaves_nothing_of_an_earlier_session(tmp_path: Path) -> None:
    (tmp_path / "waiting.json").write_text("{}", encoding="utf-8")
    models = bench.Models({}, tmp_path, time.monotonic() + 60)
    results = bench.run(bench.Case("waiting", (str(tmp_path / "no-such-run"),)), models, tmp_path)
    assert results["status"] == "failed" and results["reason"] and results["seconds"] > 0
    assert not (tmp_path / "waiting.json").exists()


def test_the_median_decides_in_the_sense_of_the_bar() -> None:
    ratios = [2.5, 3.1, 9.0]
    assert judged("speed", ratios, 3, at_least=True)["verdict"] == MET
    assert judged("time", ratios, 3, at_least=False)["verdict"] == NOT_MET
    assert {"median": 3.1, "low": 2.5, "high": 9.0}.items() <= judged("speed", ratios, 3, at_least=True).items()


def test_two_rounds_and_what_is_missing_judge_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    few, missing = judged("speed", [4.0, 5.0], 3, at_least=True), ["gone"]
    bars = [few, judged("peer", [4.0] * 3, 1, at_least=True, missing=missing)]
    assert [bar["verdict"] for bar in bars] == [NOT_JUDGED] * 2
    assert [bar["reason"] for bar in bars] == ["2 of at least 3 rounds were measured", "gone"]
    assert report_bars(bars) == INCOMPLETE
    assert "2 of 2 bars were not judged" in capsys.readouterr().err.splitlines()[-1]
    assert report_bars([judged("speed", [1.0] * 3, 3, at_least=True)]) == 0, "a bar that is not met was judged"


def test_nothing_is_judged_where_others_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = [judged("speed", [4.0] * 3, 3, at_least=True)]
    assert unless(None, bars) == bars
    (bar,) = unless("other processes used 1.5 cores", bars)
    assert (bar["verdict"], bar["reason"]) == (NOT_JUDGED, "other processes used 1.5 cores")
    # Ten seconds in which this process and its children used 12, and all processes 27.
    times = iter([CpuReading(0.0, 100.0, 10.0, 0.0, None), CpuReading(10.0, 127.0, 22.0, 0.0, None)])
    monkeypatch.setattr(judging, "_reading", lambda: next(times))
    results = Watch().conditions(1)
    assert (results["foreign_cores"], results["own_cores"]) == (1.5, 1.2)
    assert results["disturbed"] == "other processes used 1.5 cores while this was measured"


def test_rounds_end_before_the_time_is_over_and_parts_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def rounds(limit: Limit, took: float) -> int:
        done = 0
        for _ in limit.rounds(100):
            clock[0] += took
            done += 1
        return done

    limit = Limit(10, parts=2)
    assert rounds(limit, 70) == 4  # 280 of 300 seconds
    assert rounds(limit, 50) == 6  # 300 of the 320 that are left
    assert rounds(limit, 99) == 1, "the first is always done"


def test_the_floor_reads_the_weights_of_a_loop_once() -> None:
    bundle = Bundle.open(ROOT / "tests" / "old_format" / "classifier-v1" / "bundle")
    graph = onnx.load(str(bundle.folder / str(bundle.artifact("onnx-fp32").file))).graph
    sizes = {item.name: numpy_helper.to_array(item).nbytes for item in graph.initializer}
    read = [name for node in graph.node if node.op_type in ("MatMul", "Gemm") for name in node.input if name in sizes]
    single, in_every_loop = sum(sizes[name] for name in {*read}), sum(sizes[name] for name in read)
    needed = needed_by(bundle, (1, 16))
    # The file's other small arrays are no products', but the manifest does not tell them apart.
    assert single <= needed.weight_bytes < 0.7 * in_every_loop
    slow_memory = {"fp32": 1e30, "int8": 1e30, "bandwidth": 1e6}
    assert floor_s(needed, slow_memory, "fp32") == pytest.approx(needed.weight_bytes / 1e6)
    assert floor_s(needed, slow_memory, "int8") == pytest.approx(needed.weight_bytes / 4e6)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """Of a dry run at a commit that nothing has changed since."""
    monkeypatch.setattr(sessions, "code_version", lambda: "0.1.0+0123456789")
    return Options(True, tmp_path / "results", tmp_path / "work", None)


def read_document(options: Options, row: Row) -> dict[str, object]:
    """The one file of a row."""
    (path,) = (options.out / "dry-run").glob(f"*-{row.topic}.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", OPEN, ids=lambda row: row.topic)
@pytest.mark.slow
def test_every_row_runs_on_a_cpu(row: Row, options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    if row.topic == "estimates":  # as if it was exported before, which takes half of all these tests' time
        exported = options.work / row.topic / load_recipe(estimates.MODELS["light"]).name
        shutil.copytree(ROOT / "tests" / "old_format" / "classifier-v1", exported)
    assert perform(row, options) == DONE, capsys.readouterr().out
    document = read_document(options, row)
    cases = document["cases"]
    assert isinstance(cases, dict) and cases and document["complete"] is True
    assert document["dry_run"] is True and document["commit"] == "0.1.0+0123456789" and document["versions"]["torch"]  # type: ignore[index]
    displayed = table(row.columns, cases)
    assert [name for name, case in cases.items() if "figures" not in case] == []
    assert displayed.count("\n") == len(cases) + 1 and len(displayed.splitlines()[0].split("|")) == len(row.columns) + 3


def test_every_lever_is_moved_by_the_recipe_and_by_nothing_else(options: Options) -> None:
    session, moved = Session(next(row for row in ROWS if row.topic == "levers"), options), dict[str, list[str]]()
    for name, lever in levers.LEVERS.items():
        recipe = levers.recipe_for(session, lever.recipe, levers.settings(lever))
        moved.setdefault(recipe.to_yaml(), []).append(name)
    same = [names for names in moved.values() if len(names) > 1]
    # Math attention is no key: nobody would ask for it. A dry run's recipes are in fp32 already.
    assert same == [["as the recipe is", "fp32"], ["attention: SDPA", "attention: math"], ["encoder", "encoder, fp32"]]
    assert [row.number for row in ROWS] == list(range(1, 14))
    assert len({row.topic for row in ROWS}) == len(ROWS)


def test_what_is_known_is_not_measured_again_and_what_failed_is(options: Options) -> None:
    arguments: list[str] = []

    def measure(session: Session) -> None:
        def case(name: str) -> dict[str, object]:
            arguments.append(name)
            if arguments == ["good", "bad"]:
                raise InputError("no such thing")
            return {"value": 1.0}

        session.case("good", lambda: case("good"))
        session.case("bad", lambda: case("bad"))

    row = Row(1, "topic-1", "is it?", "yes", measure, (Column("value", "value"),))
    assert perform(row, options) == FAILED
    assert read_document(options, row)["cases"]["bad"]["failed"] == "InputError: no such thing"  # type: ignore[index]
    assert perform(row, options) == DONE
    assert arguments == ["good", "bad", "bad"]
    assert perform(row, replace(options, again=True)) == DONE and arguments[3:] == ["good", "bad"]


def test_a_committed_file_becomes_a_section(tmp_path: Path) -> None:
    row = ROWS[0]
    case = {"figures": {"measured_peak_bytes": 5_000_000_000, "tokens_per_s": 1234.5}, "seconds": 1.0, "card": None}
    document = {"topic": row.topic, "gpu": "NVIDIA Card", "dry_run": False, "complete": False, "left": ["more"]}
    document |= {"began": "2027-01-02T03:04:05Z", "versions": {"torch": "2.11.0"}, "commit": "abc"}
    cases = {"train": case, "broken": {"failed": "OutOfMemoryError: no | memory"}}
    folder = tmp_path / "nvidia-card"
    folder.mkdir()
    text = json.dumps({**document, "cases": cases, "summary": {"prediction_off": 0.0512, "within": True}})
    (folder / f"2027-01-02-{row.topic}.json").write_text(text, encoding="utf-8")
    displayed = gpu(tmp_path)
    for words in ("NVIDIA Card", "5,000,000,000", "1,234", "Not finished", r"no \| memory"):
        assert words in displayed
    assert "So far:\n\n- predicted tensors over the measured peak, less one: 0.0512" in displayed
