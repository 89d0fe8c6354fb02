"""Which TensorRT builds an engine for a device, for which shapes, or why none can: asked before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeformer.backends.tensorrt.state import REMEDIES, RTX_CAPABILITIES, Builder, TensorRTState, tensorrt_state
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.manifest import Precision

LARGEST_BATCH = 16
BEST_LENGTH = 128
"""Tokens at which latency is judged (the budgets' shape); engines are tuned for it where the text gets so long."""

_JETSON = ("5.3", "6.2", "7.2", "8.7", "11.0")
"""Compute capabilities that only Jetsons have."""


@dataclass(frozen=True)
class Sizes:
    """A dynamic axis: the smallest size that the engine takes, the one it is tuned for, the largest."""

    smallest: int
    best: int
    largest: int


@dataclass(frozen=True)
class TextShapes:
    """Sizes of the axes of a text graph's inputs, by the axes' names in the graph."""

    batch: Sizes
    sequence: Sizes

    def axis(self, name: str) -> Sizes | None:
        """The sizes of an axis; None for one that an engine is not built for."""
        return {"batch": self.batch, "sequence": self.sequence}.get(name)


def text_shapes(max_length: int, max_positions: int) -> TextShapes:
    """The one rule: batch 1…16, tuned for 1; sequence 1…``max_length``, tuned for 128 tokens or the longest text.

    The largest sequence is at least 128 where the model can take that: latency is judged there.

    Args:
        max_length: tokens of the longest text of the recipe.
        max_positions: tokens that the model can take.
    """
    longest = min(max_positions, max(max_length, BEST_LENGTH))
    return TextShapes(Sizes(1, 1, LARGEST_BATCH), Sizes(1, min(BEST_LENGTH, max_length), longest))


@dataclass(frozen=True)
class EngineTarget:
    """A device that an engine can be built for here, and what builds it."""

    builder: Builder
    compute_capability: str
    device: str


@dataclass(frozen=True)
class Unavailable:
    """No engine can be built here: the format that it would have had, and why not."""

    builder: Builder
    reason: str


@dataclass(frozen=True)
class EngineRequest:
    """What to build.

    Attributes:
        precision: the graph's; an engine computes in the types of its graph.
        cache: folder for what builders learn about a GPU (timings); None: learn it again.
    """

    target: EngineTarget
    precision: Precision
    shapes: TextShapes
    cache: Path | None = None


def plan_engine(
    device: DeviceProfile, state: Callable[[Builder], TensorRTState] = tensorrt_state
) -> EngineTarget | Unavailable:
    """Choose the builder: tensorrt-rtx where it supports the device, else tensorrt on that very device.

    Args:
        state: says what works here.
    """
    named = f"{device.title} (profile {device.name!r}"
    if device.kind != "cuda" or device.compute_capability is None:
        return Unavailable(
            "tensorrt-rtx", f"{named}) is not an NVIDIA GPU, which TensorRT needs; name another --target"
        )
    capability = device.compute_capability.value
    named = f"{named}, compute capability {capability})"
    rtx = state("tensorrt-rtx")
    supported = rtx.capabilities or RTX_CAPABILITIES
    if capability in supported and rtx.can_build():
        return EngineTarget("tensorrt-rtx", capability, device.name)
    full = state("tensorrt")
    problem = _why_not_on_device(full, device, capability)
    if problem is None:
        return EngineTarget("tensorrt", capability, device.name)
    if capability in supported:
        missing = f"{rtx.missing_to_build()} ({REMEDIES['tensorrt-rtx']})"
        return Unavailable("tensorrt-rtx", f"{named}: tensorrt-rtx builds for it on any machine, but here {missing}")
    alternative = "TensorRT of JetPack, on the Jetson itself" if capability in _JETSON else "tensorrt, on that very GPU"
    return Unavailable(
        "tensorrt",
        f"{named}: tensorrt-rtx supports only compute capability {', '.join(supported)}. Use {alternative}; "
        f"here {problem}",
    )


def plan_torch_tensorrt(
    device: DeviceProfile, state: Callable[[Builder], TensorRTState] = tensorrt_state
) -> EngineTarget | Unavailable:
    """For ``--trt-via torch-tensorrt``: like tensorrt, it compiles on that very device."""
    named = f"{device.title} (profile {device.name!r})"
    if device.kind != "cuda" or device.compute_capability is None:
        return Unavailable(
            "torch-tensorrt", f"{named} is not an NVIDIA GPU, which TensorRT needs; name another --target"
        )
    capability = device.compute_capability.value
    problem = _why_not_on_device(state("torch-tensorrt"), device, capability)
    if problem is None:
        return EngineTarget("torch-tensorrt", capability, device.name)
    return Unavailable("torch-tensorrt", f"{named}: torch-tensorrt compiles on that very GPU, but here {problem}")


def _why_not_on_device(state: TensorRTState, device: DeviceProfile, capability: str) -> str | None:
    if not state.can_build():
        remedy = f" ({REMEDIES[state.name]})" if not state.installed() else ""
        return f"{state.missing_to_build()}{remedy}"
    gpu = state.gpus[0]
    wanted = device.match or device.title
    if gpu.compute_capability != capability or wanted.lower() not in gpu.name.lower():
        return f"device: this machine's GPU is {gpu.name} with compute capability {gpu.compute_capability}"
    return None
