"""An export that is killed or interrupted leaves the bundle unchanged; tests/torture covers every moment."""

import os
import signal
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import InterruptedRun
from edgeformer.cli.export import report_bundle_on_interrupt
from edgeformer.run import find_bundle, locate
from tests.torture.export_children import assert_whole, copied_run, export_in_child

BETWEEN_THE_RENAMES = ("replace bundle", "after")


@pytest.mark.torture
def test_killed_between_the_renames(tmp_path: Path) -> None:
    run = copied_run(tmp_path)
    ids, log = assert_whole(run), tmp_path / "log"
    assert export_in_child(run, "--replace", kill=BETWEEN_THE_RENAMES, log=log) == -signal.SIGKILL
    assert not (run / "bundle").exists(), "it was killed at another moment than this test means"
    assert locate(str(run / "bundle"), tmp_path).bundle == find_bundle(run) == run / "bundle"
    assert assert_whole(run) == ids
    assert list(run.glob(".bundle.*.tmp")), "the incomplete new bundle"
    stopped = export_in_child(run, "--replace", kill=BETWEEN_THE_RENAMES, log=log, signalled=signal.SIGTERM)
    message = log.read_text(encoding="utf-8")
    assert stopped == 130 and f"interrupted; {run / 'bundle'} is unchanged" in message
    assert assert_whole(run) == ids
    assert not list(run.glob(".bundle*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_reports_the_bundles_state(tmp_path: Path, number: int) -> None:
    handler, bundle = signal.getsignal(number), tmp_path / "bundle"
    with pytest.raises(InterruptedRun, match="was not written") as nothing, report_bundle_on_interrupt(bundle):
        os.kill(os.getpid(), number)
    assert nothing.value.exit_code == 130
    with pytest.raises(InterruptedRun, match="already complete"), report_bundle_on_interrupt(bundle):
        bundle.mkdir()
        (bundle / "bundle.json").write_text("{}", encoding="utf-8")
        os.kill(os.getpid(), number)
    with pytest.raises(InterruptedRun, match="is unchanged"), report_bundle_on_interrupt(bundle):
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is handler
