"""Names, quotas and energy counters of systems that are not this one, from copies of their files."""

import platform
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from edgeformer.measurement import trackers
from edgeformer.measurement.trackers import EnergyCounter, energy_counter
from edgeformer.system import host
from edgeformer.system.host import board_names, container_quota, cpu_name, default_threads, power_source, rapl_domains
from edgeformer.system.nvidia import shares_system_memory

X86 = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t\t: 190\nmodel name\t: Intel(R) N100\nflags\t\t: fpu avx2\n"
# NVIDIA's kernels write a "model name" that is the same on every board.
TEGRA = "processor\t: 0\nmodel name\t: ARMv8 Processor rev 1 (v8l)\n"
PI = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n"
SERVER = "processor\t: 0\nBogoMIPS\t: 2100.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
UNIVERSAL = platform.processor() or platform.machine()


def write_root(root: Path, cpuinfo: str | None = None, **tree: bytes) -> Path:
    folder = root / "proc" / "device-tree"
    folder.mkdir(parents=True)
    if cpuinfo is not None:
        (root / "proc" / "cpuinfo").write_text(cpuinfo, encoding="utf-8")
    for name, content in tree.items():
        (folder / name).write_bytes(content)
    return root


@pytest.mark.parametrize(
    ("cpuinfo", "model", "name"),
    [
        (X86, None, "Intel(R) N100"),
        (TEGRA, b"NVIDIA Jetson Orin Nano Developer Kit\0", "NVIDIA Jetson Orin Nano Developer Kit"),
        (TEGRA, None, "ARMv8 Processor rev 1 (v8l)"),
        (SERVER, b"Raspberry Pi 5 Model B Rev 1.1\0", "Raspberry Pi 5 Model B Rev 1.1"),
        (PI, None, "Raspberry Pi 5 Model B Rev 1.0"),  # in a container
        (SERVER, None, f"{platform.machine()} (implementer 0x41, part 0xd40)"),
        (None, None, UNIVERSAL),
        ("\x00\xff garbage without a colon\n", None, UNIVERSAL),
    ],
)
def test_processor_name_on_linux(tmp_path: Path, cpuinfo: str | None, model: bytes | None, name: str) -> None:
    assert cpu_name(write_root(tmp_path, cpuinfo, **({"model": model} if model else {})), "linux") == name


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for sysctl is a shell script")
@pytest.mark.parametrize(
    ("script", "name"),
    [
        ('[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M4"', "Apple M4"),
        ("echo unknown oid >&2; exit 1", UNIVERSAL),
    ],
)
def test_processor_name_on_macos(tmp_path: Path, script: str, name: str) -> None:
    program = tmp_path / "usr" / "sbin" / "sysctl"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    assert cpu_name(tmp_path, "darwin") == name


def test_names_of_boards_and_of_this_host(tmp_path: Path) -> None:
    compatible = b"nvidia,p3767-0003\0nvidia,tegra234\0"
    root = write_root(tmp_path / "jetson", model=b"NVIDIA Jetson Orin Nano\0", compatible=compatible)
    assert board_names(root) == ("NVIDIA Jetson Orin Nano", "nvidia,p3767-0003", "nvidia,tegra234")
    assert shares_system_memory(root) and not shares_system_memory(write_root(tmp_path / "pi", model=b"Raspberry Pi\0"))
    assert board_names(tmp_path / "missing") == () and not shares_system_memory(tmp_path / "missing")
    assert cpu_name().strip() == cpu_name() != ""
    assert power_source().split()[0] in ("mains", "battery", "unknown")


def write_zone(root: Path, number: str, energy_uj: int, name: str) -> Path:
    """Write a RAPL zone as Documentation/power/powercap describes it: energy_uj counts microjoules and wraps."""
    zone = {"name": name, "max_energy_range_uj": "262143328850", "energy_uj": str(energy_uj)}
    write_files(root / f"intel-rapl:{number}", zone)
    return root / f"intel-rapl:{number}" / "energy_uj"


def test_energy_counts_each_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_zone(tmp_path, "0", 1_000_000, "package-0")
    second = write_zone(tmp_path, "1", 262_143_000_000, "package-1")
    part = write_zone(tmp_path, "0:0", 5, "core")
    laptop = write_zone(tmp_path, "2", 9_000_000, "psys")  # the packages, and everything else
    monkeypatch.setattr(trackers, "rapl_domains", partial(rapl_domains, tmp_path))
    counter = energy_counter("CPUExecutionProvider", None)
    assert isinstance(counter, EnergyCounter) and "(package-0, package-1: " in counter.name
    start = counter.read()
    first.write_text("8000000\n", encoding="ascii")  # 7 J more
    second.write_text("671150\n", encoding="ascii")  # wrapped: 328,850 up to the end, then 671,150: 1 J more
    part.write_text("999999999\n", encoding="ascii")
    laptop.write_text("29000000\n", encoding="ascii")
    assert counter.used_mj(start, counter.read()) == pytest.approx(8000.0)
    domains, reason = rapl_domains(tmp_path / "nothing")
    assert domains == [] and reason is not None and "has no RAPL energy counters" in reason


@pytest.mark.parametrize(
    ("content", "cores", "threads"),
    [(None, None, 4), ("max 100000", None, 4), ("150000 100000", 1.5, 1), ("50000 100000", 0.5, 1)],
)
def test_threads_respect_a_container_quota(content, cores, threads, tmp_path, monkeypatch):
    """cpu.max holds microseconds per period; a second thread on half a core would only wait."""
    file = tmp_path / "cpu.max"
    if content is not None:
        file.write_text(content + "\n", encoding="ascii")
    assert container_quota(file) == cores
    monkeypatch.setattr(host, "container_quota", lambda: container_quota(file))
    monkeypatch.setattr(host, "usable_cores", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    assert default_threads() == threads


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("kind", "state", "reasons"),
    [
        ("thermal-cpufreq-0", "2", ["thermal-cpufreq-0 is at step 2 of 3, because of heat"]),
        ("thermal-cpufreq-0", "0", []), ("pwm-fan", "3", []), ("intel_powerclamp", "-1", []),
    ],
)  # fmt: skip
def test_a_cooled_processor_is_seen(tmp_path: Path, kind: str, state: str, reasons: list[str]) -> None:
    folder = "sys/class/thermal/cooling_device0"
    root = write_files(tmp_path, {f"{folder}/type": kind, f"{folder}/cur_state": state, f"{folder}/max_state": "3"})
    assert host.slowdowns(root) == reasons


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in for vcgencmd is a shell script")
def test_power_supply_of_a_raspberry_pi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits from 16 on are since the boot, and say nothing of the present measurement."""
    files = {"hwmon/hwmon1/name": "rpi_volt", "hwmon/hwmon1/in0_lcrit_alarm": "1"}
    root = write_files(tmp_path / "pi", {f"sys/class/{name}": text for name, text in files.items()})
    assert host.slowdowns(root) == ["the supply voltage is too low"]
    program = tmp_path / "vcgencmd"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for answer, reasons in (
        ("throttled=0x50000", []),
        ("throttled=0x50005", ["the supply voltage is too low", "the board throttles"]),
        ("error=1", ["the supply voltage is too low"]),
    ):
        program.write_text(f"#!/bin/sh\necho {answer}\n")
        program.chmod(0o755)
        assert host.slowdowns(root) == reasons


def test_kinds_of_cores(tmp_path: Path) -> None:
    clocks = {0: 1800000, 1: 1800000, 4: 2400000, 10: 2400000, 11: 2400000}
    path = "sys/devices/system/cpu/cpu{}/cpufreq/cpuinfo_max_freq"
    root = write_files(tmp_path, {path.format(core): str(clock) for core, clock in clocks.items()})
    assert host.core_kinds(root) == {"2400 MHz": 3, "1800 MHz": 2}
    assert host.core_kinds(tmp_path / "none") == {}


def test_android_shows_no_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert power_source() == "mains (no battery reported)"
    monkeypatch.setattr(sys, "getandroidapilevel", lambda: 30, raising=False)
    assert power_source() == "unknown (Android does not show the battery)"
