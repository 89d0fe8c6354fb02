"""What language models share: causal attention, cached keys and values, recomputation, and the causality probe.

Shapes: B rows, T tokens, n new tokens, H heads, D size of a head, C width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self

from edgeformer.artifacts.manifest import Causality
from edgeformer.models.blocks.segments import Mask, Segments

Checkpointing = Literal["none", "loop", "cycles"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v of the new tokens [B, H, n, D]) → attention to all tokens so far [B, H, n, D]; also stores k and v."""
RunLoop = Callable[[Tensor, int], Tensor]
"""(state, loop from 1) → state."""

TOLERANCE = 1e-4
"""Largest harmless change, relative to the outputs' standard deviation. Rounding changes outputs by about 1e-6 of it,
the published convolutions of paper B by 1e-2 and more."""
_LENGTHS, _TRIALS = (2, 17, 64, 128), 4
_MIN_CACHE_TOKENS = 64
recomputed = partial(checkpoint, use_reentrant=False)
"""Call a function without storing its intermediate results, which the backward pass computes again."""


@dataclass(frozen=True, eq=False)
class TiedHead:
    """The token table as a head. It is no module: checkpoints would store its weight, the table's, twice."""

    table: nn.Embedding

    @property
    def weight(self) -> Tensor:
        """[V, C]."""
        return self.table.weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., C] → [..., V]."""
        return F.linear(x, self.weight)


Head = nn.Linear | TiedHead
"""A product with a matrix, ``weight`` [V, C]: states [..., C] → logits [..., V]."""


class LanguageModel(nn.Module):
    """A decoder that returns the hidden states after its exits, and the heads that read them."""

    tokens: nn.Embedding

    def __init__(self, config: Any, exits: tuple[int, ...]) -> None:
        super().__init__()
        self.config, self.exits, self.loops, self.max_positions = config, exits, exits[-1], config.max_positions
        self.checkpointing: Checkpointing = "none"

    def forward(
        self, input_ids: Tensor, positions: Mask = None, until: int | None = None, every: bool = False
    ) -> dict[int, Tensor]:
        """Compute the hidden states after every exit: loop → [B, T, C], in rising order, see :meth:`head_of`.

        Args:
            input_ids: int64 [B, T], T ≤ max_positions.
            positions: of each token in its document, int64 [B, T], or segments; None: each row is one document.
            until: the last loop to compute; None: all loops.
            every: also return the states after the other loops, and before the first one as loop 0.
        """
        documents, mask = attention_arguments(positions)
        x, run_loop = self.begin(input_ids, documents, mask)
        states = {0: x} if every else {}
        for loop in range(1, (until or self.loops) + 1):
            is_recomputed = self.training and self.checkpointing == "loop"
            x = recomputed(run_loop, x, loop) if is_recomputed else run_loop(x, loop)
            if every or loop in self.exits:
                states[loop] = x
        return states

    def begin(self, input_ids: Tensor, positions: Tensor | None, mask: Mask) -> tuple[Tensor, RunLoop]:
        """Return the embedded tokens [B, T, C], and the function that runs a loop."""
        raise NotImplementedError

    def head_of(self, loop: int) -> Head:
        """Return the head that answers after ``loop``."""
        raise NotImplementedError

    def every_exit(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """input_ids int64 [B, T] → logits [B, T, V] per exit, then the states [B, T, C] of every loop; float32."""
        states = self(input_ids, every=True)
        logits = (self.head_of(loop)(states[loop]).float() for loop in self.exits)
        return (*logits, *(states[loop].float() for loop in range(1, self.loops + 1)))

    def logits(self, input_ids: Tensor, loop: int | None = None) -> Tensor:
        """Return next-token logits float32 [B, T, V] after ``loop`` (None: the last) for input_ids int64 [B, T]."""
        loop = loop or self.loops
        return self.head_of(loop)(self(input_ids, until=loop)[loop]).float()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Compute causal attention, [B, H, T, D], through torch's SDPA, in which a mask replaces causality, or segments."""
    if isinstance(mask, Segments):
        return mask.attend(q, k, v, causal=True)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Compute :func:`attention`, for a BF16 gradient on a CPU in float32, which takes half the time."""
    if not (q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.requires_grad):
        return attention(q, k, v, mask)
    with torch.autocast("cpu", enabled=False):
        return attention(q.float(), k.float(), v.float(), mask).to(q.dtype)


def attention_arguments(positions: Mask) -> tuple[Tensor | None, Mask]:
    """Return positions int64 [B, T], and the mask of :func:`attention`; both None for rows of one document each.

    The mask is causal within documents, bool [B, 1, T, T], or the segments.
    """
    if isinstance(positions, Segments):
        return positions.positions[None], positions
    if positions is None:
        return None, None
    document = (positions == 0).cumsum(1)
    return positions, (document[:, :, None] == document[:, None, :]).tril()[:, None]


class KeyValueCache:
    """Keys and values of the tokens so far in one attention, [2, B, H, capacity, D], of which ``length`` are in use."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v behind the first ``length`` tokens, and attend to all tokens up to each new one.

        The capacity doubles when it is used up. ``length`` stays: who keeps the new tokens adds their number.
        """
        buffer, new = self._buffer, q.shape[2]
        total = self.length + new
        if buffer is None or total > buffer.shape[3]:
            capacity = max(_MIN_CACHE_TOKENS, 1 << (total - 1).bit_length())
            larger = k.new_empty(2, *k.shape[:2], capacity, k.shape[3])
            if buffer is not None:
                larger[:, :, :, : self.length] = buffer[:, :, :, : self.length]
            self._buffer = buffer = larger
        buffer[0, :, :, self.length : total] = k
        buffer[1, :, :, self.length : total] = v
        keys, values = buffer[:, :, :, :total]
        # A single new token sees every token; several need a causal mask among themselves.
        mask = None if new == 1 else torch.ones(new, total, dtype=torch.bool, device=q.device).tril(self.length)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


class CachedModel:
    """Incremental decoding, loop by loop, of one text or several of the same length, by a model in evaluation mode.

    :mod:`edgeformer.runtimes.decoder` decides which tokens pass which loop when.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.loops, self.max_positions, self.device = model.loops, model.max_positions, model.head.weight.device

    def fresh(self) -> Self:
        """Return the same without tokens."""
        return type(self)(self._model)

    @torch.inference_mode()
    def logits(self, state: Tensor, loop: int) -> Tensor:
        """Return next-token logits, float32 […, V], of states […, C] after ``loop``."""
        return self._model.head_of(loop)(state).float()


@torch.inference_mode()
def probe_causality(model: LanguageModel, seed: int = 0) -> Causality:
    """Change the tokens after position t and check that no output up to t changes at any exit.

    Every length is tried with several random t, and with the last but one, where only the next token changes. The
    probe runs in evaluation mode without autocast, and restores the model's mode.
    """
    generator = torch.Generator().manual_seed(seed)
    was_training, vocabulary, device = model.training, model.tokens.num_embeddings, model.tokens.weight.device
    lengths = sorted({min(length, model.max_positions) for length in _LENGTHS})
    largest_change = dict.fromkeys(model.exits, 0.0)
    reach, largest_later_change = 0, 0.0
    model.eval()
    try:
        for length in lengths:
            positions = torch.randint(0, length - 1, (_TRIALS,), generator=generator).tolist()
            for t in sorted({*positions, length - 2}):
                ids = torch.randint(0, vocabulary, (1, length), generator=generator)
                shift = torch.randint(1, vocabulary, (1, length), generator=generator)
                shift[:, : t + 1] = 0  # every token after t becomes a different one
                original, changed = model(ids.to(device)), model(((ids + shift) % vocabulary).to(device))
                for loop in original:
                    reference, perturbed = original[loop].float(), changed[loop].float()
                    # Largest change at each position, relative to the spread of all outputs, [T].
                    change = ((reference - perturbed).abs().amax(-1)[0] / reference.std().clamp_min(1e-12)).cpu()
                    largest_change[loop] = max(largest_change[loop], float(change[: t + 1].max()))
                    largest_later_change = max(largest_later_change, float(change[t + 1 :].max()))
                    leaking = (change[: t + 1] > TOLERANCE).nonzero()
                    if len(leaking):
                        reach = max(reach, t + 1 - int(leaking[0]))
    finally:
        model.train(was_training)
    if largest_later_change <= TOLERANCE:
        raise ValueError("changes of the input change no output, so the weights of the model are degenerate")
    return Causality(
        leaks=max(largest_change.values()) > TOLERANCE,
        largest_change={str(loop): value for loop, value in largest_change.items()}, reach=reach,
        lengths=tuple(lengths), trials=_TRIALS, tolerance=TOLERANCE,
    )  # fmt: skip
