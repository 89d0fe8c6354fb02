"""`profile --on` with a real SSH server: what arrives, what is sent again, what stays behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeformer.artifacts.report import read_report
from tests.cli.in_process import Edgeformer
from tests.machines.sshd import Sshd

ONE_ROW = ("--batch", "1", "--seq", "64", "--artifact", "onnx-fp32")


def test_a_report_comes_back(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    report = json.loads(edgeformer("profile", "small", "--on", "kitchen-pi", *ONE_ROW, "--json"))
    assert report["on_target"] and report["host"]["address"] == "kitchen-pi"
    assert {row["latency_ms"]["status"] for row in report["rows"]} == {"measured"}
    written = read_report(run / "reports" / "host-onnx-fp32-on-kitchen-pi.json")
    assert written.bundle == "artifacts/small/bundle" and written.report_sha256 == report["report_sha256"]
    assert not any((machine.root / "jobs").glob("*/*"))


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


def test_hostile_names_of_runs_and_files_are_text(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    name = "a $(touch hacked) 'b' \"c\" ;touch hacked\n#"
    run.rename(run.with_name(name))
    report = json.loads(edgeformer("profile", str(run.with_name(name)), "--on", "kitchen-pi", *ONE_ROW, "--json"))
    assert report["bundle"] == str(run.with_name(name) / "bundle")
    assert not list(machine.home.rglob("hacked")) and not list(run.parents[1].rglob("hacked"))


def test_an_unknown_artifact_is_refused_before_a_login(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    logins = machine.log.read_text()
    assert "has onnx-fp32" in edgeformer("profile", "small", "--on", "kitchen-pi", "--artifact", "../x", code=2)
    assert machine.log.read_text() == logins


def test_a_damaged_file_is_not_measured(machine: Sshd, edgeformer: Edgeformer, run: Path) -> None:
    graph = run / "bundle" / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-9])
    message = edgeformer("profile", "small", "--on", "kitchen-pi", *ONE_ROW, code=2)
    assert "not measured, because verify failed there: onnx/model.onnx is truncated" in message
    assert not (run / "reports").exists() and not any((machine.root / "jobs").glob("*/*"))
