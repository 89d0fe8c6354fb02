"""Commands on devices: the same commands run there, and their JSON comes back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeformer.artifacts.command_results import Verification
from edgeformer.artifacts.device import DeviceProfile
from edgeformer.artifacts.documents import load_profile, own_profiles, save_profile
from edgeformer.artifacts.errors import EdgeformerError, InterruptedRun
from edgeformer.artifacts.progress import Progress
from edgeformer.artifacts.report import Report, parse_report, seal_report
from edgeformer.artifacts.units import format_bytes
from edgeformer.devices.connection import check_address
from edgeformer.devices.job import Device, JobResult, bundle_files, forward_event
from edgeformer.report.documents import report_files, write_report
from edgeformer.run import Location

LOCAL = "local"
"""``--on local``: this machine, beside others."""
AUTO = "auto"
"""``--device auto``: the profile that names the machine."""
PACKS_FOLDER = "packs"
"""Folder of ``devices pack`` among the runs."""
_BUNDLE, _PROFILE, _PROFILES = "bundle", "device.yaml", "artifacts/profiles"
"""Names in the folder of a job."""


class RemoteError(EdgeformerError):
    """A command failed on a device; the exit code is that of the command there."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class DeviceProgress(Progress):
    """Progress of one of several devices: each bar becomes a line, with the name of its device."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name, self._progress = name, progress

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.message(description)

    def message(self, text: str) -> None:
        self._progress.message(f"{self._name}: {text}")


@dataclass(frozen=True)
class RemoteTarget:
    """A device that ``--on`` names.

    Attributes:
        name: as the user wrote it; in messages and file names.
        address: [USER@]HOST for ssh, or ``local``.
        profile: of ``devices add``; None: the device has none.
    """

    name: str
    address: str
    profile: DeviceProfile | None = None


@dataclass(frozen=True)
class Job:
    """Arguments of ``edgeformer`` per command, and path on the device → file here."""

    commands: Sequence[Sequence[str]]
    files: Mapping[str, Path]


def find_targets(names: Sequence[str], artifacts: Path) -> list[RemoteTarget]:
    """Resolve the values of ``--on``: names of ``devices add`` and addresses. Raises InputError for other text."""
    targets = []
    for name in dict.fromkeys(names):
        check_address("--on", name)
        file = own_profiles(artifacts) / f"{name}.yaml"
        profile = load_profile(str(file)) if file.is_file() else None
        if profile is None or profile.address is None:
            targets.append(RemoteTarget(name, name))
        else:
            check_address(f"{file}: address", profile.address)
            targets.append(RemoteTarget(name, profile.address, profile))
    return targets


def run_on(
    targets: Sequence[RemoteTarget],
    job_of: Callable[[RemoteTarget], Job],
    take: Callable[[RemoteTarget, JobResult], None],
    packs: Path,
    progress: Progress,
) -> dict[str, EdgeformerError]:
    """Run a job on every device at the same time, and return the errors by name.

    Args:
        targets: devices, of which one may be this machine.
        job_of: the job of a device; on this machine only the last command runs, in the working directory.
        take: receives each result; the job is removed from the device afterwards. Its errors are those of the device.
        packs: folder with the packs of ``devices pack``.
        progress: shows what happens.

    Raises InterruptedRun: Ctrl-C; the jobs were stopped and removed.
    """
    errors: dict[str, EdgeformerError] = {}
    devices: dict[str, Device] = {}
    processes: list[subprocess.Popen[str]] = []
    lock = threading.Lock()

    def work(target: RemoteTarget) -> None:
        shown = progress if len(targets) == 1 else DeviceProgress(target.name, progress)
        try:
            job = job_of(target)
            if target.address == LOCAL:
                result = _run_here(job.commands[-1], shown, processes)
                with lock:
                    take(target, result)
                return
            device = devices[target.name] = Device(target.address, packs, shown)
            result = device.run(job.commands, job.files)
            sent = format_bytes(result.sent_bytes)
            shown.message(f"sent {sent}; {result.seconds:.1f} s of commands there, {result.setup_s:.1f} s for the rest")
            try:
                with lock:
                    take(target, result)
            finally:
                device.forget()
        except EdgeformerError as error:
            errors[target.name] = error
        finally:
            shown.finish()

    with ThreadPoolExecutor(len(targets)) as pool:
        futures = [pool.submit(work, target) for target in targets]
        try:
            wait(futures)
        except KeyboardInterrupt:
            for process in processes:
                process.terminate()
            for device in devices.values():
                with suppress(EdgeformerError):
                    device.forget()
            raise InterruptedRun("interrupted: the jobs on the devices were stopped and removed") from None
        finally:
            for device in devices.values():
                device.connection.close()
    for future in futures:
        future.result()  # raises what is a defect
    return errors


def _run_here(arguments: Sequence[str], progress: Progress, processes: list[subprocess.Popen[str]]) -> JobResult:
    """Run a command on this machine as on a device, and add its process to ``processes``."""
    errors = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "edgeformer", *arguments], stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.PIPE, env={**os.environ, "EDGEFORMER_PROGRESS": "json"}, encoding="utf-8",
            errors="replace",
        )  # fmt: skip
        processes.append(process)
        with process:
            for line in process.stderr or ():
                text = forward_event(line, progress)
                if text is not None:
                    errors.append(text)
        output.seek(0)
        return JobResult((output.read(),), process.returncode, 0.0, tuple(errors), 0, 0.0)


def parse_output(target: RemoteTarget, result: JobResult, key: str) -> dict[str, Any]:
    """Return the JSON of a job's last command, which has ``key``. Raises RemoteError if the command failed."""
    try:
        document: dict[str, Any] = json.loads(result.outputs[-1])
    except (ValueError, IndexError):
        document = {}
    if key in document:
        return document
    if "error" in document:
        raise RemoteError(f"{target.name}: {document['error']}", int(document["exit_code"]))
    if "files" in document:  # of verify, which runs first
        document.pop("exit_code")
        verification = Verification.model_validate(document, strict=False)
        problems = [f"{check.file} is {check.status}" for check in verification.damaged]
        problems += [
            f"{check.artifact} is {check.status}" + (f" ({check.reason})" if check.reason else "")
            for check in verification.artifacts
            if check.status != "verified"
        ]
        raise RemoteError(
            f"{target.name}: not measured, because verify failed there: {'; '.join(problems)}; to measure others, name "
            "them with --artifact",
            result.code,
        )
    text = "; ".join(result.errors[-3:]) or "no message"
    raise RemoteError(f"{target.name}: edgeformer ended there with exit code {result.code}: {text}", 1)


@dataclass(frozen=True)
class DeviceReport:
    """A report of a device, and its files."""

    target: RemoteTarget
    report: Report
    files: list[Path]


def profile_on(
    targets: Sequence[RemoteTarget],
    location: Location,
    device: DeviceProfile | str | None,
    options: Sequence[str],
    artifact_ids: Sequence[str],
    artifacts: Path,
    progress: Progress,
) -> tuple[list[DeviceReport], dict[str, EdgeformerError]]:
    """Verify and profile a bundle on devices, and write the reports among those of the run.

    Args:
        targets: devices to measure.
        location: the run and its bundle.
        device: profile to judge for; ``auto``: the profile that names the device; ``host``: without a budget; None: the
            profile of ``devices add``, else ``auto``.
        options: further options of ``profile``.
        artifact_ids: artifacts to verify and measure; empty: all.
        artifacts: folder of the runs.
        progress: shows what happens.

    Returns:
        The reports in the order of ``targets``, and the errors by name.
    """
    bundle, reports = location.open_bundle(), dict[str, DeviceReport]()
    for id_ in artifact_ids:
        bundle.artifact(id_)  # an unknown one is refused before anything is sent
    options = [*options, *(word for id_ in artifact_ids for word in ("--artifact", id_)), "--json"]
    checks = [["verify", _BUNDLE, "--artifact", id_, "--json"] for id_ in artifact_ids] or [
        ["verify", _BUNDLE, "--json"]
    ]
    with tempfile.TemporaryDirectory() as folder:

        def job_of(target: RemoteTarget) -> Job:
            profile, files = device or target.profile or AUTO, bundle_files(bundle, _BUNDLE)
            name = profile if isinstance(profile, str) else _PROFILE
            if isinstance(profile, DeviceProfile):
                files[_PROFILE] = Path(folder) / f"{target.name}.yaml"
                save_profile(profile, files[_PROFILE], "")
            elif profile == AUTO:
                own = own_profiles(artifacts).glob("[!.]*.yaml")
                files |= {f"{_PROFILES}/{file.name}": file for file in own if file.stem != "host"}
            if target.address == LOCAL:
                name = str(files.get(_PROFILE, name))
                run = [str(location.run or bundle.folder), "--artifacts", str(artifacts)]
                return Job([["profile", *run, "--device", name, *options]], {})
            return Job([*checks, ["profile", _BUNDLE, "--device", name, *options]], files)

        def take(target: RemoteTarget, result: JobResult) -> None:
            parse_output(target, result, "rows")
            report = parse_report(Path(target.name), result.outputs[-1].encode())
            if target.address != LOCAL:  # of this machine, the command itself has written it
                suffix = re.sub(r"[^A-Za-z0-9.]+", "-", target.name).strip("-")
                update: dict[str, Any] = {
                    "bundle": str(bundle.folder),
                    "host": report.host | {"address": target.address},
                }
                update["question"] = "-".join(filter(None, [report.question, f"on-{suffix}"]))
                report = seal_report(report.model_copy(update=update))
                write_report(report, location)
            reports[target.name] = DeviceReport(target, report, report_files(report, location))

        errors = run_on(targets, job_of, take, artifacts / PACKS_FOLDER, progress)
    return [reports[target.name] for target in targets if target.name in reports], errors
