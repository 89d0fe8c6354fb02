"""The encoder as ONNX graphs: one layer is traced, whatever their number, and the graphs are composed of its calls.

What is traced is the model's exported form. All its layers are alike but for their weights, so these are arguments of
the traced layer. A second layer is traced for the answer, which computes the position of [CLS] alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir
import torch
from torch import Tensor, nn
from torch.func import functional_call

from edgeformer.models.encoder.model import EncoderClassifier, exported_form
from edgeformer.models.fp16 import halved
from edgeformer.models.tracing import Composer, Graphs, GraphSpec, Piece, export_graph, like, state_name, text_spec
from edgeformer.tasks.early_exit import exit_logits

_EMBED, _PLACES, _LAYER, _ANSWER, _READOUT = "embed", "places", "layer", "answer_layer", "readout"
# Of the examples; a size of 0 or 1 would become a constant of the graph.
_BATCH, _NEW = 2, 3
_STATE = {0: "batch", 1: "sequence"}
_BESIDE = {"cos": {0: "sequence"}, "sin": {0: "sequence"}, "mask": {0: "batch", 3: "sequence"}}


class EncoderExits(nn.Module):
    """The classifier with an exit after every iteration, through the one head it has.

    Only the last exit was trained; the others show what fewer iterations of the same weights are worth.
    """

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.model = model
        self.exits = tuple(range(1, model.iterations + 1))
        self.outputs = (*map(exit_logits, self.exits), *map(state_name, self.exits))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """input_ids, attention_mask int64 [B, S] → logits [B, classes] per exit, then states.

        The states are [B, S, d]; the last one is [B, 1, d], for nothing else of it is ever computed.
        """
        h = self.model.embed(input_ids)
        logits, states = [], []
        for exit_ in self.exits:
            answer = self.model.iterate(h, attention_mask, answer=True)
            logits.append(self.model.readout(answer))
            h = answer if exit_ == self.exits[-1] else self.model.iterate(h, attention_mask)
            states.append(h.float())
        return (*logits, *states)


def encoder_graphs(model: EncoderClassifier, *, steps: bool, whole: Graphs | None = None) -> Graphs:
    """All exits in one graph, as :class:`EncoderExits` computes them; the parts of the step bundle where wanted.

    Args:
        whole: graphs of the same weights with another table of tokens, which nothing but embed reads: all other pieces
            are theirs. None: everything is traced.
    """
    model = exported_form(model)
    known = {name: piece for name, piece in (whole.pieces if whole is not None else {}).items() if name != _EMBED}
    pieces = {name: known[name] if name in known else export_graph(spec) for name, spec in _specs(model).items()}
    return _composed(model, pieces, steps)


def half_graphs(model: EncoderClassifier, whole: Graphs, *, steps: bool) -> Graphs:
    """As :func:`encoder_graphs`, of a model made FP16, without tracing it.

    Args:
        whole: graphs of the same model in FP32.
    """
    model = exported_form(model)
    pieces = {name: halved(whole.pieces[name], spec) for name, spec in _specs(model).items()}
    return _composed(model, pieces, steps)


def _composed(model: EncoderClassifier, pieces: dict[str, onnx_ir.Model], steps: bool) -> Graphs:
    exits = _composed_exits(_Composing(model, pieces))
    if not steps:
        return Graphs(exits, pieces=pieces)
    loop = _composed_loop(_Composing(model, pieces))
    return Graphs(exits, {_EMBED: pieces[_EMBED], "loop": loop, _READOUT: pieces[_READOUT]}, pieces=pieces)


def _specs(model: EncoderClassifier) -> dict[str, GraphSpec]:
    """What is traced."""
    longest = {"sequence": len(model.cos)}
    weight = model.tokens.weight
    state = weight.new_zeros(_BATCH, _NEW, weight.shape[1])
    mask = torch.ones(_BATCH, _NEW, dtype=torch.int64)
    mask[1, 1:] = 0
    read = GraphSpec(Piece(model, model.readout), {"state": state}, {"state": _STATE}, longest=longest)
    text = {"state": state, "attention_mask": mask}
    axes = {"state": _STATE, "attention_mask": _STATE}
    beside: Any = dict(zip(_BESIDE, model.places(state, mask), strict=True))
    layers = {_LAYER: None, _ANSWER: 1}
    return {
        _EMBED: text_spec(Piece(model, model.embed), ("input_ids",), longest["sequence"], ("state",)),
        _PLACES: GraphSpec(Piece(model, model.places), text, axes, tuple(_BESIDE), longest),
        _READOUT: read,
        **{name: _layer_spec(model, {"state": state, **beside}, queries) for name, queries in layers.items()},
    }


def _layer_spec(model: EncoderClassifier, inputs: dict[str, Tensor], queries: int | None) -> GraphSpec:
    """A layer whose weights are inputs behind its own ones."""
    layer = model.layers[0]
    weights = dict(layer.named_parameters())
    examples = {**inputs, **{_as_input(name): weight.detach() for name, weight in weights.items()}}

    def forward(*arguments: Tensor) -> Tensor:
        own, given = arguments[: len(inputs)], arguments[len(inputs) :]
        result: Tensor = functional_call(layer, dict(zip(weights, given, strict=True)), (*own, queries))
        return result

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # torch names the graph's inputs by them
    _sign(forward, [inspect.Parameter(name, kind) for name in examples])
    longest = {"sequence": len(model.cos)}
    return GraphSpec(Piece(layer, forward), examples, {"state": _STATE, **_BESIDE}, ("next_state",), longest)


def _as_input(name: str) -> str:
    return name.replace(".", "_")


def _sign(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


@dataclass
class _Composing:
    """Calls of the traced pieces of one model."""

    model: EncoderClassifier
    pieces: dict[str, onnx_ir.Model]

    def __post_init__(self) -> None:
        self.composer = Composer()
        for name, piece in self.pieces.items():
            self.composer.add(name, piece)
        self._weights = [
            {
                _as_input(name): self.composer.constant(f"layers.{number}.{name}", weight.detach().numpy())
                for name, weight in layer.named_parameters()
            }
            for number, layer in enumerate(self.model.layers)
        ]
        dtype = self.model.tokens.weight.new_zeros(()).numpy().dtype
        self._scale = self.composer.constant("residual_scale", np.array(self.model.residual_scale, dtype))
        names = (("start", 0), ("end", 1), ("axis", 1))
        self._first = [self.composer.constant(f"cls_{name}", np.array([at])) for name, at in names]

    def iterate(self, state: onnx_ir.Value, beside: dict[str, onnx_ir.Value], *ways: str) -> tuple[onnx_ir.Value, ...]:
        """One pass through the layers, the last of them in each of these ways, see ``EncoderClassifier.iterate``."""
        h, last = state, self._weights[-1]
        for weights in self._weights[:-1]:
            h = self.composer.call(_LAYER, {"state": h, **beside, **weights})["next_state"]
        ends = [self.composer.call(way, {"state": h, **beside, **last})["next_state"] for way in ways]
        return tuple(self._residual(end, state, way) for end, way in zip(ends, ways, strict=True))

    def _residual(self, end: onnx_ir.Value, start: onnx_ir.Value, way: str) -> onnx_ir.Value:
        if not self.model.residual_scale:
            return end
        if way == _ANSWER:
            start = self._node("Slice", end, start, *self._first)
        return self._node("Add", end, end, self._node("Mul", end, self._scale, start))

    def _node(self, operator: str, described: onnx_ir.Value, *inputs: onnx_ir.Value) -> onnx_ir.Value:
        value = self.composer.node(operator, inputs)
        value.type, value.shape = described.type, described.shape
        return value

    def wide(self, state: onnx_ir.Value) -> onnx_ir.Value:
        """A state in float32."""
        value = self.composer.node("Cast", [state], to=int(onnx_ir.DataType.FLOAT))
        value.type, value.shape = onnx_ir.TensorType(onnx_ir.DataType.FLOAT), state.shape
        return value


def _composed_exits(made: _Composing) -> onnx_ir.Model:
    """See :class:`EncoderExits`."""
    ids = like(made.pieces[_EMBED].graph.inputs[0], "input_ids")
    mask = like(made.pieces[_PLACES].graph.inputs[1], "attention_mask")
    h = made.composer.call(_EMBED, {"input_ids": ids})["state"]
    beside = made.composer.call(_PLACES, {"state": h, "attention_mask": mask})
    logits: dict[str, onnx_ir.Value] = {}
    states: dict[str, onnx_ir.Value] = {}
    exits = range(1, made.model.iterations + 1)
    for exit_ in exits:
        answer, h = (*made.iterate(h, beside, *((_ANSWER, _LAYER) if exit_ < exits[-1] else (_ANSWER,))), h)[:2]
        logits[exit_logits(exit_)] = made.composer.call(_READOUT, {"state": answer})["logits"]
        states[state_name(exit_)] = made.wide(h if exit_ < exits[-1] else answer)
    return made.composer.finish([ids, mask], {**logits, **states})


def _composed_loop(made: _Composing) -> onnx_ir.Model:
    """One iteration, all positions."""
    inputs = [like(value, str(value.name)) for value in made.pieces[_PLACES].graph.inputs]
    named = {str(value.name): value for value in inputs}
    beside = made.composer.call(_PLACES, named)
    (state,) = made.iterate(named["state"], beside, _LAYER)
    return made.composer.finish(inputs, {"next_state": state})
