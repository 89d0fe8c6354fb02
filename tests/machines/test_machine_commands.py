"""`machines add` and `list`, `profile --on`, `gate --on`, hostile names; connections that are killed at every step."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from edgeformer.artifacts.documents import load_profile, save_profile
from edgeformer.artifacts.report import read_report
from edgeformer.measurement.target import AUTO, resolve_device
from edgeformer.system.host import describe_host
from tests.cli.in_process import Edgeformer
from tests.machines.sshd import Sshd, start_sshd

ONE_ROW = ("--batch", "1", "--seq", "16", "--artifact", "onnx-fp32")
ADD = ("machines", "add", "kitchen-pi", "--device", "host", "--name")


@pytest.fixture
def desk(machine: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """A second machine, with one core and one thread; ``ssh`` reaches both."""
    if shutil.which("taskset") is None:
        pytest.skip("needs taskset, to limit a machine to one core")
    core = str(min(os.sched_getaffinity(0)))
    server = start_sshd(tmp_path / "desk", "desk", environment="OMP_NUM_THREADS=1", launcher=("taskset", "-c", core))
    server.install_here()
    both = tmp_path / "ssh_config"
    both.write_text(machine.config.read_text() + server.config.read_text())
    monkeypatch.setenv("EDGEFORMER_SSH", f"ssh -F {both}")
    yield server
    server.stop()


@pytest.mark.slow
def test_an_added_machine_is_listed_and_measured(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    assert "no machines in artifacts; add one" in edgeformer("machines", "list")
    assert "edgeformer profile --on robot" in edgeformer(*ADD, "robot")
    (row,) = json.loads(edgeformer("machines", "list", "--json"))["machines"]
    assert (row["name"], row["address"], row["calibrated"]) == ("robot", "kitchen-pi", None)
    assert "robot   kitchen-pi" in edgeformer("machines", "list")
    assert "address" not in edgeformer("list", "devices", "--artifacts", "other")
    text = edgeformer("profile", "small", "--on", "robot", *ONE_ROW)
    assert "edgeformer gate small --against BASELINE --on robot" in text
    report = read_report(run / "reports" / "robot-onnx-fp32.json")
    assert (report.device, report.on_target, report.host["address"]) == ("robot", True, "kitchen-pi")
    edgeformer(*ADD, "robot")  # the same machine again


@pytest.mark.parametrize("name", ["local", "auto", "host", "raspberry-pi-5", "a b", "../x", "", "-x"])
def test_names_that_no_machine_can_have(machine: Sshd, edgeformer: Edgeformer, run: Path, name: str) -> None:
    message = edgeformer("machines", "add", "kitchen-pi", "--device", "host", f"--name={name}", code=2)
    assert f"--name {name}: use letters" in message and not Path("artifacts/profiles").exists()


def test_a_name_stays_with_its_machine(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    edgeformer(*ADD, "robot")
    message = edgeformer("machines", "add", "desk", "--device", "host", "--name", "robot", code=2)
    assert "robot.yaml is another machine" in message
    assert load_profile("artifacts/profiles/robot.yaml").address == "kitchen-pi"
    assert "write [USER@]HOST" in edgeformer("machines", "add", "--device=host", "--name=x", "--", "-v", code=2)


def test_an_added_machine_is_not_taken_for_another_with_its_processor(tmp_path: Path) -> None:
    own, processor = tmp_path / "profiles", describe_host()["cpu"]
    for name, address in {"mine": None, "a-robot": "robot"}.items():
        update = {"name": name, "match": processor, "address": address}
        save_profile(load_profile("host").model_copy(update=update), own / f"{name}.yaml", "")
    assert resolve_device(AUTO, own).name == "mine"


@pytest.mark.slow
def test_an_added_machine_is_calibrated(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    edgeformer("machines", "add", "kitchen-pi", "small", "--name", "pi", "--allow-noise")
    profile = load_profile("artifacts/profiles/pi.yaml")
    assert profile.calibration is not None and profile.memory_bytes.verified == "measured here"
    report = json.loads(edgeformer("profile", "small", "--on", "pi", *ONE_ROW, "--json"))
    assert {check["seq"] for check in report["estimate_checks"]} == {16, 64}  # that of the device budget, too
    calibration = load_profile("artifacts/profiles/pi.yaml").calibration
    assert (1, 16) in {(case.batch, case.seq) for case in calibration.validated_on}


@pytest.mark.slow
def test_gate_compares_on_the_machine(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    baseline = Path(shutil.copytree(run, run.with_name("before")))
    options = (*ONE_ROW, "--max-memory-growth", "off", "--max-score-loss", "off", "--max-slowdown", "900%")
    arguments = ("gate", "small", "--against", "before", "--on", "kitchen-pi", *options)
    gate = json.loads(edgeformer(*arguments, "--json"))
    statuses = {check["name"]: check["status"] for check in gate["checks"]}
    assert statuses == dict.fromkeys(("size", "drift", "latency"), "pass")
    assert gate["host"]["address"] == "kitchen-pi" and gate["baseline"] == "artifacts/before/bundle"
    graph = baseline / "bundle" / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-9])
    assert "onnx/model.onnx" in edgeformer(*arguments, code=2)
    assert not any((machine.root / "jobs").glob("*/*"))


@pytest.mark.slow
def test_two_machines_are_compared(desk: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    """Both measure at the same time; one machine that is off hides no other."""
    arguments = ("profile", "small", *ONE_ROW, "--on", "kitchen-pi", "--on", "desk", "--on", "127.0.0.1")
    text = edgeformer(*arguments, code=1)
    assert "127.0.0.1: " in text and "page    artifacts/small/reports/devices.html" in text
    reports = [read_report(run / "reports" / f"host-onnx-fp32-on-{name}.json") for name in ("kitchen-pi", "desk")]
    assert [report.host["address"] for report in reports] == ["kitchen-pi", "desk"]
    assert reports[1].host["threads"] == 1 and reports[1].rows[0].threads == 1
    page = (run / "reports" / "devices.html").read_text(encoding="utf-8")
    assert "small on 3 devices" in page and "kitchen-pi" in page and "desk" in page


@pytest.mark.slow
def test_this_machine_beside_a_machine(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    comparison = json.loads(edgeformer("profile", "small", *ONE_ROW, "--on", "kitchen-pi", "--on", "local", "--json"))
    assert [entry["name"] for entry in comparison["devices"]] == ["kitchen-pi", "local"]
    assert all({*row["devices"]} == {"kitchen-pi", "local"} for row in comparison["rows"])
    assert "address" not in comparison["reports"]["local"]["host"]
    assert "without --on, this machine is used" in edgeformer("verify", "small", "--on", "local", code=2)


@pytest.mark.slow
def test_machines_that_are_off_or_absent(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    message = edgeformer("profile", "small", "--on", "127.0.0.1", "--on", "localhost", code=1)
    assert "127.0.0.1: " in message and "localhost: " in message and not (run / "reports").exists()
    text = edgeformer("profile", "small", "--device", "raspberry-pi-5", *ONE_ROW)
    assert "edgeformer profile small --device raspberry-pi-5 --on HOST" in text


@pytest.mark.parametrize(
    "address",
    [
        "-oProxyCommand=touch hacked", "pi@host name", "pi@host\ntouch hacked", "host;touch hacked", "$(touch hacked)",
        "pi@'host'", "../host", "", "host`touch hacked`", "-v", "pi@-oProxyCommand=x", 'pi@"host"',
    ],
)  # fmt: skip
def test_hostile_addresses_are_refused(machine: Sshd, edgeformer: Edgeformer, run: Path, address: str) -> None:
    logins = machine.log.read_text()
    message = edgeformer("profile", "small", f"--on={address}", *ONE_ROW, code=2)
    assert "write [USER@]HOST or a name of ~/.ssh/config" in message
    assert machine.log.read_text() == logins and not (run / ".." / ".." / "hacked").exists()


@pytest.mark.slow
def test_a_report_comes_back_and_hostile_names_are_text(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    named = run.with_name("a $(touch hacked) 'b' \"c\" ;touch hacked\n#")
    run.rename(named)
    report = json.loads(edgeformer("profile", str(named), "--on", "kitchen-pi", *ONE_ROW, "--json"))
    assert report["on_target"] and report["host"]["address"] == "kitchen-pi"
    assert {row["latency_ms"]["status"] for row in report["rows"]} == {"measured"}
    written = read_report(named / "reports" / "host-onnx-fp32-on-kitchen-pi.json")
    assert written.bundle == report["bundle"] == str(named / "bundle")
    assert written.report_sha256 == report["report_sha256"] and not any((machine.root / "jobs").glob("*/*"))
    assert not list(machine.home.rglob("hacked")) and not list(run.parents[1].rglob("hacked"))


def test_unknown_artifacts_and_damaged_files_are_not_measured(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    logins = machine.log.read_text()
    assert "has onnx-fp32" in edgeformer("profile", "small", "--on", "kitchen-pi", "--artifact", "../x", code=2)
    assert machine.log.read_text() == logins
    graph = run / "bundle" / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-9])
    message = edgeformer("profile", "small", "--on", "kitchen-pi", *ONE_ROW, code=2)
    assert "not measured, because verify failed there: onnx/model.onnx is truncated" in message
    assert not (run / "reports").exists() and not any((machine.root / "jobs").glob("*/*"))


_LIMIT_S = 600.0


def kill_connections(command: psutil.Process, sockets: set[str]) -> int:
    """Kill the ssh processes of a command and their shared login, and return how many there were.

    ``sockets``: control sockets that were seen so far; the shared login has nothing else in its name.
    """
    processes = find_clients(command, sockets)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(f"ssh: {socket} " in " ".join(process.cmdline()) for socket in sockets):
                processes.append(process)
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    return len(processes)


def find_clients(command: psutil.Process, sockets: set[str]) -> list[psutil.Process]:
    """The ssh processes that a command has started; adds the control sockets in their arguments."""
    processes = []
    with suppress(psutil.Error):
        for process in command.children():
            if process.name() == "ssh":
                processes.append(process)
                words = process.cmdline()
                sockets.update(word.partition("=")[2] for word in words if word.startswith("ControlPath="))
    return processes


def run_and_kill(
    sshd: Sshd, cwd: Path, arguments: list[str], kill: Callable[[int], bool] = lambda lines: False
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run a command, and kill its connections once when ``kill`` says so, given the number of lines on stderr so far.

    Returns the finished command, and whether a connection was killed.
    """
    environment = {**os.environ, "EDGEFORMER_SSH": sshd.ssh, "EDGEFORMER_PROGRESS": "json"}
    command = [sys.executable, "-m", "edgeformer", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)
    lines, outputs, sockets = list[str](), list[str](), set[str]()

    def read_errors() -> None:
        for line in process.stderr:
            lines.append(line)

    readers = [threading.Thread(target=read_errors), threading.Thread(target=lambda: outputs.extend(process.stdout))]
    was_killed, deadline = False, time.monotonic() + _LIMIT_S
    with process:
        for reader in readers:
            reader.start()
        while process.poll() is None:
            assert time.monotonic() < deadline, lines[-3:]
            find_clients(psutil.Process(process.pid), sockets)
            if not was_killed and kill(len(lines)):
                was_killed = kill_connections(psutil.Process(process.pid), sockets) > 0
            time.sleep(0.02)
        for reader in readers:
            reader.join()
    return subprocess.CompletedProcess(command, process.returncode, "".join(outputs), "".join(lines)), was_killed


def check_reports(run: Path) -> int:
    """Every report of a run is complete; return how many there are."""
    reports = [*(run / "reports").glob("*")]
    assert not [path for path in reports if path.name.startswith(".")]
    for path in reports:
        if path.suffix == ".json":
            read_report(path)
    return len([path for path in reports if path.suffix == ".json"])


def check_clean(sshd: Sshd) -> None:
    """Nothing of edgeformer is left on the machine, neither files nor processes."""
    assert not sshd.root.parent.exists(), [*sshd.root.parent.rglob("*")][:5]
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(sshd.root) in " ".join(process.cmdline()):
                left.append(process)
    assert not left


VERIFY = ["verify", "small", "--on", "kitchen-pi", "--json"]
PROFILE = ["profile", "small", "--on", "kitchen-pi", "--batch", "1", "--seq", "64", "--artifact", "onnx-fp32", "--json"]
CLEAN = ["machines", "clean", "kitchen-pi", "--json"]


@pytest.mark.slow
def test_a_connection_killed_at_each_step(machine: Sshd, run: Path) -> None:
    """The k-th line of progress is the step."""
    cwd = run.parents[1]
    for step in range(1, 40):
        (run / "bundle" / "README.md").write_text(f"step {step}")  # another job, and a file to send
        first, was_killed = run_and_kill(machine, cwd, VERIFY, lambda lines, step=step: lines >= step)  # type: ignore[misc]
        print(step, was_killed, first.returncode, first.stderr.splitlines()[-1:], flush=True)
        if not was_killed:
            assert step > 5
            break
        if first.returncode != 2:
            assert first.returncode == 1 and "error" in json.loads(first.stdout)
        second, _ = run_and_kill(machine, cwd, VERIFY)
        assert second.returncode == 2 and "README.md" in second.stdout, second.stderr  # which bundle.json lists
    run_and_kill(machine, cwd, CLEAN)
    check_clean(machine)


@pytest.mark.torture
@pytest.mark.parametrize(("command", "enough"), [(PROFILE, 50), (VERIFY, 5)], ids=["profile", "install and verify"])
def test_connections_killed_at_random_moments(machine: Sshd, run: Path, command: list[str], enough: int) -> None:
    cwd, choose, kills, has_report = run.parents[1], random.Random(1), 0, command is PROFILE

    def prepare() -> None:
        (run / "reports" / "host-onnx-fp32-on-kitchen-pi.json").unlink(missing_ok=True)
        if command is VERIFY:
            run_and_kill(machine, cwd, CLEAN)
            check_clean(machine)

    prepare()
    started = time.monotonic()
    run_and_kill(machine, cwd, command)
    measured_s = time.monotonic() - started
    while kills < enough:
        prepare()
        moment = time.monotonic() + choose.uniform(0.3, measured_s)
        first, was_killed = run_and_kill(machine, cwd, command, lambda _, moment=moment: time.monotonic() > moment)
        assert check_reports(run) <= has_report
        kills += was_killed
        second, _ = run_and_kill(machine, cwd, command)
        print(kills, was_killed, first.returncode, second.returncode, flush=True)
        assert second.returncode == 0, second.stderr
        assert check_reports(run) == has_report
    run_and_kill(machine, cwd, CLEAN)
    check_clean(machine)


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["--on", "local"]], ids=["machine", "machine and this one"])
def test_ctrl_c_stops_the_job_and_writes_nothing(machine: Sshd, run: Path, others: list[str]) -> None:
    environment = {**os.environ, "EDGEFORMER_PROGRESS": "json"}
    command = [sys.executable, "-m", "edgeformer", *PROFILE, *others, "--strict"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert any("kitchen-pi: Measuring" in line or '"Measuring' in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    document = json.loads(output)
    assert (process.returncode, document["exit_code"]) == (130, 130), output
    assert "the jobs on the machines were stopped and removed" in document["error"]
    assert check_reports(run) == 0 and not any((machine.root / "jobs").iterdir())
    run_and_kill(machine, run.parents[1], CLEAN)
    check_clean(machine)
