"""The public interface keeps what its snapshot files record: see ``record.py`` on how to add to them."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from edgeformer.benchmark.gate_result import Gate, GateCheck
from tests.cli.run_cli import Outcome, edgeformer
from tests.interface.record import key_paths, load, missing_keys, missing_options, read_commands, run_documents

OPTIONS, DOCUMENTS, EXIT_CODES = load("options.json"), load("json_keys.json"), load("exit_codes.json")
SLOW = ("train", "gate")
"""Documents of commands that take long."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("interface")


@pytest.fixture(scope="module")
def outcomes(workplace: Path) -> dict[str, Outcome]:
    """What the commands of ``json_keys.json`` print, except for the slow ones."""
    return run_documents(workplace, omitted=SLOW)


def check_document(name: str, outcome: Outcome) -> None:
    assert outcome.code == DOCUMENTS[name]["exit_code"], outcome.err
    assert missing_keys(DOCUMENTS[name]["keys"], key_paths(json.loads(outcome.out))) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in SLOW])
def test_no_json_key_disappears(outcomes: dict[str, Outcome], name: str) -> None:
    check_document(name, outcomes[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_no_json_key_of_a_slow_command_disappears(finished_run: Path, tmp_path: Path, name: str) -> None:
    if name == "gate":
        shutil.copytree(finished_run, tmp_path / "artifacts" / "small")
        (tmp_path / "reviews.tsv").write_text("sentence\tlabel\n" + "warm\tpositive\ndull\tnegative\n" * 10)
    check_document(name, edgeformer(*shlex.split(DOCUMENTS[name]["command"]), "--json", cwd=tmp_path))


def test_no_option_disappears() -> None:
    commands = read_commands()
    problems = {name: missing_options(recorded, commands.get(name, {})) for name, recorded in OPTIONS.items()}
    assert {name: missing for name, missing in problems.items() if missing} == {}


def test_models_of_a_gate_have_every_key() -> None:
    fields = {*Gate.model_fields, *(f"checks[].{name}" for name in GateCheck.model_fields)}
    keys = [path.removesuffix("[]") for path in DOCUMENTS["gate"]["keys"] if not path.startswith("host.")]
    assert set(keys) <= fields


@pytest.mark.slow
@pytest.mark.usefixtures("outcomes")
@pytest.mark.parametrize(("line", "code"), EXIT_CODES.items())
def test_exit_codes_stay(workplace: Path, line: str, code: int) -> None:
    outcome = edgeformer(*shlex.split(line), cwd=workplace)
    assert outcome.code == code, outcome.err


def test_comparison_reports_what_disappears() -> None:
    recorded = {"--a": "value", "--b": "flag"}
    assert missing_options(recorded, {"--a": "flag", "--c": "required value"}) == [
        "--b (flag)", "--a: no longer value", "--c: is now required"
    ]  # fmt: skip
    keys = key_paths({"rows": [{"n": 1, "tests": {"x": 1.5}, "work": None}, {"work": {"calls": 2}}], "notes": []})
    assert keys["rows[].tests.*"] == "number" and keys["rows[].work"] == "null object"
    other = key_paths({"rows": [{"n": True, "tests": {}, "work": {"kernels": 2}}]})
    assert missing_keys(keys, other) == [
        "rows[].n: boolean instead of number",
        "rows[].tests: empty instead of object",
        "rows[].work.calls (number)",
        "notes (empty)",
    ]
