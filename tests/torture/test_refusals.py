"""Hostile files of every kind are refused early, with a clear message, and nothing in them runs."""

from pathlib import Path

import pytest

from tests.cli.measure_cli import measured, refused
from tests.torture.refusals import CASES, STARTS


@pytest.mark.torture
@pytest.mark.parametrize("name", CASES)
def test_hostile_files_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = CASES[name](tmp_path)
    (tmp_path / "empty").mkdir()
    start = STARTS["recipe" if name.startswith("YAML") else command[0]](tmp_path / "empty")
    start_s = measured(*start, cwd=tmp_path / "empty").seconds
    cost = measured(*command, cwd=tmp_path, stop_after_s=300)
    with capsys.disabled():
        message = " ".join(cost.err.split()).removeprefix("error: ").replace("|", "/")
        seconds = f"{cost.seconds:.1f} | {max(0, cost.seconds - start_s):.1f}"
        # A row of docs/explanation/reliability.md.
        print(f"\n| {name} | {cost.code} | {seconds} | {cost.bytes / 2**20:.0f} | {message} |")
    refused(cost, "error: ", beyond_s=start_s)
    assert not list(tmp_path.rglob("proof"))
