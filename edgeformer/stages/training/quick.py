"""Tables that a CPU trains faster than torch's own, where one process trains them; what is computed is the same.

Small batches of short texts spend more on them than one would think. Torch makes the gradient of a table anew in every
step, zeros for tens of thousands of rows of which a few hundred are used: pages that the system must clear first, then
torch again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeformer.formats.recipe import TrainingConfig

LEAST_BYTES = 1 << 20
"""Of a table; clearing a smaller one costs next to nothing."""


def quickens(device_type: str, training: TrainingConfig, processes: int = 1) -> bool:
    """Whether a training uses them.

    Several processes exchange gradients through autograd's hooks, and what is compiled computes its own.
    """
    return device_type == "cpu" and training.compile is None and processes == 1


def quicken(model: nn.Module) -> list[Tensor]:
    """Train with them; the weights, their names, and what is computed in evaluation stay the same.

    Returns:
        The gradients of tables, which stay allocated.
    """
    gradients = []
    for module in model.modules():
        if type(module) is nn.Embedding and _pays(module):
            module.__class__ = QuickTable
            assert isinstance(module, QuickTable)
            gradients.append(module.begin())
    return gradients


def _pays(table: nn.Embedding) -> bool:
    unusual = table.padding_idx is not None or table.max_norm is not None or table.scale_grad_by_freq or table.sparse
    return table.weight.requires_grad and table.weight.nbytes >= LEAST_BYTES and not unusual


class QuickTable(nn.Embedding):
    """A table whose gradient stays allocated from step to step, and is cleared where it is.

    All of it, not the rows alone that were used: others may have added to it, such as a head that is tied to the table.
    """

    _gradient: Tensor

    def begin(self) -> Tensor:
        """Make the gradient. Not in a constructor: the module was another one before. It is no part of its state."""
        self._gradient = torch.zeros_like(self.weight.detach())
        return self._gradient

    def forward(self, input: Tensor) -> Tensor:
        """As torch's own; input int64 [...] → [..., width]."""
        if not torch.is_grad_enabled():
            return super().forward(input)
        rows: Tensor = _Rows.apply(self.weight, input, self)  # type: ignore[no-untyped-call]
        return rows

    def add(self, ids: Tensor, slopes: Tensor) -> None:
        """Add to the gradient of rows: ids int64 [n], slopes [n, width]."""
        if self.weight.grad is None:
            self.weight.grad = self._gradient.zero_()
        self.weight.grad.index_add_(0, ids, slopes.to(self.weight.dtype))


class _Rows(torch.autograd.Function):
    """Rows of a table. The gradient goes straight to where it stays: handed to autograd it would be copied."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: QuickTable) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.table = table
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.table.add(ids.reshape(-1), slopes.flatten(0, -2))
        return None, None, None
