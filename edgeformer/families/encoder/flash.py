"""Flash attention through the flash-attn package, where a CUDA card and the package are there."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from edgeformer.families.encoder.model import Attention, sdpa
from edgeformer.formats.errors import install_hint


def _why_not(device_type: str, precision: str) -> str | None:
    """None where flash-attn can run; otherwise what is missing."""
    if device_type != "cuda":
        return f"flash-attn needs a CUDA card and the model runs on the {device_type.upper()}"
    if precision == "fp32":
        return "flash-attn computes in bf16 or fp16 and training.precision is fp32"
    if not torch.cuda.is_available():
        return "flash-attn needs a CUDA card and torch sees none"
    if importlib.util.find_spec("flash_attn") is None:
        return f"the package flash-attn, which is built from source, is not installed: {install_hint('flash')}"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"flash-attn needs compute capability 8.0 or newer; this card has {major}.{minor}"
    return None


def choose_attention(requested: str, device_type: str, precision: str) -> tuple[Attention, str | None]:
    """The attention function for ``attention: sdpa | flash``, and why it is not the requested one (None if it is)."""
    if requested != "flash":
        return sdpa, None
    reason = _why_not(device_type, precision)
    return (sdpa, reason) if reason else (flash, None)


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """flash-attn on [B, H, S, D] in bf16 or fp16; padded rows go through its variable-length kernel.

    flash-attn computes in half precision only, so float32 inputs (evaluation without autocast) go through SDPA; so does
    the last layer, whose single query has nothing to gain from it.
    """
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[2] != k.shape[2]:
        return sdpa(q, k, v, mask, dropout)
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, H, D]
    if mask is None:
        mixed: Tensor = flash_attn_func(q, k, v, dropout_p=dropout)
        return mixed.transpose(1, 2)
    real = mask[:, 0, 0] == 0  # [B, S]
    lengths = real.sum(-1, dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max())
    packed = flash_attn_varlen_func(q[real], k[real], v[real], ends, ends, longest, longest, dropout_p=dropout)
    mixed = q.new_zeros(q.shape)
    mixed[real] = packed
    return mixed.transpose(1, 2)
