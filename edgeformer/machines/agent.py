"""Agent: the program that runs on a machine, with the machine's own Python (3.10 or newer) and nothing else.

:mod:`edgeformer.machines.connection` sends this file over SSH for every call. The call's request is one JSON line on
stdin, files follow as a tar stream, and messages come back as JSON lines on stdout. Everything that the agent writes
is below :data:`ROOT`:

- ``VERSION-HASH/``: virtual environments; the file ``complete`` is written last
- ``files/``: uploaded files, named by their sha256; a file gets its name when its content has been checked
- ``jobs/ID/``: the files, events and outputs of one job, which goes on when the connection is lost

A lock file beside an environment or a job is held by the process that works on it, and contains its process group.
"""

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path.home() / ".cache" / "edgeformer" / "remote"
FILES, JOBS = ROOT / "files", ROOT / "jobs"
COMPLETE, EVENTS, RESULT = "complete", "events", "result.json"
_POLL_S = 0.2
_STOP_S = 5.0
_STALE_S, _KEPT_S = 3600.0, 30 * 24 * 3600.0
"""Age after which the file of an incomplete upload, and an unused file or job, is removed."""
_SHOWN_LINES = 12
_KEPT_ENVIRONMENTS = 3

Request = dict[str, Any]
source: str = globals().get("source", "")  # this file, set by :mod:`edgeformer.machines.connection`


class Failed(Exception):
    """The call cannot be done; the message is for the user."""


def send(**message: Any) -> None:
    """Print a message."""
    print(json.dumps(message), flush=True)


def lock_file(path: Path) -> Path:
    """Return the lock file of an environment, a job, or the whole machine."""
    return path.with_name(f"{path.name}.lock")


def acquire(path: Path, *, wait: bool) -> int | None:
    """Lock a path for this process, and return the open lock file; None: another process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(lock_file(path), os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + 1.0  # others take the lock for a moment in order to test it
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                return None
            time.sleep(0.02)
    name_owner(handle)
    return handle


def name_owner(handle: int) -> None:
    """Write this process's group into a lock file."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpgrp()).encode(), 0)


def is_locked(path: Path) -> bool:
    """Return whether a live process holds the lock of a path."""
    try:
        handle = os.open(lock_file(path), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


def stop_owner(path: Path) -> None:
    """End the processes that hold the lock of a path: SIGTERM, and SIGKILL after some seconds."""
    deadline = time.monotonic() + _STOP_S
    while is_locked(path):
        with suppress(ValueError, OSError):  # not written yet, or just gone
            group = int(lock_file(path).read_text())
            os.killpg(group, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(_POLL_S)


@contextmanager
def abort_without_client() -> Iterator[None]:
    """End this process and its children at once when the client closes stdin, as it does when it dies."""
    is_done = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read(1)
        if not is_done.is_set():
            os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def free_bytes() -> int:
    """Return the free bytes of the disk that :data:`ROOT` is on."""
    folder = next(path for path in (ROOT, *ROOT.parents) if path.is_dir())
    return shutil.disk_usage(folder).free


def inspect(request: Request) -> None:
    """Describe the machine, and which of the environment, the files and the job of a request it has."""
    jetson, termux = Path("/etc/nv_tegra_release").exists(), "com.termux" in os.environ.get("PREFIX", "")
    job = JOBS / request["job"]
    for name in request["files"]:
        with suppress(OSError):
            os.utime(FILES / name)
    facts = {
        "tag": f"{platform.system().lower()}-{platform.machine()}-cp{sys.version_info[0]}{sys.version_info[1]}",
        "python": platform.python_version(), "is_64_bit": sys.maxsize > 2**32, "free_bytes": free_bytes(),
        "has_venv": find_spec("venv") is not None and find_spec("ensurepip") is not None,
        "system_packages": jetson or termux,
        "has_environment": (ROOT / request["environment"] / COMPLETE).is_file(),
        "missing": [name for name in request["files"] if not (FILES / name).is_file()],
        "job": "running" if is_locked(job) else "finished" if (job / RESULT).is_file() else "absent",
    }  # fmt: skip
    send(end=facts)


def upload(request: Request) -> None:
    """Store the files of the tar stream, each under its sha256."""
    FILES.mkdir(parents=True, exist_ok=True, mode=0o700)
    # What killed uploads left behind, and files and jobs that were not used for a month, is removed.
    now = time.time()
    for path in [*FILES.iterdir(), *JOBS.glob("*")]:
        with suppress(OSError):
            age_s = now - path.stat().st_mtime
            if path.is_dir() and age_s > _KEPT_S and not is_locked(path):
                shutil.rmtree(path)
            elif path.is_file() and age_s > (_STALE_S if path.name.startswith(".") else _KEPT_S):
                path.unlink()
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        for member in archive:
            content, temporary = archive.extractfile(member), FILES / f".{os.getpid()}"
            if content is None or not re.fullmatch("[0-9a-f]{64}", member.name):
                raise Failed(f"{member.name!r} is no file that edgeformer uploads")
            digest = hashlib.sha256()
            try:
                with temporary.open("wb") as file:
                    while chunk := content.read(1 << 20):
                        digest.update(chunk)
                        file.write(chunk)
                if digest.hexdigest() != member.name:
                    raise Failed(f"the file {member.name[:12]} changed while it was uploaded; start again")
                temporary.replace(FILES / member.name)
            finally:
                temporary.unlink(missing_ok=True)
    send(end=None)


def link_files(folder: Path, files: dict[str, str]) -> None:
    """Create the files of a request (path below ``folder`` → sha256) as links to the uploads."""
    for name, sha256 in files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise Failed(f"{name!r} lies outside of the job's folder")
        target = folder / pure
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(FILES / sha256, target)
        except OSError as error:  # a file system without hard links
            if error.errno not in (errno.EPERM, errno.EXDEV, errno.ENOTSUP, errno.EACCES, errno.EMLINK):
                raise
            shutil.copyfile(FILES / sha256, target)


def install(request: Request) -> None:
    """Create a virtual environment with the uploaded wheel, and its dependencies from the index or from uploads."""
    folder = ROOT / request["environment"]
    with abort_without_client():
        handle = acquire(folder, wait=False)
        if handle is None:
            send(message="waiting for another installation on this machine")
            handle = acquire(folder, wait=True)
        if (folder / COMPLETE).is_file():  # by the other installation
            send(end=None)
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            link_files(folder / "wheels", request["wheels"])
            options = ["--system-site-packages"] if request["system_packages"] else []
            venv = [sys.executable, "-m", "venv", *options, str(folder / "venv")]
            # pip also compiles: a process that compiled modules while it is measured would need more memory.
            pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--no-input"]
            if request["offline"]:
                pip += ["--no-index", "--find-links", str(folder / "wheels")]
            else:
                pip += ["--retries", "1", "--cache-dir", str(ROOT / "pip")]
            pip += ["--disable-pip-version-check", str(folder / "wheels" / request["wheel"])]
            for command in (venv, pip):
                process = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
                if process.returncode:
                    lines = process.stdout.decode(errors="replace").strip().splitlines()
                    shown = [line for line in lines if line.startswith("ERROR")] or lines[-_SHOWN_LINES:]
                    raise Failed("\n".join([f"{' '.join(command[1:4])} failed:", *shown]))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder / "wheels")
        (folder / COMPLETE).touch()
        environments = sorted(ROOT.glob(f"*/{COMPLETE}"), key=lambda file: file.stat().st_mtime)
        for complete in environments[:-_KEPT_ENVIRONMENTS]:
            complete.unlink()
            shutil.rmtree(complete.parent)
    send(end=None)


def run(request: Request) -> None:
    """Start a job, or join it if it runs or has finished, and send its events and at its end its result."""
    job = JOBS / request["job"]
    handle = None if (job / RESULT).is_file() else acquire(job, wait=False)
    if handle is not None:
        shutil.rmtree(job, ignore_errors=True)  # of a job that was killed
        link_files(job / "files", request["files"])
        (job / "request.json").write_text(json.dumps(request))
        (job / "agent.py").write_text(source)
        (job / EVENTS).touch()
        supervisor = [sys.executable, str(job / "agent.py"), str(job), str(handle)]
        silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.Popen(supervisor, **silent, start_new_session=True, pass_fds=(handle,))
        os.close(handle)
    with abort_without_client(), (job / EVENTS).open("rb") as events:
        rest = b""
        while True:
            has_ended = not is_locked(job)  # first, so that no event is missed
            *lines, rest = (rest + events.read()).split(b"\n")
            for line in lines:
                send(event=line.decode(errors="replace"))
            if has_ended:
                break
            time.sleep(_POLL_S)
    if not (job / RESULT).is_file():
        raise Failed("the job was ended by the system or another user; start again")
    send(end=json.loads((job / RESULT).read_text()))


def supervise(job: Path, handle: int) -> None:
    """Run the commands of a job, one after the other until one fails, and write the result."""
    name_owner(handle)
    request, started = json.loads((job / "request.json").read_text()), time.time()
    environment = {**os.environ, "PYTHONUTF8": "1", "EDGEFORMER_PROGRESS": "json"}
    environment |= dict.fromkeys(("EDGEFORMER_CACHE", "XDG_CACHE_HOME"), str(ROOT / "cache"))
    python, outputs, code = str(ROOT / request["environment"] / "venv/bin/python"), [], 0
    with (job / EVENTS).open("ab", buffering=0) as events:
        if acquire(ROOT / "device", wait=False) is None:
            events.write(b'{"message": "waiting for another measurement on this machine"}\n')
            acquire(ROOT / "device", wait=True)
        for arguments in request["commands"]:
            command = [python, "-m", "edgeformer", *arguments]
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": events}
            process = subprocess.run(command, cwd=job / "files", env=environment, **streams)
            outputs.append(process.stdout.decode(errors="replace"))
            code = process.returncode
            if code:
                break
    result = {"outputs": outputs, "code": code, "started": started, "seconds": time.time() - started}
    temporary = job / "result.tmp"
    temporary.write_text(json.dumps(result))
    temporary.replace(job / RESULT)


def forget(request: Request) -> None:
    """Stop a job if it runs, and remove it."""
    job = JOBS / request["job"]
    stop_owner(job)
    shutil.rmtree(job, ignore_errors=True)
    lock_file(job).unlink(missing_ok=True)
    send(end=None)


def clean(request: Request) -> None:
    """Stop everything that edgeformer runs here, and remove everything that it has written here."""
    size_bytes = sum(path.lstat().st_size for path in ROOT.rglob("*") if path.is_file()) if ROOT.exists() else 0
    for lock in [*ROOT.glob("*.lock"), *JOBS.glob("*.lock")]:
        stop_owner(lock.with_name(lock.name.removesuffix(".lock")))
    if ROOT.exists():
        shutil.rmtree(ROOT)
    with suppress(OSError):  # the folder has other content
        ROOT.parent.rmdir()
    send(end={"bytes": size_bytes})


def main() -> None:
    """Answer the request on stdin; with arguments: supervise a job."""
    if len(sys.argv) == 3:
        supervise(Path(sys.argv[1]), int(sys.argv[2]))
        return
    for variable in ("PYTHONPATH", "PYTHONHOME"):
        os.environ.pop(variable, None)
    with suppress(OSError):  # it leads a group
        os.setpgid(0, 0)
    send(agent=1)  # before it, a login script may have printed anything
    request = json.loads(sys.stdin.buffer.readline())
    calls = {"inspect": inspect, "upload": upload, "install": install, "run": run, "forget": forget, "clean": clean}
    try:
        calls[request["call"]](request)
    except Failed as error:
        send(error=str(error))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = f"; {free_bytes() >> 20} MiB are free" if full else ""
        send(error=f"{error.filename or ROOT}: {error.strerror}{hint}")
    except tarfile.TarError as error:
        send(error=f"the upload is incomplete: {error}")


if __name__ == "__main__":
    main()
