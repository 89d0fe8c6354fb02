"""What works on this machine, which version, and why not: the facts behind `doctor`."""

from __future__ import annotations

import platform
import re
from importlib import metadata, util
from pathlib import Path

from edgeformer.backends.onnxruntime.providers import explain_providers
from edgeformer.backends.tensorrt.state import DISTRIBUTIONS, describe, judge
from edgeformer.formats.errors import install_hint
from edgeformer.formats.units import format_bytes
from edgeformer.machine import cuda_driver, nvidia
from edgeformer.machine.capability import Capability, installed_version
from edgeformer.machine.child_probes import Answer, ask_all
from edgeformer.machine.host import cpu_name, usable_cores
from edgeformer.machine.power import power_source, rapl_domains
from edgeformer.machine.threads import container_quota, default_threads

__all__ = ["Capability", "probe"]

# module → distributions that may provide it, the likeliest first
_PROBED = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino"),
    "torch": ("torch",),
    "onnxruntime_ep_nv_tensorrt_rtx": (
        "onnxruntime-ep-nv-tensorrt-rtx-cu13", "onnxruntime-ep-nv-tensorrt-rtx-cu12",
    ),
    "tensorrt_rtx": DISTRIBUTIONS["tensorrt-rtx"],
    "tensorrt": DISTRIBUTIONS["tensorrt"],
    "torch_tensorrt": DISTRIBUTIONS["torch-tensorrt"],
    "flash_attn": ("flash-attn",),
    "openvino": ("openvino",),
}  # fmt: skip
_CPU_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


def probe(timeout_s: float = 20.0) -> list[Capability]:
    """Everything that `doctor` shows, in reading order. Imports that can be dangerous run in child processes.

    Args:
        timeout_s: how long the slowest import may take before it counts as unavailable.
    """
    installed = [module for module in _PROBED if util.find_spec(module) is not None]
    answers = ask_all(installed, timeout_s)
    driver, gpus = cuda_driver.problem(), cuda_driver.devices()
    return [
        Capability("python", "available", platform.python_version(), platform.python_implementation()),
        *_processor(),
        *_onnxruntime(answers.get("onnxruntime"), driver, answers.get("onnxruntime_ep_nv_tensorrt_rtx")),
        _torch(answers.get("torch"), driver),
        *_extra("train"),
        _driver(driver),
        *_cards(),
        describe(judge("tensorrt-rtx", answers.get("tensorrt_rtx"), driver, gpus)),
        describe(judge("tensorrt", answers.get("tensorrt"), driver, gpus)),
        describe(judge("torch-tensorrt", answers.get("torch_tensorrt"), driver, gpus)),
        _simple("flash-attn", answers.get("flash_attn"), _FLASH_REMEDY),
        _simple("openvino", answers.get("openvino"), install_hint("openvino")),
        *_power(),
    ]


_FLASH_REMEDY = f"optional, on a CUDA machine: {install_hint('flash')}; torch's SDPA is used without it"


def _processor() -> list[Capability]:
    quota = container_quota()
    limit = f", container quota {quota:g}" if quota is not None else ""
    threads = f"{default_threads()} threads by default ({usable_cores()} cores usable{limit})"
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        features = Capability("cpu features", "unavailable", detail="read from /proc/cpuinfo, which only Linux has")
    else:
        present = [flag for flag in _CPU_FLAGS if flag in flags]
        fast = [flag for flag in present if flag not in ("avx2", "asimd", "avx512f")]
        note = "" if fast else "; none of the bf16 or int8 extensions: int8 gains little speed here"
        features = Capability("cpu features", "available", detail=(", ".join(present) or "none known") + note)
    return [Capability("cpu", "available", None, f"{cpu_name()}; {threads}"), features]


def _version(module: str) -> str | None:
    return installed_version(*_PROBED[module])


def _onnxruntime(answer: Answer | None, driver: str | None, plugin: Answer | None = None) -> list[Capability]:
    if answer is None:
        return [Capability("onnxruntime", "unavailable", detail="not installed", remedy="pip install onnxruntime")]
    if answer.error is not None:
        again = "pip install --force-reinstall onnxruntime"
        return [Capability("onnxruntime", "unavailable", _version("onnxruntime"), answer.error, again)]
    owners = [name for name in _PROBED["onnxruntime"] if _is_installed(name)]
    detail = "opens and runs ONNX graphs"
    remedy: str | None = None
    if len(owners) > 1:
        detail = f"{' and '.join(owners)} are both installed and overwrite each other's files"
        remedy = f"pip uninstall -y {' '.join(owners)}, then install one of them"
    version = answer.facts.get("version")
    return [
        Capability("onnxruntime", "available", version, detail, remedy),
        *explain_providers(answer.facts.get("providers", []), plugin, driver),
    ]


def _torch(answer: Answer | None, driver: str | None) -> Capability:
    if answer is None:
        remedy = f"{install_hint('train')}; what works from a bundle does not need it"
        return Capability("torch", "unavailable", None, "not installed", remedy)
    if answer.error is not None:
        return Capability("torch", "unavailable", _version("torch"), answer.error, install_hint("train", again=True))
    facts = answer.facts
    hint: str | None = None
    if facts.get("cuda"):
        detail = f"CUDA {facts['built_for']} on {', '.join(facts.get('devices', []))}"
    elif facts.get("built_for") == "cpu":
        detail = "CPU build: trains on the CPU"
        if driver is None:
            hint = "a CUDA driver is here: install a CUDA build of torch (see the README)"
    else:
        detail = f"built for CUDA {facts.get('built_for')}, trains on the CPU: {driver or 'torch finds no card'}"
    return Capability("torch", "available", facts.get("version"), detail, hint)


def _extra(extra: str) -> list[Capability]:
    """Whether the packages of one of edgeformer's extras are all installed."""
    try:
        requirements = metadata.requires("edgeformer") or []
    except metadata.PackageNotFoundError:
        return [Capability(f"extra [{extra}]", "unavailable", None, "edgeformer itself is not installed")]
    pattern = re.compile(r"^([A-Za-z0-9._-]+).*;.*extra == ['\"]" + re.escape(extra) + r"['\"]")
    names = [match.group(1) for match in map(pattern.match, requirements) if match]
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        detail = f"missing: {', '.join(missing)}"
        return [Capability(f"extra [{extra}]", "unavailable", None, detail, install_hint(extra))]
    return [Capability(f"extra [{extra}]", "available", None, f"complete: {', '.join(names)}")]


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _driver(problem: str | None) -> Capability:
    if problem is not None:
        remedy = "install the NVIDIA driver if this machine has an NVIDIA card"
        return Capability("cuda driver", "unavailable", None, problem, remedy)
    return Capability(
        "cuda driver",
        "available",
        nvidia.driver_version(),
        f"runs CUDA up to {cuda_driver.version() or 'unknown'}",
    )


def _cards() -> list[Capability]:
    cards = nvidia.gpus()
    if not cards:
        return [Capability("nvidia gpu", "unavailable", None, nvidia.nvml_problem() or "no NVIDIA card is present")]
    found: list[Capability] = []
    for card in cards:
        memory = format_bytes(card.memory_bytes) if card.memory_bytes else "shares the system memory"
        capability = f", compute capability {card.compute_capability}" if card.compute_capability else ""
        detail = f"{card.name}, {memory}{capability}"
        found.append(Capability(f"nvidia gpu {card.index}", "available", None, detail))
    return found


def _simple(name: str, answer: Answer | None, remedy: str) -> Capability:
    module = name.replace("-", "_")
    if answer is None:
        return Capability(name, "unavailable", _version(module), "package: not installed", remedy)
    if answer.error is not None:
        detail = f"package: installed; import fails: {answer.error}"
        return Capability(name, "unavailable", _version(module), detail, remedy)
    devices = answer.facts.get("devices")
    return Capability(
        name, "available", answer.facts.get("version"), f"devices: {', '.join(devices)}" if devices else ""
    )


def _power() -> list[Capability]:
    domains, reason = rapl_domains()
    names = ", ".join(domain.name for domain in domains)
    return [
        Capability("cpu energy (RAPL)", "available" if domains else "unavailable", None, reason or names),
        Capability("power", "available", None, power_source()),
    ]
