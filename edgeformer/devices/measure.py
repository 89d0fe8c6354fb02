"""Commands on devices: the same commands run there, and their JSON comes back."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgeformer.artifacts.bundle_files import TARGETS_FILE
from edgeformer.artifacts.data_config import NAME_PATTERN
from edgeformer.artifacts.device import DeviceProfile, Fact
from edgeformer.artifacts.documents import load_profile, own_profiles, save_profile, shipped_names
from edgeformer.artifacts.errors import EdgeformerError, InputError, InterruptedRun
from edgeformer.artifacts.files import write_json
from edgeformer.artifacts.progress import Progress, bar
from edgeformer.artifacts.report import Report, parse_report, seal_report
from edgeformer.artifacts.units import format_bytes
from edgeformer.benchmark.gate_result import Gate
from edgeformer.bundle import Bundle
from edgeformer.devices.connection import Connection, check_address
from edgeformer.devices.job import Device, JobResult, bundle_files
from edgeformer.estimate.calibrate import add_checks, check_estimates
from edgeformer.inference.verification import Verification
from edgeformer.measurement.target import AUTO
from edgeformer.report.documents import write_report
from edgeformer.run import Location
from edgeformer.system import child

T = TypeVar("T")

LOCAL = "local"
"""``--on local``: this machine, beside others."""
PACKS_FOLDER = "packs"
"""Folder of ``devices pack`` among the runs."""
_HOST = "host"
PROFILE_COMMENT = "# A device for --on, written by edgeformer devices add; measurements add to its calibration.\n"
_BUNDLE, _BASELINE, _PROFILE, _PROFILES, _ROWS = "bundle", "baseline", "device.yaml", "artifacts/profiles", "rows"
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


def load_device(name: str | None, artifacts: Path, progress: Progress) -> DeviceProfile | str | None:
    """Return the profile that ``--device`` names; ``auto`` and ``host``, which the device itself resolves, as they are.

    Raises RecipeError: there is no such profile, or it is not valid.
    """
    return name if name in (None, AUTO, _HOST) else load_profile(name, own_profiles(artifacts), progress.message)


def run_on(
    targets: Sequence[RemoteTarget],
    job_of: Callable[[RemoteTarget], Job],
    read: Callable[[RemoteTarget, JobResult], T],
    artifacts: Path,
    progress: Progress,
) -> tuple[dict[str, T], dict[str, EdgeformerError]]:
    """Run a job on every device at the same time, and return the results and the errors by name.

    Args:
        targets: devices, of which one may be this machine.
        job_of: the job of a device; on this machine only the last command runs, in the working directory.
        read: parses a result; the job is removed from the device afterwards. Its errors are those of the device.
        artifacts: folder of the runs, and of the packs of ``devices pack``.

    Raises InterruptedRun: Ctrl-C; the jobs were stopped and removed.
    """
    results, errors = dict[str, T](), dict[str, EdgeformerError]()
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
                    results[target.name] = read(target, result)
                return
            device = devices[target.name] = Device(target.address, artifacts / PACKS_FOLDER, shown)
            result = device.run(job.commands, job.files)
            sent = format_bytes(result.sent_bytes)
            shown.message(f"sent {sent}; {result.seconds:.1f} s of commands there, {result.setup_s:.1f} s for the rest")
            try:
                with lock:
                    results[target.name] = read(target, result)
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
                device.forget()
            raise InterruptedRun("interrupted: the jobs on the devices were stopped and removed") from None
        finally:
            for device in devices.values():
                device.connection.close()
    for future in futures:
        future.result()  # raises what is a defect
    return results, errors


def _run_here(arguments: Sequence[str], progress: Progress, processes: list[subprocess.Popen[str]]) -> JobResult:
    """Run a command on this machine as on a device, and add its process to ``processes``."""
    output, code, lines = child.run_edgeformer(arguments, progress, processes.append)
    return JobResult((output,), code, 0.0, tuple(lines), 0, 0.0)


def parse_output(target: RemoteTarget, result: JobResult, key: str) -> dict[str, Any]:
    """Return the JSON of a job's last command, which has ``key``. Raises RemoteError if the command failed."""
    try:
        document: dict[str, Any] = json.loads(result.outputs[-1])
    except (ValueError, IndexError):
        document = {}
    code = document.pop("exit_code", result.code)
    if key in document:
        return document
    if "error" in document:
        raise RemoteError(f"{target.name}: {document['error']}", code)
    if "files" in document:  # of verify, which runs first
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


def _device_files(
    device: DeviceProfile | str | None, target: RemoteTarget, artifacts: Path, folder: Path
) -> tuple[str, dict[str, Path]]:
    """Return the value of ``--device`` for a device, and the files that it needs there, written to ``folder``."""
    profile = device or target.profile or AUTO
    if isinstance(profile, DeviceProfile):
        file = folder / f"{target.name}.yaml"
        save_profile(profile, file, "")
        return _PROFILE, {_PROFILE: file}
    own = own_profiles(artifacts).glob("[!.]*.yaml") if profile == AUTO else ()
    return profile, {f"{_PROFILES}/{file.name}": file for file in own if file.stem != "host"}


def profile_on(
    targets: Sequence[RemoteTarget],
    location: Location,
    device: DeviceProfile | str | None,
    options: Sequence[str],
    artifact_ids: Sequence[str],
    artifacts: Path,
    progress: Progress,
) -> tuple[dict[str, Report], dict[str, EdgeformerError]]:
    """Verify and profile a bundle on devices, with further ``options``, and write the reports among those of the run.

    Args:
        device: of :func:`load_device`; None: the profile of ``devices add``, else ``auto``.
        artifact_ids: artifacts to verify and measure; empty: all.

    Returns:
        The reports and the errors by name; the reports in the order of ``targets``.
    """
    bundle = location.open_bundle()
    for id_ in artifact_ids:
        bundle.artifact(id_)  # an unknown one is refused before anything is sent
    options = [*options, *(word for id_ in artifact_ids for word in ("--artifact", id_)), "--json"]
    checks = [["verify", _BUNDLE, "--artifact", id_, "--json"] for id_ in artifact_ids] or [
        ["verify", _BUNDLE, "--json"]
    ]
    with tempfile.TemporaryDirectory() as folder:

        def job_of(target: RemoteTarget) -> Job:
            name, files = _device_files(device, target, artifacts, Path(folder))
            if target.address == LOCAL:
                run = [str(location.run or bundle.folder), "--artifacts", str(artifacts)]
                return Job([["profile", *run, "--device", str(files.get(name, name)), *options]], {})
            command = ["profile", _BUNDLE, "--device", name, *options]
            return Job([*checks, command], {**bundle_files(bundle, _BUNDLE), **files})

        def read(target: RemoteTarget, result: JobResult) -> Report:
            parse_output(target, result, "rows")
            report = parse_report(Path(target.name), result.outputs[-1].encode())
            if target.address != LOCAL:  # of this machine, the command itself has written it
                suffix = f"on-{re.sub(r'[^A-Za-z0-9.]+', '-', target.name).strip('-')}"
                parts = [report.question, "" if report.device == target.name else suffix]
                update: dict[str, Any] = {
                    "bundle": str(bundle.folder),
                    "host": report.host | {"address": target.address},
                    "question": "-".join(filter(None, parts)),
                }
                report = seal_report(report.model_copy(update=update))
                write_report(report, location)
            return report

        reports, errors = run_on(targets, job_of, read, artifacts, progress)
    # Estimates would disturb a measurement of this machine, so they wait for the end of all.
    return {
        target.name: _with_estimates(target, reports[target.name], location, device, artifacts, progress)
        for target in targets
        if target.name in reports
    }, errors


def _with_estimates(
    target: RemoteTarget,
    report: Report,
    location: Location,
    device: DeviceProfile | str | None,
    artifacts: Path,
    progress: Progress,
) -> Report:
    """Write a report again with estimates beside its rows, and add their errors to the profile of the device."""
    bundle, own = location.open_bundle(), own_profiles(artifacts)
    if report.device == _HOST or not report.on_target:
        return report  # there are no facts of this device
    profile = device if isinstance(device, DeviceProfile) else load_profile(report.device, own)
    with bar(progress, f"estimating {target.name}", None):
        checks = check_estimates(bundle, profile, report.rows)
    if not checks:
        return report
    if target.profile is not None and profile.name == target.profile.name:
        save_profile(add_checks(profile, bundle.name, checks), own / f"{profile.name}.yaml", PROFILE_COMMENT)
    report = seal_report(report.model_copy(update={"estimate_checks": tuple(checks)}))
    write_report(report, location)
    return report


def _run_on_one(target: RemoteTarget, job: Job, key: str, artifacts: Path, progress: Progress) -> dict[str, Any]:
    """Run a job on one device, and return the JSON of its last command. Raises the device's error."""
    if target.address == LOCAL:
        raise InputError(f"--on {LOCAL}: leave it out; without --on, this machine is used")
    results, errors = run_on(
        [target], lambda _: job, lambda _, result: parse_output(target, result, key), artifacts, progress
    )
    for error in errors.values():
        raise error
    return results[target.name]


def verify_on(
    target: RemoteTarget, bundle: Bundle, options: Sequence[str], artifacts: Path, progress: Progress
) -> Verification:
    """Verify a bundle on a device. With ``--write`` in ``options``, add the device's records to targets.json here."""
    job = Job([["verify", _BUNDLE, *options, "--json"]], bundle_files(bundle, _BUNDLE))
    document = _run_on_one(target, job, "files", artifacts, progress)
    verification = Verification.model_validate(document | {"bundle": str(bundle.folder)}, strict=False)
    if verification.recorded is not None and verification.recorded.records:
        path = bundle.folder / TARGETS_FILE
        write_json(path, bundle.records.of(bundle.manifest).with_new(verification.recorded.records))
        recorded = verification.recorded.model_copy(update={"file": str(path)})
        verification = verification.model_copy(update={"recorded": recorded})
    return verification


def gate_on(
    target: RemoteTarget,
    bundles: tuple[Bundle, Bundle],
    device: DeviceProfile | str | None,
    options: Sequence[str],
    eval_data: Path | None,
    artifacts: Path,
    progress: Progress,
) -> Gate:
    """Compare a bundle with its baseline on a device, with further ``options`` of ``gate``.

    ``bundles`` are the candidate, which is verified there first, and the baseline; ``device`` is as for
    :func:`profile_on`.
    """
    candidate, baseline = bundles
    with tempfile.TemporaryDirectory() as folder:
        name, files = _device_files(device, target, artifacts, Path(folder))
        files |= {**bundle_files(candidate, _BUNDLE), **bundle_files(baseline, _BASELINE)}
        command = ["gate", _BUNDLE, "--against", _BASELINE, "--device", name, *options, "--json"]
        if eval_data is not None:
            rows = f"{_ROWS}{''.join(eval_data.suffixes)}"
            files[rows] = eval_data
            command += ["--eval-data", rows]
        job = Job([["verify", _BUNDLE, "--json"], command], files)
        gate = Gate.model_validate(_run_on_one(target, job, "checks", artifacts, progress), strict=False)
    update = {
        "candidate": str(candidate.folder),
        "baseline": str(baseline.folder),
        "host": gate.host | {"address": target.address},
    }
    return gate.model_copy(update=update)


def add_device(
    name: str,
    address: str,
    bundles: Sequence[Bundle],
    base: DeviceProfile | None,
    options: Sequence[str],
    artifacts: Path,
    progress: Progress,
) -> tuple[DeviceProfile, Path]:
    """Write the profile of a device to the user's profiles, and return it with its path.

    Args:
        name: of the profile and of the device for ``--on``.
        address: [USER@]HOST for ssh.
        bundles: of the models to calibrate with; the estimates are compared with measurements of the first one.
        base: profile to copy instead of calibrating, as for a GPU; None: calibrate the device's processor.
        options: further options of ``calibrate``.

    Raises InputError: the name cannot be used, or belongs to another device.
    """
    file = own_profiles(artifacts) / f"{name}.yaml"
    if re.fullmatch(NAME_PATTERN, name) is None or name in (LOCAL, AUTO, _HOST) or name in shipped_names("profiles"):
        raise InputError(f"--name {name}: use letters, digits, '.', '_' and '-', and no name of a shipped profile")
    if file.is_file() and load_profile(str(file)).address != address:
        raise InputError(f"--name {name}: {file} is another device; choose another name, or remove the file")
    check_address("HOST", address)
    target = RemoteTarget(name, address)
    if base is None:
        files, command = (
            dict[str, Path](),
            ["calibrate", f"{_BUNDLE}0", "--device", _HOST, "--validate", "--json", *options],
        )
        for number, bundle in enumerate(bundles):
            files |= bundle_files(bundle, f"{_BUNDLE}{number}")
            command += ["--also", f"{_BUNDLE}{number}"] if number else []
        document = _run_on_one(target, Job([command], files), "profile", artifacts, progress)
        measured = DeviceProfile.model_validate(document["profile"], strict=False)
        assert measured.calibration is not None
        memory = Fact[int](
            value=document["host"]["memory_bytes"], source="the device's system", verified="measured here"
        )
        base = measured.model_copy(update={"match": measured.calibration.processor, "memory_bytes": memory})
    profile = base.model_copy(update={"name": name, "title": name, "address": address})
    save_profile(profile, file, PROFILE_COMMENT)
    return profile, file


def clean_device(address: str) -> int:
    """Stop the jobs of a device, remove everything that ``--on`` has written there, and return its size in bytes."""
    connection = Connection(address)
    try:
        connection.find_python()
        return int(connection.call("clean", {})["bytes"])
    finally:
        connection.close()
