"""A disk that fills up during export: a clear error, and an unchanged bundle."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgeformer.artifacts.files import sha256_of

_DRIVER = """
import json, os, shutil, subprocess, sys
from pathlib import Path
from edgeformer.artifacts.files import sha256_of

run, disk, free_bytes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
shutil.copytree(run, disk / "run")
state = os.statvfs(disk)
(disk / "filler").write_bytes(bytes(state.f_bavail * state.f_frsize - free_bytes))
command = [sys.executable, "-m", "edgeformer", "export", str(disk / "run"), sys.argv[4]]
done = subprocess.run(command, cwd=disk, capture_output=True, text=True)
left = {p.relative_to(disk / "run").as_posix(): sha256_of(p) for p in (disk / "run").rglob("*") if p.is_file()}
print(json.dumps({"code": done.returncode, "out": done.stdout, "err": done.stderr, "left": left}))
"""


def on_disk(disk: Path, size: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command while another disk lies over the folder ``disk``, in a namespace of its own, with which it ends."""
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    line = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, str(disk), *command]
    return subprocess.run(line, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--fp16", pytest.param("--int8", marks=pytest.mark.torture)])
def test_full_disk_keeps_the_old_bundle(finished_run: Path, tmp_path: Path, option: str) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs Linux's unshare, to mount a disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    if (tried := on_disk(disk, "1m", "true")).returncode:
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip()}")
    old = {p.relative_to(finished_run).as_posix(): sha256_of(p) for p in finished_run.rglob("*") if p.is_file()}
    sizes = {p.name: p.stat().st_size for p in (finished_run / "bundle").rglob("*") if p.is_file()}
    free_bytes = sum(sizes.values()) // 2  # enough to begin with, not enough for the graphs
    if option == "--int8":  # enough for the FP32 graph and its copy, not for the INT8 graph
        graphs = [size for name, size in sizes.items() if name.endswith(".onnx")]
        free_bytes = sum(sizes.values()) - sum(graphs) + int(2.1 * sizes["model.onnx"])
    arguments = (str(finished_run), str(disk), str(free_bytes), option)
    done = on_disk(disk, "16m", sys.executable, "-c", _DRIVER, *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["code"] == 1, result["err"]
    assert "Traceback" not in result["err"]
    assert f"{disk / 'run' / 'bundle'}: No space left on device; the previous content is unchanged" in result["err"]
    assert result["left"] == old
