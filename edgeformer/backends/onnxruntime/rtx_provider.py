"""ONNX Runtime's provider for RTX cards: a plugin package, or built into a special ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module, util
from typing import Any

import onnxruntime as ort

RTX = "NvTensorRTRTXExecutionProvider"
PLUGIN = "onnxruntime_ep_nv_tensorrt_rtx"


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
    try:
        plugin = import_module(PLUGIN)
        ort.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
        devices = tuple(one for one in ort.get_ep_devices() if one.ep_name == plugin.get_ep_name())
    except Exception as error:  # of the import, of its libraries, of onnxruntime: no common base class
        return RtxPlugin(problem=(str(error).strip().splitlines() or [type(error).__name__])[0])
    return RtxPlugin(devices, None if devices else "the plugin works but finds no RTX card (Ampere or newer)")


def add_rtx_devices(options: Any) -> None:
    """Let a session that is opened with ``options`` compute on the plugin's devices."""
    options.add_provider_for_devices(list(rtx_plugin().devices), {})
