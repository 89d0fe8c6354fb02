"""The building blocks of CRT-Deep (paper B, section 3.1.2): dilated convolution, TRM cycle, causal attention, norms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.families.crt.kernels import CausalConvolution, attention_here

KERNEL = 3
"""Taps of every convolution (paper B, Table 1)."""


class DilatedConv(nn.Module):
    """Depthwise convolution with three taps, ``dilation`` positions apart, without bias.

    Causal: y_t = w₀ x_{t−2d} + w₁ x_{t−d} + w₂ x_t. Otherwise, as published, y_t = w₀ x_{t−d} + w₁ x_t + w₂ x_{t+d},
    which shows every position what comes next. Written as three shifted products: that is faster on CPUs than
    ``conv1d`` between two transpositions, and a tap can be left out where it would cross a document's boundary.
    """

    def __init__(self, size: int, dilation: int, *, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, 1, KERNEL))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as torch.nn.Conv1d
        self.dilation, self.causal = dilation, causal

    @property
    def context(self) -> int:
        """Earlier inputs that an output depends on: 2 · dilation (causal)."""
        return (KERNEL - 1) * self.dilation

    def forward(self, x: Tensor, known: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Convolve.

        Args:
            x: [B, T, C].
            known: x behind the ``context`` inputs in front of it, [B, context + T, C]; None: those are zeros.
            positions: place of each token in its document, int64 [B, T]; a tap that would reach into the document
                before is left out. None: x is one document.

        Returns:
            [B, T, C].
        """
        if torch.is_autocast_enabled(x.device.type):  # as conv1d would do by itself
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if known is not None and torch.onnx.is_in_onnx_export():
            return self._by_windows(known, x.shape[1])
        if self.training and self.causal and known is None:
            y: Tensor = CausalConvolution.apply(x, self.weight, self.dilation, positions)  # type: ignore[no-untyped-call]
            return y
        d, length = self.dilation, x.shape[1]
        first, second, third = self.weight.squeeze(1).to(x.dtype).unbind(-1)  # each [C]
        if not self.causal:
            padded = F.pad(x, (0, 0, d, d))
            return padded[:, :length] * first + x * second + padded[:, 2 * d : 2 * d + length] * third
        padded = F.pad(x, (0, 0, 2 * d, 0)) if known is None else known.to(x.dtype)
        far, near = padded[:, :length], padded[:, d : d + length]
        if positions is not None:
            far = far * (positions >= 2 * d).to(x.dtype)[..., None]
            near = near * (positions >= d).to(x.dtype)[..., None]
        return far * first + near * second + x * third

    def _by_windows(self, known: Tensor, new: int) -> Tensor:
        """The last ``new`` rows of ``known`` [B, context + new, C], convolved → [B, new, C].

        For graphs: one that writes a token spends its time on operators, not on numbers. These are three, and the
        places are found once for all loops; shifted products are seven.
        """
        places = torch.arange(new)[:, None] + torch.arange(KERNEL) * self.dilation
        # Torch takes places of one dimension only, so that its graph would have two Reshapes more.
        shape = (known.shape[0], new, KERNEL, known.shape[2])
        windows = torch.onnx.ops.symbolic("Gather", (known, places), {"axis": 1}, dtype=known.dtype, shape=shape)
        return (windows * self.weight.squeeze(1).T).sum(2)


class TRMCycle(nn.Module):
    """h + Dropout(MLP(Norm(Conv(h)))), Conv = depthwise dilated → GELU → pointwise (paper B, eq. 2).

    ``kind`` picks a row of Table 3: ``conv_linear`` is all of it, ``conv`` has no MLP, ``linear`` no convolution,
    ``depthwise`` no pointwise convolution. GELU is the exact one (erf).
    """

    def __init__(
        self, size: int, inner: int, *, kind: str, conv: DilatedConv | None, norm: nn.Module, dropout: float
    ) -> None:
        super().__init__()
        self.depthwise = conv
        self.pointwise = nn.Linear(size, size) if kind in ("conv_linear", "conv") else None
        self.norm = norm
        self.lin1 = nn.Linear(size, inner) if kind != "conv" else None
        self.lin2 = nn.Linear(inner, size) if kind != "conv" else None
        self.dropout = nn.Dropout(dropout)

    @property
    def context(self) -> int:
        """Earlier inputs that an output depends on."""
        return self.depthwise.context if self.depthwise is not None else 0

    def forward(self, h: Tensor, known: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """h [B, T, C], known and positions as of :meth:`DilatedConv.forward` → [B, T, C]."""
        x = h
        if self.depthwise is not None:
            x = F.gelu(self.depthwise(x, known, positions))
        if self.pointwise is not None:
            x = self.pointwise(x)
        x = self.norm(x)
        if self.lin1 is not None and self.lin2 is not None:
            x = self.lin2(F.gelu(self.lin1(x)))
        result: Tensor = h + self.dropout(x)
        return result


class CausalAttention(nn.Module):
    """Multi-head attention without biases through torch's SDPA; scale head_size^-0.5. q, k, v are one product."""

    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_size = heads, size // heads
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        # On the result, not on the attention weights: those would need the T × T matrix in memory.
        self.dropout = nn.Dropout(dropout)
        self.attend = attention_here

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, C] → q, k, v, each [B, H, T, D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_size)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def combine(self, mixed: Tensor) -> Tensor:
        """mixed [B, H, T, D] → [B, T, C]."""
        result: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return result

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """x [B, T, C] → [B, T, C]; ``documents`` as of :func:`~edgeformer.families.crt.kernels.attention`."""
        q, k, v = self.project(x)
        return self.combine(self.attend(q, k, v, documents))


def document_mask(positions: Tensor) -> Tensor:
    """Who may attend to whom: earlier tokens of the same document. positions int64 [B, T] → bool [B, 1, T, T]."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]
