"""Machines that lack something: the message says exactly what, and nothing is left there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeformer.artifacts.errors import InputError
from edgeformer.machines import machine as machine_module
from edgeformer.machines.connection import Connection, MachineError
from edgeformer.machines.machine import environment_name
from edgeformer.machines.packing import WHEEL, download_pack, write_wheel
from tests.cli.in_process import Edgeformer
from tests.machines.sshd import Sshd, start_sshd

VERIFY = ("verify", "small", "--on", "bench")
Start = Callable[..., Sshd]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a machine named bench."""
    started: list[Sshd] = []

    def start_machine(*lines: str, **options: object) -> Sshd:
        folder = tmp_path_factory.mktemp("bench") / "device"
        started.append(start_sshd(folder, "bench", *lines, **options))  # type: ignore[arg-type]
        monkeypatch.setenv("EDGEFORMER_SSH", started[-1].ssh)
        return started[-1]

    yield start_machine
    for server in started:
        server.stop()


def programs(folder: Path, python: str, *names: str) -> str:
    """A folder with a shell and a shell script ``python`` under some names; return the PATH of a session."""
    folder.mkdir()
    (folder / "sh").symlink_to(str(shutil.which("sh")))
    for name in names:
        (folder / name).write_text(f"#!/bin/sh\n{python}\n")
        (folder / name).chmod(0o755)
    return f"PATH={folder}"


needs_only_path = pytest.mark.skipif(
    any(Path("/usr/local/bin").glob("python3*")) or Path("/opt/homebrew/bin/python3").exists(),
    reason="a Python in /usr/local/bin is on the path of every machine here",
)


@needs_only_path
@pytest.mark.parametrize(
    ("python", "names", "expected"),
    [
        ("echo 3.9.2", ["python3", "python3.9"], "bench: needs Python 3.10 or newer ({}/python3 is 3.9.2, "),
        ("exit 1", ["python3"], "bench: needs Python 3.10 or newer (there is none); install one, and link it as"),
        ("exit 1", [], "bench: needs Python 3.10 or newer (there is none)"),
    ],
)
def test_without_a_new_python(start, edgeformer, run, tmp_path, python, names, expected):
    machine = start(environment=programs(tmp_path / "bin", python, *names))
    with pytest.raises(MachineError) as error:
        Connection("bench").find_python()
    assert str(error.value).startswith(expected.format(tmp_path / "bin"))
    edgeformer(*VERIFY, code=1)
    assert not machine.root.exists()


@needs_only_path
def test_an_older_python_first_is_passed_over(start: Start, tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", "echo 3.8.1", "python3", "python")
    (tmp_path / "bin" / "python3.11").symlink_to(sys.executable)
    start(environment=path)
    connection = Connection("bench")
    connection.find_python()
    facts = connection.call("inspect", {"job": "x", "environment": "x", "files": ["0" * 64]})
    connection.close()
    assert facts["job"] == "absent" and not facts["has_environment"] and facts["missing"] == ["0" * 64]
    assert facts["tag"] == f"linux-{os.uname().machine}-cp{sys.version_info[0]}{sys.version_info[1]}"


HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name == "ensurepip" else super().find_spec(name, *arguments)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""


def customized_python(tmp_path: Path, code: str) -> str:
    """A Python that runs ``code`` first; return the PATH of a session."""
    folder = tmp_path / "customized"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    python = f'PYTHONPATH={shlex.quote(str(folder))} exec {shlex.quote(sys.executable)} "$@"'
    return programs(tmp_path / "bin", python, "python3")


NO_INDEX = "PIP_INDEX_URL=http://127.0.0.1:9/simple PIP_NO_CACHE_DIR=1 PIP_CONFIG_FILE=/dev/null"
AARCH64 = """
import os
uname = os.uname()
os.uname = lambda: os.uname_result((*uname[:4], "aarch64"))
"""


@pytest.mark.slow
@needs_only_path
def test_a_pack_is_for_the_architecture_of_the_machine(start, edgeformer, run, tmp_path):
    """The Python says aarch64, as that of a Raspberry Pi."""
    machine = start(environment=f"{NO_INDEX} {customized_python(tmp_path, AARCH64)}")
    tag = f"linux-aarch64-cp{sys.version_info[0]}{sys.version_info[1]}"
    assert f"edgeformer machines pack --for {tag}" in edgeformer(*VERIFY, code=1)
    pack = tmp_path / "artifacts" / "packs" / tag
    pack.mkdir(parents=True)
    # With a pack, no index is asked: this one has nothing but a file that is no wheel.
    (pack / "numpy-2.0-py3-none-any.whl").write_text("no wheel")
    message = edgeformer(*VERIFY, code=1)
    assert "No matching distribution" in message and "machines pack" not in message
    assert not any(machine.root.glob("*/venv"))


def test_without_the_venv_module(start: Start, edgeformer: Edgeformer, run: Path, tmp_path: Path) -> None:
    """As on Debian without python3-venv, which leaves out ensurepip."""
    machine = start(environment=customized_python(tmp_path, HIDING))
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    expected = f"has no venv module; on Debian and Ubuntu: sudo apt install python{version}-venv"
    assert expected in edgeformer(*VERIFY, code=1)
    assert not machine.root.exists()


def small_disk(start: Start, tmp_path: Path, size: str) -> Sshd:
    """A machine whose home is a disk of this size."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to mount a disk that an SSH server sees")
    home = tmp_path / "disk"
    home.mkdir()
    mount = f'mount -t tmpfs -o size={size} none "$0" && exec "$@"'
    return start(launcher=("unshare", "--mount", "sh", "-c", mount, str(home)), home=home)


def files_on(machine: Sshd) -> list[str]:
    """Files in the machine's home, as the machine sees it."""
    command = ["ssh", "-F", str(machine.config), machine.name, "find $HOME -type f"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_a_full_disk_is_refused_before_anything_is_sent(start, edgeformer, run, tmp_path):
    machine = small_disk(start, tmp_path, "100m")
    message = edgeformer(*VERIFY, code=1)
    assert "bench: the disk of ~/.cache has 100.0 MiB free, and an installation needs 600.0 MiB" in message
    assert files_on(machine) == []


@pytest.mark.parametrize("size", ["500k", pytest.param("100m", marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_keeps_no_half_file_or_environment(start, edgeformer, run, tmp_path, monkeypatch, size):
    """While the wheel is sent, or while its dependencies are installed."""
    machine = small_disk(start, tmp_path, size)
    monkeypatch.setattr(machine_module, "_ENVIRONMENT_BYTES", 0)
    monkeypatch.setattr(machine_module, "_RESERVE_BYTES", -(1 << 30))
    assert "No space left on device" in edgeformer(*VERIFY, code=1)
    left = {file.rpartition("/remote/")[2].partition("/")[0] for file in files_on(machine)}
    assert left == (set() if size == "500k" else {"files", f"{environment_name()}.lock"})


def test_a_wheel_is_the_same_each_time_and_has_everything(tmp_path: Path) -> None:
    first, second = (write_wheel(tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes() and first.name == WHEEL
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
    assert {"edgeformer/machines/agent.py", "edgeformer/report/templates/report.css"} <= {*names}
    assert "edgeformer/shipped/profiles/raspberry-pi-5.yaml" in names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.parametrize(
    "tag", ["linux-aarch64", "linux-armv7l-cp311", "windows-amd64-cp311", "../linux-aarch64-cp311"]
)
def test_packs_for_unknown_platforms_are_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(InputError, match="write linux-aarch64-cp311 or linux"):
        download_pack(tag, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_without_an_index_a_pack_installs(start: Start, edgeformer: Edgeformer, run: Path) -> None:
    machine = start(environment=NO_INDEX)
    message = edgeformer(*VERIFY, code=1)
    platform = re.search(r"edgeformer machines pack --for (linux-\S+)", message)
    assert platform is not None and not any(machine.root.glob("*/venv")), message
    edgeformer("machines", "pack", "--for", platform[1])
    assert "2 of 2 artifacts verified" in edgeformer(*VERIFY)
    assert any(machine.root.rglob("numpy/ma/__pycache__/*.pyc"))  # which verify does not import
    assert json.loads(edgeformer("machines", "clean", "bench", "--json"))["removed_bytes"]["bench"] > 100 << 20
    assert not machine.root.parent.exists()


def test_a_key_that_the_machine_does_not_know_and_a_machine_that_is_off(start, edgeformer, run):
    machine = start()
    (machine.config.parent / "user_key.pub").write_text("")
    assert "log in with a key: run ssh-copy-id bench once" in edgeformer(*VERIFY, code=1)
    machine.stop()
    assert "Connection refused; start the SSH server there" in edgeformer(*VERIFY, code=1)


def test_a_login_that_prints_something(start: Start, edgeformer: Edgeformer, run: Path) -> None:
    """What a shell's startup file prints comes before the answers."""
    machine = start('ForceCommand echo Welcome; echo; exec sh -c "$SSH_ORIGINAL_COMMAND"')
    machine.install_here()
    assert "2 of 2 artifacts verified" in edgeformer(*VERIFY)


def test_a_machine_without_a_posix_shell(start: Start, edgeformer: Edgeformer, run: Path) -> None:
    """As Windows' cmd.exe, which knows no sh."""
    start("ForceCommand echo \"'sh' is not recognized as an internal or external command\"; exit 1")
    assert "has no POSIX shell; Linux, macOS, Termux and WSL are supported" in edgeformer(*VERIFY, code=1)
