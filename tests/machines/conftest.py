"""A machine for tests: a real SSH server of its own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.sshd import Sshd, start_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A machine without anything of edgeformer."""
    server = start_sshd(tmp_path_factory.mktemp("device") / "kitchen", "kitchen-pi")
    yield server
    server.stop()


@pytest.fixture
def machine(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    """A machine on which edgeformer is installed, and which ``ssh`` of this process reaches."""
    sshd.install_here()
    monkeypatch.setenv("EDGEFORMER_SSH", sshd.ssh)
    return sshd


@pytest.fixture
def run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in a folder of its own, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(finished_run, tmp_path / "artifacts" / "small"))
