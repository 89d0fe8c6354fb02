"""Machine: runs edgeformer commands over SSH, with their files, progress and output."""

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from edgeformer._version import __version__
from edgeformer.artifacts.bundle_files import TARGETS_FILE
from edgeformer.artifacts.files import sha256_of
from edgeformer.artifacts.progress import Progress, bar, forward_event
from edgeformer.artifacts.units import format_bytes
from edgeformer.artifacts.workspace import BUNDLE_FILE
from edgeformer.bundle import Bundle
from edgeformer.machines.connection import Connection, ConnectionLost, MachineError
from edgeformer.machines.packing import WHEEL, write_wheel
from edgeformer.system.child import Outcome

_ENVIRONMENT_BYTES = 600 << 20
"""Free bytes that an installation needs: the environment takes 260 MiB, pip's cache and temporary files the rest."""
_RESERVE_BYTES = 50 << 20


def bundle_files(bundle: Bundle, folder: str) -> dict[str, Path]:
    """Return path on a machine → file, of everything in a bundle that its manifest lists.

    Raises ArtifactError: the manifest names a file outside the bundle.
    """
    names = {*bundle.contents.checksums, *(n for a in bundle.built() for n in bundle.contents.needed_by(a))}
    paths = {name: bundle.contents.path(name) for name in sorted(names)}
    paths |= {name: bundle.folder / name for name in (BUNDLE_FILE, TARGETS_FILE)}
    # A missing file is not sent; verify reports it.
    return {f"{folder}/{name}": path for name, path in paths.items() if path.is_file()}


@cache
def _wheel() -> bytes:
    """Return the wheel of this edgeformer."""
    with tempfile.TemporaryDirectory() as folder:
        return write_wheel(Path(folder)).read_bytes()


def environment_name() -> str:
    """Return the name of this edgeformer's environment on a machine: version and hash of the wheel."""
    return f"{__version__}-{hashlib.sha256(_wheel()).hexdigest()[:12]}"


class Machine:
    """A machine on which jobs run: its [USER@]HOST as for ssh, and the folder of ``machines pack``."""

    def __init__(self, address: str, packs: Path, progress: Progress) -> None:
        self.address, self._packs, self._progress = address, packs, progress
        self.connection = Connection(address)
        self._environment = environment_name()
        self._job: str | None = None
        self._sent_bytes = 0

    def run(self, commands: Sequence[Sequence[str]], files: Mapping[str, Path]) -> Outcome:
        """Run commands there, each in the folder of the files, until one fails; return what the last of them printed.

        A job of a lost connection goes on; the same call later joins it, or returns what it printed. ``files``: path
        there → file here.
        Raises ConnectionLost, and MachineError: the machine lacks something, or the job was ended there.
        """
        started, progress, call = time.monotonic(), self._progress, self.connection.call
        digests = {name: sha256_of(path) for name, path in files.items()}
        content = {"commands": [[*command] for command in commands], "files": digests, "environment": self._environment}
        self._job = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        request = {**content, "job": self._job}
        facts = call("inspect", {**request, "files": [*digests.values()]})
        if facts["job"] == "absent":
            if not facts["has_environment"]:
                self._install(facts)
            sent = self._upload(files, digests, facts)
            progress.message(f"{sent} files sent, {len({*digests.values()}) - sent} unchanged there")
        else:
            state = "has finished; its results are fetched" if facts["job"] == "finished" else "still runs"
            progress.message(f"this job was started earlier and {state}")
        lines: list[str | None] = []
        try:
            result = call("run", request, on_message=lambda m: lines.append(forward_event(m["event"], progress)))
        except ConnectionLost as error:
            raise ConnectionLost(f"{error}; the job goes on there: the same command fetches its results") from None
        size, seconds = format_bytes(self._sent_bytes), result["seconds"]
        rest_s = max(0.0, time.monotonic() - started - seconds)
        progress.message(f"sent {size}; {seconds:.1f} s of commands there, {rest_s:.1f} s for the rest")
        output = result["outputs"][-1] if result["outputs"] else ""
        return Outcome(output, result["code"], tuple(line for line in lines if line is not None))

    def _install(self, facts: Mapping[str, Any]) -> None:
        """Install this edgeformer there. Raises MachineError, which says what the machine lacks."""
        reason, version = None, facts["python"].rpartition(".")[0]
        if not facts["has_venv"]:
            remedy = f"on Debian and Ubuntu: sudo apt install python{version}-venv"
            reason = f"its Python {version} has no venv module; {remedy}"
        elif not facts["is_64_bit"]:
            reason = "its Python is a 32-bit program, for which ONNX Runtime has no wheels; install a 64-bit system"
        elif facts["free_bytes"] < _ENVIRONMENT_BYTES:
            needed, free = format_bytes(_ENVIRONMENT_BYTES), format_bytes(facts["free_bytes"])
            reason = f"the disk of ~/.cache has {free} free, and an installation needs {needed}"
        if reason is not None:
            raise MachineError(f"{self.address}: {reason}")
        with tempfile.TemporaryDirectory() as folder, bar(self._progress, "installing edgeformer", None):
            wheel, pack = Path(folder) / WHEEL, self._packs / facts["tag"]
            wheel.write_bytes(_wheel())
            wheels = {path.name: path for path in pack.glob("*.whl")} | {WHEEL: wheel}
            digests = {name: sha256_of(path) for name, path in wheels.items()}
            request: dict[str, Any] = {"environment": self._environment, "files": [*digests.values()], "job": self._job}
            self._upload(wheels, digests, self.connection.call("inspect", request))
            request |= {"wheel": WHEEL, "wheels": digests, "offline": pack.is_dir()}
            request["system_packages"] = facts["system_packages"]
            try:
                self.connection.call("install", request, on_message=lambda m: self._progress.message(m["message"]))
            except MachineError as error:
                is_cut_off = "No matching distribution" in str(error) and not pack.is_dir()
                hint = f"; if it reaches no package index: edgeformer machines pack --for {facts['tag']}"
                raise MachineError(f"{error}{hint if is_cut_off else ''}") from None

    def _upload(self, files: Mapping[str, Path], digests: Mapping[str, str], facts: Mapping[str, Any]) -> int:
        """Send the files that the machine lacks, according to its ``facts``, and return their number."""
        missing = {digests[name]: path for name, path in files.items() if digests[name] in facts["missing"]}
        size_bytes = sum(path.stat().st_size for path in missing.values())
        size, free = format_bytes(size_bytes), format_bytes(facts["free_bytes"])
        if size_bytes + _RESERVE_BYTES > facts["free_bytes"]:
            raise MachineError(f"{self.address}: {size} are to be sent, and its disk has {free} free")
        if missing:
            with bar(self._progress, f"sending {size}", None):
                self.connection.call("upload", {}, missing)
            self._sent_bytes += size_bytes
        return len(missing)

    def forget(self) -> None:
        """Remove the job of :meth:`run` from the machine; stop it if it runs. Says so if it cannot be removed."""
        if self._job is not None:
            try:
                self.connection.call("forget", {"job": self._job})
            except (ConnectionLost, MachineError) as error:
                self._progress.message(f"{error}; the job stays there: the same command fetches its results again")
