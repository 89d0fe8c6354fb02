"""Writing a report is killed before every change that it makes in its folder: every file is the old or the new one."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgeformer.artifacts.report import Report
from edgeformer.artifacts.workspace import REPORTS_FOLDER, read_manifest
from edgeformer.report.documents import write_report
from edgeformer.run import Location
from tests.report.made_reports import made_report, made_row, measured

pytestmark = pytest.mark.torture
_CONTEXT = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
COUNTED = ("open", "chmod", "replace", "rename", "fsync", "link", "unlink", "rmdir", "mkdir")
AGED_S = 7200.0


def _write(run: Path, p50: float, kill_at: int | None) -> None:
    numbers = itertools.count(1)

    def counting(change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if str(arguments[0]).startswith(str(run)) and next(numbers) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **named)

        return counted

    for name in COUNTED:
        setattr(os, name, counting(getattr(os, name)))
    write_report(made_report(made_row(measured(p50))), Location(run=run, bundle=None))
    (run / "changes.txt").write_text(str(next(numbers) - 1), encoding="utf-8")


def written(run: Path, p50: float, kill_at: int | None = None) -> int:
    """Write a report in a process of its own; its exit status."""
    process = _CONTEXT.Process(target=_write, args=(run, p50, kill_at))
    process.start()
    process.join(timeout=300)
    assert process.exitcode is not None
    return process.exitcode


def contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / REPORTS_FOLDER).iterdir()}


def test_killed_before_every_change(tmp_path: Path) -> None:
    _CONTEXT.set_forkserver_preload(["tests.torture.test_report_killed", "matplotlib.backends.backend_agg"])
    (tmp_path / "run").mkdir()
    assert written(tmp_path / "run", 20.0) == 0
    old = contents(tmp_path / "run")
    assert written(tmp_path / "run", 30.0) == 0
    new = contents(tmp_path / "run")
    count = int((tmp_path / "run" / "changes.txt").read_text(encoding="utf-8"))
    assert old.keys() == new.keys() and {Path(name).suffix for name in new} >= {".json", ".md", ".csv", ".html", ".svg"}
    remaining = mixed = 0
    for number in range(1, count + 1):
        run = tmp_path / f"killed-{number}"
        (run / REPORTS_FOLDER).mkdir(parents=True)
        for name, content in old.items():
            (run / REPORTS_FOLDER / name).write_bytes(content)
        assert written(run, 30.0, kill_at=number) == -signal.SIGKILL
        results = contents(run)
        rest = {name for name in results if name not in new}
        assert all(name.startswith(".") for name in rest), number
        assert all(results[name] in (old[name], new[name]) for name in new), number
        assert read_manifest(Report, run / REPORTS_FOLDER / "rtx4050.json").rows[0].latency_ms.p50 in (20.0, 30.0)
        remaining, mixed = remaining + bool(rest), mixed + (len({results[name] == new[name] for name in new}) == 2)
        for name in rest:  # as the next one finds them hours later
            aged = time.time() - AGED_S
            os.utime(run / REPORTS_FOLDER / name, (aged, aged))
        assert written(run, 30.0) == 0 and contents(run) == new, number
    assert remaining and mixed
    print(f"{count} kills: every file the old or the new one; {remaining} temporary files, which the next one removed")
