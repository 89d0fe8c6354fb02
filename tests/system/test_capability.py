"""Questions in child processes, and what the machine itself says to `doctor`."""

import time

from edgeformer.system.capability import Answer, ask_installed, machine_capabilities


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
        "no_such_module": "import no_such_module",
    }
    prints, raises, exits, hangs, missing = ask_installed(scripts, timeout_s=2.5).values()
    assert missing is None and prints == Answer({"version": "2"})
    assert raises == Answer({"version": "3"}, "Exception: no libraries")
    assert exits == Answer(error="the import ended the process (exit code 3)")
    assert hangs is not None and "did not finish within" in str(hangs.error)


def test_the_facts_of_the_machine_are_named() -> None:
    names = [capability.name for capability in machine_capabilities()]
    assert names[:4] == ["python", "cpu", "cpu features", "cuda driver"]
    assert names[-2:] == ["cpu energy (RAPL)", "power"]
