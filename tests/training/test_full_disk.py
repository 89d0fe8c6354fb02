"""A disk that fills up, or cannot be written, and a reader that goes away: a clear end, and the run goes on later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mounts import on_disk
from tests.torture.children import OFTEN, TINY

# Runs in a mount namespace of its own, so that the small disk is gone with it, whatever happens.
_DRIVER = """
import subprocess, sys, time
from pathlib import Path

disk, sets = Path(sys.argv[1]), [part for override in sys.argv[2:] for part in ("--set", override)]
command = [sys.executable, "-m", "edgeformer", "train", "quickstart", "--name", "run", "--artifacts", str(disk), *sets]
with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
    while not list((disk / "run").glob("checkpoints/000002-*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    with (disk / "filler").open("wb") as filler:
        try:
            while True:
                filler.write(bytes(1 << 16))
        except OSError:
            pass
    said = process.communicate()[1]
print(process.returncode, said)
print("LEFT", *sorted(path.name for path in (disk / "run" / "checkpoints").iterdir()))
(disk / "filler").unlink()
done = subprocess.run([*command, "--resume", "--max-steps", "9"], capture_output=True, text=True)
print("RESUMED", done.returncode, done.stderr)
"""


@pytest.mark.torture
def test_a_full_disk_ends_training_and_the_run_goes_on_later(disk: Path) -> None:
    long = "training.epochs=4000"  # it must not end before the disk is full
    done = on_disk(disk, "size=32m", sys.executable, "-c", _DRIVER, str(disk), *TINY, *OFTEN, long)
    assert done.returncode == 0, done.stderr
    ended, _, rest = done.stdout.partition("LEFT ")
    left, _, resumed = rest.partition("RESUMED ")
    assert ended.startswith("1 ") and "Traceback" not in ended, ended
    message = ended[ended.index("error:") :]
    assert "No space left on device" in message or "cannot be written" in message
    assert left.split() and not [name for name in left.split() if name.startswith(".")]
    assert resumed.startswith("0 "), resumed


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(disk: Path) -> None:
    sets = [part for override in TINY for part in ("--set", override)]
    command = [sys.executable, "-m", "edgeformer", "train", "quickstart", "--artifacts", str(disk / "mine"), *sets]
    done = on_disk(disk, "ro", *command)
    assert done.returncode == 2, done.stderr
    assert "".join(done.stderr.split("\n")) == (
        f"error: --artifacts {disk / 'mine'}: {disk} cannot be written; choose another folder, or allow it"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of a POSIX shell")
def test_a_reader_that_goes_away_ends_no_training(tmp_path: Path) -> None:
    sets = [part for override in TINY for part in ("--set", override)]
    command = [sys.executable, "-m", "edgeformer", "train", "quickstart", "--name", "run", *sets]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=200)
    manifest = (tmp_path / "artifacts" / "run" / "run.json").read_text(encoding="utf-8")
    assert '"status": "finished"' in manifest
    assert process.returncode in (0, 1)
