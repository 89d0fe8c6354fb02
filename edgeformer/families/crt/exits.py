"""CRT-Deep in the pieces that export writes: all exits at once, one loop, readout; with and without caches.

A host runs embed, then the loop graph as often as it likes, then a readout. The pieces with caches take and return what
is kept of earlier tokens, so that the same graphs read a prompt, write a token, and let waiting tokens catch up (see
:mod:`edgeformer.families.crt.cache`, whose functions they are made of). ``past`` is 0 at the start of a text.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edgeformer.families.crt.cache import cached_block, cached_embedding, require_causal
from edgeformer.families.crt.model import CRT
from edgeformer.families.tracing import logits_name, state_name


class CRTExits(nn.Module):
    """CRT-Deep with all its exits, through their own heads."""

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model
        self.exits = model.exits
        self.outputs = (*map(logits_name, self.exits), *map(state_name, range(1, model.loops + 1)))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """input_ids int64 [B, T] → logits [B, T, V] per exit, then the states [B, T, C] of every loop; float32."""
        x = self.model.embed(input_ids)
        logits, states = [], []
        for loop in range(1, self.model.loops + 1):
            x = self.model.block(x, loop, None, None)
            states.append(x.float())
            if loop in self.exits:
                logits.append(self.model.head_of(loop)(x).float())
        return (*logits, *states)


class CRTEmbedding(nn.Module):
    """input_ids int64 [B, T] → state [B, T, C] in front of the first loop."""

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """State."""
        return self.model.embed(input_ids)


class CRTBlock(nn.Module):
    """One loop: state [B, T, C] and the loop's encoding [C] → next state."""

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model

    def forward(self, state: Tensor, encoding: Tensor) -> Tensor:
        """Next state."""
        return self.model.encoded_block(state, encoding)


class LastExit(nn.Module):
    """The whole of CRT-Deep as one module: input_ids int64 [B, T] → logits float32 [B, T, V]."""

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        return self.model.logits(input_ids)


class CRTEmbed(nn.Module):
    """input_ids, position_ids int64 [B, S], past_conv [B, C, d] → state [B, S, d], present_conv.

    Raises:
        InputError: the model looks ahead.
    """

    def __init__(self, model: CRT) -> None:
        super().__init__()
        require_causal(model)
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_conv: Tensor) -> tuple[Tensor, Tensor]:
        """State in front of the first loop, and the inputs that the next token's convolutions need."""
        return cached_embedding(self.model, input_ids, position_ids, past_conv)


class CRTLoop(nn.Module):
    """One loop of new tokens: its number (from 0), keys and values [B, H, past, D] and convolution inputs [B, C, d].

    Raises:
        InputError: the model looks ahead.
    """

    def __init__(self, model: CRT) -> None:
        super().__init__()
        require_causal(model)
        self.model = model

    def forward(
        self, state: Tensor, loop: Tensor, past_key: Tensor, past_value: Tensor, past_conv: Tensor
    ) -> tuple[Tensor, ...]:
        """State [B, S, d], loop int64 [1] → next state; keys, values [B, H, past + S, D] and convolution inputs."""
        encoding = self.model.loop_encodings.index_select(0, loop)
        kept = _Kept(past_key, past_value)
        state, present_conv = cached_block(self.model, state, encoding, kept.attend, past_conv)
        return (state, *kept.present, present_conv)


class CRTReadout(nn.Module):
    """State [B, S, d] after ``loop`` (1 … L) → logits float32 [B, S, V] of the head that answers there."""

    def __init__(self, model: CRT, loop: int) -> None:
        super().__init__()
        self.head = model.head_of(loop)

    def forward(self, state: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(state)
        return logits.float()


class _Kept:
    """Keys and values as a graph keeps them: the old ones and behind them the new ones."""

    def __init__(self, past_key: Tensor, past_value: Tensor) -> None:
        self.present: tuple[Tensor, ...] = (past_key, past_value)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of new tokens to all tokens up to each; q, k, v [B, H, n, D] → the same shape.

        Written out, and not as torch's SDPA: that is exported as copies of all keys, scaled and transposed, for every
        token. Softmax is computed in float32.
        """
        past_key, past_value = self.present
        keys, values = torch.cat((past_key, k), dim=2), torch.cat((past_value, v), dim=2)
        self.present = (keys, values)
        scores = (q * q.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(past_key.shape[2])
        weights = scores.float().masked_fill(~seen, -torch.inf).softmax(-1)
        result: Tensor = weights.to(q.dtype) @ values
        return result
