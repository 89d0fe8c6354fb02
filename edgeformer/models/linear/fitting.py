"""Weights of a linear classifier by L-BFGS, for the losses of logistic regression and support vector machines."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

HISTORY = 10
"""Steps that L-BFGS remembers: two vectors of the weights' size each."""
_LINE_SEARCH = 25
"""Evaluations of the loss in an iteration."""
_SPAN = 4
"""Iterations over which the decrease of the loss is averaged: a step without a history of others is often short."""
Loss = Callable[[torch.Tensor], tuple[float, torch.Tensor]]
"""Logits float32 [rows, C] → loss summed over the rows, and its derivatives [rows, C]."""


def cross_entropy(answers: Sequence[tuple[float, torch.Tensor]], logits: torch.Tensor) -> tuple[float, torch.Tensor]:
    """A :data:`Loss` of temperatures and weighted probabilities [rows, C], summed over these pairs."""
    total, errors = 0.0, torch.zeros_like(logits)
    for temperature, weighted in answers:
        log_p = F.log_softmax(logits / temperature, dim=1)
        total -= float((weighted * log_p).sum(dtype=torch.float64)) * temperature**2
        errors += (log_p.exp() * weighted.sum(1, keepdim=True) - weighted) * temperature
    return total, errors


def binary_cross_entropy(labels: torch.Tensor, logits: torch.Tensor) -> tuple[float, torch.Tensor]:
    """A :data:`Loss`, the mean over the labels of a row, which are 0 or 1 each, [rows, C]."""
    classes = labels.shape[1]
    total = float((F.softplus(logits) - labels * logits).sum(dtype=torch.float64)) / classes
    return total, (logits.sigmoid() - labels) / classes


def squared_hinge(labels: torch.Tensor) -> Loss:
    """Return Σ max(0, 1 − logit)² for the label of a row and Σ max(0, 1 + logit)² for the others, labels [rows, C].

    As in scikit-learn's LinearSVC with balanced labels: a row weighs rows / (C · rows of its label) for its own label,
    and 1 for the others, unless there is only one.
    """
    rows, classes = labels.shape
    own = labels @ (rows / (classes * labels.sum(0).clamp_min(1)))[:, None]
    weights = own.expand(rows, classes) if classes == 2 else torch.where(labels > 0, own, 1.0)
    signs = 2 * labels - 1

    def loss(logits: torch.Tensor) -> tuple[float, torch.Tensor]:
        gaps = (1 - signs * logits).clamp_min(0)
        weighted = weights * gaps
        return float((weighted * gaps).sum(dtype=torch.float64)), -2 * weighted * signs

    return loss


def minimize(
    data: tuple[torch.Tensor, torch.Tensor], loss: Loss, penalty: float, start: tuple[torch.Tensor, torch.Tensor],
    tolerance: float, after_iteration: Callable[[float], bool],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return weights and biases that minimise mean loss + penalty / 2 · ‖weights‖², by L-BFGS.

    Args:
        data: features float32 [rows, d], which may be sparse, and their transpose.
        start: weights [d, C] and biases [C].
        after_iteration: gets the loss; the fit ends where it returns False.
    """
    features, transposed = data
    weights, bias = (tensor.clone().requires_grad_() for tensor in start)
    rows = features.shape[0]
    optimizer: Any = torch.optim.LBFGS(
        [weights, bias], max_iter=1, max_eval=_LINE_SEARCH, history_size=HISTORY, tolerance_grad=0, tolerance_change=0,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    evaluated: tuple[torch.Tensor, torch.Tensor, float] | None = None

    @torch.no_grad()
    def closure() -> float:
        """Return the loss and set the gradients; a step begins where its predecessor ended, which is known already."""
        nonlocal evaluated
        if evaluated is not None and torch.equal(evaluated[1], bias) and torch.equal(evaluated[0], weights):
            return evaluated[2]
        logits = features @ weights + bias
        total, errors = loss(logits)
        weights.grad = (transposed @ errors).div_(rows).add_(weights, alpha=penalty)
        bias.grad = errors.sum(0) / rows
        total = total / rows + penalty / 2 * float(weights.square().sum(dtype=torch.float64))
        evaluated = weights.clone(), bias.clone(), total
        return total

    losses = [closure()]
    while True:
        optimizer.step(closure)
        losses.append(closure())
        has_converged = len(losses) > _SPAN and losses[-1 - _SPAN] - losses[-1] <= _SPAN * tolerance * abs(losses[-1])
        if not after_iteration(losses[-1]) or has_converged:
            return weights.detach(), bias.detach()
