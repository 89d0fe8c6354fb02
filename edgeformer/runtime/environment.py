"""What works on this machine, which version, and why not: the facts behind `doctor`."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

from edgeformer.runtime import nvidia
from edgeformer.runtime.child_probes import Answer, ask_all
from edgeformer.runtime.power import power_source, rapl_domains
from edgeformer.runtime.threads import container_quota, default_threads
from edgeformer.schema.host import cpu_name, usable_cores
from edgeformer.schema.units import format_bytes

# module → distributions that may provide it, the likeliest first
_PROBED = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino"),
    "torch": ("torch",),
    "tensorrt_rtx": ("tensorrt-rtx", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13"),
    "tensorrt": ("tensorrt", "tensorrt-cu12", "tensorrt-cu13"),
    "torch_tensorrt": ("torch-tensorrt",),
    "flash_attn": ("flash-attn",),
    "openvino": ("openvino",),
}  # fmt: skip
_CPU_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip


@dataclass(frozen=True)
class Capability:
    """One thing that a command may need, whether it works here, and what to do if not."""

    name: str
    status: Literal["available", "unavailable"]
    version: str | None = None
    detail: str = ""
    remedy: str | None = None


def probe(timeout_s: float = 20.0) -> list[Capability]:
    """Everything that `doctor` shows, in reading order. Imports that can be dangerous run in child processes.

    Args:
        timeout_s: how long the slowest import may take before it counts as unavailable.
    """
    installed = [module for module in _PROBED if util.find_spec(module) is not None]
    answers = ask_all(installed, timeout_s)
    driver = nvidia.driver_problem()
    return [
        Capability("python", "available", platform.python_version(), platform.python_implementation()),
        *_processor(),
        *_onnxruntime(answers.get("onnxruntime"), driver),
        _torch(answers.get("torch"), driver),
        *_extra("train"),
        _driver(driver),
        *_cards(),
        _tensorrt("tensorrt-rtx", answers.get("tensorrt_rtx"), driver, 'pip install "edgeformer[rtx]"'),
        _tensorrt("tensorrt", answers.get("tensorrt"), driver, _TENSORRT_REMEDY),
        _simple("torch-tensorrt", answers.get("torch_tensorrt"), 'pip install "edgeformer[trt]"'),
        _simple("flash-attn", answers.get("flash_attn"), _FLASH_REMEDY),
        _simple("openvino", answers.get("openvino"), 'pip install "edgeformer[openvino]"'),
        *_power(),
    ]


_TENSORRT_REMEDY = 'pip install "edgeformer[trt]" on a CUDA machine; on a Jetson it comes with JetPack'
_FLASH_REMEDY = 'optional: pip install "edgeformer[flash]" on a CUDA machine; torch\'s SDPA is used without it'


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
    for distribution in _PROBED[module]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _onnxruntime(answer: Answer | None, driver: str | None) -> list[Capability]:
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
        *_providers(answer.facts.get("providers", []), driver),
    ]


def _providers(names: list[str], driver: str | None) -> list[Capability]:
    found: list[Capability] = []
    for name in sorted({*names, "CUDAExecutionProvider"}):
        title = f"onnxruntime: {name}"
        needs_cuda = name.startswith(("CUDA", "Tensorrt", "NvTensorRTRTX"))
        if name not in names:
            remedy = "pip uninstall -y onnxruntime, then pip install onnxruntime-gpu (both own the same module)"
            detail = "not built into the installed onnxruntime"
            found.append(Capability(title, "unavailable", None, detail, remedy if driver is None else None))
        elif needs_cuda and driver is not None:
            found.append(Capability(title, "unavailable", None, f"built in, but {driver}"))
        elif name == "AzureExecutionProvider":
            found.append(Capability(title, "available", None, "calls a remote service; edgeformer never uses it"))
        else:
            found.append(Capability(title, "available", None, "built in"))
    return found


def _torch(answer: Answer | None, driver: str | None) -> Capability:
    if answer is None:
        remedy = 'pip install "edgeformer[train]"; what works from a bundle does not need it'
        return Capability("torch", "unavailable", None, "not installed", remedy)
    if answer.error is not None:
        remedy = 'pip install --force-reinstall "edgeformer[train]"'
        return Capability("torch", "unavailable", _version("torch"), answer.error, remedy)
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
        return [Capability(f"extra [{extra}]", "unavailable", None, detail, f'pip install "edgeformer[{extra}]"')]
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
        f"runs CUDA up to {nvidia.cuda_version() or 'unknown'}",
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


def _tensorrt(name: str, answer: Answer | None, driver: str | None, remedy: str) -> Capability:
    """Package, libraries, driver and device are told apart: each fails for its own reason."""
    module = name.replace("-", "_")
    version = _version(module)
    if answer is None:
        return Capability(name, "unavailable", version, "package: not installed", remedy)
    facts = answer.facts
    if "version" not in facts:
        detail = f"package: installed; libraries: do not load ({answer.error})"
        return Capability(name, "unavailable", version, detail, remedy)
    libraries = f"package and libraries: work; driver: {driver or 'works'}"
    if not facts.get("builder"):
        detail = f"{libraries}; engines cannot be built here ({answer.error or 'no builder'})"
        return Capability(name, "unavailable", facts["version"], detail)
    use = "engines can be built but not run here" if driver or not nvidia.gpus() else "builds and runs engines"
    return Capability(name, "available", facts["version"], f"{libraries}; {use}")


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
