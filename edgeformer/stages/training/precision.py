"""Which number format training computes in on this machine."""

from __future__ import annotations

from pathlib import Path

import torch

from edgeformer.formats.errors import InputError


def resolve_precision(requested: str, device_type: str) -> str:
    """``auto`` becomes bf16 where the hardware multiplies in it, else fp32.

    Raises:
        InputError: fp16 training on a CPU (torch computes it hundreds of times slower than fp32).
    """
    if requested == "fp16" and device_type == "cpu":
        raise InputError("training.precision: fp16 trains on CUDA cards only; use fp32, bf16 or auto on a CPU")
    if requested != "auto":
        return requested
    if device_type == "cuda":
        return "bf16" if torch.cuda.get_device_capability()[0] >= 8 else "fp16"
    return "bf16" if _cpu_multiplies_bf16() else "fp32"


def _cpu_multiplies_bf16() -> bool:
    # torch only says whether bf16 *works*, which it does on AVX2 by emulation, tens of times slower than fp32.
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(f" {feature}" in flags for feature in ("avx512_bf16", "amx_bf16", "bf16 "))
