"""The encoder as ONNX graphs: one layer is traced, whatever their number, and the graphs are composed of its calls.

What is traced is the model's exported form. All its layers are alike but for their weights, so these are arguments of
the traced layer; and so are the positions that it computes: all of them, or for the answer that of [CLS] alone.
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

from edgeformer.families.encoder.exported import exported_form
from edgeformer.families.encoder.model import EncoderClassifier
from edgeformer.families.halving import halved
from edgeformer.families.tracing import (
    Composer,
    Graphs,
    GraphSpec,
    Piece,
    export_graph,
    like,
    state_name,
    text_spec,
)
from edgeformer.tasks.early_exit import exit_logits

_EMBED, _PLACES, _LAYER, _READOUT = "embed", "places", "layer", "readout"
# Of the examples; a size of 0 or 1 would become a constant of the graph. All differ, so that none is taken for another.
_BATCH, _NEW, _ASKED = 2, 3, 4
_STATE = {0: "batch", 1: "sequence"}
_BESIDE = {"cos": {0: "sequence"}, "sin": {0: "sequence"}, "mask": {0: "batch", 3: "sequence"}}
_QUERIES = {"asked": {0: "batch", 1: "queries"}, "asked_cos": {0: "queries"}, "asked_sin": {0: "queries"}}


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
    asked = weight.new_zeros(_BATCH, _ASKED, weight.shape[1])
    queries = dict(zip(_QUERIES, (asked, *model.places(asked, None)[:2]), strict=True))
    return {
        _EMBED: text_spec(Piece(model, model.embed), ("input_ids",), longest["sequence"], ("state",)),
        _PLACES: GraphSpec(Piece(model, model.places), text, axes, tuple(_BESIDE), longest),
        _READOUT: read,
        _LAYER: _layer_spec(model, {"state": state, **beside}, queries),
    }


def _layer_spec(model: EncoderClassifier, inputs: dict[str, Tensor], queries: dict[str, Tensor]) -> GraphSpec:
    """A layer whose weights are inputs behind its own ones."""
    layer = model.layers[0]
    weights, own = dict(layer.named_parameters()), {**inputs, **queries}
    examples = {**own, **{_as_input(name): weight.detach() for name, weight in weights.items()}}

    def forward(*arguments: Tensor) -> Tensor:
        told, asked = arguments[: len(inputs)], arguments[len(inputs) : len(own)]
        given = dict(zip(weights, arguments[len(own) :], strict=True))
        result: Tensor = functional_call(layer, given, (*told, asked))
        return result

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # torch names the graph's inputs by them
    _sign(forward, [inspect.Parameter(name, kind) for name in examples])
    axes, longest = {"state": _STATE, **_BESIDE, **_QUERIES}, dict.fromkeys(("sequence", "queries"), len(model.cos))
    return GraphSpec(Piece(layer, forward), examples, axes, ("next_state",), longest)


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
        self._at = [self.composer.constant(f"cls_{at}", np.array([at])) for at in (0, 1)]
        self._heads: dict[onnx_ir.Value, onnx_ir.Value] = {}

    def iterate(
        self, state: onnx_ir.Value, beside: dict[str, onnx_ir.Value], *answers: bool
    ) -> tuple[onnx_ir.Value, ...]:
        """One pass through the layers, the last of them for each of ``answers``, see ``EncoderClassifier.iterate``."""
        h, last = state, self._weights[-1]
        for weights in self._weights[:-1]:
            h = self._layer(h, beside, weights, answer=False)
        ends = [self._layer(h, beside, last, answer=answer) for answer in answers]
        return tuple(self._residual(end, state, answer=answer) for end, answer in zip(ends, answers, strict=True))

    def _layer(
        self, h: onnx_ir.Value, beside: dict[str, onnx_ir.Value], weights: dict[str, onnx_ir.Value], *, answer: bool
    ) -> onnx_ir.Value:
        cos, sin = beside["cos"], beside["sin"]
        asked = (self._first(h, 1), self._first(cos, 0), self._first(sin, 0)) if answer else (h, cos, sin)
        queries = dict(zip(_QUERIES, asked, strict=True))
        end = self.composer.call(_LAYER, {"state": h, **beside, **queries, **weights})["next_state"]
        end.shape = asked[0].shape
        return end

    def _first(self, value: onnx_ir.Value, axis: int) -> onnx_ir.Value:
        """Of position [CLS] alone; each value is cut once."""
        if value not in self._heads:
            start, end = self._at
            cut = self._node("Slice", value, value, start, end, self._at[axis])
            assert value.shape is not None
            cut.shape = onnx_ir.Shape([1 if place == axis else size for place, size in enumerate(value.shape)])
            self._heads[value] = cut
        return self._heads[value]

    def _residual(self, end: onnx_ir.Value, start: onnx_ir.Value, *, answer: bool) -> onnx_ir.Value:
        if not self.model.residual_scale:
            return end
        start = self._first(start, 1) if answer else start
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
        answer, h = (*made.iterate(h, beside, *((True, False) if exit_ < exits[-1] else (True,))), h)[:2]
        logits[exit_logits(exit_)] = made.composer.call(_READOUT, {"state": answer})["logits"]
        states[state_name(exit_)] = made.wide(h if exit_ < exits[-1] else answer)
    return made.composer.finish([ids, mask], {**logits, **states})


def _composed_loop(made: _Composing) -> onnx_ir.Model:
    """One iteration, all positions."""
    inputs = [like(value, str(value.name)) for value in made.pieces[_PLACES].graph.inputs]
    named = {str(value.name): value for value in inputs}
    beside = made.composer.call(_PLACES, named)
    (state,) = made.iterate(named["state"], beside, False)
    return made.composer.finish(inputs, {"next_state": state})
