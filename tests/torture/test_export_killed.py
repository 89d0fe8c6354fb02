"""An export is killed before every change that it makes to names on the disk: nothing is lost, nothing is left over."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.torture.export_children import _CONTEXT, assert_whole, changes, copied_run, export_in_child

pytestmark = pytest.mark.torture
OPTIONS = ("--int8",)


def test_killed_before_every_change(tmp_path: Path) -> None:
    _CONTEXT.set_forkserver_preload(["tests.torture.traced_graphs"])
    complete = copied_run(tmp_path / "whole")
    log = tmp_path / "whole.log"
    assert export_in_child(complete, *OPTIONS, log=log) == 0, log.read_text(encoding="utf-8")
    count, ids = len(changes(log)), assert_whole(complete)
    start = end = 0
    for number in range(1, count + 1):
        folder = tmp_path / f"killed-{number}"
        run = copied_run(folder)
        assert export_in_child(run, *OPTIONS, kill=(number, "before"), log=log) == -signal.SIGKILL
        assert assert_whole(run) == ids, number
        built = "made_from" in (run / "bundle" / "bundle.json").read_text(encoding="utf-8")
        start, end = start + (not built), end + built
        assert export_in_child(run, *OPTIONS, log=log) == 0, log.read_text(encoding="utf-8")
        assert assert_whole(run) == ids, number
        assert not list(run.glob(".bundle*")), number
        shutil.rmtree(folder)
    assert start and end
    print(f"{count} kills: {start} left the old bundle, {end} the new one; all whole, all exported again")
