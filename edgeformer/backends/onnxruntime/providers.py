"""ONNX Runtime's execution providers: which one edgeformer chooses, and what each needs (for `doctor`)."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from edgeformer.machine import nvidia
from edgeformer.machine.capability import Capability
from edgeformer.machine.child_probes import Answer

_ON_GPU = ("CUDA", "Tensorrt", "NvTensorRTRTX", "tensorrt", "torch-tensorrt", "torch-cuda")
_RTX_CAPABILITY = 8.0  # Ampere
_SWAP = "pip uninstall -y onnxruntime, then pip install {} (both own the same module)"


def default_provider() -> str:
    """RTX cards: TensorRT-RTX where ONNX Runtime can use it, else CUDA; other cards: CUDA; without either the CPU.

    The TensorRT provider is never chosen: it builds an engine for minutes when a graph is opened.
    """
    cards = nvidia.gpus()
    if not cards:
        return "CPUExecutionProvider"
    from edgeformer.backends.onnxruntime.rtx_provider import RTX, rtx_plugin
    from edgeformer.backends.onnxruntime.session import CPU, CUDA, available_providers

    built_in = available_providers()
    if any(map(is_rtx, cards)) and (RTX in built_in or rtx_plugin().devices):
        return RTX
    return CUDA if CUDA in built_in else CPU


def is_rtx(card: nvidia.Gpu) -> bool:
    """A GeForce RTX or RTX workstation card that TensorRT-RTX runs on (Ampere or newer)."""
    return "RTX" in card.name and float(card.compute_capability or 0) >= _RTX_CAPABILITY


def on_gpu(provider: str) -> bool:
    """Whether a session's ``provider`` computes on an NVIDIA GPU."""
    return provider.startswith(_ON_GPU)


@dataclass(frozen=True)
class _Known:
    """What there is to say of a provider, present or not. ``system``: the only one that it exists for."""

    use: str
    remedy: str | None = None
    cuda: bool = False
    system: str | None = None


_KNOWN = {
    "CPUExecutionProvider": _Known("used where no NVIDIA card is present, and for CPU targets"),
    "CUDAExecutionProvider": _Known(
        "used by default where an NVIDIA card is present and the RTX provider is not",
        _SWAP.format("onnxruntime-gpu"),
        cuda=True,
    ),
    "TensorrtExecutionProvider": _Known(
        "used only where it is asked for: it builds engines for minutes when a graph is opened, and needs the "
        "libraries of TensorRT 10",
        _SWAP.format("onnxruntime-gpu") + "; TensorRT 10 from NVIDIA",
        cuda=True,
    ),
    "NvTensorRTRTXExecutionProvider": _Known(
        "used by default on RTX cards (Ampere or newer)",
        "pip install onnxruntime-ep-nv-tensorrt-rtx (beside onnxruntime, not beside onnxruntime-gpu)",
        cuda=True,
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
        "Arm processors; used only where it is asked for", "needs an onnxruntime that was built with --use_xnnpack"
    ),
    "AzureExecutionProvider": _Known("calls a remote service; edgeformer never uses it"),
}  # fmt: skip


def explain_providers(built_in: Sequence[str], plugin: Answer | None, driver: str | None) -> list[Capability]:
    """Every provider that is built in or worth knowing, in alphabetical order.

    Args:
        built_in: what the installed ONNX Runtime names.
        plugin: what the probe of onnxruntime-ep-nv-tensorrt-rtx said; None where it is not installed.
        driver: why CUDA's driver cannot be used; None when it can.
    """
    names = sorted({*built_in, *_KNOWN} - {"AzureExecutionProvider"} | {*built_in})
    return [_explain(name, name in built_in, plugin, driver) for name in names]


def _explain(name: str, built_in: bool, plugin: Answer | None, driver: str | None) -> Capability:
    title = f"onnxruntime: {name}"
    known = _KNOWN.get(name, _Known("used only where it is asked for"))
    if name == "NvTensorRTRTXExecutionProvider" and plugin is not None and not built_in:
        return _explain_plugin(title, known, plugin, driver)
    if not built_in:
        elsewhere = known.system not in (None, platform.system())
        why = f"exists only on {known.system}" if elsewhere else "not built into the installed onnxruntime"
        # Another wheel does not help where the driver or the right system is missing.
        helps = not elsewhere and (driver is None or not known.cuda)
        return Capability(title, "unavailable", None, f"{why}; {known.use}", known.remedy if helps else None)
    if known.cuda and driver is not None:
        return Capability(title, "unavailable", None, f"built in, but {driver}; {known.use}")
    return Capability(title, "available", None, f"built in; {known.use}")


def _explain_plugin(title: str, known: _Known, plugin: Answer, driver: str | None) -> Capability:
    version = plugin.facts.get("version")
    if plugin.facts.get("devices"):
        return Capability(
            title, "available", version, f"plugin works on {plugin.facts['devices']} card(s); {known.use}"
        )
    reason = driver or plugin.error or "it finds no RTX card (Ampere or newer)"
    return Capability(title, "unavailable", version, f"plugin installed, but {reason}; {known.use}")
