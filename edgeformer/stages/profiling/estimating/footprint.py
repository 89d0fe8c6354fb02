"""Memory of a call on a device that is not here, as a range. Pure functions."""

from __future__ import annotations

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


def estimate_memory(
    artifact: ArtifactManifest, device: DeviceProfile, weights: float, step_bytes: float, feed_bytes: float
) -> Memory:
    """Weights, activations, workspace and, on GPUs, the CUDA context; `unavailable` where that is not known.

    Args:
        artifact: an engine says more of itself.
        device: that is estimated for.
        weights: bytes as stored.
        step_bytes: the largest node's inputs and outputs together.
        feed_bytes: inputs of a call; caches of earlier tokens are read and written.
    """
    gpu, fed = device.kind == "cuda", 2 * feed_bytes
    if gpu and device.context_bytes is None:
        reason = f"device profile {device.name!r} does not say context_bytes"
        return Memory(status="unavailable", reason=reason)
    alive_low, alive_high = step_bytes + fed, _ALIVE_HIGH * step_bytes + fed
    if device.context_bytes is None or not gpu:
        low = _CPU_COPIES_LOW * weights + alive_low
        high = _CPU_COPIES_HIGH * weights + _ARENA_HIGH * alive_high + _CPU_FIXED_HIGH
    else:
        held, engine = _ARENA_HIGH * (weights + alive_high), artifact.engine
        if engine is not None and engine.activation_bytes is not None:
            # The builder says it, for the largest shape that the engine takes.
            alive_high = engine.activation_bytes + fed
            alive_low, weights = min(alive_low, alive_high), engine.weight_bytes or weights
            held = (artifact.size_bytes or weights) + alive_high
        low = device.context_bytes.value * _CONTEXT_LOW + weights + alive_low
        high = max(low, device.context_bytes.value * _CONTEXT_HIGH + held + _GPU_WORKSPACE_HIGH)
    what = "weights, activations, workspace and CUDA context" if gpu else "weights and activations"
    return Memory(
        status="estimated",
        peak=round((low * high) ** 0.5),
        low=round(low),
        high=round(high),
        method=f"sum of {what}",
        reason=f"sum of {what}; the range covers what allocators keep and how many copies of the weights there are",
    )
