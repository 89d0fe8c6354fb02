"""CRT-Deep's torch half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from edgeformer.families.crt.cache import CachedLoops
from edgeformer.families.crt.causality import probe_causality
from edgeformer.families.crt.exits import CRTExits
from edgeformer.families.crt.graphs import compose_decode, compose_exits, trace_pieces
from edgeformer.families.crt.loss import TokenLosses, exit_losses, weighted
from edgeformer.families.crt.model import CRT
from edgeformer.families.network import Batch, Loss, Losses, Network, Place
from edgeformer.families.tracing import Graphs
from edgeformer.families.weights import count_parameters
from edgeformer.formats.manifest import AttentionUse, Causality
from edgeformer.tasks import Prepared


class CRTNetwork(Network):
    """See :class:`~edgeformer.families.network.Network`."""

    def build(self, recipe: Any, place: Place) -> tuple[CRT, AttentionUse]:
        """CRT-Deep with fresh weights; its attention is always torch's SDPA."""
        return build_crt(recipe.model), AttentionUse(requested="sdpa", used="sdpa")

    def loss(self, model: nn.Module, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy summed over the tokens, weighted over the exits (paper B, eq. 5); parts: every exit."""
        training, own = recipe.training, _own(model)
        own.checkpointing = training.checkpointing

        def loss(wrapped: nn.Module, batch: Batch) -> Losses:
            states = wrapped(batch["input_ids"], batch.get("positions"))
            losses = exit_losses(own, states, batch["targets"], chunked=training.chunked_loss)
            parts = {f"loss_exit{loop}": loss for loop, loss in losses.items() if loop != own.loops}
            return Losses(weighted(losses, training.exit_weight), {**parts, "loss_final": losses[own.loops]})

        return loss

    def scorer(self, model: nn.Module) -> TokenLosses:
        """Losses and confidence of every exit."""
        return TokenLosses(_own(model))

    def exits(self, model: nn.Module) -> CRTExits:
        """See :meth:`Network.exits`."""
        return CRTExits(_own(model))

    def needed(self, model: nn.Module) -> dict[int, int]:
        """No head but the exit's own, no encoding of a loop behind it."""
        own = _own(model)
        heads = count_parameters(own.exit_heads) + count_parameters(own.head)
        shared, width = count_parameters(own) - heads, own.loop_encodings.shape[1]
        return {loop: shared + count_parameters(own.head_of(loop)) - (own.loops - loop) * width for loop in own.exits}

    def trace(self, model: nn.Module, inputs: Sequence[str], *, steps: bool) -> Graphs:
        """The block is traced once, however deep the loop; a model that looks ahead gets no graph with caches."""
        own = _own(model)
        pieces, parts = trace_pieces(own)
        exits, decode = compose_exits(own, pieces), compose_decode(own, parts) if parts else None
        return Graphs(exits, parts if steps else {}, decode, shared_weights=True)

    def whole(self, model: nn.Module) -> nn.Module:
        """See :meth:`Network.whole`."""
        return _LastExit(_own(model))

    def causality(self, model: nn.Module, seed: int = 0) -> Causality:
        """See :meth:`Network.causality`."""
        return probe_causality(_own(model), seed=seed)

    def decoder(self, model: nn.Module) -> CachedLoops:
        """See :meth:`Network.decoder`."""
        return CachedLoops(_own(model))


class _LastExit(nn.Module):
    """The whole of CRT-Deep as one module: input_ids int64 [B, T] → logits float32 [B, T, V]."""

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        return self.model.logits(input_ids)


def build_crt(config: Any) -> CRT:
    """CRT-Deep with fresh weights, from a :class:`~edgeformer.families.crt.config.CRTConfig`."""
    return CRT(**config.model_dump(exclude={"kind"}))


def _own(model: nn.Module) -> CRT:
    assert isinstance(model, CRT)
    return model


NETWORK = CRTNetwork()
