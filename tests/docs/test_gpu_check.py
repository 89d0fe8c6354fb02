"""benchmarks/gpu: every row of the checklist runs, at tiny sizes on the CPU, and its figures can be gone on with."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import estimates, levers
from benchmarks.gpu import session as sessions
from benchmarks.gpu.__main__ import OPEN
from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.session import DONE, FAILED, Column, Options, Row, Session, perform
from benchmarks.results_page.gpu import gpu, table
from edgeformer.artifacts.errors import InputError
from edgeformer.models import load_recipe
from tests.docs.document import ROOT


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
