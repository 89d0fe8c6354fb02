"""Incremental decoding of CRT-Deep: keys and values per loop, convolution inputs per cycle.

Which tokens go through which loop when, and which wait, is the rule of :mod:`edgeformer.runtimes.decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeformer.artifacts.errors import InputError
from edgeformer.models.crt.model import CRT, TRM, TRMCycle

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v of the new tokens) → what they attend to among all tokens so far, all [B, H, n, D]; keeps k and v"""


def require_causal(model: CRT) -> None:
    """Raises InputError for a model that looks ahead: nothing that was computed for its tokens can be kept."""
    if not model.causal:
        raise InputError(
            "cached decoding needs a causal model: in this one a token's state depends on the tokens after it "
            "(model.causal: false), so nothing that was computed can be kept"
        )


def convolution_context(trm: TRM) -> int:
    """Rows of a chain's convolution cache: the sum of 2 · dilation over its cycles."""
    return sum(cycle.context for cycle in trm.cycles if isinstance(cycle, TRMCycle))


def cached_chain(trm: TRM, h: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """A TRM chain on new tokens, after those that came before.

    Args:
        h: new tokens, [B, n, C].
        before: the last 2 · dilation inputs of every cycle, one cycle after the other, [B, convolution_context, C];
            zeros in front of a text.

    Returns:
        The chain's result [B, n, C], and the cache behind the new tokens, shaped like ``before``.
    """
    cycles = [cycle for cycle in trm.cycles if isinstance(cycle, TRMCycle)]
    contexts = [cycle.context for cycle in cycles]
    if not any(contexts):
        for cycle in cycles:
            h = cycle.forward(h)
        return h, before
    known = []
    for cycle, earlier in zip(cycles, torch.split(before, contexts, dim=1), strict=True):
        known.append(torch.cat((earlier, h), dim=1))
        h = cycle.forward(h, known[-1])
    if torch.onnx.is_in_onnx_export():
        return h, torch.cat(known, dim=1).index_select(1, _last_rows(contexts, h.shape[1]))
    return h, torch.cat([inputs[:, -rows:] for inputs, rows in zip(known, contexts, strict=True)], dim=1)


def _last_rows(contexts: Sequence[int], new: int) -> Tensor:
    """Which rows to keep of all cycles' inputs one after the other: the last of each, int64 [convolution_context].

    So a graph has one Gather for what would be a Slice of every cycle. In front of a row are the new tokens of its own
    cycle, whose inputs are ``context + new`` long, and of every one before.
    """
    cycles = [cycle for cycle, rows in enumerate(contexts, start=1) for _ in range(rows)]
    return torch.arange(len(cycles)) + torch.tensor(cycles) * new


def cached_embedding(model: CRT, input_ids: Tensor, positions: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings of new tokens (eq. 1), and the convolution cache behind them.

    input_ids, positions int64 [B, n]; before as in :func:`cached_chain` → [B, n, C] and a cache like ``before``.
    """
    h, after = cached_chain(model.refine, model.projection(model.tokens(input_ids)), before)
    return h + model.positions(positions), after


def cached_block(model: CRT, x: Tensor, encoding: Tensor, attend: Attend, before: Tensor) -> tuple[Tensor, Tensor]:
    """New tokens through the shared block once (eq. 3), and the convolution cache behind them.

    Args:
        x: [B, n, C].
        encoding: of the loop, [C] or [1, C].
        attend: attention with what is kept of the earlier tokens.
        before: as in :func:`cached_chain`.
    """
    x = x + encoding.to(x.dtype)
    x = model.norm1(x + model.attention.combine(attend(*model.attention.project(x))))
    h, after = cached_chain(model.trm, x, before)
    result: Tensor = model.norm2(x + h)
    return result, after


class _KeysValues:
    """Keys and values of one loop, in buffers that double when they are full: [B, H, capacity, D]."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None  # keys, then values
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of new tokens to all tokens up to each; q, k, v [B, H, n, D] → the same shape."""
        new, known = q.shape[2], self.length + k.shape[2]
        if self._kept is None or known > self._kept.shape[3]:
            capacity = max(64, 1 << (known - 1).bit_length())
            grown = k.new_empty(2, *k.shape[:2], capacity, k.shape[3])
            if self._kept is not None:
                grown[:, :, :, : self.length] = self._kept[:, :, :, : self.length]
            self._kept = grown
        self._kept[0, :, :, self.length : known] = k
        self._kept[1, :, :, self.length : known] = v
        self.length = known
        keys, values = self._kept[:, :, :, :known]
        # A single query sees everything; several see everything before them and their own triangle.
        mask = None if new == 1 else torch.ones(new, known, dtype=torch.bool, device=q.device).tril(known - new)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


class CachedLoops:
    """What decoding computes, loop by loop, for one text or several of the same length.

    ``model``: in evaluation mode. Raises InputError where it looks ahead.
    """

    def __init__(self, model: CRT) -> None:
        require_causal(model)
        self._model = model
        self._refine: Tensor | None = None
        self._trm: list[Tensor | None] = [None] * model.loops
        self._attention = [_KeysValues() for _ in range(model.loops)]
        self.loops, self.max_positions, self.device = model.loops, model.max_positions, model.head.weight.device

    @torch.inference_mode()
    def embed(self, input_ids: Tensor, start: int, *, keep: bool) -> Tensor:
        """Embeddings [B, n, C] of the next tokens.

        Args:
            input_ids: int64 [B, n].
            start: place of the first of them.
            keep: False: forget them again.
        """
        places = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)[None]
        before = self._start(self._refine, self._model.refine, input_ids)
        h, after = cached_embedding(self._model, input_ids, places, before)
        if keep:
            self._refine = after
        return h

    @torch.inference_mode()
    def run_loop(self, number: int, x: Tensor, *, keep: bool) -> Tensor:
        """New tokens through one loop, with what is kept of the earlier ones.

        Args:
            number: of the loop, from 0.
            x: [B, n, C]; the tokens follow, without a gap, those that went through this loop before.
            keep: False: forget them again.
        """
        model, kept = self._model, self._attention[number]
        length = kept.length
        before = self._start(self._trm[number], model.trm, x)
        x, after = cached_block(model, x, model.loop_encodings[number], kept.attend, before)
        if keep:
            self._trm[number] = after
        else:
            kept.length = length
        return x

    @torch.inference_mode()
    def logits(self, state: Tensor, loop: int) -> Tensor:
        """Next-token logits float32 [B, V] of ``state`` [B, C], a token's after ``loop``."""
        result: Tensor = self._model.head_of(loop)(state)
        return result.float()

    def _start(self, cache: Tensor | None, trm: TRM, rows: Tensor) -> Tensor:
        """The cache, or the zeros in front of a text of as many rows as ``rows`` has."""
        weight = self._model.head.weight
        return weight.new_zeros(len(rows), convolution_context(trm), weight.shape[1]) if cache is None else cache
