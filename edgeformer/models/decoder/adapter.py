"""The looped decoder's torch half: a layer, traced once, and the ONNX graphs of all iterations composed of it.

The layer has its weights as inputs, so that one trace serves all layers. With caches, keys and values of earlier tokens
are inputs and outputs; ``past``, their number, is 0 at the start of a text.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from torch import Tensor, nn

from edgeformer.artifacts.errors import RecipeError
from edgeformer.models import read_run_recipe
from edgeformer.models.adapter import LanguageAdapter, count_parameters
from edgeformer.models.blocks.causal import TiedHead
from edgeformer.models.blocks.layers import MASKED, ExportedSwiGLU
from edgeformer.models.blocks.tracing import (
    BATCH,
    TOKENS,
    Composer,
    Graphs,
    GraphSpec,
    KeyValue,
    Piece,
    export_graph,
    layer_spec,
    state_name,
)
from edgeformer.models.decoder import DecoderConfig
from edgeformer.models.decoder.model import CachedDecoder, DecoderLayer, DecoderModel
from edgeformer.models.weights import load_model
from edgeformer.tasks.early_exit import exit_logits

_PAST = 5  # cached tokens of the examples; differs from BATCH and TOKENS so that no size is mistaken for another
_STATE_AXES, _CACHE_AXES = {0: "batch", 1: "sequence"}, {0: "batch", 2: "past"}
_FOLDED_SIZES = (
    "hidden_size", "heads", "kv_heads", "head_width", "ffn_size", "tied", "qkv_bias", "qk_norm", "rope_theta",
    "vocab_size",
)  # fmt: skip
"""Keys in which a folded model equals its teacher."""


class DecoderAdapter(LanguageAdapter):
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
        # 1. Trace the pieces of all graphs; ``cached_…`` are those with keys and values of earlier tokens.
        first: Any = model.layers[0]
        layer, attention = ExportedLayer(first), first.attention
        longest = {"sequence": model.max_positions, "past": model.max_positions}
        weight = model.tokens.weight
        state = {"state": weight.new_zeros(BATCH, TOKENS, weight.shape[1])}
        past = weight.new_zeros(BATCH, attention.kv_heads, _PAST, attention.head_size)
        state_axes = {"state": _STATE_AXES}
        ids = {"input_ids": torch.ones(BATCH, TOKENS, dtype=torch.int64)}
        readout = Piece(model, lambda state: model.head(state).float())
        specs = {
            "embed": GraphSpec(Piece(model, model.embed), ids, {"input_ids": _STATE_AXES}, ("state",), longest),
            "norm": GraphSpec(Piece(model.norm, model.norm.forward), state, state_axes, ("next_state",), longest),
            "readout": GraphSpec(readout, state, state_axes, longest=longest),
        }
        for prefix, caches in (("", {}), ("cached_", {"past_key": past, "past_value": past.clone()})):
            seen = {**state, **({"past_key": past} if caches else {})}
            axes = {**state_axes, **({"past_key": _CACHE_AXES} if caches else {})}
            cos, sin = _angles(model, *seen.values())
            specs[f"{prefix}angles"] = GraphSpec(
                Piece(model, partial(_angles, model)), seen, axes, ("cos", "sin"), longest
            )
            arguments = {**state, "cos": cos, "sin": sin, **caches}
            axes = {**state_axes, "cos": {1: "sequence"}, "sin": {1: "sequence"}, **dict.fromkeys(caches, _CACHE_AXES)}
            outputs = ("next_state", "present_key", "present_value") if caches else ("next_state",)
            specs[f"{prefix}layer"] = layer_spec(layer, arguments, axes, outputs, longest)
        pieces = {name: export_graph(spec) for name, spec in specs.items()}

        # 2. Compose the graph of ``DecoderModel.every_exit``.
        composer = _DecoderComposer(model, pieces)
        tokens = composer.input("embed", "input_ids")
        x = composer.call("embed", {"input_ids": tokens})["state"]
        logits: dict[str, onnx_ir.Value] = {}
        states: dict[str, onnx_ir.Value] = {}
        for loop in range(1, model.loops + 1):
            x, _ = composer.iterate(x)
            states[state_name(loop)] = composer.to_float32(x)
            if loop in model.exits:
                logits[exit_logits(loop)] = composer.call("readout", {"state": x})["logits"]
        exits = composer.finish([tokens], {**logits, **states})

        # 3. Compose the graph of all iterations for new tokens, with keys and values of every iteration and layer.
        composer, layers = _DecoderComposer(model, pieces), len(model.layers)
        tokens = composer.input("embed", "input_ids")
        x = composer.call("embed", {"input_ids": tokens})["state"]
        cached = composer.cache_inputs("cached_layer", layers * model.loops)
        present: list[KeyValue] = []
        for loop in range(model.loops):
            x, results = composer.iterate(x, cached[loop * layers : (loop + 1) * layers])
            present += results
        new = [tokens, *(value for pair in cached for value in pair)]
        decode = composer.finish(new, {"logits": composer.newest_logits(x), **composer.cache_outputs(present)})

        # 4. Compose the step artifact: embed, one iteration for new tokens, readout.
        parts: dict[str, onnx_ir.Model] = {}
        if steps:
            composer = _DecoderComposer(model, pieces)
            start, cached = composer.input("norm", "state"), composer.cache_inputs("cached_layer", layers)
            x, present = composer.iterate(start, cached)
            new = [start, *(value for pair in cached for value in pair)]
            step = composer.finish(new, {"next_state": x, **composer.cache_outputs(present)})
            parts = {"embed": pieces["embed"], "loop": step, "readout": pieces["readout"]}
        return Graphs(exits, parts, decode, shared_weights=True, in_blocks=True)

    def decoder(self, model: DecoderModel) -> CachedDecoder:
        return CachedDecoder(model)


class ExportedLayer(nn.Module):
    """A layer that computes the same in cheaper operators; it shares all parameters with the trained one."""

    def __init__(self, trained: DecoderLayer) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = trained.norm1, trained.norm2, trained.attention
        self.ffn = ExportedSwiGLU(trained.ffn)

    def forward(self, state: Tensor, cos: Tensor, sin: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """state [B, n, C] → [B, n, C], then all keys and values, if there are past ones [B, K, past, D]."""
        present: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if past:
                k, v = (torch.cat((old, new), dim=2) for old, new in zip(past, (k, v), strict=True))
                present[:] = k, v
            return grouped_attention(q, k, v)

        h = state + self.attention(self.norm1(state), cos, sin, attend=attend)
        return (h + self.ffn(self.norm2(h)), *present)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention for export, without copies of the keys and values that several heads share.

    q [B, H, n, D] of the newest tokens, k and v [B, K, S, D] → [B, H, n, D].
    """
    new, groups = q.shape[2], q.shape[1] // k.shape[1]
    hidden = torch.ones(new, k.shape[2], dtype=torch.bool).tril(k.shape[2] - new).logical_not()
    mask = hidden.to(q.dtype) * MASKED
    q = q * q.shape[-1] ** -0.5
    if groups == 1:
        return (q @ k.transpose(-1, -2) + mask).softmax(-1) @ v
    rows, heads, _, size = k.shape
    scores = q.reshape(rows, heads, groups * new, size) @ k.transpose(-1, -2)  # [B, K, groups · n, S]
    weights = (scores.reshape(rows, heads, groups, new, k.shape[2]) + mask).softmax(-1)
    return (weights.reshape(scores.shape) @ v).reshape(q.shape)


def _angles(model: DecoderModel, state: Tensor, past_key: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, n, 1, D / 2] for new tokens [B, n, C] behind the cached ones."""
    places = torch.arange(state.shape[1]) + (0 if past_key is None else past_key.shape[2])
    return model.cos.index_select(0, places)[None, :, None], model.sin.index_select(0, places)[None, :, None]


class _DecoderComposer(Composer):
    def __init__(self, model: DecoderModel, pieces: Mapping[str, onnx_ir.Model]) -> None:
        super().__init__(pieces)
        layers: Any = model.layers
        self._layers = self.store_layers(map(ExportedLayer, layers))

    def iterate(self, state: onnx_ir.Value, caches: Sequence[KeyValue] = ()) -> tuple[onnx_ir.Value, list[KeyValue]]:
        """Apply all layers and the final norm once; return the next state, and all keys and values of every layer."""
        prefix = "cached_" if caches else ""
        inputs = {"state": state, **({"past_key": caches[0][0]} if caches else {})}
        angles = self.call(f"{prefix}angles", inputs)
        present = []
        for number, weights in enumerate(self._layers):
            past = dict(zip(("past_key", "past_value"), caches[number], strict=True)) if caches else {}
            results = self.call(f"{prefix}layer", {"state": state, **angles, **past, **weights})
            state = results["next_state"]
            if caches:
                present.append((results["present_key"], results["present_value"]))
        return self.call("norm", {"state": state})["next_state"], present


ADAPTER = DecoderAdapter()
