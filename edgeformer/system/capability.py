"""Capabilities that `doctor` lists, probed in child processes.

Importing a GPU runtime without its libraries may raise a bare Exception, print to stdout or abort the process, and
importing torch takes 200 MB. Each runtime brings its own probe scripts.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.units import format_bytes
from edgeformer.system import child, cuda_driver, host, nvidia

_CPU_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
_MARK = "edgeformer-probe:"
CUDA_13_DRIVER = 580
"""First release of the NVIDIA driver that runs programs built for CUDA 13 (NVIDIA, CUDA 13.0 release notes)."""

_PROGRAM = f"""
import json, sys
from edgeformer.system.child import end_with_parent
end_with_parent()
result = dict()
def say(**facts): result.update(facts)
try:
    exec(compile(sys.argv[1], "<probe>", "exec"))
except BaseException as error:
    lines = str(error).strip().splitlines() or [""]
    result["error"] = (type(error).__name__ + ": " + lines[0])[:300]
print("\\n{_MARK}" + json.dumps(result), flush=True)
"""


@dataclass(frozen=True)
class Capability:
    """A requirement of some commands: its status on this machine, and a remedy if it is unavailable."""

    name: str
    status: Literal["available", "unavailable"]
    version: str | None = None
    detail: str = ""
    remedy: str | None = None


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first installed distribution; None if none is installed."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True)
class Answer:
    """Facts that a probe reported, and its error (None: it completed)."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def ask_installed(scripts: Mapping[str, str], timeout_s: float) -> dict[str, Answer | None]:
    """Run probe scripts in parallel, each in its own process, and return module → answer; None: it is not installed.

    ``scripts``: module → Python code that imports it and reports facts with ``say(key=value, …)``; an exception becomes
    the error text.
    """
    from concurrent.futures import ThreadPoolExecutor

    def run(script: str) -> Answer:
        try:
            process = child.run(
                [sys.executable, "-c", _PROGRAM, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore"},
                encoding="utf-8", errors="replace", timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Answer(error=f"the import did not finish within {timeout_s:.0f} s")
        lines = [line for line in process.stdout.splitlines() if line.startswith(_MARK)]
        if not lines:
            return Answer(error=f"the import ended the process ({child.exit_text(process.returncode)})")
        facts: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
        return Answer(facts, facts.pop("error", None))

    installed = {module: script for module, script in scripts.items() if util.find_spec(module) is not None}
    with ThreadPoolExecutor(max(1, len(installed))) as pool:
        answers = dict(zip(installed, pool.map(run, installed.values()), strict=True))
    return {module: answers.get(module) for module in scripts}


def describe_package(name: str, answer: Answer | None, remedy: str) -> Capability:
    """Return the capability of a distribution from a probe of ``version`` and ``devices``; None: not installed."""
    if answer is None or answer.error is not None:
        problem = "not installed" if answer is None else f"installed; import fails: {answer.error}"
        return Capability(name, "unavailable", installed_version(name), f"package: {problem}", remedy)
    devices = answer.facts.get("devices")
    detail = f"devices: {', '.join(devices)}" if devices else ""
    return Capability(name, "available", answer.facts.get("version"), detail)


def describe_extra(extra: str) -> Capability:
    """Return whether all packages of an extra of edgeformer are installed, and how to install them."""
    try:
        requirements = metadata.requires("edgeformer") or []
    except metadata.PackageNotFoundError:
        return Capability(f"extra [{extra}]", "unavailable", None, "edgeformer is not installed as a package")
    pattern = re.compile(r"^([A-Za-z0-9._-]+).*;.*extra == ['\"]" + re.escape(extra) + r"['\"]")
    names = [match.group(1) for match in map(pattern.match, requirements) if match]
    missing = [name for name in names if installed_version(name) is None]
    if missing:
        detail = f"missing: {', '.join(missing)}"
        return Capability(f"extra [{extra}]", "unavailable", None, detail, install_hint(extra))
    return Capability(f"extra [{extra}]", "available", None, f"complete: {', '.join(names)}")


def driver_too_old(cuda: str | None, driver: str | None) -> str | None:
    """Return why a driver ("550.54.14") cannot run programs of CUDA "13.0"; None if it can or either is unknown."""
    built_for, release = (re.match(r"\d+", text or "") for text in (cuda, driver))
    if built_for is None or release is None or int(built_for[0]) < 13 or int(release[0]) >= CUDA_13_DRIVER:
        return None
    return f"CUDA {built_for[0]} needs NVIDIA driver R{CUDA_13_DRIVER} or newer, and {driver} is installed"


def cpu_flags() -> frozenset[str] | None:
    """Return the processor's features as Linux names them (``avx2``, ``avx512_vnni``, ``asimd``); None: unknown."""
    file = Path("/proc/cpuinfo")
    return frozenset(file.read_text(encoding="utf-8").split()) if file.is_file() else None


def kernel_flags() -> tuple[str, ...] | None:
    """Return the flags of :func:`cpu_flags` that select kernels in runtimes; None: unknown."""
    flags = cpu_flags()
    return None if flags is None else tuple(flag for flag in _CPU_FLAGS if flag in flags)


def machine_capabilities() -> list[Capability]:
    """Return the capabilities of the machine: Python, processor, driver, cards, energy counters, power."""
    capabilities: list[Capability] = []

    def add(name: str, detail: str, version: str | None = None, remedy: str | None = None, works: bool = True) -> None:
        status: Literal["available", "unavailable"] = "available" if works else "unavailable"
        capabilities.append(Capability(name, status, version, detail, remedy))

    # 1. Python and the processor
    quota = host.container_quota()
    limit = f", container quota {quota:g}" if quota is not None else ""
    add("python", platform.python_implementation(), platform.python_version())
    threads = f"{host.default_threads()} threads by default ({host.usable_cores()} cores usable{limit})"
    add("cpu", f"{host.cpu_name()}; {threads}")
    flags = kernel_flags()
    if flags is None:
        add("cpu features", "read from /proc/cpuinfo, which exists on Linux only", works=False)
    else:
        is_fast = not {"avx2", "asimd", "avx512f"}.issuperset(flags)
        note = "" if is_fast else "; no bf16 or int8 instructions, so int8 gains little speed"
        add("cpu features", (", ".join(flags) or "none known") + note)

    # 2. NVIDIA's driver and cards
    problem = cuda_driver.problem()
    if problem is not None:
        add("cuda driver", problem, remedy="install the NVIDIA driver if this machine has an NVIDIA card", works=False)
    else:
        version, remedy = nvidia.driver_version(), None
        detail = f"supports CUDA up to {cuda_driver.version() or 'unknown'}"
        if (too_old := driver_too_old("13", version)) is not None:
            names = {str(package.metadata["Name"]).replace("_", "-") for package in metadata.distributions()}
            built_for_13 = ", ".join(sorted(name for name in names if name.endswith("-cu13")))
            detail += f"; {too_old}" + (f" (installed for it: {built_for_13})" if built_for_13 else "")
            remedy = f"update the driver to R{CUDA_13_DRIVER} or newer, or install packages built for CUDA 12"
        add("cuda driver", detail, version, remedy)
    cards = nvidia.gpus()
    for card in cards:
        memory = format_bytes(card.memory_bytes) if card.memory_bytes else "shares the system memory"
        capability = f", compute capability {card.compute_capability}" if card.compute_capability else ""
        add(f"nvidia gpu {card.index}", f"{card.name}, {memory}{capability}")
    if not cards:
        absent = "no NVIDIA card is present, or the NVIDIA management library (NVML) does not start"
        add("nvidia gpu", absent, works=False)

    # 3. Energy and power
    domains, reason = host.rapl_domains()
    add("cpu energy (RAPL)", reason or ", ".join(domain.name for domain in domains), works=bool(domains))
    add("power", host.power_source())
    return capabilities
