"""ONNX Runtime's execution providers: which one edgeformer chooses, and what each needs (for `doctor`)."""

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
say(devices=len([one for one in onnxruntime.get_ep_devices() if one.ep_name == plugin.get_ep_name()]))
""",
}


def available_providers() -> list[str]:
    """Execution providers that the installed ONNX Runtime was built with (a driver may still be missing)."""
    import onnxruntime as ort

    return list(ort.get_available_providers())


def default_provider(kind: Kind | None = None) -> str:
    """RTX cards: TensorRT-RTX where ONNX Runtime can use it, else CUDA; other cards: CUDA; without either the CPU.

    The TensorRT provider is never chosen: it builds an engine for minutes when a graph is opened.

    Args:
        kind: of a device that is not this machine, where only the ordinary provider for its kind can be told.
    """
    if kind is not None:
        return CUDA if kind == "cuda" else CPU
    built_in = available_providers()
    # Asking for cards takes as long as a small model's answer, so it is left where no provider could use one.
    if not {CUDA, RTX} & set(built_in) and util.find_spec(PLUGIN) is None:
        return CPU
    from edgeformer.system import nvidia

    if not nvidia.gpus():
        return CPU
    if _rtx_card() and (RTX in built_in or rtx_plugin().devices):
        return RTX
    return CUDA if CUDA in built_in else CPU


def _rtx_card() -> bool:
    """Whether a GeForce RTX or RTX workstation card is here that TensorRT-RTX runs on."""
    from edgeformer.artifacts.device import names_rtx
    from edgeformer.system import nvidia

    return any(
        names_rtx(card.name) and float(card.compute_capability or 0) >= _RTX_CAPABILITY for card in nvidia.gpus()
    )


def how_to_start(provider: str) -> str:
    """Why a CUDA provider that is built into this ONNX Runtime may not start here, and what to do."""
    from edgeformer.system import cuda_driver

    if reason := cuda_driver.problem():
        return reason
    if libraries := load_cuda_libraries():
        return f"it cannot load {libraries}: {_CUDA_LIBRARIES}"
    return "driver or libraries are missing or too old; run edgeformer doctor"


def how_to_use_card() -> str:
    """What to do so that ONNX graphs are computed by this machine's NVIDIA card, where its processor computes them."""
    if CUDA in available_providers():
        return "this ONNX Runtime has CUDA, but was not asked for it, or its libraries do not load: edgeformer doctor"
    if not _rtx_card():
        return f"for ONNX graphs on the card: {_KNOWN[CUDA].remedy}"
    if util.find_spec(PLUGIN) is None:
        return f"for ONNX graphs on the card: {_KNOWN[RTX].remedy}"
    return f"onnxruntime-ep-nv-tensorrt-rtx is installed, but cannot be used: {rtx_plugin().problem or 'not asked for'}"


@cache
def load_cuda_libraries() -> str | None:
    """Load CUDA's and cuDNN's libraries of pip's nvidia packages, once, for providers that link against them.

    The system's loader does not look into site-packages. ONNX Runtime before 1.21 cannot do this.

    Returns:
        What could not be loaded; None where all was, and where this ONNX Runtime was built without CUDA.
    """
    import onnxruntime as ort

    preload = getattr(ort, "preload_dlls", None)
    if preload is None:
        return None
    printed = io.StringIO()  # it reports on stdout, where the answers of commands are
    try:
        with redirect_stdout(printed):
            preload()
    except Exception as error:  # of ctypes, of ONNX Runtime: no common base class
        return f"{type(error).__name__}: {error}"
    return _missing_libraries(printed.getvalue())


def _missing_libraries(printed: str) -> str | None:
    """Return the libraries that ``preload_dlls`` could not load, or None.

    It tries the copy in pip's nvidia packages, and reports a failure with the path of that copy. Then it tries the name
    alone, on the loader's default path. Only a failure of the name means that the library is not loaded.
    """
    prefix = "Failed to load "
    failed = [line.removeprefix(prefix) for line in printed.splitlines() if line.startswith(prefix)]
    libraries = [line.partition(": ")[0] for line in failed]
    return ", ".join(library for library in libraries if not {"/", "\\"} & set(library)) or None


@dataclass(frozen=True)
class RtxPlugin:
    """The plugin's devices, as ONNX Runtime takes them, or why there are none."""

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
        devices = tuple(one for one in ort.get_ep_devices() if one.ep_name == plugin.get_ep_name())
    except Exception as error:  # of the import, of its libraries, of onnxruntime: no common base class
        return RtxPlugin(problem=(str(error).strip().splitlines() or [type(error).__name__])[0])
    return RtxPlugin(devices, None if devices else "the plugin works but finds no RTX card (Ampere or newer)")


_MOST_ROWS, _MOST_POSITIONS, _TUNED_FOR = 1024, 32767, 128
"""Rows of one call; the provider's own limit of an axis; tokens at which the budgets judge latency."""


def rtx_options(graph: Path, max_positions: int | None) -> dict[str, str]:
    """Options of the RTX provider for a graph: a folder for compiled kernels, and the shapes to expect.

    Without options it compiles again in every process, and plans for every axis from 0 to 32,767, tuned for 1.

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
        with suppress(OSError):  # the provider refuses to start where it cannot make this folder
            folder.mkdir(parents=True, exist_ok=True)
            options["nv_runtime_cache_path"] = str(folder)
    return options


def profile_shapes(graph: Path, max_positions: int | None) -> dict[str, str]:
    """Smallest, best and largest shapes of a graph's inputs, as the RTX provider takes them.

    Empty where an axis is none of ``batch``, ``sequence`` and ``past``: then the provider's own range holds.
    """
    from edgeformer.artifacts.onnx_outline import read_outline

    inputs = read_outline(graph).inputs
    has_caches = any(port.name.startswith(KEPT) for port in inputs)
    longest = max_positions or _MOST_POSITIONS
    tuned = min(_TUNED_FOR, longest)
    axes = {
        "batch": (1, 1, _MOST_ROWS),
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
        for which, column in enumerate(columns):
            shape = "x".join(str(size[which] if isinstance(size, tuple) else size) for size in sizes)
            column.append(f"{port.name}:{shape}")
    names = ("nv_profile_min_shapes", "nv_profile_opt_shapes", "nv_profile_max_shapes")
    return {name: ",".join(column) for name, column in zip(names, columns, strict=True) if column}


@dataclass(frozen=True)
class _Known:
    """What there is to say of a provider, present or not.

    Attributes:
        kind: of the device that it computes on; None: another kind.
        system: the only one that it exists for.
    """

    use: str
    remedy: str | None = None
    kind: Kind | None = None
    system: str | None = None


_KNOWN = {
    CPU: _Known("used where no NVIDIA card is present, and for CPU targets", kind="cpu"),
    CUDA: _Known(
        "used by default where an NVIDIA card is present and the RTX provider is not",
        _SWAP.format('"onnxruntime-gpu[cuda,cudnn]"'),
        kind="cuda",
    ),
    TENSORRT: _Known(
        "used only where it is asked for: it builds engines for minutes when a graph is opened, and needs the "
        "libraries of TensorRT 10",
        _SWAP.format("onnxruntime-gpu") + "; TensorRT 10 from NVIDIA",
        kind="cuda",
    ),
    RTX: _Known(
        "used by default on RTX cards (Ampere or newer)",
        "pip install onnxruntime-ep-nv-tensorrt-rtx (beside onnxruntime, not beside onnxruntime-gpu)",
        kind="cuda",
    ),
    "DmlExecutionProvider": _Known(
        "DirectML; used only where it is asked for", _SWAP.format("onnxruntime-directml"), system="Windows"
    ),
    "OpenVINOExecutionProvider": _Known(
        "Intel processors and GPUs; used only where it is asked for", _SWAP.format("onnxruntime-openvino")
    ),
    "CoreMLExecutionProvider": _Known(
        "Apple devices; used only where it is asked for", "pip install onnxruntime", system="Darwin"
    ),
    "XnnpackExecutionProvider": _Known(
        "Arm processors; used only where it is asked for",
        "needs an onnxruntime that was built with --use_xnnpack",
        kind="cpu",
    ),
    "AzureExecutionProvider": _Known("calls a remote service; edgeformer never uses it"),
}  # fmt: skip


def facts_of(provider: str) -> ProviderFacts | None:
    """See :meth:`Backend.provider_facts`."""
    if not provider.endswith(SUFFIX):
        return None
    kind = _KNOWN[provider].kind if provider in _KNOWN else None
    return ProviderFacts(provider.removesuffix(SUFFIX), kind, counts_threads=provider == CPU)


def _explain(
    name: str, built_in: bool, plugin: Answer | None, driver: str | None, too_old: str | None, libraries: str | None
) -> Capability:
    from edgeformer.system.capability import Capability

    known = _KNOWN.get(name, _Known("used only where it is asked for"))
    version, remedy, works = None, None, False
    if name == RTX and plugin is not None and not built_in:
        version, devices = plugin.facts.get("version"), plugin.facts.get("devices")
        reason = driver or plugin.error or "it finds no RTX card (Ampere or newer)"
        works, what = (
            bool(devices),
            f"plugin works on {devices} card(s)" if devices else f"plugin installed, but {reason}",
        )
    elif not built_in:
        elsewhere = known.system not in (None, platform.system())
        what = f"exists only on {known.system}" if elsewhere else "not built into the installed onnxruntime"
        # Another wheel does not help where the driver or the right system is missing.
        remedy = known.remedy if not elsewhere and (driver is None or known.kind != "cuda") else None
    else:
        not_loaded = f"cannot load {libraries}" if libraries else None
        problem = driver or too_old or not_loaded if known.kind == "cuda" else None
        works = problem is None
        what = "built in" if works else f"built in, but {problem}"
        if problem == not_loaded and not works:
            remedy = _CUDA_LIBRARIES
    return Capability(
        f"onnxruntime: {name}", "available" if works else "unavailable", version, f"{what}; {known.use}", remedy
    )


def describe(answer: Answer | None, driver: str | None, plugin: Answer | None = None) -> list[Capability]:
    """ONNX Runtime itself and every provider that is built in or worth knowing, in alphabetical order.

    Args:
        answer: what the probe of ONNX Runtime said; None where it is not installed.
        driver: why CUDA's driver cannot be used; None when it can.
        plugin: what the probe of onnxruntime-ep-nv-tensorrt-rtx said; None where it is not installed.
    """
    from edgeformer.system import nvidia
    from edgeformer.system.capability import Capability, driver_too_old, installed_version

    if answer is None:
        return [Capability("onnxruntime", "unavailable", detail="not installed", remedy="pip install onnxruntime")]
    if answer.error is not None:
        again = "pip install --force-reinstall onnxruntime"
        return [Capability("onnxruntime", "unavailable", installed_version(*_DISTRIBUTIONS), answer.error, again)]
    owners = [name for name in _DISTRIBUTIONS if installed_version(name) is not None]
    detail, remedy = "opens and runs ONNX graphs", None
    if len(owners) > 1:
        detail = f"{' and '.join(owners)} are both installed and overwrite each other's files"
        remedy = f"pip uninstall -y {' '.join(owners)}, then install one of them"
    own = Capability("onnxruntime", "available", answer.facts.get("version"), detail, remedy)
    built_in = answer.facts.get("providers", [])
    names = sorted({*built_in, *_KNOWN} - {"AzureExecutionProvider"} | {*built_in})
    libraries = _missing_libraries(answer.facts.get("preload", ""))
    too_old = driver_too_old(answer.facts.get("cuda"), nvidia.driver_version())
    return [own, *(_explain(name, name in built_in, plugin, driver, too_old, libraries) for name in names)]
