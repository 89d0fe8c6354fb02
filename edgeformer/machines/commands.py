"""Commands on machines: the same commands run there, and their JSON comes back."""

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
from edgeformer.benchmark.gate_result import Gate
from edgeformer.bundle import Bundle
from edgeformer.estimate.calibrate import add_checks, check_estimates
from edgeformer.inference.verification import Verification
from edgeformer.machines.connection import check_address
from edgeformer.machines.machine import Machine, bundle_files
from edgeformer.measurement.target import AUTO
from edgeformer.report.documents import write_report
from edgeformer.run import Location
from edgeformer.system import child

T = TypeVar("T")

LOCAL = "local"  # ``--on local``: this machine, beside others
PACKS_FOLDER = "packs"  # folder of ``machines pack`` among the runs
_HOST = "host"
PROFILE_COMMENT = "# A machine for --on, written by edgeformer machines add; measurements add to its calibration.\n"
_BUNDLE, _BASELINE, _PROFILE, _PROFILES, _ROWS = "bundle", "baseline", "device.yaml", "artifacts/profiles", "rows"
"""Names in the folder of a job."""


class RemoteError(EdgeformerError):
    """A command failed on a machine; the exit code is that of the command there."""


@dataclass(eq=False)
class MachineProgress(Progress):
    """Progress of one of several machines: each bar becomes a line, with the name of its machine."""

    name: str
    progress: Progress

    def start(self, description: str, total: int | None, unit: str = "") -> None:
        self.message(description)

    def message(self, text: str) -> None:
        self.progress.message(f"{self.name}: {text}")


@dataclass(frozen=True)
class RemoteTarget:
    """A machine that ``--on`` names."""

    name: str  # as the user wrote it; in messages and file names
    address: str  # [USER@]HOST for ssh, or ``local``
    profile: DeviceProfile | None = None  # of ``machines add``


@dataclass(frozen=True)
class RemoteJob:
    """Arguments of ``edgeformer`` per command, and path on the machine → file here."""

    commands: Sequence[Sequence[str]]
    files: Mapping[str, Path]


def find_targets(names: Sequence[str], artifacts: Path) -> list[RemoteTarget]:
    """Resolve the values of ``--on``: names of ``machines add`` and addresses. Raises InputError for other text."""
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
    """Return the profile that ``--device`` names, or ``auto`` and ``host``, which the machine resolves, as they are.

    Raises RecipeError: there is no such profile, or it is not valid.
    """
    return name if name in (None, AUTO, _HOST) else load_profile(name, own_profiles(artifacts), progress.message)


def run_on(
    targets: Sequence[RemoteTarget], job_of: Callable[[RemoteTarget], RemoteJob],
    read: Callable[[RemoteTarget, child.Outcome], T], artifacts: Path, progress: Progress,
) -> tuple[dict[str, T], dict[str, EdgeformerError]]:  # fmt: skip
    """Run a job on every machine at the same time, and return the results and the errors by name.

    On this machine only the last command of ``job_of`` runs, in the working directory. ``read`` parses a result, and
    its errors are those of the machine; the job is removed from the machine afterwards.
    Raises InterruptedRun: Ctrl-C; the jobs were stopped and removed.
    """
    results, errors = dict[str, T](), dict[str, EdgeformerError]()
    machines: dict[str, Machine] = {}
    processes: list[subprocess.Popen[str]] = []
    lock = threading.Lock()

    def work(target: RemoteTarget) -> None:
        shown_progress = progress if len(targets) == 1 else MachineProgress(target.name, progress)
        try:
            job = job_of(target)
            machine: Machine | None = None
            if target.address == LOCAL:
                result = child.run_edgeformer(job.commands[-1], shown_progress, processes.append)
            else:
                machine = machines[target.name] = Machine(target.address, artifacts / PACKS_FOLDER, shown_progress)
                result = machine.run(job.commands, job.files)
            try:
                with lock:
                    results[target.name] = read(target, result)
            finally:
                if machine is not None:
                    machine.forget()
        except EdgeformerError as error:
            errors[target.name] = error
        finally:
            shown_progress.finish()

    with ThreadPoolExecutor(len(targets)) as pool:
        futures = [pool.submit(work, target) for target in targets]
        try:
            wait(futures)
        except KeyboardInterrupt:
            for process in processes:
                process.terminate()
            for machine in machines.values():
                machine.forget()
            raise InterruptedRun("interrupted: the jobs on the machines were stopped and removed") from None
        finally:
            for machine in machines.values():
                machine.connection.close()
    for future in futures:
        future.result()  # raises what is a defect
    return results, errors


def parse_output(target: RemoteTarget, result: child.Outcome, key: str) -> dict[str, Any]:
    """Return the JSON of a job's last command, which has ``key``. Raises RemoteError if the command failed."""
    document = result.document
    code = document.pop("exit_code", result.code)
    if key in document:
        return document
    if "error" in document:
        raise RemoteError(f"{target.name}: {result.problem}", code)
    if "files" in document:  # of verify, which runs first
        verification = Verification.model_validate(document, strict=False)
        problems = [f"{check.file} is {check.status}" for check in verification.damaged]
        for check in verification.artifacts:
            if check.status != "verified":
                problems.append(f"{check.artifact} is {check.status}" + (f" ({check.reason})" if check.reason else ""))
        remedy = "to measure others, name them with --artifact"
        text = f"{target.name}: not measured, because verify failed there: {'; '.join(problems)}; {remedy}"
        raise RemoteError(text, result.code)
    raise RemoteError(f"{target.name}: edgeformer ended there with exit code {result.code}: {result.problem}", 1)


def _device_files(
    device: DeviceProfile | str | None, target: RemoteTarget, artifacts: Path, folder: Path
) -> tuple[str, dict[str, Path]]:
    """Return the value of ``--device`` for a machine, and the files that it needs there, written to ``folder``."""
    profile = device or target.profile or AUTO
    if isinstance(profile, DeviceProfile):
        file = folder / f"{target.name}.yaml"
        save_profile(profile, file, "")
        return _PROFILE, {_PROFILE: file}
    profiles = own_profiles(artifacts).glob("[!.]*.yaml") if profile == AUTO else ()
    return profile, {f"{_PROFILES}/{file.name}": file for file in profiles if file.stem != "host"}


def profile_on(
    targets: Sequence[RemoteTarget], location: Location, device: DeviceProfile | str | None, options: Sequence[str],
    artifact_ids: Sequence[str], artifacts: Path, progress: Progress,
) -> tuple[dict[str, Report], dict[str, EdgeformerError]]:  # fmt: skip
    """Verify and profile a bundle on machines, with further ``options``, and write the reports among those of the run.

    ``device`` is of :func:`load_device`; None: the profile of ``machines add``, else ``auto``.
    Returns the reports, in the order of ``targets``, and the errors by name.
    """
    bundle = location.open_bundle()
    for id_ in artifact_ids:
        bundle.artifact(id_)  # an unknown one is refused before anything is sent
    options = [*options, *(word for id_ in artifact_ids for word in ("--artifact", id_)), "--json"]
    selected = [["--artifact", id_] for id_ in artifact_ids] or [[]]
    checks = [["verify", _BUNDLE, *artifact, "--json"] for artifact in selected]
    with tempfile.TemporaryDirectory() as folder:

        def job_of(target: RemoteTarget) -> RemoteJob:
            name, files = _device_files(device, target, artifacts, Path(folder))
            if target.address == LOCAL:
                run = [str(location.run or bundle.folder), "--artifacts", str(artifacts)]
                return RemoteJob([["profile", *run, "--device", str(files.get(name, name)), *options]], {})
            command = ["profile", _BUNDLE, "--device", name, *options]
            return RemoteJob([*checks, command], {**bundle_files(bundle, _BUNDLE), **files})

        def read(target: RemoteTarget, result: child.Outcome) -> Report:
            parse_output(target, result, "rows")
            report = parse_report(Path(target.name), result.output.encode())
            if target.address != LOCAL:  # of this machine, the command itself has written it
                suffix = f"on-{re.sub(r'[^A-Za-z0-9.]+', '-', target.name).strip('-')}"
                question = "-".join(filter(None, [report.question, "" if report.device == target.name else suffix]))
                host = report.host | {"address": target.address}
                update = {"bundle": str(bundle.folder), "host": host, "question": question}
                report = seal_report(report.model_copy(update=update))
                write_report(report, location)
            return report

        reports, errors = run_on(targets, job_of, read, artifacts, progress)
    # Write the reports again with estimates beside their rows, and add the errors to the profiles of the machines.
    # Estimates would disturb a measurement of this machine, so they wait for the end of all.
    reports = {target.name: reports[target.name] for target in targets if target.name in reports}
    profiles = own_profiles(artifacts)
    for target in targets:
        report = reports.get(target.name)
        if report is None or report.device == _HOST or not report.on_target:
            continue  # there is no report, or there are no facts of this machine
        profile = device if isinstance(device, DeviceProfile) else load_profile(report.device, profiles)
        with bar(progress, f"estimating {target.name}", None):
            estimate_checks = check_estimates(bundle, profile, report.rows)
        if not estimate_checks:
            continue
        if target.profile is not None and profile.name == target.profile.name:
            measured_profile = add_checks(profile, bundle.name, estimate_checks)
            save_profile(measured_profile, profiles / f"{profile.name}.yaml", PROFILE_COMMENT)
        report = seal_report(report.model_copy(update={"estimate_checks": tuple(estimate_checks)}))
        write_report(report, location)
        reports[target.name] = report
    return reports, errors


def _run_on_one(target: RemoteTarget, job: RemoteJob, key: str, artifacts: Path, progress: Progress) -> dict[str, Any]:
    """Run a job on one machine, and return the JSON of its last command. Raises the machine's error."""
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
    """Verify a bundle on a machine. With ``--write`` in ``options``, add its records to targets.json here."""
    job = RemoteJob([["verify", _BUNDLE, *options, "--json"]], bundle_files(bundle, _BUNDLE))
    document = _run_on_one(target, job, "files", artifacts, progress)
    verification = Verification.model_validate(document | {"bundle": str(bundle.folder)}, strict=False)
    if verification.recorded is not None and verification.recorded.records:
        path = bundle.folder / TARGETS_FILE
        write_json(path, bundle.records.of(bundle.manifest).with_new(verification.recorded.records))
        recorded = verification.recorded.model_copy(update={"file": str(path)})
        verification = verification.model_copy(update={"recorded": recorded})
    return verification


def gate_on(
    target: RemoteTarget, bundles: tuple[Bundle, Bundle], device: DeviceProfile | str | None, options: Sequence[str],
    eval_data: Path | None, artifacts: Path, progress: Progress,
) -> Gate:  # fmt: skip
    """Compare a bundle with its baseline on a machine, with further ``options`` of ``gate``.

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
        job = RemoteJob([["verify", _BUNDLE, "--json"], command], files)
        gate = Gate.model_validate(_run_on_one(target, job, "checks", artifacts, progress), strict=False)
    folders = {"candidate": str(candidate.folder), "baseline": str(baseline.folder)}
    return gate.model_copy(update={**folders, "host": gate.host | {"address": target.address}})


def add_machine(
    name: str, address: str, bundles: Sequence[Bundle], base: DeviceProfile | None, options: Sequence[str],
    artifacts: Path, progress: Progress,
) -> tuple[DeviceProfile, Path]:  # fmt: skip
    """Write the profile of a machine to the user's profiles, and return it with its path.

    Its processor is calibrated with ``bundles`` and further ``options`` of ``calibrate``; estimates are compared with
    measurements of the first one. With a ``base``, as for a GPU, that profile is copied instead.
    Raises InputError: the name cannot be used, or belongs to another machine.
    """
    file = own_profiles(artifacts) / f"{name}.yaml"
    if re.fullmatch(NAME_PATTERN, name) is None or name in (LOCAL, AUTO, _HOST) or name in shipped_names("profiles"):
        raise InputError(f"--name {name}: use letters, digits, '.', '_' and '-', and no name of a shipped profile")
    if file.is_file() and load_profile(str(file)).address != address:
        raise InputError(f"--name {name}: {file} is another machine; choose another name, or remove the file")
    check_address("HOST", address)
    target = RemoteTarget(name, address)
    if base is None:
        files: dict[str, Path] = {}
        command = ["calibrate", f"{_BUNDLE}0", "--device", _HOST, "--validate", "--json", *options]
        for number, bundle in enumerate(bundles):
            files |= bundle_files(bundle, f"{_BUNDLE}{number}")
            command += ["--also", f"{_BUNDLE}{number}"] if number else []
        document = _run_on_one(target, RemoteJob([command], files), "profile", artifacts, progress)
        measured = DeviceProfile.model_validate(document["profile"], strict=False)
        assert measured.calibration is not None
        size = document["host"]["memory_bytes"]
        memory = Fact[int](value=size, source="the machine's system", verified="measured here")
        base = measured.model_copy(update={"match": measured.calibration.processor, "memory_bytes": memory})
    profile = base.model_copy(update={"name": name, "title": name, "address": address})
    save_profile(profile, file, PROFILE_COMMENT)
    return profile, file
