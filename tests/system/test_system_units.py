"""Units where the system's figures come in: microjoules, kilobytes, quotas. Real files where this machine has them,
else files as the kernel's documentation describes them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from edgeformer.benchmark import energy
from edgeformer.benchmark.energy import EnergyCounter, energy_counter
from edgeformer.system import host
from edgeformer.system.host import container_quota, default_threads, describe_host, rapl_domains

linux = pytest.mark.skipif(sys.platform != "linux", reason="these files are Linux's")


def of_proc(file: str, key: str) -> int:
    """Bytes that a line ``Key:  123 kB`` of /proc states; the kernel's kB are 1024 bytes."""
    for line in Path(file).read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            number, unit = value.split()
            assert unit == "kB"
            return int(number) * 1024
    raise AssertionError(f"{file} has no {key}")


def package(root: Path, number: int, energy_uj: int, *, part: str = "", name: str | None = None) -> Path:
    """A RAPL zone as Documentation/power/powercap describes it: energy_uj counts microjoules and wraps round."""
    folder = root / f"intel-rapl:{number}{part}"
    folder.mkdir(parents=True)
    name = name or (f"package-{number}" if not part else "core")
    (folder / "name").write_text(f"{name}\n", encoding="ascii")
    (folder / "max_energy_range_uj").write_text("262143328850\n", encoding="ascii")
    (folder / "energy_uj").write_text(f"{energy_uj}\n", encoding="ascii")
    return folder / "energy_uj"


def test_rapl_counts_microjoules_of_all_packages_and_no_part_of_one_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = package(tmp_path, 0, 1_000_000), package(tmp_path, 1, 262_143_000_000)
    part = package(tmp_path, 0, 5, part=":0")
    platform = package(tmp_path, 2, 9_000_000, name="psys")  # the whole laptop: the packages, and the rest
    monkeypatch.setattr(energy, "rapl_domains", partial(rapl_domains, tmp_path))
    counter = energy_counter("CPUExecutionProvider", None)
    assert isinstance(counter, EnergyCounter) and "(package-0, package-1: " in counter.name
    before = counter.read()
    first.write_text("8000000\n", encoding="ascii")  # 7 J more
    second.write_text("671150\n", encoding="ascii")  # wrapped: 328,850 up to the end, 671,150 behind it: 1 J more
    part.write_text("999999999\n", encoding="ascii")
    platform.write_text("29000000\n", encoding="ascii")
    assert counter.used_mj(before, counter.read()) == pytest.approx(8000.0)


def test_a_platform_alone_is_no_processor(tmp_path: Path) -> None:
    package(tmp_path, 1, 9_000_000, name="psys")
    domains, reason = rapl_domains(tmp_path)
    assert domains == [] and reason is not None and "has no RAPL energy counters" in reason


@linux
def test_memory_of_the_host_is_in_bytes() -> None:
    assert describe_host()["memory_bytes"] == pytest.approx(of_proc("/proc/meminfo", "MemTotal"), rel=1e-3)


@linux
def test_what_a_process_takes_is_in_bytes() -> None:
    """What the profiler's figures rest on: psutil's rss, against the kernel's own line."""
    block = np.ones(64 * 2**20, dtype=np.uint8)
    assert psutil.Process().memory_info().rss == pytest.approx(of_proc("/proc/self/status", "VmRSS"), rel=0.02)
    assert len(block) == 64 * 2**20


@pytest.mark.parametrize(
    ("content", "cores", "threads"),
    [("max 100000", None, 4), ("150000 100000", 1.5, 1), ("200000 100000", 2.0, 2), ("50000 100000", 0.5, 1)],
)
def test_a_containers_quota_is_in_cores_and_threads_stay_below_it(
    content: str, cores: float | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cpu.max holds microseconds per period; a second thread on half a core would only wait."""
    file = tmp_path / "cpu.max"
    file.write_text(content + "\n", encoding="ascii")
    assert container_quota(file) == cores
    monkeypatch.setattr(host, "container_quota", lambda: container_quota(file))
    monkeypatch.setattr(host, "usable_cores", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    assert default_threads() == threads
