"""The encoder's torch half."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from edgeformer.families.encoder.flash import choose_attention
from edgeformer.families.encoder.graphs import EncoderExits, step_specs
from edgeformer.families.encoder.layers import SelfAttention, sdpa
from edgeformer.families.encoder.model import EncoderClassifier
from edgeformer.families.network import Loss, Network, Place, classification_loss
from edgeformer.families.tracing import Graphs, export_graph, text_spec
from edgeformer.families.weights import count_parameters
from edgeformer.formats.manifest import AttentionUse
from edgeformer.tasks import Prepared


class EncoderNetwork(Network):
    """See :class:`~edgeformer.families.network.Network`."""

    def build(self, recipe: Any, place: Place) -> tuple[EncoderClassifier, AttentionUse]:
        """Flash attention where the recipe asks for it and the place has it; for export always torch's SDPA."""
        config, requested = recipe.model, recipe.model.attention
        chosen, reason = (sdpa, None) if place.for_export else choose_attention(requested, *_where(place))
        options = config.model_dump(exclude={"kind", "attention"})
        used = AttentionUse(requested=requested, used="sdpa" if chosen is sdpa else requested, reason=reason)
        return EncoderClassifier(classes=recipe.classes, attention=chosen, **options), used

    def loss(self, model: nn.Module, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy."""
        return classification_loss(recipe.training, prepared)

    def scorer(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return _own(model)

    def exits(self, model: nn.Module) -> EncoderExits:
        """See :meth:`Network.exits`."""
        return EncoderExits(_own(model))

    def needed(self, model: nn.Module) -> dict[int, int]:
        """Every iteration goes through all layers and the one head."""
        return dict.fromkeys(EncoderExits(_own(model)).exits, count_parameters(model))

    def trace(self, model: nn.Module, inputs: Sequence[str], *, steps: bool) -> Graphs:
        """See :meth:`Network.trace`."""
        own = _own(model)
        exits = EncoderExits(own)
        full = text_spec(exits, inputs, len(own.cos), exits.outputs)
        parts = step_specs(own) if steps else {}
        return Graphs(export_graph(full), {part: export_graph(spec) for part, spec in parts.items()})

    def trim(self, model: nn.Module, kept: Tensor) -> EncoderClassifier:
        """See :meth:`Network.trim`; all other parameters are the same tensors, not copies."""
        own = _own(model)
        shared = [*own.parameters(), *own.buffers()]
        trimmed = copy.deepcopy(own, {id(tensor): tensor for tensor in shared})
        trimmed.tokens = nn.Embedding(len(kept), own.tokens.embedding_dim)
        trimmed.tokens.weight = nn.Parameter(own.tokens.weight.detach()[kept])
        return trimmed.train(own.training)

    def as_on_cuda(self, model: nn.Module) -> nn.Module:
        """With dropout, the CPU's attention holds all its weights [B, H, S, S].

        CUDA's fused kernels never do, and neither does the CPU's kernel without dropout, which takes its place here.
        """
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.dropout = 0.0
        return model


def _where(place: Place) -> tuple[str, str]:
    return place.device_type, place.precision


def _own(model: nn.Module) -> EncoderClassifier:
    assert isinstance(model, EncoderClassifier)
    return model


NETWORK = EncoderNetwork()
