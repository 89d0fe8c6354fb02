"""Connection: calls of the agent on a machine through the system's OpenSSH client.

``~/.ssh/config``, agents, jump hosts and host keys apply as for ``ssh HOST``; passwords are never asked for. All calls
share one login. No text of a user becomes part of a remote command: names travel as data on stdin.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from edgeformer.artifacts.errors import EdgeformerError, InputError
from edgeformer.system import child

SSH_VARIABLE = "EDGEFORMER_SSH"
"""Environment variable with the ssh command and further options, e.g. ``ssh -F my_config``."""
_HOST = r"(ssh://)?([A-Za-z0-9_][\w.+\\-]*@)?[A-Za-z0-9_\[:][\w.:%\[\]-]*"
_CONNECT_FAILED = 255  # exit code of ssh if there is no connection; the agent never uses it
_OLDEST_PYTHON = (3, 10)
_PERSIST_S = "10"
"""Time after which the shared login ends without a call: ssh starts it, and it outlives a killed edgeformer so long."""
_PROBE = r"""
PATH="$PATH:$HOME/.local/bin:/usr/local/bin:/opt/homebrew/bin"
echo edgeformer-probe
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python python3.9 python3.8; do
  path=$(command -v "$name") || continue
  version=$("$path" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || continue
  echo "edgeformer-python $version $path"
done
"""
_LOADER = "import sys; source = sys.stdin.buffer.read(int(sys.argv[1])).decode(); del sys.argv[1]; exec(source)"
_LONGEST_FOLDER = 50
"""Characters of a temporary folder that leave enough for the name of a socket, which has at most 104."""
_ADVICE = {
    "permission denied": "log in with a key: run ssh-copy-id {host} once",
    "host key verification failed": "run ssh {host} once and check its key",
    "could not resolve hostname": "check the name, or add it to ~/.ssh/config",
    "connection refused": "start the SSH server there",
    "timed out": "check that the machine is on and in this network",
    "no route to host": "check that the machine is on and in this network",
}
"""Text in ssh's error message, in lower case → what the user can do."""


class ConnectionLost(EdgeformerError):
    """The machine cannot be reached, or the connection ended during a call."""


class MachineError(EdgeformerError):
    """The agent could not do what it was called for."""


def check_address(option: str, address: str) -> None:
    """Raise InputError unless ``address`` is [USER@]HOST or ssh://[USER@]HOST[:PORT], which ssh takes for no option."""
    if re.fullmatch(_HOST, address, re.ASCII) is None:
        raise InputError(
            f"{option} {address!r}: write [USER@]HOST or a name of ~/.ssh/config, with letters, digits and . _ - : only"
        )


class Connection:
    """Calls of one machine, with its [USER@]HOST as for ssh."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._python = ""
        command = shlex.split(os.environ.get(SSH_VARIABLE, "ssh"))
        if shutil.which(command[0]) is None:
            raise EdgeformerError(f"{command[0]}: not found; install an OpenSSH client, or set {SSH_VARIABLE}")
        is_long = len(tempfile.gettempdir()) > _LONGEST_FOLDER
        self._folder = Path(tempfile.mkdtemp(prefix="ef-", dir="/tmp" if is_long else None))
        options = {"BatchMode": "yes", "ConnectTimeout": "15", "ServerAliveInterval": "5", "ServerAliveCountMax": "6"}
        if os.name == "posix":  # OpenSSH for Windows has no multiplexing
            options |= {"ControlMaster": "auto", "ControlPath": str(self._folder / "s"), "ControlPersist": _PERSIST_S}
        for name, value in options.items():
            command += ["-o", f"{name}={value}"]
        self._ssh = command

    def close(self) -> None:
        """Close the shared login."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = [*self._ssh, "-O", "exit", "--", self.address]
            child.run(command, is_edgeformer=False, capture_output=True, timeout=10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self, remote_command: str, stderr: Any) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C must reach this process only, which then stops the job in order.
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
        command = [*self._ssh, "--", self.address, remote_command]
        return child.start(command, is_edgeformer=False, start_new_session=True, **streams)

    def find_python(self) -> None:
        """Find a Python for the agent. Raises ConnectionLost, and MachineError without POSIX shell or new Python."""
        with tempfile.TemporaryFile() as stderr:
            process = self._open("sh -s", stderr)
            output = process.communicate(_PROBE.encode())[0].decode(errors="replace")
            if process.returncode == _CONNECT_FAILED:
                raise self._lost(stderr)
        if re.search("^edgeformer-probe", output, re.MULTILINE) is None:
            raise MachineError(
                f"{self.address}: has no POSIX shell; Linux, macOS, Termux and WSL are supported; on Windows, log in "
                "to WSL, or run edgeformer profile on the machine itself"
            )
        pythons = re.findall(r"^edgeformer-python ([0-9.]+) (/.+?)\r?$", output, re.MULTILINE)
        for version, path in pythons:
            if tuple(map(int, version.split(".")[:2])) >= _OLDEST_PYTHON:
                self._python = path
                return
        versions = ", ".join(f"{path} is {version}" for version, path in pythons) or "there is none"
        raise MachineError(
            f"{self.address}: needs Python 3.10 or newer ({versions}); install one, and link it as "
            "~/.local/bin/python3.11 if it is not on the PATH of ssh"
        )

    def call(
        self, call: str, request: Mapping[str, Any], files: Mapping[str, Path] | None = None,
        on_message: Callable[[dict[str, Any]], None] = lambda message: None,
    ) -> Any:  # fmt: skip
        """Call a function of the agent, send it ``files`` (sha256 → file), and return its result.

        ``on_message`` is called with every message before the result.
        Raises ConnectionLost before the result, and MachineError with the agent's error.
        """
        if not self._python:
            self.find_python()
        source = Path(__file__).with_name("agent.py").read_bytes()
        command = shlex.join([self._python, "-u", "-c", _LOADER, str(len(source))])
        with tempfile.TemporaryFile() as stderr:
            process = self._open(command, stderr)
            assert process.stdin is not None and process.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):  # the agent's error is on stdout
                    process.stdin.write(source + json.dumps({"call": call, **request}).encode() + b"\n")
                    process.stdin.flush()
                    if files is not None:
                        with tarfile.open(fileobj=process.stdin, mode="w|") as archive:
                            for sha256, path in files.items():
                                archive.add(path.resolve(), sha256)
                        process.stdin.flush()
                has_started = False
                for line in process.stdout:
                    if not has_started:
                        has_started = line.strip() == b'{"agent": 1}'
                        continue
                    message = json.loads(line)
                    if "error" in message:
                        raise MachineError(f"{self.address}: {message['error']}")
                    if "end" in message:
                        return message["end"]
                    on_message(message)
                process.wait()
                if process.returncode == _CONNECT_FAILED or process.returncode < 0:
                    raise self._lost(stderr)
                stderr.seek(0)
                text = stderr.read().decode(errors="replace").strip()
                code = process.returncode
                raise MachineError(f"{self.address}: the agent ended with exit code {code}: {text[-2000:]}")
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def _lost(self, stderr: IO[bytes]) -> ConnectionLost:
        """Return the error of an ssh that ended, with its last message and what the user can do."""
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
        text = lines[-1].strip() if lines else "the connection ended"
        advice = next((advice for part, advice in _ADVICE.items() if part in text.lower()), None)
        hint = f"; {advice.format(host=self.address)}" if advice is not None else ""
        return ConnectionLost(f"{self.address}: {text}{hint}")
