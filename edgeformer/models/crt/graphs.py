"""CRT-Deep as ONNX graphs: the parts that are traced, and the deep graphs that are composed of them.

A host runs embed, then the loop graph as often as it likes, then a readout. The parts with caches take and return what
is kept of earlier tokens, so that the same graphs read a prompt, write a token, and let waiting tokens catch up (see
:mod:`edgeformer.models.crt.cache`, whose functions they are made of). ``past`` is 0 at the start of a text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir
import torch
from torch import Tensor, nn

from edgeformer.models.crt.cache import cached_block, cached_embedding, convolution_context, require_causal
from edgeformer.models.crt.model import CRT
from edgeformer.models.tracing import Composer, GraphSpec, Piece, export_graph, like, state_name
from edgeformer.tasks.early_exit import exit_logits

Pieces = dict[str, onnx_ir.Model]

EMBED, BLOCK = "text_embed", "block"
# Of the examples; a size of 0 or 1 would become a constant of the graph. All differ, so that none is taken for another.
_BATCH, _NEW, _PAST = 2, 3, 5
_NEW_AXES, _PAST_AXES = {0: "batch", 1: "sequence"}, {0: "batch", 2: "past"}
_AXES = {
    **dict.fromkeys(("input_ids", "position_ids", "state"), _NEW_AXES),
    **dict.fromkeys(("past_key", "past_value"), _PAST_AXES),
    "past_conv": {0: "batch"},
}


class CRTExits(nn.Module):
    """CRT-Deep with all its exits, through their own heads."""

    def __init__(self, model: CRT) -> None:
        super().__init__()
        self.model = model
        self.exits = model.exits
        self.outputs = (*map(exit_logits, self.exits), *map(state_name, range(1, model.loops + 1)))

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        """input_ids int64 [B, T] → logits [B, T, V] per exit, then the states [B, T, C] of every loop; float32."""
        x = self.model.embed(input_ids)
        logits, states = [], []
        for loop in range(1, self.model.loops + 1):
            x = self.model.block(x, self.model.loop_encodings[loop - 1])
            states.append(x.float())
            if loop in self.exits:
                logits.append(self.model.head_of(loop)(x).float())
        return (*logits, *states)


def _run_loop(
    model: CRT, state: Tensor, loop: Tensor, past_key: Tensor, past_value: Tensor, past_conv: Tensor
) -> tuple[Tensor, ...]:
    """New tokens through one loop.

    Args:
        state: [B, S, d].
        loop: its number from 0, int64 [1].
        past_key, past_value: of the tokens before, [B, H, past, D].
        past_conv: the inputs that the convolutions need of them, [B, C, d].

    Returns:
        The next state; keys and values [B, H, past + S, D]; convolution inputs behind the new tokens.
    """
    present: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of new tokens to all tokens up to each; q, k, v [B, H, n, D] → the same shape.

        Written out, and not as torch's SDPA: that is exported as copies of all keys, scaled and transposed, for every
        token. Softmax is computed in float32.
        """
        keys, values = torch.cat((past_key, k), dim=2), torch.cat((past_value, v), dim=2)
        present[:] = keys, values
        scores = (q * q.shape[-1] ** -0.5) @ keys.transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(past_key.shape[2])
        weights = scores.float().masked_fill(~seen, -torch.inf).softmax(-1)
        result: Tensor = weights.to(q.dtype) @ values
        return result

    encoding = model.loop_encodings.index_select(0, loop)
    state, present_conv = cached_block(model, state, encoding, attend, past_conv)
    return (state, *present, present_conv)


class CRTReadout(nn.Module):
    """State [B, S, d] after ``loop`` (1 … L) → logits float32 [B, S, V] of the head that answers there."""

    def __init__(self, model: CRT, loop: int) -> None:
        super().__init__()
        self.head = model.head_of(loop)

    def forward(self, state: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(state)
        return logits.float()


def trace_pieces(model: CRT) -> tuple[Pieces, Pieces]:
    """What the deep graphs are composed of: the pieces of the full text, and the parts of the step bundle.

    Heads are in both; of a model that looks ahead, whose states cannot be kept, the second is empty.
    """
    ids, encoding = torch.ones(_BATCH, _NEW, dtype=torch.int64), model.loop_encodings[0].detach()
    text = {
        EMBED: _spec(model, model.embed, {"input_ids": ids}, ("state",)),
        BLOCK: _spec(model, model.block, {"state": _state(model), "encoding": encoding}, ("next_state",)),
    }
    heads = _readout_specs(model)
    steps = step_specs(model) if model.causal else {}
    graphs = {name: export_graph(spec) for name, spec in {**text, **steps, **heads}.items()}
    return {name: graphs[name] for name in (*text, *heads)}, {name: graphs[name] for name in steps}


def _spec(model: CRT, forward: Callable[..., Any], inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> GraphSpec:
    """The spec of a piece; inputs that are not in ``_AXES`` have no dynamic axis."""
    axes = {name: _AXES[name] for name in inputs if name in _AXES}
    sizes = {size for names in axes.values() for size in names.values() if size != "batch"}
    longest = dict.fromkeys(sizes, model.max_positions)
    return GraphSpec(Piece(model, forward), inputs, axes, outputs, longest)


def step_specs(model: CRT) -> dict[str, GraphSpec]:
    """Part → spec: ``embed``, ``loop``, ``readout`` (of the last loop), and a part for every other head.

    Those are ``readout_exit`` where the exits share a head, else ``readout_exit2``, ``readout_exit4``…; none where they
    are tied to the last one. Raises InputError where the model looks ahead.
    """
    require_causal(model)
    attention, weight = model.attention, model.head.weight
    kept = weight.new_zeros(_BATCH, attention.heads, _PAST, attention.head_size)
    conv = [weight.new_zeros(_BATCH, convolution_context(trm), weight.shape[1]) for trm in (model.refine, model.trm)]
    text = {
        "input_ids": torch.zeros(_BATCH, _NEW, dtype=torch.int64),
        "position_ids": torch.arange(_PAST, _PAST + _NEW).repeat(_BATCH, 1),
        "past_conv": conv[0],
    }
    loop = {
        "state": _state(model),
        "loop": torch.zeros(1, dtype=torch.int64),
        "past_key": kept,
        "past_value": kept.clone(),
        "past_conv": conv[1],
    }
    present = ("next_state", "present_key", "present_value", "present_conv")
    return {
        "embed": _spec(model, partial(cached_embedding, model), text, ("state", "present_conv")),
        "loop": _spec(model, partial(_run_loop, model), loop, present),
        **_readout_specs(model),
    }


def _readout_specs(model: CRT) -> dict[str, GraphSpec]:
    """A part for every head; also of a model that looks ahead."""
    heads = {"readout": model.loops}
    if "shared" in model.exit_heads and len(model.exits) > 1:
        heads["readout_exit"] = model.exits[0]
    heads |= {f"readout_exit{name}": int(name) for name in model.exit_heads if name != "shared"}
    inputs, axes = {"state": _state(model)}, {"state": _NEW_AXES}
    return {part: GraphSpec(CRTReadout(model, loop), inputs, axes) for part, loop in heads.items()}


def _state(model: CRT) -> Tensor:
    """A state in the matrices' type."""
    weight = model.head.weight
    return weight.new_zeros(_BATCH, _NEW, weight.shape[1])


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
            part = "readout_exit" if "shared" in model.exit_heads else f"readout_exit{loop}"
            own = loop < model.loops and len(model.exit_heads) > 0
            logits[exit_logits(loop)] = composer.call(part if own else "readout", {"state": x})["logits"]
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
