"""Questions in child processes, and what the machine itself says to `doctor`."""

from __future__ import annotations

import time
from pathlib import Path

from edgeformer.system.capability import Answer, ask_installed, exit_text, machine_capabilities
from edgeformer.system.host import RaplDomain, container_quota, default_threads, power_source, rapl_domains


def test_probes_run_side_by_side() -> None:
    modules = ("bz2", "csv", "gzip", "json")
    scripts = dict.fromkeys(modules, "import time; time.sleep(1); say(version='1')")
    began = time.monotonic()
    answers = ask_installed(scripts, timeout_s=20)
    assert time.monotonic() - began < 4
    assert all(answer == Answer({"version": "1"}) for answer in answers.values())


def test_a_probe_survives_prints_exceptions_crashes_and_hangs() -> None:
    scripts = {
        "bz2": "print('noise'); say(version='2'); print('more noise')",
        "csv": "say(version='3'); print('stdout'); raise Exception('no libraries')",
        "gzip": "import os; os._exit(3)",
        "json": "import time; time.sleep(60)",
    }
    prints, raises, exits, hangs = ask_installed(scripts, timeout_s=2.5).values()
    assert prints == Answer({"version": "2"})
    assert raises == Answer({"version": "3"}, "Exception: no libraries")
    assert exits == Answer(error="the import ended the process (exit code 3)")
    assert hangs is not None and "did not finish within" in str(hangs.error)


def test_an_exit_by_signal_is_named() -> None:
    assert exit_text(0) == "exit code 0"
    assert exit_text(-9).startswith("killed by signal 9")


def test_what_is_not_installed_is_not_asked() -> None:
    asked = ask_installed({"json": "say(version='1')", "no_such_module": "import no_such_module"}, timeout_s=20)
    assert asked == {"json": Answer({"version": "1"}), "no_such_module": None}


def test_the_machine_says_what_it_is() -> None:
    names = [capability.name for capability in machine_capabilities()]
    assert names[:4] == ["python", "cpu", "cpu features", "cuda driver"]
    assert names[-2:] == ["cpu energy (RAPL)", "power"]


def test_rapl_counters_are_read_and_wrap(tmp_path: Path) -> None:
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    for name, value in (("name", "package-0"), ("energy_uj", "900"), ("max_energy_range_uj", "1000")):
        (package / name).write_text(f"{value}\n", encoding="ascii")
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of the package: would be counted twice
    domains, reason = rapl_domains(tmp_path)
    assert reason is None
    assert domains == [RaplDomain("package-0", package / "energy_uj", 1000)]
    assert domains[0].read_uj() == 900
    assert (domains[0].used_uj(100, 900), domains[0].used_uj(900, 100)) == (800, 200)
    assert rapl_domains(tmp_path / "nothing")[1] is not None


def test_power_source_is_a_phrase() -> None:
    assert power_source().split()[0] in ("mains", "battery", "unknown")


def test_threads_respect_a_container_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    assert container_quota(quota) is None
    quota.write_text("max 100000\n", encoding="ascii")
    assert container_quota(quota) is None
    quota.write_text("150000 100000\n", encoding="ascii")
    assert container_quota(quota) == 1.5
    assert default_threads() >= 1
