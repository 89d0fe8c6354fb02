"""A device for tests: a real SSH server of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.devices.sshd import Sshd, start_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A device without anything of edgeformer."""
    server = start_sshd(tmp_path_factory.mktemp("device") / "kitchen", "kitchen-pi")
    yield server
    server.stop()


@pytest.fixture
def device(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    """A device on which edgeformer is installed, and which ``ssh`` of this process reaches."""
    sshd.install_here()
    monkeypatch.setenv("EDGEFORMER_SSH", sshd.ssh)
    return sshd
