"""Next-token loss of a language model at every exit, without ever holding all logits (paper B, eq. 4 and 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.data.batching import IGNORED
from edgeformer.models.crt.model import CRT

CHUNK_TOKENS = 512
"""Tokens whose logits exist at the same time: at 50,257 words 98 MiB in float32."""


def exit_losses(model: CRT, states: dict[int, Tensor], targets: Tensor) -> dict[int, Tensor]:
    """Summed cross-entropy of every exit, in nats.

    Args:
        states: loop → hidden states [B, T, C], from ``model(…)``.
        targets: int64 [B, T]: the token after each position, or ``IGNORED``.

    Returns:
        loop → scalar: the sum over all positions that count. Divide by their number.
    """
    flat = targets.reshape(-1)
    return {loop: _cross_entropy(state.flatten(0, 1), model.head_of(loop), flat) for loop, state in states.items()}


def exit_weights(loops: Sequence[int], exit_weight: float) -> dict[int, float]:
    """loop → its part of the loss: 1 − λ for the last one, λ shared evenly by the earlier ones (eq. 5)."""
    *earlier, last = sorted(loops)
    if not earlier or not exit_weight:
        return {**dict.fromkeys(earlier, 0.0), last: 1.0}
    return {**dict.fromkeys(earlier, exit_weight / len(earlier)), last: 1 - exit_weight}


def weighted(losses: dict[int, Tensor], exit_weight: float) -> Tensor:
    """(1 − λ) · final + λ · mean over the earlier exits (eq. 5)."""
    parts = [part * losses[loop] for loop, part in exit_weights([*losses], exit_weight).items() if part]
    return torch.stack(parts).sum()


def whole_loss(
    model: CRT, states: dict[int, Tensor], targets: Tensor, exit_weight: float
) -> tuple[Tensor, dict[int, Tensor]]:
    """:func:`weighted` sum of :func:`exit_losses`, and those."""
    losses = exit_losses(model, states, targets)
    return weighted(losses, exit_weight), losses


def chunked_loss(
    model: CRT, states: dict[int, Tensor], targets: Tensor, exit_weight: float
) -> tuple[Tensor, dict[int, Tensor]]:
    """What :func:`weighted` makes of :func:`exit_losses`, and those, with ``CHUNK_TOKENS`` rows of logits at a time.

    Logits are computed once: while they are there, so is their gradient, which the backward pass only scales. It must
    not be asked for twice. Losses of single exits have no gradient.
    """
    parts = exit_weights([*states], exit_weight)
    heads = list(dict.fromkeys(model.head_of(loop) for loop in states))
    places = [(parts[loop], heads.index(model.head_of(loop))) for loop in states]
    weights = [head.weight for head in heads]
    total, losses = _ChunkedLoss.apply(targets.reshape(-1), places, *states.values(), *weights)  # type: ignore[no-untyped-call]
    return total, dict(zip(states, losses.unbind(), strict=True))


class _ChunkedLoss(torch.autograd.Function):
    """The weighted sum of the exits' losses, and its gradient by their states and heads, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, targets: Tensor, exits: list[tuple[float, int]], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """``exits``: of each one its part of the sum, and the number of its head; tensors: states, then heads."""
        states, heads = tensors[: len(exits)], tensors[len(exits) :]
        slopes: list[Tensor | None] = [None] * len(states)
        gradients: list[Tensor | None] = [None] * len(heads)
        losses: list[Tensor] = []
        for number, (state, (part, own)) in enumerate(zip(states, exits, strict=True)):
            x, head = state.flatten(0, 1), heads[own]
            if part and any(ctx.needs_input_grad):  # an exit that does not count leaves its head without a gradient
                slopes[number] = torch.empty_like(x)
                gradients[own] = torch.zeros_like(head) if gradients[own] is None else gradients[own]
            losses.append(_in_chunks(x, head, targets, slopes[number], gradients[own], part))
        ctx.kept = [slopes, gradients, [state.shape for state in states], [part for part, _ in exits]]
        every = torch.stack(losses)
        ctx.mark_non_differentiable(every)
        return torch.stack([part * loss for (part, _), loss in zip(exits, losses, strict=True)]).sum(), every

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError("the gradient of a chunked loss was scaled in place: backward runs once")
        (slopes, gradients, shapes, parts), ctx.kept = ctx.kept, None
        slopes = [
            None if slope is None else slope.mul_(scale * part).view(shape)
            for slope, shape, part in zip(slopes, shapes, parts, strict=True)
        ]
        return None, None, *slopes, *(None if one is None else one.mul_(scale) for one in gradients)


def _in_chunks(
    x: Tensor, head: Tensor, targets: Tensor, slope: Tensor | None, gradient: Tensor | None, part: float
) -> Tensor:
    """Summed cross-entropy of states [N, C] through a head [V, C].

    ``slope``, shaped like ``x``, becomes its gradient; ``part`` times that by the head is added to ``gradient``.
    """
    kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    weight, loss = head.to(kind), x.new_zeros((), dtype=_wide(kind))
    shape = min(len(x), CHUNK_TOKENS), len(head)
    # Written over by every chunk, the logits by their softmax: new pages cost more time than what is computed in them.
    narrow, wide = x.new_empty(shape, dtype=kind), x.new_empty(shape, dtype=_wide(kind))
    for start in range(0, len(x), CHUNK_TOKENS):
        chosen = slice(start, start + CHUNK_TOKENS)
        rows, aims = x[chosen].to(kind), targets[chosen, None]
        counted, size = aims != IGNORED, len(aims)
        place = torch.where(counted, aims, 0)
        logits = wide[:size].copy_(torch.mm(rows, weight.t(), out=narrow[:size]))
        top, own = logits.amax(-1, keepdim=True), logits.gather(-1, place)
        softmax = torch.softmax(logits, -1, out=logits)
        # The largest share is exp(largest logit − log-sum-exp).
        log_sum = top - softmax.amax(-1, keepdim=True).log()
        loss = loss + torch.where(counted, log_sum - own, 0.0).sum()
        if slope is not None and gradient is not None:
            change = narrow[:size].copy_(softmax.scatter_add_(-1, place, softmax.new_full(place.shape, -1.0)))
            slope[chosen] = (change @ weight) * counted
            gradient.add_(change.t() @ (rows * counted), alpha=part)
    return loss


def _wide(kind: torch.dtype) -> torch.dtype:
    """What logits of this type are normalised in."""
    return torch.float64 if kind == torch.float64 else torch.float32


def _cross_entropy(x: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    logits = head(x)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")


class TokenLosses(nn.Module):
    """A language model that answers with losses instead of logits, which would not fit for every exit at once."""

    inputs = ("input_ids", "targets")
    optional = ("positions",)

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        """Of every exit ``loss_exitN``, the cross-entropy in nats, and what tokens can leave there by.

        ``confidence_exitN`` is the top probability (paper B, eq. 6), ``cosine_exitN`` the cosine between a token's
        hidden states before and after loop N, which comes close to 1 where the loop changed little (released code).

        Args:
            input_ids: int64 [B, T].
            targets: the token after each position, int64 [B, T], or ``IGNORED``.
            positions: place of each token in its document, int64 [B, T]; None: each row is one document.

        Returns:
            name → float32 [B, T]; losses are 0 where nothing is predicted.
        """
        found: dict[str, Tensor] = {}
        # By the module's own call, which is what gathers weights that several processes share.
        states = self.model(input_ids, positions, every=True)
        for loop in self.model.exits:
            state, earlier = states[loop], states[loop - 1]
            losses, confidence = list[Tensor](), list[Tensor]()
            parts = torch.split(state.flatten(0, 1), CHUNK_TOKENS), torch.split(targets.flatten(), CHUNK_TOKENS)
            for part, wanted in zip(*parts, strict=True):
                logits = self.model.head_of(loop)(part).float()
                log_sum = logits.logsumexp(-1)
                counted = wanted != IGNORED
                own = logits.gather(-1, torch.where(counted, wanted, 0)[:, None])[:, 0]
                losses.append(torch.where(counted, log_sum - own, 0.0))
                confidence.append((logits.amax(-1) - log_sum).exp())
            found[f"loss_exit{loop}"] = torch.cat(losses).view_as(targets)
            found[f"confidence_exit{loop}"] = torch.cat(confidence).view_as(targets)
            found[f"cosine_exit{loop}"] = F.cosine_similarity(earlier.float(), state.float(), dim=-1)
        return found
