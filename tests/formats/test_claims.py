"""A folder that is replaced by one process at a time, and what is done about those that were killed meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgeformer.formats.claims import ClaimedError, claiming, remove_leftovers, restore_folder

HOLDER = """
import sys
from pathlib import Path
from edgeformer.formats.claims import claiming
with claiming(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def aside(folder: Path) -> Path:
    """As a process leaves it that is killed between the two renames."""
    old = folder / ".bundle.x1.old" / "bundle"
    old.mkdir(parents=True)
    (old / "bundle.json").write_text("{}", encoding="utf-8")
    (folder / ".bundle.y1.tmp").mkdir()
    return folder / "bundle"


def test_one_process_at_a_time_until_it_dies(tmp_path: Path) -> None:
    bundle = aside(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(bundle)], text=True, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ClaimedError, match=f"bundle: process {holder.pid} is replacing it"), claiming(bundle):
            pass
        # A reader waits for the living process, which is about to put something there.
        timer = threading.Timer(0.2, bundle.mkdir)
        timer.start()
        restore_folder(bundle)
        timer.join()
        assert not any(bundle.iterdir()), "what is aside belongs to the living process"
        bundle.rmdir()
        holder.kill()
    restore_folder(bundle)
    assert [path.name for path in bundle.iterdir()] == ["bundle.json"]
    with claiming(bundle):
        remove_leftovers(bundle)
    assert list(tmp_path.iterdir()) == [bundle]


def test_a_bundle_that_is_there_is_not_touched(tmp_path: Path) -> None:
    bundle = aside(tmp_path)
    bundle.mkdir()
    restore_folder(bundle)
    assert not any(bundle.iterdir())
    with claiming(bundle):
        remove_leftovers(bundle)
    assert list(tmp_path.iterdir()) == [bundle]
    assert not any(bundle.iterdir())


def test_an_error_inside_a_claim_ends_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), claiming(tmp_path / "bundle"):
        raise FileNotFoundError
    with claiming(tmp_path / "bundle"):
        pass
    assert list(tmp_path.iterdir()) == []
