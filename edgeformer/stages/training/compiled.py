"""torch.compile for the steps of training, with a bounded number of shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from edgeformer.formats.errors import InputError
from edgeformer.stages.training.memory import is_out_of_memory

BACKEND = "inductor"


class CompiledModel(nn.Module):
    """A model as training calls it, compiled for the shapes of whole micro-batches, as many as the recipe allows.

    A batch of fewer rows, or of one shape too many, goes through the model as it is. Whoever scores or saves the model
    has nothing to do with this.

    Args:
        model: as Accelerate prepared it.
        most: shapes.
        graphs: replay the launches of each as CUDA graphs.
    """

    def __init__(self, model: nn.Module, most: int, *, graphs: bool) -> None:
        super().__init__()
        self._plain, self._most, self._graphs = (model,), most, graphs  # a tuple hides it from this module's own parts
        self._shapes: set[object] = set()
        self.rows = 0
        self._begin()
        if graphs:
            _keep_gradients(model)

    @property
    def shapes(self) -> int:
        """How many are compiled so far."""
        return len(self._shapes)

    def _begin(self) -> None:
        options: dict[str, Any] = {}
        if self._graphs:  # and no way around them without a word
            options = {"options": {"triton.cudagraphs": True, "triton.cudagraph_or_error": True}}
        self._fast = (torch.compile(self._plain[0], dynamic=False, backend=BACKEND, **options),)

    def starts_over(self, rows: int) -> None:
        """From now on a whole micro-batch has so many rows; what was compiled for other numbers of them is dropped."""
        if rows == self.rows:
            return
        if self._shapes:  # recorded graphs hold memory, of which there was too little
            torch._dynamo.reset()
            self._shapes.clear()
            self._begin()
        self.rows = rows

    def forward(self, *inputs: Tensor | None, **named: Any) -> Any:
        """As the model's own. Raises InputError: it cannot be compiled here."""
        arguments = (*inputs, *named.values())
        shape = tuple(one.shape if isinstance(one, Tensor) else one for one in arguments)
        whole = isinstance(inputs[0], Tensor) and len(inputs[0]) == self.rows
        if not whole or (shape not in self._shapes and self.shapes >= self._most):
            return self._plain[0](*inputs, **named)
        self._shapes.add(shape)
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            # Shapes are counted here; torch's own limit would let a further one go uncompiled without a word.
            with torch._dynamo.config.patch(recompile_limit=4 * self._most + 8, fail_on_recompile_limit_hit=True):
                return self._fast[0](*inputs, **named)
        except RuntimeError as error:
            # What cannot be recorded as a CUDA graph is noticed when it is run, and is no error of the compiler.
            cannot = isinstance(error, TorchDynamoException) or "cudagraph" in str(error)
            if is_out_of_memory(error) or not cannot:
                raise
            lines = str(error).strip().splitlines()
            said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
            raise InputError(f"training.compile: the model cannot be compiled here: {said}; take it out") from error


def _keep_gradients(model: nn.Module) -> None:
    """Give every parameter a gradient of its own.

    What a graph returns is written over by its next replay, and torch would keep a first gradient as it was returned.
    """
    own: dict[nn.Parameter, int] = {}

    def copied(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is not None and parameter.grad.data_ptr() != own.get(parameter):
            parameter.grad = parameter.grad.clone()
            own[parameter] = parameter.grad.data_ptr()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(copied)  # type: ignore[no-untyped-call]
