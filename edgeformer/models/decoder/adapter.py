"""The looped decoder's torch half."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import read_run_recipe
from edgeformer.models.adapter import LanguageAdapter, count_parameters
from edgeformer.models.blocks.tracing import Graphs
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.graphs import compose_decode, compose_exits, compose_steps, trace_pieces
from edgeformer.models.decoder.model import CachedDecoder, DecoderModel, TiedHead
from edgeformer.models.weights import load_model

_FOLDED_SIZES = (
    "hidden_size", "heads", "kv_heads", "head_width", "ffn_size", "tied", "qkv_bias", "qk_norm", "rope_theta",
    "vocab_size",
)  # fmt: skip
"""Keys in which a folded model equals its teacher."""


class DecoderAdapter(LanguageAdapter):
    """See :class:`~edgeformer.models.adapter.ModelAdapter`."""

    def build(self, recipe: Any) -> DecoderModel:
        return DecoderModel(recipe.model)

    def start(self, model: DecoderModel, recipe: Any) -> tuple[str, ...]:
        """Fold the teacher's layers, if the recipe says so. Raises RecipeError: its sizes do not fit."""
        config: DecoderConfig = recipe.model
        if config.fold is None or recipe.training.teacher is None:
            return ()
        folder = Path(recipe.training.teacher)
        teacher: Any = read_run_recipe(folder).model
        depth = config.layers * config.iterations
        different = [name for name in _FOLDED_SIZES if getattr(teacher, name, None) != getattr(config, name)]
        if different or (teacher.layers, teacher.iterations) != (depth, 1):
            reason = f"differs in model.{different[0]}" if different else "has another number of layers"
            raise RecipeError(
                f"model.fold: {folder} {reason}; it must be a decoder of {depth} layers and these sizes, not looped"
            )
        source = load_model(folder).state_dict()
        state = {name: tensor for name, tensor in source.items() if not name.startswith("layers.")}
        for number, layer in enumerate(model.layers):
            stepwise = config.fold == "stepwise"
            replaced = [number * config.iterations] if stepwise else range(number, depth, config.layers)
            for name in layer.state_dict():
                parts = [source[f"layers.{other}.{name}"] for other in replaced]
                state[f"layers.{number}.{name}"] = torch.stack(parts).mean(0)
        model.load_state_dict(state)
        return ()

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
