"""CRT-Deep's torch half, and the causality probe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from edgeformer.artifacts.manifest import Causality
from edgeformer.models.adapter import Batch, Loss, Losses, ModelAdapter, count_parameters
from edgeformer.models.crt.graphs import compose_decode, compose_exits, trace_pieces
from edgeformer.models.crt.loss import TokenLosses, chunked_loss, full_loss
from edgeformer.models.crt.model import CRT, CachedLoops, attention
from edgeformer.models.tracing import Graphs, Piece
from edgeformer.tasks import Prepared

_LENGTHS, _TRIALS = (2, 17, 64, 128), 4
TOLERANCE = 1e-4
"""Largest harmless change, relative to the outputs' standard deviation. Rounding changes outputs by about 1e-6 of it,
the published convolutions by 1e-2 and more."""


class CRTAdapter(ModelAdapter):
    """See :class:`~edgeformer.models.adapter.ModelAdapter`."""

    def build(self, recipe: Any) -> CRT:
        return CRT(recipe.model)

    def loss(self, model: CRT, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy summed over the tokens, weighted over the exits (paper B, eq. 5); parts: every exit."""
        training = recipe.training
        model.checkpointing = training.checkpointing
        compute = chunked_loss if training.chunked_loss else full_loss

        def loss(wrapped: nn.Module, batch: Batch) -> Losses:
            states = wrapped(batch["input_ids"], batch.get("positions"))
            total, losses = compute(model, states, batch["targets"], training.exit_weight)
            parts = {f"loss_exit{loop}": loss for loop, loss in losses.items() if loop != model.loops}
            return Losses(total, {**parts, "loss_final": losses[model.loops]})

        return loss

    def scorer(self, model: CRT) -> TokenLosses:
        return TokenLosses(model)

    def needed(self, model: CRT) -> dict[int, int]:
        """Exclude the heads of other exits and the encodings of later loops."""
        heads = count_parameters(model.exit_heads) + count_parameters(model.head)
        shared, width = count_parameters(model) - heads, model.loop_encodings.shape[1]
        return {
            loop: shared + count_parameters(model.head_of(loop)) - (model.loops - loop) * width for loop in model.exits
        }

    def trace(self, model: CRT, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None) -> Graphs:
        """The block is traced once for all loops; a model that looks ahead gets no graphs with caches."""
        pieces, parts = trace_pieces(model)
        exits, decode = compose_exits(model, pieces), compose_decode(model, parts) if parts else None
        return Graphs(exits, parts if steps else {}, decode, shared_weights=True)

    def whole(self, model: CRT) -> nn.Module:
        return Piece(model, model.logits)

    def decoder(self, model: CRT) -> CachedLoops:
        return CachedLoops(model)

    def match_cuda_memory(self, model: CRT) -> None:
        """Attention in the matrices' type, which a CPU computes in float32."""
        model.attention.attend = attention

    @torch.inference_mode()
    def causality(self, model: CRT, seed: int = 0) -> Causality:
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
            largest_change={str(loop): value for loop, value in largest_change.items()},
            reach=reach,
            lengths=tuple(lengths),
            trials=_TRIALS,
            tolerance=TOLERANCE,
        )


ADAPTER = CRTAdapter()
