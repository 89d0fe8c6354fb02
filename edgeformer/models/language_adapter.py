"""What the torch halves of all language models share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgeformer.artifacts.manifest import Causality
from edgeformer.models.adapter import ModelAdapter
from edgeformer.models.causal import attention, probe_causality
from edgeformer.models.distillation import Batch, Loss, Losses, load_teacher
from edgeformer.models.language_loss import Taught, TokenLosses, chunked_loss, full_loss
from edgeformer.models.tracing import Piece
from edgeformer.tasks import Prepared


class LanguageAdapter(ModelAdapter):
    """Torch half of a :class:`~edgeformer.models.causal.LanguageModel`."""

    def loss(self, model: Any, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy summed over the tokens, weighted over the exits (paper B, eq. 5); parts: every exit.

        With ``training.teacher`` it is mixed with the divergence from the teacher's answers. Raises RecipeError: the
        teacher has another tokenizer, or accepts shorter texts.
        """
        training = recipe.training
        model.checkpointing = training.checkpointing
        compute = chunked_loss if training.chunked_loss else full_loss
        teacher: Any = None if training.teacher is None else load_teacher(recipe, prepared)

        def loss(wrapped: nn.Module, batch: Batch) -> Losses:
            inputs, taught = (batch["input_ids"], batch.get("positions")), None
            states = wrapped(*inputs)
            if teacher is not None:
                with torch.no_grad():
                    known = teacher.to(inputs[0].device)(*inputs)[teacher.loops].flatten(0, 1)
                config = training.distillation
                taught = Taught(known, teacher.head_of(teacher.loops).weight, config.weight, config.temperature)
            total, losses = compute(model, states, batch["targets"], training.exit_weight, taught)
            parts = {f"loss_exit{loop}": loss for loop, loss in losses.items() if loop != model.loops}
            return Losses(total, {**parts, "loss_final": losses[model.loops]})

        return loss

    def scorer(self, model: Any) -> TokenLosses:
        return TokenLosses(model)

    def whole(self, model: Any) -> nn.Module:
        return Piece(model, model.logits)

    def match_cuda_memory(self, model: Any) -> None:
        """Attention in the matrices' type, which a CPU computes in float32."""
        for module in model.modules():
            if hasattr(module, "attend"):
                module.attend = attention

    def causality(self, model: Any, seed: int = 0) -> Causality:
        return probe_causality(model, seed)
