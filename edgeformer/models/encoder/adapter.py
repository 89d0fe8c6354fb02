"""The encoder's torch half: building, ONNX graphs.

All layers are alike but for their weights. So one layer is traced with its weights as inputs, and the graphs are
composed of calls of it. A second one is traced for the answer, which computes the position of [CLS] alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir
import torch
from torch import Tensor, nn

from edgeformer.models.adapter import ModelAdapter, sharing_copy
from edgeformer.models.blocks.tracing import (
    BATCH,
    TOKENS,
    Composer,
    Graphs,
    GraphSpec,
    Piece,
    convert_graph_to_fp16,
    export_graph,
    layer_spec,
    state_name,
    text_spec,
)
from edgeformer.models.encoder.model import ALL, FIRST, EncoderClassifier, FirstRow, exported_form
from edgeformer.tasks.early_exit import exit_logits

_EMBED, _ARGUMENTS, _LAYER, _ANSWER, _READOUT = "embed", "layer_arguments", "layer", "answer_layer", "readout"
_STATE_AXES = {0: "batch", 1: "sequence"}
_ARGUMENT_AXES = {"cos": {0: "sequence"}, "sin": {0: "sequence"}, "mask": {0: "batch", 3: "sequence"}}


class EncoderAdapter(ModelAdapter):
    def build(self, recipe: Any) -> EncoderClassifier:
        return EncoderClassifier(recipe.model, recipe.classes, per_token=recipe.per_token)

    def exported(self, model: EncoderClassifier) -> EncoderClassifier:
        exported = exported_form(model)
        exported.types = FirstRow(exported.types)  # type: ignore[assignment]
        return exported

    def trim(self, model: EncoderClassifier, kept: Tensor) -> EncoderClassifier:
        trimmed = sharing_copy(model)
        trimmed.tokens = nn.Embedding(len(kept), model.tokens.embedding_dim)
        trimmed.tokens.weight = nn.Parameter(model.tokens.weight.detach()[kept])
        return trimmed.train(model.training)

    def trace(
        self, model: EncoderClassifier, inputs: Sequence[str], *, steps: bool, base: Graphs | None = None
    ) -> Graphs:
        """Trace the pieces, and compose the graph of all exits and, with ``steps``, the parts of the step artifact.

        FP16 pieces are converted from the FP32 ones. A trimmed model needs only a new embed, which alone reads the
        token table. The loop graph of the step artifact is one iteration with all positions.
        """
        # 1. Describe the pieces. Layers have their weights as inputs, at the end.
        model = exported_form(model)
        longest = {"sequence": len(model.cos)}
        weight, layer = model.tokens.weight, model.layers[0]
        example = {"state": weight.new_zeros(BATCH, TOKENS, weight.shape[1])}
        is_real = torch.ones(BATCH, TOKENS, dtype=torch.int64)
        is_real[1, 1:] = 0
        text = {**example, "attention_mask": is_real}
        axes = {"state": _STATE_AXES, "attention_mask": _STATE_AXES}
        layer_inputs: Any = zip(_ARGUMENT_AXES, model.layer_arguments(example["state"], is_real), strict=True)
        tensors = {**example, **dict(layer_inputs)}
        specs = {
            _EMBED: text_spec(Piece(model, model.embed), ("input_ids",), len(model.cos), ("state",)),
            _ARGUMENTS: GraphSpec(Piece(model, model.layer_arguments), text, axes, tuple(_ARGUMENT_AXES), longest),
            _READOUT: GraphSpec(Piece(model, model.readout), example, {"state": _STATE_AXES}, longest=longest),
        }
        layer_axes = {"state": _STATE_AXES, **_ARGUMENT_AXES}
        for piece, queries in ((_LAYER, ALL), *(() if model.per_token else ((_ANSWER, FIRST),))):
            specs[piece] = layer_spec(layer, tensors, layer_axes, ("next_state",), longest, queries)

        # 2. Trace or convert them.
        pieces: dict[str, onnx_ir.Model] = {}
        for name, spec in specs.items():
            if base is not None and model.tokens.weight.dtype == torch.float16:
                pieces[name] = convert_graph_to_fp16(base.pieces[name], spec)
            else:
                pieces[name] = base.pieces[name] if base is not None and name != _EMBED else export_graph(spec)

        # 3. Compose the graphs.
        composer = _EncoderComposer(model, pieces)
        ids, mask = composer.input(_EMBED, "input_ids"), composer.input(_ARGUMENTS, "attention_mask")
        h = composer.call(_EMBED, {"input_ids": ids})["state"]
        arguments = composer.call(_ARGUMENTS, {"state": h, "attention_mask": mask})
        logits: dict[str, onnx_ir.Value] = {}
        states: dict[str, onnx_ir.Value] = {}
        for exit_ in model.exits:
            last_layers = (_ANSWER, _LAYER) if exit_ < model.iterations else (_ANSWER,)
            last_layers = (_LAYER,) if model.per_token else last_layers
            answer, *states_after = composer.iterate(h, arguments, *last_layers)
            logits[exit_logits(exit_)] = composer.call(_READOUT, {"state": answer})["logits"]
            h = states_after[0] if states_after else answer
            states[state_name(exit_)] = composer.to_float32(h)
        exits = composer.finish([ids, mask], {**logits, **states})
        if not steps:
            return Graphs(exits, pieces=pieces)

        composer = _EncoderComposer(model, pieces)
        values = {name: composer.input(_ARGUMENTS, name) for name in ("state", "attention_mask")}
        (state,) = composer.iterate(values["state"], composer.call(_ARGUMENTS, values), _LAYER)
        loop = composer.finish([*values.values()], {"next_state": state})
        return Graphs(exits, {_EMBED: pieces[_EMBED], "loop": loop, _READOUT: pieces[_READOUT]}, pieces=pieces)


class _EncoderComposer(Composer):
    def __init__(self, model: EncoderClassifier, pieces: Mapping[str, onnx_ir.Model]) -> None:
        super().__init__(pieces)
        self._layers = self.store_layers(model.layers)
        dtype = model.tokens.weight.new_zeros(()).numpy().dtype
        self._scale = self.constant("residual_scale", np.array(model.residual_scale, dtype))
        self._has_residual = bool(model.residual_scale)
        slice_first = {"cls_start": 0, "cls_end": 1, "cls_axis": 1}
        self._cls_bounds = [self.constant(name, np.array([number])) for name, number in slice_first.items()]

    def iterate(
        self, state: onnx_ir.Value, arguments: dict[str, onnx_ir.Value], *last_layers: str
    ) -> list[onnx_ir.Value]:
        """Apply all layers as ``EncoderClassifier.iterate`` does; one result for each kind of last layer."""
        h = state
        for weights in self._layers[:-1]:
            h = self.call(_LAYER, {"state": h, **arguments, **weights})["next_state"]
        inputs = {"state": h, **arguments, **self._layers[-1]}
        results = [self.call(last_layer, inputs)["next_state"] for last_layer in last_layers]
        if not self._has_residual:
            return results
        sums = []
        for last_layer, result in zip(last_layers, results, strict=True):
            start = state
            if last_layer == _ANSWER:
                start = self.node("Slice", state, *self._cls_bounds, like=result)
            sums.append(self.node("Add", result, self.node("Mul", self._scale, start, like=result), like=result))
        return sums


ADAPTER = EncoderAdapter()
