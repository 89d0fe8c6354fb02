"""CRT-Deep's torch half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgeformer.models.adapter import LanguageAdapter, count_parameters
from edgeformer.models.blocks.tracing import Graphs
from edgeformer.models.crt.graphs import compose_decode, compose_exits, trace_pieces
from edgeformer.models.crt.model import CRT, CachedLoops


class CRTAdapter(LanguageAdapter):
    """See :class:`~edgeformer.models.adapter.ModelAdapter`."""

    def build(self, recipe: Any) -> CRT:
        return CRT(recipe.model)

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

    def decoder(self, model: CRT) -> CachedLoops:
        return CachedLoops(model)


ADAPTER = CRTAdapter()
