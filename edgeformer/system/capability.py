"""One line of `doctor`, and how its facts are asked for in child processes: an import may crash, hang or print.

Importing a GPU runtime without its libraries may raise a bare Exception, print to stdout or abort the process, and
torch costs 200 MB. None of that may happen in the process that asks. Each backend brings its own questions.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any, Literal

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.units import format_bytes
from edgeformer.system import cuda_driver, host, nvidia

_CPU_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
_MARK = "edgeformer-probe:"
CUDA_13_DRIVER = 580
"""First release of the NVIDIA driver that runs programs built for CUDA 13 (NVIDIA, CUDA 13.0 release notes)."""

_PRELUDE = """
import json, sys, traceback
found = {}
def say(**facts): found.update(facts)
try:
    exec(compile(sys.argv[1], "<probe>", "exec"))
except BaseException as error:
    text = (str(error).strip().splitlines() or [""])[0]
    found["error"] = f"{type(error).__name__}: {text}"[:300]
"""
_PROGRAM = f"{_PRELUDE}\nprint(); print({_MARK!r} + json.dumps(found), flush=True)\n"


@dataclass(frozen=True)
class Capability:
    """One thing that a command may need, whether it works here, and what to do if not."""

    name: str
    status: Literal["available", "unavailable"]
    version: str | None = None
    detail: str = ""
    remedy: str | None = None


def installed_version(*distributions: str) -> str | None:
    """The version of the first of these distributions that is installed; None when none is."""
    from importlib import metadata

    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True)
class Answer:
    """What a probe found before it ended, and why it ended early (None: it did not)."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def ask_installed(scripts: Mapping[str, str], timeout_s: float) -> dict[str, Answer | None]:
    """Run questions side by side, each in a process of its own.

    Args:
        scripts: module → Python that imports it and tells what it finds through ``say(key=value, …)``; an exception is
            the error text.
        timeout_s: how long the slowest may take from now.

    Returns:
        module → answer; None for modules that are not installed.
    """
    from concurrent.futures import ThreadPoolExecutor

    here = {module: script for module, script in scripts.items() if util.find_spec(module) is not None}
    with ThreadPoolExecutor(max(1, len(here))) as pool:
        answers = dict(zip(here, pool.map(lambda script: _ask(script, timeout_s), here.values()), strict=True))
    return {module: answers.get(module) for module in scripts}


def describe_package(name: str, answer: Answer | None, remedy: str) -> Capability:
    """The line of a package that has nothing to say but its version and, perhaps, its devices.

    Args:
        name: of the distribution.
        answer: to a script that tells ``version`` and perhaps ``devices``; None: not installed.
        remedy: what to do where it does not work.
    """
    if answer is None:
        return Capability(name, "unavailable", installed_version(name), "package: not installed", remedy)
    if answer.error is not None:
        detail = f"package: installed; import fails: {answer.error}"
        return Capability(name, "unavailable", installed_version(name), detail, remedy)
    devices = answer.facts.get("devices")
    detail = f"devices: {', '.join(devices)}" if devices else ""
    return Capability(name, "available", answer.facts.get("version"), detail)


def describe_extra(extra: str) -> Capability:
    """Say whether the packages of one of edgeformer's extras are all installed, and how to install them."""
    from importlib import metadata

    try:
        requirements = metadata.requires("edgeformer") or []
    except metadata.PackageNotFoundError:
        return Capability(f"extra [{extra}]", "unavailable", None, "edgeformer itself is not installed")
    pattern = re.compile(r"^([A-Za-z0-9._-]+).*;.*extra == ['\"]" + re.escape(extra) + r"['\"]")
    names = [match.group(1) for match in map(pattern.match, requirements) if match]
    missing = [name for name in names if installed_version(name) is None]
    if missing:
        detail = f"missing: {', '.join(missing)}"
        return Capability(f"extra [{extra}]", "unavailable", None, detail, install_hint(extra))
    return Capability(f"extra [{extra}]", "available", None, f"complete: {', '.join(names)}")


def driver_too_old(cuda: str | None, driver: str | None) -> str | None:
    """Say why a driver cannot run what was built for a version of CUDA; None where it can, or either is unknown.

    Args:
        cuda: the version that a package was built for: ``13.0``.
        driver: the driver's: ``550.54.14``.
    """
    built_for, release = (re.match(r"\d+", text or "") for text in (cuda, driver))
    if built_for is None or release is None or int(built_for[0]) < 13 or int(release[0]) >= CUDA_13_DRIVER:
        return None
    return f"CUDA {built_for[0]} needs NVIDIA driver R{CUDA_13_DRIVER} or newer, and {driver} is installed"


def _cuda_13_packages() -> list[str]:
    """Installed distributions that say in their name that they were built for CUDA 13."""
    from importlib import metadata

    names = {str(one.metadata["Name"]).replace("_", "-") for one in metadata.distributions()}
    return sorted(name for name in names if name.endswith("-cu13"))


def _driver() -> Capability:
    problem = cuda_driver.problem()
    if problem is not None:
        remedy = "install the NVIDIA driver if this machine has an NVIDIA card"
        return Capability("cuda driver", "unavailable", None, problem, remedy)
    version = nvidia.driver_version()
    detail, remedy_13 = f"runs CUDA up to {cuda_driver.version() or 'unknown'}", None
    if (too_old := driver_too_old("13", version)) is not None:
        packages = _cuda_13_packages()
        detail = f"{detail}; {too_old}" + (f" (installed for it: {', '.join(packages)})" if packages else "")
        remedy_13 = f"update the driver to R{CUDA_13_DRIVER} or newer, or install packages that were built for CUDA 12"
    return Capability("cuda driver", "available", version, detail, remedy_13)


def _ask(script: str, timeout_s: float) -> Answer:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore"},
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return Answer(error=f"the import did not finish within {timeout_s:.0f} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        return Answer(error=f"the import ended the process ({exit_text(done.returncode)})")
    facts: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    return Answer(facts, facts.pop("error", None))


def exit_text(code: int) -> str:
    """A process's end for a person: ``exit code 3``, ``killed by signal 11 (SIGSEGV)``."""
    if code >= 0:
        return f"exit code {code}"
    known = [f" ({number.name})" for number in signal.Signals if number == -code]
    return f"killed by signal {-code}{''.join(known[:1])}"


def machine_capabilities() -> list[Capability]:
    """What `doctor` says of the machine itself: Python, processor, driver, cards, energy counters, power."""
    domains, reason = host.rapl_domains()
    names = ", ".join(domain.name for domain in domains)
    return [
        Capability("python", "available", platform.python_version(), platform.python_implementation()),
        *_processor(),
        _driver(),
        *_cards(),
        Capability("cpu energy (RAPL)", "available" if domains else "unavailable", None, reason or names),
        Capability("power", "available", None, host.power_source()),
    ]


def cpu_flags() -> frozenset[str] | None:
    """What the processor can do, as Linux names it (``avx2``, ``avx512_vnni``, ``asimd``); None: not known."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return None


def kernel_flags() -> tuple[str, ...] | None:
    """Of :func:`cpu_flags` those by which runtimes choose their kernels; None: not known."""
    flags = cpu_flags()
    return None if flags is None else tuple(flag for flag in _CPU_FLAGS if flag in flags)


def _processor() -> list[Capability]:
    quota = host.container_quota()
    limit = f", container quota {quota:g}" if quota is not None else ""
    threads = f"{host.default_threads()} threads by default ({host.usable_cores()} cores usable{limit})"
    present = kernel_flags()
    if present is None:
        features = Capability("cpu features", "unavailable", detail="read from /proc/cpuinfo, which only Linux has")
    else:
        fast = [flag for flag in present if flag not in ("avx2", "asimd", "avx512f")]
        note = "" if fast else "; none of the bf16 or int8 extensions: int8 gains little speed here"
        features = Capability("cpu features", "available", detail=(", ".join(present) or "none known") + note)
    return [Capability("cpu", "available", None, f"{host.cpu_name()}; {threads}"), features]


def _cards() -> list[Capability]:
    cards = nvidia.gpus()
    if not cards:
        return [Capability("nvidia gpu", "unavailable", None, nvidia.nvml_problem() or "no NVIDIA card is present")]
    found: list[Capability] = []
    for card in cards:
        memory = format_bytes(card.memory_bytes) if card.memory_bytes else "shares the system memory"
        capability = f", compute capability {card.compute_capability}" if card.compute_capability else ""
        found.append(Capability(f"nvidia gpu {card.index}", "available", None, f"{card.name}, {memory}{capability}"))
    return found
