"""The looped decoder's torch half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeformer.models.adapter import count_parameters
from edgeformer.models.decoder.graphs import compose_decode, compose_exits, compose_steps, trace_pieces
from edgeformer.models.decoder.model import CachedDecoder, DecoderModel, TiedHead
from edgeformer.models.language_adapter import LanguageAdapter
from edgeformer.models.tracing import Graphs


class DecoderAdapter(LanguageAdapter):
    """See :class:`~edgeformer.models.adapter.ModelAdapter`."""

    def build(self, recipe: Any) -> DecoderModel:
        return DecoderModel(recipe.model)

    def needed(self, model: DecoderModel) -> dict[int, int]:
        """Count a tied table twice: ONNX needs it by rows to look up tokens, and by columns in the head's product."""
        tied = model.head.weight.numel() if isinstance(model.head, TiedHead) else 0
        return dict.fromkeys(model.exits, count_parameters(model) + tied)

    def trace(self, model: DecoderModel, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None) -> Graphs:
        """A layer is traced once, with and without caches, for all layers and iterations."""
        pieces = trace_pieces(model)
        parts = compose_steps(model, pieces) if steps else {}
        exits, decode = compose_exits(model, pieces), compose_decode(model, pieces)
        return Graphs(exits, parts, decode, shared_weights=True, in_blocks=True)

    def decoder(self, model: DecoderModel) -> CachedDecoder:
        return CachedDecoder(model)


ADAPTER = DecoderAdapter()
