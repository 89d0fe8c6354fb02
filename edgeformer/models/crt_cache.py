"""Incremental decoding of CRT-Deep: keys and values per loop, convolution inputs per cycle, tokens that wait.

**The rule for tokens that left early.** A token that answers after loop e has no state in the loops behind e. Its
hidden state waits in front of loop e + 1. As soon as a later token goes into that loop, all tokens that wait there go
through it first, in one batch, in their order. So every loop sees exactly what it would see without early exit: the
cached result equals the uncached one for any sequence of exits, and early exit costs only the quality of the exit heads
themselves. The work of a token that left is postponed, and saved for good where the text ends before anyone needs it;
done in a batch it reads the weights once for all tokens that waited.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edgeformer.models.crt import CRT, TRM
from edgeformer.models.crt_layers import TRMCycle
from edgeformer.schema.errors import InputError


class _Convolutions:
    """The last inputs of every cycle of a TRM: [B, 2 · dilation, C] each, zeros in front of the text."""

    def __init__(self, trm: TRM) -> None:
        self._trm = trm
        self._inputs: list[Tensor | None] = [None] * len(trm.cycles)

    def run(self, h: Tensor) -> Tensor:
        """The chain on new tokens [B, n, C], after those that came before."""
        for number, cycle in enumerate(self._trm.cycles):
            assert isinstance(cycle, TRMCycle)
            context = cycle.context
            before = self._inputs[number]
            if before is None:
                before = h.new_zeros(h.shape[0], context, h.shape[2])
            if context:
                self._inputs[number] = torch.cat((before, h), dim=1)[:, -context:]
            h = cycle.forward(h, before if context else None)
        return h


class _KeysValues:
    """Keys and values of one loop, in buffers that double when they are full: [B, H, capacity, D]."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, H, n, D]; returns all keys and values so far."""
        end = self.length + k.shape[2]
        if self._keys is None or self._values is None or end > self._keys.shape[2]:
            self._keys, self._values = self._grown(self._keys, k, end), self._grown(self._values, v, end)
        self._keys[:, :, self.length : end] = k
        self._values[:, :, self.length : end] = v
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _grown(self, old: Tensor | None, new: Tensor, end: int) -> Tensor:
        capacity = max(64, 1 << (end - 1).bit_length())
        buffer = new.new_empty(*new.shape[:2], capacity, new.shape[3])
        if old is not None:
            buffer[:, :, : self.length] = old[:, :, : self.length]
        return buffer


class Decoder:
    """One text being read or written, token by token. The model must be causal and in evaluation mode."""

    def __init__(self, model: CRT) -> None:
        if not model.causal:
            raise InputError(
                "cached decoding needs a causal model: in this one a token's state depends on the tokens after it "
                "(model.causal: false), so nothing that was computed can be kept"
            )
        self._model = model
        self._refine = _Convolutions(model.refine)
        self._trm = [_Convolutions(model.trm) for _ in range(model.loops)]
        self._attention = [_KeysValues() for _ in range(model.loops)]
        self._waiting: list[Tensor | None] = [None] * (model.loops + 1)
        self.length = 0

    @torch.inference_mode()
    def read(self, input_ids: Tensor) -> None:
        """Take in the next tokens, int64 [B, n]; no loop is run yet.

        Raises:
            InputError: the text would be longer than the model's position table.
        """
        model, end = self._model, self.length + input_ids.shape[1]
        if end > model.max_positions:
            raise InputError(f"the text has {end} tokens; the model takes at most {model.max_positions}")
        h = self._refine.run(model.projection(model.tokens(input_ids)))
        self._wait(0, h + model.positions.weight[self.length : end])
        self.length = end

    @torch.inference_mode()
    def advance(self, loop: int) -> Tensor:
        """Run every token that waits through the loops up to ``loop``.

        Returns:
            Hidden state of the newest token after ``loop``, [B, C].

        Raises:
            ValueError: the newest token is through this loop already, or nothing was read.
        """
        newest: Tensor | None = None
        for number in range(loop):
            x = self._waiting[number]
            if x is None:
                continue
            self._waiting[number] = None
            x = self._run(number, x)
            self._wait(number + 1, x)
            newest = x[:, -1] if number == loop - 1 else None
        if newest is None:
            raise ValueError(f"no token waits in front of loop {loop}; read one first")
        if loop == self._model.loops:
            self._waiting[loop] = None  # nothing comes after the last loop
        return newest

    def logits(self, state: Tensor, loop: int) -> Tensor:
        """Next-token logits float32 [B, V] of ``state`` [B, C], the newest token's after ``loop``."""
        with torch.inference_mode():
            result: Tensor = self._model.head_of(loop)(state)
        return result.float()

    def _wait(self, number: int, x: Tensor) -> None:
        before = self._waiting[number]
        self._waiting[number] = x if before is None else torch.cat((before, x), dim=1)

    def _run(self, number: int, x: Tensor) -> Tensor:
        model = self._model
        x = x + model.loop_encodings[number].to(x.dtype)
        x = model.norm1(x + self._attend(number, x))
        result: Tensor = model.norm2(x + self._trm[number].run(x))
        return result

    def _attend(self, number: int, x: Tensor) -> Tensor:
        q, k, v = self._model.attention.project(x)
        keys, values = self._attention[number].append(k, v)
        new, known = q.shape[2], keys.shape[2]
        # A single query sees everything; several see everything before them and their own triangle.
        mask = None if new == 1 else torch.ones(new, known, dtype=torch.bool, device=x.device).tril(known - new)
        return self._model.attention.combine(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))
