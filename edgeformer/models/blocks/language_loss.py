"""Next-token loss of a language model at every exit, without ever holding all logits (paper B, eq. 4 and 5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.data.batching import IGNORED
from edgeformer.models.blocks.causal import LanguageModel
from edgeformer.models.blocks.layers import to_float32

CHUNK_TOKENS = 512
"""Tokens whose logits are in memory at the same time: 98 MiB in float32 for 50,257 words."""


def exit_weights(loops: Sequence[int], exit_weight: float) -> dict[int, float]:
    """Return loop → weight in the loss: 1 − λ for the last one, λ shared evenly by the earlier ones (eq. 5)."""
    *earlier, last = sorted(loops)
    if not earlier or not exit_weight:
        return {**dict.fromkeys(earlier, 0.0), last: 1.0}
    return {**dict.fromkeys(earlier, exit_weight / len(earlier)), last: 1 - exit_weight}


@dataclass(frozen=True)
class Taught:
    """What a teacher knows of a batch: its last states [N, C] and its head [V, C], at temperature T.

    The loss of an exit is (1 − ``weight``) · cross-entropy + ``weight`` · T² · KL(teacher ‖ student).
    """

    states: Tensor
    head: Tensor
    weight: float
    temperature: float

    def divergence(self, logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return T² · KL of rows [n, 1], and its gradient by their ``logits`` [n, V], which has no gradient itself."""
        teacher_logits = to_float32(F.linear(self.states[chunk], self.head))
        log_p, log_q = (F.log_softmax(each / self.temperature, -1) for each in (teacher_logits, logits))
        rows = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1, keepdim=True)
        return self.temperature**2 * rows, self.temperature * (log_q.detach().exp() - log_p.exp())


def full_loss(
    model: LanguageModel, states: dict[int, Tensor], targets: Tensor, exit_weight: float, taught: Taught | None = None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute the weighted sum and loop → cross-entropy in nats, summed over the positions that count.

    ``states`` come from ``model(…)``; ``targets`` [B, T] are the tokens after each position, or ``IGNORED``. The sum is
    of what ``taught`` makes of the cross-entropies.
    """
    losses, mixed, counts = {}, {}, targets.reshape(-1, 1) != IGNORED
    for loop, state in states.items():
        logits = to_float32(model.head_of(loop)(state.flatten(0, 1)))  # [B·T, V]
        loss = F.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")
        losses[loop] = mixed[loop] = loss
        if taught is not None:
            rows, _ = taught.divergence(logits, slice(None))
            mixed[loop] = (1 - taught.weight) * loss + taught.weight * torch.where(counts, rows, 0.0).sum()
    weights = exit_weights([*losses], exit_weight)
    return torch.stack([weight * mixed[loop] for loop, weight in weights.items() if weight]).sum(), losses


def chunked_loss(
    model: LanguageModel, states: dict[int, Tensor], targets: Tensor, exit_weight: float, taught: Taught | None = None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute :func:`full_loss` with the logits of ``CHUNK_TOKENS`` rows at a time.

    The forward pass also computes the gradient of the logits, and backward, which can run once, only scales it. The
    losses of single exits have no gradient.
    """
    weights = exit_weights([*states], exit_weight)
    heads = list(dict.fromkeys(model.head_of(loop) for loop in states))
    exits = [(weights[loop], heads.index(model.head_of(loop))) for loop in states]
    matrices = [head.weight for head in heads]
    total, losses = _ChunkedLoss.apply(targets.reshape(-1), exits, taught, *states.values(), *matrices)  # type: ignore[no-untyped-call]
    return total, dict(zip(states, losses.unbind(), strict=True))


class _ChunkedLoss(torch.autograd.Function):
    """Weighted sum of the exits' losses, and its gradient by states and heads, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, targets: Tensor, exits: list[tuple[float, int]], taught: Taught | None, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum and the cross-entropy of every exit.

        ``exits`` has its weight and the index of its head; ``tensors`` are its states [B, T, C], then the heads [V, C].
        """
        states, heads = tensors[: len(exits)], tensors[len(exits) :]
        state_grads: list[Tensor | None] = [None] * len(states)
        head_grads: list[Tensor | None] = [None] * len(heads)
        losses, mixed = list[Tensor](), list[Tensor]()
        for index, (state, (weight, head_index)) in enumerate(zip(states, exits, strict=True)):
            x, head = state.flatten(0, 1), heads[head_index]
            if weight and any(ctx.needs_input_grad):  # the head of an exit without weight gets no gradient
                state_grads[index] = torch.empty_like(x)
                if head_grads[head_index] is None:
                    head_grads[head_index] = torch.zeros_like(head)
            grads = state_grads[index], head_grads[head_index]
            loss, mixture = _loss_in_chunks(x, head, targets, *grads, weight, taught)
            losses.append(loss)
            mixed.append(mixture)
        ctx.saved = [state_grads, head_grads, [state.shape for state in states], [weight for weight, _ in exits]]
        all_losses = torch.stack(losses)
        ctx.mark_non_differentiable(all_losses)
        return torch.stack([weight * loss for (weight, _), loss in zip(exits, mixed, strict=True)]).sum(), all_losses

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved is None:
            raise RuntimeError("the gradient of a chunked loss was scaled in place: backward runs once")
        (state_grads, head_grads, shapes, weights), ctx.saved = ctx.saved, None
        state_grads = [
            None if grad is None else grad.mul_(scale * weight).view(shape)
            for grad, shape, weight in zip(state_grads, shapes, weights, strict=True)
        ]
        return None, None, None, *state_grads, *(None if grad is None else grad.mul_(scale) for grad in head_grads)


def _loss_in_chunks(
    x: Tensor, head: Tensor, targets: Tensor, state_grad: Tensor | None, head_grad: Tensor | None, weight: float,
    taught: Taught | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the summed cross-entropy of states [N, C] through a head [V, C], and the loss that ``taught`` makes of it.

    ``state_grad`` [N, C] is overwritten with the gradient; ``weight`` times the gradient is added to ``head_grad``.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    exact_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    matrix, loss, divergence = head.to(dtype), *x.new_zeros(2, dtype=exact_dtype)
    shape = min(len(x), CHUNK_TOKENS), len(head)
    # All chunks reuse two buffers, and the softmax overwrites the logits: allocating pages costs more than computing.
    buffer, exact_buffer = x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=exact_dtype)
    for start in range(0, len(x), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        rows, labels = x[chunk].to(dtype), targets[chunk, None]
        counts, size = labels != IGNORED, len(labels)
        indices = torch.where(counts, labels, 0)
        logits = exact_buffer[:size].copy_(torch.mm(rows, matrix.t(), out=buffer[:size]))
        soft = taught.divergence(logits, chunk) if taught is not None and weight else None
        largest, label_logits = logits.amax(-1, keepdim=True), logits.gather(-1, indices)
        softmax = torch.softmax(logits, -1, out=logits)
        # The largest probability is exp(largest logit − log-sum-exp).
        log_sum = largest - softmax.amax(-1, keepdim=True).log()
        loss = loss + torch.where(counts, log_sum - label_logits, 0.0).sum()
        if soft is not None:
            divergence = divergence + torch.where(counts, soft[0], 0.0).sum()
        if state_grad is not None and head_grad is not None:
            # d loss / d logits = softmax − one-hot(label)
            logit_grad = softmax.scatter_add_(-1, indices, softmax.new_full(indices.shape, -1.0))
            if taught is not None and soft is not None:
                logit_grad = logit_grad.lerp_(soft[1], taught.weight)
            logit_grad = buffer[:size].copy_(logit_grad)
            state_grad[chunk] = (logit_grad @ matrix) * counts
            head_grad.add_(logit_grad.t() @ (rows * counts), alpha=weight)
    return loss, loss if taught is None else torch.lerp(loss, divergence, taught.weight)


class TokenLosses(nn.Module):
    """A language model that returns losses instead of logits, which would not fit into memory for every exit."""

    inputs = ("input_ids", "targets")
    optional = ("positions",)

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, targets: Tensor, positions: Tensor | None = None) -> dict[str, Tensor]:
        """Compute for every exit N the loss and the signals of early exit, name → float32 [B, T].

        ``loss_exitN`` is the cross-entropy in nats (0 where nothing is predicted), ``confidence_exitN`` the largest
        probability (paper B, eq. 6), ``cosine_exitN`` the cosine between a token's states before and after loop N,
        close to 1 if the loop changed little (released code). ``targets`` [B, T] are the tokens after each position, or
        ``IGNORED``.
        """
        outputs: dict[str, Tensor] = {}
        # Calling the module, not its methods, gathers weights that are sharded over processes.
        states = self.model(input_ids, positions, every=True)
        for loop in self.model.exits:
            losses, confidences = list[Tensor](), list[Tensor]()
            chunks = torch.split(states[loop].flatten(0, 1), CHUNK_TOKENS), torch.split(targets.flatten(), CHUNK_TOKENS)
            for rows, labels in zip(*chunks, strict=True):
                logits = self.model.head_of(loop)(rows).float()
                log_sum = logits.logsumexp(-1)
                counts = labels != IGNORED
                label_logits = logits.gather(-1, torch.where(counts, labels, 0)[:, None])[:, 0]
                losses.append(torch.where(counts, log_sum - label_logits, 0.0))
                confidences.append((logits.amax(-1) - log_sum).exp())
            outputs[f"loss_exit{loop}"] = torch.cat(losses).view_as(targets)
            outputs[f"confidence_exit{loop}"] = torch.cat(confidences).view_as(targets)
            cosine = F.cosine_similarity(states[loop - 1].float(), states[loop].float(), dim=-1)
            outputs[f"cosine_exit{loop}"] = cosine
        return outputs
