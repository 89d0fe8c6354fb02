"""ONNX Runtime's execution providers: the default provider, RTX options, and their status for `doctor`."""

from __future__ import annotations

import io
import platform
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeformer.runtimes.runtime import Kind, ProviderFacts
from edgeformer.runtimes.session import KEPT

if TYPE_CHECKING:
    from edgeformer.system.capability import Answer, Capability

SUFFIX = "ExecutionProvider"
CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
RTX = "NvTensorRTRTXExecutionProvider"
PLUGIN = "onnxruntime_ep_nv_tensorrt_rtx"
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")
_RTX_DISTRIBUTIONS = tuple(f"onnxruntime-ep-nv-tensorrt-rtx{cuda}" for cuda in ("", "-cu13", "-cu12"))
_RTX_CAPABILITY = 8.0  # Ampere
_SWAP = "pip uninstall -y onnxruntime, then pip install {} (both own the same module)"
_CUDA_LIBRARIES = 'pip install "onnxruntime-gpu[cuda,cudnn]"'
SCRIPTS = {
    "onnxruntime": """
import onnxruntime
say(version=onnxruntime.__version__, providers=onnxruntime.get_available_providers(),
    cuda=getattr(onnxruntime, "cuda_version", None))
if "CUDAExecutionProvider" in onnxruntime.get_available_providers() and hasattr(onnxruntime, "preload_dlls"):
    import contextlib, io
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        onnxruntime.preload_dlls()
    say(preload=printed.getvalue())
""",
    PLUGIN: """
import onnxruntime, onnxruntime_ep_nv_tensorrt_rtx as plugin
say(version=plugin.__version__)
onnxruntime.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
say(devices=len([device for device in onnxruntime.get_ep_devices() if device.ep_name == plugin.get_ep_name()]))
""",
}


def available_providers() -> list[str]:
    """Return the execution providers built into the installed ONNX Runtime (a driver may still be missing)."""
    import onnxruntime as ort

    return list(ort.get_available_providers())


def default_provider(kind: Kind | None = None) -> str:
    """Choose the provider: TensorRT-RTX on RTX cards if ONNX Runtime supports it, else CUDA on NVIDIA cards, else CPU.

    The TensorRT provider is never chosen: it builds an engine for minutes when a graph is opened.

    Args:
        kind: device kind of another system, for which the ordinary provider is returned; None: this system.
    """
    if kind is not None:
        return CUDA if kind == "cuda" else CPU
    built_in = available_providers()
    # Listing GPUs takes as long as a small model's inference, so skip it if no provider can use one.
    if not {CUDA, RTX} & set(built_in) and util.find_spec(PLUGIN) is None:
        return CPU
    from edgeformer.system import nvidia

    if not nvidia.gpus():
        return CPU
    if _rtx_card() and (RTX in built_in or rtx_plugin().devices):
        return RTX
    return CUDA if CUDA in built_in else CPU


def _rtx_card() -> bool:
    """Return whether this system has a GeForce RTX or RTX workstation card that TensorRT-RTX supports."""
    from edgeformer.artifacts.device import names_rtx
    from edgeformer.system import nvidia

    return any(
        names_rtx(card.name) and float(card.compute_capability or 0) >= _RTX_CAPABILITY for card in nvidia.gpus()
    )


def how_to_start(provider: str) -> str:
    """Explain why a built-in CUDA provider does not start here, and what to do."""
    from edgeformer.system import cuda_driver

    if reason := cuda_driver.problem():
        return reason
    if libraries := load_cuda_libraries():
        return f"it cannot load {libraries}: {_CUDA_LIBRARIES}"
    return "driver or libraries are missing or too old; run edgeformer doctor"


def how_to_use_card() -> str:
    """Explain how to run ONNX graphs on this system's NVIDIA card instead of its processor."""
    if CUDA in available_providers():
        return "this ONNX Runtime has CUDA, but was not asked for it, or its libraries do not load: edgeformer doctor"
    if not _rtx_card():
        return f"for ONNX graphs on the card: {_PROVIDERS[CUDA].remedy}"
    if util.find_spec(PLUGIN) is None:
        return f"for ONNX graphs on the card: {_PROVIDERS[RTX].remedy}"
    return f"onnxruntime-ep-nv-tensorrt-rtx is installed, but cannot be used: {rtx_plugin().problem or 'not asked for'}"


@cache
def load_cuda_libraries() -> str | None:
    """Load the CUDA and cuDNN libraries of pip's nvidia packages, once, for providers that link against them.

    The system's loader does not search site-packages. ONNX Runtime before 1.21 cannot preload them.

    Returns:
        The libraries that could not be loaded; None if all were, or if this ONNX Runtime was built without CUDA.
    """
    import onnxruntime as ort

    preload = getattr(ort, "preload_dlls", None)
    if preload is None:
        return None
    printed = io.StringIO()  # keep its report out of the command's stdout
    try:
        with redirect_stdout(printed):
            preload()
    except Exception as error:  # errors of ctypes and ONNX Runtime have no common base class
        return f"{type(error).__name__}: {error}"
    return _missing_libraries(printed.getvalue())


def _missing_libraries(printed: str) -> str | None:
    """Return the libraries that ``preload_dlls`` could not load, or None.

    It first tries the copy in pip's nvidia packages and reports a failure with its path, then the bare name on the
    loader's default path. The library is missing only if the bare name fails.
    """
    prefix = "Failed to load "
    failed = [line.removeprefix(prefix) for line in printed.splitlines() if line.startswith(prefix)]
    libraries = [line.partition(": ")[0] for line in failed]
    return ", ".join(library for library in libraries if not {"/", "\\"} & set(library)) or None


@dataclass(frozen=True)
class RtxPlugin:
    """The plugin's devices as ONNX Runtime objects, or why there are none."""

    devices: tuple[Any, ...] = ()
    problem: str | None = None


@cache
def rtx_plugin() -> RtxPlugin:
    """Register the plugin with this process's ONNX Runtime, once. Loads 300 MB of libraries where it is installed."""
    if util.find_spec(PLUGIN) is None:
        return RtxPlugin(problem="the package onnxruntime-ep-nv-tensorrt-rtx is not installed")
    import onnxruntime as ort

    try:
        plugin = import_module(PLUGIN)
        ort.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
        devices = tuple(device for device in ort.get_ep_devices() if device.ep_name == plugin.get_ep_name())
    except Exception as error:  # errors of the import, its libraries and onnxruntime have no common base class
        return RtxPlugin(problem=(str(error).strip().splitlines() or [type(error).__name__])[0])
    return RtxPlugin(devices, None if devices else "the plugin works but finds no RTX card (Ampere or newer)")


_MAX_ROWS, _MAX_POSITIONS, _TUNED_LENGTH = 1024, 32767, 128
"""Rows per call; the provider's limit of an axis; sequence length of the latency budgets."""


def rtx_options(graph: Path, max_positions: int | None) -> dict[str, str]:
    """Return the RTX provider's options for a graph: a folder for compiled kernels, and the expected shapes.

    By default the provider compiles again in every process, and plans each axis from 0 to 32,767, tuned for 1.

    Args:
        graph: the .onnx file.
        max_positions: tokens of the longest text; None: not known.
    """
    from edgeformer.artifacts.files import sha256_of
    from edgeformer.system import cuda_driver
    from edgeformer.system.capability import installed_version
    from edgeformer.system.leftovers import cache_folder, compiled_name

    options = profile_shapes(graph, max_positions)
    gpu = next(iter(cuda_driver.devices()), None)
    if gpu is not None:
        name = compiled_name(sha256_of(graph), gpu, installed_version(*_RTX_DISTRIBUTIONS) or "unknown")
        folder = cache_folder() / "onnxruntime-rtx" / name
        with suppress(OSError):  # the provider does not start if it cannot create this folder
            folder.mkdir(parents=True, exist_ok=True)
            options["nv_runtime_cache_path"] = str(folder)
    return options


def profile_shapes(graph: Path, max_positions: int | None) -> dict[str, str]:
    """Return smallest, best and largest shapes of a graph's inputs in the RTX provider's format.

    Empty if a dynamic axis is not ``batch``, ``sequence`` or ``past``; the provider's default range then applies.
    """
    from edgeformer.artifacts.onnx_outline import read_outline

    inputs = read_outline(graph).inputs
    has_caches = any(port.name.startswith(KEPT) for port in inputs)
    longest = max_positions or _MAX_POSITIONS
    tuned = min(_TUNED_LENGTH, longest)
    axes = {
        "batch": (1, 1, _MAX_ROWS),
        "sequence": (1, 1 if has_caches else tuned, longest),  # with caches a text grows by one token at a time
        "past": (0, tuned, longest),
    }
    columns: tuple[list[str], list[str], list[str]] = ([], [], [])
    for port in inputs:
        if port.shape is None:
            return {}
        sizes = [axes.get(dim) if isinstance(dim, str) else dim for dim in port.shape]
        if None in sizes:
            return {}
        if all(isinstance(size, int) for size in sizes):
            continue
        for index, column in enumerate(columns):
            shape = "x".join(str(size[index] if isinstance(size, tuple) else size) for size in sizes)
            column.append(f"{port.name}:{shape}")
    names = ("nv_profile_min_shapes", "nv_profile_opt_shapes", "nv_profile_max_shapes")
    return {name: ",".join(column) for name, column in zip(names, columns, strict=True) if column}


@dataclass(frozen=True)
class _ProviderInfo:
    """Facts about a provider, installed or not.

    Attributes:
        use: when edgeformer uses it.
        remedy: how to install it.
        kind: kind of its device; None: another kind.
        system: the only operating system that it exists for.
    """

    use: str
    remedy: str | None = None
    kind: Kind | None = None
    system: str | None = None


_PROVIDERS = {
    CPU: _ProviderInfo("used where no NVIDIA card is present, and for CPU targets", kind="cpu"),
    CUDA: _ProviderInfo(
        "used by default where an NVIDIA card is present and the RTX provider is not",
        _SWAP.format('"onnxruntime-gpu[cuda,cudnn]"'),
        kind="cuda",
    ),
    TENSORRT: _ProviderInfo(
        "used only on request: it builds engines for minutes when a graph is opened, and needs the "
        "libraries of TensorRT 10",
        _SWAP.format("onnxruntime-gpu") + "; TensorRT 10 from NVIDIA",
        kind="cuda",
    ),
    RTX: _ProviderInfo(
        "used by default on RTX cards (Ampere or newer)",
        "pip install onnxruntime-ep-nv-tensorrt-rtx (beside onnxruntime, not beside onnxruntime-gpu)",
        kind="cuda",
    ),
    "DmlExecutionProvider": _ProviderInfo(
        "DirectML; used only on request", _SWAP.format("onnxruntime-directml"), system="Windows"
    ),
    "OpenVINOExecutionProvider": _ProviderInfo(
        "Intel processors and GPUs; used only on request", _SWAP.format("onnxruntime-openvino")
    ),
    "CoreMLExecutionProvider": _ProviderInfo(
        "Apple devices; used only on request", "pip install onnxruntime", system="Darwin"
    ),
    "XnnpackExecutionProvider": _ProviderInfo(
        "Arm processors; used only on request",
        "needs an onnxruntime that was built with --use_xnnpack",
        kind="cpu",
    ),
    "AzureExecutionProvider": _ProviderInfo("calls a remote service; edgeformer never uses it"),
}  # fmt: skip


def facts_of(provider: str) -> ProviderFacts | None:
    """See :meth:`Runtime.provider_facts`."""
    if not provider.endswith(SUFFIX):
        return None
    kind = _PROVIDERS[provider].kind if provider in _PROVIDERS else None
    return ProviderFacts(provider.removesuffix(SUFFIX), kind, counts_threads=provider == CPU)


def _explain(
    name: str, built_in: bool, plugin: Answer | None, driver: str | None, too_old: str | None, libraries: str | None
) -> Capability:
    from edgeformer.system.capability import Capability

    info = _PROVIDERS.get(name, _ProviderInfo("used only on request"))
    version, remedy, works = None, None, False
    if name == RTX and plugin is not None and not built_in:
        version, devices = plugin.facts.get("version"), plugin.facts.get("devices")
        reason = driver or plugin.error or "it finds no RTX card (Ampere or newer)"
        works = bool(devices)
        detail = f"plugin works on {devices} card(s)" if works else f"plugin installed, but {reason}"
    elif not built_in:
        is_other_system = info.system not in (None, platform.system())
        detail = f"exists only on {info.system}" if is_other_system else "not built into the installed onnxruntime"
        # Another wheel does not help if the driver is missing or the operating system is the wrong one.
        remedy = info.remedy if not is_other_system and (driver is None or info.kind != "cuda") else None
    else:
        not_loaded = f"cannot load {libraries}" if libraries else None
        problem = driver or too_old or not_loaded if info.kind == "cuda" else None
        works = problem is None
        detail = "built in" if works else f"built in, but {problem}"
        if problem == not_loaded and not works:
            remedy = _CUDA_LIBRARIES
    return Capability(
        f"onnxruntime: {name}", "available" if works else "unavailable", version, f"{detail}; {info.use}", remedy
    )


def describe(answer: Answer | None, driver: str | None, plugin: Answer | None = None) -> list[Capability]:
    """Describe ONNX Runtime and every built-in or known provider, in alphabetical order.

    Args:
        answer: probe of ONNX Runtime; None: it is not installed.
        driver: why CUDA's driver cannot be used; None if it can.
        plugin: probe of onnxruntime-ep-nv-tensorrt-rtx; None: it is not installed.
    """
    from edgeformer.system import nvidia
    from edgeformer.system.capability import Capability, driver_too_old, installed_version

    if answer is None:
        return [Capability("onnxruntime", "unavailable", detail="not installed", remedy="pip install onnxruntime")]
    if answer.error is not None:
        reinstall = "pip install --force-reinstall onnxruntime"
        return [Capability("onnxruntime", "unavailable", installed_version(*_DISTRIBUTIONS), answer.error, reinstall)]
    owners = [name for name in _DISTRIBUTIONS if installed_version(name) is not None]
    detail, remedy = "opens and runs ONNX graphs", None
    if len(owners) > 1:
        detail = f"{' and '.join(owners)} are both installed and overwrite each other's files"
        remedy = f"pip uninstall -y {' '.join(owners)}, then install one of them"
    package = Capability("onnxruntime", "available", answer.facts.get("version"), detail, remedy)
    built_in = answer.facts.get("providers", [])
    names = sorted({*built_in, *_PROVIDERS} - {"AzureExecutionProvider"} | {*built_in})
    libraries = _missing_libraries(answer.facts.get("preload", ""))
    too_old = driver_too_old(answer.facts.get("cuda"), nvidia.driver_version())
    return [package, *(_explain(name, name in built_in, plugin, driver, too_old, libraries) for name in names)]
