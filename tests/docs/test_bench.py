"""`make bench` says what it skips and why, ends in time, and what it leaves is shown."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.bench import CASES, Case, Models, command_of, machine_folder, main, run
from benchmarks.judging import judged
from benchmarks.results_page.bench import _PARTS, Machine, bars, bench
from tests.docs.document import ROOT


def told(folder: Path) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = json.loads((folder / "session.json").read_text(encoding="utf-8"))["cases"]
    return results


def models(folder: Path, **given: list[str]) -> Models:
    return Models({"peers_python": [sys.executable], **given}, folder, time.monotonic() + 60)


def test_what_is_not_at_hand_is_skipped_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "peers,loop_int8", "--out", str(tmp_path)]) == 0
    results = told(tmp_path)
    assert results["peers"] == {"status": "skipped", "reason": "needs MiniLM's folder: --model DIR"}
    assert results["loop_int8"]["status"] == "skipped"
    assert "--model DIR" in capsys.readouterr().out


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    assert main(["--only", "decode,waiting", "--minutes", "0", "--out", str(tmp_path)]) == 0
    assert {case["reason"] for case in told(tmp_path).values()} == {"no time is left"}


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    results = run(Case("floors", (), packages=("no_such_package",)), models(tmp_path), tmp_path)
    assert results == {"status": "skipped", "reason": "needs no_such_package, which is not installed"}


def test_a_script_that_fails_says_why_and_leaves_nothing_of_an_earlier_session(tmp_path: Path) -> None:
    (tmp_path / "plan_time.json").write_text("{}", encoding="utf-8")
    results = run(Case("plan_time", (str(tmp_path / "no-such-run"),)), models(tmp_path), tmp_path)
    assert results["status"] == "failed"
    assert results["reason"]
    assert results["seconds"] > 0
    assert not (tmp_path / "plan_time.json").exists()


def test_a_script_that_could_not_judge_all_is_incomplete_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; print('1 of 2 bars were not judged: torch is away', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr("benchmarks.bench.command_of", lambda *given: [sys.executable, "-c", script])
    results = run(Case("peers", ()), models(tmp_path), tmp_path)
    assert (results["status"], results["reason"]) == ("incomplete", "1 of 2 bars were not judged: torch is away")


def test_unknown_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--only", "nothing", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "there are waiting, floors" in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scripts_take_the_options_that_they_are_given(case: Case, tmp_path: Path) -> None:
    parameters = {name: [f"/some/{name}"] for name in case.needs}
    opened = Models({"peers_python": ["python"], **parameters}, tmp_path, time.monotonic() + 60)
    command = command_of(Case(case.name, case.arguments, case.needs, out=case.out), opened, tmp_path / "out.json")
    source = (ROOT / "benchmarks" / f"{case.name}.py").read_text(encoding="utf-8")
    assert [word for word in command if word.startswith("--") and f'"{word}"' not in source] == []
    assert not any("{" in word for word in command)
    assert case.name in _PARTS  # and docs/results.md shows what it writes


def test_every_seed_of_a_run_is_handed_on(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "loop_int8")
    command = command_of(case, models(tmp_path, crt=["one", "two", "three"]), tmp_path / "out.json")
    assert command[command.index("one") :][:3] == ["one", "two", "three"]


def test_models_are_trained_with_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    lines = ["sentence\tlabel", *(f"text number {number}\t{number % 2}" for number in range(100))]
    for part in ("train", "validation", "test"):
        (tmp_path / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(LookupError, match=r"--tokenizer \S+none\.json: error: .*none\.json"):
        models(tmp_path, data=[str(tmp_path)], tokenizer=[str(tmp_path / "none.json")]).paths("light")


def test_seconds_are_no_ratios() -> None:
    times = [judged("--help, s", [0.25], 0.3, at_least=False), judged("torch over ours", [1.25], 1.0, at_least=True)]
    text = {"host": "A CPU", "measured": "2026-11-24", "cases": {"waiting": {}}}
    displayed = bars([Machine(Path("a-cpu"), text, {"waiting": {"bars": times}})])
    assert "0.25 s (" in displayed and "1.25× (" in displayed


def test_the_page_shows_what_was_measured_machine_by_machine(tmp_path: Path) -> None:
    assert bench(tmp_path) == ""
    first, second = tmp_path / "a-cpu", tmp_path / "b-cpu"
    first.mkdir()
    second.mkdir()
    cases = {
        "waiting": {"status": "incomplete", "reason": "another"},
        "floors": {"status": "done", "measured": "2026-11-25T00:00:00", "code_version": "0.2"},
    }
    cases |= {"peers": {"status": "skipped", "reason": "needs MiniLM's folder"}}
    session = {"host": "A CPU", "threads": 2, "measured": "2026-11-23T01:00:00", "cases": cases, "code_version": "0.1"}
    (first / "session.json").write_text(json.dumps(session), encoding="utf-8")
    row = {"median": 0.21, "least": 0.2, "most": 0.25, "bar": 0.3}
    bars = [judged("--help, s", [0.2, 0.21, 0.25], 0.3, at_least=False), judged("another, s", [], 5, at_least=False)]
    (first / "waiting.json").write_text(json.dumps({"seconds": {"--help": row}, "bars": bars}), encoding="utf-8")
    way = {"way": "onnxruntime fp32", "floors": 1.38, "bar": 1.4}
    floors = {"bundles": {"light": {"16x128": {"best": {"fp32": way}}}}}
    (first / "floors.json").write_text(json.dumps(floors), encoding="utf-8")
    (first / "peers.json").write_text("{", encoding="utf-8")  # of an earlier session
    other = {**session, "host": "B", "kernels": ["vnni"], "cases": {"waiting": {"status": "done"}}}
    (second / "session.json").write_text(json.dumps(other), encoding="utf-8")
    slow = [judged("--help, s", [0.4, 0.5, 0.6], 0.3, at_least=False)]
    (second / "waiting.json").write_text(json.dumps({"seconds": {"--help": row}, "bars": slow}), encoding="utf-8")
    page = bench(tmp_path)
    table, of_first, of_second = page.split("\n\n### ")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    unjudged = "– not judged: 0 of at least 3 rounds were measured"
    assert [rows[0], *rows[2:]] == [
        ["", "bar", "A CPU", "B (vnni)"],
        ["--help, s", "at most 0.3", "0.21 s (0.20–0.25) met", "0.50 s (0.40–0.60) not met"],
        ["another, s", "at most 5", unjudged, "not measured"],
    ]
    assert of_first.startswith("A CPU\n\n2 threads, 2026-11-23 to 2026-11-25.")
    assert "By the code of 0.1 (`waiting`); 0.2 (`floors`)." in of_first
    assert "0.21 (0.20–0.25)" in of_first
    assert "| light" in of_first
    assert "1.38" in of_first
    assert "`peers` did not run: needs MiniLM's folder." in of_first
    assert of_second.startswith("B (vnni)\n\n2 threads, 2026-11-23.")
    assert "peers" not in of_second


@pytest.mark.parametrize(
    ("cpu", "kernels", "folder"),
    [
        ("Intel(R) Xeon(R) Processor", ["amx", "vnni"], "intel-xeon-amx-vnni"),
        ("AMD EPYC", ["bf16"], "amd-epyc-bf16"),
        ("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", [], "intel-core-i7-9750h"),
    ],
)
def test_two_kinds_of_machine_have_two_folders(cpu: str, kernels: list[str], folder: str) -> None:
    assert machine_folder(cpu, kernels) == folder


def test_only_adds_to_a_session_of_the_same_machine_and_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def again(*names: str, **changes: object) -> dict[str, dict[str, object]]:
        path = tmp_path / "session.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
        main(["--only", ",".join(names), "--out", str(tmp_path)])
        return told(tmp_path)

    assert main(["--only", "peers", "--out", str(tmp_path)]) == 0
    done = {"peers": {"status": "done", "seconds": 9.0}}
    assert again("loop_int8", cases=done) == {**done, "loop_int8": told(tmp_path)["loop_int8"]}
    assert "a new session" not in capsys.readouterr().out
    assert again("loop_int8", cases=done, versions={"onnxruntime": "0.1"}).keys() == {"loop_int8"}
    assert f"a new session begins: versions are not those of the one in {tmp_path}" in capsys.readouterr().out
    assert again("loop_int8", cases=done, host="Another CPU").keys() == {"loop_int8"}
