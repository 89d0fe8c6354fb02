"""CRT-Deep (paper B): refined embeddings, one shared block applied L times, exits on the way, incremental decoding.

Shapes: B rows, T tokens, n new tokens, C width, H heads, D = C / H, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.artifacts.errors import InputError
from edgeformer.models.blocks.causal import (
    Attend,
    CachedModel,
    KeyValueCache,
    LanguageModel,
    RunLoop,
    cpu_attention,
    recomputed,
)
from edgeformer.models.blocks.layers import INITIAL_STD, NORMS, initialize_weights
from edgeformer.models.blocks.segments import Mask
from edgeformer.models.crt import CRTConfig

KERNEL = 3
"""Taps of every convolution (paper B, Table 1)."""
CYCLE_GROUP = 2
"""TRM cycles that are recomputed together with ``checkpointing: cycles``."""


class CausalConvolution(torch.autograd.Function):
    """y_t = w₀ x_{t−2d} + w₁ x_{t−d} + w₂ x_t with a gradient that stores x once and makes no padded copy.

    Shapes: x [B, T, C], weight [C, 1, 3], positions in the document int64 [B, T] → [B, T, C].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dilation: int, positions: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, positions)
        ctx.dilation = dilation
        w0, w1, w2 = weight.squeeze(1).to(x.dtype).unbind(-1)
        y = x * w2
        for tap, distance in ((w1, dilation), (w0, 2 * dilation)):
            if distance < x.shape[1]:
                y[:, distance:] += _zero_outside(x[:, :-distance] * tap, positions, distance)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, positions = ctx.saved_tensors
        w0, w1, w2 = weight.squeeze(1).to(x.dtype).unbind(-1)
        grad_x, grad_taps = grad * w2, [(grad * x).sum((0, 1))]
        for tap, distance in ((w1, ctx.dilation), (w0, 2 * ctx.dilation)):
            if distance >= x.shape[1]:
                grad_taps.append(torch.zeros_like(tap))
                continue
            reaching = _zero_outside(grad[:, distance:], positions, distance)
            grad_x[:, :-distance] += reaching * tap
            grad_taps.append((reaching * x[:, :-distance]).sum((0, 1)))
        return grad_x, torch.stack(grad_taps[::-1], -1).unsqueeze(1).to(weight.dtype), None, None


def _zero_outside(values: Tensor, positions: Tensor | None, distance: int) -> Tensor:
    """Zero values [B, T − distance, C] of tokens whose document begins less than ``distance`` tokens before them."""
    return values if positions is None else values * (positions[:, distance:, None] >= distance).to(values.dtype)


class DilatedConv(nn.Module):
    """Depthwise convolution with three taps, ``dilation`` positions apart, without bias (paper B, section 3.1.2).

    If not causal, as published, y_t = w₀ x_{t−d} + w₁ x_t + w₂ x_{t+d} reveals the next tokens. Shifted products are
    faster on CPUs than ``conv1d`` between two transpositions.
    """

    def __init__(self, size: int, dilation: int, *, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, 1, KERNEL))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as in torch.nn.Conv1d
        self.dilation, self.causal = dilation, causal

    def forward(self, x: Tensor, with_past: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Convolve x [B, T, C]. ``with_past`` are the 2 · dilation inputs before x, then x; None: zeros precede x.

        ``positions`` [B, T] are those in the document, so that no tap reaches into the one before; None: x is one
        document.
        """
        if torch.is_autocast_enabled(x.device.type):  # as conv1d does
            x = x.to(torch.get_autocast_dtype(x.device.type))
        d, length = self.dilation, x.shape[1]
        if with_past is not None and torch.onnx.is_in_onnx_export():
            # Decoding one token costs time per operator: these are three, with the same indices for all loops; shifted
            # products are seven. torch's own indexing takes one dimension only, which adds two Reshapes to the graph.
            indices = torch.arange(length)[:, None] + torch.arange(KERNEL) * d
            shape = (with_past.shape[0], length, KERNEL, with_past.shape[2])
            windows = torch.onnx.ops.symbolic(
                "Gather", (with_past, indices), {"axis": 1}, dtype=with_past.dtype, shape=shape
            )
            return (windows * self.weight.squeeze(1).T).sum(2)
        if self.training and self.causal and with_past is None:
            return CausalConvolution.apply(x, self.weight, d, positions)  # type: ignore[no-untyped-call]
        w0, w1, w2 = self.weight.squeeze(1).to(x.dtype).unbind(-1)  # each [C]
        if not self.causal:
            padded = F.pad(x, (0, 0, d, d))
            return padded[:, :length] * w0 + x * w1 + padded[:, 2 * d : 2 * d + length] * w2
        padded = F.pad(x, (0, 0, 2 * d, 0)) if with_past is None else with_past.to(x.dtype)
        x0, x1 = padded[:, :length], padded[:, d : d + length]
        if positions is not None:
            x0 = x0 * (positions >= 2 * d).to(x.dtype)[..., None]
            x1 = x1 * (positions >= d).to(x.dtype)[..., None]
        return x0 * w0 + x1 * w1 + x * w2


class TRMCycle(nn.Module):
    """h + Dropout(MLP(Norm(Conv(h)))), Conv = depthwise dilated → GELU (erf) → pointwise (paper B, eq. 2).

    ``kind`` is a row of Table 3: ``conv_linear`` has all parts, ``conv`` no MLP, ``linear`` no convolution,
    ``depthwise`` no pointwise convolution. An output depends on ``context`` earlier inputs.
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
        self.context = (KERNEL - 1) * conv.dilation if conv is not None else 0

    def forward(self, h: Tensor, with_past: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """h [B, T, C] → [B, T, C]; other arguments as in :meth:`DilatedConv.forward`."""
        x = h
        if self.depthwise is not None:
            x = F.gelu(self.depthwise(x, with_past, positions))
        if self.pointwise is not None:
            x = self.pointwise(x)
        x = self.norm(x)
        if self.lin1 is not None and self.lin2 is not None:
            x = self.lin2(F.gelu(self.lin1(x)))
        return h + self.dropout(x)


class TRM(nn.Module):
    """A chain of TRM cycles that take their dilations from ``dilations`` in turn."""

    def __init__(self, number: int, dilations: Sequence[int], make_cycle: Callable[[int], TRMCycle]) -> None:
        super().__init__()
        cycles = [make_cycle(dilations[i % len(dilations)]) for i in range(number)]
        self.cycles = nn.ModuleList(cycles)
        self.contexts = [cycle.context for cycle in cycles]  # rows of the convolution cache of each cycle

    def forward(self, h: Tensor, positions: Tensor | None = None, *, recompute: bool = False) -> Tensor:
        """h [B, T, C] → [B, T, C]; ``recompute``: recompute groups of cycles in the backward pass."""
        if not recompute:
            return self._run(h, positions, 0, len(self.cycles))
        for start in range(0, len(self.cycles), CYCLE_GROUP):
            h = recomputed(self._run, h, positions, start, start + CYCLE_GROUP)
        return h

    def _run(self, h: Tensor, positions: Tensor | None, start: int, stop: int) -> Tensor:
        for number in range(start, min(stop, len(self.cycles))):
            h = self.cycles[number](h, None, positions)
        return h

    def forward_cached(self, h: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the chain to new tokens [B, n, C]; also return the cache after them.

        ``cache`` has the last ``context`` inputs of every cycle, [B, sum(contexts), C]; zeros at the start.
        """
        contexts = self.contexts
        if not any(contexts):
            return self._run(h, None, 0, len(self.cycles)), cache
        inputs = []
        for cycle, past in zip(self.cycles, torch.split(cache, contexts, dim=1), strict=True):
            inputs.append(torch.cat((past, h), dim=1))
            h = cycle(h, inputs[-1])
        if torch.onnx.is_in_onnx_export():
            # One Gather instead of a Slice per cycle: cycle i has context_i + n inputs, of which the last context_i
            # stay. Row j of the cache comes after the new tokens of its own cycle and of all earlier ones.
            cycle_numbers = [number for number, rows in enumerate(contexts, start=1) for _ in range(rows)]
            indices = torch.arange(len(cycle_numbers)) + torch.tensor(cycle_numbers) * h.shape[1]
            return h, torch.cat(inputs, dim=1).index_select(1, indices)
        return h, torch.cat([x[:, -rows:] for x, rows in zip(inputs, contexts, strict=True)], dim=1)


class CausalAttention(nn.Module):
    """Multi-head attention without biases through torch's SDPA; scale D^-0.5. q, k, v are one product."""

    def __init__(self, size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_size = heads, size // heads
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        # On the result: dropout of the attention weights would need the T × T matrix in memory.
        self.dropout = nn.Dropout(dropout)
        self.attend = cpu_attention

    def forward(self, x: Tensor, mask: Mask = None, attend: Attend | None = None) -> Tensor:
        """x [B, T, C] → [B, T, C]; ``mask`` of :func:`attention_arguments`; ``attend`` for cached tokens."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.head_size)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.attend(q, k, v, mask) if attend is None else attend(q, k, v)  # [B, H, T, D]
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))


class CRT(LanguageModel):
    """A decoder with one looped block: x ← norm₁(x + e_l + attention), x ← norm₂(x + TRM(x)) (paper B, eq. 1–3).

    Post-norm, as in the released code. The causal model never looks ahead; with ``causal=False`` its convolutions do,
    as published. Loops count from 1. An exit is a loop after which a head answers; the last loop is one.
    """

    def __init__(self, config: CRTConfig) -> None:
        super().__init__(config, (*config.exits, config.loops))
        size, vocabulary, self.causal = config.hidden_size, config.vocab_size, config.causal

        make_norm = partial(NORMS[config.norm], size, eps=config.norm_eps)

        def make_cycle(dilation: int) -> TRMCycle:
            conv = DilatedConv(size, dilation, causal=config.causal) if config.trm != "linear" else None
            return TRMCycle(size, config.ffn_size, kind=config.trm, conv=conv, norm=make_norm(), dropout=config.dropout)

        self.tokens = nn.Embedding(vocabulary, config.embedding_size)
        self.projection = nn.Linear(config.embedding_size, size) if config.embedding_projection else nn.Identity()
        self.refine = TRM(config.embedding_cycles, config.dilations, make_cycle)
        self.positions = nn.Embedding(config.max_positions, size)
        self.dropout = nn.Dropout(config.dropout)
        self.loop_encodings = nn.Parameter(torch.empty(config.loops, size))
        self.attention = CausalAttention(size, config.attention_heads, config.dropout)
        self.norm1 = make_norm()
        self.trm = TRM(config.cycles, config.dilations, make_cycle)
        self.norm2 = make_norm()
        names = {"shared": ["shared"], "separate": [str(loop) for loop in config.exits], "tied": []}[config.heads]
        self.exit_heads = nn.ModuleDict({name: nn.Linear(size, vocabulary, bias=False) for name in names})
        self.head = nn.Linear(size, vocabulary, bias=False)
        initialize_weights(self)
        nn.init.normal_(self.loop_encodings, std=INITIAL_STD)
        # A sum of n residuals grows like √n; the last matrix of each cycle is smaller by that factor.
        for chain in (self.refine, self.trm):
            for cycle in chain.cycles:
                last = cycle.lin2 if cycle.lin2 is not None else cycle.pointwise
                if isinstance(last, nn.Linear):
                    nn.init.normal_(last.weight, std=INITIAL_STD / math.sqrt(len(chain.cycles)))

    def head_of(self, loop: int) -> nn.Linear:
        names = [name for name in ("shared", str(loop)) if name in self.exit_heads and loop != self.loops]
        head = self.exit_heads[names[0]] if names else self.head
        assert isinstance(head, nn.Linear)
        return head

    def embed(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """TRM_refine(Linear(Embed(x))) + PosEmbed(p) (eq. 1): input_ids, positions int64 [B, T] → [B, T, C]."""
        h = self.refine(self.projection(self.tokens(input_ids)), positions)
        first = self.positions.weight[: input_ids.shape[1]]
        return self.dropout(h + (first if positions is None else self.positions(positions)))

    def embed_cached(self, input_ids: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Embed new tokens, int64 [B, n] → [B, n, C] and the next cache, see :meth:`TRM.forward_cached`."""
        h, next_cache = self.refine.forward_cached(self.projection(self.tokens(input_ids)), cache)
        return h + self.positions(positions), next_cache

    def block(self, x: Tensor, encoding: Tensor, positions: Tensor | None = None, mask: Mask = None) -> Tensor:
        """Apply the shared block with a loop's encoding [C]: [B, T, C] → [B, T, C] (eq. 3)."""
        recompute = self.training and self.checkpointing == "cycles"
        x = x + encoding.to(x.dtype)
        x = recomputed(self._attend, x, mask) if recompute else self._attend(x, mask)
        return self.norm2(x + self.trm(x, positions, recompute=recompute))

    def _attend(self, x: Tensor, mask: Mask) -> Tensor:
        return self.norm1(x + self.attention(x, mask))

    def block_cached(self, x: Tensor, encoding: Tensor, attend: Attend, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the shared block to new tokens [B, n, C] (eq. 3); see :meth:`TRM.forward_cached`."""
        x = x + encoding.to(x.dtype)
        x = self.norm1(x + self.attention(x, attend=attend))
        h, next_cache = self.trm.forward_cached(x, cache)
        result: Tensor = self.norm2(x + h)
        return result, next_cache

    def begin(self, input_ids: Tensor, positions: Tensor | None, mask: Mask) -> tuple[Tensor, RunLoop]:
        return self.embed(input_ids, positions), lambda x, loop: self.block(
            x, self.loop_encodings[loop - 1], positions, mask
        )


class CachedLoops(CachedModel):
    """Caches of a CRT. Raises InputError for a model that looks ahead."""

    def __init__(self, model: CRT) -> None:
        if not model.causal:
            raise InputError(
                "cached decoding needs a causal model, but here a token's state depends on later tokens "
                "(model.causal: false)"
            )
        super().__init__(model)
        self._keys_values = [KeyValueCache() for _ in range(model.loops)]
        # Of the embedding, then of each loop; of a single row until the number of rows is known.
        weight, chains = model.head.weight, (model.refine, *[model.trm] * model.loops)
        self._convolutions = [weight.new_zeros(1, sum(trm.contexts), weight.shape[1]) for trm in chains]

    @torch.inference_mode()
    def embed(self, input_ids: Tensor, start: int, *, keep: bool) -> Tensor:
        """Embed the tokens from position ``start`` on, int64 [B, n] → [B, n, C]; ``keep`` stores them in the cache."""
        positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)[None]
        cache = self._convolutions[0].expand(len(input_ids), -1, -1)
        h, next_cache = self._model.embed_cached(input_ids, positions, cache)
        if keep:
            self._convolutions[0] = next_cache
        return h

    @torch.inference_mode()
    def run_loop(self, number: int, x: Tensor, *, keep: bool) -> Tensor:
        """Run loop ``number``, from 0, on the tokens after those it kept: [B, n, C] → [B, n, C]."""
        kept = self._keys_values[number]
        cache = self._convolutions[number + 1].expand(len(x), -1, -1)
        h, next_cache = self._model.block_cached(x, self._model.loop_encodings[number], kept.attend, cache)
        if keep:
            self._convolutions[number + 1] = next_cache
            kept.length += x.shape[1]
        return h
