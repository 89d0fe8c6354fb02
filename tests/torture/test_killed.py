"""Exports and reports are killed before every change that they make on the disk: nothing is lost, nothing is left."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from edgeformer.artifacts.report import Report
from edgeformer.artifacts.workspace import REPORTS_FOLDER, read_manifest
from edgeformer.report.documents import write_report
from edgeformer.run import Location
from tests.report.made_reports import made_report, made_row, measured
from tests.torture.children import COUNTED, begin, ends, watch_changes
from tests.torture.export_children import _CONTEXT, assert_whole, changes, copied_run, export_in_child

pytestmark = pytest.mark.torture
AGED_S = 7200.0
OPTIONS = ("--int8", "--replace")
"""The bundle says nothing of what it was made of: only --replace makes it again."""


def test_export_killed_before_every_change(tmp_path: Path) -> None:
    _CONTEXT.set_forkserver_preload(["tests.torture.traced_graphs"])
    complete = copied_run(tmp_path / "whole")
    log = tmp_path / "whole.log"
    assert export_in_child(complete, *OPTIONS, log=log) == 0, log.read_text(encoding="utf-8")
    count, ids = len(changes(log)), assert_whole(complete)
    old_ids = assert_whole(copied_run(tmp_path / "old"))  # without the engine that OpenVINO adds where it is installed
    start = end = 0
    for number in range(1, count + 1):
        folder = tmp_path / f"killed-{number}"
        run = copied_run(folder)
        assert export_in_child(run, *OPTIONS, kill=(number, "before"), log=log) == -signal.SIGKILL
        built = "made_from" in (run / "bundle" / "bundle.json").read_text(encoding="utf-8")
        assert assert_whole(run) == (ids if built else old_ids), number
        start, end = start + (not built), end + built
        assert export_in_child(run, *OPTIONS, log=log) == 0, log.read_text(encoding="utf-8")
        assert assert_whole(run) == ids, number
        assert not list(run.glob(".bundle*")), number
        shutil.rmtree(folder)
    assert start and end
    print(f"{count} kills: {start} left the old bundle, {end} the new one; all whole, all exported again")


def _write_report(run: Path, p50: float, kill_at: int | None) -> None:
    noted = watch_changes(run, kill=kill_at, functions=("open", "chmod", *COUNTED))
    write_report(made_report(made_row(measured(p50))), Location(run=run, bundle=None))
    count = len(noted)
    (run / "changes.txt").write_text(str(count), encoding="utf-8")


def contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / REPORTS_FOLDER).iterdir()}


def test_report_killed_before_every_change(tmp_path: Path) -> None:
    """Every file is the old or the new one."""
    (tmp_path / "run").mkdir()
    assert ends(begin(_write_report, tmp_path / "run", 20.0, None)) == 0
    old = contents(tmp_path / "run")
    assert ends(begin(_write_report, tmp_path / "run", 30.0, None)) == 0
    new = contents(tmp_path / "run")
    count = int((tmp_path / "run" / "changes.txt").read_text(encoding="utf-8"))
    assert old.keys() == new.keys() and {Path(name).suffix for name in new} >= {".json", ".md", ".csv", ".html", ".svg"}
    remaining = mixed = 0
    for number in range(1, count + 1):
        run = tmp_path / f"killed-{number}"
        (run / REPORTS_FOLDER).mkdir(parents=True)
        for name, content in old.items():
            (run / REPORTS_FOLDER / name).write_bytes(content)
        assert ends(begin(_write_report, run, 30.0, number)) == -signal.SIGKILL
        results = contents(run)
        rest = {name for name in results if name not in new}
        assert all(name.startswith(".") for name in rest), number
        assert all(results[name] in (old[name], new[name]) for name in new), number
        assert read_manifest(Report, run / REPORTS_FOLDER / "rtx4050.json").rows[0].latency_ms.p50 in (20.0, 30.0)
        remaining, mixed = remaining + bool(rest), mixed + (len({results[name] == new[name] for name in new}) == 2)
        for name in rest:  # as the next one finds them hours later
            aged = time.time() - AGED_S
            os.utime(run / REPORTS_FOLDER / name, (aged, aged))
        assert ends(begin(_write_report, run, 30.0, None)) == 0 and contents(run) == new, number
    assert remaining and mixed
    print(f"{count} kills: every file the old or the new one; {remaining} temporary files, which the next one removed")
