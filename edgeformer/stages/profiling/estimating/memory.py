"""Memory of an artifact on a device that is not here, as a range. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.manifest import ArtifactManifest
from edgeformer.formats.report import Memory

# What lives beside one node's inputs and outputs: residual streams, masks, the tensors of parallel branches.
_ALIVE_HIGH = 4.0
# Arenas grow to the next power of two.
_ARENA_HIGH = 2.0
# cuBLAS takes 4 MiB, and 32 MiB on Hopper; TensorRT's tactics may take more, which its activation bytes then contain.
_GPU_WORKSPACE_HIGH = 32 * 2**20
# CUDA contexts differ by driver and by how many kernels are loaded.
_CONTEXT_LOW, _CONTEXT_HIGH = 0.7, 1.5
# ONNX Runtime on CPUs keeps weights as they are, and once more packed for its products; while it opens a file, the
# parsed graph is a third copy.
_CPU_COPIES_LOW, _CPU_COPIES_HIGH = 1.0, 3.2
# Sessions, thread pools, code pages of the kernels that run first.
_CPU_FIXED_HIGH = 48 * 2**20


@dataclass(frozen=True)
class Footprint:
    """What an artifact needs wherever it runs.

    Attributes:
        weight_bytes: as stored.
        step_bytes: the largest node's inputs and outputs together.
        feed_bytes: inputs of a call; caches of earlier tokens are read and written.
    """

    weight_bytes: float
    step_bytes: float
    feed_bytes: float


def estimate_memory(artifact: ArtifactManifest, footprint: Footprint, device: DeviceProfile) -> Memory:
    """Weights, activations, workspace and, on GPUs, the CUDA context; `unavailable` where that is not known."""
    if device.kind == "cuda" and device.context_bytes is None:
        reason = f"device profile {device.name!r} does not say context_bytes"
        return Memory(status="unavailable", reason=reason)
    low, high = _gpu(artifact, footprint, device) if device.kind == "cuda" else _cpu(footprint)
    what = "weights, activations, workspace and CUDA context" if device.kind == "cuda" else "weights and activations"
    return Memory(
        status="estimated",
        peak=round((low * high) ** 0.5),
        low=round(low),
        high=round(high),
        method=f"sum of {what}",
        reason=f"sum of {what}; the range covers what allocators keep and how many copies of the weights there are",
    )


def _gpu(artifact: ArtifactManifest, footprint: Footprint, device: DeviceProfile) -> tuple[float, float]:
    assert device.context_bytes is not None
    context = device.context_bytes.value
    activations_low = footprint.step_bytes + 2 * footprint.feed_bytes
    activations_high = _ALIVE_HIGH * footprint.step_bytes + 2 * footprint.feed_bytes
    engine = artifact.engine
    if engine is not None and engine.activation_bytes is not None:
        # The builder says it, for the largest shape that the engine takes.
        activations_high = engine.activation_bytes + 2 * footprint.feed_bytes
        activations_low = min(activations_low, activations_high)
        weights = engine.weight_bytes or footprint.weight_bytes
        low = context * _CONTEXT_LOW + weights + activations_low
        high = context * _CONTEXT_HIGH + (artifact.size_bytes or weights) + activations_high + _GPU_WORKSPACE_HIGH
        return low, max(low, high)
    low = context * _CONTEXT_LOW + footprint.weight_bytes + activations_low
    held = _ARENA_HIGH * (footprint.weight_bytes + activations_high)
    return low, context * _CONTEXT_HIGH + held + _GPU_WORKSPACE_HIGH


def _cpu(footprint: Footprint) -> tuple[float, float]:
    low = _CPU_COPIES_LOW * footprint.weight_bytes + footprint.step_bytes + 2 * footprint.feed_bytes
    activations = _ALIVE_HIGH * footprint.step_bytes + 2 * footprint.feed_bytes
    return low, _CPU_COPIES_HIGH * footprint.weight_bytes + _ARENA_HIGH * activations + _CPU_FIXED_HIGH
