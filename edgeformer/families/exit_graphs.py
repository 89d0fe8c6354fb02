"""Every exit of a looped model and the state after every loop at once: single graphs are cut out of its trace."""

from __future__ import annotations

from torch import Tensor, nn

from edgeformer.families.crt.model import CRT
from edgeformer.families.encoder.model import EncoderClassifier


def logits_name(loop: int) -> str:
    """Output with the logits of the exit after ``loop``."""
    return f"logits_exit{loop}"


def state_name(loop: int) -> str:
    """Output with the hidden state after ``loop``, float32."""
    return f"state_loop{loop}"


class EncoderExits(nn.Module):
    """The classifier with an exit after every iteration, through the one head it has.

    Only the last exit was trained; the others show what fewer iterations of the same weights are worth.
    """

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.model = model
        self.exits = tuple(range(1, model.iterations + 1))
        self.outputs = (*map(logits_name, self.exits), *map(state_name, self.exits))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """input_ids, attention_mask int64 [B, S] → logits [B, classes] per exit, then states.

        The states are [B, S, d]; the last one is [B, 1, d], for nothing else of it is ever computed.
        """
        h = self.model.embed(input_ids)
        logits, states = [], []
        for exit_ in self.exits:
            answer = self.model.iterate(h, attention_mask, answer=True)
            logits.append(self.model.readout(answer))
            h = answer if exit_ == self.exits[-1] else self.model.iterate(h, attention_mask)
            states.append(h.float())
        return (*logits, *states)


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
