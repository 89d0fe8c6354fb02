"""CRT-Deep's torch half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from edgeformer.families.crt.cache import CachedLoops
from edgeformer.families.crt.causality import probe_causality
from edgeformer.families.crt.graphs import CRTExits, compose_decode, compose_exits, trace_pieces
from edgeformer.families.crt.loss import TokenLosses, exit_losses, weighted
from edgeformer.families.crt.model import CRT
from edgeformer.families.network import Batch, Loss, Losses, Network, Place, count_parameters
from edgeformer.families.tracing import Graphs, Piece
from edgeformer.formats.manifest import AttentionUse, Causality
from edgeformer.tasks import Prepared


class CRTNetwork(Network):
    """See :class:`~edgeformer.families.network.Network`."""

    def build(self, recipe: Any, place: Place) -> tuple[CRT, AttentionUse]:
        """CRT-Deep with fresh weights; its attention is always torch's SDPA."""
        return build_crt(recipe.model), AttentionUse(requested="sdpa", used="sdpa")

    def loss(self, model: CRT, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy summed over the tokens, weighted over the exits (paper B, eq. 5); parts: every exit."""
        training = recipe.training
        model.checkpointing = training.checkpointing

        def loss(wrapped: nn.Module, batch: Batch) -> Losses:
            states = wrapped(batch["input_ids"], batch.get("positions"))
            losses = exit_losses(model, states, batch["targets"], chunked=training.chunked_loss)
            parts = {f"loss_exit{loop}": loss for loop, loss in losses.items() if loop != model.loops}
            return Losses(weighted(losses, training.exit_weight), {**parts, "loss_final": losses[model.loops]})

        return loss

    def scorer(self, model: CRT) -> TokenLosses:
        """Losses and confidence of every exit."""
        return TokenLosses(model)

    def exits(self, model: CRT) -> CRTExits:
        """See :meth:`Network.exits`."""
        return CRTExits(model)

    def needed(self, model: CRT) -> dict[int, int]:
        """No head but the exit's own, no encoding of a loop behind it."""
        heads = count_parameters(model.exit_heads) + count_parameters(model.head)
        shared, width = count_parameters(model) - heads, model.loop_encodings.shape[1]
        unused = {loop: (model.loops - loop) * width for loop in model.exits}
        return {loop: shared + count_parameters(model.head_of(loop)) - unused[loop] for loop in model.exits}

    def trace(self, model: CRT, inputs: Sequence[str], *, steps: bool) -> Graphs:
        """The block is traced once, however deep the loop; a model that looks ahead gets no graph with caches."""
        pieces, parts = trace_pieces(model)
        exits, decode = compose_exits(model, pieces), compose_decode(model, parts) if parts else None
        return Graphs(exits, parts if steps else {}, decode, shared_weights=True)

    def whole(self, model: CRT) -> nn.Module:
        """See :meth:`Network.whole`."""
        return Piece(model, model.logits)

    def causality(self, model: CRT, seed: int = 0) -> Causality:
        """See :meth:`Network.causality`."""
        return probe_causality(model, seed=seed)

    def decoder(self, model: CRT) -> CachedLoops:
        """See :meth:`Network.decoder`."""
        return CachedLoops(model)


def build_crt(config: Any) -> CRT:
    """CRT-Deep with fresh weights, from a :class:`~edgeformer.families.crt.CRTConfig`."""
    return CRT(**config.model_dump(exclude={"kind"}))


NETWORK = CRTNetwork()
