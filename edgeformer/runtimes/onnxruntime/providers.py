"""ONNX Runtime's execution providers: the default provider, RTX options, and their status for `doctor`."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from edgeformer.runtimes.session import PAST, Kind

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
_NOT_LOADED = re.compile(r"^Failed to load ([^/\\\n]+?): ", re.MULTILINE)
"""A library that ``preload_dlls`` found neither in pip's nvidia packages, by its path, nor by its bare name."""

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


class Provider(NamedTuple):
    """When edgeformer uses a provider, the kind of its device (None: another kind), and how to install it."""

    use: str = "used only on request"
    kind: Kind | None = None
    remedy: str | None = None


PROVIDERS = {
    CPU: Provider("used where no NVIDIA card is present, and for CPU targets", "cpu"),
    CUDA: Provider(
        "used by default where an NVIDIA card is present and the RTX provider is not",
        "cuda",
        _SWAP.format('"onnxruntime-gpu[cuda,cudnn]"'),
    ),
    TENSORRT: Provider(
        "used only on request, because it builds engines for minutes when it opens a graph, and needs the TensorRT 10 "
        "libraries",
        "cuda",
        _SWAP.format("onnxruntime-gpu") + "; TensorRT 10 from NVIDIA",
    ),
    RTX: Provider(
        "used by default on RTX cards (Ampere or newer)",
        "cuda",
        "pip install onnxruntime-ep-nv-tensorrt-rtx (beside onnxruntime, not beside onnxruntime-gpu)",
    ),
    "XnnpackExecutionProvider": Provider(kind="cpu"),
    "AzureExecutionProvider": Provider("calls a remote service; edgeformer never uses it"),
}
"""Providers that edgeformer knows more about than their name. ``doctor`` lists those of NVIDIA cards in any case."""


def default_provider(kind: Kind | None = None) -> str:
    """Choose the provider: TensorRT-RTX on RTX cards if ONNX Runtime supports it, else CUDA on NVIDIA cards, else CPU.

    Never TensorRT's, which builds an engine for minutes. With a ``kind``: the ordinary one on another system.
    """
    if kind is not None:
        return CUDA if kind == "cuda" else CPU
    import onnxruntime as ort

    built_in = ort.get_available_providers()
    # Listing GPUs takes as long as a small model's inference, so skip it if no provider can use one.
    if not {CUDA, RTX} & set(built_in) and util.find_spec(PLUGIN) is None:
        return CPU
    from edgeformer.artifacts.device import names_rtx
    from edgeformer.system import nvidia

    cards = nvidia.gpus()
    has_rtx = any(names_rtx(card.name) and float(card.compute_capability or 0) >= _RTX_CAPABILITY for card in cards)
    if has_rtx and (RTX in built_in or rtx_plugin().devices):
        return RTX
    return CUDA if cards and CUDA in built_in else CPU


@cache
def load_cuda_libraries() -> str | None:
    """Load CUDA and cuDNN from pip's nvidia packages, where the loader does not search; return what is missing."""
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
    return ", ".join(_NOT_LOADED.findall(printed.getvalue())) or None


class RtxPlugin(NamedTuple):
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
    return RtxPlugin(devices, None if devices else "the plugin finds no RTX card (Ampere or newer)")


def rtx_options(graph: Path, max_positions: int | None) -> dict[str, str]:
    """Return the RTX provider's options for a graph: a folder for compiled kernels, and the expected shapes.

    By default it compiles again in every process, and plans each axis from 0 to 32,767, tuned for 1.
    """
    from edgeformer.artifacts.files import sha256_of
    from edgeformer.artifacts.onnx_outline import read_outline
    from edgeformer.system import cuda_driver
    from edgeformer.system.capability import installed_version
    from edgeformer.system.leftovers import cache_folder, compiled_name

    inputs = read_outline(graph).inputs
    has_caches = any(port.name.startswith(PAST) for port in inputs)
    longest = max_positions or 32767
    tuned = min(128, longest)  # the sequence length of the latency budgets
    axes = {
        "batch": (1, 1, 1024),
        "sequence": (1, 1 if has_caches else tuned, longest),  # with caches a text grows by one token at a time
        "past": (0, tuned, longest),
    }
    options: dict[str, str] = {}
    shapes = {port.name: (None,) if port.shape is None else port.shape for port in inputs}
    dynamic = {name: shape for name, shape in shapes.items() if not all(isinstance(dim, int) for dim in shape)}
    if all(isinstance(dim, int) or dim in axes for shape in dynamic.values() for dim in shape):
        for index, size in enumerate(("min", "opt", "max")):
            profile = [
                f"{name}:" + "x".join(str(axes[dim][index] if isinstance(dim, str) else dim) for dim in shape)
                for name, shape in dynamic.items()
            ]
            if profile:
                options[f"nv_profile_{size}_shapes"] = ",".join(profile)
    for gpu in cuda_driver.devices()[:1]:
        name = compiled_name(sha256_of(graph), gpu, installed_version(*_RTX_DISTRIBUTIONS) or "unknown")
        folder = cache_folder() / "onnxruntime-rtx" / name
        with suppress(OSError):  # the provider does not start if it cannot create this folder
            folder.mkdir(parents=True, exist_ok=True)
            options["nv_runtime_cache_path"] = str(folder)
    return options


def describe(answer: Answer | None, driver: str | None, plugin: Answer | None = None) -> list[Capability]:
    """Describe ONNX Runtime, every built-in provider and those of NVIDIA cards, in alphabetical order.

    ``driver``: why CUDA's driver cannot be used. ``plugin``: probe of the RTX plugin; None: it is not installed.
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
    lines = [Capability("onnxruntime", "available", answer.facts.get("version"), detail, remedy)]
    libraries = ", ".join(_NOT_LOADED.findall(answer.facts.get("preload", "")))
    too_old = driver_too_old(answer.facts.get("cuda"), nvidia.driver_version())
    built_in = answer.facts.get("providers", [])
    for name in sorted({*built_in, CPU, CUDA, TENSORRT, RTX}):
        provider, version = PROVIDERS.get(name, Provider()), None
        problem = remedy = None
        if name in built_in:
            detail = "built in"
            if provider.kind == "cuda":
                problem = driver or too_old or (f"cannot load {libraries}" if libraries else None)
                remedy = _CUDA_LIBRARIES if libraries and not (driver or too_old) else None
        elif name == RTX and plugin is not None:
            version, devices = plugin.facts.get("version"), plugin.facts.get("devices")
            detail = f"plugin works on {devices} card(s)" if devices else "plugin installed"
            if not devices:
                problem = driver or plugin.error or "it finds no RTX card (Ampere or newer)"
        else:
            detail, problem = "not built into the installed onnxruntime", ""
            remedy = provider.remedy if driver is None else None  # another wheel does not help without a driver
        detail += f", but {problem}" if problem else ""
        status: Literal["available", "unavailable"] = "available" if problem is None else "unavailable"
        lines.append(Capability(f"onnxruntime: {name}", status, version, f"{detail}; {provider.use}", remedy))
    return lines
