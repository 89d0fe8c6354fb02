"""``python -m benchmarks`` and `make bench`: scripts, skipped cases, and bars judged on a quiet machine."""

import json
import time
from pathlib import Path

import onnx
import pytest
import typer
from onnx import numpy_helper

from benchmarks import bench, judging
from benchmarks.__main__ import SCRIPTS, main
from benchmarks.floors import floor_s, needed_by
from benchmarks.judging import INCOMPLETE, MET, NOT_JUDGED, NOT_MET, Limit, Watch, judged, report_bars, unless
from edgeformer.bundle import Bundle
from edgeformer.measurement.conditions import CpuReading
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
