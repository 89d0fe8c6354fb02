"""The encoder's torch half: building, flash attention, ONNX graphs.

All layers are alike but for their weights. So one layer is traced with its weights as inputs, and the graphs are
composed of calls of it. A second one is traced for the answer, which computes the position of [CLS] alone.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import AttentionUse
from edgeformer.models.adapter import BuildTarget, Loss, ModelAdapter, count_parameters, sharing_copy
from edgeformer.models.distillation import classification_loss
from edgeformer.models.encoder.model import Attention, EncoderClassifier, SelfAttention, exported_form, sdpa
from edgeformer.models.tracing import (
    BATCH,
    TOKENS,
    Composer,
    Graphs,
    GraphSpec,
    Piece,
    convert_graph_to_fp16,
    export_graph,
    graph_input,
    state_name,
    text_spec,
)
from edgeformer.tasks import Prepared
from edgeformer.tasks.early_exit import exit_logits

Pieces = dict[str, onnx_ir.Model]

_EMBED, _ARGUMENTS, _LAYER, _ANSWER, _READOUT = "embed", "layer_arguments", "layer", "answer_layer", "readout"
_STATE_AXES = {0: "batch", 1: "sequence"}
_ARGUMENT_AXES = {"cos": {0: "sequence"}, "sin": {0: "sequence"}, "mask": {0: "batch", 3: "sequence"}}


def choose_attention(requested: str, device_type: str, precision: str) -> tuple[Attention, str | None]:
    """Return the function for ``attention: sdpa | flash``, and a reason if it is not the requested one."""
    reason = None
    if requested != "flash":
        return sdpa, None
    if device_type != "cuda":
        reason = f"flash-attn needs a CUDA card and the model runs on the {device_type.upper()}"
    elif precision == "fp32":
        reason = "flash-attn computes in bf16 or fp16 and training.precision is fp32"
    elif not torch.cuda.is_available():
        reason = "flash-attn needs a CUDA card and torch sees none"
    elif importlib.util.find_spec("flash_attn") is None:
        reason = f"the package flash-attn, which is built from source, is not installed: {install_hint('flash')}"
    elif (capability := torch.cuda.get_device_capability()) < (8, 0):
        reason = "flash-attn needs compute capability 8.0 or newer; this card has {}.{}".format(*capability)
    return (sdpa, reason) if reason else (flash, None)


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Compute attention with flash-attn: [B, H, S, D] → [B, H, S, D] in BF16 or FP16; padded rows without padding.

    SDPA computes float32 inputs (evaluation without autocast), which flash-attn does not take, and the single query of
    the last layer, which gains nothing.
    """
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[2] != k.shape[2]:
        return sdpa(q, k, v, mask, dropout)
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, H, D]
    if mask is None:
        mixed: Tensor = flash_attn_func(q, k, v, dropout_p=dropout)
        return mixed.transpose(1, 2)
    real = mask[:, 0, 0] == 0  # [B, S]
    lengths = real.sum(-1, dtype=torch.int32)
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max())
    packed = flash_attn_varlen_func(q[real], k[real], v[real], ends, ends, longest, longest, dropout_p=dropout)
    mixed = q.new_zeros(q.shape)
    mixed[real] = packed
    return mixed.transpose(1, 2)


class EncoderExits(nn.Module):
    """The classifier with an exit after every iteration, through its only head. Only the last exit is trained."""

    def __init__(self, model: EncoderClassifier) -> None:
        super().__init__()
        self.model = model
        self.exits = tuple(range(1, model.iterations + 1))
        self.outputs = (*map(exit_logits, self.exits), *map(state_name, self.exits))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """input_ids, attention_mask int64 [B, S] → logits [B, classes] per exit, then the states.

        States are [B, S, d]; the last one is [B, 1, d], because the model computes only [CLS] there.
        """
        h = self.model.embed(input_ids)
        logits, states = [], []
        for exit_ in self.exits:
            answer = self.model.iterate(h, attention_mask, answer=True)
            logits.append(self.model.readout(answer))
            h = answer if exit_ == self.exits[-1] else self.model.iterate(h, attention_mask)
            states.append(h.float())
        return (*logits, *states)


class EncoderAdapter(ModelAdapter):
    """See :class:`~edgeformer.models.adapter.ModelAdapter`."""

    def build(self, recipe: Any, place: BuildTarget) -> tuple[EncoderClassifier, AttentionUse]:
        """Use flash attention if the recipe requests it and the device has it; always SDPA for export."""
        config, requested = recipe.model, recipe.model.attention
        candidate = "sdpa" if place.for_export else requested
        attention, reason = choose_attention(candidate, place.device_type, place.precision)
        options = config.model_dump(exclude={"kind", "attention"})
        used = AttentionUse(requested=requested, used="sdpa" if attention is sdpa else requested, reason=reason)
        return EncoderClassifier(classes=recipe.classes, attention=attention, **options), used

    def loss(self, model: EncoderClassifier, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy, or distillation from a teacher."""
        return classification_loss(recipe, prepared)

    def exits(self, model: EncoderClassifier) -> EncoderExits:
        return EncoderExits(model)

    def needed(self, model: EncoderClassifier) -> dict[int, int]:
        """Every iteration applies all layers and the only head."""
        return dict.fromkeys(EncoderExits(model).exits, count_parameters(model))

    def trace(self, model: EncoderClassifier, inputs: Sequence[str], *, steps: bool) -> Graphs:
        return encoder_graphs(model, steps=steps)

    def trace_fp16(
        self, model: EncoderClassifier, inputs: Sequence[str], fp32_graphs: Graphs, *, steps: bool
    ) -> Graphs:
        """Convert the traced FP32 pieces instead of tracing again."""
        model = exported_form(model)
        pieces = fp32_graphs.pieces
        converted = {name: convert_graph_to_fp16(pieces[name], spec) for name, spec in _specs(model).items()}
        return _compose(model, converted, steps)

    def trace_trimmed(self, model: EncoderClassifier, inputs: Sequence[str], untrimmed: Graphs | None) -> Graphs:
        return encoder_graphs(model, steps=False, untrimmed=untrimmed)

    def trim(self, model: EncoderClassifier, kept: Tensor) -> EncoderClassifier:
        trimmed = sharing_copy(model)
        trimmed.tokens = nn.Embedding(len(kept), model.tokens.embedding_dim)
        trimmed.tokens.weight = nn.Parameter(model.tokens.weight.detach()[kept])
        return trimmed.train(model.training)

    def match_cuda_memory(self, model: EncoderClassifier) -> None:
        """Remove attention dropout: with it, the CPU's kernel stores all weights [B, H, S, S]; CUDA's never does."""
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.dropout = 0.0


def encoder_graphs(model: EncoderClassifier, *, steps: bool, untrimmed: Graphs | None = None) -> Graphs:
    """Trace the graph of all exits, see :class:`EncoderExits`, and with ``steps`` the parts of the step bundle.

    Args:
        untrimmed: graphs of the same weights with another token table. Only embed reads the table, so that all other
            pieces are reused. None: everything is traced.
    """
    model = exported_form(model)
    pieces = dict(untrimmed.pieces) if untrimmed is not None else {}
    pieces.pop(_EMBED, None)
    return _compose(
        model, {name: pieces.get(name) or export_graph(spec) for name, spec in _specs(model).items()}, steps
    )


def _specs(model: EncoderClassifier) -> dict[str, GraphSpec]:
    """Return the specs of all pieces of a model in exported form."""
    max_positions = len(model.cos)
    longest = {"sequence": max_positions}
    weight = model.tokens.weight
    state = weight.new_zeros(BATCH, TOKENS, weight.shape[1])
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, 1:] = 0
    text = {"state": state, "attention_mask": mask}
    text_axes = {"state": _STATE_AXES, "attention_mask": _STATE_AXES}
    argument_names = tuple(_ARGUMENT_AXES)
    arguments: Any = dict(zip(argument_names, model.layer_arguments(state, mask), strict=True))
    layer_inputs = {"state": state, **arguments}
    return {
        _EMBED: text_spec(Piece(model, model.embed), ("input_ids",), max_positions, ("state",)),
        _ARGUMENTS: GraphSpec(Piece(model, model.layer_arguments), text, text_axes, argument_names, longest),
        _READOUT: GraphSpec(Piece(model, model.readout), {"state": state}, {"state": _STATE_AXES}, longest=longest),
        _LAYER: _layer_spec(model.layers[0], layer_inputs, None, longest),
        _ANSWER: _layer_spec(model.layers[0], layer_inputs, 1, longest),
    }


def _layer_spec(layer: nn.Module, inputs: dict[str, Tensor], queries: int | None, longest: dict[str, int]) -> GraphSpec:
    """Return the spec of a layer with its weights as inputs, after its other inputs."""
    weights = dict(layer.named_parameters())
    examples = {**inputs, **{name.replace(".", "_"): weight.detach() for name, weight in weights.items()}}

    def forward(*arguments: Tensor) -> Tensor:
        tensors, layer_weights = arguments[: len(inputs)], arguments[len(inputs) :]
        named_weights = dict(zip(weights, layer_weights, strict=True))
        return functional_call(layer, named_weights, (*tensors, queries))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # torch derives the graph's input names from the signature
    parameters = [inspect.Parameter(name, kind) for name in examples]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return GraphSpec(
        Piece(layer, forward), examples, {"state": _STATE_AXES, **_ARGUMENT_AXES}, ("next_state",), longest
    )


class _EncoderComposer(Composer):
    """Composes graphs of an encoder's traced pieces."""

    def __init__(self, model: EncoderClassifier, pieces: Pieces) -> None:
        super().__init__()
        for name, piece in pieces.items():
            self.add(name, piece)
        self._layers = [
            {
                name.replace(".", "_"): self.constant(f"layers.{number}.{name}", weight.detach().numpy())
                for name, weight in layer.named_parameters()
            }
            for number, layer in enumerate(model.layers)
        ]
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


def _compose(model: EncoderClassifier, pieces: Pieces, steps: bool) -> Graphs:
    """Compose the graph of :class:`EncoderExits`, and with ``steps`` the loop graph: one iteration, all positions."""
    composer = _EncoderComposer(model, pieces)
    ids = graph_input(pieces[_EMBED].graph.inputs[0], "input_ids")
    mask = graph_input(pieces[_ARGUMENTS].graph.inputs[1], "attention_mask")
    h = composer.call(_EMBED, {"input_ids": ids})["state"]
    arguments = composer.call(_ARGUMENTS, {"state": h, "attention_mask": mask})
    logits: dict[str, onnx_ir.Value] = {}
    states: dict[str, onnx_ir.Value] = {}
    for exit_ in range(1, model.iterations + 1):
        answer, *states_after = composer.iterate(h, arguments, _ANSWER, *([_LAYER] if exit_ < model.iterations else []))
        logits[exit_logits(exit_)] = composer.call(_READOUT, {"state": answer})["logits"]
        h = states_after[0] if states_after else answer
        states[state_name(exit_)] = composer.to_float32(h)
    exits = composer.finish([ids, mask], {**logits, **states})
    if not steps:
        return Graphs(exits, pieces=pieces)

    composer = _EncoderComposer(model, pieces)
    names = [str(value.name) for value in pieces[_ARGUMENTS].graph.inputs]
    inputs = {
        name: graph_input(value, name) for name, value in zip(names, pieces[_ARGUMENTS].graph.inputs, strict=True)
    }
    arguments = composer.call(_ARGUMENTS, inputs)
    (state,) = composer.iterate(inputs["state"], arguments, _LAYER)
    loop = composer.finish([*inputs.values()], {"next_state": state})
    return Graphs(exits, {_EMBED: pieces[_EMBED], "loop": loop, _READOUT: pieces[_READOUT]}, pieces=pieces)


ADAPTER = EncoderAdapter()
