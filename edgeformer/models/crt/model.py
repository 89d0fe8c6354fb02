"""What training computes in another way than plain torch does, because it takes less time; the same to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nested import nested_tensor_from_jagged
from torch.utils.checkpoint import checkpoint

from edgeformer.models.norms import make_norm


def attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """torch's SDPA, causal. q, k, v [B, H, T, D].

    Args:
        documents: who may attend to whom, bool [B, 1, T, T], lower triangle included; or where the documents of packed
            rows begin, int64 [n + 1], see :func:`apart`; None: each row is one document.
    """
    if documents is not None and documents.ndim == 1:
        return apart(q, k, v, documents)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=documents, is_causal=documents is None)


def apart(q: Tensor, k: Tensor, v: Tensor, begins: Tensor) -> Tensor:
    """Causal attention of each document by itself. q, k, v [B, H, T, D] → the same shape.

    On a CUDA card one kernel of variable lengths computes all of them: flash in half formats, which takes no mask.

    Args:
        begins: where each document begins in the rows one after the other, rising, and their end: int64 [n + 1]. No
            document goes on in the next row.
    """
    shape = q.transpose(1, 2).shape
    if q.device.type == "cuda":
        nested_q, nested_k, nested_v = jagged((q, k, v), begins)
        mixed: Tensor = F.scaled_dot_product_attention(nested_q, nested_k, nested_v, is_causal=True)
        return mixed.transpose(1, 2).values().reshape(shape).transpose(1, 2)
    lengths = begins.diff().tolist()
    pieces = zip(*(torch.split(x.transpose(1, 2).flatten(0, 1), lengths) for x in (q, k, v)), strict=True)
    alone = [_causal(one[0], one[1], one[2]) for one in pieces]
    return torch.cat(alone).view(shape).transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one document: q, k, v [T, H, D] → the same shape."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)


def jagged(tensors: tuple[Tensor, ...], begins: Tensor) -> list[Tensor]:
    """Tensors [B, H, T, D] as nested ones of the documents in them, [n, H, *, D]; ``begins`` as of :func:`apart`."""
    longest = tensors[0].shape[2]
    return [
        nested_tensor_from_jagged(
            x.transpose(1, 2).flatten(0, 1).contiguous(), begins, min_seqlen=1, max_seqlen=longest
        ).transpose(1, 2)
        for x in tensors
    ]


def attention_here(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
    """The same as :func:`attention`; with a gradient, on a CPU, in float32.

    There torch's gradient of it takes twice as long in bfloat16, casts included.
    """
    if not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad):
        return attention(q, k, v, documents)
    with torch.autocast("cpu", enabled=False):
        return attention(q.float(), k.float(), v.float(), documents).to(q.dtype)


class CausalConvolution(torch.autograd.Function):
    """y_t = w₀ x_{t−2d} + w₁ x_{t−d} + w₂ x_t, and its gradient, with one copy of x kept, and no padded one made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dilation: int, positions: Tensor | None) -> Tensor:
        """x [B, T, C], weight [C, 1, 3], positions int64 [B, T]: place of each token in its document → [B, T, C]."""
        ctx.save_for_backward(x, weight, positions)
        ctx.dilation = dilation
        far, near, own = weight.squeeze(1).to(x.dtype).unbind(-1)
        y = x * own
        for tap, back in ((near, dilation), (far, 2 * dilation)):
            if back < x.shape[1]:
                y[:, back:] += _within(x[:, :-back] * tap, positions, back)
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """By x and by the weight."""
        x, weight, positions = ctx.saved_tensors
        far, near, own = weight.squeeze(1).to(x.dtype).unbind(-1)
        by_x, by_tap = slope * own, [(slope * x).sum((0, 1))]
        for tap, back in ((near, ctx.dilation), (far, 2 * ctx.dilation)):
            if back >= x.shape[1]:
                by_tap.append(torch.zeros_like(tap))
                continue
            reached = _within(slope[:, back:], positions, back)
            by_x[:, :-back] += reached * tap
            by_tap.append((reached * x[:, :-back]).sum((0, 1)))
        return by_x, torch.stack(by_tap[::-1], -1).unsqueeze(1).to(weight.dtype), None, None


def _within(values: Tensor, positions: Tensor | None, back: int) -> Tensor:
    """values [B, T − back, C] of the tokens from ``back`` on, 0 where a document began less than ``back`` before."""
    return values if positions is None else values * (positions[:, back:, None] >= back).to(values.dtype)


# The building blocks of CRT-Deep (paper B, section 3.1.2): dilated convolution, TRM cycle, causal attention, norms.


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
        """x [B, T, C] → [B, T, C]; ``documents`` as of :func:`~edgeformer.models.crt.model.attention`."""
        q, k, v = self.project(x)
        return self.combine(self.attend(q, k, v, documents))


def document_mask(positions: Tensor) -> Tensor:
    """Who may attend to whom: earlier tokens of the same document. positions int64 [B, T] → bool [B, 1, T, T]."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


# CRT-Deep (paper B): refined embeddings, one shared block applied L times, exits on the way.


Checkpointing = Literal["none", "loop", "cycles"]
CYCLE_GROUP = 2
"""TRM cycles that are recomputed together with ``checkpointing: cycles``."""

_INITIAL_STD = 0.02


class TRM(nn.Module):
    """A chain of TRM cycles whose dilations go round through ``dilations``."""

    def __init__(self, cycles: int, dilations: Sequence[int], make_cycle: Callable[[int], TRMCycle]) -> None:
        super().__init__()
        self.cycles = nn.ModuleList(make_cycle(dilations[i % len(dilations)]) for i in range(cycles))

    def forward(self, h: Tensor, positions: Tensor | None = None, *, regroup: bool = False) -> Tensor:
        """h [B, T, C] → [B, T, C]; ``regroup``: recompute every two cycles in the backward pass."""
        if not regroup:
            return self._some(h, positions, 0, len(self.cycles))
        for start in range(0, len(self.cycles), CYCLE_GROUP):
            h = _recomputed(self._some, h, positions, start, start + CYCLE_GROUP)
        return h

    def _some(self, h: Tensor, positions: Tensor | None, start: int, stop: int) -> Tensor:
        for number in range(start, min(stop, len(self.cycles))):
            h = self.cycles[number](h, None, positions)
        return h


class CRT(nn.Module):
    """A decoder whose single block is looped: x ← norm₁(x + e_l + attention), x ← norm₂(x + TRM(x)) (paper B, eq. 1–3).

    Post-norm, as released. The causal model never looks ahead; with ``causal=False`` its convolutions do, as published.
    A *loop* is counted from 1; an *exit* is a loop after which a head can answer, the last loop among them.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        embedding_size: int,
        embedding_projection: bool,
        embedding_cycles: int,
        attention_heads: int,
        ffn_size: int,
        loops: int,
        cycles: int,
        dilations: Sequence[int],
        exits: Sequence[int],
        heads: str,
        max_positions: int,
        dropout: float,
        norm: str,
        norm_eps: float,
        trm: str,
        causal: bool,
    ) -> None:
        super().__init__()
        self.loops, self.max_positions, self.causal = loops, max_positions, causal
        self.exits: tuple[int, ...] = (*exits, loops)
        self.checkpointing: Checkpointing = "none"

        def cycle(dilation: int) -> TRMCycle:
            conv = DilatedConv(hidden_size, dilation, causal=causal) if trm != "linear" else None
            fresh = make_norm(norm, hidden_size, norm_eps)
            return TRMCycle(hidden_size, ffn_size, kind=trm, conv=conv, norm=fresh, dropout=dropout)

        self.tokens = nn.Embedding(vocab_size, embedding_size)
        self.projection = nn.Linear(embedding_size, hidden_size) if embedding_projection else nn.Identity()
        self.refine = TRM(embedding_cycles, dilations, cycle)
        self.positions = nn.Embedding(max_positions, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.loop_encodings = nn.Parameter(torch.empty(loops, hidden_size))
        self.attention = CausalAttention(hidden_size, attention_heads, dropout)
        self.norm1 = make_norm(norm, hidden_size, norm_eps)
        self.trm = TRM(cycles, dilations, cycle)
        self.norm2 = make_norm(norm, hidden_size, norm_eps)
        names = {"shared": ["shared"], "separate": [str(loop) for loop in exits], "tied": []}[heads]
        self.exit_heads = nn.ModuleDict({name: nn.Linear(hidden_size, vocab_size, bias=False) for name in names})
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=_INITIAL_STD)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.loop_encodings, std=_INITIAL_STD)
        # A chain of n residual sums grows like √n; the last matrix of each link is smaller by that much.
        for trm in (self.refine, self.trm):
            for cycle in trm.cycles:
                last = cycle.lin2 if cycle.lin2 is not None else cycle.pointwise
                if isinstance(last, nn.Linear):
                    nn.init.normal_(last.weight, std=_INITIAL_STD / math.sqrt(len(trm.cycles)))

    def head_of(self, loop: int) -> nn.Linear:
        """The head that answers after ``loop``."""
        for name in ("shared", str(loop)):
            if loop != self.loops and name in self.exit_heads:
                chosen = self.exit_heads[name]
                assert isinstance(chosen, nn.Linear)
                return chosen
        return self.head

    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """TRM_refine(Linear(Embed(x))) + PosEmbed(p) (eq. 1). input_ids, positions int64 [B, T] → [B, T, C]."""
        h = self.refine(self.projection(self.tokens(input_ids)), positions)
        first = self.positions.weight[: input_ids.shape[1]]
        places = first if positions is None else self.positions(positions)
        result: Tensor = self.dropout(h + places)
        return result

    def block(
        self, x: Tensor, encoding: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """One pass through the shared block with a loop's encoding [C]: [B, T, C] → [B, T, C] (eq. 3)."""
        regroup = self.training and self.checkpointing == "cycles"
        x = x + encoding.to(x.dtype)
        x = _recomputed(self._attend, x, documents) if regroup else self._attend(x, documents)
        result: Tensor = self.norm2(x + self.trm(x, positions, regroup=regroup))
        return result

    def _attend(self, x: Tensor, documents: Tensor | None) -> Tensor:
        result: Tensor = self.norm1(x + self.attention(x, documents))
        return result

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        until: int | None = None,
        every: bool = False,
        documents: Tensor | None = None,
    ) -> dict[int, Tensor]:
        """Hidden states after every exit.

        Args:
            input_ids: int64 [B, T], T ≤ max_positions.
            positions: place of each token in its document, int64 [B, T]; None: each row is one document.
            until: the last loop to compute; None: all of them.
            every: those after every loop, and before the first one as loop 0.
            documents: where those of packed rows begin, int64 [n + 1], for attention without a mask (see
                :func:`~edgeformer.models.crt.model.apart`); None: a mask is made of ``positions``.

        Returns:
            loop → [B, T, C], in rising order; ``head_of(loop)`` makes logits of it.
        """
        if documents is None and positions is not None:
            documents = document_mask(positions)
        x = self.embed(input_ids, positions)
        states = {0: x} if every else {}
        for loop in range(1, (until or self.loops) + 1):
            encoding = self.loop_encodings[loop - 1]
            if self.training and self.checkpointing == "loop":
                x = _recomputed(self.block, x, encoding, positions, documents)
            else:
                x = self.block(x, encoding, positions, documents)
            if every or loop in self.exits:
                states[loop] = x
        return states

    def logits(self, input_ids: Tensor, loop: int | None = None) -> Tensor:
        """Next-token logits float32 [B, T, V] of the exit after ``loop`` (None: the last). input_ids int64 [B, T]."""
        loop = loop or self.loops
        result: Tensor = self.head_of(loop)(self(input_ids, until=loop)[loop])
        return result.float()


def _recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    result: Tensor = checkpoint(function, *arguments, use_reentrant=False)
    return result
