"""CRT-Deep's graphs: the parts that are traced, and the deep graphs that are composed of them."""

from __future__ import annotations

import numpy as np
import onnx_ir
import torch
from torch import Tensor

from edgeformer.families.composing import Composer, like
from edgeformer.families.crt.cache import convolution_context
from edgeformer.families.crt.exits import CRTBlock, CRTEmbed, CRTEmbedding, CRTLoop, CRTReadout
from edgeformer.families.crt.model import CRT
from edgeformer.families.tracing import GraphSpec, export_graph, logits_name, state_name

Pieces = dict[str, onnx_ir.Model]

EMBED, BLOCK = "text_embed", "block"
# Of the examples; a size of 0 or 1 would become a constant of the graph. All differ, so that none is taken for another.
_BATCH, _NEW, _PAST = 2, 3, 5
_ROWS = {0: "batch"}
_STATE = {0: "batch", 1: "sequence"}
_KEPT = {0: "batch", 2: "past"}


def trace_pieces(model: CRT) -> tuple[Pieces, Pieces]:
    """What the deep graphs are composed of: the pieces of the full text, and the parts of the step bundle.

    Heads are in both; of a model that looks ahead, whose states cannot be kept, the second is empty.
    """
    steps = step_specs(model) if model.causal else readout_specs(model)
    graphs = {name: export_graph(spec) for name, spec in {**_text_specs(model), **steps}.items()}
    heads = {name: graph for name, graph in graphs.items() if name.startswith("readout")}
    full = {name: graphs[name] for name in (EMBED, BLOCK)}
    return {**full, **heads}, {name: graphs[name] for name in steps} if model.causal else {}


def _text_specs(model: CRT) -> dict[str, GraphSpec]:
    """Embedding and block of whole texts, without a cache."""
    weight = model.projection.weight
    state = weight.new_zeros(2, 3, weight.shape[0])
    encoding = model.loop_encodings[0].detach()
    ids = torch.ones(2, 3, dtype=torch.int64)
    longest = {"sequence": model.max_positions}
    return {
        EMBED: GraphSpec(CRTEmbedding(model), {"input_ids": ids}, {"input_ids": _STATE}, ("state",), longest),
        BLOCK: GraphSpec(
            CRTBlock(model), {"state": state, "encoding": encoding}, {"state": _STATE}, ("next_state",), longest
        ),
    }


def compose_exits(model: CRT, pieces: Pieces) -> onnx_ir.Model:
    """The graph with the logits of every exit and the state after every loop as outputs, as ``CRTExits`` computes them.

    Args:
        pieces: the first of :func:`trace_pieces`.
    """
    composer = Composer()
    for name, piece in pieces.items():
        composer.add(name, piece)
    ids = like(pieces[EMBED].graph.inputs[0], "input_ids")
    x = composer.call(EMBED, {"input_ids": ids})["state"]
    logits: dict[str, onnx_ir.Value] = {}
    states: dict[str, onnx_ir.Value] = {}
    for loop in range(1, model.loops + 1):
        encoding = composer.constant(f"loop_encoding{loop}", model.loop_encodings[loop - 1].detach().numpy())
        x = composer.call(BLOCK, {"state": x, "encoding": encoding})["next_state"]
        wide = composer.node("Cast", [x], to=int(onnx_ir.DataType.FLOAT))
        wide.type, wide.shape = onnx_ir.TensorType(onnx_ir.DataType.FLOAT), x.shape
        states[state_name(loop)] = wide
        if loop in model.exits:
            part = readout_of(model, loop)
            logits[logits_name(loop)] = composer.call(part, {"state": x})["logits"]
    return composer.finish([ids], {**logits, **states})


def compose_decode(model: CRT, steps: Pieces) -> onnx_ir.Model:
    """All loops for the next tokens of a text, with what is kept of the earlier ones as inputs and outputs.

    Args:
        steps: the traced parts of the step bundle.
    """
    composer = Composer()
    for name in ("embed", "loop", "readout"):
        composer.add(name, steps[name])
    embed = {str(value.name): value for value in steps["embed"].graph.inputs}
    loops = {str(value.name): value for value in steps["loop"].graph.inputs}
    text = [like(embed[name], name) for name in ("input_ids", "position_ids")]
    first = like(embed["past_conv"], "past_conv.embed")
    found = composer.call("embed", {"input_ids": text[0], "position_ids": text[1], "past_conv": first})
    x, present_conv = found["state"], {"present_conv.embed": found["present_conv"]}
    keys_values: list[onnx_ir.Value] = []
    convolutions = [first]
    present: dict[str, onnx_ir.Value] = {}
    for number in range(model.loops):
        key = like(loops["past_key"], f"past_key_values.{number}.key")
        value = like(loops["past_value"], f"past_key_values.{number}.value")
        convolution = like(loops["past_conv"], f"past_conv.{number}")
        place = composer.constant(f"loop_number{number}", np.array([number], dtype=np.int64))
        kept = {"past_key": key, "past_value": value, "past_conv": convolution}
        found = composer.call("loop", {"state": x, "loop": place, **kept})
        x = found["next_state"]
        keys_values += [key, value]
        convolutions.append(convolution)
        present |= {f"present.{number}.key": found["present_key"], f"present.{number}.value": found["present_value"]}
        present_conv[f"present_conv.{number}"] = found["present_conv"]
    names, numbers = ("last_start", "last_end", "last_axis"), (-1, np.iinfo(np.int64).max, 1)
    bounds = [composer.constant(name, np.array([n], dtype=np.int64)) for name, n in zip(names, numbers, strict=True)]
    newest = composer.node("Slice", [x, *bounds])
    newest.type = x.type
    logits = composer.call("readout", {"state": newest})["logits"]
    assert logits.shape is not None
    logits.shape = onnx_ir.Shape([logits.shape[0], 1, logits.shape[2]])
    return composer.finish([*text, *keys_values, *convolutions], {"logits": logits, **present, **present_conv})


def step_specs(model: CRT) -> dict[str, GraphSpec]:
    """Part → spec: ``embed``, ``loop``, ``readout`` (of the last loop), and a part for every other head.

    Those are ``readout_exit`` where the exits share a head, else ``readout_exit2``, ``readout_exit4``…; none where they
    are tied to the last one.

    Raises:
        InputError: the model looks ahead.
    """
    longest = {"sequence": model.max_positions, "past": model.max_positions}
    state, (key, value) = _state(model), _keys_values(model)
    embed = {**_text(), "past_conv": _convolutions(model)[0]}
    loop = {
        "state": state,
        "loop": torch.zeros(1, dtype=torch.int64),
        "past_key": key,
        "past_value": value,
        "past_conv": _convolutions(model)[1],
    }
    text, kept = {"input_ids": _STATE, "position_ids": _STATE}, {"past_key": _KEPT, "past_value": _KEPT}
    return {
        "embed": GraphSpec(
            CRTEmbed(model),
            embed,
            {**text, "past_conv": _ROWS},
            ("state", "present_conv"),
            {"sequence": model.max_positions},
        ),
        "loop": GraphSpec(
            CRTLoop(model),
            loop,
            {"state": _STATE, **kept, "past_conv": _ROWS},
            ("next_state", "present_key", "present_value", "present_conv"),
            longest,
        ),
        **readout_specs(model),
    }


def readout_specs(model: CRT) -> dict[str, GraphSpec]:
    """A part for every head; also of a model that looks ahead."""
    heads = {"readout": model.loops}
    if "shared" in model.exit_heads and len(model.exits) > 1:
        heads["readout_exit"] = model.exits[0]
    heads |= {f"readout_exit{name}": int(name) for name in model.exit_heads if name != "shared"}
    state = _state(model)
    return {
        part: GraphSpec(CRTReadout(model, loop), {"state": state}, {"state": _STATE}) for part, loop in heads.items()
    }


def readout_of(model: CRT, loop: int) -> str:
    """The part that answers after ``loop``."""
    if loop == model.loops or not model.exit_heads:
        return "readout"
    return "readout_exit" if "shared" in model.exit_heads else f"readout_exit{loop}"


def _text() -> dict[str, Tensor]:
    return {
        "input_ids": torch.zeros(_BATCH, _NEW, dtype=torch.int64),
        "position_ids": torch.arange(_PAST, _PAST + _NEW).repeat(_BATCH, 1),
    }


def _state(model: CRT) -> Tensor:
    """A state in the matrices' type."""
    weight = model.projection.weight
    return weight.new_zeros(_BATCH, _NEW, weight.shape[0])


def _keys_values(model: CRT) -> tuple[Tensor, Tensor]:
    attention, weight = model.attention, model.projection.weight
    shape = (_BATCH, attention.heads, _PAST, attention.head_size)
    return weight.new_zeros(shape), weight.new_zeros(shape)


def _convolutions(model: CRT) -> tuple[Tensor, Tensor]:
    """What is kept for the convolutions of the embedding, and of a loop."""
    weight = model.projection.weight
    embed, loop = (weight.new_zeros(_BATCH, convolution_context(trm), len(weight)) for trm in (model.refine, model.trm))
    return embed, loop
