"""`machines add` and `list`, `profile --on` and `gate --on`, several machines at once, hostile names."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

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
