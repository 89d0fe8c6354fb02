"""Layers that several models share: norms that compute in float32, attention for export, FP16 weights."""

import copy
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

INITIAL_STD = 0.02
MASKED = -1e4
"""Added to the attention score of a hidden token: zero after softmax, and representable in every float type."""


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · γ over the last dimension (paper A, "RMS Normalization").

    Computed in float32 for every input type: x² overflows FP16 from |x| = 256 on.
    """

    keeps_float32 = True

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → [..., size] of the same type."""
        exact = to_float32(x)
        # Division by the root, not multiplication with rsqrt: runtimes recognise and fuse this form.
        scaled = exact / torch.sqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in float32; the result has the input's type."""

    keeps_float32 = True

    def forward(self, input: Tensor) -> Tensor:
        """x [..., size] → [..., size] of the same type."""
        exact = to_float32(input)
        return F.layer_norm(exact, self.normalized_shape, self.weight, self.bias, self.eps).to(input.dtype)


class TokenBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of every channel over all tokens of a batch; running statistics in evaluation."""

    keeps_float32 = True

    def forward(self, input: Tensor) -> Tensor:
        """x [B, T, C] → [B, T, C] of the same type."""
        flat = input.reshape(-1, input.shape[-1])  # [B·T, C]
        return super().forward(to_float32(flat)).to(input.dtype).view_as(input)


def to_float32(x: Tensor) -> Tensor:
    """Convert to float32; float64, which tests compute in, stays."""
    return x if x.dtype == torch.float64 else x.float()


NORMS: dict[str, Callable[..., nn.Module]]
NORMS = {"layer": LayerNorm, "rms": RMSNorm, "batch": TokenBatchNorm, "none": nn.Identity}
"""Constructors by name, of (size, eps=…) (paper B, normalisation ablation)."""


def initialize_weights(model: nn.Module) -> None:
    """Draw matrices and tables from a normal distribution, in place, and set biases to zero."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def fp16_copy(model: M) -> M:
    """Copy a model with its matrices and biases in FP16: half the bytes.

    Modules with ``keeps_float32`` (norms), running statistics and rotary tables share their float32 with ``model``.
    """
    exact_modules = (module for module in model.modules() if getattr(module, "keeps_float32", False))
    exact = {id(parameter) for module in exact_modules for parameter in module.parameters(recurse=False)}
    copies = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copies |= {id(p): nn.Parameter(p.detach().half()) for p in model.parameters() if id(p) not in exact}
    return copy.deepcopy(model, copies)


def padding_mask(h: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Return what is added to attention scores, 0 or MASKED, in h's type: attention_mask [B, S] → [B, 1, 1, S]."""
    return None if attention_mask is None else (1 - attention_mask.to(h.dtype))[:, None, None, :] * MASKED


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """Compute softmax(q kᵀ · scale + mask) v for export: q [B, H, Q, D], k and v [B, H, S, D] → [B, H, Q, D].

    The exporter turns torch's function into a copy of all keys, scaled and transposed. Scaling only the queries, before
    the product, avoids that, and the product cannot overflow FP16. ``scale`` is D^-0.5 by default.
    """
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def rotary_table(positions: int, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of m·θ_i, θ_i = theta^(−2i/D), float32 [positions, D / 2] each (paper A, "RoPE")."""
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


class Rotation(nn.Module):
    """Rotates pairs of x, (x_2i, x_2i+1) as trained or (x_i, x_{i + D/2}), by their position's angle (paper A, "RoPE").

    The result has the first members of all pairs before the second ones: attention only takes products of two rotated
    vectors, whose common order does not matter, and not interleaving saves two operators per call.
    """

    keeps_float32 = True  # a module, so that a traced graph shows which nodes compute in float32

    def __init__(self, *, has_neighbours: bool) -> None:
        super().__init__()
        self.has_neighbours = has_neighbours

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., S, H, D] or [..., S, D], cos and sin [S, 1, D / 2] or [S, D / 2] in float32 → x's shape and type."""
        first, second = (x[..., 0::2], x[..., 1::2]) if self.has_neighbours else x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    """FFN(x) = W3 (SiLU(W1 x) ⊙ (W2 x)) (paper A, "SwiGLU"); W1 and W2 are one matrix, W1 first."""

    def __init__(self, size: int, inner: int, *, bias: bool = True) -> None:
        super().__init__()
        self.w12 = nn.Linear(size, 2 * inner, bias=bias)
        self.w3 = nn.Linear(inner, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → [..., size]."""
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


def split_linear(joint: nn.Linear, sizes: Sequence[int]) -> list[nn.Linear]:
    """Return a layer for each group of outputs, so many outputs each, whose weights are views of the joint ones."""
    biases = [None] * len(sizes) if joint.bias is None else torch.split(joint.bias.detach(), [*sizes])
    parts = []
    for weight, bias in zip(torch.split(joint.weight.detach(), [*sizes]), biases, strict=True):
        part = nn.Linear(joint.in_features, len(weight), bias=bias is not None, device="meta")
        part.weight = nn.Parameter(weight)
        if bias is not None:
            part.bias = nn.Parameter(bias)
        parts.append(part)
    return parts


class ExportedSwiGLU(nn.Module):
    """:class:`SwiGLU` with separate products for W1 and W2, whose weights are views: splitting one product is a copy.

    ``qkv`` is not split: TensorRT would join its products differently in each loop and store their weights twice.
    """

    def __init__(self, trained: SwiGLU) -> None:
        super().__init__()
        self.gate, self.value = split_linear(trained.w12, [trained.w12.out_features // 2] * 2)
        self.w3 = trained.w3

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] → [..., size]."""
        return self.w3(F.silu(self.gate(x)) * self.value(x))
