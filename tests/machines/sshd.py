"""A machine for tests: a real SSH server on 127.0.0.1, with keys and a home of its own."""

import os
import pwd
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import edgeformer
from edgeformer.machines.machine import environment_name

_STARTS_WITHIN_S = 10.0
_PROGRAM = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass(frozen=True)
class Sshd:
    """A running server.

    Attributes:
        name: of the machine in ``config``.
        home: the home folder of the user who logs in.
        config: configuration of the client.
        log: what the server wrote.
        process: the server.
    """

    name: str
    home: Path
    config: Path
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.config}"

    @property
    def root(self) -> Path:
        return self.home / ".cache" / "edgeformer" / "remote"

    def install_here(self) -> None:
        """Make an environment on the machine that runs the code under test with this Python's packages.

        It takes no time; test_install.py has a real installation.
        """
        environment = self.root / environment_name()
        (environment / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        python = environment / "venv" / "bin" / "python"
        paths = os.pathsep.join(map(str, [Path(edgeformer.__file__).parents[1], *sys.path]))
        python.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(paths)} exec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        (environment / "complete").touch()

    def stop(self) -> None:
        """End the server; its sessions end with their connections."""
        self.process.terminate()
        self.process.wait()


def start_sshd(
    folder: Path,
    name: str,
    *options: str,
    environment: str = "",
    launcher: tuple[str, ...] = (),
    home: Path | None = None,
) -> Sshd:
    """Start a server, or skip the test with the reason.

    Args:
        folder: new folder for keys, configuration and home.
        name: of the machine.
        options: lines of the server's configuration.
        environment: further variables of sessions: ``PATH=/usr/bin``.
        launcher: command that starts the server's command.
        home: folder of the user who logs in; None: a new one.
    """
    if not Path(_PROGRAM).exists() or shutil.which("ssh-keygen") is None:
        pytest.skip("needs OpenSSH's server: apt-get install openssh-server")
    home, log, config = home or folder / "home", folder / "log", folder / "ssh_config"
    folder.mkdir(parents=True)
    home.mkdir(exist_ok=True)
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    lines = [
        f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder / 'host_key'}", "PidFile none", "UsePAM no",
        f"AuthorizedKeysFile {folder / 'user_key.pub'}", "StrictModes no", "PasswordAuthentication no",
        "PermitRootLogin prohibit-password", f"SetEnv HOME={home} {environment}", *options,
    ]  # fmt: skip
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    client = [
        f"Host {name}", "HostName 127.0.0.1", f"Port {port}", f"User {pwd.getpwuid(os.geteuid()).pw_name}",
        f"IdentityFile {folder / 'user_key'}", "IdentitiesOnly yes", f"UserKnownHostsFile {folder / 'known_hosts'}",
        "StrictHostKeyChecking accept-new", "LogLevel ERROR",
    ]  # fmt: skip
    config.write_text("\n".join(client) + "\n")
    process = subprocess.Popen([*launcher, _PROGRAM, "-D", "-f", str(folder / "sshd_config"), "-E", str(log)])
    sshd, deadline, problem = Sshd(name, home, config, log, process), time.monotonic() + _STARTS_WITHIN_S, ""
    while time.monotonic() < deadline and process.poll() is None:
        login = subprocess.run(["ssh", "-F", str(config), "-o", "BatchMode=yes", name, "true"], capture_output=True)
        if login.returncode != 255:  # there is a connection, whatever the machine's command says
            return sshd
        problem = login.stderr.decode().strip()
        time.sleep(0.1)
    sshd.stop()
    pytest.skip(f"no SSH server can run here: {problem}; {log.read_text()[-300:]}")
