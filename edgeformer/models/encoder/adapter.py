"""The encoder's torch half: building, flash attention, ONNX graphs.

All layers are alike but for their weights. So one layer is traced with its weights as inputs, and the graphs are
composed of calls of it. A second one is traced for the answer, which computes the position of [CLS] alone.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from edgeformer.artifacts.errors import install_hint
from edgeformer.artifacts.manifest import AttentionUse
from edgeformer.models.adapter import BuildTarget, Loss, ModelAdapter, sharing_copy
from edgeformer.models.distillation import classification_loss
from edgeformer.models.encoder.model import Attention, EncoderClassifier, SelfAttention, exported_form, sdpa
from edgeformer.models.tracing import (
    BATCH,
    TOKENS,
    Composer,
    Exits,
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

Pieces = Mapping[str, onnx_ir.Model]

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


class EncoderAdapter(ModelAdapter):
    """See :class:`~edgeformer.models.adapter.ModelAdapter`."""

    def build(self, recipe: Any, place: BuildTarget) -> tuple[EncoderClassifier, AttentionUse]:
        """Use flash attention if the recipe requests it and the device has it; always SDPA for export."""
        requested = recipe.model.attention
        candidate = "sdpa" if place.for_export else requested
        attention, reason = choose_attention(candidate, place.device_type, place.precision)
        used = AttentionUse(requested=requested, used="sdpa" if attention is sdpa else requested, reason=reason)
        return EncoderClassifier(recipe.model, recipe.classes, attention), used

    def loss(self, model: EncoderClassifier, recipe: Any, prepared: Prepared | None) -> Loss:
        """Cross-entropy, or distillation from a teacher."""
        return classification_loss(recipe, prepared)

    def exits(self, model: EncoderClassifier) -> Exits:
        return Exits(model, model.every_exit, range(1, model.iterations + 1), model.iterations)

    def trace(self, model: EncoderClassifier, inputs: Sequence[str], *, steps: bool) -> Graphs:
        return encoder_graphs(model, steps=steps)

    def trace_fp16(
        self, model: EncoderClassifier, inputs: Sequence[str], fp32_graphs: Graphs, *, steps: bool
    ) -> Graphs:
        """Convert the traced FP32 pieces instead of tracing again."""
        return encoder_graphs(model, steps=steps, fp32=fp32_graphs.pieces)

    def trace_trimmed(self, model: EncoderClassifier, inputs: Sequence[str], untrimmed: Graphs | None) -> Graphs:
        """Reuse all pieces but embed, the only one that reads the token table."""
        pieces = dict(untrimmed.pieces) if untrimmed is not None else {}
        pieces.pop(_EMBED, None)
        return encoder_graphs(model, steps=False, traced=pieces)

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


def encoder_graphs(
    model: EncoderClassifier, *, steps: bool, traced: Pieces | None = None, fp32: Pieces | None = None
) -> Graphs:
    """Trace the pieces, and compose the graph of all exits and, with ``steps``, the parts of the step bundle.

    The loop graph of the step bundle is one iteration with all positions.

    Args:
        traced: pieces of this model that need no tracing.
        fp32: pieces of the same model in FP32, which are converted instead of tracing any.
    """
    model = exported_form(model)
    if fp32 is not None:
        pieces = {name: convert_graph_to_fp16(fp32[name], spec) for name, spec in _specs(model).items()}
    else:
        pieces = {name: (traced or {}).get(name) or export_graph(spec) for name, spec in _specs(model).items()}

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
    inputs = {str(value.name): graph_input(value, str(value.name)) for value in pieces[_ARGUMENTS].graph.inputs}
    (state,) = composer.iterate(inputs["state"], composer.call(_ARGUMENTS, inputs), _LAYER)
    loop = composer.finish([*inputs.values()], {"next_state": state})
    return Graphs(exits, {_EMBED: pieces[_EMBED], "loop": loop, _READOUT: pieces[_READOUT]}, pieces=pieces)


def _specs(model: EncoderClassifier) -> dict[str, GraphSpec]:
    """Return the specs of all pieces of a model in exported form. Layers have their weights as inputs, at the end."""
    longest = {"sequence": len(model.cos)}
    weight, layer = model.tokens.weight, model.layers[0]
    state = {"state": weight.new_zeros(BATCH, TOKENS, weight.shape[1])}
    mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    mask[1, 1:] = 0
    text = {**state, "attention_mask": mask}
    axes = {"state": _STATE_AXES, "attention_mask": _STATE_AXES}
    arguments: Any = zip(_ARGUMENT_AXES, model.layer_arguments(state["state"], mask), strict=True)
    tensors = {**state, **dict(arguments)}
    specs = {
        _EMBED: text_spec(Piece(model, model.embed), ("input_ids",), len(model.cos), ("state",)),
        _ARGUMENTS: GraphSpec(Piece(model, model.layer_arguments), text, axes, tuple(_ARGUMENT_AXES), longest),
        _READOUT: GraphSpec(Piece(model, model.readout), state, {"state": _STATE_AXES}, longest=longest),
    }
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    examples = {**tensors, **{name.replace(".", "_"): weight for name, weight in weights.items()}}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # torch derives the graph's input names from the signature
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in examples])
    for piece, queries in ((_LAYER, None), (_ANSWER, 1)):

        def forward(*arguments: Tensor, queries: int | None = queries) -> Tensor:
            layer_weights = dict(zip(weights, arguments[len(tensors) :], strict=True))
            return functional_call(layer, layer_weights, (*arguments[: len(tensors)], queries))

        forward.__signature__ = signature  # type: ignore[attr-defined]
        axes = {"state": _STATE_AXES, **_ARGUMENT_AXES}
        specs[piece] = GraphSpec(Piece(layer, forward), examples, axes, ("next_state",), longest)
    return specs


class _EncoderComposer(Composer):
    """Composes graphs of an encoder's traced pieces."""

    def __init__(self, model: EncoderClassifier, pieces: Pieces) -> None:
        super().__init__(pieces)
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


ADAPTER = EncoderAdapter()
